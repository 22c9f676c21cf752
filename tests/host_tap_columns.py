"""Cases of tap_columns for the host, each of one program, and the edges of its tiles."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

from described import DEVICES, planner_with, problem_of
from strategies import KINDS, NOT_LAST, SIDES, Ints, Specialisation

from cuconvt import plan_tap_columns as tap_columns
from cuconvt.geometry import Geometry
from cuconvt.plan import Device, Layout, Plan
from cuconvt.plan_tap_columns import Tile, Work
from cuconvt.plan_views import batch_as_axis

BUDGET = 0.3  # an mma of 32 threads takes longer than its products
LARGEST_KERNEL = {1: 9, 2: 4, 3: 3}
LONGEST = {1: (270,), 2: (10, 34), 3: (4, 9, 17)}
RAGGED = {1: ((67,), (141,), (293,)), 2: ((5, 19), (43, 17), (27, 37)), 3: ((5, 3, 7), (3, 19, 11), (11, 7, 29))}
LAST = ("channels_last",)
# Tiles that small problems do not choose: dtype and precision, kernel, channels in and out, and the tile.
RARE = (
    (KINDS[2], (5, 16), 17, 1, Tile(2, 1, 10, 0)),
    (KINDS[0], (3, 31), 40, 1, Tile(2, 1, 12, 0)),
    (KINDS[3], (3, 16), 90, 1, Tile(2, 1, 6, 4)),
    (KINDS[1], (4, 12), 40, 3, Tile(2, 8, 3, 1)),
    (KINDS[3], (4, 14), 40, 2, Tile(2, 7, 2, 2)),
    (KINDS[0], (3, 15), 17, 1, Tile(2, 6, 1, 0)),
    (KINDS[2], (3, 13), 17, 2, Tile(2, 2, 5, 0)),
    (KINDS[2], (3, 18), 17, 1, Tile(2, 1, 7, 0)),
    (KINDS[0], (4, 18), 17, 1, Tile(4, 1, 9, 0)),
    (KINDS[1], (4, 16), 17, 1, Tile(8, 1, 8, 0)),
    (KINDS[2], (4, 22), 17, 1, Tile(2, 1, 11, 0)),
    (KINDS[3], (4, 10), 17, 1, Tile(2, 5, 1, 0)),
    (KINDS[0], (3, 8), 17, 1, Tile(2, 3, 1, 0)),
    (KINDS[1], (4, 8), 17, 1, Tile(4, 4, 1, 0)),
)

plan_tile = functools.partial(planner_with, tap_columns.plan_tap_columns)


def cases() -> dict[str, dict[str, Any]]:
    """Return the fields of each case by name."""
    found = {}
    for index in range(32):
        choose = random.Random(index)
        (dtype, precision), rank = KINDS[index % 4], 1 + index // 4 % 3
        kernel, stride, dilation = (
            tuple(choose.randint(1, top) for _ in range(rank)) for top in (LARGEST_KERNEL[rank], 3, 3)
        )
        dilation = tuple(min(d, s + 1) for d, s in zip(dilation, stride, strict=True))  # larger ones are refused
        if set(kernel) == {1}:
            kernel = (*kernel[:-1], 2)
        c_in, c_out = choose.choice((16, 17, 24, 33, 40, 66)), choose.choice((1, 2, 3, 4))
        x, out = SIDES[index // 4 % 4]
        shift = min(choose.randrange(stride[-1]), dilation[-1] * (kernel[-1] - 1))
        sides = LAST if x else NOT_LAST, LAST if out else NOT_LAST[:-1]  # a result is not broadcast
        spec = Specialisation(kernel, stride, dilation, c_in, c_out, *sides, None, (*(None,) * (rank - 1), shift))
        fields = {
            "precision": precision,
            "device": choose.choice([device for arch, device in DEVICES.items() if arch >= 80]),
            "plan": plan_with(choose.randrange(1000)),
            "index64": choose.random() < 0.2,
        }
        found[f"{index}-{precision or dtype}-{rank}d"] = {"spec": spec, "dtype": dtype, **fields}
    for (dtype, precision), kernel, c_in, c_out, tile in RARE:
        spec = Specialisation(kernel, (1, 1), (1, 1), c_in, c_out, NOT_LAST, NOT_LAST[:1], None, (None, 0))
        fields = {"precision": precision, "plan": plan_tile(tile)}
        name = f"{tile.warps_m}x{tile.warps_n}x{tile.tiles_n}-{tile.k_blocks}"
        found[name] = {"spec": spec, "dtype": dtype, **fields}
    # Rows of eight results, as a store of 16 bytes takes them, and with a stride those that padding shifts.
    stores = (
        ("row-of-8", "float16", (9,), (8,), (3,), 1, NOT_LAST),
        ("last-8", "float16", (2, 2), (1, 2), (None, 1), 4, LAST),
        *((f"pairs-{dtype}", dtype, (4,), (2,), (0,), 1, NOT_LAST) for dtype in ("bfloat16", "float32")),
        *((f"last-4-{dtype}", dtype, (3,), (2,), (0,), 2, LAST) for dtype in ("bfloat16", "float32")),
    )
    for name, dtype, kernel, stride, shifts, c_out, side in stores:
        spec = Specialisation(kernel, stride, (1,) * len(kernel), 24, c_out, side, side[:-1] or LAST, None, shifts)
        precision = "tf32" if dtype == "float32" else None
        found[name] = {"spec": spec, "dtype": dtype, "precision": precision}
    return found


def plan_with(number: int) -> Callable[..., Plan]:
    """Return a planner that takes one of a problem's tiles, whatever it costs."""

    def plan(
        family: str, geometry: Geometry, dtype: str, layout: Layout, precision: str | None, device: Device
    ) -> Plan:
        g, _ = batch_as_axis(geometry, layout)
        every_tile = list(tap_columns.tiles(Work.of_problem(g, dtype, precision, device), device))
        tile = every_tile[number % len(every_tile)]
        return plan_tile(tile)(family, geometry, dtype, layout, precision, device)

    return plan


def box(plan: Plan) -> Ints:
    """Return what a block owns along D, H, W (in positions of x; one axis is the batch) and C_in (at a time)."""
    return (*problem_of(plan)["box"], 1, 16)
