"""In which order blocks that take one box after the other take those of phases that differ in taps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product

from cuconvt.geometry import Geometry
from cuconvt.phases import axis_phases

MOST_ROUNDS = 8  # of more of them every block has about as much to do, and boxes of one place should follow each other
# What a box takes besides the products of its taps, in rows of these: to stage x, which 3xTF32 hides behind products.
AROUND, AROUND_OF_SPLIT, AROUND_OF_BOXED = 6.0, 0.3, 4.0  # the last of 16 bits that bulk tensor copies bring
WORTH = 0.93  # of the usual order's time: boxes of one place that follow each other are worth the rest


def taps_of_phases(geometry: Geometry) -> list[int]:
    """Return the rows of taps along D and H of each phase, in the kernel's order."""
    g = geometry
    axes = (axis_phases(g.kernel[axis], g.stride[axis], g.dilation[axis]) for axis in range(2))
    return [len(d.taps) * len(h.taps) for d, h in product(*axes)]


def takes_longest_first(taps: Sequence[int], together: int, boxes: int, in_turn: int, held: int, around: float) -> bool:
    """Whether blocks should take all boxes of the first phases first, in rounds to and fro, instead of phases in turn.

    Parameters
    ----------
    taps : sequence of int
        Rows of taps of each phase.
    together : int
        Boxes of a phase that follow each other: tiles of channels, and groups.
    boxes : int
        All boxes of all phases.
    in_turn, held : int
        Blocks of the launch in the usual order, and as many as the device holds.
    around : float
        What a box takes besides its rows of taps.
    """
    if len(set(taps)) == 1 or not held < boxes <= MOST_ROUNDS * held:
        return False
    usual = (taps[index // together % len(taps)] for index in range(boxes))
    longest = (taps[index * len(taps) // boxes] for index in range(boxes))
    return _busiest(longest, held, around, True) < WORTH * _busiest(usual, in_turn, around, False)


def _busiest(taps: Iterable[int], blocks: int, around: float, to_and_fro: bool) -> float:
    """Return what the busiest block has to do, of boxes with so many rows of taps, one after the other."""
    work = [0.0] * blocks
    for index, rows in enumerate(taps):
        turn, block = divmod(index, blocks)
        work[blocks - 1 - block if to_and_fro and turn % 2 else block] += rows + around
    return max(work)
