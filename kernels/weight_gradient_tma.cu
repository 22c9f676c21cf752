// Weight gradient of wide layers on Hopper (sm_90a): float16, bfloat16 and float32 (as TF32 or 3xTF32), boxes brought by bulk
// tensor copies.
//
//     out[ci, co, k] = sum over n, i of  x[n, ci, i] * y[n, co, i*stride + k*dilation - pad]
// A matrix product with M and N = channels of x and y, in either order, and K = positions i of the whole batch; every tap has
// sums of its own. A block owns a tile of weights and a share of the boxes of positions. It stages a box of x, and of y all
// that its taps reach: those of a tile meet, along each axis, elements of y with one remainder modulo the stride, and copies
// bring no others.
//
// Both are staged as rows of 128 bytes, 64 channels of one position, as copies store them. A wgmma takes such rows transposed,
// eight positions one after the other and the next eight anywhere, and an operand may start at any row: a tap is an offset into
// the staged y.
//
// It does not of float32. There y, in rows of 32 channels, is A and comes to registers, sixteen rows of M to a tap; and x is B, which
// a kernel before has prepared, box by box, in the order of shared memory.
//
// With FOLD, where kernel and stride are equal along W, the taps along W are channels of y: in memory, these follow each other.
//
// One thread issues copies, workers multiply. Arrays that copies cannot read are turned before, by a kernel of its own. Where
// they are too many, a launch takes some images of the batch, and the next one adds to its sums.
//
// Blocks write their sums, which a second kernel adds up and puts in the order of the weights; where a tile has one block and one
// tap, as neighbours in memory are then neighbours in the tile, it writes weights itself.
//
// Compile-time: kernel, stride, dilation, dtype, tile. Run-time: N, extents, the box, padding, channels, how many boxes are
// staged (plane) and how many a block takes (blocks). Where arrays are is the maps' business.
#ifndef DTYPE
#define DTYPE FLOAT16
#endif
#include "partial_sums.cuh"
#include "pieces.cuh"
#include "turn.cuh"

#ifndef WORKERS  // warpgroups that multiply
#define WORKERS 2
#endif
#ifndef ROWS_OF_X  // whether the rows of M are channels of x, and the columns those of y
#define ROWS_OF_X 0
#endif
#ifndef TILES_M  // times 64 channels, or 16 of float32
#define TILES_M 1
#endif
#ifndef TILES_N  // times 8 channels of the other array
#define TILES_N 16
#endif
#ifndef TAPS_D  // of a tile along each axis, and how far its neighbours are apart
#define TAPS_D 1
#define TAPS_H 2
#define TAPS_W 3
#endif
#ifndef APART_D
#define APART_D STRIDE_D
#endif
#ifndef APART_H
#define APART_H STRIDE_H
#endif
#ifndef APART_W
#define APART_W STRIDE_W
#endif
#ifndef FOLD  // taps along W that are channels of y, of each tap as many
#define FOLD 1
#endif
#ifndef ONE_PART  // whether each tile has one part: its sums are written as weights, at once or for the second kernel to order them
#define ONE_PART 0
#endif
#ifndef MIN_BLOCKS
#define MIN_BLOCKS 1
#endif
#ifndef MAX_PRODUCTS  // that a tensor core adds up, one after the other
#define MAX_PRODUCTS 4096
#endif
#ifndef WORKER_REGISTERS  // of a thread, after the warpgroup that copies gave up what it does not need
#define WORKER_REGISTERS 240
#define COPIER_REGISTERS 24
#endif

constexpr bool IN_REGISTERS = DTYPE == FLOAT32;  // A
static_assert(!(IN_REGISTERS && ROWS_OF_X), "A is y");

// How far taps of a tile are apart in y, in elements that its copies bring.
__host__ __device__ constexpr int hop(int taps, int stride, int dilation, int apart) {
    return taps > 1 ? dilation * apart / stride : 0;
}
constexpr int HOP_D = hop(TAPS_D, STRIDE_D, DILATION_D, APART_D), HOP_H = hop(TAPS_H, STRIDE_H, DILATION_H, APART_H);
constexpr int HOP_W = hop(TAPS_W, STRIDE_W, DILATION_W, APART_W);
static_assert(TAPS_D == 1 || DILATION_D * APART_D % STRIDE_D == 0, "one remainder");
static_assert(TAPS_H == 1 || DILATION_H * APART_H % STRIDE_H == 0, "one remainder");
static_assert(TAPS_W == 1 || DILATION_W * APART_W % STRIDE_W == 0, "one remainder");

// How the taps of an axis are cut into tiles: those that are APART from each other by as many.
template <int KERNEL, int TAPS, int APART> struct Cut {
    static constexpr int REMAINDERS = APART < KERNEL ? APART : KERNEL;
    static constexpr int COUNT = REMAINDERS * ceil_div(ceil_div(KERNEL, APART), TAPS);

    __host__ __device__ static constexpr int first(int tile) { return tile % REMAINDERS + tile / REMAINDERS * APART * TAPS; }
    __host__ __device__ static constexpr int tile_of(int tap) { return tap / APART / TAPS * REMAINDERS + tap % APART; }
    __host__ __device__ static constexpr int place_of(int tap) { return tap / APART % TAPS; }  // within its tile
};
typedef Cut<KERNEL_D, TAPS_D, APART_D> CutD;
typedef Cut<KERNEL_H, TAPS_H, APART_H> CutH;
typedef Cut<KERNEL_W, TAPS_W, APART_W> CutW;
constexpr int TILES_OF_TAPS = CutD::COUNT * CutH::COUNT * CutW::COUNT;

constexpr int WORKER_THREADS = 128 * WORKERS, THREADS = WORKER_THREADS + 128;
constexpr int TILE_ROWS = IN_REGISTERS ? 16 : 64, SIXTEENS = TILE_ROWS / 16;  // rows of M that have a tap
constexpr int ROWS = TILE_ROWS * TILES_M, CHANNELS_N = 8 * TILES_N;
constexpr int CHANNELS_IN = ROWS_OF_X ? ROWS : CHANNELS_N, CHANNELS_OUT = ROWS_OF_X ? CHANNELS_N : ROWS;
constexpr int ROW_BYTES = 128, GROUP = ROW_BYTES / (int)sizeof(Stored);  // of a staged row: its bytes, and channels
constexpr int GROUPS_X = ceil_div(CHANNELS_IN, GROUP), GROUPS_Y = ceil_div(CHANNELS_OUT, GROUP);
constexpr int TAPS = TAPS_D * TAPS_H * TAPS_W;
constexpr int UNITS = ceil_div(TAPS * TILES_M * SIXTEENS, 4 * WORKERS);  // of a worker: 64 rows
constexpr int SUMS_OF_UNIT = CHANNELS_N / 2;                 // of a thread
constexpr int SUMS = UNITS * SUMS_OF_UNIT;
constexpr int VALUES = SUMS * WORKER_THREADS;  // of a block
constexpr int MAX_STAGES = 8, ALIGNMENT = 1024;  // of what copies bring
constexpr int ALL_TAPS = KERNEL_D * KERNEL_H * KERNEL_W;
constexpr bool WRITES_WEIGHTS = ONE_PART && ALL_TAPS * FOLD * PHASES == 1;

// ---- weights ---------------------------------------------------------------------------------------------------------

// Tiles of all weights.
__device__ __forceinline__ unsigned tiles_of_weights(const Problem& p) {
    return (unsigned)(TILES_OF_TAPS * tiles_of(p.c_out, CHANNELS_OUT) * tiles_of(p.c_in, CHANNELS_IN) * p.groups);
}

// The first weight of a tile. Those that read the same x and y follow each other.
__device__ __forceinline__ Weight first_weight(unsigned tile, const Problem& p) {
    Weight first;
    first.w = CutW::first((int)(tile % CutW::COUNT));
    tile /= CutW::COUNT;
    first.h = CutH::first((int)(tile % CutH::COUNT));
    tile /= CutH::COUNT;
    first.d = CutD::first((int)(tile % CutD::COUNT));
    tile /= CutD::COUNT;
    first.co = (int)(tile % tiles_of(p.c_out, CHANNELS_OUT)) * CHANNELS_OUT;
    tile /= tiles_of(p.c_out, CHANNELS_OUT);
    first.ci = (int)(tile % tiles_of(p.c_in, CHANNELS_IN)) * CHANNELS_IN;
    first.group = tile / tiles_of(p.c_in, CHANNELS_IN);
    return first;
}

// Where a weight of the result is, from the first one on.
__device__ __forceinline__ long long place_of(Weight weight, const Ahead& ahead, const Problem& p) {
    weight.ci += ahead.ci, weight.co += ahead.co;
    weight.d += ahead.d, weight.h += ahead.h, weight.w += ahead.w;
    if (FOLD > 1) {
        const int channels = (int)p.c_out / FOLD;
        weight.w = weight.co / channels, weight.co %= channels;
    }
    if (PHASES > 1) {
        const PhaseChannel of(weight.co);
        weight.co = of.channel;
        weight.d = weight.d * PHASES_D + of.d, weight.h = weight.h * PHASES_H + of.h, weight.w = weight.w * PHASES_W + of.w;
    }
    return weight.offset(p);
}

// Which rows of the tile, as many as have one tap, and the tap: of a unit, or of 16 of its rows.
__device__ __forceinline__ int tile_of_unit(int unit) { return unit / TAPS; }
__device__ __forceinline__ int tap_of_unit(int unit) { return unit % TAPS; }

// ---- shares ----------------------------------------------------------------------------------------------------------

// Every block takes the same number of boxes. As many blocks as fit share a tile, each with boxes that follow each other, so that
// blocks of all tiles read the same boxes at about the same time. What boxes are left, the last ones of each tile, is cut into
// as many for the remaining blocks, tile by tile. A block's boxes of one tile are a part; its sums have a slot.
struct Shares {
    unsigned tiles, boxes, of_block;  // boxes of a block
    unsigned whole, rest;             // blocks that have one tile, for each of these, and what boxes are left

    __device__ __forceinline__ explicit Shares(const Problem& p)
        : tiles(tiles_of_weights(p)), boxes((unsigned)(p.n * p.tiles[0] * p.tiles[1] * p.tiles[2])), of_block((unsigned)p.blocks),
          whole(boxes / of_block), rest(boxes - whole * of_block) {}

    // Slots of a tile: of the blocks that have it alone, and from the first one on of the others.
    __device__ __forceinline__ unsigned first_of_rest(unsigned tile) const { return whole * tiles + tile * rest / of_block + tile; }
    __device__ __forceinline__ unsigned parts(unsigned tile) const {
        return whole + (rest ? ((tile + 1) * rest - 1) / of_block - tile * rest / of_block + 1 : 0);
    }
    __device__ __forceinline__ unsigned slot(unsigned tile, unsigned part) const {
        return part < whole ? part * tiles + tile : first_of_rest(tile) + part - whole;
    }
};

// A block's parts, one after the other.
struct Part {
    unsigned tile, first, count, slot;  // boxes
    unsigned next, end;                 // of the rests of all tiles

    __device__ __forceinline__ Part(const Shares& shares, unsigned block) : tile(0), first(0), count(0), slot(0), next(0), end(0) {
        const unsigned of_one = shares.whole * shares.tiles;
        if (block < of_one) {
            tile = block % shares.tiles, first = block / shares.tiles * shares.of_block, count = shares.of_block, slot = block;
        } else {
            next = (block - of_one) * shares.of_block;
            end = min(next + shares.of_block, shares.rest * shares.tiles);
            advance(shares);
        }
    }

    __device__ __forceinline__ bool exists() const { return count > 0; }
    __device__ __forceinline__ void advance(const Shares& shares) {
        count = 0;
        if (next >= end) return;
        tile = next / shares.rest;
        const unsigned at = next - tile * shares.rest;
        first = shares.whole * shares.of_block + at;
        count = min(shares.rest - at, end - next);
        slot = shares.first_of_rest(tile) + next / shares.of_block - tile * shares.rest / shares.of_block;
        next += count;
    }
};

// ---- the box ---------------------------------------------------------------------------------------------------------

// A box of positions in shared memory, in rows of which a group of channels follows the other; x of float32 as it is prepared.
struct Box {
    int d, h, w;        // extents, along W eights or where TAPS_W is 1 those of x
    int y_d, y_h, y_w;  // what the taps reach
    int x_bytes, y_bytes;  // of a group of channels, or of a part of x; those of y are aligned

    __device__ __forceinline__ explicit Box(const Problem& p)
        : d((int)p.box[0]), h((int)p.box[1]), w((int)p.box[2]), y_d(d + (TAPS_D - 1) * HOP_D), y_h(h + (TAPS_H - 1) * HOP_H),
          y_w(w + (TAPS_W - 1) * HOP_W), x_bytes(d * h * w * (IN_REGISTERS ? CHANNELS_IN * 4 : ROW_BYTES)),
          y_bytes((y_d * y_h * y_w * ROW_BYTES + ALIGNMENT - 1) & -ALIGNMENT) {}

    __device__ __forceinline__ int x_copied() const { return (IN_REGISTERS ? PARTS : GROUPS_X) * x_bytes; }
    // Stages are aligned: of float32, x comes in 512 bytes.
    __device__ __forceinline__ int stage() const {
        return (IN_REGISTERS ? (x_copied() + ALIGNMENT - 1) & -ALIGNMENT : x_copied()) + GROUPS_Y * y_bytes;
    }
    __device__ __forceinline__ int copied() const { return x_copied() + GROUPS_Y * y_d * y_h * y_w * ROW_BYTES; }
};

// The steps over a box, of two runs of eight positions each: along W where a row has an even number of them, else along H or D.
// Those of float32 are single runs. Where rows of y have nothing around them, they follow each other as those of x do: the rows of a
// plane are one then, or those of the box, and need not be whole runs.
struct Steps {
    int count, w, h;                  // all; of a row, and rows of a plane
    int x_w, x_row, x_plane, x_pair;  // from one to the next, beyond that at the end of a row and of a plane; from run to run
    int y_w, y_row, y_plane, y_pair;

    __device__ __forceinline__ explicit Steps(const Box& box)
        : count(box.d * box.h * box.w / (IN_REGISTERS ? 8 : 16)), w(box.w / 8), h(box.h), x_w(8), x_pair(8), y_w(8), y_pair(8) {
        int x_h = box.w, y_h = box.y_w;  // from row to row, and from plane to plane
        int x_d = box.h * x_h, y_d = box.y_h * y_h;
        if (TAPS_W == 1) {
            w = (TAPS_H == 1 ? box.d : 1) * x_d / 8, h = TAPS_H == 1 ? 1 : box.d;
            x_h = x_d, y_h = y_d;
        }
        if (IN_REGISTERS) {
        } else if (w % 2 == 0) {
            w /= 2, x_w = y_w = 16;
        } else if (h % 2 == 0) {
            h /= 2, x_pair = x_h, y_pair = y_h, x_h *= 2, y_h *= 2;
        } else {
            x_pair = x_d, y_pair = y_d, x_d *= 2, y_d *= 2;
        }
        x_row = x_h - w * x_w, y_row = y_h - w * y_w;
        x_plane = x_d - h * x_h, y_plane = y_d - h * y_h;
    }
};

// Where a step starts, in rows of x and y.
struct At {
    int x = 0, y = 0, w = 0, h = 0;

    __device__ __forceinline__ void advance(const Steps& steps) {
        x += steps.x_w, y += steps.y_w;
        if (++w < steps.w) return;
        w = 0, x += steps.x_row, y += steps.y_row;
        if (++h < steps.h) return;
        h = 0, x += steps.x_plane, y += steps.y_plane;
    }
};

// Where a tap's first position is in y.
__device__ __forceinline__ int place_of_tap(int tap, const Box& box) {
    const int w = tap % TAPS_W, h = tap / TAPS_W % TAPS_H, d = tap / (TAPS_W * TAPS_H);
    return (d * HOP_D * box.y_h + h * HOP_H) * box.y_w + w * HOP_W;
}

// Stages in shared memory, filled by copies and used by workers.
struct Ring {
    Barrier *full, *free;
    int stages, place = 0, round = 0;

    __device__ __forceinline__ Ring(Barrier* barriers, int stages) : full(barriers), free(barriers + MAX_STAGES), stages(stages) {}
    __device__ __forceinline__ void wait_until_free() const {
        if (round) barrier_wait(free + place, (round - 1) & 1);
    }
    __device__ __forceinline__ void wait_until_full() const { barrier_wait(full + place, round & 1); }
    __device__ __forceinline__ void next() {
        if (++place == stages) place = 0, ++round;
    }
};

// ---- arithmetic ------------------------------------------------------------------------------------------------------

struct Accumulators {
    float value[UNITS][SUMS_OF_UNIT];
};

// A tensor core cuts off what it adds up, with each product a little. For sums as accurate as float32, those of a box are added to
// others in registers.
constexpr bool BOX_BY_BOX = IN_REGISTERS && PRECISION == TF32X3;

// What memory keeps of four sums: a thread's of two rows that are eight apart and of two columns side by side.
#if ONE_PART
typedef Pack<Stored, 4> Kept;
#else
typedef Four Kept;
#endif

#if DTYPE == FLOAT32
// A lane's numbers of a product: rows g and g + 8 at two positions, of each as its parts.
struct Fragment {
    unsigned part[PARTS][4];
};
// How many a lane has, in turns, of the two steps that are unrolled; and how many are loaded before their products.
constexpr bool HAS_ROOM = WORKER_REGISTERS - PARTS * SUMS >= 56;
constexpr int FRAGMENTS = HAS_ROOM && UNITS % 2 == 0 ? 4 : HAS_ROOM && UNITS % 3 == 0 ? 3 : 2, AHEAD = FRAGMENTS > 2 ? 2 : 1;
static_assert(2 * UNITS % FRAGMENTS == 0 && AHEAD <= UNITS, "each product has one of its own");

// Reads them from y, where the first of the positions is `place` bytes behind the first row, in which its piece is that of the
// channel. Lanes of a warp have every second position, so that these lie in different banks; prepared x has the same order.
__device__ __forceinline__ void load(Fragment& a, SharedWords staged, int place) {
    unsigned words[4][1];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int at = place + i / 2 * ROW_BYTES;
        load_words<0>(words[i], staged + ((at ^ (at >> 3 & 0x70)) ^ i % 2 * 32));  // eight channels further: two pieces
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if (PRECISION == TF32X3) {
            split(__uint_as_float(words[i][0]), a.part[0][i], a.part[PARTS - 1][i]);
        } else {
            a.part[0][i] = words[i][0];
        }
    }
}

__device__ __forceinline__ void multiply_add(float (&sum)[SUMS_OF_UNIT], const Fragment& a, Operand b, int low,
                                             bool accumulate) {
    if (PRECISION == TF32X3) {
        wgmma_tf32_of_registers<CHANNELS_N>(sum, a.part[PARTS - 1], b, accumulate);
        wgmma_tf32_of_registers<CHANNELS_N>(sum, a.part[0], b + low, true);
    }
    wgmma_tf32_of_registers<CHANNELS_N>(sum, a.part[0], b, accumulate || PRECISION == TF32X3);
}
#else
__device__ __forceinline__ void multiply_add_transposed(float (&sum)[SUMS_OF_UNIT], Operand a, Operand b) {
#if DTYPE == FLOAT16
    wgmma_f16_transposed<CHANNELS_N>(sum, a, b, true);
#else
    wgmma_bf16_transposed<CHANNELS_N>(sum, a, b, true);
#endif
}
#endif

// ---- weights of a single tap -----------------------------------------------------------------------------------------

// From a channel of x to the next one in shared memory: lanes of a warp write to different banks, or two to the same.
constexpr int NEXT_ROW = CHANNELS_OUT + 4;

// Writes AT_ONCE weights at a time.
template <int AT_ONCE>
__device__ __forceinline__ void store_rows(const float* sums, const Weight& first, Stored* out, const Problem& p) {
    constexpr int OF_ROW = CHANNELS_OUT / AT_ONCE;
    out += first.offset(p);
#pragma unroll 4
    for (int i = (int)threadIdx.x; i < CHANNELS_IN * OF_ROW; i += WORKER_THREADS) {
        const int ci = i / OF_ROW, co = i % OF_ROW * AT_ONCE;
        if (first.ci + ci >= p.c_in || first.co + co >= p.c_out) continue;
        Pack<float, AT_ONCE> values;
#pragma unroll
        for (int j = 0; j < AT_ONCE; ++j) values.value[j] = sums[ci * NEXT_ROW + co + j];
        store_vector(values, out + ci * p.weight_stride[0] + co * p.weight_stride[1]);
    }
}

// All workers call it, when no more copies arrive.
__device__ __forceinline__ void store_weights(const Accumulators& acc, float* sums, const Weight& first, Stored* out, const Problem& p) {
    constexpr int VECTOR = 16 / (int)sizeof(Stored);
    const int lane = (int)threadIdx.x % 32, first_sixteen = (int)threadIdx.x / 128 * UNITS * 4 + (int)threadIdx.x / 32 % 4;
    warps_sync(1, WORKER_THREADS);  // nobody reads boxes any more
#pragma unroll
    for (int i = 0; i < SUMS; ++i) {
        const int sixteen = first_sixteen + i / SUMS_OF_UNIT * 4, sum = i % SUMS_OF_UNIT;
        const int row = sixteen * 16 + lane / 4 + sum / 2 % 2 * 8, column = sum / 4 * 8 + lane % 4 * 2 + sum % 2;
        const int place = ROWS_OF_X ? row * NEXT_ROW + column : column * NEXT_ROW + row;
        if (row < ROWS) sums[place] = acc.value[i / SUMS_OF_UNIT][sum];
    }
    warps_sync(1, WORKER_THREADS);
    const bool fits = p.weight_stride[1] == 1 && p.c_out % VECTOR == 0 && p.weight_stride[0] % VECTOR == 0 &&
                      (size_t)out % (VECTOR * sizeof(Stored)) == 0;
    if (fits) {
        store_rows<VECTOR>(sums, first, out, p);
    } else {
        store_rows<1>(sums, first, out, p);
    }
}

// ---- the kernel ------------------------------------------------------------------------------------------------------

// It writes `parts`, or `out`.
extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    weight_gradient_tma(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap y, float* parts, Stored* out,
                        const Problem p) {
    extern __shared__ __align__(1024) unsigned char shared_bytes[];
    const Shares shares(p);
    const Box box(p);
    Ring ring(reinterpret_cast<Barrier*>(shared_bytes), (int)p.plane);
    unsigned char* const stages = shared_bytes + ALIGNMENT;
    // Where x and y are in a stage: y has to be aligned.
    const int in_x = IN_REGISTERS ? GROUPS_Y * box.y_bytes : 0, in_y = IN_REGISTERS ? 0 : GROUPS_X * box.x_bytes;

    if (threadIdx.x == 0) {
        for (int i = 0; i < ring.stages; ++i) {
            barrier_init(ring.full + i, 1);
            barrier_init(ring.free + i, WORKER_THREADS / 32);
        }
        barrier_init_done();
    }
    __syncthreads();

    if (threadIdx.x >= WORKER_THREADS) {
        give_registers<COPIER_REGISTERS>();
        if (threadIdx.x > WORKER_THREADS) return;
        wait_for_kernel_before();
#pragma unroll 1
        for (Part part(shares, blockIdx.x); part.exists(); part.advance(shares)) {
            const Weight first = first_weight(part.tile, p);
            const int x_channel = (int)(first.group * p.c_in) + first.ci, y_channel = (int)(first.group * p.c_out) + first.co;
            const int y_w = first.w * DILATION_W - (int)p.pad[2], y_h = first.h * DILATION_H - (int)p.pad[1];
            const int y_d = first.d * DILATION_D - (int)p.pad[0];
            const int x_tile = (int)first.group * tiles_of(p.c_in, CHANNELS_IN) + first.ci / CHANNELS_IN;  // of prepared x
#pragma unroll 1
            for (unsigned index = part.first; index < part.first + part.count; ++index) {
                unsigned n = index;
                const int w = (int)take(n, p, 2) * box.w, h = (int)take(n, p, 1) * box.h, d = (int)take(n, p, 0) * box.d;
                unsigned char* const to = stages + ring.place * box.stage();
                Barrier* const full = ring.full + ring.place;
                ring.wait_until_free();
                barrier_arrive_expecting(full, (unsigned)box.copied());
                if (IN_REGISTERS) {
                    copy_box(to + in_x, &x, 0, 0, 0, (int)index, x_tile, full);
                } else {
#pragma unroll
                    for (int i = 0; i < GROUPS_X; ++i)
                        copy_box(to + in_x + i * box.x_bytes, &x, x_channel + i * GROUP, w, h, d, (int)n, full);
                }
#pragma unroll
                for (int i = 0; i < GROUPS_Y; ++i)
                    copy_box(to + in_y + i * box.y_bytes, &y, y_channel + i * GROUP, w * STRIDE_W + y_w, h * STRIDE_H + y_h,
                             d * STRIDE_D + y_d, (int)n, full);
                ring.next();
            }
        }
        return;
    }

    take_registers<WORKER_REGISTERS>();
    const int first_unit = (int)threadIdx.x / 128 * UNITS;
    const Steps steps(box);
#if DTYPE == FLOAT32
    int in_y_of[UNITS];  // where a lane's first number of a unit is
#pragma unroll
    for (int i = 0; i < UNITS; ++i) {
        const int sixteen = (first_unit + i) * 4 + (int)threadIdx.x / 32 % 4, lane = (int)threadIdx.x % 32;
        const int tile_m = tile_of_unit(sixteen), piece = tile_m % 2 * 4 + lane / 16, row = 2 * (lane % 4);
        const int place = (place_of_tap(tap_of_unit(sixteen), box) + row) * ROW_BYTES + tile_m / 2 * box.y_bytes;
        in_y_of[i] = tile_m < TILES_M ? place + piece * 16 + lane / 4 % 4 * 4 : 0;
    }
    const int low = box.x_bytes / 16;  // pieces from the high parts of x to the low ones
#else
    int in_a[UNITS], in_b[UNITS];  // where a unit's operands start, in pieces
#pragma unroll
    for (int i = 0; i < UNITS; ++i) {
        const bool is_used = tile_of_unit(first_unit + i) < TILES_M;
        const int tap = is_used ? 8 * place_of_tap(tap_of_unit(first_unit + i), box) : 0;
        const int rows = is_used ? tile_of_unit(first_unit + i) * (ROWS_OF_X ? box.x_bytes : box.y_bytes) / 16 : 0;
        in_a[i] = ROWS_OF_X && TILES_M == 1 ? 0 : (int)of_warp((unsigned)(rows + (ROWS_OF_X ? 0 : tap)));
        in_b[i] = ROWS_OF_X ? (int)of_warp((unsigned)tap) : 0;
    }
#endif
    // So many boxes of a part are added up in registers, then in memory.
    const unsigned unwritten = BOX_BY_BOX ? 0xffffffff : (unsigned)max(MAX_PRODUCTS / steps.count, 1);
    bool goes_on = false;
    Accumulators acc, other_sums;
    Accumulators& of_boxes = BOX_BY_BOX ? other_sums : acc;
#if DTYPE == FLOAT32
    Fragment a[FRAGMENTS];
#endif
#pragma unroll 1
    for (Part part(shares, blockIdx.x); part.exists();) {
        const unsigned boxes = min(part.count, unwritten);
#pragma unroll
        for (int i = 0; i < SUMS; ++i) of_boxes.value[i / SUMS_OF_UNIT][i % SUMS_OF_UNIT] = 0;
        int used = -1;  // the stage whose last products are under way
#pragma unroll 1
        for (unsigned index = 0; index < boxes; ++index) {
            ring.wait_until_full();
            const unsigned char* const staged = stages + ring.place * box.stage();
#if DTYPE == FLOAT32
            // Numbers are loaded while products before are under way, whose own ones stay until they are complete.
            const SharedWords staged_y = words_at(staged);
            Operand staged_x = of_warp(describe(staged + in_x, CHANNELS_IN * 16, 128));
            At at;
#pragma unroll
            for (int i = 0; i < AHEAD; ++i) load(a[i], staged_y, in_y_of[i]);
#pragma unroll 1
            for (int step = 0; step < steps.count; step += 2) {
#pragma unroll
                for (int i = 0; i < 2 * UNITS; ++i) {
                    wgmma_fence();
                    multiply_add(acc.value[i % UNITS], a[i % FRAGMENTS], staged_x + i / UNITS * 2 * CHANNELS_IN, low,
                                 !BOX_BY_BOX || step > 0 || i >= UNITS);
                    wgmma_commit();
                    wgmma_wait<FRAGMENTS - AHEAD>();
                    if (i + 1 == FRAGMENTS - AHEAD && used >= 0) {
                        __syncwarp();  // all lanes have read their y
                        if (threadIdx.x % 32 == 0) barrier_arrive(ring.free + used);
                        used = -1;
                    }
                    const int next = i + AHEAD;
                    if (next % UNITS == 0) at.advance(steps);
                    if (next < 2 * UNITS || step + 2 < steps.count)
                        load(a[next % FRAGMENTS], staged_y, at.y * ROW_BYTES + in_y_of[next % UNITS]);
                }
                staged_x = staged_x + 4 * CHANNELS_IN;
            }
            if (BOX_BY_BOX) {
                wgmma_wait<0>();
#pragma unroll
                for (int i = 0; i < SUMS; ++i)
                    of_boxes.value[i / SUMS_OF_UNIT][i % SUMS_OF_UNIT] += acc.value[i / SUMS_OF_UNIT][i % SUMS_OF_UNIT];
            }
#else
            const Operand of_x = describe_swizzled(staged + in_x, (unsigned)(ROW_BYTES * steps.x_pair), (unsigned)box.x_bytes);
            const Operand of_y = describe_swizzled(staged + in_y, (unsigned)(ROW_BYTES * steps.y_pair),
                                                   (unsigned)box.y_bytes);
            const Operand of_a = of_warp(ROWS_OF_X ? of_x : of_y), of_b = of_warp(ROWS_OF_X ? of_y : of_x);
            At at;
#pragma unroll 1
            for (int step = 0; step < steps.count; ++step) {
                const int in_rows = 8 * (ROWS_OF_X ? at.x : at.y), in_columns = 8 * (ROWS_OF_X ? at.y : at.x);
                wgmma_fence();
#pragma unroll
                for (int i = 0; i < UNITS; ++i)
                    multiply_add_transposed(acc.value[i], of_a + (in_a[i] + in_rows), of_b + (in_b[i] + in_columns));
                wgmma_commit();
                at.advance(steps);
                wgmma_wait<1>();
                if (used >= 0) {
                    if (threadIdx.x % 32 == 0) barrier_arrive(ring.free + used);
                    used = -1;
                }
            }
#endif
            used = ring.place;
            ring.next();
        }
        wgmma_wait<0>();
        if (IN_REGISTERS) __syncwarp();
        if (threadIdx.x % 32 == 0) barrier_arrive(ring.free + used);

        if (WRITES_WEIGHTS) {
            store_weights(of_boxes, reinterpret_cast<float*>(stages), first_weight(part.tile, p), out, p);
            part.count -= boxes;
            continue;
        }
        let_next_kernel_start();  // the second one: its blocks come as these end
        Kept* const to = reinterpret_cast<Kept*>(parts) + part.slot * (VALUES / 4) + threadIdx.x;
        if (p.patches[0] || goes_on) {
#pragma unroll
            for (int i = 0; i < SUMS / 4; ++i) {
                const Kept of_others = to[i * WORKER_THREADS];
#pragma unroll
                for (int k = 0; k < 4; ++k)
                    of_boxes.value[4 * i / SUMS_OF_UNIT][4 * i % SUMS_OF_UNIT + k] += widen(of_others.value[k]);
            }
        }
#pragma unroll
        for (int i = 0; i < SUMS / 4; ++i) {
            const float* const four = &of_boxes.value[4 * i / SUMS_OF_UNIT][4 * i % SUMS_OF_UNIT];
            Kept kept;
#pragma unroll
            for (int k = 0; k < 4; ++k) narrow(four[k], kept.value[k]);
            to[i * WORKER_THREADS] = kept;
        }
        part.count -= boxes;
        goes_on = part.count > 0;
        if (!goes_on) part.advance(shares);
    }
}

// ---- the kernel that adds the parts ----------------------------------------------------------------------------------
// A block adds up a patch of 16 rows and eight columns, of which a lane has four sums. Of few parts of many patches it has all taps
// of its patch, or of several where taps are few, puts them in shared memory, and writes them in the order of the weights. Else it
// has one tap, and its warps share the parts.

constexpr int MAX_BYTES_OF_SUMS = 40 * 1024, WARPS = SUM_THREADS / 32;
constexpr int PATCHES = TILES_M * SIXTEENS * TILES_N;  // of a tile
constexpr int OF_X = ROWS_OF_X ? 16 : 8, OF_Y = 128 / OF_X;                               // channels of a patch
// Weights in shared memory: channels of y are an odd number of words apart, and neighbours in a warp lie in different banks.
constexpr int NEXT_Y = ALL_TAPS | 1, NEXT_X = OF_Y * NEXT_Y + 4, RUN = OF_Y * ALL_TAPS;
constexpr bool IN_ORDER = OF_X * NEXT_X * 4 <= MAX_BYTES_OF_SUMS;
// Patches of a block that has all taps: so many keep its warps busy, and the most of a launch.
constexpr int FEWEST_TOGETHER = ALL_TAPS < WARPS ? ceil_div(2 * WARPS, ALL_TAPS) : 1, MOST_TOGETHER = 4;
constexpr int WANTED = FEWEST_TOGETHER < MOST_TOGETHER ? MOST_TOGETHER : FEWEST_TOGETHER;
constexpr int ROOM = IN_ORDER ? MAX_BYTES_OF_SUMS / (OF_X * NEXT_X * 4) : 1, TOGETHER = ROOM < WANTED ? ROOM : WANTED;

// `more` is copied: else its elements are loaded one by one.
template <class More> __device__ __forceinline__ void add(Four& sum, const More more) {
#pragma unroll
    for (int i = 0; i < 4; ++i) sum.value[i] += widen(more.value[i]);
}

struct Patch {
    unsigned tile;  // the first one of all taps
    int eight, sixteen, tile_m;  // its columns, and its rows: of those that have one tap

    __device__ __forceinline__ explicit Patch(unsigned number)
        : tile(number / PATCHES * (unsigned)TILES_OF_TAPS), eight((int)(number % TILES_N)),
          sixteen((int)(number / TILES_N % SIXTEENS)), tile_m((int)(number / (SIXTEENS * TILES_N) % TILES_M)) {}

    __device__ __forceinline__ Weight first(const Problem& p) const {
        Weight weight = first_weight(tile, p);
        const int rows = tile_m * TILE_ROWS + sixteen * 16;
        weight.ci += ROWS_OF_X ? rows : eight * 8;
        weight.co += ROWS_OF_X ? eight * 8 : rows;
        return weight;
    }
};

// Where a tap's sums of a patch are in the first part of blocks that have the tile alone, and of the others.
struct Sums {
    unsigned whole, rest;
    int parts_of_rest;
};
__device__ __forceinline__ Sums sums_of(const Patch& patch, int tap, const Shares& shares) {
    const int w = tap % KERNEL_W, h = tap / KERNEL_W % KERNEL_H, d = tap / (KERNEL_W * KERNEL_H);
    const unsigned tile = patch.tile + (unsigned)((CutD::tile_of(d) * CutH::COUNT + CutH::tile_of(h)) * CutW::COUNT + CutW::tile_of(w));
    const int of_tile = (CutD::place_of(d) * TAPS_H + CutH::place_of(h)) * TAPS_W + CutW::place_of(w);
    const int sixteen = (patch.tile_m * TAPS + of_tile) * SIXTEENS + patch.sixteen, unit = sixteen / 4;
    const int own = (unit % UNITS * TILES_N + patch.eight) * WORKER_THREADS + unit / UNITS * 128 + sixteen % 4 * 32;
    return {tile * (VALUES / 4) + own, shares.first_of_rest(tile) * (VALUES / 4) + own, (int)(shares.parts(tile) - shares.whole)};
}

// Where a lane's weight is in the patch.
__device__ __forceinline__ Ahead weight_of_lane(int sum) {
    const int row = (int)threadIdx.x % 32 / 4 + sum / 2 * 8, column = (int)threadIdx.x % 4 * 2 + sum % 2;
    return {ROWS_OF_X ? row : column, ROWS_OF_X ? column : row, 0, 0, 0};
}

// Writes AT_ONCE weights at a time, of all patches of the block: each has RUN of them in memory for a channel of x.
template <int AT_ONCE>
__device__ __forceinline__ void store_runs(const float* sums, const Weight (&first)[TOGETHER], int count, Stored* out, const Problem& p) {
    constexpr int OF_PATCH = OF_X * RUN / AT_ONCE;
#pragma unroll 1
    for (int i = (int)threadIdx.x; i < count * OF_PATCH; i += SUM_THREADS) {
        const int patch = i / OF_PATCH, ci = i % OF_PATCH / (RUN / AT_ONCE), place = i % (RUN / AT_ONCE) * AT_ONCE;
        const Weight& mine = first[patch];
        if (mine.ci + ci >= p.c_in || mine.co + place / ALL_TAPS >= p.c_out) continue;
        const float* const from = sums + (patch * OF_X + ci) * NEXT_X + place;
        Pack<float, AT_ONCE> values;
#pragma unroll
        for (int j = 0; j < AT_ONCE; ++j) values.value[j] = from[(place + j) / ALL_TAPS * (NEXT_Y - ALL_TAPS) + j];
        store_vector(values, out + mine.offset(p) + ci * p.weight_stride[0] + place);
    }
}

// Adds up units, each a patch's sums of one tap, AT_ONCE of a warp at a time, and puts them in shared memory.
template <int AT_ONCE>
__device__ __forceinline__ void add_units(const Kept* parts, const Sums* of_units, int units, float* sums, const Shares& shares) {
    const unsigned next = shares.tiles * (unsigned)(VALUES / 4);  // from part to part of blocks that have a tile alone
    const unsigned lane = threadIdx.x % 32;
#pragma unroll 1
    for (int unit = (int)threadIdx.x / 32; unit < units; unit += AT_ONCE * WARPS) {
        unsigned whole[AT_ONCE], rest[AT_ONCE];
        Four sum[AT_ONCE];
        int count[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const Sums from = of_units[min(unit + i * WARPS, units - 1)];
            whole[i] = from.whole + lane, rest[i] = from.rest + lane;
            count[i] = unit + i * WARPS < units ? from.parts_of_rest : -1;
            sum[i] = {{0, 0, 0, 0}};
        }
#pragma unroll 2
        for (unsigned part = 0; part < shares.whole; ++part) {
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                if (count[i] >= 0) add(sum[i], parts[whole[i]]);
                whole[i] += next;
            }
        }
#pragma unroll
        for (int part = 0; part < 2; ++part) {
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i)
                if (part < count[i]) add(sum[i], parts[rest[i] + part * (VALUES / 4)]);
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const int patch = (unit + i * WARPS) / ALL_TAPS, tap = (unit + i * WARPS) % ALL_TAPS;
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                const Ahead at = weight_of_lane(k);
                if (count[i] >= 0) sums[(patch * OF_X + at.ci) * NEXT_X + at.co * NEXT_Y + tap] = sum[i].value[k];
            }
        }
    }
}

__device__ __forceinline__ void add_in_order(const Kept* parts, Stored* out, const Problem& p) {
    constexpr int MOST_UNITS = 4, OF_FEWEST = ceil_div(FEWEST_TOGETHER * ALL_TAPS, WARPS);  // of a warp at a time
    constexpr int FEW_UNITS = OF_FEWEST < MOST_UNITS ? OF_FEWEST : MOST_UNITS;
    __shared__ float sums[IN_ORDER ? TOGETHER * OF_X * NEXT_X : 1];
    __shared__ Sums of_units[IN_ORDER ? TOGETHER * ALL_TAPS : 1];
    __shared__ Weight first[TOGETHER];
    const Shares shares(p);
    const unsigned together = (unsigned)p.out_vector, number = blockIdx.x * together;
    const int patches = (int)min(shares.tiles / TILES_OF_TAPS * PATCHES - number, together);
    for (int i = (int)threadIdx.x; i < patches * ALL_TAPS; i += SUM_THREADS)
        of_units[i] = sums_of(Patch(number + i / ALL_TAPS), i % ALL_TAPS, shares);
    const int last = SUM_THREADS - 1 - (int)threadIdx.x;  // whose warp has no units, if they are few
    if (last < patches) first[last] = Patch(number + last).first(p);
    __syncthreads();
    const int units = patches * ALL_TAPS;
    wait_for_kernel_before();
    if (units <= FEW_UNITS * WARPS) {
        add_units<FEW_UNITS>(parts, of_units, units, sums, shares);
    } else {
        add_units<MOST_UNITS>(parts, of_units, units, sums, shares);
    }
    __syncthreads();

    // Channels of y and taps may follow each other in memory, and then a run of weights is stored at once: all patches have such
    // runs, or none.
    constexpr int VECTOR = 16 / (int)sizeof(Stored);
    const bool follow = FOLD * PHASES == 1 && (KERNEL_W == 1 || p.weight_stride[4] == 1) &&
                        (KERNEL_H == 1 || p.weight_stride[3] == KERNEL_W) &&
                        (KERNEL_D == 1 || p.weight_stride[2] == KERNEL_H * KERNEL_W) && p.weight_stride[1] == ALL_TAPS;
    const auto fits = [&](int count) {
        return follow && p.c_out * ALL_TAPS % count == 0 && p.weight_stride[0] % count == 0 &&
               (size_t)out % (count * sizeof(Stored)) == 0;
    };
    if (fits(VECTOR)) return store_runs<VECTOR>(sums, first, patches, out, p);
    if (fits(2)) return store_runs<2>(sums, first, patches, out, p);
#pragma unroll 1
    for (int i = (int)threadIdx.x; i < patches * OF_X * RUN; i += SUM_THREADS) {
        const int patch = i / (OF_X * RUN), ci = i / RUN % OF_X, co = i / ALL_TAPS % OF_Y, tap = i % ALL_TAPS;
        const Weight& mine = first[patch];
        const Ahead ahead = {ci, co, tap / (KERNEL_W * KERNEL_H), tap / KERNEL_W % KERNEL_H, tap % KERNEL_W};
        if (mine.ci + ci < p.c_in && mine.co + co < p.c_out)
            narrow(sums[(patch * OF_X + ci) * NEXT_X + co * NEXT_Y + tap], out[place_of(mine, ahead, p)]);
    }
}

__device__ __forceinline__ void add_by_taps(const Kept* parts, Stored* out, const Problem& p) {
    __shared__ Four sums[WARPS][32];
    const Shares shares(p);
    const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32, tap = (int)(blockIdx.x % (unsigned)ALL_TAPS);
    const Patch patch(blockIdx.x / (unsigned)ALL_TAPS);
    const Sums from = sums_of(patch, tap, shares);
    const unsigned next = shares.tiles * (unsigned)(VALUES / 4);
    Four sum = {{0, 0, 0, 0}};
    wait_for_kernel_before();
#pragma unroll 8
    for (unsigned part = (unsigned)warp; part < shares.whole; part += WARPS) add(sum, parts[from.whole + part * next + lane]);
    if (warp < from.parts_of_rest) add(sum, parts[from.rest + warp * (VALUES / 4) + lane]);
    sums[warp][lane] = sum;
    __syncthreads();
    if (warp) return;
#pragma unroll
    for (int i = 1; i < WARPS; ++i) add(sum, sums[i][lane]);
    const Weight first = patch.first(p);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        Ahead ahead = weight_of_lane(i);
        ahead.d = tap / (KERNEL_W * KERNEL_H), ahead.h = tap / KERNEL_W % KERNEL_H, ahead.w = tap % KERNEL_W;
        if (first.ci + ahead.ci < p.c_in && first.co + ahead.co < p.c_out)
            narrow(sum.value[i], out[place_of(first, ahead, p)]);
    }
}

// out_vector: how many patches a block has all taps of, if it has.
extern "C" __global__ void __launch_bounds__(SUM_THREADS)
    weight_gradient_tma_add(const float* parts, Stored* out, const Problem p) {
    const Kept* const from = reinterpret_cast<const Kept*>(parts);
    if (IN_ORDER && p.out_vector) {
        add_in_order(from, out, p);
    } else {
        add_by_taps(from, out, p);
    }
}

// ---- the kernel that turns arrays ------------------------------------------------------------------------------------
// x of float32 is prepared as a wgmma takes columns of B: box by box, and in it [part][run][half of a run][channel], a piece of
// four positions. The first half has every second position of the run's eight, from the first one on. What a box has beyond x, and
// a tile beyond the channels, is zero.

struct Turns {
    Turn of[2];  // x and y
};

#if DTYPE == FLOAT32
// A thread has a run of one channel; neighbours have the next channels.
__device__ __forceinline__ void prepare(const Stored* from, Stored* to, const Turn& t, unsigned block) {
    const unsigned box_extent_w = (unsigned)t.box[2], box_extent_h = (unsigned)t.box[1];
    const unsigned runs = (unsigned)t.box[0] * box_extent_h * box_extent_w / 8;
    unsigned rest = block * (unsigned)TURN_THREADS + threadIdx.x;
    const int c = (int)(rest % CHANNELS_IN);
    rest /= CHANNELS_IN;
    const unsigned run = rest % runs;
    rest /= runs;
    const unsigned boxes = (unsigned)(t.n * t.boxes[0] * t.boxes[1] * t.boxes[2]);
    const unsigned index = rest % boxes, tile = rest / boxes, tiles = (unsigned)tiles_of(t.channels, CHANNELS_IN);
    if (tile >= tiles * (unsigned)t.groups) return;
    rest = index;
    const unsigned box_w = rest % (unsigned)t.boxes[2];
    rest /= (unsigned)t.boxes[2];
    const unsigned box_h = rest % (unsigned)t.boxes[1];
    rest /= (unsigned)t.boxes[1];
    const unsigned box_d = rest % (unsigned)t.boxes[0], n = rest / (unsigned)t.boxes[0];
    unsigned in_w = run * 8 % box_extent_w, in_h = run * 8 / box_extent_w;  // of the box
    unsigned d = box_d * (unsigned)t.box[0] + in_h / box_extent_h;
    in_h %= box_extent_h;
    const long long channel = tile % tiles * CHANNELS_IN + c;
    from += t.first + n * t.stride[0] + (tile / tiles * t.channels + channel) * t.stride[1];
    unsigned values[8];
    if (t.wide) {  // and boxes have whole runs along W
        const unsigned w = box_w * box_extent_w + in_w, h = box_h * box_extent_h + in_h;
        const bool exists = channel < t.channels && h < t.extent[1] && d < t.extent[0];
        from += d * t.stride[2] + h * t.stride[3] + w;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const Piece four = exists && w + half * 4 < t.extent[2] ? reinterpret_cast<const Piece*>(from)[half] : Piece{{0, 0, 0, 0}};
#pragma unroll
            for (int i = 0; i < 4; ++i) values[half * 4 + i] = four.value[i];
        }
    } else {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const unsigned w = box_w * box_extent_w + in_w, h = box_h * box_extent_h + in_h;
            const bool exists = channel < t.channels && w < t.extent[2] && h < t.extent[1] && d < t.extent[0];
            values[i] = exists ? bits_of(from[d * t.stride[2] + h * t.stride[3] + w * t.stride[4]]) : 0;
            if (++in_w < box_extent_w) continue;
            in_w = 0;
            if (++in_h < box_extent_h) continue;
            in_h = 0, ++d;
        }
    }
    unsigned of_parts[PARTS][8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const float value = __uint_as_float(values[i]);
        if (PRECISION == TF32X3) {
            split(value, of_parts[0][i], of_parts[PARTS - 1][i]);
        } else {
            of_parts[0][i] = to_tf32(value);
        }
    }
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
        const long long first = (((long long)(tile * boxes + index) * PARTS + part) * runs + run) * 2 * CHANNELS_IN + c;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const unsigned(&v)[8] = of_parts[part];
            reinterpret_cast<Piece*>(to)[first + half * CHANNELS_IN] = Piece{{v[half], v[half + 2], v[half + 4], v[half + 6]}};
        }
    }
}
#endif

extern "C" __global__ void __launch_bounds__(TURN_THREADS)
    weight_gradient_tma_turn(const Stored* x, const Stored* y, Stored* turned_x, Stored* turned_y, const Turns turns) {
    extern __shared__ __align__(1024) unsigned char shared_bytes[];
    let_next_kernel_start();
    const unsigned of_x = (unsigned)turns.of[0].blocks;
    if (blockIdx.x >= of_x) {
        if (PHASES > 1) return turn_phases(y, turned_y, turns.of[1], blockIdx.x - of_x);
        return turn(y, turned_y, turns.of[1], blockIdx.x - of_x, shared_bytes);
    }
#if DTYPE == FLOAT32
    prepare(x, turned_x, turns.of[0], blockIdx.x);
#else
    turn(x, turned_x, turns.of[0], blockIdx.x, shared_bytes);
#endif
}
