// Many input channels to few output channels, on tensor cores (sm_80 and newer): float16, bfloat16 and float32 (as TF32 or 3xTF32).
//
// One GEMM of the positions of x with all taps: M = positions of x, K = input channels, N = taps x output channels. It has as
// many products as the transposed convolution, reads each element of x once for all taps, and has no halo; a few output channels
// fill its columns, since taps do. Then every output is a sum of the columns of the taps that reach it, at the positions from
// which they do: the columns go to shared memory, where threads that own outputs add them up in a fixed order.
//
// A block has a box of positions and slides along D. Outputs that the next planes of x reach, too, wait in shared memory as
// partial sums: nothing is computed twice along D. Along H and W boxes overlap by what taps reach, unless a box holds the whole
// axis.
//
// x goes from global memory to registers, in the order of mma fragments: a thread reads 4 positions x 4 channels at a time,
// along whichever is contiguous. Weights are repacked in fragment order, and stay in shared memory or pass through it.
//
// Compile-time: kernel, stride, dilation, SHIFT_W, output channels of a group, dtype, precision, and tile. Run-time: N, extents,
// padding, input channels, groups, strides, and the box.
#include "pieces.cuh"

#ifndef CHANNELS_OUT  // of a group
#define CHANNELS_OUT 1
#endif
#ifndef WARPS_M  // warps of a block along positions, 32 each, and along columns
#define WARPS_M 4
#define WARPS_N 1
#endif
#ifndef TILES_N  // groups of eight columns a warp owns
#define TILES_N 4
#endif
#ifndef APART  // words of shared memory from column to column: more than a box has positions, for the gaps between rows
#define APART 196
#endif
#ifndef WEIGHTS_STAY  // in shared memory; otherwise so many blocks of 16 input channels come at a time
#define WEIGHTS_STAY 1
#define K_BLOCKS 1
#endif
#ifndef X_CHANNELS_LAST
#define X_CHANNELS_LAST 0
#endif
#ifndef OUT_CHANNELS_LAST
#define OUT_CHANNELS_LAST 0
#endif
#ifndef SHIFT_W  // padding modulo stride along W
#define SHIFT_W 0
#endif
#ifndef OUT_VECTOR  // elements of the result, next to each other in memory, that a store writes where they are aligned
#define OUT_VECTOR 1
#endif
#ifndef MIN_BLOCKS
#define MIN_BLOCKS 1
#endif

#include "aligned_row.cuh"

typedef Axis<KERNEL_D, STRIDE_D, DILATION_D> AxisD;
typedef Axis<KERNEL_H, STRIDE_H, DILATION_H> AxisH;
typedef Axis<KERNEL_W, STRIDE_W, DILATION_W> AxisW;

constexpr int THREADS = 32 * WARPS_M * WARPS_N;
constexpr int TAPS = KERNEL_D * KERNEL_H * KERNEL_W;
constexpr int COLUMNS = TAPS * CHANNELS_OUT;  // in the order of kD, kH, kW, output channel
constexpr int TILES = WARPS_N * TILES_N;
static_assert(TILES * 8 >= COLUMNS, "every column has a place");

constexpr int K_BLOCK = 16;  // input channels, of which each thread has the four from 4 * (lane % 4) on
constexpr int STEPS = sizeof(Stored) == 2 ? 1 : 2;  // mma instructions along a block of channels
// Words of weights that a lane reads at once: of all steps or, of 3xTF32, both parts of one step. A step takes two words.
constexpr int FRAGMENT = sizeof(Stored) == 2 ? 2 : 4;
constexpr int TILE_WORDS = PARTS * 32 * FRAGMENT;
constexpr int BLOCK_WORDS = TILES * TILE_WORDS;  // weights of a block of channels

constexpr int MORE_H = AxisH::REACH + 1, MORE_W = AxisW::REACH + 1;  // positions of outputs beyond those of x
// With an output_padding below stride or dilation.
__host__ __device__ constexpr int furthest(int kernel, int stride, int dilation) {
    return ((kernel - 1) * dilation + (stride > dilation ? stride : dilation) - 1) / stride;
}
static_assert(furthest(KERNEL_H, STRIDE_H, DILATION_H) <= MORE_H && furthest(KERNEL_W, STRIDE_W, DILATION_W) <= MORE_W,
              "outputs lie at most one position beyond those that taps reach");
// Rows of columns are apart by a gap, so that what is left of a row, or right of it, reads as zero.
constexpr int GAP = round_up(MORE_W + LAST_W, 4);
constexpr int PHASES = STRIDE_D * STRIDE_H * STRIDE_W;
static_assert(APART % 8 == 4, "four threads write columns beside each other to different banks");

constexpr int OVERLAP_H = AxisH::REACH, OVERLAP_W = round_up(LAST_W - FIRST_W, 4);  // of boxes

// Outputs of a thread that are next to each other in memory.
constexpr int ROW_CHANNELS = OUT_CHANNELS_LAST ? CHANNELS_OUT : 1;
constexpr int ROW = STRIDE_W * ROW_CHANNELS;
static_assert(ROW % OUT_VECTOR == 0, "whole stores");

struct Accumulators {
    float value[TILES_N][2][4];  // of 16 positions each, as an mma has them
};

// 4 channels x 4 positions as they were read, in whole words: nothing waits for them before they are used. Vectors of four lie
// along positions of rows, or along channels.
constexpr int WORDS = (int)sizeof(Stored);  // of four elements
typedef Pack<unsigned, WORDS> Four;
struct Fetched {
    Four vector[4];

    // One element's bits, in a word of its own.
    __device__ __forceinline__ unsigned at(int channel, int position) const {
        const int first = X_CHANNELS_LAST ? position : channel, second = X_CHANNELS_LAST ? channel : position;
        if (WORDS == 4) return vector[first].value[second % WORDS];
        return vector[first].value[second / 2] >> second % 2 * 16 & 0xffffu;
    }
    // Two channels of 16 bits that follow each other, the first of which is even.
    __device__ __forceinline__ unsigned two_at(int channel, int position) const {
        if (X_CHANNELS_LAST) return vector[position].value[channel / 2];
        return select_bytes(vector[channel].value[position / 2], vector[channel + 1].value[position / 2], position % 2 ? 0x7632 : 0x5410);
    }
};

// Where the four positions of a thread begin in the block's box: in which plane, row of it and column.
struct Place {
    int d, h, w;

    __device__ __forceinline__ Place(const Problem& p, int thread) {
        const unsigned four = (unsigned)thread / 32 % WARPS_M * 8 + (unsigned)thread % 32 / 4, fours = (unsigned)p.box[2] / 4;
        const unsigned row = four / fours;
        w = (int)(four - row * fours) * 4;
        d = (int)(row / (unsigned)p.box[1]);
        h = (int)row - d * (int)p.box[1];
    }
};

// What a thread reads of x: the offset of its first position, from the block's first one, the plane of the box that it is in, and
// how many of its positions are there.
struct Places {
    Index offset;
    int plane, count;
};

// What a block works on. Positions count from those of the box along H and W.
struct Block {
    Index first_h, first_w;  // of x
    int own_h, end_h, own_w, end_w;  // outputs of the block: positions q from the former, before the latter
    Index first_q, end_q;  // along D
    long long n, group;
};

// Along an axis with several boxes, each next one begins `overlap` positions before the end of the last one. Outputs read up to
// `ahead` positions further on.
__device__ __forceinline__ void cut(const Problem& p, int axis, int overlap, int ahead, Index first_q, Index last_q, unsigned tile,
                                    Index& first, int& own, int& end) {
    const int box = (int)p.box[axis];
    first = (Index)tile * (box - overlap);
    own = tile ? overlap - ahead : 0;
    if (own < first_q - first) own = (int)min(first_q - first, (Index)1 << 30);  // maybe beyond its end
    end = (long long)tile + 1 < p.tiles[axis] ? box - ahead : (int)(last_q + 1 - first);
}

__device__ __forceinline__ Block locate(const Problem& p) {
    unsigned index = blockIdx.x;
    Block b;
    const unsigned tile_w = take(index, p, 2);
    const unsigned tile_h = take(index, p, 1);
    const unsigned part = take(index, p, 0);
    b.group = take(index, p, 4);
    b.n = index;
    cut(p, 1, OVERLAP_H, 0, (Index)(p.pad[1] / STRIDE_H), (Index)((p.out_extent[1] - 1 + p.pad[1]) / STRIDE_H), tile_h, b.first_h,
        b.own_h, b.end_h);
    const Index low_w = (Index)(p.pad[2] / STRIDE_W);
    cut(p, 2, OVERLAP_W, LAST_W, low_w, low_w + (Index)((p.out_extent[2] - 1) / STRIDE_W), tile_w, b.first_w, b.own_w, b.end_w);
    const Index low = (Index)(p.pad[0] / STRIDE_D);
    const Index high = (Index)((p.out_extent[0] - 1 + p.pad[0]) / STRIDE_D) + 1;
    const Index length = (high - low + (Index)p.tiles[0] - 1) / (Index)p.tiles[0];
    b.first_q = low + (Index)part * length;
    b.end_q = min(b.first_q + length, high);
    return b;
}

__device__ __forceinline__ Places places_of(const Problem& p, const Block& b) {
    const Place at(p, threadIdx.x);
    const Index left = (Index)p.x_extent[2] - b.first_w - at.w;
    const bool inside = at.d < p.box[0] && within(b.first_h + at.h, p.x_extent[1]) && left > 0;
    return {inside ? at.d * (Index)p.x_stride[2] + at.h * (Index)p.x_stride[3] + at.w * (Index)p.x_stride[4] : 0, at.d,
            inside ? (int)min(left, (Index)4) : 0};
}

// ---- x ---------------------------------------------------------------------------------------------------------------

// Reads a block of channels of which so many are left, for the planes of a box that are there.
__device__ __forceinline__ void fetch(Fetched& to, const Stored* x, const Problem& p, const Places& places, int planes, int left) {
    const int first = threadIdx.x % 4 * 4;
    const int positions = places.plane < planes ? places.count : 0, channels = left - first;
    x += places.offset + first * (Index)p.x_stride[1];
#pragma unroll
    for (int i = 0; i < 4; ++i) to.vector[i] = Four{};
    if (p.x_vector) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if ((X_CHANNELS_LAST ? i : 0) < positions && (X_CHANNELS_LAST ? 0 : i) < channels)
                to.vector[i] = *reinterpret_cast<const Four*>(x + i * (Index)p.x_stride[X_CHANNELS_LAST ? 4 : 1]);
        }
        return;
    }
    const Index outer = (Index)p.x_stride[X_CHANNELS_LAST ? 4 : 1], inner = (Index)p.x_stride[X_CHANNELS_LAST ? 1 : 4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const Stored* const from = worked_out(x + i * outer);  // not 16 addresses at once, which take registers
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const int position = X_CHANNELS_LAST ? i : j, channel = X_CHANNELS_LAST ? j : i;
            if (position < positions && channel < channels)
                to.vector[i].value[j * WORDS / 4] |= bits_of(from[j * inner]) << (WORDS == 2 ? j % 2 * 16 : 0);
        }
    }
}

// ---- products --------------------------------------------------------------------------------------------------------

#if PRECISION == NATIVE
__device__ __forceinline__ void multiply(Accumulators& acc, const Fetched& x, const unsigned* weights) {
    unsigned a[2][4];
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
        for (int i = 0; i < 4; ++i)
            a[m][i] = x.two_at(i / 2 * 2, 2 * m + i % 2);
#pragma unroll
    for (int tile = 0; tile < TILES_N; ++tile) {
        const Pack<unsigned, 2> b = *reinterpret_cast<const Pack<unsigned, 2>*>(weights + tile * TILE_WORDS);
#pragma unroll
        for (int m = 0; m < 2; ++m) {
#if DTYPE == FLOAT16
            mma_m16n8k16_f16(acc.value[tile][m], a[m], b.value, acc.value[tile][m]);
#else
            mma_m16n8k16_bf16(acc.value[tile][m], a[m], b.value, acc.value[tile][m]);
#endif
        }
    }
}
#elif PRECISION == TF32
__device__ __forceinline__ void multiply(Accumulators& acc, const Fetched& x, const unsigned* weights) {
    unsigned a[STEPS][2][4];
#pragma unroll
    for (int step = 0; step < STEPS; ++step)
#pragma unroll
        for (int m = 0; m < 2; ++m)
#pragma unroll
            for (int i = 0; i < 4; ++i) a[step][m][i] = to_tf32(__uint_as_float(x.at(2 * step + i / 2, 2 * m + i % 2)));
#pragma unroll
    for (int tile = 0; tile < TILES_N; ++tile) {
        const Piece words = *reinterpret_cast<const Piece*>(weights + tile * TILE_WORDS);
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            const unsigned b[2] = {words.value[2 * step], words.value[2 * step + 1]};
#pragma unroll
            for (int m = 0; m < 2; ++m) mma_m16n8k8_tf32(acc.value[tile][m], a[step][m], b, acc.value[tile][m]);
        }
    }
}
#else
__device__ __forceinline__ void multiply(Accumulators& acc, const Fetched& x, const unsigned* weights) {
    unsigned a[STEPS][2][4], low_a[STEPS][2][4];
#pragma unroll
    for (int step = 0; step < STEPS; ++step)
#pragma unroll
        for (int m = 0; m < 2; ++m)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                split(__uint_as_float(x.at(2 * step + i / 2, 2 * m + i % 2)), a[step][m][i], low_a[step][m][i]);
#pragma unroll
    for (int tile = 0; tile < TILES_N; ++tile) {
        if (tile % 2 == 0) issue_in_order();  // else ptxas reads weights far ahead, and spills
        // The tensor core truncates its sums: so those of a block of channels start from zero, and an ordinary addition ends them.
        float sum[2][4] = {};
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            const Piece words = *reinterpret_cast<const Piece*>(weights + tile * TILE_WORDS + step * 32 * FRAGMENT);
            const unsigned b[2] = {words.value[0], words.value[1]}, low_b[2] = {words.value[2], words.value[3]};
#pragma unroll
            for (int m = 0; m < 2; ++m) {
                mma_m16n8k8_tf32(sum[m], low_a[step][m], b, sum[m]);
                mma_m16n8k8_tf32(sum[m], a[step][m], low_b, sum[m]);
                mma_m16n8k8_tf32(sum[m], a[step][m], b, sum[m]);
            }
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) acc.value[tile][i / 4][i % 4] += sum[i / 4][i % 4];
    }
}
#endif

// ---- sums ------------------------------------------------------------------------------------------------------------

__device__ __forceinline__ void write_columns(const Accumulators& acc, float* columns, const Problem& p) {
    const int thread = recomputed(threadIdx.x), warp_n = thread / 32 / WARPS_M;
    const Place at(p, thread);
    if (at.d >= p.box[0]) return;
    const int first = warp_n * TILES_N * 8 + thread % 4 * 2;
    float* const to = columns + first * APART + (at.d * (int)p.box[1] + at.h) * ((int)p.box[2] + GAP) + GAP + at.w;
#pragma unroll
    for (int tile = 0; tile < TILES_N; ++tile) {
        const float(&sum)[2][4] = acc.value[tile];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            if (first + tile * 8 + i < COLUMNS)
                *reinterpret_cast<Pack<float, 4>*>(to + (tile * 8 + i) * APART) =
                    Pack<float, 4>{{sum[0][i], sum[0][2 + i], sum[1][i], sum[1][2 + i]}};
        }
    }
}

// n / d for small numbers, with the inverse of d.
__device__ __forceinline__ int divided(int n, float inverse) { return (int)(((float)n + 0.5f) * inverse); }

// Positions q of outputs that a box reaches along H and W, of which a block may own a part.
struct Reached {
    int h, w;

    __device__ __forceinline__ explicit Reached(const Problem& p) : h((int)p.box[1] + MORE_H), w((int)p.box[2] + MORE_W) {}

    // Partial sums: [plane][phase and channel][h][w].
    __device__ __forceinline__ int plane() const { return PHASES * CHANNELS_OUT * h * w; }
};

// Sums up the outputs of the planes q up to q + count - 1 along D, of columns of box[0] planes of x from q on, unless there are
// none, and of partial sums. The first so many, `complete`, are stored; the others are the next partial sums.
__device__ __forceinline__ void sum_up(const float* columns, const float* partial, float* next_partial, const Problem& p, const Block& b,
                                       Index q, int depth, int complete, int count, const Stored* bias, Stored* out) {
    const Reached reached(p);
    const int height = (int)p.box[1], pitch = (int)p.box[2] + GAP;
    const int own_h = b.end_h - b.own_h, own_w = b.end_w - b.own_w;
    if (own_h <= 0 || own_w <= 0) return;
    out += b.n * p.out_stride[0] + b.group * CHANNELS_OUT * p.out_stride[1];
    const float of_h = 1.0f / own_h, of_w = 1.0f / own_w;
    for (int item = threadIdx.x; item < count * own_h * own_w; item += THREADS) {
        const int line = divided(item, of_w), w = b.own_w + item - line * own_w;
        const int d = divided(line, of_h), h = b.own_h + line - d * own_h;
        if (q + d < b.first_q || q + d >= b.end_q) continue;
        const float* const from = columns + (d * height + h) * pitch + GAP + w;
        const int place = h * reached.w + w;
        const bool is_complete = d < complete, has_partial = d < AxisD::REACH;
        const Index first_w = (b.first_w + w) * STRIDE_W - ((Index)p.pad[2] - SHIFT_W);
#pragma unroll
        for (int phase_d = 0; phase_d < STRIDE_D; ++phase_d) {
#pragma unroll
            for (int phase_h = 0; phase_h < STRIDE_H; ++phase_h) {
                float sum[STRIDE_W * CHANNELS_OUT];  // [phase][channel]
                const int first_sum = (phase_d * STRIDE_H + phase_h) * STRIDE_W * CHANNELS_OUT;
                const float* const before = partial + d * reached.plane() + first_sum * reached.h * reached.w + place;
#pragma unroll
                for (int i = 0; i < STRIDE_W * CHANNELS_OUT; ++i)
                    sum[i] = has_partial ? before[i * reached.h * reached.w] : 0.0f;
#pragma unroll
                for (int tap_d = 0; tap_d < KERNEL_D; ++tap_d) {
                    if (AxisD::phase_of(tap_d) != phase_d) continue;
#pragma unroll
                    for (int tap_h = 0; tap_h < KERNEL_H; ++tap_h) {
                        if (AxisH::phase_of(tap_h) != phase_h) continue;
                        const int back_d = AxisD::back(tap_d), back_h = AxisH::back(tap_h);
                        if ((unsigned)(d - back_d) >= (unsigned)depth || (unsigned)(h - back_h) >= (unsigned)height) continue;
                        const float* const row = from - (back_d * height + back_h) * pitch;
#pragma unroll
                        for (int i = 0; i < KERNEL_W * CHANNELS_OUT; ++i) {
                            const int tap_w = i / CHANNELS_OUT;
                            sum[residue_w(tap_w) * CHANNELS_OUT + i % CHANNELS_OUT] +=
                                row[((tap_d * KERNEL_H + tap_h) * KERNEL_W * CHANNELS_OUT + i) * APART + offset_w(tap_w)];
                        }
                    }
                }
                if (!is_complete) {
                    float* const after = next_partial + (d - complete) * reached.plane() + first_sum * reached.h * reached.w + place;
#pragma unroll
                    for (int i = 0; i < STRIDE_W * CHANNELS_OUT; ++i) after[i * reached.h * reached.w] = sum[i];
                    continue;
                }
                const Index out_d = (q + d) * STRIDE_D + phase_d - (Index)p.pad[0];
                const Index out_h = (b.first_h + h) * STRIDE_H + phase_h - (Index)p.pad[1];
                if (!within(out_d, p.out_extent[0]) || !within(out_h, p.out_extent[1])) continue;
                Stored* const to = out + out_d * (Index)p.out_stride[2] + out_h * (Index)p.out_stride[3] +
                                   first_w * (Index)p.out_stride[4];
                const bool is_whole = OUT_VECTOR > 1 && p.out_vector && first_w + STRIDE_W <= (Index)p.out_extent[2];
#pragma unroll
                for (int i = 0; i < STRIDE_W * CHANNELS_OUT; ++i)
                    sum[i] += bias ? widen(bias[(b.group * CHANNELS_OUT + i % CHANNELS_OUT) * p.bias_stride]) : 0.0f;
#pragma unroll
                for (int channel = 0; channel < CHANNELS_OUT; channel += ROW_CHANNELS) {
                    if (is_whole) {
#pragma unroll
                        for (int i = 0; i < ROW; i += OUT_VECTOR) {
                            Pack<float, OUT_VECTOR> values;
#pragma unroll
                            for (int j = 0; j < OUT_VECTOR; ++j)
                                values.value[j] = sum[(i + j) / ROW_CHANNELS * CHANNELS_OUT + channel + (i + j) % ROW_CHANNELS];
                            store_vector(values, to + channel * (Index)p.out_stride[1] + i);
                        }
                        continue;
                    }
#pragma unroll
                    for (int i = 0; i < ROW; ++i) {
                        const int phase = i / ROW_CHANNELS, c = channel + i % ROW_CHANNELS;
                        if (first_w + phase < (Index)p.out_extent[2])
                            narrow(sum[phase * CHANNELS_OUT + c],
                                   to[phase * (Index)p.out_stride[4] + c * (Index)p.out_stride[1]]);
                    }
                }
            }
        }
    }
}

// ---- the kernel ------------------------------------------------------------------------------------------------------

__device__ __forceinline__ void copy_weights(unsigned* to, const unsigned* from, int words) {
    for (int i = threadIdx.x * 4; i < words; i += THREADS * 4) copy_async_16(to + i, from + i, 16);
    copy_async_commit();
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    tap_columns(const Stored* x, const unsigned* packed, const Stored* bias, Stored* out, const Problem p) {
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    const int blocks = ((int)p.c_in + K_BLOCK - 1) / K_BLOCK;
    unsigned* const weights = reinterpret_cast<unsigned*>(shared_bytes);
    float* const columns = reinterpret_cast<float*>(weights + (WEIGHTS_STAY ? blocks : 2 * K_BLOCKS) * BLOCK_WORDS);
    float* const partial = columns + COLUMNS * APART;
    const int partial_words = AxisD::REACH * Reached(p).plane();  // of which there are two: what was before, and what comes next
    // In shared memory, where it takes no registers while products do.
    Block* const kept = reinterpret_cast<Block*>(partial + round_up(2 * partial_words, 2));

    const Block b = locate(p);
    if (threadIdx.x == 0) *kept = b;
    const Places places = places_of(p, b);
    const int warp_n = threadIdx.x / 32 / WARPS_M;
    const unsigned* const mine = weights + warp_n * TILES_N * TILE_WORDS + threadIdx.x % 32 * FRAGMENT;
    const Index begin = max(b.first_q - AxisD::REACH, (Index)0), end = min(b.end_q, (Index)p.x_extent[0]);
    x += b.n * p.x_stride[0] + b.group * p.c_in * p.x_stride[1] + begin * p.x_stride[2] + b.first_h * p.x_stride[3] +
         b.first_w * p.x_stride[4];
    packed += b.group * blocks * (long long)BLOCK_WORDS;

    for (int i = threadIdx.x; i < COLUMNS * APART + partial_words; i += THREADS) columns[i] = 0;
    wait_for_kernel_before();  // it packs the weights
    copy_weights(weights, packed, WEIGHTS_STAY ? blocks * BLOCK_WORDS : min(K_BLOCKS, blocks) * BLOCK_WORDS);

    const int depth = (int)p.box[0];
    int stage = 0, turn = 0;
    Index q = begin;
    Fetched next;
    fetch(next, x, p, places, (int)min(end - q, (Index)depth), (int)p.c_in);
    if (WEIGHTS_STAY) copy_async_wait<0>();
    __syncthreads();
#pragma unroll 1
    for (; q < kept->end_q; q += depth) {
        const bool reads = q < end;  // and not what no further plane of x reaches
        if (reads) {
            Accumulators acc;
#pragma unroll
            for (int tile = 0; tile < TILES_N; ++tile)
#pragma unroll
                for (int i = 0; i < 8; ++i) acc.value[tile][i / 4][i % 4] = 0;
            const int planes = (int)min(end - q, (Index)depth);
#pragma unroll 1
            for (int block = 0; block < blocks; ++block) {
                if (!WEIGHTS_STAY && block % K_BLOCKS == 0) {
                    copy_async_wait<0>();
                    __syncthreads();  // this stage has landed, and nobody reads the other one any more
                    const int after = block + K_BLOCKS < blocks ? block + K_BLOCKS : 0;
                    copy_weights(weights + (stage ^ 1) * K_BLOCKS * BLOCK_WORDS, packed + after * (long long)BLOCK_WORDS,
                                 min(K_BLOCKS, blocks - after) * BLOCK_WORDS);
                    stage ^= 1;
                }
                const Fetched current = next;
                // What comes next, of these planes or of those after them; also where nothing is left to read, so that no register
                // holds one value or another, which would wait for both.
                const bool is_last = block + 1 == blocks;
                const int first = is_last ? 0 : (block + 1) * K_BLOCK;
                const int planes_next = is_last ? (int)max((Index)0, min(end - q - depth, (Index)depth)) : planes;
                fetch(next, (is_last ? x + depth * p.x_stride[2] : x) + first * (Index)p.x_stride[1], p, places, planes_next,
                      (int)p.c_in - first);
                multiply(acc, current, mine + (WEIGHTS_STAY ? block : (stage ^ 1) * K_BLOCKS + block % K_BLOCKS) * BLOCK_WORDS);
            }
            x += depth * p.x_stride[2];
            __syncthreads();  // nobody reads the columns any more
            write_columns(acc, columns, p);
        }
        __syncthreads();
        const int left = (int)(kept->end_q - q);
        const int complete = reads ? min(depth, left) : left, count = reads ? min(depth + AxisD::REACH, left) : left;
        sum_up(columns, partial + turn * partial_words, partial + (turn ^ 1) * partial_words, p, *kept, q, reads ? depth : 0, complete,
               count, bias, out);
        if (!reads) break;
        turn ^= 1;
    }
    copy_async_wait<0>();
}

// Puts the weights of the call in fragment order: [group][block of channels][8 columns][step of 3xTF32][lane][word].
extern "C" __global__ void tap_columns_pack(const Stored* weight, unsigned* packed, const Problem p) {
    let_next_kernel_start();
    const int blocks = ((int)p.c_in + K_BLOCK - 1) / K_BLOCK;
    const long long count = p.groups * blocks * (long long)(TILES * 32);
    long long index = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (index >= count) return;
    const int lane = (int)(index % 32), tile = (int)(index / 32 % TILES);
    unsigned* const to = packed + index / 32 * TILE_WORDS + lane * FRAGMENT;
    index /= 32 * TILES;
    const int block = (int)(index % blocks);
    const long long group = index / blocks;
    const int column = tile * 8 + lane / 4, tap = column / CHANNELS_OUT;
    const int first = block * K_BLOCK + lane % 4 * 4;
    weight += p.weight_first + group * p.weight_group_stride + column % CHANNELS_OUT * p.weight_stride[1] +
              tap / (KERNEL_H * KERNEL_W) * p.weight_stride[2] + tap / KERNEL_W % KERNEL_H * p.weight_stride[3] +
              tap % KERNEL_W * p.weight_stride[4] + first * p.weight_stride[0];
    unsigned value[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
        value[i] = column < COLUMNS && first + i < p.c_in ? bits_of(weight[i * p.weight_stride[0]]) : 0;
    if (PRECISION == NATIVE) {
        to[0] = value[0] | value[1] << 16;
        to[1] = value[2] | value[3] << 16;
        return;
    }
#pragma unroll
    for (int i = 0; i < 4 && i < FRAGMENT; ++i) {
        if (PRECISION == TF32X3) {
            unsigned* const of_step = to + i / 2 * 32 * FRAGMENT;
            split(__uint_as_float(value[i]), of_step[i % 2], of_step[2 + i % 2]);
        } else {
            to[i] = to_tf32(__uint_as_float(value[i]));
        }
    }
}
