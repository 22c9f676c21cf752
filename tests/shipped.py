"""The specialisations that a planner can choose, as far as a list of parameters in use can tell."""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict

from described import DEVICES, channels_last, contiguous, geometry_of
from host.backend import plan_or_refusal
from strategies import DTYPES, case

from cuconvt.plan import Layout, Plan

# Channels of a group, in and out.
CHANNELS = {
    "few_channels": ((1, 3, 9), (1, 2, 3, 4, 9)),
    "gather": ((1, 2, 3, 8, 9), (1, 2, 3, 5, 8, 9, 16, 24, 33, 48)),
    "phase_gemm": ((3, 9, 24, 64), (3, 8, 16, 24, 33, 48, 64, 96)),
}
GROUPS = {"few_channels": (1, 2, 3, 64)}
# Kernel, stride and dilation of one axis; all axes of a problem have the same, but for the last ones.
AXES = ((1, 1, 1), (2, 2, 1), (3, 1, 1), (3, 2, 1), (3, 2, 2), (4, 2, 1), (3, 1, 2), (5, 1, 1), (5, 3, 2), (7, 4, 3))
UNEQUAL = {
    2: (
        ((3, 7), (1, 4), (2, 1)),
        ((3, 5), (2, 2), (1, 1)),
        ((1, 40), (1, 2), (1, 1)),
        ((3, 16), (1, 8), (1, 1)),
        ((3, 4), (1, 17), (1, 1)),
        ((3, 3), (2, 2), (4000, 1)),
    ),
    3: (((3, 5, 7), (2, 2, 2), (1, 1, 1)), ((3, 5, 7), (1, 1, 1), (1, 1, 1)), ((3, 3, 3), (2, 1, 1), (400, 1, 1))),
}
# Macros that a problem decides, not the planner.
OF_THE_PROBLEM = (
    "KERNEL_",
    "STRIDE_",
    "DILATION_",
    "X_CHANNELS",
    "OUT_CHANNELS",
    "SHARED_BYTES",
    "SHIFT_W",
    "X_STRIDE_W",
    "OUT_STRIDE_W",
)
# Of float32, where they make another kernel.
PRECISIONS = {"gather": ("ieee",), "few_channels": ("ieee",)}


@functools.cache
def shipped(family: str, arch: int) -> tuple[Plan, ...]:
    """Return plans of one family for a device, one for each specialisation."""
    found = {}
    for rank, dtype in itertools.product((1, 2, 3), DTYPES):
        axes = [tuple((value,) * rank for value in axis) for axis in AXES]
        for kernel, stride, dilation in (*axes, *UNEQUAL.get(rank, ())):
            for groups, c_in, c_out in itertools.product(GROUPS.get(family, (1,)), *CHANNELS[family]):
                x, channels = (1, groups * c_in, *(5,) * rank), groups * c_out
                geometry = geometry_of(case(x, channels, kernel, stride, groups=groups, dilation=dilation))
                precisions = PRECISIONS.get(family, ("tf32x3", "tf32")) if dtype == "float32" else (None,)
                for last, precision in itertools.product((False, True), precisions):
                    strides = channels_last if last else contiguous
                    layout = Layout(
                        x=strides((1, geometry.c_in, *geometry.x_extent)),
                        weight=contiguous((geometry.c_in, c_out, *geometry.kernel)),
                        bias=1,
                        out=strides((1, channels, *geometry.out_extent)),
                    )
                    plan = plan_or_refusal(family, geometry, dtype, layout, precision, DEVICES[arch])
                    if isinstance(plan, Plan):
                        found.setdefault(plan.defines, plan)
    return tuple(found.values())


def of_every_tile(family: str, arch: int) -> tuple[Plan, ...]:
    """Return, for each tile that a planner can choose in each dtype and phases along W, the plan with the most taps."""
    groups = defaultdict(list)
    for plan in shipped(family, arch):
        key = (item for item in plan.defines if item[0] == "STRIDE_W" or not item[0].startswith(OF_THE_PROBLEM))
        groups[tuple(key)].append(plan)
    return tuple(max(plans, key=_taps) for plans in groups.values())


def _taps(plan: Plan) -> tuple[int, ...]:
    defines = dict(plan.defines)
    return (defines["KERNEL_W"], defines["KERNEL_D"] * defines["KERNEL_H"])
