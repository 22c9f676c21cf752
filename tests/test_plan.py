"""Planning for described devices: what a plan may depend on, that it covers the outputs, and every refusal."""

from __future__ import annotations

import dataclasses
import re
from math import gcd, prod

import pytest
from described import DEFAULT, DEVICES, channels_last, contiguous, gather_of, geometry_of, layout_of, plan_of
from fixed_cases import FIXED
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import Problem, Specialisation, case, problems

from cuconvt.compile import kernel_folder
from cuconvt.geometry import Geometry, make_geometry
from cuconvt.phases import axis_phases
from cuconvt.plan import Device, Layout, Plan, Refusal, make_plan
from cuconvt.plan_gather import plan_gather

Ints = tuple[int, ...]
Kind = tuple[str, str | None]
EXAMPLES = settings().max_examples
LIMIT = 2**31

kinds = st.sampled_from([*DEFAULT.items(), ("float32", "ieee"), ("float32", "tf32")])  # (dtype, precision)
archs = st.sampled_from(sorted(DEVICES))

# Problems whose taps do not all fit into shared memory, or are too many to unroll, with the axes that keep their halo.
FALLBACKS = {
    "kernel 7 dilation 4, 227 KB": (case((1, 8, 20, 20, 20), 8, 7, dilation=4), 90, (1, 1, 1)),
    "kernel 7 dilation 4, 99 KB": (case((1, 8, 20, 20, 20), 8, 7, dilation=4), 86, (0, 1, 1)),
    "dilation 400 along D": (case((1, 8, 9, 9, 9), 8, 3, dilation=(400, 1, 1)), 120, (0, 1, 1)),
    "dilation 4000 along H": (case((1, 8, 9, 9), 8, 3, dilation=(4000, 1)), 90, (0, 0, 1)),
    "dilation 100000 along W": (case((1, 8, 9), 8, 3, dilation=100_000), 90, (0, 0, 0)),
    "stride 16 along W": (case((1, 8, 9), 8, 3, stride=16), 80, (1, 1, 1)),
    "stride 17 along W": (case((1, 8, 9), 8, 3, stride=17), 80, (0, 0, 0)),
    "kernel 32 along W": (case((1, 8, 9, 40), 8, (1, 32)), 80, (1, 1, 1)),
    "kernel 33 along W": (case((1, 8, 9, 40), 8, (1, 33)), 80, (0, 0, 0)),
}


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUCONVT_DEBUG", raising=False)


def values(plan: Plan, name: str) -> Ints:
    defines = dict(plan.defines)
    return (defines[f"{name}_D"], defines[f"{name}_H"], defines[f"{name}_W"])


def box_of(plan: Plan) -> Ints:
    """Return the positions q of a block along D, H, W and its output channels, from the macros."""
    defines = dict(plan.defines)
    d, h, w = values(plan, "THREADS")
    return (d, h, w * defines["POSITIONS_W"], defines["THREADS_C"] * defines["CHANNELS"])


def struct_fields() -> list[tuple[str, int]]:
    """Return the names and lengths of the fields of ``struct Problem``, from the header."""
    header = (kernel_folder() / "common.cuh").read_text()
    (body,) = re.findall(r"struct Problem \{(.*?)\};", header, re.DOTALL)
    code = re.sub(r"//.*", "", body)
    declared = re.findall(r"long long ([^;]+);", code)
    assert not re.sub(r"long long [^;]+;|\s", "", code), "a field of struct Problem is not a long long"
    fields = [re.fullmatch(r"(\w+)(?:\[(\d+)\])?", name.strip()) for line in declared for name in line.split(",")]
    return [(field[1], int(field[2] or 1)) for field in fields if field]


def problem_of(plan: Plan) -> dict[str, Ints]:
    """Return the run-time parameters by the names of the header's fields."""
    rest, named = plan.problem, {}
    for name, length in struct_fields():
        named[name], rest = rest[:length], rest[length:]
    assert not rest
    return named


# ---- what a plan is ----------------------------------------------------------------------------------------------


@settings(max_examples=max(EXAMPLES // 3, 1))
@given(problem=problems(), kind=kinds, arch=archs, last=st.booleans())
def test_a_plan_is_pure(problem: Problem, kind: Kind, arch: int, last: bool) -> None:
    first = plan_of(problem, *kind, arch, last)
    make_plan.cache_clear()
    second = plan_of(problem, *kind, arch, last)
    assert first == second
    assert first is not second
    assert hash(first) == hash(second)


@given(problem=problems(), kind=kinds, arch=archs, last=st.booleans())
def test_a_plan_fits_its_device(problem: Problem, kind: Kind, arch: int, last: bool) -> None:
    plan = plan_of(problem, *kind, arch, last)
    assert 0 < plan.shared_bytes <= DEVICES[arch].shared_bytes
    assert dict(plan.defines)["SHARED_BYTES"] == plan.shared_bytes
    assert plan.block % 32 == 0
    assert plan.block <= 1024
    assert plan.block * dict(plan.defines)["MIN_BLOCKS"] * 128 <= 65536, "fewer than 128 registers a thread"
    assert values(plan, "KERNEL") == geometry_of(problem).kernel
    assert values(plan, "STRIDE") == geometry_of(problem).stride
    assert values(plan, "DILATION") == geometry_of(problem).dilation
    assert plan.cost > 0


@given(
    problem=problems(), kind=kinds, arch=archs, last=st.booleans(), scale=st.sampled_from((1, 1, 37)), data=st.data()
)
def test_batch_and_extents_do_not_change_the_defines(
    problem: Problem, kind: Kind, arch: int, last: bool, scale: int, data: st.DataObject
) -> None:
    fixed = Specialisation(
        problem.kernel,
        problem.stride,
        problem.dilation,
        problem.c_in_per_group,
        problem.c_out_per_group,
        (problem.x_layout,),
        (problem.out_layout,),
    )
    other = data.draw(problems(fixed))
    extent = tuple(extent * scale for extent in other.extent)
    changed = dataclasses.replace(other, extent=extent, groups=problem.groups)
    defines, others = (dict(plan_of(p, *kind, arch, last).defines) for p in (problem, changed))
    index64 = others.pop("INDEX64")
    assert defines.pop("INDEX64") == 0
    assert others == defines
    # Nothing here comes near 2**31 but the number of elements.
    geometry = geometry_of(changed)
    positions = max(geometry.c_in * prod(geometry.x_extent), geometry.c_out * prod(geometry.out_extent))
    assert index64 == (geometry.n * positions > LIMIT)


@given(problem=problems(), kind=kinds, arch=archs)
def test_the_grid_covers_every_output(problem: Problem, kind: Kind, arch: int) -> None:
    plan, geometry = plan_of(problem, *kind, arch), geometry_of(problem)
    tiles, box = problem_of(plan)["tiles"], box_of(plan)
    for axis in range(3):
        stride, pad = geometry.stride[axis], geometry.pad_before[axis]
        first = pad // stride  # where the kernel's first box starts
        reached = {(o + pad) // stride for o in range(geometry.out_extent[axis])}
        assert min(reached) >= first
        assert max(reached) < first + tiles[axis] * box[axis]
        assert max(reached) >= first + (tiles[axis] - 1) * box[axis], "the last box holds no output"
    assert 0 <= tiles[3] * box[3] - geometry.c_out_per_group < box[3]
    all_phases_along_w = dict(plan.defines).get("HALO_W", 1)
    phases = geometry.stride[:2] if all_phases_along_w else geometry.stride
    assert plan.grid == prod(tiles) * prod(phases) * geometry.groups * geometry.n


def test_a_plan_can_be_printed() -> None:
    plan = gather_of(FIXED["kb73"])
    text = str(plan)
    assert text.startswith(f"gather: grid {plan.grid}, block {plan.block}, shared {plan.shared_bytes} B, DTYPE=2 ")
    assert all(f" {name}={value}" in text for name, value in plan.defines)
    lost = dataclasses.replace(plan, refused=("other: no such tile", "slow: cost 2 against 1"))
    assert str(lost) == f"{text}\n  not other: no such tile\n  not slow: cost 2 against 1"


def test_debug_prints_a_plan_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("CUCONVT_DEBUG", "other,plan")
    make_plan.cache_clear()
    plan = plan_of(FIXED["kb77"])
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("cuconvt plan for Geometry(rank=3, ")
    assert str(plan) in printed.err
    plan_of(FIXED["kb77"])
    assert capsys.readouterr() == ("", "")
    monkeypatch.setenv("CUCONVT_DEBUG", "planning")
    make_plan.cache_clear()
    plan_of(FIXED["kb77"])
    assert capsys.readouterr() == ("", "")


# ---- fallbacks and refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FALLBACKS)
def test_halo_fallback(name: str) -> None:
    problem, arch, halo = FALLBACKS[name]
    plan = gather_of(problem, arch=arch)
    assert values(plan, "HALO") == halo
    assert plan.shared_bytes <= DEVICES[arch].shared_bytes


def test_no_kernel_at_all() -> None:
    geometry = geometry_of(FIXED["kb73"])
    with pytest.raises(
        ValueError, match=r"no kernel can run Geometry\(.*gather: no tile fits into 1024 bytes of shared"
    ):
        make_plan(geometry, "float32", layout_of(geometry), "ieee", Device(90, 132, 1024))


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        (case((LIMIT, 1, 1), 1, 1), f"{LIMIT} blocks are more than a launch takes ({LIMIT - 1})"),
        (case((1, 1, 1), 1, 1, stride=LIMIT), "stride and dilation * kernel must stay below 2**31 on every axis"),
        (
            case((1, 1, 1), 1, 2, dilation=LIMIT // 2),
            "stride and dilation * kernel must stay below 2**31 on every axis",
        ),
    ],
)
def test_refusals_of_gather(problem: Problem, reason: str) -> None:
    geometry = geometry_of(problem)
    assert plan_gather(geometry, "float32", layout_of(geometry), "ieee", DEVICES[90]) == Refusal("gather", reason)


def test_the_largest_grid() -> None:
    assert gather_of(case((LIMIT - 1, 1, 1), 1, 1)).grid == LIMIT - 1


# ---- 32 and 64 bits ----------------------------------------------------------------------------------------------


def line(n: int = 1, c_in: int = 1, c_out: int = 1, x: int = 1, padding: int = 0, stride: int = 1) -> Geometry:
    """Return a 1-D problem with kernel 1."""
    return make_geometry(1, (n, c_in, x), (c_in, c_out, 1), None, (stride,), ((padding, padding),), (0,), 1, (1,), None)


def index64(geometry: Geometry, **strides: Ints) -> bool:
    """Whether a plan indexes with 64 bits where all strides but the given ones are 0."""
    layout = Layout(**{"x": (0,) * 5, "weight": (0,) * 5, "bias": None, "out": (0,) * 5, **strides})
    return bool(dict(make_plan(geometry, "float32", layout, "ieee", DEVICES[90]).defines)["INDEX64"])


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("array", ["x", "out"])
def test_index64_follows_the_span_of_x_and_out(array: str, sign: int) -> None:
    geometry = line(n=2)
    assert not index64(geometry, **{array: (sign * (LIMIT - 1), 1, 1, 1, 1)})
    assert index64(geometry, **{array: (sign * LIMIT, 1, 1, 1, 1)})
    # The span is the sum over axes, whichever way each runs.
    geometry = line(n=2, c_in=2, c_out=2)
    assert not index64(geometry, **{array: (LIMIT // 2, sign * (LIMIT // 2 - 1), 1, 1, 1)})
    assert index64(geometry, **{array: (LIMIT // 2, sign * (LIMIT // 2), 1, 1, 1)})


def test_index64_follows_the_span_of_the_weight() -> None:
    geometry = line(c_in=2)
    assert not index64(geometry, weight=(LIMIT - 1, 1, 1, 1, 1))
    assert index64(geometry, weight=(LIMIT, 1, 1, 1, 1))
    assert index64(geometry, weight=(-LIMIT, 1, 1, 1, 1))
    assert not index64(line(), weight=(LIMIT, 1, 1, 1, 1)), "an axis of extent 1 has no span"


def test_index64_follows_the_extents() -> None:
    # Strides of 0: the arrays have one element in memory, yet positions count up to the extent.
    crop = 2**30
    assert not index64(line(x=LIMIT - 1, padding=crop - 1000))
    assert index64(line(x=LIMIT, padding=crop - 1000))
    assert index64(line(x=LIMIT // 2 + 1, stride=2))
    assert not index64(line(x=LIMIT // 2 - 1000, stride=2))


@given(below=st.integers(-20, 5000), padding=st.integers(0, 9), stride=st.integers(1, 5))
def test_index32_holds_every_position_that_a_block_computes(below: int, padding: int, stride: int) -> None:
    geometry = line(x=(LIMIT - below) // stride, padding=padding, stride=stride)
    layout = Layout(x=(0,) * 5, weight=(0,) * 5, bias=None, out=(0,) * 5)
    plan = make_plan(geometry, "float32", layout, "ieee", DEVICES[90])
    reached = padding // stride + problem_of(plan)["tiles"][2] * box_of(plan)[2]  # one past the last box
    if not dict(plan.defines)["INDEX64"]:
        assert reached * stride < LIMIT
    if below > 4000:
        assert not dict(plan.defines)["INDEX64"], "64 bits long before they are needed"


# ---- what a kernel is given --------------------------------------------------------------------------------------


def test_the_problem_is_the_struct_of_the_header() -> None:
    parameters = ((4, 5, 6), ((1, 2), (3, 4), (5, 6)), (0, 1, 2), 3, (2, 3, 1), None)
    geometry = make_geometry(3, (2, 6, 11, 12, 13), (6, 7, 3, 4, 5), (21,), *parameters)
    layout = Layout(x=(1, 2, 3, 4, 5), weight=(6, 7, 8, 9, 10), bias=11, out=(12, 13, 14, 15, 16))
    plan = make_plan(geometry, "float32", layout, "ieee", DEVICES[90])
    fields, box = problem_of(plan), box_of(plan)
    named = {
        "n": (2,),
        "groups": (3,),
        "c_in": (2,),
        "c_out": (7,),
        "x_extent": (11, 12, 13),
        "out_extent": geometry.out_extent,
        "pad": (1, 3, 5),
        "x_stride": (1, 2, 3, 4, 5),
        "weight_stride": (6, 7, 8, 9, 10),
        "bias_stride": (11,),
        "out_stride": (12, 13, 14, 15, 16),
        "tiles": (*fields["tiles"][:3], -(-7 // box[3])),
    }
    assert {name: fields[name] for name in named} == named


def test_the_problem_is_passed_as_one_struct() -> None:
    pytest.importorskip("cupy")
    from cuconvt.cuda import problem_struct

    plan = plan_of(FIXED["kb77"])
    struct = problem_struct(plan)
    assert struct.nbytes == 8 * sum(length for _, length in struct_fields())
    assert struct.view("i8").tolist() == list(plan.problem)


@given(kernel=st.integers(1, 9), stride=st.integers(1, 9), dilation=st.integers(1, 9))
def test_taps_of_a_phase_are_evenly_spaced(kernel: int, stride: int, dilation: int) -> None:
    """Kernels walk a phase by its first tap, STEP and HOP of the header's ``Axis`` instead of a list."""
    step, hop = stride // gcd(stride, dilation), dilation // gcd(stride, dilation)
    for phase in axis_phases(kernel, stride, dilation):
        assert list(phase.taps) == list(range(phase.taps[0], kernel, step)) if phase.taps else True
        assert all(back == phase.back[0] + j * hop for j, back in enumerate(phase.back))
        assert len(phase.taps) <= -(-kernel // step)
        assert bool(phase.taps) == any(k * dilation % stride == phase.residue for k in range(kernel))


@pytest.mark.parametrize(
    ("strides", "expected"),
    [
        (contiguous((2, 8, 3, 4, 5)), False),
        (channels_last((2, 8, 3, 4, 5)), True),
        (channels_last((2, 8, 1, 1, 5)), True),
        (channels_last((2, 1, 3, 4, 5)), False),  # one channel: the same memory as contiguous
        (contiguous((2, 8, 1, 1, 1)), False),  # one position: the same memory as channels-last
        ((480, -1, 160, 40, 8), True),
        ((480, 1, 160, 40, -1), False),
        ((480, 1, 160, 40, 0), True),
        ((480, 2, 160, 40, 16), False),  # every second channel
        ((480, 0, 20, 5, 1), False),  # one channel for all
    ],
)
def test_channels_last_is_read_off_the_strides(strides: Ints, expected: bool) -> None:
    other = (1, 7, 7, 7, 7)
    assert Layout(x=strides, weight=other, bias=None, out=other).x_channels_last == expected
    assert Layout(x=other, weight=other, bias=None, out=strides).out_channels_last == expected


def test_channels_last_selects_the_order_of_visits() -> None:
    for last in (False, True):
        defines = dict(plan_of(FIXED["kb61"], last=last).defines)
        assert (defines["X_CHANNELS_LAST"], defines["OUT_CHANNELS_LAST"]) == (last, last)
