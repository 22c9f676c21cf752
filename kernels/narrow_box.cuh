// The way of 16-bit rows through `narrow_groups` on Hopper: a box of the result is put together in shared memory, as it will lie in
// memory, and leaves by bulk copies; x of the next box is fetched while this one is multiplied.
#pragma once

static_assert(sizeof(Stored) == 2 && !X_CHANNELS_LAST && !OUT_CHANNELS_LAST, "rows of 16-bit numbers");

// Whether rows follow each other in memory, so that all of a plane and channel are one stretch.
enum { ROWS = 1, WHOLE_ROWS };

// ---- x ------------------------------------------------------------------------------------------------------------------

// Where x may be copied asynchronously, a box is fetched as it is while the one before it is multiplied: [channel][row][unit], a unit
// being 16 bytes of a row that begin at a multiple of as many.
__device__ __forceinline__ int units_of(const Staged& s) { return ((s.w + 2 * (PIECE - 1)) / PIECE) | 1; }  // odd: other banks

__device__ __forceinline__ int pieces_of_raw(const Staged& s) {
    return PIECES * PIECE * s.d * s.h * units_of(s);
}

// A unit of a row: where it is in the box.
struct Place {
    int row, unit, next_row, next_unit;

    // Neighbouring threads take neighbouring rows.
    __device__ __forceinline__ explicit Place(int rows)
        : row((int)threadIdx.x % rows), unit((int)threadIdx.x / rows), next_row(THREADS % rows), next_unit(THREADS / rows) {}
    __device__ __forceinline__ void next(int rows) {
        row += next_row, unit += next_unit;
        if (row >= rows) row -= rows, ++unit;
    }
};

__device__ __forceinline__ void fetch(Piece* raw, const Stored* x, const Block& b, const Staged& s, const Problem& p) {
    const int early = (int)(first_w(b, p) & (PIECE - 1)), rows = s.d * s.h, units = (early + s.w + PIECE - 1) / PIECE, pitch = units_of(s);
    const int channels = (int)p.c_in;
#pragma unroll 1
    for (Place place(rows); place.unit < units; place.next(rows)) {
        const int slice = (int)quotient(place.row, p.box_magic[3]);
        const Index d = first_d(b, p) + slice, h = first_h(b, p) + (place.row - slice * s.h);
        const Index w = first_w(b, p) - early + place.unit * PIECE;
        const bool has_row = within(d, p.x_extent[0]) && within(h, p.x_extent[1]);
        const Stored* from = x + (has_row ? d * (Index)p.x_stride[2] + h * (Index)p.x_stride[3] : 0);
        Piece* to = raw + place.row * pitch + place.unit;
        if (p.x_vector == 16) {
            const bool inside = has_row && within(w, p.x_extent[2]);
            from += inside ? w : 0;
#pragma unroll 4
            for (int c = 0; c < channels; ++c, to += rows * pitch, from += (Index)p.x_stride[1]) copy_async_16_or_zeros(to, from, inside);
        } else {
#pragma unroll 1
            for (int c = 0; c < channels; ++c, to += rows * pitch, from += (Index)p.x_stride[1]) {
#pragma unroll
                for (int i = 0; i < PIECE; i += 2) {
                    const bool inside = has_row && within(w + i, p.x_extent[2]);
                    copy_async_4(reinterpret_cast<Stored*>(to) + i, from + (inside ? w + i : 0), inside ? 4 : 0);
                }
            }
        }
    }
    copy_async_commit();
}

// A piece: eight channels, of which eight positions each are loaded, at one of these.
__device__ __forceinline__ Piece piece_at(const Piece (&channel)[PIECE], int position) {
    Piece piece;
#pragma unroll
    for (int i = 0; i < 4; ++i)
        piece.value[i] = select_bytes(channel[2 * i].value[position / 2], channel[2 * i + 1].value[position / 2],
                                      position % 2 ? 0x7632 : 0x5410);
    return piece;
}

// Puts a box that was fetched in order.
__device__ __forceinline__ void put_in_order(Piece* to, const Piece* raw, const Block& b, const Staged& s, const Problem& p) {
    const int early = (int)(first_w(b, p) & (PIECE - 1)), rows = s.d * s.h, units = (early + s.w + PIECE - 1) / PIECE, pitch = units_of(s);
#pragma unroll 1
    for (Place place(rows); place.unit < units; place.next(rows)) {
        const int first = place.unit * PIECE - early;
        const Piece* const from = raw + place.row * pitch + place.unit;
        Piece* const staged = to + place.row * s.w + first;
#pragma unroll
        for (int piece = 0; piece < PIECES; ++piece) {
            Piece channel[PIECE];
#pragma unroll
            for (int i = 0; i < PIECE; ++i) {
                channel[i] = {{0, 0, 0, 0}};
                if (piece * PIECE + i < (int)p.c_in) channel[i] = from[(piece * PIECE + i) * rows * pitch];
            }
#pragma unroll
            for (int j = 0; j < PIECE; ++j)
                if ((unsigned)(first + j) < (unsigned)s.w) staged[piece * s.plane + j] = piece_at(channel, j);
        }
    }
}

// ---- the result ------------------------------------------------------------------------------------------------------------

// A box of the result in shared memory: how many bytes it is from a plane, a channel and a row to the next. All are what they are in
// memory modulo 16, so that every output lies as it will there, and what follows in memory follows here.
struct Pitches {
    int d, c, h;

    __device__ __forceinline__ explicit Pitches(const Problem& p) {
        const int rows = (int)p.box[1] * STRIDE_H, row = (int)p.box[2] * (STRIDE_W * (int)sizeof(Stored));
        h = p.out_vector == WHOLE_ROWS ? in_memory(p, 3) : at_residue(row, in_memory(p, 3) & 15, 16);
        c = at_residue(rows * h, in_memory(p, 1) & 15, 16);
        while (c % 64 / 16 != 1) c += 16;  // pairs of channels, of which a warp writes four at a time, begin in different banks
        d = at_residue(TILE_C * c, in_memory(p, 2) & 15, 16);
    }
    // Whether stretches of so many bytes begin and end at multiples of 16, as one that begins at `out` does.
    __device__ __forceinline__ bool aligned(const Stored* out, int bytes) const {
        return ((unsigned)(unsigned long long)out | (unsigned)(d | c | h | bytes)) % 16 == 0;
    }
    // Low bits of a distance in memory.
    __device__ __forceinline__ static int in_memory(const Problem& p, int axis) {
        return (int)((unsigned)p.out_stride[axis] * (unsigned)sizeof(Stored));
    }
};

// Puts the sums of some cells there; `result` is where the first output of the box is.
__device__ __forceinline__ void put(char* result, const Pitches& pitch, const Sums& sums, const float (&bias)[TILES_C][2], int first,
                                    int cells, const Block& b, const Problem& p) {
    const int lane = threadIdx.x % 32, left = (int)min(p.out_extent[2] - b.w * STRIDE_W, 1ll << 30);
    result += lane % 4 * 2 * pitch.c;
#pragma unroll
    for (int half = 0; half < 2 * TILES_M; ++half) {
        const int index = first + half * 8 + lane / 4;
        if (index >= cells) continue;
        const Cell cell = cell_of(index, p);
        const int w = cell.w * STRIDE_W;
        char* const to = result + cell.d * STRIDE_D * pitch.d + cell.h * STRIDE_H * pitch.h + w * (int)sizeof(Stored);
#pragma unroll
        for (int line = 0; line < STRIDE_D * STRIDE_H; ++line) {
            const int r_h = line % STRIDE_H, r_d = line / STRIDE_H;
#pragma unroll
            for (int c = 0; c < TILES_C; ++c) {
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    Stored* const row = reinterpret_cast<Stored*>(to + r_d * pitch.d + r_h * pitch.h + (c * 8 + i) * pitch.c);
#pragma unroll
                    for (int r_w = 0; r_w < STRIDE_W; ++r_w)
                        if (w + r_w < left)  // else the next row may begin here
                            narrow(sum_of(sums, bias, half / 2, CellsD::live(r_d), CellsH::live(r_h), CellsW::live(r_w), c,
                                          half % 2 * 2 + i),
                                   row[r_w]);
                }
            }
        }
    }
}

// What follows in memory, of a box in shared memory: rows of a plane and channel, or one of them.
struct Stretch {
    const char* from;
    Stored* to;
    int bytes;

    // Up to the first address that is a multiple of 16, and from there on in sixteens.
    __device__ __forceinline__ int head() const { return min((int)(-(unsigned)(unsigned long long)to % 16), bytes); }
    __device__ __forceinline__ int body() const { return (bytes - head()) / 16 * 16; }
};

// Moves a box to memory; `out` is where its first output goes.
__device__ __forceinline__ void store_box(const char* result, const Pitches& pitch, const Block& b, int channels, Stored* out,
                                          const Problem& p) {
    const int planes = (int)min(p.box[0] * STRIDE_D, p.out_extent[0] - b.d * STRIDE_D);
    const int height = (int)min(p.box[1] * STRIDE_H, p.out_extent[1] - b.h * STRIDE_H);
    const int width = (int)min(p.box[2] * STRIDE_W, p.out_extent[2] - b.w * STRIDE_W);
    const bool whole = p.out_vector == WHOLE_ROWS;
    const int bytes = (whole ? height : 1) * width * (int)sizeof(Stored), stretches = planes * TILE_C;
    const auto stretch = [&](int number) {
        const int channel = number % TILE_C, plane = number / TILE_C;
        return Stretch{result + plane * pitch.d + channel * pitch.c,
                       out + (plane * (Index)p.out_stride[2] + channel * (Index)p.out_stride[1]), channel < channels ? bytes : 0};
    };
    constexpr int END = 16 / (int)sizeof(Stored), ENDS = 2 * END;  // outputs of a stretch before and after whole sixteens, at most
    const bool has_ends = !pitch.aligned(out, bytes);
#pragma unroll 1
    for (int row = 0; row < (whole ? 1 : height); ++row, result += pitch.h, out += (Index)p.out_stride[3]) {
#pragma unroll 1
        for (int number = threadIdx.x; number < stretches; number += THREADS) {
            const Stretch own = stretch(number);
            const int head = own.head(), body = own.body();
            if (body) store_bulk(reinterpret_cast<char*>(own.to) + head, own.from + head, body);
        }
        if (!has_ends) continue;
        // Side by side, as they share sectors.
#pragma unroll 1
        for (int i = threadIdx.x; i < stretches * ENDS; i += THREADS) {
            const Stretch own = stretch(i / ENDS);
            const bool first = i % ENDS < END;
            const int head = own.head(), at = i % END * (int)sizeof(Stored) + (first ? 0 : head + own.body());
            if (at < (first ? head : own.bytes))
                *reinterpret_cast<Stored*>(reinterpret_cast<char*>(own.to) + at) = *reinterpret_cast<const Stored*>(own.from + at);
        }
    }
    store_bulk_commit();
}
