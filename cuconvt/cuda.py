"""The CUDA backend: plan, compile and launch on CuPy's current device and stream, without a synchronisation."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import cupy
from cupy.cuda import alloc
from cupy.cuda.runtime import getDevice
from cupy.cuda.stream import get_current_stream

from cuconvt.checks import dtype_name, reach
from cuconvt.choices import Choices
from cuconvt.compile import architecture, load_kernel
from cuconvt.geometry import Geometry
from cuconvt.launch import can_start_early
from cuconvt.plan import Device, Layout, Plan, make_plan, problem_struct, show, struct_of
from cuconvt.plan_search import kept_in
from cuconvt.plan_single import without_steps
from cuconvt.tuned import tuned_plan
from cuconvt.warm import ALIGNMENT

PACK_BLOCK = 256


def conv_transpose(x: Any, weight: Any, bias: Any, geometry: Geometry, precision: str | None, out: Any) -> Launch:
    """Write the transposed convolution of cupy arrays in 3-D form to `out`, and return what was launched."""
    layout = Layout.of(x, weight, bias, out)
    launch = _prepare(geometry, dtype_name(x.dtype), layout, precision, x.device.id)
    launch(x, weight, bias, out)
    return launch


class Launch(NamedTuple):
    """A plan, compiled for a device: what is left of a call is to launch it."""

    kernel: Any  # cuconvt.launch.BoundKernel, as is `pack`
    pack: Any  # the kernel that repacks the weights, or None
    packed_bytes: int
    turned_bytes: int = 0  # of a channels-last copy of the first array, which the same kernel makes

    def __call__(self, x: Any, weight: Any, bias: Any, out: Any, stream: Any = None, allocate: Any = alloc) -> None:
        """Queue the kernels, on CuPy's current stream unless told; of the arrays, only the addresses are passed."""
        stream = get_current_stream() if stream is None else stream
        if self.pack is not None:
            packed = allocate(self.turned_bytes + self.packed_bytes)
            if self.turned_bytes:
                turned, packed = packed, packed + self.turned_bytes
                self.pack(stream, weight, packed, x, turned)
                x = turned
            else:
                self.pack(stream, weight, packed)
            weight = packed
        self.kernel(stream, x, weight, bias, out)


class WarmCall:
    """A call that came before, with other numbers or addresses: only its result is allocated, and it is launched.

    Parameters
    ----------
    launch : callable
        Takes the arrays and the result.
    arrays : sequence of array or None
        Those of the call; only their places in memory count.
    out : array
        The call's result.
    """

    def __init__(self, launch: Callable[..., None], arrays: Sequence[Any], out: Any):
        self._launch = launch
        self._device_id = out.device.id
        self._shape, self._dtype, self._strides, self._bytes = out.shape, out.dtype, out.strides, out.nbytes
        self._misalignment = out.data.ptr % ALIGNMENT
        self._out_reach = reach(out)
        self._reaches = [None if array is None else reach(array) for array in arrays]

    def __call__(self, arrays: Sequence[Any], out: Any) -> Any:
        """Return the result, or None where the whole path must decide: `out` is near an input or unlike the plan's."""
        if getDevice() != self._device_id:
            with cupy.cuda.Device(self._device_id):
                return self(arrays, out)
        if out is None:
            memory = alloc(self._bytes)
            if memory.ptr % ALIGNMENT != self._misalignment:
                return None
            out = cupy.ndarray(self._shape, self._dtype, memory, self._strides)
        elif self._is_near(arrays, out):
            return None
        self._launch(*arrays, out)
        return out

    def _is_near(self, arrays: Sequence[Any], out: Any) -> bool:
        """Whether the addresses from the first to the last byte of `out` and of an input have some in common."""
        low, high = (out.data.ptr + end for end in self._out_reach)
        return any(
            low < array.data.ptr + array_reach[1] and array.data.ptr + array_reach[0] < high
            for array, array_reach in zip(arrays, self._reaches, strict=True)
            if array_reach is not None
        )


@functools.lru_cache(maxsize=4096)
def _prepare(geometry: Geometry, dtype: str, layout: Layout, precision: str | None, device_id: int) -> Launch:
    device = device_properties(device_id)
    with kept_in(Choices()):
        plan = choose_plan(geometry, dtype, layout, precision, device)
    show(plan, geometry, dtype, precision)
    return prepare(plan, device)


def choose_plan(geometry: Geometry, dtype: str, layout: Layout, precision: str | None, device: Device) -> Plan:
    """Return the plan that a call uses: the one that tuning found, if it did for this problem, else the planner's."""
    geometry, layout = without_steps(geometry, layout)
    plan = tuned_plan(geometry, dtype, layout, precision, device)
    return plan or make_plan(geometry, dtype, layout, precision, device)


def prepare(plan: Plan, device: Device) -> Launch:
    """Compile a plan, or load it from the cache."""
    problem = problem_struct(plan)
    pack = None
    if plan.packed_words:
        grid = plan.turn_blocks - (-plan.packed_words // (plan.packed_a_thread * PACK_BLOCK))
        entry, pointers = ("_pack_and_turn", 4) if plan.turn_blocks else ("_pack", 2)
        numbers = struct_of(plan.problem + plan.turns)
        pack = load(plan, f"{plan.kernel}{entry}", device).bind(
            grid, PACK_BLOCK, plan.turn_shared_bytes, numbers, pointers=pointers
        )
    kernel = load(plan, plan.kernel, device)
    early = pack is not None and can_start_early(device.compute_capability)
    return Launch(
        kernel=kernel.bind(plan.grid, plan.block, plan.shared_bytes, problem, pointers=4, early=early, maps=plan.maps),
        pack=pack,
        packed_bytes=4 * plan.packed_words,
        turned_bytes=plan.workspace_bytes,
    )


def load(plan: Plan, entry: str, device: Device) -> Any:
    """Return an entry point of the plan's file."""
    kernel = load_kernel(f"{plan.kernel}.cu", entry, architecture(device.compute_capability), plan.defines)
    if entry == plan.kernel and plan.shared_bytes > 48 * 1024:
        # Plans of other extents share the kernel and may need more, or less.
        kernel.allow_shared_bytes(device.shared_bytes)
    return kernel


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
