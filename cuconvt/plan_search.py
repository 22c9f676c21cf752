"""What planners share that choose the best of many tiles: sizes computed once a tile, and a search by bounds."""

from __future__ import annotations

import functools
import heapq
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

ROUNDINGS = 1e-9  # of a cost, relative to it: more than they are

Tile = TypeVar("Tile")
Size = TypeVar("Size")


def of_tile(method: Callable[[Any, Any], Size]) -> Callable[[Any, Any], Size]:
    """Keep what a method returns for a tile until it is asked for another one: all boxes of a tile have it in common.

    The object keeps it as `tile` and `sizes`, which are None and empty before.
    """

    @functools.wraps(method)
    def kept(work: Any, tile: Any) -> Size:
        if work.tile is not tile:
            work.tile, work.sizes = tile, {}
        if method not in work.sizes:
            work.sizes[method] = method(work, tile)
        size: Size = work.sizes[method]
        return size

    return kept


def cheapest_tile(
    bounded: Iterable[tuple[float, Tile]], *estimates: Callable[[Tile], float | None]
) -> tuple[Tile, float] | None:
    """Return the tile with the least cost, with that, of tiles with lower bounds of it, or None if none serves.

    Each estimate takes longer than the one before and is closer, or None for a tile that does not serve: bounds, too,
    but for the last one, which is the cost. What is estimated next is always the tile with the least bound. Of tiles
    that cost the same, the one with the least first bound is the best, and then the first one.
    """
    every = list(bounded)
    queue = [(bound, i, 0) for i, (bound, _) in enumerate(every)]
    heapq.heapify(queue)
    best: tuple[float, float, int] | None = None
    while queue and (best is None or queue[0][0] <= best[0] * (1 + ROUNDINGS)):
        _, i, done = heapq.heappop(queue)
        bound, tile = every[i]
        cost = estimates[done](tile)
        if cost is None:
            continue
        if done + 1 < len(estimates):
            heapq.heappush(queue, (cost, i, done + 1))
        elif best is None or (cost, bound, i) < best:
            best = cost, bound, i
    return None if best is None else (every[best[2]][1], best[0])
