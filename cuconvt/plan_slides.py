"""What the gradients of few channels a group have in common: threads that slide along D and read rows of y.

See ``kernels/correlate_few_channels.cu`` and ``kernels/weight_gradient_few_channels.cu``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import gcd
from typing import Generic, TypeVar

from cuconvt.geometry import Geometry
from cuconvt.plan import Device, Layout
from cuconvt.plan_copies import constant_stride, whole_pieces
from cuconvt.plan_rows import POSITIONS, Row


@dataclass(frozen=True)
class SlideTile:
    """The compile-time shape of a thread's slide; the fields are macros of the kernels."""

    positions_w: int
    shared_w: int  # positions where rows of y are aligned, so that lanes share their columns; 0: they never do
    lanes_c: int
    ahead: bool  # whether rows are fetched a step before they are needed


AnyTile = TypeVar("AnyTile", bound=SlideTile)


class WorkOnSlides(ABC, Generic[AnyTile]):
    """The sizes that follow from a problem's compile-time parameters and a tile; the kernels compute the same ones."""

    def __init__(self, geometry: Geometry, dtype: str, layout: Layout, device: Device):
        g = geometry
        self.geometry, self.layout, self.device = g, layout, device
        self.itemsize = {"float64": 8, "float32": 4}.get(dtype, 2)
        self.words = 2 if dtype == "float64" else 1  # registers of an accumulator
        self.y_stride_w = constant_stride(layout.out, layout.out_channels_last, g.c_out)
        self.depth = (g.kernel[0] - 1) * g.dilation[0] // g.stride[0] + 1
        self.planes = min(g.kernel[0], g.stride[0] // gcd(g.stride[0], g.dilation[0]))  # of y that a step reads

    @abstractmethod
    def fits(self, tile: AnyTile) -> bool:
        """Whether lanes can read rows so, and registers and memory hold what they have to."""

    @abstractmethod
    def clocks_a_position(self, tile: AnyTile, is_shared: bool) -> float:
        """Estimate the clocks of a multiprocessor for one position and all channels."""

    def clocks_of_tile(self, tile: AnyTile) -> float:
        """Estimate the clocks of a position, of which half lie in rows that lanes share, if they do."""
        return (self.clocks_a_position(tile, tile.shared_w > 0) + self.clocks_a_position(tile, False)) / 2

    def with_positions(self, tile: AnyTile) -> Iterator[AnyTile]:
        """Yield the tile with the positions that suit either kind of rows best, if any fit."""
        alone = [one for p in POSITIONS if self.fits(one := replace(tile, positions_w=p, shared_w=0))]
        if alone:
            best = min(alone, key=lambda one: self.clocks_a_position(one, False))
            both = [one for p in POSITIONS if self.fits(one := replace(best, shared_w=p))]
            yield min(both, key=lambda one: self.clocks_a_position(one, True), default=best)

    def row(self, tile: AnyTile, is_shared: bool) -> Row:
        """Return a row of y as a thread reads it alone, or as lanes share it."""
        positions = tile.shared_w if is_shared else tile.positions_w
        return Row.of(self.geometry, positions, is_shared, self.itemsize)

    def rows(self, tile: AnyTile) -> list[Row]:
        """Return all that the kernel has code for."""
        return [self.row(tile, is_shared) for is_shared in ((False, True) if tile.shared_w else (False,))]

    def can_read(self, tile: AnyTile) -> bool:
        may_share = tile.lanes_c == 1 and self.layout.out[4] == 1
        return all(row.is_possible and (may_share or not row.shared) for row in self.rows(tile))

    def is_shared(self, tile: AnyTile) -> bool:
        """Whether lanes share the columns of this y: whether its rows are aligned for the pieces that they load."""
        g, layout = self.geometry, self.layout
        y_extents = (g.n, g.c_out, *g.out_extent)
        piece = self.row(tile, True).piece
        return tile.shared_w > 0 and whole_pieces(layout.out, y_extents, layout.out_aligned, piece)
