"""Times and memory of calls on a GPU, all on CuPy's current stream."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeVar

import cupy
import numpy as np
from cupy.cuda import memory_hook

from cuconvt.bench.result import Times

FLUSH_BYTES = 256 * 2**20  # several times any L2 cache
FLUSH_WRITES = 4  # so long that the host has queued the call before the GPU comes to it
TRIALS = 3
TARGET_MS = 300.0  # GPU time that the repeats of one of our cells may take
MIN_REPEATS, MAX_REPEATS = 5, 100
HOPELESS = 1.5  # a contestant that is not ours and this much slower than its sibling is left out after the trial
HOST_CALLS = 1000

Run = Callable[[], object]
Key = TypeVar("Key", bound=Hashable)


class Timer:
    """Times a call between two events, with L2 flushed and the GPU busy when the call is queued."""

    def __init__(self) -> None:
        self._flush = cupy.empty(FLUSH_BYTES, np.uint8)
        self._start, self._end = cupy.cuda.Event(), cupy.cuda.Event()

    def once(self, run: Run) -> float:
        """Return the milliseconds of one call on the GPU."""
        for _ in range(FLUSH_WRITES):
            self._flush.data.memset_async(0, FLUSH_BYTES)
        self._start.record()
        result = run()  # held until the end: to free it is not part of the call
        self._end.record()
        self._end.synchronize()
        del result
        return float(cupy.cuda.get_elapsed_time(self._start, self._end))

    def interleaved(self, ours: Mapping[Key, Run], theirs: Mapping[Key, Run], repeat: int | None) -> dict[Key, Times]:
        """Time warm contestants in turns: each repeat calls every one of them once.

        Without `repeat`, there are as many repeats as fit the time allotted to each of `ours`.
        """
        runs = {**ours, **theirs}
        trial = {key: [self.once(run) for _ in range(TRIALS)] for key, run in runs.items()}
        estimate = {key: Times.of(times).median for key, times in trial.items()}
        best = min((estimate[key] for key in theirs), default=0.0)
        kept = [key for key in runs if key in ours or estimate[key] <= HOPELESS * best]
        if repeat is None:
            flush = self.once(lambda: self._flush.data.memset_async(0, FLUSH_BYTES)) * FLUSH_WRITES
            a_round = sum(estimate[key] + flush for key in kept)
            repeat = int(min(MAX_REPEATS, max(MIN_REPEATS, TARGET_MS * max(1, len(ours)) / a_round)))
        measured: dict[Key, list[float]] = {key: [] for key in kept}
        for _ in range(repeat):
            for key in kept:
                measured[key].append(self.once(runs[key]))
        return {key: Times.of(measured.get(key) or trial[key]) for key in runs}


def host_us(run: Run, calls: int = HOST_CALLS) -> float:
    """Return the microseconds that one call keeps the calling thread, when nothing waits for the GPU."""
    for _ in range(calls // 10):
        run()
    cupy.cuda.get_current_stream().synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        run()
    elapsed = time.perf_counter() - start
    cupy.cuda.get_current_stream().synchronize()
    return 1e6 * elapsed / calls


class _Peak(memory_hook.MemoryHook):  # type: ignore[misc]
    """Counts the bytes that CuPy's pool hands out and takes back."""

    name = "cuconvt.bench"

    def __init__(self) -> None:
        self.now = self.peak = 0

    def malloc_postprocess(self, **kwargs: Any) -> None:
        self.now += kwargs["mem_size"]
        self.peak = max(self.peak, self.now)

    def free_postprocess(self, **kwargs: Any) -> None:
        self.now -= kwargs["mem_size"]


def extra_bytes(run: Run) -> int:
    """Return the peak of CuPy's memory during a call, beyond what the call's result holds."""
    with _Peak() as peak:
        result = run()
        held = peak.now
        del result
    return int(peak.peak - held)
