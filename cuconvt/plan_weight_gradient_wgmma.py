"""Plans of the kernel for weight gradients on Hopper's tensor cores, ``kernels/weight_gradient_wgmma.cu``."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from math import inf, prod

from cuconvt.geometry import Geometry
from cuconvt.plan import (
    DTYPE_CODES,
    MAX_GRID,
    Device,
    Ints,
    Layout,
    Plan,
    Refusal,
    axis_macros,
    problem_parameters,
    refuse_steps,
)
from cuconvt.plan_boxes import count_boxes
from cuconvt.plan_correlate import reads_need_64_bits
from cuconvt.plan_search import cheapest_tile, remembered
from cuconvt.plan_views import batch_as_depth
from cuconvt.plan_weight_gradient_boxes import (
    BESIDE_SUMS,
    FEW_PARTS,
    LARGEST_BOX,
    OF_ROWS,
    are_compared_by_size,
    shares,
    tile_of_size,
)
from cuconvt.plan_weight_gradient_wgmma_tile import FEWER_STAGES, ITEMSIZES, STAGER_REGISTERS, Shape, Tile
from cuconvt.plan_weight_gradient_wgmma_work import Work

MAX_TILES_IN = 24  # times 8 columns of a product
MAX_EIGHTS_OUT = 32  # times 8 channels of y
MAX_TAPS = 4, 4, 16  # of a tile along D, H, W, and W again where there are groups
MAX_CHUNKS = 10  # of words that a lane reads for a pair of positions
KINDS = ((2, 1), (1, 2), (3, 1), (1, 3))  # workers of a block, and blocks on a multiprocessor
GROUPS = (1, 2, 4)  # of taps along W
OF_DILATION = 1.65  # of 16 bits in rows with up to two axes and no stride, times as long as estimated: of 36 layers


def plan_weight_gradient_wgmma(
    geometry: Geometry,
    dtype: str,
    layout: Layout,
    precision: str | None,
    device: Device,
    tile: Tile | None = None,
    most: float = inf,
) -> Plan | Refusal:
    """Propose the tile with the least estimated time, or a given one, or say why wgmma does not serve.

    Also where its cost must be more than `most`: there are so many tiles that finding the best one takes long.
    """
    name = "weight_gradient_wgmma"
    if reason := _refuse(geometry, dtype, precision, device):
        return Refusal(name, reason)
    geometry, layout = batch_as_depth(geometry, layout)
    index64 = reads_need_64_bits(geometry, layout, LARGEST_BOX)
    work = Work(Shape.of(geometry, layout, ITEMSIZES[dtype], index64))
    times = _compared(geometry, layout, work.itemsize) * geometry.n * prod(geometry.x_extent)
    usual = tile
    if usual is None:
        if (least := times * work.least_compared() * least_of_all(work.shape, device)) > most:
            return Refusal(name, f"cost at least {least:.3g} against {most:.3g}")
        usual = choose_tile(work.shape, device)
    cost = None if usual is None else work.typical_cost(usual, device)
    if usual is None or cost is None:
        return Refusal(name, f"no box with what its taps reach fits into {device.shared_bytes} bytes of shared memory")
    if tile is None and work.reach(usual).boxed:
        tile = tile_of_size(work, geometry, device, choose_tile_of_size)
    tile = tile or usual
    tiles = work.tiles_of_weights(tile)
    choice = work.best_box(tile, geometry.n, geometry.x_extent, device) if tiles <= MAX_GRID else None
    if choice is None or geometry.n * count_boxes(geometry.x_extent, choice.box) >= 2**31:
        return Refusal(name, f"{tiles} tiles, or their boxes, are more than it counts")
    launch, box, parts = choice
    boxes = tuple(-(-x // b) for x, b in zip(geometry.x_extent, box, strict=True))
    clocks = 0.0
    if are_compared_by_size(geometry, layout, work.itemsize):
        boxed, by_threads, beside = OF_ROWS[work.itemsize]
        clocks = (boxed if work.reach(tile).boxed else by_threads) * launch + beside
    defines = (
        ("DTYPE", DTYPE_CODES[dtype]),
        *axis_macros(KERNEL=geometry.kernel, STRIDE=geometry.stride, DILATION=geometry.dilation),
        ("WORKERS", tile.workers),
        ("TILES_M", tile.tiles_m),
        ("CHANNELS_OUT", tile.channels_out),
        ("TAPS_D", tile.taps_d),
        ("TAPS_H", tile.taps_h),
        ("TAPS_W", tile.taps_w),
        ("GROUPS_W", tile.groups_w),
        ("TILES_IN", tile.tiles_in),
        ("EARLY", work.reach(tile).early),
        ("BOXED", int(work.reach(tile).boxed)),
        ("X_RUNS", tile.x_runs),
        ("STAGES", tile.stages),
        ("INDEX64", int(index64)),
        ("MIN_BLOCKS", tile.min_blocks),
        ("WORKER_REGISTERS", tile.worker_registers(index64)),
        ("STAGER_REGISTERS", STAGER_REGISTERS[index64]),
    )
    return Plan(
        kernel=name,
        defines=defines,
        grid=tiles * parts,
        block=128 * (tile.workers + 1),
        shared_bytes=work.stage(tile, box).shared_bytes(index64, tile.stages),
        problem=problem_parameters(
            geometry,
            layout,
            (*boxes, parts),
            work.shape.x_bytes,
            work.reach(tile).bytes,
            (*box, work.stage(tile, box).y_channel, int(work.shape.flat), 0, 0, 0, 0, 0, 0),
        ),
        cost=times * work.compared(tile) * cost,
        workspace_bytes=4 * tiles * tile.values * parts if parts > 1 else 0,
        sums=tiles * tile.values if parts > 1 else 0,
        sums_a_block=tile.sums_a_block(tiles, device) if 1 < parts <= FEW_PARTS else 0,
        maps=work.maps(tile, box, dtype, geometry, layout) if work.reach(tile).boxed else (),
        clocks=clocks,
        tile=tile,
    )


def _compared(geometry: Geometry, layout: Layout, itemsize: int) -> float:
    """Return what the cost is multiplied with beside."""
    g, in_rows = geometry, not (layout.x_channels_last or layout.out_channels_last)
    is_slower = in_rows and itemsize == 2 and g.rank < 3 and max(g.stride) == 1 < max(g.dilation)
    return OF_DILATION if is_slower else 1


def _refuse(geometry: Geometry, dtype: str, precision: str | None, device: Device) -> str | None:
    if device.compute_capability != 90:
        return f"needs compute capability 9.0, the device has {device.compute_capability / 10}"
    if dtype not in ITEMSIZES or (dtype == "float32" and precision != "tf32"):
        return f"computes in float16, bfloat16 and TF32, not in {precision or dtype}"
    return refuse_steps(geometry)


@remembered(Tile)
def choose_tile(shape: Shape, device: Device) -> Tile | None:
    """Return the best tile for typical extents."""
    return Work(shape).best_tile(bounded_tiles(shape, device), device)


@remembered(Tile)
def choose_tile_of_size(shape: Shape, n: int, extents: Ints, device: Device) -> Tile | None:
    """Return the best of the tiles whose boxes copies bring, for so many positions."""
    work = Work(shape)
    of_position = n * prod(extents) / device.multiprocessors
    bounded = ((bound * of_position, tile) for bound, tile in bounded_tiles(shape, device) if work.reach(tile).boxed)
    best = cheapest_tile(bounded, lambda tile: work.clocks_of_size(tile, n, extents, device))
    return best and best[0]


@remembered()
def least_of_all(shape: Shape, device: Device) -> float:
    """Return a lower bound of a position's clocks, whatever the tile."""
    return min((bound for bound, _ in bounded_tiles(shape, device)), default=0.0)


@functools.lru_cache(maxsize=1)
def bounded_tiles(shape: Shape, device: Device) -> list[tuple[float, Tile]]:
    """Return all tiles, each with a lower bound of a position's clocks."""
    work = Work(shape)
    return [(work.least_cost(tile, device), tile) for tile in tiles(work)]


def tiles(work: Work) -> Iterator[Tile]:
    """Yield the tiles that a problem may use, whatever N and extents."""
    s = work.shape
    eights_out, tiles_of_channels = -(-s.c_out // 8), shares(-(-s.c_in // 8), MAX_TILES_IN)
    taps = list(itertools.product(*(shares(kernel, most) for kernel, most in zip(s.kernel, MAX_TAPS, strict=True))))
    kinds = itertools.product(KINDS, shares(eights_out, MAX_EIGHTS_OUT), taps, GROUPS)
    for (workers, blocks), channels_out, (taps_d, taps_h, taps_w), groups_w in kinds:
        if groups_w > 1 and taps_w * groups_w // 2 >= s.kernel[2]:
            continue
        least = Tile(workers, 8 * channels_out, taps_d, taps_h, taps_w, 1, blocks, groups_w)
        reach = work.reach(least)
        if least.rows <= 64 * (workers - 1) or reach.words > MAX_CHUNKS * reach.chunk:
            continue
        if groups_w > 1 and taps_w * reach.staged[2][1] % (work.per_word * reach.chunk):
            continue
        room = least.worker_registers(s.index64) - (work.registers(least) - least.sums)
        for tiles_in in tiles_of_channels:
            if tiles_in * least.sums > room or 4 * tiles_in + BESIDE_SUMS > least.at_start:
                break
            tile = Tile(workers, 8 * channels_out, taps_d, taps_h, taps_w, tiles_in, blocks, groups_w)
            if not reach.boxed:
                if not s.flat:  # whose boxes are for copies alone
                    yield tile
                continue
            yield dataclasses.replace(tile, x_runs=s.x_runs[0])
            for x_runs in s.x_runs:
                yield dataclasses.replace(tile, x_runs=x_runs, stages=FEWER_STAGES)
