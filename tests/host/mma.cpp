// The tensor cores of a warp. What they compute for the host is no access of the kernel, so that it stands here, unchecked.
#include "internal.h"

namespace host {
namespace {

struct Fragments {
    float* d;
    const unsigned *a, *b;
    const float* c;
};

// D = A B + C for A of 16 x K and B of K x 8, each lane with its fragments. Element k of a fragment's row or column lies in
// register k / (4 * PACKED), of lane k / PACKED % 4 of its group, at place k % PACKED. The sum is rounded once.
template <Operands OPERANDS, int K> void multiply(void* const* lanes, unsigned) {
    constexpr int PACKED = OPERANDS == OF_TF32 ? 1 : 2;
    const auto lane = [=](int group, int member) { return *(const Fragments*)lanes[group * 4 + member]; };
    double a[16][K], b[K][8];
    for (int k = 0; k < K; ++k) {
        const int part = k / (4 * PACKED), member = k / PACKED % 4, place = k % PACKED;
        for (int row = 0; row < 16; ++row) {
            a[row][k] = widen(lane(row % 8, member).a[2 * part + row / 8], place, OPERANDS);
        }
        for (int column = 0; column < 8; ++column) b[k][column] = widen(lane(column, member).b[part], place, OPERANDS);
    }
    for (int row = 0; row < 16; ++row) {
        double sums[8];
        for (int column = 0; column < 8; ++column) {
            sums[column] = lane(row % 8, column / 2).c[row / 8 * 2 + column % 2];
        }
        for (int k = 0; k < K; ++k)
            for (int column = 0; column < 8; ++column) sums[column] += a[row][k] * b[k][column];
        for (int column = 0; column < 8; ++column) {
            lane(row % 8, column / 2).d[row / 8 * 2 + column % 2] = (float)sums[column];
        }
    }
}

}  // namespace

void mma(Operands operands, int depth, float* d, const unsigned* a, const unsigned* b, const float* c) {
    Fragments mine = {d, a, b, c};
    const auto act = operands == OF_TF32  ? multiply<OF_TF32, 8>
                     : operands == OF_F16 ? depth == 8 ? multiply<OF_F16, 8> : multiply<OF_F16, 16>
                     : depth == 8         ? multiply<OF_BF16, 8>
                                          : multiply<OF_BF16, 16>;
    together(0xffffffffu, &mine, act);
}

}  // namespace host
