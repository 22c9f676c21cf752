"""The public functions: thin 1-D, 2-D and 3-D wrappers over one N-d core."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from cuconvt import backends
from cuconvt.docs import documented
from cuconvt.geometry import make_geometry, normalise, shape
from cuconvt.steps import Call
from cuconvt.warm import slot_of

Array = TypeVar("Array")
IntOrInts = int | Sequence[int]
Padding = int | Sequence[int] | Sequence[tuple[int, int]]


@documented(1)
def conv_transpose1d(
    x: Array,
    weight: Array,
    bias: Array | None = None,
    stride: IntOrInts = 1,
    padding: Padding = 0,
    output_padding: IntOrInts = 0,
    groups: int = 1,
    dilation: IntOrInts = 1,
    *,
    output_size: IntOrInts | None = None,
    precision: str | None = None,
    out: Array | None = None,
) -> Array:
    parameters = (stride, padding, output_padding, groups, dilation, output_size)
    return _conv_transpose(1, x, weight, bias, out, parameters, precision)


@documented(2)
def conv_transpose2d(
    x: Array,
    weight: Array,
    bias: Array | None = None,
    stride: IntOrInts = 1,
    padding: Padding = 0,
    output_padding: IntOrInts = 0,
    groups: int = 1,
    dilation: IntOrInts = 1,
    *,
    output_size: IntOrInts | None = None,
    precision: str | None = None,
    out: Array | None = None,
) -> Array:
    parameters = (stride, padding, output_padding, groups, dilation, output_size)
    return _conv_transpose(2, x, weight, bias, out, parameters, precision)


@documented(3)
def conv_transpose3d(
    x: Array,
    weight: Array,
    bias: Array | None = None,
    stride: IntOrInts = 1,
    padding: Padding = 0,
    output_padding: IntOrInts = 0,
    groups: int = 1,
    dilation: IntOrInts = 1,
    *,
    output_size: IntOrInts | None = None,
    precision: str | None = None,
    out: Array | None = None,
) -> Array:
    parameters = (stride, padding, output_padding, groups, dilation, output_size)
    return _conv_transpose(3, x, weight, bias, out, parameters, precision)


def conv_transpose_output_shape(
    x_shape: Sequence[int],
    weight_shape: Sequence[int],
    stride: IntOrInts = 1,
    padding: Padding = 0,
    output_padding: IntOrInts = 0,
    groups: int = 1,
    dilation: IntOrInts = 1,
    *,
    output_size: IntOrInts | None = None,
) -> tuple[int, ...]:
    """Return the shape of a transposed convolution's result, from shapes alone.

    Per spatial axis, as in the documentation of ``torch.nn.ConvTranspose3d``::

        o = (i - 1)*stride - pad_before - pad_after + dilation*(k - 1) + output_padding + 1

    Parameters
    ----------
    x_shape : sequence of int
        ``(N, C_in, *spatial)``, or ``(C_in, *spatial)`` unbatched.
    weight_shape : sequence of int
        ``(C_in, C_out/groups, *kernel)`` with one to three kernel extents; their number is the rank.
    stride, padding, output_padding, groups, dilation, output_size
        As in `conv_transpose3d`.

    Returns
    -------
    tuple of int
        ``(N, C_out, *spatial)``, or ``(C_out, *spatial)`` unbatched.

    Raises
    ------
    TypeError, ValueError
        As `conv_transpose3d` does for shapes and parameters.

    Examples
    --------
    >>> import cuconvt
    >>> cuconvt.conv_transpose_output_shape((2, 64, 48, 48), (64, 32, 3, 3), stride=2, padding=1, output_padding=1)
    (2, 32, 96, 96)
    """
    x_shape, weight_shape = shape("x_shape", x_shape), shape("weight_shape", weight_shape)
    rank = len(weight_shape) - 2
    if rank not in (1, 2, 3):
        raise ValueError(f"weight_shape must have 3 to 5 extents (C_in, C_out/groups, *kernel), got {weight_shape}")
    parameters = normalise(rank, stride, padding, output_padding, groups, dilation, output_size)
    return make_geometry(rank, x_shape, weight_shape, None, *parameters).out_shape


def _conv_transpose(
    rank: int, x: Any, weight: Any, bias: Any, out: Any, parameters: tuple[Any, ...], precision: Any
) -> Any:
    arrays = (x, weight, bias)
    slot = slot_of("conv_transpose", arrays, out, (rank, precision, *parameters))
    if (result := slot.repeat(arrays, out)) is not None:
        return result
    call = Call({"x": x, "weight": weight, "bias": bias}, out)
    geometry = make_geometry(rank, *call.shapes, *normalise(rank, *parameters))

    def compute(views: list[Any], precision: str | None) -> None:
        x, weight, bias, out = views
        launch = backends.conv_transpose(x, weight, bias, geometry, precision, out)
        slot.remember(launch, (x, weight, bias), out)

    return call.run(geometry.out_shape, precision, compute, spatial=rank)
