// Every load and store of a kernel passes through here: AddressSanitizer calls a function for each, and the linker hands
// that call over (--wrap). Checked are arrays by element, shared memory by byte, and races within a block.
#include <link.h>
#include <sanitizer/asan_interface.h>
#include <string.h>

#include <vector>

#include "internal.h"

alignas(1024) thread_local unsigned char shared_bytes[host::MAX_SHARED];  // the dynamic shared memory

namespace host {
namespace {

// ---- shared memory -------------------------------------------------------------------------------------------------

// Tracked in units of two bytes, the smallest element: the last write and the last read. Where several threads have read in
// one interval, `readers` is SEVERAL + their warp, or ANY, and the last of them has to do only where clocks run.
constexpr size_t UNIT = 2;
constexpr uint16_t SEVERAL = 2048, ANY = 4095;

struct Unit {
    Access written, read;
    uint16_t readers;
    bool in_flight;  // an asynchronous copy has been issued to it
};

Unit units[MAX_SHARED / UNIT];
size_t shared_size;
uint32_t first_interval;  // of this block

// The last read of every 16 bytes by each warpgroup's wgmma: the epoch in which it is complete.
constexpr size_t PIECE = 16;
int32_t multiplied[MAX_SHARED / PIECE][WARPGROUPS];

std::string who(const Access& access) {
    if (is_thread(access.actor)) return "thread " + std::to_string(access.actor - THREADS);
    return access.actor >= BULK_COPIES ? "a bulk copy" : "a wgmma";
}

void check_read(size_t index, const char* reads) {
    const Unit& unit = units[index];
    const size_t byte = index * UNIT;
    if (unit.in_flight) fail("%s shared memory at byte %zu before the wait that covers the copy into it", reads, byte);
    if (unit.written.interval < first_interval) {
        fail("%s shared memory at byte %zu, which no thread of the block wrote", reads, byte);
    }
    if (!comes_before(unit.written)) {
        fail("%s shared memory at byte %zu, which %s wrote with no barrier in between", reads, byte,
             who(unit.written).c_str());
    }
}

void read_shared(size_t index) {
    check_read(index, "reads");
    Unit& unit = units[index];
    const unsigned warp = current / 32, reader = unit.read.actor - THREADS;
    if (unit.read.interval != intervals) {
        unit.readers = (uint16_t)current;
    } else if (reader != current) {
        const bool of_warp = unit.readers != ANY && reader / 32 == warp;
        unit.readers = of_warp ? (uint16_t)(SEVERAL + warp) : ANY;
    }
    unit.read = access_of_thread();
}

bool all_read_before(const Unit& unit) {
    if (unit.read.interval != intervals || unit.readers < SEVERAL || clocks_run) return comes_before(unit.read);
    return unit.readers == SEVERAL + current / 32 && unit.read.warp_interval != warp_intervals[current / 32];
}

void check_write(size_t index) {
    const Unit& unit = units[index];
    const size_t byte = index * UNIT;
    if (!comes_before(unit.written)) {
        fail("writes shared memory at byte %zu, which %s wrote with no barrier in between", byte,
             who(unit.written).c_str());
    }
    if (!all_read_before(unit)) {
        if (unit.readers < SEVERAL || clocks_run) {
            fail("writes shared memory at byte %zu, which %s read with no barrier in between", byte,
                 who(unit.read).c_str());
        }
        fail("writes shared memory at byte %zu, which several threads read with no barrier in between", byte);
    }
}

void check_multiplied(size_t offset, size_t size) {
    if (!clocks_run) return;
    for (size_t piece = offset / PIECE; piece * PIECE < offset + size; ++piece) {
        for (unsigned warpgroup = 0; warpgroup * 128 < blockDim.x; ++warpgroup) {
            if (multiplied[piece][warpgroup] <= known[current].of[TENSOR_CORES + warpgroup]) continue;
            fail("writes shared memory at byte %zu, which a wgmma of threads %u-%u read with no wait for it and barrier in "
                 "between", piece * PIECE, warpgroup * 128, warpgroup * 128 + 127);
        }
    }
}

void write_shared(size_t offset, size_t size, const Access& access, bool in_flight) {
    check_multiplied(offset, size);
    const size_t end = (offset + size + UNIT - 1) / UNIT;
    for (size_t i = offset / UNIT; i < end; ++i) {
        check_write(i);
        units[i].written = access;
        units[i].in_flight = in_flight;
    }
}

void access_shared(size_t offset, size_t size, bool write) {
    if (offset + size > shared_size) {
        fail("%s %zu bytes of shared memory at byte %zu, past its end at %zu", write ? "writes" : "reads", size, offset,
             shared_size);
    }
    if (write) return write_shared(offset, size, access_of_thread(), false);
    const size_t end = (offset + size + UNIT - 1) / UNIT;
    for (size_t i = offset / UNIT; i < end; ++i) read_shared(i);
}

// ---- arrays --------------------------------------------------------------------------------------------------------

struct Array {
    Argument argument;
    uintptr_t begin;
    const unsigned char* elements;
    std::vector<uint32_t> writer;  // of each byte of an output: a number of its block and thread, or 0
};

std::vector<Array> arrays;
// Each thread that reads what that kernel writes waits itself: a barrier behind another's wait would do, but none relies on it.
bool waited_for_kernel_before[MAX_THREADS];

void access_array(Array& array, size_t offset, size_t size, bool write) {
    const char* name = array.argument.name;
    if (offset + size > array.argument.size) {
        fail("%s %zu bytes at byte %zu of %s, past its end at %zu", write ? "writes" : "reads", size, offset, name,
             (size_t)array.argument.size);
    }
    if (write && !is_written(array.argument.role)) fail("writes byte %zu of %s, an input", offset, name);
    if (array.argument.role == OF_KERNEL_BEFORE && !waited_for_kernel_before[current]) {
        fail("reads byte %zu of %s before the wait for the kernel that writes it", offset, name);
    }
    uint32_t four;
    if (!write && size == sizeof four && array.argument.role == INPUT) {  // most accesses: all bytes at once
        memcpy(&four, array.elements + offset, sizeof four);
        if (four == 0x01010101) return;
    }
    const uint32_t me = blockIdx.x * MAX_THREADS + current + 1;
    for (size_t i = offset; i < offset + size; ++i) {
        if (!array.elements[i]) {
            fail("%s byte %zu of %s, which lies between its elements", write ? "writes" : "reads", i, name);
        }
        if (!is_written(array.argument.role)) continue;
        uint32_t& writer = array.writer[i];
        if (!write && !writer && array.argument.role == OUTPUT) fail("reads byte %zu of %s, which nobody wrote", i, name);
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
    std::vector<Copy> issued;    // and not yet waited for, the oldest first
    std::vector<size_t> groups;  // how many of these had been issued at each commit
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
    if (is_written(argument.role)) arrays.back().writer.resize(argument.size);
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
    for (unsigned i = 0; i < threads; ++i) {
        copies[i].issued.clear();
        copies[i].groups.clear();
        waited_for_kernel_before[i] = false;
    }
}

void wait_for_kernel_before() { waited_for_kernel_before[current] = true; }

bool check(uintptr_t address, size_t size, bool write) {
    if (address - stacks < MAX_THREADS * (GUARD + STACK)) return false;
    const size_t offset = address - (uintptr_t)shared_bytes;
    if (offset < MAX_SHARED) {
        access_shared(offset, size, write);
        return true;
    }
    for (Array& array : arrays) {
        if (address - array.begin >= array.argument.size) continue;
        access_array(array, address - array.begin, size, write);
        return true;
    }
    if (all_shared.holds(address) || image.holds(address) || __asan_region_is_poisoned((void*)address, size)) return false;
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
        const bool sound = check((uintptr_t)global, (size_t)bytes_read, false);
        if (!sound && __asan_region_is_poisoned((void*)global, (size_t)bytes_read)) {
            fail("an asynchronous copy reads past an array");
        }
        memcpy(copy.data, global, (size_t)bytes_read);
    }
    write_shared(copy.offset, size, access_of_thread(), true);
    copies[current].issued.push_back(copy);
}

void copy_async_commit() { copies[current].groups.push_back(copies[current].issued.size()); }

void copy_async_wait(unsigned pending) {
    auto& [issued, groups] = copies[current];
    if (groups.size() <= pending) return;
    const size_t complete = groups.size() - pending, end = groups[complete - 1];
    for (size_t i = 0; i < end; ++i) {
        write_shared(issued[i].offset, issued[i].size, access_of_thread(), false);
        memcpy(shared_bytes + issued[i].offset, issued[i].data, issued[i].size);
    }
    issued.erase(issued.begin(), issued.begin() + (ptrdiff_t)end);
    groups.erase(groups.begin(), groups.begin() + (ptrdiff_t)complete);
    for (size_t& left : groups) left -= end;
}

// ---- tensor cores and bulk copies ------------------------------------------------------------------------------------

uint32_t shared_address(const void* shared) {
    const uintptr_t address = (uintptr_t)shared;
    if (!all_shared.holds(address)) fail("an address outside shared memory where one inside is required");
    return (uint32_t)(address - (uintptr_t)all_shared.begin);
}

unsigned char* shared_at(uint32_t address) { return all_shared.begin + address; }

std::string shared_name(uint32_t address) {
    const size_t offset = (size_t)(shared_at(address) - shared_bytes);
    return (offset < MAX_SHARED ? "byte " : "static address ") + std::to_string(offset < MAX_SHARED ? offset : address);
}

// Whether it lies in dynamic shared memory, which is tracked; `offset` is then where.
static bool is_dynamic(uint32_t address, size_t size, size_t& offset, const char* accesses) {
    offset = (size_t)(shared_at(address) - shared_bytes);
    if (offset < MAX_SHARED && offset + size > shared_size) {
        fail("%s %zu bytes of shared memory at byte %zu, past its end at %zu", accesses, size, offset, shared_size);
    }
    if (address + size > all_shared.size) fail("%s shared memory past its end", accesses);
    return offset < MAX_SHARED;
}

const unsigned char* read_by_wgmma(uint32_t address, unsigned warpgroup, int32_t epoch) {
    size_t offset;
    if (is_dynamic(address, PIECE, offset, "a wgmma reads")) {
        for (size_t i = offset / UNIT; i < (offset + PIECE) / UNIT; ++i) {
            check_read(i, "a wgmma reads");
            const Access& written = units[i].written;
            if (is_thread(written.actor) && !published(written)) {
                fail("a wgmma reads shared memory at byte %zu, which %s did not publish between its write and a barrier",
                     i * UNIT, who(written).c_str());
            }
        }
        multiplied[offset / PIECE][warpgroup] = epoch;
    }
    return shared_at(address);
}

static void begin_copy(uint32_t to, uint32_t size, unsigned actor, int32_t epoch);

void begin_bulk_copy(uint32_t to, const void* from, uint32_t size, unsigned actor, int32_t epoch) {
    if (to % 16 || (uintptr_t)from % 16 || size % 16) {
        fail("a bulk copy of %u bytes to %s, a misaligned address or size", size, shared_name(to).c_str());
    }
    if (size) {
        const bool sound = check((uintptr_t)from, size, false);
        if (!sound && __asan_region_is_poisoned((void*)from, size)) fail("a bulk copy reads past an array");
    }
    begin_copy(to, size, actor, epoch);
}

// What copies do with float32 for tensor cores: to the nearest, of two the even one.
static void round_to_tf32(unsigned char* element) {
    uint32_t bits;
    memcpy(&bits, element, 4);
    if ((bits & 0x7f800000u) != 0x7f800000u) bits += 0xfffu + (bits >> 13 & 1);
    bits &= 0xffffe000u;
    memcpy(element, &bits, 4);
}

void begin_box_copy(uint32_t to, const Boxes& boxes, const BoxStart& start, unsigned char* elements, uint32_t size, unsigned actor,
                    int32_t epoch) {
    int64_t count[5];
    for (int axis = 0; axis < 5; ++axis) count[axis] = (boxes.box[axis] + boxes.steps[axis] - 1) / boxes.steps[axis];
    const uint32_t itemsize = (uint32_t)boxes.strides[0], row_bytes = (uint32_t)boxes.box[0] * itemsize;
    for (uint32_t at = 0; at < size; at += itemsize) {
        int64_t rest = at / row_bytes;
        const int64_t channel = start.at[0] + at % row_bytes / itemsize;
        uint64_t from = boxes.address + (uint64_t)(channel * boxes.strides[0]);
        bool inside = channel >= 0 && channel < boxes.extents[0];
        for (int axis = 1; axis < 5; ++axis) {
            const int64_t place = start.at[axis] + rest % count[axis] * boxes.steps[axis];
            rest /= count[axis];
            inside &= place >= 0 && place < boxes.extents[axis];
            from += (uint64_t)(place * boxes.strides[axis]);
        }
        unsigned char* const element = elements + (boxes.swizzled_bytes == 0 ? at : swizzled(to + at, row_bytes) - to);
        if (!inside) {
            memset(element, 0, itemsize);
            continue;
        }
        const bool sound = check((uintptr_t)from, itemsize, false);
        if (!sound && __asan_region_is_poisoned((void*)from, itemsize)) fail("a copy of a box reads past an array");
        memcpy(element, (const void*)from, itemsize);
        if (boxes.rounds) round_to_tf32(element);
    }
    begin_copy(to, size, actor, epoch);
}

static void begin_copy(uint32_t to, uint32_t size, unsigned actor, int32_t epoch) {
    size_t offset;
    if (is_dynamic(to, size, offset, "a bulk copy writes")) {
        for (size_t i = offset / UNIT; i < (offset + size) / UNIT; ++i) {
            const Access& written = units[i].written;
            if (written.interval >= first_interval && is_thread(written.actor) && !published(written)) {
                fail("a bulk copy writes shared memory at byte %zu, which %s did not publish between its write and a "
                     "barrier", i * UNIT, who(written).c_str());
            }
        }
        write_shared(offset, size, {intervals, 0, epoch, (uint16_t)actor}, true);
    }
    memset(shared_at(to), 0xff, size);
}

void end_bulk_copy(uint32_t to, const void* from, uint32_t size) {
    const size_t offset = (size_t)(shared_at(to) - shared_bytes);
    if (offset < MAX_SHARED)
        for (size_t i = offset / UNIT; i < (offset + size) / UNIT; ++i) units[i].in_flight = false;
    memcpy(shared_at(to), from, size);
}

void check_bulk_store(const void* to, uint32_t from, uint32_t size) {
    if (from % 16 || (uintptr_t)to % 16 || size % 16) {
        fail("a bulk store of %u bytes from %s, a misaligned address or size", size, shared_name(from).c_str());
    }
    size_t offset;
    if (is_dynamic(from, size, offset, "a bulk store reads")) {
        for (size_t i = offset / UNIT; i < (offset + size) / UNIT; ++i) {
            check_read(i, "a bulk store reads");
            const Access& written = units[i].written;
            if (is_thread(written.actor) && !published(written)) {
                fail("a bulk store reads shared memory at byte %zu, which %s did not publish", i * UNIT, who(written).c_str());
            }
        }
    }
    if (size) {
        const bool sound = check((uintptr_t)to, size, true);
        if (!sound && __asan_region_is_poisoned((void*)to, size)) fail("a bulk store writes past an array");
    }
}

}  // namespace host

// ---- AddressSanitizer's calls ---------------------------------------------------------------------------------------

static uintptr_t shadow_begin() {
    size_t scale, offset;
    __asan_get_shadow_mapping(&scale, &offset);
    return offset;
}
static const uintptr_t shadow = shadow_begin();

// Most accesses: to a thread's own variables, where AddressSanitizer has nothing to object. What its function would find,
// without the call.
static inline bool is_sound_on_stack(uintptr_t address, size_t size) {
    if (size > 8 || address - host::stacks >= host::MAX_THREADS * (host::GUARD + host::STACK)) return false;
    const signed char valid = *(const signed char*)((address >> 3) + shadow);  // bytes of eight, or 0: all
    return !valid || (signed char)((address & 7) + size) <= valid;
}

[[noreturn]] static void fail_misaligned(uintptr_t address, size_t size) {
    host::fail("accesses %zu bytes at the misaligned address %#zx", size, address);
}

// Of a type with less alignment, the compiler calls the function for any size.
#define HOST_ACCESS(kind, size, write)                              \
    extern "C" void __real___asan_##kind##size(uintptr_t address);  \
    extern "C" void __wrap___asan_##kind##size(uintptr_t address) { \
        if (address % size) fail_misaligned(address, size);         \
        if (is_sound_on_stack(address, size)) return;               \
        if (host::check(address, size, write)) return;              \
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
        if (host::check(address, size, write)) return;                          \
        __real___asan_##kind##N(address, size);                                 \
    }
HOST_ACCESS_N(load, false)
HOST_ACCESS_N(store, true)
