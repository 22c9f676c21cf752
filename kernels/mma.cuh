// The instruction of `mma.sync` for a kernel's dtype: 16 rows and 8 columns, of 32 bytes each.
#pragma once

#include "tf32.cuh"

constexpr int CHANNELS_A_WORD = 4 / (int)sizeof(Stored);

__device__ __forceinline__ void mma(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2], const float (&c)[4]) {
#if DTYPE == FLOAT16
    mma_m16n8k16_f16(d, a, b, c);
#elif DTYPE == BFLOAT16
    mma_m16n8k16_bf16(d, a, b, c);
#else
    mma_m16n8k8_tf32(d, a, b, c);
#endif
}

// Adds to what is there.
__device__ __forceinline__ void mma(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) { mma(d, a, b, d); }

// A word as the instruction takes it: as it is, rounded or, of 3xTF32, in two parts.
__device__ __forceinline__ void to_operand(unsigned word, unsigned& high, unsigned& low) {
    if (PRECISION == TF32X3) {
        split(__uint_as_float(word), high, low);
    } else {
        high = PRECISION == TF32 ? to_tf32(__uint_as_float(word)) : word;
    }
}

