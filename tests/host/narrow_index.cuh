// Stands in for a kernel's 32-bit index: an integer of INDEX_BITS bits, so that a small problem overflows it, which ends the
// program instead of wrapping silently.
#pragma once

#include "builtins.cuh"

class NarrowIndex {
    long long value_;

  public:
    NarrowIndex() : value_(0) {}
    template <class T> NarrowIndex(T value) : value_((long long)value) {
        constexpr long long LIMIT = 1ll << (INDEX_BITS - 1);
        if (value_ < -LIMIT || value_ >= LIMIT) host::fail("the index %lld overflows %d bits", value_, INDEX_BITS);
    }
    operator long long() const { return value_; }
};

// One overload for each side and operator: the built-in operators for long long would leave the choice ambiguous.
#define NARROW_OPERATOR(op)                                                                                          \
    inline NarrowIndex operator op(NarrowIndex a, NarrowIndex b) { return (long long)a op (long long)b; }            \
    template <class T> NarrowIndex operator op(NarrowIndex a, T b) { return (long long)a op (long long)NarrowIndex(b); } \
    template <class T> NarrowIndex operator op(T a, NarrowIndex b) { return (long long)NarrowIndex(a) op (long long)b; }
NARROW_OPERATOR(+)
NARROW_OPERATOR(-)
NARROW_OPERATOR(*)
NARROW_OPERATOR(/)
NARROW_OPERATOR(%)
#undef NARROW_OPERATOR
