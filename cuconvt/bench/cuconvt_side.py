"""This library's side: the call of each operation, and the kernel that it runs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import cupy

import cuconvt
import cuconvt.grad
from cuconvt.backends import in_3d
from cuconvt.bench.cases import Case, Precision
from cuconvt.cuda import choose_plan, device_properties
from cuconvt.cuda_gradients import choose_correlate_plan
from cuconvt.plan import Layout, Plan
from cuconvt.plan_weight_gradient import make_weight_gradient_plan

PLANNERS: dict[str, Callable[..., Plan]] = {
    "forward": choose_plan,
    "grad_input": choose_correlate_plan,
    "grad_weight": make_weight_gradient_plan,
}


def make_call(case: Case, operation: str, arrays: dict[str, Any], precision: str | None) -> Callable[..., Any]:
    """Return the call of an operation on two of x, weight and y, and for the forward bias; it may be given `out`."""
    name = f"conv_transpose{case.rank}d"
    if operation == "grad_input":
        call = partial(getattr(cuconvt.grad, f"{name}_input"), case.x, arrays["weight"], arrays["y"])
    elif operation == "grad_weight":
        call = partial(getattr(cuconvt.grad, f"{name}_weight"), arrays["x"], case.weight, arrays["y"])
    else:
        call = partial(getattr(cuconvt, name), arrays["x"], arrays["weight"], arrays.get("bias"))
    return partial(call, **case.parameters, precision=precision)


def chosen_kernel(case: Case, operation: str, arrays: dict[str, Any], precision: Precision) -> str:
    """Return the name of the plan of a call, given its operands and its result."""
    x, weight, y = (in_3d(arrays[role], case.rank) for role in ("x", "weight", "y"))
    layout = Layout.of(x, weight, arrays.get("bias"), y)
    device = device_properties(cupy.cuda.Device().id)
    return PLANNERS[operation](case.geometry, precision.dtype, layout, precision.mode, device).name
