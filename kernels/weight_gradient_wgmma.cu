// Weight gradient on Hopper's tensor cores (sm_90a): float16, bfloat16 and float32 (as TF32), of arrays whose rows along W are
// contiguous or not.
//
//     out[ci, co, k] = sum over n, i of  x[n, ci, i] * y[n, co, i*stride + k*dilation - pad]
// A matrix product with M = channels of y x taps, N = channels of x, K = positions i of the whole batch; some taps along W have
// sums of their own instead. A block owns a tile of weights and a share of the boxes of positions. It stages a box of
// x, and of y all that its taps reach, both as they are in memory: nothing is turned.
//
// x is staged as [run][channel], a run being 16 bytes: 8 or 4 positions of a row. That is how a wgmma takes rows of B. y is
// staged as [channel][row][run]. Where a position meets a tap is an offset of any number of elements there, which no operand in
// shared memory may have; so A comes to registers, by ordinary loads, and taps along W are other halves of the same words, or
// other words. TF32 numbers are rounded: of y by the workers, of x by the stagers, where each has copied them to.
//
// Warps have roles: stagers bring boxes, by asynchronous copies or, if rows are not aligned, through registers; several boxes
// are on their way at a time. Workers multiply, each 64 rows of M or several times as many.
//
// Where copies of boxes can read both arrays (BOXED), one warp names them, and no thread moves an element. Rows of x come as 32,
// 64 or 128 bytes of each channel, two runs or more, in the swizzle of that width; where planes are dense, these may be of several
// rows. Rows of y come as they are, channel by channel, a little longer than they need be, so that lanes find eight channels in
// different banks.
//
// Compile-time: kernel, stride, dilation, dtype, tile, and by how many elements staged rows of y begin before the first one
// used (EARLY), since halves of words are picked by it. Run-time: N, extents, the box, padding, channels, strides, the width
// of loads, and into how many parts the positions are cut (tiles[3]).
#ifndef DTYPE
#define DTYPE FLOAT16
#endif
#include "boxes.cuh"
#include "partial_sums.cuh"
#include "tf32.cuh"

#ifndef WORKERS  // warpgroups that multiply
#define WORKERS 2
#endif
#ifndef TILES_M  // times 64 rows of M, of a worker
#define TILES_M 1
#endif
#ifndef CHANNELS_OUT  // of y, a multiple of 8; with the taps along D and H they make the rows of M
#define CHANNELS_OUT 128
#define TAPS_D 1
#define TAPS_H 1
#endif
#ifndef TAPS_W  // that have sums of their own, and how many times as many are rows of M
#define TAPS_W 3
#define GROUPS_W 1
#endif
#ifndef TILES_IN  // times 8 channels of x
#define TILES_IN 16
#endif
#ifndef EARLY
#define EARLY 0
#endif
#ifndef BOXED
#define BOXED 0
#endif
#ifndef X_RUNS  // of a row of x that copies of boxes bring of a channel at a time: 2, 4 or 8
#define X_RUNS 2
#endif
#ifndef STAGES
#define STAGES 4
#endif
#ifndef IN_FLIGHT  // boxes that are fetched behind the one that is waited for
#define IN_FLIGHT (STAGES - 2)
#endif
#ifndef MIN_BLOCKS
#define MIN_BLOCKS 1
#endif
#ifndef WORKER_REGISTERS  // of a thread, after the stagers gave up what they do not need
#define WORKER_REGISTERS 232
#define STAGER_REGISTERS 40
#endif

typedef Staged<TAPS_D, STRIDE_D, DILATION_D, 1> AxisD;
typedef Staged<TAPS_H, STRIDE_H, DILATION_H, 1> AxisH;
typedef Staged<TAPS_W * GROUPS_W, STRIDE_W, DILATION_W, 1> AxisW;

constexpr int WORKER_THREADS = 128 * WORKERS, STAGERS = 128, THREADS = WORKER_THREADS + STAGERS;
constexpr int PER_WORD = 4 / (int)sizeof(Stored);
constexpr int PIECE_WORDS = 4, PIECE = PIECE_WORDS * PER_WORD;  // words and numbers in 16 bytes
constexpr int CHANNELS_IN = 8 * TILES_IN;
constexpr int ROWS = CHANNELS_OUT * GROUPS_W * TAPS_H * TAPS_D;  // of M; those past them are of no use
static_assert(CHANNELS_OUT % 8 == 0 && ROWS <= 64 * TILES_M * WORKERS, "eight rows have one tap");
static_assert(IN_FLIGHT >= 0 && IN_FLIGHT <= STAGES - 2, "a stage is free when the next one is in use");

constexpr int TILES_OF_D = ceil_div(KERNEL_D, TAPS_D), TILES_OF_H = ceil_div(KERNEL_H, TAPS_H);
constexpr int TILES_OF_W = ceil_div(KERNEL_W, TAPS_W * GROUPS_W);

constexpr int SUMS_OF_TAP = CHANNELS_IN / 2;          // of a thread, of 64 rows
constexpr int SUMS = TILES_M * TAPS_W * SUMS_OF_TAP;  // of a thread
constexpr int VALUES = SUMS * WORKER_THREADS;         // of a block
constexpr int ALIGNMENT = BOXED ? X_RUNS * 128 : 128;  // of stages: eight rows of x
constexpr int BARRIER_BYTES = ALIGNMENT;
static_assert(2 * STAGES * 8 <= BARRIER_BYTES, "room for the barriers");

// ---- the box ---------------------------------------------------------------------------------------------------------

// A box of positions in shared memory, in pieces of 16 bytes.
struct Box {
    int d, h, runs;        // extents, along W in runs
    int x_run, x_pieces;   // of x: from a run to the next; all
    int y_d, y_h, y_row;   // what the taps reach, along W in pieces
    int y_channel, y_line;  // from a channel, and from a row, to the next
    int x_parts, y_parts;  // that a piece is fetched in: 1, or 4 words
    int x_items, y_items;  // of a channel

    __device__ __forceinline__ explicit Box(const Problem& p)
        : d((int)p.box[0]), h((int)p.box[1]), runs((int)p.box[2] / PIECE),
          // Neighbours in a row and channels, as threads store them, lie in different banks.
          x_run(CHANNELS_IN + (BOXED ? 0 : runs >= 8 ? 1 : runs >= 4 ? 2 : runs >= 2 ? 4 : 0)), x_pieces(d * h * runs * x_run),
          y_d((d - 1) * AxisD::STEP + (TAPS_D - 1) * AxisD::HOP + 1),
          y_h((h - 1) * AxisH::STEP + (TAPS_H - 1) * AxisH::HOP + 1),
          y_row(ceil_div(EARLY + (runs * PIECE - 1) * AxisW::STEP + (TAPS_W * GROUPS_W - 1) * AxisW::HOP + 1, PIECE)),
          y_channel((int)p.plane), y_line(BOXED ? CHANNELS_OUT * y_channel : y_row), x_parts(p.x_vector == 16 ? 1 : PIECE_WORDS),
          y_parts(p.out_vector == 16 ? 1 : PIECE_WORDS),
          x_items(d * h * runs * x_parts), y_items(y_d * y_h * y_row * y_parts) {}

    // What copies of boxes bring, which a barrier waits for, and a stage.
    __device__ __forceinline__ int pieces() const { return x_pieces + CHANNELS_OUT * (BOXED ? y_d * y_h : 1) * y_channel; }
    __device__ __forceinline__ int stage() const { return BOXED ? round_up(pieces(), ALIGNMENT / 16) : pieces(); }
};

#if !BOXED
// What a thread fetches at a time, of some channels: where it is from the box's first element, and its place in shared memory.
struct alignas(16) Item {
    Index offset, w;
    short d, h;
    unsigned short place;
};

// Where a box starts in its array; it may be outside.
struct Origin {
    Index d, h, w, offset;
    const long long* extent;

    __device__ __forceinline__ Origin(Index d, Index h, Index w, const long long* extent, const long long* stride)
        : d(d), h(h), w(w), offset(d * (Index)stride[2] + h * (Index)stride[3] + w * (Index)stride[4]), extent(extent) {}

    __device__ __forceinline__ bool has_row(const Item& item) const {
        return within(d + item.d, extent[0]) && within(h + item.h, extent[1]);
    }
    __device__ __forceinline__ bool contains(const Item& item) const {
        return has_row(item) && within(w + item.w, extent[2]);
    }
};

__device__ __forceinline__ Item find_item_of_x(int i, const Problem& p, const Box& box) {
    const int run = i / box.x_parts, row = run / box.runs, part = i % box.x_parts;
    Item item;
    item.w = run % box.runs * PIECE + part * PER_WORD;
    item.h = (short)(row % box.h);
    item.d = (short)(row / box.h);
    item.offset = item.d * (Index)p.x_stride[2] + item.h * (Index)p.x_stride[3] + item.w * (Index)p.x_stride[4];
    item.place = (unsigned short)(run * box.x_run * PIECE_WORDS + part);
    return item;
}

__device__ __forceinline__ Item find_item_of_y(int i, const Problem& p, const Box& box) {
    const int piece = i / box.y_parts, row = piece / box.y_row, part = i % box.y_parts;
    Item item;
    item.w = (piece % box.y_row * PIECE + part * PER_WORD) * (Index)AxisW::GAP;
    item.h = (short)(row % box.y_h * AxisH::GAP);
    item.d = (short)(row / box.y_h * AxisD::GAP);
    item.offset = item.d * (Index)p.out_stride[2] + item.h * (Index)p.out_stride[3] + item.w * (Index)p.out_stride[4];
    item.place = (unsigned short)(piece * PIECE_WORDS + part);
    return item;
}
#endif

// ---- staging ---------------------------------------------------------------------------------------------------------

// Stages in shared memory, filled by stagers and used by workers.
struct Ring {
    Barrier *full, *free;
    int place = 0, round = 0;

    __device__ __forceinline__ explicit Ring(Barrier* barriers) : full(barriers), free(barriers + STAGES) {}
    __device__ __forceinline__ void wait_until_free() const {
        if (round) barrier_wait(free + place, (round - 1) & 1);
    }
    __device__ __forceinline__ void wait_until_full() const { barrier_wait(full + place, round & 1); }
    __device__ __forceinline__ void next() {
        if (++place == STAGES) place = 0, ++round;
    }
};

typedef Pack<unsigned, PIECE_WORDS> Piece;

#if BOXED
// Where a box starts, of x or y.
struct Start {
    int n, channel, d, h, w;
};

// Names all that a stage is copied from: lanes of a warp take turns, since working out a place takes a while. Where x is flat, a box
// has whole rows.
__device__ __forceinline__ void bring_box(Piece* to, const TensorMap* x, const TensorMap* y, const Start& of_x, const Start& of_y,
                                          const Box& box, bool flat, Barrier* full) {
    const int lane = (int)threadIdx.x % 32;
    if (lane == 0) barrier_arrive_expecting(full, box.pieces() * (int)sizeof(Piece));
    __syncwarp();
    const int rows = flat ? 1 : box.h, of_row = box.h * box.runs / (rows * X_RUNS), copies_of_x = box.d * rows * of_row;
    const int copies = copies_of_x + box.y_d * box.y_h;
#pragma unroll 1
    for (int i = lane; i < copies; i += 32) {
        if (i < copies_of_x) {
            const int row = i / of_row, w = i % of_row * X_RUNS * PIECE;
            copy_box(to + i * X_RUNS * CHANNELS_IN, x, of_x.w + w, of_x.h + row % rows, of_x.d + row / rows, of_x.channel, of_x.n,
                     full);
        } else {
            const int row = i - copies_of_x, h = row % box.y_h * AxisH::GAP, d = row / box.y_h * AxisD::GAP;
            copy_box(to + box.x_pieces + row * box.y_line, y, of_y.w, of_y.h + h, of_y.d + d, of_y.channel, of_y.n, full);
        }
    }
}
#else
// Walks over all pairs of a set (of channels) and an item; neighbouring threads take neighbouring items.
struct Walk {
    int item, set;

    __device__ __forceinline__ Walk(int thread, int items)
        : item(thread % items), set(thread / items), items(items), item_step(STAGERS % items), set_step(STAGERS / items) {}
    __device__ __forceinline__ void next() {
        item += item_step;
        set += set_step;
        if (item >= items) item -= items, ++set;
    }

  private:
    int items, item_step, set_step;
};

constexpr int UNIT = 8;  // channels that a thread takes at a time

template <int BYTES> __device__ __forceinline__ void copy_part(unsigned* to, const Stored* from, bool inside) {
    if (BYTES == 16) copy_async_16_or_zeros(to, from, inside);
    if (BYTES == 4) copy_async_4(to, from, inside ? 4 : 0);
}

// Whole pieces or words, which arrive later. Channels are `step` apart in the array and `apart` pieces in shared memory.
template <int BYTES>
__device__ __forceinline__ void copy_parts(Piece* to, const Stored* from, const Item* items, Walk walk, const Origin& origin,
                                           Index step, int apart, int channels) {
    if (walk.set * UNIT >= channels) return;
    Item next = items[walk.item];
#pragma unroll 1
    do {
        const Item item = next;
        const bool inside = origin.contains(item);
        const int first = walk.set * UNIT, left = channels - first;
        const Stored* source = from + (inside ? origin.offset + item.offset + first * step : 0);
        unsigned* target = &to[first * apart].value[0] + item.place;
        walk.next();
        if (walk.set * UNIT < channels) next = items[walk.item];  // it takes a while
        if (left >= UNIT) {
#pragma unroll
            for (int c = 0; c < UNIT; ++c, target += apart * PIECE_WORDS, source += step)
                copy_part<BYTES>(target, source, inside);
        } else {
#pragma unroll 1
            for (int c = 0; c < left; ++c, target += apart * PIECE_WORDS, source += step)
                copy_part<BYTES>(target, source, inside);
        }
    } while (walk.set * UNIT < channels);
}

#if DTYPE == FLOAT32
// Rounds pieces or words of x that this thread has copied, in batches that its registers hold.
template <int BYTES>
__device__ __forceinline__ void round_parts(Piece* to, const Item* items, Walk walk, int channels) {
    typedef Pack<unsigned, BYTES / 4> Part;
    constexpr int BATCH = BYTES == 16 ? 2 : 4;
#pragma unroll 1
    for (; walk.set * UNIT < channels; walk.next()) {
        unsigned* target = &to[walk.set * UNIT].value[0] + items[walk.item].place;
#pragma unroll 1
        for (int left = min(channels - walk.set * UNIT, UNIT); left > 0; left -= BATCH) {
            Part parts[BATCH];
#pragma unroll
            for (int c = 0; c < BATCH; ++c)
                if (c < left) parts[c] = *reinterpret_cast<const Part*>(target + c * PIECE_WORDS);
#pragma unroll
            for (int c = 0; c < BATCH; ++c) {
                if (c >= left) continue;
#pragma unroll
                for (unsigned& word : parts[c].value) word = to_tf32(__uint_as_float(word));
                *reinterpret_cast<Part*>(target + c * PIECE_WORDS) = parts[c];
            }
            target += BATCH * PIECE_WORDS;
        }
    }
}
#else
// Two elements of a row at a time, `next` apart in the array and `gap` positions; eight loads before the first store.
__device__ __forceinline__ void gather_pairs(Piece* to, const Stored* from, const Item* items, Walk walk, const Origin& origin,
                                             Index step, Index next, Index gap, int apart, int channels) {
    constexpr int UNIT = 4;  // channels
#pragma unroll 1
    for (; walk.set * UNIT < channels; walk.next()) {
        const Item item = items[walk.item];
        const bool has_row = origin.has_row(item);
        const bool low = has_row && within(origin.w + item.w, origin.extent[2]);
        const bool high = has_row && within(origin.w + item.w + gap, origin.extent[2]);
        const int first = walk.set * UNIT;
        const Index at = origin.offset + item.offset + first * step;
        unsigned words[UNIT][2];
#pragma unroll
        for (int c = 0; c < UNIT; ++c) {
            const bool exists = first + c < channels;
            words[c][0] = exists && low ? from[at + c * step].bits : 0;
            words[c][1] = exists && high ? from[at + c * step + next].bits : 0;
        }
        issue_in_order();
        unsigned* const target = &to[first * apart].value[0] + item.place;
#pragma unroll
        for (int c = 0; c < UNIT; ++c)
            if (first + c < channels) target[c * apart * PIECE_WORDS] = words[c][0] | words[c][1] << 16;
    }
}
#endif

// In parts of `bytes` bytes. A word of float32 is an element, which may be copied wherever it is.
__device__ __forceinline__ void fetch(int bytes, Piece* to, const Stored* from, const Item* items, Walk walk,
                                      const Origin& origin, Index step, Index next, Index gap, int apart, int channels) {
    if (bytes == 16) return copy_parts<16>(to, from, items, walk, origin, step, apart, channels);
#if DTYPE != FLOAT32
    if (bytes != 4) return gather_pairs(to, from, items, walk, origin, step, next, gap, apart, channels);
#endif
    copy_parts<4>(to, from, items, walk, origin, step, apart, channels);
}

// Of a stage whose copies by this thread have landed; workers may use it once all stagers are done with it.
__device__ __forceinline__ void finish(Piece* stage, int x_bytes, const Item* items_x, Walk walk_x, int channels_in) {
#if DTYPE == FLOAT32
    if (x_bytes == 16) {
        round_parts<16>(stage, items_x, walk_x, channels_in);
    } else {
        round_parts<4>(stage, items_x, walk_x, channels_in);
    }
#endif
    publish_shared_writes();
}

#endif

// ---- arithmetic ------------------------------------------------------------------------------------------------------

// A lane has of a row of A, in each of two runs, as many neighbouring positions as a word has numbers: for each tap as many
// elements of y, `element` after the first one's. They are read in chunks of words, as many as are aligned for every lane.
constexpr int CHUNK = gcd(AxisW::STEP, 4);
__host__ __device__ constexpr int element(int tap, int i) { return EARLY + tap * AxisW::HOP + i * AxisW::STEP; }
constexpr int CHUNKS = element(TAPS_W - 1, PER_WORD - 1) / PER_WORD / CHUNK + 1;
__host__ __device__ constexpr bool is_used(int chunk) {
    for (int tap = 0; tap < TAPS_W; ++tap)
        for (int i = 0; i < PER_WORD; ++i)
            if (element(tap, i) / PER_WORD / CHUNK == chunk) return true;
    return false;
}

static_assert(GROUPS_W == 1 || TAPS_W * AxisW::HOP % (PER_WORD * CHUNK) == 0, "a group's taps are whole chunks later");

struct Chunks {
    unsigned value[2][2][CHUNKS][CHUNK];  // [row of A][run]

    __device__ __forceinline__ unsigned word(int row, int run, int element) const {
        return value[row][run][element / PER_WORD / CHUNK][element / PER_WORD % CHUNK];
    }
};

// The chunks of a row and a run, from number I on.
template <int I = 0> __device__ __forceinline__ void load_chunks(unsigned (&chunks)[CHUNKS][CHUNK], SharedWords from) {
    if constexpr (is_used(I)) load_words<I * CHUNK>(chunks[I], from);
    if constexpr (I + 1 < CHUNKS) load_chunks<I + 1>(chunks, from);
}

// Rows and runs are where `rows` and `runs` say, in bytes.
__device__ __forceinline__ void load(Chunks& chunks, SharedWords y, const int (&rows)[2], const unsigned (&runs)[2]) {
#pragma unroll
    for (int run = 0; run < 2; ++run) {
#pragma unroll
        for (int row = 0; row < 2; ++row) load_chunks(chunks.value[row][run], y + rows[row] + (int)runs[run]);
    }
}

// Two elements in a word, each from the low or the high half of its own.
__device__ __forceinline__ unsigned join(unsigned first, bool first_high, unsigned second, bool second_high) {
    return select_bytes(first, second, (first_high ? 0x32 : 0x10) | (second_high ? 0x7600 : 0x5400));
}

struct Fragments {
    unsigned value[TAPS_W][4];
};

// A word that is A as it was loaded needs another register nevertheless: the next load comes while products still read A, and
// the compiler would let it write there. `zero`, which it does not know to be one, makes the word in use an operand. With
// several tiles the next load is of another one's words.
__device__ __forceinline__ unsigned moved(unsigned word, unsigned in_use, unsigned zero) {
    return (word & ~zero) | (in_use & zero);
}

__device__ __forceinline__ void pick(Fragments& a, const Chunks& chunks, unsigned zero) {
#pragma unroll
    for (int tap = 0; tap < TAPS_W; ++tap) {
        const int first = element(tap, 0), second = element(tap, 1);
#if DTYPE == FLOAT32
#pragma unroll
        for (int i = 0; i < 4; ++i) a.value[tap][i] = to_tf32(__uint_as_float(chunks.word(i % 2, i / 2, first)));
#else
        const bool as_loaded = first % 2 == 0 && second == first + 1;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const unsigned word = chunks.word(i % 2, i / 2, first);
            if (!as_loaded) {
                a.value[tap][i] = join(word, first % 2 != 0, chunks.word(i % 2, i / 2, second), second % 2 != 0);
            } else {
                a.value[tap][i] = TILES_M == 1 ? moved(word, a.value[tap][i], zero) : word;
            }
        }
#endif
    }
}

struct Accumulators {
    float value[TILES_M][TAPS_W][SUMS_OF_TAP];
};

__device__ __forceinline__ void multiply_add(float (&sum)[SUMS_OF_TAP], const unsigned (&a)[4], Operand x) {
#if DTYPE == FLOAT32
    wgmma_tf32_of_registers<CHANNELS_IN>(sum, a, x, true);
#elif DTYPE == FLOAT16
    wgmma_f16_of_registers<CHANNELS_IN>(sum, a, x, true);
#else
    wgmma_bf16_of_registers<CHANNELS_IN>(sum, a, x, true);
#endif
}

// Where a run of the box starts in y, in bytes. The first one follows the last one.
__device__ __forceinline__ unsigned start_of_run(int run, const Box& box) {
    const int row = run / box.runs % (box.d * box.h), h = row % box.h, d = row / box.h;
    return ((d * AxisD::STEP * box.y_h + h * AxisH::STEP) * box.y_line + run % box.runs * AxisW::STEP) * (int)sizeof(Piece);
}

// ---- the kernel ------------------------------------------------------------------------------------------------------

// Tiles of all weights.
__device__ __forceinline__ unsigned tiles_of_weights(const Problem& p) {
    return (unsigned)(TILES_OF_D * TILES_OF_H * TILES_OF_W * tiles_of(p.c_out, CHANNELS_OUT) *
                      tiles_of(p.c_in, CHANNELS_IN) * p.groups);
}

// The first weight of a tile. Those that read the same x and y follow each other.
__device__ __forceinline__ Weight first_weight(unsigned tile, const Problem& p) {
    Weight first;
    first.w = (int)(tile % TILES_OF_W) * TAPS_W * GROUPS_W;
    tile /= TILES_OF_W;
    first.h = (int)(tile % TILES_OF_H) * TAPS_H;
    tile /= TILES_OF_H;
    first.d = (int)(tile % TILES_OF_D) * TAPS_D;
    tile /= TILES_OF_D;
    first.co = (int)(tile % tiles_of(p.c_out, CHANNELS_OUT)) * CHANNELS_OUT;
    tile /= tiles_of(p.c_out, CHANNELS_OUT);
    first.ci = (int)(tile % tiles_of(p.c_in, CHANNELS_IN)) * CHANNELS_IN;
    first.group = tile / tiles_of(p.c_in, CHANNELS_IN);
    return first;
}

// A thread's row of M, of a tile of 64 and of the two that are 8 apart.
__device__ __forceinline__ int row_of(int thread, int tile, int half) {
    return (thread / 128 * TILES_M + tile) * 64 + thread / 32 % 4 * 16 + thread % 32 / 4 + half * 8;
}

// What a row of M is, besides a channel: taps.
__device__ __forceinline__ int group_of_row(int row) { return row / CHANNELS_OUT % GROUPS_W; }
__device__ __forceinline__ int tap_h_of_row(int row) { return row / (CHANNELS_OUT * GROUPS_W) % TAPS_H; }
__device__ __forceinline__ int tap_d_of_row(int row) { return row / (CHANNELS_OUT * GROUPS_W * TAPS_H); }

// The first weight of a thread's row, for the first one of its tile. Rows of no use have none.
__device__ __forceinline__ Weight weight_of_row(Weight first, int thread, int row) {
    first.ci += thread % 4 * 2;
    first.co = row < ROWS ? first.co + row % CHANNELS_OUT : 0x7fffffff;
    first.w += group_of_row(row) * TAPS_W;
    first.h += tap_h_of_row(row);
    first.d += tap_d_of_row(row);
    return first;
}

// Where a sum's weight is from there: sums are [tile][tap][column].
__host__ __device__ constexpr Ahead weight_of_sum(int sum) {
    const int column = sum % SUMS_OF_TAP;
    return {column / 4 * 8 + column % 2, 0, 0, 0, sum / SUMS_OF_TAP % TAPS_W};
}
__host__ __device__ constexpr int tile_of_sum(int sum) { return sum / SUMS_OF_TAP / TAPS_W; }
__host__ __device__ constexpr int half_of_sum(int sum) { return sum % SUMS_OF_TAP / 2 % 2; }

__device__ __forceinline__ bool has_weight(const Weight& first, const Ahead& ahead, const Problem& p) {
    return exists(first, ahead, p, KERNEL_D, KERNEL_H, KERNEL_W);
}

#if BOXED
#define Source const __grid_constant__ TensorMap
#else
#define Source const Stored*
#endif

// Writes to `parts`, or straight to `out` where there is one part alone.
extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    weight_gradient_wgmma(Source x, Source y, float* parts, Stored* out, const Problem p) {
    extern __shared__ __align__(ALIGNMENT) unsigned char shared_bytes[];
    const Box box(p);
    const unsigned tiles = tiles_of_weights(p);
    const Weight first = first_weight(blockIdx.x % tiles, p);
    Ring ring(reinterpret_cast<Barrier*>(shared_bytes));
    Piece* const stages = reinterpret_cast<Piece*>(shared_bytes + BARRIER_BYTES);
#if BOXED
    unsigned* const starts = reinterpret_cast<unsigned*>(stages + STAGES * box.stage());
#else
    Item* const items_x = reinterpret_cast<Item*>(stages + STAGES * box.stage());
    Item* const items_y = items_x + box.x_items;
    unsigned* const starts = reinterpret_cast<unsigned*>(items_y + box.y_items);
    const int channels_in = min((int)p.c_in - first.ci, CHANNELS_IN);
    const int channels_out = min((int)p.c_out - first.co, CHANNELS_OUT);
#endif

    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) {
            barrier_init(ring.full + i, BOXED ? 1 : STAGERS);
            barrier_init(ring.free + i, WORKER_THREADS / 32);
        }
        barrier_init_done();
    }
#if !BOXED
    for (int i = threadIdx.x; i < box.x_items; i += THREADS) items_x[i] = find_item_of_x(i, p, box);
    for (int i = threadIdx.x; i < box.y_items; i += THREADS) items_y[i] = find_item_of_y(i, p, box);
    // Channels that do not exist are staged once and for all.
    if (channels_in < CHANNELS_IN || channels_out < CHANNELS_OUT)
        for (int i = threadIdx.x; i < STAGES * box.stage(); i += THREADS) stages[i] = Piece{{0, 0, 0, 0}};
    publish_shared_writes();
#endif
    for (int i = threadIdx.x; i < box.d * box.h * box.runs + 2; i += THREADS) starts[i] = start_of_run(i, box);
    __syncthreads();

    const unsigned boxes = (unsigned)(p.n * p.tiles[0] * p.tiles[1] * p.tiles[2]), parts_of_boxes = (unsigned)p.tiles[3];
    const unsigned first_box = (unsigned)(blockIdx.x / tiles);

    if (threadIdx.x >= WORKER_THREADS) {
        give_registers<STAGER_REGISTERS>();
#if BOXED
        if (threadIdx.x >= WORKER_THREADS + 32) return;
        const bool flat = is_flat(p);
        for (unsigned index = first_box; index < boxes; index += parts_of_boxes) {
            unsigned n = index;
            const int w = (int)take(n, p, 2) * (int)p.box[2], h = (int)take(n, p, 1) * (int)p.box[1];
            const int d = (int)take(n, p, 0) * (int)p.box[0];
            const Start of_x = {(int)n, (int)(first.group * p.c_in) + first.ci, d, flat ? 0 : h, flat ? h * (int)p.x_extent[2] : w};
            const Start of_y = {(int)n, (int)(first.group * p.c_out) + first.co,
                                d * STRIDE_D + first.d * DILATION_D - (int)p.pad[0],
                                h * STRIDE_H + first.h * DILATION_H - (int)p.pad[1],
                                w * STRIDE_W + first.w * DILATION_W - (int)p.pad[2] - EARLY};
            ring.wait_until_free();
            bring_box(stages + ring.place * box.stage(), &x, &y, of_x, of_y, box, flat, ring.full + ring.place);
            ring.next();
        }
#else
        const int thread = threadIdx.x - WORKER_THREADS;
        x += (first.group * p.c_in + first.ci) * p.x_stride[1];
        y += (first.group * p.c_out + first.co) * p.out_stride[1];
        const Walk walk_x(thread, box.x_items), walk_y(thread, box.y_items);
        Ring landed = ring;
        int under_way = 0;
        for (unsigned index = first_box; index < boxes; index += parts_of_boxes) {
            unsigned n = index;
            const Index w = (Index)take(n, p, 2) * (Index)p.box[2], h = (Index)take(n, p, 1) * (Index)p.box[1];
            const Index d = (Index)take(n, p, 0) * (Index)p.box[0];
            const Origin of_x(d, h, w, p.x_extent, p.x_stride);
            const Origin of_y(d * STRIDE_D + first.d * DILATION_D - (Index)p.pad[0],
                              h * STRIDE_H + first.h * DILATION_H - (Index)p.pad[1],
                              w * STRIDE_W + first.w * DILATION_W - (Index)p.pad[2] - EARLY, p.out_extent, p.out_stride);
            Piece* const to = stages + ring.place * box.stage();
            const Stored *const from_x = x + n * p.x_stride[0], *const from_y = y + n * p.out_stride[0];
            const Index step_x = (Index)p.x_stride[1], step_y = (Index)p.out_stride[1];
            ring.wait_until_free();
            fetch((int)p.x_vector, to, from_x, items_x, walk_x, of_x, step_x, (Index)p.x_stride[4], 1, 1, channels_in);
            fetch((int)p.out_vector, to + box.x_pieces, from_y, items_y, walk_y, of_y, step_y,
                  AxisW::GAP * (Index)p.out_stride[4], AxisW::GAP, box.y_channel, channels_out);
            copy_async_commit();
            ring.next();
            if (under_way < IN_FLIGHT) {
                ++under_way;
            } else {
                copy_async_wait<IN_FLIGHT>();
                finish(stages + landed.place * box.stage(), (int)p.x_vector, items_x, walk_x, channels_in);
                barrier_arrive(landed.full + landed.place);
                landed.next();
            }
        }
        copy_async_wait<0>();
        for (; under_way > 0; --under_way) {
            finish(stages + landed.place * box.stage(), (int)p.x_vector, items_x, walk_x, channels_in);
            barrier_arrive(landed.full + landed.place);
            landed.next();
        }
#endif
        return;
    }

    take_registers<WORKER_REGISTERS>();
    Accumulators acc;
#pragma unroll
    for (int i = 0; i < SUMS; ++i) acc.value[tile_of_sum(i)][i / SUMS_OF_TAP % TAPS_W][i % SUMS_OF_TAP] = 0;

    int rows[TILES_M][2];  // where they are in y, in bytes
#pragma unroll
    for (int i = 0; i < 2 * TILES_M; ++i) {
        const int of_thread = row_of(threadIdx.x, i / 2, i % 2), row = of_thread < ROWS ? of_thread : 0;
        const int of_taps = tap_d_of_row(row) * AxisD::HOP * box.y_h + tap_h_of_row(row) * AxisH::HOP;
        const int words = (row % CHANNELS_OUT * box.y_channel + of_taps * box.y_line) * PIECE_WORDS +
                          group_of_row(row) * TAPS_W * AxisW::HOP / PER_WORD + (int)threadIdx.x % 4 * AxisW::STEP;
        rows[i / 2][i % 2] = 4 * words;
    }

    const int steps = box.d * box.h * box.runs / 2;  // of two runs each
    Chunks chunks;
    Fragments a = {};
    const unsigned zero = (unsigned)(p.groups >> 32);
    unsigned runs[2];  // of the next step
    load_words<0>(runs, words_at(starts));
    int used = -1;  // the stage whose last products are under way
#pragma unroll 1
    for (unsigned index = first_box; index < boxes; index += parts_of_boxes) {
        ring.wait_until_full();
        const Piece* const stage = stages + ring.place * box.stage();
        const SharedWords staged_y = words_at(stage + box.x_pieces);
        SharedWords next_runs = words_at(starts);
        Operand staged_x = of_warp(BOXED ? describe_rows<16 * X_RUNS>(stage, 8) : describe(stage, box.x_run * 16, 128));
#pragma unroll 1
        for (int step = 0; step < steps; ++step) {
#pragma unroll
            for (int tile = 0; tile < TILES_M; ++tile) {
                load(chunks, staged_y, rows[tile], runs);  // while the products before are under way
                if (tile == TILES_M - 1) load_words<0>(runs, next_runs = next_runs + 2 * (int)sizeof(unsigned));
                wgmma_wait<0>();
                if (tile == 0 && used >= 0) {
                    __syncwarp();  // all lanes have read their y
                    if (threadIdx.x % 32 == 0) barrier_arrive(ring.free + used);
                    used = -1;
                }
                pick(a, chunks, zero);
                wgmma_fence();
#pragma unroll
                for (int tap = 0; tap < TAPS_W; ++tap) multiply_add(acc.value[tile][tap], a.value[tap], staged_x);
                wgmma_commit();
            }
            // Two runs of all channels; of longer rows, to the next two, or to the first ones of the next row.
            staged_x = staged_x + (X_RUNS == 2 ? 2 * box.x_run : (step + 1) % (X_RUNS / 2) ? 2 : X_RUNS * CHANNELS_IN - X_RUNS + 2);
        }
        used = ring.place;
        ring.next();
    }
    wgmma_wait<0>();

    const auto sum_of = [&](int i) { return acc.value[tile_of_sum(i)][i / SUMS_OF_TAP % TAPS_W][i % SUMS_OF_TAP]; };
    if (p.tiles[3] > 1) {
        let_next_kernel_start();  // the second one: its blocks come as these end
        parts += blockIdx.x * (long long)VALUES + threadIdx.x;
#pragma unroll
        for (int i = 0; i < SUMS; ++i) parts[i * WORKER_THREADS] = sum_of(i);
    } else {
#pragma unroll
        for (int tile = 0; tile < TILES_M; ++tile) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const Weight mine = weight_of_row(first, threadIdx.x, row_of(threadIdx.x, tile, half));
                if (!has_weight(mine, {0, 0, 0, 0, 0}, p)) continue;
                Stored* const to = out + mine.offset(p);
                const int channels = (int)p.c_in - mine.ci, taps = KERNEL_W - mine.w;
#pragma unroll
                for (int i = 0; i < SUMS; ++i) {
                    const Ahead ahead = weight_of_sum(i);
                    if (tile_of_sum(i) == tile && half_of_sum(i) == half && ahead.ci < channels && ahead.w < taps)
                        narrow(sum_of(i), to[distance(ahead, p)]);
                }
            }
        }
    }
}

// ---- the second kernel -----------------------------------------------------------------------------------------------
// A tile of few parts holds many weights, of which a thread's neighbours are far from its own in memory. So a block adds up all
// sums of eight channels of x, or those of 64 rows, puts them in shared memory, and writes them in the order of the weights.

constexpr int FEW_PARTS = 16;
constexpr int ALL_TILES_M = TILES_M * WORKERS;
constexpr int PARTS_AT_ONCE = 8;

// The first weight of a row of M, and how many follow along W.
struct Row {
    static constexpr int SHIFT = 8;
    static_assert(TAPS_W < 1 << SHIFT, "taps beside the place");
    long long bits;

    __device__ __forceinline__ static Row of(const Weight& first, const Problem& p) {
        const int taps = has_weight(first, {0, 0, 0, 0, 0}, p) ? min(KERNEL_W - first.w, TAPS_W) : 0;
        return {taps ? first.offset(p) * (1 << SHIFT) | taps : 0};
    }
    __device__ __forceinline__ long long place() const { return bits >> SHIFT; }
    __device__ __forceinline__ int taps() const { return (int)bits & ((1 << SHIFT) - 1); }
};

// From one channel of x to the next in shared memory. There, memory of all functions that a kernel calls lies side by side: for as many
// tiles of 64 rows as a block has at most, for one of them, and for the sums of many parts.
__host__ __device__ constexpr int next_channel(int tiles) { return 64 * tiles * TAPS_W + 4; }
__host__ __device__ constexpr int bytes_of_sums(int tiles) {
    return 8 * next_channel(tiles) * (int)sizeof(float) + 64 * tiles * (int)sizeof(Row);
}
constexpr int BYTES_OF_SLICES = SUM_THREADS * (WIDE<float> + 1) * (int)sizeof(float), MAX_STATIC_BYTES = 48 * 1024;
constexpr bool HAVE_ROOM = bytes_of_sums(ALL_TILES_M) + bytes_of_sums(1) + BYTES_OF_SLICES <= MAX_STATIC_BYTES;
constexpr int TILES_OF_BLOCK = HAVE_ROOM ? ALL_TILES_M : 1;

// A block has so many tiles of 64 rows.
template <int TILES> __device__ __forceinline__ void add_few_parts(const float* parts, Stored* out, const Problem& p) {
    constexpr int BLOCK_ROWS = 64 * TILES, FOURS = BLOCK_ROWS * TAPS_W * 2;
    constexpr int NEXT_CHANNEL = next_channel(TILES);
    __shared__ float sums[8 * NEXT_CHANNEL];
    __shared__ Row rows[BLOCK_ROWS];
    unsigned block = blockIdx.x;
    const int eight = (int)(block % TILES_IN) * 8;  // the first of its channels
    block /= TILES_IN;
    const int first_tile = (int)(block % (ALL_TILES_M / TILES)) * TILES, first_row = first_tile * 64;
    // In 32 bits, the compiler would wait for each load before the next.
    const long long tile = block / (ALL_TILES_M / TILES), next = (long long)tiles_of_weights(p) * (VALUES / 4);
    const int count = (int)p.tiles[3];
    Weight first = first_weight((unsigned)tile, p);
    first.ci += eight;
    const int channels = (int)min(p.c_in - first.ci, 8ll);
    for (int row = (int)threadIdx.x; row < BLOCK_ROWS; row += SUM_THREADS)
        rows[row] = Row::of(weight_of_row(first, 0, first_row + row), p);
    parts += tile * VALUES;
    wait_for_kernel_before();
#pragma unroll 1
    for (int at = (int)threadIdx.x; at < FOURS; at += SUM_THREADS) {
        // [tile of 64 rows][tap][half and neighbour][four threads of the worker]: a row's every second column
        const int thread = at % 32 * 4, of_thread = at / 32 % 4, tap = at / 128 % TAPS_W, tile_m = at / (128 * TAPS_W);
        const int own = ((first_tile + tile_m) % TILES_M * TAPS_W + tap) * SUMS_OF_TAP + eight / 2 + of_thread;
        const int in_part = own * WORKER_THREADS + (first_tile + tile_m) / TILES_M * 128 + thread;
        const Four* const from = reinterpret_cast<const Four*>(parts + in_part);
        Four sum = {{0, 0, 0, 0}};
        for (int part = 0; part < count; part += PARTS_AT_ONCE) {
            Four some[PARTS_AT_ONCE];
#pragma unroll
            for (int i = 0; i < PARTS_AT_ONCE; ++i) some[i] = part + i < count ? from[(part + i) * next] : Four{{0, 0, 0, 0}};
#pragma unroll
            for (int i = 0; i < PARTS_AT_ONCE; ++i)
#pragma unroll
                for (int k = 0; k < 4; ++k) sum.value[k] += some[i].value[k];
        }
        const int row = tile_m * 64 + row_of(thread, 0, of_thread / 2);
#pragma unroll
        for (int k = 0; k < 4; ++k) sums[(k * 2 + of_thread % 2) * NEXT_CHANNEL + row * TAPS_W + tap] = sum.value[k];
    }
    __syncthreads();

    // What rows are besides channels of y follows each other in memory, and for each of these the taps.
    constexpr int SPAN = ceil_div(BLOCK_ROWS - 1, CHANNELS_OUT) + 1;
#pragma unroll 2
    for (int at = (int)threadIdx.x; at < 8 * CHANNELS_OUT * SPAN * TAPS_W; at += SUM_THREADS) {
        const int tap = at % TAPS_W, taps = first_row / CHANNELS_OUT + at / TAPS_W % SPAN;
        const int co = at / (TAPS_W * SPAN) % CHANNELS_OUT, channel = at / (TAPS_W * SPAN * CHANNELS_OUT);
        const int row = taps * CHANNELS_OUT + co - first_row;
        if (row < 0 || row >= BLOCK_ROWS || channel >= channels || tap >= rows[row].taps()) continue;
        const long long place = rows[row].place() + channel * p.weight_stride[0] + tap * p.weight_stride[4];
        narrow(sums[channel * NEXT_CHANNEL + row * TAPS_W + tap], out[place]);
    }
}

extern "C" __global__ void __launch_bounds__(SUM_THREADS, SUM_BLOCKS)
    weight_gradient_wgmma_add(const float* parts, Stored* out, const Problem p) {
    const unsigned tiles = tiles_of_weights(p), values = tiles * VALUES;
    if (p.tiles[3] <= FEW_PARTS) {
        // The launch has as many blocks as it takes if each has as many rows as it may, or 64 of them.
        if (gridDim.x * TILES_OF_BLOCK == tiles * (unsigned)(TILES_IN * ALL_TILES_M)) {
            add_few_parts<TILES_OF_BLOCK>(parts, out, p);
        } else {
            add_few_parts<1>(parts, out, p);
        }
        return;
    }
    add_parts(parts, values, p.tiles[3], [&](unsigned value, float sum) {
        const int thread = (int)(value % WORKER_THREADS), own = (int)(value % VALUES) / WORKER_THREADS;
        const int row = row_of(thread, tile_of_sum(own), half_of_sum(own));
        const Weight first = weight_of_row(first_weight(value / VALUES, p), thread, row);
        const Ahead ahead = weight_of_sum(own);
        if (has_weight(first, ahead, p)) narrow(sum, out[first.offset(p) + distance(ahead, p)]);
    });
}
