"""Gradients of problems whose phases of y are channels: what is planned, and the kernels on the host."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np
import pytest
from described import DEFAULT, DEVICES, geometry_of, layout_of
from gradients import check, direct_input
from host.build import kernel_sources, why_not
from host_correlate_wgmma import SHARED_BYTES
from host_gradients import gradients_on_host
from strategies import KINDS, Problem, case
from test_grad import arrays_of, input_gradient
from test_host_faults import KERNEL_BEFORE, VALUES, plant

from cuconvt.plan import Device, Plan, Refusal
from cuconvt.plan_correlate import make_correlate_plan
from cuconvt.plan_phases import (
    OF_INPUT,
    OF_WEIGHT,
    Copied,
    plan_correlate_of_phases,
    plan_weight_gradient_of_phases,
)
from cuconvt.plan_weight_gradient import MAX_WORKSPACE_BYTES, make_weight_gradient_plan

on_the_host = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))

ALIKE = {
    "spectrum": case((2, 9, 12), 1, 24, 8),
    "speech": case((2, 11, 37), 2, 8, 4, padding=3, output_padding=2, has_bias=True),
    "patches": case((2, 17, 3, 5), 3, (4, 8), (4, 8), x_layout="channels_last", out_layout="channels_last"),
    "odd_steps": case((1, 6, 4, 7), 5, (6, 9), (2, 3), padding=((1, 0), (2, 4)), output_padding=(1, 2)),
    "volume": case((2, 8, 3, 4, 5), 3, 4, 2, padding=1, out_layout="cropped"),
    "grouped": case((2, 32, 3, 5), 16, (4, 4), (1, 4), groups=2, weight_layout="strided"),
    "few_of_a_group": case((2, 16, 4, 9), 6, (2, 4), (2, 4), groups=2, out_layout="negative"),  # which no box brings
}
KERNELS = {
    "input": ("correlate_wgmma", plan_correlate_of_phases),
    "conv": ("correlate_wgmma", plan_correlate_of_phases),
    "weight": ("weight_gradient_tma", plan_weight_gradient_of_phases),
}


def run(operation: str, problem: Problem, dtype: str, precision: str | None, sources: Any = None) -> None:
    kernel, planned = KERNELS[operation]

    def plan(family: str, *problem: Any) -> Plan:
        found = planned(*problem)
        assert isinstance(found, Plan), found
        assert family == found.kernel
        return found

    device = Device(90, 2, SHARED_BYTES)
    with gradients_on_host(kernel, device, precision, sources=sources, plan=plan):
        check(operation, problem, dtype, precision=precision, calls=1)


@on_the_host
@pytest.mark.parametrize(("dtype", "precision"), KINDS)
@pytest.mark.parametrize("name", ALIKE)
@pytest.mark.parametrize("operation", KERNELS)
def test_gradients_on_the_host(operation: str, name: str, dtype: str, precision: str | None) -> None:
    run(operation, ALIKE[name], dtype, precision)


# What is run and how, the text and what takes its place, and how it is caught.
FAULTS = {
    "another phase is gathered": (
        "input",
        ("bfloat16", None),
        "turn.cuh",
        "(w + of.w) * t.stride[4]",
        "(w + PHASES_W - 1 - of.w) * t.stride[4]",
        VALUES + "|heap-buffer-overflow",
    ),
    "padding is gathered": (
        "input",
        ("bfloat16", None),
        "turn.cuh",
        "within(w + of.w, t.box[2])",
        "true",
        VALUES + "|heap-buffer-overflow",
    ),
    "weights of another phase": (
        "input",
        ("float32", "tf32"),
        "correlate_wgmma.cu",
        "of.w * p.weight_stride[4]];",
        "0];",
        VALUES,
    ),
    "another tap is written": (
        "weight",
        ("bfloat16", None),
        "weight_gradient_tma.cu",
        "weight.w * PHASES_W + of.w",
        "weight.w + of.w",
        "which thread .* wrote",
    ),
    "no wait for the kernel that copies": (
        "input",
        ("float32", "tf32x3"),
        "correlate_wgmma.cu",
        "(X_TURNED && !BOXED)",
        "false",
        KERNEL_BEFORE,
    ),
    "no box that waits for the kernel that copies": (
        "input",
        ("float32", "tf32x3"),
        "correlate_wgmma.cu",
        "if (X_TURNED) wait_for_kernel_before();\nRing",
        "Ring",
        KERNEL_BEFORE,
    ),
}


OTHERS = {"no wait for the kernel that copies": "few_of_a_group"}  # the problems of faults that the usual one lacks


@on_the_host
@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_caught(name: str) -> None:
    operation, kind, file, before, after, caught_by = FAULTS[name]
    texts = kernel_sources(f"{KERNELS[operation][0]}.cu")
    sources = {**texts, **plant({file: texts[file]}, before, after)}
    with pytest.raises(AssertionError, match=caught_by):
        run(operation, ALIKE[OTHERS.get(name, "speech")], *kind, sources)


def test_the_problem_without_a_stride() -> None:
    geometry = geometry_of(ALIKE["odd_steps"])
    copied = Copied.of(geometry, "float32", layout_of(geometry))
    assert isinstance(copied, Copied)
    g = copied.geometry
    assert (g.c_out, g.kernel, g.stride, g.out_extent) == (30, (1, 3, 3), (1, 1, 1), (1, 6, 9))
    assert g.pad_before == g.pad_after == g.output_padding == (0, 0, 0)


Planner = Callable[..., Plan | Refusal]


@pytest.mark.parametrize(
    ("planned", "name"), [(plan_correlate_of_phases, OF_INPUT), (plan_weight_gradient_of_phases, OF_WEIGHT)]
)
def test_refusals_say_why(planned: Planner, name: str) -> None:
    def reason(problem: Problem, dtype: str = "float32", precision: str | None = None, arch: int = 90) -> str:
        geometry = geometry_of(problem)
        found = planned(geometry, dtype, layout_of(geometry), precision or DEFAULT[dtype], DEVICES[arch])
        assert isinstance(found, Refusal)
        assert found.kernel == name
        return found.reason

    unlike = "needs a kernel that is a multiple of a stride, without dilation"
    for problem in (case((1, 8, 9), 8, 3, 2), case((1, 8, 9), 8, 4, 2, dilation=2), case((1, 8, 9), 8, 4)):
        assert reason(problem) == unlike
    assert reason(ALIKE["speech"], "float64") == "copies hold no float64"
    assert reason(case((0, 8, 9), 8, 4, 2)) == "nothing to copy"
    assert "needs compute capability 9.0" in reason(ALIKE["speech"], arch=80)
    assert f"more than {MAX_WORKSPACE_BYTES}" in reason(case((16, 8, 4096, 256), 4, 4, 4))


# A problem that general kernels would run, of a large stride, and one that others run as fast.
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize(
    ("problem", "is_chosen"),
    [
        (case((8, 1026, 500), 1, 1024, 256), True),
        (case((64, 768, 14, 14), 3, 16, 16), True),
        (case((32, 256, 8, 8, 8), 128, 4, 2, padding=1), False),
        (case((2, 64, 64, 64, 64), 32, 2, 2), False),
    ],
)
def test_what_is_planned(problem: Problem, is_chosen: bool, dtype: str, last: bool) -> None:
    geometry = geometry_of(problem)
    for make in (make_correlate_plan, make_weight_gradient_plan):
        plan = make(geometry, dtype, layout_of(geometry, last), DEFAULT[dtype], DEVICES[90])
        assert ("PHASES_W" in dict(plan.defines)) == is_chosen


@pytest.mark.parametrize("planned", [plan_correlate_of_phases, plan_weight_gradient_of_phases])
def test_the_copy_is_behind_all_else(planned: Planner) -> None:
    geometry = geometry_of(case((4, 48, 515), 2, 16, 8, padding=3))
    plan = planned(geometry, "float32", layout_of(geometry), "tf32", DEVICES[90])
    assert isinstance(plan, Plan)
    size = 4 * geometry.n * 2 * prod(geometry.stride) * (515 + 1)
    assert plan.workspace_bytes - plan.turned[1] >= size
    assert plan.turned[1] % 16 == 0
    assert plan.turns[-1] * 256 * 4 >= size // 4 > (plan.turns[-1] - 1) * 256 * 4
    assert plan.turns[-7:-1] == (*geometry.out_extent, *geometry.pad_before)


@on_the_host
@pytest.mark.parametrize("precision", ["tf32", "tf32x3"])
def test_special_values(precision: str) -> None:
    kernel, planned = KERNELS["input"]
    device = Device(90, 2, SHARED_BYTES)
    problem = ALIKE["odd_steps"]
    _, weight, y = arrays_of(problem, "float32")
    y.flat[[0, y.size // 3, y.size // 2, -1]] = np.inf, np.nan, -np.inf, np.inf
    with gradients_on_host(kernel, device, precision, plan=lambda _, *problem: planned(*problem)):
        got = input_gradient(problem, weight, y)
    with np.errstate(invalid="ignore"):
        expected = direct_input(problem, y, weight)
    for test in (np.isnan, np.isposinf, np.isneginf):
        assert np.array_equal(test(got), test(expected)), test.__name__
