"""Plans of the kernel for correlations with few channels per group, ``kernels/correlate_few_channels.cu``."""

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
    axis_macros,
    problem_parameters,
    refuse_steps,
    refuse_tensor_cores,
    round_up,
)
from cuconvt.plan_correlate import reads_need_64_bits
from cuconvt.plan_correlate_gemm import with_margin
from cuconvt.plan_few_channels import _batch_as_axis, _constant_stride
from cuconvt.plan_rows import Row, spent_ahead, spent_on_window, whole_pieces

THREADS = 128
FEW = 4  # channels
MAX_REGISTERS = 192  # of a thread, by estimate
MAX_WEIGHTS_IN_REGISTERS = 72
MAX_SHARED_BYTES = 48 * 1024
REGISTERS = 65536  # of a multiprocessor
WAVES = 4  # of blocks, at least, where the slide along D can be cut

LANES = 128  # threads that a multiprocessor advances by an instruction a clock
BUSY = 2  # with so many blocks on a multiprocessor half of these clocks are used, with more of them more
BYTES_A_CLOCK = 18  # to and from memory
LATENCY = 800  # clocks until a load from memory arrives
# What the estimate is more optimistic than those of the tensor cores' kernels, measured on an H200: for one channel of
# y a group and for more, of 16 bits and of more. Beside such kernels, what one channel of y without groups takes of it
# where the result is in rows.
COMPARED, COMPARED_OF_16_BITS, COMPARED_OF_MORE = 1.3, 1.9, 2.7
OF_SINGLE_CHANNEL = 0.75


@dataclass(frozen=True)
class Tile:
    """The compile-time shape of a thread's work; the fields are the macros of the kernel."""

    positions_w: int
    lanes_c: int
    shared: bool  # whether neighbouring lanes share columns of y
    ahead: bool  # whether rows are fetched a step before they are needed
    hold_weights: bool  # whether a thread's weights stay in registers


def plan_correlate_few_channels(
    geometry: Geometry, dtype: str, layout: Layout, precision: str | None, device: Device, tile: Tile | None = None
) -> Plan | Refusal:
    """Propose the cheapest tile, or a given one. It serves every precision, in float32 (float64 for float64)."""
    name = "correlate_few_channels"
    if reason := refuse_channels(geometry):
        return Refusal(name, reason)
    geometry, layout = _batch_as_axis(geometry, layout)
    g = geometry
    work = _Work(g, dtype, layout, device)
    tile = tile or min(work.tiles(), key=work.clocks_a_position, default=None)
    if tile is None:
        return Refusal(name, "the taps of a step do not fit into the registers")
    if work.shared_bytes(tile) > MAX_SHARED_BYTES:
        return Refusal(name, f"the weights of a block take more than {MAX_SHARED_BYTES} bytes of shared memory")
    tiles_w = -(-g.x_extent[2] // tile.positions_w)
    tiles_c = -(-g.c_in // tile.lanes_c)
    blocks = -(-g.x_extent[1] * tiles_w * tile.lanes_c // THREADS) * tiles_c * g.n
    resident = work.blocks(tile)
    wanted = -(-WAVES * device.multiprocessors * resident // blocks)
    runs = max(1, min(wanted, g.x_extent[0] // (2 * work.depth)))
    runs = -(-g.x_extent[0] // -(-g.x_extent[0] // runs))  # none without a plane
    if blocks * runs > MAX_GRID or g.x_extent[1] * tiles_w >= 2**31 - THREADS:
        return Refusal(name, f"{blocks * runs} blocks are more than a launch takes ({MAX_GRID})")
    row = work.row(tile)
    defines = (
        ("DTYPE", DTYPE_CODES[dtype]),
        *axis_macros(KERNEL=g.kernel, STRIDE=g.stride, DILATION=g.dilation),
        ("POSITIONS_W", tile.positions_w),
        ("LANES_C", tile.lanes_c),
        ("EARLY", row.early),
        ("AHEAD", int(tile.ahead)),
        ("HOLD_WEIGHTS", int(tile.hold_weights)),
        ("Y_STRIDE_W", _constant_stride(layout.out, layout.out_channels_last, g.c_out)),
        ("INDEX64", int(reads_need_64_bits(g, layout, (work.depth, 1, 32)))),
        ("MIN_BLOCKS", resident),
    )
    x_extents, y_extents = (g.n, g.c_in, *g.x_extent), (g.n, g.c_out, *g.out_extent)
    return Plan(
        kernel=name,
        defines=defines,
        grid=blocks * runs,
        block=THREADS,
        shared_bytes=work.shared_bytes(tile),
        problem=problem_parameters(
            g,
            layout,
            (runs, g.x_extent[1], tiles_w, tiles_c),
            whole_pieces(layout.x, x_extents, layout.x_aligned, tile.positions_w),
            whole_pieces(layout.out, y_extents, layout.out_aligned, row.piece),
        ),
        cost=work.cost_a_position(tile, refuse_tensor_cores(dtype, precision, device) is None) * prod(g.x_extent) * g.n,
        tile=tile,
    )


def refuse_channels(geometry: Geometry) -> str | None:
    """Return why a problem is not one of few channels, if it is none."""
    if min(geometry.c_in_per_group, geometry.c_out_per_group) > FEW:
        return f"serves at most {FEW} channels of x or of y a group"
    return refuse_steps(geometry)


class _Work:
    """The sizes that follow from a problem's compile-time parameters and a tile; the kernel computes the same ones."""

    def __init__(self, geometry: Geometry, dtype: str, layout: Layout, device: Device):
        g = geometry
        self.geometry, self.layout, self.device = g, layout, device
        self.itemsize = {"float64": 8, "float32": 4}.get(dtype, 2)
        self.words = 2 if dtype == "float64" else 1  # registers of an accumulator
        self.depth = (g.kernel[0] - 1) * g.dilation[0] // g.stride[0] + 1
        self.planes = min(g.kernel[0], g.stride[0] // gcd(g.stride[0], g.dilation[0]))  # of y that a step reads

    def tiles(self) -> Iterator[Tile]:
        """Yield the tiles that fit. They depend on neither N nor extents, which therefore never recompile."""
        channels = self.geometry.c_in
        lanes = 1
        if self.layout.x_channels_last and channels > 1:
            lanes = min((n for n in (32, 16, 8, 4, 2) if n < 2 * channels), key=lambda n: (round_up(channels, n), -n))
        choices = (True, False)
        may_hold = self.geometry.c_out_per_group == 1 and self.geometry.taps * self.words <= MAX_WEIGHTS_IN_REGISTERS
        for positions_w, shared, ahead, hold_weights in itertools.product((1, 2, 4, 8), choices, choices, choices):
            tile = Tile(positions_w, lanes, shared, ahead, hold_weights)
            if (shared and (lanes > 1 or self.layout.out[4] != 1)) or (hold_weights and not may_hold):
                continue
            fits_a_store = positions_w == 1 or positions_w * self.itemsize <= 16
            if fits_a_store and self.row(tile).is_possible and self.registers(tile) <= MAX_REGISTERS:
                yield tile

    def row(self, tile: Tile) -> Row:
        return Row.of(self.geometry, tile.positions_w, tile.shared, self.itemsize)

    def registers(self, tile: Tile) -> int:
        """Estimate the registers of a thread."""
        g, row = self.geometry, self.row(tile)
        held = self.planes if tile.ahead else 1
        count = self.words * (self.depth * tile.positions_w + row.columns[0])
        count += spent_on_window(row, held * g.kernel[1]) + g.kernel[1] + 44
        if tile.ahead:
            count += spent_ahead(row, g.kernel[1])
        # Weights that are not held are loaded ahead of their use; of very many, the compiler loads many so.
        loaded = min(g.taps // 4, 32) + max(0, g.taps - 144) // 2
        return with_margin(count + self.words * (g.taps if tile.hold_weights else loaded), self.device)

    def blocks(self, tile: Tile) -> int:
        """Blocks that a multiprocessor holds."""
        return max(1, min(8, REGISTERS // (THREADS * round_up(self.registers(tile), 8))))

    def shared_bytes(self, tile: Tile) -> int:
        lanes = tile.lanes_c + 1 if tile.lanes_c > 1 else 1
        return round_up(self.geometry.c_out_per_group * self.geometry.taps * lanes * 4 * self.words, 16)

    def clocks_a_position(self, tile: Tile) -> float:
        """Estimate the clocks of a multiprocessor for one position and all channels."""
        g, row = self.geometry, self.row(tile)
        rows = self.planes * g.kernel[1] * g.c_out_per_group
        weights = 0.0
        if not tile.hold_weights:
            weights = g.taps * g.c_out_per_group * (1 if tile.lanes_c > 1 else self.words / 4)
        arithmetic = g.taps * g.c_out_per_group * tile.positions_w * self.words
        addresses = 0 if _constant_stride(self.layout.out, self.layout.out_channels_last, g.c_out) else 2
        step = arithmetic + weights + rows * (row.instructions + addresses * row.columns[0]) + 4 * tile.positions_w + 40
        apart = 1 if tile.lanes_c > 1 else tile.positions_w * g.stride[2]  # elements, of the lanes of a warp
        l1 = (rows * row.l1_clocks(apart) + weights) / 32
        planes = g.c_out_per_group * (1 if tile.ahead else self.planes)  # that a warp waits for
        waiting = max(step, planes * LATENCY) if tile.ahead else step + planes * LATENCY
        a_step = max(step * (1 + BUSY / self.blocks(tile)) / LANES, l1, waiting / self.blocks(tile) / LANES)
        return a_step * g.c_in / tile.positions_w

    def cost_a_position(self, tile: Tile, beside_tensor_cores: bool) -> float:
        """Return the clocks for comparison with other kernels."""
        compared = COMPARED_OF_16_BITS if self.itemsize == 2 else COMPARED_OF_MORE
        if self.geometry.c_out_per_group == 1:
            compared = COMPARED
            if beside_tensor_cores and self.geometry.groups == 1 and not self.layout.x_channels_last:
                compared *= OF_SINGLE_CHANNEL
        return compared * max(self.clocks_a_position(tile), self.memory_clocks_a_position())

    def memory_clocks_a_position(self) -> float:
        """Return the clocks that a multiprocessor would take to move y and the result of a position."""
        g = self.geometry
        return (g.c_in + g.c_out * prod(g.stride)) * self.itemsize / BYTES_A_CLOCK
