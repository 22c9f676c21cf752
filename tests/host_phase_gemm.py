"""Cases of phase_gemm for the host, each of one program, and the edges of its tiles."""

from __future__ import annotations

import itertools
import random
from typing import Any

from described import DEVICES
from strategies import KINDS, NOT_LAST, SIDES, Ints, Specialisation

from cuconvt.geometry import Geometry
from cuconvt.plan import Device, Layout, Plan
from cuconvt.plan_phase_gemm import candidates

BUDGET = 0.2  # an mma of 32 threads takes longer than its products
LARGEST_KERNEL = {1: 9, 2: 4, 3: 3}
LONGEST = {1: (270,), 2: (10, 34), 3: (4, 9, 17)}  # just beyond one tile on every axis
# Dtype, kernel, channels of a group (in and out) and whether channels-last: tiles that small problems do not choose.
RARE_TILES = (
    ("float16", (1, 1, 1), 64, 96, True),
    ("float32", (3, 3), 17, 25, False),
    ("float16", (1,), 3, 48, False),
    ("float16", (1,), 64, 24, False),
    ("float16", (1, 1, 1), 3, 33, False),
    ("float32", (2, 1), 8, 12, True),
    ("bfloat16", (1, 3), 3, 5, True),
    ("bfloat16", (1, 1, 1), 8, 48, True),
    ("float16", (1, 1, 1), 3, 64, False),
)
# Kernel, stride and channels of a group (in and out): phases that may be channels.
ALIKE = (
    ((16,), (8,), 17, 1),
    ((4, 4), (2, 2), 9, 3),
    ((4, 2, 2), (2, 2, 2), 8, 1),
    ((9,), (3,), 3, 5),
    ((6, 4), (3, 4), 1, 2),
    ((1, 4, 6), (1, 2, 2), 2, 7),
    ((40,), (40,), 8, 2),
)
LAST = ("channels_last",)


def cases() -> dict[str, dict[str, Any]]:
    """Return the fields of each case by name."""
    found = {}
    for index in range(34 - len(RARE_TILES)):
        choose = random.Random(index)
        (dtype, precision), rank = KINDS[index % 4], 1 + index // 4 % 3
        kernel, stride, dilation = (
            tuple(choose.randint(1, top) for _ in range(rank)) for top in (LARGEST_KERNEL[rank], 3, 3)
        )
        stride = (*(min(s, 2) for s in stride[:-1]), stride[-1])  # each phase along D and H is blocks of its own
        c_in, c_out = choose.choice((1, 2, 3, 8, 9, 17)), choose.choice((1, 3, 5, 8, 12, 17, 25))
        x, out = SIDES[index // 4 % 4]
        spec = Specialisation(kernel, stride, dilation, c_in, c_out, layouts(x), layouts(out)[:-1] or LAST)
        fields = {
            "precision": precision,
            "device": choose.choice(list(DEVICES.values())),
            "first_w": choose.randrange(4),
        }
        fields["index64"] = choose.random() < 0.2
        found[f"{index}-{precision or dtype}-{rank}d"] = {"spec": spec, "dtype": dtype, **fields}
    for dtype, kernel, c_in, c_out, last in RARE_TILES:
        precision = "tf32x3" if dtype == "float32" else None
        once = (1,) * len(kernel)
        stride = (2,) * len(kernel) if precision else once
        spec = Specialisation(kernel, stride, once, c_in, c_out, layouts(last), layouts(last)[:-1] or LAST)
        found[f"{dtype}-{c_in}-to-{c_out}"] = {"spec": spec, "dtype": dtype, "precision": precision, "first_w": 0}
    for index, ((dtype, precision), (x, out)) in enumerate(itertools.product(KINDS, SIDES)):
        kernel, stride, c_in, c_out = ALIKE[index % len(ALIKE)]
        spec = Specialisation(kernel, stride, (1,) * len(kernel), c_in, c_out, layouts(x), layouts(out)[:-1] or LAST)
        fields = {
            "precision": precision,
            "first_w": index % 4,
            "plan": PhasesAsChannels(index),
            "index64": index % 5 == 0,
        }
        found[f"phases-as-channels-{index}"] = {"spec": spec, "dtype": dtype, **fields}
    return found


class PhasesAsChannels:
    """A planner that takes one of a problem's tiles with phases as channels, whatever it costs."""

    def __init__(self, number: int):
        self.number = number

    def __call__(
        self, family: str, geometry: Geometry, dtype: str, layout: Layout, precision: str | None, device: Device
    ) -> Plan:
        tiles = [
            plan for plan in candidates(geometry, dtype, layout, precision, device) if plan.tile.phases_as_channels
        ]
        return random.Random(self.number).choice(tiles)


def layouts(last: bool) -> tuple[str, ...]:
    return LAST if last else NOT_LAST


def box(defines: dict[str, int]) -> Ints:
    """Return what a block owns along D, H, W (in positions q of a phase), C_out, and C_in (at a time)."""
    rows_h, rows_w = (1, defines["ROWS"]) if defines["ROWS_ALONG_W"] else (defines["ROWS"], 1)
    width, channels = 8 * defines["WARPS_W"] * rows_w, 8 * defines["WARPS_C"] * defines["TILES_C"]
    chunk = 8 * defines["K_STEPS"] * (1 if defines["DTYPE"] == 2 else 2)
    return (defines["WARPS_D"], defines["WARPS_H"] * rows_h, width, channels, chunk)
