// Kernel = stride on Hopper's tensor cores (sm_90a): float16, bfloat16 and float32 (as TF32 or 3xTF32).
//
// Taps do not overlap, as in a U-Net's upsampling: each output has one tap, and each position of x has outputs of its own. That
// is one matrix product, without a halo: M = positions, N = output channels x taps, K = input channels. What bounds it is how
// fast memory takes the result, which is much larger than x.
//
// So nothing is staged but the weights that a block needs, once. A thread loads x to where a wgmma takes A from: registers. Of
// RUN positions that follow each other it has one row of A each; with g = lane / 4 and t = lane % 4, these are rows g and g + 8
// of its warp's in one tile after the other, and of each the words t and t + 4 of a step along K. (A word is one channel, or two
// of 16 bits.) The sums that it receives are RUN * KERNEL_W outputs of a row that follow each other, of two channels in eight.
// It stores them as they are, 16 bytes at a time, so that the eight threads of a channel fill 128 bytes of a row. Where rows are
// not aligned for that, the four threads of a run exchange words, and store 4 bytes at a time next to each other.
//
// Of channels-last x, 16 bytes of a position serve two steps along K, which take channels in another order then, as do the
// weights (see `word_of`). Channels-last results are exchanged between the four threads of a position (channels_last_store.cuh).
//
// Positions are counted in runs, one row of x after the other. A worker, which is a warpgroup, takes one tile of them after the
// other, and multiplies it by one slot of weights after the other: TILE_C output channels, one tap along D and one along H, and
// all taps along W, or by eight channels of each. What it needs of the next tile is loaded while it does, if there are registers
// for it (AHEAD).
//
// Compile-time: kernel, dtype, precision, tile and, as steps along K, the channels of x. Run-time: N, extents, padding, C_out.
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
#define TILES_C 4
#endif
#ifndef K_STEPS  // along all input channels of a group: 8 of float32, 16 of 16 bits
#define K_STEPS 8
#endif
#ifndef RUN  // positions that follow each other, of a thread
#define RUN 2
#endif
#ifndef AHEAD
#define AHEAD 1
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
constexpr int COLUMNS = KERNEL_W * TILE_C;  // of a wgmma: [tap along W][channel]
constexpr int OUTPUTS_W = KERNEL_W;

// A slot of weights: [step][part][2 pieces][column][16 bytes]. Sizes in units of 16 bytes.
constexpr int OPERAND = 2 * COLUMNS;
constexpr int SLOT = K_STEPS * PARTS * OPERAND;
constexpr int TAPS = KERNEL_D * KERNEL_H;  // each of a slot

constexpr int BARRIER_BYTES = 128;
constexpr int SECTOR = 32;  // bytes of memory that are written at once

#include "runs.cuh"

static_assert(IN_WORD == 1 || X_CHANNELS_LAST || RUN % 2 == 0, "16-bit numbers of a row are loaded in words");

// Which word of a position's channels is word `slot` of a step. Steps that are loaded at once take two words of a thread each.
__host__ __device__ constexpr int steps_at_once(int step) { return step / 2 * 2 + 1 < K_STEPS ? 2 : 1; }
__host__ __device__ constexpr int word_of(int step, int slot) {
    if (!X_CHANNELS_LAST) return 8 * step + slot;
    return 8 * (step / 2 * 2) + slot % 4 * (2 * steps_at_once(step)) + step % 2 * 2 + slot / 4;
}

__device__ __forceinline__ int first_position(const Problem& p, int axis, int stride) { return (int)(p.pad[axis] / stride); }

// ---- x ---------------------------------------------------------------------------------------------------------------

// What a thread has of a tile, as it comes: of each run and step, the words t and t + 4 of all positions or, of 16-bit rows, the
// same bytes as pairs of positions, of one channel and of the next one.
struct Loaded {
    unsigned value[RUNS][K_STEPS][2][RUN];
};

// `from` is the run's first position in the group's first channel, of which `count` positions exist.
__device__ __forceinline__ void load_rows(unsigned (&to)[K_STEPS][2][RUN], const Stored* from, int count, const Problem& p) {
    const int first = (int)threadIdx.x % 4 * IN_WORD;
    const long long step = p.x_stride[1];
    from += first * step;
#pragma unroll
    for (int slots = 0; slots < 2 * K_STEPS; ++slots) {  // of a thread
#pragma unroll
        for (int i = 0; i < IN_WORD; ++i) {
            constexpr int WORDS = RUN / IN_WORD > 0 ? RUN / IN_WORD : 1;  // of a channel
            Pack<unsigned, WORDS> words;
            load(words, from + i * step, count > 0 && slots * 4 * IN_WORD + i < (int)p.c_in - first);
#pragma unroll
            for (int j = 0; j < RUN / IN_WORD; ++j) to[slots / 2][slots % 2][i * (RUN / IN_WORD) + j] = words.value[j];
        }
        from += 4 * IN_WORD * step;
    }
}

// Channels-last: all channels of a load exist, or none.
__device__ __forceinline__ void load_channels(unsigned (&to)[K_STEPS][2][RUN], const Stored* from, int count, const Problem& p) {
#pragma unroll
    for (int j = 0; j < RUN; ++j) {
#pragma unroll
        for (int step = 0; step < K_STEPS; step += 2) {
            constexpr int LAST = K_STEPS % 2 ? K_STEPS - 1 : K_STEPS;
            const int words_at_once = step == LAST ? 2 : 4;
            const int channel = (8 * step + (int)threadIdx.x % 4 * words_at_once) * IN_WORD;
            const bool there = j < count && channel < (int)p.c_in;
            if (step == LAST) {
                Pack<unsigned, 2> words;
                load(words, from + channel, there);
#pragma unroll
                for (int i = 0; i < 2; ++i) to[step][i][j] = words.value[i];
            } else {
                Pack<unsigned, 4> words;
                load(words, from + channel, there);
#pragma unroll
                for (int i = 0; i < 4; ++i) to[step + i / 2][i % 2][j] = words.value[i];
            }
        }
        from += p.x_stride[4];
    }
}

// One element after the other, whatever their strides. Of 16 bits, BATCH are under way: until it is half of a word, each takes a
// register.
constexpr int BATCH = 16;
__device__ __forceinline__ void load_elements(unsigned (&to)[K_STEPS][2][RUN], const Stored* from, int count, const Problem& p) {
    constexpr bool OF_POSITIONS = IN_WORD == 2 && !X_CHANNELS_LAST;  // whether two of these share a word
    constexpr int STEPS = ceil_div(BATCH, 2 * IN_WORD * RUN);  // whose elements these are
#pragma unroll
    for (int step = 0; step < K_STEPS; ++step) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
            for (int j = 0; j < RUN; ++j) to[step][half][j] = 0;
            const int channel = word_of(step, (int)threadIdx.x % 4 + 4 * half) * IN_WORD;
#pragma unroll
            for (int i = 0; i < IN_WORD; ++i) {
#pragma unroll
                for (int j = 0; j < RUN; ++j) {
                    unsigned bits = 0;
                    if (j < count && channel + i < (int)p.c_in)
                        bits = bits_of(from[(channel + i) * p.x_stride[1] + j * p.x_stride[4]]);
                    if (OF_POSITIONS) to[step][half][i * (RUN / IN_WORD) + j / 2] |= bits << 16 * (j % 2);
                    else to[step][half][j] |= bits << 16 * i;
                }
            }
        }
        const bool is_last = IN_WORD > 1 && (step + 1) % STEPS == 0;  // of a batch
#pragma unroll
        for (int i = 0; i < 2 * STEPS * RUN && is_last; ++i) {
            unsigned& word = to[step - i / (2 * RUN)][i / RUN % 2][i % RUN];
            word = (unsigned)recomputed((int)word);
        }
        if (is_last) issue_in_order();
    }
}

// `x` is the group's first channel. Elements that threads put together they wait for: VECTORS come ahead, elements do not.
template <bool VECTORS, bool ELEMENTS>
__device__ __forceinline__ void load_tile(Loaded& to, const Stored* x, int tile, const Problem& p) {
    if (!(p.x_vector ? VECTORS : ELEMENTS)) return;
#pragma unroll
    for (int run = 0; run < RUNS; ++run) {
        const Place at = place_of(run_of(tile, run), p);
        const int d = at.d + first_position(p, 0, KERNEL_D), h = at.h + first_position(p, 1, KERNEL_H);
        const int w = at.w + first_position(p, 2, KERNEL_W);
        const bool there = at.there && d < (int)p.x_extent[0] && h < (int)p.x_extent[1];
        const int count = there ? max(0, min(RUN, (int)p.x_extent[2] - w)) : 0;
        const Stored* const from =
            x + (at.n * p.x_stride[0] + d * p.x_stride[2] + h * p.x_stride[3] + w * p.x_stride[4]);
        if (ELEMENTS && !p.x_vector) load_elements(to.value[run], from, count, p);
        else if (VECTORS && X_CHANNELS_LAST) load_channels(to.value[run], from, count, p);
        else if (VECTORS) load_rows(to.value[run], from, count, p);
    }
}

// Takes the words of x to their rows, rounded to TF32; for 3xTF32, `multiply` splits them.
__device__ __forceinline__ void pick(Fragments& a, const Loaded& x) {
#pragma unroll
    for (int row = 0; row < 2 * TILES_M; ++row) {
#pragma unroll
        for (int step = 0; step < K_STEPS; ++step) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const unsigned(&words)[RUN] = x.value[row / RUN][step][half];
                unsigned& to = a.value[row / 2][step][row % 2 + 2 * half];
                const int j = row % RUN;
                if constexpr (IN_WORD == 2 && !X_CHANNELS_LAST) {
                    to = select_bytes(words[j / 2], words[RUN / 2 + j / 2], j % 2 ? 0x7632 : 0x5410);
                } else if (PRECISION == TF32) {
                    to = to_tf32(__uint_as_float(words[j]));
                } else {
                    to = words[j];
                }
            }
        }
    }
}

// ---- the result ------------------------------------------------------------------------------------------------------

__device__ __forceinline__ Target target_of(Stored* out, int tile, int run, const Problem& p) {
    const Place at = place_of(run_of(tile, run), p);
    // With padding, the first position may have outputs before the first one.
    const int d = at.d * KERNEL_D - (int)(p.pad[0] % KERNEL_D), h = at.h * KERNEL_H - (int)(p.pad[1] % KERNEL_H);
    const int w = at.w * KERNEL_W - (int)(p.pad[2] % KERNEL_W);
    out += at.n * p.out_stride[0] + d * p.out_stride[2] + h * p.out_stride[3] + w * p.out_stride[4];
    return {out, at.there ? d : -KERNEL_D, h, w};
}

// Where rows of the result end within a sector, this is written in parts, and the less is written between these the better: eight
// channels at a time and, if there are registers, two rows of taps. Not in 3xTF32, which would split x for each eight anew, nor
// with many steps, as a wgmma of few columns takes nearly as long as one of some more.
constexpr int MOST_STEPS_IN_PARTS = 12;
constexpr bool CAN_BE_IN_PARTS = !OUT_CHANNELS_LAST && PRECISION != TF32X3 && K_STEPS <= MOST_STEPS_IN_PARTS;
constexpr int EIGHTS_IN_PARTS = CAN_BE_IN_PARTS ? 1 : TILES_C;
constexpr int ROWS_IN_PARTS = CAN_BE_IN_PARTS && KERNEL_H > 1 && TILES_C >= 4 ? 2 : 1;

// The products of so many of ROWS taps along H, whose slots follow each other.
template <int EIGHTS, int ROWS>
__device__ __forceinline__ void multiply_rows(Sums<EIGHTS> (&sums)[ROWS], const Fragments& a, Operand weights, int rows) {
#if PRECISION == TF32X3
    static_assert(ROWS == 1, "x is split for one row of taps");
    multiply(sums[0], a, of_warp(weights), false);
#else
    Operand of_row[ROWS];
    of_row[0] = of_warp(weights);
#pragma unroll
    for (int row = 1; row < ROWS; ++row) of_row[row] = of_warp(weights + (row < rows ? row : 0) * SLOT);
    wgmma_fence();
#pragma unroll
    for (int row = 0; row < ROWS; ++row) multiply_add_all(sums[row], a, of_row[row], false);
    wgmma_commit();
    wgmma_wait<0>();
#endif
}

// All taps of so many times 8 channels, ROWS along H at a time, and then those of the next channels.
template <int EIGHTS, int ROWS>
__device__ __forceinline__ void multiply_slots(const Fragments& a, const Target (&targets)[RUNS], const Piece* slots,
                                               const float* offsets, int first_slot, int count, const Problem& p) {
    static_assert(EIGHTS == 1 || EIGHTS == TILES_C, "columns of eight channels lie as far apart as their taps");
    const Operand weights = describe(slots, COLUMNS * 16, EIGHTS == TILES_C ? 128 : TILE_C * 16);
#pragma unroll 1
    for (int slot = 0; slot < count;) {
        const int tile_c = (first_slot + slot) / TAPS, first_tap = (first_slot + slot) % TAPS;
        const int taps = min(TAPS - first_tap, count - slot);
#pragma unroll 1
        for (int further = 0; further < TILE_C && tile_c * TILE_C + further < (int)p.c_out; further += 8 * EIGHTS) {
            const int channel = tile_c * TILE_C + further;
#pragma unroll 1
            for (int i = 0; i < taps;) {
                const int tap_d = (first_tap + i) / KERNEL_H, tap_h = (first_tap + i) % KERNEL_H;
                const int rows = min(min(ROWS, KERNEL_H - tap_h), taps - i);
                Sums<EIGHTS> sums[ROWS];
                multiply_rows(sums, a, weights + ((slot + i) * SLOT + further), rows);
                store(targets, sums, offsets + channel, tap_d, tap_h, rows, channel * p.out_stride[1],
                      min(8 * EIGHTS, (int)p.c_out - channel), p);
                i += rows;
            }
        }
        slot += taps;
    }
}

// ---- the kernel ------------------------------------------------------------------------------------------------------

// All slots of a group are dealt to `p.patches[0]` parts, `p.plane` to each but the last. A block has one part of one group.
extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    disjoint(const Stored* x, const Piece* packed, const Stored* bias, Stored* out, const Problem p) {
    extern __shared__ __align__(128) unsigned char shared_bytes[];
    Barrier* const landed = reinterpret_cast<Barrier*>(shared_bytes);
    Piece* const slots = reinterpret_cast<Piece*>(shared_bytes + BARRIER_BYTES);
    float* const offsets = reinterpret_cast<float*>(slots + (int)p.plane * SLOT);

    const unsigned parts = (unsigned)p.patches[0], sets = parts * (unsigned)p.groups;
    const int part = (int)(blockIdx.x % parts), group = (int)(blockIdx.x / parts % (unsigned)p.groups);
    const int first_slot = part * (int)p.plane, all_slots = (int)p.tiles[3] * TAPS;
    const int count = min((int)p.plane, all_slots - first_slot);
    x += group * p.c_in * p.x_stride[1];
    out += group * p.c_out * p.out_stride[1];

    const bool are_whole = p.out_extent[1] == 1 || p.out_stride[3] * (int)sizeof(Stored) % SECTOR == 0;
    const bool in_parts = CAN_BE_IN_PARTS && !(are_whole && p.out_vector == AT_ONCE);
    const int workers = (int)(gridDim.x / sets) * WORKERS;
    int tile = (int)(blockIdx.x / sets) * WORKERS + (int)threadIdx.x / 128;
    Loaded loaded;
    load_tile<true, true>(loaded, x, tile, p);

    if (threadIdx.x == 0) {
        barrier_init(landed, 1);
        barrier_init_done();
        wait_for_kernel_before();  // it packs the weights
        barrier_arrive_expecting(landed, count * SLOT * (int)sizeof(Piece));
        const Piece* from = packed + (group * (long long)all_slots + first_slot) * SLOT;
        for (int i = 0; i < count; ++i)
            copy_bulk(slots + i * SLOT, from + i * (long long)SLOT, SLOT * (int)sizeof(Piece), landed);
    }
    for (int c = (int)threadIdx.x; c < (int)p.tiles[3] * TILE_C; c += THREADS) {
        const bool biased = bias && c < (int)p.c_out;
        offsets[c] = biased ? widen(bias[(group * p.c_out + c) * p.bias_stride]) : 0.0f;
    }
    __syncthreads();
    barrier_wait(landed, 0);

    for (; tile < (int)p.blocks; tile += workers) {
        Fragments a;
        pick(a, loaded);
        if (AHEAD) load_tile<true, IN_WORD == 1>(loaded, x, tile + workers, p);
        Target targets[RUNS];
#pragma unroll
        for (int run = 0; run < RUNS; ++run) targets[run] = target_of(out, tile, run, p);
        if (in_parts) multiply_slots<EIGHTS_IN_PARTS, ROWS_IN_PARTS>(a, targets, slots, offsets, first_slot, count, p);
        else multiply_slots<TILES_C, 1>(a, targets, slots, offsets, first_slot, count, p);
        if (!AHEAD || IN_WORD > 1) load_tile<!AHEAD, true>(loaded, x, tile + workers, p);
    }
}

// Puts the weights of the call in the order of the slots, once, before the kernel above: [group][tile of output channels][tap
// along D][tap along H]. Consecutive threads read consecutive weights. There are fewer than 2^32: the pieces of more are more than
// a GPU's memory.
extern "C" __global__ void disjoint_pack(const Stored* weight, Piece* packed, const Problem p) {
    let_next_kernel_start();
    unsigned index = blockIdx.x * blockDim.x + threadIdx.x;
    const int tap_w = (int)(index % KERNEL_W);
    index /= KERNEL_W;
    const int tap = (int)(index % TAPS);
    index /= TAPS;
    const int column = (int)(index % TILE_C);
    index /= TILE_C;
    const int tile_c = (int)take(index, p, 3);
    const int piece = (int)(index % 2), step = (int)(index / 2 % K_STEPS);
    const unsigned group = index / (2 * K_STEPS);
    if (group >= (unsigned)p.groups) return;

    const int co = tile_c * TILE_C + column;
    weight += p.weight_first + group * p.weight_group_stride + co * p.weight_stride[1] +
              tap / KERNEL_H * p.weight_stride[2] + tap % KERNEL_H * p.weight_stride[3] + tap_w * p.weight_stride[4];
    Channels c;
#pragma unroll
    for (int i = 0; i < PIECE; ++i) {
        const int channel = word_of(step, piece * 4 + i / IN_WORD) * IN_WORD + i % IN_WORD;
        zero(c.value[i]);
        if (co < p.c_out && channel < p.c_in) c.value[i] = weight[channel * p.weight_stride[0]];
    }
    Piece parts[PARTS];
    pack(c, parts);
    const long long slot = (group * p.tiles[3] + tile_c) * TAPS + tap;
#pragma unroll
    for (int part = 0; part < PARTS; ++part)
        packed[slot * SLOT + (step * PARTS + part) * OPERAND + piece * COLUMNS + tap_w * TILE_C + column] = parts[part];
}
