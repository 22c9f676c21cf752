"""Every kernel, executed on the host under sanitizers: values against float64, and every access to memory checked."""

from __future__ import annotations

import dataclasses
import itertools
import random
import re
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import host_disjoint
import host_few_channels
import host_gradients
import host_narrow_groups
import host_phase_gemm
import host_phase_wgmma
import host_tap_columns
import numpy as np
import pytest
from described import DEVICES, channels_last, contiguous, geometry_of, problem_of, struct_fields
from fixed_cases import FEW_RESULTS, FIXED
from harness import check
from host.backend import launch, on_host, plan_family
from host.build import HERE, why_not
from host.execute import KernelError
from hypothesis import given, seed, settings
from shipped import OF_THE_PROBLEM, SIMT, shipped
from special import check_denormals, check_infinities, check_scales
from strategies import DTYPES, KINDS, LAYOUTS, SIDES, Problem, Specialisation, case, place, problems

from cuconvt.compile import kernel_folder
from cuconvt.plan import Device, Layout, Plan, positions

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))

ENOUGH = settings().max_examples  # geometries of a family
NOT_LAST = tuple(layout for layout in LAYOUTS if layout != "channels_last")
LONGEST = {1: (420,), 2: (18, 34), 3: (9, 6, 18)}  # just beyond one tile on every axis
LARGEST_KERNEL = {1: 9, 2: 5, 3: 3}
BUDGET = 0.5  # of the arithmetic and the outputs of a problem
SMALL = Device(80, 108, 8 * 1024)  # so little shared memory that a halo of modest size does not fit


@dataclasses.dataclass(frozen=True)
class Case:
    """A specialisation of a kernel: every problem of it runs the same program."""

    spec: Specialisation
    dtype: str
    precision: str | None = None
    device: Device = DEVICES[90]
    index64: bool = False  # 64-bit indices, though the problem is small
    first_w: int | None = None  # the first position q along W, modulo 4; None: any
    plan: Callable[..., Plan] = plan_family

    @property
    def defines(self) -> dict[str, int]:
        return {"INDEX64": 1} if self.index64 else {}


def make_case(
    dtype: str,
    kernel: Any,
    stride: Any,
    dilation: Any,
    c_in: int,
    c_out: int,
    last: tuple[bool, bool] = (False, False),
    **fields: Any,
) -> Case:
    layouts = [("channels_last",) if side else NOT_LAST for side in last]
    outs = tuple(layout for layout in layouts[1] if layout != "broadcast")
    return Case(Specialisation(kernel, stride, dilation, c_in, c_out, layouts[0], outs), dtype, **fields)


def gather_cases() -> dict[str, Case]:
    cases = {}
    for index in range(34):
        choose = random.Random(index)
        dtype, rank = tuple(DTYPES)[index % 4], 1 + index // 4 % 3
        kernel, stride, dilation = (
            tuple(choose.randint(1, top) for _ in range(rank)) for top in (LARGEST_KERNEL[rank], 3, 3)
        )
        c_in, c_out = choose.choice((1, 2, 3, 5, 9)), choose.choice((1, 2, 3, 4, 5, 7, 9, 15, 17, 25)[: 12 - rank])
        last = SIDES[index // 4 % 4]
        fields = {"device": choose.choice(list(DEVICES.values())), "index64": choose.random() < 0.2}
        cases[f"{index}-{dtype}-{rank}d"] = make_case(dtype, kernel, stride, dilation, c_in, c_out, last, **fields)
    for dtype, axes in itertools.product(("float32", "float16"), (1, 2, 3)):
        # Dilations so large that the halo of one axis after the other does not fit.
        dilation = {1: (20, 1, 1), 2: (20, 20, 1), 3: (20, 20, 30)}[axes]
        cases[f"{dtype}-no-halo-{axes}"] = make_case(dtype, (2, 2, 3), (2, 1, 2), dilation, 2, 3, device=SMALL)
    cases["channels-24"] = make_case("float16", (1,), (1,), (1,), 1, 24)
    cases["channels-49"] = make_case("float32", (2, 2), (2, 2), (1, 1), 3, 49)
    cases["stride-17"] = make_case("float32", (2, 19), (1, 17), (1, 1), 3, 2)
    cases["kernel-33"] = make_case("bfloat16", (33,), (2,), (1,), 3, 2)
    return cases


def gather_box(defines: dict[str, int]) -> tuple[int, ...]:
    """Return what a block owns along D, H, W (in positions q of a phase), C_out, and C_in (at a time)."""
    width = defines["THREADS_W"] * defines["POSITIONS_W"]
    channels = defines["THREADS_C"] * defines["CHANNELS"]
    return (defines["THREADS_D"], defines["THREADS_H"], width, channels, defines["CHUNK"])


# A kernel joins by its name here. Its cases reach every value of every macro that its planner can choose.
CASES = {
    "gather": gather_cases(),
    "disjoint": {name: Case(**fields) for name, fields in host_disjoint.cases().items()},
    "few_channels": {name: Case(**fields) for name, fields in host_few_channels.cases().items()},
    "narrow_groups": {name: Case(**fields) for name, fields in host_narrow_groups.cases().items()},
    "phase_gemm": {name: Case(**fields) for name, fields in host_phase_gemm.cases().items()},
    "phase_wgmma": {name: Case(**fields) for name, fields in host_phase_wgmma.cases().items()},
    "tap_columns": {name: Case(**fields) for name, fields in host_tap_columns.cases().items()},
}
BOXES = {"gather": gather_box, "few_channels": host_few_channels.box, "phase_gemm": host_phase_gemm.box}
OF_PLANS = {  # which vary at run time
    "disjoint": host_disjoint.box,
    "narrow_groups": host_narrow_groups.box,
    "phase_wgmma": host_phase_wgmma.box,
    "tap_columns": host_tap_columns.box,
}
# Macros that the host ignores, and how many slots hold weights that stay.
OF_THE_DEVICE = ("MIN_BLOCKS", "WORKER_REGISTERS", "STAGER_REGISTERS", "RING")
TILED = ("D", "H", "W", "C_out", "C_in")
OWN_LENGTHS = {
    "disjoint": host_disjoint,
    "narrow_groups": host_narrow_groups,
    "phase_gemm": host_phase_gemm,
    "phase_wgmma": host_phase_wgmma,
    "tap_columns": host_tap_columns,
}
EXAMPLES = {family: -(-ENOUGH // len(cases)) for family, cases in CASES.items()}  # drawn for a specialisation


def of_the_case(this: Case, problem: Problem) -> Problem:
    """Return the problem, or with up to three more inputs along W, and padding for these, for `first_w`."""
    if this.first_w is None:
        return problem
    (before, after), stride = problem.padding[-1], problem.stride[-1]
    more = (this.first_w - before // stride) % 4
    extent = (*problem.extent[:-1], problem.extent[-1] + more)
    return dataclasses.replace(problem, extent=extent, padding=(*problem.padding[:-1], (before + more * stride, after)))


def plan_for(family: str, this: Case, problem: Problem) -> Plan:
    geometry = geometry_of(problem)
    g = geometry

    def strides(layouts: tuple[str, ...], extents: tuple[int, ...]) -> tuple[int, ...]:
        found = (channels_last if layouts == ("channels_last",) else contiguous)(extents)
        return tuple(2 * stride for stride in found) if layouts[0] == "strided" else found

    layout = Layout(
        x=strides(this.spec.x_layouts, (g.n, g.c_in, *g.x_extent)),
        weight=contiguous((g.c_in, g.c_out_per_group, *g.kernel)),
        bias=1,
        out=strides(this.spec.out_layouts, (g.n, g.c_out, *g.out_extent)),
        x_aligned=problem.x_layout != "misaligned_last",
    )
    return this.plan(family, geometry, this.dtype, layout, this.precision, this.device)


def edges(family: str, plan: Plan) -> tuple[int, ...]:
    """Return what a block owns along D, H, W, C_out, and C_in (at a time)."""
    return OF_PLANS[family](plan) if family in OF_PLANS else BOXES[family](dict(plan.defines))


def smallest(this: Case, extent: tuple[int, ...] | None = None) -> Problem:
    """Return a problem of the case with as few groups and as little padding as it allows."""
    spec = this.spec
    groups, rank = spec.groups or 1, len(spec.kernel)
    layouts = {"x_layout": spec.x_layouts[0], "out_layout": spec.out_layouts[0]}
    problem = case(
        (1, groups * spec.c_in_per_group, *(extent or (1,) * rank)),
        groups * spec.c_out_per_group,
        spec.kernel,
        spec.stride,
        padding=tuple((spec.shift(axis) or 0, 0) for axis in range(rank)),
        groups=groups,
        dilation=spec.dilation,
        has_bias=True,
        **layouts,
    )
    return of_the_case(this, problem)


def one_past_every_edge(family: str, this: Case) -> Problem:
    """Return the problem whose last tile holds a single position, along every axis; or is ragged, if boxes vary."""
    problem = smallest(this)
    if family in OF_PLANS:
        candidates = [smallest(this, extent) for extent in OWN_LENGTHS[family].RAGGED[problem.rank]]
        return max(candidates, key=lambda candidate: len(ragged_axes(family, this, candidate)))
    axes = range(3 - problem.rank, 3)
    tile = edges(family, plan_for(family, this, problem))
    extent = []
    for axis in axes:
        positions_of_one = positions(geometry_of(problem), axis)  # each further input is a further position
        more = (1 - positions_of_one) % tile[axis]
        extent.append(1 + (more or tile[axis]))
    return smallest(this, tuple(extent))


def whole_words(this: Case, beyond: int = 0) -> Problem:
    """Return a problem whose rows of inputs are a multiple of four, and those of outputs of two where they can be.

    Or rows that are so many `beyond` a multiple of four.
    """
    lead = (2,) * (len(this.spec.kernel) - 1)
    found = (smallest(this, (*lead, width)) for width in range(17, 25))
    whole = [problem for problem in found if problem.extent[-1] % 4 == beyond]
    return min(whole, key=lambda problem: problem.out_shape[-1] % 2)


def between_words(this: Case) -> list[Problem]:
    """Return a problem whose channels-last x starts at no multiple of 16 bytes, if x is channels-last."""
    if this.spec.x_layouts != ("channels_last",):
        return []
    return [dataclasses.replace(whole_words(this), x_layout="misaligned_last")]


FAMILY_CASES = [pytest.param(family, name, id=f"{family}-{name}") for family, cases in CASES.items() for name in cases]


@pytest.mark.parametrize(("family", "name"), FAMILY_CASES)
def test_any_geometry(family: str, name: str) -> None:
    this = CASES[family][name]
    longest, budget = LONGEST[len(this.spec.kernel)], BUDGET
    if family in OWN_LENGTHS:
        longest, budget = OWN_LENGTHS[family].LONGEST[len(this.spec.kernel)], OWN_LENGTHS[family].BUDGET
    with on_host(family, this.device, this.precision, this.defines, plan=this.plan):

        @seed(len(name))
        @settings(max_examples=EXAMPLES[family], derandomize=False, database=None)
        @given(problem=problems(this.spec, longest, longest[-1] + 8, budget))
        def every_problem(problem: Problem) -> None:
            check(of_the_case(this, problem), this.dtype, precision=this.precision, calls=1)

        check(one_past_every_edge(family, this), this.dtype, precision=this.precision, calls=this.spec.calls)
        if family in OWN_LENGTHS:
            check(whole_words(this), this.dtype, precision=this.precision, calls=this.spec.calls)
        if isinstance(this.plan, host_phase_gemm.PhasesAsChannels):
            check(whole_words(this, 2), this.dtype, precision=this.precision, calls=this.spec.calls)
        if family == "phase_gemm":
            for problem in between_words(this):
                check(problem, this.dtype, precision=this.precision, calls=1)
        every_problem()


def test_enough_geometries_of_every_family() -> None:
    for family, cases in CASES.items():
        assert len(cases) * EXAMPLES[family] >= 300, family


def ragged_axes(family: str, this: Case, problem: Problem) -> set[str]:
    """Return the axes along which a problem has several tiles, the last one ragged."""
    geometry = geometry_of(problem)
    counts = (*(positions(geometry, axis) for axis in range(3)), problem.c_out_per_group, problem.c_in_per_group)
    tile = edges(family, plan_for(family, this, problem))
    return {axis for axis, count, edge in zip(TILED, counts, tile, strict=True) if count > edge and count % edge}


@pytest.mark.parametrize("family", CASES)
def test_last_tiles_are_ragged(family: str) -> None:
    tiled, ragged = set(), set()
    for this in CASES[family].values():
        problem = one_past_every_edge(family, this)
        tile = edges(family, plan_for(family, this, problem))
        tiled |= {axis for axis, edge in zip(TILED, tile, strict=True) if edge > 1}
        ragged |= ragged_axes(family, this, problem)
    assert ragged == tiled


@pytest.mark.parametrize("family", CASES)
def test_every_value_of_every_macro_is_reached(family: str) -> None:
    reached = defaultdict(set)
    for this in CASES[family].values():
        for name, value in {**dict(plan_for(family, this, smallest(this)).defines), **this.defines}.items():
            reached[name].add(value)
    for plan in shipped(family, 90):
        for name, value in plan.defines:
            if not name.startswith((*OF_THE_PROBLEM, *OF_THE_DEVICE)):
                assert value in reached[name], f"no case of {family} has {name}={value}, as {plan} has"
    if family not in ("disjoint", "phase_wgmma"):  # which have no such macro
        assert reached["INDEX64"] == {0, 1}
    if family == "narrow_groups":
        assert reached["GROUPS"] == {1, 2}  # what is shipped lists problems of one group


@pytest.mark.parametrize("family", CASES)
def test_every_type_is_reached_in_every_layout(family: str) -> None:
    kinds = [(dtype, None) for dtype in DTYPES] if family in SIMT else KINDS
    reached = defaultdict(set)
    for this in CASES[family].values():
        sides = this.spec.x_layouts, this.spec.out_layouts
        reached[this.dtype, this.precision].add(tuple(side == ("channels_last",) for side in sides))
    for kind in kinds:
        assert reached[kind] == set(SIDES), f"no case of {family} has {kind} in each layout"


def test_copies_of_words_and_of_single_elements_are_reached() -> None:
    """A phase GEMM chooses at run time how it reads x and writes the result."""
    at = [name for name, length in struct_fields() for _ in range(length)]
    reached = defaultdict(set)
    for this in CASES["phase_gemm"].values():
        problems_of_it = (one_past_every_edge("phase_gemm", this), whole_words(this), whole_words(this, 2))
        for problem in (*problems_of_it, *between_words(this)):
            plan = plan_for("phase_gemm", this, problem)
            defines = dict(plan.defines)
            for side in ("x", "out"):
                kind = (side, this.dtype, defines[f"{side.upper()}_CHANNELS_LAST"])
                reached[kind].add(plan.problem[at.index(f"{side}_vector")])
    for (side, dtype, last), switches in reached.items():
        never = side == "out" and dtype == "float32" and not last  # a word is one element
        pairs = side == "x" and dtype != "float32" and not last  # of positions, where phases are channels
        assert switches == ({0} if never else {0, 1, 2} if pairs else {0, 1}), (side, dtype, last)
    assert len(reached) == 2 * 3 * 2


@pytest.mark.parametrize("name", FEW_RESULTS)
def test_few_results(name: str) -> None:
    problem = FEW_RESULTS[name]
    # Of fewer positions than on a GPU, but of several boxes still; of many channels, one image.
    if name != "padding_cuts":
        extent = tuple(-(-3 * extent // 5) if extent > 16 else extent for extent in problem.extent)
        problem = dataclasses.replace(
            problem, n=1 if name == "many_channels" else min(problem.n or 1, 2), extent=extent
        )
    for dtype, precision in (("float16", None), ("float32", "tf32"), ("float32", "tf32x3")):
        with on_host("tap_columns", DEVICES[90], precision):
            check(problem, dtype, precision=precision, calls=2)


def test_columns_are_read_and_stored_in_both_ways() -> None:
    """Four elements of x at a time or single ones, and whole rows of results or single ones."""
    reached = set()
    for this in CASES["tap_columns"].values():
        for problem in (one_past_every_edge("tap_columns", this), whole_words(this)):
            plan = plan_for("tap_columns", this, problem)
            defines, p = dict(plan.defines), problem_of(plan)
            reached.add((this.dtype, "x", defines["X_CHANNELS_LAST"], p["x_vector"][0]))
            if defines["OUT_VECTOR"] > 1:
                reached.add((this.dtype, "out", defines["OUT_CHANNELS_LAST"], p["out_vector"][0]))
            reached |= {f"parts {min(2, p['tiles'][0])}", f"boxes along W {min(2, p['tiles'][2])}"}
    for kind in itertools.product(("float16", "bfloat16", "float32"), ("x", "out"), (0, 1), (0, 1)):
        assert kind in reached, kind
    assert {f"{what} {count}" for what in ("parts", "boxes along W") for count in (1, 2)} <= reached


def test_ways_to_load_and_to_store_are_reached() -> None:
    """So are, with kernel = stride, how many blocks share the weights and how many tiles a worker takes."""
    reached = set()
    for this in CASES["disjoint"].values():
        longest = smallest(this, host_disjoint.LONGEST[len(this.spec.kernel)])
        for problem in (one_past_every_edge("disjoint", this), whole_words(this), longest):
            plan = plan_for("disjoint", this, problem)
            defines, p = dict(plan.defines), problem_of(plan)
            rows = "channels" if defines["X_CHANNELS_LAST"] else "rows"
            reached |= {f"{rows} {this.dtype} {p['x_vector'][0]}", f"runs of {defines['RUN']}"}
            reached |= {f"stores {p['out_vector'][0]}", f"several parts {p['patches'][0] > 1}"}
            workers = plan.grid // p["patches"][0] // problem.groups * defines["WORKERS"]
            reached |= {f"several tiles {p['blocks'][0] > workers}", f"ahead {defines['AHEAD']}"}
    for kind in itertools.product(("rows", "channels"), ("float16", "bfloat16", "float32"), (0, 1)):
        assert " ".join(map(str, kind)) in reached, kind
    assert {f"stores {count}" for count in (1, 2, 4, 8)} <= reached
    assert {f"runs of {count}" for count in (1, 2, 4)} <= reached
    for what in ("several parts", "several tiles"):
        assert {f"{what} False", f"{what} True"} <= reached
    assert {"ahead 0", "ahead 1"} <= reached


# The families that split operands for 3xTF32, each with borders, and with several chunks of channels if it has chunks.
SPECIAL_CASES = [
    *itertools.product(("phase_gemm", "phase_wgmma"), ("dead_phases", "padding_eats_whole_taps", "odd_channels")),
    *itertools.product(("narrow_groups",), ("kb73", "dead_phases", "padding_eats_whole_taps")),
    ("disjoint", "unet_k2s2"),
    *itertools.product(("tap_columns",), ("colours", "mask")),
]


@pytest.mark.parametrize("checked", [check_infinities, check_scales, check_denormals])
@pytest.mark.parametrize(("family", "name"), SPECIAL_CASES)
def test_special_values_of_three_products(family: str, name: str, checked: Callable[..., None]) -> None:
    with on_host(family, DEVICES[90], "tf32x3"):
        checked(FIXED[name], lambda array: array, "tf32x3")


# Channels-last x that bulk tensor copies bring, and that is split where it lies.
COPIED = {
    "borders": case((1, 4, 4, 5, 6), 3, 3, padding=2, has_bias=True),
    "several_chunks": case((2, 40, 5, 6), 33, 3, stride=2, padding=1, has_bias=True),
    "two_groups": case((2, 32, 9), 24, 4, stride=2, groups=2, has_bias=True),
    "dead_phases": case((2, 12, 4, 5, 6), 7, 3, stride=2, dilation=2, has_bias=True),
}


@pytest.mark.parametrize("checked", [check_infinities, check_scales, check_denormals])
@pytest.mark.parametrize("name", COPIED)
def test_special_values_of_boxes(name: str, checked: Callable[..., None]) -> None:
    problem, plans = COPIED[name], []

    def plan(*arguments: Any) -> Plan:
        plans.append(plan_family(*arguments))
        return plans[-1]

    def last(array: np.ndarray) -> np.ndarray:
        return place(array, problem.rank, "channels_last")[0] if array.ndim > 1 else array

    with on_host("phase_wgmma", DEVICES[90], "tf32x3", plan=plan):
        checked(problem, last, "tf32x3")
    assert all(plan.maps and plan.maps[0].dtype == "float32" for plan in plans)


@pytest.mark.parametrize("checked", [check_infinities, check_scales, check_denormals])
@pytest.mark.parametrize("name", ["gan_2d", "vocoder_1d", "one_channel_volume"])
def test_special_values_of_phases_as_channels(name: str, checked: Callable[..., None]) -> None:
    with on_host("phase_gemm", DEVICES[90], "tf32x3", plan=host_phase_gemm.PhasesAsChannels(0)):
        checked(FIXED[name], lambda array: array, "tf32x3")


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("family", CASES)
def test_channels_beside_the_result_stay(family: str, dtype: str) -> None:
    c_out, kernel = 3 if family in ("few_channels", "tap_columns") else 6, 2 if family == "disjoint" else 3
    layouts = {"x_layout": "channels_last", "out_layout": "some_channels"}
    precision = "tf32" if dtype == "float32" and family not in SIMT else None
    with on_host(family, DEVICES[90], precision):
        check(case((1, 16, 3, 3, 4), c_out, kernel, stride=2, **layouts), dtype, precision=precision, calls=1)


def test_every_family_is_reached() -> None:
    assert {file.stem for file in kernel_folder().glob("*.cu")} == {
        *CASES,
        *host_gradients.RARE,
        "correlate_disjoint",
        "correlate_rows",
        "correlate_wgmma",
        "phase_rows",
        "weight_gradient_narrow",
        "weight_gradient_tma",
        "weight_gradient_wgmma",
        *without_twin(),
    }


def test_kernels_that_the_host_cannot_run() -> None:
    assert without_twin() == {}


def without_twin() -> dict[str, set[str]]:
    """Return the kernels that call functions of the PTX header which its stand-in lacks, with these functions."""
    missing = functions(kernel_folder() / "ptx.cuh") - functions(HERE / "ptx.cuh")
    kernels = {}
    for file in kernel_folder().glob("*.cu"):
        headers = [header.read_text() for header in kernel_folder().glob("*.cuh") if header.name != "ptx.cuh"]
        words = set(re.findall(r"\w+", "".join([file.read_text(), *headers])))
        if words & missing:
            kernels[file.stem] = words & missing
    return kernels


def functions(header: Path) -> set[str]:
    """Return the names of the functions that a header defines."""
    start = r"^(?:template <[^>]*>\s*)?(?:__device__ __forceinline__|inline|void)\b"
    return set(re.findall(start + r"[\w ]* (\w+)\(", header.read_text(), re.M))


# ---- the PTX header's stand-in --------------------------------------------------------------------------------------


def test_every_half_widens_exactly() -> None:
    bits = np.arange(2**16, dtype=np.uint16)
    values = np.empty(bits.size, np.float32)
    launch("twins.cu", "widen_halves", 32, {"bits": bits, "out": values, "count": bits.size})
    expected = bits.view(np.float16).astype(np.float32)
    assert np.array_equal(values, expected, equal_nan=True)
    assert np.array_equal(np.signbit(values), np.signbit(expected))


def floats_to_round() -> np.ndarray:
    """Return floats of every exponent, among them all halves, the middles between them and their neighbours."""
    halves = np.arange(2**16, dtype=np.uint16).view(np.float16)
    finite = np.sort(halves[np.isfinite(halves)].astype(np.float32))
    middles = (finite[1:] + finite[:-1]) / 2
    bits = np.random.default_rng(0).integers(0, 2**32, 100_000, dtype=np.uint32).view(np.float32)
    near = [np.nextafter(middles, np.float32(to)) for to in (-np.inf, np.inf)]
    special = np.array([65519.996, 65520, 65536, 1e9, np.inf, -np.inf, np.nan, 2**-25, 2**-26], np.float32)
    return np.concatenate([halves.astype(np.float32), middles, *near, bits, special, -special])


def test_floats_narrow_to_the_nearest_half() -> None:
    values = floats_to_round()
    bits = np.empty(values.size, np.uint16)
    launch("twins.cu", "narrow_to_halves", 32, {"values": values, "out": bits, "count": values.size})
    with np.errstate(over="ignore"):
        expected = values.astype(np.float16)
    number = ~np.isnan(values)
    assert np.array_equal(bits[number], expected[number].view(np.uint16))
    assert np.isnan(bits[~number].view(np.float16)).all()


def test_floats_round_to_tf32() -> None:
    values = floats_to_round()
    bits = np.empty(values.size, np.uint32)
    launch("twins.cu", "round_to_tf32", 32, {"values": values, "out": bits, "count": values.size})
    assert np.isnan(bits[np.isnan(values)].view(np.float32)).all()
    values, bits = values[~np.isnan(values)], bits[~np.isnan(values)]
    rounded = bits.view(np.float32)
    assert not (bits & 0x1FFF).any()
    assert np.array_equal(rounded[np.isinf(values)], values[np.isinf(values)])
    normal = np.isfinite(rounded) & (np.abs(values) >= 2.0**-126)
    fraction, exponent = np.frexp(values[normal].astype(np.float64))
    away = np.copysign(np.floor(np.abs(fraction) * 2**11 + 0.5), fraction)  # 11 significant bits, ties away from zero
    assert np.array_equal(rounded[normal], np.ldexp(away, exponent - 11).astype(np.float32))


def test_bytes_are_selected_and_words_shifted() -> None:
    rng = np.random.default_rng(0)
    words, digits = rng.integers(0, 2**32, (64, 2), dtype=np.uint32), rng.integers(0, 8, (64, 4))
    selections = (digits << 4 * np.arange(4)).sum(1).astype(np.uint32)
    arrays = {
        "words": words,
        "selections": selections,
        "out": np.empty(64, np.uint32),
        "out_shifted": np.empty(64, np.uint32),
    }
    launch("twins.cu", "select_and_shift", 64, arrays)
    assert np.array_equal(
        arrays["out"].view(np.uint8).reshape(64, 4), np.take_along_axis(words.view(np.uint8), digits, 1)
    )
    both = words.view(np.uint64)[:, 0]
    assert np.array_equal(arrays["out_shifted"], (both >> np.arange(64, dtype=np.uint64) % 32).astype(np.uint32))


def test_a_byte_is_one_of_eight() -> None:
    arrays = {"words": np.zeros(64, np.uint32), "selections": np.full(32, 0x8210, np.uint32)}
    with pytest.raises(KernelError, match="selects bytes by 00008210"):
        launch(
            "twins.cu",
            "select_and_shift",
            32,
            {**arrays, "out": np.empty(32, np.uint32), "out_2": np.empty(32, np.uint32)},
        )


# Depth of a product, and type of its operands.
PRODUCTS = {
    "tf32": (8, np.float32),
    "f16": (16, np.float16),
    "bf16": (16, DTYPES["bfloat16"]),
    "half_f16": (8, np.float16),
    "half_bf16": (8, DTYPES["bfloat16"]),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_fragments_multiply_as_matrices(name: str) -> None:
    rng = np.random.default_rng(0)
    depth, dtype = PRODUCTS[name]
    a, b = rng.standard_normal((16, depth)).astype(dtype), rng.standard_normal((depth, 8)).astype(dtype)
    c, d = rng.standard_normal((16, 8)).astype(np.float32), np.empty((16, 8), np.float32)
    words = [np.ascontiguousarray(matrix).view(np.uint32) for matrix in (a, b.T)]
    launch("twins.cu", f"multiply_{name}", 32, {"a": words[0], "b": words[1], "c": c, "out": d})
    if name == "tf32":  # the low 13 bits of an operand are ignored
        a, b = ((matrix.view(np.uint32) & 0xFFFFE000).view(np.float32) for matrix in (a, b))
    exact = c + a.astype(np.float64) @ b.astype(np.float64)
    assert np.array_equal(d, exact.astype(np.float32))


@pytest.mark.parametrize("entry", ["load_as_they_are", "load_in_pairs", "load_transposed"])
def test_matrices_are_loaded_by_rows_or_columns(entry: str) -> None:
    matrices = np.arange(4 * 8 * 8, dtype=np.uint16).reshape(4, 8, 8)
    words = np.empty((4, 32), np.uint32)
    launch("twins.cu", entry, 32, {"matrices": matrices, "out": words}, shared_bytes=512)
    seen = matrices.transpose(0, 2, 1) if entry == "load_transposed" else matrices
    assert np.array_equal(words.view(np.uint16).reshape(4, 8, 8), seen)


@pytest.mark.parametrize("entry", ["store_transposed", "store_transposed_in_pairs"])
def test_matrices_are_stored_by_columns(entry: str) -> None:
    matrices = np.arange(4 * 8 * 8, dtype=np.uint16).reshape(4, 8, 8)
    out = np.empty((4, 8, 8), np.uint16)
    launch("twins.cu", entry, 32, {"matrices": matrices.view(np.uint32), "out": out}, shared_bytes=512)
    assert np.array_equal(out, matrices.transpose(0, 2, 1))


def test_shuffles_votes_and_static_shared_memory() -> None:
    values = np.random.default_rng(0).integers(-100, 100, 96).astype(np.int32)
    out, votes = np.empty(96, np.int32), np.empty(96, np.int32)
    launch("twins.cu", "sum_of_block", 96, {"values": values, "out": out, "out_votes": votes})
    odd = np.repeat((values.reshape(3, 32) & 1).sum(1), 32)
    assert (out == values.sum()).all()
    assert np.array_equal(votes, (values > 0).sum() + odd)


UNDEFINED = "undefined behaviour|runtime error"  # the latter with HOST_DEBUG=1
MISBEHAVIOUR = {
    "a sum that overflows": UNDEFINED,
    "a shift by the width": UNDEFINED,
    "an index past a local array": UNDEFINED,
    "a pointer past a local array": "stack-buffer-overflow",
    "a local that is gone": "stack-use-after-scope",
    "a pair of words at an odd word": "misaligned address",
}


@pytest.mark.parametrize("name", MISBEHAVIOUR)
def test_misbehaviour_is_caught(name: str) -> None:
    number, out = np.full(4, list(MISBEHAVIOUR).index(name), np.int32), np.empty(1, np.int32)
    with pytest.raises(KernelError, match=MISBEHAVIOUR[name]) as caught:
        launch("twins.cu", "misbehave", 32, {"of": number, "out": out})
    assert "in kernel misbehave, block 0 of 1, thread 17 of 32" in str(caught.value)
    assert re.search(r"twins\.cu:\d+", str(caught.value)), "the report gives no line"
