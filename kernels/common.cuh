// What every kernel shares: what it is specialised on, element types with their conversions, the arithmetic of phases, launch
// parameters. No CUDA header is included, so that a specialisation compiles in a fraction of a second and on any host.
#pragma once

#include "ptx.cuh"

// ---- what is fixed at compile time, with defaults, so that every file compiles alone ---------------------------------

#define FLOAT16 0
#define BFLOAT16 1
#define FLOAT32 2
#define FLOAT64 3

#ifndef DTYPE
#define DTYPE FLOAT32
#endif
#ifndef KERNEL_D
#define KERNEL_D 3
#define KERNEL_H 3
#define KERNEL_W 3
#endif
#ifndef STRIDE_D
#define STRIDE_D 2
#define STRIDE_H 2
#define STRIDE_W 2
#endif
#ifndef DILATION_D
#define DILATION_D 1
#define DILATION_H 1
#define DILATION_W 1
#endif

// An asynchronous copy of 4, 8 or 16 bytes, of which the first `bytes` are there and the rest become zeros.
template <int BYTES> __device__ __forceinline__ void copy_async(void* shared, const void* global, int bytes) {
    static_assert(BYTES == 4 || BYTES == 8 || BYTES == 16, "what an instruction copies");
    if (BYTES == 16) copy_async_16(shared, global, bytes);
    if (BYTES == 8) copy_async_8(shared, global, bytes);
    if (BYTES == 4) copy_async_4(shared, global, bytes);
}

// ---- element types -------------------------------------------------------------------------------------------------

struct Half {
    unsigned short bits;
};

struct BFloat16 {
    unsigned short bits;
};

// Stored type and the type that products are accumulated in.
template <int TYPE> struct Element;
template <> struct Element<FLOAT16> { typedef Half Stored; typedef float Accumulator; };
template <> struct Element<BFLOAT16> { typedef BFloat16 Stored; typedef float Accumulator; };
template <> struct Element<FLOAT32> { typedef float Stored; typedef float Accumulator; };
template <> struct Element<FLOAT64> { typedef double Stored; typedef double Accumulator; };
typedef Element<DTYPE>::Stored Stored;
typedef Element<DTYPE>::Accumulator Acc;

__device__ __forceinline__ float widen(Half value) { return half_bits_to_float(value.bits); }
__device__ __forceinline__ float widen(BFloat16 value) { return __uint_as_float((unsigned)value.bits << 16); }
__device__ __forceinline__ float widen(float value) { return value; }
__device__ __forceinline__ double widen(double value) { return value; }

__device__ __forceinline__ void narrow(float value, Half& to) { to.bits = float_to_half_bits(value); }
__device__ __forceinline__ void narrow(float value, float& to) { to = value; }
__device__ __forceinline__ void narrow(double value, double& to) { to = value; }
__device__ __forceinline__ void narrow(float value, BFloat16& to) {
#if __CUDA_ARCH__ >= 800
    to.bits = (unsigned short)floats_to_bfloat16_bits(value, 0.0f);
#else
    // Round to nearest even in integers. A NaN stays a (quiet) NaN.
    const unsigned bits = __float_as_uint(value);
    const unsigned rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    to.bits = (unsigned short)(value != value ? (bits >> 16) | 0x40u : rounded);
#endif
}

__device__ __forceinline__ void zero(Half& value) { value.bits = 0; }
__device__ __forceinline__ void zero(BFloat16& value) { value.bits = 0; }
__device__ __forceinline__ void zero(float& value) { value = 0; }

__device__ __forceinline__ unsigned bits_of(Half value) { return value.bits; }
__device__ __forceinline__ unsigned bits_of(BFloat16 value) { return value.bits; }
__device__ __forceinline__ unsigned bits_of(float value) { return __float_as_uint(value); }

// The other way round, of the low bits.
__device__ __forceinline__ void from_bits(unsigned bits, Half& value) { value.bits = (unsigned short)bits; }
__device__ __forceinline__ void from_bits(unsigned bits, BFloat16& value) { value.bits = (unsigned short)bits; }
__device__ __forceinline__ void from_bits(unsigned bits, float& value) { value = __uint_as_float(bits); }

// Two neighbouring 16-bit numbers, as the word that they are in memory.
template <class T> __device__ __forceinline__ unsigned narrow_two(float low, float high) {
    return floats_to_half_bits(low, high);
}
template <> __device__ __forceinline__ unsigned narrow_two<BFloat16>(float low, float high) {
    return floats_to_bfloat16_bits(low, high);
}

// N consecutive values, moved by one instruction where they are 16 bytes.
template <class T, int N> struct alignas(sizeof(T) * N) Pack {
    T value[N];
};

// Loads values that follow each other, as many at a time as divide them.
template <class T, int N> __device__ __forceinline__ void load_vector(T (&to)[N], const T* from) {
    constexpr int WIDTH = N % 4 == 0 ? 4 : N % 2 == 0 ? 2 : 1;
#pragma unroll
    for (int j = 0; j < N; j += WIDTH) {
        const Pack<T, WIDTH> pack = *reinterpret_cast<const Pack<T, WIDTH>*>(from + j);
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) to[j + i] = pack.value[i];
    }
}

// Narrows values that follow each other, one or an even number, and stores them at once.
template <class T, int N> __device__ __forceinline__ void store_vector(const Pack<float, N>& values, T* to) {
    if constexpr (N == 1) {
        narrow(values.value[0], *to);
    } else if constexpr (sizeof(T) == 4) {
        unsigned words[N];
#pragma unroll
        for (int i = 0; i < N; ++i) words[i] = __float_as_uint(values.value[i]);
        store_words(to, words);
    } else {
        unsigned words[N / 2];
#pragma unroll
        for (int i = 0; i < N / 2; ++i) words[i] = narrow_two<T>(values.value[2 * i], values.value[2 * i + 1]);
        store_words(to, words);
    }
}

// ---- lanes of a warp -----------------------------------------------------------------------------------------------

// Of two lanes `apart`, the first receives what both have as `first`, and the second what both have as `second`.
__device__ __forceinline__ void exchange(unsigned& first, unsigned& second, int apart) {
    const bool is_second = threadIdx.x & apart;
    const unsigned received = __shfl_xor_sync(~0u, is_second ? first : second, apart);
    first = is_second ? received : first;
    second = is_second ? second : received;
}

// ---- small arithmetic ----------------------------------------------------------------------------------------------

__host__ __device__ constexpr int gcd(int a, int b) { return b == 0 ? a : gcd(b, a % b); }
__host__ __device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
__host__ __device__ constexpr int round_up(int a, int b) { return ceil_div(a, b) * b; }

// The smallest value >= `least` that is `residue` modulo `modulus`.
__host__ __device__ constexpr int at_residue(int least, int residue, int modulus) {
    return least + ((residue - least) % modulus + modulus) % modulus;
}

// ---- indices ---------------------------------------------------------------------------------------------------------

#ifndef INDEX64  // whether an offset or a position may need more than 32 bits
#define INDEX64 0
#endif
#if INDEX64
typedef long long Index;
typedef unsigned long long UIndex;
#else
typedef int Index;
typedef unsigned UIndex;
#endif

__device__ __forceinline__ bool within(Index position, long long extent) { return (UIndex)position < (UIndex)extent; }

// ---- phases --------------------------------------------------------------------------------------------------------

// The taps of one axis. With r the phase, tap k reaches it when k * DILATION = r (mod STRIDE), and then reads the input
// at q - back(k). The taps of a phase are `STEP` apart, and each next one reads `HOP` further back.
// With EVERY_TAP, a step is one of all taps, of which each is alone.
template <int KERNEL, int STRIDE, int DILATION, bool EVERY_TAP = false> struct Axis {
    static constexpr int GCD = gcd(STRIDE, DILATION);
    static constexpr int STEP = EVERY_TAP ? KERNEL : STRIDE / GCD;
    static constexpr int HOP = DILATION / GCD;
    static constexpr int MAX_TAPS = ceil_div(KERNEL, STEP);  // of one phase
    static constexpr int REACH = (KERNEL - 1) * DILATION / STRIDE;  // furthest back of all taps

    __host__ __device__ static constexpr int phase_of(int tap) { return tap * DILATION % STRIDE; }
    __host__ __device__ static constexpr int back(int tap) { return tap * DILATION / STRIDE; }
};

// The taps of the phase a block works on: first, first + STEP, ... ; `count` is 0 for a dead phase.
template <class A, int KERNEL> struct PhaseTaps {
    int first, count;

    __device__ __forceinline__ explicit PhaseTaps(int phase) : first(0), count(0) {
        for (int tap = 0; tap < A::STEP && tap < KERNEL; ++tap) {
            if (A::phase_of(tap) == phase) {
                first = tap;
                count = (KERNEL - tap + A::STEP - 1) / A::STEP;
            }
        }
    }

    __device__ __forceinline__ int tap(int j) const { return first + j * A::STEP; }
};

// ---- launch parameters ---------------------------------------------------------------------------------------------

// Strides count elements and follow the axes of each array as the caller has it, in 3-D form.
struct Problem {
    long long n, groups, c_in, c_out;  // channels per group
    long long x_extent[3], out_extent[3], pad[3];
    long long x_stride[5];       // N, C_in, D, H, W
    long long weight_stride[5];  // C_in, C_out / groups, kD, kH, kW
    long long weight_group_stride;
    long long weight_first;  // where the first channels and tap of the first group are, from the address that is passed
    long long bias_stride;
    long long out_stride[5];  // N, C_out, D, H, W
    long long tiles[4];    // along D, H, W (in positions q of a phase) and along the channels of a group
    long long x_vector;    // whether x may be read 16 bytes at a time (8 bytes for rows of 16-bit elements), or how many bytes
    long long out_vector;  // whether the result may be written some channels (channels-last) or one word at a time, or in what way
                           // (of boxes of phases on wgmma, which come first, and who packs the weights)
    long long magic[5];    // for dividing by the four tiles and by the groups, see `take`
    // Where a block's box of positions is a run-time matter:
    long long box[3];        // its extents along D, H, W
    long long plane;         // positions that are staged, and what is read beyond them
    long long patches[2];    // 8 x 8 patches of the box along H and W, or zeros: 64 positions in a row
                             // (of narrow groups, whether the weights are as the call has them; of weight_gradient_tma.cu, whether
                             // sums of other images are there already; of rows that copies bring, see `is_flat`)
    long long blocks;        // boxes in all, for blocks that take one after the other
    long long box_magic[4];  // for dividing by what such a kernel has to
    long long planes[2];     // of a result of which only some are reached by taps: all along D, and the first such one
    long long shares[9];     // of blocks that slide along D: see `part_of` in phase_wgmma.cu
    long long together;      // results of a row that a thread stores together, where they are turned (see wgmma_store.cuh)
};

// Whether the rows of a plane of x are one row of a copy, where copies bring rows.
__device__ __forceinline__ bool is_flat(const Problem& p) { return p.patches[0] != 0; }

// n / d for all n < 2^31. The host gives d as m + 2^32 s with m = ceil(2^(31 + s) / d): n / d = n m / 2^(31 + s).
__device__ __forceinline__ unsigned quotient(unsigned n, long long magic) {
    return (unsigned)((unsigned long long)n * (unsigned)magic >> (31 + (unsigned)(magic >> 32)));
}

// Splits off a block's index the part that counts tiles[axis] (axis 4: groups), which runs faster than the rest.
__device__ __forceinline__ unsigned take(unsigned& index, const Problem& p, int axis) {
    const unsigned rest = quotient(index, p.magic[axis]);
    const unsigned part = index - rest * (unsigned)(axis == 4 ? p.groups : p.tiles[axis]);
    index = rest;
    return part;
}
