// Stands in for a kernel's 32-bit index: an integer of INDEX_BITS bits, so that a small problem overflows it, which ends the
// program instead of wrapping silently.
#pragma once

#include "builtins.cuh"

class NarrowIndex {
    long long value_;

  public:
    constexpr NarrowIndex() : value_(0) {}
    template <class T> constexpr NarrowIndex(T value) : value_((long long)value) {
        constexpr long long LIMIT = 1ll << (INDEX_BITS - 1);
        if (value_ < -LIMIT || value_ >= LIMIT) host::fail("the index %lld overflows %d bits", value_, INDEX_BITS);
    }
    constexpr operator long long() const { return value_; }
    NarrowIndex& operator+=(long long more) { return *this = value_ + more; }
};

// One overload for each side and operator: the built-in operators for long long would leave the choice ambiguous. With a long
// long the result is one, as it is of the 32-bit index.
#define NARROW_OPERATOR(op)                                                                                          \
    inline NarrowIndex operator op(NarrowIndex a, NarrowIndex b) { return (long long)a op (long long)b; }            \
    template <class T> NarrowIndex operator op(NarrowIndex a, T b) { return (long long)a op (long long)NarrowIndex(b); } \
    template <class T> NarrowIndex operator op(T a, NarrowIndex b) { return (long long)NarrowIndex(a) op (long long)b; } \
    inline long long operator op(NarrowIndex a, long long b) { return (long long)a op b; }                           \
    inline long long operator op(long long a, NarrowIndex b) { return a op (long long)b; }
template <class T> T* operator+(T* pointer, NarrowIndex index) { return pointer + (long long)index; }
NARROW_OPERATOR(+)
NARROW_OPERATOR(-)
NARROW_OPERATOR(*)
NARROW_OPERATOR(/)
NARROW_OPERATOR(%)
#undef NARROW_OPERATOR
