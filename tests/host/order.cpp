// Which accesses come before which, by vector clocks: a thread knows of each other one the last epoch that
// came before. A thread's epoch ends when it tells others what it did, and when it publishes its writes.
#include <algorithm>

#include "internal.h"

namespace host {

uint32_t intervals = 1;
uint32_t warp_intervals[MAX_THREADS / 32];
Clock known[MAX_THREADS];
int32_t epochs[ACTORS];
bool clocks_run;
unsigned mbarriers;

namespace {

// The last epoch of a thread whose writes are published, and what it was at the last barrier of the block.
int32_t published_epochs[MAX_THREADS], published_at_barrier[MAX_THREADS];

void learn(Clock& clock, const Clock& from, unsigned first, unsigned count) {
    for (unsigned i = first; i < first + count; ++i) clock.of[i] = std::max(clock.of[i], from.of[i]);
}

void learn_asynchronous(Clock& clock, const Clock& from) {
    learn(clock, from, TENSOR_CORES, WARPGROUPS);
    learn(clock, from, BULK_COPIES, mbarriers);
}

}  // namespace

void learn(Clock& clock, const Clock& from) {
    learn_asynchronous(clock, from);
    learn(clock, from, THREADS, blockDim.x);
}

// Epochs go on from block to block: what a thread knew of an earlier block remains true.
void begin_order() {
    clocks_run = false;
    static Clock now;
    std::copy(epochs, epochs + ACTORS, now.of);
    for (unsigned thread = 0; thread < blockDim.x; ++thread) {
        learn_asynchronous(known[thread], now);
        published_at_barrier[thread] = published_epochs[thread] = epochs[THREADS + thread]++;
    }
}

void start_clocks() { clocks_run = true; }

void release(Clock& to) {
    learn(to, known[current]);
    to.of[THREADS + current] = epochs[THREADS + current]++;
}

void acquire(const Clock& from) { learn(known[current], from); }

void meet(const std::vector<unsigned>& threads) {
    static Clock all;
    all = known[threads[0]];
    for (unsigned thread : threads) learn(all, known[thread]);
    for (unsigned thread : threads) all.of[THREADS + thread] = epochs[THREADS + thread]++;
    for (unsigned thread : threads) learn(known[thread], all);
}

void meet_all() {
    static Clock all;
    for (unsigned thread = 0; thread < blockDim.x; ++thread) learn_asynchronous(all, known[thread]);
    for (unsigned thread = 0; thread < blockDim.x; ++thread) learn_asynchronous(known[thread], all);
    std::copy(published_epochs, published_epochs + blockDim.x, published_at_barrier);
}

void publish() {
    start_clocks();
    published_epochs[current] = epochs[THREADS + current]++;
}

// A barrier has to lie between: the epoch that publishing began is known, or a barrier of the block came since.
bool published(const Access& write) {
    const unsigned thread = write.actor - THREADS;
    if (write.epoch <= published_at_barrier[thread]) return true;
    return write.epoch <= published_epochs[thread] &&
           (thread == current || write.epoch < known[current].of[write.actor]);
}

}  // namespace host
