// One specialisation of the kernels of one file, from its unchanged source: KERNEL_FILE, with the entry points KERNELS, each
// of them in KERNEL(...).
#include "builtins.cuh"
#include KERNEL_FILE

// Of <utility>, which takes the compiler a tenth of what a kernel does.
template <size_t...> struct Indices {};
template <class T> struct NotConst { typedef T type; };
template <class T> struct NotConst<const T> { typedef T type; };

// Reads the launch's own memory, which is no argument of the kernel.
template <class... A, size_t... I>
__attribute__((no_sanitize("address"))) static void call(void (*kernel)(A...), void* const* arguments,
                                                         Indices<I...>) {
    kernel(*(typename NotConst<A>::type*)arguments[I]...);
}

template <class... A> static void call(void (*kernel)(A...), void* const* arguments) {
    call(kernel, arguments, Indices<__integer_pack(sizeof...(A))...>());
}

namespace host {

#define KERNEL(name) {#name, [](void* const* arguments) { call(name, arguments); }},
const Kernel kernels[] = {KERNELS {nullptr, nullptr}};

}  // namespace host
