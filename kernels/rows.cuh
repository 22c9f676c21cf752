// Rows of y in registers, for kernels whose threads slide along D and read y from global memory: the columns of a row that
// the taps of a thread's POSITIONS positions along W reach.
//
// A thread can load them all itself, one by one (FIRST_OWN < 0). Or the lanes of a warp, which lie along W, share them, where
// rows are aligned: each loads the POSITIONS * STRIDE columns that no other has, in pieces of up to 16 bytes, and gets those
// to the left and right from its neighbours. Its own ones begin FIRST_OWN after its first column, so that pieces are aligned.
// A lane without such a neighbour, at either end of a warp or of a row of positions, loads what it misses.
#pragma once

#include "boxes.cuh"

// What elements are fetched as: 16-bit ones in words of two, from which either takes one instruction.
template <class Stored> struct Fetched {
    typedef unsigned Word;
    static constexpr int ELEMENTS = 2;
};
template <> struct Fetched<float> {
    typedef float Word;
    static constexpr int ELEMENTS = 1;
};
template <> struct Fetched<double> {
    typedef double Word;
    static constexpr int ELEMENTS = 1;
};

__device__ __forceinline__ unsigned fetch_one(const Half* from) { return from->bits; }
__device__ __forceinline__ unsigned fetch_one(const BFloat16* from) { return from->bits; }
__device__ __forceinline__ float fetch_one(const float* from) { return *from; }
__device__ __forceinline__ double fetch_one(const double* from) { return *from; }

template <class Stored> __device__ __forceinline__ float widen_half_of(unsigned word, int half) {
    return widen(Stored{(unsigned short)(word >> 16 * half)});
}
template <> __device__ __forceinline__ float widen_half_of<BFloat16>(unsigned word, int half) {
    return __uint_as_float(half == 0 ? word << 16 : word & 0xffff0000u);
}
template <class Stored> __device__ __forceinline__ float widen_word(unsigned word, int half) {
    return widen_half_of<Stored>(word, half);
}
template <class Stored> __device__ __forceinline__ float widen_word(float word, int) { return word; }
template <class Stored> __device__ __forceinline__ double widen_word(double word, int) { return word; }

__device__ __forceinline__ void put_half(unsigned& word, int half, unsigned bits) { word |= bits << 16 * half; }
__device__ __forceinline__ void put_half(float& word, int, float value) { word = value; }
__device__ __forceinline__ void put_half(double& word, int, double value) { word = value; }

// Neighbouring columns. Not a mask with a bit for each: the compiler would unpack it into all predicates at a time, and fail
// where there are others.
struct Range {
    int first;
    unsigned count;

    __device__ __forceinline__ bool has(int column) const { return (unsigned)(column - first) < count; }
};

// Which of its neighbours a lane gets columns from: all bits are set, or none.
struct Sides {
    unsigned left, right;
};

// What the neighbour has, or what the thread loaded itself, which is zero where it gets it from the neighbour. As masks,
// since predicates are few.
__device__ __forceinline__ unsigned either(unsigned other, unsigned mine, unsigned side) { return (other & side) | mine; }
__device__ __forceinline__ float either(float other, float mine, unsigned side) {
    return __uint_as_float(either(__float_as_uint(other), __float_as_uint(mine), side));
}
__device__ __forceinline__ double either(double other, double mine, unsigned side) { return side ? other : mine; }

// STRIDE_IN_MEMORY is the distance of neighbouring columns where it is known, else 0.
template <class Stored, class Acc, int TAPS, int STRIDE, int DILATION, int POSITIONS, int FIRST_OWN, int STRIDE_IN_MEMORY>
struct Row {
    typedef Staged<TAPS, STRIDE, DILATION, POSITIONS> Along;
    typedef typename Fetched<Stored>::Word Word;
    static constexpr int COLUMNS = Along::EXTENT, OF_POSITIONS = POSITIONS;
    static constexpr bool SHARED = FIRST_OWN >= 0;
    static constexpr int ELEMENTS = SHARED ? Fetched<Stored>::ELEMENTS : 1;  // of a word
    static constexpr int OWN = SHARED ? POSITIONS * STRIDE : COLUMNS;
    static constexpr int BEFORE = SHARED ? FIRST_OWN : 0;
    static constexpr int AFTER = BEFORE + OWN < COLUMNS ? COLUMNS - BEFORE - OWN : 0;
    static constexpr int WORDS = OWN / ELEMENTS, LEFT = ceil_div(BEFORE, ELEMENTS), RIGHT = ceil_div(AFTER, ELEMENTS);
    static constexpr int WIDEST = 16 / (int)sizeof(Word);
    static constexpr int PIECE = (WORDS & -WORDS) < WIDEST ? WORDS & -WORDS : WIDEST;  // in words

    static_assert(!SHARED || Along::GAP == 1, "pieces hold neighbouring columns");
    static_assert(!SHARED || (BEFORE <= OWN && AFTER <= OWN), "only the next lane has what a lane misses");
    static_assert(!SHARED || OWN % ELEMENTS == 0, "whole words");

    Word left[LEFT + 1], own[WORDS], right[RIGHT + 1];  // none may be empty

    // The column of position t and a tap.
    __host__ __device__ static constexpr int column(int t, int tap) { return t * Along::STEP + tap * Along::HOP; }
    __host__ __device__ static constexpr bool is_read(int column_) {
        bool found = SHARED;
        for (int t = 0; t < POSITIONS; ++t)
            for (int tap = 0; tap < TAPS; ++tap) found = found || column(t, tap) == column_;
        return found;
    }

    // Lanes lie along the `tiles` of a row of positions; those of a row follow each other.
    __device__ __forceinline__ static Sides sides(unsigned lane, unsigned tile, unsigned tiles) {
        return {SHARED && lane > 0 && tile > 0 ? ~0u : 0, SHARED && lane < 31 && tile + 1 < tiles ? ~0u : 0};
    }

    // The columns that exist and that the thread loads itself; `first` is its first own one.
    __device__ __forceinline__ static Range columns_to_load(Index first, long long extent, Sides from) {
        Range columns = {0, 0};
#pragma unroll
        for (int column = BEFORE + OWN + AFTER - 1; column >= 0; --column) {
            const bool gets_it = column < BEFORE ? from.left : column >= BEFORE + OWN && from.right;
            if (gets_it || !within(first + (column - BEFORE) * Along::GAP, extent)) continue;
            columns.first = column;
            ++columns.count;
        }
        return columns;
    }

    // Loads the given columns, the others become zero; `from` is the first own one.
    __device__ __forceinline__ void fetch(const Stored* from, Range here, Index stride_w) {
        const Index step = SHARED ? 1 : STRIDE_IN_MEMORY ? STRIDE_IN_MEMORY * Along::GAP : stride_w;
        fetch_one_by_one<LEFT>(left, from - LEFT * ELEMENTS * step, here, BEFORE - LEFT * ELEMENTS, 0, BEFORE, step);
        if (SHARED) {
#pragma unroll
            for (int i = 0; i < WORDS; i += PIECE) {
                Pack<Word, PIECE> piece = {};
                if (here.has(BEFORE + i * ELEMENTS))
                    piece = *reinterpret_cast<const Pack<Word, PIECE>*>(from + i * ELEMENTS);
#pragma unroll
                for (int j = 0; j < PIECE; ++j) own[i + j] = piece.value[j];
            }
        } else {
            fetch_one_by_one<WORDS>(own, from, here, BEFORE, BEFORE, BEFORE + OWN, step);
        }
        fetch_one_by_one<RIGHT>(right, from + OWN * step, here, BEFORE + OWN, BEFORE + OWN, COLUMNS, step);
    }

    // The columns as numbers; all lanes of a warp take part.
    __device__ __forceinline__ void widen_all(Acc (&value)[COLUMNS], Sides from) const {
        Word before[LEFT + 1], after[RIGHT + 1];
#pragma unroll
        for (int i = 0; i < LEFT; ++i) {
            const Word other = __shfl_up_sync(~0u, own[WORDS - LEFT + i], 1);
            before[i] = either(other, left[i], from.left);
        }
#pragma unroll
        for (int i = 0; i < RIGHT; ++i) {
            const Word other = __shfl_down_sync(~0u, own[i], 1);
            after[i] = either(other, right[i], from.right);
        }
#pragma unroll
        for (int column = 0; column < COLUMNS; ++column) {
            const int e = column - BEFORE;
            if (e < 0)
                value[column] = widen_word<Stored>(before[(e + LEFT * ELEMENTS) / ELEMENTS], (e + OWN) % ELEMENTS);
            else if (e < OWN)
                value[column] = widen_word<Stored>(own[e / ELEMENTS], e % ELEMENTS);
            else
                value[column] = widen_word<Stored>(after[(e - OWN) / ELEMENTS], (e - OWN) % ELEMENTS);
        }
    }

   private:
    // COUNT words from column `first` on, of which those from `low` to `high - 1` are of interest.
    template <int COUNT, int N>
    __device__ __forceinline__ static void fetch_one_by_one(Word (&to)[N], const Stored* from, Range here, int first, int low,
                                                            int high, Index step) {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            to[i] = 0;
#pragma unroll
            for (int half = 0; half < ELEMENTS; ++half) {
                const int e = i * ELEMENTS + half, column = first + e;
                if (column < low || column >= high || (!SHARED && !is_read(column))) continue;
                Word one = 0;
                if (here.has(column)) one = fetch_one(from + e * step);
                put_half(to[i], half, one);
            }
        }
    }
};
