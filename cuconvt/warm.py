"""The memo in front of validate, plan, compile and launch: a call with CuPy arrays that came before is only launched.

A call is known by everything that its plan, its errors and its result depend on but the addresses, of which only the
alignment is; `cuconvt.cuda.WarmCall` looks at what else depends on them.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from typing import Any

ALIGNMENT = 16  # bytes; plans depend on whether an array starts on such a boundary


class Slot:
    """Where a call's `cuconvt.cuda.WarmCall` is kept, once the call has been made without an error."""

    __slots__ = ("warm_call",)

    def __init__(self) -> None:
        self.warm_call: Any = None

    def repeat(self, arrays: Sequence[Any], out: Any) -> Any:
        """Return the result of a call that came before, or None where all steps have to be taken."""
        return None if self.warm_call is None else self.warm_call(arrays, out)

    def remember(self, launch: Any, arrays: Sequence[Any], out: Any) -> None:
        """Keep what was launched, unless it is None, for further calls with arrays like these."""
        if launch is not None:
            from cuconvt import cuda

            self.warm_call = cuda.WarmCall(launch, arrays, out)


class _Nowhere(Slot):
    """The slot of the calls that are not remembered."""

    __slots__ = ()

    def remember(self, launch: Any, arrays: Sequence[Any], out: Any) -> None:
        pass


_NOWHERE = _Nowhere()


def slot_of(operation: str, arrays: Sequence[Any], out: Any, parameters: tuple[Any, ...]) -> Slot:
    """Return the slot of a call, the same one for equal calls.

    Remembered are the calls whose arrays are all CuPy's and whose parameters are integers, strings and tuples of them.

    Parameters
    ----------
    operation : str
        What is computed.
    arrays : sequence of array or None
        In the order in which they are launched; None for one that is not given.
    out : array or None
    parameters : tuple
        All other arguments, and the rank.
    """
    cupy = sys.modules.get("cupy")  # a CuPy array can only exist once CuPy is imported
    if cupy is None or not _exact(parameters):
        return _NOWHERE
    key: list[Any] = [operation, parameters]
    for array in (*arrays, out):
        if array is None:
            key.append(None)
        elif type(array) is cupy.ndarray:
            memory = array.data
            key += (array.shape, array.strides, array.dtype, memory.device_id, memory.ptr % ALIGNMENT == 0)
        else:
            return _NOWHERE
    return _slot(*key)


@functools.lru_cache(maxsize=4096)
def _slot(*call: Any) -> Slot:
    return Slot()


def _exact(parameters: tuple[Any, ...]) -> bool:
    """Return whether parameters that compare equal are the same: 1, True and 1.0 do, and only the first is valid."""
    for value in parameters:
        kind = type(value)
        if kind is not int and value is not None and kind is not str and not (kind is tuple and _exact(value)):
            return False
    return True
