"""The ways in which narrow_groups stores a result, on the host."""

from __future__ import annotations

from typing import Any

import pytest
from described import DEVICES, geometry_of, layout_of
from harness import check
from host.backend import on_host
from host.build import why_not
from host_narrow_groups import plan_tile
from strategies import Problem, case
from test_plan import problem_of

from cuconvt.plan import Plan
from cuconvt.plan_narrow_groups import Tile

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))

ONE_BY_ONE, VECTORS, WINDOWS = 0, 1, 2
WIDE, NARROW = Tile(2, 1, 1, False, False, 2), Tile(1, 1, 1, False, True, 4)
HALF = Tile(1, 1, 1, True, False, 4)
EVEN = case((2, 16, 3, 4, 32), 12, 4, 2, padding=1, groups=2, has_bias=True)  # 64 outputs a row
ODD = case((2, 16, 3, 4, 32), 12, 3, 2, padding=1, groups=2, has_bias=True)  # 63
LONG = case((1, 8, 3, 96), 8, (3, 5), (1, 4), padding=(1, 2), has_bias=True)  # 381, in several boxes
ONCE = case((1, 8, 3, 3, 36), 8, 3, padding=1)
LAST = case((2, 16, 3, 4, 9), 16, 3, 2, groups=2, has_bias=True, x_layout="channels_last", out_layout="channels_last")
MISALIGNED = case((2, 16, 3, 4, 32), 12, 4, 2, padding=1, groups=2, out_layout="misaligned")

STORED = {
    "vectors-of-two-cells": (EVEN, "float32", "tf32x3", WIDE, VECTORS),
    "vectors-of-four-cells": (EVEN, "float16", None, HALF, VECTORS),
    "vectors-of-a-row-of-cells": (ONCE, "float32", "tf32", NARROW, VECTORS),
    "vectors-of-a-cell": (case((1, 8, 40), 8, 9, 8, padding=1, output_padding=1), "bfloat16", None, HALF, VECTORS),
    "windows": (ODD, "float32", "tf32", WIDE, WINDOWS),
    "windows-of-several-boxes": (LONG, "float32", "tf32", WIDE, WINDOWS),
    "one-by-one": (ODD, "bfloat16", None, HALF, ONE_BY_ONE),
    "one-by-one-of-three": (case((1, 8, 30), 8, 5, 3), "float32", "tf32x3", WIDE, ONE_BY_ONE),
    "pairs-of-channels": (LAST, "bfloat16", None, HALF, VECTORS),
}


def plan_of(problem: Problem, dtype: str, precision: str | None, tile: Tile) -> Plan:
    geometry = geometry_of(problem)
    layout = layout_of(geometry, problem.x_layout == "channels_last")
    return plan_tile(tile)("narrow_groups", geometry, dtype, layout, precision, DEVICES[90])


@pytest.mark.parametrize("name", STORED)
def test_results_are_stored(name: str) -> None:
    problem, dtype, precision, tile, way = STORED[name]
    assert problem_of(plan_of(problem, dtype, precision, tile))["out_vector"] == (way,)
    with on_host("narrow_groups", DEVICES[90], precision, plan=plan_tile(tile)):
        check(problem, dtype, precision=precision)


@pytest.mark.parametrize(("dtype", "precision", "tile"), [("float32", "tf32", WIDE), ("float16", None, HALF)])
def test_misaligned_results_are_stored(dtype: str, precision: str | None, tile: Any) -> None:
    with on_host("narrow_groups", DEVICES[90], precision, plan=plan_tile(tile)):
        check(MISALIGNED, dtype, precision=precision)
