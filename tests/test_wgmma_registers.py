"""Registers with A of a wgmma are read until the wait for it: no instruction before the wait may write to them.

The compiler does not see to that. A value that is loaded anew in each round of a loop has the same register in all of
them; if it is A as it was loaded, a load before the wait is a write to registers in use. PTX shows it, without a GPU.
"""

from __future__ import annotations

import re

import pytest
from described import DEVICES, geometry_of, layout_of
from fixed_cases import FIXED
from strategies import case
from test_host_faults import plant

from cuconvt import compile as compiler
from cuconvt import plan_correlate_rows as rows
from cuconvt import plan_disjoint as disjoint
from cuconvt import plan_phase_rows as phase_rows
from cuconvt.compile import compile_kernel
from cuconvt.plan import Plan
from cuconvt.plan_correlate_disjoint import plan_correlate_disjoint
from cuconvt.plan_weight_gradient_tma import plan_weight_gradient_tma
from cuconvt.plan_weight_gradient_tma_work import Tile as TileOfBoxes
from cuconvt.plan_weight_gradient_wgmma import Tile, plan_weight_gradient_wgmma

pytest.importorskip("cupy", reason="CuPy, which finds NVRTC, is not installed")

OPERAND_A = re.compile(r"wgmma\.mma_async\S* \{[^}]*\}, \{([^}]*)\}")
WAIT = re.compile(r"wgmma\.wait_group\S* (\d+);")
BRANCH = re.compile(r"(@!?%p\d+ )?bra(?:\.uni)? *\t?(\$\w+);")
RESULT = re.compile(r"(?:@!?%p\d+ )?[a-z]\S*\s+(\{[^}]*\}|%r\d+)")
# Neighbouring positions read neighbouring elements of y, so that some words are A as they were loaded; in the third
# problem, of stride 2, because of its dilation.
TILES = {
    "kb61": (Tile(1, 16, 3, 1, 3, 6, 2), Tile(3, 16, 3, 3, 3, 6, 1), Tile(2, 24, 3, 3, 3, 6, 1)),
    "kb58": (Tile(1, 16, 3, 1, 7, 4, 2), Tile(3, 16, 3, 2, 4, 4, 1, 2)),
    "kb77": (Tile(1, 16, 1, 3, 3, 4, 3), Tile(1, 8, 3, 3, 3, 4, 2)),
    "rows in boxes": (Tile(1, 16, 3, 1, 3, 6, 2, stages=3, x_runs=8),),
}


# Of TF32 each word of A is rounded after the load.
TILES_TF32 = {
    "kb61": (Tile(1, 16, 3, 1, 3, 6, 2), Tile(3, 16, 3, 3, 3, 6, 1), Tile(2, 40, 1, 3, 3, 16, 1)),
    "kb58": (Tile(1, 16, 3, 1, 7, 4, 2), Tile(3, 16, 3, 2, 4, 4, 1, 2)),
    "gan_3d": (Tile(2, 8, 4, 4, 4, 11, 1), Tile(1, 32, 1, 1, 2, 8, 3)),
    "vocoder_1d": (Tile(2, 32, 1, 1, 4, 11, 1, 4),),
    "planes in boxes": (Tile(1, 32, 1, 2, 2, 6, 2, stages=3, x_runs=4),),
}
# Rows of both arrays that copies bring.
BROUGHT = {
    "rows in boxes": case((1, 32, 8, 16, 64), 32, 3, padding=1),
    "planes in boxes": case((1, 32, 8, 16, 24), 32, 2, 2),
}
# Two taps of stride 2 are A as they were loaded; others are selected from two words, or rounded, but where copies of
# boxes have rounded them.
ROWS = {
    "k2s2": case((1, 64, 9, 9, 9), 32, 2, 2, output_padding=1),
    "k3s2": case((1, 64, 9, 9, 9), 32, 3, 2, 1),
    "k4s4": case((1, 24, 9, 9), 48, 4, 4, output_padding=1),
    "k2s2 in boxes": case((1, 64, 16, 16, 16), 32, 2, 2),
    "k3s2 in boxes": case((1, 64, 16, 16, 16), 32, 3, 2, 1, 1),
    "k4s4 in boxes": case((1, 24, 16, 16), 48, 4, 4),
}
TILES_OF_ROWS = [
    (name, dtype, rows.Tile(workers, 1, tiles_m, 8, False, k_steps, 4, 3, False, False, False, 3 - workers))
    for name in ROWS
    for dtype, workers, tiles_m, k_steps in (("bfloat16", 1, 2, 2), ("bfloat16", 2, 1, 4), ("float32", 2, 2, 4))
]
# Of TF32 words are A as they were loaded, but at the ends of a plane's rows.
PHASE_ROWS = {
    "k2s2": case((1, 64, 8, 8, 8), 32, 2, 2),
    "k3s2": case((1, 64, 16, 16, 16), 32, 3, 2, 1, 1),
    "k3s1": case((1, 64, 16, 16), 48, 3, padding=1),
    "k4s2": case((1, 64, 16, 16), 32, 4, 2, 1),
}
# Workers, tiles, and steps along K.
TILES_OF_PHASE_ROWS = [
    (name, dtype, precision, (3 - blocks, tiles_m, k_steps))
    for name in PHASE_ROWS
    for dtype, precision, blocks, tiles_m, k_steps in (
        ("bfloat16", None, 2, 2, 2),
        ("bfloat16", None, 1, 1, 4),
        ("float32", "tf32", 2, 1, 4),
        ("float32", "tf32", 1, 2, 2),
        ("float32", "tf32x3", 1, 1, 2),
    )
]
ALL = [
    (name, dtype, tile)
    for dtype, tiles in (("bfloat16", TILES), ("float32", TILES_TF32))
    for name, of_problem in tiles.items()
    for tile in of_problem
]


def plan_of(name: str, dtype: str, tile: Tile) -> Plan:
    geometry, precision = geometry_of((FIXED | BROUGHT)[name]), "tf32" if dtype == "float32" else None
    plan = plan_weight_gradient_wgmma(geometry, dtype, layout_of(geometry), precision, DEVICES[90], tile)
    assert isinstance(plan, Plan), plan
    assert bool(plan.maps) == (name in BROUGHT)
    return plan


def plan_of_rows(name: str, dtype: str, tile: rows.Tile) -> Plan:
    geometry, precision = geometry_of(ROWS[name]), "tf32" if dtype == "float32" else None
    plan = rows.plan_correlate_rows(geometry, dtype, layout_of(geometry), precision, DEVICES[90], tile)
    assert isinstance(plan, Plan), plan
    assert bool(plan.maps) == ("boxes" in name)
    return plan


def plan_of_phase_rows(name: str, dtype: str, precision: str | None, tile: tuple[int, int, int]) -> Plan:
    geometry, (workers, tiles_m, k_steps) = geometry_of(PHASE_ROWS[name]), tile
    whole = phase_rows.Tile(workers, 1, tiles_m, 2, False, k_steps, 3, 3, False, False, False, 3 - workers, boxed=True)
    plan = phase_rows.plan_phase_rows(geometry, dtype, layout_of(geometry), precision, DEVICES[90], whole)
    assert isinstance(plan, Plan), plan
    return plan


def written_before_the_wait(plan: Plan) -> set[str]:
    """Follow all ways from each wgmma of a kernel to its wait; return what is written there and was A.

    A wait leaves so many groups under way, the newest ones: groups that were committed after the wgmma's are counted.
    """
    code = compile_kernel(f"{plan.kernel}.cu", "compute_90a", plan.defines).code.decode()
    entry = code.split(f".entry {plan.kernel}(")[1].split(".entry")[0]
    lines = [line.strip() for line in entry.splitlines()]
    labels = {line[:-1]: index for index, line in enumerate(lines) if re.fullmatch(r"\$\w+:", line)}
    found: set[str] = set()
    seen: set[tuple[int, frozenset[str], int]] = set()
    ways = [
        (index + 1, frozenset(re.findall(r"%r\d+", match[1])), 0)
        for index, line in enumerate(lines)
        if (match := OPERAND_A.match(line))
    ]
    assert ways, "a kernel without A in registers"
    while ways:
        index, in_use, committed = ways.pop()
        while index < len(lines) and (index, in_use, committed) not in seen:
            seen.add((index, in_use, committed))
            line = lines[index]
            committed += line.startswith("wgmma.commit_group")
            wait = WAIT.match(line)
            if (wait and committed > int(wait[1])) or line == "ret;":
                break
            if branch := BRANCH.match(line):
                ways.append((labels[branch[2]], in_use, committed))
                if branch[1] is None:
                    break
            elif not line.startswith(("st.", "wgmma.")) and (result := RESULT.match(line)):
                found |= in_use & set(re.findall(r"%r\d+", result[1]))
            index += 1
    return found


@pytest.mark.parametrize(("name", "dtype", "tile"), ALL)
def test_registers_of_a_are_left_alone(name: str, dtype: str, tile: Tile) -> None:
    assert not written_before_the_wait(plan_of(name, dtype, tile))


@pytest.mark.parametrize(("name", "dtype", "tile"), TILES_OF_ROWS)
def test_registers_of_rows_are_left_alone(name: str, dtype: str, tile: rows.Tile) -> None:
    assert not written_before_the_wait(plan_of_rows(name, dtype, tile))


@pytest.mark.parametrize(("name", "dtype", "precision", "tile"), TILES_OF_PHASE_ROWS)
def test_registers_of_phase_rows_are_left_alone(
    name: str, dtype: str, precision: str | None, tile: tuple[int, int, int]
) -> None:
    assert not written_before_the_wait(plan_of_phase_rows(name, dtype, precision, tile))


# Two, three and four fragments, and few registers.
TILES_OF_BOXES = (
    TileOfBoxes(2, 0, 4, 8, (1, 1, 2), (2, 2, 2), rows=16),
    TileOfBoxes(1, 0, 2, 4, (1, 2, 2), (2, 2, 2), rows=16),
    TileOfBoxes(1, 0, 3, 4, (2, 2, 1), (2, 2, 2), rows=16),
    TileOfBoxes(2, 0, 4, 10, (2, 2, 2), (2, 2, 2), 1, rows=16),
)


@pytest.mark.parametrize("precision", ["tf32", "tf32x3"])
@pytest.mark.parametrize("tile", TILES_OF_BOXES, ids=["two", "four", "three", "few registers"])
def test_registers_of_boxes_are_left_alone(tile: TileOfBoxes, precision: str) -> None:
    geometry = geometry_of(FIXED["gan_3d"])
    plan = plan_weight_gradient_tma(geometry, "float32", layout_of(geometry), precision, DEVICES[90], tile)
    assert isinstance(plan, Plan)
    assert not written_before_the_wait(plan)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize(("dtype", "precision"), [("bfloat16", None), ("float32", "tf32"), ("float32", "tf32x3")])
@pytest.mark.parametrize(("last", "run"), [(False, 2), (True, 1)])
def test_registers_of_disjoint_are_left_alone(
    dtype: str, precision: str | None, last: bool, run: int, ahead: bool
) -> None:
    geometry, tile = geometry_of(FIXED["unet_k2s2"]), disjoint.Tile(2, 1, 2, run, ahead, 1)
    plan = disjoint.plan_disjoint(geometry, dtype, layout_of(geometry, last), precision, DEVICES[90], tile)
    assert isinstance(plan, Plan)
    assert not written_before_the_wait(plan)


@pytest.mark.parametrize(("dtype", "precision"), [("bfloat16", None), ("float32", "tf32"), ("float32", "tf32x3")])
@pytest.mark.parametrize("last", [False, True])
def test_registers_of_correlate_disjoint_are_left_alone(dtype: str, precision: str | None, last: bool) -> None:
    geometry = geometry_of(ROWS["k2s2"])
    plan = plan_correlate_disjoint(geometry, dtype, layout_of(geometry, last), precision, DEVICES[90])
    assert isinstance(plan, Plan)
    assert not written_before_the_wait(plan)


@pytest.mark.parametrize(
    ("dtype", "before", "after"),
    [
        ("bfloat16", "= TILES_M == 1 ? moved(", "= false ? moved("),
        ("float32", "= to_tf32(__uint_as_float(chunks", "= ((chunks"),
    ],
)
def test_words_that_are_loaded_again_are_caught(
    monkeypatch: pytest.MonkeyPatch, dtype: str, before: str, after: str
) -> None:
    sources = plant(dict(compiler.sources_of("weight_gradient_wgmma.cu")), before, after)
    monkeypatch.setattr(compiler, "sources_of", lambda _: sources)
    assert written_before_the_wait(plan_of("kb61", dtype, TILES["kb61"][0]))


def test_words_that_are_loaded_too_early_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """With two steps a slot, the second one's words are loaded while products of the slot before still read them."""
    guard = "static_assert(PRECISION == TF32X3 || TILES_M * K_STEPS > 2,"
    sources = plant(dict(compiler.sources_of("correlate_rows.cu")), guard, "static_assert(true,")
    monkeypatch.setattr(compiler, "sources_of", lambda _: sources)
    tile = rows.Tile(1, 1, 1, 8, False, 2, 4, 3, False, False, False, 2)
    assert written_before_the_wait(plan_of_rows("k2s2", "bfloat16", tile))


def test_words_of_phase_rows_that_are_loaded_too_early_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    guard = "static_assert(PRECISION == TF32X3 || TILES_M * K_STEPS > 2,"
    sources = plant(dict(compiler.sources_of("phase_rows.cu")), guard, "static_assert(true,")
    monkeypatch.setattr(compiler, "sources_of", lambda _: sources)
    assert written_before_the_wait(plan_of_phase_rows("k3s1", "float32", "tf32", (1, 1, 2)))
