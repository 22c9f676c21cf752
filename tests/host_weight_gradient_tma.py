"""Cases of weight_gradient_tma for the host, each of one program, with tiles drawn from the planner's."""

from __future__ import annotations

import dataclasses
import functools
import random
from typing import Any

from described import channels_last, contiguous, geometry_of
from host_gradients import specialisation, weight_gradients_on_host
from strategies import SIDES, Ints, Problem, Specialisation, attempts, case

from cuconvt import plan_weight_gradient_tma as tma
from cuconvt.geometry import Geometry
from cuconvt.plan import Device, Layout, Plan
from cuconvt.plan_views import batch_as_depth
from cuconvt.plan_weight_gradient_tma_sides import Sides
from cuconvt.plan_weight_gradient_tma_work import Shape, Tile, Work

SHARED_BYTES = 227 * 1024
LARGEST_KERNEL = {1: 9, 2: 4, 3: 3}
RAGGED = {1: (133,), 2: (5, 19), 3: (3, 3, 9)}
WHOLE_PIECES = {1: (64,), 2: (3, 16), 3: (2, 2, 16)}  # rows of x, and with some strides of y, that 16 bytes divide
ONE_RUN = {1: (8,), 2: (4, 8), 3: (1, 3, 8)}
MAX_PRODUCTS = 60  # of a step: a wgmma takes the host long
DRAWS = range(24)
FIRST_OF_FLOAT32 = 12
PRECISIONS = "tf32", "tf32x3"


@dataclasses.dataclass(frozen=True)
class Case:
    """A specialisation of the kernel: every problem of it runs the same program."""

    spec: Specialisation
    dtype: str
    device: Device
    tile: Tile
    precision: str | None = None

    def plan(self, geometry: Geometry, dtype: str, layout: Layout) -> Plan:
        plan = tma.plan_weight_gradient_tma(geometry, dtype, layout, self.precision, self.device, self.tile)
        assert isinstance(plan, Plan), plan
        return plan

    def plan_for(self, problem: Problem) -> Plan:
        geometry = geometry_of(problem)
        return self.plan(geometry, self.dtype, layout_for(problem))

    def problem(self, extent: Ints, **fields: Any) -> Problem:
        spec = self.spec
        groups = 1 if spec.c_in_per_group % 8 or spec.c_out_per_group % 8 else 2
        shape, channels = (2, groups * spec.c_in_per_group, *extent), groups * spec.c_out_per_group
        layouts = {"x_layout": spec.x_layouts[0], "out_layout": spec.out_layouts[0]}
        padding = tuple(min(1, d * (k - 1) // 2) for k, d in zip(spec.kernel, spec.dilation, strict=True))
        keywords = {"padding": padding, "dilation": spec.dilation, **layouts, **fields}
        return case(shape, channels, spec.kernel, spec.stride, groups=groups, **keywords)

    def fixed_problems(self) -> list[Problem]:
        rank = len(self.spec.kernel)
        found = [self.problem(extents[rank]) for extents in (RAGGED, WHOLE_PIECES, ONE_RUN)]
        # As much padding behind as makes rows of y whole pieces, where a stride leaves others.
        more = tuple(-extent % 8 if i == rank - 1 else 0 for i, extent in enumerate(found[1].out_shape[2:]))
        if more[-1] < self.spec.stride[-1]:
            found.append(self.problem(WHOLE_PIECES[rank], output_padding=more))
        return found


def layout_for(problem: Problem) -> Layout:
    """Return the layout of a problem's arrays, without arrays."""
    g = geometry_of(problem)
    of_x, of_y = (
        channels_last if layout == "channels_last" else contiguous for layout in (problem.x_layout, problem.out_layout)
    )
    return Layout(
        x=of_x((g.n, g.c_in, *g.x_extent)),
        weight=contiguous((g.c_in, g.c_out_per_group, *g.kernel)),
        bias=1,
        out=of_y((g.n, g.c_out, *g.out_extent)),
    )


def cases() -> dict[str, Case]:
    """Return the cases by name."""
    found = {}
    for index in DRAWS:
        choose = random.Random(index)
        rank, dtype, last = 1 + index % 3, ("float16", "bfloat16")[index % 2], SIDES[(index + index // 4) % 4]
        precision = None
        if index >= FIRST_OF_FLOAT32:
            dtype, precision = "float32", PRECISIONS[index % 2]
        tile = None
        draws = attempts()
        while tile is None:
            next(draws)
            kernel = tuple(choose.randint(1, LARGEST_KERNEL[rank]) + (axis == rank - 1) for axis in range(rank))
            stride = tuple(choose.choice((1, 1, 2, 2, 3)) for _ in range(rank))
            dilation = tuple(choose.choice((1, 1, 2)) for _ in range(rank))
            # Copies need multiples of eight channels; others are turned first, whatever the layout.
            eights = index % 5 != 4
            channels = (
                choose.choice((8, 40, 136) if eights or not last[0] else (17,)),
                choose.choice((16, 24, 72) if eights or not last[1] else (5, 41)),
            )
            if not any(last) and index % 2:
                channels = choose.choice((3, 17)), choose.choice((5, 41))
            spec = specialisation(kernel, stride, dilation, channels, last)
            tile = draw_tile(choose, spec, precision)
        device = Device(90, choose.choice((1, 3, 64)), SHARED_BYTES)  # on few multiprocessors a block has several boxes
        sides = "".join("xy"[i] for i in range(2) if last[i]) or "rows"
        found[f"{index}-{precision or dtype}-{rank}d-{sides}"] = Case(spec, dtype, device, tile, precision)
    spec = specialisation((3, 3), (2, 1), (1, 1), (8, 24), (False, False))
    found["idle-units"] = Case(spec, "bfloat16", Device(90, 1, SHARED_BYTES), Tile(2, 0, 1, 1, (1, 1, 3), (1, 2, 1)))
    spec = specialisation((2, 3), (1, 1), (1, 1), (136, 40), (True, True))
    found["three-workers"] = Case(spec, "float16", Device(90, 2, SHARED_BYTES), Tile(3, 0, 1, 17, (1, 1, 3), (1, 1, 1)))
    # More taps than a block of the second pass adds in the order of the weights.
    spec = specialisation((9, 9), (2, 1), (1, 1), (24, 8), (False, False))
    found["many-taps-of-x"] = Case(
        spec, "bfloat16", Device(90, 1, SHARED_BYTES), Tile(2, 1, 1, 1, (1, 1, 9), (1, 2, 1))
    )
    return found


def work_of(spec: Specialisation, precision: str | None) -> Work:
    problem = case(
        (1, spec.c_in_per_group, *(9,) * len(spec.kernel)),
        spec.c_out_per_group,
        spec.kernel,
        spec.stride,
        dilation=spec.dilation,
        x_layout=spec.x_layouts[0],
        out_layout=spec.out_layouts[0],
    )
    parts = tma.PARTS[precision] if precision else 0
    sides = Sides.of(*batch_as_depth(geometry_of(problem), layout_for(problem)), parts)
    return Work(Shape.of(sides))


def draw_tile(choose: random.Random, spec: Specialisation, precision: str | None) -> Tile | None:
    """Draw one of the tiles that a specialisation may use, however slow, that fits whatever the extents."""
    work, device = work_of(spec, precision), Device(90, 132, SHARED_BYTES)
    kinds: dict[Any, list[Tile]] = {}
    for tile in tma.tiles(work):
        if tile.units * tile.workers * work.tiles_of_weights(tile) <= MAX_PRODUCTS:
            kinds.setdefault((tile.workers, tile.rows_of_x, tile.tiles_m), []).append(tile)
    if not kinds:
        return None
    tile = choose.choice(kinds[choose.choice(list(kinds))])
    return tile if work.typical_cost(tile, device) is not None else None


on_host = functools.partial(weight_gradients_on_host, "weight_gradient_tma")
