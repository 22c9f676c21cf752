// What the kernels for Hopper's tensor cores share: the macros of a tile, pieces of channels, rings of places in shared memory,
// where the rows of A lie in a staged box, and how stages that asynchronous copies fill are handed over.
#pragma once

#include "pieces.cuh"

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
#ifndef SLIDES  // whether a block walks along D, one slice of x after the other (see phase_wgmma.cu)
#define SLIDES 0
#endif
#ifndef K_STEPS  // pairs of pieces of input channels staged at a time
#define K_STEPS 1
#endif
#ifndef BOXED  // whether bulk tensor copies bring x
#define BOXED 0
#endif
#ifndef SPLIT_BY_WORKERS  // whether workers split for 3xTF32 what they read, or other threads what lies in shared memory
#define SPLIT_BY_WORKERS 0
#endif
#ifndef WHOLE_H  // whether a box has all rows that taps along H read, and these are of one class
#define WHOLE_H 0
#endif
#ifndef JOIN_H  // whether these rows are one longer row, where the kernel is the stride along H
#define JOIN_H 0
#endif
#ifndef APART_D  // whether each tap along an axis has boxes of its own, without a halo
#define APART_D 0
#define APART_H 0
#define APART_W 0
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
#ifndef OUT_RUN  // so many outputs along W, which a thread holds, are written at a time; if it is 1, results are turned
#define OUT_RUN 1
#endif
#define OUT_TURNED (!OUT_CHANNELS_LAST && OUT_RUN == 1)
#ifndef MIN_BLOCKS
#define MIN_BLOCKS 2
#endif
#ifndef STORE_ALONE  // whether workers that share a box each store their own rows
#define STORE_ALONE 0
#endif
#ifndef WORKER_REGISTERS  // of a thread, after the stagers gave up what they do not need
#define WORKER_REGISTERS 200
#define STAGER_REGISTERS 56
#endif

typedef Axis<KERNEL_D, STRIDE_D, DILATION_D, APART_D> AxisD;
#if JOIN_H
constexpr int STEP_H = 1;
typedef Axis<KERNEL_H, 1, 1> AxisH;
#elif WHOLE_H
constexpr int STEP_H = KERNEL_H > 1 ? STRIDE_H / gcd(STRIDE_H, DILATION_H) : 1;  // rows from a position to the next one
typedef Axis<KERNEL_H, 1, (KERNEL_H > 1 ? DILATION_H * STEP_H / STRIDE_H : 1)> AxisH;
#else
constexpr int STEP_H = 1;
typedef Axis<KERNEL_H, STRIDE_H, DILATION_H, APART_H> AxisH;
#endif
typedef Axis<KERNEL_W, STRIDE_W, DILATION_W, APART_W> AxisW;

constexpr int WORKER_THREADS = 128 * WORKERS;
constexpr int THREADS = WORKER_THREADS + 128 * STAGER_GROUPS;
constexpr int TEAM = TAKE_TURNS ? 1 : WORKERS;  // warpgroups that share a box
constexpr int TEAM_THREADS = 128 * TEAM;
// Where each stores alone, workers wait for each other at stages and slots only, and one stores while another multiplies.
constexpr bool ALONE = STORE_ALONE && TEAM > 1;
constexpr int STORERS = ALONE ? 128 : TEAM_THREADS;  // threads that store together
constexpr int STORES = WORKER_THREADS / STORERS;     // of a block: so many groups of them
constexpr int TEAMS = WORKERS / TEAM;
constexpr int STAGERS = 128 * STAGER_GROUPS - 32;  // threads that stage x

constexpr int TILE_C = 8 * TILES_C;
constexpr int ROWS = 64 * TILES_M * TEAM;  // positions of a box, those of no use included
constexpr int STORED_ROWS = ALONE ? 64 * TILES_M : ROWS;  // of those that are stored together
constexpr int PLANES = PARTS * K_STEPS * 2;  // of a stage: [part][piece]
static_assert(!TAKE_TURNS || RESIDENT, "weights that pass by are for all workers");
static_assert(!(STORE_ALONE && MERGE_W), "a position's sums may be another worker's");
static_assert(!(MERGE_W && OUT_CHANNELS_LAST), "sums of taps are shifted where they are turned");
static_assert(!OUT_CHANNELS_LAST || OUT_RUN == 1, "a run is of one channel");

// Boxes that copies bring are multiplied as they come, or threads split them first.
constexpr bool SPLITS = BOXED && PARTS == 2 && !SPLIT_BY_WORKERS;
constexpr int BARRIERS = 2 * (TEAMS * X_STAGES + RING) + (SPLITS ? TEAMS * X_STAGES : 0);
constexpr int BARRIER_BYTES = round_up(8 * BARRIERS, 128);

constexpr Index OUTSIDE = (Index)(INDEX64 ? 1ll << 46 : -(1ll << 31));  // an offset that no element has

// ---- the box in shared memory ----------------------------------------------------------------------------------------

// Extents with the halo, and the positions of a plane, what is read beyond the box included.
struct Staged {
    int d, h, w, plane;
};

// Which row of A an output position of the box is.
__device__ __forceinline__ int row_of(const Problem& p, const Staged& s, int d, int h, int w) {
    const int patches_h = (int)p.patches[0], patches_w = (int)p.patches[1];
    if (!patches_w) return (d * s.h + h) * s.w + w;
    return ((d * patches_h + h / 8) * patches_w + w / 8) * 64 + h % 8 * 8 + w % 8;
}

// The position that a row of A is, if it is of the box; where a worker stores its own rows.
struct Position {
    int d, h, w;
    bool there;
};

__device__ __forceinline__ Position position_of(const Problem& p, const Staged& s, int row) {
    const int patches_h = (int)p.patches[0], patches_w = (int)p.patches[1];
    int d, h, w;
    if (patches_w) {
        const int down = row / 64 / patches_w;
        d = down / patches_h, h = (down - d * patches_h) * 8 + row % 64 / 8;
        w = (row / 64 - down * patches_w) * 8 + row % 8;
    } else {
        const int line = (int)quotient(row, p.box_magic[2]);
        d = (int)quotient(line, p.box_magic[3]), h = line - d * s.h, w = row - line * s.w;
    }
    return {d, h, w, d < (SLIDES ? 1 : (int)p.box[0]) && h < (int)p.box[1] && w < (int)p.box[2]};
}

// Positions along D of what is in shared memory at a time.
__device__ __forceinline__ int depth(const Problem& p) { return SLIDES ? 1 : (int)p.box[0]; }

// How many tiles of 64 rows a box fills; `width` is what its last row of positions counts.
__device__ __forceinline__ int tiles_of(const Problem& p, const Staged& s, int width) {
    const int patches_h = (int)p.patches[0], patches_w = (int)p.patches[1];
    const int flat_rows = ((depth(p) - 1) * s.h + (int)p.box[1] - 1) * s.w + width;
    return patches_w ? depth(p) * patches_h * patches_w : (flat_rows + 63) / 64;
}

// How many of a worker's tiles the box fills; of a small one, some workers have nothing to multiply.
__device__ __forceinline__ int tiles_of_worker(int tiles) {
    return min(TILES_M, max(0, tiles - (int)of_warp(threadIdx.x / 128 % TEAM) * TILES_M));
}

// Where the first row of each of a worker's tiles lies. Tiles that the box does not fill repeat the last one.
__device__ __forceinline__ void find_starts(int (&start)[TILES_M], const Problem& p, const Staged& s, int tiles) {
    const int patches_h = (int)p.patches[0], patches_w = (int)p.patches[1];
#pragma unroll
    for (int i = 0; i < TILES_M; ++i) {
        const int tile = min((int)of_warp(threadIdx.x / 128 % TEAM) * TILES_M + i, tiles - 1);
        start[i] = patches_w ? (tile / patches_w / patches_h * s.h + tile / patches_w % patches_h * 8) * s.w +
                                   tile % patches_w * 8
                             : tile * 64;
    }
}

// ---- stages and slots --------------------------------------------------------------------------------------------------

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

// The team whose box is next. After the last team's, the rings of all are as far as its own.
__device__ __forceinline__ int next_team(int team, Ring& x_ring, const Ring& ring) {
    if (++team < TEAMS) return team;
    x_ring.place = ring.place;
    x_ring.round = ring.round;
    return 0;
}

// The threads that split boxes which have landed: all stagers but the warp that names the boxes. So many fill a stage.
constexpr int SPLITTERS = STAGERS - 32;
constexpr int FILLERS = SPLITS ? SPLITTERS : BOXED ? 1 : STAGERS;

// By one thread, before the block's barrier. So many threads of a team say that they are done with a stage: one of each warp, or
// all, if these have read it themselves. Behind the rings are the barriers at which boxes land that are split.
__device__ __forceinline__ void init_barriers(const Ring& x_ring, const Ring& weight_ring, int readers = 4 * TEAM) {
    for (int i = 0; i < (SPLITS ? TEAMS * X_STAGES : 0); ++i) barrier_init(weight_ring.free + RING + i, 1);
    for (int i = 0; i < TEAMS * X_STAGES; ++i) {
        Barrier* const full = x_ring.of_team(i / X_STAGES).full + i % X_STAGES;
        barrier_init(full, FILLERS);
        barrier_init(full + X_STAGES, readers);
    }
    for (int i = 0; i < RING; ++i) {
        barrier_init(weight_ring.full + i, 1);
        barrier_init(weight_ring.free + i, 4 * WORKERS);
    }
    barrier_init_done();
}

// Pieces from the slots, which are so many and have so many bytes before them, to the stages: where copies bring these, a swizzle
// begins at a multiple of 1024 bytes.
__host__ __device__ constexpr int pieces_to_stages(int before, int slots) {
    return BOXED ? (round_up(before + slots * 16, 1024) - before) / 16 : slots;
}

// The rows of A in a team's stages, with so many positions from eight of them to the next; ROW_BYTES of a position that copies
// bring.
template <int ROW_BYTES> __device__ __forceinline__ Operand describe_stages(const Piece* stages, int plane, int eight) {
    if constexpr (BOXED) return describe_rows<ROW_BYTES>(stages, eight);
    else return describe(stages, plane * 16, eight * 16);
}

// ---- boxes of x that are split -----------------------------------------------------------------------------------------

// By those that split: so many pieces, each where it is. Their swizzle does not matter, as the low parts have the same.
__device__ __forceinline__ void split_box(Piece* high, Piece* low, int pieces, int thread) {
    constexpr int BATCH = 2;  // that a thread reads before it writes the first
    for (int first = thread; first < pieces; first += BATCH * SPLITTERS) {
        Channels raw[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; ++i)
            if (first + i * SPLITTERS < pieces) raw[i] = *reinterpret_cast<const Channels*>(high + first + i * SPLITTERS);
        issue_in_order();
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            if (first + i * SPLITTERS >= pieces) continue;
            Piece parts[PARTS];
            pack(raw[i], parts);
            high[first + i * SPLITTERS] = parts[0];
            low[first + i * SPLITTERS] = parts[PARTS - 1];
        }
    }
}

// ---- asynchronous copies of channels-last x --------------------------------------------------------------------------

// Rounds or splits what the thread itself has copied, once it is there: the kernel's own, as it knows what that is.
__device__ __forceinline__ void convert_x(Piece* to, int count, int plane, int thread);

// Stages whose copies are under way, by number, a byte each, the oldest in the highest. There may be so many that of all stages
// two are left, one that is used and one that waits.
constexpr int AHEAD = X_STAGES - 2;
struct UnderWay {
    unsigned stages;
    int count;
};

template <int LATER>
__device__ __forceinline__ void hand_over(UnderWay& under_way, Piece* stages, Barrier* full, int count, int plane, int thread) {
    const int stage = (int)(under_way.stages >> 8 * --under_way.count & 255);
    copy_async_wait<LATER>();
    convert_x(stages + stage * PLANES * plane, count, plane, thread);
    publish_shared_writes();
    barrier_arrive(full + stage / X_STAGES * 2 * X_STAGES + stage % X_STAGES);
}
