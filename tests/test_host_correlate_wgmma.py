"""The strided correlation for Hopper, executed on the host under sanitizers, as `test_host_gradients.py` does."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import pytest
from described import DEVICES, geometry_of, problem_of
from described import layout_of as layout_like
from gradients import check
from host.build import kernel_sources, why_not
from host_correlate_wgmma import (
    EXTENTS,
    LONGEST,
    SHARED_BYTES,
    Case,
    boxed_cases,
    cases,
    layout_of,
    on_host,
    plan_for,
    read_by_vectors,
    serves,
    smallest,
    turned_cases,
    whole_rows,
)
from host_gradients import check_drawn, gradients_on_host, specialisation
from strategies import Problem, case
from test_host_faults import KERNEL_BEFORE, UNWRITTEN, VALUES, plant

from cuconvt.plan import Device, Plan
from cuconvt.plan_correlate_turning import plan_correlate_turning, turned_y
from cuconvt.plan_correlate_wgmma import (
    _can_fold,
    _groups_of_row,
    as_read,
    plan_correlate_wgmma,
    tiles,
    works_of,
)
from cuconvt.plan_correlate_wgmma_work import Tile, Way, Work
from cuconvt.tensor_map import ITEMSIZES

pytestmark = [
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
    pytest.mark.usefixtures("rows_of_several_blocks"),
]

BUDGET = 0.03  # a wgmma of 128 threads takes longer than its products
CASES = cases()
BOXED_CASES = boxed_cases()
TURNED_CASES = turned_cases()


@pytest.mark.parametrize("name", CASES)
def test_any_geometry(name: str) -> None:
    this = CASES[name]
    rank = len(this.spec.kernel)
    with on_host(this):

        def alike(problem: Problem) -> None:
            check("input", problem, this.dtype, precision=this.precision, calls=1)

        first, *others = (smallest(this.spec, extent) for extent in EXTENTS[rank])
        check("input", first, this.dtype, precision=this.precision, calls=this.spec.calls)
        alone = [("input", problem) for problem in others]
        alone += [("conv", problem) for problem in whole_rows(this)]
        for operation, problem in alone:
            check(operation, problem, this.dtype, precision=this.precision, calls=1)
        check_drawn(this.spec, LONGEST[rank], BUDGET, CASES, name, alike)


@pytest.mark.parametrize("name", BOXED_CASES)
def test_any_geometry_of_boxes(name: str) -> None:
    this = BOXED_CASES[name]
    rank, layouts = len(this.spec.kernel), (this.spec.x_layouts[0], this.spec.out_layouts[0])
    with on_host(this):

        def alike(problem: Problem) -> None:
            drawn = dataclasses.replace(problem, x_layout=layouts[0], out_layout=layouts[1])
            read = as_read(geometry_of(drawn), layout_of(this.spec, drawn))
            if Work(*read, this.dtype, this.precision).shape.boxes:
                check("input", drawn, this.dtype, precision=this.precision, calls=1)

        for extent in EXTENTS[rank]:
            problem = smallest(this.spec, extent, groups=1)
            check("input", problem, this.dtype, precision=this.precision, calls=1)
        check_drawn(this.spec, LONGEST[rank], BUDGET, BOXED_CASES, name, alike)


@pytest.mark.parametrize("name", TURNED_CASES)
def test_any_geometry_of_rows_that_are_turned(name: str) -> None:
    this = TURNED_CASES[name]
    rank = len(this.spec.kernel)
    with on_host(this):

        def alike(problem: Problem) -> None:
            geometry = geometry_of(problem)
            layout = dataclasses.replace(layout_of(this.spec, problem), out=turned_y(geometry, this.dtype).strides)
            if Work(*as_read(geometry, layout), this.dtype, this.precision).shape.boxes:
                check("input", problem, this.dtype, precision=this.precision, calls=1)

        for extent in EXTENTS[rank]:
            problem = smallest(this.spec, extent, groups=1)
            assert dict(plan_for(this, problem).defines)["X_TURNED"]
            check("input", problem, this.dtype, precision=this.precision, calls=1)
        check_drawn(this.spec, LONGEST[rank], BUDGET, TURNED_CASES, name, alike)


# Steps that strides and dilations have in common: taps read some elements of y alone, not from the first one on.
COMMON_STEPS = {
    "1d": case((2, 9, 21), 16, 4, 6, 2, dilation=4),
    "2d": case((2, 12, 7, 9), 20, 3, 2, 1, dilation=2, out_layout="cropped"),
    "3d": case((1, 8, 3, 4, 5), 17, (3, 2, 3), (2, 1, 4), (1, 0, 3), dilation=(4, 3, 2)),
}


@pytest.mark.parametrize(("dtype", "precision"), [("bfloat16", None), ("float32", "tf32"), ("float32", "tf32x3")])
@pytest.mark.parametrize("name", COMMON_STEPS)
def test_what_no_tap_reads_is_not_turned(name: str, dtype: str, precision: str | None) -> None:
    this, plans = COMMON_STEPS[name], []

    def plan(_: str, *problem: Any) -> Plan:
        found = plan_correlate_turning(*problem)
        assert isinstance(found, Plan), found
        plans.append(found)
        return found

    with gradients_on_host("correlate_wgmma", DEVICES[90], precision, plan=plan):
        check("input", this, dtype, precision=precision, calls=1)
    geometry = geometry_of(this)
    whole = turned_y(geometry, dtype)
    assert plans
    assert all(0 < found.workspace_bytes < 0.6 * whole.bytes(ITEMSIZES[dtype]) for found in plans)


# Kernel = stride along W, whose taps are channels of y: kernel, stride, channels, whether the result is channels-last,
# dtype and precision.
FOLDED = {
    "1d": ((2,), (2,), (24, 8), True, ("bfloat16", None)),
    "2d": ((2, 2), (2, 2), (40, 16), False, ("float16", None)),
    "2d-tf32": ((3, 4), (2, 4), (8, 8), True, ("float32", "tf32")),
    "3d-by-four": ((2, 3, 4), (2, 3, 4), (17, 16), True, ("bfloat16", None)),
    "3d-tf32": ((2, 2, 2), (2, 2, 2), (24, 12), False, ("float32", "tf32")),
}


@pytest.mark.parametrize("name", FOLDED)
def test_taps_along_w_are_channels(name: str) -> None:
    kernel, stride, channels, out_last, (dtype, precision) = FOLDED[name]
    rank = len(kernel)
    spec = specialisation(kernel, stride, (1,) * rank, channels, (out_last, True))
    first = smallest(spec, EXTENTS[rank][0], groups=1)
    read = as_read(geometry_of(first), layout_of(spec, first), kernel[-1])
    tile = next(tile for tile in tiles(Work(*read, dtype, precision, Way(fold=kernel[-1]))) if tile.tiles_m <= 2)
    this = Case(spec, dtype, precision, Device(90, 2, SHARED_BYTES), tile)
    with on_host(this):
        for extent in EXTENTS[rank]:
            for padding_w in ((0, 0), (kernel[-1], kernel[-1])):
                problem = smallest(spec, extent, padding_w, groups=1)
                assert dict(plan_for(this, problem).defines)["FOLD"] == kernel[-1]
                check("input", problem, dtype, precision=precision, calls=1)


# Groups that are brought as one row: kernel, stride, groups, channels of x and of y in a group, whether the result is
# channels-last, and how many groups a row has.
JOINED = {
    "1d-tf32": ((5,), (2,), 8, (8, 8), True, ("float32", "tf32"), 4),
    "2d-tf32-wide": ((3, 2), (2, 1), 6, (24, 16), False, ("float32", "tf32"), 2),
    "2d": ((3, 3), (2, 2), 4, (8, 16), True, ("bfloat16", None), 4),
    "3d-tf32": ((3, 3, 3), (2, 2, 2), 4, (8, 8), True, ("float32", "tf32"), 4),
    "3d": ((2, 3, 4), (1, 2, 3), 2, (16, 32), False, ("float16", None), 2),
}


@pytest.mark.parametrize("name", JOINED)
def test_groups_are_joined(name: str) -> None:
    kernel, stride, groups, channels, out_last, (dtype, precision), joined = JOINED[name]
    rank = len(kernel)
    spec = specialisation(kernel, stride, (1,) * rank, channels, (out_last, True))
    first = smallest(spec, EXTENTS[rank][0], groups=groups)
    read = as_read(geometry_of(first), layout_of(spec, first), 1, joined)
    every = tiles(Work(*read, dtype, precision, Way(joined=joined)))
    found = [tile for tile in every if tile.tiles_m <= 2 and serves(spec, dtype, precision, tile)]
    assert all(tile.boxed and tile.joined == joined for tile in found)
    for tile in (found[0], found[-1]):
        this = Case(spec, dtype, precision, Device(90, 2, SHARED_BYTES), tile)
        with on_host(this):
            for extent in EXTENTS[rank][:2]:
                problem = smallest(spec, extent, (1, 0), groups=groups)
                assert dict(plan_for(this, problem).defines)["JOINED"] == joined
                check("input", problem, dtype, precision=precision, calls=1)


# Dilated taps: kernel, stride, dilation, channels, whether the result is channels-last, dtype and precision.
APART = {
    "1d": ((3,), (1,), (5,), (17, 24), True, ("bfloat16", None)),
    "2d": ((3, 2), (1, 1), (4, 3), (8, 24), False, ("float32", "tf32")),
    "2d-with-a-stride": ((3, 4), (2, 3), (3, 5), (12, 8), True, ("float16", None)),
    "2d-split": ((3, 3), (1, 2), (2, 3), (8, 16), True, ("float32", "tf32x3")),
    "3d": ((2, 3, 2), (1, 1, 1), (2, 4, 3), (12, 16), True, ("bfloat16", None)),
    "3d-with-a-stride": ((2, 2, 3), (1, 2, 2), (2, 3, 3), (8, 24), False, ("float32", "tf32")),
}


@pytest.mark.parametrize("turns", [False, True])
@pytest.mark.parametrize("name", APART)
def test_taps_have_boxes_of_their_own(name: str, turns: bool) -> None:
    kernel, stride, dilation, channels, out_last, (dtype, precision) = APART[name]
    rank, last = len(kernel), specialisation(kernel, stride, dilation, channels, (out_last, True))
    spec = specialisation(kernel, stride, dilation, channels, (out_last, not turns))
    first = smallest(last, EXTENTS[rank][0], groups=1)
    _, *apart = works_of(geometry_of(first), layout_of(last, first), dtype, precision)
    assert len(apart) == (1 if rank == 1 else 3)
    for work in apart:
        tile = next(tile for tile in tiles(work) if tile.tiles_m <= 2 and serves(last, dtype, precision, tile))
        this = Case(spec, dtype, precision, Device(90, 2, SHARED_BYTES), tile, turns=turns)
        with on_host(this):
            for extent in EXTENTS[rank][:2]:
                problem = smallest(spec, extent, (1, 0), groups=1)
                defines = dict(plan_for(this, problem).defines)
                assert tuple(defines[f"APART_{axis}"] for axis in "DHW") == work.shape.apart
                check("input", problem, dtype, precision=precision, calls=1)


# More remainders of taps modulo the stride along D and H than an item has bits for: kernel, stride, channels.
MANY_CLASSES = {
    "2d": ((6, 5), (6, 5), (17, 24), ("bfloat16", None)),
    "2d-overlapping": ((10, 9), (5, 6), (8, 8), ("float32", "tf32")),
    "3d": ((5, 2, 3), (5, 2, 2), (12, 16), ("float16", None)),
}


@pytest.mark.parametrize("turns", [False, True])
@pytest.mark.parametrize("name", MANY_CLASSES)
def test_many_classes(name: str, turns: bool) -> None:
    kernel, stride, channels, (dtype, precision) = MANY_CLASSES[name]
    rank, last = len(kernel), specialisation(kernel, stride, (1,) * len(kernel), channels, (False, True))
    spec = specialisation(kernel, stride, (1,) * rank, channels, (False, not turns))
    read = as_read(geometry_of(smallest(last, groups=1)), layout_of(last, smallest(last, groups=1)))
    found = [tile for tile in tiles(Work(*read, dtype, precision)) if serves(last, dtype, precision, tile)]
    assert all(tile.boxed for tile in found)
    for tile in (found[0], found[-1]):
        this = Case(spec, dtype, precision, Device(90, 2, SHARED_BYTES), tile, turns=turns)
        with on_host(this):
            problem = smallest(spec, {2: (7, 11), 3: (3, 4, 5)}[rank], (1, 0), groups=1)
            check("input", problem, dtype, precision=precision, calls=1)


def test_groups_are_joined_only_where_each_fills_products() -> None:
    def joined(groups: int, c_in: int, c_out: int, dtype: str, precision: str | None, last: bool = True) -> int:
        problem = case((2, groups * c_in, 6, 8, 8), groups * c_out, 3, 2, groups=groups)
        geometry = geometry_of(problem)
        return _groups_of_row(geometry, layout_like(geometry, last), dtype, precision)

    assert joined(4, 8, 8, "float32", "tf32") == 4
    assert joined(8, 16, 8, "float32", "tf32") == 4
    assert joined(6, 8, 8, "float32", "tf32") == 2
    assert joined(4, 8, 16, "bfloat16", None) == 4
    assert joined(4, 8, 8, "bfloat16", None) == 1  # a product is of 16 channels
    assert joined(4, 8, 8, "float32", "tf32x3") == 1
    assert joined(4, 8, 12, "float32", "tf32") == joined(4, 12, 8, "float32", "tf32") == 1
    assert joined(1, 8, 8, "float32", "tf32") == joined(3, 8, 8, "float32", "tf32") == 1
    assert joined(4, 8, 8, "float32", "tf32", last=False) == 1


def test_taps_along_w_are_channels_only_where_they_follow_each_other() -> None:
    def can_fold(*problem: Any, last: bool = True, dtype: str = "bfloat16", **fields: Any) -> bool:
        geometry = geometry_of(case(*problem, **fields))
        return _can_fold(geometry, layout_like(geometry, last), dtype, None if dtype == "bfloat16" else "tf32")

    x = (2, 64, 6, 8, 8)
    assert can_fold(x, 32, 2, 2)
    assert can_fold(x, 32, (3, 3, 2), (1, 2, 2))
    assert can_fold(x, 16, 2, 2, dtype="float32")
    assert can_fold(x, 32, 2, 2, (0, 0, 2))
    assert not can_fold(x, 32, 2, 2, last=False)
    assert not can_fold(x, 40, 2, 2)  # more than a row of 128 bytes
    assert not can_fold(x, 32, 2, 2, dtype="float32")
    for other in ((3, 2), (2, 1), (1, 1), (2, 2, 1), (2, 2, 0, 1), (2, 2, 0, 0, 2), (2, 2, 0, 0, 1, 2)):
        assert not can_fold(x, 32, *other), other


def test_upsampling_of_few_channels_is_planned_so() -> None:
    for dtype, precision, channels, fold in (
        ("bfloat16", None, 32, 2),
        ("bfloat16", None, 64, 1),
        ("float32", "tf32", 16, 2),
        ("float32", "tf32", 32, 1),
    ):
        geometry = geometry_of(case((2, 64, 64, 64, 64), channels, 2, 2))
        plan = plan_correlate_wgmma(geometry, dtype, layout_like(geometry, True), precision, DEVICES[90])
        assert isinstance(plan, Plan)
        assert dict(plan.defines)["FOLD"] == fold
        assert plan.maps[0].extents[0] == fold * channels


def test_every_kind_of_boxed_tile_is_reached() -> None:
    reached = Counter()
    for this in BOXED_CASES.values():
        plan = plan_for(this, smallest(this.spec, EXTENTS[len(this.spec.kernel)][0], groups=1))
        d = dict(plan.defines)
        for name in ("RESIDENT", "TAKE_TURNS", "OUT_CHANNELS_LAST", "INDEX64", "WORKERS", "BOXED"):
            reached[f"{name} {d[name]}"] += 1
        reached[f"rows of {plan.maps[0].row_bytes} bytes"] += 1
        reached["classes one by one"] += d["CLASSES"] < min(d["KERNEL_W"], d["STRIDE_W"])
        reached["classes at once"] += d["CLASSES"] > 1
        reached["several chunks"] += plan.maps[0].channels < this.spec.c_out_per_group
        reached["patches"] += any(problem_of(plan)["patches"])
    for kind in (
        *(f"{name} {value}" for name in ("RESIDENT", "TAKE_TURNS", "OUT_CHANNELS_LAST", "INDEX64") for value in (0, 1)),
        *(f"WORKERS {value}" for value in (1, 2, 3)),
        *(f"rows of {count} bytes" for count in (32, 64, 128)),
        *("classes one by one", "classes at once", "several chunks"),
    ):
        assert reached[kind], f"{kind}: {reached}"
    assert reached["BOXED 1"] == len(BOXED_CASES)


def test_every_kind_of_tile_is_reached() -> None:
    """Each macro and each way to read x has its cases."""
    reached = Counter()
    for this in CASES.values():
        plans = [
            plan_for(this, problem)
            for problem in (smallest(this.spec, EXTENTS[len(this.spec.kernel)][0]), *whole_rows(this))
        ]
        for plan in plans:
            d = dict(plan.defines)
            reached[f"vectors {read_by_vectors(plan)}, last {d['X_CHANNELS_LAST']}"] += 1
            for name in (
                "MERGE_W",
                "RESIDENT",
                "TAKE_TURNS",
                "OUT_CHANNELS_LAST",
                "INDEX64",
                "WORKERS",
                "STAGER_GROUPS",
            ):
                reached[f"{name} {d[name]}"] += 1
            live = min(d["KERNEL_W"], d["STRIDE_W"])
            reached["classes one by one"] += d["CLASSES"] < live
            reached["a slot a class"] += d["SLOT_CLASSES"] < d["CLASSES"]
            reached["classes of unequal taps"] += live > 1 and d["KERNEL_W"] % d["STRIDE_W"] > 0
    for kind in (
        *(f"vectors {vectors}, last {last}" for vectors in (False, True) for last in (0, 1)),
        *(
            f"{name} {value}"
            for name in ("MERGE_W", "RESIDENT", "TAKE_TURNS", "OUT_CHANNELS_LAST", "INDEX64")
            for value in (0, 1)
        ),
        *(f"{name} {value}" for name in ("WORKERS", "STAGER_GROUPS") for value in (1, 2)),
        "classes one by one",
        "classes of unequal taps",
    ):
        assert reached[kind], kind


# ---- planted faults --------------------------------------------------------------------------------------------------


def faulty_case(tile: Tile, precision: str | None = None, copied: bool = False) -> Case:
    """Return a case with two boxes along every axis, some chunks of channels and classes of two taps and of one."""
    spec = specialisation((3, 3), (2, 2), (1, 1), (12, 40 if copied else 33), (False, copied))
    dtype = "float32" if precision else "bfloat16"
    return Case(spec, dtype, precision, Device(90, 1, SHARED_BYTES), tile)


PASSING = faulty_case(Tile(1, 1, 1, 2, False, 2, 2, 3, False, False, False, 2, classes=2))
MERGED = faulty_case(Tile(1, 1, 2, 2, True, 2, 2, 3, False, False, False, 2, classes=2))
COPIED = faulty_case(Tile(1, 1, 1, 2, False, 2, 4, 3, False, False, False, 2, classes=2), "tf32x3", True)
BOXED = dataclasses.replace(
    faulty_case(Tile(2, 1, 1, 2, False, 4, 2, 3, False, False, False, 1, classes=2, boxed=True), copied=True),
    patches=True,
)
SPLIT = dataclasses.replace(BOXED, dtype="float32", precision="tf32x3")
SPLIT_IN_TURN = dataclasses.replace(
    SPLIT,
    spec=specialisation((3, 3), (1, 1), (1, 1), (12, 8), (False, True)),
    tile=Tile(2, 1, 1, 2, False, 1, 2, 3, True, True, False, 1, boxed=True),
    patches=False,
)
FLAT = dataclasses.replace(BOXED, patches=False)
TURNED = dataclasses.replace(
    BOXED, spec=specialisation((3, 3), (2, 2), (1, 1), (12, 40), (False, False)), patches=False, turns=True
)
JOINS = Case(
    specialisation((3, 3), (2, 2), (1, 1), (8, 8), (False, True)),
    "float32",
    "tf32",
    Device(90, 1, SHARED_BYTES),
    Tile(2, 1, 1, 4, False, 8, 2, 3, False, False, False, 1, classes=2, boxed=True, joined=4),
)
IN_USE = "with no wait for it|with no barrier in between|a GPU may miss it|arrives at|a bulk copy wrote"
TOO_EARLY = "before the wait that covers the copy"
# A replacement in the source, the message of the check that must catch it, and the case.
FAULTS = {
    "no wait for x": ("            x_ring.wait_until_full();\n", "", UNWRITTEN + "|" + IN_USE, PASSING),
    "no wait for the kernel that packs": (
        "if (thread < 0 || (X_TURNED && !BOXED)) wait_for_kernel_before();  // it packs",
        "// it packs",
        KERNEL_BEFORE,
        PASSING,
    ),
    "no wait for weights": ("weight_ring.wait_until_full();", "", UNWRITTEN + "|" + IN_USE, PASSING),
    "no wait for a free stage": ("ring.wait_until_free();\n                const int", "const int", IN_USE, PASSING),
    "items of the next box too early": ("warps_sync(1, STAGERS);  // nobody", "// nobody", IN_USE, PASSING),
    "rows behind boxes that nobody wrote": ("stages[box * of_box + i] = Piece{{0, 0, 0, 0}};", ";", UNWRITTEN, FLAT),
    "rows of no use that nobody wrote": ("stages[box * of_box + i] = Piece{{0, 0, 0, 0}};", ";", UNWRITTEN, PASSING),
    "a run that begins with another class": (
        "HAS_RUNS ? class_of_run(p) : 0;",
        "0;",
        VALUES + "|" + IN_USE + "|" + UNWRITTEN,
        PASSING,
    ),
    "an element of another class": (
        "from[i * across]",
        "from[0]",
        VALUES + "|heap-buffer-overflow|belong to no",
        PASSING,
    ),
    "an element beyond the row": (
        "within(at_w + c * DILATION_W, p.x_extent[2])",
        "within(at_w, p.x_extent[2])",
        VALUES + "|heap-buffer-overflow|belong to no",
        PASSING,
    ),
    "a worker that rests though it has rows": ("max(0, tiles - (int)", "max(0, tiles / 2 - (int)", VALUES, PASSING),
    "a tap of another class": ("+ of.number) * PIECES", "+ 0) * PIECES", VALUES, MERGED),
    "weights of the classes in another order": (
        "first = before * slots",
        "first = 0 * slots",
        VALUES + "|wrote|which thread",
        PASSING,
    ),
    "narrower products without a wait": (
        "if (LAGS && columns_of(slot) != ",
        "if (false && columns_of(slot) != ",
        "accumulators overlap",
        MERGED,
    ),
    "no wait for copies": ("    copy_async_wait<LATER>();\n", "", TOO_EARLY, COPIED),
    "the newest copies are handed over": ("8 * --under_way.count", "8 * (--under_way.count, 0)", TOO_EARLY, COPIED),
    "copies of another class": ("x += number * DILATION_W", "x += 0 * DILATION_W", VALUES + "|reads past", COPIED),
    "copies behind the last position": (
        "if (at >= count) break;",
        "",
        "with no barrier|past its end|" + VALUES,
        COPIED,
    ),
    "copies beyond the row": (
        "1u << (8 + st.h) | 1u << number;",
        "1u << (8 + st.h);",
        VALUES + "|reads past|belong to no",
        COPIED,
    ),
    "copies that are not split": (
        "    convert_x(stages + stage * PLANES * plane, count, plane, thread);\n",
        "",
        VALUES,
        COPIED,
    ),
    "boxes that no worker waits for": ("            x_ring.wait_until_full();\n", "", UNWRITTEN + "|" + IN_USE, BOXED),
    "no wait for a free stage of boxes": (
        "        ring.wait_until_free();\n        barrier_arrive_expecting(landed",
        "        barrier_arrive_expecting(landed",
        IN_USE + "|arrivals|in_flight",
        BOXED,
    ),
    "no wait for a free stage of boxes to split": (
        "        ring.wait_until_free();\n        barrier_arrive_expecting(landed",
        "        barrier_arrive_expecting(landed",
        IN_USE + "|arrivals|in_flight",
        SPLIT,
    ),
    "boxes that are split before they have landed": (
        "        barrier_wait(landed + ring.place, ring.round & 1);\n",
        "",
        UNWRITTEN + "|in_flight|bulk copy|" + TOO_EARLY,
        SPLIT,
    ),
    "boxes that are handed over as they come": (
        "            split_box(high, high",
        "            if (false) split_box(high, high",
        UNWRITTEN + "|" + TOO_EARLY,
        SPLIT,
    ),
    "parts that are not published": (
        "PIECES, thread);\n}\npublish_shared_writes();",
        "PIECES, thread);\n}",
        "did not publish",
        SPLIT,
    ),
    "low parts of the next class": (
        "high + CLASSES * PIECES * s.plane",
        "high + PIECES * s.plane",
        VALUES + "|" + IN_USE + "|" + UNWRITTEN + "|" + TOO_EARLY,
        SPLIT,
    ),
    "the high part for both": ("(part_a * CLASSES + of.number)", "(0 * CLASSES + of.number)", VALUES, SPLIT),
    "a piece that is not split": (
        "s.d * s.h * s.w * PIECES, thread);",
        "s.d * s.h * s.w * PIECES - 1, thread);",
        UNWRITTEN + "|" + VALUES,
        SPLIT,
    ),
    "boxes of the first team for each": (
        "split_boxes(ring, landed, own",
        "split_boxes(ring, weight_ring.free + RING, own",
        "arrivals|not all threads reach|bulk copies bring|" + UNWRITTEN + "|" + IN_USE,
        SPLIT_IN_TURN,
    ),
    "stages of the team before": (
        "x_ring.round = ring.round;\n",
        "",
        "arrivals|not all threads reach|bulk copies bring|in_flight|" + IN_USE,
        SPLIT_IN_TURN,
    ),
    "boxes without the padding": (
        "b.w * STRIDE_W - (Index)p.pad[2]), channel",
        "b.w * STRIDE_W), channel",
        VALUES,
        BOXED,
    ),
    "boxes of another class": ("at_w + (set * CLASSES + i) * DILATION_W,\n", "at_w,\n", VALUES, BOXED),
    "boxes of the first channels": ("channel + chunk * CHUNK,", "channel,", VALUES, BOXED),
    "bytes of boxes that nobody announced": (
        "(unsigned)(CLASSES * s.d * s.h",
        "(unsigned)((CLASSES - 1) * s.d * s.h",
        "bulk copies bring|arrivals of this phase|" + TOO_EARLY,
        BOXED,
    ),
    "a tap one row late": ("of.tap * AxisW::HOP * NEXT_ROW", "(of.tap * AxisW::HOP + 1) * NEXT_ROW", VALUES, BOXED),
    "eights of rows too near": (
        "describe_rows<ROW_BYTES>(stages, eight)",
        "describe_rows<ROW_BYTES>(stages, 8)",
        VALUES,
        BOXED,
    ),
    "boxes over the slots": ("(round_up(before + slots", "(round_up(before + 0 * slots", None, BOXED),
    "no wait for the kernel that turns": (
        "if (X_TURNED) wait_for_kernel_before();\nRing",
        "Ring",
        KERNEL_BEFORE,
        TURNED,
    ),
    "turned channels of another piece": ("rows + piece * next_piece +", "rows +", VALUES + "|" + UNWRITTEN, TURNED),
    "sums of another group": ("of.step / (CLASS_STEPS / JOINED);", "0;", VALUES, JOINS),
    "weights of the first group": ("(group * JOINED + joined) * p", "group * JOINED * p", VALUES, JOINS),
    "weights of two groups": (
        "if (JOINED > 1 && channel / WIDTH != joined) return;",
        "",
        VALUES + "|wrote|which thread|" + "belong to no|heap-buffer-overflow",
        JOINS,
    ),
    "merged taps that are not shifted": ("NEXT_TAP = SUM_ROWS + AxisW::HOP", "NEXT_TAP = SUM_ROWS", VALUES, MERGED),
}


def run(this: Case, sources: dict[str, str]) -> None:
    with on_host(this, sources):
        aligned = [] if this.tile.boxed else whole_rows(this)[1:2]
        groups = this.tile.joined if this.tile.boxed else 2
        for problem in (smallest(this.spec, (9, 19), (1, 1), groups), *aligned):
            check("input", problem, this.dtype, precision=this.precision)


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_caught(name: str) -> None:
    before, after, caught_by, this = FAULTS[name]
    with pytest.raises(AssertionError, match=caught_by):
        run(this, plant(kernel_sources("correlate_wgmma.cu"), before, after))


@pytest.mark.parametrize("this", [PASSING, MERGED, COPIED, BOXED, SPLIT, SPLIT_IN_TURN, TURNED, JOINS])
def test_without_a_fault_nothing_is_caught(this: Case) -> None:
    run(this, kernel_sources("correlate_wgmma.cu"))
