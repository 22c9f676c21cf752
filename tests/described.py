"""Plans without a GPU: described devices, and the strides of arrays that are never allocated."""

from __future__ import annotations

import re
from collections.abc import Callable
from math import gcd
from typing import Any

from strategies import Problem

from cuconvt.compile import kernel_folder
from cuconvt.geometry import Geometry, make_geometry, normalise
from cuconvt.plan import Device, Layout, Plan, Refusal, make_plan
from cuconvt.plan_gather import plan_gather

Ints = tuple[int, ...]

# By compute capability. The shared memory is what one block can opt in to.
DEVICES = {
    80: Device(80, 108, 163 * 1024),
    86: Device(86, 84, 99 * 1024),
    89: Device(89, 128, 99 * 1024),
    90: Device(90, 132, 227 * 1024),
    100: Device(100, 148, 227 * 1024),
    120: Device(120, 170, 99 * 1024),
}
# Kernels that no other architecture than sm_90a has instructions for.
HOPPER = (
    "correlate_disjoint",
    "correlate_rows",
    "correlate_wgmma",
    "disjoint",
    "phase_rows",
    "phase_wgmma",
    "weight_gradient_tma",
    "weight_gradient_wgmma",
)

# The precision that a call without one has, by dtype.
DEFAULT = {"float16": None, "bfloat16": None, "float32": "tf32x3", "float64": None}


def geometry_of(problem: Problem) -> Geometry:
    parameters: dict[str, Any] = {**problem.parameters, "output_size": None}
    bias_shape = (problem.c_out,) if problem.has_bias else None
    return make_geometry(
        problem.rank, problem.x_shape, problem.weight_shape, bias_shape, *normalise(problem.rank, **parameters)
    )


def has_plane_with_a_tap(geometry: Geometry) -> bool:
    """Whether a tap reaches any plane of the result along D: what is nothing but bias is planned as it is."""
    (stride, *_), (dilation, *_), (kernel, *_) = geometry.stride, geometry.dilation, geometry.kernel
    step = stride if kernel == 1 else gcd(stride, dilation)
    return any((plane + geometry.pad_before[0]) % step == 0 for plane in range(geometry.out_extent[0]))


def contiguous(extents: Ints) -> Ints:
    """Return the strides, in elements, of a C-contiguous array."""
    strides = [1]
    for extent in reversed(extents[1:]):
        strides.append(strides[-1] * extent)
    return tuple(reversed(strides))


def channels_last(extents: Ints) -> Ints:
    """Return the strides of an array of the given (N, C, D, H, W) whose channels are the fastest axis."""
    n, c, *spatial = extents
    batch, *others, channel = contiguous((n, *spatial, c))
    return (batch, channel, *others)


def layout_of(geometry: Geometry, last: bool = False) -> Layout:
    g = geometry
    strides = channels_last if last else contiguous
    return Layout(
        x=strides((g.n, g.c_in, *g.x_extent)),
        weight=contiguous((g.c_in, g.c_out_per_group, *g.kernel)),
        bias=1,
        out=strides((g.n, g.c_out, *g.out_extent)),
    )


def plan_of(
    problem: Problem, dtype: str = "float32", precision: str | None = None, arch: int = 90, last: bool = False
) -> Plan:
    """Plan a problem with the kernel that is chosen for it."""
    geometry = geometry_of(problem)
    return make_plan(geometry, dtype, layout_of(geometry, last), precision or DEFAULT[dtype], DEVICES[arch])


def gather_of(problem: Problem, dtype: str = "float32", arch: int = 90, last: bool = False) -> Plan:
    """Plan a problem with the general kernel, whatever is faster."""
    geometry = geometry_of(problem)
    plan = plan_gather(geometry, dtype, layout_of(geometry, last), DEFAULT[dtype], DEVICES[arch])
    assert isinstance(plan, Plan), plan.reason
    return plan


def planner_with(propose: Callable[..., Plan | Refusal], tile: Any) -> Callable[..., Plan]:
    """Return a planner of one kernel, for tests in place of `plan_family`, that takes the given tile."""

    def plan(family: str, *problem: Any) -> Plan:
        found = propose(*problem, tile)
        assert isinstance(found, Plan), found
        return found

    return plan


def struct_fields() -> list[tuple[str, int]]:
    """Return the names and lengths of the fields of ``struct Problem``, from the header."""
    header = (kernel_folder() / "common.cuh").read_text()
    (body,) = re.findall(r"struct Problem \{(.*?)\};", header, re.DOTALL)
    code = re.sub(r"//.*", "", body)
    declared = re.findall(r"long long ([^;]+);", code)
    assert not re.sub(r"long long [^;]+;|\s", "", code), "a field of struct Problem is not a long long"
    fields = [re.fullmatch(r"(\w+)(?:\[(\d+)\])?", name.strip()) for line in declared for name in line.split(",")]
    return [(field[1], int(field[2] or 1)) for field in fields if field]


def problem_of(plan: Plan) -> dict[str, Ints]:
    """Return the run-time parameters by the names of the header's fields."""
    rest, named = plan.problem, {}
    for name, length in struct_fields():
        named[name], rest = rest[:length], rest[length:]
    assert not rest
    return named
