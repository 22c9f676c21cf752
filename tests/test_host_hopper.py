"""The host's stand-ins for Hopper's instructions: what they compute, and which misuse they catch."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from harness import check
from host.backend import launch, on_host
from host.build import kernel_sources, why_not
from host_phase_wgmma import PASSING, plan_with
from strategies import DTYPES, case
from test_host_faults import STAYING, VALUES, WGMMA_DEVICE, plant
from test_plan import problem_of

from cuconvt import plan_phase_wgmma
from cuconvt.plan import Plan

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))

FILE = "twins_hopper.cu"
TYPES = {"tf32": np.dtype(np.float32), "f16": np.dtype(np.float16), "bf16": np.dtype(DTYPES["bfloat16"])}


def place_rows(image: np.ndarray, rows: np.ndarray, start: int, piece: int, group: int) -> None:
    """Put a matrix into the bytes of shared memory, as a descriptor with these distances finds it."""
    halves = np.ascontiguousarray(rows).view(np.uint8).reshape(len(rows), 2, 16)
    for row, pieces in enumerate(halves):
        for i in range(2):
            at = start + row // 8 * group + row % 8 * 16 + i * piece
            image[at : at + 16] = pieces[i]


# Starts, distances between pieces and between groups of eight rows, in bytes: of A, then of B.
LAYOUTS = {
    "groups follow each other": ((0, 1024, 128), (2048, 2048, 128)),
    "groups apart, pieces within": ((0, 128, 256), (64 * 1024, 128, 256)),
    "a shifted start and rows of ten": ((48, 8192, 160), (16 * 1024 + 16, 4096 + 16, 128)),
    "at the end of shared memory": ((226 * 1024 - 1024, 1024, 128), (0, 2048, 128)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("entry", ["tf32_8", "tf32_128", "f16_24", "f16_128", "bf16_64"])
def test_wgmma_multiplies_matrices(entry: str, layout: str) -> None:
    name, columns = entry.split("_")[0], int(entry.split("_")[1])
    dtype, rng = TYPES[name], np.random.default_rng(0)
    depth = 32 // dtype.itemsize
    a, b = (rng.standard_normal((rows, depth)).astype(dtype) for rows in (64, columns))
    if name == "f16":  # denormals, and an infinity in one row
        a[3] = np.float16(3e-7)
        a[5, 2] = np.inf
    c, d = rng.standard_normal((64, columns)).astype(np.float32), np.empty((64, columns), np.float32)
    image = np.zeros(227 * 1024, np.uint8)
    for rows, where in zip((a, b), LAYOUTS[layout], strict=True):
        place_rows(image, rows, *where)
    numbers = dict(
        zip(("a", "ap", "ag", "b", "bp", "bg"), (n for where in LAYOUTS[layout] for n in where), strict=True)
    )
    arguments = {"image": image.view(np.uint32), "pieces": image.size // 16, **numbers, "c": c, "out": d}
    launch(FILE, f"multiply_{entry}", 128, arguments, shared_bytes=image.size)
    if name == "tf32":  # the low 13 bits of an operand are ignored
        a, b = ((matrix.view(np.uint32) & 0xFFFFE000).view(np.float32) for matrix in (a, b))
    exact = c + a.astype(np.float64) @ b.astype(np.float64).T
    np.testing.assert_allclose(d, exact.astype(np.float32), rtol=2**-22, atol=2**-22)


def test_wgmma_cuts_sums_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Towards zero: three quarters of the last place are lost, and a quarter below a number is a whole one."""
    a, b = (np.zeros((rows, 8), np.float32) for rows in (64, 8))
    a[:, 0], b[:, 0] = 1, [0.75 * 2.0**-23, -(2.0**-25), 2.0**-23, 0, np.inf, 2.0**127, -0.75 * 2.0**-23, 1]
    c, d = np.ones((64, 8), np.float32), np.empty((64, 8), np.float32)
    c[:, 5] = 2.0**127
    monkeypatch.setenv("HOST_CUTS_OFF", "1")
    image = np.zeros(4096, np.uint8)
    place_rows(image, a, 0, 1024, 128)
    place_rows(image, b, 2048, 1024, 128)
    numbers = {"a": 0, "ap": 1024, "ag": 128, "b": 2048, "bp": 1024, "bg": 128}
    arguments = {"image": image.view(np.uint32), "pieces": image.size // 16, **numbers, "c": c, "out": d}
    launch(FILE, "multiply_tf32_8", 128, arguments, shared_bytes=image.size)
    expected = [1, 1 - 2.0**-24, 1 + 2.0**-23, 1, np.inf, np.inf, 1 - 2.0**-23, 2]
    np.testing.assert_array_equal(d, np.float32([expected] * 64))


# Starts, distances between runs of eight places and between groups of 64 rows, in rows of 128 bytes: of A, then of B.
SWIZZLED = {
    "runs follow each other": ((0, 8, 0), (64, 8, 16)),
    "any row": ((3, 8, 0), (64 + 5, 9, 64)),
    "runs apart": ((7, 13, 0), (128 + 6, 21, 40)),
}


@pytest.mark.parametrize("layout", SWIZZLED)
def test_wgmma_multiplies_swizzled_matrices(layout: str) -> None:
    rng, dtype = np.random.default_rng(0), TYPES["bf16"]
    a, b = (rng.standard_normal((rows, 16)).astype(dtype) for rows in (64, 136))
    c, d = rng.standard_normal((64, 136)).astype(np.float32), np.empty((64, 136), np.float32)
    image = np.zeros((512, 8, 16), np.uint8)  # [row][piece]
    for matrix, (start, run, group) in zip((a, b), SWIZZLED[layout], strict=True):
        for k, eight in np.ndindex(16, len(matrix) // 8):
            row = start + k % 8 + k // 8 * run + eight // 8 * group
            pieces = np.ascontiguousarray(matrix[8 * eight : 8 * eight + 8, k]).view(np.uint8)
            image[row, eight % 8 ^ row % 8] = pieces
    numbers = [128 * number for where in SWIZZLED[layout] for number in where]
    arguments = dict(zip(("a", "ar", "ag", "b", "br", "bg"), numbers, strict=True))
    arguments = {"image": image.view(np.uint32), "pieces": image.size // 16, **arguments, "c": c, "out": d}
    launch(FILE, "swizzled_bf16_136", 128, arguments, shared_bytes=image.size)
    exact = c + a.astype(np.float64) @ b.astype(np.float64).T
    np.testing.assert_allclose(d, exact.astype(np.float32), rtol=2**-22, atol=2**-22)


@pytest.mark.parametrize(("start", "eight"), [(0, 8), (3, 8), (5, 11)], ids=["aligned", "any row", "eights apart"])
@pytest.mark.parametrize("row_bytes", [32, 64, 128])
def test_wgmma_multiplies_swizzled_rows(row_bytes: int, start: int, eight: int) -> None:
    """Of each 32 bytes of rows: the first piece of one is at another place than in the next row or rows."""
    rng, dtype, places = np.random.default_rng(0), TYPES["bf16"], row_bytes // 16
    a, b = (rng.standard_normal((rows, 16)).astype(dtype) for rows in (64, 24))
    c = rng.standard_normal((64, 24)).astype(np.float32)
    exact = c + a.astype(np.float64) @ b.astype(np.float64).T
    for step in range(row_bytes // 32):
        image = np.zeros(2048 * 16, np.uint8).reshape(-1, 16)  # [place]
        for row, piece in np.ndindex(64, 2):
            at = (start + row // 8 * eight + row % 8) * row_bytes + (2 * step + piece) * 16
            at ^= at // 128 % places * 16
            image[at // 16] = np.ascontiguousarray(a[row, 8 * piece : 8 * piece + 8]).view(np.uint8)
        b_start = 1024 * 16
        for row, piece in np.ndindex(24, 2):
            values = np.ascontiguousarray(b[row, 8 * piece : 8 * piece + 8]).view(np.uint8)
            image[b_start // 16 + piece * 24 + row] = values
        d = np.empty((64, 24), np.float32)
        arguments = {"image": image.view(np.uint32), "pieces": len(image), "a": start * row_bytes + 32 * step}
        arguments |= {"eight": eight, "b": b_start, "bp": 24 * 16, "bg": 128, "c": c, "out": d}
        launch(FILE, f"rows_of_{row_bytes}", 128, arguments, shared_bytes=image.size)
        np.testing.assert_allclose(d, exact.astype(np.float32), rtol=2**-22, atol=2**-22)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("entry", ["f16_24", "bf16_128"])
def test_wgmma_multiplies_transposed_matrices(entry: str, layout: str) -> None:
    name, columns = entry.split("_")[0], int(entry.split("_")[1])
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-9, 10, (rows, 16)).astype(TYPES[name]) for rows in (64, columns))
    image = np.zeros(227 * 1024, np.uint8)
    for rows, where in zip((a, b), LAYOUTS[layout], strict=True):
        # A piece holds eight rows: of eight places along K they take the place of as many rows of a piece each.
        turned = rows.reshape(-1, 8, 2, 8).transpose(0, 3, 2, 1).reshape(-1, 16)
        place_rows(image, turned, *where)
    numbers = dict(
        zip(("a", "ap", "ag", "b", "bp", "bg"), (n for where in LAYOUTS[layout] for n in where), strict=True)
    )
    c, d = rng.integers(-9, 10, (64, columns)).astype(np.float32), np.empty((64, columns), np.float32)
    arguments = {"image": image.view(np.uint32), "pieces": image.size // 16, **numbers, "c": c, "out": d}
    launch(FILE, f"transposed_{entry}", 128, arguments, shared_bytes=image.size)
    assert np.array_equal(d, c + a.astype(np.float32) @ b.astype(np.float32).T)


@pytest.mark.parametrize("where", [(0, 128, 256), (48, 1280, 160), (16 * 1024, 4096, 128)])
@pytest.mark.parametrize("entry", ["tf32_40", "f16_24", "bf16_64"])
def test_wgmma_multiplies_registers(entry: str, where: tuple[int, int, int]) -> None:
    name, columns = entry.split("_")[0], int(entry.split("_")[1])
    dtype, rng = TYPES[name], np.random.default_rng(0)
    depth = 32 // dtype.itemsize
    a, b = (rng.integers(-9, 10, (rows, depth)).astype(dtype) for rows in (64, columns))
    image, d = np.zeros(227 * 1024, np.uint8), np.empty((64, columns), np.float32)
    if name == "tf32":  # the low 13 bits of an operand are ignored
        of_a, of_b = ((matrix.view(np.uint32) | 0x1FFF).view(np.float32) for matrix in (a, b))
    else:
        of_a, of_b = a, b
    place_rows(image, of_b, *where)
    # Thread 32 w + 4 g + t has words t and t + 4 of rows 16 w + g and 16 w + g + 8.
    words = np.ascontiguousarray(of_a).view(np.uint32).reshape(4, 2, 8, 2, 4).transpose(0, 2, 4, 3, 1)
    numbers = dict(zip(("b", "piece", "group"), where, strict=True))
    arguments = {"image": image.view(np.uint32), "pieces": image.size // 16, "a": np.ascontiguousarray(words)}
    launch(FILE, f"registers_{entry}", 128, {**arguments, **numbers, "out": d}, shared_bytes=image.size)
    assert np.array_equal(d, a.astype(np.float32) @ b.astype(np.float32).T)


def triple(sources: dict[str, str]) -> None:
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-9, 10, (rows, 16)).astype(np.float16) for rows in (64, 8))
    pieces = {name: np.ascontiguousarray(m.reshape(-1, 2, 8).swapaxes(0, 1)) for name, m in (("a", a), ("b", b))}
    d = np.empty((64, 8), np.float32)
    launch(FILE, "triple", 128, {**pieces, "out": d}, sources=sources)
    assert np.array_equal(d, 3 * (a.astype(np.float32) @ b.astype(np.float32).T)), "wrong values"


def test_operands_in_static_shared_memory() -> None:
    triple(kernel_sources(FILE))


@pytest.mark.parametrize(
    ("before", "after", "caught_by"),
    [
        ("    wgmma_fence();  // the sums were used\n", "", "without a wgmma_fence since its accumulators were used"),
        (
            "sizeof of_a + sizeof of_b",
            "sizeof of_a",
            "before a thread waits for the bulk copies .* expects 0 bytes, of which 256 are copied",
        ),
        ("    barrier_wait(&arrived, 0);\n", "", VALUES + "|before a thread waits"),
    ],
)
def test_misuse_in_static_shared_memory_is_caught(before: str, after: str, caught_by: str) -> None:
    with pytest.raises(AssertionError, match=caught_by):
        triple(plant(kernel_sources(FILE), before, after))


# ---- a kernel with roles ---------------------------------------------------------------------------------------------

STEPS = 7


def run_roles(sources: dict[str, str]) -> None:
    """Run the kernel in all orders of the threads and compare its result."""
    rng = np.random.default_rng(0)
    x, weights = (rng.integers(-9, 10, (STEPS, n, 8)).astype(np.float32) for n in (128, 16))
    exact = np.einsum("srk,sck->rc", x, weights)
    pieces = {
        name: np.ascontiguousarray(m.reshape(STEPS, -1, 2, 4).swapaxes(1, 2))
        for name, m in (("x", x), ("weights", weights))
    }
    for order in range(3):
        out = np.empty((128, 16), np.float32)
        launch(FILE, "roles", 384, {**pieces, "out": out, "steps": STEPS}, 10240, sources, order)
        assert np.array_equal(out, exact), "wrong values"


def test_roles_without_a_fault() -> None:
    run_roles(kernel_sources(FILE))


WAIT_FOR_ALL = "    wgmma_wait<0>();\n\n    warps_sync(1, 256);"
LAGGING_RELEASE = """        wgmma_wait<1>();
        if (step && lane == 0) barrier_arrive(empty + before);"""
BEFORE_WEIGHTS = """                if (round) barrier_wait(empty + stage, (round - 1) & 1);
                barrier_arrive_expecting"""
ORDERED = "with no barrier in between|before the wait that covers|with no wait for it and barrier in between"
UNFILLED = ORDERED + "|which no thread of the block wrote"

# A replacement in the source and the message that must follow.
FAULTS = {
    "no wait for the last product": (
        WAIT_FOR_ALL,
        "    warps_sync(1, 256);",
        "a wgmma of threads (0-127|128-255) read",
    ),
    "a wait with one group too many under way": (
        LAGGING_RELEASE,
        LAGGING_RELEASE.replace("<1>", "<2>"),
        "a wgmma of threads (0-127|128-255) read with no wait",
    ),
    "sums read before the wait": (
        "        wgmma_commit();\n        wgmma_wait<1>();\n",
        '        wgmma_commit();\n        wgmma_wait<1>();\n        if (sum[0] != sum[0]) printf(""), sum[0] = 0;\n',
        "accumulator .* written before the wait",
    ),
    "no commit": ("        wgmma_commit();\n        wgmma_wait<1>", "        wgmma_wait<1>", ORDERED),
    "no fence": ("    wgmma_fence();\n    for (int step", "    for (int step", "without a wgmma_fence"),
    "writes that are not published": (
        "                publish_shared_writes();\n                barrier_arrive",
        "                barrier_arrive",
        "did not publish between its write and a barrier",
    ),
    "writes published after the barrier": (
        "                publish_shared_writes();\n                barrier_arrive(full + stage);",
        "                barrier_arrive(full + stage);\n                publish_shared_writes();",
        "did not publish between its write and a barrier",
    ),
    "no wait for the stage to be full": (
        "        barrier_wait(full + stage, round & 1);\n",
        "",
        UNFILLED,
    ),
    "no wait for the stage to be empty of x": (
        "                if (round) barrier_wait(empty + stage, (round - 1) & 1);\n                for",
        "                for",
        "arrives at the mbarrier|with no wait for it|with no barrier in between|a GPU may miss it",
    ),
    "no wait for the stage to be empty of weights": (
        BEFORE_WEIGHTS,
        BEFORE_WEIGHTS.split("\n")[1],
        "arrives at the mbarrier|with no wait for it|a bulk copy wrote",
    ),
    "a stage released before the wait": (
        LAGGING_RELEASE,
        "        if (step && lane == 0) barrier_arrive(empty + before);\n        wgmma_wait<1>();",
        "with no wait for it",
    ),
    "the stage in use released": (
        "if (step && lane == 0) barrier_arrive(empty + before)",
        "if (lane == 0) barrier_arrive(empty + stage)",
        "with no wait for it",
    ),
    "bytes announced that nobody copies": (
        "barrier_arrive_expecting(full + stage, sizeof to->weights)",
        "barrier_arrive_expecting(full + stage, sizeof to->weights + 16)",
        "not all threads reach a barrier: .*at the mbarrier at .* lacks 0 of 97 arrivals and 16 of 528 bytes, 0-255",
    ),
    "fewer bytes announced than copied": (
        "barrier_arrive_expecting(full + stage, sizeof to->weights)",
        "barrier_arrive_expecting(full + stage, sizeof to->weights - 16)",
        "bulk copies bring 512 bytes .*, which expects 496",
    ),
    "bytes not announced": (
        "barrier_arrive_expecting(full + stage, sizeof to->weights)",
        "barrier_arrive(full + stage)",
        "bulk copies bring 512 bytes .*, which expects 0",
    ),
    "a bulk copy to a misaligned address": (
        "copy_bulk(to->weights, ",
        "copy_bulk((char*)to->weights + 8, ",
        "misaligned address or size",
    ),
    "a bulk copy from a misaligned address": (
        "weights + step * 2 * COLUMNS, ",
        "(char*)(weights + step * 2 * COLUMNS) + 4, ",
        "misaligned address or size",
    ),
    "a bulk copy of a misaligned size": (
        "COLUMNS, sizeof to->weights, full",
        "COLUMNS, sizeof to->weights - 8, full",
        "misaligned address or size",
    ),
    "a bulk copy from beyond an array": (
        "weights + step * 2 * COLUMNS, ",
        "weights + (step + 1) * 2 * COLUMNS, ",
        "past its end|past an array|belong to no argument",
    ),
    "a bulk copy beyond shared memory": ("copy_bulk(to->weights, ", "copy_bulk(to->weights + 400, ", "past its end"),
    "a bulk copy that nobody waits for": (
        "    if (warp >= 8) {\n",
        "    steps = STAGES;\n    if (warp < 8) return;\n    if (warp >= 8) {\n",
        "before a thread waits for the bulk copies",
    ),
    "one arrival too few": (
        "                barrier_arrive(full + stage);",
        "                if (threadIdx.x != 300) barrier_arrive(full + stage);",
        "lacks 1 of 97 arrivals and 0 of 512 bytes, 0-255",
    ),
    "one arrival too many": (
        "                barrier_arrive(full + stage);",
        "                for (int i = 0; i <= (threadIdx.x == 300); ++i) barrier_arrive(full + stage);",
        "all 97 arrivals of this phase are in|not all threads reach|with no barrier in between|not publish|no wait",
    ),
    "the wrong parity": ("barrier_wait(full + stage, round & 1)", "barrier_wait(full + stage, ~round & 1)", UNFILLED),
    "a barrier that nobody initialised": ("            barrier_init(empty + i, 8);\n", "", "which nobody initialised"),
    "a barrier initialised twice": ("barrier_init(empty + i, 8)", "barrier_init(full + i, 8)", "is initialised twice"),
    "a barrier written over": (
        "    take_registers<232>();\n",
        "    take_registers<232>();\n    if (threadIdx.x == 7) empty[1] = 0;\n",
        "which was written over",
    ),
    "barriers used before barrier_init_done": (
        "        }\n        barrier_init_done();\n",
        "        }\n",
        "before barrier_init_done",
    ),
    "barriers used before the block's barrier": (
        "    }\n    __syncthreads();\n\n    if (warp >= 8)",
        "    }\n    if (warp >= 8)",
        "another thread initialised with no barrier in between|which nobody initialised",
    ),
    "warps that multiply different columns": (
        "describe(stages[stage].weights, 16 * COLUMNS, 128)",
        "describe(stages[stage].weights, 16 * COLUMNS, 128) + (warp == 2)",
        "issue different wgmma",
    ),
    "rows one late": (
        "warp / 4 * 64, 16 * ROWS",
        "warp / 4 * 63, 16 * ROWS",
        VALUES,
    ),
    "rows beyond the stages": (
        "warp / 4 * 64, 16 * ROWS",
        "warp / 4 * 640, 16 * ROWS",
        "a wgmma reads shared memory at byte .*, which no thread of the block wrote|a wgmma reads .* past its end",
    ),
    "pieces too close together": (
        "warp / 4 * 64, 16 * ROWS",
        "warp / 4 * 64, 16 * (ROWS - 1)",
        VALUES,
    ),
    "operands turned over while they are in use": (
        "    warps_sync(1, 256);  // nobody multiplies any more\n",
        "",
        "with no wait for it and barrier in between",
    ),
    "sums turned with no barrier": (
        "    warps_sync(1, 256);\n    for (int i = threadIdx.x",
        "    for (int i = threadIdx.x",
        UNFILLED,
    ),
    "a barrier of too many warps": (
        "    warps_sync(1, 256);  //",
        "    warps_sync(1, 288);  //",
        "at barrier 1 of 288 threads 0-255",
    ),
    "a warp that waits for no product": (
        LAGGING_RELEASE,
        LAGGING_RELEASE.replace("wgmma_wait", "if (warp != 3) wgmma_wait"),
        "wait for different wgmma|with no wait for it|in wgmma_wait 0-95",
    ),
    "registers taken by one warp": (
        "    take_registers<232>();",
        "    if (warp == 0) take_registers<232>();",
        "different numbers of registers",
    ),
    "more registers than there are": ("take_registers<232>", "take_registers<256>", "more than a multiprocessor has"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_misuse_is_caught(name: str) -> None:
    before, after, caught_by = FAULTS[name]
    with pytest.raises(AssertionError, match=caught_by) as caught:
        run_roles(plant(kernel_sources(FILE), before, after))
    if caught_by != VALUES:
        assert "in kernel roles, block" in str(caught.value)


# ---- results written as runs along W ---------------------------------------------------------------------------------

SLIDING = dataclasses.replace(STAYING, tiles_c=1, ring=3, resident=False, take_turns=False, slides=True)
ALL_PHASES = dataclasses.replace(PASSING, tiles_c=1, all_phases=True)
MERGED = dataclasses.replace(PASSING, merge_w=True)

# A problem, the tile, dtype and precision, how many outputs are written at a time, and other fields of `plan_with`.
RUNS = {
    "no overlap": (case((2, 17, 3, 5, 9), 19, 2, 2, has_bias=True), MERGED, "float32", "tf32", 2),
    "merged taps with dead phases between": (
        case((2, 9, 7, 23), 12, (3, 2), (1, 8), dilation=(1, 7)),
        MERGED,
        "bfloat16",
        None,
        8,
    ),
    "late phases": (case((2, 17, 7, 20), 12, 3, 2, 1, 1, has_bias=True), PASSING, "float32", "tf32x3", 2),
    "late phases of all axes": (case((1, 9, 3, 5, 18), 7, 3, 2, 1, 1), ALL_PHASES, "bfloat16", None, 2),
    "every other phase dead": (
        case((2, 8, 5, 6, 11), 9, 3, 2, 1, 1, 2, 2, has_bias=True),
        ALL_PHASES,
        "float16",
        None,
        2,
    ),
    "blocks of dead phases": (
        case((2, 9, 5, 6, 11), 9, 3, 2, 1, 1, dilation=2, has_bias=True),
        PASSING,
        "bfloat16",
        None,
        2,
    ),
    "slides": (case((2, 17, 7, 5, 9), 9, (3, 3, 4), 2, (1, 1, 1), has_bias=True), SLIDING, "float32", "tf32", 2),
    "two stores a position": (case((3, 24, 37), 16, 16, 8, ((4, 0),), has_bias=True), PASSING, "float32", "tf32x3", 4),
    "groups": (case((2, 24, 6, 31), 20, 4, 4, (1, 2), groups=2), PASSING, "float16", None, 4),
    "some of a position": (
        case((2, 8, 5, 21), 10, 5, (1, 12), 1, (0, 1), has_bias=True),
        PASSING,
        "float32",
        "tf32",
        4,
    ),
    "parts of sectors": (case((2, 8, 5, 21), 10, 5, (1, 6), 1, (0, 3), has_bias=True), PASSING, "float32", "tf32", 1),
    "patches": (case((1, 9, 16, 24), 17, 4, 2, 1), PASSING, "float16", None, 2),
}


def check_runs(name: str, sources: dict[str, str] | None = None) -> set[int]:
    """Run a problem of the table, and return how many outputs were written at a time."""
    problem, tile, dtype, precision, _ = RUNS[name]
    seen = set()

    def plan(*arguments: Any) -> Plan:
        planned = plan_with(tile, name == "patches")(*arguments)
        seen.add(dict(planned.defines)["OUT_RUN"])
        return planned

    with on_host("phase_wgmma", WGMMA_DEVICE, precision, sources=sources, plan=plan):
        check(problem, dtype, precision=precision)
    return seen


@pytest.mark.parametrize("name", RUNS)
def test_runs_along_w(name: str) -> None:
    assert check_runs(name) == {RUNS[name][-1]}


RUN_FAULTS = {
    "the phases of a run in another order": ("(FIRST_PHASE_W + first + j)", "(FIRST_PHASE_W + first + j + 1)", VALUES),
    "a run one element further": (
        "at = worked_out(to + first);",
        "at = worked_out(to + first + 1);",
        "misaligned address",
    ),
    "one channel too few": ("if (c * 8 + i < there)", "if (c * 8 + i + 1 < there)", "nobody wrote byte .* of out"),
    "one channel too many": (
        "if (c * 8 + i < there)",
        "if (c * 8 + i <= there)",
        "writes byte .* of out|heap-buffer-overflow|belong to no",
    ),
    "a run at the output's edge": (
        "const int there = within(ow + first, p.out_extent[2]) ? left : 0;",
        "const int there = left;",
        "writes byte .* of out|heap-buffer-overflow|belong to no",
    ),
    "channels in another order": ("at + (c * 8 + i) *", "at + (c * 8 + 1 - i) *", VALUES),
}


@pytest.mark.parametrize("name", RUN_FAULTS)
def test_faults_of_runs_are_caught(name: str) -> None:
    before, after, caught_by = RUN_FAULTS[name]
    problem = "two stores a position" if "edge" in name else "late phases"
    with pytest.raises(AssertionError, match=caught_by):
        check_runs(problem, plant(kernel_sources("phase_wgmma.cu"), before, after))


# ---- boxes of phases that differ in taps -----------------------------------------------------------------------------

# Those with more taps first, in rounds to and fro: a problem, and multiprocessors.
UNEVEN = {
    "rows": (case((2, 17, 7, 40), 19, 3, 2, 1, 1, has_bias=True), 3),
    "planes and rows": (case((3, 9, 3, 5, 17), 7, (3, 5, 4), 2, (1, 2, 1), has_bias=True), 4),
    "groups": (case((2, 18, 6, 5, 9), 22, (1, 3, 2), (2, 2, 1), groups=2, has_bias=True), 3),
    "dead phases": (case((2, 9, 5, 6, 11), 9, 3, 2, 1, 1, dilation=(1, 2, 1), has_bias=True), 2),
}


def check_uneven(name: str, sources: dict[str, str] | None = None) -> None:
    problem, multiprocessors = UNEVEN[name]
    device = dataclasses.replace(WGMMA_DEVICE, multiprocessors=multiprocessors)
    rounds = []

    def plan(*arguments: Any) -> Plan:
        planned = plan_with(PASSING)(*arguments)
        fields = problem_of(planned)
        assert fields["out_vector"] == (1,)
        rounds.append(fields["blocks"][0] / planned.grid)
        return planned

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan_phase_wgmma, "takes_longest_first", lambda *_: True)
        with on_host("phase_wgmma", device, "tf32x3", sources=sources, plan=plan):
            check(problem, "float32", precision="tf32x3")
    assert min(rounds) > 2


@pytest.mark.parametrize("name", UNEVEN)
def test_phases_with_more_taps_come_first(name: str) -> None:
    check_uneven(name)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("boxes -= index * of_phase;", ""),
        ("take_phases(b, index);\n    }\n    b.w", "b.phase_h = b.phase_d = 0;\n    }\n    b.w"),
        ("(blocks - 1 - index % blocks) + 1 : blocks", "(blocks - index % blocks) + 1 : blocks"),
    ],
    ids=["boxes", "phases", "rounds"],
)
def test_a_fault_of_their_order_is_caught(before: str, after: str) -> None:
    with pytest.raises(AssertionError, match="nobody wrote byte|which thread|belong to no|" + VALUES):
        check_uneven("planes and rows", plant(kernel_sources("phase_wgmma.cu"), before, after))


# ---- columns that are cut --------------------------------------------------------------------------------------------

# A problem whose images are a column each, multiprocessors, and of a set in its plan: rounds of whole columns, columns
# that are left, their parts, blocks without a part, and in how many rounds these take whole rests of columns.
CUT = {
    "parts": (case((8, 7, 16, 5, 9), 8, 3, has_bias=True), 6, (1, 2, 6, 0, 0)),
    "rests": (case((5, 7, 20, 5, 9), 8, 3, padding=1, has_bias=True), 7, (0, 5, 5, 2, 2)),
    "all phases": (case((5, 7, 20, 3, 7), 7, (3, 3, 4), 2, (1, 1, 1), has_bias=True), 7, (0, 5, 5, 2, 2)),
    "sets": (case((3, 14, 21, 5, 9), 16, 3, padding=(1, 0, 1), groups=2), 10, (0, 3, 3, 2, 1)),
}


def check_cut(name: str, resident: bool, last: bool, sources: dict[str, str] | None = None) -> set[tuple[int, ...]]:
    """Run a problem of the table, and return what its plans have of the table's numbers."""
    problem, multiprocessors, _ = CUT[name]
    if last:
        problem = dataclasses.replace(problem, x_layout="channels_last", out_layout="channels_last")
    device = dataclasses.replace(WGMMA_DEVICE, multiprocessors=multiprocessors)
    seen = set()

    def plan(*arguments: Any) -> Plan:
        planned = plan_with(dataclasses.replace(SLIDING, resident=resident, ring=9 if resident else 3))(*arguments)
        whole, _, left, _, parts, others, _, rounds, _ = problem_of(planned)["shares"]
        seen.add((whole // planned.grid, left, parts, others, rounds))
        return planned

    with on_host("phase_wgmma", device, "tf32", sources=sources, plan=plan):
        check(problem, "float32", precision="tf32")
    return seen


@pytest.mark.parametrize(("resident", "last"), [(False, False), (True, True)], ids=["passing", "staying"])
@pytest.mark.parametrize("name", CUT)
def test_columns_that_are_cut(name: str, resident: bool, last: bool) -> None:
    assert check_cut(name, resident, last) == {CUT[name][-1]}


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("parts", "first = of_set / left * part", "first = of_set % left * part"),
        ("rests", "column = round * others + other, first", "column = round + other, first"),
        ("rests", "first = rest + other / last * rest_part", "first = rest"),
        ("sets", "whole + column * sets + set", "whole + column * sets"),
    ],
    ids=["parts", "rounds", "rests", "sets"],
)
def test_a_fault_of_columns_is_caught(name: str, before: str, after: str) -> None:
    with pytest.raises(
        AssertionError, match="nobody wrote byte|which thread|belong to no|writes byte|barrier|" + VALUES
    ):
        check_cut(name, True, False, plant(kernel_sources("phase_wgmma.cu"), before, after))
