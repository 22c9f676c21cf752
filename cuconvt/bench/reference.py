"""What a result is compared with: the definition in float64, one matrix product a tap, on NumPy or CuPy arrays.

It shares no code with the library's backends: every tap's product is added to the outputs that it lands on, and the
gradients read them from there.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from cuconvt.bench.cases import Case, Ints

MAX_ELEMENTS = 2**29  # of a reference that covers a whole result: 4 GiB in float64
Span = tuple[int, int]
Slices = tuple[slice, ...]


@dataclass(frozen=True)
class Accuracy:
    """How far a result is from float64.

    Attributes
    ----------
    error : float
        Largest absolute error.
    scaled : float
        Largest error beyond an element's own rounding, relative to the patches' magnitudes; NaN counts as infinite.
    finite : bool
        Whether every element of the result is finite, also where no reference was computed.
    """

    error: float
    scaled: float
    finite: bool


@dataclass(frozen=True)
class Patch:
    """A part of the exact result: planes `span` of the first spatial axis, of one sample.

    Of a weight, the kernel's axes are the spatial ones, and an input channel is a sample.
    """

    sample: int
    span: Span
    value: Any
    magnitude: Any  # of each output's terms: the sum of magnitudes, for gradients the root of the sum of squares


def spans(shape: Ints, max_elements: int = MAX_ELEMENTS) -> list[tuple[int, Span]]:
    """Choose what to compare: everything, or slabs at both ends and in the middle of the first and last sample."""
    n, channels, planes, *rest = shape
    if prod(shape) <= max_elements:
        return [(sample, (0, planes)) for sample in range(n)]
    samples = sorted({0, n - 1})
    thickness = max(1, max_elements // (3 * len(samples) * channels * prod(rest)))
    if 3 * thickness >= planes:
        return [(sample, (0, planes)) for sample in samples]
    starts = (0, (planes - thickness) // 2, planes - thickness)
    return [(sample, (start, start + thickness)) for sample in samples for start in starts]


def make_patches(xp: Any, case: Case, x: Any, weight: Any, bias: Any, max_elements: int = MAX_ELEMENTS) -> list[Patch]:
    """Compute the exact result, or parts of a large one, from float arrays that hold the inputs as rounded."""
    patches = []
    magnitudes = abs(weight), None if bias is None else abs(bias)
    for sample, span in spans(case.out, max_elements):
        value = exact(xp, case, x[sample], weight, bias, span)
        magnitude = exact(xp, case, abs(x[sample]), *magnitudes, span)
        patches.append(Patch(sample, span, value, magnitude))
    return patches


def make_input_patches(xp: Any, case: Case, y: Any, weight: Any, max_elements: int = MAX_ELEMENTS) -> list[Patch]:
    """Compute the exact gradient of the input, or parts of a large one, for the gradient y of the result."""
    patches = []
    squares = xp.square(weight)
    # What a slab reads may be larger than the slab.
    share = prod(case.x) / max(prod(case.x), prod(case.out))
    for sample, span in spans(case.x, int(max_elements * share)):
        value = exact_input(xp, case, y[sample], weight, span)
        magnitude = exact_input(xp, case, xp.square(y[sample]), squares, span) ** 0.5
        patches.append(Patch(sample, span, value, magnitude))
    return patches


def make_weight_patches(xp: Any, case: Case, x: Any, y: Any, max_elements: int = MAX_ELEMENTS) -> list[Patch]:
    """Compute the exact gradient of the weight for the gradient y of the result."""
    value = exact_weight(xp, case, x, y, max_elements)
    magnitude = exact_weight(xp, case, xp.square(x), xp.square(y), max_elements) ** 0.5
    planes = (0, case.kernel[0])
    return [Patch(channel, planes, value[channel], magnitude[channel]) for channel in range(case.x[1])]


def exact(xp: Any, case: Case, x: Any, weight: Any, bias: Any, span: Span) -> Any:
    """Return planes `span` of the first spatial axis of one sample's result, in float64.

    Parameters
    ----------
    xp : module
        numpy or cupy.
    case : Case
    x : array (C_in, *spatial)
    weight : array (C_in, C_out/groups, *kernel)
    bias : array (C_out,) or None
    span : (int, int)
        First plane, and the one after the last.
    """
    stride, dilation, kernel, padding = case.stride, case.dilation, case.kernel, case.padding
    result = xp.zeros((case.c_out, span[1] - span[0], *case.out[3:]), np.float64)
    low = max(0, -(-(span[0] + padding[0] - dilation[0] * (kernel[0] - 1)) // stride[0]))
    high = min(case.x[2], (span[1] - 1 + padding[0]) // stride[0] + 1)
    if low < high:
        groups, c_in, c_out = case.groups, case.x[1] // case.groups, case.c_out // case.groups
        columns = xp.ascontiguousarray(x[:, low:high], np.float64).reshape(groups, c_in, -1)
        taps = weight.astype(np.float64).reshape(groups, c_in, c_out, -1).transpose(3, 0, 2, 1).copy()
        full, onto = _landings(case, (low, high))
        # All outputs that these inputs reach, before padding cuts any off.
        scattered = xp.zeros((case.c_out, *full), np.float64)
        for where, matrix in zip(onto, taps, strict=True):
            scattered[(slice(None), *where)] += xp.matmul(matrix, columns).reshape(case.c_out, high - low, *case.x[3:])
        source, target = _overlap(case, low, full, span)
        result[target] = scattered[source]
    if bias is not None:
        result += bias.astype(np.float64).reshape(-1, *(1,) * case.rank)
    return result


def exact_input(xp: Any, case: Case, y: Any, weight: Any, span: Span) -> Any:
    """Return planes `span` of the first spatial axis of the gradient of one sample's input, in float64.

    Parameters as of `exact`; y (C_out, *spatial of the result) is the gradient of the sample's result.
    """
    groups, c_in, c_out = case.groups, case.x[1] // case.groups, case.c_out // case.groups
    taps = weight.astype(np.float64).reshape(groups, c_in, c_out, -1).transpose(3, 0, 1, 2).copy()
    extent = (span[1] - span[0], *case.x[3:])
    total = xp.zeros((groups, c_in, prod(extent)), np.float64)
    for reached, matrix in zip(_reached(xp, case, y, span), taps, strict=True):
        total += xp.matmul(matrix, reached.reshape(groups, c_out, -1))
    return total.reshape(case.x[1], *extent)


def exact_weight(xp: Any, case: Case, x: Any, y: Any, max_elements: int = MAX_ELEMENTS) -> Any:
    """Return the gradient of the weight in float64, summed over slabs of about `max_elements` numbers each."""
    groups, c_in, c_out = case.groups, case.x[1] // case.groups, case.c_out // case.groups
    total = xp.zeros((groups, c_in, c_out, prod(case.kernel)), np.float64)
    planes, *rest = case.x[2:]
    full, _ = _landings(case, (0, 1))
    a_plane = (case.x[1] + 2 * case.c_out) * prod(rest) + case.stride[0] * case.c_out * prod(full[1:])
    thickness = max(1, max_elements // (a_plane + case.x[1] * c_out))
    for sample in range(case.x[0]):
        for low in range(0, planes, thickness):
            high = min(planes, low + thickness)
            # A product a plane, added up afterwards: short sums, and enough of them to fill a GPU.
            rows = high - low if rest else 1
            left = x[sample, :, low:high].astype(np.float64).reshape(groups, c_in, rows, -1).swapaxes(1, 2).copy()
            for tap, reached in enumerate(_reached(xp, case, y[sample], (low, high))):
                right = reached.reshape(groups, c_out, rows, -1).transpose(0, 2, 3, 1)
                total[..., tap] += xp.matmul(left, right).sum(axis=1)
    return total.reshape(case.weight)


def _reached(xp: Any, case: Case, y: Any, span: Span) -> Iterator[Any]:
    """Yield, tap by tap, what the outputs hold that input planes `span` reach: (C_out, *extent), zero off the edges."""
    full, onto = _landings(case, span)
    uncropped = xp.zeros((case.c_out, *full), np.float64)
    source, target = _overlap(case, span[0], full, (0, case.out[2]))
    uncropped[source] = y[target]
    for where in onto:
        yield uncropped[(slice(None), *where)]


def _landings(case: Case, span: Span) -> tuple[list[int], list[Slices]]:
    """Return the extents that input planes `span` reach before padding cuts any off, and where each tap takes them."""
    extent = (span[1] - span[0], *case.x[3:])
    reach = [(i - 1) * s + 1 for i, s in zip(extent, case.stride, strict=True)]
    full = [r + d * (k - 1) for r, d, k in zip(reach, case.dilation, case.kernel, strict=True)]
    onto = [
        tuple(slice(t * d, t * d + r, s) for t, d, r, s in zip(tap, case.dilation, reach, case.stride, strict=True))
        for tap in itertools.product(*map(range, case.kernel))
    ]
    return full, onto


def _overlap(case: Case, low: int, full: Sequence[int], span: Span) -> tuple[Slices, Slices]:
    """Return what the extents reached from input plane `low` on and output planes `span` share, as slices of each."""
    origin = [low * case.stride[0] - case.padding[0] - span[0], *(-p for p in case.padding[1:])]
    source, target = [slice(None)], [slice(None)]
    for begin, length, o in zip(origin, full, (span[1] - span[0], *case.out[3:]), strict=True):
        first, last = max(0, begin), max(0, begin, min(o, begin + length))
        target.append(slice(first, last))
        source.append(slice(first - begin, last - begin))
    return tuple(source), tuple(target)


def compare(xp: Any, result: Any, patches: list[Patch], rounding: float = 0.0, smallest: float = 0.0) -> Accuracy:
    """Compare a result with the exact one, element by element.

    Parameters
    ----------
    xp : module
        numpy or cupy.
    result : array
    patches : list of Patch
    rounding : float
        What an element may lose in its dtype, as a share of itself.
    smallest : float
        The dtype's smallest positive number, half of which it may lose however small it is.
    """
    error = scaled = 0.0
    tiny = np.finfo(np.float64).tiny  # where an output has no term at all, what is not exact is infinitely wrong
    for patch in patches:
        off = abs(result[patch.sample][:, slice(*patch.span)].astype(np.float64) - patch.value)
        largest = float(off.max())
        off -= rounding * abs(patch.value)  # in place, for the memory
        off = xp.maximum(off - smallest / 2, 0)
        relative = float((off / xp.maximum(patch.magnitude, tiny)).max())
        error = max(error, float("inf") if np.isnan(relative) else largest)
        scaled = max(scaled, float("inf") if np.isnan(relative) else relative)
    return Accuracy(error, scaled, all(bool(xp.isfinite(sample).all()) for sample in result))
