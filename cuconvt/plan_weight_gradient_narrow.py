"""Plans of ``kernels/weight_gradient_narrow.cu``, for weight gradients with few channels per group on tensor cores.

As in `plan_weight_gradient`, x and y, which are read, are `x` and `out` of the `Layout`, and the gradient is `weight`.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import exp, gcd, log, prod
from typing import NamedTuple

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
    at_residue,
    axis_macros,
    needs_64_bits,
    positions,
    problem_parameters,
    refuse_steps,
    refuse_tensor_cores,
)
from cuconvt.plan_boxes import even_extent
from cuconvt.plan_correlate_gemm import PARTITIONS, REGISTERS, with_margin
from cuconvt.plan_search import remembered
from cuconvt.plan_views import batch_as_depth

CHANNELS = 8  # of x and of y, of a block
MAX_WARPS = 12
STAGES = 2  # boxes in shared memory: larger ones take less time than more of them
MAX_SUMS = 128  # of a thread
MAX_HELD = 48  # registers of a thread for fragments of y
MAX_PRODUCTS = 320  # that are unrolled
MAX_STRIDE_W = 16
MAX_REACH_W = 32  # positions of x along W between those that the first and the last tap meet
MAX_WORKSPACE_BYTES = 256 * 2**20
BOXES = ((1, 2, 4), (1, 2, 4, 8), (2, 4, 8, 16, 64))  # cells along D and H, and chunks along W
OF_STAGE, OF_RUN = 32, 16  # bytes that describe one
SECTOR = 32

# Rates of a multiprocessor, per clock, that the cost estimate uses: fitted to 81 times of tiles on an H200, which it
# meets within 25% (standard deviation).
MMA_CLOCKS = 1.3
SHARED_BYTES_A_CLOCK = 128
L2_BYTES_A_CLOCK = 40
MEMORY_BYTES_A_CLOCK = 20
INSTRUCTIONS_A_CLOCK = 2.4
OVERLAP = 0.03  # what of the less busy units' time adds to the busiest one's
ALONE = 0.5  # what a block lacks that is alone on a multiprocessor
BOX_CLOCKS = 2500  # in which a block waits for a box
BOXES_AROUND = 3  # what a block takes before and after its boxes, in boxes
TYPICAL_EXTENTS = {1: (256, 4096), 2: (32, 128), 3: (32, 128)}  # in cells, by rank
MANY = 1000  # images
# What the estimate is more optimistic than those of the other kernels, by bytes of an element and products.
COMPARED = {(4, 3): 0.7, (4, 1): 0.8, (2, 1): 0.9}
OF_FEW_AXES = 0.8  # of that, with one axis, in TF32 also with two
OF_GROUPS = {(2, 1): 0.85, (2, 3): 0.85, (3, 1): 1.3}  # and for groups, by rank and products: of 46 layers and of 22


@dataclass(frozen=True)
class Tile:
    """The compile-time shape of a block; the fields are the macros of the kernel."""

    warps_d: int
    warps_h: int
    warps_k: int
    stagers: int
    cells_h: int
    stages: int
    min_blocks: int

    @property
    def warps_c(self) -> int:
        return self.warps_d * self.warps_h

    @property
    def block(self) -> int:
        return 32 * (self.warps_c * self.warps_k + self.stagers)


class Memory(NamedTuple):
    """How the rows of an array that a box holds lie in memory."""

    strides: Ints  # of channels, planes, rows, in elements
    rows_follow: bool  # without a gap


class Side(NamedTuple):
    """One array's box in shared memory, in elements; the kernel computes the same."""

    planes: int
    rows: int
    length: int  # of a run
    runs: int
    size: int

    @classmethod
    def of(cls, planes: int, rows: int, width: int, memory: Memory, unit: int, residue: int) -> Side:
        """Lay out rows of `width` elements; lanes read channels best that are `residue` words apart, modulo 32."""
        channels_apart, planes_apart, rows_apart = memory.strides
        row = rows_apart if memory.rows_follow else at_residue(width + unit, rows_apart, unit)
        length = (rows - 1) * row + width
        plane = at_residue(length + unit, planes_apart, unit)
        off = channels_apart % unit - (unit if channels_apart % unit > unit // 2 else 0)
        channel = at_residue(planes * plane, residue * unit // 4 + off, 8 * unit)
        runs = CHANNELS * planes * (1 if memory.rows_follow else rows)
        return cls(planes, rows, length if memory.rows_follow else width, runs, CHANNELS * channel + unit)


def plan_weight_gradient_narrow(
    geometry: Geometry, dtype: str, layout: Layout, precision: str | None, device: Device, tile: Tile | None = None
) -> Plan | Refusal:
    """Propose the tile with the least estimated time, or a given one, or say why the kernel does not serve."""
    name = "weight_gradient_narrow"
    if reason := _refuse(geometry, dtype, layout, precision, device):
        return Refusal(name, reason)
    geometry, layout = batch_as_depth(geometry, layout)
    g, work = geometry, Work.of(geometry, dtype, precision)
    found = choose_tile(work, device) if tile is None else (tile, work.typical_cost(tile, device) or 0.0)
    if found is None:
        return Refusal(name, f"no tile fits into the registers and {device.shared_bytes} bytes of shared memory")
    tile, cost = found
    tiles = g.groups * -(-g.c_in_per_group // CHANNELS) * -(-g.c_out_per_group // CHANNELS)
    box = work.best_box(tile, work.cells(g), g.n * tiles, work.memory(g, layout), device)
    if box is None:
        return Refusal(name, f"no box fits into {device.shared_bytes} bytes of shared memory")
    boxes = tuple(-(-cells // extent) for cells, extent in zip(work.cells(g), work.extent(box), strict=True))
    if g.n * prod(boxes) >= 2**31 - MAX_GRID // 4 or tiles > MAX_GRID:
        return Refusal(name, f"{g.n * prod(boxes)} boxes or {tiles} tiles are more than it counts")
    held = tile.min_blocks * device.multiprocessors
    affordable = MAX_WORKSPACE_BYTES // (tiles * 4 * work.values(tile))
    parts = max(1, min(-(-held // tiles) if tiles > held else held // tiles, affordable, g.n * prod(boxes)))
    defines = (
        ("DTYPE", DTYPE_CODES[dtype]),
        ("PRECISION", PRECISION_CODES[precision]),
        *axis_macros(KERNEL=g.kernel, STRIDE=g.stride, DILATION=g.dilation),
        ("SHIFT_W", work.shift_w),
        ("WARPS_D", tile.warps_d),
        ("WARPS_H", tile.warps_h),
        ("WARPS_K", tile.warps_k),
        ("STAGERS", tile.stagers),
        ("CELLS_H", tile.cells_h),
        ("STAGES", tile.stages),
        ("BULK", int(device.compute_capability >= 90)),
        ("INDEX64", int(needs_64_bits(g, layout, work.extent(box)))),
        ("MIN_BLOCKS", tile.min_blocks),
    )
    whole = layout.out_aligned and not any(stride % work.unit for stride in layout.out[:4])
    return Plan(
        kernel=name,
        defines=defines,
        grid=tiles * parts,
        block=tile.block,
        shared_bytes=work.shared_bytes(tile, box, work.cells(g), work.memory(g, layout)),
        problem=problem_parameters(
            g,
            layout,
            (*boxes, parts),
            False,
            whole,
            (*box, *(0,) * 8),
        ),
        cost=_compared(g, work) * cost * prod(g.x_extent) * g.n * tiles,
        workspace_bytes=4 * tiles * work.values(tile) * parts if parts > 1 else 0,
        sums=tiles * work.values(tile) if parts > 1 else 0,
        tile=tile,
    )


def _compared(g: Geometry, work: Work) -> float:
    few_axes = g.rank == 1 or (g.rank == 2 and (work.itemsize, work.products) == (4, 1))
    of_groups = OF_GROUPS.get((g.rank, work.products), 1) if g.groups > 1 else 1
    return COMPARED[work.itemsize, work.products] * (OF_FEW_AXES if few_axes else 1) * of_groups


def _refuse(geometry: Geometry, dtype: str, layout: Layout, precision: str | None, device: Device) -> str | None:
    if reason := refuse_tensor_cores(dtype, precision, device):
        return reason
    rows = ((layout.x[4], geometry.x_extent[2]), (layout.out[4], geometry.out_extent[2]))
    if any(stride != 1 and extent > 1 for stride, extent in rows):
        return "serves rows, whose positions along W are next to each other"
    if min(*layout.x, *layout.out) < 0:
        return "copies rows in the order in which they are in memory, and an axis runs backwards"
    if geometry.stride[2] > MAX_STRIDE_W:
        return f"serves strides of at most {MAX_STRIDE_W} along W, got {geometry.stride[2]}"
    return refuse_steps(geometry)


@dataclass(frozen=True)
class Work:
    """What a tile's choice depends on, everything but N and extents, and the sizes that follow; the kernel computes the
    same ones."""

    rank: int
    kernel: Ints
    stride: Ints
    dilation: Ints
    shift_w: int  # padding before along W, modulo the stride
    channels: tuple[int, int]  # of x and y, of a group
    itemsize: int
    products: int

    @classmethod
    def of(cls, geometry: Geometry, dtype: str, precision: str | None) -> Work:
        g = geometry
        return cls(
            g.rank,
            g.kernel,
            g.stride,
            g.dilation,
            g.pad_before[2] % g.stride[2],
            (min(g.c_in_per_group, CHANNELS), min(g.c_out_per_group, CHANNELS)),
            4 if dtype == "float32" else 2,
            3 if precision == "tf32x3" else 1,
        )

    @property
    def unit(self) -> int:
        """Elements of 16 bytes."""
        return 16 // self.itemsize

    @property
    def chunk(self) -> int:
        """Positions of a product."""
        return 2 * self.unit

    @functools.cached_property
    def gaps(self) -> tuple[int, int]:
        """Along D and H, of the rows of y of a cell every so many-th one is staged."""
        axes = zip(self.kernel[:2], self.stride[:2], self.dilation[:2], strict=True)
        d, h = (gcd(s, d) if k > 1 else s for k, s, d in axes)
        return d, h

    @functools.cached_property
    def rows(self) -> tuple[int, int]:
        """Rows of y of a cell that are staged, along D and H."""
        return self.stride[0] // self.gaps[0], self.stride[1] // self.gaps[1]

    @functools.cached_property
    def reach(self) -> tuple[int, int, int]:
        """How many cells the taps reach back."""
        d, h = ((k - 1) * d // s for k, s, d in zip(self.kernel[:2], self.stride[:2], self.dilation[:2], strict=True))
        last = ((self.kernel[2] - 1) * self.dilation[2] - self.shift_w) // self.stride[2]
        return d, h, last - (-self.shift_w // self.stride[2])

    @functools.cached_property
    def taps_of_phases(self) -> tuple[int, ...]:
        """Taps along W of each phase that has one."""
        phases = [(tap * self.dilation[2] - self.shift_w) % self.stride[2] for tap in range(self.kernel[2])]
        return tuple(phases.count(phase) for phase in sorted(set(phases)))

    @property
    def pairs(self) -> int:
        return sum(-(-taps // 2) for taps in self.taps_of_phases)

    def taps(self, tile: Tile) -> int:
        """Taps of a warp along D and H."""
        return self.kernel[0] // tile.warps_d * (self.kernel[1] // tile.warps_h)

    def rows_of_warp(self, tile: Tile) -> int:
        """Rows of y of a unit of a warp's work, CELLS_H cells."""
        rows_d = 1 if tile.warps_d > 1 else self.rows[0]
        return tile.cells_h * rows_d * (1 if tile.warps_h > 1 else self.rows[1])

    def sums(self, tile: Tile) -> int:
        """Sums of a thread."""
        return 4 * self.taps(tile) * self.pairs

    def values(self, tile: Tile) -> int:
        """Weights of a block."""
        return self.sums(tile) * 32 * tile.warps_c

    def held(self, tile: Tile) -> int:
        """Registers of a thread for fragments of y."""
        return self.rows_of_warp(tile) * len(self.taps_of_phases) * 2 * (2 if self.products == 3 else 1)

    def registers(self, tile: Tile) -> int:
        """Estimate the registers of a thread."""
        words_x = (self.unit // 2 + self.reach[2] + self.unit // 4) // (self.unit // 4)
        parts = 2 if self.products == 3 else 1
        return (
            self.sums(tile)
            + self.held(tile)
            + words_x
            + 4 * self.pairs * parts
            + 68
            + (20 + 8 * tile.cells_h) * (parts - 1)
        )

    def cells(self, geometry: Geometry) -> tuple[int, int, int]:
        """Return the cells along each axis."""
        g = geometry
        return positions(g, 0), positions(g, 1), -(-g.out_extent[2] // g.stride[2])

    def extent(self, box: Ints) -> tuple[int, int, int]:
        """Return the cells of a box, whose last entry counts chunks."""
        return box[0], box[1], box[2] * self.chunk

    def memory(self, geometry: Geometry, layout: Layout) -> tuple[Memory, Memory]:
        """Return how the rows of x and of y lie that a box holds."""
        x, y = layout.x, layout.out
        return (
            Memory(x[1:4], x[3] == geometry.x_extent[2]),
            Memory(
                (y[1], self.gaps[0] * y[2], self.gaps[1] * y[3]),
                self.gaps[1] == 1 and y[3] == geometry.out_extent[2],
            ),
        )

    @functools.cached_property
    def known_sides(self) -> dict[tuple[Ints, Ints, tuple[Memory, Memory]], tuple[Side, Side]]:
        """What `sides` returned before: all tiles have them in common."""
        return {}

    def sides(self, box: Ints, cells: Ints, memory: tuple[Memory, Memory]) -> tuple[Side, Side]:
        """Return the boxes of x and y."""
        arguments = box, cells, memory
        if arguments not in self.known_sides:
            self.known_sides[arguments] = self.sides_of(*arguments)
        return self.known_sides[arguments]

    def sides_of(self, box: Ints, cells: Ints, memory: tuple[Memory, Memory]) -> tuple[Side, Side]:
        more = 2 * (self.unit // 4 - 1)
        depth, height, width = self.extent(box)
        of_x, of_y = (Memory(m.strides, m.rows_follow and width >= cells[2]) for m in memory)
        step = 2 * self.stride[2]
        residue = 4 if step % 8 == 0 else 16 if step % 4 == 0 else step * 4 % 32
        x = (depth + self.reach[0], height + self.reach[1], width + self.reach[2] + more)
        y = (depth * self.rows[0], height * self.rows[1], self.stride[2] * width + more)
        return Side.of(*x, of_x, self.unit, 8), Side.of(*y, of_y, self.unit, residue)

    def shared_bytes(self, tile: Tile, box: Ints, cells: Ints, memory: tuple[Memory, Memory]) -> int:
        sides = self.sides(box, cells, memory)
        stages = tile.stages * sum(side.size for side in sides) * self.itemsize
        turned = 4 * (tile.warps_k - 1) * self.values(tile)  # where the stages were, once they are done with
        return tile.stages * OF_STAGE + max(stages + OF_RUN * sum(side.runs for side in sides), turned)

    def best_box(
        self, tile: Tile, cells: Ints, times: int, memory: tuple[Memory, Memory], device: Device
    ) -> tuple[int, int, int] | None:
        """Return the box with the least time for so many cells along D, H, W, so many times."""
        room = (device.shared_bytes + 1024) // tile.min_blocks - 1024
        held = device.multiprocessors * tile.min_blocks
        best: tuple[float, tuple[int, int, int]] | None = None
        extents = (cells[0], -(-cells[1] // tile.cells_h), -(-cells[2] // self.chunk))
        cuts = (
            sorted({even_extent(extent, most) for most in mosts}) for extent, mosts in zip(extents, BOXES, strict=True)
        )
        for depth, height, chunks in itertools.product(*cuts):
            box = (depth, height * tile.cells_h, chunks)
            if self.shared_bytes(tile, box, cells, memory) > room:
                continue
            count = times * prod(-(-e // b) for e, b in zip(cells, self.extent(box), strict=True))
            clocks = self.clocks(tile, box, cells) * (-(-count // held) + BOXES_AROUND)
            if best is None or clocks < best[0]:
                best = clocks, box
        return best and best[1]

    def typical_memory(self, cells: Ints) -> tuple[Memory, Memory]:
        """Return how the rows of contiguous arrays lie that have so many cells."""
        x, y = cells[2], self.stride[2] * cells[2] - 1
        return Memory((1, 1, x), True), Memory((1, 1, y), self.gaps[1] == 1)

    def typical_cost(self, tile: Tile, device: Device) -> float | None:
        """Return the clocks of a cell, as the geometric mean over typical extents, or None where no box fits."""
        logarithms = 0.0
        for typical in TYPICAL_EXTENTS[self.rank]:
            cells = tuple(typical if axis >= 3 - self.rank else 64 for axis in range(3))
            box = self.best_box(tile, cells, MANY, self.typical_memory(cells), device)
            if box is None:
                return None
            count = prod(-(-e // b) for e, b in zip(cells, self.extent(box), strict=True))
            logarithms += log(self.clocks(tile, box, cells) / tile.min_blocks * count / prod(cells))
        return exp(logarithms / len(TYPICAL_EXTENTS[self.rank]))

    def clocks(self, tile: Tile, box: Ints, cells: Ints) -> float:
        """Estimate the clocks of a multiprocessor for as many boxes as it has blocks."""
        blocks = tile.min_blocks
        depth, height, width = self.extent(box)
        units = -(-depth * height // tile.cells_h * box[2] // tile.warps_k) * tile.warps_k * tile.warps_c
        products = self.taps(tile) * self.pairs * tile.cells_h
        reach_d, reach_h = 0 if tile.warps_d > 1 else self.reach[0], 0 if tile.warps_h > 1 else self.reach[1]
        rows_x, rows_y = (reach_d + 1) * (reach_h + tile.cells_h), self.rows_of_warp(tile)
        words_x = (self.unit // 2 + self.reach[2] + self.unit // 4) // (self.unit // 4)
        words_y = 2 * self.stride[2] + self.unit // 4 - 1
        phases = len(self.taps_of_phases)
        if self.itemsize == 2:
            takes_x, takes_y = 4 * self.pairs, 2 * phases * min(3, (self.stride[2] + 1) / 2)
        else:
            rounding = 7 if self.products == 3 else 2
            takes_x, takes_y = 4 * self.pairs * rounding, 2 * phases * rounding
        unit = rows_x * (words_x + takes_x + 8) + rows_y * (words_y + takes_y + 8) + 20
        unit += products * (7 if self.products == 3 else 1)
        sides = side_x, side_y = self.sides(box, cells, self.typical_memory(cells))
        pieces = sum(side.runs * side.length / self.unit for side in sides)
        issue = (units * unit + sum(side.runs for side in sides) * 30) / INSTRUCTIONS_A_CLOCK
        mma = units * products * self.products * MMA_CLOCKS
        shared = units * (rows_x * words_x * 2 + rows_y * words_y * 1.3) + pieces * 16 / SHARED_BYTES_A_CLOCK
        row_y = width * self.stride[2] * self.itemsize + SECTOR
        row_x = (width + self.reach[2]) * self.itemsize + SECTOR
        bytes_y = self.channels[1] * side_y.planes * side_y.rows * row_y
        l2 = (bytes_y + self.channels[0] * side_x.planes * side_x.rows * row_x) / L2_BYTES_A_CLOCK
        once = self.channels[0] * depth * height * width * self.itemsize
        memory = (bytes_y + once) / MEMORY_BYTES_A_CLOCK
        times = (issue, mma, shared, l2, memory)
        busy = blocks * (max(times) + OVERLAP * (sum(times) - max(times)))
        return busy * (1 + ALONE / blocks) + BOX_CLOCKS


@remembered(Tile)
def choose_tile(work: Work, device: Device) -> tuple[Tile, float] | None:
    """Return the best tile for typical extents, with its clocks a cell."""
    work = replace(work)  # what it keeps goes with it
    costs = ((work.typical_cost(tile, device), tile) for tile in tiles(work, device))
    fitting = [(cost, tile) for cost, tile in costs if cost is not None]
    if not fitting:
        return None
    cost, tile = min(fitting, key=lambda pair: pair[0])
    return tile, cost


def tiles(work: Work, device: Device) -> Iterator[Tile]:
    """Yield the tiles that a problem may use. They depend on neither N nor extents, which therefore never recompile."""
    if work.reach[2] > MAX_REACH_W:
        return
    shares = itertools.product(sorted({1, work.kernel[0]}), sorted({1, work.kernel[1]}))
    for (warps_d, warps_h), workers, cells_h, blocks in itertools.product(shares, (4, 8), (1, 2, 4), (1, 2)):
        warps_k = max(1, workers // (warps_d * warps_h))
        tile = Tile(warps_d, warps_h, warps_k, 4 if blocks == 1 else 2, cells_h, STAGES, blocks)
        if tile.warps_c * warps_k > MAX_WARPS or work.sums(tile) > MAX_SUMS or work.held(tile) > MAX_HELD:
            continue
        if cells_h > (2 if work.products == 3 else 4) or (cells_h > 1 and work.kernel[1] == 1):
            continue
        if work.taps(tile) * work.pairs * cells_h > MAX_PRODUCTS:
            continue
        warps = -(-tile.block * blocks // 32 // PARTITIONS)
        if with_margin(work.registers(tile), device) <= min(255, REGISTERS // warps // 8 * 8):
            yield tile
