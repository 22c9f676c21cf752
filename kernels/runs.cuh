// What the kernels without a halo share, whose threads have runs of positions: where these are, products with A in registers, and
// how sums are stored. Whoever includes this has said how many COLUMNS a wgmma has, how many outputs along W a position
// (OUTPUTS_W), whose columns are TILE_C apart, and how many 16-byte units B of a step and part (OPERAND).
#pragma once

#include "channels_last_store.cuh"

constexpr int RUNS = 2 * TILES_M / RUN;           // of a thread
constexpr int IN_WORD = 4 / (int)sizeof(Stored);  // elements
constexpr int AT_ONCE = gcd(16 / (int)sizeof(Stored), RUN * OUTPUTS_W);  // outputs of a row that are stored
constexpr int OF_POSITION = gcd(AT_ONCE, OUTPUTS_W);  // likewise, where only those of a position are aligned
static_assert(2 * TILES_M % RUN == 0, "a thread has two rows of each tile");

// ---- positions -------------------------------------------------------------------------------------------------------

// `p.box` says how many positions there are along D and H, and how many runs in a row.
struct Place {
    int n, d, h, w;  // of a run's first position, counted from the first that has an output
    bool there;
};

__device__ __forceinline__ Place place_of(int run, const Problem& p) {
    const int row = (int)quotient(run, p.box_magic[0]), slice = (int)quotient(row, p.box_magic[1]);
    const int n = (int)quotient(slice, p.box_magic[2]);
    const int w = run - row * (int)p.box[2], h = row - slice * (int)p.box[1], d = slice - n * (int)p.box[0];
    return {n, d, h, w * RUN, n < (int)p.n};
}

// The number of a thread's run; eight threads have runs that follow each other, and so do the warps of a worker.
__device__ __forceinline__ int run_of(int tile, int run) {
    return ((tile * RUNS + run) * 4 + (int)threadIdx.x / 32 % 4) * 8 + (int)threadIdx.x % 32 / 4;
}

template <int COUNT> __device__ __forceinline__ void load(Pack<unsigned, COUNT>& words, const Stored* from, bool there) {
    if (there) {
        words = *reinterpret_cast<const Pack<unsigned, COUNT>*>(from);
    } else {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) words.value[i] = 0;
    }
}

// ---- arithmetic ------------------------------------------------------------------------------------------------------

struct Sums {
    float value[TILES_M][COLUMNS / 2];
};

// A of a tile; of 3xTF32, `multiply` splits it.
struct Fragments {
    unsigned value[TILES_M][K_STEPS][4];
};

// The products of all steps, and the sums as they were if it adds to them.
#if PRECISION == TF32X3
// The tensor core truncates its sums, so each chain of a few products starts from zero, and ordinary additions collect the
// chains. Two alternate: one is added while the next is multiplied.
constexpr int CHAIN = K_STEPS < 2 ? 1 : 2;  // steps
constexpr int CHAINS = ceil_div(K_STEPS, CHAIN);

__device__ __forceinline__ void multiply(Sums& sums, const Fragments& x, Operand b, bool adds) {
    float chains[2][COLUMNS / 2];
    unsigned a[2][PARTS][CHAIN][4];
    const auto add_chain = [&](int chain) {
#pragma unroll
        for (int i = 0; i < COLUMNS / 2; ++i) {
            float& sum = sums.value[chain / CHAINS][i];
            sum = adds || chain % CHAINS ? sum + chains[chain % 2][i] : chains[chain % 2][i];
        }
    };
#pragma unroll
    for (int chain = 0; chain < TILES_M * CHAINS; ++chain) {
        const int first = chain % CHAINS * CHAIN;
#pragma unroll
        for (int k = 0; k < CHAIN; ++k) {
            if (first + k >= K_STEPS) continue;
#pragma unroll
            for (int i = 0; i < 4; ++i)
                split(__uint_as_float(x.value[chain / CHAINS][first + k][i]), a[chain % 2][0][k][i],
                      a[chain % 2][PARTS - 1][k][i]);
        }
        bool further = false;
        wgmma_fence();
        // The small products come first.
#pragma unroll
        for (int product = 0; product < 3; ++product) {
            const int part_a = product == 0 ? PARTS - 1 : 0, part_b = product == 1 ? PARTS - 1 : 0;
#pragma unroll
            for (int k = 0; k < CHAIN; ++k) {
                if (first + k >= K_STEPS) continue;
                multiply_add<COLUMNS>(chains[chain % 2], a[chain % 2][part_a][k], b + ((first + k) * PARTS + part_b) * OPERAND,
                                      further);
                further = true;
            }
        }
        wgmma_commit();
        if (chain > 0) {
            wgmma_wait<1>();
            add_chain(chain - 1);
        }
    }
    wgmma_wait<0>();
    add_chain(TILES_M * CHAINS - 1);
}
#else
__device__ __forceinline__ void multiply(Sums& sums, const Fragments& a, Operand b, bool adds) {
    wgmma_fence();
#pragma unroll
    for (int tile = 0; tile < TILES_M; ++tile) {
#pragma unroll
        for (int step = 0; step < K_STEPS; ++step)
            multiply_add<COLUMNS>(sums.value[tile], a.value[tile][step], b + step * OPERAND, adds || step > 0);
    }
    wgmma_commit();
    wgmma_wait<0>();
}
#endif

// ---- the result ------------------------------------------------------------------------------------------------------

// Where the outputs of a run go: those of the first tap along each axis, in the group's first channel.
struct Target {
    Stored* out;
    int d, h, w;
};

// The row of a tile that is position `j` of a run.
__host__ __device__ constexpr int row_of(int run, int j) { return run * RUN + j; }

// A slot's sums of one run, COUNT outputs of a row at a time. `out` is the first one, of the thread's first channel.
template <int COUNT>
__device__ __forceinline__ void store_run(Stored* out, const Sums& sums, const float* bias, int run, int w, int left,
                                          const Problem& p) {
#pragma unroll
    for (int channel = 0; channel < TILE_C; channel += 8) {
        const Pack<float, 2> offset = *reinterpret_cast<const Pack<float, 2>*>(bias + channel);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            Stored* to = out + (channel + i) * p.out_stride[1];
#pragma unroll
            for (int first = 0; first < RUN * OUTPUTS_W; first += COUNT) {
                Pack<float, COUNT> values;
#pragma unroll
                for (int e = 0; e < COUNT; ++e) {
                    const int row = row_of(run, (first + e) / OUTPUTS_W), column = (first + e) % OUTPUTS_W * TILE_C + channel;
                    values.value[e] = offset.value[i] + sums.value[row / 2][column / 2 + row % 2 * 2 + i];
                }
                if (channel + i < left && within(w + first, p.out_extent[2])) store_vector(values, to);
                to += COUNT * p.out_stride[4];
            }
        }
    }
}

// A slot's sums. `bias` is the first channel's, of which `left` exist; so is `channels` further than a target.
__device__ __forceinline__ void store(const Target (&targets)[RUNS], const Sums& sums, const float* bias, int tap_d, int tap_h,
                                      long long channels, int left, const Problem& p) {
    const int own = (int)threadIdx.x % 4 * 2;
#pragma unroll
    for (int run = 0; run < RUNS; ++run) {
        const Target& t = targets[run];
        const bool inside = within(t.d + tap_d, p.out_extent[0]) && within(t.h + tap_h, p.out_extent[1]);
        Stored* const out = t.out + (channels + tap_d * p.out_stride[2] + tap_h * p.out_stride[3]);
#if OUT_CHANNELS_LAST
#pragma unroll
        for (int position = 0; position < RUN; ++position) {
            const int row = row_of(run, position);
#pragma unroll
            for (int tap = 0; tap < OUTPUTS_W; ++tap) {
                issue_in_order();
                TwoChannels two;
#pragma unroll
                for (int c = 0; c < TILES_C; ++c) {
                    const Pack<float, 2> offset = *reinterpret_cast<const Pack<float, 2>*>(bias + c * 8 + own);
#pragma unroll
                    for (int i = 0; i < 2; ++i)
                        two.value[c][i] = offset.value[i] + sums.value[row / 2][(tap * TILES_C + c) * 4 + row % 2 * 2 + i];
                }
                const int further = position * OUTPUTS_W + tap;
                const bool there = inside && within(t.w + further, p.out_extent[2]);
                store_two(out + further * p.out_stride[4], two, there ? left : 0, p);
            }
        }
#else
        // `p.out_vector` says how many: as many as 16 bytes hold or, of rows that are not aligned for it, fewer.
        Stored* const to = out + own * p.out_stride[1];
        const int count = inside ? left - own : 0;
        if (AT_ONCE > OF_POSITION && p.out_vector == AT_ONCE) store_run<AT_ONCE>(to, sums, bias + own, run, t.w, count, p);
        else if (OF_POSITION > 1 && p.out_vector > 1) store_run<OF_POSITION>(to, sums, bias + own, run, t.w, count, p);
        else store_run<1>(to, sums, bias + own, run, t.w, count, p);
#endif
    }
}
