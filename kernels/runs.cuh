// What the kernels without a halo share, whose threads have runs of positions: where these are, products with A in registers, and
// how sums are stored. Whoever includes this has said how many COLUMNS a wgmma has, how many outputs along W a position
// (OUTPUTS_W), whose columns are TILE_C apart, and how many 16-byte units B of a step and part (OPERAND).
#pragma once

#include "channels_last_store.cuh"

constexpr int RUNS = 2 * TILES_M / RUN;           // of a thread
constexpr int IN_WORD = 4 / (int)sizeof(Stored);  // elements
constexpr int OUTPUTS = RUN * OUTPUTS_W;          // of a run
constexpr int AT_ONCE = gcd(16 / (int)sizeof(Stored), OUTPUTS);  // of these, how many are stored where rows are aligned for it
constexpr bool IN_PIECES = AT_ONCE < OUTPUTS && AT_ONCE * sizeof(Stored) < 16;  // between which other threads have to write
static_assert(2 * TILES_M % RUN == 0, "a thread has two rows of each tile");
static_assert(OUT_CHANNELS_LAST || OUTPUTS <= IN_WORD || OUTPUTS % IN_WORD == 0, "threads exchange words");

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

// Sums of so many times 8 output channels: of all of a slot, or of some.
template <int EIGHTS> struct Sums {
    static constexpr int COLUMNS = 8 * EIGHTS * OUTPUTS_W;  // of a wgmma
    float value[TILES_M][COLUMNS / 2];
};

// A of a tile; of 3xTF32, `multiply` splits it.
struct Fragments {
    unsigned value[TILES_M][K_STEPS][4];
};

// The products of all steps, which are under way then. `adds`: to the sums as they were.
template <int EIGHTS>
__device__ __forceinline__ void multiply_add_all(Sums<EIGHTS>& sums, const Fragments& a, Operand b, bool adds) {
#pragma unroll
    for (int tile = 0; tile < TILES_M; ++tile) {
#pragma unroll
        for (int step = 0; step < K_STEPS; ++step)
            multiply_add<Sums<EIGHTS>::COLUMNS>(sums.value[tile], a.value[tile][step], b + step * OPERAND, adds || step > 0);
    }
}

// The same, complete.
#if PRECISION == TF32X3
// The tensor core truncates its sums, so each chain of a few products starts from zero, and ordinary additions collect the
// chains. Two alternate: one is added while the next is multiplied.
constexpr int CHAIN = K_STEPS < 2 ? 1 : 2;  // steps
constexpr int CHAINS = ceil_div(K_STEPS, CHAIN);

template <int EIGHTS> __device__ __forceinline__ void multiply(Sums<EIGHTS>& sums, const Fragments& x, Operand b, bool adds) {
    constexpr int COLUMNS = Sums<EIGHTS>::COLUMNS;
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
template <int EIGHTS> __device__ __forceinline__ void multiply(Sums<EIGHTS>& sums, const Fragments& a, Operand b, bool adds) {
    wgmma_fence();
    multiply_add_all(sums, a, b, adds);
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

// One of a slot's sums: output `e` of a run, in the thread's channel `i` of eight.
template <int EIGHTS> __device__ __forceinline__ float sum_of(const Sums<EIGHTS>& sums, int run, int e, int channel, int i) {
    const int row = row_of(run, e / OUTPUTS_W), column = e % OUTPUTS_W * 8 * EIGHTS + channel;
    return sums.value[row / 2][column / 2 + row % 2 * 2 + i];
}

// Sums of one run for ROWS taps along H, COUNT outputs of a row at a time: of rows that follow each other in memory, one right
// after the other. `out` is the first output, of the thread's first channel, with which each row has so many `left`.
template <int COUNT, int EIGHTS, int ROWS>
__device__ __forceinline__ void store_run(Stored* out, const Sums<EIGHTS> (&sums)[ROWS], const float* bias, int run, int w,
                                          const int (&left)[ROWS], const Problem& p) {
#pragma unroll
    for (int channel = 0; channel < 8 * EIGHTS; channel += 8) {
        const Pack<float, 2> offset = *reinterpret_cast<const Pack<float, 2>*>(bias + channel);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            Stored* to = out + (channel + i) * p.out_stride[1];
#pragma unroll
            for (int first = 0; first < OUTPUTS; first += COUNT) {
#pragma unroll
                for (int row = 0; row < ROWS; ++row) {
                    Pack<float, COUNT> values;
#pragma unroll
                    for (int e = 0; e < COUNT; ++e)
                        values.value[e] = offset.value[i] + sum_of(sums[row], run, first + e, channel, i);
                    if (channel + i < left[row] && within(w + first, p.out_extent[2]))
                        store_vector(values, to + row * p.out_stride[3]);
                }
                to += COUNT * p.out_stride[4];
            }
        }
    }
}

// The same where rows are not aligned for that, COUNT outputs at a time: a word, or one. Threads of a run exchange words, so that
// each has one of two or four that follow each other, in as many pairs of channels: next to each other, they fill whole sectors.
// `out` is the run's first output, in the first channel.
template <int COUNT, int EIGHTS, int ROWS>
__device__ __forceinline__ void store_exchanged(Stored* out, const Sums<EIGHTS> (&sums)[ROWS], const float* bias, int run, int w,
                                                const int (&left)[ROWS], const Problem& p) {
    constexpr int WORDS = OUTPUTS / IN_WORD, TOGETHER = WORDS == 2 ? 2 : 4;
    const int t = (int)threadIdx.x % 4, own = t % TOGETHER, first_channel = t / TOGETHER * TOGETHER * 2;
    out += own * IN_WORD * p.out_stride[4] + first_channel * p.out_stride[1];
#pragma unroll
    for (int channel = 0; channel < 8 * EIGHTS; channel += 8) {
        const Pack<float, 2> offset = *reinterpret_cast<const Pack<float, 2>*>(bias + channel);
#pragma unroll
        for (int first = 0; first < WORDS; first += TOGETHER) {
            unsigned words[ROWS][2][TOGETHER];
#pragma unroll
            for (int n = 0; n < ROWS * 2 * TOGETHER; ++n) {
                const int row = n / (2 * TOGETHER), i = n / TOGETHER % 2, word = n % TOGETHER;
                float values[IN_WORD] = {};
#pragma unroll
                for (int e = 0; e < IN_WORD && first + word < WORDS; ++e)
                    values[e] = offset.value[i] + sum_of(sums[row], run, (first + word) * IN_WORD + e, channel, i);
                if constexpr (IN_WORD == 1) words[row][i][word] = __float_as_uint(values[0]);
                else words[row][i][word] = narrow_two<Stored>(values[0], values[1]);
            }
#pragma unroll
            for (int apart = 1; apart < TOGETHER; apart *= 2)
#pragma unroll
                for (int n = 0; n < ROWS * 2 * TOGETHER; ++n) {
                    unsigned(&own_words)[TOGETHER] = words[n / (2 * TOGETHER)][n / TOGETHER % 2];
                    if (!(n % TOGETHER & apart)) exchange(own_words[n % TOGETHER], own_words[n % TOGETHER + apart], apart);
                }
            Stored* to = out + channel * p.out_stride[1] + first * IN_WORD * p.out_stride[4];
#pragma unroll
            for (int c = 0; c < 2 * TOGETHER; ++c) {
#pragma unroll
                for (int n = 0; n < ROWS * IN_WORD; n += COUNT) {
                    const int row = n / IN_WORD, e = n % IN_WORD;
                    const unsigned word = words[row][c % 2][c / 2];
                    const bool there = first + own < WORDS && within(w + (first + own) * IN_WORD + e, p.out_extent[2]);
                    if (channel + first_channel + c >= left[row] || !there) continue;
                    Stored* const at = to + row * p.out_stride[3];
                    if constexpr (COUNT == IN_WORD) *reinterpret_cast<unsigned*>(at) = word;
                    else from_bits(word >> 16 * e, at[e * p.out_stride[4]]);
                }
                to += p.out_stride[1];
            }
        }
    }
}

// The sums of ROWS taps along H from `tap_h` on, or of so many as there are. `bias` is the first channel's, of which `left` exist;
// so is `channels` further than a target.
template <int EIGHTS, int ROWS>
__device__ __forceinline__ void store(const Target (&targets)[RUNS], const Sums<EIGHTS> (&sums)[ROWS], const float* bias, int tap_d,
                                      int tap_h, int rows, long long channels, int left, const Problem& p) {
    const int own = (int)threadIdx.x % 4 * 2;
#pragma unroll
    for (int run = 0; run < RUNS; ++run) {
        const Target& t = targets[run];
        const bool inside = within(t.d + tap_d, p.out_extent[0]);
        int of_row[ROWS];  // channels left
#pragma unroll
        for (int row = 0; row < ROWS; ++row)
            of_row[row] = inside && row < rows && within(t.h + tap_h + row, p.out_extent[1]) ? left : 0;
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
                        two.value[c][i] = offset.value[i] + sums[0].value[row / 2][(tap * TILES_C + c) * 4 + row % 2 * 2 + i];
                }
                const int further = position * OUTPUTS_W + tap;
                store_two(out + further * p.out_stride[4], two, within(t.w + further, p.out_extent[2]) ? of_row[0] : 0, p);
            }
        }
#else
        // `p.out_vector` says how many: as many as 16 bytes hold or, of rows that are not aligned for it, a word's, or one.
        if (!IN_PIECES && p.out_vector == AT_ONCE) {
#pragma unroll
            for (int row = 0; row < ROWS; ++row) of_row[row] -= own;
            store_run<AT_ONCE>(out + own * p.out_stride[1], sums, bias + own, run, t.w, of_row, p);
        } else if constexpr (OUTPUTS <= IN_WORD) {
#pragma unroll
            for (int row = 0; row < ROWS; ++row) of_row[row] -= own;
            store_run<1>(out + own * p.out_stride[1], sums, bias + own, run, t.w, of_row, p);
        } else if (p.out_vector % IN_WORD == 0) {
            store_exchanged<IN_WORD>(out, sums, bias + own, run, t.w, of_row, p);
        } else {
            store_exchanged<1>(out, sums, bias + own, run, t.w, of_row, p);
        }
#endif
    }
}
