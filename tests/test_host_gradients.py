"""The kernels of the gradients, executed on the host under sanitizers, as `test_host.py` does with the others."""

from __future__ import annotations

import dataclasses
from collections import defaultdict

import numpy as np
import pytest
from described import DEVICES, geometry_of, layout_of, struct_fields
from gradients import check, gradient_of
from host.backend import plan_family
from host.build import kernel_sources, why_not
from host_gradients import (
    RARE,
    box,
    cases,
    gradients_on_host,
    of_the_case,
    one_past_every_edge,
    plan_for,
    smallest,
    whole_words,
)
from hypothesis import given, seed, settings
from strategies import DTYPES, Problem, case, problems
from test_host_faults import KERNEL_BEFORE, UNWRITTEN, VALUES, plant

from cuconvt.grad import conv_transpose3d_input

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))

BUDGET = {family: 0.02 if family.endswith("gemm") else 0.05 for family in RARE} | {"correlate_narrow": 0.005}
CASES = {family: cases(family) for family in RARE}
ENOUGH = settings().max_examples  # geometries of a family
EXAMPLES = {family: -(-ENOUGH // len(found)) for family, found in CASES.items()}  # drawn for a specialisation


@pytest.mark.parametrize(("family", "name"), [(family, name) for family, found in CASES.items() for name in found])
def test_any_geometry(family: str, name: str) -> None:
    this = CASES[family][name]
    longest = box(family, dict(plan_for(family, this, smallest(this)).defines))[3 - len(this.spec.kernel) :]
    first, second = ("input", "conv") if family.startswith("correlate") else ("weight", "conv_weight")
    with gradients_on_host(family, this.device, this.precision, this.defines, plan=this.plan):

        @seed(len(name))
        @settings(max_examples=EXAMPLES[family], derandomize=False, database=None)
        @given(problem=problems(this.spec, tuple(edge + 2 for edge in longest), longest[-1] + 16, BUDGET[family]))
        def every_problem(problem: Problem) -> None:
            check(first, of_the_case(this, problem), this.dtype, precision=this.precision, calls=1)

        check(first, one_past_every_edge(family, this), this.dtype, precision=this.precision, calls=this.spec.calls)
        check(second, whole_words(this), this.dtype, precision=this.precision, calls=this.spec.calls)
        every_problem()


def test_each_family_meets_enough_geometries() -> None:
    for family, found in CASES.items():
        assert len(found) * EXAMPLES[family] >= ENOUGH, family


def test_copies_of_every_width_are_reached() -> None:
    """The tensor-core kernels choose at run time how they copy x and y."""
    at = [name for name, length in struct_fields() for _ in range(length)]
    reached = defaultdict(set)
    for family in ("correlate_gemm", "weight_gradient_gemm"):
        for this in CASES[family].values():
            for problem in (one_past_every_edge(family, this), whole_words(this)):
                parameters = plan_for(family, this, problem).problem
                for side in ("x", "out"):
                    reached[family, side, this.dtype == "float32"].add(parameters[at.index(f"{side}_vector")])
    for is_float32, widths in ((False, {2, 4, 16}), (True, {4, 16})):  # 8 is in test_host_copies.py
        assert reached["weight_gradient_gemm", "x", is_float32] == widths
        assert reached["weight_gradient_gemm", "out", is_float32] == widths
        assert reached["correlate_gemm", "out", is_float32] == {0, 1}


# Several rows of lanes in a warp, the last of them cut off; rows of y in whole aligned pieces, or one element longer.
PIECES = case((2, 2, 3, 3, 72), 2, (3, 2, 4), stride=2, padding=(1, 0, 1), groups=2)
NO_PIECES = dataclasses.replace(PIECES, output_padding=(0, 0, 1))


@pytest.mark.parametrize(("dtype", "ahead"), [("float16", 0), ("float16", 1), ("float32", 1)])
@pytest.mark.parametrize("family", ["correlate_few_channels", "weight_gradient_few_channels"])
def test_lanes_share_the_columns_of_a_row(family: str, dtype: str, ahead: int) -> None:
    at = [name for name, length in struct_fields() for _ in range(length)]
    operation = "input" if family.startswith("correlate") else "weight"
    with gradients_on_host(family, DEVICES[90], defines={"AHEAD": ahead}):
        for problem, in_pieces in ((PIECES, 1), (NO_PIECES, 0)):
            geometry = geometry_of(problem)
            plan = plan_family(family, geometry, dtype, layout_of(geometry), None, DEVICES[90])
            assert dict(plan.defines)["EARLY"] == 1
            assert dict(plan.defines)["SHARED_W"] > 0
            assert plan.problem[at.index("out_vector")] == in_pieces
            check(operation, problem, dtype)


# Threads of a plane's rows, and what suits them: a block of one warp; seven blocks, in the last of which one is idle.
@pytest.mark.parametrize(("extent", "threads", "idle"), [((9, 3, 6), 32, 0), ((2, 55, 13), 64, 1)])
def test_blocks_suit_the_rows_of_a_plane(extent: tuple[int, int, int], threads: int, idle: int) -> None:
    problem = case((2, 2, *extent), 2, 3, stride=2, padding=1, groups=2)
    geometry = geometry_of(problem)
    plan = plan_family("correlate_few_channels", geometry, "bfloat16", layout_of(geometry), None, DEVICES[90])
    positions = extent[1] * -(-extent[2] // dict(plan.defines)["POSITIONS_W"])
    assert plan.block == threads
    assert (-positions % threads) // 32 == idle
    with gradients_on_host("correlate_few_channels", DEVICES[90]):
        check("input", problem, "bfloat16")


@pytest.mark.parametrize(("dtype", "precision"), [("float32", "tf32"), ("bfloat16", None)])
def test_pieces_of_other_rows_do_not_leak(dtype: str, precision: str | None) -> None:
    """What is staged of a row holds elements of the rows before and after, here infinite ones that no tap reads."""
    problem = case((1, 8, 3, 4, 5), 8, (1, 1, 3), stride=(1, 2, 2), padding=(0, 0, 1))
    weight, y = problem.arrays(DTYPES[dtype])[1], gradient_of(problem, DTYPES[dtype])
    y[..., 1::2, :] = np.inf
    with gradients_on_host("correlate_narrow", DEVICES[90], precision):
        got = conv_transpose3d_input(problem.x_shape, weight, y, **problem.parameters, precision=precision)
    assert np.isfinite(got).all()


# Two boxes along every axis, two chunks of channels, strides, and taps that meet the padding.
STRIDED = case((2, 18, 3, 9, 17), 9, 3, stride=2, padding=1)
LAST_STRIDED = dataclasses.replace(STRIDED, x_layout="channels_last", out_layout="channels_last")
PROBLEMS = dict.fromkeys(RARE, (STRIDED, LAST_STRIDED))
PROBLEMS["correlate_narrow"] = (case((1, 9, 5, 6, 17), 7, 3, stride=2, padding=1),)  # y is no multiple of 16 bytes
PROBLEMS["correlate_few_channels"] = (  # rows of y that are aligned, and others
    case((2, 3, 9, 5, 6), 3, 4, stride=2, padding=1, groups=3),
    case((2, 3, 9, 5, 5), 3, 3, stride=2, padding=1, groups=3),
)
PROBLEMS["weight_gradient_few_channels"] = (case((2, 3, 9, 9, 36), 3, 4, stride=2, padding=1, groups=3),)

# Family, a replacement in its source, and the message of the check that must catch it.
FAULTS = {
    "a position of y one column late": (
        "correlate",
        "+ tap * AxisW::HOP]",
        "+ tap * AxisW::HOP + 1]",
        VALUES + "|" + UNWRITTEN,
    ),
    "a plane that is complete too early": (
        "correlate_few_channels",
        "AxisD::REACH - AxisD::back(tap_d)",
        "AxisD::REACH - AxisD::back(tap_d) / 2",
        VALUES,
    ),
    "a mask with one column too many": (
        "correlate_few_channels",
        "RowShared::columns_to_load(y_w, p.out_extent[2],",
        "RowShared::columns_to_load(y_w, p.out_extent[2] + 1,",
        "heap-buffer-overflow|belong to no argument|past its end",
    ),
    "a mask with one column too many, of rows that are not aligned": (
        "correlate_few_channels",
        "RowAlone::columns_to_load(y_w, p.out_extent[2],",
        "RowAlone::columns_to_load(y_w, p.out_extent[2] + 1,",
        "heap-buffer-overflow|belong to no argument|past its end|" + VALUES,
    ),
    "a column of the wrong neighbour": (
        "correlate_few_channels",
        "__shfl_down_sync(~0u, own[i], 1)",
        "__shfl_up_sync(~0u, own[i], 1)",
        VALUES,
    ),
    "a pair of lines that belongs to another tap": (
        "correlate_gemm",
        "rest < 0 || rest % PAIR_STEP || m >= TILES_M",
        "rest < 0 || m >= TILES_M",
        VALUES,
    ),
    "no barrier after the wait, correlate": (
        "correlate_gemm",
        "__syncthreads();  // all of the last stage",
        "// all of the last stage",
        UNWRITTEN + "|with no barrier in between",
    ),
    "what precedes a row is not left out": ("correlate_narrow", "word[i] = y[i] & keep[i];", "word[i] = y[i];", VALUES),
    "a row that begins as another one does": (
        "correlate_narrow",
        "+ plane * lane.offset_of_plane)",
        "+ plane)",
        VALUES,
    ),
    "pieces beyond the end of y": (
        "correlate_narrow",
        "* step + PIECE <= box.end",
        "* step <= box.end + PIECE",
        "reads past an array|past its end|belong to no argument",
    ),
    "a slice that is not the tap's": (
        "correlate_narrow",
        "rest % WarpD::STEP == 0 && rest",
        "rest",
        VALUES,
    ),
    "a position that is complete too early, narrow": (
        "correlate_narrow",
        "sums[REACH - AxisH::back(tap_h)]",
        "sums[REACH - AxisH::back(tap_h) / 2]",
        VALUES,
    ),
    "no barrier after the wait, narrow": (
        "correlate_narrow",
        "__syncthreads();  // all have copied",
        "// all have copied",
        UNWRITTEN + "|with no barrier in between",
    ),
    "no wait for the kernel that packs, correlate": (
        "correlate_gemm",
        "    wait_for_kernel_before();  // it packs the weights\n",
        "",
        KERNEL_BEFORE,
    ),
    "no wait for the kernel whose parts are added": (
        "weight_gradient",
        "sum[j] = 0;\nwait_for_kernel_before();",
        "sum[j] = 0;",
        KERNEL_BEFORE,
    ),
    "parts added twice": (
        "weight_gradient",
        "first += PARTS_OF_SLICE * slices",
        "first += PARTS_OF_SLICE / 2 * slices",
        VALUES,
    ),
    "parts one too far": (
        "weight_gradient",
        "min(part, count - 1) * values",
        "(min(part, count - 1) + 1) * values",
        "heap-buffer-overflow|past its end",
    ),
    "threads that are not added up": (
        "weight_gradient",
        "k < THREADS_K; ++k) sum",
        "k < THREADS_K - 1; ++k) sum",
        VALUES,
    ),
    "a plane of x of another tap": ("weight_gradient", "GAP_D = -AxisD::HOP", "GAP_D = AxisD::HOP", VALUES),
    "warps that are not added up": (
        "weight_gradient_few_channels",
        "sum += shared[warp * VALUES + value]",
        "sum += 0",
        VALUES,
    ),
    "a plane of x that meets another tap": (
        "weight_gradient_few_channels",
        "x[AxisD::back(tap_d)][t] *",
        "x[AxisD::REACH - AxisD::back(tap_d)][t] *",
        VALUES,
    ),
    "the next part's boxes": (
        "weight_gradient_gemm",
        "ahead = box_from(ahead + parts_of_boxes);",
        "ahead = box_from(ahead + 1);",
        VALUES,
    ),
    "no barrier after the wait, weight gradient": (
        "weight_gradient_gemm",
        "__syncthreads();  // what was staged",
        "// what was staged",
        UNWRITTEN + "|with no barrier in between",
    ),
    "positions that are not sorted by their remainder": (
        "weight_gradient_gemm",
        "at % Box::CLASS * Box::STEP_W + at / Box::CLASS",
        "at",
        VALUES,
    ),
    "a store to the neighbouring channel": (
        "weight_gradient_gemm",
        "sum / 2 % 2 * 8, tile_out",
        "sum / 2 % 2 * 8 + 1, tile_out",
        VALUES + "|nobody wrote|which thread",
    ),
}


def run(family: str, problems_to_check: tuple[Problem, ...], sources: dict[str, str] | None = None) -> None:
    operation = "input" if family.startswith("correlate") else "weight"
    with gradients_on_host(family, DEVICES[90], "tf32x3", sources=sources):
        for problem in problems_to_check:
            check(operation, problem, "float32", precision="tf32x3")


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_caught(name: str) -> None:
    family, before, after, caught_by = FAULTS[name]
    with pytest.raises(AssertionError, match=caught_by):
        run(family, PROBLEMS[family], plant(kernel_sources(f"{family}.cu"), before, after))


@pytest.mark.parametrize("family", PROBLEMS)
def test_without_a_fault_nothing_is_caught(family: str) -> None:
    run(family, PROBLEMS[family])
