"""How blocks share the columns along D that they walk through, one slice after the other.

Neighbouring columns read the same x, which comes from memory once where blocks are at about the same slice of them at a
time. So columns are dealt whole, a round after the other, or in equal parts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from cuconvt.plan import Ints

LEAST_USED = 0.9  # of the blocks that a device holds, for blocks to keep to the weights of one set of columns
MAX_PARTS = 256  # of a column
LONGER = 32  # parts longer than the shortest that are tried, beside the rest of a column
OF_RESTS = 1.05  # how much longer it must take without: neighbours of a rest are read at other times


class Shares(NamedTuple):
    """Rounds of columns; the parts of those that are left, and the rest of these, which other blocks have.

    Everything but `grid`, `boxes` and `whole` is counted within a set of columns.

    Attributes
    ----------
    grid : int
        Blocks of the launch.
    boxes : int
        Columns and parts that blocks count, empty ones included.
    whole : int
        Columns that are dealt whole, `grid` a round.
    sets : int
        Columns that share weights are a set, to which a block keeps; or 1, where blocks take any column.
    left : int
        The other columns, which have parts.
    part, parts : int
        Slices of a part, and how many parts of `left` columns there are; they are dealt in rounds, too.
    others : int
        Blocks that have no such part, but what these leave of the columns, from `rest` on; none: 0.
    rest : int
        Its first slice.
    rounds : int
        In which the others take it of whole columns.
    rest_part : int
        Slices of its parts, which are taken of the columns that are left then.
    """

    grid: int
    boxes: int
    whole: int
    sets: int
    left: int = 0
    part: int = 0
    parts: int = 0
    others: int = 0
    rest: int = 0
    rounds: int = 0
    rest_part: int = 0

    @property
    def parameters(self) -> Ints:
        """`shares` of ``struct Problem``."""
        return self[2:]


def share_columns(columns: int, extent: int, reach: int, sets: int, stay: bool, held: int) -> Shares:
    """Return the shares of so many columns of so many slices that are done first.

    Parameters
    ----------
    columns, extent : int
        How many columns there are, in all sets, and how many slices each has.
    reach : int
        Slices that are read before the first one of a part.
    sets : int
        Columns are numbered so that those of a set are so many apart.
    stay : bool
        Whether blocks have to keep to a set, since its weights stay with them.
    held : int
        Blocks that the device holds at a time.
    """
    if not stay and held // sets * sets < LEAST_USED * held:
        sets = 1
    blocks = max(1, held // sets)  # of a set
    every = columns // sets
    best, least = Shares(sets * min(blocks, every), columns, columns, sets), float(extent * -(-every // blocks))
    for rounds in dict.fromkeys((every // blocks, 0)):
        left, whole = every - rounds * blocks, rounds * blocks * sets
        for division in _divisions(left, extent, reach, blocks) if left else ():
            cost = (rounds * extent + division.slices) * (OF_RESTS if division.others else 1)
            if cost < least:
                used = sets * (blocks if rounds else min(blocks, division.parts + division.others))
                *of_left, boxes, _ = division
                best, least = Shares(used, whole + boxes * used, whole, sets, *of_left), cost
    return best


class Division(NamedTuple):
    """A way to divide the columns of a set that are left: as in `Shares`, and of a block.

    Attributes
    ----------
    boxes : int
        Parts that a block counts.
    slices : int
        Those that the block with most of them reads.
    """

    left: int
    part: int
    parts: int
    others: int
    rest: int
    rounds: int
    rest_part: int
    boxes: int
    slices: int


def _divisions(left: int, extent: int, reach: int, blocks: int) -> Iterator[Division]:
    for parts in range(2, min(extent, MAX_PARTS) + 1):
        part = -(-extent // parts)
        parts = -(-extent // part)  # none is empty
        rounds = -(-left * parts // blocks)
        yield Division(left, part, left * parts, 0, 0, 0, 0, rounds, rounds * (part + reach))
    # One round of parts, that do not reach the end, and blocks that have no part.
    parts, others = divmod(blocks, left)
    if not (parts and others):
        return
    shortest = -(-left * extent // blocks)
    for part in range(shortest, min(shortest + LONGER, -(-extent // parts))):
        rest, (rounds, last) = extent - parts * part, divmod(left, others)
        slices, rest_part = rounds * (rest + reach), 0
        if last:
            rest_part = -(-rest // (others // last))
            slices += rest_part + reach
        boxes = rounds + (last > 0)
        of_others = others, parts * part, rounds, rest_part
        yield Division(left, part, parts * left, *of_others, boxes, max(part + reach, slices))
