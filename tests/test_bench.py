"""The benchmark: counts, parsing, exact results, tables, JSON and pictures without a GPU; a small run with one."""

from __future__ import annotations

import importlib.util
import itertools
import json
import math
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import changed
import ml_dtypes
import numpy as np
import pytest
from bare import link_numpy, run_python
from described import DEVICES
from hypothesis import given, settings
from hypothesis import strategies as st

import cuconvt
import cuconvt.grad
from cuconvt.__main__ import main
from cuconvt.bench import command
from cuconvt.bench.cases import (
    CASES,
    GRADIENTS,
    KERNELBENCH_3D,
    OPERANDS,
    PRECISIONS,
    RESULT,
    Case,
    landing,
    parse_case,
    unique,
)
from cuconvt.bench.command import _hand_over, progress
from cuconvt.bench.floats import rounded, widened
from cuconvt.bench.plot import write_plots
from cuconvt.bench.reference import (
    Patch,
    compare,
    exact,
    make_input_patches,
    make_patches,
    make_weight_patches,
    spans,
)
from cuconvt.bench.report import BEGIN, END, insert, readme_table, table
from cuconvt.bench.result import Ceilings, Cell, Mean, Result, Times, load, means, save

if TYPE_CHECKING:
    from cuconvt.bench.measure import Settings

ROOT = Path(__file__).parent.parent
small = st.integers(1, 4)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Draw a possible case of a few thousand multiply-adds."""
    rank = draw(st.integers(1, 3))
    axes = [draw(st.tuples(st.integers(1, 5), small, small, st.integers(0, 3), small)) for _ in range(rank)]
    extent, kernel, stride, padding, dilation = zip(*axes, strict=True)
    output_padding = tuple(draw(st.integers(0, max(s, d) - 1)) for s, d in zip(stride, dilation, strict=True))
    # Padding may not cut off everything.
    full = [(i - 1) * s + d * (k - 1) + 1 for i, k, s, d in zip(extent, kernel, stride, dilation, strict=True)]
    padding = tuple(min(p, (f + e - 1) // 2) for p, f, e in zip(padding, full, output_padding, strict=True))
    groups = draw(st.integers(1, 2))
    x = (draw(small), groups * draw(st.integers(1, 3)), *extent)
    c_out = groups * draw(st.integers(1, 3))
    return Case("drawn", x, c_out, kernel, stride, padding, output_padding, groups, dilation, draw(st.booleans()))


def draw_arrays(case: Case) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    rng = np.random.default_rng(0)
    bias = rng.standard_normal(case.c_out) if case.bias else None
    return rng.standard_normal(case.x), rng.standard_normal(case.weight), bias


def compute(case: Case, operation: str, arrays: dict[str, np.ndarray]) -> np.ndarray:
    """Call cuconvt as a user would: the benchmark's own way to its functions needs CuPy."""
    name = f"conv_transpose{case.rank}d"
    if operation == "grad_input":
        return getattr(cuconvt.grad, f"{name}_input")(case.x, arrays["weight"], arrays["y"], **case.parameters)
    if operation == "grad_weight":
        return getattr(cuconvt.grad, f"{name}_weight")(arrays["x"], case.weight, arrays["y"], **case.parameters)
    return getattr(cuconvt, name)(arrays["x"], arrays["weight"], **case.parameters)


def draw_operands(case: Case, operation: str) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {role: rng.standard_normal(case.shapes[role]) for role in OPERANDS[operation]}


def gradient_patches(case: Case, operation: str, arrays: dict[str, np.ndarray], *limit: int) -> list[Patch]:
    make = make_input_patches if operation == "grad_input" else make_weight_patches
    return make(np, case, *(arrays[role] for role in sorted(arrays, key=["x", "y", "weight"].index)), *limit)


def convolve(case: Case, x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None) -> np.ndarray:
    return getattr(cuconvt, f"conv_transpose{case.rank}d")(x, weight, bias, **case.parameters)


# Counts


@given(cases())
def test_flops_are_twice_the_multiply_adds_that_land(case: Case) -> None:
    pairs = 0
    for i, tap in itertools.product(np.ndindex(*case.x[2:]), np.ndindex(*case.kernel)):
        reached = np.multiply(i, case.stride) + np.multiply(tap, case.dilation) - case.padding
        pairs += bool(((reached >= 0) & (reached < case.out[2:])).all())
    n, c_in = case.x[:2]
    assert case.flops == 2 * pairs * n * c_in * case.c_out // case.groups


@given(cases())
def test_flops_are_what_a_result_of_ones_adds_up_to(case: Case) -> None:
    ones = convolve(case, np.ones(case.x), np.ones(case.weight), None)
    assert ones.shape == case.out
    assert 2 * ones.sum() == case.flops


@given(cases(), st.sampled_from([2, 4, 8]))
def test_bytes_count_every_array_once(case: Case, itemsize: int) -> None:
    x, weight, bias = draw_arrays(case)
    arrays = [x, weight, convolve(case, x, weight, bias), *([] if bias is None else [bias])]
    assert case.bytes(itemsize) == itemsize * sum(array.size for array in arrays)
    for operation in GRADIENTS:
        assert case.bytes(itemsize, operation) == itemsize * sum(array.size for array in arrays[:3])


@given(cases())
def test_terms_are_what_a_whole_result_of_ones_adds_up_to(case: Case) -> None:
    whole = replace(case, padding=(0,) * case.rank)
    for operation, result in RESULT.items():
        ones = {role: np.ones(shape) for role, shape in whole.shapes.items() if role != result}
        largest = compute(whole, operation, ones).max()
        assert largest <= whole.terms(operation)
        if operation != "forward":  # where outputs overlap partly, no output may have all terms
            assert largest == whole.terms(operation)


def test_landing_counts_nothing_outside() -> None:
    assert landing(i=1, o=1, kernel=1, stride=1, padding=0, dilation=1) == 1
    assert landing(i=4, o=2, kernel=1, stride=1, padding=1, dilation=1) == 2
    assert landing(i=2, o=1, kernel=3, stride=4, padding=3, dilation=1) == 0


@pytest.mark.parametrize(
    ("name", "out", "gigaflops"),
    [
        ("kb61", (8, 48, 66, 66, 66), 260.92),
        ("kb77", (16, 64, 33, 65, 65), 26.64),
        ("depthwise_k4s2", (4, 64, 64, 128, 128), 4.16),
        ("dcgan2d_k4s2", (128, 128, 32, 32), 32.25),
        ("hifigan1d_k16s8", (16, 256, 2048), 17.15),
    ],
)
def test_known_cases(name: str, out: tuple[int, ...], gigaflops: float) -> None:
    assert CASES[name].out == out
    assert CASES[name].flops / 1e9 == pytest.approx(gigaflops, abs=0.01)


def test_only_tiny_is_small() -> None:
    assert [name for name, case in CASES.items() if case.is_small] == ["tiny"]
    assert set(KERNELBENCH_3D) < set(CASES)


# Parsing


def test_names_and_parameters_parse() -> None:
    assert parse_case("kb72") is CASES["kb72"]
    text = "8x32x12x24x48:32:k3x5x7:s2:p1x2x3:op1:g4:d1"
    assert replace(parse_case(text), name="kb72") == CASES["kb72"]
    assert replace(parse_case("mine=1x16x8x8x8:16:bias:op1:p1:s2:k3"), name="tiny") == CASES["tiny"]
    assert parse_case("mine=1x2x3:4:k5").name == "mine"
    assert parse_case("1x2x3:4:k5") == Case("1x2x3:4:k5", (1, 2, 3), 4, (5,), (1,), (0,), (0,), 1, (1,))


def test_the_lists_of_layers_are_of_cases() -> None:
    names = ("layers", "more_layers", "chosen_layers", "random_layers", "drawn_layers", "last_layers")
    files = [ROOT / f"benchmarks/{name}.txt" for name in names]
    texts = [text for file in files for text in file.read_text().split()]
    assert len(unique([parse_case(text) for text in texts])) == len(texts) > 200


def test_random_layers_are_what_is_drawn(capsys: pytest.CaptureFixture[str]) -> None:
    script = script_of_benchmarks("draw_layers")
    script.main(["11", "38"])
    first = capsys.readouterr().out
    script.main(["12", "19"])
    second = re.sub("^r", "q", capsys.readouterr().out, flags=re.MULTILINE)
    assert first + second == (ROOT / "benchmarks" / "random_layers.txt").read_text()


def test_what_a_change_makes_different(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder in ("cuconvt", "kernels"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    planner = tmp_path / "cuconvt" / "plan_few_channels.py"
    text = planner.read_text()
    assert "THREADS = 128 " in text
    arguments = [str(tmp_path), "--cases", "mine=1x16x9x9:16:k3:s2:g16", "--precision", "ieee"]
    assert changed.main(arguments) == 0
    assert capsys.readouterr().out == "Of 6 plans differ: none; 0 more in machine code, 0 in cost\n"

    planner.write_text(text.replace("THREADS = 128 ", "THREADS = 64 "))
    assert changed.main(arguments) == 1
    *listed, summary, forward, gradients = capsys.readouterr().out.splitlines()
    assert len(listed) == 4
    assert re.fullmatch(r"forward mine ieee NCDHW sm_90: few_channels: .*MIN_BLOCKS=\d+ to MIN_BLOCKS=\d+.*", listed[0])
    assert summary == "Of 6 plans differ: 2 forward, 2 grad_input; 0 more in machine code, 0 in cost"
    assert forward == "python -m cuconvt bench --cases mine=1x16x9x9:16:k3:s2:g16 --precision ieee"
    assert gradients == forward.replace("bench", "bench --grad")


def test_machine_code_is_what_is_executed(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cupy", reason="CuPy, which finds NVRTC, is not installed")
    from cuconvt import compile as compiler

    texts = dict(compiler.sources_of("few_channels.cu"))
    codes = []
    for shared in ("", "// A comment.\nconstexpr int UNUSED = 1;\n"):
        for own in ("", "#define DTYPE BFLOAT16\n"):
            other = {"common.cuh": texts["common.cuh"] + shared, "few_channels.cu": own + texts["few_channels.cu"]}
            monkeypatch.setattr(compiler, "sources_of", lambda _, other=other: {**texts, **other})
            codes.append(changed.machine_code(compiler.compile_kernel("few_channels.cu", "sm_80").code))
    assert codes[:2] == codes[2:]
    assert codes[0] != codes[1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kb99", r"must be one of kb58, .*, or \[NAME=\]X:C_OUT"),
        ("8x48:24:k3", "must be one of"),
        ("1x2x3x4x5x6:24:k3", "must be one of"),
        ("1x2x3:four:k3", "must be one of"),
        ("1x2x3:4", "lacks the kernel"),
        ("1x2x3:4:k3:z2", "none of k, s, p, op, g, d, bias: 'z2'"),
        ("1x2x3:4:k", "none of .*: 'k'"),
        ("1x2x3:4:k3:k3", "gives k twice"),
        ("1x2x3:4:k3:bias:bias", "gives bias twice"),
        ("1x2x3:4:k3x3", "one value or 1, one an axis, for k, got 2"),
        ("1x2x3:4:k3:g3", "groups that divide C_out = 4, got 3"),
        ("1x2x3:4:k3:g0", "groups that divide C_out = 4, got 0"),
        ("1x2x3:4:k3:g4", "impossible: groups must divide the channels of x"),
        ("1x2x3:4:k3:s2:op2", "impossible: output_padding must be smaller"),
        ("1x2x3:4:k3:p9", "impossible: the output extents must be at least 1"),
        ("1x2x3:0:k3", "impossible: weight must have no empty axis"),
        ("0x2x3:4:k3", "extents of at least 1"),
    ],
)
def test_parsing_says_what_is_wrong(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_case(text)


def test_repeated_cases_are_dropped_and_ambiguous_names_refused() -> None:
    assert unique([CASES["tiny"], CASES["kb58"], CASES["tiny"]]) == [CASES["tiny"], CASES["kb58"]]
    with pytest.raises(ValueError, match="two cases have the name 'tiny'"):
        unique([CASES["tiny"], parse_case("tiny=1x2x3:4:k5")])


# Exact results


@given(cases())
def test_exact_agrees_with_numpys_backend(case: Case) -> None:
    x, weight, bias = draw_arrays(case)
    patches = make_patches(np, case, x, weight, bias)
    assert [patch.sample for patch in patches] == list(range(case.x[0]))
    accuracy = compare(np, convolve(case, x, weight, bias), patches)
    assert accuracy.finite
    assert accuracy.scaled < PRECISIONS["float64"].tolerance


@given(cases(), st.data())
@settings(max_examples=100)
def test_exact_of_some_planes_is_that_of_all(case: Case, data: st.DataObject) -> None:
    x, weight, bias = draw_arrays(case)
    planes = case.out[2]
    first = data.draw(st.integers(0, planes - 1))
    last = data.draw(st.integers(first + 1, planes))
    whole = exact(np, case, x[0], weight, bias, (0, planes))
    part = exact(np, case, x[0], weight, bias, (first, last))
    np.testing.assert_allclose(part, whole[:, first:last], rtol=1e-12, atol=1e-12)


def test_large_results_are_compared_at_both_ends_and_in_the_middle() -> None:
    case = parse_case("4x1x100x10:1:k1")
    assert spans(case.out, 4000) == [(sample, (0, 100)) for sample in range(4)]
    thirds = [(0, 10), (45, 55), (90, 100)]
    assert spans(case.out, 600) == [(sample, span) for sample in (0, 3) for span in thirds]
    assert spans(case.out, 3999) == [(0, (0, 100)), (3, (0, 100))]
    assert spans((1, 1, 100, 10), 300) == [(0, span) for span in thirds]


@pytest.mark.parametrize("operation", GRADIENTS)
@given(case=cases())
@settings(max_examples=50)
def test_exact_gradients_agree_with_numpys_backend(operation: str, case: Case) -> None:
    arrays = draw_operands(case, operation)
    accuracy = compare(np, compute(case, operation, arrays), gradient_patches(case, operation, arrays))
    assert accuracy.finite
    assert accuracy.scaled <= PRECISIONS["float64"].allowed(case, operation)


@pytest.mark.parametrize("operation", GRADIENTS)
@given(case=cases(), limit=st.integers(1, 200))
@settings(max_examples=50)
def test_large_gradients_are_computed_in_slabs(operation: str, case: Case, limit: int) -> None:
    arrays = draw_operands(case, operation)
    (whole, *_), patches = (gradient_patches(case, operation, arrays, *most) for most in ((), (limit,)))
    np.testing.assert_allclose(patches[0].value, whole.value[:, slice(*patches[0].span)], rtol=1e-12, atol=1e-12)
    assert compare(np, compute(case, operation, arrays), patches).scaled <= PRECISIONS["float64"].allowed(
        case, operation
    )


@pytest.mark.parametrize("operation", GRADIENTS)
@pytest.mark.parametrize("name", ["ieee", "tf32", "bfloat16"])
def test_one_missing_sample_of_a_large_gradient_is_found(operation: str, name: str) -> None:
    case = parse_case("4x3x40x40:5:k3")
    arrays = draw_operands(case, operation)
    patches = gradient_patches(case, operation, arrays)
    arrays["y"][0] = 0
    accuracy = compare(np, compute(case, operation, arrays), patches)
    assert accuracy.scaled > 8 * PRECISIONS[name].allowed(case, operation)


def test_more_terms_are_allowed_a_larger_error() -> None:
    small, large = (parse_case(f"{n}x3x40x40:5:k3") for n in (1, 100))
    for precision in PRECISIONS.values():
        for case in (small, large):
            assert precision.allowed(case, "forward") == precision.tolerance
            assert precision.allowed(case, "grad_input") > precision.root_tolerance
        assert precision.allowed(large, "grad_weight") > precision.allowed(small, "grad_weight")
        assert precision.allowed(large, "grad_input") == precision.allowed(small, "grad_input")


@pytest.mark.parametrize("value", [1e-6, math.nan, math.inf])
def test_one_wrong_element_is_found(value: float) -> None:
    case = parse_case("2x3x4x5:3:k3:s2")
    x, weight, bias = draw_arrays(case)
    result = convolve(case, x, weight, bias)
    patches = make_patches(np, case, x, weight, bias)
    result[1, 2, -1, -1] += value
    accuracy = compare(np, result, patches)
    assert accuracy.scaled > PRECISIONS["float64"].tolerance
    assert accuracy.error >= value or math.isnan(value)
    assert accuracy.finite == math.isfinite(value)


def test_an_output_without_terms_must_be_exact() -> None:
    case = parse_case("1x1x2:1:k1:s2:op1")
    x, weight, _ = draw_arrays(case)
    result = convolve(case, x, weight, None)
    patches = make_patches(np, case, x, weight, None)
    assert compare(np, result, patches).scaled == 0
    result[0, 0, 1] = 1e-30
    assert compare(np, result, patches).scaled > 1


def test_the_smallest_numbers_of_float16_are_coarse() -> None:
    case = parse_case("1x1x1:1:k1:s1")
    x, weight = np.full((1, 1, 1), 2.0**-12), np.full((1, 1, 1), 1.4 * 2.0**-12)
    patches = make_patches(np, case, x, weight, None)
    rounded = convolve(case, x, weight, None).astype(np.float16).astype(np.float64)
    precision = PRECISIONS["float16"]
    limits = (precision.rounding, precision.smallest)
    assert compare(np, rounded, patches, precision.rounding).scaled > precision.tolerance
    assert compare(np, rounded, patches, *limits).scaled <= precision.tolerance
    assert compare(np, rounded + precision.smallest, patches, *limits).scaled > precision.tolerance


@pytest.mark.parametrize("operation", GRADIENTS)
@pytest.mark.parametrize("name", ["tf32", "float16", "bfloat16"])
@pytest.mark.parametrize("text", ["4x40x24x24:40:k3", "16x48x80:48:k5:s2", "24x24x3x4x5:24:k3"])
def test_a_gradient_may_be_rounded_and_not_twice_as_wrong(text: str, name: str, operation: str) -> None:
    case, precision = parse_case(text), PRECISIONS[name]
    drawn = {role: array.astype(np.float32) for role, array in draw_operands(case, operation).items()}
    arrays = {role: widened(rounded(array, precision.dtype)) for role, array in drawn.items()}
    patches = gradient_patches(case, operation, arrays)
    exact = np.stack([patch.value for patch in patches])
    operands = {role: to_tf32(array) for role, array in arrays.items()} if name == "tf32" else arrays
    computed = np.stack([patch.value for patch in gradient_patches(case, operation, operands)]).astype(np.float32)
    result = widened(rounded(computed, precision.dtype)).astype(np.float64)

    def scaled(result: np.ndarray) -> float:
        return compare(np, result, patches, precision.rounding, precision.smallest).scaled

    allowed = precision.allowed(case, operation)
    assert scaled(result) <= allowed
    assert scaled(exact + 2 * (result - exact)) > allowed


def to_tf32(array: np.ndarray) -> np.ndarray:
    """Round to 11 significant bits; a tie goes away from zero."""
    return ((array.view(np.uint32) + np.uint32(0x1000)) & np.uint32(0xFFFFE000)).view(np.float32)


def test_rounding_alone_of_large_elements_is_no_error() -> None:
    """A sum of equal terms is as large as their sum of magnitudes, and its rounding far above the root of squares'."""
    case, precision = parse_case("1x1x128:1:k1"), PRECISIONS["bfloat16"]
    x = np.ones(case.x, np.float32)
    y = np.full(case.out, 1.0 + 2.0**-8, np.float32)  # 128.5 in all
    patches = gradient_patches(case, "grad_weight", {"x": x, "y": y})
    result = widened(rounded(patches[0].value[None].astype(np.float32), "bfloat16"))
    assert abs(result - patches[0].value).max() > precision.allowed(case, "grad_weight") * patches[0].magnitude.max()
    assert compare(np, result, patches, precision.rounding).scaled <= precision.allowed(case, "grad_weight")


def test_rounding_is_to_nearest_even() -> None:
    values = np.random.default_rng(0).standard_normal(10_000).astype(np.float32)
    halfway = (np.arange(0x3F80, 0x3F90, dtype=np.uint32) << 16 | 0x8000).view(np.float32)
    for array in (values, halfway):
        expected = array.astype(ml_dtypes.bfloat16)
        result = rounded(array, "bfloat16")
        assert result.dtype == expected.dtype
        np.testing.assert_array_equal(result.view(np.uint16), expected.view(np.uint16))
        np.testing.assert_array_equal(widened(result), expected.astype(np.float32))
    np.testing.assert_array_equal(rounded(values, "float16"), values.astype(np.float16))
    assert widened(values) is values


# Results, tables and pictures


def make_result() -> Result:
    """A run that never was: two cases, two precisions, two layouts, one wrong cell, one without PyTorch."""
    ceilings = Ceilings(4e12, {"float32": 5e13, "tf32": 3e14, "bfloat16": 7e14})
    cells = []
    for name, precision, layout in itertools.product(("kb61", "tiny"), ("tf32x3", "bfloat16"), ("NCDHW", "NDHWC")):
        case, p = CASES[name], PRECISIONS[precision]
        moved = case.bytes(p.itemsize)
        floor = ceilings.floor_ms(case.flops, moved, p.ceiling, p.products)
        cell = Cell(name, precision, layout, case.flops, moved, floor, kernel="gather", error=1e-6, scaled_error=1e-7)
        cells.append(
            replace(
                cell,
                time=Times(2 * floor, 1.9 * floor, 2.2 * floor, 20),
                extra_bytes=1_500_000,
                host_us=12.5 if case.is_small else None,
                torch_error=2e-6,
                torch_times={
                    "NCDHW": Times(9 * floor, 8 * floor, 10 * floor, 20),
                    "NDHWC": Times(4 * floor, 3.8 * floor, 4.4 * floor, 20),
                },
                torch_extra_bytes=0,
                torch_host_us=54.0 if case.is_small else None,
            )
        )
    cells[3] = replace(
        cells[3], status="wrong", problem="largest error", error=math.inf, time=None, torch_times={}, torch_error=None
    )
    cells[5] = replace(cells[5], torch_times={}, torch_error=None, torch_problem="NCDHW: not implemented")
    machine = {
        "gpu": "Made-up GPU",
        "torch": "2.11",
        "commit": "0123456789abcdef",
        "dirty": True,
        "date": "2030-01-02T03",
    }
    return Result(machine, ceilings, cells)


def test_times_are_medians_with_quartiles() -> None:
    assert Times.of([4.0, 1.0, 2.0, 5.0, 3.0]) == Times(3.0, 2.0, 4.0, 5)
    assert Times.of([4.0]) == Times(4.0, 4.0, 4.0, 1)


def test_floor_is_the_larger_bound() -> None:
    ceilings = Ceilings(1e12, {"tf32": 1e14})
    assert ceilings.floor_ms(10**11, 10**10, "tf32", 1) == pytest.approx(10)
    assert ceilings.floor_ms(10**12, 10**9, "tf32", 3) == pytest.approx(30)
    assert ceilings.bound(10**11, 10**10, "tf32", 1) == "memory"
    assert ceilings.bound(10**12, 10**9, "tf32", 3) == "arithmetic"


def test_figures_follow_from_the_measured_ones() -> None:
    cell = make_result().cells[0]
    assert cell.over_floor == pytest.approx(2)
    assert cell.ratio == pytest.approx(2)
    assert cell.ratio_band == pytest.approx((3.8 / 2.2, 4.4 / 1.9))
    assert cell.error_ratio == pytest.approx(0.5)
    wrong = make_result().cells[3]
    assert (wrong.over_floor, wrong.ratio, wrong.ratio_band, wrong.error_ratio) == (None,) * 4


def test_means_are_geometric_and_by_precision_and_layout() -> None:
    cells = make_result().cells[:2]
    faster = replace(cells[0], case="tiny", time=replace(cells[0].time, median=cells[0].time.median / 4))
    found = means([*cells, faster])
    assert found["forward", "tf32x3", "NCDHW"] == (Mean(pytest.approx(2), 1), Mean(pytest.approx(4), 2))
    assert found["forward", "tf32x3", "NDHWC"] == (Mean(pytest.approx(2), 1), Mean(pytest.approx(2), 1))
    assert means(make_result().cells[3:4]) == {("forward", "bfloat16", "NDHWC"): (None, None)}


def test_result_survives_json(tmp_path: Path) -> None:
    result = make_result()
    save(result, tmp_path / "result.json")
    assert load(tmp_path / "result.json") == result
    content = json.loads((tmp_path / "result.json").read_text(), parse_constant=pytest.fail)
    assert content["cells"][0]["ratio"] == pytest.approx(2)
    assert content["geometric_means"][0]["kernelbench_3d"]["cells"] == 1


def test_foreign_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text('{"cells": []}')
    with pytest.raises(ValueError, match=r"other\.json must be a result of"):
        load(tmp_path / "other.json")


def test_table_shows_every_cell_and_no_time_of_a_wrong_one() -> None:
    lines = table(make_result()).splitlines()
    assert lines[0] == "Made-up GPU, torch 2.11, commit 0123456789ab with changes, 2030-01-02"
    rows = [line for line in lines if line.startswith(("kb61 ", "tiny ")) and "gather" in line]
    assert len(rows) == 8
    assert [("WRONG" in row) for row in rows] == [False] * 3 + [True] + [False] * 4
    assert "kb61 bfloat16 NDHWC: largest error" in lines
    assert "tiny tf32x3 NDHWC: torch: NCDHW: not implemented" in lines
    assert "tiny tf32x3 NCDHW: host time a call 12.5 us, torch 54.0 us" in lines
    ends = {row.rindex("1.5") for row in rows}
    assert len(ends) == 1, "the columns are not aligned"
    assert lines[-1].split() == ["forward", "bfloat16", "NDHWC", "2.00", "(1)"]


def test_gradients_have_rows_and_means_of_their_own(tmp_path: Path) -> None:
    result = make_result()
    for operation, slower in zip(GRADIENTS, (1, 4), strict=True):
        for cell in result.cells[:1]:
            time = replace(cell.time, median=slower * cell.time.median)
            result.cells.append(replace(cell, operation=operation, bound="memory", time=time))
    save(result, tmp_path / "run.json")
    assert load(tmp_path / "run.json") == result
    content = json.loads((tmp_path / "run.json").read_text())
    assert [mean["operation"] for mean in content["geometric_means"]][-2:] == list(GRADIENTS)
    lines = table(result).splitlines()
    assert len([line for line in lines if line.startswith("kb61 grad_weight  tf32x3") and " memory " in line]) == 1
    assert lines[-1].split() == ["grad_weight", "tf32x3", "NCDHW", "0.50", "(1)", "0.50", "(1)"]
    lines = readme_table(result).splitlines()
    assert "| geometric mean, KernelBench 3-D, grad_input | 2.00x |  |" in lines
    assert "| geometric mean, all, grad_weight | 0.50x |  |" in lines
    assert sum(line.startswith("| kb61") for line in lines) == 3


def test_records_from_before_the_gradients_are_forwards(tmp_path: Path) -> None:
    save(make_result(), tmp_path / "run.json")
    content = json.loads((tmp_path / "run.json").read_text())
    for cell in content["cells"]:
        del cell["operation"], cell["bound"]
    (tmp_path / "run.json").write_text(json.dumps(content))
    assert load(tmp_path / "run.json") == make_result()


def test_table_of_a_run_cut_short() -> None:
    assert "case" in table(Result({}, make_result().ceilings, []))


def test_a_run_that_is_terminated_keeps_what_it_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As by `timeout`, or by a batch system at the end of its time."""
    measure = pytest.importorskip("cuconvt.bench.measure", reason="CuPy is not installed")

    def terminated(settings: Any, begun: Any, done: Any) -> None:
        begun(make_result())
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)

    for name in ("require_dtypes", "require_gpu", "require_cublas", "_torch_side"):
        monkeypatch.setattr(command, name, lambda *_: None)
    monkeypatch.setattr(measure, "measure", terminated)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit, match="bench: terminated"):
        main(["bench", "--cases", "tiny", "--json", str(tmp_path / "run.json")])
    assert signal.getsignal(signal.SIGTERM) == before
    assert load(tmp_path / "run.json") == make_result()
    assert make_result().cells[0].case in capsys.readouterr().out


def test_readme_table_shows_the_slower_layout() -> None:
    result = make_result()
    slow = replace(result.cells[0], layout="NDHWC", time=Times(9.0, 9.0, 9.0, 5))
    result.cells[1] = slow
    lines = readme_table(result).splitlines()
    kb61 = next(line for line in lines if line.startswith("| kb61"))
    assert kb61.startswith("| kb61 | 9.000 (")
    assert kb61.endswith("| WRONG |")
    assert len({line.count("|") for line in lines if line.startswith("|")}) == 1


def script_of_benchmarks(name: str) -> ModuleType:
    """Import a script, which is not a module of the package."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    script = importlib.util.module_from_spec(spec)
    sys.modules[name] = script  # where dataclasses look for it
    spec.loader.exec_module(script)
    return script


def make_readme_table(arguments: list[str]) -> None:
    script_of_benchmarks("make_readme_table").main(arguments)


def test_the_readme_shows_the_recorded_run(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text((ROOT / "README.md").read_text())
    make_readme_table(["--readme", str(readme)])
    assert readme.read_text() == (ROOT / "README.md").read_text()


def test_readme_is_rewritten_between_its_markers_and_stays(tmp_path: Path) -> None:
    save(make_result(), tmp_path / "run.json")
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    arguments = ["--json", str(tmp_path / "run.json"), "--readme", str(readme)]
    make_readme_table(arguments)
    once = readme.read_text()
    assert once.startswith(f"before\n{BEGIN}\n")
    assert once.endswith(f"|\n{END}\nafter\n")
    assert "old" not in once
    make_readme_table(arguments)
    assert readme.read_text() == once


@pytest.mark.parametrize(
    "text", ["", BEGIN, END, f"{END}{BEGIN}", f"{BEGIN}{BEGIN}{END}", f"{BEGIN}{END}{END}", f"{END}{BEGIN}{END}"]
)
def test_text_without_both_markers_once_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="each once"):
        insert(text, "table")


def test_pictures_are_written(tmp_path: Path) -> None:
    image = pytest.importorskip("matplotlib.image", reason="pictures need matplotlib")
    paths = write_plots(make_result(), tmp_path / "run.png")
    assert [path.name for path in paths] == ["run-roofline.png", "run-bars.png"]
    for path in paths:
        picture = image.imread(path)[..., :3]
        assert min(picture.shape[:2]) >= 600
        assert picture.std() > 0.05


def test_no_bars_without_pytorch(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures need matplotlib")
    result = make_result()
    result.cells[:] = [replace(cell, torch_times={}) for cell in result.cells]
    assert [path.name for path in write_plots(result, tmp_path / "run.png")] == ["run-roofline.png"]


# Measuring, with NumPy and PyTorch on the CPU in place of the GPU


class FakeTimer:
    def interleaved(self, ours: dict, theirs: dict, repeat: int | None) -> dict:
        for run in (*ours.values(), *theirs.values()):
            run()
        return dict.fromkeys([*ours, *theirs], Times(1.0, 1.0, 1.0, 1))


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> tuple[ModuleType, Settings]:
    """Return `cuconvt.bench.measure` over NumPy arrays, and settings without PyTorch."""
    pytest.importorskip("cupy")
    from cuconvt.bench import cuconvt_side, measure

    device = SimpleNamespace(id=0, mem_info=(2**34, 2**34))
    fake = SimpleNamespace(cuda=SimpleNamespace(Device=lambda: device))
    for name in ("moveaxis", "ascontiguousarray", "full", "maximum", "isfinite", "square", "zeros", "matmul"):
        setattr(fake, name, getattr(np, name))
    for module in (measure, cuconvt_side):
        monkeypatch.setattr(module, "cupy", fake)
    monkeypatch.setattr(cuconvt_side, "device_properties", lambda index: DEVICES[90])
    monkeypatch.setattr(measure, "extra_bytes", lambda run: 0)
    monkeypatch.setattr(measure, "host_us", lambda run: 1.0)
    return measure, measure.Settings(list(OPERANDS), [], [], ["NCDHW", "NDHWC"], None, None, 0)


def measure_on_cpu(measure: ModuleType, settings: Settings, case: Case, operation: str, name: str) -> list[Cell]:
    result = Result({}, Ceilings(4e12, dict.fromkeys(("float32", "tf32", "float16", "bfloat16", "float64"), 1e14)))
    rng, precision = np.random.default_rng(0), PRECISIONS[name]
    cells = measure._measure_dtype(settings, FakeTimer(), result, rng, case, operation, precision.dtype, [precision])
    return list(cells)


@pytest.mark.parametrize("name", PRECISIONS)
@pytest.mark.parametrize("text", ["2x4x3x4x5:6:k3:s2:p1:op1:g2:bias", "3x4x5x6:2:k2x3:d2", "2x3x7:4:k4:s3:p1"])
@pytest.mark.parametrize("operation", OPERANDS)
def test_every_operation_is_checked_in_every_layout(on_cpu: Any, operation: str, text: str, name: str) -> None:
    case = parse_case(text)
    cells = measure_on_cpu(*on_cpu, case, operation, name)
    assert [(cell.layout, cell.status, cell.problem) for cell in cells] == [("NCDHW", "ok", ""), ("NDHWC", "ok", "")]
    for cell in cells:
        assert (cell.operation, cell.flops) == (operation, case.flops)
        assert cell.bytes == case.bytes(PRECISIONS[name].itemsize, operation)
        assert cell.kernel
        assert cell.time
        assert cell.bound


@pytest.mark.parametrize("operation", OPERANDS)
def test_a_wrong_result_is_not_timed(on_cpu: Any, operation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    measure, settings = on_cpu

    def make_call(*arguments: Any) -> Callable[..., Any]:
        call = right(*arguments)

        def run(out: Any = None) -> Any:
            out = call(out=out)
            out.flat[-1] *= 1.5
            return out

        return run

    right = measure.cuconvt_side.make_call
    monkeypatch.setattr(measure.cuconvt_side, "make_call", make_call)
    for cell in measure_on_cpu(measure, settings, parse_case("2x4x3x4x5:6:k3:s2:p1"), operation, "ieee"):
        assert (cell.status, cell.time) == ("wrong", None)
        assert re.match("largest error .* of the (sum of magnitudes|root of the sum of squares), allowed", cell.problem)


@pytest.mark.parametrize("operation", OPERANDS)
def test_a_launch_that_fails_costs_its_cell_alone(on_cpu: Any, operation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    measure, settings = on_cpu

    def make_call(case: Case, operation: str, arrays: dict[str, Any], *rest: Any) -> Callable[..., Any]:
        if any(array.strides[1] == array.itemsize for role, array in arrays.items() if role in ("x", "y")):
            raise measure.LAUNCH_ERRORS[1](700)
        return right(case, operation, arrays, *rest)

    right = measure.cuconvt_side.make_call
    monkeypatch.setattr(measure.cuconvt_side, "make_call", make_call)
    rows, last = measure_on_cpu(measure, settings, parse_case("2x4x3x4x5:6:k3:s2:p1"), operation, "ieee")
    assert (rows.layout, rows.status, rows.problem) == ("NCDHW", "ok", "")
    assert rows.time
    assert (last.layout, last.status, last.time) == ("NDHWC", "failed", None)
    assert last.problem.startswith("CUDARuntimeError: cudaErrorIllegalAddress")


def test_a_failure_before_or_while_timing_costs_its_cells_alone(on_cpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    measure, settings = on_cpu

    def fail(*arguments: Any) -> None:
        raise measure.LAUNCH_ERRORS[1](719)

    for patched, name, problem in (
        (FakeTimer, "interleaved", "while it was timed: CUDARuntimeError: cudaErrorLaunchFailure"),
        (measure, "_draw", "inputs and exact result: cudaErrorLaunchFailure"),
    ):
        monkeypatch.setattr(patched, name, fail)
        cells = measure_on_cpu(measure, settings, parse_case("2x4x3x4x5:6:k3:s2:p1"), "forward", "ieee")
        assert [(cell.layout, cell.status, cell.time) for cell in cells] == [
            ("NCDHW", "failed", None),
            ("NDHWC", "failed", None),
        ]
        assert all(cell.problem.startswith(problem) for cell in cells)


@pytest.mark.parametrize("name", ["ieee", "bfloat16", "float64"])
@pytest.mark.parametrize("text", ["2x4x3x4x5:6:k3:s2:p1:op1:g2", "3x4x5x6:2:k2x3:d2", "2x3x7:4:k4:s3:p1"])
@pytest.mark.parametrize("operation", OPERANDS)
def test_pytorch_computes_the_same(
    on_cpu: Any, operation: str, text: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    from cuconvt.bench import torch_side

    measure, settings = on_cpu
    monkeypatch.setattr(torch_side, "cupy", np)
    monkeypatch.setattr(torch_side, "extra_bytes", lambda run: 0)
    case, precision = parse_case(text), PRECISIONS[name]
    settings = replace(settings, torch_side=torch_side)
    for cell in measure_on_cpu(measure, settings, case, operation, name):
        assert cell.torch_problem == ""
        assert set(cell.torch_times) == {"NCDHW", "NDHWC"}
        assert cell.torch_error <= 64 * (precision.rounding + precision.tolerance)


# The command


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cases", "kb99"], "a case must be one of kb58"),
        (["--precision", "float8"], "invalid choice: 'float8'"),
        (["--repeat", "0"], "must be a number of at least 1, got '0'"),
        (["--seed", "-5"], "argument --seed: must be a number of at least 0, got '-5'"),
        (["--json", ""], "argument --json: must name a file, got ''"),
        (["--json", "new/"], "argument --json: must name a file, got 'new/'"),
        (["--plot", "."], "argument --plot: must end in .png, got '.'"),
        (["--plot", "run.svg"], "argument --plot: must end in .png, got 'run.svg'"),
    ],
)
def test_bad_options_are_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["bench", *arguments])
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--json", "nowhere/run.json"], r"nowhere/run\.json cannot be written: No such file"),
        (["--json", "folder"], "folder cannot be written: Is a directory"),
        (["--json", "file/run.json"], r"file/run\.json cannot be written: Not a directory"),
        (["--plot", "nowhere/run.png"], r"nowhere/run-roofline\.png cannot be written: No such file"),
        (["--json", "run.json", "--plot", "run.png"], r"run-bars\.png cannot be written: Is a directory"),
    ],
)
def test_what_cannot_be_written_is_noticed_before_measuring(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "run-bars.png").mkdir()
    (tmp_path / "file").write_text("as before")
    with pytest.raises(SystemExit, match=f"^bench: {message}"):
        main(["bench", *arguments])
    assert {path.name for path in tmp_path.iterdir()} == {"folder", "run-bars.png", "file"}
    assert (tmp_path / "file").read_text() == "as before"


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes into any folder")
def test_a_folder_without_permission_is_noticed_before_measuring(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(SystemExit, match=r"run\.json cannot be written: Permission denied"):
            main(["bench", "--json", str(tmp_path / "run.json")])
    finally:
        tmp_path.chmod(0o700)


def test_an_older_record_stays_until_there_is_a_new_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    (tmp_path / "run.json").write_text("older")
    with pytest.raises(SystemExit, match="needs an NVIDIA GPU"):
        main(["bench", "--json", str(tmp_path / "run.json")])
    assert (tmp_path / "run.json").read_text() == "older"


def test_the_table_is_printed_though_a_file_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(IsADirectoryError):
        _hand_over(make_result(), tmp_path, None)
    assert table(make_result()) in capsys.readouterr().out


def test_refuses_without_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(
        SystemExit, match=r"bench: measuring needs an NVIDIA GPU and CuPy: .* -m pip install 'cupy-cuda1"
    ):
        main(["bench", "--cases", "tiny"])


def test_refuses_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    cupy = pytest.importorskip("cupy")
    monkeypatch.setattr(cupy.cuda.runtime, "getDeviceCount", lambda: 0)
    with pytest.raises(SystemExit, match="bench: measuring needs an NVIDIA GPU, and the driver lists none"):
        main(["bench", "--cases", "tiny"])


def test_pictures_without_matplotlib_are_refused_before_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit, match="bench: --plot needs matplotlib: pip install matplotlib"):
        main(["bench", "--plot", "run.png"])


@pytest.mark.parametrize("command", [["bench"], ["tune", "--cases", "tiny"]])
def test_bfloat16_without_ml_dtypes_is_refused_before_measuring(
    command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(SystemExit, match=f"^{command[0]}: bfloat16 arrays need ml_dtypes: pip install ml_dtypes"):
        main(command)
    with pytest.raises(SystemExit, match="needs an NVIDIA GPU"):
        main([*command, "--precision", "float16"])


def test_numpy_alone_shows_the_help(tmp_path: Path) -> None:
    link_numpy(tmp_path)
    text = run_python("-m", "cuconvt", "bench", "--help", cwd=ROOT, paths=[tmp_path], site=False)
    assert "hifigan1d_k16s8" in text


@pytest.mark.parametrize("command", ["bench", "tune"])
def test_the_help_explains_cases_and_precisions(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main([command, "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert f"of {', '.join(PRECISIONS)};" in text
    assert "default: tf32x3 tf32 float16 bfloat16" in text
    for meaning in ("k is the kernel size", "s the stride", "p the padding", "op the output padding", "g the groups"):
        assert meaning in text
    assert "d the dilation" in text


@pytest.mark.parametrize("has_tqdm", [True, False])
def test_progress_counts_cells(
    has_tqdm: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if has_tqdm:
        pytest.importorskip("tqdm")
    else:
        monkeypatch.setitem(sys.modules, "tqdm", None)
    with progress(2) as done:
        for cell in make_result().cells[:2]:
            done(cell)
    assert "2/2" in capsys.readouterr().err


@pytest.mark.gpu
def test_a_small_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.json"
    main(["bench", "--cases", "tiny", "--precision", "tf32x3", "bfloat16", "--repeat", "3", "--json", str(file)])
    result = load(file)
    assert result.machine["gpu"]
    assert result.machine["cuconvt"] == cuconvt.__version__
    assert result.ceilings.copy > 1e10
    assert result.ceilings.matmul["bfloat16"] > result.ceilings.matmul["float32"] > 1e11
    keys = [(cell.precision, cell.layout) for cell in result.cells]
    assert keys == list(itertools.product(("tf32x3", "bfloat16"), ("NCDHW", "NDHWC")))
    for cell in result.cells:
        assert (cell.case, cell.status, cell.problem) == ("tiny", "ok", "")
        assert cell.kernel
        assert cell.time.repeats == 3
        assert 0 < cell.floor_ms < cell.time.median < 10
        assert 0 < cell.host_us < 1e4
        assert 0 <= cell.scaled_error <= PRECISIONS[cell.precision].tolerance
        assert 0 <= cell.extra_bytes < 2**22
        if result.machine["torch"]:
            assert set(cell.torch_times) == {"NCDHW", "NDHWC"}
            assert cell.torch_host_us > 0
    assert "tiny" in capsys.readouterr().out


@pytest.mark.gpu
def test_a_small_run_of_the_gradients(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.json"
    cases = ["tiny", "2x8x20x24:4:k3:s2:g4"]
    names = ["tf32x3", "bfloat16"]
    main(["bench", "--grad", "--cases", *cases, "--precision", *names, "--repeat", "3", "--json", str(file)])
    result = load(file)
    keys = {(cell.case, cell.operation, cell.precision, cell.layout) for cell in result.cells}
    assert keys == set(itertools.product(cases, GRADIENTS, names, ("NCDHW", "NDHWC")))
    assert len(keys) == len(result.cells)
    for cell in result.cells:
        assert (cell.status, cell.problem) == ("ok", "")
        assert cell.kernel
        assert cell.time.repeats == 3
        assert 0 < cell.floor_ms < cell.time.median < 10
        assert 0 <= cell.scaled_error <= PRECISIONS[cell.precision].allowed(parse_case(cell.case), cell.operation)
        if result.machine["torch"]:
            assert set(cell.torch_times) == {"NCDHW", "NDHWC"}
            assert cell.torch_problem == ""
    assert "tiny grad_weight" in capsys.readouterr().out
