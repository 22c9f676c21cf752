"""Gradients and convolutions with arrays in GPU memory, against float64 references."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import reference
from described import DEVICES, geometry_of, layout_of, problem_of
from fixed_cases import FIXED, RAGGED, SPECIAL
from gpu_tools import delay, planned_by, to_gpu
from gradients import (
    GRADIENTS,
    OPERATIONS,
    ExpectedOf,
    check,
    direct_bias,
    direct_input,
    direct_weight,
    exact_input,
    exact_weight,
    gradient_of,
)
from harness import is_channels_last, to_numpy
from hypothesis import given, seed, settings
from strategies import DTYPES, LAST, LAYOUTS, OUT_LAYOUTS, Problem, case, place, problems
from test_gpu import FOR_TENSOR_CORES, LONGEST, PRECISIONS, needs_memory, specialisation

import cuconvt
from cuconvt.plan import Plan

pytestmark = pytest.mark.gpu

PROBLEM = case((2, 4, 5, 6, 7), 6, 3, stride=2, padding=1, output_padding=1, groups=2)
WORKSPACE = 256 * 2**20  # bytes that a gradient may take besides its result


@pytest.fixture
def cupy() -> Any:
    import cupy

    return cupy


@pytest.fixture
def torch() -> Any:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("this PyTorch has no CUDA")
    return torch


def of_rank(problem: Problem, name: str) -> Any:
    return getattr(cuconvt.grad, f"conv_transpose{problem.rank}d_{name}")


def input_gradient(problem: Problem, weight: Any, y: Any, **keywords: Any) -> Any:
    return of_rank(problem, "input")(problem.x_shape, weight, y, **problem.parameters, **keywords)


def weight_gradient(problem: Problem, x: Any, y: Any, **keywords: Any) -> Any:
    return of_rank(problem, "weight")(x, problem.weight_shape, y, **problem.parameters, **keywords)


def gradients(problem: Problem, x: Any, weight: Any, y: Any) -> list[Callable[[], Any]]:
    """The gradients with respect to x, weight and bias, each to be called."""
    return [
        lambda: input_gradient(problem, weight, y),
        lambda: weight_gradient(problem, x, y),
        lambda: of_rank(problem, "bias")(y),
    ]


def arrays_of(problem: Problem, dtype: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    x, weight, _ = problem.arrays(DTYPES[dtype])
    return x, weight, gradient_of(problem, DTYPES[dtype])


def expected_of(problem: Problem, x: np.ndarray, weight: np.ndarray, y: np.ndarray) -> dict[str, ExpectedOf]:
    return {
        "input": ExpectedOf(problem, exact_input, direct_input, y, weight),
        "weight": ExpectedOf(problem, exact_weight, direct_weight, x, y),
    }


@pytest.mark.parametrize("index", range(48))
def test_any_problem(cupy: Any, index: int) -> None:
    spec, dtype, precision = specialisation(index)
    longest = LONGEST[len(spec.kernel)]

    @seed(index)
    @settings(max_examples=max(settings().max_examples // 40, 2), derandomize=False, database=None)
    @given(problem=problems(spec, longest, longest_w=longest[0] + 28, budget=5))
    def every_problem(problem: Problem) -> None:
        for name in GRADIENTS:
            check(name, problem, dtype, cupy, precision)

    every_problem()


@pytest.mark.parametrize("index", range(len(FIXED)), ids=list(FIXED))
def test_fixed_case(cupy: Any, index: int) -> None:
    problem = list(FIXED.values())[index]
    for name in OPERATIONS:
        check(name, problem, "float32", cupy)
        check(name, problem, ("float16", "bfloat16", "float64")[index % 3], cupy)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("fixed", ["kb70", "kb72", "kb73", "kb77", "depthwise", "unet_k2s2"])
def test_precision(cupy: Any, fixed: str, precision: str | None) -> None:
    for name in OPERATIONS:
        check(name, FIXED[fixed], "float32", cupy, precision)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(cupy: Any, layout: str, dtype: str) -> None:
    own = layout if layout in OUT_LAYOUTS else "contiguous"
    for changes in (
        {"x_layout": layout},
        {"out_layout": own},
        {"x_layout": layout, "out_layout": own, "weight_layout": own},
    ):
        for name in GRADIENTS:
            check(name, dataclasses.replace(FIXED["kb73"], **changes), dtype, cupy)


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_several_tiles_on_every_axis(cupy: Any, dtype: str, layout: str) -> None:
    problem = case((2, 33, 19, 21, 37), 35, 3, stride=2, padding=1, has_bias=True, x_layout=layout, out_layout=layout)
    for name in ("input", "weight", "conv"):
        check(name, problem, dtype, cupy)


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_few_channels_and_many_positions(cupy: Any, dtype: str, layout: str) -> None:
    layouts = {"x_layout": layout, "out_layout": layout}
    for problem in (
        case((3, 5, 17, 45, 67), 3, 3, stride=2, padding=1, **layouts),
        case((3, 6, 17, 45, 67), 6, (3, 2, 4), stride=(1, 2, 2), groups=6, **layouts),
        case((5, 3, 131, 135), 1, 5, stride=3, dilation=2, padding=2, **layouts),
        case((7, 2, 5003), 4, 9, stride=4, padding=3, groups=2, **layouts),
    ):
        for name in GRADIENTS:
            check(name, problem, dtype, cupy)


@pytest.mark.parametrize(
    ("dtype", "precision"), [("float16", None), ("bfloat16", None), ("float32", "tf32"), ("float32", "tf32x3")]
)
def test_narrow_groups(cupy: Any, dtype: str, precision: str | None) -> None:
    for problem in (
        case((3, 24, 11, 45, 67), 24, 3, stride=2, padding=1, groups=3, has_bias=True),
        case((2, 32, 7, 21, 72), 32, 4, stride=2, padding=1, groups=4, x_layout="channels_last"),
        case((2, 20, 9, 24, 40), 24, (3, 5, 7), stride=2, padding=(1, 2, 3), output_padding=1, groups=4),
        case((2, 8, 7, 12, 19), 32, (2, 3, 3), stride=(2, 1, 3), dilation=(1, 2, 1), groups=2),
        case((5, 40, 45, 67), 16, (3, 5), stride=(2, 3), padding=(1, 2), groups=2, x_layout="strided"),
        case((3, 16, 1003), 16, 5, stride=3, padding=2, groups=2, has_bias=True),
    ):
        for name in ("input", "conv"):
            check(name, problem, dtype, cupy, precision)


# Of few channels a group: rows of odd and even lengths, with gaps, in several boxes along every axis.
NARROW = {
    "odd": case((2, 16, 9, 33, 70), 16, 3, stride=2, padding=1, groups=2),
    "even": case((2, 16, 9, 33, 64), 16, 3, stride=2, padding=1, output_padding=1, groups=2),
    "long": case((2, 24, 5, 12, 24), 24, (3, 5, 7), stride=2, padding=(1, 2, 3), output_padding=1, groups=3),
    "once": case((2, 13, 40, 131), 9, 3, padding=1),
    "one_axis": case((3, 16, 5003), 20, 16, stride=8, padding=4, groups=2),
    "gaps": case((2, 6, 9, 21, 37), 10, (2, 3, 4), (1, 2, 3), x_layout="cropped", out_layout="misaligned", groups=2),
}


@pytest.mark.parametrize(
    ("dtype", "precision"), [("float16", None), ("bfloat16", None), ("float32", "tf32"), ("float32", None)]
)
@pytest.mark.parametrize("name", NARROW)
def test_rows_of_few_channels(cupy: Any, name: str, dtype: str, precision: str | None) -> None:
    from cuconvt import cuda_gradients
    from cuconvt.plan_weight_gradient_narrow import plan_weight_gradient_narrow

    memo = cuda_gradients._prepare_weight_gradient
    with planned_by(plan_weight_gradient_narrow, cuda_gradients, "make_weight_gradient_plan", memo):
        check("weight", NARROW[name], dtype, cupy, precision)


# Strided correlations of rows that are aligned to 16, 8 and 4 bytes or to none, in several boxes along every axis.
ROWS = {
    "twice": case((2, 64, 9, 20, 64), 32, 2, stride=2, has_bias=True),
    "twice_2": case((2, 40, 7, 20, 66), 24, 2, stride=2),
    "twice_1": case((2, 40, 7, 20, 67), 24, 2, stride=2, x_layout="channels_last"),
    "overlapping": case((2, 64, 11, 21, 40), 32, 3, stride=2, padding=1, output_padding=1),
    "odd": case((2, 40, 9, 21, 39), 33, 3, stride=2, padding=1),
    "flat": case((2, 35, 45, 72), 40, (3, 4), stride=(1, 2), padding=(1, 1), has_bias=True, groups=1),
    "grouped": case((3, 64, 33, 48), 96, 5, stride=2, padding=2, output_padding=1, groups=2),
    "by_four": case((3, 24, 33, 72), 48, 4, stride=4),
    "apart": case((2, 32, 5, 17, 64), 64, 3, stride=2, padding=1, dilation=2),
    "one_axis": case((3, 128, 2051), 48, 4, stride=2, padding=1),
    "gaps": case((2, 24, 9, 21, 36), 16, (2, 3, 4), (1, 2, 2), x_layout="cropped", out_layout="misaligned", groups=2),
}


@FOR_TENSOR_CORES
@pytest.mark.parametrize("family", ["correlate_wgmma", "correlate_gemm"])
@pytest.mark.parametrize("name", [name for name, (problem, _) in RAGGED.items() if max(problem.stride) > 1])
def test_copies_of_every_width(cupy: Any, name: str, family: str, dtype: str, precision: str | None) -> None:
    from cuconvt import cuda_gradients
    from cuconvt.plan_correlate_gemm import plan_correlate_gemm
    from cuconvt.plan_correlate_wgmma import plan_correlate_wgmma

    planner = plan_correlate_gemm if family == "correlate_gemm" else plan_correlate_wgmma
    with planned_by(planner, cuda_gradients, "make_correlate_plan", cuda_gradients._prepare_correlate):
        check("input", RAGGED[name][0], dtype, cupy, precision)


@FOR_TENSOR_CORES
@pytest.mark.parametrize("name", RAGGED)
def test_copies_of_every_width_for_the_weight(cupy: Any, name: str, dtype: str, precision: str | None) -> None:
    from cuconvt import cuda_gradients
    from cuconvt.plan_weight_gradient_gemm import plan_weight_gradient_gemm

    memo = cuda_gradients._prepare_weight_gradient
    with planned_by(plan_weight_gradient_gemm, cuda_gradients, "make_weight_gradient_plan", memo):
        check("weight", RAGGED[name][0], dtype, cupy, precision)


@pytest.fixture
def by_rows() -> Iterator[None]:
    from cuconvt import cuda_gradients
    from cuconvt.plan_correlate_rows import plan_correlate_rows

    with planned_by(plan_correlate_rows, cuda_gradients, "make_correlate_plan", cuda_gradients._prepare_correlate):
        yield


@pytest.mark.parametrize(
    ("dtype", "precision"), [("float16", None), ("bfloat16", None), ("float32", "tf32"), ("float32", None)]
)
@pytest.mark.parametrize("name", ROWS)
def test_strided_rows(cupy: Any, by_rows: None, name: str, dtype: str, precision: str | None) -> None:
    for operation in ("input", "conv"):
        check(operation, ROWS[name], dtype, cupy, precision)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_rows_far_apart(cupy: Any, by_rows: None, dtype: str) -> None:
    check("input", case((3, 64, 205), 24, 20, stride=10, padding=5, groups=1), dtype, cupy)


@pytest.mark.parametrize("precision", ["tf32", "tf32x3"])
@pytest.mark.parametrize("name", ["overlapping", "apart", "flat"])
def test_special_values_of_strided_rows(cupy: Any, by_rows: None, name: str, precision: str) -> None:
    special_values_land_where_the_definition_puts_them(ROWS[name], precision)


# Rows of whole 16 bytes, which bulk tensor copies bring whether y fills them or not.
BOXED_ROWS = {
    "volume": case((2, 64, 9, 20, 64), 32, 2, stride=2, has_bias=True),
    "overlapping": case((2, 72, 11, 21, 40), 40, 3, stride=2, padding=1, output_padding=1),
    "ragged": case((2, 35, 9, 21, 39), 33, 3, stride=2, padding=1, out_layout="cropped"),
    "grouped": case((3, 72, 33, 45), 96, 5, stride=2, padding=2, groups=3, out_layout="cropped"),
    "by_four": case((3, 24, 33, 72), 48, 4, stride=4),
    "by_eight": case((2, 40, 515), 24, 10, stride=8, padding=4, out_layout="cropped"),
    "apart": case((2, 32, 5, 17, 64), 64, 3, stride=2, padding=1, dilation=2, out_layout="cropped"),
    "unequal": case((2, 40, 11, 13, 36), 24, (3, 5, 4), (2, 3, 2), (1, 2, 1), dilation=(1, 2, 1), out_layout="cropped"),
    "one_axis": case((3, 128, 2051), 48, 4, stride=2, padding=1, out_layout="cropped"),
    "small": case((2, 320, 4, 4, 4), 96, 2, stride=2),
    "few": case((2, 24, 19, 53), 5, 4, stride=2, padding=1, out_layout="cropped"),
}


@contextmanager
def any_tile_of_boxes(all_rows: bool, swizzled: bool) -> Iterator[None]:
    """Take any tile whose boxes have the rows of one class of taps along H, or of all."""
    from cuconvt import cuda_gradients
    from cuconvt import plan_correlate_rows as rows

    def plan_any(geometry: Any, dtype: str, layout: Any, precision: str | None, device: Any) -> Plan:
        work = rows.Work(*rows.as_read(geometry, layout), dtype, precision)
        assert work.can_swizzle or not swizzled
        whole_h = all_rows and work.live[1] > 1 and not work.join_h
        tiles = [tile for tile in rows.tiles(work, swizzled) if tile.whole_h == whole_h]
        random.Random(str(geometry)).shuffle(tiles)
        plans = (rows.plan_tile(geometry, dtype, layout, precision, device, tile) for tile in tiles)
        plan = next(plan for plan in plans if isinstance(plan, Plan))
        assert plan.maps
        assert plan.maps[0].swizzled_bytes == (128 if swizzled else 0)
        return plan

    with planned_by(plan_any, cuda_gradients, "make_correlate_plan", cuda_gradients._prepare_correlate):
        yield


@pytest.fixture(params=[False, True], ids=["rows_of_a_class", "all_rows"])
def by_boxes(request: Any) -> Iterator[None]:
    with any_tile_of_boxes(request.param, swizzled=False):
        yield


@pytest.mark.parametrize(
    ("dtype", "precision"), [("float16", None), ("bfloat16", None), ("float32", "tf32"), ("float32", "tf32x3")]
)
@pytest.mark.parametrize("name", BOXED_ROWS)
def test_strided_rows_that_copies_bring(
    cupy: Any, by_boxes: None, name: str, dtype: str, precision: str | None
) -> None:
    for operation in ("input", "conv"):
        check(operation, BOXED_ROWS[name], dtype, cupy, precision)


# Rows without a halo, in boxes of 128 bytes along W.
SWIZZLED_ROWS = {
    "volume": BOXED_ROWS["volume"],
    "by_four": BOXED_ROWS["by_four"],
    "narrow": case((2, 48, 9, 7, 12), 40, 2, stride=2),
    "ragged": case((2, 35, 9, 21, 69), 33, (3, 3, 2), stride=2, padding=(1, 1, 0), out_layout="cropped"),
    "grouped": case((3, 96, 33, 72), 96, (5, 2), stride=2, padding=(2, 0), groups=3),
    "one_axis": case((2, 40, 515), 24, 3, stride=4, out_layout="cropped"),
}


@pytest.fixture(params=[False, True], ids=["rows_of_a_class", "all_rows"])
def by_swizzled(request: Any) -> Iterator[None]:
    with any_tile_of_boxes(request.param, swizzled=True):
        yield


@pytest.mark.parametrize(
    ("dtype", "precision"), [("float16", None), ("bfloat16", None), ("float32", "tf32"), ("float32", "tf32x3")]
)
@pytest.mark.parametrize("name", SWIZZLED_ROWS)
def test_swizzled_rows_that_copies_bring(
    cupy: Any, by_swizzled: None, name: str, dtype: str, precision: str | None
) -> None:
    for operation in ("input", "conv"):
        check(operation, SWIZZLED_ROWS[name], dtype, cupy, precision)


@pytest.mark.parametrize("precision", ["tf32", "tf32x3"])
def test_special_values_of_swizzled_rows(cupy: Any, by_swizzled: None, precision: str) -> None:
    special_values_land_where_the_definition_puts_them(SWIZZLED_ROWS["volume"], precision)


# Rows of taps along H that are whole 16 bytes together.
JOINED_ROWS = [
    (case((3, 64, 14, 14), 48, 2, stride=2), "float16", None),
    (case((2, 48, 6, 7, 6), 35, 2, stride=2, has_bias=True), "bfloat16", None),
    (case((5, 24, 19, 7), 40, 4, stride=4), "bfloat16", None),
    (case((2, 64, 9, 33, 62), 32, (3, 2, 2), stride=2), "float16", None),
    (case((2, 40, 5, 6, 5), 33, (3, 2, 2), stride=2), "float32", "tf32"),
    (case((2, 64, 5, 33, 21), 64, 2, stride=2, groups=2), "float32", "tf32"),
    (case((2, 40, 5, 6, 5), 33, (3, 2, 2), stride=2), "float32", "tf32x3"),
]


@pytest.mark.parametrize(("problem", "dtype", "precision"), JOINED_ROWS)
def test_joined_rows_that_copies_bring(
    cupy: Any, by_boxes: None, problem: Problem, dtype: str, precision: str | None
) -> None:
    for operation in ("input", "conv"):
        check(operation, problem, dtype, cupy, precision)


@pytest.mark.parametrize("precision", ["tf32", "tf32x3"])
def test_special_values_of_joined_rows_that_copies_bring(cupy: Any, by_boxes: None, precision: str) -> None:
    special_values_land_where_the_definition_puts_them(JOINED_ROWS[-1][0], precision)


@pytest.mark.parametrize("precision", ["tf32", "tf32x3"])
@pytest.mark.parametrize("name", ["overlapping", "volume", "by_four"])
def test_special_values_of_rows_that_copies_bring(cupy: Any, by_boxes: None, name: str, precision: str) -> None:
    special_values_land_where_the_definition_puts_them(BOXED_ROWS[name], precision)


# The same where copies bring y once it is turned, and y whose rows are anywhere.
TURNED = {
    **{name: ROWS[name] for name in ROWS if ROWS[name].groups == 1},
    "backwards": case((2, 24, 5, 9, 12), 20, 3, stride=2, padding=1, out_layout="negative"),
    "misaligned": case((3, 64, 17, 20), 64, 4, stride=2, padding=1, out_layout="misaligned"),
    "cropped": case((2, 40, 99), 35, 6, stride=4, padding=1, x_layout="channels_last", out_layout="cropped"),
    "by_five_and_eight": case((2, 21, 13, 15), 21, (10, 16), stride=(5, 8), padding=4, has_bias=True),
    "last": case((2, 21, 13, 15), 21, 10, stride=5, padding=2, out_layout="channels_last"),
    "common_steps": case((2, 40, 9, 12, 20), 24, 3, stride=2, padding=1, dilation=2),
    "some_common_steps": case((3, 33, 15, 37), 35, (3, 4), stride=(1, 6), padding=(0, 2), dilation=(2, 4)),
}


@pytest.fixture
def by_turning() -> Iterator[None]:
    """Turn y before, whatever the estimates say."""
    from cuconvt import cuda_gradients
    from cuconvt.plan_correlate_turning import plan_correlate_turning

    with planned_by(plan_correlate_turning, cuda_gradients, "make_correlate_plan", cuda_gradients._prepare_correlate):
        yield


@pytest.mark.parametrize(
    ("dtype", "precision"), [("float16", None), ("bfloat16", None), ("float32", "tf32"), ("float32", "tf32x3")]
)
@pytest.mark.parametrize("name", TURNED)
def test_rows_turned_before(cupy: Any, by_turning: None, name: str, dtype: str, precision: str | None) -> None:
    for operation in ("input", "conv"):
        check(operation, TURNED[name], dtype, cupy, precision)


# Without a stride, where the planner turns y, too: rows in bulk, whatever their alignment, and small planes.
UNSTRIDED = {
    "image": case((3, 136, 33, 47), 136, 3, padding=1, has_bias=True),
    "volume": case((2, 72, 9, 17, 30), 72, 3, padding=1),
    "row": case((4, 64, 4097), 64, 7, padding=3, has_bias=True),
    "dilated": case((2, 96, 31, 29), 133, 3, dilation=2),
    "small": case((2, 320, 8, 8, 8), 320, 3, padding=1),
    "planes": case((9, 264, 5, 7), 72, 3, padding=1),
    "misaligned": case((2, 64, 19, 45), 48, 3, padding=1, out_layout="misaligned"),
    "backwards": case((2, 64, 5, 19, 45), 48, 3, padding=1, x_layout="channels_last", out_layout="negative"),
}


@pytest.mark.parametrize(("dtype", "precision"), [("float16", None), ("bfloat16", None), ("float32", "tf32")])
@pytest.mark.parametrize("name", UNSTRIDED)
def test_rows_turned_before_without_a_stride(cupy: Any, name: str, dtype: str, precision: str | None) -> None:
    from cuconvt.cuda_gradients import choose_correlate_plan

    geometry = geometry_of(UNSTRIDED[name])
    assert choose_correlate_plan(geometry, dtype, layout_of(geometry), precision, DEVICES[90]).turns
    for operation in ("input", "conv"):
        check(operation, UNSTRIDED[name], dtype, cupy, precision)


@pytest.mark.parametrize(("dtype", "precision"), [("bfloat16", None), ("float32", "tf32")])
def test_tiles_for_a_size_without_a_stride(cupy: Any, dtype: str, precision: str | None) -> None:
    from cuconvt.cuda_gradients import choose_correlate_plan

    problem = dataclasses.replace(UNSTRIDED["small"], x_layout="channels_last", out_layout="channels_last")
    larger = dataclasses.replace(problem, extent=(48, 48, 48))
    tiles = [
        choose_correlate_plan(geometry, dtype, layout_of(geometry, True), precision, DEVICES[90]).tile
        for geometry in map(geometry_of, (problem, larger))
    ]
    assert tiles[0] != tiles[1]
    for operation in ("input", "conv"):
        check(operation, problem, dtype, cupy, precision)


# Phases of y that are channels of a copy of it.
ALIKE = {
    "spectrum": case((2, 70, 90), 1, 64, 16),
    "speech": case((3, 48, 515), 2, 16, 8, padding=4, output_padding=3, has_bias=True),
    "patches": case((3, 33, 7, 9), 3, (4, 16), (4, 16), weight_layout="strided"),
    "image": case((3, 64, 19, 33), 3, 4, 2, padding=1, out_layout="cropped"),
    "odd_steps": case((2, 24, 11, 20), 5, (6, 9), (2, 3), padding=((1, 0), (2, 4)), output_padding=(1, 2)),
    "volume": case((2, 32, 9, 11, 17), 4, 4, 2, padding=1),
    "grouped": case((2, 48, 5, 9, 12), 24, (2, 4, 2), (1, 4, 2), groups=3, out_layout="misaligned"),
    "large_steps": case((4, 21, 9, 8), 3, 32, 16, x_layout="channels_last", out_layout="channels_last"),
}


@pytest.fixture
def by_phases() -> Iterator[None]:
    """Copy y with its phases as channels, whatever the estimates say."""
    from cuconvt import cuda_gradients
    from cuconvt.plan_phases import plan_correlate_of_phases, plan_weight_gradient_of_phases

    memos = cuda_gradients._prepare_correlate, cuda_gradients._prepare_weight_gradient
    with (
        planned_by(plan_correlate_of_phases, cuda_gradients, "make_correlate_plan", *memos),
        planned_by(plan_weight_gradient_of_phases, cuda_gradients, "make_weight_gradient_plan", *memos),
    ):
        yield


@pytest.mark.parametrize(
    ("dtype", "precision"), [("float16", None), ("bfloat16", None), ("float32", "tf32"), ("float32", None)]
)
@pytest.mark.parametrize("name", ALIKE)
def test_phases_as_channels(cupy: Any, by_phases: None, name: str, dtype: str, precision: str | None) -> None:
    for operation in ("input", "conv", "weight"):
        check(operation, ALIKE[name], dtype, cupy, precision, calls=2)


# Channels-last y that bulk tensor copies bring, in rows of 32 to 128 bytes.
BOXED = {
    "upsampling": case((2, 64, 9, 17, 24), 32, 3, stride=2, padding=1, output_padding=1, has_bias=True, **LAST),
    "wide": case((3, 136, 16, 33), 136, 4, stride=2, padding=1, **LAST),
    "narrow": case((2, 24, 5, 19, 21), 16, 2, stride=2, **LAST),
    "odd": case((2, 17, 7, 9, 21), 40, (3, 2, 5), stride=(1, 2, 3), padding=1, dilation=(2, 1, 1), **LAST),
    "one_axis": case((4, 96, 131), 48, 16, stride=8, padding=4, **LAST),
    "dilated": case((2, 32, 6, 11, 13), 64, 3, stride=2, padding=1, dilation=2, **LAST),
    "grouped": case((2, 72, 17, 21), 192, 3, stride=2, groups=3, **LAST),
    "rows_of_x": case((2, 40, 17, 40), 24, 3, stride=2, padding=1, out_layout="channels_last"),
    # Kernel = stride along W, whose taps are channels of y.
    "folded": case((2, 64, 9, 20, 25), 32, 2, stride=2, has_bias=True, **LAST),
    "folded_by_four": case((4, 48, 515), 16, 4, stride=4, padding=4, **LAST),
    "folded_along_w": case((3, 40, 18, 37), 16, (3, 2), stride=(1, 2), out_layout="channels_last"),
    # Taps with boxes of their own.
    "apart": case((2, 40, 6, 11, 13), 64, 3, stride=2, padding=2, dilation=3, **LAST),
    "apart_rows_of_x": case((3, 72, 17, 40), 48, (3, 4), stride=(3, 2), dilation=(2, 5), out_layout="channels_last"),
    # Groups that are brought as one row.
    "joined": case((2, 128, 7, 17, 24), 128, 3, stride=2, padding=1, groups=8, has_bias=True, **LAST),
    "joined_rows_of_x": case((2, 96, 33, 40), 64, (3, 4), stride=2, padding=1, groups=4, out_layout="channels_last"),
}


@pytest.fixture
def boxed(request: pytest.FixtureRequest) -> Iterator[None]:
    """Plan correlations with one of the tiles for which bulk tensor copies bring y, drawn by a number."""
    from cuconvt import cuda_gradients
    from cuconvt import plan_correlate_wgmma as wgmma

    def plan(geometry: Any, dtype: str, layout: Any, precision: str | None, device: Any) -> Any:
        choose = random.Random(request.param)
        plain, *others = wgmma.works_of(geometry, layout, dtype, precision)
        tiles = [tile for tile in wgmma.tiles(choose.choice(others or [plain])) if tile.boxed]
        for tile in choose.sample(tiles, len(tiles)):
            found = wgmma.plan_tile(geometry, dtype, layout, precision, device, tile)
            if isinstance(found, Plan):
                return found
        raise AssertionError("no tile serves")

    with planned_by(plan, cuda_gradients, "make_correlate_plan", cuda_gradients._prepare_correlate):
        yield


@pytest.mark.parametrize("boxed", range(4), indirect=True)
@pytest.mark.parametrize(("dtype", "precision"), [("float16", None), ("bfloat16", None), ("float32", "tf32")])
@pytest.mark.parametrize("name", BOXED)
def test_boxes(cupy: Any, boxed: None, name: str, dtype: str, precision: str | None) -> None:
    check("input", BOXED[name], dtype, cupy, precision, calls=2)


@pytest.mark.parametrize("boxed", range(6), indirect=True)
@pytest.mark.parametrize("name", [name for name in BOXED if not name.startswith("joined")])
def test_boxes_that_are_split(cupy: Any, boxed: None, name: str) -> None:
    check("input", BOXED[name], "float32", cupy, "tf32x3", calls=2)


@pytest.mark.parametrize("boxed", range(2), indirect=True)
@pytest.mark.parametrize("name", ["upsampling", "odd", "one_axis"])
@pytest.mark.parametrize("precision", ["tf32", "tf32x3"])
def test_special_values_of_boxes(cupy: Any, boxed: None, name: str, precision: str) -> None:
    special_values_land_where_the_definition_puts_them(BOXED[name], precision, "channels_last")


# Kernel = stride: rows that are aligned for loads and stores of several elements or not; any number of channels.
DISJOINT = {
    "upsampling": case((2, 64, 9, 20, 64), 32, 2, stride=2, has_bias=True),
    "upsampling_2d": case((3, 40, 35, 66), 24, 2, stride=2, has_bias=True, out_layout="channels_last"),
    "odd": case((2, 33, 7, 19, 21), 17, 2, stride=2),
    "by_four": case((4, 64, 515), 48, 4, stride=4, output_padding=3),
    "by_eight": case((4, 24, 260), 16, 8, stride=8, has_bias=True),
    "flat": case((2, 48, 5, 33, 40), 20, (1, 2, 2), stride=(1, 2, 2), padding=((0, 0), (1, 0), (2, 2)), has_bias=True),
    "padded": case((2, 48, 5, 33, 40), 24, 2, stride=2, padding=((1, 0), (0, 0), (8, 8))),
    "grouped": case((2, 96, 9, 21, 24), 48, 2, stride=2, groups=3),
    "wide": case((1, 256, 4, 8, 8), 64, 2, stride=2, has_bias=True),
    "gaps": case((2, 24, 9, 21, 36), 16, 2, stride=2, x_layout="cropped", out_layout="misaligned"),
    "channels_last": case((2, 40, 9, 21, 36), 20, 2, stride=2, x_layout="channels_last", out_layout="channels_last"),
}


@pytest.fixture
def by_disjoint() -> Iterator[None]:
    from cuconvt import cuda_gradients
    from cuconvt.plan_correlate_disjoint import plan_correlate_disjoint

    with planned_by(plan_correlate_disjoint, cuda_gradients, "make_correlate_plan", cuda_gradients._prepare_correlate):
        yield


@FOR_TENSOR_CORES
@pytest.mark.parametrize("name", DISJOINT)
def test_kernel_equal_to_stride(cupy: Any, by_disjoint: None, name: str, dtype: str, precision: str | None) -> None:
    for operation in ("input", "conv"):
        check(operation, DISJOINT[name], dtype, cupy, precision)


@pytest.mark.parametrize("precision", ["tf32", "tf32x3"])
@pytest.mark.parametrize("name", ["upsampling_2d", "flat", "by_eight"])
def test_special_values_of_disjoint(cupy: Any, by_disjoint: None, name: str, precision: str) -> None:
    special_values_land_where_the_definition_puts_them(DISJOINT[name], precision)


# Wide layers in 16 bits: arrays that are turned, in bulk or element by element, and read as they are; ragged channels.
WIDE = {
    "wide": case((2, 128, 8, 16, 32), 96, 3, padding=1),
    "strided": case((4, 136, 9, 20, 24), 64, 4, stride=2, padding=1),
    "odd": case((2, 33, 7, 19, 21), 41, 3, stride=2, padding=1, dilation=2),
    "one_axis": case((4, 128, 515), 72, 16, stride=8, padding=4),
    "grouped": case((3, 192, 33, 70), 96, (3, 5), padding=((0, 2), (4, 1)), groups=2),
    "disjoint": case((2, 64, 9, 20, 64), 32, 2, stride=2),
    "disjoint_last": case((2, 64, 9, 20, 25), 32, 2, stride=2, **LAST),
    "by_four_last": case((4, 136, 515), 24, 4, stride=4, padding=4, **LAST),
    "by_three": case((4, 64, 17, 40), 48, (3, 5), stride=3, dilation=(1, 2)),
    "gaps": case((2, 72, 9, 21, 36), 40, 3, x_layout="cropped", out_layout="misaligned"),
    "channels_last": case((2, 72, 9, 21, 36), 40, 3, stride=2, x_layout="channels_last", out_layout="channels_last"),
    "x_last": case((2, 128, 15, 40), 64, 4, stride=2, padding=1, x_layout="channels_last"),
    "y_last": case((2, 128, 15, 40), 64, 4, stride=2, padding=1, groups=2, out_layout="channels_last"),
    "odd_channels_last": case((2, 33, 15, 40), 65, 3, padding=1, x_layout="channels_last", out_layout="channels_last"),
    "many_taps": case((2, 64, 24, 64), 64, 11, padding=5),
    "narrow_groups": case((2, 24, 9, 40), 72, 3, padding=1, groups=3),
    "narrow_groups_last": case((3, 80, 17, 9), 48, 2, groups=2, x_layout="channels_last", out_layout="channels_last"),
}


@pytest.fixture
def by_tma() -> Iterator[None]:
    from cuconvt import cuda_gradients
    from cuconvt.plan_weight_gradient_tma import plan_weight_gradient_tma

    memo = cuda_gradients._prepare_weight_gradient
    with planned_by(plan_weight_gradient_tma, cuda_gradients, "make_weight_gradient_plan", memo):
        yield


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", WIDE)
def test_wide_weight_gradients(cupy: Any, by_tma: None, name: str, dtype: str) -> None:
    check("weight", WIDE[name], dtype, cupy)


@pytest.mark.parametrize("precision", ["tf32", "tf32x3"])
@pytest.mark.parametrize("name", WIDE)
def test_wide_weight_gradients_of_float32(cupy: Any, by_tma: None, name: str, precision: str) -> None:
    check("weight", WIDE[name], "float32", cupy, precision)


# Rows that copies of boxes bring to weight_gradient_wgmma.
BROUGHT = {
    "kernel_is_stride": case((2, 64, 12, 16, 32), 32, 2, 2),
    "half_a_run_more": case((3, 72, 5, 7, 40), 56, 2, 2),
    "three": case((2, 40, 9, 14, 48), 24, 3, 2, 1, 1),
    "image": case((3, 96, 21, 64), 72, 4, 2, 1),
    "row": case((5, 80, 1040), 48, 8, 4, 2),
    "taps_in_tiles": case((2, 64, 512), 40, 32, 8, 12),
    "groups": case((2, 96, 11, 32), 48, 3, padding=1, groups=4),
    "odd_channels": case((2, 33, 7, 12, 48), 35, 3, padding=1),
    "dilated": case((2, 24, 9, 13, 32), 40, 3, padding=2, dilation=2),
    "stride_along_h": case((2, 48, 17, 64), 40, (4, 3), (4, 1), 1),
    "wide_rows": case((2, 200, 13, 128), 72, 2, 2),
    "planes_of_24": case((2, 72, 5, 7, 24), 56, 3, 2, 1, 1),
    "planes_of_16": case((3, 40, 6, 9, 16), 24, 2, 2),
    "planes_of_8": case((5, 96, 13, 8), 72, 4, 2, 1),
}


@pytest.fixture
def by_wgmma() -> Iterator[None]:
    from cuconvt import cuda_gradients
    from cuconvt.plan_weight_gradient_wgmma import plan_weight_gradient_wgmma

    memo = cuda_gradients._prepare_weight_gradient
    with planned_by(plan_weight_gradient_wgmma, cuda_gradients, "make_weight_gradient_plan", memo):
        yield


@pytest.mark.parametrize(("dtype", "precision"), [("float16", None), ("bfloat16", None), ("float32", "tf32")])
@pytest.mark.parametrize("name", BROUGHT)
def test_rows_that_copies_bring(cupy: Any, by_wgmma: None, name: str, dtype: str, precision: str | None) -> None:
    from cuconvt.plan_weight_gradient_wgmma import plan_weight_gradient_wgmma

    geometry = geometry_of(BROUGHT[name])
    assert plan_weight_gradient_wgmma(geometry, dtype, layout_of(geometry), precision, DEVICES[90]).maps
    check("weight", BROUGHT[name], dtype, cupy, precision)


@pytest.fixture(params=[0, 1, 2])
def by_any_tile(request: Any) -> Iterator[None]:
    """Take any tile of which copies bring boxes, of each number of stages and of runs of x."""
    from cuconvt import cuda_gradients
    from cuconvt import plan_weight_gradient_wgmma as wgmma
    from cuconvt.plan_views import batch_as_depth

    def plan_any(geometry: Any, dtype: str, layout: Any, precision: str | None, device: Any) -> Plan:
        work = wgmma.Work(wgmma.Shape.of(*batch_as_depth(geometry, layout), wgmma.ITEMSIZES[dtype], index64=False))
        kinds: dict[tuple[int, int], list[Any]] = {}
        for tile in wgmma.tiles(work):
            if work.reach(tile).boxed:
                kinds.setdefault((tile.stages, tile.x_runs), []).append(tile)
        kind = sorted(kinds)[request.param % len(kinds)]
        random.Random(f"{geometry}{kind}").shuffle(kinds[kind])
        plans = (wgmma.plan_weight_gradient_wgmma(geometry, dtype, layout, precision, device, t) for t in kinds[kind])
        plan = next(plan for plan in plans if isinstance(plan, Plan))
        assert plan.maps
        return plan

    memo = cuda_gradients._prepare_weight_gradient
    with planned_by(plan_any, cuda_gradients, "make_weight_gradient_plan", memo):
        yield


@pytest.mark.parametrize(("dtype", "precision"), [("float16", None), ("bfloat16", None), ("float32", "tf32")])
@pytest.mark.parametrize("name", BROUGHT)
def test_rows_that_copies_bring_to_any_tile(
    cupy: Any, by_any_tile: None, name: str, dtype: str, precision: str | None
) -> None:
    check("weight", BROUGHT[name], dtype, cupy, precision)


# Rows of a plane that are one row, and those of the whole box.
SHORT_ROWS = {
    "four": case((33, 136, 4, 4), 72, 4, 2, 1),
    "four_last": case((33, 136, 4, 4), 72, 4, 2, 1, **LAST),
    "three": case((18, 128, 3, 3), 136, 3, 2, 1, 1),
    "twelve_last": case((2, 256, 12, 12, 12), 72, 3, 2, 1, **LAST),
    "one": case((17, 136, 1, 1), 64, 4),
    "two_last": case((33, 40, 2, 2, 2), 80, 2, 2, **LAST),
}


@pytest.mark.parametrize(("dtype", "precision"), [("bfloat16", None), ("float32", "tf32"), ("float32", "tf32x3")])
@pytest.mark.parametrize("name", SHORT_ROWS)
def test_rows_that_are_no_whole_runs(cupy: Any, by_tma: None, name: str, dtype: str, precision: str | None) -> None:
    from cuconvt.plan_weight_gradient_tma import plan_weight_gradient_tma

    geometry = geometry_of(SHORT_ROWS[name])
    plan = plan_weight_gradient_tma(geometry, dtype, layout_of(geometry, "last" in name), precision, DEVICES[90])
    is_too_large = precision == "tf32x3" and name in ("three", "twelve_last")
    assert (problem_of(plan)["box"][2] == geometry.x_extent[2]) != is_too_large
    check("weight", SHORT_ROWS[name], dtype, cupy, precision)


# Weights of one tap, as are those of a single position, whose taps are channels of y: blocks with all sums write them.
SINGLE = {
    "image": case((64, 100, 1, 1), 136, 4, 2),
    "volume": case((16, 72, 1, 1, 1), 40, (2, 4, 4)),
    "row": case((15, 64, 1), 130, 6, stride=3),
    "odd": case((9, 133, 1, 1), 37, 3),
    "pixels": case((1, 136, 2, 8), 72, 1),
    "strided": case((5, 136, 1, 1), 72, 1, weight_layout="strided"),
}


@pytest.mark.parametrize(
    ("dtype", "precision"), [("float16", None), ("bfloat16", None), ("float32", "tf32"), ("float32", "tf32x3")]
)
@pytest.mark.parametrize("name", SINGLE)
def test_weights_of_one_tap_and_one_part(cupy: Any, by_tma: None, name: str, dtype: str, precision: str | None) -> None:
    from cuconvt.plan_weight_gradient_tma import plan_weight_gradient_tma

    geometry = geometry_of(SINGLE[name])
    plan = plan_weight_gradient_tma(geometry, dtype, layout_of(geometry), precision, DEVICES[90])
    assert (dict(plan.defines)["ONE_PART"], plan.sums) == (1, 0)
    check("weight", SINGLE[name], dtype, cupy, precision)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("last", [False, True])
def test_sums_of_one_part_are_rounded_before_they_are_ordered(cupy: Any, by_tma: None, dtype: str, last: bool) -> None:
    from cuconvt.plan_weight_gradient_tma import plan_weight_gradient_tma

    layout = "channels_last" if last else "contiguous"
    problem = case((24, 264, 5, 4), 200, 4, 2, 1, x_layout=layout, out_layout=layout)
    geometry = geometry_of(problem)
    plan = plan_weight_gradient_tma(geometry, dtype, layout_of(geometry, last), None, DEVICES[90])
    assert dict(plan.defines)["ONE_PART"]
    assert plan.sums
    check("weight", problem, dtype, cupy)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(("dtype", "precision"), [("bfloat16", None), ("float32", "tf32"), ("float32", "tf32x3")])
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_images_of_several_launches(
    cupy: Any, by_tma: None, monkeypatch: pytest.MonkeyPatch, rank: int, dtype: str, precision: str | None, last: bool
) -> None:
    from cuconvt import plan_weight_gradient_tma as planner

    channels = (36, 44) if last else (33, 41)  # of 16 bits, both are turned
    layout = "channels_last" if last else "contiguous"
    extent = {1: (4105,), 2: (33, 129), 3: (9, 17, 34)}[rank]
    problem = case((12, channels[0], *extent), channels[1], 3, 2, 1, x_layout=layout, out_layout=layout)
    geometry = geometry_of(problem)
    arrays = layout_of(geometry, last)
    whole = planner.plan_weight_gradient_tma(geometry, dtype, arrays, precision, DEVICES[90])
    sums = min(place for place in whole.turned if place >= 0)
    monkeypatch.setattr(planner, "MAX_WORKSPACE_BYTES", sums + (whole.workspace_bytes - sums) // 2)
    plan = planner.plan_weight_gradient_tma(geometry, dtype, arrays, precision, DEVICES[90])
    assert plan.images[0] > 1
    check("weight", problem, dtype, cupy, precision)


# Run by the kernels of transposed convolutions, but for the last, whose padding exceeds what the taps reach.
STRIDE_1 = {
    "wide": case((2, 33, 9, 21, 37), 35, 3, padding=1, has_bias=True, weight_layout="negative"),
    "grouped": case((2, 96, 33, 70), 48, (3, 5), padding=((0, 2), (4, 1)), groups=3, has_bias=True),
    "depthwise": case((3, 6, 9, 25, 67), 12, (3, 2, 4), padding=((1, 0), 0, (2, 3)), dilation=(1, 2, 1), groups=6),
    "few_inputs": case((3, 48, 45, 67), 3, 5, padding=2, dilation=2, has_bias=True, weight_layout="transposed"),
    "one_axis": case((4, 64, 515), 40, 7, padding=3, output_padding=0, weight_layout="strided"),
    "one_tap": case((2, 40, 7, 9, 33), 24, 1),
    "more_padding": case((2, 16, 19, 41), 12, 3, padding=4, has_bias=True),
}


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize(
    ("dtype", "precision"), [*((d, None) for d in DTYPES), ("float32", "ieee"), ("float32", "tf32")]
)
@pytest.mark.parametrize("name", STRIDE_1)
def test_a_stride_of_1(cupy: Any, name: str, dtype: str, precision: str | None, layout: str) -> None:
    problem = dataclasses.replace(STRIDE_1[name], x_layout=layout, out_layout=layout)
    for operation in ("input", "conv"):
        check(operation, problem, dtype, cupy, precision)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_long_sum(cupy: Any, precision: str | None) -> None:
    check("input", case((1, 16, 7, 9), 512, 5, stride=2), "float32", cupy, precision)
    check("weight", case((2, 16, 90, 110), 16, 3, stride=2), "float32", cupy, precision)


def test_a_long_sum_of_one_sign(cupy: Any) -> None:
    for problem in (case((1, 16, 7, 9), 512, 5, stride=2), case((2, 16, 30, 40), 16, 3, stride=2)):
        x, weight, y = (np.abs(a) for a in arrays_of(problem, "float32"))
        expected = expected_of(problem, x, weight, y)
        expected["input"].assert_close(to_numpy(input_gradient(problem, to_gpu(weight), to_gpu(y))))
        expected["weight"].assert_close(to_numpy(weight_gradient(problem, to_gpu(x), to_gpu(y))))


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("fixed", SPECIAL)
def test_special_values_land_where_the_definition_puts_them(cupy: Any, fixed: str, precision: str | None) -> None:
    special_values_land_where_the_definition_puts_them(SPECIAL[fixed], precision)


def special_values_land_where_the_definition_puts_them(
    problem: Problem, precision: str | None, layout: str = "contiguous"
) -> None:
    import cupy

    _, weight, y = arrays_of(problem, "float32")
    y.flat[[0, y.size // 3, y.size // 2, -1]] = np.inf, np.nan, -np.inf, np.inf
    placed, _ = place(y, problem.rank, layout, cupy)
    got = to_numpy(input_gradient(problem, to_gpu(weight), placed, precision=precision))
    with np.errstate(invalid="ignore"):
        expected = direct_input(problem, y, weight)
    for test in (np.isnan, np.isposinf, np.isneginf):
        assert np.array_equal(test(got), test(expected)), test.__name__


@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "strided", "negative", "misaligned"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_bias(cupy: Any, dtype: str, layout: str) -> None:
    for problem in (
        case((3, 4, 9, 10, 11), 7, 3, stride=2),
        case((2, 4, 31, 33), 5, 3, stride=2),
        case((2, 4, 301), 6, 3, stride=2),
        case((4, 9, 10), 7, 3, stride=2, rank=2),
        case((4, 301), 6, 3, rank=1),
    ):
        values = gradient_of(problem, DTYPES[dtype])
        y, _ = place(values, problem.rank, layout, cupy)
        gradient = of_rank(problem, "bias")
        got = gradient(y)
        assert type(got) is cupy.ndarray
        assert (got.dtype, got.shape) == (DTYPES[dtype], (problem.c_out,))
        exact, magnitude = direct_bias(problem, values), direct_bias(problem, abs(values))
        tolerance = reference.TOLERANCES[dtype]
        allowed = 2.0**-tolerance.digits * np.abs(exact) + tolerance.products * magnitude
        assert (np.abs(to_numpy(got).astype(np.float64) - exact) <= allowed).all()
        out, buffer = place(np.full(problem.c_out, np.nan, DTYPES[dtype]), 1, "strided", cupy)
        assert gradient(y, out=out) is out
        assert to_numpy(out.copy()).tobytes() == to_numpy(got).tobytes()
        out.view(buffer.dtype)[...] = -1
        assert (buffer == -1).all()


# Memory, repeated calls, streams and devices.


@pytest.mark.parametrize("dtype", DTYPES)
def test_ten_calls_one_result(cupy: Any, dtype: str) -> None:
    for problem in (case((4, 32, 16, 24, 40), 16, 3, stride=2, padding=1), case((8, 3, 129, 131), 5, 4, stride=2)):
        x, weight, y = map(to_gpu, arrays_of(problem, dtype))
        for call in gradients(problem, x, weight, y):
            results = {to_numpy(call()).tobytes() for _ in range(10)}
            assert len(results) == 1


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_empty_batch(cupy: Any, rank: int, dtype: str) -> None:
    problem = case((0, 4, *(5,) * rank), 6, 3, stride=2, padding=1)
    x, weight, y = map(to_gpu, arrays_of(problem, dtype))
    assert input_gradient(problem, weight, y).shape == problem.x_shape
    gradient = weight_gradient(problem, x, y)
    assert (gradient.shape, gradient.dtype) == (problem.weight_shape, DTYPES[dtype])
    assert not to_numpy(gradient).any()
    out, _ = place(np.full(problem.weight_shape, np.nan, DTYPES[dtype]), rank, "strided", cupy)
    assert weight_gradient(problem, x, y, out=out) is out
    assert not to_numpy(out.copy()).any()
    assert not to_numpy(of_rank(problem, "bias")(y)).any()


def test_channels_last_results(cupy: Any) -> None:
    x, weight, y = arrays_of(PROBLEM, "float32")
    contiguous = input_gradient(PROBLEM, to_gpu(weight), to_gpu(y))
    channels_last = input_gradient(PROBLEM, to_gpu(weight), place(y, PROBLEM.rank, "channels_last", cupy)[0])
    assert contiguous.flags.c_contiguous
    assert is_channels_last(channels_last, PROBLEM.rank)
    assert cupy.allclose(contiguous, channels_last, atol=1e-4)
    assert weight_gradient(PROBLEM, place(x, PROBLEM.rank, "channels_last", cupy)[0], to_gpu(y)).flags.c_contiguous


@pytest.mark.parametrize("dtype", DTYPES)
def test_workspace_is_bounded(cupy: Any, dtype: str) -> None:
    pool = cupy.get_default_memory_pool()
    for problem in (
        case((1, 512, 16, 16, 16), 512, 3),  # a large weight
        case((4, 32, 64, 64, 64), 16, 3, stride=2, padding=1, output_padding=1),  # a long sum
        case((8, 64, 256, 256), 64, 3, groups=64),
    ):
        bits = f"i{DTYPES[dtype].itemsize}"
        x, weight, y = (
            cupy.zeros(shape, bits).view(DTYPES[dtype])
            for shape in (problem.x_shape, problem.weight_shape, problem.out_shape)
        )
        for call in gradients(problem, x, weight, y):
            call()
            pool.free_all_blocks()
            before = pool.total_bytes()
            result = call()
            assert pool.total_bytes() - before <= result.nbytes + WORKSPACE
            del result


def test_side_stream_is_followed_and_never_waited_for(cupy: Any) -> None:
    problem = FIXED["kb73"]
    values = arrays_of(problem, "float32")
    expected = expected_of(problem, *values)
    x, weight, source = map(to_gpu, values)
    for _ in range(2):  # compiled and loaded, and its memory taken
        input_gradient(problem, weight, source)
        weight_gradient(problem, x, source)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        y = cupy.full_like(source, cupy.nan)
        input_gradient(problem, weight, y)
        weight_gradient(problem, x, y)
        stream.synchronize()
        cupy.cuda.Device().synchronize()
        waiting = delay()
        cupy.copyto(y, source)  # after the delay: a kernel on any other stream reads NaN
        results = input_gradient(problem, weight, y), weight_gradient(problem, x, y)
        assert not waiting.done, "the call waited for the GPU"
        y.fill(cupy.nan)  # after the calls, on their stream
        results = tuple(map(to_numpy, results))
    expected["input"].assert_close(results[0])
    expected["weight"].assert_close(results[1])


def test_second_device(cupy: Any) -> None:
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two GPUs")
    values = arrays_of(PROBLEM, "float32")
    expected = expected_of(PROBLEM, *values)
    with cupy.cuda.Device(1):
        x, weight, y = map(to_gpu, values)
    with cupy.cuda.Device(0):
        results = {"input": input_gradient(PROBLEM, weight, y), "weight": weight_gradient(PROBLEM, x, y)}
        with pytest.raises(TypeError, match="weight must be on the same device as grad_output, got cuda:0 and cuda:1"):
            input_gradient(PROBLEM, to_gpu(values[1]), y)
    with cupy.cuda.Device(1):
        for name, result in results.items():
            assert result.device.id == 1
            expected[name].assert_close(to_numpy(result))


def test_errors_write_nothing(cupy: Any) -> None:
    x, weight, y = map(to_gpu, arrays_of(PROBLEM, "float32"))
    x_out, weight_out = (cupy.full(shape, cupy.nan, np.float32) for shape in (PROBLEM.x_shape, PROBLEM.weight_shape))
    parameters = {**PROBLEM.parameters, "output_padding": 0}
    for gradient, arguments, out in (
        (cuconvt.grad.conv_transpose3d_input, (PROBLEM.x_shape, weight, y), x_out),
        (cuconvt.grad.conv_transpose3d_weight, (x, PROBLEM.weight_shape, y), weight_out),
    ):
        with pytest.raises(ValueError, match="grad_output must have shape"):
            gradient(*arguments, **parameters, out=out)
        with pytest.raises(ValueError, match="precision must be None or one of"):
            gradient(*arguments, **PROBLEM.parameters, precision="double", out=out)
        with pytest.raises(TypeError, match="must be an array of the same library"):
            gradient(*arguments[:2], to_numpy(y), **PROBLEM.parameters, out=out)
        assert cupy.isnan(out).all()
    with pytest.raises(ValueError, match="out must not overlap an input, and it shares memory with grad_output"):
        input_gradient(PROBLEM, weight, y, out=y.reshape(-1)[: x.size].reshape(x.shape))


# PyTorch's tensors.


def to_torch(torch: Any, values: np.ndarray, dtype: str) -> Any:
    return torch.from_numpy(values.view(f"i{values.itemsize}")).cuda().view(getattr(torch, dtype))


def from_torch(torch: Any, tensor: Any, dtype: str) -> np.ndarray:
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.view(bits).cpu().numpy().view(DTYPES[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_torch(torch: Any, dtype: str) -> None:
    values = arrays_of(PROBLEM, dtype)
    expected = expected_of(PROBLEM, *values)
    x, weight, y = (to_torch(torch, a, dtype) for a in values)
    for name, call in (
        ("input", lambda **keywords: input_gradient(PROBLEM, weight, y, **keywords)),
        ("weight", lambda **keywords: weight_gradient(PROBLEM, x, y, **keywords)),
    ):
        result = call()
        assert type(result) is torch.Tensor
        assert (result.dtype, result.device) == (getattr(torch, dtype), y.device)
        assert result.is_contiguous()
        expected[name].assert_close(from_torch(torch, result, dtype))
        out = torch.full_like(result, torch.nan)
        pointer = out.data_ptr()
        assert call(out=out) is out
        assert out.data_ptr() == pointer
        assert torch.equal(out, result)
    bias = of_rank(PROBLEM, "bias")(y)
    assert type(bias) is torch.Tensor
    exact, magnitude = direct_bias(PROBLEM, values[2]), direct_bias(PROBLEM, abs(values[2]))
    tolerance = reference.TOLERANCES[dtype]
    allowed = 2.0**-tolerance.digits * np.abs(exact) + tolerance.products * magnitude
    assert (np.abs(from_torch(torch, bias, dtype).astype(np.float64) - exact) <= allowed).all()


def test_torch_memory_format_and_errors(torch: Any) -> None:
    values = arrays_of(PROBLEM, "float32")
    x, weight, y = (to_torch(torch, a, "float32") for a in values)
    result = input_gradient(PROBLEM, weight, y.to(memory_format=torch.channels_last_3d))
    assert result.is_contiguous(memory_format=torch.channels_last_3d)
    assert not result.is_contiguous()
    expected_of(PROBLEM, *values)["input"].assert_close(from_torch(torch, result.contiguous(), "float32"))
    with pytest.raises(ValueError, match="input requires grad"):
        weight_gradient(PROBLEM, x.requires_grad_(), y)
    with pytest.raises(TypeError, match="weight must be on the same device as grad_output, got cpu and cuda:0"):
        input_gradient(PROBLEM, weight.cpu(), y)


def test_torch_results_are_in_its_allocator(torch: Any) -> None:
    x, weight = torch.ones(1, 4, 64, 64, 64, device="cuda"), torch.ones(4, 4, 2, 2, 2, device="cuda")
    y = torch.ones(1, 4, 128, 128, 128, device="cuda")
    for _ in range(2):
        before = torch.cuda.memory_allocated()
        result = cuconvt.grad.conv_transpose3d_input(x.shape, weight, y, stride=2)
        assert torch.cuda.memory_allocated() - before >= result.numel() * 4
        del result


# More than 2**31 elements.


LARGE = case((2, 3, 64, 128, 256), 72, 3, stride=2, padding=1, output_padding=1)


def large_gradient(cupy: Any, layout: str) -> Any:
    """Return random float16 numbers of the shape of the result of `LARGE`, made a plane at a time."""
    assert np.prod(LARGE.out_shape) > 2**31
    n, channels, depth, height, width = LARGE.out_shape
    if layout == "contiguous":
        y = cupy.empty(LARGE.out_shape, np.float16)
    else:
        y = cupy.empty((n, depth, height, width, channels), np.float16).transpose(0, 4, 1, 2, 3)
    rng = cupy.random.default_rng(0)
    for plane in range(depth):
        y[:, :, plane] = rng.standard_normal((n, channels, height, width), dtype=np.float32)
    return y


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_input_gradient_of_more_than_2_to_the_31_elements(cupy: Any, layout: str) -> None:
    needs_memory(cupy, 20)
    weight = LARGE.arrays(DTYPES["float16"])[1]
    y = large_gradient(cupy, layout)
    got = input_gradient(LARGE, to_gpu(weight), y)
    assert is_channels_last(got, 3) if layout == "channels_last" else got.flags.c_contiguous
    for plane in (0, 1, 31, 63):
        # An input plane is reached by three planes of the result, the first by two.
        read = slice(max(2 * plane - 1, 0), 2 * plane + 2)
        before = 1 if plane == 0 else 0
        part = dataclasses.replace(
            LARGE,
            extent=(1, *LARGE.extent[1:]),
            padding=((before, 0), *LARGE.padding[1:]),
            output_padding=(0, *LARGE.output_padding[1:]),
        )
        expected = ExpectedOf(part, exact_input, direct_input, to_numpy(y[:, :, read].copy()), weight)
        expected.assert_close(to_numpy(got[:, :, plane : plane + 1].copy()))


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_weight_gradient_of_more_than_2_to_the_31_elements(cupy: Any, layout: str) -> None:
    needs_memory(cupy, 20)
    x = to_gpu(LARGE.arrays(DTYPES["float16"])[0])
    y = large_gradient(cupy, layout)
    both = to_numpy(weight_gradient(LARGE, x, y)).astype(np.float64)
    one = dataclasses.replace(LARGE, n=1)
    halves = [to_numpy(weight_gradient(one, x[i : i + 1], y[i : i + 1])).astype(np.float64) for i in range(2)]
    # Each of the three is rounded to float16, and sums a product of two normal numbers at every position of x.
    positions = x.size / x.shape[1]
    allowed = 2.0**-10 * (np.abs(both) + np.abs(halves[0]) + np.abs(halves[1]))
    allowed += 2 * reference.TOLERANCES["float16"].products * positions
    assert (np.abs(both - sum(halves)) <= allowed).all()
    assert np.abs(both).max() > 100
