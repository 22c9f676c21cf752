// Arrays that bulk tensor copies cannot read become channels-last before, with as many channels as fill pieces of 16 bytes. A
// thread turns a piece's channels: of as many positions of a row in registers, or of single positions.
#pragma once

#include "phase_channels.cuh"

// An array, and what is read of it.
struct Turn {
    long long n, channels, extent[3], stride[5];  // N, channels (of a group where it is prepared), D, H, W
    long long first;                              // element
    long long wide;                               // whether pieces along W are aligned
    long long groups, box[3], boxes[3];           // where it is prepared, along D, H, W
                                                  // (where phases are channels, what the array has and the padding)
    long long blocks;                             // of the launch, 0 where it is read as it is
};
constexpr int TURN_THREADS = 256;
constexpr int LOOSE = 2;  // positions of a thread, where pieces along W are not aligned

// Positions of a row, in pieces of as many channels as a piece has elements.
__device__ __forceinline__ Piece take_position(const Piece (&rows)[PIECE], int position) {
    unsigned words[PIECE];
#pragma unroll
    for (int c = 0; c < PIECE; ++c) words[c] = rows[c].value[position * 4 / PIECE];
#if DTYPE == FLOAT32
    return Piece{{words[0], words[1], words[2], words[3]}};
#else
    return take_halves(words, position % 2);
#endif
}

// Where phases are channels: a thread gathers a piece of a position, of which each channel is an element of another phase, with
// zeros for what is padding. The channels and extents of `t` are those of the copy.
__device__ __forceinline__ void turn_phases(const Stored* from, Stored* to, const Turn& t, unsigned block) {
    const unsigned pieces = (unsigned)((t.channels + PIECE - 1) / PIECE), index = block * (unsigned)TURN_THREADS + threadIdx.x;
    const int piece = (int)(index % pieces) * PIECE;
    unsigned rest = index / pieces;
    const int w = (int)(rest % (unsigned)t.extent[2]) * PHASES_W - (int)t.boxes[2];
    rest /= (unsigned)t.extent[2];
    const int h = (int)(rest % (unsigned)t.extent[1]) * PHASES_H - (int)t.boxes[1];
    rest /= (unsigned)t.extent[1];
    const int d = (int)(rest % (unsigned)t.extent[0]) * PHASES_D - (int)t.boxes[0];
    rest /= (unsigned)t.extent[0];
    if (rest >= (unsigned)t.n) return;
    from += rest * t.stride[0];
    unsigned bits[PIECE];
#pragma unroll
    for (int i = 0; i < PIECE; ++i) {
        const PhaseChannel of(piece + i);
        const bool is_there = piece + i < t.channels && within(d + of.d, t.box[0]) && within(h + of.h, t.box[1]) &&
                              within(w + of.w, t.box[2]);
        const long long place = of.channel * t.stride[1] + (d + of.d) * t.stride[2] + (h + of.h) * t.stride[3] +
                                (w + of.w) * t.stride[4];
        const unsigned element = bits_of(from[is_there ? place : 0]);  // without a branch
        bits[i] = is_there ? element : 0;
    }
    Piece words;
#pragma unroll
    for (int i = 0; i < 4; ++i) words.value[i] = PIECE == 4 ? bits[i] : bits[2 * i % PIECE] | bits[(2 * i + 1) % PIECE] << 16;
    reinterpret_cast<Piece*>(to)[index] = words;
}

// A thread takes a piece of positions that follow each other or, where these are not aligned, some that are half a warp apart.
__device__ __forceinline__ void turn(const Stored* from, Stored* to, const Turn& t, unsigned block) {
    const int pieces = (int)((t.channels + PIECE - 1) / PIECE);
    // Of a warp, so many neighbours write channels that follow each other, and the others take the next positions.
    const unsigned across = t.wide ? 4 : 2, down = 32 / across, of_row = (unsigned)t.extent[2];
    const unsigned width = t.wide ? of_row / PIECE : (of_row + LOOSE * down - 1) / (LOOSE * down);
    const unsigned places = (unsigned)(t.n * t.extent[0] * t.extent[1]) * width;
    const unsigned i = block * (unsigned)TURN_THREADS + threadIdx.x, sets = ((unsigned)pieces + across - 1) / across;
    const unsigned round = i / 32, own = i % 32 / across, piece = round % sets * across + i % across;
    const unsigned place = t.wide ? round / sets * down + own : round / sets;
    if (piece >= (unsigned)pieces || place >= places) return;
    const unsigned row = place / width, column = place % width, w = t.wide ? column * PIECE : column * (LOOSE * down) + own;
    const unsigned h = row % (unsigned)t.extent[1], slice = row / (unsigned)t.extent[1];
    const unsigned d = slice % (unsigned)t.extent[0], n = slice / (unsigned)t.extent[0];
    from += t.first + n * t.stride[0] + piece * PIECE * t.stride[1] + d * t.stride[2] + h * t.stride[3] + w * t.stride[4];
    Piece* const turned = reinterpret_cast<Piece*>(to) + ((long long)row * of_row + w) * pieces + piece;
    const int left = (int)t.channels - (int)piece * PIECE;
    if (t.wide) {
        Piece rows[PIECE];
#pragma unroll
        for (int c = 0; c < PIECE; ++c)
            rows[c] = c < left ? *reinterpret_cast<const Piece*>(from + c * t.stride[1]) : Piece{{0, 0, 0, 0}};
        issue_in_order();
#pragma unroll
        for (int position = 0; position < PIECE; ++position) turned[position * (long long)pieces] = take_position(rows, position);
    } else {
        Piece rows[LOOSE][PIECE];
#pragma unroll
        for (int j = 0; j < LOOSE; ++j) {
            const bool is_there = w + j * down < of_row;
            const Stored* const at = from + j * down * t.stride[4];
#pragma unroll
            for (int c = 0; c < PIECE; ++c) rows[j][c].value[0] = is_there && c < left ? bits_of(at[c * t.stride[1]]) : 0;
        }
        issue_in_order();
#pragma unroll
        for (int j = 0; j < LOOSE; ++j)
            if (w + j * down < of_row) turned[j * down * (long long)pieces] = take_position(rows[j], 0);
    }
}
