"""Planning: which kernel runs a problem, with which tile and launch. Pure functions, testable without a GPU.

Every kernel family proposes a `Plan` with its estimated cost or refuses with a reason. The cheapest proposal wins.
"""

from __future__ import annotations

import functools
import os
import sys
from dataclasses import dataclass, field, replace
from math import inf, prod
from typing import Any

import numpy as np

from cuconvt.arrays import address
from cuconvt.geometry import Geometry
from cuconvt.tensor_map import TensorMap

Ints = tuple[int, ...]
AXES = "DHW"
DTYPE_CODES = {"float16": 0, "bfloat16": 1, "float32": 2, "float64": 3}  # the kernels' DTYPE
PRECISION_CODES = {None: 0, "tf32": 1, "tf32x3": 3}  # and PRECISION
MAX_GRID = 2**31 - 1
WHOLE = 16  # elements that any copy of 16 bytes divides
INDEX_LIMIT = 2**31  # from here on kernels compute indices in 64 bits
MAX_UNROLLED_TAPS = 32  # along W; beyond it the code grows without a gain
PATCHES, SHARES = 46, 9  # of ``struct Problem``: the place of `patches`, and how many `shares` are
MAX_STRIDE_W = 16  # phases whose sums a thread can hold


@dataclass(frozen=True)
class Device:
    """What a plan needs to know of a GPU.

    Attributes
    ----------
    compute_capability : int
        Ten times the major version plus the minor one: 90 for an H100 or H200.
    multiprocessors : int
    shared_bytes : int
        Largest shared memory of one block, in bytes, when the kernel opts in.
    name : str
        What the driver calls it. Tuned choices depend on it, plans do not.
    """

    compute_capability: int
    multiprocessors: int
    shared_bytes: int
    name: str = ""


@dataclass(frozen=True)
class Layout:
    """Strides in elements, in 3-D form: N, channels, D, H, W (of the weight: C_in, C_out/groups, kD, kH, kW)."""

    x: Ints
    weight: Ints
    bias: int | None
    out: Ints
    x_aligned: bool = True  # whether x starts on a 16-byte boundary
    out_aligned: bool = True
    weight_group: int | None = None  # from group to group; None: the groups follow each other along C_in
    weight_first: int = 0  # where the first channels and tap of the first group are, from the array's first element

    @classmethod
    def of(cls, x: Any, weight: Any, bias: Any, out: Any) -> Layout:
        """Read the layout off the arrays of a call, in 3-D form."""
        size = x.itemsize
        for role, array in (("x", x), ("weight", weight), ("bias", bias), ("out", out)):
            if array is not None and any(stride % size for stride in array.strides):
                raise ValueError(f"{role} must have strides of whole elements of {size} bytes, got {array.strides}")
        return cls(
            x=tuple(stride // size for stride in x.strides),
            weight=tuple(stride // size for stride in weight.strides),
            bias=None if bias is None else bias.strides[0] // size,
            out=tuple(stride // size for stride in out.strides),
            x_aligned=address(x) % 16 == 0,
            out_aligned=address(out) % 16 == 0,
        )

    @property
    def x_channels_last(self) -> bool:
        return _channels_fastest(self.x)

    @property
    def out_channels_last(self) -> bool:
        return _channels_fastest(self.out)


def _channels_fastest(strides: Ints) -> bool:
    return abs(strides[1]) == 1 and abs(strides[4]) != 1


@dataclass(frozen=True)
class Plan:
    """One kernel launch.

    Attributes
    ----------
    kernel : str
        Name of the family, of its file (``kernels/<kernel>.cu``) and of the entry point.
    defines : tuple of (str, int)
        The macros that select the specialisation. They hold neither N nor extents, so these never recompile.
    grid, block : int
        Blocks of the launch and threads of a block; both are one-dimensional.
    shared_bytes : int
        Dynamic shared memory of a block, in bytes.
    problem : tuple of int
        The run-time parameters, in the order of ``struct Problem`` in ``kernels/common.cuh``.
    cost : float
        Estimated clocks of one multiprocessor for the whole launch; good for comparing proposals only. What tiles reach
        beyond the edges is left out, so that the choice, like the defines, depends on neither N nor extents, unless
        `clocks` decide.
    clocks : float
        Estimated clocks of the call for its size, where that is compared with another kernel's: of the two for weight
        gradients of rows. Otherwise 0.
    packed_words, packed_a_thread : int
        Size of the repacked weights in 4-byte words, and how many one thread of ``<kernel>_pack`` writes; 0 when the
        kernel reads the weights as they are.
    workspace_bytes, sums : int
        Size of the partial sums that the kernel writes, and how many sums ``<kernel>_add`` makes of them; 0 when the
        kernel writes the result itself.
    sums_a_block : int
        How many of them a block makes; 0 where that follows from the number of parts.
    maps : tuple of TensorMap
        Of the arrays that the kernel reads by copies of boxes, its first ones.
    turns, turn_blocks : tuple of int, int
        The parameters of ``<kernel>_turn``, which makes channels-last copies of arrays, and its blocks; 0 without one.
        Where weights are repacked, too, one kernel does both, ``<kernel>_pack_and_turn``.
    turned : tuple of int
        Where the copies of x and y are in the workspace, behind the sums; -1 for one that is read as it is.
    images : tuple of int
        Of a batch that is taken in several launches, so many images each, whose sums are added: how many launches, and
        how many bytes of x and y these images have. Empty where all are taken at once.
    problem_of_next : tuple of int
        The run-time parameters of all of these but the first one.
    turn_shared_bytes : int
        Dynamic shared memory of the kernel that turns arrays.
    tile : object
        The family's tile, from which its ``plan_<kernel>`` makes the same plan again.
    tuned : bool
        Whether the tile was chosen by measurement, by ``python -m cuconvt tune``.
    refused : tuple of str
        What was not chosen, each with its reason.
    """

    kernel: str
    defines: tuple[tuple[str, int], ...]
    grid: int
    block: int
    shared_bytes: int
    problem: Ints
    cost: float
    packed_words: int = 0
    packed_a_thread: int = 1
    workspace_bytes: int = 0
    sums: int = 0
    sums_a_block: int = 0
    maps: tuple[TensorMap, ...] = ()
    turns: Ints = ()
    turn_blocks: int = 0
    turned: Ints = ()
    images: Ints = ()
    problem_of_next: Ints = ()
    turn_shared_bytes: int = 0
    clocks: float = 0.0
    tile: Any = field(default=None, compare=False)
    tuned: bool = field(default=False, compare=False)
    refused: tuple[str, ...] = field(default=(), compare=False)

    @property
    def name(self) -> str:
        """The kernel, and how it was chosen unless by the planner."""
        return f"{self.kernel} (tuned)" if self.tuned else self.kernel

    def __str__(self) -> str:
        defines = " ".join(f"{name}={value}" for name, value in self.defines)
        packed = f", repacked weights {4 * self.packed_words} B" if self.packed_words else ""
        holds = "turned arrays" if self.turned else "partial sums"
        parts = f", {holds} {self.workspace_bytes} B" if self.workspace_bytes else ""
        parts += f", {self.images[0]} launches" if self.images else ""
        lines = [
            f"{self.name}: grid {self.grid}, block {self.block}, shared {self.shared_bytes} B{packed}{parts}, {defines}"
        ]
        return "\n  not ".join([*lines, *self.refused])


@dataclass(frozen=True)
class Refusal:
    """Why a family does not take a problem, in one line."""

    kernel: str
    reason: str


@functools.lru_cache(maxsize=4096)
def make_plan(geometry: Geometry, dtype: str, layout: Layout, precision: str | None, device: Device) -> Plan:
    """Choose the cheapest kernel for a problem.

    Raises
    ------
    ValueError
        If no kernel can launch the problem; the message lists every refusal.
    """
    from cuconvt.plan_correlate_wgmma import plan_turned_correlate_wgmma
    from cuconvt.plan_disjoint import plan_disjoint
    from cuconvt.plan_few_channels import plan_few_channels
    from cuconvt.plan_gather import plan_gather
    from cuconvt.plan_narrow_groups import plan_narrow_groups
    from cuconvt.plan_phase_gemm import plan_phase_gemm
    from cuconvt.plan_phase_rows import plan_phase_rows
    from cuconvt.plan_phase_wgmma import plan_phase_wgmma
    from cuconvt.plan_tap_columns import plan_tap_columns

    proposals = [
        family(geometry, dtype, layout, precision, device)
        for family in (
            plan_disjoint,
            plan_phase_wgmma,
            plan_turned_correlate_wgmma,
            plan_phase_gemm,
            plan_tap_columns,
            plan_narrow_groups,
            plan_few_channels,
            plan_gather,
        )
    ]
    proposals.append(plan_phase_rows(geometry, dtype, layout, precision, device, most=least_cost(proposals)))
    return best_of(geometry, proposals)


def least_cost(proposals: list[Plan | Refusal]) -> float:
    """Return what another kernel has to beat."""
    return min((proposal.cost for proposal in proposals if isinstance(proposal, Plan)), default=inf)


def best_of(geometry: Geometry, proposals: list[Plan | Refusal]) -> Plan:
    """Return the plan with the least cost, which says why the others were not chosen."""
    plans = sorted((p for p in proposals if isinstance(p, Plan)), key=lambda plan: plan.cost)
    refused = [f"{p.kernel}: {p.reason}" for p in proposals if isinstance(p, Refusal)]
    if not plans:
        raise ValueError(f"no kernel can run {geometry}: {'; '.join(refused)}")
    best, *others = plans
    refused += [f"{p.kernel}: cost {p.cost:.3g} against {best.cost:.3g}" for p in others]
    return Plan(**{**best.__dict__, "refused": tuple(refused)})


def show(plan: Plan, geometry: Geometry, dtype: str, precision: str | None) -> None:
    """Print the plan of a call on standard error, where ``CUCONVT_DEBUG=plan`` asks for it."""
    if "plan" in os.environ.get("CUCONVT_DEBUG", "").split(","):
        print(f"cuconvt plan for {geometry} {dtype} {precision or ''}\n  {plan}", file=sys.stderr)


def alike(geometry: Geometry, layout: Layout) -> tuple[Geometry, Layout]:
    """Return the same problem for all that differ in nothing that a tile depends on.

    Without N and extents, and of strides, which matter where copies of up to 16 bytes begin, no more than a remainder.
    """

    def remainders(strides: Ints) -> Ints:
        return tuple(stride if abs(stride) == 1 else WHOLE + stride % WHOLE for stride in strides)

    none, ones = (0, 0, 0), (1, 1, 1)
    same = replace(
        geometry,
        n=1,
        batched=True,
        x_extent=ones,
        out_extent=ones,
        pad_before=(0, 0, geometry.pad_before[2] % WHOLE),
        pad_after=none,
        output_padding=none,
    )
    return same, Layout(
        x=remainders(layout.x),
        weight=(),
        bias=None,
        out=remainders(layout.out),
        x_aligned=layout.x_aligned,
        out_aligned=layout.out_aligned,
    )


def positions(geometry: Geometry, axis: int) -> int:
    """Return how many positions q (outputs of a phase) an axis has: from pad_before // stride to the last output's."""
    first = geometry.pad_before[axis] // geometry.stride[axis]
    last = (geometry.out_extent[axis] - 1 + geometry.pad_before[axis]) // geometry.stride[axis]
    return last - first + 1


def all_positions(geometry: Geometry) -> int:
    """Return how many positions q a problem has, over all axes, groups and the batch."""
    return prod(positions(geometry, axis) for axis in range(3)) * geometry.groups * geometry.n


def span(extents: Ints, strides: Ints) -> int:
    """Return the largest distance, in elements, between an array's first element and any other."""
    return sum((extent - 1) * abs(stride) for extent, stride in zip(extents, strides, strict=True))


def axis_macros(**values: Ints) -> tuple[tuple[str, int], ...]:
    """Return a macro for each axis of each value: KERNEL_D, KERNEL_H, KERNEL_W and so on."""
    return tuple(
        (f"{name}_{axis}", value) for name, along in values.items() for axis, value in zip(AXES, along, strict=True)
    )


def refuse_tensor_cores(dtype: str, precision: str | None, device: Device, *, wgmma: bool = False) -> str | None:
    """Return why a kernel with ``mma.sync``, or with Hopper's ``wgmma``, does not serve, if it does not."""
    capability = device.compute_capability
    if capability != 90 if wgmma else capability < 80:
        return f"needs compute capability {'9.0' if wgmma else '8.0'}, the device has {capability / 10}"
    if dtype == "float64" or precision == "ieee":
        return f"computes in float16, bfloat16 and TF32, not in {precision or dtype}"
    return None


def refuse_steps(geometry: Geometry) -> str | None:
    """Return why a kernel cannot count the steps along some axis, if it cannot."""
    if max(*geometry.stride, *(d * k for d, k in zip(geometry.dilation, geometry.kernel, strict=True))) >= 2**31:
        return "stride and dilation * kernel must stay below 2**31 on every axis"
    return None


def refuse_taps(geometry: Geometry) -> str | None:
    """Return why a kernel does not unroll the taps along W, if it does not."""
    if geometry.kernel[2] > MAX_UNROLLED_TAPS:
        return f"unrolls at most {MAX_UNROLLED_TAPS} taps along W, got {geometry.kernel[2]}"
    return None


def refuse_phases(geometry: Geometry) -> str | None:
    """Return why a thread cannot hold the sums of all phases along W, if it cannot."""
    if geometry.stride[2] > MAX_STRIDE_W:
        return f"holds at most {MAX_STRIDE_W} phases along W, got stride {geometry.stride[2]}"
    return None


def needs_64_bits(geometry: Geometry, layout: Layout, box: Ints) -> bool:
    """Return whether an offset into an array, or a position that a kernel computes, may reach 2**31."""
    g = geometry
    spans = (
        span((g.n, g.c_in, *g.x_extent), layout.x),
        span((g.groups, g.c_in_per_group, g.c_out_per_group, *g.kernel), weight_strides(geometry, layout)),
        span((g.n, g.c_out, *g.out_extent), layout.out),
    )
    return max(*spans, positions_reached(geometry, box)) >= INDEX_LIMIT


def positions_reached(geometry: Geometry, box: Ints) -> int:
    """Return the largest position that a kernel computes.

    It goes up to a whole box beyond the last output, before it is compared with the extent.
    """
    g = geometry
    reached = (o + p + s * 2 * b for o, p, s, b in zip(g.out_extent, g.pad_before, g.stride, box, strict=True))
    return max(*reached, *g.x_extent)


def weight_strides(geometry: Geometry, layout: Layout) -> Ints:
    """Return the strides of the weight: groups, C_in and C_out of a group, kD, kH, kW."""
    follow_each_other = geometry.c_in_per_group * layout.weight[0]
    return (follow_each_other if layout.weight_group is None else layout.weight_group, *layout.weight)


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def at_residue(least: int, residue: int, modulus: int) -> int:
    """Return the smallest number that is at least `least` and `residue` modulo `modulus`."""
    return least + (residue - least) % modulus


def problem_parameters(
    geometry: Geometry,
    layout: Layout,
    tiles: Ints,
    x_vector: int = False,
    out_vector: int = False,
    box: Ints = (0,) * 11,
    planes: Ints = (0, 0),
    shares: Ints = (0,) * SHARES,
    together: int = 1,
) -> Ints:
    """Return ``struct Problem`` of kernels/common.cuh as a flat tuple."""
    g = geometry
    weight_group, *weight = weight_strides(geometry, layout)
    return (
        *(g.n, g.groups, g.c_in_per_group, g.c_out_per_group),
        *g.x_extent,
        *g.out_extent,
        *g.pad_before,
        *layout.x,
        *weight,
        *(weight_group, layout.weight_first),
        layout.bias or 0,
        *layout.out,
        *tiles,
        *(int(x_vector), int(out_vector)),
        *(magic(divisor) for divisor in (*tiles, g.groups)),
        *box,
        *planes,
        *shares,
        together,
    )


def magic(divisor: int) -> int:
    """Return what `quotient` in kernels/common.cuh divides by `divisor` with: multiplier + 2**32 * shift."""
    shift = (divisor - 1).bit_length()
    return -(-(2 ** (31 + shift)) // divisor) + 2**32 * shift


def problem_struct(plan: Plan) -> np.ndarray:
    """Return the plan's run-time parameters as one value, which a kernel takes as its ``Problem``."""
    return struct_of(plan.problem)


def struct_of(numbers: Ints) -> np.ndarray:
    """Return 64-bit numbers as one value."""
    return np.array(numbers, np.int64).view(f"V{8 * len(numbers)}")
