// Correlate, groups of few channels (up to 16 of y, any number of x, eight to a tile) on tensor cores, sm_80 and newer: float16,
// bfloat16 and float32 (as TF32 or 3xTF32). Such a problem is bound by reading y.
//
//     out[n, ci, i] = bias[ci] + sum over co, k of  y[n, co, i*stride + k*dilation - pad] * weight[ci, co, k]
// The rows of an mma are 16 positions i along W, its columns eight channels ci, and K counts eight channels co, times two taps
// along W for 16-bit types, since a 32-bit word of a row holds two neighbours: no product is with a zero.
//
// A block owns a box of positions along D and W and a run of them along H. It slides along H and stages one row of y after the
// other (of each plane and channel) in shared memory, by asynchronous copies that are some rows ahead. A warp owns SLICES
// positions along D; a row, once in its registers, meets all taps, for each position that is under way. Along H these are
// REACH + 1 positions; the oldest is complete when the next rows begin.
//
// Copies take 16 bytes, wherever a row starts: what is staged of a row begins with the piece that holds its first element, so that
// each row has a shift of its own, up to PIECE - 1 elements, which is added when it is read.
//
// Compile-time: kernel, stride, dilation, dtype, precision and tile. Run-time: N, extents, padding, channels, strides (of y along W,
// 1).
#include "boxes.cuh"
#include "mma.cuh"

#ifndef WARPS_D  // warps of a block along D and W
#define WARPS_D 1
#define WARPS_W 4
#endif
#ifndef SLICES  // positions of a warp along D
#define SLICES 2
#endif
#ifndef TILES_M  // sixteens of positions of a warp along W
#define TILES_M 1
#endif
#ifndef TILES_C  // eights of channels of the result
#define TILES_C 1
#endif
#ifndef K_STEPS  // eights of channels of y
#define K_STEPS 1
#endif
#ifndef STAGES  // rows of y in shared memory
#define STAGES 3
#endif
#ifndef HOLD_WEIGHTS  // whether a thread keeps its weights in registers
#define HOLD_WEIGHTS 0
#endif
#ifndef MIN_BLOCKS
#define MIN_BLOCKS 3
#endif
#ifndef SHARED_BYTES  // what the plan asks for, to be compared with what the kernel needs
#define SHARED_BYTES 0
#endif

constexpr int THREADS = 32 * WARPS_D * WARPS_W;
constexpr int ELEMENTS = 4 / (int)sizeof(Stored);  // of a word
constexpr int PIECE = 4 * ELEMENTS;                // elements that are copied at a time
constexpr int CHANNELS = 8 * K_STEPS;              // of y
constexpr int WARP_W = 16 * TILES_M;               // positions
constexpr int BOX_W = WARPS_W * WARP_W;
constexpr int BOX_D = WARPS_D * SLICES;

typedef Staged<KERNEL_D, STRIDE_D, DILATION_D, BOX_D> AxisD;
typedef Staged<KERNEL_D, STRIDE_D, DILATION_D, SLICES> WarpD;

// Along H, step q brings the rows q * STRIDE_H + phase, for each phase that has taps; tap k of it adds to position q - back(k).
typedef Axis<KERNEL_H, STRIDE_H, DILATION_H> AxisH;
constexpr int PHASES = AxisH::STEP < KERNEL_H ? AxisH::STEP : KERNEL_H;
constexpr int REACH = AxisH::REACH;
__host__ __device__ constexpr int last_tap(int phase) { return phase + (KERNEL_H - 1 - phase) / AxisH::STEP * AxisH::STEP; }

// A lane owns positions 2g and 2g + 1 of a sixteen, which are rows g and g + 8 of the mma: their taps read these elements of a row.
constexpr int LANE_SPAN = STRIDE_W + (KERNEL_W - 1) * DILATION_W + 1;
constexpr int LANE_WORDS = ceil_div(LANE_SPAN, ELEMENTS);
__host__ __device__ constexpr bool is_read(int word) {
    for (int half = 0; half < 2; ++half)
        for (int tap = 0; tap < KERNEL_W; ++tap)
            if ((half * STRIDE_W + tap * DILATION_W) / ELEMENTS == word) return true;
    return false;
}

// A stage: one row of each plane and channel, [plane][channel][piece]. The distance of 16-bit channels halves the conflicts of banks.
constexpr int SPAN = (BOX_W - 1) * STRIDE_W + (KERNEL_W - 1) * DILATION_W + 1;
constexpr int READ_ON = ELEMENTS == 2 && LANE_SPAN % 2 == 0;  // elements that are read with the last one
constexpr int PIECES = ceil_div(SPAN + READ_ON + PIECE - 1, PIECE);
constexpr int CHANNEL = 4 * (ELEMENTS == 2 ? at_residue(PIECES, 4, 8) : PIECES);  // words
constexpr int STAGE = AxisD::EXTENT * CHANNELS * CHANNEL;

// Weights in fragment order: [tap along D][tap along H][step along W][k step][8 channels][lane][word].
constexpr int STEPS_W = ceil_div(KERNEL_W, ELEMENTS);
constexpr int WORDS = PRECISION == TF32X3 ? 4 : 2;  // of a lane: K words t and t + 4, then their low parts
constexpr int FRAGMENTS = KERNEL_D * KERNEL_H * STEPS_W * K_STEPS * TILES_C;
constexpr int WEIGHTS = FRAGMENTS * 32 * WORDS;
typedef Pack<unsigned, WORDS> Fragment;

constexpr int SHARED = WEIGHTS + STAGES * STAGE;
static_assert(SHARED_BYTES == 0 || SHARED * 4 == SHARED_BYTES, "the plan's shared memory is not the kernel's");
static_assert(STAGES >= 2, "copies are under way while a row is read");

// ---- staging ---------------------------------------------------------------------------------------------------------

// What a block reads: the first element of its box, which may be outside y, where the channels of its group begin, the first and the
// last of its planes that exist, and where y ends.
struct Box {
    Index d, w;
    Index origin, first_plane, last_plane, end;
};

// Stages row h of all planes and channels, or zeros where it does not exist. Pieces bring elements of the rows around it, too.
__device__ __forceinline__ void stage_row(unsigned* to, const Stored* y, const Problem& p, const Box& box, Index h, bool exists) {
    exists = exists && within(h, p.out_extent[1]);
    const Index row = box.origin + h * (Index)p.out_stride[3] + box.d * (Index)p.out_stride[2];
    const Index step = AxisD::GAP * (Index)p.out_stride[2];
#pragma unroll
    for (int first = 0; first < CHANNELS * PIECES; first += THREADS) {
        const int item = first + (int)threadIdx.x, channel = item / PIECES, piece = item % PIECES;
        if (item >= CHANNELS * PIECES) break;
        const Index place = box.w + piece * PIECE, from = row + channel * (Index)p.out_stride[1] + place;
        const bool is_read = exists && channel < (int)p.c_out && place - PIECE < (Index)p.out_extent[2];
        unsigned* const target = to + channel * CHANNEL + 4 * piece;
        if (from + box.first_plane * step >= 0 && from + box.last_plane * step + PIECE <= box.end) {
            const Pack<unsigned, 4>* const pieces = reinterpret_cast<const Pack<unsigned, 4>*>(y);
#pragma unroll
            for (int plane = 0; plane < AxisD::EXTENT; ++plane)
                copy_async_16_or_zeros(target + plane * CHANNELS * CHANNEL, pieces + (UIndex)(from + plane * step) / PIECE,
                                       is_read && within(box.d + plane * AxisD::GAP, p.out_extent[0]));
        } else {
            // The ends of y.
#pragma unroll 1
            for (int plane = 0; plane < AxisD::EXTENT; ++plane) {
                const Index at = (from + plane * step) & ~(Index)(PIECE - 1);
                const bool inside = is_read && within(box.d + plane * AxisD::GAP, p.out_extent[0]) && at >= 0 && at < box.end;
                const int count = (int)min(box.end - at, (Index)PIECE);
                copy_async_16(target + plane * CHANNELS * CHANNEL, y + (inside ? at : 0), inside ? count * (int)sizeof(Stored) : 0);
            }
        }
    }
}

// Stages the weights of a tile of channels, in the order of the array; those that do not exist become zero.
__device__ __forceinline__ void stage_weights(unsigned* to, const Stored* weight, const Problem& p, int channels) {
    constexpr int TAPS = KERNEL_D * KERNEL_H * STEPS_W * ELEMENTS, COUNT = TILES_C * 8 * CHANNELS * TAPS;
    constexpr int BATCH = 8;  // loads that are under way
#pragma unroll 1
    for (int first = threadIdx.x; first < COUNT; first += BATCH * THREADS) {
        unsigned bits[BATCH];
#pragma unroll
        for (int j = 0; j < BATCH; ++j) {
            const int i = first + j * THREADS, tap = i % TAPS, co = i / TAPS % CHANNELS, ci = i / (TAPS * CHANNELS);
            const int tap_w = tap % (STEPS_W * ELEMENTS), line = tap / (STEPS_W * ELEMENTS);
            bits[j] = 0;
            if (ci < channels && co < (int)p.c_out && tap_w < KERNEL_W)
                bits[j] = bits_of(weight[ci * p.weight_stride[0] + co * p.weight_stride[1] +
                                         line / KERNEL_H * p.weight_stride[2] + line % KERNEL_H * p.weight_stride[3] +
                                         tap_w * p.weight_stride[4]]);
        }
#pragma unroll
        for (int j = 0; j < BATCH; ++j) {
            const int i = first + j * THREADS, tap = i % TAPS, co = i / TAPS % CHANNELS, ci = i / (TAPS * CHANNELS);
            if (i >= COUNT) break;
            const int step = tap / ELEMENTS * K_STEPS + co / 8, lane = ci % 8 * 4 + co % 4, word = co % 8 / 4;
            unsigned* const target = to + ((step * TILES_C + ci / 8) * 32 + lane) * WORDS + word;
            if (ELEMENTS == 2)
                reinterpret_cast<unsigned short*>(target)[tap % 2] = (unsigned short)bits[j];
            else if (PRECISION == TF32X3)
                split(__uint_as_float(bits[j]), target[0], target[WORDS - 2]);
            else
                target[0] = to_tf32(__uint_as_float(bits[j]));
        }
    }
}

// ---- arithmetic ------------------------------------------------------------------------------------------------------

typedef float Sums[REACH + 1][SLICES][TILES_M][TILES_C][4];

// What a lane reads of each row. A row is shifted by what the offset of its first element exceeds whole pieces.
struct Lane {
    const unsigned* y;                       // its first word of plane 0, channel t, in the first stage, of a row without a shift
    unsigned offset[2 * K_STEPS];            // of channels t, t + 4, ... of the warp's first plane
    unsigned offset_of_row, offset_of_plane;  // from one to the next
    unsigned keep[TILES_M][LANE_WORDS];      // what of its words lies in the row
};

// One step along W of all 16 positions: fragments of y, and their low parts.
struct Rows {
    unsigned word[STEPS_W][4], low[PRECISION == TF32X3 ? STEPS_W : 1][4];
};

// Element `even` of a row, and `odd` where there is one, as the halves of a word.
template <int COUNT>
__device__ __forceinline__ unsigned two_of(const unsigned (&word)[COUNT], int even, int odd, bool has_odd) {
    const unsigned first = word[even / 2];
    if (!has_odd) return even % 2 ? first >> 16 : first & 0xffffu;
    const unsigned second = word[odd / 2];
    if (even % 2 == 0 && odd == even + 1) return first;
    return select_bytes(first, second, (even % 2 ? 0x32 : 0x10) | (odd % 2 ? 0x7600 : 0x5400));
}

// The words of one channel, for both positions of the lane. `y` is its first word without the shift.
__device__ __forceinline__ void load_channel(Rows& rows, int upper, const unsigned* y, unsigned offset,
                                             const unsigned (&keep)[LANE_WORDS]) {
    y += offset % PIECE / ELEMENTS;
    unsigned word[LANE_WORDS];
    if constexpr (ELEMENTS == 1) {
#pragma unroll
        for (int i = 0; i < LANE_WORDS; ++i)
            if (is_read(i)) word[i] = y[i] & keep[i];
    } else {
        // Rows begin in the middle of words.
        constexpr int LOADED = LANE_SPAN / 2 + 1;
        unsigned raw[LANE_WORDS + 1];
#pragma unroll
        for (int i = 0; i <= LANE_WORDS; ++i) {
            raw[i] = 0;
            if (i < LOADED && (is_read(i) || (i > 0 && is_read(i - 1)))) raw[i] = y[i];
        }
#pragma unroll
        for (int i = 0; i < LANE_WORDS; ++i)
            if (is_read(i)) word[i] = __funnelshift_r(raw[i], raw[i + 1], offset * 16) & keep[i];  // modulo 32
    }
#pragma unroll
    for (int step = 0; step < STEPS_W; ++step) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int tap = step * ELEMENTS, at = half * STRIDE_W + tap * DILATION_W, i = 2 * upper + half;
            if constexpr (ELEMENTS == 2)
                rows.word[step][i] = two_of(word, at, tap + 1 < KERNEL_W ? at + DILATION_W : at, tap + 1 < KERNEL_W);
            else if constexpr (PRECISION == TF32X3)
                split(__uint_as_float(word[at]), rows.word[step][i], rows.low[step][i]);
            else
                rows.word[step][i] = to_tf32(__uint_as_float(word[at]));
        }
    }
}

// Adds the products of all taps along W. `weights(step)` is the fragment of a step.
template <class Weights> __device__ __forceinline__ void multiply_add(float (&sum)[4], const Rows& rows, const Weights& weights) {
#if PRECISION == TF32X3
    // The tensor core truncates its sums: up to nine products start from zero, and an ordinary addition collects them.
    const float nothing[4] = {0, 0, 0, 0};
#pragma unroll
    for (int first = 0; first < STEPS_W; first += 3) {
        float part[4];
#pragma unroll
        for (int step = first; step < first + 3 && step < STEPS_W; ++step) {
            const Fragment b = weights(step);
            const unsigned high[2] = {b.value[0], b.value[1]}, low[2] = {b.value[WORDS - 2], b.value[WORDS - 1]};
            if (step == first)
                mma(part, rows.low[step], high, nothing);
            else
                mma(part, rows.low[step], high, part);
            mma(part, rows.word[step], low, part);
            mma(part, rows.word[step], high, part);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[i] += part[i];
    }
#else
#pragma unroll
    for (int step = 0; step < STEPS_W; ++step) mma(sum, rows.word[step], weights(step).value, sum);
#endif
}

// The slice to which a plane adds by a tap along D, or -1.
__host__ __device__ constexpr int slice_of(int plane, int tap_d) {
    const int rest = plane - tap_d * WarpD::HOP;
    return rest >= 0 && rest % WarpD::STEP == 0 && rest / WarpD::STEP < SLICES ? rest / WarpD::STEP : -1;
}
__host__ __device__ constexpr bool is_used(int plane) {
    for (int tap = 0; tap < KERNEL_D; ++tap)
        if (slice_of(plane, tap) >= 0) return true;
    return false;
}

// Adds a staged row, of one phase, to the positions that its taps reach. `offset` is that of the row.
template <class Weights>
__device__ __forceinline__ void add_row(Sums& sums, const Lane& lane, const unsigned* y, unsigned offset, int phase,
                                        const Weights& weights) {
#pragma unroll
    for (int plane = 0; plane < WarpD::EXTENT; ++plane) {
        if (!is_used(plane)) continue;
#pragma unroll
        for (int m = 0; m < TILES_M; ++m) {
#pragma unroll
            for (int k = 0; k < K_STEPS; ++k) {
                Rows rows;
#pragma unroll
                for (int upper = 0; upper < 2; ++upper)
                    load_channel(rows, upper,
                                 y + (plane * CHANNELS + k * 8 + upper * 4) * CHANNEL + m * 16 * STRIDE_W / ELEMENTS,
                                 lane.offset[2 * k + upper] + (offset + plane * lane.offset_of_plane), lane.keep[m]);
#pragma unroll
                for (int tap_d = 0; tap_d < KERNEL_D; ++tap_d) {
                    const int slice = slice_of(plane, tap_d);
                    if (slice < 0) continue;
#pragma unroll
                    for (int tap_h = phase; tap_h < KERNEL_H; tap_h += AxisH::STEP) {
#pragma unroll
                        for (int eight = 0; eight < TILES_C; ++eight) {
                            const auto fragment = [&](int step) {
                                const int number = ((tap_d * KERNEL_H + tap_h) * STEPS_W + step) * K_STEPS + k;
                                return weights(number * TILES_C + eight);
                            };
                            multiply_add(sums[REACH - AxisH::back(tap_h)][slice][m][eight], rows, fragment);
                        }
                    }
                }
            }
        }
    }
}

// ---- results ---------------------------------------------------------------------------------------------------------

// Where a lane's results go.
struct Result {
    Stored* to;  // its first position and channel, of row 0
    int slices, channels;  // that exist, channels from its first one on
    Index positions;
    float bias[TILES_C][2];
};

__device__ __forceinline__ void store(const Result& result, Index h, const float (&value)[SLICES][TILES_M][TILES_C][4],
                                      const Problem& p) {
    const Index row = h * (Index)p.x_stride[3], stride_w = (Index)p.x_stride[4];
#pragma unroll
    for (int slice = 0; slice < SLICES; ++slice) {
        if (slice >= result.slices) break;
#pragma unroll
        for (int eight = 0; eight < TILES_C; ++eight) {
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                if (eight * 8 + j >= result.channels) continue;
                Stored* const to = result.to + slice * (Index)p.x_stride[2] + (eight * 8 + j) * (Index)p.x_stride[1] + row;
#pragma unroll
                for (int m = 0; m < TILES_M; ++m) {
                    const float (&sum)[4] = value[slice][m][eight];
                    const Pack<float, 2> two = {{sum[j] + result.bias[eight][j], sum[2 + j] + result.bias[eight][j]}};
                    const Index left = result.positions - 16 * m;
                    if (p.x_vector) {
                        if (left > 0) store_vector<Stored, 2>(two, to + 16 * m);
                        continue;
                    }
                    if (left > 0) narrow(two.value[0], to[16 * m * stride_w]);
                    if (left > 1) narrow(two.value[1], to[(16 * m + 1) * stride_w]);
                }
            }
        }
    }
}

// ---- the kernel ------------------------------------------------------------------------------------------------------

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    correlate_narrow(const Stored* y, const Stored* weight, const Stored* bias, Stored* out, const Problem p) {
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    unsigned* const shared_weights = reinterpret_cast<unsigned*>(shared_bytes);
    unsigned* const ring = shared_weights + WEIGHTS;

    unsigned index = blockIdx.x;
    const Index first_w = (Index)take(index, p, 2) * BOX_W, first_d = (Index)take(index, p, 0) * BOX_D;
    const Index length = (Index)((p.x_extent[1] + p.tiles[1] - 1) / p.tiles[1]);  // of a run along H
    const Index first_h = (Index)take(index, p, 1) * length;
    const Index last_h = min(first_h + length, (Index)p.x_extent[1]) - 1;
    const Index first_c = (Index)take(index, p, 3) * TILES_C * 8;
    const Index group = (Index)take(index, p, 4), n = (Index)index;

    Box box;
    box.d = first_d * STRIDE_D - (Index)p.pad[0];
    box.w = first_w * STRIDE_W - (Index)p.pad[2];
    box.origin = n * (Index)p.out_stride[0] + group * (Index)p.c_out * (Index)p.out_stride[1];
    box.first_plane = (max(-box.d, (Index)0) + AxisD::GAP - 1) / AxisD::GAP;
    box.last_plane = min((Index)p.out_extent[0] - 1 - box.d, (Index)(AxisD::EXTENT - 1) * AxisD::GAP) / AxisD::GAP;
    box.end = (Index)((p.n - 1) * p.out_stride[0] + (p.groups * p.c_out - 1) * p.out_stride[1] +
                      (p.out_extent[0] - 1) * p.out_stride[2] + (p.out_extent[1] - 1) * p.out_stride[3] + p.out_extent[2]);
    // Row q * STRIDE_H + phase_of(phase), in the stage with this number, unless none of the block's positions needs it.
    const auto stage = [&](int number, Index q, int phase) {
        const bool needed = q - AxisH::back(phase) >= first_h && q - AxisH::back(last_tap(phase)) <= last_h;
        stage_row(ring + number * STAGE, y, p, box, q * STRIDE_H + AxisH::phase_of(phase) - (Index)p.pad[1], needed);
    };
#pragma unroll
    for (int ahead = 0; ahead < STAGES - 1; ++ahead) {
        stage(ahead, first_h + ahead / PHASES, ahead % PHASES);
        copy_async_commit();
    }
    const int channels = (int)min((Index)p.c_in - first_c, (Index)(TILES_C * 8));
    stage_weights(shared_weights, weight + p.weight_first + group * p.weight_group_stride + first_c * p.weight_stride[0], p,
                  channels);

    const int warp = threadIdx.x / 32, lane_number = threadIdx.x % 32, g = lane_number / 4, t = lane_number % 4;
    const int warp_w = warp % WARPS_W * WARP_W + 2 * g, warp_d = warp / WARPS_W * SLICES;
    Lane lane;
    lane.offset_of_row = (unsigned)p.out_stride[3];
    lane.offset_of_plane = AxisD::GAP * (unsigned)p.out_stride[2];
    lane.y = ring + (warp_d * AxisD::STEP * CHANNELS + t) * CHANNEL + warp_w * STRIDE_W / ELEMENTS;
#pragma unroll
    for (int i = 0; i < 2 * K_STEPS; ++i)
        lane.offset[i] = (unsigned)(box.origin + (t + 4 * i) * (Index)p.out_stride[1] +
                                    (box.d + warp_d * STRIDE_D) * (Index)p.out_stride[2] + box.w);
#pragma unroll
    for (int m = 0; m < TILES_M; ++m) {
        const Index w = box.w + (warp_w + 16 * m) * STRIDE_W;
#pragma unroll
        for (int i = 0; i < LANE_WORDS; ++i) {
            lane.keep[m][i] = within(w + ELEMENTS * i, p.out_extent[2]) ? ELEMENTS == 2 ? 0xffffu : ~0u : 0;
            if (ELEMENTS == 2 && within(w + 2 * i + 1, p.out_extent[2])) lane.keep[m][i] |= 0xffff0000u;
        }
    }

    Result result;
    result.to = out + n * p.x_stride[0] + (group * p.c_in + first_c + 2 * t) * p.x_stride[1] +
                (first_d + warp_d) * p.x_stride[2] + (first_w + warp_w) * p.x_stride[4];
    result.slices = (int)min((Index)p.x_extent[0] - first_d - warp_d, (Index)SLICES);
    result.channels = channels - 2 * t;
    result.positions = (Index)p.x_extent[2] - first_w - warp_w;
#pragma unroll
    for (int i = 0; i < 2 * TILES_C; ++i) {
        const int channel = i / 2 * 8 + i % 2;
        const bool has = bias && channel < result.channels;
        result.bias[i / 2][i % 2] = has ? widen(bias[(group * p.c_in + first_c + 2 * t + channel) * p.bias_stride]) : 0.0f;
    }

    Fragment held[HOLD_WEIGHTS ? FRAGMENTS : 1];
    if (HOLD_WEIGHTS) {
        __syncthreads();
#pragma unroll
        for (int i = 0; i < FRAGMENTS; ++i)
            held[HOLD_WEIGHTS ? i : 0] = reinterpret_cast<const Fragment*>(shared_weights)[i * 32 + lane_number];
    }
    const auto weights = [&](int number) -> Fragment {
        return HOLD_WEIGHTS ? held[HOLD_WEIGHTS ? number : 0]
                            : reinterpret_cast<const Fragment*>(shared_weights)[number * 32 + lane_number];
    };

    Sums sums = {};
    int slot = 0;
#pragma unroll 1
    for (Index q = first_h; q <= last_h + REACH; ++q) {
#pragma unroll
        for (int phase = 0; phase < PHASES; ++phase) {
            copy_async_wait<STAGES - 2>();
            __syncthreads();  // all have copied this row, and read the one before
            constexpr int AHEAD = STAGES - 1;
            stage(slot == 0 ? AHEAD : slot - 1, q + (phase + AHEAD) / PHASES, (phase + AHEAD) % PHASES);
            copy_async_commit();
            const Index h = q * STRIDE_H + AxisH::phase_of(phase) - (Index)p.pad[1];
            add_row(sums, lane, lane.y + slot * STAGE, (unsigned)h * lane.offset_of_row, phase, weights);
            slot = slot == STAGES - 1 ? 0 : slot + 1;
        }
        if (q - REACH >= first_h) store(result, q - REACH, sums[0], p);
#pragma unroll
        for (int i = 0; i < SLICES * TILES_M * TILES_C * 4; ++i) {
            const int slice = i / (4 * TILES_C * TILES_M), m = i / (4 * TILES_C) % TILES_M, eight = i / 4 % TILES_C;
#pragma unroll
            for (int j = 0; j < REACH; ++j) sums[j][slice][m][eight][i % 4] = sums[j + 1][slice][m][eight][i % 4];
            sums[REACH][slice][m][eight][i % 4] = 0;
        }
    }
}
