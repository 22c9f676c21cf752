// Correlate on Hopper's tensor cores (sm_90a), x in rows: float16, bfloat16 and float32 (as TF32 or 3xTF32).
//
//     out[n, co, i] = bias[co] + sum over ci, k of  x[n, ci, i*stride + k*dilation - pad] * weight[ci, co, k]
//
// The same sums as those of `correlate_wgmma.cu`, which see. What bounds that kernel is how x gets into shared memory, as a wgmma
// wants it there: turned, taken apart by classes, rounded or split. Here rows of x are copied as they are, 16 bytes at a time if
// they are aligned for it, and a wgmma takes A from registers: with g = lane / 4 and t = lane % 4, a thread loads what positions
// g and g + 8 of a warp's 16 read of channel t (of 16 bits: and t + 4), all taps along W at once, and picks from these words.
//
// K is [group of channels][pair of taps along W][channel and tap]: a group is four channels, or eight of 16 bits, so that with a
// pair of taps it makes a wgmma. The last one of an odd number of taps makes one with two groups (SHARED); otherwise it is half of a
// pair, the rest of which is zeros.
//
// Classes of taps along D and H, boxes, stages and the ring of weights are those of `correlate_wgmma.cu`. Along W there are none:
// a position reads UNITS units of STRIDE_W elements that follow each other, and of those the words that its taps need.
//
// Where bulk tensor copies can read x (BOXED), one thread names slices of a box. A slice is staged as [row along H][channel][words
// along W], so that eight positions of four channels lie in different banks whatever the extents, and a row of A is any position of
// the box. With WHOLE_H it has the rows of all taps along H, and no classes there: stages are fewer and larger.
// With JOIN_H these are one row, where the kernel is the stride: so many rows may be whole 16 bytes where one is not.
//
// Compile-time: kernel, stride, dilation, dtype, precision, tile, and the padding along W modulo the stride, as it says which
// elements share a word. Run-time: N, extents, the box, padding, channels.
#ifndef PAD_W  // the padding along W modulo the stride
#define PAD_W 1
#endif
#ifndef K_STEPS  // groups of channels that are staged at a time
#define K_STEPS 2
#endif
#ifndef SWIZZLED  // whether rows are 128 bytes without a halo, in the order in which copies put their pieces then
#define SWIZZLED 0
#endif
#define SPLIT_BY_WORKERS 1
#include "correlate_box.cuh"

constexpr int IN_WORD = 4 / (int)sizeof(Stored);  // elements
constexpr int UNIT = STRIDE_W / IN_WORD;  // words from a position to the next one
static_assert(STRIDE_W % IN_WORD == 0, "all positions read the same halves of words");
constexpr int ALIGNED = 4 / gcd(UNIT, 4);  // positions of which each so many begin with 16 aligned bytes

// Where a tap reads, counted in elements from the position's first unit, which is one before it if there is padding.
constexpr int BEFORE = PAD_W > 0;
__host__ __device__ constexpr int element_of(int tap) { return tap * DILATION_W + BEFORE * STRIDE_W - PAD_W; }
constexpr int UNITS = element_of(KERNEL_W - 1) / STRIDE_W + 1;
constexpr int REACH_W = UNITS - 1;

// Whether a word of a position's units is read.
__host__ __device__ constexpr bool is_read(int first, int count) {
    for (int tap = 0; tap < KERNEL_W; ++tap)
        if (element_of(tap) / IN_WORD >= first && element_of(tap) / IN_WORD < first + count) return true;
    return false;
}

constexpr int CHUNK = K_STEPS * PIECE;  // channels
// Whether two groups share products: fragments of these, too, alternate from one call of `multiply` to the next.
constexpr bool SHARED = KERNEL_W % 2 == 1 && KERNEL_W > 1 && K_STEPS % 2 == 0 &&
                        (PRECISION == TF32X3 || TILES_M * K_STEPS % 4 == 0);
constexpr int TOGETHER = SHARED ? 2 : 1;  // groups
constexpr int PAIRS = SHARED ? KERNEL_W / 2 : ceil_div(KERNEL_W, 2);  // that a group has products for
constexpr int PRODUCTS = TOGETHER * PAIRS + SHARED;  // of so many groups
constexpr int COLUMNS = TILE_C;  // of a wgmma

// A slot of weights: [groups together][group][pair of taps][part][2 pieces][column][16 bytes], and behind these groups what they
// share. Sizes in units of 16 bytes.
constexpr int OPERAND = 2 * COLUMNS;
constexpr int SLOT = K_STEPS / TOGETHER * PRODUCTS * PARTS * OPERAND;

constexpr int SETS = 1;  // see wgmma_store.cuh
constexpr int SUMS = 1, MOST_TAPS = 1;
__host__ __device__ constexpr int set_of(int) { return 0; }
__host__ __device__ constexpr int column_of(int) { return 0; }
constexpr int SUM_ROWS = ROWS;
constexpr int NEXT_TAP = 0;
constexpr int SET_OUTPUTS = 1;

#include "correlate_store.cuh"

static_assert(HAS_BITS, "an item has a bit for each class along D and H");
static_assert(!X_CHANNELS_LAST && !MERGE_W && !TAKE_TURNS, "rows of x, a position's taps at once, and one team");
static_assert(BOXED || !(WHOLE_H || JOIN_H), "threads bring the rows of one class");
static_assert(!JOIN_H || (!WHOLE_H && KERNEL_H == STRIDE_H && DILATION_H == 1 && PAD_W == 0 && REACH_W == 0), "taps share no row");
static_assert(!SWIZZLED || (BOXED && !JOIN_H && UNITS == 1 && BEFORE == 0 && 4 % UNIT == 0),
              "a position's words are of one piece, and all that its taps read");
static_assert(!BOXED || (!OUT_CHANNELS_LAST && CHUNK % 8 == 0), "rows out, and eights of channels");
static_assert(TILES_M * K_STEPS % 2 == 0, "fragments alternate, from one call of `multiply` to the next, too");
static_assert(PRECISION == TF32X3 || TILES_M * K_STEPS > 2, "words are loaded two steps ahead of what still reads A");

constexpr int STAGES_AT = round_up(BARRIER_BYTES + RING * SLOT * (int)sizeof(Piece), SWIZZLED ? 1024 : 128);  // bytes
constexpr int IN_FLIGHT = X_STAGES - 2;  // stages whose copies may be under way while one is used and one waits

// ---- staging ---------------------------------------------------------------------------------------------------------

// The first position whose unit is staged, for a box whose first position is w; before these, what alignment asks for.
__device__ __forceinline__ Index first_unit(const Problem& p, Index w) { return w - (Index)p.pad[2] / STRIDE_W - BEFORE; }
__device__ __forceinline__ int lead(const Problem& p, Index w) { return (int)(first_unit(p, w) & (ALIGNED - 1)); }

#if BOXED
// The rows of A are the positions of the box, one after the other.
__device__ __forceinline__ Staged staged_box(const Problem& p) {
    return {(int)p.box[0], (int)p.box[1], (int)p.box[2], (int)p.plane};
}

// What is staged, in words: a row of a channel, all channels of it, and a slice along D of so many rows.
struct Slices {
    int row, line, slice;

    __device__ __forceinline__ explicit Slices(const Problem& p)
        : row((int)p.plane), line(CHUNK * row),
          slice((((int)p.box[1] - 1) * STEP_H + (JOIN_H ? 0 : REACH_H) + 1) * line) {}
};

__device__ __forceinline__ int stage_pieces(const Problem& p, const Staged&) {
    return ((int)p.box[0] + REACH_D) * Slices(p).slice / 4;
}

// Brings the slices of a stage that its class along D reads.
__device__ __forceinline__ void bring_slices(Piece* to, const TensorMap* x, const Problem& p, const Block& b, int d, int h, int chunk,
                                             Barrier* full) {
    const int slices = (int)p.box[0] + (taps_of<AxisD, KERNEL_D>(d) - 1) * AxisD::HOP, pieces = Slices(p).slice / 4;
    const int at_d = (int)(b.d * STRIDE_D - (Index)p.pad[0]) + d * DILATION_D;
    const int at_h = JOIN_H ? (int)b.h : (int)(b.h * STRIDE_H - (Index)p.pad[1]) + h * DILATION_H;
    const int at_w = (int)((first_unit(p, b.w) - lead(p, b.w)) * STRIDE_W), channel = (int)(b.group * p.c_in) + chunk * CHUNK;
    barrier_arrive_expecting(full, slices * pieces * (int)sizeof(Piece));
#pragma unroll 1
    for (int i = 0; i < slices; ++i)
        copy_box(to + i * pieces, x, at_w, channel, at_h, at_d + i * STRIDE_D, (int)b.n, full);
}
#else
__device__ __forceinline__ int most_lead(const Problem& p) { return p.box[2] % ALIGNED ? ALIGNED - 1 : lead(p, 0); }

// Along W, units; a plane is what is staged of a channel, in words.
__device__ __forceinline__ Staged staged_box(const Problem& p) {
    return {(int)p.box[0] + REACH_D, (int)p.box[1] + REACH_H, round_up((int)p.box[2] + REACH_W + most_lead(p), ALIGNED),
            (int)p.plane};
}

// Pieces of 16 bytes that a stage has.
__device__ __forceinline__ int stage_pieces(const Problem&, const Staged& s) { return CHUNK / 4 * s.plane; }

// What a thread stages at a time, of some channels: one, two or four words of a row.
struct Item {
    Index offset;    // in x, of the first channel and the first class along D and H
    unsigned place;  // bits for the elements of a word (2; of several words, the first), and the classes along H (4) and D (4)
};

// `p.x_vector` says how many bytes of a row are copied at a time, 16, 8 or 4, or that 16-bit elements are loaded one by one.
__device__ __forceinline__ int words_of_item(const Problem& p) { return p.x_vector ? (int)p.x_vector / 4 : 1; }
__device__ __forceinline__ bool is_copied(const Problem& p) { return sizeof(Stored) == 4 || p.x_vector; }

// All items of the box, worked out once for all chunks and classes. They lie in shared memory as they follow each other here.
__device__ __forceinline__ void find_items(Item* items, const Problem& p, const Staged& s, const Block& b, int thread) {
    const int across = s.w * UNIT / words_of_item(p);
    const Index first = (first_unit(p, b.w) - lead(p, b.w)) * STRIDE_W;
    for (int i = thread; i < s.d * s.h * across; i += STAGERS) {
        const int row = (int)quotient(i, p.box_magic[0]), d = (int)quotient(row, p.box_magic[1]), h = row - d * s.h;
        const Index at_d = (b.d + d) * STRIDE_D - (Index)p.pad[0], at_h = (b.h + h) * STRIDE_H - (Index)p.pad[1];
        const Index at_w = first + (i - row * across) * words_of_item(p) * IN_WORD;
        unsigned bits = within(at_w, p.x_extent[2]) | (unsigned)within(at_w + IN_WORD - 1, p.x_extent[2]) << 1;
        if (bits) bits |= classes_of_row(p, d, h, at_d, at_h);  // what is beyond the row is of no class
        items[i].offset = at_d * (Index)p.x_stride[2] + at_h * (Index)p.x_stride[3] + at_w * (Index)p.x_stride[4];
        items[i].place = bits;
    }
}

// Which classes a stage is for, and what there is of its chunk.
struct Stage {
    int d, h, channels;
};

// Calls `visit(item, first channel, its place in shared memory)` for the thread's share of items, each with four channels.
// Neighbouring threads take neighbouring items.
template <class Visit>
__device__ __forceinline__ void each_item(unsigned* to, const Item* items, int count, int words, int plane, int thread,
                                          const Visit& visit) {
    constexpr int FOURS = CHUNK / 4;
#pragma unroll 2
    for (int at = thread; at < count * FOURS; at += STAGERS) {
        int four = 0;
#pragma unroll
        for (int i = 1; i < FOURS; ++i) four += at >= i * count;
        const int item = at - four * count;
        visit(items[item], four * 4, to + four * 4 * plane + item * words);
    }
}

// Begins to copy the rows of a stage. What does not exist becomes zero.
template <int BYTES>
__device__ __forceinline__ void copy_rows(unsigned* to, const Stored* x, const Item* items, const Problem& p, const Stage& st,
                                          int count, int plane, int thread) {
    const unsigned wanted = 1u << (12 + st.d) | 1u << (8 + st.h);
    const Index step = (Index)p.x_stride[1];
    each_item(to, items, count, BYTES / 4, plane, thread, [&](const Item& item, int channel, unsigned* target) {
        const bool inside = (item.place & wanted) == wanted;
        const Stored* from = x + item.offset + channel * step;
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            const bool copies = inside && channel + k < st.channels;
            if (BYTES == 16) copy_async_16_or_zeros(target, copies ? from : x, copies);
            else copy_async<BYTES>(target, copies ? from : x, copies ? BYTES : 0);
            from += step;
            target += plane;
        }
    });
}

// Of rows that no word is aligned to, 16-bit elements come through registers.
__device__ __forceinline__ void load_rows(unsigned* to, const Stored* x, const Item* items, const Problem& p, const Stage& st,
                                          int count, int plane, int thread) {
    const unsigned wanted = 1u << (12 + st.d) | 1u << (8 + st.h);
    const Index step = (Index)p.x_stride[1], next = (Index)p.x_stride[4];
    each_item(to, items, count, 1, plane, thread, [&](const Item& item, int channel, unsigned* target) {
        const bool inside = (item.place & wanted) == wanted;
        const Stored* from = x + item.offset + channel * step;
        unsigned words[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            const bool there = inside && channel + k < st.channels;
            unsigned low = 0, high = 0;
            if (there && (item.place & 1)) low = bits_of(from[0]);
            if (there && (item.place & 2)) high = bits_of(from[next]);
            words[k] = low | high << 16;
            from += step;
        }
#pragma unroll
        for (int k = 0; k < 4; ++k) target[k * plane] = words[k];
    });
}

__device__ __forceinline__ void stage_x(Piece* to, const Stored* x, const Item* items, const Problem& p, const Staged& s,
                                        const Stage& st, int thread) {
    const int slices = (int)p.box[0] + (taps_of<AxisD, KERNEL_D>(st.d) - 1) * AxisD::HOP;
    const int count = slices * s.h * (s.w * UNIT / words_of_item(p));
    unsigned* const words = to->value;
    x += st.d * DILATION_D * (Index)p.x_stride[2] + st.h * DILATION_H * (Index)p.x_stride[3];
    if (p.x_vector == 16) copy_rows<16>(words, x, items, p, st, count, s.plane, thread);
    else if (p.x_vector == 8) copy_rows<8>(words, x, items, p, st, count, s.plane, thread);
    else if (is_copied(p)) copy_rows<4>(words, x, items, p, st, count, s.plane, thread);
    else if constexpr (sizeof(Stored) == 2) load_rows(words, x, items, p, st, count, s.plane, thread);
}
#endif

// ---- arithmetic ------------------------------------------------------------------------------------------------------

// What a thread loads for one tile and group of channels: of two positions, which are 8 rows of A apart, and one channel or, of
// 16 bits, two that are four apart.
struct Window {
    unsigned value[2][IN_WORD][UNITS * UNIT];
};

#if BOXED
// Where a thread's words of a row of taps are.
struct Words {
    SharedWords first;  // of the box's first position and the thread's first one of eight channels
    int next_channel, next_eight;  // further in bytes: its other channel of eight, and eight channels
    unsigned zero;
};

// Of each tile, where the two positions are that a thread reads, in bytes. Beyond the box it is the first one, whose sums nobody
// stores.
struct Starts {
    int value[TILES_M][2];
};

__device__ __forceinline__ Starts find_starts_of_words(const int (&start)[TILES_M], const Problem& p, const Staged& s) {
    const Slices of(p);
    Starts starts;
#pragma unroll
    for (int tile = 0; tile < TILES_M; ++tile) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = start[tile] + threadIdx.x / 32 % 4 * 16 + half * 8 + threadIdx.x % 32 / 4;
            const int line = (int)quotient(row, p.box_magic[2]), d = (int)quotient(line, p.box_magic[3]);
            const int w = row - line * s.w, h = line - d * s.h;
            const int of_row = w * UNIT * 4 ^ (SWIZZLED ? (int)threadIdx.x % 4 * 32 : 0);  // of the thread's first channel
            starts.value[tile][half] = d < s.d ? (d * of.slice + h * STEP_H * of.line) * 4 + of_row : 0;
        }
    }
    return starts;
}

// Of eight channels a thread has neighbours, or those that are four apart: what lies in different banks.
__device__ __forceinline__ int first_of_thread(const Problem& p, const Staged&) {
    return threadIdx.x % 4 * (p.x_vector == 1 ? 2 : 1) * Slices(p).row;
}

__device__ __forceinline__ Words words_of_taps(const unsigned* stage, const Problem& p, const Staged&, int tap_d, int tap_h,
                                               unsigned zero) {
    const Slices of(p);
    const int row = tap_d * AxisD::HOP * of.slice + tap_h * (JOIN_H ? (int)p.box[2] * UNIT : AxisH::HOP * of.line);
    return {words_at(stage + row), (int)p.x_vector * of.row * 4, 8 * of.row * 4, zero};
}

__device__ __forceinline__ SharedWords words_of(const Words& x, const Starts& starts, int tile, int half, int group, int channel) {
    const int of_eight = group * PIECE % 8 / 4 + channel, start = starts.value[tile][half] ^ (SWIZZLED ? of_eight * 16 : 0);
    return x.first + (start + group * PIECE / 8 * x.next_eight + of_eight * x.next_channel);
}
#else
// Where a thread's words of a row of taps are.
struct Words {
    SharedWords first;  // of the first tile, group, position and channel
    int next_position, next_channels, next_group;  // further in bytes: eight positions, four channels, a group
    unsigned zero;
};

// Where the first rows of a worker's tiles are.
struct Starts {
    int value[TILES_M];
};

__device__ __forceinline__ Starts find_starts_of_words(const int (&start)[TILES_M], const Problem&, const Staged&) {
    Starts starts;
#pragma unroll
    for (int tile = 0; tile < TILES_M; ++tile) starts.value[tile] = start[tile];
    return starts;
}

__device__ __forceinline__ int pitch_of(const Problem& p, const Staged& s) { return p.patches[1] ? s.w : 8; }  // of eight rows of A

__device__ __forceinline__ int first_of_thread(const Problem& p, const Staged& s) {
    return (threadIdx.x / 32 % 4 * 2 * pitch_of(p, s) + threadIdx.x % 32 / 4) * UNIT + threadIdx.x % 4 * s.plane;
}

__device__ __forceinline__ Words words_of_taps(const unsigned* stage, const Problem& p, const Staged& s, int tap_d, int tap_h,
                                               unsigned zero) {
    const int row = (tap_d * AxisD::HOP * s.h + tap_h * AxisH::HOP) * s.w * UNIT;
    return {words_at(stage + row), pitch_of(p, s) * UNIT * 4, s.plane * 16, s.plane * PIECE * 4, zero};
}

__device__ __forceinline__ SharedWords words_of(const Words& x, const Starts& starts, int tile, int half, int group, int channel) {
    const SharedWords first = x.first + (starts.value[tile] * (UNIT * 4) + group * x.next_group);
    return first + (half * x.next_position + channel * x.next_channels);
}
#endif

template <int FIRST, int COUNT> __device__ __forceinline__ void load_some(unsigned* to, SharedWords from) {
    if constexpr (is_read(FIRST, COUNT)) {
        unsigned words[COUNT];
        load_words<FIRST>(words, from);
#pragma unroll
        for (int i = 0; i < COUNT; ++i) to[FIRST + i] = words[i];
    }
}

// All words that are read, by as few loads as their alignment allows.
template <int FIRST = 0> __device__ __forceinline__ void load_units(unsigned (&to)[UNITS * UNIT], SharedWords from) {
    constexpr int COUNT = UNIT % 4 == 0 ? 4 : UNIT % 2 == 0 ? 2 : 1;
    if constexpr (FIRST < UNITS * UNIT) {
        load_some<FIRST, COUNT>(to, from);
        load_units<FIRST + COUNT>(to, from);
    }
}

__device__ __forceinline__ void load(Window& window, const Words& from, const Starts& starts, int tile, int group) {
#pragma unroll
    for (int channel = 0; channel < IN_WORD; ++channel) {
#pragma unroll
        for (int half = 0; half < 2; ++half)
            load_units(window.value[half][channel], words_of(from, starts, tile, half, group, channel));
    }
}

// A of all pairs of taps, as its parts. A worker has two, in turn: products still read one while the next one is picked.
struct Fragments {
    unsigned value[PARTS][PAIRS][4];
};

// A of the last tap, which two groups share: likewise.
struct LastTap {
    unsigned value[PARTS][4];
};

// The half of it that is of this group.
__device__ __forceinline__ void pick_last(LastTap& a, const Window& window, int group) {
    constexpr int LAST = element_of(KERNEL_W - 1);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int i = group % 2 * 2 + half;
#if DTYPE == FLOAT32
        const float value = __uint_as_float(window.value[half][0][LAST]);
        if (PRECISION == TF32X3) split(value, a.value[0][i], a.value[PARTS - 1][i]);
        else a.value[0][i] = BOXED ? __float_as_uint(value) : to_tf32(value);
#else
        const auto& words = window.value[half];
        a.value[0][i] = select_bytes(words[0][LAST / 2], words[1][LAST / 2], LAST % 2 ? 0x7632 : 0x5410);
#endif
    }
}

// `zero` is one that the compiler does not know to be a constant: it would write that anew while products still read it.
__device__ __forceinline__ void pick(Fragments& a, const Window& window, unsigned zero) {
#pragma unroll
    for (int pair = 0; pair < PAIRS; ++pair) {
        const int first = element_of(2 * pair), second = element_of(2 * pair + 1);
        const bool both = 2 * pair + 1 < KERNEL_W;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
#if DTYPE == FLOAT32  // registers 2 and 3 are the second tap's
            if (i >= 2 && !both) {
#pragma unroll
                for (int part = 0; part < PARTS; ++part) a.value[part][pair][i] = zero;
                continue;
            }
            const float value = __uint_as_float(window.value[i % 2][0][i < 2 ? first : second]);
            if (PRECISION == TF32X3) split(value, a.value[0][pair][i], a.value[PARTS - 1][pair][i]);
            else a.value[0][pair][i] = BOXED ? __float_as_uint(value) : to_tf32(value);  // copies round
#else  // registers 2 and 3 are the second channel's
            const unsigned(&words)[UNITS * UNIT] = window.value[i % 2][i / 2];
            const unsigned low = words[first / 2], high = both ? words[both ? second / 2 : 0] : 0;
            const bool as_loaded = both && first % 2 == 0 && second == first + 1;
            const unsigned selection = (first % 2 ? 0x32 : 0x10) | (both && second % 2 ? 0x7600 : 0x5400);
            a.value[0][pair][i] = as_loaded ? low : select_bytes(low, high, selection);
#endif
        }
    }
}

// What a group of channels is multiplied with, and of groups that share products whether it is the last one.
struct Group {
    Operand weights;
    bool is_last;
};

__device__ __forceinline__ Group group_of(Operand slot, int group) {
    const int first = group / TOGETHER * PRODUCTS + group % TOGETHER * PAIRS;
    return {slot + first * (PARTS * OPERAND), SHARED && group % TOGETHER == TOGETHER - 1};
}

// The products of one group of channels, with some part of A and of B each.
__device__ __forceinline__ void multiply_group(float (&sum)[COLUMNS / 2], const Fragments& a, const LastTap& last, Group group,
                                               int part_a, int part_b, bool accumulate) {
#pragma unroll
    for (int pair = 0; pair < PAIRS; ++pair) {
        const Operand weights = group.weights + (pair * PARTS + part_b) * OPERAND;
        multiply_add<COLUMNS>(sum, a.value[part_a][pair], weights, accumulate || pair > 0);
    }
    if (group.is_last)
        multiply_add<COLUMNS>(sum, last.value[part_a], group.weights + (PAIRS * PARTS + part_b) * OPERAND, true);
}

#if PRECISION == TF32X3
// The tensor core truncates its sums, so each chain of a few products starts from zero, and ordinary additions collect the
// chains. Two alternate: one is added while the next is multiplied.
__device__ __forceinline__ void multiply(Accumulators& acc, Fragments (&a)[2], const Words& x, Operand b,
                                         const Starts& starts) {
    float sums[2][COLUMNS / 2];
    b = of_warp(b);
    const auto collect = [&](int step) {
#pragma unroll
        for (int i = 0; i < COLUMNS / 2; ++i) acc.value[0][step / K_STEPS][i] += sums[step % 2][i];
    };
    Window windows[2];  // one is loaded while the other is multiplied
    LastTap last[2];
    load(windows[0], x, starts, 0, 0);
#pragma unroll
    for (int step = 0; step < TILES_M * K_STEPS; ++step) {
        const int group = step % K_STEPS;
        if (step + 1 < TILES_M * K_STEPS) load(windows[(step + 1) % 2], x, starts, (step + 1) / K_STEPS, (step + 1) % K_STEPS);
        pick(a[step % 2], windows[step % 2], x.zero);
        if (SHARED) pick_last(last[step / 2 % 2], windows[step % 2], group);
        const Group of_step = group_of(b, group);
        wgmma_fence();
        // The small products come first.
        multiply_group(sums[step % 2], a[step % 2], last[step / 2 % 2], of_step, PARTS - 1, 0, false);
        multiply_group(sums[step % 2], a[step % 2], last[step / 2 % 2], of_step, 0, PARTS - 1, true);
        multiply_group(sums[step % 2], a[step % 2], last[step / 2 % 2], of_step, 0, 0, true);
        wgmma_commit();
        if (step > 0) {
            wgmma_wait<1>();
            collect(step - 1);
        }
    }
    wgmma_wait<0>();
    collect(TILES_M * K_STEPS - 1);
}
constexpr bool LAGS = false;  // whether `multiply` returns before its own products are complete: with those of the last call
#else
__device__ __forceinline__ void multiply(Accumulators& acc, Fragments (&a)[2], const Words& x, Operand b,
                                         const Starts& starts) {
    b = of_warp(b);
    Window windows[2];  // one is loaded while the other is multiplied
    LastTap last[2];
    load(windows[0], x, starts, 0, 0);
#pragma unroll
    for (int step = 0; step < TILES_M * K_STEPS; ++step) {
        const int group = step % K_STEPS;
        if (step + 1 < TILES_M * K_STEPS) load(windows[(step + 1) % 2], x, starts, (step + 1) / K_STEPS, (step + 1) % K_STEPS);
        pick(a[step % 2], windows[step % 2], x.zero);
        if (SHARED) pick_last(last[step / 2 % 2], windows[step % 2], group);
        wgmma_fence();
        multiply_group(acc.value[0][step / K_STEPS], a[step % 2], last[step / 2 % 2], group_of(b, group), 0, 0, true);
        wgmma_commit();
        wgmma_wait<1>();  // those before read A where the next ones' is going to be
    }
}
constexpr bool LAGS = true;
#endif

// ---- the kernel ------------------------------------------------------------------------------------------------------

#if BOXED
#define Source const __grid_constant__ TensorMap
#else
#define Source const Stored*
#endif

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    correlate_rows(Source x, const Piece* packed, const Stored* bias, Stored* out, const Problem p) {
    extern __shared__ __align__(SWIZZLED ? 1024 : 128) unsigned char shared_bytes[];
    const Staged s = staged_box(p);
    Barrier* const barriers = reinterpret_cast<Barrier*>(shared_bytes);
    Piece* const slots = reinterpret_cast<Piece*>(shared_bytes + BARRIER_BYTES);
    Piece* const stages = reinterpret_cast<Piece*>(shared_bytes + STAGES_AT);
    Turned* const turned = reinterpret_cast<Turned*>(stages + X_STAGES * stage_pieces(p, s));
    Target* const targets = reinterpret_cast<Target*>(turned + 1);
#if !BOXED
    Item* const items = reinterpret_cast<Item*>(targets + (OUT_CHANNELS_LAST ? 0 : TARGETS * TEAM_THREADS));
#endif

    Ring x_ring(barriers, X_STAGES), weight_ring(barriers + 2 * X_STAGES, RING);
    if (threadIdx.x == 0) init_barriers(x_ring, weight_ring, TEAM_THREADS);
    clear_zeros(turned);
#if !OUT_CHANNELS_LAST
    for (int i = threadIdx.x; i < TARGETS * TEAM_THREADS; i += THREADS) targets[i] = find_target(p, s, i);
#endif
#if !BOXED
    // Rows of no use are read: behind the box, and where a class along D has less of a halo than others.
    for (int i = threadIdx.x; i < X_STAGES * stage_pieces(p, s); i += THREADS) stages[i] = Piece{{0, 0, 0, 0}};
#endif
    __syncthreads();

    const int chunks = ((int)p.c_in + CHUNK - 1) / CHUNK;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

    if (warp >= 4 * WORKERS) {
        give_registers<STAGER_REGISTERS>();
        const int thread = threadIdx.x - WORKER_THREADS - 32;
#if BOXED
        if (lane || thread > 0) return;
#else
        if (thread < 0 && lane) return;
#endif
        if (thread < 0) wait_for_kernel_before();  // it packs the weights, while x is staged
#if !BOXED
        Ring landed = x_ring;
        int under_way = 0;
        const auto hand_over = [&] {
            barrier_arrive(landed.full + landed.place);
            landed.next<X_STAGES>();
        };
#endif
        for (unsigned index = blockIdx.x; index < (unsigned)p.blocks; index += gridDim.x) {
            const Block b = locate(index, p);
            if (thread < 0) {
                const int slots_of_box = KERNEL_D * KERNEL_H * chunks;
                bring_weights<SLOT * sizeof(Piece)>(
                    weight_ring, slots, packed + (b.group * p.tiles[3] + b.tile_c) * slots_of_box * (long long)SLOT,
                    slots_of_box);
                if (RESIDENT) return;
                continue;
            }
#if BOXED
            each_stage<1>(chunks, [&](int d, int h, int, int chunk) {
                x_ring.wait_until_free();
                bring_slices(stages + x_ring.place * stage_pieces(p, s), &x, p, b, d, h, chunk, x_ring.full + x_ring.place);
                x_ring.next<X_STAGES>();
            });
        }
#else
            warps_sync(1, STAGERS);  // nobody reads the items of the box before
            find_items(items, p, s, b, thread);
            warps_sync(1, STAGERS);
            const Stored* const from = x + b.n * p.x_stride[0] + b.group * p.c_in * p.x_stride[1];
            each_stage<1>(chunks, [&](int d, int h, int, int chunk) {
                x_ring.wait_until_free();
                stage_x(stages + x_ring.place * stage_pieces(p, s), from + chunk * CHUNK * p.x_stride[1], items, p, s,
                        Stage{d, h, (int)p.c_in - chunk * CHUNK}, thread);
                copy_async_commit();
                x_ring.next<X_STAGES>();
                if (++under_way > IN_FLIGHT) {
                    --under_way;
                    copy_async_wait<IN_FLIGHT>();
                    hand_over();
                }
            });
        }
        copy_async_wait<0>();
        for (; under_way > 0; --under_way) hand_over();
#endif
        return;
    }

    take_registers<WORKER_REGISTERS>();
    const int tiles = tiles_of(p, s, (int)p.box[2]);
    int start[TILES_M];
    find_starts(start, p, s, tiles);
    const bool works = tiles_of_worker(tiles) > 0;
    const Starts starts = find_starts_of_words(start, p, s);
    const int of_thread = first_of_thread(p, s);
    const Operand weights = describe(slots, COLUMNS * 16, 128);
    const unsigned zero = (unsigned)recomputed(0);

    for (unsigned index = blockIdx.x; index < (unsigned)p.blocks; index += gridDim.x) {
        const Block b = locate(index, p);
        const int first = of_thread + lead(p, b.w) * UNIT;
        Accumulators acc;
        Fragments a[2];
#pragma unroll
        for (int tile = 0; tile < TILES_M; ++tile)
#pragma unroll
            for (int i = 0; i < COLUMNS / 2; ++i) acc.value[0][tile][i] = 0;

        int used_slot = -1;  // by the products that may be under way
        const auto release = [&] {
            if (!RESIDENT && lane == 0 && used_slot >= 0) barrier_arrive(weight_ring.free + used_slot);
            used_slot = -1;
        };
        each_stage<1>(chunks, [&](int d, int h, int, int) {
            x_ring.wait_until_full();
            const unsigned* const stage = stages[x_ring.place * stage_pieces(p, s)].value;
#pragma unroll 1
            for (int tap_d = 0; tap_d < taps_of<AxisD, KERNEL_D>(d); ++tap_d) {
#pragma unroll 1
                for (int tap_h = 0; tap_h < taps_of<AxisH, KERNEL_H>(h); ++tap_h) {
                    weight_ring.wait_until_full();
                    const Words words = words_of_taps(stage + first, p, s, tap_d, tap_h, zero);
                    if (works) multiply(acc, a, words, weights + weight_ring.place * SLOT, starts);
                    if (LAGS) release();
                    used_slot = weight_ring.place;
                    weight_ring.next<RING, RESIDENT>();
                    if (!LAGS) release();
                }
            }
            barrier_arrive(x_ring.free + x_ring.place);
            x_ring.next<X_STAGES>();
        });
        if (LAGS) wgmma_wait<0>();
        release();
        store(acc, *turned, targets, start, tiles, p, s, b, bias, out);
    }
}

// The channel that comes at a place along K: of eight, a thread reads the first and the second half of the places, its lane modulo 4
// of each.
__device__ __forceinline__ int channel_of(int place, const Problem& p) {
    return BOXED && p.x_vector == 1 ? place / 8 * 8 + place % 4 * 2 + place % 8 / 4 : place;
}

// Puts the weights of the call in the order of the slots, once, before the kernel above: [group][tile of output channels][class
// along D][class along H][chunk][tap along D][tap along H]. A thread has both pieces of a product; there are fewer than 2^32: the
// pieces of more are more than a GPU's memory.
extern "C" __global__ void correlate_rows_pack(const Stored* weight, Piece* packed, const Problem p) {
    let_next_kernel_start();
    const unsigned chunks = ((unsigned)p.c_in + CHUNK - 1) / CHUNK;
    unsigned index = blockIdx.x * blockDim.x + threadIdx.x;
    constexpr int NEIGHBOURS = neighbours(KERNEL_D * KERNEL_H * PRODUCTS);
    // Consecutive threads read weights near each other.
    const int neighbour = (int)(index % NEIGHBOURS);
    index /= NEIGHBOURS;
    const int product = (int)(index % PRODUCTS);
    index /= PRODUCTS;
    const int tap_h = (int)(index % KERNEL_H);
    index /= KERNEL_H;
    const int tap_d = (int)(index % KERNEL_D);
    index /= KERNEL_D;
    const int column = (int)(index % (TILE_C / NEIGHBOURS)) * NEIGHBOURS + neighbour;
    index /= TILE_C / NEIGHBOURS;
    const int tile_c = (int)take(index, p, 3);
    const int of_chunk = (int)(index % (K_STEPS / TOGETHER));
    index /= K_STEPS / TOGETHER;
    const unsigned group = index / chunks, chunk = index % chunks;
    if (group >= (unsigned)p.groups) return;

    // Of a pair of taps and one group, or of the last tap and two.
    const bool is_last = SHARED && product == PRODUCTS - 1;
    const int of_unit = is_last ? 0 : product / PAIRS, first_tap = is_last ? KERNEL_W - 1 : product % PAIRS * 2;
    const int co = tile_c * TILE_C + column, first = (int)chunk * CHUNK + (of_chunk * TOGETHER + of_unit) * PIECE;
    const int there = co < p.c_out ? (int)p.c_in : 0;
    weight += p.weight_first + group * p.weight_group_stride + co * p.weight_stride[1] + tap_d * p.weight_stride[2] +
              tap_h * p.weight_stride[3];
    Channels read[2];  // by taps or by groups
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int c = 0; c < PIECE; ++c) {
            const int channel = channel_of(first + (is_last ? i * PIECE : 0) + c, p), tap = first_tap + (is_last ? 0 : i);
            Stored& value = read[i].value[c];
            zero(value);
            if (channel < there && tap < KERNEL_W) value = weight[channel * p.weight_stride[0] + tap * p.weight_stride[4]];
        }
    }
    // A piece has one tap of four channels or, of 16 bits, both taps of four or the last one of eight.
    Channels both[2];
#pragma unroll
    for (int piece = 0; piece < 2; ++piece) {
#pragma unroll
        for (int i = 0; i < PIECE; ++i) {
#if DTYPE == FLOAT32
            both[piece].value[i] = read[piece].value[i];
#else
            both[piece].value[i] = is_last ? read[piece].value[i % 2 * 4 + i / 2] : read[i % 2].value[piece * 4 + i / 2];
#endif
        }
    }
    const PlaceOfTaps place(tap_d, tap_h, (int)chunks);
    const long long slots_of_box = (KERNEL_D * KERNEL_H) * (long long)chunks;
    const long long slot = (group * p.tiles[3] + tile_c) * slots_of_box + place.first + (int)chunk * place.next;
    packed += slot * SLOT + (of_chunk * PRODUCTS + product) * PARTS * OPERAND + column;
#pragma unroll
    for (int piece = 0; piece < 2; ++piece) {
        Piece parts[PARTS];
        pack(both[piece], parts);
#pragma unroll
        for (int part = 0; part < PARTS; ++part) packed[part * OPERAND + piece * COLUMNS] = parts[part];
    }
}
