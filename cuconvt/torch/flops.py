"""What `torch.utils.flop_counter` counts for the operators: the same as for PyTorch's own transposed convolutions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.utils.flop_counter import conv_flop_count, register_flop_formula

from cuconvt.torch import operators

Ints = Sequence[int]


def conv_transpose(x: Ints, weight: Ints, *_: Any, out_shape: Ints, **__: Any) -> int:
    return conv_flop_count(_batched(x, weight), weight, out_shape, transposed=True)


def conv_transpose_input(weight: Ints, grad_output: Ints, *_: Any, out_shape: Ints, **__: Any) -> int:
    return conv_flop_count(_batched(grad_output, weight), weight, _batched(out_shape, weight))


def conv_transpose_weight(x: Ints, grad_output: Ints, *_: Any, out_shape: Ints, **__: Any) -> int:
    n, channels, *extents = _batched(x, out_shape)
    grad_channels = _batched(grad_output, out_shape)[1]
    # A convolution over the batch, which PyTorch counts as one of all channels with all, whatever the groups.
    return conv_flop_count([grad_channels, n], [channels, n, *extents], [grad_channels, channels, *out_shape[2:]])


def _batched(shape: Ints, weight: Ints) -> Ints:
    return shape if len(shape) == len(weight) else (1, *shape)


for _formula in (conv_transpose, conv_transpose_input, conv_transpose_weight):
    register_flop_formula(getattr(operators, _formula.__name__).overload.overloadpacket)(_formula)
