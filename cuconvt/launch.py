"""Launching a kernel: what CuPy's own call does, without looking at each argument's type for every launch anew."""

from __future__ import annotations

import ctypes
import functools
import struct
import threading
from typing import Any

import cupy
import numpy as np
from cupy_backends.cuda.api.driver import launchKernel


class Kernel:
    """An entry point of a loaded module whose arguments are addresses and, at the end, one struct by value.

    Parameters
    ----------
    raw : cupy.RawKernel
    """

    def __init__(self, raw: Any):
        self._raw = raw  # it keeps the module
        self._function = raw.kernel.ptr

    def allow_shared_bytes(self, count: int) -> None:
        """Let launches ask for so much dynamic shared memory."""
        self._raw.max_dynamic_shared_size_bytes = count

    def bind(self, grid: int, block: int, shared_bytes: int, last: np.ndarray, pointers: int) -> BoundKernel:
        """Return the kernel with everything but its first arguments, of which there are `pointers`; `last` follows."""
        return BoundKernel(self, (self._function, grid, 1, 1, block, 1, 1, shared_bytes), last, pointers)


class BoundKernel:
    """A kernel that waits for a stream and for addresses."""

    def __init__(self, kernel: Kernel, start: tuple[int, ...], last: np.ndarray, pointers: int):
        self._kernel = kernel  # it keeps the module
        self._start = start
        self._last = ctypes.create_string_buffer(last.tobytes(), last.nbytes)
        self._arguments = _Arguments(pointers, ctypes.addressof(self._last))

    def __call__(self, stream: Any, *pointers: Any) -> None:
        """Queue the kernel.

        Parameters
        ----------
        stream : cupy.cuda.Stream
        pointers : array, memory pointer, address or None
        """
        arguments = self._arguments
        # A call of `_address` for each would take longer than all the rest.
        arguments.fill(*[p.data.ptr if type(p) is cupy.ndarray else _address(p) for p in pointers])
        # The driver has copied all arguments when it returns, so that their memory may serve the next launch.
        launchKernel(*self._start, stream.ptr, arguments.address, 0)


def _address(pointer: Any) -> int:
    if isinstance(pointer, cupy.ndarray):
        return pointer.data.ptr
    if pointer is None:
        return 0
    return pointer if type(pointer) is int else pointer.ptr


class _Arguments(threading.local):
    """What the driver reads a launch's arguments from, for each thread: an array of their addresses, and pointers.

    Attributes
    ----------
    address : int
        Of the array.
    fill : callable
        Writes the pointers.
    """

    def __init__(self, pointers: int, last: int):
        # Where each pointer is, where the last argument is, and the pointers.
        words = (ctypes.c_uint64 * (2 * pointers + 1))()
        first = pointers + 1
        self.address = ctypes.addressof(words)
        words[:first] = [*(self.address + 8 * (first + i) for i in range(pointers)), last]
        self.fill = functools.partial(struct.Struct(f"{pointers}Q").pack_into, words, 8 * first)
