"""The strided correlation of rows for Hopper, executed on the host under sanitizers, as `test_host_gradients.py`."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from math import prod

import numpy as np
import pytest
from described import DEVICES, geometry_of, problem_of
from gradients import check
from host.build import kernel_sources, why_not
from host_correlate_rows import Case, bytes_copied, cases, draw_tile, of_each_way, on_host, plan_for
from host_correlate_wgmma import EXTENTS, LONGEST, SHARED_BYTES, smallest
from host_gradients import check_drawn, specialisation
from hypothesis import assume
from strategies import Problem, case, place
from test_host_faults import KERNEL_BEFORE, UNWRITTEN, VALUES, plant

import cuconvt
from cuconvt.plan import Device, Layout, Refusal
from cuconvt.plan_correlate_rows import plan_correlate_rows
from cuconvt.plan_wgmma_sizes import Tile

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))

BUDGET = 0.03  # a wgmma of 128 threads takes longer than its products
CASES = cases()


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


def test_a_single_position_that_is_broadcast_is_refused() -> None:
    problem = case((2, 16, 1, 1), 8, (1, 2), (1, 2), padding=(0, (0, 1)), x_layout="broadcast")
    x, weight = np.empty((2, 16, 1, 1, 1)), np.empty((16, 8, 1, 1, 2))
    y = place(np.zeros(problem.out_shape), 2, "broadcast")[0][:, :, None]
    refused = plan_correlate_rows(geometry_of(problem), "bfloat16", Layout.of(x, weight, None, y), None, DEVICES[90])
    assert refused == Refusal("correlate_rows", "reads rows, got channels that follow each other")


@pytest.mark.parametrize(
    ("kernel", "stride", "dtype", "precision"),
    [(12, 10, "bfloat16", None), (17, 16, "float16", None), (7, 6, "float32", "tf32"), (7, 7, "float32", "tf32x3")],
)
def test_far_apart_along_w(kernel: int, stride: int, dtype: str, precision: str | None) -> None:
    spec = specialisation((kernel,), (stride,), (1,), (8, 17), (False, False))
    spec = dataclasses.replace(spec, shifts=(3,))
    tile = draw_tile(random.Random(stride), spec, dtype, precision)
    assert tile is not None
    this = Case(spec, dtype, precision, Device(90, 2, SHARED_BYTES), tile)
    with on_host(this):
        for problem in (smallest(spec, (261,), (3, 0)), *of_each_way(this).values()):
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
        "taps apart",
    ):
        assert reached[kind], kind


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_what_no_tap_reads_does_not_count(dtype: str) -> None:
    """Of a word or a pair of taps some elements may be nobody's: infinities and NaN there reach nothing."""
    tile = dataclasses.replace(TILE, tiles_m=4, k_steps=1)
    for kernel, dilation in ((1, 1), (3, 1), (2, 3)):
        spec = specialisation((kernel,), (2,), (dilation,), (5, 6), (False, False))
        precision = None if dtype == "float16" else "tf32x3"
        this = Case(dataclasses.replace(spec, shifts=(0,)), dtype, precision, Device(90, 1, SHARED_BYTES), tile)
        random = np.random.default_rng(kernel)
        x, weight = random.normal(size=(2, 6, 64)), random.normal(size=(5, 6, kernel))
        x[:, :, [7, 20, 33]] = np.nan, np.inf, -np.inf
        with on_host(this):
            got = cuconvt.conv1d(x.astype(dtype), weight.astype(dtype), stride=2, dilation=dilation)
        reached = [
            not np.isfinite(x[0, 0, 2 * i : 2 * i + dilation * (kernel - 1) + 1 : dilation]).all()
            for i in range(got.shape[2])
        ]
        assert any(reached) != all(reached)
        assert np.array_equal(~np.isfinite(got), np.broadcast_to(reached, got.shape))


# ---- planted faults --------------------------------------------------------------------------------------------------

TILE = Tile(1, 1, 2, 2, False, 2, 4, 3, False, False, False, 2)


def faulty_case(tile: Tile, dtype: str = "bfloat16", before_w: int = 1) -> Case:
    """Return a case with two boxes along every axis, some chunks of channels and classes of two taps and of one."""
    spec = dataclasses.replace(
        specialisation((3, 3), (2, 2), (1, 1), (12, 35), (False, False)), shifts=(None, before_w)
    )
    return Case(spec, dtype, "tf32x3" if dtype == "float32" else None, Device(90, 1, SHARED_BYTES), tile)


PASSING = faulty_case(TILE)
SPLIT = faulty_case(dataclasses.replace(TILE, x_stages=2), "float32")
IN_USE = "with no wait for it|with no barrier in between|a GPU may miss it|arrives at|a bulk copy wrote"
TOO_EARLY = "before the wait that covers the copy"
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
        "pick(a[step % 2], windows[step % 2], x.zero);\n        wgmma_fence();",
        "pick(a[0], windows[step % 2], x.zero);\n        wgmma_fence();",
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


def run(this: Case, sources: dict[str, str]) -> None:
    with on_host(this, sources):
        for problem in (smallest(this.spec, (9, 19), (this.before_w, 0)), *of_each_way(this).values()):
            check("input", problem, this.dtype, precision=this.precision)


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_caught(name: str) -> None:
    before, after, caught_by, this = FAULTS[name]
    with pytest.raises(AssertionError, match=caught_by):
        run(this, plant(kernel_sources("correlate_rows.cu"), before, after))


@pytest.mark.parametrize("this", [PASSING, SPLIT])
def test_without_a_fault_nothing_is_caught(this: Case) -> None:
    run(this, kernel_sources("correlate_rows.cu"))
