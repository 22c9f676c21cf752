"""The rows of y that a thread reads from global memory, as in ``kernels/rows.cuh``: their sizes, and what they cost."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import gcd, hypot

from cuconvt.geometry import Geometry
from cuconvt.plan_correlate import staged_axis

MOST_COLUMNS = 32  # of a thread
POSITIONS = 1, 2, 4, 8  # of a thread along W
LANES = 32  # of a warp

# What a step of the slide along D costs, fitted to 4600 times of gradients of few channels on an H100: as how many
# instructions count a product, an instruction for rows (that a thread reads alone, or lanes share), four weights and
# another one, and as how many clocks those of the L1 cache, which takes longer where lanes lie along the channels.
# With BUSY blocks half of a multiprocessor's clocks are used.
PRODUCTS, ROWS, SHARED_ROWS, WEIGHTS, WEIGHTS_ALONG_C, OTHERS = 0.8, 0.85, 2.3, 7, 2.4, 0.85
CACHED, SHARED_CACHED, CACHED_ALONG_C = 0.75, 0.6, 5
BUSY = 4
LATENCY = 130  # clocks that a warp waits for rows
INSTRUCTIONS = 128  # of as many threads that a multiprocessor advances a clock
BYTES_A_CLOCK = 14  # to and from memory
WAVEFRONT_BYTES = 128  # that a multiprocessor's L1 cache hands out a clock


@dataclass(frozen=True)
class Row:
    """What a thread reads of one row of y.

    Attributes
    ----------
    taps, stride, dilation, padding : int
        Of the kernel along W.
    positions : int
        Neighbouring positions of a thread.
    shared : bool
        Whether neighbouring lanes share columns.
    itemsize : int
    """

    taps: int
    stride: int
    dilation: int
    padding: int
    positions: int
    shared: bool
    itemsize: int

    @classmethod
    def of(cls, geometry: Geometry, positions: int, shared: bool, itemsize: int) -> Row:
        g = geometry
        return cls(g.kernel[2], g.stride[2], g.dilation[2], g.pad_before[2], positions, shared, itemsize)

    @cached_property
    def columns(self) -> tuple[int, int]:
        """How many columns the taps read, and from how many on they read none."""
        step, hop, _ = staged_axis(self.taps, self.stride, self.dilation, 1)
        found = {t * step + tap * hop for t in range(self.positions) for tap in range(self.taps)}
        return len(found), max(found) + 1

    @property
    def own(self) -> int:
        """Columns that no other lane loads, where lanes share."""
        return self.positions * self.stride

    @property
    def piece(self) -> int:
        """Columns of its own that a lane loads at a time, where rows are aligned for it."""
        count = self.own * self.itemsize
        return max(1, min(16, count & -count) // self.itemsize)

    @property
    def early(self) -> int:
        """The macro EARLY."""
        return self.padding % self.piece if self.shared else -1

    @property
    def later(self) -> int:
        """Columns behind its own that a lane needs."""
        return max(0, self.columns[1] - self.early - self.own)

    @property
    def is_possible(self) -> bool:
        if not self.shared:
            return self.columns[1] <= MOST_COLUMNS
        gap = gcd(self.stride, self.dilation) if self.taps > 1 else self.stride
        return (
            gap == 1
            and self.own * self.itemsize % 4 == 0  # whole words
            and self.later <= self.own  # the next lane has them
            and self.early + self.own + self.later <= MOST_COLUMNS
        )

    @property
    def words(self) -> int:
        """Registers of a fetched row."""
        if not self.shared:
            return self.columns[0] * max(1, self.itemsize // 4)
        return (self.own + self._exchanged) * self.itemsize // 4

    @property
    def instructions(self) -> float:
        """Instructions of a thread to fetch a row, and to widen it."""
        widening = self.columns[0] * (self.itemsize == 2)
        if not self.shared:
            return self.columns[0] * 2.5 + widening + 4
        words = max(1, self.itemsize // 4)  # a lane sends 4 bytes at a time
        loads = self.own / self.piece + self.early + self.later
        return 1.5 * loads + 2 * words * self._exchanged * min(1, self.itemsize / 4) + self.words + widening + 4

    def l1_clocks(self, apart: int) -> float:
        """Clocks that the L1 cache takes for a row of a warp whose lanes read elements so far apart."""
        if not self.shared:
            return self.columns[0] * max(1.0, LANES * min(WAVEFRONT_BYTES, apart * self.itemsize) / WAVEFRONT_BYTES)
        exchanges = self._exchanged * max(self.itemsize, 4) / 4 if self.itemsize > 2 else self._exchanged / 2
        return LANES * self.own * self.itemsize / WAVEFRONT_BYTES + exchanges + self.early + self.later

    @property
    def _exchanged(self) -> int:
        """Columns of the neighbours, in whole words."""
        elements = max(1, 4 // self.itemsize)
        return elements * (-(-self.early // elements) + -(-self.later // elements))


@dataclass(frozen=True)
class Step:
    """What a thread does in a step of its slide along D.

    Products, rows of y and weights that it reads, instructions around them, and how often it waits for rows.
    """

    products: int
    rows: int
    weights: float
    others: int
    waits: int

    def clocks(self, row: Row, blocks: int, along_c: bool, has_stride: bool) -> float:
        """Estimate the clocks of a multiprocessor that holds so many blocks.

        The lanes of a warp lie along W or along the channels; columns may be apart in memory by what no compiler knows.
        """
        reads = self.rows * (row.instructions + 2 * has_stride * row.columns[0])
        instructions = PRODUCTS * self.products + OTHERS * self.others
        instructions += (WEIGHTS_ALONG_C if along_c else WEIGHTS) * self.weights
        instructions += (SHARED_ROWS if row.shared else ROWS) * reads
        issue = instructions * (1 + BUSY / blocks) / INSTRUCTIONS
        apart = 1 if along_c else row.positions * row.stride  # elements
        cached = CACHED_ALONG_C if along_c else SHARED_CACHED if row.shared else CACHED
        cached *= (self.rows * row.l1_clocks(apart) + self.weights) / LANES
        return hypot(issue, cached, (issue + LATENCY * self.waits / INSTRUCTIONS) / blocks)


def spent_on_window(row: Row, rows: int) -> int:
    """Estimate the registers for rows of a plane: their words, and what is worked out for many columns in advance."""
    words = rows * row.words
    return words + max(0, words - 48) + 3 * max(0, row.columns[1] - 10)


def spent_ahead(row: Row, rows: int) -> int:
    """Estimate the registers that fetching ahead costs beyond what it fetches: columns are widened ahead as well."""
    columns = (rows - 1) * row.columns[0] * max(1, row.itemsize // 4)
    return 16 + (columns if row.shared and row.itemsize == 2 else columns // 2)
