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

// ---- tensor cores (sm_80 and newer) ----------------------------------------------------------------------------------
// D += A * B on one warp. With g = lane / 4 and t = lane % 4, a[0..3] are rows g, g + 8, g, g + 8 of A at words t, t, t + 4,
// t + 4; b[0..1] are words t, t + 4 of B's column g; d[0..3] are rows g, g, g + 8, g + 8 at columns 2t, 2t + 1, 2t, 2t + 1.
// A word is one TF32 number (its low 13 bits are ignored) or two 16-bit numbers that follow each other along K.

__device__ __forceinline__ void mma_m16n8k8_tf32(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

__device__ __forceinline__ void mma_m16n8k16_f16(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

__device__ __forceinline__ void mma_m16n8k16_bf16(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
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

__device__ __forceinline__ void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int PENDING> __device__ __forceinline__ void copy_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}
