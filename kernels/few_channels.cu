// Few channels per group, SIMT: depthwise, and few input or few output channels a group. Bound by memory, not by
// arithmetic.
//
// A thread owns POSITIONS_W consecutive positions along W with all their W phases, in one row of outputs, and slides
// along D. It loads a plane of its inputs (the rows and columns that its taps reach) from global memory into registers,
// adds it to every output along D that it reaches, stores the outputs that are complete and shifts the rest by one.
// Each element of x is loaded once a thread, and what is inside x along H and W is decided once, before the slide. The
// lanes of a warp lie along W and then H, or (channels-last) along the output channels: whatever is contiguous in the
// output.
//
// Along D and H, q = (o + pad) / STRIDE as everywhere. Along W, a thread's outputs are STRIDE_W * t up to
// STRIDE_W * t + STRIDE_W - 1, so that stores are aligned: there the phase of an output depends on SHIFT_W, the padding
// modulo the stride.
//
// Compile-time: kernel, stride, dilation, SHIFT_W, dtype, tile, and strides along W where they are 1 or the number of
// channels. Run-time: N, extents, padding, channels, all other strides.
#include "common.cuh"

#ifndef SHIFT_W  // padding modulo stride along W
#define SHIFT_W 1
#endif
#ifndef POSITIONS_W  // positions a thread owns along W
#define POSITIONS_W 2
#endif
#ifndef CHANNELS_OUT  // output channels of a group that a thread owns
#define CHANNELS_OUT 1
#endif
#ifndef HOLD_WEIGHTS  // for one input channel a group: a thread's weights stay in registers
#define HOLD_WEIGHTS 1
#endif
#ifndef LANES_C  // threads side by side along the output channels; 1: the threads of a warp lie along W and H
#define LANES_C 1
#endif
#ifndef VECTOR  // consecutive groups of one channel a thread owns
#define VECTOR 1
#endif
#ifndef X_STRIDE_W  // 0: known at run time
#define X_STRIDE_W 0
#endif
#ifndef OUT_STRIDE_W
#define OUT_STRIDE_W 0
#endif
#ifndef OUT_CHANNELS_LAST  // the channels of a group are contiguous in the output, so that a row of it holds them
#define OUT_CHANNELS_LAST 0
#endif
#ifndef MIN_BLOCKS
#define MIN_BLOCKS 4
#endif

#include "aligned_row.cuh"

typedef Axis<KERNEL_D, STRIDE_D, DILATION_D> AxisD;
typedef Axis<KERNEL_H, STRIDE_H, DILATION_H> AxisH;

constexpr unsigned MAX_THREADS = 128;  // a block has fewer where the rows of a plane have fewer positions
constexpr int ROWS = AxisH::MAX_TAPS;  // of x that reach a row of outputs
constexpr int COLUMNS = POSITIONS_W + LAST_W - FIRST_W;
constexpr int DEPTH = AxisD::REACH + 1;  // positions q along D that a plane of x reaches
constexpr int OUTPUTS_W = POSITIONS_W * STRIDE_W;
constexpr int TAPS = KERNEL_D * ROWS * KERNEL_W;  // of a row of outputs, over all its phases along D

// Weights in shared memory: [input channel][tap][output channel][lane]. An odd number of lanes spreads over the banks.
constexpr int WEIGHT = LANES_C > 1 ? LANES_C * VECTOR + 1 : 1;
constexpr int WEIGHT_CHANNEL = round_up(TAPS * CHANNELS_OUT * WEIGHT, 4);

// Results of a thread that are contiguous in memory; where no aligned store takes them, shared memory turns them.
constexpr int ROW_CHANNELS = OUT_CHANNELS_LAST ? CHANNELS_OUT : 1;
constexpr int ROW = OUTPUTS_W * ROW_CHANNELS;
constexpr bool ONE_STORE = !OUT_CHANNELS_LAST && ROW * sizeof(Stored) == 16;

static_assert(COLUMNS <= 32 && ROW <= 32, "a mask has a bit for each");
static_assert(LANES_C == 1 || CHANNELS_OUT == 1, "lanes along the channels own one each");
static_assert(VECTOR == 1 || (VECTOR == 2 && LANES_C > 1), "pairs are for lanes along the channels");

struct Block {
    int residue_h;          // of its rows of outputs, modulo the stride
    unsigned position;      // of its first thread: positions run along W and then H
    Index first_q, last_q;  // along D
    long long n, channel;   // the first output channel
};

__device__ __forceinline__ Block locate(const Problem& p) {
    const unsigned positions = blockDim.x / LANES_C;  // of a block
    const unsigned tiles_q = ((unsigned)(p.tiles[1] * p.tiles[2]) + positions - 1) / positions;
    // The rows of different phases run fastest: they interleave in the output and read the same x.
    unsigned index = blockIdx.x;
    Block b;
    b.residue_h = (int)(index % STRIDE_H);
    index /= STRIDE_H;
    b.position = index % tiles_q * positions;
    index /= tiles_q;
    const Index q_d = (Index)((p.out_extent[0] - 1 + p.pad[0]) / STRIDE_D - p.pad[0] / STRIDE_D + 1);
    const Index length = (q_d + (Index)p.tiles[0] - 1) / (Index)p.tiles[0];
    const Index first = (Index)(index % (unsigned)p.tiles[0]) * length;
    index /= (unsigned)p.tiles[0];
    b.first_q = (Index)p.pad[0] / STRIDE_D + first;
    b.last_q = (Index)p.pad[0] / STRIDE_D + min(first + length, q_d) - 1;
    const unsigned tile_c = index % (unsigned)p.tiles[3];
    index /= (unsigned)p.tiles[3];
    if (LANES_C > 1) {
        b.channel = tile_c * (LANES_C * VECTOR);
        b.n = index;
    } else {
        b.channel = index % (unsigned)p.groups * p.c_out + tile_c * CHANNELS_OUT;
        b.n = index / (unsigned)p.groups;
    }
    return b;
}

// ---- memory -------------------------------------------------------------------------------------------------------

// VECTOR values of x as they were fetched; 16-bit ones in a word, from which a value takes one instruction.
#if DTYPE == FLOAT16 || DTYPE == BFLOAT16
typedef unsigned Fetched;
__device__ __forceinline__ Fetched fetch(const Stored* from) {
    return VECTOR == 2 ? *reinterpret_cast<const unsigned*>(from) : from->bits;
}
__device__ __forceinline__ float widen_one(Fetched word, int v) {
#if DTYPE == FLOAT16
    return half_bits_to_float((unsigned short)(word >> 16 * v));
#else
    return __uint_as_float(v == 0 ? word << 16 : word & 0xffff0000u);
#endif
}
#else
typedef Pack<Stored, VECTOR> Fetched;
__device__ __forceinline__ Fetched fetch(const Stored* from) { return *reinterpret_cast<const Fetched*>(from); }
__device__ __forceinline__ Acc widen_one(const Fetched& pack, int v) { return pack.value[v]; }
#endif

__device__ __forceinline__ void narrow_one(Acc value, Stored& to) {
#if DTYPE == BFLOAT16
    to.bits = (unsigned short)floats_to_bfloat16_bits(value, 0);  // one instruction
#else
    narrow(value, to);
#endif
}

// Narrows and stores N values, in pieces as wide as N and 16 bytes allow; `to` is aligned accordingly.
template <int N> __device__ __forceinline__ void store(Stored* to, const Acc (&value)[N]) {
    constexpr int WIDEST = 16 / (int)sizeof(Stored);
    constexpr int PIECE = (N & -N) < WIDEST ? N & -N : WIDEST;
#pragma unroll
    for (int i = 0; i < N; i += PIECE) {
#if DTYPE == FLOAT16 || DTYPE == BFLOAT16
        if constexpr (PIECE == 1) {
            narrow_one(value[i], to[i]);
        } else {
            Pack<unsigned, PIECE / 2> words;
#pragma unroll
            for (int j = 0; j < PIECE / 2; ++j)
                words.value[j] = DTYPE == FLOAT16 ? floats_to_half_bits(value[i + 2 * j], value[i + 2 * j + 1])
                                                  : floats_to_bfloat16_bits(value[i + 2 * j], value[i + 2 * j + 1]);
            *reinterpret_cast<Pack<unsigned, PIECE / 2>*>(to + i) = words;
        }
#else
        Pack<Stored, PIECE> pack;
#pragma unroll
        for (int j = 0; j < PIECE; ++j) pack.value[j] = value[i + j];
        *reinterpret_cast<Pack<Stored, PIECE>*>(to + i) = pack;
#endif
    }
}

// Whether a thread's outputs may be stored by one instruction: contiguous, and starting where they must.
__device__ __forceinline__ bool out_aligned(const Stored* out, const Problem& p) {
    constexpr int BYTES = (LANES_C > 1 ? VECTOR : OUTPUTS_W) * (int)sizeof(Stored);
    const long long fastest = LANES_C > 1 ? p.out_stride[1] : p.out_stride[4];
    const long long others = p.out_stride[0] | p.out_stride[2] | p.out_stride[3] |
                             (LANES_C > 1 ? p.out_stride[4] : p.out_stride[1] | p.out_extent[2]);
    return fastest == 1 && (others * (long long)sizeof(Stored) | (long long)out) % BYTES == 0;
}

// Copies the weights of the block's rows: those taps along H that reach them; the others become zero.
__device__ __forceinline__ void stage_weight(Acc* to, const Stored* weight, const Problem& p, const Block& b,
                                             const PhaseTaps<AxisH, KERNEL_H>& taps_h) {
    const int count = (int)p.c_in * TAPS * CHANNELS_OUT * LANES_C * VECTOR;
    for (int i = threadIdx.x; i < count; i += blockDim.x) {
        const int tap = i % TAPS, row = tap / KERNEL_W % ROWS;
        const int co = i / TAPS % CHANNELS_OUT, rest = i / (TAPS * CHANNELS_OUT);
        const int ci = rest % (int)p.c_in, lane = rest / (int)p.c_in;
        const long long channel = b.channel + lane;
        const int group = (int)(channel / p.c_out), c = (int)(channel % p.c_out) + co;
        Acc value = 0;
        if (row < taps_h.count && c < p.c_out && group < p.groups) {
            value = widen(weight[(Index)p.weight_first + group * (Index)p.weight_group_stride +
                                 ci * (Index)p.weight_stride[0] + c * (Index)p.weight_stride[1] +
                                 tap / (KERNEL_W * ROWS) * (Index)p.weight_stride[2] +
                                 taps_h.tap(row) * (Index)p.weight_stride[3] +
                                 tap % KERNEL_W * (Index)p.weight_stride[4]]);
        }
        to[ci * WEIGHT_CHANNEL + (tap * CHANNELS_OUT + co) * WEIGHT + lane] = value;
    }
}

// ---- arithmetic ---------------------------------------------------------------------------------------------------

// What a thread holds: a plane of x as it was fetched, and widened; the weights of an input channel; a plane of
// outputs; and all planes of outputs that a plane of x reaches, by q and phase along D.
typedef Fetched Plane[ROWS][COLUMNS];
typedef Acc Window[ROWS][COLUMNS][VECTOR];
typedef Acc Weights[TAPS][CHANNELS_OUT][VECTOR];
struct Outputs {
    Acc value[CHANNELS_OUT][OUTPUTS_W][VECTOR];
};
typedef Outputs Results[DEPTH][STRIDE_D];

// Fetches the part of a plane of x that exists; `from` is the first column of row 0.
__device__ __forceinline__ void fetch_plane(Plane& to, const Stored* from, long long row_step, Index x_stride_w,
                                            const unsigned (&inside)[ROWS], bool plane_exists) {
#pragma unroll
    for (int row = 0; row < ROWS; ++row) {
        const unsigned exists = plane_exists ? inside[row] : 0;
#pragma unroll
        for (int column = 0; column < COLUMNS; ++column) {
            to[row][column] = Fetched();
            if (exists >> column & 1) to[row][column] = fetch(from + column * x_stride_w);
        }
        from -= row_step;
    }
}

__device__ __forceinline__ void load_weights(Weights& to, const Acc* from) {
#pragma unroll
    for (int tap = 0; tap < TAPS; ++tap)
#pragma unroll
        for (int co = 0; co < CHANNELS_OUT; ++co)
#pragma unroll
            for (int v = 0; v < VECTOR; ++v) to[tap][co][v] = from[(tap * CHANNELS_OUT + co) * WEIGHT + v];
}

__device__ __forceinline__ void widen_plane(Window& to, const Plane& from) {
#pragma unroll
    for (int row = 0; row < ROWS; ++row)
#pragma unroll
        for (int column = 0; column < COLUMNS; ++column)
#pragma unroll
            for (int v = 0; v < VECTOR; ++v) to[row][column][v] = widen_one(from[row][column], v);
}

__device__ __forceinline__ void multiply(Results& acc, const Window& x, const Weights& weight) {
#pragma unroll
    for (int tap_d = 0; tap_d < KERNEL_D; ++tap_d)
#pragma unroll
        for (int row = 0; row < ROWS; ++row)
#pragma unroll
            for (int tap_w = 0; tap_w < KERNEL_W; ++tap_w)
#pragma unroll
                for (int co = 0; co < CHANNELS_OUT; ++co)
#pragma unroll
                    for (int t = 0; t < POSITIONS_W; ++t)
#pragma unroll
                        for (int v = 0; v < VECTOR; ++v)
                            acc[AxisD::back(tap_d)][AxisD::phase_of(tap_d)]
                                .value[co][t * STRIDE_W + residue_w(tap_w)][v] +=
                                x[row][t + offset_w(tap_w) - FIRST_W][v] *
                                weight[(tap_d * ROWS + row) * KERNEL_W + tap_w][co][v];
}

// ---- the kernel ---------------------------------------------------------------------------------------------------

extern "C" __global__ void __launch_bounds__(MAX_THREADS, MIN_BLOCKS)
    few_channels(const Stored* x, const Stored* weight, const Stored* bias, Stored* out, const Problem p) {
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    Acc* const shared = reinterpret_cast<Acc*>(shared_bytes);

    const Block b = locate(p);
    const PhaseTaps<AxisH, KERNEL_H> taps_h((int)((b.residue_h + p.pad[1]) % STRIDE_H));
    stage_weight(shared, weight, p, b, taps_h);
    __syncthreads();

    const int lane_c = threadIdx.x % LANES_C * VECTOR;
    const unsigned tiles_w = (unsigned)p.tiles[2], positions = (unsigned)p.tiles[1] * tiles_w;
    const unsigned position = b.position + threadIdx.x / LANES_C;
    const long long channel = b.channel + lane_c;
    const int group = (int)(channel / p.c_out);
    const int channels = (int)(p.c_out - channel % p.c_out);  // of the group, from here on
    const bool idle = position >= positions || group >= p.groups;
    if (__all_sync(~0u, idle)) return;  // no barrier of the block follows
    const Index first_t = (Index)(position % tiles_w) * POSITIONS_W;
    const Index out_h = (Index)(position / tiles_w) * STRIDE_H + b.residue_h, out_w = first_t * STRIDE_W;

    // Where the thread reads x within a plane, and a bit for each column of each row that exists.
    const Index x_stride_w = X_STRIDE_W ? X_STRIDE_W : (Index)p.x_stride[4];
    const Index first_w = first_t + (Index)p.pad[2] / STRIDE_W + FIRST_W;
    const Index first_h = (out_h + (Index)p.pad[1]) / STRIDE_H - AxisH::back(taps_h.first);
    unsigned inside[ROWS];
#pragma unroll
    for (int row = 0; row < ROWS; ++row) {
        inside[row] = 0;
        if (!idle && row < taps_h.count && within(first_h - row * AxisH::HOP, p.x_extent[1])) {
#pragma unroll
            for (int column = 0; column < COLUMNS; ++column)
                inside[row] |= (unsigned)within(first_w + column, p.x_extent[2]) << column;
        }
    }
    const long long row_step = AxisH::HOP * p.x_stride[3];
    const Index first_d = b.first_q - AxisD::REACH;
    const Stored* plane = x + b.n * p.x_stride[0] + group * p.c_in * p.x_stride[1] + first_d * p.x_stride[2] +
                          first_h * p.x_stride[3] + first_w * (long long)x_stride_w;

    // Where it stores, and a bit for each of its outputs that exists.
    const Index out_stride_w = OUT_STRIDE_W ? OUT_STRIDE_W : (Index)p.out_stride[4];
    const bool aligned = (LANES_C > 1 ? VECTOR > 1 : ONE_STORE) && out_aligned(out, p);
    const bool row_exists = !idle && within(out_h, p.out_extent[1]);
    Stored* to = out + b.n * p.out_stride[0] + channel * p.out_stride[1] +
                 (b.first_q * STRIDE_D - p.pad[0]) * p.out_stride[2];
    if (LANES_C > 1 || aligned) to += out_h * p.out_stride[3] + out_w * (long long)out_stride_w;
    unsigned exists = 0;
#if LANES_C > 1
#pragma unroll
    for (int i = 0; i < OUTPUTS_W; ++i) exists |= (unsigned)(row_exists && within(out_w + i, p.out_extent[2])) << i;
#else
    Stored* const turned =
        reinterpret_cast<Stored*>(shared_bytes + ((int)p.c_in * WEIGHT_CHANNEL * (int)sizeof(Acc) + 15) / 16 * 16) +
        threadIdx.x / 32 * 32 * ROW;
    const int lane = threadIdx.x % 32;
    UIndex target[ROW];
    if (aligned) {
        exists = row_exists && within(out_w, p.out_extent[2]);
    } else {
        // After the turn a lane stores every 32nd result of the warp. Targets count from the lowest address of a plane:
        // without a sign, they take one register each.
        const long long lowest = min(0ll, p.out_stride[3]) * (p.out_extent[1] - 1) +
                                 min(0ll, (long long)out_stride_w) * (p.out_extent[2] - 1) +
                                 min(0ll, p.out_stride[1]) * (ROW_CHANNELS - 1);
        to += lowest;
#pragma unroll
        for (int i = 0; i < ROW; ++i) {
            const int e = i * 32 + lane;
            const unsigned owner = position - lane + e / ROW;
            const Index h = (Index)(owner / tiles_w) * STRIDE_H + b.residue_h;
            const Index w = (Index)(owner % tiles_w) * OUTPUTS_W + e % ROW / ROW_CHANNELS;
            const int c = e % ROW % ROW_CHANNELS;
            target[i] = 0;
            if (owner < positions && c < channels && within(h, p.out_extent[1]) && within(w, p.out_extent[2])) {
                target[i] = (UIndex)(h * p.out_stride[3] + w * (long long)out_stride_w + c * p.out_stride[1] - lowest);
                exists |= 1u << i;
            }
        }
    }
#endif

    Outputs empty;  // sums start with the bias
#pragma unroll
    for (int co = 0; co < CHANNELS_OUT; ++co)
#pragma unroll
        for (int v = 0; v < VECTOR; ++v) {
            const Acc value = bias && !idle && co < channels ? widen(bias[(channel + co + v) * p.bias_stride]) : Acc(0);
#pragma unroll
            for (int i = 0; i < OUTPUTS_W; ++i) empty.value[co][i][v] = value;
        }
    Results acc;
#pragma unroll
    for (int back = 0; back < DEPTH; ++back)
#pragma unroll
        for (int phase = 0; phase < STRIDE_D; ++phase) acc[back][phase] = empty;

    Weights weights;
    if (HOLD_WEIGHTS) load_weights(weights, shared + lane_c);

    // Writes the thread's outputs of one plane.
    const auto write = [&](Stored* at, const Outputs& outputs) {
#if LANES_C > 1
        if (aligned) {
#pragma unroll
            for (int i = 0; i < OUTPUTS_W; ++i)
                if (exists >> i & 1) store(at + i * out_stride_w, outputs.value[0][i]);
        } else {
#pragma unroll
            for (int i = 0; i < OUTPUTS_W; ++i)
#pragma unroll
                for (int v = 0; v < VECTOR; ++v)
                    if (exists >> i & 1) narrow_one(outputs.value[0][i][v], at[i * out_stride_w + v * p.out_stride[1]]);
        }
#else
#pragma unroll
        for (int first = 0; first < CHANNELS_OUT; first += ROW_CHANNELS) {
            if (first >= channels) break;
            Acc row[ROW];
#pragma unroll
            for (int i = 0; i < ROW; ++i) row[i] = outputs.value[first + i % ROW_CHANNELS][i / ROW_CHANNELS][0];
            if (aligned) {
                if (exists) store(at, row);
            } else {
                store(turned + lane * ROW, row);
                __syncwarp();
#pragma unroll
                for (int i = 0; i < ROW; ++i)
                    if (exists >> i & 1) at[target[i]] = turned[i * 32 + lane];
                __syncwarp();
            }
            at += p.out_stride[1];
        }
#endif
    };

    const int channels_in = HOLD_WEIGHTS ? 1 : (int)p.c_in;
    Plane ahead;
    fetch_plane(ahead, plane, row_step, x_stride_w, inside, within(first_d, p.x_extent[0]));
#pragma unroll 1
    for (Index d = first_d; d <= b.last_q; ++d) {
#pragma unroll 1
        for (int ci = 0; ci < channels_in; ++ci) {
            Window window;
            widen_plane(window, ahead);
            const bool next_plane = ci + 1 == channels_in;
            plane += next_plane ? p.x_stride[2] - ci * p.x_stride[1] : p.x_stride[1];
            fetch_plane(ahead, plane, row_step, x_stride_w, inside, within(d + next_plane, p.x_extent[0]));
            if (!HOLD_WEIGHTS) load_weights(weights, shared + ci * WEIGHT_CHANNEL + lane_c);
            multiply(acc, window, weights);
        }
        if (d >= b.first_q) {  // q = d is complete: no later plane reaches it
#pragma unroll
            for (int phase = 0; phase < STRIDE_D; ++phase) {
                const Index out_d = d * STRIDE_D + phase - (Index)p.pad[0];
                if (within(out_d, p.out_extent[0])) write(to + phase * p.out_stride[2], acc[0][phase]);
            }
            to += STRIDE_D * p.out_stride[2];
        }
#pragma unroll
        for (int phase = 0; phase < STRIDE_D; ++phase) {
#pragma unroll
            for (int back = 1; back < DEPTH; ++back) acc[back - 1][phase] = acc[back][phase];
            acc[DEPTH - 1][phase] = empty;
        }
    }
}
