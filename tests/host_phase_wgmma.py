"""Cases of phase_wgmma for the host, each of one program, with tiles drawn from those that the kernel takes."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable
from typing import Any

import pytest
from described import DEVICES, geometry_of, has_plane_with_a_tap, layout_of, problem_of
from strategies import KINDS, SIDES, Ints, Specialisation, attempts, case

from cuconvt import plan_phase_wgmma as wgmma
from cuconvt.geometry import Geometry
from cuconvt.plan import Device, Layout, Plan, Refusal
from cuconvt.plan_phase_wgmma_work import Work, reached_planes
from cuconvt.plan_views import batch_as_depth
from cuconvt.plan_wgmma_sizes import REGISTERS, Box, Tile, kinds_of_blocks

BUDGET = 0.05  # a wgmma of 128 threads takes longer than its products
LARGEST_KERNEL = {1: 7, 2: 4, 3: 3}
LONGEST = {1: (200,), 2: (12, 22), 3: (4, 6, 12)}
# Extents of which some have several boxes along each axis, the last one ragged.
RAGGED = {
    1: ((67,), (131,), (261,), (521,)),
    2: ((5, 19), (11, 17), (13, 35), (27, 19)),
    3: ((5, 3, 7), (3, 5, 9), (3, 9, 11), (11, 3, 5), (5, 7, 17)),
}
LAST = ("channels_last",)
ROWS = ("contiguous", "sliced", "cropped", "strided", "negative", "misaligned")
SHARED_BYTES = 227 * 1024
MAX_ACCUMULATORS = 150
MAX_RING = 12
MAX_ROWS = 16  # of taps, unrolled where a block owns all phases
MAX_COLUMNS = 192  # of a wgmma

# A tile whose weights pass by, of which others are variations.
PASSING = Tile(
    workers=1,
    stagers=1,
    tiles_m=1,
    tiles_c=2,
    merge_w=False,
    k_steps=1,
    x_stages=2,
    ring=2,
    resident=False,
    take_turns=False,
    all_phases=False,
    min_blocks=2,
)


def cases() -> dict[str, dict[str, Any]]:
    """Return the fields of each case by name."""
    found = {}
    for index in range(36):
        choose = random.Random(index)
        (dtype, precision), rank = KINDS[index % 4], 1 + index // 4 % 3
        x_last, out_last = SIDES[(index // 4 + 1) % 4]
        tile, spec = None, None
        draws = attempts()
        while tile is None or not serves(tile, spec, dtype, precision):
            next(draws)
            spec = draw_problem(choose, rank, x_last, out_last)
            tile = draw_tile(choose, spec, dtype, precision, out_last)
        # On few multiprocessors each block has several boxes.
        device = Device(90, choose.choice((1, 1, 2)), SHARED_BYTES)
        fields = {"precision": precision, "device": device, "plan": plan_with(tile, index % 3 == 1)}
        found[f"{index}-{precision or dtype}-{rank}d"] = {"spec": spec, "dtype": dtype, **fields}
    for tiles_c, merge_w, last in ((6, False, True), (8, True, False), (8, False, True)):
        spec = Specialisation(
            (1, 2), (1, 1), (1, 1), 8, 8 * tiles_c + 1, LAST if last else ROWS, LAST if last else ROWS
        )
        tile = Tile(2, 2, 1, tiles_c, merge_w, 1, 2, 3, False, False, False, 1, half_k=not last)
        fields = {"device": Device(90, 1, SHARED_BYTES), "plan": plan_with(tile)}
        found[f"{tiles_c}-tiles-{'last' if last else 'rows'}"] = {"spec": spec, "dtype": "bfloat16", **fields}
    found.update(boxed_cases())
    found.update(sliding_cases())
    found.update(run_cases())
    found.update(filled_cases())
    found.update(residue_cases())
    found.update(packing_cases(found))
    return found


def boxed_cases() -> dict[str, dict[str, Any]]:
    """Return cases of channels-last x that bulk tensor copies bring: channels of whole 16 bytes, or of whole chunks."""
    found = {}
    kinds = [KINDS[(1, 2, 0)[index % 3]] for index in range(18)] + 12 * [KINDS[3]]
    for index, (dtype, precision) in enumerate(kinds):
        choose = random.Random(index)
        rank, out_last, tile, spec = 1 + index // 3 % 3, index % 4 > 0, None, None
        draws = attempts()
        while tile is None or not serves(tile, spec, dtype, precision):
            next(draws)
            spec, k_steps = draw_problem(choose, rank, True, out_last), choose.choice((1, 2, 4))
            chunk = k_steps * (8 if precision else 16)
            grouped = index % 4 == 2
            c_in = chunk * choose.choice((1, 2)) if grouped else choose.choice((8, 16, 24, 40, 72))
            spec = dataclasses.replace(spec, c_in_per_group=c_in, groups=None if grouped else 1)
            tile = draw_tile(choose, spec, dtype, precision, out_last, boxed_steps=k_steps)
        device = Device(90, choose.choice((1, 1, 2)), SHARED_BYTES)
        fields = {"precision": precision, "device": device, "plan": plan_with(tile, index % 3 == 1)}
        found[f"boxed-{index}-{precision or dtype}-{rank}d"] = {"spec": spec, "dtype": dtype, **fields}
    # Slices that are split: kernel, stride, C_in, C_out and the tile.
    table = (
        ((3, 2, 3), (1, 1, 1), 24, 12, (2, 1, 1, 2, False, 2, 2, 3, False, False, False, 1, True)),
        ((3, 3, 4), (2, 1, 2), 16, 9, (1, 1, 1, 1, False, 1, 4, 6, True, False, True, 2, True, False, True, True)),
        ((3, 2, 2), (1, 1, 2), 40, 8, (2, 2, 1, 1, False, 4, 2, 3, False, False, False, 1, True, False, True)),
    )
    for index, (kernel, stride, c_in, c_out, tile) in enumerate(table):
        spec = Specialisation(kernel, stride, (1, 1, 1), c_in, c_out, LAST, LAST if index else ROWS, groups=1)
        plan = plan_with(dataclasses.replace(Tile(*tile), boxed=True), index == 2)
        fields = {"precision": "tf32x3", "device": Device(90, (1, 2, 1)[index], SHARED_BYTES), "plan": plan}
        found[f"boxed-slides-{index}"] = {"spec": spec, "dtype": "float32", **fields}
    return found


def sliding_cases() -> dict[str, dict[str, Any]]:
    """Return cases of blocks that walk along D, which random problems seldom allow."""
    # Kernel, stride, C_in, C_out, dtype, precision, whether channels are last, and the tile but for workers and blocks.
    table = (
        ((3, 2, 3), (1, 1, 1), 17, 12, "float32", "tf32", False, (2, 2, False, 1, 2, 3, False, False, False)),
        ((3, 1, 3), (1, 1, 2), 9, 8, "float32", "tf32x3", False, (1, 1, True, 1, 4, 6, True, False, False)),
        ((3, 3, 2), (2, 2, 2), 24, 9, "bfloat16", None, True, (1, 1, False, 1, 2, 6, True, False, True)),
        ((3, 2, 2), (2, 1, 1), 8, 8, "float16", None, False, (2, 1, False, 1, 2, 3, False, False, True)),
        ((3, 3, 4), (1, 1, 2), 17, 12, "float32", "tf32", False, (1, 2, False, 1, 2, 9, True, False, False)),
        ((3, 2, 3), (2, 1, 1), 9, 8, "float32", "tf32x3", False, (1, 1, True, 1, 2, 3, False, False, True)),
        ((4, 3, 2), (1, 2, 2), 24, 19, "float16", None, True, (1, 2, False, 1, 2, 3, False, False, True)),
        ((5, 1, 2), (3, 1, 1), 8, 3, "bfloat16", None, False, (1, 1, True, 1, 2, 3, False, False, True)),
        ((2, 2, 1), (1, 1, 1), 33, 25, "float32", "tf32x3", True, (2, 2, False, 2, 2, 3, False, False, False)),
    )
    found = {}
    for index, (kernel, stride, c_in, c_out, dtype, precision, last, tile) in enumerate(table):
        layouts = LAST if last else ROWS
        spec = Specialisation(kernel, stride, (1, 1, 1), c_in, c_out, layouts, layouts)
        workers, stagers, blocks = tuple(REGISTERS)[index % 2]
        half_k = dtype != "float32" and c_in <= 8
        # All ways to make columns of taps.
        merge_d, join_w = index > 1, last and kernel[2] % stride[2] == 0 and stride[2] > 1
        device = Device(90, (1, 2, 7)[index % 3], SHARED_BYTES)  # on more multiprocessors walks are shorter
        whole = Tile(workers, stagers, *tile, blocks, True, half_k, merge_d, join_w)
        plan = plan_with(whole, index % 2 == 1)
        found[f"slides-{index}"] = {
            "spec": spec,
            "dtype": dtype,
            "precision": precision,
            "device": device,
            "plan": plan,
        }
    return found


def run_cases() -> dict[str, dict[str, Any]]:
    """Return cases of runs along W of every length."""
    # Kernel, stride, C_in, C_out, dtype, precision and the tile.
    table = (
        ((2, 2, 2), (2, 2, 2), 16, 19, "float32", "tf32", Tile(2, 2, 1, 3, True, 1, 2, 8, True, True, True, 1)),
        ((3, 4), (1, 4), 12, 9, "float32", "tf32x3", Tile(1, 1, 2, 1, False, 1, 2, 3, False, False, False, 2)),
        ((16,), (8,), 40, 24, "bfloat16", None, Tile(2, 2, 1, 1, False, 2, 4, 3, False, False, False, 1)),
    )
    found = {}
    for index, (kernel, stride, c_in, c_out, dtype, precision, tile) in enumerate(table):
        ones = (1,) * len(kernel)
        fields = {"precision": precision, "device": Device(90, 1, SHARED_BYTES), "plan": plan_with(tile)}
        shifts = (*(None,) * (len(kernel) - 1), 0)
        spec = Specialisation(kernel, stride, ones, c_in, c_out, ROWS, ROWS[:3], shifts=shifts)
        found[f"runs-{index}"] = {"spec": spec, "dtype": dtype, **fields}
    return found


def filled_cases() -> dict[str, dict[str, Any]]:
    """Return cases of planes along D that no tap reaches, of blocks that slide and of others."""
    # Kernel, stride, dilation, C_in, C_out, dtype, precision and the tile.
    table = (
        (
            (3, 3, 3),
            (2, 2, 2),
            (2, 2, 2),
            9,
            12,
            "float32",
            "tf32",
            (1, 2, False, 1, 2, 3, False, False, True, 2, True),
        ),
        ((3, 2, 2), (4, 1, 2), (2, 1, 2), 17, 9, "bfloat16", None, (1, 2, False, 1, 4, 4, True, False, True, 2, True)),
        ((1, 2, 3), (2, 1, 2), (3, 1, 1), 8, 5, "float32", "tf32x3", (1, 1, True, 1, 2, 3, False, False, False, 2)),
        ((2, 2, 4), (6, 2, 2), (3, 1, 1), 20, 8, "float16", None, (2, 1, False, 1, 2, 3, False, False, False, 2)),
    )
    found = {}
    for index, (kernel, stride, dilation, c_in, c_out, dtype, precision, tile) in enumerate(table):
        spec = Specialisation(kernel, stride, dilation, c_in, c_out, ROWS, ("contiguous", "misaligned"))
        whole = Tile(1, 1, *tile, merge_d=len(tile) > 10 and index > 0)
        device = Device(90, (1, 3)[index % 2], SHARED_BYTES)
        fields = {"precision": precision, "device": device, "plan": plan_with(whole, index % 2 == 1)}
        found[f"filled-{index}"] = {"spec": spec, "dtype": dtype, **fields}
    return found


def residue_cases() -> dict[str, dict[str, Any]]:
    """Return cases of residues modulo the dilation along D and H, staged by threads and brought by bulk copies."""
    # Kernel, stride, dilation, C_in and C_out, the kind, the axes of residues, and the tile but for its blocks.
    in_rows = (
        ((3, 2), (1, 1), (2, 3), (17, 12), 2, (0, 1, 0), (2, 2, 1, 2, False, 1, 2, 3, False, False)),
        ((2, 3), (1, 2), (5, 1), (24, 9), 1, (0, 1, 0), (1, 1, 2, 1, True, 2, 2, 3, False, False)),
        ((3, 3), (1, 1), (4, 2), (9, 8), 3, (0, 1, 0), (2, 2, 1, 1, True, 1, 2, 6, True, False)),
        ((2, 3, 2), (1, 1, 1), (2, 3, 2), (8, 12), 0, (1, 1, 0), (2, 2, 1, 2, True, 1, 2, 6, True, False)),
        ((2, 2, 2), (2, 1, 1), (1, 3, 2), (12, 9), 3, (0, 1, 0), (1, 1, 1, 2, False, 1, 2, 3, False, False)),
    )
    channels_last = (
        ((3, 2, 3), (1, 1, 2), (4, 2, 1), (17, 8), 2, (1, 1, 0), (1, 1, 1, 1, False, 1, 4, 3, False, False)),
    )
    boxed = (
        ((3, 2), (1, 1), (3, 2), (24, 12), 1, (0, 1, 0), (2, 1, 1, 2, False, 1, 2, 6, True, True)),
        ((2, 3, 2), (1, 1, 1), (2, 8, 3), (16, 9), 2, (1, 1, 0), (1, 1, 2, 1, False, 2, 2, 3, False, False)),
        ((2, 2, 3), (1, 1, 1), (4, 2, 2), (24, 8), 3, (1, 1, 0), (2, 1, 1, 1, False, 1, 2, 3, False, False)),
    )
    found = {}
    for index, row in enumerate((*in_rows, *channels_last, *boxed)):
        kernel, stride, dilation, channels, kind, residues, tile = row
        (dtype, precision), layouts = KINDS[kind], ROWS if row in in_rows else LAST
        spec = Specialisation(kernel, stride, dilation, *channels, layouts, layouts, groups=1 if row in boxed else None)
        blocks = 2 if tile[0] == 1 else 1  # of a multiprocessor, as few workers have
        whole = Tile(*tile, False, blocks, boxed=row in boxed, residues=residues)
        device = Device(90, (1, 2)[index % 2], SHARED_BYTES)
        fields = {"precision": precision, "device": device, "plan": plan_with(whole, index % 3 == 1)}
        found[f"residues-{index}"] = {"spec": spec, "dtype": dtype, **fields}
    return found


def packing_cases(others: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return some of the cases on as many multiprocessors as there are boxes, of which each then packs its weights."""
    names = (
        "7-tf32x3-2d",  # workers that take turns
        "8-float16-3d",
        "18-tf32-2d",
        "20-float16-3d",  # half a pair of pieces
        "25-bfloat16-1d",
        "boxed-5-float16-2d",
        "boxed-8-float16-3d",
        "boxed-12-bfloat16-2d",
        "boxed-22-tf32x3-2d",
        "slides-1",  # merged taps along W
        "slides-2",  # merged along D, joined along W
        "runs-0",
        "filled-1",
        "residues-2",
        "residues-6",
    )
    return {f"packs-{name}": {**others[name], "device": DEVICES[90]} for name in names}


def draw_problem(choose: random.Random, rank: int, x_last: bool, out_last: bool) -> Specialisation:
    kernel, stride, dilation = (
        tuple(choose.randint(1, top) for _ in range(rank)) for top in (LARGEST_KERNEL[rank], 3, 3)
    )
    stride = (*(min(s, 2) for s in stride[:-1]), stride[-1])
    c_in, c_out = choose.choice((3, 8, 16, 17, 24, 33)), choose.choice((1, 3, 5, 8, 12, 17, 25, 41, 64))
    return Specialisation(
        kernel, stride, dilation, c_in, c_out, LAST if x_last else (*ROWS, "broadcast"), LAST if out_last else ROWS
    )


def draw_tile(
    choose: random.Random,
    spec: Specialisation,
    dtype: str,
    precision: str | None,
    out_last: bool,
    boxed_steps: int = 0,
) -> Tile | None:
    """Draw a tile that the kernel takes for a problem, or none if what was drawn does not go together.

    With `boxed_steps`, one of so many k steps whose x bulk tensor copies bring.
    """
    parts = 2 if precision == "tf32x3" else 1
    workers, stagers, blocks = choose.choice(tuple(kinds_of_blocks(boxed_steps > 0, parts)))
    stride = math.prod(spec.stride[:-1])
    taps = math.prod(spec.kernel[:-1])
    several = stride > 1
    all_phases = several and taps <= MAX_ROWS and choose.random() < 0.6
    merge_w = spec.kernel[-1] > 1 and not out_last and choose.random() < 0.8
    enough = [tiles for tiles in (1, 2, 3, 4, 6, 8) if 8 * tiles < spec.c_out_per_group + 16]
    tiles_c = max(choose.choice(enough), choose.choice(enough))
    k_steps, x_stages, tiles_m = choose.randint(1, 2), choose.choice((2, 2, 4)), choose.choice((1, 1, 2, 3, 4, 6, 8))
    k_steps = boxed_steps or k_steps
    chunk = 2 * k_steps * (4 if dtype == "float32" else 8)
    taps_d, stride_d, dilation_d = ((1, 1, 1), *zip(spec.kernel, spec.stride, spec.dilation, strict=True))[-3:][0]
    slides = dilation_d == 1 and taps_d > stride_d and (all_phases or not several) and choose.random() < 0.7
    merge_d = slides and choose.random() < 0.7
    may_join = spec.dilation[-1] == 1 and spec.stride[-1] > 1 and spec.kernel[-1] % spec.stride[-1] == 0
    join_w = may_join and out_last and choose.random() < 0.7
    slots = -(-spec.c_in_per_group // chunk) * taps // (taps_d if merge_d else 1)
    resident = (all_phases or not several) and slots <= MAX_RING and choose.random() < 0.6
    half_k = dtype != "float32" and k_steps == 1 and spec.c_in_per_group <= 8 and not boxed_steps
    take_turns = resident and workers > 1 and not slides and choose.random() < 0.6
    columns = 8 * tiles_c * (spec.kernel[-1] if merge_w else spec.stride[-1] if join_w else 1)
    columns *= taps_d if merge_d else 1
    sums = spec.kernel[-1] if merge_w else min(spec.kernel[-1], spec.stride[-1])
    sums *= math.prod(min(k, s) for k, s in zip(spec.kernel[:-1], spec.stride[:-1], strict=True)) if all_phases else 1
    if slides:
        sums = sums // (min(taps_d, stride_d) if all_phases else 1) * taps_d
    if columns > MAX_COLUMNS or 4 * sums * tiles_m * tiles_c > MAX_ACCUMULATORS:
        return None
    ring = slots if resident else choose.choice((2, 3))
    common = (workers, stagers, tiles_m, tiles_c, merge_w, k_steps, x_stages, ring, resident, take_turns)
    return Tile(*common, all_phases, blocks, slides, half_k, merge_d, join_w, boxed_steps > 0)


def serves(tile: Tile, spec: Specialisation, dtype: str, precision: str | None) -> bool:
    """Whether a box fits into shared memory, whatever the extents and the padding."""
    x_last = spec.x_layouts == LAST
    for extent in (LONGEST[len(spec.kernel)], *RAGGED[len(spec.kernel)]):
        shape = (2, spec.c_in_per_group, *extent)
        padding = tuple((min(1, d * (k - 1)), 0) for k, d in zip(spec.kernel, spec.dilation, strict=True))
        problem = case(shape, spec.c_out_per_group, spec.kernel, spec.stride, padding, dilation=spec.dilation)
        geometry = geometry_of(problem)
        for out_last in (x_last, spec.out_layouts == LAST):
            # What is not aligned is turned, which takes more shared memory.
            layout = dataclasses.replace(
                layout_of(geometry, x_last), out=layout_of(geometry, out_last).out, out_aligned=False
            )
            if isinstance(plan_tile(geometry, dtype, layout, precision, DEVICES[90], tile), Refusal):
                return False
    return True


def plan_tile(
    geometry: Geometry, dtype: str, layout: Layout, precision: str | None, device: Device, tile: Tile
) -> Plan | Refusal:
    geometry, layout = batch_as_depth(geometry, layout)
    # The result of a call without `out` has the layout of x.
    last = layout.out_channels_last
    # Where no plane is reached, or none left out, the tile is one for another kernel.
    if not has_plane_with_a_tap(geometry) or (tile.slides and reached_planes(geometry, layout)[0].dilation[0] > 1):
        return wgmma.plan_phase_wgmma(geometry, dtype, layout, precision, device)
    tile = dataclasses.replace(tile, merge_w=tile.merge_w and not last, join_w=tile.join_w and last)
    return wgmma.plan_tile(geometry, dtype, layout, precision, device, tile)


def plan_with(tile: Tile, patches: bool = False) -> Callable[..., Plan]:
    """Return a planner that takes the given tile whatever it costs and, if told so, boxes of 8 x 8 patches where there
    are some."""
    all_boxes = Work.boxes

    def patched(work: Work, tile: Tile, extents: Ints, rows: int = 0) -> list[Box]:
        boxes = list(all_boxes(work, tile, extents, rows))
        return [box for box in boxes if any(box.patches)] or boxes

    def plan(family: str, *problem: Any) -> Plan:
        with pytest.MonkeyPatch.context() as patch:
            found = plan_tile(*problem, tile)
            patch.setattr(Work, "boxes", patched)
            with_patches = plan_tile(*problem, tile)
        assert isinstance(found, Plan), found
        return with_patches if patches and isinstance(with_patches, Plan) else found

    return plan


def box(plan: Plan) -> Ints:
    """Return what a block owns along D, H, W (in positions q of a phase), C_out, and C_in (at a time)."""
    defines = dict(plan.defines)
    chunk = (1 if defines["HALF_K"] else 2 * defines["K_STEPS"]) * (4 if defines["DTYPE"] == 2 else 8)
    return (*problem_of(plan)["box"], 8 * defines["TILES_C"], chunk)
