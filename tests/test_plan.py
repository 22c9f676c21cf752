"""Planning for described devices: what a plan may depend on, that it covers the outputs, and every refusal."""

from __future__ import annotations

import dataclasses
import itertools
from math import gcd, prod
from typing import Any

import pytest
from described import (
    DEFAULT,
    DEVICES,
    channels_last,
    contiguous,
    gather_of,
    geometry_of,
    has_plane_with_a_tap,
    layout_of,
    plan_of,
    problem_of,
    struct_fields,
)
from fixed_cases import FIXED
from host.backend import plan_or_refusal
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from strategies import KINDS, Problem, Specialisation, case, problems
from test_plan_shares import assert_each_slice_once

from cuconvt.geometry import Geometry, make_geometry
from cuconvt.phases import axis_phases
from cuconvt.plan import (
    DTYPE_CODES,
    PATCHES,
    SHARES,
    Device,
    Layout,
    Plan,
    Refusal,
    make_plan,
    positions,
    round_up,
    show,
)
from cuconvt.plan_disjoint import plan_disjoint
from cuconvt.plan_few_channels import plan_few_channels
from cuconvt.plan_gather import plan_gather
from cuconvt.plan_narrow_groups import plan_narrow_groups
from cuconvt.plan_phase_gemm import candidates as phase_gemm_candidates
from cuconvt.plan_phase_rows import SMALL, plan_phase_rows
from cuconvt.plan_phase_wgmma import candidates, choose_tile, plan_phase_wgmma, tiles
from cuconvt.plan_phase_wgmma_work import Planes, Work, reached_planes
from cuconvt.plan_shares import Shares
from cuconvt.plan_views import batch_as_axis, batch_as_depth, with_residues_as_phases

Ints = tuple[int, ...]
Kind = tuple[str, str | None]
EXAMPLES = settings().max_examples
LIMIT = 2**31
TENSOR_CORES = {86: ("phase_gemm",), 90: ("disjoint", "phase_gemm", "phase_wgmma")}

kinds = st.sampled_from([*DEFAULT.items(), ("float32", "ieee"), ("float32", "tf32")])  # (dtype, precision)
archs = st.sampled_from(sorted(DEVICES))

# Problems whose taps do not all fit into shared memory, or are too many to unroll, with the axes that keep their halo.
FALLBACKS = {
    "kernel 7 dilation 4, 227 KB": (case((1, 8, 20, 20, 20), 8, 7, dilation=4), 90, (1, 1, 1)),
    "kernel 7 dilation 4, 99 KB": (case((1, 8, 20, 20, 20), 8, 7, dilation=4), 86, (0, 1, 1)),
    "dilation 400 along D": (case((1, 8, 9, 9, 9), 8, 3, dilation=(400, 1, 1)), 120, (0, 1, 1)),
    "dilation 4000 along H": (case((1, 8, 9, 9), 8, 3, dilation=(4000, 1)), 90, (0, 0, 1)),
    "dilation 100000 along W": (case((1, 8, 9), 8, 3, dilation=100_000), 90, (0, 0, 0)),
    "stride 16 along W": (case((1, 8, 9), 8, 3, stride=16), 80, (1, 1, 1)),
    "stride 17 along W": (case((1, 8, 9), 8, 3, stride=17), 80, (0, 0, 0)),
    "kernel 32 along W": (case((1, 8, 9, 40), 8, (1, 32)), 80, (1, 1, 1)),
    "kernel 33 along W": (case((1, 8, 9, 40), 8, (1, 33)), 80, (0, 0, 0)),
}


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUCONVT_DEBUG", raising=False)


def values(plan: Plan, name: str) -> Ints:
    defines = dict(plan.defines)
    if plan.kernel == "disjoint" and name == "STRIDE":  # which is the kernel
        return values(plan, "KERNEL")
    return (defines[f"{name}_D"], defines[f"{name}_H"], defines[f"{name}_W"])


def seen_by(plan: Plan, geometry: Geometry, last: bool = False) -> Geometry:
    """Return the geometry with its axes as the kernel has them: some turn those of 1-D and 2-D problems."""
    turns = {
        "few_channels": batch_as_axis,
        "narrow_groups": batch_as_depth,
        "phase_rows": batch_as_depth,
        "phase_wgmma": batch_as_depth,
        "tap_columns": batch_as_axis,
    }
    if plan.kernel not in turns:
        return geometry
    turned, layout = turns[plan.kernel](geometry, layout_of(geometry, last))
    if plan.kernel != "phase_wgmma":
        return turned
    residues = plan.tile.residues
    return reached_planes(with_residues_as_phases(turned, residues), layout, residues)[0]


def box_of(plan: Plan) -> Ints:
    """Return the positions q of a block along D, H, W and its output channels."""
    defines = dict(plan.defines)
    if plan.kernel == "phase_gemm":
        d, h, w = values(plan, "WARPS")
        rows_h, rows_w = (1, defines["ROWS"]) if defines["ROWS_ALONG_W"] else (defines["ROWS"], 1)
        return (d, h * rows_h, w * rows_w * 8, defines["WARPS_C"] * defines["TILES_C"] * 8)
    if plan.kernel in ("narrow_groups", "phase_rows", "phase_wgmma"):
        return (*problem_of(plan)["box"], 8 * defines["TILES_C"])
    d, h, w = values(plan, "THREADS")
    return (d, h, w * defines["POSITIONS_W"], defines["THREADS_C"] * defines["CHANNELS"])


def registers_needed(plan: Plan) -> int:
    """Return how many registers a thread needs at least: where they vary, its accumulators and some for addresses."""
    if plan.kernel == "gather":
        return 128
    defines = dict(plan.defines)
    if plan.kernel in ("phase_rows", "phase_wgmma"):  # whose warps exchange registers
        groups = defines["WORKERS"], defines["STAGER_GROUPS"]
        every = groups[0] * defines["WORKER_REGISTERS"] + groups[1] * defines["STAGER_REGISTERS"]
        return -(-every // sum(groups))
    if plan.kernel == "few_channels":
        kernel, stride, dilation = (values(plan, name) for name in ("KERNEL", "STRIDE", "DILATION"))
        planes = (kernel[0] - 1) * dilation[0] // stride[0] + 1
        row = defines["POSITIONS_W"] * stride[2] * defines["CHANNELS_OUT"] * defines["VECTOR"]
        return (2 if defines["DTYPE"] == DTYPE_CODES["float64"] else 1) * planes * stride[0] * row + 32
    if plan.kernel == "tap_columns":  # a warp's sums, and a block of channels of x
        return 8 * defines["TILES_N"] + (16 if defines["DTYPE"] == DTYPE_CODES["float32"] else 8) + 40
    if plan.kernel == "disjoint":  # a tile's sums, and its x
        columns, steps = 8 * defines["TILES_C"] * defines["KERNEL_W"], defines["K_STEPS"] * (1 + defines["AHEAD"])
        return defines["TILES_M"] * (columns // 2 + 4 * steps) + 40
    axes = zip(*(values(plan, name) for name in ("KERNEL", "STRIDE", "DILATION")), strict=True)
    live_phases = [len({tap * dilation % stride for tap in range(kernel)}) for kernel, stride, dilation in axes]
    if plan.kernel == "narrow_groups":
        at_once = prod(live_phases[defines["SPLIT"] :])  # of those along D one after the other, if so
        return 4 * defines["TILES_M"] * defines["TILES_C"] * at_once + 40
    return 2 * defines["ROWS"] * defines["TILES_C"] * live_phases[2] + 40


# Macros of phase_rows that its tiles decide.
OF_TILES_OF_ROWS = {
    *("WORKERS", "STAGER_GROUPS", "TILES_M", "TILES_C", "K_STEPS", "X_STAGES", "RING", "RESIDENT", "MIN_BLOCKS"),
    *("WORKER_REGISTERS", "STAGER_REGISTERS"),
}


def ends_of_rows(problem: Problem) -> Ints:
    """Return the position q of the first output along W, modulo 4, its phases along all axes, and where rows end."""
    geometry = geometry_of(problem)
    phases = (pad % stride for pad, stride in zip(geometry.pad_before, geometry.stride, strict=True))
    return (geometry.pad_before[2] // geometry.stride[2] % 4, *phases, geometry.out_extent[2] % geometry.stride[2])


# ---- what a plan is ----------------------------------------------------------------------------------------------


@settings(max_examples=max(EXAMPLES // 3, 1))
@given(problem=problems(), kind=kinds, arch=archs, last=st.booleans())
def test_a_plan_is_pure(problem: Problem, kind: Kind, arch: int, last: bool) -> None:
    first = plan_of(problem, *kind, arch, last)
    make_plan.cache_clear()
    second = plan_of(problem, *kind, arch, last)
    assert first == second
    assert first is not second
    assert hash(first) == hash(second)


@given(problem=problems(), kind=kinds, arch=archs, last=st.booleans())
def test_a_plan_fits_its_device(problem: Problem, kind: Kind, arch: int, last: bool) -> None:
    plan = plan_of(problem, *kind, arch, last)
    assert 0 < plan.shared_bytes <= DEVICES[arch].shared_bytes
    assert dict(plan.defines).get("SHARED_BYTES", plan.shared_bytes) == plan.shared_bytes
    assert plan.block % 32 == 0
    assert plan.block <= 1024
    threads = plan.block * dict(plan.defines)["MIN_BLOCKS"]
    assert threads <= 1536, "more than a multiprocessor of every architecture holds"
    assert min(255, 65536 // threads) >= registers_needed(plan)
    geometry = seen_by(plan, geometry_of(problem), last)
    assert values(plan, "KERNEL") == geometry.kernel
    assert values(plan, "STRIDE") == geometry.stride
    if plan.kernel != "disjoint":
        assert values(plan, "DILATION") == geometry.dilation
    assert plan.cost > 0


@given(
    problem=problems(), kind=kinds, arch=archs, last=st.booleans(), scale=st.sampled_from((1, 1, 37)), data=st.data()
)
def test_batch_and_extents_do_not_change_the_defines(
    problem: Problem, kind: Kind, arch: int, last: bool, scale: int, data: st.DataObject
) -> None:
    fixed = Specialisation(
        problem.kernel,
        problem.stride,
        problem.dilation,
        problem.c_in_per_group,
        problem.c_out_per_group,
        (problem.x_layout,),
        (problem.out_layout,),
    )
    other = data.draw(problems(fixed))
    extent = tuple(extent * scale for extent in other.extent)
    changed = dataclasses.replace(other, extent=extent, groups=problem.groups)
    if ends_of_rows(changed) != ends_of_rows(problem):
        # Padding that moves the first position along W is another specialisation of phase_gemm (EARLY), and padding
        # that moves its phase one of few_channels and narrow_groups (SHIFT_W); rows that end within a position are one
        # of phase_wgmma (OUT_RUN): keep them.
        longer = tuple(map(max, extent, problem.extent))
        ends = {"padding": problem.padding, "output_padding": problem.output_padding}
        changed = dataclasses.replace(changed, extent=longer, **ends)
    plans = [plan_of(p, *kind, arch, last) for p in (problem, changed)]
    if "phase_rows" in (plans[0].kernel, plans[1].kernel):
        # It is specialised on the padding along W, and serves where rows or planes are of whole 16 bytes.
        ways = [phase_rows_or_refusal(p, *kind, DEVICES[arch]) for p in (problem, changed)]
        assume(all(isinstance(way, Plan) for way in ways) and problem.padding[-1][0] == changed.padding[-1][0])
    assert plans[0].kernel == plans[1].kernel
    defines, others = (dict(plan.defines) for plan in plans)
    if plans[0].kernel == "phase_rows":  # which has tiles for few positions, too
        assert defines.keys() == others.keys()
        defines, others = ({name: d[name] for name in d if name not in OF_TILES_OF_ROWS} for d in (defines, others))
    index64 = others.pop("INDEX64", None)
    assert not defines.pop("INDEX64", 0)
    assert others == defines
    # Nothing here comes near 2**31 but the number of elements.
    geometry = geometry_of(changed)
    positions = max(geometry.c_in * prod(geometry.x_extent), geometry.c_out * prod(geometry.out_extent))
    counts_near = plans[0].kernel in ("disjoint", "phase_wgmma", "phase_rows")
    assert index64 == (None if counts_near else geometry.n * positions > LIMIT)


@given(problem=problems(), kind=kinds, arch=archs)
def test_the_grid_covers_every_output(problem: Problem, kind: Kind, arch: int) -> None:
    plan, geometry = plan_of(problem, *kind, arch), geometry_of(problem)
    if plan.kernel == "few_channels":
        assert_slides_cover_every_output(plan, seen_by(plan, geometry))
        return
    if plan.kernel == "phase_wgmma":
        assert_boxes_cover_every_output(plan, seen_by(plan, geometry), DEVICES[arch])
        return
    if plan.kernel == "phase_rows":
        assert_rows_cover_every_output(plan, seen_by(plan, geometry), DEVICES[arch])
        return
    if plan.kernel == "narrow_groups":
        assert_cells_cover_every_output(plan, seen_by(plan, geometry), DEVICES[arch])
        return
    if plan.kernel == "disjoint":
        assert_runs_cover_every_output(plan, geometry, DEVICES[arch])
        return
    if plan.kernel == "tap_columns":
        assert_columns_cover_every_output(plan, seen_by(plan, geometry))
        return
    tiles, box = problem_of(plan)["tiles"], box_of(plan)
    for axis in range(3):
        stride, pad = geometry.stride[axis], geometry.pad_before[axis]
        first = pad // stride  # where the kernel's first box starts
        reached = {(o + pad) // stride for o in range(geometry.out_extent[axis])}
        assert min(reached) >= first
        assert max(reached) < first + tiles[axis] * box[axis]
        assert max(reached) >= first + (tiles[axis] - 1) * box[axis], "the last box holds no output"
    defines = dict(plan.defines)
    channels, phases = geometry.c_out_per_group, geometry.stride[:2] if defines.get("HALO_W", 1) else geometry.stride
    if defines.get("PHASES_AS_CHANNELS"):
        channels, phases = channels * prod(geometry.stride), ()
    assert 0 <= tiles[3] * box[3] - channels < box[3]
    assert plan.grid == prod(tiles) * prod(phases) * geometry.groups * geometry.n


def assert_columns_cover_every_output(plan: Plan, geometry: Geometry) -> None:
    """Parts along D have planes of outputs each, and boxes along H and W overlap by what taps reach."""
    fields, defines, g = problem_of(plan), dict(plan.defines), geometry
    parts, *tiles, _ = fields["tiles"]
    planes = positions(g, 0)
    assert (parts - 1) * -(-planes // parts) < planes, "the last part has no output"
    for axis, count in zip((1, 2), tiles, strict=True):
        kernel, stride, dilation = g.kernel[axis], g.stride[axis], g.dilation[axis]
        shift = defines["SHIFT_W"] if axis == 2 else 0
        # Where a tap reads x, of the outputs that begin at a multiple of the stride.
        offsets = [((tap * dilation - shift) % stride + shift - tap * dilation) // stride for tap in range(kernel)]
        overlap = max(offsets) - min(offsets)
        overlap = round_up(overlap, 4) if axis == 2 else overlap  # fours of positions stay together
        box, extent = fields["box"][axis], g.x_extent[axis]
        assert count == 1 or box > overlap
        assert overlap + count * (box - overlap) >= extent, "inputs beyond the last box"
        assert count == 1 or overlap + (count - 1) * (box - overlap) < extent, "the last box holds no input of its own"
    assert plan.grid == prod(fields["tiles"]) * g.groups * g.n
    assert prod(fields["box"]) <= 32 * defines["WARPS_M"]


def assert_cells_cover_every_output(plan: Plan, geometry: Geometry, device: Device) -> None:
    fields, box = problem_of(plan), box_of(plan)
    for axis in range(3):
        cells = -(-geometry.out_extent[axis] // geometry.stride[axis])
        assert 0 <= fields["tiles"][axis] * box[axis] - cells < box[axis], "the last box holds no output"
    assert 0 <= fields["tiles"][3] * box[3] - geometry.c_out_per_group < box[3]
    assert fields["blocks"] == (prod(fields["tiles"][:3]) * geometry.n,)
    sets = fields["tiles"][3] * geometry.groups // dict(plan.defines)["GROUPS"]
    assert plan.grid % sets == 0, "a block stays with its weights"
    assert sets <= plan.grid <= max(sets, device.multiprocessors * dict(plan.defines)["MIN_BLOCKS"])


def assert_runs_cover_every_output(plan: Plan, geometry: Geometry, device: Device) -> None:
    fields, defines = problem_of(plan), dict(plan.defines)
    along_d, along_h, row = fields["box"]
    assert (along_d, along_h) == (positions(geometry, 0), positions(geometry, 1))
    assert 0 <= row * defines["RUN"] - positions(geometry, 2) < defines["RUN"], "the last run holds no output"
    of_a_worker = 64 * defines["TILES_M"] // defines["RUN"]
    assert 0 <= fields["blocks"][0] * of_a_worker - geometry.n * along_d * along_h * row < of_a_worker
    slots = fields["tiles"][3] * defines["KERNEL_D"] * defines["KERNEL_H"]
    assert 0 <= fields["tiles"][3] * 8 * defines["TILES_C"] - geometry.c_out_per_group < 8 * defines["TILES_C"]
    parts, per_part = fields["patches"][0], fields["plane"][0]
    assert 0 <= parts * per_part - slots < per_part, "the last part has no slot"
    sets = parts * geometry.groups
    assert plan.grid % sets == 0, "a block stays with its weights"
    assert sets <= plan.grid <= max(sets, device.multiprocessors * defines["MIN_BLOCKS"])
    assert (plan.grid // sets - 1) * defines["WORKERS"] < fields["blocks"][0], "a block has no tile"


def assert_slides_cover_every_output(plan: Plan, geometry: Geometry) -> None:
    defines, (runs, rows, tiles_w, tiles_c) = dict(plan.defines), problem_of(plan)["tiles"]
    _, stride_h, stride_w = geometry.stride
    pad, stride = geometry.pad_before[0], geometry.stride[0]
    planes = (geometry.out_extent[0] - 1 + pad) // stride - pad // stride + 1
    length = -(-planes // runs)
    assert (runs - 1) * length < planes <= runs * length, "a run along D holds no output"
    assert 0 <= rows * stride_h - geometry.out_extent[1] < stride_h
    assert 0 <= tiles_w * defines["POSITIONS_W"] * stride_w - geometry.out_extent[2] < defines["POSITIONS_W"] * stride_w
    lanes = defines["LANES_C"]
    channels = lanes * defines["VECTOR"] * defines["CHANNELS_OUT"]
    assert 0 <= tiles_c * channels - (geometry.c_out if lanes > 1 else geometry.c_out_per_group) < channels
    blocks = -(-rows * tiles_w // (plan.block // lanes))
    groups = 1 if lanes > 1 else geometry.groups
    assert plan.grid == stride_h * blocks * runs * tiles_c * groups * geometry.n


def assert_boxes_cover_every_output(plan: Plan, geometry: Geometry, device: Device) -> None:
    fields, defines, box = problem_of(plan), dict(plan.defines), box_of(plan)
    tiles = fields["tiles"]
    for axis in range(3):
        # A box begins where the output does, in each phase, or with all outputs of its first position.
        all_of_a_position = (defines["SLIDES"], 0, defines["JOIN_W"])[axis]
        outputs = -(-geometry.out_extent[axis] // geometry.stride[axis])
        count = positions(geometry, axis) if all_of_a_position else outputs
        if all_of_a_position and axis == 0:
            assert tiles[0] == box[0] == count  # slices of a column
        else:
            assert (tiles[axis] - 1) * box[axis] < count <= tiles[axis] * box[axis]
    assert 0 <= tiles[3] * box[3] - geometry.c_out_per_group < box[3]
    phases = 1 if defines["ALL_PHASES"] else prod(geometry.stride[:2])
    (blocks,) = fields["blocks"]
    # One block after the other would not find the weights that it has: each set needs a block.
    sets = tiles[3] * geometry.groups if defines["RESIDENT"] else 1
    if defines["SLIDES"]:
        columns = prod(tiles[1:]) * geometry.groups * geometry.n
        held = max(sets, device.multiprocessors * defines["MIN_BLOCKS"])
        assert_each_slice_once(Shares(plan.grid, blocks, *fields["shares"]), columns, tiles[0])
        assert 1 <= plan.grid <= min(blocks, held)
        assert plan.grid % sets == 0
        return
    assert blocks == prod(tiles) * phases * geometry.groups * geometry.n
    assert 1 <= plan.grid <= min(blocks, max(sets, device.multiprocessors * defines["MIN_BLOCKS"]))
    assert plan.grid == blocks or plan.grid % sets == 0


def assert_rows_cover_every_output(plan: Plan, geometry: Geometry, device: Device) -> None:
    fields, defines, box = problem_of(plan), dict(plan.defines), box_of(plan)
    tiles, outputs = fields["tiles"], [-(-o // s) for o, s in zip(geometry.out_extent, geometry.stride, strict=True)]
    if fields["patches"][0]:
        outputs = [outputs[0], 1, outputs[1] * outputs[2]]  # the rows of a plane follow each other
    for axis in range(3):
        assert (tiles[axis] - 1) * box[axis] < outputs[axis] <= tiles[axis] * box[axis]
    assert 0 <= tiles[3] * box[3] - geometry.c_out_per_group < box[3]
    assert box[0] * box[1] * round_up(box[2], 2) <= 64 * defines["TILES_M"] * defines["WORKERS"]
    assert fields["blocks"] == (prod(tiles) * prod(geometry.stride[:2]) * geometry.groups * geometry.n,)
    sets = tiles[3] * geometry.groups if defines["RESIDENT"] else 1
    assert 1 <= plan.grid <= min(fields["blocks"][0], max(sets, device.multiprocessors * defines["MIN_BLOCKS"]))
    assert plan.grid == fields["blocks"][0] or plan.grid % sets == 0


def assert_its_blocks_fit(plan: Plan) -> None:
    """A multiprocessor holds as many blocks as the plan says."""
    blocks = dict(plan.defines)["MIN_BLOCKS"]
    assert (plan.shared_bytes + 1024) * blocks <= DEVICES[90].shared_bytes + 1024
    assert registers_needed(plan) * plan.block * blocks <= 65536


@given(problem=problems(), kind=st.sampled_from(KINDS), multiprocessors=st.sampled_from((1, 78, 132)), data=st.data())
def test_a_plan_of_phase_rows(problem: Problem, kind: Kind, multiprocessors: int, data: st.DataObject) -> None:
    """Of rows of whole 16 bytes, with few taps, as networks mostly have."""
    device = dataclasses.replace(DEVICES[90], multiprocessors=multiprocessors)
    width = round_up(problem.extent[-1], data.draw(st.sampled_from((2, 8, 8))))
    stride = data.draw(st.sampled_from((1, 2, 2, 4)))
    kernel = data.draw(st.integers(stride, 5))
    before = data.draw(st.integers(0, kernel - stride))
    problem = dataclasses.replace(
        problem,
        extent=(*problem.extent[:-1], width),
        kernel=(*(min(k, 3) for k in problem.kernel[:-1]), kernel),
        stride=(*problem.stride[:-1], stride),
        dilation=(*(min(d, 2) for d in problem.dilation[:-1]), 1),
        padding=(*((0, 0) for _ in problem.padding[:-1]), (before, kernel - stride - before)),
        output_padding=(0,) * problem.rank,
        x_layout="contiguous",
        out_layout="contiguous",
    )
    plan = phase_rows_or_refusal(problem, *kind, device)
    if isinstance(plan, Refusal):
        return
    assert_its_blocks_fit(plan)
    assert_rows_cover_every_output(plan, seen_by(plan, geometry_of(problem)), device)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind[1] or kind[0])
@pytest.mark.parametrize(
    "problem",
    [case((2, 64, 8, 8, 8), 48, 3, padding=1), case((2, 64, 8, 8), 48, 4, 2, 1), case((1, 96, 16), 96, 2, 2)],
    ids=["volume", "image", "line"],
)
def test_phase_rows_has_few_programs(problem: Problem, kind: Kind) -> None:
    """One for typical extents and one for each count of few positions, and none of another tile."""
    found: dict[Any, list[tuple[int, Ints]]] = {}
    for n, *extents in itertools.product((1, 3, 64), *((4, 6, 12, 40, 96),) * (problem.rank - 1), (8, 16, 24, 64, 136)):
        plan = phase_rows_or_refusal(dataclasses.replace(problem, n=n, extent=tuple(extents)), *kind, DEVICES[90])
        assert isinstance(plan, Plan), plan
        found.setdefault(plan.defines, []).append((n, tuple(extents)))
    assert 1 < len(found) <= 1 + len(SMALL), found
    others = {tuple(pair for pair in defines if pair[0] not in OF_TILES_OF_ROWS) for defines in found}
    assert len(others) == 1, "extents decide more than the tile"


def test_a_plan_can_be_printed() -> None:
    plan = gather_of(FIXED["kb73"])
    text = str(plan)
    assert text.startswith(f"gather: grid {plan.grid}, block {plan.block}, shared {plan.shared_bytes} B, DTYPE=2 ")
    assert all(f" {name}={value}" in text for name, value in plan.defines)
    lost = dataclasses.replace(plan, refused=("other: no such tile", "slow: cost 2 against 1"))
    assert str(lost) == f"{text}\n  not other: no such tile\n  not slow: cost 2 against 1"


@pytest.mark.parametrize(("debug", "is_printed"), [("other,plan", True), ("planning", False), (None, False)])
def test_a_plan_is_shown_where_debug_asks_for_it(
    debug: str | None, is_printed: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if debug is not None:
        monkeypatch.setenv("CUCONVT_DEBUG", debug)
    make_plan.cache_clear()
    plan = plan_of(FIXED["kb77"])
    assert capsys.readouterr() == ("", "")  # to plan prints nothing
    show(plan, geometry_of(FIXED["kb77"]), "float32", "tf32x3")
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("cuconvt plan for Geometry(rank=3, ") == is_printed
    assert (str(plan) in printed.err) == is_printed


# ---- fallbacks and refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FALLBACKS)
def test_halo_fallback(name: str) -> None:
    problem, arch, halo = FALLBACKS[name]
    plan = gather_of(problem, arch=arch)
    assert values(plan, "HALO") == halo
    assert plan.shared_bytes <= DEVICES[arch].shared_bytes


def test_no_kernel_at_all() -> None:
    geometry = geometry_of(FIXED["kb73"])
    with pytest.raises(
        ValueError, match=r"no kernel can run Geometry\(.*gather: no tile fits into 1024 bytes of shared"
    ):
        make_plan(geometry, "float32", layout_of(geometry), "ieee", Device(90, 132, 1024))


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        (case((LIMIT, 1, 1), 1, 1), f"{LIMIT} blocks are more than a launch takes ({LIMIT - 1})"),
        (case((1, 1, 1), 1, 1, stride=LIMIT), "stride and dilation * kernel must stay below 2**31 on every axis"),
        (
            case((1, 1, 1), 1, 2, dilation=LIMIT // 2),
            "stride and dilation * kernel must stay below 2**31 on every axis",
        ),
    ],
)
def test_refusals_of_gather(problem: Problem, reason: str) -> None:
    geometry = geometry_of(problem)
    assert plan_gather(geometry, "float32", layout_of(geometry), "ieee", DEVICES[90]) == Refusal("gather", reason)


def test_the_largest_grid() -> None:
    assert gather_of(case((LIMIT - 1, 1, 1), 1, 1)).grid == LIMIT - 1


# ---- tensor cores ------------------------------------------------------------------------------------------------


def gemm_or_refusal(
    problem: Problem,
    dtype: str = "float32",
    precision: str | None = None,
    device: Device = DEVICES[90],
    last: bool = False,
) -> Plan | Refusal:
    geometry = geometry_of(problem)
    layout = layout_of(geometry, last)
    return plan_or_refusal("phase_gemm", geometry, dtype, layout, precision or DEFAULT[dtype], device)


@pytest.mark.parametrize(
    ("problem", "dtype", "precision", "device", "reason"),
    [
        ("kb61", "float16", None, Device(75, 72, 64 * 1024), "needs compute capability 8.0, the device has 7.5"),
        ("kb61", "float64", None, DEVICES[90], "computes in float16, bfloat16 and TF32, not in float64"),
        ("kb61", "float32", "ieee", DEVICES[90], "computes in float16, bfloat16 and TF32, not in ieee"),
        (case((1, 8, 9), 8, 33), "float16", None, DEVICES[90], "unrolls at most 32 taps along W, got 33"),
        (case((1, 8, 9), 8, 3, 17), "float16", None, DEVICES[90], "holds at most 16 phases along W, got stride 17"),
        (
            case((1, 8, 9, 9), 8, 3, dilation=(4000, 1)),
            "float32",
            "tf32",
            DEVICES[90],
            f"no tile fits into {DEVICES[90].shared_bytes} bytes of shared memory and the registers",
        ),
        (
            case((1, 8, 1, 1, 1), 8, (3, 1, 1), dilation=(2**30, 1, 1)),
            "float16",
            None,
            DEVICES[90],
            "stride and dilation * kernel must stay below 2**31 on every axis",
        ),
        (
            case((LIMIT, 8, 1), 8, 1),
            "float16",
            None,
            DEVICES[90],
            f"{LIMIT} blocks are more than a launch takes ({LIMIT - 1})",
        ),
    ],
)
def test_refusals_of_phase_gemm(problem: Any, dtype: str, precision: str | None, device: Device, reason: str) -> None:
    found = gemm_or_refusal(
        FIXED.get(problem, problem) if isinstance(problem, str) else problem, dtype, precision, device
    )
    assert found == Refusal("phase_gemm", reason)


def test_a_refused_device_runs_the_general_kernel() -> None:
    geometry = geometry_of(FIXED["kb61"])
    plan = make_plan(geometry, "float16", layout_of(geometry), None, Device(75, 72, 64 * 1024))
    assert plan.kernel != "phase_gemm"
    assert "phase_gemm: needs compute capability 8.0, the device has 7.5" in plan.refused


@pytest.mark.parametrize("kind", [("float16", None), ("bfloat16", None), ("float32", "tf32"), ("float32", "tf32x3")])
def test_wide_channels_take_the_tensor_cores_and_few_do_not(kind: Kind) -> None:
    for arch, name in itertools.product((86, 90), ("kb61", "kb70", "kb77", "gan_3d")):
        assert plan_of(FIXED[name], *kind, arch).kernel in TENSOR_CORES[arch], name
    for name in ("one_channel_volume", "depthwise", "depthwise_multiplier", "extent_one"):
        assert plan_of(FIXED[name], *kind).kernel not in TENSOR_CORES[90], name
    for dtype, precision in (("float64", None), ("float32", "ieee")):
        assert plan_of(FIXED["kb61"], dtype, precision).kernel not in TENSOR_CORES[90]


@given(problem=problems(), kind=kinds, arch=archs, last=st.booleans(), scale=st.sampled_from((1, 2, 37)))
def test_a_phase_gemm_is_compiled_for_neither_batch_nor_extents(
    problem: Problem, kind: Kind, arch: int, last: bool, scale: int
) -> None:
    changed = dataclasses.replace(problem, n=scale, extent=tuple(scale * extent + 3 for extent in problem.extent))
    plan, other = (gemm_or_refusal(p, *kind, DEVICES[arch], last) for p in (problem, changed))
    if isinstance(plan, Refusal):
        assert other == plan
        return
    assert isinstance(other, Plan)
    assert {**dict(other.defines), "INDEX64": 0} == dict(plan.defines)
    geometry, defines = geometry_of(problem), dict(plan.defines)
    reach = (geometry.kernel[2] - 1) * geometry.dilation[2] // geometry.stride[2]
    one_channel = geometry.c_in == 1  # the same memory as contiguous
    assert defines["EARLY"] == (0 if last and not one_channel else (ends_of_rows(problem)[0] - reach) % 4)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_rows_of_x_are_read_by_words_only_where_they_end_with_one(dtype: str) -> None:
    geometry = geometry_of(case((1, 8, 4, 6), 8, 3))
    whole = geometry_of(case((1, 8, 4, 8), 8, 3))
    rows_of_8 = dataclasses.replace(layout_of(geometry), x=layout_of(whole).x)

    def reads_words(geometry: Geometry, layout: Layout) -> bool:
        plan = plan_or_refusal("phase_gemm", geometry, dtype, layout, DEFAULT[dtype], DEVICES[90])
        assert isinstance(plan, Plan)
        return bool(problem_of(plan)["x_vector"][0])

    assert reads_words(whole, layout_of(whole))
    assert not reads_words(whole, dataclasses.replace(layout_of(whole), x_aligned=False))
    assert not reads_words(geometry, layout_of(geometry))
    assert not reads_words(geometry, rows_of_8), "the view ends before the rows do"


@given(problem=problems(), kind=kinds, arch=archs, last=st.booleans())
def test_packed_weights_hold_every_tap_and_channel(problem: Problem, kind: Kind, arch: int, last: bool) -> None:
    plan = gemm_or_refusal(problem, *kind, DEVICES[arch], last)
    if isinstance(plan, Refusal):
        return
    geometry, box = geometry_of(problem), box_of(plan)
    a_word = 1 if kind[0] == "float32" else 2
    chunk = dict(plan.defines)["K_STEPS"] * 8 * a_word
    channels_in = -(-geometry.c_in_per_group // chunk) * chunk
    channels_out = problem_of(plan)["tiles"][3] * box[3]
    parts = 2 if kind[1] == "tf32x3" else 1
    taps = geometry.taps // (prod(geometry.stride) if plan.tile.phases_as_channels else 1)
    assert plan.packed_words * a_word == geometry.groups * taps * channels_in * channels_out * parts
    assert plan.packed_words % plan.packed_a_thread == 0


# ---- Hopper's tensor cores ---------------------------------------------------------------------------------------


def wgmma_or_refusal(
    problem: Problem,
    dtype: str = "float16",
    precision: str | None = None,
    device: Device = DEVICES[90],
    last: bool = False,
) -> Plan | Refusal:
    geometry = geometry_of(problem)
    return plan_phase_wgmma(geometry, dtype, layout_of(geometry, last), precision or DEFAULT[dtype], device)


def phase_rows_or_refusal(problem: Problem, dtype: str, precision: str | None, device: Device) -> Plan | Refusal:
    geometry = geometry_of(problem)
    return plan_phase_rows(geometry, dtype, layout_of(geometry), precision or DEFAULT[dtype], device)


@pytest.mark.parametrize("last", [False, True], ids=["rows", "channels_last"])
@pytest.mark.parametrize(("dtype", "precision"), [("float32", "tf32"), ("float32", "tf32x3"), ("bfloat16", None)])
def test_few_boxes_take_one_launch_of_the_same_code(dtype: str, precision: str | None, last: bool) -> None:
    tiny, many = (case((n, 16, 8, 8, 8), 16, 3, 2, 1, 1) for n in (1, 500))
    one, two = (wgmma_or_refusal(problem, dtype, precision, last=last) for problem in (tiny, many))
    assert isinstance(one, Plan)
    assert isinstance(two, Plan)
    assert one.packed_words == 0 < two.packed_words
    assert one.defines == two.defines
    assert one.grid == problem_of(one)["blocks"][0]


@pytest.mark.parametrize(
    ("problem", "boxes_a_block", "stay"),
    [
        (case((1, 64, 6, 6, 6), 64, 3, 2), 1, True),  # 55 KB of them
        (case((8, 48, 64, 64, 64), 48, 3), 2, True),  # a column, and a part of one
        (case((1, 512, 4, 4), 256, 4, 2), 1, False),
    ],
    ids=["many", "several-boxes", "passing"],
)
def test_blocks_do_not_pack_weights(problem: Problem, boxes_a_block: int, stay: bool) -> None:
    plan = wgmma_or_refusal(problem)
    assert isinstance(plan, Plan)
    assert (problem_of(plan)["blocks"][0] // plan.grid, plan.tile.resident) == (boxes_a_block, stay)
    assert plan.packed_words > 0


# Measured to take 0.4 to 0.8 times as long as with phase_gemm, or with narrow_groups, which estimates had put first.
@pytest.mark.parametrize(
    "problem",
    [
        case((8, 64, 128, 128), 32, 4, 2, padding=1),
        case((16, 256, 1024), 128, 10, 5, padding=2),
        case((2, 48, 40, 40, 40), 48, 3, dilation=(2, 2, 1), padding=(2, 2, 1)),
        case((2, 16, 96, 96, 96), 16, 4, 2, padding=1),
    ],
    ids=["2d", "1d", "dilated", "16-channels"],
)
@pytest.mark.parametrize("last", [False, True], ids=["rows", "channels_last"])
def test_wgmma_is_chosen_for_16_bits(problem: Problem, last: bool) -> None:
    geometry = geometry_of(problem)
    kernel = "correlate_wgmma" if last and max(geometry.stride) == 1 else "phase_wgmma"
    if problem.extent == (128, 128) and not last:
        kernel = "phase_rows"  # 0.92 times as long
    assert make_plan(geometry, "bfloat16", layout_of(geometry, last), None, DEVICES[90]).kernel == kernel


FAR = (2, 128, 24, 24, 24), (4, 512, 33, 33)  # of shapes, with dilations whose boxes would be mostly halo


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind[1] or kind[0])
@pytest.mark.parametrize(("shape", "dilation"), [*zip(FAR, (4, 12), strict=True)], ids=["3d", "2d"])
def test_dilation_without_a_stride_has_boxes_without_its_halo(shape: Ints, dilation: int, kind: Kind) -> None:
    dtype, precision = kind

    def defines(shape: Ints, dilation: int, last: bool) -> dict[str, int]:
        geometry = geometry_of(case(shape, 128, 3, padding=dilation, dilation=dilation))
        return dict(make_plan(geometry, dtype, layout_of(geometry, last), precision, DEVICES[90]).defines)

    rows, channels_last = defines(shape, dilation, False), defines(shape, dilation, True)
    assert (rows["RESIDUES_D"], rows["RESIDUES_H"]) == (int(len(shape) == 5), 1)
    assert any(channels_last.get(f"APART_{axis}") for axis in "DHW")
    for last in (False, True):
        near = defines(shape, 1, last)
        assert not any(name.startswith(("RESIDUES", "APART")) for name in near)
    n, c_in, *extents = shape
    others = (n + 3, c_in, *(extent + 16 for extent in extents))
    assert defines(others, dilation, False) == rows  # nothing is compiled anew
    if precision != "tf32x3":  # whose tiles of boxes suit the size
        assert defines(others, dilation, True) == channels_last


# Measured to take 0.4 to 0.95 times as long as with the kernel that estimates had put first.
@pytest.mark.parametrize(
    ("problem", "precision", "last", "kernel"),
    [
        (case((2, 32, 40, 40, 40), 32, 3, 3), "tf32", False, "phase_wgmma"),
        (case((8, 256, 56, 56), 256, 3, padding=1, groups=16), "tf32", False, "phase_rows"),
        (case((4, 64, 32000), 1, 2), "tf32", False, "phase_rows"),
        (case((2, 256, 4000), 32, 8, 2, 1), "tf32", False, "phase_rows"),
        (case((16, 64, 10000), 16, 8, 1, 1), "tf32", False, "phase_rows"),
        (case((8, 320, 96, 96), 96, 3, 2, 1), "tf32", False, "phase_rows"),  # whose results have odd rows
        (case((4, 64, 40000), 4, 8, 4), "ieee", False, "few_channels"),  # the same rows, without tensor cores
        (case((2, 96, 48, 48, 48), 96, 3, groups=12), "tf32x3", True, "phase_wgmma"),
        (FIXED["kb73"], "tf32x3", True, "narrow_groups"),
        (case((16, 256, 64, 50), 4, 7, 2, 2, 1), "tf32x3", False, "tap_columns"),
        (case((16, 128, 32, 32), 3, 7, 2, 2, 1), "tf32x3", True, "tap_columns"),
        (case((64, 32, 50, 32), 3, 5, padding=2), "tf32x3", False, "tap_columns"),
        (case((2, 96, 45, 40, 24), 1, 3, 2), "tf32x3", False, "tap_columns"),
        (case((2, 96, 45, 40, 24), 4, 3, 2), "ieee", False, "few_channels"),  # phases and channels share what is read
        (case((16, 96, 50, 50), 1, 4, padding=1), "ieee", False, "gather"),
        (case((1, 4, 64, 45, 24), 64, 4, 2, 1), "tf32x3", True, "phase_wgmma"),
        (case((64, 3, 28, 50), 64, 4, 2, 1), "tf32", True, "phase_wgmma"),
        (case((4, 512, 48, 65), 16, 3, padding=1, dilation=2), "tf32", False, "phase_wgmma"),
        (case((4, 1024, 64, 33), 8, 3, padding=1), "tf32x3", False, "phase_wgmma"),
        (case((2, 256, 4000), 24, 3, 4), "tf32", False, "phase_wgmma"),
        (case((16, 256, 65, 64), 16, 1), "tf32", False, "phase_rows"),  # a product of matrices
        (case((4, 64, 16, 20, 33), 3, 3, 2), "tf32", False, "tap_columns"),
        (case((2, 192, 24, 32, 20), 96, 2, 2, groups=16), "tf32", True, "narrow_groups"),
        (case((8, 1024, 32, 32), 512, 2, 2), "tf32x3", False, "phase_rows"),
        (case((8, 1024, 32, 32), 512, 2, 2), "tf32", False, "phase_rows"),
        (case((2, 768, 8, 8, 8), 256, 2, 2), "tf32", False, "phase_rows"),
        (case((4, 512, 48, 48), 16, 3, padding=1), "tf32", False, "phase_rows"),
        (case((2, 128, 32, 32, 32), 64, 3, 2, 1, 1), "tf32", False, "phase_rows"),
        (case((64, 512, 8, 8), 256, 4, 2, 1), "tf32x3", False, "phase_wgmma"),
        (case((2, 64, 64, 64, 64), 32, 2, 2), "tf32", False, "disjoint"),
        (case((1, 192, 32, 32, 10), 32, 3, padding=1), "tf32", False, "phase_rows"),
        (case((2, 256, 4, 20, 32), 24, 3, padding=1), "tf32x3", False, "phase_rows"),
        (case((8, 48, 96, 96, 96), 24, 3), "tf32", False, "phase_wgmma"),  # whose blocks slide
    ],
    ids=[
        "runs-in-pieces",
        "unstrided-rows",
        "single-rows",
        "few-rows",
        "few-columns",
        "odd-rows",
        "single-rows-ieee",
        "groups-3d",
        "groups-written",
        "few-results",
        "few-results-last",
        "few-results-of-many-taps",
        "one-result",
        "few-results-of-phases-ieee",
        "one-result-ieee",
        "few-inputs",
        "few-inputs-2d",
        "few-results-of-many-inputs",
        "few-results-of-many-inputs-tf32x3",
        "few-results-of-many-inputs-1d",
        "few-results-of-one-tap",
        "few-results-of-a-volume",
        "disjoint-groups",
        "disjoint-of-many-tf32x3",
        "disjoint-of-many",
        "disjoint-volume-of-many",
        "unstrided-rows-of-many",
        "rows-of-a-volume",
        "short-rows-tf32x3",
        "disjoint-of-few",
        "few-results-of-a-volume-of-many",
        "few-results-of-a-volume-of-many-tf32x3",
        "few-results-of-a-volume-of-some",
    ],
)
def test_choice(problem: Problem, precision: str, last: bool, kernel: str) -> None:
    assert plan_of(problem, precision=precision, last=last).kernel == kernel


@pytest.mark.parametrize(("dtype", "channels"), [("float32", 16), ("bfloat16", 32)])
def test_blocks_write_whole_atoms_where_writing_bounds_them(dtype: str, channels: int) -> None:
    """With half of 64 bytes a block, 32 channels of TF32 took twice as long."""
    plan = wgmma_or_refusal(
        case((2, 32, 96, 96, 96), 32, 2, 2), dtype, "tf32" if dtype == "float32" else None, last=True
    )
    assert isinstance(plan, Plan)
    assert 8 * plan.tile.tiles_c >= channels


@pytest.mark.parametrize("arch", [arch for arch in DEVICES if arch != 90])
def test_wgmma_is_for_hopper_alone(arch: int) -> None:
    reason = f"needs compute capability 9.0, the device has {arch / 10}"
    assert wgmma_or_refusal(FIXED["kb61"], device=DEVICES[arch]) == Refusal("phase_wgmma", reason)


@pytest.mark.parametrize(
    ("problem", "dtype", "precision", "reason"),
    [
        (FIXED["kb61"], "float64", None, "computes in float16, bfloat16 and TF32, not in float64"),
        (FIXED["kb61"], "float32", "ieee", "computes in float16, bfloat16 and TF32, not in ieee"),
        (case((1, 8, 9), 8, 33), "float16", None, "unrolls at most 32 taps along W, got 33"),
        (case((1, 8, 9), 8, 3, 17), "float16", None, "holds at most 16 phases along W, got stride 17"),
        (
            case((1, 8, 9, 9), 8, 3, dilation=(1, 4000)),
            "float32",
            "tf32",
            f"no box with its halo fits into {DEVICES[90].shared_bytes} bytes of shared memory",
        ),
        (
            case((1, 8, 1, 1, 1), 8, (3, 1, 1), dilation=(2**30, 1, 1)),
            "float16",
            None,
            "stride and dilation * kernel must stay below 2**31 on every axis",
        ),
    ],
)
def test_refusals_of_phase_wgmma(problem: Problem, dtype: str, precision: str | None, reason: str) -> None:
    assert wgmma_or_refusal(problem, dtype, precision) == Refusal("phase_wgmma", reason)


def test_boxes_beyond_31_bits_are_refused() -> None:
    found = wgmma_or_refusal(case((2**20, 8, 2**13, 2**13, 1), 8, 1))
    assert isinstance(found, Refusal)
    assert found.reason.startswith("counts boxes in 31 bits, got ")


@settings(max_examples=max(EXAMPLES // 3, 1))
@given(problem=problems(), kind=kinds, last=st.booleans(), multiprocessors=st.sampled_from((1, 78, 132)))
def test_a_plan_of_phase_wgmma(problem: Problem, kind: Kind, last: bool, multiprocessors: int) -> None:
    device = dataclasses.replace(DEVICES[90], multiprocessors=multiprocessors)
    plan = wgmma_or_refusal(problem, *kind, device, last)
    choose_tile.cache_clear()
    assert wgmma_or_refusal(problem, *kind, device, last) == plan
    if isinstance(plan, Refusal):
        return
    assert_its_blocks_fit(plan)
    assert_boxes_cover_every_output(plan, seen_by(plan, geometry_of(problem), last), device)


@given(problem=problems(), kind=kinds, last=st.booleans(), n=st.sampled_from((1, 2, 37)), more=st.integers(1, 40))
def test_wgmma_is_compiled_for_neither_batch_nor_extents(
    problem: Problem, kind: Kind, last: bool, n: int, more: int
) -> None:
    assume(has_plane_with_a_tap(geometry_of(problem)))
    changed = dataclasses.replace(problem, n=n, extent=tuple(2 * extent + more for extent in problem.extent))
    plan, other = (wgmma_or_refusal(p, *kind, DEVICES[90], last) for p in (problem, changed))
    if isinstance(plan, Refusal):
        assert other == plan
        return
    assert isinstance(other, Plan)
    assert other.defines == plan.defines


@pytest.mark.parametrize(
    ("problem", "kind", "fields"),
    [
        (case((2, 64, 9, 9, 9), 32, 2, 2), ("float32", "tf32"), {"tiles_c": 4, "k_steps": 2, "all_phases": True}),
        (case((2, 64, 9, 9, 9), 32, 2, 2), ("bfloat16", None), {"tiles_c": 4, "k_steps": 2, "all_phases": True}),
        (FIXED["kb70"], ("float32", "tf32"), {"min_blocks": 2, "tiles_m": 4, "tiles_c": 3, "slides": True}),
        (FIXED["kb61"], ("float32", "tf32x3"), {"tiles_m": 3, "tiles_c": 6}),
    ],
)
def test_fast_tiles_are_not_thought_to_spill(problem: Problem, kind: Kind, fields: dict[str, int]) -> None:
    geometry = geometry_of(problem)
    found = candidates(geometry, kind[0], layout_of(geometry), kind[1], DEVICES[90])
    assert any(fields.items() <= dataclasses.asdict(plan.tile).items() for plan in found)


# Last layers of generators and decoders: where many channels become few, threads that walk over them are too few.
@pytest.mark.parametrize(
    ("problem", "last", "kernel"),
    [
        (case((8, 128, 128, 128), 3, 4, 2, padding=1), False, "tap_columns"),
        (case((64, 64, 32, 32), 3, 4, 2, padding=1), True, "tap_columns"),
        (case((2, 32, 64, 64, 64), 1, 3, 2, padding=1, output_padding=1), False, "tap_columns"),
        (case((2, 32, 64, 64, 64), 1, 3, 2, padding=1, output_padding=1), True, "tap_columns"),
        (case((2, 64, 48, 45, 24), 4, 4, 2, padding=1), False, "phase_gemm"),  # volumes with many columns
        (case((8, 3, 128, 128), 1, 4, 2, padding=1), False, "few_channels"),
    ],
)
def test_few_results_of_many_channels(problem: Problem, last: bool, kernel: str) -> None:
    assert plan_of(problem, last=last).kernel == kernel


# Many phases, or few channels, that all read the same positions of x: columns of one GEMM.
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(
    ("problem", "kernel"),
    [
        (case((8, 1026, 500), 1, 1024, 256), "phase_gemm"),  # an inverse short-time Fourier transform
        (case((4, 512, 4000), 1, 16, 8), "tap_columns"),  # a decoder of separated speech
        (case((4, 21, 16, 16), 21, 64, 32), "phase_gemm"),
        (case((64, 64, 32, 32), 3, 4, 2, padding=1), "tap_columns"),  # where taps are columns, too
    ],
)
def test_phases_as_channels(problem: Problem, kernel: str, last: bool) -> None:
    assert plan_of(problem, last=last).kernel == kernel
    geometry = geometry_of(problem)
    plan = plan_or_refusal("phase_gemm", geometry, "float32", layout_of(geometry, last), "tf32x3", DEVICES[90])
    assert isinstance(plan, Plan)
    assert plan.tile.phases_as_channels


@pytest.mark.parametrize(
    "problem",
    [
        case((2, 64, 20, 30), 3, 3, 2),  # phases of two taps, and of one
        case((2, 64, 20, 30), 3, 4, 2, dilation=2),  # half of the phases have no tap
        case((2, 64, 20, 30), 3, 4),  # a single phase
        case((2, 64, 20, 30), 3, (4, 3), (2, 2)),
    ],
)
def test_phases_that_are_not_alike_are_no_channels(problem: Problem) -> None:
    geometry = geometry_of(problem)
    plans = phase_gemm_candidates(geometry, "float16", layout_of(geometry), None, DEVICES[90])
    assert {plan.tile.phases_as_channels for plan in plans} == {False}


# ---- taps as columns ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("problem", "kind", "arch", "reason"),
    [
        (case((2, 64, 9, 9), 5, 3), ("float32", None), 90, "serves at most 4 output channels a group, got 5"),
        (case((2, 15, 9, 9), 3, 3), ("float32", None), 90, "serves at least 16 input channels a group, got 15"),
        (case((2, 64, 9, 9), 3, 1), ("float16", None), 90, "serves kernels of several taps"),
        (case((2, 64, 9, 9, 9), 2, 7), ("float16", None), 90, "holds at most 512 taps x output channels, got 686"),
        (case((2, 64, 9), 2, 33), ("float16", None), 90, "unrolls at most 32 taps along W, got 33"),
        (case((2, 64, 9), 2, 3, 17), ("float16", None), 90, "holds at most 16 phases along W, got stride 17"),
        (
            case((2, 64, 9), 2, 2, dilation=3),
            ("float16", None),
            90,
            "a box ends one position beyond all taps, which dilation 3 may exceed",
        ),
        (
            case((2, 64, 9, 9, 9), 2, 2, 2, dilation=(9, 5, 3)),
            ("float16", None),
            90,
            "a box ends one position beyond all taps, which dilation 5 may exceed",
        ),
        (case((2, 64, 9, 9), 2, (2, 2), dilation=(90000, 1)), ("float32", None), 90, "no tile fits into 232448 bytes"),
        (
            case((2, 64, 9, 9), 3, 3),
            ("float32", "ieee"),
            90,
            "computes in float16, bfloat16 and TF32, not in ieee",
        ),
    ],
)
def test_refusals_of_tap_columns(problem: Problem, kind: Kind, arch: int, reason: str) -> None:
    geometry = geometry_of(problem)
    kind = kind[0], kind[1] or DEFAULT[kind[0]]
    found = plan_or_refusal("tap_columns", geometry, kind[0], layout_of(geometry), kind[1], DEVICES[arch])
    assert isinstance(found, Refusal)
    assert found.reason.startswith(reason)


@pytest.mark.parametrize("kind", [("float32", "tf32x3"), ("bfloat16", None)])
@pytest.mark.parametrize(
    "problem",
    [case((2, 64, 40, 52), 3, 4, 2, padding=1), case((1, 48, 20, 24, 28), 1, 3), case((4, 256, 512), 4, 16, 8)],
    ids=["2d", "3d", "1d"],
)
def test_taps_as_columns_are_compiled_for_neither_batch_nor_extents(problem: Problem, kind: Kind) -> None:
    plans = []
    for n, extents in ((1, [1] * problem.rank), (2, [33] * problem.rank), (9, [100] * problem.rank)):
        geometry = geometry_of(dataclasses.replace(problem, n=n, extent=tuple(extents)))
        plans.append(plan_or_refusal("tap_columns", geometry, kind[0], layout_of(geometry), kind[1], DEVICES[90]))
    assert all(isinstance(plan, Plan) for plan in plans)
    assert len({plan.defines for plan in plans if isinstance(plan, Plan)}) == 1


# ---- kernel = stride ----------------------------------------------------------------------------------------------


def disjoint_or_refusal(
    problem: Problem, kind: Kind = ("float16", None), device: Device = DEVICES[90], last: bool = False, **changed: Any
) -> Plan | Refusal:
    geometry = geometry_of(problem)
    layout = dataclasses.replace(layout_of(geometry, last), **changed)
    return plan_disjoint(geometry, kind[0], layout, kind[1] or DEFAULT[kind[0]], device)


@pytest.mark.parametrize(
    ("problem", "kind", "arch", "reason"),
    [
        (FIXED["unet_k2s2"], ("float16", None), 80, "needs compute capability 9.0, the device has 8.0"),
        (
            FIXED["unet_k2s2"],
            ("float32", "ieee"),
            90,
            "computes in float16, bfloat16 and TF32, not in ieee",
        ),
        (
            FIXED["unet_k3s2"],
            ("float16", None),
            90,
            "serves kernel = stride, got kernel (3, 3, 3), stride (2, 2, 2), dilation (1, 1, 1)",
        ),
        (
            case((1, 8, 9, 9), 8, 2, 2, dilation=(1, 3)),
            ("float16", None),
            90,
            "serves kernel = stride, got kernel (1, 2, 2), stride (1, 2, 2), dilation (1, 1, 3)",
        ),
        (
            case((1, 8, 9), 8, 25, 25),
            ("float16", None),
            90,
            "has all taps along W in one wgmma, at most 24, got 25",
        ),
        (
            case((1, 321, 9, 9), 8, 2, 2),
            ("float32", "tf32"),
            90,
            "holds all channels of a position in registers, got 321",
        ),
        (
            case((1, 385, 9, 9), 8, 2, 2),
            ("float16", None),
            90,
            "holds all channels of a position in registers, got 385",
        ),
        (
            case((2**20, 8, 2**13, 2**13, 1), 8, 1),
            ("float16", None),
            90,
            f"counts positions in 31 bits, got {2**46}",
        ),
    ],
)
def test_refusals_of_disjoint(problem: Problem, kind: Kind, arch: int, reason: str) -> None:
    assert disjoint_or_refusal(problem, kind, DEVICES[arch]) == Refusal("disjoint", reason)


def test_as_many_channels_as_registers_hold_are_served() -> None:
    assert isinstance(disjoint_or_refusal(case((1, 320, 9, 9), 8, 2, 2), ("float32", "tf32")), Plan)
    assert isinstance(disjoint_or_refusal(case((1, 384, 9, 9), 8, 2, 2), ("float16", None)), Plan)


def test_a_tap_may_have_any_dilation() -> None:
    assert isinstance(disjoint_or_refusal(case((1, 8, 9, 9), 8, (1, 2), (1, 2), dilation=(7, 1))), Plan)


@settings(max_examples=max(EXAMPLES // 3, 1))
@given(
    problem=problems(),
    kind=kinds,
    last=st.booleans(),
    multiprocessors=st.sampled_from((1, 78, 132)),
    n=st.sampled_from((1, 37)),
    more=st.integers(0, 40),
)
def test_a_plan_of_disjoint(problem: Problem, kind: Kind, last: bool, multiprocessors: int, n: int, more: int) -> None:
    device = dataclasses.replace(DEVICES[90], multiprocessors=multiprocessors)
    own = {"kernel": problem.stride, "dilation": (1,) * problem.rank, "padding": ((0, 0),) * problem.rank}
    problem = dataclasses.replace(problem, **own, output_padding=tuple(stride - 1 for stride in problem.stride))
    plan = disjoint_or_refusal(problem, kind, device, last)
    if isinstance(plan, Refusal):
        assert kind[1] == "ieee" or kind[0] == "float64"
        return
    assert (plan.shared_bytes + 1024) * dict(plan.defines)["MIN_BLOCKS"] <= DEVICES[90].shared_bytes + 1024
    assert_runs_cover_every_output(plan, geometry_of(problem), device)
    # Neither the batch nor extents are compiled.
    other = dataclasses.replace(problem, n=n, extent=tuple(extent + more for extent in problem.extent))
    assert disjoint_or_refusal(other, kind, device, last).defines == plan.defines


# Whether runs of x are loaded at once, and how many outputs are stored at a time.
VECTORS = {
    "pairs of floats": (case((1, 8, 9, 10), 8, 2, 2), "float32", {}, (1, 4)),
    "pairs of halves": (case((1, 64, 9, 12), 32, 2, 2), "float16", {}, (1, 4)),
    "halves of four taps": (case((1, 64, 9, 12), 32, (2, 4), (2, 4)), "float16", {}, (1, 8)),
    "a row of odd length": (case((1, 8, 9, 9), 8, 2, 2), "float32", {}, (0, 1)),
    "words of such a row": (case((1, 64, 9, 9), 32, 2, 2), "float16", {}, (0, 2)),
    "halves of such a row": (case((1, 64, 9, 9), 32, 3, 3), "float16", {}, (0, 1)),
    "likewise, in longer ones": (
        case((1, 8, 9, 9), 8, 2, 2),
        "float32",
        {"out": (3024, 378, 378, 21, 1)},
        (0, 1),
    ),
    "a misaligned x": (case((1, 8, 9, 10), 8, 2, 2), "float32", {"x_aligned": False}, (0, 4)),
    "a misaligned result": (case((1, 8, 9, 10), 8, 2, 2), "float32", {"out_aligned": False}, (1, 1)),
    "reversed rows": (case((1, 8, 9, 10), 8, 2, 2), "float32", {"out": (2880, 360, 360, 20, -1)}, (1, 1)),
    "rows of x that begin within a run": (case((1, 8, 9, 11), 8, 2, 2, ((0, 0), (2, 0))), "float32", {}, (0, 4)),
    "outputs before the first one": (case((1, 8, 9, 10), 8, 2, 2, ((0, 0), (1, 1))), "float32", {}, (1, 1)),
}


@pytest.mark.parametrize("name", VECTORS)
def test_aligned_rows_are_loaded_and_stored_at_once(name: str) -> None:
    problem, dtype, changed, expected = VECTORS[name]
    plan = disjoint_or_refusal(problem, (dtype, "tf32" if dtype == "float32" else None), **changed)
    assert isinstance(plan, Plan)
    fields = problem_of(plan)
    assert (*fields["x_vector"], *fields["out_vector"]) == expected


def test_few_positions_have_parts_of_the_weights() -> None:
    few, many = (disjoint_or_refusal(case((1, 64, *extent), 64, 2, 2)) for extent in ((4, 4, 4), (64, 64, 64)))
    assert isinstance(few, Plan)
    assert isinstance(many, Plan)
    assert problem_of(few)["patches"][0] > 1
    assert problem_of(many)["patches"][0] == 1


# How many outputs along W of a position are written at a time, by one channel's rows.
RUNS = {
    "two floats": (case((1, 8, 9, 9), 8, 2, 2), "float32", {}, 2),
    "four floats": (case((1, 8, 9), 8, 16, 8, 4), "float32", {}, 4),
    "eight halves": (case((1, 8, 9), 8, 16, 8, 4), "float16", {}, 8),
    "half of eight bytes": (case((1, 8, 9), 8, 6, 4), "float16", {}, 2),
    "parts of a position, between which others lie": (case((1, 8, 9), 8, 6, 6), "float16", {}, 1),
    "less than sixteen bytes, since rows have no multiple of eight": (case((1, 8, 9), 8, 12, 8), "float16", {}, 1),
    "the same of floats": (case((1, 8, 9), 8, 6, 4), "float32", {}, 1),
    "stride 1": (case((1, 8, 10), 8, 1), "float16", {}, 1),
    "odd rows": (case((1, 8, 9, 9), 8, 3, 2, 1), "float32", {}, 1),
    "a misaligned result": (case((1, 8, 9, 9), 8, 2, 2), "float32", {"out_aligned": False}, 1),
    "rows in longer ones": (case((1, 8, 9, 9), 8, 2, 2), "float32", {"out": (3200, 400, 400, 20, 1)}, 2),
    "rows in longer, odd ones": (case((1, 8, 9, 9), 8, 2, 2), "float32", {"out": (3024, 378, 378, 21, 1)}, 1),
    "reversed rows": (case((1, 8, 9, 9), 8, 2, 2), "float32", {"out": (2592, 324, 324, 18, -1)}, 1),
    "channels last": (case((1, 8, 9, 9), 8, 2, 2), "float32", {"out": (2592, 1, 2592, 144, 8)}, 1),
}


@pytest.mark.parametrize("name", RUNS)
def test_aligned_rows_are_written_as_runs(name: str) -> None:
    problem, dtype, changed, run = RUNS[name]
    geometry = geometry_of(problem)
    layout = dataclasses.replace(layout_of(geometry), **changed)
    plan = plan_phase_wgmma(geometry, dtype, layout, "tf32" if dtype == "float32" else None, DEVICES[90])
    assert isinstance(plan, Plan)
    defines = dict(plan.defines)
    assert defines["OUT_RUN"] == run
    assert defines["FIRST_PHASE_W"] == (geometry.pad_before[2] % geometry.stride[2] if run > 1 else 0)


@pytest.mark.parametrize(
    ("stride", "changed", "run"),
    [
        (2, {}, 4),
        (2, {"out_aligned": False}, 1),
        (2, {"out": (8 * 16 * 33, 16 * 33, 16 * 33, 33, 1)}, 1),
        (1, {}, 2),
        (4, {}, 4),
        (3, {}, 1),
    ],
    ids=["aligned", "misaligned", "rows in longer, odd ones", "two outputs of a pair", "sixteen bytes", "six outputs"],
)
def test_outputs_of_a_pair_leave_together_or_are_exchanged(stride: int, changed: dict[str, Any], run: int) -> None:
    geometry = geometry_of(case((1, 32, 8, 16), 8, stride, stride))
    layout = dataclasses.replace(layout_of(geometry), **changed)
    plan = plan_phase_rows(geometry, "float32", layout, "tf32", DEVICES[90])
    assert isinstance(plan, Plan)
    assert dict(plan.defines)["OUT_RUN"] == run
    apart = dataclasses.replace(layout, out=tuple(2 * distance for distance in layout.out))
    refused = plan_phase_rows(geometry, "float32", apart, "tf32", DEVICES[90])
    assert refused == Refusal("phase_rows", "stores outputs of a row next to each other")


def test_sums_that_are_shifted_are_turned() -> None:
    """Taps that are multiplied at once and overlap: a thread does not hold an output's whole sum."""
    problem, none = case((1, 8, 9, 9, 9), 8, 4, 2, 1), case((1, 8, 9, 9, 9), 8, 2, 2)
    for this, run in ((problem, 1), (none, 2)):
        geometry = geometry_of(this)
        layout = layout_of(geometry)
        runs = {
            dict(plan.defines)["OUT_RUN"]
            for plan in candidates(geometry, "float16", layout, None, DEVICES[90])
            if dict(plan.defines)["MERGE_W"]
        }
        assert runs == {run}


# ---- 32 and 64 bits ----------------------------------------------------------------------------------------------


def line(n: int = 1, c_in: int = 1, c_out: int = 1, x: int = 1, padding: int = 0, stride: int = 1) -> Geometry:
    """Return a 1-D problem with kernel 1."""
    return make_geometry(1, (n, c_in, x), (c_in, c_out, 1), None, (stride,), ((padding, padding),), (0,), 1, (1,), None)


def index64(geometry: Geometry, **strides: Ints) -> bool:
    """Whether a plan indexes with 64 bits where all strides but the given ones are 0."""
    layout = Layout(**{"x": (0,) * 5, "weight": (0,) * 5, "bias": None, "out": (0,) * 5, **strides})
    needed = bool(dict(made_by_gather(geometry, layout).defines)["INDEX64"])
    few_channels = plan_few_channels(geometry, "float32", layout, "ieee", DEVICES[90])
    if isinstance(few_channels, Plan):  # its offsets start beyond x, so that it may need them earlier
        assert dict(few_channels.defines)["INDEX64"] >= needed
    return needed


def made_by_gather(geometry: Geometry, layout: Layout) -> Plan:
    plan = plan_gather(geometry, "float32", layout, "ieee", DEVICES[90])
    assert isinstance(plan, Plan), plan
    return plan


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("array", ["x", "out"])
def test_index64_follows_the_span_of_x_and_out(array: str, sign: int) -> None:
    geometry = line(n=2)
    assert not index64(geometry, **{array: (sign * (LIMIT - 1), 1, 1, 1, 1)})
    assert index64(geometry, **{array: (sign * LIMIT, 1, 1, 1, 1)})
    # The span is the sum over axes, whichever way each runs.
    geometry = line(n=2, c_in=2, c_out=2)
    assert not index64(geometry, **{array: (LIMIT // 2, sign * (LIMIT // 2 - 1), 1, 1, 1)})
    assert index64(geometry, **{array: (LIMIT // 2, sign * (LIMIT // 2), 1, 1, 1)})


@pytest.mark.parametrize(
    ("problem", "dtype", "last", "groups"),
    [
        (FIXED["kb73"], "float16", True, 2),
        (FIXED["kb72"], "bfloat16", True, 2),
        (FIXED["kb73"], "float16", False, 1),  # rows of one channel follow each other
        (FIXED["kb73"], "float32", True, 1),  # eight channels are a sector
        (case((2, 24, 4, 5, 9), 24, 3, stride=2, groups=3), "float16", True, 1),
        (case((2, 32, 4, 5, 9), 64, 3, stride=2, groups=4), "float16", True, 1),
    ],
)
def test_two_groups_of_half_a_sector_are_taken_at_once(problem: Problem, dtype: str, last: bool, groups: int) -> None:
    geometry = geometry_of(problem)
    plan = plan_narrow_groups(geometry, dtype, layout_of(geometry, last), DEFAULT[dtype], DEVICES[90])
    assert isinstance(plan, Plan)
    assert dict(plan.defines)["GROUPS"] == groups


def test_index64_follows_the_span_of_the_weight() -> None:
    geometry = line(c_in=2)
    assert not index64(geometry, weight=(LIMIT - 1, 1, 1, 1, 1))
    assert index64(geometry, weight=(LIMIT, 1, 1, 1, 1))
    assert index64(geometry, weight=(-LIMIT, 1, 1, 1, 1))
    assert not index64(line(), weight=(LIMIT, 1, 1, 1, 1)), "an axis of extent 1 has no span"


def test_index64_follows_the_extents() -> None:
    # Strides of 0: the arrays have one element in memory, yet positions count up to the extent.
    crop = 2**30
    assert not index64(line(x=LIMIT - 1, padding=crop - 1000))
    assert index64(line(x=LIMIT, padding=crop - 1000))
    assert index64(line(x=LIMIT // 2 + 1, stride=2))
    assert not index64(line(x=LIMIT // 2 - 1000, stride=2))


@given(below=st.integers(-20, 5000), padding=st.integers(0, 9), stride=st.integers(1, 5))
def test_index32_holds_every_position_that_a_block_computes(below: int, padding: int, stride: int) -> None:
    geometry = line(x=(LIMIT - below) // stride, padding=padding, stride=stride)
    layout = Layout(x=(0,) * 5, weight=(0,) * 5, bias=None, out=(0,) * 5)
    plan = made_by_gather(geometry, layout)
    reached = padding // stride + problem_of(plan)["tiles"][2] * box_of(plan)[2]  # one past the last box
    if not dict(plan.defines)["INDEX64"]:
        assert reached * stride < LIMIT
    if below > 4000:
        assert not dict(plan.defines)["INDEX64"], "64 bits long before they are needed"


def wgmma_of_huge(problem: Problem, last: bool = False, **strides: Ints) -> Plan | Refusal:
    geometry = geometry_of(problem)
    layout = dataclasses.replace(layout_of(geometry, last), **strides)
    return plan_phase_wgmma(geometry, "float16", layout, None, DEVICES[90])


def test_wgmma_counts_from_where_a_box_begins() -> None:
    """Arrays of any size have the same specialisation, as long as a box's elements are near each other."""
    few, many = (case((n, 64, 64, 64, 64), 32, 4, 2, 1) for n in (2, 5000))
    for last in (False, True):
        small, huge = (wgmma_of_huge(problem, last) for problem in (few, many))
        assert isinstance(small, Plan)
        assert isinstance(huge, Plan)
        assert small.defines == huge.defines
    large = wgmma_of_huge(case((1, 64, 400, 410, 410), 32, 4, 2, 1))
    assert isinstance(large, Plan)
    assert dict(large.defines)["FAR_CHANNELS"] == 1
    assert {**dict(large.defines), "FAR_CHANNELS": 0} == dict(wgmma_of_huge(few).defines)


@pytest.mark.parametrize(("dtype", "precision", "sector"), [("float32", "tf32", 8), ("bfloat16", None, 16)])
def test_boxes_of_wgmma_end_with_sectors_where_rows_do(dtype: str, precision: str | None, sector: int) -> None:
    """What writes a part of a sector takes several times as long: seven positions would fit these extents better."""
    problem = case((8, 64, 28, 56), 256, 4, 2, 1)
    plan = wgmma_or_refusal(problem, dtype, precision)
    assert isinstance(plan, Plan)
    assert problem.out_shape[-1] % sector == 0
    assert 2 * problem_of(plan)["box"][2] % sector == 0


def test_boxes_of_wgmma_reach_elements_in_32_bits() -> None:
    """Slices of x or of the result so far apart that a box has fewer of them, and then that it has none at all."""
    problem = case((64, 64, 64, 6, 6), 64, 2, 2)  # enough positions for the largest boxes

    def depth(array: str, apart: int) -> int | Refusal:
        strides = getattr(layout_of(geometry_of(problem), True), array)
        plan = wgmma_of_huge(problem, True, **{array: (*strides[:2], apart, *strides[3:])})
        return plan if isinstance(plan, Refusal) else problem_of(plan)["box"][0]

    # A position has two slices of the result.
    for apart, of_x, of_out in ((2**28, 3, 3), (2**29, 3, 2), (2**30 + 2**29, 2, 1), (2**31 - 2**20, 2, 1)):
        assert depth("x", apart) == depth("x", -apart) == of_x
        assert depth("out", apart) == depth("out", -apart) == of_out
    refused = depth("out", 2**31)
    assert isinstance(refused, Refusal)
    assert "in 32 bits" in refused.reason
    rows = layout_of(geometry_of(problem))
    for array in ("x", "out"):
        strides = getattr(rows, array)
        assert isinstance(wgmma_of_huge(problem, **{array: (strides[0], 2**31, *strides[2:])}), Refusal)
    long = wgmma_of_huge(case((1, 64, 2**29), 64, 8, 4), True)
    assert isinstance(long, Refusal)
    assert "31 bits" in long.reason


# Channels of x, groups, extents, dtype and precision, and whether bulk tensor copies can bring channels-last x.
BROUGHT = (
    (64, 1, (9, 9), "bfloat16", None, True),
    (40, 1, (9, 9), "float16", None, True),
    (36, 1, (9, 9), "float32", "tf32", True),
    (64, 1, (9, 9), "float32", "tf32x3", True),
    (34, 1, (9, 9), "float32", "tf32x3", False),  # rows of 136 bytes
    (36, 1, (9, 9), "bfloat16", None, False),  # rows of 72 bytes
    (64, 2, (9, 9), "bfloat16", None, True),
    (96, 2, (9, 9), "float32", "tf32", True),
    (80, 2, (9, 9), "bfloat16", None, False),  # a chunk would have channels of both groups
    (40, 1, (1, 1), "bfloat16", None, True),
    (36, 1, (1, 1), "bfloat16", None, False),  # as of more positions
)


@pytest.mark.parametrize(("c_in", "groups", "extent", "dtype", "precision", "brought"), BROUGHT)
def test_bulk_copies_bring_channels_last_x(
    c_in: int, groups: int, extent: tuple[int, ...], dtype: str, precision: str | None, brought: bool
) -> None:
    geometry = geometry_of(case((1, c_in, *extent), 48, 3, 2, groups=groups))
    last = layout_of(geometry, last=True)
    plan = plan_phase_wgmma(geometry, dtype, last, precision, DEVICES[90])
    assert isinstance(plan, Plan)
    assert plan.tile.boxed == bool(plan.maps) == bool(dict(plan.defines)["BOXED"]) == brought
    if brought:
        assert plan.maps[0].dtype == ("float32" if precision == "tf32x3" else precision or dtype)
        chunk = plan.maps[0].channels
        assert plan.maps[0].row_bytes in (32, 64, 128)
        assert groups == 1 or geometry.c_in_per_group % chunk == 0
        assert all(other.tile.boxed for other in candidates(geometry, dtype, last, precision, DEVICES[90]))
    tile = dataclasses.replace(
        plan.tile, boxed=True, workers=2, stagers=1, min_blocks=1, take_turns=False, half_k=False
    )
    for layout in (layout_of(geometry), dataclasses.replace(last, x_aligned=False)):
        assert not plan_phase_wgmma(geometry, dtype, layout, precision, DEVICES[90]).maps
        refused = plan_phase_wgmma(geometry, dtype, layout, precision, DEVICES[90], tile)
        assert isinstance(refused, Refusal)
        assert "cannot bring x" in refused.reason


# ---- what a kernel is given --------------------------------------------------------------------------------------


def test_the_problem_is_the_struct_of_the_header() -> None:
    parameters = ((4, 5, 6), ((1, 2), (3, 4), (5, 6)), (0, 1, 2), 3, (2, 3, 1), None)
    geometry = make_geometry(3, (2, 6, 11, 12, 13), (6, 7, 3, 4, 5), (21,), *parameters)
    layout = Layout(x=(1, 2, 3, 4, 5), weight=(6, 7, 8, 9, 10), bias=11, out=(12, 13, 14, 15, 16))
    plan = made_by_gather(geometry, layout)
    fields, box = problem_of(plan), box_of(plan)
    named = {
        "n": (2,),
        "groups": (3,),
        "c_in": (2,),
        "c_out": (7,),
        "x_extent": (11, 12, 13),
        "out_extent": geometry.out_extent,
        "pad": (1, 3, 5),
        "x_stride": (1, 2, 3, 4, 5),
        "weight_stride": (6, 7, 8, 9, 10),
        "bias_stride": (11,),
        "out_stride": (12, 13, 14, 15, 16),
        "tiles": (*fields["tiles"][:3], -(-7 // box[3])),
    }
    assert {name: fields[name] for name in named} == named


def test_places_in_the_struct() -> None:
    assert [name for name, length in struct_fields() for _ in range(length)].index("patches") == PATCHES
    assert dict(struct_fields())["shares"] == SHARES


def test_the_problem_is_passed_as_one_struct() -> None:
    pytest.importorskip("cupy")
    from cuconvt.cuda import problem_struct

    plan = plan_of(FIXED["kb77"])
    struct = problem_struct(plan)
    assert struct.nbytes == 8 * sum(length for _, length in struct_fields())
    assert struct.view("i8").tolist() == list(plan.problem)


@given(kernel=st.integers(1, 9), stride=st.integers(1, 9), dilation=st.integers(1, 9))
def test_taps_of_a_phase_are_evenly_spaced(kernel: int, stride: int, dilation: int) -> None:
    """Kernels walk a phase by its first tap, STEP and HOP of the header's ``Axis`` instead of a list."""
    step, hop = stride // gcd(stride, dilation), dilation // gcd(stride, dilation)
    for phase in axis_phases(kernel, stride, dilation):
        assert list(phase.taps) == list(range(phase.taps[0], kernel, step)) if phase.taps else True
        assert all(back == phase.back[0] + j * hop for j, back in enumerate(phase.back))
        assert len(phase.taps) <= -(-kernel // step)
        assert bool(phase.taps) == any(k * dilation % stride == phase.residue for k in range(kernel))


@pytest.mark.parametrize(
    ("strides", "expected"),
    [
        (contiguous((2, 8, 3, 4, 5)), False),
        (channels_last((2, 8, 3, 4, 5)), True),
        (channels_last((2, 8, 1, 1, 5)), True),
        (channels_last((2, 1, 3, 4, 5)), False),  # one channel: the same memory as contiguous
        (contiguous((2, 8, 1, 1, 1)), False),  # one position: the same memory as channels-last
        ((480, -1, 160, 40, 8), True),
        ((480, 1, 160, 40, -1), False),
        ((480, 1, 160, 40, 0), True),
        ((480, 2, 160, 40, 16), False),  # every second channel
        ((480, 0, 20, 5, 1), False),  # one channel for all
    ],
)
def test_channels_last_is_read_off_the_strides(strides: Ints, expected: bool) -> None:
    other = (1, 7, 7, 7, 7)
    assert Layout(x=strides, weight=other, bias=None, out=other).x_channels_last == expected
    assert Layout(x=other, weight=other, bias=None, out=strides).out_channels_last == expected


def test_channels_last_selects_the_order_of_visits() -> None:
    for last in (False, True):
        defines = dict(plan_of(FIXED["kb61"], last=last).defines)
        assert (defines["X_CHANNELS_LAST"], defines["OUT_CHANNELS_LAST"]) == (last, last)


def test_blocks_walk_only_where_slices_are_shared() -> None:
    for kernel, stride, dilation, walks in ((3, 1, 1, True), (3, 2, 1, True), (2, 2, 1, False), (3, 1, 2, False)):
        geometry = geometry_of(case((1, 32, 9, 9, 9), 24, kernel, stride, dilation=dilation))
        work = Work(geometry, "bfloat16", None, layout_of(geometry))
        assert any(tile.slides for tile in tiles(work)) == walks


def outputs_of_taps(geometry: Geometry) -> dict[int, set[tuple[int, int]]]:
    """Return which taps and positions along D reach which planes of the result."""
    found: dict[int, set[tuple[int, int]]] = {}
    for position, tap in itertools.product(range(geometry.x_extent[0]), range(geometry.kernel[0])):
        output = position * geometry.stride[0] + tap * geometry.dilation[0] - geometry.pad_before[0]
        if 0 <= output < geometry.out_extent[0]:
            found.setdefault(output, set()).add((position, tap))
    return found


@pytest.mark.parametrize("kernel", [1, 2, 3, 5])
@pytest.mark.parametrize(("stride", "dilation"), [(2, 2), (2, 4), (4, 2), (6, 3), (3, 2), (6, 4)])
def test_planes_that_taps_reach_are_a_problem_of_their_own(kernel: int, stride: int, dilation: int) -> None:
    for padding, extent in itertools.product(range(dilation * (kernel - 1) + 1), (1, 4)):
        shape, pads = (2, 32, extent, 5, 9), ((padding, 0), 0, 0)
        try:
            problem = case(shape, 24, (kernel, 3, 3), (stride, 1, 1), pads, dilation=(dilation, 1, 1))
            geometry = geometry_of(problem)
        except ValueError:  # no output is left
            continue
        layout = layout_of(geometry)
        reached, of_reached, planes = reached_planes(geometry, layout)
        assert planes.extent == geometry.out_extent[0]
        assert of_reached.out[2] == planes.step * layout.out[2]
        assert 0 <= planes.first < planes.step
        last = planes.first + planes.step * (reached.out_extent[0] - 1)
        assert last < planes.extent <= last + planes.step
        expected = outputs_of_taps(geometry)
        assert {
            planes.first + planes.step * output: taps for output, taps in outputs_of_taps(reached).items()
        } == expected
        assert reached_planes(reached, of_reached) == (reached, of_reached, Planes(reached.out_extent[0], 0, 1))


def test_planes_with_gaps_are_all_planned() -> None:
    geometry = geometry_of(case((2, 32, 4, 5, 9), 24, 3, 2, dilation=2))
    for layout in (layout_of(geometry, True), dataclasses.replace(layout_of(geometry), out=(9999, 999, 99, 33, 1))):
        assert reached_planes(geometry, layout) == (geometry, layout, Planes(geometry.out_extent[0], 0, 1))
