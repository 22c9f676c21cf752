"""The command ``python -m cuconvt tune``: measures candidates for given problems and stores what beats the planner."""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from cuconvt.bench.cases import PRECISIONS, unique
from cuconvt.bench.command import add_problem_options, positive, progress, require_dtypes, require_gpu
from cuconvt.errors import MissingDependencyError
from cuconvt.tune_outcome import Outcome, Problem, table
from cuconvt.tuned import is_ignored, save, store_file

LIMIT = 40


def add_command(commands: Any) -> None:
    """Add the command to the subparsers of ``python -m cuconvt``."""
    tune = commands.add_parser(
        "tune",
        help="measure which kernel and tile is fastest for given problems, and use it from then on",
        description="Measures the most promising kernels and tiles on the current GPU. What is faster than the "
        "planner's choice beyond the spread of the times is stored beside the compiled kernels, and used by every "
        "later process for this very problem: shapes, parameters, dtype, layout, precision, with or without bias. "
        "CUCONVT_TUNED=0 ignores the store.",
    )
    add_problem_options(tune, None)
    tune.add_argument(
        "--limit", type=positive, default=LIMIT, metavar="N", help=f"candidates of a problem; default: {LIMIT}"
    )
    tune.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Measure, store and report; what was measured is kept if the run is cut short."""
    try:
        cases = unique(options.cases)
        require_dtypes(options.precision)
        require_gpu()
    except (ValueError, MissingDependencyError) as error:
        sys.exit(f"tune: {error}")
    names, layouts = dict.fromkeys(options.precision), dict.fromkeys(options.layout)
    problems = [Problem(c, PRECISIONS[p], layout) for c, p, layout in itertools.product(cases, names, layouts)]
    outcomes: list[Outcome] = []
    stored = 0
    try:
        for outcome in _measure(problems, options.limit):
            outcomes.append(outcome)
            if not outcome.trouble:
                save(outcome.key, outcome.choice)
                stored += outcome.choice is not None
    except OSError as error:
        sys.exit(f"tune: {store_file()} cannot be written: {error}; set CUCONVT_CACHE_DIR to a folder that can")
    finally:
        for outcome in outcomes:
            print(table(outcome), end="\n\n")
        print(f"{stored} of {len(outcomes)} choices stored in {store_file()}")
        if stored and is_ignored():
            print("They are ignored as long as CUCONVT_TUNED=0 is set.")
    if any(outcome.trouble for outcome in outcomes):
        sys.exit("tune: not every problem could be measured")


def _measure(problems: Sequence[Problem], limit: int) -> Iterator[Outcome]:
    from cuconvt.tune_measure import measure  # needs CuPy

    return measure(problems, limit, progress)
