"""The gradients' side of the CUDA backend: plan, compile and launch, as in `cuconvt.cuda`."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from cupy.cuda import alloc
from cupy.cuda.stream import get_current_stream

from cuconvt.checks import dtype_name
from cuconvt.choices import Choices
from cuconvt.cuda import Launch, choose_plan, device_properties, load, prepare
from cuconvt.geometry import Geometry
from cuconvt.launch import can_start_early
from cuconvt.plan import Device, Layout, Plan, problem_struct, show, struct_of
from cuconvt.plan_correlate import make_correlate_plan
from cuconvt.plan_correlate_turning import plan_unstrided
from cuconvt.plan_search import kept_in
from cuconvt.plan_turn import TURN_THREADS
from cuconvt.plan_turned import turned
from cuconvt.plan_weight_gradient import SUM_THREADS, make_weight_gradient_plan, spread_bytes, sum_blocks


def correlate(y: Any, weight: Any, bias: Any, geometry: Geometry, precision: str | None, out: Any) -> Launch:
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


def choose_correlate_plan(
    geometry: Geometry, dtype: str, layout: Layout, precision: str | None, device: Device
) -> Plan:
    """Return the plan that a correlation uses.

    With a stride of 1 it is that of the transposed convolution that the correlation is, or one of its own where that
    is estimated to take less time.
    """
    adjoint = turned(geometry, layout)
    if adjoint is None:
        return make_correlate_plan(geometry, dtype, layout, precision, device)
    plan = choose_plan(adjoint[0], dtype, adjoint[1], precision, device)
    return plan if plan.tuned else plan_unstrided(plan, geometry, dtype, layout, precision, device)


class WeightGradientLaunch(NamedTuple):
    """A plan, compiled for a device: what is left of a call is to launch it."""

    kernel: Any  # cuconvt.launch.BoundKernel, as is `add`
    add: Any  # the kernel that adds the partial sums, or None
    workspace_bytes: int
    turn: Any = None  # the kernel that makes channels-last copies of arrays, or None
    turned: tuple[int, ...] = ()  # where those of x and y are in the workspace, or -1
    images: tuple[int, ...] = ()  # launches that take some images each, and bytes of x and y from one's to the next's
    kernel_of_next: Any = None  # the kernel of all of these but the first

    def __call__(self, x: Any, y: Any, out: Any, stream: Any = None, allocate: Any = alloc) -> None:
        """Queue the kernels, on CuPy's current stream unless told; of the arrays, only the addresses are passed."""
        stream = get_current_stream() if stream is None else stream
        parts: Any = allocate(self.workspace_bytes) if self.workspace_bytes else None
        if self.images:
            launches, *steps = self.images
            x, y = (array if isinstance(array, int) else array.data.ptr for array in (x, y))
            for i in range(launches):
                self._multiply(stream, self.kernel_of_next if i else self.kernel, x, y, parts, out)
                x, y = x + steps[0], y + steps[1]
        else:
            self._multiply(stream, self.kernel, x, y, parts, out)
        if self.add is not None:
            self.add(stream, parts, out)

    def _multiply(self, stream: Any, kernel: Any, x: Any, y: Any, parts: Any, out: Any) -> None:
        if self.turn is not None:
            turned_x, turned_y = (None if place < 0 else parts + place for place in self.turned)
            self.turn(stream, x, y, turned_x, turned_y)
            x, y = x if turned_x is None else turned_x, y if turned_y is None else turned_y
        kernel(stream, x, y, parts, out)


@functools.lru_cache(maxsize=4096)
def _prepare_correlate(geometry: Geometry, dtype: str, layout: Layout, precision: str | None, device_id: int) -> Launch:
    device = device_properties(device_id)
    with kept_in(Choices()):
        plan = choose_correlate_plan(geometry, dtype, layout, precision, device)
    show(plan, geometry, dtype, precision)
    return prepare(plan, device)


@functools.lru_cache(maxsize=4096)
def _prepare_weight_gradient(
    geometry: Geometry, dtype: str, layout: Layout, precision: str | None, device_id: int
) -> WeightGradientLaunch:
    device = device_properties(device_id)
    with kept_in(Choices()):
        plan = make_weight_gradient_plan(geometry, dtype, layout, precision, device)
    show(plan, geometry, dtype, precision)
    return prepare_weight_gradient(plan, dtype, device)


def prepare_weight_gradient(plan: Plan, dtype: str, device: Device) -> WeightGradientLaunch:
    """Compile a plan, or load it from the cache."""
    problem = problem_struct(plan)
    add = turn = None
    early = can_start_early(device.compute_capability)
    if plan.sums:
        second = load(plan, f"{plan.kernel}_add", device)
        blocks, own = sum_blocks(plan, dtype, device), second.static_shared_bytes
        spread = spread_bytes(blocks, own, device) if early else 0
        if spread:
            second.allow_shared_bytes(device.shared_bytes - own)  # plans share it
        add = second.bind(blocks, SUM_THREADS, spread, problem, pointers=2, early=early)
    if plan.turn_blocks:
        turn = load(plan, f"{plan.kernel}_turn", device).bind(
            plan.turn_blocks, TURN_THREADS, plan.turn_shared_bytes, struct_of(plan.turns), pointers=4
        )
    kernel = load(plan, plan.kernel, device)

    def bind(problem: Any) -> Any:
        return kernel.bind(
            plan.grid,
            plan.block,
            plan.shared_bytes,
            problem,
            pointers=4,
            early=early and turn is not None,
            maps=plan.maps,
        )

    return WeightGradientLaunch(
        kernel=bind(problem),
        add=add,
        workspace_bytes=plan.workspace_bytes,
        turn=turn,
        turned=plan.turned,
        images=plan.images,
        kernel_of_next=bind(struct_of(plan.problem_of_next)) if plan.images else None,
    )
