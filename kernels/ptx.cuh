// All inline PTX of the library, behind small named functions. A host build replaces this one header.
#pragma once

// Bits of an IEEE binary16 number <-> float; the narrowing conversion rounds to nearest even.
__device__ __forceinline__ float half_bits_to_float(unsigned short bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

__device__ __forceinline__ unsigned short float_to_half_bits(float value) {
    unsigned short bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

// Two values at once: the first in the low half of the word. sm_80 and newer have an instruction for it.
__device__ __forceinline__ unsigned floats_to_half_bits(float low, float high) {
#if __CUDA_ARCH__ >= 800
    unsigned bits;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
    return bits;
#else
    return float_to_half_bits(low) | (unsigned)float_to_half_bits(high) << 16;
#endif
}

// Needs sm_80.
__device__ __forceinline__ unsigned floats_to_bfloat16_bits(float low, float high) {
    unsigned bits;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
    return bits;
}

// ---- tensor cores (sm_80 and newer) ----------------------------------------------------------------------------------
// D = A * B + C on one warp. With g = lane / 4 and t = lane % 4, a[0..3] are rows g, g + 8, g, g + 8 of A at words t, t, t + 4,
// t + 4; b[0..1] are words t, t + 4 of B's column g; c and d are rows g, g, g + 8, g + 8 at columns 2t, 2t + 1, 2t, 2t + 1.
// A word is one TF32 number (its low 13 bits are ignored) or two 16-bit numbers that follow each other along K.

__device__ __forceinline__ void mma_m16n8k8_tf32(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2],
                                                const float (&c)[4]) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%10,%11,%12,%13};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(c[0]), "f"(c[1]), "f"(c[2]),
          "f"(c[3]));
}

__device__ __forceinline__ void mma_m16n8k16_f16(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2],
                                                const float (&c)[4]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%10,%11,%12,%13};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(c[0]), "f"(c[1]), "f"(c[2]),
          "f"(c[3]));
}

__device__ __forceinline__ void mma_m16n8k16_bf16(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2],
                                                const float (&c)[4]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%10,%11,%12,%13};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(c[0]), "f"(c[1]), "f"(c[2]),
          "f"(c[3]));
}

// ---- asynchronous copies to shared memory (sm_80 and newer) ----------------------------------------------------------
// The first `bytes` bytes are copied and the rest of the 4 or 16 is filled with zeros; with bytes = 0 nothing is read.

__device__ __forceinline__ void copy_async_4(void* shared, const void* global, int bytes) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;"
                 :: "r"((unsigned)__cvta_generic_to_shared(shared)), "l"(global), "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void copy_async_16(void* shared, const void* global, int bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :: "r"((unsigned)__cvta_generic_to_shared(shared)), "l"(global), "r"(bytes)
                 : "memory");
}

// The same for 16 bytes that other blocks on the multiprocessor will read too: they go through its L1 cache.
__device__ __forceinline__ void copy_async_16_shared_by_blocks(void* shared, const void* global) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 16;"
                 :: "r"((unsigned)__cvta_generic_to_shared(shared)), "l"(global)
                 : "memory");
}

__device__ __forceinline__ void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int PENDING> __device__ __forceinline__ void copy_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}
