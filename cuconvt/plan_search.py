"""What planners share that choose the best of many tiles.

Sizes computed once a tile, a search by bounds, problems of about one size, and what was found: kept for the process
and, where a caller asks for it, beyond that (`kept_in`).
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from math import prod
from typing import Any, Protocol, TypeVar

ROUNDINGS = 1e-9  # of a cost, relative to it: more than they are
# Sizes alike share a tile, which is compiled once, unless one of its own takes less than so much of the estimated time.
# It is looked for where a position takes so much longer than in the size that the shared tile is best for.
LEAST_GAIN_OF_SIZE = 0.9
WORTH_A_SEARCH = 1.15

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
        try:
            size: Size = work.sizes[method]
        except KeyError:
            size = work.sizes[method] = method(work, tile)
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


def step_of_size(extent: int) -> int:
    """Return an extent that others share a tile with: the nearest of 1, 2, 3, 4, 6, 8, 12, 16, 24, 32 and so on."""
    below = 1 << extent.bit_length() - 1
    steps = (below, below + below // 2, 2 * below)
    return min(steps, key=lambda step: max(step, extent) / min(step, extent))


def tile_for_size(
    n: int,
    extents: tuple[int, ...],
    search: Callable[[int, tuple[int, ...]], Tile | None],
    clocks: Callable[[Tile, int, tuple[int, ...]], float],
    usual: tuple[Tile, float] | None = None,
) -> Tile | None:
    """Return the best tile for so many positions, or that of sizes alike where it takes little longer, or None.

    `search` finds the best one for a size, of which `clocks` estimates how long a tile takes. With `usual`, a tile
    and a part of its clocks, others have to take less than that.
    """
    alike = step_of_size(n), tuple(map(step_of_size, extents))
    shared, least_gain = search(*alike), LEAST_GAIN_OF_SIZE
    if shared is None:
        return None
    least = clocks(shared, *alike)
    if usual is not None and least > usual[1] * (of_usual := clocks(usual[0], *alike)):
        (shared, least_gain), least = usual, of_usual
    now, more = clocks(shared, n, extents), n * prod(extents) / (alike[0] * prod(alike[1]))
    if now <= WORTH_A_SEARCH * more * least:
        return shared
    own = search(n, extents)
    return own if own is not None and clocks(own, n, extents) <= least_gain * now else shared


class Store(Protocol):
    """Where findings are kept beyond the process, each a JSON value, by what was asked."""

    def find(self, question: str, decode: Callable[[Any], Any]) -> Any:
        """Return what `decode` makes of the value, or raise KeyError where there is none or it is not sound."""

    def keep(self, question: str, value: Any) -> None: ...


_store: ContextVar[Store | None] = ContextVar("store", default=None)


@contextmanager
def kept_in(store: Store) -> Iterator[None]:
    """Look in a store before searching, and keep there what is found, within the context."""
    before = _store.set(store)
    try:
        yield
    finally:
        _store.reset(before)


def remembered(tile: type[Any] | None = None) -> Callable[[Callable[..., Any]], Any]:
    """Keep what a search returns: None, a number, a tile of this type, or such a tile with its cost.

    It has to follow from the arguments alone, which compare equal exactly where their texts are equal.
    """

    def decorate(search: Callable[..., Any]) -> Any:
        @functools.lru_cache(maxsize=1024)
        @functools.wraps(search)
        def found(*arguments: Any) -> Any:
            store = _store.get()
            if store is None:
                return search(*arguments)
            question = f"{search.__module__}.{search.__name__}{arguments}"
            try:
                return store.find(question, lambda value: _decode(value, tile))
            except KeyError:
                result = search(*arguments)
                store.keep(question, _encode(result))
                return result

        return found

    return decorate


def _encode(result: Any) -> Any:
    if result is None or isinstance(result, float):
        return result
    tile, cost = result if isinstance(result, tuple) else (result, None)
    return {"tile": dataclasses.asdict(tile), "cost": cost}


def _decode(value: Any, tile: type[Any] | None) -> Any:
    """Undo `_encode`, or raise one of the errors of values that are something else."""
    if value is None or isinstance(value, float):
        return value
    if tile is None:
        raise TypeError("no tile is expected")
    fields = {name: tuple(one) if isinstance(one, list) else one for name, one in value["tile"].items()}
    found, cost = tile(**fields), value["cost"]
    return found if cost is None else (found, float(cost))
