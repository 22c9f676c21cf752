"""A call with CUDA tensors that came before: its result is allocated, and what was planned and compiled is launched."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import cupy
import torch
from cupy.cuda import MemoryPointer, UnownedMemory
from cupy.cuda.runtime import getDevice
from torch import Tensor

from cuconvt.arrays import StreamPointer
from cuconvt.warm import ALIGNMENT


class WarmCall:
    """Launches on PyTorch's current stream, with all memory from PyTorch's allocator, which a CUDA graph then keeps."""

    def __init__(self, launch: Any, result: Tensor):
        self._launch = launch
        self._device = result.get_device()
        self._shape, self._strides = result.shape, result.stride()
        self._misalignment = result.data_ptr() % ALIGNMENT
        # Both allocate like a tensor, one without memory: torch.empty would read a dtype and a device at each call.
        self._new_result = result.new_empty(0).new_empty_strided
        self._new_bytes = result.new_empty(0, dtype=torch.uint8).new_empty

    def __call__(self, addresses: Sequence[int]) -> Tensor | None:
        """Return the result, or None where its memory is unlike the plan's."""
        if getDevice() != self._device:
            with torch.cuda.device(self._device):
                return self(addresses)
        result = self._new_result(self._shape, self._strides)
        address = result.data_ptr()
        if address % ALIGNMENT != self._misalignment:
            return None
        # Not torch.cuda.current_stream, which makes an object; this is what it makes it from.
        stream = _stream(torch._C._cuda_getCurrentRawStream(self._device))
        self._launch(*addresses, address, stream, self._workspace)
        return result

    def _workspace(self, size: int) -> MemoryPointer:
        """Allocate as `cuconvt.arrays.torch_memory` does."""
        buffer = self._new_bytes(size)
        return MemoryPointer(UnownedMemory(buffer.data_ptr(), size, buffer, self._device), 0)


@functools.lru_cache(maxsize=256)
def _stream(pointer: int) -> Any:
    return cupy.cuda.Stream.from_external(StreamPointer(pointer))
