"""Registers, stack and shared memory of compiled kernels, as ptxas reports them; compiled in processes of their own."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import re
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from typing import Any

Defines = tuple[tuple[str, int], ...]
Job = tuple[str, str, Defines]  # family, architecture, macros


@dataclass(frozen=True)
class Usage:
    registers: int  # of a thread
    stack_bytes: int
    spilled_bytes: int
    static_shared_bytes: int
    serialized: int = 0  # wgmmas that wait for each other


def log_of(family: str, arch: str, defines: Defines) -> str:
    """Compile a specialisation and return NVRTC's log."""
    from cuconvt.compile import compile_kernel

    return compile_kernel(f"{family}.cu", arch, defines).log


def measure(job: Job) -> dict[str, int]:
    """Compile one specialisation and read NVRTC's log."""
    return asdict(parse(log_of(*job), job[0]))


def parse(log: str, entry: str) -> Usage:
    """Take registers and shared memory of one entry point, stack and spills of all functions of the file."""
    frames = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log)
    own = re.search(rf"Compiling entry function '{entry}'.*?Used (\d+) registers(.*?)$", log, re.S | re.M)
    assert frames, f"a log without the numbers that are looked for:\n{log}"
    assert own, f"a log without the numbers that are looked for:\n{log}"
    shared = re.search(r"(\d+) bytes smem", own[2])
    return Usage(
        registers=int(own[1]),
        stack_bytes=max(int(stack) for stack, _, _ in frames),
        spilled_bytes=max(int(stores) + int(loads) for _, stores, loads in frames),
        static_shared_bytes=int(shared[1]) if shared else 0,
        serialized=log.count("Potential Performance Loss: wgmma"),
    )


def measure_all(jobs: Iterable[Job]) -> dict[Job, dict[str, int] | str]:
    """Measure many specialisations on all cores; where the compiler fails or crashes, a text says so."""
    results: dict[Job, dict[str, int] | str] = {}
    waiting = list(jobs)
    if not waiting:
        return results
    with contextlib.suppress(BrokenProcessPool):  # a crash takes the whole pool along: look for it one by one
        futures = {job: _all_cores().submit(measure, job) for job in waiting}
        for job, future in futures.items():
            try:
                results[job] = future.result()
            except BrokenProcessPool:
                raise
            except Exception as error:
                results[job] = str(error)
    if len(results) < len(waiting):
        _all_cores.cache_clear()
    for job in waiting:
        if job not in results:
            with _pool(1) as pool:
                try:
                    results[job] = pool.submit(measure, job).result()
                except BrokenProcessPool:
                    results[job] = "the compiler crashed"
    return results


@functools.cache
def _all_cores() -> Any:
    """Return a pool, the same for all calls, as its processes are slow to start; xdist's workers share the cores."""
    runs = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    return _pool(max(1, len(os.sched_getaffinity(0)) // runs))


def _pool(workers: int) -> Any:
    return ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"))
