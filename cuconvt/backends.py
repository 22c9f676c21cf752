"""The three operations on one `Geometry`, each run by the backend that its views belong to: NumPy or CUDA.

The transposed convolution takes x to its result, the correlation takes what has the result's shape back to x's (it is
the adjoint), and the weight gradient takes both to the weight's shape. Arrays have the caller's rank; an empty batch
reaches no backend. Each returns the launch where a kernel was queued, which can be repeated with other arrays of the
same kind, else None.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from cuconvt import cpu
from cuconvt.geometry import Geometry


def conv_transpose(x: Any, weight: Any, bias: Any, geometry: Geometry, precision: str | None, out: Any) -> Any:
    """Write the transposed convolution of x to `out`."""
    if not geometry.n:
        return None
    x3, weight3, out3 = (in_3d(array, geometry.rank) for array in (x, weight, out))
    if isinstance(out, np.ndarray):
        cpu.conv_transpose(x3, weight3, bias, geometry, out3)
        return None
    from cuconvt import cuda

    return cuda.conv_transpose(x3, weight3, bias, geometry, precision, out3)


def correlate(y: Any, weight: Any, bias: Any, geometry: Geometry, precision: str | None, out: Any) -> Any:
    """Write the strided correlation of y, which has the geometry's `out_shape`, to `out`, which has its `x_shape`."""
    if not geometry.n:
        return None
    y3, weight3, out3 = (in_3d(array, geometry.rank) for array in (y, weight, out))
    if isinstance(out, np.ndarray):
        cpu.correlate(y3, weight3, bias, geometry, out3)
        return None
    from cuconvt import cuda_gradients

    return cuda_gradients.correlate(y3, weight3, bias, geometry, precision, out3)


def weight_gradient(x: Any, y: Any, geometry: Geometry, precision: str | None, out: Any) -> Any:
    """Write to `out` the gradient of the sum of y * conv_transpose(x, weight) with respect to the weight."""
    if not geometry.n:
        out.view(f"i{out.itemsize}")[...] = 0  # zero in every format, also those that a library cannot convert to
        return None
    x3, y3, out3 = (in_3d(array, geometry.rank) for array in (x, y, out))
    if isinstance(out, np.ndarray):
        cpu.weight_gradient(x3, y3, geometry, out3)
        return None
    from cuconvt import cuda_gradients

    return cuda_gradients.weight_gradient(x3, y3, geometry, precision, out3)


def channel_sums(y: Any, rank: int, out: Any) -> Any:
    """Write the sum of y over all axes but the channels' to `out`."""
    if isinstance(out, np.ndarray):
        # In float64 throughout: NumPy sums pairwise only along a contiguous axis, else one element after the other.
        _store(in_3d(y, rank).sum(axis=(0, 2, 3, 4), dtype=np.float64), out)
        return None
    sums = functools.partial(_channel_sums, rank)
    sums(y, out)
    return sums


def _channel_sums(rank: int, y: Any, out: Any) -> None:
    """Sum the rows of a cupy array in float32 (float64 for float64), and their sums in float64.

    CuPy sums a row in many parts, a thread each, and what is left to sum in float64 is little.
    """
    accumulator = np.float64 if y.dtype == np.float64 else np.float32
    rows = in_3d(y, rank).sum(axis=-1, dtype=accumulator)
    _store(rows.sum(axis=(0, 2, 3), dtype=np.float64), out)


def _store(sums: Any, out: Any) -> None:
    out[...] = sums if out.itemsize >= 4 else sums.astype(np.float32)  # which 16-bit types are converted from


def in_3d(array: Any, rank: int) -> Any:
    """View an array with all of (N, C, D, H, W), or a weight with all of (C_in, C_out/groups, kD, kH, kW)."""
    if array.ndim == 5:
        return array
    lead = array.ndim - rank
    new_axes = (None,) * (2 - lead) + (slice(None),) * lead + (None,) * (3 - rank)
    return array[new_axes]
