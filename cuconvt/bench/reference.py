"""What a result is compared with: the definition in float64, one matrix product a tap, on NumPy or CuPy arrays.

It shares no code with the library's backends: every tap's product is added to the outputs that it lands on.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from cuconvt.bench.cases import Case

MAX_ELEMENTS = 2**29  # of a reference that covers a whole result: 4 GiB in float64
Span = tuple[int, int]


@dataclass(frozen=True)
class Accuracy:
    """How far a result is from float64.

    Attributes
    ----------
    error : float
        Largest absolute error.
    scaled : float
        Largest error relative to the sum of the magnitudes of the output's terms; NaN counts as infinite.
    finite : bool
        Whether every element of the result is finite, also where no reference was computed.
    """

    error: float
    scaled: float
    finite: bool


@dataclass(frozen=True)
class Patch:
    """A part of the exact result: planes `span` of the first spatial axis, of one sample."""

    sample: int
    span: Span
    value: Any
    magnitude: Any  # sum of the magnitudes of each output's terms


def spans(case: Case, max_elements: int = MAX_ELEMENTS) -> list[tuple[int, Span]]:
    """Choose what to compare: everything, or slabs at both ends and in the middle of the first and last sample."""
    n, _, planes, *rest = case.out
    if prod(case.out) <= max_elements:
        return [(sample, (0, planes)) for sample in range(n)]
    samples = sorted({0, n - 1})
    thickness = max(1, max_elements // (3 * len(samples) * case.c_out * prod(rest)))
    if 3 * thickness >= planes:
        return [(sample, (0, planes)) for sample in samples]
    starts = (0, (planes - thickness) // 2, planes - thickness)
    return [(sample, (start, start + thickness)) for sample in samples for start in starts]


def make_patches(xp: Any, case: Case, x: Any, weight: Any, bias: Any, max_elements: int = MAX_ELEMENTS) -> list[Patch]:
    """Compute the exact result, or parts of a large one, from float arrays that hold the inputs as rounded."""
    patches = []
    magnitudes = abs(weight), None if bias is None else abs(bias)
    for sample, span in spans(case, max_elements):
        value = exact(xp, case, x[sample], weight, bias, span)
        magnitude = exact(xp, case, abs(x[sample]), *magnitudes, span)
        patches.append(Patch(sample, span, value, magnitude))
    return patches


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
        extent = (high - low, *case.x[3:])
        columns = xp.ascontiguousarray(x[:, low:high], np.float64).reshape(groups, c_in, -1)
        taps = weight.astype(np.float64).reshape(groups, c_in, c_out, -1).transpose(3, 0, 2, 1).copy()
        reach = [(i - 1) * s + 1 for i, s in zip(extent, stride, strict=True)]
        full = [r + d * (k - 1) for r, d, k in zip(reach, dilation, kernel, strict=True)]
        # All outputs that these inputs reach, before padding cuts any off.
        scattered = xp.zeros((case.c_out, *full), np.float64)
        for tap, matrix in zip(itertools.product(*map(range, kernel)), taps, strict=True):
            starts = [t * d for t, d in zip(tap, dilation, strict=True)]
            onto = tuple(slice(a, a + r, s) for a, r, s in zip(starts, reach, stride, strict=True))
            scattered[(slice(None), *onto)] += xp.matmul(matrix, columns).reshape(case.c_out, *extent)
        origin = [low * stride[0] - padding[0] - span[0], *(-p for p in padding[1:])]
        source, target = [slice(None)], [slice(None)]
        for begin, length, o in zip(origin, full, result.shape[1:], strict=True):
            first, last = max(0, begin), max(0, begin, min(o, begin + length))
            target.append(slice(first, last))
            source.append(slice(first - begin, last - begin))
        result[tuple(target)] = scattered[tuple(source)]
    if bias is not None:
        result += bias.astype(np.float64).reshape(-1, *(1,) * case.rank)
    return result


def compare(xp: Any, result: Any, patches: list[Patch], smallest: float = 0.0) -> Accuracy:
    """Compare a result with the exact one, element by element; `smallest` is the dtype's smallest positive number."""
    error = scaled = 0.0
    for patch in patches:
        got = result[patch.sample][:, slice(*patch.span)].astype(np.float64)
        off = abs(got - patch.value)
        # Where an output has no term at all, anything but an exact result is infinitely wrong.
        floor = np.finfo(np.float64).tiny
        # Rounding costs half of the smallest number, however small the terms are.
        relative = float((xp.maximum(off - smallest / 2, 0) / xp.maximum(patch.magnitude, floor)).max())
        error = max(error, float("inf") if np.isnan(relative) else float(off.max()))
        scaled = max(scaled, float("inf") if np.isnan(relative) else relative)
    return Accuracy(error, scaled, all(bool(xp.isfinite(sample).all()) for sample in result))
