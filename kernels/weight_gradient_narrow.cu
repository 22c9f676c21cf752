// Weight gradient, few channels per group, tensor cores: float16, bfloat16 and float32 (as TF32 or 3xTF32).
//
//     out[ci, co, k] = sum over n, i of  x[n, ci, i] * y[n, co, i*stride + k*dilation - pad]
// y is the larger array. A cell is what lies between two positions of x: STRIDE elements of y along each axis. A block owns a
// tile of eight channels of x, eight of y and all taps, and a share of the boxes of cells. Each row of y is staged once, with
// the rows of x that its taps meet, and a fragment of y, once in registers, meets all of these. Along W it is x that is shifted
// from tap to tap. Two taps of the same phase make a product with M = 2 taps x 8 channels of x, N = 8 channels of y, and
// K = positions along W.
//
// Rows lie in shared memory as they do in memory, at the same distance from a 16-byte boundary: so they are copied 16 bytes at
// a time wherever they start. A lane reads words, and puts elements together as its row's first one asks for.
//
// Compile-time: kernel, stride, dilation, the padding along W modulo the stride, dtype, precision, how taps are shared by
// warps, and stages. Run-time: N, extents, the box, padding, channels, strides, and into how many parts the boxes are cut
// (tiles[3]).
#ifndef DTYPE
#define DTYPE BFLOAT16
#endif
#include "boxes.cuh"
#include "partial_sums.cuh"
#include "mma.cuh"

#ifndef SHIFT_W  // padding before along W, modulo the stride
#define SHIFT_W 1
#endif
#ifndef WARPS_D  // warps of a block that have a tap each along D and H, or 1: a warp has them all; and along the positions
#define WARPS_D 1
#define WARPS_H 1
#define WARPS_K 8
#endif
#ifndef STAGERS  // warps that copy while the others multiply
#define STAGERS 4
#endif
#ifndef CELLS_H  // cells along H that a warp takes at a time
#define CELLS_H 1
#endif
#ifndef STAGES
#define STAGES 3
#endif
#ifndef BULK  // whether runs are copied by bulk copies (sm_90 and newer)
#define BULK 0
#endif
#ifndef MIN_BLOCKS
#define MIN_BLOCKS 1
#endif

constexpr int THREADS_C = 32 * WARPS_D * WARPS_H;
constexpr int WORKERS = THREADS_C * WARPS_K;  // threads that multiply; those that copy follow
constexpr int COPIERS = 32 * STAGERS;
constexpr int CHANNELS = 8;  // of x and of y
constexpr int TAPS_D = KERNEL_D / WARPS_D, TAPS_H = KERNEL_H / WARPS_H;  // of a warp
static_assert((WARPS_D == 1 || TAPS_D == 1) && (WARPS_H == 1 || TAPS_H == 1), "a warp has all taps of an axis, or one");

constexpr int PER_WORD = 4 / (int)sizeof(Stored);
constexpr int UNIT = 4 * PER_WORD;  // elements of a 16-byte copy
constexpr int OWN = 2 * PER_WORD;   // positions of a lane
constexpr int CHUNK = 4 * OWN;      // positions of a product

// ---- taps ------------------------------------------------------------------------------------------------------------

// Along D and H. Of the rows of y of a cell, every GAP-th one is staged. A tap meets one of these, and x `back` cells before.
template <int TAPS, int STRIDE, int DILATION> struct Across {
    static constexpr int GAP = TAPS > 1 ? gcd(STRIDE, DILATION) : STRIDE;
    static constexpr int ROWS = STRIDE / GAP;
    static constexpr int REACH = (TAPS - 1) * DILATION / STRIDE;

    __host__ __device__ static constexpr int row(int tap) { return tap * DILATION % STRIDE / GAP; }
    __host__ __device__ static constexpr int back(int tap) { return tap * DILATION / STRIDE; }
};
typedef Across<KERNEL_D, STRIDE_D, DILATION_D> AxisD;
typedef Across<KERNEL_H, STRIDE_H, DILATION_H> AxisH;

// Along W, where cells begin with the first element of y. Two taps of a phase are a pair. A last one alone takes the place in
// which another pair meets the same x, and KERNEL_W stands for the other tap: so it needs no fragment of x of its own.
__host__ __device__ constexpr int reads_w(int tap) { return tap * DILATION_W - SHIFT_W; }
__host__ __device__ constexpr int phase_w(int tap) { return (reads_w(tap) + STRIDE_W) % STRIDE_W; }
__host__ __device__ constexpr int back_w(int tap) { return (reads_w(tap) + STRIDE_W) / STRIDE_W - 1; }
constexpr int REACH_W = back_w(KERNEL_W - 1) - back_w(0);
static_assert(0 <= SHIFT_W && SHIFT_W < STRIDE_W, "a shift is a remainder");

// The tap of a phase that `before` others of it precede, or KERNEL_W.
__host__ __device__ constexpr int tap_of_phase(int phase, int before) {
    for (int tap = 0; tap < KERNEL_W; ++tap)
        if (phase_w(tap) == phase && before-- == 0) return tap;
    return KERNEL_W;
}
struct TwoTaps {
    int phase, first, second;
};
// Two taps by their number, which counts through the phases.
__host__ __device__ constexpr TwoTaps two_taps(int number) {
    for (int phase = 0; phase < STRIDE_W; ++phase)
        for (int before = 0; tap_of_phase(phase, before) < KERNEL_W; before += 2)
            if (number-- == 0) return {phase, tap_of_phase(phase, before), tap_of_phase(phase, before + 1)};
    return {STRIDE_W, KERNEL_W, KERNEL_W};
}
__host__ __device__ constexpr int count_pairs() {
    int count = 0;
    while (two_taps(count).phase < STRIDE_W) ++count;
    return count;
}
constexpr int PAIRS = count_pairs();
struct Pair {
    int phase, first, second;      // taps, or KERNEL_W
    int first_back, second_back;  // how many cells before they meet x
};
__host__ __device__ constexpr Pair pair_of_taps(int number) {
    const TwoTaps taps = two_taps(number);
    if (taps.second < KERNEL_W) return {taps.phase, taps.first, taps.second, back_w(taps.first), back_w(taps.second)};
    for (int other = 0; other < PAIRS; ++other) {
        const TwoTaps whole = two_taps(other);
        if (whole.second == KERNEL_W) continue;
        const int first = back_w(whole.first), second = back_w(whole.second);
        if (first == back_w(taps.first)) return {taps.phase, taps.first, KERNEL_W, first, second};
        if (second == back_w(taps.first)) return {taps.phase, KERNEL_W, taps.first, first, second};
    }
    return {taps.phase, taps.first, KERNEL_W, back_w(taps.first), back_w(taps.first)};
}
struct AllPairs {
    Pair pair[PAIRS];
};
__host__ __device__ constexpr AllPairs all_pairs() {
    AllPairs all = {};
    for (int number = 0; number < PAIRS; ++number) all.pair[number] = pair_of_taps(number);
    return all;
}
__device__ constexpr AllPairs ALL = all_pairs();  // a table: the compiler takes long to work out one in every use
constexpr int TILES = TAPS_D * TAPS_H * PAIRS;  // of products of a warp
constexpr int SUMS = 4 * TILES;                 // of a thread
constexpr int VALUES = SUMS * THREADS_C;        // of a block

// ---- boxes in shared memory ------------------------------------------------------------------------------------------

// Distances in shared memory, in elements: modulo UNIT those of memory.
struct Pitch {
    int row, plane, channel;
};

// The smallest distance that is at least `least` and that of memory modulo UNIT.
__device__ __forceinline__ int congruent(int least, long long in_memory) {
    return least + ((int)in_memory - least & UNIT - 1);
}
// The same for channels, of which lanes read some at a time: near `residue` words modulo the 32 banks.
__device__ __forceinline__ int congruent_channel(int least, long long in_memory, int residue) {
    const int rest = (int)in_memory & UNIT - 1, off = rest - (rest > UNIT / 2 ? UNIT : 0);
    return least + (residue * PER_WORD + off - least & 32 * PER_WORD - 1);
}

// Elements of a channel and plane of a box that follow each other in memory: all its rows where rows do, or one row.
struct Run {
    int shared;  // where it is in shared memory, from the box's first element, as in memory below
    unsigned short plane, row;
    long long memory;
};

// One array's box: eight channels of planes of rows, of which `width` elements are of interest.
template <int GAP_D_, int GAP_H_, int STEP> struct Side {
    static constexpr int GAP_D = GAP_D_, GAP_H = GAP_H_;
    // Where lanes read channels at words STEP apart.
    static constexpr int RESIDUE = STEP % 8 == 0 ? 4 : STEP % 4 == 0 ? 16 : STEP * 4 % 32;
    int planes, rows, width;
    int rows_of_run, length;  // rows of a run, and its elements
    Pitch pitch;

    __device__ __forceinline__ Side(int planes, int rows, int width, bool rows_follow, const long long (&stride)[5])
        : planes(planes), rows(rows), width(width), rows_of_run(rows_follow ? rows : 1) {
        pitch.row = rows_follow ? (int)stride[3] : congruent(width + UNIT, GAP_H * stride[3]);
        length = (rows_of_run - 1) * pitch.row + width;
        pitch.plane = congruent((rows - 1) * pitch.row + width + UNIT, GAP_D * stride[2]);
        pitch.channel = congruent_channel(planes * pitch.plane, stride[1], RESIDUE);
    }
    __device__ __forceinline__ int size() const { return CHANNELS * pitch.channel + UNIT; }
    __device__ __forceinline__ bool rows_follow() const { return rows_of_run == rows; }

    // Lists the runs of the channels that exist, and returns how many there are.
    __device__ __forceinline__ int list(Run* to, int channels, const long long (&stride)[5]) const {
        const int of_plane = rows / rows_of_run, count = min(channels, CHANNELS) * planes * of_plane;
        for (int i = threadIdx.x; i < count; i += WORKERS + COPIERS) {
            const int h = i % of_plane, c = i / of_plane / planes, d = i / of_plane % planes;
            to[i] = {c * pitch.channel + d * pitch.plane + h * pitch.row, (unsigned short)d, (unsigned short)h,
                     c * stride[1] + d * GAP_D * stride[2] + h * GAP_H * stride[3]};
        }
        return count;
    }
};
typedef Side<AxisD::GAP, AxisH::GAP, 2 * STRIDE_W> SideY;
typedef Side<1, 1, 2> SideX;

// What is known of a staged box.
struct OfBox {
    int start_x, start_y;         // how far its first elements are from a 16-byte boundary
    int first_x, end_x, end_y;    // which columns of it exist
};

// How far the first element of a box is from a 16-byte boundary.
__device__ __forceinline__ int start_of(const Stored* from) {
    return (int)((size_t)from / sizeof(Stored) & UNIT - 1);
}

struct Range {
    int first, end;
};
// The columns of a box that exist.
__device__ __forceinline__ Range columns_of(const Place& place, int width) {
    const Index all = width;
    return {(int)max((Index)0, min(-place.w, all)), (int)max((Index)0, min((Index)place.extent[2] - place.w, all))};
}

// The rows of a run that exist; not one may.
template <class Box>
__device__ __forceinline__ Range rows_of(const Run& run, const Place& place, const Box& box) {
    const Index h = place.h + run.row * Box::GAP_H, all = box.rows_of_run;
    const Index first = max((Index)0, min(-h, all));
    return {(int)first, (int)max(first, min((Index)place.extent[1] - h, all))};
}

// Copies a run's elements `first` to `end - 1`: whole 16 bytes, and what is left at both ends. Returns the bytes of bulk copies.
// Without these a warp copies a run, else a thread.
__device__ __forceinline__ unsigned copy_run(Stored* to, const Stored* from, int start, int first, int end, Barrier* barrier) {
    const int head = min(end, (start + first + UNIT - 1) / UNIT * UNIT - start);  // up to the first boundary
    const int tail = max(head, (start + end) / UNIT * UNIT - start);
    const int lane = BULK ? 0 : threadIdx.x % 32, lanes = BULK ? 1 : 32;
    // Words of the ends that are whole, and single elements, which wait for their way through a register.
    Stored single[2];
    const int odd = (start + first) % PER_WORD, last = (start + end) % PER_WORD;
    const bool has_first = odd && first < end, has_last = last && first + odd < end;
    if (has_first && lane == 0) single[0] = from[first];
    if (has_last && lane == 0) single[1] = from[end - 1];
    for (int at = first + odd + lane * PER_WORD; at + PER_WORD <= head; at += lanes * PER_WORD)
        copy_async_4(to + at, from + at, 4);
    for (int at = tail + lane * PER_WORD; at + PER_WORD <= end; at += lanes * PER_WORD) copy_async_4(to + at, from + at, 4);
    unsigned bytes = 0;
#if BULK
    bytes = (tail - head) * (int)sizeof(Stored);
    if (bytes) copy_bulk(to + head, from + head, bytes, barrier);
#else
    for (int at = head + lane * UNIT; at < tail; at += 32 * UNIT) copy_async_16(to + at, from + at, 16);
#endif
    if (has_first && lane == 0) to[first] = single[0];
    if (has_last && lane == 0) to[end - 1] = single[1];
    return bytes;
}

// Copies the runs of a box that are listed, and clears the rows that do not exist. Returns the bytes of bulk copies.
template <class Box>
__device__ __forceinline__ unsigned stage(Stored* to, const Stored* from, const Place& place, const Box& box, const Run* runs,
                                          int count, int thread, Barrier* barrier) {
    const int start = start_of(from);
    const Range columns = columns_of(place, box.width);
    to += start;
    unsigned bytes = 0;
#pragma unroll 1
    for (int i = BULK ? thread : thread / 32; i < count; i += BULK ? COPIERS : STAGERS) {
        const Run run = runs[i];
        if (!within(place.d + run.plane * Box::GAP_D, place.extent[0])) continue;
        const Range rows = rows_of(run, place, box);
        if (rows.end == rows.first || columns.end <= columns.first) continue;
        const int first = rows.first * box.pitch.row + columns.first, end = (rows.end - 1) * box.pitch.row + columns.end;
        bytes += copy_run(to + run.shared, from + (Index)run.memory, (start + run.shared) % UNIT, first, end, barrier);
    }
    const bool whole = place.d >= 0 && place.d + (box.planes - 1) * Box::GAP_D < place.extent[0] && place.h >= 0 &&
                       place.h + (box.rows - 1) * Box::GAP_H < place.extent[1];
    if (!whole) {
#pragma unroll 1
        for (int i = thread / 32; i < count; i += STAGERS) {
            const Run run = runs[i];
            const bool plane_exists = within(place.d + run.plane * Box::GAP_D, place.extent[0]);
            const Range rows = rows_of(run, place, box);
            for (int h = 0; h < box.rows_of_run; ++h) {
                if (plane_exists && h == rows.first) h = rows.end;
                if (h >= box.rows_of_run) break;
                Stored* const row = to + run.shared + h * box.pitch.row;
                for (int at = columns.first + thread % 32; at < columns.end; at += 32) row[at] = {};
            }
        }
    }
    return bytes;
}

// ---- arithmetic ------------------------------------------------------------------------------------------------------

// The first words of a row that hold a lane's elements, which begin with the first word, or (`odd`) in the middle of it.
template <int WORDS> struct Window {
    unsigned word[WORDS];
    unsigned odd;  // 1 or 0

    // WHOLE: rows start on boundaries of 16 bytes.
    template <bool WHOLE> __device__ __forceinline__ void load(const Stored* stage, int element) {
        if (WHOLE) {
            constexpr int COUNT = WORDS - (PER_WORD - 1), LOAD = gcd(COUNT, 4);
            word[WORDS - 1] = 0;
#pragma unroll
            for (int i = 0; i < COUNT; i += LOAD) {
                const auto piece = *reinterpret_cast<const Pack<unsigned, LOAD>*>(stage + element + i * PER_WORD);
#pragma unroll
                for (int j = 0; j < LOAD; ++j) word[i + j] = piece.value[j];
            }
            odd = 0;
        } else {
            const unsigned* const from = reinterpret_cast<const unsigned*>(stage) + (unsigned)element / PER_WORD;
#pragma unroll
            for (int i = 0; i < WORDS; ++i) word[i] = from[i];
            odd = (unsigned)element % PER_WORD;
        }
    }

    // Two elements as a word, both even or both odd; or (float32) the first of them.
    template <int FIRST, int SECOND> __device__ __forceinline__ unsigned take() const {
        if constexpr (PER_WORD == 1) {
            return word[FIRST];
        } else if constexpr (SECOND == FIRST + 1) {
            constexpr int I = FIRST / 2, NEXT = I + 1 < WORDS ? I + 1 : I;
            return select_bytes(word[I], word[NEXT], (FIRST % 2 ? 0x5432u : 0x3210u) + 0x2222u * odd);
        } else if constexpr (FIRST % 2 == 0 && SECOND % 2 == 0) {
            return select_bytes(word[FIRST / 2], word[SECOND / 2], 0x5410u + 0x2222u * odd);
        } else if constexpr (FIRST % 2 == 1 && SECOND == FIRST + 2) {
            constexpr int I = FIRST / 2, LAST = I + 2 < WORDS ? I + 2 : I;
            const unsigned both = select_bytes(word[I], word[I + 1], 0x7632u + 0x0022u * odd);
            return select_bytes(both, word[LAST], 0x3210u + 0x2200u * odd);
        } else {
            constexpr int NEXT = SECOND < 2 * WORDS - 1 ? SECOND + 1 : SECOND;
            const unsigned first = take<FIRST, FIRST + 1>(), second = take<SECOND, NEXT>();
            return select_bytes(first, second, 0x5410u);
        }
    }
};
constexpr int WORDS_Y = 2 * STRIDE_W + PER_WORD - 1;
constexpr int WORDS_X = ceil_div(OWN + REACH_W + PER_WORD - 1, PER_WORD);

template <int N> __device__ __forceinline__ void round_or_split(unsigned (&part)[PARTS][N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
#if PRECISION == TF32X3
        split(__uint_as_float(part[0][i]), part[0][i], part[1][i]);
#elif PRECISION == TF32
        part[0][i] = to_tf32(__uint_as_float(part[0][i]));
#endif
    }
}

__device__ __forceinline__ void add_product(float (&sums)[4], const unsigned (&a)[PARTS][4], const unsigned (&b)[PARTS][2]) {
#if PRECISION == TF32X3
    // The tensor core truncates its sums: each three products start from zero, and an addition ends them.
    const float zero[4] = {0, 0, 0, 0};
    float sum[4];
    mma_m16n8k8_tf32(sum, a[1], b[0], zero);
    mma(sum, a[0], b[1]);
    mma(sum, a[0], b[0]);
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[i] += sum[i];
#else
    mma(sums, a[0], b[0]);
#endif
}

// A warp's rows of y and x, of its taps and CELLS_H cells. Of x, those further back come first.
constexpr int ROWS_D = WARPS_D > 1 ? 1 : AxisD::ROWS, ROWS_H = WARPS_H > 1 ? 1 : AxisH::ROWS;
constexpr int REACH_D = WARPS_D > 1 ? 0 : AxisD::REACH, REACH_H = WARPS_H > 1 ? 0 : AxisH::REACH;
__host__ __device__ constexpr int row_d(int tap) { return WARPS_D > 1 ? 0 : AxisD::row(tap); }
__host__ __device__ constexpr int row_h(int tap) { return WARPS_H > 1 ? 0 : AxisH::row(tap); }
__host__ __device__ constexpr int back_d(int tap) { return WARPS_D > 1 ? 0 : AxisD::back(tap); }
__host__ __device__ constexpr int back_h(int tap) { return WARPS_H > 1 ? 0 : AxisH::back(tap); }

typedef Window<WORDS_Y> WindowY;
typedef Window<WORDS_X> WindowX;

// Ones where elements of a word exist: columns `first` and, of 16 bits, `second`.
__device__ __forceinline__ unsigned existing(int first, int second, Range columns) {
    const bool has_first = first >= columns.first && first < columns.end;
    const bool has_second = second >= columns.first && second < columns.end;
    if (PER_WORD == 1) return has_first ? ~0u : 0;
    return (has_first ? 0xffffu : 0) | (has_second ? 0xffff0000u : 0);
}

// The fragments of y of all phases that have a tap, from PHASE on. EDGE: some columns do not exist.
template <bool EDGE, int PHASE = 0>
__device__ __forceinline__ void take_y(unsigned (&b)[STRIDE_W][PARTS][2], const WindowY& row, int column, int end) {
    if constexpr (PHASE < STRIDE_W) {
        if constexpr (tap_of_phase(PHASE, 0) < KERNEL_W) {
            constexpr int SECOND = PHASE + STRIDE_W, HALF = PHASE + OWN / 2 * STRIDE_W;
            b[PHASE][0][0] = row.take<PHASE, SECOND>();
            b[PHASE][0][1] = row.take<HALF, HALF + STRIDE_W>();
            if (EDGE) {
                b[PHASE][0][0] &= existing(column + PHASE, column + SECOND, {0, end});
                b[PHASE][0][1] &= existing(column + HALF, column + HALF + STRIDE_W, {0, end});
            }
            round_or_split(b[PHASE]);
        }
        take_y<EDGE, PHASE + 1>(b, row, column, end);
    }
}
// The fragment of x of a pair of taps.
template <bool EDGE, int PAIR>
__device__ __forceinline__ void take_x(unsigned (&a)[PARTS][4], const WindowX& row, int column, Range columns) {
    constexpr Pair TAPS = ALL.pair[PAIR];
    constexpr int LAST = back_w(KERNEL_W - 1), HALF = OWN / 2;
    constexpr int FIRST = LAST - TAPS.first_back, SECOND = LAST - TAPS.second_back;
    a[0][0] = row.take<FIRST, FIRST + 1>();
    a[0][1] = row.take<SECOND, SECOND + 1>();
    a[0][2] = row.take<FIRST + HALF, FIRST + HALF + 1>();
    a[0][3] = row.take<SECOND + HALF, SECOND + HALF + 1>();
    if (EDGE) {
        a[0][0] &= existing(column + FIRST, column + FIRST + 1, columns);
        a[0][1] &= existing(column + SECOND, column + SECOND + 1, columns);
        a[0][2] &= existing(column + FIRST + HALF, column + FIRST + HALF + 1, columns);
        a[0][3] &= existing(column + SECOND + HALF, column + SECOND + HALF + 1, columns);
    }
    round_or_split(a);
}

typedef unsigned FragmentsY[CELLS_H * ROWS_H * ROWS_D][STRIDE_W][PARTS][2];  // a warp's rows, which are those along H first

// What a warp multiplies: where the boxes of a stage are and, of the lane's elements, their columns.
struct Work {
    const Stored *x, *y;
    Pitch pitch_x, pitch_y;
    OfBox box;
    int column_x, column_y;
};

// Adds the products of a row of x, which is the warp's number x_d, x_h, for all pairs of taps from PAIR on.
template <bool EDGE, int PAIR = 0>
__device__ __forceinline__ void multiply_row(float (&acc)[TILES][4], const WindowX& window, const FragmentsY& b, int x_d,
                                             int x_h, const Work& work, int column) {
    if constexpr (PAIR < PAIRS) {
        constexpr int PHASE = ALL.pair[PAIR].phase;
        unsigned a[PARTS][4];
        take_x<EDGE, PAIR>(a, window, work.column_x + column, {work.box.first_x, work.box.end_x});
#pragma unroll
        for (int tap_d = 0; tap_d < TAPS_D; ++tap_d)
#pragma unroll
            for (int tap_h = 0; tap_h < TAPS_H; ++tap_h)
#pragma unroll
                for (int cell = 0; cell < CELLS_H; ++cell) {
                    if (REACH_D - back_d(tap_d) != x_d || REACH_H - back_h(tap_h) + cell != x_h) continue;
                    const int row = (row_d(tap_d) * CELLS_H + cell) * ROWS_H + row_h(tap_h);
                    add_product(acc[(tap_d * TAPS_H + tap_h) * PAIRS + PAIR], a, b[row][PHASE]);
                }
        multiply_row<EDGE, PAIR + 1>(acc, window, b, x_d, x_h, work, column);
    }
}

// Adds the products of CELLS_H cells and a chunk along W, which begins with cell `column`. WHOLE: y's rows start on 16 bytes.
template <bool WHOLE, bool EDGE>
__device__ __forceinline__ void multiply(float (&acc)[TILES][4], const Work& work, int d, int h, int column) {
    const int at_x = work.box.start_x + work.column_x + d * work.pitch_x.plane + h * work.pitch_x.row + column;
    const int at_y = work.box.start_y + work.column_y + d * AxisD::ROWS * work.pitch_y.plane +
                     h * AxisH::ROWS * work.pitch_y.row + column * STRIDE_W;
    FragmentsY b;
#pragma unroll
    for (int row = 0; row < CELLS_H * ROWS_H * ROWS_D; ++row) {
        // A warp with a tap of its own along H reads one row of each cell.
        const int row_h = row % (CELLS_H * ROWS_H) * (WARPS_H > 1 ? AxisH::ROWS : 1), row_d = row / (CELLS_H * ROWS_H);
        WindowY window;
        window.load<WHOLE>(work.y, at_y + row_h * work.pitch_y.row + row_d * work.pitch_y.plane);
        take_y<EDGE>(b[row], window, work.column_y + column * STRIDE_W, work.box.end_y);
    }
#pragma unroll
    for (int x_d = 0; x_d <= REACH_D; ++x_d) {
#pragma unroll
        for (int x_h = 0; x_h < REACH_H + CELLS_H; ++x_h) {
            WindowX window;
            window.load<false>(work.x, at_x + x_h * work.pitch_x.row + x_d * work.pitch_x.plane);
            multiply_row<EDGE>(acc, window, b, x_d, x_h, work, column);
        }
    }
}

// Adds the products of a box: a warp takes every WARPS_K-th chunk of its rows.
template <bool WHOLE> __device__ __forceinline__ void multiply_box(float (&acc)[TILES][4], const Work& work, const Problem& p) {
    const int box_d = (int)p.box[0], box_h = (int)p.box[1], chunks = (int)p.box[2];
    int chunk = (int)threadIdx.x / THREADS_C, h = 0, d = 0;
#pragma unroll 1
    while (true) {
        for (; chunk >= chunks; chunk -= chunks) {
            h += CELLS_H;
            if (h == box_h) h = 0, ++d;
        }
        if (d >= box_d) break;
        const int column = chunk * CHUNK;
        const bool inside = column >= work.box.first_x && column + CHUNK + REACH_W <= work.box.end_x &&
                            (column + CHUNK) * STRIDE_W <= work.box.end_y;
        if (inside)
            multiply<WHOLE, false>(acc, work, d, h, column);
        else
            multiply<WHOLE, true>(acc, work, d, h, column);
        chunk += WARPS_K;
    }
}

// ---- the kernel ------------------------------------------------------------------------------------------------------

__device__ __forceinline__ int tiles_of(long long count) { return (int)((count + CHANNELS - 1) / CHANNELS); }

// Tiles of all weights.
__device__ __forceinline__ unsigned tiles_of_weights(const Problem& p) {
    return (unsigned)(p.groups * tiles_of(p.c_in) * tiles_of(p.c_out));
}

// The first weight of a tile. Those that read the same y follow each other.
__device__ __forceinline__ Weight first_weight(unsigned tile, const Problem& p) {
    Weight first = {};
    first.ci = (int)(tile % tiles_of(p.c_in)) * CHANNELS;
    tile /= tiles_of(p.c_in);
    first.co = (int)(tile % tiles_of(p.c_out)) * CHANNELS;
    first.group = tile / tiles_of(p.c_out);
    return first;
}

// The first weight of a thread, for the first one of its tile.
__device__ __forceinline__ Weight weight_of_thread(Weight first, int thread) {
    const int lane = thread % 32, warp = thread / 32;
    first.ci += lane / 4;
    first.co += lane % 4 * 2;
    first.h += WARPS_H > 1 ? warp % WARPS_H : 0;
    first.d += WARPS_D > 1 ? warp / WARPS_H : 0;
    return first;
}

// Where the weight of a thread's sum is from there.
__device__ __forceinline__ Ahead weight_of_sum(int sum) {
    const int taps = sum / 4 / PAIRS;
    const Pair pair = ALL.pair[sum / 4 % PAIRS];
    return {0, sum % 2, taps / TAPS_H, taps % TAPS_H, sum / 2 % 2 ? pair.second : pair.first};
}

#include "weight_sums.cuh"

// Writes to `parts`, or straight to `out` where there is one part alone.
extern "C" __global__ void __launch_bounds__(WORKERS + COPIERS, MIN_BLOCKS)
    weight_gradient_narrow(const Stored* x, const Stored* y, float* parts, Stored* out, const Problem p) {
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    // For each stage a barrier and what is known of its box, and then the stages. Of the former, nothing else takes the place.
    Barrier* const barriers = reinterpret_cast<Barrier*>(shared_bytes);
    OfBox* const of_boxes = reinterpret_cast<OfBox*>(barriers + STAGES);
    Stored* const shared = reinterpret_cast<Stored*>(barriers + 4 * STAGES);

    const unsigned tiles = tiles_of_weights(p);
    const Weight first = first_weight(blockIdx.x % tiles, p);
    x += (first.group * p.c_in + first.ci) * p.x_stride[1];
    y += (first.group * p.c_out + first.co) * p.out_stride[1];
    const int channels_in = (int)p.c_in - first.ci, channels_out = (int)p.c_out - first.co;

    // Cells of a box along D and H, and chunks of them along W.
    const int box_d = (int)p.box[0], box_h = (int)p.box[1], chunks = (int)p.box[2];
    // Of rows whole and without gaps, those of a box follow each other.
    const bool follow_x = p.tiles[2] == 1 && p.x_stride[3] == p.x_extent[2];
    const bool follow_y = p.tiles[2] == 1 && AxisH::GAP == 1 && p.out_stride[3] == p.out_extent[2];
    constexpr int MORE = 2 * (PER_WORD - 1);  // that lanes read
    const SideX side_x(box_d + AxisD::REACH, box_h + AxisH::REACH, CHUNK * chunks + REACH_W + MORE, follow_x, p.x_stride);
    const SideY side_y(box_d * AxisD::ROWS, box_h * AxisH::ROWS, STRIDE_W * CHUNK * chunks + MORE, follow_y, p.out_stride);
    const int stage_size = side_x.size() + side_y.size();

    // A box's first elements, which may be outside, and where they are.
    const auto place_x = [&](unsigned index, const Stored*& from) -> Place {
        const Index w = (Index)take(index, p, 2) * (CHUNK * chunks) + (Index)(p.pad[2] / STRIDE_W) - back_w(KERNEL_W - 1);
        const Index h = (Index)take(index, p, 1) * box_h + (Index)(p.pad[1] / STRIDE_H) - AxisH::REACH;
        const Index d = (Index)take(index, p, 0) * box_d + (Index)(p.pad[0] / STRIDE_D) - AxisD::REACH;
        from = x + index * p.x_stride[0] + d * p.x_stride[2] + h * p.x_stride[3] + w;
        return {d, h, w, p.x_extent, p.x_stride};
    };
    const auto place_y = [&](unsigned index, const Stored*& from) -> Place {
        const Index w = (Index)take(index, p, 2) * (STRIDE_W * CHUNK * chunks);
        const Index h = ((Index)take(index, p, 1) * box_h + (Index)(p.pad[1] / STRIDE_H)) * STRIDE_H - (Index)p.pad[1];
        const Index d = ((Index)take(index, p, 0) * box_d + (Index)(p.pad[0] / STRIDE_D)) * STRIDE_D - (Index)p.pad[0];
        from = y + index * p.out_stride[0] + d * p.out_stride[2] + h * p.out_stride[3] + w;
        return {d, h, w, p.out_extent, p.out_stride};
    };

    // Behind the stages: the runs.
    Run* const runs_x = reinterpret_cast<Run*>(shared + STAGES * stage_size);
    const int count_x = side_x.list(runs_x, channels_in, p.x_stride);
    Run* const runs_y = runs_x + count_x;
    const int count_y = side_y.list(runs_y, channels_out, p.out_stride);
    // Lanes read channels that do not exist, and before and behind what does, which is not copied.
    for (int i = threadIdx.x; i < STAGES * stage_size / PER_WORD; i += WORKERS + COPIERS)
        reinterpret_cast<unsigned*>(shared)[i] = 0;
    if (BULK && threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) barrier_init(barriers + i, COPIERS);
        barrier_init_done();
    }
    if (BULK) publish_shared_writes();
    __syncthreads();

    const unsigned boxes = (unsigned)(p.n * p.tiles[0] * p.tiles[1] * p.tiles[2]), parts_of_boxes = (unsigned)p.tiles[3];
    // The boxes of a block: one of every `parts_of_boxes`, always the next of these, or one block might have all at a border.
    const unsigned part = (unsigned)(blockIdx.x / tiles), rounds = (boxes + parts_of_boxes - 1) / parts_of_boxes;
    const auto box_of_round = [&](unsigned round) { return round * parts_of_boxes + (part + round) % parts_of_boxes; };
    unsigned round_ahead = 0;
    const auto stage_ahead = [&](int turn) {
        const unsigned ahead = box_of_round(round_ahead++);
        if (ahead < boxes) {
            const int thread = (int)threadIdx.x - WORKERS;
            Stored* const to = shared + turn * stage_size;
            const Stored *from_x, *from_y;
            const Place of_x = place_x(ahead, from_x), of_y = place_y(ahead, from_y);
            unsigned bytes = stage(to, from_y, of_y, side_y, runs_y, count_y, thread, barriers + turn);
            // By other warps than a few runs of y.
            bytes += stage(to + side_y.size(), from_x, of_x, side_x, runs_x, count_x, COPIERS - 1 - thread, barriers + turn);
            if (thread == 0) {
                const Range x = columns_of(of_x, side_x.width), y = columns_of(of_y, side_y.width);
                of_boxes[turn] = {start_of(from_x), start_of(from_y), x.first, x.end, y.end};
            }
            if (BULK) barrier_arrive_expecting(barriers + turn, bytes);
        }
        copy_async_commit();
    };

    const int lane = threadIdx.x % 32, warp = threadIdx.x % THREADS_C / 32, warp_k = threadIdx.x / THREADS_C;
    const int tap_d = WARPS_D > 1 ? warp / WARPS_H : 0, tap_h = WARPS_H > 1 ? warp % WARPS_H : 0;
    const Pitch pitch_x = side_x.pitch, pitch_y = side_y.pitch;
    int lane_x = lane / 4 * pitch_x.channel, lane_y = lane / 4 * pitch_y.channel;
    if (WARPS_D > 1) {
        lane_x += (AxisD::REACH - AxisD::back(tap_d)) * pitch_x.plane;
        lane_y += AxisD::row(tap_d) * pitch_y.plane;
    }
    if (WARPS_H > 1) {
        lane_x += (AxisH::REACH - AxisH::back(tap_h)) * pitch_x.row;
        lane_y += AxisH::row(tap_h) * pitch_y.row;
    }

    float acc[TILES][4];
#pragma unroll
    for (int i = 0; i < SUMS; ++i) acc[i / 4][i % 4] = 0;

    const bool is_stager = threadIdx.x >= WORKERS;
    if (is_stager) {
#pragma unroll 1
        for (int turn = 0; turn < STAGES - 1; ++turn) stage_ahead(turn);
        copy_async_wait<STAGES - 2>();
    }
    int turn = 0;
    unsigned parity = 0;
#pragma unroll 1
    for (unsigned round = 0; round < rounds && box_of_round(round) < boxes; ++round) {  // none is missing but a last one
        if (BULK) publish_shared_writes();
        __syncthreads();  // a box has landed but for bulk copies, and nobody reads the one before it any more
        if (is_stager) {
            stage_ahead(turn == 0 ? STAGES - 1 : turn - 1);
            copy_async_wait<STAGES - 2>();
        } else {
            if (BULK) barrier_wait(barriers + turn, parity);
            Work work = {shared + turn * stage_size + side_y.size(), shared + turn * stage_size, pitch_x, pitch_y,
                         of_boxes[turn], lane % 4 * OWN, lane % 4 * OWN * STRIDE_W};
            work.box.start_x += lane_x;
            work.box.start_y += lane_y;
            if (p.out_vector)
                multiply_box<true>(acc, work, p);
            else
                multiply_box<false>(acc, work, p);
        }
        if (++turn == STAGES) turn = 0, parity ^= 1;
    }
    copy_async_wait<0>();

    // The warps that shared the positions of the boxes are added up by the first of them.
    add_warps(acc, shared, warp_k);
    if (warp_k == 0) store_sums(acc, first, parts, out, p);
}

extern "C" __global__ void __launch_bounds__(SUM_THREADS, SUM_BLOCKS)
    weight_gradient_narrow_add(const float* parts, Stored* out, const Problem p) {
    add_sums(parts, out, p);
}
