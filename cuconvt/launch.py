"""Launching a kernel: what CuPy's own call does, without looking at each argument's type for every launch anew."""

from __future__ import annotations

import ctypes
import functools
import struct
import sys
import threading
from collections.abc import Callable
from typing import Any

import cupy
import numpy as np
from cupy import ndarray
from cupy_backends.cuda.api.driver import check_status, launchKernel

from cuconvt.tensor_map import TensorMap

EARLY = 6, 1  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, and its value: allowed
EARLY_DRIVER = 12030  # from which on CUDA graphs hold such launches
EARLY_CAPABILITY = 90


@functools.cache
def can_start_early(compute_capability: int) -> bool:
    """Whether such a device (90: 9.0) and the driver can start a kernel before the last one has ended."""
    return compute_capability >= EARLY_CAPABILITY and cupy.cuda.runtime.driverGetVersion() >= EARLY_DRIVER


class Kernel:
    """An entry point of a loaded module whose arguments are addresses and, at the end, one struct by value.

    Parameters
    ----------
    raw : cupy.RawKernel
    """

    def __init__(self, raw: Any):
        self._raw = raw  # it keeps the module
        self._function = raw.kernel.ptr

    @property
    def static_shared_bytes(self) -> int:
        """What a block has, besides what launches ask for."""
        return int(self._raw.shared_size_bytes)

    def allow_shared_bytes(self, count: int) -> None:
        """Let launches ask for so much dynamic shared memory."""
        self._raw.max_dynamic_shared_size_bytes = count

    def bind(
        self,
        grid: int,
        block: int,
        shared_bytes: int,
        last: np.ndarray,
        pointers: int,
        early: bool = False,
        maps: tuple[TensorMap, ...] = (),
    ) -> BoundKernel:
        """Return the kernel with everything but its first arguments, of which there are `pointers`; `last` follows.

        With `early`, it starts before the kernel before it has ended, for which it waits itself
        (``wait_for_kernel_before``): where `can_start_early` says so. For the first ones of its arguments, whose `maps`
        are given, the kernel takes what the driver makes of map and address.
        """
        kind = EarlyKernel if early else BoundKernel
        return kind(self, (self._function, grid, 1, 1, block, 1, 1, shared_bytes), last, pointers, maps)


class BoundKernel:
    """A kernel that waits for a stream and for addresses."""

    def __init__(
        self, kernel: Kernel, start: tuple[int, ...], last: np.ndarray, pointers: int, maps: tuple[TensorMap, ...] = ()
    ):
        self._kernel = kernel  # it keeps the module
        self._start = start
        self._last = ctypes.create_string_buffer(last.tobytes(), last.nbytes)
        address = ctypes.addressof(self._last)
        self._arguments = _MappedArguments(maps, pointers, address) if maps else _Arguments(pointers, address)

    def __call__(self, stream: Any, *pointers: Any) -> None:
        """Queue the kernel.

        Parameters
        ----------
        stream : cupy.cuda.Stream
        pointers : array, memory pointer, address or None
        """
        arguments = self._arguments
        # A call of `_address` for each would take longer than all the rest.
        arguments.fill(*[p if type(p) is int else p.data.ptr if type(p) is ndarray else _address(p) for p in pointers])
        # The driver has copied all arguments when it returns, so that their memory may serve the next launch.
        launchKernel(*self._start, stream.ptr, arguments.address, 0)


class EarlyKernel(BoundKernel):
    """The same, launched early (programmatic dependent launch): what a launch takes passes while the last one ends."""

    def __init__(
        self, kernel: Kernel, start: tuple[int, ...], last: np.ndarray, pointers: int, maps: tuple[TensorMap, ...] = ()
    ):
        super().__init__(kernel, start, last, pointers, maps)
        self._configuration = _Configuration(start[1:])
        self._function = ctypes.c_void_p(start[0])
        self._launch = _driver().cuLaunchKernelEx

    def __call__(self, stream: Any, *pointers: Any) -> None:
        arguments, configuration = self._arguments, self._configuration
        arguments.fill(*[p if type(p) is int else p.data.ptr if type(p) is ndarray else _address(p) for p in pointers])
        configuration.value.stream = stream.ptr
        status = self._launch(configuration.reference, self._function, arguments.reference, None)
        if status:
            check_status(status)


@functools.cache
def _driver() -> Any:
    return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")


class _LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute."""

    _fields_ = (("id", ctypes.c_uint64), ("value", ctypes.c_uint64 * 8))


class _LaunchConfig(ctypes.Structure):
    """CUlaunchConfig; `dimensions` are grid, block and bytes of shared memory."""

    _fields_ = (
        ("dimensions", ctypes.c_uint32 * 7),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_LaunchAttribute)),
        ("count", ctypes.c_uint32),
    )


class _Configuration(threading.local):
    """How a kernel is launched early, for each thread: the stream is of the call."""

    def __init__(self, dimensions: tuple[int, ...]):
        number, allowed = EARLY
        attribute = _LaunchAttribute(number, (allowed,))
        self.value = _LaunchConfig(dimensions, None, ctypes.pointer(attribute), 1)
        self.reference = ctypes.byref(self.value)


def _address(pointer: Any) -> int:
    """Return the address that something other than an integer or a plain array stands for."""
    if pointer is None:
        return 0
    return pointer.data.ptr if isinstance(pointer, ndarray) else pointer.ptr


class _Arguments(threading.local):
    """What the driver reads a launch's arguments from, for each thread: an array of their addresses, and pointers.

    Attributes
    ----------
    address : int
        Of the array.
    reference : ctypes.c_void_p
        The same.
    fill : callable
        Writes the pointers.
    """

    def __init__(self, pointers: int, last: int):
        # Where each pointer is, where the last argument is, and the pointers.
        words = (ctypes.c_uint64 * (2 * pointers + 1))()
        first = pointers + 1
        self.address = ctypes.addressof(words)
        self.reference = ctypes.c_void_p(self.address)
        words[:first] = [*(self.address + 8 * (first + i) for i in range(pointers)), last]
        self.fill = functools.partial(struct.Struct(f"{pointers}Q").pack_into, words, 8 * first)


class _MappedArguments(threading.local):
    """The same where the first arguments are tensor maps, which hold addresses; made anew where one differs."""

    def __init__(self, maps: tuple[TensorMap, ...], pointers: int, last: int):
        count = len(maps)
        # What each argument is, then the pointers, then maps, which have to be aligned.
        words = (ctypes.c_uint64 * (pointers + 1 + pointers + (count + 1) * MAP_BYTES // 8))()
        self.address = ctypes.addressof(words)
        self.reference = ctypes.c_void_p(self.address)
        first = self.address + 8 * (pointers + 1)
        places = [-(-(first + 8 * pointers) // MAP_BYTES) * MAP_BYTES + MAP_BYTES * i for i in range(count)]
        words[: pointers + 1] = [*places, *(first + 8 * i for i in range(count, pointers)), last]
        self._words = words
        self._encoders = [_encoder(*of_one) for of_one in zip(maps, places, strict=True)]
        self._mapped: list[int] = [0] * count
        self._fill = functools.partial(
            struct.Struct(f"{pointers - count}Q").pack_into, words, first + 8 * count - self.address
        )

    def fill(self, *pointers: int) -> None:
        """Write the pointers, and the maps of those that need one."""
        mapped = self._mapped
        for i, encode in enumerate(self._encoders):
            if mapped[i] != pointers[i]:
                encode(pointers[i])
                mapped[i] = pointers[i]
        self._fill(*pointers[len(mapped) :])


MAP_BYTES = 128  # of a CUtensorMap, which is aligned to 64


def _encoder(tensor_map: TensorMap, place: int) -> Callable[[int], None]:
    """Return a function that writes a map of an array at some address to a place."""
    types = {"float16": 6, "float32": 7, "bfloat16": 9, "tf32": 11}  # CU_TENSOR_MAP_DATA_TYPE_...
    swizzles = {32: 1, 64: 2, 128: 3, 0: 0}  # by bytes of a row: CU_TENSOR_MAP_SWIZZLE_32B, ..., _NONE
    no_interleave, promote_128, zeros = 0, 2, 0
    rank = len(tensor_map.extents)
    arrays = (
        (ctypes.c_uint64 * rank)(*tensor_map.extents),
        (ctypes.c_uint64 * (rank - 1))(*tensor_map.strides),
        (ctypes.c_uint32 * rank)(tensor_map.channels, *tensor_map.spans, 1),
        (ctypes.c_uint32 * rank)(1, *tensor_map.steps, 1),
    )
    references = tuple(ctypes.c_void_p(ctypes.addressof(array)) for array in arrays)
    to, options = ctypes.c_void_p(place), (no_interleave, swizzles[tensor_map.swizzled_bytes], promote_128, zeros)
    function = _driver().cuTensorMapEncodeTiled

    def encode(address: int, arrays: Any = arrays) -> None:
        status = function(to, types[tensor_map.dtype], rank, ctypes.c_void_p(address), *references, *options)
        if status:
            check_status(status)

    return encode
