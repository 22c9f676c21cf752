"""Time the general kernel against a thread-per-output kernel and PyTorch, side by side, on KernelBench's 3-D cases.

Run from the repository's root on a machine with a GPU: ``python benchmarks/gather.py``. Every case is checked
elementwise against float64 first. Times are medians with the L2 cache flushed before each launch, the contestants
interleaved.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cupy
import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

import cuconvt

# x, C_out, kernel, stride, padding, output_padding, groups, dilation
CASES: dict[str, tuple[Any, ...]] = {
    "kb58": ((16, 32, 16, 32, 64), 16, (3, 5, 7), 1, 0, 0, 1, 1),
    "kb61": ((8, 48, 64, 64, 64), 48, 3, 1, 0, 0, 1, 1),
    "kb70": ((8, 48, 96, 96, 96), 24, 3, 1, 0, 0, 1, 1),
    "kb72": ((8, 32, 12, 24, 48), 32, (3, 5, 7), 2, (1, 2, 3), 1, 4, 1),
    "kb73": ((4, 32, 32, 64, 128), 32, 3, 2, 1, 0, 4, 1),
    "kb77": ((16, 32, 16, 32, 32), 64, 3, 2, 1, 0, 1, 2),
    "depthwise": ((4, 64, 32, 64, 64), 64, 4, 2, 1, 0, 64, 1),
    "kernel=stride": ((2, 64, 64, 64, 64), 32, 2, 2, 0, 0, 1, 1),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=10)
    parser.add_argument("--cases", nargs="*", default=list(CASES))
    arguments = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_tf32 = False
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, cupy {cupy.__version__}, float32, ms (min to max)"
    )
    columns = "case|thread per output|torch, NCDHW|cuconvt gather|per output / cuconvt|torch / cuconvt|max error"
    print(f"| {columns.replace('|', ' | ')} |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for name in arguments.cases:
        print(_row(name, arguments.repeat), flush=True)


def _row(name: str, repeat: int) -> str:
    shape, c_out, kernel, stride, padding, output_padding, groups, dilation = CASES[name]
    kernel = (kernel,) * 3 if isinstance(kernel, int) else kernel
    generator = torch.Generator("cuda").manual_seed(torch.seed() % 2**31)
    x = torch.randn(shape, device="cuda", generator=generator)
    weight = torch.randn((shape[1], c_out // groups, *kernel), device="cuda", generator=generator)
    parameters: dict[str, Any] = {
        "stride": stride,
        "padding": padding,
        "output_padding": output_padding,
        "groups": groups,
        "dilation": dilation,
    }
    reference = torch.nn.functional.conv_transpose3d(x[:1].double(), weight.double(), **parameters)
    xc, wc = cupy.from_dlpack(x), cupy.from_dlpack(weight)
    out = cupy.full((shape[0], *reference.shape[1:]), cupy.nan, cupy.float32)
    naive_out = cupy.full_like(out, cupy.nan)
    naive = _thread_per_output(xc, wc, naive_out, parameters)
    cuconvt.conv_transpose3d(xc, wc, **parameters, precision="ieee", out=out)
    naive()
    scale = reference.abs().max().item()
    errors = [(torch.from_dlpack(got[:1]).double() - reference).abs().max().item() / scale for got in (out, naive_out)]
    if not (errors[0] < 1e-5 and errors[1] < 1e-5 and bool(cupy.isfinite(out).all())):
        return f"| {name} | WRONG: largest errors {errors} |"
    contestants = [
        naive,
        lambda: torch.nn.functional.conv_transpose3d(x, weight, **parameters),
        lambda: cuconvt.conv_transpose3d(xc, wc, **parameters, precision="ieee", out=out),
    ]
    times = _interleaved(contestants, repeat)
    medians = [statistics.median(t) for t in times]
    cells = [f"{m:.3f} ({min(t):.3f} to {max(t):.3f})" for m, t in zip(medians, times, strict=True)]
    ratios = f"{medians[0] / medians[2]:.1f} | {medians[1] / medians[2]:.2f}"
    return f"| {name} | {' | '.join(cells)} | {ratios} | {errors[0]:.1e} |"


def _thread_per_output(
    x: cupy.ndarray, weight: cupy.ndarray, out: cupy.ndarray, p: dict[str, Any]
) -> Callable[[], None]:
    source = (Path(__file__).parent / "thread_per_output.cu").read_text()

    def triple(value: int | tuple[int, ...]) -> tuple[int, ...]:
        return (value,) * 3 if isinstance(value, int) else value

    groups = p["groups"]
    sizes = (x.shape[0], groups, x.shape[1] // groups, out.shape[1] // groups, *x.shape[2:], *out.shape[2:])
    specialised = {"K": weight.shape[2:], "S": triple(p["stride"]), "D": triple(p["dilation"])}
    defines = [
        f"-D{name}{axis}={v}" for name, values in specialised.items() for axis, v in zip("DHW", values, strict=True)
    ]
    kernel = cupy.RawKernel(source, "thread_per_output", options=("-std=c++17", *defines))
    scalars = [np.int32(v) for v in (*sizes, *triple(p["padding"]))]
    grid = (-(-out.size // 256),)
    return lambda: kernel(grid, (256,), (x, weight, out, *scalars))


def _interleaved(contestants: list[Callable[[], object]], repeat: int) -> list[list[float]]:
    flush = torch.empty(256 * 2**20, dtype=torch.uint8, device="cuda")
    times: list[list[float]] = [[] for _ in contestants]
    with cupy.cuda.Stream.from_external(torch.cuda.current_stream()):
        for _ in range(2):
            for run in contestants:
                run()
        for _ in range(repeat):
            for run, record in zip(contestants, times, strict=True):
                flush.zero_()
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                run()
                end.record()
                end.synchronize()
                record.append(start.elapsed_time(end))
    return times


if __name__ == "__main__":
    main()
