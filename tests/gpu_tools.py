"""What GPU tests share: a kernel that keeps a stream busy, copies between both memories, and plans of one kernel."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from strategies import Problem

from cuconvt import warm


@functools.cache
def _spin() -> Any:
    import cupy

    source = r"""
    extern "C" __global__ void spin(long long cycles) {
        long long start = clock64();
        while (clock64() - start < cycles) {}
    }
    """
    return cupy.RawKernel(source, "spin")


def delay(milliseconds: int = 200) -> Any:
    """Keep CuPy's current stream busy for about that long and return an event that is done when it is over."""
    import cupy

    _spin()((1,), (1,), (np.int64(milliseconds * 1_800_000),))  # a GPU's clock is 1.5 to 2 GHz
    event = cupy.cuda.Event()
    event.record()
    return event


def to_gpu(values: np.ndarray | None) -> Any:
    """Copy a NumPy array, bfloat16 included, to a CuPy array."""
    import cupy

    if values is None:
        return None
    return cupy.asarray(np.ascontiguousarray(values).view(f"i{values.dtype.itemsize}")).view(values.dtype)


@contextlib.contextmanager
def planned_by(family: Callable[..., Any], module: Any, maker: str, *memos: Any) -> Iterator[None]:
    """Plan with one kernel's planner in place of a module's `maker`, whatever the estimates say.

    What remembers plans forgets them before and after: the memos that are given, and the one in front of all steps.
    """
    plans = []
    memos = (*memos, warm._slot)

    def plan(*problem: Any) -> Any:
        plans.append(family(*problem))
        return plans[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, maker, plan)
        for memo in memos:
            memo.cache_clear()
        yield
        for memo in memos:
            memo.cache_clear()
    assert plans


def plane_of(problem: Problem, position: int) -> tuple[Problem, slice]:
    """Return the problem of the one output plane at `position` on the first axis, and the inputs that it reads."""
    extent, kernel, stride, dilation = (
        getattr(problem, name)[0] for name in ("extent", "kernel", "stride", "dilation")
    )
    reached = position + problem.padding[0][0]
    first = max(0, -(-(reached - dilation * (kernel - 1)) // stride))
    last = min(extent - 1, reached // stride)
    assert first <= last, "no input reaches this plane"
    full = (last - first) * stride + dilation * (kernel - 1) + 1
    before = reached - first * stride
    fields = {
        "extent": (last - first + 1, *problem.extent[1:]),
        "padding": ((before, full - 1 - before), *problem.padding[1:]),
        "output_padding": (0, *problem.output_padding[1:]),
    }
    return Problem(**{**vars(problem), **fields}), slice(first, last + 1)
