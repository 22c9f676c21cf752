"""The CUDA backend with CuPy arrays, against float64 references."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import reference
from described import DEFAULT, geometry_of, layout_of, problem_of
from fixed_cases import FEW_RESULTS, FIXED, RAGGED, SPECIAL
from gpu_tools import delay, plane_of, planned_by, to_gpu
from harness import call, check, is_channels_last, to_numpy
from hypothesis import given, seed, settings
from special import check_denormals, check_infinities, check_scales
from stored_together import TOGETHER, planner
from strategies import DTYPES, LAST, LAYOUTS, OUT_LAYOUTS, Problem, Specialisation, case, place, problems

import cuconvt
from cuconvt.plan import Plan

pytestmark = pytest.mark.gpu

GENERAL_LAYOUTS = tuple(layout for layout in LAYOUTS if layout != "channels_last")
PRECISIONS = (None, "ieee", "tf32x3", "tf32")
LONGEST = {1: (900,), 2: (40, 40), 3: (12, 12, 12)}  # beyond one thread block on every axis


@pytest.fixture
def cupy() -> Any:
    import cupy

    return cupy


def specialisation(index: int) -> tuple[Specialisation, str, str | None]:
    """Draw what a kernel is compiled for; dtype and rank rotate, so that every pair of them comes equally often."""
    choose = random.Random(index)
    dtype = tuple(DTYPES)[index % 4]
    rank = 1 + index // 4 % 3
    depthwise = choose.random() < 0.15
    channels = (1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 31, 32, 33, 65)
    spec = Specialisation(
        kernel=tuple(choose.randint(1, 7) for _ in range(rank)),
        stride=tuple(choose.randint(1, 4) for _ in range(rank)),
        dilation=tuple(choose.randint(1, 4) for _ in range(rank)),
        c_in_per_group=1 if depthwise else choose.choice(channels),
        c_out_per_group=choose.randint(1, 2) if depthwise else choose.choice(channels),
        # Channels-last arrays have kernels of their own: each specialisation takes one side, to compile half as much.
        x_layouts=("channels_last",) if choose.random() < 0.4 else GENERAL_LAYOUTS,
        out_layouts=("channels_last",) if choose.random() < 0.4 else GENERAL_LAYOUTS[:-1],
    )
    return spec, dtype, choose.choice(PRECISIONS) if dtype == "float32" else None


@pytest.mark.parametrize("index", range(60))
def test_any_problem(cupy: Any, index: int) -> None:
    spec, dtype, precision = specialisation(index)
    longest = LONGEST[len(spec.kernel)]

    # A kernel serves all the problems of its specialisation, which is therefore compiled once and used many times.
    @seed(index)
    @settings(max_examples=max(settings().max_examples // 40, 2), derandomize=False, database=None)
    @given(problem=problems(spec, longest, longest_w=longest[0] + 28, budget=5))
    def every_problem(problem: Problem) -> None:
        check(problem, dtype, cupy, precision)

    every_problem()


@pytest.mark.parametrize("index", range(len(FIXED)), ids=list(FIXED))
def test_fixed_case(cupy: Any, index: int) -> None:
    problem = list(FIXED.values())[index]
    check(problem, "float32", cupy)
    check(problem, ("float16", "bfloat16", "float64")[index % 3], cupy)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", ["kb70", "kb72", "kb73", "kb77"])
def test_precision(cupy: Any, name: str, precision: str | None) -> None:
    check(FIXED[name], "float32", cupy, precision)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_of_x(cupy: Any, layout: str, dtype: str) -> None:
    check(dataclasses.replace(FIXED["kb73"], x_layout=layout), dtype, cupy)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", OUT_LAYOUTS)
def test_layout_of_out(cupy: Any, layout: str, dtype: str) -> None:
    check(dataclasses.replace(FIXED["kb73"], out_layout=layout), dtype, cupy)


# A warp takes two groups of eight 16-bit channels at once.
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    "problem",
    [
        case((2, 48, 5, 9, 37), 48, 3, 2, padding=1, groups=6, has_bias=True),
        case((2, 10, 5, 7, 33), 16, (3, 2, 5), (1, 2, 3), padding=1, groups=2),
        case((3, 32, 17, 45), 32, 3, padding=1, groups=4, dilation=2, has_bias=True),
        case((5, 16, 301), 16, 5, 4, padding=1, output_padding=1, groups=2),
    ],
    ids=["3d", "3d-few-inputs", "2d", "1d"],
)
def test_channels_last_groups_in_pairs(cupy: Any, problem: Problem, dtype: str) -> None:
    for x_layout in ("channels_last", "contiguous"):
        check(dataclasses.replace(problem, x_layout=x_layout, out_layout="channels_last"), dtype, cupy)


# Kernel = stride: rows that are aligned for loads and stores of several elements or not; any number of channels.
DISJOINT = {
    "upsampling": case((2, 64, 9, 20, 64), 32, 2, stride=2, has_bias=True),
    "upsampling_2d": case((3, 40, 35, 66), 24, 2, stride=2, has_bias=True, x_layout="channels_last"),
    "odd": case((2, 17, 7, 19, 21), 33, 2, stride=2),
    "short_rows": case((2, 48, 3, 10, 12), 40, 2, stride=2, has_bias=True),
    "short_odd_rows": case((3, 24, 4, 9, 11), 36, (2, 3, 2), stride=(2, 3, 2), has_bias=True),
    "many_steps": case((2, 160, 3, 9, 13), 40, 2, stride=2),
    "by_three": case((2, 12, 17, 44), 40, 3, stride=3, has_bias=True),
    "by_three_odd": case((2, 20, 9, 13), 44, 3, stride=3, output_padding=(1, 2)),
    "by_four": case((4, 64, 515), 48, 4, stride=4, output_padding=3),
    "by_eight": case((4, 24, 260), 16, 8, stride=8),
    "flat": case((2, 48, 5, 33, 40), 20, (1, 2, 2), stride=(1, 2, 2), padding=((0, 0), (1, 0), (2, 2)), has_bias=True),
    "one_tap": case((3, 96, 45, 52), 64, 1, has_bias=True),
    "grouped": case((2, 96, 9, 21, 24), 48, 2, stride=2, groups=3),
    "wide": case((1, 128, 4, 8, 8), 256, 2, stride=2, has_bias=True),
    "gaps": case((2, 24, 9, 21, 36), 16, 2, stride=2, x_layout="cropped", out_layout="misaligned"),
    "channels_last": case((2, 40, 9, 21, 36), 20, 2, stride=2, x_layout="channels_last", out_layout="channels_last"),
    "to_channels_last": case((2, 64, 9, 21, 36), 32, 2, stride=2, out_layout="channels_last", has_bias=True),
}


@pytest.fixture
def by_disjoint() -> Iterator[None]:
    from cuconvt import cuda
    from cuconvt.plan_disjoint import plan_disjoint

    with planned_by(plan_disjoint, cuda, "make_plan", cuda._prepare):
        yield


@pytest.fixture
def by_narrow_groups() -> Iterator[None]:
    from cuconvt import cuda
    from cuconvt.plan_narrow_groups import plan_narrow_groups

    with planned_by(plan_narrow_groups, cuda, "make_plan", cuda._prepare):
        yield


@pytest.fixture
def by_phase_wgmma() -> Iterator[None]:
    from cuconvt import cuda
    from cuconvt.plan_phase_wgmma import plan_phase_wgmma

    with planned_by(plan_phase_wgmma, cuda, "make_plan", cuda._prepare):
        yield


@pytest.fixture
def by_tap_columns() -> Iterator[None]:
    from cuconvt import cuda
    from cuconvt.plan_tap_columns import plan_tap_columns

    with planned_by(plan_tap_columns, cuda, "make_plan", cuda._prepare):
        yield


FOR_TENSOR_CORES = pytest.mark.parametrize(
    ("dtype", "precision"), [("float16", None), ("bfloat16", None), ("float32", "tf32"), ("float32", None)]
)


@FOR_TENSOR_CORES
@pytest.mark.parametrize("name", DISJOINT)
def test_kernel_equal_to_stride(cupy: Any, by_disjoint: None, name: str, dtype: str, precision: str | None) -> None:
    check(DISJOINT[name], dtype, cupy, precision)


@FOR_TENSOR_CORES
@pytest.mark.parametrize("name", FEW_RESULTS)
def test_few_results(cupy: Any, by_tap_columns: None, name: str, dtype: str, precision: str | None) -> None:
    check(FEW_RESULTS[name], dtype, cupy, precision)


@FOR_TENSOR_CORES
@pytest.mark.parametrize("name", ["volume", "many_channels"])
def test_few_results_with_other_tiles(cupy: Any, name: str, dtype: str, precision: str | None) -> None:
    from cuconvt import cuda
    from cuconvt.plan_tap_columns import candidates, plan_tap_columns

    problem = FEW_RESULTS[name]
    geometry = geometry_of(problem)
    kind = dtype, layout_of(geometry), precision or DEFAULT[dtype], cuda.device_properties(0)
    tiles = [plan.tile for plan in candidates(geometry, *kind)]
    for tile in random.Random(name + dtype).sample(tiles, min(len(tiles), 6)):

        def planner(*arguments: Any, tile: Any = tile) -> Any:
            return plan_tap_columns(*arguments, tile)

        with planned_by(planner, cuda, "make_plan", cuda._prepare):
            check(problem, dtype, cupy, precision, calls=2)


@FOR_TENSOR_CORES
@pytest.mark.parametrize("family", ["phase_wgmma", "phase_gemm"])
@pytest.mark.parametrize("name", RAGGED)
def test_copies_of_every_width(cupy: Any, name: str, family: str, dtype: str, precision: str | None) -> None:
    from cuconvt import cuda, plan_phase_gemm, plan_phase_wgmma

    planner = {"phase_gemm": plan_phase_gemm.plan_phase_gemm, "phase_wgmma": plan_phase_wgmma.plan_phase_wgmma}[family]
    with planned_by(planner, cuda, "make_plan", cuda._prepare):
        check(RAGGED[name][0], dtype, cupy, precision)


# A single position, as in a generator's first layer: planned as kernel = stride, whatever its stride is.
SINGLE = {
    "volume": case((5, 40, 1, 1, 1), 48, 4, has_bias=True),
    "volume_of_many": case((3, 200, 1, 1, 1), 32, 4, stride=2),
    "image": case((9, 96, 1, 1), 64, 4, x_layout="channels_last", out_layout="channels_last"),
    "grouped": case((2, 24, 1, 1, 1), 36, (2, 3, 4), groups=3, weight_layout="channels_last", has_bias=True),
    "row": case((70, 17, 1), 33, 7),
    "gaps": case((3, 20, 1, 1, 1), 12, (3, 4, 5), x_layout="cropped", out_layout="cropped"),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SINGLE)
def test_single_position(cupy: Any, name: str, dtype: str) -> None:
    check(SINGLE[name], dtype, cupy)
    if dtype == "float32":
        check(SINGLE[name], dtype, cupy, "tf32")


# The last layers of generators and decoders: few results of many channels.
FEW_OF_MANY = {
    "image": case((3, 64, 19, 33), 3, 4, 2, padding=1, has_bias=True),
    "volume": case((2, 32, 9, 11, 17), 1, 3, 2, padding=1, output_padding=1),
    "row": case((4, 64, 515), 2, 8, 4, padding=2),
    "upscaling": case((2, 56, 21, 40), 1, 9, 3, padding=4, output_padding=2),
    "some": case((2, 8, 21, 40), 3, 3, padding=1, has_bias=True),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("name", FEW_OF_MANY)
def test_few_results_of_many_channels(cupy: Any, name: str, layout: str, dtype: str) -> None:
    problem = dataclasses.replace(FEW_OF_MANY[name], x_layout=layout, out_layout=layout)
    check(problem, dtype, cupy)
    if dtype == "float32":
        check(problem, dtype, cupy, "tf32")


# Vocoders' large strides: up to 16 phases along W.
MANY_PHASES = {
    "by_ten": case((2, 48, 133), 40, 20, 10, padding=5, has_bias=True),
    "by_sixteen": case((2, 32, 70), 24, 32, 16, padding=8),
    "by_twelve": case((2, 40, 5, 41), 17, (3, 12), (2, 12), padding=(1, 0)),
    "by_eleven_apart": case((2, 16, 3, 37), 32, (2, 7), (1, 11), padding=(0, 3), dilation=(1, 2)),
}


@FOR_TENSOR_CORES
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("name", MANY_PHASES)
def test_many_phases(cupy: Any, name: str, layout: str, dtype: str, precision: str | None) -> None:
    check(dataclasses.replace(MANY_PHASES[name], x_layout=layout, out_layout=layout), dtype, cupy, precision)


# Phases that all read the same positions of x, as the channels of one product.
ALIKE = {
    "spectrum": case((2, 70, 90), 1, 64, 16, has_bias=True),
    "speech": case((3, 48, 515), 2, 16, 8, padding=4, output_padding=3),
    "patches": case((3, 33, 7, 9), 3, (4, 16), (4, 16), has_bias=True),
    "image": case((3, 64, 19, 33), 3, 4, 2, padding=1, has_bias=True),
    "odd_steps": case((2, 24, 11, 20), 5, (6, 9), (2, 3), padding=((1, 0), (2, 4)), output_padding=(1, 2)),
    "volume": case((2, 32, 9, 11, 17), 1, 4, 2, padding=1, has_bias=True),
    "grouped": case((2, 24, 5, 9, 12), 21, (2, 4, 2), (1, 4, 2), groups=3, has_bias=True),
}


@FOR_TENSOR_CORES
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("name", ALIKE)
def test_phases_as_channels(cupy: Any, name: str, layout: str, dtype: str, precision: str | None) -> None:
    from cuconvt import cuda
    from cuconvt.plan_phase_gemm import candidates

    def plan(*problem: Any) -> Any:
        return min((p for p in candidates(*problem) if p.tile.phases_as_channels), key=lambda p: p.cost)

    with planned_by(plan, cuda, "make_plan", cuda._prepare):
        check(dataclasses.replace(ALIKE[name], x_layout=layout, out_layout=layout), dtype, cupy, precision)


# Rows of few channels a group whose 16-bit results leave a block a box at a time: of even and odd lengths, in several
# boxes along every axis, with and without 16 bytes of x that can be fetched at once.
BOXED = {
    "odd": case((3, 24, 11, 45, 67), 24, 3, stride=2, padding=1, groups=3, has_bias=True),
    "fetched": case((2, 16, 9, 33, 64), 16, 3, stride=2, padding=1, groups=2, has_bias=True),
    "fetched_by_words": case((2, 20, 9, 21, 70), 24, 3, stride=2, padding=1, output_padding=1, groups=4),
    "images": case((21, 16, 45, 72), 12, 4, stride=2, padding=1, groups=2),
    "parts_of_rows": case((3, 16, 5008), 16, 16, stride=8, padding=4, groups=2, has_bias=True),
    "sixteen": case((2, 32, 9, 21, 48), 48, 3, stride=2, padding=(1, 0, 1), groups=2),
    "by_three": case((2, 8, 7, 12, 64), 8, 3, stride=(2, 1, 3), padding=1),
    "gaps": case((2, 6, 9, 21, 37), 10, (2, 3, 4), (2, 2, 3), x_layout="cropped", out_layout="misaligned", groups=2),
    "sliced": case((2, 16, 9, 20, 40), 16, 3, 2, padding=1, x_layout="sliced", out_layout="sliced", groups=2),
}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", BOXED)
def test_boxes_of_rows(cupy: Any, by_narrow_groups: None, name: str, dtype: str) -> None:
    check(BOXED[name], dtype, cupy)


# Few channels a group whose residues along D are summed one after the other, by tiles of 32 and of 64 cells: of one
# row, of two, and of rows that do not divide them; whose runs leave as vectors, in windows and one by one.
SPLIT = {
    "long_rows": case((2, 32, 9, 20, 64), 32, 3, stride=2, padding=1, groups=4, has_bias=True),
    "two_rows": case((3, 16, 7, 21, 32), 16, 3, stride=2, padding=1, groups=2),
    "wide": case((2, 24, 5, 9, 127), 24, 4, stride=2, padding=1, groups=3),
    "other_rows": case((2, 8, 9, 20, 45), 8, 3, stride=2, padding=(0, 1, 1), has_bias=True),
    "even_rows": case((2, 16, 9, 20, 64), 16, 3, stride=2, padding=1, output_padding=1, groups=2),
    "few": case((2, 9, 9, 20, 64), 15, 2, stride=2, groups=3, has_bias=True),
    "along_depth": case((2, 16, 9, 20, 64), 16, 3, stride=(3, 1, 2), padding=1, groups=2),
    "gaps": case((2, 16, 9, 20, 64), 16, 3, 2, padding=1, x_layout="cropped", out_layout="misaligned", groups=2),
    "channels_last": case(
        (2, 32, 9, 20, 33), 32, 3, stride=2, padding=1, groups=4, x_layout="channels_last", out_layout="channels_last"
    ),
    "sixteen_channels_last": case(
        (2, 32, 9, 20, 33), 32, 3, 2, padding=1, groups=2, x_layout="channels_last", out_layout="channels_last"
    ),
}


@pytest.mark.parametrize("precision", ["tf32", "tf32x3"])
@pytest.mark.parametrize("name", SPLIT)
def test_residues_one_after_the_other(cupy: Any, by_narrow_groups: None, name: str, precision: str) -> None:
    check(SPLIT[name], "float32", cupy, precision)


@pytest.mark.parametrize("checked", [check_infinities, check_scales, check_denormals])
@pytest.mark.parametrize("name", ["upsampling_2d", "one_tap", "by_three"])
def test_special_values_of_disjoint(cupy: Any, by_disjoint: None, checked: Any, name: str) -> None:
    checked(DISJOINT[name], to_gpu, "tf32x3")


@pytest.mark.parametrize("checked", [check_infinities, check_scales, check_denormals])
@pytest.mark.parametrize("name", ["mask", "volume", "row", "many_channels"])
def test_special_values_of_few_results(cupy: Any, by_tap_columns: None, checked: Any, name: str) -> None:
    checked(FEW_RESULTS[name], to_gpu, "tf32x3")


# Planes along D that no tap reaches: between others or, with much padding, before the first and behind the last one.
FILLED = {
    "kb77": case((4, 32, 9, 20, 32), 64, 3, stride=2, padding=1, dilation=2, has_bias=True),
    "unpadded": case((2, 48, 8, 21, 33), 40, 3, stride=2, dilation=2, out_layout="misaligned"),
    "one_tap": case((3, 32, 7, 12, 20), 24, (1, 3, 3), stride=(3, 2, 2), output_padding=(2, 0, 1), has_bias=True),
    "by_four": case((2, 64, 6, 9, 40), 32, (3, 2, 4), stride=(4, 1, 2), padding=(5, 0, 1), dilation=(2, 1, 1)),
    "phases_without_a_tap": case((2, 40, 5, 9, 20), 17, 2, stride=6, padding=1, dilation=2, has_bias=True),
    "small_planes": case((5, 96, 16, 2, 3), 72, 3, stride=2, dilation=2, padding=(4, 2, 2), has_bias=True),
    "gaps": case((2, 32, 5, 9, 20), 24, 3, stride=2, dilation=2, x_layout="cropped", out_layout="cropped"),
    "channels_last": case((2, 32, 5, 9, 20), 24, 3, stride=2, dilation=2, out_layout="channels_last", has_bias=True),
}


@FOR_TENSOR_CORES
@pytest.mark.parametrize("name", FILLED)
def test_planes_that_no_tap_reaches(
    cupy: Any, by_phase_wgmma: None, name: str, dtype: str, precision: str | None
) -> None:
    check(FILLED[name], dtype, cupy, precision)


# Of stride 1, channels-last x: correlations, for which bulk tensor copies bring x.
TURNED = {
    "kb61": case((2, 48, 9, 17, 20), 48, 3, has_bias=True, **LAST),
    "wide": case((1, 256, 6, 11, 16), 136, 3, padding=1, has_bias=True, **LAST),
    "narrow": case((2, 16, 12, 40), 40, (5, 3), padding=(2, 0), **LAST),
    "one_axis": case((3, 40, 301), 72, 7, padding=3, dilation=2, has_bias=True, **LAST),
    "one_tap": case((2, 72, 9, 33), 40, 1, **LAST),
    "grouped": case((2, 128, 9, 33), 96, 3, padding=1, groups=2, has_bias=True, **LAST),
    "ragged": case((2, 24, 5, 7, 11), 57, (2, 3, 4), padding=((0, 1), (2, 0), (1, 1)), **LAST),
    "apart": case((2, 64, 12, 13, 14), 48, 3, padding=4, dilation=5, has_bias=True, **LAST),
    "apart_along_w": case((2, 256, 33, 33), 128, 3, padding=12, dilation=12, **LAST),
    "dilated_rows_of_the_result": case(
        (2, 64, 9, 40), 40, (3, 4), padding=4, dilation=(6, 3), x_layout="channels_last"
    ),
    "rows_of_the_result": case((2, 64, 12, 40), 48, 3, padding=1, has_bias=True, x_layout="channels_last"),
}


# Rows that copies bring, one by one or those of a plane as one, to workers that have A in registers.
BROUGHT = {
    "disjoint": case((2, 64, 6, 10, 16), 48, 2, stride=2, has_bias=True),
    "disjoint_wide": case((1, 200, 4, 8, 8), 136, 2, stride=2),
    "disjoint_image": case((3, 264, 24, 24), 104, 2, stride=2, has_bias=True),
    "by_four": case((2, 72, 10, 24), 40, 4, stride=4),
    "volume": case((2, 48, 7, 9, 16), 40, 3, 2, 1, 1, has_bias=True),
    "late": case((4, 96, 16, 16), 72, 4, 2, 1),
    "padded": case((2, 100, 19, 24), 56, 5, 2, 2, 1, has_bias=True),
    "six_taps_by_four": case((2, 40, 9, 16), 33, 6, stride=4, padding=1),
    "unstrided": case((2, 64, 9, 40), 48, 3, padding=1, has_bias=True),
    "dilated": case((2, 40, 13, 24), 56, 3, padding=3, dilation=3),
    "phases_without_a_tap": case((2, 32, 3, 8, 16), 24, (1, 3, 4), 2, (0, 1, 1), (1, 1, 0), has_bias=True),
    "grouped": case((2, 128, 8, 16), 96, 4, 2, 1, groups=2, has_bias=True),
    "few_channels": case((5, 12, 24, 32), 7, 4, 2, 1),
    "batch": case((37, 64, 8, 8), 40, 4, 2, 1, has_bias=True),
}
# The same to rows of a result that are not aligned, so that threads exchange outputs.
BROUGHT_TO_ODD_ROWS = {
    "cut": case((2, 64, 6, 10, 16), 48, 2, stride=2, padding=(0, 0, (0, 1)), has_bias=True),
    "volume": case((2, 48, 7, 10, 16), 40, 3, 2, 1, has_bias=True),
    "image": case((4, 96, 16, 16), 72, 3, 2, 1, has_bias=True),
    "longer": case((2, 100, 19, 24), 56, 5, 2, 2),
    "by_three": case((2, 40, 10, 24), 33, 3, stride=3, padding=(0, (0, 1)), has_bias=True),
    "by_four": case((2, 72, 10, 24), 40, 4, stride=4, padding=(0, (1, 0))),
    "unstrided": case((2, 64, 9, 40), 48, 3, padding=(1, (1, 0)), has_bias=True),
    "grouped": case((2, 128, 8, 16), 96, 3, 2, 1, groups=2, has_bias=True),
    "few_channels": case((5, 12, 24, 32), 7, 3, 2, 1),
    "misaligned": case((2, 64, 9, 16), 48, 4, 2, 1, has_bias=True, out_layout="misaligned"),
}
# Those of a plane are whole 16 bytes, but not each.
BROUGHT_AS_ONE = {
    "four": case((33, 136, 4, 4), 72, 4, 2, 1, has_bias=True),
    "six": case((3, 96, 5, 4, 6), 40, 2, stride=2),
    "twelve": case((3, 72, 12, 12), 48, 3, 2, 1, 1, has_bias=True),
    "twenty": case((2, 48, 6, 20), 40, 3, padding=1),
}


def brought(flat: bool, plans: list[Plan]) -> Any:
    """Return a planner of the kernel, whatever the estimates say, whose copies bring rows in this way."""
    from cuconvt.plan_phase_rows import plan_phase_rows

    def plan(*problem: Any) -> Any:
        proposed = plan_phase_rows(*problem)
        assert isinstance(proposed, Plan), proposed
        plans.append(plan_phase_rows(*problem, dataclasses.replace(proposed.tile, flat=int(flat))))
        assert problem_of(plans[-1])["patches"][0] == flat
        return plans[-1]

    return plan


@FOR_TENSOR_CORES
@pytest.mark.parametrize("flat", [False, True], ids=["rows", "planes"])
@pytest.mark.parametrize("name", BROUGHT)
def test_rows_that_copies_bring(cupy: Any, name: str, flat: bool, dtype: str, precision: str | None) -> None:
    from cuconvt import cuda

    plans: list[Plan] = []
    with planned_by(brought(flat, plans), cuda, "make_plan", cuda._prepare):
        check(BROUGHT[name], dtype, cupy, precision)
    assert plans[0].maps


@FOR_TENSOR_CORES
@pytest.mark.parametrize(
    ("name", "flat"),
    # Rows of a plane without a stride have as many outputs as inputs, which are pairs.
    [
        pytest.param(name, flat, id=f"{name}-{'planes' if flat else 'rows'}")
        for name in BROUGHT_TO_ODD_ROWS
        for flat in (False, True)
        if not flat or name != "unstrided"
    ],
)
def test_rows_that_copies_bring_to_odd_rows(
    cupy: Any, name: str, flat: bool, dtype: str, precision: str | None
) -> None:
    from cuconvt import cuda

    plans: list[Plan] = []
    with planned_by(brought(flat, plans), cuda, "make_plan", cuda._prepare):
        check(BROUGHT_TO_ODD_ROWS[name], dtype, cupy, precision, calls=2)
    assert dict(plans[0].defines)["OUT_RUN"] == 1


@FOR_TENSOR_CORES
@pytest.mark.parametrize("name", BROUGHT_AS_ONE)
def test_planes_of_rows_that_copies_bring(cupy: Any, name: str, dtype: str, precision: str | None) -> None:
    from cuconvt import cuda

    plans: list[Plan] = []
    with planned_by(brought(True, plans), cuda, "make_plan", cuda._prepare):
        check(BROUGHT_AS_ONE[name], dtype, cupy, precision)
    assert plans[0].maps


@pytest.mark.parametrize("checked", [check_infinities, check_scales, check_denormals])
@pytest.mark.parametrize("flat", [False, True], ids=["rows", "planes"])
@pytest.mark.parametrize("name", ["disjoint_image", "late", "unstrided", "padded"])
def test_special_values_of_rows_that_copies_bring(cupy: Any, name: str, flat: bool, checked: Any) -> None:
    from cuconvt import cuda

    with planned_by(brought(flat, []), cuda, "make_plan", cuda._prepare):
        checked(BROUGHT[name], to_gpu, "tf32x3")


# Channels-last x that copies bring to blocks that slide, own all phases or one, join taps, and keep their weights.
COPIED = {
    "volume": case((2, 64, 18, 20, 22), 48, 3, 2, 1, 1, has_bias=True, **LAST),
    "volume_without_a_stride": case((1, 40, 20, 30, 35), 24, 3, padding=1, **LAST),
    "wide_volume": case((2, 256, 8, 8, 8), 128, 4, 2, 1, has_bias=True, **LAST),
    "anisotropic": case((2, 32, 9, 33, 40), 32, (1, 2, 3), (1, 2, 2), has_bias=True, **LAST),
    "image": case((4, 128, 33, 31), 64, 4, 2, 1, has_bias=True, **LAST),
    "by_three": case((4, 72, 32, 32), 40, 5, 3, 2, 1, **LAST),
    "dilated": case((2, 48, 30, 40), 17, 3, 2, 2, dilation=2, has_bias=True, **LAST),
    "few_results": case((2, 32, 64, 64), 3, 4, 2, 1, has_bias=True, **LAST),
    "two_groups": case((2, 128, 20, 20), 64, 4, 2, 1, groups=2, **LAST),
    "groups_of_few": case((2, 96, 21, 20), 80, 3, 2, 1, groups=2, has_bias=True, **LAST),
    "row": case((4, 256, 515), 128, 8, 4, 2, has_bias=True, **LAST),
    "row_by_eight": case((4, 64, 300), 32, 16, 8, 4, **LAST),
    "rows_of_results": case((2, 64, 12, 17, 20), 48, 3, 2, 1, x_layout="channels_last", has_bias=True),
}


@FOR_TENSOR_CORES
@pytest.mark.parametrize("name", COPIED)
def test_boxes_of_channels_last_x(cupy: Any, name: str, dtype: str, precision: str | None) -> None:
    from cuconvt import cuda, plan_phase_wgmma

    plans = []

    def plan(*problem: Any) -> Any:
        plans.append(plan_phase_wgmma.plan_phase_wgmma(*problem))
        return plans[-1]

    with planned_by(plan, cuda, "make_plan", cuda._prepare):
        check(COPIED[name], dtype, cupy, precision)
    assert plans[0].maps


@pytest.fixture
def split(request: pytest.FixtureRequest) -> Iterator[None]:
    """Plan with one of the tiles for which bulk tensor copies bring x, to be split in two parts, drawn by a number."""
    from cuconvt import cuda
    from cuconvt import plan_phase_wgmma as wgmma
    from cuconvt.plan_phase_wgmma_work import Work
    from cuconvt.plan_views import batch_as_depth

    def plan(geometry: Any, dtype: str, layout: Any, precision: str | None, device: Any) -> Any:
        as_read, of_it = batch_as_depth(geometry, layout)
        every = list(wgmma.tiles(Work(as_read, dtype, precision, of_it)))
        for tile in random.Random(request.param).sample(every, len(every)):
            found = wgmma.plan_phase_wgmma(geometry, dtype, layout, precision, device, tile)
            if isinstance(found, Plan):
                assert found.maps
                return found
        raise AssertionError("no tile serves")

    with planned_by(plan, cuda, "make_plan", cuda._prepare):
        yield


@pytest.mark.parametrize("split", range(4), indirect=True)
@pytest.mark.parametrize("name", COPIED)
def test_boxes_that_are_split(cupy: Any, split: None, name: str) -> None:
    check(COPIED[name], "float32", cupy, "tf32x3")


@pytest.mark.parametrize("checked", [check_infinities, check_scales, check_denormals])
@pytest.mark.parametrize("split", range(2), indirect=True)
@pytest.mark.parametrize("name", ["volume", "image", "two_groups", "row_by_eight"])
def test_special_values_of_boxes_that_are_split(cupy: Any, split: None, name: str, checked: Any) -> None:
    checked(COPIED[name], channels_last(COPIED[name].rank, cupy), "tf32x3")


def channels_last(rank: int, cupy: Any) -> Callable[[Any], Any]:
    """Return a function that puts arrays channels-last on the GPU."""

    def last(array: Any) -> Any:
        of_channels = array is None or array.ndim == 1
        return to_gpu(array) if of_channels else place(array, rank, "channels_last", cupy)[0]

    return last


# Dilation without a stride along D or H, in boxes of one residue: in rows, aligned or not, and channels-last, of which
# copies bring boxes as far as their steps go; residues without a position of x, or of the result.
RESIDUES = {
    "image": case((2, 40, 33, 40), 48, 3, padding=6, dilation=6, has_bias=True),
    "odd": case((3, 17, 21, 23), 25, (4, 2), padding=(3, 1), dilation=(3, 2), x_layout="misaligned"),
    "volume": case((2, 24, 11, 14, 24), 40, 3, padding=4, dilation=(2, 4, 3), has_bias=True),
    "along_h": case((1, 72, 6, 19, 21), 16, (3, 3, 2), (2, 1, 2), padding=(1, 4, 0), dilation=(1, 4, 1)),
    "beyond_x": case((3, 32, 9, 21), 24, (3, 2), padding=(12, 1), dilation=(12, 2), out_layout="cropped"),
    "grouped": case((2, 96, 18, 20), 64, 3, padding=5, dilation=5, groups=2, has_bias=True),
    "boxed": case((2, 40, 11, 14, 17), 48, 3, padding=4, dilation=(4, 8, 2), has_bias=True, **LAST),
    "boxed_image": case((2, 64, 33, 29), 24, (5, 3), padding=6, dilation=(3, 4), x_layout="channels_last"),
    "too_far_for_copies": case((2, 64, 33, 29), 72, 3, padding=9, dilation=9, **LAST),
}


@pytest.fixture
def by_residues(request: pytest.FixtureRequest) -> Iterator[None]:
    """Plan with one of the tiles of residues, drawn by a number."""
    from cuconvt import cuda
    from cuconvt import plan_phase_wgmma as wgmma
    from cuconvt.plan_views import batch_as_depth

    def plan(geometry: Any, dtype: str, layout: Any, precision: str | None, device: Any) -> Any:
        as_depth, of_it = batch_as_depth(geometry, layout)
        every = list(wgmma.tiles(wgmma.works_of(as_depth, dtype, precision, of_it)[-1]))
        for tile in random.Random(request.param).sample(every, len(every)):
            found = wgmma.plan_phase_wgmma(geometry, dtype, layout, precision, device, tile)
            if isinstance(found, Plan):
                defines = dict(found.defines)
                assert defines["RESIDUES_D"] + defines["RESIDUES_H"] > 0
                return found
        raise AssertionError("no tile serves")

    with planned_by(plan, cuda, "make_plan", cuda._prepare):
        yield


@FOR_TENSOR_CORES
@pytest.mark.parametrize("by_residues", range(3), indirect=True)
@pytest.mark.parametrize("name", RESIDUES)
def test_residues_are_phases(cupy: Any, by_residues: None, name: str, dtype: str, precision: str | None) -> None:
    check(RESIDUES[name], dtype, cupy, precision)


@pytest.mark.parametrize("checked", [check_infinities, check_scales, check_denormals])
@pytest.mark.parametrize("by_residues", range(2), indirect=True)
@pytest.mark.parametrize("name", ["image", "volume", "beyond_x", "boxed"])
def test_special_values_of_residues(cupy: Any, by_residues: None, name: str, checked: Any) -> None:
    problem = RESIDUES[name]
    checked(problem, channels_last(problem.rank, cupy) if name == "boxed" else to_gpu, "tf32x3")


# So few boxes that each has a block, which packs the weights that it needs: of blocks that slide, own all phases or
# one, of several groups and tiles of channels, with planes that no tap reaches.
PACKED_BY_BLOCKS = {
    "volume": case((1, 16, 8, 8, 8), 16, 3, 2, 1, 1, has_bias=True),
    "image": case((2, 16, 9, 13), 40, 3, padding=1),
    "row": case((3, 24, 70), 12, 7, padding=3, has_bias=True),
    "by_three": case((1, 20, 12, 11), 9, 3, (2, 3), has_bias=True),
    "groups": case((2, 48, 9, 13), 48, 3, padding=1, groups=2, has_bias=True),
    "planes": case((1, 12, 4, 5, 9), 8, 3, 2, 1, dilation=2, has_bias=True),
}


@FOR_TENSOR_CORES
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("name", PACKED_BY_BLOCKS)
def test_blocks_that_pack_their_weights(
    cupy: Any, name: str, layout: str, dtype: str, precision: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cuconvt import cuda, plan_wgmma_sizes
    from cuconvt import plan_phase_wgmma as wgmma

    problem = dataclasses.replace(PACKED_BY_BLOCKS[name], x_layout=layout, out_layout=layout)
    values = problem.arrays(DTYPES[dtype])
    x = place(values[0], problem.rank, layout, cupy)[0]
    weight, bias = (None if array is None else to_gpu(array) for array in values[1:])
    packed, results = [], []

    def plan(*of_problem: Any) -> Any:
        found = wgmma.plan_phase_wgmma(*of_problem)
        packed.append(found.packed_words)
        return found

    with planned_by(plan, cuda, "make_plan", cuda._prepare):
        check(problem, dtype, cupy, precision)
        results.append(call(problem, x, weight, bias, precision=precision))
    assert not any(packed)

    monkeypatch.setattr(plan_wgmma_sizes, "PACKS_A_THREAD", 0)
    packed.clear()
    with planned_by(plan, cuda, "make_plan", cuda._prepare):
        results.append(call(problem, x, weight, bias, precision=precision))
    assert all(packed)
    assert to_numpy(results[0]).tobytes() == to_numpy(results[1]).tobytes()


# Phases that differ in taps, in more boxes than the device holds blocks.
UNEVEN = {
    "volume": case((3, 40, 15, 20, 33), 72, 3, 2, 1, 1, has_bias=True),
    "volume_last": case((3, 40, 15, 20, 33), 72, 3, 2, 1, 1, x_layout="channels_last", out_layout="channels_last"),
    "image": case((5, 72, 61, 100), 136, (5, 3), (3, 2), (1, 0), has_bias=True),
    "grouped": case((2, 96, 50, 71), 80, 3, 2, groups=2, x_layout="cropped", out_layout="misaligned"),
}


@FOR_TENSOR_CORES
@pytest.mark.parametrize("name", UNEVEN)
def test_phases_with_more_taps_come_first(
    cupy: Any, monkeypatch: pytest.MonkeyPatch, name: str, dtype: str, precision: str | None
) -> None:
    from cuconvt import cuda, plan_phase_wgmma
    from cuconvt.plan_wgmma_sizes import Tile

    tile = Tile(2, 2, 1, 8, False, 1, 4, 6, False, False, False, 1)
    orders = []

    def plan(*problem: Any) -> Any:
        planned = plan_phase_wgmma.plan_tile(*problem, tile)
        orders.append(problem_of(planned)["out_vector"][0])
        return planned

    monkeypatch.setattr(plan_phase_wgmma, "takes_longest_first", lambda *_: True)
    with planned_by(plan, cuda, "make_plan", cuda._prepare):
        check(UNEVEN[name], dtype, cupy, precision)
    assert set(orders) == {1}


@pytest.fixture
def by_turned() -> Iterator[None]:
    from cuconvt import cuda
    from cuconvt.plan_correlate_wgmma import plan_turned_correlate_wgmma

    with planned_by(plan_turned_correlate_wgmma, cuda, "make_plan", cuda._prepare):
        yield


@pytest.mark.parametrize(("dtype", "precision"), [("float16", None), ("bfloat16", None), ("float32", "tf32")])
@pytest.mark.parametrize("name", TURNED)
def test_a_stride_of_1_by_boxes(cupy: Any, by_turned: None, name: str, dtype: str, precision: str | None) -> None:
    check(TURNED[name], dtype, cupy, precision)


@pytest.mark.parametrize("checked", [check_infinities, check_scales, check_denormals])
@pytest.mark.parametrize("name", ["apart", "apart_along_w"])
def test_special_values_of_boxes_apart(cupy: Any, by_turned: None, name: str, checked: Any) -> None:
    checked(TURNED[name], channels_last(TURNED[name].rank, cupy), "tf32x3")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", TOGETHER)
def test_results_stored_together(cupy: Any, name: str, dtype: str) -> None:
    from cuconvt import cuda

    if cupy.cuda.Device().compute_capability != "90":
        pytest.skip("needs compute capability 9.0")
    plan, seen = planner(name)
    with planned_by(plan, cuda, "make_plan", cuda._prepare):
        check(TOGETHER[name][0], dtype, cupy, calls=1)
    assert seen == {TOGETHER[name][-1]}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("c_out", [3, 6, 12])
def test_channels_beside_the_result_stay(cupy: Any, c_out: int, dtype: str) -> None:
    layouts = {"x_layout": "channels_last", "out_layout": "some_channels"}
    check(case((1, 24, 5, 6, 9), c_out, 3, stride=2, padding=1, has_bias=True, **layouts), dtype, cupy)


@pytest.mark.parametrize("dtype", DTYPES)
def test_several_tiles_on_every_axis(cupy: Any, dtype: str) -> None:
    check(case((2, 33, 19, 21, 37), 35, 3, stride=2, padding=1, has_bias=True), dtype, cupy)


def test_a_long_sum(cupy: Any) -> None:
    problem = case((1, 512, 7, 9), 16, 5, stride=2, has_bias=True)
    for dtype in DTYPES:
        check(problem, dtype, cupy)


def test_a_long_sum_of_one_sign(cupy: Any) -> None:
    problem = case((1, 512, 7, 9), 16, 5, stride=2)
    x, weight, _ = (None if a is None else np.abs(a) for a in problem.arrays(DTYPES["float32"]))
    y = call(problem, to_gpu(x), to_gpu(weight))
    reference.Expected(problem, x, weight, None).assert_close(to_numpy(y))


# Special values.


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", SPECIAL)
def test_special_values_land_where_the_definition_puts_them(cupy: Any, name: str, precision: str | None) -> None:
    check_infinities(SPECIAL[name], to_gpu, precision)


WIDE = ("kb61", "kb77", "unet_k3s2", "gan_3d")  # what tensor cores compute


@pytest.mark.parametrize("name", WIDE)
@pytest.mark.parametrize("checked", [check_infinities, check_scales, check_denormals])
def test_special_values_of_three_products(cupy: Any, checked: Any, name: str) -> None:
    checked(FIXED[name], to_gpu, "tf32x3")


def test_ieee_keeps_denormals(cupy: Any) -> None:
    problem = case((1, 1, 4, 5, 6), 1, 1)
    x, weight, _ = problem.arrays(DTYPES["float32"])
    x, weight = x * np.float32(1e-25), weight * np.float32(1e-15)
    expected = x * weight
    assert 0 < np.abs(expected).max() < np.finfo(np.float32).tiny
    y = call(problem, to_gpu(x), to_gpu(weight), precision="ieee")
    assert np.array_equal(to_numpy(y), expected)


def test_float16_overflows_to_infinity(cupy: Any) -> None:
    x, weight = np.full((1, 2, 3), 300, np.float16), np.full((2, 1, 1), 200, np.float16)
    assert np.isposinf(to_numpy(cuconvt.conv_transpose1d(to_gpu(x), to_gpu(weight)))).all()
    # Only the result is rounded: a sum that leaves float16's range on the way and returns is exact.
    weight[1] = -199
    assert (to_numpy(cuconvt.conv_transpose1d(to_gpu(x), to_gpu(weight))) == 300).all()


# Memory, layout, streams and devices.


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_empty_batch(cupy: Any, rank: int) -> None:
    problem = case((0, 4, *(5,) * rank), 6, 3, stride=2, padding=1, has_bias=True)
    y = call(problem, *map(to_gpu, problem.arrays(DTYPES["float16"])))
    assert type(y) is cupy.ndarray
    assert (y.shape, y.dtype) == ((0, 6, *(9,) * rank), np.float16)


def test_channels_last_results(cupy: Any) -> None:
    problem = FIXED["kb77"]
    x, weight, _ = problem.arrays(DTYPES["float32"])
    contiguous = call(problem, to_gpu(x), to_gpu(weight))
    channels_last = call(problem, place(x, problem.rank, "channels_last", cupy)[0], to_gpu(weight))
    assert contiguous.flags.c_contiguous
    assert is_channels_last(channels_last, problem.rank)
    assert not channels_last.flags.c_contiguous
    assert cupy.allclose(contiguous, channels_last, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_pointer_off_by_one_element(cupy: Any, dtype: str) -> None:
    problem = case((2, 8, 4, 8, 16), 8, 3, stride=2, padding=1, has_bias=True)
    misaligned = dict.fromkeys(("x_layout", "weight_layout", "out_layout"), "misaligned")
    check(dataclasses.replace(problem, **misaligned), dtype, cupy)


def test_out_overlap_is_refused(cupy: Any) -> None:
    buffer = cupy.full((1, 2, 6, 12), cupy.nan, np.float32)
    weight = cupy.ones((2, 2, 1, 1), np.float32)
    with pytest.raises(ValueError, match="out must not overlap an input, and it shares memory with x"):
        cuconvt.conv_transpose2d(buffer, weight, out=buffer)
    with pytest.raises(ValueError, match="out must not overlap an input, and it shares memory with x"):
        cuconvt.conv_transpose2d(buffer[..., :8], weight, out=buffer[..., 4:])
    assert cupy.isnan(buffer).all()
    buffer[..., ::2] = 1
    y = cuconvt.conv_transpose2d(buffer[..., ::2], weight, out=buffer[..., 1::2])
    assert (y == 2).all()
    assert (buffer[..., ::2] == 1).all()


def test_numpy_and_cupy_do_not_mix(cupy: Any) -> None:
    x, weight = np.ones((1, 2, 5), np.float32), np.ones((2, 3, 3), np.float32)
    with pytest.raises(TypeError, match="weight must be an array of the same library as x, got numpy and cupy"):
        cuconvt.conv_transpose1d(to_gpu(x), weight)
    with pytest.raises(TypeError, match="out must be an array of the same library as x, got cupy and numpy"):
        cuconvt.conv_transpose1d(x, weight, out=cupy.empty((1, 3, 7), np.float32))


def test_cupy_errors_write_nothing(cupy: Any) -> None:
    x, weight = cupy.ones((1, 2, 5), np.float32), cupy.ones((2, 3, 3), np.float32)
    out = cupy.full((1, 3, 7), cupy.nan, np.float32)
    for changes, error in (
        ({"stride": 0}, ValueError),
        ({"precision": "double"}, ValueError),
        ({"padding": 1}, ValueError),
        ({"bias": cupy.ones(3, np.float64)}, TypeError),
        ({"weight": weight.astype(np.int32)}, TypeError),
    ):
        with pytest.raises(error):
            cuconvt.conv_transpose1d(**{"x": x, "weight": weight, "out": out, **changes})
    assert cupy.isnan(out).all()


def test_side_stream_is_followed_and_never_waited_for(cupy: Any) -> None:
    problem = FIXED["kb73"]
    values = problem.arrays(DTYPES["float32"])
    expected = reference.Expected(problem, *values)
    source, weight = to_gpu(values[0]), to_gpu(values[1])
    call(problem, source, weight)  # compiled and loaded
    before = cupy.cuda.get_current_stream(), cupy.cuda.Device()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        x = cupy.full_like(source, cupy.nan)
        out = cupy.full(problem.out_shape, cupy.nan, np.float32)
        call(problem, source, weight, out=cupy.empty_like(out))
        stream.synchronize()
        cupy.cuda.Device().synchronize()
        waiting = delay()
        cupy.copyto(x, source)  # after the delay: a kernel on any other stream reads NaN
        y = call(problem, x, weight)
        call(problem, x, weight, out=out)
        assert not waiting.done, "the call waited for the GPU"
        x.fill(cupy.nan)  # after the calls, on their stream
        results = to_numpy(y), to_numpy(out)
        assert cupy.cuda.get_current_stream() == stream
    stream.synchronize()
    assert (cupy.cuda.get_current_stream(), cupy.cuda.Device()) == before
    for result in results:
        expected.assert_close(result)


def test_default_stream_is_never_waited_for(cupy: Any) -> None:
    problem = FIXED["kb77"]
    x, weight = map(to_gpu, problem.arrays(DTYPES["float16"])[:2])
    call(problem, x, weight)
    cupy.cuda.Device().synchronize()
    waiting = delay()
    for _ in range(10):
        call(problem, x, weight)
    assert not waiting.done, "the call waited for the GPU"
    cupy.cuda.Device().synchronize()


def test_second_device(cupy: Any) -> None:
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two GPUs")
    problem = FIXED["kb72"]
    values = problem.arrays(DTYPES["float32"])
    with cupy.cuda.Device(1):
        x, weight = map(to_gpu, values[:2])
    with cupy.cuda.Device(0):
        y = call(problem, x, weight)
        assert cupy.cuda.Device().id == 0
        with pytest.raises(TypeError, match="weight must be on the same device as x, got cuda:0 and cuda:1"):
            call(problem, x, to_gpu(values[1]))
    assert y.device.id == 1
    with cupy.cuda.Device(1):
        reference.Expected(problem, *values).assert_close(to_numpy(y))


# More than 2**31 elements.


def needs_memory(cupy: Any, gib: int) -> None:
    cupy.get_default_memory_pool().free_all_blocks()
    free, _ = cupy.cuda.runtime.memGetInfo()
    if free < gib * 2**30:
        pytest.skip(f"needs {gib} GiB of free GPU memory, {free / 2**30:.1f} are free")


def assert_plane_close(problem: Problem, x: Any, weight: np.ndarray, y: Any, position: int, channel: int) -> None:
    """Compare y[:, channel, position], of batched and ungrouped arrays, with the problem of this one plane."""
    part, read = plane_of(dataclasses.replace(problem, c_out_per_group=1), position)
    expected = reference.Expected(part, to_numpy(x[:, :, read]), weight[:, channel : channel + 1], None)
    expected.assert_close(to_numpy(y[:, channel : channel + 1, position : position + 1]))


def unlike_planes(cupy: Any, rng: np.random.Generator, problem: Problem, layout: str) -> Any:
    """Return a problem's x of one image, in float16: a plane, at each position of the first axis rolled further."""
    channels, depth, *plane = problem.x_shape[1:]
    small = to_gpu(rng.standard_normal((channels, *plane)).astype(np.float16))
    if layout == "contiguous":
        x = cupy.empty(problem.x_shape, np.float16)
    else:
        x = cupy.empty((1, depth, *plane, channels), np.float16).transpose(0, 4, 1, 2, 3)
    for position in range(depth):
        x[0, :, position] = cupy.roll(small, 7 * position, axis=2)
    return x


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_output_of_more_than_2_to_the_31_elements(cupy: Any, layout: str) -> None:
    needs_memory(cupy, 20)
    problem = case((2, 3, 64, 128, 256), 72, 3, stride=2, padding=1, output_padding=1, x_layout=layout)
    assert np.prod(problem.out_shape) > 2**31
    values = problem.arrays(DTYPES["float16"])
    x, _ = place(values[0], problem.rank, layout, cupy)
    y = call(problem, x, to_gpu(values[1]))
    assert y.flags.c_contiguous if layout == "contiguous" else is_channels_last(y, problem.rank)
    for channel in (0, 35, 71):
        for position in (0, 1, 63, 126, 127):
            assert_plane_close(problem, x, values[1], y, position, channel)
    y.fill(cupy.nan)
    call(problem, x, to_gpu(values[1]), out=y)
    assert not any(cupy.isnan(y[:, channel]).any() for channel in range(72))


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_input_of_more_than_2_to_the_31_elements(cupy: Any, layout: str) -> None:
    needs_memory(cupy, 20)
    problem = case((1, 40, 1100, 160, 320), 2, (3, 1, 1), padding=(1, 0, 0))
    assert np.prod(problem.x_shape) > 2**31
    rng = np.random.default_rng(0)
    weight = rng.standard_normal(problem.weight_shape).astype(np.float16)
    x = unlike_planes(cupy, rng, problem, layout)
    y = call(problem, x, to_gpu(weight))
    for channel in (0, 1):
        for position in (0, 1, 550, 1098, 1099):
            assert_plane_close(problem, x, weight, y, position, channel)


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_channels_and_slices_that_are_far_apart(cupy: Any, layout: str) -> None:
    """Wide channels, of which 32 that are staged together are more than 2**31 elements apart, or a slice is large."""
    needs_memory(cupy, 30)
    problem = case((1, 64, 260, 512, 512), 8, (1, 2, 2), (1, 2, 2))
    assert min(np.prod(problem.x_shape), np.prod(problem.out_shape)) > 2**31
    rng = np.random.default_rng(0)
    weight = rng.standard_normal(problem.weight_shape).astype(np.float16)
    x = unlike_planes(cupy, rng, problem, layout)
    y = call(problem, x, to_gpu(weight))
    for channel in (0, 7):
        for position in (0, 130, 259):
            assert_plane_close(problem, x, weight, y, position, channel)


def test_an_element_at_offset_2_to_the_30(cupy: Any) -> None:
    """No offset that an array may have stands for an element that is not there."""
    needs_memory(cupy, 12)
    problem = case((1, 64, 257, 256, 256), 64, (3, 1, 1), padding=(1, 0, 0))
    rng = np.random.default_rng(0)
    weight = rng.standard_normal(problem.weight_shape).astype(np.float16)
    x = unlike_planes(cupy, rng, problem, "channels_last")
    y = call(problem, x, to_gpu(weight))
    for position in (255, 256):
        assert_plane_close(problem, x, weight, y, position, 35)


def test_axis_of_more_than_2_to_the_31_elements(cupy: Any) -> None:
    needs_memory(cupy, 20)
    extent = 2**30 + 37
    block = 2**22
    x = cupy.empty((1, 1, extent), np.float16)
    small = to_gpu(np.random.default_rng(0).standard_normal(block + 1024).astype(np.float16))
    for number, start in enumerate(range(0, extent, block)):
        stop = min(start + block, extent)
        x[0, 0, start:stop] = small[number % 1024 :][: stop - start]
    weight = np.array([[[0.5, -1.25, 2.0]]], np.float16)
    y = cuconvt.conv_transpose1d(x, to_gpu(weight), stride=2)
    assert y.shape == (1, 1, 2 * extent + 1)
    window = 4096
    for first in (0, 2**29 - window // 2, extent - window):
        problem = case((1, 1, window), 1, 3, stride=2)
        expected = reference.Expected(problem, to_numpy(x[:, :, first : first + window]), weight, None)
        inner = slice(2 if first else 0, 2 * window - 1 if first < extent - window else None)
        got = to_numpy(y[:, :, 2 * first : 2 * (first + window) + 1])
        kept = expected.exact.astype(np.float16)
        kept[:, :, inner] = got[:, :, inner]  # the window's ends miss the neighbours' share
        expected.assert_close(kept)
