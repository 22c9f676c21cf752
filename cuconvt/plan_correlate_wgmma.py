"""Plans of the kernel for correlations on Hopper's tensor cores, ``kernels/correlate_wgmma.cu``."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from math import inf, prod

from cuconvt.geometry import Geometry
from cuconvt.plan import (
    Device,
    Ints,
    Layout,
    Plan,
    Refusal,
    axis_macros,
    problem_parameters,
    refuse_steps,
    refuse_taps,
    refuse_tensor_cores,
    weight_strides,
)
from cuconvt.plan_copies import x_copy_macros
from cuconvt.plan_correlate import reads_need_64_bits
from cuconvt.plan_correlate_wgmma_work import MAX_CLASSES, PLAIN, REGISTERS, Tile, Way, Work
from cuconvt.plan_phase_wgmma_work import FEWEST_TURNED
from cuconvt.plan_search import cheapest_tile, remembered, tile_for_size
from cuconvt.plan_turned import turned
from cuconvt.plan_views import batch_as_depth, taps_follow_each_other, with_taps_as_channels
from cuconvt.plan_wgmma_boxes import LONGER_RING, best_tile, with_longer_ring
from cuconvt.plan_wgmma_launch import grid_of, wgmma_defines
from cuconvt.plan_wgmma_sizes import (
    MAX_BLOCKS,
    MAX_COLUMNS,
    RESIDENT_BYTES,
    AnyTile,
    Shape,
    altered,
    kinds_of_blocks,
)

FOLDED_BYTES = 128  # of a row: channels of all taps along W
ROWS_OF_GROUPS = 64, 128  # bytes of a row: channels of all groups
MAX_SLOT_BYTES = 24 * 1024  # of weights; a longer row of taps is divided by classes
MAX_K_STEPS = 16  # of a stage: with more, registers spill
MAX_UNROLLED = 450  # wgmmas of a row of taps
MAX_CHAIN = 6  # products of three parts that a tensor core sums up, where a slot can be divided
# The bound of a tile may be above its cost where fewer items than it has rows take a batch less; that of the cheapest
# tile was not for any of 432 problems.
BOUND_ABOVE_COST = 1.1
# The cost that is compared with other kernels': without a stride; with one, where it was faster than they wherever it
# was measured; and with fewer channels of the result than were measured.
BOXED_COMPARED, MEASURED_CHANNELS = (1.15, 0.6, 1.35), 32
# Likewise for 3xTF32, without a stride and with one. Without a stride plan_phase_wgmma expects too little of the same
# problem where that is small: in 17 of several taps this kernel took less time, or at most 2% more.
SPLIT_COMPARED = 1.7, 0.85
TURNED_SPLIT = 0.53
# What a tile for a size must be estimated at, of the time of that for typical extents, to be taken without a stride,
# but for 3xTF32: of 168 measured, 42 below took 0.80 of it in the mean (0.51 to 1.22), others as often more as less.
LEAST_GAIN = 0.65
OTHERS = 0.65  # the other kernels' estimates are as much more optimistic, beyond what the forward's are


def plan_correlate_wgmma(
    geometry: Geometry,
    dtype: str,
    layout: Layout,
    precision: str | None,
    device: Device,
    tile: Tile | None = None,
    most: float = inf,
    sized: bool = False,
) -> Plan | Refusal:
    """Propose the tile with the least estimated time, or a given one, or say why wgmma does not serve.

    Also where its cost must be more than `most`: to find the best of its tiles takes long. With `sized`, the tile may
    suit the size without a stride, too: not that of a transposed convolution, which is compiled for no extents.
    """
    if reason := refuse(geometry, dtype, precision, device):
        return Refusal("correlate_wgmma", reason)
    if tile is not None:
        cost = work_of(geometry, layout, dtype, precision, tile.way).typical_cost(tile, device)
        return plan_tile(geometry, dtype, layout, precision, device, tile, cost or 0.0)
    works = works_of(geometry, layout, dtype, precision)
    shapes = [work.shape for work in works if work.too_many_classes() is None]
    if not shapes:
        return Refusal("correlate_wgmma", str(works[0].too_many_classes()))
    g = geometry
    least = min(least_of_all(shape) / shape.joined for shape in shapes)
    least *= OTHERS * prod(g.x_extent) * g.groups * g.n
    if least > BOUND_ABOVE_COST * most:
        return Refusal("correlate_wgmma", f"cost at least {least:.3g} against {most:.3g}")
    # Groups that are joined are all boxed, and where they can be, no single group is.
    times = (BOXED_COMPARED[1] / shape.joined if shape.joined > 1 else 1 for shape in shapes)
    found = (choose_tile(shape, device) for shape in shapes)
    choices = [(*choice, choice[1] * of_way) for choice, of_way in zip(found, times, strict=True) if choice is not None]
    if not choices:
        reason = f"no box with its halo fits into {device.shared_bytes} bytes of shared memory"
        return Refusal("correlate_wgmma", reason)
    tile, cost, _ = min(choices, key=lambda choice: choice[2])
    if tile.boxed and tile.joined == 1:
        tile = _tile_of_size(geometry, dtype, layout, precision, device, tile, sized)
    return plan_tile(geometry, dtype, layout, precision, device, tile, cost)


def works_of(geometry: Geometry, layout: Layout, dtype: str, precision: str | None) -> list[Work]:
    """Return the problem in each of the ways in which it can become one of boxes, the plain one first."""
    plain = work_of(geometry, layout, dtype, precision)
    ways = []
    if _can_fold(geometry, layout, dtype, precision):
        ways.append(Way(fold=geometry.kernel[2]))
    if (joined := _groups_of_row(geometry, layout, dtype, precision)) > 1:
        ways.append(Way(joined=joined))
    if plain.can_be_boxed:
        ways += [Way(apart=apart) for apart in plain.can_be_apart()]
    return [plain, *(work_of(geometry, layout, dtype, precision, way) for way in ways)]


def work_of(geometry: Geometry, layout: Layout, dtype: str, precision: str | None, way: Way = PLAIN) -> Work:
    """Return the problem in one of these ways."""
    return Work(*as_read(geometry, layout, way.fold, way.joined), dtype, precision, way)


def _tile_of_size(
    geometry: Geometry,
    dtype: str,
    layout: Layout,
    precision: str | None,
    device: Device,
    tile: Tile,
    sized: bool,
) -> Tile:
    """Return the tile whose boxes take the least time for so many positions, or the given one.

    That is where `Work.clocks_of_norm` estimates it well enough. Sizes alike share a tile where that costs little.
    """
    g, _ = as_read(geometry, layout, tile.fold)
    work = work_of(geometry, layout, dtype, precision, tile.way)
    is_rough = work.unstrided and work.parts == 1
    if (is_rough and not sized) or min(*g.out_extent, g.n) == 0:
        return tile
    usual = (tile, LEAST_GAIN) if is_rough else None
    return tile_of_size(work, g, device, choose_tile_of_size, usual) or tile


def tile_of_size(
    work: Work,
    geometry: Geometry,
    device: Device,
    choose: Callable[..., tuple[AnyTile, float] | None],
    usual: tuple[AnyTile, float] | None = None,
) -> AnyTile | None:
    """Return what `tile_for_size` finds for a correlation, or None; `choose` finds the best tile of a size."""
    g = geometry

    def search(n: int, extents: Ints) -> AnyTile | None:
        found = choose(work.shape, n * g.groups, extents, device)
        return None if found is None else found[0]

    def clocks(tile: AnyTile, n: int, extents: Ints) -> float:
        return work.clocks_of_size(tile, n * g.groups, extents, device) or inf

    return tile_for_size(g.n, g.out_extent, search, clocks, usual)


def plan_turned_correlate_wgmma(
    geometry: Geometry, dtype: str, layout: Layout, precision: str | None, device: Device, tile: Tile | None = None
) -> Plan | Refusal:
    """Propose it for a transposed convolution of stride 1, which is a correlation too, where copies bring x."""
    correlation = turned(geometry, layout)
    if correlation is None:
        return Refusal("correlate_wgmma", "needs a stride of 1, and no more padding than taps reach")
    if reason := refuse(correlation[0], dtype, precision, device):
        return Refusal("correlate_wgmma", reason)
    if geometry.c_out_per_group < FEWEST_TURNED:
        return Refusal("correlate_wgmma", f"serves at least {FEWEST_TURNED} channels of a group's result")
    if precision == "tf32x3" and prod(geometry.kernel) == 1:
        return Refusal("correlate_wgmma", "several taps share what is split for them")
    if not work_of(*correlation, dtype, precision).shape.boxes:
        return Refusal("correlate_wgmma", "bulk tensor copies cannot bring x")
    return _compared_turned(
        plan_correlate_wgmma(correlation[0], dtype, correlation[1], precision, device, tile), precision
    )


def _compared_turned(plan: Plan | Refusal, precision: str | None) -> Plan | Refusal:
    """Return the plan with the cost that is compared with those of transposed convolutions."""
    if isinstance(plan, Refusal) or precision != "tf32x3":
        return plan
    return dataclasses.replace(plan, cost=TURNED_SPLIT * plan.cost)


def candidates(geometry: Geometry, dtype: str, layout: Layout, precision: str | None, device: Device) -> Iterator[Plan]:
    """Yield the plan of such a transposed convolution that is proposed, and one for every other tile that fits."""
    correlation = turned(geometry, layout)
    proposed = plan_turned_correlate_wgmma(geometry, dtype, layout, precision, device)
    if isinstance(proposed, Refusal):
        return
    assert correlation is not None
    yield proposed
    every = ((work, tile) for work in works_of(*correlation, dtype, precision) for tile in tiles(work))
    for work, tile in every:
        cost = work.typical_cost(tile, device) if tile.boxed else None
        if cost is None:
            continue
        longer = with_longer_ring(work, tile, cost, device)
        plan = plan_tile(correlation[0], dtype, correlation[1], precision, device, longer, cost)
        plan = _compared_turned(plan, precision)
        if isinstance(plan, Plan) and plan.defines != proposed.defines:
            yield plan


def _can_fold(geometry: Geometry, layout: Layout, dtype: str, precision: str | None) -> bool:
    """Whether taps along W can be channels of what is read, so that a row is of up to 128 bytes of memory.

    They follow each other where kernel = stride, and copies can bring them. In 3xTF32 they are no channels, nor are
    groups joined: that has not been measured.
    """
    g, taps, itemsize = geometry, geometry.kernel[2], 4 if dtype == "float32" else 2
    if not taps_follow_each_other(g) or (layout.out[1], layout.out[4]) != (1, g.c_out):
        return False
    if taps * g.c_out * itemsize > FOLDED_BYTES or precision == "tf32x3":
        return False
    return work_of(g, layout, dtype, precision, Way(fold=taps)).shape.boxes


def _groups_of_row(geometry: Geometry, layout: Layout, dtype: str, precision: str | None) -> int:
    """Return how many groups of few channels can be brought as one row of up to 128 bytes, or 1.

    A product has channels of one group alone, and each has columns of its own.
    """
    g, itemsize = geometry, 4 if dtype == "float32" else 2
    step = 32 // itemsize  # channels of a product
    if g.groups == 1 or g.c_out_per_group % step or g.c_in_per_group % 8 or layout.out[1] != 1:
        return 1
    fits = (n for n in (16, 8, 4, 2) if not g.groups % n and n * g.c_out_per_group * itemsize in ROWS_OF_GROUPS)
    count = next(fits, 1)
    is_narrow = count * g.c_in_per_group <= MAX_COLUMNS
    return count if is_narrow and work_of(g, layout, dtype, precision, Way(joined=count)).shape.boxes else 1


def as_read(geometry: Geometry, layout: Layout, fold: int = 1, joined: int = 1) -> tuple[Geometry, Layout]:
    """Return the problem with the names of the kernel: x is read, and the weight has the channels of x first.

    With `fold`, so many taps along W are channels of x, and no taps any more. With `joined`, so many groups are one,
    but for the weight.
    """
    group, c_in, c_out, *taps = weight_strides(geometry, layout)
    g, out = geometry, layout.out
    if fold > 1:
        g, out = with_taps_as_channels(geometry), (*out[:4], fold * out[4])
    swapped = dataclasses.replace(
        g, c_in=g.c_out, c_out=g.c_in, x_extent=g.out_extent, out_extent=g.x_extent, groups=g.groups // joined
    )
    return batch_as_depth(
        swapped,
        dataclasses.replace(
            layout,
            x=out,
            weight=(c_out, c_in, *taps),
            out=layout.x,
            x_aligned=layout.out_aligned,
            out_aligned=layout.x_aligned,
            weight_group=group,
        ),
    )


def plan_tile(
    geometry: Geometry, dtype: str, layout: Layout, precision: str | None, device: Device, tile: Tile, cost: float = 0.0
) -> Plan | Refusal:
    """Plan a problem with a given tile."""
    if tile.fold > 1 and not (tile.fold == geometry.kernel[2] and _can_fold(geometry, layout, dtype, precision)):
        return Refusal("correlate_wgmma", "taps of this tile are no channels of x")
    if tile.joined > 1 and tile.joined != _groups_of_row(geometry, layout, dtype, precision):
        return Refusal("correlate_wgmma", "groups of this tile are no row")
    if any(tile.apart) and not tile.boxed:
        return Refusal("correlate_wgmma", "only bulk tensor copies bring a box for each tap")
    g, read = as_read(geometry, layout, tile.fold, tile.joined)
    work = Work(g, read, dtype, precision, tile.way)
    if tile.boxed and not work.shape.boxes:
        return Refusal("correlate_wgmma", "bulk tensor copies of this tile cannot bring x")
    tiles_c = -(-g.c_out_per_group // (8 * tile.tiles_c))
    times = tiles_c * g.groups * g.n
    box = work.box_of_launch(tile, g.out_extent, times, device, g.out_extent[2])
    if box is None:
        return Refusal("correlate_wgmma", "the box of this tile does not fit into shared memory")
    tiles = tuple(-(-i // b) for i, b in zip(g.out_extent, box.extent, strict=True))
    blocks = prod(tiles) * times
    if blocks > MAX_BLOCKS:
        return Refusal("correlate_wgmma", f"counts boxes in 31 bits, got {blocks}")
    index64 = reads_need_64_bits(geometry, layout, box.extent)
    x_vector = work.reads_vectors(tile, g, read)
    own = {"CLASSES": tile.classes, "SLOT_CLASSES": tile.slot_classes, "INDEX64": index64, "BOXED": tile.boxed}
    own |= {"FOLD": tile.fold, "JOINED": tile.joined, "STORE_ALONE": work.stores_alone(tile)}
    if any(tile.apart):
        own |= axis_macros(APART=tile.apart)
    if not tile.boxed:
        own |= x_copy_macros(g, read, work.shape.itemsize)
    registers = work.registers(tile)
    if registers is None:
        return Refusal("correlate_wgmma", "the sums of this tile do not fit into registers")
    defines = wgmma_defines(g, dtype, read, precision, tile, own, registers)
    unstrided, strided, narrow = BOXED_COMPARED
    if work.parts == 2:
        unstrided, strided = SPLIT_COMPARED
    elif g.c_out_per_group < MEASURED_CHANNELS:
        unstrided = strided = narrow
    slots = g.groups * tiles_c * work.slots(tile)
    weights = g.groups * tiles_c if tile.resident else 1
    pieces = 1 if tile.joined > 1 or tile.fold > 1 else work.packed_pieces(2 * tile.class_steps)  # that a thread packs
    return Plan(
        kernel="correlate_wgmma",
        defines=defines,
        grid=grid_of(blocks, device.multiprocessors * tile.min_blocks, 1, weights),
        block=tile.threads,
        shared_bytes=work.shared_bytes(tile, box, index64),
        problem=problem_parameters(
            g,
            read,
            (*tiles, tiles_c),
            x_vector,
            False,
            work.parameters(tile, box, blocks, g.pad_before[2] if x_vector and not read.x_channels_last else 0),
            together=work.stored_together(tile, box, g.out_extent[2], read),
        ),
        cost=OTHERS
        * ((unstrided if work.unstrided else strided) if tile.boxed else 1)
        * cost
        * prod(g.out_extent)
        * g.groups
        * g.n,
        packed_words=slots * work.slot_bytes(tile) // 4,
        packed_a_thread=4 * work.parts * pieces // tile.joined,
        maps=(work.map_of_x(tile, box, dtype, g, read, g.stride, work.channels(tile)),) if tile.boxed else (),
        tile=tile,
    )


def refuse(geometry: Geometry, dtype: str, precision: str | None, device: Device) -> str | None:
    """Return why wgmma does not serve a correlation, if it does not."""
    return refuse_tensor_cores(dtype, precision, device, wgmma=True) or refuse_steps(geometry) or refuse_taps(geometry)


@remembered(Tile)
def choose_tile(shape: Shape, device: Device) -> tuple[Tile, float] | None:
    """Return the best tile for typical extents, with its clocks a position (all channels of a group)."""
    work = Work.of(shape)
    return best_tile(work, bounded_tiles(shape), device)


@remembered(Tile)
def choose_tile_of_size(shape: Shape, times: int, extents: Ints, device: Device) -> tuple[Tile, float] | None:
    """Return the best of the tiles whose x copies bring with a stride, for so many positions so many times."""
    return best_tile_of_size(Work.of(shape), tiles_of_any_size(shape), times, extents, device)


@functools.lru_cache(maxsize=4)
def tiles_of_any_size(shape: Shape) -> list[Tile]:
    """Return the tiles whose x copies bring, with few slots for weights and with more."""
    return with_longer_rings([tile for tile in tiles(Work.of(shape)) if tile.boxed])


def best_tile_of_size(
    work: Work, every: list[AnyTile], times: int, extents: Ints, device: Device
) -> tuple[AnyTile, float] | None:
    """Return the best of some tiles for so many positions so many times, with its clocks, or None if none serves."""
    return cheapest_tile(
        ((work.least_of_size(tile, times, extents, device), tile) for tile in every),
        lambda tile: work.clocks_of_size(tile, times, extents, device),
    )


def with_longer_rings(every: list[AnyTile]) -> list[AnyTile]:
    """Return the tiles, and those with weights that pass by once more, with more slots for these."""
    return every + [altered(tile, ring=LONGER_RING) for tile in every if not tile.resident]


@remembered()
def least_of_all(shape: Shape) -> float:
    """Return a lower bound of the clocks of a position, whatever the tile, as they are compared with other kernels'."""
    return min(
        (bound * (min(BOXED_COMPARED) if tile.boxed else 1) for bound, tile in bounded_tiles(shape)), default=0.0
    )


@functools.lru_cache(maxsize=2)
def bounded_tiles(shape: Shape) -> list[tuple[float, Tile]]:
    """Return all tiles, each with a lower bound of the clocks of a position."""
    work = Work.of(shape)
    return [(work.least_cost(tile), tile) for tile in tiles(work)]


def tiles(work: Work) -> Iterator[Tile]:
    """Yield the tiles that a problem may use."""
    shape = work.shape
    eights = -(-shape.c_out // 8)
    tiles_of_channels = sorted({-(-eights // parts) for parts in (1, 2, 3, 4, 6, 8, 16)} & set(range(1, 17))) or [16]
    boxed_kinds = [(kind, True) for kind in kinds_of_blocks(True, work.parts)] if work.can_be_boxed else []
    # Without a stride, boxes have the least estimated time wherever they fit: in all of 1056 problems. In 3xTF32 they
    # took less time than pieces that threads copy, or at most 7% more.
    many_classes = any(count > most for count, most in zip(work.live, MAX_CLASSES, strict=True))
    alone = boxed_kinds and (
        max(shape.stride) == 1 or shape.fold > 1 or any(shape.apart) or many_classes or shape.products == 3
    )
    kinds = boxed_kinds if alone else [*((kind, False) for kind in REGISTERS), *boxed_kinds]
    for ((workers, stagers, blocks), boxed), merge_w, tiles_c, tiles_m, classes, steps, deep in itertools.product(
        kinds,
        (False, True),
        tiles_of_channels,
        (1, 2, 3, 4, 6, 8),
        _parts_of_classes(work),
        (1, 2, 4),
        (False, True),
    ):
        if merge_w and (work.taps[2] == 1 or shape.out_channels_last or tiles_m == 3):
            continue
        if deep and blocks > 1 and not boxed:
            continue
        if boxed and merge_w:
            continue
        tile = Tile(
            workers=workers,
            stagers=stagers,
            tiles_m=tiles_m,
            tiles_c=tiles_c,
            merge_w=merge_w,
            k_steps=classes * steps,
            x_stages=4 if deep else 2,
            ring=3,
            resident=False,
            take_turns=False,
            all_phases=False,
            min_blocks=blocks,
            classes=classes,
            slot_classes=classes,
            boxed=boxed,
            fold=shape.fold,
            joined=shape.joined,
            apart=shape.apart,
        )
        if shape.joined > 1 and not (boxed and work.channels(tile) == shape.c_in and tiles_c == eights):
            continue
        if steps > 1 and (work.channels(tile) >= 2 * shape.c_in or (tile.k_steps > MAX_K_STEPS and not boxed)):
            continue
        if work.columns(tile) > MAX_COLUMNS:
            continue
        if work.products(tile, classes) * tiles_m * shape.products > MAX_UNROLLED:
            continue
        # Merged taps of a slot have columns for the same number of taps; three products of a slot are one chain.
        unequal = merge_w and shape.kernel[2] % work.steps[2] > 0
        long = shape.products == 3 and work.products(tile, classes) > MAX_CHAIN
        if unequal or long or work.slot_bytes(tile) > MAX_SLOT_BYTES:
            tile = altered(tile, slot_classes=1)
        if work.registers(tile) is None:
            continue
        slots = work.slots(tile)
        if slots * work.slot_bytes(tile) <= RESIDENT_BYTES // blocks:
            tile = altered(tile, ring=slots, resident=True)
            if workers > 1:
                yield altered(tile, take_turns=True)
        yield tile


def _parts_of_classes(work: Work) -> list[int]:
    """Return how many classes along W may be staged at a time: all or, if they have equally many taps, one."""
    live = work.live[2]
    alike = work.shape.kernel[2] % work.steps[2] == 0 or work.taps[2] == 1
    return sorted({live, 1}) if alike else [live]
