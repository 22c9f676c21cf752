"""Plans of the tensor-core kernel for groups of few channels, ``kernels/narrow_groups.cu``."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from math import exp, gcd, inf, log, prod

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
    magic,
    needs_64_bits,
    problem_parameters,
    refuse_steps,
    refuse_tensor_cores,
    round_up,
)
from cuconvt.plan_boxes import count_boxes, even_extent
from cuconvt.plan_copies import are_loose, are_stored_at_once, copied_bytes, others_divisible
from cuconvt.plan_search import remembered
from cuconvt.plan_views import batch_as_depth

WARPS = 4
THREADS = 32 * WARPS
ROWS = 16  # of an mma: cells
MAX_CHANNELS = 16  # of a group's input
MAX_ACCUMULATORS = 64  # registers of a thread: few, so that many warps hide each other's waits
# Of 3xTF32 the compiler spills some of so many, by steps along K and whether a multiprocessor has more than two blocks.
SPILLED_OF_THREE = {(1, True): 64, (2, False): 64, (2, True): 32}
MAX_HELD = 60  # registers of a thread for weights
MAX_UNROLLED = 700  # mma of a warp's cells: more take seconds to compile
MAX_SHIFTS = 64  # that the taps of a cell read
MAX_STORES = 256  # for a warp's cells
MAX_BOXES = 2**30
# Extents of boxes along D, H, W. Wide ones write long rows, and of small ones all that is under way fits into L2.
BOXES = ((1, 2, 4, 8), (1, 2, 4, 8), (32, 64, 128, 256, 512))
MAX_CELLS = 1024
FEW = 16  # parts of a row, of which one may be added to it
MANY_TAPS = 64  # of a kernel: with more, products bound it, and cells are not split
# Outputs of a row that a warp stores, from which on it does so in windows, by their bytes and the products of a pair of
# inputs. Shorter ones are bound by instructions.
LONG_RUN = {(4, 1): 64, (4, 3): 128, (2, 1): 128}
ROWS_OF_BOX, WHOLE_ROWS = 1, 2  # how boxes leave
# From which compute capability on boxes of a result may leave by bulk copies; from how many outputs of a cell on it was
# faster; and how many cells of a row, if there are as many, such a box holds: cut rows took up to 1.7 times as long.
BOXED_CAPABILITY, BOXED_OUTPUTS, BOXED_WIDTH = 90, 4, 128
MANY = 1000  # images
SMALL = 10_000  # clocks of a problem
TYPICAL_EXTENTS = {1: (256, 4096), 2: (16, 64, 256), 3: (32, 64, 128)}  # of an axis, in cells, by rank
REGISTERS = 65536  # of a multiprocessor

# Rates of a multiprocessor, per clock, that the cost estimate uses, and what it fits; measured on an H200.
MMA_CLOCKS = 1.3
L2_BYTES_A_CLOCK = 40
MEMORY_BYTES_A_CLOCK = 13.5
INSTRUCTIONS_A_CLOCK = 2.9
OVERLAP = 0.24  # what of the less busy units' time adds to the busiest one's
BOX_CLOCKS = 2260  # in which a block waits for a box
ROW_ENDS = 24  # outputs that would take as long as the ragged ends of a row
A_VALUE_OF_BOXES = 2.5  # instructions for an output of each lane, where a box is put together
OF_BOXES = 0.85  # what such boxes take, relative to that estimate
OF_SPLIT = 0.85  # what tiles take that split their cells, relative to that estimate
SPLIT_COMPARED = 1.1  # and of that what they take beside other kernels
ALONE = 0.37  # what a block lacks that is alone on a multiprocessor
COMPARED = 0.85  # the other kernels' estimates are as much more optimistic where this one serves
COMPARED_OF_UNSTRIDED_ROWS = 1.25  # of that, what it takes longer in rows without a stride
COMPARED_OF_LOOSE = 0.7  # of that, channels-last with a stride, where 16-bit channels of groups are no 16-byte pieces


@dataclass(frozen=True)
class Tile:
    """The compile-time shape of a warp's work; the fields are macros of the kernel."""

    tiles_m: int
    tiles_c: int
    k_steps: int
    half_k: bool
    hold_weights: bool
    min_blocks: int
    groups: int = 1  # that a warp takes at once; of two, each has one piece of the input and one eight of the output
    boxed: bool = False  # whether rows of the result leave a block a box at a time, and x is fetched ahead
    split: bool = False  # whether a warp sums the residues along D one after the other

    @property
    def cells(self) -> int:
        """Cells that a warp takes at a time."""
        return ROWS * self.tiles_m


def plan_narrow_groups(
    geometry: Geometry, dtype: str, layout: Layout, precision: str | None, device: Device, tile: Tile | None = None
) -> Plan | Refusal:
    """Propose the tile with the least estimated time, or a given one, or say why the kernel does not serve."""
    if reason := _refuse(geometry, dtype, precision, device):
        return Refusal("narrow_groups", reason)
    geometry, layout = batch_as_depth(geometry, layout)
    work = Work.of_problem(geometry, dtype, precision, layout)
    choice = choose_tile(work, device) if tile is None else (tile, work.typical_cost(tile, device) or 0.0)
    if choice is None:
        return Refusal("narrow_groups", "no tile fits into the registers and the shared memory")
    tile, cost = choice
    extents = tuple(-(-o // s) for o, s in zip(geometry.out_extent, geometry.stride, strict=True))
    vector = _out_vector(geometry, layout, work)
    tiles_c = -(-geometry.c_out_per_group // (8 * tile.tiles_c))
    sets = geometry.groups // tile.groups * tiles_c
    known: dict[Ints, float] = {}
    box = work.best_box(tile, extents, device, geometry.n * sets, vector, known)
    if box is None and tile.boxed:  # some extents have no such box with rows of BOXED_WIDTH
        box = work.best_box(tile, extents, device, geometry.n * sets, vector, known, least_width=1)
    if box is None:
        return Refusal("narrow_groups", "the box of this tile does not fit into shared memory")
    tiles = tuple(-(-e // b) for e, b in zip(extents, box, strict=True))
    boxes = prod(tiles) * geometry.n
    if boxes > MAX_BOXES or sets > MAX_GRID:
        return Refusal("narrow_groups", f"counts boxes in 31 bits, got {boxes} of {sets} sets of weights")
    resident = device.multiprocessors * tile.min_blocks
    shift = tuple(p % s for p, s in zip(geometry.pad_before, geometry.stride, strict=True))
    staged = work.staged_box(tile, box)
    defines = (
        ("DTYPE", DTYPE_CODES[dtype]),
        ("PRECISION", PRECISION_CODES[precision]),
        *axis_macros(KERNEL=geometry.kernel, STRIDE=geometry.stride, DILATION=geometry.dilation, SHIFT=shift),
        ("TILES_M", tile.tiles_m),
        ("TILES_C", tile.tiles_c),
        ("GROUPS", tile.groups),
        ("K_STEPS", tile.k_steps),
        ("HALF_K", int(tile.half_k)),
        ("HOLD_WEIGHTS", int(tile.hold_weights)),
        ("X_CHANNELS_LAST", int(layout.x_channels_last)),
        ("OUT_CHANNELS_LAST", int(layout.out_channels_last)),
        ("BOXED", int(tile.boxed)),
        ("SPLIT", int(tile.split)),
        ("INDEX64", int(needs_64_bits(geometry, layout, box))),
        ("MIN_BLOCKS", tile.min_blocks),
    )
    divisors = (box[2], box[1], staged[2], staged[1])  # in the order in which the kernel divides by them
    # A second launch takes longer than a small problem's blocks take to gather their weights.
    rounds = -(-boxes * sets // (device.multiprocessors * tile.min_blocks))
    packs = rounds > 1 or work.clocks(tile, box, vector) > SMALL
    whole = tile.groups * geometry.c_in_per_group == work.chunk(tile)  # vectors of channels are whole pieces
    return Plan(
        kernel="narrow_groups",
        defines=defines,
        grid=sets * min(boxes, max(1, resident // sets)),
        block=THREADS,
        shared_bytes=work.shared_bytes(tile, box),
        problem=problem_parameters(
            geometry,
            layout,
            (*tiles, tiles_c),
            _bytes_fetched(geometry, layout)
            if tile.boxed
            else whole and _reads_pieces(geometry, layout, work.itemsize),
            _way_to_store(geometry, layout, work, tile, box, vector),
            (*box, prod(staged), int(not packs), 0, boxes, *(magic(divisor) for divisor in divisors)),
        ),
        cost=cost * all_positions(geometry),
        packed_words=sets * work.fragments(tile) * 32 * work.words(tile) if packs else 0,
        packed_a_thread=work.words(tile),
        tile=tile,
    )


def _reads_pieces(geometry: Geometry, layout: Layout, itemsize: int) -> bool:
    """Whether 16 bytes of channels-last x may be read at a time."""
    g, last = geometry, layout.x_channels_last
    return last and copied_bytes(layout.x, layout.x_aligned, g.c_in_per_group, g.groups, itemsize) == 16


def candidates(geometry: Geometry, dtype: str, layout: Layout, precision: str | None, device: Device) -> Iterator[Plan]:
    """Yield a plan for every tile that fits, among them the one that is proposed."""
    if _refuse(geometry, dtype, precision, device):
        return
    turned, turned_layout = batch_as_depth(geometry, layout)
    work = Work.of_problem(turned, dtype, precision, turned_layout)
    for tile in tiles(work):
        if work.typical_cost(tile, device) is not None:
            plan = plan_narrow_groups(geometry, dtype, layout, precision, device, tile)
            if isinstance(plan, Plan):
                yield plan


def _refuse(geometry: Geometry, dtype: str, precision: str | None, device: Device) -> str | None:
    if reason := refuse_tensor_cores(dtype, precision, device):
        return reason
    if geometry.c_in_per_group > MAX_CHANNELS:
        return f"serves at most {MAX_CHANNELS} input channels a group, got {geometry.c_in_per_group}"
    return refuse_steps(geometry)


def widest_vector(stride: int, itemsize: int) -> int:
    """Return how many outputs of a row are stored at once where they are aligned for it."""
    vector = 16 // itemsize
    while stride % vector and vector % stride:
        vector //= 2
    return vector


def _out_vector(geometry: Geometry, layout: Layout, work: Work) -> bool:
    """Whether the result may be stored a vector at a time: pairs of channels, or outputs of a row."""
    if layout.out_channels_last:
        return are_stored_at_once(geometry, layout, 2)
    vector = widest_vector(geometry.stride[2], work.itemsize)
    whole_rows = geometry.out_extent[2] % vector == 0 and others_divisible(layout.out, 4, vector)
    return vector > 1 and layout.out_aligned and layout.out[4] == 1 and whole_rows


def _bytes_fetched(geometry: Geometry, layout: Layout) -> int:
    """Return how many bytes of 16-bit rows of x are copied at a time, 0 if elements are loaded."""
    for size in (16, 4):  # a view may end before the rows in memory do
        unit = size // 2
        whole_rows = geometry.x_extent[2] % unit == 0 and others_divisible(layout.x, 4, unit)
        if whole_rows and layout.x_aligned and layout.x[4] == 1:
            return size
    return 0


def _way_to_store(geometry: Geometry, layout: Layout, work: Work, tile: Tile, box: Ints, vector: bool) -> int:
    """Return how a result is stored.

    1 is a vector at a time, 2 windows of rows that start anywhere or, channels-last, both eights of a tile at once, and
    0 one by one. Boxes leave row by row, or all rows of a plane as one.
    """
    if tile.boxed:
        whole_rows = layout.out[3] == geometry.out_extent[2] <= box[2] * geometry.stride[2]
        return WHOLE_ROWS if whole_rows else ROWS_OF_BOX
    if work.stores_both_eights(tile):
        return 2 if are_stored_at_once(geometry, layout, 4) else int(vector)
    two_rows = 2 * box[2] == tile.cells and tile.tiles_m == 4 and work.products == 1
    straight = box[2] % tile.cells == 0 or two_rows
    long = min(tile.cells, box[2]) * work.stride[2] >= LONG_RUN[work.itemsize, work.products]
    return int(vector) or (2 if straight and long and layout.out[4] == 1 and not layout.out_channels_last else 0)


@dataclass(frozen=True)
class Work:
    """What a tile's choice depends on, everything but N and extents, and the sizes that follow; the kernel computes the
    same ones."""

    rank: int
    kernel: Ints
    stride: Ints
    dilation: Ints
    shift: Ints  # padding modulo stride
    c_in: int  # of a group
    c_out: int
    itemsize: int
    products: int
    x_channels_last: bool
    out_channels_last: bool
    may_box: bool  # rows of 16 bits, in and out
    half_sectors: bool  # a group's channels of the result are half a sector of memory, and groups may be taken in pairs

    @classmethod
    def of_problem(cls, geometry: Geometry, dtype: str, precision: str | None, layout: Layout) -> Work:
        g = geometry
        half_sectors = layout.out_channels_last and dtype != "float32" and g.c_out_per_group == 8
        return cls(
            g.rank,
            g.kernel,
            g.stride,
            g.dilation,
            tuple(p % s for p, s in zip(g.pad_before, g.stride, strict=True)),
            g.c_in_per_group,
            g.c_out_per_group,
            4 if dtype == "float32" else 2,
            3 if precision == "tf32x3" else 1,
            layout.x_channels_last,
            layout.out_channels_last,
            dtype != "float32"
            and not (layout.x_channels_last or layout.out_channels_last)
            and layout.out[4] == 1
            and prod(g.stride) >= BOXED_OUTPUTS,
            half_sectors and g.groups % 2 == 0,
        )

    @functools.cached_property
    def shifts(self) -> Ints:
        """Positions of x along each axis, from the first to the last, that the outputs of a cell read."""
        axes = zip(self.kernel, self.stride, self.dilation, self.shift, strict=True)
        return tuple(((k - 1) * d - shift) // s - (-shift // s) + 1 for k, s, d, shift in axes)

    @functools.cached_property
    def reads(self) -> int:
        """Shifts that some tap reads."""
        axes = zip(self.kernel, self.stride, self.dilation, self.shift, strict=True)
        return prod(len({(tap * d - shift) // s for tap in range(k)}) for k, s, d, shift in axes)

    @functools.cached_property
    def reads_split(self) -> int:
        """Shifts that are read where residues along D are summed one after the other, each with those of its taps."""
        k, s, d, shift = (of_axis[0] for of_axis in (self.kernel, self.stride, self.dilation, self.shift))
        along_d = len({(tap * d - shift) // s for tap in range(k)})
        return self.reads // along_d * len({divmod(tap * d - shift, s) for tap in range(k)})

    @functools.cached_property
    def live(self) -> Ints:
        """Residues along each axis that have a tap."""
        axes = zip(self.kernel, self.stride, self.dilation, strict=True)
        return tuple(min(k, s // gcd(s, d)) for k, s, d in axes)

    @functools.cached_property
    def taps(self) -> int:
        return prod(self.kernel)

    @functools.cached_property
    def outputs(self) -> int:
        """Outputs of a cell, of one channel."""
        return prod(self.stride)

    @property
    def parts(self) -> int:
        return 2 if self.products == 3 else 1

    def pieces(self, tile: Tile) -> int:
        """16-byte pieces of a position's channels."""
        return tile.groups if tile.half_k else 2 * tile.k_steps

    def chunk(self, tile: Tile) -> int:
        """Input channels that these hold."""
        return self.pieces(tile) * 16 // self.itemsize

    def words(self, tile: Tile) -> int:
        """Words of a weight fragment that a lane holds."""
        return 1 if tile.half_k else 2 * self.parts

    def fragments(self, tile: Tile) -> int:
        return self.taps * tile.k_steps * tile.tiles_c

    def staged_box(self, tile: Tile, box: Ints) -> Ints:
        """Extents of x that the cells of a box read; of boxed ones an odd number along W."""
        depth, height, width = (b + s - 1 for b, s in zip(box, self.shifts, strict=True))
        return depth, height, width | tile.boxed

    def shared_bytes(self, tile: Tile, box: Ints) -> int:
        depth, height, width = self.staged_box(tile, box)
        staged, weights = depth * height * width * self.parts * self.pieces(tile) * 16, 0
        if not tile.hold_weights:
            weights = 4 * self.fragments(tile) * 32 * self.words(tile)
        if tile.boxed:
            fetched = depth * height * ((width + 14) // 8 | 1) * self.pieces(tile) * 8 * 16
            return staged + fetched + weights + self.result_bytes(tile, box)
        turned = 0 if self.out_channels_last else 8 * at_residue(tile.cells * self.stride[2], 4, 16)
        return staged + 4 * WARPS * turned + weights

    def result_bytes(self, tile: Tile, box: Ints) -> int:
        """Return the most bytes of a box of the result, where distances are those of memory modulo 16."""
        depth, height, width = (b * s for b, s in zip(box, self.stride, strict=True))
        channel = height * (width * self.itemsize + 15) + 63
        return round_up(depth * (8 * tile.tiles_c * channel + 15) + 16, 16)

    def stores_both_eights(self, tile: Tile) -> bool:
        """Whether lanes may exchange channels, so that they store whole sectors of memory."""
        return self.out_channels_last and self.itemsize == 2 and tile.tiles_c == 2

    def accumulators(self, tile: Tile) -> int:
        return 4 * self.sums(tile) * tile.tiles_m * tile.tiles_c

    def sums(self, tile: Tile) -> int:
        """Outputs of a cell that have a tap and are summed at once."""
        return prod(self.live[tile.split :])

    def registers(self, tile: Tile) -> int:
        """Estimate the registers of a thread: a little more than the compiler was seen to need."""
        held = self.fragments(tile) * self.words(tile) if tile.hold_weights else 0
        others = (52 if self.itemsize == 2 else 60) + 8 * tile.tiles_m
        if self.products == 3 and tile.split and tile.k_steps == 1:
            others += 24 - 4 * tile.tiles_m
        elif self.products == 3:
            sums = self.sums(tile)
            others += 20 + 10 * tile.tiles_m + 2 * sums * tile.tiles_c * (sums > 8) + 10 * (tile.k_steps - 1)
        if tile.groups == 2:
            others -= 2
        return self.accumulators(tile) + held + others + 10 * (tile.k_steps - 1) + 6 * (tile.tiles_c - 1)

    def best_box(
        self,
        tile: Tile,
        extents: Ints,
        device: Device,
        times: int,
        vector: bool,
        known: dict[Ints, float],
        least_width: int = BOXED_WIDTH,
    ) -> Ints | None:
        """Return the box of cells with the least time for so many cells along D, H, W, so many times.

        `known` keeps the clocks of boxes from call to call. Where results leave by the box, its rows have so many
        cells at least, or are whole.
        """
        room = (device.shared_bytes + 1024) // tile.min_blocks - 1024
        # Few cells beyond a row cost less than runs that are cut. A vector of several cells may not go on in the next
        # row.
        in_rows = not (self.out_channels_last or tile.boxed)
        whole = max(1, widest_vector(self.stride[2], self.itemsize) // self.stride[2])
        whole = (whole if vector else 0) if in_rows else 1
        best: tuple[float, Ints] | None = None
        cuts = (_cuts(extent, most) for extent, most in zip(extents, BOXES, strict=True))
        for depth, height, width in itertools.product(*cuts):
            if not whole:
                run = round_up(width, tile.cells)
                width = run if run - width <= width // FEW else width
            box = (depth, height, round_up(width, whole or 1))
            if tile.boxed and width < min(least_width, extents[2]):
                continue
            if prod(box) > MAX_CELLS or self.shared_bytes(tile, box) > room:
                continue
            if box not in known:
                known[box] = self.clocks(tile, box, vector)
            count = count_boxes(extents, box)
            clocks = known[box] * -(-count * times // (device.multiprocessors * tile.min_blocks))
            if best is None or clocks < best[0]:
                best = clocks, box
        return best and best[1]

    def typical_cost(self, tile: Tile, device: Device) -> float | None:
        """Return the clocks of a cell, all channels of a group, as the geometric mean over typical extents.

        None where no box fits, or the compiler spills registers.
        """
        if device.compute_capability >= 100 and tile.groups == 2 and tile.min_blocks == 4:
            return None
        if tile.boxed and device.compute_capability < BOXED_CAPABILITY:
            return None
        logarithms, known = 0.0, dict[Ints, float]()
        for typical in TYPICAL_EXTENTS[self.rank]:
            extents = tuple(typical if axis >= 3 - self.rank else 64 for axis in range(3))
            box = self.best_box(tile, extents, device, MANY, False, known)
            if box is None:
                return None
            logarithms += log(known[box] * count_boxes(extents, box) / prod(extents))
        mean = exp(logarithms / len(TYPICAL_EXTENTS[self.rank]))
        compared = COMPARED
        if max(self.stride) == 1 and not self.out_channels_last and self.c_out * self.itemsize >= 32:
            compared *= COMPARED_OF_UNSTRIDED_ROWS
        if max(self.stride) > 1 and self.x_channels_last and self.itemsize == 2 and are_loose(self.c_in, 2):
            compared *= COMPARED_OF_LOOSE
        return compared * mean * -(-self.c_out // (8 * tile.tiles_c)) / tile.groups

    def clocks(self, tile: Tile, box: Ints, vector: bool) -> float:
        """Estimate a multiprocessor's clocks for one box and one tile of channels."""
        # Sixteens of cells that are multiplied; the warps of a block take equally many.
        cells, staged = prod(box), prod(self.staged_box(tile, box))
        rows = -(-cells // (WARPS * tile.cells)) * WARPS * tile.tiles_m
        values = ROWS * self.outputs * 8 * tile.tiles_c / 32  # of a lane
        products = self.taps * tile.k_steps * tile.tiles_c * self.products
        loads = (self.reads_split if tile.split else self.reads) * tile.k_steps * self.parts
        weights = 0 if tile.hold_weights else self.fragments(tile) / tile.tiles_m
        tensor = rows * products * MMA_CLOCKS
        # Of shared memory and the L1 cache, 128 bytes a clock.
        c_in = tile.groups * self.c_in
        shared = rows * (loads * (2 if self.pieces(tile) == 1 else 4) + weights * self.words(tile))
        shared += rows * values * (4 if self.out_channels_last else 3.5)
        shared += staged * (c_in * (0.5 if self.x_channels_last else 1.3) + self.parts * self.pieces(tile) * 4) / 32
        a_value: float = 5 if self.out_channels_last else 3 if vector else 6 if self.itemsize == 4 else 7
        if tile.boxed:
            a_value = A_VALUE_OF_BOXES
        a_product = 1.3 if self.products == 1 else 2
        a_row = 330 / tile.tiles_m if tile.groups == 1 else 240
        issue = rows * (a_product * products + loads + weights + values * a_value + a_row)
        issue += staged * (c_in * (1 if self.x_channels_last else 3) + 15 * self.parts) / 32
        # A row starts and ends within sectors, which others write, too.
        channels = min(tile.groups * self.c_out, 8 * tile.tiles_c)
        sector = 32 / self.itemsize
        if self.out_channels_last:
            ragged = max(1, sector / channels)
        else:
            ragged = 1 if vector else 1 + ROW_ENDS / (box[2] * self.stride[2])
        if tile.boxed:
            ragged = 1 + ROW_ENDS / (box[1] * box[2] * self.stride[1] * self.stride[2])
        memory = cells * self.outputs * channels * self.itemsize * ragged / MEMORY_BYTES_A_CLOCK
        l2 = staged * c_in * self.itemsize / L2_BYTES_A_CLOCK
        units = (tensor, shared, l2, memory, issue / INSTRUCTIONS_A_CLOCK)
        busy = max(units) + OVERLAP * (sum(units) - max(units))
        if tile.boxed:
            busy *= OF_BOXES
        if tile.split:
            busy *= OF_SPLIT
        return busy * (1 + ALONE / tile.min_blocks) + BOX_CLOCKS / tile.min_blocks


def _cuts(extent: int, most: Ints) -> list[int]:
    """Return box extents that leave little of the last box empty."""
    return sorted({even_extent(extent, m) for m in most})


@remembered(Tile)
def choose_tile(work: Work, device: Device) -> tuple[Tile, float] | None:
    """Return the best tile for typical extents, with its clocks a cell."""
    costs = ((work.typical_cost(tile, device), tile) for tile in tiles(work))
    fitting = [(cost, tile) for cost, tile in costs if cost is not None]
    if not fitting:
        return None
    # Two groups at once were faster wherever both were measured; of half sectors the estimate is too low.
    of_two_groups = [(cost, tile) for cost, tile in fitting if tile.groups == 2]
    cost, tile = min(of_two_groups or fitting, key=lambda pair: pair[0])
    return tile, cost * (SPLIT_COMPARED if tile.split else 1)


def tiles(work: Work) -> Iterator[Tile]:
    """Yield the tiles that a problem may use. They depend on neither N nor extents, which therefore never recompile."""
    if max(work.shifts) > MAX_SHIFTS or work.reads > MAX_SHIFTS:
        return
    half_k = work.itemsize == 2 and work.c_in <= 8
    k_steps = 1 if half_k else -(-work.c_in // (32 // work.itemsize))
    eights = -(-work.c_out // 8)
    pairs = half_k and work.half_sectors
    of_channels = [*((c, 1) for c in sorted({1, min(2, eights)})), *[(2, 2)] * pairs]
    ways = [(False, False), *[(True, False)] * work.may_box, *[(False, True)] * (work.live[0] > 1)]
    for (tiles_c, groups), tiles_m, hold, blocks, (boxed, split) in itertools.product(
        of_channels, (1, 2, 4), (False, True), (2, 3, 4), ways
    ):
        tile = Tile(tiles_m, tiles_c, k_steps, half_k, hold, blocks, groups, boxed, split)
        if split and not _splits_well(work, tile):
            continue
        if boxed and (blocks == 2 or tiles_m == 4):  # few warps wait for each other
            continue
        if hold and work.fragments(tile) * work.words(tile) > MAX_HELD:
            continue
        if hold and (boxed or work.stores_both_eights(tile)):  # up to 65% slower, and never more than 3% faster
            continue
        if work.fragments(tile) * tiles_m * work.products > MAX_UNROLLED or work.accumulators(tile) > MAX_ACCUMULATORS:
            continue
        if prod(work.stride) * tiles_m * tiles_c * 4 > MAX_STORES:
            continue
        spilled = inf if split and k_steps == 1 else SPILLED_OF_THREE.get((k_steps, blocks > 2), inf)
        if work.products == 3 and work.accumulators(tile) >= spilled:
            continue
        if work.registers(tile) <= REGISTERS // (THREADS * blocks) // 8 * 8:
            yield tile


def _splits_well(work: Work, tile: Tile) -> bool:
    """Whether a tile that splits its cells is of a kind that was faster than those that do not, of 32-bit numbers."""
    if work.itemsize == 2 or work.taps > MANY_TAPS or tile.hold_weights:
        return False
    shape = tile.tiles_m, tile.tiles_c, tile.min_blocks
    of_three = work.products == 3
    if tile.k_steps == 1 and shape == (2, 1, 4):
        return of_three
    if work.out_channels_last:
        return shape == ((1, 2, 2) if of_three else (2, 2, 3))
    return tile.k_steps == 1 and shape == (4, 1, 3) and not of_three
