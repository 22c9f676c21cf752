"""The sizes and the estimate of ``kernels/correlate_rows.cu``.

What of them is the same is that of `cuconvt.plan_correlate_wgmma_work`, whose sums these are, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import gcd, prod
from typing import NamedTuple

from cuconvt import plan_correlate_wgmma_work as correlate_wgmma
from cuconvt import plan_wgmma_sizes as wgmma
from cuconvt.geometry import Geometry
from cuconvt.plan import Device, Ints, Layout, at_residue, magic, round_up
from cuconvt.plan_boxes import even_extent
from cuconvt.plan_copies import others_divisible
from cuconvt.plan_correlate import staged_axis
from cuconvt.plan_correlate_wgmma import OTHERS
from cuconvt.plan_correlate_wgmma_work import FEW_POSITIONS
from cuconvt.plan_phase_wgmma_work import POSITIONS, SHARED_BYTES_A_CLOCK
from cuconvt.plan_search import of_tile
from cuconvt.plan_wgmma_boxes import SECTOR, WIDE, few, widths
from cuconvt.plan_wgmma_sizes import BESIDE_SUMS, REGISTERS_OF_BOXED, Box, NormOfRows, Tile, copies_can_count
from cuconvt.tensor_map import MAX_BOX, MAX_STEP, TensorMap, reads_rows

# Registers of a worker's and of a stager's thread, by warpgroups of either and blocks a multiprocessor.
REGISTERS = {
    (1, 1, 2): ((152, 104), (200, 56)),
    (2, 1, 1): ((208, 88),),
}
MAX_STAGED = 2**16 - 1  # words of a channel
SWIZZLED_WORDS = 32  # of a row of 128 bytes
# Of the estimate, by bytes of an element and products, but for 16 bits of few channels: of 116 cells.
OF_SWIZZLED = {(4, 3): 0.96, (4, 1): 0.94, (2, 1): 0.96}
FEW_SWIZZLED = 64
MAX_JOINED = MAX_BOX - 8  # numbers of a row: another piece of 16 bytes may follow (see `Work.row_words`)
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
# Likewise, where copies bring x, of 190 problems: in general; with strides of 8 numbers; of 16 bits with three axes and
# many channels, whose rows are short, and with one channel; of TF32 with few channels where taps do not overlap; of 16
# bits with joined rows of few channels.
BOXED_COMPARED = {(4, 3): 1.12, (4, 1): 0.96, (2, 1): 0.86}
LONG_UNITS, OF_LONG_UNITS = 8, {2: 2.5, 4: 1.6}
OF_WIDE_VOLUMES, OF_ONE_CHANNEL = 2.2, 2.0
FEW_DISJOINT, OF_FEW_DISJOINT = 32, 1.32
FEW_JOINED, OF_FEW_JOINED = 64, 1.2
SLOWER = {16: 1.0, 4: 1.25, 2: 6.0}  # by bytes of a row at a time: how much longer it takes for the same estimate
OF_LAST = 1.4  # likewise, where the result is channels-last, beside one channel of y
OF_TF32 = {1: 1.1, 2: 1.0, 3: 0.9}  # likewise, by the number of axes
OF_DISJOINT = 1.3  # likewise, of 16 bits where taps do not overlap: of 73 layers
# Instructions of a thread that copies 16 bytes, 4, or loads two halves of a word.
COPY_INSTRUCTIONS = {16: 8, 4: 8, 2: 14}


class Rates(NamedTuple):
    """Of the estimate where copies bring x: bytes a clock, and clocks."""

    column: float  # clocks of a wgmma, of each of its columns
    picked: float  # clocks of what a warpgroup loads and picks, of each word of a thread
    copied: float  # bytes of x
    copy: float  # clocks of a copy, and of each of its rows besides
    row: float
    weights: float  # bytes
    memory: float  # bytes
    stage: float  # clocks from asking for a stage to having it, of which all but one are under way
    slot: float  # the same of a slot of weights
    box: float  # clocks
    outputs: float  # clocks of 32 results
    norm: float


# By parts of x: fitted to the times of 1216 tiles for 160 problems (10% rms), and of 350 for 70 (9%).
RATES = {
    1: Rates(0.304, 2.87, 41.3, 29, 0.42, 89, 19.8, 504, 927, 315, 4.3, 2.06),
    2: Rates(0.411, 3.7, 32.7, 63, 0.235, 116, 31.3, 380, 145, 685, 7.7, 1.58),
}


@dataclass(frozen=True)
class Shape(wgmma.Shape):
    """What a tile's choice depends on: everything but N and extents."""

    pad_w: int = 0  # modulo what positions have to be aligned to
    copied: int = 16  # bytes of a row at a time, if it can be aligned at all
    join_h: bool = False  # whether copies bring the rows of all taps along H as one


def _copies_can_bring(geometry: Geometry, layout: Layout, itemsize: int) -> bool:
    """Whether bulk tensor copies can bring rows of x, some channels of one group at a time, and should."""
    g = geometry
    return (
        (g.groups == 1 or g.c_in_per_group % 16 == 0)  # of eight at a time, stages were too small
        and (itemsize == 2 or g.c_in_per_group > 4)  # copies bring eight, threads four
        and copies_can_count(g)
        and g.stride[1] <= MAX_STEP
        and not layout.out_channels_last
        and reads_rows(layout.x, (g.n, g.c_in, *g.x_extent), layout.x_aligned, itemsize)
    )


def _with_joined_rows(geometry: Geometry, layout: Layout) -> Layout | None:
    """Return the layout in which the rows of all taps along H are one, or None where taps share or leave them."""
    g, (of_n, of_channels, of_d, of_h, of_w) = geometry, layout.x
    (_, k, k_w), (_, out_h, out_w), (_, x_h, x_w) = g.kernel, g.out_extent, g.x_extent
    along_h = 1 < k == g.stride[1] and g.dilation[1] == 1 and k * out_h <= x_h
    along_w = g.stride[2] * out_w == x_w == of_h and (k_w - 1) * g.dilation[2] < g.stride[2]
    if not (along_h and along_w) or any(g.pad_before[1:]) or k * x_w > MAX_JOINED:
        return None
    return replace(layout, x=(of_n, of_channels, of_d, k * of_h, of_w))


class Work(correlate_wgmma.Work):
    """The sizes that follow from a problem and a tile; the kernel computes the same ones."""

    def __init__(self, geometry: Geometry, layout: Layout, dtype: str, precision: str | None):
        g, itemsize = geometry, 4 if dtype == "float32" else 2
        # Contiguous rows whose extents differ by whole strides agree in whether words are whole.
        left = g.x_extent[2] % g.stride[2] * itemsize
        boxes, join_h = _copies_can_bring(g, layout, itemsize), False
        if not boxes and (joined := _with_joined_rows(g, layout)):
            boxes = join_h = _copies_can_bring(g, joined, itemsize)
        self.shape: Shape = Shape.of(
            g,
            dtype,
            precision,
            x_channels_last=False,
            out_channels_last=layout.out_channels_last,
            pairs=False,
            late=(0, 0, 0),
            pad_w=g.pad_before[2] % (4 * g.stride[2]),
            copied=16 if boxes or left == 0 else 4 if left % 4 == 0 else 2,
            boxes=boxes,
            whole_chunks=boxes and g.groups > 1,
            join_h=join_h,
        )
        self._derive()

    def _derive(self) -> None:
        super()._derive()
        s = self.shape
        assert isinstance(s, Shape)
        self.boxed, self.join_h = s.boxes, s.join_h
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
        is_whole = self.halo[2] == 0 and not before and self.first_unit % self.aligned == 0
        self.can_swizzle = s.boxes and not s.join_h and is_whole and 4 % self.unit == 0
        self.swizzled_width = SWIZZLED_WORDS // self.unit  # positions of such a row
        are_few = s.itemsize == 2 and s.c_in <= FEW_SWIZZLED
        self.of_swizzled = 1 if are_few else OF_SWIZZLED[s.itemsize, s.products]

    def compared_cost(self, clocks: float) -> float:
        """Return what is compared with other kernels' estimates, for the clocks of a position."""
        s = self.shape
        assert isinstance(s, Shape)
        compared = OTHERS * (self._boxed_beside_others() if self.boxed else COMPARED[s.itemsize, s.products])
        compared *= SLOWER[s.copied]
        if s.out_channels_last:
            compared *= OF_LAST
        if (s.itemsize, s.products) == (4, 1):
            compared *= OF_TF32[s.rank]
        if s.itemsize == 2 and s.kernel == s.stride and not self.boxed:
            compared *= OF_DISJOINT
        return compared * clocks

    def _boxed_beside_others(self) -> float:
        """Return by how much other kernels' estimates are more optimistic, where copies bring x."""
        s, disjoint = self.shape, self.shape.kernel == self.shape.stride
        compared = BOXED_COMPARED[s.itemsize, s.products]
        if s.products == 1 and s.stride[2] >= LONG_UNITS:
            compared *= OF_LONG_UNITS[s.itemsize]
        if s.itemsize == 2 and s.rank == 3 and not disjoint and max(s.c_in, s.c_out) >= 2 * WIDE:
            compared *= OF_WIDE_VOLUMES
        if s.itemsize == 2 and s.c_in == 1:
            compared *= OF_ONE_CHANNEL
        if s.itemsize == 4 and s.products == 1 and disjoint and s.c_in <= FEW_DISJOINT:
            compared *= OF_FEW_DISJOINT
        if s.itemsize == 2 and s.join_h and s.c_in <= FEW_JOINED:
            compared *= OF_FEW_JOINED
        return compared

    def stores_alone(self, tile: Tile) -> bool:
        return False

    def width(self, tile: Tile, positions: int) -> int:
        return positions if self.boxed else self.staged_width(positions)

    def staged_width(self, positions: int) -> int:
        """Return the positions of a staged row."""
        most_lead = self.aligned - 1 if positions % self.aligned else self.first_unit % self.aligned
        return round_up(positions + self.halo[2] + most_lead, self.aligned)

    def sums(self, tile: Tile) -> int:
        return 1

    def channels(self, tile: Tile) -> int:
        return tile.k_steps * self.piece

    @of_tile
    def slot_bytes(self, tile: Tile) -> int:
        return self.products_of_slot(tile) * self.parts * 2 * self.columns(tile) * 16

    @of_tile
    def products_of_slot(self, tile: Tile) -> int:
        """Return how many wgmmas multiply a slot: of pairs of taps, and of an odd last one with two groups each."""
        taps, groups = self.shape.kernel[2], tile.k_steps
        alternate = self.parts == 2 or tile.tiles_m * groups % 4 == 0
        shared = taps % 2 and taps > 1 and groups % 2 == 0 and alternate
        return groups // 2 * taps if shared else groups * self.pairs

    @of_tile
    def slots(self, tile: Tile) -> int:
        return self.shape.kernel[0] * self.shape.kernel[1] * -(-self.shape.c_in // self.channels(tile))

    @of_tile
    def stages(self, tile: Tile) -> int:
        return self.live[0] * self.live_h(tile) * -(-self.shape.c_in // self.channels(tile))

    def row_words(self, tile: Tile, positions: int) -> int:
        """Return the words of a row that copies bring: eight positions of four channels lie in different banks.

        The channels are neighbours or every second one, see `next_channel`.
        """
        if tile.swizzled:
            return SWIZZLED_WORDS
        width = self.shape.kernel[1] * positions if self.join_h else self.staged_width(positions)
        pieces = -(-width * self.unit // 4)
        return 4 * (pieces + (pieces % 4 == 0))

    def lines(self, tile: Tile, positions: int) -> int:
        """Return the rows that a copy brings for so many positions along H, of a class of taps or of all."""
        s = self.shape
        if self.join_h or not tile.whole_h:
            return positions + self.halo[1]
        return staged_axis(s.kernel[1], s.stride[1], s.dilation[1], positions)[2]

    def gap_h(self, tile: Tile) -> int:
        """Return how far these are apart in x, or in what they are joined to."""
        s = self.shape
        if self.join_h:
            return 1
        return s.stride[1] // (staged_axis(s.kernel[1], s.stride[1], s.dilation[1], 1)[0] if tile.whole_h else 1)

    def live_h(self, tile: Tile) -> int:
        """Return the classes along H."""
        return 1 if tile.whole_h or self.join_h else self.live[1]

    def next_channel(self, tile: Tile, box: Box) -> int:
        """Return which other one of eight channels a lane has that reads some channel."""
        return 1 if tile.swizzled or self.row_words(tile, box.extent[2]) // 4 % 2 else 4

    def map_of_rows(self, tile: Tile, box: Box, dtype: str, geometry: Geometry, layout: Layout) -> TensorMap:
        """Return the map of x: of rows, whose axes are W, channels, H, D and N; a copy brings a slice along D."""
        g, (of_n, of_channels, of_d, of_h, of_w) = geometry, layout.x
        x_d, x_h, x_w = g.x_extent
        if self.join_h:
            of_h, x_h, x_w = g.kernel[1] * of_h, g.out_extent[1], g.kernel[1] * x_w
        return TensorMap.of(
            "tf32" if dtype == "float32" and self.parts == 1 else dtype,
            (g.n, x_w, x_d, x_h, g.c_in),
            (of_n, of_w, of_d, of_h, of_channels),
            (1, self.lines(tile, box.extent[1]), self.channels(tile)),
            (1, self.gap_h(tile), 1),
            self.row_words(tile, box.extent[2]) * 4 // self.shape.itemsize,
            plain=not tile.swizzled,
        )

    def boxes(self, tile: Tile, extents: Ints, rows: int = 0) -> Iterator[Box]:
        """Yield the same; where copies bring rows, any positions of a box are rows of A, one after the other."""
        if not self.boxed:
            yield from super().boxes(tile, extents, rows)
            return
        rows = rows or tile.rows
        for w in self._widths(tile, extents[2], rows):
            for d in few(extents[0]):
                if d * w > rows:
                    break
                yield self._box(tile, (d, even_extent(extents[1], rows // (d * w)), w), (0, 0), 0)

    def _widths(self, tile: Tile, extent: int, rows: int) -> list[int]:
        if tile.swizzled:
            return [self.swizzled_width]
        return self._joined_widths(extent, rows) if self.join_h else widths(extent, rows)

    def _joined_widths(self, extent: int, rows: int) -> list[int]:
        """Return the extents of boxes along W where rows are joined: they are not cut.

        Estimates count longer ones, which are not brought, as if they were.
        """
        most = MAX_JOINED // (self.shape.kernel[1] * self.shape.stride[2])
        width = extent if extent <= most else even_extent(extent, min(most, rows))
        return [width] if width <= rows else []

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
        shares = self.kinds()[tile.workers, tile.stagers, tile.min_blocks]
        return next((share for share in shares if share[0] >= need), None)

    def kinds(self) -> dict[tuple[int, int, int], tuple[tuple[int, int], ...]]:
        """Return the registers of a worker's and of a stager's thread, by what there are of either and of blocks."""
        if not self.boxed:
            return REGISTERS
        return {kind: (share,) for kind, share in REGISTERS_OF_BOXED.items()}

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
        if not self.boxed:
            return box.plane <= MAX_STAGED and self.shared_bytes(tile, box, True) <= room
        beside, of_plane = self._bytes_of_boxed(tile)
        if box.plane > MAX_STAGED or beside + of_plane * box.plane > room:
            return False
        _, h, w = box.extent
        span = (self.lines(tile, h) - 1) * self.gap_h(tile) + 1
        return max(span, self.row_words(tile, w) * 4 // self.shape.itemsize, self.channels(tile)) <= MAX_BOX

    @of_tile
    def _bytes_of_boxed(self, tile: Tile) -> tuple[int, int]:
        """Return the shared memory beside the stages, and that of a word of a channel's plane in all of them.

        A search asks for hundreds of boxes of a tile.
        """
        return self.shared_bytes(tile, Box((0, 0, 0), (0, 0), 0, 0), True), 4 * tile.x_stages * self.channels(tile)

    def _box(self, tile: Tile, extent: tuple[int, int, int], patches: tuple[int, int], last_row: int) -> Box:
        """Add the words of a channel: all of the box with its halo, and up to what the last row's last tap reads."""
        if self.boxed:
            d, h = extent[0] + self.halo[0], self.lines(tile, extent[1])
            return Box(extent, patches, d * h * self.row_words(tile, extent[2]), 0)
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
        plane = self.row_words(tile, w) if self.boxed else box.plane
        return (*box.extent, plane, *box.patches, blocks, *(magic(divisor) for divisor in divisors))

    def clocks(self, tile: Tile, box: Box) -> float:
        """Estimate a multiprocessor's clocks for one box."""
        if self.boxed:
            clocks = self.clocks_of_norm(tile, box) * self._beside_rounds(tile)
            return clocks * self.of_swizzled if tile.swizzled else clocks
        s, columns = self.shape, self.columns(tile)
        assert isinstance(s, Shape)
        steps = self.slots(tile) * tile.tiles_m * tile.workers * tile.k_steps
        # As if no groups shared products: where threads bring x, the time for that is hardly less.
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
        return clocks * self._beside_rounds(tile)

    def _beside_rounds(self, tile: Tile) -> float:
        """Return how much longer boxes take, as in the last of their rounds half of the multiprocessors are idle."""
        s = self.shape
        share = FEW_POSITIONS if max(s.c_in, s.c_out) >= WIDE else POSITIONS
        rounds = share * s.c_out / (tile.rows * 8 * tile.tiles_c * tile.min_blocks)
        return 1 + 0.5 / rounds

    @of_tile
    def _norm_of_rows(self, tile: Tile) -> NormOfRows:
        """Return what a norm has of a tile, whatever its box."""
        s, r = self.shape, RATES[self.parts]
        per_word, blocks = 4 // s.itemsize, tile.min_blocks
        steps = self.slots(tile) * tile.tiles_m * tile.workers * tile.k_steps
        operands = steps // tile.k_steps * self.products_of_slot(tile)
        picked = steps * 2 * per_word * self.loads + operands * 4 * self.parts
        multiplied = operands * s.products * r.column * self.columns(tile) + picked * r.picked
        weights = 0 if tile.resident else self.slots(tile) * self.slot_bytes(tile)
        waits = (self.stages(tile) * r.stage) / (tile.x_stages - 1) / blocks
        of_slots = 0 if tile.resident else self.slots(tile) * r.slot / (tile.ring - 1) / blocks
        chunks = -(-s.c_in // self.channels(tile))
        return NormOfRows(chunks, multiplied**r.norm, weights / r.weights, waits**r.norm, of_slots**r.norm)

    def clocks_of_norm(self, tile: Tile, box: Box) -> float:
        """Estimate the same where copies bring x: what bounds a box adds to each other as in a norm."""
        s, r, of_tile = self.shape, RATES[self.parts], self._norm_of_rows(tile)
        d = box.extent[0]
        slices = self.live_h(tile) * self._slices(d)
        staged = of_tile.chunks * slices * box.plane // (d + self.halo[0]) * self.channels(tile) * 4
        rows = staged / (4 * self.row_words(tile, box.extent[2]))
        copies = staged / r.copied + of_tile.chunks * slices * r.copy + rows * r.row + of_tile.weights
        outputs = prod(box.extent) * min(8 * tile.tiles_c, s.c_out)
        read = prod(box.extent) * s.stride[2] * self.live[1] * s.c_in * s.itemsize * self.live[0]
        memory = (read / -(-s.c_out // (8 * tile.tiles_c)) + outputs * s.itemsize) / r.memory
        powers = of_tile.multiplied, copies**r.norm, memory**r.norm, of_tile.waits, of_tile.waits_for_weights
        norm: float = sum(powers) ** (1 / r.norm)
        return norm + (r.box + r.outputs * outputs / 32) / tile.min_blocks

    def _slices(self, positions: int) -> int:
        """Return the slices along D that all classes read of a box with so many positions."""
        s, step = self.shape, self.steps[0]
        hop = s.dilation[0] // gcd(s.stride[0], s.dilation[0])
        return sum(positions + ((s.kernel[0] - first - 1) // step) * hop for first in range(self.live[0]))
