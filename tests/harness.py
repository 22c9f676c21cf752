"""The one check that every backend passes: values, layout of the result, `out`, and a bitwise repeat."""

from __future__ import annotations

from typing import Any

import numpy as np
from reference import Expected
from strategies import DTYPES, Problem, place

import cuconvt


def call(problem: Problem, x: Any, weight: Any, bias: Any = None, **keywords: Any) -> Any:
    """Call the function of the problem's rank with the problem's parameters."""
    function = getattr(cuconvt, f"conv_transpose{problem.rank}d")
    return function(x, weight, bias, **problem.parameters, **keywords)


def to_numpy(array: Any) -> np.ndarray:
    """Copy a NumPy or CuPy array to a NumPy one, bfloat16 included."""
    if isinstance(array, np.ndarray):
        return array.copy()
    return array.view(f"i{array.dtype.itemsize}").get().view(array.dtype)


def is_channels_last(array: Any, rank: int) -> bool:
    """Whether the channels are the fastest axis of an otherwise contiguous array."""
    axes = list(range(array.ndim))
    axes.append(axes.pop(-rank - 1))
    return bool(array.transpose(axes).flags.c_contiguous)


def check(problem: Problem, dtype: str, xp: Any = np, precision: str | None = None, calls: int = 3) -> None:
    """Run a problem with arrays of `xp` (numpy or cupy) and compare everything that the contract promises.

    The first of up to three `calls` writes to an `out` of the problem's layout, the second must give it the same bits
    again, and the third allocates its result: in the layout of x, for which there may be another program.
    """
    values = problem.arrays(DTYPES[dtype])
    expected = Expected(problem, *values)
    x, x_buffer = place(values[0], problem.rank, problem.x_layout, xp)
    weight, weight_buffer = place(values[1], problem.rank, problem.weight_layout, xp)
    bias, bias_buffer = (None, None) if values[2] is None else place(values[2], 1, problem.bias_layout, xp)
    inputs_before = [b.copy() for b in (x_buffer, weight_buffer, bias_buffer) if b is not None]

    if calls == 3:
        y = call(problem, x, weight, bias, precision=precision)
        assert type(y) is xp.ndarray
        expected.assert_close(to_numpy(y), precision)
        if x.flags.c_contiguous:
            assert y.flags.c_contiguous
        elif is_channels_last(x, problem.rank):
            assert is_channels_last(y, problem.rank)

    out, out_buffer = place(np.full(problem.out_shape, np.nan, DTYPES[dtype]), problem.rank, problem.out_layout, xp)
    results = []
    for _ in range(min(calls, 2)):
        out_buffer.fill(-1)  # all bits set: NaN, inside and outside of `out`
        assert call(problem, x, weight, bias, precision=precision, out=out) is out
        results.append(to_numpy(out))
    expected.assert_close(results[0], precision)
    assert results[0].tobytes() == results[-1].tobytes(), f"two calls gave two results, {dtype}, {problem}"

    out.view(out_buffer.dtype)[...] = -1
    assert (out_buffer == -1).all(), f"memory beside out was written, {dtype}, {problem}"
    inputs_after = [b for b in (x_buffer, weight_buffer, bias_buffer) if b is not None]
    for before, after in zip(inputs_before, inputs_after, strict=True):
        assert (before == after).all(), f"an input was written, {dtype}, {problem}"
