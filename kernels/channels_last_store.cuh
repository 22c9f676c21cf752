// How the kernels for Hopper's tensor cores store channels-last results. Whoever includes this has said how many TILES_C of eight
// channels a wgmma has.
#pragma once

#include "pieces.cuh"

#ifndef OUT_VECTOR  // so many channels of a channels-last result may be written at a time: 1, 4, or 8 of 16 bits
#define OUT_VECTOR 1
#endif

// Channels-last results go straight from the registers: the four threads that share a row hold eight channels that follow each
// other, two each. They exchange some of several tiles of channels, so that each stores eight or sixteen bytes at once.

// Two neighbouring channels of two rows and of all tiles of channels, with the bias.
struct TwoChannels {
    float value[TILES_C][2];
};

__device__ __forceinline__ void store_two(Stored* to, const TwoChannels& sums, int left, const Problem& p) {
    const int t = threadIdx.x % 4;
#if OUT_VECTOR == 1
    const Index step = (Index)p.out_stride[1];
#pragma unroll
    for (int tile = 0; tile < TILES_C; ++tile) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int channel = tile * 8 + 2 * t + i;
            if (channel < left) narrow(sums.value[tile][i], to[channel * step]);
        }
    }
#else
    const auto value = [&](int tile, int i) { return tile < TILES_C ? sums.value[tile < TILES_C ? tile : 0][i] : 0.0f; };
    constexpr int AT_ONCE = sizeof(Stored) == 2 && OUT_VECTOR == 8 ? 4 : 2;  // tiles of channels
#pragma unroll
    for (int tile = 0; tile < TILES_C; tile += AT_ONCE) {
        // After an exchange with the neighbour, threads 0 and 2 have four channels of the first tile, and 1 and 3 of the second.
        const int channel = (tile + t % 2) * 8 + t / 2 * 4;
        if constexpr (sizeof(Stored) == 4) {
            unsigned words[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) words[i] = __float_as_uint(value(tile + i / 2, i % 2));
            exchange(words[0], words[2], 1);
            exchange(words[1], words[3], 1);
            if (channel < left) store_words(to + channel, words);
        } else {
            unsigned words[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) words[i] = narrow_two<Stored>(value(tile + i, 0), value(tile + i, 1));
            exchange(words[0], words[1], 1);
            if (TILES_C - tile <= 2 || AT_ONCE == 2) {
                const unsigned four[2] = {words[0], words[1]};
                if (channel < left) store_words(to + channel, four);
            } else {
                // With the next two tiles and the next thread but one, each thread has all of a tile.
                exchange(words[2], words[3], 1);
                exchange(words[0], words[2], 2);
                exchange(words[1], words[3], 2);
                if ((tile + t) * 8 < left) store_words(to + (tile + t) * 8, words);
            }
        }
    }
#endif
}
