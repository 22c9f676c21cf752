"""What launches of the kernels have in common whose sizes are those of `cuconvt.plan_wgmma_sizes`."""

from __future__ import annotations

from collections.abc import Mapping
from math import gcd

from cuconvt.geometry import Geometry
from cuconvt.plan import DTYPE_CODES, PRECISION_CODES, Layout, axis_macros
from cuconvt.plan_copies import channels_stored
from cuconvt.plan_wgmma_sizes import Tile


def wgmma_defines(
    geometry: Geometry,
    dtype: str,
    layout: Layout,
    precision: str | None,
    tile: Tile,
    own: Mapping[str, int],
    registers: tuple[int, int],
) -> tuple[tuple[str, int], ...]:
    """Return the macros of a kernel for Hopper: those that the kernels share, and its own ones."""
    itemsize = 4 if dtype == "float32" else 2
    return (
        ("DTYPE", DTYPE_CODES[dtype]),
        ("PRECISION", PRECISION_CODES[precision]),
        *axis_macros(KERNEL=geometry.kernel, STRIDE=geometry.stride, DILATION=geometry.dilation),
        ("WORKERS", tile.workers),
        ("STAGER_GROUPS", tile.stagers),
        ("TILES_M", tile.tiles_m),
        ("TILES_C", tile.tiles_c),
        ("MERGE_W", int(tile.merge_w)),
        ("K_STEPS", tile.k_steps),
        ("X_STAGES", tile.x_stages),
        ("RING", tile.ring),
        ("RESIDENT", int(tile.resident)),
        ("TAKE_TURNS", int(tile.take_turns)),
        *((name, int(value)) for name, value in own.items()),
        ("X_CHANNELS_LAST", int(layout.x_channels_last)),
        ("OUT_CHANNELS_LAST", int(layout.out_channels_last)),
        ("OUT_VECTOR", channels_stored(geometry, layout, itemsize)),
        ("MIN_BLOCKS", tile.min_blocks),
        ("WORKER_REGISTERS", registers[0]),
        ("STAGER_REGISTERS", registers[1]),
    )


def grid_of(blocks: int, resident: int, phases: int, weights: int) -> int:
    """Return how many blocks to launch, each of which takes one box after the other.

    Each should meet all phases in turn, since they differ in work, but always the same weights if they stay.
    """
    if blocks <= resident:
        return blocks
    times = max(1, resident // weights)
    return weights * next(grid for grid in range(times, 0, -1) if gcd(grid, phases) == 1)
