"""What compiled kernels need: no spilled register, no stack, and no more registers and shared memory than planned for.

By default a part of the specialisations is compiled. Those that the planner picks (`tests/picked.py`), and all those of
one kernel, which takes about 20 minutes on a core:

    RESOURCES=picked python -m pytest tests/test_resources.py
    RESOURCES=full python -m pytest tests/test_resources.py -k phase_gemm
"""

from __future__ import annotations

import os

import pytest
from described import DEFAULT, DEVICES, HOPPER, gather_of, geometry_of, layout_of
from fixed_cases import FIXED
from picked import picked
from ptxas import Usage, measure_all, parse
from shipped import of_every_tile, some_of
from strategies import DTYPES, Problem, case

from cuconvt import compile as compiler
from cuconvt import plan_weight_gradient_tma as tma
from cuconvt import plan_weight_gradient_wgmma as wgmma
from cuconvt.plan import Plan
from cuconvt.plan_correlate_narrow import plan_correlate_narrow
from cuconvt.plan_narrow_groups import plan_narrow_groups
from cuconvt.plan_phase_gemm import plan_phase_gemm
from cuconvt.plan_weight_gradient import make_weight_gradient_plan

nvrtc = pytest.importorskip("cupy", reason="CuPy, which finds NVRTC, is not installed").cuda.nvrtc

FAMILIES = sorted(file.stem for file in compiler.kernel_folder().glob("*.cu"))
PLANNED = [(family, arch) for family in FAMILIES for arch in DEVICES if family not in HOPPER or arch == 90]
ASKED_FOR = os.environ.get("RESOURCES", "some")
# Plans of a kernel that are compiled by default, others for each architecture.
SOME, OTHERWISE = {"gather": 4, "few_channels": 4}, 2
LIKE_80 = 86, 89  # for which kernels are compiled much alike: half as many do, or those of one of the two
REGISTERS = 65536  # of a multiprocessor
REGISTER_UNIT = 8  # of a thread


def problems_with(plan: Plan, usage: Usage, shared_limit: int) -> list[str]:
    """Return in words what is wrong with the resources of a specialisation."""
    wrong = []
    if usage.spilled_bytes:
        wrong.append(f"spills {usage.spilled_bytes} bytes")
    if usage.stack_bytes:
        wrong.append(f"has a stack frame of {usage.stack_bytes} bytes")
    if usage.serialized:
        wrong.append(f"has {usage.serialized} places where wgmmas wait for each other")
    blocks = dict(plan.defines)["MIN_BLOCKS"]
    registers = -(-usage.registers // REGISTER_UNIT) * REGISTER_UNIT * plan.block * blocks
    if registers > REGISTERS:
        wrong.append(f"needs {registers} registers for {blocks} blocks of {plan.block} threads")
    if plan.shared_bytes + usage.static_shared_bytes > shared_limit:
        wrong.append(f"needs {plan.shared_bytes} + {usage.static_shared_bytes} bytes of shared memory")
    return wrong


def assert_sound(plan: Plan, arch: int) -> None:
    """Compile one plan, and test its resources."""
    ((_, usage),) = measure_all([(plan.kernel, compiler.architecture(arch), plan.defines)]).items()
    assert isinstance(usage, dict), usage
    assert not problems_with(plan, Usage(**usage), DEVICES[arch].shared_bytes)


def skip_if_unknown(arch: int) -> None:
    if arch not in nvrtc.getSupportedArchs():
        pytest.skip(f"NVRTC {'.'.join(map(str, nvrtc.getVersion()))} does not know sm_{arch}")


def check(kind: str, family: str, arch: int, plans: tuple[Plan, ...], cache: pytest.Cache) -> None:
    """Compile plans that are not in the cache of their kind yet, and test the resources of all."""
    skip_if_unknown(arch)
    assert plans
    jobs = {(family, compiler.architecture(arch), plan.defines): plan for plan in plans}
    keys = {job: compiler._key(f"{job[0]}.cu", *job[1:]) for job in jobs}
    store = f"cuconvt/{kind}-{family}-{arch}"
    known = {key: usage for key, usage in cache.get(store, {}).items() if key in keys.values()}
    for job, usage in measure_all(job for job in jobs if keys[job] not in known).items():
        known[keys[job]] = usage
    cache.set(store, {key: usage for key, usage in known.items() if isinstance(usage, dict)})
    failures = []
    for job, plan in jobs.items():
        usage = known[keys[job]]
        wrong = [usage] if isinstance(usage, str) else problems_with(plan, Usage(**usage), DEVICES[arch].shared_bytes)
        failures += [f"{', '.join(wrong)}: {plan}"] if wrong else []
    assert not failures, f"{len(failures)} of {len(jobs)} for sm_{arch}:\n" + "\n".join(failures)


@pytest.mark.parametrize(("family", "arch"), [(family, arch) for family, arch in PLANNED if arch != LIKE_80[1]])
def test_some_tiles(family: str, arch: int, pytestconfig: pytest.Config) -> None:
    count = SOME.get(family, OTHERWISE) // (2 if arch in LIKE_80 else 1)
    check("some", family, arch, some_of(family, arch, count), pytestconfig.cache)


@pytest.mark.skipif(ASKED_FOR != "picked", reason="compiling all that the planner picks takes long: RESOURCES=picked")
@pytest.mark.parametrize(("family", "arch"), PLANNED)
def test_picked_tiles(family: str, arch: int, pytestconfig: pytest.Config) -> None:
    check("picked", family, arch, picked(arch).get(family, ()), pytestconfig.cache)


@pytest.mark.skipif(ASKED_FOR != "full", reason="compiling every tile takes long: RESOURCES=full")
@pytest.mark.parametrize(("family", "arch"), PLANNED)
def test_every_tile(family: str, arch: int, pytestconfig: pytest.Config) -> None:
    check("every", family, arch, of_every_tile(family, arch), pytestconfig.cache)


# float64 accumulators of several phases along W have spilled registers.
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernel", [2, 4, 7])
def test_many_accumulators_do_not_spill(kernel: int, dtype: str) -> None:
    plan = gather_of(case((1, 9, 5, 5, 5), 48, kernel, min(kernel, 4)), dtype)
    assert_sound(plan, 90)


# Stores of two groups have spilled registers where no tap reaches many outputs, and four blocks of them on Blackwell.
@pytest.mark.parametrize("arch", [arch for arch in DEVICES if arch != LIKE_80[1]])
def test_two_narrow_groups_do_not_spill(arch: int) -> None:
    skip_if_unknown(arch)
    for kernel, stride in ((2, 3), (3, 1), (3, 2), (4, 2)):
        geometry = geometry_of(case((1, 16, 9, 9, 9), 16, kernel, stride, groups=2))
        plan = plan_narrow_groups(geometry, "float16", layout_of(geometry, True), None, DEVICES[arch])
        assert isinstance(plan, Plan)
        assert dict(plan.defines)["GROUPS"] == 2
        assert_sound(plan, arch)


# More than eight phases along W have spilled registers on data-centre Blackwell.
@pytest.mark.parametrize(
    ("problem", "last"),
    [(case((1, 32, 9), 16, 20, 10), False), (case((1, 64, 9, 9), 8, (3, 32), (2, 16)), True)],
    ids=["by-ten", "by-sixteen"],
)
def test_many_phases_do_not_spill(problem: Problem, last: bool) -> None:
    skip_if_unknown(100)
    geometry = geometry_of(problem)
    plan = plan_phase_gemm(geometry, "float16", layout_of(geometry, last), None, DEVICES[100])
    assert isinstance(plan, Plan)
    assert_sound(plan, 100)


# Compilers for newer architectures have crashed on how rows of one channel are staged, and spilled registers where a
# thread copies many channels.
@pytest.mark.parametrize(
    ("problem", "dtype"),
    [
        (case((2, 56, 8, 8), 1, 9, 4, 4, 3), "float64"),
        (case((2, 48, 96, 96, 96), 24, 3), "float32"),
        (case((2, 256, 8), 128, 8, 4, 2), "float32"),
    ],
    ids=["9x9x1", "3x3x3x48", "8x256"],
)
def test_rows_of_a_weight_gradient_on_newer_architectures(problem: Problem, dtype: str) -> None:
    skip_if_unknown(100)
    geometry = geometry_of(problem)
    plan = make_weight_gradient_plan(geometry, dtype, layout_of(geometry), DEFAULT[dtype], DEVICES[100])
    assert_sound(plan, 100)


# Storing the sums of many columns has spilled registers of workers.
@pytest.mark.parametrize(
    "problem", [case((2, 512, 8, 8), 256, 2, 2), case((2, 256, 64), 128, 10, 5, 3, 1)], ids=["2x2", "10"]
)
def test_wide_weight_gradients_do_not_spill(problem: Problem) -> None:
    geometry = geometry_of(problem)
    for family in (wgmma.plan_weight_gradient_wgmma, tma.plan_weight_gradient_tma):
        plan = family(geometry, "float32", layout_of(geometry), "tf32", DEVICES[90])
        assert isinstance(plan, Plan)
        assert_sound(plan, 90)


# With room for all rows of a tile, the second pass has taken more shared memory than a block may declare.
@pytest.mark.parametrize(
    ("tile", "kernel"),
    [
        (wgmma.Tile(3, 128, 1, 3, 3, 2, 1), (1, 3, 3)),
        (wgmma.Tile(1, 48, 1, 5, 5, 1, 2), (1, 5, 5)),
        (wgmma.Tile(1, 128, 1, 1, 10, 1, 2), (1, 1, 10)),
        (wgmma.Tile(2, 88, 3, 2, 2, 4, 1), (3, 5, 7)),
    ],
    ids=["6 tiles of 3 taps", "4 of 5", "2 of 10", "10 of 2"],
)
def test_sums_of_large_tiles_have_room(tile: wgmma.Tile, kernel: tuple[int, int, int]) -> None:
    geometry = geometry_of(case((2, 32, 4, 16, 64), 256, kernel))
    plan = wgmma.plan_weight_gradient_wgmma(geometry, "bfloat16", layout_of(geometry), None, DEVICES[90], tile)
    assert isinstance(plan, Plan)
    assert_sound(plan, 90)


# Sums of 3xTF32 have spilled in tiles of narrow groups.
@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize(
    "problem",
    [
        case((2, 64, 16, 16), 64, 3, 2, 1, groups=4),
        case((2, 64, 64), 64, 5, 4, groups=4),
        case((2, 32, 8, 8, 8), 64, 3, 2, 1, groups=4),
    ],
    ids=["3x3", "5", "3x3x3"],
)
def test_sums_of_three_products_in_narrow_groups_do_not_spill(problem: Problem, arch: int) -> None:
    skip_if_unknown(arch)
    geometry = geometry_of(problem)
    for last in (False, True):
        layout = layout_of(geometry, last=last)
        plan = plan_narrow_groups(geometry, "float32", layout, "tf32x3", DEVICES[arch])
        assert isinstance(plan, Plan)
        assert_sound(plan, arch)


@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("precision", ["tf32", "tf32x3"])
def test_narrow_groups_that_split_cells_do_not_spill(precision: str, arch: int) -> None:
    skip_if_unknown(arch)
    geometry = geometry_of(case((2, 32, 8, 16, 64), 32, 3, 2, 1, groups=4))
    sixteen = geometry_of(case((2, 32, 8, 16, 64), 32, 3, 2, 1, groups=2))
    for problem, last in ((geometry, False), (geometry, precision == "tf32x3"), (sixteen, True)):
        plan = plan_narrow_groups(problem, "float32", layout_of(problem, last=last), precision, DEVICES[arch])
        assert isinstance(plan, Plan)
        assert plan.tile.split or arch < 90
        assert_sound(plan, arch)


# Sums of many slices and channels have spilled, and weights that the compiler keeps from plane to plane.
@pytest.mark.parametrize("arch", [80, 90, 100])
def test_narrow_correlations_of_two_eights_do_not_spill(arch: int) -> None:
    skip_if_unknown(arch)
    for problem, dtype, precision in (
        (case((2, 16, 9, 9, 9), 8, 4, 2, 1), "float32", "tf32"),
        (case((2, 8, 9, 9, 9), 16, 3, padding=1), "float32", "tf32"),
        (case((2, 16, 9, 9), 16, (3, 16), (1, 8)), "float16", None),
    ):
        geometry = geometry_of(problem)
        plan = plan_correlate_narrow(geometry, dtype, layout_of(geometry), precision, DEVICES[arch])
        assert isinstance(plan, Plan)
        assert_sound(plan, arch)


# Stagers that compute offsets in 64 bits have spilled registers, and then workers, which have fewer there.
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize(
    "problem",
    [case((65536, 128, 32, 32, 32), 80, 3, padding=1), case((65536, 64, 32, 32, 32), 64, 4, 2, 1)],
    ids=["3x3x3", "4x4x4"],
)
def test_weight_gradients_of_huge_arrays_do_not_spill(problem: Problem, dtype: str) -> None:
    geometry = geometry_of(problem)
    precision = "tf32" if dtype == "float32" else None
    plan = wgmma.plan_weight_gradient_wgmma(geometry, dtype, layout_of(geometry), precision, DEVICES[90])
    assert isinstance(plan, Plan)
    assert dict(plan.defines)["INDEX64"]
    assert_sound(plan, 90)


# ptxas refuses a product whose sums leave a thread too few of the registers that it starts with.
def test_the_widest_products_of_three_blocks_compile() -> None:
    geometry = geometry_of(case((2, 512, 64), 256, 16, 8, 4))
    layout = layout_of(geometry, last=True)
    of_three = [t for t in wgmma.tiles(wgmma.Work(wgmma.Shape.of(geometry, layout, 2, False))) if t.min_blocks == 3]
    tile = max(of_three, key=lambda tile: tile.tiles_in)
    plan = wgmma.plan_weight_gradient_wgmma(geometry, "float16", layout, None, DEVICES[90], tile)
    assert isinstance(plan, Plan)
    assert_sound(plan, 90)


def test_a_log_is_understood() -> None:
    log = """ptxas info    : Compiling entry function 'gather_pack' for 'sm_90'
ptxas info    : Function properties for gather_pack
ptxas         .     8 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 20 registers, used 0 barriers
ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to ...
ptxas info    : Compiling entry function 'gather' for 'sm_90'
ptxas info    : Function properties for gather
ptxas         .     0 bytes stack frame, 12 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 84 registers, used 1 barriers, 1024 bytes smem
"""
    assert parse(log, "gather") == Usage(84, stack_bytes=8, spilled_bytes=20, static_shared_bytes=1024, serialized=1)
    assert len(problems_with(gather_of(FIXED["kb72"]), Usage(255, 8, 20, 1024, 1), 1024)) == 5
