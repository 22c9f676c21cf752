// What the kernel's translation unit, the threads, the memory checks and the job loop know of each other.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace host {

constexpr unsigned MAX_THREADS = 1024;
constexpr size_t MAX_SHARED = 227 * 1024;

// ---- threads.cpp: the threads of one block, as fibers that run one at a time

constexpr size_t STACK = 256 * 1024;  // of a thread; a sanitizer's report alone takes a good part of it

constexpr size_t GUARD = 4096;        // below each stack

extern unsigned current;  // the running thread, counted within its block
extern uintptr_t stacks;  // of all threads, one after the other

typedef void (*Body)();

// Order in which the threads run between two barriers. A result that depends on it depends on a race.
enum Order { ASCENDING, DESCENDING, SHUFFLED };

void run_block(unsigned threads, Body body, Order order, unsigned seed);

// __syncthreads. Every thread of the block has to come, also those that would rather return.
void barrier();

// A collective of the lanes in `mask`: each passes its operands, the last one to come runs `act` for all of them.
void together(unsigned mask, void* mine, void (*act)(void* const* lanes, unsigned mask));

// ---- memory.cpp: who may read and write what

// Of a kernel's argument. OF_KERNEL_BEFORE is an input, too; BOXES are `Boxes` that hold an array's number among the arguments;
// CONTINUED is an output that launches before have written, too.
enum Role { VALUE, INPUT, OUTPUT, ABSENT, OF_KERNEL_BEFORE, BOXES, CONTINUED };
inline bool is_written(uint32_t role) { return role == OUTPUT || role == CONTINUED; }

struct Argument {
    char name[16];
    uint32_t role;
    uint32_t residue;  // of its address modulo 256
    uint64_t size;     // in bytes
    uint64_t first;    // offset of its first element, which a negative stride puts behind others
};

void begin_launch();
// `elements` marks the bytes that belong to an element: what lies between them must not be touched.
void add_array(const Argument& argument, unsigned char* data, const unsigned char* elements);
int64_t first_unwritten(const unsigned char* data);  // byte of an output that no thread wrote, or -1
void begin_block(unsigned threads, size_t shared_bytes, int pattern);

// Whether it is within an array or dynamic shared memory, so that nothing is left for AddressSanitizer to check.
bool check(uintptr_t address, size_t size, bool write);

// Before it, no thread of the block may read what the kernel before has written.
void wait_for_kernel_before();
void end_thread();

// An asynchronous copy of `size` bytes, of which those from `bytes` on are zeros. It lands at the wait that covers it.
void copy_async(void* shared, const void* global, unsigned size, int bytes);
void copy_async_commit();
void copy_async_wait(unsigned pending);

// Shared memory, dynamic and static, as one range that begins at address 0.
uint32_t shared_address(const void* shared);

// fence.proxy.async: tensor cores and bulk copies see ordinary writes only after it.
void publish();

// ---- barriers.cpp: barriers of some warps, mbarriers, and the bulk copies that arrive there

void warps_sync(int barrier, int threads);
void barrier_init(const void* barrier, int count);
void barrier_init_done();
void barrier_arrive(const void* barrier, uint32_t bytes);  // and announces so many bytes
void barrier_wait(const void* barrier, unsigned parity);
void copy_bulk(void* shared, const void* global, uint32_t bytes, const void* barrier);
// What a TensorMap says of an array with axes channels, W, H, D, N: strides count bytes, every `steps`-th element of a box is
// copied, float32 is rounded to TF32 or not, and rows of so many bytes are swizzled, or none.
struct Boxes {
    uint64_t address;
    int64_t extents[5], strides[5], box[5], steps[5], rounds, swizzled_bytes;
};
struct BoxStart {
    int64_t at[5];
};
void copy_box(void* shared, const Boxes& boxes, const BoxStart& start, const void* barrier);
void store_bulk(void* global, const void* shared, uint32_t bytes);
void store_bulk_commit();
void store_bulk_wait();

// ---- mma.cpp: the tensor cores of a warp

enum Operands { OF_TF32, OF_F16, OF_BF16 };

void mma(Operands operands, int depth, float* d, const unsigned* a, const unsigned* b, const float* c);

// ---- wgmma.cpp: the tensor cores of a warpgroup

// `transposed`: pieces of both operands hold eight rows at one place along K.
void wgmma(Operands operands, int columns, float* d, uint64_t a, uint64_t b, bool accumulate, bool transposed = false);
// A is in registers.
void wgmma_of_registers(Operands operands, int columns, float* d, const unsigned (&a)[4], uint64_t b, bool accumulate);
void wgmma_fence();
void wgmma_commit();
void wgmma_wait(unsigned pending);
void set_registers(int count);

// ---- main.cpp

// Ends the process with the message, the kernel, the block and the thread.
[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));

// ---- kernel.cpp

struct Kernel {
    const char* name;
    void (*run_thread)(void* const* arguments);
};
extern const Kernel kernels[];  // up to one without a name

}  // namespace host
