"""Cases of disjoint for the host, each of one program, and the edges of its tiles."""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Callable
from typing import Any

from described import planner_with, problem_of
from strategies import KINDS, NOT_LAST, Ints, Specialisation

from cuconvt import plan_disjoint as disjoint
from cuconvt.geometry import Geometry
from cuconvt.plan import Device, Layout, Plan
from cuconvt.plan_disjoint import Tile

BUDGET = 0.1  # a wgmma of 128 threads takes longer than its products
LARGEST_KERNEL = {1: 8, 2: 4, 3: 3}
LONGEST = {1: (600,), 2: (12, 44), 3: (4, 9, 17)}
RAGGED = {1: ((67,), (141,), (529,)), 2: ((5, 19), (11, 17), (27, 19)), 3: ((5, 3, 7), (3, 9, 11), (11, 3, 9))}
LAST = ("channels_last",)
SHARED_BYTES = 227 * 1024

plan_tile = functools.partial(planner_with, disjoint.plan_disjoint)


def cases() -> dict[str, dict[str, Any]]:
    """Return the fields of each case by name."""
    found = {}
    for index in range(32):
        choose = random.Random(index)
        (dtype, precision), rank = KINDS[index % 4], 1 + index // 4 % 3
        kernel = tuple(choose.randint(1, LARGEST_KERNEL[rank]) for _ in range(rank))
        c_in = choose.choice((3, 8, 12, 17, 24, 33, 48, 64))
        c_out = choose.choice((1, 5, 8, 12, 17, 24, 32, 48, 64))
        x_last, out_last = index // 4 % 2 == 1, index // 8 % 2 == 1
        x, out = LAST if x_last else NOT_LAST, LAST if out_last else NOT_LAST[:-1]  # a result is not broadcast
        # Fewer multiprocessors than parts of the weights, and more.
        device = Device(90, choose.choice((1, 1, 2, 5)), SHARED_BYTES)
        spec = Specialisation(kernel, kernel, (1,) * rank, c_in, c_out, x, out)
        fields = {"precision": precision, "device": device, "plan": plan_with(choose.randrange(100))}
        found[f"{index}-{precision or dtype}-{rank}d"] = {"spec": spec, "dtype": dtype, **fields}
    wide = (
        (KINDS[0], Tile(3, 2, 4, 4, True, 1)),
        (KINDS[1], Tile(2, 2, 8, 4, True, 1)),
        (KINDS[3], Tile(2, 1, 8, 2, False, 1)),
    )
    for (dtype, precision), tile in wide:
        spec = Specialisation((1,), (1,), (1,), 12, 65, NOT_LAST, NOT_LAST[:1])
        fields = {"precision": precision, "device": Device(90, 1, SHARED_BYTES), "plan": plan_tile(tile)}
        found[f"{tile.tiles_c}-tiles-{precision or dtype}"] = {"spec": spec, "dtype": dtype, **fields}
    # Rows that end within a sector are multiplied and stored by eight channels, two rows of taps at a time.
    by_rows = (
        (KINDS[0], (2, 2), Tile(2, 1, 4, 2, True, 1)),
        (KINDS[1], (1, 2, 2), Tile(2, 1, 5, 2, False, 1)),
        (KINDS[2], (3, 2), Tile(2, 1, 4, 2, True, 1)),
    )
    for (dtype, precision), kernel, tile in by_rows:
        spec = Specialisation(kernel, kernel, (1,) * len(kernel), 20, 36, NOT_LAST, NOT_LAST[:1])
        fields = {"precision": precision, "device": Device(90, 2, SHARED_BYTES), "plan": plan_tile(tile)}
        found[f"by_rows-{precision or dtype}"] = {"spec": spec, "dtype": dtype, **fields}
    return found


def plan_with(number: int) -> Callable[..., Plan]:
    """Return a planner that takes one of a problem's tiles, whatever it costs."""

    def plan(
        family: str, geometry: Geometry, dtype: str, layout: Layout, precision: str | None, device: Device
    ) -> Plan:
        shape = disjoint.Work.of_problem(geometry, dtype, precision, layout).shape
        # The result of a call without `out` has the layout of x, and the same tile but for its runs.
        like = dataclasses.replace(shape, out_channels_last=False)
        every_tile = list(disjoint.tiles(disjoint.Work(like), device))
        tile = every_tile[number % len(every_tile)]
        tile = dataclasses.replace(tile, run=disjoint._run(shape, tile.tiles_m))
        return plan_tile(tile)(family, geometry, dtype, layout, precision, device)

    return plan


def box(plan: Plan) -> Ints:
    """Return what a thread owns along W (in positions q of a phase) and C_out; along D, H and C_in, nothing is cut."""
    defines = dict(plan.defines)
    assert problem_of(plan)["box"][2] > 0
    return (1, 1, defines["RUN"], 8 * defines["TILES_C"], 1)
