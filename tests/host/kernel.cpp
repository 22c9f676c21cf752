// One specialisation of one kernel, from its unchanged source: KERNEL is its entry point, KERNEL_FILE its file.
#include <utility>

#include "builtins.cuh"
#include KERNEL_FILE

#define HOST_TEXT(name) HOST_TEXT_OF(name)
#define HOST_TEXT_OF(name) #name

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

const char* const kernel_name = HOST_TEXT(KERNEL);

void run_thread(void* const* arguments) { call(KERNEL, arguments); }

}  // namespace host
