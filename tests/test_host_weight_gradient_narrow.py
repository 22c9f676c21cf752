"""weight_gradient_narrow executed on the host, under sanitizers, with tiles drawn from those that the kernel takes."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest
from described import DEVICES, geometry_of, layout_of, problem_of
from fixed_cases import FIXED
from gradients import check
from host.build import kernel_sources, why_not
from host_gradients import check_drawn, gradients_on_host
from host_weight_gradient_narrow import LONGEST, NEXT, Case, cases, on_host
from strategies import Problem, Specialisation, case
from test_host_faults import UNWRITTEN, VALUES, plant

from cuconvt.plan import Device, Layout, Plan, Refusal
from cuconvt.plan_weight_gradient_narrow import Tile, plan_weight_gradient_narrow

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))

BUDGET = 0.02
CASES = cases()


@pytest.mark.parametrize("name", CASES)
def test_any_geometry(name: str) -> None:
    this = CASES[name]
    rank = len(this.spec.kernel)
    with on_host(this):

        def alike(problem: Problem) -> None:
            check("weight", problem, this.dtype, precision=this.precision, calls=1)

        ragged, *others = this.fixed_problems()
        check("weight", ragged, this.dtype, precision=this.precision)
        for problem in others:
            check("weight", problem, this.dtype, precision=this.precision, calls=1)
        check("conv_weight", this.problem((1,) * (rank - 1) + (7,)), this.dtype, precision=this.precision, calls=1)
        check_drawn(this.spec, LONGEST[rank], BUDGET, CASES, name, alike)


def test_cases_reach_every_way() -> None:
    """Bulk copies, rows that follow each other and others, whole rows, taps of warps, one part and several."""
    reached = Counter()
    for this in CASES.values():
        for problem in this.fixed_problems():
            geometry = geometry_of(problem)
            plan = this.plan(geometry, this.dtype, layout_of(geometry))
            fields, defines = problem_of(plan), dict(plan.defines)
            reached[f"bulk {defines['BULK']}"] += 1
            reached[f"whole {fields['out_vector'][0]}"] += 1
            reached[f"parts {fields['tiles'][3] > 1}"] += 1
            reached[f"several boxes along W {fields['tiles'][2] > 1}"] += 1
            reached[f"gaps {problem.x_layout == 'cropped'}"] += 1
            reached["a tap of a warp along D"] += defines["WARPS_D"] > 1
            reached["a tap of a warp along H"] += defines["WARPS_H"] > 1
            reached["several cells"] += defines["CELLS_H"] > 1
            reached["several tiles of channels"] += max(geometry.c_in_per_group, geometry.c_out_per_group) > 8
            reached["64 bits"] += defines["INDEX64"]
    for what in (
        *(f"{what} {value}" for what in ("bulk", "whole") for value in (0, 1)),
        *(f"{what} {value}" for what in ("parts", "several boxes along W", "gaps") for value in (False, True)),
        *(
            "a tap of a warp along D",
            "a tap of a warp along H",
            "several cells",
            "several tiles of channels",
            "64 bits",
        ),
    ):
        assert reached[what], what


# ---- planted faults --------------------------------------------------------------------------------------------------


def faulty_case(dtype: str, device: Device) -> Case:
    """Return a case with ragged channels, several boxes and parts, and taps that warps share."""
    layouts = {"x_layouts": NEXT, "out_layouts": NEXT}
    spec = Specialisation((3, 3), (2, 2), (1, 1), 5, 11, **layouts, shifts=(None, 1))
    precision = "tf32" if dtype == "float32" else None
    small = dataclasses.replace(device, multiprocessors=8, shared_bytes=24 * 1024)
    return Case(spec, dtype, precision, small, Tile(1, 3, 2, 2, 2, 2, 1))


THIS, WITHOUT_BULK = faulty_case("bfloat16", DEVICES[90]), faulty_case("bfloat16", DEVICES[80])
OUTSIDE = "heap-buffer-overflow|belong to no argument|past its end|past an array|between its elements|"
# A case, a replacement in the source, and the message of the check that must catch it.
FAULTS = {
    "a row of x of another tap": (THIS, "(AxisH::REACH - AxisH::back(tap_h))", "AxisH::back(tap_h)", VALUES),
    "the other half of a word": (THIS, "odd = (unsigned)element % PER_WORD;", "odd = 0;", VALUES),
    "columns that do not exist": (THIS, "multiply<WHOLE, true>", "multiply<WHOLE, false>", VALUES),
    "rows that are not cleared": (THIS, "    if (!whole) {", "    if (false) {", VALUES),
    "a run one element too long": (
        THIS,
        "(rows.end - 1) * box.pitch.row + columns.end;",
        "(rows.end - 1) * box.pitch.row + columns.end + 1;",
        OUTSIDE + VALUES + "|with no barrier in between",
    ),
    "no wait for the bulk copies": (
        THIS,
        "if (BULK) barrier_wait(barriers + turn, parity);",
        "",
        "before the wait|mbarrier|a bulk copy wrote",
    ),
    "boxes that have not landed": (
        WITHOUT_BULK,
        "            copy_async_wait<STAGES - 2>();\n        } else",
        "        } else",
        "before the wait",
    ),
    "no barrier between boxes": (
        THIS,
        "__syncthreads();  // a box has landed",
        "// a box has landed",
        UNWRITTEN + "|with no barrier in between|before the wait",
    ),
    "sums where the barriers are": (
        THIS,
        "add_warps(acc, shared, warp_k);",
        "add_warps(acc, shared_bytes, warp_k);",
        "mbarrier at .* was written over, but never invalidated",
    ),
    "the next part's boxes": (THIS, "(part + round) % parts_of_boxes;", "(part + round) % parts_of_boxes / 2;", VALUES),
}


def run(this: Case, sources: dict[str, str] | None = None) -> None:
    with on_host(this, sources):
        for extent in ((23, 37), (1, 1)):
            check("weight", this.problem(extent), this.dtype, precision=this.precision)


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_caught(name: str) -> None:
    this, before, after, caught_by = FAULTS[name]
    with pytest.raises(AssertionError, match=caught_by):
        run(this, plant(kernel_sources("weight_gradient_narrow.cu"), before, after))


@pytest.mark.parametrize("this", [THIS, WITHOUT_BULK], ids=["bulk", "no-bulk"])
def test_without_a_fault_nothing_is_caught(this: Case) -> None:
    run(this)


def test_sums_stay_clear_of_the_barriers() -> None:
    """In a block whose sums take more memory than its stages."""
    with gradients_on_host("weight_gradient_narrow", DEVICES[90], "tf32x3"):
        check("weight", FIXED["dead_phases"], "float32", precision="tf32x3")


def test_refusals_say_why() -> None:
    geometry = geometry_of(case((2, 16, 3, 9, 17), 16, 3, stride=2, padding=1, groups=2))
    layout = layout_of(geometry)
    backwards = Layout(x=layout.x, weight=layout.weight, bias=None, out=(*layout.out[:3], -layout.out[3], 1))
    for dtype, where, device, reason in (
        ("float16", layout, Device(75, 40, 65536), "needs compute capability 8.0, the device has 7.5"),
        ("float64", layout, DEVICES[90], "in float16, bfloat16 and TF32, not in float64"),
        ("float16", layout, Device(90, 132, 1024), "no tile fits into the registers and 1024 bytes"),
        ("float16", layout_of(geometry, last=True), DEVICES[90], "serves rows"),
        ("float16", backwards, DEVICES[90], "an axis runs backwards"),
    ):
        refusal = plan_weight_gradient_narrow(geometry, dtype, where, None, device)
        assert isinstance(refusal, Refusal)
        assert reason in refusal.reason
    long = geometry_of(case((2, 8, 99), 8, 65))
    refusal = plan_weight_gradient_narrow(long, "float16", layout_of(long), None, DEVICES[90])
    assert isinstance(refusal, Refusal)
    assert "no tile fits" in refusal.reason


def test_kernels_of_two_architectures_differ_in_bulk_copies() -> None:
    geometry = geometry_of(case((2, 16, 3, 9, 17), 16, 3, stride=2, padding=1, groups=2))
    for arch, bulk in ((80, 0), (89, 0), (90, 1), (120, 1)):
        plan = plan_weight_gradient_narrow(geometry, "float16", layout_of(geometry), None, DEVICES[arch])
        assert isinstance(plan, Plan)
        assert dict(plan.defines)["BULK"] == bulk
