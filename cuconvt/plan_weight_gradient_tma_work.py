"""The sizes and the estimate of ``kernels/weight_gradient_tma.cu``."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from math import exp, inf, log, prod
from typing import Any, NamedTuple

from cuconvt.plan import MAX_GRID, Device, Ints, round_up
from cuconvt.plan_boxes import count_boxes
from cuconvt.plan_search import ROUNDINGS, of_tile
from cuconvt.plan_weight_gradient import SUM_THREADS
from cuconvt.plan_weight_gradient_boxes import BLOCKS_OF_SUMS, WorkOnBoxes
from cuconvt.plan_weight_gradient_tma_sides import ROW_BYTES, Sides, itemsize_of
from cuconvt.tensor_map import MAX_BOX, TensorMap, spans

ALIGNMENT = 1024  # of what copies bring
PLAIN_ROW = 128  # elements of prepared x in a row of its map
LEAST_STAGES, MAX_STAGES = 2, 8
COPIER_REGISTERS, MAX_REGISTERS = 24, 240  # of a thread
ROWS = {2: 64, 4: 16}  # of the product that have one tap, by bytes of an element
LARGEST_BOX = 512  # positions
MAX_BYTES_OF_SUMS = 40 * 1024  # from which a block of the second pass writes all taps of patches in their order, and
MOST_TOGETHER = 4  # how many it has, where they are not few
MAX_PRODUCTS = 4096  # of 16 positions, that a block adds up before it adds them to others in memory
# The same in 3xTF32 of rows that are no whole runs, and of fewer positions in all: what tensor cores cut off of a box's
# sums is a larger share of few of them than of many.
LARGEST_OF_SPLIT, FEW_POSITIONS = 32, 1000


class Rates(NamedTuple):
    """An H200's multiprocessor, in clocks and per clock, as the cost estimate has it."""

    row_clocks: float  # of a row that is copied, besides its bytes
    l2_bytes: float
    memory_bytes: float  # of arrays that are read once
    turned_bytes: float  # read and written
    written_bytes: float  # of sums
    read_bytes: float  # and by the second pass
    added_bytes: float  # the same in a launch of some size: all that it costs to have more sums
    few_stages: float  # what copies wait for products, of as much as they take, divided by the boxes they are ahead
    box_clocks: float
    overlap: float  # what of reading arrays once adds to all else, or the other way round
    boxes_around: float  # what a block takes before and after its boxes, in boxes


# By bytes of an element; fitted to 457 launches, 8% rms, and to 760; `added_bytes` to 329 small ones.
RATES = {
    2: Rates(1.4, 80, 26, 18, 61, 18, 8, 0.5, 180, 0.1, 0.65),
    4: Rates(1.17, 400, 19.7, 13.8, 200, 14.8, 10, 1.9, 400, 0.06, 0.3),
}
LEAST_CLOCKS = 16  # of a product of 16 bits
OF_ROWS = 12  # shared memory's, of a product's rows
LONE_CLOCKS = 14  # of a step, where one worker has a multiprocessor alone
# Of float32, with one part and two: clocks of a product's instructions, those from a product of a worker to the next
# one with few fragments and with more, and what bounds add to each other (a norm's exponent).
PRODUCT_CLOCKS, NEXT_CLOCKS, NORM = (29, 67), ((79, 57), (132, 132)), 6
COLUMNS_CLOCKS = 2.0  # of eight columns of a product
OF_LOADS, SHARED_CLOCKS = 16, 0.77  # shared memory's, of the loads of a product's rows; of each of its clocks
MANY_REGISTERS = 56  # of a worker besides its sums, with which it has more fragments
# The launches that tiles are chosen for, (N, D, H, W) by rank; for one and two axes D is the batch.
TYPICAL = {
    1: ((1, 16, 1, 256), (1, 16, 1, 4096)),
    2: ((1, 16, 16, 16), (1, 16, 64, 64), (1, 16, 128, 128)),
    3: ((64, 8, 8, 8), (1, 32, 32, 32), (1, 48, 48, 48), (1, 64, 64, 64)),
}
# The cost that is compared with other kernels', relative to the estimated time, which has the sums of launches that are
# not large, as theirs do not. Such that it is chosen where it took less time, in rows (turned) for most of 17 problems.
COMPARED, COMPARED_OF_TURNED = 0.85, 0.6
COMPARED_OF_FLOAT32 = ((0.64, 0.68), (0.72, 0.81))  # by whether y is turned, and parts; of 104 problems
COMPARED_OF_NARROW, NARROW = 1.3, 4096  # of that, with three axes and a stride, below so many pairs of channels
COMPARED_OF_DISJOINT = 2.0  # instead, in TF32, channels-last, where windows are disjoint, also of just so many
COMPARED_OF_GROUPS = 1.0  # the same in TF32
OF_PLANES = 0.8  # of that for float32, in TF32 with two axes, where y is turned: of 39 layers
# Of all that, where y is turned from rows that are not aligned, which other kernels read slowly, by parts of a number:
# of 95 problems on an H200.
COMPARED_OF_LOOSE = {0: 0.55, 1: 0.8, 2: 0.7}


@dataclass(frozen=True)
class Tile:
    """The compile-time shape of a block; the fields are the macros of the kernel."""

    workers: int
    rows_of_x: int  # whether rows of the product are channels of x
    tiles_m: int  # times as many rows as have one tap
    tiles_n: int  # times 8 columns
    taps: tuple[int, int, int]  # along D, H, W
    apart: tuple[int, int, int]  # neighbours of them
    min_blocks: int = 1
    fold: int = 1  # taps along W that are channels of y
    rows: int = 64  # that have one tap: 64, of float32 16

    @functools.cached_property
    def units(self) -> int:
        """Products of a worker, for a step."""
        return -(-prod(self.taps) * self.tiles_m * self.rows // (64 * self.workers))

    @property
    def channels_in(self) -> int:
        return self.rows * self.tiles_m if self.rows_of_x else 8 * self.tiles_n

    @property
    def channels_out(self) -> int:
        return 8 * self.tiles_n if self.rows_of_x else self.rows * self.tiles_m

    @functools.cached_property
    def groups(self) -> tuple[int, int]:
        """Of channels of x and y, rows of 128 bytes that are copied; x of float32 is prepared."""
        copied = ROW_BYTES // (2 if self.rows == ROWS[2] else 4)
        return -(-self.channels_in // copied), -(-self.channels_out // copied)

    @functools.cached_property
    def sums(self) -> int:
        """Registers of a worker's thread that hold sums."""
        return self.units * 4 * self.tiles_n

    @functools.cached_property
    def values(self) -> int:
        """Weights of a block, and what its tile reaches beyond them."""
        return 128 * self.workers * self.sums

    @property
    def at_start(self) -> int:
        """Registers of a thread before warps exchange some."""
        return min(65536 // (128 * (self.workers + 1) * self.min_blocks), MAX_REGISTERS) // 8 * 8

    @property
    def registers(self) -> int:
        """Registers of a worker's thread, of those that the block started with."""
        return min(MAX_REGISTERS, (self.at_start * (self.workers + 1) - COPIER_REGISTERS) // self.workers // 8 * 8)


@dataclass(frozen=True)
class Shape:
    """What a tile's choice depends on: everything but N and extents. Steps are those of y as it is copied."""

    rank: int
    kernel: Ints
    stride: Ints
    dilation: Ints
    groups: int
    c_in: int  # per group
    c_out: int
    x_turned: bool  # whether it is made channels-last before
    y_turned: bool
    fold: int = 1  # taps along W that are channels of y
    parts: int = 0  # of a number of float32, as the tensor cores take it: of x, one or two are prepared
    phases: int = 1  # of y that are channels, of each channel as many

    @property
    def itemsize(self) -> int:
        return itemsize_of(self.parts)

    @property
    def products(self) -> int:
        return 3 if self.parts == 2 else 1

    @classmethod
    def of(cls, sides: Sides) -> Shape:
        g = sides.geometry
        return cls(
            g.rank,
            g.kernel,
            g.stride,
            g.dilation,
            g.groups,
            g.c_in_per_group,
            g.c_out_per_group,
            sides.turn_x is not None,
            sides.turn_y is not None,
            sides.fold,
            sides.parts,
            sides.phases,
        )


@dataclass(frozen=True)
class Share:
    """How boxes of all tiles of weights are shared by blocks, as the kernel does."""

    tiles: int
    boxes: int
    of_block: int  # boxes of a block

    @functools.cached_property
    def whole(self) -> int:
        """Blocks that have a tile alone."""
        return self.boxes // self.of_block

    @functools.cached_property
    def rest(self) -> int:
        """Boxes of a tile that are left."""
        return self.boxes % self.of_block

    @functools.cached_property
    def blocks(self) -> int:
        return self.whole * self.tiles + -(-self.rest * self.tiles // self.of_block)

    @functools.cached_property
    def slots(self) -> int:
        return self.blocks + (self.tiles if self.rest else 0)

    @functools.cached_property
    def parts(self) -> int:
        """The most of a tile."""
        return self.whole + (2 if self.rest else 0)

    @functools.cached_property
    def parts_of_block(self) -> int:
        """The most of a block."""
        return 1 + min(self.tiles - 1, -(-(self.of_block - 1) // self.rest)) if self.rest else 1


@functools.lru_cache(maxsize=4096)
def share_of(tiles: int, boxes: int, of_block: int) -> Share:
    """Return the same one for the same numbers, which many tiles have."""
    return Share(tiles, boxes, of_block)


class Launch(NamedTuple):
    """A box of positions, how blocks share all boxes, and the time that it takes."""

    box: Ints
    share: Share
    clocks: float


class CopiedBox(NamedTuple):
    """A box of positions for some extents."""

    box: Ints
    boxes: int  # that the extents take
    positions: int
    of_y: int  # elements that the taps of a tile reach


class Copied(NamedTuple):
    """All boxes for some extents, and what none of them has less of: their number, and the sum of all of them."""

    boxes: list[CopiedBox]
    fewest: int
    positions: int
    of_y: int


class Work(WorkOnBoxes[Tile]):
    """The sizes that follow from a problem and a tile; the kernel computes the same ones."""

    piece, max_runs, boxes_around = 8, LARGEST_BOX // 8, 0

    def __init__(self, shape: Shape):
        self.shape, self.rates = shape, RATES[shape.itemsize]
        self.known_boxes: dict[tuple[Ints, Ints], Copied] = {}
        self.tile: Tile | None = None  # the last one whose sizes were asked for, and these: see `of_tile`
        self.sizes: dict[Any, Any] = {}

    def patches_together(self, tile: Tile, patches: int, device: Device) -> int:
        """Return of how many patches a block of the second pass has all taps; 0 where it has one tap.

        Several keep its warps busy where taps are few; more cost less each, if they are enough for all multiprocessors.
        """
        of_x, of_y = (16, 8) if tile.rows_of_x else (8, 16)
        taps = prod(self.shape.kernel)
        room = MAX_BYTES_OF_SUMS // (4 * of_x * (of_y * (taps | 1) + 4))  # as the kernel decides
        together = ceil_div(2 * SUM_THREADS // 32, taps) if taps < SUM_THREADS // 32 else 1
        if not room or ceil_div(patches, together) < device.multiprocessors // 2:
            return 0
        most = min(room, MOST_TOGETHER)
        while 2 * together <= most and ceil_div(patches, 2 * together) >= BLOCKS_OF_SUMS * device.multiprocessors:
            together *= 2
        return together

    def tiles_of_channels(self, tile: Tile) -> int:
        s = self.shape
        return -(-s.c_out // tile.channels_out) * -(-s.c_in // tile.channels_in) * s.groups

    @of_tile
    def tiles_of_weights(self, tile: Tile) -> int:
        taps = prod(
            min(apart, k) * ceil_div(ceil_div(k, apart), t)
            for k, t, apart in zip(self.shape.kernel, tile.taps, tile.apart, strict=True)
        )
        return taps * self.tiles_of_channels(tile)

    @of_tile
    def halo(self, tile: Tile) -> Ints:
        """Return how much wider than a box of positions is what the taps of a tile reach, in copied elements."""
        s = self.shape
        axes = zip(tile.taps, s.dilation, tile.apart, s.stride, strict=True)
        return tuple((taps - 1) * dilation * apart // stride for taps, dilation, apart, stride in axes)

    def y_box(self, tile: Tile, box: Ints) -> Ints:
        """Return what the taps of a tile reach from a box of positions, in elements that are copied."""
        d, h, w = self.halo(tile)
        return box[0] + d, box[1] + h, box[2] + w

    def stage_bytes(self, tile: Tile, box: Ints) -> int:
        return self.bytes_of(tile, prod(box), prod(self.y_box(tile, box)))

    def bytes_of(self, tile: Tile, positions: int, of_y: int) -> int:
        """Return the shared memory that so many positions take, whose taps reach so many of y."""
        groups_x, groups_y = tile.groups
        of_x = groups_x * ROW_BYTES * positions
        if self.shape.parts:
            of_x = round_up(self.prepared_bytes_of_box(tile, positions), ALIGNMENT)
        return of_x + groups_y * round_up(ROW_BYTES * of_y, ALIGNMENT)

    def prepared_bytes_of_box(self, tile: Tile, positions: int) -> int:
        """Return what so many positions of x take for a tile's channels: whole rows, as boxes have two runs or more."""
        return 4 * self.shape.parts * tile.channels_in * positions

    def prepared_tiles(self, tile: Tile) -> int:
        """Return how many tiles of channels all channels of x are."""
        return self.shape.groups * ceil_div(self.shape.c_in, tile.channels_in)

    def prepared_bytes(self, tile: Tile, boxes: int, positions: int) -> int:
        """Return what x takes in so many boxes of so many positions."""
        return self.prepared_tiles(tile) * boxes * self.prepared_bytes_of_box(tile, positions)

    def workspace_bytes(self, tile: Tile, n: int, extents: Ints, launch: Launch) -> int:
        """Return what a launch's sums, and prepared x, take."""
        x_bytes = self.prepared_bytes(tile, n * count_boxes(extents, launch.box), prod(launch.box))
        return 4 * tile.values * launch.share.slots + x_bytes

    def room(self, tile: Tile, device: Device) -> int:
        """Return the shared memory that a block has for boxes; each block reserves 1 KB on top of its own."""
        return (device.shared_bytes + 1024) // tile.min_blocks - 1024 - ALIGNMENT

    def stages(self, tile: Tile, stage_bytes: int, device: Device) -> int:
        """Return how many boxes a block has room for."""
        return min(MAX_STAGES, self.room(tile, device) // stage_bytes)

    def is_copied(self, tile: Tile, box: Ints) -> bool:
        """Whether copies can bring a box and what its taps reach."""
        return max(*spans(self.y_box(tile, box), self.shape.stride), *box) <= MAX_BOX

    def fits(self, tile: Tile, box: Ints, device: Device) -> bool:
        return self.is_copied(tile, box) and self.stages(tile, self.stage_bytes(tile, box), device) >= LEAST_STAGES

    def evened(self, box: Ints, extents: Ints) -> Ints:
        """Return the same with another row, or else plane: the two runs of a step may be any distance apart."""
        d, h, w = box
        if extents[1] > 1:
            return d, h + 1, w
        return (d + 1, h, w) if extents[0] > 1 else (d, h, w + 1)

    def maps(self, tile: Tile, box: Ints, dtype: str, sides: Sides) -> tuple[TensorMap, ...]:
        """Return the maps of x and y."""
        s = self.shape
        kind = ("float32" if s.parts == 2 else "tf32") if s.parts else dtype
        y = TensorMap.of(kind, *sides.y, self.y_box(tile, box), s.stride, ROW_BYTES // s.itemsize)
        if not s.parts:
            return TensorMap.of(dtype, *sides.x, box, (1, 1, 1)), y
        # Of each tile's channels all boxes, which are rows that follow each other.
        row_bytes, of_box = 4 * PLAIN_ROW, self.prepared_bytes_of_box(tile, prod(box))
        boxes = sides.geometry.n * count_boxes(sides.geometry.x_extent, box)
        extents = PLAIN_ROW, of_box // row_bytes, 1, boxes, self.prepared_tiles(tile)
        strides = row_bytes, of_box, of_box, boxes * of_box
        return TensorMap("float32", extents, strides, (extents[1], 1, 1), (1, 1, 1), PLAIN_ROW, plain=True), y

    def clocks_of_size(self, tile: Tile, n: int, extents: Ints, device: Device) -> float | None:
        launch = self.best_launch(tile, n, extents, device, 2**63)
        return launch and launch.clocks

    def best_launch(
        self, tile: Tile, n: int, extents: Ints, device: Device, room: int, is_typical: bool = False
    ) -> Launch | None:
        """Return the launch with the least time for so many positions; kernels are compared by that of typical ones."""
        timed: list[tuple[float, int, float, CopiedBox]] = []
        are_few = self.shape.parts == 2 and n * prod(extents) < FEW_POSITIONS
        read_bytes = self.rates.read_bytes if is_typical else self.rates.added_bytes
        for box in self.copied_boxes(tile, extents).boxes:
            if are_few and box.positions > LARGEST_OF_SPLIT:
                continue
            stages = self.stages(tile, self.bytes_of(tile, box.positions, box.of_y), device)
            if stages >= LEAST_STAGES:
                of_box = self.clocks_of(tile, box.positions, box.of_y, stages) + self.rates.box_clocks / tile.min_blocks
                timed.append((n * box.boxes * of_box, n * box.boxes, of_box, box))

        def launches(boxes: int, of_box: float, box: CopiedBox) -> Iterator[Launch]:
            left = room - self.prepared_bytes(tile, boxes, box.positions)
            for share in self.shares(tile, boxes, device, left):
                bytes_a_clock = read_bytes
                if not is_typical and self.has_one_part(tile, share, box.positions, device):
                    bytes_a_clock *= 8 if self.has_one_tap(tile) else 2
                yield Launch(box.box, share, self.launch_clocks(tile, of_box, share, device, bytes_a_clock))

        # No launch takes less time than all its boxes do, however blocks share them: most are not worth a closer look.
        likely = (
            launch.clocks for _, boxes, of_box, box in sorted(timed)[:1] for launch in launches(boxes, of_box, box)
        )
        most = min(likely, default=inf) * (1 + ROUNDINGS) * device.multiprocessors / self.tiles_of_weights(tile)
        every = (
            launch for least, boxes, of_box, box in timed if least <= most for launch in launches(boxes, of_box, box)
        )
        return min(every, key=lambda launch: launch.clocks, default=None)

    def copied_boxes(self, tile: Tile, extents: Ints) -> Copied:
        """Return the boxes for so many positions that can be copied: tiles have them in common."""
        halo = self.halo(tile)
        if (halo, extents) not in self.known_boxes:
            boxes = [
                CopiedBox(box, count_boxes(extents, box), prod(box), prod(self.y_box(tile, box)))
                for box in (*self.boxes(extents), *self.boxes_of_whole_rows(tile, extents))
                if self.is_copied(tile, box)
            ]
            self.known_boxes[halo, extents] = Copied(
                boxes,
                fewest=min((box.boxes for box in boxes), default=0),
                positions=min((box.boxes * box.positions for box in boxes), default=0),
                of_y=min((box.boxes * box.of_y for box in boxes), default=0),
            )
        return self.known_boxes[halo, extents]

    def boxes_of_whole_rows(self, tile: Tile, extents: Ints) -> Iterator[Ints]:
        """Yield boxes of rows that are no whole runs: those of a plane are one, or those of a box without a halo."""
        (_, of_h, of_w), (depth, height, w) = self.halo(tile), extents
        if of_w or w % 8 == 0:
            return
        most = LARGEST_OF_SPLIT if self.shape.parts == 2 else LARGEST_BOX
        for h, d in itertools.product({1, 2, 4, 8, 16, height}, {1, 2, 4, 8, 16, 32, depth}):
            is_whole = d * h * w % 16 == 0 and (not of_h or h * w % 8 == 0)
            if is_whole and h <= round_up(height, 8) and d <= round_up(depth, 8) and d * h * w <= most:
                yield d, h, w

    def has_one_part(self, tile: Tile, share: Share, positions: int, device: Device) -> bool:
        """Whether all sums of a weight are a block's, of boxes of so many positions, and it writes them as weights.

        They are not added to others in memory. What is written is the result, or the second pass puts it in order and
        gains by numbers of 16 bits.
        """
        s = self.shape
        if share.parts != 1 or (s.parts != 2 and share.of_block * positions > MAX_PRODUCTS * (8 if s.parts else 16)):
            return False
        return self.stored_bytes(tile) <= self.room(tile, device) if self.has_one_tap(tile) else not s.parts

    def has_one_tap(self, tile: Tile) -> bool:
        """Whether neighbours in the memory of the result are neighbours in a tile, as the kernel decides."""
        return prod(self.shape.kernel) * tile.fold * self.shape.phases == 1

    def stored_bytes(self, tile: Tile) -> int:
        """Return the shared memory from which a block writes the weights of its tile, which have one tap."""
        return 4 * tile.channels_in * (tile.channels_out + 4)

    def shares(self, tile: Tile, boxes: int, device: Device, room: int) -> Iterator[Share]:
        """Yield how boxes may be shared: by all blocks at once with as many each, by as many for each tile, or not."""
        tiles = self.tiles_of_weights(tile)
        held = tile.min_blocks * device.multiprocessors
        for of_block in sorted({-(-tiles * boxes // held), -(-boxes // max(1, held // tiles)), boxes}):
            share = share_of(tiles, boxes, of_block)
            if 4 * tile.values * share.slots <= room and share.blocks <= MAX_GRID and tiles * boxes < 2**31:
                yield share

    def launch_clocks(self, tile: Tile, of_box: float, share: Share, device: Device, read_bytes: float) -> float:
        """Estimate the clocks of a launch, each box of which takes so many, and of the second pass."""
        held = tile.min_blocks * device.multiprocessors
        rounds = -(-share.blocks // held) * tile.min_blocks
        clocks = rounds * (share.of_block + self.rates.boxes_around) * of_box
        # A block writes all parts that it has, and the second pass reads all of them.
        slots = share.slots / device.multiprocessors
        written, read = max(rounds * share.parts_of_block, slots), slots
        return clocks + 4 * tile.values * (written / self.rates.written_bytes + read / read_bytes)

    def turning_clocks(self) -> float:
        """Estimate a position's clocks of what is turned before: it is read and written."""
        s = self.shape
        written = s.parts or s.x_turned  # of x, once or in two parts
        numbers = (1 + written if written else 0) * round_up(s.groups * s.c_in, 8)
        numbers += 2 * s.y_turned * round_up(s.groups * s.c_out, 8) * prod(s.stride)
        return s.itemsize * numbers / self.rates.turned_bytes

    def compared(self, y_is_loose: bool) -> float:
        """Return the cost that is compared with other kernels', relative to the estimated time."""
        return self._compared() * (COMPARED_OF_LOOSE[self.shape.parts] if y_is_loose else 1)

    def _compared(self) -> float:
        """Return the same where rows of y are aligned."""
        s = self.shape
        if s.parts:
            if s.groups > 1 and s.parts == 1:
                return COMPARED_OF_GROUPS
            compared = COMPARED_OF_FLOAT32[s.y_turned][s.parts - 1]
            if s.rank == 2 and s.parts == 1 and s.y_turned:
                compared *= OF_PLANES
            if s.rank < 3 or max(s.stride) == 1:
                return compared
            if s.kernel == s.stride and s.parts == 1 and not s.y_turned and s.c_in * s.c_out <= NARROW:
                return compared * COMPARED_OF_DISJOINT
            return compared * (COMPARED_OF_NARROW if s.c_in * s.c_out < NARROW else 1)
        return COMPARED_OF_TURNED if s.x_turned or s.y_turned else COMPARED

    def memory_clocks(self) -> float:
        """Estimate the clocks of a position that reading both arrays once takes."""
        s = self.shape
        read = (min(stride, kernel) for stride, kernel in zip(s.stride, s.kernel, strict=True))
        return s.itemsize * s.groups * (s.c_in * max(s.parts, 1) + s.c_out * prod(read)) / self.rates.memory_bytes

    @of_tile
    def step_clocks(self, tile: Tile) -> tuple[float, float]:
        """Estimate the clocks of all workers for two runs: tensor cores, shared memory."""
        s, units = self.shape, tile.workers * tile.units
        if s.parts:  # whose products are of one run
            has_room = tile.registers - s.parts * tile.sums >= MANY_REGISTERS
            follow = NEXT_CLOCKS[s.parts - 1][has_room and (tile.units % 2 == 0 or tile.units % 3 == 0)]
            tensor = units * (PRODUCT_CLOCKS[s.parts - 1] + s.products * COLUMNS_CLOCKS * tile.tiles_n)
            shared = SHARED_CLOCKS * units * (OF_LOADS + s.products * 2 * tile.tiles_n)
            return 2 * _norm(tensor, tile.units * follow / tile.min_blocks), 2 * shared
        lone = LONE_CLOCKS if tile.workers * tile.min_blocks == 1 else 0
        return units * max(4 * tile.tiles_n, LEAST_CLOCKS) + lone, units * (OF_ROWS + 2 * tile.tiles_n)

    def least_cost(self, tile: Tile, device: Device) -> float:
        """Return a lower bound of a position's clocks: those of the products, and of what is fetched without a halo."""
        tensor, shared = (clocks / 16 for clocks in self.step_clocks(tile))
        fetched = self._fetch_clocks(tile, 1, 1)
        return max(tensor, shared, fetched, self.memory_clocks() / self.tiles_of_weights(tile)) * self.tiles_of_weights(
            tile
        )

    def _fetch_clocks(self, tile: Tile, of_x: int, of_y: int) -> float:
        """Estimate the clocks that so many positions of x and y take to copy."""
        a_position_x, a_position_y = self._fetch_rates(tile)
        return of_x * a_position_x + of_y * a_position_y

    @of_tile
    def _fetch_rates(self, tile: Tile) -> tuple[float, ...]:
        """Estimate the clocks of one position of x and of y."""
        s, rates = self.shape, []
        for groups, channels in zip(tile.groups, (s.c_in, s.c_out), strict=True):
            # Channels of other groups are fetched, too.
            all_bytes = groups * ROW_BYTES
            fetched = min(all_bytes, s.itemsize * round_up(channels, 8)) if s.groups == 1 else all_bytes
            rates.append(groups * self.rates.row_clocks + fetched / self.rates.l2_bytes)
        if s.parts:
            rows = self.prepared_bytes_of_box(tile, 1) / ROW_BYTES
            rates[0] = rows * (self.rates.row_clocks + ROW_BYTES / self.rates.l2_bytes)
        return tuple(rates)

    def typical_cost(self, tile: Tile, device: Device) -> float | None:
        """Return the clocks of a position, as the geometric mean over typical launches, or None where no box fits."""
        launches = TYPICAL[self.shape.rank]
        logarithms = 0.0
        for n, *extents in launches:
            launch = self.best_launch(tile, n, tuple(extents), device, 2**63, is_typical=True)
            if launch is None:
                return None
            logarithms += log(self.position_clocks(launch.clocks, n * prod(extents), device))
        return exp(logarithms / len(launches))

    def ideal_cost(self, tile: Tile, device: Device) -> float:
        """Return a closer bound: with as few boxes, positions and elements of y as any boxes have."""
        launches, tiles = TYPICAL[self.shape.rank], self.tiles_of_weights(tile)
        sums = 4 * tile.values * tiles * (1 / self.rates.written_bytes + 1 / self.rates.read_bytes)
        logarithms = 0.0
        for n, *extents in launches:
            of_all = (n * tiles * self._ideal_clocks(tile, tuple(extents)) + sums) / device.multiprocessors
            logarithms += log(self.position_clocks(of_all, n * prod(extents), device))
        return exp(logarithms / len(launches))

    def least_clocks(self, tile: Tile, n: int, extents: Ints, device: Device) -> float:
        """Return a lower bound of a launch for so many positions: its boxes, each shared by all multiprocessors."""
        return n * self.tiles_of_weights(tile) * self._ideal_clocks(tile, extents) / device.multiprocessors

    def _ideal_clocks(self, tile: Tile, extents: Ints) -> float:
        """Return no more than the clocks of all boxes of a tile of weights and an image."""
        copied = self.copied_boxes(tile, extents)
        clocks = self.clocks_of(tile, copied.positions, copied.of_y, MAX_STAGES)
        return clocks + copied.fewest * self.rates.box_clocks / tile.min_blocks

    def position_clocks(self, clocks: float, positions: int, device: Device) -> float:
        """Estimate the clocks of a position of a launch, which reads both arrays at least once."""
        bounds = clocks * device.multiprocessors / positions, self.memory_clocks()
        return max(bounds) + self.rates.overlap * min(bounds)

    def clocks(self, tile: Tile, box: Ints, stages: int = MAX_STAGES) -> float:
        """Estimate a multiprocessor's clocks for one box, of which so many are staged."""
        return (
            self.clocks_of(tile, prod(box), prod(self.y_box(tile, box)), stages)
            + self.rates.box_clocks / tile.min_blocks
        )

    def clocks_of(self, tile: Tile, positions: int, of_y: int, stages: int) -> float:
        """Estimate the clocks of so many positions, whose taps reach so many of y."""
        tensor, shared = (positions / 16 * clocks for clocks in self.step_clocks(tile))
        of_x, of_y_groups = tile.groups
        fetch = self._fetch_clocks(tile, positions, of_y) * (1 + self.rates.few_stages / (stages * tile.min_blocks - 1))
        if self.shape.parts:
            rows = self.prepared_bytes_of_box(tile, 1) / ROW_BYTES * positions + of_y_groups * of_y
            return _norm(tensor, shared + SHARED_CLOCKS * rows, fetch)
        shared += of_x * positions + of_y_groups * of_y  # rows of as many bytes as it takes in a clock
        return max(tensor, shared, fetch)


def _norm(*clocks: float) -> float:
    """Return what bounds take together: little more than the largest one, unless they are alike."""
    norm: float = sum(one**NORM for one in clocks) ** (1 / NORM)
    return norm


def ceil_div(count: int, share: int) -> int:
    return -(-count // share)
