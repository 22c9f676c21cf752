"""Plans of the kernel for rows on Hopper's tensor cores, ``kernels/phase_rows.cu``."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator
from math import gcd, inf, prod

from cuconvt.geometry import Geometry
from cuconvt.plan import (
    INDEX_LIMIT,
    Device,
    Ints,
    Layout,
    Plan,
    Refusal,
    all_positions,
    positions_reached,
    problem_parameters,
    refuse_phases,
    refuse_steps,
    refuse_taps,
    refuse_tensor_cores,
)
from cuconvt.plan_correlate_wgmma import MAX_SLOT_BYTES, with_longer_rings
from cuconvt.plan_phase_rows_work import Shape, Work, outputs_at_once
from cuconvt.plan_search import cheapest_tile, remembered
from cuconvt.plan_views import batch_as_depth
from cuconvt.plan_wgmma_boxes import best_tile
from cuconvt.plan_wgmma_launch import grid_of, wgmma_defines
from cuconvt.plan_wgmma_sizes import MAX_BLOCKS, MAX_COLUMNS, REGISTERS_OF_BOXED, RESIDENT_BYTES, Tile, altered

MAX_UNROLLED = 100  # wgmmas of a row of taps
MAX_PHASES = 4  # along W whose taps are not joined: of more, sums spill
MOST_CANDIDATES = 12  # that tuning measures
MAX_PAIRS = 6  # of positions that a thread loads of a channel
# Along D, H, W: few positions of an image or of a batch, for which there are tiles of their own.
SMALL: tuple[Ints, ...] = ((4, 8, 16), (16, 16, 16))
# By bytes of a number and products, where threads exchange outputs: other kernels lose more by rows that are not
# aligned, but not where the kernel is the stride. Of 425 problems.
OF_EXCHANGED = {(2, 1): 0.9, (4, 1): 0.9, (4, 3): 1.0}
OF_EXCHANGED_DISJOINT = {(2, 1): 1.5, (4, 1): 1.6, (4, 3): 1.05}


def plan_phase_rows(
    geometry: Geometry,
    dtype: str,
    layout: Layout,
    precision: str | None,
    device: Device,
    tile: Tile | None = None,
    most: float = inf,
) -> Plan | Refusal:
    """Propose the tile with the least estimated time, or a given one, or say why the kernel does not serve.

    With `most`, also say where it would cost more, before tiles for few positions are searched for.
    """
    geometry, layout = batch_as_depth(geometry, layout)
    if reason := _refuse(geometry, dtype, layout, precision, device):
        return Refusal("phase_rows", reason)
    work = Work(geometry, dtype, precision, layout)
    best = choose_tile(work.shape, device)
    compared = _of_exchanges(work, geometry, layout)
    if best is not None and (usual_cost := compared * best[1] * all_positions(geometry)) > most:
        return Refusal("phase_rows", f"cost {usual_cost:.3g} against {most:.3g}")
    usual = best and _of_few_programs(work, geometry, device, best[0])
    if best is None or usual is None:
        return Refusal("phase_rows", f"no box with its halo fits into {device.shared_bytes} bytes of shared memory")
    # A position takes as much longer than in typical extents as the tile takes longer than the usual one.
    cost = compared * best[1]
    if tile is not None and (clocks := _clocks_of_size(work, geometry, device, tile)) is not None:
        cost *= clocks / (_clocks_of_size(work, geometry, device, usual) or inf)
    return plan_tile(geometry, dtype, layout, precision, device, tile or usual, cost)


def candidates(geometry: Geometry, dtype: str, layout: Layout, precision: str | None, device: Device) -> Iterator[Plan]:
    """Yield the plan that is proposed, and those of the tiles with the least cost: far fewer than there are.

    Estimates tell good tiles from others, and most take about as long as some other one.
    """
    proposed = plan_phase_rows(geometry, dtype, layout, precision, device)
    if isinstance(proposed, Refusal):
        return
    yield proposed
    seen = batch_as_depth(geometry, layout)
    work = Work(seen[0], dtype, precision, seen[1])
    every = list(tiles_of_any_size(work))
    clocks = ((_clocks_of_size(work, seen[0], device, tile), i) for i, tile in enumerate(every))
    for _, i in heapq.nsmallest(MOST_CANDIDATES, ((found, i) for found, i in clocks if found is not None)):
        plan = plan_phase_rows(geometry, dtype, layout, precision, device, every[i])
        if isinstance(plan, Plan) and plan != proposed:
            yield plan


def _of_exchanges(work: Work, geometry: Geometry, layout: Layout) -> float:
    """Return the cost relative to that with aligned rows of the result, where nothing is exchanged."""
    kind = work.shape.itemsize, work.shape.products
    if outputs_at_once(geometry, layout, work.shape.itemsize) > 1:
        return 1.0
    return (OF_EXCHANGED_DISJOINT if geometry.kernel == geometry.stride else OF_EXCHANGED)[kind]


def _of_few_programs(work: Work, geometry: Geometry, device: Device, typical: Tile) -> Tile | None:
    """Return the tile that takes least of the typical one and of those for few positions, or None if none fits.

    They are all that are compiled, whatever N and extents.
    """
    small = (choose_tile_of_size(work.shape, 1, extents, device) for extents in SMALL)
    tiles = dict.fromkeys((typical, *(found[0] for found in small if found)))
    clocks = {way: _clocks_of_size(work, geometry, device, way) for tile in tiles for way in work.ways(tile)}
    fitting = {way: found for way, found in clocks.items() if found is not None}
    return min(fitting, key=lambda way: fitting[way], default=None)


def _clocks_of_size(work: Work, geometry: Geometry, device: Device, tile: Tile) -> float | None:
    return work.clocks_of_size(tile, geometry.n * geometry.groups, _extents(geometry), device)


def plan_tile(
    geometry: Geometry, dtype: str, layout: Layout, precision: str | None, device: Device, tile: Tile, cost: float
) -> Plan | Refusal:
    """Plan a problem with a given tile."""
    g, work = geometry, Work(geometry, dtype, precision, layout)
    registers = work.registers(tile)
    if registers is None:
        return Refusal("phase_rows", "the sums of this tile do not fit into registers")
    if not (work.flat if tile.flat else work.by_rows):
        return Refusal("phase_rows", "bulk tensor copies of this tile cannot bring x")
    phases = g.stride[0] * g.stride[1]
    tile, extents = work.as_copied(tile, _extents(g))
    tiles_c = -(-g.c_out_per_group // (8 * tile.tiles_c))
    times = work.times(tile) * g.groups * g.n
    box = work.box_of_launch(tile, extents, times, device, g.out_extent[2])
    if box is None:
        return Refusal("phase_rows", "the box of this tile does not fit into shared memory")
    boxes = tuple(-(-q // b) for q, b in zip(extents, box.extent, strict=True))
    blocks = prod(boxes) * times
    if blocks > MAX_BLOCKS:
        return Refusal("phase_rows", f"counts boxes in 31 bits, got {blocks}")
    if positions_reached(g, box.extent) >= INDEX_LIMIT:
        return Refusal("phase_rows", f"counts positions along an axis in 31 bits, got {g.out_extent}")
    own = {
        "PAD_W": g.pad_before[2],
        "OUT_RUN": outputs_at_once(g, layout, work.shape.itemsize),
    }
    return Plan(
        kernel="phase_rows",
        defines=wgmma_defines(g, dtype, layout, precision, tile, own, registers),
        grid=grid_of(
            blocks,
            device.multiprocessors * tile.min_blocks,
            phases if any(k % st for k, st in zip(g.kernel[:2], g.stride[:2], strict=True)) else 1,
            g.groups * tiles_c if tile.resident else 1,
        ),
        block=tile.threads,
        shared_bytes=work.shared_bytes(tile, box, False),
        problem=problem_parameters(
            g, layout, (*boxes, tiles_c), work.next_channel(box.items), box=work.parameters(tile, box, blocks)
        ),
        cost=cost * all_positions(g),
        packed_words=g.groups * tiles_c * work.slots(tile) * work.slot_bytes(tile) // 4,
        packed_a_thread=4 * work.parts * work.packed_pieces(2 * tile.k_steps),
        maps=(work.map_of_rows(tile, box, dtype, g, layout),),
        tile=tile,
    )


def _extents(geometry: Geometry) -> Ints:
    """Return the outputs of a phase along each axis: boxes begin where these do."""
    return tuple(-(-o // s) for o, s in zip(geometry.out_extent, geometry.stride, strict=True))


def _refuse(geometry: Geometry, dtype: str, layout: Layout, precision: str | None, device: Device) -> str | None:
    g = geometry
    if reason := refuse_tensor_cores(dtype, precision, device, wgmma=True):
        return reason
    if min(*g.out_extent, g.n) == 0:
        return "has nothing to compute"
    if reason := refuse_steps(g) or refuse_taps(g) or refuse_phases(g):
        return reason
    if layout.x_channels_last or layout.out_channels_last:
        return "reads and writes rows, got channels that follow each other"
    k, st, dil = g.kernel[2], g.stride[2], g.dilation[2]
    if gcd(st, dil) > 1 or k < st:
        return f"needs a tap for each phase along W, got {k} for stride {st} and dilation {dil}"
    work = Work(g, dtype, precision, layout)
    if not (work.by_rows or work.flat):
        return "copies rows, or planes of rows, of whole 16 bytes"
    if layout.out[4] != 1 and g.out_extent[2] > 1:
        return "stores outputs of a row next to each other"
    if st > MAX_PHASES and not work.have_all_phases:
        return f"has at most {MAX_PHASES} phases along W apart from each other, got {st}"
    if work.of_thread > MAX_PAIRS:
        return f"holds at most {MAX_PAIRS} pairs of a channel, got {work.of_thread}"
    return None


@remembered(Tile)
def choose_tile(shape: Shape, device: Device) -> tuple[Tile, float] | None:
    """Return the best tile for typical extents, with its clocks a position (all phases, all channels of a group)."""
    work = Work.of(shape)
    return best_tile(work, ((work.least_cost(tile), tile) for tile in tiles(work)), device)


@remembered(Tile)
def choose_tile_of_size(shape: Shape, times: int, extents: Ints, device: Device) -> tuple[Tile, float] | None:
    """Return the best tile for so many positions so many times, whose rows come one by one, with its clocks."""
    work = Work.of(shape)
    return cheapest_tile(
        ((work.least_of_size(tile, times, extents, device), tile) for tile in with_longer_rings(list(tiles(work)))),
        lambda tile: work.clocks_of_size(tile, times, extents, device),
    )


def tiles_of_any_size(work: Work) -> Iterator[Tile]:
    """Yield the tiles, with few slots for weights and with more, in the ways in which copies can bring rows."""
    for tile in with_longer_rings(list(tiles(work))):
        yield from work.ways(tile)


def tiles(work: Work) -> Iterator[Tile]:
    """Yield the tiles that a problem may use, whatever N and extents."""
    shape = work.shape
    eights = -(-shape.c_out // 8)
    tiles_of_channels = sorted({-(-eights // parts) for parts in (1, 2, 3, 4, 6, 8, 16)} & set(range(1, 17))) or [16]
    for (workers, stagers, blocks), tiles_c, tiles_m, k_steps, x_stages in itertools.product(
        REGISTERS_OF_BOXED, tiles_of_channels, (1, 2, 3, 4), (1, 2, 4, 8), (2, 3, 4, 6)
    ):
        tile = Tile(
            workers=workers,
            stagers=stagers,
            tiles_m=tiles_m,
            tiles_c=tiles_c,
            merge_w=False,
            k_steps=k_steps,
            x_stages=x_stages,
            ring=3,
            resident=False,
            take_turns=False,
            all_phases=False,
            min_blocks=blocks,
            boxed=True,
        )
        steps = tiles_m * k_steps
        if steps % 2 or (steps == 2 and shape.products == 1) or (k_steps > 1 and work.chunk(tile) >= 2 * shape.c_in):
            continue
        if not work.are_whole(tile):
            continue
        if work.widest(tile) > MAX_COLUMNS or work.slot_bytes(tile) > MAX_SLOT_BYTES:
            continue
        if work.unrolled(tile) > MAX_UNROLLED or work.registers(tile) is None:
            continue
        slots = work.slots(tile)
        if max(shape.stride[:2]) == 1 and slots * work.slot_bytes(tile) <= RESIDENT_BYTES // blocks:
            tile = altered(tile, ring=slots, resident=True)
        yield tile
