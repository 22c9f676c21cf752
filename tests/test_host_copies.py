"""Channels-last arrays in every kernel that copies them: 16, 8 or 4 bytes at a time, or one element by one."""

from __future__ import annotations

import dataclasses

import gradients
import harness
import pytest
from described import DEVICES, geometry_of, layout_of
from fixed_cases import RAGGED
from host.backend import on_host, plan_family
from host.build import why_not
from host_gradients import gradients_on_host
from strategies import Problem

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))

# Which operation a kernel serves, and the macros that say how it copies: of x, and of the result.
KERNELS = {
    "phase_gemm": ("forward", ("COPY_BYTES", None)),
    "phase_wgmma": ("forward", ("COPY_BYTES", None)),
    "correlate_gemm": ("input", (None, "COPY_BYTES")),
    "correlate_wgmma": ("input", (None, "COPY_BYTES")),
    "weight_gradient_gemm": ("weight", ("X_COPY_BYTES", "Y_COPY_BYTES")),
}


KINDS = (("bfloat16", None), ("float32", "tf32"), ("float32", "tf32x3"))
FAMILIES = pytest.mark.parametrize("family", KERNELS)
# TF32 copies as 3xTF32 does, so that some problems do for it.
COPIED = pytest.mark.parametrize(
    ("name", "dtype", "precision"),
    [(name, *kind) for kind in KINDS for name in RAGGED if kind[1] != "tf32" or name in ("groups_by_eight", "by_four")],
)
# Of arrays that start between words nothing is copied, however far apart positions and groups are.
LOADED = pytest.mark.parametrize(
    ("name", "dtype", "precision"),
    [
        (name, *kind)
        for kind in KINDS
        for name in ("groups_by_eight", "by_two")
        if kind[1] != "tf32" or name == "by_two"
    ],
)


def macros_of(family: str, problem: Problem, dtype: str, precision: str | None, aligned: bool) -> dict[int, int | None]:
    """Return what a plan says of x (0) and of the result (1), of those of the two that the kernel copies."""
    geometry = geometry_of(problem)
    layout = dataclasses.replace(layout_of(geometry, True), x_aligned=aligned, out_aligned=aligned)
    defines = dict(plan_family(family, geometry, dtype, layout, precision, DEVICES[90]).defines)
    return {side: defines.get(macro) for side, macro in enumerate(KERNELS[family][1]) if macro is not None}


def check(family: str, problem: Problem, dtype: str, precision: str | None) -> None:
    operation, _ = KERNELS[family]
    if operation == "forward":
        with on_host(family, DEVICES[90], precision):
            harness.check(problem, dtype, precision=precision, calls=1)
    else:
        with gradients_on_host(family, DEVICES[90], precision):
            gradients.check(operation, problem, dtype, precision=precision, calls=1)


PLANNED = pytest.mark.parametrize(("name", "dtype", "precision"), [(name, *kind) for kind in KINDS for name in RAGGED])


@PLANNED
@FAMILIES
def test_how_arrays_are_copied(family: str, name: str, dtype: str, precision: str | None) -> None:
    """By as many bytes as what they start at the multiples of, or single elements where they start between words."""
    problem, starts = RAGGED[name]
    for side, found in macros_of(family, problem, dtype, precision, aligned=True).items():
        copied = starts[side] * (2 if dtype == "float32" else 1)
        assert found == (copied if copied in (8, 4) else None)
    single = 4 if family == "weight_gradient_gemm" and dtype == "float32" else None
    assert set(macros_of(family, problem, dtype, precision, aligned=False).values()) == {single}


@COPIED
@FAMILIES
def test_copies_of_every_width(family: str, name: str, dtype: str, precision: str | None) -> None:
    check(family, RAGGED[name][0], dtype, precision)


@LOADED
@FAMILIES
def test_arrays_that_start_between_words(family: str, name: str, dtype: str, precision: str | None) -> None:
    """Of these nothing is copied, or in float32 single elements."""
    problem, _ = RAGGED[name]
    is_forward = KERNELS[family][0] == "forward"
    out_layout = problem.out_layout if is_forward else "misaligned_last"  # y of a gradient is read
    check(family, dataclasses.replace(problem, x_layout="misaligned_last", out_layout=out_layout), dtype, precision)
