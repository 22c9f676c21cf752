"""conv_transpose1d, conv_transpose2d and conv_transpose3d, as `torch.nn.functional` has them."""
# ruff: noqa: A002  (`input` is the name that torch.nn.functional gives it)

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cuconvt.torch.operators import conv_transpose

IntOrInts = int | Sequence[int]

_DOCSTRING = """Transposed convolution over {rank} spatial {axis_or_axes}, with gradients.

The arguments are those of `torch.nn.functional.conv_transpose{rank}d`, and `precision`.

Parameters
----------
input : Tensor, shape (N, C_in, {axes}) or, unbatched, (C_in, {axes})
    On the CPU or a CUDA device; float16, bfloat16, float32 or float64. Any strides.
weight : Tensor, shape (C_in, C_out/groups, {kernel})
    Of the input's device and dtype, as is `bias`.
bias : Tensor, shape (C_out,), optional
    Added to every output of its channel.
stride, padding, output_padding, dilation : int or sequence of {rank} int
    As in `cuconvt.conv_transpose{rank}d`; padding is the same at both ends of an axis.
groups : int, default 1
    Number of groups into which the channels are split.
precision : {{"tf32x3", "ieee", "tf32"}}, optional
    How float32 is multiplied, in the gradients too; None is "tf32x3", as accurate as float32. PyTorch's own switches
    for TF32 are not read. Must be None for the other dtypes, and is ignored where autocast has chosen one of them.

Returns
-------
Tensor, shape (N, C_out, {axes}) or, unbatched, (C_out, {axes})
    Channels-last in memory where the input is, else contiguous. Where the input is both, with one channel or one
    position, its strides decide, or else the weight's.

Raises
------
ValueError, RuntimeError
    A shape, a parameter, a dtype or a device does not fit. Nothing is launched then.
TypeError
    An argument is not a tensor, or a parameter not an integer.
"""


def conv_transpose1d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: IntOrInts = 1,
    padding: IntOrInts = 0,
    output_padding: IntOrInts = 0,
    groups: int = 1,
    dilation: IntOrInts = 1,
    *,
    precision: str | None = None,
) -> Tensor:
    return _conv_transpose(1, input, weight, bias, stride, padding, output_padding, groups, dilation, precision)


def conv_transpose2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: IntOrInts = 1,
    padding: IntOrInts = 0,
    output_padding: IntOrInts = 0,
    groups: int = 1,
    dilation: IntOrInts = 1,
    *,
    precision: str | None = None,
) -> Tensor:
    return _conv_transpose(2, input, weight, bias, stride, padding, output_padding, groups, dilation, precision)


def conv_transpose3d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: IntOrInts = 1,
    padding: IntOrInts = 0,
    output_padding: IntOrInts = 0,
    groups: int = 1,
    dilation: IntOrInts = 1,
    *,
    precision: str | None = None,
) -> Tensor:
    return _conv_transpose(3, input, weight, bias, stride, padding, output_padding, groups, dilation, precision)


for _rank, _function in enumerate((conv_transpose1d, conv_transpose2d, conv_transpose3d), 1):
    _function.__doc__ = _DOCSTRING.format(
        rank=_rank,
        axis_or_axes="axis" if _rank == 1 else "axes",
        axes=("W", "H, W", "D, H, W")[_rank - 1],
        kernel=("kW", "kH, kW", "kD, kH, kW")[_rank - 1],
    )


def _conv_transpose(
    rank: int,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: IntOrInts,
    padding: IntOrInts,
    output_padding: IntOrInts,
    groups: int,
    dilation: IntOrInts,
    precision: str | None,
) -> Tensor:
    return conv_transpose(
        x,
        weight,
        bias,
        _one_an_axis("stride", stride, rank),
        _one_an_axis("padding", padding, rank),
        _one_an_axis("output_padding", output_padding, rank),
        groups,
        _one_an_axis("dilation", dilation, rank),
        precision,
    )


def _one_an_axis(name: str, value: Any, rank: int) -> tuple[int, ...]:
    """Return `rank` integers; a sequence of one stands for all axes, as it does in PyTorch."""
    if type(value) is int:
        return (value,) * rank
    if type(value) is tuple and len(value) == rank:
        for item in value:
            if type(item) is not int:
                break
        else:
            return value
    values = tuple(value) if isinstance(value, Sequence) else (value,)
    if len(values) == 1:
        values *= rank
    if len(values) != rank:
        raise ValueError(f"{name} must be an integer or {rank} of them, one an axis, got {value!r}")
    return tuple(_integer(name, item) for item in values)


def _integer(name: str, value: Any) -> Any:
    if type(value) is int or isinstance(value, torch.SymInt):
        return value
    try:
        if not isinstance(value, bool | np.bool_):  # older NumPy lets its own pass as an index
            return operator.index(value)
    except TypeError:
        pass
    raise TypeError(f"{name} must be an integer or one an axis, got {value!r} of type {type(value).__name__}")
