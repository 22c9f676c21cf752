"""The strided correlation of rows for Hopper, executed on the host under sanitizers, as `test_host_gradients.py`."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from math import gcd, prod
from typing import Any

import numpy as np
import pytest
from described import DEVICES, geometry_of, problem_of
from gradients import check
from host.build import kernel_sources, why_not
from host_correlate_rows import (
    Case,
    boxed_cases,
    boxed_problems,
    bytes_copied,
    cases,
    draw_tile,
    layout_for,
    of_each_way,
    of_whole_rows,
    on_host,
    padded,
    plan_for,
    shares_last_tap,
)
from host_correlate_wgmma import EXTENTS, LONGEST, SHARED_BYTES, smallest
from host_gradients import check_drawn, specialisation
from hypothesis import assume
from strategies import Ints, Problem, case, place
from test_host_faults import KERNEL_BEFORE, UNWRITTEN, VALUES, plant

import cuconvt
from cuconvt.plan import DTYPE_CODES, Device, Layout, Refusal
from cuconvt.plan_correlate_rows import Work, plan_correlate_rows
from cuconvt.plan_correlate_wgmma import as_read
from cuconvt.plan_wgmma_sizes import Tile
from cuconvt.tensor_map import TensorMap

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))

ONE = Device(90, 1, SHARED_BYTES)
BUDGET = 0.03  # a wgmma of 128 threads takes longer than its products
CASES = cases()
BOXED_CASES = boxed_cases()


@pytest.mark.parametrize("name", CASES)
def test_any_geometry(name: str) -> None:
    this = CASES[name]
    rank = len(this.spec.kernel)
    with on_host(this):

        def alike(problem: Problem) -> None:
            if problem.x_layout == "broadcast":  # as y is, of which a single position is channels-last as well
                assume(prod(problem.out_shape[-rank:]) > 1)
            check("input", problem, this.dtype, precision=this.precision, calls=1)

        first, *others = (smallest(this.spec, extent, (this.before_w, 0)) for extent in EXTENTS[rank])
        check("input", first, this.dtype, precision=this.precision, calls=this.spec.calls)
        alone = [("input", problem) for problem in others]
        alone += [("conv", problem) for problem in of_each_way(this).values()]
        for operation, problem in alone:
            check(operation, problem, this.dtype, precision=this.precision, calls=1)
        check_drawn(this.spec, LONGEST[rank], BUDGET, CASES, name, alike)


@pytest.mark.parametrize("name", BOXED_CASES)
def test_any_geometry_of_boxes(name: str) -> None:
    this = BOXED_CASES[name]
    with on_host(this):

        def alike(problem: Problem) -> None:
            check("input", problem, this.dtype, precision=this.precision, calls=1)

        first, *others, of_conv, whole = boxed_problems(this)
        check("input", first, this.dtype, precision=this.precision, calls=this.spec.calls)
        for operation, problem in (*(("input", problem) for problem in others), ("conv", of_conv), ("input", whole)):
            check(operation, problem, this.dtype, precision=this.precision, calls=1)
        check_drawn(this.spec, LONGEST[len(this.spec.kernel)], BUDGET, BOXED_CASES, name, alike)


def test_a_single_position_that_is_broadcast_is_refused() -> None:
    problem = case((2, 16, 1, 1), 8, (1, 2), (1, 2), padding=(0, (0, 1)), x_layout="broadcast")
    x, weight = np.empty((2, 16, 1, 1, 1)), np.empty((16, 8, 1, 1, 2))
    y = place(np.zeros(problem.out_shape), 2, "broadcast")[0][:, :, None]
    refused = plan_correlate_rows(geometry_of(problem), "bfloat16", Layout.of(x, weight, None, y), None, DEVICES[90])
    assert refused == Refusal("correlate_rows", "reads rows, got channels that follow each other")


@pytest.mark.parametrize(
    ("kernel", "stride", "dtype", "precision", "in_boxes"),
    [
        (12, 10, "bfloat16", None, False),
        (17, 16, "float16", None, False),
        (7, 6, "float32", "tf32", False),
        (7, 7, "float32", "tf32x3", False),
        (7, 6, "float32", "tf32", True),
        (7, 7, "float32", "tf32x3", True),
    ],
)
def test_far_apart_along_w(kernel: int, stride: int, dtype: str, precision: str | None, in_boxes: bool) -> None:
    spec = specialisation((kernel,), (stride,), (1,), (8, 17), (False, False))
    spec = dataclasses.replace(spec, shifts=(3,))
    if in_boxes:
        spec = of_whole_rows(dataclasses.replace(spec, groups=1))
    tile = draw_tile(random.Random(stride), spec, dtype, precision, in_boxes)
    assert tile is not None
    this = Case(spec, dtype, precision, Device(90, 2, SHARED_BYTES), tile, boxed=in_boxes)
    others = boxed_problems(this) if in_boxes else of_each_way(this).values()
    with on_host(this):
        for problem in (padded(spec, (261,)), *others):
            check("input", problem, dtype, precision=precision, calls=1)


def test_every_kind_of_tile_is_reached() -> None:
    """Each macro and each way to copy y has its cases."""
    reached = Counter()
    for this in CASES.values():
        rank = len(this.spec.kernel)
        first = smallest(this.spec, EXTENTS[rank][0], (this.before_w, 0))
        for plan in (plan_for(this, first), *(plan_for(this, problem) for problem in of_each_way(this).values())):
            d = dict(plan.defines)
            reached[f"{bytes_copied(plan)} bytes at a time"] += 1
            for name in ("RESIDENT", "OUT_CHANNELS_LAST", "INDEX64", "WORKERS", "PAD_W", "X_STAGES", "STRIDE_W"):
                reached[f"{name} {d[name]}"] += 1
            reached[f"{problem_of(plan)['together'][0]} results together"] += 1
            reached["patches"] += any(problem_of(plan)["patches"])
            reached["an odd number of taps"] += d["KERNEL_W"] % 2
            reached["groups that share the last one"] += shares_last_tap(this)
            reached["taps apart"] += d["KERNEL_W"] > 1 and d["DILATION_W"] > 1
    for kind in (
        *(f"{size} bytes at a time" for size in (0, 4, 8, 16)),
        *(f"{name} {value}" for name in ("RESIDENT", "OUT_CHANNELS_LAST", "INDEX64") for value in (0, 1)),
        *(f"{name} {value}" for name in ("WORKERS", "PAD_W") for value in (1, 2)),
        *(f"X_STAGES {value}" for value in (2, 4, 8)),
        *(f"STRIDE_W {value}" for value in (1, 2, 3, 4, 6, 8)),
        *(f"{count} results together" for count in (1, 2, 8)),
        "patches",
        "an odd number of taps",
        "groups that share the last one",
        "taps apart",
    ):
        assert reached[kind], kind


def test_every_kind_of_boxed_tile_is_reached() -> None:
    """The same where copies bring y, with boxes that begin anywhere and all that they have beyond an edge."""
    reached = Counter()
    for this in BOXED_CASES.values():
        for problem in boxed_problems(this):
            plan, spec = plan_for(this, problem), this.spec
            assert plan.maps
            d, fields = dict(plan.defines), problem_of(plan)
            work = Work(*as_read(geometry_of(problem), layout_for(spec, problem)), this.dtype, this.precision)
            box, channels = fields["box"], work.channels(this.tile)
            for name in (
                "DTYPE",
                "RESIDENT",
                "INDEX64",
                "WORKERS",
                "MIN_BLOCKS",
                "PAD_W",
                "X_STAGES",
                "STRIDE_W",
                "WHOLE_H",
            ):
                reached[f"{name} {d[name]}"] += 1
            reached[f"products {work.shape.products}, {work.shape.itemsize} bytes"] += 1
            reached[f"the channel {fields['x_vector'][0]} further"] += 1
            reached[f"{fields['together'][0]} results together"] += 1
            reached[f"{min(2, spec.groups or problem.groups)} groups"] += 1
            reached[f"y that is {problem.out_layout}"] += 1
            reached[f"{len(spec.kernel)} axes"] += 1
            for i in range(fields["tiles"][2]):
                reached[f"a lead of {(work.first_unit + i * box[2]) % work.aligned} of {work.aligned}"] += 1
            for axis, name in enumerate("DHW"):
                reached[f"several boxes along {name}"] += fields["tiles"][axis] > 1
            for axis, name in enumerate("DH"):
                if not (name == "H" and d["WHOLE_H"]):
                    reached[f"a halo along {name}"] += box[axis] > 1 and work.halo[axis] > 0
                    reached[f"classes along {name}"] += work.live[axis] > 1
                    reached[f"classes of unequal taps along {name}"] += d[f"KERNEL_{name}"] % work.live[axis] > 0
            if d["WHOLE_H"]:
                gap = gcd(d["STRIDE_H"], d["DILATION_H"])
                reached["rows between positions"] += box[1] > 1 and d["STRIDE_H"] > gap
                reached["rows between taps"] += d["DILATION_H"] > gap
                reached["rows that no tap reads"] += gap > 1
            reached["several boxes a block"] += fields["blocks"][0] > plan.grid
            reached["several blocks"] += plan.grid > 1
            reached["several chunks"] += spec.c_out_per_group > channels
            reached["channels beyond the last"] += spec.c_out_per_group % channels > 0
            reached["several eights of a chunk"] += channels > 8
            reached["an odd number of taps"] += d["KERNEL_W"] % 2
            reached["groups that share the last one"] += shares_last_tap(this)
            reached["taps apart"] += d["KERNEL_W"] > 1 and d["DILATION_W"] > 1
            reached["wider steps between taps than positions"] += d["KERNEL_W"] > 1 and d["DILATION_W"] > d["STRIDE_W"]
    for kind in (
        *(f"{name} {value}" for name in ("RESIDENT", "INDEX64", "WHOLE_H") for value in (0, 1)),
        *(f"{name} {value}" for name in ("WORKERS", "STRIDE_W") for value in (1, 2, 3)),
        *(f"STRIDE_W {value}" for value in (4, 6, 8)),
        *(f"MIN_BLOCKS {value}" for value in (1, 2)),
        *(f"PAD_W {value}" for value in (0, 1, 2, 3)),
        *(f"X_STAGES {value}" for value in (2, 3, 4, 6)),
        *(f"products {kind} bytes" for kind in ("1, 2", "1, 4", "3, 4")),
        *(f"DTYPE {DTYPE_CODES[dtype]}" for dtype in ("float16", "bfloat16", "float32")),
        *(f"the channel {count} further" for count in (1, 4)),
        *(f"{count} results together" for count in (1, 2, 8)),
        *(f"{count} groups" for count in (1, 2)),
        *(f"{count} axes" for count in (1, 2, 3)),
        *(f"y that is {layout}" for layout in ("cropped", "contiguous")),
        *(f"a lead of {units} of {aligned}" for aligned in (1, 2, 4) for units in range(aligned)),
        *(f"several boxes along {axis}" for axis in "DHW"),
        *(f"{what} along {axis}" for what in ("a halo", "classes", "classes of unequal taps") for axis in "DH"),
        *(f"rows {what}" for what in ("between positions", "between taps", "that no tap reads")),
        "several boxes a block",
        "several blocks",
        "several chunks",
        "channels beyond the last",
        "several eights of a chunk",
        "an odd number of taps",
        "groups that share the last one",
        "taps apart",
        "wider steps between taps than positions",
    ):
        assert reached[kind], f"{kind}: {reached}"


@pytest.mark.parametrize("in_boxes", [False, True], ids=["", "boxed"])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_what_no_tap_reads_does_not_count(dtype: str, in_boxes: bool) -> None:
    """Of a word or a pair of taps some elements may be nobody's: infinities and NaN there reach nothing.

    Nor do the next image's, which follow the last channel, and what lies beyond the rows: NaN.
    """
    alone = 2 if in_boxes and dtype == "float32" else 1  # groups of channels
    for kernel, dilation, after, k_steps in ((1, 1, 0, alone), (3, 1, 0, alone), (2, 3, 0, alone), (3, 1, 2, 2)):
        tile = dataclasses.replace(TILE, tiles_m=4, k_steps=k_steps)
        spec = specialisation((kernel,), (2,), (dilation,), (5, 6), (False, False))
        precision = None if dtype == "float16" else "tf32x3"
        this = Case(dataclasses.replace(spec, shifts=(0,)), dtype, precision, ONE, tile, boxed=in_boxes)
        random = np.random.default_rng(kernel)
        for width in (61, 64):
            x = random.normal(size=(2, 6, width)).astype(dtype)
            weight = random.normal(size=(5, 6, kernel)).astype(dtype)
            x[0, :, 40] = np.inf
            x[1][:, [7, 20, 33]] = np.nan, np.inf, -np.inf
            cropped, _ = place(x, 1, "cropped")
            with on_host(this):
                got = cuconvt.conv1d(cropped, weight, stride=2, padding=((0, after),), dilation=dilation)
            firsts = range(0, 2 * got.shape[2], 2)
            read = [x[:, 0, first : first + dilation * (kernel - 1) + 1 : dilation] for first in firsts]
            finite = np.stack([np.isfinite(of_taps).all(axis=1) for of_taps in read], axis=1)
            assert finite.any() != finite.all()
            assert np.array_equal(np.isfinite(got), np.broadcast_to(finite[:, None], got.shape))


# ---- joined rows -----------------------------------------------------------------------------------------------------

TILE = Tile(1, 1, 2, 2, False, 2, 4, 3, False, False, False, 2)


def joined_case(
    kernel: Ints, stride: Ints, channels: tuple[int, int], dtype: str, precision: str | None, index64: bool = False
) -> Case:
    """Return a case whose rows of y are whole 16 bytes as long as those of all taps along H are one."""
    spec = specialisation(kernel, stride, (1,) * len(kernel), channels, (False, False))
    spec = dataclasses.replace(spec, groups=1, shifts=(0,) * len(kernel))
    return Case(spec, dtype, precision, ONE, TILE, index64=index64, boxed=True)


JOINED = {
    "images": (joined_case((2, 2), (2, 2), (12, 17), "bfloat16", None), ((7, 14), (9, 6), (1, 2), (4, 62))),
    "volumes": (joined_case((3, 2, 2), (2, 2, 2), (12, 20), "float32", "tf32"), ((3, 9, 5), (5, 2, 7), (2, 3, 31))),
    "split": (joined_case((2, 2, 2), (2, 2, 2), (12, 20), "float32", "tf32x3"), ((3, 9, 5), (5, 2, 7), (2, 3, 31))),
    "by four": (joined_case((1, 4, 3), (1, 4, 4), (12, 20), "float16", None, True), ((3, 5, 7), (2, 4, 15))),
}


@pytest.mark.parametrize("name", JOINED)
def test_joined_rows(name: str) -> None:
    this, extents = JOINED[name]
    found = set()
    with on_host(this):
        for extent in extents:
            problem = padded(this.spec, extent)
            # Rows that end with what no tap reads, and some that none reads.
            more = (this.spec.stride[-2] // 4 * 2, this.spec.stride[-1] - this.spec.kernel[-1])
            problem = dataclasses.replace(problem, output_padding=(*(0,) * (len(extent) - 2), *more))
            plan = plan_for(this, problem)
            assert dict(plan.defines)["JOIN_H"] == 1
            found.add(problem_of(plan)["x_vector"][0])
            for operation in ("input", "conv"):
                check(operation, problem, this.dtype, precision=this.precision, calls=1)
    assert found == {4 if name == "by four" else 1}


# ---- rows of 128 bytes -----------------------------------------------------------------------------------------------


def swizzled_case(kernel: Ints, stride: Ints, dtype: str, precision: str | None, **fields: Any) -> Case:
    """Return a case whose boxes have rows of 128 bytes, in the order of copies."""
    spec = specialisation(kernel, stride, (1,) * len(kernel), (12, 20), (False, False))
    spec = of_whole_rows(dataclasses.replace(spec, groups=1, shifts=(*(None,) * (len(kernel) - 1), 0)))
    k_steps = 4 if dtype == "float32" else 2  # two eights of channels, of which lanes have two each
    tile = dataclasses.replace(TILE, **{"k_steps": k_steps, "x_stages": 2, "swizzled": True, **fields})
    return Case(spec, dtype, precision, ONE, tile, boxed=True)


SWIZZLED = {
    "16 bits": swizzled_case((2, 2), (2, 2), "bfloat16", None),
    "16 bits, by four": swizzled_case((3, 3), (2, 4), "float16", None, whole_h=True),
    "16 bits, by eight": swizzled_case((2, 7), (2, 8), "bfloat16", None),
    "TF32": swizzled_case((3, 2), (2, 2), "float32", "tf32", whole_h=True),
    "TF32, by four, with classes": swizzled_case((3, 4), (2, 4), "float32", "tf32"),
    "3xTF32": swizzled_case((2, 2), (2, 2), "float32", "tf32x3"),
    "3xTF32, a volume": swizzled_case((3, 2, 2), (2, 2, 2), "float32", "tf32x3"),
}


@pytest.mark.parametrize("name", SWIZZLED)
def test_swizzled_rows(name: str) -> None:
    this = SWIZZLED[name]
    others = (3,) * (len(this.spec.kernel) - 2)
    with on_host(this):
        for extent in ((5, 37), (3, 9), (2, 70)):  # several boxes along W, and a narrower result
            problem = padded(this.spec, (*others, *extent))
            plan = plan_for(this, problem)
            assert plan.maps[0].swizzled_bytes == 128
            assert dict(plan.defines)["SWIZZLED"] == 1
            for operation in ("input", "conv"):
                check(operation, problem, this.dtype, precision=this.precision, calls=1)


# ---- planted faults --------------------------------------------------------------------------------------------------


def faulty_case(tile: Tile, dtype: str = "bfloat16", before_w: int = 1) -> Case:
    """Return a case with two boxes along every axis, some chunks of channels and classes of two taps and of one."""
    spec = dataclasses.replace(
        specialisation((3, 3), (2, 2), (1, 1), (12, 35), (False, False)), shifts=(None, before_w)
    )
    return Case(spec, dtype, "tf32x3" if dtype == "float32" else None, ONE, tile)


PASSING = faulty_case(TILE)
SPLIT = faulty_case(dataclasses.replace(TILE, x_stages=2), "float32")
ALONE = faulty_case(dataclasses.replace(TILE, k_steps=1), "float32")  # groups come one by one
IN_USE = "with no wait for it|with no barrier in between|a GPU may miss it|arrives at|a bulk copy wrote"
TOO_EARLY = "before the wait that covers the copy"
# How fragments of a step are picked, and what follows.
PICKED = """pick(a[step % 2], windows[step % 2], x.zero);
        if (SHARED) pick_last(last[step / 2 % 2], windows[step % 2], group);
        """
FENCE, GROUP = "wgmma_fence();\n        multiply_group(acc", "const Group"
# A replacement in the source, the message of the check that must catch it, and the case.
FAULTS = {
    "no wait for x": ("            x_ring.wait_until_full();\n", "", UNWRITTEN + "|" + IN_USE, PASSING),
    "no wait for the kernel that packs": (
        "        if (thread < 0) wait_for_kernel_before();",
        "",
        KERNEL_BEFORE,
        PASSING,
    ),
    "no wait for weights": ("weight_ring.wait_until_full();", "", UNWRITTEN + "|" + IN_USE, PASSING),
    "no wait for a free stage": (
        "x_ring.wait_until_free();\n                stage_x",
        "stage_x",
        IN_USE + "|" + TOO_EARLY,
        PASSING,
    ),
    "items of the next box too early": ("warps_sync(1, STAGERS);  // nobody", "// nobody", IN_USE, PASSING),
    "rows of no use that nobody wrote": ("stages[i] = Piece{{0, 0, 0, 0}};", ";", UNWRITTEN, PASSING),
    "no wait for copies": ("copy_async_wait<IN_FLIGHT>();", "", TOO_EARLY, PASSING),
    "a stage given back before all lanes have loaded": (
        "            barrier_arrive(x_ring.free",
        "            if (lane == 0) for (int i = 0; i < 32; ++i) barrier_arrive(x_ring.free",
        IN_USE + "|" + TOO_EARLY,
        PASSING,
    ),
    "fragments that products still read": (
        PICKED + FENCE,
        PICKED.replace("step % 2", "0", 1) + FENCE,
        "A of a wgmma|" + VALUES,
        PASSING,
    ),
    "rows from where they are staged": ("of_thread + lead(p, b.w) * UNIT", "of_thread", VALUES, PASSING),
    "the other half of a word": ("(first % 2 ? 0x32 : 0x10)", "(first % 2 ? 0x10 : 0x32)", VALUES, PASSING),
    "elements beyond the row": ("if (bits) bits |=", "bits |=", VALUES + "|reads past|belong to no", SPLIT),
    "the second element beyond the row": (
        "if (there && (item.place & 2))",
        "if (there)",
        VALUES + "|reads past|heap-buffer-overflow|belong to no",
        PASSING,
    ),
    "channels beyond the last": (
        "inside && channel + k < st.channels;\n            if (BYTES",
        "inside;\n            if (BYTES",
        VALUES + "|reads past|belong to no",
        SPLIT,
    ),
    "weights of the classes in another order": (
        "first = before * slots",
        "first = 0 * slots",
        VALUES + "|wrote|which thread",
        PASSING,
    ),
    "results of one position in place of two": (
        "const int index = target * (int)p.together;",
        "const int index = target;",
        VALUES + "|wrote|which thread|misaligned",
        PASSING,
    ),
    "chains that are not added up": (
        "    wgmma_wait<0>();\n    collect(TILES_M",
        "    collect(TILES_M",
        "a GPU may miss it|no wait|wait",
        SPLIT,
    ),
}


def boxed_case(groups: int | None, channels: tuple[int, int], dtype: str, precision: str | None, **fields: Any) -> Case:
    """Return a case with classes of two taps and of one and some chunks, which copies bring."""
    spec = specialisation((3, 3, 3), (2, 2, 2), (1, 1, 1), channels, (False, False))
    spec = of_whole_rows(dataclasses.replace(spec, groups=groups, shifts=(None, None, 1)))
    return Case(spec, dtype, precision, ONE, dataclasses.replace(TILE, **fields), boxed=True)


def of_each_other_channel(this: Case) -> list[Problem]:
    """Return a problem with several boxes for each other one of eight channels that lanes may have."""
    found: dict[int, Problem] = {}
    for width in range(9, 25):
        problem = dataclasses.replace(padded(this.spec, (3, 9, width)), padding=((1, 0), (1, 0), (1, 0)))
        found.setdefault(problem_of(plan_for(this, problem))["x_vector"][0], problem)
    assert set(found) == {1, 4}
    return list(found.values())


BOXED = boxed_case(1, (12, 35), "bfloat16", None, x_stages=3)
WHOLE_H = boxed_case(1, (12, 35), "bfloat16", None, x_stages=2, whole_h=True)
BOXED_SPLIT = boxed_case(1, (12, 20), "float32", "tf32x3", x_stages=2)
BOXED_GROUPS = boxed_case(None, (12, 16), "float32", "tf32")
ELSEWHERE = VALUES + "|" + UNWRITTEN + "|" + IN_USE + "|past its end"
NEVER_COME = "not all threads reach a barrier.* lacks 0 of 1 arrivals and [1-9]"
# The same of rows that copies bring.
FAULTS_BOXED = {
    "no wait for x": ("            x_ring.wait_until_full();\n", "", UNWRITTEN + "|" + IN_USE, BOXED),
    "no wait for a free stage": (
        "x_ring.wait_until_free();\n                bring_slices",
        "bring_slices",
        IN_USE,
        BOXED,
    ),
    "fewer bytes than come": (
        "slices * pieces * (int)",
        "(slices * pieces - 1) * (int)",
        "bulk copies bring .* bytes to the mbarrier",
        BOXED,
    ),
    "more bytes than come": ("slices * pieces * (int)", "(slices * pieces + 1) * (int)", NEVER_COME, BOXED),
    "no slices of a halo": (
        "(int)p.box[0] + (taps_of<AxisD, KERNEL_D>(d) - 1) * AxisD::HOP, pieces",
        "(int)p.box[0], pieces",
        ELSEWHERE,
        BOXED,
    ),
    "a slice too few": ("for (int i = 0; i < slices; ++i)", "for (int i = 1; i < slices; ++i)", NEVER_COME, BOXED),
    "slices over each other": ("to + i * pieces, x", "to, x", IN_USE, BOXED),
    "slices that follow each other": ("at_d + i * STRIDE_D", "at_d + i", VALUES, BOXED),
    "slices of another class": (" + d * DILATION_D;\n    const int at_h", ";\n    const int at_h", VALUES, BOXED),
    "rows of another class": (" + h * DILATION_H;\n    const int at_w", ";\n    const int at_w", VALUES, BOXED),
    "slices of the first box": ("(b.d * STRIDE_D - (Index)", "(0 * STRIDE_D - (Index)", VALUES, BOXED),
    "rows of the first box": ("(b.h * STRIDE_H - (Index)", "(0 * STRIDE_H - (Index)", VALUES, BOXED),
    "no padding along D": ("b.d * STRIDE_D - (Index)p.pad[0])", "b.d * STRIDE_D)", VALUES, BOXED),
    "no padding along H": ("b.h * STRIDE_H - (Index)p.pad[1])", "b.h * STRIDE_H)", VALUES, BOXED),
    "rows of the first image": ("at_d + i * STRIDE_D, (int)b.n", "at_d + i * STRIDE_D, 0", VALUES, BOXED),
    "channels of the first chunk": ("p.c_in) + chunk * CHUNK;\n", "p.c_in);\n", VALUES, BOXED),
    "channels of the first group": ("(int)(b.group * p.c_in) + chunk", "chunk", VALUES, BOXED_GROUPS),
    "rows from where they are staged": ("of_thread + lead(p, b.w) * UNIT", "of_thread", ELSEWHERE, BOXED),
    "rows from an element that is not aligned": (
        "(first_unit(p, b.w) - lead(p, b.w)) * STRIDE_W), channel",
        "first_unit(p, b.w) * STRIDE_W), channel",
        "not a multiple of 16 bytes",
        BOXED,
    ),
    "a stage given back before all lanes have loaded": (
        "            barrier_arrive(x_ring.free",
        "            if (lane == 0) for (int i = 0; i < 32; ++i) barrier_arrive(x_ring.free",
        IN_USE,
        BOXED,
    ),
    "a stage given back at its first taps": (
        "stages[x_ring.place * stage_pieces(p, s)].value;",
        "(barrier_arrive(x_ring.free + x_ring.place), stages[x_ring.place * stage_pieces(p, s)].value);",
        IN_USE,
        BOXED,
    ),
    "the next channel of a thread": ("(p.x_vector == 1 ? 2 : 1)", "1", ELSEWHERE, BOXED),
    "the channel after the next one of a thread": ("(p.x_vector == 1 ? 2 : 1)", "2", ELSEWHERE, BOXED),
    "weights of channels one after the other": ("BOXED && p.x_vector == 1 ? place", "false ? place", VALUES, BOXED),
    "weights of every other channel": ("BOXED && p.x_vector == 1 ? place", "BOXED ? place", VALUES, BOXED),
    "weights of every other channel, float32": (
        "BOXED && p.x_vector == 1 ? place",
        "BOXED ? place",
        VALUES,
        BOXED_GROUPS,
    ),
    "the other half of eight channels": ("group * PIECE % 8 / 4 + channel", "channel", ELSEWHERE, BOXED_SPLIT),
    "the first eight channels": ("group * PIECE / 8 * x.next_eight", "0 * x.next_eight", ELSEWHERE, BOXED),
    "a tap along D one row away": ("tap_d * AxisD::HOP * of.slice", "tap_d * AxisD::HOP * of.line", ELSEWHERE, BOXED),
    "a tap along H one slice away": (": AxisH::HOP * of.line", ": AxisH::HOP * of.slice", ELSEWHERE, BOXED),
    "a tap along H as far as a position": (
        ": AxisH::HOP * of.line",
        ": STEP_H * of.line",
        ELSEWHERE,
        WHOLE_H,
    ),
    "a position along H as near as a tap": ("h * STEP_H * of.line) * 4", "h * of.line) * 4", ELSEWHERE, WHOLE_H),
    "rows of a class where there are all": ("(int)p.box[1] - 1) * STEP_H +", "(int)p.box[1] - 1) +", IN_USE, WHOLE_H),
    "pieces of a row as they are in memory": ("(int)threadIdx.x % 4 * 32", "0", VALUES, SWIZZLED["16 bits"]),
    "pieces of a thread's other channel": (
        "SWIZZLED ? of_eight * 16",
        "false ? of_eight * 16",
        VALUES,
        SWIZZLED["TF32"],
    ),
    "stages that are not aligned": (
        "SWIZZLED ? 1024 : 128);",
        "128);",
        "align|" + VALUES,
        SWIZZLED["3xTF32"],
    ),
    "positions beyond the box": ("d < s.d ? (d * of.slice", "true ? (d * of.slice", ELSEWHERE, BOXED),
    "joined rows of another tap": ("(int)p.box[2] * UNIT : AxisH", "0 : AxisH", VALUES, JOINED["images"][0]),
    "joined rows as far apart as others": (
        "JOIN_H ? (int)b.h : (int)(b.h * STRIDE_H",
        "false ? (int)b.h : (int)(b.h * STRIDE_H",
        VALUES,
        JOINED["images"][0],
    ),
    "a halo of joined rows": ("(JOIN_H ? 0 : REACH_H)", "REACH_H", ELSEWHERE + "|" + NEVER_COME, JOINED["images"][0]),
    "fragments that products still read": (
        PICKED + FENCE,
        PICKED.replace("step % 2", "0", 1) + FENCE,
        "A of a wgmma",
        BOXED,
    ),
    "fragments that products of three parts still read": (
        PICKED + GROUP,
        PICKED.replace("step % 2", "0", 1) + GROUP,
        "A of a wgmma",
        BOXED_SPLIT,
    ),
    "the last tap of groups that products still read": (
        PICKED + FENCE,
        PICKED.replace("step / 2 % 2", "0") + FENCE,
        "A of a wgmma",
        BOXED,
    ),
    "the last tap of the second group for both": ("group % 2 * 2 + half", "half", ELSEWHERE, BOXED_GROUPS),
    "the other half of the last tap's word": (
        "LAST % 2 ? 0x7632 : 0x5410",
        "LAST % 2 ? 0x5410 : 0x7632",
        VALUES,
        BOXED,
    ),
    "the high part of the last tap for both": ("a.value[PARTS - 1][i]);", "a.value[0][i]);", VALUES, BOXED_SPLIT),
    "weights of the last tap of one group for two": ("is_last ? i * PIECE : 0", "0", VALUES, BOXED_SPLIT),
    "weights of the last tap in pairs": ("= is_last ? read[piece]", "= false ? read[piece]", VALUES, BOXED),
    "weights of the group before": ("group % TOGETHER * PAIRS", "0 * PAIRS", VALUES, BOXED),
    "the other half of a word": ("(first % 2 ? 0x32 : 0x10)", "(first % 2 ? 0x10 : 0x32)", VALUES, BOXED),
    "the other half of the second tap's word": (
        "second % 2 ? 0x7600 : 0x5400",
        "second % 2 ? 0x5400 : 0x7600",
        VALUES,
        BOXED,
    ),
    "the high part for both": ("a.value[PARTS - 1][pair][i]);", "a.value[0][pair][i]);", VALUES, BOXED_SPLIT),
    "a second tap of the last pair": (
        "a.value[part][pair][i] = zero;",
        "a.value[part][pair][i] = ~0u;",
        VALUES,
        ALONE,
    ),
}


def run(this: Case, sources: dict[str, str]) -> None:
    if this.tile.swizzled:
        problems = [padded(this.spec, extent) for extent in ((5, 37), (3, 9))]
    elif len(this.spec.kernel) == 2 and this.boxed:
        problems = [padded(this.spec, extent) for extent in ((19, 14), (7, 6))]
    elif this.boxed:
        problems = of_each_other_channel(this)
    else:
        problems = [padded(this.spec, (9, 19)), *of_each_way(this).values()]
    with on_host(this, sources):
        for problem in problems:
            check("input", problem, this.dtype, precision=this.precision)


@pytest.mark.parametrize(
    "fault",
    [*FAULTS.values(), *FAULTS_BOXED.values()],
    ids=[*FAULTS, *(f"boxed: {name}" for name in FAULTS_BOXED)],
)
def test_fault_is_caught(fault: tuple[str, str, str, Case]) -> None:
    before, after, caught_by, this = fault
    with pytest.raises(AssertionError, match=caught_by):
        run(this, plant(kernel_sources("correlate_rows.cu"), before, after))


@pytest.mark.parametrize(
    "this",
    [PASSING, SPLIT, ALONE, BOXED, WHOLE_H, BOXED_SPLIT, BOXED_GROUPS, JOINED["images"][0]],
    ids=[
        "16 bits",
        "3xTF32",
        "groups alone",
        *(f"{which}, boxed" for which in ("16 bits", "whole along H", "3xTF32", "groups")),
        "joined along H",
    ],
)
def test_without_a_fault_nothing_is_caught(this: Case) -> None:
    run(this, kernel_sources("correlate_rows.cu"))


def test_copies_round_to_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    """A number between two of TF32 becomes the nearer one, and the lower one if copies leave it as it is."""
    spec = of_whole_rows(dataclasses.replace(specialisation((1,), (2,), (1,), (5, 6), (False, False)), shifts=(0,)))
    this = Case(spec, "float32", "tf32", ONE, dataclasses.replace(TILE, tiles_m=4), boxed=True)
    y, _ = place(np.full((1, 6, 61), 1 + 1.5 * 2**-11, "float32"), 1, "cropped")
    weight, map_of_rows = np.eye(5, 6, dtype="float32")[:, :, None], Work.map_of_rows

    def as_it_is(*arguments: Any) -> TensorMap:
        return dataclasses.replace(map_of_rows(*arguments), dtype="float32")

    for expected in (1 + 2**-10, 1):
        with on_host(this):
            assert np.all(cuconvt.conv1d(y, weight, stride=2, precision="tf32") == expected)
        monkeypatch.setattr(Work, "map_of_rows", as_it_is)
