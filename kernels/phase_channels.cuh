// Phases of y that are channels of a gradient's problem, which then has no stride. Those along W run fastest, channels slowest.
#pragma once

#include "pieces.cuh"

#ifndef PHASES_D  // along each axis
#define PHASES_D 1
#define PHASES_H 1
#define PHASES_W 1
#endif
constexpr int PHASES = PHASES_D * PHASES_H * PHASES_W;

// Which channel of y one of these is, and which phase.
struct PhaseChannel {
    int channel, d, h, w;

    __device__ __forceinline__ explicit PhaseChannel(int number)
        : channel(number / PHASES), d(number % PHASES / (PHASES_H * PHASES_W)), h(number % (PHASES_H * PHASES_W) / PHASES_W),
          w(number % PHASES_W) {}
};
