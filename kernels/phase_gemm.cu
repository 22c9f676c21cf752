// Phase GEMM, tensor cores: float16, bfloat16 and float32 (as TF32 or 3xTF32) where a group is wide enough.
//
// A phase is a stride-1 correlation, so an implicit GEMM: M = positions q, N = output channels, K = input channels x taps.
// A block owns a box of positions of one phase along D and H and all phases along W. It walks over (tap along D, chunk of
// input channels); a step stages the box of x with its halo along H and W, and the weights, in shared memory by
// asynchronous copies that overlap the arithmetic of the step before. Every tap reads the same staged box at another
// offset. Eight positions along W make a *row*; two rows make the 16 rows of an mma tile, so that a fragment of x loaded
// once serves every tap along H.
//
// All arithmetic is on 32-bit words: one float32, or two 16-bit channels that follow each other. x is staged as
// [word][d][h][w], or [d][h][w][word] for channels-last x; only two constants tell these apart.
//
// Where phases have equally many taps along every axis, they may be channels (PHASES_AS_CHANNELS): all phases read the same
// x, and so are the columns of one GEMM, a correlation with a kernel of KERNEL / STRIDE taps. Only the packed weights and
// the stores tell the difference. It serves few channels, of which each phase would fill a part of a tile, and many phases.
//
// Compile-time: kernel, stride, dilation, dtype, precision and tile, and what copies of channels-last positions take at a time.
// Run-time: N, extents, padding, channels, strides.
#include "mma.cuh"

#ifndef PHASES_AS_CHANNELS
#define PHASES_AS_CHANNELS 0
#endif
#ifndef WARPS_D  // warps of a block along D, H, W and the output channels
#define WARPS_D 2
#define WARPS_H 1
#define WARPS_W 2
#define WARPS_C 1
#endif
#ifndef ROWS  // rows of eight positions a warp owns: along H, or along W for 1-D problems
#define ROWS 4
#endif
#ifndef ROWS_ALONG_W
#define ROWS_ALONG_W 0
#endif
#ifndef TILES_C  // groups of eight output channels a warp owns
#define TILES_C 3
#endif
#ifndef K_STEPS  // groups of eight words of input channels staged at a time
#define K_STEPS 1
#endif
#ifndef EARLY  // how many positions before the first one needed a staged row starts, so that copies are aligned
#define EARLY 0
#endif
#ifndef COPY_BYTES  // of a channels-last position that copies bring at a time: 16, or 8 or 4 where positions start so
#define COPY_BYTES 16
#endif
#ifndef X_CHANNELS_LAST
#define X_CHANNELS_LAST 0
#endif
#ifndef OUT_CHANNELS_LAST
#define OUT_CHANNELS_LAST 0
#endif
#ifndef MIN_BLOCKS
#define MIN_BLOCKS 2
#endif
#ifndef SHARED_BYTES  // what the plan asks for, to be compared with what the kernel needs
#define SHARED_BYTES 0
#endif

// What the GEMM has of taps, and of phases beside each other, along an axis.
constexpr int TAPS_D = PHASES_AS_CHANNELS ? KERNEL_D / STRIDE_D : KERNEL_D;
constexpr int TAPS_H = PHASES_AS_CHANNELS ? KERNEL_H / STRIDE_H : KERNEL_H;
constexpr int TAPS_W = PHASES_AS_CHANNELS ? KERNEL_W / STRIDE_W : KERNEL_W;
constexpr int PHASES_D = PHASES_AS_CHANNELS ? 1 : STRIDE_D;
constexpr int PHASES_H = PHASES_AS_CHANNELS ? 1 : STRIDE_H;
constexpr int PHASES_W = PHASES_AS_CHANNELS ? 1 : STRIDE_W;
static_assert(!PHASES_AS_CHANNELS || (KERNEL_D % STRIDE_D == 0 && KERNEL_H % STRIDE_H == 0 && KERNEL_W % STRIDE_W == 0 &&
                                      DILATION_D == 1 && DILATION_H == 1 && DILATION_W == 1),
              "phases that are channels have equally many taps");

typedef Axis<TAPS_D, PHASES_D, DILATION_D> AxisD;
typedef Axis<TAPS_H, PHASES_H, DILATION_H> AxisH;
typedef Axis<TAPS_W, PHASES_W, DILATION_W> AxisW;

constexpr int THREADS = 32 * WARPS_D * WARPS_H * WARPS_W * WARPS_C;
constexpr int ROW = 8;  // positions
constexpr int WARP_H = ROWS_ALONG_W ? 1 : ROWS;
constexpr int WARP_W = ROWS_ALONG_W ? ROW * ROWS : ROW;
constexpr int BOX_D = WARPS_D;
constexpr int BOX_H = WARPS_H * WARP_H;
constexpr int BOX_W = WARPS_W * WARP_W;
constexpr int BOX_C = WARPS_C * TILES_C * 8;

constexpr int WORDS = 8 * K_STEPS;  // of input channels in a stage
constexpr int CHUNK = WORDS * CHANNELS_A_WORD;

// The staged box of x. The tap furthest back reads its first row and column, whichever phase it is.
constexpr int REACH_H = (AxisH::MAX_TAPS - 1) * AxisH::HOP;
constexpr int REACH_W = AxisW::REACH;
constexpr int X_H = BOX_H + REACH_H;
constexpr int X_W = X_CHANNELS_LAST ? BOX_W + REACH_W : round_up(BOX_W + REACH_W + EARLY, 4);
constexpr int X_POSITIONS = BOX_D * X_H * X_W;
// Distances that keep the 8 positions x 4 words which a warp loads at a time in 32 different banks.
constexpr int POSITION = X_CHANNELS_LAST ? WORDS + 4 : 1;
constexpr int WORD = X_CHANNELS_LAST ? 1 : at_residue(X_POSITIONS, 8, 32);
constexpr int X_STAGE = X_CHANNELS_LAST ? X_POSITIONS * POSITION : WORDS * WORD;

// Weights in fragment order: [tap along H][k step][tap along W][8 channels][lane][word].
constexpr int FRAGMENT = PRECISION == TF32X3 ? 4 : 2;  // words a lane: K words t and t + 4, then their low parts
constexpr int PIECE = K_STEPS * TAPS_W * (BOX_C / 8) * 32 * FRAGMENT;  // one tap along D and one along H
constexpr int WEIGHT_STAGE = AxisH::MAX_TAPS * PIECE;

constexpr int STAGE = X_STAGE + WEIGHT_STAGE;

// The output is turned in shared memory, a slice at a time, so that stores run along memory: eight channels of every warp,
// or (channels-last) one row of every warp with all channels. Two slices alternate.
constexpr int OUT_W = BOX_W * PHASES_W;
constexpr int LINES = BOX_D * BOX_H;
constexpr int SLICE_CHANNEL = at_residue(LINES * OUT_W, PHASES_W == 1 ? 4 : 8, 16);
constexpr int SLICE_POSITIONS = WARPS_D * WARPS_H * WARPS_W * ROW * PHASES_W;
constexpr int SLICE_POSITION = at_residue(BOX_C, 8, 16);
constexpr int SLICE = OUT_CHANNELS_LAST ? SLICE_POSITIONS * SLICE_POSITION : 8 * WARPS_C * SLICE_CHANNEL;

constexpr int SHARED = 2 * (STAGE > SLICE ? STAGE : SLICE);  // in words
static_assert(SHARED_BYTES == 0 || SHARED * 4 == SHARED_BYTES, "the plan's shared memory is not the kernel's");
static_assert(ROWS % 2 == 0, "an mma tile is two rows");
static_assert(!ROWS_ALONG_W || AxisH::MAX_TAPS == 1, "rows along W are for kernels of height 1");

// W phases that have a tap, each numbered by its first tap, so that tap k belongs to number k % STEP; the others are the
// bias. (A search for the number would leave the compiler with accumulators at addresses that it cannot work out.)
constexpr int LIVE = TAPS_W < AxisW::STEP ? TAPS_W : AxisW::STEP;
__host__ __device__ constexpr bool is_live(int phase) {
    for (int live = 0; live < LIVE; ++live)
        if (AxisW::phase_of(live) == phase) return true;
    return false;
}

// How many consecutive threads share one of `lines` lines of `width` elements: a divisor of the block whose warps take few
// rounds, each of them and in all.
__host__ __device__ constexpr int rounds_of(int threads, int width, int lines) {
    int all = 0, most = 0;
    for (int first = 0; first < THREADS; first += 32) {  // of a warp
        const int column = first % threads, line = first / threads;
        if (column >= width || line >= lines) continue;
        const int rounds = ceil_div(width - column, threads) * ceil_div(lines - line, THREADS / threads);
        all += rounds;
        most = rounds > most ? rounds : most;
    }
    return all + THREADS / 32 * most;
}
__host__ __device__ constexpr int line_threads(int width, int lines) {
    int best = 8;
    for (int t = 8; t <= THREADS; t += 8) {
        if (THREADS % t == 0 && rounds_of(t, width, lines) <= rounds_of(best, width, lines)) best = t;
    }
    return best;
}

// Where a column of the GEMM belongs: a channel or, where phases are channels, one phase of it. Columns that follow each
// other are neighbours in memory: phases along W, or (channels-last) channels and then those.
struct Column {
    int channel, phase_d, phase_h, phase_w;

    __device__ __forceinline__ Column(int column, const Problem& p) : channel(column), phase_d(0), phase_h(0), phase_w(0) {
        if (!PHASES_AS_CHANNELS) return;
        int phase = OUT_CHANNELS_LAST ? column / (int)p.c_out : column % (STRIDE_D * STRIDE_H * STRIDE_W);
        channel = OUT_CHANNELS_LAST ? column - phase * (int)p.c_out : column / (STRIDE_D * STRIDE_H * STRIDE_W);
        phase_w = phase % STRIDE_W;
        phase /= STRIDE_W;
        phase_h = phase % STRIDE_H;
        phase_d = phase / STRIDE_H;  // beyond the last phase for a column beyond the last one
    }
    __device__ __forceinline__ bool exists(const Problem& p) const {
        return channel < p.c_out && (!PHASES_AS_CHANNELS || phase_d < STRIDE_D);
    }
};

struct Accumulators {
    float value[LIVE][ROWS / 2][TILES_C][4];
};

struct Block {
    Index box_d, box_h, box_w;  // first position q on each axis
    int tile_c;
    int phase_d, phase_h;
    long long n, group;
};

__device__ __forceinline__ Block locate(const Problem& p) {
    // W runs fastest, then the phases, which read the same x.
    unsigned index = blockIdx.x;
    Block b;
    b.box_w = (Index)take(index, p, 2) * BOX_W + (Index)p.pad[2] / STRIDE_W;
    b.phase_h = (int)(index % PHASES_H);
    index /= PHASES_H;
    b.phase_d = (int)(index % PHASES_D);
    index /= PHASES_D;
    b.tile_c = (int)take(index, p, 3);
    b.box_h = (Index)take(index, p, 1) * BOX_H + (Index)p.pad[1] / STRIDE_H;
    b.box_d = (Index)take(index, p, 0) * BOX_D + (Index)p.pad[0] / STRIDE_D;
    b.group = take(index, p, 4);
    b.n = index;
    return b;
}

// ---- staging ---------------------------------------------------------------------------------------------------------
// Addresses and border tests are worked out once a position, for all channels of the stage.

// Where a stage's box lies: its first position in x (which may be outside), and its channels that exist.
struct Box {
    Index d, h, w;
    int channels;

    __device__ __forceinline__ bool holds(const Problem& p, int row, int column) const {
        return within(d + row / X_H, p.x_extent[0]) && within(h + row % X_H, p.x_extent[1]) &&
               within(w + column, p.x_extent[2]);
    }
    __device__ __forceinline__ Index offset(const Problem& p, int row, int column) const {
        return (d + row / X_H) * (Index)p.x_stride[2] + (h + row % X_H) * (Index)p.x_stride[3] +
               (w + column) * (Index)p.x_stride[4];
    }
};

// Channels-last x: COPY_BYTES of channels of one position at a time, at multiples of which positions start.
__device__ __forceinline__ void stage_x_channels(unsigned* to, const Stored* x, const Problem& p, const Box& box) {
    constexpr int UNIT = COPY_BYTES / (int)sizeof(Stored);  // channels of a copy
    constexpr int UNITS = WORDS * 4 / COPY_BYTES;
    constexpr int ACROSS = line_threads(X_W * UNITS, BOX_D * X_H);
    for (int i = threadIdx.x % ACROSS; i < X_W * UNITS; i += ACROSS) {
        const int unit = i % UNITS, column = i / UNITS;
        const int left = min(UNIT, max(0, box.channels - unit * UNIT)) * (int)sizeof(Stored);
        for (int row = threadIdx.x / ACROSS; row < BOX_D * X_H; row += THREADS / ACROSS) {
            const int bytes = box.holds(p, row, column) ? left : 0;
            copy_async<COPY_BYTES>(to + (row * X_W + column) * POSITION + unit * (COPY_BYTES / 4),
                                   x + (bytes ? box.offset(p, row, column) + unit * UNIT : 0), bytes);
        }
    }
}

// The other stages give a thread some positions of a row and a share of the words.
__host__ __device__ constexpr int share_of_words(int items) {
    int groups = 1;
    while (groups < WORDS && items * groups * 2 <= THREADS) groups *= 2;
    return WORDS / groups;
}

// Contiguous rows: four positions at a time, or two of 16 bits. Rows and the start of x are aligned for that, and so is
// box.w (EARLY).
template <int PER>
__device__ __forceinline__ void stage_x_rows(unsigned* to, const Stored* x, const Problem& p, const Box& box) {
    constexpr int UNITS = X_W / PER, ITEMS = BOX_D * X_H * UNITS, SHARE = share_of_words(ITEMS);
    for (int i = threadIdx.x; i < ITEMS * (WORDS / SHARE); i += THREADS) {
        const int column = i % UNITS * PER, row = i / UNITS % (BOX_D * X_H), first = i / ITEMS * SHARE;
        const bool inside = box.holds(p, row, column);
        const Index step = inside ? (Index)p.x_stride[1] : 0;
        const Stored* from = x + (inside ? box.offset(p, row, column) : 0) + first * CHANNELS_A_WORD * step;
        unsigned* target = to + first * WORD + row * X_W + column;
        const int left = inside ? box.channels - first * CHANNELS_A_WORD : 0;
        if (CHANNELS_A_WORD == 1) {
#pragma unroll
            for (int c = 0; c < SHARE; ++c) copy_async_16(target + c * WORD, from + c * step, c < left ? 16 : 0);
        } else {
            // Two channels of 16 bits become one word, in registers.
            constexpr int BATCH = SHARE < 4 ? SHARE : 4;
#pragma unroll
            for (int c = 0; c < SHARE; c += BATCH) {
                typedef Pack<unsigned, PER / 2> Run;
                Run even[BATCH], odd[BATCH];
#pragma unroll
                for (int j = 0; j < BATCH; ++j) {
                    const int channel = 2 * (c + j);
                    even[j] = odd[j] = Run{};
                    if (channel < left) even[j] = *reinterpret_cast<const Run*>(from + channel * step);
                    if (channel + 1 < left) odd[j] = *reinterpret_cast<const Run*>(from + (channel + 1) * step);
                }
#pragma unroll
                for (int j = 0; j < BATCH; ++j) {
                    Pack<unsigned, PER> words;
#pragma unroll
                    for (int k = 0; k < PER / 2; ++k) {
                        words.value[2 * k] = (even[j].value[k] & 0xffffu) | (odd[j].value[k] << 16);
                        words.value[2 * k + 1] = (even[j].value[k] >> 16) | (odd[j].value[k] & 0xffff0000u);
                    }
                    *reinterpret_cast<Pack<unsigned, PER>*>(target + (c + j) * WORD) = words;
                }
            }
        }
    }
}

// Any strides and alignment: a word at a time.
__device__ __forceinline__ void stage_x_words(unsigned* to, const Stored* x, const Problem& p, const Box& box) {
    constexpr int ITEMS = X_POSITIONS, SHARE = share_of_words(ITEMS);
    for (int i = threadIdx.x; i < ITEMS * (WORDS / SHARE); i += THREADS) {
        const int column = i % X_W, row = i / X_W % (BOX_D * X_H), first = i / ITEMS * SHARE;
        const bool inside = box.holds(p, row, column);
        const Index step = inside ? (Index)p.x_stride[1] : 0;
        const Stored* from = x + (inside ? box.offset(p, row, column) : 0) + first * CHANNELS_A_WORD * step;
        unsigned* target = to + first * WORD + (row * X_W + column) * POSITION;
        const int left = inside ? box.channels - first * CHANNELS_A_WORD : 0;
        if (CHANNELS_A_WORD == 1) {
#pragma unroll
            for (int c = 0; c < SHARE; ++c) copy_async_4(target + c * WORD, from + c * step, c < left ? 4 : 0);
        } else {
            constexpr int BATCH = SHARE < 8 ? SHARE : 8;
#pragma unroll
            for (int c = 0; c < SHARE; c += BATCH) {
                unsigned word[BATCH];
#pragma unroll
                for (int j = 0; j < BATCH; ++j) {
                    const int channel = 2 * (c + j);
                    word[j] = channel < left ? bits_of(from[channel * step]) : 0;
                    if (channel + 1 < left) word[j] |= bits_of(from[(channel + 1) * step]) << 16;
                }
#pragma unroll
                for (int j = 0; j < BATCH; ++j) target[(c + j) * WORD] = word[j];
            }
        }
    }
}

__device__ __forceinline__ void stage_weight(unsigned* to, const unsigned* packed, int taps_h) {
    constexpr int ROUNDS = ceil_div(WEIGHT_STAGE / 4, THREADS);
    const int units = taps_h * (PIECE / 4);
    to += 4 * threadIdx.x;
    packed += 4 * threadIdx.x;
#pragma unroll
    for (int i = 0; i < ROUNDS; ++i) {
        if ((int)threadIdx.x + i * THREADS < units) copy_async_16_shared_by_blocks(to + i * 4 * THREADS, packed + i * 4 * THREADS);
    }
}

// The packed weights hold the taps along H phase by phase, so that those of a phase follow each other.
__host__ __device__ constexpr int taps_before(int phase) {
    int count = 0;
    for (int tap = 0; tap < TAPS_H; ++tap) count += AxisH::phase_of(tap) < phase;
    return count;
}
__host__ __device__ constexpr int packed_place(int tap) {
    int place = taps_before(AxisH::phase_of(tap));
    for (int t = 0; t < tap; ++t) place += AxisH::phase_of(t) == AxisH::phase_of(tap);
    return place;
}

// ---- arithmetic ------------------------------------------------------------------------------------------------------

// An mma tile is the rows m and m + ROWS / 2, so that the tile of another tap along H is another such pair of rows.
constexpr int TILES_M = ROWS / 2;
constexpr int PAIRS = TILES_M + REACH_H;

// Value i of the A fragment of a pair of rows.
__device__ __forceinline__ unsigned load_x(const unsigned* x, int pair, int i) {
    constexpr int NEXT_ROW = ROWS_ALONG_W ? ROW * POSITION : X_W * POSITION;
    return x[(pair + i % 2 * TILES_M) * NEXT_ROW + i / 2 * 4 * WORD];
}

__device__ __forceinline__ void load_fragments(Pack<unsigned, FRAGMENT> (&to)[TILES_C], const unsigned* from) {
#pragma unroll
    for (int tile = 0; tile < TILES_C; ++tile)
        to[tile] = *reinterpret_cast<const Pack<unsigned, FRAGMENT>*>(from + tile * 32 * FRAGMENT);
}

#if PRECISION == TF32X3
// Adds the three products of one tap. The tensor core truncates its sums: so each three start from zero, and an ordinary
// addition ends them.
__device__ __forceinline__ void multiply_parts(float (&acc)[TILES_C][4], const unsigned (&high)[4],
                                               const unsigned (&low)[4], const Pack<unsigned, 4> (&b)[TILES_C]) {
    float sum[TILES_C][4];
    const float zero[4] = {0, 0, 0, 0};
#pragma unroll
    for (int tile = 0; tile < TILES_C; ++tile) {
        const unsigned high_b[2] = {b[tile].value[0], b[tile].value[1]};
        mma_m16n8k8_tf32(sum[tile], low, high_b, zero);
    }
#pragma unroll
    for (int tile = 0; tile < TILES_C; ++tile) {
        const unsigned low_b[2] = {b[tile].value[2], b[tile].value[3]};
        mma_m16n8k8_tf32(sum[tile], high, low_b, sum[tile]);
    }
#pragma unroll
    for (int tile = 0; tile < TILES_C; ++tile) {
        const unsigned high_b[2] = {b[tile].value[0], b[tile].value[1]};
        mma_m16n8k8_tf32(sum[tile], high, high_b, sum[tile]);
#pragma unroll
        for (int i = 0; i < 4; ++i) acc[tile][i] += sum[tile][i];
    }
}
#endif

// Adds one stage to the accumulators. x and weight point at the lane's first element.
__device__ __forceinline__ void multiply(Accumulators& acc, const unsigned* x, const unsigned* weight, int run_time_taps_h) {
    // Where all live phases have equally many taps, their number is known to the compiler.
    const int taps_h = TAPS_H % AxisH::STEP == 0 ? AxisH::MAX_TAPS : run_time_taps_h;
    // Unrolled too far, ptxas loads far ahead and runs out of registers, with the many instructions of three products a tap
    // the sooner. A round is one tap of each W phase: these go to different accumulators, which needs compile-time phases.
    constexpr int ROUNDS = ceil_div(TAPS_W, AxisW::STEP);
    // Taps along H that only some phases have are branches, which keep loads in place.
    constexpr bool FEW = TAPS_W <= 3 || TAPS_H % AxisH::STEP ||
                         (AxisH::MAX_TAPS == 1 && TAPS_W * TILES_M * TILES_C <= 32);
    constexpr bool FEW_TAPS = PRECISION == TF32X3 ? LIVE > 1 && FEW : TAPS_W * (LIVE > 1 ? K_STEPS : 1) <= 8;
    constexpr int UNROLL_STEPS = PRECISION == TF32X3 || !FEW_TAPS ? 1 : K_STEPS;
    constexpr int UNROLL_ROUNDS = FEW_TAPS ? ROUNDS : 1;
#pragma unroll UNROLL_STEPS
    for (int step = 0; step < K_STEPS; ++step) {
#pragma unroll UNROLL_ROUNDS
        for (int round = 0; round < ROUNDS; ++round) {
#pragma unroll
            for (int live = 0; live < LIVE; ++live) {
                const int tap_w = round * AxisW::STEP + live;
                if (TAPS_W % LIVE && tap_w >= TAPS_W) continue;
                const int back = AxisW::back(live) + round * AxisW::HOP;
                const unsigned* const x_tap = x + (REACH_W - back) * POSITION + step * 8 * WORD;
                const unsigned* const fragments = weight + (step * TAPS_W + tap_w) * (BOX_C / 8) * 32 * FRAGMENT;
#if PRECISION == TF32X3
                Pack<unsigned, 4> b[AxisH::MAX_TAPS][TILES_C];
#pragma unroll
                for (int tap_h = 0; tap_h < AxisH::MAX_TAPS; ++tap_h)
                    if (tap_h < taps_h) load_fragments(b[tap_h], fragments + tap_h * PIECE);
#pragma unroll
                for (int pair = 0; pair < PAIRS; ++pair) {
                    unsigned high[4], low[4];
#pragma unroll
                    for (int i = 0; i < 4; ++i) split(__uint_as_float(load_x(x_tap, pair, i)), high[i], low[i]);
#pragma unroll
                    for (int tap_h = 0; tap_h < AxisH::MAX_TAPS; ++tap_h) {
                        const int m = pair - (AxisH::MAX_TAPS - 1 - tap_h) * AxisH::HOP;
                        if (m >= 0 && m < TILES_M && tap_h < taps_h)
                            multiply_parts(acc.value[live][m], high, low, b[tap_h]);
                    }
                }
#else
                unsigned a[PAIRS][4];
#pragma unroll
                for (int pair = 0; pair < PAIRS; ++pair) {
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        const unsigned value = load_x(x_tap, pair, i);
                        a[pair][i] = PRECISION == TF32 ? to_tf32(__uint_as_float(value)) : value;
                    }
                }
#pragma unroll
                for (int tap_h = 0; tap_h < AxisH::MAX_TAPS; ++tap_h) {
                    if (tap_h < taps_h) {
                        Pack<unsigned, 2> b[TILES_C];
                        load_fragments(b, fragments + tap_h * PIECE);
#pragma unroll
                        for (int tile = 0; tile < TILES_C; ++tile) {
#pragma unroll
                            for (int m = 0; m < TILES_M; ++m)
                                mma(acc.value[live][m][tile], a[m + (AxisH::MAX_TAPS - 1 - tap_h) * AxisH::HOP],
                                    b[tile].value);
                        }
                    }
                }
#endif
            }
        }
    }
}

// ---- epilogue --------------------------------------------------------------------------------------------------------

// Where a thread's results belong in its block's box.
struct Place {
    int d, h, w, c;  // the warp's first position, the lane's position along W added, and the lane's first channel
};

__device__ __forceinline__ int row_of(int m, int i) { return m + i / 2 * (ROWS / 2); }

// Writes a slice of eight channels a warp; a thread takes PER consecutive positions along W, as one word.
template <int PER>
__device__ __forceinline__ void store_slice(const float* slice, const float* offset, int first_c, const Block& b,
                                            Stored* out, const Problem& p) {
    constexpr int ACROSS = line_threads(OUT_W / PER, LINES);
    for (int column = threadIdx.x % ACROSS * PER; column < OUT_W; column += ACROSS * PER) {
        const Index ow = b.box_w * PHASES_W + column - (Index)p.pad[2];
        if (!within(ow, p.out_extent[2])) continue;  // both of a word are inside, or neither
        for (int line = threadIdx.x / ACROSS; line < LINES; line += THREADS / ACROSS) {
            const Index od = (b.box_d + line / BOX_H) * PHASES_D + b.phase_d - (Index)p.pad[0];
            const Index oh = (b.box_h + line % BOX_H) * PHASES_H + b.phase_h - (Index)p.pad[1];
            if (!within(od, p.out_extent[0]) || !within(oh, p.out_extent[1])) continue;
            Stored* const to = out + od * (Index)p.out_stride[2] + oh * (Index)p.out_stride[3] +
                               ow * (Index)p.out_stride[4] + first_c * (Index)p.out_stride[1];
            const float* const from = slice + line * OUT_W + column;
#pragma unroll
            for (int c = 0; c < 8 * WARPS_C; ++c) {
                const int ahead = c / 8 * TILES_C * 8 + c % 8;
                Pack<Stored, PER> values;
#pragma unroll
                for (int k = 0; k < PER; ++k) {
                    const bool live = LIVE == PHASES_W || is_live((column + k) % PHASES_W);
                    narrow((live ? from[c * SLICE_CHANNEL + k] : 0) + offset[c], values.value[k]);
                }
                if (first_c + ahead < p.c_out)
                    *reinterpret_cast<Pack<Stored, PER>*>(to + ahead * (Index)p.out_stride[1]) = values;
            }
        }
    }
}

// Writes such a slice where its eight columns are phases of channels, RUN of them along W; a thread takes PER of these.
template <int PER>
__device__ __forceinline__ void store_phases(const float* slice, int first_column, const Block& b, const Stored* bias,
                                             Stored* out, const Problem& p) {
    constexpr int RUN = gcd(8, STRIDE_W), RUNS = 8 * WARPS_C / RUN;
    constexpr int ACROSS = line_threads(BOX_W * RUN / PER, LINES * RUNS);
    for (int i = threadIdx.x % ACROSS * PER; i < BOX_W * RUN; i += ACROSS * PER) {
        const int w = i / RUN;
        for (int line = threadIdx.x / ACROSS; line < LINES * RUNS; line += THREADS / ACROSS) {
            const int c = line % RUNS * RUN + i % RUN, row = line / RUNS;
            const Column column(first_column + c / 8 * TILES_C * 8 + c % 8, p);
            const Index od = (b.box_d + row / BOX_H) * STRIDE_D + column.phase_d - (Index)p.pad[0];
            const Index oh = (b.box_h + row % BOX_H) * STRIDE_H + column.phase_h - (Index)p.pad[1];
            const Index ow = (b.box_w + w) * STRIDE_W + column.phase_w - (Index)p.pad[2];  // of two, both inside or neither
            if (!column.exists(p) || !within(od, p.out_extent[0]) || !within(oh, p.out_extent[1]) ||
                !within(ow, p.out_extent[2])) {
                continue;
            }
            const float offset = bias ? widen(bias[(b.group * p.c_out + column.channel) * p.bias_stride]) : 0.0f;
            Pack<float, PER> sums;
#pragma unroll
            for (int k = 0; k < PER; ++k) sums.value[k] = slice[(c + k) * SLICE_CHANNEL + row * OUT_W + w] + offset;
            store_vector(sums, out + od * (Index)p.out_stride[2] + oh * (Index)p.out_stride[3] +
                                   ow * (Index)p.out_stride[4] + column.channel * (Index)p.out_stride[1]);
        }
    }
}

// Rows of the output: consecutive threads write consecutive positions along W.
__device__ __forceinline__ void store_rows(const Accumulators& acc, float* turned, const Place& mine, const Block& b,
                                           const Stored* bias, Stored* out, const Problem& p) {
    constexpr int PAIR = CHANNELS_A_WORD;  // positions of a word
    constexpr int CHANNELS = 8 * WARPS_C;
#pragma unroll
    for (int tile = 0; tile < TILES_C; ++tile) {
        float* const slice = turned + tile % 2 * SLICE;
#pragma unroll
        for (int live = 0; live < LIVE; ++live) {
            const int phase = AxisW::phase_of(live);
#pragma unroll
            for (int m = 0; m < ROWS / 2; ++m) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int h = mine.h + (ROWS_ALONG_W ? 0 : row_of(m, i));
                    const int w = mine.w + (ROWS_ALONG_W ? row_of(m, i) * ROW : 0);
                    slice[(mine.c / (TILES_C * 8) * 8 + mine.c % 8 + i % 2) * SLICE_CHANNEL + (mine.d * BOX_H + h) * OUT_W +
                          w * PHASES_W + phase] = acc.value[live][m][tile][i];
                }
            }
        }
        __syncthreads();
        const int first_c = b.tile_c * BOX_C + tile * 8;
        if (PHASES_AS_CHANNELS) {
            if (PAIR == 2 && STRIDE_W % 2 == 0 && p.out_vector) {
                store_phases<STRIDE_W % 2 == 0 ? PAIR : 1>(slice, first_c, b, bias, out, p);
            } else {
                store_phases<1>(slice, first_c, b, bias, out, p);
            }
            continue;
        }
        float offset[CHANNELS];
#pragma unroll
        for (int c = 0; c < CHANNELS; ++c) {
            const int channel = first_c + c / 8 * TILES_C * 8 + c % 8;
            offset[c] = bias && channel < p.c_out ? widen(bias[(b.group * p.c_out + channel) * p.bias_stride]) : 0.0f;
        }
        if (PAIR == 2 && p.out_vector) {
            store_slice<PAIR>(slice, offset, first_c, b, out, p);
        } else {
            store_slice<1>(slice, offset, first_c, b, out, p);
        }
    }
}

// Where row `row` of a warp is in the block's box; warps in the order of their positions.
__device__ __forceinline__ Place place_of_slice(int warp, int row) {
    return {warp / (WARPS_W * WARPS_H), warp / WARPS_W % WARPS_H * WARP_H + (ROWS_ALONG_W ? 0 : row),
            warp % WARPS_W * WARP_W + (ROWS_ALONG_W ? row * ROW : 0), 0};
}

// Writes a slice of one row of every warp, channels-last, where its columns are channels of phases.
__device__ __forceinline__ void store_phases_of_row(const float* slice, int row, const Block& b, const Stored* bias,
                                                    Stored* out, const Problem& p) {
    constexpr int ACROSS = line_threads(BOX_C, SLICE_POSITIONS);
    for (int c = threadIdx.x % ACROSS; c < BOX_C; c += ACROSS) {
        const Column column(b.tile_c * BOX_C + c, p);
        if (!column.exists(p)) continue;
        const float offset = bias ? widen(bias[(b.group * p.c_out + column.channel) * p.bias_stride]) : 0.0f;
        for (int position = threadIdx.x / ACROSS; position < SLICE_POSITIONS; position += THREADS / ACROSS) {
            const Place from = place_of_slice(position / ROW, row);
            const Index od = (b.box_d + from.d) * STRIDE_D + column.phase_d - (Index)p.pad[0];
            const Index oh = (b.box_h + from.h) * STRIDE_H + column.phase_h - (Index)p.pad[1];
            const Index ow = (b.box_w + from.w + position % ROW) * STRIDE_W + column.phase_w - (Index)p.pad[2];
            if (!within(ow, p.out_extent[2]) || !within(oh, p.out_extent[1]) || !within(od, p.out_extent[0])) continue;
            narrow(slice[position * SLICE_POSITION + c] + offset,
                   out[od * (Index)p.out_stride[2] + oh * (Index)p.out_stride[3] + ow * (Index)p.out_stride[4] +
                       column.channel * (Index)p.out_stride[1]]);
        }
    }
}

// Channels-last output: consecutive threads write consecutive channels, four at a time where the memory is aligned.
__device__ __forceinline__ void store_channels(const Accumulators& acc, float* turned, const Place& mine, const Block& b,
                                               const Stored* bias, Stored* out, const Problem& p) {
    constexpr int UNITS = BOX_C / 4;
    const int warp = threadIdx.x / 32 % (WARPS_D * WARPS_H * WARPS_W);
#pragma unroll
    for (int row = 0; row < ROWS; ++row) {
        float* const slice = turned + row % 2 * SLICE;
#pragma unroll
        for (int live = 0; live < LIVE; ++live) {
            const int phase = AxisW::phase_of(live);
            float* const to = slice + ((warp * ROW + threadIdx.x % 32 / 4) * PHASES_W + phase) * SLICE_POSITION + mine.c;
#pragma unroll
            for (int tile = 0; tile < TILES_C; ++tile) {
                const float* const sums = acc.value[live][row % (ROWS / 2)][tile] + row / (ROWS / 2) * 2;
                *reinterpret_cast<Pack<float, 2>*>(to + tile * 8) = Pack<float, 2>{{sums[0], sums[1]}};
            }
        }
        __syncthreads();
        if (PHASES_AS_CHANNELS) {
            store_phases_of_row(slice, row, b, bias, out, p);
            continue;
        }
        for (int i = threadIdx.x; i < SLICE_POSITIONS * UNITS; i += THREADS) {
            const int c = i % UNITS * 4, position = i / UNITS;
            const int channel = b.tile_c * BOX_C + c;
            const int column = position % (ROW * PHASES_W);
            const Place from = place_of_slice(position / (ROW * PHASES_W), row);
            const int d = from.d, h = from.h, w = from.w;
            const Index ow = (b.box_w + w) * PHASES_W + column - (Index)p.pad[2];
            const Index oh = (b.box_h + h) * PHASES_H + b.phase_h - (Index)p.pad[1];
            const Index od = (b.box_d + d) * PHASES_D + b.phase_d - (Index)p.pad[0];
            if (!within(ow, p.out_extent[2]) || !within(oh, p.out_extent[1]) || !within(od, p.out_extent[0])) continue;
            Stored* const to = out + od * (Index)p.out_stride[2] + oh * (Index)p.out_stride[3] +
                               ow * (Index)p.out_stride[4] + channel * (Index)p.out_stride[1];
            Pack<float, 4> sums{{0, 0, 0, 0}};
            if (LIVE == PHASES_W || is_live(column % PHASES_W))
                sums = *reinterpret_cast<const Pack<float, 4>*>(slice + position * SLICE_POSITION + c);
            Pack<Stored, 4> values;
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                const bool biased = bias && channel + k < p.c_out;
                narrow(sums.value[k] +
                           (biased ? widen(bias[(b.group * p.c_out + channel + k) * p.bias_stride]) : 0.0f),
                       values.value[k]);
            }
            if (p.out_vector && channel + 3 < p.c_out) {
                *reinterpret_cast<Pack<Stored, 4>*>(to) = values;
            } else {
#pragma unroll
                for (int k = 0; k < 4; ++k)
                    if (channel + k < p.c_out) to[k * (Index)p.out_stride[1]] = values.value[k];
            }
        }
    }
}

// ---- the kernel ------------------------------------------------------------------------------------------------------

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    phase_gemm(const Stored* x, const unsigned* packed, const Stored* bias, Stored* out, const Problem p) {
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    unsigned* const shared = reinterpret_cast<unsigned*>(shared_bytes);

    const Block b = locate(p);
    x += b.n * p.x_stride[0] + b.group * p.c_in * p.x_stride[1];
    out += b.n * p.out_stride[0] + b.group * p.c_out * p.out_stride[1];
    const int chunks = ((int)p.c_in + CHUNK - 1) / CHUNK;
    packed += (b.group * p.tiles[3] + b.tile_c) * (TAPS_D * TAPS_H * (long long)chunks * PIECE);

    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int warp_w = warp % WARPS_W, warp_h = warp / WARPS_W % WARPS_H;
    const int warp_d = warp / (WARPS_W * WARPS_H) % WARPS_D, warp_c = warp / (WARPS_W * WARPS_H * WARPS_D);

    const PhaseTaps<AxisD, TAPS_D> taps_d(b.phase_d);
    const PhaseTaps<AxisH, TAPS_H> taps_h(b.phase_h);
    const int steps = LIVE && taps_h.count ? taps_d.count * chunks : 0;

    const int first_tap_h = taps_before(b.phase_h);
    const Index first_h = b.box_h - AxisH::back(taps_h.first) - REACH_H;
    const Index first_w = b.box_w - REACH_W - EARLY;

    Accumulators acc;
#pragma unroll
    for (int live = 0; live < LIVE; ++live)
#pragma unroll
        for (int m = 0; m < ROWS / 2; ++m)
#pragma unroll
            for (int tile = 0; tile < TILES_C; ++tile)
#pragma unroll
                for (int i = 0; i < 4; ++i) acc.value[live][m][tile][i] = 0;

    const auto stage = [&](int step) {
        const int tap_d = taps_d.tap(step / chunks), chunk = step % chunks;
        unsigned* const to = shared + step % 2 * STAGE;
        const Stored* const from = x + (long long)chunk * CHUNK * p.x_stride[1];
        const Box box = {b.box_d - AxisD::back(tap_d), first_h, first_w, (int)p.c_in - chunk * CHUNK};
        if (!p.x_vector) {
            stage_x_words(to, from, p, box);
        } else if (X_CHANNELS_LAST) {
            stage_x_channels(to, from, p, box);
        } else if (PHASES_AS_CHANNELS && CHANNELS_A_WORD == 2 && p.x_vector == 2) {
            stage_x_rows<2>(to, from, p, box);
        } else {
            stage_x_rows<4>(to, from, p, box);
        }
        stage_weight(to + X_STAGE, packed + ((tap_d * (long long)chunks + chunk) * TAPS_H + first_tap_h) * PIECE,
                     taps_h.count);
    };

    const int my_x = ((warp_d * X_H + warp_h * WARP_H) * X_W + warp_w * WARP_W + EARLY + lane / 4) * POSITION +
                     lane % 4 * WORD;
    const int my_weight = X_STAGE + (warp_c * TILES_C * 32 + lane) * FRAGMENT;
    wait_for_kernel_before();  // it packs the weights
    if (steps) stage(0);
    copy_async_commit();
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
        copy_async_wait<0>();
        __syncthreads();  // all of this stage has landed, and nobody reads the other one any more
        if (step + 1 < steps) stage(step + 1);
        copy_async_commit();
        const unsigned* const current = shared + step % 2 * STAGE;
        multiply(acc, current + my_x, current + my_weight, taps_h.count);
    }

    __syncthreads();
    const Place mine = {warp_d, warp_h * WARP_H, warp_w * WARP_W + lane / 4, warp_c * TILES_C * 8 + lane % 4 * 2};
    float* const turned = reinterpret_cast<float*>(shared_bytes);
    if (OUT_CHANNELS_LAST) {
        store_channels(acc, turned, mine, b, bias, out, p);
    } else {
        store_rows(acc, turned, mine, b, bias, out, p);
    }
}

// Puts the weights of the call in fragment order, once, before the kernel above: [group][tile of output channels][tap
// along D][chunk][tap along H, phase by phase][k step][tap along W][8 channels][lane][word].
extern "C" __global__ void phase_gemm_pack(const Stored* weight, unsigned* packed, const Problem p) {
    let_next_kernel_start();
    const int chunks = ((int)p.c_in + CHUNK - 1) / CHUNK;
    const long long count = p.groups * p.tiles[3] * TAPS_D * TAPS_H * chunks * (PIECE / FRAGMENT);
    long long index = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (index >= count) return;
    unsigned* const to = packed + index * FRAGMENT;
    const int lane = (int)(index % 32);
    index /= 32;
    const int eight = (int)(index % (BOX_C / 8));
    index /= BOX_C / 8;
    const int tap_w = (int)(index % TAPS_W);
    index /= TAPS_W;
    const int step = (int)(index % K_STEPS);
    index /= K_STEPS;
    const int place = (int)(index % TAPS_H);
    index /= TAPS_H;
    int tap_h = 0;
    while (packed_place(tap_h) != place) ++tap_h;
    const int chunk = (int)(index % chunks);
    index /= chunks;
    const int tap_d = (int)(index % TAPS_D);
    index /= TAPS_D;
    const int tile_c = (int)(index % p.tiles[3]);
    const long long group = index / p.tiles[3];

    const Column column(tile_c * BOX_C + eight * 8 + lane / 4, p);
    const bool exists = column.exists(p);
    // With phases as channels taps are those of the GEMM, so many phases apart.
    weight += p.weight_first + group * p.weight_group_stride + column.channel * p.weight_stride[1] +
              (tap_d * (STRIDE_D / PHASES_D) + column.phase_d) * p.weight_stride[2] +
              (tap_h * (STRIDE_H / PHASES_H) + column.phase_h) * p.weight_stride[3] +
              (tap_w * (STRIDE_W / PHASES_W) + column.phase_w) * p.weight_stride[4];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int c = (chunk * WORDS + step * 8 + lane % 4 + i * 4) * CHANNELS_A_WORD;
        unsigned word = 0;
        if (exists && c < p.c_in) {
            word = bits_of(weight[c * p.weight_stride[0]]);
            if (CHANNELS_A_WORD == 2 && c + 1 < p.c_in) word |= bits_of(weight[(c + 1) * p.weight_stride[0]]) << 16;
        }
        to_operand(word, to[i], to[(FRAGMENT - 2) + i]);
    }
}
