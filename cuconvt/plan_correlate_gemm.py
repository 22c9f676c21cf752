"""Plans of the tensor-core kernel for correlations, ``kernels/correlate_gemm.cu``."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod

from cuconvt.geometry import Geometry
from cuconvt.plan import (
    DTYPE_CODES,
    MAX_GRID,
    PRECISION_CODES,
    Device,
    Layout,
    Plan,
    Refusal,
    at_residue,
    axis_macros,
    problem_parameters,
    refuse_steps,
    refuse_tensor_cores,
    round_up,
)
from cuconvt.plan_copies import copied_bytes, copy_macros
from cuconvt.plan_correlate import reads_need_64_bits, staged_axis

ROW = 8  # positions along W that stay together
MAX_TAPS_W = 32  # unrolled
MAX_TAPS_H = 7  # whose weights a thread holds at a time
PARTITIONS = 4  # of a multiprocessor; a warp belongs to one of them
REGISTERS = 512  # of a lane of a partition, for all its warps
# Compilers for other architectures than the one that the estimates were fitted on (9) take more registers: percent.
REGISTERS_BY_ARCHITECTURE = {8: 120, 9: 100}
REGISTERS_ELSEWHERE = 130

# Rates of a multiprocessor, per clock, that the cost estimate uses; measured on an H200, similar from sm_80 on.
MMA_CLOCKS = 1.5
SHARED_BYTES_A_CLOCK = 128
L2_BYTES_A_CLOCK = 24
ISSUE = 4
TYPICAL_EXTENT = {1: 4096, 2: 128, 3: 48}  # of an axis, by rank
STEP_CLOCKS = 150  # a barrier and the first loads after it
# How much longer than estimated 16 bits take where y is read one element at a time, by the mean of 32 problems, and
# relative to all others (1 to 5.9). Only what is compared with other kernels is multiplied.
SINGLE_ELEMENTS = 2.2
# Beside Hopper's kernels, whose boxes suit few positions better than this one's blocks, which may be too few.
BESIDE_WGMMA = 1.15


@dataclass(frozen=True)
class Tile:
    """The compile-time shape of a block; the fields are the macros of the kernel."""

    warps: tuple[int, int, int]  # along D, H, W
    warps_c: int
    rows: int
    rows_along_w: bool
    tiles_c: int
    k_steps: int

    @property
    def block(self) -> int:
        return 32 * prod(self.warps) * self.warps_c

    @property
    def box(self) -> tuple[int, int, int]:
        """Positions of a block along D, H, W."""
        d, h, w = self.warps
        return (d, h, w * ROW * self.rows) if self.rows_along_w else (d, h * self.rows, w * ROW)

    @property
    def box_c(self) -> int:
        return self.warps_c * self.tiles_c * 8


def plan_correlate_gemm(
    geometry: Geometry, dtype: str, layout: Layout, precision: str | None, device: Device
) -> Plan | Refusal:
    """Propose the tile with the least estimated time, or say why tensor cores do not serve."""
    if reason := _refuse(geometry, dtype, precision, device):
        return Refusal("correlate_gemm", reason)
    g = geometry
    work = _Work(g, dtype, precision, layout, device)
    tile = min(_tiles(work), key=work.clocks_a_position, default=None)
    if tile is None:
        return Refusal(
            "correlate_gemm", f"no tile fits into {device.shared_bytes} bytes of shared memory and the registers"
        )
    tiles_d, tiles_h, tiles_w = (-(-g.x_extent[a] // tile.box[a]) for a in range(3))
    tiles_c = -(-g.c_in_per_group // tile.box_c)
    grid = tiles_d * tiles_h * tiles_w * tiles_c * g.groups * g.n
    if grid > MAX_GRID:
        return Refusal("correlate_gemm", f"{grid} blocks are more than a launch takes ({MAX_GRID})")
    shared = 4 * work.shared_words(tile)
    defines = (
        ("DTYPE", DTYPE_CODES[dtype]),
        ("PRECISION", PRECISION_CODES[precision]),
        *axis_macros(KERNEL=g.kernel, STRIDE=g.stride, DILATION=g.dilation, WARPS=tile.warps),
        ("WARPS_C", tile.warps_c),
        ("ROWS", tile.rows),
        ("ROWS_ALONG_W", int(tile.rows_along_w)),
        ("TILES_C", tile.tiles_c),
        ("K_STEPS", tile.k_steps),
        ("EARLY", work.early),
        ("Y_CHANNELS_LAST", int(layout.out_channels_last)),
        ("OUT_CHANNELS_LAST", int(layout.x_channels_last)),
        *copy_macros(work.copied_bytes).items(),
        ("INDEX64", int(reads_need_64_bits(g, layout, tile.box))),
        ("MIN_BLOCKS", work.blocks(tile)),
        ("SHARED_BYTES", shared),
    )
    chunks = -(-g.c_out_per_group // work.chunk(tile))
    longer = SINGLE_ELEMENTS if work.itemsize == 2 and not work.channels_last else 1.0
    if refuse_tensor_cores(dtype, precision, device, wgmma=True) is None:
        longer *= BESIDE_WGMMA
    return Plan(
        kernel="correlate_gemm",
        defines=defines,
        grid=grid,
        block=tile.block,
        shared_bytes=shared,
        problem=problem_parameters(
            g, layout, (tiles_d, tiles_h, tiles_w, tiles_c), work.result_by_pairs(), work.copied_bytes > 0
        ),
        cost=longer * work.clocks_a_position(tile) * prod(g.x_extent) * g.groups * g.n,
        packed_words=g.groups * tiles_c * g.kernel[0] * chunks * work.weight_words(tile),
        packed_a_thread=work.fragment,
    )


def with_margin(registers: int, device: Device) -> int:
    """Return a register estimate as it holds for the compiler of a device's architecture."""
    return registers * REGISTERS_BY_ARCHITECTURE.get(device.compute_capability // 10, REGISTERS_ELSEWHERE) // 100


def _refuse(geometry: Geometry, dtype: str, precision: str | None, device: Device) -> str | None:
    if reason := refuse_tensor_cores(dtype, precision, device):
        return reason
    if reason := refuse_steps(geometry):
        return reason
    if geometry.kernel[2] > MAX_TAPS_W or geometry.kernel[1] > MAX_TAPS_H:
        return f"unrolls at most {MAX_TAPS_H} x {MAX_TAPS_W} taps along H and W, got {geometry.kernel[1:]}"
    return None


class _Work:
    """The sizes that follow from a problem's compile-time parameters and a tile; the kernel computes the same ones."""

    def __init__(self, geometry: Geometry, dtype: str, precision: str | None, layout: Layout, device: Device):
        g = geometry
        self.geometry, self.layout, self.device = geometry, layout, device
        self.channels_last = layout.out_channels_last
        self.itemsize = 4 if dtype == "float32" else 2
        self.products = 3 if precision == "tf32x3" else 1
        self.fragment = 4 if self.products == 3 else 2
        self.step_h, self.hop_h, _ = staged_axis(g.kernel[1], g.stride[1], g.dilation[1], 1)
        self.step_w, _, _ = staged_axis(g.kernel[2], g.stride[2], g.dilation[2], 1)
        self.whole_rows = self.step_w == 1 and g.stride[2] == 1 and not self.channels_last
        self.early = -g.pad_before[2] % 4 if self.whole_rows else 0

    @cached_property
    def copied_bytes(self) -> int:
        """How many bytes of channels-last y may be copied at a time, or none; 16 of rows stand for four positions."""
        g, strides, aligned = self.geometry, self.layout.out, self.layout.out_aligned
        if self.channels_last:
            return copied_bytes(strides, aligned, g.c_out_per_group, g.groups, self.itemsize)
        whole = self.whole_rows and g.out_extent[2] % 4 == 0 and strides[4] == 1
        return 16 if aligned and whole and not any(stride % 4 for stride in strides[:4]) else 0

    def result_by_pairs(self) -> bool:
        """Whether two channels of a channels-last result may be written at a time."""
        strides = self.layout.x
        groups_aligned = self.geometry.groups == 1 or self.geometry.c_in_per_group % 2 == 0
        others = any(stride % 2 for axis, stride in enumerate(strides) if axis != 1)
        return self.layout.x_aligned and groups_aligned and strides[1] == 1 and not others

    def chunk(self, tile: Tile) -> int:
        """Channels of y of a step."""
        return 8 * tile.k_steps * (4 // self.itemsize)

    def weight_words(self, tile: Tile) -> int:
        """Packed weights of a step."""
        kernel = self.geometry.kernel
        return kernel[1] * tile.k_steps * kernel[2] * (tile.box_c // 8) * 32 * self.fragment

    def y_words(self, tile: Tile) -> int:
        g = self.geometry
        _, _, lines = staged_axis(g.kernel[1], g.stride[1], g.dilation[1], tile.box[1])
        _, _, width = staged_axis(g.kernel[2], g.stride[2], g.dilation[2], tile.box[2])
        if self.step_w > 1:
            width = round_up(width, self.step_w)
        elif not self.channels_last:
            width = round_up(width + self.early, 4)
        count, words = tile.box[0] * lines * width, 8 * tile.k_steps
        return count * (words + 4) if self.channels_last else words * at_residue(count, 8, 32)

    def shared_words(self, tile: Tile) -> int:
        """Return the kernel's shared memory; it asserts the same number (SHARED) when it is compiled."""
        return 2 * (self.y_words(tile) + self.weight_words(tile))

    def pairs(self, tile: Tile) -> int:
        """Pairs of lines of y that a warp's tiles meet, for one tap along W."""
        step = 1 if tile.rows_along_w else self.step_h
        taps = range(self.geometry.kernel[1])
        return len({m * step + tap * self.hop_h for m in range(tile.rows // 2) for tap in taps})

    def registers(self, tile: Tile) -> int:
        """Estimate the registers of a thread, on the safe side: no tile that is chosen may spill."""
        count = 2 * tile.rows * tile.tiles_c + self.fragment * self.geometry.kernel[1] * tile.tiles_c
        count += 56
        if self.products == 3:
            taps_h = self.geometry.kernel[1]
            count += 4 * tile.tiles_c + 12 * max(1, taps_h - 2) + (8 if tile.tiles_c > 3 else 0)
            count += 60 if tile.rows == 8 and tile.tiles_c * taps_h > 9 else 0
            count += 12 if tile.rows == 8 and self.step_h == 1 else 0  # taps meet the same lines of y, which are kept
        return with_margin(count, self.device)

    def blocks(self, tile: Tile) -> int:
        """Blocks that a multiprocessor holds; each reserves 1 KB of shared memory on top of its own."""
        by_registers = REGISTERS // round_up(self.registers(tile), 8) * PARTITIONS // (tile.block // 32)
        by_shared = (self.device.shared_bytes + 1024) // (4 * self.shared_words(tile) + 1024)
        return max(1, min(by_registers, by_shared, 1536 // tile.block))

    def fits(self, tile: Tile) -> bool:
        warps = -(-tile.block // 32 // PARTITIONS)
        return (
            self.registers(tile) <= min(255, REGISTERS // warps)
            and 4 * self.shared_words(tile) <= self.device.shared_bytes
        )

    def clocks_a_position(self, tile: Tile) -> float:
        """Estimate the clocks of a multiprocessor for one position and the channels of a group."""
        g = self.geometry
        warps = tile.block // 32
        deep = tile.k_steps * g.kernel[2]
        products = g.kernel[1] * tile.tiles_c * tile.rows / 2 * self.products
        mma = warps * deep * products * MMA_CLOCKS
        a_tap = 4 * self.pairs(tile) + g.kernel[1] * tile.tiles_c * self.fragment
        loads = warps * deep * a_tap * 128 / SHARED_BYTES_A_CLOCK
        staged = self.y_words(tile) + self.weight_words(tile)
        l2 = 4 * staged / L2_BYTES_A_CLOCK
        a_copy = max(1, self.copied_bytes // 4)  # words
        instructions = 20 if self.channels_last and a_copy > 1 else 5 if self.itemsize == 4 or self.copied_bytes else 10
        copies = self.y_words(tile) / a_copy * instructions + self.weight_words(tile)
        split = (28 * self.pairs(tile) + 2 * g.kernel[1] * tile.tiles_c * tile.rows) if self.products == 3 else 0
        issue = (copies / 32 + warps * deep * (products + 0.7 * a_tap + split)) / ISSUE
        blocks = self.blocks(tile)
        resident = blocks * warps
        uneven = -(-resident // PARTITIONS) * PARTITIONS / resident
        mma, issue = mma * uneven, issue * uneven
        busiest = max(mma, loads, l2, issue)
        step = busiest + 0.25 * (mma + loads + l2 + issue - busiest) + STEP_CLOCKS / blocks
        step *= 1 + 0.5 / blocks**2  # a block alone has nobody to work while it waits
        if resident < 8:
            step *= 8 / resident
        steps = -(-g.c_out_per_group // self.chunk(tile)) * g.kernel[0]
        stores = 2 * prod(tile.box) * tile.box_c * self.itemsize / L2_BYTES_A_CLOCK
        tiles_c = -(-g.c_in_per_group // tile.box_c)
        empty = prod(1 + box / (2 * TYPICAL_EXTENT[g.rank]) for box in tile.box[3 - g.rank :])
        return tiles_c * empty * (steps * step + stores) / prod(tile.box)


def _tiles(work: _Work) -> Iterator[Tile]:
    """Yield the tiles that fit. They depend on neither N nor extents, which therefore never recompile."""
    g = work.geometry
    warps = {
        1: [(1, 1, 4), (1, 1, 8)],
        2: [(1, 2, 2), (1, 1, 4), (1, 2, 1)],
        3: [(2, 1, 2), (4, 1, 1), (2, 2, 1), (1, 2, 2), (2, 1, 1)],
    }[g.rank]
    for shape, warps_c, rows, tiles_c, k_steps in itertools.product(warps, (1, 2), (8, 4, 2), range(1, 9), (1, 2, 4)):
        tile = Tile(shape, warps_c, rows, g.rank == 1, tiles_c, k_steps)
        if tile.box_c >= g.c_in_per_group + 8 and tile.tiles_c > 1:
            continue
        if k_steps > 1 and work.chunk(tile) >= 2 * g.c_out_per_group:
            continue
        if work.fits(tile):
            yield tile
