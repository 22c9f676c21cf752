"""Plans of the kernel for few channels per group, ``kernels/few_channels.cu``."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd, prod

from cuconvt.geometry import Geometry
from cuconvt.plan import (
    DTYPE_CODES,
    MAX_GRID,
    Device,
    Layout,
    Plan,
    Refusal,
    all_positions,
    axis_macros,
    needs_64_bits,
    positions,
    problem_parameters,
    refuse_steps,
    refuse_tensor_cores,
    round_up,
    span,
)
from cuconvt.plan_copies import constant_stride
from cuconvt.plan_views import batch_as_axis

THREADS = 128  # of a block at most
THREADS_AROUND = 8  # what a block takes on top of its threads' work, in threads
FEW = 4  # channels
MAX_REGISTERS = 208  # of a thread, by estimate
MAX_WEIGHTS_IN_REGISTERS = 72
MAX_SHARED_BYTES = 48 * 1024
REGISTERS = 65536  # of a multiprocessor
WAVES = 4  # of blocks, at least, where the slide along D can be cut
SOME, MANY = 8, 16  # input channels, over which a thread walks

# Of a multiprocessor: threads it advances by an instruction a clock, the share of these clocks that is used at best,
# the clocks until a load from memory arrives, and the bytes that it moves to and from memory a clock (H200).
LANES = 128
ISSUE_RATE = 0.85
LATENCY = 700
BYTES_A_CLOCK = 18
# How much longer some channels take than the rest of the estimate says, measured on an H200: where each lane reads
# another line of channels-last x, or where there are many and the rows of a plane are those of a batch, and otherwise.
SLOW, OTHERWISE = 8, 2.3
# What takes longer beside the tensor cores' kernels: of that, rows of many channels with one axis (of 9 layers), and
# taps of few input channels a group with more axes (of 40).
OF_SINGLE_ROWS, OF_FEW = 2.6, 1.6
# And what so many channels take longer, or so many whose loads the phases of a volume share, of a single one of the
# result: threads are as few as positions (of 40).
WIDE, WIDE_OF_PHASES, OF_WIDE = 32, 48, 2.5


@dataclass(frozen=True)
class Tile:
    """The compile-time shape of a thread's work; the fields are the macros of the kernel."""

    positions_w: int
    channels_out: int
    lanes_c: int
    vector: int


def plan_few_channels(
    geometry: Geometry, dtype: str, layout: Layout, precision: str | None, device: Device, tile: Tile | None = None
) -> Plan | Refusal:
    """Propose the cheapest tile, or a given one. It serves every precision, in float32 (float64 for float64)."""
    if reason := _refuse(geometry, dtype, device):
        return Refusal("few_channels", reason)
    geometry, layout = batch_as_axis(geometry, layout)
    work = _Work(geometry, dtype, layout)
    tile = tile or min(_tiles(work), key=lambda t: work.clocks_a_position(t, device), default=None)
    if tile is None:
        return Refusal("few_channels", "the taps of a row do not fit into the registers")
    if work.shared_bytes(tile) > MAX_SHARED_BYTES:
        return Refusal(
            "few_channels", f"the weights of a block take more than {MAX_SHARED_BYTES} bytes of shared memory"
        )

    rows = -(-geometry.out_extent[1] // geometry.stride[1])
    tiles_w = -(-geometry.out_extent[2] // (geometry.stride[2] * tile.positions_w))
    if tile.lanes_c > 1:
        tiles_c = channel_blocks = -(-geometry.c_out // (tile.lanes_c * tile.vector))
    else:
        tiles_c = -(-geometry.c_out_per_group // tile.channels_out)
        channel_blocks = tiles_c * geometry.groups
    threads = threads_of_block(rows * tiles_w * tile.lanes_c)
    tiles_q = -(-rows * tiles_w * tile.lanes_c // threads)
    blocks = geometry.stride[1] * tiles_q * channel_blocks * geometry.n
    planes = positions(geometry, 0)
    resident = work.blocks(tile, device)
    chunks = runs_along_d(planes, work.depth, blocks * threads, resident * THREADS * device.multiprocessors)
    if blocks * chunks > MAX_GRID or rows * tiles_w >= 2**31 - THREADS:
        return Refusal("few_channels", f"{blocks * chunks} blocks are more than a launch takes ({MAX_GRID})")

    in_single_rows = geometry.rank == 1 and geometry.c_in_per_group >= MANY and not layout.x_channels_last
    beside_tensor_cores = refuse_tensor_cores(dtype, precision, device) is None
    compared = 1.0
    if beside_tensor_cores and in_single_rows:
        compared = OF_SINGLE_ROWS
    elif beside_tensor_cores and geometry.rank > 1 and geometry.c_in_per_group <= FEW and geometry.taps > 1:
        compared = OF_FEW
    defines = (
        ("DTYPE", DTYPE_CODES[dtype]),
        *axis_macros(KERNEL=geometry.kernel, STRIDE=geometry.stride, DILATION=geometry.dilation),
        ("SHIFT_W", work.shift_w),
        ("POSITIONS_W", tile.positions_w),
        ("CHANNELS_OUT", tile.channels_out),
        ("HOLD_WEIGHTS", int(work.holds_weights(tile))),
        ("LANES_C", tile.lanes_c),
        ("VECTOR", tile.vector),
        ("X_STRIDE_W", constant_stride(layout.x, layout.x_channels_last, geometry.c_in)),
        ("OUT_STRIDE_W", constant_stride(layout.out, layout.out_channels_last, geometry.c_out)),
        ("OUT_CHANNELS_LAST", int(work.row_channels(tile) > 1)),
        ("INDEX64", int(needs_64_bits(geometry, layout, (1, 1, tile.positions_w)) or work.x_span(tile) >= 2**31)),
        ("MIN_BLOCKS", resident),
    )
    return Plan(
        kernel="few_channels",
        defines=defines,
        grid=blocks * chunks,
        block=threads,
        shared_bytes=work.shared_bytes(tile, threads),
        problem=problem_parameters(geometry, layout, (chunks, rows, tiles_w, tiles_c)),
        cost=compared
        * max(work.clocks_a_position(tile, device), work.memory_clocks_a_position())
        * all_positions(geometry),
        tile=tile,
    )


def threads_of_block(threads: int) -> int:
    """Return how many threads a block has, for so many in the rows of a plane: few of them should be idle."""
    return min((THREADS, 96, 64, 32), key=lambda block: -(-threads // block) * (block + THREADS_AROUND))


def runs_along_d(planes: int, depth: int, threads: int, held: int) -> int:
    """Return into how many runs a slide is cut, for so many threads in all and those that the device holds."""
    runs = max(1, min(-(-WAVES * held // threads), planes // (2 * depth)))
    return -(-planes // -(-planes // runs))  # none without a plane


def candidates(geometry: Geometry, dtype: str, layout: Layout, precision: str | None, device: Device) -> Iterator[Plan]:
    """Yield a plan for every tile that fits, among them the one that is proposed."""
    if _refuse(geometry, dtype, device):
        return
    turned, turned_layout = batch_as_axis(geometry, layout)
    work = _Work(turned, dtype, turned_layout)
    for tile in _tiles(work):
        plan = plan_few_channels(geometry, dtype, layout, precision, device, tile)
        if isinstance(plan, Plan):
            yield plan


def _refuse(geometry: Geometry, dtype: str, device: Device) -> str | None:
    if dtype == "bfloat16" and device.compute_capability < 80:
        return f"needs compute capability 8.0 for bfloat16, the device has {device.compute_capability / 10}"
    if min(geometry.c_in_per_group, geometry.c_out_per_group) > FEW:
        return f"serves at most {FEW} input or {FEW} output channels a group"
    return refuse_steps(geometry)


def _tiles(work: _Work) -> Iterator[Tile]:
    """Yield the tiles that fit. They depend on neither N nor extents, which therefore never recompile."""
    g = work.geometry
    over_channels = work.layout.out_channels_last and (g.groups > 1 or g.c_out > FEW)
    outs = (1,) if over_channels else tuple(range(1, min(FEW, g.c_out_per_group) + 1))
    for vector in (1, 2) if over_channels and work.pairs_of_groups() else (1,):
        vectors = g.c_out // vector
        lanes = 1
        if over_channels:
            # Whole 32-byte sectors of the output, and few lanes without a channel.
            whole = [n for n in (32, 16, 8, 4, 2) if n * vector * work.itemsize >= 32 or n >= vectors]
            lanes = min(whole, key=lambda n: round_up(vectors, n))
        for positions_w, channels_out in itertools.product((1, 2, 4, 8), outs):
            tile = Tile(positions_w, channels_out, lanes, vector)
            if work.columns(tile) <= 32 and work.row(tile) <= 32 and work.registers(tile) <= MAX_REGISTERS:
                yield tile


class _Work:
    """The sizes that follow from a problem's compile-time parameters and a tile; the kernel computes the same ones."""

    def __init__(self, geometry: Geometry, dtype: str, layout: Layout):
        self.geometry, self.layout = geometry, layout
        self.itemsize = {"float64": 8, "float32": 4}.get(dtype, 2)
        self.words = 2 if dtype == "float64" else 1  # registers of an accumulator
        stride, dilation, kernel = geometry.stride, geometry.dilation, geometry.kernel
        self.shift_w = geometry.pad_before[2] % stride[2]
        self.depth = (kernel[0] - 1) * dilation[0] // stride[0] + 1
        self.rows = -(-kernel[1] * gcd(stride[1], dilation[1]) // stride[1])
        self.taps = kernel[0] * self.rows * kernel[2]
        # Columns of x that the taps along W reach beyond a thread's own.
        self.reach_w = ((kernel[2] - 1) * dilation[2] - self.shift_w) // stride[2] + (self.shift_w > 0)

    def columns(self, tile: Tile) -> int:
        return tile.positions_w + self.reach_w

    def row_channels(self, tile: Tile) -> int:
        return tile.channels_out if tile.lanes_c == 1 and self.layout.out_channels_last else 1

    def row(self, tile: Tile) -> int:
        """Results of a thread that are contiguous in memory."""
        return tile.positions_w * self.geometry.stride[2] * self.row_channels(tile)

    def pairs_of_groups(self) -> bool:
        """Whether two groups can be loaded as one value."""
        g = self.geometry
        return (
            g.c_in == g.c_out == g.groups
            and g.groups % 2 == 0
            and self.itemsize == 2
            and self.layout.x_aligned
            and self.layout.x[1] == 1
            and all(stride % 2 == 0 for axis, stride in enumerate(self.layout.x) if axis != 1)
        )

    def holds_weights(self, tile: Tile) -> bool:
        """Whether a thread keeps its weights in registers for the whole slide."""
        weights = self.taps * tile.channels_out * tile.vector * self.words
        return self.geometry.c_in_per_group == 1 and weights <= MAX_WEIGHTS_IN_REGISTERS

    def results(self, tile: Tile) -> int:
        """Results of a thread that one plane of x may complete."""
        g = self.geometry
        return g.stride[0] * tile.channels_out * tile.positions_w * g.stride[2] * tile.vector

    def registers(self, tile: Tile) -> int:
        """Estimate the registers of a thread."""
        weights = self.taps * tile.channels_out * tile.vector
        if not self.holds_weights(tile):
            weights = min(weights, 48 // self.words)
        window = self.rows * self.columns(tile) * tile.vector
        ahead = window * self.itemsize // 4 if tile.vector > 1 else self.rows * self.columns(tile) * self.words
        # Addresses, counters and masks; where each turned result goes; and results on their way there, of long rows and
        # of the rows of several channels.
        row = self.row(tile)
        others = 32 + row if tile.lanes_c == 1 else 40
        if tile.lanes_c == 1:
            is_long = row * self.words > 8
            others += row // 2 if is_long else 0
            if tile.channels_out > 1:
                others += 2 * row if is_long else row + 4
        if self.depth > 4:  # many planes under way leave the compiler less freedom
            others += self.depth
        return self.words * (self.depth * self.results(tile) + window + weights) + ahead + others

    def blocks(self, tile: Tile, device: Device) -> int:
        """Blocks that a multiprocessor holds; each reserves 1 KB of shared memory on top of its own."""
        by_registers = REGISTERS // (THREADS * round_up(self.registers(tile), 8))
        by_shared = (device.shared_bytes + 1024) // (self.shared_bytes(tile) + 1024)
        return max(1, min(by_registers, by_shared, 6))

    def shared_bytes(self, tile: Tile, threads: int = THREADS) -> int:
        groups = tile.lanes_c * tile.vector + 1 if tile.lanes_c > 1 else 1
        channel = round_up(self.taps * tile.channels_out * groups, 4)
        weights = round_up(self.geometry.c_in_per_group * channel * 4 * self.words, 16)
        return weights + (threads * self.row(tile) * self.itemsize if tile.lanes_c == 1 else 0)

    def x_span(self, tile: Tile) -> int:
        """Return the largest offset into x that a thread computes, also where it then reads nothing."""
        g = self.geometry
        beyond = (2 * k * d + s * tile.positions_w for k, d, s in zip(g.kernel, g.dilation, g.stride, strict=True))
        extents = (x + b for x, b in zip(g.x_extent, beyond, strict=True))
        return span((g.n, g.c_in, *extents), self.layout.x)

    def clocks_a_position(self, tile: Tile, device: Device) -> float:
        """Estimate the clocks of a multiprocessor for one position q, all its phases and the channels of a group."""
        g = self.geometry
        arithmetic = self.taps * tile.positions_w * tile.channels_out * tile.vector * self.words
        addresses = 0 if constant_stride(self.layout.x, self.layout.x_channels_last, g.c_in) else 2
        loads = self.rows * (6 + self.columns(tile) * (2.5 + addresses + tile.vector * (self.itemsize == 2)))
        weights = 0.0
        if not self.holds_weights(tile):
            weights = self.taps * tile.channels_out * tile.vector * (1 if tile.lanes_c > 1 else self.words / 4)
        if tile.lanes_c > 1:
            a_result = 1.5 / tile.vector + (self.itemsize == 2)
        elif self.row(tile) * self.itemsize == 16 and self.row_channels(tile) == 1:
            a_result = 0.5 + 2 / self.row(tile)
        else:
            a_result = 8
        # A warp fetches x one step ahead. A scheduler has one warp of every block; while one waits, the others go on.
        instructions = g.c_in_per_group * (arithmetic + loads + weights) + self.results(tile) * (0.5 + a_result) + 20
        waiting = max(instructions, g.c_in_per_group * LATENCY) / self.blocks(tile, device)
        step = max(instructions / ISSUE_RATE, waiting)
        steps = -(-g.c_out_per_group // tile.channels_out) * g.stride[1] / (tile.positions_w * tile.vector)
        return self.slower() * steps * step / LANES

    def slower(self) -> float:
        """Return how much longer the kernel takes than the number of instructions and their waits suggest."""
        g = self.geometry
        channels, last = g.c_in_per_group, self.layout.x_channels_last
        if channels < SOME:
            return 1
        slower = SLOW if last or (g.rank == 2 and channels >= MANY) else OTHERWISE
        if g.rank == 3 and max(g.stride) > 1 and not last:
            is_wide = channels >= WIDE_OF_PHASES and g.c_out_per_group == 1
        else:
            is_wide = channels >= WIDE and g.rank > 1
        return slower * (OF_WIDE if is_wide else 1)

    def memory_clocks_a_position(self) -> float:
        """Return the clocks that a multiprocessor would take to move x and the result of a position q, likewise."""
        g = self.geometry
        elements = g.c_in_per_group + g.c_out_per_group * prod(g.stride)
        return elements * self.itemsize / BYTES_A_CLOCK
