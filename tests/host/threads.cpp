// The threads of one block as fibers: each runs until it waits or returns, so that a run can be repeated exactly.
#include <stdio.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include "internal.h"

uint3 threadIdx, blockIdx, blockDim, gridDim;

namespace host {

unsigned current;
uintptr_t stacks;

namespace {

struct Thread {
    State state;
    void* stack_pointer;
    unsigned mask;  // of the collective that it waits in
    void* mine;
    void (*act)(void* const*, unsigned);
};

Thread threads[MAX_THREADS];
unsigned thread_count;
uint32_t lanes_waiting[MAX_THREADS / 32], lanes_gone[MAX_THREADS / 32];  // of each warp, in a collective and returned
Body body;
void* scheduler_stack_pointer;

char* stack_of(unsigned thread) {
    constexpr size_t ALL = MAX_THREADS * (GUARD + STACK);
    if (!stacks) {
        void* memory = mmap(nullptr, ALL, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (memory == MAP_FAILED) fail("no memory for the stacks of the threads");
        stacks = (uintptr_t)memory;
    }
    static unsigned usable;
    for (; usable <= thread; ++usable) {
        if (mprotect((char*)stacks + usable * (GUARD + STACK) + GUARD, STACK, PROT_READ | PROT_WRITE)) {
            fail("no memory for the stack of a thread");
        }
    }
    return (char*)stacks + thread * (GUARD + STACK) + GUARD;
}

#if defined(__x86_64__)
// Saves the callee's registers and the stack pointer of one fiber and takes up those of another.
extern "C" void host_switch(void** save, void* to);
asm(R"(
.text
.globl host_switch
.type host_switch, @function
host_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size host_switch, . - host_switch
)");

void* new_fiber(char* stack, void (*entry)()) {
    void** top = (void**)(stack + STACK) - 1;  // what entry() would return to, aligned as after a call
    *top = nullptr;
    *--top = (void*)entry;
    return top - 6;  // registers that host_switch takes up
}
#else
// Elsewhere the C library's contexts, which take a system call a switch.
void host_switch(void** save, void* to) {
    ucontext_t here;
    *save = &here;
    swapcontext(&here, (ucontext_t*)to);
}

void* new_fiber(char* stack, void (*entry)()) {
    ucontext_t* fiber = (ucontext_t*)stack;  // at the far end of its own stack
    getcontext(fiber);
    fiber->uc_stack.ss_sp = stack + sizeof(ucontext_t);
    fiber->uc_stack.ss_size = STACK - sizeof(ucontext_t);
    fiber->uc_link = nullptr;
    makecontext(fiber, entry, 0);
    return fiber;
}
#endif

void entry() {
    body();
    end_thread();
}

void resume(unsigned thread) {
    current = thread;
    threadIdx = {thread, 0, 0};
    host_switch(&scheduler_stack_pointer, threads[thread].stack_pointer);
}

std::vector<unsigned> threads_in(State state) {
    std::vector<unsigned> found;
    for (unsigned i = 0; i < thread_count; ++i)
        if (threads[i].state == state) found.push_back(i);
    return found;
}

}  // namespace

void suspend(State state) {
    Thread& me = threads[current];
    me.state = state;
    host_switch(&me.stack_pointer, scheduler_stack_pointer);
}

void end_thread() {
    lanes_gone[current / 32] |= 1u << current % 32;
    suspend(RETURNED);  // nobody wakes it
}

void wake(unsigned thread) { threads[thread].state = READY; }

std::string list(const std::vector<unsigned>& numbers) {
    std::string text;
    for (size_t first = 0, last; first < numbers.size(); first = last + 1) {
        for (last = first; last + 1 < numbers.size() && numbers[last + 1] == numbers[last] + 1;) ++last;
        text += (text.empty() ? "" : ", ") + std::to_string(numbers[first]);
        if (last > first) text += "-" + std::to_string(numbers[last]);
    }
    return text.empty() ? "none" : text;
}

void barrier() { suspend(AT_BARRIER); }

static std::string other_waits() {
    const std::vector<unsigned> for_wgmma = threads_in(AT_WGMMA_WAIT);
    return waits_at_barriers() + (for_wgmma.empty() ? "" : "; in wgmma_wait " + list(for_wgmma));
}

void together(unsigned mask, void* mine, void (*act)(void* const*, unsigned)) {
    const unsigned warp = current / 32, lane = current % 32;
    if (!(mask >> lane & 1)) fail("a lane takes part in a warp collective whose mask %08x leaves it out", mask);
    if (const unsigned gone = mask & lanes_gone[warp]) {
        fail("a warp collective waits for lane %d, which has returned or does not exist", __builtin_ctz(gone));
    }
    threads[current].mask = mask;
    threads[current].mine = mine;
    threads[current].act = act;
    lanes_waiting[warp] |= 1u << lane;
    if (mask & ~lanes_waiting[warp]) return suspend(AT_COLLECTIVE);
    void* lanes[32] = {};
    static std::vector<unsigned> taking_part;
    taking_part.clear();
    for (unsigned left = mask; left; left &= left - 1) {
        const unsigned other = (unsigned)__builtin_ctz(left);
        const Thread& thread = threads[warp * 32 + other];
        if (thread.mask != mask || thread.act != act) {
            fail("lanes %u and %u meet in different warp collectives", lane, other);
        }
        lanes[other] = thread.mine;
        taking_part.push_back(warp * 32 + other);
    }
    act(lanes, mask);
    ++warp_intervals[warp];
    lanes_waiting[warp] &= ~mask;
    for (unsigned thread : taking_part) wake(thread);
    if (clocks_run) meet(taking_part);
}

void run_block(unsigned count, Body thread_body, Order order, unsigned seed) {
    thread_count = count;
    body = thread_body;
    for (unsigned i = 0; i < MAX_THREADS / 32; ++i) {
        lanes_waiting[i] = 0;
        lanes_gone[i] = 32 * i + 32 <= count ? 0 : 32 * i >= count ? ~0u : ~0u << count % 32;
    }
    std::vector<unsigned> turns(count);
    for (unsigned i = 0; i < count; ++i) {
        turns[i] = order == DESCENDING ? count - 1 - i : i;
        threads[i] = {READY, new_fiber(stack_of(i), entry), 0, nullptr, nullptr};
    }
    std::minstd_rand random(seed + 1);
    for (;;) {
        if (order == SHUFFLED) std::shuffle(turns.begin(), turns.end(), random);
        ++intervals;
        for (bool progress = true; progress;) {
            progress = false;
            for (unsigned thread : turns) {
                if (threads[thread].state != READY) continue;
                resume(thread);
                progress = true;
            }
        }
        const std::vector<unsigned> waiting = threads_in(AT_BARRIER), returned = threads_in(RETURNED);
        if (returned.size() == count) return;
        if (waiting.size() < count) {
            fail("not all threads reach a barrier: at __syncthreads %s; in a warp collective %s; returned %s%s",
                 list(waiting).c_str(), list(threads_in(AT_COLLECTIVE)).c_str(), list(returned).c_str(),
                 other_waits().c_str());
        }
        if (clocks_run) meet_all();
        for (unsigned i = 0; i < count; ++i) wake(i);
    }
}

}  // namespace host
