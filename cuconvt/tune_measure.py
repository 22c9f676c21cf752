"""Tuning on a GPU: candidates of all kernels are compiled, compared with the planner's choice, and timed beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from math import prod
from typing import Any, NamedTuple

import cupy
import numpy as np
from cupy.cuda.memory import OutOfMemoryError

from cuconvt.backends import in_3d
from cuconvt.bench.floats import rounded, widened
from cuconvt.bench.measure import LAUNCH_ERRORS, poisoned
from cuconvt.bench.reference import Patch, compare
from cuconvt.bench.result import Times
from cuconvt.bench.timing import Run, Timer
from cuconvt.compile import architecture
from cuconvt.cuda import Launch, device_properties, prepare
from cuconvt.plan import Device, Layout, Plan, make_plan
from cuconvt.plan_single import without_steps
from cuconvt.tune_compile import Job, compile_all
from cuconvt.tune_outcome import SHOWN, Outcome, Problem, describe_tile
from cuconvt.tuned import FAMILIES, key_of

FIRST_REPEATS = 5  # of every candidate; the fastest ones come to a final, repeated as often as the benchmark repeats
Progress = Callable[[int, str], AbstractContextManager[Callable[[object], None]]]


def measure(problems: Sequence[Problem], limit: int, progress: Progress) -> Iterator[Outcome]:
    """Measure up to `limit` candidates of each problem on the current GPU; every kernel is compiled before."""
    device = device_properties(cupy.cuda.Device().id)
    entries = [_enter(problem, limit, device) for problem in problems]
    plans = [plan for entry in entries if isinstance(entry, Entry) for plan in entry.plans]
    jobs = {plan: _job(plan, device) for plan in plans}
    with progress(len(set(jobs.values())), "kernel") as done:
        errors = compile_all(list(dict.fromkeys(jobs.values())), done)
    broken = {plan: errors[job] for plan, job in jobs.items() if job in errors}
    # On the default stream, where the timer's events are.
    with cupy.cuda.Stream.null, progress(len(plans), "candidate") as done:
        timer = Timer()
        for entry in entries:
            if isinstance(entry, Outcome):
                yield entry
                continue
            try:
                yield _measure(entry, broken, device, timer, done)
            except OutOfMemoryError as error:
                yield Outcome(entry.problem, device.name, trouble=f"not measured: {error}")
            cupy.get_default_memory_pool().free_all_blocks()


@dataclass(frozen=True)
class Entry:
    """A problem with the plans to measure, the planner's own choice first."""

    problem: Problem
    key: str
    plans: list[Plan]


class Arrays(NamedTuple):
    """The arrays of a problem, in 3-D form."""

    x: Any
    weight: Any
    bias: Any
    out: Any


def _enter(problem: Problem, limit: int, device: Device) -> Entry | Outcome:
    """Choose a problem's candidates: those with the least estimated cost, of all kernels together."""
    try:
        arrays = _allocate(problem)
    except OutOfMemoryError as error:
        return Outcome(problem, device.name, trouble=f"not measured: {error}")
    precision = problem.precision
    geometry, layout = without_steps(problem.case.geometry, Layout.of(*arrays))
    arguments = (geometry, precision.dtype, layout, precision.mode, device)
    planner = make_plan(*arguments)
    found = (plan for family in FAMILIES.values() for plan in family.candidates(*arguments))
    others = sorted((plan for plan in found if plan != planner), key=lambda plan: plan.cost)
    return Entry(problem, key_of(*arguments), list(dict.fromkeys([planner, *others]))[:limit])


def _allocate(problem: Problem) -> Arrays:
    """Allocate what a call of the library would see, without meaningful values."""
    case, dtype = problem.case, problem.precision.dtype
    x, out = (in_3d(poisoned(shape, dtype, problem.layout), case.rank) for shape in (case.x, case.out))
    weight = in_3d(poisoned(case.weight, dtype, "NCDHW"), case.rank)
    return Arrays(x, weight, poisoned((case.c_out,), dtype, "NCDHW") if case.bias else None, out)


def _job(plan: Plan, device: Device) -> Job:
    return f"{plan.kernel}.cu", architecture(device.compute_capability), plan.defines


def _measure(
    entry: Entry, broken: Mapping[Plan, str], device: Device, timer: Timer, done: Callable[[object], None]
) -> Outcome:
    """Check every candidate against the planner's choice, time those that are right, and the fastest again."""
    problem, planner = entry.problem, entry.plans[0]
    outcome = Outcome(problem, device.name, entry.key, planner, tried=len(entry.plans))
    if planner in broken:
        return replace(outcome, trouble=broken[planner])
    arrays = _allocate(problem)
    expected = _expected(problem, arrays, prepare(planner, device))
    runs: dict[Plan, Run] = {}
    failed = []
    for plan in entry.plans:
        try:
            reason = broken.get(plan) or _run(problem, arrays, prepare(plan, device), expected, runs, plan)
        except LAUNCH_ERRORS as error:
            reason = str(error)
        if reason:
            failed.append(f"{plan.kernel} {describe_tile(plan)}: {reason}")
        done(problem)
    if planner not in runs:
        return replace(outcome, failed=failed, trouble=f"the planner's own choice fails: {failed[0]}")
    first = timer.interleaved(runs, {}, FIRST_REPEATS)
    final = sorted(runs, key=lambda plan: first[plan].median)[:SHOWN]
    times: dict[Plan, Times] = timer.interleaved(
        {plan: runs[plan] for plan in {planner: None, **dict.fromkeys(final)}}, {}, None
    )
    return replace(outcome, times=times, failed=failed)


def _expected(problem: Problem, arrays: Arrays, launch: Launch) -> list[Patch]:
    """Fill the arrays, and return the planner's result with the sum of the magnitudes of each output's terms."""
    case, dtype = problem.case, problem.precision.dtype
    rng = cupy.random.default_rng(0)
    drawn = np.float64 if dtype == "float64" else np.float32
    # Outputs of about unit size, far from the limits of float16.
    scale = drawn((2 * prod(case.out) / max(1, case.flops)) ** 0.5)
    values = [
        (array, drawn(scale if array is arrays.weight else 1) * rng.standard_normal(array.shape, dtype=drawn))
        for array in arrays[:3]
        if array is not None
    ]
    results = []
    for change in (abs, lambda value: value):
        for array, value in values:
            array[...] = rounded(change(value), dtype)
        launch(*arrays)
        results.append(widened(arrays.out).copy())
    planes = (0, arrays.out.shape[2])
    magnitudes, result = results
    return [
        Patch(n, planes, value, magnitude)
        for n, (value, magnitude) in enumerate(zip(result, magnitudes.astype(np.float64), strict=True))
    ]


def _run(
    problem: Problem, arrays: Arrays, launch: Launch, expected: list[Patch], runs: dict[Plan, Run], plan: Plan
) -> str:
    """Add a candidate's call to `runs` if its result is right, else say how wrong it is."""
    bits = arrays.out.view(f"u{arrays.out.itemsize}")
    bits.fill(np.iinfo(bits.dtype).max)  # NaN in every format
    launch(*arrays)
    precision = problem.precision
    # Both results may be off, and rounded.
    accuracy = compare(cupy, widened(arrays.out), expected, 2 * precision.rounding, 2 * precision.smallest)
    allowed = 2 * precision.tolerance
    if not accuracy.finite or not accuracy.scaled <= allowed:
        off = f"{accuracy.scaled:.1e} of the sum of magnitudes"
        return f"off the planner's choice by {off} beyond rounding, allowed {allowed:.1e}"
    runs[plan] = lambda: launch(*arrays)
    return ""
