"""The correlation with kernel = stride for Hopper, executed on the host, as in `test_host_gradients.py`."""

from __future__ import annotations

import dataclasses
import functools
import random
from collections import Counter
from typing import Any

import pytest
from described import geometry_of, planner_with
from gradients import check
from host.build import kernel_sources, why_not
from host_correlate_wgmma import SHARED_BYTES, layout_of, smallest
from host_gradients import check_drawn, gradients_on_host, specialisation
from strategies import KINDS, Ints, Problem, Specialisation
from test_host_faults import IN_USE, KERNEL_BEFORE, UNFILLED, VALUES, plant
from test_plan import problem_of

from cuconvt import plan_correlate_disjoint as disjoint
from cuconvt.geometry import Geometry
from cuconvt.plan import Device, Layout, Plan
from cuconvt.plan_correlate_disjoint import Tile

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))

BUDGET = 0.05  # a wgmma of 128 threads takes longer than its products
LARGEST_KERNEL = {1: 8, 2: 4, 3: 3}
LONGEST = {1: (600,), 2: (12, 44), 3: (4, 9, 17)}
# Rows of x that end within a run, and that do not.
EXTENTS: dict[int, tuple[Ints, ...]] = {
    1: ((1,), (67,), (148,)),
    2: ((1, 1), (5, 19), (7, 20)),
    3: ((2, 3, 11), (3, 2, 12)),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A specialisation of the kernel: every problem of it runs the same program."""

    spec: Specialisation
    dtype: str
    precision: str | None
    device: Device
    number: int  # of its tile, among those that the planner takes

    def plan(
        self, family: str, geometry: Geometry, dtype: str, layout: Layout, precision: str | None, device: Device
    ) -> Plan:
        read = disjoint.as_read(geometry, layout)
        shape = disjoint.Work.of_problem(read[0], dtype, precision, read[1]).shape
        # The result of a call without `out` has the layout of y, and the same tile but for its runs.
        every_tile = list(disjoint.tiles(disjoint.Work(dataclasses.replace(shape, out_channels_last=False)), device))
        tile = every_tile[self.number % len(every_tile)]
        tile = dataclasses.replace(tile, run=disjoint._run(shape, tile.tiles_m))
        return plan_tile(tile)(family, geometry, dtype, layout, precision, device)


plan_tile = functools.partial(planner_with, disjoint.plan_correlate_disjoint)


def cases() -> dict[str, Case]:
    """Return the cases by name."""
    found = {}
    for index in range(20):
        choose = random.Random(index)
        (dtype, precision), rank = KINDS[index % 4], 1 + index // 4 % 3
        last = index // 4 % 2 == 1, index % 3 == 1  # x, and y, which is read
        kernel = tuple(choose.randint(1, LARGEST_KERNEL[rank]) for _ in range(rank))
        # 16-bit numbers of rows are read in pairs of taps.
        kernel = (*kernel[:-1], (1, 3, 2, 4, 5)[index // 4 % 5] if dtype == "float32" else choose.choice((2, 4, 6)))
        channels = choose.choice((3, 8, 17, 24, 40)), choose.choice((3, 8, 12, 17, 33, 64))
        spec = specialisation(kernel, kernel, (1,) * rank, channels, last)
        device = Device(90, choose.choice((1, 1, 2, 5)), SHARED_BYTES)
        found[f"{index}-{precision or dtype}-{rank}d"] = Case(spec, dtype, precision, device, choose.randrange(100))
    return found


CASES = cases()


def on_host(this: Case, sources: dict[str, str] | None = None) -> Any:
    return gradients_on_host("correlate_disjoint", this.device, this.precision, sources=sources, plan=this.plan)


@pytest.mark.parametrize("name", CASES)
def test_any_geometry(name: str) -> None:
    this = CASES[name]
    rank = len(this.spec.kernel)
    with on_host(this):

        def alike(problem: Problem) -> None:
            check("input", problem, this.dtype, precision=this.precision, calls=1)

        first, *others = (smallest(this.spec, extent) for extent in EXTENTS[rank])
        check("input", first, this.dtype, precision=this.precision, calls=this.spec.calls)
        for problem in others:
            for operation in ("input", "conv"):
                check(operation, problem, this.dtype, precision=this.precision, calls=1)
        check_drawn(this.spec, LONGEST[rank], BUDGET, CASES, name, alike)


def test_every_kind_of_tile_is_reached() -> None:
    reached: Counter[str] = Counter()
    for this in CASES.values():
        rank = len(this.spec.kernel)
        aligned = [(extent, (0, 0)) for extent in (*EXTENTS[rank], LONGEST[rank])]
        for extent, padding_w in (*aligned, (LONGEST[rank], (1, 0))):
            problem = smallest(this.spec, extent, padding_w)
            plan = this.plan(
                "", geometry_of(problem), this.dtype, layout_of(this.spec, problem), this.precision, this.device
            )
            d, p = dict(plan.defines), problem_of(plan)
            reached[f"x_vector {p['x_vector'][0]} {d['X_CHANNELS_LAST']}"] += 1
            reached[f"out_vector {p['out_vector'][0]}"] += 1
            sets = p["tiles"][3] * problem.groups
            reached[f"several tiles {p['blocks'][0] > plan.grid // sets * d['WORKERS']}"] += 1
            reached[f"several tiles of channels {p['tiles'][3] > 1}"] += 1
            several = -(-this.spec.c_out_per_group // d["CHUNK"]) > 1
            reached[f"several chunks {several}"] += 1
            for name in ("RUN", "TILES_M", "X_CHANNELS_LAST", "OUT_CHANNELS_LAST", "WORKERS", "KERNEL_W"):
                reached[f"{name} {d[name]}"] += 1
    kinds = [f"x_vector {words} 0" for words in (0, 1, 2, 4)] + [f"x_vector {words} 1" for words in (0, 4)]
    kinds += [f"out_vector {count}" for count in (1, 2, 4)]
    kinds += [
        f"{what} {value}"
        for what in ("several tiles", "several tiles of channels", "several chunks")
        for value in (False, True)
    ]
    kinds += [f"RUN {count}" for count in (1, 2, 4)] + [f"WORKERS {count}" for count in (2, 3, 4)]
    kinds += [f"{name} {value}" for name in ("X_CHANNELS_LAST", "OUT_CHANNELS_LAST") for value in (0, 1)]
    kinds += [f"TILES_M {count}" for count in (1, 2)] + [f"KERNEL_W {count}" for count in (1, 2, 3, 4)]
    for kind in kinds:
        assert reached[kind], kind


# ---- planted faults --------------------------------------------------------------------------------------------------


def faulty_case(dtype: str = "bfloat16", kernel: Ints = (2, 2)) -> Case:
    """Return a case of several units, tiles of a worker and tiles of channels."""
    spec = specialisation(kernel, kernel, (1,) * len(kernel), (20, 20), (False, False))
    return Case(spec, dtype, "tf32x3" if dtype == "float32" else None, Device(90, 1, SHARED_BYTES), 0)


HALVES, THREE, VOLUMES = faulty_case(), faulty_case("float32"), faulty_case(kernel=(1, 2, 2))
# A replacement in the source, the message of the check that must catch it, and the case.
FAULTS = {
    "no wait for weights": ("    barrier_wait(landed, 0);\n\n    for (;", "    for (;", UNFILLED, HALVES),
    "no wait for the kernel that packs": (
        "wait_for_kernel_before();  // it packs the weights\nbarrier",
        "barrier",
        KERNEL_BEFORE,
        HALVES,
    ),
    "x of the next unit": (
        "            pick(a, loaded);\n            unit.next(p);",
        "            unit.next(p);\n            load_unit(loaded, sources, unit, p);\n            pick(a, loaded);",
        VALUES,
        HALVES,
    ),
    "the same tile again": ("source_of(x, tile + workers, run, p);", "source_of(x, tile, run, p);", VALUES, HALVES),
    "taps along H and D exchanged": (
        "unit.tap_d * p.x_stride[2] + unit.tap_h * p.x_stride[3]",
        "unit.tap_h * p.x_stride[2] + unit.tap_d * p.x_stride[3]",
        VALUES + "|heap-buffer-overflow|belong to no",
        HALVES,
    ),
    "words of a thread's other half": ("row % 2 + 2 * (n % 2)];", "2 * (row % 2) + n % 2];", VALUES, HALVES),
    "elements beyond the row": (
        "channel < left - t && within(w + first * ELEMENTS, p.x_extent[2])",
        "channel < left - t",
        VALUES + "|heap-buffer-overflow|belong to no",
        HALVES,
    ),
    "channels beyond the last": (
        "channel < left - t && within",
        "left > 0 && within",
        VALUES + "|heap-buffer-overflow|belong to no",
        HALVES,
    ),
    "sums before their products are complete": (
        "multiply_add_all(sums, a, b, adds);\nwgmma_commit();\nwgmma_wait<0>();",
        "multiply_add_all(sums, a, b, adds);\nwgmma_commit();",
        "A of a wgmma|" + IN_USE + "|before the wait|waits for its wgmma",
        HALVES,
    ),
    "sums of the tile before": ("PRECISION == TF32X3 || i > 0", "true", VALUES + "|nobody wrote|uninitialised", HALVES),
    "sums that are not zero at first": ("sums.value[i][j] = 0;", ";", VALUES + "|uninitialised", THREE),
    "weights of the first unit": ("+ i * SLOT), PRECISION", "), PRECISION", VALUES, HALVES),
    "another tile's bias": (
        "bias[(group * p.c_out + channel) * p.bias_stride]) : 0.0f;\n}\n__sync",
        "bias[(group * p.c_out + c) * p.bias_stride]) : 0.0f;\n    }\n    __sync",
        VALUES,
        HALVES,
    ),
    "a batch that does not exist": (
        "at.there ? d : -KERNEL_D",
        "d",
        VALUES + "|heap-buffer-overflow|belong to no",
        VOLUMES,
    ),
}


def run(this: Case, sources: dict[str, str]) -> None:
    tile = Tile(2, 1, 2, 16, 2, 1) if this.dtype == "bfloat16" else Tile(2, 1, 2, 8, 2, 1)
    with gradients_on_host("correlate_disjoint", this.device, this.precision, sources=sources, plan=plan_tile(tile)):
        # Rows that end within a run, and rows that are aligned, with padding of whole loads.
        lead = (3,) * (len(this.spec.kernel) - 2)
        for extent, padding_w in (((*lead, 9, 19), (0, 0)), ((*lead, 9, 20), (8, 8))):
            for operation in ("input", "conv"):
                problem = smallest(this.spec, extent, padding_w)
                check(operation, problem, this.dtype, precision=this.precision)


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_caught(name: str) -> None:
    before, after, caught_by, this = FAULTS[name]
    with pytest.raises(AssertionError, match=caught_by):
        run(this, plant(kernel_sources("correlate_disjoint.cu"), before, after))


@pytest.mark.parametrize("this", [HALVES, THREE])
def test_without_a_fault_nothing_is_caught(this: Case) -> None:
    run(this, kernel_sources("correlate_disjoint.cu"))
