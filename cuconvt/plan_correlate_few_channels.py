"""Plans of the kernel for correlations with few channels per group, ``kernels/correlate_few_channels.cu``."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd, prod

from cuconvt.geometry import Geometry
from cuconvt.plan import AXES, DTYPE_CODES, MAX_GRID, Device, Layout, Plan, Refusal, problem_parameters, round_up
from cuconvt.plan_correlate import reads_need_64_bits, staged_axis
from cuconvt.plan_correlate_gemm import with_margin
from cuconvt.plan_few_channels import _batch_as_axis

THREADS = 128
FEW = 4  # channels
MAX_REGISTERS = 208  # of a thread, by estimate
MAX_WEIGHTS_IN_REGISTERS = 72
MAX_SHARED_BYTES = 48 * 1024
REGISTERS = 65536  # of a multiprocessor
WAVES = 4  # of blocks, at least, where the slide along D can be cut

LANES = 128  # threads that a multiprocessor advances by an instruction a clock
ISSUE_RATE = 0.7  # the share of these clocks that is used at best
L1_BYTES_A_CLOCK = 64
BYTES_A_CLOCK = 18  # to and from memory
LATENCY = 800  # clocks until a load from memory arrives


@dataclass(frozen=True)
class Tile:
    """The compile-time shape of a thread's work; the fields are the macros of the kernel."""

    positions_w: int
    lanes_c: int


def plan_correlate_few_channels(
    geometry: Geometry, dtype: str, layout: Layout, precision: str | None, device: Device
) -> Plan | Refusal:
    """Propose the cheapest tile. The kernel computes in float32 (float64 for float64), which serves every precision."""
    name = "correlate_few_channels"
    if reason := _refuse(geometry):
        return Refusal(name, reason)
    geometry, layout = _batch_as_axis(geometry, layout)
    g = geometry
    work = _Work(g, dtype, layout, device)
    tile = min(_tiles(work), key=work.clocks_a_position, default=None)
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
    per_axis = {"KERNEL": g.kernel, "STRIDE": g.stride, "DILATION": g.dilation}
    defines = (
        ("DTYPE", DTYPE_CODES[dtype]),
        *(
            (f"{name}_{axis}", value)
            for name, values in per_axis.items()
            for axis, value in zip(AXES, values, strict=True)
        ),
        ("POSITIONS_W", tile.positions_w),
        ("LANES_C", tile.lanes_c),
        ("HOLD_WEIGHTS", int(work.holds_weights)),
        ("INDEX64", int(reads_need_64_bits(g, layout, (work.depth, 1, 32)))),
        ("MIN_BLOCKS", resident),
    )
    return Plan(
        kernel=name,
        defines=defines,
        grid=blocks * runs,
        block=THREADS,
        shared_bytes=work.shared_bytes(tile),
        problem=problem_parameters(g, layout, (runs, g.x_extent[1], tiles_w, tiles_c)),
        cost=max(work.clocks_a_position(tile), work.memory_clocks_a_position()) * prod(g.x_extent) * g.n,
    )


def _refuse(geometry: Geometry) -> str | None:
    if min(geometry.c_in_per_group, geometry.c_out_per_group) > FEW:
        return f"serves at most {FEW} channels of x or of y a group"
    if max(*geometry.stride, *(d * k for d, k in zip(geometry.dilation, geometry.kernel, strict=True))) >= 2**31:
        return "stride and dilation * kernel must stay below 2**31 on every axis"
    return None


def _tiles(work: _Work) -> Iterator[Tile]:
    """Yield the tiles that fit. They depend on neither N nor extents, which therefore never recompile."""
    channels = work.geometry.c_in
    lanes = (1,)
    if work.layout.x_channels_last and channels > 1:
        lanes = (min((n for n in (32, 16, 8, 4, 2) if n < 2 * channels), key=lambda n: (round_up(channels, n), -n)),)
    for positions_w, lanes_c in itertools.product((1, 2, 4), lanes):
        tile = Tile(positions_w, lanes_c)
        if work.columns(tile)[1] <= 32 and work.registers(tile) <= MAX_REGISTERS:
            yield tile


class _Work:
    """The sizes that follow from a problem's compile-time parameters and a tile; the kernel computes the same ones."""

    def __init__(self, geometry: Geometry, dtype: str, layout: Layout, device: Device):
        g = geometry
        self.geometry, self.layout, self.device = g, layout, device
        self.itemsize = {"float64": 8, "float32": 4}.get(dtype, 2)
        self.words = 2 if dtype == "float64" else 1  # registers of an accumulator
        self.depth = (g.kernel[0] - 1) * g.dilation[0] // g.stride[0] + 1
        self.planes = min(g.kernel[0], g.stride[0] // gcd(g.stride[0], g.dilation[0]))  # of y that a step reads
        self.holds_weights = g.c_out_per_group == 1 and g.taps * self.words <= MAX_WEIGHTS_IN_REGISTERS

    def columns(self, tile: Tile) -> tuple[int, int]:
        """Return how many columns of a row of y a thread reads, and from how many on it reads none."""
        g = self.geometry
        step, hop, _ = staged_axis(g.kernel[2], g.stride[2], g.dilation[2], 1)
        found = {t * step + tap * hop for t in range(tile.positions_w) for tap in range(g.kernel[2])}
        return len(found), max(found) + 1

    def registers(self, tile: Tile) -> int:
        """Estimate the registers of a thread."""
        g = self.geometry
        columns = self.columns(tile)[0]
        plane = g.kernel[1] * columns
        count = self.words * (self.depth * tile.positions_w + plane) + g.kernel[1] + 48
        if self.holds_weights:
            return with_margin(count + self.words * g.taps, self.device)
        # Weights are loaded ahead of their use, and so are the other planes, whose addresses take registers too.
        ahead = self.planes * plane // 2
        return with_margin(count + self.words * (min(g.taps, 48) + ahead) + 2 * columns, self.device)

    def blocks(self, tile: Tile) -> int:
        """Blocks that a multiprocessor holds."""
        return max(1, min(8, REGISTERS // (THREADS * round_up(self.registers(tile), 8))))

    def shared_bytes(self, tile: Tile) -> int:
        lanes = tile.lanes_c + 1 if tile.lanes_c > 1 else 1
        return round_up(self.geometry.c_out_per_group * self.geometry.taps * lanes * 4 * self.words, 16)

    def clocks_a_position(self, tile: Tile) -> float:
        """Estimate the clocks of a multiprocessor for one position and all channels."""
        g = self.geometry
        loads = self.planes * g.kernel[1] * self.columns(tile)[0] * g.c_out_per_group
        weights = 0 if self.holds_weights else g.taps * g.c_out_per_group
        arithmetic = g.taps * g.c_out_per_group * tile.positions_w * self.words
        step = arithmetic + weights + loads * (2.5 + (self.itemsize == 2)) + 12 * tile.positions_w + 30
        apart = 1 if tile.lanes_c > 1 else tile.positions_w * g.stride[2]  # elements, of the lanes of a warp
        l1 = loads * 32 * min(32, apart * self.itemsize) / L1_BYTES_A_CLOCK / 32
        waiting = max(step, g.c_out_per_group * LATENCY) / self.blocks(tile)
        a_step = max(step / ISSUE_RATE / LANES, l1, waiting / LANES)
        return a_step * g.c_in / tile.positions_w

    def memory_clocks_a_position(self) -> float:
        """Return the clocks that a multiprocessor would take to move y and the result of a position."""
        g = self.geometry
        return (g.c_in + g.c_out * prod(g.stride)) * self.itemsize / BYTES_A_CLOCK
