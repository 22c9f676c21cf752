"""Plans of the tensor-core kernel for weight gradients, ``kernels/weight_gradient_gemm.cu``."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import gcd, prod
from typing import Any

from cuconvt.geometry import Geometry
from cuconvt.plan import (
    DTYPE_CODES,
    MAX_GRID,
    PRECISION_CODES,
    Device,
    Ints,
    Layout,
    Plan,
    Refusal,
    alike,
    at_residue,
    axis_macros,
    refuse_steps,
    refuse_tensor_cores,
    round_up,
)
from cuconvt.plan import problem_parameters as parameters
from cuconvt.plan_copies import copied_bytes, copy_macros
from cuconvt.plan_correlate import reads_need_64_bits, staged_axis
from cuconvt.plan_correlate_gemm import PARTITIONS, REGISTERS, with_margin
from cuconvt.plan_search import of_tile, remembered

ROW = 8  # positions along W that stay together
MAX_TAPS_W = 8  # of a warp
MAX_SUMS = 144  # of a thread
MAX_WARPS = 8
MAX_BLOCKS = 16  # on a multiprocessor
# Channels of a row of x or y that a thread copies. The copies are unrolled, and the compiler for sm_100 and newer keeps
# the addresses of all of them: of 134 tiles with 48 and more 22 spilled, whatever else a thread held, of others none.
MAX_COPIED_CHANNELS_NEWER = 32

# Rates of a multiprocessor, per clock, that the cost estimate uses; measured on an H200, similar from sm_80 on.
MMA_CLOCKS = 1.5
SHARED_BYTES_A_CLOCK = 128
L2_BYTES_A_CLOCK = 24
ISSUE = 4
BOX_CLOCKS = 300  # a barrier, the addresses of a box and the first loads after it
TYPICAL_EXTENT = {1: 4096, 2: 128, 3: 48}  # of an axis, by rank
# The cost that is compared with other kernels', relative to that estimate. In TF32 rows with three axes, where windows
# are disjoint and of up to so many pairs of channels: of 6 layers. In 3xTF32, of any number of them and axes: of 70.
COMPARED_OF_DISJOINT, FEW_PAIRS = 1.4, 4096
# In 16 bits: channels-last, with one or two axes and with three (there, with few taps), of 52 layers; of that, where
# elements of x and y are copied one by one, of 12; and in rows where those of y are, or else of x, of 60.
COMPARED_OF_LAST, COMPARED_OF_VOLUMES_LAST, FEW_TAPS, OF_SINGLE_LAST = 1.7, 1.35, 27, 5.0
OF_SINGLE_Y, OF_SINGLE_X = 2.0, 1.3
OF_SINGLE_ROWS = 0.75  # of 16 bits in rows with one axis, without groups: of 19 layers


@dataclass(frozen=True)
class Tile:
    """The compile-time shape of a block; the fields are the macros of the kernel."""

    tiles_in: int
    warps_in: int
    tiles_out: int
    warps_out: int
    taps_h: int
    warps_h: int
    taps_w: int
    warps_k: int = 1
    box_h: int = 8
    rows_w: int = 1

    @property
    def warps_c(self) -> int:
        return self.warps_in * self.warps_out * self.warps_h

    @property
    def block(self) -> int:
        return 32 * self.warps_c * self.warps_k

    @property
    def channels_in(self) -> int:
        """Channels of x of a block, likewise of y below."""
        return 16 * self.tiles_in * self.warps_in

    @property
    def channels_out(self) -> int:
        return 8 * self.tiles_out * self.warps_out

    @property
    def tiles(self) -> int:
        """Products of a warp, over all taps."""
        return self.tiles_in * self.tiles_out * self.taps_h * self.taps_w

    @property
    def values(self) -> int:
        """Weights of a block."""
        return 4 * self.tiles * 32 * self.warps_c

    @property
    def positions(self) -> int:
        """Positions of a box."""
        return self.box_h * self.rows_w * ROW


def plan_weight_gradient_gemm(
    geometry: Geometry, dtype: str, layout: Layout, precision: str | None, device: Device
) -> Plan | Refusal:
    """Propose the tile with the least estimated time, or say why tensor cores do not serve."""
    from cuconvt.plan_weight_gradient import parts_of

    name = "weight_gradient_gemm"
    if reason := _refuse(geometry, dtype, precision, device):
        return Refusal(name, reason)
    g = geometry
    work = _Work(g, dtype, precision, layout, device)
    tile = choose_tile(*alike(g, layout), dtype, precision, device)
    if tile is None:
        return Refusal(name, f"no tile fits into {device.shared_bytes} bytes of shared memory")
    boxes = (g.x_extent[0], -(-g.x_extent[1] // tile.box_h), -(-g.x_extent[2] // (tile.rows_w * ROW)))
    tiles = work.tiles_of_weights(tile)
    if g.n * prod(boxes) >= 2**31 or tiles > MAX_GRID:
        return Refusal(name, f"{g.n * prod(boxes)} boxes or {tiles} tiles are more than it counts")
    parts = parts_of(g.n * prod(boxes), tiles, 4 * tile.values, device, work.blocks(tile), least_boxes=1)
    defines = (
        ("DTYPE", DTYPE_CODES[dtype]),
        ("PRECISION", PRECISION_CODES[precision]),
        *axis_macros(KERNEL=g.kernel, STRIDE=g.stride, DILATION=g.dilation),
        ("WARPS_IN", tile.warps_in),
        ("WARPS_OUT", tile.warps_out),
        ("WARPS_H", tile.warps_h),
        ("WARPS_K", tile.warps_k),
        ("TILES_IN", tile.tiles_in),
        ("TILES_OUT", tile.tiles_out),
        ("TAPS_H", tile.taps_h),
        ("TAPS_W", tile.taps_w),
        ("BOX_H", tile.box_h),
        ("ROWS_W", tile.rows_w),
        ("EARLY", work.early),
        ("X_CHANNELS_LAST", int(layout.x_channels_last)),
        ("Y_CHANNELS_LAST", int(layout.out_channels_last)),
        *(copy_macros(work.copy_bytes_x(), "X_COPY_BYTES") if layout.x_channels_last else {}).items(),
        *(copy_macros(work.copy_bytes_y(tile), "Y_COPY_BYTES") if layout.out_channels_last else {}).items(),
        ("INDEX64", int(reads_need_64_bits(g, layout, (1, tile.box_h, 2 * tile.rows_w * ROW)))),
        ("MIN_BLOCKS", work.blocks(tile)),
        ("SHARED_BYTES", 4 * work.shared_words(tile)),
    )
    return Plan(
        kernel=name,
        defines=defines,
        grid=tiles * parts,
        block=tile.block,
        shared_bytes=4 * work.shared_words(tile),
        problem=parameters(g, layout, (*boxes, parts), work.copy_bytes_x(), work.copy_bytes_y(tile)),
        cost=_compared(work, tile, precision) * work.clocks_a_position(tile) * g.n * prod(g.x_extent),
        workspace_bytes=4 * tiles * tile.values * parts if parts > 1 else 0,
        sums=tiles * tile.values if parts > 1 else 0,
    )


def _compared(work: _Work, tile: Tile, precision: str | None) -> float:
    g = work.geometry
    if work.per_word == 2:
        if work.y_last:
            are_single = work.copy_bytes_x() == work.copy_bytes_y(tile) == work.single
            of_volumes = COMPARED_OF_VOLUMES_LAST if g.taps <= FEW_TAPS else 1
            return (of_volumes if g.rank == 3 else COMPARED_OF_LAST) * (OF_SINGLE_LAST if are_single else 1)
        if work.x_last:
            return 1
        of_rows = OF_SINGLE_ROWS if g.rank == g.groups == 1 else 1
        if work.copy_bytes_y(tile) == work.single:
            return of_rows * OF_SINGLE_Y
        return of_rows * (OF_SINGLE_X if work.copy_bytes_x() == work.single else 1)
    if g.kernel != g.stride or work.y_last:
        return 1
    is_narrow = g.rank == 3 and g.c_in_per_group * g.c_out_per_group <= FEW_PAIRS
    is_split = precision == "tf32x3" and g.taps > 1 and not work.x_last
    return COMPARED_OF_DISJOINT if (precision == "tf32" and is_narrow) or is_split else 1


def _refuse(geometry: Geometry, dtype: str, precision: str | None, device: Device) -> str | None:
    if reason := refuse_tensor_cores(dtype, precision, device):
        return reason
    return refuse_steps(geometry)


class _Work:
    """The sizes that follow from a problem's compile-time parameters and a tile; the kernel computes the same ones."""

    def __init__(self, geometry: Geometry, dtype: str, precision: str | None, layout: Layout, device: Device):
        self.geometry, self.layout, self.device = geometry, layout, device
        self.per_word = 1 if dtype == "float32" else 2
        self.products = 3 if precision == "tf32x3" else 1
        self.single = 4 // self.per_word  # bytes of an element
        self.unit = 4 * self.per_word  # elements of a 16-byte copy
        self.gap_w = gcd(geometry.stride[2], geometry.dilation[2]) if geometry.kernel[2] > 1 else geometry.stride[2]
        self.x_last, self.y_last = layout.x_channels_last, layout.out_channels_last
        rows = not self.y_last and self.gap_w == 1
        self.early = -geometry.pad_before[2] % self.unit if rows else 0
        self.tile: Tile | None = None  # the last one whose sizes were asked for, and these: see `of_tile`
        self.sizes: dict[Any, Any] = {}

    def copy_bytes_x(self) -> int:
        """Bytes of x that may be copied at a time, at least an element; likewise of y below."""
        return self._copy_bytes(self.layout.x, self.layout.x_aligned, self.geometry.c_in_per_group, 1, 0)

    @of_tile
    def copy_bytes_y(self, tile: Tile) -> int:
        tap_step = 0 if tile.taps_w >= self.geometry.kernel[2] else tile.taps_w * self.geometry.dilation[2]
        gap = self.gap_w if tile.taps_w > 1 else self.geometry.stride[2]
        return self._copy_bytes(self.layout.out, self.layout.out_aligned, self.geometry.c_out_per_group, gap, tap_step)

    def _copy_bytes(self, strides: Ints, aligned: bool, channels: int, gap: int, tap_step: int) -> int:
        last = abs(strides[1]) == 1 and abs(strides[4]) != 1
        if last:
            return copied_bytes(strides, aligned, channels, self.geometry.groups, self.single) or self.single
        if not aligned or strides[4] != 1 or gap != 1:
            return self.single
        others = [*strides[:4], tap_step]
        return next((4 * n for n in (4, 1) if not any(s % (n * self.per_word) for s in others)), self.single)

    def tiles_of_weights(self, tile: Tile) -> int:
        g = self.geometry
        taps = g.kernel[0] * -(-g.kernel[1] // (tile.taps_h * tile.warps_h)) * -(-g.kernel[2] // tile.taps_w)
        return taps * -(-g.c_in_per_group // tile.channels_in) * -(-g.c_out_per_group // tile.channels_out) * g.groups

    @of_tile
    def staged_y(self, tile: Tile) -> tuple[int, int]:
        """Return the lines of the staged box of y and the elements of each."""
        g = self.geometry
        _, _, lines = staged_axis(tile.taps_h * tile.warps_h, g.stride[1], g.dilation[1], tile.box_h)
        step, _, width = staged_axis(tile.taps_w, g.stride[2], g.dilation[2], tile.rows_w * ROW)
        if self.y_last:
            return lines, round_up(width, step)
        return lines, round_up(self.early + width, self.unit)

    def x_words(self, tile: Tile) -> int:
        if self.x_last:
            return tile.positions * at_residue(tile.channels_in // self.per_word, 4, 8)
        load = 2 // self.per_word
        return tile.channels_in * at_residue(tile.positions // self.per_word, 4 * load, 8 * load)

    def y_words(self, tile: Tile) -> int:
        lines, width = self.staged_y(tile)
        if self.y_last:
            return lines * width * at_residue(tile.channels_out // self.per_word, 4, 8)
        load = self.y_load(tile)
        return tile.channels_out * at_residue(lines * width // self.per_word, 4 * load, 8 * load)

    def y_load(self, tile: Tile) -> int:
        """Words of a row of y that a lane reads at a time."""
        step = staged_axis(tile.taps_w, self.geometry.stride[2], self.geometry.dilation[2], 1)[0]
        return gcd(2 * step // self.per_word, 4)

    @of_tile
    def shared_words(self, tile: Tile) -> int:
        """Return the kernel's shared memory; it asserts the same number (SHARED) when it is compiled."""
        return max(2 * (self.x_words(tile) + self.y_words(tile)), (tile.warps_k - 1) * tile.values)

    @of_tile
    def registers(self, tile: Tile) -> int:
        """Estimate the registers of a thread, on the safe side: no tile that is chosen may spill."""
        count = 4 * tile.tiles
        if self.products == 3:
            count += 56 + 18 * tile.tiles_in + 3 * tile.taps_w
        elif self.per_word == 1:
            count += 48 + 3 * tile.tiles_in
        else:
            count += 60 + 6 * tile.tiles_in + (8 if self.y_last else 0)
        if tile.taps_w > 3:
            count += 12 * (tile.taps_h * tile.tiles_out - 1)
        return with_margin(count, self.device)

    def blocks(self, tile: Tile) -> int:
        """Blocks that a multiprocessor holds; each reserves 1 KB of shared memory on top of its own."""
        warps = tile.block // 32
        by_registers = REGISTERS // round_up(self.registers(tile), 8) * PARTITIONS // warps
        by_shared = (self.device.shared_bytes + 1024) // (4 * self.shared_words(tile) + 1024)
        return max(1, min(by_registers, by_shared, MAX_BLOCKS))

    def fits(self, tile: Tile) -> bool:
        warps = -(-tile.block // 32 // PARTITIONS)
        return (
            self.registers(tile) <= min(255, REGISTERS // warps)
            and 4 * self.shared_words(tile) <= self.device.shared_bytes
            and (self.device.compute_capability < 100 or self.copied_channels(tile) <= MAX_COPIED_CHANNELS_NEWER)
        )

    def copied_channels(self, tile: Tile) -> int:
        """Return how many channels of a row of x or y a thread copies, the larger number of both."""
        rows = []
        if not self.x_last:
            rows.append((tile.positions, tile.channels_in))
        if not self.y_last:
            rows.append((prod(self.staged_y(tile)), tile.channels_out))
        return max((_share(elements // self.per_word, channels, tile.block) for elements, channels in rows), default=0)

    def clocks_a_position(self, tile: Tile) -> float:
        """Estimate the clocks of a multiprocessor for one position and all weights."""
        g = self.geometry
        steps = tile.positions / ROW / self.per_word * tile.warps_c  # of eight words along K, of all warps
        mma = steps * tile.tiles * self.products * MMA_CLOCKS
        words = 2 * tile.taps_w  # a lane needs along W, if it cannot share them
        if not self.y_last:
            step, hop, _ = staged_axis(tile.taps_w, g.stride[2], g.dilation[2], 1)
            load = self.y_load(tile)
            firsts = [tap * hop + more for tap in range(tile.taps_w) for more in (0, step)]
            words = load * len({(self.early + first) // self.per_word // load for first in firsts})
            words *= 1 if self.per_word == 1 else 2
        a_step = 4 * tile.tiles_in + tile.taps_h * tile.tiles_out * words
        loads = steps * a_step * 128 / SHARED_BYTES_A_CLOCK
        extra = self.products // 3 * (28 * tile.tiles_in + 7 * tile.taps_h * tile.tiles_out * words + 4 * tile.tiles)
        issue = steps * (tile.tiles * self.products + 0.7 * a_step + extra + 20) / ISSUE
        lines, width = self.staged_y(tile)
        elements = tile.channels_in * tile.positions + tile.channels_out * lines * width
        l2 = 4 / self.per_word * elements / L2_BYTES_A_CLOCK
        issue += self._staging_instructions(tile) / 32 / ISSUE
        blocks = self.blocks(tile)
        warps = blocks * tile.block // 32
        uneven = -(-warps // PARTITIONS) * PARTITIONS / warps
        mma, issue = mma * uneven, issue * uneven
        busiest = max(mma, loads, l2, issue)
        box = busiest + 0.25 * (mma + loads + l2 + issue - busiest) + BOX_CLOCKS / blocks
        if warps < 8:
            box *= 8 / warps
        box *= 1 + 0.5 / blocks**2 / max(1, tile.block // 128)  # a block alone has nobody to work while it waits
        shape = (1, tile.box_h, tile.rows_w * ROW)
        empty = prod(1 + extent / (2 * TYPICAL_EXTENT[g.rank]) for extent in shape[3 - g.rank :])
        return self.tiles_of_weights(tile) * empty * box / tile.positions

    def _staging_instructions(self, tile: Tile) -> float:
        lines, width = self.staged_y(tile)
        total = 0.0
        sides = (
            (self.copy_bytes_x(), self.x_last, tile.channels_in, tile.positions),
            (self.copy_bytes_y(tile), self.y_last, tile.channels_out, lines * width),
        )
        for copy_bytes, last, channels, positions in sides:
            copies = channels * positions * 4 / self.per_word / max(4, copy_bytes)
            total += copies * (20 if last else 5 if copy_bytes >= 4 else 12)
        return total


def _share(words: int, channels: int, threads: int) -> int:
    """Return how many channels a thread copies (share_of_channels of the kernel) of rows that have so many words."""
    groups = 1
    while channels % (2 * groups) == 0 and words * groups * 2 <= threads:
        groups *= 2
    return channels // groups


@remembered(Tile)
def choose_tile(geometry: Geometry, layout: Layout, dtype: str, precision: str | None, device: Device) -> Tile | None:
    """Choose the tile in two rounds: channels and taps with one box, and then the box."""
    work = _Work(geometry, dtype, precision, layout, device)
    boxes = {1: ((1, 8), (1, 16), (1, 32)), 2: ((8, 1), (4, 2), (8, 2), (4, 4)), 3: ((8, 1), (4, 2), (8, 2), (4, 4))}
    fitting = (tile for tile in _tiles(work) if work.fits(tile))
    best = min(fitting, key=work.clocks_a_position, default=None)
    if best is None:
        return None
    shapes = [replace(best, box_h=h, rows_w=w) for h, w in boxes[work.geometry.rank]]
    return min((tile for tile in (best, *shapes) if work.fits(tile)), key=work.clocks_a_position)


def _tiles(work: _Work) -> Iterator[Tile]:
    """Yield tiles. They depend on neither N nor extents, which therefore never recompile."""
    g = work.geometry
    pieces_w = -(-g.kernel[2] // MAX_TAPS_W)
    widths = {-(-g.kernel[2] // n) for n in (pieces_w, 2 * pieces_w) if n <= g.kernel[2]}
    box_h, rows_w = (1, 8) if g.rank == 1 else (8, 1)
    pieces_h = -(-g.kernel[1] // 8)
    height = -(-g.kernel[1] // pieces_h)
    heights = {(height // n, n) for n in range(1, height + 1) if height % n == 0} | {(1, 1)}
    for tiles_in, warps_in in _shares(-(-g.c_in_per_group // 16), 3 if work.products == 3 else 4, 4):
        for tiles_out, warps_out in _shares(-(-g.c_out_per_group // 8), 4, 8):
            for taps_w in sorted(widths):
                for taps_h, warps_h in sorted(heights):
                    warps_c = warps_in * warps_out * warps_h
                    if 4 * tiles_in * tiles_out * taps_h * taps_w > MAX_SUMS or warps_c > MAX_WARPS:
                        continue
                    of_warps = (tiles_in, warps_in, tiles_out, warps_out, taps_h, warps_h, taps_w)
                    for warps_k in {1, max(1, 4 // warps_c), max(1, MAX_WARPS // warps_c)}:
                        yield Tile(*of_warps, warps_k, box_h, rows_w)


def _shares(count: int, most: int, most_warps: int) -> Iterator[tuple[int, int]]:
    """Yield how many tiles a warp and how many warps take, of which few are idle."""
    for tiles, warps in itertools.product(range(1, min(most, count) + 1), (1, 2, 3, 4, 6, 8)):
        if warps <= most_warps and 3 * round_up(count, tiles * warps) <= 4 * count:
            yield tiles, warps
