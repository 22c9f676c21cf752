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

// Ends the thread, of a warp that ends as a whole. Unlike a `return` it costs those that go on no registers.
__device__ __forceinline__ void end_thread() { asm volatile("exit;"); }

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

// For half as many 16-bit numbers along K, a and b have half as many words.
__device__ __forceinline__ void mma_m16n8k8_f16(float (&d)[4], const unsigned (&a)[2], const unsigned (&b)[1],
                                               const float (&c)[4]) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%7,%8,%9,%10};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(b[0]), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
}

__device__ __forceinline__ void mma_m16n8k8_bf16(float (&d)[4], const unsigned (&a)[2], const unsigned (&b)[1],
                                                const float (&c)[4]) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%7,%8,%9,%10};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(b[0]), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
}

// Matrices of 8 rows of 16 bytes from shared memory: lane 8 i + row gives where that row of matrix i starts, and receives
// word lane % 4 of row lane / 4 of each matrix.
__device__ __forceinline__ void load_matrix_x4(unsigned (&r)[4], const void* shared_row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"((unsigned)__cvta_generic_to_shared(shared_row))
                 : "memory");
}

__device__ __forceinline__ void load_matrix_x2(unsigned (&r)[2], const void* shared_row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];"
                 : "=r"(r[0]), "=r"(r[1])
                 : "r"((unsigned)__cvta_generic_to_shared(shared_row))
                 : "memory");
}

// The same of 16-bit numbers, and each lane receives two neighbours of column lane / 4 of each matrix.
__device__ __forceinline__ void load_matrix_x4_transposed(unsigned (&r)[4], const void* shared_row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"((unsigned)__cvta_generic_to_shared(shared_row))
                 : "memory");
}

// The other way round: each lane gives two neighbours of column lane / 4 of each matrix, whose rows begin where lanes say.
__device__ __forceinline__ void store_matrices_transposed(void* shared_row, const unsigned (&r)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(
                     (unsigned)__cvta_generic_to_shared(shared_row)),
                 "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
}

__device__ __forceinline__ void store_matrices_transposed(void* shared_row, const unsigned (&r)[2]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1,%2};" ::"r"(
                     (unsigned)__cvta_generic_to_shared(shared_row)),
                 "r"(r[0]), "r"(r[1])
                 : "memory");
}

// Where a thread reads words of shared memory, in a register of its own: of a pointer, the compiler works out again and again
// what it starts from.
struct SharedWords {
    unsigned address;
};
__device__ __forceinline__ SharedWords words_at(const void* shared) {
    unsigned address = (unsigned)__cvta_generic_to_shared(shared);
    asm volatile("" : "+r"(address));
    return {address};
}
__device__ __forceinline__ SharedWords operator+(SharedWords from, int bytes) { return {from.address + bytes}; }

// Words that follow each other, aligned to their size, from so many words further on.
template <int FURTHER> __device__ __forceinline__ void load_words(unsigned (&word)[1], SharedWords from) {
    asm volatile("ld.shared.b32 %0, [%1+%2];" : "=r"(word[0]) : "r"(from.address), "n"(4 * FURTHER));
}
template <int FURTHER> __device__ __forceinline__ void load_words(unsigned (&word)[2], SharedWords from) {
    asm volatile("ld.shared.v2.b32 {%0,%1}, [%2+%3];"
                 : "=r"(word[0]), "=r"(word[1])
                 : "r"(from.address), "n"(4 * FURTHER));
}
template <int FURTHER> __device__ __forceinline__ void load_words(unsigned (&word)[4], SharedWords from) {
    asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4+%5];"
                 : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3])
                 : "r"(from.address), "n"(4 * FURTHER));
}

// ---- bytes -----------------------------------------------------------------------------------------------------------
// Four bytes of two words: the lowest four bits of the selection number the lowest one, from 0 in `low` to 7 in `high`.
__device__ __forceinline__ unsigned select_bytes(unsigned low, unsigned high, unsigned selection) {
    unsigned bytes;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(low), "r"(high), "r"(selection));
    return bytes;
}

// ---- stores ----------------------------------------------------------------------------------------------------------
// Words that follow each other in global memory, aligned to their size, by one instruction: the compiler may take an assignment
// of a struct apart, which then costs as much as several.

__device__ __forceinline__ void store_words(void* to, const unsigned (&word)[1]) { *(unsigned*)to = word[0]; }
__device__ __forceinline__ void store_words(void* to, const unsigned (&word)[2]) {
    asm volatile("st.global.v2.b32 [%0], {%1,%2};" ::"l"(__cvta_generic_to_global(to)), "r"(word[0]), "r"(word[1]));
}
__device__ __forceinline__ void store_words(void* to, const unsigned (&word)[4]) {
    asm volatile("st.global.v4.b32 [%0], {%1,%2,%3,%4};" ::"l"(__cvta_generic_to_global(to)), "r"(word[0]), "r"(word[1]),
                 "r"(word[2]), "r"(word[3]));
}

// ---- asynchronous copies to shared memory (sm_80 and newer) ----------------------------------------------------------
// The first `bytes` bytes are copied and the rest of the 4, 8 or 16 is filled with zeros; with bytes = 0 nothing is read.

__device__ __forceinline__ void copy_async_4(void* shared, const void* global, int bytes) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;"
                 :: "r"((unsigned)__cvta_generic_to_shared(shared)), "l"(global), "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void copy_async_8(void* shared, const void* global, int bytes) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;"
                 :: "r"((unsigned)__cvta_generic_to_shared(shared)), "l"(global), "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void copy_async_16(void* shared, const void* global, int bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :: "r"((unsigned)__cvta_generic_to_shared(shared)), "l"(global), "r"(bytes)
                 : "memory");
}

// All 16 bytes, or zeros.
__device__ __forceinline__ void copy_async_16_or_zeros(void* shared, const void* global, bool copies) {
    asm volatile("{\n.reg .pred p;\nsetp.eq.s32 p, %2, 0;\ncp.async.cg.shared.global [%0], [%1], 16, p;\n}"
                 :: "r"((unsigned)__cvta_generic_to_shared(shared)), "l"(global), "r"((int)copies)
                 : "memory");
}

// 16 bytes that other blocks on the multiprocessor will read too: they go through its L1 cache.
__device__ __forceinline__ void copy_async_16_shared_by_blocks(void* shared, const void* global) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 16;"
                 :: "r"((unsigned)__cvta_generic_to_shared(shared)), "l"(global)
                 : "memory");
}

__device__ __forceinline__ void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int PENDING> __device__ __forceinline__ void copy_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// ---- Hopper's tensor cores (sm_90a) ----------------------------------------------------------------------------------
// A warpgroup multiplies 64 rows of A by the columns of B, both in shared memory, into accumulators in registers. With
// w = warp % 4, g = lane / 4 and t = lane % 4, d[4 j + i] is row 16 w + g + i / 2 * 8 and column 8 j + 2 t + i % 2.
// A wgmma takes two 16-byte pieces of K: eight TF32 or sixteen 16-bit numbers.

// Describes rows of 16-byte pieces in shared memory: eight rows (of A, or columns of B) follow each other, the next eight
// are `group_bytes` further, and the second piece of every row is `piece_bytes` after its first.
struct Operand {
    unsigned low, high;  // of its descriptor; in units of 16 bytes, the address and from bit 16 on the pieces, and the groups
};
__device__ __forceinline__ Operand describe(const void* shared, unsigned piece_bytes, unsigned group_bytes) {
    const unsigned address = (unsigned)__cvta_generic_to_shared(shared);
    return {address >> 4 | piece_bytes >> 4 << 16, group_bytes >> 4};
}
// The same so many times 16 bytes further. A half of a descriptor takes one addition, the whole one would take several.
__device__ __forceinline__ Operand operator+(Operand operand, int pieces) { return {operand.low + pieces, operand.high}; }

// The same of rows of 128 bytes, each one place along K: 64 rows of A, or columns of B, in 16-byte pieces, of which the one that
// is stored as number i is i ^ row % 8, with rows counted from a multiple of 1024 bytes. Eight places along K follow each other,
// the next eight are `run_bytes` further, and the next 64 of A or B `group_bytes`. It may start at any row.
__device__ __forceinline__ Operand describe_swizzled(const void* shared, unsigned run_bytes, unsigned group_bytes) {
    const unsigned address = (unsigned)__cvta_generic_to_shared(shared);
    return {address >> 4 | group_bytes >> 4 << 16, run_bytes >> 4 | 1u << 30};
}

// Of rows of 32, 64 or 128 bytes, each one row of A or column of B and so many places along K, in the swizzle of that width: of
// 128 bytes as above, of 64 the piece is i ^ row / 2 % 4, of 32 i ^ row / 4 % 2. Eight rows follow each other, the next eight begin
// `eight` rows further. It may start at any row, and at any 32 bytes of it.
template <int ROW_BYTES> __device__ __forceinline__ Operand describe_rows(const void* shared, int eight) {
    static_assert(ROW_BYTES == 32 || ROW_BYTES == 64 || ROW_BYTES == 128, "a swizzle");
    const unsigned address = (unsigned)__cvta_generic_to_shared(shared), swizzle = ROW_BYTES == 128 ? 1 : ROW_BYTES == 64 ? 2 : 3;
    return {address >> 4 | 1u << 16, (unsigned)(eight * ROW_BYTES) >> 4 | swizzle << 30};
}

// A value that all lanes of a warp have, in a register of the warp. Descriptors have to be in such registers: what is added to
// one that is so takes an instruction, while any other has to be moved there, half by half.
__device__ __forceinline__ unsigned of_warp(unsigned value) {
    asm volatile("redux.sync.min.u32 %0, %0, 0xffffffff;" : "+r"(value));
    return value;
}
__device__ __forceinline__ Operand of_warp(Operand operand) { return {of_warp(operand.low), operand.high}; }

// Before the first wgmma, and whenever registers that one uses were written by other instructions.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING> __device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

#define D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define D_8 D4(0)
#define D_16 D_8, D4(4)
#define D_24 D_16, D4(8)
#define D_32 D_24, D4(12)
#define D_40 D_32, D4(16)
#define D_48 D_40, D4(20)
#define D_56 D_48, D4(24)
#define D_64 D_56, D4(28)
#define D_72 D_64, D4(32)
#define D_80 D_72, D4(36)
#define D_88 D_80, D4(40)
#define D_96 D_88, D4(44)
#define D_104 D_96, D4(48)
#define D_112 D_104, D4(52)
#define D_120 D_112, D4(56)
#define D_128 D_120, D4(60)
#define D_136 D_128, D4(64)
#define D_144 D_136, D4(68)
#define D_152 D_144, D4(72)
#define D_160 D_152, D4(76)
#define D_168 D_160, D4(80)
#define D_176 D_168, D4(84)
#define D_184 D_176, D4(88)
#define D_192 D_184, D4(92)
#define LIST_8 "%0, %1, %2, %3"
#define LIST_16 LIST_8 ", %4, %5, %6, %7"
#define LIST_24 LIST_16 ", %8, %9, %10, %11"
#define LIST_32 LIST_24 ", %12, %13, %14, %15"
#define LIST_40 LIST_32 ", %16, %17, %18, %19"
#define LIST_48 LIST_40 ", %20, %21, %22, %23"
#define LIST_56 LIST_48 ", %24, %25, %26, %27"
#define LIST_64 LIST_56 ", %28, %29, %30, %31"
#define LIST_72 LIST_64 ", %32, %33, %34, %35"
#define LIST_80 LIST_72 ", %36, %37, %38, %39"
#define LIST_88 LIST_80 ", %40, %41, %42, %43"
#define LIST_96 LIST_88 ", %44, %45, %46, %47"
#define LIST_104 LIST_96 ", %48, %49, %50, %51"
#define LIST_112 LIST_104 ", %52, %53, %54, %55"
#define LIST_120 LIST_112 ", %56, %57, %58, %59"
#define LIST_128 LIST_120 ", %60, %61, %62, %63"
#define LIST_136 LIST_128 ", %64, %65, %66, %67"
#define LIST_144 LIST_136 ", %68, %69, %70, %71"
#define LIST_152 LIST_144 ", %72, %73, %74, %75"
#define LIST_160 LIST_152 ", %76, %77, %78, %79"
#define LIST_168 LIST_160 ", %80, %81, %82, %83"
#define LIST_176 LIST_168 ", %84, %85, %86, %87"
#define LIST_184 LIST_176 ", %88, %89, %90, %91"
#define LIST_192 LIST_184 ", %92, %93, %94, %95"
#define WGMMA(N, A, A_HIGH, B, B_HIGH, ACCUMULATE, TYPES, LAYOUTS)                                                         \
    if constexpr (COLUMNS == N)                                                                                            \
    asm volatile("{\n.reg .pred p;\n.reg .b64 a, b;\nmov.b64 a, {%" #A ", %" #A_HIGH "};\nmov.b64 b, {%" #B ", %" #B_HIGH    \
                 "};\nsetp.ne.b32 p, %" #ACCUMULATE ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N TYPES                     \
                 " {" LIST_##N "}, a, b, p, 1, 1" LAYOUTS ";\n}"                                                          \
                 : D_##N                                                                                                   \
                 : "r"(a.low), "r"(a.high), "r"(b.low), "r"(b.high), "r"((int)accumulate))
#define WGMMA_OF_ALL_WIDTHS(TYPES, LAYOUTS) \
    WGMMA(8, 4, 5, 6, 7, 8, TYPES, LAYOUTS); \
    WGMMA(16, 8, 9, 10, 11, 12, TYPES, LAYOUTS); \
    WGMMA(24, 12, 13, 14, 15, 16, TYPES, LAYOUTS); \
    WGMMA(32, 16, 17, 18, 19, 20, TYPES, LAYOUTS); \
    WGMMA(40, 20, 21, 22, 23, 24, TYPES, LAYOUTS); \
    WGMMA(48, 24, 25, 26, 27, 28, TYPES, LAYOUTS); \
    WGMMA(56, 28, 29, 30, 31, 32, TYPES, LAYOUTS); \
    WGMMA(64, 32, 33, 34, 35, 36, TYPES, LAYOUTS); \
    WGMMA(72, 36, 37, 38, 39, 40, TYPES, LAYOUTS); \
    WGMMA(80, 40, 41, 42, 43, 44, TYPES, LAYOUTS); \
    WGMMA(88, 44, 45, 46, 47, 48, TYPES, LAYOUTS); \
    WGMMA(96, 48, 49, 50, 51, 52, TYPES, LAYOUTS); \
    WGMMA(104, 52, 53, 54, 55, 56, TYPES, LAYOUTS); \
    WGMMA(112, 56, 57, 58, 59, 60, TYPES, LAYOUTS); \
    WGMMA(120, 60, 61, 62, 63, 64, TYPES, LAYOUTS); \
    WGMMA(128, 64, 65, 66, 67, 68, TYPES, LAYOUTS); \
    WGMMA(136, 68, 69, 70, 71, 72, TYPES, LAYOUTS); \
    WGMMA(144, 72, 73, 74, 75, 76, TYPES, LAYOUTS); \
    WGMMA(152, 76, 77, 78, 79, 80, TYPES, LAYOUTS); \
    WGMMA(160, 80, 81, 82, 83, 84, TYPES, LAYOUTS); \
    WGMMA(168, 84, 85, 86, 87, 88, TYPES, LAYOUTS); \
    WGMMA(176, 88, 89, 90, 91, 92, TYPES, LAYOUTS); \
    WGMMA(184, 92, 93, 94, 95, 96, TYPES, LAYOUTS); \
    WGMMA(192, 96, 97, 98, 99, 100, TYPES, LAYOUTS);

// D = A * B, plus D where `accumulate`. The result is there after the wait for the group it is committed to.
template <int COLUMNS>
__device__ __forceinline__ void wgmma_tf32(float (&d)[COLUMNS / 2], Operand a, Operand b, bool accumulate) {
    static_assert(COLUMNS % 8 == 0 && COLUMNS <= 192, "a width without an instruction here");
    WGMMA_OF_ALL_WIDTHS("k8.f32.tf32.tf32", "")
}
template <int COLUMNS>
__device__ __forceinline__ void wgmma_f16(float (&d)[COLUMNS / 2], Operand a, Operand b, bool accumulate) {
    static_assert(COLUMNS % 8 == 0 && COLUMNS <= 192, "a width without an instruction here");
    WGMMA_OF_ALL_WIDTHS("k16.f32.f16.f16", ", 0, 0")
}
template <int COLUMNS>
__device__ __forceinline__ void wgmma_bf16(float (&d)[COLUMNS / 2], Operand a, Operand b, bool accumulate) {
    static_assert(COLUMNS % 8 == 0 && COLUMNS <= 192, "a width without an instruction here");
    WGMMA_OF_ALL_WIDTHS("k16.f32.bf16.bf16", ", 0, 0")
}

// The same of operands whose 16-byte pieces hold eight rows (of A, or columns of B) at one place along K: eight places follow
// each other, the eight places after these are `piece_bytes` further, and the next eight rows are `group_bytes` further.
template <int COLUMNS>
__device__ __forceinline__ void wgmma_f16_transposed(float (&d)[COLUMNS / 2], Operand a, Operand b, bool accumulate) {
    static_assert(COLUMNS % 8 == 0 && COLUMNS <= 192, "a width without an instruction here");
    WGMMA_OF_ALL_WIDTHS("k16.f32.f16.f16", ", 1, 1")
}
template <int COLUMNS>
__device__ __forceinline__ void wgmma_bf16_transposed(float (&d)[COLUMNS / 2], Operand a, Operand b, bool accumulate) {
    static_assert(COLUMNS % 8 == 0 && COLUMNS <= 192, "a width without an instruction here");
    WGMMA_OF_ALL_WIDTHS("k16.f32.bf16.bf16", ", 1, 1")
}

// Keeps the compiler from moving memory accesses across: what comes before is issued before what comes after.
__device__ __forceinline__ void issue_in_order() { asm volatile("" ::: "memory"); }

// An address in global memory, worked out once: the compiler would do it again in every branch that stores to it.
template <class T> __device__ __forceinline__ T* worked_out(T* address) {
    size_t global = __cvta_generic_to_global(address);
    asm volatile("" : "+l"(global));
    return (T*)__cvta_global_to_generic(global);
}

// The value, in a register of its own: what the compiler knows to be a copy, it may copy again on every way that leads on.
__device__ __forceinline__ float on_its_own(float value) {
    asm volatile("" : "+f"(value));
    return value;
}

// The value. What follows from it is worked out where it is used, not kept in registers from before a loop.
__device__ __forceinline__ int recomputed(int value) {
    asm volatile("" : "+r"(value));
    return value;
}

// ---- kernels that follow each other (sm_90; elsewhere the later one starts when the other has ended) ---------------------

// All blocks have to come here, or end, before the next kernel starts, if it is one that is launched early.
__device__ __forceinline__ void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Before the first read of what the kernel before has written, in a kernel that is launched early.
__device__ __forceinline__ void wait_for_kernel_before() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// ---- barriers and bulk copies (sm_90) --------------------------------------------------------------------------------
// A barrier in shared memory completes a phase when `count` arrivals and all announced bytes are in; phases alternate
// between parity 0 and 1, beginning with 0.
typedef unsigned long long Barrier;

__device__ __forceinline__ unsigned shared_address(const void* shared) {
    return (unsigned)__cvta_generic_to_shared(shared);
}

__device__ __forceinline__ void barrier_init(Barrier* barrier, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(count) : "memory");
}

// After all barrier_init of a thread and before the block's barrier that lets others use them.
__device__ __forceinline__ void barrier_init_done() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void barrier_arrive(Barrier* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// Arrives, and announces bytes that bulk copies will bring.
__device__ __forceinline__ void barrier_arrive_expecting(Barrier* barrier, unsigned bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
                 : "memory");
}

// Waits until the phase of the given parity is complete.
__device__ __forceinline__ void barrier_wait(Barrier* barrier, unsigned parity) {
    asm volatile("{\n.reg .pred done;\n"
                 "again:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                 "@!done bra again;\n}" ::"r"(shared_address(barrier)),
                 "r"(parity)
                 : "memory");
}

// Copies 16-byte aligned bytes, a multiple of 16; they arrive at the barrier.
__device__ __forceinline__ void copy_bulk(void* shared, const void* global, unsigned bytes, Barrier* barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(shared)),
                 "l"(global), "r"(bytes), "r"(shared_address(barrier))
                 : "memory");
}

// What the copies of boxes of an array know of it. The host makes it; a kernel takes it as a `const __grid_constant__` parameter.
struct alignas(64) TensorMap {
    unsigned long long words[16];
};

// Copies a box whose first element is at these coordinates, which may be outside the array: what is there becomes zeros. All bytes
// of the box arrive at the barrier. Pieces of 16 bytes are stored as describe_swizzled says.
__device__ __forceinline__ void copy_box(void* shared, const TensorMap* map, int c, int w, int h, int d, int n, Barrier* barrier) {
    asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2,%3,%4,%5,%6}], [%7];" ::"r"(
                     shared_address(shared)),
                 "l"(map), "r"(c), "r"(w), "r"(h), "r"(d), "r"(n), "r"(shared_address(barrier))
                 : "memory");
}

// The other way: 16-byte aligned bytes, a multiple of 16, of a thread's group. They may be written over once they are read, and
// the block may end once they are written.
__device__ __forceinline__ void store_bulk(void* global, const void* shared, unsigned bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(__cvta_generic_to_global(global)),
                 "r"(shared_address(shared)), "r"(bytes)
                 : "memory");
}
__device__ __forceinline__ void store_bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
__device__ __forceinline__ void store_bulk_wait_until_read() {
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
__device__ __forceinline__ void store_bulk_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// Between ordinary writes to shared memory and the barrier after which wgmma or a bulk copy uses it.
__device__ __forceinline__ void publish_shared_writes() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// A barrier of some of a block's warps; 0 is __syncthreads.
__device__ __forceinline__ void warps_sync(int barrier, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Moves registers between warpgroups: each thread of the caller's warpgroup has COUNT from here on.
template <int COUNT> __device__ __forceinline__ void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT> __device__ __forceinline__ void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}

// ---- products with A in registers (sm_90a) ---------------------------------------------------------------------------
// a[0..3] are as in mma_m16n8k8_tf32 and mma_m16n8k16, warp w of the warpgroup with rows 16 w and on. Nobody may write to them
// before the wait for the product.

#define WGMMA_OF_REGISTERS(N, A0, A1, A2, A3, B, B_HIGH, ACCUMULATE, TYPES, LAYOUT)                                                   \
    if constexpr (COLUMNS == N)                                                                                            \
    asm volatile("{\n.reg .pred p;\n.reg .b64 b;\nmov.b64 b, {%" #B ", %" #B_HIGH "};\nsetp.ne.b32 p, %" #ACCUMULATE      \
                 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N TYPES                                                       \
                 " {" LIST_##N "}, {%" #A0 ", %" #A1 ", %" #A2 ", %" #A3 "}, b, p, 1, 1" LAYOUT ";\n}"                    \
                 : D_##N                                                                                                   \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.low), "r"(b.high), "r"((int)accumulate))
#define WGMMA_OF_REGISTERS_OF_ALL_WIDTHS(TYPES, LAYOUT) \
    WGMMA_OF_REGISTERS(8, 4, 5, 6, 7, 8, 9, 10, TYPES, LAYOUT); \
    WGMMA_OF_REGISTERS(16, 8, 9, 10, 11, 12, 13, 14, TYPES, LAYOUT); \
    WGMMA_OF_REGISTERS(24, 12, 13, 14, 15, 16, 17, 18, TYPES, LAYOUT); \
    WGMMA_OF_REGISTERS(32, 16, 17, 18, 19, 20, 21, 22, TYPES, LAYOUT); \
    WGMMA_OF_REGISTERS(40, 20, 21, 22, 23, 24, 25, 26, TYPES, LAYOUT); \
    WGMMA_OF_REGISTERS(48, 24, 25, 26, 27, 28, 29, 30, TYPES, LAYOUT); \
    WGMMA_OF_REGISTERS(56, 28, 29, 30, 31, 32, 33, 34, TYPES, LAYOUT); \
    WGMMA_OF_REGISTERS(64, 32, 33, 34, 35, 36, 37, 38, TYPES, LAYOUT); \
    WGMMA_OF_REGISTERS(72, 36, 37, 38, 39, 40, 41, 42, TYPES, LAYOUT); \
    WGMMA_OF_REGISTERS(80, 40, 41, 42, 43, 44, 45, 46, TYPES, LAYOUT); \
    WGMMA_OF_REGISTERS(88, 44, 45, 46, 47, 48, 49, 50, TYPES, LAYOUT); \
    WGMMA_OF_REGISTERS(96, 48, 49, 50, 51, 52, 53, 54, TYPES, LAYOUT); \
    WGMMA_OF_REGISTERS(104, 52, 53, 54, 55, 56, 57, 58, TYPES, LAYOUT); \
    WGMMA_OF_REGISTERS(112, 56, 57, 58, 59, 60, 61, 62, TYPES, LAYOUT); \
    WGMMA_OF_REGISTERS(120, 60, 61, 62, 63, 64, 65, 66, TYPES, LAYOUT); \
    WGMMA_OF_REGISTERS(128, 64, 65, 66, 67, 68, 69, 70, TYPES, LAYOUT); \
    WGMMA_OF_REGISTERS(136, 68, 69, 70, 71, 72, 73, 74, TYPES, LAYOUT); \
    WGMMA_OF_REGISTERS(144, 72, 73, 74, 75, 76, 77, 78, TYPES, LAYOUT); \
    WGMMA_OF_REGISTERS(152, 76, 77, 78, 79, 80, 81, 82, TYPES, LAYOUT); \
    WGMMA_OF_REGISTERS(160, 80, 81, 82, 83, 84, 85, 86, TYPES, LAYOUT); \
    WGMMA_OF_REGISTERS(168, 84, 85, 86, 87, 88, 89, 90, TYPES, LAYOUT); \
    WGMMA_OF_REGISTERS(176, 88, 89, 90, 91, 92, 93, 94, TYPES, LAYOUT); \
    WGMMA_OF_REGISTERS(184, 92, 93, 94, 95, 96, 97, 98, TYPES, LAYOUT); \
    WGMMA_OF_REGISTERS(192, 96, 97, 98, 99, 100, 101, 102, TYPES, LAYOUT);

template <int COLUMNS>
__device__ __forceinline__ void wgmma_tf32_of_registers(float (&d)[COLUMNS / 2], const unsigned (&a)[4], Operand b,
                                                        bool accumulate) {
    static_assert(COLUMNS % 8 == 0 && COLUMNS <= 192, "a width without an instruction here");
    WGMMA_OF_REGISTERS_OF_ALL_WIDTHS("k8.f32.tf32.tf32", "")
}
template <int COLUMNS>
__device__ __forceinline__ void wgmma_f16_of_registers(float (&d)[COLUMNS / 2], const unsigned (&a)[4], Operand b,
                                                       bool accumulate) {
    static_assert(COLUMNS % 8 == 0 && COLUMNS <= 192, "a width without an instruction here");
    WGMMA_OF_REGISTERS_OF_ALL_WIDTHS("k16.f32.f16.f16", ", 0")
}
template <int COLUMNS>
__device__ __forceinline__ void wgmma_bf16_of_registers(float (&d)[COLUMNS / 2], const unsigned (&a)[4], Operand b,
                                                       bool accumulate) {
    static_assert(COLUMNS % 8 == 0 && COLUMNS <= 192, "a width without an instruction here");
    WGMMA_OF_REGISTERS_OF_ALL_WIDTHS("k16.f32.bf16.bf16", ", 0")
}
