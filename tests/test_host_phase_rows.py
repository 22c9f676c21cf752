"""The phase GEMM of rows for Hopper, executed on the host under sanitizers, as `test_host.py`."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from math import gcd
from typing import Any

import numpy as np
import pytest
import reference
from described import geometry_of, problem_of
from harness import call, check, to_numpy
from host.build import kernel_sources, why_not
from host_gradients import check_drawn
from host_phase_rows import (
    ANY_TILE,
    BUDGET,
    EXTENTS,
    LONGEST,
    SHARED_BYTES,
    Case,
    cases,
    fitted,
    on_host,
    padded,
    plan_for,
    work_of,
)
from special import check_denormals, check_infinities, check_scales
from strategies import DTYPES, KINDS, Ints, Problem, Specialisation, attempts, place
from test_host_faults import KERNEL_BEFORE, UNWRITTEN, VALUES, plant

from cuconvt.plan import DTYPE_CODES, Device
from cuconvt.plan_phase_rows_work import Work
from cuconvt.tensor_map import TensorMap

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))

ONE = Device(90, 1, SHARED_BYTES)
CASES = cases()


def own_problems(this: Case) -> list[Problem]:
    """Return problems with several boxes, padding that cuts off inputs and, of rows one by one, some that x fills."""
    rank = len(this.spec.kernel)
    found = [padded(this, extent, index == 1) for index, extent in enumerate(EXTENTS[rank])]
    if not this.flat:
        extent = (*(3,) * (rank - 1), 24)
        found.append(padded(this, extent, x_layout="contiguous", n=3))
    return found


@pytest.mark.parametrize("name", CASES)
def test_any_geometry(name: str) -> None:
    """Whatever N, extents and other padding, two programs do: the kernel's, and that which packs the weights."""
    this = CASES[name]
    first, *others = own_problems(this)
    with on_host(this) as backend:

        def alike(problem: Problem) -> None:
            check(fitted(this, problem), this.dtype, precision=this.precision, calls=1)

        check(first, this.dtype, precision=this.precision, calls=this.spec.calls)
        for problem in others:
            check(problem, this.dtype, precision=this.precision, calls=1)
        check_drawn(this.spec, LONGEST[first.rank], BUDGET, CASES, name, alike)
        assert len(backend.programs) == 2


def test_every_kind_of_tile_is_reached() -> None:
    """Each macro, each other channel of a lane, and boxes that begin anywhere have their cases."""
    reached = Counter()
    for this in CASES.values():
        spec, way = this.spec, "planes" if this.flat else "rows"
        for problem in own_problems(this):
            g, plan, work = geometry_of(problem), plan_for(this, problem), work_of(this, problem)
            d, fields = dict(plan.defines), problem_of(plan)
            box, tiles = fields["box"], fields["tiles"]
            assert fields["patches"][0] == this.flat
            assert len(plan.maps) == 1
            for name in ("RESIDENT", "WORKERS", "MIN_BLOCKS", "TILES_M", "K_STEPS", "X_STAGES"):
                reached[f"{name} {d[name]}"] += 1
            for name in ("STRIDE_W", "DILATION_W", "OUT_RUN", "DTYPE"):
                reached[f"{way}: {name} {d[name]}"] += 1
            reached[f"{way}: products {work.shape.products}, {this.itemsize} bytes"] += 1
            reached[f"{way}: the first element is {'odd' if work.odd else 'even'}"] += 1
            reached[f"{way}: the channel {fields['x_vector'][0]} further"] += 1
            reached[f"{way}: {'joined' if work.joined(this.tile) > 1 else 'single'} phases"] += d["STRIDE_W"] > 1
            reached[f"{way}: late phases along W"] += g.pad_before[2] % d["STRIDE_W"] > 0
            reached[f"{way}: padding along W of a stride"] += g.pad_before[2] >= d["STRIDE_W"] > 1
            reached[f"{way}: {min(2, problem.groups)} groups"] += 1
            reached[f"{way}: {len(spec.kernel)} axes"] += 1
            reached[f"{way}: x that is {problem.x_layout}"] += 1
            reached[f"{way}: a result that is {problem.out_layout}"] += 1
            reached["an odd number of inputs along W"] += g.x_extent[2] % 2
            reached["an odd number of positions along W"] += -(-g.out_extent[2] // g.stride[2]) % 2
            for i in range(tiles[2]):
                lead = (work.shape.lead + i * box[2]) % work.aligned
                reached[f"a lead of {lead // 2} of {work.aligned // 2} pairs"] += 1
            for axis, name in enumerate("DHW"):
                reached[f"{way}: several boxes along {name}"] += tiles[axis] > 1
                reached[f"{way}: the last box along {name} is ragged"] += tiles[axis] > 1 and ragged(
                    this, problem, axis
                )
            for axis, name in enumerate("DH"):
                stride, kernel, dilation = (values[axis] for values in (g.stride, g.kernel, g.dilation))
                live = stride // gcd(stride, dilation)
                reached[f"{way}: a halo along {name}"] += work.reach_of_one[axis] > 0
                reached[f"{way}: phases along {name}"] += stride > 1
                reached[f"{way}: phases along {name} without a tap"] += kernel < live or live < stride
                reached[f"{way}: late phases along {name}"] += g.pad_before[axis] % stride > 0
                reached[f"{way}: padding along {name} of a stride"] += g.pad_before[axis] >= stride > 1
            reached[f"{way}: several boxes a block"] += fields["blocks"][0] > plan.grid
            reached["several blocks"] += plan.grid > 1
            reached["a row of several stores"] += 2 * d["STRIDE_W"] > d["OUT_RUN"]
            reached["several chunks"] += spec.c_in_per_group > work.chunk(this.tile)
            reached["channels beyond the last"] += spec.c_in_per_group % work.chunk(this.tile) > 0
            reached["several tiles of channels"] += tiles[3] > 1
            reached["channels of the result beyond the last"] += spec.c_out_per_group % (8 * d["TILES_C"]) > 0
    both = (
        *(f"STRIDE_W {value}" for value in (1, 2, 4)),
        *(f"DILATION_W {value}" for value in (1, 3)),
        *(f"OUT_RUN {value}" for value in (1, 2, 4, 8)),
        *(f"DTYPE {DTYPE_CODES[dtype]}" for dtype in ("float16", "bfloat16", "float32")),
        *(f"products {kind} bytes" for kind in ("1, 2", "1, 4", "3, 4")),
        *(f"the first element is {parity}" for parity in ("even", "odd")),
        *(f"the channel {count} further" for count in (1, 4)),
        *(f"{count} groups" for count in (1, 2)),
        *(f"{count} axes" for count in (2, 3)),
        *(f"a result that is {layout}" for layout in ("contiguous", "cropped")),
        *(f"{what} along {axis}" for what in ("a halo", "phases", "late phases") for axis in "DH"),
        *(f"phases along {axis} without a tap" for axis in "DH"),
        *(f"padding along {axis} of a stride" for axis in "DHW"),
        "late phases along W",
        "joined phases",
        "single phases",
        "several boxes along D",
        "several boxes along W",
        "the last box along D is ragged",
        "the last box along W is ragged",
        "several boxes a block",
    )
    for kind in (
        *(f"{way}: {what}" for way in ("rows", "planes") for what in both),
        *(f"RESIDENT {value}" for value in (0, 1)),
        *(f"WORKERS {value}" for value in (1, 2, 3)),
        *(f"MIN_BLOCKS {value}" for value in (1, 2)),
        *(f"TILES_M {value}" for value in (1, 2, 3, 4)),
        *(f"K_STEPS {value}" for value in (1, 2, 4, 8)),
        *(f"X_STAGES {value}" for value in (2, 3, 4, 6)),
        *(f"a lead of {lead} of {aligned} pairs" for aligned in (2, 4) for lead in range(aligned)),
        *(f"rows: x that is {layout}" for layout in ("contiguous", "cropped")),
        *(f"planes: x that is {layout}" for layout in ("contiguous", "sliced")),
        "rows: 1 axes",
        "rows: several boxes along H",
        "rows: the last box along H is ragged",
        "an odd number of inputs along W",
        "an odd number of positions along W",
        "several blocks",
        "a row of several stores",
        "several chunks",
        "channels beyond the last",
        "several tiles of channels",
        "channels of the result beyond the last",
    ):
        assert reached[kind], f"{kind}: {reached}"


def ragged(this: Case, problem: Problem, axis: int) -> bool:
    """Whether the last box along an axis has positions of no use."""
    plan, work, g = plan_for(this, problem), work_of(this, problem), geometry_of(problem)
    extents = tuple(-(-o // s) for o, s in zip(g.out_extent, g.stride, strict=True))
    if problem.rank < 3:
        extents = (g.n, *extents[1:])
    _, extents = work.as_copied(this.tile, extents)
    return extents[axis] % problem_of(plan)["box"][axis] > 0


def test_draws_come_to_an_end() -> None:
    draws = attempts(3)
    assert [next(draws) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(AssertionError, match="none of 3"):
        next(draws)


# ---- special values --------------------------------------------------------------------------------------------------


def own_case(
    kernel: Ints,
    stride: Ints,
    channels: tuple[int, int],
    kind: tuple[str, str | None],
    before_w: int,
    flat: bool = False,
    groups: int = 1,
    **of_tile: Any,
) -> Case:
    """Return a case on one multiprocessor, whose tile has these fields."""
    layouts = ("contiguous" if flat else "cropped",), ("contiguous",)
    shifts = (*(None,) * (len(kernel) - 1), before_w % stride[-1])
    spec = Specialisation(kernel, stride, (1,) * len(kernel), *channels, *layouts, groups=groups, shifts=shifts)
    return Case(spec, *kind, ONE, dataclasses.replace(ANY_TILE, flat=int(flat), **of_tile), before_w)


# Kernel, stride and the padding before along W: taps that read elements before a row, behind it and within.
REACHING = {
    "before and behind": ((3, 4), (1, 2), 1),
    "two before and two behind": ((2, 5), (1, 1), 2),
    "two before": ((3, 3), (2, 1), 0),
    "two behind": ((1, 3), (1, 1), 2),
    "alone": ((3, 2), (2, 2), 0),
}


@pytest.mark.parametrize("flat", [False, True], ids=["rows", "planes"])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind[1] or kind[0])
@pytest.mark.parametrize("name", REACHING)
def test_special_values_at_the_ends_of_rows(name: str, kind: tuple[str, str | None], flat: bool) -> None:
    """Infinities and NaN there reach the outputs that the definition takes them to, and no others."""
    kernel, stride, before_w = REACHING[name]
    this = own_case(kernel, stride, (5, 9), kind, before_w, flat)
    dtype = DTYPES[this.dtype]
    with on_host(this) as backend:
        for extent in ((5, 8), (9, 24)):
            problem = padded(this, extent)
            x, weight, bias = problem.arrays(dtype)
            x[0, 1, ::3, 0], x[0, 2, 1::3, -1] = np.inf, -np.inf
            x[1, 0, 1, -1], x[1, 4, 2, 0], x[1, 3, 4, -2:] = np.nan, np.nan, np.inf
            placed, _ = place(x, 2, problem.x_layout)
            with np.errstate(invalid="ignore"):
                expected = reference.direct(problem, x, weight, bias)
            got = to_numpy(call(problem, placed, weight, bias, precision=this.precision)).astype(np.float64)
            for test in (np.isnan, np.isposinf, np.isneginf):
                assert np.array_equal(test(got), test(expected)), test.__name__
            assert np.isfinite(expected).any() != np.isfinite(expected).all()
        assert len(backend.programs) == 2


@pytest.mark.parametrize("checked", [check_infinities, check_scales, check_denormals])
@pytest.mark.parametrize("flat", [False, True], ids=["rows", "planes"])
@pytest.mark.parametrize("name", ["before and behind", "two before and two behind", "alone"])
def test_special_values_of_three_products(name: str, flat: bool, checked: Callable[..., None]) -> None:
    kernel, stride, before_w = REACHING[name]
    this = own_case(kernel, stride, (20, 9), KINDS[3], before_w, flat)
    problem = padded(this, (5, 12))

    def convert(array: np.ndarray) -> np.ndarray:
        return place(array, 2, problem.x_layout)[0] if array.shape == problem.x_shape else array

    with on_host(this):
        checked(problem, convert, this.precision)


def test_copies_round_to_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    """A number between two of TF32 becomes the nearer one, and the lower one if copies leave it as it is."""
    this = own_case((1,), (1,), (5, 6), ("float32", "tf32"), 0)
    problem = padded(this, (62,), has_bias=False)
    x, _ = place(np.full(problem.x_shape, 1 + 1.5 * 2**-11, "float32"), 1, "cropped")
    weight, map_of_rows = np.eye(5, 6, dtype="float32")[:, :, None], Work.map_of_rows

    def as_it_is(*arguments: Any) -> TensorMap:
        return dataclasses.replace(map_of_rows(*arguments), dtype="float32")

    for expected in (1 + 2**-10, 1):
        with on_host(this):
            y = call(problem, x, weight, precision="tf32")
        assert np.all(y == np.float32([expected] * 5 + [0])[:, None])
        monkeypatch.setattr(Work, "map_of_rows", as_it_is)


# ---- planted faults --------------------------------------------------------------------------------------------------

BRIEF = {"tiles_m": 2, "k_steps": 2, "x_stages": 2, "tiles_c": 2}
PASSING = own_case((3, 3, 3), (2, 2, 2), (40, 19), ("bfloat16", None), 1, **BRIEF)
SPLIT = own_case((2, 3, 3), (1, 2, 2), (20, 9), ("float32", "tf32x3"), 1, **BRIEF)
PLANES = own_case((2, 3, 4), (1, 1, 2), (40, 19), ("bfloat16", None), 1, True, **BRIEF)
PLANES_SPLIT = own_case((1, 3, 5), (1, 1, 1), (20, 9), ("float32", "tf32x3"), 2, True, **BRIEF)
JOINED = own_case((2, 2, 2), (2, 2, 2), (32, 17), ("float32", "tf32"), 2, groups=2, **BRIEF)
LINE = own_case((3,), (2,), (12, 9), ("float16", None), 1, **BRIEF)
CUT = dataclasses.replace(own_case((2, 3, 3), (1, 2, 2), (20, 19), ("bfloat16", None), 1, **BRIEF), whole=False)
IN_USE = "with no wait for it|with no barrier in between|a GPU may miss it|arrives at|a bulk copy wrote"
ELSEWHERE = VALUES + "|" + UNWRITTEN + "|" + IN_USE + "|past its end"
OUTSIDE = VALUES + "|belong to no|wrote|past its end"
OUTSIDE_ROW = "return FIRST_W + shift + half < 0 || FIRST_W + shift + half > 1;"
NEVER_COME = "not all threads reach a barrier.* lacks 0 of 1 arrivals and [1-9]"
# A replacement in the source, the message of the check that must catch it, and the case.
FAULTS = {
    "no wait for x": ("            x_ring.wait_until_full();\n", "", UNWRITTEN + "|" + IN_USE, PASSING),
    "no wait for weights": ("weight_ring.wait_until_full();", "", UNWRITTEN + "|" + IN_USE, PASSING),
    "no wait for the kernel that packs": ("if (role == 0) wait_for_kernel_before();", "", KERNEL_BEFORE, PASSING),
    "no wait for a free stage": (
        "ring.wait_until_free();\n        barrier_arrive_expecting(ring.full + ring.place, (unsigned)pieces",
        "barrier_arrive_expecting(ring.full + ring.place, (unsigned)pieces",
        IN_USE,
        PASSING,
    ),
    "no wait for a free slot": (
        "ring.wait_until_free();\n                barrier_arrive_expecting(ring.full + ring.place, SLOT",
        "barrier_arrive_expecting(ring.full + ring.place, SLOT",
        IN_USE,
        PASSING,
    ),
    "more bytes than come": (
        "(unsigned)pieces * (unsigned)",
        "(unsigned)(pieces + 1) * (unsigned)",
        NEVER_COME,
        PASSING,
    ),
    "a stage given back before all lanes have loaded": (
        "            barrier_arrive(x_ring.free",
        "            if (lane == 0) for (int i = 0; i < 32; ++i) barrier_arrive(x_ring.free",
        IN_USE,
        PASSING,
    ),
    "a slot given back that products read": ("if (!LAGS) release();", "release();", IN_USE, PASSING),
    "no wait for the last products": ("if (LAGS) wgmma_wait<0>();", "", "with no wait|a GPU may miss it", PASSING),
    "no wait for the last chain": (
        "    wgmma_wait<0>();\n    collect(",
        "    collect(",
        "with no wait|a GPU may miss it",
        SPLIT,
    ),
    "fragments that products still read": ("pick(a[step % 2][0],", "pick(a[0][0],", "A of a wgmma", PASSING),
    "fragments that chains still read": ("pick(a[link % 2][i],", "pick(a[0][i],", "A of a wgmma", SPLIT),
    "a chain that starts from the one before": ("product > 0 || i > 0 || !is_first(place)", "true", ELSEWHERE, SPLIT),
    "the bias of the next box too early": (
        "warps_sync(barrier, 128);  // the box before is stored",
        "",
        IN_USE,
        PASSING,
    ),
    "rows from where they are staged": ("(lead(first_element(p, b, rows)) - ODD_W)", "(-ODD_W)", ELSEWHERE, PASSING),
    "planes from where they are staged": ("(lead(first_element(p, b, rows)) - ODD_W)", "(-ODD_W)", ELSEWHERE, PLANES),
    "rows from an element that is not aligned": (
        "(int)first - lead(first), pieces",
        "(int)first, pieces",
        "not a multiple of 16 bytes",
        PASSING,
    ),
    "words from an even element on": (
        "constexpr int ODD_W = FIRST_W & 1;",
        "constexpr int ODD_W = 0;",
        ELSEWHERE,
        PASSING,
    ),
    "one element further": ("ODD_W + shift + i % 2;", "ODD_W + shift + 1 - i % 2;", VALUES, PASSING),
    "late phases that are not": ("+ (AxisW::phase_of(tap) < FIRST_PHASE_W)", "", VALUES, PASSING),
    "phases in another order": ("STRIDE_W - FIRST_PHASE_W) % STRIDE_W", "STRIDE_W) % STRIDE_W", VALUES, PASSING),
    "the other half of a word": ("element % 2 ? 0x7632 : 0x5410", "element % 2 ? 0x5410 : 0x7632", VALUES, PASSING),
    "channels in another order": (
        "2 * thread + own : thread + 4 * own",
        "thread + 4 * own : 2 * thread + own",
        VALUES,
        PASSING,
    ),
    "the next channel of a thread": ("(p.x_vector == 1 ? 2 : 1)", "1", ELSEWHERE, PASSING),
    "the channel after the next one of a thread": ("(p.x_vector == 1 ? 2 : 1)", "2", ELSEWHERE, PASSING),
    "the first eight channels": ("eight * x.next_eight", "0 * x.next_eight", ELSEWHERE, PASSING),
    "taps in another order": ("place_of_tap(tap_w) * TILE_C + column", "tap_w * TILE_C + column", VALUES, PASSING),
    "weights of another row of taps": (
        "rows.d.tap(row_d) * KERNEL_H + rows.h.tap(row_h)",
        "row_d * KERNEL_H + row_h",
        VALUES,
        PASSING,
    ),
    "taps along D the other way": ("(REACH_D - row_d * AxisD::HOP)", "(row_d * AxisD::HOP)", VALUES, PASSING),
    "taps along H one row away": (": of.line;", ": of.slice;", ELSEWHERE, PASSING),
    "taps along H of planes one row of a copy away": (
        "is_flat(p) ? (int)p.x_extent[2] / IN_WORD : of.line",
        "of.line",
        ELSEWHERE,
        PLANES,
    ),
    "no halo along D": ("(int)p.box[0] + REACH_D) * Slices", "(int)p.box[0]) * Slices", "bulk copies bring", PASSING),
    "no late phases along D and H": ("return phase < (int)((unsigned)pad % stride);", "return 0;", OUTSIDE, PASSING),
    "a slice before": (
        "AxisD::back(rows.d.first) - REACH_D;",
        "AxisD::back(rows.d.first) - REACH_D - 1;",
        VALUES,
        PASSING,
    ),
    "the first image": ("h, d, b.n, ring.full", "h, d, 0, ring.full", VALUES, PASSING),
    "the first group": ("b.group * (int)p.c_in + chunk", "chunk", VALUES, JOINED),
    "positions beyond the box": ("at.there ? (at.d", "true ? (at.d", ELSEWHERE, PASSING),
    "the next row": (OUTSIDE_ROW, "return false;", VALUES, PLANES),
    "the next row, of three products": (OUTSIDE_ROW, "return false;", VALUES, PLANES_SPLIT),
    "a row that comes alone cut as those of a plane": ("!is_flat(p) || within", "within", VALUES, PASSING),
    "the first element of the next row": ("shift + half > 1;", "shift + half > 2;", VALUES, PLANES),
    "the last element of the row before": ("shift + half < 0 ||", "shift + half < -1 ||", VALUES, PLANES),
    "the ends of rows for the first of a pair": ("FIRST_W + i / 2 + i % 2, p", "FIRST_W + i / 2, p", VALUES, PLANES),
    "rows of x in place of those of a plane": ("is_flat(p) ? line_of(w + at.w, p) : at.h", "at.h", OUTSIDE, PLANES),
    "columns of one phase for all": ("phase % JOINED * TILE_C / 2", "0 * TILE_C / 2", VALUES, JOINED),
    "the second position's results": ("c * 4 + j / STRIDE_W * 2 + i;", "c * 4 + i * 2 + j / STRIDE_W;", VALUES, JOINED),
    "channels of the result beyond the last": (
        "if (c * 8 + i < left && within",
        "if (left && within",
        OUTSIDE,
        PASSING,
    ),
    "outputs beyond the row": ("left && within(w + first, p.out_extent[2])", "left", OUTSIDE, LINE),
    "an exchange with another thread": (
        "exchange(four[n], four[n + apart], apart)",
        "exchange(four[n], four[n + apart], 3 - apart)",
        VALUES,
        CUT,
    ),
    "channels of the other half exchanged": (
        "const int i = (first + own) / (2 * STRIDE_W)",
        "const int i = 0",
        OUTSIDE,
        CUT,
    ),
    "channels beyond the last, exchanged": (
        "there && c * 8 + thread * 2 + i < left",
        "there && left",
        OUTSIDE + "|heap-buffer-overflow",
        CUT,
    ),
    "outputs beyond the row, exchanged": ("there = within(w + j, p.out_extent[2])", "there = true", OUTSIDE, CUT),
    "outputs of another image": (
        "out += b.n * p.out_stride[0] + (b.group * p.c_out + channel)",
        "out += (b.group * p.c_out + channel)",
        OUTSIDE,
        PASSING,
    ),
    "the high part for both": ("a.value[PARTS - 1][shift][i]);", "a.value[0][shift][i]);", VALUES, SPLIT),
}


def faulty_problems(this: Case) -> list[Problem]:
    """Return one with padding along all axes, and one without along D and H, of several boxes each."""
    first, second = ((3, 5, 6), (2, 7, 20)) if len(this.spec.kernel) == 3 else ((67,), (261,))
    return [padded(this, first, True), padded(this, second)]


def run(this: Case, sources: dict[str, str]) -> None:
    with on_host(this, sources):
        for problem in faulty_problems(this):
            check(problem, this.dtype, precision=this.precision, calls=1)


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_fault_is_caught(fault: tuple[str, str, str, Case]) -> None:
    before, after, caught_by, this = fault
    with pytest.raises(AssertionError, match=caught_by):
        run(this, plant(kernel_sources("phase_rows.cu"), before, after))


@pytest.mark.parametrize(
    "this",
    [PASSING, SPLIT, PLANES, PLANES_SPLIT, JOINED, LINE, CUT],
    ids=["16 bits", "3xTF32", "planes", "planes in 3xTF32", "joined phases", "one axis", "rows that are not whole"],
)
def test_without_a_fault_nothing_is_caught(this: Case) -> None:
    run(this, kernel_sources("phase_rows.cu"))


def test_both_other_channels_of_a_lane_meet_the_faults() -> None:
    plans = [plan_for(PASSING, problem) for problem in faulty_problems(PASSING)]
    assert {problem_of(plan)["x_vector"][0] for plan in plans} == {1, 4}
