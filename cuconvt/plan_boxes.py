"""How boxes cut axes."""

from __future__ import annotations

from math import prod

from cuconvt.plan import Ints


def even_extent(extent: int, most: int) -> int:
    """Return the least box extent that cuts an axis into no more boxes than `most` does."""
    if most < 1:
        return 0
    return -(-extent // -(-extent // min(most, extent)))


def count_boxes(extents: Ints, box: Ints) -> int:
    """Return how many boxes of such extents an array takes."""
    return prod(-(-q // b) for q, b in zip(extents, box, strict=True))
