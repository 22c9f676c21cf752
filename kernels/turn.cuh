// Arrays that bulk tensor copies cannot read become channels-last before, with as many channels as fill pieces of 16 bytes. Rows
// whose elements follow each other come in bulk and are turned in shared memory; of others a thread turns a piece's channels.
#pragma once

#include "phase_channels.cuh"

// An array, and what is read of it.
struct Turn {
    long long n, channels, extent[3], stride[5];  // N, channels (of a group where it is prepared), D, H, W
    long long first;                              // element
    long long wide;                               // whether pieces along W are aligned
    long long groups, box[3], boxes[3];           // where it is prepared, along D, H, W
                                                  // (where phases are channels, what the array has and the padding;
                                                  // where rows come in bulk, box[2] is how many positions a block has)
    long long blocks;                             // of the launch, 0 where it is read as it is
};
constexpr int TURN_THREADS = 256;
constexpr int LOOSE = 2;  // positions of a thread, where it loads single elements

// A position's piece of the bits of its channels.
__device__ __forceinline__ Piece piece_of(const unsigned (&bits)[PIECE]) {
    Piece piece;
#pragma unroll
    for (int i = 0; i < 4; ++i) piece.value[i] = PIECE == 4 ? bits[i] : bits[2 * i % PIECE] | bits[(2 * i + 1) % PIECE] << 16;
    return piece;
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
    reinterpret_cast<Piece*>(to)[index] = piece_of(bits);
}

// A thread takes a piece of positions that are half a warp apart.
__device__ __forceinline__ void turn_elements(const Stored* from, Stored* to, const Turn& t, unsigned block) {
    const int pieces = (int)((t.channels + PIECE - 1) / PIECE);
    // Of a warp, so many neighbours write channels that follow each other, and the others take the next positions.
    const unsigned across = 2, down = 32 / across, of_row = (unsigned)t.extent[2];
    const unsigned width = (of_row + LOOSE * down - 1) / (LOOSE * down);
    const unsigned places = (unsigned)(t.n * t.extent[0] * t.extent[1]) * width;
    const unsigned i = block * (unsigned)TURN_THREADS + threadIdx.x, sets = ((unsigned)pieces + across - 1) / across;
    const unsigned round = i / 32, own = i % 32 / across, piece = round % sets * across + i % across, place = round / sets;
    if (piece >= (unsigned)pieces || place >= places) return;
    const unsigned row = place / width, w = place % width * (LOOSE * down) + own;
    const unsigned h = row % (unsigned)t.extent[1], slice = row / (unsigned)t.extent[1];
    const unsigned d = slice % (unsigned)t.extent[0], n = slice / (unsigned)t.extent[0];
    from += t.first + n * t.stride[0] + piece * PIECE * t.stride[1] + d * t.stride[2] + h * t.stride[3] + w * t.stride[4];
    Piece* const turned = reinterpret_cast<Piece*>(to) + ((long long)row * of_row + w) * pieces + piece;
    const int left = (int)t.channels - (int)piece * PIECE;
    unsigned bits[LOOSE][PIECE];
#pragma unroll
    for (int j = 0; j < LOOSE; ++j) {
        const bool is_there = w + j * down < of_row;
        const Stored* const at = from + j * down * t.stride[4];
#pragma unroll
        for (int c = 0; c < PIECE; ++c) bits[j][c] = is_there && c < left ? bits_of(at[c * t.stride[1]]) : 0;
    }
    issue_in_order();
#pragma unroll
    for (int j = 0; j < LOOSE; ++j)
        if (w + j * down < of_row) turned[j * down * (long long)pieces] = piece_of(bits[j]);
}

// A block takes positions of a row that follow each other, and up to eight pieces of their channels. A bulk copy brings those of a
// channel, which lie in shared memory as in memory modulo 16 bytes; what is left at a row's ends comes by single elements. Pieces
// are written so that lanes next to each other have all of a position, then the next one.
constexpr int MOST_PIECES = 8;       // of a position
constexpr int BEYOND = 128 / PIECE;  // bytes from a row's elements to the next row's

__device__ __forceinline__ void turn_rows(const Stored* from, Stored* to, const Turn& t, unsigned block, unsigned char* shared) {
    Barrier* const landed = reinterpret_cast<Barrier*>(shared);
    unsigned char* const rows = shared + 16;
    const int pieces = (int)((t.channels + PIECE - 1) / PIECE), sets = (pieces + MOST_PIECES - 1) / MOST_PIECES;
    const int of_set = (pieces + sets - 1) / sets, across = of_set > 4 ? 8 : of_set > 2 ? 4 : of_set;
    const unsigned of_row = (unsigned)t.extent[2], width = (unsigned)t.box[2], of_rows = (of_row + width - 1) / width;
    const int first_piece = (int)(block % (unsigned)sets) * of_set;
    const unsigned box = block / (unsigned)sets, row = box / of_rows, w = (box - row * of_rows) * width;
    const unsigned h = row % (unsigned)t.extent[1], slice = row / (unsigned)t.extent[1];
    const unsigned d = slice % (unsigned)t.extent[0], n = slice / (unsigned)t.extent[0];
    from += t.first + n * t.stride[0] + first_piece * PIECE * t.stride[1] + d * t.stride[2] + h * t.stride[3] + w;
    const int count = (int)min(width, of_row - w), left = (int)(of_row - w);
    const int channels = min((int)t.channels - first_piece * PIECE, of_set * PIECE);
    // Lanes read the same channel of up to eight pieces, and four positions, from different banks.
    const int next_row = (int)width * (int)sizeof(Stored) + BEYOND, next_piece = PIECE * next_row + 16;
    const int start = (int)(reinterpret_cast<unsigned long long>(from) / sizeof(Stored) % PIECE);

    if (threadIdx.x == 0) {
        barrier_init(landed, channels);
        barrier_init_done();
    }
    __syncthreads();
    const int c = (int)threadIdx.x;
    if (c < channels) {
        const Stored* const own = from + c * t.stride[1];
        Stored* const to_row = reinterpret_cast<Stored*>(rows + c / PIECE * next_piece + c % PIECE * next_row);
        const int before = (int)((start + c * t.stride[1]) & (PIECE - 1)), after = (PIECE - (before + count) % PIECE) % PIECE;
        const int first = before <= (int)w ? -before : PIECE - before;
        const int end = count + after <= left ? count + after : count + after - PIECE;
        const unsigned bytes = end > first ? (end - first) * (int)sizeof(Stored) : 0;
        barrier_arrive_expecting(landed, bytes);
        if (bytes) copy_bulk(to_row + before + first, own + first, bytes, landed);
        for (int i = 0; i < min(first, count); ++i) to_row[before + i] = own[i];
        for (int i = max(max(first, end), 0); i < count; ++i) to_row[before + i] = own[i];
    }
    for (int i = channels; i < of_set * PIECE; ++i)  // channels of the last piece that are none
        for (int at = c; at < next_row / 4; at += TURN_THREADS)
            reinterpret_cast<unsigned*>(rows + i / PIECE * next_piece + i % PIECE * next_row)[at] = 0;
    __syncthreads();
    barrier_wait(landed, 0);

    const int piece = c % across;
    if (piece >= of_set || first_piece + piece >= pieces) return;
    const Stored* of_channel[PIECE];
#pragma unroll
    for (int i = 0; i < PIECE; ++i)
        of_channel[i] = reinterpret_cast<const Stored*>(rows + piece * next_piece + i * next_row) +
                        ((start + i * t.stride[1]) & (PIECE - 1));
    Piece* const turned = reinterpret_cast<Piece*>(to) + ((long long)row * of_row + w) * pieces + first_piece + piece;
#pragma unroll 4
    for (int position = c / across; position < count; position += TURN_THREADS / across) {
        unsigned bits[PIECE];
#pragma unroll
        for (int i = 0; i < PIECE; ++i) bits[i] = bits_of(of_channel[i][position]);
        turned[position * (long long)pieces] = piece_of(bits);
    }
}

__device__ __forceinline__ void turn(const Stored* from, Stored* to, const Turn& t, unsigned block, unsigned char* shared) {
    if (t.box[2]) {
        turn_rows(from, to, t, block, shared);
    } else {
        turn_elements(from, to, t, block);
    }
}
