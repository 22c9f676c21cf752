"""Tuned choices: tiles that ``python -m cuconvt tune`` measured to be faster than the planner's, kept beside the cache.

The store is one JSON file in the cache folder, read once a process. An entry is keyed by all that a plan depends on, by
the GPU's name, and by the text of the kernels and of their planners: it serves the problem that was measured, until one
of these changes. It holds the kernel and the fields of the tile; the kernel's planner makes the plan of them again.
"""

from __future__ import annotations

import functools
import json
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from cuconvt import (
    plan_correlate_wgmma,
    plan_correlate_wgmma_work,
    plan_disjoint,
    plan_few_channels,
    plan_gather,
    plan_narrow_groups,
    plan_phase_gemm,
    plan_phase_rows,
    plan_phase_wgmma,
    plan_tap_columns,
    plan_wgmma_sizes,
)
from cuconvt.choices import planners_digest
from cuconvt.compile import cache_folder, digest_of, replace_file, sources_of
from cuconvt.geometry import Geometry
from cuconvt.plan import Device, Layout, Plan, Refusal, make_plan

SCHEMA = 1


class Family(NamedTuple):
    """What tuning needs of a kernel's planner."""

    plan: Callable[..., Plan | Refusal]  # with a tile as the last argument
    candidates: Callable[..., Iterator[Plan]]
    tile: type[Any]


FAMILIES = {
    "disjoint": Family(plan_disjoint.plan_disjoint, plan_disjoint.candidates, plan_disjoint.Tile),
    "phase_wgmma": Family(plan_phase_wgmma.plan_phase_wgmma, plan_phase_wgmma.candidates, plan_wgmma_sizes.Tile),
    "phase_rows": Family(plan_phase_rows.plan_phase_rows, plan_phase_rows.candidates, plan_wgmma_sizes.Tile),
    "correlate_wgmma": Family(
        plan_correlate_wgmma.plan_turned_correlate_wgmma,
        plan_correlate_wgmma.candidates,
        plan_correlate_wgmma_work.Tile,
    ),
    "phase_gemm": Family(plan_phase_gemm.plan_phase_gemm, plan_phase_gemm.candidates, plan_phase_gemm.Tile),
    "tap_columns": Family(plan_tap_columns.plan_tap_columns, plan_tap_columns.candidates, plan_tap_columns.Tile),
    "narrow_groups": Family(
        plan_narrow_groups.plan_narrow_groups, plan_narrow_groups.candidates, plan_narrow_groups.Tile
    ),
    "few_channels": Family(plan_few_channels.plan_few_channels, plan_few_channels.candidates, plan_few_channels.Tile),
    "gather": Family(plan_gather.plan_gather, plan_gather.candidates, plan_gather.Tile),
}


@dataclass(frozen=True)
class Choice:
    """A measured tile, as it is stored.

    Attributes
    ----------
    problem : str
        What was measured and on which GPU, for a reader of the file.
    sources : str
        The `sources_digest` of the measurement.
    kernel : str
    tile : dict
        The fields of the kernel's tile.
    ms : float
        Median time.
    planner : str
        The kernel of the planner's own choice.
    planner_ms : float
        Its median time in the same run.
    """

    problem: str
    sources: str
    kernel: str
    tile: Mapping[str, Any]
    ms: float
    planner: str
    planner_ms: float


def tuned_plan(geometry: Geometry, dtype: str, layout: Layout, precision: str | None, device: Device) -> Plan | None:
    """Return the plan of the tuned choice, or None where there is none or ``CUCONVT_TUNED=0`` tells to ignore it."""
    if is_ignored():
        return None
    choices = read(store_file())
    choice = choices.get(key_of(geometry, dtype, layout, precision, device)) if choices else None
    if choice is None:
        return None
    try:
        family = FAMILIES[choice.kernel]
        tile = family.tile(**{name: _tuples(value) for name, value in choice.tile.items()})
        plan = family.plan(geometry, dtype, layout, precision, device, tile)
        against = f"the planner's {choice.planner}: {choice.planner_ms:.4g} ms against {choice.ms:.4g} ms"
    except (AttributeError, KeyError, TypeError, ValueError):
        plan = None
    if not isinstance(plan, Plan):
        _warn_once(store_file(), f"holds no tile of {choice.kernel} for {choice.problem}")
        return None
    planner = make_plan(geometry, dtype, layout, precision, device)
    others = (line for line in planner.refused if not line.startswith(f"{plan.kernel}:"))
    return replace(plan, tuned=True, refused=(f"{against}, measured by `python -m cuconvt tune`", *others))


def is_ignored() -> bool:
    return os.environ.get("CUCONVT_TUNED") == "0"


def store_file() -> Path:
    return cache_folder() / "tuned.json"


def key_of(geometry: Geometry, dtype: str, layout: Layout, precision: str | None, device: Device) -> str:
    """Return what a choice is stored under."""
    problem = replace(geometry, batched=True)  # the same kernels run without a batch axis
    places = replace(layout, weight=(), weight_group=None, weight_first=0)  # no tile depends on how the weight lies
    parts = [asdict(problem), dtype, asdict(places), precision, asdict(device), sources_digest()]
    return digest_of(json.dumps(parts).encode())


@functools.cache
def sources_digest() -> str:
    """Return a digest of everything that gives a tile its meaning and its time: kernels, headers and planners."""
    parts = [sources_of(f"{kernel}.cu") for kernel in FAMILIES], planners_digest()
    return digest_of(repr(parts).encode())


@functools.cache
def read(file: Path) -> Mapping[str, Choice]:
    """Return the stored choices by their keys; none, with a warning, of a file that is not sound."""
    try:
        content = json.loads(file.read_text())
        if content["schema"] != SCHEMA:
            raise ValueError(f"schema {content['schema']}, not {SCHEMA}")
        return {key: Choice(**fields) for key, fields in content["choices"].items()}
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, AttributeError, KeyError, TypeError, ValueError) as error:
        _warn_once(file, f"cannot be read ({error or type(error).__name__})")
        return {}


def save(key: str, choice: Choice | None) -> None:
    """Store a choice or, with None, drop the one that may be there. Other processes see the old file or the new."""
    file = store_file()
    read.cache_clear()  # another process may have added to it
    choices = {other: stored for other, stored in read(file).items() if other != key}
    if choice is not None:
        choices[key] = choice
    elif len(choices) == len(read(file)):
        return
    text = json.dumps({"schema": SCHEMA, "choices": {key: asdict(stored) for key, stored in choices.items()}}, indent=1)
    replace_file(file, f"{text}\n".encode())
    read.cache_clear()


def _tuples(value: Any) -> Any:
    """JSON has lists where tiles have tuples."""
    return tuple(value) if isinstance(value, list) else value


@functools.cache
def _warn_once(file: Path, problem: str) -> None:
    warnings.warn(
        f"{file} {problem} and is ignored; delete it, or run `python -m cuconvt tune` again",
        RuntimeWarning,
        stacklevel=2,
    )
