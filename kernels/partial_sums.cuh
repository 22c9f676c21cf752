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

typedef Pack<float, 4> Four;  // sums that are loaded at once

constexpr int SUM_THREADS = 256, MAX_SLICES = 8, PARTS_OF_SLICE = 8;
constexpr int SUM_BLOCKS = 4;  // that a multiprocessor has registers for: with fewer, the compiler waits for a load before the next
template <class Acc> constexpr int WIDE = 16 / (int)sizeof(Acc);  // values of a thread, where they are many

// Adds the parts of values of which a thread has WIDTH. Where there are many parts, `slices` threads share them.
template <int WIDTH, class Acc, class Store>
__device__ __forceinline__ void add_slices(const Acc* parts, unsigned values, unsigned count, unsigned slices, const Store& store) {
    __shared__ Acc sums[SUM_THREADS * WIDTH];
    const unsigned of_slice = SUM_THREADS / slices * WIDTH, slice = threadIdx.x * WIDTH / of_slice;
    const unsigned first_value = blockIdx.x * of_slice, own = threadIdx.x * WIDTH % of_slice, value = first_value + own;
    Acc sum[WIDTH];
#pragma unroll
    for (int j = 0; j < WIDTH; ++j) sum[j] = 0;
    wait_for_kernel_before();
    parts += value;
    if (value < values) {
#pragma unroll 1
        for (unsigned first = slice; first < count; first += PARTS_OF_SLICE * slices) {
            Acc some[PARTS_OF_SLICE][WIDTH];
#pragma unroll
            for (int i = 0; i < PARTS_OF_SLICE; ++i) {
                const unsigned part = first + i * slices;
                load_vector(some[i], parts + (long long)min(part, count - 1) * values);
#pragma unroll
                for (int j = 0; j < WIDTH; ++j)
                    if (part >= count) some[i][j] = 0;
            }
#pragma unroll
            for (int i = 0; i < PARTS_OF_SLICE; ++i)
#pragma unroll
                for (int j = 0; j < WIDTH; ++j) sum[j] += some[i][j];
        }
    }
    if (slices == 1) {
#pragma unroll
        for (int j = 0; j < WIDTH; ++j)
            if (value < values) store(value + j, sum[j]);
        return;
    }
#pragma unroll
    for (int j = 0; j < WIDTH; ++j) sums[slice * of_slice + own + j] = sum[j];
    __syncthreads();
    for (unsigned i = threadIdx.x; i < of_slice && first_value + i < values; i += SUM_THREADS) {
        Acc all = sums[i];
        for (unsigned other = 1; other < slices; ++other) all += sums[other * of_slice + i];
        store(first_value + i, all);
    }
}

// Adds the parts of each of `values` values, of which a part holds one after the other; `store` takes the sums. The launch has as
// many blocks as it takes if a thread has one value, or WIDE of them. All values of all parts are the workspace's, 256 MB at most.
template <class Acc, class Store>
__device__ __forceinline__ void add_parts(const Acc* parts, unsigned values, long long parts_of_value, const Store& store) {
    const unsigned count = (unsigned)parts_of_value;
    unsigned slices = 1;
    while (slices < MAX_SLICES && slices * PARTS_OF_SLICE < count) slices *= 2;
    if (gridDim.x * (SUM_THREADS / slices) < values) {
        add_slices<WIDE<Acc>>(parts, values, count, slices, store);
    } else {
        add_slices<1>(parts, values, count, slices, store);
    }
}
