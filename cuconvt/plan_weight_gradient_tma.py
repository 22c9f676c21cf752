"""Plans of the kernel for weight gradients of wide layers, ``kernels/weight_gradient_tma.cu``."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import exp, gcd, inf, log, prod
from typing import Any, NamedTuple

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
    round_up,
    taps_follow_each_other,
    with_taps_as_channels,
)
from cuconvt.plan_phase_wgmma import _batch_as_depth, _count
from cuconvt.plan_search import ROUNDINGS, of_tile, remembered
from cuconvt.plan_weight_gradient_boxes import (
    BESIDE_SUMS,
    FEW_PARTS,
    MAX_BYTES_OF_SUMS,
    MAX_WORKSPACE_BYTES,
    WorkOnBoxes,
    shares,
)
from cuconvt.tensor_map import CHANNELS, ITEMSIZE, MAX_BOX, MAX_STEP, TensorMap, reads, spans

ALIGNMENT = 1024  # of what copies bring
LEAST_STAGES, MAX_STAGES = 2, 8
ROW_BYTES = 128  # 64 channels of a position
COPIED = 8  # channels: a copy that starts at others is an illegal instruction
MAX_TILES_N = 24  # times 8 columns of a product
MAX_TILES_M = 4
MAX_TAPS = 4, 4, 8  # of a tile along D, H, W
MAX_UNITS = 12  # of a worker
MAX_IDLE = 1.3  # units, relative to those of use
SUMS_OF_PATCH = 128  # of each tap, that a block of the second pass adds
TURN_THREADS = 256
# Workers of a block, in warpgroups, and blocks on a multiprocessor.
KINDS = ((2, 1), (1, 2), (1, 1), (3, 1))
COPIER_REGISTERS, MAX_REGISTERS = 24, 240  # of a thread
OTHER_REGISTERS = 40  # of a worker, besides sums
LARGEST_BOX = 512  # positions

# Rates of an H200's multiprocessor, per clock, that the cost estimate uses; fitted to 457 launches, 8% rms.
LEAST_CLOCKS = 16  # of a product
OF_ROWS = 12  # shared memory's, of a product's rows
LONE_CLOCKS = 14  # of a step, where one worker has a multiprocessor alone
ROW_CLOCKS = 1.4  # of a row that is copied, besides its bytes
L2_BYTES_A_CLOCK = 80
MEMORY_BYTES_A_CLOCK = 26  # of arrays that are read once
TURNED_BYTES_A_CLOCK = 18  # read and written
WRITTEN_BYTES_A_CLOCK, READ_BYTES_A_CLOCK = 61, 18  # of sums
FEW_STAGES = 0.5  # what copies wait for products, of as much as they take, divided by the boxes that they are ahead
BOX_CLOCKS = 180
OVERLAP = 0.1  # what of reading arrays once adds to all else, or the other way round
BOXES_AROUND = 0.65  # what a block takes before and after its boxes, in boxes
# The launches that tiles are chosen for, (N, D, H, W) by rank; for one and two axes D is the batch.
TYPICAL = {
    1: ((1, 16, 1, 256), (1, 16, 1, 4096)),
    2: ((1, 16, 16, 16), (1, 16, 64, 64), (1, 16, 128, 128)),
    3: ((64, 8, 8, 8), (1, 32, 32, 32), (1, 48, 48, 48), (1, 64, 64, 64)),
}
# The cost that is compared with other kernels', relative to the estimated time, which has the sums of launches that are
# not large, as theirs do not. Such that it is chosen where it took less time, in rows (turned) for most of 17 problems.
COMPARED, COMPARED_OF_TURNED = 0.85, 0.6


@dataclass(frozen=True)
class Tile:
    """The compile-time shape of a block; the fields are the macros of the kernel."""

    workers: int
    rows_of_x: int  # whether rows of the product are channels of x
    tiles_m: int  # times 64 rows
    tiles_n: int  # times 8 columns
    taps: tuple[int, int, int]  # along D, H, W
    apart: tuple[int, int, int]  # neighbours of them
    min_blocks: int = 1
    fold: int = 1  # taps along W that are channels of y

    @functools.cached_property
    def units(self) -> int:
        """Products of a worker, for a step."""
        return -(-prod(self.taps) * self.tiles_m // self.workers)

    @property
    def channels_in(self) -> int:
        return 64 * self.tiles_m if self.rows_of_x else 8 * self.tiles_n

    @property
    def channels_out(self) -> int:
        return 8 * self.tiles_n if self.rows_of_x else 64 * self.tiles_m

    @functools.cached_property
    def groups(self) -> tuple[int, int]:
        """Of 64 channels of x and y, that are copied."""
        return -(-self.channels_in // CHANNELS), -(-self.channels_out // CHANNELS)

    @functools.cached_property
    def sums(self) -> int:
        """Registers of a worker's thread that hold sums."""
        return self.units * 4 * self.tiles_n

    @functools.cached_property
    def values(self) -> int:
        """Weights of a block, and what its tile reaches beyond them."""
        return 128 * self.workers * self.sums

    @property
    def at_start(self) -> int:
        """Registers of a thread before warps exchange some."""
        return min(65536 // (128 * (self.workers + 1) * self.min_blocks), MAX_REGISTERS) // 8 * 8

    @property
    def registers(self) -> int:
        """Registers of a worker's thread, of those that the block started with."""
        return min(MAX_REGISTERS, (self.at_start * (self.workers + 1) - COPIER_REGISTERS) // self.workers // 8 * 8)


@dataclass(frozen=True)
class Shape:
    """What a tile's choice depends on: everything but N and extents. Steps are those of y as it is copied."""

    rank: int
    kernel: Ints
    stride: Ints
    dilation: Ints
    groups: int
    c_in: int  # per group
    c_out: int
    x_turned: bool  # whether it is made channels-last before
    y_turned: bool
    fold: int = 1  # taps along W that are channels of y

    @classmethod
    def of(cls, sides: Sides) -> Shape:
        g = sides.geometry
        return cls(
            g.rank,
            g.kernel,
            g.stride,
            g.dilation,
            g.groups,
            g.c_in_per_group,
            g.c_out_per_group,
            sides.turn_x is not None,
            sides.turn_y is not None,
            sides.fold,
        )


class Array(NamedTuple):
    """An array as copies read it: extents and strides, in elements, of N, channels, D, H, W."""

    extents: Ints
    strides: Ints

    @property
    def bytes(self) -> int:
        return round_up(ITEMSIZE * self.extents[0] * self.strides[0], 256)


class Sides(NamedTuple):
    """A problem as copies see it, and what has to be turned for that."""

    geometry: Geometry  # with the steps of y as it is copied
    x: Array
    y: Array
    turn_x: Ints | None  # ``struct Turn`` without its blocks
    turn_y: Ints | None
    fold: int = 1  # taps along W that are channels of y

    @classmethod
    def of(cls, geometry: Geometry, layout: Layout) -> Sides:
        g = geometry
        x, y = (
            Array((g.n, channels, *extent), strides)
            for channels, extent, strides in (
                (g.c_in, g.x_extent, layout.x),
                (g.c_out, g.out_extent, layout.out),
            )
        )
        turn_x = turn_y = None
        if not reads(x.strides, x.extents, layout.x_aligned):
            turn_x = turn_of(x, 0, layout.x_aligned)
            x = _channels_last(x.extents)
        if not reads(y.strides, y.extents, layout.out_aligned):
            g, y, first = _reached(g, y)
            turn_y = turn_of(y, first, layout.out_aligned)
            y = _channels_last(y.extents)
        return cls(g, x, y, turn_x, turn_y)

    def folded(self) -> Sides | None:
        """Return the same with the taps along W as channels of y, which follow each other where kernel = stride.

        Rows that are copied are longer, where they are shorter than 128 bytes, and fewer tiles of taps read x.
        """
        (n, channels, d, h, w), strides = self.y
        taps, contiguous = self.geometry.kernel[2], strides[1] == 1 and strides[4] == channels
        if channels >= CHANNELS or not contiguous or not taps_follow_each_other(self.geometry):
            return None
        y = Array((n, taps * channels, d, h, w // taps), (*strides[:4], taps * channels))
        return self._replace(geometry=with_taps_as_channels(self.geometry), y=y, fold=taps)


def _reached(geometry: Geometry, y: Array) -> tuple[Geometry, Array, int]:
    """Return the problem of those elements of y alone that a tap may read, a multiple of their common step apart."""
    g = geometry
    steps = tuple(s if k == 1 else gcd(s, d) for s, d, k in zip(g.stride, g.dilation, g.kernel, strict=True))
    firsts = tuple(-pad % step for pad, step in zip(g.pad_before, steps, strict=True))
    extents = tuple(max(1, -(-(o - f) // s)) for o, f, s in zip(g.out_extent, firsts, steps, strict=True))
    if any(f >= o for f, o in zip(firsts, g.out_extent, strict=True)):
        return g, y, 0  # no element is read
    smaller = dataclasses.replace(
        g,
        stride=_triple(a // b for a, b in zip(g.stride, steps, strict=True)),
        dilation=_triple(d if k == 1 else d // b for d, b, k in zip(g.dilation, steps, g.kernel, strict=True)),
        pad_before=_triple((p + f) // b for p, f, b in zip(g.pad_before, firsts, steps, strict=True)),
        out_extent=_triple(extents),
    )
    of_n, of_channels, *of_axes = y.strides
    strides = tuple(stride * step for stride, step in zip(of_axes, steps, strict=True))
    first = sum(f * stride for f, stride in zip(firsts, of_axes, strict=True))
    return smaller, Array((*y.extents[:2], *extents), (of_n, of_channels, *strides)), first


def _channels_last(extents: Ints) -> Array:
    _, channels, d, h, w = extents
    padded = round_up(channels, 8)
    return Array(extents, (d * h * w * padded, 1, h * w * padded, w * padded, padded))


def turn_of(array: Array, first: int, aligned: bool) -> Ints:
    """Return the parameters of the kernel that turns an array whose element `first` is the first one to read."""
    (n, channels, *spatial), (of_n, of_channels, *of_axes) = array.extents, list(array.strides)
    extents, strides = list(spatial), list(of_axes)
    # Axes that follow each other in memory are one.
    for axis in (1, 0):
        if extents[axis] == 1 or strides[axis] == extents[2] * strides[2]:
            extents[2] *= extents[axis]
            extents[axis] = 1
        elif axis == 1:
            break
    distances = (of_n if n > 1 else 0, of_channels, *(s for s, e in zip(strides[:2], extents, strict=False) if e > 1))
    wide = aligned and strides[2] == 1 and not any(number % 8 for number in (*distances, extents[2], first))
    return (n, channels, *extents, of_n, of_channels, *strides, first, int(wide))


def turn_blocks(turn: Ints) -> int:
    n, channels, d, h, w, *_, wide = turn
    places, across = n * d * h * (w // 8 if wide else w), 4 if wide else 2
    warps = _ceil_div(places, 32 // across) * _ceil_div(_ceil_div(channels, 8), across)
    return _ceil_div(32 * warps, TURN_THREADS)


def plan_weight_gradient_tma(
    geometry: Geometry, dtype: str, layout: Layout, precision: str | None, device: Device, tile: Tile | None = None
) -> Plan | Refusal:
    """Propose the tile with the least estimated time, or a given one, or say why the kernel does not serve."""
    name = "weight_gradient_tma"
    if reason := _refuse(geometry, dtype, precision, device):
        return Refusal(name, reason)
    sides = Sides.of(*_batch_as_depth(geometry, layout))
    g = sides.geometry
    if g.n * prod(g.x_extent) == 0:
        return Refusal(name, "nothing to copy")
    if max(_reach(g)) >= 2**31:
        return Refusal(name, "positions beyond 2**31 are more than it counts")
    turned = sum(array.bytes for array, turn in ((sides.x, sides.turn_x), (sides.y, sides.turn_y)) if turn is not None)
    room = MAX_WORKSPACE_BYTES - turned
    if room < 0:
        return Refusal(name, f"turned arrays take {turned} bytes, more than {MAX_WORKSPACE_BYTES}")
    choices = []
    for way in (sides, sides.folded()):
        if way is None or (tile is not None and tile.fold != way.fold):
            continue
        work = Work(Shape.of(way))
        best = tile or choose_tile(work.shape, device)
        cost = None if best is None else work.typical_cost(best, device)
        if best is not None and cost is not None:
            choices.append((cost, way, work, best))
    if not choices:
        return Refusal(name, "no box with what its taps reach is one that is copied to shared memory")
    cost, sides, work, tile = min(choices, key=lambda choice: choice[0])
    g = sides.geometry
    choice = work.best_launch(tile, g.n, g.x_extent, device, room)
    if choice is None:
        return Refusal(name, "tiles of weights, or their boxes, are more than it counts or has room for")
    box, share, _ = choice
    boxes = tuple(-(-x // b) for x, b in zip(g.x_extent, box, strict=True))
    maps = work.maps(tile, box, dtype, sides)
    defines = (
        ("DTYPE", DTYPE_CODES[dtype]),
        *axis_macros(KERNEL=g.kernel, STRIDE=g.stride, DILATION=g.dilation),
        ("WORKERS", tile.workers),
        ("ROWS_OF_X", tile.rows_of_x),
        ("TILES_M", tile.tiles_m),
        ("TILES_N", tile.tiles_n),
        *axis_macros(TAPS=tile.taps, APART=tile.apart),
        ("FOLD", tile.fold),
        ("MIN_BLOCKS", tile.min_blocks),
        ("WORKER_REGISTERS", tile.registers),
        ("COPIER_REGISTERS", COPIER_REGISTERS),
    )
    patches = work.tiles_of_channels(tile) * tile.tiles_m * 4 * tile.tiles_n
    in_order = share.parts <= FEW_PARTS and patches >= device.multiprocessors // 2 and work.adds_in_order(tile)
    stages = work.stages(tile, work.stage_bytes(tile, box), device)
    parts_bytes = 4 * tile.values * share.slots
    turned_x = parts_bytes if sides.turn_x else -1
    turned_y = parts_bytes + (sides.x.bytes if sides.turn_x else 0) if sides.turn_y else -1
    turns = [turn and (*turn, turn_blocks(turn)) for turn in (sides.turn_x, sides.turn_y)]
    return Plan(
        kernel=name,
        defines=defines,
        grid=share.blocks,
        block=128 * (tile.workers + 1),
        shared_bytes=ALIGNMENT + stages * work.stage_bytes(tile, box),
        problem=problem_parameters(
            g, layout, (*boxes, 1), out_vector=in_order, box=(*box, stages, 0, 0, share.of_block, 0, 0, 0, 0)
        ),
        cost=(COMPARED_OF_TURNED if turned else COMPARED) * (cost + work.turning_clocks()) * g.n * prod(g.x_extent),
        workspace_bytes=parts_bytes + turned,
        sums=patches * SUMS_OF_PATCH * prod(g.kernel),
        sums_a_block=SUMS_OF_PATCH * (prod(g.kernel) if in_order else 1),
        maps=maps,
        turned=(turned_x, turned_y) if turned else (),
        turns=tuple(number for turn in turns for number in (turn or (0,) * TURN_FIELDS)) if turned else (),
        turn_blocks=sum(turn[-1] for turn in turns if turn),
        tile=tile,
    )


TURN_FIELDS = 13


def _refuse(geometry: Geometry, dtype: str, precision: str | None, device: Device) -> str | None:
    if device.compute_capability != 90:
        return f"needs compute capability 9.0, the device has {device.compute_capability / 10}"
    if dtype not in ("float16", "bfloat16"):
        return f"computes in float16 and bfloat16, not in {precision or dtype}"
    per_group = geometry.c_in_per_group, geometry.c_out_per_group
    if geometry.groups > 1 and any(channels % COPIED for channels in per_group):
        return f"copies start at multiples of {COPIED} channels, groups have {per_group[0]} and {per_group[1]}"
    return refuse_steps(geometry)


def _reach(geometry: Geometry) -> Iterator[int]:
    """Yield the largest positions along each axis."""
    g = geometry
    for x, s, k, d, o, p in zip(g.x_extent, g.stride, g.kernel, g.dilation, g.out_extent, g.pad_before, strict=True):
        yield max((x + LARGEST_BOX) * s + k * d, o, p)


@dataclass(frozen=True)
class Share:
    """How boxes of all tiles of weights are shared by blocks, as the kernel does."""

    tiles: int
    boxes: int
    of_block: int  # boxes of a block

    @functools.cached_property
    def whole(self) -> int:
        """Blocks that have a tile alone."""
        return self.boxes // self.of_block

    @functools.cached_property
    def rest(self) -> int:
        """Boxes of a tile that are left."""
        return self.boxes % self.of_block

    @functools.cached_property
    def blocks(self) -> int:
        return self.whole * self.tiles + -(-self.rest * self.tiles // self.of_block)

    @functools.cached_property
    def slots(self) -> int:
        return self.blocks + (self.tiles if self.rest else 0)

    @functools.cached_property
    def parts(self) -> int:
        """The most of a tile."""
        return self.whole + (2 if self.rest else 0)

    @functools.cached_property
    def parts_of_block(self) -> int:
        """The most of a block."""
        return 1 + min(self.tiles - 1, -(-(self.of_block - 1) // self.rest)) if self.rest else 1


@functools.lru_cache(maxsize=4096)
def share_of(tiles: int, boxes: int, of_block: int) -> Share:
    """Return the same one for the same numbers, which many tiles have."""
    return Share(tiles, boxes, of_block)


class Launch(NamedTuple):
    """A box of positions, how blocks share all boxes, and the time that it takes."""

    box: Ints
    share: Share
    clocks: float


class CopiedBox(NamedTuple):
    """A box of positions for some extents."""

    box: Ints
    boxes: int  # that the extents take
    positions: int
    of_y: int  # elements that the taps of a tile reach


class Copied(NamedTuple):
    """All boxes for some extents, and what none of them has less of: their number, and the sum of all of them."""

    boxes: list[CopiedBox]
    fewest: int
    positions: int
    of_y: int


class Work(WorkOnBoxes[Tile]):
    """The sizes that follow from a problem and a tile; the kernel computes the same ones."""

    piece, max_runs, boxes_around = 8, LARGEST_BOX // 8, 0

    def __init__(self, shape: Shape):
        self.shape = shape
        self.known_boxes: dict[tuple[Ints, Ints], Copied] = {}
        self.tile: Tile | None = None  # the last one whose sizes were asked for, and these: see `of_tile`
        self.sizes: dict[Any, Any] = {}

    def adds_in_order(self, tile: Tile) -> bool:
        """Whether a block of the second pass has room for all taps of its channels, as the kernel decides."""
        of_x, of_y = (16, 8) if tile.rows_of_x else (8, 16)
        return 4 * of_x * (of_y * (prod(self.shape.kernel) | 1) + 4) <= MAX_BYTES_OF_SUMS

    def tiles_of_channels(self, tile: Tile) -> int:
        s = self.shape
        return -(-s.c_out // tile.channels_out) * -(-s.c_in // tile.channels_in) * s.groups

    @of_tile
    def tiles_of_weights(self, tile: Tile) -> int:
        taps = prod(
            min(apart, k) * _ceil_div(_ceil_div(k, apart), t)
            for k, t, apart in zip(self.shape.kernel, tile.taps, tile.apart, strict=True)
        )
        return taps * self.tiles_of_channels(tile)

    @of_tile
    def halo(self, tile: Tile) -> Ints:
        """Return how much wider than a box of positions is what the taps of a tile reach, in copied elements."""
        s = self.shape
        axes = zip(tile.taps, s.dilation, tile.apart, s.stride, strict=True)
        return tuple((taps - 1) * dilation * apart // stride for taps, dilation, apart, stride in axes)

    def y_box(self, tile: Tile, box: Ints) -> Ints:
        """Return what the taps of a tile reach from a box of positions, in elements that are copied."""
        d, h, w = self.halo(tile)
        return box[0] + d, box[1] + h, box[2] + w

    def stage_bytes(self, tile: Tile, box: Ints) -> int:
        return self.bytes_of(tile, prod(box), prod(self.y_box(tile, box)))

    def bytes_of(self, tile: Tile, positions: int, of_y: int) -> int:
        """Return the shared memory that so many positions take, whose taps reach so many of y."""
        groups_x, groups_y = tile.groups
        return groups_x * ROW_BYTES * positions + groups_y * round_up(ROW_BYTES * of_y, ALIGNMENT)

    def stages(self, tile: Tile, stage_bytes: int, device: Device) -> int:
        """Return how many boxes a block has room for; each reserves 1 KB on top of its own."""
        room = (device.shared_bytes + 1024) // tile.min_blocks - 1024 - ALIGNMENT
        return min(MAX_STAGES, room // stage_bytes)

    def is_copied(self, tile: Tile, box: Ints) -> bool:
        """Whether copies can bring a box and what its taps reach."""
        return max(*spans(self.y_box(tile, box), self.shape.stride), *box) <= MAX_BOX

    def fits(self, tile: Tile, box: Ints, device: Device) -> bool:
        return self.is_copied(tile, box) and self.stages(tile, self.stage_bytes(tile, box), device) >= LEAST_STAGES

    def evened(self, box: Ints, extents: Ints) -> Ints:
        """Return the same with another row, or else plane: the two runs of a step may be any distance apart."""
        d, h, w = box
        if extents[1] > 1:
            return d, h + 1, w
        return (d + 1, h, w) if extents[0] > 1 else (d, h, w + 1)

    def maps(self, tile: Tile, box: Ints, dtype: str, sides: Sides) -> tuple[TensorMap, ...]:
        """Return the maps of x and y."""
        return (
            TensorMap.of(dtype, *sides.x, box, (1, 1, 1)),
            TensorMap.of(dtype, *sides.y, self.y_box(tile, box), self.shape.stride),
        )

    def best_launch(self, tile: Tile, n: int, extents: Ints, device: Device, room: int) -> Launch | None:
        """Return the launch with the least time for so many positions."""
        timed: list[tuple[float, int, float, Ints]] = []
        for box, boxes, positions, of_y in self.copied_boxes(tile, extents).boxes:
            stages = self.stages(tile, self.bytes_of(tile, positions, of_y), device)
            if stages >= LEAST_STAGES:
                of_box = self.clocks_of(tile, positions, of_y, stages) + BOX_CLOCKS / tile.min_blocks
                timed.append((n * boxes * of_box, n * boxes, of_box, box))

        def launches(boxes: int, of_box: float, box: Ints) -> Iterator[Launch]:
            for share in self.shares(tile, boxes, device, room):
                yield Launch(box, share, self.launch_clocks(tile, of_box, share, device))

        # No launch takes less time than all its boxes do, however blocks share them: most are not worth a closer look.
        likely = (
            launch.clocks for _, boxes, of_box, box in sorted(timed)[:1] for launch in launches(boxes, of_box, box)
        )
        most = min(likely, default=inf) * (1 + ROUNDINGS) * device.multiprocessors / self.tiles_of_weights(tile)
        every = (
            launch for least, boxes, of_box, box in timed if least <= most for launch in launches(boxes, of_box, box)
        )
        return min(every, key=lambda launch: launch.clocks, default=None)

    def copied_boxes(self, tile: Tile, extents: Ints) -> Copied:
        """Return the boxes for so many positions that can be copied: tiles have them in common."""
        halo = self.halo(tile)
        if (halo, extents) not in self.known_boxes:
            boxes = [
                CopiedBox(box, _count(extents, box), prod(box), prod(self.y_box(tile, box)))
                for box in self.boxes(extents)
                if self.is_copied(tile, box)
            ]
            self.known_boxes[halo, extents] = Copied(
                boxes,
                fewest=min((box.boxes for box in boxes), default=0),
                positions=min((box.boxes * box.positions for box in boxes), default=0),
                of_y=min((box.boxes * box.of_y for box in boxes), default=0),
            )
        return self.known_boxes[halo, extents]

    def shares(self, tile: Tile, boxes: int, device: Device, room: int) -> Iterator[Share]:
        """Yield how boxes may be shared: by all blocks at once with as many each, by as many for each tile, or not."""
        tiles = self.tiles_of_weights(tile)
        held = tile.min_blocks * device.multiprocessors
        for of_block in sorted({-(-tiles * boxes // held), -(-boxes // max(1, held // tiles)), boxes}):
            share = share_of(tiles, boxes, of_block)
            if 4 * tile.values * share.slots <= room and share.blocks <= MAX_GRID and tiles * boxes < 2**31:
                yield share

    def launch_clocks(self, tile: Tile, of_box: float, share: Share, device: Device) -> float:
        """Estimate the clocks of a launch, each box of which takes so many, and of the second pass."""
        held = tile.min_blocks * device.multiprocessors
        rounds = -(-share.blocks // held) * tile.min_blocks
        clocks = rounds * (share.of_block + BOXES_AROUND) * of_box
        # A block writes all parts that it has, and the second pass reads all of them.
        slots = share.slots / device.multiprocessors
        written, read = max(rounds * share.parts_of_block, slots), slots
        return clocks + 4 * tile.values * (written / WRITTEN_BYTES_A_CLOCK + read / READ_BYTES_A_CLOCK)

    def turning_clocks(self) -> float:
        """Estimate a position's clocks of what is turned before: it is read and written."""
        s = self.shape
        channels = s.x_turned * round_up(s.groups * s.c_in, 8)
        channels += s.y_turned * round_up(s.groups * s.c_out, 8) * prod(s.stride)
        return 2 * ITEMSIZE * channels / TURNED_BYTES_A_CLOCK

    def memory_clocks(self) -> float:
        """Estimate the clocks of a position that reading both arrays once takes."""
        s = self.shape
        read = (min(stride, kernel) for stride, kernel in zip(s.stride, s.kernel, strict=True))
        return ITEMSIZE * s.groups * (s.c_in + s.c_out * prod(read)) / MEMORY_BYTES_A_CLOCK

    @of_tile
    def step_clocks(self, tile: Tile) -> tuple[float, float]:
        """Estimate the clocks of all workers for two runs: tensor cores, shared memory."""
        units = tile.workers * tile.units
        lone = LONE_CLOCKS if tile.workers * tile.min_blocks == 1 else 0
        return units * max(4 * tile.tiles_n, LEAST_CLOCKS) + lone, units * (OF_ROWS + 2 * tile.tiles_n)

    def least_cost(self, tile: Tile, device: Device) -> float:
        """Return a lower bound of a position's clocks: those of the products, and of what is fetched without a halo."""
        tensor, shared = (clocks / 16 for clocks in self.step_clocks(tile))
        fetched = self._fetch_clocks(tile, 1, 1)
        return max(tensor, shared, fetched, self.memory_clocks() / self.tiles_of_weights(tile)) * self.tiles_of_weights(
            tile
        )

    def _fetch_clocks(self, tile: Tile, of_x: int, of_y: int) -> float:
        """Estimate the clocks that so many positions of x and y take to copy."""
        a_position_x, a_position_y = self._fetch_rates(tile)
        return of_x * a_position_x + of_y * a_position_y

    @of_tile
    def _fetch_rates(self, tile: Tile) -> tuple[float, ...]:
        """Estimate the clocks of one position of x and of y."""
        s, rates = self.shape, []
        for groups, channels in zip(tile.groups, (s.c_in, s.c_out), strict=True):
            # Channels of other groups are fetched, too.
            fetched = min(groups * CHANNELS, round_up(channels, 8)) if s.groups == 1 else groups * CHANNELS
            rates.append(groups * ROW_CLOCKS + ITEMSIZE * fetched / L2_BYTES_A_CLOCK)
        return tuple(rates)

    def typical_cost(self, tile: Tile, device: Device) -> float | None:
        """Return the clocks of a position, as the geometric mean over typical launches, or None where no box fits."""
        launches = TYPICAL[self.shape.rank]
        logarithms = 0.0
        for n, *extents in launches:
            launch = self.best_launch(tile, n, tuple(extents), device, 2**63)
            if launch is None:
                return None
            logarithms += log(self.position_clocks(launch.clocks, n * prod(extents), device))
        return exp(logarithms / len(launches))

    def ideal_cost(self, tile: Tile, device: Device) -> float:
        """Return a closer bound: with as few boxes, positions and elements of y as any boxes have."""
        launches, tiles = TYPICAL[self.shape.rank], self.tiles_of_weights(tile)
        sums = 4 * tile.values * tiles * (1 / WRITTEN_BYTES_A_CLOCK + 1 / READ_BYTES_A_CLOCK)
        logarithms = 0.0
        for n, *extents in launches:
            copied = self.copied_boxes(tile, tuple(extents))
            clocks = self.clocks_of(tile, copied.positions, copied.of_y, MAX_STAGES)
            clocks += copied.fewest * BOX_CLOCKS / tile.min_blocks
            of_all = (n * tiles * clocks + sums) / device.multiprocessors
            logarithms += log(self.position_clocks(of_all, n * prod(extents), device))
        return exp(logarithms / len(launches))

    def position_clocks(self, clocks: float, positions: int, device: Device) -> float:
        """Estimate the clocks of a position of a launch, which reads both arrays at least once."""
        bounds = clocks * device.multiprocessors / positions, self.memory_clocks()
        return max(bounds) + OVERLAP * min(bounds)

    def clocks(self, tile: Tile, box: Ints, stages: int = MAX_STAGES) -> float:
        """Estimate a multiprocessor's clocks for one box, of which so many are staged."""
        return self.clocks_of(tile, prod(box), prod(self.y_box(tile, box)), stages) + BOX_CLOCKS / tile.min_blocks

    def clocks_of(self, tile: Tile, positions: int, of_y: int, stages: int) -> float:
        """Estimate the clocks of so many positions, whose taps reach so many of y."""
        tensor, shared = (positions / 16 * clocks for clocks in self.step_clocks(tile))
        of_x_groups, of_y_groups = tile.groups
        shared += of_x_groups * positions + of_y_groups * of_y  # rows of as many bytes as it takes in a clock
        fetch = self._fetch_clocks(tile, positions, of_y) * (1 + FEW_STAGES / (stages * tile.min_blocks - 1))
        return max(tensor, shared, fetch)


@remembered(Tile)
def choose_tile(shape: Shape, device: Device) -> Tile | None:
    """Return the best tile for typical extents."""
    work = Work(shape)
    return work.best_tile(((work.least_cost(tile, device), tile) for tile in tiles(work)), device)


def tiles(work: Work) -> Iterator[Tile]:
    """Yield the tiles that a problem may use. They depend on neither N nor extents, which therefore never recompile."""
    s = work.shape
    if max(s.stride) > MAX_STEP:
        return
    axes = [_taps_of(*axis) for axis in zip(s.kernel, s.stride, s.dilation, MAX_TAPS, strict=True)]
    for rows_of_x in (0, 1):
        rows, columns = (s.c_in, s.c_out) if rows_of_x else (s.c_out, s.c_in)
        for tiles_m, tiles_n in itertools.product(shares(-(-rows // 64), MAX_TILES_M), _columns(columns)):
            for chosen in itertools.product(*axes):
                taps, apart = zip(*chosen, strict=True)
                for workers, blocks in KINDS:
                    tile = Tile(workers, rows_of_x, tiles_m, tiles_n, taps, apart, blocks, s.fold)
                    if is_possible(tile):
                        yield tile


def is_possible(tile: Tile) -> bool:
    """Whether a tile's workers have registers for its sums, and few of them nothing to do."""
    return (
        tile.workers * tile.units <= MAX_IDLE * prod(tile.taps) * tile.tiles_m
        and tile.units <= MAX_UNITS
        and tile.sums + OTHER_REGISTERS <= tile.registers
        and 4 * tile.tiles_n + BESIDE_SUMS <= tile.at_start
    )


def _columns(channels: int) -> list[int]:
    """Return eights of columns of a tile: 64 are copied at a time."""
    whole = [eights for eights in (8, 16, 24) if 8 * eights < round_up(channels, 64)]
    return [*whole, _ceil_div(channels, 8)] if channels <= 8 * MAX_TILES_N else whole


def _taps_of(kernel: int, stride: int, dilation: int, most: int) -> list[tuple[int, int]]:
    """Return the taps of a tile along an axis, and how far they are apart, as they read elements with one remainder."""
    step = stride // gcd(stride, dilation)
    return [(share, step) for share in shares(-(-kernel // step), most)]


def _triple(numbers: Iterable[int]) -> tuple[int, int, int]:
    d, h, w = numbers
    return d, h, w


def _ceil_div(count: int, share: int) -> int:
    return -(-count // share)
