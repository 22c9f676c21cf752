// Groups of few channels (up to 16 in and any number out, eight to a tile) on tensor cores, sm_80 and newer: float16, bfloat16
// and float32 (as TF32 or 3xTF32). Such a problem is bound by what it stores, so everything is arranged for the result.
//
// Outputs are counted in cells: cell t of an axis owns the outputs STRIDE * t to STRIDE * t + STRIDE - 1, and a cell's
// outputs of all three axes are computed together, from the same inputs. Along an axis, tap k reaches the outputs whose
// residue modulo STRIDE is residue(k) and reads x at t + pad / STRIDE + offset(k).
//
// A block takes one box of cells after the other, all of one group, or of two where eight channels of 16 bits of each are half a
// sector of memory. It stages x as planes of 16-byte pieces,
// [part][piece][position], a piece being 4 channels (float32) or 8 (16 bits) of one position, rounded to TF32 or split.
// From there on each warp is on its own: it takes 16 cells at a time, whose positions are the rows of an mma, wherever in the
// box they lie; it loads each shift of them once (`ldmatrix`), multiplies it by the weights of all taps that read this shift,
// each for its residues, and stores what it summed. Nothing is handed from warp to warp, and other blocks' warps hide
// its waits.
//
// Compile-time: kernel, stride, dilation, padding modulo stride, dtype, precision and tile. Run-time: N, extents, the box, padding,
// channels.
#include "mma.cuh"
#include "pieces.cuh"

#ifndef SHIFT_D  // padding modulo stride
#define SHIFT_D 1
#define SHIFT_H 1
#define SHIFT_W 1
#endif
#ifndef TILES_M  // sixteens of cells a warp owns
#define TILES_M 1
#endif
#ifndef TILES_C  // eights of output channels
#define TILES_C 1
#endif
#ifndef GROUPS  // that a warp takes at once: 1 or, of one piece and one eight of output channels each, 2
#define GROUPS 1
#endif
#ifndef K_STEPS  // pairs of pieces of input channels
#define K_STEPS 1
#endif
#ifndef HALF_K  // one piece, not a pair: for no more than 8 channels of 16 bits
#define HALF_K 0
#endif
#ifndef HOLD_WEIGHTS  // whether a thread keeps its weights in registers
#define HOLD_WEIGHTS 0
#endif
#ifndef SPLIT  // whether a warp sums the residues along D one after the other, not all at once
#define SPLIT 0
#endif
#ifndef X_CHANNELS_LAST
#define X_CHANNELS_LAST 0
#endif
#ifndef OUT_CHANNELS_LAST
#define OUT_CHANNELS_LAST 0
#endif
#ifndef BOXED  // whether rows of the result leave a block a box at a time (sm_90, 16 bits), see narrow_box.cuh
#define BOXED 0
#endif
#ifndef MIN_BLOCKS
#define MIN_BLOCKS 4
#endif

// One axis of cells.
template <int KERNEL, int STRIDE, int DILATION, int SHIFT> struct Cells {
    static constexpr int STEP = STRIDE / gcd(STRIDE, DILATION);
    static constexpr int LIVE = KERNEL < STEP ? KERNEL : STEP;  // residues that have a tap; tap k is of number k % STEP

    __host__ __device__ static constexpr int residue(int tap) {
        return ((tap * DILATION - SHIFT) % STRIDE + STRIDE) % STRIDE;
    }
    __host__ __device__ static constexpr int offset(int tap) {
        return (residue(tap) + SHIFT - tap * DILATION) / STRIDE;  // without a remainder
    }
    // Offsets fall from tap to tap. A shift is an offset, counted from the last tap's.
    __host__ __device__ static constexpr int first() { return offset(KERNEL - 1); }
    __host__ __device__ static constexpr int shifts() { return offset(0) - first() + 1; }
    __host__ __device__ static constexpr int shift(int tap) { return offset(tap) - first(); }
    __host__ __device__ static constexpr bool is_read(int shift_of_x) {
        for (int tap = 0; tap < KERNEL; ++tap)
            if (shift(tap) == shift_of_x) return true;
        return false;
    }
    __host__ __device__ static constexpr bool is_read_for(int residue_of_output, int shift_of_x) {
        for (int tap = 0; tap < KERNEL; ++tap)
            if (shift(tap) == shift_of_x && residue(tap) == residue_of_output) return true;
        return false;
    }
    // The number of a residue among those that have a tap, or -1.
    __host__ __device__ static constexpr int live(int residue_of_output) {
        for (int tap = 0; tap < LIVE; ++tap)
            if (residue(tap) == residue_of_output) return tap;
        return -1;
    }
};
typedef Cells<KERNEL_D, STRIDE_D, DILATION_D, SHIFT_D> CellsD;
typedef Cells<KERNEL_H, STRIDE_H, DILATION_H, SHIFT_H> CellsH;
typedef Cells<KERNEL_W, STRIDE_W, DILATION_W, SHIFT_W> CellsW;

constexpr int WARPS = 4;
constexpr int THREADS = 32 * WARPS;
constexpr int TILE_C = 8 * TILES_C;
constexpr int CELLS = 16 * TILES_M;  // of a warp at a time

constexpr int PIECES = HALF_K ? GROUPS : 2 * K_STEPS;
constexpr int BATCH = PIECES * PIECE > 8 * GROUPS ? 1 : 2;  // positions that a thread loads before it stores the first

// Weights in fragment order: [tap][k step][8 channels][lane][word].
constexpr int TAPS = KERNEL_D * KERNEL_H * KERNEL_W;
constexpr int WORDS = HALF_K ? 1 : 2 * PARTS;  // of a lane: K words t and t + 4, then their low parts
constexpr int FRAGMENTS = TAPS * K_STEPS * TILES_C;

// What a warp sums at a time: the outputs of its cells, or of them those of one residue along D.
constexpr int LIVE_D = SPLIT ? 1 : CellsD::LIVE, LIVE = LIVE_D * CellsH::LIVE * CellsW::LIVE;
constexpr int TIMES = SPLIT ? STRIDE_D : 1;

__host__ __device__ constexpr bool summed_at(int time, int residue_d) { return !SPLIT || residue_d == time; }
__host__ __device__ constexpr int sum_number(int live_d, int live_h, int live_w) {
    return (live_d % LIVE_D * CellsH::LIVE + live_h) * CellsW::LIVE + live_w;
}

// Rows of outputs are turned in shared memory, eight channels at a time, by each warp for itself: [8 channels][run]. The distance of
// channels lets a warp write all its banks.
constexpr int RUN = CELLS * STRIDE_W;
constexpr int CHANNEL = at_residue(RUN, 4, 16);
constexpr bool TWO_RUNS = TILES_M == 4 && PRECISION != TF32X3;  // of a warp, in windows; of 3xTF32 registers would not do
constexpr int TURNED = OUT_CHANNELS_LAST ? 0 : 8 * CHANNEL;  // words

// Outputs of a row or, channels-last, channels that are stored at once where the result is aligned for it: parts of a cell, or whole
// cells. Lanes exchange channels of two eights of 16 bits, since one eight is half a sector of memory.
__host__ __device__ constexpr int widest_vector() {
    if (OUT_CHANNELS_LAST) return TILES_C == 2 && sizeof(Stored) == 2 ? 4 : 2;
    int vector = 16 / (int)sizeof(Stored);
    while (STRIDE_W % vector && vector % STRIDE_W) vector /= 2;
    return vector;
}

static_assert(!SPLIT || !BOXED, "a box takes all outputs of its cells at once");
static_assert(!HALF_K || (sizeof(Stored) == 2 && K_STEPS == 1), "one piece of a pair");
static_assert(GROUPS == 1 || (GROUPS == 2 && HALF_K && TILES_C == 2), "a piece and an eight of each group");

constexpr Index OUTSIDE = (Index)(INDEX64 ? 1ll << 46 : -(1ll << 31));  // an offset that no element has

typedef Pack<unsigned, WORDS> Fragment;

// ---- where things are --------------------------------------------------------------------------------------------------

struct Block {
    Index d, h, w;  // its first cell
    long long n;
};

__device__ __forceinline__ Block locate(unsigned index, const Problem& p) {
    Block b;
    b.w = (Index)take(index, p, 2) * (Index)p.box[2];
    b.h = (Index)take(index, p, 1) * (Index)p.box[1];
    b.d = (Index)take(index, p, 0) * (Index)p.box[0];
    b.n = index;
    return b;
}

// The first position of x that a block's cells read.
__device__ __forceinline__ Index first_d(const Block& b, const Problem& p) {
    return b.d + (Index)p.pad[0] / STRIDE_D + CellsD::first();
}
__device__ __forceinline__ Index first_h(const Block& b, const Problem& p) {
    return b.h + (Index)p.pad[1] / STRIDE_H + CellsH::first();
}
__device__ __forceinline__ Index first_w(const Block& b, const Problem& p) {
    return b.w + (Index)p.pad[2] / STRIDE_W + CellsW::first();
}

// Extents of the staged box, and the distance of planes.
struct Staged {
    int d, h, w, plane;
};

__device__ __forceinline__ Staged staged_box(const Problem& p) {
    // Of boxed ones an odd width: rows begin in different banks.
    return {(int)p.box[0] + CellsD::shifts() - 1, (int)p.box[1] + CellsH::shifts() - 1,
            ((int)p.box[2] + CellsW::shifts() - 1) | BOXED, (int)p.plane};
}

struct Cell {
    int d, h, w;  // in the box
};

__device__ __forceinline__ Cell cell_of(int index, const Problem& p) {
    const int row = (int)quotient(index, p.box_magic[0]), slice = (int)quotient(row, p.box_magic[1]);
    return {slice, row - slice * (int)p.box[1], index - row * (int)p.box[2]};
}

// ---- staging -----------------------------------------------------------------------------------------------------------

// Loads a position's channels, or those that exist, before any is used. Of two groups, each has a piece.
template <bool VECTOR>
__device__ __forceinline__ void load(Channels (&c)[PIECES], const Stored* from, bool inside, const Problem& p) {
    const Index step = (Index)p.x_stride[1];
#pragma unroll
    for (int piece = 0; piece < PIECES; ++piece) {
#pragma unroll
        for (int i = 0; i < PIECE; ++i) zero(c[piece].value[i]);
        if (VECTOR) {
            if (inside) c[piece] = reinterpret_cast<const Channels*>(from)[piece];
        } else {
#pragma unroll
            for (int i = 0; i < PIECE; ++i)
                if (inside && (GROUPS == 2 ? i : piece * PIECE + i) < (int)p.c_in)
                    c[piece].value[i] = from[(GROUPS == 2 ? piece * (int)p.c_in + i : piece * PIECE + i) * step];
        }
    }
}

// Stages the box of x that the cells from b on read; `x` is the first channel of the group.
template <bool VECTOR>
__device__ __forceinline__ void stage(Piece* to, const Stored* x, const Block& b, const Staged& s, const Problem& p) {
    const int count = s.d * s.h * s.w;
#pragma unroll 1
    for (int first = threadIdx.x; first < count; first += BATCH * THREADS) {
        Channels c[BATCH][PIECES];
#pragma unroll
        for (int j = 0; j < BATCH; ++j) {
            const int at = first + j * THREADS;
            const int row = (int)quotient(at, p.box_magic[2]), slice = (int)quotient(row, p.box_magic[3]);
            const Index d = first_d(b, p) + slice, h = first_h(b, p) + (row - slice * s.h), w = first_w(b, p) + (at - row * s.w);
            const bool inside = at < count && within(d, p.x_extent[0]) && within(h, p.x_extent[1]) && within(w, p.x_extent[2]);
            load<VECTOR>(c[j], x + d * (Index)p.x_stride[2] + h * (Index)p.x_stride[3] + w * (Index)p.x_stride[4], inside, p);
        }
        issue_in_order();
#pragma unroll
        for (int j = 0; j < BATCH; ++j) {
            const int at = first + j * THREADS;
            if (at >= count) continue;
#pragma unroll
            for (int piece = 0; piece < PIECES; ++piece) {
                Piece parts[PARTS];
                pack(c[j][piece], parts);
#pragma unroll
                for (int part = 0; part < PARTS; ++part) to[(part * PIECES + piece) * s.plane + at] = parts[part];
            }
        }
    }
}

// ---- arithmetic --------------------------------------------------------------------------------------------------------

typedef float Sums[TILES_M][LIVE][TILES_C][4];

// Sixteen positions of x: their parts, each of one piece or of two.
struct Rows {
    unsigned word[PARTS][PIECES == 1 ? 2 : 4];
};

__device__ __forceinline__ void load_rows(Rows& rows, const Piece* from, int plane) {
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
#if HALF_K && GROUPS == 1
        load_matrix_x2(rows.word[part], from + part * PIECES * plane);
#else
        load_matrix_x4(rows.word[part], from + part * PIECES * plane);
#endif
    }
}

// Adds the products for one eight of output channels: of two groups, for the group of this number.
__device__ __forceinline__ void multiply_add(float (&sum)[4], const Rows& a, const Fragment& b, int eight) {
#if HALF_K
    const int word = GROUPS == 2 ? 2 * eight : 0;
    const unsigned rows[2] = {a.word[0][word], a.word[0][word + 1]};
#endif
#if PRECISION == TF32X3
    // The tensor core truncates its sums: three products start from zero, and an ordinary addition collects them. The small
    // ones come first.
    const unsigned high[2] = {b.value[0], b.value[1]}, low[2] = {b.value[WORDS - 2], b.value[WORDS - 1]};
    const float nothing[4] = {0, 0, 0, 0};
    float three[4];
    mma_m16n8k8_tf32(three, a.word[PARTS - 1], high, nothing);
    mma_m16n8k8_tf32(three, a.word[0], low, three);
    mma_m16n8k8_tf32(three, a.word[0], high, three);
#pragma unroll
    for (int i = 0; i < 4; ++i) sum[i] += three[i];
#elif PRECISION == TF32
    mma_m16n8k8_tf32(sum, a.word[0], b.value, sum);
#elif DTYPE == FLOAT16 && HALF_K
    mma_m16n8k8_f16(sum, rows, b.value, sum);
#elif DTYPE == FLOAT16
    mma_m16n8k16_f16(sum, a.word[0], b.value, sum);
#elif HALF_K
    mma_m16n8k8_bf16(sum, rows, b.value, sum);
#else
    mma_m16n8k16_bf16(sum, a.word[0], b.value, sum);
#endif
}

// One row of each sixteen: where it starts, in the piece that the lane loads, and which position of x it is.
struct Lane {
    const Piece* from[TILES_M];
    Index d[TILES_M], h[TILES_M], w[TILES_M];
};

// Whether any of a warp's rows, shifted so many, is inside x along an axis. Only at the borders none is; besides, what is asked at run
// time keeps the compiler from mixing the arithmetic of many shifts, for which registers would not do.
template <int SHIFTS>
__device__ __forceinline__ void find_inside(bool (&inside)[SHIFTS], const Index (&first)[TILES_M], long long extent) {
#pragma unroll
    for (int shift = 0; shift < SHIFTS; ++shift) {
        bool any = false;
#pragma unroll
        for (int m = 0; m < TILES_M; ++m) any |= within(first[m] + shift, extent);
        inside[shift] = __any_sync(~0u, any);
    }
}

// Adds all taps of what is summed at this time.
template <class Weights>
__device__ __forceinline__ void multiply(Sums& sums, const Lane& own, const Weights& weights, const Staged& s, int time,
                                         const Problem& p) {
    bool inside_d[CellsD::shifts()], inside_h[CellsH::shifts()], inside_w[CellsW::shifts()];
    find_inside(inside_d, own.d, p.x_extent[0]);
    find_inside(inside_h, own.h, p.x_extent[1]);
    find_inside(inside_w, own.w, p.x_extent[2]);
#pragma unroll
    for (int shift_d = 0; shift_d < CellsD::shifts(); ++shift_d) {
        if (!(SPLIT ? CellsD::is_read_for(time, shift_d) : CellsD::is_read(shift_d)) || !inside_d[shift_d]) continue;
#pragma unroll
        for (int shift_h = 0; shift_h < CellsH::shifts(); ++shift_h) {
            if (!CellsH::is_read(shift_h) || !inside_h[shift_h]) continue;
            const int line = (shift_d * recomputed(s.h) + shift_h) * s.w;
#pragma unroll
            for (int shift_w = 0; shift_w < CellsW::shifts(); ++shift_w) {
                if (!CellsW::is_read(shift_w) || !inside_w[shift_w]) continue;
#pragma unroll
                for (int k = 0; k < K_STEPS; ++k) {
                    Rows rows[TILES_M];
#pragma unroll
                    for (int m = 0; m < TILES_M; ++m) load_rows(rows[m], own.from[m] + k * 2 * s.plane + line + shift_w, s.plane);
#pragma unroll
                    for (int tap_d = 0; tap_d < KERNEL_D; ++tap_d) {
                        if (CellsD::shift(tap_d) != shift_d || !summed_at(time, CellsD::residue(tap_d))) continue;
#pragma unroll
                        for (int tap_h = 0; tap_h < KERNEL_H; ++tap_h) {
                            if (CellsH::shift(tap_h) != shift_h) continue;
#pragma unroll
                            for (int tap_w = 0; tap_w < KERNEL_W; ++tap_w) {
                                if (CellsW::shift(tap_w) != shift_w) continue;
                                const int tap = (tap_d * KERNEL_H + tap_h) * KERNEL_W + tap_w;
                                const int set = sum_number(tap_d % CellsD::STEP, tap_h % CellsH::STEP, tap_w % CellsW::STEP);
#pragma unroll
                                for (int c = 0; c < TILES_C; ++c) {
                                    const Fragment b = weights((tap * K_STEPS + k) * TILES_C + c);
#pragma unroll
                                    for (int m = 0; m < TILES_M; ++m) multiply_add(sums[m][set][c], rows[m], b, c);
                                }
                            }
                        }
                    }
                }
            }
        }
    }
}

// ---- the result --------------------------------------------------------------------------------------------------------

// The sum of a residue, of `two` bias values if no tap reaches it.
__device__ __forceinline__ float sum_of(const Sums& sums, const float (&bias)[TILES_C][2], int m, int live_d, int live_h, int live_w,
                                        int c, int i) {
    if (live_d < 0 || live_h < 0 || live_w < 0) return bias[c][i % 2];
    return sums[m][sum_number(live_d, live_h, live_w)][c][i];
}

#if BOXED
#include "narrow_box.cuh"
#elif OUT_CHANNELS_LAST
// The four lanes that share a row have eight channels that follow each other, two each.
template <int VECTOR>
__device__ __forceinline__ void store_channels(const float (&two)[TILES_C][2], int channels, bool inside, Stored* to, const Problem& p) {
#pragma unroll
    for (int c = 0; c < TILES_C; ++c) {
        const int channel = c * 8 + threadIdx.x % 4 * 2, left = inside ? channels - channel : 0;
        if (VECTOR == 2) {
            const Pack<float, 2> both = {two[c][0], two[c][1]};
            if (left > 0) store_vector(both, to + channel);
        } else {
#pragma unroll
            for (int i = 0; i < 2; ++i)
                if (i < left) narrow(two[c][i], to[(channel + i) * (Index)p.out_stride[1]]);
        }
    }
}

// Of two eights of 16 bits, lanes exchange channels, so that one instruction stores both: afterwards lanes 0 and 2 have four of the
// first, and 1 and 3 of the second.
__device__ __forceinline__ void store_two_eights(const float (&two)[TILES_C][2], int channels, bool inside, Stored* to) {
    const int channel = threadIdx.x % 2 * 8 + threadIdx.x % 4 / 2 * 4;
    unsigned words[2];
#pragma unroll
    for (int c = 0; c < 2; ++c) words[c] = narrow_two<Stored>(two[c % TILES_C][0], two[c % TILES_C][1]);
    exchange(words[0], words[1], 1);
    if (inside && channel < channels) store_words(to + channel, words);
}

template <int VECTOR>
__device__ __forceinline__ void store(float*, const Sums& sums, const float (&bias)[TILES_C][2], int time, int first, int cells,
                                      int channels, const Block& b, Stored* out, const Problem& p) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int half = 0; half < 2 * TILES_M; ++half) {
        const int index = first + half * 8 + lane / 4;
        if (VECTOR <= 2 && index >= cells) continue;  // all lanes take part where they exchange
        const Cell cell = cell_of(index, p);
        const Index d = (b.d + cell.d) * STRIDE_D, h = (b.h + cell.h) * STRIDE_H, w = (b.w + cell.w) * STRIDE_W;
        Stored* const to = out + d * (Index)p.out_stride[2] + h * (Index)p.out_stride[3] + w * (Index)p.out_stride[4];
#pragma unroll
        for (int line = 0; line < STRIDE_D * STRIDE_H; ++line) {
            const int r_h = line % STRIDE_H, r_d = line / STRIDE_H;
            if (!summed_at(time, r_d)) continue;
            const bool in_line = index < cells && within(d + r_d, p.out_extent[0]) && within(h + r_h, p.out_extent[1]);
            // A branch, which also keeps the compiler from working out all addresses at once.
            if (VECTOR <= 2 ? !in_line : !__any_sync(~0u, in_line)) continue;
            Stored* here = to + r_d * (Index)p.out_stride[2] + r_h * (Index)p.out_stride[3];
#pragma unroll
            for (int r_w = 0; r_w < STRIDE_W; ++r_w) {
                float two[TILES_C][2];
#pragma unroll
                for (int c = 0; c < TILES_C; ++c)
#pragma unroll
                    for (int i = 0; i < 2; ++i)
                        two[c][i] = sum_of(sums, bias, half / 2, CellsD::live(r_d), CellsH::live(r_h), CellsW::live(r_w), c,
                                           half % 2 * 2 + i);
                const bool inside = in_line && within(w + r_w, p.out_extent[2]);
                if constexpr (VECTOR > 2) {
                    store_two_eights(two, channels, inside, here);
                } else {
                    store_channels<VECTOR>(two, channels, inside, here, p);
                }
                here += (Index)p.out_stride[4];
            }
        }
    }
}
#else
// Turns eight channels of one residue along D and H: consecutive words are consecutive outputs.
__device__ __forceinline__ void turn(float* turned, const Sums& sums, const float (&bias)[TILES_C][2], int live_d, int live_h, int c) {
    constexpr int WORDS_AT_ONCE = STRIDE_W == 2 || STRIDE_W == 4 ? STRIDE_W : 1;  // of a cell
    const int lane = threadIdx.x % 32;
    float* const to = turned + lane % 4 * 2 * CHANNEL + lane / 4 * STRIDE_W;
#pragma unroll
    for (int m = 0; m < TILES_M; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
#pragma unroll
            for (int r_w = 0; r_w < STRIDE_W; r_w += WORDS_AT_ONCE) {
                Pack<float, WORDS_AT_ONCE> words;
#pragma unroll
                for (int v = 0; v < WORDS_AT_ONCE; ++v)
                    words.value[v] = sum_of(sums, bias, m, live_d, live_h, CellsW::live(r_w + v), c, i);
                *reinterpret_cast<Pack<float, WORDS_AT_ONCE>*>(to + i % 2 * CHANNEL + (m * 16 + i / 2 * 8) * STRIDE_W + r_w) = words;
            }
        }
    }
}

// Where a lane finds the vectors that it stores, and where they go.
template <int VECTOR> struct Targets {
    static constexpr int VECTORS = RUN / VECTOR;  // of a channel
    static constexpr int FIT = VECTORS < 32 && 32 % VECTORS == 0 ? 32 / VECTORS : 1;
    static constexpr int TOGETHER = FIT < 8 ? FIT : 8;  // channels that a warp reads at once
    static constexpr int COUNT = ceil_div(VECTORS, 32);  // of a lane, of each channel

    int channel;             // the lane's first one
    int from[COUNT];         // word of the run
    Index d[COUNT], h[COUNT];  // of the cell's first output
    Index offset[COUNT];     // likewise, or OUTSIDE
};

// Stores eight channels, of which `left` exist; `inside` says which targets do.
template <int VECTOR, bool WHOLE>
__device__ __forceinline__ void store_eight(Stored* out, const float* turned, const Targets<VECTOR>& t,
                                            const bool (&inside)[Targets<VECTOR>::COUNT], int left, long long step) {
    constexpr int TOGETHER = Targets<VECTOR>::TOGETHER;
    typedef Pack<float, VECTOR < 4 ? VECTOR : 4> Words;
    constexpr int LOADS = VECTOR < 4 ? 1 : VECTOR / 4;
#pragma unroll
    for (int j = 0; j < Targets<VECTOR>::COUNT; ++j) {
        if (!inside[j]) continue;
        Stored* to = out + t.offset[j];
        const float* const from = turned + t.channel * CHANNEL + t.from[j];
#pragma unroll
        for (int c = 0; c < 8; c += TOGETHER) {
            Pack<float, VECTOR> values;
#pragma unroll
            for (int i = 0; i < LOADS; ++i)
                reinterpret_cast<Words*>(&values)[i] = reinterpret_cast<const Words*>(from + c * CHANNEL)[i];
            if (WHOLE || t.channel + c < left) store_vector(values, to);
            to += TOGETHER * step;
        }
    }
}

// Stores long runs that lie in one row each, but start anywhere, of which a warp has one or two: in windows of 32 outputs whose address is
// a multiple of 32, since a sector of memory that is written in two parts costs as much as two. Windows differ from channel to channel.
template <int RUNS>
__device__ __forceinline__ void store_windows(float* turned, const Sums& sums, const float (&bias)[TILES_C][2], int time, int first,
                                              int cells, int channels, const Block& b, Stored* out, const Problem& p) {
    constexpr int LONG = RUN / RUNS;
    const int lane = threadIdx.x % 32;
    const long long step = p.out_stride[1];
    Index d[RUNS], h[RUNS], start[RUNS];
    int length[RUNS];
#pragma unroll
    for (int run = 0; run < RUNS; ++run) {
        const int index = first + run * (CELLS / RUNS);
        const Cell cell = cell_of(index, p);
        const Index w = (b.w + cell.w) * STRIDE_W;
        d[run] = (b.d + cell.d) * STRIDE_D, h[run] = (b.h + cell.h) * STRIDE_H;
        start[run] = d[run] * (Index)p.out_stride[2] + h[run] * (Index)p.out_stride[3] + w;
        length[run] = index < cells ? (int)max(0ll, min((long long)LONG, p.out_extent[2] - w)) : 0;
    }
#pragma unroll
    for (int line = 0; line < STRIDE_D * STRIDE_H; ++line) {
        const int r_h = line % STRIDE_H, r_d = line / STRIDE_H;
        if (!summed_at(time, r_d)) continue;
        if (RUNS == 1 && (!within(d[0] + r_d, p.out_extent[0]) || !within(h[0] + r_h, p.out_extent[1]))) continue;
#pragma unroll
        for (int c = 0; c < TILES_C; ++c) {
            __syncwarp();  // what was turned before is read
            turn(turned, sums, bias, CellsD::live(r_d), CellsH::live(r_h), c);
            __syncwarp();
#pragma unroll
            for (int run = 0; run < RUNS; ++run) {
                if (RUNS > 1 && (!within(d[run] + r_d, p.out_extent[0]) || !within(h[run] + r_h, p.out_extent[1]))) continue;
                Stored* to = out + (start[run] + r_d * (Index)p.out_stride[2] + r_h * (Index)p.out_stride[3]) + c * 8 * step;
#pragma unroll 4
                for (int one = 0; one < min(8, channels - c * 8); ++one) {
                    // Where the lane is in the first window, from the run's start on. No address of a window carries over.
                    constexpr unsigned WINDOW = 32 * sizeof(Stored);
                    const unsigned long long address = (unsigned long long)to;
                    const int at = lane - (int)((unsigned)address % WINDOW / sizeof(Stored));
                    const float* const from = turned + run * LONG + one * CHANNEL + at;
                    Stored* const target = worked_out(reinterpret_cast<Stored*>((address & ~(WINDOW - 1ull)) | lane * sizeof(Stored)));
#pragma unroll
                    for (int window = 0; window < LONG + 32; window += 32)
                        if (window == 0 ? (unsigned)at < (unsigned)length[run] : at < length[run] - window)
                            narrow(from[window], target[window]);
                    to += step;
                }
            }
        }
    }
}

template <int VECTOR>
__device__ __forceinline__ void store(float* turned, const Sums& sums, const float (&bias)[TILES_C][2], int time, int first,
                                      int cells, int channels, const Block& b, Stored* out, const Problem& p) {
    typedef Targets<VECTOR> T;
    const int lane = threadIdx.x % 32;
    const long long step = p.out_stride[1];
    T t;
    t.channel = T::TOGETHER > 1 ? lane / T::VECTORS : 0;
#pragma unroll
    for (int j = 0; j < T::COUNT; ++j) {
        t.from[j] = (T::TOGETHER > 1 ? lane % T::VECTORS : lane + 32 * j) * VECTOR;
        const int index = first + t.from[j] / STRIDE_W;
        const Cell cell = cell_of(index, p);
        const Index w = (b.w + cell.w) * STRIDE_W + t.from[j] % STRIDE_W;
        t.d[j] = (b.d + cell.d) * STRIDE_D;
        t.h[j] = (b.h + cell.h) * STRIDE_H;
        t.offset[j] = t.d[j] * (Index)p.out_stride[2] + t.h[j] * (Index)p.out_stride[3] + w * (Index)p.out_stride[4];
        if (index >= cells || t.from[j] >= RUN || t.channel >= 8 || !within(w, p.out_extent[2])) t.offset[j] = OUTSIDE;
    }
    out += t.channel * step;
#pragma unroll
    for (int r_d = 0; r_d < STRIDE_D; ++r_d) {
        if (!summed_at(time, r_d)) continue;
#pragma unroll
        for (int r_h = 0; r_h < STRIDE_H; ++r_h) {
            bool inside[T::COUNT];
#pragma unroll
            for (int j = 0; j < T::COUNT; ++j)
                inside[j] = t.offset[j] != OUTSIDE && within(t.d[j] + r_d, p.out_extent[0]) &&
                            within(t.h[j] + r_h, p.out_extent[1]);
            Stored* to = out + r_d * (Index)p.out_stride[2] + r_h * (Index)p.out_stride[3];
#pragma unroll
            for (int c = 0; c < TILES_C; ++c) {
                __syncwarp();  // what was turned before is read
                turn(turned, sums, bias, CellsD::live(r_d), CellsH::live(r_h), c);
                __syncwarp();
                if (channels - c * 8 >= 8) {
                    store_eight<VECTOR, true>(to, turned, t, inside, 8, step);
                } else {
                    store_eight<VECTOR, false>(to, turned, t, inside, channels - c * 8, step);
                }
                to += 8 * step;
            }
        }
    }
}
#endif

// ---- weights -----------------------------------------------------------------------------------------------------------

// What a lane holds of fragment [tap][k step][8 channels] of a group's tile of output channels, or of two groups' eights.
__device__ __forceinline__ Fragment fragment_of(const Stored* weight, unsigned set, int index, int lane, const Problem& p) {
    const unsigned group = set / (unsigned)p.tiles[3], tile_c = set % (unsigned)p.tiles[3];
    const int eight = index % TILES_C, step = index / TILES_C % K_STEPS, tap = index / TILES_C / K_STEPS;
    const int tap_w = tap % KERNEL_W, tap_h = tap / KERNEL_W % KERNEL_H, tap_d = tap / KERNEL_W / KERNEL_H;
    const int co = (int)tile_c * TILE_C + (GROUPS == 2 ? 0 : eight * 8) + lane / 4;
    weight += p.weight_first + (GROUPS == 2 ? 2 * group + eight : group) * p.weight_group_stride + co * p.weight_stride[1] +
              tap_d * p.weight_stride[2] + tap_h * p.weight_stride[3] + tap_w * p.weight_stride[4];
    Fragment fragment;
#pragma unroll
    for (int i = 0; i < (HALF_K ? 1 : 2); ++i) {
        const int c = (step * 8 + lane % 4 + i * 4) * CHANNELS_A_WORD;
        unsigned word = 0;
        if (co < p.c_out && c < p.c_in) {
            word = bits_of(weight[c * p.weight_stride[0]]);
            if (CHANNELS_A_WORD == 2 && c + 1 < p.c_in) word |= bits_of(weight[(c + 1) * p.weight_stride[0]]) << 16;
        }
        to_operand(word, fragment.value[i], fragment.value[PARTS == 2 ? 2 + i : i]);
    }
    return fragment;
}

// ---- the kernel --------------------------------------------------------------------------------------------------------

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    narrow_groups(const Stored* x, const void* weight, const Stored* bias, Stored* out, const Problem p) {
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    const Staged s = staged_box(p);
    Piece* const box = reinterpret_cast<Piece*>(shared_bytes);
#if BOXED
    Piece* const raw = box + PIECES * s.plane;
    Fragment* const slots = reinterpret_cast<Fragment*>(raw + pieces_of_raw(s));
    char* const result = reinterpret_cast<char*>(slots + (HOLD_WEIGHTS ? 0 : FRAGMENTS * 32));
    const Pitches pitch(p);
#else
    float* const turned = reinterpret_cast<float*>(box + PARTS * PIECES * s.plane);
    Fragment* const slots = reinterpret_cast<Fragment*>(turned + WARPS * TURNED);
#endif
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

    // A block's boxes are all of one group, or two, and one tile of channels, which therefore run fastest.
    const unsigned sets = (unsigned)(p.groups / GROUPS * p.tiles[3]), set = blockIdx.x % sets;
    const long long group = GROUPS * (set / (unsigned)p.tiles[3]);  // or the first of two
    const int tile_c = (int)(set % (unsigned)p.tiles[3]), channels = min(TILE_C, GROUPS * (int)p.c_out - tile_c * TILE_C);
    x += group * p.c_in * p.x_stride[1];
    out += (group * p.c_out + tile_c * TILE_C) * p.out_stride[1];

    float two[TILES_C][2];  // the bias of a lane's channels
#pragma unroll
    for (int c = 0; c < TILES_C; ++c) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int channel = c * 8 + lane % 4 * 2 + i;
            two[c][i] = bias && channel < channels ? widen(bias[(group * p.c_out + tile_c * TILE_C + channel) * p.bias_stride]) : 0.0f;
        }
    }
    // In fragment order already, as the kernel before has put them, or, of small problems, as the call has them.
    wait_for_kernel_before();
    const Fragment* const packed = reinterpret_cast<const Fragment*>(weight) + (long long)set * (FRAGMENTS * 32);
    const Stored* const as_they_are = reinterpret_cast<const Stored*>(weight);
#if HOLD_WEIGHTS
    Fragment held[FRAGMENTS];
#pragma unroll
    for (int i = 0; i < FRAGMENTS; ++i)
        held[i] = p.patches[0] ? fragment_of(as_they_are, set, i, lane, p) : packed[i * 32 + lane];
    const auto weights = [&](int index) { return held[index]; };
#else
    if (p.patches[0]) {
#pragma unroll 4
        for (int i = warp; i < FRAGMENTS; i += WARPS) slots[i * 32 + lane] = fragment_of(as_they_are, set, i, lane, p);
    } else {
        const Piece* const pieces = reinterpret_cast<const Piece*>(packed);
        for (int i = threadIdx.x; i < FRAGMENTS * 32 * WORDS / 4; i += THREADS) reinterpret_cast<Piece*>(slots)[i] = pieces[i];
    }
    const auto weights = [&](int index) { return slots[index * 32 + lane]; };
#endif

    const int cells = (int)(p.box[0] * p.box[1] * p.box[2]);
#if BOXED
    const auto fetch_box = [&](unsigned index) {
        const Block b = locate(index, p);
        if (index < (unsigned)p.blocks) fetch(raw, x + b.n * p.x_stride[0], b, s, p);
    };
    if (p.x_vector) fetch_box(blockIdx.x / sets);
    copy_async_wait<0>();
    __syncthreads();
#endif
    for (unsigned index = blockIdx.x / sets; index < (unsigned)p.blocks; index += gridDim.x / sets) {
        const Block b = locate(index, p);
        const Stored* const from_x = x + b.n * p.x_stride[0];
#if BOXED
        if (p.x_vector) {
            put_in_order(box, raw, b, s, p);
        } else {
            stage<false>(box, from_x, b, s, p);
        }
        store_bulk_wait_until_read();
        __syncthreads();
        if (p.x_vector) fetch_box(index + gridDim.x / sets);
#else
        __syncthreads();  // all warps are done with the box before
        if (X_CHANNELS_LAST && p.x_vector) {
            stage<true>(box, from_x, b, s, p);
        } else {
            stage<false>(box, from_x, b, s, p);
        }
        __syncthreads();
#endif
        Stored* const to = out + b.n * p.out_stride[0];
#if BOXED
        Stored* const first_out = to + (b.d * STRIDE_D * (Index)p.out_stride[2] + b.h * STRIDE_H * (Index)p.out_stride[3] +
                                        b.w * STRIDE_W);
        char* const first_result = result + (unsigned)(unsigned long long)first_out % 16;
#endif
#pragma unroll 1
        for (int first = warp * CELLS; first < cells; first += WARPS * CELLS) {
            Lane own;
#pragma unroll
            for (int m = 0; m < TILES_M; ++m) {
                const Cell cell = cell_of(min(first + m * 16 + lane % 16, cells - 1), p);
                own.from[m] = box + (PIECES == 1 ? 0 : lane / 16 * s.plane) + (cell.d * s.h + cell.h) * s.w + cell.w;
                own.d[m] = first_d(b, p) + cell.d;
                own.h[m] = first_h(b, p) + cell.h;
                own.w[m] = first_w(b, p) + cell.w;
            }
#pragma unroll
            for (int time = 0; time < TIMES; ++time) {
                Sums sums;
                constexpr bool FEW_REGISTERS = PRECISION == TF32X3 || OUT_CHANNELS_LAST;  // then copies do less harm
#pragma unroll
                for (int m = 0; m < TILES_M; ++m)
#pragma unroll
                    for (int live = 0; live < LIVE; ++live)
#pragma unroll
                        for (int c = 0; c < TILES_C; ++c)
#pragma unroll
                            for (int i = 0; i < 4; ++i)
                                sums[m][live][c][i] = FEW_REGISTERS ? two[c][i % 2] : on_its_own(two[c][i % 2]);
                multiply(sums, own, weights, s, time, p);
#if BOXED
                put(first_result, pitch, sums, two, first, cells, b, p);
#elif OUT_CHANNELS_LAST
                if (widest_vector() > 2 && p.out_vector == 1) {
                    store<2>(nullptr, sums, two, time, first, cells, channels, b, to, p);
                    continue;
                }
#else
                if (p.out_vector == 2) {
                    if (TWO_RUNS && p.box[2] < CELLS) {
                        store_windows<TWO_RUNS ? 2 : 1>(turned + warp * TURNED, sums, two, time, first, cells, channels, b, to, p);
                    } else {
                        store_windows<1>(turned + warp * TURNED, sums, two, time, first, cells, channels, b, to, p);
                    }
                    continue;
                }
#endif
#if !BOXED
                if (p.out_vector) {
                    store<widest_vector()>(turned + warp * TURNED, sums, two, time, first, cells, channels, b, to, p);
                } else {
                    store<1>(turned + warp * TURNED, sums, two, time, first, cells, channels, b, to, p);
                }
#endif
            }
        }
#if BOXED
        copy_async_wait<0>();
        publish_shared_writes();
        __syncthreads();  // the box is multiplied, and the next one fetched
        store_box(first_result, pitch, b, channels, first_out, p);
#endif
    }
#if BOXED
    store_bulk_wait();
#endif
}

// Puts the weights of the call in fragment order, once, before the kernel above: [group][tile of output channels][tap][k step]
// [8 channels][lane][word].
extern "C" __global__ void narrow_groups_pack(const Stored* weight, Fragment* packed, const Problem p) {
    const long long index = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    const unsigned set = (unsigned)(index / (FRAGMENTS * 32)), lane_of_set = (unsigned)(index % (FRAGMENTS * 32));
    if (set < p.groups / GROUPS * p.tiles[3]) packed[index] = fragment_of(weight, set, lane_of_set / 32, lane_of_set % 32, p);
}
