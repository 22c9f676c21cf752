"""Plans of the kernel for weight gradients with few channels per group, ``kernels/weight_gradient_few_channels.cu``.

As in `plan_weight_gradient`, x and y, which are read, are `x` and `out` of the `Layout`, and the gradient is `weight`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd, prod

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
from cuconvt.plan_few_channels import _batch_as_axis, _constant_stride
from cuconvt.plan_rows import Row, spent_ahead, spent_on_window, whole_pieces

THREADS = 128
WARPS = THREADS // 32
MAX_SUMS = 80  # of a thread, in registers
MAX_REGISTERS = 192  # of a thread, by estimate
MAX_SHARED_BYTES = 48 * 1024
MAX_WORKSPACE_BYTES = 256 * 2**20
REGISTERS = 65536  # of a multiprocessor
WAVES = 4  # of blocks, at most
STEPS_AROUND = 8  # what a block takes to add up its sums, in steps along D
LEAST_PLANES = 8  # of a run along D, in those that a plane of y meets

LANES = 128  # threads that a multiprocessor advances by an instruction a clock
BUSY = 2  # with so many blocks on a multiprocessor half of these clocks are used, with more of them more
BYTES_A_CLOCK = 18  # from memory
CACHED_BYTES_A_CLOCK = 40  # from L2
LATENCY = 800  # clocks until a load from memory arrives
COMPARED = 1.3  # what the estimate is more optimistic than those of the tensor cores' kernels, measured on an H200
OF_LAST = 0.62  # of that, channels-last beside these: of 11 layers


@dataclass(frozen=True)
class Tile:
    """The compile-time shape of a thread's work; the fields are the macros of the kernel."""

    taps_h: int
    positions_w: int
    lanes_c: int
    shared: bool  # whether neighbouring lanes share columns of y
    ahead: bool  # whether rows are fetched a step before they are needed


def plan_weight_gradient_few_channels(
    geometry: Geometry, dtype: str, layout: Layout, precision: str | None, device: Device, tile: Tile | None = None
) -> Plan | Refusal:
    """Propose the cheapest tile, or a given one. It serves every precision, in float32 (float64 for float64)."""
    name = "weight_gradient_few_channels"
    if reason := refuse_channels(geometry):
        return Refusal(name, reason)
    geometry, layout = _batch_as_axis(geometry, layout)
    g = geometry
    work = _Work(g, dtype, layout, device)
    tile = tile or min(work.tiles(), key=work.clocks_a_position, default=None)
    if tile is None:
        return Refusal(name, "the taps of a row do not fit into the registers")
    tiles_w = -(-g.x_extent[2] // tile.positions_w)
    columns = -(-g.x_extent[1] * tiles_w * tile.lanes_c // THREADS) * g.n
    tiles = work.tiles_of_weights(tile)
    if columns * g.x_extent[0] >= 2**31 or tiles > MAX_GRID or g.x_extent[1] * tiles_w >= 2**31 - THREADS:
        return Refusal(name, f"{columns} columns of positions or {tiles} tiles are more than it counts")
    runs, parts = work.cut(tile, columns)
    row = work.row(tile)
    defines = (
        ("DTYPE", DTYPE_CODES[dtype]),
        *axis_macros(KERNEL=g.kernel, STRIDE=g.stride, DILATION=g.dilation),
        ("TAPS_H", tile.taps_h),
        ("POSITIONS_W", tile.positions_w),
        ("LANES_C", tile.lanes_c),
        ("EARLY", row.early),
        ("AHEAD", int(tile.ahead)),
        ("Y_STRIDE_W", _constant_stride(layout.out, layout.out_channels_last, g.c_out)),
        ("INDEX64", int(reads_need_64_bits(g, layout, (work.depth, 1, 32)))),
        ("MIN_BLOCKS", work.blocks(tile)),
    )
    y_extents = (g.n, g.c_out, *g.out_extent)
    beside_tensor_cores = refuse_tensor_cores(dtype, precision, device) is None
    compared = COMPARED * (OF_LAST if layout.out_channels_last and beside_tensor_cores else 1)
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
            out_vector=whole_pieces(layout.out, y_extents, layout.out_aligned, row.piece),
        ),
        cost=compared * max(work.clocks_a_position(tile), work.memory_clocks_a_position(tile)) * prod(g.x_extent) * g.n,
        workspace_bytes=work.tile_bytes(tile) * tiles * parts if parts > 1 else 0,
        sums=tiles * work.values(tile) if parts > 1 else 0,
        tile=tile,
    )


class _Work:
    """The sizes that follow from a problem's compile-time parameters and a tile; the kernel computes the same ones."""

    def __init__(self, geometry: Geometry, dtype: str, layout: Layout, device: Device):
        g = geometry
        self.geometry, self.layout, self.device = g, layout, device
        self.itemsize = {"float64": 8, "float32": 4}.get(dtype, 2)
        self.words = 2 if dtype == "float64" else 1  # registers of an accumulator
        self.depth = (g.kernel[0] - 1) * g.dilation[0] // g.stride[0] + 1
        self.planes = min(g.kernel[0], g.stride[0] // gcd(g.stride[0], g.dilation[0]))  # of y that a step reads
        self.pairs = g.c_in * g.c_out_per_group  # of channels

    def tiles(self) -> Iterator[Tile]:
        """Yield the tiles that fit. They depend on neither N nor extents, which therefore never recompile."""
        lanes = 1
        if (self.layout.x_channels_last or self.layout.out_channels_last) and self.pairs > 1:
            fits = [n for n in (32, 16, 8, 4, 2) if n < 2 * self.pairs]
            lanes = min(fits, key=lambda n: (round_up(self.pairs, n), -n))
        all_taps = self.geometry.kernel[1]
        shares = {-(-all_taps // tiles) for tiles in (1, 2, 3, 4, all_taps)}
        for taps_h, positions_w in itertools.product(sorted(shares, reverse=True), (1, 2, 4, 8)):
            for shared, ahead in itertools.product((True, False), repeat=2):
                tile = Tile(taps_h, positions_w, lanes, shared, ahead)
                if (shared and (lanes > 1 or self.layout.out[4] != 1)) or self.sums(tile) * self.words > MAX_SUMS:
                    continue
                if not self.row(tile).is_possible or self.registers(tile) > MAX_REGISTERS:
                    continue
                if self.shared_bytes(tile) <= MAX_SHARED_BYTES:
                    yield tile

    def row(self, tile: Tile) -> Row:
        return Row.of(self.geometry, tile.positions_w, tile.shared, self.itemsize)

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
        row = self.row(tile)
        held = self.planes if tile.ahead else 1
        count = self.words * (self.sums(tile) + self.depth * tile.positions_w + tile.positions_w + row.columns[0])
        count += spent_on_window(row, held * tile.taps_h) + tile.taps_h + 44
        if tile.ahead:
            count += spent_ahead(row, tile.taps_h)
        return with_margin(count, self.device)

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
            steps = -(-columns * runs // parts) * (-(-planes // runs) + self.depth)
            return -(-parts * tiles // held) * (steps + STEPS_AROUND)

        whole = {-(-planes // -(-planes // runs)) for runs in (1, 2, 4, 8, 16) if planes >= LEAST_PLANES * runs}
        choices = ((runs, parts) for runs in sorted(whole | {1}) for parts in range(1, min(most, columns * runs) + 1))
        return min(choices, key=end)

    def clocks_a_position(self, tile: Tile) -> float:
        """Estimate the clocks of a multiprocessor for one position and all channels."""
        g, row = self.geometry, self.row(tile)
        rows = self.planes * tile.taps_h
        arithmetic = self.sums(tile) * tile.positions_w * self.words
        addresses = 0 if _constant_stride(self.layout.out, self.layout.out_channels_last, g.c_out) else 2
        step = arithmetic + rows * (row.instructions + addresses * row.columns[0])
        step += (5 + self.depth) * tile.positions_w + 40
        apart = 1 if tile.lanes_c > 1 else tile.positions_w * g.stride[2]  # elements, of the lanes of a warp
        l1 = rows * row.l1_clocks(apart) / 32
        waiting = max(step, LATENCY) if tile.ahead else step + self.planes * LATENCY
        blocks = self.blocks(tile)
        a_step = max(step * (1 + BUSY / blocks) / LANES, l1, waiting / blocks / LANES)
        return a_step * self.tiles_of_weights(tile) * tile.lanes_c / tile.positions_w

    def memory_clocks_a_position(self, tile: Tile) -> float:
        """Return the clocks that a multiprocessor would take to move x and y of a position."""
        g = self.geometry
        once = (g.c_in + g.c_out * prod(g.stride)) * self.itemsize
        cached = self.tiles_of_weights(tile) * tile.lanes_c * (1 + prod(g.stride)) * self.itemsize
        return max(once / BYTES_A_CLOCK, cached / CACHED_BYTES_A_CLOCK)
