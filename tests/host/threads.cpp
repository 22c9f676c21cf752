// The threads of one block as fibers: each runs until it waits or returns, so that a run can be repeated exactly.
#include <sanitizer/common_interface_defs.h>
#include <stdio.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include "builtins.cuh"

uint3 threadIdx, blockIdx, blockDim, gridDim;

namespace host {

unsigned current;
uintptr_t stacks;
uint32_t intervals = 1;
uint32_t warp_intervals[MAX_THREADS / 32];

namespace {

constexpr size_t GUARD = 4096;

enum State { READY, AT_BARRIER, AT_COLLECTIVE, RETURNED };

struct Thread {
    State state;
    void* stack_pointer;
    unsigned mask;  // of the collective that it waits in
    void* mine;
    void (*act)(void* const*, unsigned);
};

Thread threads[MAX_THREADS];
unsigned thread_count;
Body body;
void* scheduler_stack_pointer;
const void* scheduler_stack;
size_t scheduler_stack_size;

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

void wait(State state) {
    Thread& me = threads[current];
    me.state = state;
    void* fake_stack;
    __sanitizer_start_switch_fiber(&fake_stack, scheduler_stack, scheduler_stack_size);
    host_switch(&me.stack_pointer, scheduler_stack_pointer);
    __sanitizer_finish_switch_fiber(fake_stack, nullptr, nullptr);
}

void entry() {
    __sanitizer_finish_switch_fiber(nullptr, &scheduler_stack, &scheduler_stack_size);
    body();
    wait(RETURNED);
}

void resume(unsigned thread) {
    current = thread;
    threadIdx = {thread, 0, 0};
    void* fake_stack;
    __sanitizer_start_switch_fiber(&fake_stack, stack_of(thread), STACK);
    host_switch(&scheduler_stack_pointer, threads[thread].stack_pointer);
    __sanitizer_finish_switch_fiber(fake_stack, nullptr, nullptr);
}

std::string threads_in(State state) {
    std::string text;
    for (unsigned first = 0; first < thread_count; ++first) {
        if (threads[first].state != state) continue;
        unsigned last = first;
        while (last + 1 < thread_count && threads[last + 1].state == state) ++last;
        text += (text.empty() ? "" : ", ") + std::to_string(first);
        if (last > first) text += "-" + std::to_string(last);
        first = last;
    }
    return text.empty() ? "none" : text;
}

}  // namespace

void barrier() { wait(AT_BARRIER); }

void together(unsigned mask, void* mine, void (*act)(void* const*, unsigned)) {
    const unsigned warp = current & ~31u, lane = current % 32;
    if (!(mask >> lane & 1)) fail("a lane takes part in a warp collective whose mask %08x leaves it out", mask);
    threads[current].mask = mask;
    threads[current].mine = mine;
    threads[current].act = act;
    threads[current].state = AT_COLLECTIVE;
    void* lanes[32] = {};
    for (unsigned other = 0; other < 32; ++other) {
        if (!(mask >> other & 1)) continue;
        const Thread& thread = threads[warp + other];
        if (warp + other >= thread_count || thread.state == RETURNED) {
            fail("a warp collective waits for lane %u, which has returned or does not exist", other);
        }
        if (thread.state != AT_COLLECTIVE) return wait(AT_COLLECTIVE);
        if (thread.mask != mask || thread.act != act) {
            fail("lanes %u and %u meet in different warp collectives", lane, other);
        }
        lanes[other] = thread.mine;
    }
    act(lanes, mask);
    ++warp_intervals[warp / 32];
    for (unsigned other = 0; other < 32; ++other)
        if (mask >> other & 1) threads[warp + other].state = READY;
}

void run_block(unsigned count, Body thread_body, Order order, unsigned seed) {
    thread_count = count;
    body = thread_body;
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
        unsigned waiting = 0, returned = 0;
        for (unsigned i = 0; i < count; ++i) {
            waiting += threads[i].state == AT_BARRIER;
            returned += threads[i].state == RETURNED;
        }
        if (returned == count) return;
        if (waiting < count) {
            fail("not all threads reach a barrier: at __syncthreads %s; in a warp collective %s; returned %s",
                 threads_in(AT_BARRIER).c_str(), threads_in(AT_COLLECTIVE).c_str(), threads_in(RETURNED).c_str());
        }
        for (unsigned i = 0; i < count; ++i) threads[i].state = READY;
    }
}

}  // namespace host
