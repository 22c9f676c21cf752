"""Arrays that a kernel makes channels-last before, so that bulk tensor copies can read them: ``kernels/turn.cuh``."""

from __future__ import annotations

import dataclasses
from math import gcd, prod
from typing import NamedTuple

from cuconvt.geometry import Geometry, triple
from cuconvt.plan import Ints, Layout, round_up
from cuconvt.tensor_map import STRIDE_BYTES

TURN_THREADS = 256
TURN_FIELDS = 20  # of ``struct Turn``
MOST_PIECES = 8  # of a position, that a block turns
# Where rows come in bulk: the fewest positions of a row, and pieces that a block turns.
FEWEST_POSITIONS, PIECES_OF_BLOCK = 128, 1024
LOOSE, DOWN = 2, 16  # positions of a thread where it loads single elements, and of a warp that follow each other


class Array(NamedTuple):
    """An array as copies read it: extents and strides, in elements, of N, channels, D, H, W."""

    extents: Ints
    strides: Ints

    def bytes(self, itemsize: int) -> int:
        return round_up(itemsize * self.extents[0] * self.strides[0], 256)


def arrays_of(geometry: Geometry, layout: Layout) -> tuple[Array, Array]:
    """Return x and y of a gradient of the weight as they are."""
    g = geometry
    return Array((g.n, g.c_in, *g.x_extent), layout.x), Array((g.n, g.c_out, *g.out_extent), layout.out)


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


class Turned(NamedTuple):
    """How an array is turned."""

    turn: Ints  # ``struct Turn``
    aligned: bool  # whether all pieces of its rows are
    shared_bytes: int  # of a block


def turn_of(array: Array, first: int, aligned: bool, itemsize: int) -> Turned:
    """Return how an array is turned whose element `first` is the first one to read."""
    piece = STRIDE_BYTES // itemsize
    (n, channels, *extents), (of_n, of_channels, *strides) = array.extents, list(array.strides)
    # Axes that follow each other in memory are one.
    for axis in (1, 0):
        if extents[axis] == 1 or strides[axis] == extents[2] * strides[2]:
            extents[2] *= extents[axis]
            extents[axis] = 1
        elif axis == 1:
            break
    rows, of_row, pieces = n * prod(extents[:2]), extents[2], -(-channels // piece)
    distances = (of_n if n > 1 else 0, of_channels, *(s for s, e in zip(strides[:2], extents, strict=False) if e > 1))
    are_aligned = aligned and strides[2] == 1 and not any(number % piece for number in (*distances, of_row, first))
    width = shared_bytes = 0
    if strides[2] == 1 and of_row >= FEWEST_POSITIONS:
        sets = -(-pieces // MOST_PIECES)
        of_set = -(-pieces // sets)
        width = min(PIECES_OF_BLOCK >> (of_set - 1).bit_length(), round_up(of_row, 8))
        blocks = rows * -(-of_row // width) * sets
        shared_bytes = 16 + of_set * (piece * (width * itemsize + 128 // piece) + 16)
    else:
        places = rows * -(-of_row // (LOOSE * DOWN))
        blocks = -(-32 * places * -(-pieces // (32 // DOWN)) // TURN_THREADS)
    turn = (n, channels, *extents, of_n, of_channels, *strides, first, 0, 0, 0, 0, width, 0, 0, 0, blocks)
    return Turned(turn, are_aligned, shared_bytes)
