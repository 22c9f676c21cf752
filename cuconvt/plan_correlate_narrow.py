"""Plans of the tensor-core kernel for correlations with few channels a group, ``kernels/correlate_narrow.cu``."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil, exp, gcd, log, prod

from cuconvt.geometry import Geometry
from cuconvt.plan import (
    DTYPE_CODES,
    MAX_GRID,
    PRECISION_CODES,
    Device,
    Ints,
    Layout,
    Plan,
    Refusal,
    at_residue,
    axis_macros,
    problem_parameters,
    refuse_steps,
    refuse_tensor_cores,
)
from cuconvt.plan_copies import whole_pieces
from cuconvt.plan_correlate import reads_need_64_bits, staged_axis
from cuconvt.plan_correlate_gemm import PARTITIONS, REGISTERS, with_margin
from cuconvt.plan_search import remembered
from cuconvt.plan_views import batch_as_depth

ROWS = 16  # of an mma: positions along W
MAX_CHANNELS = 16  # of y a group
MAX_HELD = 60  # registers of a thread for weights
MAX_ACCUMULATORS = 64
MAX_FRAGMENTS_OF_THREE = 64  # of 3xTF32, of whose products the compiler spills some of more
MAX_SPAN = 64  # elements of a row that the taps of a lane reach
MAX_UNROLLED = 700  # mma of a step: more take seconds to compile
THREADS = 1536  # of a multiprocessor, on every device
START_ROWS = 1  # of positions, that a block would take while it starts
MANY = 8  # images
TYPICAL_EXTENTS = {1: (256, 4096), 2: (16, 64, 256), 3: (32, 64, 128)}  # of an axis, by rank

# Rates of a multiprocessor, per clock, that the cost estimate uses, and what it fits; measured on an H200.
MMA_CLOCKS = 1.5
L2_BYTES_A_CLOCK = 40
MEMORY_BYTES_A_CLOCK = 18
INSTRUCTIONS_A_CLOCK = 2.4
OVERLAP = 0.1  # what of the less busy units' time adds to the busiest one's
LATENCY = 3  # clocks until a warp's next instruction
A_ROUND = 8192  # positions of a typical problem's rows, a multiprocessor: of its last round of blocks, half is idle
ROW_CLOCKS = 200  # until a row arrives, as far as other blocks do not hide it
COMPARED = {2: 1.5, 4: 1.12}  # what the estimate is more optimistic than those of the other kernels: of 36 layers
LONG, OF_LONG = 4, 1.25  # taps along W, and what so many take longer in TF32 with one or two axes: of 17 layers


@dataclass(frozen=True)
class Tile:
    """The compile-time shape of a block; the fields are macros of the kernel."""

    warps_d: int
    warps_w: int
    slices: int
    tiles_m: int
    tiles_c: int
    k_steps: int
    stages: int
    hold_weights: bool
    min_blocks: int

    @property
    def block(self) -> int:
        return 32 * self.warps_d * self.warps_w

    @property
    def box_d(self) -> int:
        return self.warps_d * self.slices

    @property
    def box_w(self) -> int:
        return self.warps_w * ROWS * self.tiles_m


def plan_correlate_narrow(
    geometry: Geometry, dtype: str, layout: Layout, precision: str | None, device: Device, tile: Tile | None = None
) -> Plan | Refusal:
    """Propose the tile with the least estimated time, or a given one, or say why the kernel does not serve."""
    name = "correlate_narrow"
    if reason := _refuse(geometry, dtype, layout, precision, device):
        return Refusal(name, reason)
    g, layout = slides_along_h(geometry, layout)
    work = Work.of_problem(g, dtype, precision)
    choice = choose_tile(work, device) if tile is None else (tile, work.typical_cost(tile, device))
    if choice is None:
        return Refusal(name, "no tile fits into the registers and the shared memory")
    tile, cost = choice
    tiles_d, tiles_w = -(-g.x_extent[0] // tile.box_d), -(-g.x_extent[2] // tile.box_w)
    tiles_c = -(-g.c_in_per_group // (8 * tile.tiles_c))
    columns = tiles_d * tiles_w * tiles_c * g.groups * g.n  # of positions, that a block slides along
    runs = _runs(g.x_extent[1], columns, work.depth, device.multiprocessors * tile.min_blocks)
    if columns * runs > MAX_GRID:
        return Refusal(name, f"{columns * runs} blocks are more than a launch takes ({MAX_GRID})")
    x_extents = (g.n, g.c_in, *g.x_extent)
    defines = (
        ("DTYPE", DTYPE_CODES[dtype]),
        ("PRECISION", PRECISION_CODES[precision]),
        *axis_macros(KERNEL=g.kernel, STRIDE=g.stride, DILATION=g.dilation),
        ("WARPS_D", tile.warps_d),
        ("WARPS_W", tile.warps_w),
        ("SLICES", tile.slices),
        ("TILES_M", tile.tiles_m),
        ("TILES_C", tile.tiles_c),
        ("K_STEPS", tile.k_steps),
        ("STAGES", tile.stages),
        ("HOLD_WEIGHTS", int(tile.hold_weights)),
        ("INDEX64", int(reads_need_64_bits(g, layout, (tile.box_d, work.depth, tile.box_w)))),
        ("MIN_BLOCKS", tile.min_blocks),
        ("SHARED_BYTES", work.shared_bytes(tile)),
    )
    of_long = OF_LONG if precision == "tf32" and g.rank < 3 and g.kernel[2] >= LONG else 1
    return Plan(
        kernel=name,
        defines=defines,
        grid=columns * runs,
        block=tile.block,
        shared_bytes=work.shared_bytes(tile),
        problem=problem_parameters(
            g,
            layout,
            (tiles_d, runs, tiles_w, tiles_c),
            whole_pieces(layout.x, x_extents, layout.x_aligned, 2),
        ),
        cost=COMPARED[work.itemsize] * of_long * cost * prod(g.x_extent) * g.groups * g.n,
        tile=tile,
    )


def _runs(extent: int, columns: int, depth: int, resident: int) -> int:
    """Return into how many runs along H columns of positions are cut, of which so many are resident at a time."""

    def rows(runs: int) -> float:
        """Rows of positions that follow each other until the last block is done; it does not wait for a whole round."""
        rounds = columns * runs / resident
        return max(1.0, min(ceil(rounds), rounds + 0.5)) * (-(-extent // runs) + depth - 1 + START_ROWS)

    most = max(1, extent // (2 * depth), min(extent, resident // columns))  # short ones only where blocks are few
    cuts = {-(-extent // -(-extent // runs)) for runs in range(1, most + 1)}  # none is empty
    return min(sorted(cuts), key=rows)


def _refuse(geometry: Geometry, dtype: str, layout: Layout, precision: str | None, device: Device) -> str | None:
    if reason := refuse_tensor_cores(dtype, precision, device):
        return reason
    if geometry.c_out_per_group > MAX_CHANNELS:
        return f"serves at most {MAX_CHANNELS} channels of y a group, got {geometry.c_out_per_group}"
    if not _copies_pieces(geometry, layout, 4 if dtype == "float32" else 8):
        return "needs an aligned y whose rows follow each other without gaps, or are whole pieces of 16 bytes"
    return refuse_steps(geometry)


def slides_along_h(geometry: Geometry, layout: Layout) -> tuple[Geometry, Layout]:
    """Give idle axes a use: the batch becomes the D axis, and of a 1-D problem, or one without H, D becomes H."""
    g, layout = batch_as_depth(geometry, layout)
    if (g.kernel[1], g.stride[1], g.dilation[1], g.pad_before[1], g.x_extent[1], g.out_extent[1]) != (1, 1, 1, 0, 1, 1):
        return g, layout

    def turn(values: Ints) -> tuple[int, int, int]:
        d, h, w = values
        return (h, d, w)

    g = replace(
        g,
        x_extent=turn(g.x_extent),
        kernel=turn(g.kernel),
        stride=turn(g.stride),
        dilation=turn(g.dilation),
        pad_before=turn(g.pad_before),
        pad_after=turn(g.pad_after),
        output_padding=turn(g.output_padding),
        out_extent=turn(g.out_extent),
    )
    x, weight, out = ((*strides[:2], *turn(strides[2:])) for strides in (layout.x, layout.weight, layout.out))
    return g, replace(layout, x=x, weight=weight, out=out)


def _copies_pieces(geometry: Geometry, layout: Layout, piece: int) -> bool:
    """Return whether rows of y may be copied by aligned pieces, some of which hold elements of two rows."""
    g, (*strides, stride_w) = geometry, layout.out
    extents = (g.n, g.c_out, *g.out_extent)
    others = [
        (stride, prod(extents[axis + 1 :])) for axis, stride in enumerate(strides) if extents[axis] > 1
    ]  # and what it is without gaps
    no_gaps = all(stride == dense for stride, dense in others)
    whole = extents[4] % piece == 0 and all(stride >= 0 and stride % piece == 0 for stride, _ in others)
    return layout.out_aligned and stride_w == 1 and (no_gaps or whole)


@dataclass(frozen=True)
class Work:
    """What a tile's choice depends on, everything but N and extents, and the sizes that follow; the kernel computes the
    same ones."""

    rank: int
    kernel: Ints
    stride: Ints
    dilation: Ints
    c_in: int  # of a group
    c_out: int
    itemsize: int
    products: int

    @classmethod
    def of_problem(cls, geometry: Geometry, dtype: str, precision: str | None) -> Work:
        g = geometry
        return cls(
            g.rank,
            g.kernel,
            g.stride,
            g.dilation,
            g.c_in_per_group,
            g.c_out_per_group,
            4 if dtype == "float32" else 2,
            3 if precision == "tf32x3" else 1,
        )

    @cached_property
    def elements(self) -> int:
        """Elements of a word."""
        return 4 // self.itemsize

    @cached_property
    def piece(self) -> int:
        """Elements that are copied at a time."""
        return 16 // self.itemsize

    @cached_property
    def depth(self) -> int:
        """Positions along H that are under way."""
        return (self.kernel[1] - 1) * self.dilation[1] // self.stride[1] + 1

    @cached_property
    def phases(self) -> int:
        """Rows of y for each position along H."""
        return min(self.kernel[1], self.stride[1] // gcd(self.stride[1], self.dilation[1]))

    @cached_property
    def span(self) -> int:
        """Elements of a row that the taps of two positions reach."""
        return self.stride[2] + (self.kernel[2] - 1) * self.dilation[2] + 1

    @cached_property
    def reads(self) -> int:
        """Words of a row that they read."""
        halves = (0, self.stride[2])
        taps = range(self.kernel[2])
        return len({(half + tap * self.dilation[2]) // self.elements for half in halves for tap in taps})

    @cached_property
    def steps_w(self) -> int:
        return -(-self.kernel[2] // self.elements)

    @cached_property
    def words(self) -> int:
        """Words of a weight fragment that a lane holds."""
        return 4 if self.products == 3 else 2

    def fragments(self, tile: Tile) -> int:
        return self.kernel[0] * self.kernel[1] * self.steps_w * tile.k_steps * tile.tiles_c

    def planes(self, slices: int) -> int:
        """Planes of y that so many positions along D reach, and those in between."""
        return staged_axis(self.kernel[0], self.stride[0], self.dilation[0], slices)[2]

    def pieces(self, tile: Tile) -> int:
        """Pieces of a staged row."""
        span = (tile.box_w - 1) * self.stride[2] + (self.kernel[2] - 1) * self.dilation[2] + 1
        read_on = self.elements == 2 and self.span % 2 == 0
        return -(-(span + read_on + self.piece - 1) // self.piece)

    def stage_words(self, tile: Tile) -> int:
        pieces = self.pieces(tile)
        pieces = at_residue(pieces, 4, 8) if self.elements == 2 else pieces
        return self.planes(tile.box_d) * 8 * tile.k_steps * 4 * pieces

    def shared_bytes(self, tile: Tile) -> int:
        return 4 * (self.fragments(tile) * 32 * self.words + tile.stages * self.stage_words(tile))

    def accumulators(self, tile: Tile) -> int:
        return 4 * self.depth * tile.slices * tile.tiles_m * tile.tiles_c

    def registers(self, tile: Tile, device: Device) -> int:
        """Estimate the registers of a thread: a little more than the compiler was seen to need."""
        held = self.fragments(tile) * self.words if tile.hold_weights else 0
        rows = self.steps_w * 4
        count = self.accumulators(tile) + held + rows + (2 + tile.tiles_m) * self.reads + 70
        count += 12 * (tile.k_steps - 1) + 8 * (tile.tiles_c - 1)
        if tile.slices > 1 and not tile.hold_weights:
            # The compiler keeps weights for the next plane that the same taps meet.
            taps = -(-self.kernel[1] // self.phases) * (1.5 if self.kernel[0] > 1 else 1)
            count += max(0, int(taps * self.steps_w * tile.k_steps * tile.tiles_c * self.words) - 48)
        if self.products == 3:
            # It computes far ahead.
            count += rows + 60 + (60 if not tile.hold_weights else 0)
        return with_margin(count, device)

    def fits(self, tile: Tile, device: Device) -> bool:
        """Whether a multiprocessor holds the blocks, each of which reserves 1 KB of shared memory on top of its own."""
        warps = -(-tile.block // 32 * tile.min_blocks // PARTITIONS)
        by_shared = (device.shared_bytes + 1024) // (self.shared_bytes(tile) + 1024)
        return self.registers(tile, device) <= min(255, REGISTERS // warps // 8 * 8) and tile.min_blocks <= by_shared

    def typical_cost(self, tile: Tile, device: Device) -> float:
        """Return the clocks of a position, all channels of a group, as the geometric mean over typical extents."""
        logarithms = 0.0
        extents = TYPICAL_EXTENTS[self.rank]
        for typical in extents:
            d, w = typical if self.rank == 3 else MANY, typical
            boxes = -(-d // tile.box_d) * -(-w // tile.box_w)
            under_way = tile.min_blocks * tile.box_d * tile.box_w
            logarithms += log(boxes / (d * w) * (1 + under_way / A_ROUND))
        tiles_c = -(-self.c_in // (8 * tile.tiles_c))
        return self.clocks(tile) * tiles_c * exp(logarithms / len(extents))

    def clocks(self, tile: Tile) -> float:
        """Estimate a multiprocessor's clocks for a row of one block's positions, among other blocks."""
        warps, channels = tile.block // 32, 8 * tile.k_steps
        # Of all warps: mma, sixteens of positions of eight channels of a row that are loaded, and copied pieces.
        products = self.fragments(tile) * self.products * tile.slices * tile.tiles_m * warps
        loaded = self.phases * self.planes(tile.slices) * tile.k_steps * warps
        lines = self.phases * self.planes(tile.box_d)
        pieces = lines * self.pieces(tile)
        weights = 0 if tile.hold_weights else products / self.products
        a_load = 2 * self.reads * (9 if self.products == 3 else 4 if self.itemsize == 4 else 3)
        a_load += 4 * self.steps_w * (self.elements - 1) + 12
        a_warp = tile.slices * tile.tiles_m * tile.tiles_c * (16 + 4 * self.depth) + 50 * self.phases
        instructions = loaded * (tile.tiles_m * a_load + 12) + 1.5 * products + weights
        instructions += warps * (7 * -(-channels * pieces // tile.block) + a_warp)
        # A load takes two passes, more or less by how rows are aligned. Rows start and end within sectors of memory.
        shared = loaded * tile.tiles_m * 2 * self.reads * 2 + weights * self.words / 2 + channels * pieces / 8
        l2 = min(self.c_out, channels) * (16 * pieces + 32 * lines)
        results = min(self.c_in, 8 * tile.tiles_c)
        memory = tile.box_d * tile.box_w * (self.c_out * prod(self.stride) + results) * self.itemsize
        units = (
            products * MMA_CLOCKS,
            shared,
            l2 / L2_BYTES_A_CLOCK,
            memory / MEMORY_BYTES_A_CLOCK,
            instructions / INSTRUCTIONS_A_CLOCK,
        )
        busy = max(units) + OVERLAP * (sum(units) - max(units))
        waits = (instructions / warps * LATENCY + ROW_CLOCKS * self.phases / (tile.stages - 1)) / tile.min_blocks
        return float((busy**3 + waits**3) ** (1 / 3))


@remembered(Tile)
def choose_tile(work: Work, device: Device) -> tuple[Tile, float] | None:
    """Return the best tile for typical extents, with its clocks a position."""
    costs = ((work.typical_cost(tile, device), tile) for tile in tiles(work, device))
    cost, tile = min(costs, key=lambda pair: pair[0], default=(0.0, None))
    return None if tile is None else (tile, cost)


def tiles(work: Work, device: Device) -> Iterator[Tile]:
    """Yield the tiles that a problem may use. They depend on neither N nor extents, which therefore never recompile."""
    if work.span > MAX_SPAN or work.depth > MAX_SPAN:
        return
    k_steps = -(-work.c_out // 8)
    eights = sorted({1, min(2, -(-work.c_in // 8))})
    warps = ((1, 1), (1, 2), (1, 3), (1, 4), (2, 1), (2, 2), (2, 3), (4, 1), (1, 8), (2, 4))
    for (warps_d, warps_w), slices, tiles_m, tiles_c, stages, hold, blocks in itertools.product(
        warps, (1, 2, 4), (1, 2), eights, (2, 3, 4), (True, False), range(1, 7)
    ):
        tile = Tile(warps_d, warps_w, slices, tiles_m, tiles_c, k_steps, stages, hold, blocks)
        if work.products == 3 and (k_steps > 1 or tiles_c > 1 or work.fragments(tile) > MAX_FRAGMENTS_OF_THREE):
            continue
        if hold and work.fragments(tile) * work.words > MAX_HELD:
            continue
        if slices * tiles_m > 2 and tiles_c * k_steps > 1 and work.kernel[0] > 1:  # some spilled
            continue
        if work.accumulators(tile) > MAX_ACCUMULATORS:
            continue
        if work.fragments(tile) * work.products * slices * tiles_m > MAX_UNROLLED:
            continue
        if tile.block * blocks <= THREADS and work.fits(tile, device):
            yield tile
