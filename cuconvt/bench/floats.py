"""Rounding to a dtype and back, on NumPy or CuPy arrays; for bfloat16 by integer operations, which every CuPy has."""

from __future__ import annotations

from typing import Any

import numpy as np

from cuconvt.errors import MissingDependencyError


def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return the dtype of a name, bfloat16 included."""
    if name != "bfloat16":
        return np.dtype(name)
    try:
        import ml_dtypes
    except ImportError as error:
        raise MissingDependencyError("bfloat16 arrays need ml_dtypes: pip install ml_dtypes") from error
    return np.dtype(ml_dtypes.bfloat16)


def rounded(array: Any, name: str) -> Any:
    """Round finite float32 (or float64, for float64) values to nearest even in the named dtype."""
    if name != "bfloat16":
        return array.astype(name, copy=False)
    bits = array.view(np.uint32)
    upper = bits >> np.uint32(16)
    carry = (upper & np.uint32(1)) + np.uint32(0x7FFF)
    return ((bits + carry) >> np.uint32(16)).astype(np.uint16).view(numpy_dtype(name))


def widened(array: Any) -> Any:
    """Convert bfloat16 exactly to float32; other dtypes stay."""
    if array.dtype.name != "bfloat16":
        return array
    return (array.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
