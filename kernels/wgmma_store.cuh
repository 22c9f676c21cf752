// How the kernels for Hopper's tensor cores store a box. Rows of positions are turned in shared memory, some channels at a time:
// [channel][sum][row of A], then what outputs without a tap have. Whoever includes this has said what the sums are:
//
//     COLUMNS, SETS   columns of a wgmma, and sets of accumulators
//     SUMS            sums of a row that are turned; set_of and column_of tell where the first channel of each is
//     SUM_ROWS        how far apart they are: STORED_ROWS, or a little more
//     MOST_TAPS       of these, added for a position; each next one lies NEXT_TAP further
//     SET_OUTPUTS     positions of the result to a position of the box
//
// Where each sum is a result of 16 bits, they are turned as such (AS_RESULTS), by `stmatrix`, twice as many channels at a time, and a
// thread stores `p.together` of them that follow each other: 16 bytes, a word or one.
#pragma once

#include "wgmma_box.cuh"

#include "channels_last_store.cuh"

struct Accumulators {
    float value[SETS][TILES_M][COLUMNS / 2];
};

constexpr bool AS_RESULTS = sizeof(Stored) == 2 && !MERGE_W && SET_OUTPUTS == 1;
static_assert(!AS_RESULTS || SUMS == 1, "a position's only sum");
template <bool> struct TurnedAs {
    typedef float Type;
};
template <> struct TurnedAs<true> {
    typedef Stored Type;
};
typedef TurnedAs<AS_RESULTS>::Type Turnable;

constexpr int AT_ONCE = AS_RESULTS ? 16 : 8;  // channels that are turned
constexpr int ZERO = SUMS * SUM_ROWS;
constexpr int CHANNEL = AS_RESULTS ? 2 * SUM_ROWS + PIECE : at_residue(ZERO + 1, 4, 32);  // rows of eight lie in different banks
constexpr int SLICE = 8 * CHANNEL;  // of sixteen, the other eight lie beside the first ones
constexpr int SLICES = TILES_C == 1 ? 1 : 2;  // alternate
constexpr int TARGETS = ceil_div(STORED_ROWS * SET_OUTPUTS, STORERS);  // of a thread
constexpr int ALL_TARGETS = TARGETS * (ALONE ? WORKER_THREADS : TEAM_THREADS);

// A position of the result within a box, of all channels, or the first of those that are stored together: where it goes and where
// its sum lies, of as many taps. All boxes have the same ones.
struct Target {
    Index offset;     // from the box's first output
    short d, h;       // likewise
    int w, from, taps;
};

// Those of the workers that store together, by their number: of workers that store alone each has its own.
__device__ __forceinline__ const Target* targets_of(const Target* targets, int storing) {
    return targets + (ALONE ? storing * TARGETS * STORERS : 0);
}

// What workers share that store together.
struct Turned {
    float bias[TILE_C];
#if OUT_TURNED
    alignas(16) Turnable sums[SLICES][SLICE];
#endif
};

// Before the first box, by all threads.
__device__ __forceinline__ void clear_zeros(Turned* turned) {
#if OUT_TURNED
    if (!AS_RESULTS && threadIdx.x < STORES * SLICES * 8)
        zero(turned[threadIdx.x / (SLICES * 8)].sums[threadIdx.x / 8 % SLICES][threadIdx.x % 8 * CHANNEL + ZERO]);
#endif
}

// The bias of the tile's channels, for all who store together, once they have passed the barrier here and the next one.
__device__ __forceinline__ void bring_bias(Turned& turned, const Stored* bias, const Problem& p, int tile_c, long long group) {
    warps_sync(2 + threadIdx.x / STORERS, STORERS);  // the box before is stored
    for (int c = threadIdx.x % STORERS; c < TILE_C; c += STORERS) {
        const int channel = tile_c * TILE_C + c;
        const bool biased = bias && channel < p.c_out;
        turned.bias[c] = biased ? widen(bias[(group * p.c_out + channel) * p.bias_stride]) : 0.0f;
    }
}

// Which row of A is a target of a worker that stores alone. Pieces of 16 bytes that follow each other in memory, in neighbouring
// patches, are stored by neighbouring threads.
__device__ __forceinline__ int row_of_target(const Problem& p, int target) {
    if (p.together < PIECE || !p.patches[1]) return target * (int)p.together;
    return (target % TILES_M * 8 + target / TILES_M) * 8;
}

#if OUT_TURNED
// ---- sums, eight channels at a time ------------------------------------------------------------------------------------

// One channel of a target; `turned` is the channel's.
__device__ __forceinline__ float sum_at(const float* turned, const Target& t) {
    float sum = turned[t.from];
#pragma unroll
    for (int tap = 1; tap < MOST_TAPS; ++tap)
        if (tap < t.taps) sum += turned[t.from + tap * NEXT_TAP];
    return sum;
}

// Turns eight channels of the sums: of each phase or tap, rows side by side.
__device__ __forceinline__ void turn_sums(float* turned, const Accumulators& acc, int eight) {
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
__device__ __forceinline__ void store_sums(Stored* out, const float* turned, const float* bias, const Target* targets,
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

// ---- results of 16 bits, sixteen channels at a time ----------------------------------------------------------------------

// Where a channel's rows begin in a slice.
__device__ __forceinline__ int place_of(int channel) { return channel % 8 * CHANNEL + channel / 8 * SUM_ROWS; }

// Turns one or two eights of channels, rows side by side, with the bias of the first one's and those behind.
template <int EIGHTS>
__device__ __forceinline__ void turn_results(Stored* turned, const Accumulators& acc, const float* bias, int eight, bool alive) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int worker = ALONE ? 0 : warp / 4 % TEAM;
    Stored* const to = turned + place_of(lane / 16 % EIGHTS * 8 + lane % 8) + worker * TILES_M * 64 + warp % 4 * 16 + lane / 8 % 2 * 8;
    Pack<float, 2> offset[EIGHTS];
#pragma unroll
    for (int e = 0; e < EIGHTS; ++e) offset[e] = *reinterpret_cast<const Pack<float, 2>*>(bias + e * 8 + lane % 4 * 2);
#pragma unroll
    for (int tile = 0; tile < TILES_M; ++tile) {
        unsigned words[2 * EIGHTS];  // two channels of a row, or of the eighth row below it
#pragma unroll
        for (int i = 0; i < 2 * EIGHTS; ++i) {
            const float* const sums = acc.value[set_of(0)][tile] + column_of(0) / 2 + (eight + i / 2) * 4 + i % 2 * 2;
            const float(&own)[2] = offset[i / 2].value;
            words[i] = narrow_two<Stored>(own[0] + (alive ? sums[0] : 0.0f), own[1] + (alive ? sums[1] : 0.0f));
        }
        store_matrices_transposed(to + tile * 64, words);
    }
}

// Of the targets so many outputs each; neighbouring threads have neighbouring ones, and a thread all channels of its own.
template <int TOGETHER, int CHANNELS, int COUNT>
__device__ __forceinline__ void store_results(Stored* out, const Stored* turned, const Target* targets,
                                              const Index (&offset)[COUNT], int left, const Problem& p) {
    typedef Pack<Stored, TOGETHER> Results;
    const Index step = (Index)p.out_stride[1];
#pragma unroll
    for (int i = 0; i < ceil_div(TARGETS, TOGETHER); ++i) {
        if (offset[i] == OUTSIDE) continue;
        const Stored* const from = turned + targets[threadIdx.x % STORERS + i * STORERS].from;
        Stored* to = out + offset[i];
        Results results[CHANNELS];
#pragma unroll
        for (int c = 0; c < CHANNELS; ++c) results[c] = *reinterpret_cast<const Results*>(from + place_of(c));
#pragma unroll
        for (int c = 0; c < CHANNELS; ++c) {
            if (c < left) *reinterpret_cast<Results*>(to) = results[c];
            to += step;
        }
    }
}

// The same where a target is 16 bytes: so many threads share a channel, and each has some of the channels.
constexpr int PIECES_A_CHANNEL = STORED_ROWS / PIECE, PIECES_A_THREAD = ceil_div(PIECES_A_CHANNEL * AT_ONCE, STORERS);
constexpr int PLACES = STORERS % PIECES_A_CHANNEL ? PIECES_A_THREAD : 1;  // that a thread's pieces have in their channels

__device__ __forceinline__ int piece_of(int i) { return (threadIdx.x % STORERS + i * STORERS) % PIECES_A_CHANNEL; }

template <int COUNT>
__device__ __forceinline__ void store_pieces(Stored* out, const Stored* turned, const Target* targets, const Index (&offset)[COUNT],
                                             int left, const Problem& p) {
#pragma unroll
    for (int i = 0; i < PIECES_A_THREAD; ++i) {
        const int c = (threadIdx.x % STORERS + i * STORERS) / PIECES_A_CHANNEL;
        if (offset[i % PLACES] == OUTSIDE || c >= left) continue;
        const Piece piece = *reinterpret_cast<const Piece*>(turned + place_of(c) + targets[piece_of(i)].from);
        store_words(out + (offset[i % PLACES] + c * (Index)p.out_stride[1]), piece.value);
    }
}

// ---- a box -------------------------------------------------------------------------------------------------------------

// Stores some eights of channels, of which `left` exist; `out` is the address of the first output, `slice` where they are turned.
template <int EIGHTS, class T, int COUNT>
__device__ __forceinline__ void store_eights(const Accumulators& acc, T* slice, const float* bias, const Target* targets,
                                             const Index (&offset)[COUNT], int eight, int left, const Problem& p, Stored* out,
                                             bool alive) {
    const int barrier = 2 + threadIdx.x / STORERS;
    if constexpr (AS_RESULTS) {
        turn_results<EIGHTS>(slice, acc, bias, eight, alive);
        warps_sync(barrier, STORERS);
        if (p.together == PIECE) store_pieces(out, slice, targets, offset, min(left, 8 * EIGHTS), p);
        else if (p.together == 2) store_results<2, 8 * EIGHTS>(out, slice, targets, offset, left, p);
        else store_results<1, 8 * EIGHTS>(out, slice, targets, offset, left, p);
    } else {
        if (alive) turn_sums(slice, acc, eight);
        warps_sync(barrier, STORERS);
        if (left >= 8) store_sums<true>(out, slice, bias, targets, offset, 8, p, alive);
        else store_sums<false>(out, slice, bias, targets, offset, left, p, alive);
    }
}

// Stores the box whose first output is at d, h, w; `out` is its address in the first channel of the tile, of whose `channels`
// exist.
__device__ __forceinline__ void store_turned(const Accumulators& acc, Turned& turned, const Target* targets, Index d, Index h,
                                             Index w, int channels, const Problem& p, Stored* out, bool alive) {
    constexpr int COUNT = AS_RESULTS && PLACES > TARGETS ? PLACES : TARGETS, LAST = AT_ONCE / 8 - (-TILES_C & (AT_ONCE / 8 - 1));
    Index offset[COUNT];
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        const bool is_piece = AS_RESULTS && p.together == PIECE;
        const Target t = targets[is_piece ? piece_of(i) : threadIdx.x % STORERS + min(i, TARGETS - 1) * STORERS];
        const bool inside = t.w >= 0 && within(d + t.d, p.out_extent[0]) && within(h + t.h, p.out_extent[1]) &&
                            within(w + t.w, p.out_extent[2]);
        offset[i] = inside ? t.offset : OUTSIDE;
    }
    if (AS_RESULTS) warps_sync(2 + threadIdx.x / STORERS, STORERS);  // the bias is there
#pragma unroll
    for (int first = 0; first < TILE_C; first += AT_ONCE) {
        Turnable* const slice = turned.sums[first / AT_ONCE % SLICES];
        const float* const bias = turned.bias + first;
        Stored* const to = out + first * p.out_stride[1];
        if (first + AT_ONCE <= TILE_C)
            store_eights<AT_ONCE / 8>(acc, slice, bias, targets, offset, first / 8, channels - first, p, to, alive);
        else store_eights<LAST>(acc, slice, bias, targets, offset, first / 8, channels - first, p, to, alive);
    }
}
#endif
