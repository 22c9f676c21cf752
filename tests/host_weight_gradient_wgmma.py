"""Cases of weight_gradient_wgmma for the host, each of one program, with tiles drawn from the planner's."""

from __future__ import annotations

import dataclasses
import functools
import random
from typing import Any

import pytest
from described import geometry_of, layout_of
from host_gradients import specialisation, weight_gradients_on_host
from strategies import Ints, Problem, Specialisation, attempts, case

from cuconvt import plan as planning
from cuconvt import plan_weight_gradient_wgmma as wgmma
from cuconvt.geometry import Geometry
from cuconvt.plan import Device, Layout, Plan

SHARED_BYTES = 227 * 1024
LARGEST_KERNEL = {1: 9, 2: 4, 3: 3}
LONGEST = {1: (200,), 2: (12, 22), 3: (4, 6, 12)}
RAGGED = {1: (133,), 2: (13, 19), 3: (3, 5, 17)}
WHOLE_PIECES = {1: (64,), 2: (6, 16), 3: (2, 4, 16)}  # rows of x, and with some strides of y, that 16 bytes divide
WORDS = {1: (66,), 2: (5, 18), 3: (2, 3, 10)}  # rows that 4 bytes divide
ONE_RUN = {1: (8,), 2: (5, 8), 3: (1, 3, 8)}
MAX_PRODUCTS = 400  # of two runs: a wgmma takes the host long
# Draws of 16 bits and of float32 that take the host little time, with tiles that differ.
DRAWS_16 = (*range(5), *range(6, 11), 12, 13, 14, 15, 17, 25)
DRAWS_TF32 = (71, 78, 79, 95, 108, 119, 131, 144)
# A geometry that once did not end: strided, of one axis, with few channels.
ONCE_HUNG = ("float16", (7,), (4,), (1,), 5, 16)


@dataclasses.dataclass(frozen=True)
class Case:
    """A specialisation of the kernel: every problem of it runs the same program."""

    spec: Specialisation
    dtype: str
    device: Device
    tile: wgmma.Tile
    index64: bool = False
    before_w: int = 0  # the padding before along W, modulo 8, which the program depends on

    @property
    def precision(self) -> str | None:
        return "tf32" if self.dtype == "float32" else None

    @property
    def kind(self) -> str:
        return "TF32" if self.dtype == "float32" else "16 bits"

    def plan(self, geometry: Geometry, dtype: str, layout: Layout) -> Plan:
        with pytest.MonkeyPatch.context() as patch:
            if self.index64:
                patch.setattr(planning, "INDEX_LIMIT", 0)
            plan = wgmma.plan_weight_gradient_wgmma(geometry, dtype, layout, self.precision, self.device, self.tile)
        assert isinstance(plan, Plan), plan
        return plan

    def plan_for(self, problem: Problem) -> Plan:
        geometry = geometry_of(problem)
        return self.plan(geometry, self.dtype, layout_of(geometry))

    def problem(self, extent: Ints, groups: int = 2, **fields: Any) -> Problem:
        spec = self.spec
        shape, channels = (2, groups * spec.c_in_per_group, *extent), groups * spec.c_out_per_group
        padding = ((0, 0),) * (len(extent) - 1) + ((self.before_w, 0),)
        keywords = {"padding": padding, "dilation": spec.dilation, **fields}
        return case(shape, channels, spec.kernel, spec.stride, groups=groups, **keywords)

    def fixed_problems(self) -> list[Problem]:
        rank = len(self.spec.kernel)
        ragged = [self.problem(extents[rank]) for extents in (RAGGED, WHOLE_PIECES, WORDS, ONE_RUN)]
        three_runs = 12 if self.dtype == "float32" else 24  # copies would bring four
        whole = WHOLE_PIECES[rank], (*ONE_RUN[rank][:-1], three_runs)
        return [*ragged, *map(self.whole_rows, whole)]

    def whole_rows(self, extent: Ints) -> Problem:
        """Return a problem of which rows of y are whole pieces, too."""
        spec, w = self.spec, len(extent) - 1
        full = (extent[w] - 1) * spec.stride[w] + (spec.kernel[w] - 1) * spec.dilation[w] + 1
        after = (full - self.before_w) % 8
        return self.problem(extent, padding=((0, 0),) * w + ((self.before_w, after),))

    def padded(self, problem: Problem) -> Problem:
        """Return the problem with as much more padding before along W as the case has, and more inputs for it."""
        (before, after), stride = problem.padding[-1], problem.stride[-1]
        more = (self.before_w - before) % 8
        extent = (*problem.extent[:-1], problem.extent[-1] + -(-more // stride))
        return dataclasses.replace(problem, extent=extent, padding=(*problem.padding[:-1], (before + more, after)))


def cases() -> dict[str, Case]:
    """Return the cases by name."""
    found = {}
    for index in (*DRAWS_16, *DRAWS_TF32):
        choose = random.Random(index)
        rank, dtype = 1 + index % 3, ("float16", "bfloat16")[index % 2] if index in DRAWS_16 else "float32"
        tile = None
        draws = attempts()
        while tile is None:
            next(draws)
            kernel = tuple(choose.randint(1, LARGEST_KERNEL[rank]) for _ in range(rank))
            stride = tuple(choose.choice((1, 1, 2, 2, 3, 4)) for _ in range(rank))
            dilation = tuple(choose.choice((1, 1, 2)) for _ in range(rank))
            channels = choose.choice((3, 8, 17, 40, 72)), choose.choice((1, 5, 8, 16, 24, 41, 72))
            before_w = choose.randrange(8)
            spec = specialisation(kernel, stride, dilation, channels, (False, False))
            tile = draw_tile(choose, spec, before_w, dtype)
        device = Device(90, choose.choice((1, 3)), SHARED_BYTES)  # on few multiprocessors a block has several boxes
        found[f"{index}-{dtype}-{rank}d"] = Case(spec, dtype, device, tile, index % 5 == 4, before_w)
    dtype, kernel, stride, dilation, c_in, c_out = ONCE_HUNG
    spec = specialisation(kernel, stride, dilation, (c_in, c_out), (False, False))
    for blocks in (2, 3):
        tile = draw_tile(random.Random(blocks), spec, 0, dtype, blocks)
        assert tile is not None
        found[f"once-hung-{blocks}"] = Case(spec, dtype, Device(90, 1, SHARED_BYTES), tile)
    return found


def draw_tile(
    choose: random.Random, spec: Specialisation, before_w: int, dtype: str, blocks: int | None = None
) -> wgmma.Tile | None:
    """Draw one of the tiles that a specialisation may use, however slow, that fits whatever the extents."""
    problem = case(
        (1, spec.c_in_per_group, *(9,) * len(spec.kernel)),
        spec.c_out_per_group,
        spec.kernel,
        spec.stride,
        dilation=spec.dilation,
        padding=((0, 0),) * (len(spec.kernel) - 1) + ((before_w, 0),),
    )
    geometry = geometry_of(problem)
    shape = wgmma.Shape.of(geometry, layout_of(geometry), wgmma.ITEMSIZES[dtype], index64=False)
    work, device = wgmma.Work(shape), Device(90, 132, SHARED_BYTES)
    kinds: dict[Any, list[wgmma.Tile]] = {}
    for tile in wgmma.tiles(work):
        products = tile.tiles_m * tile.workers * tile.taps_w * work.tiles_of_weights(tile)
        if products <= MAX_PRODUCTS and blocks in (None, tile.min_blocks):
            kinds.setdefault((tile.workers, tile.taps_w, tile.groups_w, tile.taps_d * tile.taps_h > 1), []).append(tile)
    if not kinds:
        return None
    tile = choose.choice(kinds[choose.choice(list(kinds))])
    return tile if work.typical_cost(tile, device) is not None else None


on_host = functools.partial(weight_gradients_on_host, "weight_gradient_wgmma")
