"""Rules of ``torch.vmap``: the mapped axis joins the batch or, where each entry has a weight of its own, the groups.

With `size` entries, each of N samples, C_in channels and `groups` groups, that is one call of size * N samples, or of N
samples, size * C_in channels and size * groups groups.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

Ints = Sequence[int]
Axes = Sequence[Any]  # of each argument: the mapped axis, or None
Result = tuple[Tensor, int]  # and where the mapped axis is


def conv_transpose(
    operator: Callable[..., Tensor], size: int, axes: Axes, x: Tensor, weight: Tensor, bias: Tensor | None, *others: Any
) -> Result:
    rank = len(others[0])
    if axes[1] is None and axes[2] is None:
        y = operator(_into_batch(x, axes[0], rank), weight, bias, *others)
        return _out_of_batch(y, size, x.dim() - 1, rank)
    y = operator(
        _into_channels(x, axes[0], size, rank),
        _into_first(weight, axes[1], size),
        None if bias is None else _into_first(bias, axes[2], size),
        *_with_groups(others, size),
    )
    return _out_of_channels(y, size, rank)


def conv_transpose_input(
    operator: Callable[..., Tensor],
    size: int,
    axes: Axes,
    weight: Tensor,
    grad_output: Tensor,
    input_size: Ints,
    *others: Any,
) -> Result:
    rank = len(others[0])
    *batch, channels = input_size[:-rank]
    extent = input_size[-rank:]
    if axes[0] is None:
        grads = _into_batch(grad_output, axes[1], rank)
        return _out_of_batch(
            operator(weight, grads, [grads.shape[0], channels, *extent], *others), size, len(input_size), rank
        )
    grad_x = operator(
        _into_first(weight, axes[0], size),
        _into_channels(grad_output, axes[1], size, rank),
        [*batch, size * channels, *extent],
        *_with_groups(others, size),
    )
    return _out_of_channels(grad_x, size, rank)


def conv_transpose_weight(
    operator: Callable[..., Tensor],
    size: int,
    axes: Axes,
    x: Tensor,
    grad_output: Tensor,
    weight_size: Ints,
    *others: Any,
) -> Result:
    rank = len(others[0])
    grad_weight = operator(
        _into_channels(x, axes[0], size, rank),
        _into_channels(grad_output, axes[1], size, rank),
        [size * weight_size[0], *weight_size[1:]],
        *_with_groups(others, size),
    )
    return grad_weight.unflatten(0, (size, weight_size[0])), 0


def _into_batch(tensor: Tensor, axis: int, rank: int) -> Tensor:
    """Return (size, N, C, ...) as (size * N, C, ...), or (size, C, ...) as it is."""
    tensor = tensor.movedim(axis, 0)
    return tensor if tensor.dim() == rank + 2 else tensor.flatten(0, 1)


def _out_of_batch(tensor: Tensor, size: int, dim: int, rank: int) -> Result:
    """Undo `_into_batch`, for entries of so many axes."""
    return (tensor if dim == rank + 1 else tensor.unflatten(0, (size, tensor.shape[0] // size))), 0


def _into_channels(tensor: Tensor, axis: int | None, size: int, rank: int) -> Tensor:
    """Return the tensor with the entries' channels one after the other, which are the same where none is mapped."""
    if axis is None:
        axis, tensor = 0, tensor.expand(size, *tensor.shape)
    channels = tensor.dim() - rank - 2  # of an entry
    return tensor.movedim(axis, channels).flatten(channels, channels + 1)


def _out_of_channels(tensor: Tensor, size: int, rank: int) -> Result:
    channels = tensor.dim() - rank - 1
    return tensor.unflatten(channels, (size, tensor.shape[channels] // size)), channels


def _into_first(tensor: Tensor, axis: int | None, size: int) -> Tensor:
    """Return a weight or a bias with the entries' first axes one after the other."""
    tensor = tensor.expand(size, *tensor.shape) if axis is None else tensor.movedim(axis, 0)
    return tensor.flatten(0, 1)


def _with_groups(others: Sequence[Any], size: int) -> tuple[Any, ...]:
    stride, padding, output_padding, groups, *rest = others
    return stride, padding, output_padding, size * groups, *rest
