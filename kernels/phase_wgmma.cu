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
// Warps have roles. Workers multiply and store the result; of the last warps one brings weights by bulk copies and the others
// stage x through registers, where it is turned, rounded to TF32 or split. A block takes one box after the other, so
// that the next one is staged while the result of the last is stored.
//
// Compile-time: kernel, stride, dilation, dtype, precision and tile. Run-time: N, extents, the box, padding, channels.
#include "common.cuh"
#include "tf32.cuh"

#define NATIVE 0  // 16-bit operands as they are
#define TF32 1    // rounded to TF32
#define TF32X3 3  // three products of TF32 parts: as accurate as float32

#ifndef DTYPE
#define DTYPE FLOAT32
#endif
#ifndef PRECISION
#define PRECISION (DTYPE == FLOAT32 ? TF32X3 : NATIVE)
#endif
#ifndef KERNEL_D
#define KERNEL_D 3
#define KERNEL_H 3
#define KERNEL_W 3
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
#ifndef WORKERS  // warpgroups that multiply
#define WORKERS 1
#endif
#ifndef STAGER_GROUPS  // warpgroups that bring weights and x
#define STAGER_GROUPS 1
#endif
#ifndef TAKE_TURNS  // whether each worker has boxes of its own, so that one stores while another multiplies
#define TAKE_TURNS 0
#endif
#ifndef TILES_M  // times 64 positions a worker owns
#define TILES_M 2
#endif
#ifndef TILES_C  // times 8 output channels
#define TILES_C 4
#endif
#ifndef MERGE_W  // whether the taps along W are columns of one wgmma
#define MERGE_W 0
#endif
#ifndef ALL_PHASES  // whether a block owns the phases along D and H too, and not one of them
#define ALL_PHASES 0
#endif
#ifndef K_STEPS  // pairs of pieces of input channels staged at a time
#define K_STEPS 1
#endif
#ifndef X_STAGES
#define X_STAGES 2
#endif
#ifndef RING  // slots of weights
#define RING 3
#endif
#ifndef RESIDENT  // whether the ring holds all weights that a block needs, which then stay
#define RESIDENT 0
#endif
#ifndef X_CHANNELS_LAST
#define X_CHANNELS_LAST 0
#endif
#ifndef OUT_CHANNELS_LAST
#define OUT_CHANNELS_LAST 0
#endif
#ifndef OUT_VECTOR  // whether four channels of a channels-last result may be written at a time
#define OUT_VECTOR 0
#endif
#ifndef MIN_BLOCKS
#define MIN_BLOCKS 2
#endif
#ifndef WORKER_REGISTERS  // of a thread, after the stagers gave up what they do not need
#define WORKER_REGISTERS 200
#define STAGER_REGISTERS 56
#endif

typedef Element<DTYPE>::Stored Stored;

typedef Axis<KERNEL_D, STRIDE_D, DILATION_D> AxisD;
typedef Axis<KERNEL_H, STRIDE_H, DILATION_H> AxisH;
typedef Axis<KERNEL_W, STRIDE_W, DILATION_W> AxisW;

constexpr int WORKER_THREADS = 128 * WORKERS;
constexpr int THREADS = WORKER_THREADS + 128 * STAGER_GROUPS;
constexpr int TEAM = TAKE_TURNS ? 1 : WORKERS;  // warpgroups that share a box
constexpr int TEAM_THREADS = 128 * TEAM;
constexpr int TEAMS = WORKERS / TEAM;
constexpr int STAGERS = 128 * STAGER_GROUPS - 32;  // threads that stage x

constexpr int PIECE = 16 / (int)sizeof(Stored);  // channels
constexpr int CHUNK = 2 * K_STEPS * PIECE;
constexpr int PARTS = PRECISION == TF32X3 ? 2 : 1;  // high and low
constexpr int PLANES = PARTS * K_STEPS * 2;  // of a stage: [part][k step][2]
constexpr int TILE_C = 8 * TILES_C;
constexpr int ROWS = 64 * TILES_M * TEAM;  // positions of a box, those of no use included

// The tap furthest back reads the first row and column of the staged box, whichever phase it is.
constexpr int REACH_D = ALL_PHASES ? AxisD::REACH : (AxisD::MAX_TAPS - 1) * AxisD::HOP;
constexpr int REACH_H = ALL_PHASES ? AxisH::REACH : (AxisH::MAX_TAPS - 1) * AxisH::HOP;
constexpr int REACH_W = AxisW::REACH;

// A block's phases along an axis that have a tap, each numbered by its first tap, so that tap k belongs to number k % STEP;
// the others are the bias.
constexpr int PHASES_D = ALL_PHASES ? STRIDE_D : 1, PHASES_H = ALL_PHASES ? STRIDE_H : 1;
constexpr int LIVE_D = !ALL_PHASES ? 1 : KERNEL_D < AxisD::STEP ? KERNEL_D : AxisD::STEP;
constexpr int LIVE_H = !ALL_PHASES ? 1 : KERNEL_H < AxisH::STEP ? KERNEL_H : AxisH::STEP;
constexpr int LIVE = KERNEL_W < AxisW::STEP ? KERNEL_W : AxisW::STEP;

constexpr int SETS_W = MERGE_W ? 1 : LIVE;
constexpr int SETS = LIVE_D * LIVE_H * SETS_W;  // of accumulators
constexpr int COLUMNS = MERGE_W ? KERNEL_W * TILE_C : TILE_C;  // of a wgmma
constexpr int TAPS = MERGE_W ? 1 : KERNEL_W;  // wgmmas that a row of taps needs

// A slot of weights: [tap][k step][part][2 pieces][column][16 bytes]. Sizes in units of 16 bytes.
constexpr int OPERAND = 2 * COLUMNS;
constexpr int SLOT = TAPS * K_STEPS * PARTS * OPERAND;

// The result is turned in shared memory, eight channels at a time: [8 channels][sums of a phase or tap][row], then a zero.
constexpr int SUMS_W = MERGE_W ? KERNEL_W : LIVE;
constexpr int SUMS = LIVE_D * LIVE_H * SUMS_W;
constexpr int SUM_ROWS = SUMS == 1 ? ROWS : at_residue(ROWS, 16, 32);
constexpr int ZERO = SUMS * SUM_ROWS;
constexpr int CHANNEL = at_residue(ZERO + 1, 4, 32);
constexpr int SLICE = 8 * CHANNEL;
constexpr int SLICES = TILES_C == 1 ? 1 : 2;  // alternate
constexpr int SET_PHASES = PHASES_D * PHASES_H * STRIDE_W;  // that a block stores
constexpr int TARGETS = ceil_div(ROWS * SET_PHASES, TEAM_THREADS);  // of a thread, see Target
static_assert(!TAKE_TURNS || RESIDENT, "weights that pass by are for all workers");
static_assert(!(MERGE_W && OUT_CHANNELS_LAST), "sums of taps are shifted where they are turned");

constexpr int BARRIERS = 2 * (TEAMS * X_STAGES + RING);
constexpr int BARRIER_BYTES = round_up(8 * BARRIERS, 128);

// Whether the first output of a phase belongs to a position one further: with padding, a box of positions begins where the
// output does, phase by phase.
__device__ __forceinline__ int late(long long pad, int stride, int phase) { return phase < (int)((unsigned)pad % stride); }

struct Block {
    Index d, h, w;  // first position q on each axis, of phases that are not late
    int tile_c;
    int phase_d, phase_h;  // 0 where the block owns all
    long long n, group;
};

__device__ __forceinline__ Block locate(unsigned index, const Problem& p) {
    // What reads the same x runs fastest, then what reads its neighbours.
    Block b;
    b.tile_c = (int)take(index, p, 3);
    b.group = take(index, p, 4);
    b.phase_h = (int)(index % (STRIDE_H / PHASES_H));
    index /= STRIDE_H / PHASES_H;
    b.phase_d = (int)(index % (STRIDE_D / PHASES_D));
    index /= STRIDE_D / PHASES_D;
    b.w = (Index)take(index, p, 2) * (Index)p.box[2] + (Index)p.pad[2] / STRIDE_W;
    b.h = (Index)take(index, p, 1) * (Index)p.box[1] + (Index)p.pad[1] / STRIDE_H;
    b.d = (Index)take(index, p, 0) * (Index)p.box[0] + (Index)p.pad[0] / STRIDE_D;
    if (!ALL_PHASES) {
        b.h += late(p.pad[1], STRIDE_H, b.phase_h);
        b.d += late(p.pad[0], STRIDE_D, b.phase_d);
    }
    b.n = index;
    return b;
}

// The box in shared memory: extents with the halo, and where 64 rows of A lie.
struct Staged {
    int d, h, w, plane;

    __device__ __forceinline__ explicit Staged(const Problem& p)
        : d((int)p.box[0] + REACH_D + (ALL_PHASES ? late(p.pad[0], STRIDE_D, 0) : 0)),
          h((int)p.box[1] + REACH_H + (ALL_PHASES ? late(p.pad[1], STRIDE_H, 0) : 0)),
          w((int)p.box[2] + REACH_W + late(p.pad[2], STRIDE_W, 0)), plane((int)p.plane) {}
};

// ---- staging ---------------------------------------------------------------------------------------------------------

constexpr Index OUTSIDE = (Index)(INDEX64 ? 1ll << 46 : -(1ll << 31));  // an offset that no element has

// What a thread stages at a time: a position or, of 16-bit numbers in rows that are aligned for it, two that follow each other.
struct Item {
    Index offset;  // in x, of the first channel
    int place;     // 4 * position + 1 if the position is of the box + 2 if the next one is
};

__device__ __forceinline__ bool in_pairs(const Problem& p) {
    return sizeof(Stored) == 2 && !X_CHANNELS_LAST && p.x_vector;
}

// A row of x may start between two aligned pairs, and end so.
__device__ __forceinline__ int items_of(const Problem& p, const Staged& s) {
    return s.d * s.h * (in_pairs(p) ? s.w / 2 + 1 : s.w);
}

// All items of the box that starts at d, h, w, worked out once for all chunks.
__device__ __forceinline__ void find_items(Item* items, const Problem& p, const Staged& s, Index d, Index h, Index w,
                                           int thread) {
    const int width = in_pairs(p) ? 2 : 1, across = in_pairs(p) ? s.w / 2 + 1 : s.w;
    const int early = in_pairs(p) ? (int)(w & 1) : 0;
    for (int i = thread; i < items_of(p, s); i += STAGERS) {
        const int row = (int)quotient(i, p.box_magic[0]), slice = (int)quotient(row, p.box_magic[1]);
        const int column = (i - row * across) * width - early;
        const Index at_d = d + slice, at_h = h + (row - slice * s.h), at_w = w + column;
        const bool inside = within(at_d, p.x_extent[0]) && within(at_h, p.x_extent[1]) && within(at_w, p.x_extent[2]);
        const bool first = column >= 0 && column < s.w, second = in_pairs(p) && column + 1 < s.w;
        items[i].offset = inside ? at_d * (Index)p.x_stride[2] + at_h * (Index)p.x_stride[3] + at_w * (Index)p.x_stride[4]
                                 : OUTSIDE;
        items[i].place = 4 * (row * s.w + column) + first + 2 * second;
    }
}

typedef Pack<unsigned, 4> Piece;  // 16 bytes of shared memory
typedef Pack<Stored, PIECE> Channels;  // of one position

__device__ __forceinline__ void zero(Half& value) { value.bits = 0; }
__device__ __forceinline__ void zero(BFloat16& value) { value.bits = 0; }
__device__ __forceinline__ void zero(float& value) { value = 0; }

__device__ __forceinline__ unsigned bits_of(Half value) { return value.bits; }
__device__ __forceinline__ unsigned bits_of(BFloat16 value) { return value.bits; }
__device__ __forceinline__ unsigned bits_of(float value) { return __float_as_uint(value); }

// One piece of a position, as its parts.
__device__ __forceinline__ void pack(const Channels& c, Piece (&parts)[PARTS]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if (sizeof(Stored) == 2) {
            parts[0].value[i] = bits_of(c.value[2 * i % PIECE]) | bits_of(c.value[(2 * i + 1) % PIECE]) << 16;
        } else if (PRECISION == TF32X3) {
            split(widen(c.value[i]), parts[0].value[i], parts[PARTS - 1].value[i]);
        } else {
            parts[0].value[i] = to_tf32(widen(c.value[i]));
        }
    }
}

constexpr int PIECES = 2 * K_STEPS;
constexpr int POSITIONS = 0, PAIRS = 1, VECTORS = 2;  // a value at a time, two along a row, or a piece of channels

// Stages what there is of a chunk. Some pieces of an item are a unit of work: eight loads. Neighbouring threads take
// neighbouring items or, for vectors of channels, neighbouring pieces. A thread loads a batch before it stores the first, since
// it is latency that it waits for.
template <bool WHOLE, int KIND>
__device__ __forceinline__ void stage(Piece* to, const Stored* x, const Item* items, Index step, int count, int plane,
                                      int channels, int thread) {
    constexpr int WIDTH = KIND == PAIRS ? 2 : 1;
    constexpr int UNIT = KIND == VECTORS ? 1 : 8 / PIECE;  // pieces
    constexpr int UNITS = PIECES / UNIT;  // of an item
    constexpr int BATCH = !WHOLE ? 1 : (KIND == VECTORS ? 5 : 4) - K_STEPS;
    // The item and the first piece of a unit. It is worked out twice, which costs less than registers to remember it.
    const auto find = [&](int at, int& piece) {
        int unit = 0;
        if (KIND == VECTORS) {
            unit = at % UNITS;
        } else {
#pragma unroll
            for (int i = 1; i < UNITS; ++i) unit += at >= i * count;
        }
        piece = unit * UNIT;
        return items + (KIND == VECTORS ? at / UNITS : at - unit * count);
    };
    for (int first = thread; first < count * UNITS; first += BATCH * STAGERS) {
        Pack<Stored, WIDTH> values[BATCH][UNIT * PIECE];
#pragma unroll
        for (int j = 0; j < BATCH; ++j) {
            const int at = first + j * STAGERS;
            int piece;
            const Item* const item = find(at, piece);
            const Index offset = at < count * UNITS ? item->offset : OUTSIDE;
            const bool inside = offset != OUTSIDE;
            const int left = inside ? channels - piece * PIECE : 0;
#pragma unroll
            for (int k = 0; k < UNIT * PIECE; ++k)
#pragma unroll
                for (int i = 0; i < WIDTH; ++i) zero(values[j][k].value[i]);
            if (KIND == VECTORS && (WHOLE ? inside : left >= PIECE)) {
                *reinterpret_cast<Channels*>(&values[j]) = *reinterpret_cast<const Channels*>(x + offset + piece * PIECE);
            } else if (!(KIND == VECTORS && WHOLE)) {
                const Stored* from = x + offset + piece * PIECE * step;
#pragma unroll
                for (int k = 0; k < UNIT * PIECE; ++k) {
                    if (WHOLE ? inside : k < left) values[j][k] = *reinterpret_cast<const Pack<Stored, WIDTH>*>(from);
                    from += step;
                }
            }
        }
        issue_in_order();
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
                    Channels c;
                    Piece parts[PARTS];
#pragma unroll
                    for (int k = 0; k < PIECE; ++k) c.value[k] = values[j][u * PIECE + k].value[i];
                    pack(c, parts);
                    if (KIND == PAIRS && !(place >> i & 1)) continue;
#pragma unroll
                    for (int part = 0; part < PARTS; ++part) target[(part * PIECES + u) * plane + i] = parts[part];
                }
            }
        }
    }
}

__device__ __forceinline__ void stage_x(Piece* to, const Stored* x, const Item* items, const Problem& p, const Staged& s,
                                        int channels, int thread) {
    constexpr int FAST = X_CHANNELS_LAST ? VECTORS : sizeof(Stored) == 2 ? PAIRS : POSITIONS;
    const Index step = (Index)p.x_stride[1];
    const int count = items_of(p, s);
    if (FAST != POSITIONS && p.x_vector && channels >= CHUNK) {
        stage<true, FAST>(to, x, items, step, count, s.plane, channels, thread);
    } else if (FAST != POSITIONS && p.x_vector) {
        stage<false, FAST>(to, x, items, step, count, s.plane, channels, thread);
    } else if (channels >= CHUNK) {
        stage<true, POSITIONS>(to, x, items, step, count, s.plane, channels, thread);
    } else {
        stage<false, POSITIONS>(to, x, items, step, count, s.plane, channels, thread);
    }
}

// ---- arithmetic ------------------------------------------------------------------------------------------------------

struct Accumulators {
    float value[SETS][TILES_M][COLUMNS / 2];
};

__device__ __forceinline__ void multiply_add(float (&sum)[COLUMNS / 2], unsigned long long a, unsigned long long b,
                                             bool accumulate) {
#if DTYPE == FLOAT16
    wgmma_f16<COLUMNS>(sum, a, b, accumulate);
#elif DTYPE == BFLOAT16
    wgmma_bf16<COLUMNS>(sum, a, b, accumulate);
#else
    wgmma_tf32<COLUMNS>(sum, a, b, accumulate);
#endif
}

// How far from a row of A a tap along W reads: when it is multiplied or, if all are at once, when its sum is stored.
__device__ __forceinline__ int shift_of_sum(int tap, long long pad) {
    return REACH_W - AxisW::back(tap) + late(pad, STRIDE_W, AxisW::phase_of(tap));
}
__device__ __forceinline__ int shift_of(int tap, long long pad) { return MERGE_W ? 0 : shift_of_sum(tap, pad); }

#if PRECISION == TF32X3
// The tensor core truncates its sums, so each chain of a few products starts from zero, and ordinary additions collect the
// chains. Two alternate: one is added while the next is multiplied.
constexpr int CHAINS = TILES_M * SETS_W;

__device__ __forceinline__ void collect(Accumulators& acc, int set, const float (&sums)[2][COLUMNS / 2], int chain) {
#pragma unroll
    for (int i = 0; i < COLUMNS / 2; ++i) acc.value[set + chain % SETS_W][chain / SETS_W][i] += sums[chain % 2][i];
}

__device__ __forceinline__ void multiply(Accumulators& acc, int set, unsigned long long a, unsigned long long b,
                                         const int (&start)[TILES_M], int plane, long long pad) {
    float sums[2][COLUMNS / 2];
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
                if (!MERGE_W && tap % AxisW::STEP != chain % SETS_W) continue;
#pragma unroll
                for (int k = 0; k < K_STEPS; ++k) {
                    multiply_add(sums[chain % 2], a + recomputed(start[chain / SETS_W]) + shift_of(tap, pad) + (part_a * K_STEPS + k) * 2 * recomputed(plane),
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
__device__ __forceinline__ void multiply(Accumulators& acc, int set, unsigned long long a, unsigned long long b,
                                         const int (&start)[TILES_M], int plane, long long pad) {
    wgmma_fence();
#pragma unroll
    for (int tile = 0; tile < TILES_M; ++tile) {
#pragma unroll
        for (int tap = 0; tap < TAPS; ++tap) {
#pragma unroll
            for (int k = 0; k < K_STEPS; ++k) {
                multiply_add(acc.value[set + (MERGE_W ? 0 : tap % AxisW::STEP)][tile],
                             a + recomputed(start[tile]) + shift_of(tap, pad) + k * 2 * recomputed(plane), b + (tap * K_STEPS + k) * OPERAND, true);
            }
        }
    }
    wgmma_commit();
    wgmma_wait<1>();
}
constexpr bool LAGS = true;
#endif

// ---- the result ------------------------------------------------------------------------------------------------------

// A position of the result within a box, of all channels: where it goes and where its sum lies, of as many taps. All boxes
// have the same ones.
struct Target {
    Index offset;     // from the box's first output
    short d, h;       // likewise
    int w, from, taps;
};

// Which row of A an output position of the box is.
__device__ __forceinline__ int row_of(const Problem& p, const Staged& s, int d, int h, int w) {
    const int patches_h = (int)p.patches[0], patches_w = (int)p.patches[1];
    if (!patches_w) return (d * s.h + h) * s.w + w;
    return ((d * patches_h + h / 8) * patches_w + w / 8) * 64 + h % 8 * 8 + w % 8;
}

__device__ __forceinline__ Target find_target(const Problem& p, const Staged& s, int index) {
    const int width = (int)p.box[2] * STRIDE_W, height = (int)p.box[1] * PHASES_H;
    const int row = (int)quotient(index, p.box_magic[2]), slice = (int)quotient(row, p.box_magic[3]);
    const int column = index - row * width, line = row - slice * height;
    const int w = column / STRIDE_W, h = line / PHASES_H, d = slice / PHASES_D;
    const int phase_w = column % STRIDE_W, phase_h = line % PHASES_H, phase_d = slice % PHASES_D;
    Target t;
    t.w = (w + late(p.pad[2], STRIDE_W, phase_w)) * STRIDE_W + phase_w;
    t.h = (short)((h + (ALL_PHASES ? late(p.pad[1], STRIDE_H, phase_h) : 0)) * STRIDE_H + phase_h);
    t.d = (short)((d + (ALL_PHASES ? late(p.pad[0], STRIDE_D, phase_d) : 0)) * STRIDE_D + phase_d);
    t.offset = t.d * (Index)p.out_stride[2] + t.h * (Index)p.out_stride[3] + t.w * (Index)p.out_stride[4];
    const bool there = slice < (int)p.box[0] * PHASES_D;
    if (!there) t.w = -1;  // threads have more targets than the box
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
    t.from = ((first_d * LIVE_H + first_h) * SUMS_W + first_w) * SUM_ROWS + row_of(p, s, d, h, w);
    if (MERGE_W) {
        t.from += shift_of_sum(first_w, p.pad[2]);
        t.taps = (KERNEL_W - first_w + AxisW::STEP - 1) / AxisW::STEP;
    }
    return t;
}

// One channel of a target; `turned` is the channel's.
__device__ __forceinline__ float sum_at(const float* turned, const Target& t) {
    float sum = turned[t.from];
#pragma unroll
    for (int tap = 1; tap < (MERGE_W ? AxisW::MAX_TAPS : 1); ++tap)
        if (tap < t.taps) sum += turned[t.from + tap * (AxisW::STEP * SUM_ROWS - AxisW::HOP)];
    return sum;
}

// Turns eight channels of the sums: of each phase or tap, rows side by side.
__device__ __forceinline__ void turn(float* turned, const Accumulators& acc, int eight) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float* const to = turned + lane % 4 * 2 * CHANNEL + warp / 4 % TEAM * TILES_M * 64 + warp % 4 * 16 + lane / 4;
#pragma unroll
    for (int sum = 0; sum < SUMS; ++sum) {
        const int set = MERGE_W ? sum / KERNEL_W : sum, column = (MERGE_W ? sum % KERNEL_W * TILES_C : 0) + eight;
#pragma unroll
        for (int tile = 0; tile < TILES_M; ++tile) {
#pragma unroll
            for (int i = 0; i < 4; ++i)
                to[i % 2 * CHANNEL + sum * SUM_ROWS + tile * 64 + i / 2 * 8] = acc.value[set][tile][column * 4 + i];
        }
    }
}

// Eight channels, of which `left` exist. Consecutive threads write consecutive positions.
template <bool WHOLE>
__device__ __forceinline__ void store_rows(Stored* out, const float* turned, const float* bias, const Target* targets,
                                           const Index (&offset)[TARGETS], int left, const Problem& p, bool alive) {
    constexpr int BATCH = TARGETS < 2 ? 1 : 2;
    const Index step = (Index)p.out_stride[1];
#pragma unroll
    for (int i = 0; i < TARGETS; i += BATCH) {
        float sums[BATCH][8];
#pragma unroll
        for (int j = 0; j < BATCH; ++j) {
            const int own = i + j < TARGETS ? i + j : i;
            const Target t = targets[threadIdx.x % TEAM_THREADS + own * TEAM_THREADS];
#pragma unroll
            for (int c = 0; c < 8; ++c) sums[j][c] = bias[c] + (alive ? sum_at(turned + c * CHANNEL, t) : 0.0f);
        }
#pragma unroll
        for (int j = 0; j < BATCH; ++j) {
            if (i + j >= TARGETS || offset[i + j < TARGETS ? i + j : i] == OUTSIDE) continue;
            Stored* to = out + offset[i + j < TARGETS ? i + j : i];
#pragma unroll
            for (int c = 0; c < 8; ++c) {
                if (WHOLE || c < left) narrow(sums[j][c], *to);
                to += step;
            }
        }
    }
}

// Channels-last results go straight from the registers: the four threads that share a row hold eight channels that follow each
// other. Of 16-bit numbers, sixteen fill a sector of memory: two tiles of channels are exchanged between the four.

// The set of accumulators of a block's phase, or -1.
__host__ __device__ constexpr int set_of(int phase_d, int phase_h, int phase_w) {
    for (int d = 0; d < LIVE_D; ++d)
        for (int h = 0; h < LIVE_H; ++h)
            for (int w = 0; w < LIVE; ++w)
                if ((!ALL_PHASES || (AxisD::phase_of(d) == phase_d && AxisH::phase_of(h) == phase_h)) &&
                    AxisW::phase_of(w) == phase_w)
                    return (d * LIVE_H + h) * LIVE + w;
    return -1;
}

// Two neighbouring channels of two rows and of all tiles of channels, with the bias.
struct TwoChannels {
    float value[TILES_C][2];
};

__device__ __forceinline__ void store_two(Stored* to, const TwoChannels& sums, int left, const Problem& p) {
    const Index step = (Index)p.out_stride[1];
    const int t = threadIdx.x % 4;
    if constexpr (sizeof(Stored) == 4 || !OUT_VECTOR) {
#pragma unroll
        for (int tile = 0; tile < TILES_C; ++tile) {
            const int channel = tile * 8 + 2 * t;
            Pack<Stored, 2> pair;
            narrow(sums.value[tile][0], pair.value[0]);
            narrow(sums.value[tile][1], pair.value[1]);
            if (OUT_VECTOR) {
                if (channel < left) *reinterpret_cast<Pack<Stored, 2>*>(to + channel) = pair;
            } else {
                if (channel < left) to[channel * step] = pair.value[0];
                if (channel + 1 < left) to[(channel + 1) * step] = pair.value[1];
            }
        }
    } else {
#pragma unroll
        for (int tile = 0; tile < TILES_C; tile += 2) {
            unsigned word[2];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                Pack<Stored, 2> pair;
                narrow(tile + i < TILES_C ? sums.value[(tile + i) % TILES_C][0] : 0.0f, pair.value[0]);
                narrow(tile + i < TILES_C ? sums.value[(tile + i) % TILES_C][1] : 0.0f, pair.value[1]);
                word[i] = bits_of(pair.value[0]) | bits_of(pair.value[1]) << 16;
            }
            // Threads 0 and 1 receive channels 0 to 3 and 4 to 7 of the first tile, 2 and 3 of the second.
            const int from = threadIdx.x % 32 / 4 * 4 + t % 2 * 2;
            const unsigned low[2] = {__shfl_sync(~0u, word[0], from), __shfl_sync(~0u, word[1], from)};
            const unsigned high[2] = {__shfl_sync(~0u, word[0], from + 1), __shfl_sync(~0u, word[1], from + 1)};
            const Pack<unsigned, 2> four = {{t < 2 ? low[0] : low[1], t < 2 ? high[0] : high[1]}};
            const int channel = tile * 8 + 4 * t;
            if (channel < left) *reinterpret_cast<Pack<unsigned, 2>*>(to + channel) = four;
        }
    }
}

__device__ __forceinline__ void store_channels(const Accumulators& acc, const float* bias, const int (&start)[TILES_M],
                                               int tiles, const Problem& p, const Staged& s, const Block& b, Stored* out,
                                               bool alive) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int left = min(TILE_C, (int)p.c_out - b.tile_c * TILE_C);
    const int pitch = p.patches[1] ? s.w : 8;
#pragma unroll
    for (int tile = 0; tile < TILES_M; ++tile) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int place = recomputed(start[tile]) + (warp % 4 * 2 + half) * pitch + lane / 4;
            const int row = (int)quotient(place, p.box_magic[2]), slice = (int)quotient(row, p.box_magic[1]);
            const int w = place - row * s.w, h = row - slice * s.h;
            const bool ours = warp / 4 % TEAM * TILES_M + tile < tiles && w < (int)p.box[2] && h < (int)p.box[1] &&
                              slice < (int)p.box[0];
#pragma unroll
            for (int phase = 0; phase < SET_PHASES; ++phase) {
                issue_in_order();
                const int phase_w = phase % STRIDE_W;
                const int phase_h = ALL_PHASES ? phase / STRIDE_W % PHASES_H : b.phase_h;
                const int phase_d = ALL_PHASES ? phase / STRIDE_W / PHASES_H : b.phase_d;
                const Index ow = (b.w + w + late(p.pad[2], STRIDE_W, phase_w)) * STRIDE_W + phase_w - (Index)p.pad[2];
                const Index oh = (b.h + h + (ALL_PHASES ? late(p.pad[1], STRIDE_H, phase_h) : 0)) * STRIDE_H + phase_h -
                                 (Index)p.pad[1];
                const Index od = (b.d + slice + (ALL_PHASES ? late(p.pad[0], STRIDE_D, phase_d) : 0)) * STRIDE_D +
                                 phase_d - (Index)p.pad[0];
                const bool inside = ours && within(od, p.out_extent[0]) && within(oh, p.out_extent[1]) &&
                                    within(ow, p.out_extent[2]);
                const int set = set_of(phase / STRIDE_W / PHASES_H, phase / STRIDE_W % PHASES_H, phase_w);
                TwoChannels sums;
#pragma unroll
                for (int c = 0; c < TILES_C; ++c) {
                    const Pack<float, 2> offset = *reinterpret_cast<const Pack<float, 2>*>(bias + c * 8 + lane % 4 * 2);
#pragma unroll
                    for (int i = 0; i < 2; ++i)
                        sums.value[c][i] = offset.value[i] + (set >= 0 && alive ? acc.value[set < 0 ? 0 : set][tile][(MERGE_W ? 0 : c) * 4 + half * 2 + i] : 0.0f);
                }
                store_two(out + od * (Index)p.out_stride[2] + oh * (Index)p.out_stride[3] + ow * (Index)p.out_stride[4],
                          sums, inside ? left : 0, p);
            }
        }
    }
}

// What a team of workers shares to store a box.
struct Turned {
    float bias[TILE_C];
#if !OUT_CHANNELS_LAST
    float sums[SLICES][SLICE];
#endif
};

__device__ __forceinline__ void store(const Accumulators& acc, Turned& turned, const Target* targets,
                                      const int (&start)[TILES_M], int tiles, const Problem& p, const Staged& s,
                                      const Block& b, const Stored* bias, Stored* out, bool alive) {
    const int thread = threadIdx.x % TEAM_THREADS, barrier = 2 + threadIdx.x / TEAM_THREADS;
    warps_sync(barrier, TEAM_THREADS);  // the box before is stored
    for (int c = thread; c < TILE_C; c += TEAM_THREADS) {
        const int channel = b.tile_c * TILE_C + c;
        const bool biased = bias && channel < p.c_out;
        turned.bias[c] = biased ? widen(bias[(b.group * p.c_out + channel) * p.bias_stride]) : 0.0f;
    }
    out += b.n * p.out_stride[0] + (b.group * p.c_out + b.tile_c * TILE_C) * p.out_stride[1];
#if OUT_CHANNELS_LAST
    warps_sync(barrier, TEAM_THREADS);
    store_channels(acc, turned.bias, start, tiles, p, s, b, out, alive);
#else
    const Index first_d = b.d * STRIDE_D + b.phase_d - (Index)p.pad[0], first_h = b.h * STRIDE_H + b.phase_h - (Index)p.pad[1];
    const Index first_w = b.w * STRIDE_W - (Index)p.pad[2];
    Index offset[TARGETS];
#pragma unroll
    for (int i = 0; i < TARGETS; ++i) {
        const Target t = targets[thread + i * TEAM_THREADS];
        const bool inside = t.w >= 0 && within(first_d + t.d, p.out_extent[0]) && within(first_h + t.h, p.out_extent[1]) &&
                            within(first_w + t.w, p.out_extent[2]);
        offset[i] = inside ? first_d * (Index)p.out_stride[2] + first_h * (Index)p.out_stride[3] +
                                 first_w * (Index)p.out_stride[4] + t.offset
                           : OUTSIDE;
    }
#pragma unroll
    for (int eight = 0; eight < TILES_C; ++eight) {
        float* const slice = turned.sums[eight % SLICES];
        if (SLICES == 1 && eight) warps_sync(barrier, TEAM_THREADS);
        if (alive) turn(slice, acc, eight);
        warps_sync(barrier, TEAM_THREADS);
        const int left = (int)p.c_out - b.tile_c * TILE_C - eight * 8;
        Stored* const to = out + eight * 8 * p.out_stride[1];
        if (left >= 8) {
            store_rows<true>(to, slice, turned.bias + eight * 8, targets, offset, 8, p, alive);
        } else {
            store_rows<false>(to, slice, turned.bias + eight * 8, targets, offset, left, p, alive);
        }
    }
#endif
}

// ---- the kernel ------------------------------------------------------------------------------------------------------

// A ring of places in shared memory, filled by some warps and used by others.
struct Ring {
    Barrier *full, *free;
    int place, round;

    __device__ __forceinline__ Ring(Barrier* barriers, int places)
        : full(barriers), free(barriers + places), place(0), round(0) {}
    // Another ring, as far as this one.
    __device__ __forceinline__ Ring of_team(int team) const {
        Ring ring = *this;
        ring.full += team * 2 * X_STAGES;
        ring.free += team * 2 * X_STAGES;
        return ring;
    }
    __device__ __forceinline__ void wait_until_free() const {
        if (round) barrier_wait(free + place, (round - 1) & 1);
    }
    __device__ __forceinline__ void wait_until_full() const { barrier_wait(full + place, round & 1); }
    template <int PLACES, bool STAYS = false> __device__ __forceinline__ void next() {
        if (++place == PLACES) place = 0, round += !STAYS;
    }
};

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
    __device__ __forceinline__ explicit Rows(const Block& b) : d(b.phase_d), h(b.phase_h) {}
    __device__ __forceinline__ int back_d() const { return AxisD::back(d.first); }
    __device__ __forceinline__ int back_h() const { return AxisH::back(h.first); }
#endif
    __device__ __forceinline__ int count() const { return d.count * h.count; }
};

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    phase_wgmma(const Stored* x, const Piece* packed, const Stored* bias, Stored* out, const Problem p) {
    extern __shared__ __align__(128) unsigned char shared_bytes[];
    const Staged s(p);
    Barrier* const barriers = reinterpret_cast<Barrier*>(shared_bytes);
    Piece* const slots = reinterpret_cast<Piece*>(shared_bytes + BARRIER_BYTES);
    Piece* const stages = slots + RING * SLOT;
    Turned* const turned = reinterpret_cast<Turned*>(stages + TEAMS * X_STAGES * PLANES * s.plane);
    Target* const targets = reinterpret_cast<Target*>(turned + TEAMS);
    Item* const items = reinterpret_cast<Item*>(targets + (OUT_CHANNELS_LAST ? 0 : TARGETS * TEAM_THREADS));

    Ring x_ring(barriers, X_STAGES), weight_ring(barriers + TEAMS * 2 * X_STAGES, RING);
    if (threadIdx.x == 0) {
        for (int i = 0; i < TEAMS * X_STAGES; ++i) {
            Barrier* const full = x_ring.of_team(i / X_STAGES).full + i % X_STAGES;
            barrier_init(full, STAGERS);
            barrier_init(full + X_STAGES, 4 * TEAM);
        }
        for (int i = 0; i < RING; ++i) {
            barrier_init(weight_ring.full + i, 1);
            barrier_init(weight_ring.free + i, 4 * WORKERS);
        }
        barrier_init_done();
    }
#if !OUT_CHANNELS_LAST
    if (threadIdx.x < TEAMS * SLICES * 8)
        turned[threadIdx.x / (SLICES * 8)].sums[threadIdx.x / 8 % SLICES][threadIdx.x % 8 * CHANNEL + ZERO] = 0;
    for (int i = threadIdx.x; i < TARGETS * TEAM_THREADS; i += THREADS) targets[i] = find_target(p, s, i);
#endif
    // Behind the box, rows of no use are read; they are nothing, once and for all.
    const int box_positions = s.d * s.h * s.w;
    for (int i = threadIdx.x; i < TEAMS * X_STAGES * PLANES * (s.plane - box_positions); i += THREADS)
        stages[i / (s.plane - box_positions) * s.plane + box_positions + i % (s.plane - box_positions)] = Piece{{0, 0, 0, 0}};
    publish_shared_writes();
    __syncthreads();

    const int chunks = ((int)p.c_in + CHUNK - 1) / CHUNK;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

    if (warp >= 4 * WORKERS) {
        give_registers<STAGER_REGISTERS>();
        const int thread = threadIdx.x - WORKER_THREADS - 32;
        if (thread < 0 && lane) return;
        int team = 0;
        for (unsigned index = blockIdx.x; index < (unsigned)p.blocks; index += gridDim.x) {
            const Block b = locate(index, p);
            const Rows rows(b);
            if (!rows.count()) continue;
            if (thread < 0) {
                const Piece* from =
                    packed + (b.group * p.tiles[3] + b.tile_c) * chunks * (KERNEL_D * KERNEL_H * (long long)SLOT);
                for (int chunk = 0; chunk < chunks; ++chunk) {
                    for (int row_d = 0; row_d < rows.d.count; ++row_d) {
                        for (int row_h = 0; row_h < rows.h.count; ++row_h) {
                            const int row = rows.d.tap(row_d) * KERNEL_H + rows.h.tap(row_h);
                            weight_ring.wait_until_free();
                            barrier_arrive_expecting(weight_ring.full + weight_ring.place, SLOT * sizeof(Piece));
                            copy_bulk(slots + weight_ring.place * SLOT, from + row * (long long)SLOT,
                                      SLOT * sizeof(Piece), weight_ring.full + weight_ring.place);
                            weight_ring.next<RING>();
                        }
                    }
                    from += KERNEL_D * KERNEL_H * (long long)SLOT;
                }
                if (RESIDENT) return;
                continue;
            }
            warps_sync(1, STAGERS);  // nobody reads the items of the box before
            find_items(items, p, s, b.d - rows.back_d() - REACH_D, b.h - rows.back_h() - REACH_H, b.w - REACH_W, thread);
            warps_sync(1, STAGERS);
            const Stored* from = x + b.n * p.x_stride[0] + b.group * p.c_in * p.x_stride[1];
            Ring ring = x_ring.of_team(team);
            for (int chunk = 0; chunk < chunks; ++chunk) {
                ring.wait_until_free();
                stage_x(stages + (team * X_STAGES + ring.place) * PLANES * s.plane, from, items, p, s,
                        (int)p.c_in - chunk * CHUNK, thread);
                publish_shared_writes();
                barrier_arrive(ring.full + ring.place);
                ring.next<X_STAGES>();
                from += CHUNK * p.x_stride[1];
            }
            if (++team == TEAMS) {  // all rings are as far as this one
                team = 0;
                x_ring.place = ring.place;
                x_ring.round = ring.round;
            }
        }
        return;
    }

    take_registers<WORKER_REGISTERS>();
    // Where a tile's first row lies. Tiles that the box does not fill repeat the last one.
    const int patches_h = (int)p.patches[0], patches_w = (int)p.patches[1];
    const int flat_rows = (((int)p.box[0] - 1) * s.h + (int)p.box[1] - 1) * s.w + (MERGE_W ? s.w : (int)p.box[2]);
    const int tiles = patches_w ? (int)p.box[0] * patches_h * patches_w : (flat_rows + 63) / 64;
    int start[TILES_M];
#pragma unroll
    for (int i = 0; i < TILES_M; ++i) {
        const int tile = min(warp / 4 % TEAM * TILES_M + i, tiles - 1);
        start[i] = patches_w ? (tile / patches_w / patches_h * s.h + tile / patches_w % patches_h * 8) * s.w +
                                   tile % patches_w * 8
                             : tile * 64;
    }
    const int team = warp / 4 / TEAM;
    x_ring = x_ring.of_team(team);
    const unsigned long long staged = describe(stages + team * X_STAGES * PLANES * s.plane, s.plane * 16, (patches_w ? s.w : 8) * 16);
    const unsigned long long weights = describe(slots, COLUMNS * 16, 128);

    for (unsigned index = blockIdx.x + team * gridDim.x; index < (unsigned)p.blocks; index += TEAMS * gridDim.x) {
        const Block b = locate(index, p);
        const Rows rows(b);
        const bool alive = rows.count();
        Accumulators acc;
#pragma unroll
        for (int set = 0; set < SETS; ++set)
#pragma unroll
            for (int tile = 0; tile < TILES_M; ++tile)
#pragma unroll
                for (int i = 0; i < COLUMNS / 2; ++i) acc.value[set][tile][i] = 0;

        if (alive) {
            int used_slot = -1, used_stage = -1;  // by the products that may be under way
            const auto release = [&] {
                if (!RESIDENT && lane == 0 && used_slot >= 0) barrier_arrive(weight_ring.free + used_slot);
                if (lane == 0 && used_stage >= 0) barrier_arrive(x_ring.free + used_stage);
                used_slot = used_stage = -1;
            };
            for (int chunk = 0; chunk < chunks; ++chunk) {
                x_ring.wait_until_full();
                const unsigned long long box = staged + x_ring.place * PLANES * s.plane;
                const auto multiply_row = [&](int set, int down, int across) {
                    weight_ring.wait_until_full();
                    multiply(acc, set * SETS_W, box + (down * recomputed(s.h) + across) * recomputed(s.w), weights + weight_ring.place * SLOT, start,
                             s.plane, p.pad[2]);
                    if (LAGS) release();
                    used_slot = weight_ring.place;
                    weight_ring.next<RING, RESIDENT>();
                    if (!LAGS) release();
                };
#if ALL_PHASES
#pragma unroll
                for (int tap_d = 0; tap_d < KERNEL_D; ++tap_d) {
#pragma unroll
                    for (int tap_h = 0; tap_h < KERNEL_H; ++tap_h) {
                        multiply_row(tap_d % AxisD::STEP * LIVE_H + tap_h % AxisH::STEP,
                                     REACH_D - AxisD::back(tap_d) + late(p.pad[0], STRIDE_D, AxisD::phase_of(tap_d)),
                                     REACH_H - AxisH::back(tap_h) + late(p.pad[1], STRIDE_H, AxisH::phase_of(tap_h)));
                    }
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
        store(acc, turned[team], targets, start, tiles, p, s, b, bias, out, alive);
    }
}

// Puts the weights of the call in the order of the slots, once, before the kernel above: [group][tile of output channels]
// [chunk][tap along D][tap along H] slots. Consecutive threads read consecutive weights.
extern "C" __global__ void phase_wgmma_pack(const Stored* weight, Piece* packed, const Problem p) {
    const int chunks = ((int)p.c_in + CHUNK - 1) / CHUNK;
    const long long count = p.groups * p.tiles[3] * chunks * (KERNEL_D * KERNEL_H * (long long)SLOT / PARTS);
    long long index = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (index >= count) return;
    const int tap_w = (int)(index % KERNEL_W);
    index /= KERNEL_W;
    const int tap_h = (int)(index % KERNEL_H);
    index /= KERNEL_H;
    const int tap_d = (int)(index % KERNEL_D);
    index /= KERNEL_D;
    const int column = (int)(index % TILE_C);
    index /= TILE_C;
    const int tile_c = (int)(index % p.tiles[3]);
    index /= p.tiles[3];
    const int piece = (int)(index % (2 * K_STEPS));
    index /= 2 * K_STEPS;
    const int chunk = (int)(index % chunks);
    const long long group = index / chunks;

    const int co = tile_c * TILE_C + column, first = chunk * CHUNK + piece * PIECE;
    weight += group * p.c_in * p.weight_stride[0] + co * p.weight_stride[1] + tap_d * p.weight_stride[2] +
              tap_h * p.weight_stride[3] + tap_w * p.weight_stride[4];
    Channels c;
#pragma unroll
    for (int i = 0; i < PIECE; ++i) {
        zero(c.value[i]);
        if (co < p.c_out && first + i < p.c_in) c.value[i] = weight[(first + i) * p.weight_stride[0]];
    }
    Piece parts[PARTS];
    pack(c, parts);
    const long long row = (((group * p.tiles[3] + tile_c) * chunks + chunk) * KERNEL_D + tap_d) * KERNEL_H + tap_h;
    const int tap = MERGE_W ? 0 : tap_w, at = MERGE_W ? tap_w * TILE_C + column : column;
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
        packed[row * SLOT + ((tap * K_STEPS + piece / 2) * PARTS + part) * OPERAND + piece % 2 * COLUMNS + at] =
            parts[part];
    }
}
