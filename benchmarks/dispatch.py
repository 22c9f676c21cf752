"""Time the ways to make a differentiable operator for PyTorch, on the host: ``python benchmarks/dispatch.py``.

The kernel allocates the result and does nothing else, so what differs is the way to it. Microseconds of one call with
tensors that require grad, and without gradients; the least of many runs, since a busy machine only adds to it.
"""

from __future__ import annotations

import sys
import timeit
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from cuconvt.torch.dispatch import Node, Operator

SCHEMA = (
    "(Tensor x, Tensor weight, Tensor? bias, int[] stride, int[] padding, int[] output_padding, int groups, "
    "int[] dilation, str? precision) -> Tensor"
)
PARAMETERS = ((2, 2, 2), (1, 1, 1), (1, 1, 1), 1, (1, 1, 1), None)


def kernel(x: Any, *others: Any) -> Any:
    return x.new_empty(1, 16, 16, 16, 16)


class Nothing(Node):
    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs[:2])
        ctx.parameters = inputs[3:9]

    @staticmethod
    def backward(ctx: Any, grad: Any) -> tuple[None, ...]:
        return (None,) * 10


def by_custom_op() -> Callable[..., Any]:
    operator = torch.library.custom_op("dispatch::custom_op", kernel, mutates_args=(), schema=SCHEMA)
    operator.register_autograd(Nothing.backward, setup_context=Nothing.setup_context)
    return operator


def by_library() -> Callable[..., Any]:
    LIBRARY.define("library" + SCHEMA)
    LIBRARY.impl("library", kernel, "CPU")
    torch.library.register_autograd(
        "dispatch::library", Nothing.backward, setup_context=Nothing.setup_context, lib=LIBRARY
    )
    return torch.ops.dispatch.library.default


def by_autograd_key() -> Callable[..., Any]:
    LIBRARY.define("autograd_key" + SCHEMA)
    LIBRARY.impl("autograd_key", kernel, "CPU")
    operator = torch.ops.dispatch.autograd_key.default
    record = super(torch.autograd.Function, Nothing).apply

    def below(*arguments: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return operator(*arguments)

    def autograd(*arguments: Any) -> Any:
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*arguments):
            return record(*arguments, below)
        return below(*arguments)

    LIBRARY.impl("autograd_key", autograd, "Autograd")
    return operator


def by_operator() -> Callable[..., Any]:
    return Operator("nothing", SCHEMA, kernel, kernel, Nothing, kernel)


LIBRARY = torch.library.Library("dispatch", "DEF")
WAYS = {
    "custom_op with register_autograd": by_custom_op,
    "Library.define and impl, with register_autograd": by_library,
    "Library.define and impl, a Function at the Autograd key": by_autograd_key,
    "cuconvt.torch.dispatch.Operator": by_operator,
}


def microseconds(function: Callable[[], Any]) -> float:
    function()
    return 1e6 * min(timeit.repeat(function, number=100, repeat=300)) / 100


def main() -> None:
    torch.set_num_threads(1)
    x = torch.randn(1, 16, 8, 8, 8)
    weight = torch.randn(16, 16, 3, 3, 3, requires_grad=True)
    bias = torch.randn(16, requires_grad=True)
    print(f"torch {torch.__version__}: grad, no grad")
    print(f"{'the kernel alone':56} {microseconds(lambda: kernel(x)):5.1f}")
    for name, make in WAYS.items():
        operator = make()

        def call(operator: Callable[..., Any] = operator) -> Any:
            return operator(x, weight, bias, *PARAMETERS)

        with_grad = microseconds(call)
        with torch.no_grad():
            print(f"{name:56} {with_grad:5.1f} {microseconds(call):5.1f}")


if __name__ == "__main__":
    main()
