"""The sizes and the estimate of ``kernels/correlate_wgmma.cu``.

The kernel reads `x` and writes `out`, like those of transposed convolutions: what the geometry of the adjoint calls its
result and its x. Boxes are those of `cuconvt.plan_wgmma_boxes`.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from math import ceil, gcd, inf, prod
from typing import NamedTuple

from cuconvt import plan_wgmma_sizes as wgmma
from cuconvt.geometry import Geometry
from cuconvt.plan import Device, Ints, Layout, magic, round_up
from cuconvt.plan_boxes import count_boxes
from cuconvt.plan_copies import x_is_vector
from cuconvt.plan_phase_wgmma_work import COMPARED, POSITIONS, SHARED_BYTES_A_CLOCK
from cuconvt.plan_search import of_tile
from cuconvt.plan_wgmma_boxes import SECTOR, WIDE, WorkOnPlanes
from cuconvt.plan_wgmma_sizes import BESIDE_SUMS, MAX_POSITIONS, Box, Shape, can_be_boxed, kinds_of_blocks
from cuconvt.tensor_map import CHANNELS, MAX_BOX, MAX_STEP, spans

# Registers of a worker's and of a stager's thread, by warpgroups of either and blocks a multiprocessor. What is under
# way from memory is often the bound: stagers have what the workers of a tile do not need, and more than in
# plan_wgmma_sizes.
REGISTERS = {
    (1, 1, 2): ((152, 104), (168, 88), (184, 72)),
    (1, 3, 1): ((152, 120), (176, 112), (200, 104), (224, 96)),
    (2, 2, 1): ((152, 104), (168, 88), (184, 72)),
    (2, 3, 1): ((120, 80), (144, 64)),
    (1, 2, 2): ((112, 64),),
    (1, 1, 3): ((96, 64),),
}
MAX_CLASSES = (4, 4, 8)  # along D, H, W: bits of an item, of which boxes have none
# Rates of an H200's multiprocessor, per clock, and more of the estimate, as far as it is another than the forward's:
# fitted to about 800 tiles' times for 33 problems.
L2_BYTES_A_CLOCK = 140
INSTRUCTIONS_A_CLOCK = 0.83
DEEP = 0.49  # of the waits for chunks are left where four of them are staged ahead
FEW_POSITIONS = 410  # that a layer of many channels may have for each multiprocessor


class Rates(NamedTuple):
    """What of the estimate depends on how x is staged."""

    memory: float  # bytes a clock
    overlap: float  # what of the less busy units' time adds to the busiest one's
    box: float  # clocks in which a block waits: for a box, and for a chunk of channels
    chunk: float
    positions: tuple[int, int]  # that a layer of many channels, and another one, may have for each multiprocessor


BY_THREADS = Rates(11.7, 0.35, 870, 570, (FEW_POSITIONS, POSITIONS))
# By bulk tensor copies, without a stride (fitted to 71 tiles' times for 11 problems), and of joined groups.
UNSTRIDED_BOXES = Rates(21, 0.2, 0, 300, (410, 5000))
JOINED_BOXES = UNSTRIDED_BOXES._replace(positions=(100, POSITIONS))


class StridedRates(NamedTuple):
    """The same with a stride: bytes a clock, and clocks; fitted to 1930 tiles' times for 42 problems (12% rms)."""

    copied: float = 168  # bytes of x, and clocks of each row of them
    row: float = 0.9
    weights: float = 72  # bytes, beside them
    memory: float = 24.3  # bytes
    product: float = 15.4  # clocks of a wgmma, and of each of its columns
    column: float = 0.23
    stage: float = 1340  # clocks from asking for a stage to having it, of which all but one are under way
    slot: float = 790  # the same of a slot of weights
    box: float = 412  # clocks
    outputs: float = 5.9  # clocks of 32 results
    norm: float = 2.2
    # Of 3xTF32 alone: clocks of a chain besides its products, and bytes of x that a thread splits in a clock.
    chain: float = 0
    split: float = inf
    positions: tuple[int, int] = (100, POSITIONS)


STRIDED = StridedRates()
# Of 3xTF32, with a stride or without: fitted to 120 tiles' times for 18 problems (12% rms; 16% for 25 others).
SPLIT = StridedRates(product=10.3, stage=630, slot=176, box=1846, norm=1.13, chain=31.9, split=0.355)
STRIDED_LEVEL = 1.1  # of the estimates that are compared with those of other tiles and kernels
COPIED_BYTES_A_CLOCK, COPIED_ROW_CLOCKS = 250, 1.75  # of such copies: a row takes as long, besides its bytes
COPIED_WEIGHTS_A_CLOCK = 107  # bytes beside them
JOINED_AHEAD, JOINED_THREE = 0.9, 0.97  # of joined groups' with more than two stages, and three workers: of 20 problems
TURNS = 0.95  # of the estimated time without a stride, where workers take turns
BATCH_CLOCKS = 1180  # in which a thread loads a batch and stores it
ALONE = {1: 1.15, 3: 1.3}  # by products: times as long as by two workers
# By rank, as in plan_phase_wgmma_work: extents of x, which networks mostly keep to powers of two.
TYPICAL_EXTENTS: dict[int, tuple[Ints, ...]] = {
    1: ((64, 1, 256), (64, 1, 4096)),
    2: ((64, 16, 16), (64, 64, 64), (64, 128, 128)),
    3: ((32, 32, 32), (48, 48, 48), (64, 64, 64), (16, 32, 64)),
}
TYPICAL_EXTENTS_OF_WIDE = {**TYPICAL_EXTENTS, 3: ((8, 8, 8), (16, 16, 16), (32, 32, 32), (48, 48, 48))}


class NormOfTile(NamedTuple):
    """What bounds a box whatever is in it: powers of clocks, clocks, and bytes."""

    multiplied: float  # to the power of the norm
    weights: float  # clocks of their copies
    waits_for_weights: float  # to the power of the norm
    stages: int
    place_bytes: int  # of x, of a place of the plane, in all stages
    at_once: int  # boxes of a multiprocessor
    tiles_c: int
    channels: int  # of the result, of a tile


class Way(NamedTuple):
    """How a problem becomes one of boxes: the fields are those of a tile and of a shape."""

    fold: int = 1
    joined: int = 1
    apart: Ints = (0, 0, 0)


PLAIN = Way()


@dataclass(frozen=True)
class Tile(wgmma.Tile):
    """The compile-time shape of a block; the fields are the macros of the kernel. K steps count all classes."""

    classes: int = 1  # along W that are staged at a time
    slot_classes: int = 1  # of these, how many have their weights in one slot
    fold: int = 1  # taps along W that are channels of x
    joined: int = 1  # groups that are staged as one
    apart: Ints = (0, 0, 0)  # whether each tap along an axis has boxes of its own

    @property
    def class_steps(self) -> int:
        return self.k_steps // self.classes

    @property
    def way(self) -> Way:
        return Way(self.fold, self.joined, self.apart)


class Work(WorkOnPlanes):
    """The sizes that follow from a problem and a tile; the kernel computes the same ones."""

    extents = extents_of_rows = TYPICAL_EXTENTS
    extents_of_wide = extents_of_wide_rows = extents_of_wide_boxed = TYPICAL_EXTENTS_OF_WIDE

    def __init__(self, geometry: Geometry, layout: Layout, dtype: str, precision: str | None, way: Way = PLAIN):
        itemsize = 4 if dtype == "float32" else 2
        self.shape = Shape.of(
            geometry,
            dtype,
            precision,
            x_channels_last=layout.x_channels_last,
            out_channels_last=layout.out_channels_last,
            pairs=False,
            late=(0, 0, 0),
            boxes=(precision != "tf32x3" or way.fold == way.joined == 1)
            and can_be_boxed(geometry, layout, itemsize, 1 if way.joined > 1 else CHANNELS),
            fold=way.fold,
            joined=way.joined,
            apart=way.apart,
        )
        self._derive()

    def _derive(self) -> None:
        super()._derive()
        self.compared = COMPARED
        self.unstrided = max(self.shape.stride) == self.shape.fold == 1
        s = self.shape
        self.taps = tuple(-(-k // step) for k, step in zip(s.kernel, self.steps, strict=True))  # of a class, at most
        of_classes = (-(-(s.kernel[2] - first) // self.steps[2]) for first in range(self.live[2]))
        self.taps_before = tuple(itertools.accumulate(of_classes, initial=0))  # along W, of so many classes
        hops = (d // gcd(st, d) for st, d in zip(s.stride, s.dilation, strict=True))
        self.halo = tuple((taps - 1) * hop for taps, hop in zip(self.taps, hops, strict=True))

    def too_many_classes(self) -> str | None:
        """Return why taps with so many remainders modulo the stride are too many, if they are."""
        live = tuple(self.live)
        most = (MAX_STEP,) * 3 if self.can_be_boxed else MAX_CLASSES
        if any(count > of_axis for count, of_axis in zip(live, most, strict=True)):
            return f"tells apart at most {most} remainders of taps modulo the stride along D, H, W, got {live}"
        return None

    @property
    def can_be_boxed(self) -> bool:
        return self.shape.boxes and max(self.shape.stride) <= MAX_STEP

    def can_be_apart(self) -> list[Ints]:
        """Return the axes along which taps may have boxes of their own, 1 for each: dilated ones, all or some.

        Those of taps next to each other would have most in common.
        """
        d, h, w = (int(reach >= taps > 1) for reach, taps in zip(self.halo, self.taps, strict=True))
        return [apart for apart in dict.fromkeys(((d, h, w), (d, h, 0), (0, 0, w))) if any(apart)]

    def reach(self, tile: wgmma.Tile) -> Ints:
        return self.halo

    def sums(self, tile: wgmma.Tile) -> int:
        """Return the sums of a position and channel that a block holds."""
        return self.taps[2] if tile.merge_w else 1

    def outputs_w(self) -> int:
        return 1

    def outputs(self, tile: wgmma.Tile) -> int:
        return 1

    def columns(self, tile: wgmma.Tile) -> int:
        return 8 * tile.tiles_c * self.sums(tile) // self.shape.joined

    def channels(self, tile: Tile) -> int:
        """Return the channels of x that are staged at a time."""
        return 2 * tile.class_steps * (16 // self.shape.itemsize)

    def products(self, tile: Tile, classes: int) -> int:
        """Return the wgmmas of the first so many classes, for a row of taps and 64 rows of A."""
        return (classes if tile.merge_w else self.taps_before[classes]) * tile.class_steps

    @of_tile
    def slot_bytes(self, tile: wgmma.Tile) -> int:
        assert isinstance(tile, Tile)
        return self.products(tile, tile.slot_classes) * self.parts * 2 * self.columns(tile) * 16

    @of_tile
    def slots(self, tile: Tile) -> int:
        """Return the slots of weights that a box needs."""
        chunks = -(-self.shape.c_in // self.channels(tile))
        return self.shape.kernel[0] * self.shape.kernel[1] * chunks * (self.live[2] // tile.slot_classes)

    @of_tile
    def stages(self, tile: Tile) -> int:
        """Return how often a box is staged: for the classes and chunks of channels."""
        chunks = -(-self.shape.c_in // self.channels(tile))
        return self.live[0] * self.live[1] * (self.live[2] // tile.classes) * chunks

    def accumulators(self, tile: wgmma.Tile) -> int:
        """Registers of a worker that hold sums."""
        chains = self.columns(tile) if self.shape.products == 3 else 0
        return self.columns(tile) * self.shape.joined // 2 * tile.tiles_m + chains

    def other_registers(self, tile: wgmma.Tile) -> int:
        """Estimate how many registers a worker needs besides."""
        assert isinstance(tile, Tile)
        long = max(0, tile.tiles_m * self.products(tile, tile.slot_classes) - 48)  # wgmmas of a slot beyond some
        count = 48 if self.at_start(tile) >= 128 else 54
        count += long if self.shape.out_channels_last else long // 4
        if self.shape.products == 3:
            # Slots are unrolled.
            count += (22 if self.shape.out_channels_last else 14) + 4 * (tile.classes // tile.slot_classes - 1)
        if self.shape.out_channels_last:
            count += 7 + 6 * tile.tiles_m
        return count

    @of_tile
    def registers(self, tile: wgmma.Tile) -> tuple[int, int] | None:
        """Return the registers of a worker, which are enough, and of a stager."""
        if self.columns(tile) // 2 + BESIDE_SUMS > self.at_start(tile):
            return None
        need = self.accumulators(tile) + self.other_registers(tile)
        of_kind = tile.workers, tile.stagers, tile.min_blocks
        shares = (kinds_of_blocks(True, self.parts)[of_kind],) if tile.boxed else REGISTERS[of_kind]
        return next((share for share in shares if share[0] >= need), None)

    def has_runs(self, tile: Tile) -> bool:
        """Whether the kernel can read runs of as many elements as there are classes along W."""
        s, count = self.shape, tile.classes
        whole = count > 1 and count == s.stride[2] and s.dilation[2] == 1 and count & (count - 1) == 0
        return whole and not s.x_channels_last and count * s.itemsize <= 16

    def reads_vectors(self, tile: Tile, geometry: Geometry, layout: Layout) -> bool:
        """Whether x may be read by aligned runs of a row or, channels-last, 16 bytes of channels at a time."""
        if layout.x_channels_last:
            return x_is_vector(geometry, layout, self.shape.itemsize)
        unit = tile.classes
        whole = geometry.x_extent[2] % unit == 0 and not any(stride % unit for stride in layout.x[:4])
        return self.has_runs(tile) and whole and layout.x_aligned and layout.x[4] == 1

    def fits(self, tile: wgmma.Tile, box: Box, device: Device) -> bool:
        """Whether as many blocks as the tile wants share a multiprocessor; each reserves 1 KB on top of its own."""
        room = (device.shared_bytes + 1024) // tile.min_blocks - 1024
        if box.plane > MAX_POSITIONS or self.shared_bytes(tile, box, True) > room:
            return False
        return not tile.boxed or max(spans(self.staged(tile, box.extent), self.shape.stride)) <= MAX_BOX

    def staged(self, tile: wgmma.Tile, extent: Ints) -> Ints:
        """Return the extents of a box of such positions with its halo."""
        return tuple(e + r for e, r in zip(extent, self.halo, strict=True))

    def items(self, tile: wgmma.Tile, d: int, h: int, w: int) -> int:
        """As for a transposed convolution, with an item more a row: a run may begin before the first position."""
        return 0 if tile.boxed else d * h * (w + 1)

    def parameters(self, tile: Tile, box: Box, blocks: int, shift: int) -> Ints:
        """Return the part of ``struct Problem`` that describes a box; `shift` is the padding if x is read by runs."""
        _, h, w = box.extent
        width, lines = w + self.halo[2], h + self.halo[1]
        # In the order in which the kernel divides: items by rows, rows by slices; then what it stores.
        divisors = (width + (shift % self.shape.stride[2] > 0), lines, w, h)
        if self.shape.out_channels_last or self.stores_alone(tile):
            divisors = (*divisors[:2], width, lines)
        return (*box.extent, box.plane, *box.patches, blocks, *(magic(divisor) for divisor in divisors))

    def cost(self, tile: wgmma.Tile, box: Box) -> float:
        """Return the clocks of a box of positions, with all channels of a group."""
        return self.clocks(tile, box) * -(-self.shape.c_out // (8 * tile.tiles_c))

    def batches(self, tile: Tile, box: Box) -> float:
        """Return how often a thread waits for what it loads, to stage a box once."""
        s = self.shape
        if s.x_channels_last:  # copies of so many stages wait together
            return 1 / (tile.x_stages - 1)
        piece = 16 // s.itemsize
        runs = self.has_runs(tile)
        if runs:
            classes, words = tile.classes, piece * -(-tile.classes * s.itemsize // 4)
        else:
            classes = max(i for i in range(1, tile.classes + 1) if tile.classes % i == 0 and i * piece <= 16)
            words = piece * classes
        registers = self.registers(tile)
        assert registers is not None
        units = box.items * 2 * tile.k_steps // classes
        batch = max(1, (registers[1] // 2 - (4 if runs else 12)) // max(words, 8))
        return ceil(units / (batch * (128 * tile.stagers - 32)))

    def clocks(self, tile: wgmma.Tile, box: Box) -> float:
        """Estimate a multiprocessor's clocks for one box."""
        assert isinstance(tile, Tile)
        s, columns = self.shape, self.columns(tile)
        if tile.boxed and s.joined == 1 and (s.products == 3 or not self.unstrided):
            return STRIDED_LEVEL * self.clocks_of_norm(tile, box) * self._last_round(tile, STRIDED.positions)
        rates = (JOINED_BOXES if s.joined > 1 else UNSTRIDED_BOXES) if tile.boxed else BY_THREADS
        rows = s.kernel[0] * s.kernel[1] * -(-s.c_in // self.channels(tile))  # of taps along W
        products = rows * self.products(tile, self.live[2]) * tile.tiles_m * tile.team * s.products
        if tile.merge_w:  # some classes have a tap less
            columns = round(columns * s.kernel[2] / (self.live[2] * self.taps[2]))
        stages = self.stages(tile)
        staged = stages * box.plane * tile.k_steps * 32  # bytes of x, as it comes
        weights = 0 if tile.resident else self.slots(tile) * self.slot_bytes(tile)
        positions = prod(box.extent)
        outputs = positions * min(8 * tile.tiles_c, s.c_out)
        by_elements = not s.x_channels_last and not self.has_runs(tile)
        apart = s.stride[2] / tile.classes if by_elements else 1  # of the sectors that are read, one in so many is used
        moved = 0 if tile.boxed else staged  # by threads
        loads = moved / 128 * max(apart, 4 / s.itemsize / 2 * (1.5 if by_elements else 1))
        stores = outputs / 32 * (1 + 32 / box.extent[2])
        turned = 0 if s.out_channels_last else (tile.rows * 8 * tile.tiles_c + outputs) / 32 * self.sums(tile)
        if s.out_channels_last:
            stores = outputs / 32 * (1 if s.itemsize == 4 else 0.75)
        edges = 0.0  # of rows, whole sectors are read
        if not s.x_channels_last:
            edges = SECTOR / (s.itemsize * tile.classes * (box.extent[2] + self.halo[2]))
        shared = products * (16 + columns / 4) + (staged * self.parts + weights) / SHARED_BYTES_A_CLOCK
        shared += loads * (1 + 2 * edges) + stores + turned
        tensor = products * columns / 2
        if tile.workers * tile.min_blocks == 1:  # nobody multiplies while a worker adds up, waits or stores
            tensor *= ALONE[s.products]
        l2 = (staged * apart * (1 + edges) + weights) / L2_BYTES_A_CLOCK
        read = positions * prod(self.live) * s.c_in * s.itemsize * (s.stride[2] / self.live[2] if by_elements else 1)
        read *= (1 + edges) / -(-s.c_out // (8 * tile.tiles_c))
        memory = (read + outputs * s.itemsize) / rates.memory
        issue = (moved / s.itemsize * (9 if by_elements else 4) + outputs * 12) / 32 / INSTRUCTIONS_A_CLOCK
        # One group of threads stages the boxes of all workers of a block, one batch after the other.
        staging = stages * self.batches(tile, box) * BATCH_CLOCKS / tile.min_blocks
        if tile.boxed:
            l2 = staged * (1 / COPIED_BYTES_A_CLOCK + COPIED_ROW_CLOCKS / (32 * tile.class_steps))
            l2 += weights / COPIED_WEIGHTS_A_CLOCK
            staging = 0
        busiest = max(shared, tensor, l2, memory, issue, staging)
        others = shared + tensor + l2 + memory + issue + staging - busiest
        waits = stages * rates.chunk * (1 if tile.x_stages == 2 else DEEP) + rates.box
        clocks = busiest + rates.overlap * others + waits / self._at_once(tile)
        if tile.boxed and tile.take_turns and self.unstrided:
            clocks *= TURNS
        if s.joined > 1:
            clocks *= (JOINED_AHEAD if tile.x_stages > 2 else 1) * (JOINED_THREE if tile.workers == 3 else 1)
        return clocks * self._last_round(tile, rates.positions)

    def clocks_of_size(self, tile: wgmma.Tile, times: int, extents: Ints, device: Device) -> float | None:
        """Estimate the clocks of a launch that takes so many positions so many times, or None where no box fits."""
        times *= -(-self.shape.c_out // (8 * tile.tiles_c))
        box = self.box_of_launch(tile, extents, times, device, extents[2])
        if box is None:
            return None
        of_cuts = self.clocks_of_cuts(tile, box, extents[2], extents[2])
        return self._clocks_of_boxes(tile, box, times * count_boxes(extents, box.extent), device, of_cuts)

    def least_of_size(self, tile: wgmma.Tile, times: int, extents: Ints, device: Device) -> float:
        """Return a lower bound of the same: with boxes without a halo, of all rows of the tile.

        As many as the device holds at a time: more of them take longer, each with fewer positions.
        """
        times *= -(-self.shape.c_out // (8 * tile.tiles_c))
        positions, held = prod(extents), device.multiprocessors * self._at_once(tile)
        boxes = round_up(times * -(-positions // tile.rows), held)
        of_box = times * positions // boxes
        box = Box((1, 1, of_box), (0, 0), of_box * self.unit, 0)
        return self._clocks_of_boxes(tile, box, boxes, device)

    def _clocks_of_boxes(self, tile: wgmma.Tile, box: Box, boxes: int, device: Device, of_cuts: float = 0.0) -> float:
        at_once = self._at_once(tile)
        rounds = -(-boxes // (device.multiprocessors * at_once))
        return rounds * at_once * (self.clocks_of_norm(tile, box) + of_cuts)

    def _at_once(self, tile: wgmma.Tile) -> int:
        """Return how many boxes a multiprocessor has at a time."""
        return tile.min_blocks * tile.workers // tile.team

    @of_tile
    def norm_of_tile(self, tile: Tile) -> NormOfTile:
        """Return what a norm has of a tile, whatever its box."""
        s, r = self.shape, SPLIT if self.parts == 2 else STRIDED
        rows = s.kernel[0] * s.kernel[1] * -(-s.c_in // self.channels(tile))  # of taps along W
        products = rows * self.products(tile, self.live[2]) * tile.tiles_m * tile.team * s.products
        multiplied = products * (r.product + r.column * self.columns(tile))
        multiplied += self.slots(tile) * tile.tiles_m * tile.team * r.chain
        copied = waits = 0.0
        if not tile.resident:
            copied = self.slots(tile) * self.slot_bytes(tile) / r.weights
            waits = self.slots(tile) * r.slot / (tile.ring - 1) / tile.min_blocks
        stages = self.stages(tile)
        return NormOfTile(
            multiplied**r.norm,
            copied,
            waits**r.norm,
            stages,
            place_bytes=stages * tile.k_steps * 32,
            at_once=self._at_once(tile),
            tiles_c=-(-s.c_out // (8 * tile.tiles_c)),
            channels=min(8 * tile.tiles_c, s.c_out),
        )

    def clocks_of_norm(self, tile: wgmma.Tile, box: Box) -> float:
        """Estimate a multiprocessor's clocks for one box that copies bring, with a stride or to be split.

        What bounds them adds to each other as in a norm.
        """
        assert isinstance(tile, Tile)
        s, r, of_tile = self.shape, SPLIT if self.parts == 2 else STRIDED, self.norm_of_tile(tile)
        at_once = of_tile.at_once
        staged = of_tile.place_bytes * box.plane  # bytes of x, as it comes
        split = staged / (r.split * (128 * tile.stagers - 64))  # clocks of a block's threads
        positions = prod(box.extent)
        outputs = positions * of_tile.channels
        copies = staged / r.copied + staged / (32 * tile.class_steps) * r.row + of_tile.weights
        read = positions * prod(self.live) * s.c_in * s.itemsize / of_tile.tiles_c
        powers = (
            of_tile.multiplied,
            copies**r.norm,
            (split / tile.min_blocks) ** r.norm,
            ((read + outputs * s.itemsize) / r.memory) ** r.norm,
            ((of_tile.stages * r.stage + split) / (tile.x_stages - 1) / at_once) ** r.norm,
            of_tile.waits_for_weights,
        )
        norm: float = sum(powers) ** (1 / r.norm)
        return norm + (r.box + r.outputs * outputs / 32) / at_once

    def _last_round(self, tile: Tile, positions: tuple[int, int]) -> float:
        """Estimate how much longer boxes take, as in the last of their rounds half of the multiprocessors are idle."""
        s, at_once = self.shape, self._at_once(tile)
        share = positions[0 if max(s.c_in, s.c_out) >= WIDE else 1]
        return 1 + 0.5 * tile.rows * 8 * tile.tiles_c * at_once / (share * s.c_out)
