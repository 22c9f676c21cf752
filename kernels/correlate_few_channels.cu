// Correlate, few channels per group, SIMT: depthwise, and few channels of x or of y a group. Bound by memory.
//
//     out[n, ci, i] = bias[ci] + sum over co, k of  y[n, co, i*stride + k*dilation - pad] * weight[ci, co, k]
// A thread owns POSITIONS_W consecutive positions along W of one channel, in one row, and slides along D. Each step takes
// the STRIDE_D planes of y that follow each other there: it loads what its taps reach of them from global memory into
// registers, and adds it to each of the DEPTH positions along D whose taps meet these planes. Then the oldest of these is
// complete and is stored, and the others move up. What is inside y along H and W is decided once, before the slide. The
// lanes of a warp lie along W and then H, or (channels-last) along the channels: whatever is contiguous in the result.
//
// Compile-time: kernel, stride, dilation, dtype and tile. Run-time: N, extents, padding, channels, strides.
#include "boxes.cuh"

#ifndef DTYPE
#define DTYPE FLOAT32
#endif
#ifndef KERNEL_D
#define KERNEL_D 4
#define KERNEL_H 4
#define KERNEL_W 4
#endif
#ifndef STRIDE_D
#define STRIDE_D 2
#define STRIDE_H 2
#define STRIDE_W 2
#endif
#ifndef DILATION_D
#define DILATION_D 1
#define DILATION_H 1
#define DILATION_W 1
#endif
#ifndef POSITIONS_W  // positions a thread owns along W
#define POSITIONS_W 1
#endif
#ifndef LANES_C  // threads side by side along the channels of the result
#define LANES_C 1
#endif
#ifndef HOLD_WEIGHTS  // for one channel of y a group: a thread's weights stay in registers
#define HOLD_WEIGHTS 1
#endif
#ifndef MIN_BLOCKS
#define MIN_BLOCKS 4
#endif

typedef Element<DTYPE>::Stored Stored;
typedef Element<DTYPE>::Accumulator Acc;

constexpr int THREADS = 128;
constexpr int TAPS = KERNEL_D * KERNEL_H * KERNEL_W;

typedef Axis<KERNEL_D, STRIDE_D, DILATION_D> AxisD;
constexpr int DEPTH = AxisD::REACH + 1;  // positions along D that are under way

// The columns of a row of y that a thread's positions and taps reach.
typedef Staged<KERNEL_W, STRIDE_W, DILATION_W, POSITIONS_W> AxisW;
constexpr int COLUMNS = AxisW::EXTENT;
__host__ __device__ constexpr int column_of(int t, int tap) { return t * AxisW::STEP + tap * AxisW::HOP; }
__host__ __device__ constexpr bool is_read(int column) {
    for (int t = 0; t < POSITIONS_W; ++t)
        for (int tap = 0; tap < KERNEL_W; ++tap)
            if (column_of(t, tap) == column) return true;
    return false;
}
__host__ __device__ constexpr bool has_tap(int phase) {
    for (int tap = 0; tap < KERNEL_D; ++tap)
        if (AxisD::phase_of(tap) == phase) return true;
    return false;
}
static_assert(COLUMNS <= 32, "a mask has a bit for each");

// Weights in shared memory: [channel of y][tap][lane]. An odd number of lanes spreads over the banks.
constexpr int WEIGHT = LANES_C > 1 ? LANES_C + 1 : 1;

__device__ __forceinline__ void narrow_one(Acc value, Stored& to) {
#if DTYPE == BFLOAT16 && __CUDA_ARCH__ >= 800
    to.bits = (unsigned short)floats_to_bfloat16_bits(value, 0);  // one instruction
#else
    narrow(value, to);
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    correlate_few_channels(const Stored* y, const Stored* weight, const Stored* bias, Stored* out, const Problem p) {
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    Acc* const shared = reinterpret_cast<Acc*>(shared_bytes);

    constexpr unsigned POSITIONS = THREADS / LANES_C;  // of a block
    const unsigned rows_by_tiles = (unsigned)(p.tiles[1] * p.tiles[2]);
    const unsigned tiles_q = (rows_by_tiles + POSITIONS - 1) / POSITIONS;
    unsigned index = blockIdx.x;
    const unsigned position = index % tiles_q * POSITIONS + threadIdx.x / LANES_C;
    index /= tiles_q;
    const Index length = (Index)((p.x_extent[0] + p.tiles[0] - 1) / p.tiles[0]);  // of a run along D
    const Index first_d = (Index)(index % (unsigned)p.tiles[0]) * length;
    index /= (unsigned)p.tiles[0];
    const long long first_c = (long long)(index % (unsigned)p.tiles[3]) * LANES_C, n = index / (unsigned)p.tiles[3];
    const Index last_d = min(first_d + length, (Index)p.x_extent[0]) - 1;

    // The weights of the block's channels; those that do not exist become zero.
    const int channels = (int)p.c_out;
    for (int i = threadIdx.x; i < channels * TAPS * LANES_C; i += THREADS) {
        const int tap = i % TAPS, co = i / TAPS % channels, lane = i / (TAPS * channels);
        Acc value = 0;
        if (first_c + lane < p.groups * p.c_in) {
            value = widen(weight[(first_c + lane) * p.weight_stride[0] + co * p.weight_stride[1] +
                                 tap / (KERNEL_W * KERNEL_H) * p.weight_stride[2] +
                                 tap / KERNEL_W % KERNEL_H * p.weight_stride[3] + tap % KERNEL_W * p.weight_stride[4]]);
        }
        shared[(co * TAPS + tap) * WEIGHT + lane] = value;
    }
    __syncthreads();

    const long long channel = first_c + threadIdx.x % LANES_C;
    const unsigned tiles_w = (unsigned)p.tiles[2];
    const Index h = (Index)(position / tiles_w), w = (Index)(position % tiles_w) * POSITIONS_W;
    if (position >= rows_by_tiles || channel >= p.groups * p.c_in) return;  // no barrier follows

    // A bit for each column of each row of y that exists, and where the thread starts to read.
    const Index y_h = h * STRIDE_H - (Index)p.pad[1], y_w = w * STRIDE_W - (Index)p.pad[2];
    unsigned inside[KERNEL_H];
#pragma unroll
    for (int row = 0; row < KERNEL_H; ++row) {
        inside[row] = 0;
        if (within(y_h + row * DILATION_H, p.out_extent[1])) {
#pragma unroll
            for (int column = 0; column < COLUMNS; ++column)
                inside[row] |= (unsigned)within(y_w + column * AxisW::GAP, p.out_extent[2]) << column;
        }
    }
    y += n * p.out_stride[0] + channel / p.c_in * p.c_out * p.out_stride[1] + y_h * p.out_stride[3] + y_w * p.out_stride[4];
    out += n * p.x_stride[0] + channel * p.x_stride[1] + h * p.x_stride[3] + w * p.x_stride[4];

    const Acc offset = bias ? widen(bias[channel * p.bias_stride]) : Acc(0);
    Acc acc[DEPTH][POSITIONS_W];
#pragma unroll
    for (int i = 0; i < DEPTH * POSITIONS_W; ++i) acc[i / POSITIONS_W][i % POSITIONS_W] = offset;

    const Acc* const my_weights = shared + threadIdx.x % LANES_C;
    Acc held[HOLD_WEIGHTS ? TAPS : 1];
    if (HOLD_WEIGHTS) {
#pragma unroll
        for (int tap = 0; tap < TAPS; ++tap) held[tap] = my_weights[tap * WEIGHT];
    }

    const Index y_stride_w = AxisW::GAP * (Index)p.out_stride[4];
    const long long row_step = DILATION_H * p.out_stride[3];
    // Step q adds the planes q * STRIDE_D + phase, after which position q - AxisD::REACH is complete.
#pragma unroll 1
    for (Index q = first_d; q <= last_d + AxisD::REACH; ++q) {
#pragma unroll 1
        for (int co = 0; co < (HOLD_WEIGHTS ? 1 : channels); ++co) {
#pragma unroll
            for (int phase = 0; phase < STRIDE_D; ++phase) {
                if (!has_tap(phase)) continue;
                const Index d = q * STRIDE_D + phase - (Index)p.pad[0];
                const bool exists = within(d, p.out_extent[0]);
                const Stored* from = y + d * p.out_stride[2] + co * p.out_stride[1];
                Acc value[KERNEL_H][COLUMNS];
#pragma unroll
                for (int row = 0; row < KERNEL_H; ++row) {
                    const unsigned here = exists ? inside[row] : 0;
#pragma unroll
                    for (int column = 0; column < COLUMNS; ++column) {
                        if (!is_read(column)) continue;
                        value[row][column] = 0;
                        if (here >> column & 1) value[row][column] = widen(from[column * y_stride_w]);
                    }
                    from += row_step;
                }
#pragma unroll
                for (int tap_d = 0; tap_d < KERNEL_D; ++tap_d) {
                    if (AxisD::phase_of(tap_d) != phase) continue;
#pragma unroll
                    for (int tap = 0; tap < KERNEL_H * KERNEL_W; ++tap) {
                        const int all = tap_d * KERNEL_H * KERNEL_W + tap;
                        const Acc factor =
                            HOLD_WEIGHTS ? held[HOLD_WEIGHTS ? all : 0] : my_weights[(co * TAPS + all) * WEIGHT];
#pragma unroll
                        for (int t = 0; t < POSITIONS_W; ++t)
                            acc[AxisD::REACH - AxisD::back(tap_d)][t] +=
                                value[tap / KERNEL_W][column_of(t, tap % KERNEL_W)] * factor;
                    }
                }
            }
        }
        const Index complete = q - AxisD::REACH;
        if (complete >= first_d) {
#pragma unroll
            for (int t = 0; t < POSITIONS_W; ++t)
                if (within(w + t, p.x_extent[2])) narrow_one(acc[0][t], out[complete * p.x_stride[2] + t * p.x_stride[4]]);
        }
#pragma unroll
        for (int t = 0; t < POSITIONS_W; ++t) {
#pragma unroll
            for (int i = 1; i < DEPTH; ++i) acc[i - 1][t] = acc[i][t];
            acc[DEPTH - 1][t] = offset;
        }
    }
}
