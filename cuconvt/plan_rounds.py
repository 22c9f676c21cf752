"""In which order blocks that take one box after the other take those of phases that differ in taps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product

from cuconvt.geometry import Geometry

MOST_ROUNDS = 8  # of more of them every block has about as much to do, and boxes of one place should follow each other
# What a box takes besides the products of its taps, in rows of these: to stage x, which 3xTF32 hides behind products.
AROUND, AROUND_OF_SPLIT = 6.0, 0.3
WORTH = 0.93  # of the usual order's time: boxes of one place that follow each other are worth the rest


def taps_of_phases(geometry: Geometry) -> list[int]:
    """Return the rows of taps along D and H of each phase, in the kernel's order."""
    axes = []
    for kernel, stride, dilation in zip(geometry.kernel[:2], geometry.stride[:2], geometry.dilation[:2], strict=True):
        phases = [tap * dilation % stride for tap in range(kernel)]
        axes.append([phases.count(phase) for phase in range(stride)])
    return [d * h for d, h in product(*axes)]


def takes_longest_first(
    taps: Sequence[int], together: int, boxes: int, in_turn: int, resident: int, around: float
) -> bool:
    """Whether blocks should take all boxes of the first phases first, in rounds to and fro, instead of phases in turn.

    Parameters
    ----------
    taps : sequence of int
        Rows of taps of each phase.
    together : int
        Boxes of a phase that follow each other: tiles of channels, and groups.
    boxes : int
        Boxes of each phase, besides that.
    in_turn, resident : int
        Blocks of the launch in the usual order, and as many as the device holds.
    around : float
        What a box takes besides its rows of taps.
    """
    count = together * boxes * len(taps)
    if len(set(taps)) == 1 or not resident < count <= MOST_ROUNDS * resident:
        return False
    usual = (taps[index // together % len(taps)] for index in range(count))
    longest = (taps[index // (together * boxes)] for index in range(count))
    return _busiest(longest, resident, around, True) < WORTH * _busiest(usual, in_turn, around, False)


def _busiest(taps: Iterable[int], blocks: int, around: float, to_and_fro: bool) -> float:
    """Return what the busiest block has to do, of boxes with so many rows of taps, one after the other."""
    work = [0.0] * blocks
    for index, rows in enumerate(taps):
        turn, block = divmod(index, blocks)
        work[blocks - 1 - block if to_and_fro and turn % 2 else block] += rows + around
    return max(work)
