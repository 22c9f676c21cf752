"""cuconvt.torch on CPU tensors: values, gradients of every order, compilation, autocast, modules and errors."""

from __future__ import annotations

import copy
import dataclasses
import doctest
import inspect
import io
import itertools
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import TOLERANCES
from strategies import Problem, case, problems

torch = pytest.importorskip("torch")
functional = torch.nn.functional

import cuconvt  # noqa: E402
import cuconvt.torch as ct  # noqa: E402
from cuconvt.torch import modules, operators  # noqa: E402

DTYPES = {name: getattr(torch, name) for name in TOLERANCES if name != "tf32"}
PROBLEM = case((2, 4, 3, 4, 5), 6, 3, stride=2, padding=1, output_padding=1, groups=2, has_bias=True)
# One of each rank, with what sets its gradients apart: inputs past the last step, dead phases, unbatched, depthwise.
PROBLEMS = {
    "3d": PROBLEM,
    "2d": case((2, 6, 5, 4), 4, (3, 2), stride=(1, 3), padding=(0, 1), output_padding=(1, 2), dilation=2, groups=2),
    "1d": case((3, 4, 7), 4, 4, stride=2, padding=1, groups=4, has_bias=True),
    "dead_phases": case((1, 2, 4, 5), 3, 3, stride=2, dilation=2, output_padding=1, has_bias=True),
    "output_padding_beyond_stride": case((2, 2, 5), 3, 2, stride=1, dilation=3, output_padding=2),
    "unbatched": case((3, 4, 5), 2, 3, stride=2, has_bias=True, rank=2),
    "empty_batch": case((0, 4, 5, 6), 2, 3, stride=2, has_bias=True),
}
OPERATORS = ("conv_transpose", "conv_transpose_input", "conv_transpose_weight")


def symmetric(problem: Problem) -> Problem:
    return dataclasses.replace(problem, padding=tuple((min(pair),) * 2 for pair in problem.padding))


def arguments(
    problem: Problem, dtype: Any = torch.float64, requires_grad: bool = True, device: str = "cpu"
) -> list[Any]:
    """Draw x, weight and, if the problem has one, bias."""
    values = [torch.from_numpy(a).to(device, dtype) for a in problem.arrays(np.dtype(np.float64)) if a is not None]
    return [value.requires_grad_(requires_grad) for value in values]


def parameters(problem: Problem) -> dict[str, Any]:
    return {**problem.parameters, "padding": tuple(before for before, _ in problem.padding)}


def ours(problem: Problem, *tensors: Any, **keywords: Any) -> Any:
    return getattr(ct, f"conv_transpose{problem.rank}d")(*tensors, **parameters(problem), **keywords)


def theirs(problem: Problem, *tensors: Any) -> Any:
    return getattr(functional, f"conv_transpose{problem.rank}d")(*tensors, **parameters(problem))


def gradients(function: Callable[..., Any], problem: Problem, tensors: list[Any], seed: Any = None) -> list[Any]:
    """Return the result and its gradients with respect to all tensors, for the gradient `seed` of the result."""
    tensors = [tensor.detach().requires_grad_() for tensor in tensors]
    y = function(problem, *tensors)
    return [y, *torch.autograd.grad(y, tensors, torch.ones_like(y) if seed is None else seed.to(y.dtype))]


def operator_arguments(name: str, problem: Problem) -> tuple[Any, ...]:
    x, weight, *bias = arguments(problem)
    keywords = parameters(problem)
    values = [keywords[key] for key in ("stride", "padding", "output_padding", "groups", "dilation")]
    grad = torch.randn(problem.out_shape, dtype=torch.float64, requires_grad=True)
    tensors: dict[str, tuple[Any, ...]] = {
        "conv_transpose": (x, weight, bias[0] if bias else None),
        "conv_transpose_input": (weight, grad, list(x.shape)),
        "conv_transpose_weight": (x, grad, list(weight.shape)),
    }
    return (*tensors[name], *values, None)


# Values and gradients.


def check_gradients(problem: Problem, dtype: str, device: str = "cpu", precision: str | None = None) -> None:
    """Compare the result and all gradients, element by element, with torch's in float64 on the CPU."""
    tensors = [tensor.detach() for tensor in arguments(problem, DTYPES[dtype], device=device)]
    exact_tensors = [tensor.cpu().double() for tensor in tensors]
    seed = torch.randn(problem.out_shape, generator=torch.Generator().manual_seed(1)).to(DTYPES[dtype])
    exact = gradients(theirs, problem, exact_tensors, seed)
    # Everything is linear in each tensor: of magnitudes, they are the sums of the magnitudes of all terms.
    magnitude = gradients(theirs, problem, [tensor.abs() for tensor in exact_tensors], seed.abs())
    tolerance = TOLERANCES["tf32" if precision == "tf32" else dtype]

    def function(problem: Problem, *tensors: Any) -> Any:
        return ours(problem, *tensors, precision=precision)

    for result, true, bound in zip(
        gradients(function, problem, tensors, seed.to(device)), exact, magnitude, strict=True
    ):
        assert result.dtype == DTYPES[dtype]
        assert result.device == tensors[0].device
        assert result.shape == true.shape
        value = result.cpu().double()
        _, exponent = torch.frexp(torch.maximum(value.abs(), true.abs()))
        last_place = torch.exp2((exponent.clamp(min=tolerance.least_exponent) - tolerance.digits).double())
        assert ((value - true).abs() <= 0.5 * last_place + tolerance.products * bound).all()


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_result_and_gradients_are_those_of_torch(name: str, dtype: str) -> None:
    check_gradients(PROBLEMS[name], dtype)


@settings(max_examples=12)
@given(problems(longest=(3, 3, 3), longest_w=13, budget=0.002).map(symmetric))
def test_gradients_of_first_and_second_order(problem: Problem) -> None:
    tensors = arguments(problem)
    check = {"fast_mode": True, "nondet_tol": 0.0}
    assert torch.autograd.gradcheck(lambda *t: ours(problem, *t), tensors, **check)
    assert torch.autograd.gradgradcheck(lambda *t: ours(problem, *t), tensors, **check)


@pytest.mark.parametrize("name", ["3d", "1d", "unbatched"])
def test_forward_mode(name: str) -> None:
    problem = PROBLEMS[name]
    tensors = arguments(problem)
    forward = {"check_forward_ad": True, "check_batched_forward_grad": True, "fast_mode": True}
    assert torch.autograd.gradcheck(lambda *t: ours(problem, *t), tensors, **forward)
    # Of the other two operators too.
    assert torch.autograd.gradgradcheck(lambda *t: ours(problem, *t), tensors, check_fwd_over_rev=True, fast_mode=True)


@pytest.mark.parametrize("which", [(0,), (1,), (2,), (0, 1, 2)])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_tangents_of_dual_tensors(which: tuple[int, ...], requires_grad: bool) -> None:
    from torch.autograd import forward_ad

    tensors = arguments(PROBLEM, requires_grad=requires_grad)

    def tangent(function: Callable[..., Any]) -> Any:
        duals = [forward_ad.make_dual(t, 2 * t.detach()) if i in which else t for i, t in enumerate(tensors)]
        return forward_ad.unpack_dual(function(PROBLEM, *duals)).tangent

    with forward_ad.dual_level():
        expected, got = tangent(theirs), tangent(ours)
        torch.testing.assert_close(got, expected)
        with torch.no_grad(), torch.device("cpu"):
            torch.testing.assert_close(tangent(ours), expected)
        with torch.autocast("cpu", torch.bfloat16):
            torch.testing.assert_close(tangent(ours), expected)  # which leaves float64 alone
        if requires_grad:
            for one, other in zip(
                torch.autograd.grad(got.square().sum(), tensors, allow_unused=True),
                torch.autograd.grad(expected.square().sum(), tensors, allow_unused=True),
                strict=True,
            ):
                torch.testing.assert_close(one, other)


def test_jacobians_and_hessian() -> None:
    x, weight, bias = (tensor.detach() for tensor in arguments(PROBLEMS["1d"]))

    def of_both(transform: Callable[..., Any]) -> list[Any]:
        return [transform(lambda *t, f=f: f(PROBLEMS["1d"], *t).sin()) for f in (ours, theirs)]

    for transform in (
        lambda f: torch.func.jvp(f, (x, weight, bias), (weight.new_ones(x.shape), 2 * weight, 3 * bias)),
        lambda f: torch.func.jacfwd(f, argnums=(0, 1, 2))(x, weight, bias),
        lambda f: torch.func.hessian(lambda *t: f(*t).sum(), argnums=(0, 1, 2))(x[:1], weight, bias),
        lambda f: torch.func.jacfwd(torch.func.jacfwd(lambda w: f(x[:1], w, bias).sum()))(weight),
        lambda f: torch.func.linearize(f, x, weight, bias)[1](x, weight, bias),
    ):
        torch.testing.assert_close(*of_both(transform))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_forward_mode_and_compile(backend: str) -> None:
    from torch.autograd import forward_ad

    torch.compiler.reset()
    x, weight, bias = (tensor.detach() for tensor in arguments(PROBLEM))
    compiled = torch.compile(lambda x: ours(PROBLEM, x, weight, bias), backend=backend)
    torch.testing.assert_close(compiled(x), theirs(PROBLEM, x, weight, bias))
    expected = theirs(PROBLEM, x, weight)
    with forward_ad.dual_level():
        torch.testing.assert_close(forward_ad.unpack_dual(compiled(forward_ad.make_dual(x, x))).tangent, expected)
    tangent = torch.compile(lambda x: torch.func.jvp(compiled, (x,), (x,))[1], backend=backend)
    torch.testing.assert_close(tangent(x), expected)
    torch.compiler.reset()
    tangent = torch.compile(
        lambda x: torch.func.jvp(lambda x: ours(PROBLEM, x, weight, bias).sin(), (x,), (x,))[1], backend=backend
    )
    _, expected = torch.func.jvp(lambda x: theirs(PROBLEM, x, weight, bias).sin(), (x,), (x,))
    torch.testing.assert_close(tangent(x), expected)


def test_compile_traces_nothing_that_a_kernel_computes() -> None:
    """Where forward mode breaks a graph, its frames run in parts, which all call others that might be traced."""
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    torch.compiler.reset()
    x, weight, bias = (tensor.detach() for tensor in arguments(PROBLEM))
    torch.compile(
        lambda x: torch.func.jvp(lambda x: ours(PROBLEM, x, weight, bias).sin(), (x,), (x,))[1], backend=backend
    )(x)
    assert len(graphs) < 10  # 45 where all is traced


@settings(max_examples=25)
@given(problems(longest=(4, 4, 4), longest_w=16, budget=0.02).map(symmetric), st.booleans())
def test_random_problems(problem: Problem, channels_last: bool) -> None:
    x, *rest = arguments(problem)
    seed = torch.randn(problem.out_shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    tensors = [in_channels_last(x, problem.rank) if channels_last else x, *rest]
    for got, expected in zip(
        gradients(ours, problem, tensors, seed), gradients(theirs, problem, [x, *rest], seed), strict=True
    ):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-11)


def test_adjoint() -> None:
    problem = PROBLEMS["3d"]
    x, weight, _ = (tensor.detach() for tensor in arguments(problem))
    g = torch.randn(problem.out_shape, dtype=torch.float64)
    keywords = parameters(problem)
    adjoint = torch.ops.cuconvt.conv_transpose_input(weight, g, list(x.shape), *keywords.values(), None)
    forward = ours(problem, x, weight)
    torch.testing.assert_close((forward * g).sum(), (x * adjoint).sum(), rtol=1e-13, atol=0)


def test_only_what_is_needed_is_computed_and_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, bias = arguments(PROBLEM)
    y = ours(PROBLEM, x, weight.detach(), bias)
    monkeypatch.setattr(operators, "conv_transpose_weight", None)  # not called
    assert y.grad_fn.saved_tensors[0] is None
    y.sum().backward()
    assert x.grad is not None
    assert bias.grad is not None


def test_results_repeat_bitwise() -> None:
    tensors = [tensor.detach() for tensor in arguments(PROBLEM, torch.float32)]
    for one, two in zip(gradients(ours, PROBLEM, tensors), gradients(ours, PROBLEM, tensors), strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("precision", ["tf32x3", "ieee", "tf32"])
def test_precision_reaches_the_gradients(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    for name in OPERATORS[1:]:
        operator = getattr(operators, name)
        spy = lambda *a, operator=operator: seen.append(a[-1]) or operator(*a)  # noqa: E731
        monkeypatch.setattr(operators, name, spy)
    x, weight, bias = arguments(PROBLEM, torch.float32)
    ours(PROBLEM, x, weight, bias, precision=precision).sum().backward()
    assert seen == [precision, precision]
    with pytest.raises(ValueError, match="precision must be None for float64"):
        ours(PROBLEM, *arguments(PROBLEM), precision=precision)


# Memory formats.


def in_channels_last(tensor: Any, rank: int) -> Any:
    channels = tensor.dim() - rank - 1
    return tensor.detach().movedim(channels, -1).contiguous().movedim(-1, channels)


def is_channels_last(tensor: Any, rank: int) -> bool:
    return not tensor.is_contiguous() and tensor.movedim(tensor.dim() - rank - 1, -1).is_contiguous()


@pytest.mark.parametrize("name", ["1d", "2d", "3d", "unbatched"])
def test_memory_format(name: str) -> None:
    problem = PROBLEMS[name]
    x, weight, *bias = arguments(problem)
    y = ours(problem, x, weight, *bias)
    assert y.is_contiguous()
    x_last = in_channels_last(x, problem.rank).requires_grad_()
    y_last = ours(problem, x_last, weight, *bias)
    assert is_channels_last(y_last, problem.rank)
    assert not y_last._is_view()  # so that layers in place can follow
    torch.testing.assert_close(y_last, y)
    (grad,) = torch.autograd.grad(y_last, x_last, torch.ones_like(y_last))
    assert is_channels_last(grad, problem.rank)
    functional.relu(ours(problem, x_last, weight, *bias), inplace=True).sum().backward()


# Contiguous in both memory formats: with one channel or one position, of the input, the weight or the result.
@pytest.mark.parametrize("shape", [(2, 4, 1, 1), (2, 1, 3, 5), (2, 1, 1, 1), (1, 1, 3, 1)])
@pytest.mark.parametrize("x_last", [False, True])
@pytest.mark.parametrize("weight_last", [False, True])
def test_memory_format_of_what_is_in_both(shape: tuple[int, ...], x_last: bool, weight_last: bool) -> None:
    for c_out, kernel in ((3, 2), (3, 1), (1, 2)):
        x, weight = torch.randn(shape), torch.randn(shape[1], c_out, kernel, kernel)
        x = x.to(memory_format=torch.channels_last) if x_last else x
        weight = weight.to(memory_format=torch.channels_last) if weight_last else weight
        x.requires_grad_()
        results = []
        for function in (functional.conv_transpose2d, ct.conv_transpose2d):
            y = function(x, weight)
            (grad,) = torch.autograd.grad(y, x, torch.ones_like(y))
            results.append([t.is_contiguous(memory_format=torch.channels_last) for t in (y, grad)])
        assert results[0] == results[1]
        fake = ct.conv_transpose2d(x.detach().to("meta"), weight.to("meta"))
        assert fake.stride() == y.stride()


def test_models_in_channels_last_stay_so() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.ConvTranspose2d(8, 6, 4), torch.nn.ConvTranspose2d(6, 1, 4, 2, 1))
    model = model.to(memory_format=torch.channels_last)
    x = torch.randn(2, 8, 1, 1)
    expected = model(x)
    ct.replace_modules(model)
    assert is_channels_last(model[0](x), 2)
    torch.testing.assert_close(model(x), expected)
    torch.compiler.reset()
    for dynamic in (False, True):
        compiled = torch.compile(model[0], backend="aot_eager", fullgraph=True, dynamic=dynamic)
        assert compiled(x).stride() == model[0](x).stride()
    plain = torch.randn(2, 8, 3, 3)
    assert model[0](plain).is_contiguous()  # the input's own format, whatever the weight's
    assert compiled(plain).is_contiguous()


def test_views_and_neg_bit() -> None:
    x, weight, bias = (tensor.detach() for tensor in arguments(PROBLEM))
    expected = ours(PROBLEM, x, weight, bias)
    wide = torch.full((2, 4, 3, 4, 12), torch.nan, dtype=torch.float64)
    wide[..., 1:11:2] = x
    torch.testing.assert_close(ours(PROBLEM, wide[..., 1:11:2], weight, bias), expected)
    negated = torch.complex(torch.zeros_like(x), -x).conj().imag
    assert negated.is_neg()
    torch.testing.assert_close(ours(PROBLEM, negated, weight, bias), expected)


# torch.library, torch.compile, torch.func.


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("problem", ["3d", "1d"])
def test_opcheck(name: str, problem: str) -> None:
    # Static and dynamic shapes: the last of its checks traces with both.
    torch.library.opcheck(getattr(torch.ops.cuconvt, name).default, operator_arguments(name, PROBLEMS[problem]))


def test_opcheck_channels_last() -> None:
    x, *rest = operator_arguments("conv_transpose", PROBLEM)
    x = in_channels_last(x, 3).requires_grad_()
    torch.library.opcheck(torch.ops.cuconvt.conv_transpose.default, (x, *rest))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compile_has_no_graph_break(backend: str, dynamic: bool) -> None:
    # By name: torch does not import it with the rest.
    from torch._dynamo.testing import CompileCounterWithBackend

    torch.compiler.reset()
    layer = ct.ConvTranspose3d(4, 6, 3, stride=2, padding=1, output_padding=1, groups=2).double()
    graphs = CompileCounterWithBackend(backend)
    compiled = torch.compile(layer, backend=graphs, fullgraph=True, dynamic=dynamic)
    for extent in ((5, 7, 9), (9, 11, 8)):
        x = torch.randn(2, 4, *extent, dtype=torch.float64, requires_grad=True)
        y = compiled(x)
        expected = functional.conv_transpose3d(x, layer.weight, layer.bias, 2, 1, 1, 2)
        torch.testing.assert_close(y, expected)
        tensors = (x, layer.weight, layer.bias)
        for got, true in zip(
            torch.autograd.grad(y.square().sum(), tensors),
            torch.autograd.grad(expected.square().sum(), tensors),
            strict=True,
        ):
            torch.testing.assert_close(got, true)
    assert graphs.frame_count == (1 if dynamic else 2)


def test_compile_with_output_size_and_autocast() -> None:
    torch.compiler.reset()
    layer = ct.ConvTranspose2d(4, 3, 2, stride=2, precision="ieee")

    def decode(x: Any, skip: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return layer(x, output_size=skip.shape) + skip

    compiled = torch.compile(decode, backend="aot_eager", fullgraph=True, dynamic=True)
    for extent in (8, 13):
        x, skip = torch.randn(1, 4, extent // 2, extent // 2), torch.randn(1, 3, extent, extent)
        y = compiled(x, skip)
        torch.testing.assert_close(y, decode(x, skip))
        y.sum().backward()


def test_export() -> None:
    layer = ct.ConvTranspose1d(2, 3, 4, stride=2)
    program = torch.export.export(layer, (torch.randn(2, 2, 5),), dynamic_shapes=({2: torch.export.Dim("width")},))
    x = torch.randn(2, 2, 9)
    torch.testing.assert_close(program.module()(x), layer(x))
    assert "cuconvt.conv_transpose" in str(program.graph)


def test_symbolic_trace() -> None:
    layer = ct.ConvTranspose2d(4, 3, 2, stride=2)
    traced = torch.fx.symbolic_trace(torch.nn.Sequential(layer, torch.nn.ReLU()))
    assert torch.equal(traced(X), layer(X).relu())


def test_symbolic_trace_with_output_size() -> None:
    class Decoder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = ct.ConvTranspose2d(4, 3, 2, stride=2)

        def forward(self, x: Any, skip: Any) -> Any:
            return self.up(x, output_size=skip.shape[2:]) + skip

    model = Decoder()
    traced = torch.fx.symbolic_trace(model)
    for extent in (10, 11):
        skip = torch.randn(1, 3, extent, extent)
        assert torch.equal(traced(X, skip), model(X, skip))


def test_fake_and_meta_tensors() -> None:
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        y = ct.conv_transpose2d(torch.empty(1, 2, 4, 4), torch.empty(2, 3, 2, 2), stride=2)
    assert y.shape == (1, 3, 8, 8)
    assert ct.ConvTranspose1d(2, 3, 2, device="meta")(torch.empty(1, 2, 4, device="meta")).shape == (1, 3, 5)


def test_func_transforms() -> None:
    tensors = tuple(tensor.detach() for tensor in arguments(PROBLEM))

    def loss(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *t: function(PROBLEM, *t).square().sum()

    def of_both(transform: Callable[..., Any]) -> list[Any]:
        return [transform(loss(function)) for function in (ours, theirs)]

    got, expected = of_both(lambda f: torch.func.grad(f, argnums=(0, 1, 2))(*tensors))
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other)
    x, weight, bias = tensors
    # A gradient of a gradient, and the gradients of each sample.
    for transform in (
        lambda f: torch.func.grad(lambda w: torch.func.grad(f)(x, w, bias).square().sum())(weight),
        lambda f: torch.func.vmap(torch.func.grad(f, argnums=1), (0, None, None))(*tensors),
    ):
        torch.testing.assert_close(*of_both(transform))


# The mapped axes of x, weight and bias; of an ensemble, of single samples, and of all else.
MAPPED = [axes for axes in itertools.product((None, 0, 1), (None, 0, 2), (None, 1)) if any(a is not None for a in axes)]


@pytest.mark.filterwarnings("error:There is a performance drop")  # of an operator that vmap goes through in a loop
@pytest.mark.parametrize("axes", MAPPED)
@pytest.mark.parametrize("name", ["2d", "dead_phases", "unbatched"])
def test_vmap(name: str, axes: tuple[int | None, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    problem = dataclasses.replace(PROBLEMS[name], has_bias=True)
    tensors = [
        tensor if axis is None else torch.stack([tensor, tensor.flip(0), 2 * tensor], axis)
        for tensor, axis in zip(arguments(problem, requires_grad=False), axes, strict=True)
    ]
    calls = {}
    for operation in ("conv_transpose", "correlate", "weight_gradient"):
        counted = calls[operation] = Mock(side_effect=getattr(cuconvt.backends, operation))
        monkeypatch.setattr(cuconvt.backends, operation, counted)

    def mapped(function: Callable[..., Any]) -> Callable[..., Any]:
        return torch.vmap(lambda *t: function(problem, *t), axes)

    def loss(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *t: function(*t).square().sum()

    torch.testing.assert_close(mapped(ours)(*tensors), mapped(theirs)(*tensors))
    assert calls["conv_transpose"].call_count == 1
    # Gradients of each entry, and of all entries together.
    for transform in (
        lambda f: torch.vmap(torch.func.grad(loss(lambda *t: f(problem, *t)), (0, 1, 2)), axes)(*tensors),
        lambda f: torch.func.grad(loss(mapped(f)), (0, 1, 2))(*tensors),
    ):
        torch.testing.assert_close(transform(ours), transform(theirs))
    assert {operation: counted.call_count for operation, counted in calls.items()} == {
        "conv_transpose": 3,
        "correlate": 2,
        "weight_gradient": 2,
    }


@pytest.mark.filterwarnings("error:There is a performance drop")
def test_vmap_within_vmap() -> None:
    """Samples of an ensemble, and second derivatives, in both of which one axis is mapped within another."""
    x, weight, _ = arguments(PROBLEM, requires_grad=False)
    batches, weights = torch.stack([x, 2 * x, x.flip(0)], 1), torch.stack([weight, weight.flip(0)])

    def ensemble(function: Callable[..., Any]) -> Any:
        samples = torch.vmap(lambda x, w: function(PROBLEM, x, w), (1, None))
        return torch.vmap(samples, (None, 0))(batches, weights)

    def hessian(function: Callable[..., Any]) -> Any:
        return torch.func.hessian(lambda w: function(PROBLEM, x, w).pow(3).sum())(weight)

    for transform in (ensemble, hessian):
        torch.testing.assert_close(transform(ours), transform(theirs))


@pytest.mark.parametrize("requires_grad", [False, True])
def test_the_profiler_has_a_row_for_each_operator(requires_grad: bool) -> None:
    tensors = arguments(PROBLEM, requires_grad=requires_grad)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        y = ours(PROBLEM, *tensors)
        if requires_grad:
            y.sum().backward()
    rows = {event.key: event.count for event in profile.key_averages()}
    assert [rows.get(f"cuconvt::{name}", 0) for name in OPERATORS] == [1, requires_grad, requires_grad]


def test_func_transforms_under_a_mode() -> None:
    x, weight, bias = (tensor.detach() for tensor in arguments(PROBLEM))

    def per_sample(function: Callable[..., Any]) -> Any:
        def loss(weight: Any, x: Any) -> Any:
            return function(PROBLEM, x, weight, bias).square().sum()

        return torch.func.vmap(torch.func.grad(loss), (None, 0))(weight, x)

    expected = per_sample(theirs)
    with torch.device("cpu"):  # as torch.set_default_device does
        torch.testing.assert_close(per_sample(ours), expected)


def test_func_transforms_of_fake_tensors_under_a_mode() -> None:
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode(), torch.device("cpu"):
        x, weight = torch.empty(1, 2, 4, 4), torch.empty(2, 3, 2, 2)  # of a class whose __torch_function__ is disabled
        grad = torch.func.grad(lambda w: ct.conv_transpose2d(x, w).sum())(weight)
    assert grad.shape == weight.shape


def test_tensor_subclass_and_modes_see_the_operator() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(operator))
            return operator(*args, **(kwargs or {}))

    class Subclass(torch.Tensor):
        pass

    seen: list[str] = []
    x, weight, bias = arguments(PROBLEM)
    with Names():
        y = ours(PROBLEM, x, weight, bias)
        y.sum().backward()
    assert [name for name in seen if name.startswith("cuconvt")] == [f"cuconvt.{name}.default" for name in OPERATORS]
    assert type(ours(PROBLEM, x.detach().as_subclass(Subclass), weight, bias)) is Subclass


@pytest.mark.parametrize("name", ["3d", "2d", "1d", "unbatched"])
def test_flops_are_counted_as_those_of_torch(name: str) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    def counts(function: Callable[..., Any]) -> list[int]:
        counted = []
        for needed in ((), (0,), (1,), (0, 1)):
            tensors = arguments(PROBLEMS[name], requires_grad=False)
            for i in needed:
                tensors[i].requires_grad_()
            with FlopCounterMode(display=False) as counter:
                y = function(PROBLEMS[name], *tensors)
                if needed:
                    y.sum().backward()
            counted.append(counter.get_total_flops())
        return counted

    assert counts(ours) == counts(theirs)
    assert counts(ours)[0] > 0


def test_checkpoint() -> None:
    x, weight, bias = arguments(PROBLEM)
    y = torch.utils.checkpoint.checkpoint(lambda x: ours(PROBLEM, x, weight, bias), x, use_reentrant=False)
    y.square().sum().backward()
    expected = gradients(theirs, PROBLEM, [x, weight, bias], 2 * y.detach())
    torch.testing.assert_close([x.grad, weight.grad, bias.grad], expected[1:])


# A remembered call, with what stands in for the GPU.


def test_what_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cupy")
    from cuconvt.torch import launches

    launched = []
    monkeypatch.setattr(launches, "getDevice", lambda: -1)  # what a CPU tensor gives for its device
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: "current", raising=False)
    monkeypatch.setattr(launches, "_stream", lambda pointer: f"the {pointer} stream")
    x, weight, _ = (tensor.detach() for tensor in arguments(PROBLEM))
    like = in_channels_last(torch.empty(PROBLEM.out_shape, dtype=torch.float64), 3)
    call = launches.WarmCall(lambda *arguments: launched.append(arguments), like)
    y = call([x.data_ptr(), weight.data_ptr(), 0])
    assert (y.shape, y.stride(), y.dtype) == (like.shape, like.stride(), torch.float64)
    *addresses, stream, allocate = launched[0]
    assert addresses == [x.data_ptr(), weight.data_ptr(), 0, y.data_ptr()]
    assert stream == "the current stream"
    assert allocate == call._workspace
    assert launches.WarmCall(None, torch.empty(0).new_empty(9)[1:])(addresses) is None  # another alignment


def test_equal_parameters_of_another_type_are_another_call() -> None:
    from cuconvt.torch.kernels import _slot

    assert _slot("conv_transpose", 3, 2, 2, 2) is _slot("conv_transpose", 3, 2, 2, 2)
    assert _slot("conv_transpose", 3, 2, 2, 2.0) is not _slot("conv_transpose", 3, 2, 2, 2)


def test_only_numbers_that_stay_are_remembered() -> None:
    pytest.importorskip("cupy")
    from cuconvt.torch import kernels

    def is_remembered(*parameters: Any) -> bool:
        slot, result = kernels.Slot(), torch.empty(1, 3, 7, 7)
        kernels._first_call({"x": X, "weight": W}, (*parameters, None), lambda *_: "launched", slot, result)
        return slot.warm_call is not None

    ones, zeros, number = (1, 1), [0, 0], torch.tensor(1)  # a number that can change in place
    assert is_remembered(ones, zeros, zeros, 1, ones)
    assert not is_remembered((1, number), zeros, zeros, 1, ones)
    assert not is_remembered(ones, zeros, zeros, number, ones)


@pytest.mark.parametrize("precision", [["tf32"], {}])
def test_unhashable_precision_is_left_to_the_checks(precision: Any) -> None:
    from cuconvt.torch import kernels

    class OnGpu(torch.Tensor):
        is_cuda = True

    parameters = ((1, 1), (0, 0), (0, 0), 1, (1, 1))
    tensors = (X.as_subclass(OnGpu), W.as_subclass(OnGpu), None)
    slot, addresses = kernels._slot_of("conv_transpose", tensors, (), (*parameters, None))
    assert slot is not None
    assert addresses == [X.data_ptr(), W.data_ptr(), 0]
    assert kernels._slot_of("conv_transpose", tensors, (), (*parameters, precision)) == (None, ())


# Autocast.


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype: Any) -> None:
    tensors = arguments(PROBLEM, torch.float32)
    with torch.autocast("cpu", dtype):
        y = ours(PROBLEM, *tensors, precision="tf32")
    assert y.dtype == dtype
    y.sum().backward()
    assert all(tensor.grad.dtype == torch.float32 for tensor in tensors)
    rounded = [tensor.detach().to(dtype) for tensor in tensors]
    expected = gradients(ours, PROBLEM, rounded)
    assert torch.equal(y, expected[0])
    assert all(torch.equal(t.grad, e.float()) for t, e in zip(tensors, expected[1:], strict=True))
    with torch.autocast("cpu", dtype):
        assert ours(PROBLEM, *arguments(PROBLEM)).dtype == torch.float64  # as in torch, float64 stays
        with torch.autocast("cpu", enabled=False):
            assert ours(PROBLEM, *tensors).dtype == torch.float32
        got = torch.func.grad(lambda *t: ours(PROBLEM, *t).sum(), argnums=(0, 1, 2))(*tensors)
    assert all(torch.equal(g, tensor.grad) for g, tensor in zip(got, tensors, strict=True))


# Modules.

LAYERS = {
    1: {"in_channels": 4, "out_channels": 6, "kernel_size": 4, "stride": 2, "padding": 1, "groups": 2},
    2: {"in_channels": 4, "out_channels": 3, "kernel_size": (3, 2), "stride": (2, 1), "dilation": 2, "bias": False},
    3: {"in_channels": 2, "out_channels": 5, "kernel_size": 3, "stride": 2, "output_padding": 1},
}


def layers(rank: int, **keywords: Any) -> tuple[Any, Any]:
    """Return torch's layer and ours, each made with the same seed."""
    made = []
    for module in (torch.nn, ct):
        torch.manual_seed(3)
        made.append(getattr(module, f"ConvTranspose{rank}d")(**LAYERS[rank], **keywords))
    return made[0], made[1]


@pytest.mark.parametrize("rank", LAYERS)
def test_module_is_that_of_torch(rank: int) -> None:
    reference, layer = layers(rank)
    assert isinstance(layer, getattr(torch.nn, f"ConvTranspose{rank}d"))
    assert repr(layer) == repr(reference)
    for (name, value), (other_name, other) in zip(layer.named_parameters(), reference.named_parameters(), strict=True):
        assert name == other_name
        assert torch.equal(value, other)
    x = torch.randn(2, layer.in_channels, *(5, 6, 7)[:rank])
    torch.testing.assert_close(layer(x), reference(x))
    size = [
        extent + 1 if stride > 1 else extent for extent, stride in zip(layer(x).shape[2:], layer.stride, strict=True)
    ]
    if rank < 3:
        assert list(layer(x, output_size=size).shape[2:]) == size
        torch.testing.assert_close(layer(x, output_size=size), reference(x, output_size=size))
    with pytest.raises(ValueError, match="requested an output size"):
        layer(x, output_size=[100] * rank)


@pytest.mark.parametrize("rank", LAYERS)
def test_constructor_is_that_of_torch(rank: int) -> None:
    theirs, ours = (getattr(module, f"ConvTranspose{rank}d") for module in (torch.nn, ct))
    own = dict(inspect.signature(ours).parameters)
    precision = own.pop("precision")
    assert precision.kind is precision.KEYWORD_ONLY
    expected = inspect.signature(theirs).parameters
    assert [(p.name, p.kind, p.default) for p in own.values()] == [
        (p.name, p.kind, p.default) for p in expected.values()
    ]
    arguments = (4, 6, 3, 2, 1, 1, 2, False, 3, "zeros", "meta", torch.float64)
    assert repr(ours(*arguments)) == repr(theirs(*arguments))
    assert ours(*arguments).weight.is_meta
    assert ours(*arguments).weight.dtype == torch.float64
    assert type(torch.nn.utils.skip_init(ours, 4, 6, 3, precision="ieee")) is ours


@pytest.mark.parametrize("rank", LAYERS)
def test_state_dicts_are_exchanged(rank: int) -> None:
    reference, _ = layers(rank)
    layer = getattr(ct, f"ConvTranspose{rank}d")(**LAYERS[rank])
    layer.load_state_dict(reference.state_dict())
    x = torch.randn(2, layer.in_channels, *(5, 6, 7)[:rank])
    torch.testing.assert_close(layer(x), reference(x))
    with torch.no_grad():
        layer.weight.mul_(2)
    reference.load_state_dict(layer.state_dict())
    torch.testing.assert_close(layer(x), reference(x))


def through_torch_save(module: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), through_torch_save])
def test_module_copies(copied: Callable[[Any], Any]) -> None:
    layer = ct.ConvTranspose2d(2, 3, 2, precision="ieee")
    other = copied(layer)
    assert type(other) is ct.ConvTranspose2d
    assert other.precision == "ieee"
    assert "precision='ieee'" in repr(other)
    assert other.weight is not layer.weight
    x = torch.randn(1, 2, 3, 3)
    assert torch.equal(other(x), layer(x))


def test_padding_mode_rules() -> None:
    with pytest.raises(ValueError, match="padding mode is supported"):
        ct.ConvTranspose2d(2, 3, 2, padding_mode="reflect")
    layer = ct.ConvTranspose2d(2, 3, 2)
    layer.padding_mode = "reflect"
    with pytest.raises(ValueError, match="padding_mode must be 'zeros', got 'reflect'"):
        layer(torch.randn(1, 2, 3, 3))


# replace_modules.


def toy_model() -> Any:
    torch.manual_seed(0)
    shared = torch.nn.ConvTranspose2d(4, 4, 3, padding=1)
    return torch.nn.Sequential(
        torch.nn.Conv2d(2, 4, 3, padding=1),
        torch.nn.Sequential(shared, torch.nn.ReLU(inplace=True), shared),
        torch.nn.ConvTranspose2d(4, 2, 2, stride=2),
    )


def test_replace_modules() -> None:
    model = toy_model()
    x = torch.randn(1, 2, 6, 6)
    expected, before = model(x), dict(model.named_parameters())
    seen = []
    model[2].register_forward_hook(lambda *arguments: seen.append("hook"))
    assert ct.replace_modules(model, precision="ieee") == 2
    assert [type(m) for m in (model[1][0], model[2])] == [ct.ConvTranspose2d] * 2
    assert model[1][0] is model[1][2]
    assert model[2].precision == "ieee"
    assert all(before[name] is parameter for name, parameter in model.named_parameters())
    torch.testing.assert_close(model(x), expected)
    assert seen == ["hook"]
    assert ct.replace_modules(model) == 0
    assert ct.replace_modules(torch.nn.ConvTranspose1d(1, 1, 1)) == 1
    copy.deepcopy(model)


@pytest.mark.parametrize(("precision", "error"), [("fp32", ValueError), (16, TypeError), (["tf32"], TypeError)])
def test_unknown_precision_is_refused_before_anything_is_changed(precision: Any, error: Any) -> None:
    match = "precision must be None or one of 'tf32x3', 'ieee', 'tf32', got " + re.escape(repr(precision))
    with pytest.raises(error, match=match):
        ct.ConvTranspose2d(2, 3, 2, precision=precision)
    model = toy_model()
    with pytest.raises(error, match=match):
        ct.replace_modules(model, precision=precision)
    assert ct.replace_modules(model) == 2
    with pytest.raises(error, match=match):
        ct.conv_transpose2d(X, W, precision=precision)


def test_doctest() -> None:
    assert doctest.testmod(modules) == (0, 5)


def test_line_of_the_readme(capsys: pytest.CaptureFixture[str]) -> None:
    (line,) = re.findall(r'python -c "(.*)"', (Path(__file__).parents[1] / "README.md").read_text())
    exec(line, {})
    swapped, difference = re.fullmatch(
        r"(\d+) layer swapped, largest difference (.*)\n", capsys.readouterr().out
    ).groups()
    assert int(swapped) == 1
    assert float(difference) < 1e-5


def test_replace_modules_leaves_subclasses_and_keeps_parametrizations() -> None:
    class Own(torch.nn.ConvTranspose1d):
        pass

    model = torch.nn.Sequential(
        Own(2, 2, 2),
        torch.nn.utils.parametrizations.weight_norm(torch.nn.ConvTranspose1d(2, 3, 4, stride=2)),
        torch.nn.utils.parametrizations.weight_norm(torch.nn.Conv1d(3, 2, 1)),
    )
    copied = copy.deepcopy(model)
    x = torch.randn(1, 2, 5)
    expected = model(x)
    assert ct.replace_modules(model) == 1
    assert type(model[0]) is Own
    assert isinstance(model[1], ct.ConvTranspose1d)
    assert not isinstance(copied[1], ct.ConvTranspose1d)
    torch.testing.assert_close(model(x), expected)
    model(x).sum().backward()
    assert model[1].parametrizations.weight.original0.grad is not None
    torch.nn.utils.parametrize.remove_parametrizations(model[1], "weight")
    assert type(model[1]) is ct.ConvTranspose1d
    torch.testing.assert_close(model(x), expected)


def test_replace_modules_waits_for_lazy_layers() -> None:
    model = torch.nn.Sequential(torch.nn.LazyConvTranspose1d(2, 2))
    assert ct.replace_modules(model) == 0
    model(torch.randn(1, 3, 4))  # makes it a torch.nn.ConvTranspose1d
    assert ct.replace_modules(model) == 1


# Errors.

X, W = torch.randn(1, 4, 5, 5), torch.randn(4, 3, 3, 3)
BAD = {
    "weight of another rank": (X, torch.randn(4, 3, 3), {}),
    "x of another rank": (torch.randn(1, 4, 5, 5, 5), W, {}),
    "channels": (torch.randn(1, 5, 5, 5), W, {}),
    "groups": (X, W, {"groups": 3}),
    "no groups": (X, W, {"groups": 0}),
    "bias": (X, W, {"bias": torch.randn(4)}),
    "stride": (X, W, {"stride": 0}),
    "strides": (X, W, {"stride": (1, 2, 3)}),
    "padding": (X, W, {"padding": -1}),
    "too much padding": (X, W, {"padding": 9}),
    "dilation": (X, W, {"dilation": 0}),
    "output_padding": (X, W, {"output_padding": 1}),
    "negative output_padding": (X, W, {"output_padding": -1, "stride": 2}),
    "dtypes": (X, W.double(), {}),
    "bias's dtype": (X, W, {"bias": torch.randn(3).half()}),
    "integers": (X.long(), W.long(), {}),
    "devices": (X, W.to("meta"), {}),
}
# What torch refuses on a GPU alone, or, for a meta tensor, takes for a question about shapes.
OURS_ALONE = ("bias's dtype", "integers", "devices")


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_errors_are_those_of_torch(name: str, requires_grad: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*arguments: Any, **keywords: Any) -> None:
        raise AssertionError("something was computed")

    monkeypatch.setattr(cuconvt.backends, "conv_transpose", never)
    x, weight, keywords = BAD[name]
    if requires_grad and x.is_floating_point():
        x = x.detach().requires_grad_()
    if name not in OURS_ALONE:
        with pytest.raises((ValueError, RuntimeError)):
            functional.conv_transpose2d(x, weight, **keywords)
    with pytest.raises((ValueError, RuntimeError)):
        ct.conv_transpose2d(x, weight, **keywords)


@pytest.mark.parametrize("value", [1.0, "1", None, True, (1, 1.0), (True, 1), ((1, 0), (0, 1)), torch.tensor([1, 1])])
@pytest.mark.parametrize("name", ["stride", "padding", "output_padding", "dilation"])
def test_wrong_types(name: str, value: Any) -> None:
    for function in (functional.conv_transpose2d, ct.conv_transpose2d):
        with pytest.raises(TypeError, match=name):
            function(X, W, **{name: value})


NO_TENSORS = (np.ones((4, 3, 3, 3)), [1.0, 2.0, 3.0], 1.0)


@pytest.mark.parametrize(
    ("name", "value"), [("x", None), ("weight", None), *itertools.product(("x", "weight", "bias"), NO_TENSORS)]
)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_what_is_not_a_tensor(name: str, value: Any, requires_grad: bool) -> None:
    tensors = {"x": X.clone(), "weight": W.clone(), "bias": torch.zeros(3)}
    for tensor in tensors.values():
        tensor.requires_grad_(requires_grad)
    tensors[name] = value
    with pytest.raises(TypeError):
        functional.conv_transpose2d(*tensors.values())
    match = f"{name} must be a torch.Tensor, got {type(value).__name__}"
    with pytest.raises(TypeError, match=match):
        ct.conv_transpose2d(*tensors.values())
    with torch.device("cpu"), pytest.raises(TypeError, match=match):
        ct.conv_transpose2d(*tensors.values())
    with torch.autocast("cpu"), pytest.raises(TypeError, match=match):
        ct.conv_transpose2d(*tensors.values())
    if name != "x":
        with pytest.raises(TypeError, match=match):
            torch.func.vmap(lambda x: ct.conv_transpose2d(x, *list(tensors.values())[1:]))(X[None])


def test_one_value_stands_for_all_axes() -> None:
    y = functional.conv_transpose2d(X, W, None, (2,), [1], (1,))
    torch.testing.assert_close(ct.conv_transpose2d(X, W, None, (2,), [1], (1,)), y)


@pytest.mark.parametrize(
    "value", [2, (2, 1), [2, 1], torch.Size([2, 1]), np.int64(2), (np.int32(2), 1), torch.tensor(2)]
)
def test_integers_of_other_types(value: Any) -> None:
    y = functional.conv_transpose2d(X, W, None, value)
    torch.testing.assert_close(ct.conv_transpose2d(X, W, None, value), y)


@pytest.mark.parametrize("role", ["x", "weight", "bias", "out"])
def test_array_api_refuses_what_requires_grad(role: str) -> None:
    tensors = {"x": X, "weight": W, "bias": torch.randn(3), "out": torch.empty(1, 3, 7, 7)}
    tensors[role] = tensors[role].detach().requires_grad_()
    with pytest.raises(ValueError, match=rf"{role} requires grad.*cuconvt\.torch"):
        cuconvt.conv_transpose2d(**tensors)


@pytest.mark.parametrize("role", ["x", "weight", "bias"])
def test_array_api_refuses_dual_tensors(role: str) -> None:
    from torch.autograd import forward_ad

    tensors = {"x": X, "weight": W, "bias": torch.randn(3)}
    with forward_ad.dual_level():
        cuconvt.conv_transpose2d(**tensors)
        tensors[role] = forward_ad.make_dual(tensors[role], tensors[role])
        with pytest.raises(ValueError, match=rf"{role} is a dual tensor.*cuconvt\.torch"):
            cuconvt.conv_transpose2d(**tensors)


@pytest.mark.parametrize(
    "transform",
    [
        lambda f: torch.jit.trace(f, (X, W)),
        lambda f: torch.vmap(f, (0, None))(X[None], W),
        lambda f: torch.vmap(f, (None, 0))(X, W[None]),
        lambda f: torch.func.grad(lambda x, w: f(x, w).sum())(X, W),
        lambda f: torch.func.jvp(f, (X, W), (X, W)),
    ],
)
def test_array_api_refuses_what_is_traced(transform: Callable[..., Any]) -> None:
    with pytest.raises(TypeError, match=r"(x|weight) is traced by torch\.jit\.trace or a torch\.func.*cuconvt\.torch"):
        transform(cuconvt.conv_transpose2d)
    transform(ct.conv_transpose2d)


def test_jit_trace() -> None:
    layer = ct.ConvTranspose2d(4, 3, 2, stride=2)
    traced = torch.jit.trace(layer, X)
    other = torch.randn(2, 4, 3, 6)
    assert torch.equal(traced(other), layer(other))
    traced(other).sum().backward()
    assert layer.weight.grad is not None


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("rank", LAYERS)
@pytest.mark.parametrize("precision", [None, "ieee"])
def test_jit_script(rank: int, precision: str | None) -> None:
    reference, layer = layers(rank)
    ct.replace_modules(reference, precision=precision)
    x = torch.randn(2, layer.in_channels, *(5, 6, 7)[:rank])
    for module in (layer, reference):
        buffer = io.BytesIO()
        torch.jit.save(torch.jit.script(torch.nn.Sequential(module)), buffer)
        buffer.seek(0)
        (loaded,) = torch.jit.load(buffer).children()
        assert torch.equal(loaded(x), module(x))
        size = list(module(x).shape[2:])
        size[0] += 1 if rank < 3 else -1  # the third has an output padding, which cannot be more
        assert torch.equal(loaded(x, size), module(x, size))
        loaded(x).sum().backward()
        assert loaded.weight.grad is not None
