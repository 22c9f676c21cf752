"""The NumPy backend against float64 references."""

from __future__ import annotations

import dataclasses
import tracemalloc
from typing import Any

import numpy as np
import pytest
import reference
from fixed_cases import FIXED, SPECIAL
from harness import call, check
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import DTYPES, LAYOUTS, OUT_LAYOUTS, Problem, case, problems

import cuconvt

EXAMPLES = settings().max_examples


@given(problem=problems(), dtype=st.sampled_from(sorted(DTYPES)))
def test_any_problem(problem: Problem, dtype: str) -> None:
    check(problem, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FIXED)
def test_fixed_case(name: str, dtype: str) -> None:
    check(FIXED[name], dtype)


@pytest.mark.parametrize("precision", ["tf32x3", "ieee", "tf32"])
def test_precision_changes_nothing_on_the_cpu(precision: str) -> None:
    x, weight, _ = FIXED["kb72"].arrays(DTYPES["float32"])
    assert np.array_equal(call(FIXED["kb72"], x, weight, precision=precision), call(FIXED["kb72"], x, weight))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_of_inputs(layout: str) -> None:
    check(dataclasses.replace(FIXED["kb73"], x_layout=layout), "float32")


@pytest.mark.parametrize("layout", OUT_LAYOUTS)
def test_layout_of_out(layout: str) -> None:
    check(dataclasses.replace(FIXED["kb73"], out_layout=layout), "float32")


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_empty_batch(rank: int, dtype: str) -> None:
    problem = case((0, 4, *(5,) * rank), 6, 3, stride=2, padding=1, has_bias=True)
    x, weight, bias = problem.arrays(DTYPES[dtype])
    y = call(problem, x, weight, bias)
    assert y.shape == problem.out_shape == (0, 6, *(9,) * rank)
    assert y.dtype == DTYPES[dtype]
    out = np.empty(problem.out_shape, DTYPES[dtype])
    assert call(problem, x, weight, bias, out=out) is out


@pytest.mark.parametrize("name", SPECIAL)
def test_special_values_land_where_the_definition_puts_them(name: str) -> None:
    problem = SPECIAL[name]
    x, weight, bias = problem.arrays(DTYPES["float32"])
    x.flat[[0, x.size // 3, x.size // 2, -1]] = np.inf, np.nan, -np.inf, np.inf
    with np.errstate(invalid="ignore"):
        expected = reference.direct(problem, x, weight, bias)
        got = call(problem, x, weight, bias)
    for test in (np.isnan, np.isposinf, np.isneginf):
        assert np.array_equal(test(got), test(expected)), test.__name__
    finite = np.isfinite(expected)
    np.testing.assert_allclose(got[finite], expected[finite], rtol=1e-4, atol=1e-4)


def test_output_size_chooses_output_padding() -> None:
    for extra in range(3):
        problem = case((2, 3, 5, 4), 4, (3, 5), stride=(3, 4), padding=1, output_padding=(extra, 3 - extra))
        x, weight, _ = problem.arrays(DTYPES["float64"])
        parameters = {**problem.parameters, "output_padding": 0}
        got = cuconvt.conv_transpose2d(x, weight, **parameters, output_size=problem.out_shape[2:])
        assert np.array_equal(got, call(problem, x, weight))


def test_a_stride_beyond_the_result_costs_no_memory() -> None:
    generator = np.random.default_rng(7)
    x, weight = generator.random((2, 4, 1)), generator.random((4, 3, 3))
    y = generator.random((2, 3, 11))

    def results(stride: int) -> list[np.ndarray]:
        parameters: dict[str, Any] = {"stride": stride, "padding": [(1, 0)], "output_padding": 7, "dilation": 2}
        return [
            cuconvt.conv_transpose1d(x, weight, **parameters),
            cuconvt.conv1d(y, weight, stride=stride, padding=[(1, 0)], dilation=2),
            cuconvt.grad.conv_transpose1d_input(x.shape, weight, y, **parameters),
            cuconvt.grad.conv_transpose1d_weight(x, weight.shape, y, **parameters),
        ]

    expected = results(64)
    for stride in (1 << 20, 1 << 40, 1 << 70):  # the first is one that fails in time where memory is taken
        tracemalloc.start()
        got = results(stride)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 1 << 20
        assert all(map(np.array_equal, got, expected))


@settings(max_examples=max(EXAMPLES // 3, 1))
@given(problem=problems())
def test_the_two_references_agree(problem: Problem) -> None:
    torch = pytest.importorskip("torch")
    arguments = problem.arrays(DTYPES["float64"])
    ours, theirs = reference.direct(problem, *arguments), reference.via_torch(problem, *arguments)
    magnitude = reference.direct(problem, *(None if a is None else np.abs(a) for a in arguments))
    assert (np.abs(ours - theirs) <= 16 * 2.0**-53 * magnitude).all()
    if all(before == after for before, after in problem.padding):
        # What torch pads itself: this settles where output_padding goes.
        function = getattr(torch.nn.functional, f"conv_transpose{problem.rank}d")
        tensors = [None if a is None else torch.from_numpy(a) for a in arguments]
        padding = [before for before, _ in problem.padding]
        padded = function(*tensors, **{**problem.parameters, "padding": padding}).numpy()
        assert (np.abs(padded - theirs) <= 16 * 2.0**-53 * magnitude).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_comparison_sees_one_wrong_border_element(dtype: str) -> None:
    problem = FIXED["kb73"]
    expected = reference.Expected(problem, *problem.arrays(DTYPES[dtype]))
    right = expected.exact.astype(DTYPES[dtype])
    expected.assert_close(right)
    corner = (0, -1, -1, -1, -1)
    near = expected.exact[corner] + 64 * 2.0 ** -reference.TOLERANCES[dtype].digits * expected.magnitude[corner]
    for wrong in (np.nan, np.inf, near):
        broken = right.copy()
        broken[corner] = wrong
        with pytest.raises(AssertionError, match=r"^1 of \d+ elements are wrong"):
            expected.assert_close(broken)
