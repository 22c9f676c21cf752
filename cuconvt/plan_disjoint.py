"""Plans of the kernel for kernel = stride on Hopper's tensor cores, ``kernels/disjoint.cu``."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd, prod

from cuconvt.geometry import Geometry
from cuconvt.plan import (
    DTYPE_CODES,
    INDEX_LIMIT,
    PRECISION_CODES,
    Device,
    Ints,
    Layout,
    Plan,
    Refusal,
    all_positions,
    axis_macros,
    magic,
    positions,
    positions_reached,
    problem_parameters,
    refuse_steps,
    refuse_tensor_cores,
)
from cuconvt.plan_copies import channels_stored, others_divisible
from cuconvt.plan_wgmma_sizes import MAX_COLUMNS, ROWS

SHARES = ((2, 1), (3, 1), (4, 1), (2, 2))  # workers of a block, and blocks a multiprocessor
REGISTERS = 65536  # of a multiprocessor
MAX_REGISTERS = 255  # of a thread
CHAIN = 2  # steps of 3xTF32 that the tensor core adds up, as in the kernel
BARRIER_BYTES = 128
MAX_SUMS = 64  # of a thread
MAX_STEPS = {2: 24, 4: 40}  # by the bytes of an element

# Of an H200's multiprocessor, fitted to all tiles of 54 problems.
SHARED_BYTES_A_CLOCK = 128
MEMORY_BYTES_A_CLOCK = 26.7
PART_OF_A_LINE = 0.21  # what stores of channels-last results take longer for each further block that shares a line
INSTRUCTION_CLOCKS = 8.4  # in which a warp comes to its next instruction
LOAD_CLOCKS = 1400  # in which it waits for x, where that is not loaded ahead
BLOCK_CLOCKS = 3000  # in which a block starts
WEIGHT_BYTES_A_CLOCK = 40  # that come for a block
COMPARED = 1.3  # the other kernels' estimates are as much more pessimistic
OF_GROUPS = 1.6  # of that, with groups and channels-last results: of three layers
# Of that, by products, how much longer results of 32 bits take where a run of a row is no pieces of 16 bytes.
OF_PIECES = {1: 1.87, 3: 1.4}


@dataclass(frozen=True)
class Tile:
    """The compile-time shape of a worker's tile; the fields are macros of the kernel."""

    workers: int
    tiles_m: int
    tiles_c: int
    run: int
    ahead: bool
    min_blocks: int


@dataclass(frozen=True)
class Shape:
    """What a tile's choice depends on, here and for the adjoint: everything but N and extents.

    Channels in are those of what is read, the result's of a transposed convolution for its adjoint.
    """

    kernel: Ints
    c_in: int  # per group
    c_out: int
    itemsize: int
    products: int
    x_channels_last: bool
    out_channels_last: bool

    @classmethod
    def of_problem(cls, geometry: Geometry, dtype: str, precision: str | None, layout: Layout) -> Shape:
        g = geometry
        itemsize, products = 4 if dtype == "float32" else 2, 3 if precision == "tf32x3" else 1
        last = layout.x_channels_last, layout.out_channels_last
        return cls(g.kernel, g.c_in_per_group, g.c_out_per_group, itemsize, products, *last)


def plan_disjoint(
    geometry: Geometry, dtype: str, layout: Layout, precision: str | None, device: Device, tile: Tile | None = None
) -> Plan | Refusal:
    """Propose the tile with the least estimated time, or a given one, or say why the kernel does not serve."""
    if reason := _refuse(geometry, dtype, precision, device):
        return Refusal("disjoint", reason)
    work = Work.of_problem(geometry, dtype, precision, layout)
    if tile is None:
        tile = choose_tile(work.shape, device)
    if tile is None:
        return Refusal("disjoint", f"holds all channels of a position in registers, got {work.shape.c_in}")
    if not work.fits(tile, 1, device):
        return Refusal("disjoint", f"a slot of weights of this tile does not fit into {device.shared_bytes} bytes")
    return _plan_tile(geometry, dtype, layout, precision, device, work, tile)


def candidates(geometry: Geometry, dtype: str, layout: Layout, precision: str | None, device: Device) -> Iterator[Plan]:
    """Yield a plan for every tile that fits, among them the one that is proposed."""
    if _refuse(geometry, dtype, precision, device):
        return
    work = Work.of_problem(geometry, dtype, precision, layout)
    for tile in tiles(work, device):
        plan = _plan_tile(geometry, dtype, layout, precision, device, work, tile)
        if isinstance(plan, Plan):
            yield plan


def _plan_tile(
    geometry: Geometry, dtype: str, layout: Layout, precision: str | None, device: Device, work: Work, tile: Tile
) -> Plan | Refusal:
    g = geometry
    along = tuple(positions(g, axis) for axis in range(3))
    row = -(-along[2] // tile.run)  # runs
    count = -(-g.n * along[0] * along[1] * row // work.runs(tile))  # of a worker's tiles
    sets = g.groups * work.slots(tile)
    per_part, blocks = _deal(work, tile, g.groups, count, device)
    if (count + blocks * tile.workers) * work.runs(tile) >= INDEX_LIMIT:
        return Refusal("disjoint", f"counts positions in 31 bits, got {g.n * prod(along)}")
    if positions_reached(g, (1, 1, tile.run)) >= INDEX_LIMIT:
        return Refusal("disjoint", f"counts positions along an axis in 31 bits, got {g.out_extent}")
    tiles_c = -(-g.c_out_per_group // (8 * tile.tiles_c))
    defines = (
        ("DTYPE", DTYPE_CODES[dtype]),
        ("PRECISION", PRECISION_CODES[precision]),
        *axis_macros(KERNEL=g.kernel),
        ("WORKERS", tile.workers),
        ("TILES_M", tile.tiles_m),
        ("TILES_C", tile.tiles_c),
        ("K_STEPS", work.steps),
        ("RUN", tile.run),
        ("AHEAD", int(tile.ahead)),
        ("X_CHANNELS_LAST", int(layout.x_channels_last)),
        ("OUT_CHANNELS_LAST", int(layout.out_channels_last)),
        ("OUT_VECTOR", channels_stored(g, layout, work.shape.itemsize)),
        ("MIN_BLOCKS", tile.min_blocks),
    )
    parts = -(-work.slots(tile) // per_part)
    divisors = (row, along[1], along[0])  # in the order in which the kernel divides by them
    return Plan(
        kernel="disjoint",
        defines=defines,
        grid=blocks * parts * g.groups,
        block=128 * tile.workers,
        shared_bytes=work.shared_bytes(tile, per_part),
        problem=problem_parameters(
            g,
            layout,
            (1, 1, 1, tiles_c),
            _loads_vectors(g, layout, work, tile),
            _outputs_at_once(g, layout, work, tile),
            (along[0], along[1], row, per_part, parts, 0, count, *(magic(divisor) for divisor in divisors), 0),
        ),
        cost=work.compared(tile, g.groups) * work.clocks(tile) * all_positions(g),
        packed_words=sets * work.slot_bytes(tile) // 4,
        packed_a_thread=4 * work.parts,
        tile=tile,
    )


def _deal(work: Work, tile: Tile, groups: int, count: int, device: Device) -> tuple[int, int]:
    """Return how many slots a block has, and how many blocks share the tiles of these.

    Fewer slots make more blocks, each of which loads x again.
    """
    slots, resident = work.slots(tile), device.multiprocessors * tile.min_blocks
    best = None
    for per_part in range(1, slots + 1):
        if not work.fits(tile, per_part, device):
            break
        sets = groups * -(-slots // per_part)
        blocks = max(1, min(resident // sets, -(-count // tile.workers)))
        tiles_each = -(-count // (blocks * tile.workers))
        start = BLOCK_CLOCKS + per_part * work.slot_bytes(tile) / WEIGHT_BYTES_A_CLOCK
        # All workers of a multiprocessor share what bounds them.
        of_block = start + tiles_each * tile.workers * work.tile_clocks(tile, per_part)
        clocks = of_block * -(-sets * blocks // device.multiprocessors)
        if best is None or clocks < best[0]:
            best = clocks, per_part, blocks
    assert best is not None, "tiles of which no slot fits are not proposed"
    return best[1:]


def _refuse(geometry: Geometry, dtype: str, precision: str | None, device: Device) -> str | None:
    if reason := refuse_tensor_cores(dtype, precision, device, wgmma=True):
        return reason
    if reason := refuse_steps(geometry) or refuse_other_kernels(geometry):
        return reason
    if geometry.kernel[2] * 8 > MAX_COLUMNS:
        return f"has all taps along W in one wgmma, at most {MAX_COLUMNS // 8}, got {geometry.kernel[2]}"
    return None


def refuse_other_kernels(geometry: Geometry) -> str | None:
    """Return why taps overlap or leave gaps, if they do."""
    g = geometry
    if g.kernel != g.stride or any(k > 1 and d > 1 for k, d in zip(g.kernel, g.dilation, strict=True)):
        return f"serves kernel = stride, got kernel {g.kernel}, stride {g.stride}, dilation {g.dilation}"
    return None


def _loads_vectors(geometry: Geometry, layout: Layout, work: Work, tile: Tile) -> bool:
    """Whether x is loaded a run of a row at a time or, channels-last, 16 bytes of channels."""
    g, x = geometry, layout.x
    if layout.x_channels_last:
        unit = 16 // work.shape.itemsize
        return layout.x_aligned and g.c_in_per_group % unit == 0 and x[1] == 1 and others_divisible(x, 1, unit)
    first = g.pad_before[2] // g.stride[2]
    whole = g.x_extent[2] % tile.run == 0 and first % tile.run == 0
    return layout.x_aligned and whole and x[4] == 1 and others_divisible(x, 4, tile.run)


def _outputs_at_once(geometry: Geometry, layout: Layout, work: Work, tile: Tile) -> int:
    """Return how many outputs of a row are stored at a time: what 16 bytes take of a run, or a word, or one."""
    shift = geometry.pad_before[2] % geometry.stride[2]
    return outputs_at_once(geometry, layout, work.shape.itemsize, work.at_once(tile), shift)


def outputs_at_once(geometry: Geometry, layout: Layout, itemsize: int, most: int, shift: int = 0) -> int:
    """Return so many outputs of a row, or a word's, or one: what rows are aligned for that begin `shift` before."""
    out = layout.out
    if layout.out_channels_last or not layout.out_aligned or out[4] != 1:
        return 1

    def aligned(count: int) -> bool:
        return geometry.out_extent[2] % count == 0 and shift % count == 0 and others_divisible(out, 4, count)

    return next((count for count in (most, gcd(most, 4 // itemsize)) if aligned(count)), 1)


class Work:
    """The sizes that follow from a problem and a tile; the kernel computes the same ones."""

    def __init__(self, shape: Shape):
        self.shape = shape
        self.parts = 2 if shape.products == 3 else 1
        self.steps = -(-shape.c_in * shape.itemsize // 32)  # along K, of all channels
        self.taps = shape.kernel[0] * shape.kernel[1]

    @classmethod
    def of_problem(cls, geometry: Geometry, dtype: str, precision: str | None, layout: Layout) -> Work:
        return cls(Shape.of_problem(geometry, dtype, precision, layout))

    def columns(self, tile: Tile) -> int:
        return 8 * tile.tiles_c * self.shape.kernel[2]

    def slots(self, tile: Tile) -> int:
        """Return the slots of weights of a group."""
        return -(-self.shape.c_out // (8 * tile.tiles_c)) * self.taps

    def slot_bytes(self, tile: Tile) -> int:
        return self.steps * self.parts * 2 * self.columns(tile) * 16

    def shared_bytes(self, tile: Tile, per_part: int) -> int:
        channels = -(-self.shape.c_out // (8 * tile.tiles_c)) * 8 * tile.tiles_c
        return BARRIER_BYTES + per_part * self.slot_bytes(tile) + 4 * channels

    def fits(self, tile: Tile, per_part: int, device: Device) -> bool:
        """Whether as many blocks as the tile wants share a multiprocessor; each reserves 1 KB on top of its own."""
        room = (device.shared_bytes + 1024) // tile.min_blocks - 1024
        return self.shared_bytes(tile, per_part) <= room

    def runs(self, tile: Tile) -> int:
        """Return the runs of positions of a worker's tile."""
        return ROWS * tile.tiles_m // tile.run

    def at_once(self, tile: Tile) -> int:
        """Return the outputs of a row that are stored at a time, if they are aligned for it."""
        return gcd(16 // self.shape.itemsize, tile.run * self.shape.kernel[2])

    def registers(self, tile: Tile) -> int:
        """Estimate the registers of a thread: a little more than the compiler was seen to need."""
        s, steps = self.shape, self.steps * tile.tiles_m
        sums = self.columns(tile) // 2 * tile.tiles_m
        if s.products == 3:  # two chains, and parts of x for two
            return sums + self.columns(tile) + steps * (25 if tile.ahead else 17) // 2 + 48
        copied = 20 if s.x_channels_last and s.itemsize == 4 and not tile.ahead else 0
        places = 3 * max(0, 2 * tile.tiles_m // tile.run - 2)  # of further runs
        return sums + 4 * steps * (2 if tile.ahead else 1) + 46 + copied + places

    def compared(self, tile: Tile, groups: int) -> float:
        """Return the cost that is compared with other kernels', relative to the estimated time."""
        s, at_once = self.shape, self.at_once(tile)
        in_pieces = not s.out_channels_last and at_once < tile.run * s.kernel[2] and at_once * s.itemsize < 16
        of_groups = OF_GROUPS if groups > 1 and s.out_channels_last else 1
        return COMPARED * of_groups * (OF_PIECES[s.products] if in_pieces and s.itemsize == 4 else 1)

    def clocks(self, tile: Tile) -> float:
        """Estimate a multiprocessor's clocks for a position, with all its outputs."""
        per_part = self.slots(tile)
        return self.tile_clocks(tile, per_part) / (ROWS * tile.tiles_m)

    def tile_clocks(self, tile: Tile, slots: int) -> float:
        """Estimate a multiprocessor's clocks for a worker's tile and so many slots.

        What is done for all of them (multiply, read weights, write the result) takes its time, and what a worker waits
        for is shared by those that wait at the same time.
        """
        s, columns, positions_of_tile = self.shape, self.columns(tile), ROWS * tile.tiles_m
        products = slots * self.steps * s.products * tile.tiles_m  # wgmmas
        channels = min(8 * tile.tiles_c, s.c_out)
        outputs = slots * positions_of_tile * s.kernel[2] * channels * s.itemsize
        x = positions_of_tile * s.c_in * s.itemsize * slots / self.slots(tile)
        # In units of what a store of 32 lanes should fill: sectors of channels, or of eight threads' outputs in a row.
        sectors = 32 / (s.itemsize * channels) if s.out_channels_last else 16 / (s.itemsize * self.at_once(tile))
        lines = 128 / (s.itemsize * channels) if s.out_channels_last and channels < s.c_out else 1
        busiest = max(
            products * columns / 2,
            products * columns / 4 + outputs * max(1, sectors) / SHARED_BYTES_A_CLOCK,
            (outputs * (1 + PART_OF_A_LINE * max(0, lines - 1)) + x) / MEMORY_BYTES_A_CLOCK,
        )
        values = slots * tile.tiles_m * columns / 2  # of a thread
        split = slots * self.steps * tile.tiles_m * 4 * 8 + values * -(-self.steps // CHAIN) if s.products == 3 else 0
        instructions = values * 2.5 + slots * 24 + split * 0.22 + self.steps * tile.tiles_m * 16
        waits = INSTRUCTION_CLOCKS * instructions + (0 if tile.ahead else LOAD_CLOCKS)
        return busiest + waits / (tile.workers * tile.min_blocks)


def tiles(work: Work, device: Device) -> Iterator[Tile]:
    """Yield the tiles that a problem may use. They depend on neither N nor extents, which therefore never recompile."""
    s = work.shape
    eights = -(-s.c_out // 8)
    tiles_of_channels = sorted({-(-eights // parts) for parts in (1, 2, 3, 4, 6, 8, 16)} & set(range(1, 17))) or [16]
    if work.steps > MAX_STEPS[s.itemsize]:
        return
    for (workers, blocks), tiles_m, tiles_c, ahead in itertools.product(
        SHARES, (1, 2), tiles_of_channels, (True, False)
    ):
        tile = Tile(workers, tiles_m, tiles_c, _run(s, tiles_m), ahead, blocks)
        room = min(MAX_REGISTERS, REGISTERS // (128 * workers * blocks) // 8 * 8)
        if work.columns(tile) > MAX_COLUMNS or work.columns(tile) // 2 * tiles_m > MAX_SUMS:
            continue
        if work.registers(tile) <= room and work.fits(tile, 1, device):
            yield tile


def _run(shape: Shape, tiles_m: int) -> int:
    """Return the positions of a thread that follow each other: so many that their outputs in a row make 16 bytes."""
    row = shape.itemsize * shape.kernel[2]
    wanted = 1 if shape.out_channels_last else 16 // gcd(row, 16)
    if not shape.x_channels_last:  # whose loads of a row should not be too short either
        wanted = max(wanted, 4 // shape.itemsize, 2 if shape.out_channels_last else 1)
    return min(wanted, 2 * tiles_m, 4)


@functools.lru_cache(maxsize=1024)
def choose_tile(shape: Shape, device: Device) -> Tile | None:
    """Return the tile with the least estimated clocks, or None if none fits."""
    work = Work(shape)
    return min(tiles(work, device), key=work.clocks, default=None)
