"""weight_gradient_planes executed on the host, under sanitizers, with tiles drawn from those that the kernel takes."""

from __future__ import annotations

import dataclasses
from collections import Counter

import numpy as np
import pytest
from described import DEVICES, geometry_of, layout_of
from gradients import check, direct_weight, gradient_of
from host.build import kernel_sources, why_not
from host_gradients import check_drawn, specialisation
from host_weight_gradient_planes import SHARED_BYTES, Case, cases, layout_for, on_host
from strategies import DTYPES, Ints, Problem, case
from test_host_faults import IN_USE, UNFILLED, UNWRITTEN, VALUES, plant
from test_plan import problem_of

import cuconvt
from cuconvt.plan import Device, Refusal
from cuconvt.plan_weight_gradient_planes import (
    FEW_PARTS,
    KINDS,
    STAGER_REGISTERS,
    Shape,
    Tile,
    Work,
    plan_weight_gradient_planes,
    tiles,
)

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))

CASES = cases()
BUDGET = 0.05
LONGEST = {1: (120,), 2: (8, 20), 3: (3, 5, 12)}


@pytest.mark.parametrize("name", CASES)
def test_any_geometry(name: str) -> None:
    this = CASES[name]
    rank = len(this.spec.kernel)
    with on_host(this):

        def alike(problem: Problem) -> None:
            # Layouts that are read as others are programs of their own.
            drawn = dataclasses.replace(problem, x_layout=this.spec.x_layouts[0], out_layout=this.spec.out_layouts[0])
            if same_program(this, drawn):
                check("weight", drawn, this.dtype, calls=1)

        ragged, *others = this.fixed_problems()
        check("weight", ragged, this.dtype)
        for problem in others:
            check("weight", problem, this.dtype, calls=1)
        check_drawn(this.spec, LONGEST[rank], BUDGET, CASES, name, alike)


def same_program(this: Case, problem: Problem) -> bool:
    """Whether a problem has pieces where the case has them: those of a few elements may seem to have none."""
    shapes = [Shape.of(geometry_of(p), layout_for(p), False) for p in (problem, this.fixed_problems()[0])]
    return (shapes[0].x_last, shapes[0].y_last) == (shapes[1].x_last, shapes[1].y_last)


def test_cases_reach_every_way_to_stage() -> None:
    """Single elements, words and pieces of rows, and pieces of channels; one part and several, tiles of all kinds."""
    reached = Counter()
    for this in CASES.values():
        for problem in this.fixed_problems():
            plan = this.plan_for(problem)
            fields, defines = problem_of(plan), dict(plan.defines)
            for array, width, letter in (("X", "x_vector", "x"), ("Y", "out_vector", "y")):
                reached[f"{letter} {'copied' if defines[f'{array}_CHANNELS_LAST'] else fields[width][0]}"] += 1
            reached[f"workers {defines['WORKERS']}"] += 1
            reached[f"stagers {defines['STAGER_GROUPS']}"] += 1
            reached[f"rows of x {defines['ROWS_OF_X']}"] += 1
            reached[f"parts {fields['tiles'][3] > 1}"] += 1
            reached["several tiles of rows"] += defines["TILES_M"] > 1
            reached["taps of a phase"] += max(defines[f"APART_{axis}"] for axis in "DHW") > 1
            reached["taps of a phase along W"] += defines["APART_W"] > 1
            reached["planes"] += defines["APART_W"] == 1 < min(defines["STRIDE_W"], defines["TAPS_W"])
            reached["units of no use"] += (
                defines["TAPS_D"] * defines["TAPS_H"] * defines["TAPS_W"] * defines["TILES_M"] % defines["WORKERS"] > 0
            )
            _, h, w = fields["box"]
            reached[f"pairs along {'W' if w % 16 == 0 else 'H' if h % 2 == 0 else 'D'}"] += 1
    for kind in (
        *(f"{side} {count}" for side in "xy" for count in (2, 4, 16, "copied")),
        *(f"workers {count}" for count in (1, 2, 3)),
        *(f"{what} {which}" for what, which in (("stagers", 1), ("stagers", 2), ("rows of x", 0), ("rows of x", 1))),
        *("parts True", "parts False", "several tiles of rows", "taps of a phase", "taps of a phase along W", "planes"),
        *("units of no use", "pairs along W", "pairs along H", "pairs along D"),
    ):
        assert reached[kind], f"{kind}: {reached}"


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("index64", [False, True])
def test_registers_of_all_warps_are_those_that_a_block_starts_with(index64: bool, turned: bool) -> None:
    """A worker that asks for more than the stagers gave up waits for ever."""
    least = STAGER_REGISTERS[turned][index64]
    for workers, stagers, blocks in KINDS:
        tile = Tile(workers, stagers, 0, 1, 1, (1, 1, 1), (1, 1, 1), blocks)
        at_start = min(65536 // (128 * (workers + stagers) * blocks), 255) // 8 * 8
        of_worker, of_stager = tile.registers(least)
        assert workers * of_worker + stagers * of_stager <= at_start * (workers + stagers)
        assert least <= of_stager <= at_start <= of_worker


def test_tiles_of_wide_layers_have_registers_for_their_sums() -> None:
    geometry = geometry_of(case((2, 256, 8, 8, 8), 128, 4, 2, 1))
    for last in (False, True):
        work = Work(Shape.of(geometry, layout_of(geometry, last), False))
        found = list(tiles(work))
        assert found
        for tile in found:
            assert tile.sums + 32 <= tile.registers(work.shape.stager_registers)[0]


def in_parts(tile: Tile, kernel: Ints, stride: int = 1) -> Case:
    """Return a case with ragged channels."""
    spec = specialisation(kernel, (stride,) * len(kernel), (1,) * len(kernel), (12, 20), (False, False))
    return Case(spec, "bfloat16", Device(90, 8, SHARED_BYTES), tile)


# A case each for how parts are added up, with the extents of x and the number of parts.
IN_PARTS = {
    "few": (in_parts(Tile(2, 1, 0, 1, 2, (1, 1, 2), (1, 1, 1)), (3, 2)), (14, 32), 3),
    "few, rows of x": (in_parts(Tile(2, 1, 1, 1, 3, (1, 2, 2), (1, 2, 1)), (4, 3), 2), (14, 32), 2),
    "few of many taps": (in_parts(Tile(1, 1, 0, 1, 2, (1, 1, 10), (1, 1, 1)), (90,)), (400,), 2),
    "the most of few": (in_parts(Tile(1, 1, 0, 1, 2, (1, 2, 2), (1, 1, 1), 2), (2, 2)), (16, 32), FEW_PARTS),
    "the fewest of many": (in_parts(Tile(1, 1, 0, 1, 2, (1, 2, 2), (1, 1, 1)), (2, 2)), (16, 32), FEW_PARTS + 1),
    "many": (in_parts(Tile(2, 1, 1, 1, 3, (1, 2, 2), (1, 1, 1)), (2, 2)), (16, 32), 40),
}


@pytest.mark.parametrize("name", IN_PARTS)
def test_parts_are_added_up(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    this, extent, parts = IN_PARTS[name]
    monkeypatch.setattr(Work, "parts", lambda *_: [parts])
    problem = this.problem(extent)
    plan = this.plan_for(problem)
    assert problem_of(plan)["tiles"][3] == parts
    assert (plan.sums_a_block > 0) == (parts <= FEW_PARTS and "many taps" not in name)
    with on_host(this):
        check("weight", problem, this.dtype, calls=1)


def test_a_gradient_is_finite_only_where_the_definition_is() -> None:
    this = THIS
    problem = this.problem((9, 13))
    x, _, _ = problem.arrays(DTYPES[this.dtype])
    y = gradient_of(problem, DTYPES[this.dtype])
    x[0, 1, 4, 12], x[1, 14, 0, 0], y[0, 3, 5, 6], y[1, 21, 1, 0] = np.inf, np.nan, -np.inf, np.inf
    with np.errstate(invalid="ignore"):
        expected = direct_weight(problem, x, y)
    with on_host(this):
        got = cuconvt.grad.conv_transpose2d_weight(x, problem.weight_shape, y, **problem.parameters)
    finite = np.isfinite(got.astype(np.float32))
    assert not finite[~np.isfinite(expected)].any()
    assert finite[:2].any()  # of other channels


# ---- planted faults --------------------------------------------------------------------------------------------------


def faulty_case(tile: Tile, last: bool) -> Case:
    """Return a case with ragged channels, several boxes and parts, and planes of positions."""
    channels = (24, 40) if last else (12, 20)
    spec = specialisation((2, 3), (1, 2), (1, 1), channels, (last, last))
    return Case(spec, "bfloat16", Device(90, 8, SHARED_BYTES), tile)


THIS = faulty_case(Tile(2, 1, 0, 1, 2, (1, 2, 3), (1, 1, 1)), False)
LAST = faulty_case(Tile(2, 1, 1, 1, 5, (1, 2, 3), (1, 1, 1)), True)
NOT_FREE = IN_USE + "|with no wait for it"
# A replacement in the source, and the message of the check that must catch it.
FAULTS = {
    "a tap one position late": (
        "+ w * AlongW::HOP / AlongW::STEP;",
        "+ 1 + w * AlongW::HOP / AlongW::STEP;",
        VALUES + "|" + UNWRITTEN,
    ),
    "a tap of another plane": (
        "+ w % AlongW::STEP * box.y_width",
        "+ (w + 1) % AlongW::STEP * box.y_width",
        VALUES + "|" + UNWRITTEN,
    ),
    "a tap's row of another tap": ("+ h * AlongH::HOP;", "+ 0;", VALUES),
    "the second run of x from elsewhere": ("16 * steps.x_pair,", "16 * steps.x_pair + 16,", VALUES + "|" + UNWRITTEN),
    "groups of channels too near": (
        "steps.y_pair, 16 * box.y_group)",
        "steps.y_pair, 16 * box.y_row)",
        VALUES + "|" + UNWRITTEN,
    ),
    "no next row": ("of_y = of_y + steps.y_row;", "of_y = of_y + 0;", VALUES + "|" + UNWRITTEN),
    "the other half of a word": ("take_halves(words, i % 2)", "take_halves(words, 1 - i % 2)", VALUES),
    "an element early": (
        "int)((first.w * (Index)DILATION_W",
        "int)((1 + first.w * (Index)DILATION_W",
        VALUES + "|misaligned|past",
    ),
    "<= for < at an edge": (
        "within(w + item.w, extent[2])",
        "within(w + item.w, extent[2] + 1)",
        "heap-buffer-overflow|belong to no argument|past its end|past an array|" + VALUES,
    ),
    "channels that nobody staged": ("if (channels_in < CHANNELS_IN || ", "if (false && ", UNWRITTEN),
    "a box that is not published": (
        "        publish_shared_writes();\n        barrier_arrive(full",
        "        barrier_arrive(full",
        "did not publish between its write and a barrier",
    ),
    "no wait for a free stage": ("            ring.wait_until_free();\n", "", NOT_FREE),
    "no wait for a full stage": ("        ring.wait_until_full();\n", "", UNFILLED + "|" + UNWRITTEN + "|" + NOT_FREE),
    "a stage that is free too early": (
        "        used = ring.place;\n",
        "        if (threadIdx.x % 32 == 0) barrier_arrive(ring.free + ring.place);\n",
        NOT_FREE,
    ),
    "no wait for the last products": (
        "    wgmma_wait<0>();\n\n    const auto",
        "    const auto",
        "before thread .* waits for its wgmma",
    ),
    "no fence": ("            wgmma_fence();\n", "", "without a wgmma_fence"),
    "a sum of the next channel": (
        "column = lane % 4 * 2 + of_thread % 2;",
        "column = lane % 4 * 2 + 1 - of_thread % 2;",
        VALUES,
    ),
    "a part too few": ("int part = 0; part < count; ++part", "int part = 1; part < count; ++part", VALUES),
    "sums that are not there yet": (
        "sums[to[i]] = sum[i];\n    }\n    __syncthreads();",
        "sums[to[i]] = sum[i];\n    }",
        VALUES + "|" + UNWRITTEN,
    ),
}
# The same where pieces are copied.
FAULTS_LAST = {
    "a tap one position late": FAULTS["a tap one position late"],
    "the remainder of another plane": ("remainder_of(plane)) *", "1 - remainder_of(plane)) *", VALUES),
    "copies that have not landed": ("        copy_async_wait<0>();\n", "", UNFILLED),
    "boxes that have not landed": ("copy_async_wait<IN_FLIGHT>();", "copy_async_wait<IN_FLIGHT + 1>();", UNFILLED),
    "the next eight channels": ("item.offset + 8 * group : 0)", "item.offset + 8 * (group + 1) : 0)", VALUES + "|past"),
    "a box that is not published": FAULTS["a box that is not published"],
}


def run(this: Case, sources: dict[str, str] | None = None) -> None:
    with on_host(this, sources):
        for extent in ((22, 16), (26, 19)):  # in words or pieces, and single elements
            padding = (0, 1) if extent[1] == 16 else 0
            check("weight", this.problem(extent, output_padding=padding), this.dtype)


@pytest.mark.parametrize(
    ("this", "fault"),
    [*((THIS, fault) for fault in FAULTS.values()), *((LAST, fault) for fault in FAULTS_LAST.values())],
    ids=[*FAULTS, *(f"channels-last: {name}" for name in FAULTS_LAST)],
)
def test_fault_is_caught(this: Case, fault: tuple[str, str, str]) -> None:
    before, after, caught_by = fault
    with pytest.raises(AssertionError, match=caught_by):
        run(this, plant(kernel_sources("weight_gradient_planes.cu"), before, after))


@pytest.mark.parametrize("this", [THIS, LAST], ids=["rows", "channels-last"])
def test_without_a_fault_nothing_is_caught(this: Case) -> None:
    run(this)


def test_refusals_say_why() -> None:
    geometry = geometry_of(case((2, 18, 3, 9, 17), 9, 3, stride=2, padding=1))
    for dtype, device, reason in (
        ("float16", Device(100, 148, SHARED_BYTES), "needs compute capability 9.0, the device has 10.0"),
        ("float64", Device(90, 132, SHARED_BYTES), "in float16 and bfloat16, not in float64"),
        ("float16", Device(90, 132, 1024), "no box with what its taps reach fits"),
    ):
        refusal = plan_weight_gradient_planes(geometry, dtype, layout_of(geometry), None, device)
        assert isinstance(refusal, Refusal)
        assert reason in refusal.reason
    refusal = plan_weight_gradient_planes(geometry, "float32", layout_of(geometry), "tf32", DEVICES[90])
    assert isinstance(refusal, Refusal)
    assert "not in tf32" in refusal.reason


def test_boxes_are_whole_runs_and_pairs_of_them() -> None:
    for this in CASES.values():
        for problem in this.fixed_problems():
            plan = this.plan_for(problem)
            d, h, w = problem_of(plan)["box"]
            assert w % 8 == 0
            assert d * h * w % 16 == 0
            assert plan.shared_bytes <= SHARED_BYTES
