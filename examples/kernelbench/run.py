"""Check the `ModelNew` of each problem against torch.nn with equal weights, and on a GPU time both.

    python examples/kernelbench/run.py [--problems 58 61] [--precision tf32x3|ieee|tf32] [--repeat 20]

Every element is compared with torch.nn in float64 on the CPU where the problem is small, else with torch.nn in float32.
On a GPU both are then timed in turns with CUDA events, the L2 cache flushed before each call; PyTorch may use TF32 only
where `--precision tf32` lets cuconvt use it. Without a GPU, or with `--toy`, extents are small and nothing is timed.
The status is 1 if a check fails.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the checkout's cuconvt, installed or not

import cuconvt.torch

# The shape of the input, and what the constructor is called with.
PROBLEMS: dict[int, tuple[tuple[int, ...], dict[str, Any]]] = {
    58: ((16, 32, 16, 32, 64), {"in_channels": 32, "out_channels": 16, "kernel_size": (3, 5, 7)}),
    61: ((8, 48, 64, 64, 64), {"in_channels": 48, "out_channels": 48, "kernel_size": 3}),
    68: ((16, 32, 64, 64, 64), {"in_channels": 32, "out_channels": 64, "kernel_size": (3, 5, 5)}),
    70: ((8, 48, 96, 96, 96), {"in_channels": 48, "out_channels": 24, "kernel_size": 3}),
    72: (
        (8, 32, 12, 24, 48),
        {
            "in_channels": 32,
            "out_channels": 32,
            "kernel_size": (3, 5, 7),
            "stride": (2, 2, 2),
            "padding": (1, 2, 3),
            "output_padding": (1, 1, 1),
            "groups": 4,
        },
    ),
    73: (
        (4, 32, 32, 64, 128),
        {"in_channels": 32, "out_channels": 32, "kernel_size": 3, "stride": 2, "padding": 1, "groups": 4},
    ),
    77: (
        (16, 32, 16, 32, 32),
        {"in_channels": 32, "out_channels": 64, "kernel_size": 3, "stride": 2, "padding": 1, "dilation": 2},
    ),
}
TOY_BATCH, TOY_EXTENT = 2, 6
SMALL = 20_000_000  # outputs whose float64 reference the CPU computes within seconds
# The largest error allowed, as a share of the largest output: float32's, and that of 10 bits of mantissa.
ALLOWED = {"tf32x3": 1e-5, "ieee": 1e-5, "tf32": 2e-3}
FLUSH_BYTES = 256 * 2**20  # several times any L2 cache


def main() -> int:
    arguments = parse_arguments()
    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = True
    device = "cuda" if torch.cuda.is_available() else "cpu"
    toy = arguments.toy or device == "cpu"
    where = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    print(f"{where}, torch {torch.__version__}, cuconvt {cuconvt.__version__}, float32 as {arguments.precision}")
    failed = 0
    for problem in arguments.problems:
        shape, parameters = PROBLEMS[problem]
        if toy:
            shape = (TOY_BATCH, shape[1], *(min(extent, TOY_EXTENT) for extent in shape[2:]))
        reference = torch.nn.ConvTranspose3d(**parameters, bias=False)
        model = load_model(problem)(**parameters)
        model.conv_transpose3d.load_state_dict(reference.state_dict())
        model.conv_transpose3d.precision = arguments.precision
        model, reference = model.to(device), reference.to(device)
        x = torch.randn(shape, device=device)
        with torch.no_grad():
            error = largest_error(model, reference, x)
            good = error <= ALLOWED[arguments.precision]
            failed += not good
            line = f"{problem}: error {error:.1e} of the largest output {'ok' if good else 'TOO LARGE'}"
            if not toy:
                torch.backends.cudnn.allow_tf32 = arguments.precision == "tf32"
                ours, theirs = times([functools.partial(m, x) for m in (model, reference)], arguments.repeat)
                line += f", cuconvt {spell(ours)} ms, torch {spell(theirs)} ms, "
                line += f"torch / cuconvt {statistics.median(theirs) / statistics.median(ours):.2f}"
        print(line, flush=True)
    return 1 if failed else 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", type=int, nargs="+", choices=list(PROBLEMS), default=list(PROBLEMS))
    parser.add_argument("--precision", choices=list(ALLOWED), default="tf32x3")
    parser.add_argument("--repeat", type=int, default=20)
    parser.add_argument("--toy", action="store_true", help="small extents, no timing")
    return parser.parse_args()


def load_model(problem: int) -> type[torch.nn.Module]:
    """Return the class `ModelNew` of a problem's file."""
    spec = importlib.util.spec_from_file_location(
        f"problem_{problem}", Path(__file__).with_name(f"problem_{problem}.py")
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.ModelNew


def largest_error(model: torch.nn.Module, reference: torch.nn.Module, x: torch.Tensor) -> float:
    """Return the largest difference of the two results, as a share of the largest output."""
    y = model(x)
    if y.numel() <= SMALL:
        weight = reference.weight.cpu().double()
        exact = torch.nn.functional.conv_transpose3d(
            x.cpu().double(),
            weight,
            None,
            reference.stride,
            reference.padding,
            reference.output_padding,
            reference.groups,
            reference.dilation,
        ).to(x.device)
    else:
        torch.backends.cudnn.allow_tf32 = False
        exact = reference(x)
    if y.shape != exact.shape:
        raise ValueError(f"the result must have shape {tuple(exact.shape)}, got {tuple(y.shape)}")
    return float((y - exact).abs().max() / exact.abs().max())


def times(runs: list[Callable[[], torch.Tensor]], repeat: int) -> list[list[float]]:
    """Return the milliseconds of each run on the GPU, in turns."""
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    measured: list[list[float]] = [[] for _ in runs]
    for run in runs:
        for _ in range(3):
            run()
    for _ in range(repeat):
        for run, kept in zip(runs, measured, strict=True):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            flush.zero_()
            start.record()
            run()
            end.record()
            end.synchronize()
            kept.append(start.elapsed_time(end))
    return measured


def spell(milliseconds: list[float]) -> str:
    return f"{statistics.median(milliseconds):.3f} ({min(milliseconds):.3f} to {max(milliseconds):.3f})"


if __name__ == "__main__":
    sys.exit(main())
