"""The sizes and the estimate of ``kernels/weight_gradient_wgmma.cu``."""

from __future__ import annotations

from collections.abc import Iterator
from math import exp, gcd, log, prod
from typing import Any, NamedTuple

from cuconvt.geometry import Geometry
from cuconvt.plan import Device, Ints, Layout, at_residue, round_up
from cuconvt.plan_boxes import even_extent
from cuconvt.plan_correlate import staged_axis
from cuconvt.plan_search import of_tile
from cuconvt.plan_turn import Array, arrays_of
from cuconvt.plan_weight_gradient_boxes import (
    MAX_FAR,
    MAX_PLACE,
    PIECE_BYTES,
    SECTOR,
    SHARED_BYTES_A_CLOCK,
    WorkOnBoxes,
)
from cuconvt.plan_weight_gradient_wgmma_tile import ROWS_OF_X, Shape, Tile, most_positions
from cuconvt.tensor_map import MAX_BOX, TensorMap

PIECE_WORDS = 4
BARRIER_BYTES = 128
ALIGNMENT_OF_RUN = 128  # times as many, of stages that copies of boxes fill, and what barriers take there
# Of a worker with one tile of 64 rows and with several, besides sums and operands; with fewer, products are serialised.
OTHER_REGISTERS = 14, 30

# Rates of an H200's multiprocessor, per clock, that the cost estimate uses: fitted to 60 tiles' times for 12 problems,
# of 16 bits.
LEAST_CLOCKS = 24  # of a product
UNIT_CLOCKS = 135  # from the end of a worker's products to the start of its next ones
L2_BYTES_A_CLOCK = 27
# By the stagers of a block, with loads of so many bytes (1: of elements that are apart), by itemsize.
FETCHED_BYTES_A_CLOCK = {2: {16: 100.0, 4: 10.0, 2: 1.5, 1: 0.25}, 4: {16: 100.0, 4: 10.0, 1: 2.5}}
ROUNDED_BYTES_A_CLOCK = {16: 60.0, 4: 15.0, 1: 15.0}  # likewise, of x to TF32; not measured
OVERLAP = 0.05  # what of the less busy units' time adds to the busiest one's
BOX_CLOCKS = 1400
# Likewise where copies bring boxes, fitted to 2113 tiles of 250 problems: a spread of 11%.
COPIED_BYTES_A_CLOCK = 49
COPIED_ROW_CLOCKS = 0.4, 1.0  # besides, of x and of y
COPY_CLOCKS = 37  # besides
COPIED_BOX_CLOCKS = 300
TYPICAL_OF_PLANE = 6  # runs of a row, at most: those of more are nearly whole copies by themselves
MAX_RUNS = 64  # pieces of positions of a box
BOXES_AROUND = 4  # what a block takes before and after its boxes, in boxes
# The cost that is compared with other kernels', relative to the estimated time, by how many bytes of rows of y are read
# at a time: such that it is chosen where eleven problems each, in bfloat16 and TF32, took less time than with
# weight_gradient_gemm, its only rival.
COST_OF_TIME = {2: {16: 0.75, 4: 0.9, 2: 0.41, 1: 0.41}, 4: {16: 1.2, 4: 1.1, 1: 1.1}}
COST_OF_COPIED = {2: 0.85, 4: 1.05}  # likewise where copies bring boxes: of 87 problems
FEW_IN, OF_FEW_IN = 12, 1.45  # of that, groups of so many channels of x, in TF32 with a stride and taps that overlap


class Stage(NamedTuple):
    """A box in shared memory; sizes in pieces of 16 bytes."""

    y_box: tuple[int, int, int]
    y_channel: int  # so many that eight channels lie in different banks; of boxes, those of a row
    pieces: int
    items: int  # of the lists of what stagers fetch
    runs: int
    barrier_bytes: int

    def shared_bytes(self, index64: bool, stages: int) -> int:
        lists = self.items * (32 if index64 else 16) + 4 * (self.runs + 2)  # the latter of where runs start in y
        return self.barrier_bytes + stages * PIECE_BYTES * self.pieces + lists


class Fetch(NamedTuple):
    """How an array is fetched: what of the estimate is by the byte."""

    conflicts: float  # clocks of shared memory for so many bytes as it takes in one
    rate: float  # bytes a clock, by the stagers of a block
    apart: float  # bytes that are read for one of use

    @classmethod
    def of(cls, itemsize: int, size: int, gap: int) -> Fetch:
        """Of elements that are so far apart, so many bytes at a time."""
        apart = SECTOR / itemsize if size == 1 else min(gap, SECTOR / itemsize)
        return cls(1 if size > 2 else 3 * apart, FETCHED_BYTES_A_CLOCK[itemsize][size], apart)


class Reach(NamedTuple):
    """What of the estimate follows from the taps of a tile, whatever its channels."""

    tiles: int  # that all taps are
    staged: tuple[tuple[int, int, int], ...]  # what `staged_axis` returns for each axis and a single position
    early: int  # elements before the first one that is used, in a staged row of y
    bytes: int  # of a row of y that are read at a time
    chunk: int  # words of it that a lane reads at a time
    words: int  # that it reads for as many positions as a word has numbers
    fetch: Fetch  # of y
    boxed: bool  # whether copies bring boxes


class Ideal(NamedTuple):
    """What no boxes for some extents have less of, all together."""

    used: int  # positions that are of use
    boxes: int
    positions: int
    reached: int  # of y by their taps, in pieces along W


class Work(WorkOnBoxes[Tile]):
    """The sizes that follow from a problem and a tile; the kernel computes the same ones."""

    max_runs, boxes_around = MAX_RUNS, BOXES_AROUND

    def __init__(self, shape: Shape):
        self.shape, self.itemsize = shape, shape.itemsize
        self.per_word = 4 // shape.itemsize  # numbers
        self.piece = PIECE_WORDS * self.per_word  # numbers in 16 bytes
        self.fetch_x = Fetch.of(shape.itemsize, shape.x_bytes, 1)
        self.reaches: dict[Ints, Reach] = {}
        self.known_ideals: dict[Reach, list[Ideal]] = {}
        self.tile: Tile | None = None  # the last one whose sizes were asked for, and these: see `of_tile`
        self.sizes: dict[Any, Any] = {}

    def reach(self, tile: Tile) -> Reach:
        """Return what tiles with the same taps have in common."""
        taps = tile.taps_d, tile.taps_h, tile.taps_w, tile.groups_w
        if taps not in self.reaches:
            self.reaches[taps] = self.reach_of(tile)
        return self.reaches[taps]

    def reach_of(self, tile: Tile) -> Reach:
        s, taps_w = self.shape, tile.taps[2]
        stride, dilation = s.stride[2], s.dilation[2]
        staged = tuple(map(staged_axis, tile.taps, s.stride, s.dilation, (1, 1, 1)))
        step, hop, _ = staged[2]
        gap = gcd(stride, dilation) if taps_w > 1 else stride  # of neighbours in a staged row, in the array
        early = s.early if gap == 1 else 0
        next_tile = s.itemsize * taps_w * dilation if taps_w < s.kernel[2] else 0
        at_once = next((n for n in (16, 4, 2) if n <= s.y_bytes and next_tile % n == 0), 1)
        if gap > 1:
            at_once = min(s.y_bytes, s.itemsize)
        chunk = gcd(step, 4)
        elements = [early + tap * hop + i * step for tap in range(tile.taps_w) for i in range(self.per_word)]
        words = chunk * len({element // self.per_word // chunk for element in elements})
        tiles = prod(-(-k // t) for k, t in zip(s.kernel, tile.taps, strict=True))
        fetch, boxed = Fetch.of(s.itemsize, at_once, gap), s.boxed and at_once == PIECE_BYTES
        return Reach(tiles, staged, early, at_once, chunk, words, fetch, boxed)

    def boxes(self, extents: Ints) -> Iterator[Ints]:
        """Yield the same; where copies bring several runs of x, with whole copies for each, too."""
        yield from dict.fromkeys(self._flat_boxes(extents) if self.shape.flat else self._boxes_of_rows(extents))

    def _boxes_of_rows(self, extents: Ints) -> Iterator[Ints]:
        for d, h, w in super().boxes(extents):
            yield d, h, w
            for x_runs in self.shape.x_runs:
                yield d, h, round_up(w, x_runs * self.piece)

    def _flat_boxes(self, extents: Ints) -> Iterator[Ints]:
        runs = -(-extents[2] // self.piece)
        whole = {x_runs // gcd(x_runs, runs) for x_runs in self.shape.x_runs}  # rows
        for h in sorted({round_up(even_extent(extents[1], most), rows) for most in (1, 2, 4, 8, 16) for rows in whole}):
            for d in sorted({even_extent(extents[0], most) for most in (1, 2, 4, 8)}):
                if d * h * runs <= self.max_runs:
                    yield d, h, self.piece * runs

    def typical_width(self, extent: int) -> int:
        """Return what a typical width is where it is known to be a multiple, or that a row has few runs."""
        s = self.shape
        if not s.flat:
            return max(extent, max(s.x_runs, default=0) * self.piece)
        most = most_positions(s.kernel[2], s.stride[2], s.dilation[2], self.itemsize)
        return min(extent, most, TYPICAL_OF_PLANE * self.piece)

    def brings_whole(self, tile: Tile, box: Ints) -> bool:
        """Whether copies bring as many runs of x as the box has."""
        of_row = box[1] * box[2] if self.shape.flat else box[2]
        return of_row % (tile.x_runs * self.piece) == 0

    def maps(
        self, tile: Tile, box: Ints, dtype: str, geometry: Geometry, layout: Layout
    ) -> tuple[TensorMap, TensorMap]:
        """Return the maps of x and y: of rows, whose axes are W, H, D, channels and N.

        With images for planes, strides do not ascend as the driver's manual has them; it takes them nevertheless.
        """

        def of_rows(kind: str, array: Array, channels: int, elements: int, plain: bool) -> TensorMap:
            (n, c, d, h, w), (n_step, c_step, d_step, h_step, w_step) = array
            steps = n_step, w_step, c_step, d_step, h_step
            return TensorMap.of(kind, (n, w, c, d, h), steps, (channels, 1, 1), (1, 1, 1), elements, plain)

        x, y = arrays_of(geometry, layout)
        if self.shape.flat:
            (n, c, d, h, w), (of_n, of_c, of_d, _, of_w) = x
            x = Array((n, c, d, 1, h * w), (of_n, of_c, of_d, h * w, of_w))
        x_row, y_row = tile.x_runs * self.piece, self.stage(tile, box).y_channel * self.piece
        return (
            of_rows("tf32" if dtype == "float32" else dtype, x, tile.channels_in, x_row, plain=False),
            of_rows(dtype, y, tile.channels_out, y_row, plain=True),
        )

    def compared(self, tile: Tile) -> float:
        """Return the cost that is compared with other kernels', relative to the estimated time."""
        s, reach = self.shape, self.reach(tile)
        if not reach.boxed:
            return COST_OF_TIME[self.itemsize][reach.bytes]
        overlap = max(s.stride) > 1 and s.kernel != s.stride
        is_slower = s.itemsize == 4 and s.groups > 1 and s.c_in <= FEW_IN and overlap
        return COST_OF_COPIED[self.itemsize] * (OF_FEW_IN if is_slower else 1)

    def least_compared(self) -> float:
        """Return the least that `compared` may be."""
        return min(COST_OF_COPIED[self.itemsize], *COST_OF_TIME[self.itemsize].values())

    def registers(self, tile: Tile) -> int:
        """Estimate the registers of a worker's thread."""
        others = OTHER_REGISTERS[min(tile.tiles_m, 2) - 1]
        return tile.sums + 4 * tile.taps_w + 4 * self.reach(tile).words + 2 * tile.tiles_m + others

    def tiles_of_weights(self, tile: Tile) -> int:
        s = self.shape
        tiles = self.reach(tile).tiles
        return tiles * -(-s.c_out // tile.channels_out) * -(-s.c_in // tile.channels_in) * s.groups

    def y_box(self, tile: Tile, box: Ints) -> tuple[int, int, int]:
        """Return what the taps of a tile reach, along W in pieces."""
        reach = self.reach(tile)
        (step_d, _, d), (step_h, _, h), (step_w, _, w) = reach.staged
        w += reach.early + (box[2] - 1) * step_w
        return (box[0] - 1) * step_d + d, (box[1] - 1) * step_h + h, -(-w // self.piece)

    def stage(self, tile: Tile, box: Ints) -> Stage:
        y_box, reach, runs = self.y_box(tile, box), self.reach(tile), box[2] // self.piece
        apart = reach.chunk if reach.staged[2][0] // reach.chunk % 2 else 1
        y_pieces, all_runs = y_box[0] * y_box[1] * y_box[2], box[0] * box[1] * runs
        if reach.boxed:
            row, alignment = at_residue(y_box[2], apart, 2 * apart), ALIGNMENT_OF_RUN * tile.x_runs
            pieces = all_runs * tile.channels_in + y_box[0] * y_box[1] * row * tile.channels_out
            return Stage(y_box, row, round_up(pieces, alignment // PIECE_BYTES), 0, all_runs, alignment)
        channel = at_residue(y_pieces, apart, 2 * apart)
        x_run = tile.channels_in + (1 if runs >= 8 else 2 if runs >= 4 else 4 if runs >= 2 else 0)
        x_parts, y_parts = 1 if self.shape.x_bytes == 16 else 4, 1 if reach.bytes == 16 else 4
        return Stage(
            y_box,
            channel,
            pieces=all_runs * x_run + tile.channels_out * channel,
            items=all_runs * x_parts + y_pieces * y_parts,
            runs=all_runs,
            barrier_bytes=BARRIER_BYTES,
        )

    def fits(self, tile: Tile, box: Ints, device: Device) -> bool:
        """Whether as many blocks as the tile wants share a multiprocessor; each reserves 1 KB on top of its own."""
        room = (device.shared_bytes + 1024) // tile.min_blocks - 1024
        # y takes no less than its channels at as many positions.
        if (tile.channels_in + tile.channels_out) * prod(box) * self.itemsize * tile.stages > room:
            return False
        stage, strides = self.stage(tile, box), self.shape.stride
        if self.reach(tile).boxed:
            whole = self.brings_whole(tile, box) and stage.y_channel * self.piece <= MAX_BOX
            return whole and stage.shared_bytes(True, tile.stages) <= room
        far = max(stage.y_box[0] * strides[0], stage.y_box[1] * strides[1])
        return far <= MAX_FAR and 4 * stage.pieces <= MAX_PLACE and stage.shared_bytes(True, tile.stages) <= room

    def clocks_of_launch(self, tile: Tile, box: Ints) -> float:
        return self.clocks(tile, box) + self.sectors(tile, box) * SECTOR / L2_BYTES_A_CLOCK

    def sectors(self, tile: Tile, box: Ints) -> float:
        """Return how many sectors of a box's rows are read beyond what is of use. Those of y start within one."""
        s, of_row = self.shape, self.itemsize * box[2] % SECTOR
        x_rows = prod(box[:2]) * min(tile.channels_in, s.c_in)
        y_rows = prod(self.y_box(tile, box)[:2]) * min(tile.channels_out, s.c_out)
        return x_rows * (1.5 - of_row / SECTOR if of_row else 0) + y_rows / 2

    def least_cost(self, tile: Tile, device: Device) -> float:
        """Return a lower bound of a position's clocks: those of the largest box, without a halo along any axis."""
        s, of_y = self.shape, 1
        for step, _, reach in self.reach(tile).staged:
            of_y *= min(step, reach)
        x_bytes = self.itemsize * min(tile.channels_in, s.c_in)
        y_bytes = self.itemsize * min(tile.channels_out, s.c_out) * of_y
        clocks = self.clocks_of(tile, tile.tiles_m / (2 * self.piece), x_bytes, y_bytes)
        of_box = self.box_clocks(tile)
        room = (device.shared_bytes + 1024) // tile.min_blocks
        channels = tile.channels_in + tile.channels_out * of_y
        runs = MAX_RUNS * (ROWS_OF_X[0] if self.reach(tile).boxed else 2)  # where their number is rounded up
        positions = min(runs * self.piece, room // (tile.stages * self.itemsize * channels))
        return (clocks + of_box / max(1, positions)) * self.tiles_of_weights(tile)

    @of_tile
    def unit_clocks(self, tile: Tile) -> tuple[float, float, float]:
        """Estimate the clocks of all workers for two runs and 64 rows: tensor cores, shared memory, waits."""
        products = tile.taps_w * max(tile.channels_in / 2, LEAST_CLOCKS)
        shared = tile.taps_w * tile.channels_in / 4 + 16 * self.reach(tile).words
        return tile.workers * products, tile.workers * shared, (products + UNIT_CLOCKS) / tile.min_blocks

    def clocks(self, tile: Tile, box: Ints) -> float:
        """Estimate a multiprocessor's clocks for one box."""
        s, copying = self.shape, 0.0
        steps = prod(box) // (2 * self.piece) * tile.tiles_m
        d, h, w = self.y_box(tile, box)
        if self.reach(tile).boxed:
            w, of_x = self.stage(tile, box).y_channel, prod(box) // (tile.x_runs * self.piece)
            x_rows, y_rows = of_x * min(tile.channels_in, s.c_in), d * h * min(tile.channels_out, s.c_out)
            copying = x_rows * COPIED_ROW_CLOCKS[0] + y_rows * COPIED_ROW_CLOCKS[1] + (of_x + d * h) * COPY_CLOCKS
        x_bytes = self.itemsize * prod(box) * min(tile.channels_in, s.c_in)
        y_bytes = PIECE_BYTES * d * h * w * min(tile.channels_out, s.c_out)
        return self.clocks_of(tile, steps, x_bytes, y_bytes, copying) + self.box_clocks(tile)

    def box_clocks(self, tile: Tile) -> float:
        """Return what a box takes beyond its positions."""
        return (COPIED_BOX_CLOCKS if self.reach(tile).boxed else BOX_CLOCKS) / tile.min_blocks

    def clocks_of(self, tile: Tile, steps: float, x_bytes: int, y_bytes: int, copying: float = 0) -> float:
        """Estimate the clocks of what a box multiplies, for two runs and 64 rows a step, and fetches.

        Copies of boxes take some beyond those of their bytes.
        """
        s, fetch, l2 = self.shape, 0.0, 0.0
        tensor, shared, workers = (steps * clocks for clocks in self.unit_clocks(tile))
        if self.reach(tile).boxed:
            shared += (x_bytes + y_bytes) / SHARED_BYTES_A_CLOCK
            l2 = (x_bytes + y_bytes) / COPIED_BYTES_A_CLOCK + copying
            busiest = max(tensor, shared, l2, workers)
            return busiest + OVERLAP * (tensor + shared + l2 - busiest)
        for count, of in ((x_bytes, self.fetch_x), (y_bytes, self.reach(tile).fetch)):
            shared += count * of.conflicts / SHARED_BYTES_A_CLOCK
            fetch += count / of.rate / tile.min_blocks
            l2 += count * of.apart / L2_BYTES_A_CLOCK
        if s.itemsize == 4:
            shared += 2 * x_bytes / SHARED_BYTES_A_CLOCK
            fetch += x_bytes / ROUNDED_BYTES_A_CLOCK[s.x_bytes] / tile.min_blocks
        busiest = max(tensor, shared, fetch, l2, workers)
        return busiest + OVERLAP * (tensor + shared + l2 - busiest)

    def ideal_cost(self, tile: Tile, device: Device) -> float:
        """Return a closer one: with as few positions, and as few that taps reach, as with any boxes."""
        s, logarithms, tiles = self.shape, 0.0, self.tiles_of_weights(tile)
        for ideal in self.ideals(tile):
            x_bytes = self.itemsize * ideal.positions * min(tile.channels_in, s.c_in)
            y_bytes = PIECE_BYTES * ideal.reached * min(tile.channels_out, s.c_out)
            clocks = self.clocks_of(tile, ideal.positions / (2 * self.piece) * tile.tiles_m, x_bytes, y_bytes)
            clocks += self.box_clocks(tile) * ideal.boxes
            logarithms += log(clocks * tiles / ideal.used)
        return exp(logarithms / len(self.typical_boxes))

    def ideals(self, tile: Tile) -> list[Ideal]:
        """Return the best in each respect of all boxes for each of the typical extents."""
        taps = self.reach(tile)
        if taps not in self.known_ideals:
            self.known_ideals[taps] = [
                Ideal(
                    used=prod(extents),
                    boxes=min(count for _, count in boxes),
                    positions=min(prod(box) * count for box, count in boxes),
                    reached=min(prod(self.y_box(tile, box)) * count for box, count in boxes),
                )
                for extents, boxes in self.typical_boxes
            ]
        return self.known_ideals[taps]
