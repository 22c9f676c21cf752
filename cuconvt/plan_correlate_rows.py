"""Plans of the kernel for correlations of rows on Hopper's tensor cores, ``kernels/correlate_rows.cu``.

Sizes and what of the estimate is the same are those of `cuconvt.plan_correlate_wgmma_work`, whose sums these are, too.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd, prod

from cuconvt import plan_correlate_wgmma_work as correlate_wgmma
from cuconvt import plan_wgmma_sizes as wgmma
from cuconvt.geometry import Geometry
from cuconvt.plan import Device, Ints, Layout, Plan, Refusal, at_residue, magic, problem_parameters, round_up
from cuconvt.plan_copies import others_divisible
from cuconvt.plan_correlate import reads_need_64_bits
from cuconvt.plan_correlate_wgmma import MAX_SLOT_BYTES, OTHERS, as_read, refuse
from cuconvt.plan_correlate_wgmma_work import FEW_POSITIONS
from cuconvt.plan_phase_wgmma_work import POSITIONS, SHARED_BYTES_A_CLOCK
from cuconvt.plan_search import of_tile, remembered
from cuconvt.plan_wgmma_boxes import SECTOR, WIDE, best_tile
from cuconvt.plan_wgmma_launch import grid_of, wgmma_defines
from cuconvt.plan_wgmma_sizes import BESIDE_SUMS, MAX_BLOCKS, MAX_COLUMNS, RESIDENT_BYTES, Box, Tile

# Registers of a worker's and of a stager's thread, by warpgroups of either and blocks a multiprocessor.
REGISTERS = {
    (1, 1, 2): ((152, 104), (200, 56)),
    (2, 1, 1): ((208, 88),),
}
MAX_UNIT = 8  # words between positions
MAX_SPAN = 64  # words from a position's first tap to its last
MAX_WORDS = 12  # of a position and channel, that a thread holds at a time
MAX_UNROLLED = 100  # wgmmas of a row of taps
MAX_STAGED = 2**16 - 1  # words of a channel
# Rates of an H200's multiprocessor, per clock, and more of the estimate, as far as it is another than that of
# plan_correlate_wgmma_work: fitted to 500 tiles' times for 20 problems.
L2_BYTES_A_CLOCK = 390
MEMORY_BYTES_A_CLOCK = 25
INSTRUCTIONS_A_CLOCK = 3.6
OVERLAP = 0.46  # what of the less busy units' time adds to the busiest one's
BOX_CLOCKS, CHUNK_CLOCKS = 1000, 670  # in which a block waits: for a box, and for a chunk of channels
TWO_BLOCKS = 0.94  # of the estimate, of 16-bit tiles of two blocks with four stages each: so they were in four layers
STEP_CLOCKS = 39  # in which a worker waits: for words of a group of channels
# By bytes of an element and products: the other kernels' estimates are as much more optimistic.
COMPARED = {(4, 3): 0.86, (4, 1): 0.84, (2, 1): 1.1}
SLOWER = {16: 1.0, 4: 1.25, 2: 6.0}  # by bytes of a row at a time: how much longer it takes for the same estimate
OF_LAST = 1.4  # likewise, where the result is channels-last, beside one channel of y
OF_TF32 = {1: 1.1, 2: 1.0, 3: 0.9}  # likewise, by the number of axes
OF_DISJOINT = 1.3  # likewise, of 16 bits where taps do not overlap: of 73 layers
# Instructions of a thread that copies 16 bytes, 4, or loads two halves of a word.
COPY_INSTRUCTIONS = {16: 8, 4: 8, 2: 14}


@dataclass(frozen=True)
class Shape(wgmma.Shape):
    """What a tile's choice depends on: everything but N and extents."""

    pad_w: int = 0  # modulo what positions have to be aligned to
    copied: int = 16  # bytes of a row at a time, if it can be aligned at all


def plan_correlate_rows(
    geometry: Geometry, dtype: str, layout: Layout, precision: str | None, device: Device, tile: Tile | None = None
) -> Plan | Refusal:
    """Propose the tile with the least estimated time, or a given one, or say why the kernel does not serve."""
    if reason := _refuse(geometry, dtype, layout, precision, device):
        return Refusal("correlate_rows", reason)
    work = Work(*as_read(geometry, layout), dtype, precision)
    if tile is not None:
        cost = work.typical_cost(tile, device)
        return plan_tile(geometry, dtype, layout, precision, device, tile, cost or 0.0)
    choice = choose_tile(work.shape, device)
    if choice is None:
        reason = f"no box with its halo fits into {device.shared_bytes} bytes of shared memory"
        return Refusal("correlate_rows", reason)
    tile, cost = choice
    return plan_tile(geometry, dtype, layout, precision, device, tile, cost)


def plan_tile(
    geometry: Geometry, dtype: str, layout: Layout, precision: str | None, device: Device, tile: Tile, cost: float = 0.0
) -> Plan | Refusal:
    """Plan a problem with a given tile."""
    g, read = as_read(geometry, layout)
    work = Work(g, read, dtype, precision)
    tiles_c = -(-g.c_out_per_group // (8 * tile.tiles_c))
    times = tiles_c * g.groups * g.n
    box = work.box_of_launch(tile, g.out_extent, times, device, g.out_extent[2])
    if box is None:
        return Refusal("correlate_rows", "the box of this tile does not fit into shared memory")
    tiles = tuple(-(-i // b) for i, b in zip(g.out_extent, box.extent, strict=True))
    blocks = prod(tiles) * times
    if blocks > MAX_BLOCKS:
        return Refusal("correlate_rows", f"counts boxes in 31 bits, got {blocks}")
    registers = work.registers(tile)
    if registers is None:
        return Refusal("correlate_rows", "the sums of this tile do not fit into registers")
    index64 = reads_need_64_bits(geometry, layout, box.extent)
    own = {"PAD_W": g.pad_before[2] % g.stride[2], "INDEX64": index64}
    copied = work.bytes_copied(g, read)
    return Plan(
        kernel="correlate_rows",
        defines=wgmma_defines(g, dtype, read, precision, tile, own, registers),
        grid=grid_of(blocks, device.multiprocessors * tile.min_blocks, 1, g.groups * tiles_c if tile.resident else 1),
        block=tile.threads,
        shared_bytes=work.shared_bytes(tile, box, index64),
        problem=problem_parameters(
            g,
            read,
            (*tiles, tiles_c),
            copied,
            box=work.parameters(tile, box, blocks, copied),
            together=work.stored_together(tile, box, g.out_extent[2], read),
        ),
        cost=work.compared_cost(cost) * prod(g.out_extent) * g.groups * g.n,
        packed_words=g.groups * tiles_c * work.slots(tile) * work.slot_bytes(tile) // 4,
        packed_a_thread=8 * work.parts,
        tile=tile,
    )


def _refuse(geometry: Geometry, dtype: str, layout: Layout, precision: str | None, device: Device) -> str | None:
    if reason := refuse(geometry, dtype, precision, device):
        return reason
    if layout.out_channels_last:
        return "reads rows, got channels that follow each other"
    if geometry.stride[2] % (1 if dtype == "float32" else 2):
        return f"reads 16-bit numbers in pairs, got stride {geometry.stride[2]} along W"
    work = Work(*as_read(geometry, layout), dtype, precision)
    if reason := work.too_many_classes():
        return reason
    if work.unit > MAX_UNIT:
        return f"stages rows whose positions are at most {MAX_UNIT} words apart, got {work.unit}"
    if (span := (work.halo[2] + 1) * work.unit) > MAX_SPAN:
        return f"reads at most {MAX_SPAN} words from the first to the last tap along W, got {span}"
    if work.words > MAX_WORDS:
        return f"holds at most {MAX_WORDS} words of a position, got {work.words}"
    return None


class Work(correlate_wgmma.Work):
    """The sizes that follow from a problem and a tile; the kernel computes the same ones."""

    def __init__(self, geometry: Geometry, layout: Layout, dtype: str, precision: str | None):
        g, itemsize = geometry, 4 if dtype == "float32" else 2
        # Contiguous rows whose extents differ by whole strides agree in whether words are whole.
        left = g.x_extent[2] % g.stride[2] * itemsize
        self.shape: Shape = Shape.of(
            g,
            dtype,
            precision,
            x_channels_last=False,
            out_channels_last=layout.out_channels_last,
            pairs=False,
            late=(0, 0, 0),
            pad_w=g.pad_before[2] % (4 * g.stride[2]),
            copied=16 if left == 0 else 4 if left % 4 == 0 else 2,
        )
        self._derive()

    def _derive(self) -> None:
        super()._derive()
        s = self.shape
        assert isinstance(s, Shape)
        stride, per_word = s.stride[2], 4 // s.itemsize
        self.piece = 16 // s.itemsize  # channels of a group
        self.unit = stride // per_word  # words from a position to the next one
        self.aligned = 4 // gcd(self.unit, 4)  # positions of which each so many begin with 16 aligned bytes
        before = s.pad_w % stride > 0
        self.first_unit = -(s.pad_w // stride) - before  # of the first position
        elements = [tap * s.dilation[2] + before * stride - s.pad_w % stride for tap in range(s.kernel[2])]
        at_once = gcd(self.unit, 4)  # words of a load
        self.loads = len({element // per_word // at_once for element in elements})  # of a thread, channel and position
        self.words = self.loads * at_once
        self.pairs = -(-s.kernel[2] // 2)
        self.live = [*self.live[:2], 1]
        self.halo = (*self.halo[:2], elements[-1] // stride)

    def compared_cost(self, clocks: float) -> float:
        """Return what is compared with other kernels' estimates, for the clocks of a position."""
        s = self.shape
        assert isinstance(s, Shape)
        compared = COMPARED[s.itemsize, s.products] * SLOWER[s.copied] * OTHERS
        if s.out_channels_last:
            compared *= OF_LAST
        if (s.itemsize, s.products) == (4, 1):
            compared *= OF_TF32[s.rank]
        if s.itemsize == 2 and s.kernel == s.stride:
            compared *= OF_DISJOINT
        return compared * clocks

    def stores_alone(self, tile: Tile) -> bool:
        return False

    def width(self, tile: Tile, positions: int) -> int:
        most_lead = self.aligned - 1 if positions % self.aligned else self.first_unit % self.aligned
        return round_up(positions + self.halo[2] + most_lead, self.aligned)

    def sums(self, tile: Tile) -> int:
        return 1

    def channels(self, tile: Tile) -> int:
        return tile.k_steps * self.piece

    @of_tile
    def slot_bytes(self, tile: Tile) -> int:
        return tile.k_steps * self.pairs * self.parts * 2 * self.columns(tile) * 16

    @of_tile
    def slots(self, tile: Tile) -> int:
        return self.shape.kernel[0] * self.shape.kernel[1] * -(-self.shape.c_in // self.channels(tile))

    @of_tile
    def stages(self, tile: Tile) -> int:
        return self.live[0] * self.live[1] * -(-self.shape.c_in // self.channels(tile))

    def stage_bytes(self, tile: Tile, box: Box) -> int:
        return self.channels(tile) * box.plane * 4

    def shared_bytes(self, tile: Tile, box: Box, index64: bool) -> int:
        theirs = self.parts * tile.k_steps * 2 * box.plane * 16  # of a stage, in planes of pieces
        return super().shared_bytes(tile, box, index64) + tile.x_stages * (self.stage_bytes(tile, box) - theirs)

    def other_registers(self, tile: Tile) -> int:
        three = self.shape.products == 3
        held = 2 * self.words * (4 // self.shape.itemsize)  # words as they were loaded
        count = 44 + held + 2 * 4 * self.pairs * self.parts
        if self.shape.out_channels_last:
            count += 7 + 6 * tile.tiles_m
        return count + (8 if three else 0)

    @of_tile
    def registers(self, tile: Tile) -> tuple[int, int] | None:
        if self.columns(tile) // 2 + BESIDE_SUMS > self.at_start(tile):
            return None
        need = self.accumulators(tile) + self.other_registers(tile)
        shares = REGISTERS[tile.workers, tile.stagers, tile.min_blocks]
        return next((share for share in shares if share[0] >= need), None)

    def bytes_copied(self, geometry: Geometry, layout: Layout) -> int:
        """Return how many bytes of a row may be copied at a time, 16, 8 or 4, or 0 for elements that are loaded."""
        for size in (16, 8, 4):
            unit = size // self.shape.itemsize
            whole = geometry.x_extent[2] % unit == 0 and layout.x[4] == 1 and others_divisible(layout.x, 4, unit)
            if unit == 1 or (whole and layout.x_aligned):
                return size
        return 0

    def fits(self, tile: Tile, box: Box, device: Device) -> bool:
        room = (device.shared_bytes + 1024) // tile.min_blocks - 1024
        return box.plane <= MAX_STAGED and self.shared_bytes(tile, box, True) <= room

    def _box(self, tile: Tile, extent: tuple[int, int, int], patches: tuple[int, int], last_row: int) -> Box:
        """Add the words of a channel: all of the box with its halo, and up to what the last row's last tap reads."""
        d, h = extent[0] + self.halo[0], extent[1] + self.halo[1]
        w = self.width(tile, extent[2])
        reads = last_row + (self.halo[0] * h + self.halo[1]) * w + self.aligned - 1 + self.halo[2] + 1
        plane = at_residue(max(d * h * w, reads) * self.unit, 8, 32)  # four channels lie in different banks
        return Box(extent, patches, plane, d * h * w * self.unit)

    def parameters(self, tile: Tile, box: Box, blocks: int, copied: int) -> Ints:
        _, h, w = box.extent
        width, lines = self.width(tile, w), h + self.halo[1]
        # In the order in which the kernel divides: items by rows, rows by slices; then what it stores.
        divisors = (width * self.unit // max(1, copied // 4), lines, w, h)
        if self.shape.out_channels_last:
            divisors = (*divisors[:2], width, 1)
        return (*box.extent, box.plane, *box.patches, blocks, *(magic(divisor) for divisor in divisors))

    def clocks(self, tile: Tile, box: Box) -> float:
        """Estimate a multiprocessor's clocks for one box."""
        s, columns = self.shape, self.columns(tile)
        assert isinstance(s, Shape)
        steps = self.slots(tile) * tile.tiles_m * tile.workers * tile.k_steps
        products = steps * self.pairs * s.products
        staged = self.stages(tile) * self.stage_bytes(tile, box)
        weights = 0 if tile.resident else self.slots(tile) * self.slot_bytes(tile)
        outputs = prod(box.extent) * min(8 * tile.tiles_c, s.c_out)
        per_word = 4 // s.itemsize
        shared = steps * 8 * per_word * self.words + products * columns / 4 + (staged + weights) / SHARED_BYTES_A_CLOCK
        if s.out_channels_last:
            shared += outputs / 32 * (1 if s.itemsize == 4 else 0.75)
        else:
            shared += outputs / 32 * (1 + 32 / box.extent[2]) + (tile.rows * 8 * tile.tiles_c + outputs) / 32
        tensor = products * columns / 2
        edges = SECTOR / (4 * self.unit * self.width(tile, box.extent[2]))  # of rows, whole sectors are read
        l2 = (staged * (1 + edges) + weights) / L2_BYTES_A_CLOCK
        read = prod(box.extent) * prod(s.stride) * s.c_in * s.itemsize * min(1, prod(s.kernel) / prod(s.stride))
        memory = (read / -(-s.c_out // (8 * tile.tiles_c)) + outputs * s.itemsize) / MEMORY_BYTES_A_CLOCK
        of_step = (
            2 * per_word * self.loads + 4 * self.pairs * (12 if s.products == 3 else 3) + 4 * self.pairs * s.products
        )
        copies = staged / min(s.copied, 4 if s.copied < 16 else 16) * COPY_INSTRUCTIONS[s.copied]
        issue = (steps * 4 * (of_step + 8) + (copies + outputs * 12) / 32) / INSTRUCTIONS_A_CLOCK
        busiest = max(shared, tensor, l2, memory, issue)
        others = shared + tensor + l2 + memory + issue - busiest
        of_stages = self.stages(tile) * CHUNK_CLOCKS * (2 if tile.x_stages == 2 else 1)
        waits = BOX_CLOCKS + of_stages + steps / tile.workers * STEP_CLOCKS
        clocks = busiest + OVERLAP * others + waits / tile.min_blocks
        if s.itemsize == 2 and tile.min_blocks == 2 and tile.x_stages > 2:
            clocks *= TWO_BLOCKS
        # In the last of so many rounds of boxes, half of the multiprocessors have nothing to do.
        share = FEW_POSITIONS if max(s.c_in, s.c_out) >= WIDE else POSITIONS
        rounds = share * s.c_out / (tile.rows * 8 * tile.tiles_c * tile.min_blocks)
        return clocks * (1 + 0.5 / rounds)


@remembered(Tile)
def choose_tile(shape: Shape, device: Device) -> tuple[Tile, float] | None:
    """Return the best tile for typical extents, with its clocks a position (all channels of a group)."""
    work = Work.of(shape)
    return best_tile(work, ((work.least_cost(tile), tile) for tile in tiles(work)), device)


def tiles(work: Work) -> Iterator[Tile]:
    """Yield the tiles that a problem may use. They depend on neither N nor extents, which therefore never recompile."""
    shape = work.shape
    eights = -(-shape.c_out // 8)
    tiles_of_channels = sorted({-(-eights // parts) for parts in (1, 2, 3, 4, 6, 8, 16)} & set(range(1, 17))) or [16]
    for (workers, stagers, blocks), tiles_c, tiles_m, k_steps, x_stages in itertools.product(
        REGISTERS, tiles_of_channels, (1, 2, 3, 4, 6), (1, 2, 4, 8), (2, 4, 8)
    ):
        tile = Tile(
            workers=workers,
            stagers=stagers,
            tiles_m=tiles_m,
            tiles_c=tiles_c,
            merge_w=False,
            k_steps=k_steps,
            x_stages=x_stages,
            ring=3,
            resident=False,
            take_turns=False,
            all_phases=False,
            min_blocks=blocks,
        )
        steps = tiles_m * k_steps
        if steps % 2 or (steps == 2 and shape.products == 1) or (k_steps > 1 and work.channels(tile) >= 2 * shape.c_in):
            continue
        if work.columns(tile) > MAX_COLUMNS or work.slot_bytes(tile) > MAX_SLOT_BYTES:
            continue
        if tiles_m * k_steps * work.pairs * shape.products > MAX_UNROLLED or work.registers(tile) is None:
            continue
        slots = work.slots(tile)
        if slots * work.slot_bytes(tile) <= RESIDENT_BYTES // blocks:
            tile = dataclasses.replace(tile, ring=slots, resident=True)
        yield tile
