"""Plans of the kernel for correlations on Hopper's tensor cores, ``kernels/correlate_wgmma.cu``.

The kernel reads `x` and writes `out`, like those of transposed convolutions: what the geometry of the adjoint calls its
result and its x. Boxes, and what of their estimate is the same, are those of `cuconvt.plan_phase_wgmma`.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil, gcd, inf, prod
from typing import NamedTuple

from cuconvt import plan_phase_wgmma as phase_wgmma
from cuconvt.geometry import Geometry
from cuconvt.plan import (
    Device,
    Ints,
    Layout,
    Plan,
    Refusal,
    magic,
    problem_parameters,
    refuse_steps,
    refuse_taps,
    refuse_tensor_cores,
    round_up,
    weight_strides,
)
from cuconvt.plan_boxes import count_boxes
from cuconvt.plan_copies import x_copy_macros, x_is_vector
from cuconvt.plan_correlate import reads_need_64_bits
from cuconvt.plan_phase_wgmma import (
    BESIDE_SUMS,
    FEWEST_TURNED,
    MAX_BLOCKS,
    MAX_COLUMNS,
    MAX_POSITIONS,
    POSITIONS,
    RESIDENT_BYTES,
    SECTOR,
    SHARED_BYTES_A_CLOCK,
    WIDE,
    Box,
    Shape,
    kinds_of_blocks,
)
from cuconvt.plan_search import cheapest_tile, of_tile, remembered, step_of_size
from cuconvt.plan_turned import turned
from cuconvt.plan_views import batch_as_depth, taps_follow_each_other, with_taps_as_channels
from cuconvt.tensor_map import CHANNELS, MAX_BOX, MAX_STEP, spans

# Registers of a worker's and of a stager's thread, by warpgroups of either and blocks a multiprocessor. What is under
# way from memory is often the bound: stagers have what the workers of a tile do not need, and more than in
# plan_phase_wgmma.
REGISTERS = {
    (1, 1, 2): ((152, 104), (168, 88), (184, 72)),
    (1, 3, 1): ((152, 120), (176, 112), (200, 104), (224, 96)),
    (2, 2, 1): ((152, 104), (168, 88), (184, 72)),
    (2, 3, 1): ((120, 80), (144, 64)),
    (1, 2, 2): ((112, 64),),
    (1, 1, 3): ((96, 64),),
}
FOLDED_BYTES = 128  # of a row: channels of all taps along W
ROWS_OF_GROUPS = 64, 128  # bytes of a row: channels of all groups
MAX_CLASSES = (4, 4, 8)  # along D, H, W: bits of an item, of which boxes have none
MAX_SLOT_BYTES = 24 * 1024  # of weights; a longer row of taps is divided by classes
MAX_K_STEPS = 16  # of a stage: with more, registers spill
MAX_UNROLLED = 450  # wgmmas of a row of taps
MAX_CHAIN = 6  # products of three parts that a tensor core sums up, where a slot can be divided
# Rates of an H200's multiprocessor, per clock, and more of the estimate, as far as it is another than the forward's:
# fitted to about 800 tiles' times for 33 problems.
L2_BYTES_A_CLOCK = 140
INSTRUCTIONS_A_CLOCK = 0.83
# The bound of a tile may be above its cost where fewer items than it has rows take a batch less; that of the cheapest
# tile was not for any of 432 problems.
BOUND_ABOVE_COST = 1.1
DEEP = 0.49  # of the waits for chunks are left where four of them are staged ahead
FEW_POSITIONS = 410  # that a layer of many channels may have for each multiprocessor


class Rates(NamedTuple):
    """What of the estimate depends on how x is staged."""

    memory: float  # bytes a clock
    overlap: float  # what of the less busy units' time adds to the busiest one's
    box: float  # clocks in which a block waits: for a box, and for a chunk of channels
    chunk: float
    positions: tuple[int, int]  # that a layer of many channels, and another one, may have for each multiprocessor


BY_THREADS = Rates(11.7, 0.35, 870, 570, (FEW_POSITIONS, POSITIONS))
# By bulk tensor copies, without a stride (fitted to 71 tiles' times for 11 problems), and of joined groups.
UNSTRIDED_BOXES = Rates(21, 0.2, 0, 300, (410, 5000))
JOINED_BOXES = UNSTRIDED_BOXES._replace(positions=(100, POSITIONS))


class StridedRates(NamedTuple):
    """The same with a stride: bytes a clock, and clocks; fitted to 1930 tiles' times for 42 problems (12% rms)."""

    copied: float = 168  # bytes of x, and clocks of each row of them
    row: float = 0.9
    weights: float = 72  # bytes, beside them
    memory: float = 24.3  # bytes
    product: float = 15.4  # clocks of a wgmma, and of each of its columns
    column: float = 0.23
    stage: float = 1340  # clocks from asking for a stage to having it, of which all but one are under way
    slot: float = 790  # the same of a slot of weights
    box: float = 412  # clocks
    outputs: float = 5.9  # clocks of 32 results
    norm: float = 2.2
    # Of 3xTF32 alone: clocks of a chain besides its products, and bytes of x that a thread splits in a clock.
    chain: float = 0
    split: float = inf
    positions: tuple[int, int] = (100, POSITIONS)


STRIDED = StridedRates()
# Of 3xTF32, with a stride or without: fitted to 120 tiles' times for 18 problems (12% rms; 16% for 25 others).
SPLIT = StridedRates(product=10.3, stage=630, slot=176, box=1846, norm=1.13, chain=31.9, split=0.355)
STRIDED_LEVEL = 1.1  # of the estimates that are compared with those of other tiles and kernels
COPIED_BYTES_A_CLOCK, COPIED_ROW_CLOCKS = 250, 1.75  # of such copies: a row takes as long, besides its bytes
COPIED_WEIGHTS_A_CLOCK = 107  # bytes beside them
JOINED_AHEAD, JOINED_THREE = 0.9, 0.97  # of joined groups' with more than two stages, and three workers: of 20 problems
TURNS = 0.95  # of the estimated time without a stride, where workers take turns
# The cost that is compared with other kernels': without a stride; with one, where it was faster than they wherever it
# was measured; and with fewer channels of the result than were measured.
BOXED_COMPARED, MEASURED_CHANNELS = (1.15, 0.6, 1.35), 32
# Likewise for 3xTF32, without a stride and with one. Without a stride plan_phase_wgmma expects too little of the same
# problem where that is small: in 17 of several taps this kernel took less time, or at most 2% more.
SPLIT_COMPARED = 1.7, 0.85
TURNED_SPLIT = 0.53
BATCH_CLOCKS = 1180  # in which a thread loads a batch and stores it
ALONE = {1: 1.15, 3: 1.3}  # by products: times as long as by two workers
OTHERS = 0.65  # the other kernels' estimates are as much more optimistic, beyond what the forward's are
# By rank, as in plan_phase_wgmma: extents of x, which networks mostly keep to powers of two.
TYPICAL_EXTENTS: dict[int, tuple[Ints, ...]] = {
    1: ((64, 1, 256), (64, 1, 4096)),
    2: ((64, 16, 16), (64, 64, 64), (64, 128, 128)),
    3: ((32, 32, 32), (48, 48, 48), (64, 64, 64), (16, 32, 64)),
}
TYPICAL_EXTENTS_OF_WIDE = {**TYPICAL_EXTENTS, 3: ((8, 8, 8), (16, 16, 16), (32, 32, 32), (48, 48, 48))}


@dataclass(frozen=True)
class Tile(phase_wgmma.Tile):
    """The compile-time shape of a block; the fields are the macros of the kernel. K steps count all classes."""

    classes: int = 1  # along W that are staged at a time
    slot_classes: int = 1  # of these, how many have their weights in one slot
    fold: int = 1  # taps along W that are channels of x
    joined: int = 1  # groups that are staged as one

    @property
    def class_steps(self) -> int:
        return self.k_steps // self.classes


def plan_correlate_wgmma(
    geometry: Geometry,
    dtype: str,
    layout: Layout,
    precision: str | None,
    device: Device,
    tile: Tile | None = None,
    most: float = inf,
) -> Plan | Refusal:
    """Propose the tile with the least estimated time, or a given one, or say why wgmma does not serve.

    Also where its cost must be more than `most`: to find the best of its tiles takes long.
    """
    if reason := refuse(geometry, dtype, precision, device):
        return Refusal("correlate_wgmma", reason)
    if tile is not None:
        work = Work(*as_read(geometry, layout, tile.fold, tile.joined), dtype, precision, tile.fold, tile.joined)
        cost = work.typical_cost(tile, device)
        return plan_tile(geometry, dtype, layout, precision, device, tile, cost or 0.0)
    ways = [(1, 1)]  # taps along W that are channels, and groups that are one
    if _can_fold(geometry, layout, dtype, precision):
        ways.append((geometry.kernel[2], 1))
    if (joined := _groups_of_row(geometry, layout, dtype, precision)) > 1:
        ways.append((1, joined))
    works = [Work(*as_read(geometry, layout, *way), dtype, precision, *way) for way in ways]
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
        tile = _tile_of_size(geometry, dtype, layout, precision, device, tile)
    return plan_tile(geometry, dtype, layout, precision, device, tile, cost)


def _tile_of_size(
    geometry: Geometry, dtype: str, layout: Layout, precision: str | None, device: Device, tile: Tile
) -> Tile:
    """Return the tile whose boxes take the least time for so many positions, or the given one.

    That is where `Work.clocks_of_norm` estimates it.
    """
    g, read = as_read(geometry, layout, tile.fold)
    work = Work(g, read, dtype, precision, tile.fold)
    if (work.unstrided and work.parts == 1) or min(*g.out_extent, g.n) == 0:
        return tile
    extents = tuple(map(step_of_size, g.out_extent))
    of_size = choose_tile_of_size(work.shape, step_of_size(g.n) * g.groups, extents, device)
    return tile if of_size is None else of_size[0]


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
    if not Work(*as_read(*correlation), dtype, precision).shape.boxes:
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
    work = Work(*as_read(*correlation), dtype, precision)
    for tile in tiles(work):
        cost = work.typical_cost(tile, device) if tile.boxed else None
        if cost is None:
            continue
        longer = phase_wgmma.with_longer_ring(work, tile, cost, device)
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
    return Work(*as_read(g, layout, taps), dtype, precision).shape.boxes


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
    return count if is_narrow and Work(*as_read(g, layout, 1, count), dtype, precision, 1, count).shape.boxes else 1


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
    g, read = as_read(geometry, layout, tile.fold, tile.joined)
    work = Work(g, read, dtype, precision, tile.fold, tile.joined)
    if tile.boxed and not work.shape.boxes:
        return Refusal("correlate_wgmma", "bulk tensor copies of this tile cannot bring x")
    tiles_c = -(-g.c_out_per_group // (8 * tile.tiles_c))
    times = tiles_c * g.groups * g.n
    box = work.box_of_launch(tile, g.out_extent, times, device)
    if box is None:
        return Refusal("correlate_wgmma", "the box of this tile does not fit into shared memory")
    tiles = tuple(-(-i // b) for i, b in zip(g.out_extent, box.extent, strict=True))
    blocks = prod(tiles) * times
    if blocks > MAX_BLOCKS:
        return Refusal("correlate_wgmma", f"counts boxes in 31 bits, got {blocks}")
    index64 = reads_need_64_bits(geometry, layout, box.extent)
    x_vector = work.reads_vectors(tile, g, read)
    own = {"CLASSES": tile.classes, "SLOT_CLASSES": tile.slot_classes, "INDEX64": index64, "BOXED": tile.boxed}
    own |= {"FOLD": tile.fold, "JOINED": tile.joined}
    if not tile.boxed:
        own |= x_copy_macros(g, read, work.shape.itemsize)
    registers = work.registers(tile)
    if registers is None:
        return Refusal("correlate_wgmma", "the sums of this tile do not fit into registers")
    defines = phase_wgmma.wgmma_defines(g, dtype, read, precision, tile, own, registers)
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
        grid=phase_wgmma.grid_of(blocks, device.multiprocessors * tile.min_blocks, 1, weights),
        block=tile.threads,
        shared_bytes=work.shared_bytes(tile, box, index64),
        problem=problem_parameters(
            g,
            read,
            (*tiles, tiles_c),
            x_vector,
            False,
            work.parameters(tile, box, blocks, g.pad_before[2] if x_vector and not read.x_channels_last else 0),
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


class Work(phase_wgmma.Work):
    """The sizes that follow from a problem and a tile; the kernel computes the same ones."""

    extents = extents_of_rows = TYPICAL_EXTENTS
    extents_of_wide = extents_of_wide_rows = extents_of_wide_boxed = TYPICAL_EXTENTS_OF_WIDE

    def __init__(
        self, geometry: Geometry, layout: Layout, dtype: str, precision: str | None, fold: int = 1, joined: int = 1
    ):
        g, itemsize = geometry, 4 if dtype == "float32" else 2
        self.shape = Shape(
            g.rank,
            g.kernel,
            g.stride,
            g.dilation,
            g.c_in_per_group,
            g.c_out_per_group,
            itemsize,
            3 if precision == "tf32x3" else 1,
            layout.x_channels_last,
            layout.out_channels_last,
            pairs=False,
            late=(0, 0, 0),
            boxes=(precision != "tf32x3" or fold == joined == 1)
            and phase_wgmma.can_be_boxed(g, layout, itemsize, 1 if joined > 1 else CHANNELS),
            fold=fold,
            joined=joined,
        )
        self._derive()

    def _derive(self) -> None:
        super()._derive()
        self.compared = phase_wgmma.COMPARED
        self.unstrided = max(self.shape.stride) == self.shape.fold == 1
        s = self.shape
        self.taps = tuple(-(-k // step) for k, step in zip(s.kernel, self.steps, strict=True))  # of a class, at most
        of_classes = (-(-(s.kernel[2] - first) // self.steps[2]) for first in range(self.live[2]))
        self.taps_before = tuple(itertools.accumulate(of_classes, initial=0))  # along W, of so many classes
        hops = (d // gcd(st, d) for st, d in zip(s.stride, s.dilation, strict=True))
        self.halo = tuple((taps - 1) * hop for taps, hop in zip(self.taps, hops, strict=True))

    def too_many_classes(self) -> str | None:
        """Return why taps with so many remainders modulo the stride are too many, if they are."""
        live = tuple(self.live)
        most = (MAX_STEP,) * 3 if self.can_be_boxed else MAX_CLASSES
        if any(count > of_axis for count, of_axis in zip(live, most, strict=True)):
            return f"tells apart at most {most} remainders of taps modulo the stride along D, H, W, got {live}"
        return None

    @property
    def can_be_boxed(self) -> bool:
        return self.shape.boxes and max(self.shape.stride) <= MAX_STEP

    def reach(self, tile: phase_wgmma.Tile) -> Ints:
        return self.halo

    def sums(self, tile: phase_wgmma.Tile) -> int:
        """Return the sums of a position and channel that a block holds."""
        return self.taps[2] if tile.merge_w else 1

    def outputs(self, tile: phase_wgmma.Tile) -> int:
        return 1

    def columns(self, tile: phase_wgmma.Tile) -> int:
        return 8 * tile.tiles_c * self.sums(tile) // self.shape.joined

    def channels(self, tile: Tile) -> int:
        """Return the channels of x that are staged at a time."""
        return 2 * tile.class_steps * (16 // self.shape.itemsize)

    def products(self, tile: Tile, classes: int) -> int:
        """Return the wgmmas of the first so many classes, for a row of taps and 64 rows of A."""
        return (classes if tile.merge_w else self.taps_before[classes]) * tile.class_steps

    @of_tile
    def slot_bytes(self, tile: phase_wgmma.Tile) -> int:
        assert isinstance(tile, Tile)
        return self.products(tile, tile.slot_classes) * self.parts * 2 * self.columns(tile) * 16

    @of_tile
    def slots(self, tile: Tile) -> int:
        """Return the slots of weights that a box needs."""
        chunks = -(-self.shape.c_in // self.channels(tile))
        return self.shape.kernel[0] * self.shape.kernel[1] * chunks * (self.live[2] // tile.slot_classes)

    @of_tile
    def stages(self, tile: Tile) -> int:
        """Return how often a box is staged: for the classes and chunks of channels."""
        chunks = -(-self.shape.c_in // self.channels(tile))
        return self.live[0] * self.live[1] * (self.live[2] // tile.classes) * chunks

    def accumulators(self, tile: phase_wgmma.Tile) -> int:
        """Registers of a worker that hold sums."""
        chains = self.columns(tile) if self.shape.products == 3 else 0
        return self.columns(tile) * self.shape.joined // 2 * tile.tiles_m + chains

    def other_registers(self, tile: phase_wgmma.Tile) -> int:
        """Estimate how many registers a worker needs besides."""
        assert isinstance(tile, Tile)
        long = max(0, tile.tiles_m * self.products(tile, tile.slot_classes) - 48)  # wgmmas of a slot beyond some
        count = 48 if self.at_start(tile) >= 128 else 54
        count += long if self.shape.out_channels_last else long // 4
        if self.shape.products == 3:
            # Slots are unrolled.
            count += (22 if self.shape.out_channels_last else 14) + 4 * (tile.classes // tile.slot_classes - 1)
        if self.shape.out_channels_last:
            count += 7 + 6 * tile.tiles_m
        return count

    @of_tile
    def registers(self, tile: phase_wgmma.Tile) -> tuple[int, int] | None:
        """Return the registers of a worker, which are enough, and of a stager."""
        if self.columns(tile) // 2 + BESIDE_SUMS > self.at_start(tile):
            return None
        need = self.accumulators(tile) + self.other_registers(tile)
        of_kind = tile.workers, tile.stagers, tile.min_blocks
        shares = (kinds_of_blocks(True, self.parts)[of_kind],) if tile.boxed else REGISTERS[of_kind]
        return next((share for share in shares if share[0] >= need), None)

    def has_runs(self, tile: Tile) -> bool:
        """Whether the kernel can read runs of as many elements as there are classes along W."""
        s, count = self.shape, tile.classes
        whole = count > 1 and count == s.stride[2] and s.dilation[2] == 1 and count & (count - 1) == 0
        return whole and not s.x_channels_last and count * s.itemsize <= 16

    def reads_vectors(self, tile: Tile, geometry: Geometry, layout: Layout) -> bool:
        """Whether x may be read by aligned runs of a row or, channels-last, 16 bytes of channels at a time."""
        if layout.x_channels_last:
            return x_is_vector(geometry, layout, self.shape.itemsize)
        unit = tile.classes
        whole = geometry.x_extent[2] % unit == 0 and not any(stride % unit for stride in layout.x[:4])
        return self.has_runs(tile) and whole and layout.x_aligned and layout.x[4] == 1

    def fits(self, tile: phase_wgmma.Tile, box: Box, device: Device) -> bool:
        """Whether as many blocks as the tile wants share a multiprocessor; each reserves 1 KB on top of its own."""
        room = (device.shared_bytes + 1024) // tile.min_blocks - 1024
        if tile.boxed and max(spans(self.staged(tile, box.extent), self.shape.stride)) > MAX_BOX:
            return False
        return box.plane <= MAX_POSITIONS and self.shared_bytes(tile, box, True) <= room

    def staged(self, tile: phase_wgmma.Tile, extent: Ints) -> Ints:
        """Return the extents of a box of such positions with its halo."""
        return tuple(e + r for e, r in zip(extent, self.halo, strict=True))

    def items(self, tile: phase_wgmma.Tile, d: int, h: int, w: int) -> int:
        """As for a transposed convolution, with an item more a row: a run may begin before the first position."""
        return 0 if tile.boxed else d * h * (w + 1)

    def parameters(self, tile: Tile, box: Box, blocks: int, shift: int) -> Ints:
        """Return the part of ``struct Problem`` that describes a box; `shift` is the padding if x is read by runs."""
        _, h, w = box.extent
        width, lines = w + self.halo[2], h + self.halo[1]
        # In the order in which the kernel divides: items by rows, rows by slices; then what it stores.
        divisors = (width + (shift % self.shape.stride[2] > 0), lines, w, h)
        if self.shape.out_channels_last:
            divisors = (*divisors[:2], width, 1)
        return (*box.extent, box.plane, *box.patches, blocks, *(magic(divisor) for divisor in divisors))

    def cost(self, tile: phase_wgmma.Tile, box: Box) -> float:
        """Return the clocks of a box of positions, with all channels of a group."""
        return self.clocks(tile, box) * -(-self.shape.c_out // (8 * tile.tiles_c))

    def batches(self, tile: Tile, box: Box) -> float:
        """Return how often a thread waits for what it loads, to stage a box once."""
        s = self.shape
        if s.x_channels_last:  # copies of so many stages wait together
            return 1 / (tile.x_stages - 1)
        piece = 16 // s.itemsize
        runs = self.has_runs(tile)
        if runs:
            classes, words = tile.classes, piece * -(-tile.classes * s.itemsize // 4)
        else:
            classes = max(i for i in range(1, tile.classes + 1) if tile.classes % i == 0 and i * piece <= 16)
            words = piece * classes
        registers = self.registers(tile)
        assert registers is not None
        units = box.items * 2 * tile.k_steps // classes
        batch = max(1, (registers[1] // 2 - (4 if runs else 12)) // max(words, 8))
        return ceil(units / (batch * (128 * tile.stagers - 32)))

    def clocks(self, tile: phase_wgmma.Tile, box: Box) -> float:
        """Estimate a multiprocessor's clocks for one box."""
        assert isinstance(tile, Tile)
        s, columns = self.shape, self.columns(tile)
        if tile.boxed and s.joined == 1 and (s.products == 3 or not self.unstrided):
            return STRIDED_LEVEL * self.clocks_of_norm(tile, box) * self._last_round(tile, STRIDED.positions)
        rates = (JOINED_BOXES if s.joined > 1 else UNSTRIDED_BOXES) if tile.boxed else BY_THREADS
        rows = s.kernel[0] * s.kernel[1] * -(-s.c_in // self.channels(tile))  # of taps along W
        products = rows * self.products(tile, self.live[2]) * tile.tiles_m * tile.team * s.products
        if tile.merge_w:  # some classes have a tap less
            columns = round(columns * s.kernel[2] / (self.live[2] * self.taps[2]))
        stages = self.stages(tile)
        staged = stages * box.plane * tile.k_steps * 32  # bytes of x, as it comes
        weights = 0 if tile.resident else self.slots(tile) * self.slot_bytes(tile)
        positions = prod(box.extent)
        outputs = positions * min(8 * tile.tiles_c, s.c_out)
        by_elements = not s.x_channels_last and not self.has_runs(tile)
        apart = s.stride[2] / tile.classes if by_elements else 1  # of the sectors that are read, one in so many is used
        moved = 0 if tile.boxed else staged  # by threads
        loads = moved / 128 * max(apart, 4 / s.itemsize / 2 * (1.5 if by_elements else 1))
        stores = outputs / 32 * (1 + 32 / box.extent[2])
        turned = 0 if s.out_channels_last else (tile.rows * 8 * tile.tiles_c + outputs) / 32 * self.sums(tile)
        if s.out_channels_last:
            stores = outputs / 32 * (1 if s.itemsize == 4 else 0.75)
        edges = 0.0  # of rows, whole sectors are read
        if not s.x_channels_last:
            edges = SECTOR / (s.itemsize * tile.classes * (box.extent[2] + self.halo[2]))
        shared = products * (16 + columns / 4) + (staged * self.parts + weights) / SHARED_BYTES_A_CLOCK
        shared += loads * (1 + 2 * edges) + stores + turned
        tensor = products * columns / 2
        if tile.workers * tile.min_blocks == 1:  # nobody multiplies while a worker adds up, waits or stores
            tensor *= ALONE[s.products]
        l2 = (staged * apart * (1 + edges) + weights) / L2_BYTES_A_CLOCK
        read = positions * prod(self.live) * s.c_in * s.itemsize * (s.stride[2] / self.live[2] if by_elements else 1)
        read *= (1 + edges) / -(-s.c_out // (8 * tile.tiles_c))
        memory = (read + outputs * s.itemsize) / rates.memory
        issue = (moved / s.itemsize * (9 if by_elements else 4) + outputs * 12) / 32 / INSTRUCTIONS_A_CLOCK
        # One group of threads stages the boxes of all workers of a block, one batch after the other.
        staging = stages * self.batches(tile, box) * BATCH_CLOCKS / tile.min_blocks
        if tile.boxed:
            l2 = staged * (1 / COPIED_BYTES_A_CLOCK + COPIED_ROW_CLOCKS / (32 * tile.class_steps))
            l2 += weights / COPIED_WEIGHTS_A_CLOCK
            staging = 0
        busiest = max(shared, tensor, l2, memory, issue, staging)
        others = shared + tensor + l2 + memory + issue + staging - busiest
        waits = stages * rates.chunk * (1 if tile.x_stages == 2 else DEEP) + rates.box
        clocks = busiest + rates.overlap * others + waits / self._at_once(tile)
        if tile.boxed and tile.take_turns and self.unstrided:
            clocks *= TURNS
        if s.joined > 1:
            clocks *= (JOINED_AHEAD if tile.x_stages > 2 else 1) * (JOINED_THREE if tile.workers == 3 else 1)
        return clocks * self._last_round(tile, rates.positions)

    def clocks_of_size(self, tile: Tile, times: int, extents: Ints, device: Device) -> float | None:
        """Estimate the clocks of a launch that takes so many positions so many times, or None where no box fits."""
        times *= -(-self.shape.c_out // (8 * tile.tiles_c))
        box = self.box_of_launch(tile, extents, times, device)
        if box is None:
            return None
        return self._clocks_of_boxes(tile, box, times * count_boxes(extents, box.extent), device)

    def least_of_size(self, tile: Tile, times: int, extents: Ints, device: Device) -> float:
        """Return a lower bound of the same: with boxes without a halo, as many as the device holds at a time."""
        times *= -(-self.shape.c_out // (8 * tile.tiles_c))
        positions, held = prod(extents), device.multiprocessors * self._at_once(tile)
        bounds = []
        for rows in range(64, tile.rows + 1, 64):
            boxes = round_up(times * -(-positions // rows), held)
            of_box = times * positions // boxes
            bounds.append(self._clocks_of_boxes(tile, Box((1, 1, of_box), (0, 0), of_box, 0), boxes, device))
        return min(bounds)

    def _clocks_of_boxes(self, tile: Tile, box: Box, boxes: int, device: Device) -> float:
        rounds = -(-boxes // (device.multiprocessors * self._at_once(tile)))
        return rounds * self._at_once(tile) * self.clocks_of_norm(tile, box)

    def _at_once(self, tile: phase_wgmma.Tile) -> int:
        """Return how many boxes a multiprocessor has at a time."""
        return tile.min_blocks * tile.workers // tile.team

    def clocks_of_norm(self, tile: Tile, box: Box) -> float:
        """Estimate a multiprocessor's clocks for one box that copies bring, with a stride or to be split.

        What bounds them adds to each other as in a norm.
        """
        s, r = self.shape, SPLIT if self.parts == 2 else STRIDED
        stages, at_once = self.stages(tile), self._at_once(tile)
        rows = s.kernel[0] * s.kernel[1] * -(-s.c_in // self.channels(tile))  # of taps along W
        products = rows * self.products(tile, self.live[2]) * tile.tiles_m * tile.team * s.products
        multiplied = products * (r.product + r.column * self.columns(tile))
        staged = stages * box.plane * tile.k_steps * 32  # bytes of x, as it comes
        multiplied += self.slots(tile) * tile.tiles_m * tile.team * r.chain
        split = staged / (r.split * (128 * tile.stagers - 64))  # clocks of a block's threads
        positions, tiles_c = prod(box.extent), -(-s.c_out // (8 * tile.tiles_c))
        outputs = positions * min(8 * tile.tiles_c, s.c_out)
        copies = staged / r.copied + staged / (32 * tile.class_steps) * r.row
        waits_for_weights = 0.0
        if not tile.resident:
            copies += self.slots(tile) * self.slot_bytes(tile) / r.weights
            waits_for_weights = self.slots(tile) * r.slot / (tile.ring - 1) / tile.min_blocks
        read = positions * prod(self.live) * s.c_in * s.itemsize / tiles_c
        bounds = (
            multiplied,
            copies,
            split / tile.min_blocks,
            (read + outputs * s.itemsize) / r.memory,
            (stages * r.stage + split) / (tile.x_stages - 1) / at_once,
            waits_for_weights,
        )
        norm: float = sum(bound**r.norm for bound in bounds) ** (1 / r.norm)
        return norm + (r.box + r.outputs * outputs / 32) / at_once

    def _last_round(self, tile: Tile, positions: tuple[int, int]) -> float:
        """Estimate how much longer boxes take, as in the last of their rounds half of the multiprocessors are idle."""
        s, at_once = self.shape, self._at_once(tile)
        share = positions[0 if max(s.c_in, s.c_out) >= WIDE else 1]
        return 1 + 0.5 * tile.rows * 8 * tile.tiles_c * at_once / (share * s.c_out)


@remembered(Tile)
def choose_tile(shape: Shape, device: Device) -> tuple[Tile, float] | None:
    """Return the best tile for typical extents, with its clocks a position (all channels of a group)."""
    work = Work.of(shape)
    return phase_wgmma.best_tile(work, bounded_tiles(shape), device)


@remembered(Tile)
def choose_tile_of_size(shape: Shape, times: int, extents: Ints, device: Device) -> tuple[Tile, float] | None:
    """Return the best of the tiles whose x copies bring with a stride, for so many positions so many times."""
    work = Work.of(shape)
    assert isinstance(work, Work)
    every = [tile for tile in tiles(work) if tile.boxed]
    every += [dataclasses.replace(tile, ring=phase_wgmma.LONGER_RING) for tile in every if not tile.resident]
    return cheapest_tile(
        ((work.least_of_size(tile, times, extents, device), tile) for tile in every),
        lambda tile: work.clocks_of_size(tile, times, extents, device),
    )


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


def tiles(work: phase_wgmma.Work) -> Iterator[Tile]:
    """Yield the tiles that a problem may use."""
    assert isinstance(work, Work)
    shape = work.shape
    eights = -(-shape.c_out // 8)
    tiles_of_channels = sorted({-(-eights // parts) for parts in (1, 2, 3, 4, 6, 8, 16)} & set(range(1, 17))) or [16]
    boxed_kinds = [(kind, True) for kind in kinds_of_blocks(True, work.parts)] if work.can_be_boxed else []
    # Without a stride, boxes have the least estimated time wherever they fit: in all of 1056 problems. In 3xTF32 they
    # took less time than pieces that threads copy, or at most 7% more.
    many_classes = any(count > most for count, most in zip(work.live, MAX_CLASSES, strict=True))
    alone = boxed_kinds and (max(shape.stride) == 1 or shape.fold > 1 or many_classes or shape.products == 3)
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
            tile = dataclasses.replace(tile, slot_classes=1)
        if work.registers(tile) is None:
            continue
        slots = work.slots(tile)
        if slots * work.slot_bytes(tile) <= RESIDENT_BYTES // blocks:
            tile = dataclasses.replace(tile, ring=slots, resident=True)
            if workers > 1:
                yield dataclasses.replace(tile, take_turns=True)
        yield tile


def _parts_of_classes(work: Work) -> list[int]:
    """Return how many classes along W may be staged at a time: all or, if they have equally many taps, one."""
    live = work.live[2]
    alike = work.shape.kernel[2] % work.steps[2] == 0 or work.taps[2] == 1
    return sorted({live, 1}) if alike else [live]
