// Correlate, SIMT: the adjoint of the transposed convolution, which is a strided convolution. Any dtype, size, stride,
// dilation, groups and memory layout.
//
// Names are those of the transposed convolution x -> y: this kernel reads y and writes what has x's shape,
//     out[n, ci, i] = bias[ci] + sum over co, k of  y[n, co, i*stride + k*dilation - pad] * weight[ci, co, k].
// A block owns a box of positions i and some channels ci. Per chunk of channels co it stages the box of y that its
// taps reach and the weights in shared memory, widened to the accumulator's type and with zeros outside y. A thread
// accumulates POSITIONS_W consecutive positions for CHANNELS channels.
//
// Compile-time: kernel, stride, dilation, dtype and tile, because they unroll the taps along W and make the distances in
// shared memory constants. Run-time: N, extents, padding, channels, strides, because one binary must serve every image.
#include "boxes.cuh"

#ifndef THREADS_W  // threads of a block along W, H, D and the channels of the result
#define THREADS_W 4
#define THREADS_H 4
#define THREADS_D 8
#define THREADS_C 1
#endif
#ifndef POSITIONS_W  // positions a thread owns along W
#define POSITIONS_W 4
#endif
#ifndef CHANNELS  // channels of the result that a thread owns
#define CHANNELS 8
#endif
#ifndef CHUNK  // channels of y staged at a time
#define CHUNK 4
#endif
// Whether all taps of an axis are staged at once, or each tap in turn.
#ifndef HALO_D
#define HALO_D 0
#define HALO_H 1
#define HALO_W 1
#endif
#ifndef Y_CHANNELS_LAST  // only the order in which elements are visited; any strides are right
#define Y_CHANNELS_LAST 0
#endif
#ifndef OUT_CHANNELS_LAST
#define OUT_CHANNELS_LAST 0
#endif
#ifndef MIN_BLOCKS
#define MIN_BLOCKS 2
#endif
#ifndef SHARED_BYTES  // what the plan reserves; 0 where there is no plan
#define SHARED_BYTES 0
#endif

constexpr int THREADS = THREADS_W * THREADS_H * THREADS_D * THREADS_C;
constexpr int BOX_D = THREADS_D;
constexpr int BOX_H = THREADS_H;
constexpr int BOX_W = THREADS_W * POSITIONS_W;
constexpr int BOX_C = THREADS_C * CHANNELS;

// Taps staged at once, and how often that is repeated.
constexpr int TAPS_D = HALO_D ? KERNEL_D : 1;
constexpr int TAPS_H = HALO_H ? KERNEL_H : 1;
constexpr int TAPS_W = HALO_W ? KERNEL_W : 1;
constexpr int PASSES_D = KERNEL_D / TAPS_D;
constexpr int PASSES_H = KERNEL_H / TAPS_H;
constexpr int PASSES_W = KERNEL_W / TAPS_W;

typedef Staged<TAPS_D, STRIDE_D, DILATION_D, BOX_D> AxisD;
typedef Staged<TAPS_H, STRIDE_H, DILATION_H, BOX_H> AxisH;
typedef Staged<TAPS_W, STRIDE_W, DILATION_W, BOX_W> AxisW;

// The staged box of y. Rows and planes are padded so that a warp's 4 x 4 x 2 (W, H, D) threads, which are
// POSITIONS_W * STEP apart along W, hit different banks where the strides allow it.
struct BoxY {
    static constexpr int C = CHUNK, D = AxisD::EXTENT, H = AxisH::EXTENT, W = AxisW::EXTENT;
    static constexpr int GAP_D = AxisD::GAP, GAP_H = AxisH::GAP, GAP_W = AxisW::GAP;
    static constexpr int APART = POSITIONS_W * AxisW::STEP;
    static constexpr int ROW = APART % 2 ? W : at_residue(W, 1, 4);
    static constexpr int PLANE = THREADS_D == 1 ? H * ROW : at_residue(H * ROW, APART % 8 || AxisD::STEP > 1 ? 16 : 1, 32);
    static constexpr bool CHANNELS_LAST = Y_CHANNELS_LAST;
    static constexpr int CHANNEL = CHANNELS_LAST ? at_residue(D * PLANE, 4, 32) : D * PLANE;
};

// The staged weights: [channel of y][tap][channel of the result], rows aligned for 16-byte loads.
constexpr int W_ROW = round_up(BOX_C, 4) + 4;
constexpr int W_CHANNEL = TAPS_D * TAPS_H * TAPS_W * W_ROW;

// The result is turned in shared memory, one slice at a time: a channel of every thread, or (channels-last) one position
// of every thread.
constexpr int SLICE = OUT_CHANNELS_LAST ? BOX_D * BOX_H * THREADS_W * BOX_C : THREADS_C * BOX_D * BOX_H * BOX_W;

constexpr int Y_STAGE = round_up(CHUNK * BoxY::CHANNEL, 4);
constexpr int STAGE = Y_STAGE + CHUNK * W_CHANNEL;
constexpr int SHARED = STAGE > SLICE ? STAGE : SLICE;  // in accumulators
static_assert(THREADS % 32 == 0, "whole warps");
static_assert(SHARED_BYTES == 0 || SHARED * sizeof(Acc) == SHARED_BYTES, "the plan's shared memory is not the kernel's");

struct Block {
    Index box_d, box_h, box_w;  // first position i on each axis
    int box_c;                  // first channel of the result, counted within the group
    long long n, group;
};

__device__ __forceinline__ Block locate(const Problem& p) {
    unsigned index = blockIdx.x;
    Block b;
    b.box_w = (Index)take(index, p, 2) * BOX_W;
    b.box_h = (Index)take(index, p, 1) * BOX_H;
    b.box_c = (int)take(index, p, 3) * BOX_C;  // the blocks of other channels read the same y
    b.box_d = (Index)take(index, p, 0) * BOX_D;
    b.group = take(index, p, 4);
    b.n = index;
    return b;
}

// Copies the weights of the staged taps; channels of the result beyond the group become zero.
__device__ __forceinline__ void stage_weight(Acc* to, const Stored* weight, const Problem& p, int channels, int box_c,
                                             int first_d, int first_h, int first_w) {
    constexpr int TAPS = TAPS_D * TAPS_H * TAPS_W;
    for (int i = threadIdx.x; i < CHUNK * BOX_C * TAPS; i += THREADS) {
        const int tap_w = i % TAPS_W, tap_h = i / TAPS_W % TAPS_H, tap_d = i / (TAPS_W * TAPS_H) % TAPS_D;
        const int c = i / TAPS % CHUNK, ci = i / (TAPS * CHUNK);
        Acc value = 0;
        if (c < channels && box_c + ci < p.c_in) {
            value = widen(weight[(box_c + ci) * (Index)p.weight_stride[0] + c * (Index)p.weight_stride[1] +
                                 (first_d + tap_d) * (Index)p.weight_stride[2] +
                                 (first_h + tap_h) * (Index)p.weight_stride[3] +
                                 (first_w + tap_w) * (Index)p.weight_stride[4]]);
        }
        to[c * W_CHANNEL + ((tap_d * TAPS_H + tap_h) * TAPS_W + tap_w) * W_ROW + ci] = value;
    }
}

// Adds all staged taps and channels to the thread's accumulators.
__device__ __forceinline__ void accumulate(Acc (&acc)[POSITIONS_W][CHANNELS], const Acc* y, const Acc* weight,
                                           int channels) {
    for (int c = 0; c < channels; ++c) {
        for (int tap_d = 0; tap_d < TAPS_D; ++tap_d) {
            for (int tap_h = 0; tap_h < TAPS_H; ++tap_h) {
                const Acc* const y_row = y + c * BoxY::CHANNEL + tap_d * AxisD::HOP * BoxY::PLANE +
                                         tap_h * AxisH::HOP * BoxY::ROW;
                const Acc* const weight_row = weight + c * W_CHANNEL + (tap_d * TAPS_H + tap_h) * TAPS_W * W_ROW;
#pragma unroll
                for (int tap = 0; tap < TAPS_W; ++tap) {
                    Acc w[CHANNELS];
                    load_vector(w, weight_row + tap * W_ROW);
#pragma unroll
                    for (int t = 0; t < POSITIONS_W; ++t) {
                        const Acc value = y_row[t * AxisW::STEP + tap * AxisW::HOP];
#pragma unroll
                        for (int j = 0; j < CHANNELS; ++j) acc[t][j] += value * w[j];
                    }
                }
            }
        }
    }
}

// Writes one element of the slice that lies in shared memory.
__device__ __forceinline__ void store(Stored* out, const Stored* bias, const Problem& p, const Block& b, Acc value, int c,
                                      int d, int h, int w) {
    const int channel = b.box_c + c;
    const Index at_d = b.box_d + d, at_h = b.box_h + h, at_w = b.box_w + w;
    if (channel < p.c_in && within(at_d, p.x_extent[0]) && within(at_h, p.x_extent[1]) && within(at_w, p.x_extent[2])) {
        if (bias) value += widen(bias[(b.group * p.c_in + channel) * p.bias_stride]);
        narrow(value, out[channel * (Index)p.x_stride[1] + at_d * (Index)p.x_stride[2] + at_h * (Index)p.x_stride[3] +
                          at_w * (Index)p.x_stride[4]]);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    correlate(const Stored* y, const Stored* weight, const Stored* bias, Stored* out, const Problem p) {
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    Acc* const shared = reinterpret_cast<Acc*>(shared_bytes);
    Acc* const shared_weight = shared + Y_STAGE;

    const Block b = locate(p);
    y += b.n * p.out_stride[0] + b.group * p.c_out * p.out_stride[1];
    weight += b.group * p.c_in * p.weight_stride[0];
    out += b.n * p.x_stride[0] + b.group * p.c_in * p.x_stride[1];

    const int lane_w = threadIdx.x % THREADS_W;
    const int lane_h = threadIdx.x / THREADS_W % THREADS_H;
    const int lane_d = threadIdx.x / (THREADS_W * THREADS_H) % THREADS_D;
    const int lane_c = threadIdx.x / (THREADS_W * THREADS_H * THREADS_D);

    Acc acc[POSITIONS_W][CHANNELS];
#pragma unroll
    for (int t = 0; t < POSITIONS_W; ++t)
#pragma unroll
        for (int j = 0; j < CHANNELS; ++j) acc[t][j] = 0;

    const Acc* const my_y = shared + lane_d * AxisD::STEP * BoxY::PLANE + lane_h * AxisH::STEP * BoxY::ROW +
                            lane_w * POSITIONS_W * AxisW::STEP;
    for (int c = 0; c < p.c_out; c += CHUNK) {
        const int channels = min(CHUNK, (int)p.c_out - c);
        for (int pass_d = 0; pass_d < PASSES_D; ++pass_d) {
            for (int pass_h = 0; pass_h < PASSES_H; ++pass_h) {
                for (int pass_w = 0; pass_w < PASSES_W; ++pass_w) {
                    const Place place = {b.box_d * STRIDE_D + pass_d * DILATION_D - (Index)p.pad[0],
                                         b.box_h * STRIDE_H + pass_h * DILATION_H - (Index)p.pad[1],
                                         b.box_w * STRIDE_W + pass_w * DILATION_W - (Index)p.pad[2], p.out_extent,
                                         p.out_stride};
                    __syncthreads();
                    stage_box<BoxY, THREADS>(shared, y + c * p.out_stride[1], place,
                                             [=](int channel) { return channel < channels ? channel : -1; });
                    stage_weight(shared_weight, weight + c * p.weight_stride[1], p, channels, b.box_c, pass_d, pass_h,
                                 pass_w);
                    __syncthreads();
                    accumulate(acc, my_y, shared_weight + lane_c * CHANNELS, channels);
                }
            }
        }
    }

    // Epilogue: turn each slice in shared memory so that consecutive threads write consecutive addresses.
#if OUT_CHANNELS_LAST
    constexpr int ACROSS = THREADS % BOX_C == 0 ? BOX_C : 32;
    const int position = (lane_d * THREADS_H + lane_h) * THREADS_W + lane_w;
#pragma unroll
    for (int t = 0; t < POSITIONS_W; ++t) {
        __syncthreads();
#pragma unroll
        for (int j = 0; j < CHANNELS; ++j) shared[position * BOX_C + lane_c * CHANNELS + j] = acc[t][j];
        __syncthreads();
        for (int c = threadIdx.x % ACROSS; c < BOX_C; c += ACROSS) {
#pragma unroll 1  // the slices are unrolled already
            for (int i = threadIdx.x / ACROSS; i < BOX_D * BOX_H * THREADS_W; i += THREADS / ACROSS) {
                const int w = i % THREADS_W, h = i / THREADS_W % THREADS_H, d = i / (THREADS_W * THREADS_H);
                store(out, bias, p, b, shared[i * BOX_C + c], c, d, h, w * POSITIONS_W + t);
            }
        }
    }
#else
    constexpr int ACROSS = row_threads(BOX_W, THREADS);
    const int my_row = (lane_c * BOX_D + lane_d) * BOX_H + lane_h;
#pragma unroll
    for (int j = 0; j < CHANNELS; ++j) {
        __syncthreads();
#pragma unroll
        for (int t = 0; t < POSITIONS_W; ++t) shared[my_row * BOX_W + lane_w * POSITIONS_W + t] = acc[t][j];
        __syncthreads();
        for (int column = threadIdx.x % ACROSS; column < BOX_W; column += ACROSS) {
#pragma unroll 1  // the slices are unrolled already
            for (int row = threadIdx.x / ACROSS; row < THREADS_C * BOX_D * BOX_H; row += THREADS / ACROSS) {
                const int h = row % BOX_H, d = row / BOX_H % BOX_D, c = row / (BOX_H * BOX_D) * CHANNELS + j;
                store(out, bias, p, b, shared[row * BOX_W + column], c, d, h, column);
            }
        }
    }
#endif
}
