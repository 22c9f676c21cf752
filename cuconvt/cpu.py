"""The NumPy backend: transposed convolution as BLAS products over boxes of positions.

On each axis the phases (`cuconvt.phases`) with equally many taps form a *phase set*. They differ only in where they
start: at position ``p``, tap ``j`` of every one of them reads the input at ``p + j*step``, where ``step`` is
``dilation / gcd(stride, dilation)``. An axis has at most two sets with taps, and all phases of a set are rows of the
same product

    (phases * C_out/groups, K) @ (K, positions),  batched over groups.

Dead phases have no tap: their outputs are the bias. The taps of an axis enter the product in one of two ways:

- *stacked* taps are rows of the right operand: K = C_in/groups * stacked taps, at the price of a copy of the box a tap;
- *looped* taps have a product each, summed afterwards; all read the same operand through shifted views.

W is stacked, since its shift would break the rows that a product runs over. Looping the other axes saves copies, but
BLAS needs some length of sums and rows (at K = 1 it reaches a hundredth of its rate, from K = 8 on most of it), so H
and then D are stacked as well while these are short, or where a dilated kernel reaches far beyond a box. One number,
the stacked axes, thus spans everything from many channels with few taps to one channel with many. With one tap an axis
(kernel = stride) there is nothing to copy: the operand is a view of x.

A tap outside the input contributes nothing. Looped axes clip the product to the inputs that exist; stacked axes read
zeros there, which is the same unless a weight is infinite or NaN, since zero times infinity is NaN: then every axis is
looped.

Boxes are sized to the cache, which bounds the workspace to tens of megabytes, or a few times the weight if more.
float16 and bfloat16 are multiplied and summed in float32 and rounded once.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from cuconvt.geometry import Geometry
from cuconvt.phases import axis_phases, phase_outputs

# Elements of workspace for a box: larger ones fall out of the cache, smaller ones repeat more of the halo and call BLAS
# more often.
_BOX_ELEMENTS = 1 << 21
# A product is long enough with this many terms a sum, and this many positions a row.
_ENOUGH_TERMS = 8
_ENOUGH_POSITIONS = 256
# Axes are looped while the boxes with their halos are at most this many times what they cover.
_MOST_HALO = 4


@dataclass(frozen=True)
class _PhaseSet:
    """The phases of one axis that have the same number of taps.

    Attributes
    ----------
    taps : tuple of tuple of int
        For each phase its kernel positions, in ascending order of the inputs that they read.
    outputs : tuple of range
        For each phase its output positions.
    first : tuple of int
        For each phase the position of its first output.
    step : int
        At position ``p``, tap ``j`` reads the input at ``p + j*step``.
    """

    taps: tuple[tuple[int, ...], ...]
    outputs: tuple[range, ...]
    first: tuple[int, ...]
    step: int

    @property
    def count(self) -> int:
        """Taps of each phase."""
        return len(self.taps[0])

    @property
    def reach(self) -> int:
        """How far beyond its position an output reads."""
        return (self.count - 1) * self.step

    @functools.cached_property
    def positions(self) -> range:
        """The positions of all phases."""
        return range(min(self.first), max(f + len(o) for f, o in zip(self.first, self.outputs, strict=True)))


class _Shift(NamedTuple):
    """One tap of one axis: what it reads (`source`) and the positions that it reaches (`target`)."""

    tap: int
    source: slice
    target: slice


class _Buffer:
    """Memory that boxes reuse: the pages of a new array cost as much as the copy that fills it."""

    def __init__(self, dtype: Any):
        self._memory = np.empty(0, dtype)

    def array(self, *shape: int) -> Any:
        size = math.prod(shape)
        if self._memory.size < size:
            self._memory = np.empty(size, self._memory.dtype)
        return self._memory[:size].reshape(shape)


class _Workspace(NamedTuple):
    operand: _Buffer
    product: _Buffer
    total: _Buffer


@functools.lru_cache(maxsize=1024)
def _phase_sets(kernel: int, stride: int, dilation: int, pad_before: int, out_extent: int) -> tuple[_PhaseSet, ...]:
    """Return the phase sets of an axis, without phases that have no output; the set of dead phases has a count of 0."""
    members: dict[int, list[tuple[tuple[int, ...], range, int]]] = {}
    for phase in axis_phases(kernel, stride, dilation):
        outputs = phase_outputs(phase.residue, stride, pad_before, out_extent)
        if outputs:
            furthest = phase.back[-1] if phase.back else 0
            first = (outputs[0] + pad_before) // stride - furthest
            members.setdefault(len(phase.taps), []).append((phase.taps[::-1], outputs, first))
    step = dilation // math.gcd(stride, dilation)
    columns = (tuple(zip(*phases, strict=True)) for phases in members.values())
    return tuple(_PhaseSet(taps, outputs, first, step) for taps, outputs, first in columns)


def conv_transpose(x: Any, weight: Any, bias: Any, geometry: Geometry, out: Any) -> None:
    """Write the transposed convolution of NumPy arrays into `out`.

    Parameters
    ----------
    x : numpy.ndarray
        ``(N, C_in, D, H, W)``, any strides, with N >= 1.
    weight : numpy.ndarray
        ``(C_in, C_out/groups, kD, kH, kW)``, any strides.
    bias : numpy.ndarray or None
        ``(C_out,)``.
    geometry : Geometry
        The problem; it must fit the arrays.
    out : numpy.ndarray
        ``(N, C_out, oD, oH, oW)``, any strides, overlapping no input; every element is written.
    """
    g = geometry
    dtype = np.dtype(np.float64 if x.dtype == np.float64 else np.float32)
    # Splitting the channel axis is a view for any strides.
    x = x.reshape(g.n, g.groups, g.c_in_per_group, *g.x_extent)
    out = out.reshape(g.n, g.groups, g.c_out_per_group, *g.out_extent)
    weight = weight.reshape(g.groups, g.c_in_per_group, g.c_out_per_group, *g.kernel).astype(dtype, copy=False)
    bias = np.zeros(g.c_out, dtype) if bias is None else bias.astype(dtype, copy=False)
    bias = bias.reshape(g.groups, g.c_out_per_group)

    axes = [_phase_sets(*axis) for axis in zip(g.kernel, g.stride, g.dilation, g.pad_before, g.out_extent, strict=True)]
    if not all(s.count for sets in axes for s in sets):
        # One pass over all outputs costs less than strided passes over the dead ones.
        out[...] = bias[:, :, None, None, None]
    finite = np.isfinite(weight).all()
    workspace = _Workspace(_Buffer(dtype), _Buffer(dtype), _Buffer(dtype))
    for sets in itertools.product(*axes):
        if all(s.count for s in sets):
            looped = 3 - _stacked_axes(g.c_in_per_group, g.c_out_per_group, sets) if finite else 3
            _correlate(x, weight, bias, sets, looped, workspace, out)


def _stacked_axes(c_in: int, c_out: int, sets: Sequence[_PhaseSet]) -> int:
    """Return how many axes, counted from W outward, have their taps stacked."""
    extents = [len(s.positions) for s in sets]
    rows = c_out * math.prod(len(s.taps) for s in sets)
    for stacked in (1, 2):
        looped = sets[: 3 - stacked]
        terms = c_in * math.prod(s.count for s in sets[3 - stacked :])
        long_sums = terms >= _ENOUGH_TERMS or all(s.count == 1 for s in looped)
        long_rows = math.prod(extents[2 - stacked :]) >= _ENOUGH_POSITIONS
        sizes = _box_sizes(extents, _box_limit(rows, terms))
        halo = math.prod(1 + s.reach / size for s, size in zip(looped, sizes, strict=False))
        if long_sums and long_rows and halo <= _MOST_HALO:
            return stacked
    return 3


def _correlate(
    x: Any, weight: Any, bias: Any, sets: Sequence[_PhaseSet], looped: int, workspace: _Workspace, out: Any
) -> None:
    """Write the outputs of one phase set an axis; the taps of the first `looped` axes are looped."""
    matrices = _weight_matrices(weight, sets, looped)
    groups, rows, terms = matrices.shape[3:]
    row_bias = np.tile(bias, rows // bias.shape[1])[..., None, None, None, None]

    extents = (groups, x.shape[0], *(len(s.positions) for s in sets))
    sizes = _box_sizes(extents, _box_limit(rows, terms))
    for group, sample, *box in itertools.product(*map(_pieces, extents, sizes)):
        spans = [s.positions[b] for s, b in zip(sets, box, strict=True)]
        # An axis is shifted in one of two places: where x is copied (stacked) or where the operand is read (looped).
        copies, products, lengths = [], [], []
        for axis, (s, span, extent) in enumerate(zip(sets, spans, x.shape[3:], strict=True)):
            if axis < looped:
                read = range(max(span.start, 0), max(min(span.stop + s.reach, extent), 0))
                copies.append([_Shift(0, slice(read.start, read.stop), slice(0, len(read)))])
                products.append(_shifts(s, span, read))
                lengths.append(len(read))
            else:
                copies.append(_shifts(s, span, range(extent)))
                products.append([_Shift(0, slice(0, len(span)), slice(0, len(span)))])
                lengths.append(len(span))
        counts = [1] * looped + [s.count for s in sets[looped:]]
        operand = _operand(x[sample, group], copies, counts, lengths, workspace.operand, weight.dtype)
        if looped == 0:
            total = _product(matrices[0, 0, 0, group], operand, looped, workspace.product)
            total += row_bias[group]
        else:
            total = workspace.total.array(operand.shape[0], rows, operand.shape[2], *map(len, spans))
            total[...] = row_bias[group]
            for taps, source, target in _each_tap(products):
                shifted = operand[(..., *source)]
                total[(..., *target)] += _product(matrices[taps][group], shifted, looped, workspace.product)
        _store(total, sets, spans, out[sample, group])


def _weight_matrices(weight: Any, sets: Sequence[_PhaseSet], looped: int) -> Any:
    """Return the left operands, ``(three axes of looped taps, groups, phases * C_out/groups, K)``."""
    groups, _, c_out = weight.shape[:3]
    depth, height, width = (np.array(s.taps) for s in sets)
    picked = weight[
        :, :, :, depth[:, None, None, :, None, None], height[:, None, None, :, None], width[:, None, None, :]
    ]
    # From (group, C_in, C_out, three axes of phases, three axes of taps).
    picked = picked.transpose(*range(6, 6 + looped), 0, 3, 4, 5, 2, 1, *range(6 + looped, 9))
    rows = len(depth) * len(height) * len(width) * c_out
    return picked.reshape(*picked.shape[:looped], *(1,) * (3 - looped), groups, rows, -1)


def _box_limit(rows: int, terms: int) -> int:
    """Return the positions of a box; each takes a column of the operand, of a product and of the sum."""
    return max(_BOX_ELEMENTS // (terms + 2 * rows), _ENOUGH_POSITIONS)


def _box_sizes(extents: Sequence[int], limit: int) -> list[int]:
    """Return the extents of a box of about `limit` elements, whole along the last axes; it cuts an axis evenly."""
    sizes = []
    for extent in reversed(extents):
        pieces = -(-extent // max(limit, 1))
        sizes.append(-(-extent // pieces))
        limit //= sizes[-1]
    return sizes[::-1]


def _pieces(extent: int, size: int) -> list[slice]:
    return [slice(p, min(p + size, extent)) for p in range(0, extent, size)]


def _shifts(s: _PhaseSet, span: range, read: range) -> list[_Shift]:
    """Return the taps of an axis that reach positions of `span` from inputs of `read`."""
    shifts = []
    for tap in range(s.count):
        shift = tap * s.step
        first, last = max(span.start, read.start - shift), min(span.stop, read.stop - shift)
        if first < last:
            source = slice(first + shift - read.start, last + shift - read.start)
            shifts.append(_Shift(tap, source, slice(first - span.start, last - span.start)))
    return shifts


def _each_tap(axes: Sequence[Sequence[_Shift]]) -> Iterator[tuple[Any, Any, Any]]:
    """Yield the tap, the source and the target of every combination of three axes, each a tuple."""
    for shifts in itertools.product(*axes):
        yield tuple(s.tap for s in shifts), tuple(s.source for s in shifts), tuple(s.target for s in shifts)


def _operand(
    x: Any,
    copies: Sequence[Sequence[_Shift]],
    counts: Sequence[int],
    lengths: Sequence[int],
    buffer: _Buffer,
    dtype: Any,
) -> Any:
    """Return the right operand, ``(groups, C_in/groups * stacked taps, N, D, H, W)``, zero where a tap has no input."""
    x = x.transpose(1, 2, 0, 3, 4, 5)
    groups, c_in, n = x.shape[:3]
    complete = all(
        sum(s.target.stop - s.target.start for s in shifts) == count * length
        for shifts, count, length in zip(copies, counts, lengths, strict=True)
    )
    # BLAS reads x as it is if one axis of the matrix is contiguous.
    if complete and math.prod(counts) == 1 and x.dtype == dtype and x.itemsize in (x.strides[1], x.strides[5]):
        return x[(..., *(shifts[0].source for shifts in copies))]
    operand = buffer.array(groups, c_in, *counts, n, *lengths)
    if not complete:
        operand[...] = 0
    for taps, source, target in _each_tap(copies):
        operand[(slice(None), slice(None), *taps, slice(None), *target)] = x[(..., *source)]
    return operand.reshape(groups, c_in * math.prod(counts), n, *lengths)


def _product(left: Any, right: Any, looped: int, buffer: _Buffer) -> Any:
    """Return ``(groups, rows, N, D, H, W)``; of N, D, H, W the first `looped` are batch axes, the rest columns."""
    right = np.moveaxis(right, 1, 1 + looped)
    batch, columns = right.shape[: 1 + looped], right.shape[2 + looped :]
    left = left.reshape(batch[0], *(1,) * looped, *left.shape[1:])
    right = right.reshape(*batch, left.shape[-1], -1)
    result = buffer.array(*batch, left.shape[-2], right.shape[-1])
    # An outer product is no work for BLAS, and NumPy's own loop for it is slow.
    (np.multiply if left.shape[-1] == 1 else np.matmul)(left, right, out=result)
    return np.moveaxis(result.reshape(*batch, left.shape[-2], *columns), 1 + looped, 1)


def _store(total: Any, sets: Sequence[_PhaseSet], spans: Sequence[range], out: Any) -> None:
    """Write all phases of a box of positions to the outputs that they stand for."""
    groups, _, *box = total.shape
    phases = [len(s.taps) for s in sets]
    # To (three axes of phases, N, groups, C_out, D, H, W).
    total = total.reshape(groups, *phases, -1, *box).transpose(1, 2, 3, 5, 0, 4, 6, 7, 8)
    for phase in np.ndindex(*phases):
        source, target = [], []
        for i, s, span in zip(phase, sets, spans, strict=True):
            begin = max(span.start, s.first[i])
            outputs = s.outputs[i][begin - s.first[i] : max(span.stop - s.first[i], 0)]
            source.append(slice(begin - span.start, begin - span.start + len(outputs)))
            target.append(slice(outputs.start, outputs.stop, outputs.step))
        out[(..., *target)] = total[(*phase, ..., *source)]
