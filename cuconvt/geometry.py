"""Validation: the arguments of a call become one `Geometry`, or an error that names the argument.

This is the one place where parameters are normalised, shapes computed and shape errors raised. Everything behind it
(planning, kernels, the NumPy backend) sees only the 3-D form: 1-D and 2-D problems have leading axes of extent 1.

A convolution is the adjoint of a transposed convolution with the same weight, so it has the `Geometry` of that one:
what it reads has the geometry's `out_shape`, and what it gives its `x_shape`.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Ints = tuple[int, ...]
Pairs = tuple[tuple[int, int], ...]
Triple = tuple[int, int, int]


def triple(numbers: Iterable[int]) -> Triple:
    """Return one number for each axis."""
    d, h, w = numbers
    return d, h, w


@dataclass(frozen=True)
class Geometry:
    """A transposed convolution in 3-D form; all extents are in elements, axes in the order D, H, W.

    Its gradients have the same geometry: x and the result are of these shapes whichever of them is computed.

    Attributes
    ----------
    rank : int
        Spatial axes of the call (1, 2 or 3); the leading ``3 - rank`` axes have extent 1.
    batched : bool
        False for an unbatched call, whose result is unbatched too (then ``n == 1``).
    n, c_in, c_out, groups : int
        Batch, channels of x, channels of the result, groups.
    x_extent, kernel, stride, dilation, pad_before, pad_after, output_padding, out_extent : tuple of 3 int
        One value a spatial axis.
    """

    rank: int
    batched: bool
    n: int
    c_in: int
    c_out: int
    groups: int
    x_extent: Triple
    kernel: Triple
    stride: Triple
    dilation: Triple
    pad_before: Triple
    pad_after: Triple
    output_padding: Triple
    out_extent: Triple

    @property
    def c_in_per_group(self) -> int:
        return self.c_in // self.groups

    @property
    def c_out_per_group(self) -> int:
        return self.c_out // self.groups

    @property
    def x_shape(self) -> Ints:
        """Shape of x as the caller sees it."""
        return self._batched(self.c_in, self.x_extent)

    @property
    def out_shape(self) -> Ints:
        """Shape of the result as the caller sees it."""
        return self._batched(self.c_out, self.out_extent)

    @property
    def taps(self) -> int:
        return self.kernel[0] * self.kernel[1] * self.kernel[2]

    def _batched(self, channels: int, extent: Triple) -> Ints:
        shape = (channels, *extent[3 - self.rank :])
        return (self.n, *shape) if self.batched else shape


def normalise(
    rank: int,
    stride: Any,
    padding: Any,
    output_padding: Any,
    groups: Any,
    dilation: Any,
    output_size: Any,
) -> tuple[Ints, Pairs, Ints, int, Ints, Ints | None]:
    """Turn the parameters of a call into tuples with one entry a spatial axis, checking their types and signs."""
    return (
        _one_an_axis("stride", stride, rank, minimum=1),
        _pairs_an_axis(padding, rank),
        _one_an_axis("output_padding", output_padding, rank, minimum=0),
        _integer("groups", groups, minimum=1),
        _one_an_axis("dilation", dilation, rank, minimum=1),
        None if output_size is None else _one_an_axis("output_size", output_size, rank, minimum=1),
    )


def normalise_conv(
    rank: int, stride: Any, padding: Any, dilation: Any, groups: Any
) -> tuple[Ints, Pairs | str, Ints, int]:
    """Turn the parameters of a convolution into tuples as `normalise` does; padding may be "valid" or "same"."""
    if isinstance(padding, str) and padding not in ("valid", "same"):
        raise ValueError(f"padding must be 'valid', 'same' or integers, got {padding!r}")
    return (
        _one_an_axis("stride", stride, rank, minimum=1),
        "same" if padding == "same" else _pairs_an_axis(0 if padding == "valid" else padding, rank),
        _one_an_axis("dilation", dilation, rank, minimum=1),
        _integer("groups", groups, minimum=1),
    )


@functools.lru_cache(maxsize=1024)
def make_geometry(
    rank: int,
    x_shape: Ints,
    weight_shape: Ints,
    bias_shape: Ints | None,
    stride: Ints,
    padding: Pairs,
    output_padding: Ints,
    groups: int,
    dilation: Ints,
    output_size: Ints | None,
    x_name: str = "x",
    weight_name: str = "weight",
) -> Geometry:
    """Build the `Geometry` of a call from shapes and normalised parameters.

    Raises
    ------
    ValueError
        If a shape or a parameter does not fit; the message names the argument, what came and what is required. Shapes
        are named `x_name` and `weight_name`, as the caller's arguments are.
    """
    n, c_in, extent = _split_x(rank, x_shape, x_name)
    kernel = _kernel(rank, weight_shape, weight_name, "C_in, C_out/groups")
    if weight_shape[0] != c_in:
        raise ValueError(
            f"{weight_name} must have C_in = {c_in} ({x_name}'s channels) as its first extent, got shape {weight_shape}"
        )
    if c_in < 1 or c_in % groups:
        raise ValueError(f"groups must divide the channels of {x_name}, got groups={groups} with C_in={c_in}")
    _require_extents(x_shape, extent, x_name, weight_shape, weight_name)
    c_out = weight_shape[1] * groups
    if bias_shape is not None and bias_shape != (c_out,):
        raise ValueError(f"bias must have shape (C_out,) = ({c_out},), got shape {bias_shape}")

    if output_size is not None:
        if any(output_padding):
            raise ValueError(
                f"output_padding must be 0 when output_size is given, since output_size chooses it, "
                f"got output_padding={output_padding}"
            )
        output_padding = _padding_for_size(extent, kernel, stride, padding, dilation, output_size)
    for p, s, d in zip(output_padding, stride, dilation, strict=True):
        if p >= max(s, d):
            raise ValueError(
                f"output_padding must be smaller than max(stride, dilation) on every axis, "
                f"got output_padding={output_padding} with stride={stride}, dilation={dilation}"
            )
    out = tuple(
        _out_extent(*axis) for axis in zip(extent, kernel, stride, padding, dilation, output_padding, strict=True)
    )
    if any(o < 1 for o in out):
        raise ValueError(
            f"the output extents must be at least 1, got {out}: {x_name} of extents {extent} with kernel={kernel}, "
            f"stride={stride}, padding={padding}, dilation={dilation}, output_padding={output_padding}"
        )

    return Geometry(
        rank=rank,
        batched=len(x_shape) == rank + 2,
        n=n,
        c_in=c_in,
        c_out=c_out,
        groups=groups,
        x_extent=_in_3d(extent, 1),
        kernel=_in_3d(kernel, 1),
        stride=_in_3d(stride, 1),
        dilation=_in_3d(dilation, 1),
        pad_before=_in_3d([before for before, _ in padding], 0),
        pad_after=_in_3d([after for _, after in padding], 0),
        output_padding=_in_3d(output_padding, 0),
        out_extent=_in_3d(out, 1),
    )


@functools.lru_cache(maxsize=1024)
def make_conv_geometry(
    rank: int,
    x_shape: Ints,
    weight_shape: Ints,
    bias_shape: Ints | None,
    stride: Ints,
    padding: Pairs | str,
    dilation: Ints,
    groups: int,
    x_name: str = "x",
    weight_name: str = "weight",
) -> Geometry:
    """Build the `Geometry` of the transposed convolution whose adjoint a convolution is.

    The channels that the convolution reads are the geometry's `c_out`, and those that it gives `c_in`. Inputs past the
    last step of a stride are its output padding.

    Raises
    ------
    ValueError
        As `make_geometry` does.
    """
    n, c_in, extent = _split_x(rank, x_shape, x_name)
    kernel = _kernel(rank, weight_shape, weight_name, "C_out, C_in/groups")
    c_out = weight_shape[0]
    if c_in != weight_shape[1] * groups:
        raise ValueError(
            f"{weight_name} must have C_in/groups as its second extent, got shape {weight_shape} with C_in={c_in} "
            f"({x_name}'s channels) and groups={groups}"
        )
    if c_out < 1 or c_out % groups:
        raise ValueError(
            f"groups must divide the first extent of {weight_name}, got groups={groups} with C_out={c_out}"
        )
    _require_extents(x_shape, extent, x_name, weight_shape, weight_name)
    if bias_shape is not None and bias_shape != (c_out,):
        raise ValueError(f"bias must have shape (C_out,) = ({c_out},), got shape {bias_shape}")
    spans = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
    if isinstance(padding, str):  # "same"
        if any(s != 1 for s in stride):
            raise ValueError(f"padding='same' must come with a stride of 1, got stride={stride}")
        padding = tuple((span // 2, span - span // 2) for span in spans)
    # Positions for the kernel's first tap, less one.
    steps = [i + before + after - span - 1 for i, (before, after), span in zip(extent, padding, spans, strict=True)]
    out = tuple(step // s + 1 for step, s in zip(steps, stride, strict=True))
    if min(out) < 1:
        raise ValueError(
            f"the output extents must be at least 1, got {out}: {x_name} of extents {extent} with kernel={kernel}, "
            f"stride={stride}, padding={padding}, dilation={dilation}"
        )
    return Geometry(
        rank=rank,
        batched=len(x_shape) == rank + 2,
        n=n,
        c_in=c_out,
        c_out=c_in,
        groups=groups,
        x_extent=_in_3d(out, 1),
        kernel=_in_3d(kernel, 1),
        stride=_in_3d(stride, 1),
        dilation=_in_3d(dilation, 1),
        pad_before=_in_3d([before for before, _ in padding], 0),
        pad_after=_in_3d([after for _, after in padding], 0),
        output_padding=_in_3d([step % s for step, s in zip(steps, stride, strict=True)], 0),
        out_extent=_in_3d(extent, 1),
    )


def check_grad_output(shape: Ints, required: Ints) -> None:
    """Raise ValueError unless a gradient has the shape of the result that it is the gradient of."""
    if shape != required:
        raise ValueError(f"grad_output must have shape {required}, that of the result, got {shape}")


def check_rank(name: str, array_shape: Ints, rank: int, channels: str) -> None:
    """Raise ValueError unless a shape has `rank` spatial axes, the channels and perhaps a batch."""
    if len(array_shape) not in (rank + 1, rank + 2):
        axes = ", ".join("DHW"[3 - rank :])
        raise ValueError(
            f"{name} must have {rank + 2} axes (N, {channels}, {axes}) or {rank + 1} without N, got shape {array_shape}"
        )


def _split_x(rank: int, x_shape: Ints, name: str) -> tuple[int, int, Ints]:
    """Return N (1 if unbatched), C_in and the spatial extents."""
    check_rank(name, x_shape, rank, "C_in")
    n, c_in, *extent = x_shape if len(x_shape) == rank + 2 else (1, *x_shape)
    return n, c_in, tuple(extent)


def _kernel(rank: int, weight_shape: Ints, name: str, channels: str) -> Ints:
    if len(weight_shape) != rank + 2:
        axes = ", ".join("k" + axis for axis in "DHW"[3 - rank :])
        raise ValueError(f"{name} must have {rank + 2} axes ({channels}, {axes}), got shape {weight_shape}")
    return weight_shape[2:]


def _require_extents(x_shape: Ints, extent: Ints, x_name: str, weight_shape: Ints, weight_name: str) -> None:
    # Not min(), which would also compare extents with each other; under torch.compile they may be symbols.
    if any(e < 1 for e in weight_shape[1:]):
        raise ValueError(f"{weight_name} must have no empty axis, got shape {weight_shape}")
    if any(e < 1 for e in extent):
        raise ValueError(f"{x_name} must have spatial extents of at least 1, got shape {x_shape}")


def _in_3d(values: Sequence[int], fill: int) -> Triple:
    return (*(fill,) * (3 - len(values)), *values)  # type: ignore[return-value]


def _out_extent(extent: int, kernel: int, stride: int, padding: tuple[int, int], dilation: int, extra: int) -> int:
    return (extent - 1) * stride - sum(padding) + dilation * (kernel - 1) + extra + 1


def _padding_for_size(
    extent: Sequence[int], kernel: Ints, stride: Ints, padding: Pairs, dilation: Ints, output_size: Ints
) -> Ints:
    smallest = tuple(_out_extent(*axis, 0) for axis in zip(extent, kernel, stride, padding, dilation, strict=True))
    largest = tuple(o + max(s, d) - 1 for o, s, d in zip(smallest, stride, dilation, strict=True))
    for low, size, high in zip(smallest, output_size, largest, strict=True):
        if not low <= size <= high:
            raise ValueError(
                f"output_size must lie between {smallest} and {largest} for these parameters, got {output_size}"
            )
    return tuple(size - low for size, low in zip(output_size, smallest, strict=True))


def shape(name: str, extents: Sequence[Any]) -> Ints:
    """Turn the shape that a caller wrote into a tuple of int, checking types and signs."""
    if not isinstance(extents, Sequence) or _is_text_or_array(extents):
        raise TypeError(f"{name} must be a sequence of integers, got {_described(extents)}")
    return tuple(_integer(name, extent, minimum=0) for extent in extents)


def _is_text_or_array(value: Any) -> bool:
    """Return whether a value has elements but is no sequence of integers; bytes and small arrays may pass for one."""
    return isinstance(value, str | bytes | bytearray | memoryview) or bool(getattr(value, "ndim", 0))


def _described(value: Any) -> str:
    return f"{value!r} of type {type(value).__name__}"


def _integer(name: str, value: Any, minimum: int) -> int:
    if isinstance(value, bool | np.bool_):  # older NumPy lets its own pass as an index
        raise TypeError(f"{name} must be an integer, got {value!r}")
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {_described(value)}") from None
    if number < minimum:
        raise ValueError(f"{name} must be at least {minimum}, got {value!r}")
    return number


def _one_an_axis(name: str, value: Any, rank: int, minimum: int) -> Ints:
    if _is_text_or_array(value):
        raise TypeError(
            f"{name} must be an integer, or a tuple or list of integers, one an axis, got {_described(value)}"
        )
    if not isinstance(value, Sequence):
        return (_integer(name, value, minimum),) * rank
    if len(value) != rank:
        raise ValueError(f"{name} must be an integer or {rank} of them, one an axis, got {value!r}")
    return tuple(_integer(name, v, minimum) for v in value)


def _pairs_an_axis(padding: Any, rank: int) -> Pairs:
    if _is_text_or_array(padding):
        raise TypeError(
            f"padding must be an integer, or a tuple or list of integers or of (before, after) pairs, one an axis, "
            f"got {_described(padding)}"
        )
    if not isinstance(padding, Sequence):
        return ((_integer("padding", padding, 0),) * 2,) * rank
    if len(padding) != rank:
        raise ValueError(
            f"padding must be an integer, {rank} of them (one an axis) or {rank} (before, after) pairs, got {padding!r}"
        )
    pairs = []
    for p in padding:
        before_after = p if isinstance(p, Sequence) else (p, p)
        if _is_text_or_array(p) or len(before_after) != 2:
            raise ValueError(f"padding must have (before, after) pairs of two integers an axis, got {padding!r}")
        pairs.append((_integer("padding", before_after[0], 0), _integer("padding", before_after[1], 0)))
    return tuple(pairs)
