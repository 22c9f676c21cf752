"""Show which plans, and which machine code, a change makes different: no GPU needed.

    python benchmarks/changed.py FORMER [--cases CASE ...] [--precision NAME ...] [--archs ARCH ...] [--code]

FORMER is a checkout of the version before, say of ``git worktree add ../former HEAD~1``. Both versions plan the cases,
forward and gradients, in both layouts, as if arrays were contiguous. What differs is listed, with the command that
measures it; plans that differ in their estimated cost alone are only counted. With ``--code``, the kernels of all plans
are compiled by both versions, and plans are listed, too, that differ in machine code alone. Exits with 1 if anything is
listed.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import itertools
import json
import os
import struct
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from math import prod
from multiprocessing import Pool
from pathlib import Path
from typing import Any, NamedTuple

sys.path.append(str(Path(__file__).resolve().parent.parent))  # behind the version that PYTHONPATH names

from cuconvt.bench.cases import CASES, LAYOUTS, PRECISIONS, parse_case
from cuconvt.compile import architecture, compile_kernel
from cuconvt.geometry import Geometry
from cuconvt.plan import Device, Layout, Plan, make_plan
from cuconvt.plan_correlate import make_correlate_plan
from cuconvt.plan_turned import turned
from cuconvt.plan_weight_gradient import make_weight_gradient_plan

ROOT = Path(__file__).resolve().parent.parent
# By compute capability: multiprocessors, and KB of shared memory that a block can have.
DEVICES = {80: (108, 163), 86: (84, 99), 89: (128, 99), 90: (132, 227), 100: (148, 227), 120: (170, 99)}


class Problem(NamedTuple):
    operation: str
    case: str
    precision: str
    layout: str
    arch: int

    def __str__(self) -> str:
        return f"{self.operation} {self.case} {self.precision} {self.layout} sm_{self.arch}"


class Planned(NamedTuple):
    """A plan as texts, so that those of two versions compare."""

    kernel: str
    defines: list[str]
    launch: list[str]
    cost: str
    code: str = ""  # a digest


Plans = dict[Problem, Planned]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("former", type=Path, help="the root of a checkout")
    parser.add_argument(
        "--cases", nargs="+", default=list(CASES), metavar="CASE", help="as for bench; default: its own"
    )
    parser.add_argument("--precision", nargs="+", default=list(PRECISIONS), choices=PRECISIONS, metavar="NAME")
    parser.add_argument("--archs", nargs="+", type=int, default=[90], choices=DEVICES, metavar="ARCH")
    parser.add_argument("--code", action="store_true", help="compare machine code, too: about two seconds a kernel")
    options = parser.parse_args(arguments)
    if not (options.former / "cuconvt").is_dir():
        parser.error(f"{options.former} is no checkout of cuconvt")
    asked = options.cases, options.precision, options.archs, options.code
    before, after = (plans_of(tree.resolve(), asked) for tree in (options.former, ROOT))
    return report(before, after, {parse_case(text).name: text for text in options.cases})


def report(before: Plans, after: Plans, texts: dict[str, str]) -> int:
    """Print what differs, given the text of each case by its name, and return 1 if anything is listed."""
    planned = {problem for problem, plan in after.items() if plan[:3] != before[problem][:3]}
    compiled = {problem for problem, plan in after.items() if plan.code != before[problem].code} - planned
    estimated = {problem for problem, plan in after.items() if plan.cost != before[problem].cost} - planned
    for problem in after:
        if problem in planned:
            print(f"{problem}: {_difference(before[problem], after[problem])}")
        elif problem in compiled:
            print(f"{problem}: {after[problem].kernel}: machine code")
    counts = Counter(problem.operation for problem in after if problem in planned)
    differ = ", ".join(f"{count} {operation}" for operation, count in counts.items()) or "none"
    print(f"Of {len(after)} plans differ: {differ}; {len(compiled)} more in machine code, {len(estimated)} in cost")
    listed = [problem for problem in after if problem in planned | compiled]
    for option in ("", " --grad"):
        these = [problem for problem in listed if (problem.operation == "forward") == (not option)]
        if these:
            cases = " ".join(dict.fromkeys(texts[problem.case] for problem in these))
            precisions = " ".join(dict.fromkeys(problem.precision for problem in these))
            print(f"python -m cuconvt bench{option} --cases {cases} --precision {precisions}")
    return 1 if listed else 0


def _difference(before: Planned, after: Planned) -> str:
    if before.kernel != after.kernel:
        return f"{before.kernel} to {after.kernel}"
    pairs = itertools.zip_longest(before.defines + before.launch, after.defines + after.launch)
    return f"{after.kernel}: " + ", ".join(f"{one} to {other}" for one, other in pairs if one != other)


def plans_of(tree: Path, asked: tuple[Any, ...]) -> Plans:
    """Return what a version of the package plans, in a process of its own, which imports it."""
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    command = [sys.executable, str(Path(__file__).resolve()), "--print", json.dumps(asked)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    return {Problem(*problem): Planned(*plan) for problem, plan in json.loads(done.stdout)}


def print_plans(cases: Sequence[str], precisions: Sequence[str], archs: Sequence[int], code: bool) -> None:
    """Print what `plans_of` asked for, by this process's version of the package."""
    plans = dict(_plans(cases, precisions, archs))
    if code:
        kernels = sorted({(plan.kernel, problem.arch, tuple(plan.defines)) for problem, plan in plans.items()})
        with Pool() as pool:
            codes = dict(zip(kernels, pool.starmap(_code, kernels, chunksize=1), strict=True))
        for problem, plan in plans.items():
            plans[problem] = plan._replace(code=codes[plan.kernel, problem.arch, tuple(plan.defines)])
    json.dump(list(plans.items()), sys.stdout)


def _plans(cases: Sequence[str], precisions: Sequence[str], archs: Sequence[int]) -> Iterator[tuple[Problem, Planned]]:
    for text, name, layout, arch in itertools.product(cases, precisions, LAYOUTS, archs):
        case, precision = parse_case(text), PRECISIONS[name]
        device = Device(arch, DEVICES[arch][0], DEVICES[arch][1] * 1024)
        problem = case.geometry, precision.dtype, _layout(case.geometry, layout == LAYOUTS[1]), precision.mode, device
        plans = {
            "forward": make_plan(*problem),
            "grad_input": _input_plan(*problem),
            "grad_weight": make_weight_gradient_plan(*problem),
        }
        for operation, plan in plans.items():
            yield Problem(operation, case.name, name, layout, arch), _as_texts(plan)


def _input_plan(geometry: Geometry, dtype: str, layout: Layout, precision: str | None, device: Device) -> Plan:
    adjoint = turned(geometry, layout)  # without a stride, a transposed convolution
    if adjoint is None:
        return make_correlate_plan(geometry, dtype, layout, precision, device)
    return make_plan(adjoint[0], dtype, adjoint[1], precision, device)


def _as_texts(plan: Plan) -> Planned:
    fields = {field.name: getattr(plan, field.name) for field in dataclasses.fields(plan) if field.compare}
    kernel, cost = fields.pop("kernel"), repr(fields.pop("cost"))
    defines = [f"{name}={value}" for name, value in fields.pop("defines")]
    return Planned(kernel, defines, [f"{name}={value}" for name, value in fields.items()], cost)


def _layout(geometry: Geometry, last: bool) -> Layout:
    g = geometry
    x, out = (_strides(extents, last) for extents in ((g.n, g.c_in, *g.x_extent), (g.n, g.c_out, *g.out_extent)))
    return Layout(x=x, weight=_strides((g.c_in, g.c_out_per_group, *g.kernel), False), bias=1, out=out)


def _strides(extents: tuple[int, ...], last: bool) -> tuple[int, ...]:
    n, channels, *spatial = extents
    order = (n, *spatial, channels) if last else extents
    batch, *others = (prod(order[axis + 1 :]) for axis in range(len(order)))
    return (batch, others[-1], *others[:-1]) if last else (batch, *others)


def _code(kernel: str, arch: int, defines: Sequence[str]) -> str:
    """Return a digest of a kernel's machine code."""
    macros = [(name, int(value)) for name, _, value in (define.partition("=") for define in defines)]
    return machine_code(compile_kernel(f"{kernel}.cu", architecture(arch), macros).code)


def machine_code(elf: bytes) -> str:
    """Return a digest of the instructions and constants in an ELF-64 file; other sections depend on names, too."""
    table, entry, count, names = (*struct.unpack_from("<Q", elf, 0x28), *struct.unpack_from("<3H", elf, 0x3A))
    headers = [struct.unpack_from("<IIQQQQ", elf, table + entry * index) for index in range(count)]
    texts = headers[names][4]
    digest = hashlib.sha256()
    for name, _, _, _, offset, size in headers:
        text = elf[texts + name : elf.index(b"\0", texts + name)]
        if text.startswith((b".text.", b".nv.constant3")):
            digest.update(text + elf[offset : offset + size])
    return digest.hexdigest()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--print"]:
        print_plans(*json.loads(sys.argv[2]))
    else:
        sys.exit(main())
