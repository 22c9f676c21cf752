"""Plans of the kernel for correlations with few channels per group, ``kernels/correlate_few_channels.cu``."""

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
    refuse_steps,
    refuse_tensor_cores,
    round_up,
)
from cuconvt.plan_copies import are_loose, whole_pieces
from cuconvt.plan_correlate import reads_need_64_bits
from cuconvt.plan_correlate_gemm import with_margin
from cuconvt.plan_few_channels import FEW, THREADS, runs_along_d, threads_of_block
from cuconvt.plan_rows import BYTES_A_CLOCK, Step, spent_ahead, spent_on_window
from cuconvt.plan_slides import SlideTile, WorkOnSlides
from cuconvt.plan_views import batch_as_axis

MAX_REGISTERS = 192  # of a thread, by estimate
MAX_WEIGHTS_IN_REGISTERS = 72
MAX_SHARED_BYTES = 48 * 1024
REGISTERS = 65536  # of a multiprocessor

# What the estimate is multiplied by beside other kernels', fitted to 1900 of their times: for one channel of y a group,
# for some and for many. Of that: one channel without groups, its result in rows, beside tensor cores; some channels
# of groups, channels-last; many of groups, channels-last, which no 16-byte pieces hold; and many in rows, not beside
# tensor cores.
COMPARED, COMPARED_OF_SOME, COMPARED_OF_MANY = 0.65, 1.15, 2.1
OF_SINGLE, OF_SOME_LAST, OF_MANY_LAST, OF_MANY_ROWS = 0.62, 0.45, 0.4, 0.5


@dataclass(frozen=True)
class Tile(SlideTile):
    """The compile-time shape of a thread's work; the fields are the macros of the kernel."""

    hold_weights: bool  # whether a thread's weights stay in registers


def plan_correlate_few_channels(
    geometry: Geometry, dtype: str, layout: Layout, precision: str | None, device: Device, tile: Tile | None = None
) -> Plan | Refusal:
    """Propose the cheapest tile, or a given one. It serves every precision, in float32 (float64 for float64)."""
    name = "correlate_few_channels"
    if reason := refuse_channels(geometry):
        return Refusal(name, reason)
    geometry, layout = batch_as_axis(geometry, layout)
    g = geometry
    work = _Work(g, dtype, layout, device)
    tile = tile or min(work.tiles(), key=work.clocks_of_tile, default=None)
    if tile is None:
        return Refusal(name, "the taps of a step do not fit into the registers")
    if work.shared_bytes(tile) > MAX_SHARED_BYTES:
        return Refusal(name, f"the weights of a block take more than {MAX_SHARED_BYTES} bytes of shared memory")
    is_shared = work.is_shared(tile)
    positions_w = tile.shared_w if is_shared else tile.positions_w
    tiles_w = -(-g.x_extent[2] // positions_w)
    tiles_c = -(-g.c_in // tile.lanes_c)
    threads = threads_of_block(g.x_extent[1] * tiles_w * tile.lanes_c)
    blocks = -(-g.x_extent[1] * tiles_w * tile.lanes_c // threads) * tiles_c * g.n
    resident = work.blocks(tile)
    runs = runs_along_d(g.x_extent[0], work.depth, blocks * threads, resident * THREADS * device.multiprocessors)
    if blocks * runs > MAX_GRID or g.x_extent[1] * tiles_w >= 2**31 - THREADS:
        return Refusal(name, f"{blocks * runs} blocks are more than a launch takes ({MAX_GRID})")
    defines = (
        ("DTYPE", DTYPE_CODES[dtype]),
        *axis_macros(KERNEL=g.kernel, STRIDE=g.stride, DILATION=g.dilation),
        ("POSITIONS_W", tile.positions_w),
        ("LANES_C", tile.lanes_c),
        ("SHARED_W", tile.shared_w),
        ("EARLY", work.row(tile, True).early),
        ("AHEAD", int(tile.ahead)),
        ("HOLD_WEIGHTS", int(tile.hold_weights)),
        ("Y_STRIDE_W", work.y_stride_w),
        ("INDEX64", int(reads_need_64_bits(g, layout, (work.depth, 1, 32)))),
        ("MIN_BLOCKS", resident),
    )
    return Plan(
        kernel=name,
        defines=defines,
        grid=blocks * runs,
        block=threads,
        shared_bytes=work.shared_bytes(tile),
        problem=problem_parameters(
            g,
            layout,
            (runs, g.x_extent[1], tiles_w, tiles_c),
            whole_pieces(layout.x, (g.n, g.c_in, *g.x_extent), layout.x_aligned, positions_w),
            is_shared,
        ),
        cost=work.compared(refuse_tensor_cores(dtype, precision, device) is None)
        * work.clocks_of_tile(tile)
        * prod(g.x_extent)
        * g.n,
        tile=tile,
    )


def refuse_channels(geometry: Geometry) -> str | None:
    """Return why a problem is not one of few channels, if it is none."""
    if min(geometry.c_in_per_group, geometry.c_out_per_group) > FEW:
        return f"serves at most {FEW} channels of x or of y a group"
    return refuse_steps(geometry)


class _Work(WorkOnSlides[Tile]):
    """The sizes that follow from a problem's compile-time parameters and a tile; the kernel computes the same ones."""

    def tiles(self) -> Iterator[Tile]:
        """Yield the best of the tiles that fit, for each way to hold what they need.

        They depend on neither N nor extents, which therefore never recompile.
        """
        channels = self.geometry.c_in
        lanes = 1
        if self.layout.x_channels_last and channels > 1:
            lanes = min((n for n in (32, 16, 8, 4, 2) if n < 2 * channels), key=lambda n: (round_up(channels, n), -n))
        may_hold = self.geometry.c_out_per_group == 1 and self.geometry.taps * self.words <= MAX_WEIGHTS_IN_REGISTERS
        for ahead, hold_weights in itertools.product((True, False), (True, False) if may_hold else (False,)):
            yield from self.with_positions(Tile(1, 0, lanes, ahead, hold_weights))

    def fits(self, tile: Tile) -> bool:
        fits_a_store = all(p == 1 or p * self.itemsize <= 16 for p in (tile.positions_w, tile.shared_w))
        return fits_a_store and self.can_read(tile) and self.registers(tile) <= MAX_REGISTERS

    def registers(self, tile: Tile) -> int:
        """Estimate the registers of a thread."""
        g = self.geometry
        held = self.planes if tile.ahead else 1
        most = 0
        for row in self.rows(tile):
            count = self.words * (self.depth * row.positions + row.columns[0])
            count += spent_on_window(row, held * g.kernel[1])
            most = max(most, count + (spent_ahead(row, g.kernel[1]) if tile.ahead else 0))
        # Weights that are not held are loaded ahead of their use; of very many, the compiler loads many so.
        loaded = min(g.taps // 4, 32) + max(0, g.taps - 144) // 2
        weights = self.words * (g.taps if tile.hold_weights else loaded)
        return with_margin(most + g.kernel[1] + 44 + weights, self.device)

    def blocks(self, tile: Tile) -> int:
        """Blocks that a multiprocessor holds."""
        return max(1, min(8, REGISTERS // (THREADS * round_up(self.registers(tile), 8))))

    def shared_bytes(self, tile: Tile) -> int:
        lanes = tile.lanes_c + 1 if tile.lanes_c > 1 else 1
        return round_up(self.geometry.c_out_per_group * self.geometry.taps * lanes * 4 * self.words, 16)

    def clocks_a_position(self, tile: Tile, is_shared: bool) -> float:
        g, row = self.geometry, self.row(tile, is_shared)
        rows = self.planes * g.kernel[1] * g.c_out_per_group
        step = Step(
            products=g.taps * g.c_out_per_group * row.positions * self.words,
            rows=rows,
            weights=0 if tile.hold_weights else g.taps * g.c_out_per_group * self.words / 4,
            others=4 * row.positions + 40,
            waits=g.c_out_per_group * (1 if tile.ahead else self.planes),
        )
        clocks = step.clocks(row, self.blocks(tile), along_c=tile.lanes_c > 1, has_stride=not self.y_stride_w)
        return hypot(clocks * g.c_in / row.positions, self.memory_clocks_a_position())

    def compared(self, beside_tensor_cores: bool) -> float:
        """Return what the estimate is multiplied by for comparison with other kernels."""
        channels, last = self.geometry.c_out_per_group, self.layout.out_channels_last
        if channels == 1:
            in_single_rows = self.geometry.groups == 1 and not self.layout.x_channels_last
            return COMPARED * (OF_SINGLE if in_single_rows and beside_tensor_cores else 1)
        if channels <= FEW:
            return COMPARED_OF_SOME * (OF_SOME_LAST if last and self.geometry.groups > 1 else 1)
        if last and self.geometry.groups > 1 and are_loose(channels, self.itemsize):
            return COMPARED_OF_MANY * OF_MANY_LAST
        return COMPARED_OF_MANY * (1 if beside_tensor_cores or last else OF_MANY_ROWS)

    def memory_clocks_a_position(self) -> float:
        """Return the clocks that a multiprocessor would take to move y and the result of a position."""
        g = self.geometry
        return (g.c_in + g.c_out * prod(g.stride)) * self.itemsize / BYTES_A_CLOCK
