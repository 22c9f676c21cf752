// Runs jobs: `program` reads them from standard input and answers each; `program JOB [BLOCK]` runs one from a file, or one
// block of it, for a debugger. host/execute.py writes the jobs. The program's name begins with the kernel's, up to a hyphen.
#include <sanitizer/common_interface_defs.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <vector>

#include "internal.h"

// Nothing is kept from reuse: a launch's memory is freed after its last block.
extern "C" const char* __asan_default_options() {
    return "abort_on_error=1:detect_leaks=0:malloc_context_size=0:quarantine_size_mb=0:thread_local_quarantine_size_kb=0";
}
extern "C" const char* __ubsan_default_options() { return "abort_on_error=1:print_stacktrace=1"; }

namespace {

struct Job {
    uint32_t grid, block, shared_bytes, arguments, order, seed, pattern;
};

const host::Kernel* kernel;
std::vector<void*> launch_arguments;
bool in_kernel;

void print_place() {
    if (!in_kernel) return;
    fprintf(stderr, "  in kernel %s, block %u of %u, thread %u of %u\n", kernel->name, blockIdx.x, gridDim.x,
            host::current, blockDim.x);
}

// UndefinedBehaviorSanitizer's checks are no more than an instruction, unless compiled for debugging.
void on_undefined_behaviour(int) {
    host::fail("undefined behaviour, such as an overflow, a shift too far or an index past an array: HOST_DEBUG=1 says which");
}

void on_abort(int) {  // the sanitizers end a process so
    print_place();
    _exit(1);
}

void read_all(FILE* from, void* to, size_t size) {
    if (size && fread(to, 1, size, from) != size) {
        fprintf(stderr, "the job ends early\n");
        _exit(2);
    }
}

const host::Kernel* named(const char* program) {
    const char* const slash = strrchr(program, '/');
    const char* const name = slash ? slash + 1 : program;
    for (const host::Kernel* k = host::kernels; k->name; ++k)
        if (!strncmp(name, k->name, strlen(k->name)) && name[strlen(k->name)] == '-') return k;
    fprintf(stderr, "%s names no kernel\n", program);
    exit(2);
}

// Runs the next job; false at the end of the input.
bool run_job(FILE* from, FILE* to, long only_block) {
    Job job;
    if (fread(&job, sizeof job, 1, from) != 1) return false;
    struct Memory {
        host::Argument argument;
        void* allocated;
        unsigned char* data;
        void* pointer;  // that the kernel gets
        std::vector<unsigned char> elements;
    };
    std::vector<Memory> memories(job.arguments);
    host::begin_launch();
    launch_arguments.clear();
    for (Memory& m : memories) {
        read_all(from, &m.argument, sizeof m.argument);
        // Exactly as large as the argument, so that AddressSanitizer sees what passes its end.
        if (posix_memalign(&m.allocated, 256, m.argument.residue + m.argument.size)) host::fail("no memory for an argument");
        m.data = (unsigned char*)m.allocated + m.argument.residue;
        read_all(from, m.data, m.argument.size);
        if (m.argument.role != host::VALUE && m.argument.role != host::ABSENT && m.argument.role != host::BOXES) {
            m.elements.resize(m.argument.size);
            read_all(from, m.elements.data(), m.argument.size);
            host::add_array(m.argument, m.data, m.elements.data());
        }
    }
    for (Memory& m : memories) {
        m.pointer = m.argument.role == host::ABSENT ? nullptr : m.data + m.argument.first;
        const bool by_value = m.argument.role == host::VALUE || m.argument.role == host::BOXES;
        launch_arguments.push_back(by_value ? (void*)m.data : (void*)&m.pointer);
    }
    for (Memory& m : memories) {
        if (m.argument.role != host::BOXES) continue;
        host::Boxes& boxes = *(host::Boxes*)m.data;
        boxes.address = (uint64_t)memories[boxes.address].pointer;
    }
    const bool fits = job.grid <= UINT32_MAX / host::MAX_THREADS - 1;  // block and thread are numbered in 32 bits
    if (!fits || job.block > host::MAX_THREADS || job.shared_bytes > host::MAX_SHARED) {
        host::fail("%u blocks of %u threads, %u bytes each, are too many", job.grid, job.block, job.shared_bytes);
    }
    gridDim = {job.grid, 1, 1};
    blockDim = {job.block, 1, 1};
    for (uint32_t i = 0; i < job.grid; ++i) {
        const uint32_t block = job.order == host::ASCENDING ? i : job.grid - 1 - i;
        if (only_block >= 0 && block != (uint32_t)only_block) continue;
        blockIdx = {block, 0, 0};
        host::begin_block(job.block, job.shared_bytes, (int)job.pattern);
        host::begin_order();
        host::begin_barriers();
        host::begin_wgmma();
        in_kernel = true;
        host::run_block(job.block, [] { kernel->run_thread(launch_arguments.data()); }, (host::Order)job.order, job.seed + i);
        host::end_barriers();
        host::end_wgmma();
        in_kernel = false;
    }
    for (Memory& m : memories) {
        if (host::is_written(m.argument.role)) {
            const int64_t unwritten = host::first_unwritten(m.data);
            fwrite(&unwritten, sizeof unwritten, 1, to);
            fwrite(m.data, 1, m.argument.size, to);
        }
        free(m.allocated);
    }
    fflush(to);
    return true;
}

}  // namespace

namespace host {

void fail(const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    fprintf(stderr, "host: ");
    vfprintf(stderr, format, arguments);
    fprintf(stderr, "\n");
    va_end(arguments);
    __sanitizer_print_stack_trace();
    abort();
}

}  // namespace host

int main(int count, char** values) {
    signal(SIGABRT, on_abort);
    signal(SIGILL, on_undefined_behaviour);
    kernel = named(values[0]);
    if (count > 1) {
        FILE* job = fopen(values[1], "rb");
        FILE* nowhere = fopen("/dev/null", "wb");
        if (!job || !run_job(job, nowhere, count > 2 ? atol(values[2]) : -1)) {
            fprintf(stderr, "%s holds no job\n", values[1]);
            return 2;
        }
        return 0;
    }
    FILE* answers = fdopen(dup(1), "wb");
    dup2(2, 1);  // a kernel's printf must not end up among the answers
    while (run_job(stdin, answers, -1)) {
    }
    return 0;
}
