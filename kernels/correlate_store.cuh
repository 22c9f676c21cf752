// How these kernels store a box, whose sums are the results: whoever includes this has said what wgmma_store.cuh asks for.
#pragma once

#include "correlate_box.cuh"
#include "wgmma_store.cuh"

// A position of a box, and its row of A among those that are stored together.
struct Output {
    Position at;
    int row;
};

__device__ __forceinline__ Output find_output(const Problem& p, const Staged& s, int target) {
    if (ALONE) {
        const int row = row_of_target(p, target % (TARGETS * STORERS));
        Position at = position_of(p, s, target / (TARGETS * STORERS) * STORED_ROWS + row);
        at.there &= row < STORED_ROWS;
        return {at, row};
    }
    const int index = target * (int)p.together;
    const int row = (int)quotient(index, p.box_magic[2]), d = (int)quotient(row, p.box_magic[3]);
    const int w = index - row * (int)p.box[2], h = row - d * (int)p.box[1];
    return {{d, h, w, d < (int)p.box[0]}, row_of(p, s, d, h, w)};  // threads have more targets than the box
}

__device__ __forceinline__ Target find_target(const Problem& p, const Staged& s, int target) {
    const Output output = find_output(p, s, target);
    const auto [d, h, w, there] = output.at;
    Target t;
    t.offset = 0;
    if (there) t.offset = d * (Index)p.out_stride[2] + h * (Index)p.out_stride[3] + w * (Index)p.out_stride[4];
    t.d = (short)d, t.h = (short)h, t.w = there ? w : -1;
    t.from = there ? output.row : ZERO;
    t.taps = there ? SUMS : 1;
    return t;
}

__device__ __forceinline__ void store_channels(const Accumulators& acc, const float* bias, const int (&start)[TILES_M],
                                               int tiles, const Problem& p, const Staged& s, const Block& b, Stored* out) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int left = min(TILE_C, (int)p.c_out - b.tile_c * TILE_C);
    const int pitch = p.patches[1] ? s.w : 8;
#pragma unroll
    for (int tile = 0; tile < TILES_M; ++tile) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            issue_in_order();
            const int place = recomputed(start[tile]) + (warp % 4 * 2 + half) * pitch + lane / 4;
            const int row = (int)quotient(place, p.box_magic[2]), d = (int)quotient(row, p.box_magic[1]);
            const int w = place - row * s.w, h = row - d * s.h;
            const bool inside = warp / 4 % TEAM * TILES_M + tile < tiles && w < (int)p.box[2] && h < (int)p.box[1] &&
                                d < (int)p.box[0] && within(b.d + d, p.out_extent[0]) && within(b.h + h, p.out_extent[1]) &&
                                within(b.w + w, p.out_extent[2]);
            TwoChannels sums;
#pragma unroll
            for (int c = 0; c < TILES_C; ++c) {
                const Pack<float, 2> offset = *reinterpret_cast<const Pack<float, 2>*>(bias + c * 8 + lane % 4 * 2);
#pragma unroll
                for (int i = 0; i < 2; ++i) sums.value[c][i] = offset.value[i] + acc.value[0][tile][c * 4 + half * 2 + i];
            }
            store_two(out + (d * (Index)p.out_stride[2] + h * (Index)p.out_stride[3] + w * (Index)p.out_stride[4]), sums,
                      inside ? left : 0, p);
        }
    }
}

__device__ __forceinline__ void store(const Accumulators& acc, Turned& turned, const Target* targets,
                                      const int (&start)[TILES_M], int tiles, const Problem& p, const Staged& s,
                                      const Block& b, const Stored* bias, Stored* out) {
    bring_bias(turned, bias, p, b.tile_c, b.group);
    out += b.n * p.out_stride[0] + (b.group * p.c_out + b.tile_c * TILE_C) * p.out_stride[1];
    out += b.d * p.out_stride[2] + b.h * p.out_stride[3] + b.w * p.out_stride[4];
#if OUT_CHANNELS_LAST
    warps_sync(2 + threadIdx.x / STORERS, STORERS);
    store_channels(acc, turned.bias, start, tiles, p, s, b, out);
#else
    store_turned(acc, turned, targets, b.d, b.h, b.w, (int)p.c_out - b.tile_c * TILE_C, p, out, true);
#endif
}
