"""weight_gradient_wgmma executed on the host, under sanitizers, with tiles drawn from those that the kernel takes."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest
from described import DEVICES, geometry_of, layout_of
from gradients import check
from host.build import kernel_sources, why_not
from host_gradients import check_drawn, specialisation
from host_weight_gradient_wgmma import LONGEST, SHARED_BYTES, Case, cases, on_host
from strategies import Ints, Problem, case
from test_host_faults import IN_USE, UNFILLED, UNWRITTEN, VALUES, plant
from test_plan import problem_of

from cuconvt import plan_weight_gradient
from cuconvt import plan_weight_gradient_wgmma_tile as tiles
from cuconvt.plan import Device, Plan, Refusal
from cuconvt.plan_weight_gradient_wgmma import FEW_PARTS, KINDS, STAGER_REGISTERS, Tile, plan_weight_gradient_wgmma

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))

BUDGET = 0.05
CASES = cases()


@pytest.mark.parametrize("name", CASES)
def test_any_geometry(name: str) -> None:
    this = CASES[name]
    rank = len(this.spec.kernel)
    with on_host(this):

        def alike(problem: Problem) -> None:
            check("weight", this.padded(problem), this.dtype, precision=this.precision, calls=1)

        ragged, *others = this.fixed_problems()
        check("weight", ragged, this.dtype, precision=this.precision)
        alone = [("weight", problem) for problem in others]
        alone += [("conv_weight", this.problem((1,) * (rank - 1) + (7,), groups)) for groups in (1, 4)]
        for operation, problem in alone:
            check(operation, problem, this.dtype, precision=this.precision, calls=1)
        check_drawn(this.spec, LONGEST[rank], BUDGET, CASES, name, alike)


def test_cases_reach_every_way_to_stage() -> None:
    """Single elements, words and pieces of x and y, one part and several, tiles of all kinds."""
    reached = Counter()
    for this in CASES.values():
        for problem in this.fixed_problems():
            plan = this.plan_for(problem)
            fields, defines = problem_of(plan), dict(plan.defines)
            reached[f"{this.kind} x {fields['x_vector'][0]}"] += 1
            reached[f"{this.kind} y {fields['out_vector'][0]}"] += 1
            reached[f"{this.kind} early {defines['EARLY'] > 0}"] += 1
            reached[f"{this.kind} boxed"] += bool(plan.maps)
            reached[f"{this.kind} pieces that threads bring"] += (
                not plan.maps and fields["x_vector"][0] == fields["out_vector"][0] == 16
            )
            reached[f"{this.kind} workers {defines['WORKERS']}"] += 1
            reached[f"parts {fields['tiles'][3] > 1}"] += 1
            reached[f"{this.kind} rows of several tiles"] += defines["TILES_M"] > 1
            reached[f"{this.kind} taps on M"] += defines["TAPS_D"] * defines["TAPS_H"] > 1
            reached[f"{this.kind} taps along W on M"] += defines["GROUPS_W"] > 1
            reached["several tiles along W"] += defines["TAPS_W"] * defines["GROUPS_W"] < defines["KERNEL_W"]
    for kind in (
        *(f"16 bits {side} {count}" for side in "xy" for count in (2, 4, 16)),
        *(f"TF32 {side} {count}" for side in "xy" for count in (4, 16)),
        "parts True",
        "parts False",
        "several tiles along W",
        *(
            f"{kind} {what}"
            for kind in ("16 bits", "TF32")
            for what in (
                *(f"workers {count}" for count in (1, 2, 3)),
                "early True",
                "boxed",
                "pieces that threads bring",
                "rows of several tiles",
                "taps on M",
                "taps along W on M",
            )
        ),
    ):
        assert reached[kind], kind


@pytest.mark.parametrize("index64", [False, True])
def test_registers_of_all_warps_are_those_that_a_block_starts_with(index64: bool) -> None:
    """A worker that asks for more than the stagers gave up waits for ever."""
    of_stager = STAGER_REGISTERS[index64]
    for workers, blocks in KINDS:
        tile = Tile(workers, 8, 1, 1, 1, 1, blocks)
        threads = 128 * (workers + 1)
        at_start = min(65536 // (threads * blocks), 255) // 8 * 8
        of_worker = tile.worker_registers(index64)
        assert workers * of_worker + of_stager <= at_start * (workers + 1)
        assert of_stager <= at_start <= of_worker


def parts_of(plan: Plan) -> int:
    return problem_of(plan)["tiles"][3]


def in_parts(tile: Tile, kernel: Ints, multiprocessors: int) -> Case:
    """Return a case with ragged channels and a row of M of no use, of which a device computes more or fewer parts."""
    spec = specialisation(kernel, (1,) * len(kernel), (1,) * len(kernel), (12, 20), (False, False))
    return Case(spec, "bfloat16", Device(90, multiprocessors, SHARED_BYTES), tile)


# A case each for how parts are added up, with the extents of x and how many parts are expected.
IN_PARTS = {
    "few": (in_parts(Tile(2, 24, 1, 2, 2, 2, 1, 1), (2, 2), 8), (14, 32), range(2, 17)),
    "few, 64 rows a block": (in_parts(Tile(1, 24, 1, 3, 12, 1, 2), (3, 12), 8), (12, 32), range(2, 17)),
    "few, no room for more than 64 rows": (in_parts(Tile(1, 48, 1, 5, 5, 1, 2), (5, 5), 8), (12, 16), range(2, 17)),
    "few, taps in groups": (in_parts(Tile(2, 24, 1, 1, 4, 2, 1, 4), (16,), 8), (600,), range(2, 17)),
    "the most of few": (in_parts(Tile(2, 24, 1, 2, 2, 2, 1, 1), (2, 2), 32), (8, 32), (FEW_PARTS,)),
    "the fewest of many": (in_parts(Tile(2, 24, 1, 2, 2, 2, 1, 1), (2, 2), 34), (8, 32), (FEW_PARTS + 1,)),
    "many": (in_parts(Tile(2, 24, 1, 2, 2, 2, 1, 1), (2, 2), 60), (40, 32), range(17, 99)),
}


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("name", IN_PARTS)
def test_parts_are_added_up(name: str, together: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By blocks that have more sums each, or fewer."""
    monkeypatch.setattr(tiles, "BLOCKS_OF_SUMS", 0 if together else 99)
    monkeypatch.setattr(plan_weight_gradient, "WIDE_BLOCKS", 0 if together else 1e9)
    this, extent, expected = IN_PARTS[name]
    problem = this.problem(extent)
    plan = this.plan_for(problem)
    assert parts_of(plan) in expected
    assert (plan.sums_a_block > 0) == (parts_of(plan) <= FEW_PARTS)
    of_64_rows = plan.sums_a_block == 64 * 8 * dict(plan.defines)["TAPS_W"]
    assert of_64_rows == (parts_of(plan) <= FEW_PARTS and not (together and "64 rows" not in name))
    with on_host(this):
        check("weight", problem, this.dtype, calls=1)


# Rows of x that copies bring, of so many runs, in a row or a plane: kernel and stride, padding before along W, and
# extents in bfloat16, of whose positions along W float32 has half.
COPIED = {
    "rows of 4": (4, (2, 2), (2, 2), 0, ((4, 32), (3, 64))),
    "rows of 4, taps that overlap": (4, (3, 3), (2, 2), 1, ((4, 32), (3, 64))),
    "rows of 8": (8, (2, 2), (2, 2), 0, ((3, 64), (2, 56))),
    "rows of 8, no stride": (8, (3, 3), (1, 1), 1, ((3, 64),)),
    "planes of 4": (4, (3, 3), (2, 2), 1, ((6, 48), (7, 24), (5, 16), (9, 8))),
    "planes of 8": (8, (2, 2), (2, 2), 0, ((6, 48), (7, 24), (5, 16), (9, 8))),
    "volumes of 4": (4, (2, 2, 4), (2, 1, 4), 0, ((3, 5, 16), (2, 3, 24))),
}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", COPIED)
def test_copies_bring_rows_of_x(name: str, dtype: str) -> None:
    runs, kernel, stride, before_w, extents = COPIED[name]
    spec = specialisation(kernel, stride, (1,) * len(kernel), (12, 20), (False, False))
    tile = Tile(2, 24, *(1,) * (len(kernel) == 2), *kernel, 2, 1, 1, 3, runs)
    this = Case(spec, dtype, Device(90, 1, SHARED_BYTES), tile, before_w=before_w)
    with on_host(this):
        for *others, width in extents:
            problem = this.whole_rows((*others, width if dtype == "bfloat16" else width // 2))
            plan = this.plan_for(problem)
            assert plan.maps[0].row_bytes == 16 * runs
            assert problem_of(plan)["patches"][0] == (name.startswith("rows") is False)
            check("weight", problem, dtype, precision=this.precision)


# ---- planted faults --------------------------------------------------------------------------------------------------


def faulty_case(tile: Tile, dtype: str, before_w: int) -> Case:
    """Return a case with ragged channels, several boxes, parts, and a row of M that is of no use."""
    spec = specialisation((2, 3), (1, 2), (1, 1), (12, 20), (False, False))
    return Case(spec, dtype, Device(90, 8, SHARED_BYTES), tile, before_w=before_w)


THIS, THIS_TF32 = (faulty_case(Tile(2, 24, 1, 2, 3, 2, 1), dtype, 1) for dtype in ("bfloat16", "float32"))
THESE_BOXED = tuple(
    Case(
        specialisation((2, 4), (2, 2), (1, 1), (12, 20), (False, False)),
        dtype,
        Device(90, 1, SHARED_BYTES),
        Tile(2, 24, 1, 2, 4, 2, 1),
        before_w=1,
    )
    for dtype in ("bfloat16", "float32")
)
THESE_FLAT = tuple(dataclasses.replace(this, tile=Tile(2, 24, 1, 2, 4, 2, 1, 1, 3, 4)) for this in THESE_BOXED)
NOT_FREE = IN_USE + "|with no wait for it"
NEVER_COME = "waits for ever|not all threads|never"
# A replacement in the source, and the message of the check that must catch it.
FAULTS = {
    "a tap one element late": ("return EARLY + tap *", "return EARLY + 1 + tap *", VALUES + "|" + UNWRITTEN),
    "the other half of a word": ("first % 2 != 0, chunks", "first % 2 == 0, chunks", VALUES),
    "the next row one early": ("row = run / box.runs %", "row = (run + 1) / box.runs %", VALUES),
    "no first run behind the last one": ("box.d * box.h * box.runs + 2; i", "box.d * box.h * box.runs; i", UNWRITTEN),
    "runs of the first step": ("next_runs = next_runs + 2 * (int)", "next_runs + 2 * (int)", VALUES),
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
        "#endif\n    publish_shared_writes();\n}",
        "#endif\n}",
        "did not publish between its write and a barrier",
    ),
    "no wait for a free stage": (
        "            ring.wait_until_free();\n            fetch(",
        "            fetch(",
        NOT_FREE,
    ),
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
    "a sum of the next channel": ("(k * 2 + of_thread % 2) *", "(k * 2 + 1 - of_thread % 2) *", VALUES),
    "a sum of the next row": (
        "NEXT_CHANNEL + row * TAPS_W + tap], out",
        "NEXT_CHANNEL + (row + 1) * TAPS_W + tap], out",
        VALUES + "|" + UNWRITTEN,
    ),
    "a part too few": (
        "for (int part = 0; part < count; part += PARTS_AT_ONCE) {",
        "for (int part = 1; part < count; part += PARTS_AT_ONCE) {",
        VALUES,
    ),
    "sums that are not there yet": (
        "+ tap] = sum.value[k];\n    }\n    __syncthreads();",
        "+ tap] = sum.value[k];\n    }",
        VALUES + "|" + UNWRITTEN + "|heap-buffer-overflow|belong to no argument|past its end",
    ),
    "the next part's boxes": (
        "index += parts_of_boxes) {\n        ring",
        "index += 1) {\n        ring",
        VALUES + "|not all threads|" + UNFILLED + "|" + NOT_FREE,
    ),
}


# The same of float32.
FAULTS_TF32 = {
    "a tap one element late": FAULTS["a tap one element late"],
    "another word": ("element / PER_WORD % CHUNK];", "element / PER_WORD / 2 % CHUNK];", VALUES),
    "y that is not rounded": (
        "to_tf32(__uint_as_float(chunks.word(i % 2, i / 2, first)))",
        "chunks.word(i % 2, i / 2, first)",
        VALUES,
    ),
    "x that is not rounded": ("word = to_tf32(__uint_as_float(word));", "word += 0;", VALUES),
    "x rounded in part": ("min(channels - walk.set * UNIT, UNIT)", "min(channels - walk.set * UNIT, BATCH)", VALUES),
    "x that another thread copied": (
        "    constexpr int BATCH = BYTES == 16",
        "    constexpr int UNIT = 4, BATCH = BYTES == 16",
        UNFILLED,
    ),
    "copies that have not landed": ("        copy_async_wait<0>();\n", "", UNFILLED),
    "boxes that have not landed": FAULTS["boxes that have not landed"],
    "another box is rounded": (
        "                finish(stages + landed.place",
        "                finish(stages + ring.place",
        UNFILLED + "|" + UNWRITTEN + "|" + NOT_FREE + "|" + VALUES,
    ),
    "a box that is not published": FAULTS["a box that is not published"],
}


# The same of boxes that copies bring.
FAULTS_BOXED = {
    "no wait for a free stage": (
        "            ring.wait_until_free();\n            bring_box(",
        "            bring_box(",
        NOT_FREE,
    ),
    "no wait for a full stage": ("        ring.wait_until_full();\n", "", UNFILLED + "|" + UNWRITTEN + "|" + NOT_FREE),
    "a run of x from elsewhere": ("describe_rows<16 * X_RUNS>(stage, 8)", "describe(stage, 128, 128)", VALUES),
    "the next row of y early": ("row * box.y_line, y", "row * (box.y_line - 8), y", VALUES + "|" + NOT_FREE),
    "a row of y of another channel": (
        "? CHANNELS_OUT * y_channel",
        "? CHANNELS_IN * y_channel",
        VALUES + "|" + NOT_FREE,
    ),
    "another row of x": ("of_x.h + row % rows", "of_x.h", VALUES),
    "bytes that do not come": ("box.pieces() *", "(box.pieces() + 1) *", NEVER_COME),
}


# The same of planes of x, as rows of more than two runs.
FAULTS_FLAT = {
    "other runs of a row": ("% (X_RUNS / 2) ? 2 :", "% (X_RUNS / 2) ? 0 :", VALUES),
    "other runs of the next row": ("X_RUNS * CHANNELS_IN - X_RUNS + 2)", "X_RUNS * CHANNELS_IN - X_RUNS)", VALUES),
    "rows over each other": ("to + i * X_RUNS * CHANNELS_IN", "to + i * 2 * CHANNELS_IN", NOT_FREE + "|" + VALUES),
    "rows one by one": ("rows = flat ? 1 : box.h", "rows = box.h", NEVER_COME),
    "each box from the first row on": ("flat ? h * (int)p.x_extent[2] : w", "flat ? 0 : w", VALUES),
    "a row of x further": ("d, flat ? 0 : h, flat", "d, h, flat", VALUES),
}


def run(this: Case, sources: dict[str, str] | None = None) -> None:
    with on_host(this, sources):
        if this in (*THESE_BOXED, *THESE_FLAT):
            is_flat, is_wide = this in THESE_FLAT, this.dtype == "bfloat16"
            problem = this.whole_rows((30, 24 if is_wide else 12) if is_flat else (60, 32 if is_wide else 16))
            plan = this.plan_for(problem)
            assert plan.maps
            assert problem_of(plan)["patches"][0] == is_flat
            check("weight", problem, this.dtype, precision=this.precision)
            return
        for extent in ((22, 16), (26, 19), (1, 1)):  # in pieces, single elements, and a sum of a few products
            padding = (0, 1) if extent[1] == 16 else 0
            check("weight", this.problem(extent, output_padding=padding), this.dtype, precision=this.precision)


@pytest.mark.parametrize(
    ("this", "fault"),
    [
        *((THIS, fault) for fault in FAULTS.values()),
        *((THIS_TF32, fault) for fault in FAULTS_TF32.values()),
        *((this, fault) for this in THESE_BOXED for fault in FAULTS_BOXED.values()),
        *((THESE_FLAT[0], fault) for fault in FAULTS_FLAT.values()),
    ],
    ids=[
        *FAULTS,
        *(f"TF32: {name}" for name in FAULTS_TF32),
        *(f"{kind}, boxed: {name}" for kind in ("bfloat16", "TF32") for name in FAULTS_BOXED),
        *(f"bfloat16, flat: {name}" for name in FAULTS_FLAT),
    ],
)
def test_fault_is_caught(this: Case, fault: tuple[str, str, str]) -> None:
    before, after, caught_by = fault
    with pytest.raises(AssertionError, match=caught_by):
        run(this, plant(kernel_sources("weight_gradient_wgmma.cu"), before, after))


@pytest.mark.parametrize(
    "this",
    [THIS, THIS_TF32, *THESE_BOXED, *THESE_FLAT],
    ids=[f"{kind}{how}" for how in ("", ", boxed", ", flat") for kind in ("bfloat16", "TF32")],
)
def test_without_a_fault_nothing_is_caught(this: Case) -> None:
    run(this)


def test_refusals_say_why() -> None:
    geometry = geometry_of(case((2, 18, 3, 9, 17), 9, 3, stride=2, padding=1))
    for dtype, device, reason in (
        ("float16", Device(100, 148, SHARED_BYTES), "needs compute capability 9.0, the device has 10.0"),
        ("float64", Device(90, 132, SHARED_BYTES), "in float16, bfloat16 and TF32, not in float64"),
        ("float16", Device(90, 132, 1024), "no box with what its taps reach fits"),
    ):
        refusal = plan_weight_gradient_wgmma(geometry, dtype, layout_of(geometry), None, device)
        assert isinstance(refusal, Refusal)
        assert reason in refusal.reason
    for precision in ("tf32x3", "ieee"):
        refusal = plan_weight_gradient_wgmma(geometry, "float32", layout_of(geometry), precision, DEVICES[90])
        assert isinstance(refusal, Refusal)
        assert f"not in {precision}" in refusal.reason


def test_boxes_are_whole_runs_and_pairs_of_them() -> None:
    for this in CASES.values():
        for problem in this.fixed_problems():
            plan = this.plan_for(problem)
            d, h, w = problem_of(plan)["box"]
            run = 4 if this.dtype == "float32" else 8
            assert w % run == 0
            assert d * h * w % (2 * run) == 0
            assert plan.shared_bytes <= SHARED_BYTES
