"""Cases of correlate_rows for the host, each of one program, with tiles drawn from the planner's."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from described import contiguous, geometry_of, problem_of
from host_correlate_wgmma import (
    EXTENTS,
    LARGEST_KERNEL,
    LONGEST,
    SHARED_BYTES,
    layout_of,
    planned_by,
    smallest,
)
from host_gradients import gradients_on_host, specialisation
from strategies import KINDS, Ints, Problem, Specialisation, attempts

from cuconvt import plan_correlate_rows as rows
from cuconvt import plan_correlate_rows_work
from cuconvt.plan import Device, Layout, Plan, Refusal
from cuconvt.plan_wgmma_sizes import Tile

WIDTHS = range(16, 40)  # that problems may have whose rows are copied in this way or that
MOST_OF_BOX = 120  # wgmmas of a box, with all chunks: one takes the host long


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
    boxed: bool = False  # whether bulk tensor copies bring rows of y

    @property
    def before_w(self) -> int:
        """The padding before along W, modulo the stride."""
        return before_of(self.spec)


def cases() -> dict[str, Case]:
    """Return the cases by name."""
    found = {}
    for index in range(16):
        choose = random.Random(index)
        (dtype, precision), rank = KINDS[index % 4], 1 + index // 4 % 3
        tile = None
        draws = attempts()
        while tile is None:
            next(draws)
            spec = draw_problem(choose, rank, dtype, index % 3 == 1)
            tile = draw_tile(choose, spec, dtype, precision)
        device = Device(90, choose.choice((1, 1, 2)), SHARED_BYTES)  # so few that each block has several boxes
        this = Case(spec, dtype, precision, device, tile, index64=index % 5 == 4, patches=index % 4 == 3)
        found[f"{index}-{precision or dtype}-{rank}d"] = this
    return found


def boxed_cases() -> dict[str, Case]:
    """Return cases of y that bulk tensor copies bring, by name."""
    found = {}
    for index in range(4, 24):
        choose = random.Random(index)
        (dtype, precision), rank = KINDS[index % 4], 1 + index // 4 % 3
        tile = None
        draws = attempts()
        while tile is None:
            next(draws)
            spec = draw_boxed_problem(choose, rank, dtype, index)
            tile = draw_tile(choose, spec, dtype, precision, boxed=True, whole_h=index >= 12)
        device = Device(90, choose.choice((1, 1, 2)), SHARED_BYTES)
        this = Case(spec, dtype, precision, device, tile, index64=index % 5 == 4, boxed=True)
        found[f"boxed-{index}-{precision or dtype}-{rank}d"] = this
    return found


def draw_boxed_problem(choose: random.Random, rank: int, dtype: str, index: int) -> Specialisation:
    """Draw one with the strides that are next, mostly with classes along H, and with some along D."""
    spec, in_groups = draw_problem(choose, rank, dtype, False), index % 3 == 1
    kernel, stride, dilation = (list(ints) for ints in (spec.kernel, spec.stride, spec.dilation))
    stride[-1] = (1 + (index + index // 4) % 4) * (1 if dtype == "float32" else 2)
    if rank > 1:
        stride[-2], dilation[-2] = ((2, 1), (2, 3), (3, 2), (4, 2), (1, 2))[index % 5]
        kernel[-2] = choose.choice((2, 3, 3))
    if rank > 2 and index % 2:
        kernel[0], (stride[0], dilation[0]) = 3, ((2, 3), (3, 1))[index // 2 % 2]
    before_w = choose.randrange(min(stride[-1], (kernel[-1] - 1) * dilation[-1] + 1))
    fewest = 5 if dtype == "float32" else 3
    channels_y = choose.choice((16, 16, 32, 48)) if in_groups else choose.choice((fewest, 8, 12, 17, 24, 33, 40))
    return of_whole_rows(
        dataclasses.replace(
            spec,
            kernel=tuple(kernel),
            stride=tuple(stride),
            dilation=tuple(dilation),
            c_out_per_group=channels_y,
            groups=None if in_groups else 1,
            shifts=(*(None,) * (rank - 1), before_w),
        )
    )


def of_whole_rows(spec: Specialisation) -> Specialisation:
    """Return the specialisation with rows of y of whole 16 bytes, which it does not fill, and a result in rows."""
    of_results = tuple(layout for layout in spec.x_layouts if layout not in ("broadcast", "transposed"))
    return dataclasses.replace(spec, x_layouts=of_results, out_layouts=("cropped",))


def draw_problem(choose: random.Random, rank: int, dtype: str, out_last: bool) -> Specialisation:
    kernel, dilation = (tuple(choose.randint(1, top) for _ in range(rank)) for top in (LARGEST_KERNEL[rank], 3))
    along_w = (1, 2, 2, 3, 4) if dtype == "float32" else (2, 2, 2, 4, 6, 8)
    stride = (*(choose.randint(1, 3) for _ in range(rank - 1)), choose.choice(along_w))
    channels = choose.choice((3, 8, 12, 17, 40)), choose.choice((3, 8, 16, 17, 24, 33))
    spec = specialisation(kernel, stride, dilation, channels, (out_last, False))
    rows_of_y = tuple(
        layout for layout in spec.out_layouts if layout != "transposed"
    )  # of which one image is channels-last
    before_w = choose.randrange(min(stride[-1], (kernel[-1] - 1) * dilation[-1] + 1))  # which the smallest y has, too
    return dataclasses.replace(spec, out_layouts=rows_of_y, shifts=(*(None,) * (rank - 1), before_w))


def before_of(spec: Specialisation) -> int:
    return spec.shift(len(spec.kernel) - 1) or 0


def draw_tile(
    choose: random.Random,
    spec: Specialisation,
    dtype: str,
    precision: str | None,
    boxed: bool = False,
    whole_h: bool = False,
) -> Tile | None:
    """Draw a tile that fits whatever the extents, if there is one; kinds are drawn first, since some have few tiles."""
    with brought(boxed):
        problem = padded(spec, EXTENTS[len(spec.kernel)][0])
        geometry, layout = geometry_of(problem), layout_for(spec, problem)
        device = Device(90, 1, SHARED_BYTES)
        if rows._refuse(geometry, dtype, layout, precision, device):
            return None
        work = rows.Work(*rows.as_read(geometry, layout), dtype, precision)
        kinds: dict[Any, list[Tile]] = {}
        whole_h = whole_h and work.live[1] > 1
        for tile in rows.tiles(work):
            if tile.whole_h != whole_h:
                continue
            kind = tile.resident, tile.x_stages, tile.min_blocks, tile.workers if boxed else 0
            kinds.setdefault(kind, []).append(tile)
        for kind in choose.sample(list(kinds), len(kinds)):
            for tile in choose.sample(kinds[kind], len(kinds[kind])):
                if choose.random() < 0.5:  # as where weights are many
                    tile = dataclasses.replace(tile, resident=False, ring=3)
                if serves(spec, dtype, precision, tile):
                    return tile
        return None


def serves(spec: Specialisation, dtype: str, precision: str | None, tile: Tile) -> bool:
    """Whether the tile takes all of these problems, and no box of them so many products that they take seconds."""
    rank = len(spec.kernel)
    if products_of_box(spec, dtype, precision, tile) > MOST_OF_BOX:
        return False
    of_each_width = ((*(3,) * (rank - 1), width) for width in WIDTHS)
    for extent in (LONGEST[rank], *EXTENTS[rank], *of_each_width):
        problem = padded(spec, extent)
        geometry, layout = geometry_of(problem), layout_for(spec, problem)
        device = Device(90, 1, SHARED_BYTES)
        if isinstance(rows.plan_tile(geometry, dtype, layout, precision, device, tile), Refusal):
            return False
    return True


def products_of_box(spec: Specialisation, dtype: str, precision: str | None, tile: Tile) -> int:
    problem = padded(spec, EXTENTS[len(spec.kernel)][0])
    geometry, layout = geometry_of(problem), layout_for(spec, problem)
    work = rows.Work(*rows.as_read(geometry, layout), dtype, precision)
    chunks = -(-spec.c_out_per_group // work.chunk(tile))
    of_a_tap = work.shape.products * work.products_of_slot(tile) * tile.tiles_m * tile.workers
    return of_a_tap * chunks * geometry.kernel[0] * geometry.kernel[1]


def shares_last_tap(this: Case) -> bool:
    """Whether two groups of channels share products, of the last one of an odd number of taps."""
    problem = padded(this.spec, EXTENTS[len(this.spec.kernel)][0])
    work = rows.Work(*rows.as_read(geometry_of(problem), layout_for(this.spec, problem)), this.dtype, this.precision)
    return work.products_of_slot(this.tile) < this.tile.k_steps * work.pairs


def padded(spec: Specialisation, extent: Ints, more: int = 0, after_w: int = 0) -> Problem:
    """Return a problem with the padding before along W that all have, or so many strides more."""
    return smallest(spec, extent, (before_of(spec) + more * spec.stride[-1], after_w), spec.groups or 2)


def layout_for(spec: Specialisation, problem: Problem) -> Layout:
    """Return the layout of a call, also where y does not fill its rows, whose strides `place` makes so."""
    layout = layout_of(spec, problem)
    if problem.out_layout != "cropped":
        return layout
    *others, width = (problem.n or 1, problem.c_out, *geometry_of(problem).out_extent)
    return dataclasses.replace(layout, out=contiguous((*others, width + 8 - width % 8)))


def boxed_problems(this: Case) -> list[Problem]:
    """Return problems with some padding before along W each; the last one fills its rows of y."""
    spec, others = this.spec, (3,) * (len(this.spec.kernel) - 1)
    extents = (*EXTENTS[len(spec.kernel)], (*others, 37))
    found = [padded(spec, extent, more) for more, extent in enumerate(extents)]
    extent = (*others, 24)
    whole = padded(spec, extent, after_w=padded(spec, extent).out_shape[-1] % 8)
    return [*found, dataclasses.replace(whole, out_layout="contiguous")]


def of_each_way(this: Case) -> dict[int, Problem]:
    """Return a problem for each way to copy rows of y, by its bytes at a time."""
    spec, found = this.spec, {}
    for after_w in range(this.before_w, this.before_w + 2):
        for width in WIDTHS:
            problem = smallest(spec, (*(3,) * (len(spec.kernel) - 1), width), (this.before_w, after_w))
            found.setdefault(bytes_copied(plan_for(this, problem)), problem)
    return found


def bytes_copied(plan: Plan) -> int:
    return problem_of(plan)["x_vector"][0]


def plan_for(this: Case, problem: Problem) -> Plan:
    with planned_with(this):
        return rows.plan_correlate_rows(
            geometry_of(problem), this.dtype, layout_for(this.spec, problem), this.precision, this.device
        )


@contextmanager
def brought(boxed: bool) -> Iterator[None]:
    """Plan as if no bulk tensor copies could bring y, unless boxes are asked for."""
    with pytest.MonkeyPatch.context() as patch:
        if not boxed:
            patch.setattr(plan_correlate_rows_work, "_copies_can_bring", lambda *_: False)
        yield


@contextmanager
def planned_with(this: Case) -> Iterator[None]:
    """Plan with the case's tile whatever it costs, and in its way to bring y."""

    def find(*problem: Any) -> Plan | Refusal:
        found = rows.plan_tile(*problem, this.tile)
        if isinstance(found, Plan):
            assert dict(found.defines)["BOXED"] == bool(found.maps) == this.boxed
        return found

    with brought(this.boxed), planned_by(rows, this, find):
        yield


@contextmanager
def on_host(this: Case, sources: dict[str, str] | None = None) -> Iterator[None]:
    """Run the correlations of NumPy arrays by this case's kernel within the context."""
    with planned_with(this), gradients_on_host("correlate_rows", this.device, this.precision, sources=sources):
        yield
