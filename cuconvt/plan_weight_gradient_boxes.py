"""What the planners of weight gradients on Hopper share: boxes of positions, their parts, the choice of a tile."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from math import exp, inf, log, prod
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar

from cuconvt.geometry import Geometry
from cuconvt.plan import MAX_GRID, Device, Ints, Layout
from cuconvt.plan_boxes import count_boxes, even_extent
from cuconvt.plan_search import cheapest_tile, tile_for_size

PIECE_BYTES = 16
WAVES = 4  # of blocks, at most
MAX_WORKSPACE_BYTES = 256 * 2**20
FEW_PARTS = 16  # up to which a block of the second pass writes weights in their order, and
BLOCKS_OF_SUMS = 2  # how many blocks it has for each multiprocessor before these have more sums each
MAX_FAR = 2**15 - 1  # what an item is from its box's start along D and H
MAX_PLACE = 2**16 - 1  # places in shared memory
LARGEST_BOX = 8, 17, 17 * 8  # of those that are considered, along each axis
SECTOR = 32
SHARED_BYTES_A_CLOCK = 128  # of an H200's multiprocessor
PARTS_BYTES_A_CLOCK = 18
BESIDE_SUMS = 30  # registers that a product's sums leave, or ptxas refuses it: of those that a thread starts with
# Beside what estimates say of a launch and of turning arrays before: factors, and the clocks of all else. Fitted to
# 154 strided layers of many sizes whose arrays are in rows, by bytes of an element: what is left has a spread of 9%
# where y is turned, and of 14% where it is read as it is, by copies of boxes or by threads; of the former in 32 bits
# anew, to 175 layers.
OF_TURNED = {2: (0.963, 1.053, 16700), 4: (1.046, 0.86, 18000)}
OF_ROWS = {2: (1.067, 0.886, 12400), 4: (1.06, 1.198, 15000)}
TYPICAL_EXTENTS = {1: (256, 4096), 2: (16, 64, 128), 3: (8, 32, 48, 64)}  # of an axis, by rank


class _Tile(Protocol):
    @property
    def min_blocks(self) -> int: ...
    @property
    def values(self) -> int: ...


AnyTile = TypeVar("AnyTile", bound=_Tile)


class Boxes(NamedTuple):
    """Boxes for so many positions along D, H, W, each with how many of it these take."""

    extents: Ints
    boxes: list[tuple[Ints, int]]


class Choice(NamedTuple):
    """A box for a launch, and into how many parts all of them are cut, with the estimated time."""

    clocks: float
    box: Ints
    parts: int


class WorkOnBoxes(ABC, Generic[AnyTile]):
    """Boxes and estimates of a problem whose blocks own a tile of weights each, and a part of the boxes."""

    shape: Any  # with the problem's `rank`
    piece: int  # positions of a run along W
    max_runs: ClassVar[int]  # of a box
    boxes_around: ClassVar[int]  # what a block takes before and after its boxes, in boxes

    @abstractmethod
    def tiles_of_weights(self, tile: AnyTile) -> int:
        """Return how many tiles all weights are."""

    @abstractmethod
    def fits(self, tile: AnyTile, box: Ints, device: Device) -> bool:
        """Whether as many blocks as the tile wants share a multiprocessor; each reserves 1 KB on top of its own."""

    @abstractmethod
    def clocks(self, tile: AnyTile, box: Ints) -> float:
        """Estimate a multiprocessor's clocks for one box."""

    @abstractmethod
    def least_cost(self, tile: AnyTile, device: Device) -> float:
        """Return a lower bound of a position's clocks."""

    def clocks_of_launch(self, tile: AnyTile, box: Ints) -> float:
        """Estimate the same, where it is known where rows begin."""
        return self.clocks(tile, box)

    @abstractmethod
    def ideal_cost(self, tile: AnyTile, device: Device) -> float | None:
        """Return a closer one, or None where no box fits."""

    def boxes(self, extents: Ints) -> Iterator[Ints]:
        """Yield boxes for so many positions along D, H, W: of whole runs, and an even number of them."""
        runs = -(-extents[2] // self.piece)
        for w in sorted({even_extent(runs, most) for most in (1, 2, 4, 8, 16)}):
            for h in sorted({even_extent(extents[1], most) for most in (1, 2, 4, 8, 16)}):
                for d in sorted({even_extent(extents[0], most) for most in (1, 2, 4, 8)}):
                    if d * h * w <= self.max_runs:
                        of_d, of_h, of_w = self.evened((d, h, w), extents) if d * h * w % 2 else (d, h, w)
                        yield of_d, of_h, self.piece * of_w

    def typical_width(self, extent: int) -> int:
        """Return how many positions of a row of x stand for a typical extent."""
        return extent

    def evened(self, box: Ints, extents: Ints) -> Ints:
        """Return a box of an odd number of runs with some more, so that it is even."""
        d, h, w = box
        return (d, h, w + 1) if w > 1 or extents[1] == 1 else (d, h + 1, w)

    def best_box(self, tile: AnyTile, n: int, extents: Ints, device: Device) -> Choice | None:
        """Return the box with the least time for so many positions, and into how many parts these are cut."""
        best = None
        for box in self.boxes(extents):
            if not self.fits(tile, box, device):
                continue
            boxes, of_box = n * count_boxes(extents, box), self.clocks_of_launch(tile, box)
            for parts in self.parts(tile, boxes, device):
                clocks = self.time(tile, boxes, of_box, parts, device)
                if best is None or clocks < best.clocks:
                    best = Choice(clocks, box, parts)
        return best

    def clocks_of_size(self, tile: AnyTile, n: int, extents: Ints, device: Device) -> float | None:
        """Estimate the clocks of a launch for so many positions, or None where no box fits."""
        choice = self.best_box(tile, n, extents, device)
        return choice and choice.clocks

    def parts(self, tile: AnyTile, boxes: int, device: Device) -> list[int]:
        """Return into how many parts so many boxes may be cut: as many as some rounds of blocks take, or one."""
        tiles = self.tiles_of_weights(tile)
        most = min(boxes, MAX_WORKSPACE_BYTES // (4 * tiles * tile.values), MAX_GRID // tiles)
        held = tile.min_blocks * device.multiprocessors
        return sorted({max(1, min(most, rounds * held // tiles)) for rounds in range(WAVES + 1)})

    def time(self, tile: AnyTile, boxes: int, of_box: float, parts: int, device: Device) -> float:
        """Estimate the clocks of a launch of boxes that take a block `of_box` each, and of the second pass."""
        tiles = self.tiles_of_weights(tile)
        rounds = -(-parts * tiles // (tile.min_blocks * device.multiprocessors))
        of_block = (-(-boxes // parts) + self.boxes_around) * of_box
        clocks = rounds * tile.min_blocks * of_block
        if parts > 1:
            written = 4 * tile.values * tile.min_blocks * rounds  # by a multiprocessor
            read = 4 * tile.values * tiles * parts / device.multiprocessors
            clocks += (written + read) / PARTS_BYTES_A_CLOCK
        return clocks

    @functools.cached_property
    def typical_boxes(self) -> list[Boxes]:
        """The boxes for each of the typical extents, which all tiles have in common."""
        rank = self.shape.rank
        every = (
            (*(n if axis >= 3 - rank else 64 for axis in range(2)), self.typical_width(n))
            for n in TYPICAL_EXTENTS[rank]
        )
        return [Boxes(extents, [(box, count_boxes(extents, box)) for box in self.boxes(extents)]) for extents in every]

    def fitting_boxes(self, tile: AnyTile, device: Device) -> list[Boxes] | None:
        """Return those of them that fit, or None where none does."""
        fitting = []
        for of in self.typical_boxes:
            fitting.append(Boxes(of.extents, [pair for pair in of.boxes if self.fits(tile, pair[0], device)]))
            if not fitting[-1].boxes:
                return None
        return fitting

    def typical_cost(self, tile: AnyTile, device: Device) -> float | None:
        """Return the clocks of a position, as the geometric mean over typical extents, or None where no box fits."""
        typical = self.fitting_boxes(tile, device)
        if typical is None:
            return None
        logarithms, tiles = 0.0, self.tiles_of_weights(tile)
        for extents, boxes in typical:
            cost = min(self.clocks(tile, box) * count for box, count in boxes)
            logarithms += log(cost * tiles / prod(extents))
        return exp(logarithms / len(typical))

    def best_tile(self, bounded: Iterable[tuple[float, AnyTile]], device: Device) -> AnyTile | None:
        """Return the best of the tiles, each with its bound, for typical extents, or None where no box fits."""
        best = cheapest_tile(
            bounded,
            lambda tile: self.ideal_cost(tile, device),
            lambda tile: self.typical_cost(tile, device),
        )
        return best and best[0]


def tile_of_size(
    work: WorkOnBoxes[AnyTile], geometry: Geometry, device: Device, choose: Callable[..., AnyTile | None]
) -> AnyTile | None:
    """Return what `tile_for_size` finds for a weight gradient, or None; `choose` finds the best tile of a size."""
    g = geometry
    if min(*g.x_extent, g.n) == 0:
        return None

    def search(n: int, extents: Ints) -> AnyTile | None:
        return choose(work.shape, n, extents, device)

    def clocks(tile: AnyTile, n: int, extents: Ints) -> float:
        return work.clocks_of_size(tile, n, extents, device) or inf

    return tile_for_size(g.n, g.x_extent, search, clocks)


def are_compared_by_size(geometry: Geometry, layout: Layout, itemsize: int) -> bool:
    """Whether kernels are compared by the time for a size, too: of arrays in rows, strided or, of 32 bits, any."""
    g = geometry
    are_rows = layout.x[4] == layout.out[4] == 1 and not (layout.x_channels_last or layout.out_channels_last)
    return are_rows and g.groups == max(g.dilation) == 1 and (itemsize == 4 or max(g.stride) > 1)


def shares(count: int, most: int) -> list[int]:
    """Return what a tile has of so many, no more than `most`, for any number of tiles that share them equally."""
    return [share for share in sorted({-(-count // tiles) for tiles in range(1, count + 1)}) if share <= most]
