// The tensor cores of a warpgroup. What its threads issue is put down, and done as late as may be: at the wait for it.
#include <sanitizer/asan_interface.h>
#include <stdlib.h>
#include <string.h>

#include "internal.h"

#if defined(__x86_64__) && defined(__GLIBC__)
#define FOR_AVX2_TOO __attribute__((target_clones("arch=haswell", "default")))  // where a test spends its time
#else
#define FOR_AVX2_TOO
#endif

namespace host {
namespace {

constexpr unsigned GROUP = 128;  // threads
constexpr int ROWS = 64, MAX_COLUMNS = 256;
constexpr uint32_t POISON = 0x7fc0dead;  // a NaN, in accumulators that are in use
constexpr int ROW_WORDS = 8;             // of A

struct Operation {
    Operands operands;
    int columns;
    uint64_t a, b;
    bool accumulate, of_registers, transposed;
    size_t chain;
    std::vector<uint32_t> words;  // of A, where it is in registers

    bool operator==(const Operation& o) const {
        return operands == o.operands && columns == o.columns && a == o.a && b == o.b && accumulate == o.accumulate &&
               of_registers == o.of_registers && transposed == o.transposed && chain == o.chain;
    }
};

// Operations that follow each other into the same accumulators.
struct Chain {
    std::vector<float> sums;  // ROWS x columns
    size_t end;               // number of its last operation, plus one
    unsigned taken;           // by so many threads into their registers
};

struct Warpgroup {
    std::vector<Operation> operations;  // of the block so far
    size_t done;                        // of these
    std::vector<size_t> groups;         // how many operations had been issued at each commit
    std::vector<Chain> chains;
    unsigned waiting;
    int32_t first_epoch;
};

struct OpenChain {
    float* d;
    int columns;
    size_t chain;
};

struct Result {
    float* d;
    uint64_t digest;
};

// Registers of A, and the operation that reads them.
struct OpenA {
    const uint32_t* a;
    uint32_t words[4];
    size_t operation;
};

struct Issuer {
    size_t operations, groups, chains;
    unsigned pending;  // of the wait
    bool fenced;
    bool fenced_group;  // since the last commit
    int registers;
    std::vector<OpenChain> open;
    std::vector<OpenA> open_a;
    std::vector<Result> results;  // in accumulators since the last fence

    void begin() {
        operations = groups = chains = pending = 0;
        fenced = fenced_group = false;
        registers = 0;
        open.clear();
        open_a.clear();
        results.clear();
    }
};

Warpgroup warpgroups[WARPGROUPS];
Issuer issuers[MAX_THREADS];

// ---- operands ------------------------------------------------------------------------------------------------------

constexpr uint64_t SWIZZLE = 3ull << 62;  // rows whose pieces are stored where bits of the address say

// The 16 bytes of a row (of A, or column of B) and a piece of K. Transposed, those of the group of eight rows that `row` is of,
// at place row % 8 of the eight along K that `piece` counts: of all rows and pieces, the addresses are the same, but for swizzles.
uint32_t address_of(uint64_t descriptor, int row, int piece, bool transposed) {
    const auto field = [=](int shift) { return (uint32_t)(descriptor >> shift & 0x3fff) << 4; };
    const int swizzle = (int)(descriptor >> 62);
    if (swizzle && !transposed) {
        const uint32_t row_bytes = 256u >> swizzle;  // 128, 64, 32
        const uint32_t place = field(0) + (uint32_t)(row / 8) * field(32) + (uint32_t)(row % 8) * row_bytes + (uint32_t)piece * 16;
        return swizzled(place, row_bytes);
    }
    if (swizzle) {
        const uint32_t place = field(0) + (uint32_t)(row / 64) * field(16) + (uint32_t)piece * field(32) + (uint32_t)(row % 8) * 128;
        return place + ((uint32_t)row / 8 % 8 ^ (place >> 7 & 7)) * 16;
    }
    return field(0) + (uint32_t)piece * field(16) + (uint32_t)(row / 8) * field(32) + (uint32_t)(row % 8) * 16;
}

void check_operand(uint64_t descriptor, int rows, bool transposed, unsigned warpgroup, int32_t epoch) {
    const int swizzle = (int)(descriptor >> 62);
    if (swizzle && transposed && (swizzle != 1 || descriptor & 7)) fail("swizzled rows of a transposed operand that are not of 128 bytes, or misaligned");
    if (swizzle && !transposed && descriptor & 1) fail("a swizzled row from its middle on");
    if (descriptor & ~(SWIZZLE | 0x00003fff3fff3fffull)) {
        fail("a descriptor with other bits than describe() sets: %016llx", (unsigned long long)descriptor);
    }
    for (int row = 0; row < rows; ++row)
        for (int piece = 0; piece < 2; ++piece) read_by_wgmma(address_of(descriptor, row, piece, transposed), warpgroup, epoch);
}

// to[row / 8][k][row % 8], for whole groups of eight rows.
void load(double* to, uint64_t descriptor, int rows, Operands operands) {
    const int packed = operands == OF_TF32 ? 1 : 2, depth = 8 * packed;
    for (int row = 0; row < rows; ++row) {
        for (int piece = 0; piece < 2; ++piece) {
            uint32_t words[4];
            memcpy(words, shared_at(address_of(descriptor, row, piece, false)), sizeof words);
            for (int i = 0; i < depth / 2; ++i) {
                const int k = piece * (depth / 2) + i;
                to[(row / 8 * depth + k) * 8 + row % 8] = widen(words[i / packed], i % packed, operands);
            }
        }
    }
}

// The same of 16-bit numbers in pieces of eight rows.
void load_transposed(double* to, uint64_t descriptor, int rows, Operands operands) {
    for (int group = 0; group < rows / 8; ++group) {
        for (int k = 0; k < 16; ++k) {
            uint32_t words[4];
            memcpy(words, shared_at(address_of(descriptor, group * 8 + k % 8, k / 8, true)), sizeof words);
            for (int i = 0; i < 8; ++i) to[(group * 16 + k) * 8 + i] = widen(words[i / 2], i % 2, operands);
        }
    }
}

// The same of A in registers.
void load_registers(double* to, const Operation& operation) {
    const int packed = operation.operands == OF_TF32 ? 1 : 2, depth = 8 * packed;
    for (int row = 0; row < ROWS; ++row) {
        for (int k = 0; k < depth; ++k) {
            const uint32_t word = operation.words[(size_t)(row * ROW_WORDS + k / packed)];
            to[(row / 8 * depth + k) * 8 + row % 8] = widen(word, k % packed, operation.operands);
        }
    }
}

// Each sum is rounded once: to the nearest, or with HOST_CUTS_OFF=1 towards zero, which is what tensor cores come close to.
const char* const asked = getenv("HOST_CUTS_OFF");
const bool cuts_off = asked && *asked == '1';

inline float rounded(double value) {
    const float nearest = (float)value;
    const uint32_t bits = __float_as_uint(nearest);
    const bool is_beyond = (value < 0 ? nearest < value : nearest > value) && (bits & 0x7f800000u) != 0x7f800000u;
    return __uint_as_float(bits - (cuts_off && is_beyond));
}

FOR_AVX2_TOO void execute(const Operation& operation, float* sums) {
    static double a[ROWS * 16], b[MAX_COLUMNS * 16];
    const int depth = operation.operands == OF_TF32 ? 8 : 16, columns = operation.columns;
    if (operation.of_registers) {
        load_registers(a, operation);
    } else {
        (operation.transposed ? load_transposed : load)(a, operation.a, ROWS, operation.operands);
    }
    (operation.transposed ? load_transposed : load)(b, operation.b, columns, operation.operands);
    for (int row = 0; row < ROWS; ++row) {
        const double* const of_row = a + row / 8 * depth * 8 + row % 8;
        for (int column = 0; column < columns; column += 8) {
            float* const out = sums + row * columns + column;
            const double* const of_columns = b + column * depth;
            double sum[8];
            for (int i = 0; i < 8; ++i) sum[i] = operation.accumulate ? out[i] : 0;
            for (int k = 0; k < depth; ++k)
                for (int i = 0; i < 8; ++i) sum[i] += of_row[k * 8] * of_columns[k * 8 + i];
            for (int i = 0; i < 8; ++i) out[i] = rounded(sum[i]);
        }
    }
}

// ---- accumulators --------------------------------------------------------------------------------------------------

// Where the sums of a thread's accumulators 2 i and 2 i + 1 are.
size_t place_of(unsigned thread, int i, int columns) {
    const unsigned row = thread / 32 % 4 * 16 + thread % 32 / 4 + (unsigned)(i % 2) * 8;
    return (size_t)row * (size_t)columns + (size_t)(i / 2 * 8) + thread % 4 * 2;
}

uint64_t digest(const float* d, int columns) {
    uint64_t sum = 0;
    for (int i = 0; i < columns / 2; ++i) sum = sum * 0x9e3779b97f4a7c15u + __float_as_uint(d[i]);
    return sum;
}

// A result that was read (as it must have been, unless it is added to) or changed, so that a fence has to come first.
bool needs_fence(const Issuer& me, const float* d, int columns, bool accumulate) {
    for (const Result& result : me.results)
        if (result.d == d && (!accumulate || result.digest != digest(d, columns))) return true;
    return !me.fenced;
}

// Registers that a wgmma is going to write.
OpenChain& open_chain(float* d, int columns, bool accumulate) {
    Issuer& me = issuers[current];
    for (OpenChain& open : me.open) {
        if (open.d == d && open.columns == columns) return open;
        if (d < open.d + open.columns / 2 && open.d < d + columns / 2) fail("accumulators overlap those of another wgmma");
    }
    if (needs_fence(me, d, columns, accumulate)) fail("a wgmma without a wgmma_fence since its accumulators were used");
    auto& chains = warpgroups[current / GROUP].chains;
    if (me.chains == chains.size()) chains.push_back({std::vector<float>((size_t)(ROWS * columns)), 0, 0});
    std::vector<float>& sums = chains[me.chains].sums;
    if (sums.size() != (size_t)(ROWS * columns)) fail("the threads of a warpgroup issue different wgmma");
    for (int i = 0; i < columns / 4; ++i) {
        if (accumulate) memcpy(&sums[place_of(current, i, columns)], d + 2 * i, 2 * sizeof(float));
        memcpy(d + 2 * i, &POISON, sizeof POISON);
        memcpy(d + 2 * i + 1, &POISON, sizeof POISON);
    }
    me.open.push_back({d, columns, me.chains++});
    return me.open.back();
}

void take_result(const OpenChain& open, Chain& chain) {
    if (__asan_region_is_poisoned(open.d, (size_t)open.columns / 2 * sizeof(float))) {
        fail("the accumulators of a wgmma are gone before the wait for it");
    }
    for (int i = 0; i < open.columns / 4; ++i) {
        if (__float_as_uint(open.d[2 * i]) != POISON || __float_as_uint(open.d[2 * i + 1]) != POISON) {
            fail("accumulator %d or %d of a wgmma was written before the wait for it", 2 * i, 2 * i + 1);
        }
        memcpy(open.d + 2 * i, &chain.sums[place_of(current, i, open.columns)], 2 * sizeof(float));
    }
    issuers[current].results.push_back({open.d, digest(open.d, open.columns)});
    if (++chain.taken == GROUP) std::vector<float>().swap(chain.sums);
}

// The operation that a thread issues next; the first one to come checks its operands for all.
Operation& issue(const Operation& operation) {
    Issuer& me = issuers[current];
    const unsigned number = current / GROUP;
    Warpgroup& group = warpgroups[number];
    if (me.operations == group.operations.size()) {
        // Nobody may write to the operands until the wait has brought the epoch.
        const int32_t epoch = group.first_epoch + (int32_t)me.groups + 1;
        epochs[TENSOR_CORES + number] = epoch;
        if (!operation.of_registers) check_operand(operation.a, ROWS, operation.transposed, number, epoch);
        check_operand(operation.b, operation.columns, operation.transposed, number, epoch);
        group.operations.push_back(operation);
        group.chains[operation.chain].end = group.operations.size();
    } else if (!(group.operations[me.operations] == operation)) {
        fail("the threads of a warpgroup issue different wgmma");
    }
    return group.operations[me.operations++];
}

void check_registers(const OpenA& open) {
    if (__asan_region_is_poisoned((void*)open.a, sizeof open.words)) {
        fail("the registers with A of a wgmma are gone before the wait for it");
    }
    if (memcmp(open.a, open.words, sizeof open.words)) {
        fail("a register with A of a wgmma was written before the wait for it");
    }
}

}  // namespace

void wgmma_fence() {
    issuers[current].fenced = issuers[current].fenced_group = true;
    issuers[current].results.clear();
}

void wgmma(Operands operands, int columns, float* d, uint64_t a, uint64_t b, bool accumulate, bool transposed) {
    start_clocks();
    if ((current | (GROUP - 1)) >= blockDim.x) fail("a wgmma in a warpgroup with fewer than four warps");
    if (transposed && operands == OF_TF32) fail("a wgmma of TF32 takes no transposed operands");
    issue({operands, columns, a, b, accumulate, false, transposed, open_chain(d, columns, accumulate).chain, {}});
}

void wgmma_of_registers(Operands operands, int columns, float* d, const unsigned (&a)[4], uint64_t b, bool accumulate) {
    start_clocks();
    if ((current | (GROUP - 1)) >= blockDim.x) fail("a wgmma in a warpgroup with fewer than four warps");
    Issuer& me = issuers[current];
    if (!me.fenced_group) fail("a wgmma with A in registers without a wgmma_fence since the last commit");
    const size_t chain = open_chain(d, columns, accumulate).chain;
    me.open_a.push_back({a, {a[0], a[1], a[2], a[3]}, me.operations});
    Operation& operation = issue({operands, columns, 0, b, accumulate, true, false, chain, {}});
    operation.words.resize(ROWS * ROW_WORDS);
    for (unsigned i = 0; i < 4; ++i) {
        const unsigned row = current / 32 % 4 * 16 + current % 32 / 4 + i % 2 * 8;
        operation.words[row * ROW_WORDS + current % 4 + i / 2 * 4] = a[i];
    }
}

void wgmma_commit() {
    Issuer& me = issuers[current];
    auto& groups = warpgroups[current / GROUP].groups;
    if (me.groups == groups.size()) groups.push_back(me.operations);
    if (groups[me.groups] != me.operations) fail("the threads of a warpgroup commit different wgmma");
    ++me.groups;
    me.fenced_group = false;
}

void wgmma_wait(unsigned pending) {
    Issuer& me = issuers[current];
    const unsigned number = current / GROUP, first = number * GROUP;
    Warpgroup& group = warpgroups[number];
    if (first + GROUP > blockDim.x) fail("waits for wgmma in a warpgroup with fewer than four warps");
    me.pending = pending;
    if (++group.waiting < GROUP) {
        suspend(AT_WGMMA_WAIT);
    } else {
        group.waiting = 0;
        for (unsigned thread = first; thread < first + GROUP; ++thread) {
            const Issuer& other = issuers[thread];
            if (other.operations != me.operations || other.groups != me.groups || other.pending != pending) {
                fail("threads %u and %u of a warpgroup wait for different wgmma", thread, current);
            }
        }
        if (me.groups > pending) {
            const size_t groups = me.groups - pending;
            for (; group.done < group.groups[groups - 1]; ++group.done) {
                const Operation& operation = group.operations[group.done];
                execute(operation, group.chains[operation.chain].sums.data());
                std::vector<uint32_t>().swap(group.operations[group.done].words);
            }
            for (unsigned thread = first; thread < first + GROUP; ++thread) {
                known[thread].of[TENSOR_CORES + number] = group.first_epoch + (int32_t)groups;
            }
        }
        for (unsigned thread = first; thread < first + GROUP; ++thread) wake(thread);
    }
    size_t still = 0;
    for (const OpenA& open : me.open_a) {
        if (open.operation >= group.done) {
            me.open_a[still++] = open;
        } else {
            check_registers(open);
        }
    }
    me.open_a.resize(still);
    for (size_t i = 0; i < me.open.size();) {
        Chain& chain = group.chains[me.open[i].chain];
        if (chain.end > group.done) {
            ++i;
        } else {
            take_result(me.open[i], chain);
            me.open.erase(me.open.begin() + (ptrdiff_t)i);
        }
    }
}

void set_registers(int count) {
    if (count < 24 || count > 256 || count % 8) fail("%d registers are not a multiple of 8 from 24 to 256", count);
    issuers[current].registers = count;
}

void begin_wgmma() {
    for (unsigned i = 0; i * GROUP < blockDim.x; ++i) warpgroups[i] = {{}, 0, {}, {}, 0, epochs[TENSOR_CORES + i]};
    for (unsigned i = 0; i < blockDim.x; ++i) issuers[i].begin();
}

void end_wgmma() {
    int registers = 0;
    for (unsigned i = 0; i < blockDim.x; ++i) {
        if (!issuers[i].open.empty()) fail("the block ends before thread %u waits for its wgmma", i);
        if (issuers[i].registers != issuers[i / GROUP * GROUP].registers) {
            fail("the threads of a warpgroup give or take different numbers of registers: %u and %u", i / GROUP * GROUP, i);
        }
        registers += issuers[i].registers;
    }
    if (registers > 65536) fail("%d registers taken, more than a multiprocessor has", registers);
}

}  // namespace host
