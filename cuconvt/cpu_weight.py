"""The NumPy backend's gradient with respect to the weight: sums over positions, as BLAS products.

The operand of a box is that of the correlation (`cuconvt.cpu_taps`); the product runs the other way, over positions:

    (C_in/groups, positions) @ (positions, K),  batched over groups,

and boxes, samples and looped axes are summed in float64, in one fixed order.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cuconvt.cpu_taps import Workspace, boxes, computes_in, correlation_sets, each_tap, looped_axes
from cuconvt.geometry import Geometry


def weight_gradient(x: Any, y: Any, geometry: Geometry, out: Any) -> None:
    """Write the gradient with respect to the weight of a transposed convolution of NumPy arrays into `out`.

    Parameters
    ----------
    x : numpy.ndarray
        ``(N, C_in, D, H, W)``, any strides, with N >= 1.
    y : numpy.ndarray
        ``(N, C_out, oD, oH, oW)``, any strides: the gradient with respect to the result.
    geometry : Geometry
        The transposed convolution; it must fit the arrays.
    out : numpy.ndarray
        ``(C_in, C_out/groups, kD, kH, kW)``, any strides, overlapping no input; every element is written.
    """
    g = geometry
    workspace = Workspace(computes_in(x.dtype))
    x = x.reshape(g.n, g.groups, g.c_in_per_group, *g.x_extent)
    y = y.reshape(g.n, g.groups, g.c_out_per_group, *g.out_extent)
    sets = correlation_sets(g)
    with np.errstate(all="ignore"):
        finite = np.isfinite(x.sum(dtype=np.float64))  # of all elements, without an array of as many answers
    looped = looped_axes(g.c_out_per_group, g.c_in_per_group, sets) if finite else 3

    stacked = [s.count for s in sets[looped:]]
    # Taps that are looped come first, as they are indexed.
    total = np.zeros((*g.kernel[:looped], g.groups, g.c_in_per_group, g.c_out_per_group, *stacked))
    for box in boxes(y, g.c_in_per_group, sets, looped, workspace):
        left = _left(x[box.sample, box.group], box.spans, workspace)
        for taps, parts, source, target in each_tap(box.products):
            right = box.operand[(slice(None), *parts, ..., *source)]
            sums = _sums(left[(..., *target)], right, looped, workspace)
            total[(*taps[:looped], box.group)] += sums.reshape(sums.shape[:2] + total.shape[looped + 2 :])
    gradient = total.transpose(*range(looped, looped + 3), *range(looped), *range(looped + 3, 6))
    out[...] = gradient.reshape(out.shape)


def _left(x: Any, spans: Any, workspace: Workspace) -> Any:
    """Copy a box of x, ``(groups, C_in/groups, N, D, H, W)``, in the dtype to compute in."""
    box = x[(..., *(slice(span.start, span.stop) for span in spans))].transpose(1, 2, 0, 3, 4, 5)
    left = workspace.left.array(*box.shape)
    left[...] = box
    return left


def _sums(left: Any, right: Any, looped: int, workspace: Workspace) -> Any:
    """Return ``(groups, C_in/groups, K)``, the sums over N, D, H and W of each row of `left` times each of `right`."""
    groups, rows, *_ = left.shape
    # As a product each for the looped axes nothing is copied; without W a product would be too short for that.
    batch = looped if looped < 3 else 0
    left, right = (np.moveaxis(a, 1, 1 + batch) for a in (left, right))
    left, right = (a.reshape(*a.shape[: 2 + batch], -1) for a in (left, right))
    product = workspace.product.array(*left.shape[:-1], right.shape[-2])
    np.matmul(left, right.swapaxes(-1, -2), out=product)
    return product.reshape(groups, -1, rows, right.shape[-2]).sum(axis=1, dtype=np.float64)
