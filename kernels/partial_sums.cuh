// A weight gradient sums over all positions of the batch, more of them than there are weights. So several blocks share
// the positions of a tile of weights: each writes its own sums, its part, and a second kernel adds the parts. The order of
// all additions is fixed, so that two calls give the same bits.
#pragma once

#include "common.cuh"

// How many tiles of so many channels or groups there are.
__device__ __forceinline__ int tiles_of(long long count, int tile) { return (int)((count + tile - 1) / tile); }

// The weight that an accumulator belongs to; tiles may reach beyond the channels and taps that there are.
struct Weight {
    long long group;
    int ci, co, d, h, w;  // channels within the group, and the tap

    __device__ __forceinline__ long long offset(const Problem& p) const {
        return (group * p.c_in + ci) * p.weight_stride[0] + co * p.weight_stride[1] + d * p.weight_stride[2] +
               h * p.weight_stride[3] + w * p.weight_stride[4];
    }
};

// How far an accumulator's weight is from that of the thread's first one.
struct Ahead {
    int ci, co, d, h, w;
};

// Whether the weight `ahead` of `first` exists, for a kernel of so many taps, and its distance from `first`.
__device__ __forceinline__ bool exists(const Weight& first, const Ahead& ahead, const Problem& p, int taps_d, int taps_h,
                                       int taps_w) {
    return first.group < p.groups && first.ci + ahead.ci < p.c_in && first.co + ahead.co < p.c_out &&
           first.d + ahead.d < taps_d && first.h + ahead.h < taps_h && first.w + ahead.w < taps_w;
}
__device__ __forceinline__ long long distance(const Ahead& ahead, const Problem& p) {
    return ahead.ci * p.weight_stride[0] + ahead.co * p.weight_stride[1] + ahead.d * p.weight_stride[2] +
           ahead.h * p.weight_stride[3] + ahead.w * p.weight_stride[4];
}

constexpr int SUM_THREADS = 256, MAX_SLICES = 8, PARTS_OF_SLICE = 8;

// Adds the parts of each of `values` values, of which a part holds one after the other; `store` takes the sums. Where there are
// many parts, several threads share a value. All values of all parts are the workspace's, 256 MB at most.
template <class Acc, class Store>
__device__ __forceinline__ void add_parts(const Acc* parts, unsigned values, long long parts_of_value, const Store& store) {
    __shared__ Acc sums[SUM_THREADS];
    const unsigned count = (unsigned)parts_of_value;
    unsigned slices = 1;
    while (slices < MAX_SLICES && slices * PARTS_OF_SLICE < count) slices *= 2;
    const unsigned of_block = SUM_THREADS / slices, lane = threadIdx.x % of_block, slice = threadIdx.x / of_block;
    const unsigned value = blockIdx.x * of_block + lane;
    Acc sum = 0;
    wait_for_kernel_before();
    if (value < values) {
#pragma unroll 1
        for (unsigned first = slice; first < count; first += PARTS_OF_SLICE * slices) {
            Acc some[PARTS_OF_SLICE];
#pragma unroll
            for (int i = 0; i < PARTS_OF_SLICE; ++i) {
                const unsigned part = first + i * slices;
                some[i] = part < count ? parts[part * values + value] : Acc(0);
            }
#pragma unroll
            for (int i = 0; i < PARTS_OF_SLICE; ++i) sum += some[i];
        }
    }
    if (slices > 1) {
        sums[threadIdx.x] = sum;
        __syncthreads();
    }
    if (slice == 0 && value < values) {
        for (unsigned s = 1; s < slices; ++s) sum += sums[s * of_block + lane];
        store(value, sum);
    }
}
