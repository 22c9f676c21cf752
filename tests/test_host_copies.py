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

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))

# Which operation a kernel serves, and the macros that say how it copies: of x, and of the result.
KERNELS = {
    "phase_gemm": ("forward", ("COPY_BYTES", None)),
    "phase_wgmma": ("forward", ("COPY_BYTES", None)),
    "correlate_gemm": ("input", (None, "COPY_BYTES")),
    "correlate_wgmma": ("input", (None, "COPY_BYTES")),
    "weight_gradient_gemm": ("weight", ("X_COPY_BYTES", "Y_COPY_BYTES")),
}


@pytest.mark.parametrize(("dtype", "precision"), [("bfloat16", None), ("float32", "tf32"), ("float32", "tf32x3")])
@pytest.mark.parametrize("name", RAGGED)
@pytest.mark.parametrize("family", KERNELS)
def test_copies_of_every_width(family: str, name: str, dtype: str, precision: str | None) -> None:
    problem, starts = RAGGED[name]
    operation, macros = KERNELS[family]
    geometry = geometry_of(problem)
    defines = dict(plan_family(family, geometry, dtype, layout_of(geometry, True), precision, DEVICES[90]).defines)
    for macro, start in zip(macros, starts, strict=True):
        copied = start * (2 if dtype == "float32" else 1)
        if macro is not None:
            assert defines.get(macro) == (copied if copied in (8, 4) else None)
    if operation == "forward":
        with on_host(family, DEVICES[90], precision):
            harness.check(problem, dtype, precision=precision, calls=1)
    else:
        with gradients_on_host(family, DEVICES[90], precision):
            gradients.check(operation, problem, dtype, precision=precision, calls=1)


@pytest.mark.parametrize(("dtype", "precision"), [("bfloat16", None), ("float32", "tf32"), ("float32", "tf32x3")])
@pytest.mark.parametrize("name", RAGGED)
@pytest.mark.parametrize("family", KERNELS)
def test_arrays_that_start_between_words(family: str, name: str, dtype: str, precision: str | None) -> None:
    """Of these nothing is copied, or in float32 single elements."""
    aligned, _ = RAGGED[name]
    operation, macros = KERNELS[family]
    geometry = geometry_of(aligned)
    layout = dataclasses.replace(layout_of(geometry, True), x_aligned=False, out_aligned=False)
    defines = dict(plan_family(family, geometry, dtype, layout, precision, DEVICES[90]).defines)
    single = 4 if family == "weight_gradient_gemm" and dtype == "float32" else None
    assert all(defines.get(macro) == single for macro in macros if macro is not None)
    if operation == "forward":
        problem = dataclasses.replace(aligned, x_layout="misaligned_last")
        with on_host(family, DEVICES[90], precision):
            harness.check(problem, dtype, precision=precision, calls=1)
    else:
        problem = dataclasses.replace(aligned, x_layout="misaligned_last", out_layout="misaligned_last")
        with gradients_on_host(family, DEVICES[90], precision):
            gradients.check(operation, problem, dtype, precision=precision, calls=1)
