"""The three operators: the transposed convolution and its gradients with respect to its input and its weight.

Each is linear in both of its tensors, and the derivatives of each are the other two: with T(x, w) the transposed
convolution, I(w, g) its gradient with respect to x and W(x, g) the one with respect to w,

    T(x, w):  dx = I(w, dy)   dw = W(x, dy)
    I(w, g):  dw = W(di, g)   dg = T(di, w)
    W(x, g):  dx = I(dv, g)   dg = T(x, dv)

so that they can be differentiated as often as one likes. In forward mode each is the sum of itself over the tangents:
T(dx, w) + T(x, dw), and so on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from cuconvt.geometry import make_geometry, normalise
from cuconvt.torch import batching, kernels
from cuconvt.torch.dispatch import Node, Operator
from cuconvt.torch.kernels import check_tensors, result_like

_PARAMETERS = "int[] stride, int[] padding, int[] output_padding, int groups, int[] dilation, str? precision"
_NO_GRADIENTS = (None,) * 7  # for the parameters and the last argument of a node

Ints = Sequence[int]


def _fake_conv_transpose(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Ints,
    padding: Ints,
    output_padding: Ints,
    groups: int,
    dilation: Ints,
    precision: str | None,
) -> Tensor:
    check_tensors(x=x, weight=weight, bias=bias)
    rank = len(stride)
    normalised = normalise(rank, stride, padding, output_padding, groups, dilation, None)
    bias_shape = None if bias is None else tuple(bias.shape)
    # Not by way of the memo, which cannot hold symbolic extents.
    geometry = make_geometry.__wrapped__(rank, tuple(x.shape), tuple(weight.shape), bias_shape, *normalised)
    return result_like(x, weight, geometry.out_shape, rank)


def _fake_input(weight: Tensor, grad_output: Tensor, input_size: Ints, stride: Ints, *parameters: Any) -> Tensor:
    return result_like(grad_output, weight, input_size, len(stride))


def _fake_weight(x: Tensor, grad_output: Tensor, weight_size: Ints, *parameters: Any) -> Tensor:
    return x.new_empty(weight_size)


class ConvTranspose(Node):
    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight = inputs[:2]
        ctx.x_shape, ctx.weight_shape, ctx.parameters = x.shape, weight.shape, inputs[3:9]
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        ctx.save_for_backward(x if needs_weight else None, weight if needs_x else None)
        if forward_ad._current_level >= 0:  # then `jvp` is called at once if at all
            ctx.save_for_forward(x, weight)
            ctx.out_shape = output.shape

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        grad_x = grad_weight = grad_bias = None
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        if needs_x:
            grad_x = conv_transpose_input(weight, grad, ctx.x_shape, *ctx.parameters)
        if needs_weight:
            grad_weight = conv_transpose_weight(x, grad, ctx.weight_shape, *ctx.parameters)
        if needs_bias:
            rank = len(ctx.weight_shape) - 2
            grad_bias = grad.sum((*range(grad.dim() - rank - 1), *range(-rank, 0)))  # all axes but the channels'
        return grad_x, grad_weight, grad_bias, *_NO_GRADIENTS

    @staticmethod
    def jvp(ctx: Any, dx: Tensor | None, dw: Tensor | None, dbias: Tensor | None, *_: None) -> Tensor | None:
        tangent = _bilinear_jvp(conv_transpose, ctx.saved_tensors, (dx, dw), None, *ctx.parameters)
        if dbias is not None:
            dbias = dbias.reshape(-1, *(1,) * (len(ctx.weight_shape) - 2))
            tangent = dbias.expand(ctx.out_shape) if tangent is None else tangent + dbias
        return tangent


class ConvTransposeInput(Node):
    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        weight, grad_output = inputs[:2]
        ctx.x_shape, ctx.weight_shape, ctx.parameters = inputs[2], weight.shape, inputs[3:9]
        needs_weight, needs_grad = ctx.needs_input_grad[:2]
        ctx.save_for_backward(weight if needs_grad else None, grad_output if needs_weight else None)
        if forward_ad._current_level >= 0:
            ctx.save_for_forward(weight, grad_output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        weight, grad_output = ctx.saved_tensors
        grad_weight = grad_grad_output = None
        if ctx.needs_input_grad[0]:
            grad_weight = conv_transpose_weight(grad, grad_output, ctx.weight_shape, *ctx.parameters)
        if ctx.needs_input_grad[1]:
            grad_grad_output = conv_transpose(grad, weight, None, *ctx.parameters)
        return grad_weight, grad_grad_output, None, *_NO_GRADIENTS

    @staticmethod
    def jvp(ctx: Any, dw: Tensor | None, dg: Tensor | None, *_: None) -> Tensor | None:
        return _bilinear_jvp(conv_transpose_input, ctx.saved_tensors, (dw, dg), ctx.x_shape, *ctx.parameters)


class ConvTransposeWeight(Node):
    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, grad_output = inputs[:2]
        ctx.x_shape, ctx.weight_shape, ctx.parameters = x.shape, inputs[2], inputs[3:9]
        needs_x, needs_grad = ctx.needs_input_grad[:2]
        ctx.save_for_backward(x if needs_grad else None, grad_output if needs_x else None)
        if forward_ad._current_level >= 0:
            ctx.save_for_forward(x, grad_output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, grad_output = ctx.saved_tensors
        grad_x = grad_grad_output = None
        if ctx.needs_input_grad[0]:
            grad_x = conv_transpose_input(grad, grad_output, ctx.x_shape, *ctx.parameters)
        if ctx.needs_input_grad[1]:
            grad_grad_output = conv_transpose(x, grad, None, *ctx.parameters)
        return grad_x, grad_grad_output, None, *_NO_GRADIENTS

    @staticmethod
    def jvp(ctx: Any, dx: Tensor | None, dg: Tensor | None, *_: None) -> Tensor | None:
        return _bilinear_jvp(conv_transpose_weight, ctx.saved_tensors, (dx, dg), ctx.weight_shape, *ctx.parameters)


def _bilinear_jvp(
    operator: Operator, tensors: Sequence[Tensor], tangents: Sequence[Tensor | None], *others: Any
) -> Tensor | None:
    """Return the tangent of an operator of two tensors, of which at least one has a tangent, else None."""
    (first, second), (d_first, d_second) = tensors, tangents
    from_first = None if d_first is None else operator(d_first, second, *others)
    if d_second is None:
        return from_first
    from_second = operator(first, d_second, *others)
    return from_second if from_first is None else from_first + from_second


def _cast(dtype: torch.dtype, x: Tensor, weight: Tensor, bias: Tensor | None, *parameters: Any) -> tuple[Any, ...]:
    """Cast all floats but float64 to autocast's dtype, as for PyTorch's layers; `precision` is float32's alone."""

    def cast(tensor: Tensor) -> Tensor:
        lower = tensor.is_floating_point() and tensor.dtype != torch.float64
        return tensor.to(dtype) if lower else tensor

    x, weight, bias = cast(x), cast(weight), None if bias is None else cast(bias)
    *others, precision = parameters
    return x, weight, bias, *others, precision if x.dtype == torch.float32 else None


conv_transpose = Operator(
    "conv_transpose",
    f"(Tensor x, Tensor weight, Tensor? bias, {_PARAMETERS}) -> Tensor",
    kernels.conv_transpose,
    _fake_conv_transpose,
    ConvTranspose,
    batching.conv_transpose,
)
conv_transpose.register_autocast(_cast)

# A gradient has the dtype of the call that it belongs to, whether autocast is on or off: these two have no rule for it.
conv_transpose_input = Operator(
    "conv_transpose_input",
    f"(Tensor weight, Tensor grad_output, SymInt[] input_size, {_PARAMETERS}) -> Tensor",
    kernels.conv_transpose_input,
    _fake_input,
    ConvTransposeInput,
    batching.conv_transpose_input,
)
conv_transpose_weight = Operator(
    "conv_transpose_weight",
    f"(Tensor x, Tensor grad_output, SymInt[] weight_size, {_PARAMETERS}) -> Tensor",
    kernels.conv_transpose_weight,
    _fake_weight,
    ConvTransposeWeight,
    batching.conv_transpose_weight,
)
