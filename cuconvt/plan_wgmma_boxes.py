"""Boxes of the kernels whose sizes are those of `cuconvt.plan_wgmma_sizes`, and the search for a tile."""

from __future__ import annotations

import dataclasses
import functools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from math import exp, gcd, log, prod
from typing import ClassVar, NamedTuple

from cuconvt.plan import INDEX_LIMIT, Device, Ints, Layout, round_up
from cuconvt.plan_boxes import count_boxes, even_extent
from cuconvt.plan_search import ROUNDINGS, cheapest_tile
from cuconvt.plan_wgmma_sizes import ROWS, AnyTile, Box, Sizes, Tile, altered

LONGER_RING = 6  # slots of weights, where there is room: so many hide how long they take from L2
# Shared memory that leaves the L1 cache 60 KB: with half of these, loads of rows took a sixth longer.
SHARED_BYTES_BESIDE_L1 = 195 * 1024
WIDE = 128  # channels: networks have so many where extents are small, too
SECTOR = 32  # bytes that memory writes at least
# Clocks of a multiprocessor for each sector of a result in rows that is written in parts, by two boxes as rows are cut
# within it, or by two instructions where eight positions of a flat box begin within it. Of 232 problems, each with the
# boxes of one tile, those with the least estimate take 1.018 times as long as the best ones, and 1.040 without; of the
# 69 that were drawn last, 1.021 and 1.049.
CUT_CLOCKS, PART_CLOCKS = 5, 2
CUT_CLOCKS_OF_SLIDES = {1: 3, 3: 0}  # by products: what a block that slides stores waits for less


class Boxes(NamedTuple):
    """Boxes for so many positions along D, H, W, each with how many of it these take."""

    extents: Ints
    used: int  # positions that are of use
    boxes: list[tuple[Box, int]]


class WorkOnPlanes(Sizes, ABC):
    """Boxes of a problem, the choice among them, and what a position takes in a typical problem."""

    # Of typical problems by rank, of many channels (`WIDE`) and of others: where x is channels-last, in rows, and
    # where bulk tensor copies bring it.
    extents: ClassVar[dict[int, tuple[Ints, ...]]]
    extents_of_wide: ClassVar[dict[int, tuple[Ints, ...]]]
    extents_of_rows: ClassVar[dict[int, tuple[Ints, ...]]]
    extents_of_wide_rows: ClassVar[dict[int, tuple[Ints, ...]]]
    extents_of_wide_boxed: ClassVar[dict[int, tuple[Ints, ...]]]
    compared: float  # what the cost is multiplied with, to be compared with other kernels'

    def _derive(self) -> None:
        super()._derive()
        self.known_boxes: dict[Ints, list[Boxes]] = {}
        self.known_boxes_of_size: dict[tuple[Ints, Ints, int], list[Box]] = {}
        self.wide = max(self.shape.c_in, self.shape.c_out) >= WIDE

    @abstractmethod
    def clocks(self, tile: Tile, box: Box) -> float:
        """Estimate a multiprocessor's clocks for one box."""

    @abstractmethod
    def cost(self, tile: Tile, box: Box) -> float:
        """Return the clocks of a box of positions, with all channels of a group."""

    def boxes(self, tile: Tile, extents: Ints, rows: int = 0) -> Iterator[Box]:
        """Yield boxes that suit a tile, or so many of its rows, for so many positions along D, H, W."""
        rows = rows or tile.rows
        _, reach_h, reach_w = self.reach(tile)
        extra = reach_w if tile.merge_w else 0
        depths = [1] if tile.slides else few(extents[0])
        for w in widths(extents[2], rows - extra):
            pitch = self.width(tile, w)
            for d in depths:
                most = ((rows - w - extra) // pitch + 1 - (d - 1) * reach_h) // d
                if most < 1:
                    break
                h = even_extent(extents[1], most)
                held = ((d - 1) * (h + reach_h) + h - 1) * pitch + w + extra
                whole = (extents[0], h, w) if tile.slides else (d, h, w)
                yield self._box(tile, whole, (0, 0), round_up(held, ROWS) - 1 - extra)
        if tile.merge_w:
            return
        count = rows // ROWS
        for across in range(1, min(count, -(-extents[2] // 8)) + 1):
            for down in range(1, min(count // across, -(-extents[1] // 8)) + 1):
                d = 1 if tile.slides else even_extent(extents[0], count // (across * down))
                h, w = 8 * down, 8 * across
                pitch = self.width(tile, w)
                last = ((d - 1) * (h + reach_h) + h - 1) * pitch + w - 1
                yield self._box(tile, (extents[0] if tile.slides else d, h, w), (down, across), last)

    def _box(self, tile: Tile, extent: tuple[int, int, int], patches: tuple[int, int], last_row: int) -> Box:
        """Add the number of positions: all of the box with its halo, and up to what the last row's last tap reads."""
        reach = self.reach(tile)
        d = 1 if tile.slides else extent[0] + reach[0]
        h, w = extent[1] + reach[1], self.width(tile, extent[2])
        reads = last_row + (reach[0] * h + reach[1]) * w + reach[2] + 1
        plane = self.plane(tile, max(d * h * w, reads))
        return Box(extent, patches, plane, self.items(tile, d, h, w))

    def clocks_of_cuts(self, tile: Tile, box: Box, extent: int, width: int) -> float:
        """Estimate what a box takes longer as it writes parts of sectors, of rows of so many positions and outputs.

        Rows of the result are taken to follow each other in memory.
        """
        s = self.shape
        if s.out_channels_last:
            return 0.0
        sector, along_w = SECTOR // s.itemsize, self.outputs_w()
        begins = gcd(sector, width)  # rows, at multiples of it
        cut = begins if box.extent[2] >= extent else gcd(begins, along_w * box.extent[2])
        boxes = -(-extent // box.extent[2])
        clocks: float = CUT_CLOCKS_OF_SLIDES[s.products] if tile.slides else CUT_CLOCKS
        clocks *= (1 - cut / sector) ** 2 * (boxes - 1) / boxes  # halves cost less than other parts
        if self.stores_runs(tile) and not tile.slides and not any(box.patches):
            clocks += PART_CLOCKS * (1 - gcd(begins, along_w) / sector) * box.extent[2] / 8
        rows = box.extent[0] * box.extent[1] * self.outputs(tile) // along_w * min(8 * tile.tiles_c, s.c_out)
        return 2 * rows * clocks

    def box_of_launch(
        self, tile: Tile, extents: Ints, times: int, device: Device, width: int, layout: Layout | None = None
    ) -> Box | None:
        """Return the box with the least time for a launch that takes all positions so many times.

        The result's rows have so many outputs. With a layout, it reaches elements in 32 bits. Some rows of the tile may
        be left empty where no box of all of them fits, or where the launch would not keep the device busy, so that more
        blocks share the positions.
        """
        held = device.multiprocessors * tile.min_blocks * tile.workers // tile.team

        def serves(box: Box) -> bool:
            near = layout is None or self.reaches(tile, box, layout) < INDEX_LIMIT
            return near and self.fits(tile, box, device)

        def clocks(box: Box) -> tuple[float, float]:
            """Return those of all rounds of boxes, and of all boxes: blocks that slide share these evenly."""
            a_box, count = self.clocks(tile, box), times * count_boxes(extents, box.extent)
            a_box += self.clocks_of_cuts(tile, box, extents[2], width)
            return a_box * (count if tile.slides else round_up(count, held)), a_box * count

        best = min(filter(serves, self.boxes_of_size(tile, extents)), key=clocks, default=None)
        if best and (tile.slides or times * count_boxes(extents, best.extent) >= held):
            return best
        step = ROWS if best else 8
        boxes = (box for rows in range(step, tile.rows + 1, step) for box in self.boxes_of_size(tile, extents, rows))
        return min(filter(serves, boxes), key=clocks, default=None)

    def boxes_of_size(self, tile: Tile, extents: Ints, rows: int = 0) -> list[Box]:
        """Return the same boxes as `boxes` does, once for all tiles of a kind."""
        asked = self.kind_of_boxes(tile), extents, rows
        if asked not in self.known_boxes_of_size:
            self.known_boxes_of_size[asked] = list(self.boxes(tile, extents, rows))
        return self.known_boxes_of_size[asked]

    def typical_cost(self, tile: Tile, device: Device) -> float | None:
        """Return the clocks of a position, as the geometric mean over typical extents, or None where no box fits."""
        typical = self.fitting_boxes(tile, device)
        return None if typical is None else self.cost_of_best(tile, typical)

    def fitting_boxes(self, tile: Tile, device: Device) -> list[Boxes] | None:
        """Return the boxes of a tile that fit, for each of the typical extents, or None where none does."""
        fitting = []
        for of in self.typical_boxes(tile):
            fitting.append(of._replace(boxes=[pair for pair in of.boxes if self.fits(tile, pair[0], device)]))
            if not fitting[-1].boxes:
                return None
        return fitting

    def typical_boxes(self, tile: Tile) -> list[Boxes]:
        """Return the boxes of a tile for each of the typical extents; tiles of one kind share them."""
        kind = self.kind_of_boxes(tile)
        if kind not in self.known_boxes:
            if self.shape.boxes and self.wide:
                typical = self.extents_of_wide_boxed[self.shape.rank]
            elif self.shape.x_channels_last:
                typical = (self.extents_of_wide if self.wide else self.extents)[self.shape.rank]
            else:
                typical = (self.extents_of_wide_rows if self.wide else self.extents_of_rows)[self.shape.rank]
            # With padding, the first and the last position have some of the outputs where no phase is late.
            more = self.shape.late[2] if tile.join_w else 0
            self.known_boxes[kind] = []
            of_d, of_h, _ = self.steps_in_x
            for d, h, w in typical:
                held = (-(-d // of_d), -(-h // of_h), w + more)
                boxes = [(box, count_boxes(held, box.extent)) for box in self.boxes(tile, held)]
                self.known_boxes[kind].append(Boxes(held, held[0] * held[1] * w, boxes))
        return self.known_boxes[kind]

    def kind_of_boxes(self, tile: Tile) -> Ints:
        """Return what of a tile its boxes depend on."""
        kind = (
            tile.rows,
            tile.merge_w,
            tile.all_phases,
            tile.slides,
            tile.join_w,
            self.plane(tile, 1),
            tile.boxed,
            tile.whole_h,
            tile.flat,
            tile.swizzled,
        )
        return tuple(map(int, kind))

    def cost_of_best(self, tile: Tile, typical: list[Boxes]) -> float:
        """Return the geometric mean of the clocks of a position, with the best of the boxes for each extents."""
        logarithms = 0.0
        for of in typical:
            boxes = self.few_enough(tile, of) if len(of.boxes) > 1 else of.boxes
            box, count = min(boxes, key=lambda pair: self.clocks(tile, pair[0]) * pair[1])
            logarithms += log(self.compared * self.cost(tile, box) * count / of.used)
        return exp(logarithms / len(typical))

    def few_enough(self, tile: Tile, of: Boxes) -> list[tuple[Box, int]]:
        """Leave out boxes of which there are so many that they take longer than another one whatever is in them."""
        ideal, _ = self.ideal_box(tile, of._replace(boxes=[(box, 1) for box, _ in of.boxes]))
        box, count = min(of.boxes, key=lambda pair: pair[1])
        most = self.clocks(tile, box) * count * (1 + ROUNDINGS) / self.clocks(tile, ideal)
        return [pair for pair in of.boxes if pair[1] <= most]

    def ideal_cost(self, tile: Tile, device: Device) -> float | None:
        """Return a lower bound of the same: with boxes that are as good as the best in each respect."""
        typical = self.fitting_boxes(tile, device)
        if typical is None:
            return None
        return self.cost_of_best(tile, [of._replace(boxes=[self.ideal_box(tile, of)]) for of in typical])

    def ideal_box(self, tile: Tile, of: Boxes) -> tuple[Box, int]:
        """Return a box that none of these takes less time than, and how many of it there are.

        There are as few as of any, with longer rows than any, and all together have as few positions as any, and as few
        that are staged.
        """
        fewest = min(count for _, count in of.boxes)
        depth = of.extents[0] if tile.slides else 1
        positions = min(count * prod(box.extent) for box, count in of.boxes) // fewest // depth
        width = self.width(tile, max(box.extent[2] for box, _ in of.boxes))
        lines = positions // width
        plane = min(count * box.plane for box, count in of.boxes) // fewest
        extent = (depth, lines, positions // lines if lines else width)
        return Box(extent, (0, 0), plane, min(box.items for box, _ in of.boxes)), fewest

    def least_cost(self, tile: Tile) -> float:
        """Return a lower bound of a position's clocks: all rows of the tile are of use, in one row with the least halo.

        For k extents a_i with a product of at least P, the product of all a_i + r_i is at least that of k times the sum
        of the k-th roots of P and of the product of all r_i (Hoelder's inequality).
        """
        depth = 1000 if tile.slides else 1
        wider = [reach for reach in self.reach(tile) if reach]
        k = max(1, len(wider))
        plane = int((tile.rows ** (1 / k) + prod(wider) ** (1 / k)) ** k) if wider else tile.rows
        box = Box((depth, 1, tile.rows), (0, 0), plane * self.unit, plane // 2 if self.shape.pairs else plane)
        return self.compared * self.cost(tile, box) / (depth * tile.rows)


@functools.lru_cache(maxsize=1024)
def few(extent: int) -> list[int]:
    """Return some ways to cut an axis: box extents that leave little of the last box empty."""
    return sorted({even_extent(extent, most) for most in (1, 2, 3, 4, 6, 8, 12, 16)})


@functools.lru_cache(maxsize=1024)
def widths(extent: int, most: int) -> list[int]:
    """Return box extents along W, the widest first: rows should be long, but many rows make a compact box."""
    widths = [even_extent(extent, min(most, width)) for width in (extent, 128, 96, 64, 48, 33, 24, 16, 12, 8)]
    return list(dict.fromkeys(width for width in widths if width > 0))


def best_tile(
    work: WorkOnPlanes, bounded: Iterable[tuple[float, AnyTile]], device: Device
) -> tuple[AnyTile, float] | None:
    """Return the tile with the least cost for typical extents, with that, or None if no box of any fits.

    Each tile comes with its lower bound.
    """
    best = cheapest_tile(
        bounded,
        lambda tile: work.ideal_cost(tile, device),
        lambda tile: work.typical_cost(tile, device),
    )
    return best and (with_longer_ring(work, *best, device), best[1])


def with_longer_ring(work: WorkOnPlanes, tile: AnyTile, cost: float, device: Device) -> AnyTile:
    """Return the tile with more slots for weights, where they take nothing from its boxes, nor from rows of x in L1."""
    if tile.resident:
        return tile
    longer = altered(tile, ring=LONGER_RING)
    if not (work.shape.x_channels_last or work.shape.boxes):
        device = dataclasses.replace(device, shared_bytes=min(device.shared_bytes, SHARED_BYTES_BESIDE_L1))
    longer_cost = work.typical_cost(longer, device)
    return longer if longer_cost is not None and longer_cost <= cost else tile
