// Stands in for kernels/ptx.cuh on the host: the same functions, with the instructions' rounding and fragment layouts.
#pragma once

#include "builtins.cuh"

// ---- conversions ---------------------------------------------------------------------------------------------------

inline float half_bits_to_float(unsigned short bits) {
    const unsigned sign = (bits & 0x8000u) << 16, exponent = bits >> 10 & 31, fraction = bits & 1023;
    if (exponent == 31) return __uint_as_float(sign | 0x7f800000u | fraction << 13);
    if (exponent) return __uint_as_float(sign | (exponent + 112) << 23 | fraction << 13);
    const float denormal = (float)fraction * 0x1p-24f;
    return sign ? -denormal : denormal;
}

inline unsigned short float_to_half_bits(float value) {
    const unsigned bits = __float_as_uint(value), sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return 0x7fff;  // the instruction's one NaN
    if (magnitude >= 0x47800000u) return (unsigned short)(sign | 0x7c00u);  // 2**16 and more
    if (magnitude < 0x38800000u) {  // below 2**-14: a multiple of 2**-24, rounded by the addition of 0.75 * 2**0
        const float shifted = __uint_as_float(magnitude) + 0.75f;
        return (unsigned short)(sign | (__float_as_uint(shifted) - __float_as_uint(0.75f)));
    }
    const unsigned rounded = magnitude + 0xfffu + (magnitude >> 13 & 1u);
    return (unsigned short)(sign | ((rounded - (112u << 23)) >> 13));
}

inline unsigned floats_to_half_bits(float low, float high) {
    return float_to_half_bits(low) | (unsigned)float_to_half_bits(high) << 16;
}

inline unsigned floats_to_bfloat16_bits(float low, float high) {
    const auto narrow = [](float value) -> unsigned {
        const unsigned bits = __float_as_uint(value);
        return value != value ? 0x7fff : (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;  // the instruction's one NaN
    };
    return narrow(low) | narrow(high) << 16;
}

inline unsigned float_to_tf32(float value) {
    const unsigned bits = __float_as_uint(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fffffffu;
    if ((bits & 0x7fffffffu) == 0x7f800000u) return bits;
    return (bits + 0x1000u) & 0xffffe000u;  // ties away from zero
}

inline void end_thread() { host::end_thread(); }

// ---- mma.sync ------------------------------------------------------------------------------------------------------

inline void mma_m16n8k8_tf32(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2], const float (&c)[4]) {
    host::mma(host::OF_TF32, 8, d, a, b, c);
}
inline void mma_m16n8k16_f16(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2], const float (&c)[4]) {
    host::mma(host::OF_F16, 16, d, a, b, c);
}
inline void mma_m16n8k16_bf16(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2], const float (&c)[4]) {
    host::mma(host::OF_BF16, 16, d, a, b, c);
}
inline void mma_m16n8k8_f16(float (&d)[4], const unsigned (&a)[2], const unsigned (&b)[1], const float (&c)[4]) {
    host::mma(host::OF_F16, 8, d, a, b, c);
}
inline void mma_m16n8k8_bf16(float (&d)[4], const unsigned (&a)[2], const unsigned (&b)[1], const float (&c)[4]) {
    host::mma(host::OF_BF16, 8, d, a, b, c);
}

// ---- ldmatrix ------------------------------------------------------------------------------------------------------

struct HostRow {
    unsigned short value[8];
    unsigned* r;
};

// Lane 8 * i + row holds that row of matrix i. Lane l receives two neighbours of row l / 4, or of that column.
template <bool TRANSPOSED, int MATRICES> void host_load_matrices(unsigned (&r)[MATRICES], const void* shared_row) {
    struct alignas(16) Row {
        unsigned short value[8];
    };
    HostRow mine = {};
    if (threadIdx.x % 32 < 8 * MATRICES) {  // the other lanes' addresses are ignored
        const Row row = *(const Row*)shared_row;
        for (int i = 0; i < 8; ++i) mine.value[i] = row.value[i];
    }
    mine.r = r;
    host::together(0xffffffffu, &mine, [](void* const* lanes, unsigned) {
        for (int lane = 0; lane < 32; ++lane) {
            for (int i = 0; i < MATRICES; ++i) {
                unsigned packed = 0;
                for (int place = 0; place < 2; ++place) {
                    const int across = lane % 4 * 2 + place, down = lane / 4;
                    const HostRow& from = *(const HostRow*)lanes[8 * i + (TRANSPOSED ? across : down)];
                    packed |= (unsigned)from.value[TRANSPOSED ? down : across] << 16 * place;
                }
                ((HostRow*)lanes[lane])->r[i] = packed;
            }
        }
    });
}

inline void load_matrix_x4(unsigned (&r)[4], const void* shared_row) { host_load_matrices<false>(r, shared_row); }
inline void load_matrix_x2(unsigned (&r)[2], const void* shared_row) { host_load_matrices<false>(r, shared_row); }

inline void load_matrix_x4_transposed(unsigned (&r)[4], const void* shared_row) {
    host_load_matrices<true>(r, shared_row);
}

// ---- stmatrix ------------------------------------------------------------------------------------------------------

struct HostColumn {
    unsigned words[4];
    unsigned short value[8];
};

// Lane l has two neighbours of row l / 4 of each matrix. Lane 8 * i + column stores that column of matrix i.
template <int MATRICES> void store_matrices_transposed(void* shared_row, const unsigned (&r)[MATRICES]) {
    struct alignas(16) Row {
        unsigned short value[8];
    };
    HostColumn mine = {};
    for (int i = 0; i < MATRICES; ++i) mine.words[i] = r[i];
    host::together(0xffffffffu, &mine, [](void* const* lanes, unsigned) {
        for (int lane = 0; lane < 8 * MATRICES; ++lane) {
            for (int row = 0; row < 8; ++row) {
                const int column = lane % 8;
                const HostColumn& from = *(const HostColumn*)lanes[row * 4 + column / 2];
                ((HostColumn*)lanes[lane])->value[row] = (unsigned short)(from.words[lane / 8] >> 16 * (column % 2));
            }
        }
    });
    if (threadIdx.x % 32 >= 8 * MATRICES) return;  // the other lanes' addresses are ignored
    Row row;
    for (int i = 0; i < 8; ++i) row.value[i] = mine.value[i];
    *(Row*)shared_row = row;
}

inline void issue_in_order() {}
inline int recomputed(int value) { return value; }
inline float on_its_own(float value) { return value; }
template <class T> T* worked_out(T* address) { return address; }

// ---- words of shared memory ------------------------------------------------------------------------------------------

struct SharedWords {
    const char* at;
};
inline SharedWords words_at(const void* shared) { return {(const char*)shared}; }
inline SharedWords operator+(SharedWords from, int bytes) { return {from.at + bytes}; }

template <int FURTHER, int N> void load_words(unsigned (&word)[N], SharedWords from) {
    struct alignas(4 * N) Words {
        unsigned word[N];
    };
    const Words words = *(const Words*)(from.at + 4 * FURTHER);
    for (int i = 0; i < N; ++i) word[i] = words.word[i];
}

// ---- bytes -----------------------------------------------------------------------------------------------------------

inline unsigned select_bytes(unsigned low, unsigned high, unsigned selection) {
    if (selection & ~0x7777u) host::fail("selects bytes by %08x, of which a digit is not one of eight", selection);
    const unsigned long long both = low | (unsigned long long)high << 32;
    unsigned bytes = 0;
    for (int i = 0; i < 4; ++i) bytes |= (unsigned)(both >> 8 * (selection >> 4 * i & 7) & 0xff) << 8 * i;
    return bytes;
}

// ---- stores --------------------------------------------------------------------------------------------------------

template <int N> void store_words(void* to, const unsigned (&word)[N]) {
    struct alignas(4 * N) Words {
        unsigned word[N];
    } words;
    for (int i = 0; i < N; ++i) words.word[i] = word[i];
    *(Words*)to = words;
}

// ---- cp.async ------------------------------------------------------------------------------------------------------

inline void copy_async_4(void* shared, const void* global, int bytes) { host::copy_async(shared, global, 4, bytes); }
inline void copy_async_8(void* shared, const void* global, int bytes) { host::copy_async(shared, global, 8, bytes); }
inline void copy_async_16(void* shared, const void* global, int bytes) { host::copy_async(shared, global, 16, bytes); }
inline void copy_async_16_or_zeros(void* shared, const void* global, bool copies) {
    host::copy_async(shared, global, 16, copies ? 16 : 0);
}
inline void copy_async_16_shared_by_blocks(void* shared, const void* global) {
    host::copy_async(shared, global, 16, 16);
}
inline void copy_async_commit() { host::copy_async_commit(); }
template <int PENDING> void copy_async_wait() { host::copy_async_wait(PENDING); }

// ---- wgmma ---------------------------------------------------------------------------------------------------------

inline unsigned shared_address(const void* shared) { return host::shared_address(shared); }

struct Operand {
    unsigned low, high;
};
inline unsigned long long descriptor(Operand operand) { return operand.low | (unsigned long long)operand.high << 32; }

inline Operand describe(const void* shared, unsigned piece_bytes, unsigned group_bytes) {
    const unsigned address = shared_address(shared);
    if ((address | piece_bytes | group_bytes) % 16 || (address | piece_bytes | group_bytes) >> 18) {
        host::fail("describes rows at address %u, %u and %u bytes apart", address, piece_bytes, group_bytes);
    }
    return {address >> 4 | piece_bytes >> 4 << 16, group_bytes >> 4};
}
inline Operand describe_swizzled(const void* shared, unsigned run_bytes, unsigned group_bytes) {
    const unsigned address = shared_address(shared);
    if ((address | run_bytes | group_bytes) % 128 || (address | run_bytes | group_bytes) >> 18) {
        host::fail("describes swizzled rows at address %u, %u and %u bytes apart", address, run_bytes, group_bytes);
    }
    return {address >> 4 | group_bytes >> 4 << 16, run_bytes >> 4 | 1u << 30};
}
template <int ROW_BYTES> inline Operand describe_rows(const void* shared, int eight) {
    static_assert(ROW_BYTES == 32 || ROW_BYTES == 64 || ROW_BYTES == 128, "a swizzle");
    const unsigned address = shared_address(shared), apart = (unsigned)(eight * ROW_BYTES);
    if (address % 32 || eight < 0 || (address | apart) >> 18) {
        host::fail("describes swizzled rows at address %u, %d rows apart", address, eight);
    }
    return {address >> 4 | 1u << 16, apart >> 4 | (ROW_BYTES == 128 ? 1u : ROW_BYTES == 64 ? 2u : 3u) << 30};
}
inline Operand operator+(Operand operand, int pieces) { return {operand.low + (unsigned)pieces, operand.high}; }

// Values that differ make the threads issue different wgmma, which is an error.
inline unsigned of_warp(unsigned value) { return value; }
inline Operand of_warp(Operand operand) { return operand; }

inline void wgmma_fence() { host::wgmma_fence(); }
inline void wgmma_commit() { host::wgmma_commit(); }
template <int PENDING> void wgmma_wait() { host::wgmma_wait(PENDING); }

template <int COLUMNS>
void wgmma_tf32(float (&d)[COLUMNS / 2], Operand a, Operand b, bool accumulate) {
    static_assert(COLUMNS % 8 == 0 && COLUMNS <= 256, "a width of the instruction");
    host::wgmma(host::OF_TF32, COLUMNS, d, descriptor(a), descriptor(b), accumulate);
}
template <int COLUMNS>
void wgmma_f16(float (&d)[COLUMNS / 2], Operand a, Operand b, bool accumulate) {
    static_assert(COLUMNS % 8 == 0 && COLUMNS <= 256, "a width of the instruction");
    host::wgmma(host::OF_F16, COLUMNS, d, descriptor(a), descriptor(b), accumulate);
}
template <int COLUMNS>
void wgmma_bf16(float (&d)[COLUMNS / 2], Operand a, Operand b, bool accumulate) {
    static_assert(COLUMNS % 8 == 0 && COLUMNS <= 256, "a width of the instruction");
    host::wgmma(host::OF_BF16, COLUMNS, d, descriptor(a), descriptor(b), accumulate);
}

template <int COLUMNS>
void wgmma_f16_transposed(float (&d)[COLUMNS / 2], Operand a, Operand b, bool accumulate) {
    static_assert(COLUMNS % 8 == 0 && COLUMNS <= 256, "a width of the instruction");
    host::wgmma(host::OF_F16, COLUMNS, d, descriptor(a), descriptor(b), accumulate, true);
}
template <int COLUMNS>
void wgmma_bf16_transposed(float (&d)[COLUMNS / 2], Operand a, Operand b, bool accumulate) {
    static_assert(COLUMNS % 8 == 0 && COLUMNS <= 256, "a width of the instruction");
    host::wgmma(host::OF_BF16, COLUMNS, d, descriptor(a), descriptor(b), accumulate, true);
}

inline void publish_shared_writes() { host::publish(); }
template <int COUNT> void take_registers() { host::set_registers(COUNT); }
template <int COUNT> void give_registers() { host::set_registers(COUNT); }

// ---- kernels that follow each other ------------------------------------------------------------------------------------

inline void let_next_kernel_start() {}
inline void wait_for_kernel_before() { host::wait_for_kernel_before(); }

// ---- barriers and bulk copies --------------------------------------------------------------------------------------

typedef unsigned long long Barrier;

inline void barrier_init(Barrier* barrier, int count) { host::barrier_init(barrier, count); }
inline void barrier_init_done() { host::barrier_init_done(); }
inline void barrier_arrive(Barrier* barrier) { host::barrier_arrive(barrier, 0); }
inline void barrier_arrive_expecting(Barrier* barrier, unsigned bytes) { host::barrier_arrive(barrier, bytes); }
inline void barrier_wait(Barrier* barrier, unsigned parity) { host::barrier_wait(barrier, parity); }
inline void copy_bulk(void* shared, const void* global, unsigned bytes, Barrier* barrier) {
    host::copy_bulk(shared, global, bytes, barrier);
}
typedef host::Boxes TensorMap;
inline void copy_box(void* shared, const TensorMap* map, int c, int w, int h, int d, int n, Barrier* barrier) {
    host::copy_box(shared, *map, {{c, w, h, d, n}}, barrier);
}
inline void store_bulk(void* global, const void* shared, unsigned bytes) { host::store_bulk(global, shared, bytes); }
inline void store_bulk_commit() { host::store_bulk_commit(); }
inline void store_bulk_wait_until_read() { host::store_bulk_wait(); }
inline void store_bulk_wait() { host::store_bulk_wait(); }
inline void warps_sync(int barrier, int threads) { host::warps_sync(barrier, threads); }

// ---- wgmma with A in registers ---------------------------------------------------------------------------------------

template <int COLUMNS>
void wgmma_tf32_of_registers(float (&d)[COLUMNS / 2], const unsigned (&a)[4], Operand b, bool accumulate) {
    static_assert(COLUMNS % 8 == 0 && COLUMNS <= 256, "a width of the instruction");
    host::wgmma_of_registers(host::OF_TF32, COLUMNS, d, a, descriptor(b), accumulate);
}
template <int COLUMNS>
void wgmma_f16_of_registers(float (&d)[COLUMNS / 2], const unsigned (&a)[4], Operand b, bool accumulate) {
    static_assert(COLUMNS % 8 == 0 && COLUMNS <= 256, "a width of the instruction");
    host::wgmma_of_registers(host::OF_F16, COLUMNS, d, a, descriptor(b), accumulate);
}
template <int COLUMNS>
void wgmma_bf16_of_registers(float (&d)[COLUMNS / 2], const unsigned (&a)[4], Operand b, bool accumulate) {
    static_assert(COLUMNS % 8 == 0 && COLUMNS <= 256, "a width of the instruction");
    host::wgmma_of_registers(host::OF_BF16, COLUMNS, d, a, descriptor(b), accumulate);
}
