"""Tests of the tests: faults planted in copies of the kernels' sources, each of which the host must catch."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import host_disjoint
import host_narrow_groups
import host_tap_columns
import numpy as np
import pytest
from described import DEVICES
from fixed_cases import FIXED
from harness import check
from host.backend import on_host
from host.build import HERE, kernel_sources, why_not
from host_phase_gemm import PhasesAsChannels
from host_phase_wgmma import PASSING, plan_with
from hypothesis import given, settings
from strategies import LAST, Problem, Specialisation, case, problems

from cuconvt import plan, plan_disjoint, plan_narrow_groups, plan_phase_wgmma, plan_tap_columns, plan_wgmma_boxes
from cuconvt.plan import Device
from cuconvt.plan_wgmma_sizes import Tile

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))


def plant(sources: dict[str, str], before: str, after: str) -> dict[str, str]:
    """Return the sources with one replacement, of a text that they hold once; its further lines may be indented."""
    first, *others = before.split("\n")
    pattern = r"\n *".join(map(re.escape, (first, *(line.lstrip() for line in others))))
    places = [(name, found.span()) for name, text in sources.items() for found in re.finditer(pattern, text)]
    assert len(places) == 1, f"{before!r} is in {[name for name, _ in places]}"
    ((name, (start, end)),) = places
    return {**sources, name: sources[name][:start] + after + sources[name][end:]}


def run_gather(sources: dict[str, str], problem: Problem = FIXED["kb73"]) -> None:
    with on_host("gather", DEVICES[90], sources=sources):
        check(problem, "float32")


FEW_CHANNELS = case((2, 3, 4, 5, 10), 3, 4, 2, padding=1, groups=3, out_layout="misaligned")  # rows of whole stores


def run_few_channels(sources: dict[str, str], problem: Problem = FEW_CHANNELS) -> None:
    with on_host("few_channels", DEVICES[90], sources=sources):
        check(problem, "float32")


NARROW = case((2, 16, 3, 4, 32), 16, 3, 2, padding=1, groups=2, has_bias=True)


NARROW_LAST = case(
    (2, 32, 3, 3, 5), 32, 3, 2, padding=1, groups=4, has_bias=True, x_layout="channels_last", out_layout="channels_last"
)  # in boxes that leave lanes without a cell

OF_NARROW_GROUPS = plan_narrow_groups.Tile(2, 1, 1, False, False, 2)
OF_TWO_GROUPS = plan_narrow_groups.Tile(1, 2, 1, True, False, 2, 2)
OF_SPLIT_CELLS = plan_narrow_groups.Tile(4, 1, 1, False, False, 2, split=True)


def narrow_fault(before: str, after: str, caught_by: str, tile: plan_narrow_groups.Tile = OF_NARROW_GROUPS) -> Fault:
    def run(sources: dict[str, str]) -> None:
        device, plan = Device(90, 1, DEVICES[90].shared_bytes), host_narrow_groups.plan_tile(tile)
        with on_host("narrow_groups", device, "tf32", sources=sources, plan=plan):
            check(NARROW, "float32", precision="tf32")

    return Fault(before, after, caught_by, "narrow_groups.cu", run)


def two_groups_fault(before: str, after: str, caught_by: str) -> Fault:
    def run(sources: dict[str, str]) -> None:
        device, plan = Device(90, 1, DEVICES[90].shared_bytes), host_narrow_groups.plan_tile(OF_TWO_GROUPS)
        with on_host("narrow_groups", device, sources=sources, plan=plan):
            check(NARROW_LAST, "float16", calls=1)

    return Fault(before, after, caught_by, "narrow_groups.cu", run)


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


def run_phases_as_channels(sources: dict[str, str]) -> None:
    with on_host("phase_gemm", DEVICES[90], "tf32x3", sources=sources, plan=PhasesAsChannels(0)):
        check(case((1, 17, 5, 9), 3, 4, stride=2, padding=1), "float32")
        check(case((1, 17, 5, 9), 3, 4, stride=2, padding=1, out_layout="channels_last"), "float32")


def phase_gemm_fault(
    before: str, after: str, caught_by: str, run: Callable[[dict[str, str]], None] = run_phase_gemm
) -> Fault:
    return Fault(before, after, caught_by, "phase_gemm.cu", run)


# Boxes that one block takes one after the other, of three chunks of channels; weights pass by or stay.
WGMMA_DEVICE = Device(90, 1, 227 * 1024)
STAYING = dataclasses.replace(
    PASSING, workers=2, stagers=2, ring=9, resident=True, take_turns=True, all_phases=True, min_blocks=1
)
TOGETHER = dataclasses.replace(PASSING, workers=2, stagers=2, min_blocks=1)
DEEP = dataclasses.replace(PASSING, k_steps=2)  # an item of x is read by another thread than has found it
COPIED = dataclasses.replace(PASSING, min_blocks=1, workers=2, take_turns=False, boxed=True)  # boxes of channels-last x
COPIED_IN_TURN = dataclasses.replace(
    STAYING, stagers=1, all_phases=False, ring=9, boxed=True
)  # of two teams, served by the same threads
COPIED_SLICES = dataclasses.replace(COPIED, workers=1, min_blocks=2, slides=True, k_steps=2)
LINE = case((2, 8, 67), 8, 3)  # fewer positions than rows of a wgmma
BOXES = case((2, 17, 7, 21), 12, (3, 3), stride=2, padding=1)
BOXES_LAST = case((2, 20, 7, 21), 12, (3, 3), stride=2, padding=1, **LAST)
UNSTRIDED_LAST = case((5, 20, 7, 21), 12, (3, 3), padding=1, **LAST)  # several boxes for each team
SLICES_LAST = case((1, 20, 7, 5, 9), 12, 3, **LAST)
LINE_LAST = case((2, 20, 67), 8, 3, **LAST)


def run_phase_wgmma(
    sources: dict[str, str], tile: Tile = PASSING, precision: str = "tf32", problem: Problem = BOXES
) -> None:
    with on_host("phase_wgmma", WGMMA_DEVICE, precision, sources=sources, plan=plan_with(tile)):
        check(problem, "float32", precision=precision)


def phase_wgmma_fault(before: str, after: str, caught_by: str, *run_with: Any) -> Fault:
    def run(sources: dict[str, str]) -> None:
        run_phase_wgmma(sources, *run_with)

    return Fault(before, after, caught_by, "phase_wgmma.cu", run)


def copied_fault(before: str, after: str, caught_by: str, tile: Tile = COPIED, problem: Problem = BOXES_LAST) -> Fault:
    return phase_wgmma_fault(before, after, caught_by, tile, "tf32", problem)


def split_fault(before: str, after: str, caught_by: str, tile: Tile = COPIED, problem: Problem = BOXES_LAST) -> Fault:
    return phase_wgmma_fault(before, after, caught_by, tile, "tf32x3", problem)


# Every other plane along D has no tap; its elements are more than are copied at a time.
FILLED = case((3, 9, 3, 4, 40), 12, 3, stride=2, padding=1, dilation=2, has_bias=True)
OF_ALL_PHASES = dataclasses.replace(PASSING, all_phases=True)


def filled_fault(before: str, after: str, caught_by: str) -> Fault:
    return phase_wgmma_fault(before, after, caught_by, OF_ALL_PHASES, "tf32", FILLED)


# Several tiles a worker or, on more multiprocessors, parts of the weights; rows that end within a run or not.
UPSAMPLED = case((2, 20, 9, 23), 20, 2, stride=2, padding=((2, 0), (1, 1)), output_padding=(0, 1), has_bias=True)
UPSAMPLED_EVEN = case((2, 20, 9, 24), 20, 2, stride=2, has_bias=True)
OF_DISJOINT = plan_disjoint.Tile(2, 1, 2, 2, True, 1)
OF_TWO_ROWS = plan_disjoint.Tile(2, 1, 4, 2, True, 1)  # of taps at a time


def run_disjoint(
    sources: dict[str, str], precision: str, problem: Problem, multiprocessors: int, tile: plan_disjoint.Tile
) -> None:
    device, plan = Device(90, multiprocessors, DEVICES[90].shared_bytes), host_disjoint.plan_tile(tile)
    with on_host("disjoint", device, precision, sources=sources, plan=plan):
        check(problem, "float32", precision=precision)


def disjoint_fault(
    before: str,
    after: str,
    caught_by: str,
    problem: Problem = UPSAMPLED_EVEN,
    precision: str = "tf32",
    multiprocessors: int = 1,
    tile: plan_disjoint.Tile = OF_DISJOINT,
) -> Fault:
    def run(sources: dict[str, str]) -> None:
        run_disjoint(sources, precision, problem, multiprocessors, tile)

    return Fault(before, after, caught_by, "disjoint.cu", run)


# Several boxes along W and of the slide, rows that are no whole fours; weights that stay, or pass by in three stages.
COLUMNS = case((1, 40, 9, 71), 2, (3, 4), stride=2, padding=1, has_bias=True)
COLUMNS_STAY, COLUMNS_PASS = plan_tap_columns.Tile(2, 1, 3, 0), plan_tap_columns.Tile(2, 1, 3, 1)


def columns_fault(
    before: str,
    after: str,
    caught_by: str,
    tile: plan_tap_columns.Tile = COLUMNS_STAY,
    problem: Problem = COLUMNS,
    precision: str = "tf32x3",
) -> Fault:
    def run(sources: dict[str, str]) -> None:
        plan = host_tap_columns.plan_tile(tile)
        # A single multiprocessor, for which the slide is not cut.
        with on_host("tap_columns", WGMMA_DEVICE, precision, sources=sources, plan=plan):
            check(problem, "float32", precision=precision)

    return Fault(before, after, caught_by, "tap_columns.cu", run)


SYNC_BEFORE_READING = """                    __syncthreads();
                    accumulate("""
SYNC_BEFORE_FILLING = """                    __syncthreads();
                    stage_x("""
UNWRITTEN = "reads shared memory .*, which no thread of the block wrote"
VALUES = "elements are wrong|wrong values"
IN_USE = "with no wait for it|with no barrier in between|a bulk copy wrote|arrives at the mbarrier|a GPU may miss it"
KERNEL_BEFORE = "before the wait for the kernel that writes it"
UNFILLED = UNWRITTEN + "|with no barrier in between|before the wait that covers|with no wait for it"

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
    "the next box before the last one is read": narrow_fault(
        "__syncthreads();  // all warps are done", "// all warps are done", "with no barrier in between"
    ),
    "a box that is read before it is staged": narrow_fault(
        "}\n        __syncthreads();\n#endif\n        Stored",
        "}\n#endif\n        Stored",
        UNWRITTEN + "|with no barrier in between",
    ),
    "a shift of a cell one column late": narrow_fault(
        "+ line + shift_w, s.plane)", "+ line + shift_w + 1, s.plane)", UNWRITTEN + "|" + VALUES
    ),
    "rows of a warp's tile exchanged": narrow_fault(
        "first + m * 16 + lane % 16", "first + m * 16 + (lane % 16 ^ 8)", VALUES
    ),
    "a window of a row one output late": narrow_fault(
        "narrow(from[window], target[window])",
        "narrow(from[window], target[window + 1])",
        "heap-buffer-overflow|AddressSanitizer",
    ),
    "the first row's run for both": narrow_fault("turned + run * LONG + one", "turned + one", VALUES, OF_SPLIT_CELLS),
    "only the first residue along D": narrow_fault(
        "TIMES = SPLIT ? STRIDE_D : 1", "TIMES = 1", "nobody wrote byte", OF_SPLIT_CELLS
    ),
    "the other residue's taps along D": narrow_fault(
        "shift_d || !summed_at(time,", "shift_d || !summed_at(TIMES - 1 - time,", VALUES, OF_SPLIT_CELLS
    ),
    "the first group's weights for both": two_groups_fault("2 * group + eight", "2 * group", VALUES),
    "the first group's input for both": two_groups_fault("GROUPS == 2 ? 2 * eight : 0", "0", VALUES),
    "pairs of groups one group apart": two_groups_fault("x += group * p.c_in", "x += group / GROUPS * p.c_in", VALUES),
    "channels that lanes exchange in another order": two_groups_fault(
        "threadIdx.x % 2 * 8 + threadIdx.x % 4 / 2 * 4", "threadIdx.x % 4 * 4", VALUES
    ),
    "lanes that miss an exchange": two_groups_fault(
        "if (VECTOR <= 2 && index >= cells) continue;",
        "if (index >= cells) continue;",
        "not all threads reach|different warp collectives",
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
    "weights of other phases than a column's": phase_gemm_fault(
        "tap_w * (STRIDE_W / PHASES_W) + column.phase_w",
        "tap_w * (STRIDE_W / PHASES_W) + STRIDE_W - 1 - column.phase_w",
        VALUES,
        run_phases_as_channels,
    ),
    "no barrier before a row of phases is read": phase_gemm_fault(
        "        __syncthreads();\n        if (PHASES_AS_CHANNELS) {\n            store_phases_of_row",
        "        if (PHASES_AS_CHANNELS) {\n            store_phases_of_row",
        UNWRITTEN + "|with no barrier in between",
        run_phases_as_channels,
    ),
    "no wait for the kernel that packs, disjoint": disjoint_fault(
        "wait_for_kernel_before();  // it packs the weights\nbarrier", "barrier", KERNEL_BEFORE
    ),
    "no wait for weights, disjoint": disjoint_fault(
        "    barrier_wait(landed, 0);\n\n    for (;", "    for (;", UNFILLED
    ),
    "fewer weights announced than come": disjoint_fault(
        "count * SLOT * (int)sizeof(Piece));", "SLOT * (int)sizeof(Piece));", "announced|more bytes|" + UNFILLED
    ),
    "a barrier that others do not see yet": disjoint_fault(
        "barrier_init_done();\n        wait_for", "wait_for", "barrier_init_done|fence"
    ),
    "sums before their products are complete": disjoint_fault(
        "of_row[row], false);\nwgmma_commit();\nwgmma_wait<0>();",
        "of_row[row], false);\nwgmma_commit();",
        IN_USE + "|before the wait|waits for its wgmma",
    ),
    "sums of the slot before": disjoint_fault("of_row[row], false);", "of_row[row], true);", VALUES),
    "weights of the first eight channels": disjoint_fault("* SLOT + further)", "* SLOT)", VALUES, UPSAMPLED),
    "the first row of taps twice": disjoint_fault("row < rows ? row : 0", "0", VALUES, UPSAMPLED, tile=OF_TWO_ROWS),
    "a row of taps that another part has": disjoint_fault(
        "inside && row < rows && within", "inside && within", VALUES + "|wrote", UPSAMPLED, "tf32", 8, OF_TWO_ROWS
    ),
    "columns of the next eight channels": disjoint_fault(
        "EIGHTS == TILES_C ? 128 : TILE_C * 16", "128", VALUES, UPSAMPLED
    ),
    "the first tap of a part": disjoint_fault(
        "first_tap = (first_slot + slot) % TAPS;",
        "first_tap = 0;",
        VALUES + "|wrote|nobody",
        UPSAMPLED,
        multiprocessors=16,
    ),
    "x of the next tile": disjoint_fault(
        "pick(a, loaded);\nif (AHEAD) load_tile<true, IN_WORD == 1>(loaded, x, tile + workers, p);",
        "if (AHEAD) load_tile<true, IN_WORD == 1>(loaded, x, tile + workers, p);\n        pick(a, loaded);",
        VALUES,
    ),
    "a chain that is added while it is multiplied": disjoint_fault(
        "    wgmma_wait<0>();\n    add_chain(TILES_M",
        "    add_chain(TILES_M",
        IN_USE + "|before the wait",
        precision="tf32x3",
    ),
    "words of the next chain too early": disjoint_fault(
        "            wgmma_wait<1>();\n            add_chain(chain - 1);",
        "            if (chain > 2) add_chain(chain - 1);",
        "A of a wgmma|" + IN_USE + "|before the wait|" + VALUES,
        precision="tf32x3",
    ),
    "words of a thread's other half exchanged": disjoint_fault(
        "row % 2 + 2 * half];", "2 * (row % 2) + half];", VALUES
    ),
    "positions beyond the row": disjoint_fault(
        "min(RUN, (int)p.x_extent[2] - w)", "RUN", VALUES + "|heap-buffer-overflow|belong to no", UPSAMPLED
    ),
    "channels beyond the last, disjoint": disjoint_fault(
        "count > 0 && slots * 4 * IN_WORD + i < (int)p.c_in - first",
        "count > 0",
        VALUES + "|heap-buffer-overflow|belong to no",
    ),
    "outputs beyond the row": disjoint_fault(
        " && within(w + (first + own) * IN_WORD + e, p.out_extent[2])",
        "",
        VALUES + "|wrote|heap-buffer-overflow|belong to no",
        UPSAMPLED,
    ),
    "words of the thread before": disjoint_fault(
        "exchange(own_words[n % TOGETHER], own_words[n % TOGETHER + apart], apart);", ";", VALUES, UPSAMPLED
    ),
    "channels beyond the last, exchanged": disjoint_fault(
        "if (channel + first_channel + c >= left[row] || !there) continue;",
        "if (!there) continue;",
        VALUES + "|wrote|heap",
        UPSAMPLED,
    ),
    "the first position has all its outputs": disjoint_fault(
        "at.w * KERNEL_W - (int)(p.pad[2] % KERNEL_W)",
        "at.w * KERNEL_W",
        VALUES + "|wrote|nobody|belong to no",
        UPSAMPLED,
    ),
    "outputs at once that are not aligned": disjoint_fault(
        "!IN_PIECES && p.out_vector == AT_ONCE", "!IN_PIECES", "misaligned|" + VALUES + "|wrote", UPSAMPLED
    ),
    "bias of the first channels": disjoint_fault("offsets + channel, tap", "offsets, tap", VALUES),
    "the other part's slots": disjoint_fault(
        "all_slots + first_slot) * SLOT", "all_slots) * SLOT", VALUES, multiprocessors=16
    ),
    "no wait for the kernel that packs, tap_columns": columns_fault(
        "    wait_for_kernel_before();  // it packs the weights\n", "", KERNEL_BEFORE
    ),
    "no wait for weights that stay": columns_fault("    if (WEIGHTS_STAY) copy_async_wait<0>();\n", "", UNFILLED),
    "no wait for weights that pass": columns_fault(
        "copy_async_wait<0>();\n__syncthreads();  // this stage",
        "__syncthreads();  // this stage",
        UNFILLED,
        COLUMNS_PASS,
    ),
    "no barrier before weights that pass": columns_fault(
        "                    __syncthreads();  // this stage has landed, and nobody reads the other one any more\n",
        "",
        UNFILLED + "|with no barrier in between",
        COLUMNS_PASS,
    ),
    "columns written while others read them": columns_fault(
        "            __syncthreads();  // nobody reads the columns any more\n", "", "with no barrier in between"
    ),
    "columns read before all are written": columns_fault(
        "__syncthreads();\nconst int left", "const int left", "with no barrier in between"
    ),
    "gaps that are no zeros": columns_fault("columns[i] = 0;", "if (i > 999999) columns[i] = 0;", UNWRITTEN),
    "one set of partial sums": columns_fault(
        "partial + (turn ^ 1) * partial_words", "partial + turn * partial_words", "with no barrier in between|" + VALUES
    ),
    "a column one position late": columns_fault("offset_w(tap_w)];", "offset_w(tap_w) - 1];", VALUES),
    "planes of a tap that are not there": columns_fault(
        "(unsigned)(d - back_d) >= (unsigned)depth || ", "", VALUES + "|with no barrier in between|" + UNWRITTEN
    ),
    "boxes that do not overlap": columns_fault(
        "first = (Index)tile * (box - overlap);", "first = (Index)tile * box;", VALUES + "|wrote|nobody"
    ),
    "positions beyond a row of x": columns_fault(
        "(int)min(left, (Index)4)", "4", VALUES + "|heap-buffer-overflow|belong to no"
    ),
    "channels beyond the last, tap_columns": columns_fault(
        "channels = left - first;", "channels = 4;", VALUES + "|heap-buffer-overflow|belong to no"
    ),
    "whole stores beyond a row": columns_fault(
        " && first_w + STRIDE_W <= (Index)p.out_extent[2]",
        "",
        VALUES + "|wrote|heap-buffer-overflow|belong to no",
        problem=case((1, 40, 5, 18), 4, (2, 3), stride=2, **LAST),
    ),
    "outputs before the first": columns_fault(
        "if (own < first_q - first) own = ",
        "if (false) own = ",
        VALUES + "|wrote|heap-buffer-overflow|belong to no",
        problem=case((1, 40, 9, 36), 2, (3, 4), stride=2, padding=((1, 1), (4, 2))),
    ),
    "the bias of the first group": columns_fault(
        "bias[(b.group * CHANNELS_OUT + i % CHANNELS_OUT)",
        "bias[(i % CHANNELS_OUT)",
        VALUES,
        problem=case((1, 80, 5, 20), 4, (3, 4), stride=2, padding=1, groups=2, has_bias=True),
    ),
    "no wait for x": phase_wgmma_fault("                x_ring.wait_until_full();\n", "", UNFILLED),
    "no wait for the kernel that packs, phase_gemm": phase_gemm_fault(
        "    wait_for_kernel_before();  // it packs the weights\n", "", KERNEL_BEFORE
    ),
    "no wait for the kernel that packs, phase_wgmma": phase_wgmma_fault(
        "        if (thread < 0) wait_for_kernel_before();", "", KERNEL_BEFORE
    ),
    "no wait for the kernel that packs, narrow_groups": narrow_fault(
        "wait_for_kernel_before();\nconst Fragment", "const Fragment", KERNEL_BEFORE
    ),
    "no wait for weights": phase_wgmma_fault("                    weight_ring.wait_until_full();\n", "", UNFILLED),
    "no wait for a free stage": phase_wgmma_fault("ring.wait_until_free();\nconst int", "const int", IN_USE),
    "no wait for a free slot": phase_wgmma_fault(
        "rows.h.tap(row_h);\nring.wait_until_free();", "rows.h.tap(row_h);", IN_USE
    ),
    "planes that are not waited for": filled_fault(
        "            store_bulk_wait();\n", "", "the block ends before thread .* waits for its bulk stores"
    ),
    "a value written over while it is copied": filled_fault("    store_bulk_wait_until_read();\n", "", VALUES),
    "a value that copies do not see": filled_fault(
        "publish_shared_writes();\nfill.biased", "fill.biased", "a bulk store reads .* did not publish"
    ),
    "copies to where nothing is aligned": filled_fault(
        "long>(to) % 16; --count", "long>(to) % 4; --count", "misaligned"
    ),
    "planes that taps reach are filled, too": filled_fault(
        "(fill.d + PLANE_STEP - (int)p.planes[1]) % PLANE_STEP", "true", VALUES + "|wrote"
    ),
    "planes counted without the padding": filled_fault(
        "PLANE_STEP - (int)p.planes[1])", "PLANE_STEP)", VALUES + "|wrote"
    ),
    "workers that begin at the first plane": filled_fault(
        "out += p.planes[1] * plane_stride(p);", ";", VALUES + "|wrote|nobody wrote"
    ),
    "planes filled as far apart as those with a tap": filled_fault(
        "p.out_stride[2] / PLANE_STEP", "p.out_stride[2]", VALUES + "|wrote|past an array"
    ),
    "the first channel's bias": filled_fault("bias[fill.channel * stride]", "bias[0]", VALUES),
    "a worker that rests though it has rows": phase_wgmma_fault(
        "max(0, tiles - (int)", "max(0, tiles / 2 - (int)", VALUES, TOGETHER
    ),
    "a slot that is never free again": phase_wgmma_fault(
        "if (!RESIDENT && lane == 0", "if (RESIDENT && lane == 0", "not all threads reach a barrier"
    ),
    "a slot that is free before its products are complete": phase_wgmma_fault(
        "if (LAGS) release();\n                    used_slot = weight_ring.place;",
        "used_slot = weight_ring.place;\n                    if (LAGS) release();",
        IN_USE,
    ),
    "x that is not published": phase_wgmma_fault(
        "s, left, thread);\n                        publish_shared_writes();", "s, left, thread);", "did not publish"
    ),
    "zeros behind the box that are not published": phase_wgmma_fault(
        "publish_shared_writes();\n    __syncthreads();", "__syncthreads();", "did not publish", PASSING, "tf32", LINE
    ),
    "items of the next box before x is staged": phase_wgmma_fault(
        "warps_sync(1, STAGERS);  // nobody", "// nobody", "with no barrier in between", DEEP
    ),
    "positions from the row's first one": phase_wgmma_fault(
        "+ h * p.x_stride[3] + w * p.x_stride[4];", "+ h * p.x_stride[3];", VALUES + "|heap-buffer-overflow"
    ),
    "items that are read too early": phase_wgmma_fault(
        "d, h, w, thread);\nwarps_sync(1, STAGERS);",
        "d, h, w, thread);",
        UNWRITTEN + "|with no barrier in between",
        DEEP,
    ),
    "a bias that is read too late": phase_wgmma_fault(
        "warps_sync(2 + threadIdx.x / STORERS, STORERS);  // the box before",
        "// the box before",
        "with no barrier in between",
    ),
    "a slice of sums that is read too early": phase_wgmma_fault(
        "turn_sums(slice, acc, eight);\n        warps_sync(barrier, STORERS);",
        "turn_sums(slice, acc, eight);",
        UNWRITTEN + "|with no barrier in between",
    ),
    "a wait for products with one group too many": phase_wgmma_fault(
        "wgmma_wait<1>();\n}", "wgmma_wait<2>();\n}", IN_USE + "|before the wait"
    ),
    "no wait for the last products": phase_wgmma_fault("if (LAGS) wgmma_wait<0>();", "", IN_USE + "|before the wait"),
    "a chain that is added before it is complete": phase_wgmma_fault(
        "wgmma_wait<1>();\n            collect",
        "wgmma_wait<2>();\n            collect",
        VALUES + "|before the wait",
        PASSING,
        "tf32x3",
    ),
    "a chain that does not start from zero": phase_wgmma_fault(
        "bool accumulate = false;", "bool accumulate = true;", VALUES + "|NaN|wrote", PASSING, "tf32x3"
    ),
    "a row of taps one row late": phase_wgmma_fault(
        "row_h * AxisH::HOP", "row_h * AxisH::HOP + 1", VALUES + "|" + UNFILLED
    ),
    "a phase that is not late": phase_wgmma_fault(
        "return phase < (int)((unsigned)pad % stride);", "return 0;", VALUES + "|nobody wrote"
    ),
    "weights of the next row of taps": phase_wgmma_fault(
        "row * (long long)SLOT", "(row + 1) * (long long)SLOT", VALUES + "|past an array|belong to no"
    ),
    "pieces of weights exchanged": phase_wgmma_fault(
        "PARTS + part) * OPERAND + i % 2 * COLUMNS]", "PARTS + part) * OPERAND + (1 - i % 2) * COLUMNS]", VALUES
    ),
    "one item of a box too few": phase_wgmma_fault(
        "(in_pairs(p) ? s.w / 2 + 1 : s.w);\n}", "(in_pairs(p) ? s.w / 2 + 1 : s.w) - 1;\n}", UNWRITTEN
    ),
    "<= for < at x's edge, wgmma": phase_wgmma_fault(
        "within(at_w, p.x_extent[2])", "within(at_w, p.x_extent[2] + 1)", VALUES + "|heap-buffer-overflow|belong to no"
    ),
    "<= for < at the output's edge, wgmma": phase_wgmma_fault(
        "within(w + t.w, p.out_extent[2])",
        "within(w + t.w, p.out_extent[2] + 1)",
        "writes byte .* of out|heap-buffer-overflow|belong to no",
    ),
    "a target that is not written": phase_wgmma_fault(
        "if (i + j >= TARGETS ||", "if (i + j >= TARGETS - 1 ||", "nobody wrote byte .* of out"
    ),
    "boxes that no worker waits for": copied_fault("                x_ring.wait_until_full();\n", "", UNFILLED),
    "no wait for a free stage of boxes": copied_fault(
        "ring.wait_until_free();\n            barrier_arrive_expecting(landed",
        "barrier_arrive_expecting(landed",
        IN_USE + "|arrivals|in_flight",
    ),
    "boxes from the first position": copied_fault("w = (int)b.w - REACH_W;\n    for", "w = (int)b.w;\n    for", VALUES),
    "boxes of the first channels": copied_fault("(int)p.c_in + chunk * CHUNK, w", "(int)p.c_in, w", VALUES),
    "bytes of boxes that nobody announced": copied_fault(
        "(unsigned)(s.d * s.h * s.w * ROW_BYTES)",
        "(unsigned)(s.d * s.h * s.w * ROW_BYTES / 2)",
        "bulk copies bring|arrivals of this phase",
    ),
    "boxes of the first slice": copied_fault(
        "SLIDES ? (int)slice_of(b, slice) : d, b.n",
        "SLIDES ? (int)slice_of(b, 0) : d, b.n",
        VALUES,
        COPIED_SLICES,
        SLICES_LAST,
    ),
    "rows of pieces where rows of channels are": copied_fault(
        "constexpr int NEXT_ROW = BOXED ? 2 * K_STEPS : 1;",
        "constexpr int NEXT_ROW = 1;",
        "a swizzled row from its middle on",
    ),
    "rows behind boxes that nobody wrote": copied_fault(
        "        stages[i / behind * plane + filled + i % behind] = Piece{{0, 0, 0, 0}};",
        ";",
        UNWRITTEN,
        COPIED,
        LINE_LAST,
    ),
    "boxes over the slots": copied_fault(
        "(round_up(before + slots",
        "(round_up(before + 0 * slots",
        IN_USE + "|" + VALUES + "|bulk copy",
    ),
    "no wait for a free stage of boxes to split": split_fault(
        "ring.wait_until_free();\n            barrier_arrive_expecting(landed",
        "barrier_arrive_expecting(landed",
        IN_USE + "|arrivals|in_flight",
    ),
    "boxes that are split before they have landed": split_fault(
        "            barrier_wait(landed + ring.place, ring.round & 1);\n", "", UNFILLED + "|in_flight|bulk copy"
    ),
    "boxes that are handed over as they come": split_fault(
        "            split_box(high, high", "            if (false) split_box(high, high", UNFILLED
    ),
    "parts that are not published": split_fault(
        "NEXT_ROW, thread);\npublish_shared_writes();", "NEXT_ROW, thread);", "did not publish"
    ),
    "a low part over the high one": split_fault(
        "low[first + i * SPLITTERS] = parts", "high[first + i * SPLITTERS] = parts", UNFILLED
    ),
    "the high part for both": split_fault("part_a * K_STEPS * 2 * plane", "0 * plane", VALUES),
    "a position that is not split": split_fault(
        "high + s.plane * NEXT_ROW, s.d * s.h * s.w * NEXT_ROW",
        "high + s.plane * NEXT_ROW, (s.d * s.h * s.w - 1) * NEXT_ROW",
        UNFILLED,
    ),
    "the first team's boxes awaited for each": split_fault(
        "split_boxes(ring, landed, own",
        "split_boxes(ring, weight_ring.free + RING, own",
        "arrivals|not all threads reach|bulk copies bring|" + UNFILLED,
        COPIED_IN_TURN,
        UNSTRIDED_LAST,
    ),
    "stages of the team before": split_fault(
        "x_ring.round = ring.round;\n",
        "",
        "arrivals|not all threads reach|bulk copies bring|in_flight|" + IN_USE,
        COPIED_IN_TURN,
        UNSTRIDED_LAST,
    ),
    "a team with the other one's stages": phase_wgmma_fault(
        "    x_ring = x_ring.of_team(team);\n", "", UNFILLED + "|not all threads reach|arrives at|" + VALUES, STAYING
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_caught(name: str) -> None:
    fault = FAULTS[name]
    sources = plant(kernel_sources(fault.file), fault.before, fault.after)
    with pytest.raises(AssertionError, match=fault.caught_by) as caught:
        fault.run(sources)
    if VALUES not in fault.caught_by and "nobody" not in fault.caught_by:
        assert f"in kernel {fault.file.removesuffix('.cu')}, block" in str(caught.value)


UNPLANTED = (
    "tap index off by one",
    "swapped fragment registers",
    "no wait for x",
    "a chain that does not start from zero",
    "a team with the other one's stages",
    "the first channel's bias",
)


@pytest.mark.parametrize("name", UNPLANTED)
def test_without_a_fault_nothing_is_caught(name: str) -> None:
    FAULTS[name].run(kernel_sources(FAULTS[name].file))


def test_a_ring_too_short_for_weights_that_stay_is_caught() -> None:
    with pytest.raises(AssertionError, match="not all threads reach a barrier"):
        run_phase_wgmma(kernel_sources("phase_wgmma.cu"), dataclasses.replace(STAYING, ring=8))


# ---- an index that overflows ---------------------------------------------------------------------------------------

INDEX_BITS = 12


def narrow_sources(kernel: str = "gather.cu") -> dict[str, str]:
    """Return a kernel with an index of few bits in place of its 32-bit one."""
    declared = f'#define INDEX_BITS {INDEX_BITS}\n#include "narrow_index.cuh"\ntypedef NarrowIndex Index;'
    sources = plant(kernel_sources(kernel), "typedef int Index;", declared)
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


# Of x and the result, elements, channels or images are more than 2**11 apart; those of a box are not.
FAR = {
    "rows": (case((2, 17, 3, 5, 9), 12, 3, 2, 1, 0), PASSING),
    "rows, all phases": (case((1, 17, 3, 5, 9), 12, (1, 3, 3), (1, 2, 2), (0, 1, 1)), STAYING),
    "runs": (case((1, 17, 3, 9, 9), 12, (1, 2, 4), (1, 2, 4)), PASSING),
    "channels last": (
        case((1, 20, 21, 2, 7), 20, 3, 1, 1, x_layout="channels_last", out_layout="channels_last"),
        dataclasses.replace(PASSING, tiles_c=3),
    ),
    "slides": (case((1, 17, 15, 9, 9), 12, 3, padding=1), dataclasses.replace(DEEP, slides=True, merge_d=True)),
    "images": (case((5, 9, 13, 17), 8, 3, 1, 1), PASSING),
}


def run_far(name: str, monkeypatch: pytest.MonkeyPatch, **macros: int) -> None:
    problem, tile = FAR[name]
    assert max(np.prod(problem.x_shape), np.prod(problem.out_shape)) > 2**INDEX_BITS
    sources = plant(
        narrow_sources("phase_wgmma.cu"),
        "OUTSIDE = (Index)(INDEX64 ? 1ll << 46 : -(1ll << 31));",
        "OUTSIDE = -(1ll << (INDEX_BITS - 1));",
    )
    for planner in (plan_phase_wgmma, plan_wgmma_boxes):
        monkeypatch.setattr(planner, "INDEX_LIMIT", 2 ** (INDEX_BITS - 1))
    planned = plan_with(tile)

    def with_room(*arguments: Any) -> plan.Plan:
        found = planned(*arguments)
        defines = tuple({**dict(found.defines), **macros}.items())
        # The stand-in takes more shared memory.
        return dataclasses.replace(found, shared_bytes=2 * found.shared_bytes, defines=defines)

    with on_host("phase_wgmma", WGMMA_DEVICE, "tf32", sources=sources, plan=with_room):
        check(problem, "float32", precision="tf32")


@pytest.mark.parametrize("name", FAR)
def test_offsets_of_wgmma_are_those_of_a_box(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run_far(name, monkeypatch)


def test_channels_that_are_too_far_apart_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AssertionError, match=f"overflows {INDEX_BITS} bits"):
        run_far("slides", monkeypatch, FAR_CHANNELS=0)


def test_planner_avoids_every_overflow() -> None:
    spec = Specialisation((2, 3), (2, 1), (1, 2), 3, 5, ("contiguous",), ("contiguous",))
    with on_host("gather", DEVICES[90], sources=narrow_sources()), pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "INDEX_LIMIT", 2 ** (INDEX_BITS - 1))

        @settings(max_examples=40)
        @given(problem=problems(spec, (40, 40)))
        def every_problem(problem: Problem) -> None:
            check(problem, "float32")

        every_problem()
