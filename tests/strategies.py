"""Problems to test with: a frozen description of a call, and hypothesis strategies over all parameters of one."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from hypothesis import strategies as st

Ints = tuple[int, ...]
Pairs = tuple[tuple[int, int], ...]

DTYPES = {
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
}

# Dtypes and precisions of the kernels with tensor cores.
KINDS = (("float16", None), ("bfloat16", None), ("float32", "tf32"), ("float32", "tf32x3"))

# Layouts that `place` can give an array; "broadcast" has overlapping elements, so it is for inputs alone.
OUT_LAYOUTS = ("contiguous", "channels_last", "sliced", "cropped", "strided", "negative", "transposed", "misaligned")
LAYOUTS = (*OUT_LAYOUTS, "broadcast")
NOT_LAST = tuple(layout for layout in LAYOUTS if layout != "channels_last")
# Whether x and the result are channels-last, for cases that take these in turns.
SIDES = ((True, False), (True, True), (False, False), (False, True))
LAST = {"x_layout": "channels_last", "out_layout": "channels_last"}  # fields of a case

# One example stays within milliseconds in float64 on one core.
MAX_MACS = 2_000_000
MAX_OUTPUTS = 100_000


def attempts(most: int = 1000) -> Iterator[int]:
    """Count draws of a case: where none of so many serves, that is said, and nobody draws for ever."""
    yield from range(most)
    raise AssertionError(f"none of {most} draws serves")


@dataclass(frozen=True)
class Problem:
    """A call without its numbers: every parameter in its full form, one entry a spatial axis."""

    extent: Ints
    kernel: Ints
    stride: Ints
    dilation: Ints
    padding: Pairs
    output_padding: Ints
    n: int | None  # None: unbatched
    groups: int
    c_in_per_group: int
    c_out_per_group: int
    has_bias: bool = False
    x_layout: str = "contiguous"
    weight_layout: str = "contiguous"
    bias_layout: str = "contiguous"
    out_layout: str = "contiguous"
    short: bool = False  # spell equal entries as one int, as callers do
    seed: int = 0

    @property
    def rank(self) -> int:
        return len(self.extent)

    @property
    def c_out(self) -> int:
        return self.groups * self.c_out_per_group

    @property
    def x_shape(self) -> Ints:
        return self._batched(self.groups * self.c_in_per_group, self.extent)

    @property
    def weight_shape(self) -> Ints:
        return (self.groups * self.c_in_per_group, self.c_out_per_group, *self.kernel)

    @property
    def out_shape(self) -> Ints:
        axes = zip(full_extent(self.extent, self.kernel, self.stride, self.dilation), self.padding, strict=True)
        cropped = (full - before - after for full, (before, after) in axes)
        extent = tuple(o + extra for o, extra in zip(cropped, self.output_padding, strict=True))
        return self._batched(self.c_out, extent)

    @property
    def parameters(self) -> dict[str, Any]:
        """The call's arguments apart from the arrays."""
        spell = _shortest if self.short else tuple
        symmetric = all(before == after for before, after in self.padding)
        return {
            "stride": spell(self.stride),
            "padding": spell([before for before, _ in self.padding]) if self.short and symmetric else self.padding,
            "output_padding": spell(self.output_padding),
            "groups": self.groups,
            "dilation": spell(self.dilation),
        }

    def arrays(self, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """Draw x, weight and bias from the seed: standard normal in float64, rounded once to `dtype`."""
        rng = np.random.default_rng(self.seed)
        x = rng.standard_normal(self.x_shape)
        if self.x_layout == "broadcast":
            x[1:] = x[:1]
        weight = rng.standard_normal(self.weight_shape)
        bias = rng.standard_normal(self.c_out) if self.has_bias else None
        return x.astype(dtype), weight.astype(dtype), None if bias is None else bias.astype(dtype)

    def _batched(self, channels: int, extent: Ints) -> Ints:
        return (channels, *extent) if self.n is None else (self.n, channels, *extent)


def full_extent(extent: Ints, kernel: Ints, stride: Ints, dilation: Ints) -> Ints:
    """Return the output extents with no padding at all."""
    axes = zip(extent, kernel, stride, dilation, strict=True)
    return tuple((i - 1) * s + d * (k - 1) + 1 for i, k, s, d in axes)


def case(
    x: Sequence[int],
    c_out: int,
    kernel: int | Ints,
    stride: int | Ints = 1,
    padding: Any = 0,
    output_padding: int | Ints = 0,
    groups: int = 1,
    dilation: int | Ints = 1,
    *,
    rank: int | None = None,
    **fields: Any,
) -> Problem:
    """Write a fixed problem the way a call does; `rank` is needed where x is unbatched."""
    rank = len(x) - 2 if rank is None else rank

    def per_axis(value: Any) -> tuple:
        return (value,) * rank if isinstance(value, int) else tuple(value)

    return Problem(
        extent=tuple(x[-rank:]),
        kernel=per_axis(kernel),
        stride=per_axis(stride),
        dilation=per_axis(dilation),
        padding=tuple((p, p) if isinstance(p, int) else p for p in per_axis(padding)),
        output_padding=per_axis(output_padding),
        n=x[0] if len(x) == rank + 2 else None,
        groups=groups,
        c_in_per_group=x[-rank - 1] // groups,
        c_out_per_group=c_out // groups,
        **fields,
    )


def place(values: np.ndarray, rank: int, layout: str, xp: Any = np) -> tuple[Any, Any]:
    """Copy `values` to a view with the given layout, inside a buffer whose other elements are all NaN.

    Besides `LAYOUTS` there are "some_channels", channels-last with a multiple of eight of which the view has the first,
    and "misaligned_last", channels-last as "misaligned" is contiguous.

    Returns the view and the buffer, which holds integers: in every float format all bits set are a NaN.
    """
    if layout == "broadcast":
        view, buffer = place(values[:1], rank, "contiguous", xp)
        return xp.broadcast_to(view, values.shape), buffer
    order = list(range(values.ndim))  # the axes, from the slowest to the fastest in memory
    if layout in ("channels_last", "some_channels", "misaligned_last"):
        order.append(order.pop(-rank - 1))
    elif layout == "transposed":
        order.reverse()
    shape = list(values.shape)
    first_spatial = values.ndim - rank
    if layout == "sliced":
        shape[first_spatial] += 1
    elif layout == "cropped":  # rows of a multiple of 16 bytes, which the view does not fill
        shape[-1] += 8 - shape[-1] % 8
    elif layout == "some_channels":
        shape[first_spatial - 1] += 8 - shape[first_spatial - 1] % 8
    elif layout == "strided":
        shape[-1] *= 2
    margin = 64  # elements on both sides, so that a read or write past either end is seen
    start = margin + (layout in ("misaligned", "misaligned_last"))
    count = math.prod(shape)
    bits = f"i{values.dtype.itemsize}"
    buffer = xp.full(start + count + margin, -1, bits)
    view = buffer[start : start + count].reshape([shape[axis] for axis in order])
    view = view.transpose([order.index(axis) for axis in range(values.ndim)])
    if layout == "sliced":
        view = view[(slice(None),) * first_spatial + (slice(1, None),)]
    elif layout == "cropped":
        view = view[..., : values.shape[-1]]
    elif layout == "some_channels":
        view = view[(slice(None),) * (first_spatial - 1) + (slice(values.shape[first_spatial - 1]),)]
    elif layout == "strided":
        view = view[..., ::2]
    elif layout == "negative":
        view = view[..., ::-1]
    view[...] = xp.asarray(np.ascontiguousarray(values).view(bits))
    return view.view(values.dtype), buffer


@dataclass(frozen=True)
class Specialisation:
    """What a CUDA kernel is compiled for; problems that share one differ only in what needs no new kernel."""

    kernel: Ints
    stride: Ints
    dilation: Ints
    c_in_per_group: int
    c_out_per_group: int
    x_layouts: tuple[str, ...]
    out_layouts: tuple[str, ...]
    groups: int | None = None  # None: any number
    shifts: tuple[int | None, ...] | None = None  # the padding before, modulo the stride, on each axis; None: any

    def shift(self, axis: int) -> int | None:
        return None if self.shifts is None else self.shifts[axis]

    @property
    def calls(self) -> int:
        """How many calls of `harness.check` run the same program: an allocated result has the layout of the input."""
        return 3 if self.x_layouts[0] == self.out_layouts[0] in ("contiguous", "channels_last") else 2


_CHANNELS = st.one_of(st.integers(1, 9), st.sampled_from((16, 17, 31, 32, 33)))


@st.composite
def specialisations(draw: st.DrawFn) -> Specialisation:
    """Draw kernel, stride, dilation and channels, a sixth of them depthwise, with all layouts allowed."""
    rank = draw(st.integers(1, 3))
    depthwise = draw(st.integers(0, 5)) == 5
    return Specialisation(
        kernel=tuple(draw(st.integers(1, 7)) for _ in range(rank)),
        stride=tuple(draw(st.integers(1, 4)) for _ in range(rank)),
        dilation=tuple(draw(st.integers(1, 4)) for _ in range(rank)),
        c_in_per_group=1 if depthwise else draw(_CHANNELS),
        c_out_per_group=draw(st.integers(1, 2)) if depthwise else draw(_CHANNELS),
        x_layouts=LAYOUTS,
        out_layouts=OUT_LAYOUTS,
    )


@st.composite
def problems(
    draw: st.DrawFn,
    fixed: Specialisation | None = None,
    longest: Ints = (12, 12, 12),
    longest_w: int = 40,
    budget: float = 1,
) -> Problem:
    """Draw any problem, or any of one specialisation; half of them are longer along W, to cross the edges of a tile.

    `budget` multiplies the bounds on the arithmetic and the output.
    """
    spec = draw(specialisations()) if fixed is None else fixed
    rank = len(spec.kernel)
    per_group = {"c_in": spec.c_in_per_group, "c_out": spec.c_out_per_group}
    groups = draw(st.integers(1, 12 if spec.c_in_per_group == 1 else 4)) if spec.groups is None else spec.groups
    counts = {
        "n": draw(st.integers(1, 3)),
        **({"groups": groups} if spec.groups is None else {}),
        **{axis: draw(st.integers(1, longest[axis])) for axis in range(rank)},
    }
    if draw(st.booleans()):
        counts[rank - 1] = draw(st.integers(13, longest_w))
    if fixed is None:
        counts |= per_group
    _bound(counts, {"groups": groups, **per_group}, spec, budget)
    extent = tuple(counts[axis] for axis in range(rank))

    output_padding = (0,) * rank
    if draw(st.booleans()):
        output_padding = tuple(
            draw(st.integers(0, max(s, d) - 1)) for s, d in zip(spec.stride, spec.dilation, strict=True)
        )
    full = full_extent(extent, spec.kernel, spec.stride, spec.dilation)
    largest = [f + extra - 1 for f, extra in zip(full, output_padding, strict=True)]
    same_everywhere = draw(st.integers(0, 3))
    fits = all(spec.shift(axis) in (None, same_everywhere % stride) for axis, stride in enumerate(spec.stride))
    if fits and 2 * same_everywhere <= min(largest) and draw(st.booleans()):
        padding: Pairs = ((same_everywhere, same_everywhere),) * rank
    else:
        pairs = []
        for top, k, s, d in zip(largest, spec.kernel, spec.stride, spec.dilation, strict=True):
            enough = d * (k - 1) + s + 2  # to eat every tap of the border, and an input
            before = draw(st.integers(0, min(top, enough)))
            shift = spec.shift(len(pairs))
            if shift is not None:
                before = max(before - (before - shift) % s, shift)
            pairs.append((before, draw(st.integers(0, min(top - before, enough)))))
        padding = tuple(pairs)
    return Problem(
        extent=extent,
        kernel=spec.kernel,
        stride=spec.stride,
        dilation=spec.dilation,
        padding=padding,
        output_padding=output_padding,
        n=None if counts["n"] == 1 and draw(st.booleans()) else counts["n"],
        groups=counts.get("groups", groups),
        c_in_per_group=counts.get("c_in", spec.c_in_per_group),
        c_out_per_group=counts.get("c_out", spec.c_out_per_group),
        has_bias=draw(st.booleans()),
        x_layout=draw(st.sampled_from(spec.x_layouts)),
        weight_layout=draw(st.sampled_from(OUT_LAYOUTS)),
        bias_layout=draw(st.sampled_from(("contiguous", "strided", "negative"))),
        out_layout=draw(st.sampled_from(spec.out_layouts)),
        short=draw(st.booleans()),
        seed=draw(st.integers(0, 2**32 - 1)),
    )


def _bound(counts: dict[Any, int], per_group: dict[str, int], spec: Specialisation, budget: float) -> None:
    """Halve the largest of `counts` until the arithmetic and the output are within bounds, or all are 1."""
    rank = len(spec.kernel)
    while max(counts.values()) > 1:
        sizes = per_group | counts
        extent = tuple(sizes[axis] for axis in range(rank))
        maps = sizes["n"] * sizes["groups"] * sizes["c_out"]
        macs = maps * sizes["c_in"] * math.prod(extent) * math.prod(spec.kernel)
        outputs = maps * math.prod(full_extent(extent, spec.kernel, spec.stride, spec.dilation))
        if macs <= budget * MAX_MACS and outputs <= budget * MAX_OUTPUTS:
            return
        largest = max(counts, key=counts.__getitem__)
        counts[largest] = (counts[largest] + 1) // 2


def _shortest(values: Sequence[Any]) -> Any:
    return values[0] if all(value == values[0] for value in values) else tuple(values)
