"""What a gradient or a convolution must be: float64 references, and the one check that every backend passes.

All are described by the `Problem` of a transposed convolution: x and y (of the shape of its result) are drawn from its
seed, whichever of them is given and whichever computed.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from harness import is_channels_last, to_numpy
from reference import Expected, direct, exact, torch
from strategies import DTYPES, OUT_LAYOUTS, Problem, full_extent, place

import cuconvt

Arrays = tuple[np.ndarray, np.ndarray]


def gradient_of(problem: Problem, dtype: np.dtype) -> np.ndarray:
    """Draw an array of the shape of the result."""
    y = np.random.default_rng([problem.seed, 1]).standard_normal(problem.out_shape)
    if problem.x_layout == "broadcast":
        y[1:] = y[:1]
    return y.astype(dtype)


def as_conv(problem: Problem) -> Problem:
    """Return the problem whose adjoint a convolution with these parameters is: as many results as the stride allows."""
    axes = list(zip(problem.extent, problem.output_padding, problem.stride, strict=True))
    return dataclasses.replace(
        problem,
        extent=tuple(i + extra // s for i, extra, s in axes),
        output_padding=tuple(extra % s for _, extra, s in axes),
    )


# The definition, summed in one type from first to last.


def direct_input(problem: Problem, y: np.ndarray, weight: np.ndarray, accumulator: type = np.float64) -> np.ndarray:
    p = problem
    weight = weight.reshape(p.groups, p.c_in_per_group, p.c_out_per_group, *p.kernel).astype(accumulator)
    y = _uncropped(p, y.astype(accumulator))
    total = np.zeros((y.shape[0], p.groups, p.c_in_per_group, *p.extent), accumulator)
    for tap in itertools.product(*map(range, p.kernel)):
        reached = y[(..., *_reached(p, tap))]
        for c in range(p.c_out_per_group):
            taps = weight[(slice(None), slice(None), c, *tap)].reshape(1, p.groups, -1, *(1,) * p.rank)
            total += reached[:, :, c, None] * taps
    return total.reshape(p.x_shape)


def direct_weight(problem: Problem, x: np.ndarray, y: np.ndarray, accumulator: type = np.float64) -> np.ndarray:
    p = problem
    x = x.astype(accumulator).reshape(-1, p.groups, p.c_in_per_group, 1, *p.extent)
    y = _uncropped(p, y.astype(accumulator))
    total = np.zeros((p.groups, p.c_in_per_group, p.c_out_per_group, *p.kernel), accumulator)
    for tap in itertools.product(*map(range, p.kernel)):
        products = x * y[(..., *_reached(p, tap))][:, :, None]
        products = np.moveaxis(products, 0, 3).reshape(*total.shape[:3], -1)
        if products.size:
            total[(..., *tap)] = np.add.accumulate(products, axis=-1)[..., -1]
    return total.reshape(p.weight_shape)


def direct_bias(problem: Problem, y: np.ndarray, accumulator: type = np.float64) -> np.ndarray:
    y = np.moveaxis(y.astype(accumulator), -problem.rank - 1, 0).reshape(problem.c_out, -1)
    return np.add.accumulate(y, axis=-1)[:, -1] if y.size else np.zeros(problem.c_out, accumulator)


def _reached(problem: Problem, tap: Sequence[int]) -> tuple[slice, ...]:
    """The outputs, before padding crops them, that a tap reaches from all inputs."""
    axes = zip(tap, problem.dilation, problem.extent, problem.stride, strict=True)
    return tuple(slice(k * d, k * d + (i - 1) * s + 1, s) for k, d, i, s in axes)


def _uncropped(problem: Problem, y: np.ndarray) -> np.ndarray:
    p = problem
    full = full_extent(p.extent, p.kernel, p.stride, p.dilation)
    room = tuple(f + extra for f, extra in zip(full, p.output_padding, strict=True))
    y = y.reshape(-1, p.groups, p.c_out_per_group, *p.out_shape[-p.rank :])
    whole = np.zeros((*y.shape[:3], *room), y.dtype)
    kept = tuple(slice(before, r - after) for (before, after), r in zip(p.padding, room, strict=True))
    whole[(..., *kept)] = y
    return whole


# The same by torch's autograd.


def via_autograd(problem: Problem, x: np.ndarray, weight: np.ndarray, y: np.ndarray) -> Arrays:
    """torch's gradients in float64 with respect to x and weight; without padding, since torch's is symmetric."""
    p = problem
    function = getattr(torch.nn.functional, f"conv_transpose{p.rank}d")
    x64, weight64 = (torch.from_numpy(a.astype(np.float64)).requires_grad_() for a in (x, weight))
    result = function(x64, weight64, stride=p.stride, groups=p.groups, dilation=p.dilation)
    # What output_padding adds lies past every tap.
    reached = _uncropped(p, y.astype(np.float64))[(..., *map(slice, result.shape[-p.rank :]))]
    result.backward(torch.from_numpy(reached.reshape(result.shape)))
    return x64.grad.numpy(), weight64.grad.numpy()


def exact_input(problem: Problem, y: np.ndarray, weight: np.ndarray) -> np.ndarray:
    if torch is None or 0 in y.shape:
        return direct_input(problem, y, weight)
    return via_autograd(problem, np.zeros(problem.x_shape), weight, y)[0]


def exact_weight(problem: Problem, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    if torch is None or 0 in y.shape:
        return direct_weight(problem, x, y)
    return via_autograd(problem, x, np.zeros(problem.weight_shape), y)[1]


# The check.


class ExpectedOf(Expected):
    """The exact values of a bilinear operation and how far from them a result may be."""

    def __init__(
        self,
        problem: Problem,
        exact: Callable[..., np.ndarray],
        direct: Callable[..., np.ndarray],
        *factors: np.ndarray,
        bias: np.ndarray | None = None,
    ):
        self.problem, self.factors, self.direct = problem, factors, direct
        self.arguments = (*factors, bias)
        self.dtype = factors[0].dtype
        self.exact = exact(problem, *(a.astype(np.float64) for a in factors))
        self.products = exact(problem, *(np.abs(a.astype(np.float64)) for a in factors))
        self.magnitude = self.products
        if bias is not None:
            per_channel = bias.astype(np.float64).reshape(-1, *(1,) * problem.rank)
            self.exact, self.magnitude = self.exact + per_channel, self.products + np.abs(per_channel)

    def _same_precision_error(self) -> float:
        accumulator = np.float64 if self.dtype == np.float64 else np.float32
        bias = self.arguments[2]
        sums = self.direct(self.problem, *self.factors, accumulator)
        if bias is not None:
            sums = sums + bias.astype(accumulator).reshape(-1, *(1,) * self.problem.rank)
        error = np.abs(sums - self.exact)
        return float(np.max(error / np.where(self.magnitude == 0, 1, self.magnitude), initial=0))


@dataclass(frozen=True)
class Operation:
    """A call of one problem: its inputs with their layouts, and what it must give."""

    function: Callable[..., Any]  # of the inputs, precision and out
    inputs: Sequence[tuple[np.ndarray, str]]
    expected: ExpectedOf
    out_layout: str
    keeps_layout: bool = True  # of the first input


def _input(p: Problem, dtype: np.dtype) -> Operation:
    weight, y = p.arrays(dtype)[1], gradient_of(p, dtype)
    gradient = _of_rank(cuconvt.grad, "conv_transpose{}d_input", p)

    def function(y: Any, weight: Any, **keywords: Any) -> Any:
        return gradient(p.x_shape, weight, y, **p.parameters, **keywords)

    expected = ExpectedOf(p, exact_input, direct_input, y, weight)
    return Operation(function, [(y, _y_layout(p)), (weight, p.weight_layout)], expected, _own(p.x_layout))


def _weight(p: Problem, dtype: np.dtype) -> Operation:
    x, y = p.arrays(dtype)[0], gradient_of(p, dtype)
    gradient = _of_rank(cuconvt.grad, "conv_transpose{}d_weight", p)

    def function(x: Any, y: Any, **keywords: Any) -> Any:
        return gradient(x, p.weight_shape, y, **p.parameters, **keywords)

    expected = ExpectedOf(p, exact_weight, direct_weight, x, y)
    inputs = [(x, p.x_layout), (y, _y_layout(p))]
    return Operation(function, inputs, expected, p.weight_layout, keeps_layout=False)


def _conv(p: Problem, dtype: np.dtype) -> Operation:
    p = as_conv(p)
    weight, y = p.arrays(dtype)[1], gradient_of(p, dtype)
    inputs, bias = [(y, _y_layout(p)), (weight, p.weight_layout)], None
    if p.has_bias:
        bias = np.random.default_rng([p.seed, 2]).standard_normal(weight.shape[0]).astype(dtype)
        inputs.append((bias, p.bias_layout))
    conv = _of_rank(cuconvt, "conv{}d", p)

    def function(*arrays: Any, **keywords: Any) -> Any:
        return conv(*arrays, **conv_parameters(p), **keywords)

    expected = ExpectedOf(p, exact_input, direct_input, y, weight, bias=bias)
    return Operation(function, inputs, expected, _own(p.x_layout))


def _conv_input(p: Problem, dtype: np.dtype) -> Operation:
    p = as_conv(p)
    x, weight, _ = p.arrays(dtype)
    gradient = _of_rank(cuconvt.grad, "conv{}d_input", p)

    def function(x: Any, weight: Any, **keywords: Any) -> Any:
        return gradient(p.out_shape, weight, x, **conv_parameters(p), **keywords)

    def summed(p: Problem, x: np.ndarray, weight: np.ndarray, accumulator: type) -> np.ndarray:
        return direct(p, x, weight, None, accumulator)

    expected = ExpectedOf(p, lambda p, x, weight: exact(p, x, weight, None), summed, x, weight)
    return Operation(function, [(x, p.x_layout), (weight, p.weight_layout)], expected, p.out_layout)


def _conv_weight(p: Problem, dtype: np.dtype) -> Operation:
    p = as_conv(p)
    x, y = p.arrays(dtype)[0], gradient_of(p, dtype)
    gradient = _of_rank(cuconvt.grad, "conv{}d_weight", p)

    def function(x: Any, y: Any, **keywords: Any) -> Any:
        return gradient(y, p.weight_shape, x, **conv_parameters(p), **keywords)

    expected = ExpectedOf(p, exact_weight, direct_weight, x, y)
    inputs = [(x, p.x_layout), (y, _y_layout(p))]
    return Operation(function, inputs, expected, p.weight_layout, keeps_layout=False)


GRADIENTS = {"input": _input, "weight": _weight}
CONVOLUTIONS = {"conv": _conv, "conv_input": _conv_input, "conv_weight": _conv_weight}
OPERATIONS = GRADIENTS | CONVOLUTIONS


def conv_parameters(problem: Problem) -> dict[str, Any]:
    """The arguments of a convolution apart from the arrays."""
    return {name: value for name, value in problem.parameters.items() if name != "output_padding"}


def _of_rank(module: Any, name: str, problem: Problem) -> Any:
    return getattr(module, name.format(problem.rank))


def _y_layout(problem: Problem) -> str:
    return "broadcast" if problem.x_layout == "broadcast" else problem.out_layout


def _own(layout: str) -> str:
    """A layout for an array that is written."""
    return layout if layout in OUT_LAYOUTS else "contiguous"


def check(name: str, problem: Problem, dtype: str, xp: Any = np, precision: str | None = None, calls: int = 3) -> None:
    """Run an operation with arrays of `xp` (numpy or cupy) and compare everything that the contract promises.

    `calls` are those of `harness.check`.
    """
    o = OPERATIONS[name](problem, DTYPES[dtype])
    rank, expected = problem.rank, o.expected
    placed = [place(values, rank if values.ndim > 1 else 1, layout, xp) for values, layout in o.inputs]
    arrays, buffers = [view for view, _ in placed], [buffer for _, buffer in placed]
    inputs_before = [buffer.copy() for buffer in buffers]

    if calls == 3:
        result = o.function(*arrays, precision=precision)
        assert type(result) is xp.ndarray
        expected.assert_close(to_numpy(result), precision)
        if o.keeps_layout and not arrays[0].flags.c_contiguous and is_channels_last(arrays[0], rank):
            assert is_channels_last(result, rank)
        elif not o.keeps_layout or arrays[0].flags.c_contiguous:
            assert result.flags.c_contiguous

    nan = np.full(expected.exact.shape, np.nan, DTYPES[dtype])
    out, out_buffer = place(nan, rank, o.out_layout, xp)
    results = []
    for _ in range(min(calls, 2)):
        out_buffer.fill(-1)  # all bits set: NaN, inside and outside of `out`
        assert o.function(*arrays, precision=precision, out=out) is out
        results.append(to_numpy(out))
    expected.assert_close(results[0], precision)
    assert results[0].tobytes() == results[-1].tobytes(), f"two calls gave two results, {name}, {dtype}, {problem}"

    out.view(out_buffer.dtype)[...] = -1
    assert (out_buffer == -1).all(), f"memory beside out was written, {name}, {dtype}, {problem}"
    for before, after in zip(inputs_before, buffers, strict=True):
        assert (before == after).all(), f"an input was written, {name}, {dtype}, {problem}"
