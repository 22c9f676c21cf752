// Phase GEMM on Hopper's tensor cores (sm_90a), x in rows: float16, bfloat16 and float32 (as TF32 or 3xTF32).
//
// The sums of `phase_wgmma.cu`, which see: a phase is a stride-1 correlation, M = positions q, N = output channels, K = input
// channels x taps. What bounds that kernel in rows is that threads turn x, once for every tile of columns. Here no thread moves an
// element: bulk tensor copies bring rows as they are, and a wgmma takes A from registers, which workers load from these rows.
//
// A thread of a warp has rows g = lane / 4 and g + 8 of A and, of a step along K, two channels or, of 16 bits, four. Which position
// is which row is free: these two are neighbours along W, a *pair*. So a thread loads two positions of a channel at once; of 16 bits
// they are a word, and a selection of bytes makes two channels of one position of it. And its sums are 2 * STRIDE_W outputs of a row
// that follow each other, of two channels in eight, which it stores as they are, up to 16 bytes at a time, or exchanges with three
// others for those of more channels where rows are not aligned for that.
//
//     A pair, stride 2:   x, a row of a channel  [.. 2j 2j+1 ..]   ->   out  [.. 4j 4j+1 4j+2 4j+3 ..]
//
// A block owns a box of positions of one phase along D and H, all phases along W and a tile of output channels. Of a chunk of
// channels one copy brings the box with its halo, as [slice][row along H][channel][words], so that a row of A is any pair of the
// box. All taps along W are read from what a thread loads once. Where taps that read the same elements are one of each phase, as with
// kernel = stride, they are columns of one wgmma.
//
// Warps have roles. Workers multiply and store, each its own rows. Of the last warps one thread brings weights by bulk copies,
// another one names the boxes of x. A block takes one box after the other.
//
// A launch may be *flat*: the rows of a plane, which follow each other in memory, are one row of a copy, and a tap along H lies rows of
// x further. Copies take so long for each row, and short ones are not whole 16 bytes. What taps along W read beyond the end of a row
// is the next one then: workers put zeros in its place.
//
// Compile-time: kernel, stride, dilation, dtype, precision and tile; the padding along W, as it says which phase is first, which
// elements share a word, and where rows end. Run-time: N, extents, the box, other padding, channels, and whether the launch is flat.
#ifndef PAD_W
#define PAD_W 1
#endif
#ifndef OUT_RUN  // outputs of a row that are stored at a time; 1: threads exchange them before
#define OUT_RUN 4
#endif
#ifndef K_STEPS  // along K: 8 channels of float32, 16 of 16 bits
#define K_STEPS 2
#endif
#ifndef BOXED
#define BOXED 1
#endif
#define SPLIT_BY_WORKERS 1
#include "wgmma_box.cuh"

constexpr int IN_WORD = 4 / (int)sizeof(Stored);  // elements
constexpr int PAIR = 2 / IN_WORD;                 // words
constexpr int CHUNK = K_STEPS * 2 * PIECE;        // channels
constexpr int EIGHTS = 2 * PIECE / 8;             // of channels, of a step
constexpr int ALIGNED = PIECE;                    // elements along W at multiples of which copies begin

constexpr int FIRST_PHASE_W = PAD_W % STRIDE_W;  // of the first output along W
constexpr int FIRST_W = PAD_W / STRIDE_W - AxisW::REACH;  // the first element that is read for the first position
constexpr int ODD_W = FIRST_W & 1;

constexpr int REACH_D = (AxisD::MAX_TAPS - 1) * AxisD::HOP, REACH_H = (AxisH::MAX_TAPS - 1) * AxisH::HOP;

// ---- taps along W ------------------------------------------------------------------------------------------------------
// Phases are counted from that of the first output on: phase j of a position q is output q * STRIDE_W + j from there. Those before
// FIRST_PHASE_W come last, and are *late*: they read one position further.

__host__ __device__ constexpr int phase_of(int tap) { return (AxisW::phase_of(tap) + STRIDE_W - FIRST_PHASE_W) % STRIDE_W; }
__host__ __device__ constexpr int shift_of(int tap) {  // elements from the first one that a position reads
    return AxisW::REACH - AxisW::back(tap) + (AxisW::phase_of(tap) < FIRST_PHASE_W);
}
__host__ __device__ constexpr int last_shift() {
    int last = 0;
    for (int tap = 0; tap < KERNEL_W; ++tap) last = shift_of(tap) > last ? shift_of(tap) : last;
    return last;
}
constexpr int REACH_W = last_shift();

// Taps are put in order: what the same elements are read for is together, by phases.
__host__ __device__ constexpr int taps_at(int shift) {
    int count = 0;
    for (int tap = 0; tap < KERNEL_W; ++tap) count += shift_of(tap) == shift;
    return count;
}
__host__ __device__ constexpr int place_of_tap(int tap) {
    int before = 0;
    for (int other = 0; other < KERNEL_W; ++other)
        before += shift_of(other) * STRIDE_W + phase_of(other) < shift_of(tap) * STRIDE_W + phase_of(tap);
    return before;
}
__host__ __device__ constexpr int tap_at(int place) {
    for (int tap = 0; tap < KERNEL_W; ++tap)
        if (place_of_tap(tap) == place) return tap;
    return 0;
}
// Where all phases read whatever one reads, their taps are columns of one wgmma, if it has so many; otherwise each tap has one of its
// own, for sums of which some are another wgmma's, too, would be moved. In 3xTF32 a phase's sums are a chain, the fewer the better.
__host__ __device__ constexpr bool have_all_phases() {
    for (int shift = 0; shift <= REACH_W; ++shift)
        if (taps_at(shift) && taps_at(shift) < STRIDE_W) return false;
    return true;
}
constexpr int MOST_COLUMNS = 192;
constexpr int JOINED = PRECISION != TF32X3 && have_all_phases() && STRIDE_W * TILE_C <= MOST_COLUMNS ? STRIDE_W : 1;
constexpr int SETS = STRIDE_W / JOINED;    // of sums
constexpr int COLUMNS = JOINED * TILE_C;   // of a wgmma: [phase along W][channel]
constexpr int PAIRS = (ODD_W + REACH_W + 1) / 2 + 1;  // that a thread loads of a channel, to have its own of every tap

// Whether a tap that reads so much further may read beyond the row for either position of a pair, which the row has.
__host__ __device__ constexpr bool may_be_outside(int shift, int half) {
    return FIRST_W + shift + half < 0 || FIRST_W + shift + half > 1;
}

// Whether a tap reads any of a pair of elements, counted from the even one where a box begins.
__host__ __device__ constexpr bool is_read(int pair) {
    for (int tap = 0; tap < KERNEL_W; ++tap) {
        const int first = ODD_W + shift_of(tap);
        if (first / 2 == pair || (first + 1) / 2 == pair) return true;
    }
    return false;
}

// A slot of weights, of a tap along D and one along H: [step][part][2 pieces][tap along W, in that order][channel][16 bytes]. Sizes in
// units of 16 bytes.
constexpr int OPERAND = 2 * KERNEL_W * TILE_C;
constexpr int SLOT = K_STEPS * PARTS * OPERAND;
constexpr int PACKED_PIECES = packed_pieces(2 * K_STEPS);  // that a thread packs

static_assert(BOXED && !X_CHANNELS_LAST && !OUT_CHANNELS_LAST && !MERGE_W && !TAKE_TURNS && !SLIDES, "rows, in boxes of one team");
static_assert(AxisW::STEP == STRIDE_W && KERNEL_W >= STRIDE_W, "each phase along W has a tap");
static_assert(2 * STRIDE_W % OUT_RUN == 0 && OUT_RUN * sizeof(Stored) <= 16, "a run is of one pair, and one store");
static_assert(PRECISION == TF32X3 || TILES_M * K_STEPS > 2, "words are loaded two steps ahead of what still reads A");
static_assert(TILES_M * K_STEPS % 2 == 0, "fragments alternate, from one call of `multiply` to the next, too");

// ---- boxes -------------------------------------------------------------------------------------------------------------

// How many rows along H a copy has.
__device__ __forceinline__ int lines(const Problem& p) { return (int)p.patches[1]; }

// Whether the first output of a phase belongs to a position one further.
__device__ __forceinline__ int late(long long pad, int stride, int phase) { return phase < (int)((unsigned)pad % stride); }

struct Block {
    Index d, h, w;  // first position q on each axis
    int tile_c, phase_d, phase_h, n, group;
};

__device__ __forceinline__ Block locate(unsigned index, const Problem& p) {
    // What reads the same x runs fastest, then what reads its neighbours.
    Block b;
    b.tile_c = (int)take(index, p, 3);
    b.group = (int)take(index, p, 4);
    b.phase_h = (int)(index % STRIDE_H);
    index /= STRIDE_H;
    b.phase_d = (int)(index % STRIDE_D);
    index /= STRIDE_D;
    b.w = (Index)take(index, p, 2) * (Index)p.box[2] + (Index)p.pad[2] / STRIDE_W;
    b.h = (Index)take(index, p, 1) * (Index)p.box[1] + (Index)p.pad[1] / STRIDE_H + late(p.pad[1], STRIDE_H, b.phase_h);
    b.d = (Index)take(index, p, 0) * (Index)p.box[0] + (Index)p.pad[0] / STRIDE_D + late(p.pad[0], STRIDE_D, b.phase_d);
    b.n = (int)index;
    return b;
}

// The taps along D and H of a block's phases.
struct Rows {
    PhaseTaps<AxisD, KERNEL_D> d;
    PhaseTaps<AxisH, KERNEL_H> h;
    __device__ __forceinline__ explicit Rows(const Block& b) : d(b.phase_d), h(b.phase_h) {}
    __device__ __forceinline__ int count() const { return d.count * h.count; }
};

// What is staged, in words: a row of a channel, all channels of it, and a slice along D.
struct Slices {
    int row, line, slice;

    __device__ __forceinline__ explicit Slices(const Problem& p)
        : row((int)p.plane), line(CHUNK * row), slice(lines(p) * line) {}
};

__device__ __forceinline__ int stage_pieces(const Problem& p) { return ((int)p.box[0] + REACH_D) * Slices(p).slice / 4; }

// The first element along W that a box reads; of a flat launch, of a plane.
__device__ __forceinline__ Index first_element(const Problem& p, const Block& b, const Rows& rows) {
    const Index first = b.w - AxisW::REACH;
    return is_flat(p) ? first + (b.h - AxisH::back(rows.h.first) - REACH_H) * (Index)p.x_extent[2] : first;
}
// Elements that a row begins before that: copies begin at multiples of 16 bytes.
__device__ __forceinline__ int lead(Index first) { return (int)(first & (ALIGNED - 1)); }

// A pair of a box, and where it is.
struct Pair {
    int d, h, w;
    bool there;
};

__device__ __forceinline__ Pair pair_of(int tile, const Problem& p) {
    const int pair = ((int)threadIdx.x / 128 * TILES_M + tile) * 32 + (int)threadIdx.x / 32 % 4 * 8 + (int)threadIdx.x % 32 / 4;
    const int across = ((int)p.box[2] + 1) / 2;
    const int line = (int)quotient(pair, p.box_magic[0]), d = (int)quotient(line, p.box_magic[1]);
    return {d, line - d * (int)p.box[1], (pair - line * across) * 2, d < (int)p.box[0]};
}

// The row of a plane's position, in a flat launch.
__device__ __forceinline__ int line_of(Index position, const Problem& p) { return (int)quotient((unsigned)position, p.box_magic[2]); }

// Brings the boxes of a block's chunks, by one thread.
__device__ __forceinline__ void bring_boxes(Ring& ring, Piece* stages, const TensorMap& x, const Problem& p, const Block& b,
                                            const Rows& rows, int chunks) {
    const Index first = first_element(p, b, rows);
    const int w = (int)first - lead(first), pieces = stage_pieces(p);
    const int h = is_flat(p) ? 0 : (int)b.h - AxisH::back(rows.h.first) - REACH_H;
    const int d = (int)b.d - AxisD::back(rows.d.first) - REACH_D;
    for (int chunk = 0; chunk < chunks; ++chunk) {
        ring.wait_until_free();
        barrier_arrive_expecting(ring.full + ring.place, (unsigned)pieces * (unsigned)sizeof(Piece));
        copy_box(stages + ring.place * pieces, &x, w, b.group * (int)p.c_in + chunk * CHUNK, h, d, b.n, ring.full + ring.place);
        ring.next<X_STAGES>();
    }
}

// Brings the weights of a box through the ring, in the order in which they are multiplied, by one thread.
__device__ __forceinline__ void bring_weights(Ring& ring, Piece* slots, const Piece* packed, const Block& b, const Rows& rows,
                                              int chunks, const Problem& p) {
    packed += (b.group * p.tiles[3] + b.tile_c) * chunks * (KERNEL_D * KERNEL_H * (long long)SLOT);
    for (int chunk = 0; chunk < chunks; ++chunk) {
        for (int row_d = 0; row_d < rows.d.count; ++row_d) {
            for (int row_h = 0; row_h < rows.h.count; ++row_h) {
                const int row = rows.d.tap(row_d) * KERNEL_H + rows.h.tap(row_h);
                ring.wait_until_free();
                barrier_arrive_expecting(ring.full + ring.place, SLOT * sizeof(Piece));
                copy_bulk(slots + ring.place * SLOT, packed + row * (long long)SLOT, SLOT * sizeof(Piece), ring.full + ring.place);
                ring.next<RING>();
            }
        }
        packed += KERNEL_D * KERNEL_H * (long long)SLOT;
    }
}

// ---- arithmetic ----------------------------------------------------------------------------------------------------------

// Sums of a tile: those of phase j are columns from j % JOINED * TILE_C on of set j / JOINED.
struct Sums {
    float value[SETS][COLUMNS / 2];
};

// Where a thread's words of a row of taps are.
struct Words {
    SharedWords first;  // of the box's first pair and the thread's first one of eight channels
    int next_channel, next_eight;  // further in bytes: its other channel of eight, and eight channels
};

// What a thread loads for one tile and step: of two channels in each eight, its pairs.
struct Window {
    unsigned value[2 * EIGHTS][PAIRS * PAIR];
};

template <int INDEX = 0> __device__ __forceinline__ void load_pairs(unsigned (&to)[PAIRS * PAIR], SharedWords from) {
    if constexpr (INDEX < PAIRS) {
        if constexpr (is_read(INDEX)) {
            unsigned words[PAIR];
            load_words<INDEX * PAIR>(words, from);
#pragma unroll
            for (int i = 0; i < PAIR; ++i) to[INDEX * PAIR + i] = words[i];
        }
        load_pairs<INDEX + 1>(to, from);
    }
}

__device__ __forceinline__ void load(Window& window, const Words& x, int start, int step) {
#pragma unroll
    for (int channel = 0; channel < 2 * EIGHTS; ++channel) {
        const int eight = step * EIGHTS + channel / 2;
        load_pairs(window.value[channel], x.first + (start + eight * x.next_eight + channel % 2 * x.next_channel));
    }
}

// Of a tile, all ones where what is read so much further for either position of a pair is of its row, and zeros where it is not.
// Where rows come one by one, copies have put zeros there.
struct Kept {
    unsigned value[REACH_W + 1][2];
};

// A of all shifts along W, as its parts. A worker has two, in turn: products still read one while the next one is picked.
struct Fragments {
    unsigned value[PARTS][REACH_W + 1][4];
};

__device__ __forceinline__ void pick(Fragments& a, const Window& window, const Kept& kept) {
#pragma unroll
    for (int shift = 0; shift <= REACH_W; ++shift) {
        if (!taps_at(shift)) continue;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int element = ODD_W + shift + i % 2;  // registers 1 and 3 are the second position's
#if DTYPE == FLOAT32
            unsigned bits = window.value[i / 2][element];
            if (may_be_outside(shift, i % 2)) bits &= kept.value[shift][i % 2];
            const float value = __uint_as_float(bits);
            if (PRECISION == TF32X3) split(value, a.value[0][shift][i], a.value[PARTS - 1][shift][i]);
            else a.value[0][shift][i] = bits;  // copies round
#else
            const unsigned(&low)[PAIRS] = window.value[i / 2 * 2], (&high)[PAIRS] = window.value[i / 2 * 2 + 1];
            a.value[0][shift][i] = select_bytes(low[element / 2], high[element / 2], element % 2 ? 0x7632 : 0x5410);
            if (may_be_outside(shift, i % 2)) a.value[0][shift][i] &= kept.value[shift][i % 2];
#endif
        }
    }
}

// Whether a tap is the first one that adds to its sums.
__host__ __device__ constexpr bool is_first(int place) {
    for (int before = 0; before < place; before += JOINED)
        if (phase_of(tap_at(before)) / JOINED == phase_of(tap_at(place)) / JOINED) return false;
    return true;
}

#if PRECISION == TF32X3
// The tensor core truncates its sums, so each chain of a few products starts from zero, and ordinary additions collect the
// chains. Two alternate: one is added while the next is multiplied. A chain has the taps of a phase, of one step or, where that is
// one tap, of two.
constexpr int CHAIN = KERNEL_W == STRIDE_W && K_STEPS % 2 == 0 ? 2 : 1;
constexpr int LINKS = TILES_M * K_STEPS / CHAIN;  // chains of each phase

__device__ __forceinline__ void multiply(Sums (&acc)[TILES_M], Fragments (&a)[2][CHAIN], const Words& x, Operand b,
                                         const int (&start)[TILES_M], const Kept (&kept)[TILES_M]) {
    float sums[2][COLUMNS / 2];
    b = of_warp(b);
    const auto collect = [&](int chain) {
#pragma unroll
        for (int i = 0; i < COLUMNS / 2; ++i) acc[chain / SETS * CHAIN / K_STEPS].value[chain % SETS][i] += sums[chain % 2][i];
    };
    Window windows[2];  // one is loaded while the other is multiplied
    load(windows[0], x, start[0], 0);
#pragma unroll
    for (int link = 0; link < LINKS; ++link) {
#pragma unroll
        for (int i = 0; i < CHAIN; ++i) {
            const int step = link * CHAIN + i, next = step + 1;
            if (next < TILES_M * K_STEPS) load(windows[next % 2], x, start[next / K_STEPS], next % K_STEPS);
            pick(a[link % 2][i], windows[step % 2], kept[step / K_STEPS]);
        }
        const Operand weights = b + link * CHAIN % K_STEPS * (PARTS * OPERAND);
#pragma unroll
        for (int set = 0; set < SETS; ++set) {
            const int chain = link * SETS + set;
            wgmma_fence();
            // The small products come first.
#pragma unroll
            for (int product = 0; product < 3; ++product) {
                const int part_a = product == 0 ? PARTS - 1 : 0, part_b = product == 1 ? PARTS - 1 : 0;
#pragma unroll
                for (int i = 0; i < CHAIN; ++i) {
#pragma unroll
                    for (int place = 0; place < KERNEL_W; ++place) {
                        if (phase_of(tap_at(place)) != set) continue;
                        multiply_add<COLUMNS>(sums[chain % 2], a[link % 2][i].value[part_a][shift_of(tap_at(place))],
                                              weights + ((i * PARTS + part_b) * OPERAND + place * TILE_C),
                                              product > 0 || i > 0 || !is_first(place));
                    }
                }
            }
            wgmma_commit();
            if (chain > 0) {
                wgmma_wait<1>();
                collect(chain - 1);
            }
        }
    }
    wgmma_wait<0>();
    collect(LINKS * SETS - 1);
}
constexpr bool LAGS = false;  // whether `multiply` returns before its own products are complete: with those of the last call
#else
constexpr int CHAIN = 1;

__device__ __forceinline__ void multiply(Sums (&acc)[TILES_M], Fragments (&a)[2][CHAIN], const Words& x, Operand b,
                                         const int (&start)[TILES_M], const Kept (&kept)[TILES_M]) {
    b = of_warp(b);
    Window windows[2];  // one is loaded while the other is multiplied
    load(windows[0], x, start[0], 0);
#pragma unroll
    for (int step = 0; step < TILES_M * K_STEPS; ++step) {
        const int next = step + 1;
        if (next < TILES_M * K_STEPS) load(windows[next % 2], x, start[next / K_STEPS], next % K_STEPS);
        pick(a[step % 2][0], windows[step % 2], kept[step / K_STEPS]);
        wgmma_fence();
#pragma unroll
        for (int place = 0; place < KERNEL_W; place += JOINED)
            multiply_add<COLUMNS>(acc[step / K_STEPS].value[phase_of(tap_at(place)) / JOINED],
                                  a[step % 2][0].value[0][shift_of(tap_at(place))],
                                  b + (step % K_STEPS * OPERAND + place * TILE_C), true);
        wgmma_commit();
        wgmma_wait<1>();  // those before read A where the next ones' is going to be
    }
}
constexpr bool LAGS = true;
#endif

// ---- the result ----------------------------------------------------------------------------------------------------------

// The bias of the tile's channels, for a worker, once it has passed the barrier here and the next one.
__device__ __forceinline__ void bring_bias(float* to, const Stored* bias, const Problem& p, const Block& b) {
    for (int c = threadIdx.x % 128; c < TILE_C; c += 128) {
        const int channel = b.tile_c * TILE_C + c;
        const bool biased = bias && channel < p.c_out;
        to[c] = biased ? widen(bias[(b.group * p.c_out + channel) * p.bias_stride]) : 0.0f;
    }
}

constexpr bool EXCHANGED = OUT_RUN == 1;

// Output `j` of a pair, of channel `i` of the thread's two in eight.
__device__ __forceinline__ float output_of(const Sums& sums, int j, int c, int i, const Pack<float, 2>& bias) {
    const int phase = j % STRIDE_W, column = phase % JOINED * TILE_C / 2 + c * 4 + j / STRIDE_W * 2 + i;
    return bias.value[i] + sums.value[phase / JOINED][column];
}

// The outputs of a pair, of the thread's two channels in eight, of which `left` exist; `to` is the first one of the first channel, at
// `w` of its row.
__device__ __forceinline__ void store_pair(Stored* to, const Sums& sums, const float* bias, Index w, int left,
                                           const Problem& p) {
#pragma unroll
    for (int c = 0; c < TILES_C; ++c) {
        const Pack<float, 2> offset = *reinterpret_cast<const Pack<float, 2>*>(bias + c * 8);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            Stored* const of_channel = to + (c * 8 + i) * p.out_stride[1];
#pragma unroll
            for (int first = 0; first < 2 * STRIDE_W; first += OUT_RUN) {
                Pack<float, OUT_RUN> run;
#pragma unroll
                for (int j = 0; j < OUT_RUN; ++j) run.value[j] = output_of(sums, first + j, c, i, offset);
                if (c * 8 + i < left && within(w + first, p.out_extent[2])) store_vector(run, of_channel + first);
            }
        }
    }
}

// The same where rows are not aligned for that, one at a time; `to` and `left` are the tile's. The four threads of a pair exchange its
// outputs, so that each has one of four that follow each other, of as many channels: what a warp stores fills whole sectors.
__device__ __forceinline__ void store_pair_exchanged(Stored* to, const Sums& sums, const float* bias, Index w, int left,
                                                     const Problem& p) {
    const int own = threadIdx.x % 4;
#pragma unroll
    for (int c = 0; c < TILES_C; ++c) {
        const Pack<float, 2> offset = *reinterpret_cast<const Pack<float, 2>*>(bias + c * 8);
#pragma unroll
        for (int first = 0; first < 4 * STRIDE_W; first += 4) {  // of the outputs of both channels
            unsigned four[4];
#pragma unroll
            for (int n = 0; n < 4; ++n)
                four[n] = __float_as_uint(
                    output_of(sums, (first + n) % (2 * STRIDE_W), c, (first + n) / (2 * STRIDE_W), offset));
#pragma unroll
            for (int apart = 1; apart < 4; apart *= 2)
#pragma unroll
                for (int n = 0; n < 4; ++n)
                    if (!(n & apart)) exchange(four[n], four[n + apart], apart);
            const int i = (first + own) / (2 * STRIDE_W), j = (first + own) % (2 * STRIDE_W);
            const bool there = within(w + j, p.out_extent[2]);
            Stored* at = to + ((c * 8 + i) * p.out_stride[1] + j);
#pragma unroll
            for (int thread = 0; thread < 4; ++thread) {
                if (there && c * 8 + thread * 2 + i < left) store_vector(Pack<float, 1>{{__uint_as_float(four[thread])}}, at);
                at += 2 * p.out_stride[1];
            }
        }
    }
}

__device__ __forceinline__ void store(const Sums (&acc)[TILES_M], float* own_bias, const Stored* bias, Stored* out, const Problem& p,
                                      const Block& b) {
    const int barrier = 2 + threadIdx.x / 128, own = threadIdx.x % 4 * 2;
    warps_sync(barrier, 128);  // the box before is stored
    bring_bias(own_bias, bias, p, b);
    warps_sync(barrier, 128);
    const Index d = b.d * STRIDE_D + b.phase_d - (Index)p.pad[0], h = b.h * STRIDE_H + b.phase_h - (Index)p.pad[1];
    const Index w = b.w - (Index)p.pad[2] / STRIDE_W;  // a position
    const int channel = b.tile_c * TILE_C + (EXCHANGED ? 0 : own);
    out += b.n * p.out_stride[0] + (b.group * p.c_out + channel) * p.out_stride[1];
    const int left = (int)p.c_out - channel;
#pragma unroll
    for (int tile = 0; tile < TILES_M; ++tile) {
        const Pair at = pair_of(recomputed(tile), p);
        const int row = is_flat(p) ? line_of(w + at.w, p) : at.h;
        const Index out_w = (w + at.w - (is_flat(p) ? row * (Index)p.x_extent[2] : 0)) * STRIDE_W;
        const Index out_d = d + at.d * STRIDE_D, out_h = h + row * STRIDE_H;
        const bool inside = at.there && within(out_d, p.out_extent[0]) && within(out_h, p.out_extent[1]);
        Stored* const to = out + (out_d * p.out_stride[2] + out_h * p.out_stride[3] + out_w);
        if constexpr (EXCHANGED) store_pair_exchanged(to, acc[tile], own_bias + own, out_w, inside ? left : 0, p);
        else store_pair(to, acc[tile], own_bias + own, out_w, inside ? left : 0, p);
    }
}

// ---- the kernel ----------------------------------------------------------------------------------------------------------

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    phase_rows(const __grid_constant__ TensorMap x, const Piece* packed, const Stored* bias, Stored* out, const Problem p) {
    extern __shared__ __align__(128) unsigned char shared_bytes[];
    Barrier* const barriers = reinterpret_cast<Barrier*>(shared_bytes);
    Piece* const slots = reinterpret_cast<Piece*>(shared_bytes + BARRIER_BYTES);
    Piece* const stages = slots + RING * SLOT;
    float* const biases = reinterpret_cast<float*>(stages + X_STAGES * stage_pieces(p));

    Ring x_ring(barriers, X_STAGES), weight_ring(barriers + 2 * X_STAGES, RING);
    if (threadIdx.x == 0) init_barriers(x_ring, weight_ring, TEAM_THREADS);
    __syncthreads();

    const int chunks = ((int)p.c_in + CHUNK - 1) / CHUNK;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

    if (warp >= 4 * WORKERS) {
        give_registers<STAGER_REGISTERS>();
        const int role = warp - 4 * WORKERS;  // weights, or x
        if (lane || role > 1) return;
        if (role == 0) wait_for_kernel_before();  // it packs the weights, while x is staged
        for (unsigned index = blockIdx.x; index < (unsigned)p.blocks; index += gridDim.x) {
            const Block b = locate(index, p);
            const Rows rows(b);
            if (!rows.count()) continue;
            if (role == 1) {
                bring_boxes(x_ring, stages, x, p, b, rows, chunks);
                continue;
            }
            bring_weights(weight_ring, slots, packed, b, rows, chunks, p);
            if (RESIDENT) return;
        }
        return;
    }

    take_registers<WORKER_REGISTERS>();
    const Slices of(p);
    int start[TILES_M];  // of the thread's pairs, in bytes; beyond the box it is the first one, whose sums nobody stores
    bool works = false;  // the worker: of a small box, some have nothing to multiply
#pragma unroll
    for (int tile = 0; tile < TILES_M; ++tile) {
        const Pair at = pair_of(tile, p);
        start[tile] = at.there ? (at.d * of.slice + at.h * of.line + at.w / IN_WORD) * 4 : 0;
    }
    works = (int)of_warp(threadIdx.x / 128) * TILES_M * 32 < (int)(p.box[0] * p.box[1] * ((p.box[2] + 1) / 2));
    // Of eight channels a thread has neighbours, or those that are four apart: what lies in different banks.
    const int of_thread = threadIdx.x % 4 * (p.x_vector == 1 ? 2 : 1) * of.row;
    const Operand weights = describe(slots, KERNEL_W * TILE_C * 16, 128);

    for (unsigned index = blockIdx.x; index < (unsigned)p.blocks; index += gridDim.x) {
        const Block b = locate(index, p);
        const Rows rows(b);
        Sums acc[TILES_M];
        Fragments a[2][CHAIN];
#pragma unroll
        for (int tile = 0; tile < TILES_M; ++tile)
#pragma unroll
            for (int i = 0; i < SETS * COLUMNS / 2; ++i) acc[tile].value[i / (COLUMNS / 2)][i % (COLUMNS / 2)] = 0;

        int used_slot = -1;  // by the products that may be under way
        const auto release = [&] {
            if (!RESIDENT && lane == 0 && used_slot >= 0) barrier_arrive(weight_ring.free + used_slot);
            used_slot = -1;
        };
        Kept kept[TILES_M];
#pragma unroll
        for (int tile = 0; tile < TILES_M; ++tile) {
            const Index at = b.w - (Index)p.pad[2] / STRIDE_W + pair_of(tile, p).w, w = at - line_of(at, p) * (Index)p.x_extent[2];
#pragma unroll
            for (int i = 0; i < 2 * (REACH_W + 1); ++i)
                kept[tile].value[i / 2][i % 2] =
                    !is_flat(p) || within(w + FIRST_W + i / 2 + i % 2, p.x_extent[2]) ? ~0u : 0;
        }
        const int first = of_thread + (lead(first_element(p, b, rows)) - ODD_W) / IN_WORD;
        for (int chunk = 0; chunk < (rows.count() ? chunks : 0); ++chunk) {
            x_ring.wait_until_full();
            const unsigned* const stage = stages[x_ring.place * stage_pieces(p)].value + first;
#pragma unroll 1
            for (int row_d = 0; row_d < rows.d.count; ++row_d) {
#pragma unroll 1
                for (int row_h = 0; row_h < rows.h.count; ++row_h) {
                    weight_ring.wait_until_full();
                    const int next_row = is_flat(p) ? (int)p.x_extent[2] / IN_WORD : of.line;
                    const int further = (REACH_D - row_d * AxisD::HOP) * of.slice + (REACH_H - row_h * AxisH::HOP) * next_row;
                    const Words words{words_at(stage + further), (int)p.x_vector * of.row * 4, 8 * of.row * 4};
                    if (works) multiply(acc, a, words, weights + weight_ring.place * SLOT, start, kept);
                    if (LAGS) release();
                    used_slot = weight_ring.place;
                    weight_ring.next<RING, RESIDENT>();
                    if (!LAGS) release();
                }
            }
            barrier_arrive(x_ring.free + x_ring.place);
            x_ring.next<X_STAGES>();
        }
        if (LAGS) wgmma_wait<0>();
        release();
        store(acc, biases + threadIdx.x / 128 * TILE_C, bias, out, p, b);
    }
}

// The channel that comes at a place along K. A lane has, of each eight channels, neighbours or those that are four apart, and of a
// step's places those of its number modulo 4: of float32 one of each four, of 16 bits two of each eight.
__device__ __forceinline__ int channel_of(int place, const Problem& p) {
    const int of_eight = place % 8, own = IN_WORD == 1 ? of_eight / 4 : of_eight % 2;
    const int thread = IN_WORD == 1 ? of_eight % 4 : of_eight / 2;
    return place - of_eight + (p.x_vector == 1 ? 2 * thread + own : thread + 4 * own);
}

// Reads 16 channels of a tap, of which ALL are there: where it has to look, the compiler waits for some before it loads the others.
template <bool ALL>
__device__ __forceinline__ void read_weights(Channels (&to)[PACKED_PIECES], const Stored* weight, int first, int there, const Problem& p) {
#pragma unroll
    for (int i = 0; i < PACKED_PIECES * PIECE; ++i) {
        const int channel = first + channel_of(i, p);
        Stored& value = to[i / PIECE].value[i % PIECE];
        if (!ALL) zero(value);
        if (ALL || channel < there) value = weight[channel * p.weight_stride[0]];
    }
}

// Puts the weights of the call in the order of the slots, once, before the kernel above: [group][tile of output channels][chunk][tap
// along D][tap along H]. A thread has 16 channels of one tap; consecutive threads read consecutive weights. There are fewer than 2^32
// threads: the pieces of more are more than a GPU's memory.
extern "C" __global__ void phase_rows_pack(const Stored* weight, Piece* packed, const Problem p) {
    constexpr unsigned PACKS_A_CHUNK = 2 * K_STEPS / PACKED_PIECES;
    let_next_kernel_start();
    const unsigned chunks = ((unsigned)p.c_in + CHUNK - 1) / CHUNK;
    unsigned index = blockIdx.x * blockDim.x + threadIdx.x;
    constexpr int NEIGHBOURS = neighbours(KERNEL_D * KERNEL_H * KERNEL_W);
    const int neighbour = (int)(index % NEIGHBOURS);
    index /= NEIGHBOURS;
    const int tap_w = (int)(index % KERNEL_W);
    index /= KERNEL_W;
    const int tap_h = (int)(index % KERNEL_H);
    index /= KERNEL_H;
    const int tap_d = (int)(index % KERNEL_D);
    index /= KERNEL_D;
    const int column = (int)(index % (TILE_C / NEIGHBOURS)) * NEIGHBOURS + neighbour;
    index /= TILE_C / NEIGHBOURS;
    const int tile_c = (int)take(index, p, 3);
    const int piece = (int)(index % PACKS_A_CHUNK) * PACKED_PIECES;
    index /= PACKS_A_CHUNK;
    const unsigned chunk = index % chunks, group = index / chunks;
    if (group >= (unsigned)p.groups) return;

    const int co = tile_c * TILE_C + column, first = (int)chunk * CHUNK + piece * PIECE;
    const int there = co < p.c_out ? (int)p.c_in : 0;
    weight += p.weight_first + group * p.weight_group_stride + co * p.weight_stride[1] + tap_d * p.weight_stride[2] +
              tap_h * p.weight_stride[3] + tap_w * p.weight_stride[4];
    Channels channels[PACKED_PIECES];
    if ((int)(chunk + 1) * CHUNK <= there) {
        read_weights<true>(channels, weight, first, there, p);
    } else {
        read_weights<false>(channels, weight, first, there, p);
    }
    const long long slot = ((group * p.tiles[3] + tile_c) * chunks + chunk) * (KERNEL_D * KERNEL_H) + tap_d * KERNEL_H + tap_h;
    packed += slot * SLOT + piece / 2 * PARTS * OPERAND + place_of_tap(tap_w) * TILE_C + column;
#pragma unroll
    for (int i = 0; i < PACKED_PIECES; ++i) {
        Piece parts[PARTS];
        pack(channels[i], parts);
#pragma unroll
        for (int part = 0; part < PARTS; ++part)
            packed[(i / 2 * PARTS + part) * OPERAND + i % 2 * KERNEL_W * TILE_C] = parts[part];
    }
}
