"""The memo in front of validate, plan, compile and launch: a call with CuPy arrays that came before is only launched.

A call is known by everything that its plan, its errors and its result depend on but the addresses, of which only the
alignment is; `cuconvt.cuda.WarmCall` looks at what else depends on them.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

ALIGNMENT = 16  # bytes; plans depend on whether an array starts on such a boundary


class Slot:
    """Where a call's `cuconvt.cuda.WarmCall` is kept, once the call has been made without an error."""

    __slots__ = ("warm_call",)

    def __init__(self) -> None:
        self.warm_call: Any = None


def slot_of(rank: int, x: Any, weight: Any, bias: Any, out: Any, parameters: tuple[Any, ...]) -> Slot | None:
    """Return the slot of a call, the same one for equal calls, or None for a call that is not remembered.

    Remembered are the calls whose arrays are all CuPy's and whose parameters are integers, strings and tuples of them.
    """
    cupy = sys.modules.get("cupy")  # a CuPy array can only exist once CuPy is imported
    if cupy is None or not (type(x) is type(weight) is cupy.ndarray):
        return None
    if not (bias is None or type(bias) is cupy.ndarray) or not (out is None or type(out) is cupy.ndarray):
        return None
    if not _exact(parameters):
        return None
    bias_key = None if bias is None else _key(bias)
    out_key = None if out is None else _key(out)
    return _slot(rank, parameters, _key(x), _key(weight), bias_key, out_key)


@functools.lru_cache(maxsize=4096)
def _slot(*call: Any) -> Slot:
    return Slot()


def _key(array: Any) -> tuple[Any, ...]:
    memory = array.data
    return array.shape, array.strides, array.dtype, memory.device_id, memory.ptr % ALIGNMENT == 0


def _exact(parameters: tuple[Any, ...]) -> bool:
    """Return whether parameters that compare equal are the same: 1, True and 1.0 do, and only the first is valid."""
    for value in parameters:
        kind = type(value)
        if kind is not int and value is not None and kind is not str and not (kind is tuple and _exact(value)):
            return False
    return True
