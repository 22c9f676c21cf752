"""The NumPy backend: transposed convolution and strided correlation as BLAS products (`cuconvt.cpu_taps`).

Transposed convolution: on each axis the phases (`cuconvt.phases`) with equally many taps form a tap set. They differ
only in where they start: at position ``p``, tap ``j`` of every one of them reads the input at ``p + j*step``, where
``step`` is ``dilation / gcd(stride, dilation)``. An axis has at most two sets with taps, and all phases of a set are
rows of the same product. Dead phases have no tap: their outputs are the bias.

Correlation: one tap set an axis, whose taps read with the stride.
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import numpy as np

from cuconvt.cpu_taps import TapSet, Workspace, computes_in, correlate_taps, correlation_sets, looped_axes
from cuconvt.cpu_weight import weight_gradient
from cuconvt.geometry import Geometry
from cuconvt.phases import axis_phases, phase_outputs, residues_with_outputs

__all__ = ["conv_transpose", "correlate", "weight_gradient"]


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
    dtype = computes_in(x.dtype)
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
    workspace = Workspace(dtype)
    for sets in itertools.product(*axes):
        if all(s.count for s in sets):
            looped = looped_axes(g.c_in_per_group, g.c_out_per_group, sets) if finite else 3
            correlate_taps(x, weight, bias, sets, looped, workspace, out)


def correlate(y: Any, weight: Any, bias: Any, geometry: Geometry, out: Any) -> None:
    """Write the strided correlation of NumPy arrays, the adjoint of `conv_transpose`, into `out`.

    Parameters
    ----------
    y : numpy.ndarray
        ``(N, C_out, oD, oH, oW)``, any strides, with N >= 1.
    weight : numpy.ndarray
        ``(C_in, C_out/groups, kD, kH, kW)``, any strides.
    bias : numpy.ndarray or None
        ``(C_in,)``.
    geometry : Geometry
        The transposed convolution; it must fit the arrays.
    out : numpy.ndarray
        ``(N, C_in, D, H, W)``, any strides, overlapping no input; every element is written.
    """
    g = geometry
    dtype = computes_in(y.dtype)
    y = y.reshape(g.n, g.groups, g.c_out_per_group, *g.out_extent)
    out = out.reshape(g.n, g.groups, g.c_in_per_group, *g.x_extent)
    weight = weight.reshape(g.groups, g.c_in_per_group, g.c_out_per_group, *g.kernel).astype(dtype, copy=False)
    bias = np.zeros(g.c_in, dtype) if bias is None else bias.astype(dtype, copy=False)
    bias = bias.reshape(g.groups, g.c_in_per_group)
    sets = correlation_sets(g)
    looped = looped_axes(g.c_out_per_group, g.c_in_per_group, sets) if np.isfinite(weight).all() else 3
    correlate_taps(y, weight.swapaxes(1, 2), bias, sets, looped, Workspace(dtype), out)


@functools.lru_cache(maxsize=1024)
def _phase_sets(kernel: int, stride: int, dilation: int, pad_before: int, out_extent: int) -> tuple[TapSet, ...]:
    """Return the tap sets of an axis, without phases that have no output; the set of dead phases has a count of 0."""
    members: dict[int, list[tuple[tuple[int, ...], range, int]]] = {}
    for phase in axis_phases(kernel, stride, dilation, residues_with_outputs(stride, pad_before, out_extent)):
        outputs = phase_outputs(phase.residue, stride, pad_before, out_extent)
        furthest = phase.back[-1] if phase.back else 0
        first = (outputs[0] + pad_before) // stride - furthest
        members.setdefault(len(phase.taps), []).append((phase.taps[::-1], outputs, first))
    step = dilation // math.gcd(stride, dilation)
    columns = (tuple(zip(*phases, strict=True)) for phases in members.values())
    return tuple(TapSet(taps, outputs, first, step) for taps, outputs, first in columns)
