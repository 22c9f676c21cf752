"""Plans of the tensor-core kernel, ``kernels/phase_gemm.cu``."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd, prod

from cuconvt.geometry import Geometry
from cuconvt.phases import are_alike
from cuconvt.plan import (
    DTYPE_CODES,
    MAX_GRID,
    PRECISION_CODES,
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
    refuse_phases,
    refuse_steps,
    refuse_taps,
    refuse_tensor_cores,
    round_up,
)
from cuconvt.plan_copies import others_divisible, x_copy_macros, x_is_vector
from cuconvt.plan_few_channels import FEW
from cuconvt.plan_views import with_phases_as_channels

ROW = 8  # positions along W that stay together
MANY_PHASES = 8  # beyond which data-centre Blackwell's compiler takes more registers
# The tiles to choose from: warps of a block along D, H and W, by rank (eight of them where shared memory holds a single
# block), and the other macros of the kernel.
WARPS = {
    1: ((1, 1, 4),),
    2: ((1, 2, 2), (1, 1, 4), (1, 2, 4)),
    3: ((2, 1, 2), (4, 1, 1), (1, 2, 2), (1, 1, 4), (2, 2, 2)),
}
ROWS = (8, 4, 2)
TILES_C = (1, 2, 3, 4, 6, 8)
K_STEPS = (1, 2)

REGISTERS = 65536  # of a multiprocessor
MAX_REGISTERS = 255  # of a thread
# Registers for two rows of x, split for three products, where the compiler keeps them for other taps along H; by the
# first digits of the compute capability, 17 elsewhere.
KEPT_A_PAIR = {8: 9, 9: 6}

# Rates of a multiprocessor, per clock, that the cost estimate uses; measured on an H200, similar from sm_80 on.
MMA_CLOCKS = 1.5
SHARED_BYTES_A_CLOCK = 128
L2_BYTES_A_CLOCK = 24
INSTRUCTIONS_A_COPY = 15
TYPICAL_EXTENT = {1: 4096, 2: 256, 3: 64}  # of an axis, by rank
SHORTEST = {1: 256, 2: 32, 3: 16}  # and the least that many phases leave of it
STEP_CLOCKS = 150  # a barrier and the first loads after it
THREE_PRODUCTS = 1.2  # how much longer 3xTF32 takes than the rest of the estimate says,
AS_CHANNELS = 1.05  # phases that are channels,
WIDE_VOLUMES = 1.1  # and of these channels-last volumes, at least, in boxes of more than eight positions along W
SECTOR = 32  # bytes
STORED_IN_PARTS = 1.3  # how much longer few channels take, channels-last: they fill no sector
# How much longer single rows of more than so many channels take beside Hopper's kernels, whose boxes suit few positions
# better: of 13 layers.
SINGLE_ROWS, FEW_COLUMNS = 1.2, 16
# Likewise with so many channels of x in rows of one axis, but for 3xTF32, and of two, unless that is a product of
# matrices in TF32: of 59 layers.
MANY_CHANNELS, ROWS_OF_MANY, PLANES_OF_MANY = 256, 1.5, 1.7
# Likewise in 3xTF32, where phases are no channels: in rows with several axes and so many taps or a stride, and
# channels-last, but for some channels of the result without a stride. Of 72 layers.
SPLIT, MANY_TAPS, SOME_COLUMNS = 1.5, 16, range(2, 9)


@dataclass(frozen=True)
class Tile:
    """The compile-time shape of a block; the fields are the macros of the kernel."""

    warps: tuple[int, int, int]  # along D, H, W
    rows: int
    rows_along_w: bool
    tiles_c: int
    k_steps: int
    phases_as_channels: bool = False

    @property
    def block(self) -> int:
        return 32 * prod(self.warps)

    @property
    def box(self) -> tuple[int, int, int]:
        """Positions q of a block along D, H, W."""
        d, h, w = self.warps
        return (d, h, w * ROW * self.rows) if self.rows_along_w else (d, h * self.rows, w * ROW)

    @property
    def box_c(self) -> int:
        return self.tiles_c * 8


def plan_phase_gemm(
    geometry: Geometry, dtype: str, layout: Layout, precision: str | None, device: Device, tile: Tile | None = None
) -> Plan | Refusal:
    """Propose the tile with the least estimated time, or a given one, or say why tensor cores do not serve."""
    works, reason = _works(geometry, dtype, layout, precision, device)
    if reason:
        return Refusal("phase_gemm", reason)

    def clocks(tile: Tile) -> float:
        return works[tile.phases_as_channels].clocks_a_position(tile, device)

    tile = tile or min(_tiles(works, device), key=clocks, default=None)
    if tile is None:
        return Refusal(
            "phase_gemm", f"no tile fits into {device.shared_bytes} bytes of shared memory and the registers"
        )
    tiles_d, tiles_h, tiles_w = (-(-positions(geometry, a) // tile.box[a]) for a in range(3))
    work = works[tile.phases_as_channels]
    gemm = work.geometry
    tiles_c = -(-gemm.c_out_per_group // tile.box_c)
    phases = gemm.stride[0] * gemm.stride[1]
    grid = tiles_d * tiles_h * tiles_w * phases * tiles_c * geometry.groups * geometry.n
    if grid > MAX_GRID:
        return Refusal("phase_gemm", f"{grid} blocks are more than a launch takes ({MAX_GRID})")
    shared = 4 * work.shared_words(tile)
    defines = (
        ("DTYPE", DTYPE_CODES[dtype]),
        ("PRECISION", PRECISION_CODES[precision]),
        *axis_macros(KERNEL=geometry.kernel, STRIDE=geometry.stride, DILATION=geometry.dilation, WARPS=tile.warps),
        *((("PHASES_AS_CHANNELS", 1),) if tile.phases_as_channels else ()),
        ("WARPS_C", 1),  # warps side by side along the channels gain little
        ("ROWS", tile.rows),
        ("ROWS_ALONG_W", int(tile.rows_along_w)),
        ("TILES_C", tile.tiles_c),
        ("K_STEPS", tile.k_steps),
        ("EARLY", work.early),
        ("X_CHANNELS_LAST", int(layout.x_channels_last)),
        ("OUT_CHANNELS_LAST", int(layout.out_channels_last)),
        *x_copy_macros(geometry, layout, work.itemsize).items(),
        ("INDEX64", int(needs_64_bits(geometry, layout, tile.box))),
        # A thread may have all of its registers: a tighter bound mostly gave the same code, and often spilled.
        ("MIN_BLOCKS", REGISTERS // (round_up(MAX_REGISTERS, 8) * tile.block)),
        ("SHARED_BYTES", shared),
    )
    chunks = -(-geometry.c_in_per_group // work.chunk(tile))
    beside_wgmma = refuse_tensor_cores(dtype, precision, device, wgmma=True) is None
    compared = _compared(geometry, precision, layout, tile) if beside_wgmma else 1
    packed = geometry.groups * tiles_c * gemm.kernel[0] * gemm.kernel[1] * chunks * work.piece_words(tile)
    return Plan(
        kernel="phase_gemm",
        defines=defines,
        grid=grid,
        block=tile.block,
        shared_bytes=shared,
        problem=problem_parameters(
            geometry,
            layout,
            (tiles_d, tiles_h, tiles_w, tiles_c),
            x_is_vector(geometry, layout, work.itemsize) or _pairs(geometry, layout, tile, work.itemsize),
            _out_vector(geometry, layout, work.itemsize),
        ),
        cost=compared * clocks(tile) * all_positions(geometry),
        packed_words=packed,
        packed_a_thread=work.fragment,
        tile=tile,
    )


def candidates(geometry: Geometry, dtype: str, layout: Layout, precision: str | None, device: Device) -> Iterator[Plan]:
    """Yield a plan for every tile that fits, among them the one that is proposed."""
    works, _ = _works(geometry, dtype, layout, precision, device)
    for tile in _tiles(works, device):
        plan = plan_phase_gemm(geometry, dtype, layout, precision, device, tile)
        if isinstance(plan, Plan):
            yield plan


def _works(
    geometry: Geometry, dtype: str, layout: Layout, precision: str | None, device: Device
) -> tuple[dict[bool, _Work], str | None]:
    """Return the work of each way to multiply, by whether phases are channels, or why there is none."""
    if reason := refuse_tensor_cores(dtype, precision, device) or refuse_steps(geometry):
        return {}, reason
    works = {}
    reason = refuse_taps(geometry) or refuse_phases(geometry)
    if not reason:
        works[False] = _Work(geometry, dtype, precision, layout, device.compute_capability)
    if are_alike(geometry.kernel, geometry.stride, geometry.dilation):
        gemm = with_phases_as_channels(geometry)
        if not (refuse_taps(gemm) or refuse_phases(gemm)):
            works[True] = _Work(gemm, dtype, precision, layout, device.compute_capability, geometry)
    return works, None if works else reason


def _compared(geometry: Geometry, precision: str | None, layout: Layout, tile: Tile) -> float:
    """Return how much longer a problem takes than the estimate says, beside Hopper's kernels."""
    g, compared = geometry, 1.0
    if not layout.x_channels_last:
        are_many = g.c_in_per_group >= MANY_CHANNELS
        if g.rank == 1 and are_many and precision != "tf32x3":
            compared = ROWS_OF_MANY
        elif g.rank == 1 and g.c_out_per_group > FEW_COLUMNS:
            compared = SINGLE_ROWS
        elif g.rank == 2 and are_many and (g.taps > 1 or precision != "tf32"):
            compared = PLANES_OF_MANY
    if precision == "tf32x3" and not tile.phases_as_channels and _is_slower_split(geometry, layout):
        compared *= SPLIT
    return compared


def _is_slower_split(geometry: Geometry, layout: Layout) -> bool:
    """Whether a problem of 3xTF32 takes longer than the estimate says beside Hopper's kernels, as measured."""
    has_stride = max(geometry.stride) > 1
    if layout.x_channels_last:
        return has_stride or geometry.c_out_per_group not in SOME_COLUMNS
    return geometry.rank > 1 and (has_stride or geometry.taps >= MANY_TAPS)


def _pairs(geometry: Geometry, layout: Layout, tile: Tile, itemsize: int) -> int:
    """Return 2 where rows of x may be copied two positions of 16 bits at a time, and phases are channels, or 0."""
    rows = tile.phases_as_channels and itemsize == 2 and not layout.x_channels_last
    whole = geometry.x_extent[2] % 2 == 0 and layout.x_aligned and layout.x[4] == 1
    return 2 if rows and whole and others_divisible(layout.x, 4, 2) else 0


def _out_vector(geometry: Geometry, layout: Layout, itemsize: int) -> bool:
    """Whether the result may be written four channels at a time or, in rows of 16-bit numbers, two positions."""
    if layout.out_channels_last:
        groups_aligned = geometry.groups == 1 or geometry.c_out_per_group % 4 == 0
        return layout.out_aligned and groups_aligned and layout.out[1] == 1 and others_divisible(layout.out, 1, 4)
    even_start = geometry.pad_before[2] % geometry.stride[2] % 2 == 0
    even_rows = geometry.out_extent[2] % 2 == 0 and others_divisible(layout.out, 4, 2)
    return layout.out_aligned and itemsize == 2 and layout.out[4] == 1 and even_start and even_rows


class _Work:
    """The sizes that follow from a problem's compile-time parameters and a tile; the kernel computes the same ones."""

    def __init__(
        self,
        geometry: Geometry,
        dtype: str,
        precision: str | None,
        layout: Layout,
        compute_capability: int,
        whole: Geometry | None = None,
    ):
        self.geometry = geometry
        self.whole = whole or geometry  # the problem where phases are channels of `geometry`
        self.compute_capability = compute_capability
        self.channels_last = layout.x_channels_last
        self.out_channels_last = layout.out_channels_last
        self.itemsize = 4 if dtype == "float32" else 2
        self.products = 3 if precision == "tf32x3" else 1
        self.fragment = 4 if self.products == 3 else 2
        steps = [s // gcd(s, d) for s, d in zip(geometry.stride, geometry.dilation, strict=True)]
        hops = [d // gcd(s, d) for s, d in zip(geometry.stride, geometry.dilation, strict=True)]
        self.taps_h = -(-geometry.kernel[1] // steps[1])  # of one phase, at most
        self.reach_h = (self.taps_h - 1) * hops[1]
        self.reach_w = (geometry.kernel[2] - 1) * geometry.dilation[2] // geometry.stride[2]
        first = geometry.pad_before[2] // geometry.stride[2] - self.reach_w
        self.early = 0 if self.channels_last else first % 4
        self.live = len({k * geometry.dilation[2] % geometry.stride[2] for k in range(geometry.kernel[2])})
        # Different positions of x that one tap of each phase along W reads.
        self.columns = len({k * geometry.dilation[2] // geometry.stride[2] for k in range(self.live)})
        # Taps of a phase along W that the compiler interleaves, of three products: those of one axis, less one where
        # taps along H are branches because only some phases have them.
        rounds = -(-geometry.kernel[2] // steps[2]) if self.live > 1 else 1
        if geometry.kernel[1] % steps[1]:
            self.interleaved = max(self.taps_h, rounds) - 1
        else:
            self.interleaved = self.taps_h if self.taps_h > 1 else rounds

    def stores_in_parts(self, tile: Tile) -> bool:
        """Whether channels of a channels-last result, and phases along W where these are channels, fill no sector."""
        c_out = self.whole.c_out_per_group
        return c_out * self.whole.stride[2] * self.itemsize < SECTOR if tile.phases_as_channels else c_out <= FEW

    def typical_extent(self, axis: int) -> float:
        """Return how many positions q an axis of a typical problem has: fewer, where these have many phases."""
        typical = TYPICAL_EXTENT[self.whole.rank]
        if self.whole is self.geometry:
            return typical
        return max(typical / self.whole.stride[axis], SHORTEST[self.whole.rank])

    def chunk(self, tile: Tile) -> int:
        """Input channels of a step."""
        return 8 * tile.k_steps * (4 // self.itemsize)

    def piece_words(self, tile: Tile) -> int:
        """Packed weights of one tap along D and one along H."""
        return tile.k_steps * self.geometry.kernel[2] * (tile.box_c // 8) * 32 * self.fragment

    def x_words(self, tile: Tile) -> int:
        d, h, w = tile.box
        width = w + self.reach_w if self.channels_last else round_up(w + self.reach_w + self.early, 4)
        count = d * (h + self.reach_h) * width
        words = 8 * tile.k_steps
        return count * (words + 4) if self.channels_last else words * at_residue(count, 8, 32)

    def shared_words(self, tile: Tile) -> int:
        """Return the kernel's shared memory; it asserts the same number (SHARED) when it is compiled."""
        stage = self.x_words(tile) + self.taps_h * self.piece_words(tile)
        stride_w = self.geometry.stride[2]
        if self.out_channels_last:
            piece = prod(tile.warps) * ROW * stride_w * at_residue(tile.box_c, 8, 16)
        else:
            piece = 8 * at_residue(prod(tile.box) * stride_w, 4 if stride_w == 1 else 8, 16)
        return 2 * max(stage, piece)

    def registers(self, tile: Tile) -> int:
        """Estimate what the compiler takes for a thread: accumulators, operands, and the rest. Beyond 255 it spills."""
        accumulators = 2 * tile.rows * tile.tiles_c * self.live
        if self.products == 3:
            operands = 4 * tile.tiles_c * (max(self.taps_h, self.interleaved) + 1) + 7 * self.live * self.columns
            if self.interleaved > 1:
                operands += KEPT_A_PAIR.get(self.compute_capability // 10, 17) * (tile.rows // 2 + self.reach_h)
            return 2 * accumulators + operands + 65  # three products are summed up in registers of their own
        operands = (2 * tile.rows + 4 * self.reach_h) * self.columns + 3 * tile.tiles_c
        ahead = tile.k_steps if self.itemsize == 2 else 1  # steps that are unrolled and loaded together
        more = 0
        if self.compute_capability // 10 == 10 and ahead > 1:
            # This compiler keeps more of what channels-last results need, and many phases.
            more = 16 * self.out_channels_last + 24 * (self.geometry.stride[2] > MANY_PHASES)
        return accumulators + operands * ahead + 64 + more

    def blocks(self, tile: Tile, device: Device) -> int:
        """Blocks that a multiprocessor holds; each reserves 1 KB of shared memory on top of its own."""
        by_registers = REGISTERS // (round_up(self.registers(tile), 8) * tile.block)
        by_shared = (device.shared_bytes + 1024) // (4 * self.shared_words(tile) + 1024)
        return max(1, min(by_registers, by_shared, 1536 // tile.block))

    def clocks_a_position(self, tile: Tile, device: Device) -> float:
        """Estimate the clocks of a multiprocessor for one position q, all its phases and the channels of a group."""
        g = self.geometry
        warps = tile.block // 32
        taps_h = g.kernel[1] / g.stride[1]  # of a phase, on average
        deep = tile.k_steps * g.kernel[2]
        mma = warps * deep * taps_h * tile.tiles_c * tile.rows / 2 * self.products * MMA_CLOCKS
        loads = warps * deep * (2 * tile.rows + 4 * self.reach_h + taps_h * tile.tiles_c * self.fragment)
        loads *= 128 / SHARED_BYTES_A_CLOCK
        staged = self.x_words(tile) + taps_h * self.piece_words(tile)
        l2 = 4 * staged / L2_BYTES_A_CLOCK
        issue = staged / 4 * INSTRUCTIONS_A_COPY / 128
        busiest = max(mma, loads, l2)
        blocks = self.blocks(tile, device)
        idle = STEP_CLOCKS / blocks * (8 / max(8, blocks * warps))
        step = busiest + 0.25 * (mma + loads + l2 - busiest) + issue + idle
        step *= 1 + 0.5 / blocks**2  # a block alone has nobody to work while it waits
        if blocks * warps < 8:
            step *= 8 / (blocks * warps)
        chunks = -(-g.c_in_per_group // self.chunk(tile))
        stores = 2 * prod(tile.box) * g.stride[2] * tile.box_c * self.itemsize / L2_BYTES_A_CLOCK
        if not self.out_channels_last:
            row_bytes = tile.box[2] * self.whole.stride[2] * self.itemsize
            stores *= 1 + 48 / row_bytes  # short rows end in parts of sectors
        phases = g.stride[0] * g.stride[1]
        steps = chunks * g.kernel[0] * g.stride[1]  # over all phases along D and H
        tiles_c = -(-g.c_out_per_group // tile.box_c)
        # The last box of an axis is half empty on average; for extents, which may not choose, stands a typical one.
        empty = prod(
            1 + box / (2 * self.typical_extent(axis)) for axis, box in enumerate(tile.box) if axis >= 3 - g.rank
        )
        slower = THREE_PRODUCTS if self.products == 3 else 1
        if tile.phases_as_channels:
            slower *= AS_CHANNELS
            slower *= WIDE_VOLUMES if self.channels_last and g.rank == 3 and tile.warps[2] > 1 else 1
        if self.out_channels_last and self.stores_in_parts(tile):
            slower *= STORED_IN_PARTS
        return slower * tiles_c * empty * (steps * step + phases * stores) / prod(tile.box)


def _tiles(works: dict[bool, _Work], device: Device) -> Iterator[Tile]:
    """Yield the tiles that fit. They depend on neither N nor extents, which therefore never recompile."""
    for as_channels, work in works.items():
        g = work.geometry
        for warps, rows, tiles_c, k_steps in itertools.product(WARPS[g.rank], ROWS, TILES_C, K_STEPS):
            tile = Tile(warps, rows, g.rank == 1, tiles_c, k_steps, as_channels)
            if tiles_c > 1 and tile.box_c >= g.c_out_per_group + 8:
                continue
            if k_steps > 1 and work.chunk(tile) >= 2 * g.c_in_per_group:
                continue
            if work.registers(tile) <= MAX_REGISTERS and 4 * work.shared_words(tile) <= device.shared_bytes:
                yield tile
