// Correlate, few channels per group, SIMT: depthwise, and few channels of x or of y a group. Bound by memory.
//
//     out[n, ci, i] = bias[ci] + sum over co, k of  y[n, co, i*stride + k*dilation - pad] * weight[ci, co, k]
// A thread owns POSITIONS_W consecutive positions along W of one channel, in one row (SHARED_W where the rows of y are
// aligned), and slides along D. Each step takes the STRIDE_D planes of y that follow each other there: it loads what its
// taps reach of them from global memory into registers, and adds it to each of the DEPTH positions along D whose taps meet
// these planes. Then the oldest of these is complete and is stored, and the others move up. What is inside y along H and W
// is decided once, before the slide. The lanes of a warp lie along W and then H, or (channels-last) along the channels:
// whatever is contiguous in the result. Along W they share the columns of aligned rows (rows.cuh); the rows of a step may be
// fetched a step ahead (AHEAD).
//
// Compile-time: kernel, stride, dilation, dtype, tile, EARLY (it follows from the padding along W), and y's stride along W
// where it is 1 or the number of channels. Run-time: N, extents, padding, channels, all other strides.
#include "rows.cuh"

#ifndef POSITIONS_W  // positions a thread owns along W
#define POSITIONS_W 2
#endif
#ifndef LANES_C  // threads side by side along the channels of the result
#define LANES_C 1
#endif
#ifndef SHARED_W  // likewise where the rows of y are aligned, so that lanes share their columns; 0: they never do
#define SHARED_W 4
#endif
#ifndef EARLY  // columns before those that such a lane loads for itself and its neighbours
#define EARLY 1
#endif
#ifndef AHEAD  // whether rows are fetched a step before they are needed
#define AHEAD 1
#endif
#ifndef HOLD_WEIGHTS  // for one channel of y a group: a thread's weights stay in registers
#define HOLD_WEIGHTS 1
#endif
#ifndef Y_STRIDE_W  // 0: known at run time
#define Y_STRIDE_W 0
#endif
#ifndef MIN_BLOCKS
#define MIN_BLOCKS 3
#endif

constexpr unsigned MAX_THREADS = 128;  // a block has fewer where the rows of a plane have fewer positions
constexpr int TAPS = KERNEL_D * KERNEL_H * KERNEL_W;

typedef Axis<KERNEL_D, STRIDE_D, DILATION_D> AxisD;
constexpr int DEPTH = AxisD::REACH + 1;  // positions along D that are under way
constexpr int PLANES = AxisD::STEP < KERNEL_D ? AxisD::STEP : KERNEL_D;  // of a step that have a tap
constexpr int HELD_PLANES = AHEAD ? PLANES : 1;

// A row of y as a thread reads it alone, and as lanes share it.
template <int POSITIONS, int FIRST_OWN>
using RowOf = Row<Stored, Acc, KERNEL_W, STRIDE_W, DILATION_W, POSITIONS, FIRST_OWN, Y_STRIDE_W>;
typedef RowOf<POSITIONS_W, -1> RowAlone;
typedef RowOf<SHARED_W ? SHARED_W : POSITIONS_W, SHARED_W ? EARLY : -1> RowShared;
static_assert(SHARED_W == 0 || LANES_C == 1, "lanes along W share columns");

// Weights in shared memory: [channel of y][tap][lane]. An odd number of lanes spreads over the banks.
constexpr int WEIGHT = LANES_C > 1 ? LANES_C + 1 : 1;

__device__ __forceinline__ void narrow_one(Acc value, Stored& to) {
#if DTYPE == BFLOAT16 && __CUDA_ARCH__ >= 800
    to.bits = (unsigned short)floats_to_bfloat16_bits(value, 0);  // one instruction
#else
    narrow(value, to);
#endif
}

struct Thread {
    const Stored* y;  // the first column that the thread loads, in plane 0 of the first channel of the group
    Stored* out;      // its first position
    Index first_d, last_d;
    Sides from;
    Range columns;             // that exist and that it loads itself, and for each row how many do
    unsigned count[KERNEL_H];
    int positions;  // that exist
};

// Stores the complete positions.
template <int POSITIONS>
__device__ __forceinline__ void store(Stored* to, const Acc (&value)[POSITIONS], const Problem& p, int positions) {
    Pack<Stored, POSITIONS> result;
#pragma unroll
    for (int t = 0; t < POSITIONS; ++t) narrow_one(value[t], result.value[t]);
    if (POSITIONS > 1 && p.x_vector) {
        if (positions > 0) *reinterpret_cast<Pack<Stored, POSITIONS>*>(to) = result;
        return;
    }
#pragma unroll
    for (int t = 0; t < POSITIONS; ++t)
        if (t < positions) to[t * p.x_stride[4]] = result.value[t];
}

template <class RowY>
__device__ __forceinline__ void slide(const Thread& me, const Acc* weights, Acc offset, const Problem& p) {
    constexpr int POSITIONS = RowY::OF_POSITIONS;
    Acc acc[DEPTH][POSITIONS];
#pragma unroll
    for (int i = 0; i < DEPTH * POSITIONS; ++i) acc[i / POSITIONS][i % POSITIONS] = offset;

    Acc held[HOLD_WEIGHTS ? TAPS : 1];
    if (HOLD_WEIGHTS) {
#pragma unroll
        for (int tap = 0; tap < TAPS; ++tap) held[tap] = weights[tap * WEIGHT];
    }

    const int channels = HOLD_WEIGHTS ? 1 : (int)p.c_out;
    const Index last_q = me.last_d + AxisD::REACH;
    const Index y_stride_w = RowY::Along::GAP * (Index)p.out_stride[4];
    const long long row_step = DILATION_H * p.out_stride[3];
    // Rows of plane q * STRIDE_D + phase of channel co, for the phase of tap `tap_d`.
    const auto fetch = [&](RowY& to, Index q, int co, int tap_d, int row) {
        const Index d = q * STRIDE_D + AxisD::phase_of(tap_d) - (Index)p.pad[0];
        const bool exists = q <= last_q && within(d, p.out_extent[0]);
        const Stored* const from = me.y + d * p.out_stride[2] + co * p.out_stride[1] + row * row_step;
        to.fetch(from, {me.columns.first, exists ? me.count[row] : 0}, y_stride_w);
    };

    RowY rows[HELD_PLANES][KERNEL_H];
    if (AHEAD) {
#pragma unroll
        for (int i = 0; i < PLANES * KERNEL_H; ++i)
            fetch(rows[i / KERNEL_H][i % KERNEL_H], me.first_d, 0, i / KERNEL_H, i % KERNEL_H);
    }
    // Step q adds the planes q * STRIDE_D + phase, after which position q - AxisD::REACH is complete.
#pragma unroll 1
    for (Index q = me.first_d; q <= last_q; ++q) {
#pragma unroll 1
        for (int co = 0; co < channels; ++co) {
            const bool last_channel = co == channels - 1;
#pragma unroll
            for (int first_tap = 0; first_tap < PLANES; ++first_tap) {  // taps of other phases each
                RowY* const plane = rows[AHEAD ? first_tap : 0];
                if (!AHEAD) {
#pragma unroll
                    for (int row = 0; row < KERNEL_H; ++row) fetch(plane[row], q, co, first_tap, row);
                }
#pragma unroll
                for (int row = 0; row < KERNEL_H; ++row) {
                    Acc value[RowY::COLUMNS];
                    plane[row].widen_all(value, me.from);
                    if (AHEAD) fetch(plane[row], last_channel ? q + 1 : q, last_channel ? 0 : co + 1, first_tap, row);
#pragma unroll
                    for (int tap_d = first_tap; tap_d < KERNEL_D; tap_d += AxisD::STEP) {
#pragma unroll
                        for (int tap_w = 0; tap_w < KERNEL_W; ++tap_w) {
                            const int tap = (tap_d * KERNEL_H + row) * KERNEL_W + tap_w;
                            const Acc factor =
                                HOLD_WEIGHTS ? held[HOLD_WEIGHTS ? tap : 0] : weights[(co * TAPS + tap) * WEIGHT];
#pragma unroll
                            for (int t = 0; t < POSITIONS; ++t)
                                acc[AxisD::REACH - AxisD::back(tap_d)][t] += value[RowY::column(t, tap_w)] * factor;
                        }
                    }
                }
            }
        }
        const Index complete = q - AxisD::REACH;
        store(me.out + complete * p.x_stride[2], acc[0], p, complete >= me.first_d ? me.positions : 0);
#pragma unroll
        for (int t = 0; t < POSITIONS; ++t) {
#pragma unroll
            for (int i = 1; i < DEPTH; ++i) acc[i - 1][t] = acc[i][t];
            acc[DEPTH - 1][t] = offset;
        }
    }
}

extern "C" __global__ void __launch_bounds__(MAX_THREADS, MIN_BLOCKS)
    correlate_few_channels(const Stored* y, const Stored* weight, const Stored* bias, Stored* out, const Problem p) {
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    Acc* const shared = reinterpret_cast<Acc*>(shared_bytes);

    const unsigned positions = blockDim.x / LANES_C;  // of a block
    const unsigned rows_by_tiles = (unsigned)(p.tiles[1] * p.tiles[2]);
    const unsigned tiles_q = (rows_by_tiles + positions - 1) / positions;
    unsigned index = blockIdx.x;
    const unsigned position = index % tiles_q * positions + threadIdx.x / LANES_C;
    index /= tiles_q;
    const Index length = (Index)((p.x_extent[0] + p.tiles[0] - 1) / p.tiles[0]);  // of a run along D
    Thread me;
    me.first_d = (Index)(index % (unsigned)p.tiles[0]) * length;
    me.last_d = min(me.first_d + length, (Index)p.x_extent[0]) - 1;
    index /= (unsigned)p.tiles[0];
    const long long first_c = (long long)(index % (unsigned)p.tiles[3]) * LANES_C, n = index / (unsigned)p.tiles[3];

    // The weights of the block's channels; those that do not exist become zero.
    const int channels = (int)p.c_out;
    for (int i = threadIdx.x; i < channels * TAPS * LANES_C; i += blockDim.x) {
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
    const unsigned tiles_w = (unsigned)p.tiles[2], tile_w = position % tiles_w;
    const bool idle = position >= rows_by_tiles || channel >= p.groups * p.c_in;
    if (__all_sync(~0u, idle)) {  // no barrier follows, and exchanges are of a warp
        if (HOLD_WEIGHTS) return;  // faster so, which takes registers that are free
        end_thread();
    }

    const bool is_shared = SHARED_W > 0 && p.out_vector;
    const int positions_w = is_shared ? SHARED_W : POSITIONS_W;
    const Index h = (Index)(position / tiles_w), w = (Index)tile_w * positions_w;
    const Index y_h = h * STRIDE_H - (Index)p.pad[1];
    const Index y_w = w * STRIDE_W - (Index)p.pad[2] + (is_shared ? RowShared::BEFORE : 0);
    me.from = RowShared::sides(threadIdx.x % 32, tile_w, tiles_w);
    me.columns = is_shared ? RowShared::columns_to_load(y_w, p.out_extent[2], me.from)
                           : RowAlone::columns_to_load(y_w, p.out_extent[2], {0, 0});
#pragma unroll
    for (int row = 0; row < KERNEL_H; ++row)
        me.count[row] = !idle && within(y_h + row * DILATION_H, p.out_extent[1]) ? me.columns.count : 0;
    me.positions = idle ? 0 : (int)min((Index)p.x_extent[2] - w, (Index)positions_w);

    const long long number = idle ? 0 : channel;  // an idle thread loads nothing
    me.y = y + n * p.out_stride[0] + number / p.c_in * p.c_out * p.out_stride[1] + y_h * p.out_stride[3] +
           y_w * p.out_stride[4];
    me.out = out + n * p.x_stride[0] + number * p.x_stride[1] + h * p.x_stride[3] + w * p.x_stride[4];
    const Acc offset = bias ? widen(bias[number * p.bias_stride]) : Acc(0);
    const Acc* const weights = shared + threadIdx.x % LANES_C;
    if (is_shared)
        slide<RowShared>(me, weights, offset, p);
    else
        slide<RowAlone>(me, weights, offset, p);
}
