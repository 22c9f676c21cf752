"""Cases of phase_rows for the host, each of one program, with tiles drawn from the planner's."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from contextlib import contextmanager
from math import gcd, prod
from typing import Any

from described import contiguous, geometry_of, problem_of
from host.backend import HostBackend
from host.backend import on_host as family_on_host
from strategies import KINDS, Ints, Problem, Specialisation, attempts, case, full_extent

from cuconvt import plan_phase_rows as rows
from cuconvt.plan import Device, Layout, Plan, Refusal
from cuconvt.plan_phase_rows_work import Tile, Work
from cuconvt.plan_views import batch_as_depth

BUDGET = 0.02  # a wgmma of 128 threads takes longer than its products
SHARED_BYTES = 227 * 1024
LONGEST = {1: (200,), 2: (12, 22), 3: (4, 6, 12)}
MORE_W = 18  # inputs along W that drawn problems may have beyond these
# Extents that are ragged in most boxes; problems may have a few more inputs, see `fitted`.
EXTENTS = {
    1: ((67,), (261,)),
    2: ((11, 17), (9, 36), (26, 7)),
    3: ((3, 5, 7), (5, 9, 11), (7, 3, 20)),
}
MAX_PRODUCTS = 250  # wgmmas of a box and a chunk: one takes the host long

# A tile whose weights pass by, of which others are variations.
ANY_TILE = Tile(
    workers=1,
    stagers=1,
    tiles_m=2,
    tiles_c=2,
    merge_w=False,
    k_steps=2,
    x_stages=3,
    ring=3,
    resident=False,
    take_turns=False,
    all_phases=False,
    min_blocks=2,
    boxed=True,
)


@dataclasses.dataclass(frozen=True)
class Case:
    """A specialisation of the kernel: every problem of it runs the same program."""

    spec: Specialisation
    dtype: str
    precision: str | None
    device: Device
    tile: Tile
    before_w: int  # the padding before along W
    whole: bool = True  # whether rows of the result are whole runs, or else one output shorter

    @property
    def flat(self) -> bool:
        """Whether the rows of a plane are one row of a copy."""
        return self.tile.flat > 0

    @property
    def run(self) -> int:
        """Outputs of a row that are stored at a time where it is whole runs."""
        return gcd(2 * self.spec.stride[-1], 16 // self.itemsize)

    @property
    def itemsize(self) -> int:
        return 4 if self.dtype == "float32" else 2


def cases() -> dict[str, Case]:
    """Return the cases by name: of rows one by one, of those of a plane as one, and both where runs are not whole."""
    found = {}
    for index in range(36):
        choose = random.Random(index)
        (dtype, precision), whole = KINDS[index % 4], index < 24
        flat = index >= 12 if whole else index % 24 // 4 == 2
        rank = 2 + index // 4 % 2 if flat else 1 + index // 4 % 3
        # Of a plane's rows without a stride there are as many outputs as inputs, which are pairs.
        least_w = 2 if flat and not whole else 1
        specs = (draw_problem(choose, index, rank, dtype, flat, least_w) for _ in attempts())
        drawn = (draw_case(choose, index, spec, dtype, precision, flat, whole) for spec in specs)
        this = next(case for case in drawn if case is not None)
        way = ("planes" if flat else "rows") + ("" if whole else "-cut")
        found[f"{way}-{index}-{precision or dtype}-{rank}d"] = this
    return found


def steps_of(index: int) -> int:
    """Return the steps that chunks of a case have, if some tile has so many; of float32 there may be most."""
    return (1, 2, 4, 8)[index // 2 % 4]


def draw_problem(choose: random.Random, index: int, rank: int, dtype: str, flat: bool, least_w: int) -> Specialisation:
    """Draw one with a tap along W for each phase, and phases along D and H of which some have none."""
    along_w = max((1, 2, 4, 2)[(index + index // 4) % 4], least_w)
    apart_w = [dilation for dilation in (1, 2, 3, 3) if gcd(dilation, along_w) == 1]
    kernel_w = choose.randint(along_w, max(5, along_w))
    if index % 2 == 0:  # as many taps of each phase
        kernel_w, apart_w = along_w * (1 + (index % 3 == 0 and along_w < 4)), [1]
    # Kernel, stride and dilation of each axis.
    axes = (
        ((3, 1, 1), (2, 2, 1), (3, 2, 2), (1, 3, 1), (3, 1, 2))[(index + index // 5) % 5],
        ((3, 2, 1), (2, 1, 3), (2, 3, 1), (3, 2, 4), (1, 1, 1))[index % 5],
        (kernel_w, along_w, choose.choice(apart_w)),
    )[3 - rank :]
    in_groups, in_planes = index % 5 == 2, ("contiguous", "sliced") if rank == 3 else ("contiguous",)
    c_in = choose.choice((40, 72) if steps_of(index) == 8 else (3, 8, 12, 17, 24, 40))
    kernel, stride, dilation = zip(*axes, strict=True)
    return Specialisation(
        kernel,
        stride,
        dilation,
        choose.choice((16, 32)) if in_groups else c_in,
        choose.choice((1, 3, 8, 12, 17, 24)),
        in_planes if flat else ("cropped",),
        ("contiguous", "cropped"),
        groups=None if in_groups else 1,
    )


def draw_case(
    choose: random.Random,
    index: int,
    spec: Specialisation,
    dtype: str,
    precision: str | None,
    flat: bool,
    whole: bool,
) -> Case | None:
    """Draw a tile that fits whatever the extents, if there is one; kinds are drawn first, since some have few tiles."""
    stride, dilation, reach = spec.stride[-1], spec.dilation[-1], (spec.kernel[-1] - 1) * spec.dilation[-1]
    # A plane's rows have as many positions as inputs, so that no more can be cut off.
    most = reach + max(stride, dilation) - stride if flat else min(2 * stride - 1, reach)
    before_w = choose.randint(0, most)
    if index % 4 == 0:  # all phases along W may read what one reads
        before_w -= before_w % stride
    device = Device(90, choose.choice((1, 1, 2)), SHARED_BYTES)  # so few that each block has several boxes
    spec = dataclasses.replace(spec, shifts=(*(None,) * (len(spec.kernel) - 1), before_w % stride))
    this = Case(spec, dtype, precision, device, dataclasses.replace(ANY_TILE, flat=int(flat)), before_w, whole)
    problem = padded(this, EXTENTS[len(spec.kernel)][0])
    geometry, layout = batch_as_depth(geometry_of(problem), layout_for(problem))
    if rows._refuse(geometry, dtype, layout, precision, device):
        return None
    work = Work(geometry, dtype, precision, layout)
    kinds: dict[Any, list[Tile]] = {}
    for tile in rows.tiles_of_any_size(work):
        products = work.unrolled(tile) * tile.workers * prod(geometry.kernel[:2])
        if (tile.flat > 0) == flat and products <= MAX_PRODUCTS:
            kinds.setdefault((tile.workers, tile.tiles_m, tile.k_steps), []).append(tile)
    for kind in sorted(choose.sample(list(kinds), len(kinds)), key=lambda kind: kind[-1] != steps_of(index)):
        for tile in choose.sample(kinds[kind], min(4, len(kinds[kind]))):
            if choose.random() < 0.5:  # as where weights are many
                tile = dataclasses.replace(tile, resident=False, ring=3)
            drawn = dataclasses.replace(this, tile=tile)
            if serves(drawn):
                return drawn
    return None


def serves(this: Case) -> bool:
    rank = len(this.spec.kernel)
    *others, width = LONGEST[rank]
    return all(
        isinstance(proposed(this, padded(this, extent, spare)), Plan)
        for spare in (False, True)
        for extent in (LONGEST[rank], (*others, width + MORE_W), *EXTENTS[rank])
    )


def padded(this: Case, extent: Ints, spare: bool = False, **fields: Any) -> Problem:
    """Return a problem of the case with no padding along D and H, or with `spare` as much as cuts off inputs."""
    spec = this.spec
    groups = spec.groups or 2
    full = full_extent(extent, spec.kernel, spec.stride, spec.dilation)
    before = [min(stride + 1, f // 2) if spare else 0 for stride, f in zip(spec.stride, full, strict=True)]
    before[-1] = this.before_w
    problem = case(
        (2, groups * spec.c_in_per_group, *extent),
        groups * spec.c_out_per_group,
        spec.kernel,
        spec.stride,
        padding=tuple((b, 0) for b in before),
        groups=groups,
        dilation=spec.dilation,
        has_bias=True,
        x_layout=spec.x_layouts[-1 if spare else 0],
        out_layout=spec.out_layouts[-1 if spare else 0],
    )
    return fitted(this, dataclasses.replace(problem, **fields))


def fitted(this: Case, problem: Problem) -> Problem:
    """Return the problem with rows that the case can store, and planes that it can copy: with a few more inputs."""
    return of_planes(this, problem) if this.flat else of_rows(this, problem)


def of_rows(this: Case, problem: Problem) -> Problem:
    stride, before, after, width = problem.stride[-1], this.before_w, problem.padding[-1][1], problem.extent[-1]
    kernel, dilation, more = problem.kernel[-1], problem.dilation[-1], problem.output_padding[-1]
    while True:
        outputs = (width - 1) * stride + (kernel - 1) * dilation + 1 + more - before - after
        if outputs >= this.run:
            cut = outputs % this.run if this.whole else (outputs + 1) % this.run
            return along_w(problem, width, (before, after + cut), more)
        width += 1


def of_planes(this: Case, problem: Problem) -> Problem:
    """The same with as many positions along W as inputs, and planes of whole 16 bytes."""
    stride, width = problem.stride[-1], round_up(problem.extent[-1], 2)
    height = max(problem.extent[-2], 2)
    while height * width * this.itemsize % 16:
        height += 1
    outputs = width * stride
    after = (width - 1) * stride + (problem.kernel[-1] - 1) * problem.dilation[-1] + 1 - this.before_w - outputs
    if stride > this.run and after < 0:
        outputs, after = outputs - this.run, after + this.run
    after += not this.whole
    problem = dataclasses.replace(problem, extent=(*problem.extent[:-2], height, width))
    return along_w(problem, width, (this.before_w, max(after, 0)), max(-after, 0))


def along_w(problem: Problem, width: int, padding: tuple[int, int], output_padding: int) -> Problem:
    return dataclasses.replace(
        problem,
        extent=(*problem.extent[:-1], width),
        padding=(*problem.padding[:-1], padding),
        output_padding=(*problem.output_padding[:-1], output_padding),
    )


def round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def layout_for(problem: Problem) -> Layout:
    """Return the layout of a call whose arrays `place` has given theirs."""
    g = geometry_of(problem)

    def strides(extents: Ints, layout: str) -> Ints:
        shape = list(extents)
        if layout == "cropped":
            shape[-1] += 8 - shape[-1] % 8
        elif layout == "sliced":
            shape[-problem.rank] += 1
        return contiguous(tuple(shape))

    return Layout(
        x=strides((g.n, g.c_in, *g.x_extent), problem.x_layout),
        weight=contiguous((g.c_in, g.c_out_per_group, *g.kernel)),
        bias=1,
        out=strides((g.n, g.c_out, *g.out_extent), problem.out_layout),
    )


def proposed(this: Case, problem: Problem) -> Plan | Refusal:
    """Plan a problem with the case's tile, whatever it costs."""
    of_call = geometry_of(problem), this.dtype, layout_for(problem), this.precision, this.device
    return rows.plan_phase_rows(*of_call, this.tile)


def work_of(this: Case, problem: Problem) -> Work:
    """Return the sizes of a problem, as they are planned with."""
    geometry, layout = batch_as_depth(geometry_of(problem), layout_for(problem))
    return Work(geometry, this.dtype, this.precision, layout)


def plan_for(this: Case, problem: Problem) -> Plan:
    plan = proposed(this, problem)
    assert isinstance(plan, Plan), plan
    return plan


@contextmanager
def on_host(this: Case, sources: dict[str, str] | None = None) -> Iterator[HostBackend]:
    """Run the transposed convolutions of NumPy arrays by this case's kernel and tile within the context."""

    def plan(_: str, *of_call: Any) -> Plan:
        found = rows.plan_phase_rows(*of_call, this.tile)
        assert isinstance(found, Plan), found
        assert problem_of(found)["patches"][0] == this.flat
        return found

    with family_on_host("phase_rows", this.device, this.precision, sources=sources, plan=plan) as backend:
        yield backend
