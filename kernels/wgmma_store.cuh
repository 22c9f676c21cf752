// How the kernels for Hopper's tensor cores store a box. Rows of positions are turned in shared memory, eight channels at a time:
// [8 channels][sum][row of A], then a zero. Whoever includes this has said what the sums are:
//
//     COLUMNS, SETS   columns of a wgmma, and sets of accumulators
//     SUMS            sums of a row that are turned; set_of and column_of tell where the first channel of each is
//     SUM_ROWS        how far apart they are: STORED_ROWS, or a little more
//     MOST_TAPS       of these, added for a position; each next one lies NEXT_TAP further
//     SET_OUTPUTS     positions of the result to a position of the box
#pragma once

#include "wgmma_box.cuh"

#include "channels_last_store.cuh"

struct Accumulators {
    float value[SETS][TILES_M][COLUMNS / 2];
};

constexpr int ZERO = SUMS * SUM_ROWS;
constexpr int CHANNEL = at_residue(ZERO + 1, 4, 32);
constexpr int SLICE = 8 * CHANNEL;
constexpr int SLICES = TILES_C == 1 ? 1 : 2;  // alternate
constexpr int TARGETS = ceil_div(STORED_ROWS * SET_OUTPUTS, STORERS);  // of a thread
constexpr int ALL_TARGETS = TARGETS * (ALONE ? WORKER_THREADS : TEAM_THREADS);

// A position of the result within a box, of all channels: where it goes and where its sum lies, of as many taps. All boxes
// have the same ones.
struct Target {
    Index offset;     // from the box's first output
    short d, h;       // likewise
    int w, from, taps;
};

// Those of the workers that store together, by their number: of workers that store alone each has its own.
__device__ __forceinline__ const Target* targets_of(const Target* targets, int storing) {
    return targets + (ALONE ? storing * TARGETS * STORERS : 0);
}

// One channel of a target; `turned` is the channel's.
__device__ __forceinline__ float sum_at(const float* turned, const Target& t) {
    float sum = turned[t.from];
#pragma unroll
    for (int tap = 1; tap < MOST_TAPS; ++tap)
        if (tap < t.taps) sum += turned[t.from + tap * NEXT_TAP];
    return sum;
}

// Turns eight channels of the sums: of each phase or tap, rows side by side.
__device__ __forceinline__ void turn(float* turned, const Accumulators& acc, int eight) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int worker = ALONE ? 0 : warp / 4 % TEAM;
    float* const to = turned + lane % 4 * 2 * CHANNEL + worker * TILES_M * 64 + warp % 4 * 16 + lane / 4;
#pragma unroll
    for (int sum = 0; sum < SUMS; ++sum) {
        const int set = set_of(sum), first = column_of(sum) / 2 + eight * 4;
#pragma unroll
        for (int tile = 0; tile < TILES_M; ++tile) {
#pragma unroll
            for (int i = 0; i < 4; ++i)
                to[i % 2 * CHANNEL + sum * SUM_ROWS + tile * 64 + i / 2 * 8] = acc.value[set][tile][first + i];
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
            const Target t = targets[threadIdx.x % STORERS + own * STORERS];
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

// The same of two positions that follow each other, by one store.
template <bool WHOLE, int COUNT>
__device__ __forceinline__ void store_pairs(Stored* out, const float* turned, const float* bias, const Target* targets,
                                            const Index (&offset)[COUNT], int left, const Problem& p) {
    static_assert(COUNT > 0 && MOST_TAPS == 1, "sums of several taps are those of single positions");
    const Index step = (Index)p.out_stride[1];
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        if (offset[i] == OUTSIDE) continue;
        const float* const from = turned + targets[threadIdx.x % STORERS + i * STORERS].from;
        Stored* to = out + offset[i];
#pragma unroll
        for (int c = 0; c < 8; ++c) {
            Pack<float, 2> two = *reinterpret_cast<const Pack<float, 2>*>(from + c * CHANNEL);
#pragma unroll
            for (int j = 0; j < 2; ++j) two.value[j] += bias[c];
            if (WHOLE || c < left) store_vector(two, to);
            to += step;
        }
    }
}

// What workers share that store together.
struct Turned {
    float bias[TILE_C];
#if OUT_TURNED
    float sums[SLICES][SLICE];
#endif
};

// The bias of the tile's channels, for all who store together, once they have passed the barrier here and the next one.
__device__ __forceinline__ void bring_bias(Turned& turned, const Stored* bias, const Problem& p, int tile_c, long long group) {
    warps_sync(2 + threadIdx.x / STORERS, STORERS);  // the box before is stored
    for (int c = threadIdx.x % STORERS; c < TILE_C; c += STORERS) {
        const int channel = tile_c * TILE_C + c;
        const bool biased = bias && channel < p.c_out;
        turned.bias[c] = biased ? widen(bias[(group * p.c_out + channel) * p.bias_stride]) : 0.0f;
    }
}

#if OUT_TURNED
// Stores the box whose first output is at d, h, w; `out` is its address in the first channel of the tile, of whose `channels`
// exist. A target is one position or, of an even one and the next, a PAIR.
template <bool PAIR = false>
__device__ __forceinline__ void store_turned(const Accumulators& acc, Turned& turned, const Target* targets, Index d, Index h,
                                             Index w, int channels, const Problem& p, Stored* out, bool alive) {
    const int thread = threadIdx.x % STORERS, barrier = 2 + threadIdx.x / STORERS;
    constexpr int COUNT = PAIR ? ceil_div(TARGETS, 2) : TARGETS;
    Index offset[COUNT];
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        const Target t = targets[thread + i * STORERS];
        const bool inside = t.w >= 0 && within(d + t.d, p.out_extent[0]) && within(h + t.h, p.out_extent[1]) &&
                            within(w + t.w, p.out_extent[2]);
        offset[i] = inside ? t.offset : OUTSIDE;
    }
#pragma unroll
    for (int eight = 0; eight < TILES_C; ++eight) {
        float* const slice = turned.sums[eight % SLICES];
        if (SLICES == 1 && eight) warps_sync(barrier, STORERS);
        if (alive) turn(slice, acc, eight);
        warps_sync(barrier, STORERS);
        const int left = channels - eight * 8;
        Stored* const to = out + eight * 8 * p.out_stride[1];
        if constexpr (PAIR) {
            if (left >= 8) store_pairs<true>(to, slice, turned.bias + eight * 8, targets, offset, 8, p);
            else store_pairs<false>(to, slice, turned.bias + eight * 8, targets, offset, left, p);
        } else if (left >= 8) {
            store_rows<true>(to, slice, turned.bias + eight * 8, targets, offset, 8, p, alive);
        } else {
            store_rows<false>(to, slice, turned.bias + eight * 8, targets, offset, left, p, alive);
        }
    }
}
#endif
