"""Plans of the kernel for Hopper's tensor cores, ``kernels/phase_wgmma.cu``."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import exp, gcd, log, prod
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

from cuconvt.geometry import Geometry
from cuconvt.plan import (
    DTYPE_CODES,
    INDEX_LIMIT,
    PRECISION_CODES,
    Device,
    Layout,
    Plan,
    Refusal,
    all_positions,
    at_residue,
    axis_macros,
    magic,
    positions,
    positions_reached,
    problem_parameters,
    refuse_phases,
    refuse_steps,
    refuse_taps,
    refuse_tensor_cores,
    round_up,
    span,
)
from cuconvt.plan_boxes import count_boxes, even_extent
from cuconvt.plan_copies import channels_stored, others_divisible, x_copy_macros, x_is_vector
from cuconvt.plan_rounds import AROUND, AROUND_OF_BOXED, AROUND_OF_SPLIT, takes_longest_first, taps_of_phases
from cuconvt.plan_search import ROUNDINGS, cheapest_tile, of_tile, remembered
from cuconvt.plan_views import batch_as_depth
from cuconvt.tensor_map import MAX_BOX, STRIDE_BYTES, TensorMap, reads

Ints = tuple[int, ...]

ROWS = 64  # of a wgmma
MAX_COLUMNS = 192  # of one that the header has
MAX_COLUMNS_OF_THREE = 104  # where three blocks share a multiprocessor: ptxas refuses more sums at a time
MAX_BLOCKS = 2**30
MAX_POSITIONS = 2**14 - 1  # of a plane: its distance has 14 bits in a wgmma's descriptor
MAX_OUTPUTS = 2**15 - 1 - 2**10  # of a box, along an axis: counted in 16 bits
# Registers of a worker's and of a stager's thread, by warpgroups of either and blocks a multiprocessor.
REGISTERS = {
    (1, 1, 2): (200, 56),
    (2, 2, 1): (200, 56),
    (1, 1, 3): (104, 56),
}
# The same where bulk tensor copies bring x: a thread for each team and one for weights stage.
REGISTERS_OF_BOXED = {(2, 1, 1): (232, 40), (1, 1, 2): (216, 40), (3, 1, 1): (152, 40)}
# And others split it.
REGISTERS_OF_SPLIT = {(2, 1, 1): (224, 56), (1, 1, 2): (208, 48), (3, 1, 1): (152, 56), (2, 2, 1): (200, 56)}
ALL_REGISTERS = 65536  # of a multiprocessor
BESIDE_SUMS = 28  # registers that a wgmma's sums leave, or ptxas refuses it: of those that a thread starts with
MAX_REACHED = 2**30  # positions that bulk tensor copies count, with those of a box beyond the last
SWIZZLED = 1024  # bytes after which a swizzle repeats
STEP_BYTES = 32  # of a position's channels, that a wgmma multiplies

MAX_UNROLLED = 450  # wgmmas of a chunk, where a block owns all phases: more take seconds to compile
MAX_UNROLLED_SLICE = 200  # of a slice and chunk, where rows wait for their weights
MAX_UNROLLED_STORES = 128  # for a thread's two rows, where results are not turned
PACKED_CHANNELS = 16  # of a weight, by a thread
RESIDENT_BYTES = 128 * 1024  # of weights that stay in shared memory

# Rates of an H200's multiprocessor, per clock, that the cost estimate uses.
SHARED_BYTES_A_CLOCK = 128
L2_BYTES_A_CLOCK = 70
MEMORY_BYTES_A_CLOCK = 18
INSTRUCTIONS_A_CLOCK = 1.2
OVERLAP = 0.4  # what of the less busy units' time adds to the busiest one's
BOX_CLOCKS, CHUNK_CLOCKS = 200, 850  # in which a block waits: for a box, and for a chunk of channels
SLICE_CLOCKS, SLICE_CHUNK_CLOCKS = 1000, 250  # likewise, where a block slides; the latter for each 64 rows of a worker
COPIED_CHUNK_CLOCKS, COPIED_SLICE_CHUNK_CLOCKS = 550, 780  # instead, where x is channels-last and comes by copies
COPY_INSTRUCTIONS = 50  # that 16 bytes of such an x take
RUN_CLOCKS = 1500  # for a box whose result is stored straight from the registers, by a block that is alone
BATCH_CLOCKS = 1100  # in which a thread of the stagers loads a batch of rows and stores it, however many have one
DEEP = 0.85  # of the waits for chunks are left where four of them are staged ahead
DEEP_OF_ROWS = 0.35  # likewise, of rows that are not split: then a chunk has a third of the products to hide them
SLOT_CLOCKS = 700  # that a slot of weights takes at least: of three in turn, that far ahead of their use
SECTOR = 32  # bytes that memory writes at least
ATOM = 64  # bytes that it writes best: blocks that share these took up to twice as long, where writing bounds them
COMPARED = 0.93  # the other kernels' estimates are as much more optimistic
COMPARED_OF_ROWS = 0.78  # where x is float32 in rows
COMPARED_OF_TF32_LAST = 0.85  # where x is channels-last
COMPARED_OF_16_BITS = 0.65
COMPARED_OF_BOXED = 0.5  # where bulk tensor copies bring x
COMPARED_OF_SPLIT, COMPARED_OF_SPLIT_GROUPS = 1.05, 0.75  # likewise, for 3xTF32
COMPARED_OF_UNSTRIDED = 0.95  # instead, without a stride and with as many channels as plan_correlate_wgmma serves
FEWEST_TURNED = 40  # channels of a result that it serves: with fewer, this kernel took 0.4 to 0.8 times as long
ROW_ENDS = 16  # outputs more than a row has take as long to write


class BoxedRates(NamedTuple):
    """What the estimate counts where bulk tensor copies bring x: fitted to 1281 tiles' times (13% rms)."""

    product: float = 11.0  # clocks of a wgmma, and of each of its columns
    column: float = 0.394
    copied: float = 21.3  # bytes of x a clock, and of weights
    weights: float = 156
    memory: float = 16.7  # bytes a clock
    stage: float = 1650  # clocks from asking for a stage to having it, of which all but one are under way
    slot: float = 1220  # the same of a slot of weights
    box: float = 970  # clocks of a box, or of a slice that is stored
    outputs: float = 1.34  # clocks of 32 results
    norm: float = 2.7
    # What writing takes longer where other blocks write the rest of 64 bytes, by the bytes of a number: of 12 problems.
    parts_of_atoms: Mapping[int, float] = MappingProxyType({4: 1.6, 2: 1.15})
    # Of 3xTF32: clocks of a chain besides its products, and bytes of x that a thread splits in a clock: of 1345 tiles'
    # times (14% rms).
    chain: float = 40
    split: float = 0.18
    positions: tuple[int, int] = (200, 400)  # for each multiprocessor, of a layer of many channels and of another one


BOXED = BoxedRates()
# By rank: extents that problems may have, along D, H, W. The leading axes of 1-D and 2-D hold a batch.
TYPICAL_EXTENTS: dict[int, tuple[Ints, ...]] = {
    1: ((64, 1, 256), (64, 1, 4100)),
    2: ((64, 16, 16), (64, 65, 65), (64, 128, 128)),
    3: ((33, 33, 33), (48, 48, 48), (66, 66, 66), (18, 36, 70)),
}
PACKS_ITSELF = 2  # as the kernel has it: a launch whose blocks pack the weights themselves
PACKS_A_THREAD = 4  # of a worker, who may do so: 16 channels of one tap each
FILL_BYTES = 2176  # of shared memory, from which planes that no tap reaches are filled
LONGER_RING = 6  # slots of weights, where there is room: so many hide how long they take from L2
# Shared memory that leaves the L1 cache 60 KB: with half of these, loads of rows took a sixth longer.
SHARED_BYTES_BESIDE_L1 = 195 * 1024
POSITIONS = 2000  # that a problem may have for each multiprocessor
POSITIONS_OF_WIDE_ROWS = 800  # likewise, with many channels, where x is in rows
WIDE = 128  # channels: networks have so many where extents are small, too
MAX_STEPS_OF_CHAIN = 16  # of a chain of longer chunks than others: the tensor core truncates each sum
MAX_CHAINS = 256  # of 3xTF32 that an output adds up: with more, their roundings count, and chains are longer instead
TYPICAL_EXTENTS_OF_WIDE = {**TYPICAL_EXTENTS, 3: ((8, 8, 8), *TYPICAL_EXTENTS[3][:3])}
# Where x is in rows: mostly of networks that pad, whose extents boxes of 33 positions do not suit.
EXTENTS_OF_ROWS = {**TYPICAL_EXTENTS, 3: ((20, 40, 40), (40, 40, 40), (112, 112, 112))}
EXTENTS_OF_WIDE_ROWS = {**TYPICAL_EXTENTS, 3: ((8, 8, 8), (32, 32, 32), (64, 64, 64))}
# Where copies bring x: of some sets, the one whose tiles were nearest to the best that were measured.
EXTENTS_OF_WIDE_BOXED: dict[int, tuple[Ints, ...]] = {
    1: TYPICAL_EXTENTS[1],
    2: ((64, 8, 8), (64, 33, 33), (8, 65, 65), (64, 65, 65)),
    3: ((8, 8, 8), (16, 16, 16), (33, 33, 33)),
}


@dataclass(frozen=True)
class Tile:
    """The compile-time shape of a block; the fields are the macros of the kernel."""

    workers: int  # warpgroups
    stagers: int
    tiles_m: int
    tiles_c: int
    merge_w: bool
    k_steps: int
    x_stages: int
    ring: int
    resident: bool
    take_turns: bool
    all_phases: bool
    min_blocks: int
    slides: bool = False
    half_k: bool = False
    merge_d: bool = False
    join_w: bool = False
    boxed: bool = False  # whether bulk tensor copies bring x

    @property
    def rows(self) -> int:
        """Positions of a box, those of no use included."""
        return ROWS * self.tiles_m * self.team

    @property
    def team(self) -> int:
        """Workers that share a box."""
        return 1 if self.take_turns else self.workers

    @property
    def threads(self) -> int:
        return 128 * (self.workers + self.stagers)


AnyTile = TypeVar("AnyTile", bound=Tile)


class Box(NamedTuple):
    """The run-time shape of a block: positions q along D, H, W, and how rows of A map to them.

    A tile that slides has one slice along D in shared memory, and the patches and the plane are those of a slice.
    """

    extent: tuple[int, int, int]
    patches: tuple[int, int]  # of 8 x 8 positions along H and W; zeros where 64 positions follow each other
    plane: int  # positions that are staged, or read without being of use (in units of `Work.unit`)
    items: int  # what stagers count: positions, or pairs of them in a row


class Boxes(NamedTuple):
    """Boxes for so many positions along D, H, W, each with how many of it these take."""

    extents: Ints
    used: int  # positions that are of use
    boxes: list[tuple[Box, int]]


def plan_phase_wgmma(
    geometry: Geometry, dtype: str, layout: Layout, precision: str | None, device: Device, tile: Tile | None = None
) -> Plan | Refusal:
    """Propose the tile with the least estimated time, or a given one, or say why wgmma does not serve."""
    if reason := _refuse(geometry, dtype, precision, device):
        return Refusal("phase_wgmma", reason)
    geometry, layout = batch_as_depth(geometry, layout)
    work = Work(geometry, dtype, precision, layout)
    if tile is not None:
        cost = work.with_pairs().typical_cost(tile, device)
        return plan_tile(geometry, dtype, layout, precision, device, tile, cost or 0.0)
    choice = choose_tile(work.with_pairs().shape, device)
    if choice is None:
        return Refusal("phase_wgmma", f"no box with its halo fits into {device.shared_bytes} bytes of shared memory")
    tile, cost = choice
    return plan_tile(geometry, dtype, layout, precision, device, tile, cost)


def candidates(geometry: Geometry, dtype: str, layout: Layout, precision: str | None, device: Device) -> Iterator[Plan]:
    """Yield a plan for every tile that fits, among them the one that is proposed."""
    if _refuse(geometry, dtype, precision, device):
        return
    geometry, layout = batch_as_depth(geometry, layout)
    work = Work(geometry, dtype, precision, layout)
    for tile in tiles(work):
        cost = work.with_pairs().typical_cost(tile, device)
        plan = plan_tile(geometry, dtype, layout, precision, device, tile, cost or 0.0)
        if cost is not None and isinstance(plan, Plan):
            yield plan


def plan_tile(
    geometry: Geometry, dtype: str, layout: Layout, precision: str | None, device: Device, tile: Tile, cost: float = 0.0
) -> Plan | Refusal:
    """Plan a problem with a given tile."""
    work = Work(geometry, dtype, precision, layout)
    if tile.boxed and not (work.shape.boxes and work.are_whole(tile)):
        return Refusal("phase_wgmma", "bulk tensor copies of this tile cannot bring x")
    every = all_positions(geometry)
    geometry, layout, planes = _reached_planes(geometry, layout)
    extents = tuple(-(-o // s) for o, s in zip(geometry.out_extent, geometry.stride, strict=True))
    tiles_c = -(-geometry.c_out_per_group // (8 * tile.tiles_c))
    if tile.slides:
        extents = (positions(geometry, 0), *extents[1:])
    if tile.join_w:
        extents = (*extents[:2], positions(geometry, 2))
    phases = 1 if tile.all_phases else geometry.stride[0] * geometry.stride[1]
    times = phases * tiles_c * geometry.groups * geometry.n
    box = work.box_of_launch(tile, extents, times, device, layout)
    if box is None:
        return Refusal("phase_wgmma", "no box of this tile fits into shared memory and reaches elements in 32 bits")
    held = device.multiprocessors * tile.min_blocks
    if tile.slides:
        columns = count_boxes(extents[1:], box.extent[1:]) * times
        box = work.cut_along_d(tile, box, extents[0], columns, held)
    tiles = tuple(-(-q // b) for q, b in zip(extents, box.extent, strict=True))
    blocks = prod(tiles) * times
    if blocks > MAX_BLOCKS:
        return Refusal("phase_wgmma", f"counts boxes in 31 bits, got {blocks}")
    if positions_reached(geometry, box.extent) >= INDEX_LIMIT:
        return Refusal("phase_wgmma", f"counts positions along an axis in 31 bits, got {geometry.out_extent}")
    own = {
        "ALL_PHASES": tile.all_phases,
        "SLIDES": tile.slides,
        "MERGE_D": tile.merge_d,
        "JOIN_W": tile.join_w,
        "PLANE_STEP": planes.step,
        "HALF_K": tile.half_k,
        "BOXED": tile.boxed,
        "OUT_RUN": work.shape.run if work.stores_runs(tile) else 1,
        "FAR_CHANNELS": work.chunk(tile) * abs(layout.x[1]) >= INDEX_LIMIT,
        "FIRST_PHASE_W": geometry.pad_before[2] % geometry.stride[2] if work.stores_runs(tile) else 0,
    }
    if not tile.boxed:
        own |= x_copy_macros(geometry, layout, work.shape.itemsize)
    defines = wgmma_defines(geometry, dtype, layout, precision, tile, own, registers_of(tile, work.parts))
    grid = grid_of(blocks, held, phases, geometry.groups * tiles_c if tile.resident else 1)
    around = AROUND_OF_SPLIT if work.parts == 2 else AROUND_OF_BOXED if dtype != "float32" and tile.boxed else AROUND
    # As the kernel decides, whose other phases keep their order.
    is_uneven = not tile.all_phases and any(geometry.kernel[axis] % geometry.stride[axis] for axis in range(2))
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
    packs_itself = blocks <= held and work.blocks_can_pack(tile, packed_words // packed_a_thread)
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
        ),
        cost=cost * every,
        packed_words=0 if packs_itself else geometry.groups * tiles_c * packed_words,
        packed_a_thread=packed_a_thread,
        maps=(work.map_of_x(tile, box, dtype, geometry, layout, (1, 1, 1), work.chunk(tile)),) if tile.boxed else (),
        tile=tile,
    )


def registers_of(tile: Tile, parts: int) -> tuple[int, int]:
    """Return the registers of a worker's and of a stager's thread, where x has so many parts."""
    return kinds_of_blocks(tile.boxed, parts)[tile.workers, tile.stagers, tile.min_blocks]


def kinds_of_blocks(boxed: bool, parts: int) -> dict[tuple[int, int, int], tuple[int, int]]:
    """Return the registers by warpgroups and blocks a multiprocessor, where copies bring x or not."""
    if not boxed:
        return REGISTERS
    return REGISTERS_OF_SPLIT if parts == 2 else REGISTERS_OF_BOXED


def can_be_boxed(geometry: Geometry, layout: Layout, itemsize: int, channels: int) -> bool:
    """Whether bulk tensor copies can bring x, so many channels of one group at a time.

    Those of another group would meet weights that are zeros.
    """
    g = geometry
    alone = g.groups == 1 or g.c_in_per_group % channels == 0
    extents = (g.n, g.c_in, *g.x_extent)
    reached = max(*extents, *(o * s for o, s in zip(g.out_extent, g.stride, strict=True)))
    is_counted = min(extents) > 0 and reached < MAX_REACHED
    # Of a single position no stride tells how far others would be.
    is_whole = max(g.n, *g.x_extent) > 1 or g.c_in * itemsize % STRIDE_BYTES == 0
    return (
        alone
        and is_counted
        and is_whole
        and layout.x_channels_last
        and reads(layout.x, extents, layout.x_aligned, itemsize)
    )


def wgmma_defines(
    geometry: Geometry,
    dtype: str,
    layout: Layout,
    precision: str | None,
    tile: Tile,
    own: Mapping[str, int],
    registers: tuple[int, int],
) -> tuple[tuple[str, int], ...]:
    """Return the macros of a kernel for Hopper: those that the kernels share, and its own ones."""
    itemsize = 4 if dtype == "float32" else 2
    return (
        ("DTYPE", DTYPE_CODES[dtype]),
        ("PRECISION", PRECISION_CODES[precision]),
        *axis_macros(KERNEL=geometry.kernel, STRIDE=geometry.stride, DILATION=geometry.dilation),
        ("WORKERS", tile.workers),
        ("STAGER_GROUPS", tile.stagers),
        ("TILES_M", tile.tiles_m),
        ("TILES_C", tile.tiles_c),
        ("MERGE_W", int(tile.merge_w)),
        ("K_STEPS", tile.k_steps),
        ("X_STAGES", tile.x_stages),
        ("RING", tile.ring),
        ("RESIDENT", int(tile.resident)),
        ("TAKE_TURNS", int(tile.take_turns)),
        *((name, int(value)) for name, value in own.items()),
        ("X_CHANNELS_LAST", int(layout.x_channels_last)),
        ("OUT_CHANNELS_LAST", int(layout.out_channels_last)),
        ("OUT_VECTOR", channels_stored(geometry, layout, itemsize)),
        ("MIN_BLOCKS", tile.min_blocks),
        ("WORKER_REGISTERS", registers[0]),
        ("STAGER_REGISTERS", registers[1]),
    )


def grid_of(blocks: int, resident: int, phases: int, weights: int) -> int:
    """Return how many blocks to launch, each of which takes one box after the other.

    Each should meet all phases in turn, since they differ in work, but always the same weights if they stay.
    """
    if blocks <= resident:
        return blocks
    times = max(1, resident // weights)
    return weights * next(grid for grid in range(times, 0, -1) if gcd(grid, phases) == 1)


def _refuse(geometry: Geometry, dtype: str, precision: str | None, device: Device) -> str | None:
    return (
        refuse_tensor_cores(dtype, precision, device, wgmma=True)
        or refuse_steps(geometry)
        or refuse_taps(geometry)
        or refuse_phases(geometry)
    )


class Planes(NamedTuple):
    """Which planes of a result along D taps reach: the first one and each one `step` further."""

    extent: int  # of all
    first: int
    step: int


def _reached_planes(geometry: Geometry, layout: Layout) -> tuple[Geometry, Layout, Planes]:
    """Leave out the planes along D that no tap reaches, for kernels that fill them by themselves.

    An output o has a tap k where o + pad = i * stride + k * dilation for some i, a multiple of their common divisor. Of
    these outputs alone, stride and dilation are as many times smaller. Results in rows, whose planes have no gaps.
    """
    g, all_of_them = geometry, Planes(geometry.out_extent[0], 0, 1)
    step = g.stride[0] if g.kernel[0] == 1 else gcd(g.stride[0], g.dilation[0])
    pad = -(-g.pad_before[0] // step)
    first = step * pad - g.pad_before[0]
    extent = -(-(g.out_extent[0] - first) // step)
    dense = layout.out[4] == 1 and layout.out[3] == g.out_extent[2]
    if step == 1 or extent < 1 or not dense or layout.out_channels_last:
        return geometry, layout, all_of_them
    reached = dataclasses.replace(
        g,
        stride=(g.stride[0] // step, *g.stride[1:]),
        dilation=(1 if g.kernel[0] == 1 else g.dilation[0] // step, *g.dilation[1:]),
        pad_before=(pad, *g.pad_before[1:]),
        out_extent=(extent, *g.out_extent[1:]),
    )
    out = (*layout.out[:2], step * layout.out[2], *layout.out[3:])
    return reached, dataclasses.replace(layout, out=out), Planes(g.out_extent[0], first, step)


def _run(geometry: Geometry, layout: Layout, itemsize: int) -> int:
    """Return how many outputs along W of a position, which follow each other, may be written at a time.

    Contiguous results whose extents differ by whole strides agree in it.
    """
    run = gcd(geometry.stride[2], 16 // itemsize) if layout.out_aligned and layout.out[4] == 1 else 1
    while geometry.out_extent[2] % run or not others_divisible(layout.out, 4, run):
        run //= 2
    return run


@dataclass(frozen=True)
class Shape:
    """What a tile's choice depends on: everything but N and extents."""

    rank: int
    kernel: Ints
    stride: Ints
    dilation: Ints
    c_in: int  # per group
    c_out: int
    itemsize: int
    products: int
    x_channels_last: bool
    out_channels_last: bool
    pairs: bool  # whether x is read two positions at a time
    late: Ints  # whether the first outputs of some phase belong to a position one further than those of another
    run: int = 1  # outputs along W of a position that may be written at a time
    plane_step: int = 1  # planes of the result for one that taps reach, of which the others are filled
    boxes: bool = False  # whether bulk tensor copies can bring x
    fold: int = 1  # taps along W that are channels of x
    joined: int = 1  # groups that are staged as one
    whole_chunks: bool = False  # whether boxes may have no channels beyond the last one, which are another group's


class Work:
    """The sizes that follow from a problem and a tile; the kernel computes the same ones."""

    extents, extents_of_wide = TYPICAL_EXTENTS, TYPICAL_EXTENTS_OF_WIDE
    extents_of_rows, extents_of_wide_rows = EXTENTS_OF_ROWS, EXTENTS_OF_WIDE_ROWS
    extents_of_wide_boxed = EXTENTS_OF_WIDE_BOXED

    def __init__(self, geometry: Geometry, dtype: str, precision: str | None, layout: Layout):
        itemsize = 4 if dtype == "float32" else 2
        run = 1 if layout.out_channels_last else _run(geometry, layout, itemsize)
        g, layout, planes = _reached_planes(geometry, layout)
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
            dtype != "float32" and not layout.x_channels_last and x_is_vector(g, layout, 2),
            tuple(int(p % st != 0) for p, st in zip(g.pad_before, g.stride, strict=True)),
            run,
            planes.step,
            boxes=can_be_boxed(g, layout, itemsize, STEP_BYTES // itemsize),
            whole_chunks=g.groups > 1,
        )
        self._derive()

    @classmethod
    def of(cls, shape: Shape) -> Work:
        work = cls.__new__(cls)
        work.shape = shape
        work._derive()
        return work

    def _derive(self) -> None:
        s = self.shape
        self.tile: Tile | None = None  # the last one whose sizes were asked for, and these: see `of_tile`
        self.sizes: dict[Any, Any] = {}
        self.known_boxes: dict[Ints, list[Boxes]] = {}
        gcds = [gcd(stride, dilation) for stride, dilation in zip(s.stride, s.dilation, strict=True)]
        self.steps = [stride // g for stride, g in zip(s.stride, gcds, strict=True)]
        hops = [dilation // g for dilation, g in zip(s.dilation, gcds, strict=True)]
        taps = [-(-k // step) for k, step in zip(s.kernel, self.steps, strict=True)]  # of a phase, at most
        of_all = [
            (k - 1) * d // st + late for k, d, st, late in zip(s.kernel, s.dilation, s.stride, s.late, strict=True)
        ]
        self.reach_of_all = tuple(of_all)
        self.reach_of_one = ((taps[0] - 1) * hops[0], (taps[1] - 1) * hops[1], of_all[2])
        self.live = [min(k, step) for k, step in zip(s.kernel, self.steps, strict=True)]  # phases that have a tap
        self.parts = 2 if s.products == 3 else 1
        self.unit = 1  # that a box's plane counts for a position
        self.wide = max(s.c_in, s.c_out) >= WIDE
        self.compared = COMPARED
        if s.itemsize == 2:
            self.compared = COMPARED_OF_16_BITS
        elif not s.x_channels_last:
            self.compared = COMPARED_OF_ROWS
        elif s.products == 1:
            self.compared = COMPARED_OF_TF32_LAST
        if s.boxes:
            is_turned = max(s.stride) == 1 and s.c_out >= FEWEST_TURNED
            self.compared = COMPARED_OF_UNSTRIDED if is_turned else COMPARED_OF_BOXED
            if s.products == 3:
                self.compared = COMPARED_OF_SPLIT_GROUPS if s.whole_chunks else COMPARED_OF_SPLIT

    def with_pairs(self) -> Work:
        """Return the same with rows read in pairs, as most can be: it depends on extents, which a choice must not."""
        pairs = self.shape.itemsize == 2 and not self.shape.x_channels_last
        return Work.of(dataclasses.replace(self.shape, pairs=pairs))

    def reach(self, tile: Tile) -> Ints:
        """Return how much wider the staged box is than the box of positions."""
        reach = self.reach_of_all if tile.all_phases else self.reach_of_one
        along_w = reach[2] - self.shape.late[2] if tile.join_w else reach[2]  # no phase is late
        return (0 if tile.slides else reach[0], reach[1], along_w)

    def width(self, tile: Tile, positions: int) -> int:
        """Return the positions of a row of the staged box, for so many along W."""
        return positions + self.reach(tile)[2]

    def stores_runs(self, tile: Tile) -> bool:
        """Whether a thread stores the outputs along W of its positions as they are: it holds their whole sums."""
        return self.shape.run > 1 and not (tile.merge_w and self.reach_of_all[2])

    def taps_w(self, tile: Tile) -> int:
        """Return the wgmmas that a row of taps along W needs."""
        s = self.shape
        return 1 if tile.merge_w else s.kernel[2] // s.stride[2] if tile.join_w else s.kernel[2]

    def sets_w(self, tile: Tile) -> int:
        """Return the sets of accumulators of a row of taps along W, and so the chains of 3xTF32."""
        return 1 if tile.merge_w or tile.join_w else self.live[2]

    def slots_of_chunk(self, tile: Tile) -> int:
        """Return the slots of weights for all taps along D and H."""
        return (1 if tile.merge_d else self.shape.kernel[0]) * self.shape.kernel[1]

    def blocks_can_pack(self, tile: Tile, packs: int) -> bool:
        """Whether a block may pack the weights that it needs itself, all of a tile, which saves a launch."""
        needs_all = tile.all_phases or tile.slides or self.shape.stride[0] * self.shape.stride[1] == 1
        return tile.resident and needs_all and packs <= PACKS_A_THREAD * 128 * tile.workers

    def turns(self, tile: Tile) -> bool:
        """Whether results are turned in shared memory."""
        return not self.shape.out_channels_last and not self.stores_runs(tile)

    def depth(self, tile: Tile, box: Box) -> int:
        """Return the slices along D of a box that are staged and multiplied one after the other."""
        return box.extent[0] + (self.shape.kernel[0] - 1) // self.shape.stride[0] if tile.slides else 1

    def sums(self, tile: Tile) -> int:
        """Return the phases or taps whose sums a block stores at a time."""
        along_w = self.shape.kernel[2] if tile.merge_w else self.live[2]
        return along_w * (self.live[0] * self.live[1] if tile.all_phases else 1)

    def held(self, tile: Tile) -> int:
        """Return the same of those that it holds."""
        if not tile.slides:
            return self.sums(tile)
        return self.sums(tile) // (self.live[0] if tile.all_phases else 1) * self.shape.kernel[0]

    def rows(self, tile: Tile) -> float:
        """Return the rows of taps along D and H that a block multiplies, on average; of a slice if it slides."""
        s = self.shape
        return self.slots_of_chunk(tile) / (1 if tile.all_phases else s.stride[0] * s.stride[1])

    def chains(self, tile: Tile) -> int:
        """Return how many sums of a slot's products an output adds up."""
        rows = [-(-k // step) for k, step in zip(self.shape.kernel[:2], self.steps[:2], strict=True)]
        return prod(rows) * -(-self.shape.c_in // self.chunk(tile))

    def steps_of_chain(self, tile: Tile) -> int:
        """Return how many pairs of pieces a chain of 3xTF32 multiplies, each three times."""
        return -(-self.taps_w(tile) // self.sets_w(tile)) * tile.k_steps

    def unrolled(self, tile: Tile) -> int:
        """Return the wgmmas of a chunk, for all taps."""
        return self.slots_of_chunk(tile) * self.taps_w(tile) * tile.tiles_m * tile.k_steps * self.shape.products

    def outputs(self, tile: Tile) -> int:
        """Return the outputs of a position that a block's workers store, of one channel."""
        s = self.shape
        return s.stride[2] * (s.stride[0] * s.stride[1] if tile.all_phases else 1)

    def columns(self, tile: Tile) -> int:
        """Columns of a wgmma."""
        s = self.shape
        along_w = s.kernel[2] if tile.merge_w else s.stride[2] if tile.join_w else 1
        return 8 * tile.tiles_c * along_w * (s.kernel[0] if tile.merge_d else 1)

    def chunk(self, tile: Tile) -> int:
        """Input channels staged at a time."""
        return self.pieces(tile) * (16 // self.shape.itemsize)

    def are_whole(self, tile: Tile) -> bool:
        """Whether all chunks have channels of one group alone."""
        return not self.shape.whole_chunks or self.shape.c_in % self.chunk(tile) == 0

    def pieces(self, tile: Tile) -> int:
        """16-byte pieces of channels that are staged at a time."""
        return 1 if tile.half_k else 2 * tile.k_steps

    def packed_pieces(self, pieces: int) -> int:
        """Return how many of a chunk's pieces of weights a thread packs."""
        return min(pieces, PACKED_CHANNELS * self.shape.itemsize // 16)

    def accumulators(self, tile: Tile) -> int:
        """Registers of a worker that hold sums."""
        chains = self.columns(tile) if self.shape.products == 3 else 0
        return self.held(tile) * tile.tiles_m * 4 * tile.tiles_c + chains

    def other_registers(self, tile: Tile) -> int:
        """Estimate how many registers a worker needs besides: a little more than the compiler was seen to need."""
        s, outputs, three = self.shape, self.outputs(tile), self.shape.products == 3
        row = tile.tiles_m * tile.k_steps * self.taps_w(tile)  # descriptors for a row of taps
        if s.out_channels_last and tile.tiles_m <= 4 and not three:
            count = 44
        elif s.out_channels_last and tile.all_phases and tile.resident:  # unrolled rows keep many descriptors
            count = 40 + self.unrolled(tile) // 16 + (16 if tile.slides else 0)
        elif s.out_channels_last:
            count = 45 + 6 * tile.tiles_m + 2 * outputs + tile.tiles_m**2 * (outputs - 1) // 2 + row // 10
            count += 18 if s.stride[2] >= 8 and not three else 0
            if tile.all_phases:  # likewise
                count += 12 * tile.k_steps + (66 if three else 0)
            elif three:
                count += 16 + 3 * row // 8
        else:
            if tile.merge_w:
                count = 38
                if three:
                    count += 6 * max(tile.tiles_m - 2, 0)
                if self.turns(tile):
                    count += 2 * outputs if three else self.targets(tile)
            else:
                count = (34 if tile.slides else 36) + row // 2 + max(row - 32, 0)
                if three:
                    count += 14 + 3 * row // 4 + min(outputs, 3) * min(tile.tiles_m, 4)
                if three and tile.slides and tile.k_steps > 2:
                    count += 3 * row // 2
            if tile.all_phases:
                count += self.unrolled(tile) // 8
                if not tile.resident:  # each row waits for its weights
                    count += 50 if three else (20 if tile.slides else 10) + max(self.unrolled(tile) - 160, 0) // 2
            if self.stores_runs(tile):  # where rows of all tiles go
                count += tile.tiles_m + 3 * max(tile.tiles_m - 4, 0)
        return count + (4 if tile.min_blocks > 2 else 0)

    def at_start(self, tile: Tile) -> int:
        """Return the registers of a thread before warps exchange some."""
        return ALL_REGISTERS // (tile.threads * tile.min_blocks) // 8 * 8

    def targets(self, tile: Tile) -> int:
        """Return the positions of the result that a worker's thread stores."""
        return -(-tile.rows * self.outputs(tile) // (128 * tile.team))

    def slot_bytes(self, tile: Tile) -> int:
        """Weights of the taps along W, for one tap along D and H and a chunk."""
        return self.taps_w(tile) * tile.k_steps * self.parts * 2 * self.columns(tile) * 16

    def shared_bytes(self, tile: Tile, box: Box, index64: bool) -> int:
        beside, targets, of_position = self.bytes_beside_box(tile)
        indices = box.items * (16 if index64 else 8) + round_up(targets * (24 if index64 else 20), 8)
        return beside + of_position * box.plane + indices

    @of_tile
    def bytes_beside_box(self, tile: Tile) -> tuple[int, int, int]:
        """Return the shared memory beside a box and indices, how many places are stored to, and a position's bytes."""
        teams = tile.workers // tile.team
        landed = teams * tile.x_stages if tile.boxed and self.parts == 2 else 0
        barriers = round_up(8 * (2 * (teams * tile.x_stages + tile.ring) + landed), 128)
        of_position = teams * tile.x_stages * self.parts * tile.k_steps * 2 * 16
        turned, targets = 4 * 8 * tile.tiles_c, 0
        if self.turns(tile):
            sums = self.sums(tile)
            zero = sums * (tile.rows if sums == 1 else at_residue(tile.rows, 16, 32))
            slices = 1 if tile.tiles_c == 1 else 2
            turned += slices * 8 * 4 * at_residue(zero + 1, 4, 32)
            targets = round_up(tile.rows * self.outputs(tile), 128 * tile.team)
        turned *= teams
        before = barriers + (FILL_BYTES if self.shape.plane_step > 1 else 0) + tile.ring * self.slot_bytes(tile)
        return (round_up(before, SWIZZLED) if tile.boxed else before) + turned, targets, of_position

    def fits(self, tile: Tile, box: Box, device: Device) -> bool:
        """Whether as many blocks as the tile wants share a multiprocessor; each reserves 1 KB on top of its own.

        With what indices of 64 bits would take, though there are none: estimates were fitted to boxes that leave so
        much room, and those that need it were up to 30% slower than estimated.
        """
        room = (device.shared_bytes + 1024) // tile.min_blocks - 1024
        (d, h, w), (of_d, of_h, of_w) = box.extent, self.shape.stride
        far = max((1 if tile.slides else d) * of_d, h * of_h, w * of_w)
        if tile.boxed and max(self.staged(tile, box.extent)) > MAX_BOX:
            return False
        return box.plane <= MAX_POSITIONS and far <= MAX_OUTPUTS and self.shared_bytes(tile, box, True) <= room

    def boxes(self, tile: Tile, extents: Ints, rows: int = 0) -> Iterator[Box]:
        """Yield boxes that suit a tile, or so many of its rows, for so many positions along D, H, W."""
        rows = rows or tile.rows
        _, reach_h, reach_w = self.reach(tile)
        extra = reach_w if tile.merge_w else 0
        depths = [1] if tile.slides else _few(extents[0])
        for w in _widths(extents[2], rows - extra):
            pitch = self.width(tile, w)
            for d in depths:
                most = ((rows - w - extra) // pitch + 1 - (d - 1) * reach_h) // d
                if most < 1:
                    break
                h = even_extent(extents[1], most)
                held = ((d - 1) * (h + reach_h) + h - 1) * pitch + w + extra
                whole = (extents[0], h, w) if tile.slides else (d, h, w)
                yield self._box(tile, whole, (0, 0), round_up(held, ROWS) - 1 - extra)
        if tile.merge_w:
            return
        count = rows // ROWS
        for across in range(1, min(count, -(-extents[2] // 8)) + 1):
            for down in range(1, min(count // across, -(-extents[1] // 8)) + 1):
                d = 1 if tile.slides else even_extent(extents[0], count // (across * down))
                h, w = 8 * down, 8 * across
                pitch = self.width(tile, w)
                last = ((d - 1) * (h + reach_h) + h - 1) * pitch + w - 1
                yield self._box(tile, (extents[0] if tile.slides else d, h, w), (down, across), last)

    def _box(self, tile: Tile, extent: tuple[int, int, int], patches: tuple[int, int], last_row: int) -> Box:
        """Add the number of positions: all of the box with its halo, and up to what the last row's last tap reads."""
        reach = self.reach(tile)
        d = 1 if tile.slides else extent[0] + reach[0]
        h, w = extent[1] + reach[1], self.width(tile, extent[2])
        reads = last_row + (reach[0] * h + reach[1]) * w + reach[2] + 1
        plane = self.plane(tile, max(d * h * w, reads))
        return Box(extent, patches, plane, self.items(tile, d, h, w))

    def staged(self, tile: Tile, extent: Ints) -> Ints:
        """Return the extents of a box of such positions with its halo, or of a slice of it."""
        (d, h, w), reach = extent, self.reach(tile)
        return (1 if tile.slides else d + reach[0], h + reach[1], self.width(tile, w))

    def map_of_x(
        self, tile: Tile, box: Box, dtype: str, geometry: Geometry, layout: Layout, steps: Ints, channels: int
    ) -> TensorMap:
        """Return what copies need to know of x, to bring so many channels of positions that are `steps` apart."""
        extents = (geometry.n, geometry.c_in, *geometry.x_extent)
        kind = "tf32" if dtype == "float32" and self.parts == 1 else dtype  # copies round, but not what is split
        return TensorMap.of(kind, extents, layout.x, self.staged(tile, box.extent), steps, channels)

    def items(self, tile: Tile, d: int, h: int, w: int) -> int:
        """Return what stagers count of so many positions."""
        return 0 if tile.boxed else d * h * (w // 2 + 1 if self.shape.pairs else w)

    def plane(self, tile: Tile, positions: int) -> int:
        """Return how many places a plane of so many positions has: neighbouring pieces of one lie in other banks."""
        return round_up(positions, 8) if tile.boxed else at_residue(positions, 8 // min(8, 2 * tile.k_steps) % 8, 8)

    def cut_along_d(self, tile: Tile, box: Box, extent: int, columns: int, resident: int) -> Box:
        """Return the box with the extent along D that keeps so many blocks busy with few slices read twice."""
        cuts = {even_extent(extent, -(-extent // parts)) for parts in range(1, min(extent, 64) + 1)}

        def slices_of_the_busiest(d: int) -> int:
            return -(-columns * -(-extent // d) // resident) * self.depth(tile, box._replace(extent=(d, 1, 1)))

        d = min(sorted(cuts, reverse=True), key=slices_of_the_busiest)
        return box._replace(extent=(d, *box.extent[1:]))

    def reaches(self, tile: Tile, box: Box, layout: Layout) -> int:
        """Return how many elements what a box reads or writes of a channel may be away from where the box begins.

        Or two neighbouring channels from each other, if these are further apart.
        """
        s = self.shape
        extent = (1, *box.extent[1:]) if tile.slides else box.extent
        read = tuple(e + reach for e, reach in zip(extent, self.reach(tile), strict=True))
        written = tuple((e + late) * st for e, late, st in zip(extent, s.late, s.stride, strict=True))
        return max(span(read, layout.x[2:]), span(written, layout.out[2:]), abs(layout.x[1]), abs(layout.out[1]))

    def best_box(self, tile: Tile, extents: Ints, device: Device, boxes: Iterable[Box] | None = None) -> Box | None:
        """Return the box, of all or of these, with the least time for so many positions."""
        boxes = self.boxes(tile, extents) if boxes is None else boxes
        fitting = (box for box in boxes if self.fits(tile, box, device))
        return min(fitting, key=lambda box: self.clocks(tile, box) * count_boxes(extents, box.extent), default=None)

    def box_of_launch(
        self, tile: Tile, extents: Ints, times: int, device: Device, layout: Layout | None = None
    ) -> Box | None:
        """Return the box with the least time for a launch that takes all positions so many times.

        With a layout, it reaches elements in 32 bits. Where the launch would not keep the device busy, some rows of the
        tile may be left empty, so that more blocks share the positions.
        """

        def near(box: Box) -> bool:
            return layout is None or self.reaches(tile, box, layout) < INDEX_LIMIT

        held = device.multiprocessors * tile.min_blocks * tile.workers // tile.team
        best = self.best_box(tile, extents, device, filter(near, self.boxes(tile, extents)))
        if best is None or tile.slides or times * count_boxes(extents, best.extent) >= held:
            return best
        boxes = (box for rows in range(ROWS, tile.rows + 1, ROWS) for box in self.boxes(tile, extents, rows))
        fitting = (box for box in boxes if self.fits(tile, box, device) and near(box))
        return min(
            fitting, key=lambda box: self.clocks(tile, box) * max(held, times * count_boxes(extents, box.extent))
        )

    def box_parameters(self, tile: Tile, box: Box, blocks: int) -> Ints:
        """Return the part of ``struct Problem`` that describes a box."""
        _, h, w = box.extent
        reach, stride = self.reach(tile), self.shape.stride
        width, lines = w + reach[2], h * stride[1] if tile.all_phases else h
        # In the order in which the kernel divides: items by rows, rows by slices; then what it stores.
        divisors = (width // 2 + 1 if self.shape.pairs else width, h + reach[1], w * stride[2], lines)
        if not self.turns(tile):
            divisors = (*divisors[:2], width, 1)
        return (*box.extent, box.plane, *box.patches, blocks, *(magic(divisor) for divisor in divisors))

    def cost(self, tile: Tile, box: Box) -> float:
        """Return the clocks of a box of positions, with all phases and all channels of a group."""
        s = self.shape
        phases = 1 if tile.all_phases else s.stride[0] * s.stride[1]
        boxes = phases * -(-s.c_out // (8 * tile.tiles_c))
        # In the last of so many rounds of boxes, half of the multiprocessors have nothing to do.
        positions = POSITIONS_OF_WIDE_ROWS if self.wide and not s.x_channels_last else POSITIONS
        if tile.boxed:
            positions = BOXED.positions[0 if self.wide else 1]
        rounds = positions * boxes / (tile.rows * tile.min_blocks * tile.workers // tile.team)
        return self.clocks(tile, box) * boxes * (1 + 0.5 / rounds)

    def typical_cost(self, tile: Tile, device: Device) -> float | None:
        """Return the clocks of a position, as the geometric mean over typical extents, or None where no box fits."""
        typical = self.fitting_boxes(tile, device)
        return None if typical is None else self.cost_of_best(tile, typical)

    def fitting_boxes(self, tile: Tile, device: Device) -> list[Boxes] | None:
        """Return the boxes of a tile that fit, for each of the typical extents, or None where none does."""
        fitting = []
        for of in self.typical_boxes(tile):
            fitting.append(of._replace(boxes=[pair for pair in of.boxes if self.fits(tile, pair[0], device)]))
            if not fitting[-1].boxes:
                return None
        return fitting

    def typical_boxes(self, tile: Tile) -> list[Boxes]:
        """Return the boxes of a tile for each of the typical extents; tiles of one kind share them."""
        kind = self.kind_of_boxes(tile)
        if kind not in self.known_boxes:
            if self.shape.boxes and self.wide:
                typical = self.extents_of_wide_boxed[self.shape.rank]
            elif self.shape.x_channels_last:
                typical = (self.extents_of_wide if self.wide else self.extents)[self.shape.rank]
            else:
                typical = (self.extents_of_wide_rows if self.wide else self.extents_of_rows)[self.shape.rank]
            # With padding, the first and the last position have some of the outputs where no phase is late.
            more = self.shape.late[2] if tile.join_w else 0
            self.known_boxes[kind] = []
            for d, h, w in typical:
                held = (d, h, w + more)
                boxes = [(box, count_boxes(held, box.extent)) for box in self.boxes(tile, held)]
                self.known_boxes[kind].append(Boxes(held, d * h * w, boxes))
        return self.known_boxes[kind]

    def kind_of_boxes(self, tile: Tile) -> Ints:
        """Return what of a tile its boxes depend on."""
        kind = (tile.rows, tile.merge_w, tile.all_phases, tile.slides, tile.join_w, self.plane(tile, 1), tile.boxed)
        return tuple(map(int, kind))

    def cost_of_best(self, tile: Tile, typical: list[Boxes]) -> float:
        """Return the geometric mean of the clocks of a position, with the best of the boxes for each extents."""
        logarithms = 0.0
        for of in typical:
            boxes = self.few_enough(tile, of) if len(of.boxes) > 1 else of.boxes
            box, count = min(boxes, key=lambda pair: self.clocks(tile, pair[0]) * pair[1])
            logarithms += log(self.compared * self.cost(tile, box) * count / of.used)
        return exp(logarithms / len(typical))

    def few_enough(self, tile: Tile, of: Boxes) -> list[tuple[Box, int]]:
        """Leave out boxes of which there are so many that they take longer than another one whatever is in them."""
        ideal, _ = self.ideal_box(tile, of._replace(boxes=[(box, 1) for box, _ in of.boxes]))
        box, count = min(of.boxes, key=lambda pair: pair[1])
        most = self.clocks(tile, box) * count * (1 + ROUNDINGS) / self.clocks(tile, ideal)
        return [pair for pair in of.boxes if pair[1] <= most]

    def ideal_cost(self, tile: Tile, device: Device) -> float | None:
        """Return a lower bound of the same: with boxes that are as good as the best in each respect."""
        typical = self.fitting_boxes(tile, device)
        if typical is None:
            return None
        return self.cost_of_best(tile, [of._replace(boxes=[self.ideal_box(tile, of)]) for of in typical])

    def ideal_box(self, tile: Tile, of: Boxes) -> tuple[Box, int]:
        """Return a box that none of these takes less time than, and how many of it there are.

        There are as few as of any, with longer rows than any, and all together have as few positions as any, and as few
        that are staged.
        """
        fewest = min(count for _, count in of.boxes)
        depth = of.extents[0] if tile.slides else 1
        positions = min(count * prod(box.extent) for box, count in of.boxes) // fewest // depth
        width = self.width(tile, max(box.extent[2] for box, _ in of.boxes))
        lines = positions // width
        plane = min(count * box.plane for box, count in of.boxes) // fewest
        extent = (depth, lines, positions // lines if lines else width)
        return Box(extent, (0, 0), plane, min(box.items for box, _ in of.boxes)), fewest

    def least_cost(self, tile: Tile) -> float:
        """Return a lower bound of a position's clocks: all rows of the tile are of use, in one row with the least halo.

        For k extents a_i with a product of at least P, the product of all a_i + r_i is at least that of k times the sum
        of the k-th roots of P and of the product of all r_i (Hoelder's inequality).
        """
        depth = 1000 if tile.slides else 1
        wider = [reach for reach in self.reach(tile) if reach]
        k = max(1, len(wider))
        plane = int((tile.rows ** (1 / k) + prod(wider) ** (1 / k)) ** k) if wider else tile.rows
        box = Box((depth, 1, tile.rows), (0, 0), plane * self.unit, plane // 2 if self.shape.pairs else plane)
        return self.compared * self.cost(tile, box) / (depth * tile.rows)

    def rounds(self, tile: Tile, box: Box) -> int:
        """Return how often stagers wait for a batch of loads of rows, to stage all channels of a box or slice once."""
        chunk, stagers = self.chunk(tile), 128 * tile.stagers - 32
        units = box.items * chunk // 8  # of eight loads
        whole, rest = divmod(self.shape.c_in, chunk)
        batch = 4 - (2 if tile.slides else tile.k_steps)  # of a chunk that is whole
        return whole * -(-units // (batch * stagers)) + (-(-units // stagers) if rest else 0)

    def clocks(self, tile: Tile, box: Box) -> float:
        """Estimate a multiprocessor's clocks for one box, averaged over the phases along D and H."""
        if tile.boxed:
            return self.clocks_of_boxed(tile, box)
        s = self.shape
        chunks = -(-s.c_in // self.chunk(tile)) * self.depth(tile, box)
        rows, columns = self.rows(tile), self.columns(tile)
        products = chunks * rows * tile.tiles_m * tile.team * self.taps_w(tile) * tile.k_steps * s.products
        staged = chunks * box.plane * self.pieces(tile) * 16  # bytes of x, as it comes
        weights = 0 if tile.resident else chunks * rows * self.slot_bytes(tile)
        outputs = prod(box.extent) * self.outputs(tile) * min(8 * tile.tiles_c, s.c_out)
        # A warp loads a channel of 32 positions, or of 64 where 16 bits are read in pairs, whatever lines they are in.
        width = box.extent[2] + self.reach(tile)[2]
        loads = staged / s.itemsize / 32 * (0.5 + 0.5 * s.itemsize / 4 if s.pairs else 1)
        if s.x_channels_last:
            loads = staged / 128
        stores = outputs / 32 * (1 + 32 / (box.extent[2] * s.stride[2]))
        if s.out_channels_last:
            stores = outputs / 32 * s.itemsize / 8
        elif self.stores_runs(tile):  # of four channels at a time
            stores = outputs / 32 / s.run * 4
        stored, turned = box.extent[0] if tile.slides else 1, 0.0
        if self.turns(tile):
            turned = stored * tile.rows * self.sums(tile) * 8 * tile.tiles_c / 32
            turned += outputs / 32 * (max(1, s.kernel[2] / s.stride[2]) if tile.merge_w else 1)
        # A wgmma reads A and B from shared memory, which also serves every other access of the block.
        shared = products * (16 + columns / 4) + (staged * self.parts + weights) / SHARED_BYTES_A_CLOCK
        shared += loads + stores + turned
        tensor = products * columns / 2
        # Of rows, whole sectors are read.
        l2 = (staged * (1 if s.x_channels_last else 1 + SECTOR / s.itemsize / width) + weights) / L2_BYTES_A_CLOCK
        # A row starts and ends within sectors, which others write, too.
        if s.out_channels_last:
            ragged = max(1, SECTOR / (s.itemsize * min(8 * tile.tiles_c, s.c_out)))
        else:
            ragged = 1 + ROW_ENDS / (box.extent[2] * s.stride[2])
        memory = outputs * s.plane_step * s.itemsize * ragged / MEMORY_BYTES_A_CLOCK
        staging = staged / 16 * COPY_INSTRUCTIONS if s.x_channels_last else staged / s.itemsize * 5
        issue = (staging + outputs * 8) / 32 / INSTRUCTIONS_A_CLOCK
        batches = 0.0
        if not s.x_channels_last:
            batches = self.depth(tile, box) * self.rounds(tile, box) * BATCH_CLOCKS / tile.min_blocks
        busiest = max(shared, tensor, l2, memory, issue, batches)
        others = shared + tensor + l2 + memory + issue + batches - busiest
        a_box, a_chunk = BOX_CLOCKS, CHUNK_CLOCKS
        if tile.slides:  # stagers wait for a slice's positions, however many of them a thread has
            a_box, a_chunk = SLICE_CLOCKS, SLICE_CHUNK_CLOCKS * tile.tiles_m
        if s.x_channels_last:
            a_chunk = COPIED_SLICE_CHUNK_CLOCKS if tile.slides else COPIED_CHUNK_CLOCKS
        if self.stores_runs(tile) and tile.min_blocks == 1 and not tile.slides:
            a_box = RUN_CLOCKS
        if tile.merge_w and tile.k_steps == 1 and s.products == 1 and not tile.slides:  # wide rows of short chunks
            a_chunk *= 2
        if tile.slides and tile.min_blocks > 1:  # one block stores while another multiplies
            a_box //= 2
        deep = DEEP if s.x_channels_last or s.products == 3 else DEEP_OF_ROWS
        waits = chunks * a_chunk * (1 if tile.x_stages == 2 else deep) + stored * a_box
        clocks = busiest + OVERLAP * others + waits / (tile.min_blocks * tile.workers // tile.team)
        slots = 0 if tile.resident or s.x_channels_last else chunks * rows
        return max(clocks, slots * SLOT_CLOCKS / tile.min_blocks)

    def clocks_of_boxed(self, tile: Tile, box: Box) -> float:
        """Estimate the same where copies bring x. What bounds a box adds to each other as in a norm."""
        s, r, at_once = self.shape, BOXED, tile.min_blocks * tile.workers // tile.team
        chunks = -(-s.c_in // self.chunk(tile)) * self.depth(tile, box)
        rows, tiles_c = self.rows(tile), -(-s.c_out // (8 * tile.tiles_c))
        slots = chunks * rows * tile.tiles_m * tile.team  # of each worker's tile
        products = slots * self.taps_w(tile) * tile.k_steps * s.products
        multiplied = products * (r.product + r.column * self.columns(tile))
        staged = chunks * box.plane * self.pieces(tile) * 16  # bytes of x, as it comes
        split = 0.0  # clocks of a block's threads
        if self.parts == 2:
            multiplied += slots * self.sets_w(tile) * r.chain
            split = staged / (r.split * (128 * tile.stagers - 64))
        positions = prod(box.extent)
        outputs = positions * self.outputs(tile) * min(8 * tile.tiles_c, s.c_out)
        is_part = 8 * tile.tiles_c * s.itemsize < ATOM <= s.c_out * s.itemsize
        phases = 1 if tile.all_phases else s.stride[0] * s.stride[1]
        read = positions * s.c_in / tiles_c / phases
        weights = 0 if tile.resident else chunks * rows * self.slot_bytes(tile)
        bounds = (
            multiplied,
            staged / r.copied + weights / r.weights,
            split / tile.min_blocks,
            (read + outputs * s.plane_step * (r.parts_of_atoms[s.itemsize] if is_part else 1)) * s.itemsize / r.memory,
            (chunks * r.stage + split) / (tile.x_stages - 1) / at_once,
            0 if tile.resident else chunks * rows * r.slot / (tile.ring - 1) / tile.min_blocks,
        )
        norm: float = sum(bound**r.norm for bound in bounds) ** (1 / r.norm)
        stored = box.extent[0] if tile.slides else 1
        return norm + (r.outputs * outputs / 32 + r.box * stored) / at_once


@functools.lru_cache(maxsize=1024)
def _few(extent: int) -> list[int]:
    """Return some ways to cut an axis: box extents that leave little of the last box empty."""
    return sorted({even_extent(extent, most) for most in (1, 2, 3, 4, 6, 8, 12, 16)})


@functools.lru_cache(maxsize=1024)
def _widths(extent: int, most: int) -> list[int]:
    """Return box extents along W, the widest first: rows should be long, but many rows make a compact box."""
    widths = [even_extent(extent, min(most, width)) for width in (extent, 128, 96, 64, 48, 33, 24, 16, 12, 8)]
    return list(dict.fromkeys(width for width in widths if width > 0))


@remembered(Tile)
def choose_tile(shape: Shape, device: Device) -> tuple[Tile, float] | None:
    """Return the best tile for typical extents, with its clocks a position (all phases, all channels of a group)."""
    work = Work.of(shape)
    return best_tile(work, ((work.least_cost(tile), tile) for tile in tiles(work)), device)


def best_tile(work: Work, bounded: Iterable[tuple[float, AnyTile]], device: Device) -> tuple[AnyTile, float] | None:
    """Return the tile with the least cost for typical extents, with that, or None if no box of any fits.

    Each tile comes with its lower bound.
    """
    best = cheapest_tile(
        bounded,
        lambda tile: work.ideal_cost(tile, device),
        lambda tile: work.typical_cost(tile, device),
    )
    return best and (with_longer_ring(work, *best, device), best[1])


def with_longer_ring(work: Work, tile: AnyTile, cost: float, device: Device) -> AnyTile:
    """Return the tile with more slots for weights, where they take nothing from its boxes, nor from rows of x in L1."""
    if tile.resident:
        return tile
    longer = dataclasses.replace(tile, ring=LONGER_RING)
    if not work.shape.x_channels_last:
        device = dataclasses.replace(device, shared_bytes=min(device.shared_bytes, SHARED_BYTES_BESIDE_L1))
    longer_cost = work.typical_cost(longer, device)
    return longer if longer_cost is not None and longer_cost <= cost else tile


def tiles(work: Work) -> Iterator[Tile]:
    """Yield the tiles that a problem may use. They depend on neither N nor extents, which therefore never recompile."""
    shape = work.shape
    several = shape.stride[0] * shape.stride[1] > 1
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
        if merge_w and (shape.kernel[2] == 1 or shape.out_channels_last or tiles_m == 3):  # 192 rows: measured slow
            continue
        if merge_w and slides:  # likewise slow, beside merged taps along D
            continue
        if deep and blocks > 1 and not boxed:
            continue
        common = (workers, stagers, tiles_m, tiles_c, merge_w, k_steps, 4 if deep else 2)
        half_k = shape.itemsize == 2 and k_steps == 1 and shape.c_in <= 8 and not boxed
        tile = Tile(*common, 3, False, False, all_phases, blocks, slides, half_k, merge_d, join_w, boxed)
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
                tile = dataclasses.replace(tile, ring=slots, resident=True)
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
            yield dataclasses.replace(tile, take_turns=True)
        yield tile
