// Every load and store of a kernel passes through here: AddressSanitizer calls a function for each, and the linker hands
// that call over (--wrap). Checked are arrays by element, shared memory by byte, and races within a block.
#include <link.h>
#include <sanitizer/asan_interface.h>
#include <string.h>

#include <vector>

#include "builtins.cuh"

alignas(1024) thread_local unsigned char shared_bytes[host::MAX_SHARED];  // the dynamic shared memory

namespace host {
namespace {

// ---- shared memory -------------------------------------------------------------------------------------------------

// Tracked in units of two bytes, the smallest element. `read` and `written` are `intervals` at the last access, and
// `read_warp` and `written_warp` that of the thread's warp. A reader is a thread; or SEVERAL + a warp, or ANY, when several
// have read in one interval.
constexpr size_t UNIT = 2;
constexpr uint16_t SEVERAL = 2048, ANY = 4095;

struct Unit {
    uint32_t written, written_warp, read, read_warp;
    uint16_t writer, reader;
    bool in_flight;  // an asynchronous copy has been issued to it
};

Unit units[MAX_SHARED / UNIT];
size_t shared_size;
uint32_t first_interval;  // of this block

bool concurrent(uint32_t when, uint32_t when_warp, unsigned who) {
    if (when != intervals) return false;
    const unsigned warp = who >= SEVERAL ? who - SEVERAL : who / 32;
    return who == ANY || warp != current / 32 || when_warp == warp_intervals[warp];
}

void read_shared(size_t index) {
    Unit& unit = units[index];
    const size_t byte = index * UNIT;
    if (unit.in_flight) fail("reads shared memory at byte %zu before the wait that covers the copy into it", byte);
    if (unit.written < first_interval) fail("reads shared memory at byte %zu, which no thread of the block wrote", byte);
    if (unit.writer != current && concurrent(unit.written, unit.written_warp, unit.writer)) {
        fail("reads shared memory at byte %zu, which thread %u wrote with no barrier in between", byte, unit.writer);
    }
    uint16_t reader = (uint16_t)current;
    if (unit.read == intervals && unit.reader != current) {
        const unsigned before = unit.reader >= SEVERAL ? unit.reader - SEVERAL : unit.reader / 32u;
        reader = unit.reader != ANY && before == current / 32 ? (uint16_t)(SEVERAL + before) : ANY;
    }
    unit.read = intervals;
    unit.read_warp = warp_intervals[current / 32];
    unit.reader = reader;
}

void write_shared(size_t index, bool in_flight) {
    Unit& unit = units[index];
    const size_t byte = index * UNIT;
    if (unit.writer != current && concurrent(unit.written, unit.written_warp, unit.writer)) {
        fail("writes shared memory at byte %zu, which thread %u wrote with no barrier in between", byte, unit.writer);
    }
    if (unit.reader != current && concurrent(unit.read, unit.read_warp, unit.reader)) {
        if (unit.reader < SEVERAL) {
            fail("writes shared memory at byte %zu, which thread %u read with no barrier in between", byte, unit.reader);
        }
        fail("writes shared memory at byte %zu, which several threads read with no barrier in between", byte);
    }
    unit.written = intervals;
    unit.written_warp = warp_intervals[current / 32];
    unit.writer = (uint16_t)current;
    unit.in_flight = in_flight;
}

void access_shared(size_t offset, size_t size, bool write) {
    if (offset + size > shared_size) {
        fail("%s %zu bytes of shared memory at byte %zu, past its end at %zu", write ? "writes" : "reads", size, offset,
             shared_size);
    }
    const size_t end = (offset + size + UNIT - 1) / UNIT;
    for (size_t i = offset / UNIT; i < end; ++i) write ? write_shared(i, false) : read_shared(i);
}

void mark_copy(size_t offset, size_t size, bool in_flight) {
    for (size_t i = offset / UNIT; i < (offset + size) / UNIT; ++i) write_shared(i, in_flight);
}

// ---- arrays --------------------------------------------------------------------------------------------------------

struct Array {
    Argument argument;
    uintptr_t begin;
    const unsigned char* elements;
    std::vector<uint32_t> writer;  // of each byte of an output: a number of its block and thread, or 0
};

std::vector<Array> arrays;

void access_array(Array& array, size_t offset, size_t size, bool write) {
    const char* name = array.argument.name;
    if (offset + size > array.argument.size) {
        fail("%s %zu bytes at byte %zu of %s, past its end at %zu", write ? "writes" : "reads", size, offset, name,
             (size_t)array.argument.size);
    }
    if (write && array.argument.role != OUTPUT) fail("writes byte %zu of %s, an input", offset, name);
    const uint32_t me = blockIdx.x * MAX_THREADS + current + 1;
    for (size_t i = offset; i < offset + size; ++i) {
        if (!array.elements[i]) {
            fail("%s byte %zu of %s, which lies between its elements", write ? "writes" : "reads", i, name);
        }
        if (array.argument.role != OUTPUT) continue;
        uint32_t& writer = array.writer[i];
        if (!write && !writer) fail("reads byte %zu of %s, which nobody wrote", i, name);
        if (write && writer && writer != me) {
            fail("writes byte %zu of %s, which thread %u of block %u wrote", i, name, (writer - 1) % MAX_THREADS,
                 (writer - 1) / MAX_THREADS);
        }
        if (write) writer = me;
    }
}

// ---- asynchronous copies -------------------------------------------------------------------------------------------

struct Copy {
    size_t offset;
    unsigned size;
    unsigned char data[16];
};

struct Copies {
    std::vector<Copy> open;
    std::vector<std::vector<Copy>> groups;  // committed and not yet waited for, the oldest first
};

Copies copies[MAX_THREADS];

// ---- what belongs to the program ------------------------------------------------------------------------------------

struct Segment {
    unsigned char* begin;
    size_t size;

    bool holds(uintptr_t address) const { return address - (uintptr_t)begin < size; }
};

// The executable's thread-local segment is all shared memory, since nothing else in it is thread_local.
Segment thread_local_segment() {
    Segment segment = {};
    dl_iterate_phdr(
        [](dl_phdr_info* info, size_t, void* to) {
            for (int i = 0; i < info->dlpi_phnum; ++i)
                if (info->dlpi_phdr[i].p_type == PT_TLS)
                    *(Segment*)to = {(unsigned char*)info->dlpi_tls_data, info->dlpi_phdr[i].p_memsz};
            return 1;  // the first object is the executable
        },
        &segment);
    return segment;
}

const Segment all_shared = thread_local_segment();
extern "C" unsigned char __executable_start, _end;  // from the linker: code, constants and variables
const Segment image = {&__executable_start, (size_t)(&_end - &__executable_start)};

void fill_static_shared(int pattern) {
    unsigned char* const end = all_shared.begin + all_shared.size;
    memset(all_shared.begin, pattern, (size_t)(shared_bytes - all_shared.begin));
    unsigned char* const behind = shared_bytes + sizeof shared_bytes;
    memset(behind, pattern, (size_t)(end - behind));
}

}  // namespace

void begin_launch() {
    arrays.clear();
}

void add_array(const Argument& argument, unsigned char* data, const unsigned char* elements) {
    arrays.push_back({argument, (uintptr_t)data, elements, {}});
    if (argument.role == OUTPUT) arrays.back().writer.resize(argument.size);
}

int64_t first_unwritten(const unsigned char* data) {
    for (const Array& array : arrays) {
        if (array.begin != (uintptr_t)data) continue;
        for (size_t i = 0; i < array.argument.size; ++i)
            if (array.elements[i] && !array.writer[i]) return (int64_t)i;
    }
    return -1;
}

void begin_block(unsigned threads, size_t size, int pattern) {
    shared_size = size;
    first_interval = intervals + 1;
    memset(shared_bytes, pattern, size);
    fill_static_shared(pattern);
    for (size_t i = 0; i < size / UNIT; ++i) units[i].in_flight = false;
    for (unsigned i = 0; i < threads; ++i) copies[i] = {};
}

void check(uintptr_t address, size_t size, bool write) {
    if (address - stacks < MAX_THREADS * (GUARD + STACK)) return;
    const size_t offset = address - (uintptr_t)shared_bytes;
    if (offset < MAX_SHARED) return access_shared(offset, size, write);
    for (Array& array : arrays) {
        if (address - array.begin < array.argument.size) return access_array(array, address - array.begin, size, write);
    }
    if (all_shared.holds(address) || image.holds(address) || __asan_region_is_poisoned((void*)address, size)) return;
    fail("%s %zu bytes that belong to no argument", write ? "writes" : "reads", size);
}

void copy_async(void* shared, const void* global, unsigned size, int bytes_read) {
    Copy copy = {(size_t)((uintptr_t)shared - (uintptr_t)shared_bytes), size, {}};
    if (copy.offset >= MAX_SHARED || copy.offset + size > shared_size) {
        fail("an asynchronous copy to byte %zu of shared memory, which ends at %zu", copy.offset, shared_size);
    }
    if (copy.offset % size) fail("an asynchronous copy of %u bytes to the misaligned shared byte %zu", size, copy.offset);
    if (bytes_read < 0 || bytes_read > (int)size) fail("an asynchronous copy of %d bytes into %u", bytes_read, size);
    if (bytes_read) {
        if ((uintptr_t)global % size) fail("an asynchronous copy of %u bytes from a misaligned address", size);
        check((uintptr_t)global, (size_t)bytes_read, false);
        if (__asan_region_is_poisoned((void*)global, (size_t)bytes_read)) fail("an asynchronous copy reads past an array");
        memcpy(copy.data, global, (size_t)bytes_read);
    }
    mark_copy(copy.offset, size, true);
    copies[current].open.push_back(copy);
}

void copy_async_commit() {
    Copies& mine = copies[current];
    mine.groups.push_back(mine.open);
    mine.open.clear();
}

void copy_async_wait(unsigned pending) {
    auto& groups = copies[current].groups;
    while (groups.size() > pending) {
        for (const Copy& copy : groups.front()) {
            mark_copy(copy.offset, copy.size, false);
            memcpy(shared_bytes + copy.offset, copy.data, copy.size);
        }
        groups.erase(groups.begin());
    }
}

}  // namespace host

// ---- AddressSanitizer's calls ---------------------------------------------------------------------------------------

#define HOST_ACCESS(kind, size, write)                              \
    extern "C" void __real___asan_##kind##size(uintptr_t address);  \
    extern "C" void __wrap___asan_##kind##size(uintptr_t address) { \
        host::check(address, size, write);                          \
        __real___asan_##kind##size(address);                        \
    }
#define HOST_ACCESSES(size) HOST_ACCESS(load, size, false) HOST_ACCESS(store, size, true)
HOST_ACCESSES(1)
HOST_ACCESSES(2)
HOST_ACCESSES(4)
HOST_ACCESSES(8)
HOST_ACCESSES(16)

#define HOST_ACCESS_N(kind, write)                                              \
    extern "C" void __real___asan_##kind##N(uintptr_t address, size_t size);    \
    extern "C" void __wrap___asan_##kind##N(uintptr_t address, size_t size) {   \
        host::check(address, size, write);                                      \
        __real___asan_##kind##N(address, size);                                 \
    }
HOST_ACCESS_N(load, false)
HOST_ACCESS_N(store, true)
