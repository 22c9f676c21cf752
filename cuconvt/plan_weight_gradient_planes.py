"""Plans of the kernel for weight gradients of wide layers, ``kernels/weight_gradient_planes.cu``."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd, prod
from typing import NamedTuple

from cuconvt.geometry import Geometry
from cuconvt.plan import (
    DTYPE_CODES,
    MAX_GRID,
    Device,
    Ints,
    Layout,
    Plan,
    Refusal,
    axis_macros,
    problem_parameters,
    refuse_steps,
)
from cuconvt.plan_correlate import reads_need_64_bits, staged_axis
from cuconvt.plan_phase_wgmma import _batch_as_depth, _count
from cuconvt.plan_weight_gradient_boxes import (
    BESIDE_SUMS,
    FEW_PARTS,
    LARGEST_BOX,
    MAX_BYTES_OF_SUMS,
    MAX_FAR,
    MAX_PLACE,
    PIECE_BYTES,
    SECTOR,
    SHARED_BYTES_A_CLOCK,
    WAVES,
    WorkOnBoxes,
    shares,
)

ITEMSIZE = 2
MAX_TILES_N = 24  # times 8 columns of a product
LEAST_TILES_N = 4  # unless there are no more channels
MAX_TILES_M = 4
MAX_TAPS = 4, 4, 16  # of a tile along D, H, W
MAX_UNITS = 12  # of a worker
MAX_IDLE = 1.3  # units, relative to those of use
BARRIER_BYTES, BLOCK_BYTES = 128, 192  # what a block reserves, besides boxes and lists of items
WAVE = 0.08  # what one more than there must be adds to the time of a launch, relative to it
SUMS_OF_BLOCK = 128  # of each tap, that one of the second pass adds in the order of the weights
# Workers and stagers of a block, in warpgroups, and blocks on a multiprocessor.
KINDS = ((2, 1, 1), (2, 2, 1), (1, 1, 2), (3, 1, 1))
# With indices of 32 and of 64 bits: where pieces are copied alone, and where rows are turned.
STAGER_REGISTERS = (56, 64), (64, 80)
# Of a worker, besides sums; with fewer, products are serialised. The second where both operands vary from unit to unit.
OTHER_REGISTERS = 32, 40

# Rates of an H200's multiprocessor, per clock, that the cost estimate uses; fitted to sweeps.
LEAST_CLOCKS = 16  # of a product
L2_BYTES_A_CLOCK = 14
# Of stagers that turn rows, for as many as they load at once; by bytes of a load.
ROUND_CLOCKS = {16: 1300, 4: 2000, 2: 1500}
AT_ONCE = {16: 1, 4: 4, 2: 4}  # groups of eight rows
COPY_CLOCKS = 155  # of stagers that copy a piece each
OVERLAP = 0.23  # what of the less busy units' time adds to the busiest one's
BOX_CLOCKS = 500
MAX_RUNS = 32  # eights of positions of a box
BOXES_AROUND = 2  # what a block takes before and after its boxes, in boxes
# The cost that is compared with other kernels', relative to the estimated time, such that it is chosen where it took
# less time for eight problems: channels-last, in rows, which it did not win, and in rows of y whose elements are loaded
# one by one, of which others' estimates are too optimistic.
COMPARED, COMPARED_OF_ROWS, COMPARED_OF_SINGLES = 0.93, 1.25, 0.62


@dataclass(frozen=True)
class Tile:
    """The compile-time shape of a block; the fields are the macros of the kernel."""

    workers: int
    stager_groups: int
    rows_of_x: int  # whether rows of the product are channels of x
    tiles_m: int  # times 64 rows
    tiles_n: int  # times 8 columns
    taps: tuple[int, int, int]  # along D, H, W
    apart: tuple[int, int, int]  # neighbours of them
    min_blocks: int = 1

    @property
    def units(self) -> int:
        """Products of a worker, for two runs."""
        return -(-prod(self.taps) * self.tiles_m // self.workers)

    @property
    def channels_in(self) -> int:
        return 64 * self.tiles_m if self.rows_of_x else 8 * self.tiles_n

    @property
    def channels_out(self) -> int:
        return 8 * self.tiles_n if self.rows_of_x else 64 * self.tiles_m

    @property
    def sums(self) -> int:
        """Registers of a worker's thread that hold sums."""
        return self.units * 4 * self.tiles_n

    @property
    def values(self) -> int:
        """Weights of a block, and what its tile reaches beyond them."""
        return 128 * self.workers * self.sums

    @property
    def at_start(self) -> int:
        """Registers of a thread before warps exchange some."""
        return min(65536 // (128 * (self.workers + self.stager_groups) * self.min_blocks), 248) // 8 * 8

    def registers(self, stager: int) -> tuple[int, int]:
        """Registers of a worker's thread, and of a stager's, which needs so many: all that the block started with."""
        every = self.at_start * (self.workers + self.stager_groups)
        worker = min(240, (every - self.stager_groups * stager) // self.workers // 8 * 8)
        return worker, min(self.at_start, (every - self.workers * worker) // self.stager_groups // 8 * 8)


@dataclass(frozen=True)
class Shape:
    """What a tile's choice depends on: everything but N and extents."""

    rank: int
    kernel: Ints
    stride: Ints
    dilation: Ints
    groups: int
    c_in: int  # per group
    c_out: int
    x_last: bool  # whether pieces of x are copied as they are
    y_last: bool
    x_bytes: int  # that rows of x, or pieces, are loaded at a time
    y_bytes: int
    index64: bool

    @classmethod
    def of(cls, geometry: Geometry, layout: Layout, index64: bool) -> Shape:
        g = geometry
        x_last = _has_pieces(layout.x, layout.x_aligned, g.c_in_per_group)
        y_last = _has_pieces(layout.out, layout.out_aligned, g.c_out_per_group)
        return cls(
            rank=g.rank,
            kernel=g.kernel,
            stride=g.stride,
            dilation=g.dilation,
            groups=g.groups,
            c_in=g.c_in_per_group,
            c_out=g.c_out_per_group,
            x_last=x_last,
            y_last=y_last,
            x_bytes=16 if x_last else _row_bytes(layout.x, layout.x_aligned, g.x_extent[2]),
            y_bytes=16 if y_last else _row_bytes(layout.out, layout.out_aligned, g.out_extent[2]),
            index64=index64,
        )

    @property
    def stager_registers(self) -> int:
        return STAGER_REGISTERS[not (self.x_last and self.y_last)][self.index64]

    @property
    def stages(self) -> int:
        """Boxes in shared memory: copies are announced two boxes later."""
        return 4 if self.x_last or self.y_last else 3


def _has_pieces(strides: Ints, aligned: bool, channels: int) -> bool:
    """Whether eight channels of a position are 16 aligned bytes, for all of them and all positions."""
    numbers = channels, strides[0], *strides[2:]
    return strides[1] == 1 and strides[4] != 1 and aligned and not any(number % 8 for number in numbers)


def _row_bytes(strides: Ints, aligned: bool, extent: int) -> int:
    """Return how many bytes of a row may be read at a time."""
    if strides[4] != 1:
        return ITEMSIZE
    distances = [ITEMSIZE * number for number in (*strides[:4], extent)]
    return next((n for n in (16, 4) if aligned and not any(distance % n for distance in distances)), ITEMSIZE)


def plan_weight_gradient_planes(
    geometry: Geometry, dtype: str, layout: Layout, precision: str | None, device: Device, tile: Tile | None = None
) -> Plan | Refusal:
    """Propose the tile with the least estimated time, or a given one, or say why the kernel does not serve."""
    name = "weight_gradient_planes"
    if reason := _refuse(geometry, dtype, precision, device):
        return Refusal(name, reason)
    geometry, layout = _batch_as_depth(geometry, layout)
    index64 = reads_need_64_bits(geometry, layout, LARGEST_BOX)
    work = Work(Shape.of(geometry, layout, index64))
    if tile is None:
        tile = choose_tile(work.shape, device)
    cost = None if tile is None else work.typical_cost(tile, device)
    if tile is None or cost is None:
        return Refusal(name, f"no box with what its taps reach fits into {device.shared_bytes} bytes of shared memory")
    tiles = work.tiles_of_weights(tile)
    choice = work.best_box(tile, geometry, device) if tiles <= MAX_GRID else None
    if choice is None or geometry.n * _count(geometry.x_extent, choice[0]) >= 2**31:
        return Refusal(name, f"{tiles} tiles, or their boxes, are more than it counts")
    box, parts = choice
    boxes = tuple(-(-x // b) for x, b in zip(geometry.x_extent, box, strict=True))
    compared = COMPARED if work.shape.x_last and work.shape.y_last else COMPARED_OF_ROWS
    if work.shape.y_bytes == ITEMSIZE and layout.out[4] == 1:
        compared = COMPARED_OF_SINGLES
    of_worker, of_stager = tile.registers(work.shape.stager_registers)
    defines = (
        ("DTYPE", DTYPE_CODES[dtype]),
        *axis_macros(KERNEL=geometry.kernel, STRIDE=geometry.stride, DILATION=geometry.dilation),
        ("WORKERS", tile.workers),
        ("STAGER_GROUPS", tile.stager_groups),
        ("ROWS_OF_X", tile.rows_of_x),
        ("TILES_M", tile.tiles_m),
        ("TILES_N", tile.tiles_n),
        *axis_macros(TAPS=tile.taps, APART=tile.apart),
        ("X_CHANNELS_LAST", int(work.shape.x_last)),
        ("Y_CHANNELS_LAST", int(work.shape.y_last)),
        ("STAGES", work.shape.stages),
        ("INDEX64", int(index64)),
        ("MIN_BLOCKS", tile.min_blocks),
        ("WORKER_REGISTERS", of_worker),
        ("STAGER_REGISTERS", of_stager),
    )
    sums, sums_a_block = (tiles * tile.values, 0) if parts > 1 else (0, 0)
    if 1 < parts <= FEW_PARTS and work.adds_in_order:
        sums_a_block = SUMS_OF_BLOCK * prod(geometry.kernel)
        sums = work.tiles_of_channels(tile) * tile.tiles_m * 4 * tile.tiles_n * sums_a_block
    return Plan(
        kernel=name,
        defines=defines,
        grid=tiles * parts,
        block=128 * (tile.workers + tile.stager_groups),
        shared_bytes=work.stage(tile, box).shared_bytes(work.shape.stages, index64),
        problem=problem_parameters(
            geometry,
            layout,
            (*boxes, parts),
            work.shape.x_bytes,
            work.shape.y_bytes,
            (*box, 0, 0, 0, 0, 0, 0, 0, 0),
        ),
        cost=compared * cost * geometry.n * prod(geometry.x_extent),
        workspace_bytes=4 * tiles * tile.values * parts if parts > 1 else 0,
        sums=sums,
        sums_a_block=sums_a_block,
        tile=tile,
    )


def _refuse(geometry: Geometry, dtype: str, precision: str | None, device: Device) -> str | None:
    if device.compute_capability != 90:
        return f"needs compute capability 9.0, the device has {device.compute_capability / 10}"
    if dtype not in ("float16", "bfloat16"):
        return f"computes in float16 and bfloat16, not in {precision or dtype}"
    return refuse_steps(geometry)


class Stage(NamedTuple):
    """A box in shared memory; sizes in pieces of 16 bytes."""

    y_box: tuple[int, int, int]  # what the taps reach, along W of all planes
    x_group: int  # from eight channels to the next
    y_group: int
    pieces: int
    x_items: int  # what eight channels are loaded in
    y_items: int

    def shared_bytes(self, stages: int, index64: bool) -> int:
        lists = (self.x_items + self.y_items) * (32 if index64 else 16)
        return BARRIER_BYTES + BLOCK_BYTES + stages * PIECE_BYTES * self.pieces + lists


class Work(WorkOnBoxes[Tile]):
    """The sizes that follow from a problem and a tile; the kernel computes the same ones."""

    max_runs, boxes_around = MAX_RUNS, BOXES_AROUND

    def __init__(self, shape: Shape):
        self.shape, self.piece = shape, 8

    @property
    def adds_in_order(self) -> bool:
        """Whether a block of the second pass has room for all taps of its channels."""
        return 4 * SUMS_OF_BLOCK * (prod(self.shape.kernel) | 1) <= MAX_BYTES_OF_SUMS

    def staged(self, tile: Tile, axis: int, box: int) -> tuple[int, int, int]:
        """Return what `staged_axis` does for the taps of a tile."""
        return staged_axis(tile.taps[axis], self.shape.stride[axis], self.shape.dilation[axis] * tile.apart[axis], box)

    def tiles_of_channels(self, tile: Tile) -> int:
        s = self.shape
        return -(-s.c_out // tile.channels_out) * -(-s.c_in // tile.channels_in) * s.groups

    def tiles_of_weights(self, tile: Tile) -> int:
        taps = prod(
            min(apart, k) * _ceil_div(_ceil_div(k, apart), t)
            for k, t, apart in zip(self.shape.kernel, tile.taps, tile.apart, strict=True)
        )
        return taps * self.tiles_of_channels(tile)

    def planes(self, tile: Tile) -> tuple[int, int]:
        """Return how many planes a row of y has, and what each reaches beyond the positions of a box."""
        step, hop, _ = self.staged(tile, 2, 1)
        return min(tile.taps[2], step), (tile.taps[2] - 1) * hop // step

    def stage(self, tile: Tile, box: Ints) -> Stage:
        s = self.shape
        y_d, y_h = (self.staged(tile, axis, box[axis])[2] for axis in (0, 1))
        planes, reach = self.planes(tile)
        y_row = planes * (box[2] + reach)
        x_group, y_group = prod(box) | 1, y_d * y_h * y_row | 1
        x_positions, y_positions = (
            1 if last else n // ITEMSIZE for last, n in ((s.x_last, s.x_bytes), (s.y_last, s.y_bytes))
        )
        y_items = y_row
        if y_positions > 1:
            y_items = -(-(y_positions - 1 + self.elements(tile, box[2])) // y_positions)
        return Stage(
            (y_d, y_h, y_row),
            x_group,
            y_group,
            pieces=tile.channels_in // 8 * x_group + tile.channels_out // 8 * y_group,
            x_items=prod(box) // x_positions,
            y_items=y_d * y_h * y_items,
        )

    def elements(self, tile: Tile, box_w: int) -> int:
        """Return how many elements of a row of y lie from the first one of use to the last one."""
        stride, dilation = self.shape.stride[2], self.shape.dilation[2] * tile.apart[2]
        gap = gcd(stride, dilation) if tile.taps[2] > 1 else stride
        return (self.staged(tile, 2, box_w)[2] - 1) * gap + 1

    def fits(self, tile: Tile, box: Ints, device: Device) -> bool:
        """Whether as many blocks as the tile wants share a multiprocessor; each reserves 1 KB on top of its own."""
        room = (device.shared_bytes + 1024) // tile.min_blocks - 1024
        stages = self.shape.stages
        # y takes no less than its channels at as many positions.
        if (tile.channels_in + tile.channels_out) * prod(box) * ITEMSIZE * stages > room:
            return False
        stage, strides = self.stage(tile, box), self.shape.stride
        far = max(stage.y_box[0] * strides[0], stage.y_box[1] * strides[1])
        return far <= MAX_FAR and stage.y_group <= MAX_PLACE and stage.shared_bytes(stages, True) <= room

    def tiles_with_idle(self, tile: Tile, device: Device) -> float:
        """Return how many tiles of weights there are, with those that idle multiprocessors had time for."""
        tiles, held = self.tiles_of_weights(tile), tile.min_blocks * device.multiprocessors
        least = -(-tiles // held)  # waves
        waves = range(least, max(WAVES, least) + 1)
        return min((1 + WAVE * (n - least)) * n * held / (n * held // tiles) for n in waves)

    def least_cost(self, tile: Tile, device: Device) -> float:
        """Return a lower bound of a position's clocks: those of the products, and of what is fetched without a halo."""
        s, of_y = self.shape, 1.0
        for axis in range(3):
            step, hop, _ = self.staged(tile, axis, 1)
            of_y *= min(step, (tile.taps[axis] - 1) * hop + 1)
        fetched = ITEMSIZE * (min(tile.channels_in, s.c_in) + min(tile.channels_out, s.c_out) * of_y)
        tensor, shared = (clocks / 16 for clocks in self.step_clocks(tile))
        return max(tensor, shared, fetched / L2_BYTES_A_CLOCK) * self.tiles_with_idle(tile, device)

    def step_clocks(self, tile: Tile) -> tuple[float, float]:
        """Estimate the clocks of all workers for two runs: tensor cores, shared memory."""
        units = tile.workers * tile.units
        return units * max(4 * tile.tiles_n, LEAST_CLOCKS), units * (16 + 2 * tile.tiles_n)

    def clocks(self, tile: Tile, box: Ints) -> float:
        """Estimate a multiprocessor's clocks for one box."""
        s, stage, steps = self.shape, self.stage(tile, box), prod(box) // 16
        tensor, shared = (steps * clocks for clocks in self.step_clocks(tile))
        rows_of_y = prod(stage.y_box[:2])
        gathered = {
            True: PIECE_BYTES / 8 * stage.y_group,
            False: rows_of_y * (ITEMSIZE * self.elements(tile, box[2]) + SECTOR / 2),
        }
        x_channels, y_channels = min(tile.channels_in, s.c_in), min(tile.channels_out, s.c_out)
        x_fetched, y_fetched = x_channels * ITEMSIZE * prod(box), y_channels * gathered[s.y_last]
        l2 = (x_fetched + y_fetched) / L2_BYTES_A_CLOCK
        shared += ITEMSIZE * (x_channels * stage.x_group + y_channels * stage.y_group) / SHARED_BYTES_A_CLOCK
        fetch = 0.0
        for items, channels, of_tile, last, size in (
            (stage.x_items, x_channels, tile.channels_in, s.x_last, s.x_bytes),
            (stage.y_items, y_channels, tile.channels_out, s.y_last, s.y_bytes),
        ):
            # Threads whose channels do not exist wait for the others, unless no thread of a round has any.
            groups = of_tile // 8 if last or size == PIECE_BYTES else _ceil_div(channels, 8)
            threads = 128 * tile.stager_groups
            if last:
                fetch += items * groups / threads * COPY_CLOCKS
            else:
                fetch += _ceil_div(items * _ceil_div(groups, AT_ONCE[size]), threads) * ROUND_CLOCKS[size]
        fetch /= tile.min_blocks
        busiest = max(tensor, shared, fetch, l2)
        return busiest + OVERLAP * (tensor + shared + l2 + fetch - busiest) + BOX_CLOCKS / tile.min_blocks


@functools.lru_cache(maxsize=1024)
def choose_tile(shape: Shape, device: Device) -> Tile | None:
    """Return the best tile for typical extents."""
    work = Work(shape)
    return work.best_tile(tiles(work), device)


def tiles(work: Work) -> Iterator[Tile]:
    """Yield the tiles that a problem may use. They depend on neither N nor extents, which therefore never recompile."""
    s = work.shape
    axes = [_taps_of(*axis) for axis in zip(s.kernel, s.stride, s.dilation, MAX_TAPS, strict=True)]
    for rows_of_x in (0, 1):
        rows, columns = (s.c_in, s.c_out) if rows_of_x else (s.c_out, s.c_in)
        for tiles_m, tiles_n in itertools.product(
            shares(-(-rows // 64), MAX_TILES_M), shares(-(-columns // 8), MAX_TILES_N)
        ):
            if tiles_n < min(LEAST_TILES_N, -(-columns // 8)):
                continue
            for chosen in itertools.product(*axes):
                taps, apart = zip(*chosen, strict=True)
                for workers, stager_groups, blocks in KINDS:
                    tile = Tile(workers, stager_groups, rows_of_x, tiles_m, tiles_n, taps, apart, blocks)
                    if is_possible(tile, s):
                        yield tile


def is_possible(tile: Tile, shape: Shape) -> bool:
    """Whether a tile's workers have registers for its sums, and few of them nothing to do."""
    idle = tile.workers * tile.units > MAX_IDLE * prod(tile.taps) * tile.tiles_m
    registers, _ = tile.registers(shape.stager_registers)
    return (
        not idle
        and tile.units <= MAX_UNITS
        and tile.sums + OTHER_REGISTERS[tile.rows_of_x and tile.tiles_m > 1] <= registers
        and 4 * tile.tiles_n + BESIDE_SUMS <= tile.at_start
        and shape.stager_registers <= tile.at_start <= registers
    )


def _taps_of(kernel: int, stride: int, dilation: int, most: int) -> list[tuple[int, int]]:
    """Return the taps of a tile along an axis, with how far they are apart: neighbours, or those of a phase."""
    found = [(share, 1) for share in shares(kernel, most)]
    step = stride // gcd(stride, dilation)
    if 1 < step < kernel:
        found += [(share, step) for share in shares(-(-kernel // step), most) if share > 1]
    return found


def _ceil_div(count: int, share: int) -> int:
    return -(-count // share)
