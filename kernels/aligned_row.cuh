// Outputs along W in runs that begin at a multiple of the stride, so that stores are aligned: those of position t are
// STRIDE_W * t up to STRIDE_W * t + STRIDE_W - 1, whose phases depend on SHIFT_W, the padding modulo the stride.
// Tap k reaches STRIDE_W * t + residue_w(k) and reads x at t + pad / STRIDE_W + offset_w(k).
#pragma once

__host__ __device__ constexpr int residue_w(int tap) {
    return ((tap * DILATION_W - SHIFT_W) % STRIDE_W + STRIDE_W) % STRIDE_W;
}
__host__ __device__ constexpr int offset_w(int tap) {
    return (residue_w(tap) + SHIFT_W - tap * DILATION_W) / STRIDE_W;  // without a remainder
}
constexpr int FIRST_W = offset_w(KERNEL_W - 1);  // the smallest offset, and the largest
constexpr int LAST_W = offset_w(0);
