"""Plans of the general SIMT kernel, ``kernels/gather.cu``."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd, prod

from cuconvt.geometry import Geometry
from cuconvt.plan import (
    DTYPE_CODES,
    MAX_GRID,
    MAX_UNROLLED_TAPS,
    Device,
    Layout,
    Plan,
    Refusal,
    all_positions,
    at_residue,
    axis_macros,
    needs_64_bits,
    positions,
    problem_parameters,
    refuse_steps,
    round_up,
)
from cuconvt.plan_few_channels import FEW

LANES = 64  # of a multiprocessor's 128, what this kernel keeps busy (half of it in float64)
INSTRUCTIONS_AN_OUTPUT = (
    75  # to turn and store it, waiting included: fitted to depthwise and 8-channel cases on an H200
)
MANY = 24  # channels of x
MANY_TO_FEW = 2.2  # how much longer many channels to few take than the rest of the estimate says
MAX_PHASES_A_THREAD = 16
THREADS_A_MULTIPROCESSOR = 384  # at most 168 registers a thread, so that accumulators stay in registers
RESERVED_BYTES = 1024  # shared memory that the hardware keeps for itself, a block


@dataclass(frozen=True)
class Tile:
    """The compile-time shape of a block; the fields are the macros of the kernel."""

    threads: tuple[int, int, int]  # along D, H, W
    threads_c: int
    positions_w: int
    channels: int
    chunk: int
    halo: tuple[bool, bool, bool]

    @property
    def block(self) -> int:
        return prod(self.threads) * self.threads_c

    @property
    def box(self) -> tuple[int, int, int]:
        """Positions q of a block along D, H, W."""
        return (self.threads[0], self.threads[1], self.threads[2] * self.positions_w)

    @property
    def box_c(self) -> int:
        return self.threads_c * self.channels


def plan_gather(
    geometry: Geometry, dtype: str, layout: Layout, precision: str | None, device: Device, tile: Tile | None = None
) -> Plan | Refusal:
    """Propose the cheapest tile, or a given one. It serves every precision, in float32 (float64 for float64)."""
    if reason := refuse_steps(geometry):
        return Refusal("gather", reason)
    fitting = _tiles(geometry, dtype, layout, device)
    tile = tile or min(fitting, key=lambda t: _cost_a_position(geometry, t), default=None)
    if tile is None:
        return Refusal("gather", f"no tile fits into {device.shared_bytes} bytes of shared memory")
    tiles_d, tiles_h, tiles_w = (-(-positions(geometry, a) // tile.box[a]) for a in range(3))
    tiles_c = -(-geometry.c_out_per_group // tile.box_c)
    phases = geometry.stride[0] * geometry.stride[1] * (1 if tile.halo[2] else geometry.stride[2])
    grid = tiles_d * tiles_h * tiles_w * phases * tiles_c * geometry.groups * geometry.n
    if grid > MAX_GRID:
        return Refusal("gather", f"{grid} blocks are more than a launch takes ({MAX_GRID})")
    shared = _shared_bytes(geometry, dtype, layout, tile)
    lanes = LANES // 2 if dtype == "float64" else LANES
    defines = (
        ("DTYPE", DTYPE_CODES[dtype]),
        *axis_macros(
            KERNEL=geometry.kernel,
            STRIDE=geometry.stride,
            DILATION=geometry.dilation,
            THREADS=tile.threads,
            HALO=tuple(map(int, tile.halo)),
        ),
        ("THREADS_C", tile.threads_c),
        ("POSITIONS_W", tile.positions_w),
        ("CHANNELS", tile.channels),
        ("CHUNK", tile.chunk),
        ("X_CHANNELS_LAST", int(layout.x_channels_last)),
        ("OUT_CHANNELS_LAST", int(layout.out_channels_last)),
        ("INDEX64", int(needs_64_bits(geometry, layout, tile.box))),
        ("MIN_BLOCKS", _blocks(geometry, dtype, tile)),
        ("SHARED_BYTES", shared),
    )
    return Plan(
        kernel="gather",
        defines=defines,
        grid=grid,
        block=tile.block,
        shared_bytes=shared,
        problem=problem_parameters(geometry, layout, (tiles_d, tiles_h, tiles_w, tiles_c)),
        cost=_cost_a_position(geometry, tile) * all_positions(geometry) / lanes,
        tile=tile,
    )


def candidates(geometry: Geometry, dtype: str, layout: Layout, precision: str | None, device: Device) -> Iterator[Plan]:
    """Yield a plan for every tile that fits, among them the one that is proposed."""
    for tile in _tiles(geometry, dtype, layout, device):
        plan = plan_gather(geometry, dtype, layout, precision, device, tile)
        if isinstance(plan, Plan):
            yield plan


def _tiles(geometry: Geometry, dtype: str, layout: Layout, device: Device) -> Iterator[Tile]:
    """Yield the tiles that fit. They depend on neither N nor extents, which therefore never recompile."""
    accumulators = 32 if dtype == "float64" else 64
    for halo in ((True, True, True), (False, True, True), (False, False, True), (False, False, False)):
        if halo[2] and (geometry.kernel[2] > MAX_UNROLLED_TAPS or geometry.stride[2] > MAX_PHASES_A_THREAD):
            continue
        phases = geometry.stride[2] if halo[2] else 1
        found = False
        for channels, threads_c in itertools.product((16, 8, 4, 2, 1), (1, 2, 3)):
            wanted = (3, 1) if geometry.rank == 1 else (4, 2, 1)
            positions_w = next((p for p in wanted if p * phases * channels <= accumulators), 0)
            if not positions_w or (threads_c > 1 and channels < min(8, accumulators // phases)):
                continue
            threads = {1: (1, 1, 128), 2: (1, 16, 8), 3: (8, 4, 4)}[geometry.rank]
            for chunk in (8, 4, 2, 1):
                tile = Tile(threads, threads_c, positions_w, channels, chunk, halo)
                blocks = _blocks(geometry, dtype, tile)
                if not blocks:
                    break
                room = (device.shared_bytes + RESERVED_BYTES) // blocks - RESERVED_BYTES
                if chunk < 2 * geometry.c_in_per_group and _shared_bytes(geometry, dtype, layout, tile) <= room:
                    found = True
                    yield tile
                    break
        if found:
            return  # restaging x for every tap is for what does not fit otherwise


def _blocks(geometry: Geometry, dtype: str, tile: Tile) -> int:
    """Return how many blocks share a multiprocessor, or 0 where the accumulators leave no registers for a whole one."""
    threads = THREADS_A_MULTIPROCESSOR
    if dtype == "float64" and tile.halo[2] and geometry.stride[2] > 1:
        threads = 256  # at most 255 registers a thread: with several phases, 168 are too few for 64-bit accumulators
    return threads // tile.block


def _cost_a_position(geometry: Geometry, tile: Tile) -> float:
    """Estimate the instructions for one position q with all its phases and the channels of a group."""
    tiles_c = -(-geometry.c_out_per_group // tile.box_c)
    loads = 1 / 4 + 1 / tile.channels  # of a weight (four at a time, over POSITIONS_W) and of x, a multiply-add
    arithmetic = geometry.taps * tile.box_c * (1 + loads / tile.positions_w)
    staged = prod(_staged_box(geometry, tile)) / prod(tile.box)
    passes = prod(1 if whole else kernel for whole, kernel in zip(tile.halo, geometry.kernel, strict=True))
    staging = 20 * staged * passes * geometry.stride[0] * geometry.stride[1]
    epilogue = INSTRUCTIONS_AN_OUTPUT * prod(geometry.stride) * tile.box_c
    slower = MANY_TO_FEW if geometry.c_in_per_group >= MANY and geometry.c_out_per_group <= FEW else 1
    return slower * tiles_c * (geometry.c_in_per_group * (arithmetic + staging) + epilogue)


def _staged_box(geometry: Geometry, tile: Tile) -> tuple[int, int, int]:
    """Return the extents of the input box that the kernel stages: X_D, X_H, X_W."""
    extents = []
    for axis in range(2):
        step = geometry.stride[axis] // gcd(geometry.stride[axis], geometry.dilation[axis])
        hop = geometry.dilation[axis] // gcd(geometry.stride[axis], geometry.dilation[axis])
        taps = -(-geometry.kernel[axis] // step) if tile.halo[axis] else 1
        extents.append(tile.box[axis] + (taps - 1) * hop)
    reach = (geometry.kernel[2] - 1) * geometry.dilation[2] // geometry.stride[2] if tile.halo[2] else 0
    return (extents[0], extents[1], tile.box[2] + reach)


def _shared_bytes(geometry: Geometry, dtype: str, layout: Layout, tile: Tile) -> int:
    """Return the kernel's shared memory; it asserts the same number (SHARED) when it is compiled."""
    x_d, x_h, x_w = _staged_box(geometry, tile)
    row = x_w if tile.positions_w % 2 else at_residue(x_w, 1, tile.positions_w)
    plane = at_residue(x_h * row, 16, 32) if tile.threads[0] > 1 else x_h * row
    channel = at_residue(x_d * plane, 4, 32) if layout.x_channels_last else x_d * plane
    taps = 1
    for axis in range(3):
        stride, dilation, kernel = geometry.stride[axis], geometry.dilation[axis], geometry.kernel[axis]
        a_phase = kernel if axis == 2 else -(-kernel * gcd(stride, dilation) // stride)
        taps *= a_phase if tile.halo[axis] else 1
    weights = taps * (round_up(tile.box_c, 4) + 4)
    stage = round_up(tile.chunk * channel, 4) + tile.chunk * weights
    threads = prod(tile.threads)
    phases = geometry.stride[2] if tile.halo[2] else 1
    piece = threads * tile.box_c if layout.out_channels_last else tile.threads_c * prod(tile.box) * phases
    return max(stage, piece) * (8 if dtype == "float64" else 4)
