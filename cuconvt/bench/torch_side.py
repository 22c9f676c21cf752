"""PyTorch's side of the comparison, on the same inputs in the same memory."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import cupy
import numpy as np
import torch

from cuconvt.bench.cases import Case
from cuconvt.bench.floats import numpy_dtype


def version() -> dict[str, Any]:
    """Return what a result records of PyTorch."""
    return {"torch": torch.__version__, "torch_cuda": torch.version.cuda, "cudnn": _cudnn()}


def _cudnn() -> str | None:
    number = torch.backends.cudnn.version()
    return number and f"{number // 10000}.{number // 100 % 100}.{number % 100}"


@contextlib.contextmanager
def modes(tf32: bool) -> Iterator[None]:
    """Let cuDNN search for its best algorithm, and allow or forbid TF32; all as before on leaving."""
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    flags = ((cudnn, "benchmark"), (cudnn, "allow_tf32"), (matmul, "allow_tf32"))
    before = [getattr(holder, name) for holder, name in flags]
    for (holder, name), value in zip(flags, (True, tf32, tf32), strict=True):
        setattr(holder, name, value)
    try:
        yield
    finally:
        for (holder, name), value in zip(flags, before, strict=True):
            setattr(holder, name, value)


def make_call(case: Case, x: Any, weight: Any, bias: Any) -> Callable[[], Any]:
    """Return PyTorch's call on cupy arrays, whose strides say the memory format."""
    function = getattr(torch.nn.functional, f"conv_transpose{case.rank}d")
    tensors = [None if array is None else to_torch(array) for array in (x, weight, bias)]
    parameters = case.parameters
    return lambda: function(*tensors, **parameters)


def make_gradient_call(case: Case, operation: str, arrays: dict[str, Any]) -> Callable[[], Any]:
    """Return PyTorch's call for one gradient, on cupy arrays x, weight and y (the gradient of the result) as above.

    Of the array whose gradient it is, PyTorch looks at shape and memory format alone.
    """
    y, x, weight = (to_torch(arrays[role]) for role in ("y", "x", "weight"))
    wanted = [operation == "grad_input", operation == "grad_weight", False]
    backward = torch.ops.aten.convolution_backward
    window = (case.stride, case.padding, case.dilation)
    rest = (True, case.output_padding, case.groups, wanted)  # True: transposed
    return lambda: backward(y, x, weight, None, *window, *rest)[wanted.index(True)]


def to_torch(array: Any) -> Any:
    """View a cupy array as a tensor; bfloat16 travels as integers, which every version exchanges."""
    if array.dtype.name == "bfloat16":
        return torch.from_dlpack(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_dlpack(array)


def to_cupy(tensor: Any) -> Any:
    """View a tensor as a cupy array."""
    if tensor.dtype == torch.bfloat16:
        return cupy.from_dlpack(tensor.view(torch.int16)).view(numpy_dtype("bfloat16"))
    return cupy.from_dlpack(tensor)


def extra_bytes(run: Callable[[], Any]) -> int:
    """Return the peak of PyTorch's memory during a call, beyond what the call's result holds."""
    torch.cuda.reset_peak_memory_stats()
    result = run()
    extra = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
    del result
    return int(extra)


def release() -> None:
    """Give unused memory back to the device."""
    torch.cuda.empty_cache()
