// Correlate, tensor cores: float16, bfloat16 and float32 (as TF32 or 3xTF32) where a group is wide enough.
//
//     out[n, ci, i] = bias[ci] + sum over co, k of  y[n, co, i*stride + k*dilation - pad] * weight[ci, co, k]
// An implicit GEMM: M = positions i, N = channels ci, K = channels co x taps. A block owns a box of positions and some
// channels. It walks over (tap along D, chunk of channels co); a step stages the box of y with its halo along H and W, and
// the weights, in shared memory by asynchronous copies that overlap the arithmetic of the step before. Every tap reads the
// same staged box at another offset. Eight positions along W make a *row*, two rows the 16 rows of an mma tile.
//
// All arithmetic is on 32-bit words: one float32, or two 16-bit channels that follow each other. y is staged as
// [word][d][h][w], or [d][h][w][word] for channels-last y, with the positions along W sorted by their remainder modulo the
// stride: then the eight positions that a tap of a row needs are neighbours.
//
// Compile-time: kernel, stride, dilation, dtype, precision and tile, and what copies of channels-last positions take at a time.
// Run-time: N, extents, padding, channels, strides.
#include "boxes.cuh"
#include "mma.cuh"

#ifndef WARPS_D  // warps of a block along D, H, W and the channels of the result
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
#ifndef TILES_C  // groups of eight channels of the result that a warp owns
#define TILES_C 3
#endif
#ifndef K_STEPS  // groups of eight words of channels of y staged at a time
#define K_STEPS 1
#endif
#ifndef EARLY  // how many positions before the first one needed a staged row starts, so that copies are aligned
#define EARLY 0
#endif
#ifndef COPY_BYTES  // of a channels-last position that copies bring at a time: 16, or 8 or 4 where positions start so
#define COPY_BYTES 16
#endif
#ifndef Y_CHANNELS_LAST
#define Y_CHANNELS_LAST 0
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

constexpr int THREADS = 32 * WARPS_D * WARPS_H * WARPS_W * WARPS_C;
constexpr int ROW = 8;  // positions
constexpr int WARP_H = ROWS_ALONG_W ? 1 : ROWS;
constexpr int WARP_W = ROWS_ALONG_W ? ROW * ROWS : ROW;
constexpr int BOX_D = WARPS_D;
constexpr int BOX_H = WARPS_H * WARP_H;
constexpr int BOX_W = WARPS_W * WARP_W;
constexpr int BOX_C = WARPS_C * TILES_C * 8;

typedef Staged<KERNEL_H, STRIDE_H, DILATION_H, BOX_H> AxisH;
typedef Staged<KERNEL_W, STRIDE_W, DILATION_W, BOX_W> AxisW;

constexpr int WORDS = 8 * K_STEPS;  // of channels of y in a stage
constexpr int CHUNK = WORDS * CHANNELS_A_WORD;

// The staged box of y: one plane for each position along D, since these are staged tap by tap.
constexpr int Y_H = AxisH::EXTENT;
constexpr int CLASS = ceil_div(AxisW::EXTENT, AxisW::STEP);  // positions of equal remainder modulo the step
constexpr int Y_W = AxisW::STEP > 1 ? CLASS * AxisW::STEP : Y_CHANNELS_LAST ? CLASS : round_up(CLASS + EARLY, 4);
constexpr int Y_POSITIONS = BOX_D * Y_H * Y_W;
// Distances that keep the 8 positions x 4 words which a warp loads at a time in 32 different banks.
constexpr int POSITION = Y_CHANNELS_LAST ? WORDS + 4 : 1;
constexpr int WORD = Y_CHANNELS_LAST ? 1 : at_residue(Y_POSITIONS, 8, 32);
constexpr int Y_STAGE = Y_CHANNELS_LAST ? Y_POSITIONS * POSITION : WORDS * WORD;

// Weights in fragment order: [tap along H][k step][tap along W][8 channels][lane][word].
constexpr int FRAGMENT = PRECISION == TF32X3 ? 4 : 2;  // words a lane: K words t and t + 4, then their low parts
constexpr int PIECE = K_STEPS * KERNEL_W * (BOX_C / 8) * 32 * FRAGMENT;  // one tap along D and one along H
constexpr int WEIGHT_STAGE = KERNEL_H * PIECE;

constexpr int STAGE = Y_STAGE + WEIGHT_STAGE;
constexpr int SHARED = 2 * STAGE;  // in words
static_assert(SHARED_BYTES == 0 || SHARED * 4 == SHARED_BYTES, "the plan's shared memory is not the kernel's");
static_assert(ROWS % 2 == 0, "an mma tile is two rows");
static_assert(!ROWS_ALONG_W || KERNEL_H == 1, "rows along W are for kernels of height 1");
static_assert(EARLY == 0 || (AxisW::STEP == 1 && AxisW::GAP == 1 && !Y_CHANNELS_LAST), "early starts are for whole rows");

// ---- staging ---------------------------------------------------------------------------------------------------------
// Addresses and border tests are worked out once a position, for all channels of the stage.

// Where a stage's box lies: its first position in y (which may be outside), and its channels that exist.
struct Box {
    Index d, h, w;
    int channels;

    __device__ __forceinline__ Index line_d(int line) const { return d + line / Y_H * STRIDE_D; }
    __device__ __forceinline__ Index line_h(int line) const { return h + line % Y_H * AxisH::GAP; }
    // The position along W that lies at a place of a staged line.
    __device__ __forceinline__ Index place_w(int place) const {
        return w + (AxisW::STEP > 1 ? place % CLASS * AxisW::STEP + place / CLASS : place) * AxisW::GAP;
    }
    __device__ __forceinline__ bool holds(const Problem& p, int line, int place) const {
        return within(line_d(line), p.out_extent[0]) && within(line_h(line), p.out_extent[1]) &&
               within(place_w(place), p.out_extent[2]);
    }
    __device__ __forceinline__ Index offset(const Problem& p, int line, int place) const {
        return line_d(line) * (Index)p.out_stride[2] + line_h(line) * (Index)p.out_stride[3] +
               place_w(place) * (Index)p.out_stride[4];
    }
};

// Channels-last y: COPY_BYTES of channels of one position at a time, at multiples of which positions start.
__device__ __forceinline__ void stage_channels(unsigned* to, const Stored* y, const Problem& p, const Box& box) {
    constexpr int UNIT = COPY_BYTES / (int)sizeof(Stored), UNITS = WORDS * 4 / COPY_BYTES;
#pragma unroll 1
    for (int i = threadIdx.x; i < Y_POSITIONS * UNITS; i += THREADS) {
        const int unit = i % UNITS, place = i / UNITS % Y_W, line = i / (UNITS * Y_W);
        const int left = min(UNIT, max(0, box.channels - unit * UNIT)) * (int)sizeof(Stored);
        const int bytes = box.holds(p, line, place) ? left : 0;
        copy_async<COPY_BYTES>(to + (line * Y_W + place) * POSITION + unit * (COPY_BYTES / 4),
                               y + (bytes ? box.offset(p, line, place) + unit * UNIT : 0), bytes);
    }
}

// The other stages give a thread some positions of a line and a share of the words.
__host__ __device__ constexpr int share_of_words(int items) {
    int groups = 1;
    while (groups < WORDS && items * groups * 2 <= THREADS) groups *= 2;
    return WORDS / groups;
}

// Contiguous rows: four positions at a time. Rows and the start of y are aligned for that, and so is box.w (EARLY).
__device__ __forceinline__ void stage_rows(unsigned* to, const Stored* y, const Problem& p, const Box& box) {
    constexpr int UNITS = Y_W / 4, ITEMS = BOX_D * Y_H * UNITS, SHARE = share_of_words(ITEMS);
#pragma unroll 1
    for (int i = threadIdx.x; i < ITEMS * (WORDS / SHARE); i += THREADS) {
        const int place = i % UNITS * 4, line = i / UNITS % (BOX_D * Y_H), first = i / ITEMS * SHARE;
        const bool inside = box.holds(p, line, place);
        const Index step = inside ? (Index)p.out_stride[1] : 0;
        const Stored* from = y + (inside ? box.offset(p, line, place) : 0) + first * CHANNELS_A_WORD * step;
        unsigned* target = to + first * WORD + line * Y_W + place;
        const int left = inside ? box.channels - first * CHANNELS_A_WORD : 0;
        if (CHANNELS_A_WORD == 1) {
#pragma unroll
            for (int c = 0; c < SHARE; ++c) copy_async_16(target + c * WORD, from + c * step, c < left ? 16 : 0);
        } else {
            // Two channels of 16 bits become one word, in registers.
            constexpr int BATCH = SHARE < 4 ? SHARE : 4;
#pragma unroll 1
            for (int c = 0; c < SHARE; c += BATCH) {
                Pack<unsigned, 2> even[BATCH], odd[BATCH];
#pragma unroll
                for (int j = 0; j < BATCH; ++j) {
                    const int channel = 2 * (c + j);
                    even[j] = odd[j] = Pack<unsigned, 2>{{0, 0}};
                    if (channel < left) even[j] = *reinterpret_cast<const Pack<unsigned, 2>*>(from + channel * step);
                    if (channel + 1 < left)
                        odd[j] = *reinterpret_cast<const Pack<unsigned, 2>*>(from + (channel + 1) * step);
                }
#pragma unroll
                for (int j = 0; j < BATCH; ++j) {
                    Pack<unsigned, 4> words;
#pragma unroll
                    for (int k = 0; k < 2; ++k) {
                        words.value[2 * k] = (even[j].value[k] & 0xffffu) | (odd[j].value[k] << 16);
                        words.value[2 * k + 1] = (even[j].value[k] >> 16) | (odd[j].value[k] & 0xffff0000u);
                    }
                    *reinterpret_cast<Pack<unsigned, 4>*>(target + (c + j) * WORD) = words;
                }
            }
        }
    }
}

// Any strides and alignment: a word at a time.
__device__ __forceinline__ void stage_words(unsigned* to, const Stored* y, const Problem& p, const Box& box) {
    constexpr int ITEMS = Y_POSITIONS, SHARE = share_of_words(ITEMS);
#pragma unroll 1
    for (int i = threadIdx.x; i < ITEMS * (WORDS / SHARE); i += THREADS) {
        const int place = i % Y_W, line = i / Y_W % (BOX_D * Y_H), first = i / ITEMS * SHARE;
        const bool inside = box.holds(p, line, place);
        const Index step = inside ? (Index)p.out_stride[1] : 0;
        const Stored* from = y + (inside ? box.offset(p, line, place) : 0) + first * CHANNELS_A_WORD * step;
        unsigned* target = to + first * WORD + (line * Y_W + place) * POSITION;
        const int left = inside ? box.channels - first * CHANNELS_A_WORD : 0;
        if (CHANNELS_A_WORD == 1) {
#pragma unroll
            for (int c = 0; c < SHARE; ++c) copy_async_4(target + c * WORD, from + c * step, c < left ? 4 : 0);
        } else {
            constexpr int BATCH = SHARE < 8 ? SHARE : 8;
#pragma unroll 1
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

__device__ __forceinline__ void stage_weight(unsigned* to, const unsigned* packed) {
    constexpr int UNITS = WEIGHT_STAGE / 4;
#pragma unroll
    for (int i = 0; i < ceil_div(UNITS, THREADS); ++i) {
        const int unit = (int)threadIdx.x + i * THREADS;
        if (unit < UNITS) copy_async_16_shared_by_blocks(to + unit * 4, packed + unit * 4);
    }
}

// ---- arithmetic ------------------------------------------------------------------------------------------------------

// An mma tile is the rows m and m + TILES_M of a warp. Tap k of tile m reads the pair of lines m * STEP + k * HOP of the
// warp's lines of y, so that a pair is loaded once for all taps along H that meet it.
constexpr int TILES_M = ROWS / 2;
constexpr int PAIR_STEP = ROWS_ALONG_W ? 1 : AxisH::STEP;
constexpr int PAIRS = (TILES_M - 1) * PAIR_STEP + (KERNEL_H - 1) * AxisH::HOP + 1;

__host__ __device__ constexpr bool is_used(int pair) {
    for (int tap = 0; tap < KERNEL_H; ++tap) {
        const int rest = pair - tap * AxisH::HOP;
        if (rest >= 0 && rest % PAIR_STEP == 0 && rest / PAIR_STEP < TILES_M) return true;
    }
    return false;
}

// Value i of the A fragment of a pair of lines.
__device__ __forceinline__ unsigned load_y(const unsigned* y, int pair, int i) {
    constexpr int NEXT = ROWS_ALONG_W ? ROW * POSITION : Y_W * POSITION;
    return y[(pair + i % 2 * TILES_M * PAIR_STEP) * NEXT + i / 2 * 4 * WORD];
}

// Adds one stage to the accumulators. y and weight point at the lane's first element.
__device__ __forceinline__ void multiply(float (&acc)[TILES_M][TILES_C][4], const unsigned* y, const unsigned* weight) {
    // Unrolled too far, the compiler keeps too much of the next tap in registers.
    constexpr int UNROLL = PRECISION == TF32X3 ? 1 : KERNEL_W <= 8 ? KERNEL_W : 4;
#pragma unroll 1
    for (int step = 0; step < K_STEPS; ++step) {
#pragma unroll UNROLL
        for (int tap_w = 0; tap_w < KERNEL_W; ++tap_w) {
            const int column = tap_w * AxisW::HOP;
            const int place = column % AxisW::STEP * CLASS + column / AxisW::STEP;
            const unsigned* const y_tap = y + step * 8 * WORD + place * POSITION;
            const unsigned* const fragments = weight + (step * KERNEL_W + tap_w) * (BOX_C / 8) * 32 * FRAGMENT;
            __syncwarp();
            Pack<unsigned, FRAGMENT> b[KERNEL_H][TILES_C];
#pragma unroll
            for (int tap_h = 0; tap_h < KERNEL_H; ++tap_h)
#pragma unroll
                for (int tile = 0; tile < TILES_C; ++tile)
                    b[tap_h][tile] = *reinterpret_cast<const Pack<unsigned, FRAGMENT>*>(fragments + tap_h * PIECE +
                                                                                       tile * 32 * FRAGMENT);
#pragma unroll
            for (int pair = 0; pair < PAIRS; ++pair) {
                if (!is_used(pair)) continue;
                // Keeps the compiler from loading far ahead of the products, for which there are no registers.
                if (pair == 0 || PRECISION == TF32X3) __syncwarp();
                unsigned a[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) a[i] = load_y(y_tap, pair, i);
#if PRECISION == TF32X3
                unsigned low[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) split(__uint_as_float(a[i]), a[i], low[i]);
#elif PRECISION == TF32
#pragma unroll
                for (int i = 0; i < 4; ++i) a[i] = to_tf32(__uint_as_float(a[i]));
#endif
#pragma unroll
                for (int tap_h = 0; tap_h < KERNEL_H; ++tap_h) {
                    const int rest = pair - tap_h * AxisH::HOP, m = rest / PAIR_STEP;
                    if (rest < 0 || rest % PAIR_STEP || m >= TILES_M) continue;
#if PRECISION == TF32X3
                    // The tensor core truncates its sums: each three products start from zero, and an addition ends them.
                    float sum[TILES_C][4];
                    const float zero[4] = {0, 0, 0, 0};
#pragma unroll
                    for (int tile = 0; tile < TILES_C; ++tile) {
                        const unsigned high_b[2] = {b[tap_h][tile].value[0], b[tap_h][tile].value[1]};
                        mma_m16n8k8_tf32(sum[tile], low, high_b, zero);
                    }
#pragma unroll
                    for (int tile = 0; tile < TILES_C; ++tile) {
                        const unsigned low_b[2] = {b[tap_h][tile].value[FRAGMENT - 2], b[tap_h][tile].value[FRAGMENT - 1]};
                        mma(sum[tile], a, low_b);
                    }
#pragma unroll
                    for (int tile = 0; tile < TILES_C; ++tile) {
                        const unsigned high_b[2] = {b[tap_h][tile].value[0], b[tap_h][tile].value[1]};
                        mma(sum[tile], a, high_b);
#pragma unroll
                        for (int i = 0; i < 4; ++i) acc[m][tile][i] += sum[tile][i];
                    }
#else
#pragma unroll
                    for (int tile = 0; tile < TILES_C; ++tile) {
                        const unsigned both[2] = {b[tap_h][tile].value[0], b[tap_h][tile].value[1]};
                        mma(acc[m][tile], a, both);
                    }
#endif
                }
            }
        }
    }
}

// ---- the kernel ------------------------------------------------------------------------------------------------------

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    correlate_gemm(const Stored* y, const unsigned* packed, const Stored* bias, Stored* out, const Problem p) {
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    unsigned* const shared = reinterpret_cast<unsigned*>(shared_bytes);

    unsigned index = blockIdx.x;
    const Index box_w = (Index)take(index, p, 2) * BOX_W;
    const int tile_c = (int)take(index, p, 3);  // the blocks of other channels read the same y
    const Index box_h = (Index)take(index, p, 1) * BOX_H, box_d = (Index)take(index, p, 0) * BOX_D;
    const long long group = take(index, p, 4), n = index;
    y += n * p.out_stride[0] + group * p.c_out * p.out_stride[1];
    const int chunks = ((int)p.c_out + CHUNK - 1) / CHUNK;
    packed += (group * p.tiles[3] + tile_c) * ((long long)KERNEL_D * chunks * WEIGHT_STAGE);

    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int warp_w = warp % WARPS_W, warp_h = warp / WARPS_W % WARPS_H;
    const int warp_d = warp / (WARPS_W * WARPS_H) % WARPS_D, warp_c = warp / (WARPS_W * WARPS_H * WARPS_D);

    float acc[TILES_M][TILES_C][4];
#pragma unroll
    for (int i = 0; i < TILES_M * TILES_C * 4; ++i) acc[i / 4 / TILES_C][i / 4 % TILES_C][i % 4] = 0;

    const auto stage = [&](int step) {
        const int tap_d = step / chunks, chunk = step % chunks;
        unsigned* const to = shared + step % 2 * STAGE;
        const Stored* const from = y + (long long)chunk * CHUNK * p.out_stride[1];
        const Box box = {box_d * STRIDE_D + tap_d * DILATION_D - (Index)p.pad[0], box_h * STRIDE_H - (Index)p.pad[1],
                         box_w * STRIDE_W - (Index)p.pad[2] - EARLY, (int)p.c_out - chunk * CHUNK};
        if (!p.out_vector) {
            stage_words(to, from, p, box);
        } else if (Y_CHANNELS_LAST) {
            stage_channels(to, from, p, box);
        } else {
            stage_rows(to, from, p, box);
        }
        stage_weight(to + Y_STAGE, packed + step * (long long)WEIGHT_STAGE);
    };

    const int my_line = warp_d * Y_H + warp_h * WARP_H * AxisH::STEP;
    const int my_y = (my_line * Y_W + warp_w * WARP_W + EARLY + lane / 4) * POSITION + lane % 4 * WORD;
    const int my_weight = Y_STAGE + (warp_c * TILES_C * 32 + lane) * FRAGMENT;
    const int steps = KERNEL_D * chunks;
    wait_for_kernel_before();  // it packs the weights
    // Every round stages one step and then adds the one before, which has landed by then.
#pragma unroll 1
    for (int step = 0; step <= steps; ++step) {
        copy_async_wait<0>();
        __syncthreads();  // all of the last stage has landed, and nobody reads the other one any more
        if (step < steps) stage(step);
        copy_async_commit();
        const unsigned* const before = shared + (step + 1) % 2 * STAGE;
        if (step) multiply(acc, before + my_y, before + my_weight);
    }

    // A lane holds position lane / 4 of each row, and channels 2 t and 2 t + 1 of each eight, t = lane % 4. So a warp stores
    // eight consecutive positions of a channel, or eight consecutive channels of a position.
    const Index at_d = box_d + warp_d;
    const int first_c = tile_c * BOX_C + warp_c * TILES_C * 8 + lane % 4 * 2;
    const Index first_h = box_h + warp_h * WARP_H, first_w = box_w + warp_w * WARP_W + lane / 4;
    if (!within(at_d, p.x_extent[0])) return;
    out += n * p.x_stride[0] + (group * p.c_in + first_c) * p.x_stride[1] + at_d * p.x_stride[2];
    if (bias) bias += (group * p.c_in + first_c) * p.bias_stride;
#pragma unroll
    for (int tile = 0; tile < TILES_C; ++tile) {
        float offset[2] = {0, 0};
#pragma unroll
        for (int c = 0; c < 2; ++c)
            if (bias && first_c + tile * 8 + c < p.c_in) offset[c] = widen(bias[(tile * 8 + c) * p.bias_stride]);
#pragma unroll
        for (int row = 0; row < ROWS; ++row) {
            const Index at_h = first_h + (ROWS_ALONG_W ? 0 : row), at_w = first_w + (ROWS_ALONG_W ? row * ROW : 0);
            if (!within(at_h, p.x_extent[1]) || !within(at_w, p.x_extent[2])) continue;
            Stored* const to = out + tile * 8 * p.x_stride[1] + at_h * p.x_stride[3] + at_w * p.x_stride[4];
            Pack<float, 2> values;
#pragma unroll
            for (int c = 0; c < 2; ++c) values.value[c] = acc[row % TILES_M][tile][row / TILES_M * 2 + c] + offset[c];
            if (OUT_CHANNELS_LAST && p.x_vector && first_c + tile * 8 + 1 < p.c_in) {
                store_vector(values, to);
            } else {
#pragma unroll
                for (int c = 0; c < 2; ++c)
                    if (first_c + tile * 8 + c < p.c_in) narrow(values.value[c], to[c * p.x_stride[1]]);
            }
        }
    }
}

// Puts the weights of the call in fragment order, once, before the kernel above: [group][tile of channels][tap along D]
// [chunk][tap along H][k step][tap along W][8 channels][lane][word].
extern "C" __global__ void correlate_gemm_pack(const Stored* weight, unsigned* packed, const Problem p) {
    let_next_kernel_start();
    const int chunks = ((int)p.c_out + CHUNK - 1) / CHUNK;
    const long long count = p.groups * p.tiles[3] * KERNEL_D * chunks * (WEIGHT_STAGE / FRAGMENT);
    long long index = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (index >= count) return;
    unsigned* const to = packed + index * FRAGMENT;
    const int lane = (int)(index % 32);
    index /= 32;
    const int eight = (int)(index % (BOX_C / 8));
    index /= BOX_C / 8;
    const int tap_w = (int)(index % KERNEL_W);
    index /= KERNEL_W;
    const int step = (int)(index % K_STEPS);
    index /= K_STEPS;
    const int tap_h = (int)(index % KERNEL_H);
    index /= KERNEL_H;
    const int chunk = (int)(index % chunks);
    index /= chunks;
    const int tap_d = (int)(index % KERNEL_D);
    index /= KERNEL_D;
    const int tile_c = (int)(index % p.tiles[3]);
    const long long group = index / p.tiles[3];

    const int ci = tile_c * BOX_C + eight * 8 + lane / 4;
    weight += (group * p.c_in + ci) * p.weight_stride[0] + tap_d * p.weight_stride[2] + tap_h * p.weight_stride[3] +
              tap_w * p.weight_stride[4];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int co = (chunk * WORDS + step * 8 + lane % 4 + i * 4) * CHANNELS_A_WORD;
        unsigned word = 0;
        if (ci < p.c_in && co < p.c_out) {
            word = bits_of(weight[co * p.weight_stride[1]]);
            if (CHANNELS_A_WORD == 2 && co + 1 < p.c_out) word |= bits_of(weight[(co + 1) * p.weight_stride[1]]) << 16;
        }
        to_operand(word, to[i], to[(FRAGMENT - 2) + i]);
    }
}
