// What the kernels for strided correlations on Hopper's tensor cores share: which classes of taps there are along D and H, the
// boxes of a launch, and the order of what is staged of each.
#pragma once

#include "wgmma_box.cuh"

// Classes that have a tap.
constexpr int LIVE_D = KERNEL_D < AxisD::STEP ? KERNEL_D : AxisD::STEP;
constexpr int LIVE_H = KERNEL_H < AxisH::STEP ? KERNEL_H : AxisH::STEP;
constexpr bool HAS_BITS = LIVE_D <= 4 && LIVE_H <= 4;  // an item for each of them

// Taps of a class, by its number.
template <class A, int KERNEL> __host__ __device__ constexpr int taps_of(int number) {
    return (KERNEL - number + A::STEP - 1) / A::STEP;
}

constexpr int REACH_D = (AxisD::MAX_TAPS - 1) * AxisD::HOP;
constexpr int REACH_H = (AxisH::MAX_TAPS - 1) * AxisH::HOP;

// The bits of an item for the classes along D (from 12 on) and H (from 8 on) that have this row of the box, and a tap for it.
__device__ __forceinline__ unsigned classes_of_row(const Problem& p, int d, int h, Index at_d, Index at_h) {
    unsigned bits = 0;
#pragma unroll
    for (int c = 0; c < LIVE_D; ++c)
        bits |= (unsigned)(d < (int)p.box[0] + (taps_of<AxisD, KERNEL_D>(c) - 1) * AxisD::HOP &&
                           within(at_d + c * DILATION_D, p.x_extent[0]))
                << (12 + c);
#pragma unroll
    for (int c = 0; c < LIVE_H; ++c)
        bits |= (unsigned)(h < (int)p.box[1] + (taps_of<AxisH, KERNEL_H>(c) - 1) * AxisH::HOP &&
                           within(at_h + c * DILATION_H, p.x_extent[1]))
                << (8 + c);
    return bits;
}

// Where the weights of a tap along D and one along H are, in the order in which they are needed: with all classes before and
// `slots` slots for each tap of these, and in the first slot of their own class. The next one has them `next` slots further.
struct PlaceOfTaps {
    long long first;
    int next;

    __device__ __forceinline__ PlaceOfTaps(int tap_d, int tap_h, long long slots) {
        const int d = tap_d % AxisD::STEP, h = tap_h % AxisH::STEP;
        const int of_d = taps_of<AxisD, KERNEL_D>(d), of_h = taps_of<AxisH, KERNEL_H>(h);
        int before = 0;
        for (int i = 0; i < d; ++i) before += taps_of<AxisD, KERNEL_D>(i) * KERNEL_H;
        for (int i = 0; i < h; ++i) before += of_d * taps_of<AxisH, KERNEL_H>(i);
        first = before * slots + tap_d / AxisD::STEP * of_h + tap_h / AxisH::STEP;
        next = of_d * of_h;
    }
};

struct Block {
    Index d, h, w;  // first position on each axis
    int tile_c;
    long long n, group;
};

__device__ __forceinline__ Block locate(unsigned index, const Problem& p) {
    // What reads the same x runs fastest, then what reads its neighbours.
    Block b;
    b.tile_c = (int)take(index, p, 3);
    b.group = take(index, p, 4);
    b.w = (Index)take(index, p, 2) * (Index)p.box[2];
    b.h = (Index)take(index, p, 1) * (Index)p.box[1];
    b.d = (Index)take(index, p, 0) * (Index)p.box[0];
    b.n = index;
    return b;
}

// Brings the slots of weights of a box, which follow each other.
template <int BYTES> __device__ __forceinline__ void bring_weights(Ring& ring, Piece* slots, const Piece* from, int count) {
    constexpr int SLOT = BYTES / (int)sizeof(Piece);
    for (int i = 0; i < count; ++i) {
        ring.wait_until_free();
        barrier_arrive_expecting(ring.full + ring.place, BYTES);
        copy_bulk(slots + ring.place * SLOT, from, BYTES, ring.full + ring.place);
        ring.next<RING>();
        from += SLOT;
    }
}

// Calls `visit(class along D, class along H, set of classes along W, chunk)` in the order of the stages.
template <int SETS_W, class Visit> __device__ __forceinline__ void each_stage(int chunks, const Visit& visit) {
#pragma unroll 1
    for (int d = 0; d < LIVE_D; ++d) {
#pragma unroll 1
        for (int h = 0; h < LIVE_H; ++h) {
#pragma unroll 1
            for (int set = 0; set < SETS_W; ++set) {
#pragma unroll 1
                for (int chunk = 0; chunk < chunks; ++chunk) visit(d, h, set, chunk);
            }
        }
    }
}
