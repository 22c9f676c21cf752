"""The gradients of transposed convolutions, with the NumPy backend, against float64 references and torch's autograd."""

from __future__ import annotations

import dataclasses
import inspect
import re
from typing import Any

import numpy as np
import pytest
from fixed_cases import FIXED, SPECIAL
from gradients import (
    GRADIENTS,
    check,
    direct_bias,
    direct_input,
    direct_weight,
    gradient_of,
    via_autograd,
)
from harness import call, is_channels_last
from harness import check as check_forward
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import TOLERANCES
from strategies import DTYPES, LAYOUTS, OUT_LAYOUTS, Problem, case, place, problems

import cuconvt
from cuconvt import cpu_taps

EXAMPLES = settings().max_examples
A_THIRD = settings(max_examples=max(EXAMPLES // 3, 1))
PROBLEM = case((2, 4, 5, 6, 7), 6, 3, stride=2, padding=1, output_padding=1, groups=2)


def of_rank(problem: Problem, name: str) -> Any:
    return getattr(cuconvt.grad, f"conv_transpose{problem.rank}d_{name}")


def input_gradient(problem: Problem, weight: Any, y: Any, **keywords: Any) -> Any:
    return of_rank(problem, "input")(problem.x_shape, weight, y, **problem.parameters, **keywords)


def weight_gradient(problem: Problem, x: Any, y: Any, **keywords: Any) -> Any:
    return of_rank(problem, "weight")(x, problem.weight_shape, y, **problem.parameters, **keywords)


def arrays_of(problem: Problem, dtype: str = "float64") -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    x, weight, _ = problem.arrays(DTYPES[dtype])
    return x, weight, gradient_of(problem, DTYPES[dtype])


# Values.


@pytest.mark.parametrize("name", GRADIENTS)
def test_any_problem(name: str) -> None:
    @given(problem=problems(), dtype=st.sampled_from(sorted(DTYPES)))
    def every_problem(problem: Problem, dtype: str) -> None:
        check(name, problem, dtype)

    every_problem()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fixed", FIXED)
def test_fixed_case(fixed: str, dtype: str) -> None:
    for name in GRADIENTS:
        check(name, FIXED[fixed], dtype)


@A_THIRD
@given(problem=problems())
def test_the_two_references_agree(problem: Problem) -> None:
    pytest.importorskip("torch")
    x, weight, y = arrays_of(problem)
    ours = direct_input(problem, y, weight), direct_weight(problem, x, y)
    magnitudes = direct_input(problem, abs(y), abs(weight)), direct_weight(problem, abs(x), abs(y))
    for got, theirs, magnitude in zip(ours, via_autograd(problem, x, weight, y), magnitudes, strict=True):
        assert (np.abs(got - theirs) <= 64 * 2.0**-53 * magnitude).all()


@A_THIRD
@given(problem=problems())
def test_autograd_of_the_same_call(problem: Problem) -> None:
    """Only where torch pads as the problem does: this settles where padding and output_padding go."""
    torch = pytest.importorskip("torch")
    problem = dataclasses.replace(problem, padding=tuple((min(pair),) * 2 for pair in problem.padding))
    x, weight, y = arrays_of(problem)
    tensors = [torch.from_numpy(a).requires_grad_() for a in (x, weight)]
    bias = torch.zeros(problem.c_out, dtype=torch.float64, requires_grad=True)
    parameters = {**problem.parameters, "padding": [before for before, _ in problem.padding]}
    getattr(torch.nn.functional, f"conv_transpose{problem.rank}d")(*tensors, bias, **parameters).backward(
        torch.from_numpy(y)
    )
    magnitudes = direct_input(problem, abs(y), abs(weight)), direct_weight(problem, abs(x), abs(y))
    ours = input_gradient(problem, weight, y), weight_gradient(problem, x, y)
    for got, tensor, magnitude in zip(ours, tensors, magnitudes, strict=True):
        assert (np.abs(got - tensor.grad.numpy()) <= 64 * 2.0**-53 * magnitude).all()
    np.testing.assert_allclose(of_rank(problem, "bias")(y), bias.grad.numpy(), rtol=1e-10, atol=1e-10)


@A_THIRD
@given(problem=problems())
def test_adjoint_identities(problem: Problem) -> None:
    """<T(x, w), g> = <x, I(w, g)> = <w, W(x, g)>."""
    x, weight, g = arrays_of(problem)
    forward = np.vdot(call(problem, x, weight), g)
    scale = np.vdot(call(problem, abs(x), abs(weight)), abs(g))
    assert abs(forward - np.vdot(x, input_gradient(problem, weight, g))) <= 1e-14 * scale
    assert abs(forward - np.vdot(weight, weight_gradient(problem, x, g))) <= 1e-14 * scale


@pytest.mark.parametrize("name", [*GRADIENTS, "forward"])
def test_many_boxes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_taps, "_BOX_ELEMENTS", 1 << 10)
    monkeypatch.setattr(cpu_taps, "_ENOUGH_POSITIONS", 4)
    monkeypatch.setattr(cpu_taps, "_ENOUGH_TERMS", 2)

    @A_THIRD
    @given(problem=problems(), dtype=st.sampled_from(sorted(DTYPES)))
    def every_problem(problem: Problem, dtype: str) -> None:
        if name == "forward":
            check_forward(problem, dtype)
        else:
            check(name, problem, dtype)

    every_problem()


@pytest.mark.parametrize("name", GRADIENTS)
def test_a_long_sum_of_one_sign(name: str) -> None:
    check(name, case((2, 64, 40, 40), 64, 5, stride=2), "float32")
    problem = case((4, 8, 64, 64), 8, 3, stride=2)
    x, weight, y = (np.abs(a) for a in arrays_of(problem, "float32"))
    if name == "input":
        got, exact = input_gradient(problem, weight, y), direct_input(problem, y, weight)
    else:
        got, exact = weight_gradient(problem, x, y), direct_weight(problem, x, y)
    np.testing.assert_allclose(got, exact, rtol=2e-6)


@pytest.mark.parametrize("fixed", SPECIAL)
def test_special_values_land_where_the_definition_puts_them(fixed: str) -> None:
    problem = SPECIAL[fixed]
    x, weight, y = arrays_of(problem, "float32")
    y.flat[[0, y.size // 3, y.size // 2, -1]] = np.inf, np.nan, -np.inf, np.inf
    with np.errstate(invalid="ignore"):
        results = [
            (input_gradient(problem, weight, y), direct_input(problem, y, weight)),
            (weight_gradient(problem, x, y), direct_weight(problem, x, y)),
        ]
    for got, expected in results:
        for test in (np.isnan, np.isposinf, np.isneginf):
            assert np.array_equal(test(got), test(expected)), test.__name__


def test_a_tap_outside_the_result_contributes_nothing_to_any_multiplier() -> None:
    y, special = np.ones((1, 1, 3)), np.array([[[np.inf, 1.0, 1.0]]])
    input_gradient = cuconvt.grad.conv_transpose1d_input((1, 1, 3), special, y, padding=1)
    assert input_gradient.tolist() == [[[2.0, np.inf, np.inf]]]
    weight_gradient = cuconvt.grad.conv_transpose1d_weight(special, (1, 1, 3), y, padding=1)
    assert weight_gradient.tolist() == [[[2.0, np.inf, np.inf]]]


@given(problem=problems(), dtype=st.sampled_from(sorted(DTYPES)))
def test_bias(problem: Problem, dtype: str) -> None:
    values = gradient_of(problem, DTYPES[dtype])
    y, _ = place(values, problem.rank, problem.out_layout)
    gradient = of_rank(problem, "bias")
    got = gradient(y)
    assert (type(got), got.dtype, got.shape) == (np.ndarray, DTYPES[dtype], (problem.c_out,))
    exact, magnitude = direct_bias(problem, values), direct_bias(problem, abs(values))
    tolerance = TOLERANCES[dtype]
    allowed = 2.0**-tolerance.digits * np.abs(exact) + tolerance.products * magnitude
    if dtype == "float16":
        allowed += 2.0**-25
    assert (np.abs(got.astype(np.float64) - exact) <= allowed).all()
    out, buffer = place(np.full(problem.c_out, np.nan, DTYPES[dtype]), 1, problem.bias_layout)
    assert gradient(y, out=out) is out
    assert out.tobytes() == got.tobytes()
    out.view(buffer.dtype)[...] = -1
    assert (buffer == -1).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_bias_of_a_long_row_between_whose_elements_others_lie(dtype: str) -> None:
    """NumPy sums such a row one element after the other: in float32 the error would grow with its length."""
    values = np.random.default_rng(3).random((1, 1 << 20, 2), np.float32)
    y = (values / 64).astype(DTYPES[dtype]).transpose(0, 2, 1)  # the sums stay within float16
    exact = y.astype(np.float64).sum(axis=(0, 2))
    got = cuconvt.grad.conv_transpose1d_bias(y)
    assert (np.abs(got.astype(np.float64) - exact) <= 2.0 ** -TOLERANCES[dtype].digits * exact).all()


# Layouts, empty batches, repeated calls.


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str) -> None:
    problem = dataclasses.replace(FIXED["kb73"], x_layout=layout)
    own = layout if layout in OUT_LAYOUTS else "contiguous"
    for changes in ({}, {"out_layout": own, "weight_layout": own}):
        for name in GRADIENTS:
            check(name, dataclasses.replace(problem, **changes), "float32")


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("batched", [True, False])
def test_channels_last_in_channels_last_out(rank: int, batched: bool) -> None:
    shape = (2, 4, *(5, 6, 7)[:rank]) if batched else (4, *(5, 6, 7)[:rank])
    problem = case(shape, 6, 3, stride=2, rank=rank)
    x, weight, y = arrays_of(problem, "float32")
    contiguous = input_gradient(problem, weight, y)
    channels_last = input_gradient(problem, weight, place(y, rank, "channels_last")[0])
    assert contiguous.flags.c_contiguous
    assert is_channels_last(channels_last, rank)
    assert not channels_last.flags.c_contiguous
    np.testing.assert_allclose(channels_last, contiguous, rtol=1e-5, atol=1e-5)
    assert weight_gradient(problem, place(x, rank, "channels_last")[0], y).flags.c_contiguous


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_empty_batch(rank: int, dtype: str) -> None:
    problem = case((0, 4, *(5,) * rank), 6, 3, stride=2, padding=1)
    x, weight, y = arrays_of(problem, dtype)
    assert input_gradient(problem, weight, y).shape == problem.x_shape
    gradient = weight_gradient(problem, x, y)
    assert (gradient.shape, gradient.dtype) == (problem.weight_shape, DTYPES[dtype])
    assert not gradient.any()
    out = np.full(problem.weight_shape, np.nan, DTYPES[dtype])[..., ::-1]
    assert weight_gradient(problem, x, y, out=out) is out
    assert not out.any()
    bias = of_rank(problem, "bias")(y)
    assert (bias.shape, bias.dtype) == ((6,), DTYPES[dtype])
    assert not bias.any()


@pytest.mark.parametrize("precision", ["tf32x3", "ieee", "tf32"])
def test_precision_changes_nothing_on_the_cpu(precision: str) -> None:
    x, weight, y = arrays_of(PROBLEM, "float32")
    assert np.array_equal(input_gradient(PROBLEM, weight, y, precision=precision), input_gradient(PROBLEM, weight, y))
    assert np.array_equal(weight_gradient(PROBLEM, x, y, precision=precision), weight_gradient(PROBLEM, x, y))


# Signatures and errors.


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_argument_order_is_that_of_torch(rank: int) -> None:
    torch = pytest.importorskip("torch")
    arrays = {"input": ["input_size", "weight", "grad_output"], "weight": ["input", "weight_size", "grad_output"]}
    for name, first in arrays.items():
        ours = inspect.signature(getattr(cuconvt.grad, f"conv_transpose{rank}d_{name}")).parameters.values()
        parameters = ["stride", "padding", "output_padding", "groups", "dilation"]  # of conv_transpose
        assert [p.name for p in ours if p.kind is not p.KEYWORD_ONLY] == [*first, *parameters]
        ours = inspect.signature(getattr(cuconvt.grad, f"conv{rank}d_{name}")).parameters.values()
        theirs = inspect.signature(getattr(torch.nn.grad, f"conv{rank}d_{name}")).parameters
        assert [p.name for p in ours if p.kind is not p.KEYWORD_ONLY] == list(theirs)


def refused(name: str, error: type[Exception], message: str, **changes: Any) -> None:
    """Call a gradient of conv_transpose2d with `changes` to a call that works; expect `message`, untouched `out`."""
    y = np.ones((2, 6, 11, 13), np.float32)
    weight_shape, x_shape = (4, 3, 3, 3), (2, 4, 5, 6)
    arguments: dict[str, Any] = {
        "input": {"input_size": x_shape, "weight": np.ones(weight_shape, np.float32), "grad_output": y},
        "weight": {"input": np.ones(x_shape, np.float32), "weight_size": weight_shape, "grad_output": y},
        "bias": {"grad_output": y},
    }[name]
    shape = {"input": x_shape, "weight": weight_shape, "bias": (6,)}[name]
    arguments["out"] = np.full(shape, np.nan, np.float32)
    if name != "bias":
        arguments |= {"stride": 2, "groups": 2}
    arguments |= changes
    out = arguments["out"]
    before = out.tobytes() if isinstance(out, np.ndarray) else b""
    with pytest.raises(error, match=re.escape(message)):
        getattr(cuconvt.grad, f"conv_transpose2d_{name}")(**arguments)
    if isinstance(out, np.ndarray):
        assert out.tobytes() == before


@pytest.mark.parametrize("name", ["input", "weight", "bias"])
def test_the_call_that_the_others_change_works(name: str) -> None:
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        refused(name, ValueError, "anything")


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        # Shapes.
        (
            "input",
            {"input_size": (4, 6)},
            "input_size must have 4 axes (N, C_in, H, W) or 3 without N, got shape (4, 6)",
        ),
        ("input", {"input_size": (2, 4, -5, 6)}, "input_size must be at least 0, got -5"),
        ("input", {"input_size": (2, 4, 0, 6)}, "input_size must have spatial extents of at least 1"),
        (
            "input",
            {"input_size": (2, 6, 5, 6)},
            "weight must have C_in = 6 (input_size's channels) as its first extent",
        ),
        ("input", {"weight": np.ones((4, 3, 3), np.float32)}, "weight must have 4 axes (C_in, C_out/groups, kH, kW)"),
        ("input", {"groups": 3}, "groups must divide the channels of input_size, got groups=3 with C_in=4"),
        ("weight", {"weight_size": (4, 3, 3)}, "weight_size must have 4 axes (C_in, C_out/groups, kH, kW), got shape"),
        (
            "weight",
            {"weight_size": (5, 3, 3, 3)},
            "weight_size must have C_in = 4 (input's channels) as its first extent",
        ),
        ("weight", {"weight_size": (4, 3, 3, 0)}, "weight_size must have no empty axis, got shape (4, 3, 3, 0)"),
        ("weight", {"input": np.ones((4, 5), np.float32)}, "input must have 4 axes (N, C_in, H, W) or 3 without N"),
        ("weight", {"groups": 3}, "groups must divide the channels of input, got groups=3 with C_in=4"),
        ("bias", {"grad_output": np.ones((2, 6), np.float32)}, "grad_output must have 4 axes (N, C_out, H, W) or 3"),
        # grad_output disagrees.
        (
            "input",
            {"output_padding": 1},
            "grad_output must have shape (2, 6, 12, 14), that of the result, got (2, 6, 11, 13)",
        ),
        ("weight", {"padding": 1}, "grad_output must have shape (2, 6, 9, 11), that of the result, got (2, 6, 11, 13)"),
        ("input", {"input_size": (1, 4, 5, 6)}, "grad_output must have shape (1, 6, 11, 13), that of the result"),
        ("input", {"input_size": (4, 5, 6)}, "grad_output must have shape (6, 11, 13), that of the result"),
        ("weight", {"groups": 1}, "grad_output must have shape (2, 3, 11, 13), that of the result"),
        # Parameters.
        ("input", {"stride": 0}, "stride must be at least 1, got 0"),
        ("weight", {"output_padding": 2}, "output_padding must be smaller than max(stride, dilation) on every axis"),
        ("input", {"padding": 6}, "the output extents must be at least 1, got (-1, 1): input_size of extents (5, 6)"),
        ("weight", {"precision": "fp32"}, "precision must be None or one of 'tf32x3', 'ieee', 'tf32', got 'fp32'"),
        # out
        (
            "input",
            {"out": np.full((2, 4, 5, 5), np.nan, np.float32)},
            "out must have shape (2, 4, 5, 6), got (2, 4, 5, 5)",
        ),
        ("weight", {"out": np.full((4, 6, 3, 3), np.nan, np.float32)}, "out must have shape (4, 3, 3, 3), got"),
        ("bias", {"out": np.full(3, np.nan, np.float32)}, "out must have shape (6,), got (3,)"),
    ],
)
def test_value_errors(name: str, changes: dict[str, Any], message: str) -> None:
    refused(name, ValueError, message, **changes)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("input", {"grad_output": [1.0]}, "grad_output must be a NumPy, CuPy, PyTorch or JAX array or support DLPack"),
        (
            "input",
            {"weight": None},
            "weight must be a NumPy, CuPy, PyTorch or JAX array or support DLPack, got NoneType",
        ),
        (
            "weight",
            {"input": None},
            "input must be a NumPy, CuPy, PyTorch or JAX array or support DLPack, got NoneType",
        ),
        ("bias", {"grad_output": None}, "grad_output must be a NumPy, CuPy, PyTorch or JAX array or support DLPack"),
        ("input", {"input_size": 5}, "input_size must be a sequence of integers, got 5 of type int"),
        ("input", {"input_size": (2, 4, 5, 6.0)}, "input_size must be an integer, got 6.0 of type float"),
        ("weight", {"weight_size": "4333"}, "weight_size must be a sequence of integers, got '4333' of type str"),
        ("input", {"weight": np.ones((4, 3, 3, 3))}, "weight must have grad_output's dtype float32, got float64"),
        (
            "weight",
            {"grad_output": np.ones((2, 6, 11, 13))},
            "grad_output must have input's dtype float32, got float64",
        ),
        ("bias", {"out": np.full(6, np.nan)}, "out must have grad_output's dtype float32, got float64"),
        ("bias", {"grad_output": np.ones((2, 6, 4, 4), np.int32)}, "grad_output must have one of the dtypes float16"),
        ("input", {"groups": 2.0}, "groups must be an integer, got 2.0 of type float"),
        ("weight", {"padding": "same"}, "padding must be an integer, or a tuple or list of integers or of"),
    ],
)
def test_type_errors(name: str, changes: dict[str, Any], message: str) -> None:
    refused(name, TypeError, message, **changes)


def test_out_overlap() -> None:
    y = np.ones((2, 6, 11, 13), np.float32)
    inside = y.reshape(-1)
    for name, out in (
        ("input", inside[: 2 * 4 * 30].reshape(2, 4, 5, 6)),
        ("weight", inside[-108:].reshape(4, 3, 3, 3)),
        ("bias", inside[:6]),
    ):
        message = "out must not overlap an input, and it shares memory with grad_output"
        refused(name, ValueError, message, grad_output=y, out=out)
    assert (y == 1).all()


# Other libraries.


def test_torch() -> None:
    torch = pytest.importorskip("torch")
    values = arrays_of(PROBLEM, "float32")
    x, weight, y = map(torch.from_numpy, values)
    for got, expected in (
        (input_gradient(PROBLEM, weight, y), input_gradient(PROBLEM, values[1], values[2])),
        (weight_gradient(PROBLEM, x, y), weight_gradient(PROBLEM, values[0], values[2])),
        (of_rank(PROBLEM, "bias")(y), of_rank(PROBLEM, "bias")(values[2])),
    ):
        assert type(got) is torch.Tensor
        assert np.array_equal(got.numpy(), expected)
    out = torch.full(PROBLEM.weight_shape, torch.nan)
    assert weight_gradient(PROBLEM, x, y, out=out) is out
    assert torch.equal(out, weight_gradient(PROBLEM, x, y))
    channels_last = input_gradient(PROBLEM, weight, y.to(memory_format=torch.channels_last_3d))
    assert channels_last.is_contiguous(memory_format=torch.channels_last_3d)
    with pytest.raises(ValueError, match="weight requires grad"):
        input_gradient(PROBLEM, weight.clone().requires_grad_(), y)
    with pytest.raises(ValueError, match="input requires grad"):
        weight_gradient(PROBLEM, x.clone().requires_grad_(), y)
    with pytest.raises(ValueError, match="grad_output requires grad"):
        of_rank(PROBLEM, "bias")(y.clone().requires_grad_())
    with pytest.raises(TypeError, match="weight must be an array of the same library as grad_output, got numpy and"):
        input_gradient(PROBLEM, values[1], y)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_jax(dtype: str) -> None:
    jax = pytest.importorskip("jax")
    values = arrays_of(PROBLEM, dtype)
    with jax.default_device(jax.devices("cpu")[0]):
        x, weight, y = map(jax.numpy.asarray, values)
        for got, expected in (
            (input_gradient(PROBLEM, weight, y), input_gradient(PROBLEM, values[1], values[2])),
            (weight_gradient(PROBLEM, x, y), weight_gradient(PROBLEM, values[0], values[2])),
            (of_rank(PROBLEM, "bias")(y), of_rank(PROBLEM, "bias")(values[2])),
        ):
            assert isinstance(got, jax.Array)
            assert np.asarray(got).tobytes() == expected.tobytes()
