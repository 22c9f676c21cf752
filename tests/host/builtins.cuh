// CUDA's built-ins for a host compiler, as far as kernels use them. Included before the kernel's source.
#pragma once

#include <stdio.h>
#include <string.h>

#include "runtime.h"

// Not <math.h>, which takes the compiler longer than a kernel does.
extern "C" float fabsf(float) noexcept, fmaf(float, float, float) noexcept;

#define __CUDA_ARCH__ 900  // of what ptx.cuh offers here
#define __global__ inline  // so that, of a file's kernels, only the one that runs is compiled
#define __device__
#define __host__
#define __constant__
#define __grid_constant__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))
// One process runs one block at a time, in one thread. Unlike `static`, this also goes with `extern`, and its memory is one
// segment, which can be filled between blocks. Dynamic shared memory is the array `shared_bytes`, whose accesses are tracked.
#define __shared__ thread_local

struct uint3 {
    unsigned x, y, z;
};
typedef uint3 dim3;
extern uint3 threadIdx, blockIdx, blockDim, gridDim;
constexpr int warpSize = 32;

#define HOST_VECTORS(T, name)                                                      \
    struct __align__(2 * sizeof(T)) name##2 { T x, y; };                            \
    struct __align__(sizeof(T) == 8 ? 16 : 4 * sizeof(T)) name##4 { T x, y, z, w; }; \
    inline name##2 make_##name##2(T x, T y) { return {x, y}; }                      \
    inline name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
HOST_VECTORS(int, int)
HOST_VECTORS(unsigned, uint)
HOST_VECTORS(float, float)
HOST_VECTORS(double, double)
#undef HOST_VECTORS

template <class T> T min(T a, T b) { return b < a ? b : a; }
template <class T> T max(T a, T b) { return a < b ? b : a; }
template <class T> T __ldg(const T* address) { return *address; }

template <class To, class From> To host_bits(From from) {
    static_assert(sizeof(To) == sizeof(From), "same size");
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}
inline unsigned __float_as_uint(float value) { return host_bits<unsigned>(value); }
inline int __float_as_int(float value) { return host_bits<int>(value); }
inline float __uint_as_float(unsigned bits) { return host_bits<float>(bits); }
inline float __int_as_float(int bits) { return host_bits<float>(bits); }
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline int __ffs(int bits) { return __builtin_ffs(bits); }
// The low word of both, shifted right by up to 31 bits.
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
    return (unsigned)((high * 0x100000000ull + low) >> (shift & 31));
}

// ---- the block -----------------------------------------------------------------------------------------------------

inline void __syncthreads() { host::barrier(); }

inline int __syncthreads_count(int predicate) {
    static unsigned count;  // of all threads
    host::barrier();
    count = 0;
    host::barrier();
    count += predicate != 0;
    host::barrier();
    return (int)count;
}
inline int __syncthreads_or(int predicate) { return __syncthreads_count(predicate) != 0; }
inline int __syncthreads_and(int predicate) { return __syncthreads_count(!predicate) == 0; }

// ---- the warp ------------------------------------------------------------------------------------------------------

inline void __syncwarp(unsigned mask = 0xffffffffu) {
    host::together(mask, nullptr, [](void* const*, unsigned) {});
}

template <class T> struct HostShuffle {
    T value;
    int source;
    T result;
};

template <class T> T host_shuffle(unsigned mask, T value, int source) {
    HostShuffle<T> mine = {value, source, value};
    host::together(mask, &mine, [](void* const* lanes, unsigned mask) {
        for (int lane = 0; lane < 32; ++lane) {
            if (!(mask >> lane & 1)) continue;
            auto* to = (HostShuffle<T>*)lanes[lane];
            if (!(mask >> to->source & 1)) host::fail("a shuffle reads lane %d, which does not take part", to->source);
            to->result = ((HostShuffle<T>*)lanes[to->source])->value;
        }
    });
    return mine.result;
}

inline int host_lane() { return (int)(host::current % 32); }

// A lane whose source lies outside its segment of `width` lanes keeps its value.
template <class T> T __shfl_sync(unsigned mask, T value, int source, int width = 32) {
    return host_shuffle(mask, value, (host_lane() & -width) + (source & (width - 1)));
}
template <class T> T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32) {
    const int lane = host_lane(), source = lane - (int)delta;
    return host_shuffle(mask, value, source < (lane & -width) ? lane : source);
}
template <class T> T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32) {
    const int lane = host_lane(), source = lane + (int)delta;
    return host_shuffle(mask, value, source > (lane | (width - 1)) ? lane : source);
}
template <class T> T __shfl_xor_sync(unsigned mask, T value, int flip, int width = 32) {
    const int lane = host_lane(), source = lane ^ flip;
    return host_shuffle(mask, value, source > (lane | (width - 1)) ? lane : source);
}

inline unsigned __ballot_sync(unsigned mask, int predicate) {
    unsigned mine = predicate != 0;
    host::together(mask, &mine, [](void* const* lanes, unsigned mask) {
        unsigned votes = 0;
        for (int lane = 0; lane < 32; ++lane)
            if (mask >> lane & 1) votes |= *(unsigned*)lanes[lane] << lane;
        for (int lane = 0; lane < 32; ++lane)
            if (mask >> lane & 1) *(unsigned*)lanes[lane] = votes;
    });
    return mine;
}
inline int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
inline int __all_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) == mask; }
