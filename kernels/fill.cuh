// Planes along D that no tap reaches are the bias, all of them: one thread of a block has a piece of shared memory with its value
// copied there in bulk, which costs no worker anything. To all others, the result has only the planes between, PLANE_STEP apart.
// Its planes follow each other in memory and have no gaps.
#pragma once

#include "pieces.cuh"

constexpr bool FILLS = PLANE_STEP > 1;

constexpr int FILL_BYTES = 2048;

// In shared memory, too, since the thread has hardly any registers left: a value many times, whose it is, and which planes are
// left of the block's share of all, counted sample by sample and channel by channel, reached by a tap or not.
struct Fill {
    Stored source[FILL_BYTES / sizeof(Stored)];
    int biased;         // the channel, or -1
    int n, channel, d;  // of the next plane
    unsigned left, at_once;
};

__device__ __forceinline__ void fill_source(Fill& fill, const Stored* bias, long long stride) {
    if (fill.biased == fill.channel || (fill.biased >= 0 && !bias)) return;
    store_bulk_wait_until_read();
    constexpr int UNIT = 16 / (int)sizeof(Stored);
    Pack<Stored, UNIT> values;
#pragma unroll
    for (int i = 0; i < UNIT; ++i) {
        if (bias) values.value[i] = bias[fill.channel * stride];
        else zero(values.value[i]);
    }
#pragma unroll 1
    for (int i = 0; i < FILL_BYTES / 16; ++i) reinterpret_cast<Pack<Stored, UNIT>*>(fill.source)[i] = values;
    publish_shared_writes();
    fill.biased = fill.channel;
}

// Elements that follow each other: single ones up to a multiple of 16 bytes, and behind the last.
__device__ __forceinline__ void fill_run(const Fill& fill, Stored* to, long long count) {
    constexpr int UNIT = 16 / (int)sizeof(Stored);
#pragma unroll 1
    for (; count > 0 && reinterpret_cast<unsigned long long>(to) % 16; --count) *to++ = fill.source[0];
#pragma unroll 1
    for (; count >= UNIT; ) {
        const int elements = (int)min(count / UNIT * UNIT, (long long)(FILL_BYTES / (int)sizeof(Stored)));
        store_bulk(to, fill.source, elements * (int)sizeof(Stored));
        to += elements;
        count -= elements;
    }
#pragma unroll 1
    for (; count > 0; --count) *to++ = fill.source[0];
}

__device__ __forceinline__ long long plane_stride(const Problem& p) { return p.out_stride[2] / PLANE_STEP; }

__device__ __forceinline__ void find_planes(Fill& fill, const Problem& p) {
    const long long channels = p.groups * p.c_out, all = p.n * channels * p.planes[0];
    const long long next = all * blockIdx.x / gridDim.x, end = all * (blockIdx.x + 1) / gridDim.x;
    fill.biased = -1;
    fill.n = (int)(next / p.planes[0] / channels);
    fill.channel = (int)(next / p.planes[0] % channels);
    fill.d = (int)(next % p.planes[0]);
    fill.left = (unsigned)(end - next);
}

// The next planes, of which taps may reach some.
__device__ __forceinline__ void fill_planes(Fill& fill, unsigned count, const Stored* bias, Stored* out, const Problem& p) {
#pragma unroll 1
    for (; count > 0 && fill.left > 0; --count) {
        --fill.left;
        if ((fill.d + PLANE_STEP - (int)p.planes[1]) % PLANE_STEP) {
            fill_source(fill, bias, p.bias_stride);
            fill_run(fill, out + (fill.n * p.out_stride[0] + fill.channel * p.out_stride[1] + fill.d * plane_stride(p)),
                     p.out_extent[1] * p.out_extent[2]);
            store_bulk_commit();
        }
        if (++fill.d < (int)p.planes[0]) continue;
        fill.d = 0;
        if (++fill.channel < (int)(p.groups * p.c_out)) continue;
        fill.channel = 0;
        ++fill.n;
    }
}
