"""Cases of correlate_wgmma for the host, each of one program, with tiles drawn from the planner's."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import ModuleType
from typing import Any

import pytest
from described import channels_last, contiguous, geometry_of, problem_of
from host_gradients import LAST, gradients_on_host, specialisation
from strategies import KINDS, Ints, Problem, Specialisation, attempts, case

from cuconvt import plan as planning
from cuconvt import plan_correlate_wgmma as wgmma
from cuconvt.plan import Device, Layout, Plan, Refusal
from cuconvt.plan_correlate_turning import turning
from cuconvt.plan_correlate_wgmma import plan_tile
from cuconvt.plan_correlate_wgmma_work import Tile, Work
from cuconvt.plan_wgmma_sizes import Box

SHARED_BYTES = 227 * 1024
LARGEST_KERNEL = {1: 9, 2: 4, 3: 3}
LONGEST = {1: (200,), 2: (12, 22), 3: (4, 6, 12)}
# Extents of the result that are ragged in most boxes; some make rows of x that are aligned and whole.
EXTENTS = {
    1: ((67,), (261,), (520,)),
    2: ((11, 17), (9, 36)),
    3: ((5, 3, 7), (3, 9, 11), (3, 5, 20)),
}
MAX_PRODUCTS = 4000  # of a box and 64 rows: a wgmma takes the host long


@dataclasses.dataclass(frozen=True)
class Case:
    """A specialisation of the kernel: every problem of it runs the same program."""

    spec: Specialisation
    dtype: str
    precision: str | None
    device: Device
    tile: Tile
    index64: bool = False
    patches: bool = False  # boxes of 8 x 8 patches where there are some
    turns: bool = False  # whether y, in rows, is made channels-last before


def cases() -> dict[str, Case]:
    """Return the cases by name."""
    found = {}
    for index in range(24):
        choose = random.Random(index)
        (dtype, precision), rank = KINDS[index % 4], 1 + index // 4 % 3
        tile, runs = None, index % 2 == 1
        draws = attempts()
        while tile is None:
            next(draws)
            spec = draw_problem(choose, rank, index % 3 == 0, runs)
            tile = draw_tile(choose, spec, dtype, precision, runs)
        device = Device(90, choose.choice((1, 1, 2)), SHARED_BYTES)  # so few that each block has several boxes
        this = Case(spec, dtype, precision, device, tile, index64=index % 5 == 4, patches=index % 4 == 3)
        found[f"{index}-{precision or dtype}-{rank}d"] = this
    return found


def boxed_cases() -> dict[str, Case]:
    """Return cases of y that bulk tensor copies bring, by name."""
    found = {}
    split = "float32", "tf32x3"
    for index in range(20):
        choose = random.Random(index)
        dtype, precision = (
            (("bfloat16", None), ("float32", "tf32"), ("float16", None))[index % 3] if index < 12 else split
        )
        rank, tile = 1 + index // 2 % 3, None
        draws = attempts()
        while tile is None:
            next(draws)
            kernel, dilation = (
                tuple(choose.randint(1, most) for _ in range(rank)) for most in (LARGEST_KERNEL[rank], 2)
            )
            stride = tuple(choose.choice((1, 2, 2, 3)) for _ in range(rank))
            channels = choose.choice((3, 8, 17, 40)), choose.choice((8, 24, 40, 72))
            spec = specialisation(kernel, stride, dilation, channels, (choose.random() < 0.7, True))
            tile = draw_tile(choose, spec, dtype, precision, False, True)
        if index % 3 == 2:  # weights of these few channels would stay
            tile = dataclasses.replace(tile, resident=False, take_turns=False, ring=3)
        device = Device(90, choose.choice((1, 1, 2)), SHARED_BYTES)
        this = Case(spec, dtype, precision, device, tile, index64=index % 5 == 4, patches=index % 4 == 3)
        found[f"boxed-{index}-{precision or dtype}-{rank}d"] = this
    return found


def turned_cases() -> dict[str, Case]:
    """Return the same with y in rows, which are turned before, by name."""
    found = {}
    for name, this in boxed_cases().items():
        channels = this.spec.c_in_per_group, this.spec.c_out_per_group
        x_last = this.spec.x_layouts == LAST
        rows = specialisation(this.spec.kernel, this.spec.stride, this.spec.dilation, channels, (x_last, False))
        found[name.replace("boxed", "turned")] = dataclasses.replace(this, spec=rows, turns=True)
    return found


def draw_problem(choose: random.Random, rank: int, x_last: bool, runs: bool) -> Specialisation:
    kernel, dilation = (tuple(choose.randint(1, top) for _ in range(rank)) for top in (LARGEST_KERNEL[rank], 3))
    stride = (*(choose.randint(1, 3) for _ in range(rank - 1)), choose.choice((1, 2, 2, 3, 4)))
    if runs:  # y can be read by whole runs along W
        stride, dilation = (*stride[:-1], choose.choice((2, 2, 4, 8))), (*dilation[:-1], 1)
        kernel = (*kernel[:-1], max(kernel[-1], stride[-1] + choose.randint(0, 3)))
    channels = choose.choice((3, 8, 12, 17, 40)), choose.choice((3, 8, 16, 17, 24, 33))
    return specialisation(kernel, stride, dilation, channels, (x_last, not runs and choose.random() < 0.6))


def draw_tile(
    choose: random.Random, spec: Specialisation, dtype: str, precision: str | None, runs: bool, boxed: bool = False
) -> Tile | None:
    """Draw a tile that fits whatever the extents, if there is one; kinds are drawn first, since some have few tiles."""
    problem = smallest(spec, groups=1 if boxed else 2)
    geometry = geometry_of(problem)
    work = Work(*wgmma.as_read(geometry, layout_of(spec, problem)), dtype, precision)
    kinds: dict[Any, list[Tile]] = {}
    for tile in wgmma.tiles(work):
        if tile.boxed != boxed or (runs and tile.classes < work.live[2]):
            continue
        products = work.products(tile, work.live[2]) * tile.tiles_m * tile.workers
        if products * geometry.kernel[0] * geometry.kernel[1] <= MAX_PRODUCTS:
            kinds.setdefault(
                (tile.merge_w, tile.resident, tile.take_turns, tile.classes, tile.class_steps if boxed else 0), []
            ).append(tile)
    for kind in choose.sample(list(kinds.values()), len(kinds)):
        for tile in choose.sample(kind, len(kind)):
            if serves(spec, dtype, precision, tile):
                return tile
    return None


def serves(spec: Specialisation, dtype: str, precision: str | None, tile: Tile) -> bool:
    for extent in (LONGEST[len(spec.kernel)], *EXTENTS[len(spec.kernel)]):
        problem = smallest(spec, extent, groups=tile.joined if tile.boxed else 2)
        geometry, layout = geometry_of(problem), layout_of(spec, problem)
        device = Device(90, 1, SHARED_BYTES)
        if isinstance(wgmma.plan_tile(geometry, dtype, layout, precision, device, tile), Refusal):
            return False
    return True


def smallest(
    spec: Specialisation, extent: Ints | None = None, padding_w: tuple[int, int] = (0, 0), groups: int = 2
) -> Problem:
    rank = len(spec.kernel)
    return case(
        (2, groups * spec.c_in_per_group, *(extent or (1,) * rank)),
        groups * spec.c_out_per_group,
        spec.kernel,
        spec.stride,
        padding=((0, 0),) * (rank - 1) + (padding_w,),
        groups=groups,
        dilation=spec.dilation,
        has_bias=True,
        x_layout=spec.x_layouts[0],
        out_layout=spec.out_layouts[0],
    )


def layout_of(spec: Specialisation, problem: Problem) -> Layout:
    g = geometry_of(problem)
    x, y = (channels_last if side == LAST else contiguous for side in (spec.x_layouts, spec.out_layouts))
    return Layout(
        x=x((g.n, g.c_in, *g.x_extent)),
        weight=contiguous((g.c_in, g.c_out_per_group, *g.kernel)),
        bias=1,
        out=y((g.n, g.c_out, *g.out_extent)),
    )


def whole_rows(this: Case) -> list[Problem]:
    """Return problems whose rows of y are whole runs, which begin with one class or another."""
    spec, found = this.spec, []
    for before_w, after_w in ((0, 0), (0, 1), (1, 0), (1, 1)):
        for width in range(16, 40):
            problem = smallest(spec, (*(3,) * (len(spec.kernel) - 1), width), (before_w, after_w))
            if read_by_vectors(plan_for(this, problem)):
                found.append(problem)
                break
    return found


def read_by_vectors(plan: Plan) -> bool:
    return bool(problem_of(plan)["x_vector"][0])


def plan_for(this: Case, problem: Problem) -> Plan:
    with planned_with(this):
        return wgmma.plan_correlate_wgmma(
            geometry_of(problem), this.dtype, layout_of(this.spec, problem), this.precision, this.device
        )


@contextmanager
def planned_by(family: ModuleType, this: Any, find: Callable[..., Plan | Refusal]) -> Iterator[None]:
    """Plan as `find` does and, if the case says so, with indices of 64 bits and boxes of patches."""
    all_boxes = family.Work.boxes

    def patched(work: Any, tile: Any, extents: Ints, of_rows: int = 0) -> list[Box]:
        boxes = list(all_boxes(work, tile, extents, of_rows))
        return [box for box in boxes if any(box.patches) and work.fits(tile, box, this.device)] or boxes

    def plan(*problem: Any) -> Plan:
        found = find(*problem)
        assert isinstance(found, Plan), found
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(family, family.__name__.rpartition(".")[2], plan)
        if this.index64:
            patch.setattr(planning, "INDEX_LIMIT", 0)
        if this.patches:
            patch.setattr(family.Work, "boxes", patched)
        yield


def planned_with(this: Case) -> AbstractContextManager[None]:
    """Plan with the case's tile whatever it costs."""

    def find(*problem: Any) -> Plan | Refusal:
        # The result of a call without `out` may have another layout than the case's.
        geometry, dtype, layout, *others = problem
        tile = dataclasses.replace(this.tile, merge_w=this.tile.merge_w and not layout.x_channels_last)
        if this.turns:
            return turning(
                geometry,
                dtype,
                layout,
                this.precision,
                lambda of_turned: plan_tile(geometry, dtype, of_turned, *others, tile),
            )
        return plan_tile(*problem, tile)

    return planned_by(wgmma, this, find)


@contextmanager
def on_host(this: Case, sources: dict[str, str] | None = None) -> Iterator[None]:
    """Run the correlations of NumPy arrays by this case's kernel within the context."""
    with planned_with(this), gradients_on_host("correlate_wgmma", this.device, this.precision, sources=sources):
        yield
