"""Problems whose results of 16 bits, in rows, a thread of phase_wgmma stores together: 16 bytes, a word, or one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from described import problem_of
from host_phase_wgmma import PASSING, plan_with
from strategies import Problem, case

from cuconvt.plan import Plan
from cuconvt.plan_wgmma_sizes import Tile


def tile(workers: int, tiles_m: int, tiles_c: int, slides: bool = False) -> Tile:
    return dataclasses.replace(
        PASSING,
        workers=workers,
        stagers=workers,
        tiles_m=tiles_m,
        tiles_c=tiles_c,
        ring=3,
        min_blocks=3 - workers,
        slides=slides,
    )


# A problem, the tile, whether boxes are patches, and how many results are stored together.
TOGETHER: dict[str, tuple[Problem, Tile, bool, int]] = {
    "a patch": (case((2, 9, 16, 16), 17, 3, padding=1, has_bias=True), tile(1, 1, 3), True, 8),
    "patches beside each other": (case((2, 9, 16, 32), 16, 3, padding=1, has_bias=True), tile(2, 2, 2), True, 8),
    "patches of two workers": (case((1, 9, 24, 24), 40, 3, padding=1, has_bias=True), tile(2, 1, 5), True, 8),
    "three patches": (case((1, 9, 8, 48), 9, 3, padding=1), tile(1, 3, 2), True, 8),
    "one eight of channels": (case((1, 9, 8, 16), 7, 3, padding=1, has_bias=True), tile(1, 1, 1), True, 8),
    "rows as long as A's": (case((3, 17, 5, 24), 33, (3, 1), padding=(1, 0), has_bias=True), tile(2, 2, 3), False, 8),
    "slices": (case((2, 9, 5, 8, 16), 19, 3, padding=1, has_bias=True), tile(2, 1, 2, slides=True), True, 8),
    "groups": (case((1, 34, 9, 16), 66, 3, padding=1, groups=2), tile(2, 2, 4), True, 8),
    "words": (case((2, 9, 6, 18), 19, 3, padding=1, has_bias=True), tile(2, 1, 3), False, 2),
    "words of patches": (case((1, 9, 9, 22), 16, 3, padding=1, has_bias=True), tile(1, 2, 2), True, 2),
    "one by one": (case((2, 9, 6, 17), 23, 3, padding=1, has_bias=True), tile(2, 2, 3), False, 1),
    "misaligned": (
        case((2, 9, 8, 16), 17, 3, padding=1, has_bias=True, out_layout="misaligned"),
        tile(1, 1, 3),
        True,
        1,
    ),
}


def planner(name: str) -> tuple[Callable[..., Plan], set[int]]:
    """Return the planner of a problem of the table, and how many results its plans store together."""
    _, own, patches, _ = TOGETHER[name]
    seen: set[int] = set()

    def plan(*problem: Any) -> Plan:
        planned = plan_with(own, patches)("phase_wgmma", *problem)
        fields = problem_of(planned)
        assert any(fields["patches"]) == patches
        seen.add(fields["together"][0])
        return planned

    return plan, seen
