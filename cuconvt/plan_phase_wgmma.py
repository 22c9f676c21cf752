"""Plans of the kernel for Hopper's tensor cores, ``kernels/phase_wgmma.cu``."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from math import inf, prod

from cuconvt.geometry import Geometry
from cuconvt.plan import (
    INDEX_LIMIT,
    SHARES,
    Device,
    Ints,
    Layout,
    Plan,
    Refusal,
    all_positions,
    positions,
    positions_reached,
    problem_parameters,
    refuse_phases,
    refuse_steps,
    refuse_taps,
    refuse_tensor_cores,
    round_up,
)
from cuconvt.plan_copies import x_copy_macros, x_is_vector
from cuconvt.plan_phase_wgmma_work import Work, reached_planes
from cuconvt.plan_rounds import AROUND, AROUND_OF_BOXED, AROUND_OF_SPLIT, takes_longest_first, taps_of_phases
from cuconvt.plan_search import remembered
from cuconvt.plan_shares import share_columns
from cuconvt.plan_views import batch_as_depth, with_residues_as_phases
from cuconvt.plan_wgmma_boxes import best_tile
from cuconvt.plan_wgmma_launch import grid_of, wgmma_defines
from cuconvt.plan_wgmma_sizes import (
    BESIDE_SUMS,
    MAX_BLOCKS,
    MAX_COLUMNS,
    RESIDENT_BYTES,
    Shape,
    Tile,
    altered,
    kinds_of_blocks,
    registers_of,
)

MAX_COLUMNS_OF_THREE = 104  # where three blocks share a multiprocessor: ptxas refuses more sums at a time
MAX_UNROLLED = 450  # wgmmas of a chunk, where a block owns all phases: more take seconds to compile
MAX_UNROLLED_SLICE = 200  # of a slice and chunk, where rows wait for their weights
MAX_UNROLLED_STORES = 128  # for a thread's two rows, where results are not turned
PACKS_ITSELF = 2  # as the kernel has it: a launch whose blocks pack the weights themselves
MAX_STEPS_OF_CHAIN = 16  # of a chain of longer chunks than others: the tensor core truncates each sum
MAX_CHAINS = 256  # of 3xTF32 that an output adds up: with more, their roundings count, and chains are longer instead


def plan_phase_wgmma(
    geometry: Geometry, dtype: str, layout: Layout, precision: str | None, device: Device, tile: Tile | None = None
) -> Plan | Refusal:
    """Propose the tile with the least estimated time, or a given one, or say why wgmma does not serve."""
    if reason := _refuse(geometry, dtype, precision, device):
        return Refusal("phase_wgmma", reason)
    geometry, layout = batch_as_depth(geometry, layout)
    if tile is not None:
        work = work_of(geometry, dtype, precision, layout, tile.residues)
        cost = work.with_pairs().typical_cost(tile, device)
        return plan_tile(geometry, dtype, layout, precision, device, tile, cost or 0.0)
    works = works_of(geometry, dtype, precision, layout)
    choices = [choice for work in works if (choice := choose_tile(work.with_pairs().shape, device)) is not None]
    plans = [plan_tile(geometry, dtype, layout, precision, device, *choice) for choice in choices]
    if not plans:
        return Refusal("phase_wgmma", f"no box with its halo fits into {device.shared_bytes} bytes of shared memory")
    return min(plans, key=lambda plan: plan.cost if isinstance(plan, Plan) else inf)


def works_of(geometry: Geometry, dtype: str, precision: str | None, layout: Layout) -> list[Work]:
    """Return the problem as it is and, with dilation but no stride along D or H, with residues modulo it as phases."""
    g = geometry
    dilated = tuple(
        int(axis < 2 and k > 1 == st and d > 1)
        for axis, (k, st, d) in enumerate(zip(g.kernel, g.stride, g.dilation, strict=True))
    )
    return [work_of(g, dtype, precision, layout, residues) for residues in dict.fromkeys(((0, 0, 0), dilated))]


def work_of(geometry: Geometry, dtype: str, precision: str | None, layout: Layout, residues: Ints) -> Work:
    """Return the problem, in 3-D form, in one of these ways."""
    return Work(with_residues_as_phases(geometry, residues), dtype, precision, layout, residues)


def candidates(geometry: Geometry, dtype: str, layout: Layout, precision: str | None, device: Device) -> Iterator[Plan]:
    """Yield a plan for every tile that fits, among them the one that is proposed."""
    if _refuse(geometry, dtype, precision, device):
        return
    geometry, layout = batch_as_depth(geometry, layout)
    every = ((work, tile) for work in works_of(geometry, dtype, precision, layout) for tile in tiles(work))
    for work, tile in every:
        cost = work.with_pairs().typical_cost(tile, device)
        plan = plan_tile(geometry, dtype, layout, precision, device, tile, cost or 0.0)
        if cost is not None and isinstance(plan, Plan):
            yield plan


def plan_tile(
    geometry: Geometry, dtype: str, layout: Layout, precision: str | None, device: Device, tile: Tile, cost: float = 0.0
) -> Plan | Refusal:
    """Plan a problem with a given tile."""
    geometry = with_residues_as_phases(geometry, tile.residues)
    work = Work(geometry, dtype, precision, layout, tile.residues)
    if tile.boxed and not (work.shape.boxes and work.are_whole(tile)):
        return Refusal("phase_wgmma", "bulk tensor copies of this tile cannot bring x")
    every = all_positions(geometry)
    geometry, layout, planes = reached_planes(geometry, layout, tile.residues)
    extents = tuple(-(-o // s) for o, s in zip(geometry.out_extent, geometry.stride, strict=True))
    tiles_c = -(-geometry.c_out_per_group // (8 * tile.tiles_c))
    if tile.slides:
        extents = (positions(geometry, 0), *extents[1:])
    if tile.join_w:
        extents = (*extents[:2], positions(geometry, 2))
    phases = 1 if tile.all_phases else geometry.stride[0] * geometry.stride[1]
    times = phases * tiles_c * geometry.groups * geometry.n
    box = work.box_of_launch(tile, extents, times, device, geometry.out_extent[2], layout)
    if box is None:
        return Refusal("phase_wgmma", "no box of this tile fits into shared memory and reaches elements in 32 bits")
    held = device.multiprocessors * tile.min_blocks
    tiles = tuple(-(-q // b) for q, b in zip(extents, box.extent, strict=True))
    if tile.slides:
        tiles = (extents[0], *tiles[1:])  # slices of a column
    blocks = prod(tiles) * times
    if blocks > MAX_BLOCKS:
        return Refusal("phase_wgmma", f"counts boxes in 31 bits, got {blocks}")
    shares = None
    if tile.slides:
        columns, sets = blocks // extents[0], geometry.groups * tiles_c
        shares = share_columns(columns, extents[0], work.earlier_slices(), sets, tile.resident, held)
        blocks = shares.boxes
    if positions_reached(geometry, box.extent) >= INDEX_LIMIT:
        return Refusal("phase_wgmma", f"counts positions along an axis in 31 bits, got {geometry.out_extent}")
    own = {
        "ALL_PHASES": tile.all_phases,
        "SLIDES": tile.slides,
        "MERGE_D": tile.merge_d,
        "JOIN_W": tile.join_w,
        "STORE_ALONE": work.stores_alone(tile),
        "PLANE_STEP": planes.step,
        "HALF_K": tile.half_k,
        "BOXED": tile.boxed,
        "OUT_RUN": work.shape.run if work.stores_runs(tile) else 1,
        "FAR_CHANNELS": work.chunk(tile) * abs(layout.x[1]) >= INDEX_LIMIT,
        "FIRST_PHASE_W": geometry.pad_before[2] % geometry.stride[2] if work.stores_runs(tile) else 0,
    }
    if any(tile.residues):
        own |= {"RESIDUES_D": tile.residues[0], "RESIDUES_H": tile.residues[1]}
    if not tile.boxed:
        own |= x_copy_macros(geometry, layout, work.shape.itemsize)
    defines = wgmma_defines(geometry, dtype, layout, precision, tile, own, registers_of(tile, work.parts))
    grid = shares.grid if shares else grid_of(blocks, held, phases, geometry.groups * tiles_c if tile.resident else 1)
    around = AROUND_OF_SPLIT if work.parts == 2 else AROUND_OF_BOXED if dtype != "float32" and tile.boxed else AROUND
    # As the kernel decides, whose other phases keep their order.
    is_uneven = not tile.all_phases and any(
        geometry.kernel[axis] % geometry.stride[axis] and not tile.residues[axis] for axis in range(2)
    )
    longest_first = (
        is_uneven
        and not tile.resident
        and takes_longest_first(
            taps_of_phases(geometry),
            tiles_c * geometry.groups,
            blocks,
            grid,
            held,
            around,
        )
    )
    chunks = -(-geometry.c_in_per_group // work.chunk(tile))
    packed_words = chunks * work.slots_of_chunk(tile) * work.slot_bytes(tile) // 4  # of a tile of channels
    packed_a_thread = 4 * work.parts * work.packed_pieces(2 * tile.k_steps)
    # Blocks have one box each, or parts of columns but no whole ones.
    at_once = blocks <= held or (shares is not None and not shares.whole)
    packs_itself = at_once and work.blocks_can_pack(tile, packed_words // packed_a_thread)
    return Plan(
        kernel="phase_wgmma",
        defines=defines,
        grid=held if longest_first else grid,
        block=tile.threads,
        shared_bytes=work.shared_bytes(tile, box, False),
        problem=problem_parameters(
            geometry,
            layout,
            (*tiles, tiles_c),
            x_is_vector(geometry, layout, work.shape.itemsize),
            PACKS_ITSELF if packs_itself else longest_first,
            work.box_parameters(tile, box, blocks),
            (planes.extent, planes.first),
            shares.parameters if shares else (0,) * SHARES,
            work.stored_together(tile, box, geometry.out_extent[2], layout),
        ),
        cost=cost * every * work.compared_of(tile),
        packed_words=0 if packs_itself else geometry.groups * tiles_c * packed_words,
        packed_a_thread=packed_a_thread,
        maps=(work.map_of_x(tile, box, dtype, geometry, layout, work.steps_in_x, work.chunk(tile)),)
        if tile.boxed
        else (),
        tile=tile,
    )


def _refuse(geometry: Geometry, dtype: str, precision: str | None, device: Device) -> str | None:
    return (
        refuse_tensor_cores(dtype, precision, device, wgmma=True)
        or refuse_steps(geometry)
        or refuse_taps(geometry)
        or refuse_phases(geometry)
    )


@remembered(Tile)
def choose_tile(shape: Shape, device: Device) -> tuple[Tile, float] | None:
    """Return the best tile for typical extents, with its clocks a position (all phases, all channels of a group)."""
    work = Work.of(shape)
    return best_tile(work, ((work.least_cost(tile), tile) for tile in tiles(work)), device)


def tiles(work: Work) -> Iterator[Tile]:
    """Yield the tiles that a problem may use. They depend on neither N nor extents, which therefore never recompile."""
    shape = work.shape
    several, by_residue = prod(work.sharing[:2]) > 1, any(shape.residues)
    eights = -(-shape.c_out // 8)
    shares = {-(-eights // parts) for parts in (1, 2, 3, 4, 6, 8, 16)}
    if shape.boxes and shape.itemsize == 2:  # blocks that share sectors of the result took up to seven times as long
        shares = {share if share == eights else round_up(share, 2) for share in shares}
    tiles_of_channels = sorted(shares & set(range(1, 17))) or [16]
    may_slide = shape.kernel[0] > shape.stride[0] and shape.dilation[0] == 1
    may_join = shape.out_channels_last and shape.stride[2] > 1 and shape.dilation[2] == 1
    may_join &= shape.kernel[2] % shape.stride[2] == 0
    along_d = ((False, False), (True, False), (True, True)) if may_slide else ((False, False),)
    along_w = ((False, False), (True, False), (False, True)) if may_join else ((False, False), (True, False))
    sizes = itertools.product(tiles_of_channels, (1, 2, 3, 4, 6, 8), (1, 2, 4), (False, True))
    # Where copies can bring x, they took less time in 84 of 88 problems.
    boxed, kinds = shape.boxes, kinds_of_blocks(shape.boxes, work.parts)
    for (slides, merge_d), (workers, stagers, blocks), all_phases, (merge_w, join_w), size in itertools.product(
        along_d, kinds, (False, True), along_w, list(sizes)
    ):
        tiles_c, tiles_m, k_steps, deep = size
        if k_steps > 2 and not boxed:
            continue
        if (slides and several and not all_phases) or (all_phases and not several):
            continue
        if by_residue and (slides or all_phases):
            continue
        if merge_w and (shape.kernel[2] == 1 or shape.out_channels_last or tiles_m == 3):  # 192 rows: measured slow
            continue
        if merge_w and slides:  # likewise slow, beside merged taps along D
            continue
        if deep and blocks > 1 and not boxed:
            continue
        common = (workers, stagers, tiles_m, tiles_c, merge_w, k_steps, 4 if deep else 2)
        half_k = shape.itemsize == 2 and k_steps == 1 and shape.c_in <= 8 and not boxed
        tile = Tile(
            *common, 3, False, False, all_phases, blocks, slides, half_k, merge_d, join_w, boxed, shape.residues
        )
        if all_phases and work.unrolled(tile) > MAX_UNROLLED:
            continue
        if not work.turns(tile) and tiles_m * tiles_c * work.outputs(tile) > MAX_UNROLLED_STORES:
            continue
        if k_steps > 2 and shape.products == 3 and work.steps_of_chain(tile) > MAX_STEPS_OF_CHAIN:
            continue
        if k_steps > 1 and work.chunk(tile) >= 2 * shape.c_in:
            continue
        if boxed and not work.are_whole(tile):
            continue
        if work.columns(tile) > (MAX_COLUMNS if blocks < 3 else MAX_COLUMNS_OF_THREE):
            continue
        if shape.products == 3 and k_steps == 1 and work.chains(tile) > MAX_CHAINS:
            continue
        # Merged taps need no more accumulators, but wider chains of 3xTF32.
        if slides and not merge_d and shape.products == 1 and work.columns(tile) * shape.kernel[0] <= MAX_COLUMNS:
            continue
        if all_phases or not several:
            slots = -(-shape.c_in // work.chunk(tile)) * work.slots_of_chunk(tile)
            if slots * work.slot_bytes(tile) <= RESIDENT_BYTES // blocks:
                tile = altered(tile, ring=slots, resident=True)
        # These spill, however few the accumulators.
        if all_phases and shape.products == 3:
            if shape.out_channels_last:
                spills = tiles_c > 1 and not tile.resident
            else:
                spills = work.unrolled(tile) > 32 and (tiles_c > 1 or not tile.resident)
            if spills:
                continue
        late_rows = slides and not tile.resident and (shape.products == 1 or shape.out_channels_last)
        if late_rows and work.unrolled(tile) > MAX_UNROLLED_SLICE:  # likewise
            continue
        if work.accumulators(tile) + work.other_registers(tile) > registers_of(tile, work.parts)[0]:
            continue
        if boxed and work.columns(tile) // 2 + BESIDE_SUMS > work.at_start(tile):
            continue
        if tile.resident and workers > 1 and not slides and shape.plane_step == 1:  # which would spill, too
            yield altered(tile, take_turns=True)
        yield tile
