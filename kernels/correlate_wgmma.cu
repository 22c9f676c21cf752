// Correlate on Hopper's tensor cores (sm_90a): float16, bfloat16 and float32 (as TF32 or 3xTF32).
//
//     out[n, co, i] = bias[co] + sum over ci, k of  x[n, ci, i*stride + k*dilation - pad] * weight[ci, co, k]
//
// The adjoint of `phase_wgmma.cu`, which see. Here x is what is read and `out` what is written, in `Problem` too.
//
// An implicit GEMM: M = positions i, N = output channels, K = input channels x taps. Along an axis, taps whose k*dilation is
// the same modulo the stride form a class, which has the number of its first tap. They read every stride-th element, and among
// these correlate with a stride of 1. All classes add to the same sums. A block owns a box of positions and a tile of output
// channels, and walks over (class along D, class along H, classes along W, chunk of input channels). It stages the elements of
// these classes with their halo once, and every tap reads them at another offset. Weights follow through a ring of slots, in
// just the order in which they are needed.
//
// Classes along W are planes beside each other, as channels are, so that whole rows of x are read: where CLASSES is the stride,
// a thread reads aligned runs of so many elements, each of which goes to another plane. Channels-last x that is aligned for it
// comes by asynchronous copies, piece by piece.
//
// With BOXED, bulk tensor copies bring channels-last x: of each class a box of positions, each a row of 32 to 128 bytes of channels
// in the swizzle of that width. No thread moves an element, and one names the boxes. A wgmma may start at any row, too.
// For 3xTF32 other warps split what came, each number where it is: its low part goes to a second box.
//
// With APART, each tap along an axis is a class of its own, whatever it reads: dilated taps, whose halo would be most of a box.
//
// With FOLD, where kernel and stride are equal along W and x is channels-last, the taps along W are channels of x: in memory, these
// follow each other.
//
// With JOINED, so many groups of few channels, whose channels-last x follow each other, are brought as rows of all of them. A k step
// is of one group, and a wgmma adds to the sums of that one's channels.
//
// Rows of x, where it is small, may be turned before, by the kernel that packs the weights.
//
// With MERGE_W the taps of a class along W are columns of one wgmma, of the same positions, and their sums are shifted when
// the result is stored.
//
// Compile-time: kernel, stride, dilation, dtype, precision and tile. Run-time: N, extents, the box, padding, channels.
#ifndef CLASSES  // along W that are staged at a time
#define CLASSES 2
#endif
#ifndef SLOT_CLASSES  // of these, how many have their weights in one slot
#define SLOT_CLASSES 2
#endif
#ifndef K_STEPS  // pairs of pieces that are staged at a time, of all these classes
#define K_STEPS 2
#endif
#ifndef FOLD  // taps along W that are channels of x, of each tap as many
#define FOLD 1
#endif
#ifndef JOINED  // groups whose channels are staged side by side, and are one group to everything but products and weights
#define JOINED 1
#endif
#ifndef X_TURNED  // whether the kernel before, which packs the weights, makes x channels-last, too
#define X_TURNED 0
#endif
#include "correlate_box.cuh"
#include "turn.cuh"

constexpr int LIVE_W = KERNEL_W < AxisW::STEP ? KERNEL_W : AxisW::STEP;
constexpr int SETS_W = LIVE_W / CLASSES;  // sets of classes along W, which are staged one after the other
static_assert(LIVE_W % CLASSES == 0 && CLASSES % SLOT_CLASSES == 0 && K_STEPS % CLASSES == 0, "equal parts");
static_assert(BOXED || (HAS_BITS && LIVE_W <= 8), "an item has a bit for each class");
static_assert(SETS_W == 1 || taps_of<AxisW, KERNEL_W>(0) == taps_of<AxisW, KERNEL_W>(LIVE_W - 1), "all sets alike");

constexpr int CLASS_STEPS = K_STEPS / CLASSES;  // k steps of a class
constexpr int PIECES = 2 * CLASS_STEPS;  // of channels
constexpr int CHUNK = PIECES * PIECE;
constexpr int PACKED_PIECES = JOINED > 1 || FOLD > 1 || PHASES > 1 ? 1 : packed_pieces(PIECES);  // that a thread packs

constexpr int ROW_BYTES = PIECES * 16;  // of a position, with BOXED
static_assert(!BOXED || (X_CHANNELS_LAST && !MERGE_W), "boxes of channels-last x");
static_assert(!BOXED || ROW_BYTES == 32 || ROW_BYTES == 64 || ROW_BYTES == 128, "rows of a swizzle");
// From a position to the next one, in pieces.
constexpr int NEXT_ROW = BOXED ? PIECES : 1;

constexpr int REACH_W = (AxisW::MAX_TAPS - 1) * AxisW::HOP;

constexpr int COLUMNS = MERGE_W ? AxisW::MAX_TAPS * TILE_C : TILE_C;  // of all sums of a row
constexpr int WIDTH = COLUMNS / JOINED;  // of a wgmma's product
static_assert(JOINED == 1 || (BOXED && FOLD == 1 && CLASS_STEPS % JOINED == 0 && WIDTH % 8 == 0), "k steps of one group");
constexpr int SLOTS_A_ROW = CLASSES / SLOT_CLASSES;  // of taps along W, for some classes along D and H: all rows, then the next

// A wgmma of a slot: the class (among those that are staged), its tap and its k step; merged taps have one wgmma.
struct Product {
    int number, tap, step;
};

__host__ __device__ constexpr int products_of_class(int number) {
    return (MERGE_W ? 1 : taps_of<AxisW, KERNEL_W>(number)) * CLASS_STEPS;
}
__host__ __device__ constexpr int products_of(int slot) {
    int count = 0;
    for (int i = 0; i < SLOT_CLASSES; ++i) count += products_of_class(slot * SLOT_CLASSES + i);
    return count;
}
__host__ __device__ constexpr Product product(int slot, int index) {
    int number = slot * SLOT_CLASSES;
    for (; number < CLASSES - 1 && index >= products_of_class(number); ++number) index -= products_of_class(number);
    return {number, index / CLASS_STEPS, index % CLASS_STEPS};
}

// Columns of a slot's wgmmas: if they are taps, some classes have fewer.
__host__ __device__ constexpr int columns_of(int slot) {
    return MERGE_W ? taps_of<AxisW, KERNEL_W>(slot * SLOT_CLASSES) * TILE_C : TILE_C;
}
constexpr int FEWER_COLUMNS = COLUMNS > TILE_C ? COLUMNS - TILE_C : COLUMNS;
static_assert(!MERGE_W || taps_of<AxisW, KERNEL_W>(0) == taps_of<AxisW, KERNEL_W>(SLOT_CLASSES - 1), "equal columns");

// A slot of weights: [product][part][2 pieces][column][16 bytes]. Sizes in units of 16 bytes. The first has the most taps.
constexpr int OPERAND = 2 * WIDTH;
constexpr int PRODUCTS = products_of(0);
constexpr int SLOT = PRODUCTS * PARTS * OPERAND;

constexpr int SETS = 1;  // see wgmma_store.cuh
constexpr int SUMS = MERGE_W ? AxisW::MAX_TAPS : 1, MOST_TAPS = SUMS;
__host__ __device__ constexpr int set_of(int) { return 0; }
__host__ __device__ constexpr int column_of(int sum) { return sum * TILE_C; }
constexpr int SUM_ROWS = SUMS == 1 ? STORED_ROWS : at_residue(STORED_ROWS, 16, 32);
constexpr int NEXT_TAP = SUM_ROWS + AxisW::HOP;
constexpr int SET_OUTPUTS = 1;

#include "correlate_store.cuh"

__device__ __forceinline__ Staged staged_box(const Problem& p) {
    return {(int)p.box[0] + REACH_D, (int)p.box[1] + REACH_H, (int)p.box[2] + REACH_W, (int)p.plane};
}

// ---- staging ---------------------------------------------------------------------------------------------------------

// What a thread stages at a time: a position, of which each class has its own element, or an aligned run of as many elements
// as there are classes, some of which may be the next position's.
struct Item {
    Index offset;    // in x, of the first channel and the first class along each axis
    unsigned place;  // bits for the classes along W (8), H (4) and D (4), then 1 + the position
};

constexpr bool HAS_RUNS = !X_CHANNELS_LAST && CLASSES > 1 && CLASSES == STRIDE_W && DILATION_W == 1 &&
                          CLASSES * sizeof(Stored) <= 16 && (CLASSES & (CLASSES - 1)) == 0;

__device__ __forceinline__ bool in_runs(const Problem& p) { return HAS_RUNS && p.x_vector; }

// The class of a run's first element.
__device__ __forceinline__ int class_of_run(const Problem& p) { return (int)((unsigned)p.pad[2] % STRIDE_W); }

// Where a run is of two positions, one more begins before the first.
__device__ __forceinline__ int early(const Problem& p) { return in_runs(p) && class_of_run(p); }

// All items of the box, worked out once for all chunks and classes. A class has its bit if it has the element, and a tap for
// it; the bits along W of a run say which of its elements are of the box.
__device__ __forceinline__ void find_items(Item* items, const Problem& p, const Staged& s, const Block& b, int thread) {
    const int across = s.w + early(p), skipped = in_runs(p) ? class_of_run(p) : 0;
    for (int i = thread; i < s.d * s.h * across; i += STAGERS) {
        const int row = (int)quotient(i, p.box_magic[0]), d = (int)quotient(row, p.box_magic[1]);
        const int w = i - row * across - early(p), h = row - d * s.h;
        const Index at_d = (b.d + d) * STRIDE_D - (Index)p.pad[0], at_h = (b.h + h) * STRIDE_H - (Index)p.pad[1];
        const Index at_w = (b.w + w) * STRIDE_W - (Index)p.pad[2] + skipped;
        unsigned bits = 0;
        if (!in_runs(p) || within(at_w, p.x_extent[2])) bits = classes_of_row(p, d, h, at_d, at_h);
#pragma unroll
        for (int c = 0; c < LIVE_W; ++c) {
            const int column = w + (skipped + c >= CLASSES);
            bits |= (unsigned)(in_runs(p) ? column >= 0 && column < s.w
                                          : w < (int)p.box[2] + (taps_of<AxisW, KERNEL_W>(c) - 1) * AxisW::HOP &&
                                                within(at_w + c * DILATION_W, p.x_extent[2]))
                    << c;
        }
        items[i].offset = at_d * (Index)p.x_stride[2] + at_h * (Index)p.x_stride[3] + at_w * (Index)p.x_stride[4];
        items[i].place = (unsigned)(row * s.w + w + 1) << 16 | bits;
    }
}

// Which classes a stage is for, and what there is of its chunk.
struct Stage {
    int d, h, set;  // classes along D and H, set of classes along W
    int channels;
};

// Units of some words that a thread loads before it stores the first, as far as its registers go. Each has an address, too.
__host__ __device__ constexpr int batch(bool runs, int words) {
    const int most = (STAGER_REGISTERS / 2 - (runs ? 4 : 12) - (INDEX64 ? 8 : 0)) / (words < 8 ? 8 : words);
    return most < 1 ? 1 : most;
}

// The most classes along W whose elements a thread takes together, since they share sectors of memory.
__host__ __device__ constexpr int together() {
    int most = 1;
    for (int i = 1; i <= CLASSES; ++i)
        if (CLASSES % i == 0 && i * PIECE <= 16) most = i;
    return most;
}

// Stages an element at a time or, with RUNS, one of each class in a row. A piece of some classes is a unit of work, and
// neighbouring threads take neighbouring items. A thread loads a batch before it stores the first, since it is latency that it
// waits for. WHOLE: of each piece all channels are there, or none.
template <bool WHOLE, bool RUNS>
__device__ __forceinline__ void stage(Piece* to, const Stored* x, const Item* items, const Problem& p, const Stage& st,
                                      int count, int plane, int thread) {
    constexpr int WIDTH = RUNS ? CLASSES : together();  // classes of a unit
    constexpr int UNITS = PIECES * CLASSES / WIDTH;  // of an item
    constexpr int WORDS = RUNS ? ceil_div(WIDTH * sizeof(Stored), 4) : WIDTH;  // of a channel
    constexpr int BATCH = WHOLE ? batch(RUNS, PIECE * WORDS) : 1;
    const Index step = (Index)p.x_stride[1], across = DILATION_W * (Index)p.x_stride[4];
    const unsigned wanted = 1u << (12 + st.d) | 1u << (8 + st.h);
    const int first_class = HAS_RUNS ? class_of_run(p) : 0;
    // The item, the piece of channels and the first class of a unit. It is worked out twice, which costs less than registers to
    // remember it.
    const auto find = [&](int at, int& piece, int& number) {
        int unit = 0;
#pragma unroll
        for (int i = 1; i < UNITS; ++i) unit += at >= i * count;
        piece = unit / (CLASSES / WIDTH);
        number = unit % (CLASSES / WIDTH) * WIDTH;
        return items + (at - unit * count);
    };
    // Pieces that no chunk has are zeros from the start.
    const int pieces = p.c_in > CHUNK ? PIECES : min(PIECES, ((int)p.c_in + PIECE - 1) / PIECE);
    const int total = count * (pieces * (CLASSES / WIDTH));
    for (int first = thread; first < total; first += BATCH * STAGERS) {
        unsigned values[BATCH][PIECE][WORDS];  // taken apart after the last load: before, that would wait
#pragma unroll
        for (int j = 0; j < BATCH; ++j) {
            const int at = first + j * STAGERS;
            int piece, number;
            const Item* const item = find(at, piece, number);
            const unsigned place = at < total ? item->place : 0;
            const int left = st.channels - piece * PIECE;
            const bool inside = (place & wanted) == wanted && left > 0;
            const unsigned classes = place >> (RUNS ? 0 : st.set * CLASSES + number);
#pragma unroll
            for (int k = 0; k < PIECE; ++k)
#pragma unroll
                for (int i = 0; i < WORDS; ++i) values[j][k][i] = 0;
            if (!inside) continue;
            const Stored* from =
                x + item->offset + piece * PIECE * step + (RUNS ? 0 : (st.set * CLASSES + number) * across);
#pragma unroll
            for (int k = 0; k < PIECE; ++k) {
                if (WHOLE || k < left) {
                    if constexpr (RUNS) {
                        const auto run_of_x = *reinterpret_cast<const Pack<unsigned, WORDS>*>(from);
#pragma unroll
                        for (int i = 0; i < WORDS; ++i) values[j][k][i] = run_of_x.value[i];
                    } else {
#pragma unroll
                        for (int i = 0; i < WIDTH; ++i)
                            if (classes >> i & 1) values[j][k][i] = bits_of(from[i * across]);
                    }
                }
                from += step;
            }
        }
        issue_in_order();
#pragma unroll
        for (int j = 0; j < BATCH; ++j) {
            const int at = first + j * STAGERS;
            if (at >= total) continue;
            int piece, number;
            const unsigned place = find(at, piece, number)->place;
            Piece* const target = to + piece * plane + ((int)(place >> 16) - 1);
#pragma unroll
            for (int i = 0; i < WIDTH; ++i) {
                Piece parts[PARTS];
                if constexpr (WORDS < WIDTH) {
                    unsigned words[PIECE];
#pragma unroll
                    for (int k = 0; k < PIECE; ++k) words[k] = values[j][k][i / 2];
                    parts[0] = take_halves(words, i % 2);
                } else {
                    Channels c;
#pragma unroll
                    for (int k = 0; k < PIECE; ++k) from_bits(values[j][k][i], c.value[k]);
                    pack(c, parts);
                }
                if (RUNS && !(place >> i & 1)) continue;
                const int later = RUNS && first_class + i >= CLASSES;
                const int plane_of_class = (RUNS ? first_class + i - later * CLASSES : number + i) * PIECES;
#pragma unroll
                for (int part = 0; part < PARTS; ++part)
                    target[(part * 2 * K_STEPS + plane_of_class) * plane + later] = parts[part];
            }
        }
    }
}

// Channels-last x that is aligned for it comes by asynchronous copies, a piece at a time, to where it is going to be.
__device__ __forceinline__ bool is_copied(const Problem& p) { return X_CHANNELS_LAST && p.x_vector; }

// Of the UNITS pieces of a position, or those of its classes, a thread always copies the same one: what follows from it is worked
// out once a stage, and not kept beyond, where registers are short. Neighbouring threads copy neighbouring pieces.
struct Share {
    static constexpr int UNITS = 2 * K_STEPS, STEP = STAGERS / UNITS;  // from a thread's position to its next one
    int unit, first;

    // The last few threads may have no share: they begin behind the last of `count` positions.
    __device__ __forceinline__ Share(int thread, int count) {
        thread = recomputed(thread);
        unit = thread % UNITS;
        first = thread < STEP * UNITS ? thread / UNITS : count;
    }
};

// Copies the thread's piece of each position, of which there are so many channels, or none. What does not exist becomes zero.
template <bool WHOLE>
__device__ __forceinline__ void copy_pieces(const Share& mine, Piece* to, const Stored* x, const Item* items,
                                            int count, int channels, unsigned wanted) {
    constexpr int STEP = Share::STEP, BATCH = 4;  // items that are read before the first is copied
    x = worked_out(x);
    for (int position = mine.first; position < count; position += BATCH * STEP) {
        Item batch[BATCH];
#pragma unroll
        for (int j = 0; j < BATCH; ++j) {
            const Item& item = items[min(position + j * STEP, count - 1)];
            batch[j].offset = item.offset;
            batch[j].place = item.place;
        }
#pragma unroll
        for (int j = 0; j < BATCH; ++j) {
            const int at = position + j * STEP;
            if (at >= count) break;
            const bool inside = channels > 0 && (batch[j].place & wanted) == wanted;
            const Stored* const from = x + batch[j].offset;
            if (WHOLE && COPY_BYTES == 16) copy_async_16_or_zeros(to + at, from, inside);
            else copy_piece(to + at, inside ? from : x, inside ? (WHOLE ? PIECE : channels) : 0);
        }
    }
}

// The pieces of a position are those of one class after the other.
__device__ __forceinline__ void copy_x(Piece* to, const Stored* x, const Item* items, const Problem& p, const Stage& st,
                                       int count, int plane, int thread) {
    const Share mine(thread, count);
    const int piece = mine.unit % PIECES, number = st.set * CLASSES + mine.unit / PIECES;
    const int channels = st.channels - piece * PIECE;
    const unsigned wanted = 1u << (12 + st.d) | 1u << (8 + st.h) | 1u << number;
    to += mine.unit * plane;
    x += number * DILATION_W * (Index)p.x_stride[4] + piece * PIECE;
    if (channels <= 0 || channels >= PIECE) copy_pieces<true>(mine, to, x, items, count, channels, wanted);
    else copy_pieces<false>(mine, to, x, items, count, channels, wanted);
}

__device__ __forceinline__ void convert_x(Piece* to, int count, int plane, int thread) {
    if constexpr (sizeof(Stored) == 4) {
        const Share mine(thread, count);
        to += mine.unit * plane;
#pragma unroll 2
        for (int at = mine.first; at < count; at += mine.STEP) {
            Piece parts[PARTS];
            pack(*reinterpret_cast<const Channels*>(to + at), parts);
#pragma unroll
            for (int part = 0; part < PARTS; ++part) to[part * mine.UNITS * plane + at] = parts[part];
        }
    }
}

// Stages x through registers, or begins to copy it.
__device__ __forceinline__ void stage_x(Piece* to, const Stored* x, const Item* items, const Problem& p, const Staged& s,
                                        const Stage& st, int thread) {
    const int slices = (int)p.box[0] + (taps_of<AxisD, KERNEL_D>(st.d) - 1) * AxisD::HOP;
    const int count = slices * s.h * (s.w + early(p));
    const bool whole = st.channels >= CHUNK || st.channels % PIECE == 0;
    x += st.d * DILATION_D * (Index)p.x_stride[2] + st.h * DILATION_H * (Index)p.x_stride[3];
    if (is_copied(p)) {
        copy_x(to, x, items, p, st, count, s.plane, thread);
    } else if (in_runs(p) && whole) {
        stage<true, HAS_RUNS>(to, x, items, p, st, count, s.plane, thread);
    } else if (in_runs(p)) {
        stage<false, HAS_RUNS>(to, x, items, p, st, count, s.plane, thread);
    } else if (!X_CHANNELS_LAST && whole) {
        stage<true, false>(to, x, items, p, st, count, s.plane, thread);
    } else {
        stage<false, false>(to, x, items, p, st, count, s.plane, thread);
    }
}

// ---- arithmetic ------------------------------------------------------------------------------------------------------

// The products of a slot, of C columns, with some part of A and of B each, for one tile. The first may overwrite the sums.
template <int C>
__device__ __forceinline__ void multiply_parts(float (&sum)[C / 2], int slot, Operand a, Operand b,
                                               int plane, int part_a, int part_b, bool accumulate) {
#pragma unroll
    for (int i = 0; i < PRODUCTS; ++i) {
        if (i >= products_of(slot)) break;
        const Product of = product(slot, i);
        const int in_class = (part_a * CLASSES + of.number) * PIECES * plane;
        const int in_row = of.tap * AxisW::HOP * NEXT_ROW + 2 * of.step * (BOXED ? 1 : plane);
        const int group = of.step / (CLASS_STEPS / JOINED);
        multiply_add<C / JOINED>(reinterpret_cast<float(&)[C / JOINED / 2]>(sum[group * (C / JOINED / 2)]), a + in_row + in_class,
                                 b + (i * PARTS + part_b) * OPERAND, accumulate || i > 0);
    }
}

#if PRECISION == TF32X3
// The tensor core truncates its sums, so each chain of a few products starts from zero, and ordinary additions collect the
// chains. Two alternate: one is added while the next is multiplied.
template <int C, int TILES>
__device__ __forceinline__ void multiply(Accumulators& acc, int slot, Operand a, Operand b,
                                         const int (&start)[TILES_M], int plane) {
    float sums[2][C / 2];
    a = of_warp(a);
    b = of_warp(b);
    const auto collect = [&](int tile) {
#pragma unroll
        for (int i = 0; i < C / 2; ++i) acc.value[0][tile][i] += sums[tile % 2][i];
    };
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
        const Operand rows = a + start[tile] * NEXT_ROW;
        wgmma_fence();
        // The small products come first.
        multiply_parts<C>(sums[tile % 2], slot, rows, b, plane, 1, 0, false);
        multiply_parts<C>(sums[tile % 2], slot, rows, b, plane, 0, 1, true);
        multiply_parts<C>(sums[tile % 2], slot, rows, b, plane, 0, 0, true);
        wgmma_commit();
        if (tile > 0) {
            wgmma_wait<1>();
            collect(tile - 1);
        }
    }
    wgmma_wait<0>();
    collect(TILES - 1);
}
constexpr bool LAGS = false;  // whether `multiply` returns before its own products are complete: with those of the last call
#else
template <int C, int TILES>
__device__ __forceinline__ void multiply(Accumulators& acc, int slot, Operand a, Operand b,
                                         const int (&start)[TILES_M], int plane) {
    a = of_warp(a);
    b = of_warp(b);
    wgmma_fence();
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
        multiply_parts<C>(reinterpret_cast<float(&)[C / 2]>(acc.value[0][tile]), slot, a + start[tile] * NEXT_ROW, b, plane,
                          0, 0, true);
    }
    wgmma_commit();
    wgmma_wait<1>();
}
constexpr bool LAGS = true;
#endif

// The same of the first TILES tiles, with as many columns as the slot has. Where not all tiles are filled, but one, the others are
// left out.
constexpr int MAX_FEWER = TILES_M > 1;

template <int TILES>
__device__ __forceinline__ void multiply_slot(Accumulators& acc, int slot, Operand a, Operand b,
                                              const int (&start)[TILES_M], int plane) {
    if (columns_of(slot) < COLUMNS) {
        multiply<FEWER_COLUMNS, TILES>(acc, slot, a, b, start, plane);
    } else {
        multiply<COLUMNS, TILES>(acc, slot, a, b, start, plane);
    }
}

// ---- boxes of x ------------------------------------------------------------------------------------------------------

// By one thread: brings a box of each class of the stages of a block. They arrive at `landed`.
__device__ __forceinline__ void bring_boxes(Ring& ring, Barrier* landed, Piece* stages, const TensorMap& x, const Problem& p,
                                            const Staged& s, const Block& b, int chunks) {
    const int at_d = (int)(b.d * STRIDE_D - (Index)p.pad[0]), at_h = (int)(b.h * STRIDE_H - (Index)p.pad[1]);
    const int at_w = (int)(b.w * STRIDE_W - (Index)p.pad[2]), channel = (int)(b.group * p.c_in);
    each_stage<SETS_W>(chunks, [&](int d, int h, int set, int chunk) {
        Piece* const boxes = stages + ring.place * PLANES * s.plane;
        ring.wait_until_free();
        barrier_arrive_expecting(landed + ring.place, (unsigned)(CLASSES * s.d * s.h * s.w * ROW_BYTES));
#pragma unroll
        for (int i = 0; i < CLASSES; ++i)
            copy_box(boxes + i * PIECES * s.plane, &x, channel + chunk * CHUNK, at_w + (set * CLASSES + i) * DILATION_W,
                     at_h + h * DILATION_H, at_d + d * DILATION_D, (int)b.n, landed + ring.place);
        ring.next<X_STAGES>();
    });
}

// By those that split: the boxes that `bring_boxes` brings, once they have landed. A thread publishes what it wrote before it says
// so, and hence before workers free the stage: so the next copy to it, which comes after that, needs no further fence.
__device__ __forceinline__ void split_boxes(Ring& ring, Barrier* landed, Piece* stages, const Staged& s, int chunks, int thread) {
    each_stage<SETS_W>(chunks, [&](int, int, int, int) {
        barrier_wait(landed + ring.place, ring.round & 1);
#pragma unroll 1
        for (int i = 0; i < CLASSES; ++i) {
            Piece* const high = stages + (ring.place * PLANES + i * PIECES) * s.plane;
            split_box(high, high + CLASSES * PIECES * s.plane, s.d * s.h * s.w * PIECES, thread);
        }
        publish_shared_writes();
        barrier_arrive(ring.full + ring.place);
        ring.next<X_STAGES>();
    });
}

// ---- the kernel ------------------------------------------------------------------------------------------------------

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
#if BOXED
    correlate_wgmma(const __grid_constant__ TensorMap x, const Piece* packed, const Stored* bias, Stored* out, const Problem p) {
#else
    correlate_wgmma(const Stored* x, const Piece* packed, const Stored* bias, Stored* out, const Problem p) {
#endif
    extern __shared__ __align__(BOXED ? 1024 : 128) unsigned char shared_bytes[];
    const Staged s = staged_box(p);
    Barrier* const barriers = reinterpret_cast<Barrier*>(shared_bytes);
    Piece* const slots = reinterpret_cast<Piece*>(shared_bytes + BARRIER_BYTES);
    Piece* const stages = slots + pieces_to_stages(BARRIER_BYTES, RING * SLOT);
    Turned* const turned = reinterpret_cast<Turned*>(stages + TEAMS * X_STAGES * PLANES * s.plane);
    Target* const targets = reinterpret_cast<Target*>(turned + STORES);
    Item* const items = reinterpret_cast<Item*>(targets + (OUT_CHANNELS_LAST ? 0 : ALL_TARGETS));

    Ring x_ring(barriers, X_STAGES), weight_ring(barriers + TEAMS * 2 * X_STAGES, RING);
    if (threadIdx.x == 0) init_barriers(x_ring, weight_ring, 4 * TEAM);
    clear_zeros(turned);
#if !OUT_CHANNELS_LAST
    for (int i = threadIdx.x; i < ALL_TARGETS; i += THREADS) targets[i] = find_target(p, s, i);
#endif
    // Rows of no use are read: behind the box, and where a class along D has less of a halo than others.
    // Of boxes, the copies write all but what is behind.
    constexpr int BOXES = BOXED ? TEAMS * X_STAGES * PARTS * CLASSES : 1;
    const int of_box = TEAMS * X_STAGES * PLANES * s.plane / BOXES, written = BOXED ? s.d * s.h * s.w * PIECES : 0;
#pragma unroll 1
    for (int box = 0; box < BOXES; ++box)
        for (int i = written + threadIdx.x; i < of_box; i += THREADS) stages[box * of_box + i] = Piece{{0, 0, 0, 0}};
    publish_shared_writes();
    __syncthreads();

    const int chunks = ((int)p.c_in + CHUNK - 1) / CHUNK;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

    if (warp >= 4 * WORKERS) {
        give_registers<STAGER_REGISTERS>();
        const int thread = threadIdx.x - WORKER_THREADS - 32;
        if (thread < 0 && lane) return;
        if (thread < 0 || (X_TURNED && !BOXED)) wait_for_kernel_before();  // it packs the weights, while x is staged
        const auto bring_weights_of = [&](const Block& b) {
            const int slots_of_box = KERNEL_D * KERNEL_H * SETS_W * SLOTS_A_ROW * chunks;
            const Piece* from = packed + (b.group * p.tiles[3] + b.tile_c) * slots_of_box * (long long)SLOT;
            bring_weights<SLOT * sizeof(Piece)>(weight_ring, slots, from, slots_of_box);
        };
#if BOXED
        if (thread < 0) {
            for (unsigned index = blockIdx.x; index < (unsigned)p.blocks; index += gridDim.x) {
                bring_weights_of(locate(index, p));
                if (RESIDENT) return;
            }
            return;
        }
        // A team's boxes are brought by one thread, of a warp of its own, which waits for no other team. Where they are split, one
        // thread brings those of all teams, in the order in which the other warps split them.
        constexpr int SERVED = SPLITS ? TEAMS : 1;  // teams
        int team = SPLITS ? 0 : thread / 32;
        const bool splits = SPLITS && thread >= 32;
        if ((lane && !splits) || team >= TEAMS) return;
        if (X_TURNED) wait_for_kernel_before();
        Ring ring = x_ring.of_team(team);
        for (unsigned index = blockIdx.x + team * gridDim.x; index < (unsigned)p.blocks; index += TEAMS / SERVED * gridDim.x) {
            Piece* const own = stages + team * X_STAGES * PLANES * s.plane;
            Barrier* const landed = SPLITS ? weight_ring.free + RING + team * X_STAGES : ring.full;
            if (splits) split_boxes(ring, landed, own, s, chunks, thread - 32);
            else bring_boxes(ring, landed, own, x, p, s, locate(index, p), chunks);
            if (SERVED == 1) continue;
            team = next_team(team, x_ring, ring);
            ring = x_ring.of_team(team);
        }
#else
        int team = 0;
        const int count = s.d * s.h * s.w;  // of copied positions, at most: rounding or splitting others again is harmless
        UnderWay under_way = {0, 0};
        for (unsigned index = blockIdx.x; index < (unsigned)p.blocks; index += gridDim.x) {
            const Block b = locate(index, p);
            if (thread < 0) {  // in a loop of its own it would make the compiler spill
                bring_weights_of(b);
                if (RESIDENT) return;
                continue;
            }
            Ring ring = x_ring.of_team(team);
            warps_sync(1, STAGERS);  // nobody reads the items of the box before
            find_items(items, p, s, b, thread);
            warps_sync(1, STAGERS);
            const Stored* const from = x + b.n * p.x_stride[0] + b.group * p.c_in * p.x_stride[1];
            each_stage<SETS_W>(chunks, [&](int d, int h, int set, int chunk) {
                ring.wait_until_free();
                const int stage = team * X_STAGES + ring.place;
                stage_x(stages + stage * PLANES * s.plane, from + chunk * CHUNK * p.x_stride[1], items, p, s,
                        Stage{d, h, set, (int)p.c_in - chunk * CHUNK}, thread);
                if (is_copied(p)) {
                    copy_async_commit();
                    under_way.stages = under_way.stages << 8 | stage;
                    if (++under_way.count > AHEAD)
                        hand_over<AHEAD>(under_way, stages, x_ring.full, count, s.plane, thread);
                } else {
                    publish_shared_writes();
                    barrier_arrive(ring.full + ring.place);
                }
                ring.next<X_STAGES>();
            });
            team = next_team(team, x_ring, ring);
        }
        while (under_way.count > 0) hand_over<0>(under_way, stages, x_ring.full, count, s.plane, thread);
#endif
        return;
    }

    take_registers<WORKER_REGISTERS>();
    const int patches_w = (int)p.patches[1], tiles = tiles_of(p, s, MERGE_W ? s.w : (int)p.box[2]);
    int start[TILES_M];
    find_starts(start, p, s, tiles);
    const int own_tiles = tiles_of_worker(tiles);
    const int team = warp / 4 / TEAM, storing = threadIdx.x / STORERS;
    x_ring = x_ring.of_team(team);
    const Piece* const own = stages + team * X_STAGES * PLANES * s.plane;
    const int eight = patches_w ? s.w : 8;  // positions from eight rows of A to the next
    const Operand staged = describe_stages<ROW_BYTES>(own, s.plane, eight);
    const Operand weights = describe(slots, WIDTH * 16, 128);

    for (unsigned index = blockIdx.x + team * gridDim.x; index < (unsigned)p.blocks; index += TEAMS * gridDim.x) {
        const Block b = locate(index, p);
        Accumulators acc;
#pragma unroll
        for (int tile = 0; tile < TILES_M; ++tile)
#pragma unroll
            for (int i = 0; i < COLUMNS / 2; ++i) acc.value[0][tile][i] = 0;

        int used_slot = -1, used_stage = -1;  // by the products that may be under way
        const auto release = [&] {
            if (!RESIDENT && lane == 0 && used_slot >= 0) barrier_arrive(weight_ring.free + used_slot);
            if (lane == 0 && used_stage >= 0) barrier_arrive(x_ring.free + used_stage);
            used_slot = used_stage = -1;
        };
        each_stage<SETS_W>(chunks, [&](int d, int h, int, int) {
            x_ring.wait_until_full();
            const Operand box = staged + x_ring.place * PLANES * s.plane;
#pragma unroll
            for (int slot = 0; slot < SLOTS_A_ROW; ++slot) {
#pragma unroll 1
                for (int tap_d = 0; tap_d < taps_of<AxisD, KERNEL_D>(d); ++tap_d) {
#pragma unroll 1
                    for (int tap_h = 0; tap_h < taps_of<AxisH, KERNEL_H>(h); ++tap_h) {
                        weight_ring.wait_until_full();
                        const Operand a =
                            box + (tap_d * AxisD::HOP * recomputed(s.h) + tap_h * AxisH::HOP) * recomputed(s.w) * NEXT_ROW;
                        const Operand b = weights + weight_ring.place * SLOT;
                        if (own_tiles > MAX_FEWER) {
                            multiply_slot<TILES_M>(acc, slot, a, b, start, s.plane);
                        } else if (own_tiles) {
                            multiply_slot<1>(acc, slot, a, b, start, s.plane);
                        }
                        if (LAGS) release();
                        used_slot = weight_ring.place;
                        weight_ring.next<RING, RESIDENT>();
                        if (!LAGS) release();
                    }
                }
                // Only wgmmas of the same width may use the same sums without a wait.
                if (LAGS && columns_of(slot) != columns_of((slot + 1) % SLOTS_A_ROW)) wgmma_wait<0>();
            }
            used_stage = x_ring.place;
            x_ring.next<X_STAGES>();
            if (!LAGS) release();
        });
        if (LAGS) wgmma_wait<0>();
        release();
        store(acc, turned[storing], targets_of(targets, storing), start, tiles, p, s, b, bias, out);
    }
}

// Puts the weights of the call in the order of the slots, once, before the kernel above: [group][tile of output channels][class
// along D][class along H][set of classes along W][chunk][slots of a row of taps][tap along D][tap along H]. There are fewer than
// 2^32 threads: the pieces of more are more than a GPU's memory.
__device__ __forceinline__ void pack_weights(const Stored* weight, Piece* packed, const Problem& p, unsigned block) {
    constexpr int COLUMNS_W = SETS_W * SLOTS_A_ROW * (PRODUCTS / CLASS_STEPS) * (MERGE_W ? AxisW::MAX_TAPS : 1);
    const unsigned chunks = ((unsigned)p.c_in + CHUNK - 1) / CHUNK;
    unsigned index = block * blockDim.x + threadIdx.x;
    constexpr int NEIGHBOURS = neighbours(KERNEL_D * KERNEL_H * COLUMNS_W);
    // Consecutive threads read weights near each other.
    const int neighbour = (int)(index % NEIGHBOURS);
    index /= NEIGHBOURS;
    int across = (int)(index % COLUMNS_W);
    index /= COLUMNS_W;
    const int tap_h = (int)(index % KERNEL_H);
    index /= KERNEL_H;
    const int tap_d = (int)(index % KERNEL_D);
    index /= KERNEL_D;
    const int channel = (int)(index % (TILE_C / NEIGHBOURS)) * NEIGHBOURS + neighbour;
    index /= TILE_C / NEIGHBOURS;
    const int tile_c = (int)take(index, p, 3);
    const int piece = (int)(index % (PIECES / PACKED_PIECES)) * PACKED_PIECES;
    index /= PIECES / PACKED_PIECES;
    const unsigned group = index / chunks, chunk = index % chunks;
    if (group >= (unsigned)p.groups) return;

    // Which tap along W, of which class.
    const int merged = MERGE_W ? across % AxisW::MAX_TAPS : 0;
    across /= MERGE_W ? AxisW::MAX_TAPS : 1;
    const int in_slot = across % (PRODUCTS / CLASS_STEPS), slot = across / (PRODUCTS / CLASS_STEPS) % SLOTS_A_ROW;
    const int set = across / (PRODUCTS / CLASS_STEPS) / SLOTS_A_ROW;
    const Product of = product(slot, in_slot * CLASS_STEPS);
    const int tap_w = set * CLASSES + of.number + (of.tap + merged) * AxisW::STEP;
    const bool exists = in_slot * CLASS_STEPS < products_of(slot) && tap_w < KERNEL_W;

    // Of joined groups, those of x and of the result; a weight is of both.
    const int joined = JOINED > 1 ? piece / (PIECES / JOINED) : 0;
    if (JOINED > 1 && channel / WIDTH != joined) return;
    const int co = tile_c * TILE_C + channel, first = (int)chunk * CHUNK + piece * PIECE;
    const int there = exists && co < p.c_out ? (int)p.c_in - first : 0;
    weight += p.weight_first + (group * JOINED + joined) * p.weight_group_stride + (co - joined * WIDTH) * p.weight_stride[1] +
              tap_d * PHASES_D * p.weight_stride[2] + tap_h * PHASES_H * p.weight_stride[3] +
              tap_w * PHASES_W * p.weight_stride[4];
    Channels channels[PACKED_PIECES];
#if FOLD > 1
#pragma unroll
    for (int i = 0; i < PIECE; ++i) {
        const int folded = (first + i) / ((int)p.c_in / FOLD), c = first + i - folded * ((int)p.c_in / FOLD);
        zero(channels[0].value[i]);
        if (i < there) channels[0].value[i] = weight[c * p.weight_stride[0] + folded * p.weight_stride[4]];
    }
#elif PHASES_D * PHASES_H * PHASES_W > 1
#pragma unroll
    for (int i = 0; i < PIECE; ++i) {
        const PhaseChannel of(first - joined * (CHUNK / JOINED) + i);
        zero(channels[0].value[i]);
        if (i < there)
            channels[0].value[i] = weight[of.channel * p.weight_stride[0] + of.d * p.weight_stride[2] +
                                          of.h * p.weight_stride[3] + of.w * p.weight_stride[4]];
    }
#else
    load_channels(channels, weight + (first - joined * (CHUNK / JOINED)) * p.weight_stride[0], p.weight_stride[0], there);
#endif

    const PlaceOfTaps place(tap_d, tap_h, SETS_W * (int)chunks * SLOTS_A_ROW);
    const long long slots_of_box = (KERNEL_D * KERNEL_H) * (long long)(SETS_W * (int)chunks * SLOTS_A_ROW);
    const long long row = (group * p.tiles[3] + tile_c) * slots_of_box + place.first +
                          ((set * (int)chunks + (int)chunk) * SLOTS_A_ROW + slot) * place.next;
    packed += row * SLOT + merged * TILE_C + channel % (TILE_C / JOINED);
#pragma unroll
    for (int i = 0; i < PACKED_PIECES; ++i) {
        const int at = in_slot * CLASS_STEPS + (piece + i) / 2;
        Piece parts[PARTS];
        pack(channels[i], parts);
#pragma unroll
        for (int part = 0; part < PARTS; ++part) packed[(at * PARTS + part) * OPERAND + (piece + i) % 2 * WIDTH] = parts[part];
    }
}

extern "C" __global__ void correlate_wgmma_pack(const Stored* weight, Piece* packed, const Problem p) {
    let_next_kernel_start();
    pack_weights(weight, packed, p, blockIdx.x);
}

// The same beside blocks that make x channels-last, which come first: they have more to do.
struct PackAndTurn {
    Problem problem;
    Turn of_x;
};

extern "C" __global__ void correlate_wgmma_pack_and_turn(const Stored* weight, Piece* packed, const Stored* x, Stored* turned_x,
                                                         const PackAndTurn p) {
    extern __shared__ __align__(BOXED ? 1024 : 128) unsigned char shared_bytes[];
    let_next_kernel_start();
    const unsigned turning = (unsigned)p.of_x.blocks;
    if (blockIdx.x < turning) {
        if (PHASES > 1) return turn_phases(x, turned_x, p.of_x, blockIdx.x);
        return turn(x, turned_x, p.of_x, blockIdx.x, shared_bytes);
    }
    pack_weights(weight, packed, p.problem, blockIdx.x - turning);
}
