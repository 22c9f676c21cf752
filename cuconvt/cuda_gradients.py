"""The gradients' side of the CUDA backend: plan, compile and launch, as in `cuconvt.cuda`, which offers them."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import cupy

from cuconvt.checks import dtype_name
from cuconvt.compile import architecture, load_kernel
from cuconvt.geometry import Geometry
from cuconvt.launch import Struct
from cuconvt.plan import Device, Layout, Plan, problem_struct
from cuconvt.plan_correlate import make_correlate_plan
from cuconvt.plan_weight_gradient import SUM_SLICES, SUM_VALUES, make_weight_gradient_plan

SUM_BLOCK = (SUM_VALUES * SUM_SLICES,)


def correlate(y: Any, weight: Any, bias: Any, geometry: Geometry, precision: str | None, out: Any) -> Any:
    """Write the strided correlation of cupy arrays in 3-D form to `out`, and return what was launched.

    The geometry is that of the transposed convolution whose adjoint this is: y has its result's shape and `out` its
    input's. With y the gradient of the result, this is the gradient of the input; it is also the forward of an
    ordinary convolution, and then may have a bias.
    """
    layout = Layout.of(out, weight, bias, y)
    launch = _prepare_correlate(geometry, dtype_name(y.dtype), layout, precision, y.device.id)
    launch(y, weight, bias, out)
    return launch


def weight_gradient(x: Any, y: Any, geometry: Geometry, precision: str | None, out: Any) -> WeightGradientLaunch:
    """Write the sum over all positions of x times y, a weight of the geometry, to `out`, and return what was launched.

    With y the gradient of the result, this is the gradient of the weight.
    """
    layout = Layout.of(x, out, None, y)
    launch = _prepare_weight_gradient(geometry, dtype_name(x.dtype), layout, precision, x.device.id)
    launch(x, y, out)
    return launch


class WeightGradientLaunch(NamedTuple):
    """A plan, compiled for a device: what is left of a call is to launch it."""

    kernel: Any  # cuconvt.launch.Kernel, as is `add`
    grid: tuple[int]
    block: tuple[int]
    shared_bytes: int
    problem: Struct
    add: Any  # the kernel that adds the partial sums, or None
    add_grid: tuple[int]
    workspace_bytes: int

    def __call__(self, x: Any, y: Any, out: Any, stream: Any = None, allocate: Any = cupy.cuda.alloc) -> None:
        """Queue the kernels, on CuPy's current stream unless told; of the arrays, only the addresses are passed."""
        parts = None if self.add is None else allocate(self.workspace_bytes)
        self.kernel(self.grid, self.block, (x, y, parts, out, self.problem), self.shared_bytes, stream)
        if self.add is not None:
            self.add(self.add_grid, SUM_BLOCK, (parts, out, self.problem), stream=stream)


@functools.lru_cache(maxsize=4096)
def _prepare_correlate(geometry: Geometry, dtype: str, layout: Layout, precision: str | None, device_id: int) -> Any:
    from cuconvt.cuda import PACK_BLOCK, Launch, device_properties

    device = device_properties(device_id)
    plan = make_correlate_plan(geometry, dtype, layout, precision, device)
    return Launch(
        kernel=_load(plan, plan.kernel, device),
        grid=(plan.grid,),
        block=(plan.block,),
        shared_bytes=plan.shared_bytes,
        problem=Struct(problem_struct(plan)),
        pack=_load(plan, f"{plan.kernel}_pack", device) if plan.packed_words else None,
        pack_grid=(-(-plan.packed_words // (plan.packed_a_thread * PACK_BLOCK[0])),),
        packed_bytes=4 * plan.packed_words,
    )


@functools.lru_cache(maxsize=4096)
def _prepare_weight_gradient(
    geometry: Geometry, dtype: str, layout: Layout, precision: str | None, device_id: int
) -> WeightGradientLaunch:
    from cuconvt.cuda import device_properties

    device = device_properties(device_id)
    plan = make_weight_gradient_plan(geometry, dtype, layout, precision, device)
    return WeightGradientLaunch(
        kernel=_load(plan, plan.kernel, device),
        grid=(plan.grid,),
        block=(plan.block,),
        shared_bytes=plan.shared_bytes,
        problem=Struct(problem_struct(plan)),
        add=_load(plan, f"{plan.kernel}_add", device) if plan.sums else None,
        add_grid=(-(-plan.sums // SUM_VALUES),),
        workspace_bytes=plan.workspace_bytes,
    )


def _load(plan: Plan, entry: str, device: Device) -> Any:
    """Return an entry point of the plan's file."""
    kernel = load_kernel(f"{plan.kernel}.cu", entry, architecture(device.compute_capability), plan.defines)
    if entry == plan.kernel and plan.shared_bytes > 48 * 1024:
        # Plans of other extents share the kernel and may need more, or less.
        kernel.allow_shared_bytes(device.shared_bytes)
    return kernel
