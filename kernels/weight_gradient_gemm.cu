// Weight gradient, tensor cores: float16, bfloat16 and float32 (as TF32 or 3xTF32).
//
//     out[ci, co, k] = sum over n, i of  x[n, ci, i] * y[n, co, i*stride + k*dilation - pad]
// A matrix product with M = channels of x, N = channels of y x taps, K = positions i of the whole batch. A block owns a
// tile of weights (channels of a group, one tap along D, some taps along H and W) and a share of the boxes of positions.
// Two boxes alternate in shared memory: asynchronous copies fill one while the tensor cores work on the other. Every tap
// reads the same staged box of y at another offset, and the fragments of x serve all taps of a warp.
//
// Eight positions along W make a *row*, the least depth of a product. Whatever is contiguous in memory stays so in shared
// memory: rows of a channel, where words of two 16-bit positions are put together in registers, since y is read at any
// offset and stride; or (channels-last) channels of a position, which ldmatrix transposes, with the positions along W
// sorted by their remainder modulo the stride, so that a tap's positions are neighbours.
//
// Compile-time: kernel, stride, dilation, dtype, precision and tile, and how wide copies of channels are that are not 16 bytes.
// Run-time: N, extents, padding, channels, strides, the width of other copies, and into how many parts the positions are cut
// (tiles[3]).
#include "boxes.cuh"
#include "partial_sums.cuh"
#include "mma.cuh"

#ifndef WARPS_IN  // warps of a block along the channels of x and y, the taps along H, and the positions
#define WARPS_IN 1
#define WARPS_OUT 2
#define WARPS_H 3
#define WARPS_K 1
#endif
#ifndef TILES_IN  // groups of 16 channels of x and of 8 channels of y that a warp owns
#define TILES_IN 2
#define TILES_OUT 2
#endif
#ifndef TAPS_H  // taps that a warp owns
#define TAPS_H 1
#define TAPS_W 3
#endif
#ifndef BOX_H  // positions of a box along H, and its rows of eight along W
#define BOX_H 8
#define ROWS_W 1
#endif
#ifndef EARLY  // how many elements before the first one needed a staged row of y starts, so that copies are aligned
#define EARLY 0
#endif
#ifndef X_CHANNELS_LAST
#define X_CHANNELS_LAST 0
#endif
#ifndef Y_CHANNELS_LAST
#define Y_CHANNELS_LAST 0
#endif
#ifndef X_COPY_BYTES  // of a channels-last position that copies bring at a time: 16, or 8 or 4 where positions start so
#define X_COPY_BYTES 16
#endif
#ifndef Y_COPY_BYTES
#define Y_COPY_BYTES 16
#endif
#ifndef MIN_BLOCKS
#define MIN_BLOCKS 1
#endif
#ifndef SHARED_BYTES  // what the plan asks for, to be compared with what the kernel needs
#define SHARED_BYTES 0
#endif

constexpr int THREADS_C = 32 * WARPS_IN * WARPS_OUT * WARPS_H;
constexpr int THREADS = THREADS_C * WARPS_K;
constexpr int TILE_IN = 16 * TILES_IN * WARPS_IN;
constexpr int TILE_OUT = 8 * TILES_OUT * WARPS_OUT;
constexpr int TILE_H = TAPS_H * WARPS_H;
constexpr int TILES_H = ceil_div(KERNEL_H, TILE_H);
constexpr int TILES_W = ceil_div(KERNEL_W, TAPS_W);

constexpr int PER_WORD = 4 / (int)sizeof(Stored);
constexpr int ROW = 8;
constexpr int BOX_W = ROW * ROWS_W;
constexpr int STEP_ROWS = PER_WORD == 2 ? 4 : 1;  // an ldmatrix brings four rows
constexpr int DEPTH = STEP_ROWS / PER_WORD;       // products in a step
constexpr int STEPS = BOX_H * ROWS_W / STEP_ROWS;
static_assert(BOX_H * ROWS_W % STEP_ROWS == 0 && (ROWS_W % STEP_ROWS == 0 || STEP_ROWS % ROWS_W == 0), "whole steps");

typedef Staged<TILE_H, STRIDE_H, DILATION_H, BOX_H> AxisH;
typedef Staged<TAPS_W, STRIDE_W, DILATION_W, BOX_W> AxisW;

// How an array's box lies in shared memory. Rows: [channel][h][w], channels-last: [h][w][channel]; distances in words.
struct BoxX {
    static constexpr bool LAST = X_CHANNELS_LAST;
    static constexpr int COPY_BYTES = X_COPY_BYTES;
    static constexpr int CHANNELS = TILE_IN, H = BOX_H, W = BOX_W;
    static constexpr int GAP_H = 1, GAP_W = 1, STEP_W = 1, CLASS = W;
    static constexpr int LOAD = PER_WORD == 2 ? 1 : 2;  // words that a lane reads at a time
    static constexpr int POSITION = at_residue(CHANNELS / PER_WORD, 4, 8);
    static constexpr int LINE = LAST ? W * POSITION : W / PER_WORD;
    static constexpr int CHANNEL = at_residue(H * LINE, 4 * LOAD, 8 * LOAD);
    static constexpr int WORDS = LAST ? H * LINE : CHANNELS * CHANNEL;
    static constexpr int NEXT_ROW = LAST ? ROW * POSITION : ROW * STEP_W / PER_WORD;  // along W
    static constexpr int NEXT_CHANNELS = LAST ? 8 / PER_WORD : 8 * CHANNEL;           // the next eight
};
struct BoxY {
    static constexpr bool LAST = Y_CHANNELS_LAST;
    static constexpr int COPY_BYTES = Y_COPY_BYTES;
    static constexpr int CHANNELS = TILE_OUT, H = AxisH::EXTENT;
    static constexpr int GAP_H = AxisH::GAP, GAP_W = AxisW::GAP, STEP_W = AxisW::STEP;
    static constexpr int CLASS = ceil_div(AxisW::EXTENT, STEP_W);  // positions of equal remainder modulo the step
    static constexpr int W = LAST ? STEP_W * CLASS : round_up(EARLY + AxisW::EXTENT, 4 * PER_WORD);
    static constexpr int APART = 2 * STEP_W / PER_WORD;  // of the words at which neighbouring lanes start
    static constexpr int LOAD = APART % 4 == 0 ? 4 : APART % 2 == 0 ? 2 : 1;
    static constexpr int POSITION = at_residue(CHANNELS / PER_WORD, 4, 8);
    static constexpr int LINE = LAST ? W * POSITION : W / PER_WORD;
    static constexpr int CHANNEL = at_residue(H * LINE, 4 * LOAD, 8 * LOAD);
    static constexpr int WORDS = LAST ? H * LINE : CHANNELS * CHANNEL;
    static constexpr int NEXT_ROW = LAST ? ROW * POSITION : ROW * STEP_W / PER_WORD;  // along W
    static constexpr int NEXT_CHANNELS = LAST ? 8 / PER_WORD : 8 * CHANNEL;           // the next eight
};

constexpr int TILES = TILES_IN * TILES_OUT * TAPS_H * TAPS_W;  // of products of a warp
constexpr int SUMS = 4 * TILES;                                // of a thread
constexpr int VALUES = SUMS * THREADS_C;                       // of a block
constexpr int STAGE = BoxX::WORDS + BoxY::WORDS;
constexpr int TURNED = (WARPS_K - 1) * VALUES;
constexpr int SHARED = 2 * STAGE > TURNED ? 2 * STAGE : TURNED;  // in words
static_assert(SHARED_BYTES == 0 || SHARED * 4 == SHARED_BYTES, "the plan's shared memory is not the kernel's");

// ---- staging ---------------------------------------------------------------------------------------------------------

// Threads take positions, and each a share of the channels: addresses and borders are worked out once a position.
__host__ __device__ constexpr int share_of_channels(int positions, int channels) {
    int groups = 1;
    while (channels % (2 * groups) == 0 && positions * groups * 2 <= THREADS) groups *= 2;
    return channels / groups;
}

// Rows: BYTES of a row at a time, 16 or 4, aligned in memory.
template <class Box, int BYTES>
__device__ __forceinline__ void copy_rows(unsigned* to, const Stored* from, const Place& place, int channels) {
    constexpr int UNIT = BYTES / (int)sizeof(Stored), UNITS = Box::W / UNIT, POSITIONS = Box::H * UNITS;
    constexpr int SHARE = share_of_channels(POSITIONS, Box::CHANNELS);
    const Index step = (Index)place.stride[1];
#pragma unroll 1
    for (int i = threadIdx.x; i < POSITIONS * (Box::CHANNELS / SHARE); i += THREADS) {
        const int column = i % UNITS * UNIT, line = i / UNITS % Box::H, first = i / POSITIONS * SHARE;
        const Index h = place.h + line * Box::GAP_H, w = place.w + column * Box::GAP_W;
        const bool inside = within(h, place.extent[1]) && within(w, place.extent[2]);
        const int bytes = inside ? min(UNIT, (int)min((long long)UNIT, place.extent[2] - w)) * (int)sizeof(Stored) : 0;
        const Stored* source = from;
        if (inside) source += h * (Index)place.stride[3] + w * (Index)place.stride[4] + first * step;
        unsigned* target = to + first * Box::CHANNEL + line * Box::LINE + column / PER_WORD;
        const int left = inside ? channels - first : 0;
#pragma unroll
        for (int c = 0; c < SHARE; ++c) {
            copy_async<BYTES>(target, c < left ? source : from, c < left ? bytes : 0);
            source += step;
            target += Box::CHANNEL;
        }
    }
}

// Rows of 16-bit numbers whose words are not aligned in memory: through registers.
template <class Box>
__device__ __forceinline__ void copy_row_elements(unsigned* to, const Stored* from, const Place& place, int channels) {
    constexpr int UNITS = Box::W / PER_WORD, POSITIONS = Box::H * UNITS;
    constexpr int SHARE = share_of_channels(POSITIONS, Box::CHANNELS);
    constexpr int BATCH = SHARE % 4 == 0 ? 4 : SHARE % 3 == 0 ? 3 : SHARE % 2 == 0 ? 2 : 1;  // loads in flight a thread
    const Index step = (Index)place.stride[1], next = Box::GAP_W * (Index)place.stride[4];
#pragma unroll 1
    for (int i = threadIdx.x; i < POSITIONS * (Box::CHANNELS / SHARE); i += THREADS) {
        const int column = i % UNITS * PER_WORD, line = i / UNITS % Box::H, first = i / POSITIONS * SHARE;
        const Index h = place.h + line * Box::GAP_H, w = place.w + column * Box::GAP_W;
        const bool row_exists = within(h, place.extent[1]);
        const bool low = row_exists && within(w, place.extent[2]);
        const bool high = row_exists && within(w + Box::GAP_W, place.extent[2]);
        const Stored* source = from + h * (Index)place.stride[3] + w * (Index)place.stride[4] + first * step;
        unsigned* target = to + first * Box::CHANNEL + line * Box::LINE + column / PER_WORD;
        const int left = channels - first;
#pragma unroll 1
        for (int c = 0; c < SHARE; c += BATCH) {
            unsigned word[BATCH];
#pragma unroll
            for (int j = 0; j < BATCH; ++j) {
                word[j] = low && c + j < left ? bits_of(source[j * step]) : 0;
                if (high && c + j < left) word[j] |= bits_of(source[j * step + next]) << 16;
            }
#pragma unroll
            for (int j = 0; j < BATCH; ++j) target[(c + j) * Box::CHANNEL] = word[j];
            source += BATCH * step;
        }
    }
}

// Channels-last: BYTES of the channels of a position at a time, by copies where they are aligned for it.
template <class Box, int BYTES, bool COPIES>
__device__ __forceinline__ void copy_channels(unsigned* to, const Stored* from, const Place& place, int channels) {
    constexpr int UNIT = BYTES / (int)sizeof(Stored), UNITS = Box::CHANNELS / UNIT;
#pragma unroll 1
    for (int i = threadIdx.x; i < Box::H * Box::W * UNITS; i += THREADS) {
        const int first = i % UNITS * UNIT, position = i / UNITS, line = position / Box::W, at = position % Box::W;
        const int column = at % Box::CLASS * Box::STEP_W + at / Box::CLASS;
        const Index h = place.h + line * Box::GAP_H, w = place.w + column * Box::GAP_W;
        const bool inside = within(h, place.extent[1]) && within(w, place.extent[2]) && first < channels;
        const int left = inside ? min(UNIT, channels - first) : 0;
        const Stored* source = from;
        if (inside) source += h * (Index)place.stride[3] + w * (Index)place.stride[4] + first * (Index)place.stride[1];
        unsigned* const target = to + position * Box::POSITION + first / PER_WORD;
        if (COPIES) {
            copy_async<BYTES>(target, source, left * (int)sizeof(Stored));
        } else {
            unsigned word = left > 0 ? bits_of(source[0]) : 0;
            if (left > 1) word |= bits_of(source[place.stride[1]]) << 16;
            *target = word;
        }
    }
}

// `bytes` is how much may be copied at a time, at least a single element.
template <class Box>
__device__ __forceinline__ void stage(unsigned* to, const Stored* from, const Place& place, int channels, int bytes) {
    if (Box::LAST) {
        if (bytes == Box::COPY_BYTES) {
            copy_channels<Box, Box::COPY_BYTES, true>(to, from, place, channels);
        } else {
            copy_channels<Box, 4, PER_WORD == 1>(to, from, place, channels);
        }
    } else if (bytes == 16) {
        copy_rows<Box, 16>(to, from, place, channels);
    } else if (PER_WORD == 1 || bytes == 4) {
        copy_rows<Box, 4>(to, from, place, channels);
    } else {
        copy_row_elements<Box>(to, from, place, channels);
    }
}

// ---- arithmetic ------------------------------------------------------------------------------------------------------

// Where row r of a box starts; rows run along W first. Steps start at rows for which this is linear.
template <class Box, int STEP_H> __device__ __forceinline__ constexpr int row_offset(int r) {
    return r / ROWS_W * STEP_H * Box::LINE + r % ROWS_W * Box::NEXT_ROW;
}
__device__ __forceinline__ constexpr int row_x(int r) { return row_offset<BoxX, 1>(r); }
__device__ __forceinline__ constexpr int row_y(int r) { return row_offset<BoxY, AxisH::STEP>(r); }

// Along K, lane t of a group of four holds positions 2 t and 2 t + 1 of a row, for x and for y: one word of 16-bit
// numbers, or the two words of a TF32 product. (Any order of K will do that both have.)

// Where a lane starts to read, within a warp's channels.
__device__ __forceinline__ int lane_x(int lane) {
    if (!BoxX::LAST) return lane / 4 * BoxX::CHANNEL + lane % 4 * BoxX::LOAD;
    if (PER_WORD == 1) return lane % 4 * 2 * BoxX::POSITION + lane / 4;
    // Matrices of eight positions and channels: the next eight channels, then the next row.
    return row_x(lane / 16) + lane % 8 * BoxX::POSITION + lane / 8 % 2 * 4;
}
__device__ __forceinline__ int lane_y(int lane) {
    if (!BoxY::LAST) return lane / 4 * BoxY::CHANNEL + lane % 4 * BoxY::APART;
    if (PER_WORD == 1) return lane % 4 * 2 * BoxY::POSITION + lane / 4;
    return row_y(lane / 8) + lane % 8 * BoxY::POSITION;  // matrices: four rows
}

// The fragments of x for one step.
__device__ __forceinline__ void load_x(unsigned (&a)[DEPTH][TILES_IN][4], const unsigned* x) {
#pragma unroll
    for (int depth = 0; depth < DEPTH; ++depth) {
#pragma unroll
        for (int tile = 0; tile < TILES_IN; ++tile) {
            unsigned(&to)[4] = a[depth][tile];
            if (BoxX::LAST && PER_WORD == 2) {
                load_matrix_x4_transposed(to, x + row_x(2 * depth) + tile * 8);
            } else if (BoxX::LAST) {
#pragma unroll
                for (int i = 0; i < 4; ++i) to[i] = x[i / 2 * BoxX::POSITION + tile * 16 + i % 2 * 8];
            } else {
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const unsigned* const from = x + (tile * 16 + i * 8) * BoxX::CHANNEL;
                    if (PER_WORD == 2) {
                        to[i] = from[row_x(2 * depth)];
                        to[i + 2] = from[row_x(2 * depth + 1)];
                    } else {
                        const Pack<unsigned, BoxX::LOAD> pair = *reinterpret_cast<const Pack<unsigned, BoxX::LOAD>*>(from);
                        to[i] = pair.value[0];
                        to[i + 2] = pair.value[BoxX::LOAD - 1];
                    }
                }
            }
        }
    }
}

// Word `at` of a row of y, read together with its neighbours, which other taps need.
__device__ __forceinline__ unsigned word_of_row(const unsigned* row, int at) {
    return reinterpret_cast<const Pack<unsigned, BoxY::LOAD>*>(row)[at / BoxY::LOAD].value[at % BoxY::LOAD];
}

// The fragments of y for one step, tap along W and eight channels.
__device__ __forceinline__ void load_y(unsigned (&b)[DEPTH][2], const unsigned* y, int tap) {
    const int first = tap * AxisW::HOP, second = first + BoxY::STEP_W;  // the lane's two elements of a row
    if (BoxY::LAST && PER_WORD == 2) {
        unsigned rows[4];
        load_matrix_x4_transposed(rows, y + (first % BoxY::STEP_W * BoxY::CLASS + first / BoxY::STEP_W) * BoxY::POSITION);
#pragma unroll
        for (int i = 0; i < 4; ++i) b[i / 2 % DEPTH][i % 2] = rows[i];
    } else if (BoxY::LAST) {
        b[0][0] = y[(first % BoxY::STEP_W * BoxY::CLASS + first / BoxY::STEP_W) * BoxY::POSITION];
        b[0][1] = y[(second % BoxY::STEP_W * BoxY::CLASS + second / BoxY::STEP_W) * BoxY::POSITION];
    } else if (PER_WORD == 1) {
        b[0][0] = word_of_row(y, EARLY + first);
        b[0][1] = word_of_row(y, EARLY + second);
    } else {
#pragma unroll
        for (int row = 0; row < STEP_ROWS; ++row) {
            const unsigned low = word_of_row(y + row_y(row), (EARLY + first) / 2);
            const unsigned high = word_of_row(y + row_y(row), (EARLY + second) / 2);
            const unsigned low_half = (EARLY + first) % 2 ? low >> 16 : low & 0xffffu;
            const unsigned high_half = (EARLY + second) % 2 ? high & 0xffff0000u : high << 16;
            b[row / 2][row % 2] = low_half | high_half;
        }
    }
}

// Adds one step to a warp's sums. x and y point at the lane's first element of the step's first row. Of the warp's taps and
// channels, taps_h and tiles_out exist.
__device__ __forceinline__ void multiply(float (&acc)[TILES][4], const unsigned* x, const unsigned* y, int taps_h,
                                         int tiles_out) {
    unsigned a[DEPTH][TILES_IN][4];
    load_x(a, x);
#if PRECISION == TF32X3
    unsigned low_a[TILES_IN][4];
#pragma unroll
    for (int i = 0; i < TILES_IN * 4; ++i) {
        unsigned& word = a[0][i / 4][i % 4];
        split(__uint_as_float(word), word, low_a[i / 4][i % 4]);
    }
#elif PRECISION == TF32
#pragma unroll
    for (int i = 0; i < TILES_IN * 4; ++i) a[0][i / 4][i % 4] = to_tf32(__uint_as_float(a[0][i / 4][i % 4]));
#endif
#pragma unroll
    for (int tap_h = 0; tap_h < TAPS_H; ++tap_h) {
#pragma unroll
        for (int tile_out = 0; tile_out < TILES_OUT; ++tile_out) {
            if (tap_h >= taps_h || tile_out >= tiles_out) continue;
            __syncwarp();  // keeps the compiler from loading far ahead of the products: there are no registers for that
            const unsigned* const from = y + tap_h * AxisH::HOP * BoxY::LINE + tile_out * BoxY::NEXT_CHANNELS;
#pragma unroll
            for (int tap_w = 0; tap_w < TAPS_W; ++tap_w) {
                unsigned b[DEPTH][2];
                load_y(b, from, tap_w);
                float(*const sums)[4] = acc + ((tap_h * TILES_OUT + tile_out) * TAPS_W + tap_w) * TILES_IN;
#if PRECISION == TF32X3
                // The tensor core truncates its sums: each three products start from zero, and an addition ends them.
                unsigned low_b[2];
#pragma unroll
                for (int i = 0; i < 2; ++i) split(__uint_as_float(b[0][i]), b[0][i], low_b[i]);
                float sum[TILES_IN][4];
                const float zero[4] = {0, 0, 0, 0};
#pragma unroll
                for (int tile = 0; tile < TILES_IN; ++tile) mma_m16n8k8_tf32(sum[tile], low_a[tile], b[0], zero);
#pragma unroll
                for (int tile = 0; tile < TILES_IN; ++tile) mma(sum[tile], a[0][tile], low_b);
#pragma unroll
                for (int tile = 0; tile < TILES_IN; ++tile) {
                    mma(sum[tile], a[0][tile], b[0]);
#pragma unroll
                    for (int i = 0; i < 4; ++i) sums[tile][i] += sum[tile][i];
                }
#else
#pragma unroll
                for (int depth = 0; depth < DEPTH; ++depth) {
#pragma unroll
                    for (int i = 0; i < 2 && PRECISION == TF32; ++i) b[depth][i] = to_tf32(__uint_as_float(b[depth][i]));
#pragma unroll
                    for (int tile = 0; tile < TILES_IN; ++tile) mma(sums[tile], a[depth][tile], b[depth]);
                }
#endif
            }
        }
    }
}

// ---- the kernel ------------------------------------------------------------------------------------------------------

// Tiles of all weights.
__device__ __forceinline__ unsigned tiles_of_weights(const Problem& p) {
    return (unsigned)(KERNEL_D * TILES_H * TILES_W * tiles_of(p.c_out, TILE_OUT) * tiles_of(p.c_in, TILE_IN) * p.groups);
}

// The first weight of a tile. Those that read the same x and y follow each other.
__device__ __forceinline__ Weight first_weight(unsigned tile, const Problem& p) {
    Weight first;
    first.w = (int)(tile % TILES_W) * TAPS_W;
    tile /= TILES_W;
    first.h = (int)(tile % TILES_H) * TILE_H;
    tile /= TILES_H;
    first.d = (int)(tile % KERNEL_D);
    tile /= KERNEL_D;
    first.co = (int)(tile % tiles_of(p.c_out, TILE_OUT)) * TILE_OUT;
    tile /= tiles_of(p.c_out, TILE_OUT);
    first.ci = (int)(tile % tiles_of(p.c_in, TILE_IN)) * TILE_IN;
    first.group = tile / tiles_of(p.c_in, TILE_IN);
    return first;
}

// The first weight of a thread, for the first one of its tile.
__device__ __forceinline__ Weight weight_of_thread(Weight first, int thread) {
    const int lane = thread % 32, warp = thread / 32;
    first.ci += warp % WARPS_IN * TILES_IN * 16 + lane / 4;
    first.co += warp / WARPS_IN % WARPS_OUT * TILES_OUT * 8 + lane % 4 * 2;
    first.h += warp / (WARPS_IN * WARPS_OUT) * TAPS_H;
    return first;
}

// Where the weight of a thread's sum is from there.
__host__ __device__ constexpr Ahead weight_of_sum(int sum) {
    const int tile = sum / 4, tap_w = tile / TILES_IN, tile_out = tap_w / TAPS_W, tap_h = tile_out / TILES_OUT;
    return {tile % TILES_IN * 16 + sum / 2 % 2 * 8, tile_out % TILES_OUT * 8 + sum % 2, 0, tap_h, tap_w % TAPS_W};
}

#include "weight_sums.cuh"

// Writes to `parts`, or straight to `out` where there is one part alone.
extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    weight_gradient_gemm(const Stored* x, const Stored* y, float* parts, Stored* out, const Problem p) {
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    unsigned* const shared = reinterpret_cast<unsigned*>(shared_bytes);

    const unsigned tiles = tiles_of_weights(p);
    const Weight first = first_weight(blockIdx.x % tiles, p);
    x += (first.group * p.c_in + first.ci) * p.x_stride[1];
    y += (first.group * p.c_out + first.co) * p.out_stride[1];
    const int channels_in = (int)p.c_in - first.ci, channels_out = (int)p.c_out - first.co;

    const int lane = threadIdx.x % 32, warp = threadIdx.x % THREADS_C / 32, warp_k = threadIdx.x / THREADS_C;
    const int warp_in = warp % WARPS_IN, warp_out = warp / WARPS_IN % WARPS_OUT, warp_h = warp / (WARPS_IN * WARPS_OUT);
    const int my_x = lane_x(lane) + warp_in * TILES_IN * 2 * BoxX::NEXT_CHANNELS;
    const int my_y = BoxX::WORDS + lane_y(lane) + warp_h * TAPS_H * AxisH::HOP * BoxY::LINE +
                     warp_out * TILES_OUT * BoxY::NEXT_CHANNELS;

    const int taps_h = KERNEL_H - first.h - warp_h * TAPS_H;
    const int tiles_out = ceil_div(channels_out - warp_out * TILES_OUT * 8, 8);

    float acc[TILES][4];
#pragma unroll
    for (int i = 0; i < SUMS; ++i) acc[i / 4][i % 4] = 0;

    // Boxes whose plane of y exists, for this tap along D.
    const unsigned boxes = (unsigned)(p.n * p.tiles[0] * p.tiles[1] * p.tiles[2]), parts_of_boxes = (unsigned)p.tiles[3];
    const auto box_from = [&](unsigned box) {
        for (; box < boxes; box += parts_of_boxes) {
            unsigned index = box;
            take(index, p, 2);
            take(index, p, 1);
            const Index d = (Index)take(index, p, 0);
            if (within(d * STRIDE_D + first.d * DILATION_D - (Index)p.pad[0], p.out_extent[0])) break;
        }
        return box;
    };

    unsigned ahead = box_from((unsigned)(blockIdx.x / tiles));
    bool staged = false;
    int turn = 0;
#pragma unroll 1
    while (true) {
        copy_async_wait<0>();
        __syncthreads();  // what was staged has landed, and nobody reads the other half any more
        if (ahead < boxes) {
            unsigned index = ahead;
            const Index w = (Index)take(index, p, 2) * BOX_W, h = (Index)take(index, p, 1) * BOX_H;
            const Index d = (Index)take(index, p, 0);
            const Place place_x = {d, h, w, p.x_extent, p.x_stride};
            const Place place_y = {d * STRIDE_D + first.d * DILATION_D - (Index)p.pad[0],
                                   h * STRIDE_H + first.h * DILATION_H - (Index)p.pad[1],
                                   w * STRIDE_W + first.w * DILATION_W - (Index)p.pad[2] - EARLY * AxisW::GAP,
                                   p.out_extent, p.out_stride};
            unsigned* const to = shared + turn * STAGE;
            stage<BoxX>(to, x + index * p.x_stride[0] + place_x.d * p.x_stride[2], place_x, channels_in, (int)p.x_vector);
            stage<BoxY>(to + BoxX::WORDS, y + index * p.out_stride[0] + place_y.d * p.out_stride[2], place_y, channels_out,
                        (int)p.out_vector);
        }
        copy_async_commit();
        turn ^= 1;
        if (staged) {
            const unsigned* const from = shared + turn * STAGE;
#pragma unroll 1
            for (int step = warp_k; step < STEPS; step += WARPS_K)
                multiply(acc, from + my_x + row_x(step * STEP_ROWS), from + my_y + row_y(step * STEP_ROWS), taps_h,
                         tiles_out);
        }
        if (ahead >= boxes) break;
        staged = true;
        ahead = box_from(ahead + parts_of_boxes);
    }

    // The warps that shared the positions of the boxes are added up by the first of them.
    add_warps(acc, shared_bytes, warp_k);
    if (warp_k == 0) store_sums(acc, first, parts, out, p);
}

extern "C" __global__ void __launch_bounds__(SUM_THREADS, SUM_BLOCKS)
    weight_gradient_gemm_add(const float* parts, Stored* out, const Problem p) {
    add_sums(parts, out, p);
}
