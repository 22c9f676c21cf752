// What tensor cores multiply: the precision, rounding of float32 numbers to TF32, and their splitting into two of them.
#pragma once

#include "common.cuh"

// What a kernel multiplies, its PRECISION:
#define NATIVE 0  // 16-bit operands as they are
#define TF32 1    // rounded to TF32
#define TF32X3 3  // three products of TF32 parts: as accurate as float32
#ifndef PRECISION
#define PRECISION (DTYPE == FLOAT32 ? TF32X3 : NATIVE)
#endif

constexpr int PARTS = PRECISION == TF32X3 ? 2 : 1;  // of an operand: high and low

// The low 13 bits of what a tensor core reads are dropped. Adding half of what the last kept bit counts, which the power of
// two below the value tells, rounds to the nearest TF32 number; Inf and NaN stay.
__device__ __forceinline__ unsigned to_tf32(float value) {
    const float power = __uint_as_float(__float_as_uint(value) & 0xff800000u);
    return __float_as_uint(fmaf(power, 0.00048828125f, value));
}

// Multiplying by 1 + 2^-12 adds between a quarter and a half of that: one operation, and good enough for a low part.
__device__ __forceinline__ float half_ulp_up(float value) { return value * 1.000244140625f; }

// value = high + low, both TF32. A value that is not finite (or becomes so by rounding) is left to `low` alone, since in
// the cross products of `high` it would meet zeros.
__device__ __forceinline__ void split(float value, unsigned& high, unsigned& low) {
    const float rounded = __uint_as_float(to_tf32(value) & 0xffffe000u);
    const float kept = fabsf(rounded) < __uint_as_float(0x7f800000u) ? rounded : 0.0f;
    high = __float_as_uint(kept);
    low = __float_as_uint(half_ulp_up(value - kept));
}
