"""The problem as ``kernels/phase_wgmma.cu`` takes it, and the estimate of what a box does."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from math import gcd, prod
from types import MappingProxyType
from typing import NamedTuple

from cuconvt.geometry import Geometry
from cuconvt.plan import Ints, Layout
from cuconvt.plan_copies import others_divisible, x_is_vector
from cuconvt.plan_wgmma_boxes import SECTOR, WorkOnPlanes
from cuconvt.plan_wgmma_sizes import Box, Shape, Tile, can_be_boxed
from cuconvt.tensor_map import MAX_STEP

STEP_BYTES = 32  # of a position's channels, that a wgmma multiplies
# Rates of an H200's multiprocessor, per clock, that the cost estimate uses.
SHARED_BYTES_A_CLOCK = 128
L2_BYTES_A_CLOCK = 70
MEMORY_BYTES_A_CLOCK = 18
INSTRUCTIONS_A_CLOCK = 1.2
OVERLAP = 0.4  # what of the less busy units' time adds to the busiest one's
BOX_CLOCKS, CHUNK_CLOCKS = 200, 850  # in which a block waits: for a box, and for a chunk of channels
SLICE_CLOCKS, SLICE_CHUNK_CLOCKS = 1000, 250  # likewise, where a block slides; the latter for each 64 rows of a worker
COPIED_CHUNK_CLOCKS, COPIED_SLICE_CHUNK_CLOCKS = 550, 780  # instead, where x is channels-last and comes by copies
COPY_INSTRUCTIONS = 50  # that 16 bytes of such an x take
SLIDES_OF_SPLIT = 0.9  # times such a block's clocks in 3xTF32, without a stride, beside those of others
RUN_CLOCKS = 1500  # for a box whose result is stored straight from the registers, by a block that is alone
BATCH_CLOCKS = 1100  # in which a thread of the stagers loads a batch of rows and stores it, however many have one
DEEP = 0.85  # of the waits for chunks are left where four of them are staged ahead
DEEP_OF_ROWS = 0.35  # likewise, of rows that are not split: then a chunk has a third of the products to hide them
SLOT_CLOCKS = 700  # that a slot of weights takes at least: of three in turn, that far ahead of their use
ATOM = 64  # bytes that it writes best: blocks that share these took up to twice as long, where writing bounds them
COMPARED = 0.93  # the other kernels' estimates are as much more optimistic
COMPARED_OF_ROWS = 0.78  # where x is float32 in rows
COMPARED_OF_TF32_LAST = 0.85  # where x is channels-last
COMPARED_OF_16_BITS = 0.65
COMPARED_OF_BOXED = 0.5  # where bulk tensor copies bring x
COMPARED_OF_SPLIT, COMPARED_OF_SPLIT_GROUPS = 1.05, 0.75  # likewise, for 3xTF32
COMPARED_OF_UNSTRIDED = 0.95  # instead, without a stride and with as many channels as plan_correlate_wgmma serves
SPLIT_SLIDES_COMPARED = 0.4  # beside that kernel, of blocks that slide in 3xTF32: in five layers they were faster
SPLIT_DILATED_COMPARED = 0.55  # likewise, of dilated taps: in 13 layers
# Of residues modulo the dilation, beside boxes with a halo of whole dilations: of rows, where none is as large as `FAR`
# and where one is, and of what copies bring. Fitted to 24 layers, in three precisions.
RESIDUES_OF_ROWS, RESIDUES_OF_FAR_ROWS, FAR, RESIDUES_OF_BOXED = 1.07, 0.9, 8, 1.3
FEWEST_TURNED = 40  # channels of a result that it serves: with fewer, this kernel took 0.4 to 0.8 times as long
ROW_ENDS = 16  # outputs more than a row has take as long to write


class BoxedRates(NamedTuple):
    """What the estimate counts where bulk tensor copies bring x: fitted to 1281 tiles' times (13% rms)."""

    product: float = 11.0  # clocks of a wgmma, and of each of its columns
    column: float = 0.394
    copied: float = 21.3  # bytes of x a clock, and of weights
    weights: float = 156
    memory: float = 16.7  # bytes a clock
    stage: float = 1650  # clocks from asking for a stage to having it, of which all but one are under way
    slot: float = 1220  # the same of a slot of weights
    box: float = 970  # clocks of a box, or of a slice that is stored
    outputs: float = 1.34  # clocks of 32 results
    norm: float = 2.7
    # What writing takes longer where other blocks write the rest of 64 bytes, by the bytes of a number: of 12 problems.
    parts_of_atoms: Mapping[int, float] = MappingProxyType({4: 1.6, 2: 1.15})
    # Of 3xTF32: clocks of a chain besides its products, and bytes of x that a thread splits in a clock: of 1345 tiles'
    # times (14% rms).
    chain: float = 40
    split: float = 0.18
    positions: tuple[int, int] = (200, 400)  # for each multiprocessor, of a layer of many channels and of another one


BOXED = BoxedRates()
# By rank: extents that problems may have, along D, H, W. The leading axes of 1-D and 2-D hold a batch.
TYPICAL_EXTENTS: dict[int, tuple[Ints, ...]] = {
    1: ((64, 1, 256), (64, 1, 4100)),
    2: ((64, 16, 16), (64, 65, 65), (64, 128, 128)),
    3: ((33, 33, 33), (48, 48, 48), (66, 66, 66), (18, 36, 70)),
}
POSITIONS = 2000  # that a problem may have for each multiprocessor
POSITIONS_OF_WIDE_ROWS = 800  # likewise, with many channels, where x is in rows
TYPICAL_EXTENTS_OF_WIDE = {**TYPICAL_EXTENTS, 3: ((8, 8, 8), *TYPICAL_EXTENTS[3][:3])}
# Where x is in rows: mostly of networks that pad, whose extents boxes of 33 positions do not suit.
EXTENTS_OF_ROWS = {**TYPICAL_EXTENTS, 3: ((20, 40, 40), (40, 40, 40), (112, 112, 112))}
EXTENTS_OF_WIDE_ROWS = {**TYPICAL_EXTENTS, 3: ((8, 8, 8), (32, 32, 32), (64, 64, 64))}
# Where copies bring x: of some sets, the one whose tiles were nearest to the best that were measured.
EXTENTS_OF_WIDE_BOXED: dict[int, tuple[Ints, ...]] = {
    1: TYPICAL_EXTENTS[1],
    2: ((64, 8, 8), (64, 33, 33), (8, 65, 65), (64, 65, 65)),
    3: ((8, 8, 8), (16, 16, 16), (33, 33, 33)),
}


class Planes(NamedTuple):
    """Which planes of a result along D taps reach: the first one and each one `step` further."""

    extent: int  # of all
    first: int
    step: int


def reached_planes(geometry: Geometry, layout: Layout, residues: Ints = (0, 0, 0)) -> tuple[Geometry, Layout, Planes]:
    """Leave out the planes along D that no tap reaches, for kernels that fill them by themselves.

    An output o has a tap k where o + pad = i * stride + k * dilation for some i, a multiple of their common divisor. Of
    these outputs alone, stride and dilation are as many times smaller. Results in rows, whose planes have no gaps. Of
    residues, all have taps.
    """
    g, all_of_them = geometry, Planes(geometry.out_extent[0], 0, 1)
    step = g.stride[0] if g.kernel[0] == 1 else gcd(g.stride[0], g.dilation[0])
    pad = -(-g.pad_before[0] // step)
    first = step * pad - g.pad_before[0]
    extent = -(-(g.out_extent[0] - first) // step)
    dense = layout.out[4] == 1 and layout.out[3] == g.out_extent[2]
    if residues[0] or step == 1 or extent < 1 or not dense or layout.out_channels_last:
        return geometry, layout, all_of_them
    reached = dataclasses.replace(
        g,
        stride=(g.stride[0] // step, *g.stride[1:]),
        dilation=(1 if g.kernel[0] == 1 else g.dilation[0] // step, *g.dilation[1:]),
        pad_before=(pad, *g.pad_before[1:]),
        out_extent=(extent, *g.out_extent[1:]),
    )
    out = (*layout.out[:2], step * layout.out[2], *layout.out[3:])
    return reached, dataclasses.replace(layout, out=out), Planes(g.out_extent[0], first, step)


def _run(geometry: Geometry, layout: Layout, itemsize: int) -> int:
    """Return how many outputs along W of a position, which follow each other, may be written at a time.

    Contiguous results whose extents differ by whole strides agree in it. Where others lie between them, fewer than 16
    bytes at a time took up to five times as long as results that are turned (but for strides of 8 bytes).
    """
    stride = geometry.stride[2]
    run = gcd(stride, 16 // itemsize) if layout.out_aligned and layout.out[4] == 1 else 1
    while geometry.out_extent[2] % run or not others_divisible(layout.out, 4, run):
        run //= 2
    return run if run == stride or run * itemsize == 16 or stride * itemsize <= 8 else 1


class Work(WorkOnPlanes):
    """The sizes of a transposed convolution, and what its boxes take."""

    extents, extents_of_wide = TYPICAL_EXTENTS, TYPICAL_EXTENTS_OF_WIDE
    extents_of_rows, extents_of_wide_rows = EXTENTS_OF_ROWS, EXTENTS_OF_WIDE_ROWS
    extents_of_wide_boxed = EXTENTS_OF_WIDE_BOXED

    def __init__(
        self, geometry: Geometry, dtype: str, precision: str | None, layout: Layout, residues: Ints = (0, 0, 0)
    ):
        itemsize = 4 if dtype == "float32" else 2
        run = 1 if layout.out_channels_last else _run(geometry, layout, itemsize)
        g, layout, planes = reached_planes(geometry, layout, residues)
        self.shape = Shape.of(
            g,
            dtype,
            precision,
            x_channels_last=layout.x_channels_last,
            out_channels_last=layout.out_channels_last,
            pairs=dtype != "float32" and not layout.x_channels_last and x_is_vector(g, layout, 2),
            late=tuple(int(p % st != 0) for p, st in zip(g.pad_before, g.stride, strict=True)),
            run=run,
            plane_step=planes.step,
            boxes=can_be_boxed(g, layout, itemsize, STEP_BYTES // itemsize)
            and all(st <= MAX_STEP for each, st in zip(residues, g.stride, strict=True) if each),
            residues=residues,
            whole_chunks=g.groups > 1,
        )
        self._derive()

    def _derive(self) -> None:
        super()._derive()
        s = self.shape
        self.compared = COMPARED
        if s.itemsize == 2:
            self.compared = COMPARED_OF_16_BITS
        elif not s.x_channels_last:
            self.compared = COMPARED_OF_ROWS
        elif s.products == 1:
            self.compared = COMPARED_OF_TF32_LAST
        self.is_turned = max(self.sharing) == 1 and s.c_out >= FEWEST_TURNED
        if s.boxes:
            self.compared = COMPARED_OF_UNSTRIDED if self.is_turned else COMPARED_OF_BOXED
            if s.products == 3:
                self.compared = COMPARED_OF_SPLIT_GROUPS if s.whole_chunks else COMPARED_OF_SPLIT

    def compared_of(self, tile: Tile) -> float:
        """Return what a tile's cost is multiplied with beside.

        So that it compares with ``correlate_wgmma``'s, and that of residues with boxes that have a halo of dilations.
        """
        s = self.shape
        if s.boxes and s.products == 3:
            if not self.is_turned:
                return 1.0
            return SPLIT_SLIDES_COMPARED if tile.slides else SPLIT_DILATED_COMPARED if max(s.dilation) > 1 else 1.0
        if not any(s.residues):
            return 1.0
        if s.boxes:
            return RESIDUES_OF_BOXED
        return RESIDUES_OF_FAR_ROWS if max(self.steps_in_x) >= FAR else RESIDUES_OF_ROWS

    def with_pairs(self) -> Work:
        """Return the same with rows read in pairs, as most can be: it depends on extents, which a choice must not."""
        pairs = self.shape.itemsize == 2 and not self.shape.x_channels_last
        return Work.of(dataclasses.replace(self.shape, pairs=pairs))

    def cost(self, tile: Tile, box: Box) -> float:
        """Return the clocks of a box of positions, with all phases and all channels of a group."""
        s = self.shape
        phases = 1 if tile.all_phases else s.stride[0] * s.stride[1]
        boxes = phases * -(-s.c_out // (8 * tile.tiles_c))
        # In the last of so many rounds of boxes, half of the multiprocessors have nothing to do.
        positions = POSITIONS_OF_WIDE_ROWS if self.wide and not s.x_channels_last else POSITIONS
        if tile.boxed:
            positions = BOXED.positions[0 if self.wide else 1]
        rounds = positions * boxes / (tile.rows * tile.min_blocks * tile.workers // tile.team)
        return self.clocks(tile, box) * boxes * (1 + 0.5 / rounds)

    def rounds(self, tile: Tile, box: Box) -> int:
        """Return how often stagers wait for a batch of loads of rows, to stage all channels of a box or slice once."""
        chunk, stagers = self.chunk(tile), 128 * tile.stagers - 32
        units = box.items * chunk // 8  # of eight loads
        whole, rest = divmod(self.shape.c_in, chunk)
        batch = 4 - (2 if tile.slides else tile.k_steps)  # of a chunk that is whole
        return whole * -(-units // (batch * stagers)) + (-(-units // stagers) if rest else 0)

    def clocks(self, tile: Tile, box: Box) -> float:
        """Estimate a multiprocessor's clocks for one box, averaged over the phases along D and H."""
        if tile.boxed:
            return self.clocks_of_boxed(tile, box)
        s = self.shape
        chunks = -(-s.c_in // self.chunk(tile)) * self.depth(tile, box)
        rows, columns = self.rows(tile), self.columns(tile)
        products = chunks * rows * tile.tiles_m * tile.team * self.taps_w(tile) * tile.k_steps * s.products
        staged = chunks * box.plane * self.pieces(tile) * 16  # bytes of x, as it comes
        weights = 0 if tile.resident else chunks * rows * self.slot_bytes(tile)
        outputs = prod(box.extent) * self.outputs(tile) * min(8 * tile.tiles_c, s.c_out)
        # A warp loads a channel of 32 positions, or of 64 where 16 bits are read in pairs, whatever lines they are in.
        width = box.extent[2] + self.reach(tile)[2]
        loads = staged / s.itemsize / 32 * (0.5 + 0.5 * s.itemsize / 4 if s.pairs else 1)
        if s.x_channels_last:
            loads = staged / 128
        stores = outputs / 32 * (1 + 32 / (box.extent[2] * s.stride[2]))
        if s.out_channels_last:
            stores = outputs / 32 * s.itemsize / 8
        elif self.stores_runs(tile):  # of four channels at a time
            stores = outputs / 32 / s.run * 4
        stored, turned = box.extent[0] if tile.slides else 1, 0.0
        if self.turns(tile):
            turned = stored * tile.rows * self.sums(tile) * 8 * tile.tiles_c / 32
            turned += outputs / 32 * (max(1, s.kernel[2] / s.stride[2]) if tile.merge_w else 1)
        # A wgmma reads A and B from shared memory, which also serves every other access of the block.
        shared = products * (16 + columns / 4) + (staged * self.parts + weights) / SHARED_BYTES_A_CLOCK
        shared += loads + stores + turned
        tensor = products * columns / 2
        # Of rows, whole sectors are read.
        l2 = (staged * (1 if s.x_channels_last else 1 + SECTOR / s.itemsize / width) + weights) / L2_BYTES_A_CLOCK
        # A row starts and ends within sectors, which others write, too.
        if s.out_channels_last:
            ragged = max(1, SECTOR / (s.itemsize * min(8 * tile.tiles_c, s.c_out)))
        else:
            ragged = 1 + ROW_ENDS / (box.extent[2] * s.stride[2])
        memory = outputs * s.plane_step * s.itemsize * ragged / MEMORY_BYTES_A_CLOCK
        staging = staged / 16 * COPY_INSTRUCTIONS if s.x_channels_last else staged / s.itemsize * 5
        issue = (staging + outputs * 8) / 32 / INSTRUCTIONS_A_CLOCK
        batches = 0.0
        if not s.x_channels_last:
            batches = self.depth(tile, box) * self.rounds(tile, box) * BATCH_CLOCKS / tile.min_blocks
        busiest = max(shared, tensor, l2, memory, issue, batches)
        others = shared + tensor + l2 + memory + issue + batches - busiest
        a_box, a_chunk = BOX_CLOCKS, CHUNK_CLOCKS
        if tile.slides:  # stagers wait for a slice's positions, however many of them a thread has
            a_box, a_chunk = SLICE_CLOCKS, SLICE_CHUNK_CLOCKS * tile.tiles_m
        if s.x_channels_last:
            a_chunk = COPIED_SLICE_CHUNK_CLOCKS if tile.slides else COPIED_CHUNK_CLOCKS
        if self.stores_runs(tile) and tile.min_blocks == 1 and not tile.slides:
            a_box = RUN_CLOCKS
        if tile.merge_w and tile.k_steps == 1 and s.products == 1 and not tile.slides:  # wide rows of short chunks
            a_chunk *= 2
        if tile.slides and tile.min_blocks > 1:  # one block stores while another multiplies
            a_box //= 2
        deep = DEEP if s.x_channels_last or s.products == 3 else DEEP_OF_ROWS
        waits = chunks * a_chunk * (1 if tile.x_stages == 2 else deep) + stored * a_box
        clocks = busiest + OVERLAP * others + waits / (tile.min_blocks * tile.workers // tile.team)
        slots = 0 if tile.resident or s.x_channels_last else chunks * rows
        clocks = max(clocks, slots * SLOT_CLOCKS / tile.min_blocks)
        return clocks * (SLIDES_OF_SPLIT if tile.slides and s.products == 3 and not tile.all_phases else 1)

    def clocks_of_boxed(self, tile: Tile, box: Box) -> float:
        """Estimate the same where copies bring x. What bounds a box adds to each other as in a norm."""
        s, r, at_once = self.shape, BOXED, tile.min_blocks * tile.workers // tile.team
        chunks = -(-s.c_in // self.chunk(tile)) * self.depth(tile, box)
        rows, tiles_c = self.rows(tile), -(-s.c_out // (8 * tile.tiles_c))
        slots = chunks * rows * tile.tiles_m * tile.team  # of each worker's tile
        products = slots * self.taps_w(tile) * tile.k_steps * s.products
        multiplied = products * (r.product + r.column * self.columns(tile))
        staged = chunks * box.plane * self.pieces(tile) * 16  # bytes of x, as it comes
        split = 0.0  # clocks of a block's threads
        if self.parts == 2:
            multiplied += slots * self.sets_w(tile) * r.chain
            split = staged / (r.split * (128 * tile.stagers - 64))
        positions = prod(box.extent)
        outputs = positions * self.outputs(tile) * min(8 * tile.tiles_c, s.c_out)
        is_part = 8 * tile.tiles_c * s.itemsize < ATOM <= s.c_out * s.itemsize
        phases = 1 if tile.all_phases else prod(self.sharing[:2])
        read = positions * s.c_in / tiles_c / phases
        weights = 0 if tile.resident else chunks * rows * self.slot_bytes(tile)
        bounds = (
            multiplied,
            staged / r.copied + weights / r.weights,
            split / tile.min_blocks,
            (read + outputs * s.plane_step * (r.parts_of_atoms[s.itemsize] if is_part else 1)) * s.itemsize / r.memory,
            (chunks * r.stage + split) / (tile.x_stages - 1) / at_once,
            0 if tile.resident else chunks * rows * r.slot / (tile.ring - 1) / tile.min_blocks,
        )
        norm: float = sum(bound**r.norm for bound in bounds) ** (1 / r.norm)
        stored = box.extent[0] if tile.slides else 1
        return norm + (r.outputs * outputs / 32 + r.box * stored) / at_once
