"""Checks of dtypes, precision and `out`, on numpy or cupy views."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from cuconvt.arrays import DTYPES, address

PRECISIONS = ("tf32x3", "ieee", "tf32")


@functools.lru_cache(maxsize=64)
def dtype_name(dtype: Any) -> str:
    """Return ``dtype.name``, which NumPy puts together anew each time."""
    return str(dtype.name)


def check_dtypes(arrays: dict[str, Any]) -> None:
    """Raise TypeError unless the first array has a supported dtype and all others that are given have the same."""
    (first, x), *others = arrays.items()
    if dtype_name(x.dtype) not in DTYPES:
        raise TypeError(f"{first} must have one of the dtypes {', '.join(DTYPES)}, got {x.dtype.name}")
    for role, array in others:
        if array is not None and array.dtype != x.dtype:
            raise TypeError(f"{role} must have {first}'s dtype {x.dtype.name}, got {array.dtype.name}")


def check_precision_name(precision: Any) -> None:
    """Raise TypeError or ValueError unless a precision is None or known."""
    if precision is None or (isinstance(precision, str) and precision in PRECISIONS):
        return
    rule = f"precision must be None or one of {', '.join(map(repr, PRECISIONS))}, got {precision!r}"
    if not isinstance(precision, str):
        raise TypeError(f"{rule} of type {type(precision).__name__}")
    raise ValueError(rule)


def check_precision(precision: str | None, dtype: Any) -> str | None:
    """Return the precision to compute float32 with, or None for the other dtypes."""
    check_precision_name(precision)
    if dtype == np.float32:
        return PRECISIONS[0] if precision is None else precision
    if precision is not None:
        raise ValueError(f"precision must be None for {dtype.name}, got {precision!r}: it chooses among float32 modes")
    return None


def check_out(out: Any, shape: tuple[int, ...], inputs: dict[str, Any]) -> None:
    """Raise ValueError unless `out` has the result's shape, can be written and shares no memory with an input."""
    if out.shape != shape:
        raise ValueError(f"out must have shape {shape}, got {out.shape}")
    if not getattr(out.flags, "writeable", True):
        raise ValueError("out must be writable, got a read-only array")
    if out.size and _overlaps_itself(out):
        raise ValueError(f"out must have its own memory for every element, got strides {out.strides} of shape {shape}")
    for role, array in inputs.items():
        if array is not None and _overlap(out, array):
            raise ValueError(f"out must not overlap an input, and it shares memory with {role}")


def reach(array: Any) -> tuple[int, int]:
    """Return where the bytes of an array that is not empty begin and end, relative to its first element."""
    spans = [(extent - 1) * stride for extent, stride in zip(array.shape, array.strides, strict=True)]
    return sum(s for s in spans if s < 0), sum(s for s in spans if s > 0) + array.itemsize


def _overlaps_itself(array: Any) -> bool:
    """Return whether some axis steps by less than the axes of smaller steps reach.

    Slices and transposes of memory without an overlap never do. What else does without an overlap, say steps of 2 and 3
    elements, counts as one.
    """
    reached = array.itemsize
    axes = zip(array.strides, array.shape, strict=True)
    for step, extent in sorted((abs(stride), extent) for stride, extent in axes if extent > 1):
        if step < reached:
            return True
        reached += step * (extent - 1)
    return False


def _overlap(a: Any, b: Any) -> bool:
    """Solve whether two strided arrays share a byte; a question too hard for a quick answer counts as yes."""
    if not a.size or not b.size:
        return False
    (a_low, a_high), (b_low, b_high) = reach(a), reach(b)
    if address(a) + a_high <= address(b) + b_low or address(b) + b_high <= address(a) + a_low:
        return False
    a, b = _Addresses(a), _Addresses(b)
    max_work: Any = 10_000  # NumPy's annotation allows only the special values 0 and -1
    try:
        return np.shares_memory(np.asarray(a), np.asarray(b), max_work=max_work)
    except np.exceptions.TooHardError:
        return True


class _Addresses:
    """Presents the addresses of an array, GPU memory included, as NumPy bytes; they are compared and never read."""

    def __init__(self, array: Any):
        # A view of the leading axes only would lose the itemsize, so each element is a void of that many bytes.
        self.__array_interface__ = {
            "version": 3,
            "data": (address(array), True),
            "shape": array.shape,
            "strides": array.strides,
            "typestr": f"|V{array.dtype.itemsize}",
        }
