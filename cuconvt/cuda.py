"""The CUDA backend: plan, compile and launch on CuPy's current device and stream, without a synchronisation."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import cupy
from cupy.cuda.runtime import getDevice

from cuconvt.checks import dtype_name, reach
from cuconvt.compile import architecture, load_kernel
from cuconvt.cuda_gradients import correlate as correlate
from cuconvt.cuda_gradients import weight_gradient as weight_gradient
from cuconvt.geometry import Geometry
from cuconvt.launch import Struct
from cuconvt.plan import Device, Layout, Plan, make_plan, problem_struct
from cuconvt.tuned import tuned_plan
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

    kernel: Any  # cuconvt.launch.Kernel, as is `pack`
    grid: tuple[int]
    block: tuple[int]
    shared_bytes: int
    problem: Struct
    pack: Any  # the kernel that repacks the weights, or None
    pack_grid: tuple[int]
    packed_bytes: int

    def __call__(
        self, x: Any, weight: Any, bias: Any, out: Any, stream: Any = None, allocate: Any = cupy.cuda.alloc
    ) -> None:
        """Queue the kernels, on CuPy's current stream unless told; of the arrays, only the addresses are passed."""
        if self.pack is not None:
            packed = allocate(self.packed_bytes)
            self.pack(self.pack_grid, PACK_BLOCK, (weight, packed, self.problem), stream=stream)
            weight = packed
        self.kernel(self.grid, self.block, (x, weight, bias, out, self.problem), self.shared_bytes, stream)


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
    return prepare(choose_plan(geometry, dtype, layout, precision, device), device)


def choose_plan(geometry: Geometry, dtype: str, layout: Layout, precision: str | None, device: Device) -> Plan:
    """Return the plan that a call uses: the one that tuning found, if it did for this problem, else the planner's."""
    plan = tuned_plan(geometry, dtype, layout, precision, device)
    return plan or make_plan(geometry, dtype, layout, precision, device)


def prepare(plan: Plan, device: Device) -> Launch:
    """Compile a plan, or load it from the cache."""
    source, arch = f"{plan.kernel}.cu", architecture(device.compute_capability)
    kernel = load_kernel(source, plan.kernel, arch, plan.defines)
    if plan.shared_bytes > 48 * 1024:
        # Plans of other extents share the kernel and may need more, or less.
        kernel.allow_shared_bytes(device.shared_bytes)
    pack = load_kernel(source, f"{plan.kernel}_pack", arch, plan.defines) if plan.packed_words else None
    return Launch(
        kernel=kernel,
        grid=(plan.grid,),
        block=(plan.block,),
        shared_bytes=plan.shared_bytes,
        problem=Struct(problem_struct(plan)),
        pack=pack,
        pack_grid=(-(-plan.packed_words // (plan.packed_a_thread * PACK_BLOCK[0])),),
        packed_bytes=4 * plan.packed_words,
    )


@functools.cache
def device_properties(device_id: int) -> Device:
    """Describe a GPU to the planner."""
    device = cupy.cuda.Device(device_id)
    return Device(
        compute_capability=int(device.compute_capability),
        multiprocessors=device.attributes["MultiProcessorCount"],
        shared_bytes=device.attributes["MaxSharedMemoryPerBlockOptin"],
        name=cupy.cuda.runtime.getDeviceProperties(device_id)["name"].decode(),
    )
