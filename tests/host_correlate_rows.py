"""Cases of correlate_rows for the host, each of one program, with tiles drawn from the planner's."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from described import geometry_of, problem_of
from host_correlate_wgmma import (
    EXTENTS,
    LARGEST_KERNEL,
    LONGEST,
    MAX_PRODUCTS,
    SHARED_BYTES,
    layout_of,
    planned_by,
    smallest,
)
from host_gradients import gradients_on_host, specialisation
from strategies import KINDS, Problem, Specialisation

from cuconvt import plan_correlate_rows as rows
from cuconvt.plan import Device, Plan, Refusal
from cuconvt.plan_wgmma_sizes import Tile

WIDTHS = range(16, 40)  # that problems may have whose rows are copied in this way or that


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
        while tile is None:
            spec = draw_problem(choose, rank, dtype, index % 3 == 1)
            tile = draw_tile(choose, spec, dtype, precision)
        device = Device(90, choose.choice((1, 1, 2)), SHARED_BYTES)  # so few that each block has several boxes
        this = Case(spec, dtype, precision, device, tile, index64=index % 5 == 4, patches=index % 4 == 3)
        found[f"{index}-{precision or dtype}-{rank}d"] = this
    return found


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


def draw_tile(choose: random.Random, spec: Specialisation, dtype: str, precision: str | None) -> Tile | None:
    """Draw a tile that fits whatever the extents, if there is one; kinds are drawn first, since some have few tiles."""
    problem = smallest(spec, EXTENTS[len(spec.kernel)][0], (before_of(spec), 0))
    geometry, layout = geometry_of(problem), layout_of(spec, problem)
    device = Device(90, 1, SHARED_BYTES)
    if rows._refuse(geometry, dtype, layout, precision, device):
        return None
    work = rows.Work(*rows.as_read(geometry, layout), dtype, precision)
    kinds: dict[Any, list[Tile]] = {}
    for tile in rows.tiles(work):
        products = tile.k_steps * work.pairs * tile.tiles_m
        if products * geometry.kernel[0] * geometry.kernel[1] <= MAX_PRODUCTS:
            kinds.setdefault((tile.resident, tile.x_stages, tile.min_blocks), []).append(tile)
    for kind in choose.sample(list(kinds.values()), len(kinds)):
        for tile in choose.sample(kind, len(kind)):
            if choose.random() < 0.5:  # as where weights are many
                tile = dataclasses.replace(tile, resident=False, ring=3)
            if serves(spec, dtype, precision, tile):
                return tile
    return None


def serves(spec: Specialisation, dtype: str, precision: str | None, tile: Tile) -> bool:
    rank = len(spec.kernel)
    of_each_width = ((*(3,) * (rank - 1), width) for width in WIDTHS)
    for extent in (LONGEST[rank], *EXTENTS[rank], *of_each_width):
        problem = smallest(spec, extent, (before_of(spec), 0))
        geometry, layout = geometry_of(problem), layout_of(spec, problem)
        device = Device(90, 1, SHARED_BYTES)
        if isinstance(rows.plan_tile(geometry, dtype, layout, precision, device, tile), Refusal):
            return False
    return True


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
            geometry_of(problem), this.dtype, layout_of(this.spec, problem), this.precision, this.device
        )


def planned_with(this: Case) -> AbstractContextManager[None]:
    """Plan with the case's tile whatever it costs."""
    return planned_by(rows, this, lambda *problem: rows.plan_tile(*problem, this.tile))


@contextmanager
def on_host(this: Case, sources: dict[str, str] | None = None) -> Iterator[None]:
    """Run the correlations of NumPy arrays by this case's kernel within the context."""
    with planned_with(this), gradients_on_host("correlate_rows", this.device, this.precision, sources=sources):
        yield
