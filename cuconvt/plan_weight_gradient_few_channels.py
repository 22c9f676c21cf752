"""Plans of the kernel for weight gradients with few channels per group, ``kernels/weight_gradient_few_channels.cu``.

As in `plan_weight_gradient`, x and y, which are read, are `x` and `out` of the `Layout`, and the gradient is `weight`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from math import hypot, prod

from cuconvt.geometry import Geometry
from cuconvt.plan import (
    DTYPE_CODES,
    MAX_GRID,
    Device,
    Layout,
    Plan,
    Refusal,
    axis_macros,
    problem_parameters,
    refuse_tensor_cores,
    round_up,
)
from cuconvt.plan_correlate import reads_need_64_bits
from cuconvt.plan_correlate_few_channels import refuse_channels
from cuconvt.plan_correlate_gemm import with_margin
from cuconvt.plan_few_channels import FEW
from cuconvt.plan_rows import BYTES_A_CLOCK, LANES, Step, spent_ahead, spent_on_window
from cuconvt.plan_slides import SlideTile, WorkOnSlides
from cuconvt.plan_views import batch_as_axis

THREADS = 128
WARPS = THREADS // LANES
MAX_SUMS = 80  # of a thread, in registers
MAX_REGISTERS = 192  # of a thread, by estimate
MAX_SHARED_BYTES = 48 * 1024
MAX_WORKSPACE_BYTES = 256 * 2**20
REGISTERS = 65536  # of a multiprocessor
WAVES = 4  # of blocks, at most
STEPS_AROUND = 8  # what a block takes to add up its sums, in steps along D
STEPS_OF_COLUMN = 2  # and to begin another column of positions
LEAST_PLANES = 4  # of a run along D, in those that a plane of y meets

CACHED_BYTES_A_CLOCK = 31  # from L2
# What the estimate is multiplied by beside other kernels', fitted to 1900 of their times. Of that, channels-last beside
# tensor cores; and in rows groups of three or four channels of both x and y.
COMPARED, OF_LAST, OF_SEVERAL = 0.57, 0.62, 1.8


@dataclass(frozen=True)
class Tile(SlideTile):
    """The compile-time shape of a thread's work; the fields are the macros of the kernel."""

    taps_h: int


def plan_weight_gradient_few_channels(
    geometry: Geometry, dtype: str, layout: Layout, precision: str | None, device: Device, tile: Tile | None = None
) -> Plan | Refusal:
    """Propose the cheapest tile, or a given one. It serves every precision, in float32 (float64 for float64)."""
    name = "weight_gradient_few_channels"
    if reason := refuse_channels(geometry):
        return Refusal(name, reason)
    geometry, layout = batch_as_axis(geometry, layout)
    g = geometry
    work = _Work(g, dtype, layout, device)
    tile = tile or min(work.tiles(), key=work.clocks_of_tile, default=None)
    if tile is None:
        return Refusal(name, "the taps of a row do not fit into the registers")
    is_shared = work.is_shared(tile)
    tiles_w = -(-g.x_extent[2] // (tile.shared_w if is_shared else tile.positions_w))
    columns = -(-g.x_extent[1] * tiles_w * tile.lanes_c // LANES) * g.n  # of positions, of a warp each
    tiles = work.tiles_of_weights(tile)
    if columns * g.x_extent[0] >= 2**31 or tiles > MAX_GRID or g.x_extent[1] * tiles_w >= 2**31 - THREADS:
        return Refusal(name, f"{columns} columns of positions or {tiles} tiles are more than it counts")
    runs, parts = work.cut(tile, columns)
    defines = (
        ("DTYPE", DTYPE_CODES[dtype]),
        *axis_macros(KERNEL=g.kernel, STRIDE=g.stride, DILATION=g.dilation),
        ("TAPS_H", tile.taps_h),
        ("POSITIONS_W", tile.positions_w),
        ("LANES_C", tile.lanes_c),
        ("SHARED_W", tile.shared_w),
        ("EARLY", work.row(tile, True).early),
        ("AHEAD", int(tile.ahead)),
        ("Y_STRIDE_W", work.y_stride_w),
        ("INDEX64", int(reads_need_64_bits(g, layout, (work.depth, 1, 32)))),
        ("MIN_BLOCKS", work.blocks(tile)),
    )
    beside_tensor_cores = refuse_tensor_cores(dtype, precision, device) is None
    compared = COMPARED
    if layout.out_channels_last:
        compared *= OF_LAST if beside_tensor_cores else 1
    elif min(g.c_in_per_group, g.c_out_per_group) > 2 and max(g.c_in_per_group, g.c_out_per_group) <= FEW:
        compared *= OF_SEVERAL
    return Plan(
        kernel=name,
        defines=defines,
        grid=tiles * parts,
        block=THREADS,
        shared_bytes=work.shared_bytes(tile),
        problem=problem_parameters(
            g,
            layout,
            (runs, g.x_extent[1], tiles_w, parts),
            out_vector=is_shared,
        ),
        cost=compared * work.clocks_of_tile(tile) * prod(g.x_extent) * g.n,
        workspace_bytes=work.tile_bytes(tile) * tiles * parts if parts > 1 else 0,
        sums=tiles * work.values(tile) if parts > 1 else 0,
        tile=tile,
    )


class _Work(WorkOnSlides[Tile]):
    """The sizes that follow from a problem's compile-time parameters and a tile; the kernel computes the same ones."""

    @property
    def pairs(self) -> int:
        """Pairs of channels."""
        return self.geometry.c_in * self.geometry.c_out_per_group

    def tiles(self) -> Iterator[Tile]:
        """Yield the best of the tiles that fit, for each number of rows of the kernel, with rows ahead and without.

        They depend on neither N nor extents, which therefore never recompile.
        """
        lanes = 1
        if (self.layout.x_channels_last or self.layout.out_channels_last) and self.pairs > 1:
            fits = [n for n in (32, 16, 8, 4, 2) if n < 2 * self.pairs]
            lanes = min(fits, key=lambda n: (round_up(self.pairs, n), -n))
        all_taps = self.geometry.kernel[1]
        shares = {-(-all_taps // tiles) for tiles in (1, 2, 3, 4, all_taps)}
        for taps_h, ahead in itertools.product(sorted(shares, reverse=True), (True, False)):
            yield from self.with_positions(Tile(1, 0, lanes, ahead, taps_h))

    def fits(self, tile: Tile) -> bool:
        if not self.can_read(tile) or self.sums(tile) * self.words > MAX_SUMS:
            return False
        return self.registers(tile) <= MAX_REGISTERS and self.shared_bytes(tile) <= MAX_SHARED_BYTES

    def sums(self, tile: Tile) -> int:
        """Sums of a thread."""
        return self.geometry.kernel[0] * tile.taps_h * self.geometry.kernel[2]

    def values(self, tile: Tile) -> int:
        """Sums of a block."""
        return self.sums(tile) * tile.lanes_c

    def tile_bytes(self, tile: Tile) -> int:
        """Bytes of a block's sums."""
        return self.values(tile) * 4 * self.words

    def tiles_of_weights(self, tile: Tile) -> int:
        return -(-self.pairs // tile.lanes_c) * -(-self.geometry.kernel[1] // tile.taps_h)

    def shared_bytes(self, tile: Tile) -> int:
        return round_up(WARPS * self.tile_bytes(tile), 16)

    def registers(self, tile: Tile) -> int:
        """Estimate the registers of a thread."""
        held = self.planes if tile.ahead else 1
        most = 0
        for row in self.rows(tile):
            count = self.words * ((self.depth + 1) * row.positions + row.columns[0])
            count += spent_on_window(row, held * tile.taps_h)
            most = max(most, count + (spent_ahead(row, tile.taps_h) if tile.ahead else 0))
        others = 44 + 12 * (self.planes - 1) * (self.words - 1)
        return with_margin(most + self.words * self.sums(tile) + tile.taps_h + others, self.device)

    def blocks(self, tile: Tile) -> int:
        """Blocks that a multiprocessor holds; each reserves 1 KB of shared memory on top of its own."""
        by_registers = REGISTERS // (THREADS * round_up(self.registers(tile), 8))
        by_shared = (self.device.shared_bytes + 1024) // (self.shared_bytes(tile) + 1024)
        return max(1, min(8, by_registers, by_shared))

    def cut(self, tile: Tile, columns: int) -> tuple[int, int]:
        """Return into how many runs columns are cut along D, and into how many parts all of them are divided.

        The last of the blocks should end as early as may be. Each run reads some planes of its neighbour's.
        """
        planes, tiles = self.geometry.x_extent[0], self.tiles_of_weights(tile)
        held = self.blocks(tile) * self.device.multiprocessors
        affordable = MAX_WORKSPACE_BYTES // (tiles * self.tile_bytes(tile))
        most = max(1, min(-(-WAVES * held // tiles), affordable, MAX_GRID // tiles))

        def end(choice: tuple[int, int]) -> int:
            runs, parts = choice
            steps = -(-columns * runs // (parts * WARPS)) * (-(-planes // runs) + self.depth + STEPS_OF_COLUMN)
            return -(-parts * tiles // held) * (steps + STEPS_AROUND)

        whole = {-(-planes // -(-planes // runs)) for runs in (1, 2, 4, 8, 16, 32) if planes >= LEAST_PLANES * runs}
        choices = (
            (runs, parts)
            for runs in sorted(whole | {1})
            for parts in range(1, min(most, -(-columns * runs // WARPS)) + 1)
        )
        return min(choices, key=end)

    def clocks_a_position(self, tile: Tile, is_shared: bool) -> float:
        row = self.row(tile, is_shared)
        step = Step(
            products=self.sums(tile) * row.positions * self.words,
            rows=self.planes * tile.taps_h,
            weights=0,
            others=(5 + self.depth) * row.positions + 40,
            waits=1 if tile.ahead else self.planes,
        )
        clocks = step.clocks(row, self.blocks(tile), along_c=tile.lanes_c > 1, has_stride=not self.y_stride_w)
        tiles = self.tiles_of_weights(tile) * tile.lanes_c
        return hypot(clocks * tiles / row.positions, self.memory_clocks_a_position(tile))

    def memory_clocks_a_position(self, tile: Tile) -> float:
        """Return the clocks that a multiprocessor would take to move x and y of a position."""
        g = self.geometry
        once = (g.c_in + g.c_out * prod(g.stride)) * self.itemsize
        cached = self.tiles_of_weights(tile) * tile.lanes_c * (1 + prod(g.stride)) * self.itemsize
        return max(once / BYTES_A_CLOCK, cached / CACHED_BYTES_A_CLOCK)
