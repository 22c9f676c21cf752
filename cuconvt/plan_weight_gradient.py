"""Plans of the SIMT kernel for weight gradients, ``kernels/weight_gradient.cu``, and the choice among all kernels.

The `Layout` of a weight gradient has x and y, both read, as `x` and `out`, and the gradient, which is written, as
`weight`.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import gcd, inf, prod

from cuconvt.geometry import Geometry
from cuconvt.plan import (
    DTYPE_CODES,
    MAX_GRID,
    Device,
    Ints,
    Layout,
    Plan,
    Refusal,
    alike,
    axis_macros,
    best_of,
    least_cost,
    problem_parameters,
    refuse_steps,
    round_up,
)
from cuconvt.plan_correlate import reads_need_64_bits, staged_axis
from cuconvt.plan_search import remembered

THREADS = 128
MAX_WORKSPACE_BYTES = 256 * 2**20
MAX_TAPS = 16  # of a tile along one axis
WAVES = 4  # of blocks, at most
LEAST_BOXES = 2  # that a block walks over, for a part costs its share of the second pass
BOXES_AROUND = 2  # what a block takes before and after its boxes, in boxes
MOST_SUM_BLOCKS = 8  # of the second pass, that a multiprocessor has threads for
SUM_THREADS = 256  # of such a block,
MAX_SLICES = 8  # up to how many of which share a value,
PARTS_OF_SLICE = 8  # and how many parts each of these adds up before: kernels/partial_sums.cuh
WIDE_BYTES = 16  # of a thread's values, where that leaves
WIDE_BLOCKS = 1.5  # blocks for each multiprocessor

LANES = 64  # of a multiprocessor's 128, what this kernel keeps busy (half of it in float64)
INSTRUCTIONS_A_STAGED_ELEMENT = 15
INSTRUCTIONS_A_RUN = 12  # its addresses
INSTRUCTIONS_A_BOX = 150  # of each thread
THREADS_A_MULTIPROCESSOR = 384  # at most 168 registers a thread, so that accumulators stay in registers
BATCH = 4  # loads in flight a thread, of stage_box in kernels/boxes.cuh
RESERVED_BYTES = 1024  # shared memory that the hardware keeps for itself, a block
COMPARED = 2.6  # what the estimate is more optimistic than those of the tensor cores' kernels, measured on an H200
# Of two kernels that are compared by size, too, the one with the higher cost takes less time up to this ratio.
WORTH_COMPARING = 1.6


@dataclass(frozen=True)
class Tile:
    """The compile-time shape of a block; the fields are the macros of the kernel."""

    taps: tuple[int, int, int]  # along D (of one phase), H and W
    channels: tuple[int, int]  # of x and y, that a thread owns
    threads: tuple[int, int, int, int]  # along the channels of x and y, the groups and the positions
    box: tuple[int, int]  # positions along H and W
    positions: int

    @property
    def channels_in(self) -> int:
        """Channels of x of a group, likewise of y below."""
        return self.channels[0] * self.threads[0]

    @property
    def channels_out(self) -> int:
        return self.channels[1] * self.threads[1]

    @property
    def values(self) -> int:
        """Weights of a block."""
        return prod(self.channels) * prod(self.taps) * prod(self.threads[:3])


@functools.lru_cache(maxsize=4096)
def make_weight_gradient_plan(
    geometry: Geometry, dtype: str, layout: Layout, precision: str | None, device: Device
) -> Plan:
    """Choose the kernel of a weight gradient.

    Raises
    ------
    ValueError
        If no kernel can launch the problem.
    """
    from cuconvt.plan_phases import plan_weight_gradient_of_phases
    from cuconvt.plan_weight_gradient_few_channels import plan_weight_gradient_few_channels
    from cuconvt.plan_weight_gradient_gemm import plan_weight_gradient_gemm
    from cuconvt.plan_weight_gradient_narrow import plan_weight_gradient_narrow
    from cuconvt.plan_weight_gradient_tma import plan_weight_gradient_tma
    from cuconvt.plan_weight_gradient_wgmma import plan_weight_gradient_wgmma

    families = (
        plan_weight_gradient_tma,
        plan_weight_gradient_of_phases,
        plan_weight_gradient_gemm,
        plan_weight_gradient_narrow,
        plan_weight_gradient_few_channels,
    )
    proposals = [family(geometry, dtype, layout, precision, device) for family in families]
    by_size = any(isinstance(proposal, Plan) and proposal.clocks for proposal in proposals)
    for last, times in (plan_weight_gradient_wgmma, WORTH_COMPARING if by_size else 1), (plan_weight_gradient, 1):
        proposals.append(last(geometry, dtype, layout, precision, device, most=times * least_cost(proposals)))
    return _fastest_for_size(best_of(geometry, proposals), proposals)


def _fastest_for_size(best: Plan, proposals: list[Plan | Refusal]) -> Plan:
    """Return the best plan, or one that takes less time for this size, by estimates that compare."""
    if not best.clocks:
        return best
    plans = [plan for plan in proposals if isinstance(plan, Plan) and plan.clocks]
    fastest = min(plans, key=lambda plan: plan.clocks)
    if fastest.kernel == best.kernel:
        return best
    by_cost = f"{fastest.kernel}: cost {fastest.cost:.3g} against {best.cost:.3g}"
    by_size = f"{best.kernel}: {best.clocks:.3g} clocks against {fastest.clocks:.3g} for this size"
    return replace(fastest, refused=(by_size, *(reason for reason in best.refused if reason != by_cost)))


def plan_weight_gradient(
    geometry: Geometry, dtype: str, layout: Layout, precision: str | None, device: Device, most: float = inf
) -> Plan | Refusal:
    """Propose the cheapest tile. The kernel computes in float32 (float64 for float64), which serves every precision.

    Not where its cost must be more than `most`, since multiply-adds alone take longer.
    """
    if reason := refuse_steps(geometry):
        return Refusal("weight_gradient", reason)
    g = geometry
    lanes = LANES // 2 if dtype == "float64" else LANES
    times = COMPARED * g.n * prod(g.x_extent) / lanes
    if (least := times * g.taps * g.c_in * g.c_out_per_group) > most:
        return Refusal("weight_gradient", f"cost at least {least:.3g} against {most:.3g}")
    tile = choose_tile(*alike(g, layout), dtype, device)
    if tile is None:
        return Refusal("weight_gradient", f"no tile fits into {device.shared_bytes} bytes of shared memory")
    planes = g.x_extent[0] + (tile.taps[0] - 1) * _phases_d(g)[2]  # of the first tap along D; later taps are behind
    boxes = (planes, -(-g.x_extent[1] // tile.box[0]), -(-g.x_extent[2] // tile.box[1]))
    tiles = _tiles_of_weights(g, tile)
    if g.n * prod(boxes) >= 2**31 or tiles > MAX_GRID:
        return Refusal("weight_gradient", f"{g.n * prod(boxes)} boxes or {tiles} tiles are more than it counts")
    itemsize = 8 if dtype == "float64" else 4
    parts = parts_of(g.n * prod(boxes), tiles, itemsize * tile.values, device, THREADS_A_MULTIPROCESSOR // THREADS)
    shared = _shared_bytes(g, dtype, tile)
    defines = (
        ("DTYPE", DTYPE_CODES[dtype]),
        *axis_macros(KERNEL=g.kernel, STRIDE=g.stride, DILATION=g.dilation),
        *zip(("TAPS_D", "TAPS_H", "TAPS_W"), tile.taps, strict=True),
        *zip(("CHANNELS_IN", "CHANNELS_OUT"), tile.channels, strict=True),
        *zip(("THREADS_IN", "THREADS_OUT", "THREADS_G", "THREADS_K"), tile.threads, strict=True),
        *zip(("BOX_H", "BOX_W"), tile.box, strict=True),
        ("POSITIONS", tile.positions),
        ("X_CHANNELS_LAST", int(layout.x_channels_last)),
        ("Y_CHANNELS_LAST", int(layout.out_channels_last)),
        ("INDEX64", int(reads_need_64_bits(g, layout, (1, *tile.box)))),
        ("MIN_BLOCKS", THREADS_A_MULTIPROCESSOR // THREADS),
        ("SHARED_BYTES", shared),
    )
    return Plan(
        kernel="weight_gradient",
        defines=defines,
        grid=tiles * parts,
        block=THREADS,
        shared_bytes=shared,
        problem=problem_parameters(g, layout, (*boxes, parts)),
        cost=COMPARED * _cost_a_position(g, tile) * g.n * prod(g.x_extent) / lanes,
        workspace_bytes=itemsize * tiles * tile.values * parts if parts > 1 else 0,
        sums=tiles * tile.values if parts > 1 else 0,
    )


def parts_of(
    boxes: int, tiles: int, tile_bytes: int, device: Device, blocks: int, least_boxes: int = LEAST_BOXES
) -> int:
    """Return into how many parts the positions are cut: so that the last of the blocks ends as early as may be.

    A multiprocessor holds `blocks` at a time, so that the tiles of all parts take rounds. Of equal numbers, the least
    wins, for the parts have to be added up.
    """
    held = blocks * device.multiprocessors
    affordable = MAX_WORKSPACE_BYTES // (tiles * tile_bytes)
    most = max(1, min(-(-WAVES * held // tiles), affordable, -(-boxes // least_boxes), MAX_GRID // tiles))
    return min(range(1, most + 1), key=lambda parts: -(-parts * tiles // held) * (-(-boxes // parts) + BOXES_AROUND))


def sum_blocks(plan: Plan, dtype: str, device: Device) -> int:
    """Return the blocks of the second pass of a plan that has one."""
    if plan.sums_a_block:
        return -(-plan.sums // plan.sums_a_block)
    itemsize = 8 if dtype == "float64" else 4
    parts = plan.workspace_bytes // (plan.sums * itemsize)
    slices = next(n for n in (1, 2, 4, MAX_SLICES) if n == MAX_SLICES or n * PARTS_OF_SLICE >= parts)
    values = SUM_THREADS // slices  # of a block
    wide = WIDE_BYTES // itemsize
    if not plan.sums % wide and plan.sums >= wide * values * WIDE_BLOCKS * device.multiprocessors:
        values *= wide
    return -(-plan.sums // values)


def spread_bytes(blocks: int, static_bytes: int, device: Device) -> int:
    """Return the dynamic shared memory of the second pass with which a multiprocessor holds its share of blocks alone.

    Its blocks come one by one, as those of the first pass end. The multiprocessors that are done first would take
    several each, and the last ones none.
    """
    share = -(-blocks // device.multiprocessors)
    if share >= MOST_SUM_BLOCKS:
        return 0
    too_many = (device.shared_bytes + RESERVED_BYTES) // (share + 1)
    return max(0, round_up(too_many + 1, RESERVED_BYTES) - RESERVED_BYTES - static_bytes)


def _tiles_of_weights(geometry: Geometry, tile: Tile) -> int:
    g = geometry
    phases, most, _ = _phases_d(g)
    taps = phases * -(-most // tile.taps[0]) * -(-g.kernel[1] // tile.taps[1]) * -(-g.kernel[2] // tile.taps[2])
    channels = -(-g.c_in_per_group // tile.channels_in) * -(-g.c_out_per_group // tile.channels_out)
    return taps * channels * -(-g.groups // tile.threads[2])


def _phases_d(geometry: Geometry) -> tuple[int, int, int]:
    """Return the phases along D that have a tap, the most taps of one, and how many planes of x these are apart."""
    kernel, stride, dilation = geometry.kernel[0], geometry.stride[0], geometry.dilation[0]
    step = stride // gcd(stride, dilation)
    return min(step, kernel), -(-kernel // step), dilation // gcd(stride, dilation)


@remembered(Tile)
def choose_tile(geometry: Geometry, layout: Layout, dtype: str, device: Device) -> Tile | None:
    """Return the cheapest tile, or None if none fits."""
    tiles = _tiles(geometry, dtype, layout, device)
    return min(tiles, key=lambda tile: _cost_a_position(geometry, tile), default=None)


def _tiles(geometry: Geometry, dtype: str, layout: Layout, device: Device) -> Iterator[Tile]:
    """Yield the tiles that fit. They depend on neither N nor extents, which therefore never recompile."""
    g = geometry
    most = 32 if dtype == "float64" else 64
    boxes = [(1, 64), (1, 128), (1, 512)] if g.rank == 1 else [(4, 16), (8, 16), (16, 32)]
    blocks = THREADS_A_MULTIPROCESSOR // THREADS
    room = (device.shared_bytes + RESERVED_BYTES) // blocks - RESERVED_BYTES
    newer = device.compute_capability >= 100
    taps_d = (_phases_d(g)[1], 1)
    for taps in itertools.product(taps_d, _equal_shares(g.kernel[1]), _equal_shares(g.kernel[2])):
        for channels in itertools.product((4, 2, 1), (4, 2, 1)):
            if prod(taps) * prod(channels) > most:
                continue
            threads_in, threads_out = (
                min(8, _power_of_two(-(-count // own)))
                for count, own in zip((g.c_in_per_group, g.c_out_per_group), channels, strict=True)
            )
            for threads_g in _threads_along_groups(g, layout, threads_in * threads_out):
                threads = (threads_in, threads_out, threads_g, THREADS // (threads_in * threads_out * threads_g))
                for box, positions in itertools.product(boxes, (4, 2, 1)):
                    tile = Tile(taps, channels, threads, box, positions)
                    if _shared_bytes(g, dtype, tile) <= room and not (newer and _crashes_compiler(g, layout, tile)):
                        yield tile


def _crashes_compiler(geometry: Geometry, layout: Layout, tile: Tile) -> bool:
    """Return whether NVRTC 12.9 crashes on a tile for sm_100 and newer (13.0 does not).

    It does where the threads of ``stage_box`` take several steps along a row of y, but one batch of loads for all
    lines, of which they have different numbers. The rule was right for each of 1911 tiles, 168 of which crash.
    """
    if layout.out_channels_last:
        return False
    _, height, width = _staged_box(geometry, tile)
    along_row = max((16, 32, 64, 128), key=lambda threads: (-round_up(width, threads), threads))  # row_threads
    channels = tile.threads[2] * tile.channels_out
    lines, threads = channels * height, THREADS // along_row
    uneven = _power_of_two(lines) != lines and (lines > threads or channels > 1)
    return width > along_row and lines <= BATCH * threads and uneven


def _equal_shares(taps: int) -> tuple[int, ...]:
    """Return the taps of a tile along an axis, for some numbers of tiles that share them equally."""
    shares = sorted({-(-taps // tiles) for tiles in range(1, taps + 1)}, reverse=True)
    return (*[share for share in shares if 1 < share <= MAX_TAPS][:4], 1)


def _threads_along_groups(geometry: Geometry, layout: Layout, threads: int) -> tuple[int, ...]:
    """Return how many groups a block may take: several where their channels are next to each other in memory."""
    if not (layout.x_channels_last or layout.out_channels_last) or geometry.groups == 1:
        return (1,)
    return tuple(n for n in (16, 4, 1) if n * threads <= THREADS and n < 2 * geometry.groups)


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()


def _cost_a_position(geometry: Geometry, tile: Tile) -> float:
    """Estimate the instructions for one position and all weights."""
    (_, box_h, box_w), (in_, out) = _staged_box(geometry, tile), tile.channels
    positions, runs = prod(tile.box), prod(tile.box) // tile.positions
    step, hop, _ = staged_axis(tile.taps[2], geometry.stride[2], geometry.dilation[2], 1)
    columns = _columns(tile.positions, step, tile.taps[2], hop)
    a_run = tile.positions * in_ * (tile.taps[0] + out * prod(tile.taps)) + out * tile.taps[1] * columns
    a_run += INSTRUCTIONS_A_RUN
    arithmetic = -(-runs // tile.threads[3]) * a_run * THREADS
    staged = tile.threads[2] * (tile.channels_in * tile.taps[0] * positions + tile.channels_out * box_h * box_w)
    a_box = arithmetic + INSTRUCTIONS_A_STAGED_ELEMENT * staged + INSTRUCTIONS_A_BOX * THREADS
    return _tiles_of_weights(geometry, tile) * a_box / positions


@functools.lru_cache(maxsize=4096)
def _columns(positions: int, step: int, taps: int, hop: int) -> int:
    """Return how many elements of a row the taps of so many positions next to each other read."""
    return len({t * step + k * hop for t in range(positions) for k in range(taps)})


def _staged_box(geometry: Geometry, tile: Tile) -> Ints:
    """Return the extents of the box of y that the kernel stages."""
    h, w = (staged_axis(tile.taps[a], geometry.stride[a], geometry.dilation[a], tile.box[a - 1])[2] for a in (1, 2))
    return (1, h, w)


def _shared_bytes(geometry: Geometry, dtype: str, tile: Tile) -> int:
    """Return the kernel's shared memory; it asserts the same number (SHARED) when it is compiled."""
    _, box_h, box_w = _staged_box(geometry, tile)
    groups, threads_k = tile.threads[2:]
    x = round_up(groups * tile.channels_in * (tile.taps[0] * prod(tile.box) | 1), 4)
    y = groups * tile.channels_out * (box_h * (box_w | 1) | 1)
    turned = tile.values * (threads_k + 1) if threads_k > 1 else 0
    return max(x + y, turned) * (8 if dtype == "float64" else 4)
