// Calls the PTX header's functions for Hopper: products with given descriptors, and a small kernel with all of them.
#include "ptx.cuh"

// Bring what shared memory is to hold.
__device__ void fill(unsigned char* shared_bytes, const uint4* image, int pieces) {
    for (int i = threadIdx.x; i < pieces; i += 128) reinterpret_cast<uint4*>(shared_bytes)[i] = image[i];
    publish_shared_writes();
    __syncthreads();
}

// Where the i-th sum of a thread is in D.
template <int COLUMNS_OF_D>
__device__ int place_of_sum(int i) {
    const int first = (threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4) * COLUMNS_OF_D + threadIdx.x % 4 * 2;
    return first + i / 4 * 8 + i % 4 / 2 * 8 * COLUMNS_OF_D + i % 2;
}

// D = A B + D, with A of 64 rows. `image` is what shared memory holds; starts and distances are in bytes.
#define MULTIPLY(name, columns, function)                                                                               \
    extern "C" __global__ void name(const uint4* image, int pieces, int a_start, int a_piece, int a_group, int b_start,  \
                                    int b_piece, int b_group, const float* c, float* d) {                                \
        extern __shared__ __align__(128) unsigned char shared_bytes[];                                                   \
        fill(shared_bytes, image, pieces);                                                                               \
        float sum[columns / 2];                                                                                          \
        for (int i = 0; i < columns / 2; ++i) sum[i] = c[place_of_sum<columns>(i)];                                      \
        wgmma_fence();                                                                                                   \
        function<columns>(sum, describe(shared_bytes, a_piece, a_group) + a_start / 16,                                  \
                          describe(shared_bytes + b_start, b_piece, b_group), true);                                     \
        wgmma_commit();                                                                                                  \
        wgmma_wait<0>();                                                                                                 \
        for (int i = 0; i < columns / 2; ++i) d[place_of_sum<columns>(i)] = sum[i];                                      \
    }
MULTIPLY(multiply_tf32_8, 8, wgmma_tf32)
MULTIPLY(multiply_tf32_128, 128, wgmma_tf32)
MULTIPLY(multiply_f16_24, 24, wgmma_f16)
MULTIPLY(multiply_f16_128, 128, wgmma_f16)
MULTIPLY(multiply_bf16_64, 64, wgmma_bf16)
MULTIPLY(transposed_f16_24, 24, wgmma_f16_transposed)
MULTIPLY(transposed_bf16_128, 128, wgmma_bf16_transposed)

// The same of swizzled rows, 64 of A or columns of B each: starts, from run to run and from group to group, in bytes.
extern "C" __global__ void swizzled_bf16_136(const uint4* image, int pieces, int a_start, int a_run, int a_group, int b_start, int b_run,
                                             int b_group, const float* c, float* d) {
    constexpr int columns = 136;
    extern __shared__ __align__(1024) unsigned char shared_bytes[];
    fill(shared_bytes, image, pieces);
    float sum[columns / 2];
    for (int i = 0; i < columns / 2; ++i) sum[i] = c[place_of_sum<columns>(i)];
    wgmma_fence();
    wgmma_bf16_transposed<columns>(sum, describe_swizzled(shared_bytes, a_run, a_group) + a_start / 16,
                                   describe_swizzled(shared_bytes + b_start, b_run, b_group), true);
    wgmma_commit();
    wgmma_wait<0>();
    for (int i = 0; i < columns / 2; ++i) d[place_of_sum<columns>(i)] = sum[i];
}

// The same of K-major rows, of A alone, that are swizzled: where they start, and from eight to eight in rows.
#define MULTIPLY_ROWS(name, row_bytes)                                                                                               \
    extern "C" __global__ void name(const uint4* image, int pieces, int a_start, int a_eight, int b_start, int b_piece, int b_group, \
                                    const float* c, float* d) {                                                                      \
        constexpr int columns = 24;                                                                                                  \
        extern __shared__ __align__(1024) unsigned char shared_bytes[];                                                              \
        fill(shared_bytes, image, pieces);                                                                                           \
        float sum[columns / 2];                                                                                                      \
        for (int i = 0; i < columns / 2; ++i) sum[i] = c[place_of_sum<columns>(i)];                                                  \
        wgmma_fence();                                                                                                               \
        wgmma_bf16<columns>(sum, describe_rows<row_bytes>(shared_bytes, a_eight) + a_start / 16,                                     \
                            describe(shared_bytes + b_start, b_piece, b_group), true);                                               \
        wgmma_commit();                                                                                                              \
        wgmma_wait<0>();                                                                                                             \
        for (int i = 0; i < columns / 2; ++i) d[place_of_sum<columns>(i)] = sum[i];                                                  \
    }
MULTIPLY_ROWS(rows_of_32, 32)
MULTIPLY_ROWS(rows_of_64, 64)
MULTIPLY_ROWS(rows_of_128, 128)

// The same with A in registers: `a` has a thread's four words one after the other.
#define MULTIPLY_REGISTERS(name, columns, function)                                                                     \
    extern "C" __global__ void name(const uint4* image, int pieces, const uint4* a, int b_start, int b_piece, int b_group,   \
                                    float* d) {                                                                          \
        extern __shared__ __align__(128) unsigned char shared_bytes[];                                                   \
        fill(shared_bytes, image, pieces);                                                                               \
        const uint4 mine = a[threadIdx.x];                                                                               \
        unsigned words[4] = {mine.x, mine.y, mine.z, mine.w};                                                            \
        float sum[columns / 2];                                                                                          \
        wgmma_fence();                                                                                                   \
        function<columns>(sum, words, describe(shared_bytes + b_start, b_piece, b_group), false);                           \
        wgmma_commit();                                                                                                  \
        wgmma_wait<0>();                                                                                                 \
        for (int i = 0; i < columns / 2; ++i) d[place_of_sum<columns>(i)] = sum[i];                                      \
    }
MULTIPLY_REGISTERS(registers_tf32_40, 40, wgmma_tf32_of_registers)
MULTIPLY_REGISTERS(registers_f16_24, 24, wgmma_f16_of_registers)
MULTIPLY_REGISTERS(registers_bf16_64, 64, wgmma_bf16_of_registers)

// Three times A B, through static shared memory that bulk copies fill.
extern "C" __global__ void triple(const uint4* a, const uint4* b, float* d) {
    __shared__ __align__(128) uint4 of_a[2][64], of_b[2][8];  // [piece][row]
    __shared__ Barrier arrived;
    if (threadIdx.x == 0) {
        barrier_init(&arrived, 1);
        barrier_init_done();
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        barrier_arrive_expecting(&arrived, sizeof of_a + sizeof of_b);
        copy_bulk(of_a, a, sizeof of_a, &arrived);
        copy_bulk(of_b, b, sizeof of_b, &arrived);
    }
    barrier_wait(&arrived, 0);
    float sum[4];
    wgmma_fence();
    wgmma_f16<8>(sum, describe(of_a, 1024, 128), describe(of_b, 128, 128), false);
    wgmma_commit();
    wgmma_wait<0>();
    for (int i = 0; i < 4; ++i) sum[i] *= 2;
    wgmma_fence();  // the sums were used
    wgmma_f16<8>(sum, describe(of_a, 1024, 128), describe(of_b, 128, 128), true);
    wgmma_commit();
    wgmma_wait<0>();
    for (int i = 0; i < 4; ++i) d[place_of_sum<8>(i)] = sum[i];
}

// ---- a kernel with roles -------------------------------------------------------------------------------------------
// Sums of products: `steps` times 128 x 8 numbers of x and 8 x 16 weights. Two warpgroups multiply; of the third, a thread
// brings weights by bulk copies, and three warps store x.

constexpr int COLUMNS = 16, STAGES = 2, ROWS = 128;

struct __align__(128) Stage {
    uint4 x[2][ROWS];  // [piece][row]
    uint4 weights[2][COLUMNS];
};

extern "C" __global__ void roles(const uint4* x, const uint4* weights, float* out, int steps) {
    extern __shared__ __align__(128) unsigned char shared_bytes[];
    Barrier* const full = reinterpret_cast<Barrier*>(shared_bytes);
    Barrier* const empty = full + STAGES;
    Stage* const stages = reinterpret_cast<Stage*>(shared_bytes + 128);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) {
            barrier_init(full + i, 97);
            barrier_init(empty + i, 8);
        }
        barrier_init_done();
    }
    __syncthreads();

    if (warp >= 8) {
        give_registers<40>();
        for (int step = 0; step < steps; ++step) {
            const int stage = step % STAGES, round = step / STAGES;
            Stage* const to = stages + stage;
            if (warp == 8 && lane == 0) {
                if (round) barrier_wait(empty + stage, (round - 1) & 1);
                barrier_arrive_expecting(full + stage, sizeof to->weights);
                copy_bulk(to->weights, weights + step * 2 * COLUMNS, sizeof to->weights, full + stage);
            } else if (warp > 8) {
                if (round) barrier_wait(empty + stage, (round - 1) & 1);
                for (int i = threadIdx.x - 288; i < 2 * ROWS; i += 96) to->x[i / ROWS][i % ROWS] = x[step * 2 * ROWS + i];
                publish_shared_writes();
                barrier_arrive(full + stage);
            }
        }
        return;
    }

    take_registers<232>();
    float sum[COLUMNS / 2];
    wgmma_fence();
    for (int step = 0; step < steps; ++step) {
        const int stage = step % STAGES, round = step / STAGES, before = (step + STAGES - 1) % STAGES;
        barrier_wait(full + stage, round & 1);
        const Operand rows = describe(stages[stage].x[0] + warp / 4 * 64, 16 * ROWS, 128);
        wgmma_tf32<COLUMNS>(sum, rows, describe(stages[stage].weights, 16 * COLUMNS, 128), step > 0);
        wgmma_commit();
        wgmma_wait<1>();
        if (step && lane == 0) barrier_arrive(empty + before);
    }
    wgmma_wait<0>();

    warps_sync(1, 256);  // nobody multiplies any more
    float* const turned = reinterpret_cast<float*>(stages);
    for (int i = 0; i < COLUMNS / 2; ++i) {
        const int row = warp * 16 + lane / 4 + i % 4 / 2 * 8;
        turned[row * COLUMNS + i / 4 * 8 + lane % 4 * 2 + i % 2] = sum[i];
    }
    warps_sync(1, 256);
    for (int i = threadIdx.x; i < ROWS * COLUMNS; i += 256) out[i] = turned[i];
}
