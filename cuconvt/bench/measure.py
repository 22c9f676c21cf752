"""Measuring cases on a GPU: correctness first, then memory and time, beside PyTorch where it is asked for."""

from __future__ import annotations

import contextlib
import datetime
import platform
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from types import ModuleType
from typing import Any

import cupy
import numpy as np

import cuconvt
from cuconvt.bench import cuconvt_side
from cuconvt.bench.cases import LAYOUTS, OPERANDS, RESULT, Case, Precision
from cuconvt.bench.ceilings import PRODUCTS, measure_ceilings
from cuconvt.bench.floats import numpy_dtype, rounded, widened
from cuconvt.bench.reference import (
    MAX_ELEMENTS,
    Patch,
    compare,
    make_input_patches,
    make_patches,
    make_weight_patches,
)
from cuconvt.bench.result import Ceilings, Cell, Result, Times
from cuconvt.bench.timing import Run, Timer, extra_bytes, host_us
from cuconvt.compile import nvrtc_version
from cuconvt.errors import CompileError

LAUNCH_ERRORS = (cupy.cuda.driver.CUDADriverError, cupy.cuda.runtime.CUDARuntimeError)
OutOfMemoryError = cupy.cuda.memory.OutOfMemoryError
Contestant = tuple[str, str]  # "cuconvt" or "torch", and the layout


@dataclass(frozen=True)
class Settings:
    """What to measure.

    Attributes
    ----------
    operations, cases, precisions, layouts
    torch_side : module or None
        `cuconvt.bench.torch_side`, to compare with PyTorch.
    repeat : int or None
        Repeats of each call; None lets the calls' duration decide.
    seed : int
        Of the random inputs.
    """

    operations: Sequence[str]
    cases: Sequence[Case]
    precisions: Sequence[Precision]
    layouts: Sequence[str]
    torch_side: ModuleType | None
    repeat: int | None
    seed: int

    @property
    def cells(self) -> int:
        return len(self.operations) * len(self.cases) * len(self.precisions) * len(self.layouts)


def measure(settings: Settings, begun: Callable[[Result], None], done: Callable[[Cell], None]) -> None:
    """Measure everything, handing over the result once the ceilings are known and every cell when it is measured."""
    # CuPy's and PyTorch's work both go to the default stream, so that neither overtakes the other.
    with cupy.cuda.Stream.null:
        timer = Timer()
        asked = {precision.ceiling for precision in settings.precisions}
        kinds = [kind for kind in PRODUCTS if kind in asked or kind != "float64"]  # slow where a GPU has little of it
        result = Result(describe_machine(settings), measure_ceilings(timer, kinds))
        _release(settings)
        begun(result)
        rng = cupy.random.default_rng(settings.seed)
        for case in settings.cases:
            for dtype in dict.fromkeys(precision.dtype for precision in settings.precisions):
                precisions = [precision for precision in settings.precisions if precision.dtype == dtype]
                for operation in settings.operations:
                    for cell in _measure_dtype(settings, timer, result, rng, case, operation, dtype, precisions):
                        result.cells.append(cell)
                        done(cell)
                    _release(settings)


@dataclass(frozen=True)
class Inputs:
    """The operands of an operation by their roles, with "bias" for the forward, in one dtype; parts of the result."""

    operation: str
    arrays: dict[str, Any]
    patches: list[Patch]


def _measure_dtype(
    settings: Settings,
    timer: Timer,
    result: Result,
    rng: Any,
    case: Case,
    operation: str,
    dtype: str,
    precisions: list[Precision],
) -> Iterator[Cell]:
    """Measure the precisions of one dtype, which share inputs and exact result."""
    blanks = {
        p.name: [_blank(case, operation, p, layout, result.ceilings) for layout in settings.layouts] for p in precisions
    }
    try:
        inputs = _draw(rng, case, operation, dtype)
    except (OutOfMemoryError, *LAUNCH_ERRORS) as error:
        for blank in (blank for of_precision in blanks.values() for blank in of_precision):
            yield replace(blank, status="failed", problem=f"inputs and exact result: {error}")
        return
    for precision in precisions:
        yield from _measure_precision(settings, timer, case, precision, inputs, blanks[precision.name])


def _blank(case: Case, operation: str, precision: Precision, layout: str, ceilings: Ceilings) -> Cell:
    flops, moved = case.flops, case.bytes(precision.itemsize, operation)
    limits = (flops, moved, precision.ceiling, precision.products)
    floor, bound = ceilings.floor_ms(*limits), ceilings.bound(*limits)
    return Cell(case.name, precision.name, layout, flops, moved, floor, operation, bound)


def _draw(rng: Any, case: Case, operation: str, dtype: str) -> Inputs:
    drawn = np.float64 if dtype == "float64" else np.float32
    first, second = OPERANDS[operation]
    arrays = {role: rng.standard_normal(case.shapes[role], dtype=drawn) for role in (first, second)}
    # Outputs of about unit size, far from the limits of float16.
    arrays[second] *= drawn((2 * prod(case.shapes[RESULT[operation]]) / max(1, case.flops)) ** 0.5)
    if case.bias and operation == "forward":
        arrays["bias"] = rng.standard_normal((case.c_out,), dtype=drawn)
    arrays = {role: rounded(array, dtype) for role, array in arrays.items()}
    free, _ = cupy.cuda.Device().mem_info
    wide = {role: widened(array) for role, array in arrays.items()}
    most = min(MAX_ELEMENTS, free // 64)
    if operation == "grad_input":
        patches = make_input_patches(cupy, case, wide["y"], wide["weight"], most)
    elif operation == "grad_weight":
        patches = make_weight_patches(cupy, case, wide["x"], wide["y"], most)
    else:
        patches = make_patches(cupy, case, wide["x"], wide["weight"], wide.get("bias"), most)
    return Inputs(operation, arrays, patches)


def _measure_precision(
    settings: Settings, timer: Timer, case: Case, precision: Precision, inputs: Inputs, blanks: list[Cell]
) -> Iterator[Cell]:
    """Check every layout, then time those that are right."""
    cells: dict[str, Cell] = {}
    ours: dict[Contestant, Run] = {}
    for blank in blanks:
        cells[blank.layout], run = _check(blank, case, precision, inputs)
        if run is not None:
            ours["cuconvt", blank.layout] = run
    try:
        figures = _time(settings, timer, case, precision, inputs, ours) if ours else {}
    except (OutOfMemoryError, RuntimeError) as error:  # the latter is PyTorch's, and both of LAUNCH_ERRORS
        failed = {"status": "failed", "problem": f"while it was timed: {type(error).__name__}: {error}"}
        figures = {layout: failed for _, layout in ours}
    for layout, cell in cells.items():
        yield replace(cell, **figures.get(layout, {}))


def _time(
    settings: Settings,
    timer: Timer,
    case: Case,
    precision: Precision,
    inputs: Inputs,
    ours: dict[Contestant, Run],
) -> dict[str, dict[str, Any]]:
    """Time calls in turns, with PyTorch in both layouts, and return the fields of each layout's cell."""
    times: dict[Contestant, Times] = {}
    found: dict[str, Any] = {}
    torch_side = settings.torch_side
    if torch_side is None:
        times = timer.interleaved(ours, {}, settings.repeat)
    else:
        with torch_side.modes(precision.torch_tf32):
            theirs, errors, problem = _torch_calls(torch_side, case, inputs)
            times = timer.interleaved(ours, theirs, settings.repeat)
            found = {"torch_times": {key[1]: times[key] for key in theirs}, "torch_problem": problem}
            if theirs:
                best = min(theirs, key=lambda key: times[key].median)
                found["torch_error"] = errors[best]
                found["torch_extra_bytes"] = torch_side.extra_bytes(theirs[best])
                found["torch_host_us"] = host_us(theirs[best]) if case.is_small else None
    figures = {layout: dict(found) for layout in settings.layouts}
    for key, run in ours.items():
        host = host_us(run) if case.is_small else None
        figures[key[1]] |= {"time": times[key], "extra_bytes": extra_bytes(run), "host_us": host}
    return figures


def _check(blank: Cell, case: Case, precision: Precision, inputs: Inputs) -> tuple[Cell, Run | None]:
    """Compare one layout's result with the exact one; return the call to time if it is right."""
    operation, result = inputs.operation, RESULT[inputs.operation]
    try:
        # A layout is that of x and y; the weight is contiguous, whether given or computed.
        arrays = {
            role: in_layout(array, blank.layout) if role in ("x", "y") else array
            for role, array in inputs.arrays.items()
        }
        run = cuconvt_side.make_call(case, operation, arrays, precision.mode)
        out = poisoned(case.shapes[result], precision.dtype, "NCDHW" if result == "weight" else blank.layout)
        run(out=out)
        accuracy = compare(cupy, widened(out), inputs.patches, precision.rounding, precision.smallest)
        run()  # without `out`, as it is timed: the pool's first time is its slowest
    except (CompileError, ValueError, OutOfMemoryError, *LAUNCH_ERRORS) as error:
        return replace(blank, status="failed", problem=f"{type(error).__name__}: {error}"), None
    kernel = cuconvt_side.chosen_kernel(case, operation, {**arrays, result: out}, precision)
    allowed = precision.allowed(case, operation)
    cell = replace(blank, kernel=kernel, error=accuracy.error, scaled_error=accuracy.scaled)
    if accuracy.finite and accuracy.scaled <= allowed:
        return cell, run
    scale = "sum of magnitudes" if operation == "forward" else "root of the sum of squares"
    problem = f"largest error beyond rounding {accuracy.scaled:.1e} of the {scale}, allowed {allowed:.1e}"
    return replace(cell, status="wrong", problem=problem if accuracy.finite else f"not all finite; {problem}"), None


def _torch_calls(
    torch_side: ModuleType, case: Case, inputs: Inputs
) -> tuple[dict[Contestant, Run], dict[Contestant, float], str]:
    """Return PyTorch's warm calls in both layouts, their largest errors, and why a layout is missing."""
    calls: dict[Contestant, Run] = {}
    errors: dict[Contestant, float] = {}
    problems = []
    for layout in LAYOUTS:
        try:
            run = _torch_call(torch_side, case, inputs, layout)
            run()  # searches for an algorithm
            error = compare(cupy, widened(torch_side.to_cupy(run())), inputs.patches).error
        except (RuntimeError, OutOfMemoryError) as exception:
            problems.append(f"{layout}: {str(exception).partition(chr(10))[0]}")
            continue
        calls["torch", layout], errors["torch", layout] = run, error
    return calls, errors, "; ".join(problems)


def _torch_call(torch_side: ModuleType, case: Case, inputs: Inputs, layout: str) -> Run:
    given = {role: in_layout(array, layout) for role, array in inputs.arrays.items() if role != "bias"}
    if inputs.operation == "forward":
        run: Run = torch_side.make_call(case, given["x"], given["weight"], inputs.arrays.get("bias"))
        return run
    result = RESULT[inputs.operation]
    dtype = next(iter(given.values())).dtype.name
    arrays = {**given, result: poisoned(case.shapes[result], dtype, layout)}
    gradient: Run = torch_side.make_gradient_call(case, inputs.operation, arrays)
    return gradient


def in_layout(array: Any, layout: str) -> Any:
    """Copy an array (N, C, *spatial), or view it where it is so already, with the strides of a layout."""
    if layout == "NCDHW":
        return array
    return cupy.moveaxis(cupy.ascontiguousarray(cupy.moveaxis(array, 1, -1)), -1, 1)


def poisoned(shape: Sequence[int], dtype: str, layout: str) -> Any:
    """Return an array of NaN with the strides of a layout."""
    kind = numpy_dtype(dtype)
    memory = shape if layout == "NCDHW" else (shape[0], *shape[2:], shape[1])
    array = cupy.full(prod(shape) * kind.itemsize, 0xFF, np.uint8).view(kind).reshape(memory)  # all bits set: NaN
    return array if layout == "NCDHW" else cupy.moveaxis(array, -1, 1)


def _release(settings: Settings) -> None:
    cupy.get_default_memory_pool().free_all_blocks()
    if settings.torch_side is not None:
        with contextlib.suppress(RuntimeError):  # after some failures of a kernel, every call of the GPU fails
            settings.torch_side.release()


def describe_machine(settings: Settings) -> dict[str, Any]:
    """Return where, when and with what versions this run takes place."""
    runtime = cupy.cuda.runtime
    commit, dirty = _commit()
    return {
        "gpu": runtime.getDeviceProperties(cupy.cuda.Device().id)["name"].decode(),
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").partition("\n")[0]
        or None,
        "cuda_driver": _cuda_version(runtime.driverGetVersion()),
        "cuda_runtime": _cuda_version(runtime.runtimeGetVersion()),
        "nvrtc": "{}.{}".format(*nvrtc_version()),
        **(
            settings.torch_side.version() if settings.torch_side else {"torch": None, "torch_cuda": None, "cudnn": None}
        ),
        "cupy": cupy.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "cuconvt": cuconvt.__version__,
        "commit": commit,
        "dirty": dirty,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "seed": settings.seed,
    }


def _cuda_version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


def _commit() -> tuple[str | None, bool | None]:
    """Return the commit of the checkout that holds this package and whether it has changes, or nothing elsewhere."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return None, None
    commit = _output("git", "-C", str(root), "rev-parse", "HEAD")
    return (commit, bool(_output("git", "-C", str(root), "status", "--porcelain"))) if commit else (None, None)


def _output(*command: str) -> str:
    """Return what a command prints, or nothing where there is no such command or it fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
