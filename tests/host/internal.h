// What the files of the runtime know of each other, and a kernel's translation unit does not.
#pragma once

#include <string>
#include <vector>

#include "builtins.cuh"

namespace host {

// ---- threads.cpp: how threads wait

enum State { READY, AT_BARRIER, AT_COLLECTIVE, AT_WARPS_SYNC, AT_WGMMA_WAIT, AT_MBARRIER, RETURNED };

void suspend(State state);  // the running thread, until another one wakes it
void wake(unsigned thread);
std::string list(const std::vector<unsigned>& threads);  // in ascending order, as "0-4, 6"

// ---- order.cpp: which accesses to shared memory come before which

// Barriers of the block order accesses, and in a warp its collectives: both are counted.
extern uint32_t intervals;
extern uint32_t warp_intervals[MAX_THREADS / 32];

// Other barriers order those who meet there. So each thread has a clock: how far it knows the others to be. Besides
// threads, the tensor cores of a warpgroup and the bulk copies of an mbarrier access memory, each by itself.
constexpr unsigned WARPGROUPS = MAX_THREADS / 128, MBARRIERS = 512;
constexpr unsigned TENSOR_CORES = 0, THREADS = WARPGROUPS, BULK_COPIES = THREADS + MAX_THREADS;  // the first of each
constexpr unsigned ACTORS = BULK_COPIES + MBARRIERS;

inline bool is_thread(unsigned actor) { return actor >= THREADS && actor < BULK_COPIES; }

struct Clock {
    int32_t of[ACTORS];  // the last epoch that came before
};

extern Clock known[MAX_THREADS];
extern int32_t epochs[ACTORS];
extern bool clocks_run;  // only where a kernel needs them: they take time
extern unsigned mbarriers;  // whose clocks matter: as many as a block of the program has had

struct Access {
    uint32_t interval, warp_interval;
    int32_t epoch;
    uint16_t actor;
};

inline Access access_of_thread() {
    return {intervals, warp_intervals[current / 32], epochs[THREADS + current], (uint16_t)(THREADS + current)};
}

// Whether an access comes before what the running thread does now.
inline bool comes_before(const Access& access) {
    if (is_thread(access.actor)) {
        const unsigned thread = access.actor - THREADS, warp = current / 32;
        if (thread == current || access.interval != intervals) return true;
        if (thread / 32 == warp && access.warp_interval != warp_intervals[warp]) return true;
    }
    return access.epoch <= known[current].of[access.actor];
}

void begin_order();  // of a block
void start_clocks();
void release(Clock& to);  // tells what the running thread knows and did
void acquire(const Clock& from);
void learn(Clock& clock, const Clock& from);
void meet(const std::vector<unsigned>& threads);  // each learns what the others know and did
void meet_all();                                  // __syncthreads, of all that `intervals` does not count

bool published(const Access& write);

// ---- memory.cpp: what tensor cores and bulk copies do to shared memory, by its addresses as in shared_address()

constexpr uint32_t MAX_ADDRESS = 1 << 18;  // as many as a descriptor tells apart

unsigned char* shared_at(uint32_t address);
std::string shared_name(uint32_t address);  // for messages

const unsigned char* read_by_wgmma(uint32_t address, unsigned warpgroup, int32_t epoch);  // 16 bytes
void begin_bulk_copy(uint32_t to, const void* from, uint32_t size, unsigned actor, int32_t epoch);
void end_bulk_copy(uint32_t to, const void* from, uint32_t size);
// Where a 16-byte piece of rows of 32, 64 or 128 bytes is, which has this place in them.
inline uint32_t swizzled(uint32_t place, uint32_t row_bytes) { return place ^ (place >> 7 & (row_bytes / 16 - 1)) << 4; }
// The same of a box, whose elements, and zeros around the array, are put down in the order of shared memory.
void begin_box_copy(uint32_t to, const Boxes& boxes, const BoxStart& start, unsigned char* elements, uint32_t size, unsigned actor,
                    int32_t epoch);
void check_bulk_store(const void* to, uint32_t from, uint32_t size);

// ---- barriers.cpp

void begin_barriers();  // of a block
void end_barriers();
std::string waits_at_barriers();  // who waits where, for messages

// ---- wgmma.cpp

void begin_wgmma();
void end_wgmma();

// ---- mma.cpp, wgmma.cpp: an element of an operand, at its place in a register

inline float widen(uint32_t word, int place, Operands operands) {
    if (operands == OF_TF32) return __uint_as_float(word & 0xffffe000u);
    const uint32_t bits = word >> 16 * place & 0xffffu;
    if (operands == OF_BF16) return __uint_as_float(bits << 16);
    const uint32_t sign = (bits & 0x8000u) << 16, magnitude = (bits & 0x7fffu) << 13;
    if (magnitude >= 0x0f800000u) return __uint_as_float(sign | 0x70000000u | magnitude);  // Inf and NaN
    return __uint_as_float(sign | magnitude) * 0x1p112f;  // denormals included
}

}  // namespace host
