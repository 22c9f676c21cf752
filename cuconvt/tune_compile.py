"""Compilation of many kernels at once, in processes of their own: within one process NVRTC compiles one at a time."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool

from cuconvt.compile import cached_file
from cuconvt.errors import CompileError

Job = tuple[str, str, tuple[tuple[str, int], ...]]  # what `cached_file` takes: source, architecture and macros


def compile_all(jobs: Sequence[Job], done: Callable[[object], None]) -> dict[Job, str]:
    """Compile kernels into the cache, call `done` after each, and return the errors of those that do not compile."""
    problems: dict[Job, str] = {}
    processes = min(len(jobs), _processors())
    if processes > 1:
        # Where no process can be started, the rest is compiled here.
        with contextlib.suppress(OSError, BrokenProcessPool):
            _in_processes(jobs, processes, done, problems)
    for job in jobs:
        if job not in problems:
            problems[job] = _compile(job)
            done(job[0])
    return {job: problem for job, problem in problems.items() if problem}


def _in_processes(
    jobs: Sequence[Job], processes: int, done: Callable[[object], None], problems: dict[Job, str]
) -> None:
    # Spawned, not forked: a child must not inherit CUDA's state.
    pool = ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"))
    try:
        futures = {pool.submit(_compile, job): job for job in jobs}
        for future in as_completed(futures):
            problems[futures[future]] = future.result()
            done(futures[future][0])
    finally:
        pool.shutdown(cancel_futures=True)


def _compile(job: Job) -> str:
    """Compile a kernel unless the cache has it, and return what went wrong."""
    try:
        cached_file(*job)
    except CompileError as error:
        return str(error)
    return ""


def _processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
