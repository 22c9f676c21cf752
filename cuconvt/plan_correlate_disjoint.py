"""Plans of the kernel for correlations with kernel = stride on Hopper, ``kernels/correlate_disjoint.cu``.

The adjoint of `cuconvt.plan_disjoint`, with its runs of positions and its weights that stay in shared memory.
"""

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
    axis_macros,
    magic,
    positions_reached,
    problem_parameters,
    refuse_steps,
    refuse_tensor_cores,
)
from cuconvt.plan_copies import channels_stored, others_divisible
from cuconvt.plan_correlate_wgmma import as_read
from cuconvt.plan_disjoint import (
    BARRIER_BYTES,
    MAX_REGISTERS,
    REGISTERS,
    SHARES,
    Shape,
    outputs_at_once,
    refuse_other_kernels,
)
from cuconvt.plan_few_channels import FEW
from cuconvt.plan_wgmma_sizes import MAX_COLUMNS, ROWS

MAX_STEPS = 16  # of a unit
MAX_WORDS_W = 8  # that a position reads of a channel, along W
CHUNKS = (1, 2, 3, 4, 6, 8)  # times the channels of the smallest unit

# Of an H200's multiprocessor, fitted to tiles of 54 problems.
MEMORY_BYTES_A_CLOCK = 29.8
READ_AGAIN = 1 / 3  # what it takes to read y from L2, for further tiles of channels
UNIT_CLOCKS = 785  # in which a worker waits for a unit and its products
WORD_CLOCKS = 9  # likewise, for each word that a thread loads
SPLIT_CLOCKS = 7.6  # and splits
SUM_CLOCKS = 33  # likewise, for each sum that it stores
COMPARED = 0.69  # the other kernels' estimates are as much more optimistic
WIDE, OF_WIDE_ROWS = 256, 2.1  # channels of x or y, and how much longer rows of 16 bits take where there are as many
OF_FEW_LAST = 2.4  # likewise channels-last, with few channels of y: most of a unit is zeros
OF_GROUPS = 1.6  # and with groups, in five layers of up to eight channels


@dataclass(frozen=True)
class Tile:
    """The compile-time shape of a worker's tile; the fields are macros of the kernel."""

    workers: int
    tiles_m: int
    tiles_c: int
    chunk: int
    run: int
    min_blocks: int


def plan_correlate_disjoint(
    geometry: Geometry, dtype: str, layout: Layout, precision: str | None, device: Device, tile: Tile | None = None
) -> Plan | Refusal:
    """Propose the tile with the least estimated time, or a given one, or say why the kernel does not serve."""
    if reason := _refuse(geometry, dtype, layout, precision, device):
        return Refusal("correlate_disjoint", reason)
    g, read = as_read(geometry, layout)
    work = Work.of_problem(g, dtype, precision, read)
    if tile is None:
        tile = choose_tile(work.shape, device)
    if tile is None or not work.fits(tile, device):
        return Refusal("correlate_disjoint", f"no tile with all its weights fits into {device.shared_bytes} bytes")
    row = -(-g.out_extent[2] // tile.run)  # runs
    runs = g.n * g.out_extent[0] * g.out_extent[1] * row
    count = -(-runs // work.runs(tile))  # of a worker's tiles
    tiles_c = work.tiles_c(tile)
    sets = g.groups * tiles_c
    blocks = max(1, min(device.multiprocessors * tile.min_blocks // sets, -(-count // tile.workers)))
    if (count + 2 * blocks * tile.workers) * work.runs(tile) >= INDEX_LIMIT:
        return Refusal("correlate_disjoint", f"counts positions in 31 bits, got {g.n * prod(g.out_extent)}")
    if positions_reached(geometry, (1, 1, tile.run)) >= INDEX_LIMIT:
        return Refusal("correlate_disjoint", f"counts positions along an axis in 31 bits, got {geometry.out_extent}")
    defines = (
        ("DTYPE", DTYPE_CODES[dtype]),
        ("PRECISION", PRECISION_CODES[precision]),
        *axis_macros(KERNEL=g.kernel),
        ("WORKERS", tile.workers),
        ("TILES_M", tile.tiles_m),
        ("TILES_C", tile.tiles_c),
        ("CHUNK", tile.chunk),
        ("RUN", tile.run),
        ("X_CHANNELS_LAST", int(read.x_channels_last)),
        ("OUT_CHANNELS_LAST", int(read.out_channels_last)),
        ("OUT_VECTOR", channels_stored(g, read, work.shape.itemsize)),
        ("MIN_BLOCKS", tile.min_blocks),
    )
    divisors = (row, g.out_extent[1], g.out_extent[0])  # in the order in which the kernel divides by them
    return Plan(
        kernel="correlate_disjoint",
        defines=defines,
        grid=blocks * sets,
        block=128 * tile.workers,
        shared_bytes=work.shared_bytes(tile),
        problem=problem_parameters(
            g,
            read,
            (1, 1, 1, tiles_c),
            _loaded_at_once(g, read, work, tile),
            _outputs_at_once(g, read, work, tile),
            (*g.out_extent[:2], row, work.units(tile), 0, 0, count, *(magic(divisor) for divisor in divisors), 0),
        ),
        cost=work.compared(g.groups) * work.clocks(tile) * prod(g.out_extent) * g.groups * g.n,
        packed_words=sets * work.units(tile) * work.slot_bytes(tile) // 4,
        packed_a_thread=4 * work.parts,
        tile=tile,
    )


def _refuse(geometry: Geometry, dtype: str, layout: Layout, precision: str | None, device: Device) -> str | None:
    if reason := refuse_tensor_cores(dtype, precision, device, wgmma=True):
        return reason
    if reason := refuse_steps(geometry) or refuse_other_kernels(geometry):
        return reason
    itemsize, along_w = 4 if dtype == "float32" else 2, geometry.kernel[2]
    if layout.out_channels_last:
        return None
    if along_w * itemsize % 4:
        return f"loads 16-bit numbers of a row in pairs of taps, got {along_w} along W"
    if along_w * itemsize > 4 * MAX_WORDS_W:
        return f"loads at most {MAX_WORDS_W} words of a row for a position, got {along_w * itemsize // 4}"
    return None


def _loaded_at_once(geometry: Geometry, layout: Layout, work: Work, tile: Tile) -> int:
    """Return how many words of x are loaded at a time: 4 of channels, up to 4 of a run or position in a row, or 0."""
    g, x, elements = geometry, layout.x, 4 // work.shape.itemsize

    def aligned(axis: int, extents: Ints, words: int) -> bool:
        count = words * elements
        whole = layout.x_aligned and all(extent % count == 0 for extent in extents)
        return whole and x[axis] == 1 and others_divisible(x, axis, count)

    if layout.x_channels_last:
        return 4 if aligned(1, (g.c_in_per_group,), 4) else 0
    of_position = g.kernel[2] // elements
    counts = gcd(4, tile.run * of_position), gcd(4, of_position)
    return next((count for count in counts if aligned(4, (g.x_extent[2], g.pad_before[2]), count)), 0)


def _outputs_at_once(geometry: Geometry, layout: Layout, work: Work, tile: Tile) -> int:
    """Return how many outputs of a row are stored at a time: those of a run, or a word, or one."""
    itemsize = work.shape.itemsize
    return outputs_at_once(geometry, layout, itemsize, gcd(16 // itemsize, tile.run))


class Work:
    """The sizes that follow from a problem and a tile; the kernel computes the same ones."""

    def __init__(self, shape: Shape):
        self.shape = shape
        self.parts = 2 if shape.products == 3 else 1
        self.smallest = 64 // shape.itemsize if shape.x_channels_last else 8  # channels of a unit

    @classmethod
    def of_problem(cls, geometry: Geometry, dtype: str, precision: str | None, layout: Layout) -> Work:
        return cls(Shape.of_problem(geometry, dtype, precision, layout))

    def steps(self, tile: Tile) -> int:
        """Return the steps along K of a unit."""
        return tile.chunk * self.shape.kernel[2] * self.shape.itemsize // 32

    def units(self, tile: Tile) -> int:
        return self.shape.kernel[0] * self.shape.kernel[1] * -(-self.shape.c_in // tile.chunk)

    def tiles_c(self, tile: Tile) -> int:
        return -(-self.shape.c_out // (8 * tile.tiles_c))

    def slot_bytes(self, tile: Tile) -> int:
        return self.steps(tile) * self.parts * 2 * 8 * tile.tiles_c * 16

    def shared_bytes(self, tile: Tile) -> int:
        return BARRIER_BYTES + self.units(tile) * self.slot_bytes(tile) + 4 * 8 * tile.tiles_c

    def fits(self, tile: Tile, device: Device) -> bool:
        """Whether as many blocks as the tile wants share a multiprocessor; each reserves 1 KB on top of its own."""
        return self.shared_bytes(tile) <= (device.shared_bytes + 1024) // tile.min_blocks - 1024

    def runs(self, tile: Tile) -> int:
        """Return the runs of positions of a worker's tile."""
        return ROWS * tile.tiles_m // tile.run

    def registers(self, tile: Tile) -> int:
        """Estimate the registers of a thread: a little more than the compiler was seen to need."""
        a = 4 * self.steps(tile) * tile.tiles_m
        sums = 4 * tile.tiles_c * tile.tiles_m
        if self.shape.products == 3:  # two chains, and parts of x for two
            return sums + 8 * tile.tiles_c + 2 * a + 32 + 48
        if self.shape.itemsize == 2:
            return sums + (a * 11 // 4 + 52 if self.shape.x_channels_last else 3 * a + 44 + 2 * tile.run)
        return sums + 2 * a + 48

    def compared(self, groups: int) -> float:
        """Return the cost that is compared with other kernels', relative to the estimated time."""
        s = self.shape
        compared = COMPARED * (OF_GROUPS if groups > 1 else 1)
        if s.itemsize == 4:
            return compared
        if s.x_channels_last:
            return compared * (OF_FEW_LAST if s.c_in <= FEW else 1)
        return compared * (OF_WIDE_ROWS if max(s.c_in, s.c_out) >= WIDE else 1)

    def clocks(self, tile: Tile) -> float:
        """Estimate a multiprocessor's clocks for a position, with all its outputs.

        What is done for all workers (multiply, read y, write the result) takes its time, and what a worker waits for is
        shared by those that wait at the same time.
        """
        s, tiles_c = self.shape, self.tiles_c(tile)
        units, steps = self.units(tile) * tiles_c, self.steps(tile)
        rows, columns = ROWS * tile.tiles_m, 8 * tile.tiles_c
        products = units * steps * s.products * tile.tiles_m  # wgmmas
        read, written = rows * prod(s.kernel) * s.c_in * s.itemsize, rows * s.c_out * s.itemsize
        memory = (read * (1 + READ_AGAIN * (tiles_c - 1)) + written) / MEMORY_BYTES_A_CLOCK
        words = units * steps * tile.tiles_m * 4  # of a thread
        waits = units * UNIT_CLOCKS + words * (WORD_CLOCKS + (SPLIT_CLOCKS if s.products == 3 else 0))
        waits += tiles_c * columns / 2 * tile.tiles_m * SUM_CLOCKS
        return (max(products * columns / 2, memory) + waits / (tile.workers * tile.min_blocks)) / rows


def tiles(work: Work, device: Device) -> Iterator[Tile]:
    """Yield the tiles that a problem may use. They depend on neither N nor extents, which therefore never recompile."""
    s = work.shape
    eights = -(-s.c_out // 8)
    tiles_of_channels = sorted({-(-eights // parts) for parts in (1, 2, 3, 4, 6, 8)} & set(range(1, 17))) or [16]
    chunks = [work.smallest * times for times in CHUNKS if times == 1 or work.smallest * times < s.c_in + work.smallest]
    for (workers, blocks), tiles_m, tiles_c, chunk in itertools.product(SHARES, (1, 2), tiles_of_channels, chunks):
        tile = Tile(workers, tiles_m, tiles_c, chunk, _run(s, tiles_m), blocks)
        room = min(MAX_REGISTERS, REGISTERS // (128 * workers * blocks) // 8 * 8)
        if work.steps(tile) > MAX_STEPS or 8 * tiles_c > MAX_COLUMNS:
            continue
        if work.registers(tile) <= room and work.fits(tile, device):
            yield tile


def _run(shape: Shape, tiles_m: int) -> int:
    """Return the positions of a thread that follow each other: so many that they read 16 bytes of a row."""
    if shape.x_channels_last:
        wanted = 1 if shape.out_channels_last else 16 // shape.itemsize
    else:
        wanted = 16 // gcd(shape.itemsize * shape.kernel[2], 16)
    return min(wanted, 2 * tiles_m, 4)


@functools.lru_cache(maxsize=1024)
def choose_tile(shape: Shape, device: Device) -> Tile | None:
    """Return the tile with the least estimated clocks, or None if none fits."""
    work = Work(shape)
    return min(tiles(work, device), key=work.clocks, default=None)
