"""The CUDA backend: plan, compile and launch on CuPy's current device and stream, without a synchronisation."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import cupy
import numpy as np
from cupy.cuda.runtime import getDevice

from cuconvt.checks import dtype_name, reach
from cuconvt.compile import architecture, load_kernel
from cuconvt.geometry import Geometry
from cuconvt.plan import Device, Layout, make_plan, problem_struct
from cuconvt.warm import ALIGNMENT

PACK_BLOCK = (256,)


def conv_transpose(x: Any, weight: Any, bias: Any, geometry: Geometry, precision: str | None, out: Any) -> Launch:
    """Write the transposed convolution of cupy arrays in 3-D form to `out`, and return what was launched."""
    layout = Layout.of(x, weight, bias, out)
    launch = _prepare(geometry, dtype_name(x.dtype), layout, precision, x.device.id)
    launch(x, weight, bias, out)
    return launch


class Launch(NamedTuple):
    """A plan, compiled for a device: what is left of a call is to launch it."""

    kernel: Any  # cupy.cuda.Function, as is `pack`
    grid: tuple[int]
    block: tuple[int]
    shared_bytes: int
    problem: np.ndarray
    pack: Any  # the kernel that repacks the weights, or None
    pack_grid: tuple[int]
    packed_bytes: int

    def __call__(self, x: Any, weight: Any, bias: Any, out: Any) -> None:
        """Queue the kernels on the current stream; of the arrays, only the addresses are passed."""
        if self.pack is not None:
            packed = cupy.cuda.alloc(self.packed_bytes)
            self.pack(self.pack_grid, PACK_BLOCK, (weight, packed, self.problem))
            weight = packed
        self.kernel(self.grid, self.block, (x, weight, bias, out, self.problem), self.shared_bytes)


class WarmCall:
    """A call that came before, with other numbers or addresses: only its result is allocated, and it is launched."""

    def __init__(self, launch: Launch, x: Any, weight: Any, bias: Any, out: Any):
        self._launch = launch
        self._device_id = x.device.id
        self._shape, self._dtype, self._strides, self._bytes = out.shape, out.dtype, out.strides, out.nbytes
        self._misalignment = out.data.ptr % ALIGNMENT
        self._out_reach = reach(out)
        self._reaches = [reach(array) for array in (x, weight, bias) if array is not None]

    def __call__(self, x: Any, weight: Any, bias: Any, out: Any) -> Any:
        """Return the result, or None where the whole path must decide: `out` is near an input or unlike the plan's."""
        if getDevice() != self._device_id:
            with cupy.cuda.Device(self._device_id):
                return self(x, weight, bias, out)
        if out is None:
            out = cupy.ndarray(self._shape, self._dtype, cupy.cuda.alloc(self._bytes), self._strides)
            if out.data.ptr % ALIGNMENT != self._misalignment:
                return None
        elif self._is_near(x, weight, bias, out):
            return None
        self._launch(x, weight, bias, out)
        return out

    def _is_near(self, x: Any, weight: Any, bias: Any, out: Any) -> bool:
        """Whether the addresses from the first to the last byte of `out` and of an input have some in common."""
        low, high = (out.data.ptr + end for end in self._out_reach)
        inputs = (x, weight) if bias is None else (x, weight, bias)
        return any(
            low < array.data.ptr + array_high and array.data.ptr + array_low < high
            for array, (array_low, array_high) in zip(inputs, self._reaches, strict=True)
        )


@functools.lru_cache(maxsize=4096)
def _prepare(geometry: Geometry, dtype: str, layout: Layout, precision: str | None, device_id: int) -> Launch:
    device = device_properties(device_id)
    plan = make_plan(geometry, dtype, layout, precision, device)
    source, arch = f"{plan.kernel}.cu", architecture(device.compute_capability)
    kernel = load_kernel(source, plan.kernel, arch, plan.defines)
    if plan.shared_bytes > 48 * 1024:
        kernel.max_dynamic_shared_size_bytes = plan.shared_bytes
    pack = load_kernel(source, f"{plan.kernel}_pack", arch, plan.defines).kernel if plan.packed_words else None
    return Launch(
        kernel=kernel.kernel,
        grid=(plan.grid,),
        block=(plan.block,),
        shared_bytes=plan.shared_bytes,
        problem=_by_value(problem_struct(plan)),
        pack=pack,
        pack_grid=(-(-plan.packed_words // (plan.packed_a_thread * PACK_BLOCK[0])),),
        packed_bytes=4 * plan.packed_words,
    )


class _ByValue(np.ndarray):
    """A struct as a kernel's argument. CuPy reads this attribute at every launch, and NumPy would make it anew."""

    __array_interface__: dict[str, Any] = {}  # noqa: RUF012


def _by_value(struct: np.ndarray) -> np.ndarray:
    argument = struct.view(_ByValue)
    argument.__array_interface__ = struct.__array_interface__
    return argument


@functools.cache
def device_properties(device_id: int) -> Device:
    """Describe a GPU to the planner."""
    device = cupy.cuda.Device(device_id)
    return Device(
        compute_capability=int(device.compute_capability),
        multiprocessors=device.attributes["MultiProcessorCount"],
        shared_bytes=device.attributes["MaxSharedMemoryPerBlockOptin"],
    )
