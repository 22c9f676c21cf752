"""Tests of the tests: faults planted in copies of the kernels' sources, each of which the host must catch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import nullcontext

import pytest
from described import DEVICES
from fixed_cases import FIXED
from harness import check
from host.backend import on_host
from host.build import HERE, kernel_sources, why_not
from hypothesis import given, settings
from strategies import Problem, Specialisation, case, problems

from cuconvt import plan

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))


def plant(sources: dict[str, str], before: str, after: str) -> dict[str, str]:
    """Return the sources with one replacement, of a text that they hold exactly once."""
    holders = [name for name, text in sources.items() if before in text]
    assert len(holders) == 1, f"{before!r} is in {holders}"
    assert sources[holders[0]].count(before) == 1, f"{before!r} is not unique"
    return {**sources, holders[0]: sources[holders[0]].replace(before, after)}


def run_gather(sources: dict[str, str], problem: Problem = FIXED["kb73"]) -> None:
    with on_host("gather", DEVICES[90], sources=sources):
        check(problem, "float32")


FEW_CHANNELS = case((2, 3, 4, 5, 10), 3, 4, 2, padding=1, groups=3, out_layout="misaligned")  # rows of whole stores


def run_few_channels(sources: dict[str, str], problem: Problem = FEW_CHANNELS) -> None:
    with on_host("few_channels", DEVICES[90], sources=sources):
        check(problem, "float32")


@dataclasses.dataclass(frozen=True)
class Fault:
    """A replacement in the source and the message of the check that must catch it."""

    before: str
    after: str
    caught_by: str
    file: str = "gather.cu"
    run: Callable[[dict[str, str]], None] = run_gather


# Three chunks of channels, two tiles of output channels, and phases along H of two taps and one.
WIDE = case((1, 17, 5, 9), 12, (3, 3), stride=2, padding=1)


def run_phase_gemm(sources: dict[str, str]) -> None:
    with on_host("phase_gemm", DEVICES[90], "tf32x3", sources=sources):
        check(WIDE, "float32")


def phase_gemm_fault(before: str, after: str, caught_by: str) -> Fault:
    return Fault(before, after, caught_by, "phase_gemm.cu", run_phase_gemm)


SYNC_BEFORE_READING = """                    __syncthreads();
                    accumulate("""
SYNC_BEFORE_FILLING = """                    __syncthreads();
                    stage_x("""
UNWRITTEN = "reads shared memory .*, which no thread of the block wrote"
VALUES = "elements are wrong|wrong values"

FAULTS = {
    "tap index off by one": Fault("AxisW::back(tap)", "AxisW::back(tap + 1)", VALUES),
    "weights of the next tap": Fault("(first_w + tap_w) *", "(first_w + tap_w + 1) *", "heap-buffer-overflow"),
    "a batch that does not exist": Fault(
        "x += b.n * p.x_stride[0]", "x += (b.n + 300) * p.x_stride[0]", "belong to no argument|AddressSanitizer"
    ),
    "halo one row short": Fault(
        "* (X_CHANNELS_LAST ? X_W : CHUNK);",
        "* (X_CHANNELS_LAST ? X_W : CHUNK) - 1;",
        UNWRITTEN,
    ),
    "<= for < at the output's edge": Fault(
        "within(ow, p.out_extent[2])",
        "within(ow, p.out_extent[2] + 1)",
        "writes byte .* of out, which thread .* of block .* wrote",
    ),
    "<= for < at the input's edge": Fault(
        "within(xd, p.x_extent[0])", "within(xd, p.x_extent[0] + 1)", "heap-buffer-overflow"
    ),
    "no barrier between filling and reading": Fault(
        SYNC_BEFORE_READING,
        SYNC_BEFORE_READING.replace("__syncthreads();", ""),
        UNWRITTEN,
    ),
    "no barrier between reading and filling": Fault(
        SYNC_BEFORE_FILLING,
        SYNC_BEFORE_FILLING.replace("__syncthreads();", ""),
        "reads shared memory .*, which thread 0 wrote with no barrier in between",
        run=lambda sources: run_gather(sources, case((1, 17, 3, 4, 5), 3, 3)),  # three chunks of channels
    ),
    "a thread that returns before the others meet": Fault(
        "    const int lane_w = threadIdx.x",
        "    if (threadIdx.x == 5) return;\n    const int lane_w = threadIdx.x",
        "not all threads reach a barrier: at __syncthreads 0-4, 6-127; in a warp collective none; returned 5",
    ),
    "misaligned 16-byte access": Fault("shared + X_STAGE;", "shared + X_STAGE + 1;", "misaligned address"),
    "one output never written": Fault(
        "if (channel < p.c_out &&",
        "if (!(od == 1 && oh == 2 && ow == 3) && channel < p.c_out &&",
        "nobody wrote byte .* out",
    ),
    "an output written by two threads": Fault(
        "row < THREADS_C * BOX_D * BOX_H; row += THREADS / ACROSS",
        "row < THREADS_C * BOX_D * BOX_H; row += THREADS / ACROSS - 1",
        "writes byte .* of out, which thread .* of block .* wrote",
    ),
    "shared memory written past its end": Fault(
        "to[c * W_CHANNEL + ((tap_d", "to[(c + 1) * W_CHANNEL + ((tap_d", "writes .* shared memory .* past its end"
    ),
    "an input written": Fault(
        "shared[row * ROW + column], c,", "((Acc*)x)[0] = 0, c,", "writes byte .* of x, an input"
    ),
    "the slide shifts by no plane": Fault(
        "acc[back - 1][phase] = acc[back][phase]",
        "acc[back - 1][phase] = acc[back - 1][phase]",
        VALUES,
        "few_channels.cu",
        run_few_channels,
    ),
    "a border mask with one column too many": Fault(
        "within(first_w + column, p.x_extent[2])",
        "within(first_w + column, p.x_extent[2] + 1)",
        "heap-buffer-overflow",
        "few_channels.cu",
        run_few_channels,
    ),
    "the plane after the last one fetched": Fault(
        "within(d + next_plane, p.x_extent[0])",
        "within(d + next_plane, p.x_extent[0] + 1)",
        "heap-buffer-overflow|AddressSanitizer",
        "few_channels.cu",
        run_few_channels,
    ),
    "rows that are turned without a barrier": Fault(
        "store(turned + lane * ROW, row);\n                __syncwarp();",
        "store(turned + lane * ROW, row);",
        UNWRITTEN,
        "few_channels.cu",
        lambda sources: run_few_channels(sources, case((2, 3, 4, 5, 70), 3, 4, 2, groups=3)),
    ),
    "a whole store to a misaligned row": Fault(
        "(others * (long long)sizeof(Stored) | (long long)out) % BYTES",
        "others * (long long)sizeof(Stored) % BYTES",
        "misaligned address",
        "few_channels.cu",
        run_few_channels,
    ),
    "wait with one group too many outstanding": phase_gemm_fault(
        "copy_async_wait<0>();", "copy_async_wait<1>();", "before the wait that covers"
    ),
    "no barrier after the wait": phase_gemm_fault(
        "__syncthreads();  // all of this stage", "// all of this stage", UNWRITTEN + "|with no barrier in between"
    ),
    "swapped fragment registers": phase_gemm_fault(
        "(pair + i % 2 * TILES_M) * NEXT_ROW + i / 2 * 4 * WORD",
        "(pair + i / 2 * TILES_M) * NEXT_ROW + i % 2 * 4 * WORD",
        VALUES,
    ),
    "no barrier before a slice of the result is read": phase_gemm_fault(
        "        __syncthreads();\n        const int first_c",
        "        const int first_c",
        UNWRITTEN + "|with no barrier in between",
    ),
    "no barrier between the arithmetic and the slices": phase_gemm_fault(
        "    __syncthreads();\n    const Place mine", "    const Place mine", "with no barrier in between"
    ),
    "weights packed in the order of the taps": phase_gemm_fault(
        "while (packed_place(tap_h) != place) ++tap_h;", "tap_h = place;", VALUES
    ),
    "a tap of a phase GEMM one column late": phase_gemm_fault(
        "(REACH_W - back) * POSITION", "(REACH_W - back + 1) * POSITION", UNWRITTEN
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_caught(name: str) -> None:
    fault = FAULTS[name]
    sources = plant(kernel_sources(fault.file), fault.before, fault.after)
    with pytest.raises(AssertionError, match=fault.caught_by) as caught:
        fault.run(sources)
    if fault.caught_by != VALUES and "nobody" not in fault.caught_by:
        assert f"in kernel {fault.file.removesuffix('.cu')}, block" in str(caught.value)


@pytest.mark.parametrize("fault", [FAULTS["tap index off by one"], FAULTS["swapped fragment registers"]])
def test_without_a_fault_nothing_is_caught(fault: Fault) -> None:
    fault.run(kernel_sources(fault.file))


# ---- an index that overflows ---------------------------------------------------------------------------------------

INDEX_BITS = 12


def narrow_sources() -> dict[str, str]:
    """Return the gather kernel with an index of few bits in place of its 32-bit one."""
    declared = f'#define INDEX_BITS {INDEX_BITS}\n#include "narrow_index.cuh"\ntypedef NarrowIndex Index;'
    sources = plant(kernel_sources("gather.cu"), "typedef int Index;", declared)
    return {**sources, "narrow_index.cuh": (HERE / "narrow_index.cuh").read_text()}


# Offsets of 2**11 and more in x alone, in the output alone, and in neither.
BEYOND = {
    "x": (case((1, 1, 12, 16, 20), 1, 1, padding=(4, 6, 8)), True),
    "out": (case((1, 1, 4, 4, 5), 1, 4, stride=4), True),
    "neither": (case((1, 3, 9, 13), 4, 1), False),
}


@pytest.mark.parametrize("name", BEYOND)
def test_index_that_overflows_is_caught(name: str) -> None:
    problem, overflows = BEYOND[name]
    expected = pytest.raises(AssertionError, match=f"overflows {INDEX_BITS} bits") if overflows else nullcontext()
    with expected:
        run_gather(narrow_sources(), problem)


@pytest.mark.parametrize("name", BEYOND)
def test_planner_avoids_the_overflow(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "INDEX_LIMIT", 2 ** (INDEX_BITS - 1))
    run_gather(narrow_sources(), BEYOND[name][0])


@settings(max_examples=40)
@given(problem=problems(Specialisation((2, 3), (2, 1), (1, 2), 3, 5, ("contiguous",), ("contiguous",)), (40, 40)))
def test_planner_avoids_every_overflow(problem: Problem) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "INDEX_LIMIT", 2 ** (INDEX_BITS - 1))
        run_gather(narrow_sources(), problem)
