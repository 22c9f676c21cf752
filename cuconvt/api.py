"""The public functions: thin 1-D, 2-D and 3-D wrappers over one N-d core."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from cuconvt import cpu
from cuconvt.arrays import bridge_of
from cuconvt.checks import check_dtypes, check_out, check_precision
from cuconvt.docs import documented
from cuconvt.geometry import Geometry, make_geometry, normalise, shape
from cuconvt.warm import Slot, slot_of

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
    rank = len(weight_shape) - 2
    if rank not in (1, 2, 3):
        raise ValueError(
            f"weight_shape must have 3 to 5 extents (C_in, C_out/groups, *kernel), got {tuple(weight_shape)}"
        )
    parameters = normalise(rank, stride, padding, output_padding, groups, dilation, output_size)
    x_shape, weight_shape = shape("x_shape", x_shape), shape("weight_shape", weight_shape)
    return make_geometry(rank, x_shape, weight_shape, None, *parameters).out_shape


def _conv_transpose(
    rank: int, x: Any, weight: Any, bias: Any, out: Any, parameters: tuple[Any, ...], precision: Any
) -> Any:
    """Make a call: where an equal one came before, launch it; else validate, plan, compile and launch."""
    slot = slot_of(rank, x, weight, bias, out, (precision, *parameters))
    if slot is not None and slot.warm_call is not None:
        result = slot.warm_call(x, weight, bias, out)
        if result is not None:
            return result
    return _all_steps(rank, x, weight, bias, out, parameters, precision, slot)


def _all_steps(
    rank: int, x: Any, weight: Any, bias: Any, out: Any, parameters: tuple[Any, ...], precision: Any, slot: Slot | None
) -> Any:
    bridge, device = bridge_of({"x": x, "weight": weight, "bias": bias, "out": out})
    normalised = normalise(rank, *parameters)
    bias_shape = None if bias is None else tuple(bias.shape)
    geometry = make_geometry(rank, tuple(x.shape), tuple(weight.shape), bias_shape, *normalised)
    with bridge.scope(x):
        views: list[Any] = [None if a is None else bridge.view(a) for a in (x, weight, bias, out)]
        check_dtypes(*views)
        precision = check_precision(precision, views[0].dtype)
        if out is None:
            out = bridge.empty(geometry.out_shape, _memory_order(views[0], geometry), x)
            views[3] = bridge.view(out)
        else:
            check_out(views[3], geometry.out_shape, {"x": views[0], "weight": views[1], "bias": views[2]})
        if geometry.n:
            x3, weight3, out3 = (_in_3d(views[i], geometry) for i in (0, 1, 3))
            if device[0] == "cpu":
                cpu.conv_transpose(x3, weight3, views[2], geometry, out3)
            else:
                from cuconvt import cuda

                launch = cuda.conv_transpose(x3, weight3, views[2], geometry, precision, out3)
                bridge.hold(views)
                if slot is not None:
                    slot.warm_call = cuda.WarmCall(launch, *views)
        return bridge.finish(out)  # within the scope: a result that is handed over takes the stream along


def _memory_order(x: Any, geometry: Geometry) -> tuple[int, ...]:
    """Return the result's axes from slowest to fastest: channels-last where x is, unless it is C-contiguous too."""
    axes = range(x.ndim)
    spatial = axes[-geometry.rank :]
    channels_last = (*axes[: -geometry.rank - 1], *spatial, x.ndim - geometry.rank - 1)
    if not x.flags.c_contiguous and x.transpose(channels_last).flags.c_contiguous:
        return channels_last
    return tuple(axes)


def _in_3d(array: Any, geometry: Geometry) -> Any:
    """View an array with all of (N, C, D, H, W), or a weight with all of (C_in, C_out/groups, kD, kH, kW)."""
    if array.ndim == 5:
        return array
    lead = array.ndim - geometry.rank
    new_axes = (None,) * (2 - lead) + (slice(None),) * lead + (None,) * (3 - geometry.rank)
    return array[new_axes]
