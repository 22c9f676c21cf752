// 16-byte pieces of channels, and Hopper's instruction that multiplies them.
#pragma once

#include "tf32.cuh"

#ifndef COPY_BYTES  // of a channels-last position that copies bring at a time: 16, or 8 or 4 where positions start so
#define COPY_BYTES 16
#endif

constexpr int PIECE = 16 / (int)sizeof(Stored);  // channels

typedef Pack<unsigned, 4> Piece;  // 16 bytes of shared memory
typedef Pack<Stored, PIECE> Channels;  // of one position

// How many of the pieces of weights of a chunk a thread packs: 16 channels of them.
__host__ __device__ constexpr int packed_pieces(int pieces) { return pieces * PIECE < 16 ? pieces : 16 / PIECE; }

// How many channels of a tap threads next to each other pack: where taps are many, two, whose pieces are a sector.
__host__ __device__ constexpr int neighbours(int taps) { return taps > 16 ? 2 : 1; }

// Reads channels that are a stride apart, zeros for those of them that are not there.
template <int COUNT>
__device__ __forceinline__ void load_channels(Channels (&to)[COUNT], const Stored* from, long long stride, int there) {
#pragma unroll
    for (int i = 0; i < COUNT * PIECE; ++i) {
        zero(to[i / PIECE].value[i % PIECE]);
        if (i < there) to[i / PIECE].value[i % PIECE] = *from;
        from += stride;
    }
}

// Copies what there is of a piece, so many channels, to where it is going to be; the others become zeros.
__device__ __forceinline__ void copy_piece(Piece* to, const Stored* from, int channels) {
    constexpr int UNIT = COPY_BYTES / (int)sizeof(Stored);
#pragma unroll
    for (int first = 0; first < PIECE; first += UNIT) {
        const int left = UNIT == PIECE ? channels : max(0, min(channels - first, UNIT));
        copy_async<COPY_BYTES>(reinterpret_cast<Stored*>(to) + first, from + (left ? first : 0), left * (int)sizeof(Stored));
    }
}

// One piece of a position, as its parts.
__device__ __forceinline__ void pack(const Channels& c, Piece (&parts)[PARTS]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if (sizeof(Stored) == 2) {
            parts[0].value[i] = bits_of(c.value[2 * i % PIECE]) | bits_of(c.value[(2 * i + 1) % PIECE]) << 16;
        } else if (PRECISION == TF32X3) {
            split(widen(c.value[i]), parts[0].value[i], parts[PARTS - 1].value[i]);
        } else {
            parts[0].value[i] = to_tf32(widen(c.value[i]));
        }
    }
}

// A piece from as many words, of each the low or the high 16 bits.
__device__ __forceinline__ Piece take_halves(const unsigned* words, int high) {
    Piece piece;
#pragma unroll
    for (int i = 0; i < 4; ++i) piece.value[i] = select_bytes(words[2 * i], words[2 * i + 1], high ? 0x7632 : 0x5410);
    return piece;
}

template <int COLUMNS>
__device__ __forceinline__ void multiply_add(float (&sum)[COLUMNS / 2], Operand a, Operand b,
                                             bool accumulate) {
#if DTYPE == FLOAT16
    wgmma_f16<COLUMNS>(sum, a, b, accumulate);
#elif DTYPE == BFLOAT16
    wgmma_bf16<COLUMNS>(sum, a, b, accumulate);
#else
    wgmma_tf32<COLUMNS>(sum, a, b, accumulate);
#endif
}

// The same with A in registers.
template <int COLUMNS>
__device__ __forceinline__ void multiply_add(float (&sum)[COLUMNS / 2], const unsigned (&a)[4], Operand b, bool accumulate) {
#if DTYPE == FLOAT16
    wgmma_f16_of_registers<COLUMNS>(sum, a, b, accumulate);
#elif DTYPE == BFLOAT16
    wgmma_bf16_of_registers<COLUMNS>(sum, a, b, accumulate);
#else
    wgmma_tf32_of_registers<COLUMNS>(sum, a, b, accumulate);
#endif
}
