"""The NumPy backend's engine: correlations as BLAS products over boxes of positions.

What every operation has in common: at position ``p`` of an axis, tap ``j`` reads the input at ``p*stride + j*step +
offset`` (`TapSet`). The taps of an axis enter a product

    (rows, K) @ (K, positions),  batched over groups,

in one of two ways:

- *stacked* taps are rows of the right operand: K = channels * stacked taps, at the price of a copy of the box a tap;
- *looped* taps have a product each, summed afterwards; all read the same operand through shifted views. With a stride
  the operand holds the residues modulo the stride apart, so that every tap still reads consecutive elements.

W is stacked, since its shift would break the rows that a product runs over. Looping the other axes saves copies, but
BLAS needs some length of sums and rows (at K = 1 it reaches a hundredth of its rate, from K = 8 on most of it), so H
and then D are stacked as well while these are short, or where a dilated kernel reaches far beyond a box, or where a
stride leaves each input to one tap, so that stacking copies nothing twice. One number, the stacked axes, thus spans
everything from many channels with few taps to one channel with many. With one tap an axis there may be nothing to copy:
the operand is a view of the input.

A tap outside the input contributes nothing. Looped axes clip the product to the inputs that exist; stacked axes read
zeros there, which is the same unless what they are multiplied with is infinite or NaN, since zero times infinity is
NaN: then every axis is looped.

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

# Elements of workspace for a box: larger ones fall out of the cache, smaller ones repeat more of the halo and call BLAS
# more often.
_BOX_ELEMENTS = 1 << 21
# A product is long enough with this many terms a sum, and this many positions a row.
_ENOUGH_TERMS = 8
_ENOUGH_POSITIONS = 256
# Axes are looped while the boxes with their halos are at most this many times what they cover.
_MOST_HALO = 4


@dataclass(frozen=True)
class TapSet:
    """Taps of one axis, and their outputs: at position ``p``, tap ``j`` reads ``p*stride + j*step + offset``.

    Attributes
    ----------
    taps : tuple of tuple of int
        For each phase its kernel positions, in ascending order of the inputs that they read. Phases have equally many
        taps and differ only in where they start; they are rows of the same product.
    outputs : tuple of range
        For each phase its output positions.
    first : tuple of int
        For each phase the position of its first output.
    step, stride, offset : int
        What a tap reads.
    """

    taps: tuple[tuple[int, ...], ...]
    outputs: tuple[range, ...]
    first: tuple[int, ...]
    step: int
    stride: int = 1
    offset: int = 0

    @property
    def count(self) -> int:
        """Taps of each phase."""
        return len(self.taps[0])

    @functools.cached_property
    def positions(self) -> range:
        """The positions of all phases."""
        return range(min(self.first), max(f + len(o) for f, o in zip(self.first, self.outputs, strict=True)))

    @functools.cached_property
    def reads(self) -> tuple[tuple[int, int], ...]:
        """For each tap ``(shift, residue)``: it reads element ``p + shift`` of those that have the residue."""
        return tuple(divmod(tap * self.step + self.offset, self.stride) for tap in range(self.count))

    @functools.cached_property
    def residues(self) -> tuple[int, ...]:
        return tuple(sorted({residue for _, residue in self.reads}))

    @functools.cached_property
    def shifts(self) -> range:
        """From the least shift to the largest."""
        shifts = [shift for shift, _ in self.reads]
        return range(min(shifts), max(shifts))

    @property
    def reach(self) -> int:
        """How far beyond its position an output reads."""
        return len(self.shifts)

    def length(self, residue: int, extent: int) -> int:
        """Return how many inputs of an axis of `extent` are `residue` modulo the stride."""
        return -(-(extent - residue) // self.stride)

    def inputs(self, residue: int, elements: slice) -> slice:
        """Return the inputs that elements of one residue are."""
        first, last = (element * self.stride + residue for element in (elements.start, elements.stop - 1))
        return slice(first, last + 1, self.stride)


class _Shift(NamedTuple):
    """One tap of one axis: its residue (`part`), what it reads and the positions that it reaches."""

    tap: int
    part: int
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


class Workspace:
    """The memory of an operation, and the dtype to multiply and sum in."""

    def __init__(self, dtype: Any):
        self.dtype = np.dtype(dtype)
        self.operand, self.product, self.total, self.left = (_Buffer(dtype) for _ in range(4))


class Box(NamedTuple):
    """A box of samples, groups and positions, with the right operand and the products that run over it."""

    sample: slice
    group: slice
    spans: Sequence[range]
    operand: Any
    products: Sequence[Sequence[_Shift]]


def computes_in(dtype: Any) -> Any:
    """Return the dtype to multiply and sum in."""
    return np.dtype(np.float64 if dtype == np.float64 else np.float32)


def correlation_sets(geometry: Geometry) -> list[TapSet]:
    """Return the tap set of each axis of a correlation, of ``y[i*stride + k*dilation - pad_before]`` for ``x[i]``."""
    g = geometry
    return [
        TapSet((tuple(range(kernel)),), (range(extent),), (0,), dilation, stride, -pad)
        for kernel, extent, dilation, stride, pad in zip(
            g.kernel, g.x_extent, g.dilation, g.stride, g.pad_before, strict=True
        )
    ]


def looped_axes(channels: int, rows: int, sets: Sequence[TapSet]) -> int:
    """Return how many axes, counted from D inward, have their taps looped; `rows` are those of one phase."""
    extents = [len(s.positions) for s in sets]
    rows *= math.prod(len(s.taps) for s in sets)
    for looped in (2, 1):
        outer, inner = sets[:looped], sets[looped:]
        terms = channels * math.prod(s.count for s in inner)
        long_sums = terms >= _ENOUGH_TERMS or all(s.count == 1 for s in outer)
        long_rows = math.prod(extents[looped - 1 :]) >= _ENOUGH_POSITIONS
        sizes = _box_sizes(extents, _box_limit(rows, terms, outer))
        halo = math.prod(1 + s.reach / size for s, size in zip(outer, sizes, strict=False))
        once = outer[-1].stride > 1 and outer[-1].count == len(outer[-1].residues)
        if long_sums and long_rows and halo <= _MOST_HALO and not once:
            return looped
    return 0


def correlate_taps(
    x: Any, weight: Any, bias: Any, sets: Sequence[TapSet], looped: int, workspace: Workspace, out: Any
) -> None:
    """Write the outputs of one tap set an axis.

    Parameters
    ----------
    x : numpy.ndarray
        ``(N, groups, channels, D, H, W)``, any strides.
    weight : numpy.ndarray
        ``(groups, channels, rows, kD, kH, kW)`` in the dtype to compute in.
    bias : numpy.ndarray
        ``(groups, rows)``.
    sets : sequence of 3 TapSet
    looped : int
        The taps of the first `looped` axes are looped.
    workspace : Workspace
    out : numpy.ndarray
        ``(N, groups, rows, D, H, W)``, any strides.
    """
    matrices = _weight_matrices(weight, sets, looped)
    rows = matrices.shape[-2]
    row_bias = np.tile(bias, rows // bias.shape[1])[..., None, None, None, None]
    for box in boxes(x, rows, sets, looped, workspace):
        if looped == 0:
            total = _product(matrices[0, 0, 0, box.group], box.operand[:, 0, 0, 0], looped, workspace.product)
            total += row_bias[box.group]
        else:
            samples = box.operand.shape[5]
            total = workspace.total.array(box.operand.shape[0], rows, samples, *map(len, box.spans))
            total[...] = row_bias[box.group]
            for taps, parts, source, target in each_tap(box.products):
                shifted = box.operand[(slice(None), *parts, ..., *source)]
                total[(..., *target)] += _product(matrices[taps][box.group], shifted, looped, workspace.product)
        _store(total, sets, box.spans, out[box.sample, box.group])


def boxes(x: Any, rows: int, sets: Sequence[TapSet], looped: int, workspace: Workspace) -> Iterator[Box]:
    """Yield all boxes of positions, each with its operand ``(groups, three axes of residues, K, N, D, H, W)``."""
    counts = [1] * looped + [s.count for s in sets[looped:]]
    terms = x.shape[2] * math.prod(counts)
    extents = (x.shape[1], x.shape[0], *(len(s.positions) for s in sets))
    sizes = _box_sizes(extents, _box_limit(rows, terms, sets[:looped]))
    for group, sample, *box in itertools.product(*map(_pieces, extents, sizes)):
        spans = [s.positions[b] for s, b in zip(sets, box, strict=True)]
        # An axis is shifted in one of two places: where x is copied (stacked) or where the operand is read (looped).
        copies, products, lengths = [], [], []
        for axis, (s, span, extent) in enumerate(zip(sets, spans, x.shape[3:], strict=True)):
            if axis < looped:
                read = range(
                    max(span.start + s.shifts.start, 0), max(min(span.stop + s.shifts.stop, s.length(0, extent)), 0)
                )
                copies.append(_parts(s, read, extent))
                products.append(_shifts(s, span, read, extent))
                lengths.append(len(read))
            else:
                shifts = _shifts(s, span, range(s.length(0, extent)), extent)
                copies.append([_Shift(t, 0, s.inputs(s.reads[t][1], read), target) for t, _, read, target in shifts])
                products.append([_Shift(0, 0, slice(0, len(span)), slice(0, len(span)))])
                lengths.append(len(span))
        parts = [len(s.residues) for s in sets[:looped]] + [1] * (3 - looped)
        operand = _operand(x[sample, group], looped, copies, parts, counts, lengths, workspace)
        yield Box(sample, group, spans, operand, products)


def each_tap(axes: Sequence[Sequence[_Shift]]) -> Iterator[tuple[Any, Any, Any, Any]]:
    """Yield the tap, the part, the source and the target of every combination of three axes, each a tuple."""
    for shifts in itertools.product(*axes):
        yield tuple(zip(*shifts, strict=True))


def _weight_matrices(weight: Any, sets: Sequence[TapSet], looped: int) -> Any:
    """Return the left operands, ``(three axes of looped taps, groups, phases * rows, K)``."""
    groups, _, c_out = weight.shape[:3]
    depth, height, width = (np.array(s.taps) for s in sets)
    picked = weight[
        :, :, :, depth[:, None, None, :, None, None], height[:, None, None, :, None], width[:, None, None, :]
    ]
    # From (group, channels, rows, three axes of phases, three axes of taps).
    picked = picked.transpose(*range(6, 6 + looped), 0, 3, 4, 5, 2, 1, *range(6 + looped, 9))
    rows = len(depth) * len(height) * len(width) * c_out
    return picked.reshape(*picked.shape[:looped], *(1,) * (3 - looped), groups, rows, -1)


def _box_limit(rows: int, terms: int, looped: Sequence[TapSet]) -> int:
    """Return the positions of a box; each takes a column of the operand, of a product and of the sum."""
    parts = math.prod(len(s.residues) for s in looped)
    return max(_BOX_ELEMENTS // (terms * parts + 2 * rows), _ENOUGH_POSITIONS)


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


def _shifts(s: TapSet, span: range, read: range, extent: int) -> list[_Shift]:
    """Return the taps of an axis that reach positions of `span` from elements of `read`, where sources begin."""
    shifts = []
    for tap, (shift, residue) in enumerate(s.reads):
        stop = min(read.stop, s.length(residue, extent))
        first, last = max(span.start, read.start - shift), min(span.stop, stop - shift)
        if first < last:
            source = slice(first + shift - read.start, last + shift - read.start)
            target = slice(first - span.start, last - span.start)
            shifts.append(_Shift(tap, s.residues.index(residue), source, target))
    return shifts


def _parts(s: TapSet, read: range, extent: int) -> list[_Shift]:
    """Return, for each residue of an axis, the inputs to copy, and the part and the place to copy them to."""
    copies = []
    for part, residue in enumerate(s.residues):
        stop = min(read.stop, s.length(residue, extent))
        if read.start < stop:
            inputs = s.inputs(residue, slice(read.start, stop))
            copies.append(_Shift(0, part, inputs, slice(0, stop - read.start)))
    return copies


def _operand(
    x: Any,
    looped: int,
    copies: Sequence[Sequence[_Shift]],
    parts: Sequence[int],
    counts: Sequence[int],
    lengths: Sequence[int],
    workspace: Workspace,
) -> Any:
    """Return ``(groups, residues, channels * stacked taps, N, D, H, W)``, zero where a stacked tap has no input."""
    x = x.transpose(1, 2, 0, 3, 4, 5)
    groups, channels, n = x.shape[:3]
    # The part of a residue with fewer inputs ends in elements that no product reads.
    complete = all(
        sum(c.target.stop - c.target.start for c in axis) == count * length
        for axis, count, length in zip(copies[looped:], counts[looped:], lengths[looped:], strict=True)
    )
    if complete and math.prod(counts) == math.prod(parts) == 1 and x.dtype == workspace.dtype and all(copies):
        view = x[(..., *(axis[0].source for axis in copies))]
        # BLAS reads x as it is if one axis of the matrix is contiguous.
        if view.shape[3:] == tuple(lengths) and view.itemsize in (view.strides[1], view.strides[5]):
            return view[:, None, None, None]
    operand = workspace.operand.array(groups, *parts, channels, *counts, n, *lengths)
    if not complete:
        operand[...] = 0
    for taps, part, source, target in each_tap(copies):
        operand[(slice(None), *part, slice(None), *taps, slice(None), *target)] = x[(..., *source)]
    return operand.reshape(groups, *parts, channels * math.prod(counts), n, *lengths)


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


def _store(total: Any, sets: Sequence[TapSet], spans: Sequence[range], out: Any) -> None:
    """Write all phases of a box of positions to the outputs that they stand for."""
    groups, _, *box = total.shape
    phases = [len(s.taps) for s in sets]
    # To (three axes of phases, N, groups, rows, D, H, W).
    total = total.reshape(groups, *phases, -1, *box).transpose(1, 2, 3, 5, 0, 4, 6, 7, 8)
    for phase in np.ndindex(*phases):
        source, target = [], []
        for i, s, span in zip(phase, sets, spans, strict=True):
            begin = max(span.start, s.first[i])
            outputs = s.outputs[i][begin - s.first[i] : max(span.stop - s.first[i], 0)]
            source.append(slice(begin - span.start, begin - span.start + len(outputs)))
            target.append(slice(outputs.start, outputs.stop, outputs.step))
        out[(..., *target)] = total[(*phase, ..., *source)]
