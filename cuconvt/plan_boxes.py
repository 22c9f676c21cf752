"""How boxes cut axes."""

from __future__ import annotations

from cuconvt.plan import Ints


def even_extent(extent: int, most: int) -> int:
    """Return the least box extent that cuts an axis into no more boxes than `most` does."""
    if most < 1:
        return 0
    return -(-extent // -(-extent // min(most, extent)))


def count_boxes(extents: Ints, box: Ints) -> int:
    """Return how many boxes of such extents an array takes."""
    (d, h, w), (of_d, of_h, of_w) = extents, box
    return -(-d // of_d) * -(-h // of_h) * -(-w // of_w)
