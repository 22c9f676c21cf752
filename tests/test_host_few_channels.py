"""few_channels on the host: stores, whole ones where the output allows them and others, and blocks of small planes."""

from __future__ import annotations

import math

import numpy as np
import pytest
from described import DEVICES, geometry_of, layout_of
from harness import call, check
from host.backend import on_host, plan_family
from host.build import why_not
from reference import Expected
from strategies import DTYPES, Problem, case, place

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))

ELEMENTS = {"float16": 8, "bfloat16": 8, "float32": 4, "float64": 2}  # of a whole store


def whole_stores(dtype: str, out_layout: str, x_layout: str = "contiguous") -> Problem:
    """Return a depthwise problem whose rows, and runs of channels, are a multiple of 16 bytes."""
    kernel, stride = (9, 1) if dtype == "float64" else (4, 2)
    layouts = {"x_layout": x_layout, "out_layout": out_layout}
    return case((2, 8, 5, 20), 8, kernel, stride, padding=1, groups=8, has_bias=True, **layouts)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_stored_whole_or_turned(dtype: str) -> None:
    problem = whole_stores(dtype, "contiguous")
    geometry = geometry_of(problem)
    plan = plan_family("few_channels", geometry, dtype, layout_of(geometry), None, DEVICES[90])
    assert dict(plan.defines)["POSITIONS_W"] * problem.stride[-1] == ELEMENTS[dtype]
    assert problem.out_shape[-1] % ELEMENTS[dtype] == 0
    with on_host("few_channels", DEVICES[90]):
        for out_layout in ("contiguous", "misaligned"):
            check(whole_stores(dtype, out_layout), dtype)


@pytest.mark.parametrize(
    ("extent", "threads", "idle"), [((9, 3, 4), 32, 0), ((2, 55, 28), 64, 1), ((3, 12, 32), 96, 0)]
)
def test_blocks_suit_the_rows_of_a_plane(extent: tuple[int, int, int], threads: int, idle: int) -> None:
    """Some have fewer warps than others, and some warps nothing to do."""
    problem = case((2, 2, *extent), 2, 3, padding=1, groups=2, has_bias=True)
    geometry = geometry_of(problem)
    plan = plan_family("few_channels", geometry, "float32", layout_of(geometry), None, DEVICES[90])
    width = dict(plan.defines)["POSITIONS_W"]
    positions = extent[1] * -(-extent[2] // width)
    assert plan.block == threads
    assert (-positions % threads) // 32 == idle
    with on_host("few_channels", DEVICES[90]):
        check(problem, "float32")


@pytest.mark.parametrize(("dtype", "vector"), [("float16", 2), ("bfloat16", 2), ("float32", 1)])
def test_pairs_of_channels_are_stored_whole_or_one_by_one(dtype: str, vector: int) -> None:
    last = whole_stores(dtype, "channels_last", "channels_last")
    geometry = geometry_of(last)
    plan = plan_family("few_channels", geometry, dtype, layout_of(geometry, last=True), None, DEVICES[90])
    assert dict(plan.defines)["VECTOR"] == vector
    values = last.arrays(DTYPES[dtype])
    x, _ = place(values[0], last.rank, "channels_last")
    n, channels, *extent = last.out_shape
    shifted = np.empty(1 + math.prod(last.out_shape), DTYPES[dtype])[1:].reshape(n, *extent, channels)
    out = np.moveaxis(shifted, -1, 1)
    with on_host("few_channels", DEVICES[90]):
        check(last, dtype)
        call(last, x, *values[1:], out=out)
    Expected(last, *values).assert_close(out.copy(), None)
