// Weight gradient of wide layers on Hopper's tensor cores (sm_90a): float16 and bfloat16, both operands from shared memory.
//
//     out[ci, co, k] = sum over n, i of  x[n, ci, i] * y[n, co, i*stride + k*dilation - pad]
// A matrix product with M and N = channels of x and y, in either order, and K = positions i of the whole batch; every tap has
// sums of its own. A block owns a tile of weights and a share of the boxes of positions. It stages a box of x, and of y all
// that its taps reach.
//
// Both are staged as [eight channels][position], a piece of 16 bytes being eight channels of one position. A wgmma takes such
// pieces transposed, eight positions one after the other and the next eight anywhere, and an operand may start at any piece.
// So a tap is an offset into the staged y, along each axis. Positions of y along W are sorted by their remainder modulo the
// step: those of a tap follow each other.
//
// Warps have roles: stagers bring boxes, several of which are on their way at a time. Channels-last arrays are copied
// asynchronously, piece by piece; rows are turned in registers. Workers multiply, and do nothing else.
//
// Compile-time: kernel, stride, dilation, dtype, tile, and whether arrays are copied by pieces. Run-time: N, extents, the box,
// padding, channels, strides, the width of loads from rows, and into how many parts the positions are cut (tiles[3]).
#ifndef DTYPE
#define DTYPE 0
#endif
#include "boxes.cuh"
#include "partial_sums.cuh"
#include "pieces.cuh"

#ifndef KERNEL_D
#define KERNEL_D 3
#define KERNEL_H 3
#define KERNEL_W 3
#endif
#ifndef STRIDE_D
#define STRIDE_D 1
#define STRIDE_H 1
#define STRIDE_W 1
#endif
#ifndef DILATION_D
#define DILATION_D 1
#define DILATION_H 1
#define DILATION_W 1
#endif
#ifndef WORKERS  // warpgroups that multiply
#define WORKERS 2
#endif
#ifndef STAGER_GROUPS  // warpgroups that bring boxes
#define STAGER_GROUPS 1
#endif
#ifndef ROWS_OF_X  // whether the rows of M are channels of x, and the columns those of y
#define ROWS_OF_X 0
#endif
#ifndef TILES_M  // times 64 channels
#define TILES_M 1
#endif
#ifndef TILES_N  // times 8 channels of the other array
#define TILES_N 16
#endif
#ifndef TAPS_D  // of a tile along each axis, and how far its neighbours are apart
#define TAPS_D 1
#define TAPS_H 2
#define TAPS_W 3
#endif
#ifndef APART_D
#define APART_D 1
#endif
#ifndef APART_H
#define APART_H 1
#endif
#ifndef APART_W
#define APART_W 1
#endif
#ifndef X_CHANNELS_LAST  // whether it is copied by pieces
#define X_CHANNELS_LAST 0
#endif
#ifndef Y_CHANNELS_LAST
#define Y_CHANNELS_LAST 0
#endif
#ifndef STAGES
#define STAGES (X_CHANNELS_LAST || Y_CHANNELS_LAST ? 4 : 3)
#endif
#ifndef IN_FLIGHT  // boxes that are copied behind the one that is waited for
#define IN_FLIGHT (X_CHANNELS_LAST || Y_CHANNELS_LAST ? STAGES - 2 : 0)
#endif
#ifndef MIN_BLOCKS
#define MIN_BLOCKS 1
#endif
#ifndef WORKER_REGISTERS  // of a thread, after the stagers gave up what they do not need
#define WORKER_REGISTERS 216
#define STAGER_REGISTERS 72
#endif
#include "weight_boxes.cuh"

static_assert(sizeof(Stored) == 2, "pieces of eight channels");

// An axis of y, for the taps of a tile.
typedef Staged<TAPS_D, STRIDE_D, DILATION_D * APART_D, 1> AlongD;
typedef Staged<TAPS_H, STRIDE_H, DILATION_H * APART_H, 1> AlongH;
typedef Staged<TAPS_W, STRIDE_W, DILATION_W * APART_W, 1> AlongW;

// How the taps of an axis are cut into tiles: those that are APART from each other by as many.
template <int KERNEL, int TAPS, int APART> struct Cut {
    static constexpr int REMAINDERS = APART < KERNEL ? APART : KERNEL;
    static constexpr int COUNT = REMAINDERS * ceil_div(ceil_div(KERNEL, APART), TAPS);

    __host__ __device__ static constexpr int first(int tile) { return tile % REMAINDERS + tile / REMAINDERS * APART * TAPS; }
    __host__ __device__ static constexpr int tile_of(int tap) { return tap / APART / TAPS * REMAINDERS + tap % APART; }
    __host__ __device__ static constexpr int place_of(int tap) { return tap / APART % TAPS; }  // within its tile
};
typedef Cut<KERNEL_D, TAPS_D, APART_D> CutD;
typedef Cut<KERNEL_H, TAPS_H, APART_H> CutH;
typedef Cut<KERNEL_W, TAPS_W, APART_W> CutW;
constexpr int TILES_OF_TAPS = CutD::COUNT * CutH::COUNT * CutW::COUNT;

constexpr int WORKER_THREADS = 128 * WORKERS, STAGERS = 128 * STAGER_GROUPS, THREADS = WORKER_THREADS + STAGERS;
constexpr int ROWS = 64 * TILES_M, CHANNELS_N = 8 * TILES_N;
constexpr int CHANNELS_IN = ROWS_OF_X ? ROWS : CHANNELS_N, CHANNELS_OUT = ROWS_OF_X ? CHANNELS_N : ROWS;
constexpr int TAPS = TAPS_D * TAPS_H * TAPS_W;
constexpr int UNITS = ceil_div(TAPS * TILES_M, WORKERS);  // of a worker: a tap and 64 rows
constexpr int SUMS_OF_UNIT = CHANNELS_N / 2;                 // of a thread
constexpr int SUMS = UNITS * SUMS_OF_UNIT;
constexpr int VALUES = SUMS * WORKER_THREADS;  // of a block
constexpr int BARRIER_BYTES = 128, BLOCK_BYTES = 192;
static_assert(2 * STAGES * 8 <= BARRIER_BYTES, "room for the barriers");
static_assert(IN_FLIGHT >= 0 && IN_FLIGHT <= STAGES - 2, "a stage is free when the next one is in use");

// ---- positions along W of y ------------------------------------------------------------------------------------------

// Of the taps k of a tile, k and k + STEP read columns with the same remainder: a plane of such columns is known by its first tap.
constexpr int PLANES = TAPS_W < AlongW::STEP ? TAPS_W : AlongW::STEP;
constexpr int REACH = (TAPS_W - 1) * AlongW::HOP / AlongW::STEP;  // beyond a position, in a plane

__host__ __device__ constexpr int remainder_of(int plane) { return plane * AlongW::HOP % AlongW::STEP; }
// What HOP has to be multiplied by for a remainder of one.
__host__ __device__ constexpr int inverse_of_hop() {
    for (int i = 0; i < AlongW::STEP; ++i)
        if (i * AlongW::HOP % AlongW::STEP == 1) return i;
    return 0;
}

// Where an element of y is in its staged row, counted from the first one that the tile reads, or -1 where no tap does.
__device__ __forceinline__ int place_in_row(int element, int width) {
    const unsigned e = (unsigned)element, column = e / AlongW::GAP, place = column / AlongW::STEP;
    const unsigned plane = column % AlongW::STEP * inverse_of_hop() % AlongW::STEP;
    return e % AlongW::GAP == 0 && plane < PLANES && place < (unsigned)width ? (int)(plane * width + place) : -1;
}

// ---- the box ---------------------------------------------------------------------------------------------------------

// A box of positions in shared memory, in pieces of 16 bytes.
struct Box {
    int d, h, runs;                    // extents, along W in runs of eight positions
    int x_group;                       // of x: from eight channels to the next
    int y_d, y_h, y_width;             // what the taps reach, along W of a plane
    int y_row, y_group;                // of y: from a row, and from eight channels, to the next
    int x_positions, y_positions;      // that are loaded at a time
    int early;                         // elements of a row of y before the first one that is used, as loads are aligned
    int x_items, y_row_items, y_items; // what eight channels are loaded in

    __device__ __forceinline__ Box(const Problem& p, const Weight& first)
        : d((int)p.box[0]), h((int)p.box[1]), runs((int)p.box[2] / 8),
          // Groups of channels, as neighbouring threads write them, lie in different banks.
          x_group(d * h * runs * 8 | 1), y_d((d - 1) * AlongD::STEP + (TAPS_D - 1) * AlongD::HOP + 1),
          y_h((h - 1) * AlongH::STEP + (TAPS_H - 1) * AlongH::HOP + 1), y_width(runs * 8 + REACH),
          y_row(PLANES * y_width), y_group(y_d * y_h * y_row | 1), x_positions(X_CHANNELS_LAST ? 1 : (int)p.x_vector / 2),
          y_positions(Y_CHANNELS_LAST ? 1 : (int)p.out_vector / 2),
          early((int)((first.w * (Index)DILATION_W - (Index)p.pad[2]) & (y_positions - 1))),
          x_items(d * h * runs * (8 / x_positions)),
          y_row_items(y_positions == 1 ? y_row : ceil_div(early + elements(), y_positions)), y_items(y_d * y_h * y_row_items) {}

    // Of a row of y, from the first one that is used to the last one.
    __device__ __forceinline__ int elements() const {
        return ((runs * 8 - 1) * AlongW::STEP + (TAPS_W - 1) * AlongW::HOP) * AlongW::GAP + 1;
    }
    __device__ __forceinline__ int x_pieces() const { return CHANNELS_IN / 8 * x_group; }
    __device__ __forceinline__ int stage() const { return x_pieces() + CHANNELS_OUT / 8 * y_group; }
};

__device__ __forceinline__ Item find_item_of_x(int i, const Problem& p, const Box& box) {
    const int first = i * box.x_positions, row = first / (box.runs * 8);
    Item item;
    item.w = first % (box.runs * 8);
    item.h = (short)(row % box.h);
    item.d = (short)(row / box.h);
    item.offset = item.d * (Index)p.x_stride[2] + item.h * (Index)p.x_stride[3] + item.w * (Index)p.x_stride[4];
    item.place = (unsigned short)first;
    return item;
}

// Of several positions the piece is that of the row.
__device__ __forceinline__ Item find_item_of_y(int i, const Problem& p, const Box& box) {
    const int row = i / box.y_row_items, of_row = i % box.y_row_items;
    Item item;
    item.place = (unsigned short)(row * box.y_row);
    if (box.y_positions == 1) {
        const int plane = of_row / box.y_width, place = of_row % box.y_width;
        item.w = (place * (Index)AlongW::STEP + remainder_of(plane)) * AlongW::GAP;
        item.place += (unsigned short)of_row;
    } else {
        item.w = of_row * box.y_positions - box.early;
    }
    item.h = (short)(row % box.y_h * AlongH::GAP);
    item.d = (short)(row / box.y_h * AlongD::GAP);
    item.offset = item.d * (Index)p.out_stride[2] + item.h * (Index)p.out_stride[3] + item.w * (Index)p.out_stride[4];
    return item;
}

// ---- staging ---------------------------------------------------------------------------------------------------------

// An array's channels, and where eight of them are in shared memory.
struct Source {
    const Stored* from;
    const Item* items;
    int count, channels, group;
    Index step;  // between channels
};

// Neighbouring threads take neighbouring groups of channels, whose pieces lie in different banks.
template <int GROUPS> __device__ __forceinline__ void copy_pieces(Piece* to, const Source& source, const Origin& origin, int thread) {
#pragma unroll 2
    for (int i = thread; i < source.count * GROUPS; i += STAGERS) {
        const int group = i % GROUPS;
        const Item item = source.items[i / GROUPS];
        const bool inside = origin.contains(item);
        if (8 * group >= source.channels) continue;
        copy_async_16_or_zeros(&to[group * source.group + item.place],
                               source.from + (inside ? origin.offset + item.offset + 8 * group : 0), inside);
    }
}

// Positions of a row that are loaded at once: one, in the low half of its word, or as many as words have.
template <int POSITIONS> struct Row {
    unsigned word[POSITIONS == 8 ? 4 : 1];
};
__device__ __forceinline__ void load_row(Row<8>& row, const Stored* from) {
    const Piece piece = *reinterpret_cast<const Piece*>(from);
#pragma unroll
    for (int i = 0; i < 4; ++i) row.word[i] = piece.value[i];
}
__device__ __forceinline__ void load_row(Row<2>& row, const Stored* from) { row.word[0] = *reinterpret_cast<const unsigned*>(from); }
__device__ __forceinline__ void load_row(Row<1>& row, const Stored* from) { row.word[0] = from->bits; }

// Rows of a box on their way, of some groups of eight channels.
template <int POSITIONS, int AT_ONCE> struct Rows {
    Row<POSITIONS> row[AT_ONCE][8];
    int to;     // the piece of the first position, or of its row
    int first;  // element of the first position
    int left;   // channels from the first one on

    __device__ __forceinline__ void load(const Item& item, int group, const Source& source, const Origin& origin) {
        const bool inside = origin.contains(item);
        const Stored* from = source.from + (inside ? origin.offset + item.offset + 8 * group * source.step : 0);
        to = group * source.group + item.place;
        first = (int)item.w;
        left = source.channels - 8 * group;
        if (inside && left >= 8 * AT_ONCE) {
#pragma unroll
            for (int c = 0; c < 8 * AT_ONCE; ++c, from += source.step) load_row(row[c / 8][c % 8], from);
        } else {
#pragma unroll
            for (int c = 0; c < 8 * AT_ONCE; ++c, from += source.step) {
                row[c / 8][c % 8] = {};
                if (inside && c < left) load_row(row[c / 8][c % 8], from);
            }
        }
    }

    // `place` says where an element is, or -1.
    template <class Place> __device__ __forceinline__ void store(Piece* stage, int next_group, const Place& place) const {
#pragma unroll
        for (int i = 0; i < POSITIONS; ++i) {
            const int at = POSITIONS == 1 ? 0 : place(first, i);
            if (at < 0) continue;
#pragma unroll
            for (int g = 0; g < AT_ONCE; ++g) {
                unsigned words[8];
#pragma unroll
                for (int c = 0; c < 8; ++c) words[c] = row[g][c].word[i / 2];
                if (8 * g < left) stage[to + g * next_group + at] = take_halves(words, i % 2);
            }
        }
    }
};

// Rows, turned in registers. Pieces of a row are for neighbouring threads with neighbouring groups of channels, so that what
// these write lies in different banks; of few positions, a thread takes several groups, and its neighbours the next positions.
// All loads of a thread are issued before its first store.
template <int POSITIONS, int GROUPS, class Place>
__device__ __forceinline__ void turn_rows(Piece* to, Source source, const Origin& origin, int thread, const Place& place) {
    constexpr int AT_ONCE = POSITIONS == 8 ? 1 : GROUPS < 4 ? GROUPS : 4, SETS = ceil_div(GROUPS, AT_ONCE);
#if !INDEX64
    source.step = recomputed(source.step);  // the compiler would keep its multiples, for every width of loads
#endif
    Rows<POSITIONS, AT_ONCE> rows;
    if (POSITIONS == 8) {
#pragma unroll 1
        for (int i = thread; i < source.count * SETS; i += STAGERS) {
            if (8 * (i % SETS) >= source.channels) continue;
            rows.load(source.items[i / SETS], i % SETS, source, origin);
            issue_in_order();
            rows.store(to, source.group, place);
        }
    } else {
        int item = thread % source.count, group = thread / source.count * AT_ONCE;
        const int next_item = STAGERS % source.count, next_group = STAGERS / source.count * AT_ONCE;
#pragma unroll 1
        while (8 * group < source.channels) {
            rows.load(source.items[item], group, source, origin);
            issue_in_order();
            rows.store(to, source.group, place);
            item += next_item, group += next_group;
            if (item >= source.count) item -= source.count, group += AT_ONCE;
        }
    }
}

template <int GROUPS, bool COPIED, class Place>
__device__ __forceinline__ void stage(Piece* to, const Source& source, const Origin& origin, int thread, int bytes, const Place& place) {
    if (COPIED) return copy_pieces<GROUPS>(to, source, origin, thread);
    if (bytes == 16) return turn_rows<8, GROUPS>(to, source, origin, thread, place);
    if (bytes == 4) return turn_rows<2, GROUPS>(to, source, origin, thread, place);
    turn_rows<1, GROUPS>(to, source, origin, thread, place);
}

// ---- arithmetic ------------------------------------------------------------------------------------------------------

// The steps over a box, of two runs each: along W where a row has an even number of them, else along H or D.
struct Steps {
    int count, w, h;               // all; of a row, and rows of a plane
    int x_w, x_row, x_plane, x_pair;  // from one to the next, beyond that at the end of a row and of a plane; from run to run
    int y_w, y_row, y_plane, y_pair;

    __device__ __forceinline__ explicit Steps(const Box& box)
        : count(box.d * box.h * box.runs / 2), w(box.runs), h(box.h), x_w(8), x_pair(8), y_w(8), y_pair(8) {
        int x_h = box.runs * 8, y_h = AlongH::STEP * box.y_row;  // from row to row, and from plane to plane
        int x_d = box.h * x_h, y_d = AlongD::STEP * box.y_h * box.y_row;
        if (w % 2 == 0) {
            w /= 2, x_w = y_w = 16;
        } else if (h % 2 == 0) {
            h /= 2, x_pair = x_h, y_pair = y_h, x_h *= 2, y_h *= 2;
        } else {
            x_pair = x_d, y_pair = y_d, x_d *= 2, y_d *= 2;
        }
        x_row = x_h - w * x_w, y_row = y_h - w * y_w;
        x_plane = x_d - h * x_h, y_plane = y_d - h * y_h;
    }
};

// A unit's tap, and its tile of 64 rows.
__device__ __forceinline__ int tap_of_unit(int unit) { return unit / TILES_M; }
__device__ __forceinline__ int tile_of_unit(int unit) { return unit % TILES_M; }

// Where a tap's first position is in y.
__device__ __forceinline__ int place_of_tap(int tap, const Box& box) {
    const int w = tap % TAPS_W, h = tap / TAPS_W % TAPS_H, d = tap / (TAPS_W * TAPS_H);
    const int row = d * AlongD::HOP * box.y_h + h * AlongH::HOP;
    return row * box.y_row + w % AlongW::STEP * box.y_width + w * AlongW::HOP / AlongW::STEP;
}

struct Accumulators {
    float value[UNITS][SUMS_OF_UNIT];
};

__device__ __forceinline__ void multiply_add_transposed(float (&sum)[SUMS_OF_UNIT], Operand a, Operand b) {
#if DTYPE == FLOAT16
    wgmma_f16_transposed<CHANNELS_N>(sum, a, b, true);
#else
    wgmma_bf16_transposed<CHANNELS_N>(sum, a, b, true);
#endif
}

// ---- weights ---------------------------------------------------------------------------------------------------------

// Tiles of all weights.
__device__ __forceinline__ long long tiles_of_weights(const Problem& p) {
    return (long long)TILES_OF_TAPS * tiles_of(p.c_out, CHANNELS_OUT) * tiles_of(p.c_in, CHANNELS_IN) * p.groups;
}

// The first weight of a tile. Those that read the same x and y follow each other.
__device__ __forceinline__ Weight first_weight(long long tile, const Problem& p) {
    Weight first;
    first.w = CutW::first((int)(tile % CutW::COUNT));
    tile /= CutW::COUNT;
    first.h = CutH::first((int)(tile % CutH::COUNT));
    tile /= CutH::COUNT;
    first.d = CutD::first((int)(tile % CutD::COUNT));
    tile /= CutD::COUNT;
    first.co = (int)(tile % tiles_of(p.c_out, CHANNELS_OUT)) * CHANNELS_OUT;
    tile /= tiles_of(p.c_out, CHANNELS_OUT);
    first.ci = (int)(tile % tiles_of(p.c_in, CHANNELS_IN)) * CHANNELS_IN;
    first.group = tile / tiles_of(p.c_in, CHANNELS_IN);
    return first;
}

// A thread's row of 64, of the two that are 8 apart.
__device__ __forceinline__ int row_of(int thread, int half) { return thread / 32 % 4 * 16 + thread % 32 / 4 + half * 8; }

constexpr int NO_CHANNEL = 1 << 30;  // nor are those ahead of it

// The first weight of a thread, of a unit and the two rows, for the first one of its tile. Units of no use have none.
__device__ __forceinline__ Weight weight_of_unit(Weight first, int thread, int unit, int half) {
    const int tap = tap_of_unit(unit), row = tile_of_unit(unit) * 64 + row_of(thread, half), column = thread % 4 * 2;
    first.ci += ROWS_OF_X ? row : column;
    first.co = tap < TAPS ? first.co + (ROWS_OF_X ? column : row) : NO_CHANNEL;
    first.w += tap % TAPS_W * APART_W;
    first.h += tap / TAPS_W % TAPS_H * APART_H;
    first.d += tap / (TAPS_W * TAPS_H) * APART_D;
    return first;
}

// Where a sum's weight is from there.
__host__ __device__ constexpr Ahead weight_of_sum(int sum) {
    const int column = sum % SUMS_OF_UNIT / 4 * 8 + sum % 2;
    return {ROWS_OF_X ? 0 : column, ROWS_OF_X ? column : 0, 0, 0, 0};
}
__host__ __device__ constexpr int half_of_sum(int sum) { return sum / 2 % 2; }

__device__ __forceinline__ bool has_weight(const Weight& first, const Ahead& ahead, const Problem& p) {
    return exists(first, ahead, p, KERNEL_D, KERNEL_H, KERNEL_W);
}

// ---- the kernel ------------------------------------------------------------------------------------------------------

// What stagers know of their block, in shared memory: their registers are for what they load.
struct Block {
    Box box;
    long long x, y;  // where the first channels are
    int channels_in, channels_out;
    Index d, h, w;  // where y starts, for a box that starts at 0

    __device__ __forceinline__ Block(const Box& box, const Weight& first, int channels_in, int channels_out, const Problem& p)
        : box(box), x((first.group * p.c_in + first.ci) * p.x_stride[1]),
          y((first.group * p.c_out + first.co) * p.out_stride[1]), channels_in(channels_in), channels_out(channels_out),
          d(first.d * DILATION_D - (Index)p.pad[0]), h(first.h * DILATION_H - (Index)p.pad[1]),
          w(first.w * DILATION_W - (Index)p.pad[2]) {}
};

static_assert(sizeof(Block) <= BLOCK_BYTES, "room for it");

// Writes to `parts`, or straight to `out` where there is one part alone.
extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    weight_gradient_planes(const Stored* x, const Stored* y, float* parts, Stored* out, const Problem p) {
    extern __shared__ __align__(128) unsigned char shared_bytes[];
    const long long tiles = tiles_of_weights(p);
    const Weight first = first_weight(blockIdx.x % tiles, p);
    const int channels_in = min((int)p.c_in - first.ci, CHANNELS_IN);
    const int channels_out = min((int)p.c_out - first.co, CHANNELS_OUT);
    const Box box(p, first);
    Ring ring(reinterpret_cast<Barrier*>(shared_bytes));
    Piece* const stages = reinterpret_cast<Piece*>(shared_bytes + BARRIER_BYTES);
    Block* const block = reinterpret_cast<Block*>(stages + STAGES * box.stage());
    Item* const items = reinterpret_cast<Item*>(reinterpret_cast<unsigned char*>(block) + BLOCK_BYTES);  // of x, then of y

    if (threadIdx.x == 0) {
        *block = Block(box, first, channels_in, channels_out, p);
        for (int i = 0; i < STAGES; ++i) {
            barrier_init(ring.full + i, STAGERS);
            barrier_init(ring.free + i, WORKER_THREADS / 32);
        }
        barrier_init_done();
    }
    for (int i = threadIdx.x; i < box.x_items; i += THREADS) items[i] = find_item_of_x(i, p, box);
    for (int i = threadIdx.x; i < box.y_items; i += THREADS) items[box.x_items + i] = find_item_of_y(i, p, box);
    // Channels that do not exist are staged once and for all.
    if (channels_in < CHANNELS_IN || channels_out < CHANNELS_OUT)
        for (int i = threadIdx.x; i < STAGES * box.stage(); i += THREADS) stages[i] = Piece{{0, 0, 0, 0}};
    publish_shared_writes();
    __syncthreads();

    const unsigned boxes = (unsigned)(p.n * p.tiles[0] * p.tiles[1] * p.tiles[2]), parts_of_boxes = (unsigned)p.tiles[3];
    const unsigned first_box = (unsigned)(blockIdx.x / tiles);

    if (threadIdx.x >= WORKER_THREADS) {
        give_registers<STAGER_REGISTERS>();
        const int thread = threadIdx.x - WORKER_THREADS;
#if X_CHANNELS_LAST || Y_CHANNELS_LAST
        Ring landed = ring;
        int under_way = 0;
#endif
#pragma unroll 1
        for (unsigned index = first_box; index < boxes; index += parts_of_boxes) {
            unsigned n = index;
            const Index w = (Index)take(n, p, 2) * (Index)p.box[2], h = (Index)take(n, p, 1) * (Index)p.box[1];
            const Index d = (Index)take(n, p, 0) * (Index)p.box[0];
            ring.wait_until_free();
            {
                const Box& b = block->box;
                const auto place = [](int, int i) { return i; };
                stage<CHANNELS_IN / 8, X_CHANNELS_LAST>(
                    stages + ring.place * b.stage(),
                    {x + block->x + n * p.x_stride[0], items, b.x_items, block->channels_in, b.x_group, (Index)p.x_stride[1]},
                    Origin(d, h, w, p.x_extent, p.x_stride), thread, (int)p.x_vector, place);
            }
            {
                const Box& b = block->box;
                const int width = b.y_width;
                const auto place = [=](int element, int i) { return place_in_row(element + i, width); };
                stage<CHANNELS_OUT / 8, Y_CHANNELS_LAST>(
                    stages + ring.place * b.stage() + b.x_pieces(),
                    {y + block->y + n * p.out_stride[0], items + b.x_items, b.y_items, block->channels_out, b.y_group,
                     (Index)p.out_stride[1]},
                    Origin(d * STRIDE_D + block->d, h * STRIDE_H + block->h, w * STRIDE_W + block->w, p.out_extent, p.out_stride),
                    thread, (int)p.out_vector, place);
            }
#if X_CHANNELS_LAST || Y_CHANNELS_LAST
            copy_async_commit();
            ring.next();
            if (under_way < IN_FLIGHT) {
                ++under_way;
            } else {
                copy_async_wait<IN_FLIGHT>();
                landed.announce();
            }
        }
        copy_async_wait<0>();
        for (; under_way > 0; --under_way) landed.announce();
#else
            ring.announce();
        }
#endif
        return;
    }

    take_registers<WORKER_REGISTERS>();
    Accumulators acc;
#pragma unroll
    for (int i = 0; i < SUMS; ++i) acc.value[i / SUMS_OF_UNIT][i % SUMS_OF_UNIT] = 0;

    const int first_unit = (int)threadIdx.x / 128 * UNITS;
    int in_a[UNITS], in_b[UNITS];  // where a unit's operands start
#pragma unroll
    for (int i = 0; i < UNITS; ++i) {
        const int unit = first_unit + i, tap = place_of_tap(tap_of_unit(unit) < TAPS ? tap_of_unit(unit) : 0, box);
        const int rows = TILES_M > 1 ? tile_of_unit(unit) * 8 * (ROWS_OF_X ? box.x_group : box.y_group) : 0;
        in_a[i] = ROWS_OF_X && TILES_M == 1 ? 0 : (int)of_warp(rows + (ROWS_OF_X ? 0 : tap));
        in_b[i] = ROWS_OF_X ? (int)of_warp(tap) : 0;
    }
    const Steps steps(box);
    int used = -1;  // the stage whose last products are under way
#pragma unroll 1
    for (unsigned index = first_box; index < boxes; index += parts_of_boxes) {
        ring.wait_until_full();
        const Piece* const staged = stages + ring.place * box.stage();
        Operand of_x = describe(staged, 16 * steps.x_pair, 16 * box.x_group);
        Operand of_y = describe(staged + box.x_pieces(), 16 * steps.y_pair, 16 * box.y_group);
        int w = 0, h = 0;
#pragma unroll 1
        for (int step = 0; step < steps.count; ++step) {
            wgmma_fence();
#pragma unroll
            for (int i = 0; i < UNITS; ++i)
                multiply_add_transposed(acc.value[i], (ROWS_OF_X ? of_x : of_y) + in_a[i], (ROWS_OF_X ? of_y : of_x) + in_b[i]);
            wgmma_commit();
            wgmma_wait<1>();
            if (used >= 0) {
                if (threadIdx.x % 32 == 0) barrier_arrive(ring.free + used);
                used = -1;
            }
            of_x = of_x + steps.x_w, of_y = of_y + steps.y_w;
            if (++w < steps.w) continue;
            w = 0, of_x = of_x + steps.x_row, of_y = of_y + steps.y_row;
            if (++h < steps.h) continue;
            h = 0, of_x = of_x + steps.x_plane, of_y = of_y + steps.y_plane;
        }
        used = ring.place;
        ring.next();
    }
    wgmma_wait<0>();

    const auto sum_of = [&](int i) { return acc.value[i / SUMS_OF_UNIT][i % SUMS_OF_UNIT]; };
    if (p.tiles[3] > 1) {
        parts += blockIdx.x * (long long)VALUES + threadIdx.x;
#pragma unroll
        for (int i = 0; i < SUMS; ++i) parts[i * WORKER_THREADS] = sum_of(i);
    } else {
#pragma unroll
        for (int unit = 0; unit < UNITS; ++unit) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const Weight mine = weight_of_unit(first, threadIdx.x, first_unit + unit, half);
                if (!has_weight(mine, {0, 0, 0, 0, 0}, p)) continue;
                Stored* const to = out + mine.offset(p);
                const int left_in = (int)p.c_in - mine.ci, left_out = (int)p.c_out - mine.co;
#pragma unroll
                for (int i = 0; i < SUMS_OF_UNIT; ++i) {
                    const Ahead ahead = weight_of_sum(i);
                    if (half_of_sum(i) == half && ahead.ci < left_in && ahead.co < left_out)
                        narrow(acc.value[unit][i], to[distance(ahead, p)]);
                }
            }
        }
    }
}

// ---- the second kernel -----------------------------------------------------------------------------------------------
// A tile of few parts holds many weights, of which a thread's neighbours are far from its own in memory. So a block adds up 16
// rows and eight columns of all taps, puts them in shared memory, and writes them in the order of the weights.

constexpr int FEW_PARTS = 16, MAX_BYTES_OF_SUMS = 40 * 1024;
constexpr int ALL_TAPS = KERNEL_D * KERNEL_H * KERNEL_W, NEXT_CHANNELS = ALL_TAPS | 1;  // the latter in shared memory
constexpr bool IN_ORDER = 128 * NEXT_CHANNELS * 4 <= MAX_BYTES_OF_SUMS;
constexpr int BLOCKS_OF_TILE = TILES_M * 4 * TILES_N;  // that share its channels
constexpr int OF_X = ROWS_OF_X ? 16 : 8, OF_Y = 128 / OF_X;  // channels of a block

__device__ __forceinline__ void add_in_order(const float* parts, Stored* out, const Problem& p) {
    constexpr int AT_ONCE = 4;
    __shared__ float sums[IN_ORDER ? 128 * NEXT_CHANNELS : 1];
    const long long tile = blockIdx.x / BLOCKS_OF_TILE * (long long)TILES_OF_TAPS, values = tiles_of_weights(p) * VALUES;
    const int share = (int)(blockIdx.x % BLOCKS_OF_TILE), count = (int)p.tiles[3];
    const int eight = share % (TILES_N), quarter = share / (TILES_N) % 4, tile_m = share / (TILES_N) / 4;
    wait_for_kernel_before();
#pragma unroll 1
    for (int start = (int)threadIdx.x; start < 128 * ALL_TAPS; start += AT_ONCE * SUM_THREADS) {
        const float* from[AT_ONCE];
        float sum[AT_ONCE];
        int to[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            // [tap][half and neighbour][lane]
            const int at = start + i * SUM_THREADS, lane = at % 32, of_thread = at / 32 % 4;
            const int tap = min(at / 128, ALL_TAPS - 1);
            const int w = tap % KERNEL_W, h = tap / KERNEL_W % KERNEL_H, d = tap / (KERNEL_W * KERNEL_H);
            const int tile_of_taps = (CutD::tile_of(d) * CutH::COUNT + CutH::tile_of(h)) * CutW::COUNT + CutW::tile_of(w);
            const int of_tile = (CutD::place_of(d) * TAPS_H + CutH::place_of(h)) * TAPS_W + CutW::place_of(w);
            const int unit = of_tile * TILES_M + tile_m;
            const int own = unit % UNITS * SUMS_OF_UNIT + eight * 4 + of_thread;
            from[i] = parts + (tile + tile_of_taps) * VALUES + own * WORKER_THREADS + unit / UNITS * 128 + quarter * 32 + lane;
            const int row = lane / 4 + of_thread / 2 * 8, column = lane % 4 * 2 + of_thread % 2;
            to[i] = at < 128 * ALL_TAPS ? (ROWS_OF_X ? row * 8 + column : column * 16 + row) * NEXT_CHANNELS + tap : -1;
            sum[i] = 0;
        }
#pragma unroll 2
        for (int part = 0; part < count; ++part) {
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) sum[i] += from[i][part * values];
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i)
            if (to[i] >= 0) sums[to[i]] = sum[i];
    }
    __syncthreads();

    Weight first = first_weight(tile, p);
    const int rows = tile_m * 64 + quarter * 16;
    first.ci += ROWS_OF_X ? rows : eight * 8;
    first.co += ROWS_OF_X ? eight * 8 : rows;
#pragma unroll 1
    for (int at = (int)threadIdx.x; at < 128 * ALL_TAPS; at += SUM_THREADS) {
        const int tap = at % ALL_TAPS, channels = at / ALL_TAPS;
        const Ahead ahead = {channels / OF_Y, channels % OF_Y, tap / (KERNEL_W * KERNEL_H), tap / KERNEL_W % KERNEL_H, tap % KERNEL_W};
        if (has_weight(first, ahead, p)) narrow(sums[channels * NEXT_CHANNELS + tap], out[first.offset(p) + distance(ahead, p)]);
    }
}

extern "C" __global__ void weight_gradient_planes_add(const float* parts, Stored* out, const Problem p) {
    if (IN_ORDER && p.tiles[3] <= FEW_PARTS) return add_in_order(parts, out, p);
    const long long values = tiles_of_weights(p) * VALUES;
    add_parts(parts, values, p.tiles[3], [&](long long value, float sum) {
        const int thread = (int)(value % WORKER_THREADS), own = (int)(value % VALUES) / WORKER_THREADS;
        const int unit = thread / 128 * UNITS + own / SUMS_OF_UNIT;
        const Weight first = weight_of_unit(first_weight(value / VALUES, p), thread, unit, half_of_sum(own % SUMS_OF_UNIT));
        const Ahead ahead = weight_of_sum(own);
        if (has_weight(first, ahead, p)) narrow(sum, out[first.offset(p) + distance(ahead, p)]);
    });
}
