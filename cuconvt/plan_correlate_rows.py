"""Plans of the kernel for correlations of rows on Hopper's tensor cores, ``kernels/correlate_rows.cu``."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from math import prod

from cuconvt.geometry import Geometry
from cuconvt.plan import Device, Ints, Layout, Plan, Refusal, problem_parameters
from cuconvt.plan_correlate import reads_need_64_bits
from cuconvt.plan_correlate_rows_work import Shape, Work
from cuconvt.plan_correlate_wgmma import (
    MAX_SLOT_BYTES,
    as_read,
    best_tile_of_size,
    refuse,
    tile_of_size,
    with_longer_rings,
)
from cuconvt.plan_search import remembered
from cuconvt.plan_wgmma_boxes import best_tile
from cuconvt.plan_wgmma_launch import grid_of, wgmma_defines
from cuconvt.plan_wgmma_sizes import MAX_BLOCKS, MAX_COLUMNS, RESIDENT_BYTES, Tile, altered

MAX_UNIT = 8  # words between positions
MAX_SPAN = 64  # words from a position's first tap to its last
MAX_WORDS = 12  # of a position and channel, that a thread holds at a time
MAX_UNROLLED = 100  # wgmmas of a row of taps
FEWEST_TILES_C = 3  # where copies bring x and there are as many: 16 columns took a quarter longer than estimated


def plan_correlate_rows(
    geometry: Geometry, dtype: str, layout: Layout, precision: str | None, device: Device, tile: Tile | None = None
) -> Plan | Refusal:
    """Propose the tile with the least estimated time, or a given one, or say why the kernel does not serve."""
    if reason := _refuse(geometry, dtype, layout, precision, device):
        return Refusal("correlate_rows", reason)
    g, read = as_read(geometry, layout)
    work = Work(g, read, dtype, precision)
    if tile is not None:
        cost = work.typical_cost(tile, device)
        return plan_tile(geometry, dtype, layout, precision, device, tile, cost or 0.0)
    choice = choose_tile(work.shape, device)
    if choice is None:
        reason = f"no box with its halo fits into {device.shared_bytes} bytes of shared memory"
        return Refusal("correlate_rows", reason)
    tile, cost = choice
    if work.boxed and min(*g.out_extent, g.n) > 0:
        tile = tile_of_size(work, g, device, choose_tile_of_size) or tile
    return plan_tile(geometry, dtype, layout, precision, device, tile, cost)


def plan_tile(
    geometry: Geometry, dtype: str, layout: Layout, precision: str | None, device: Device, tile: Tile, cost: float = 0.0
) -> Plan | Refusal:
    """Plan a problem with a given tile."""
    g, read = as_read(geometry, layout)
    work = Work(g, read, dtype, precision)
    tiles_c = -(-g.c_out_per_group // (8 * tile.tiles_c))
    times = tiles_c * g.groups * g.n
    box = work.box_of_launch(tile, g.out_extent, times, device, g.out_extent[2])
    if box is None:
        return Refusal("correlate_rows", "the box of this tile does not fit into shared memory")
    tiles = tuple(-(-i // b) for i, b in zip(g.out_extent, box.extent, strict=True))
    blocks = prod(tiles) * times
    if blocks > MAX_BLOCKS:
        return Refusal("correlate_rows", f"counts boxes in 31 bits, got {blocks}")
    registers = work.registers(tile)
    if registers is None:
        return Refusal("correlate_rows", "the sums of this tile do not fit into registers")
    index64 = reads_need_64_bits(geometry, layout, box.extent)
    own = {"PAD_W": g.pad_before[2] % g.stride[2], "INDEX64": index64, "BOXED": work.boxed}
    own |= {"WHOLE_H": tile.whole_h, "JOIN_H": work.join_h, "SWIZZLED": tile.swizzled}
    copied = work.next_channel(tile, box) if work.boxed else work.bytes_copied(g, read)
    return Plan(
        kernel="correlate_rows",
        defines=wgmma_defines(g, dtype, read, precision, tile, own, registers),
        grid=grid_of(blocks, device.multiprocessors * tile.min_blocks, 1, g.groups * tiles_c if tile.resident else 1),
        block=tile.threads,
        shared_bytes=work.shared_bytes(tile, box, index64),
        problem=problem_parameters(
            g,
            read,
            (*tiles, tiles_c),
            copied,
            box=work.parameters(tile, box, blocks, copied),
            together=work.stored_together(tile, box, g.out_extent[2], read),
        ),
        cost=work.compared_cost(cost) * prod(g.out_extent) * g.groups * g.n,
        packed_words=g.groups * tiles_c * work.slots(tile) * work.slot_bytes(tile) // 4,
        packed_a_thread=8 * work.parts,
        maps=(work.map_of_rows(tile, box, dtype, g, read),) if work.boxed else (),
        tile=tile,
    )


def _refuse(geometry: Geometry, dtype: str, layout: Layout, precision: str | None, device: Device) -> str | None:
    if reason := refuse(geometry, dtype, precision, device):
        return reason
    if layout.out_channels_last:
        return "reads rows, got channels that follow each other"
    if geometry.stride[2] % (1 if dtype == "float32" else 2):
        return f"reads 16-bit numbers in pairs, got stride {geometry.stride[2]} along W"
    work = Work(*as_read(geometry, layout), dtype, precision)
    if reason := work.too_many_classes():
        return reason
    if work.unit > MAX_UNIT:
        return f"stages rows whose positions are at most {MAX_UNIT} words apart, got {work.unit}"
    if (span := (work.halo[2] + 1) * work.unit) > MAX_SPAN:
        return f"reads at most {MAX_SPAN} words from the first to the last tap along W, got {span}"
    if work.words > MAX_WORDS:
        return f"holds at most {MAX_WORDS} words of a position, got {work.words}"
    return None


@remembered(Tile)
def choose_tile(shape: Shape, device: Device) -> tuple[Tile, float] | None:
    """Return the best tile for typical extents, with its clocks a position (all channels of a group)."""
    work = Work.of(shape)
    return best_tile(work, ((work.least_cost(tile), tile) for tile in tiles(work)), device)


@remembered(Tile)
def choose_tile_of_size(shape: Shape, times: int, extents: Ints, device: Device) -> tuple[Tile, float] | None:
    """Return the best of the tiles whose x copies bring, for so many positions so many times."""
    work = Work.of(shape)
    return best_tile_of_size(work, tiles_of_any_size(shape, work.swizzled_width <= extents[2]), times, extents, device)


@functools.lru_cache(maxsize=8)
def tiles_of_any_size(shape: Shape, are_wide: bool = False) -> list[Tile]:
    """Return the tiles whose x copies bring, with few slots for weights and with more.

    Boxes of swizzled rows all have the same positions along W: there are some where extents are wide enough for them.
    """
    work = Work.of(shape)
    every = list(tiles(work))
    if are_wide and work.can_swizzle:
        every += tiles(work, swizzled=True)
    return with_longer_rings(every)


def tiles(work: Work, swizzled: bool = False) -> Iterator[Tile]:
    """Yield the tiles that a problem may use, whatever N and extents."""
    shape = work.shape
    eights = -(-shape.c_out // 8)
    tiles_of_channels = sorted({-(-eights // parts) for parts in (1, 2, 3, 4, 6, 8, 16)} & set(range(1, 17))) or [16]
    ways = (False, True) if work.boxed and work.live[1] > 1 and not work.join_h else (False,)
    for (workers, stagers, blocks), whole_h, tiles_c, tiles_m, k_steps, x_stages in itertools.product(
        work.kinds(), ways, tiles_of_channels, (1, 2, 3, 4, 6), (1, 2, 4, 8), (2, 3, 4, 6) if work.boxed else (2, 4, 8)
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
            whole_h=whole_h,
            swizzled=swizzled,
        )
        steps = tiles_m * k_steps
        if work.boxed and (work.channels(tile) % 8 or not work.are_whole(tile)):
            continue
        if work.boxed and tiles_c < min(FEWEST_TILES_C, eights):
            continue
        if steps % 2 or (steps == 2 and shape.products == 1) or (k_steps > 1 and work.channels(tile) >= 2 * shape.c_in):
            continue
        if work.columns(tile) > MAX_COLUMNS or work.slot_bytes(tile) > MAX_SLOT_BYTES:
            continue
        if tiles_m * work.products_of_slot(tile) * shape.products > MAX_UNROLLED or work.registers(tile) is None:
            continue
        slots = work.slots(tile)
        if slots * work.slot_bytes(tile) <= RESIDENT_BYTES // blocks:
            tile = altered(tile, ring=slots, resident=True)
        yield tile
