"""Sizes that follow from a problem and a tile on Hopper, where boxes lie in planes of shared memory.

They are those of ``kernels/phase_wgmma.cu``; ``correlate_wgmma.cu`` and ``correlate_rows.cu`` have some of their own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import gcd, prod
from typing import Any, NamedTuple, TypeVar

from cuconvt.geometry import Geometry
from cuconvt.plan import Device, Ints, Layout, at_residue, magic, round_up, span
from cuconvt.plan_copies import others_divisible
from cuconvt.plan_search import of_tile
from cuconvt.tensor_map import MAX_BOX, STRIDE_BYTES, TensorMap, reads, spans

ROWS = 64  # of a wgmma
MAX_COLUMNS = 192  # of one that the header has
MAX_BLOCKS = 2**30
BESIDE_SUMS = 28  # registers that a wgmma's sums leave, or ptxas refuses it: of those that a thread starts with
RESIDENT_BYTES = 128 * 1024  # of weights that stay in shared memory
MAX_POSITIONS = 2**14 - 1  # of a plane: its distance has 14 bits in a wgmma's descriptor
MAX_OUTPUTS = 2**15 - 1 - 2**10  # of a box, along an axis: counted in 16 bits
# Registers of a worker's and of a stager's thread, by warpgroups of either and blocks a multiprocessor.
REGISTERS = {
    (1, 1, 2): (200, 56),
    (2, 2, 1): (200, 56),
    (1, 1, 3): (104, 56),
}
# The same where bulk tensor copies bring x: a thread for each team and one for weights stage.
REGISTERS_OF_BOXED = {(2, 1, 1): (232, 40), (1, 1, 2): (216, 40), (3, 1, 1): (152, 40)}
# And others split it.
REGISTERS_OF_SPLIT = {(2, 1, 1): (224, 56), (1, 1, 2): (208, 48), (3, 1, 1): (152, 56), (2, 2, 1): (200, 56)}
ALL_REGISTERS = 65536  # of a multiprocessor
MAX_REACHED = 2**30  # positions that bulk tensor copies count, with those of a box beyond the last
SWIZZLED = 1024  # bytes after which a swizzle repeats
PACKED_CHANNELS = 16  # of a weight, by a thread
PACKS_A_THREAD = 4  # of a worker, who may do so: 16 channels of one tap each
FILL_BYTES = 2176  # of shared memory, from which planes that no tap reaches are filled


@dataclass(frozen=True)
class Tile:
    """The compile-time shape of a block; the fields are the macros of the kernel."""

    workers: int  # warpgroups
    stagers: int
    tiles_m: int
    tiles_c: int
    merge_w: bool
    k_steps: int
    x_stages: int
    ring: int
    resident: bool
    take_turns: bool
    all_phases: bool
    min_blocks: int
    slides: bool = False
    half_k: bool = False
    merge_d: bool = False
    join_w: bool = False
    boxed: bool = False  # whether bulk tensor copies bring x
    residues: Ints = (0, 0, 0)  # whether an axis without a stride has a phase for each residue modulo the dilation
    whole_h: bool = field(default=False, kw_only=True)  # whether a box has all rows that taps along H read
    # Where the rows of a plane of x are one row of a copy, the positions of each; any number stands for a problem's.
    flat: int = field(default=0, kw_only=True)
    swizzled: bool = field(default=False, kw_only=True)  # whether rows of x are 128 bytes, in the order of copies

    @property
    def rows(self) -> int:
        """Positions of a box, those of no use included."""
        return ROWS * self.tiles_m * self.team

    @property
    def team(self) -> int:
        """Workers that share a box."""
        return 1 if self.take_turns else self.workers

    @property
    def threads(self) -> int:
        return 128 * (self.workers + self.stagers)


AnyTile = TypeVar("AnyTile", bound=Tile)


def altered(tile: AnyTile, **fields: Any) -> AnyTile:
    """Return the tile with other values of some fields: `dataclasses.replace` takes longer than most estimates."""
    other = object.__new__(type(tile))
    other.__dict__.update(tile.__dict__, **fields)
    return other


class Box(NamedTuple):
    """The run-time shape of a block: positions q along D, H, W, and how rows of A map to them.

    A tile that slides has one slice along D in shared memory, and the patches and the plane are those of a slice.
    """

    extent: tuple[int, int, int]
    patches: tuple[int, int]  # of 8 x 8 positions along H and W; zeros where 64 positions follow each other
    plane: int  # positions that are staged, or read without being of use (in units of `Sizes.unit`)
    items: int  # what stagers count: positions, or pairs of them in a row


class NormOfRows(NamedTuple):
    """What bounds a box of rows that copies bring, whatever is in it: powers of clocks, and clocks."""

    chunks: int
    multiplied: float  # to the power of the norm
    weights: float  # clocks of their copies
    waits: float  # to the power of the norm, and so are the next ones
    waits_for_weights: float


def registers_of(tile: Tile, parts: int) -> tuple[int, int]:
    """Return the registers of a worker's and of a stager's thread, where x has so many parts."""
    return kinds_of_blocks(tile.boxed, parts)[tile.workers, tile.stagers, tile.min_blocks]


def kinds_of_blocks(boxed: bool, parts: int) -> dict[tuple[int, int, int], tuple[int, int]]:
    """Return the registers by warpgroups and blocks a multiprocessor, where copies bring x or not."""
    if not boxed:
        return REGISTERS
    return REGISTERS_OF_SPLIT if parts == 2 else REGISTERS_OF_BOXED


def can_be_boxed(geometry: Geometry, layout: Layout, itemsize: int, channels: int) -> bool:
    """Whether bulk tensor copies can bring x, so many channels of one group at a time.

    Those of another group would meet weights that are zeros.
    """
    g = geometry
    alone = g.groups == 1 or g.c_in_per_group % channels == 0
    extents = (g.n, g.c_in, *g.x_extent)
    # Of a single position no stride tells how far others would be.
    is_whole = max(g.n, *g.x_extent) > 1 or g.c_in * itemsize % STRIDE_BYTES == 0
    return (
        alone
        and copies_can_count(g)
        and is_whole
        and layout.x_channels_last
        and reads(layout.x, extents, layout.x_aligned, itemsize)
    )


def copies_can_count(geometry: Geometry) -> bool:
    """Whether bulk tensor copies can count all that boxes of x reach, and there is any."""
    g = geometry
    extents = (g.n, g.c_in, *g.x_extent)
    reached = max(*extents, *(o * s for o, s in zip(g.out_extent, g.stride, strict=True)))
    return min(extents) > 0 and reached < MAX_REACHED


AnyShape = TypeVar("AnyShape", bound="Shape")


@dataclass(frozen=True)
class Shape:
    """What a tile's choice depends on: everything but N and extents."""

    rank: int
    kernel: Ints
    stride: Ints
    dilation: Ints
    c_in: int  # per group
    c_out: int
    itemsize: int
    products: int
    x_channels_last: bool
    out_channels_last: bool
    pairs: bool  # whether x is read two positions at a time
    late: Ints  # whether the first outputs of some phase belong to a position one further than those of another
    run: int = 1  # outputs along W of a position that may be written at a time
    plane_step: int = 1  # planes of the result for one that taps reach, of which the others are filled
    boxes: bool = False  # whether bulk tensor copies can bring x
    fold: int = 1  # taps along W that are channels of x
    joined: int = 1  # groups that are staged as one
    apart: Ints = (0, 0, 0)  # whether each tap along an axis has boxes of its own
    residues: Ints = (0, 0, 0)  # whether an axis's stride is its dilation, and phases are residues that have all taps
    whole_chunks: bool = False  # whether boxes may have no channels beyond the last one, which are another group's

    @classmethod
    def of(cls: type[AnyShape], geometry: Geometry, dtype: str, precision: str | None, **others: Any) -> AnyShape:
        """Return the shape of a problem, of which the other fields are given."""
        g = geometry
        return cls(
            rank=g.rank,
            kernel=g.kernel,
            stride=g.stride,
            dilation=g.dilation,
            c_in=g.c_in_per_group,
            c_out=g.c_out_per_group,
            itemsize=4 if dtype == "float32" else 2,
            products=3 if precision == "tf32x3" else 1,
            **others,
        )


AnySizes = TypeVar("AnySizes", bound="Sizes")


class Sizes:
    """The sizes that follow from a problem and a tile; the kernel computes the same ones."""

    shape: Shape

    @classmethod
    def of(cls: type[AnySizes], shape: Shape) -> AnySizes:
        work = cls.__new__(cls)
        work.shape = shape
        work._derive()
        return work

    def _derive(self) -> None:
        s = self.shape
        self.tile: Tile | None = None  # the last one whose sizes were asked for, and these: see `of_tile`
        self.sizes: dict[Any, Any] = {}
        residues = list(zip(s.residues, s.stride, strict=True))
        # By axis, how many phases share the taps, of which residues have all each, and how far positions that follow
        # each other are apart in x.
        self.sharing = tuple(1 if each else stride for each, stride in residues)
        self.steps_in_x = tuple(stride if each else 1 for each, stride in residues)
        gcds = [gcd(stride, dilation) for stride, dilation in zip(s.stride, s.dilation, strict=True)]
        self.steps = [
            k if alone else stride // g for k, alone, stride, g in zip(s.kernel, s.apart, s.stride, gcds, strict=True)
        ]
        hops = [dilation // g for dilation, g in zip(s.dilation, gcds, strict=True)]
        taps = [-(-k // step) for k, step in zip(s.kernel, self.steps, strict=True)]  # of a phase, at most
        of_all = [
            (k - 1) * d // st + late for k, d, st, late in zip(s.kernel, s.dilation, s.stride, s.late, strict=True)
        ]
        self.reach_of_all = tuple(of_all)
        self.reach_of_one = ((taps[0] - 1) * hops[0], (taps[1] - 1) * hops[1], of_all[2])
        self.live = [min(k, step) for k, step in zip(s.kernel, self.steps, strict=True)]  # phases that have a tap
        self.parts = 2 if s.products == 3 else 1
        self.unit = 1  # that a box's plane counts for a position

    def reach(self, tile: Tile) -> Ints:
        """Return how much wider the staged box is than the box of positions."""
        reach = self.reach_of_all if tile.all_phases else self.reach_of_one
        along_w = reach[2] - self.shape.late[2] if tile.join_w else reach[2]  # no phase is late
        return (0 if tile.slides else reach[0], reach[1], along_w)

    def width(self, tile: Tile, positions: int) -> int:
        """Return the positions of a row of the staged box, for so many along W."""
        return positions + self.reach(tile)[2]

    def stores_runs(self, tile: Tile) -> bool:
        """Whether a thread stores the outputs along W of its positions as they are: it holds their whole sums."""
        return self.shape.run > 1 and not (tile.merge_w and self.reach_of_all[2])

    def taps_w(self, tile: Tile) -> int:
        """Return the wgmmas that a row of taps along W needs."""
        s = self.shape
        return 1 if tile.merge_w else s.kernel[2] // s.stride[2] if tile.join_w else s.kernel[2]

    def sets_w(self, tile: Tile) -> int:
        """Return the sets of accumulators of a row of taps along W, and so the chains of 3xTF32."""
        return 1 if tile.merge_w or tile.join_w else self.live[2]

    def slots_of_chunk(self, tile: Tile) -> int:
        """Return the slots of weights for all taps along D and H."""
        return (1 if tile.merge_d else self.shape.kernel[0]) * self.shape.kernel[1]

    def blocks_can_pack(self, tile: Tile, packs: int) -> bool:
        """Whether a block may pack the weights that it needs itself, all of a tile, which saves a launch."""
        needs_all = tile.all_phases or tile.slides or prod(self.sharing[:2]) == 1
        return tile.resident and needs_all and packs <= PACKS_A_THREAD * 128 * tile.workers

    def stores_alone(self, tile: Tile) -> bool:
        """Whether workers that share a box each store their own rows, which needs no sums of others."""
        return tile.team > 1 and not tile.merge_w

    def turns(self, tile: Tile) -> bool:
        """Whether results are turned in shared memory."""
        return not self.shape.out_channels_last and not self.stores_runs(tile)

    def stored_together(self, tile: Tile, box: Box, width: int, layout: Layout) -> int:
        """Return how many results of a row, which has so many, a thread stores together: 16 bytes, 4 or one.

        Each so many begin at a multiple of their size, in the result and among the rows of A. Results of 32 bits would
        take as long together as one by one.
        """
        is_result = self.shape.itemsize == 2 and not tile.merge_w and self.outputs(tile) == 1
        if not self.turns(tile) or not is_result or layout.out[4] != 1 or not layout.out_aligned:
            return 1
        pitch = 0 if any(box.patches) else self.width(tile, box.extent[2])

        def divides(count: int) -> bool:
            return not any(n % count for n in (width, box.extent[2], pitch)) and others_divisible(layout.out, 4, count)

        return next((count for count in (8, 2) if divides(count)), 1)

    def depth(self, tile: Tile, box: Box) -> int:
        """Return the slices along D of a box that are staged and multiplied one after the other."""
        return box.extent[0] + self.earlier_slices() if tile.slides else 1

    def earlier_slices(self) -> int:
        """Return how many slices before the first one of its positions a tile that slides reads."""
        return (self.shape.kernel[0] - 1) // self.shape.stride[0]

    def sums(self, tile: Tile) -> int:
        """Return the phases or taps whose sums a block stores at a time."""
        along_w = self.shape.kernel[2] if tile.merge_w else self.live[2]
        return along_w * (self.live[0] * self.live[1] if tile.all_phases else 1)

    def held(self, tile: Tile) -> int:
        """Return the same of those that it holds."""
        if not tile.slides:
            return self.sums(tile)
        return self.sums(tile) // (self.live[0] if tile.all_phases else 1) * self.shape.kernel[0]

    def rows(self, tile: Tile) -> float:
        """Return the rows of taps along D and H that a block multiplies, on average; of a slice if it slides."""
        return self.slots_of_chunk(tile) / (1 if tile.all_phases else prod(self.sharing[:2]))

    def chains(self, tile: Tile) -> int:
        """Return how many sums of a slot's products an output adds up."""
        rows = [-(-k // step) for k, step in zip(self.shape.kernel[:2], self.steps[:2], strict=True)]
        return prod(rows) * -(-self.shape.c_in // self.chunk(tile))

    def steps_of_chain(self, tile: Tile) -> int:
        """Return how many pairs of pieces a chain of 3xTF32 multiplies, each three times."""
        return -(-self.taps_w(tile) // self.sets_w(tile)) * tile.k_steps

    def unrolled(self, tile: Tile) -> int:
        """Return the wgmmas of a chunk, for all taps."""
        return self.slots_of_chunk(tile) * self.taps_w(tile) * tile.tiles_m * tile.k_steps * self.shape.products

    def outputs_w(self) -> int:
        """Return the outputs of a position along W."""
        return self.shape.stride[2]

    def outputs(self, tile: Tile) -> int:
        """Return the outputs of a position that a block's workers store, of one channel."""
        s = self.shape
        return self.outputs_w() * (s.stride[0] * s.stride[1] if tile.all_phases else 1)

    def columns(self, tile: Tile) -> int:
        """Columns of a wgmma."""
        s = self.shape
        along_w = s.kernel[2] if tile.merge_w else s.stride[2] if tile.join_w else 1
        return 8 * tile.tiles_c * along_w * (s.kernel[0] if tile.merge_d else 1)

    def chunk(self, tile: Tile) -> int:
        """Input channels staged at a time."""
        return self.pieces(tile) * (16 // self.shape.itemsize)

    def are_whole(self, tile: Tile) -> bool:
        """Whether all chunks have channels of one group alone."""
        return not self.shape.whole_chunks or self.shape.c_in % self.chunk(tile) == 0

    def pieces(self, tile: Tile) -> int:
        """16-byte pieces of channels that are staged at a time."""
        return 1 if tile.half_k else 2 * tile.k_steps

    def packed_pieces(self, pieces: int) -> int:
        """Return how many of a chunk's pieces of weights a thread packs."""
        return min(pieces, PACKED_CHANNELS * self.shape.itemsize // 16)

    def accumulators(self, tile: Tile) -> int:
        """Registers of a worker that hold sums."""
        chains = self.columns(tile) if self.shape.products == 3 else 0
        return self.held(tile) * tile.tiles_m * 4 * tile.tiles_c + chains

    def other_registers(self, tile: Tile) -> int:
        """Estimate how many registers a worker needs besides: a little more than the compiler was seen to need."""
        s, outputs, three = self.shape, self.outputs(tile), self.shape.products == 3
        row = tile.tiles_m * tile.k_steps * self.taps_w(tile)  # descriptors for a row of taps
        if s.out_channels_last and tile.tiles_m <= 4 and not three:
            count = 44
        elif s.out_channels_last and tile.all_phases and tile.resident:  # unrolled rows keep many descriptors
            count = 40 + self.unrolled(tile) // 16 + (16 if tile.slides else 0)
        elif s.out_channels_last:
            count = 45 + 6 * tile.tiles_m + 2 * outputs + tile.tiles_m**2 * (outputs - 1) // 2 + row // 10
            count += 18 if s.stride[2] >= 8 and not three else 0
            if tile.all_phases:  # likewise
                count += 12 * tile.k_steps + (66 if three else 0)
            elif three:
                count += 16 + 3 * row // 8
        else:
            if tile.merge_w:
                count = 38
                if three:
                    count += 6 * max(tile.tiles_m - 2, 0)
                if self.turns(tile):
                    count += 2 * outputs if three else self.targets(tile)
            else:
                count = (34 if tile.slides else 36) + row // 2 + max(row - 32, 0)
                if three:
                    count += 14 + 3 * row // 4 + min(outputs, 3) * min(tile.tiles_m, 4)
                if three and tile.slides and tile.k_steps > 2:
                    count += 3 * row // 2
            if tile.all_phases:
                count += self.unrolled(tile) // 8
                if not tile.resident:  # each row waits for its weights
                    count += 50 if three else (20 if tile.slides else 10) + max(self.unrolled(tile) - 160, 0) // 2
            if self.stores_runs(tile):  # where rows of all tiles go
                count += tile.tiles_m + 3 * max(tile.tiles_m - 4, 0)
        return count + (4 if tile.min_blocks > 2 else 0) + (12 if any(s.residues) else 0)

    def at_start(self, tile: Tile) -> int:
        """Return the registers of a thread before warps exchange some."""
        return ALL_REGISTERS // (tile.threads * tile.min_blocks) // 8 * 8

    def targets(self, tile: Tile) -> int:
        """Return the positions of the result that a worker's thread stores."""
        return -(-tile.rows * self.outputs(tile) // (128 * tile.team))

    def slot_bytes(self, tile: Tile) -> int:
        """Weights of the taps along W, for one tap along D and H and a chunk."""
        return self.taps_w(tile) * tile.k_steps * self.parts * 2 * self.columns(tile) * 16

    def shared_bytes(self, tile: Tile, box: Box, index64: bool) -> int:
        beside, targets, of_position = self.bytes_beside_box(tile)
        indices = box.items * (16 if index64 else 8) + round_up(targets * (24 if index64 else 20), 8)
        return beside + of_position * box.plane + indices

    @of_tile
    def bytes_beside_box(self, tile: Tile) -> tuple[int, int, int]:
        """Return the shared memory beside a box and indices, how many places are stored to, and a position's bytes."""
        teams = tile.workers // tile.team
        landed = teams * tile.x_stages if tile.boxed and self.parts == 2 else 0
        barriers = round_up(8 * (2 * (teams * tile.x_stages + tile.ring) + landed), 128)
        of_position = teams * tile.x_stages * self.parts * tile.k_steps * 2 * 16
        turned, targets = 4 * 8 * tile.tiles_c, 0
        together = 1 if self.stores_alone(tile) else tile.team  # workers
        if self.turns(tile):
            sums, rows = self.sums(tile), ROWS * tile.tiles_m * together
            zero = sums * (rows if sums == 1 else at_residue(rows, 16, 32))
            slices = 1 if tile.tiles_c == 1 else 2
            turned += slices * 8 * 4 * at_residue(zero + 1, 4, 32)
            targets = round_up(rows * self.outputs(tile), 128 * together) * (tile.team // together)
        turned *= tile.workers // together
        before = barriers + (FILL_BYTES if self.shape.plane_step > 1 else 0) + tile.ring * self.slot_bytes(tile)
        return (round_up(before, SWIZZLED) if tile.boxed or tile.swizzled else before) + turned, targets, of_position

    def fits(self, tile: Tile, box: Box, device: Device) -> bool:
        """Whether as many blocks as the tile wants share a multiprocessor; each reserves 1 KB on top of its own.

        With what indices of 64 bits would take, though there are none: estimates were fitted to boxes that leave so
        much room, and those that need it were up to 30% slower than estimated.
        """
        room = (device.shared_bytes + 1024) // tile.min_blocks - 1024
        (d, h, w), (of_d, of_h, of_w) = box.extent, self.shape.stride
        far = max((1 if tile.slides else d) * of_d, h * of_h, w * of_w)
        if box.plane > MAX_POSITIONS or far > MAX_OUTPUTS or self.shared_bytes(tile, box, True) > room:
            return False
        return not tile.boxed or max(spans(self.staged(tile, box.extent), self.steps_in_x)) <= MAX_BOX

    def staged(self, tile: Tile, extent: Ints) -> Ints:
        """Return the extents of a box of such positions with its halo, or of a slice of it."""
        (d, h, w), reach = extent, self.reach(tile)
        return (1 if tile.slides else d + reach[0], h + reach[1], self.width(tile, w))

    def map_of_x(
        self, tile: Tile, box: Box, dtype: str, geometry: Geometry, layout: Layout, steps: Ints, channels: int
    ) -> TensorMap:
        """Return what copies need to know of x, to bring so many channels of positions that are `steps` apart."""
        extents = (geometry.n, geometry.c_in, *geometry.x_extent)
        kind = "tf32" if dtype == "float32" and self.parts == 1 else dtype  # copies round, but not what is split
        return TensorMap.of(kind, extents, layout.x, self.staged(tile, box.extent), steps, channels)

    def items(self, tile: Tile, d: int, h: int, w: int) -> int:
        """Return what stagers count of so many positions."""
        return 0 if tile.boxed else d * h * (w // 2 + 1 if self.shape.pairs else w)

    def plane(self, tile: Tile, positions: int) -> int:
        """Return how many places a plane of so many positions has: neighbouring pieces of one lie in other banks."""
        return round_up(positions, 8) if tile.boxed else at_residue(positions, 8 // min(8, 2 * tile.k_steps) % 8, 8)

    def reaches(self, tile: Tile, box: Box, layout: Layout) -> int:
        """Return how many elements what a box reads or writes of a channel may be away from where the box begins.

        Or two neighbouring channels from each other, if these are further apart.
        """
        s = self.shape
        extent = (1, *box.extent[1:]) if tile.slides else box.extent
        read = spans(tuple(e + reach for e, reach in zip(extent, self.reach(tile), strict=True)), self.steps_in_x)
        written = tuple((e + late) * st for e, late, st in zip(extent, s.late, s.stride, strict=True))
        return max(span(read, layout.x[2:]), span(written, layout.out[2:]), abs(layout.x[1]), abs(layout.out[1]))

    def box_parameters(self, tile: Tile, box: Box, blocks: int) -> Ints:
        """Return the part of ``struct Problem`` that describes a box."""
        _, h, w = box.extent
        reach, stride = self.reach(tile), self.shape.stride
        width, lines = w + reach[2], h * stride[1] if tile.all_phases else h
        # In the order in which the kernel divides: items by rows, rows by slices; then what it stores.
        divisors = (width // 2 + 1 if self.shape.pairs else width, h + reach[1], w * stride[2], lines)
        if not self.turns(tile) or self.stores_alone(tile):
            divisors = (*divisors[:2], width, h + reach[1])
        return (*box.extent, box.plane, *box.patches, blocks, *(magic(divisor) for divisor in divisors))
