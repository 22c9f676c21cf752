"""What the operators compute, on tensors in CPU or GPU memory: the result is PyTorch's memory, written in place.

Parameters are stride, padding, output_padding, groups, dilation and precision, as the operators have them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from cuconvt import backends
from cuconvt.geometry import Geometry, check_grad_output, make_geometry, normalise
from cuconvt.steps import Call
from cuconvt.torch.dispatch import check_is_tensor
from cuconvt.warm import ALIGNMENT, Slot

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

Ints = Sequence[int]


def conv_transpose(x: Tensor, weight: Tensor, bias: Tensor | None, *parameters: Any) -> Tensor:
    slot, addresses = _slot_of("conv_transpose", (x, weight, bias), (), parameters)
    result = _repeat(slot, addresses)
    if result is None:
        check_tensors(x=x, weight=weight, bias=bias)
        geometry = _geometry(x.shape, weight.shape, None if bias is None else bias.shape, parameters)
        result = result_like(x, weight, geometry.out_shape, geometry.rank)

        def compute(views: list[Any], precision: str | None) -> Any:
            x, weight, bias, out = views
            return backends.conv_transpose(x, weight, bias, geometry, precision, out)

        _first_call({"x": x, "weight": weight, "bias": bias}, parameters, compute, slot, result)
    return result


def conv_transpose_input(weight: Tensor, grad_output: Tensor, input_size: Ints, *parameters: Any) -> Tensor:
    slot, addresses = _slot_of("input", (grad_output, weight, None), input_size, parameters)
    result = _repeat(slot, addresses)
    if result is None:
        check_tensors(grad_output=grad_output, weight=weight)
        geometry = _geometry(input_size, weight.shape, None, parameters)
        check_grad_output(tuple(grad_output.shape), geometry.out_shape)
        result = result_like(grad_output, weight, geometry.x_shape, geometry.rank)

        def compute(views: list[Any], precision: str | None) -> Any:
            grad_output, weight, out = views
            return backends.correlate(grad_output, weight, None, geometry, precision, out)

        _first_call({"grad_output": grad_output, "weight": weight}, parameters, compute, slot, result)
    return result


def conv_transpose_weight(x: Tensor, grad_output: Tensor, weight_size: Ints, *parameters: Any) -> Tensor:
    slot, addresses = _slot_of("weight", (x, grad_output), weight_size, parameters)
    result = _repeat(slot, addresses)
    if result is None:
        check_tensors(x=x, grad_output=grad_output)
        geometry = _geometry(x.shape, weight_size, None, parameters)
        check_grad_output(tuple(grad_output.shape), geometry.out_shape)
        result = x.new_empty(tuple(weight_size))

        def compute(views: list[Any], precision: str | None) -> Any:
            x, grad_output, out = views
            return backends.weight_gradient(x, grad_output, geometry, precision, out)

        _first_call({"x": x, "grad_output": grad_output}, parameters, compute, slot, result)
    return result


def check_tensors(**tensors: Tensor | None) -> None:
    """Raise RuntimeError, as PyTorch does, unless all tensors have one supported dtype and are on one device."""
    for name, tensor in tensors.items():
        check_is_tensor(name, tensor, optional=name == "bias")
    (first, x), *others = tensors.items()
    assert x is not None
    if x.dtype not in _DTYPES:
        raise RuntimeError(f"{first} must have one of the dtypes {', '.join(map(str, _DTYPES))}, got {x.dtype}")
    for name, tensor in others:
        if tensor is not None and (tensor.dtype != x.dtype or tensor.device != x.device):
            raise RuntimeError(
                f"{name} must have the dtype and the device of {first}, {x.dtype} on {x.device}, "
                f"got {tensor.dtype} on {tensor.device}"
            )


def result_like(tensor: Tensor, weight: Tensor, shape: Ints, rank: int) -> Tensor:
    """Return an uninitialised tensor, channels-last in memory where `tensor` is.

    One channel, or one position, is contiguous either way. Then the strides along axes of one element decide, those of
    `tensor` or else of the weight, as they do in PyTorch's layers.
    """
    channels = len(shape) - rank - 1
    either = tensor.is_contiguous()
    if not tensor.movedim(channels, -1).is_contiguous() or (
        either and not _in_order_of_channels_last(tensor, channels) and not _in_order_of_channels_last(weight, 1)
    ):
        return tensor.new_empty(tuple(shape))
    # Strides, since a permuted tensor would be a view, which in-place operators after an autograd node refuse.
    strides = [0] * len(shape)
    step = 1
    for axis in (channels, *range(len(shape) - 1, channels, -1), *range(channels)):
        strides[axis] = step
        step = step * shape[axis]
    return tensor.new_empty_strided(tuple(shape), tuple(strides))


def _in_order_of_channels_last(tensor: Tensor, channels: int) -> bool:
    """Return whether strides grow from the channels over the last to the first axis: how PyTorch tells the format."""
    shape, strides = tensor.shape, tensor.stride()
    least = 1
    for axis in (channels, *range(len(shape) - 1, channels, -1), *range(channels)):
        # Equal strides of all axes are those of either format, and taken for contiguous.
        if strides[axis] < least or (axis < channels and least == strides[channels]):
            return False
        least = strides[axis] * shape[axis]
    return True


def _geometry(x_shape: Ints, weight_shape: Ints, bias_shape: Ints | None, parameters: Sequence[Any]) -> Geometry:
    stride, padding, output_padding, groups, dilation, _ = parameters
    rank = len(stride)
    normalised = normalise(rank, stride, padding, output_padding, groups, dilation, None)
    shapes = (tuple(x_shape), tuple(weight_shape), None if bias_shape is None else tuple(bias_shape))
    return make_geometry(rank, *shapes, *normalised)


def _first_call(
    arrays: dict[str, Tensor | None],
    parameters: Sequence[Any],
    compute: Callable[[list[Any], str | None], Any],
    slot: Slot | None,
    result: Tensor,
) -> None:
    """Plan, compile and launch a call, and keep in `slot` what an equal call need not do again."""

    def launch(views: list[Any], precision: str | None) -> None:
        launched = compute(views, precision)
        if slot is not None and launched is not None and _all_int(parameters):
            from cuconvt.torch.launches import WarmCall

            slot.warm_call = WarmCall(launched, result)

    Call(arrays, result).run(tuple(result.shape), parameters[-1], launch)


def _slot_of(
    operation: str, tensors: Sequence[Tensor | None], size: Ints, parameters: Sequence[Any]
) -> tuple[Slot | None, Sequence[int]]:
    """Return where a call on a GPU is remembered, by everything that its plan, its errors and its result depend on.

    With it come the addresses of the tensors, 0 for one that is not given.
    """
    if tensors[0] is None or not tensors[0].is_cuda:
        return None, ()
    addresses = []
    key: list[Any] = [operation]
    for tensor in tensors:
        if tensor is None:
            addresses.append(0)
            key.append(None)
        else:
            address = tensor.data_ptr()
            addresses.append(address)
            key.append((tensor.shape, tensor.stride(), tensor.dtype, tensor.get_device(), address % ALIGNMENT == 0))
    stride, padding, output_padding, groups, dilation, precision = parameters
    try:
        slot = _slot(*key, *size, len(stride), *stride, *padding, *output_padding, groups, *dilation, precision)
    except TypeError:  # not hashable, and so nothing valid: the first call says what
        return None, ()
    return slot, addresses


@functools.lru_cache(maxsize=4096, typed=True)  # typed: 2 and 2.0 are equal, and only the first is a valid stride
def _slot(*call: Any) -> Slot:
    return Slot()


def _all_int(parameters: Sequence[Any]) -> bool:
    """Return whether no number is of another type, such as a tensor, which is equal to itself when it has changed."""
    stride, padding, output_padding, groups, dilation, _ = parameters
    return all(type(number) is int for number in (*stride, *padding, *output_padding, groups, *dilation))


def _repeat(slot: Slot | None, addresses: Sequence[int]) -> Tensor | None:
    """Launch a call that came before and return its result; None if there was none, or the plan does not fit."""
    return None if slot is None or slot.warm_call is None else slot.warm_call(addresses)
