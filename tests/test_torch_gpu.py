"""PyTorch tensors in GPU memory: zero-copy, on PyTorch's stream, errors outside autograd."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from fixed_cases import FIXED
from gpu_tools import delay
from harness import call
from reference import Expected
from strategies import DTYPES, case

import cuconvt

pytestmark = pytest.mark.gpu

PROBLEM = case((2, 4, 5, 6, 7), 6, 3, stride=2, padding=1, output_padding=1, groups=2, has_bias=True)


@pytest.fixture
def torch() -> Any:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("this PyTorch has no CUDA")
    return torch


def tensors(torch: Any, dtype: str, problem: Any = PROBLEM, device: str = "cuda") -> list[Any]:
    values = [a for a in problem.arrays(DTYPES[dtype]) if a is not None]
    as_bits = [torch.from_numpy(a.view(f"i{a.dtype.itemsize}")) for a in values]
    return [t.to(device).view(getattr(torch, dtype)) for t in as_bits]


def to_numpy(torch: Any, tensor: Any, dtype: str) -> np.ndarray:
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.view(bits).cpu().numpy().view(DTYPES[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_and_memory(torch: Any, dtype: str) -> None:
    expected = Expected(PROBLEM, *PROBLEM.arrays(DTYPES[dtype]))
    arguments = tensors(torch, dtype)
    y = call(PROBLEM, *arguments)
    assert type(y) is torch.Tensor
    assert y.dtype == getattr(torch, dtype)
    assert y.device == arguments[0].device
    assert y.is_contiguous()
    expected.assert_close(to_numpy(torch, y, dtype))

    out = torch.full(PROBLEM.out_shape, torch.nan, dtype=y.dtype, device="cuda")
    pointer = out.data_ptr()
    assert call(PROBLEM, *arguments, out=out) is out
    assert out.data_ptr() == pointer
    assert torch.equal(out, y)


@pytest.mark.parametrize("dtype", DTYPES)
def test_memory_is_viewed_in_place(torch: Any, dtype: str) -> None:
    import cupy

    from cuconvt.arrays import bridge_of

    x, weight, _ = tensors(torch, dtype)
    bridge, device = bridge_of({"x": x, "weight": weight})
    assert device == ("cuda", torch.cuda.current_device())
    with bridge.scope(x):
        view = bridge.view(x)
    assert type(view) is cupy.ndarray
    assert view.data.ptr == x.data_ptr()
    assert view.dtype == DTYPES[dtype]


def test_results_are_in_the_allocator_of_torch(torch: Any) -> None:
    x, weight = torch.ones(1, 4, 64, 64, 64, device="cuda"), torch.ones(4, 4, 2, 2, 2, device="cuda")
    before = torch.cuda.memory_allocated()
    y = cuconvt.conv_transpose3d(x, weight, stride=2)
    assert torch.cuda.memory_allocated() - before == y.numel() * 4


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_memory_format(torch: Any, dtype: str) -> None:
    x, weight, bias = tensors(torch, dtype)
    y = call(PROBLEM, x.to(memory_format=torch.channels_last_3d), weight, bias)
    assert y.is_contiguous(memory_format=torch.channels_last_3d)
    assert not y.is_contiguous()
    Expected(PROBLEM, *PROBLEM.arrays(DTYPES[dtype])).assert_close(to_numpy(torch, y, dtype))


def test_views(torch: Any) -> None:
    x, weight, bias = tensors(torch, "float32")
    expected = call(PROBLEM, x, weight, bias)
    larger = torch.full((2, 4, 6, 6, 14), torch.nan, device="cuda")
    view = larger[:, :, 1:, :, ::2]
    view.copy_(x)
    assert torch.allclose(call(PROBLEM, view, weight, bias), expected, atol=1e-5)
    assert torch.allclose(call(PROBLEM, x[:1].expand_as(x), weight, bias)[1], expected[0], atol=1e-5)
    out = torch.full((2, 12, *PROBLEM.out_shape[2:]), torch.nan, device="cuda")
    assert torch.allclose(call(PROBLEM, x, weight, bias, out=out[:, ::2]), expected, atol=1e-5)
    assert out[:, 1::2].isnan().all()


def test_empty_batch(torch: Any) -> None:
    weight = torch.ones(2, 3, 3, device="cuda")
    y = cuconvt.conv_transpose1d(torch.ones(0, 2, 5, device="cuda"), weight)
    assert y.shape == (0, 3, 7)
    assert y.device == weight.device


@pytest.fixture
def side_stream(torch: Any) -> Iterator[Any]:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        yield stream
    stream.synchronize()


def test_side_stream_is_followed_and_never_waited_for(torch: Any, side_stream: Any) -> None:
    import cupy

    problem = FIXED["kb73"]
    source, weight = tensors(torch, "float32", problem)
    x = torch.full_like(source, torch.nan)
    out = torch.full(problem.out_shape, torch.nan, device="cuda")
    call(problem, x, weight)  # compiled and loaded
    call(problem, x, weight, out=out)
    torch.cuda.synchronize()
    before = cupy.cuda.get_current_stream(), cupy.cuda.Device()
    with cupy.cuda.ExternalStream(side_stream.cuda_stream):
        waiting = delay()
    x.copy_(source)  # after the delay: a kernel on any other stream reads NaN
    y = call(problem, x, weight)
    call(problem, x, weight, out=out)
    assert not waiting.done, "the call waited for the GPU"
    assert (cupy.cuda.get_current_stream(), cupy.cuda.Device()) == before
    x.fill_(torch.nan)  # after the calls, on their stream
    results = y.clone(), out.clone()
    side_stream.synchronize()
    expected = Expected(problem, *problem.arrays(DTYPES["float32"]))
    for result in results:
        expected.assert_close(to_numpy(torch, result, "float32"))


def test_second_device(torch: Any) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    x, weight, bias = tensors(torch, "float32", device="cuda:1")
    y = call(PROBLEM, x, weight, bias)
    assert y.device == torch.device("cuda:1")
    assert torch.cuda.current_device() == 0
    Expected(PROBLEM, *PROBLEM.arrays(DTYPES["float32"])).assert_close(to_numpy(torch, y, "float32"))
    with pytest.raises(TypeError, match="weight must be on the same device as x, got cuda:0 and cuda:1"):
        call(PROBLEM, x, weight.to("cuda:0"), bias)


ONLY_THE_SECOND = """
import torch
import cuconvt, cuconvt.torch

x, weight = torch.randn(2, 6, 9, device="cuda:1"), torch.randn(6, 5, 4, device="cuda:1")
expected = torch.nn.functional.conv_transpose1d(x.cpu().double(), weight.cpu().double(), stride=2)
for _ in range(2):
    own = weight.detach().requires_grad_()
    for y in (cuconvt.conv_transpose1d(x, weight, stride=2), cuconvt.torch.conv_transpose1d(x, own, stride=2)):
        assert y.device == x.device and torch.cuda.current_device() == 0
        torch.testing.assert_close(y.detach().cpu().double(), expected, rtol=1e-5, atol=1e-5)
    y.sum().backward()
    assert own.grad.device == x.device and own.grad.isfinite().all()
"""


def test_only_the_second_device_is_used(torch: Any) -> None:
    """In a process where PyTorch's current device is the first one, which it has not used yet."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    subprocess.run([sys.executable, "-c", ONLY_THE_SECOND], check=True)


# Errors; nothing is written to `out`.


def refused(torch: Any, error: type[Exception], message: str, **changes: Any) -> None:
    arguments = {
        "x": torch.ones(1, 2, 5, device="cuda"),
        "weight": torch.ones(2, 3, 3, device="cuda"),
        "out": torch.full((1, 3, 7), torch.nan, device="cuda"),
        **changes,
    }
    with pytest.raises(error, match=message):
        cuconvt.conv_transpose1d(**arguments)
    assert arguments["out"].isnan().all()


@pytest.mark.parametrize("role", ["x", "weight", "bias"])
def test_requires_grad(torch: Any, role: str) -> None:
    shape = {"x": (1, 2, 5), "weight": (2, 3, 3), "bias": (3,)}[role]
    array = torch.ones(shape, device="cuda", requires_grad=True)
    refused(torch, ValueError, f"{role} requires grad", **{role: array})


def test_neg_bit(torch: Any) -> None:
    x = torch.ones(1, 2, 5, dtype=torch.complex64, device="cuda").conj().imag
    refused(torch, ValueError, "x has its conj or neg bit set", x=x)


def test_cpu_and_gpu_do_not_mix(torch: Any) -> None:
    message = "must be on the same device as x, got cpu and cuda:0"
    refused(torch, TypeError, f"weight {message}", weight=torch.ones(2, 3, 3))
    refused(torch, TypeError, f"bias {message}", bias=torch.ones(3))
    refused(torch, TypeError, f"out {message}", out=torch.full((1, 3, 7), torch.nan))
    refused(torch, TypeError, "weight must be on the same device as x, got cuda:0 and cpu", x=torch.ones(1, 2, 5))


def test_torch_and_cupy_do_not_mix(torch: Any) -> None:
    import cupy

    message = "weight must be an array of the same library as x, got cupy and torch"
    refused(torch, TypeError, message, weight=cupy.ones((2, 3, 3), np.float32))


def test_out_overlap(torch: Any) -> None:
    buffer = torch.full((1, 2, 6), torch.nan, device="cuda")
    with pytest.raises(ValueError, match="out must not overlap an input, and it shares memory with x"):
        cuconvt.conv_transpose1d(buffer, torch.ones(2, 2, 1, device="cuda"), out=buffer)
    assert buffer.isnan().all()
