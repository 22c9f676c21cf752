"""Cases of narrow_groups for the host, each of one program, and the edges of its tiles."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
from collections.abc import Callable
from typing import Any

from described import DEVICES, planner_with, problem_of
from strategies import KINDS, NOT_LAST, SIDES, Ints, Specialisation

from cuconvt import plan_narrow_groups as narrow
from cuconvt.geometry import Geometry
from cuconvt.plan import Device, Layout, Plan
from cuconvt.plan_narrow_groups import Tile
from cuconvt.plan_views import batch_as_depth

BUDGET = 0.2  # an mma of 32 threads takes longer than its products
LARGEST_KERNEL = {1: 9, 2: 4, 3: 3}
LONGEST = {1: (150,), 2: (10, 34), 3: (4, 9, 17)}
# Extents of which some have several boxes along each axis, the last one ragged.
RAGGED = {1: ((65,), (129,), (517,)), 2: ((5, 35), (9, 67), (11, 33)), 3: ((3, 5, 9), (5, 3, 33), (9, 5, 17))}
# Channels of a group, in and out.
CHANNELS = ((8, 8), (3, 5), (8, 12), (12, 8), (1, 1), (16, 17), (5, 8), (8, 3), (4, 16), (9, 24))
LAST = ("channels_last",)
FOLLOWING = ("contiguous", "sliced", "cropped", "misaligned")  # outputs along W follow each other

plan_tile = functools.partial(planner_with, narrow.plan_narrow_groups)


def cases() -> dict[str, dict[str, Any]]:
    """Return the fields of each case by name."""
    found = {}
    for index in range(36):
        choose = random.Random(index)
        (dtype, precision), rank = KINDS[index % 4], 1 + index // 4 % 3
        kernel, stride, dilation = (
            tuple(choose.randint(1, top) for _ in range(rank)) for top in (LARGEST_KERNEL[rank], (4, 3, 2)[rank - 1], 2)
        )
        shifts = tuple(min(choose.randrange(s), d * (k - 1)) for k, s, d in zip(kernel, stride, dilation, strict=True))
        x_last, out_last = SIDES[index // 4 % 4]
        c_in, c_out = CHANNELS[index % len(CHANNELS)]
        x, out = layouts(x_last), layouts(out_last)[:-1] or LAST
        spec = Specialisation(kernel, stride, dilation, c_in, c_out, x, out, shifts=shifts)
        # On few multiprocessors each block has several boxes.
        device = dataclasses.replace(choose.choice(list(DEVICES.values())), multiprocessors=choose.choice((1, 2)))
        fields = {"precision": precision, "device": device, "plan": plan_with(choose.randrange(100))}
        fields["index64"] = choose.random() < 0.2
        found[f"{index}-{precision or dtype}-{rank}d"] = {"spec": spec, "dtype": dtype, **fields}
    for index, (rank, stride) in enumerate(itertools.product((1, 2, 3), (1, 2, 3))):
        # Groups in pairs, which read and store whole sectors together.
        choose = random.Random(index)
        kernel = tuple(choose.randint(2, min(4, LARGEST_KERNEL[rank])) for _ in range(rank))
        strides = (*(choose.randint(1, 2) for _ in range(rank - 1)), stride)
        shifts = tuple(min(choose.randrange(s), k - 1) for k, s in zip(kernel, strides, strict=True))
        channels, own = ((8, 8, 5)[index % 3], 8), {"groups": (2, 4)[index % 2], "shifts": shifts}
        spec = Specialisation(kernel, strides, (1,) * rank, *channels, layouts(index % 4 < 3), LAST, **own)
        fields = {"device": dataclasses.replace(DEVICES[90], multiprocessors=1), "plan": plan_with(index, groups=2)}
        found[f"pairs-{rank}d-stride-{stride}"] = {"spec": spec, "dtype": KINDS[index % 2][0], **fields}
    for index, rank in enumerate((3, 2, 1, 3, 2, 1)):
        # Rows whose result leaves a block a box at a time.
        choose = random.Random(index)
        kernel = tuple(choose.randint(2, LARGEST_KERNEL[rank]) for _ in range(rank))
        stride = (4,) if rank == 1 else tuple(2 for _ in range(rank))
        dilation = tuple(choose.randint(1, 2) for _ in range(rank))
        shifts = tuple(min(choose.randrange(s), d * (k - 1)) for k, s, d in zip(kernel, stride, dilation, strict=True))
        channels = CHANNELS[choose.randrange(len(CHANNELS))]
        spec = Specialisation(kernel, stride, dilation, *channels, FOLLOWING, FOLLOWING, shifts=shifts)
        fields = {"device": dataclasses.replace(DEVICES[90], multiprocessors=1), "plan": plan_with(index, boxed=True)}
        found[f"boxed-{index}-{rank}d"] = {"spec": spec, "dtype": KINDS[index % 2][0], **fields}
    for index, (precision, last) in enumerate(itertools.product(("tf32", "tf32x3"), (False, True))):
        # Residues along D that are summed one after the other.
        choose = random.Random(index)
        kernel, stride = tuple(choose.randint(2, 3) for _ in range(3)), (choose.randint(2, 3), 2, 2)
        shifts = tuple(min(choose.randrange(s), k - 1) for k, s in zip(kernel, stride, strict=True))
        channels = ((3, 5), (16, 17), (8, 8), (5, 12))[index]
        x, out = layouts(last), LAST if last else FOLLOWING
        spec = Specialisation(kernel, stride, (1, 1, 1), *channels, x, out, shifts=shifts)
        fields = {"device": dataclasses.replace(DEVICES[90], multiprocessors=1), "plan": plan_with(index, split=True)}
        found[f"split-{precision}-{out[0]}"] = {"spec": spec, "dtype": "float32", "precision": precision, **fields}
    return found


def layouts(last: bool) -> tuple[str, ...]:
    return LAST if last else NOT_LAST


def plan_with(number: int, groups: int = 1, boxed: bool = False, split: bool = False) -> Callable[..., Plan]:
    """Return a planner that takes one of a problem's tiles, whatever it costs."""

    def plan(
        family: str, geometry: Geometry, dtype: str, layout: Layout, precision: str | None, device: Device
    ) -> Plan:
        turned, turned_layout = batch_as_depth(geometry, layout)
        every_tile = fitting_tiles(narrow.Work.of_problem(turned, dtype, precision, turned_layout), device)
        kind = groups, boxed, split
        tiles = [tile for tile in every_tile if (tile.groups, tile.boxed, tile.split) == kind] or every_tile
        tile = tiles[number % len(tiles)]
        return plan_tile(tile)(family, geometry, dtype, layout, precision, device)

    return plan


@functools.cache
def fitting_tiles(work: narrow.Work, device: Device) -> list[Tile]:
    tiles = (tile for tile in narrow.tiles(work) if work.typical_cost(tile, device) is not None)
    return sorted(tiles, key=dataclasses.astuple)


def box(plan: Plan) -> Ints:
    """Return what a block owns along D, H, W (in cells), C_out, and C_in, all of which it has."""
    return (*problem_of(plan)["box"], 8 * dict(plan.defines)["TILES_C"], 1)
