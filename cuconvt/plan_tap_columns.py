"""Plans of the tensor-core kernel for few output channels, ``kernels/tap_columns.cu``."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import inf, prod

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
    all_positions,
    at_residue,
    axis_macros,
    needs_64_bits,
    positions,
    problem_parameters,
    refuse_phases,
    refuse_steps,
    refuse_taps,
    refuse_tensor_cores,
    round_up,
)
from cuconvt.plan_copies import copied_bytes, others_divisible
from cuconvt.plan_few_channels import FEW
from cuconvt.plan_search import remembered
from cuconvt.plan_views import batch_as_axis

LEAST_IN = 16  # channels of a group
MOST_COLUMNS = 512
K_BLOCK = 16  # input channels of a step
FOUR = 4  # positions along W that stay together
WARP_POSITIONS = 32
WARPS_M, WARPS_N = (2, 4, 8), range(1, 9)  # of a block along positions and along columns
MAX_WARPS = 16
TILES_N = {1: 12, 3: 6}  # groups of eight columns that a warp owns at most, by products
# Registers with which the compiler does not spill, and more for each of those groups: by bytes and products.
NEEDED = {(2, 1): (84, 8), (4, 1): (84, 12), (4, 3): (104, 5)}
LONG_ROW, LONGEST_ROW, OF_LONG_ROW = 8, 16, 5  # sums of a thread, of which, if more, each takes so many more registers
OF_OTHER_SPLIT = 46  # what three groups, and five and more, take more in 3xTF32
OF_BLACKWELL = {1: 16, 3: 48}  # what the compiler for data-centre Blackwell takes more, by products
K_BLOCKS = (4, 2, 1)  # steps whose weights may come at a time
REGISTERS = 65536  # of a multiprocessor
MAX_REGISTERS = 255  # of a thread
WARP_UNIT = 128  # threads, of which the compiler counts whole ones
MAX_BLOCKS, MAX_THREADS = 8, 1536  # of a multiprocessor
BLOCK_BYTES = 64  # of shared memory for what a block works on
WIDTHS = (8, 12, 16, 20, 24, 28, 32, 40, 48, 64, 96, 128, 192, 256)  # of boxes that cut rows

# What the cost estimate uses, in clocks, instructions and bytes of a multiprocessor.
MMA_CLOCKS = 2.3
ISSUED = 3.0  # instructions a clock
LATENCY = 1000  # of a read of x
L2_BYTES, BYTES = 33, 12.2  # a clock
STEP_CLOCKS, STAGE_CLOCKS = 220, 850  # of a box and of a stage of weights: barriers and waits
BLOCK_CLOCKS = 9000  # of a block: its weights, its first reads
AROUND, OF_PARTS = 45, {(2, 1): 0, (4, 1): 62, (4, 3): 130}  # instructions around products, and to round or split x
COLUMN, OUTPUT, SUM_ALONE = 0.34, 48, 1.2
POWER = 2.4
# The other kernels' estimates are as much more optimistic, by rank: of 39 layers in each precision and layout. Of that,
# in rows of three axes with a stride: of 4.
COMPARED, VOLUMES_IN_ROWS = {1: 0.6, 2: 0.35, 3: 0.75}, 0.84
# A typical problem, by rank: N and the extents of x along D, H and W, of which one may be the batch (`batch_as_axis`).
TYPICAL = {1: (1, (16, 1, 2048)), 2: (1, (128, 8, 128)), 3: (2, (48, 48, 48))}


@dataclass(frozen=True)
class Tile:
    """The compile-time shape of a block; the fields are macros of the kernel."""

    warps_m: int
    warps_n: int
    tiles_n: int
    k_blocks: int  # blocks of 16 input channels whose weights come at a time; 0: all stay

    @property
    def block(self) -> int:
        return 32 * self.warps_m * self.warps_n

    @property
    def positions(self) -> int:
        return WARP_POSITIONS * self.warps_m


def plan_tap_columns(
    geometry: Geometry, dtype: str, layout: Layout, precision: str | None, device: Device, tile: Tile | None = None
) -> Plan | Refusal:
    """Propose the tile with the least estimated time, or a given one, or say why the kernel does not serve."""
    if reason := _refuse(geometry, dtype, precision, device):
        return Refusal("tap_columns", reason)
    g, layout = batch_as_axis(geometry, layout)
    work = Work.of_problem(g, dtype, precision, device)
    found = choose_tile(work, device) if tile is None else (tile, work.typical_clocks(tile, device))
    if found is None:
        return Refusal("tap_columns", f"no tile fits into {device.shared_bytes} bytes of shared memory")
    tile, clocks = found
    _, box, parts = work.best_box(tile, device, g.x_extent, max(1, positions(g, 0)), g.n * g.groups)
    tiles = (parts, *work.tiles(box, g.x_extent))
    grid = prod(tiles) * g.groups * g.n
    if grid > MAX_GRID:
        return Refusal("tap_columns", f"{grid} blocks are more than a launch takes ({MAX_GRID})")
    defines = (
        ("DTYPE", DTYPE_CODES[dtype]),
        ("PRECISION", PRECISION_CODES[precision]),
        *axis_macros(KERNEL=g.kernel, STRIDE=g.stride, DILATION=g.dilation),
        ("CHANNELS_OUT", work.c_out),
        ("WARPS_M", tile.warps_m),
        ("WARPS_N", tile.warps_n),
        ("TILES_N", tile.tiles_n),
        ("APART", work.apart(tile)),
        ("WEIGHTS_STAY", int(not tile.k_blocks)),
        ("K_BLOCKS", max(1, tile.k_blocks)),
        ("X_CHANNELS_LAST", int(layout.x_channels_last)),
        ("OUT_CHANNELS_LAST", int(layout.out_channels_last)),
        ("SHIFT_W", work.shift_w),
        ("OUT_VECTOR", out_vector := _elements_stored(work, layout)),
        ("INDEX64", int(needs_64_bits(g, layout, (tile.positions,) * 3))),
        ("MIN_BLOCKS", work.blocks_by_registers(tile)),
    )
    compared = COMPARED[work.rank]
    if work.rank == 3 and max(g.stride) > 1 and not layout.x_channels_last:
        compared *= VOLUMES_IN_ROWS
    return Plan(
        kernel="tap_columns",
        defines=defines,
        grid=grid,
        block=tile.block,
        shared_bytes=work.shared_bytes(tile, box),
        problem=problem_parameters(
            g,
            layout,
            (*tiles, 1),
            _reads_four(g, layout, work.itemsize),
            _stores_whole(g, layout, out_vector),
            box=(*box, *(0,) * 8),
        ),
        cost=compared * clocks * all_positions(geometry),
        packed_words=g.groups * work.weight_words(tile),
        packed_a_thread=work.fragment_words,
        tile=tile,
    )


def candidates(geometry: Geometry, dtype: str, layout: Layout, precision: str | None, device: Device) -> Iterator[Plan]:
    """Yield a plan for every tile that fits, among them the one that is proposed."""
    if _refuse(geometry, dtype, precision, device):
        return
    turned, _ = batch_as_axis(geometry, layout)
    for tile in tiles(Work.of_problem(turned, dtype, precision, device), device):
        plan = plan_tap_columns(geometry, dtype, layout, precision, device, tile)
        if isinstance(plan, Plan):
            yield plan


def _refuse(geometry: Geometry, dtype: str, precision: str | None, device: Device) -> str | None:
    if reason := refuse_tensor_cores(dtype, precision, device) or refuse_steps(geometry):
        return reason
    g, c_in, c_out = geometry, geometry.c_in_per_group, geometry.c_out_per_group
    if c_out > FEW:
        return f"serves at most {FEW} output channels a group, got {c_out}"
    if c_in < LEAST_IN:
        return f"serves at least {LEAST_IN} input channels a group, got {c_in}"
    if g.taps == 1:
        return "serves kernels of several taps"
    if g.taps * c_out > MOST_COLUMNS:
        return f"holds at most {MOST_COLUMNS} taps x output channels, got {g.taps * c_out}"
    return refuse_taps(g) or _refuse_beyond(g) or refuse_phases(g)


def _refuse_beyond(geometry: Geometry) -> str | None:
    """Return why outputs may lie beyond a box: output_padding stays below the stride or the dilation."""
    g = geometry
    for axis in (1, 2) if g.rank == 3 else (2,):  # H and W, as the kernel has them
        span = (g.kernel[axis] - 1) * g.dilation[axis]
        furthest = (span + max(g.stride[axis], g.dilation[axis]) - 1) // g.stride[axis]
        if furthest > span // g.stride[axis] + 1:
            return f"a box ends one position beyond all taps, which dilation {g.dilation[axis]} may exceed"
    return None


def _reads_four(geometry: Geometry, layout: Layout, itemsize: int) -> bool:
    """Whether x may be read four positions of a row, or four channels of a position, at a time."""
    g = geometry
    if layout.x_channels_last:
        copied = copied_bytes(layout.x, layout.x_aligned, g.c_in_per_group, g.groups, itemsize)
        return copied >= 4 * itemsize and g.c_in_per_group % 4 == 0
    aligned = layout.x_aligned and layout.x[4] == 1 and others_divisible(layout.x, 4, 4)
    return aligned and g.x_extent[2] % 4 == 0  # a view may end before the rows in memory do


def _elements_stored(work: Work, layout: Layout) -> int:
    """Return how many elements of the result a store writes where they are aligned."""
    row = work.stride[2] * (work.c_out if layout.out_channels_last else 1)
    return next((n for n in (8, 4, 2) if n * work.itemsize <= 16 and row % n == 0), 1)


def _stores_whole(geometry: Geometry, layout: Layout, elements: int) -> bool:
    """Whether so many elements of the result are next to each other in memory, at multiples of their size."""
    g, last = geometry, layout.out_channels_last
    if last:
        is_next = layout.out[1] == 1 and layout.out[4] == g.c_out == g.c_out_per_group
        others = (layout.out[0], *layout.out[2:4])
    else:
        is_next, others = layout.out[4] == 1, layout.out[:4]
    return layout.out_aligned and is_next and not any(stride % elements for stride in others)


@remembered(Tile)
def choose_tile(work: Work, device: Device) -> tuple[Tile, float] | None:
    """Return the best tile for typical extents, with its clocks a position."""
    costs = ((work.typical_clocks(tile, device), tile) for tile in tiles(work, device))
    clocks, tile = min(costs, key=lambda pair: pair[0], default=(inf, None))
    return None if tile is None or clocks == inf else (tile, clocks)


def tiles(work: Work, device: Device) -> Iterator[Tile]:
    """Yield the tiles that fit. They depend on neither N nor extents, which therefore never recompile."""
    eights = -(-work.columns // 8)
    for warps_m, warps_n in itertools.product(WARPS_M, WARPS_N):
        tiles_n = -(-eights // warps_n)
        idle = warps_n > 1 and tiles_n * (warps_n - 1) >= eights
        if idle or tiles_n > TILES_N[work.products] or warps_m * warps_n > MAX_WARPS:
            continue
        # Weights that come again for each box are slower: they stay if they fit, beside columns of whole boxes.
        for k_blocks in (0, *(count for count in K_BLOCKS if count < work.blocks_of_channels)):
            tile = Tile(warps_m, warps_n, tiles_n, k_blocks)
            if work.fits(tile, work.least_box, device):
                yield tile
                break


def _offset(back: int, stride: int) -> int:
    """Return `offset_w` of the kernel, of padding modulo stride less a tap's distance."""
    return (back + -back % stride) // stride


@dataclass(frozen=True)
class Work:
    """What a tile's choice depends on: everything but N, extents and alignment; and the sizes that follow."""

    rank: int
    kernel: Ints
    stride: Ints
    dilation: Ints
    c_in: int  # per group
    c_out: int
    shift_w: int  # padding modulo stride along W
    itemsize: int
    products: int
    more_registers: int  # of this device's compiler

    @classmethod
    def of_problem(cls, geometry: Geometry, dtype: str, precision: str | None, device: Device) -> Work:
        g = geometry
        itemsize, products = 4 if dtype == "float32" else 2, 3 if precision == "tf32x3" else 1
        channels = g.c_in_per_group, g.c_out_per_group
        shift_w = g.pad_before[2] % g.stride[2]
        more_registers = OF_BLACKWELL[products] if device.compute_capability // 10 == 10 else 0
        return cls(g.rank, g.kernel, g.stride, g.dilation, *channels, shift_w, itemsize, products, more_registers)

    # Sizes; the kernel computes the same ones.

    @cached_property
    def columns(self) -> int:
        return prod(self.kernel) * self.c_out

    @cached_property
    def blocks_of_channels(self) -> int:
        return -(-self.c_in // K_BLOCK)

    @cached_property
    def steps(self) -> int:
        """Instructions along a block of channels."""
        return 1 if self.itemsize == 2 else 2

    @cached_property
    def fragment_words(self) -> int:
        """Words of weights of a lane, of eight columns and a block of channels."""
        return 2 * self.steps * (2 if self.products == 3 else 1)

    @cached_property
    def reach(self) -> Ints:
        """How many positions back taps read, along each axis."""
        axes = zip(self.kernel, self.stride, self.dilation, strict=True)
        return tuple((k - 1) * d // s for k, s, d in axes)

    @cached_property
    def offsets_w(self) -> tuple[int, int]:
        """The smallest and the largest offset along W."""
        first, last = (self.shift_w - tap * self.dilation[2] for tap in (self.kernel[2] - 1, 0))
        return _offset(first, self.stride[2]), _offset(last, self.stride[2])

    @cached_property
    def overlap(self) -> Ints:
        """Positions along H and W that a box has in common with the next one."""
        first, last = self.offsets_w
        return (self.reach[1], round_up(last - first, FOUR))

    @cached_property
    def gap(self) -> int:
        """Zeros between rows of columns."""
        return round_up(self.reach[2] + 1 + self.offsets_w[1], FOUR)

    @cached_property
    def least_box(self) -> Ints:
        return (1, self.overlap[0] + 1, round_up(self.overlap[1] + 1, FOUR))

    def weight_words(self, tile: Tile) -> int:
        """Repacked weights of a group."""
        return self.blocks_of_channels * tile.warps_n * tile.tiles_n * 32 * self.fragment_words

    def apart(self, tile: Tile) -> int:
        """Words of shared memory from column to column, for rows of 16 positions; four threads write others at once."""
        return at_residue(tile.positions + self.gap * (tile.positions // 16 + 1), 4, 8)

    def shared_bytes(self, tile: Tile, box: Ints) -> int:
        held = 2 * tile.k_blocks if tile.k_blocks else self.blocks_of_channels
        weights = held * tile.warps_n * tile.tiles_n * 32 * self.fragment_words
        reached = (box[1] + self.reach[1] + 1) * (box[2] + self.reach[2] + 1)
        partial = 2 * self.reach[0] * prod(self.stride) * self.c_out * reached
        return 4 * (weights + self.columns * self.apart(tile) + round_up(partial, 2)) + BLOCK_BYTES

    def fits(self, tile: Tile, box: Ints, device: Device) -> bool:
        words = box[0] * box[1] * (box[2] + self.gap) + self.gap  # of a column
        if prod(box) > tile.positions or words > self.apart(tile):
            return False
        in_registers = self.registers(tile) <= min(MAX_REGISTERS, REGISTERS // round_up(tile.block, WARP_UNIT))
        return in_registers and self.shared_bytes(tile, box) <= device.shared_bytes

    def registers(self, tile: Tile) -> int:
        """Estimate the registers that a thread needs: with fewer the compiler spills."""
        base, more = NEEDED[self.itemsize, self.products]
        row = self.stride[2] * self.c_out
        of_row = OF_LONG_ROW * min(row, LONGEST_ROW) if row > LONG_ROW else 0
        of_split = OF_OTHER_SPLIT if self.products == 3 and tile.tiles_n not in (1, 2, 4) else 0
        return base + more * tile.tiles_n + of_row + of_split + self.more_registers

    def blocks_by_registers(self, tile: Tile) -> int:
        threads = round_up(tile.block, WARP_UNIT)
        by_registers = REGISTERS // (round_up(self.registers(tile), 8) * threads)
        return max(1, min(MAX_BLOCKS, by_registers, MAX_THREADS // threads))

    def blocks(self, tile: Tile, box: Ints, device: Device) -> int:
        """Blocks that a multiprocessor holds; each reserves 1 KB of shared memory on top of its own."""
        by_shared = (device.shared_bytes + 1024) // (self.shared_bytes(tile, box) + 1024)
        return max(1, min(self.blocks_by_registers(tile), by_shared))

    # Boxes, and what they take.

    def tiles(self, box: Ints, extent: Ints) -> tuple[int, int]:
        """Boxes along H and W: they overlap, unless one has the whole axis."""

        def count(axis: int) -> int:
            overlap = self.overlap[axis - 1]
            return 1 if extent[axis] <= box[axis] else -(-(extent[axis] - overlap) // (box[axis] - overlap))

        return count(1), count(2)

    def boxes(self, tile: Tile, extent: Ints, device: Device) -> Iterator[Ints]:
        """Yield boxes of up to the tile's positions that fit into shared memory."""
        depth, height, width = extent
        whole = round_up(width, FOUR)
        for w in (*(w for w in WIDTHS if self.overlap[1] < w < whole), whole):
            most = tile.positions // w
            if not most:
                continue
            heights = {h for h in (height, most, -(-most // 2), 1, 2, 4) if h <= min(height, most)}
            for h in heights:
                if h < height and h <= self.overlap[0]:
                    continue
                d = max(1, min(depth, tile.positions // (w * h)))
                # Gaps may leave no room for as many planes.
                while d > 1 and not self.fits(tile, (d, h, w), device):
                    d -= 1
                if self.fits(tile, (d, h, w), device):
                    yield d, h, w

    def best_box(self, tile: Tile, device: Device, extent: Ints, planes: int, images: int) -> tuple[float, Ints, int]:
        """Return the least estimated clocks of a launch, with the box and the parts along D that take them."""
        best = (inf, self.least_box, 1)
        for box in self.boxes(tile, extent, device):
            blocks = images * prod(self.tiles(box, extent))
            at_once = self.blocks(tile, box, device) * device.multiprocessors
            most = max(1, planes // max(1, 2 * self.reach[0]))
            for parts in {1, *(min(most, max(1, waves * at_once // blocks)) for waves in (1, 2, 3))}:
                clocks = self.launch_clocks(tile, box, device, blocks, planes, parts)
                if clocks < best[0]:
                    length = -(-planes // parts)
                    best = (clocks, box, -(-planes // length))
        return best

    def launch_clocks(self, tile: Tile, box: Ints, device: Device, blocks: int, planes: int, parts: int) -> float:
        """Estimate the clocks of a launch of so many blocks for each part along D, which has so many planes in all."""
        length = -(-planes // parts)
        steps = -(-(length + (self.reach[0] if parts > 1 else 0)) // box[0])
        every = blocks * -(-planes // length)
        held = self.blocks(tile, box, device)
        rounds = -(-every // (held * device.multiprocessors))
        held = min(held, -(-every // device.multiprocessors))
        return rounds * (steps * self.step_clocks(tile, box, held) + BLOCK_CLOCKS)

    def step_clocks(self, tile: Tile, box: Ints, held: int) -> float:
        """Estimate the clocks in which a multiprocessor takes a box of each of the blocks that it holds."""
        warps, blocks, split = tile.block // 32, self.blocks_of_channels, self.products == 3
        # Products of a warp with a block of channels: the tensor core's clocks, instructions, and reads of x.
        mma = tile.tiles_n * 2 * self.steps * self.products * MMA_CLOCKS
        issued = AROUND + OF_PARTS[self.itemsize, self.products] + tile.tiles_n * (32 if split else 5 * self.steps)
        product = max(4 * mma, issued, LATENCY)
        # Sums of an output's position: of columns, of rows of taps, and stores.
        outputs = prod(self.stride) * self.c_out
        reached = (box[0] + self.reach[0]) * (box[1] + self.reach[1] / 2) * (box[2] + self.reach[2] / 2)
        summed = COLUMN * self.columns + 6 * self.kernel[0] * self.kernel[1] + OUTPUT * outputs + 60
        rounds = -(-reached // tile.block)
        alone = blocks * product + rounds * (SUM_ALONE * summed + 300) + 48 * tile.tiles_n + STEP_CLOCKS
        together = warps * blocks * max(mma, issued / ISSUED)
        together += (reached / 32 * summed + warps * 16 * tile.tiles_n) / ISSUED
        if tile.k_blocks:
            alone += blocks / tile.k_blocks * STAGE_CLOCKS
            together += 4 * self.weight_words(tile) / L2_BYTES
        memory = prod(box) * self.c_in * self.itemsize * max(1, tile.warps_n / 4) / BYTES
        return float((alone**POWER + (held * together) ** POWER + (held * memory) ** POWER) ** (1 / POWER))

    def typical_clocks(self, tile: Tile, device: Device) -> float:
        """Estimate the clocks of a multiprocessor for one position q of a typical problem."""
        images, extent = TYPICAL[self.rank]
        clocks, _, _ = self.best_box(tile, device, extent, extent[0] + self.reach[0], images)
        return clocks * device.multiprocessors / (images * prod(extent))
