"""What a run of the benchmark leaves: plain dataclasses, and their JSON."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from cuconvt.bench.cases import KERNELBENCH_3D

SCHEMA = 1


@dataclass(frozen=True)
class Times:
    """Milliseconds of one contestant: the middle of its repeats and where the middle half of them lies."""

    median: float
    low: float
    high: float
    repeats: int

    @classmethod
    def of(cls, milliseconds: Sequence[float]) -> Times:
        if len(milliseconds) == 1:
            return cls(milliseconds[0], milliseconds[0], milliseconds[0], 1)
        low, median, high = statistics.quantiles(milliseconds, n=4, method="inclusive")
        return cls(median, low, high, len(milliseconds))


@dataclass(frozen=True)
class Ceilings:
    """What the GPU reached in the same run.

    Attributes
    ----------
    copy : float
        Device-to-device copy, bytes read and written a second.
    matmul : dict
        Flops a second of a large matrix product, by kind.
    """

    copy: float
    matmul: dict[str, float]

    def floor_ms(self, flops: int, moved: int, ceiling: str, products: int) -> float:
        """Return the time below which the GPU cannot come, in milliseconds."""
        return 1e3 * max(moved / self.copy, products * flops / self.matmul[ceiling])

    def bound(self, flops: int, moved: int, ceiling: str, products: int) -> str:
        """Return which of the two makes the floor: "memory" or "arithmetic"."""
        return "memory" if moved / self.copy >= products * flops / self.matmul[ceiling] else "arithmetic"


@dataclass(frozen=True)
class Cell:
    """One operation of a case in one precision and one layout; what was not measured is None.

    Attributes
    ----------
    case, precision, layout : str
    flops, bytes : int
    floor_ms : float
    operation : str
        "forward", "grad_input" or "grad_weight".
    bound : str
        What makes the floor: "memory" or "arithmetic"; empty in records of older versions.
    status : str
        "ok"; "wrong", a result too far from float64, which is not timed; or "failed", a call that raised.
    problem : str
        Why the status is not "ok".
    kernel : str
        The kernel that the plan chose.
    error, scaled_error : float
        Largest error against float64: absolute, and beyond an element's own rounding to its dtype, relative to the sum
        of the magnitudes of its terms, for gradients to the root of the sum of their squares. Older records have the
        latter with the rounding.
    time : Times
    extra_bytes : int
        Peak of memory during a call beyond its result.
    host_us : float
        Microseconds of the calling thread for one call; for small cases only.
    torch_error, torch_extra_bytes, torch_host_us
        The same of PyTorch, in the layout that is its faster one.
    torch_times : dict
        Times of PyTorch by layout.
    torch_problem : str
        Why PyTorch has no time.
    """

    case: str
    precision: str
    layout: str
    flops: int
    bytes: int
    floor_ms: float
    operation: str = "forward"
    bound: str = ""
    status: str = "ok"
    problem: str = ""
    kernel: str = ""
    error: float | None = None
    scaled_error: float | None = None
    time: Times | None = None
    extra_bytes: int | None = None
    host_us: float | None = None
    torch_error: float | None = None
    torch_times: dict[str, Times] = field(default_factory=dict)
    torch_extra_bytes: int | None = None
    torch_host_us: float | None = None
    torch_problem: str = ""

    @property
    def label(self) -> str:
        """The case, and for a gradient which one."""
        return self.case if self.operation == "forward" else f"{self.case} {self.operation}"

    @property
    def torch_best(self) -> Times | None:
        """PyTorch's time in the better of both layouts, whichever ours is."""
        return min(self.torch_times.values(), key=lambda times: times.median, default=None)

    @property
    def over_floor(self) -> float | None:
        return self.time.median / self.floor_ms if self.time else None

    @property
    def ratio(self) -> float | None:
        """PyTorch's best time over ours."""
        best = self.torch_best
        return best.median / self.time.median if best and self.time else None

    @property
    def ratio_band(self) -> tuple[float, float] | None:
        """The ratio at the unfavourable and the favourable quartiles of both."""
        best = self.torch_best
        return (best.low / self.time.high, best.high / self.time.low) if best and self.time else None

    @property
    def error_ratio(self) -> float | None:
        """Our largest error over PyTorch's in the same precision."""
        if self.error is None or not self.torch_error:
            return None
        return self.error / self.torch_error


@dataclass
class Result:
    """A run: where, when and with what it was measured, and its cells."""

    machine: dict[str, Any]
    ceilings: Ceilings
    cells: list[Cell] = field(default_factory=list)


@dataclass(frozen=True)
class Mean:
    """Geometric mean of PyTorch's best time over ours, and how many cells it covers."""

    ratio: float
    cells: int

    @classmethod
    def of(cls, cells: Iterable[Cell]) -> Mean | None:
        ratios = [cell.ratio for cell in cells if cell.ratio is not None]
        return cls(math.exp(statistics.fmean(map(math.log, ratios))), len(ratios)) if ratios else None


def means(cells: Sequence[Cell]) -> dict[tuple[str, str, str], tuple[Mean | None, Mean | None]]:
    """Return, by operation, precision and layout, the means over KernelBench's 3-D cases and over all."""
    by_group: dict[tuple[str, str, str], list[Cell]] = {}
    for cell in cells:
        by_group.setdefault((cell.operation, cell.precision, cell.layout), []).append(cell)
    return {
        group: (Mean.of(c for c in members if c.case in KERNELBENCH_3D), Mean.of(members))
        for group, members in by_group.items()
    }


def save(result: Result, file: Path) -> None:
    """Write a result as JSON, with the figures that follow from the measured ones beside them."""
    cells = [
        {**asdict(c), "torch_best_ms": c.torch_best.median if c.torch_best else None}
        | {name: getattr(c, name) for name in ("over_floor", "ratio", "ratio_band", "error_ratio")}
        for c in result.cells
    ]
    content = {
        "schema": SCHEMA,
        "machine": result.machine,
        "ceilings": asdict(result.ceilings),
        "geometric_means": [
            {
                "operation": operation,
                "precision": precision,
                "layout": layout,
                "kernelbench_3d": kernelbench and asdict(kernelbench),
                "all": every and asdict(every),
            }
            for (operation, precision, layout), (kernelbench, every) in means(result.cells).items()
        ],
        "cells": cells,
    }
    # An infinite error has no spelling in strict JSON.
    file.write_text(json.dumps(_finite(content), indent=1, allow_nan=False) + "\n")


def load(file: Path) -> Result:
    """Read a result that `save` wrote.

    Raises
    ------
    ValueError
        If the file holds something else.
    """
    content = json.loads(file.read_text())
    if not isinstance(content, dict) or content.get("schema") != SCHEMA:
        raise ValueError(f"{file} must be a result of `python -m cuconvt bench --json`, of schema {SCHEMA}")
    names = Cell.__dataclass_fields__
    cells = []
    for stored in content["cells"]:
        fields = {name: value for name, value in stored.items() if name in names}
        fields["time"] = fields["time"] and Times(**fields["time"])
        fields["torch_times"] = {layout: Times(**times) for layout, times in fields["torch_times"].items()}
        fields["error"], fields["scaled_error"] = (_number(fields[name]) for name in ("error", "scaled_error"))
        fields["torch_error"] = _number(fields["torch_error"])
        cells.append(Cell(**fields))
    return Result(content["machine"], Ceilings(**content["ceilings"]), cells)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _number(value: float | str | None) -> float | None:
    return float(value) if isinstance(value, str) else value
