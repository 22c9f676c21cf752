"""Time the NumPy backend against PyTorch on the CPU, both with the same number of threads, float32.

    python benchmarks/cpu.py [--repeat N] [--threads N]

Each configuration is first compared with PyTorch's float64 result: the largest error of ours may be at most twice the
largest error of PyTorch's own float32. Then the two libraries take turns, each in a process of its own: idle threads of
OpenBLAS and OpenMP keep spinning for a while, and in one process would slow the other library several times.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any, NamedTuple

import numpy as np

import cuconvt


class Case(NamedTuple):
    name: str
    x_shape: tuple[int, ...]
    weight_shape: tuple[int, ...]
    parameters: dict[str, int]


CASES = [
    Case("U-Net, kernel = stride", (1, 64, 32, 32, 32), (64, 32, 2, 2, 2), {"stride": 2}),
    Case("stride 1", (1, 48, 32, 32, 32), (48, 48, 3, 3, 3), {}),
    Case("dead phases", (2, 32, 16, 32, 32), (32, 64, 3, 3, 3), {"stride": 2, "padding": 1, "dilation": 2}),
    Case("one channel", (1, 1, 99, 117, 95), (1, 1, 4, 4, 4), {"stride": 2, "padding": 1}),
    Case("depthwise", (1, 64, 32, 32, 32), (64, 1, 3, 3, 3), {"stride": 2, "padding": 1, "groups": 64}),
    Case("2-D", (4, 128, 64, 64), (128, 64, 4, 4), {"stride": 2, "padding": 1}),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=7, help="rounds of three calls each (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="threads of each library (default: %(default)s)")
    options = parser.parse_args()
    if importlib.util.find_spec("torch") is None:
        sys.exit("this benchmark compares with PyTorch, which is not installed: pip install torch")

    # BLAS libraries read these when a worker imports them.
    for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[variable] = str(options.threads)
    context = get_context("spawn")
    with (
        ProcessPoolExecutor(1, context) as checker,
        ProcessPoolExecutor(1, context) as our_worker,
        ProcessPoolExecutor(1, context) as their_worker,
    ):
        version = checker.submit(torch_version).result()
        print(f"{platform.machine()}, {options.threads} threads, median of {3 * options.repeat} calls, float32")
        print(f"cuconvt {cuconvt.__version__}, NumPy {np.__version__}, PyTorch {version}\n")
        print("| case | x | weight | parameters | cuconvt ms | torch ms | cuconvt / torch | error | torch's error |")
        print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
        for case in CASES:
            error, their_error = checker.submit(largest_errors, case).result()
            if not error <= 2 * their_error:
                sys.exit(f"{case.name}: the error {error:.1e} is more than twice PyTorch's {their_error:.1e}")
            ours, theirs = [], []
            for _ in range(options.repeat):
                ours += our_worker.submit(call_times, "cuconvt", case).result()
                time.sleep(0.1)  # until the threads of the last call sleep
                theirs += their_worker.submit(call_times, "torch", case).result()
                time.sleep(0.1)
            our_time, their_time = statistics.median(ours), statistics.median(theirs)
            parameters = ", ".join(f"{name} {value}" for name, value in case.parameters.items())
            x_shape, weight_shape = ("x".join(map(str, shape)) for shape in (case.x_shape, case.weight_shape))
            print(
                f"| {case.name} | {x_shape} | {weight_shape} | {parameters} | {our_time:.1f} | {their_time:.1f} "
                f"| {our_time / their_time:.2f} | {error:.1e} | {their_error:.1e} |",
                flush=True,
            )


def torch_version() -> str:
    import torch

    return str(torch.__version__)


def call(library: str, case: Case, dtype: str = "float32") -> Callable[[], Any]:
    """Return a call of the library on seeded arrays, float32 values in the given dtype."""
    rank = len(case.x_shape) - 2
    c_out = case.weight_shape[1] * case.parameters.get("groups", 1)
    rng = np.random.default_rng(0)
    arrays = [
        rng.standard_normal(shape, dtype=np.float32).astype(dtype)
        for shape in (case.x_shape, case.weight_shape, (c_out,))
    ]
    if library == "cuconvt":
        ours = getattr(cuconvt, f"conv_transpose{rank}d")
        return lambda: ours(*arrays, **case.parameters)
    import torch

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    theirs = getattr(torch.nn.functional, f"conv_transpose{rank}d")
    tensors = [torch.from_numpy(a) for a in arrays]
    return lambda: theirs(*tensors, **case.parameters)


def largest_errors(case: Case) -> tuple[float, float]:
    """Return the largest errors of cuconvt and of PyTorch in float32, against PyTorch in float64."""
    exact = call("torch", case, "float64")().numpy()
    ours, theirs = call("cuconvt", case)(), call("torch", case)().numpy()
    return float(np.abs(ours - exact).max()), float(np.abs(theirs - exact).max())


def call_times(library: str, case: Case) -> list[float]:
    """Return the times of three calls in milliseconds, after one that warms up."""
    run = call(library, case)
    run()
    times = []
    for _ in range(3):
        start = time.perf_counter()
        run()
        times.append((time.perf_counter() - start) * 1e3)
    return times


if __name__ == "__main__":
    main()
