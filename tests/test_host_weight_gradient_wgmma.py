"""weight_gradient_wgmma executed on the host, under sanitizers, with tiles drawn from those that the kernel takes."""

from __future__ import annotations

from collections import Counter

import pytest
from described import geometry_of, layout_of
from gradients import check
from host.build import kernel_sources, why_not
from host_gradients import specialisation
from host_weight_gradient_wgmma import LONGEST, SHARED_BYTES, Case, cases, on_host
from hypothesis import given, seed, settings
from strategies import Problem, case, problems
from test_host_faults import IN_USE, UNFILLED, UNWRITTEN, VALUES, plant
from test_plan import problem_of

from cuconvt.plan import Device, Refusal
from cuconvt.plan_weight_gradient_wgmma import KINDS, STAGER_REGISTERS, Tile, plan_weight_gradient_wgmma

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))

BUDGET = 0.05
CASES = cases()
EXAMPLES = -(-settings().max_examples // len(CASES))  # geometries drawn for a specialisation


@pytest.mark.parametrize("name", CASES)
def test_any_geometry(name: str) -> None:
    this = CASES[name]
    rank = len(this.spec.kernel)
    with on_host(this):

        @seed(len(name))
        @settings(max_examples=EXAMPLES, derandomize=False, database=None)
        @given(problem=problems(this.spec, LONGEST[rank], LONGEST[rank][-1] + 16, BUDGET))
        def every_problem(problem: Problem) -> None:
            check("weight", this.padded(problem), this.dtype)

        for problem in this.fixed_problems():
            check("weight", problem, this.dtype)
        for groups in (1, 4):
            check("conv_weight", this.problem((1,) * (rank - 1) + (7,), groups), this.dtype)
        every_problem()


def test_cases_reach_every_way_to_stage() -> None:
    """Single elements, words and pieces of x and y, one part and several, tiles of all kinds."""
    reached = Counter()
    for this in CASES.values():
        for problem in this.fixed_problems():
            plan = this.plan_for(problem)
            fields, defines = problem_of(plan), dict(plan.defines)
            reached[f"x {fields['x_vector'][0]}"] += 1
            reached[f"y {fields['out_vector'][0]}"] += 1
            reached[f"parts {fields['tiles'][3] > 1}"] += 1
            reached[f"workers {defines['WORKERS']}"] += 1
            reached["rows of several tiles"] += defines["TILES_M"] > 1
            reached["taps on M"] += defines["TAPS_D"] * defines["TAPS_H"] > 1
            reached["taps along W on M"] += defines["GROUPS_W"] > 1
            reached["several tiles along W"] += defines["TAPS_W"] * defines["GROUPS_W"] < defines["KERNEL_W"]
    for kind in (
        *(f"{side} {count}" for side in "xy" for count in (2, 4, 16)),
        "parts True",
        "parts False",
        *(f"workers {count}" for count in (1, 2, 3)),
        "rows of several tiles",
        "taps on M",
        "taps along W on M",
        "several tiles along W",
    ):
        assert reached[kind], kind


def test_registers_of_all_warps_are_those_that_a_block_starts_with() -> None:
    """A worker that asks for more than the stagers gave up waits for ever."""
    for workers, blocks in KINDS:
        tile = Tile(workers, 8, 1, 1, 1, 1, blocks)
        threads = 128 * (workers + 1)
        at_start = min(65536 // (threads * blocks), 255) // 8 * 8
        assert workers * tile.worker_registers + STAGER_REGISTERS <= at_start * (workers + 1)
        assert STAGER_REGISTERS <= at_start <= tile.worker_registers


# ---- planted faults --------------------------------------------------------------------------------------------------


def faulty_case(tile: Tile, before_w: int) -> Case:
    """Return a case with ragged channels, several boxes, parts, and a row of M that is of no use."""
    spec = specialisation((2, 3), (1, 2), (1, 1), (12, 20), (False, False))
    return Case(spec, "bfloat16", Device(90, 8, SHARED_BYTES), tile, before_w=before_w)


THIS = faulty_case(Tile(2, 24, 1, 2, 3, 2, 1), 1)
NOT_FREE = IN_USE + "|with no wait for it"
# A replacement in the source, and the message of the check that must catch it.
FAULTS = {
    "a tap one element late": ("return EARLY + tap *", "return EARLY + 1 + tap *", VALUES + "|" + UNWRITTEN),
    "the other half of a word": ("first % 2 != 0, chunks", "first % 2 == 0, chunks", VALUES),
    "the next row one early": ("if (++w == box.runs)", "if (++w == box.runs + 1)", VALUES + "|" + UNWRITTEN),
    "a run of x from elsewhere": ("describe(stage, box.x_run * 16, 128)", "describe(stage, 128, 128)", VALUES),
    "a tap's row of another tap": ("+ tap_h_of_row(row) * AxisH::HOP;", "+ 0;", VALUES),
    "<= for < at an edge": (
        "within(w + item.w, extent[2])",
        "within(w + item.w, extent[2] + 1)",
        "heap-buffer-overflow|belong to no argument|past its end|past an array|" + VALUES,
    ),
    "channels that nobody staged": ("if (channels_in < CHANNELS_IN || ", "if (false && ", UNWRITTEN),
    "copies that have not landed": ("        copy_async_wait<0>();\n", "", UNFILLED),
    "boxes that have not landed": ("copy_async_wait<IN_FLIGHT>();", "copy_async_wait<IN_FLIGHT + 1>();", UNFILLED),
    "a box that is not published": (
        "                publish_shared_writes();\n                barrier_arrive",
        "                barrier_arrive",
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
    "registers of A in use": (
        "                wgmma_wait<0>();\n                if (tile",
        "                if (tile",
        "register with A .* was written|" + NOT_FREE,
    ),
    "registers of A without a fence": ("                wgmma_fence();\n", "", "without a wgmma_fence"),
    "the next part's boxes": (
        "index += parts_of_boxes) {\n        ring",
        "index += 1) {\n        ring",
        VALUES + "|not all threads|" + UNFILLED + "|" + NOT_FREE,
    ),
}


def run(sources: dict[str, str] | None = None) -> None:
    with on_host(THIS, sources):
        for extent in ((22, 16), (26, 19)):  # in pieces, and single elements
            check("weight", THIS.problem(extent, output_padding=(0, 1) if extent[1] == 16 else 0), THIS.dtype)


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_caught(name: str) -> None:
    before, after, caught_by = FAULTS[name]
    with pytest.raises(AssertionError, match=caught_by):
        run(plant(kernel_sources("weight_gradient_wgmma.cu"), before, after))


def test_without_a_fault_nothing_is_caught() -> None:
    run()


def test_refusals_say_why() -> None:
    geometry = geometry_of(case((2, 18, 3, 9, 17), 9, 3, stride=2, padding=1))
    for dtype, device, reason in (
        ("float16", Device(100, 148, SHARED_BYTES), "needs compute capability 9.0, the device has 10.0"),
        ("float32", Device(90, 132, SHARED_BYTES), "in float16 and bfloat16, not in float32"),
        ("float16", Device(90, 132, 1024), "no box with what its taps reach fits"),
    ):
        refusal = plan_weight_gradient_wgmma(geometry, dtype, layout_of(geometry), None, device)
        assert isinstance(refusal, Refusal)
        assert reason in refusal.reason


def test_boxes_are_whole_runs_and_pairs_of_them() -> None:
    for this in CASES.values():
        for problem in this.fixed_problems():
            plan = this.plan_for(problem)
            d, h, w = problem_of(plan)["box"]
            assert w % 8 == 0
            assert d * h * w % 16 == 0
            assert plan.shared_bytes <= SHARED_BYTES
