// Boxes of an array in shared memory, for the kernels that correlate: which positions a block needs, and their staging.
#pragma once

#include "common.cuh"

// One axis of a box of y, for BOX consecutive positions i and TAPS taps: y is read at i * STRIDE + k * DILATION. Only
// every GAP-th element is staged; among these, neighbouring positions are STEP apart and neighbouring taps HOP.
template <int TAPS, int STRIDE, int DILATION, int BOX> struct Staged {
    static constexpr int GAP = TAPS > 1 ? gcd(STRIDE, DILATION) : STRIDE;
    static constexpr int STEP = STRIDE / GAP;
    static constexpr int HOP = TAPS > 1 ? DILATION / GAP : 0;
    static constexpr int EXTENT = (BOX - 1) * STEP + (TAPS - 1) * HOP + 1;
};

// Where a box lies in its array: the first element, which may be outside, and the array's extents and strides.
struct Place {
    Index d, h, w;
    const long long* extent;  // D, H, W
    const long long* stride;  // N, channels, D, H, W
};

// How many consecutive of `threads` threads share one row of `width` elements: a divisor that wastes little.
__host__ __device__ constexpr int row_threads(int width, int threads) {
    int best = 32;
    for (int t = 16; t <= threads; t += 8) {
        if (threads % t == 0 && ceil_div(width, t) * t <= ceil_div(width, best) * best) best = t;
    }
    return best;
}

// Copies a box into shared memory, widened; what lies outside the array becomes zero. `Box` has the extents C, D, H, W,
// the gaps GAP_D, GAP_H, GAP_W between staged elements, the distances CHANNEL, PLANE, ROW in shared memory, and
// CHANNELS_LAST, the order in which elements are visited. `channel(c)` is the number of channel c in the array, or -1.
template <class Box, int THREADS, class Acc, class Stored, class Channel>
__device__ __forceinline__ void stage_box(Acc* to, const Stored* from, const Place& place, const Channel& channel) {
    constexpr int COLUMNS = Box::CHANNELS_LAST ? Box::C : Box::W;
    constexpr int ACROSS = Box::CHANNELS_LAST && THREADS % Box::C == 0 ? Box::C : row_threads(COLUMNS, THREADS);
    constexpr int DOWN = THREADS / ACROSS;
    constexpr int LINES = Box::D * Box::H * (Box::CHANNELS_LAST ? Box::W : Box::C);
    constexpr int BATCH = 4;  // loads in flight a thread
    for (int column = threadIdx.x % ACROSS; column < COLUMNS; column += ACROSS) {
#pragma unroll 1
        for (int first = threadIdx.x / ACROSS; first < LINES; first += BATCH * DOWN) {
            Acc value[BATCH];
            int target[BATCH];
#pragma unroll
            for (int i = 0; i < BATCH; ++i) {
                const int row = first + i * DOWN;
                int c, d, h, w;
                if (Box::CHANNELS_LAST) {
                    c = column, w = row % Box::W, h = row / Box::W % Box::H, d = row / (Box::W * Box::H);
                } else {
                    w = column, h = row % Box::H, d = row / Box::H % Box::D, c = row / (Box::H * Box::D);
                }
                const Index at_d = place.d + d * Box::GAP_D, at_h = place.h + h * Box::GAP_H;
                const Index at_w = place.w + w * Box::GAP_W;
                const int number = row < LINES ? channel(c) : -1;
                target[i] = row < LINES ? c * Box::CHANNEL + d * Box::PLANE + h * Box::ROW + w : -1;
                value[i] = 0;
                if (number >= 0 && within(at_d, place.extent[0]) && within(at_h, place.extent[1]) &&
                    within(at_w, place.extent[2])) {
                    value[i] = widen(from[number * (Index)place.stride[1] + at_d * (Index)place.stride[2] +
                                          at_h * (Index)place.stride[3] + at_w * (Index)place.stride[4]]);
                }
            }
#pragma unroll
            for (int i = 0; i < BATCH; ++i)
                if (target[i] >= 0) to[target[i]] = value[i];
        }
    }
}
