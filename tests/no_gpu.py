"""CuPy and the CUDA backend without a GPU: arrays in host memory, and launches that are written down, not queued."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from described import DEVICES

import cuconvt
from cuconvt import arrays, steps, warm

SHAPES = {"x": (2, 4, 3, 4, 5), "weight": (4, 6, 3, 3, 3), "bias": (6,), "out": (2, 6, 6, 8, 10)}
PARAMETERS: dict[str, Any] = {"stride": 2, "padding": 1, "output_padding": 1}


class Backend:
    """CuPy without a GPU: what was launched, on which device, and how many calls took all steps."""

    def __init__(self, cupy: Any):
        self.cupy = cupy
        self.current_device = 0
        self.offset = 0  # of newly allocated memory from a 16-byte boundary
        self.launched: list[SimpleNamespace] = []
        self.all_steps = 0

    def memory(self, size: int) -> Any:
        buffer = np.empty(size + 256, np.uint8)
        start = -(-buffer.ctypes.data // 128) * 128 + self.offset
        return self.cupy.cuda.MemoryPointer(
            self.cupy.cuda.UnownedMemory(start, size, buffer, device_id=self.current_device), 0
        )

    def array(self, shape: tuple[int, ...], dtype: Any = np.float32, offset: int = 0) -> Any:
        """Return an array whose memory starts `offset` bytes beyond a 16-byte boundary."""
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return self.cupy.ndarray(shape, dtype, self.memory(size + offset) + offset)

    def arguments(self, **changes: Any) -> dict[str, Any]:
        """Return new arrays and parameters of one call; None leaves an argument out."""
        given = {name: self.array(SHAPES[name]) for name in ("x", "weight", "bias")}
        given |= {**PARAMETERS, **changes}
        return {name: value for name, value in given.items() if value is not None}

    def call(self, rank: int = 3, **changes: Any) -> Any:
        return getattr(cuconvt, f"conv_transpose{rank}d")(**self.arguments(**changes))

    def device(self, index: int) -> Any:
        backend = self

        class Context:
            def __enter__(self) -> None:
                self.before, backend.current_device = backend.current_device, index

            def __exit__(self, *error: object) -> None:
                backend.current_device = self.before

        return Context()

    def load_kernel(self, source: str, entry: str, arch: str, defines: Any) -> Any:
        def bind(
            grid: int,
            block: int,
            shared_bytes: int,
            problem: np.ndarray,
            pointers: int,
            early: bool = False,
            maps: Any = (),
        ) -> Any:
            def launch(stream: Any, *arguments: Any) -> None:
                assert len(arguments) == pointers
                self.launched.append(
                    SimpleNamespace(
                        kernel=(entry, defines, grid, block, shared_bytes),
                        problem=problem.tobytes(),
                        arguments=arguments,
                        device=self.current_device,
                    )
                )

            return launch

        return SimpleNamespace(bind=bind, allow_shared_bytes=lambda count: None, static_shared_bytes=0)


@contextmanager
def without_gpu() -> Iterator[Backend]:
    """Let calls with arrays of the backend's take every step but the last."""
    cupy = pytest.importorskip("cupy")
    from cuconvt import cuda, cuda_gradients

    backend = Backend(cupy)
    bridge_of = steps.bridge_of  # the first of all steps

    def counted(*arguments: Any) -> Any:
        backend.all_steps += 1
        return bridge_of(*arguments)

    memos = (warm._slot, cuda._prepare, cuda_gradients._prepare_correlate, cuda_gradients._prepare_weight_gradient)
    for memo in memos:
        memo.cache_clear()
    try:
        with pytest.MonkeyPatch.context() as patch, cupy.cuda.using_allocator(backend.memory):
            patch.setattr(steps, "bridge_of", counted)
            patch.setattr(arrays.CuPyBridge, "scope", lambda self, array: backend.device(array.data.device_id))
            patch.setattr(cupy.cuda, "Device", backend.device)
            patch.setattr(cuda, "getDevice", lambda: backend.current_device)
            patch.setattr(cuda, "load_kernel", backend.load_kernel)
            for module in (cuda, cuda_gradients):
                patch.setattr(module, "device_properties", lambda index: DEVICES[90])
                patch.setattr(module, "get_current_stream", lambda: None)
            yield backend
    finally:
        # A launch that was only written down must not be found by a test with a GPU.
        for memo in memos:
            memo.cache_clear()
