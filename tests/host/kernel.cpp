// One specialisation of the kernels of one file, from its unchanged source: KERNEL_FILE, with the entry points KERNELS, each
// of them in KERNEL(...).
#include <utility>

#include "builtins.cuh"
#include KERNEL_FILE

// Reads the launch's own memory, which is no argument of the kernel.
template <class... A, size_t... I>
__attribute__((no_sanitize("address"))) static void call(void (*kernel)(A...), void* const* arguments,
                                                         std::index_sequence<I...>) {
    kernel(*(std::remove_const_t<A>*)arguments[I]...);
}

template <class... A> static void call(void (*kernel)(A...), void* const* arguments) {
    call(kernel, arguments, std::index_sequence_for<A...>());
}

namespace host {

#define KERNEL(name) {#name, [](void* const* arguments) { call(name, arguments); }},
const Kernel kernels[] = {KERNELS {nullptr, nullptr}};

}  // namespace host
