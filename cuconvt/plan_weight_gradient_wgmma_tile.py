"""The tiles of ``kernels/weight_gradient_wgmma.cu``, and what their choice depends on."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from math import gcd, lcm

from cuconvt.geometry import Geometry
from cuconvt.plan import Device, Ints, Layout, round_up
from cuconvt.plan_turn import Array, arrays_of
from cuconvt.plan_weight_gradient import SUM_THREADS, WIDE_BYTES
from cuconvt.plan_weight_gradient_boxes import BLOCKS_OF_SUMS, PIECE_BYTES
from cuconvt.tensor_map import MAX_BOX, MAX_STRIDE

ITEMSIZES = {"float16": 2, "bfloat16": 2, "float32": 4}
STAGES = 4
FEWER_STAGES = 3  # where copies bring boxes, which may be larger then
ROWS_OF_X = 8, 4, 2  # runs of a row of x that copies may bring at a time: 128, 64 or 32 bytes
STAGER_REGISTERS = 40, 56  # with indices of 32 and of 64 bits
# Of the second pass: all, and those of many parts.
MAX_STATIC_BYTES, BYTES_OF_SLICES = 48 * 1024, SUM_THREADS * (WIDE_BYTES + 4)
MOST_OF_ROW = 1.25  # positions that copies bring for one of a row of x
MOST_OF_PLANE = 12  # runs of whole rows and whole copies: where boxes have to have more, they are too large


@dataclass(frozen=True)
class Tile:
    """The compile-time shape of a block; the fields are the macros of the kernel."""

    workers: int
    channels_out: int  # of y, of a block
    taps_d: int
    taps_h: int
    taps_w: int  # that have sums of their own
    tiles_in: int  # times 8 channels of x
    min_blocks: int
    groups_w: int = 1  # times as many taps along W, as rows of the product
    stages: int = STAGES
    x_runs: int = 2  # of a row of x that copies of boxes bring at a time

    @property
    def rows(self) -> int:
        """Rows of the product that are of use."""
        return self.channels_out * self.groups_w * self.taps_d * self.taps_h

    @functools.cached_property
    def taps(self) -> tuple[int, int, int]:
        """Taps of a block along D, H, W."""
        return self.taps_d, self.taps_h, self.taps_w * self.groups_w

    @functools.cached_property
    def tiles_m(self) -> int:
        """Rows of a worker, in units of 64."""
        return -(-self.rows // (64 * self.workers))

    @property
    def channels_in(self) -> int:
        return 8 * self.tiles_in

    @property
    def sums(self) -> int:
        """Registers of a worker's thread that hold sums."""
        return self.tiles_m * self.taps_w * 4 * self.tiles_in

    @property
    def values(self) -> int:
        """Weights of a block, and what its tile reaches beyond them."""
        return 128 * self.workers * self.sums

    def sums_a_block(self, tiles: int, device: Device) -> int:
        """Return the weights of a block of the second pass, for so many tiles of few parts.

        It has eight channels of x, and all rows, as neighbours in memory may be among others, or 64.
        """
        every, of_64_rows = self.tiles_m * self.workers, 64 * self.taps_w * 8
        are_enough = tiles * self.tiles_in >= BLOCKS_OF_SUMS * device.multiprocessors
        # As the kernel decides, whose functions have memory side by side.
        room = MAX_STATIC_BYTES - BYTES_OF_SLICES - self._bytes_of_sums(1)
        return of_64_rows * (every if are_enough and self._bytes_of_sums(every) <= room else 1)

    def _bytes_of_sums(self, tiles: int) -> int:
        """Return the shared memory of a block of the second pass for so many tiles of 64 rows, and places of rows."""
        return 8 * 4 * (64 * tiles * self.taps_w + 4) + 8 * 64 * tiles

    @property
    def at_start(self) -> int:
        """Registers of a thread before warps exchange some."""
        return min(65536 // (128 * (self.workers + 1) * self.min_blocks), 248) // 8 * 8

    def worker_registers(self, index64: bool) -> int:
        """Registers of a worker's thread: the block has no more than it started with, and stagers give up theirs."""
        return min(240, (self.at_start * (self.workers + 1) - STAGER_REGISTERS[index64]) // self.workers // 8 * 8)


@dataclass(frozen=True)
class Shape:
    """What a tile's choice depends on: everything but N and extents."""

    rank: int
    itemsize: int
    kernel: Ints
    stride: Ints
    dilation: Ints
    early: int  # elements before the first one that is used, in a staged row of y
    groups: int
    c_in: int  # per group
    c_out: int
    x_bytes: int  # that rows of x may be read at a time
    y_bytes: int  # likewise, as far as their alignment goes
    x_runs: Ints  # of rows of x that copies of boxes may bring at a time; none where they cannot read both
    flat: bool  # whether these are of planes, each one row
    index64: bool

    @property
    def boxed(self) -> bool:
        """Whether copies of boxes can read both, as far as that goes, and bring little more than rows of x."""
        return bool(self.x_runs)

    @classmethod
    def of(cls, geometry: Geometry, layout: Layout, itemsize: int, index64: bool) -> Shape:
        g = geometry
        x_bytes = _row_bytes(layout.x, layout.x_aligned, g.x_extent[2], itemsize)
        y_bytes = _row_bytes(layout.out, layout.out_aligned, g.out_extent[2], itemsize)
        x_runs: Ints = ()
        flat = False
        has_all = gcd(g.stride[2], g.dilation[2] if g.kernel[2] > 1 else 0) == 1  # that are staged, of rows of y
        if x_bytes == y_bytes == PIECE_BYTES and has_all:
            most = most_positions(g.kernel[2], g.stride[2], g.dilation[2], itemsize)
            x_runs, flat = _runs_of_copies(arrays_of(g, layout), itemsize, most)
        return cls(
            rank=g.rank,
            itemsize=itemsize,
            kernel=g.kernel,
            stride=g.stride,
            dilation=g.dilation,
            early=-g.pad_before[2] % (PIECE_BYTES // itemsize),
            groups=g.groups,
            c_in=g.c_in_per_group,
            c_out=g.c_out_per_group,
            x_bytes=x_bytes,
            y_bytes=y_bytes,
            x_runs=x_runs,
            flat=flat,
            index64=index64,
        )


def most_positions(kernel: int, stride: int, dilation: int, itemsize: int) -> int:
    """Return for how many positions along W copies of boxes can bring what taps reach of y."""
    piece = PIECE_BYTES // itemsize
    reached = (kernel - 1) * dilation + 4 * piece  # beyond them, before the first one, and for the banks
    return (MAX_BOX - reached) // stride // piece * piece


def _runs_of_copies(arrays: tuple[Array, Array], itemsize: int, most: int) -> tuple[Ints, bool]:
    """Return how many runs bulk tensor copies may bring at a time of a row of x, and whether a plane is one row.

    No more than `most` positions, neither of such a row nor of one of a plane. None where they cannot read both x and
    y, of whole 16 bytes, or would bring much more than rows of x.
    """
    for array in arrays:
        distances = [itemsize * stride for extent, stride in zip(*array, strict=True) if extent > 1]
        if not all(0 < distance < MAX_STRIDE for distance in distances):
            return (), False
    (_, _, _, height, width), (_, _, _, of_row, _) = arrays[0]
    run = PIECE_BYTES // itemsize
    of_rows = [runs for runs in ROWS_OF_X if runs * run <= most and round_up(width, runs * run) <= MOST_OF_ROW * width]
    is_dense = height > 1 and of_row == width <= most and width % run == 0
    if max(of_rows, default=0) <= ROWS_OF_X[-1] and is_dense and lcm(width // run, ROWS_OF_X[-2]) <= MOST_OF_PLANE:
        return ROWS_OF_X[:-1], True
    return tuple(of_rows[:2]), False


def _row_bytes(strides: Ints, aligned: bool, extent: int, itemsize: int) -> int:
    """Return how many bytes of a row may be read at a time; 1 where elements of a row are apart in memory."""
    if strides[4] != 1:
        return 1
    distances = [itemsize * number for number in (*strides[:4], extent)]
    return next((n for n in (16, 4) if aligned and not any(distance % n for distance in distances)), itemsize)
