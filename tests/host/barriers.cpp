// Barriers that not all threads of a block share: those of some warps, and mbarriers, where bulk copies arrive too.
#include <string.h>

#include <algorithm>

#include "internal.h"

namespace host {
namespace {

// ---- barriers of some warps ----------------------------------------------------------------------------------------

struct Meeting {
    int threads;
    std::vector<unsigned> here;
};

Meeting meetings[16];

// ---- mbarriers -----------------------------------------------------------------------------------------------------

struct BulkCopy {
    uint32_t to, size;
    const void* from;
    std::vector<unsigned char> elements;  // in place of `from`
};

struct MBarrier {
    uint32_t address;
    int count, missing;         // arrivals of a phase, and those that are still to come
    uint64_t announced, copied;  // bytes in this phase
    uint32_t phase;
    std::vector<BulkCopy> copies;  // of this phase; they land when it is complete
    std::vector<unsigned> waiting;
    Clock arrived, complete;  // what those knew who arrived: in all phases, in complete phases
    int32_t first_epoch;      // before that of its first phase: bulk copies have a phase's epoch
    int32_t last_copy;        // its epoch
    Access initialised;
    bool ready;  // barrier_init_done has followed
};

MBarrier barriers[MBARRIERS];
unsigned barrier_count;  // of the block
uint16_t numbers[MAX_ADDRESS / 8];  // of the mbarriers by their addresses, plus one

// What an mbarrier holds is the hardware's business. Here a mark shows whether somebody wrote over it.
uint64_t mark_of(uint32_t address) { return 0x9e3779b97f4a7c15u * (address + 1); }

bool is_written_over(uint32_t address) {
    const uint64_t mark = mark_of(address);
    return memcmp(shared_at(address), &mark, sizeof mark) != 0;
}

MBarrier* find(uint32_t address) {
    const bool possible = address % 8 == 0 && address < MAX_ADDRESS && numbers[address / 8];
    return possible ? &barriers[numbers[address / 8] - 1] : nullptr;
}

unsigned actor_of(const MBarrier& b) { return BULK_COPIES + (unsigned)(&b - barriers); }

MBarrier& usable(const void* barrier) {
    const uint32_t address = shared_address(barrier);
    MBarrier* const b = find(address);
    const char* wrong = nullptr;
    if (!b) wrong = "which nobody initialised";
    else if (!comes_before(b->initialised)) wrong = "which another thread initialised with no barrier in between";
    else if (!b->ready) wrong = "before barrier_init_done";
    else if (is_written_over(address)) wrong = "which was written over";
    if (wrong) fail("uses the mbarrier at %s of shared memory, %s", shared_name(address).c_str(), wrong);
    return *b;
}

// Bulk copies land as late as may be: when all arrivals and bytes are in.
void complete_if_all_is_in(MBarrier& b) {
    if (b.missing || b.copied < b.announced) return;
    if (b.copied > b.announced) {
        fail("bulk copies bring %llu bytes to the mbarrier at %s, which expects %llu", (unsigned long long)b.copied,
             shared_name(b.address).c_str(), (unsigned long long)b.announced);
    }
    for (const BulkCopy& copy : b.copies) end_bulk_copy(copy.to, copy.from ? copy.from : copy.elements.data(), copy.size);
    b.copies.clear();
    b.missing = b.count;
    b.announced = b.copied = 0;
    ++b.phase;
    learn(b.complete, b.arrived);
    b.complete.of[actor_of(b)] = epochs[actor_of(b)] = b.first_epoch + (int32_t)b.phase;
    for (unsigned thread : b.waiting) wake(thread);
    b.waiting.clear();
}

}  // namespace

void warps_sync(int barrier, int count) {
    if (barrier == 0 && count == (int)blockDim.x) return host::barrier();
    if (barrier < 0 || barrier >= 16) fail("there is no barrier %d of some warps", barrier);
    if (count <= 0 || count % 32) fail("a barrier of %d threads, which are no whole warps", count);
    start_clocks();
    Meeting& meeting = meetings[barrier];
    if (!meeting.here.empty() && meeting.threads != count) {
        fail("meets others at barrier %d who wait for %d threads, not %d", barrier, meeting.threads, count);
    }
    meeting.threads = count;
    meeting.here.push_back(current);
    if ((int)meeting.here.size() < count) return suspend(AT_WARPS_SYNC);
    std::vector<unsigned> all;
    all.swap(meeting.here);
    std::sort(all.begin(), all.end());
    for (int i = 0; i < count; i += 32) {
        if (all[i] % 32 || all[i + 31] != all[i] + 31) {
            fail("part of a warp at barrier %d: threads %s", barrier, list(all).c_str());
        }
    }
    meet(all);
    for (unsigned thread : all) wake(thread);
}

void barrier_init(const void* barrier, int count) {
    start_clocks();
    const uint32_t address = shared_address(barrier);
    if (address % 8) fail("an mbarrier at the misaligned %s", shared_name(address).c_str());
    if (count < 1 || count >= 1 << 20) fail("an mbarrier of %d arrivals", count);
    if (address >= MAX_ADDRESS) fail("an mbarrier beyond shared memory");
    if (find(address)) fail("the mbarrier at %s is initialised twice", shared_name(address).c_str());
    if (barrier_count == MBARRIERS) fail("more than %u mbarriers", MBARRIERS);
    check((uintptr_t)barrier, 8, true);
    const uint64_t mark = mark_of(address);
    memcpy(shared_at(address), &mark, sizeof mark);
    MBarrier& b = barriers[barrier_count++];
    numbers[address / 8] = (uint16_t)barrier_count;
    mbarriers = std::max(mbarriers, barrier_count);
    b.address = address;
    b.count = b.missing = count;
    b.announced = b.copied = b.phase = 0;
    b.copies.clear();
    b.waiting.clear();
    b.arrived = b.complete = {};
    b.first_epoch = b.last_copy = epochs[actor_of(b)];
    b.initialised = access_of_thread();
    b.ready = false;
}

void barrier_init_done() {
    for (unsigned i = 0; i < barrier_count; ++i)
        if (barriers[i].initialised.actor == THREADS + current) barriers[i].ready = true;
}

void barrier_arrive(const void* barrier, uint32_t bytes) {
    MBarrier& b = usable(barrier);
    if (!b.missing) {
        fail("arrives at the mbarrier at %s, where all %d arrivals of this phase are in and %llu bytes are not",
             shared_name(b.address).c_str(), b.count, (unsigned long long)(b.announced - b.copied));
    }
    release(b.arrived);
    --b.missing;
    b.announced += bytes;
    if (b.announced >= 1 << 20) fail("more bytes than an mbarrier counts: %llu", (unsigned long long)b.announced);
    complete_if_all_is_in(b);
}

void barrier_wait(const void* barrier, unsigned parity) {
    MBarrier& b = usable(barrier);
    if (parity > 1) fail("waits for parity %u", parity);
    const uint32_t phase = b.phase;
    if ((phase & 1) == parity) {
        b.waiting.push_back(current);
        suspend(AT_MBARRIER);
        if (b.phase != phase + 1) {
            fail("waits at the mbarrier at %s for phase %u, which phase %u follows at once: a GPU may miss it",
                 shared_name(b.address).c_str(), phase, phase + 1);
        }
    }
    acquire(b.complete);
}

void copy_bulk(void* shared, const void* global, uint32_t bytes, const void* barrier) {
    MBarrier& b = usable(barrier);
    const uint32_t to = shared_address(shared);
    b.last_copy = epochs[actor_of(b)] = b.first_epoch + (int32_t)b.phase + 1;
    begin_bulk_copy(to, global, bytes, actor_of(b), b.last_copy);
    b.copies.push_back({to, bytes, global, {}});
    b.copied += bytes;
    complete_if_all_is_in(b);
}

void copy_box(void* shared, const Boxes& boxes, const BoxStart& start, const void* barrier) {
    MBarrier& b = usable(barrier);
    const uint32_t to = shared_address(shared);
    const int64_t itemsize = boxes.strides[0], row_bytes = boxes.box[0] * itemsize;
    uint64_t bytes = (uint64_t)itemsize;
    for (int axis = 0; axis < 5; ++axis) {
        const int64_t box = boxes.box[axis], step = boxes.steps[axis];
        if (box < 1 || box > 256 || step < 1 || step > 8) fail("a box of %d elements, of which every %d-th is copied", (int)box, (int)step);
        if (axis ? boxes.strides[axis] % 16 : itemsize != 2 && itemsize != 4) fail("an array with strides that copies of boxes cannot take");
        bytes *= (uint64_t)((box + step - 1) / step);
    }
    const bool is_swizzled = boxes.swizzled_bytes > 0, has_swizzle = row_bytes == 32 || row_bytes == 64 || row_bytes == 128;
    if ((is_swizzled ? !has_swizzle || row_bytes != boxes.swizzled_bytes : row_bytes % 16 != 0) || boxes.steps[0] != 1) fail("a box of rows of %d bytes", (int)row_bytes);
    if (start.at[0] * itemsize % 16) fail("a box from channel %d on, which is not a multiple of 16 bytes", (int)start.at[0]);
    if (boxes.address % 16 || to % (is_swizzled ? 8 * row_bytes : 128)) fail("a box from a misaligned address, or to one: %s", shared_name(to).c_str());
    b.last_copy = epochs[actor_of(b)] = b.first_epoch + (int32_t)b.phase + 1;
    b.copies.push_back({to, (uint32_t)bytes, nullptr, std::vector<unsigned char>(bytes)});
    begin_box_copy(to, boxes, start, b.copies.back().elements.data(), (uint32_t)bytes, actor_of(b), b.last_copy);
    b.copied += bytes;
    complete_if_all_is_in(b);
}

// Bulk stores of threads that have not waited for them: read as late as can be, when they do.
struct BulkStore {
    unsigned thread;
    void* to;
    uint32_t from, size;
    bool committed;
};
static std::vector<BulkStore> bulk_stores;

void store_bulk(void* global, const void* shared, uint32_t bytes) {
    const uint32_t from = shared_address(shared);
    check_bulk_store(global, from, bytes);
    bulk_stores.push_back({current, global, from, bytes, false});
}

void store_bulk_commit() {
    for (BulkStore& store : bulk_stores) store.committed |= store.thread == current;
}

void store_bulk_wait() {
    std::vector<BulkStore> left;
    for (const BulkStore& store : bulk_stores) {
        if (store.thread != current || !store.committed) {
            left.push_back(store);
        } else {
            memcpy(store.to, shared_at(store.from), store.size);
        }
    }
    bulk_stores = left;
}

void begin_barriers() {
    for (unsigned i = 0; i < barrier_count; ++i) numbers[barriers[i].address / 8] = 0;
    barrier_count = 0;
    for (Meeting& meeting : meetings) meeting.here.clear();
}

void end_barriers() {
    if (!bulk_stores.empty()) {
        fail("the block ends before thread %u waits for its bulk stores", bulk_stores[0].thread);
    }
    for (unsigned i = 0; i < barrier_count; ++i) {
        const MBarrier& b = barriers[i];
        if (is_written_over(b.address)) {
            fail("the mbarrier at %s was written over, but never invalidated", shared_name(b.address).c_str());
        }
        bool waited_for = b.last_copy == b.first_epoch;  // there was none
        for (unsigned thread = 0; thread < blockDim.x; ++thread) {
            waited_for |= known[thread].of[actor_of(b)] >= b.last_copy;
        }
        if (waited_for) continue;
        fail("the block ends before a thread waits for the bulk copies to the mbarrier at %s, which lacks %d of %d "
             "arrivals and expects %llu bytes, of which %llu are copied", shared_name(b.address).c_str(), b.missing,
             b.count, (unsigned long long)b.announced, (unsigned long long)b.copied);
    }
}

std::string waits_at_barriers() {
    std::string text;
    for (int i = 0; i < 16; ++i) {
        Meeting& meeting = meetings[i];
        if (meeting.here.empty()) continue;
        std::sort(meeting.here.begin(), meeting.here.end());
        text += "; at barrier " + std::to_string(i) + " of " + std::to_string(meeting.threads) + " threads " +
                list(meeting.here);
    }
    for (unsigned i = 0; i < barrier_count; ++i) {
        MBarrier& b = barriers[i];
        if (b.waiting.empty()) continue;
        std::sort(b.waiting.begin(), b.waiting.end());
        const uint64_t bytes = b.announced - std::min(b.announced, b.copied);
        text += "; at the mbarrier at " + shared_name(b.address) + " in phase " + std::to_string(b.phase) +
                ", which lacks " + std::to_string(b.missing) + " of " + std::to_string(b.count) + " arrivals and " +
                std::to_string(bytes) + " of " + std::to_string(b.announced) + " bytes, " + list(b.waiting);
    }
    return text;
}

}  // namespace host
