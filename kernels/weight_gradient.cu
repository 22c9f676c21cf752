// Weight gradient, SIMT: any dtype, size, stride, dilation, groups and memory layout; memory-bound for few channels.
//
//     out[ci, co, k] = sum over n, i of  x[n, ci, i] * y[n, co, i*stride + k*dilation - pad]
// A block owns a tile of weights: channels of some groups and some taps; those along D are of one phase, so that a plane of
// y meets them all, each with another plane of x. It walks over its share of boxes of positions i (of one plane), and for
// each stages x and the box of y that its taps reach in shared memory, widened, with zeros outside. A thread takes runs of
// POSITIONS consecutive positions, and sums up CHANNELS_IN x CHANNELS_OUT channels x all taps of the tile in registers;
// THREADS_K threads share the runs of a box.
//
// Compile-time: kernel, stride, dilation, dtype and tile, because accumulators are registers and distances constants.
// Run-time: N, extents, padding, channels, strides, and into how many parts the positions are cut (tiles[3]).
#include "boxes.cuh"
#include "partial_sums.cuh"

#ifndef TAPS_D  // taps of a tile
#define TAPS_D 1
#define TAPS_H 1
#define TAPS_W 3
#endif
#ifndef CHANNELS_IN  // channels of x and y that a thread owns
#define CHANNELS_IN 4
#define CHANNELS_OUT 4
#endif
#ifndef THREADS_IN  // threads of a block along the channels of x and y, groups, and positions
#define THREADS_IN 8
#define THREADS_OUT 8
#define THREADS_G 1
#define THREADS_K 2
#endif
#ifndef BOX_H  // positions of a box, and how many of a row a thread takes at a time
#define BOX_H 4
#define BOX_W 16
#define POSITIONS 4
#endif
#ifndef X_CHANNELS_LAST  // only the order in which elements are visited; any strides are right
#define X_CHANNELS_LAST 0
#endif
#ifndef Y_CHANNELS_LAST
#define Y_CHANNELS_LAST 0
#endif
#ifndef MIN_BLOCKS
#define MIN_BLOCKS 3
#endif
#ifndef SHARED_BYTES  // what the plan reserves; 0 where there is no plan
#define SHARED_BYTES 0
#endif

constexpr int TILE_IN = THREADS_IN * CHANNELS_IN;
constexpr int TILE_OUT = THREADS_OUT * CHANNELS_OUT;
constexpr int THREADS_C = THREADS_IN * THREADS_OUT * THREADS_G;
constexpr int THREADS = THREADS_C * THREADS_K;
typedef Axis<KERNEL_D, STRIDE_D, DILATION_D> AxisD;
constexpr int PHASES_D = AxisD::STEP < KERNEL_D ? AxisD::STEP : KERNEL_D;  // that have a tap
constexpr int TILES_D = PHASES_D * ceil_div(AxisD::MAX_TAPS, TAPS_D);
constexpr int TILES_H = ceil_div(KERNEL_H, TAPS_H);
constexpr int TILES_W = ceil_div(KERNEL_W, TAPS_W);

typedef Staged<TAPS_H, STRIDE_H, DILATION_H, BOX_H> AxisH;
typedef Staged<TAPS_W, STRIDE_W, DILATION_W, BOX_W> AxisW;

// Threads of a warp read different channels, or different positions: an odd distance spreads both over the banks.
struct BoxX {
    static constexpr int C = THREADS_G * TILE_IN, D = TAPS_D, H = BOX_H, W = BOX_W;
    static constexpr int GAP_D = -AxisD::HOP, GAP_H = 1, GAP_W = 1;
    static constexpr int ROW = BOX_W, PLANE = H * ROW, CHANNEL = D * PLANE | 1;
    static constexpr bool CHANNELS_LAST = X_CHANNELS_LAST;
};
struct BoxY {
    static constexpr int C = THREADS_G * TILE_OUT, D = 1, H = AxisH::EXTENT, W = AxisW::EXTENT;
    static constexpr int GAP_D = 1, GAP_H = AxisH::GAP, GAP_W = AxisW::GAP;
    static constexpr int ROW = W | 1, PLANE = H * ROW, CHANNEL = PLANE | 1;
    static constexpr bool CHANNELS_LAST = Y_CHANNELS_LAST;
};

constexpr int RUNS_W = BOX_W / POSITIONS;
constexpr int RUNS = BOX_H * RUNS_W;
constexpr int SUMS = CHANNELS_IN * CHANNELS_OUT * TAPS_D * TAPS_H * TAPS_W;  // of a thread
constexpr int VALUES = SUMS * THREADS_C;                                     // of a block

constexpr int X_STAGE = round_up(BoxX::C * BoxX::CHANNEL, 4);
constexpr int STAGE = X_STAGE + BoxY::C * BoxY::CHANNEL;
constexpr int TURNED = THREADS_K > 1 ? VALUES * (THREADS_K + 1) : 0;  // the sums of a block's threads
constexpr int SHARED = STAGE > TURNED ? STAGE : TURNED;               // in accumulators
static_assert(THREADS % 32 == 0, "whole warps");
static_assert(BOX_W % POSITIONS == 0, "whole runs");
static_assert(SHARED_BYTES == 0 || SHARED * sizeof(Acc) == SHARED_BYTES, "the plan's shared memory is not the kernel's");

// Tiles of all weights.
__device__ __forceinline__ unsigned tiles_of_weights(const Problem& p) {
    return (unsigned)(TILES_D * TILES_H * TILES_W * tiles_of(p.c_out, TILE_OUT) * tiles_of(p.c_in, TILE_IN) *
                      tiles_of(p.groups, THREADS_G));
}

// The first weight of a tile. Those that read the same x and y follow each other.
__device__ __forceinline__ Weight first_weight(unsigned tile, const Problem& p) {
    Weight first;
    first.w = (int)(tile % TILES_W) * TAPS_W;
    tile /= TILES_W;
    first.h = (int)(tile % TILES_H) * TAPS_H;
    tile /= TILES_H;
    first.d = (int)(tile % TILES_D) % PHASES_D + (int)(tile % TILES_D) / PHASES_D * TAPS_D * AxisD::STEP;
    tile /= TILES_D;
    first.co = (int)(tile % tiles_of(p.c_out, TILE_OUT)) * TILE_OUT;
    tile /= tiles_of(p.c_out, TILE_OUT);
    first.ci = (int)(tile % tiles_of(p.c_in, TILE_IN)) * TILE_IN;
    first.group = tile / tiles_of(p.c_in, TILE_IN) * THREADS_G;
    return first;
}

// The first weight of a thread, for the first one of its tile.
__device__ __forceinline__ Weight weight_of_thread(Weight first, int thread) {
    first.ci += thread % THREADS_IN;
    first.co += thread / THREADS_IN % THREADS_OUT;
    first.group += thread / (THREADS_IN * THREADS_OUT);
    return first;
}

// Where the weight of a thread's sum is from there.
__host__ __device__ constexpr Ahead weight_of_sum(int sum) {
    const int tap_h = sum / TAPS_W, tap_d = tap_h / TAPS_H, co = tap_d / TAPS_D, ci = co / CHANNELS_OUT;
    return {ci * THREADS_IN, co % CHANNELS_OUT * THREADS_OUT, tap_d % TAPS_D * AxisD::STEP, tap_h % TAPS_H, sum % TAPS_W};
}

// Adds the thread's runs of the staged boxes.
__device__ __forceinline__ void accumulate(Acc (&acc)[SUMS], const Acc* x, const Acc* y, int thread_k) {
#pragma unroll 1
    for (int run = thread_k; run < RUNS; run += THREADS_K) {
        const int h = run / RUNS_W, w = run % RUNS_W * POSITIONS;
        const Acc* const x_run = x + h * BoxX::ROW + w;
        const Acc* const y_run = y + h * AxisH::STEP * BoxY::ROW + w * AxisW::STEP;
        Acc xs[CHANNELS_IN][TAPS_D][POSITIONS];
#pragma unroll
        for (int ci = 0; ci < CHANNELS_IN; ++ci)
#pragma unroll
            for (int tap_d = 0; tap_d < TAPS_D; ++tap_d)
#pragma unroll
                for (int t = 0; t < POSITIONS; ++t)
                    xs[ci][tap_d][t] = x_run[ci * THREADS_IN * BoxX::CHANNEL + tap_d * BoxX::PLANE + t];
#pragma unroll
        for (int co = 0; co < CHANNELS_OUT; ++co) {
#pragma unroll
            for (int tap_h = 0; tap_h < TAPS_H; ++tap_h) {
                const Acc* const y_row = y_run + co * THREADS_OUT * BoxY::CHANNEL + tap_h * AxisH::HOP * BoxY::ROW;
#pragma unroll
                for (int tap_w = 0; tap_w < TAPS_W; ++tap_w)
#pragma unroll
                    for (int t = 0; t < POSITIONS; ++t) {
                        const Acc value = y_row[t * AxisW::STEP + tap_w * AxisW::HOP];
#pragma unroll
                        for (int ci = 0; ci < CHANNELS_IN; ++ci)
#pragma unroll
                            for (int tap_d = 0; tap_d < TAPS_D; ++tap_d)
                                acc[(((ci * CHANNELS_OUT + co) * TAPS_D + tap_d) * TAPS_H + tap_h) * TAPS_W + tap_w] +=
                                    xs[ci][tap_d][t] * value;
                    }
            }
        }
    }
}

// The sum of the THREADS_K threads' sums of a value, in their order.
__device__ __forceinline__ Acc sum_of_threads(const Acc* turned, int value) {
    Acc sum = 0;
#pragma unroll 4
    for (int k = 0; k < THREADS_K; ++k) sum += turned[value * (THREADS_K + 1) + k];
    return sum;
}

// Writes to `parts`, or straight to `out` where there is one part alone.
extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    weight_gradient(const Stored* x, const Stored* y, Acc* parts, Stored* out, const Problem p) {
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    Acc* const shared_x = reinterpret_cast<Acc*>(shared_bytes);
    Acc* const shared_y = shared_x + X_STAGE;

    const unsigned tiles = tiles_of_weights(p);
    const unsigned part = (unsigned)(blockIdx.x / tiles);
    const Weight first = first_weight(blockIdx.x % tiles, p);
    x += (first.group * p.c_in + first.ci) * p.x_stride[1];
    y += (first.group * p.c_out + first.co) * p.out_stride[1];

    // Channel c of a box belongs to group c / TILE of the block's, and is this one from the block's first channel on.
    const auto channel_x = [&](int c) {
        const int group = c / TILE_IN, ci = c % TILE_IN;
        return first.group + group < p.groups && first.ci + ci < p.c_in ? group * (int)p.c_in + ci : -1;
    };
    const auto channel_y = [&](int c) {
        const int group = c / TILE_OUT, co = c % TILE_OUT;
        return first.group + group < p.groups && first.co + co < p.c_out ? group * (int)p.c_out + co : -1;
    };

    const int thread_c = threadIdx.x % THREADS_C, thread_k = threadIdx.x / THREADS_C;
    const int group = thread_c / (THREADS_IN * THREADS_OUT);
    const Acc* const my_x = shared_x + (group * TILE_IN + thread_c % THREADS_IN) * BoxX::CHANNEL;
    const Acc* const my_y = shared_y + (group * TILE_OUT + thread_c / THREADS_IN % THREADS_OUT) * BoxY::CHANNEL;

    Acc acc[SUMS];
#pragma unroll
    for (int i = 0; i < SUMS; ++i) acc[i] = 0;

    const unsigned boxes = (unsigned)(p.n * p.tiles[0] * p.tiles[1] * p.tiles[2]);
#pragma unroll 1
    for (unsigned box = part; box < boxes; box += (unsigned)p.tiles[3]) {
        unsigned index = box;
        const Index w = (Index)take(index, p, 2) * BOX_W, h = (Index)take(index, p, 1) * BOX_H;
        const Index d = (Index)take(index, p, 0);
        const Place place_x = {d, h, w, p.x_extent, p.x_stride};
        const Place place_y = {d * STRIDE_D + first.d * DILATION_D - (Index)p.pad[0],
                               h * STRIDE_H + first.h * DILATION_H - (Index)p.pad[1],
                               w * STRIDE_W + first.w * DILATION_W - (Index)p.pad[2], p.out_extent, p.out_stride};
        if (!within(place_y.d, p.out_extent[0])) continue;
        __syncthreads();
        stage_box<BoxX, THREADS>(shared_x, x + index * p.x_stride[0], place_x, channel_x);
        stage_box<BoxY, THREADS>(shared_y, y + index * p.out_stride[0], place_y, channel_y);
        __syncthreads();
        accumulate(acc, my_x, my_y, thread_k);
    }

    let_next_kernel_start();  // the second one: its blocks come as these end
    // The threads that shared the runs of the boxes are added up.
    if (THREADS_K > 1) {
        __syncthreads();
#pragma unroll
        for (int i = 0; i < SUMS; ++i) shared_x[(i * THREADS_C + thread_c) * (THREADS_K + 1) + thread_k] = acc[i];
        __syncthreads();
    }
    if (THREADS_K > 1 && p.tiles[3] > 1) {
        for (int value = threadIdx.x; value < VALUES; value += THREADS)
            parts[blockIdx.x * (long long)VALUES + value] = sum_of_threads(shared_x, value);
        return;
    }
    if (thread_k > 0) return;
    const Weight mine = weight_of_thread(first, thread_c);
    parts += blockIdx.x * (long long)VALUES + thread_c;
    out += mine.offset(p);
#pragma unroll
    for (int i = 0; i < SUMS; ++i) {
        if (THREADS_K > 1) acc[i] = sum_of_threads(shared_x, i * THREADS_C + thread_c);
        if (p.tiles[3] > 1) {
            parts[i * THREADS_C] = acc[i];
        } else if (exists(mine, weight_of_sum(i), p, KERNEL_D, KERNEL_H, KERNEL_W)) {
            narrow(acc[i], out[distance(weight_of_sum(i), p)]);
        }
    }
}

extern "C" __global__ void __launch_bounds__(SUM_THREADS, SUM_BLOCKS)
    weight_gradient_add(const Acc* parts, Stored* out, const Problem p) {
    const unsigned values = tiles_of_weights(p) * VALUES;
    add_parts(parts, values, p.tiles[3], [&](unsigned value, Acc sum) {
        const Weight first = weight_of_thread(first_weight(value / VALUES, p), (int)(value % THREADS_C));
        const Ahead ahead = weight_of_sum((int)(value % VALUES) / THREADS_C);
        if (exists(first, ahead, p, KERNEL_D, KERNEL_H, KERNEL_W)) narrow(sum, out[first.offset(p) + distance(ahead, p)]);
    });
}
