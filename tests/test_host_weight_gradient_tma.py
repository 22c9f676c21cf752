"""weight_gradient_tma executed on the host, under sanitizers, with tiles drawn from those that the kernel takes."""

from __future__ import annotations

import ctypes
import dataclasses
import threading
from collections import Counter
from contextlib import nullcontext
from math import prod
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from described import DEVICES, geometry_of, layout_of, problem_of, struct_fields
from fixed_cases import FIXED
from gradients import check, direct_weight, gradient_of
from host.build import kernel_sources, why_not
from host_gradients import check_drawn, gradients_on_host, share_of, specialisation
from host_weight_gradient_tma import SHARED_BYTES, Case, cases, layout_for, on_host
from strategies import DTYPES, Ints, Problem, case
from test_host_faults import IN_USE, UNWRITTEN, VALUES, plant

import cuconvt
from cuconvt import plan_turn
from cuconvt import plan_weight_gradient_tma as planner
from cuconvt import plan_weight_gradient_tma_work as working
from cuconvt.plan import Device, Plan, Refusal
from cuconvt.plan_turn import TURN_FIELDS
from cuconvt.plan_views import batch_as_depth
from cuconvt.plan_weight_gradient_tma import (
    FEW_PARTS,
    KINDS,
    OTHER_REGISTERS,
    choose_tile,
    plan_weight_gradient_tma,
    tiles,
)
from cuconvt.plan_weight_gradient_tma_sides import Sides
from cuconvt.plan_weight_gradient_tma_work import COPIER_REGISTERS, MAX_REGISTERS, Shape, Share, Tile, Work
from cuconvt.tensor_map import TensorMap, reads

pytestmark = [
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
    pytest.mark.usefixtures("rows_of_several_blocks"),
]

CASES = cases()
BUDGET = 0.05
LONGEST = {1: (120,), 2: (8, 20), 3: (3, 5, 12)}


@pytest.mark.parametrize("name", CASES)
def test_any_geometry(name: str) -> None:
    this = CASES[name]
    rank = len(this.spec.kernel)
    ragged, *others = this.fixed_problems()
    defines = this.plan_for(ragged).defines
    with on_host(this):

        def alike(problem: Problem) -> None:
            # Layouts that are read as others are programs of their own.
            drawn = dataclasses.replace(problem, x_layout=this.spec.x_layouts[0], out_layout=this.spec.out_layouts[0])
            plan = plan_weight_gradient_tma(
                geometry_of(drawn), this.dtype, layout_for(drawn), this.precision, this.device, this.tile
            )
            if isinstance(plan, Plan) and plan.defines == defines:
                check("weight", drawn, this.dtype, precision=this.precision, calls=1)

        check("weight", ragged, this.dtype, precision=this.precision)
        for problem in others:
            check("weight", problem, this.dtype, precision=this.precision, calls=1)
        check_drawn(this.spec, LONGEST[rank], BUDGET, CASES, name, alike)


def test_cases_reach_every_way() -> None:
    reached = Counter()
    for this in CASES.values():
        for problem in this.fixed_problems():
            plan = this.plan_for(problem)
            fields, defines, share = problem_of(plan), dict(plan.defines), share_of(plan)
            turns = np.array(plan.turns or (0,) * 2 * TURN_FIELDS).reshape(2, TURN_FIELDS)
            for side, place, turn in zip("xy", plan.turned or (-1, -1), turns, strict=True):
                if side == "x" and this.precision:
                    reached[f"prepared {'in eights' if turn[11] else 'one by one'}"] += 1
                else:
                    reached[f"{side} {'as it is' if place < 0 else 'turned in bulk' if turn[15] else 'turned'}"] += 1
            reached[this.precision or "16 bits"] += 1
            reached[f"workers {defines['WORKERS']}"] += 1
            reached[f"rows of x {defines['ROWS_OF_X']}"] += 1
            reached["several tiles of rows"] += defines["TILES_M"] > 1
            reached["columns of several copies"] += defines["TILES_N"] > 8
            reached["taps of a phase"] += max(defines[f"APART_{axis}"] for axis in "DHW") > 1
            reached["elements of which some are read"] += max(defines[f"STRIDE_{axis}"] for axis in "DHW") > 1
            together, taps = fields["out_vector"][0], prod(defines[f"KERNEL_{axis}"] for axis in "DHW")
            reached["in order" if together else "by taps"] += 1
            reached["more patches than keep warps busy"] += together > max(1, -(-16 // taps))
            reached["a tile has rests"] += share.rest > 0
            reached["a tile has blocks of its own"] += share.whole > 0
            reached["units of no use"] += (
                defines["TAPS_D"] * defines["TAPS_H"] * defines["TAPS_W"] * defines["TILES_M"] % defines["WORKERS"] > 0
            )
            d, h, w = fields["box"]
            if defines["TAPS_W"] > 1:
                reached[f"pairs along {'W' if w % 16 == 0 else 'H' if h % 2 == 0 else 'D'}"] += 1
                assert w % 8 == 0
            assert plan.shared_bytes <= SHARED_BYTES
            assert d * h * w % 16 == 0
            assert fields["plane"][0] >= 2
    for kind in (
        *(f"{side} {how}" for side in "xy" for how in ("as it is", "turned", "turned in bulk")),
        *("prepared in eights", "prepared one by one"),
        *(f"workers {count}" for count in (1, 2, 3)),
        *("16 bits", "tf32", "tf32x3"),
        *("rows of x 0", "rows of x 1", "several tiles of rows", "columns of several copies", "taps of a phase"),
        *("elements of which some are read", "units of no use"),
        *("in order", "by taps", "more patches than keep warps busy"),
        *("a tile has rests", "a tile has blocks of its own", "pairs along W", "pairs along H", "pairs along D"),
    ):
        assert reached[kind], f"{kind}: {reached}"


@pytest.mark.parametrize("name", ["1d", "2d-float32", "3d-16-bits", "3d-float32"])
@pytest.mark.parametrize("last", [False, True])
def test_many_images_take_several_launches(name: str, last: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    dtype, precision = ("bfloat16", None) if "16" in name else ("float32", "tf32x3" if "2d" in name else "tf32")
    rank = int(name[0])
    rows = 64 if dtype == "bfloat16" else 16
    tile = Tile(1, 0, 1, 2, (1, 1, 2), (1, 1, 1), rows=rows)
    spec = specialisation((3,) * rank, (1,) * rank, (1,) * rank, (16, 12 if last else 11), (last, last))
    this = Case(spec, dtype, Device(90, 3, SHARED_BYTES), tile, precision)
    problem = case(
        (6, 16, *{1: (40,), 2: (5, 19), 3: (2, 3, 9)}[rank]),
        12 if last else 11,
        3,
        1,
        1,
        x_layout=spec.x_layouts[0],
        out_layout=spec.out_layouts[0],
    )
    whole = this.plan_for(problem)
    assert not whole.images
    turned = whole.workspace_bytes - min(place for place in whole.turned if place >= 0)
    with on_host(this):
        launches = set()
        for share in (1.4, 2, 3):
            room = int(4 * tile.values * share_of(whole).tiles + turned / share)
            monkeypatch.setattr(planner, "MAX_WORKSPACE_BYTES", room)
            plan = this.plan_for(problem)
            assert plan.workspace_bytes <= room
            launches.add(plan.images[0])
            # All but the first one add to what is there, and nothing else differs.
            names = [name for name, length in struct_fields() for _ in range(length)]
            pairs = zip(plan.problem, plan.problem_of_next, strict=True)
            assert [i for i, (of_first, of_next) in enumerate(pairs) if of_first != of_next] == [names.index("patches")]
            assert f", {plan.images[0]} launches," in str(plan)
            check("weight", problem, dtype, precision=precision, calls=1)
        assert len(launches) > 1


@pytest.mark.parametrize(("dtype", "precision"), [("bfloat16", None), ("float32", "tf32"), ("float32", "tf32x3")])
def test_long_sums_go_on_in_memory(dtype: str, precision: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """After so many products; sums of several parts of a block, too."""
    rows = 64 if dtype == "bfloat16" else 16
    tile = Tile(1, 0, 1, 2, (1, 1, 2), (1, 1, 1), rows=rows)
    spec = specialisation((2, 2), (1, 1), (1, 1), (12, 20), (False, False))
    this = Case(spec, dtype, Device(90, 1, SHARED_BYTES), tile, precision)
    problem = this.problem((24, 72))
    share = share_of(this.plan_for(problem))
    for products in (1, 40):
        monkeypatch.setattr(working, "MAX_PRODUCTS", products)
        with on_host(this, defines={"MAX_PRODUCTS": products}):
            check("weight", problem, dtype, precision=precision)
    assert share.of_block > 2


# Kernel = stride along W, where its taps are channels of y: kernel, channels, whether y is channels-last, tile.
FOLDED = {
    "1d": ((2,), (24, 8), True, Tile(2, 0, 1, 3, (1, 1, 1), (1, 1, 1), fold=2)),
    "1d-many-parts": ((2,), (24, 8), True, Tile(1, 0, 1, 3, (1, 1, 1), (1, 1, 1), fold=2)),
    "2d-rows-of-x": ((2, 2), (72, 40), True, Tile(2, 1, 1, 10, (1, 1, 1), (1, 2, 1), fold=2)),
    "3d-by-four": ((2, 3, 4), (16, 24), True, Tile(1, 0, 2, 2, (1, 1, 1), (2, 3, 1), fold=4)),
    "other-steps-elsewhere": ((3, 2), (40, 24), True, Tile(2, 0, 1, 5, (1, 2, 1), (1, 1, 1), fold=2)),
    "turned": ((2, 2), (16, 8), False, Tile(1, 0, 1, 2, (1, 1, 1), (1, 2, 1), fold=2)),
}


@pytest.mark.parametrize("name", FOLDED)
def test_taps_along_w_are_channels(name: str) -> None:
    kernel, channels, last, tile = FOLDED[name]
    stride = (1, 2) if name == "other-steps-elsewhere" else kernel
    spec = specialisation(kernel, stride, (1,) * len(kernel), channels, (False, last))
    this = Case(spec, "bfloat16", Device(90, 8 if "many" in name else 1, SHARED_BYTES), tile)
    rank = len(kernel)
    with on_host(this):
        for extent in ({1: (70,), 2: (5, 19), 3: (3, 2, 9)}[rank], {1: (600,), 2: (9, 33), 3: (2, 4, 8)}[rank]):
            for padding in ((0,) * rank, (*(0,) * (rank - 1), kernel[-1])):
                problem = case(
                    (2, channels[0], *extent),
                    channels[1],
                    kernel,
                    stride,
                    padding=padding,
                    x_layout=spec.x_layouts[0],
                    out_layout=spec.out_layouts[0],
                )
                assert dict(this.plan_for(problem).defines)["FOLD"] == kernel[-1]
                check("weight", problem, this.dtype, calls=1)


def test_taps_along_w_are_channels_only_where_they_follow_each_other() -> None:
    def fold(*problem: Any, last: bool = True, **fields: Any) -> int:
        geometry = geometry_of(case(*problem, **fields))
        sides = Sides.of(*batch_as_depth(geometry, layout_of(geometry, last))).folded()
        return 1 if sides is None else sides.fold

    x = (2, 64, 6, 8, 8)
    assert fold(x, 32, 2, 2) == 2
    assert fold(x, 32, (3, 3, 2), (1, 2, 2)) == 2
    assert fold(x, 32, 2, 2, last=False) == 2  # turned, which makes them do so
    assert fold(x, 30, 2, 2) == 1  # rounded up to eights
    assert fold(x, 64, 2, 2) == 1  # a row of 128 bytes as it is
    assert fold(x, 32, 3, 2) == fold(x, 32, 2, 1) == fold(x, 32, 1, 1) == 1
    assert fold(x, 32, 2, 2, 1) == 1
    assert fold(x, 32, 2, 2, (0, 0, 2)) == 2
    assert fold(x, 32, 2, 2, 0, 1) == 1  # an element more than whole positions have
    assert fold(x, 32, 2, 2, dilation=2) == 1
    assert fold(x, 32, 2, 2, groups=2) == 1


def test_upsampling_of_few_channels_is_planned_so() -> None:
    for channels, fold in ((32, 2), (64, 1)):
        geometry = geometry_of(case((2, 64, 64, 64, 64), channels, 2, 2))
        plan = plan_weight_gradient_tma(geometry, "bfloat16", layout_of(geometry, True), None, DEVICES[90])
        assert isinstance(plan, Plan)
        assert dict(plan.defines)["FOLD"] == fold
        assert plan.maps[1].extents[0] == fold * channels


def in_parts(tile: Tile, kernel: Ints, stride: int = 1, channels: tuple[int, int] = (12, 20)) -> Case:
    """Return a case with ragged channels."""
    spec = specialisation(kernel, (stride,) * len(kernel), (1,) * len(kernel), channels, (False, False))
    return Case(spec, "bfloat16", Device(90, 1, SHARED_BYTES), tile)


# A case each for how parts are shared and added up, with the extents of x, boxes of a block, and parts of a tile.
IN_PARTS = {
    "blocks of its own": (in_parts(Tile(2, 0, 1, 2, (1, 1, 2), (1, 1, 1)), (3, 2)), (32, 64), 4, 4),
    "and rests": (in_parts(Tile(2, 1, 1, 3, (1, 2, 2), (1, 2, 2)), (4, 3), 2), (32, 64), 5, 5),
    "rests alone": (in_parts(Tile(2, 0, 1, 2, (1, 1, 2), (1, 1, 1)), (3, 2), 1, (24, 72)), (16, 32), 100, 2),
    "rests that end where blocks do": (in_parts(Tile(1, 0, 1, 2, (1, 1, 2), (1, 1, 1)), (2, 2)), (32, 80), 9, 4),
    "one part": (in_parts(Tile(2, 0, 1, 2, (1, 1, 2), (1, 1, 1)), (3, 2)), (32, 64), 16, 1),
    "few of many taps": (in_parts(Tile(1, 0, 1, 2, (1, 1, 8), (1, 1, 1)), (90,)), (400,), 4, 5),
    "odd runs": (in_parts(Tile(1, 0, 1, 2, (1, 1, 3), (1, 1, 1)), (1, 3), 1, (12, 21)), (16, 32), 3, 3),
    "runs of pairs": (in_parts(Tile(1, 0, 1, 2, (1, 1, 3), (1, 1, 1)), (1, 3), 1, (12, 22)), (16, 32), 3, 3),
    "many": (in_parts(Tile(2, 1, 1, 3, (1, 2, 2), (1, 1, 1)), (2, 2)), (48, 96), 1, 36),
}


@pytest.mark.parametrize("name", IN_PARTS)
def test_parts_are_added_up(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    add_up(name, monkeypatch)


def test_a_single_part_is_rounded_before() -> None:
    """Half of the bytes for the second pass, where it adds nothing; in float32 it would be as many."""
    geometry = geometry_of(case((64, 512, 4, 4), 256, 4, 2, 1))
    for dtype, precision, rounds in (("float16", None, 1), ("float32", "tf32", 0)):
        plan = plan_weight_gradient_tma(geometry, dtype, layout_of(geometry, True), precision, DEVICES[90])
        assert isinstance(plan, Plan)
        assert dict(plan.defines).get("ONE_PART", 0) == rounds
        sums = plan.workspace_bytes if rounds else min(place for place in plan.turned if place >= 0)
        assert sums == (4 - 2 * rounds) * plan.tile.values * plan.grid
        assert plan.sums


def test_long_sums_of_a_single_part_are_not_rounded_before(monkeypatch: pytest.MonkeyPatch) -> None:
    this, extent, _, _ = IN_PARTS["one part"]
    monkeypatch.setattr(Work, "boxes", lambda *_: [(1, 8, 32)])
    monkeypatch.setattr(Work, "shares", lambda work, tile, boxes, *_: [Share(work.tiles_of_weights(tile), boxes, 16)])
    positions = 16 * 8 * 32
    for most, rounds in ((positions // 16, 1), (positions // 16 - 1, None)):
        monkeypatch.setattr(working, "MAX_PRODUCTS", most)
        assert dict(this.plan_for(this.problem(extent)).defines).get("ONE_PART") == rounds


def add_up(name: str, monkeypatch: pytest.MonkeyPatch, sources: dict[str, str] | None = None) -> None:
    this, extent, of_block, parts = IN_PARTS[name]
    monkeypatch.setattr(Work, "boxes", lambda *_: [(1, 8, 32) if len(extent) > 1 else (1, 1, 64)])
    monkeypatch.setattr(
        Work, "shares", lambda work, tile, boxes, *_: [Share(work.tiles_of_weights(tile), boxes, of_block)]
    )
    problem = this.problem(extent)
    share = share_of(this.plan_for(problem))
    assert share.parts == parts, share
    assert (parts > FEW_PARTS) == (name == "many")
    with on_host(this, sources):
        check("weight", problem, this.dtype, calls=1)


def test_every_box_is_in_one_part() -> None:
    """For all numbers of tiles, boxes and boxes of a block: the shares of blocks as the kernel has them."""
    for tiles_, boxes, of_block in ((t, b, q) for t in range(1, 8) for b in range(1, 12) for q in range(1, 25)):
        share = Share(tiles_, boxes, of_block)
        slots: dict[int, tuple[int, int]] = {}
        done: Counter[tuple[int, int]] = Counter()
        for block in range(share.blocks):
            parts = 0
            of_one = share.whole * tiles_
            if block < of_one:
                assert slots.setdefault(block, (block % tiles_, block)) == (block % tiles_, block)
                done.update((block % tiles_, block // tiles_ * of_block + i) for i in range(of_block))
                continue
            first = (block - of_one) * of_block
            for at in range(first, min(first + of_block, share.rest * tiles_)):
                tile = at // share.rest
                done[tile, share.whole * of_block + at % share.rest] += 1
                slot = of_one + block - of_one + tile
                parts += slots.get(slot) != (tile, block)
                assert slots.setdefault(slot, (tile, block)) == (tile, block)
            assert 0 < parts <= share.parts_of_block
        assert done == Counter((t, b) for t in range(tiles_) for b in range(boxes))
        assert max(slots) < share.slots
        assert max(Counter(tile for tile, _ in slots.values()).values()) <= share.parts


@pytest.mark.parametrize("rows", [True, False])
def test_a_gradient_is_finite_only_where_the_definition_is(rows: bool) -> None:
    this = THIS if rows else LAST
    problem = this.problem((9, 13))
    x, _, _ = problem.arrays(DTYPES[this.dtype])
    y = gradient_of(problem, DTYPES[this.dtype])
    x[0, 1, 4, 12], x[1, -1, 0, 0], y[0, 3, 5, 6], y[1, -1, 1, 0] = np.inf, np.nan, -np.inf, np.inf
    with np.errstate(invalid="ignore"):
        expected = direct_weight(problem, x, y)
    with on_host(this):
        got = cuconvt.grad.conv_transpose2d_weight(x, problem.weight_shape, y, **problem.parameters)
    finite = np.isfinite(got.astype(np.float32))
    assert not finite[~np.isfinite(expected)].any()
    assert finite[:2].any()  # of other channels


# ---- planted faults --------------------------------------------------------------------------------------------------


def faulty_case(tile: Tile, last: bool) -> Case:
    """Return a case with ragged channels, several boxes, parts of both kinds, and taps of a phase."""
    channels = (72, 40) if last else (70, 20)
    spec = specialisation((2, 4), (1, 2), (1, 1), channels, (last, last))
    return Case(spec, "bfloat16", Device(90, 5, SHARED_BYTES), tile)


THIS = faulty_case(Tile(2, 0, 1, 9, (1, 2, 2), (1, 1, 2)), False)
LAST = faulty_case(Tile(2, 1, 2, 5, (1, 2, 2), (1, 1, 2)), True)
TF32 = dataclasses.replace(
    faulty_case(Tile(1, 0, 3, 9, (1, 2, 2), (1, 1, 2), rows=16), False), dtype="float32", precision="tf32"
)
TF32X3 = dataclasses.replace(
    faulty_case(Tile(2, 0, 3, 5, (1, 2, 1), (1, 1, 2), rows=16), True), dtype="float32", precision="tf32x3"
)
NOT_FREE = IN_USE + "|with no wait for it"
PAST = "heap-buffer-overflow|belong to no argument|past its end|past an array|between its elements"
# A replacement in the source, and the message of the check that must catch it.
FAULTS = {
    "a tap one position late": ("* box.y_w + w * HOP_W;", "* box.y_w + w * HOP_W + 1;", VALUES + "|" + UNWRITTEN),
    "a tap's row of another tap": ("+ h * HOP_H)", "+ 0)", VALUES),
    "the second run of x from elsewhere": (
        "(unsigned)(ROW_BYTES * steps.x_pair)",
        "(unsigned)(ROW_BYTES * steps.x_pair + ROW_BYTES)",
        VALUES + "|" + UNWRITTEN,
    ),
    "groups of channels too near": ("steps.x_pair), (unsigned)box.x_bytes)", "steps.x_pair), 1024u)", VALUES),
    "no next row": ("w = 0, x += steps.x_row, y += steps.y_row;", "w = 0, x += steps.x_row;", VALUES + "|" + UNWRITTEN),
    "a box without the padding": ("DILATION_W - (int)p.pad[2]", "DILATION_W", VALUES),
    "the next channels": ("x_channel + i * GROUP", "x_channel + i * GROUP + 8", VALUES),
    "channels that no copy starts at": ("x_channel + i * GROUP", "x_channel + i * GROUP + 4", "not a multiple of 16"),
    "bytes that nobody announced": (
        "(unsigned)box.copied()",
        "(unsigned)box.copied() - 128u",
        "bulk copies bring|arrivals of this phase",
    ),
    "a copy that is not waited for": ("        ring.wait_until_full();\n", "", None),
    "no wait for a free stage": (
        "                ring.wait_until_free();\n",
        "",
        NOT_FREE + "|in_flight|all .* arrivals",
    ),
    "no wait for the kernel before": (
        "        wait_for_kernel_before();\n#pragma unroll 1\n        for (Part",
        "#pragma unroll 1\n        for (Part",
        "before the wait for the kernel",
    ),
    "a stage that is free too early": (
        "            used = ring.place;\n",
        "            used = ring.place;\n            if (threadIdx.x % 32 == 0) barrier_arrive(ring.free + used);\n",
        NOT_FREE + "|arrivals",
    ),
    "no wait for the last products": ("        wgmma_wait<0>();\n", "", None),
    "no fence": (
        "(ROWS_OF_X ? at.y : at.x);\nwgmma_fence();\n",
        "(ROWS_OF_X ? at.y : at.x);\n",
        "without a wgmma_fence",
    ),
    "a part too few": ("part < shares.whole; ++part", "part + 1 < shares.whole; ++part", VALUES),
    "a rest too few": ("part < 2; ++part", "part < 1; ++part", VALUES),
    "a slot of another tile": (
        "+ tile * rest / of_block + tile; }",
        "+ tile * rest / of_block; }",
        VALUES + "|nobody wrote|which thread|" + PAST,
    ),
    "sums that are not there yet": (
        "units, sums, shares);\n    }\n    __syncthreads();",
        "units, sums, shares);\n    }",
        VALUES + "|" + UNWRITTEN + "|no barrier in between",
    ),
}
# Of arrays that are turned in bulk, and element by element.
WRONG, BEYOND = VALUES + "|" + UNWRITTEN, PAST + "|wrote|" + UNWRITTEN
FAULTS_IN_BULK = {
    "the other half of a word": (
        "bits[2 * i % PIECE] | bits[(2 * i + 1) % PIECE] << 16",
        "bits[(2 * i + 1) % PIECE] | bits[2 * i % PIECE] << 16",
        VALUES,
    ),
    "rows that begin at the first one's residue": (
        "(start + c * t.stride[1]) & (PIECE - 1)), after",
        "start), after",
        None,
    ),
    "elements of another residue": ("((start + i * t.stride[1]) & (PIECE - 1));", "start;", WRONG),
    "no elements before whole pieces": ("i < min(first, count); ++i)", "i < 0; ++i)", WRONG),
    "no elements behind whole pieces": (
        "max(first, end), 0); i < count",
        "max(first, end), 0); i < 0",
        WRONG,
    ),
    "elements past the array": ("count + after <= left ? count + after", "true ? count + after", PAST),
    "no wait for rows": ("    barrier_wait(landed, 0);\n\n    const int piece", "    const int piece", None),
    "channels of the set before": ("first_piece * PIECE * t.stride[1] +", "0 * t.stride[1] +", VALUES),
    "channels that are not zeros": (
        "i = channels; i < of_set * PIECE;",
        "i = channels; i < 0;",
        WRONG,
    ),
    "a row past the last position": (
        "position < count; position +=",
        "position < (int)width; position +=",
        BEYOND,
    ),
    "a piece past the last one": (
        "first_piece + piece >= pieces) return;",
        "first_piece + piece > pieces) return;",
        BEYOND,
    ),
}
FAULTS_BY_ELEMENTS = {
    "a position past the last one": ("place >= places) return;", "place > places) return;", PAST + "|wrote"),
    "channels that are not zeros": (
        "is_there && c < left ? bits_of(at[c * t.stride[1]]) : 0",
        "is_there ? bits_of(at[c * t.stride[1]]) : 0",
        PAST,
    ),
    "positions that are not there": (
        "is_there && c < left ? bits_of(at[c * t.stride[1]]) : 0",
        "c < left ? bits_of(at[c * t.stride[1]]) : 0",
        PAST,
    ),
    "positions past the row's last": ("if (w + j * down < of_row) turned[", "turned[", PAST + "|wrote"),
}
# Those of float32, whose rows are loaded to registers and whose x is prepared.
FAULTS_FLOAT32 = {
    "a piece of another position": ("(at >> 3 & 0x70)", "(at >> 3 & 0x30)", VALUES + "|" + UNWRITTEN),
    "eight channels further, a piece too near": ("i % 2 * 32)", "i % 2 * 16)", VALUES),
    "every position": ("row = 2 * (lane % 4)", "row = lane % 4", VALUES),
    "the next group of channels": ("+ tile_m / 2 * box.y_bytes", "+ 0", VALUES),
    "a step that is loaded twice": ("if (next % UNITS == 0) at.advance(steps);", "", VALUES),
    "x of the step before": ("staged_x = staged_x + 4 * CHANNELS_IN;", "", VALUES),
    "no fence": (
        "for (int i = 0; i < 2 * UNITS; ++i) {\nwgmma_fence();",
        "for (int i = 0; i < 2 * UNITS; ++i) {",
        "fence",
    ),
    "lanes that still read": ("__syncwarp();  // all lanes have read their y\n", "", "no barrier in between"),
    "halves of a run in the order of memory": (
        "{{v[half], v[half + 2], v[half + 4], v[half + 6]}}",
        "{{v[4 * half], v[4 * half + 1], v[4 * half + 2], v[4 * half + 3]}}",
        VALUES,
    ),
    "another part": ("* PARTS + part) * runs", "* PARTS + PARTS - 1 - part) * runs", VALUES),
    "a tile's channels of the next one": (
        "tile % tiles * CHANNELS_IN + c;",
        "tile % tiles * CHANNELS_IN + c + 1;",
        VALUES + "|" + PAST,
    ),
    "what is beyond x": ("t.channels && w < t.extent[2]", "t.channels", VALUES + "|" + PAST),
    "rows beyond x": (
        "exists = channel < t.channels && h < t.extent[1]",
        "exists = channel < t.channels",
        VALUES + "|" + PAST,
    ),
    "rows beyond x, one by one": ("t.extent[2] && h < t.extent[1]", "t.extent[2]", VALUES + "|" + PAST),
    "sums that go on anew": ("if (p.patches[0] || goes_on) {", "if (p.patches[0]) {", VALUES),
    "sums of a box that are lost": ("|| step > 0 || i >= UNITS", "|| step > 0 || i > UNITS", VALUES),
}
OF_PARTS = "another part", "sums of a box that are lost", "the next group of channels", "lanes that still read"
# The same of arrays that are read as they are.
FAULTS_LAST = {
    name: FAULTS[name]
    for name in ("a tap one position late", "a box without the padding", "the next channels", "no next row")
}


def run(this: Case, sources: dict[str, str] | None = None, fewest: int = 128) -> None:
    defines = {"MAX_PRODUCTS": 8} if this.precision == "tf32" else {}
    with on_host(this, sources, defines), pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan_turn, "FEWEST_POSITIONS", fewest)
        patch.setattr(working, "FEW_POSITIONS", 0)
        patch.setattr(Work, "boxes", lambda *_: [(1, 4, 16)])
        patch.setattr(
            Work, "shares", lambda work, tile, boxes, *_: [Share(work.tiles_of_weights(tile), boxes, boxes // 2 + 1)]
        )
        for extent in ((22, 16), (27, 19)):  # whole pieces, and others
            check("weight", this.problem(extent), this.dtype, precision=this.precision)


@pytest.mark.parametrize(
    ("this", "fault"),
    [
        *((THIS, fault) for fault in (*FAULTS.values(), *FAULTS_IN_BULK.values())),
        *((LAST, fault) for fault in FAULTS_LAST.values()),
        *((TF32X3 if name in OF_PARTS else TF32, fault) for name, fault in FAULTS_FLOAT32.items()),
    ],
    ids=[
        *FAULTS,
        *(f"in bulk: {name}" for name in FAULTS_IN_BULK),
        *(f"channels-last: {name}" for name in FAULTS_LAST),
        *(f"float32: {name}" for name in FAULTS_FLOAT32),
    ],
)
def test_fault_is_caught(this: Case, fault: tuple[str, str, str | None]) -> None:
    before, after, caught_by = fault
    with pytest.raises(AssertionError, match=caught_by):
        run(this, plant(kernel_sources("weight_gradient_tma.cu"), before, after))


@pytest.mark.parametrize(("before", "after", "caught_by"), FAULTS_BY_ELEMENTS.values(), ids=FAULTS_BY_ELEMENTS)
def test_fault_of_single_elements_is_caught(before: str, after: str, caught_by: str) -> None:
    with pytest.raises(AssertionError, match=caught_by):
        run(THIS, plant(kernel_sources("weight_gradient_tma.cu"), before, after), fewest=10**6)


@pytest.mark.parametrize("this", [THIS, LAST, TF32, TF32X3], ids=["rows", "channels-last", "tf32", "tf32x3"])
def test_without_a_fault_nothing_is_caught(this: Case) -> None:
    run(this)
    if this is THIS:
        run(this, fewest=10**6)


# Of rows that are no whole runs: tile, dtype and precision, box, and what is planted.
ROWS_AS_ONE = {
    "of a plane": (Tile(1, 0, 1, 2, (1, 2, 1), (1, 1, 1)), "bfloat16", None, (2, 4, 6)),
    "of a box": (Tile(1, 1, 1, 2, (1, 1, 1), (1, 1, 1)), "float16", None, (4, 4, 3)),
    "of a plane, float32": (Tile(1, 0, 3, 2, (1, 2, 1), (1, 1, 1), rows=16), "float32", "tf32x3", (2, 4, 6)),
    "of a box, float32": (Tile(1, 0, 4, 2, (1, 1, 1), (1, 1, 1), rows=16), "float32", "tf32", (4, 4, 3)),
}
FAULTS_OF_ROWS = {
    "the next plane": ("of a plane", "            x_h = x_d, y_h = y_d;\n", ""),
    "one row too many": ("of a plane", "(TAPS_H == 1 ? box.d : 1) * x_d", "box.d * x_d"),
    "the end of a row": ("of a box, float32", "if (++in_w < box_extent_w) continue;", "if (++in_w) continue;"),
    "the end of a plane": ("of a box, float32", "            in_h = 0, ++d;\n", "            ++d;\n"),
    "the first row": ("of a plane, float32", "in_h = run * 8 / box_extent_w;", "in_h = 0;"),
}


def run_rows_as_one(name: str, sources: dict[str, str] | None = None) -> None:
    tile, dtype, precision, box = ROWS_AS_ONE[name]
    spec = specialisation((2, 3), (1, 1), (1, 1), (20, 70), (False, False))
    this = Case(spec, dtype, Device(90, 2, SHARED_BYTES), tile, precision)
    problem = case((5, 20, 7, box[2]), 70, (2, 3), 1, 1)
    with on_host(this, sources), pytest.MonkeyPatch.context() as patch:
        patch.setattr(working, "FEW_POSITIONS", 0)
        patch.setattr(Work, "boxes", lambda *_: [])
        patch.setattr(Work, "boxes_of_whole_rows", lambda *_: [box])
        check("weight", problem, dtype, precision=precision)


@pytest.mark.parametrize("name", ROWS_AS_ONE)
def test_rows_that_are_no_whole_runs(name: str) -> None:
    run_rows_as_one(name)


@pytest.mark.parametrize(("name", "before", "after"), FAULTS_OF_ROWS.values(), ids=FAULTS_OF_ROWS)
def test_fault_of_such_rows_is_caught(name: str, before: str, after: str) -> None:
    with pytest.raises(AssertionError, match=VALUES + "|" + PAST):
        run_rows_as_one(name, plant(kernel_sources("weight_gradient_tma.cu"), before, after))


@pytest.mark.parametrize("largest", [working.LARGEST_OF_SPLIT, working.LARGEST_BOX])
def test_few_positions_in_3xtf32_are_as_accurate_as_float32(monkeypatch: pytest.MonkeyPatch, largest: int) -> None:
    """Tensor cores cut off what they add up: all positions in one box would be off by more than is allowed."""
    monkeypatch.setenv("HOST_CUTS_OFF", "1")
    monkeypatch.setattr(working, "LARGEST_OF_SPLIT", largest)
    monkeypatch.setattr(planner, "choose_tile_of_size", planner.choose_tile_of_size.__wrapped__)
    is_off = pytest.raises(AssertionError, match=VALUES) if largest == working.LARGEST_BOX else nullcontext()
    with gradients_on_host("weight_gradient_tma", DEVICES[90], "tf32x3"), is_off:
        check("weight", FIXED["gan_3d"], "float32", precision="tf32x3")


def test_boxes_have_rows_of_x_where_these_are_no_whole_runs() -> None:
    """Half of a box of four positions would be zeros, or more."""

    def box(*x: int) -> Ints:
        geometry = geometry_of(case(x, 256, 4, 2, 1))
        plan = plan_weight_gradient_tma(geometry, "bfloat16", layout_of(geometry, True), None, DEVICES[90])
        assert isinstance(plan, Plan)
        return tuple(problem_of(plan)["box"])

    assert box(64, 512, 4, 4)[2] == 4
    assert box(2, 256, 12, 12, 12)[2] == 12
    assert box(64, 512, 8, 8)[2] == 8


# Where taps are few, a block adds up several patches, the last one what is left of them.
@pytest.mark.parametrize(
    ("before", "after", "caught_by"),
    [
        ("min(shares.tiles / TILES_OF_TAPS * PATCHES - number, together)", "together", PAST + "|wrote"),
        ("sums + (patch * OF_X + ci) * NEXT_X + place", "sums + ci * NEXT_X + place", VALUES),
        ("Patch(number + last).first(p)", "Patch(number).first(p)", "nobody wrote|which thread"),
        ("Patch(number + i / ALL_TAPS)", "Patch(number)", VALUES),
    ],
    ids=["a patch too many", "sums of the first patch", "weights of the first patch", "parts of the first patch"],
)
def test_a_fault_of_several_patches_is_caught(
    before: str, after: str, caught_by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(AssertionError, match=caught_by):
        add_up("blocks of its own", monkeypatch, plant(kernel_sources("weight_gradient_tma.cu"), before, after))


# Weights of one tap, which blocks write: channels of x and y, dtype and precision, tile.
OF_ONE_TAP = {
    "columns of y": ((72, 40), "bfloat16", None, Tile(2, 1, 2, 5, (1, 1, 1), (1, 1, 1))),
    "columns of x": ((24, 136), "float16", None, Tile(2, 0, 2, 3, (1, 1, 1), (1, 1, 1))),
    "one by one": ((20, 37), "bfloat16", None, Tile(1, 0, 1, 3, (1, 1, 1), (1, 1, 1))),
    "idle units": ((24, 44), "float32", "tf32", Tile(1, 0, 3, 3, (1, 1, 1), (1, 1, 1), rows=16)),
    "two parts of a number": ((24, 60), "float32", "tf32x3", Tile(2, 0, 5, 3, (1, 1, 1), (1, 1, 1), rows=16)),
}
FAULTS_OF_ONE_TAP = {
    "boxes that are still read": ("warps_sync(1, WORKER_THREADS);  // nobody reads boxes any more\n", "", IN_USE),
    "sums that are not there yet": (
        "    warps_sync(1, WORKER_THREADS);\n    const bool fits",
        "    const bool fits",
        VALUES + "|" + UNWRITTEN + "|no barrier in between",
    ),
    "rows of no use": ("if (row < ROWS) sums[place]", "sums[place]", "past its end|no barrier in between"),
    "rows too near": ("NEXT_ROW = CHANNELS_OUT + 4", "NEXT_ROW = CHANNELS_OUT - 4", "no barrier in between|" + VALUES),
    "channels that are not there": (
        "first.co + co >= p.c_out) continue;\nPack",
        "false) continue;\nPack",
        PAST + "|thread",
    ),
    "channels that follow each other": (
        "co * p.weight_stride[1]);\n}\n}\n\n// All",
        "co);\n}\n}\n\n// All",
        PAST + "|between",
    ),
}


def write_weights(name: str, sources: dict[str, str] | None = None) -> None:
    channels, dtype, precision, tile = OF_ONE_TAP[name]
    spec = specialisation((1, 1), (1, 1), (1, 1), channels, (False, False))
    this = Case(spec, dtype, Device(90, 1, SHARED_BYTES), tile, precision)
    with on_host(this, sources):
        for extent in ((1, 1), (3, 9)):
            problem = this.problem(extent, weight_layout="strided" if name == "one by one" else "contiguous")
            plan = this.plan_for(problem)
            assert (dict(plan.defines)["ONE_PART"], plan.sums) == (1, 0)
            assert not any(plan.turned) or 0 in plan.turned  # no sums are in front of what is turned
            check("weight", problem, dtype, precision=precision, calls=1)


@pytest.mark.parametrize("name", OF_ONE_TAP)
def test_weights_of_one_tap_are_written_at_once(name: str) -> None:
    write_weights(name)


@pytest.mark.parametrize(("before", "after", "caught_by"), FAULTS_OF_ONE_TAP.values(), ids=FAULTS_OF_ONE_TAP)
def test_a_fault_of_weights_that_are_written_is_caught(before: str, after: str, caught_by: str) -> None:
    sources = plant(kernel_sources("weight_gradient_tma.cu"), before, after)
    with pytest.raises(AssertionError, match=caught_by):
        write_all_weights(sources)


def write_all_weights(sources: dict[str, str]) -> None:
    for name in OF_ONE_TAP:
        write_weights(name, sources)


# ---- plans -----------------------------------------------------------------------------------------------------------


def test_registers_of_all_warps_are_those_that_a_block_starts_with() -> None:
    """A worker that asks for more than the copiers gave up waits for ever."""
    for workers, blocks in KINDS:
        tile = Tile(workers, 0, 1, 1, (1, 1, 1), (1, 1, 1), blocks)
        at_start = min(65536 // (128 * (workers + 1) * blocks), 255) // 8 * 8
        assert workers * tile.registers + COPIER_REGISTERS <= at_start * (workers + 1)
        assert COPIER_REGISTERS <= min(at_start, MAX_REGISTERS) <= tile.registers


def work_of(problem: Problem, last: bool) -> Work:
    sides = Sides.of(*batch_as_depth(geometry_of(problem), layout_of(geometry_of(problem), last)))
    return Work(Shape.of(sides))


@pytest.mark.parametrize("last", [False, True])
def test_tiles_have_registers_for_their_sums_and_cost_no_less_than_their_bound(last: bool) -> None:
    for problem in (case((2, 256, 8, 8, 8), 128, 4, 2, 1), case((2, 48, 9, 9), 40, 3, 1, 1)):
        work = work_of(problem, last)
        found = list(tiles(work))
        assert found
        costs = {}
        for tile in found:
            assert tile.sums + OTHER_REGISTERS[0] <= tile.registers
            cost = work.typical_cost(tile, DEVICES[90])
            if cost is not None:
                assert work.least_cost(tile, DEVICES[90]) <= cost
                assert work.ideal_cost(tile, DEVICES[90]) <= cost * (1 + 1e-9)
                costs[tile] = cost
        chosen = choose_tile(work.shape, DEVICES[90])
        assert chosen is not None
        assert costs[chosen] == min(costs.values())


def test_single_taps_follow_no_remainders() -> None:
    """Of kernel 3 and stride 2 one remainder has two taps and one has one: tiles of one tap are three, not four."""
    work = work_of(case((2, 256, 12, 12, 12), 128, 3, 2, 1, 1), True)
    of_taps = {tile.taps: work.tiles_of_weights(tile) // work.tiles_of_channels(tile) for tile in tiles(work)}
    assert of_taps[1, 1, 1] == 27
    assert of_taps[1, 1, 2] == 3 * 3 * 2
    assert of_taps[2, 2, 2] == 8


def test_the_kernel_adds_up_as_many_products_as_the_planner_takes_for_one_part() -> None:
    assert (
        f"#define MAX_PRODUCTS {working.MAX_PRODUCTS}\n"
        in kernel_sources("weight_gradient_tma.cu")["weight_gradient_tma.cu"]
    )


def test_only_elements_that_taps_read_are_turned() -> None:
    """Of stride 2 and dilation 2 these are an eighth, which then have neither."""
    geometry = geometry_of(case((2, 32, 4, 6, 8), 64, 3, 2, 1, dilation=2))
    plan = plan_weight_gradient_tma(geometry, "bfloat16", layout_of(geometry), None, DEVICES[90])
    assert isinstance(plan, Plan)
    defines = dict(plan.defines)
    assert {defines[f"{name}_{axis}"] for name in ("STRIDE", "DILATION") for axis in "DHW"} == {1}
    y = plan.maps[1]
    assert y.extents == (64, *(-(-(e - 1) // 2) for e in reversed(geometry.out_extent)), 2)
    assert y.steps == (1, 1, 1)
    of_y = plan.turns[TURN_FIELDS:]
    assert of_y[:2] == (2, 64)
    assert (of_y[8], of_y[9]) == (2 * geometry.out_extent[2], 2)


def test_a_map_has_what_the_driver_asks_for() -> None:
    found = TensorMap.of("float16", (3, 40, 1, 5, 7), (1400, 1, 99, 280, 40), (1, 4, 8), (1, 2, 1))
    assert found.extents == (40, 7, 5, 1, 3)
    assert found.strides == (80, 560, 2800, 2800)  # none of a single plane is read
    assert (found.box, found.steps, found.spans) == ((8, 4, 1), (1, 2, 1), (8, 7, 1))
    extents = (3, 40, 1, 5, 7)
    assert reads((1400, 1, 99, 280, 40), extents, True)
    for strides, aligned in (
        ((1400, 1, 99, 280, 40), False),
        ((1400, 2, 99, 280, 40), True),
        ((1400, 1, 99, 280, 41), True),
        ((1400, 1, 99, -280, 40), True),
        ((0, 1, 99, 280, 40), True),
        ((1400, 1, 99, 40, 200), True),
        ((1400, 1, 99, 304, 40), True),
    ):
        assert not reads(strides, extents, aligned)


def test_refusals_say_why() -> None:
    geometry = geometry_of(case((2, 18, 3, 9, 17), 9, 3, stride=2, padding=1))
    for dtype, device, reason in (
        ("float16", Device(100, 148, SHARED_BYTES), "needs compute capability 9.0, the device has 10.0"),
        ("float64", Device(90, 132, SHARED_BYTES), "in float16, bfloat16 and TF32, not in float64"),
        ("float16", Device(90, 132, 1024), "no box with what its taps reach"),
    ):
        refusal = plan_weight_gradient_tma(geometry, dtype, layout_of(geometry), None, device)
        assert isinstance(refusal, Refusal)
        assert reason in refusal.reason
    for problem, precision, dtype, reason in (
        (case((2, 18, 3, 9, 17), 9, 3), "ieee", "float32", "not in ieee"),
        (case((1, 48, 160, 160, 160), 24, 3), "tf32", "float32", "turned arrays take"),
        (case((2, 24, 9, 8), 30, 3, groups=3), "tf32", "float32", "groups have 8 and 10"),
        (case((1, 48, 160, 160, 160), 24, 3), None, "float16", "turned arrays take"),
        (case((2, 64, 64), 64, 20, 9), None, "float16", "no box"),
        (case((0, 64, 9, 8), 64, 3), None, "float16", "nothing to copy"),
        (case((2, 24, 9, 8), 36, 3, groups=3), None, "float16", "groups have 8 and 12"),
        (case((2, 16384, 8), 8192, 3), None, "float16", "has room for"),
    ):
        geometry = geometry_of(problem)
        refusal = plan_weight_gradient_tma(geometry, dtype, layout_of(geometry), precision, DEVICES[90])
        assert isinstance(refusal, Refusal), refusal
        assert reason in refusal.reason


# ---- launches --------------------------------------------------------------------------------------------------------


def test_arguments_hold_maps_of_the_addresses_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Made anew only where an address is another one, and for each thread."""
    pytest.importorskip("cupy", reason="CuPy is not installed")
    from cuconvt import launch

    made: list[tuple[int, ...]] = []

    def encode(
        to: Any, dtype: int, rank: int, address: Any, extents: Any, strides: Any, box: Any, steps: Any, *options: int
    ) -> int:
        assert to.value % 64 == 0
        ctypes.memset(to, 0, 128)
        ctypes.c_uint64.from_address(to.value).value = address.value
        numbers = [ctypes.c_uint32.from_address(array.value + 4 * i).value for array in (box, steps) for i in range(5)]
        made.append((dtype, rank, address.value, *numbers, *options))
        return 0

    monkeypatch.setattr(launch, "_driver", lambda: SimpleNamespace(cuTensorMapEncodeTiled=encode))
    x, y = (
        TensorMap.of("bfloat16", (2, 64, 4, 5, 6), (7680, 1, 1920, 384, 64), (1, 2, 8), steps)
        for steps in ((1, 1, 1), (1, 2, 3))
    )
    last = (ctypes.c_uint64 * 1)(77)
    arguments = launch._MappedArguments((x, y), 4, ctypes.addressof(last))

    def read() -> list[int]:
        places = [ctypes.c_uint64.from_address(arguments.address + 8 * i).value for i in range(5)]
        return [ctypes.c_uint64.from_address(place).value for place in places]

    arguments.fill(16, 32, 5, 6)
    assert read() == [16, 32, 5, 6, 77]
    arguments.fill(16, 48, 7, 8)
    assert read() == [16, 48, 7, 8, 77]
    assert [of_map[2] for of_map in made] == [16, 32, 48]
    assert made[1] == (9, 5, 32, 64, 22, 3, 1, 1, 1, 3, 2, 1, 1, 0, 3, 2, 0)
    plain = dataclasses.replace(y, plain=True)
    assert (y.swizzled_bytes, plain.swizzled_bytes) == (128, 0)
    launch._MappedArguments((plain,), 2, ctypes.addressof(last)).fill(32, 5)
    assert made.pop() == (*made[1][:-3], 0, *made[1][-2:])
    other = threading.Thread(target=lambda: (arguments.fill(16, 48, 9, 10), made.append(tuple(read()))))
    other.start()
    other.join()
    assert made[-1] == (16, 48, 9, 10, 77)
    assert len(made) == 6
    assert read() == [16, 48, 7, 8, 77]
