"""Plans of the SIMT kernel for correlations, ``kernels/correlate.cu``, and the choice among all kernels for them.

A correlation is the adjoint of the transposed convolution x -> y that its `Geometry` describes: it reads y and writes
what has x's shape. Its `Layout` has the result as `x` and y as `out`.
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
    MAX_GRID,
    MAX_UNROLLED_TAPS,
    Device,
    Ints,
    Layout,
    Plan,
    Refusal,
    at_residue,
    axis_macros,
    best_of,
    least_cost,
    needs_64_bits,
    problem_parameters,
    refuse_steps,
    round_up,
)

LANES = 64  # of a multiprocessor's 128, what this kernel keeps busy (half of it in float64)
INSTRUCTIONS_A_STAGED_ELEMENT = 15
INSTRUCTIONS_A_RESULT = 40  # to turn and store it
# At most 168 registers a thread, so that accumulators stay in registers; those of float64 take more.
THREADS_A_MULTIPROCESSOR = 384
THREADS_OF_FLOAT64 = 256
RESERVED_BYTES = 1024  # shared memory that the hardware keeps for itself, a block
COMPARED = 1.9  # what the estimate is more optimistic than those of the tensor cores' kernels, measured on an H200


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
        """Positions of a block along D, H, W."""
        return (self.threads[0], self.threads[1], self.threads[2] * self.positions_w)

    @property
    def box_c(self) -> int:
        return self.threads_c * self.channels


@functools.lru_cache(maxsize=4096)
def make_correlate_plan(geometry: Geometry, dtype: str, layout: Layout, precision: str | None, device: Device) -> Plan:
    """Choose among the kernels of correlations, which serve every stride; see `cuconvt.plan_turned` for a stride of 1.

    Raises
    ------
    ValueError
        If no kernel can launch the problem.
    """
    from cuconvt.plan_correlate_disjoint import plan_correlate_disjoint
    from cuconvt.plan_correlate_few_channels import plan_correlate_few_channels
    from cuconvt.plan_correlate_gemm import plan_correlate_gemm
    from cuconvt.plan_correlate_narrow import plan_correlate_narrow
    from cuconvt.plan_correlate_rows import plan_correlate_rows
    from cuconvt.plan_correlate_turning import plan_correlate_turning
    from cuconvt.plan_correlate_wgmma import plan_correlate_wgmma
    from cuconvt.plan_phases import plan_correlate_of_phases

    families = (
        plan_correlate_disjoint,
        plan_correlate_rows,
        plan_correlate_gemm,
        plan_correlate_narrow,
        plan_correlate_few_channels,
        plan_correlate,
    )
    proposals = [family(geometry, dtype, layout, precision, device) for family in families]
    most = least_cost(proposals)
    of_wgmma = (plan_correlate_wgmma, plan_correlate_turning)
    proposals += (family(geometry, dtype, layout, precision, device, most=most) for family in of_wgmma)
    most = least_cost(proposals)
    proposals.append(plan_correlate_of_phases(geometry, dtype, layout, precision, device, most=most))
    return best_of(geometry, proposals)


def plan_correlate(
    geometry: Geometry, dtype: str, layout: Layout, precision: str | None, device: Device
) -> Plan | Refusal:
    """Propose the cheapest tile. The kernel computes in float32 (float64 for float64), which serves every precision."""
    if reason := refuse_steps(geometry):
        return Refusal("correlate", reason)
    tile = min(_tiles(geometry, dtype, layout, device), key=lambda t: _cost_a_position(geometry, t), default=None)
    if tile is None:
        return Refusal("correlate", f"no tile fits into {device.shared_bytes} bytes of shared memory")
    tiles_d, tiles_h, tiles_w = (-(-geometry.x_extent[a] // tile.box[a]) for a in range(3))
    tiles_c = -(-geometry.c_in_per_group // tile.box_c)
    grid = tiles_d * tiles_h * tiles_w * tiles_c * geometry.groups * geometry.n
    if grid > MAX_GRID:
        return Refusal("correlate", f"{grid} blocks are more than a launch takes ({MAX_GRID})")
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
        ("Y_CHANNELS_LAST", int(layout.out_channels_last)),
        ("OUT_CHANNELS_LAST", int(layout.x_channels_last)),
        ("INDEX64", int(reads_need_64_bits(geometry, layout, tile.box))),
        ("MIN_BLOCKS", _threads_held(dtype) // tile.block),
        ("SHARED_BYTES", shared),
    )
    return Plan(
        kernel="correlate",
        defines=defines,
        grid=grid,
        block=tile.block,
        shared_bytes=shared,
        problem=problem_parameters(geometry, layout, (tiles_d, tiles_h, tiles_w, tiles_c)),
        cost=COMPARED
        * _cost_a_position(geometry, tile)
        * prod(geometry.x_extent)
        * geometry.groups
        * geometry.n
        / lanes,
    )


def reads_need_64_bits(geometry: Geometry, layout: Layout, box: Ints) -> bool:
    """Return whether an offset, or a position of y that a box of positions of x reads, may reach 2**31."""
    g = geometry
    reached = (
        (x + 2 * b) * s + (k + 1) * d
        for x, b, s, k, d in zip(g.x_extent, box, g.stride, g.kernel, g.dilation, strict=True)
    )
    return needs_64_bits(geometry, layout, box) or max(*reached) >= INDEX_LIMIT


def _tiles(geometry: Geometry, dtype: str, layout: Layout, device: Device) -> Iterator[Tile]:
    """Yield the tiles that fit. They depend on neither N nor extents, which therefore never recompile."""
    accumulators = 32 if dtype == "float64" else 64
    threads = {1: (1, 1, 128), 2: (1, 16, 8), 3: (8, 4, 4)}[geometry.rank]
    # For newer architectures the compiler crashes on some kernels with more unrolled taps (16 of stride 8, say), and on
    # some with more positions where a chunk is a single channel.
    newer = device.compute_capability >= 100
    most = min(8, MAX_UNROLLED_TAPS) if newer else MAX_UNROLLED_TAPS
    several = (2, 1) if newer and geometry.c_out_per_group == 1 else (4, 2, 1)
    for halo in ((True, True, True), (False, True, True), (False, False, True), (False, False, False)):
        if halo[2] and geometry.kernel[2] > most:
            continue
        for channels, threads_c in itertools.product((16, 8, 4, 2, 1), (1, 2, 3)):
            positions_w = next(p for p in ((3, 1) if geometry.rank == 1 else several) if p * channels <= accumulators)
            if prod(threads) * threads_c > _threads_held(dtype) or (threads_c > 1 and channels < 8):
                continue
            for chunk in (8, 4, 2, 1):
                tile = Tile(threads, threads_c, positions_w, channels, chunk, halo)
                blocks = _threads_held(dtype) // tile.block
                room = (device.shared_bytes + RESERVED_BYTES) // blocks - RESERVED_BYTES
                if chunk < 2 * geometry.c_out_per_group and _shared_bytes(geometry, dtype, layout, tile) <= room:
                    yield tile
                    break


def _threads_held(dtype: str) -> int:
    return THREADS_OF_FLOAT64 if dtype == "float64" else THREADS_A_MULTIPROCESSOR


def _cost_a_position(geometry: Geometry, tile: Tile) -> float:
    """Estimate the instructions for one position and the channels of a group."""
    tiles_c = -(-geometry.c_in_per_group // tile.box_c)
    loads = 1 / 4 / tile.positions_w + 1 / tile.channels  # of a weight (four at a time) and of y, a multiply-add
    arithmetic = geometry.taps * tile.box_c * (1 + loads)
    passes = prod(1 if whole else kernel for whole, kernel in zip(tile.halo, geometry.kernel, strict=True))
    staged = prod(_staged_box(geometry, tile)) / prod(tile.box) * passes
    staging = INSTRUCTIONS_A_STAGED_ELEMENT * (staged + geometry.taps * tile.box_c / prod(tile.box))
    return tiles_c * (geometry.c_out_per_group * (arithmetic + staging) + INSTRUCTIONS_A_RESULT * tile.box_c)


@functools.lru_cache(maxsize=4096)
def staged_axis(taps: int, stride: int, dilation: int, box: int) -> tuple[int, int, int]:
    """Return how far apart neighbouring positions and taps are in a staged box, and its extent: see boxes.cuh."""
    gap = gcd(stride, dilation) if taps > 1 else stride
    step, hop = stride // gap, dilation // gap if taps > 1 else 0
    return step, hop, (box - 1) * step + (taps - 1) * hop + 1


def _staged_box(geometry: Geometry, tile: Tile) -> tuple[int, int, int]:
    """Return the extents of the box of y that the kernel stages."""
    d, h, w = (
        staged_axis(geometry.kernel[a] if tile.halo[a] else 1, geometry.stride[a], geometry.dilation[a], tile.box[a])[2]
        for a in range(3)
    )
    return d, h, w


def _shared_bytes(geometry: Geometry, dtype: str, layout: Layout, tile: Tile) -> int:
    """Return the kernel's shared memory; it asserts the same number (SHARED) when it is compiled."""
    y_d, y_h, y_w = _staged_box(geometry, tile)
    steps = [
        staged_axis(geometry.kernel[a] if tile.halo[a] else 1, geometry.stride[a], geometry.dilation[a], 1)[0]
        for a in range(3)
    ]
    apart = tile.positions_w * steps[2]
    row = y_w if apart % 2 else at_residue(y_w, 1, 4)
    plane = y_h * row
    if tile.threads[0] > 1:
        plane = at_residue(plane, 16 if apart % 8 or steps[0] > 1 else 1, 32)
    channel = at_residue(y_d * plane, 4, 32) if layout.out_channels_last else y_d * plane
    taps = prod(kernel if whole else 1 for kernel, whole in zip(geometry.kernel, tile.halo, strict=True))
    weights = taps * (round_up(tile.box_c, 4) + 4)
    stage = round_up(tile.chunk * channel, 4) + tile.chunk * weights
    threads = prod(tile.threads)
    piece = threads * tile.box_c if layout.x_channels_last else tile.threads_c * prod(tile.box)
    return max(stage, piece) * (8 if dtype == "float64" else 4)
