"""Show which plans, and which machine code, a change makes different: no GPU needed.

    python tests/changed.py FORMER [--cases CASE ...] [--precision NAME ...] [--archs ARCH ...] [--code]

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
from multiprocessing import Pool
from pathlib import Path
from typing import Any, NamedTuple

sys.path.append(str(Path(__file__).resolve().parent.parent))  # behind the version that PYTHONPATH names

from described import DEVICES, layout_of
from picked import operations

from cuconvt.bench.cases import CASES, LAYOUTS, PRECISIONS, parse_case
from cuconvt.compile import architecture, compile_kernel
from cuconvt.plan import Plan

ROOT = Path(__file__).resolve().parent.parent
OPERATIONS = ("forward", "grad_input", "grad_weight")  # as `operations` yields them


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
    for text, name, place, arch in itertools.product(cases, precisions, LAYOUTS, archs):
        case, precision = parse_case(text), PRECISIONS[name]
        layout = layout_of(case.geometry, place == LAYOUTS[1])
        plans = operations(case.geometry, precision.dtype, layout, precision.mode, DEVICES[arch])
        for operation, plan in zip(OPERATIONS, plans, strict=True):
            yield Problem(operation, case.name, name, place, arch), _as_texts(plan)


def _as_texts(plan: Plan) -> Planned:
    fields = {field.name: getattr(plan, field.name) for field in dataclasses.fields(plan) if field.compare}
    kernel, cost = fields.pop("kernel"), repr(fields.pop("cost"))
    defines = [f"{name}={value}" for name, value in fields.pop("defines")]
    return Planned(kernel, defines, [f"{name}={value}" for name, value in fields.items()], cost)


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
