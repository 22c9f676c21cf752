"""Infinities, NaN, denormals and extreme scales: arguments with them, and what a result must then be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import reference
from harness import call, to_numpy
from strategies import DTYPES, Problem

TINY = np.finfo(np.float32).tiny
SCALES = ((1e30, 1.0), (1e-30, 1.0), (1.0, 1e30), (1.0, 1e-30), (1e30, 1e-30), (1e-30, 1e30))  # of x and weight


def check_infinities(problem: Problem, convert: Callable[[Any], Any], precision: str | None) -> None:
    """Infinities and NaN in x reach the outputs that the definition takes them to, and no others."""
    x, weight, bias = problem.arrays(DTYPES["float32"])
    x.flat[[0, x.size // 3, x.size // 2, -1]] = np.inf, np.nan, -np.inf, np.inf
    with np.errstate(invalid="ignore"):
        expected = reference.direct(problem, x, weight, bias)
    got = to_numpy(call(problem, convert(x), convert(weight), convert(bias), precision=precision))
    for test in (np.isnan, np.isposinf, np.isneginf):
        assert np.array_equal(test(got), test(expected)), test.__name__


def check_scales(problem: Problem, convert: Callable[[Any], Any], precision: str | None) -> None:
    """The largest and smallest values lose no more than others."""
    x, weight, _ = problem.arrays(DTYPES["float32"])
    for of_x, of_weight in SCALES:
        scaled = x * np.float32(of_x), weight * np.float32(of_weight)
        got = to_numpy(call(problem, *map(convert, scaled), precision=precision))
        reference.Expected(problem, *scaled, None).assert_close(got, precision)


def check_denormals(problem: Problem, convert: Callable[[Any], Any], precision: str | None) -> None:
    """Denormals of x count as what they are or as zeros, beside normal values and alone."""
    for every in (1, 2):
        x, weight, _ = problem.arrays(DTYPES["float32"])
        x.flat[::every] *= TINY / 8
        flushed = np.where(np.abs(x) < TINY, TINY, np.abs(x) * 2.0**-20)
        allowed = reference.exact(problem, flushed, np.abs(weight), None)
        got = to_numpy(call(problem, convert(x), convert(weight), precision=precision))
        assert (np.abs(got - reference.exact(problem, x, weight, None)) <= allowed).all()
