"""The command ``python -m cuconvt bench``: its options, what it prints and the files that it writes."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import secrets
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from cuconvt.bench.cases import (
    CASES,
    DEFAULT_PRECISIONS,
    GRADIENTS,
    LAYOUTS,
    MEANING,
    PRECISIONS,
    SYNTAX,
    Case,
    parse_case,
    unique,
)
from cuconvt.bench.floats import numpy_dtype
from cuconvt.bench.plot import KINDS, picture, require_matplotlib, write_plots
from cuconvt.bench.report import table
from cuconvt.bench.result import Cell, Result, save
from cuconvt.errors import MissingDependencyError
from cuconvt.info import cuda_command


def add_command(commands: Any) -> None:
    """Add the command to the subparsers of ``python -m cuconvt``."""
    bench = commands.add_parser(
        "bench",
        help="measure cuconvt on a GPU, beside PyTorch and the hardware's floor",
        description="Checks every result against float64, then measures time and memory on the current GPU.",
    )
    add_problem_options(bench, list(CASES.values()))
    bench.add_argument(
        "--grad", action="store_true", help="measure the gradients of the input and of the weight, not the forward"
    )
    bench.add_argument(
        "--against", choices=("torch", "none"), help="what to compare with; default: torch where it is installed"
    )
    bench.add_argument("--repeat", type=positive, metavar="N", help="repeats of each call; default: by its duration")
    bench.add_argument("--seed", type=_seed, metavar="N", help="of the random inputs; default: a new one each run")
    bench.add_argument("--json", type=_file, metavar="FILE", help="write the result here")
    bench.add_argument(
        "--plot", type=_picture, metavar="FILE.png", help="write pictures, with -roofline and -bars before the suffix"
    )
    bench.set_defaults(run=run)


def add_problem_options(parser: argparse.ArgumentParser, cases: list[Case] | None) -> None:
    """Add the options that choose cases, precisions and layouts; `cases` is the default, None for none."""
    parser.add_argument(
        "--cases",
        nargs="+",
        type=_case,
        default=cases,
        required=cases is None,
        metavar="CASE",
        help=f"names ({', '.join(CASES)}) or parameters, {SYNTAX}; see below" + ("; default: all" if cases else ""),
    )
    parser.add_argument(
        "--precision",
        nargs="+",
        choices=PRECISIONS,
        default=list(DEFAULT_PRECISIONS),
        metavar="NAME",
        help=f"of {', '.join(PRECISIONS)}; the first three take float32; default: {' '.join(DEFAULT_PRECISIONS)}",
    )
    parser.add_argument(
        "--layout", nargs="+", choices=LAYOUTS, default=list(LAYOUTS), help="of x and the result; default: both"
    )
    parser.epilog = MEANING


def run(options: argparse.Namespace) -> None:
    """Measure, print the table and write the files; what was measured is kept if the run is cut short."""
    try:
        cases = unique(options.cases)
    except ValueError as error:
        sys.exit(f"bench: {error}")
    outputs = [options.json] if options.json else []
    outputs += [picture(options.plot, kind) for kind in KINDS] if options.plot else []
    for file in outputs:
        try:
            _probe(file)
        except OSError as error:
            sys.exit(f"bench: {file} cannot be written: {error.strerror}")
    try:
        if options.plot:
            require_matplotlib()
        require_dtypes(options.precision)
        require_gpu()
        require_cublas()
        torch_side = _torch_side(options.against)
    except MissingDependencyError as error:
        sys.exit(f"bench: {error}")

    from cuconvt.bench.measure import Settings, measure

    settings = Settings(
        operations=GRADIENTS if options.grad else ("forward",),
        cases=cases,
        precisions=[PRECISIONS[name] for name in dict.fromkeys(options.precision)],
        layouts=list(dict.fromkeys(options.layout)),
        torch_side=torch_side,
        repeat=options.repeat,
        seed=secrets.randbits(32) if options.seed is None else options.seed,
    )
    results: list[Result] = []
    try:
        with ended_in_order(), progress(settings.cells) as done:
            measure(settings, results.append, done)
    finally:
        for result in results:
            _hand_over(result, options.json, options.plot)
    if any(cell.status != "ok" for result in results for cell in result.cells):
        sys.exit("bench: not every cell is right")


@contextlib.contextmanager
def ended_in_order() -> Iterator[None]:
    """Let the first SIGTERM, which `timeout` and batch systems send, end the process as an exception does."""
    if threading.current_thread() is not threading.main_thread():  # which alone may say so
        yield
        return

    def end(*_: Any) -> None:
        signal.signal(signal.SIGTERM, before)
        sys.exit("bench: terminated")

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def require_dtypes(precisions: Sequence[str]) -> None:
    """Raise MissingDependencyError where there is no bfloat16 and it is asked for."""
    for name in precisions:
        numpy_dtype(PRECISIONS[name].dtype)


def require_gpu() -> None:
    """Raise MissingDependencyError unless CuPy is installed and sees a GPU."""
    try:
        import cupy
    except ImportError as error:
        raise MissingDependencyError(f"measuring needs an NVIDIA GPU and CuPy: {cuda_command()}; {error}") from error
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise MissingDependencyError(f"measuring needs an NVIDIA GPU, and CuPy finds none: {error}") from error
    if not count:
        raise MissingDependencyError("measuring needs an NVIDIA GPU, and the driver lists none")


def require_cublas() -> None:
    """Raise MissingDependencyError unless CuPy, which must be there, finds cuBLAS."""
    import cupy

    try:
        _ = cupy.cuda.cublas.gemmEx
    except ImportError as error:
        wheel = "nvidia-cublas-cu12" if cupy.cuda.runtime.runtimeGetVersion() < 13000 else "nvidia-cublas"
        raise MissingDependencyError(
            f"measuring needs cuBLAS, for the exact results and the ceilings: pip install {wheel}"
        ) from error


def _torch_side(against: str | None) -> ModuleType | None:
    """Return the module that measures PyTorch, or None where it is not wanted or, unless asked for, not there."""
    if against == "none" or (against is None and importlib.util.find_spec("torch") is None):
        return None
    try:
        import torch
    except ImportError as error:
        raise MissingDependencyError(f"--against torch needs PyTorch: pip install torch; {error}") from error
    if not torch.cuda.is_available():
        if against is None:
            print("bench: PyTorch sees no GPU; measuring cuconvt alone", file=sys.stderr)
            return None
        raise MissingDependencyError("--against torch needs a PyTorch that sees the GPU: https://pytorch.org")
    from cuconvt.bench import torch_side

    return torch_side


@contextlib.contextmanager
def progress(total: int, unit: str = "cell") -> Iterator[Callable[[object], None]]:
    """Show what is done and how much of it on stderr: a bar where tqdm is installed, else a line that counts."""
    try:
        from tqdm import tqdm
    except ImportError:
        yield _counter(total)
        print(file=sys.stderr)
        return
    with tqdm(total=total, unit=unit, file=sys.stderr) as bar:

        def advance(done: object) -> None:
            bar.set_postfix_str(_name(done), refresh=False)
            bar.update()

        yield advance


def _counter(total: int) -> Callable[[object], None]:
    count = 0

    def advance(done: object) -> None:
        nonlocal count
        count += 1
        print(f"\r{count}/{total} {_name(done):<60}", end="", file=sys.stderr, flush=True)

    return advance


def _name(done: object) -> str:
    return f"{done.label} {done.precision} {done.layout}" if isinstance(done, Cell) else str(done)


def _hand_over(result: Result, json: Path | None, plot: Path | None) -> None:
    print(table(result))
    if json:
        save(result, json)
    if plot and any(cell.time for cell in result.cells):
        for file in write_plots(result, plot):
            print(f"wrote {file}")


def _case(text: str) -> Case:
    try:
        return parse_case(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _file(text: str) -> Path:
    if not Path(text).name or text.endswith(os.sep):
        raise argparse.ArgumentTypeError(f"must name a file, got {text!r}")
    return Path(text)


def _picture(text: str) -> Path:
    if not text.endswith(".png"):
        raise argparse.ArgumentTypeError(f"must end in .png, got {text!r}")
    return _file(text)


def _probe(file: Path) -> None:
    """Raise OSError unless the file can be written; one that is not there is not left behind."""
    is_new = not os.path.lexists(file)
    file.open("a").close()
    if is_new:
        file.unlink()


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a number of at least 1, got {text!r}")
    return int(text)


def _seed(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be a number of at least 0, got {text!r}")
    return int(text)
