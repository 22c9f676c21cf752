"""A single position: what is planned in its place has the same sums, in the same memory."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from described import DEFAULT, DEVICES, geometry_of, layout_of
from gradients import gradient_of
from strategies import DTYPES, OUT_LAYOUTS, Problem, case, place

from cuconvt import cpu
from cuconvt.backends import in_3d
from cuconvt.plan import Layout
from cuconvt.plan_single import without_steps, without_taps

SINGLE = {
    "volume": case((3, 6, 1, 1, 1), 4, (2, 3, 4)),
    "grouped": case((2, 6, 1, 1, 1), 9, 4, stride=(1, 2, 5), groups=3, weight_layout="channels_last"),
    "image": case((5, 7, 1, 1), 3, (4, 3), has_bias=True),
    "row": case((2, 3, 1), 5, 6, stride=3),
}


def view(array: Any, first: int, extents: tuple[int, ...], strides: tuple[int, ...]) -> Any:
    """See the memory from an element of a float64 array on with other extents and strides, in elements."""
    return np.lib.stride_tricks.as_strided(array[first:], extents, [8 * stride for stride in strides])


@pytest.mark.parametrize("out_layout", OUT_LAYOUTS)
@pytest.mark.parametrize("name", SINGLE)
def test_it_is_the_same_problem(name: str, out_layout: str) -> None:
    problem = SINGLE[name]
    x, values, bias = problem.arrays(DTYPES["float64"])
    weight, weight_buffer = place(values, problem.rank, problem.weight_layout)
    out, out_buffer = place(np.full(problem.out_shape, np.nan), problem.rank, out_layout)
    x3, weight3, out3 = (in_3d(array, problem.rank) for array in (x, weight, out))
    expected = np.empty(out3.shape)
    cpu.conv_transpose(x3, weight3, bias, geometry_of(problem), expected)

    geometry, layout = without_steps(geometry_of(problem), Layout.of(x3, weight3, bias, out3))
    assert geometry.stride == geometry.kernel
    memory = [buffer.view(np.float64) for buffer in (weight_buffer, out_buffer)]
    first_weight, first_out = (
        (array.__array_interface__["data"][0] - buffer.ctypes.data) // 8
        for array, buffer in zip((weight, out), memory, strict=True)
    )
    seen = view(memory[0], first_weight, (geometry.c_in, geometry.c_out_per_group, *geometry.kernel), layout.weight)
    written = view(memory[1], first_out, (geometry.n, geometry.c_out, *geometry.out_extent), layout.out)
    cpu.conv_transpose(x3, seen, bias, geometry, written)
    np.testing.assert_allclose(out3, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("name", SINGLE)
def test_taps_are_channels_of_the_same_weights(name: str, last: bool) -> None:
    """Or, where channels of y are neighbours, planes along D are rows."""
    problem = dataclasses.replace(SINGLE[name], has_bias=False, weight_layout="contiguous")
    x, _, _ = problem.arrays(DTYPES["float64"])
    y = memory = gradient_of(problem, DTYPES["float64"])
    if last:
        memory = np.ascontiguousarray(np.moveaxis(y, 1, -1))
        y = np.moveaxis(memory, -1, 1)
    out, got = np.full((2, *problem.weight_shape), np.nan)
    x3, y3, out3, got3 = (in_3d(array, problem.rank) for array in (x, y, out, got))
    cpu.weight_gradient(x3, y3, geometry_of(problem), out3)

    geometry, layout = without_taps(geometry_of(problem), Layout.of(x3, got3, None, y3))
    assert geometry.kernel == geometry.out_extent
    assert (geometry.kernel == (1, 1, 1)) != last
    assert geometry.kernel[0] == 1
    read = view(memory.ravel(), 0, (geometry.n, geometry.c_out, *geometry.out_extent), layout.out)
    written = view(got.ravel(), 0, (geometry.c_in, geometry.c_out_per_group, *geometry.kernel), layout.weight)
    cpu.weight_gradient(x3, read, geometry, written)
    np.testing.assert_allclose(got, out, rtol=1e-12, atol=1e-12)


def test_taps_are_channels_only_where_nothing_lies_between() -> None:
    geometry = geometry_of(SINGLE["volume"])
    layout = layout_of(geometry)
    assert without_taps(geometry, layout)[0].c_out == 4 * 24
    for side, strides in (
        ("out", (200, 48, 13, 4, 1)),
        ("out", (96, 24, 12, 5, 1)),
        ("weight", (96, 1, 52, 16, 4)),
        ("weight", (96, 24, -12, 4, 1)),
    ):
        other = dataclasses.replace(layout, **{side: strides})
        assert without_taps(geometry, other) == (geometry, other)
    for side, strides in (("out", (96, 1, 48, 16, 4)), ("out", (200, 48, 12, 4, 1)), ("weight", (96, 1, 48, 16, 4))):
        found, rows = without_taps(geometry, dataclasses.replace(layout, **{side: strides}))
        assert (found.rank, found.kernel, found.c_out) == (2, (1, 6, 4), 4)
        assert getattr(rows, side) == (*strides[:2], 0, *strides[3:])
    # A row that is read backwards, or elements that are apart, are channels a negative step or some apart.
    for side, strides, step in (("out", (96, -24, -12, -4, -1), -1), ("weight", (192, 48, 24, 8, 2), 2)):
        found = without_taps(geometry, dataclasses.replace(layout, **{side: strides}))[1]
        assert getattr(found, side) == (strides[0], step, 0, 0, 0)


def test_planes_that_follow_each_other_are_rows() -> None:
    geometry = geometry_of(SINGLE["volume"])
    layout = layout_of(geometry)
    found, rows = without_steps(geometry, layout)
    assert (found.rank, found.kernel, found.out_extent) == (2, (1, 6, 4), (1, 6, 4))
    cropped = dataclasses.replace(layout, out=(*layout.out[:2], 24, *layout.out[3:]))
    found, rows = without_steps(geometry, cropped)
    assert (found.rank, found.kernel, found.stride) == (3, (2, 3, 4), (2, 3, 4))
    assert rows == cropped


@pytest.mark.parametrize(
    "problem",
    [
        case((2, 4, 1, 2), 6, 3),
        case((2, 4, 1, 1), 6, 3, padding=((1, 0), (0, 0))),
        case((2, 4, 1, 1), 6, 3, padding=((0, 0), (0, 1))),
        case((2, 4, 1), 6, 3, stride=2, output_padding=1),
        case((2, 4, 1), 6, 3, dilation=2),
    ],
)
def test_others_are_left_alone(problem: Problem) -> None:
    geometry = geometry_of(problem)
    layout = layout_of(geometry)
    assert without_steps(geometry, layout) == without_taps(geometry, layout) == (geometry, layout)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_stride_of_a_single_position_does_not_matter(dtype: str) -> None:
    cuda = pytest.importorskip("cuconvt.cuda", reason="CuPy is not installed")
    plans = []
    for stride in (1, 2, 4):
        geometry = geometry_of(case((8, 64, 1, 1, 1), 96, 4, stride))
        layout = layout_of(geometry)
        plans.append(cuda.choose_plan(geometry, dtype, layout, DEFAULT[dtype], DEVICES[90]))
    assert plans[0] == plans[1] == plans[2]
