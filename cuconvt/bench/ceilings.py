"""The GPU's own limits, measured: the rate of a copy and of large matrix products."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import cupy
import numpy as np

from cuconvt.bench.floats import rounded
from cuconvt.bench.result import Ceilings, Times
from cuconvt.bench.timing import Timer

EDGE = 8192
COPY_BYTES = 2**30
REPEATS = 10


@dataclass(frozen=True)
class Product:
    """A kind of matrix product in cuBLAS's terms."""

    dtype: str
    data_type: int  # cudaDataType
    compute_type: int  # cublasComputeType_t
    scale: str  # dtype of alpha and beta


PRODUCTS = {
    "float32": Product("float32", 0, 68, "float32"),
    "tf32": Product("float32", 0, 77, "float32"),
    "float16": Product("float16", 2, 68, "float32"),
    "bfloat16": Product("bfloat16", 14, 68, "float32"),
    "float64": Product("float64", 1, 70, "float64"),
}


def measure_ceilings(timer: Timer, kinds: Iterable[str], edge: int = EDGE, copy_bytes: int = COPY_BYTES) -> Ceilings:
    """Measure the copy rate and the matrix products of the given kinds."""
    rates = {kind: 2 * edge**3 / (1e-3 * _matmul_ms(timer, PRODUCTS[kind], edge)) for kind in kinds}
    return Ceilings(copy=2 * copy_bytes / (1e-3 * _copy_ms(timer, copy_bytes)), matmul=rates)


def _copy_ms(timer: Timer, count: int) -> float:
    source, target = cupy.zeros(count, np.uint8), cupy.zeros(count, np.uint8)
    return _median(timer, lambda: target.data.copy_from_device_async(source.data, count))


def _matmul_ms(timer: Timer, product: Product, edge: int) -> float:
    # Random data: on zeros a GPU draws less power and clocks higher than it can in earnest.
    rng = cupy.random.default_rng(0)
    drawn = np.float64 if product.dtype == "float64" else np.float32
    a, b = (rounded(rng.standard_normal((edge, edge), dtype=drawn), product.dtype) for _ in "ab")
    c = cupy.empty_like(a)
    one, zero = np.ones(1, product.scale), np.zeros(1, product.scale)
    handle = cupy.cuda.Device().cublas_handle

    def multiply() -> None:
        cupy.cuda.cublas.gemmEx(
            *(handle, 0, 0, edge, edge, edge, one.ctypes.data),
            *(a.data.ptr, product.data_type, edge, b.data.ptr, product.data_type, edge),
            *(zero.ctypes.data, c.data.ptr, product.data_type, edge, product.compute_type, -1),
        )

    return _median(timer, multiply)


def _median(timer: Timer, run: Callable[[], object]) -> float:
    for _ in range(2):
        timer.once(run)
    return Times.of([timer.once(run) for _ in range(REPEATS)]).median
