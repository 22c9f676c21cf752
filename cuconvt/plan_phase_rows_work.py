"""The sizes and the estimate of ``kernels/phase_rows.cu``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd, prod
from typing import NamedTuple

from cuconvt import plan_wgmma_sizes as wgmma
from cuconvt.geometry import Geometry
from cuconvt.plan import Device, Ints, Layout, magic, round_up
from cuconvt.plan_boxes import count_boxes, even_extent
from cuconvt.plan_copies import others_divisible
from cuconvt.plan_phase_wgmma_work import (
    EXTENTS_OF_ROWS,
    EXTENTS_OF_WIDE_ROWS,
    POSITIONS,
    POSITIONS_OF_WIDE_ROWS,
    TYPICAL_EXTENTS,
    TYPICAL_EXTENTS_OF_WIDE,
)
from cuconvt.plan_search import of_tile
from cuconvt.plan_wgmma_boxes import Boxes, WorkOnPlanes, few, widths
from cuconvt.plan_wgmma_sizes import (
    BESIDE_SUMS,
    MAX_COLUMNS,
    REGISTERS_OF_BOXED,
    Box,
    NormOfRows,
    Tile,
    altered,
    copies_can_count,
)
from cuconvt.tensor_map import MAX_BOX, TensorMap, reads_rows

MAX_STAGED = 2**16 - 1  # words of a channel
MAX_PLANE = 2**30  # elements, with what a box reaches beyond


class Rates(NamedTuple):
    """Of the estimate: bytes a clock, and clocks."""

    product: float  # clocks of a wgmma, and of each of its columns
    column: float
    picked: float  # clocks of what a warpgroup loads and picks, of each word of a thread
    copied: float  # bytes of x
    row: float  # clocks of each row of a copy besides
    weights: float  # bytes
    memory: float  # bytes
    stage: float  # clocks from asking for a stage to having it, of which all but one are under way
    slot: float  # the same of a slot of weights
    box: float  # clocks
    outputs: float  # clocks of 32 results
    norm: float
    row_of_taps: float  # clocks of a warpgroup, for each slot of weights


# By bytes of a number and products, fitted to the times of 1574, 1599 and 926 tiles for 51 layers (6%, 4% and 5% rms).
RATES = {
    (4, 1): Rates(6.05, 0.337, 1.66, 32.5, 0.33, 93, 22, 461, 853, 3.4, 3.8, 2.04, 47),
    (2, 1): Rates(4.67, 0.329, 1.9, 39.2, 0.614, 289, 22, 119, 434, 133, 0.6, 1.43, 31),
    (4, 3): Rates(7.77, 0.31, 2.26, 33.5, 0.133, 64, 22, 513, 437, 0.7, 4.3, 2.73, 126),
}


# By the same: the other kernels' estimates are as much more optimistic, of 385 problems; where taps overlap, where
# there is no stride, and where they do not overlap, with many channels of x and with few.
OVERLAPPING = {(4, 3): 1.3, (4, 1): 1.36, (2, 1): 1.08}
UNSTRIDED = {(4, 3): 1.05, (4, 1): 1.15, (2, 1): 0.95}
DISJOINT_OF_MANY = {(4, 3): 1.25, (4, 1): 0.8, (2, 1): 0.8}
DISJOINT_OF_FEW = {(4, 3): 1.25, (4, 1): 1.05, (2, 1): 1.05}
MANY_CHANNELS = 192
# Likewise, of strides along W from 4 on where taps do not overlap; where they do, of few channels of x, of many of the
# result beside some of x, and of few of the result: by products, or in volumes without a stride of more than some of x,
# as blocks of `phase_wgmma` slide where these are fewer.
OF_WIDE_RUNS = 1.25
FEW_CHANNELS, OF_FEW_CHANNELS = 48, 1.2
SOME_CHANNELS, MANY_RESULTS, OF_MANY_RESULTS = 96, 256, 1.2
FEW_RESULTS, OF_FEW_RESULTS = 32, {1: 0.75, 3: 0.85}
OF_FEW_RESULTS_OF_VOLUMES = {(4, 3): 0.65, (4, 1): 0.75, (2, 1): 1.0}


@dataclass(frozen=True)
class Shape(wgmma.Shape):
    """What a tile's choice depends on: everything but N and extents."""

    first_w: int = 0  # the padding along W modulo the stride
    first: int = 0  # the first element that is read along W, for the first position

    @property
    def lead(self) -> int:
        """Elements from a multiple of 16 bytes to the first one that is read along W, if boxes cut nothing."""
        return self.first % (16 // self.itemsize)


def copies_can_bring(geometry: Geometry, layout: Layout, itemsize: int, flat: bool = False) -> bool:
    """Whether bulk tensor copies can bring rows of x, or with `flat` those of a plane as one."""
    g, x = geometry, layout.x
    extents: Ints = (g.n, g.c_in, *g.x_extent)
    if flat:
        # Positions along W are as many as elements, so that those of the next row follow; pairs of them end with it.
        alike = -(-g.out_extent[2] // g.stride[2]) == g.x_extent[2]
        if not alike or g.x_extent[2] % 2 or g.x_extent[1] == 1 or layout.x[3] != g.x_extent[2]:
            return False
        x, extents = (*x[:3], x[4]), (*extents[:3], prod(extents[3:]))
    is_near = prod(g.x_extent[1:]) < MAX_PLANE
    return copies_can_count(g) and is_near and reads_rows(x, extents, layout.x_aligned, itemsize)


def outputs_at_once(geometry: Geometry, layout: Layout, itemsize: int) -> int:
    """Return how many outputs of a row a thread stores at a time: all of a pair of positions, 16 bytes, or else 1."""
    stride = geometry.stride[2]
    run = gcd(2 * stride, 16 // itemsize)
    whole = run == 2 * stride or run * itemsize == 16
    rows = geometry.out_extent[2] % run == 0 and others_divisible(layout.out, 4, run)
    return run if whole and rows and layout.out_aligned else 1


class Work(WorkOnPlanes):
    """The sizes that follow from a problem and a tile; the kernel computes the same ones."""

    extents, extents_of_wide = TYPICAL_EXTENTS, TYPICAL_EXTENTS_OF_WIDE
    extents_of_rows, extents_of_wide_rows = EXTENTS_OF_ROWS, EXTENTS_OF_WIDE_ROWS
    extents_of_wide_boxed = EXTENTS_OF_WIDE_ROWS

    def __init__(self, geometry: Geometry, dtype: str, precision: str | None, layout: Layout):
        g, itemsize = geometry, 4 if dtype == "float32" else 2
        reach = (g.kernel[2] - 1) * g.dilation[2] // g.stride[2]
        self.shape: Shape = Shape.of(
            g,
            dtype,
            precision,
            x_channels_last=False,
            out_channels_last=False,
            pairs=False,
            late=tuple(int(p % st != 0) for p, st in zip(g.pad_before, g.stride, strict=True)),
            whole_chunks=g.groups > 1,
            first_w=g.pad_before[2] % g.stride[2],
            first=g.pad_before[2] // g.stride[2] - reach,
        )
        self._derive()
        # Whether copies can bring rows one by one, as for most extents, or those of a plane as one.
        self.by_rows = copies_can_bring(g, layout, itemsize)
        self.flat = copies_can_bring(g, layout, itemsize, flat=True)

    def _derive(self) -> None:
        super()._derive()
        s = self.shape
        assert isinstance(s, Shape)
        self.compared = self._beside_others()
        self.aligned = 16 // s.itemsize  # elements
        (_, _, kernel), (_, _, stride), (_, _, dilation) = s.kernel, s.stride, s.dilation
        reach = (kernel - 1) * dilation // stride
        # By tap: how far from the first element that a position reads.
        taps = [(reach - k * dilation // stride + (k * dilation % stride < s.first_w)) for k in range(kernel)]
        self.shifts = sorted(set(taps))
        self.odd = s.lead % 2
        self.of_thread = (self.odd + self.shifts[-1] + 1) // 2 + 1  # pairs that a thread loads of a channel
        # Of a window and step: words as they were loaded, and those that are made of them.
        self.words = 4 * self.of_thread
        self.picked = 0 if (s.itemsize, self.parts) == (4, 1) else 4 * len(self.shifts) * self.parts
        # Elements, seen from the first position, that may lie beyond its row while this and the next one do not.
        read = {s.first + shift + half for shift in self.shifts for half in (0, 1)}
        self.beyond = len(read - {0, 1})
        self.have_all_phases = s.products == 1 and all(taps.count(shift) == stride for shift in self.shifts)
        self.reach_of_one = self.reach_of_all = (*self.reach_of_one[:2], self.shifts[-1])

    def _beside_others(self) -> float:
        """Return by how much other kernels' estimates are more optimistic."""
        s = self.shape
        kind = s.itemsize, s.products
        if s.kernel == s.stride:
            of_kind = (DISJOINT_OF_MANY if s.c_in >= MANY_CHANNELS else DISJOINT_OF_FEW)[kind]
            return of_kind * (OF_WIDE_RUNS if s.stride[2] >= 4 else 1)
        unstrided = max(s.stride) == 1
        compared = (UNSTRIDED if unstrided else OVERLAPPING)[kind]
        if s.c_in <= FEW_CHANNELS:
            compared *= OF_FEW_CHANNELS
        if s.c_in <= SOME_CHANNELS and s.c_out >= MANY_RESULTS:
            compared *= OF_MANY_RESULTS
        if s.c_out <= FEW_RESULTS and s.c_in >= 1.5 * s.c_out:
            if not (unstrided and s.rank == 3):
                compared *= OF_FEW_RESULTS[s.products]
            elif s.c_in > SOME_CHANNELS:
                compared *= OF_FEW_RESULTS_OF_VOLUMES[kind]
        return compared

    def row_words(self, positions: int, lead: int) -> int:
        """Return the words of a staged row with so many elements before the first that is read.

        Eight pairs of four channels lie in different banks; the channels are neighbours or every second one, see
        `next_channel`.
        """
        elements = lead - self.odd + 2 * (-(-positions // 2) - 1 + self.of_thread)
        pieces = -(-elements // self.aligned)
        return 4 * (pieces + (pieces % 4 == 0))

    def lead(self, *begins: int) -> int:
        """Return how many elements a row may have before, where boxes begin at any multiples of these."""
        s = self.shape
        assert isinstance(s, Shape)
        return s.lead if not any(begin % self.aligned for begin in begins) else self.aligned - 2 + self.odd

    def next_channel(self, row: int) -> int:
        """Return which other one of eight channels a lane has that reads some channel, of rows of so many words."""
        return 1 if row // 4 % 2 else 4

    def times(self, tile: Tile) -> int:
        """Return how many boxes a launch has for each box of positions of a group: of phases and tiles of channels."""
        s = self.shape
        return s.stride[0] * s.stride[1] * -(-s.c_out // (8 * tile.tiles_c))

    def boxes(self, tile: Tile, extents: Ints, rows: int = 0) -> Iterator[Box]:
        """Yield boxes; of a flat tile, for which the rows of a plane are one, of pairs that follow each other."""
        rows = rows or tile.rows
        for w in (extents[2],) if tile.flat else widths(extents[2], rows):
            for d in few(extents[0]):
                if tile.flat:
                    yield from self._flat_boxes(tile, d, extents[2], rows // d)
                    continue
                width = w if w >= extents[2] else w + w % 2  # all begin at an even element, or all at an odd one
                most = rows // (2 * -(-width // 2) * d)
                if most < 1:
                    break
                row = self.row_words(width, self.lead(0 if width >= extents[2] else width))
                yield self._box_of(tile, (d, even_extent(extents[1], most), width), row)

    def _flat_boxes(self, tile: Tile, d: int, plane: int, rows: int) -> Iterator[Box]:
        further = self.reach(tile)[1] * tile.flat
        room = MAX_BOX - further - 2 * self.of_thread - 2 * self.aligned
        most = min(rows, room) // 2 * 2
        for along in dict.fromkeys(round_up(even_extent(plane, m), 2) for m in (most, most // 8 * 8) if m > 0):
            row = self.row_words(along + further, self.lead(along if along < plane else 0, tile.flat))
            yield self._box_of(tile, (d, 1, along), row)

    def _box_of(self, tile: Tile, extent: tuple[int, int, int], row: int) -> Box:
        lines = (extent[0] + self.reach(tile)[0]) * self.lines(tile, extent)
        return Box(extent, (0, 0), lines * row, row)

    def ways(self, tile: Tile) -> list[Tile]:
        """Return the tile in each way in which copies can bring x."""
        return [altered(tile, flat=flat) for flat, can in enumerate((self.by_rows, self.flat)) if can]

    def lines(self, tile: Tile, extent: Ints) -> int:
        """Return the rows along H of a copy."""
        return 1 if tile.flat else extent[1] + self.reach(tile)[1]

    def as_copied(self, tile: Tile, extents: Ints) -> tuple[Tile, Ints]:
        """Return the tile for rows of so many positions, and these with the rows of a plane as one if they come so."""
        if not tile.flat:
            return tile, extents
        d, h, w = extents
        return altered(tile, flat=w), (d, 1, h * w)

    def chunk(self, tile: Tile) -> int:
        return tile.k_steps * 32 // self.shape.itemsize

    def columns(self, tile: Tile) -> int:
        """Return the sums of a position."""
        return self.shape.stride[2] * 8 * tile.tiles_c

    def joined(self, tile: Tile) -> int:
        """Return how many phases along W are columns of one wgmma."""
        return self.shape.stride[2] if self.have_all_phases and self.columns(tile) <= MAX_COLUMNS else 1

    def widest(self, tile: Tile) -> int:
        """Return the columns of a wgmma."""
        return self.joined(tile) * 8 * tile.tiles_c

    def stores_alone(self, tile: Tile) -> bool:
        return True

    def stores_runs(self, tile: Tile) -> bool:
        return False

    def unrolled(self, tile: Tile) -> int:
        """Return the wgmmas of a slot."""
        return tile.tiles_m * tile.k_steps * (self.shape.kernel[2] // self.joined(tile)) * self.shape.products

    @of_tile
    def slot_bytes(self, tile: Tile) -> int:
        return tile.k_steps * self.parts * 2 * self.shape.kernel[2] * 8 * tile.tiles_c * 16

    @of_tile
    def slots(self, tile: Tile) -> int:
        """Return the slots of weights of all phases along D and H."""
        return self.slots_of_chunk(tile) * -(-self.shape.c_in // self.chunk(tile))

    def stage_bytes(self, tile: Tile, box: Box) -> int:
        return self.chunk(tile) * box.plane * 4

    @of_tile
    def bytes_beside_stages(self, tile: Tile) -> int:
        barriers = round_up(8 * 2 * (tile.x_stages + tile.ring), 128)
        return barriers + tile.ring * self.slot_bytes(tile) + 4 * 8 * tile.tiles_c * tile.workers

    def shared_bytes(self, tile: Tile, box: Box, index64: bool) -> int:
        return self.bytes_beside_stages(tile) + tile.x_stages * self.stage_bytes(tile, box)

    def fits(self, tile: Tile, box: Box, device: Device) -> bool:
        room = (device.shared_bytes + 1024) // tile.min_blocks - 1024
        if box.plane > MAX_STAGED or self.shared_bytes(tile, box, False) > room:
            return False
        d, row = box.extent[0] + self.reach(tile)[0], box.items * 4 // self.shape.itemsize
        return max(d, self.lines(tile, box.extent), row, self.chunk(tile)) <= MAX_BOX

    def accumulators(self, tile: Tile) -> int:
        chains = 8 * tile.tiles_c if self.shape.products == 3 else 0
        return tile.tiles_m * self.columns(tile) // 2 + chains

    def other_registers(self, tile: Tile) -> int:
        """Estimate how many registers a worker needs besides sums: a little more than the compiler was seen to need."""
        s = self.shape
        chain = 2 if self.parts == 2 and s.kernel[2] == s.stride[2] else 1  # steps
        count = 46 + 2 * self.words + 2 * chain * self.picked + tile.tiles_m + (8 if self.parts == 2 else 0)
        if self.beyond:  # what is kept of a row
            count += tile.tiles_m * (self.beyond + 1)
        if self.joined(tile) == 1 and s.stride[2] >= 4:  # sums of many phases
            count += 5 * s.stride[2]
        return count

    @of_tile
    def registers(self, tile: Tile) -> tuple[int, int] | None:
        """Return the registers of a worker, which are enough, and of a stager."""
        if self.widest(tile) // 2 + BESIDE_SUMS > self.at_start(tile):
            return None
        share = REGISTERS_OF_BOXED[tile.workers, tile.stagers, tile.min_blocks]
        return share if self.accumulators(tile) + self.other_registers(tile) <= share[0] else None

    def map_of_rows(self, tile: Tile, box: Box, dtype: str, geometry: Geometry, layout: Layout) -> TensorMap:
        """Return the map of x: of rows, whose axes are W, channels, H, D and N."""
        g, (of_n, of_channels, of_d, of_h, of_w) = geometry, layout.x
        x_d, x_h, x_w = g.x_extent
        if tile.flat:
            of_h, x_h, x_w = x_h * x_w, 1, x_h * x_w
        return TensorMap.of(
            "tf32" if dtype == "float32" and self.parts == 1 else dtype,
            (g.n, x_w, x_d, x_h, g.c_in),
            (of_n, of_w, of_d, of_h, of_channels),
            (box.extent[0] + self.reach(tile)[0], self.lines(tile, box.extent), self.chunk(tile)),
            (1, 1, 1),
            box.items * 4 // self.shape.itemsize,
            plain=True,
        )

    def parameters(self, tile: Tile, box: Box, blocks: int) -> Ints:
        """Return the part of ``struct Problem`` that describes a box."""
        _, h, w = box.extent
        divisors = (-(-w // 2), h, tile.flat or 1, 1)
        copied = int(tile.flat > 0), self.lines(tile, box.extent)
        return (*box.extent, box.items, *copied, blocks, *(magic(divisor) for divisor in divisors))

    def cost(self, tile: Tile, box: Box) -> float:
        """Return the clocks of a box of positions, with all phases and all channels of a group."""
        boxes = self.times(tile)
        # In the last of so many rounds of boxes, half of the multiprocessors have nothing to do.
        positions = POSITIONS_OF_WIDE_ROWS if self.wide else POSITIONS
        rounds = positions * boxes / (tile.rows * tile.min_blocks)
        return self.clocks(tile, box) * boxes * (1 + 0.5 / rounds)

    def ideal_box(self, tile: Tile, of: Boxes) -> tuple[Box, int]:
        box, count = super().ideal_box(tile, of)
        return box._replace(items=max(box.items for box, _ in of.boxes)), count

    def least_cost(self, tile: Tile) -> float:
        """Return a lower bound of a position's clocks: all rows of the tile are of use, without a halo."""
        words = tile.rows * self.shape.itemsize // 4
        return self.compared * self.cost(tile, Box((1, 1, tile.rows), (0, 0), words, words)) / tile.rows

    @of_tile
    def norm_of_tile(self, tile: Tile) -> NormOfRows:
        """Return what a norm has of a tile, whatever its box."""
        s, r = self.shape, RATES[self.shape.itemsize, self.shape.products]
        chunks, slots = -(-s.c_in // self.chunk(tile)), self.slots(tile) / prod(s.stride[:2])
        steps = slots * tile.tiles_m * tile.workers * tile.k_steps
        products = s.kernel[2] // self.joined(tile) * r.product + s.kernel[2] * 8 * tile.tiles_c * r.column
        multiplied = steps * (s.products * products + (self.words + self.picked) * r.picked)
        multiplied += slots * tile.workers * r.row_of_taps
        weights = 0 if tile.resident else slots * self.slot_bytes(tile)
        waits = chunks * r.stage / (tile.x_stages - 1) / tile.min_blocks
        of_slots = 0 if tile.resident else slots * r.slot / (tile.ring - 1) / tile.min_blocks
        return NormOfRows(chunks, multiplied**r.norm, weights / r.weights, waits**r.norm, of_slots**r.norm)

    def clocks(self, tile: Tile, box: Box) -> float:
        """Estimate a multiprocessor's clocks for a box, of the mean phase: what bounds it adds up as in a norm."""
        s, r, of_tile = self.shape, RATES[self.shape.itemsize, self.shape.products], self.norm_of_tile(tile)
        staged = of_tile.chunks * self.stage_bytes(tile, box)
        copies = staged / r.copied + staged / (4 * box.items) * r.row + of_tile.weights
        outputs = prod(box.extent) * s.stride[2] * min(8 * tile.tiles_c, s.c_out)
        read = prod(box.extent) * s.c_in / self.times(tile)
        memory = (read + outputs) * s.itemsize / r.memory
        powers = of_tile.multiplied, copies**r.norm, memory**r.norm, of_tile.waits, of_tile.waits_for_weights
        norm: float = sum(powers) ** (1 / r.norm)
        return norm + (r.box + r.outputs * outputs / 32) / tile.min_blocks

    def clocks_of_size(self, tile: Tile, times: int, extents: Ints, device: Device) -> float | None:
        """Estimate the clocks of a launch that takes so many positions so many times, or None where no box fits."""
        times *= self.times(tile)
        width = extents[2] * self.shape.stride[2]
        tile, extents = self.as_copied(tile, extents)
        box = self.box_of_launch(tile, extents, times, device, width)
        if box is None:
            return None
        of_cuts = self.clocks_of_cuts(tile, box, extents[2], width)
        return self._clocks_of_boxes(tile, box, times * count_boxes(extents, box.extent), device, of_cuts)

    def least_of_size(self, tile: Tile, times: int, extents: Ints, device: Device) -> float:
        """Return a lower bound of the same: with boxes without a halo, of all rows of the tile.

        As many as the device holds at a time: more of them take longer, each with fewer positions.
        """
        times *= self.times(tile)
        positions, held = prod(extents), device.multiprocessors * tile.min_blocks
        boxes = round_up(times * -(-positions // tile.rows), held)
        of_box = times * positions // boxes
        words = max(1, of_box * self.shape.itemsize // 4)
        return self._clocks_of_boxes(tile, Box((1, 1, of_box), (0, 0), words, words), boxes, device)

    def _clocks_of_boxes(self, tile: Tile, box: Box, boxes: int, device: Device, of_cuts: float = 0.0) -> float:
        rounds = -(-boxes // (device.multiprocessors * tile.min_blocks))
        return rounds * tile.min_blocks * (self.clocks(tile, box) + of_cuts)
