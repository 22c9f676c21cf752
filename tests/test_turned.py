"""Correlations with a stride of 1 by the kernels of transposed convolutions: the same sums, and the same memory."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from described import DEFAULT, DEVICES, geometry_of, layout_of
from fixed_cases import FIXED
from gradients import check, gradient_of
from host.build import kernel_sources, why_not
from host_gradients import gradients_on_host
from hypothesis import given, settings
from strategies import DTYPES, Problem, case, place, problems
from test_host_faults import VALUES, plant

from cuconvt import cpu
from cuconvt.backends import in_3d
from cuconvt.geometry import make_geometry, normalise
from cuconvt.plan import Layout, make_plan, weight_strides
from cuconvt.plan_turned import turned

on_host = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))


def with_stride_1(problem: Problem) -> Problem:
    """Return the problem with a stride of 1, and no more padding than the taps reach."""
    spans = [d * (k - 1) for d, k in zip(problem.dilation, problem.kernel, strict=True)]
    padding = tuple(
        (min(before, span), min(after, span)) for (before, after), span in zip(problem.padding, spans, strict=True)
    )
    extra = tuple(min(p, d - 1) for p, d in zip(problem.output_padding, problem.dilation, strict=True))
    # With so much padding on both sides, at least as many inputs as taps reach are left of the outputs.
    extent = tuple(max(i, span + 1) for i, span in zip(problem.extent, spans, strict=True))
    return dataclasses.replace(
        problem, extent=extent, stride=(1,) * problem.rank, padding=padding, output_padding=extra
    )


@settings(max_examples=max(settings().max_examples // 3, 1))
@given(problem=problems(longest=(6, 6, 6), longest_w=14, budget=0.1))
def test_it_is_the_transposed_convolution_of_the_turned_weight(problem: Problem) -> None:
    problem = with_stride_1(problem)
    geometry = geometry_of(problem)
    y = gradient_of(problem, DTYPES["float64"])
    values = problem.arrays(DTYPES["float64"])[1]
    weight, buffer = place(values, problem.rank, problem.weight_layout)
    x3, weight3, y3 = (in_3d(array, problem.rank) for array in (np.empty(problem.x_shape), weight, y))

    found = turned(geometry, Layout.of(x3, weight3, None, y3))
    assert found is not None
    adjoint, layout = found
    memory = buffer.view(np.float64)
    first = (weight.__array_interface__["data"][0] - memory.ctypes.data) // 8 + layout.weight_first
    extents = (adjoint.groups, adjoint.c_in_per_group, adjoint.c_out_per_group, *adjoint.kernel)
    strides = [8 * stride for stride in weight_strides(adjoint, layout)]
    seen = np.lib.stride_tricks.as_strided(memory[first:], extents, strides)
    assert sorted(seen.flat) == sorted(values.flat), "the turned weight has other elements"

    got, expected = np.empty_like(x3), np.empty_like(x3)
    cpu.conv_transpose(y3, seen.reshape(-1, *extents[2:]), None, adjoint, got)
    cpu.correlate(y3, weight3, None, geometry, expected)
    np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-12)


def test_the_geometry_is_that_of_a_call() -> None:
    problem = case((2, 12, 9, 10, 11), 8, (3, 2, 4), padding=((1, 2), 0, (2, 1)), groups=4, dilation=(1, 3, 2))
    geometry = geometry_of(problem)
    found = turned(geometry, layout_of(geometry))
    assert found is not None
    padding = ((1, 0), (3, 3), (4, 5))  # dilation * (kernel - 1) less the padding above
    parameters = normalise(3, 1, padding, 0, 4, problem.dilation, None)
    assert found[0] == make_geometry(3, problem.out_shape, (8, 3, *problem.kernel), None, *parameters)


@pytest.mark.parametrize(
    "problem",
    [
        case((2, 4, 9, 10), 6, 3, stride=(1, 2)),
        case((2, 4, 9, 10), 6, 3, padding=((3, 0), (0, 0))),  # one more than taps reach
        case((2, 4, 9), 6, 1, padding=1),
    ],
)
def test_a_stride_or_a_negative_padding_is_left_alone(problem: Problem) -> None:
    geometry = geometry_of(problem)
    assert turned(geometry, layout_of(geometry)) is None


def test_padding_after_that_exceeds_the_taps_is_served() -> None:
    check("input", case((2, 4, 9, 10), 6, 3, padding=((0, 3), (1, 4))), "float64")
    geometry = geometry_of(case((2, 4, 9, 10), 6, 3, padding=((0, 3), (1, 4))))
    found = turned(geometry, layout_of(geometry))
    assert found is not None
    assert found[0].pad_after == (0, -1, -2)


def test_turning_twice_gives_the_same_problem() -> None:
    geometry = geometry_of(case((2, 12, 9, 10, 11), 8, (3, 2, 4), padding=1, groups=4))
    layout = layout_of(geometry)
    adjoint = turned(geometry, layout)
    assert adjoint is not None
    again = turned(*adjoint)
    assert again is not None
    assert again[0] == geometry
    assert weight_strides(*again) == weight_strides(geometry, layout)
    assert again[1].weight_first == 0
    assert (again[1].x, again[1].out) == (layout.x, layout.out)


def test_the_turned_plan_differs_from_the_forward_s_in_strides_alone() -> None:
    """A convolution that keeps its shape is compiled once for both directions."""
    geometry = geometry_of(FIXED["kb61"])
    geometry = dataclasses.replace(geometry, pad_before=(1, 1, 1), pad_after=(1, 1, 1), out_extent=geometry.x_extent)
    layout = layout_of(geometry)
    found = turned(geometry, layout)
    assert found is not None
    for dtype, precision in DEFAULT.items():
        forward = make_plan(geometry, dtype, layout, precision, DEVICES[90])
        backward = make_plan(found[0], dtype, found[1], precision, DEVICES[90])
        assert (forward.kernel, forward.defines, forward.grid) == (backward.kernel, backward.defines, backward.grid)
        assert forward.problem != backward.problem


def test_large_weights_take_64_bits() -> None:
    geometry = geometry_of(case((1, 2, 9), 2, 3, padding=1))
    layout = dataclasses.replace(layout_of(geometry), weight=(6, 3, 0, 0, 2**30))
    found = turned(geometry, layout)
    assert found is not None
    for dtype in ("float16", "float64"):
        assert dict(make_plan(found[0], dtype, found[1], None, DEVICES[90]).defines)["INDEX64"] == 1


# ---- the kernels, executed on the host -------------------------------------------------------------------------------

GROUPED = case(
    (2, 6, 5, 7, 10), 9, (2, 3, 3), padding=((0, 1), (1, 1), (2, 0)), groups=3, weight_layout="channels_last"
)
WIDE = case((2, 18, 3, 6, 17), 12, 3, padding=1, weight_layout="negative")
DEPTHWISE = case((2, 5, 6, 7, 9), 10, (3, 2, 4), padding=((1, 0), (0, 1), (2, 2)), dilation=(1, 2, 1), groups=5)
FAMILIES: dict[str, tuple[tuple[str, str | None], tuple[Problem, ...]]] = {
    "gather": (("float64", None), (GROUPED, DEPTHWISE)),
    "few_channels": (("float32", "ieee"), (DEPTHWISE, case((2, 9, 8, 11), 3, 3, padding=1, weight_layout="strided"))),
    "phase_gemm": (("bfloat16", None), (GROUPED, WIDE)),
    "phase_wgmma": (("float16", None), (GROUPED, WIDE)),
}


@on_host
@pytest.mark.parametrize("family", FAMILIES)
def test_every_kernel_reads_the_turned_weight(family: str) -> None:
    (dtype, precision), chosen = FAMILIES[family]
    with gradients_on_host(family, DEVICES[90], precision, is_turned=True):
        for problem in chosen:
            for name in ("input", "conv"):  # without and with a bias
                check(name, problem, dtype, precision=precision)


FAULTS = {
    "gather": ("p.weight_first + b.group * p.weight_group_stride", "p.weight_first + b.group * p.weight_stride[0]"),
    "few_channels": ("(Index)p.weight_first + group", "group"),
    "phase_gemm": ("p.weight_first + group * p.weight_group_stride", "p.weight_first"),
}


@on_host
@pytest.mark.parametrize("family", FAULTS)
def test_fault_is_caught(family: str) -> None:
    (dtype, precision), (problem, *_) = FAMILIES[family]
    sources = plant(kernel_sources(f"{family}.cu"), *FAULTS[family])
    caught_by = VALUES + "|heap-buffer-overflow|belong to no argument|no element"
    with (
        gradients_on_host(family, DEVICES[90], precision, sources=sources, is_turned=True),
        pytest.raises(AssertionError, match=caught_by),
    ):
        check("input", problem, dtype, precision=precision)
