"""Arrays that a kernel makes channels-last before, so that bulk tensor copies can read them: ``kernels/turn.cuh``."""

from __future__ import annotations

import dataclasses
from math import gcd, prod
from typing import NamedTuple

from cuconvt.geometry import Geometry, triple
from cuconvt.plan import Ints, round_up
from cuconvt.tensor_map import STRIDE_BYTES

TURN_THREADS = 256
LOOSE = 2  # positions of a thread, where pieces along W are not aligned
TURN_FIELDS, WIDE = 20, 11  # of ``struct Turn``, and which of them says whether pieces along W are aligned


class Array(NamedTuple):
    """An array as copies read it: extents and strides, in elements, of N, channels, D, H, W."""

    extents: Ints
    strides: Ints

    def bytes(self, itemsize: int) -> int:
        return round_up(itemsize * self.extents[0] * self.strides[0], 256)


def channels_last(extents: Ints, itemsize: int) -> Array:
    _, channels, d, h, w = extents
    padded = round_up(channels, STRIDE_BYTES // itemsize)
    return Array(extents, (d * h * w * padded, 1, h * w * padded, w * padded, padded))


def reached(geometry: Geometry, y: Array) -> tuple[Geometry, Array, int]:
    """Return the problem of those elements of y alone that a tap may read, a multiple of their common step apart."""
    g = geometry
    steps = tuple(s if k == 1 else gcd(s, d) for s, d, k in zip(g.stride, g.dilation, g.kernel, strict=True))
    firsts = tuple(-pad % step for pad, step in zip(g.pad_before, steps, strict=True))
    extents = tuple(max(1, -(-(o - f) // s)) for o, f, s in zip(g.out_extent, firsts, steps, strict=True))
    if any(f >= o for f, o in zip(firsts, g.out_extent, strict=True)):
        return g, y, 0  # no element is read
    smaller = dataclasses.replace(
        g,
        stride=triple(a // b for a, b in zip(g.stride, steps, strict=True)),
        dilation=triple(d if k == 1 else d // b for d, b, k in zip(g.dilation, steps, g.kernel, strict=True)),
        pad_before=triple((p + f) // b for p, f, b in zip(g.pad_before, firsts, steps, strict=True)),
        out_extent=triple(extents),
    )
    of_n, of_channels, *of_axes = y.strides
    strides = tuple(stride * step for stride, step in zip(of_axes, steps, strict=True))
    first = sum(f * stride for f, stride in zip(firsts, of_axes, strict=True))
    return smaller, Array((*y.extents[:2], *extents), (of_n, of_channels, *strides)), first


def turn_of(array: Array, first: int, aligned: bool, itemsize: int) -> Ints:
    """Return the parameters of the kernel that turns an array whose element `first` is the first one to read."""
    piece = STRIDE_BYTES // itemsize
    (n, channels, *spatial), (of_n, of_channels, *of_axes) = array.extents, list(array.strides)
    extents, strides = list(spatial), list(of_axes)
    # Axes that follow each other in memory are one.
    for axis in (1, 0):
        if extents[axis] == 1 or strides[axis] == extents[2] * strides[2]:
            extents[2] *= extents[axis]
            extents[axis] = 1
        elif axis == 1:
            break
    distances = (of_n if n > 1 else 0, of_channels, *(s for s, e in zip(strides[:2], extents, strict=False) if e > 1))
    wide = aligned and strides[2] == 1 and not any(number % piece for number in (*distances, extents[2], first))
    blocks = _blocks(n, channels, extents, wide, piece)
    return (n, channels, *extents, of_n, of_channels, *strides, first, int(wide), *(0,) * 7, blocks)


def _blocks(n: int, channels: int, extents: list[int], wide: bool, piece: int) -> int:
    rows, of_row, down = n * prod(extents[:2]), extents[2], 8 if wide else 16
    positions = -(-rows * of_row // piece // down) if wide else rows * -(-of_row // (LOOSE * down))  # each of a warp
    return -(-32 * positions * -(-channels // (piece * 32 // down)) // TURN_THREADS)
