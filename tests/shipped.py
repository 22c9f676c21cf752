"""The specialisations that a planner can choose, as far as a list of parameters in use can tell."""

from __future__ import annotations

import functools
import itertools
import random
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

from described import DEVICES, channels_last, contiguous, geometry_of
from host.backend import plan_or_refusal
from strategies import DTYPES, Ints, case

from cuconvt.geometry import Geometry
from cuconvt.plan import Layout, Plan

# Channels of a group, in and out.
CHANNELS = {
    "correlate": ((1, 1), (3, 5), (9, 2), (16, 8), (48, 33)),
    "correlate_disjoint": ((8, 8), (32, 16), (48, 24), (64, 64), (17, 12)),
    "correlate_few_channels": ((1, 1), (1, 3), (2, 9), (9, 1)),
    "correlate_gemm": ((8, 8), (32, 16), (48, 24), (48, 48), (64, 64)),
    "correlate_narrow": ((8, 8), (12, 4), (16, 16), (5, 3), (8, 16)),
    "correlate_rows": ((8, 8), (32, 16), (48, 24), (64, 64), (256, 128)),
    "correlate_wgmma": ((8, 8), (32, 16), (48, 24), (48, 48), (64, 64), (256, 128)),
    "disjoint": ((8, 8), (32, 16), (48, 24), (64, 64), (17, 12)),
    "few_channels": tuple(itertools.product((1, 3, 9), (1, 2, 3, 4, 9))),
    "gather": tuple(itertools.product((1, 2, 3, 8, 9), (1, 2, 3, 5, 8, 9, 16, 24, 33, 48))),
    "narrow_groups": ((8, 8), (4, 12), (16, 16), (3, 5), (16, 8)),
    "phase_gemm": ((8, 8), (32, 16), (48, 24), (48, 48), (64, 64)),
    "phase_rows": ((8, 8), (32, 16), (48, 24), (64, 64), (256, 128)),
    "phase_wgmma": ((8, 8), (32, 16), (48, 24), (48, 48), (64, 64)),
    "tap_columns": tuple(itertools.product((16, 48, 128), (1, 2, 3, 4))),
    "weight_gradient": ((1, 1), (3, 5), (9, 2), (16, 8), (48, 33)),
    "weight_gradient_few_channels": ((1, 1), (1, 3), (2, 9), (9, 1)),
    "weight_gradient_gemm": ((8, 8), (32, 16), (48, 24), (48, 48), (64, 64)),
    "weight_gradient_narrow": ((8, 8), (3, 5), (1, 1), (16, 8)),
    "weight_gradient_tma": ((8, 8), (32, 64), (48, 48), (64, 64), (256, 128)),
    "weight_gradient_wgmma": ((8, 8), (32, 16), (48, 48), (64, 64), (256, 128)),
}
GROUPS = {
    "correlate_few_channels": (1, 2, 64),
    "few_channels": (1, 2, 3, 64),
    "weight_gradient": (1, 6),
    "weight_gradient_few_channels": (1, 2, 64),
}
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
# Extents of x: where copies bring rows of whole 16 bytes, or planes of these alone, with as many positions as inputs.
EXTENTS = {"phase_rows": ((8, 8, 8), (5, 8, 6))}
# Macros that a problem decides, not the planner.
OF_THE_PROBLEM = (
    "KERNEL_",
    "STRIDE_",
    "DILATION_",
    "X_CHANNELS_LAST",
    "Y_CHANNELS_LAST",
    "OUT_CHANNELS_LAST",
    "SHARED_BYTES",
    "TAPS_",
    "APART_",
    "SHIFT_",
    "X_STRIDE_W",
    "OUT_STRIDE_W",
    "Y_STRIDE_W",
)
# Macros that hardly change what registers hold: constants of addresses, trip counts of loops at run time, one 16-bit
# type for the other (PRECISION tells them from float32). Of plans that differ in these alone, one is compiled.
ALIKE = {
    "correlate_disjoint": ("KERNEL_D", "KERNEL_H", "DTYPE"),
    "correlate_rows": ("RING", "X_STAGES", "DTYPE"),
    "correlate_wgmma": ("DILATION_", "RING", "X_STAGES", "DTYPE"),
    "disjoint": ("KERNEL_D", "KERNEL_H", "DTYPE"),
    "narrow_groups": ("DILATION_", "SHIFT_", "DTYPE"),
    "phase_gemm": ("KERNEL_D", "STRIDE_D", "DILATION_D", "WARPS_", "EARLY", "SHARED_BYTES", "DTYPE"),
    "phase_rows": ("KERNEL_D", "KERNEL_H", "DILATION_D", "DILATION_H", "RING", "X_STAGES", "DTYPE"),
    "phase_wgmma": ("DILATION_", "RING", "X_STAGES", "DTYPE"),
    "tap_columns": ("KERNEL_", "STRIDE_D", "STRIDE_H", "DILATION_", "SHIFT_W", "APART", "OUT_VECTOR", "DTYPE"),
}
# Of float32, where they make another kernel.
SIMT = (
    "correlate",
    "correlate_few_channels",
    "few_channels",
    "gather",
    "weight_gradient",
    "weight_gradient_few_channels",
)
PRECISIONS = dict.fromkeys(SIMT, ("ieee",))


Request = tuple[Geometry, str, Layout, str | None]  # with dtype and precision


@functools.cache
def requests(family: str) -> tuple[Request, ...]:
    """Return the problems that one family is planned for."""
    found = []
    for rank, dtype in itertools.product((1, 2, 3), DTYPES):
        axes = [tuple((value,) * rank for value in axis) for axis in AXES]
        for kernel, stride, dilation in (*axes, *UNEQUAL.get(rank, ())):
            padding, more = _as_many_positions(kernel, stride, dilation) if family in EXTENTS else (0, 0)
            for groups, (c_in, c_out), extent in itertools.product(
                GROUPS.get(family, (1,)), CHANNELS[family], EXTENTS.get(family, ((5, 5, 5),))
            ):
                x, channels = (1, groups * c_in, *extent[3 - rank :]), groups * c_out
                geometry = geometry_of(case(x, channels, kernel, stride, padding, more, groups, dilation))
                precisions = PRECISIONS.get(family, ("tf32x3", "tf32")) if dtype == "float32" else (None,)
                for last, precision in itertools.product((False, True), precisions):
                    strides = channels_last if last else contiguous
                    layout = Layout(
                        x=strides((1, geometry.c_in, *geometry.x_extent)),
                        weight=contiguous((geometry.c_in, c_out, *geometry.kernel)),
                        bias=1,
                        out=strides((1, channels, *geometry.out_extent)),
                    )
                    found.append((geometry, dtype, layout, precision))
    return tuple(found)


def _as_many_positions(kernel: Ints, stride: Ints, dilation: Ints) -> tuple[Any, Ints]:
    """Return the padding, and the output padding, with which a stride of results follows from each input."""
    cut = [d * (k - 1) + 1 - s for k, s, d in zip(kernel, stride, dilation, strict=True)]
    return tuple((max(c, 0) // 2, -(-max(c, 0) // 2)) for c in cut), tuple(max(-c, 0) for c in cut)


def plans_of(family: str, arch: int, requests: Iterable[Request]) -> Iterator[Plan]:
    """Yield the plans of one family for a device, without the problems that it refuses."""
    for request in requests:
        plan = plan_or_refusal(family, *request, DEVICES[arch])
        if isinstance(plan, Plan):
            yield plan


@functools.cache
def shipped(family: str, arch: int) -> tuple[Plan, ...]:
    """Return plans of one family for a device, one for each specialisation."""
    return _distinct(plans_of(family, arch, requests(family)))


def some_of(family: str, arch: int, count: int) -> tuple[Plan, ...]:
    """Return so many of them, others for each device; few problems are planned."""
    shuffled = random.Random(arch).sample(requests(family), len(requests(family)))
    return _distinct(itertools.islice(plans_of(family, arch, shuffled), count))


def _distinct(plans: Iterable[Plan]) -> tuple[Plan, ...]:
    found: dict[tuple[tuple[str, int], ...], Plan] = {}
    for plan in plans:
        found.setdefault(plan.defines, plan)
    return tuple(found.values())


def of_every_tile(family: str, arch: int) -> tuple[Plan, ...]:
    """Return the plans whose resources are tested: of those that differ in the problem's macros, or for a phase GEMM in
    those of `ALIKE`, the one with the most taps. Phases along W count as part of the tile."""
    groups = defaultdict(list)
    alike = ALIKE.get(family, OF_THE_PROBLEM)
    for plan in shipped(family, arch):
        key = (item for item in plan.defines if item[0] == "STRIDE_W" or not item[0].startswith(alike))
        groups[tuple(key)].append(plan)
    return tuple(max(plans, key=_taps) for plans in groups.values())


def _taps(plan: Plan) -> tuple[int, ...]:
    defines = dict(plan.defines)
    return (defines["KERNEL_W"], defines["KERNEL_D"] * defines["KERNEL_H"])
