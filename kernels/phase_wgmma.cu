// Phase GEMM on Hopper's tensor cores (sm_90a): float16, bfloat16 and float32 (as TF32 or 3xTF32).
//
// A phase is a stride-1 correlation, so an implicit GEMM: M = positions q, N = output channels, K = input channels x taps.
// A block owns a box of positions of one phase along D and H, all phases along W and a tile of output channels. It walks
// over chunks of input channels: the box of x with its whole halo is staged once a chunk, and every tap reads it at another
// offset; weights follow through a ring of slots, one for the taps of a (tap along D, tap along H).
//
// x is staged as planes of 16-byte pieces, [piece][position], a piece being 4 channels (float32) or 8 (16 bits) of one
// position. To a wgmma, 8 positions that follow each other are 8 rows of A, so a tap's shift is an offset of its start.
// 64 rows are either 64 positions in a row, halo columns included (*flat*), or an 8 x 8 *patch* along H and W.
//
// With MERGE_W all taps along W are columns of one wgmma, of the same positions; the sums of a tap are shifted when the
// result is stored. It reads x once instead of once a tap, which is what bounds few output channels.
//
// With JOIN_W (channels-last) the taps along W that read the same positions, one of each phase, are columns of one wgmma: nothing
// is shifted, and few output channels make a wide wgmma, too.
//
// With SLIDES a block walks along D: it stages each slice of x once, not once a tap, multiplies it by the taps of all rows
// along D at once, and has as many sums in flight; after a slice, the outputs that no later slice reaches are stored.
// With MERGE_D these taps, which all read the same slice, are columns of one wgmma.
//
// Warps have roles. Workers multiply and store the result; of the last warps one brings weights by bulk copies and the others
// stage x through registers, where it is turned, rounded to TF32 or split. A block takes one box after the other, so
// that the next one is staged while the result of the last is stored.
//
// With BOXED, bulk tensor copies bring channels-last x, a box of positions for each chunk of channels, of each a row of 32 to 128 bytes
// in the swizzle of that width. One thread for each team names the boxes, and none moves an element. A wgmma may start at any row, too.
// For 3xTF32 one thread names all boxes, and other warps split what came, each number where it is: its low part goes to a second box.
//
// With OUT_RUN the phases along W of a position, consecutive outputs of a row, are stored by the thread that holds their sums.
// Other results are turned in shared memory, but for channels-last ones (see wgmma_store.cuh).
//
// With RESIDUES, along an axis that is dilated without a stride, outputs whose positions are the same modulo the dilation are a phase:
// they read only elements of x that are so, too, and among these taps follow each other. A box of them has a halo of a tap, not of a
// dilation.
//
// Compile-time: kernel, stride, dilation, dtype, precision and tile; for OUT_RUN, the padding along W modulo the stride, as it
// says which phase is first. Run-time: N, extents, the box, padding, channels.
#include "wgmma_box.cuh"

#ifndef ALL_PHASES  // whether a block owns the phases along D and H too, and not one of them
#define ALL_PHASES 0
#endif
#ifndef FIRST_PHASE_W  // the phase of the first output along W, where results are written as runs
#define FIRST_PHASE_W 0
#endif
#ifndef JOIN_W  // whether the taps along W that read the same positions are columns of one wgmma
#define JOIN_W 0
#endif
#ifndef MERGE_D  // whether the taps along D are, where a block slides
#define MERGE_D 0
#endif
#ifndef FAR_CHANNELS  // whether channels that are staged together may be 2**31 elements apart; neighbouring ones are not
#define FAR_CHANNELS 0
#endif
#ifndef PLANE_STEP  // from a plane of the result to the next; those between have no tap and are filled (see fill.cuh)
#define PLANE_STEP 1
#endif
#ifndef RESIDUES_D  // whether what is called stride and dilation is the dilation alone: phases have all taps, and their own planes of x
#define RESIDUES_D 0
#endif
#ifndef RESIDUES_H
#define RESIDUES_H 0
#endif
#ifndef HALF_K  // whether the second piece of a wgmma is nothing: for no more channels than one piece has
#define HALF_K 0
#endif

constexpr int FILLED = HALF_K ? 1 : 2 * K_STEPS;  // pieces of a chunk that hold channels
constexpr int CHUNK = FILLED * PIECE;

constexpr int ROW_BYTES = 32 * K_STEPS;  // of a position, with BOXED
constexpr int NEXT_ROW = BOXED ? 2 * K_STEPS : 1;  // from a position to the next one, in pieces

// The tap furthest back reads the first row and column of the staged box, whichever phase it is.
constexpr int REACH_D = SLIDES ? 0 : ALL_PHASES ? AxisD::REACH : (AxisD::MAX_TAPS - 1) * AxisD::HOP;
constexpr int REACH_H = ALL_PHASES ? AxisH::REACH : (AxisH::MAX_TAPS - 1) * AxisH::HOP;
constexpr int REACH_W = AxisW::REACH;
constexpr int X_STEP_D = RESIDUES_D ? STRIDE_D : 1, X_STEP_H = RESIDUES_H ? STRIDE_H : 1;  // in x, from a position to the next
constexpr int EARLIER = AxisD::REACH;  // slices before that of a position that it reads, where a block slides

// A block's phases along an axis that have a tap, each numbered by its first tap, so that tap k belongs to number k % STEP;
// the others are the bias.
constexpr int PHASES_D = ALL_PHASES ? STRIDE_D : 1, PHASES_H = ALL_PHASES ? STRIDE_H : 1;
constexpr int LIVE_D = !ALL_PHASES ? 1 : KERNEL_D < AxisD::STEP ? KERNEL_D : AxisD::STEP;
constexpr int LIVE_H = !ALL_PHASES ? 1 : KERNEL_H < AxisH::STEP ? KERNEL_H : AxisH::STEP;
constexpr int LIVE = KERNEL_W < AxisW::STEP ? KERNEL_W : AxisW::STEP;

constexpr int SETS_W = MERGE_W || JOIN_W ? 1 : LIVE;
constexpr int HELD_D = SLIDES ? KERNEL_D : LIVE_D;
constexpr int SETS = (MERGE_D ? 1 : HELD_D) * LIVE_H * SETS_W;  // of accumulators, those that are stored first

// Columns of a wgmma: [tap or phase along W][tap along D][channel].
constexpr int COLUMNS_W = MERGE_W ? KERNEL_W : JOIN_W ? STRIDE_W : 1, COLUMNS_D = MERGE_D ? KERNEL_D : 1;
constexpr int COLUMNS = COLUMNS_W * COLUMNS_D * TILE_C;
constexpr int TAPS = MERGE_W ? 1 : JOIN_W ? KERNEL_W / STRIDE_W : KERNEL_W;  // wgmmas that a row of taps needs
constexpr int ROWS_OF_TAPS = (MERGE_D ? 1 : KERNEL_D) * KERNEL_H;  // each of a slot

// A slot of weights: [tap][k step][part][2 pieces][column][16 bytes]. Sizes in units of 16 bytes.
constexpr int OPERAND = 2 * COLUMNS;
constexpr int SLOT = TAPS * K_STEPS * PARTS * OPERAND;
constexpr int PACKED_PIECES = packed_pieces(2 * K_STEPS);  // that a thread packs

// The result is turned in shared memory, eight channels at a time: [8 channels][sums of a phase or tap][row], then a zero.
constexpr int SUMS_W = MERGE_W ? KERNEL_W : LIVE;
constexpr int SUMS = LIVE_D * LIVE_H * SUMS_W;
constexpr int SUM_ROWS = SUMS == 1 ? STORED_ROWS : at_residue(STORED_ROWS, 16, 32);
constexpr int SET_PHASES = PHASES_D * PHASES_H * STRIDE_W;  // that a block stores
constexpr int SET_OUTPUTS = SET_PHASES;
constexpr int MOST_TAPS = MERGE_W ? AxisW::MAX_TAPS : 1;
constexpr int NEXT_TAP = AxisW::STEP * SUM_ROWS - AxisW::HOP;

// The accumulators of a sum, which is [phase along D][phase along H][tap or phase along W]: their set, and the column.
__host__ __device__ constexpr int set_of(int sum) {
    return (MERGE_D ? sum / SUMS_W % LIVE_H : sum / SUMS_W) * SETS_W + (SETS_W > 1 ? sum % SUMS_W : 0);
}
__host__ __device__ constexpr int column_of(int sum) {
    return ((COLUMNS_W > 1 ? sum % SUMS_W : 0) * COLUMNS_D + (MERGE_D ? sum / SUMS_W / LIVE_H : 0)) * TILE_C;
}

#include "fill.cuh"
#include "wgmma_store.cuh"

static_assert(!MERGE_D || SLIDES, "otherwise taps along D read different slices");
static_assert(!JOIN_W || (DILATION_W == 1 && KERNEL_W % STRIDE_W == 0 && !MERGE_W), "each phase has a tap that reads the same");
static_assert(!SLIDES || DILATION_D == 1, "a slice reaches outputs that follow each other");
static_assert(!SLIDES || ALL_PHASES || STRIDE_D * STRIDE_H == 1, "a slice has the taps of all phases");
static_assert(!TAKE_TURNS || ALL_PHASES || STRIDE_D * STRIDE_H == X_STEP_D * X_STEP_H, "teams count the boxes of all phases");
static_assert(X_STEP_D * X_STEP_H == 1 || !(ALL_PHASES || SLIDES), "a box of one residue");
static_assert((!RESIDUES_D || STRIDE_D == DILATION_D) && (!RESIDUES_H || STRIDE_H == DILATION_H), "residues modulo the dilation");
static_assert(STRIDE_W % OUT_RUN == 0 && OUT_RUN * sizeof(Stored) <= 16, "a run is of one position, and one store");
static_assert(!MERGE_W || OUT_RUN == 1 || REACH_W + FIRST_PHASE_W == 0, "taps whose sums are shifted are turned");
static_assert(!JOIN_W || OUT_CHANNELS_LAST, "the first outputs of a run may be outside of the result");
static_assert(!FILLS || !OUT_CHANNELS_LAST, "planes of one channel");
static_assert(!BOXED || (X_CHANNELS_LAST && !HALF_K), "boxes of channels-last x, in whole pairs of pieces");
static_assert(!BOXED || ROW_BYTES == 32 || ROW_BYTES == 64 || ROW_BYTES == 128, "rows of a swizzle");
static_assert(!HALF_K || (sizeof(Stored) == 2 && K_STEPS == 1), "one piece of a pair");
static_assert(!(SLIDES && TAKE_TURNS), "parts differ in slices, and all rings must be as far");
static_assert(!INDEX64, "offsets count from where a box begins, and the planner takes no box that reaches further than 2**31");

// Whether the first output of a phase belongs to a position one further: with padding, a box of positions begins where the
// output does, phase by phase. Not where taps are joined, since all phases have to be of the same positions.
__device__ __forceinline__ int late(long long pad, int stride, int phase) { return phase < (int)((unsigned)pad % stride); }

__device__ __forceinline__ int late_w(long long pad, int phase) {
    return JOIN_W ? 0 : OUT_RUN > 1 ? phase < FIRST_PHASE_W : late(pad, STRIDE_W, phase);
}

struct Block {
    Index d, h, w;  // first position q on each axis, of phases that are not late
    int tile_c;
    int phase_d, phase_h;  // 0 where the block owns all
    int n, group;
    int walk;  // where a block slides: positions along D, one after the other
};

// What `p.out_vector` says: blocks pack the weights themselves, or boxes of phases that have more taps come first.
constexpr int LONG_FIRST = 1, PACKS_ITSELF = 2;

// Whether phases that are blocks of their own differ in taps, the first ones having more.
constexpr bool UNEVEN =
    !ALL_PHASES && ((!RESIDUES_D && KERNEL_D % STRIDE_D) || (!RESIDUES_H && KERNEL_H % STRIDE_H));

__device__ __forceinline__ void take_phases(Block& b, unsigned& index) {
    b.phase_h = (int)(index % (STRIDE_H / PHASES_H));
    index /= STRIDE_H / PHASES_H;
    b.phase_d = (int)(index % (STRIDE_D / PHASES_D));
    index /= STRIDE_D / PHASES_D;
}

// What a block that slides has of a column of x, from its first slice on.
struct Part {
    unsigned column;
    int first, walk;
};

// Columns are dealt whole, a round after the other; those that are left, fewer than blocks, in equal parts. Blocks without a part take
// what the parts leave of each column, a round after the other, and of the last columns in parts, too (see plan_shares.py). Some
// have nothing.
__device__ __forceinline__ Part part_of(unsigned index, const Problem& p) {
    const unsigned whole = (unsigned)p.shares[0], sets = (unsigned)p.shares[1], left = (unsigned)p.shares[2];
    const unsigned part = (unsigned)p.shares[3], parts = (unsigned)p.shares[4], others = (unsigned)p.shares[5];
    const unsigned rest = (unsigned)p.shares[6], rounds = (unsigned)p.shares[7], rest_part = (unsigned)p.shares[8];
    const unsigned extent = (unsigned)p.tiles[0];
    if (index < whole) return {index, 0, (int)extent};
    index -= whole;
    const unsigned set = index % sets, of_set = index / sets, blocks = gridDim.x / sets;
    const unsigned round = of_set / blocks, other = of_set - round * blocks - parts;  // huge where it is none of these
    unsigned column = 0, first = 0, walk = 0;
    if (of_set < parts) {
        column = of_set % left, first = of_set / left * part, walk = part;
    } else if (other < others && round < rounds) {
        column = round * others + other, first = rest, walk = extent - rest;
    } else if (other < others && round == rounds && rounds * others < left) {
        const unsigned last = left - rounds * others;
        column = rounds * others + other % last, first = rest + other / last * rest_part, walk = rest_part;
    }
    return {whole + column * sets + set, (int)first, (int)min(walk, max(extent, first) - first)};
}

__device__ __forceinline__ Block locate(unsigned index, const Problem& p) {
    // What reads the same x runs fastest, then what reads its neighbours; of few boxes those that take longer come first.
    const bool long_first = UNEVEN && p.out_vector == LONG_FIRST;
    Block b;
    int first = 0;
    if (SLIDES) {
        const Part part = part_of(index, p);
        index = part.column;
        first = part.first;
        b.walk = part.walk;
    }
    b.tile_c = (int)take(index, p, 3);
    b.group = (int)take(index, p, 4);
    if (!long_first) take_phases(b, index);
    unsigned boxes = index;
    if (long_first) {
        const unsigned of_phase = (unsigned)(p.n * p.tiles[0] * p.tiles[1] * p.tiles[2]);
        index /= of_phase;
        boxes -= index * of_phase;
        take_phases(b, index);
    }
    b.w = (Index)take(boxes, p, 2) * (Index)p.box[2] + (Index)p.pad[2] / STRIDE_W;
    b.h = (Index)take(boxes, p, 1) * (Index)p.box[1] + (Index)p.pad[1] / STRIDE_H;
    b.d = (SLIDES ? (Index)first : (Index)take(boxes, p, 0) * (Index)p.box[0]) + (Index)p.pad[0] / STRIDE_D;
    if (!ALL_PHASES) {
        b.h += late(p.pad[1], STRIDE_H, b.phase_h);
        b.d += late(p.pad[0], STRIDE_D, b.phase_d);
    }
    b.n = (int)boxes;
    return b;
}

// The box that a block takes after one. Of long and short ones it takes rounds to and fro, so that no block has the longest of
// each.
__device__ __forceinline__ unsigned next_box(unsigned index, unsigned blocks, const Problem& p) {
    return index + (UNEVEN && p.out_vector == LONG_FIRST ? 2 * (blocks - 1 - index % blocks) + 1 : blocks);
}

__device__ __forceinline__ Staged staged_box(const Problem& p) {
    return {depth(p) + REACH_D + (ALL_PHASES && !SLIDES ? late(p.pad[0], STRIDE_D, 0) : 0),
            (int)p.box[1] + REACH_H + (ALL_PHASES ? late(p.pad[1], STRIDE_H, 0) : 0),
            (int)p.box[2] + REACH_W + late_w(p.pad[2], 0), (int)p.plane};
}

// ---- staging by threads ----------------------------------------------------------------------------------------------

#if !BOXED
#if FAR_CHANNELS
typedef long long Distance;
#else
typedef Index Distance;
#endif

// What a thread stages at a time: a position or, of 16-bit numbers in rows that are aligned for it, two that follow each other.
struct Item {
    Index offset;  // from the box's first position, of the first channel
    int place;     // 4 * position + 1 if the position is of the box + 2 if the next one is
};

__device__ __forceinline__ bool in_pairs(const Problem& p) {
    return sizeof(Stored) == 2 && !X_CHANNELS_LAST && p.x_vector;
}

// A row of x may start between two aligned pairs, and end so.
__device__ __forceinline__ int items_of(const Problem& p, const Staged& s) {
    return s.d * s.h * (in_pairs(p) ? s.w / 2 + 1 : s.w);
}

// All items of the box that starts at d, h, w of x, worked out once for all chunks and slices.
__device__ __forceinline__ void find_items(Item* items, const Problem& p, const Staged& s, Index d, Index h, Index w,
                                           int thread) {
    const int width = in_pairs(p) ? 2 : 1, across = in_pairs(p) ? s.w / 2 + 1 : s.w;
    const int early = in_pairs(p) ? (int)(w & 1) : 0;
    for (int i = thread; i < items_of(p, s); i += STAGERS) {
        const int row = (int)quotient(i, p.box_magic[0]), slice = (int)quotient(row, p.box_magic[1]);
        const int column = (i - row * across) * width - early;
        const int further_d = slice * X_STEP_D, further_h = (row - slice * s.h) * X_STEP_H;
        const Index at_d = d + further_d, at_h = h + further_h, at_w = w + column;
        const bool inside = within(at_d, p.x_extent[0]) && within(at_h, p.x_extent[1]) && within(at_w, p.x_extent[2]);
        const bool first = column >= 0 && column < s.w, second = in_pairs(p) && column + 1 < s.w;
        items[i].offset = inside ? further_d * (Index)p.x_stride[2] + further_h * (Index)p.x_stride[3] +
                                       column * (Index)p.x_stride[4]
                                 : OUTSIDE;
        items[i].place = 4 * (row * s.w + column) + first + 2 * second;
    }
}

// What stagers compute from a value, they compute again where they use it if registers are short: it costs a few percent.
constexpr bool CROWDED =
    !X_CHANNELS_LAST && (sizeof(Stored) == 4 ? K_STEPS > 1 && (!SLIDES || PARTS > 1)
                                             : K_STEPS == 1 && (PLANE_STEP > 1 ? SLIDES : X_STEP_D * X_STEP_H > 1));
__device__ __forceinline__ int later(int value) { return CROWDED ? recomputed(value) : value; }

// Stages what there is of a chunk, a value at a time or, with PAIRS, two along a row. Some pieces of an item are a unit of work:
// eight loads. Neighbouring threads take neighbouring items. A thread loads a batch before it stores the first, since it is
// latency that it waits for.
template <bool WHOLE, bool PAIRS>
__device__ __forceinline__ void stage(Piece* to, const Stored* x, const Item* items, Index step, int count, int plane,
                                      int channels, int thread) {
    constexpr int WIDTH = PAIRS ? 2 : 1;
    constexpr int UNIT = 8 / PIECE;  // pieces
    constexpr int UNITS = FILLED / UNIT;  // of an item
    constexpr int BATCH = !WHOLE ? 1 : 4 - (SLIDES ? 2 : K_STEPS);  // slices take registers, too
    // The item and the first piece of a unit. It is worked out twice, which costs less than registers to remember it.
    const auto find = [&](int at, int& piece) {
        int unit = 0;
#pragma unroll
        for (int i = 1; i < UNITS; ++i) unit += at >= i * count;
        piece = unit * UNIT;
        return items + (at - unit * count);
    };
    for (int first = thread; first < count * UNITS; first += BATCH * STAGERS) {
        unsigned words[BATCH][UNIT * PIECE];  // taken apart after the last load: before, that would wait
#pragma unroll
        for (int j = 0; j < BATCH; ++j) {
            const int at = first + j * STAGERS;
            int piece;
            const Item* const item = find(later(at), piece);
            const Index offset = at < count * UNITS ? item->offset : OUTSIDE;
            const bool inside = offset != OUTSIDE;
            const int left = inside ? channels - piece * PIECE : 0;
            const Stored* from = x + offset + (Distance)recomputed(step) * (piece * PIECE);
#pragma unroll
            for (int k = 0; k < UNIT * PIECE; ++k) {
                words[j][k] = 0;
                if (WHOLE ? inside : k < left) words[j][k] = PAIRS ? *reinterpret_cast<const unsigned*>(from) : bits_of(*from);
                from += step;
            }
        }
        issue_in_order();
        first = later(first);
#pragma unroll
        for (int j = 0; j < BATCH; ++j) {
            const int at = first + j * STAGERS;
            if (at >= count * UNITS) continue;
            int piece;
            const int place = find(at, piece)->place;
            Piece* const target = to + piece * plane + (place >> 2);
#pragma unroll
            for (int u = 0; u < UNIT; ++u) {
#pragma unroll
                for (int i = 0; i < WIDTH; ++i) {
                    Piece parts[PARTS];
                    if constexpr (PAIRS && !SLIDES) {
                        parts[0] = take_halves(words[j] + u * PIECE, i);
                    } else {  // also halves, where registers are too short to select them at once
                        Channels c;
#pragma unroll
                        for (int k = 0; k < PIECE; ++k) from_bits(words[j][u * PIECE + k] >> 16 * i, c.value[k]);
                        pack(c, parts);
                    }
                    if (PAIRS && !(place >> i & 1)) continue;
#pragma unroll
                    for (int part = 0; part < PARTS; ++part) target[(part * 2 * K_STEPS + u) * plane + i] = parts[part];
                }
            }
        }
    }
}

__device__ __forceinline__ void stage_x(Piece* to, const Stored* x, const Item* items, const Problem& p, const Staged& s,
                                        int channels, int thread) {
    const Index step = (Index)p.x_stride[1];
    const int count = items_of(p, s);
    if (in_pairs(p) && channels >= CHUNK) {
        stage<true, sizeof(Stored) == 2>(to, x, items, step, count, s.plane, channels, thread);
    } else if (in_pairs(p)) {
        stage<false, sizeof(Stored) == 2>(to, x, items, step, count, s.plane, channels, thread);
    } else if (!X_CHANNELS_LAST && channels >= CHUNK) {
        stage<true, false>(to, x, items, step, count, s.plane, channels, thread);
    } else {
        stage<false, false>(to, x, items, step, count, s.plane, channels, thread);
    }
}

// Channels-last x that is aligned for it comes by asynchronous copies, a piece at a time, to where it is going to be.
__device__ __forceinline__ bool is_copied(const Problem& p) { return X_CHANNELS_LAST && p.x_vector; }

// Neighbouring threads copy neighbouring pieces. What does not exist becomes zero.
__device__ __forceinline__ void copy_x(Piece* to, const Stored* x, const Item* items, int count, int plane, int channels,
                                       int thread) {
#pragma unroll 2
    for (int at = thread; at < count * FILLED; at += STAGERS) {
        const int position = at / FILLED, piece = at % FILLED;
        const Index offset = items[position].offset;
        const int left = offset == OUTSIDE ? 0 : max(0, min(channels - piece * PIECE, PIECE));
        copy_piece(to + piece * plane + position, left ? x + offset + piece * PIECE : x, left);
    }
}

__device__ __forceinline__ void convert_x(Piece* to, int count, int plane, int thread) {
    if constexpr (sizeof(Stored) == 4) {
#pragma unroll 2
        for (int at = thread; at < count * (2 * K_STEPS); at += STAGERS) {
            Piece* const target = to + at % (2 * K_STEPS) * plane + at / (2 * K_STEPS);
            Piece parts[PARTS];
            pack(*reinterpret_cast<const Channels*>(target), parts);
#pragma unroll
            for (int part = 0; part < PARTS; ++part) target[part * 2 * K_STEPS * plane] = parts[part];
        }
    }
}
#endif

// ---- arithmetic ------------------------------------------------------------------------------------------------------

__device__ __forceinline__ void clear(Accumulators& acc) {
#pragma unroll
    for (int set = 0; set < SETS; ++set)
#pragma unroll
        for (int tile = 0; tile < TILES_M; ++tile)
#pragma unroll
            for (int i = 0; i < COLUMNS / 2; ++i) acc.value[set][tile][i] = 0;
}

// The next slice reaches the outputs along D from STRIDE_D further on: sums of tap k were for those that it reaches with tap
// k - STRIDE_D.
__device__ __forceinline__ void slide(Accumulators& acc) {
    constexpr int SETS_D = MERGE_D ? 1 : KERNEL_D, SETS_OF_TAP = SETS / SETS_D, HALF_TILE = TILE_C / 2;
#pragma unroll
    for (int tap = 0; tap < KERNEL_D; ++tap) {
        const int from = tap + STRIDE_D;
#pragma unroll
        for (int set = 0; set < SETS_OF_TAP; ++set)
#pragma unroll
            for (int tile = 0; tile < TILES_M; ++tile)
#pragma unroll
                for (int i = 0; i < COLUMNS / COLUMNS_D / 2; ++i) {
                    // Of merged taps, those of each tap along W follow each other.
                    const int first = MERGE_D ? i / HALF_TILE * KERNEL_D * HALF_TILE + i % HALF_TILE : i;
                    float(&to)[COLUMNS / 2] = acc.value[MERGE_D ? set : tap * SETS_OF_TAP + set][tile];
                    if (from >= KERNEL_D)
                        to[first + (MERGE_D ? tap * HALF_TILE : 0)] = 0;
                    else if (MERGE_D)
                        to[first + tap * HALF_TILE] = to[first + from * HALF_TILE];
                    else
                        to[first] = acc.value[from * SETS_OF_TAP + set][tile][i];
                }
    }
}

// How far from a row of A a tap along W reads: when it is multiplied or, if all are at once, when its sum is stored.
__device__ __forceinline__ int shift_of_sum(int tap, long long pad) {
    return REACH_W - AxisW::back(tap) + late_w(pad, AxisW::phase_of(tap));
}
__device__ __forceinline__ int shift_of(int tap, long long pad) {
    return MERGE_W ? 0 : JOIN_W ? REACH_W - tap : shift_of_sum(tap, pad);
}

#if PRECISION == TF32X3
// The tensor core truncates its sums, so each chain of a few products starts from zero, and ordinary additions collect the
// chains. Two alternate: one is added while the next is multiplied.
constexpr int CHAINS = TILES_M * SETS_W;

__device__ __forceinline__ void collect(Accumulators& acc, int set, const float (&sums)[2][COLUMNS / 2], int chain) {
#pragma unroll
    for (int i = 0; i < COLUMNS / 2; ++i) acc.value[set + chain % SETS_W][chain / SETS_W][i] += sums[chain % 2][i];
}

__device__ __forceinline__ void multiply(Accumulators& acc, int set, Operand a, Operand b,
                                         const int (&start)[TILES_M], int plane, long long pad) {
    float sums[2][COLUMNS / 2];
    a = of_warp(a);
    b = of_warp(b);
#pragma unroll
    for (int chain = 0; chain < CHAINS; ++chain) {
        bool accumulate = false;
        wgmma_fence();
        // The small products come first.
#pragma unroll
        for (int product = 0; product < 3; ++product) {
            const int part_a = product == 0, part_b = product == 1;
#pragma unroll
            for (int tap = 0; tap < TAPS; ++tap) {
                if (SETS_W > 1 && tap % AxisW::STEP != chain % SETS_W) continue;
#pragma unroll
                for (int k = 0; k < K_STEPS; ++k) {
                    const Operand rows = a + (start[chain / SETS_W] + shift_of(tap, pad)) * NEXT_ROW;
                    const int part_of_box = part_a * K_STEPS * 2 * plane;
                    multiply_add<COLUMNS>(sums[chain % 2], rows + part_of_box + k * 2 * (BOXED ? 1 : plane),
                                          b + ((tap * K_STEPS + k) * PARTS + part_b) * OPERAND, accumulate);
                    accumulate = true;
                }
            }
        }
        wgmma_commit();
        if (chain > 0) {
            wgmma_wait<1>();
            collect(acc, set, sums, chain - 1);
        }
    }
    wgmma_wait<0>();
    collect(acc, set, sums, CHAINS - 1);
}
constexpr bool LAGS = false;  // whether `multiply` returns before its own products are complete: with those of the last call
#else
__device__ __forceinline__ void multiply(Accumulators& acc, int set, Operand a, Operand b,
                                         const int (&start)[TILES_M], int plane, long long pad) {
    a = of_warp(a);
    b = of_warp(b);
    wgmma_fence();
#pragma unroll
    for (int tile = 0; tile < TILES_M; ++tile) {
#pragma unroll
        for (int tap = 0; tap < TAPS; ++tap) {
#pragma unroll
            for (int k = 0; k < K_STEPS; ++k) {
                const Operand rows = a + (start[tile] + shift_of(tap, pad)) * NEXT_ROW;
                multiply_add<COLUMNS>(acc.value[set + (SETS_W > 1 ? tap % AxisW::STEP : 0)][tile],
                                      rows + k * 2 * (BOXED ? 1 : plane), b + (tap * K_STEPS + k) * OPERAND, true);
            }
        }
    }
    wgmma_commit();
    wgmma_wait<1>();
}
constexpr bool LAGS = true;
#endif

// ---- the result ------------------------------------------------------------------------------------------------------

// A position of a box, and the phases of an output of it.
struct Output {
    int d, h, w, phase_d, phase_h, phase_w;
    int row;     // of A, of those that are stored together
    bool there;  // threads have more targets than the box
};

#if OUT_TURNED
// Outputs that follow each other along W are consecutive.
__device__ __forceinline__ Output find_output(const Problem& p, const Staged& s, int target) {
    Output o;
    if (ALONE) {  // of each phase, the outputs of a worker's rows
        const int of_worker = target % (TARGETS * STORERS), rows = of_worker / STRIDE_W, phase = rows / STORED_ROWS;
        o.phase_w = of_worker % STRIDE_W, o.phase_h = phase % PHASES_H, o.phase_d = phase / PHASES_H;
        o.row = SET_OUTPUTS > 1 ? rows % STORED_ROWS : row_of_target(p, of_worker);
        const Position at = position_of(p, s, target / (TARGETS * STORERS) * STORED_ROWS + o.row);
        o.d = at.d, o.h = at.h, o.w = at.w;
        o.there = at.there && o.phase_d < PHASES_D && o.row < STORED_ROWS;
        return o;
    }
    const int index = target * (int)p.together;
    const int width = (int)p.box[2] * STRIDE_W, height = (int)p.box[1] * PHASES_H;
    const int row = (int)quotient(index, p.box_magic[2]), slice = (int)quotient(row, p.box_magic[3]);
    const int column = index - row * width, line = row - slice * height;
    o.w = column / STRIDE_W, o.h = line / PHASES_H, o.d = slice / PHASES_D;
    o.phase_w = column % STRIDE_W, o.phase_h = line % PHASES_H, o.phase_d = slice % PHASES_D;
    o.row = row_of(p, s, o.d, o.h, o.w);
    o.there = slice < depth(p) * PHASES_D;
    return o;
}

__device__ __forceinline__ Target find_target(const Problem& p, const Staged& s, int target) {
    const auto [d, h, w, phase_d, phase_h, phase_w, row, there] = find_output(p, s, target);
    Target t;
    t.w = (w + late_w(p.pad[2], phase_w)) * STRIDE_W + phase_w;
    t.h = (short)((h + (ALL_PHASES ? late(p.pad[1], STRIDE_H, phase_h) : 0)) * STRIDE_H + phase_h);
    t.d = (short)((d + (ALL_PHASES && !SLIDES ? late(p.pad[0], STRIDE_D, phase_d) : 0)) * STRIDE_D + phase_d);
    t.offset = 0;
    if (there) t.offset = t.d * (Index)p.out_stride[2] + t.h * (Index)p.out_stride[3] + t.w * (Index)p.out_stride[4];
    if (!there) t.w = -1;
    // Taps of the right phases, if there are any.
    int first_d = -1, first_h = -1, first_w = -1;
#pragma unroll
    for (int i = 0; i < LIVE_D; ++i)
        if (!ALL_PHASES || AxisD::phase_of(i) == phase_d) first_d = i;
#pragma unroll
    for (int i = 0; i < LIVE_H; ++i)
        if (!ALL_PHASES || AxisH::phase_of(i) == phase_h) first_h = i;
#pragma unroll
    for (int i = 0; i < LIVE; ++i)
        if (AxisW::phase_of(i) == phase_w) first_w = i;
    t.from = ZERO;
    t.taps = 1;
    if (!there || first_d < 0 || first_h < 0 || first_w < 0) return t;
    t.from = ((first_d * LIVE_H + first_h) * SUMS_W + first_w) * SUM_ROWS + row;
    if (MERGE_W) {
        t.from += shift_of_sum(first_w, p.pad[2]);
        t.taps = (KERNEL_W - first_w + AxisW::STEP - 1) / AxisW::STEP;
    }
    return t;
}

#else
// Which sum of a row is that of a block's phase, or -1.
__host__ __device__ constexpr int sum_of(int phase_d, int phase_h, int phase_w) {
    for (int d = 0; d < LIVE_D; ++d)
        for (int h = 0; h < LIVE_H; ++h)
            for (int w = 0; w < LIVE; ++w)
                if ((!ALL_PHASES || (AxisD::phase_of(d) == phase_d && AxisH::phase_of(h) == phase_h)) &&
                    AxisW::phase_of(w) == phase_w)
                    return (d * LIVE_H + h) * LIVE + w;
    return -1;
}

// Of the phases along W of a row, which are consecutive outputs from `ow` on: two channels in eight. `to` is the first output
// of the thread's first channel, of whose tile `left` more exist.
__device__ __forceinline__ void store_run(Stored* to, const Accumulators& acc, int tile, int half, int phase_d, int phase_h,
                                          const float* bias, Index ow, int left, const Problem& p) {
    const Index step = (Index)p.out_stride[1];
#pragma unroll
    for (int first = 0; first < STRIDE_W; first += OUT_RUN) {
        const int there = within(ow + first, p.out_extent[2]) ? left : 0;
        Stored* const at = worked_out(to + first);
#pragma unroll
        for (int c = 0; c < TILES_C; ++c) {
            const Pack<float, 2> offset = *reinterpret_cast<const Pack<float, 2>*>(bias + c * 8);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                Pack<float, OUT_RUN> run;
#pragma unroll
                for (int j = 0; j < OUT_RUN; ++j) {
                    const int sum = sum_of(phase_d, phase_h, (FIRST_PHASE_W + first + j) % STRIDE_W);
                    const int set = set_of(sum < 0 ? 0 : sum), column = column_of(sum < 0 ? 0 : sum) / 2 + c * 4 + half * 2 + i;
                    run.value[j] = offset.value[i] + (sum < 0 ? 0.0f : acc.value[set][tile][column]);
                }
                if (c * 8 + i < there) store_vector(run, at + (c * 8 + i) * (long long)step);
            }
        }
    }
}

// Stores what a thread holds as it is: of its rows two channels in eight, in runs along W or, channels-last, with those of its
// neighbours. The box's first output is at d, h, w, and `out` its address.
__device__ __forceinline__ void store_held(const Accumulators& acc, const float* bias, const int (&start)[TILES_M], int tiles,
                                           const Problem& p, const Staged& s, Index d, Index h, Index w, int left, Stored* out,
                                           bool alive) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, own = lane % 4 * 2;
    const int pitch = p.patches[1] ? s.w : 8;
    if (!OUT_CHANNELS_LAST) out += own * p.out_stride[1];
#pragma unroll
    for (int tile = 0; tile < TILES_M; ++tile) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int place = recomputed(start[tile]) + (warp % 4 * 2 + half) * pitch + lane / 4;
            const int row = (int)quotient(place, p.box_magic[2]), slice = (int)quotient(row, p.box_magic[1]);
            const int column = place - row * s.w, line = row - slice * s.h;
            const bool ours = warp / 4 % TEAM * TILES_M + tile < tiles && column < (int)p.box[2] && line < (int)p.box[1] &&
                              slice < depth(p);
#pragma unroll
            for (int phase = 0; phase < SET_PHASES; phase += OUT_CHANNELS_LAST ? 1 : STRIDE_W) {
                issue_in_order();
                const int phase_w = OUT_CHANNELS_LAST ? phase % STRIDE_W : FIRST_PHASE_W;
                const int of_d = phase / STRIDE_W / PHASES_H, of_h = phase / STRIDE_W % PHASES_H;
                const int to_w = (column + late_w(p.pad[2], phase_w)) * STRIDE_W + phase_w;
                const int to_h = (line + (ALL_PHASES ? late(p.pad[1], STRIDE_H, of_h) : 0)) * STRIDE_H + of_h;
                const int to_d = (slice + (ALL_PHASES && !SLIDES ? late(p.pad[0], STRIDE_D, of_d) : 0)) * STRIDE_D + of_d;
                const bool inside = ours && within(d + to_d, p.out_extent[0]) && within(h + to_h, p.out_extent[1]) &&
                                    within(w + to_w, p.out_extent[2]);
                Stored* const to = out + (to_d * (Index)p.out_stride[2] + to_h * (Index)p.out_stride[3] +
                                          to_w * (Index)p.out_stride[4]);
#if !OUT_CHANNELS_LAST
                store_run(to, acc, tile, half, of_d, of_h, bias + own, w + to_w, inside ? left - own : 0, p);
#else
                const int sum = sum_of(of_d, of_h, phase_w), set = set_of(sum < 0 ? 0 : sum);
                const int column = column_of(sum < 0 ? 0 : sum) / 2 + half * 2;
                TwoChannels sums;
#pragma unroll
                for (int c = 0; c < TILES_C; ++c) {
                    const Pack<float, 2> offset = *reinterpret_cast<const Pack<float, 2>*>(bias + c * 8 + own);
#pragma unroll
                    for (int i = 0; i < 2; ++i)
                        sums.value[c][i] =
                            offset.value[i] + (sum < 0 || !alive ? 0.0f : acc.value[set][tile][column + c * 4 + i]);
                }
                store_two(to, sums, inside ? left : 0, p);
#endif
            }
        }
    }
}
#endif

__device__ __forceinline__ void store(const Accumulators& acc, Turned& turned, const Target* targets,
                                      const int (&start)[TILES_M], int tiles, const Problem& p, const Staged& s,
                                      const Block& b, const Stored* bias, Stored* out, bool alive) {
    bring_bias(turned, bias, p, b.tile_c, b.group);
    const Index d = b.d * STRIDE_D + b.phase_d - (Index)p.pad[0], h = b.h * STRIDE_H + b.phase_h - (Index)p.pad[1];
    const Index w = b.w * STRIDE_W - (Index)p.pad[2];
    if (FILLS) out += p.planes[1] * plane_stride(p);
    out += b.n * p.out_stride[0] + (b.group * p.c_out + b.tile_c * TILE_C) * p.out_stride[1];
    out += d * p.out_stride[2] + h * p.out_stride[3] + w * p.out_stride[4];
    const int left = (int)p.c_out - b.tile_c * TILE_C;
#if !OUT_TURNED
    warps_sync(2 + threadIdx.x / STORERS, STORERS);
    store_held(acc, turned.bias, start, tiles, p, s, d, h, w, min(TILE_C, left), worked_out(out), alive);
#else
    store_turned(acc, turned, targets, d, h, w, left, p, out, alive);
#endif
}

// ---- the kernel ------------------------------------------------------------------------------------------------------

// The slice of x that a block stages so many after its first one, and whether x lacks it; all of a block that does not slide.
__device__ __forceinline__ Index slice_of(const Block& b, int slice) { return b.d - EARLIER + slice; }
__device__ __forceinline__ bool is_empty(const Block& b, int slice, const Problem& p) {
    return SLIDES && !within(slice_of(b, slice), p.x_extent[0]);
}

__device__ __forceinline__ int slices_of(const Block& b) { return SLIDES ? EARLIER + b.walk : 1; }

// The taps along D and H that a block's phases have.
struct Rows {
#if ALL_PHASES
    struct {
        int count;
        __device__ __forceinline__ int tap(int j) const { return j; }
    } d, h;
    __device__ __forceinline__ explicit Rows(const Block&) : d{KERNEL_D}, h{KERNEL_H} {}
    __device__ __forceinline__ int back_d() const { return 0; }
    __device__ __forceinline__ int back_h() const { return 0; }
#else
    PhaseTaps<AxisD, KERNEL_D> d;
    PhaseTaps<AxisH, KERNEL_H> h;
    __device__ __forceinline__ explicit Rows(const Block& b)
        : d(RESIDUES_D ? 0 : b.phase_d), h(RESIDUES_H ? 0 : b.phase_h) {}
    __device__ __forceinline__ int back_d() const { return AxisD::back(d.first); }
    __device__ __forceinline__ int back_h() const { return AxisH::back(h.first); }
#endif
    __device__ __forceinline__ int slots_d() const { return MERGE_D ? 1 : d.count; }
    __device__ __forceinline__ int count() const { return d.count * h.count; }
};

// Where in x a block's box begins, along D and H.
__device__ __forceinline__ Index first_d(const Block& b, const Rows& rows) {
    const Index d = b.d - rows.back_d() - REACH_D;
    return RESIDUES_D ? d * STRIDE_D + b.phase_d : d;
}
__device__ __forceinline__ Index first_h(const Block& b, const Rows& rows) {
    const Index h = b.h - rows.back_h() - REACH_H;
    return RESIDUES_H ? h * STRIDE_H + b.phase_h : h;
}

// Whether nothing is multiplied: the phase has no tap, or the part no slice.
__device__ __forceinline__ bool is_idle(const Block& b, const Rows& rows) { return SLIDES ? !b.walk : !rows.count(); }

// Weights of one tap, one output channel of a tile and 16 input channels, or a chunk of them, and their first piece in the tile's
// slots, which are [chunk][tap along D][tap along H].
constexpr unsigned OF_TILE = KERNEL_D * KERNEL_H * KERNEL_W * TILE_C;
constexpr unsigned PACKS_A_CHUNK = 2 * K_STEPS / PACKED_PIECES;
constexpr int NEIGHBOURS = neighbours(KERNEL_D * KERNEL_H * KERNEL_W);
struct Weights {
    long long place;
    Channels channels[PACKED_PIECES];
};

__device__ __forceinline__ void read_weights(Weights& to, const Stored* weight, const Problem& p, unsigned of_tile,
                                             unsigned of_channels, int tile_c, unsigned group) {
    const int neighbour = (int)(of_tile % NEIGHBOURS);
    of_tile /= NEIGHBOURS;
    const int tap_w = (int)(of_tile % KERNEL_W);
    of_tile /= KERNEL_W;
    const int tap_h = (int)(of_tile % KERNEL_H);
    of_tile /= KERNEL_H;
    const int tap_d = (int)(of_tile % KERNEL_D), column = (int)(of_tile / KERNEL_D) * NEIGHBOURS + neighbour;
    const int piece = (int)(of_channels % PACKS_A_CHUNK) * PACKED_PIECES;
    const unsigned chunk = of_channels / PACKS_A_CHUNK;

    const int co = tile_c * TILE_C + column, first = (int)chunk * CHUNK + piece * PIECE;
    weight += p.weight_first + group * p.weight_group_stride + first * p.weight_stride[0] + co * p.weight_stride[1] +
              tap_d * p.weight_stride[2] + tap_h * p.weight_stride[3] + tap_w * p.weight_stride[4];
    load_channels(to.channels, weight, p.weight_stride[0], co < p.c_out ? (int)p.c_in - first : 0);

    const long long row = chunk * ROWS_OF_TAPS + (MERGE_D ? 0 : tap_d * KERNEL_H) + tap_h;
    const int tap = tap_w / COLUMNS_W, at = (tap_w % COLUMNS_W * COLUMNS_D + (MERGE_D ? tap_d : 0)) * TILE_C + column;
    to.place = row * SLOT + (tap * K_STEPS + piece / 2) * PARTS * OPERAND + at;
}

__device__ __forceinline__ void write_weights(Piece* slots, const Weights& from) {
#pragma unroll
    for (int i = 0; i < PACKED_PIECES; ++i) {
        Piece parts[PARTS];
        pack(from.channels[i], parts);
#pragma unroll
        for (int part = 0; part < PARTS; ++part)
            slots[from.place + (i / 2 * PARTS + part) * OPERAND + i % 2 * COLUMNS] = parts[part];
    }
}

// Of a launch whose blocks have a box each: whether they pack the weights that they need, all of a tile, themselves.
__device__ __forceinline__ bool packs_itself(const Problem& p) { return RESIDENT && p.out_vector == PACKS_ITSELF; }

// By all workers, while the first x is staged.
__device__ __forceinline__ void pack_own_weights(Ring& ring, Piece* slots, const Stored* weight, const Problem& p, int chunks) {
    constexpr unsigned BATCH = 32 / (PACKED_PIECES * PIECE);  // that a thread reads before it writes the first
    const Block b = locate(blockIdx.x, p);
    const unsigned count = OF_TILE * PACKS_A_CHUNK * chunks;
    for (unsigned first = threadIdx.x; first < count; first += BATCH * WORKER_THREADS) {
        Weights weights[BATCH];
#pragma unroll
        for (unsigned i = 0; i < BATCH; ++i) {
            const unsigned index = min(first + i * WORKER_THREADS, count - 1);
            read_weights(weights[i], weight, p, index % OF_TILE, index / OF_TILE, b.tile_c, b.group);
        }
        issue_in_order();
#pragma unroll
        for (unsigned i = 0; i < BATCH; ++i)
            if (first + i * WORKER_THREADS < count) write_weights(slots, weights[i]);
    }
    publish_shared_writes();
    warps_sync(5, WORKER_THREADS);  // 1 is the stagers' barrier, 2 to 4 are teams'
    for (int i = threadIdx.x; i < RING; i += WORKER_THREADS) barrier_arrive(ring.full + i);
}

// Brings the weights of a box through the ring, and returns whether they stay; not those of a box that reads nothing. By one thread.
template <class AfterSlot>
__device__ __forceinline__ bool bring_weights(Ring& ring, Piece* slots, const Piece* packed, const Block& b, const Rows& rows,
                                              int chunks, const Problem& p, AfterSlot after_slot) {
    packed += (b.group * p.tiles[3] + b.tile_c) * chunks * (ROWS_OF_TAPS * (long long)SLOT);
    for (int slice = 0; slice < slices_of(b); ++slice) {
        if (is_empty(b, slice, p)) continue;
        const Piece* from = packed;
        for (int chunk = 0; chunk < chunks; ++chunk) {
            for (int row_d = 0; row_d < rows.slots_d(); ++row_d) {
                for (int row_h = 0; row_h < rows.h.count; ++row_h) {
                    const int row = rows.d.tap(row_d) * KERNEL_H + rows.h.tap(row_h);
                    ring.wait_until_free();
                    barrier_arrive_expecting(ring.full + ring.place, SLOT * sizeof(Piece));
                    copy_bulk(slots + ring.place * SLOT, from + row * (long long)SLOT, SLOT * sizeof(Piece),
                              ring.full + ring.place);
                    ring.next<RING>();
                    after_slot();
                }
            }
            from += ROWS_OF_TAPS * (long long)SLOT;
        }
        if (RESIDENT) return true;
    }
    return false;
}

// By one thread: brings the boxes of a block's chunks, of one slice after the other if it slides. They arrive at `landed`.
__device__ __forceinline__ void bring_boxes(Ring& ring, Barrier* landed, Piece* stages, const TensorMap& x, const Problem& p,
                                            const Staged& s, const Block& b, const Rows& rows, int chunks) {
    const int d = (int)first_d(b, rows), h = (int)first_h(b, rows), w = (int)b.w - REACH_W;
    for (int slice = 0; slice < slices_of(b); ++slice) {
        if (is_empty(b, slice, p)) continue;
        for (int chunk = 0; chunk < chunks; ++chunk) {
            ring.wait_until_free();
            barrier_arrive_expecting(landed + ring.place, (unsigned)(s.d * s.h * s.w * ROW_BYTES));
            copy_box(stages + ring.place * PLANES * s.plane, &x, b.group * (int)p.c_in + chunk * CHUNK, w, h,
                     SLIDES ? (int)slice_of(b, slice) : d, b.n, landed + ring.place);
            ring.next<X_STAGES>();
        }
    }
}

// By these: the boxes that `bring_boxes` brings, once each has landed. A thread publishes what it wrote before it says so, and
// hence before workers free the stage: so the next copy to it, which comes after that, needs no further fence.
__device__ __forceinline__ void split_boxes(Ring& ring, Barrier* landed, Piece* stages, const Problem& p, const Staged& s,
                                            const Block& b, int chunks, int thread) {
    for (int slice = 0; slice < slices_of(b); ++slice) {
        if (is_empty(b, slice, p)) continue;
        for (int chunk = 0; chunk < chunks; ++chunk) {
            Piece* const high = stages + ring.place * PLANES * s.plane;
            barrier_wait(landed + ring.place, ring.round & 1);
            split_box(high, high + s.plane * NEXT_ROW, s.d * s.h * s.w * NEXT_ROW, thread);
            publish_shared_writes();
            barrier_arrive(ring.full + ring.place);
            ring.next<X_STAGES>();
        }
    }
}

constexpr int BEFORE_SLOTS = BARRIER_BYTES + (FILLS ? round_up((int)sizeof(Fill), 128) : 0);

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
#if BOXED
    phase_wgmma(const __grid_constant__ TensorMap x, const Piece* packed, const Stored* bias, Stored* out, const Problem p) {
#else
    phase_wgmma(const Stored* x, const Piece* packed, const Stored* bias, Stored* out, const Problem p) {
#endif
    extern __shared__ __align__(BOXED ? 1024 : 128) unsigned char shared_bytes[];
    const Staged s = staged_box(p);
    Barrier* const barriers = reinterpret_cast<Barrier*>(shared_bytes);
    Piece* const slots = reinterpret_cast<Piece*>(shared_bytes + BEFORE_SLOTS);
    Piece* const stages = slots + pieces_to_stages(BEFORE_SLOTS, RING * SLOT);
    Turned* const turned = reinterpret_cast<Turned*>(stages + TEAMS * X_STAGES * PLANES * s.plane);
    Target* const targets = reinterpret_cast<Target*>(turned + STORES);

    Ring x_ring(barriers, X_STAGES), weight_ring(barriers + TEAMS * 2 * X_STAGES, RING);
    if (threadIdx.x == 0) init_barriers(x_ring, weight_ring, 4 * TEAM);
    clear_zeros(turned);
#if OUT_TURNED
    for (int i = threadIdx.x; i < ALL_TARGETS; i += THREADS) targets[i] = find_target(p, s, i);
#endif
    // Behind the box, rows of no use are read; they are nothing, once and for all, as are pieces without channels.
    const int filled = (HALF_K ? 0 : s.d * s.h * s.w) * NEXT_ROW, plane = s.plane * NEXT_ROW, behind = plane - filled;
    for (int i = threadIdx.x; i < TEAMS * X_STAGES * (PLANES / NEXT_ROW) * behind; i += THREADS)
        stages[i / behind * plane + filled + i % behind] = Piece{{0, 0, 0, 0}};
    publish_shared_writes();
    __syncthreads();

    const int chunks = ((int)p.c_in + CHUNK - 1) / CHUNK;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

    if (warp >= 4 * WORKERS) {
        give_registers<STAGER_REGISTERS>();
        const int thread = threadIdx.x - WORKER_THREADS - 32;
        if (thread < 0 && lane) return;
        if (thread < 0 && !FILLS && packs_itself(p)) return;
        if (thread < 0) wait_for_kernel_before();  // it packs the weights, while x is staged
#if PLANE_STEP > 1
        // The thread that brings weights fills planes, some after each slot: what it waits for, workers hardly ever do.
        if (thread < 0) {
            Fill& fill = *reinterpret_cast<Fill*>(shared_bytes + BARRIER_BYTES);
            find_planes(fill, p);
            const int slices = SLIDES ? (int)p.tiles[0] : 1;  // or about so many
            const unsigned boxes = ((unsigned)p.blocks - blockIdx.x + gridDim.x - 1) / gridDim.x;
            fill.at_once = fill.left / (boxes * (RESIDENT ? 1 : slices * chunks * ROWS_OF_TAPS)) + 1;
            const auto fill_next = [&] { fill_planes(fill, fill.at_once, bias, out, p); };
            bool stay = packs_itself(p);
            for (unsigned index = blockIdx.x; index < (unsigned)p.blocks; index = next_box(index, gridDim.x, p)) {
                const Block b = locate(index, p);
                const Rows rows(b);
                if (is_idle(b, rows)) continue;
                if (!stay)
                    stay = bring_weights(weight_ring, slots, packed, b, rows, chunks, p, [&] { if (!RESIDENT) fill_next(); });
                if (RESIDENT) fill_next();
            }
            fill_planes(fill, ~0u, bias, out, p);
            store_bulk_wait();
            return;
        }
#endif
#if BOXED
        if (thread < 0) {
            for (unsigned index = blockIdx.x; index < (unsigned)p.blocks; index = next_box(index, gridDim.x, p)) {
                const Block b = locate(index, p);
                const Rows rows(b);
                if (is_idle(b, rows)) continue;
                if (bring_weights(weight_ring, slots, packed, b, rows, chunks, p, [] {})) return;
            }
            return;
        }
        // A team's boxes are brought by one thread, of a warp of its own, which waits for no other team. Where they are split, one
        // thread brings those of all teams, in the order in which the other warps split them.
        constexpr int SERVED = SPLITS ? TEAMS : 1;  // teams
        int team = SPLITS ? 0 : thread / 32;
        const bool splits = SPLITS && thread >= 32;
        if ((lane && !splits) || team >= TEAMS) return;
        Ring ring = x_ring.of_team(team);
        for (unsigned index = blockIdx.x + team * gridDim.x; index < (unsigned)p.blocks;
             index = next_box(index, TEAMS / SERVED * gridDim.x, p)) {
            const Block b = locate(index, p);
            const Rows rows(b);
            if (is_idle(b, rows)) continue;
            Piece* const own = stages + team * X_STAGES * PLANES * s.plane;
            Barrier* const landed = SPLITS ? weight_ring.free + RING + team * X_STAGES : ring.full;
            if (splits) split_boxes(ring, landed, own, p, s, b, chunks, thread - 32);
            else bring_boxes(ring, landed, own, x, p, s, b, rows, chunks);
            if (SERVED == 1) continue;
            team = next_team(team, x_ring, ring);
            ring = x_ring.of_team(team);
        }
#else
        Item* const items = reinterpret_cast<Item*>(targets + (OUT_TURNED ? ALL_TARGETS : 0));
        const int count = items_of(p, s);
        UnderWay under_way = {0, 0};
        int team = 0;
        // Neither how far the next box is nor whether there is one is worked out earlier: that would take registers.
        const auto blocks = [] { return FILLS ? (unsigned)recomputed((int)gridDim.x) : gridDim.x; };
        for (unsigned index = blockIdx.x; index < (unsigned)p.blocks; index = next_box(index, blocks(), p)) {
            const Block b = locate(index, p);
            const Rows rows(b);
            if (is_idle(b, rows)) continue;
            if (!FILLS && thread < 0) {
                if (bring_weights(weight_ring, slots, packed, b, rows, chunks, p, [] {})) return;
                continue;
            }
            warps_sync(1, STAGERS);  // nobody reads the items of the box before
            const Index d = SLIDES ? (Index)0 : first_d(b, rows), h = first_h(b, rows), w = b.w - REACH_W;
            find_items(items, p, s, d, h, w, thread);
            warps_sync(1, STAGERS);
            Ring ring = x_ring.of_team(team);
            const Stored* from = x + b.n * p.x_stride[0] + b.group * p.c_in * p.x_stride[1];
            from += (SLIDES ? slice_of(b, 0) : d) * p.x_stride[2] + h * p.x_stride[3] + w * p.x_stride[4];
            for (int slice = 0; slice < slices_of(b); ++slice) {
                if (SLIDES && slice) from += p.x_stride[2];
                if (is_empty(b, slice, p)) continue;
                for (int left = (int)p.c_in; left > 0; left -= CHUNK) {
                    ring.wait_until_free();
                    const int stage = team * X_STAGES + later(ring.place);
                    Piece* const to = stages + stage * PLANES * later(s.plane);
                    if (is_copied(p)) {
                        copy_x(to, from, items, count, s.plane, left, thread);
                        copy_async_commit();
                        under_way.stages = under_way.stages << 8 | stage;
                        if (++under_way.count > AHEAD)
                            hand_over<AHEAD>(under_way, stages, x_ring.full, count, s.plane, thread);
                    } else {
                        stage_x(to, from, items, p, s, left, thread);
                        publish_shared_writes();
                        barrier_arrive(ring.full + ring.place);
                    }
                    ring.next<X_STAGES>();
                    from += CHUNK * p.x_stride[1];
                }
                if (SLIDES) from -= chunks * (CHUNK * p.x_stride[1]);
            }
            team = next_team(team, x_ring, ring);
        }
        while (under_way.count > 0) hand_over<0>(under_way, stages, x_ring.full, count, s.plane, thread);
#endif
        return;
    }

    take_registers<WORKER_REGISTERS>();
    if (packs_itself(p)) pack_own_weights(weight_ring, slots, reinterpret_cast<const Stored*>(packed), p, chunks);
    const int patches_w = (int)p.patches[1], tiles = tiles_of(p, s, MERGE_W ? s.w : (int)p.box[2]);
    int start[TILES_M];
    find_starts(start, p, s, tiles);
    // Where rows of taps are unrolled, a branch for each takes longer than what it saves.
    const bool works = ALL_PHASES || SLIDES || TEAM == 1 || tiles_of_worker(tiles) > 0;
    const int team = warp / 4 / TEAM, storing = threadIdx.x / STORERS;
    x_ring = x_ring.of_team(team);
    const Piece* const own = stages + team * X_STAGES * PLANES * s.plane;
    const int eight = patches_w ? s.w : 8;  // positions from eight rows of A to the next
    const Operand staged = describe_stages<ROW_BYTES>(own, s.plane, eight);
    const Operand weights = describe(slots, COLUMNS * 16, 128);

    for (unsigned index = blockIdx.x + team * gridDim.x; index < (unsigned)p.blocks; index = next_box(index, TEAMS * gridDim.x, p)) {
        const Block b = locate(index, p);
        const Rows rows(b);
        if (SLIDES && is_idle(b, rows)) continue;
        const bool alive = rows.count();
        Accumulators acc;
        clear(acc);
        for (int slice = 0; slice < slices_of(b); ++slice) {
            if (alive && !is_empty(b, slice, p)) {
                int used_slot = -1, used_stage = -1;  // by the products that may be under way
                const auto release = [&] {
                    if (!RESIDENT && lane == 0 && used_slot >= 0) barrier_arrive(weight_ring.free + used_slot);
                    if (lane == 0 && used_stage >= 0) barrier_arrive(x_ring.free + used_stage);
                    used_slot = used_stage = -1;
                };
                for (int chunk = 0; chunk < chunks; ++chunk) {
                    x_ring.wait_until_full();
                    const Operand box = staged + x_ring.place * PLANES * s.plane;
                    const auto multiply_row = [&](int set, int down, int across) {
                        weight_ring.wait_until_full();
                        const Operand a = box + (down * recomputed(s.h) + across) * recomputed(s.w) * NEXT_ROW;
                        const Operand b = weights + weight_ring.place * SLOT;
                        if (works) multiply(acc, set * SETS_W, a, b, start, s.plane, p.pad[2]);
                        if (LAGS) release();
                        used_slot = weight_ring.place;
                        weight_ring.next<RING, RESIDENT>();
                        if (!LAGS) release();
                    };
#if ALL_PHASES
#pragma unroll
                    for (int tap_d = 0; tap_d < (MERGE_D ? 1 : KERNEL_D); ++tap_d) {
#pragma unroll
                        for (int tap_h = 0; tap_h < KERNEL_H; ++tap_h) {
                            multiply_row((SLIDES ? tap_d : tap_d % AxisD::STEP) * LIVE_H + tap_h % AxisH::STEP,
                                         SLIDES ? 0 : REACH_D - AxisD::back(tap_d) + late(p.pad[0], STRIDE_D, AxisD::phase_of(tap_d)),
                                         REACH_H - AxisH::back(tap_h) + late(p.pad[1], STRIDE_H, AxisH::phase_of(tap_h)));
                        }
                    }
#elif SLIDES
#pragma unroll
                    for (int tap_d = 0; tap_d < (MERGE_D ? 1 : KERNEL_D); ++tap_d) {
#pragma unroll 1
                        for (int tap_h = 0; tap_h < KERNEL_H; ++tap_h) multiply_row(tap_d, 0, REACH_H - tap_h * AxisH::HOP);
                    }
#else
#pragma unroll 1
                    for (int row_d = 0; row_d < rows.d.count; ++row_d) {
#pragma unroll 1
                        for (int row_h = 0; row_h < rows.h.count; ++row_h)
                            multiply_row(0, REACH_D - row_d * AxisD::HOP, REACH_H - row_h * AxisH::HOP);
                    }
#endif
                    used_stage = x_ring.place;
                    x_ring.next<X_STAGES>();
                    if (!LAGS) release();
                }
                if (LAGS) wgmma_wait<0>();
                release();
            }
            Block here = b;
            if (SLIDES) here.d = slice_of(b, slice);
            if (!SLIDES || slice >= EARLIER)
                store(acc, turned[storing], targets_of(targets, storing), start, tiles, p, s, here, bias, out, alive);
            if (SLIDES) slide(acc);
        }
    }
}

// Puts the weights of the call in the order of the slots, once, before the kernel above, which may do so itself: [group][tile of output
// channels] of them. Consecutive threads read consecutive weights. There are fewer than 2^32 threads: the pieces of more are more
// than a GPU's memory.
extern "C" __global__ void phase_wgmma_pack(const Stored* weight, Piece* packed, const Problem p) {
    let_next_kernel_start();
    const unsigned chunks = ((unsigned)p.c_in + CHUNK - 1) / CHUNK;
    unsigned index = blockIdx.x * blockDim.x + threadIdx.x;
    const unsigned of_tile = index % OF_TILE;
    index /= OF_TILE;
    const int tile_c = (int)take(index, p, 3);
    const unsigned of_channels = index % (chunks * PACKS_A_CHUNK), group = index / (chunks * PACKS_A_CHUNK);
    if (group >= (unsigned)p.groups) return;
    Weights weights;
    read_weights(weights, weight, p, of_tile, of_channels, tile_c, group);
    write_weights(packed + (group * p.tiles[3] + tile_c) * chunks * (ROWS_OF_TAPS * (long long)SLOT), weights);
}
