// Calls the functions of the PTX header's stand-in one by one, to compare each with plain NumPy.
#include "ptx.cuh"

extern "C" __global__ void widen_halves(const unsigned short* bits, float* values, int count) {
    for (int i = threadIdx.x; i < count; i += blockDim.x) values[i] = half_bits_to_float(bits[i]);
}

extern "C" __global__ void narrow_to_halves(const float* values, unsigned short* bits, int count) {
    for (int i = threadIdx.x; i < count; i += blockDim.x) bits[i] = float_to_half_bits(values[i]);
}

extern "C" __global__ void round_to_tf32(const float* values, unsigned* bits, int count) {
    for (int i = threadIdx.x; i < count; i += blockDim.x) bits[i] = float_to_tf32(values[i]);
}

// Each thread selects among the bytes of its two words, and shifts them.
extern "C" __global__ void select_and_shift(const unsigned* words, const unsigned* selections, unsigned* selected,
                                            unsigned* shifted) {
    const unsigned low = words[2 * threadIdx.x], high = words[2 * threadIdx.x + 1];
    selected[threadIdx.x] = select_bytes(low, high, selections[threadIdx.x]);
    shifted[threadIdx.x] = __funnelshift_r(low, high, threadIdx.x);  // modulo 32
}

// A warp's D = A B + D, with A of 16 rows and B of 8 columns, both of eight words along K; B is given column by column.
#define MULTIPLY(name, mma)                                                                          \
    extern "C" __global__ void name(const unsigned* a, const unsigned* b, const float* c, float* d) { \
        const int group = threadIdx.x / 4, member = threadIdx.x % 4;                                 \
        unsigned fragment_a[4], fragment_b[2];                                                       \
        float sum[4];                                                                                \
        for (int i = 0; i < 4; ++i) {                                                                \
            fragment_a[i] = a[(group + i % 2 * 8) * 8 + member + i / 2 * 4];                         \
            sum[i] = c[(group + i / 2 * 8) * 8 + member * 2 + i % 2];                                \
        }                                                                                            \
        for (int i = 0; i < 2; ++i) fragment_b[i] = b[group * 8 + member + i * 4];                   \
        mma(sum, fragment_a, fragment_b, sum);                                                       \
        for (int i = 0; i < 4; ++i) d[(group + i / 2 * 8) * 8 + member * 2 + i % 2] = sum[i];        \
    }
MULTIPLY(multiply_tf32, mma_m16n8k8_tf32)
MULTIPLY(multiply_f16, mma_m16n8k16_f16)
MULTIPLY(multiply_bf16, mma_m16n8k16_bf16)

// The same for four words along K.
#define MULTIPLY_HALF(name, mma)                                                                     \
    extern "C" __global__ void name(const unsigned* a, const unsigned* b, const float* c, float* d) { \
        const int group = threadIdx.x / 4, member = threadIdx.x % 4;                                 \
        const unsigned fragment_a[2] = {a[group * 4 + member], a[(group + 8) * 4 + member]};         \
        const unsigned fragment_b[1] = {b[group * 4 + member]};                                      \
        float sum[4];                                                                                \
        for (int i = 0; i < 4; ++i) sum[i] = c[(group + i / 2 * 8) * 8 + member * 2 + i % 2];        \
        mma(sum, fragment_a, fragment_b, sum);                                                       \
        for (int i = 0; i < 4; ++i) d[(group + i / 2 * 8) * 8 + member * 2 + i % 2] = sum[i];        \
    }
MULTIPLY_HALF(multiply_half_f16, mma_m16n8k8_f16)
MULTIPLY_HALF(multiply_half_bf16, mma_m16n8k8_bf16)

// Four 8 x 8 matrices of 16-bit elements through shared memory; out[i][lane] holds lane's two elements of matrix i.
template <bool TRANSPOSED> __device__ void load_matrices(const unsigned short* matrices, unsigned* out) {
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    unsigned short* const rows = reinterpret_cast<unsigned short*>(shared_bytes);
    for (int i = threadIdx.x; i < 256; i += 32) rows[i] = matrices[i];
    __syncwarp();
    unsigned r[4];
    if (TRANSPOSED) load_matrix_x4_transposed(r, rows + threadIdx.x * 8);
    else load_matrix_x4(r, rows + threadIdx.x * 8);
    for (int i = 0; i < 4; ++i) out[i * 32 + threadIdx.x] = r[i];
}

extern "C" __global__ void load_as_they_are(const unsigned short* matrices, unsigned* out) {
    load_matrices<false>(matrices, out);
}

// Two at a time.
extern "C" __global__ void load_in_pairs(const unsigned short* matrices, unsigned* out) {
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    unsigned short* const rows = reinterpret_cast<unsigned short*>(shared_bytes);
    for (int i = threadIdx.x; i < 256; i += 32) rows[i] = matrices[i];
    __syncwarp();
    for (int pair = 0; pair < 2; ++pair) {
        unsigned r[2];
        load_matrix_x2(r, rows + pair * 128 + threadIdx.x % 16 * 8);
        for (int i = 0; i < 2; ++i) out[(pair * 2 + i) * 32 + threadIdx.x] = r[i];
    }
}

extern "C" __global__ void load_transposed(const unsigned short* matrices, unsigned* out) {
    load_matrices<true>(matrices, out);
}

// The other way round: out[i] is matrix i with its rows and columns exchanged.
template <int AT_ONCE> __device__ void store_matrices(const unsigned* matrices, unsigned short* out) {
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    unsigned short* const rows = reinterpret_cast<unsigned short*>(shared_bytes);
    for (int first = 0; first < 4; first += AT_ONCE) {
        unsigned r[AT_ONCE];
        for (int i = 0; i < AT_ONCE; ++i) r[i] = matrices[(first + i) * 32 + threadIdx.x];
        store_matrices_transposed(rows + first * 64 + threadIdx.x % (8 * AT_ONCE) * 8, r);
    }
    __syncwarp();
    for (int i = threadIdx.x; i < 256; i += 32) out[i] = rows[i];
}

extern "C" __global__ void store_transposed(const unsigned* matrices, unsigned short* out) { store_matrices<4>(matrices, out); }
extern "C" __global__ void store_transposed_in_pairs(const unsigned* matrices, unsigned short* out) {
    store_matrices<2>(matrices, out);
}

// A sum over the block by shuffles, votes and static shared memory; `out` receives it from every thread.
extern "C" __global__ void sum_of_block(const int* values, int* out, int* votes) {
    __shared__ int of_warp[32];
    int sum = values[threadIdx.x];
    for (int distance = 16; distance; distance /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, distance);
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = sum;
    __syncthreads();
    int total = 0;
    for (unsigned warp = 0; warp < blockDim.x / 32; ++warp) total += of_warp[warp];
    out[threadIdx.x] = total;
    const unsigned odd = __ballot_sync(0xffffffffu, values[threadIdx.x] & 1);
    const int before = __shfl_up_sync(0xffffffffu, (int)odd, 1), next = __shfl_down_sync(0xffffffffu, sum, 1, 8);
    votes[threadIdx.x] = __syncthreads_count(values[threadIdx.x] > 0) + __popc(odd) * (before == (int)odd) * (next == sum);
}

// What one thread must not do, by its number; `of` is that number, so that the compiler cannot tell what will happen.
extern "C" __global__ void misbehave(const int* of, int* out) {
    int local[4] = {1, 2, 3, 4};
    const int what = *of;
    if (threadIdx.x != 17) return;
    if (what == 0) *out = 0x7fffffff + (what + 1);
    if (what == 1) *out = 1 << (what + 31);
    if (what == 2) *out = local[what + 2];
    if (what == 3) {
        const int* past = local + what;
        *out = *(past + what);
    }
    if (what == 4) {
        const int* gone;
        {
            int inner[2] = {what, what};
            gone = inner + what % 2;
        }
        *out = *gone;
    }
    if (what == 5) {
        const int2 pair = *reinterpret_cast<const int2*>(of + what % 2);
        *out = pair.x + pair.y;
    }
}
