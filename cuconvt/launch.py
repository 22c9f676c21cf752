"""Launching a kernel: what CuPy's own call does, without looking at each argument's type for every launch anew."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import cupy
import numpy as np
from cupy.cuda.stream import get_current_stream
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

    def __call__(
        self, grid: tuple[int], block: tuple[int], arguments: tuple[Any, ...], shared_bytes: int = 0, stream: Any = None
    ) -> None:
        """Queue the kernel.

        Parameters
        ----------
        grid, block : tuple of int
        arguments : tuple
            Arrays, memory pointers, addresses or None, and at the end a `Struct`.
        shared_bytes : int
        stream : cupy.cuda.Stream, optional
            CuPy's current stream unless given.
        """
        *pointers, struct = arguments
        values, parameters, address = _buffers.of(len(pointers))
        for i, pointer in enumerate(pointers):
            values[i] = _address(pointer)
        parameters[len(pointers)] = struct.address
        stream_pointer = (get_current_stream() if stream is None else stream).ptr
        # The driver has copied all arguments when it returns, so that the buffers may serve the next launch.
        launchKernel(self._function, grid[0], 1, 1, block[0], 1, 1, shared_bytes, stream_pointer, address, 0)


class Struct:
    """A struct that a kernel takes by value."""

    def __init__(self, value: np.ndarray):
        self.data = value.tobytes()
        self._memory = ctypes.create_string_buffer(self.data, len(self.data))
        self.address = ctypes.addressof(self._memory)


def _address(pointer: Any) -> int:
    if type(pointer) is cupy.ndarray:
        return pointer.data.ptr
    if pointer is None:
        return 0
    return pointer if type(pointer) is int else pointer.ptr


class _Buffers(threading.local):
    """What the driver reads a launch's arguments from, for each thread and number of pointers."""

    def __init__(self) -> None:
        self._by_count: dict[int, tuple[Any, Any, int]] = {}

    def of(self, count: int) -> tuple[Any, Any, int]:
        """Return the pointers' values, the addresses of all arguments, and the latter's address."""
        found = self._by_count.get(count)
        if found is None:
            values, parameters = (ctypes.c_uint64 * count)(), (ctypes.c_uint64 * (count + 1))()
            for i in range(count):
                parameters[i] = ctypes.addressof(values) + 8 * i
            found = self._by_count[count] = values, parameters, ctypes.addressof(parameters)
        return found


_buffers = _Buffers()
