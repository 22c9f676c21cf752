// What the kernels of weight gradients on Hopper share whose blocks own a tile of weights and a part of the boxes: where boxes
// and their elements are in an array, and the ring of stages that they are brought through.
#pragma once

#include "boxes.cuh"

#ifndef STAGES
#define STAGES 4
#endif

__device__ __forceinline__ int tiles_of(long long count, int tile) { return (int)((count + tile - 1) / tile); }

// What a thread fetches at a time, of some channels: where it is from the box's first element, and its place in shared memory.
struct alignas(16) Item {
    Index offset, w;
    short d, h;
    unsigned short place;
};

// Where a box starts in its array; it may be outside.
struct Origin {
    Index d, h, w, offset;
    const long long* extent;

    __device__ __forceinline__ Origin(Index d, Index h, Index w, const long long* extent, const long long* stride)
        : d(d), h(h), w(w), offset(d * (Index)stride[2] + h * (Index)stride[3] + w * (Index)stride[4]), extent(extent) {}

    __device__ __forceinline__ bool has_row(const Item& item) const {
        return within(d + item.d, extent[0]) && within(h + item.h, extent[1]);
    }
    __device__ __forceinline__ bool contains(const Item& item) const {
        return has_row(item) && within(w + item.w, extent[2]);
    }
};

// Stages in shared memory, filled by stagers and used by workers.
struct Ring {
    Barrier *full, *free;
    int place = 0, round = 0;

    __device__ __forceinline__ explicit Ring(Barrier* barriers) : full(barriers), free(barriers + STAGES) {}
    __device__ __forceinline__ void wait_until_free() const {
        if (round) barrier_wait(free + place, (round - 1) & 1);
    }
    __device__ __forceinline__ void wait_until_full() const { barrier_wait(full + place, round & 1); }
    // Of a stage that this thread has filled; workers may use it once all stagers are done with it.
    __device__ __forceinline__ void announce() {
        publish_shared_writes();
        barrier_arrive(full + place);
        next();
    }
    __device__ __forceinline__ void next() {
        if (++place == STAGES) place = 0, ++round;
    }
};
