"""Cases of weight_gradient_narrow for the host, each of one program, with tiles drawn from the planner's."""

from __future__ import annotations

import dataclasses
import functools
import random
from typing import Any

import pytest
from described import DEVICES, geometry_of
from host_gradients import NEXT, weight_gradients_on_host
from strategies import KINDS, Ints, Problem, Specialisation, case

from cuconvt import plan as planning
from cuconvt import plan_weight_gradient_narrow as narrow
from cuconvt.geometry import Geometry
from cuconvt.plan import Device, Layout, Plan
from cuconvt.plan_views import batch_as_depth

LARGEST_KERNEL = {1: 9, 2: 4, 3: 3}
LONGEST = {1: (200,), 2: (9, 36), 3: (4, 6, 20)}
RAGGED = {1: (131,), 2: (7, 35), 3: (3, 5, 19)}
WHOLE = {1: (64,), 2: (6, 32), 3: (3, 4, 16)}  # rows of x, and with some kernels of y, that 16 bytes divide
CHANNELS = ((8, 8), (3, 5), (8, 12), (1, 1), (9, 8), (4, 16), (5, 2))
DRAWS = (0, 1, 3, 4, 5, 6, 7, 8, 9, 10, 11, 14)


@dataclasses.dataclass(frozen=True)
class Case:
    """A specialisation of the kernel: every problem of it runs the same program."""

    spec: Specialisation
    dtype: str
    precision: str | None
    device: Device
    tile: narrow.Tile
    index64: bool = False

    def plan(self, geometry: Geometry, dtype: str, layout: Layout) -> Plan:
        with pytest.MonkeyPatch.context() as patch:
            if self.index64:
                patch.setattr(planning, "INDEX_LIMIT", 0)
            plan = narrow.plan_weight_gradient_narrow(geometry, dtype, layout, self.precision, self.device, self.tile)
        assert isinstance(plan, Plan), plan
        return plan

    def problem(self, extent: Ints, groups: int = 2, **fields: Any) -> Problem:
        spec = self.spec
        shape, channels = (2, groups * spec.c_in_per_group, *extent), groups * spec.c_out_per_group
        padding = ((0, 0),) * (len(extent) - 1) + ((spec.shift(len(extent) - 1), 0),)
        keywords = {"padding": padding, "dilation": spec.dilation, **fields}
        return case(shape, channels, spec.kernel, spec.stride, groups=groups, **keywords)

    def fixed_problems(self) -> list[Problem]:
        """Ragged boxes, rows without and with gaps, and rows of y that 16 bytes divide."""
        rank = len(self.spec.kernel)
        ragged = self.problem(RAGGED[rank])
        gaps = {"x_layout": "cropped", "out_layout": "cropped"}
        return [ragged, dataclasses.replace(ragged, **gaps), self.whole(self.problem(WHOLE[rank]))]

    def whole(self, problem: Problem) -> Problem:
        """Return the problem with so much padding after along W that 16 bytes divide the rows of y."""
        before, _ = problem.padding[-1]
        more = problem.out_shape[-1] % 8
        return dataclasses.replace(problem, padding=(*problem.padding[:-1], (before, more)))


def cases() -> dict[str, Case]:
    """Return the cases by name."""
    found = {}
    for index in DRAWS:
        choose = random.Random(index)
        (dtype, precision), rank = KINDS[index % 4], 1 + index // 4 % 3
        top = LARGEST_KERNEL[rank]
        kernel = tuple(choose.randint(1, top) for _ in range(rank))
        stride = tuple(choose.choice((1, 2, 2, 3, 4)) for _ in range(rank))
        dilation = tuple(choose.choice((1, 1, 2)) for _ in range(rank))
        shift = min(choose.randrange(stride[-1]), dilation[-1] * (kernel[-1] - 1))
        shifts = (*(None,) * (rank - 1), shift)
        layouts = {"x_layouts": (*NEXT, "broadcast"), "out_layouts": NEXT}
        spec = Specialisation(kernel, stride, dilation, *CHANNELS[index % len(CHANNELS)], **layouts, shifts=shifts)
        # With bulk copies and without; on few multiprocessors a block has several boxes.
        device = dataclasses.replace(DEVICES[(90, 80)[index // 2 % 2]], multiprocessors=choose.choice((1, 2)))
        if rank == 1:  # rows of several boxes
            device = dataclasses.replace(device, shared_bytes=24 * 1024)
        tile = draw_tile(choose, spec, dtype, precision, device)
        found[f"{index}-{precision or dtype}-{rank}d"] = Case(spec, dtype, precision, device, tile, index % 5 == 4)
    return found


def draw_tile(
    choose: random.Random, spec: Specialisation, dtype: str, precision: str | None, device: Device
) -> narrow.Tile:
    """Draw one of the tiles that a specialisation may use, however slow, of a kind that is drawn first."""
    rank = len(spec.kernel)
    padding = ((0, 0),) * (rank - 1) + ((spec.shift(rank - 1), 0),)
    problem = case((2, 1, *(9,) * rank), 1, spec.kernel, spec.stride, padding, dilation=spec.dilation)
    geometry = geometry_of(problem)
    layout = Layout(x=(1,) * 5, weight=(1,) * 5, bias=None, out=(1,) * 5)
    work = narrow.Work.of(batch_as_depth(geometry, layout)[0], dtype, precision)
    kinds: dict[Any, list[narrow.Tile]] = {}
    wasteful = narrow.Memory((work.unit - 1,) * 3, False)
    for tile in narrow.tiles(work, device):
        fits = work.best_box(tile, (64, 64, 64), 1, (wasteful, wasteful), device)
        if fits and tile.block <= 320:
            kinds.setdefault((tile.warps_d > 1, tile.warps_h > 1, tile.cells_h, tile.stages), []).append(tile)
    # Half of those that can have warps with a tap each along D.
    along_d = [kind for kind in kinds if kind[0]] if choose.random() < 0.5 else []
    return choose.choice(kinds[choose.choice(along_d or list(kinds))])


on_host = functools.partial(weight_gradients_on_host, "weight_gradient_narrow")
