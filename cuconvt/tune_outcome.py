"""What tuning one problem found: the times of its candidates, what follows from them, and how it is shown. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

from cuconvt.bench.cases import Case, Precision
from cuconvt.bench.report import in_columns
from cuconvt.bench.result import Times
from cuconvt.plan import Plan
from cuconvt.tuned import Choice, sources_digest

SHOWN = 5  # of the fastest candidates
_LEFT = 2  # columns of text, aligned left


@dataclass(frozen=True)
class Problem:
    """A case in one precision and one layout."""

    case: Case
    precision: Precision
    layout: str

    def __str__(self) -> str:
        return f"{self.case.name} {self.precision.name} {self.layout}"


@dataclass(frozen=True)
class Outcome:
    """What was measured of a problem.

    Attributes
    ----------
    problem : Problem
    gpu : str
    key : str
        Of the store.
    planner : Plan or None
        The planner's own choice.
    times : dict
        Times of the candidates that came to the final, by their plans; the planner's choice is always one of them.
    tried : int
        How many candidates there were.
    failed : list of str
        The candidates that were not timed, each with the reason.
    trouble : str
        Why nothing was timed at all.
    """

    problem: Problem
    gpu: str
    key: str = ""
    planner: Plan | None = None
    times: Mapping[Plan, Times] = field(default_factory=dict)
    tried: int = 0
    failed: Sequence[str] = ()
    trouble: str = ""

    @property
    def fastest(self) -> list[Plan]:
        return sorted(self.times, key=lambda plan: self.times[plan].median)

    @property
    def winner(self) -> Plan | None:
        """The fastest candidate, if the middle half of its times lies below that of the planner's choice."""
        if self.planner is None or not self.times:
            return None
        best = self.fastest[0]
        return best if self.times[best].high < self.times[self.planner].low else None

    @property
    def choice(self) -> Choice | None:
        """What is worth storing: the winner, or nothing where the planner's choice is as good."""
        if self.winner is None or self.planner is None:
            return None
        return Choice(
            problem=f"{self.problem} on {self.gpu}",
            sources=sources_digest(),
            kernel=self.winner.kernel,
            tile=asdict(self.winner.tile),
            ms=self.times[self.winner].median,
            planner=self.planner.kernel,
            planner_ms=self.times[self.planner].median,
        )


def table(outcome: Outcome) -> str:
    """Return the fastest candidates with the planner's choice marked, the failed ones, and the verdict."""
    if outcome.trouble or outcome.planner is None:
        return f"{outcome.problem}: {outcome.trouble}"
    times, planner = outcome.times, outcome.planner
    shown = outcome.fastest[:SHOWN]
    rows = [("", "kernel", "ms", "quartiles", "/planner's", "tile")]
    for plan in [*shown, *({planner} - set(shown))]:
        time = times[plan]
        rows.append(
            (
                "planner's" if plan == planner else "",
                plan.kernel,
                f"{time.median:.4f}",
                f"{time.low:.4f} to {time.high:.4f}",
                f"{time.median / times[planner].median:.3f}",
                describe_tile(plan),
            )
        )
    # The last column is long and of ragged width.
    aligned = in_columns([row[:-1] for row in rows], _LEFT)
    lines = [f"{line}  {row[-1]}" for line, row in zip(aligned, rows, strict=True)]
    right = outcome.tried - len(outcome.failed)
    lines = [f"{outcome.problem}: {outcome.tried} candidates, {right} of them right", *lines]
    lines += [f"not timed: {text.splitlines()[0]}" for text in outcome.failed]  # without a compiler's log
    return "\n".join([*lines, _verdict(outcome)])


def describe_tile(plan: Plan) -> str:
    """Return the fields of a plan's tile."""
    return " ".join(f"{name}={_figures(value)}" for name, value in asdict(plan.tile).items())


def _figures(value: int | Sequence[int]) -> str:
    return str(int(value)) if isinstance(value, int) else "x".join(map(_figures, value))


def _verdict(outcome: Outcome) -> str:
    choice = outcome.choice
    if choice is None:
        return "the planner's choice stays: none is faster beyond the spread of the times"
    return f"tuned: {choice.kernel}, {choice.planner_ms / choice.ms:.2f} times as fast as the planner's choice"
