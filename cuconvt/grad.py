"""Gradients of the transposed convolutions, and of the convolutions, with respect to each of their arrays.

The order of the arguments is that of ``torch.nn.grad``. Every gradient is one of the three operations in
`cuconvt.backends`, on the geometry of the call that it belongs to: with respect to the input, a transposed convolution
becomes a strided correlation and a convolution a transposed convolution; with respect to the weight, both are the same
operation.
"""
# ruff: noqa: A002  (`input` is the name that torch.nn.grad gives it)

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from cuconvt import backends
from cuconvt.docs import BIAS_GRADIENT, CONV_INPUT, CONV_WEIGHT, INPUT_GRADIENT, WEIGHT_GRADIENT, documented
from cuconvt.geometry import (
    check_grad_output,
    check_rank,
    make_conv_geometry,
    make_geometry,
    normalise,
    normalise_conv,
    shape,
)
from cuconvt.steps import Call
from cuconvt.warm import slot_of

Array = TypeVar("Array")
IntOrInts = int | Sequence[int]
Padding = int | Sequence[int] | Sequence[tuple[int, int]]
ConvPadding = str | Padding
Parameters = tuple[Any, ...]


@documented(1, INPUT_GRADIENT)
def conv_transpose1d_input(
    input_size: Sequence[int],
    weight: Array,
    grad_output: Array,
    stride: IntOrInts = 1,
    padding: Padding = 0,
    output_padding: IntOrInts = 0,
    groups: int = 1,
    dilation: IntOrInts = 1,
    *,
    precision: str | None = None,
    out: Array | None = None,
) -> Array:
    parameters = (stride, padding, output_padding, groups, dilation, None)
    return _conv_transpose_input(1, input_size, weight, grad_output, parameters, precision, out)


@documented(2, INPUT_GRADIENT)
def conv_transpose2d_input(
    input_size: Sequence[int],
    weight: Array,
    grad_output: Array,
    stride: IntOrInts = 1,
    padding: Padding = 0,
    output_padding: IntOrInts = 0,
    groups: int = 1,
    dilation: IntOrInts = 1,
    *,
    precision: str | None = None,
    out: Array | None = None,
) -> Array:
    parameters = (stride, padding, output_padding, groups, dilation, None)
    return _conv_transpose_input(2, input_size, weight, grad_output, parameters, precision, out)


@documented(3, INPUT_GRADIENT)
def conv_transpose3d_input(
    input_size: Sequence[int],
    weight: Array,
    grad_output: Array,
    stride: IntOrInts = 1,
    padding: Padding = 0,
    output_padding: IntOrInts = 0,
    groups: int = 1,
    dilation: IntOrInts = 1,
    *,
    precision: str | None = None,
    out: Array | None = None,
) -> Array:
    parameters = (stride, padding, output_padding, groups, dilation, None)
    return _conv_transpose_input(3, input_size, weight, grad_output, parameters, precision, out)


@documented(1, WEIGHT_GRADIENT)
def conv_transpose1d_weight(
    input: Array,
    weight_size: Sequence[int],
    grad_output: Array,
    stride: IntOrInts = 1,
    padding: Padding = 0,
    output_padding: IntOrInts = 0,
    groups: int = 1,
    dilation: IntOrInts = 1,
    *,
    precision: str | None = None,
    out: Array | None = None,
) -> Array:
    parameters = (stride, padding, output_padding, groups, dilation, None)
    return _conv_transpose_weight(1, input, weight_size, grad_output, parameters, precision, out)


@documented(2, WEIGHT_GRADIENT)
def conv_transpose2d_weight(
    input: Array,
    weight_size: Sequence[int],
    grad_output: Array,
    stride: IntOrInts = 1,
    padding: Padding = 0,
    output_padding: IntOrInts = 0,
    groups: int = 1,
    dilation: IntOrInts = 1,
    *,
    precision: str | None = None,
    out: Array | None = None,
) -> Array:
    parameters = (stride, padding, output_padding, groups, dilation, None)
    return _conv_transpose_weight(2, input, weight_size, grad_output, parameters, precision, out)


@documented(3, WEIGHT_GRADIENT)
def conv_transpose3d_weight(
    input: Array,
    weight_size: Sequence[int],
    grad_output: Array,
    stride: IntOrInts = 1,
    padding: Padding = 0,
    output_padding: IntOrInts = 0,
    groups: int = 1,
    dilation: IntOrInts = 1,
    *,
    precision: str | None = None,
    out: Array | None = None,
) -> Array:
    parameters = (stride, padding, output_padding, groups, dilation, None)
    return _conv_transpose_weight(3, input, weight_size, grad_output, parameters, precision, out)


@documented(1, BIAS_GRADIENT)
def conv_transpose1d_bias(grad_output: Array, *, out: Array | None = None) -> Array:
    return _bias(1, grad_output, out)


@documented(2, BIAS_GRADIENT)
def conv_transpose2d_bias(grad_output: Array, *, out: Array | None = None) -> Array:
    return _bias(2, grad_output, out)


@documented(3, BIAS_GRADIENT)
def conv_transpose3d_bias(grad_output: Array, *, out: Array | None = None) -> Array:
    return _bias(3, grad_output, out)


@documented(1, CONV_INPUT)
def conv1d_input(
    input_size: Sequence[int],
    weight: Array,
    grad_output: Array,
    stride: IntOrInts = 1,
    padding: ConvPadding = 0,
    dilation: IntOrInts = 1,
    groups: int = 1,
    *,
    precision: str | None = None,
    out: Array | None = None,
) -> Array:
    parameters = (stride, padding, dilation, groups)
    return _conv_input(1, input_size, weight, grad_output, parameters, precision, out)


@documented(2, CONV_INPUT)
def conv2d_input(
    input_size: Sequence[int],
    weight: Array,
    grad_output: Array,
    stride: IntOrInts = 1,
    padding: ConvPadding = 0,
    dilation: IntOrInts = 1,
    groups: int = 1,
    *,
    precision: str | None = None,
    out: Array | None = None,
) -> Array:
    parameters = (stride, padding, dilation, groups)
    return _conv_input(2, input_size, weight, grad_output, parameters, precision, out)


@documented(3, CONV_INPUT)
def conv3d_input(
    input_size: Sequence[int],
    weight: Array,
    grad_output: Array,
    stride: IntOrInts = 1,
    padding: ConvPadding = 0,
    dilation: IntOrInts = 1,
    groups: int = 1,
    *,
    precision: str | None = None,
    out: Array | None = None,
) -> Array:
    parameters = (stride, padding, dilation, groups)
    return _conv_input(3, input_size, weight, grad_output, parameters, precision, out)


@documented(1, CONV_WEIGHT)
def conv1d_weight(
    input: Array,
    weight_size: Sequence[int],
    grad_output: Array,
    stride: IntOrInts = 1,
    padding: ConvPadding = 0,
    dilation: IntOrInts = 1,
    groups: int = 1,
    *,
    precision: str | None = None,
    out: Array | None = None,
) -> Array:
    parameters = (stride, padding, dilation, groups)
    return _conv_weight(1, input, weight_size, grad_output, parameters, precision, out)


@documented(2, CONV_WEIGHT)
def conv2d_weight(
    input: Array,
    weight_size: Sequence[int],
    grad_output: Array,
    stride: IntOrInts = 1,
    padding: ConvPadding = 0,
    dilation: IntOrInts = 1,
    groups: int = 1,
    *,
    precision: str | None = None,
    out: Array | None = None,
) -> Array:
    parameters = (stride, padding, dilation, groups)
    return _conv_weight(2, input, weight_size, grad_output, parameters, precision, out)


@documented(3, CONV_WEIGHT)
def conv3d_weight(
    input: Array,
    weight_size: Sequence[int],
    grad_output: Array,
    stride: IntOrInts = 1,
    padding: ConvPadding = 0,
    dilation: IntOrInts = 1,
    groups: int = 1,
    *,
    precision: str | None = None,
    out: Array | None = None,
) -> Array:
    parameters = (stride, padding, dilation, groups)
    return _conv_weight(3, input, weight_size, grad_output, parameters, precision, out)


def _conv_transpose_input(
    rank: int, input_size: Any, weight: Any, grad_output: Any, parameters: Parameters, precision: Any, out: Any
) -> Any:
    arrays = (grad_output, weight, None)
    slot = slot_of("conv_transpose_input", arrays, out, (rank, precision, input_size, *parameters))
    if (result := slot.repeat(arrays, out)) is not None:
        return result
    call = Call({"grad_output": grad_output, "weight": weight}, out)
    grad_shape, weight_shape = call.shapes
    sizes = (shape("input_size", input_size), weight_shape, None)
    geometry = make_geometry(rank, *sizes, *normalise(rank, *parameters), "input_size")
    check_grad_output(grad_shape, geometry.out_shape)

    def compute(views: list[Any], precision: str | None) -> None:
        grad_output, weight, out = views
        launch = backends.correlate(grad_output, weight, None, geometry, precision, out)
        slot.remember(launch, (grad_output, weight, None), out)

    return call.run(geometry.x_shape, precision, compute, spatial=rank)


def _conv_transpose_weight(
    rank: int, input: Any, weight_size: Any, grad_output: Any, parameters: Parameters, precision: Any, out: Any
) -> Any:
    arrays = (input, grad_output)
    slot = slot_of("conv_transpose_weight", arrays, out, (rank, precision, weight_size, *parameters))
    if (result := slot.repeat(arrays, out)) is not None:
        return result
    call = Call({"input": input, "grad_output": grad_output}, out)
    input_shape, grad_shape = call.shapes
    sizes = (input_shape, shape("weight_size", weight_size), None)
    geometry = make_geometry(rank, *sizes, *normalise(rank, *parameters), "input", "weight_size")
    check_grad_output(grad_shape, geometry.out_shape)

    def compute(views: list[Any], precision: str | None) -> None:
        x, y, out = views
        launch = backends.weight_gradient(x, y, geometry, precision, out)
        slot.remember(launch, (x, y), out)

    return call.run(sizes[1], precision, compute)


def _bias(rank: int, grad_output: Any, out: Any) -> Any:
    arrays = (grad_output,)
    slot = slot_of("bias", arrays, out, (rank,))
    if (result := slot.repeat(arrays, out)) is not None:
        return result
    call = Call({"grad_output": grad_output}, out)
    (grad_shape,) = call.shapes
    check_rank("grad_output", grad_shape, rank, "C_out")

    def compute(views: list[Any], precision: str | None) -> None:
        grad_output, out = views
        launch = backends.channel_sums(grad_output, rank, out)
        slot.remember(launch, (grad_output,), out)

    return call.run((grad_shape[-rank - 1],), None, compute)


def _conv_input(
    rank: int, input_size: Any, weight: Any, grad_output: Any, parameters: Parameters, precision: Any, out: Any
) -> Any:
    arrays = (grad_output, weight, None)
    slot = slot_of("conv_input", arrays, out, (rank, precision, input_size, *parameters))
    if (result := slot.repeat(arrays, out)) is not None:
        return result
    call = Call({"grad_output": grad_output, "weight": weight}, out)
    grad_shape, weight_shape = call.shapes
    sizes = (shape("input_size", input_size), weight_shape, None)
    geometry = make_conv_geometry(rank, *sizes, *normalise_conv(rank, *parameters), "input_size")
    check_grad_output(grad_shape, geometry.x_shape)

    def compute(views: list[Any], precision: str | None) -> None:
        grad_output, weight, out = views
        launch = backends.conv_transpose(grad_output, weight, None, geometry, precision, out)
        slot.remember(launch, (grad_output, weight, None), out)

    return call.run(geometry.out_shape, precision, compute, spatial=rank)


def _conv_weight(
    rank: int, input: Any, weight_size: Any, grad_output: Any, parameters: Parameters, precision: Any, out: Any
) -> Any:
    arrays = (grad_output, input)  # as they are launched: what the convolution reads is the result
    slot = slot_of("conv_weight", arrays, out, (rank, precision, weight_size, *parameters))
    if (result := slot.repeat(arrays, out)) is not None:
        return result
    call = Call({"input": input, "grad_output": grad_output}, out)
    input_shape, grad_shape = call.shapes
    sizes = (input_shape, shape("weight_size", weight_size), None)
    geometry = make_conv_geometry(rank, *sizes, *normalise_conv(rank, *parameters), "input", "weight_size")
    check_grad_output(grad_shape, geometry.x_shape)

    def compute(views: list[Any], precision: str | None) -> None:
        y, x, out = views
        launch = backends.weight_gradient(x, y, geometry, precision, out)
        slot.remember(launch, (x, y), out)

    return call.run(sizes[1], precision, compute)
