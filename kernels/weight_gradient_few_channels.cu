// Weight gradient, few channels per group, SIMT: depthwise, and few channels of x and of y a group. Bound by memory.
//
//     out[ci, co, k] = sum over n, i of  x[n, ci, i] * y[n, co, i*stride + k*dilation - pad]
// A block owns a pair of channels (ci, co) of a group, or LANES_C such pairs, and the taps of TAPS_H rows of the kernel. A
// thread owns consecutive positions along W in one row and slides along D, as in correlate_few_channels.cu, and
// keeps the sums of all those taps in registers. Each step takes the STRIDE_D planes of y that follow each other, whose
// rows come from global memory (rows.cuh), and meets them with the DEPTH planes of x whose taps reach them. A warp takes
// one such column of positions after the other. At the end the sums of its threads are added up.
//
// Compile-time: kernel, stride, dilation, dtype, tile, EARLY (it follows from the padding along W), and y's stride along W
// where it is 1 or the number of channels. Run-time: N, extents, padding, channels, all other strides, and into how many
// parts the columns are cut (tiles[3]).
#include "partial_sums.cuh"
#include "rows.cuh"

#ifndef TAPS_H  // rows of the kernel that a block owns
#define TAPS_H 4
#endif
#ifndef POSITIONS_W  // positions a thread owns along W
#define POSITIONS_W 2
#endif
#ifndef LANES_C  // threads side by side along the pairs of channels
#define LANES_C 1
#endif
#ifndef SHARED_W  // likewise where the rows of y are aligned, so that lanes share their columns; 0: they never do
#define SHARED_W 4
#endif
#ifndef EARLY  // columns before those that such a lane loads for itself and its neighbours
#define EARLY 1
#endif
#ifndef AHEAD  // whether rows are fetched a step before they are needed
#define AHEAD 0
#endif
#ifndef Y_STRIDE_W  // 0: known at run time
#define Y_STRIDE_W 0
#endif
#ifndef MIN_BLOCKS
#define MIN_BLOCKS 3
#endif

constexpr int THREADS = 128;
constexpr int WARPS = THREADS / 32;
constexpr int TILES_H = ceil_div(KERNEL_H, TAPS_H);
constexpr int SUMS = KERNEL_D * TAPS_H * KERNEL_W;  // of a thread
constexpr int VALUES = SUMS * LANES_C;              // of a block

typedef Axis<KERNEL_D, STRIDE_D, DILATION_D> AxisD;
constexpr int DEPTH = AxisD::REACH + 1;  // planes of x that meet a plane of y
constexpr int PLANES = AxisD::STEP < KERNEL_D ? AxisD::STEP : KERNEL_D;  // of a step that have a tap
constexpr int HELD_PLANES = AHEAD ? PLANES : 1;

// A row of y as a thread reads it alone, and as lanes share it.
template <int POSITIONS, int FIRST_OWN>
using RowOf = Row<Stored, Acc, KERNEL_W, STRIDE_W, DILATION_W, POSITIONS, FIRST_OWN, Y_STRIDE_W>;
typedef RowOf<POSITIONS_W, -1> RowAlone;
typedef RowOf<SHARED_W ? SHARED_W : POSITIONS_W, SHARED_W ? EARLY : -1> RowShared;
typedef typename Fetched<Stored>::Word Word;
static_assert(SHARED_W == 0 || LANES_C == 1, "lanes along W share columns");

__device__ __forceinline__ long long pairs_of(const Problem& p) { return p.groups * p.c_in * p.c_out; }
__device__ __forceinline__ long long tiles_of_weights(const Problem& p) {
    return (pairs_of(p) + LANES_C - 1) / LANES_C * TILES_H;
}

// The weight of a block's value: values of neighbouring lanes follow each other.
__device__ __forceinline__ Weight weight_of(long long tile, int value, const Problem& p) {
    const long long pair = tile / TILES_H * LANES_C + value % LANES_C;
    const int tap = value / LANES_C;
    Weight weight;
    weight.co = (int)(pair % p.c_out);
    weight.ci = (int)(pair / p.c_out % p.c_in);
    weight.group = pair / (p.c_out * p.c_in);
    weight.w = tap % KERNEL_W;
    weight.h = (int)(tile % TILES_H) * TAPS_H + tap / KERNEL_W % TAPS_H;
    weight.d = tap / (KERNEL_W * TAPS_H);
    return weight;
}

// The positions of a thread in a column: along W in one row, for all planes of a run along D.
struct Thread {
    const Stored* x;  // its first position, in plane 0
    const Stored* y;  // the first column that it loads, in plane 0
    Index first_d, last_d;
    Index y_w;
    unsigned tile_w;       // which of the threads of a row it is
    bool exists[TAPS_H];  // rows
    int positions;         // that exist
};

template <class RowY>
__device__ __forceinline__ void slide(Acc (&acc)[SUMS], const Thread& me, const Problem& p) {
    constexpr int POSITIONS = RowY::OF_POSITIONS;
    const Index last_q = me.last_d + AxisD::REACH;
    const Index y_stride_w = RowY::Along::GAP * (Index)p.out_stride[4], x_stride_w = (Index)p.x_stride[4];
    const long long row_step = DILATION_H * p.out_stride[3];
    const Sides sides = RowY::sides(threadIdx.x % 32, me.tile_w, (unsigned)p.tiles[2]);
    const Range columns = RowY::columns_to_load(me.y_w, p.out_extent[2], sides);
    unsigned count[TAPS_H];  // of columns, in rows that exist
#pragma unroll
    for (int row = 0; row < TAPS_H; ++row) count[row] = me.exists[row] ? columns.count : 0;
    // A row of plane q * STRIDE_D + phase, for the phase of tap `tap_d`.
    const auto fetch = [&](RowY& to, Index q, int tap_d, int row) {
        const Index d = q * STRIDE_D + AxisD::phase_of(tap_d) - (Index)p.pad[0];
        const bool exists = q <= last_q && within(d, p.out_extent[0]);
        const Stored* const from = me.y + d * p.out_stride[2] + row * row_step;
        to.fetch(from, {columns.first, exists ? count[row] : 0}, y_stride_w);
    };
    Word next[POSITIONS];  // of x
    const auto fetch_x = [&](Index q) {
        const int positions = q <= me.last_d ? me.positions : 0;
        const Stored* const from = me.x + q * p.x_stride[2];
#pragma unroll
        for (int t = 0; t < POSITIONS; ++t) {
            next[t] = 0;
            if (t < positions) next[t] = fetch_one(from + t * x_stride_w);
        }
    };

    Acc x[DEPTH][POSITIONS];  // positions q, q - 1, ...
#pragma unroll
    for (int i = 0; i < DEPTH * POSITIONS; ++i) x[i / POSITIONS][i % POSITIONS] = 0;
    RowY rows[HELD_PLANES][TAPS_H];
    fetch_x(me.first_d);
    if (AHEAD) {
#pragma unroll
        for (int i = 0; i < PLANES * TAPS_H; ++i) fetch(rows[i / TAPS_H][i % TAPS_H], me.first_d, i / TAPS_H, i % TAPS_H);
    }
#pragma unroll 1
    for (Index q = me.first_d; q <= last_q; ++q) {
#pragma unroll
        for (int t = 0; t < POSITIONS; ++t) {
#pragma unroll
            for (int back = DEPTH - 1; back > 0; --back) x[back][t] = x[back - 1][t];
            x[0][t] = widen_word<Stored>(next[t], 0);
        }
        fetch_x(q + 1);
#pragma unroll
        for (int first_tap = 0; first_tap < PLANES; ++first_tap) {  // taps of other phases each
            RowY* const plane = rows[AHEAD ? first_tap : 0];
            if (!AHEAD) {
#pragma unroll
                for (int row = 0; row < TAPS_H; ++row) fetch(plane[row], q, first_tap, row);
            }
#pragma unroll
            for (int row = 0; row < TAPS_H; ++row) {
                Acc value[RowY::COLUMNS];
                plane[row].widen_all(value, sides);
                if (AHEAD) fetch(plane[row], q + 1, first_tap, row);
#pragma unroll
                for (int tap_d = first_tap; tap_d < KERNEL_D; tap_d += AxisD::STEP)
#pragma unroll
                    for (int tap_w = 0; tap_w < KERNEL_W; ++tap_w)
#pragma unroll
                        for (int t = 0; t < POSITIONS; ++t)
                            acc[(tap_d * TAPS_H + row) * KERNEL_W + tap_w] +=
                                x[AxisD::back(tap_d)][t] * value[RowY::column(t, tap_w)];
            }
        }
    }
}

// Writes to `parts`, or straight to `out` where there is one part alone.
extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    weight_gradient_few_channels(const Stored* x, const Stored* y, Acc* parts, Stored* out, const Problem p) {
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    Acc* const shared = reinterpret_cast<Acc*>(shared_bytes);

    const long long tiles = tiles_of_weights(p);
    const long long tile = blockIdx.x % tiles;
    const unsigned part = (unsigned)(blockIdx.x / tiles);
    const Weight mine = weight_of(tile, threadIdx.x % LANES_C, p);
    const bool has_channels = mine.group < p.groups;
    x += (mine.group * p.c_in + mine.ci) * p.x_stride[1];
    y += (mine.group * p.c_out + mine.co) * p.out_stride[1];

    constexpr unsigned POSITIONS = 32 / LANES_C;  // of a warp
    const unsigned tiles_w = (unsigned)p.tiles[2], rows_by_tiles = (unsigned)p.tiles[1] * tiles_w;
    const unsigned tiles_q = (rows_by_tiles + POSITIONS - 1) / POSITIONS;
    const unsigned columns = tiles_q * (unsigned)(p.tiles[0] * p.n);
    const Index length = (Index)((p.x_extent[0] + p.tiles[0] - 1) / p.tiles[0]);  // of a run along D

    const bool is_shared = SHARED_W > 0 && p.out_vector;
    const int positions_w = is_shared ? SHARED_W : POSITIONS_W;
    Acc acc[SUMS];
#pragma unroll
    for (int i = 0; i < SUMS; ++i) acc[i] = 0;
#pragma unroll 1
    for (unsigned column = part * WARPS + threadIdx.x / 32; column < columns; column += (unsigned)p.tiles[3] * WARPS) {
        const unsigned position = column % tiles_q * POSITIONS + threadIdx.x % 32 / LANES_C, rest = column / tiles_q;
        const unsigned tile_w = position % tiles_w;
        const long long n = rest / (unsigned)p.tiles[0];
        const Index h = (Index)(position / tiles_w), w = (Index)tile_w * positions_w;
        const Index y_h = h * STRIDE_H + mine.h * DILATION_H - (Index)p.pad[1];
        const bool idle = position >= rows_by_tiles || !has_channels;
        Thread me;
        me.first_d = (Index)(rest % (unsigned)p.tiles[0]) * length;
        me.last_d = min(me.first_d + length, (Index)p.x_extent[0]) - 1;
        me.y_w = w * STRIDE_W - (Index)p.pad[2] + (is_shared ? RowShared::BEFORE : 0);
        me.tile_w = tile_w;
#pragma unroll
        for (int row = 0; row < TAPS_H; ++row)
            me.exists[row] = !idle && mine.h + row < KERNEL_H && within(y_h + row * DILATION_H, p.out_extent[1]);
        me.positions = idle ? 0 : (int)min((Index)p.x_extent[2] - w, (Index)positions_w);
        me.x = x + n * p.x_stride[0] + h * p.x_stride[3] + w * p.x_stride[4];
        me.y = y + n * p.out_stride[0] + y_h * p.out_stride[3] + me.y_w * p.out_stride[4];
        if (is_shared)
            slide<RowShared>(acc, me, p);
        else
            slide<RowAlone>(acc, me, p);
    }

    let_next_kernel_start();  // the second one: its blocks come as these end
    // The threads of a pair of channels are added up: within a warp, and then its warps.
#pragma unroll
    for (int i = 0; i < SUMS; ++i) {
#pragma unroll
        for (int flip = 16; flip >= LANES_C; flip /= 2) acc[i] += __shfl_xor_sync(~0u, acc[i], flip);
        if (threadIdx.x % 32 < LANES_C) shared[threadIdx.x / 32 * VALUES + i * LANES_C + threadIdx.x % 32] = acc[i];
    }
    __syncthreads();
    for (int value = threadIdx.x; value < VALUES; value += THREADS) {
        Acc sum = shared[value];
#pragma unroll
        for (int warp = 1; warp < WARPS; ++warp) sum += shared[warp * VALUES + value];
        const Weight weight = weight_of(tile, value, p);
        if (p.tiles[3] > 1) {
            parts[blockIdx.x * (long long)VALUES + value] = sum;
        } else if (exists(weight, {}, p, KERNEL_D, KERNEL_H, KERNEL_W)) {
            narrow(sum, out[weight.offset(p)]);
        }
    }
}

extern "C" __global__ void __launch_bounds__(SUM_THREADS, SUM_BLOCKS)
    weight_gradient_few_channels_add(const Acc* parts, Stored* out, const Problem p) {
    const unsigned values = (unsigned)(tiles_of_weights(p) * VALUES);
    add_parts(parts, values, p.tiles[3], [&](unsigned value, Acc sum) {
        const Weight weight = weight_of(value / VALUES, (int)(value % VALUES), p);
        if (exists(weight, {}, p, KERNEL_D, KERNEL_H, KERNEL_W)) narrow(sum, out[weight.offset(p)]);
    });
}
