// Correlate with kernel = stride on Hopper's tensor cores (sm_90a): float16, bfloat16 and float32 (as TF32 or 3xTF32).
//
//     out[n, co, i] = bias[co] + sum over ci, k of  x[n, ci, i*kernel + k - pad] * weight[ci, co, k]
//
// The adjoint of `disjoint.cu`: each element of x is read by one position alone. One matrix product without a halo, M =
// positions, N = output channels, K = input channels x taps, bound by how fast memory brings x. So nothing is staged but the
// weights that a block needs, once; a thread loads x to where a wgmma takes A from: registers.
//
// Of RUN positions that follow each other a thread has one row of A each, with g = lane / 4 and t = lane % 4 rows g and g + 8 of
// its warp's in one tile after the other. What these read of a channel along W are RUN * KERNEL_W elements that follow each
// other, 16 bytes for example: one load. A word of them (one element, or two of 16 bits, so taps along W) is word t or t + 4 of
// a step along K, and no other instruction is needed but rounding to TF32. Eight threads read 128 bytes of a row.
//
// Of channels-last x a thread loads 16 bytes of channels for each position and tap along W; these serve two steps.
//
// K is cut into units: a tap along D, one along H, and CHUNK channels with all taps along W. Each next unit is loaded, also if it
// is the next tile's first one, before the present one is multiplied, so that memory is never asked for too little.
//
// Compile-time: kernel, dtype, precision, tile. Run-time: N, extents, padding, channels.
#ifndef KERNEL_D  // and stride
#define KERNEL_D 2
#define KERNEL_H 2
#define KERNEL_W 2
#endif
#include "pieces.cuh"

#ifndef WORKERS  // warpgroups
#define WORKERS 2
#endif
#ifndef TILES_M  // times 64 positions a worker takes at a time
#define TILES_M 1
#endif
#ifndef TILES_C  // times 8 output channels
#define TILES_C 8
#endif
#ifndef CHUNK  // input channels of a unit: rows, a multiple of 8; channels-last, of 64 bytes
#define CHUNK 32
#endif
#ifndef RUN  // positions that follow each other, of a thread
#define RUN 2
#endif
#ifndef X_CHANNELS_LAST
#define X_CHANNELS_LAST 0
#endif
#ifndef OUT_CHANNELS_LAST
#define OUT_CHANNELS_LAST 0
#endif
#ifndef MIN_BLOCKS
#define MIN_BLOCKS 1
#endif

constexpr int THREADS = 128 * WORKERS;
constexpr int TILE_C = 8 * TILES_C;
constexpr int COLUMNS = TILE_C;  // of a wgmma
constexpr int OPERAND = 2 * COLUMNS;
constexpr int OUTPUTS_W = 1;
constexpr int TAPS = KERNEL_D * KERNEL_H;

// Words that a thread has of a position and unit. Of rows, a position's along W in each fourth channel; channels-last, four
// at a time of each fourth piece, for each tap along W.
constexpr int ELEMENTS = 4 / (int)sizeof(Stored);  // of a word
constexpr int WORDS_W = KERNEL_W / ELEMENTS;       // of a position and channel
constexpr int WORDS = X_CHANNELS_LAST ? KERNEL_W * (CHUNK / ELEMENTS / 4) : CHUNK / 4 * WORDS_W;
constexpr int K_STEPS = WORDS / 2;
static_assert(X_CHANNELS_LAST ? CHUNK % (16 * ELEMENTS) == 0 : CHUNK % 8 == 0, "whole steps");
static_assert(X_CHANNELS_LAST || KERNEL_W % ELEMENTS == 0, "a word of a row is one channel's and one position's");

// A slot of weights, those of a unit: [step][part][2 pieces][column][16 bytes]. Sizes in units of 16 bytes.
constexpr int SLOT = K_STEPS * PARTS * OPERAND;

constexpr int BARRIER_BYTES = 128;

#include "runs.cuh"

// Of word `n` of thread t: the channel of the unit, and the tap along W, of its first element. The next one is, of rows, the next
// tap's and, channels-last, the next channel's.
__host__ __device__ constexpr int channel_of(int n, int t) {
    return X_CHANNELS_LAST ? (n % (CHUNK / ELEMENTS / 4) / 4 * 16 + 4 * t + n % 4) * ELEMENTS : n / WORDS_W * 4 + t;
}
__host__ __device__ constexpr int tap_of(int n) {
    return X_CHANNELS_LAST ? n / (CHUNK / ELEMENTS / 4) : n % WORDS_W * ELEMENTS;
}

// ---- x ---------------------------------------------------------------------------------------------------------------

struct Loaded {
    unsigned value[RUNS][WORDS][RUN];
};

// Words of a row that are loaded at a time: of a run's up to 16 bytes or, of rows that are not aligned for it, of a position's.
constexpr int OF_POSITION_X = WORDS_W > 0 ? WORDS_W : 1;
constexpr int LARGE = gcd(4, RUN * OF_POSITION_X), SMALL = gcd(4, OF_POSITION_X);

// What a run reads of the first tap along D and H, and of the group's first channel.
struct Source {
    const Stored* x;
    int d, h, w;
};

__device__ __forceinline__ Source source_of(const Stored* x, int tile, int run, const Problem& p) {
    const Place at = place_of(run_of(tile, run), p);
    const int d = at.d * KERNEL_D - (int)p.pad[0], h = at.h * KERNEL_H - (int)p.pad[1], w = at.w * KERNEL_W - (int)p.pad[2];
    x += at.n * p.x_stride[0] + d * p.x_stride[2] + h * p.x_stride[3] + w * p.x_stride[4];
    return {x, at.there ? d : -KERNEL_D, h, w};
}

// Rows, COUNT words at a time.
template <int COUNT>
__device__ __forceinline__ void load_rows(unsigned (&to)[WORDS][RUN], const Stored* from, int w, int left, const Problem& p) {
    constexpr int ALL = RUN * OF_POSITION_X;  // words of a channel
    const int t = (int)threadIdx.x % 4;
    from += t * p.x_stride[1];
#pragma unroll
    for (int channel = 0; channel < CHUNK; channel += 4) {
#pragma unroll
        for (int first = 0; first < ALL; first += COUNT) {
            Pack<unsigned, COUNT> words;
            load(words, from + first * ELEMENTS, channel < left - t && within(w + first * ELEMENTS, p.x_extent[2]));
#pragma unroll
            for (int i = 0; i < COUNT; ++i) {
                const int word = first + i;
                to[channel / 4 * WORDS_W + word % WORDS_W][word / WORDS_W] = words.value[i];
            }
        }
        from += 4 * p.x_stride[1];
    }
}

// Channels-last: all channels of a load exist, or none.
__device__ __forceinline__ void load_channels(unsigned (&to)[WORDS][RUN], const Stored* from, int w, int left,
                                              const Problem& p) {
    constexpr int OF_TAP = CHUNK / ELEMENTS / 4;  // words
#pragma unroll
    for (int element = 0; element < RUN * KERNEL_W; ++element) {
        const bool inside = within(w + element, p.x_extent[2]);
#pragma unroll
        for (int n = 0; n < OF_TAP; n += 4) {
            const int channel = channel_of(n, (int)threadIdx.x % 4);
            Pack<unsigned, 4> words;
            load(words, from + channel, inside && channel < left);
#pragma unroll
            for (int i = 0; i < 4; ++i) to[element % KERNEL_W * OF_TAP + n + i][element / KERNEL_W] = words.value[i];
        }
        from += p.x_stride[4];
    }
}

// One element after the other, whatever their strides. Addresses follow from each other: of products with strides, the compiler
// would keep all from unit to unit.
__device__ __forceinline__ void load_elements(unsigned (&to)[WORDS][RUN], const Stored* from, int w, int left,
                                              const Problem& p) {
    constexpr int OF_TAP = X_CHANNELS_LAST ? CHUNK / ELEMENTS / 4 : WORDS / WORDS_W;  // of a thread: words, or channels
    constexpr int AT_ONCE = X_CHANNELS_LAST ? ELEMENTS : 1;  // channels of a word
    const int t = (int)threadIdx.x % 4;
    from += channel_of(0, t) * p.x_stride[1];
#pragma unroll
    for (int n = 0; n < WORDS; ++n)
#pragma unroll
        for (int j = 0; j < RUN; ++j) to[n][j] = 0;
#pragma unroll
    for (int k = 0; k < OF_TAP; ++k) {
        const int first = X_CHANNELS_LAST ? k : k * WORDS_W;  // word
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const Stored* at = from;
#pragma unroll
            for (int e = 0; e < RUN * KERNEL_W; ++e) {
                const int n = first + (X_CHANNELS_LAST ? e % KERNEL_W * OF_TAP : e % KERNEL_W / ELEMENTS);
                const int half = X_CHANNELS_LAST ? i : e % ELEMENTS;
                if (channel_of(first, t) + i < left && within(w + e, p.x_extent[2]))
                    to[n][e / KERNEL_W] |= bits_of(*at) << 16 * half;
                at += p.x_stride[4];
            }
            from += p.x_stride[1];
        }
        // Whole words from here on, or halves would have registers of their own until they are used.
#pragma unroll
        for (int n = 0; n < WORDS && ELEMENTS > 1; ++n)
#pragma unroll
            for (int j = 0; j < RUN; ++j) to[n][j] = (unsigned)recomputed((int)to[n][j]);
        // The next word's channels, of which the last AT_ONCE are behind.
        if (k + 1 < OF_TAP)
            from += (channel_of(X_CHANNELS_LAST ? k + 1 : first + WORDS_W, 0) - channel_of(first, 0) - AT_ONCE) * p.x_stride[1];
    }
}

// Which unit it is, of a position's.
struct Unit {
    int tap_d, tap_h, channel;

    // After a position's last one comes the next one's first.
    __device__ __forceinline__ void next(const Problem& p) {
        channel += CHUNK;
        if (channel < (int)p.c_in) return;
        channel = 0;
        if (++tap_h < KERNEL_H) return;
        tap_h = 0;
        if (++tap_d == KERNEL_D) tap_d = 0;
    }
};

__device__ __forceinline__ void load_unit(Loaded& to, const Source (&sources)[RUNS], const Unit& unit, const Problem& p) {
#pragma unroll
    for (int run = 0; run < RUNS; ++run) {
        const Source& s = sources[run];
        const bool inside = within(s.d + unit.tap_d, p.x_extent[0]) && within(s.h + unit.tap_h, p.x_extent[1]);
        const int left = inside ? (int)p.c_in - unit.channel : 0;
        const Stored* const from =
            s.x + (unit.tap_d * p.x_stride[2] + unit.tap_h * p.x_stride[3] + unit.channel * p.x_stride[1]);
        // `p.x_vector` says how many words: 4 of channels, LARGE or SMALL of a row, or elements one by one.
        if (!p.x_vector) load_elements(to.value[run], from, s.w, left, p);
        else if constexpr (X_CHANNELS_LAST) load_channels(to.value[run], from, s.w, left, p);
        else if (LARGE == SMALL || p.x_vector == LARGE) load_rows<LARGE>(to.value[run], from, s.w, left, p);
        else load_rows<SMALL>(to.value[run], from, s.w, left, p);
    }
}

// Takes the words of x to their rows, rounded to TF32: here, and not among the products, which would make them wait.
__device__ __forceinline__ void pick(Fragments& a, const Loaded& x) {
#pragma unroll
    for (int row = 0; row < 2 * TILES_M; ++row) {
#pragma unroll
        for (int n = 0; n < WORDS; ++n) {
            const unsigned word = x.value[row / RUN][n][row % RUN];
            unsigned& to = a.value[row / 2][n / 2][row % 2 + 2 * (n % 2)];
            to = PRECISION == TF32 ? (unsigned)recomputed((int)to_tf32(__uint_as_float(word))) : word;
        }
    }
}

// ---- the kernel ------------------------------------------------------------------------------------------------------

__device__ __forceinline__ Target target_of(Stored* out, int tile, int run, const Problem& p) {
    const Place at = place_of(run_of(tile, run), p);
    out += at.n * p.out_stride[0] + at.d * p.out_stride[2] + at.h * p.out_stride[3] + at.w * p.out_stride[4];
    return {out, at.there ? at.d : -1, at.h, at.w};
}

// A block has the weights of one tile of output channels of one group; `p.plane` counts their units.
extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    correlate_disjoint(const Stored* x, const Piece* packed, const Stored* bias, Stored* out, const Problem p) {
    extern __shared__ __align__(128) unsigned char shared_bytes[];
    Barrier* const landed = reinterpret_cast<Barrier*>(shared_bytes);
    Piece* const slots = reinterpret_cast<Piece*>(shared_bytes + BARRIER_BYTES);
    float* const offsets = reinterpret_cast<float*>(slots + (int)p.plane * SLOT);

    const unsigned sets = (unsigned)(p.tiles[3] * p.groups), set = blockIdx.x % sets;
    const int tile_c = (int)(set % (unsigned)p.tiles[3]), group = (int)(set / (unsigned)p.tiles[3]);
    x += group * p.c_in * p.x_stride[1];
    out += (group * p.c_out + tile_c * TILE_C) * p.out_stride[1];

    const int workers = (int)(gridDim.x / sets) * WORKERS;
    int tile = (int)(blockIdx.x / sets) * WORKERS + (int)threadIdx.x / 128;
    Source sources[RUNS];
#pragma unroll
    for (int run = 0; run < RUNS; ++run) sources[run] = source_of(x, tile, run, p);
    Unit unit = {0, 0, 0};
    Loaded loaded;
    load_unit(loaded, sources, unit, p);

    if (threadIdx.x == 0) {
        barrier_init(landed, 1);
        barrier_init_done();
        wait_for_kernel_before();  // it packs the weights
        barrier_arrive_expecting(landed, (int)p.plane * SLOT * (int)sizeof(Piece));
        const Piece* from = packed + set * (p.plane * SLOT);
        for (int i = 0; i < (int)p.plane; ++i)
            copy_bulk(slots + i * SLOT, from + i * (long long)SLOT, SLOT * (int)sizeof(Piece), landed);
    }
    for (int c = (int)threadIdx.x; c < TILE_C; c += THREADS) {
        const int channel = tile_c * TILE_C + c;
        const bool biased = bias && channel < (int)p.c_out;
        offsets[c] = biased ? widen(bias[(group * p.c_out + channel) * p.bias_stride]) : 0.0f;
    }
    __syncthreads();
    barrier_wait(landed, 0);

    for (; tile < (int)p.blocks; tile += workers) {
        Sums<TILES_C> all[1], &sums = all[0];
#pragma unroll
        for (int i = 0; i < TILES_M && PRECISION == TF32X3; ++i)
#pragma unroll
            for (int j = 0; j < COLUMNS / 2; ++j) sums.value[i][j] = 0;
#pragma unroll 1
        for (int i = 0; i < (int)p.plane; ++i) {
            Fragments a;
            pick(a, loaded);
            unit.next(p);
            if (i + 1 == (int)p.plane) {
#pragma unroll
                for (int run = 0; run < RUNS; ++run) sources[run] = source_of(x, tile + workers, run, p);
            }
            load_unit(loaded, sources, unit, p);
            multiply(sums, a, of_warp(describe(slots, COLUMNS * 16, 128) + i * SLOT), PRECISION == TF32X3 || i > 0);
        }
        Target targets[RUNS];
#pragma unroll
        for (int run = 0; run < RUNS; ++run) targets[run] = target_of(out, tile, run, p);
        store(targets, all, offsets, 0, 0, 1, 0, min(TILE_C, (int)p.c_out - tile_c * TILE_C), p);
    }
}

// Puts the weights of the call in the order of the slots, once, before the kernel above: [group][tile of output channels][tap
// along D][tap along H][chunk]. There are fewer than 2^32 threads: the pieces of more are more than a GPU's memory.
extern "C" __global__ void correlate_disjoint_pack(const Stored* weight, Piece* packed, const Problem p) {
    let_next_kernel_start();
    const unsigned chunks = ((unsigned)p.c_in + CHUNK - 1) / CHUNK;
    unsigned index = blockIdx.x * blockDim.x + threadIdx.x;
    // Consecutive threads read weights near each other.
    const int tap = (int)(index % TAPS);
    index /= TAPS;
    const int column = (int)(index % TILE_C);
    index /= TILE_C;
    const int tile_c = (int)take(index, p, 3);
    const int piece = (int)(index % 2), step = (int)(index / 2 % K_STEPS);
    index /= 2 * K_STEPS;
    const int chunk = (int)(index % chunks);
    const unsigned group = index / chunks;
    if (group >= (unsigned)p.groups) return;

    const int co = tile_c * TILE_C + column, word = 2 * step + piece;
    weight += p.weight_first + group * p.weight_group_stride + co * p.weight_stride[1] + tap / KERNEL_H * p.weight_stride[2] +
              tap % KERNEL_H * p.weight_stride[3];
    Channels c;
#pragma unroll
    for (int i = 0; i < PIECE; ++i) {
        const int t = i / ELEMENTS, further = i % ELEMENTS;
        const int channel = chunk * CHUNK + channel_of(word, t) + (X_CHANNELS_LAST ? further : 0);
        const int tap_w = tap_of(word) + (X_CHANNELS_LAST ? 0 : further);
        zero(c.value[i]);
        if (co < p.c_out && channel < p.c_in) c.value[i] = weight[channel * p.weight_stride[0] + tap_w * p.weight_stride[4]];
    }
    Piece parts[PARTS];
    pack(c, parts);
    const long long slot = ((group * p.tiles[3] + tile_c) * TAPS + tap) * chunks + chunk;
#pragma unroll
    for (int part = 0; part < PARTS; ++part)
        packed[slot * SLOT + (step * PARTS + part) * OPERAND + piece * COLUMNS + column] = parts[part];
}
