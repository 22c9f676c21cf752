// Gather, SIMT: the general transposed convolution. Any dtype, size, stride, dilation, groups and strides of x.
//
// A block owns a box of positions q, one phase along D and H and all phases along W, so that its outputs are whole
// consecutive rows. Per chunk of input channels it stages x (with the halo that the taps reach) and the weights of its
// taps in shared memory, already widened to the accumulator's type and with zeros outside x: what follows knows neither
// dtype nor layout nor border. A thread accumulates POSITIONS_W consecutive q of every W phase for CHANNELS outputs.
//
// Compile-time: kernel, stride, dilation, dtype and tile, because they shape the registers and unroll the taps along W.
// Run-time: N, extents, padding, channels, strides, because one binary must serve every image.
#include "common.cuh"

#ifndef THREADS_W  // threads of a block along W, H, D and the output channels
#define THREADS_W 4
#define THREADS_H 4
#define THREADS_D 8
#define THREADS_C 1
#endif
#ifndef POSITIONS_W  // positions q a thread owns along W
#define POSITIONS_W 4
#endif
#ifndef CHANNELS  // output channels a thread owns
#define CHANNELS 8
#endif
#ifndef CHUNK  // input channels staged at a time
#define CHUNK 4
#endif
// Whether all taps of an axis are staged at once with their halo, or each tap in turn (large kernels and dilations).
// Along W the latter also means one W phase a block.
#ifndef HALO_D
#define HALO_D 1
#define HALO_H 1
#define HALO_W 1
#endif
#ifndef X_CHANNELS_LAST  // only the order in which elements are visited; any strides are right
#define X_CHANNELS_LAST 0
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

typedef Axis<KERNEL_D, STRIDE_D, DILATION_D> AxisD;
typedef Axis<KERNEL_H, STRIDE_H, DILATION_H> AxisH;
typedef Axis<KERNEL_W, STRIDE_W, DILATION_W> AxisW;

constexpr int THREADS = THREADS_W * THREADS_H * THREADS_D * THREADS_C;
constexpr int BOX_D = THREADS_D;
constexpr int BOX_H = THREADS_H;
constexpr int BOX_W = THREADS_W * POSITIONS_W;
constexpr int BOX_C = THREADS_C * CHANNELS;

// Taps and halo staged at once.
constexpr int TAPS_D = HALO_D ? AxisD::MAX_TAPS : 1;
constexpr int TAPS_H = HALO_H ? AxisH::MAX_TAPS : 1;
constexpr int TAPS_W = HALO_W ? KERNEL_W : 1;
constexpr int REACH_W = HALO_W ? AxisW::REACH : 0;
constexpr int PHASES_W = HALO_W ? STRIDE_W : 1;

// The staged input box. Rows and planes are padded so that a warp's 4 x 4 x 2 (W, H, D) threads, POSITIONS_W apart, hit
// different banks.
constexpr int X_D = BOX_D + (TAPS_D - 1) * AxisD::HOP;
constexpr int X_H = BOX_H + (TAPS_H - 1) * AxisH::HOP;
constexpr int X_W = BOX_W + REACH_W;
constexpr int X_ROW = POSITIONS_W % 2 ? X_W : at_residue(X_W, 1, POSITIONS_W);
constexpr int X_PLANE = THREADS_D > 1 ? at_residue(X_H * X_ROW, 16, 32) : X_H * X_ROW;
constexpr int X_CHANNEL = X_CHANNELS_LAST ? at_residue(X_D * X_PLANE, 4, 32) : X_D * X_PLANE;

// The staged weights: [channel][tap][output channel], rows aligned for 16-byte loads.
constexpr int W_ROW = round_up(BOX_C, 4) + 4;
constexpr int W_CHANNEL = TAPS_D * TAPS_H * TAPS_W * W_ROW;

// The output is turned in shared memory, one slice at a time: an output channel of every thread, or (channels-last) one
// output position of every thread.
constexpr int ROW = BOX_W * PHASES_W;
constexpr int SLICE = OUT_CHANNELS_LAST ? BOX_D * BOX_H * THREADS_W * BOX_C : THREADS_C * BOX_D * BOX_H * ROW;

constexpr int X_STAGE = round_up(CHUNK * X_CHANNEL, 4);
constexpr int STAGE = X_STAGE + CHUNK * W_CHANNEL;
constexpr int SHARED = STAGE > SLICE ? STAGE : SLICE;  // in accumulators
static_assert(THREADS % 32 == 0, "whole warps");
static_assert(SHARED_BYTES == 0 || SHARED * sizeof(Acc) == SHARED_BYTES, "the plan's shared memory is not the kernel's");

// How many consecutive threads share one row of `width` elements: a divisor of the block that wastes little.
__host__ __device__ constexpr int row_threads(int width) {
    int best = 32;
    for (int t = 16; t <= THREADS; t += 8) {
        if (THREADS % t == 0 && ceil_div(width, t) * t <= ceil_div(width, best) * best) best = t;
    }
    return best;
}

struct Block {
    Index box_d, box_h, box_w;  // first position q on each axis
    int box_c;                  // first output channel, counted within the group
    int phase_d, phase_h, phase_w;
    long long n, group;
};

__device__ __forceinline__ Block locate(const Problem& p) {
    // W runs fastest, then the phases, which read the same x.
    unsigned index = blockIdx.x;
    Block b;
    b.box_w = (Index)take(index, p, 2) * BOX_W + (Index)p.pad[2] / STRIDE_W;
    b.phase_w = HALO_W ? 0 : (int)(index % STRIDE_W);
    index /= HALO_W ? 1 : STRIDE_W;
    b.phase_h = (int)(index % STRIDE_H);
    index /= STRIDE_H;
    b.phase_d = (int)(index % STRIDE_D);
    index /= STRIDE_D;
    b.box_h = (Index)take(index, p, 1) * BOX_H + (Index)p.pad[1] / STRIDE_H;
    b.box_d = (Index)take(index, p, 0) * BOX_D + (Index)p.pad[0] / STRIDE_D;
    b.box_c = (int)take(index, p, 3) * BOX_C;
    b.group = take(index, p, 4);
    b.n = index;
    return b;
}

// Where the element (row, column) of the staged box lies in it.
struct BoxIndex {
    int c, d, h, w;

    __device__ __forceinline__ BoxIndex(int row, int column) {
        if (X_CHANNELS_LAST) {
            c = column, w = row % X_W, h = row / X_W % X_H, d = row / (X_W * X_H);
        } else {
            w = column, h = row % X_H, d = row / X_H % X_D, c = row / (X_H * X_D);
        }
    }
};

// Copies the box of x that starts at (d0, h0, w0) into shared memory; what lies outside x becomes zero.
__device__ __forceinline__ void stage_x(Acc* to, const Stored* x, const Problem& p, int channels, Index d0, Index h0,
                                        Index w0) {
    constexpr int COLUMNS = X_CHANNELS_LAST ? CHUNK : X_W;
    constexpr int ACROSS = X_CHANNELS_LAST && THREADS % CHUNK == 0 ? CHUNK : row_threads(COLUMNS);
    constexpr int DOWN = THREADS / ACROSS;
    constexpr int ROWS = X_D * X_H * (X_CHANNELS_LAST ? X_W : CHUNK);
    constexpr int BATCH = 4;  // loads in flight a thread
    for (int column = threadIdx.x % ACROSS; column < COLUMNS; column += ACROSS) {
#pragma unroll 1
        for (int first = threadIdx.x / ACROSS; first < ROWS; first += BATCH * DOWN) {
            Acc value[BATCH];
#pragma unroll
            for (int i = 0; i < BATCH; ++i) {
                const BoxIndex box(first + i * DOWN, column);
                const Index xd = d0 + box.d, xh = h0 + box.h, xw = w0 + box.w;
                value[i] = 0;
                if (first + i * DOWN < ROWS && box.c < channels && within(xd, p.x_extent[0]) &&
                    within(xh, p.x_extent[1]) && within(xw, p.x_extent[2])) {
                    value[i] = widen(x[box.c * (Index)p.x_stride[1] + xd * (Index)p.x_stride[2] +
                                       xh * (Index)p.x_stride[3] + xw * (Index)p.x_stride[4]]);
                }
            }
#pragma unroll
            for (int i = 0; i < BATCH; ++i) {
                const BoxIndex box(first + i * DOWN, column);
                if (first + i * DOWN < ROWS)
                    to[box.c * X_CHANNEL + box.d * X_PLANE + box.h * X_ROW + box.w] = value[i];
            }
        }
    }
}

// Copies the weights of the staged taps; output channels beyond the group become zero.
__device__ __forceinline__ void stage_weight(Acc* to, const Stored* weight, const Problem& p, int channels, int box_c,
                                             int taps_d, int taps_h, int first_d, int first_h, int first_w) {
    constexpr int TAPS = TAPS_D * TAPS_H * TAPS_W;
    for (int i = threadIdx.x; i < CHUNK * BOX_C * TAPS; i += THREADS) {
        const int tap_w = i % TAPS_W, tap_h = i / TAPS_W % TAPS_H, tap_d = i / (TAPS_W * TAPS_H) % TAPS_D;
        const int co = i / TAPS % BOX_C, c = i / (TAPS * BOX_C);
        Acc value = 0;
        if (c < channels && box_c + co < p.c_out && tap_d < taps_d && tap_h < taps_h) {
            value = widen(weight[c * (Index)p.weight_stride[0] + (box_c + co) * (Index)p.weight_stride[1] +
                                 (first_d + tap_d * AxisD::STEP) * (Index)p.weight_stride[2] +
                                 (first_h + tap_h * AxisH::STEP) * (Index)p.weight_stride[3] +
                                 (first_w + tap_w) * (Index)p.weight_stride[4]]);
        }
        to[c * W_CHANNEL + ((tap_d * TAPS_H + tap_h) * TAPS_W + tap_w) * W_ROW + co] = value;
    }
}

// Adds all staged taps and channels to the thread's accumulators.
__device__ __forceinline__ void accumulate(Acc (&acc)[PHASES_W][POSITIONS_W][CHANNELS], const Acc* x, const Acc* weight,
                                           int channels, int taps_d, int taps_h) {
    for (int c = 0; c < channels; ++c) {
        for (int tap_d = 0; tap_d < taps_d; ++tap_d) {
            for (int tap_h = 0; tap_h < taps_h; ++tap_h) {
                // Later taps read further back: the last one reads the first staged plane and row.
                const Acc* x_row = x + c * X_CHANNEL + (taps_d - 1 - tap_d) * AxisD::HOP * X_PLANE +
                                   (taps_h - 1 - tap_h) * AxisH::HOP * X_ROW;
                const Acc* weight_row = weight + c * W_CHANNEL + (tap_d * TAPS_H + tap_h) * TAPS_W * W_ROW;
#pragma unroll
                for (int tap = 0; tap < TAPS_W; ++tap) {
                    Acc w[CHANNELS];
                    load_vector(w, weight_row + tap * W_ROW);
                    const int phase = HALO_W ? AxisW::phase_of(tap) : 0;
                    const int back = HALO_W ? AxisW::back(tap) : 0;
#pragma unroll
                    for (int t = 0; t < POSITIONS_W; ++t) {
                        const Acc value = x_row[REACH_W + t - back];
#pragma unroll
                        for (int j = 0; j < CHANNELS; ++j) acc[phase][t][j] += value * w[j];
                    }
                }
            }
        }
    }
}

// Writes one element of the slice that lies in shared memory.
__device__ __forceinline__ void store(Stored* out, const Stored* bias, const Problem& p, const Block& b, Acc value, int c,
                                      int d, int h, int column) {
    const int channel = b.box_c + c;
    const Index od = (b.box_d + d) * STRIDE_D + b.phase_d - (Index)p.pad[0];
    const Index oh = (b.box_h + h) * STRIDE_H + b.phase_h - (Index)p.pad[1];
    const Index ow = b.box_w * STRIDE_W - (Index)p.pad[2] + (HALO_W ? column : column * STRIDE_W + b.phase_w);
    if (channel < p.c_out && within(od, p.out_extent[0]) && within(oh, p.out_extent[1]) && within(ow, p.out_extent[2])) {
        if (bias) value += widen(bias[(b.group * p.c_out + channel) * p.bias_stride]);
        narrow(value, out[channel * (Index)p.out_stride[1] + od * (Index)p.out_stride[2] + oh * (Index)p.out_stride[3] +
                          ow * (Index)p.out_stride[4]]);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    gather(const Stored* x, const Stored* weight, const Stored* bias, Stored* out, const Problem p) {
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    Acc* const shared = reinterpret_cast<Acc*>(shared_bytes);
    Acc* const shared_weight = shared + X_STAGE;

    const Block b = locate(p);
    x += b.n * p.x_stride[0] + b.group * p.c_in * p.x_stride[1];
    weight += p.weight_first + b.group * p.weight_group_stride;
    out += b.n * p.out_stride[0] + b.group * p.c_out * p.out_stride[1];

    const int lane_w = threadIdx.x % THREADS_W;
    const int lane_h = threadIdx.x / THREADS_W % THREADS_H;
    const int lane_d = threadIdx.x / (THREADS_W * THREADS_H) % THREADS_D;
    const int lane_c = threadIdx.x / (THREADS_W * THREADS_H * THREADS_D);

    Acc acc[PHASES_W][POSITIONS_W][CHANNELS];
#pragma unroll
    for (int r = 0; r < PHASES_W; ++r)
#pragma unroll
        for (int t = 0; t < POSITIONS_W; ++t)
#pragma unroll
            for (int j = 0; j < CHANNELS; ++j) acc[r][t][j] = 0;

    const PhaseTaps<AxisD, KERNEL_D> taps_d(b.phase_d);
    const PhaseTaps<AxisH, KERNEL_H> taps_h(b.phase_h);
    const PhaseTaps<AxisW, KERNEL_W> taps_w(b.phase_w);
    // An axis is walked in passes: one pass over all its taps, or one a tap.
    const int staged_d = HALO_D ? taps_d.count : 1, staged_h = HALO_H ? taps_h.count : 1;
    const int passes_d = HALO_D ? taps_d.count > 0 : taps_d.count;
    const int passes_h = HALO_H ? taps_h.count > 0 : taps_h.count;
    const int passes_w = HALO_W ? 1 : taps_w.count;

    const Acc* const my_x = shared + lane_d * X_PLANE + lane_h * X_ROW + lane_w * POSITIONS_W;
    for (int c = 0; c < p.c_in; c += CHUNK) {
        const int channels = min(CHUNK, (int)p.c_in - c);
        for (int pass_d = 0; pass_d < passes_d; ++pass_d) {
            for (int pass_h = 0; pass_h < passes_h; ++pass_h) {
                for (int pass_w = 0; pass_w < passes_w; ++pass_w) {
                    const int tap_d = taps_d.tap(pass_d), tap_h = taps_h.tap(pass_h);
                    const int tap_w = HALO_W ? 0 : taps_w.tap(pass_w);
                    __syncthreads();
                    stage_x(shared, x + c * p.x_stride[1], p, channels,
                            b.box_d - AxisD::back(tap_d) - (staged_d - 1) * AxisD::HOP,
                            b.box_h - AxisH::back(tap_h) - (staged_h - 1) * AxisH::HOP,
                            b.box_w - (HALO_W ? REACH_W : AxisW::back(tap_w)));
                    stage_weight(shared_weight, weight + c * p.weight_stride[0], p, channels, b.box_c, staged_d, staged_h,
                                 tap_d, tap_h, tap_w);
                    __syncthreads();
                    accumulate(acc, my_x, shared_weight + lane_c * CHANNELS, channels, staged_d, staged_h);
                }
            }
        }
    }

    // Epilogue: turn each slice in shared memory so that consecutive threads write consecutive addresses.
#if OUT_CHANNELS_LAST
    constexpr int ACROSS = THREADS % BOX_C == 0 ? BOX_C : 32;
    const int position = (lane_d * THREADS_H + lane_h) * THREADS_W + lane_w;
#pragma unroll
    for (int r = 0; r < PHASES_W; ++r) {
#pragma unroll
        for (int t = 0; t < POSITIONS_W; ++t) {
            __syncthreads();
#pragma unroll
            for (int j = 0; j < CHANNELS; ++j) shared[position * BOX_C + lane_c * CHANNELS + j] = acc[r][t][j];
            __syncthreads();
            for (int c = threadIdx.x % ACROSS; c < BOX_C; c += ACROSS) {
#pragma unroll 1  // the slices are unrolled already
                for (int i = threadIdx.x / ACROSS; i < BOX_D * BOX_H * THREADS_W; i += THREADS / ACROSS) {
                    const int w = i % THREADS_W, h = i / THREADS_W % THREADS_H, d = i / (THREADS_W * THREADS_H);
                    store(out, bias, p, b, shared[i * BOX_C + c], c, d, h, (w * POSITIONS_W + t) * PHASES_W + r);
                }
            }
        }
    }
#else
    constexpr int ACROSS = row_threads(ROW);
    const int my_row = (lane_c * BOX_D + lane_d) * BOX_H + lane_h;
#pragma unroll
    for (int j = 0; j < CHANNELS; ++j) {
        __syncthreads();
#pragma unroll
        for (int t = 0; t < POSITIONS_W; ++t)
#pragma unroll
            for (int r = 0; r < PHASES_W; ++r)
                shared[my_row * ROW + (lane_w * POSITIONS_W + t) * PHASES_W + r] = acc[r][t][j];
        __syncthreads();
        for (int column = threadIdx.x % ACROSS; column < ROW; column += ACROSS) {
#pragma unroll 1  // the slices are unrolled already
            for (int row = threadIdx.x / ACROSS; row < THREADS_C * BOX_D * BOX_H; row += THREADS / ACROSS) {
                const int h = row % BOX_H, d = row / BOX_H % BOX_D, c = row / (BOX_H * BOX_D) * CHANNELS + j;
                store(out, bias, p, b, shared[row * ROW + column], c, d, h, column);
            }
        }
    }
#endif
}
