"""The arrays of a weight gradient as ``kernels/weight_gradient_tma.cu`` copies them."""

from __future__ import annotations

from typing import NamedTuple

from cuconvt.geometry import Geometry
from cuconvt.plan import Layout
from cuconvt.plan_turn import Array, Turned, arrays_of, channels_last, reached, turn_of
from cuconvt.plan_views import taps_follow_each_other, with_taps_as_channels
from cuconvt.tensor_map import reads

ROW_BYTES = 128  # 64 channels of a position, 32 of float32
# Of a position's channels, below which taps along W become channels, by bytes of an element.
FOLDED_BYTES = {2: 128, 4: 256}


class Sides(NamedTuple):
    """A problem as copies see it, and what has to be turned for that; x of float32 is prepared in any case."""

    geometry: Geometry  # with the steps of y as it is copied
    x: Array
    y: Array
    turn_x: Turned | None
    turn_y: Turned | None
    fold: int = 1  # taps along W that are channels of y
    parts: int = 0  # of float32
    phases: int = 1  # of y that are channels already

    @classmethod
    def of(cls, geometry: Geometry, layout: Layout, parts: int = 0) -> Sides:
        g, itemsize = geometry, itemsize_of(parts)
        x, y = arrays_of(g, layout)
        turn_x = turn_y = None
        if not parts and not reads(x.strides, x.extents, layout.x_aligned):
            turn_x = turn_of(x, 0, layout.x_aligned, itemsize)
            x = channels_last(x.extents, itemsize)
        if not reads(y.strides, y.extents, layout.out_aligned, itemsize):
            g, y, first = reached(g, y)
            turn_y = turn_of(y, first, layout.out_aligned, itemsize)
            y = channels_last(y.extents, itemsize)
        return cls(g, x, y, turn_x, turn_y, parts=parts)

    @property
    def itemsize(self) -> int:
        return itemsize_of(self.parts)

    @property
    def y_is_loose(self) -> bool:
        """Whether y is turned from rows that are not aligned."""
        return self.turn_y is not None and not self.turn_y.aligned

    def folded(self) -> Sides | None:
        """Return the same with the taps along W as channels of y, which follow each other where kernel = stride.

        Rows that are copied are longer, where they are shorter than 128 bytes (256 of float32), and fewer tiles of taps
        read x.
        """
        (n, channels, d, h, w), strides = self.y
        taps, contiguous = self.geometry.kernel[2], strides[1] == 1 and strides[4] == channels
        short = self.itemsize * channels < FOLDED_BYTES[self.itemsize]
        if not short or not contiguous or not taps_follow_each_other(self.geometry):
            return None
        y = Array((n, taps * channels, d, h, w // taps), (*strides[:4], taps * channels))
        return self._replace(geometry=with_taps_as_channels(self.geometry), y=y, fold=taps)


def itemsize_of(parts: int) -> int:
    """Return the bytes of a number, where one of float32 has so many parts."""
    return 4 if parts else 2
