// How the tensor cores' kernels of weight gradients store a block's sums. The warps of a block share its tile of weights, WARPS_K
// times: as many warps have the same weights, and each a share of the positions. Whoever includes this has said:
//
//     SUMS, VALUES       sums of a thread, and of the block
//     THREADS_C          threads that have all weights of the tile
//     first_weight       of a tile, weight_of_thread its thread's first one, and weight_of_sum how far a sum's is from that
//     tiles_of_weights   that there are
#pragma once

#include "partial_sums.cuh"

// Adds up the sums of the warps that share weights, number `warp_k` of them, in the first one's accumulators, by shared memory
// that nobody uses any more. All threads of the block call it, those of further numbers hold no sums.
__device__ __forceinline__ void add_warps(float (&acc)[SUMS / 4][4], void* shared, int warp_k) {
    if (WARPS_K == 1) return;
    float* const turned = reinterpret_cast<float*>(shared) + threadIdx.x % THREADS_C;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < SUMS; ++i)
        if (warp_k > 0 && warp_k < WARPS_K) turned[((warp_k - 1) * SUMS + i) * THREADS_C] = acc[i / 4][i % 4];
    __syncthreads();
    if (warp_k > 0) return;
    for (int k = 0; k < WARPS_K - 1; ++k)
#pragma unroll
        for (int i = 0; i < SUMS; ++i) acc[i / 4][i % 4] += turned[(k * SUMS + i) * THREADS_C];
}

// Stores the sums of a thread of the first warps as a part, or as the result where the block is the only one of its tile.
__device__ __forceinline__ void store_sums(const float (&acc)[SUMS / 4][4], const Weight& first, float* parts, Stored* out,
                                           const Problem& p) {
    if (p.tiles[3] > 1) {
        let_next_kernel_start();  // the second one: its blocks come as these end
        parts += blockIdx.x * (long long)VALUES + threadIdx.x;
#pragma unroll
        for (int i = 0; i < SUMS; ++i) parts[i * THREADS_C] = acc[i / 4][i % 4];
    } else {
        const Weight mine = weight_of_thread(first, threadIdx.x);
        out += mine.offset(p);
#pragma unroll
        for (int i = 0; i < SUMS; ++i)
            if (exists(mine, weight_of_sum(i), p, KERNEL_D, KERNEL_H, KERNEL_W))
                narrow(acc[i / 4][i % 4], out[distance(weight_of_sum(i), p)]);
    }
}

// The second kernel.
__device__ __forceinline__ void add_sums(const float* parts, Stored* out, const Problem& p) {
    const unsigned values = tiles_of_weights(p) * VALUES;
    add_parts(parts, values, p.tiles[3], [&](unsigned value, float sum) {
        const Weight first = weight_of_thread(first_weight(value / VALUES, p), (int)(value % THREADS_C));
        const Ahead ahead = weight_of_sum((int)(value % VALUES) / THREADS_C);
        if (exists(first, ahead, p, KERNEL_D, KERNEL_H, KERNEL_W)) narrow(sum, out[first.offset(p) + distance(ahead, p)]);
    });
}
