"""The phase decomposition of one axis: which taps reach which outputs.

With ``o`` an output position, ``r = (o + pad_before) mod stride`` is its *phase*. A tap ``k`` reaches ``o`` only when
``k * dilation = r (mod stride)``, and then reads the input at ``q - (k * dilation) // stride`` where
``q = (o + pad_before) // stride``. Within a phase the taps and their offsets are the same for every output, so a phase
is a dense stride-1 correlation: nothing is tested for divisibility and nothing multiplied by an inserted zero.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Phase:
    """The outputs of one residue on one axis.

    Attributes
    ----------
    residue : int
        ``(o + pad_before) mod stride`` of every output of the phase.
    taps : tuple of int
        The kernel positions that reach the phase, ascending; empty for a dead phase, whose outputs are the bias.
    back : tuple of int
        For each tap how far back it reads: the input position is ``q - back``.
    """

    residue: int
    taps: tuple[int, ...]
    back: tuple[int, ...]


def axis_phases(kernel: int, stride: int, dilation: int, residues: Iterable[int] | None = None) -> tuple[Phase, ...]:
    """Return the phases of `residues`, in their order; without them all `stride` phases of an axis, ascending."""
    by_residue: dict[int, list[int]] = {r: [] for r in (range(stride) if residues is None else residues)}
    for tap in range(kernel):
        if (taps := by_residue.get(tap * dilation % stride)) is not None:
            taps.append(tap)
    return tuple(Phase(r, tuple(taps), tuple(k * dilation // stride for k in taps)) for r, taps in by_residue.items())


def are_alike(kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]) -> bool:
    """Whether there are several phases, all of which have equally many taps along each axis and read the same inputs.

    With weights of zero for taps that some of them do not have, others would, too, but for an input that is infinite.
    """
    whole = all(k % s == 0 for k, s in zip(kernel, stride, strict=True))
    return whole and max(dilation) == 1 and max(stride) > 1


def residues_with_outputs(stride: int, pad_before: int, out_extent: int) -> list[int]:
    """Return the residues of the phases that have an output, ascending; a stride may be far longer than the axis."""
    return sorted((o + pad_before) % stride for o in range(min(stride, out_extent)))


def phase_outputs(residue: int, stride: int, pad_before: int, out_extent: int) -> range:
    """Return the output positions of a phase, ascending."""
    return range((residue - pad_before) % stride, out_extent, stride)
