"""The ways in which narrow_groups stores a result, on the host."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from described import DEVICES, geometry_of, layout_of, problem_of
from harness import call, check
from host.backend import on_host
from host.build import why_not
from host_narrow_groups import plan_tile
from strategies import DTYPES, Problem, case, place

from cuconvt import plan_narrow_groups as narrow
from cuconvt.plan import Plan
from cuconvt.plan_narrow_groups import Tile

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))

ONE_BY_ONE, VECTORS, WINDOWS, BOTH_EIGHTS = 0, 1, 2, 2
ROWS_OF_BOX, WHOLE_ROWS = 1, 2
WIDE, NARROW = Tile(2, 1, 1, False, False, 2), Tile(1, 1, 1, False, True, 4)
HALF = Tile(1, 1, 1, True, False, 4)
BOXED, BOXED_PAIR = Tile(1, 1, 1, True, False, 3, boxed=True), Tile(2, 2, 1, False, True, 3, boxed=True)
SPLIT, LONG_SPLIT = Tile(2, 1, 1, False, False, 4, split=True), Tile(4, 1, 1, False, False, 3, split=True)
TWO_EIGHTS, TWO_GROUPS = Tile(1, 2, 1, False, False, 2), Tile(1, 2, 1, True, True, 2, 2)
EVEN = case((2, 16, 3, 4, 32), 12, 4, 2, padding=1, groups=2, has_bias=True)  # 64 outputs a row
ODD = case((2, 16, 3, 4, 32), 12, 3, 2, padding=1, groups=2, has_bias=True)  # 63
WIDE_ODD = case((2, 16, 3, 3, 64), 12, 3, 2, padding=1, groups=2)  # 127
HOLES = case((2, 16, 3, 4, 32), 12, (1, 3, 3), (3, 2, 2), padding=(0, 1, 1), groups=2, has_bias=True)
LONG = case((1, 8, 3, 96), 8, (3, 5), (1, 4), padding=(1, 2), has_bias=True)  # 381, in several boxes
ONCE = case((1, 8, 3, 3, 36), 8, 3, padding=1)
LAST = case((2, 16, 3, 4, 9), 16, 3, 2, groups=2, has_bias=True, x_layout="channels_last", out_layout="channels_last")
LAST_ONCE = dataclasses.replace(LAST, stride=(1, 2, 1), x_layout="contiguous")
LAST_OF_FIVE = dataclasses.replace(LAST, c_in_per_group=5, dilation=(1, 1, 2))
MISALIGNED = case((2, 16, 3, 4, 32), 12, 4, 2, padding=1, groups=2, out_layout="misaligned")


def wide(c_out: int, stride: int) -> Problem:
    layouts = {"x_layout": "channels_last", "out_layout": "channels_last"}
    return case((1, 32, 3, 4, 9), 2 * c_out, 3, stride, groups=2, has_bias=True, **layouts)


STORED = {
    "vectors-of-two-cells": (EVEN, "float32", "tf32x3", WIDE, VECTORS),
    "vectors-of-four-cells": (EVEN, "float16", None, HALF, VECTORS),
    "vectors-of-a-row-of-cells": (ONCE, "float32", "tf32", NARROW, VECTORS),
    "vectors-of-a-cell": (case((1, 8, 40), 8, 9, 8, padding=1, output_padding=1), "bfloat16", None, HALF, VECTORS),
    "windows": (ODD, "float32", "tf32", WIDE, WINDOWS),
    "windows-of-several-boxes": (LONG, "float32", "tf32", WIDE, WINDOWS),
    "windows-of-two-rows": (ODD, "float32", "tf32", LONG_SPLIT, WINDOWS),
    "windows-of-two-rows-of-two-planes": (
        dataclasses.replace(ODD, extent=(4, 3, 32)),
        "float32",
        "tf32",
        LONG_SPLIT,
        WINDOWS,
    ),
    "split-vectors": (EVEN, "float32", "tf32x3", Tile(2, 1, 1, False, False, 2, split=True), VECTORS),
    "split-one-by-one": (ODD, "float32", "tf32x3", SPLIT, ONE_BY_ONE),
    "split-where-a-residue-has-no-tap": (HOLES, "float32", "tf32x3", SPLIT, ONE_BY_ONE),
    "split-pairs-of-channels": (LAST, "float32", "tf32x3", SPLIT, VECTORS),
    "split-both-eights": (wide(16, 2), "float16", None, Tile(1, 2, 1, False, False, 2, split=True), BOTH_EIGHTS),
    "one-by-one": (ODD, "bfloat16", None, HALF, ONE_BY_ONE),
    "one-by-one-of-three": (case((1, 8, 30), 8, 5, 3), "float32", "tf32x3", WIDE, ONE_BY_ONE),
    "boxes-of-even-rows": (EVEN, "float16", None, BOXED, WHOLE_ROWS),
    "boxes-of-odd-rows": (ODD, "bfloat16", None, BOXED, WHOLE_ROWS),
    "boxes-of-two-eights": (case((1, 16, 3, 4, 20), 13, 3, 2, has_bias=True), "bfloat16", None, BOXED_PAIR, WHOLE_ROWS),
    "boxes-of-parts-of-rows": (case((2, 8, 700), 8, 5, 4, padding=1), "float16", None, BOXED, ROWS_OF_BOX),
    "boxes-of-three-outputs-a-cell": (case((1, 8, 5, 31), 8, 5, 3), "float16", None, BOXED, WHOLE_ROWS),
    "pairs-of-channels": (LAST, "bfloat16", None, HALF, VECTORS),
    "two-groups": (LAST, "bfloat16", None, TWO_GROUPS, BOTH_EIGHTS),
    "two-groups-of-one-output-a-cell": (LAST_ONCE, "float16", None, TWO_GROUPS, BOTH_EIGHTS),
    "two-groups-of-few-inputs": (LAST_OF_FIVE, "float16", None, TWO_GROUPS, BOTH_EIGHTS),
    "two-eights": (wide(16, 2), "float16", None, TWO_EIGHTS, BOTH_EIGHTS),
    "two-eights-of-several-tiles": (wide(24, 2), "bfloat16", None, TWO_EIGHTS, BOTH_EIGHTS),
    "two-eights-of-one-output-a-cell": (wide(12, 1), "bfloat16", None, TWO_EIGHTS, BOTH_EIGHTS),
    "two-eights-of-twelve-channels": (wide(12, 2), "float16", None, TWO_EIGHTS, BOTH_EIGHTS),
    "two-eights-in-pairs-of-channels": (wide(10, 2), "bfloat16", None, TWO_EIGHTS, VECTORS),
    "two-eights-one-by-one": (wide(11, 2), "float16", None, TWO_EIGHTS, ONE_BY_ONE),
}


def plan_of(problem: Problem, dtype: str, precision: str | None, tile: Tile) -> Plan:
    geometry = geometry_of(problem)
    layout = layout_of(geometry, problem.out_layout == "channels_last")
    return plan_tile(tile)("narrow_groups", geometry, dtype, layout, precision, DEVICES[90])


@pytest.mark.parametrize("name", STORED)
def test_results_are_stored(name: str) -> None:
    problem, dtype, precision, tile, way = STORED[name]
    assert problem_of(plan_of(problem, dtype, precision, tile))["out_vector"] == (way,)
    with on_host("narrow_groups", DEVICES[90], precision, plan=plan_tile(tile)):
        check(problem, dtype, precision=precision)


@pytest.mark.parametrize(("dtype", "precision"), [("float32", "tf32"), ("float32", "tf32x3"), ("float16", None)])
@pytest.mark.parametrize("width", [62, 64])
def test_a_long_run_is_stored(dtype: str, precision: str | None, width: int) -> None:
    """On a small GPU boxes are large, so that a warp has a single row of each."""
    problem, device = (
        dataclasses.replace(WIDE_ODD, extent=(3, 3, width)),
        dataclasses.replace(DEVICES[90], multiprocessors=1),
    )
    tile = Tile(4, 1, 1, dtype == "float16", False, 2, split=True)
    geometry = geometry_of(problem)
    plan = plan_tile(tile)("narrow_groups", geometry, dtype, layout_of(geometry), precision, device)
    assert problem_of(plan)["box"][2] % tile.cells == 0
    assert problem_of(plan)["out_vector"] == (WINDOWS,)
    with on_host("narrow_groups", device, precision, plan=plan_tile(tile)):
        check(problem, dtype, precision=precision)


@pytest.mark.parametrize(("dtype", "precision", "tile"), [("float32", "tf32", WIDE), ("float16", None, HALF)])
def test_misaligned_results_are_stored(dtype: str, precision: str | None, tile: Any) -> None:
    with on_host("narrow_groups", DEVICES[90], precision, plan=plan_tile(tile)):
        check(MISALIGNED, dtype, precision=precision)


@pytest.mark.parametrize("x_width", [31, 32, 34])
@pytest.mark.parametrize("out_layout", ["contiguous", "misaligned", "cropped", "sliced"])
def test_boxes_of_rows_anywhere_are_stored(out_layout: str, x_width: int) -> None:
    """Of x, 16 bytes are fetched at a time, four, or elements are loaded."""
    problem = dataclasses.replace(ODD, extent=(3, 4, x_width), out_layout=out_layout)
    geometry = geometry_of(problem)
    plan = plan_tile(BOXED)("narrow_groups", geometry, "float16", layout_of(geometry), None, DEVICES[90])
    assert problem_of(plan)["x_vector"] == ({31: 0, 32: 16, 34: 4}[x_width],)
    with on_host("narrow_groups", DEVICES[90], plan=plan_tile(BOXED)):
        check(problem, "float16")


def test_boxes_are_of_halves_and_of_large_results() -> None:
    def tiles(problem: Problem, dtype: str, precision: str | None = None) -> set[bool]:
        geometry = geometry_of(problem)
        layout = layout_of(geometry, problem.out_layout == "channels_last")
        return {tile.boxed for tile in narrow.tiles(narrow.Work.of_problem(geometry, dtype, precision, layout))}

    assert tiles(ODD, "float16") == {False, True}
    assert tiles(ODD, "float32", "tf32") == tiles(ONCE, "bfloat16") == tiles(LAST, "bfloat16") == {False}


def test_a_group_does_not_see_the_other_one() -> None:
    """An infinity times a weight of zero would be a NaN."""
    x, weight, _ = LAST.arrays(DTYPES["float16"])
    x[:, :8] = np.inf
    with on_host("narrow_groups", DEVICES[90], plan=plan_tile(TWO_GROUPS)):
        result = call(LAST, place(x, 3, "channels_last")[0], weight)
    assert not np.isfinite(result[:, :8]).any()
    assert np.isfinite(result[:, 8:]).all()
