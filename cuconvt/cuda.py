"""The CUDA backend: plan, compile and launch on CuPy's current device and stream, without a synchronisation."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import cupy
import numpy as np

from cuconvt.compile import architecture, load_kernel
from cuconvt.geometry import Geometry
from cuconvt.plan import Device, Layout, make_plan, problem_struct

PACK_BLOCK = (256,)


def conv_transpose(x: Any, weight: Any, bias: Any, geometry: Geometry, precision: str | None, out: Any) -> None:
    """Write the transposed convolution of cupy arrays in 3-D form to `out`."""
    layout = Layout.of(x, weight, bias, out)
    launch = _prepare(geometry, x.dtype.name, layout, precision, x.device.id)
    if launch.pack is not None:
        packed = cupy.empty(launch.packed_words, np.uint32)
        launch.pack(launch.pack_grid, PACK_BLOCK, (weight, packed, launch.problem))
        weight = packed
    launch.kernel(launch.grid, launch.block, (x, weight, bias, out, launch.problem), shared_mem=launch.shared_bytes)


class Launch(NamedTuple):
    """A plan, compiled for a device: what is left of a call is to launch it."""

    kernel: Any
    grid: tuple[int]
    block: tuple[int]
    shared_bytes: int
    problem: np.ndarray
    pack: Any  # the kernel that repacks the weights, or None
    pack_grid: tuple[int]
    packed_words: int


@functools.lru_cache(maxsize=4096)
def _prepare(geometry: Geometry, dtype: str, layout: Layout, precision: str | None, device_id: int) -> Launch:
    device = device_properties(device_id)
    plan = make_plan(geometry, dtype, layout, precision, device)
    source, arch = f"{plan.kernel}.cu", architecture(device.compute_capability)
    kernel = load_kernel(source, plan.kernel, arch, plan.defines)
    if plan.shared_bytes > 48 * 1024:
        kernel.max_dynamic_shared_size_bytes = plan.shared_bytes
    return Launch(
        kernel=kernel,
        grid=(plan.grid,),
        block=(plan.block,),
        shared_bytes=plan.shared_bytes,
        problem=problem_struct(plan),
        pack=load_kernel(source, f"{plan.kernel}_pack", arch, plan.defines) if plan.packed_words else None,
        pack_grid=(-(-plan.packed_words // (plan.packed_a_thread * PACK_BLOCK[0])),),
        packed_words=plan.packed_words,
    )


@functools.cache
def device_properties(device_id: int) -> Device:
    """Describe a GPU to the planner."""
    device = cupy.cuda.Device(device_id)
    return Device(
        compute_capability=int(device.compute_capability),
        multiprocessors=device.attributes["MultiProcessorCount"],
        shared_bytes=device.attributes["MaxSharedMemoryPerBlockOptin"],
    )
