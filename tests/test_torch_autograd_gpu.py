"""cuconvt.torch on CUDA tensors: gradients, memory, streams, CUDA graphs, autocast, compilation and host time."""

from __future__ import annotations

import copy
import gc
import importlib.util
import shutil
import time
from collections.abc import Callable
from typing import Any

import pytest
from gpu_tools import delay
from strategies import case

torch = pytest.importorskip("torch")

from test_torch_autograd import (  # noqa: E402
    DTYPES,
    OPERATORS,
    PROBLEM,
    PROBLEMS,
    arguments,
    check_gradients,
    gradients,
    in_channels_last,
    is_channels_last,
    operator_arguments,
    ours,
    toy_model,
)

import cuconvt.torch as ct  # noqa: E402
from cuconvt.torch import kernels  # noqa: E402

functional = torch.nn.functional
pytestmark = pytest.mark.gpu

# Wide enough for the kernels that repack weights and for a split sum of the weight's gradient.
WIDE = case((2, 32, 9, 10, 11), 48, 3, stride=2, padding=1, output_padding=1, has_bias=True)


@pytest.fixture(autouse=True)
def device() -> str:
    if not torch.cuda.is_available():
        pytest.skip("this PyTorch has no CUDA")
    return "cuda"


def on_gpu(problem: Any, dtype: Any = torch.float32, requires_grad: bool = True) -> list[Any]:
    return arguments(problem, dtype, requires_grad, "cuda")


def step(tensors: list[Any]) -> list[Any]:
    """Return the result and all gradients of a call with a loss that depends on everything."""
    y = ours(WIDE, *tensors)
    return [y, *torch.autograd.grad(y.square().sum(), tensors)]


def forbid_first_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any) -> None:
        raise AssertionError("the call was not remembered")

    monkeypatch.setattr(kernels, "_first_call", refuse)


# Values.


@pytest.mark.parametrize("name", [*PROBLEMS, "wide"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_result_and_gradients_are_those_of_torch(name: str, dtype: str) -> None:
    for _ in range(2):  # the second is a remembered call
        check_gradients(WIDE if name == "wide" else PROBLEMS[name], dtype, "cuda")


@pytest.mark.parametrize("precision", ["tf32x3", "ieee", "tf32"])
def test_precision(precision: str) -> None:
    check_gradients(WIDE, "float32", "cuda", precision)


def test_switches_for_tf32_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for allowed in (False, True):
        monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", allowed)
        monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", allowed)
        results.append(step(on_gpu(WIDE)))
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


@pytest.mark.parametrize("name", [name for name in PROBLEMS if name != "empty_batch"])  # gradcheck refuses that
def test_gradients_of_first_and_second_order(name: str) -> None:
    problem = PROBLEMS[name]
    tensors = on_gpu(problem, torch.float64)
    assert torch.autograd.gradcheck(lambda *t: ours(problem, *t), tensors, fast_mode=True, nondet_tol=0.0)
    assert torch.autograd.gradgradcheck(lambda *t: ours(problem, *t), tensors, fast_mode=True, nondet_tol=0.0)


@pytest.mark.parametrize("name", ["1d", "2d", "3d", "unbatched"])
def test_memory_format(name: str) -> None:
    problem = PROBLEMS[name]
    x, weight, *bias = on_gpu(problem)
    x_last = in_channels_last(x, problem.rank).requires_grad_()
    y = ours(problem, x, weight, *bias)
    for _ in range(2):
        y_last = ours(problem, x_last, weight, *bias)
        (grad,) = torch.autograd.grad(y_last, x_last, torch.ones_like(y_last))
        assert is_channels_last(y_last, problem.rank)
        assert is_channels_last(grad, problem.rank)
        torch.testing.assert_close(y_last, y, rtol=1e-5, atol=1e-5)


def test_results_repeat_bitwise() -> None:
    tensors = on_gpu(WIDE)
    for one, other in zip(step(tensors), step(tensors), strict=True):
        assert torch.equal(one, other)


# Memory, streams, devices.


def test_all_memory_is_of_the_allocator_of_torch() -> None:
    import cupy

    def requested() -> int:
        return torch.cuda.memory_stats()["requested_bytes.all.current"]

    torch.cuda.init()  # or there are no such numbers, where no test of this process came before
    pool = cupy.get_default_memory_pool()
    gc.collect()  # what tests before this one have left in cycles
    pool.free_all_blocks()
    held, before = pool.total_bytes(), requested()
    tensors = on_gpu(WIDE)
    for _ in range(2):
        results = step(tensors)
        assert pool.total_bytes() == held
        assert requested() - before == sum(t.nbytes for t in (*tensors, *results))
        del results


def test_side_stream_is_followed_and_never_waited_for() -> None:
    import cupy

    source, weight, bias = (tensor.detach() for tensor in on_gpu(WIDE))
    expected = step([tensor.requires_grad_() for tensor in (source.clone(), weight.clone(), bias.clone())])
    x = torch.full_like(source, torch.nan)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        with cupy.cuda.Stream.from_external(StreamOf(stream)):
            waiting = delay()
        x.copy_(source)  # after the delay: a kernel on any other stream reads NaN
        results = step([tensor.requires_grad_() for tensor in (x, weight, bias)])
        assert not waiting.done, "the call waited for the GPU"
        results = [result.detach().clone() for result in results]
    stream.synchronize()
    for result, true in zip(results, expected, strict=True):
        assert torch.equal(result, true)


class StreamOf:
    def __init__(self, stream: Any):
        self.stream = stream

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, self.stream.cuda_stream)


def test_two_streams_at_once() -> None:
    tensors = on_gpu(WIDE)
    expected = step(tensors)
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(2)]
    results: list[list[Any]] = [[], []]
    for _ in range(8):
        for stream, kept in zip(streams, results, strict=True):
            with torch.cuda.stream(stream):
                kept.append(step(tensors))
    torch.cuda.synchronize()
    for kept in results:
        for result in kept:
            assert all(torch.equal(one, true) for one, true in zip(result, expected, strict=True))


def test_second_device() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    for _ in range(2):
        check_gradients(WIDE, "float32", "cuda:1")
        assert torch.cuda.current_device() == 0
    model = toy_model()
    ct.replace_modules(model)
    x = torch.randn(4, 2, 6, 6)
    expected = model(x)
    replicas = torch.nn.DataParallel(model.cuda(), device_ids=[0, 1])
    y = replicas(x.cuda())
    torch.testing.assert_close(y.cpu(), expected, rtol=1e-5, atol=1e-4)
    y.sum().backward()
    x0, weight, bias = on_gpu(WIDE)
    with pytest.raises(RuntimeError, match="weight must have the dtype and the device of x"):
        ours(WIDE, x0, weight.to("cuda:1"), bias)


# CUDA graphs.


def capture(function: Callable[[], Any]) -> tuple[Any, Any]:
    """Call once, capture the second call, and return the graph and the results that it writes."""
    function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = function()
    return graph, results


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_graph_of_a_training_step(dtype: str) -> None:
    import cupy

    tensors = on_gpu(WIDE, DTYPES[dtype])
    graph, results = capture(lambda: step(tensors))
    for seed in range(3):
        with torch.no_grad():
            for tensor in tensors:
                tensor.normal_(generator=torch.Generator("cuda").manual_seed(seed))
        expected = step(tensors)
        # Whatever memory is free outside the graph is overwritten: the graph must not have used any of it.
        waste = [torch.full((1 << 22,), torch.nan, device="cuda") for _ in range(8)]
        more_waste = cupy.full(1 << 24, cupy.nan, cupy.float32)
        graph.replay()
        torch.cuda.synchronize()
        for result, true in zip(results, expected, strict=True):
            assert torch.equal(result, true)
        assert bool(cupy.isnan(more_waste).all())
        assert all(bool(w.isnan().all()) for w in waste)


def test_graph_of_a_module_without_gradients() -> None:
    layer = ct.ConvTranspose3d(32, 16, 3, stride=2, device="cuda").requires_grad_(False)
    x = torch.randn(1, 32, 8, 8, 8, device="cuda")
    graph, y = capture(lambda: layer(x))
    x.normal_()
    graph.replay()
    assert torch.equal(y, layer(x))


def test_call_remembered_by_capture_needs_no_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = on_gpu(WIDE)
    expected = step(tensors)
    forbid_first_calls(monkeypatch)
    for result, true in zip(step(tensors), expected, strict=True):
        assert torch.equal(result, true)
    with pytest.raises(AssertionError, match="not remembered"):
        ours(WIDE, tensors[0][:1], *tensors[1:])


# Compilation, autocast, scaling.


@pytest.mark.parametrize("name", OPERATORS)
def test_opcheck(name: str) -> None:
    arguments = [a.detach().cuda() if torch.is_tensor(a) else a for a in operator_arguments(name, PROBLEM)]
    arguments = [a.requires_grad_() if torch.is_tensor(a) else a for a in arguments]
    torch.library.opcheck(getattr(torch.ops.cuconvt, name).default, tuple(arguments))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compile(backend: str) -> None:
    if backend == "inductor" and not (importlib.util.find_spec("triton") and shutil.which("gcc")):
        pytest.skip("needs Triton and a C compiler")
    torch.compiler.reset()
    layer = ct.ConvTranspose3d(32, 16, 3, stride=2, padding=1, device="cuda")
    compiled = torch.compile(lambda x: layer(x).relu() * 2, backend=backend, fullgraph=True)
    for _ in range(3):
        x = torch.randn(2, 32, 8, 8, 8, device="cuda", requires_grad=True)
        y, expected = compiled(x), layer(x).relu() * 2
        torch.testing.assert_close(y, expected)
        (grad,) = torch.autograd.grad(y.sum(), x)
        (true,) = torch.autograd.grad(expected.sum(), x)
        torch.testing.assert_close(grad, true)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast(dtype: Any) -> None:
    tensors = on_gpu(WIDE)
    with torch.autocast("cuda", dtype):
        y = ours(WIDE, *tensors)
    assert y.dtype == dtype
    got = torch.autograd.grad(y, tensors, torch.ones_like(y))
    expected = gradients(ours, WIDE, [tensor.detach().to(dtype) for tensor in tensors])
    assert torch.equal(y, expected[0])
    for one, other in zip(got, expected[1:], strict=True):
        assert one.dtype == torch.float32
        assert torch.equal(one, other.float())


def test_grad_scaler_trains_as_with_torch() -> None:
    losses = []
    reference = toy_model().cuda()
    replaced = copy.deepcopy(reference)
    assert ct.replace_modules(replaced) == 2
    x = torch.randn(2, 2, 12, 12, device="cuda")
    target = torch.randn(2, 2, 24, 24, device="cuda")
    for model in (reference, replaced):
        scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        losses.append([])
        for _ in range(10):
            optimizer.zero_grad()
            with torch.autocast("cuda", torch.float16):
                loss = functional.mse_loss(model(x), target)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            losses[-1].append(loss.item())
    assert losses[1][-1] < losses[1][0]
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-2, atol=0)


# Host time.


def host_times(functions: dict[str, Callable[[], Any]], calls: int = 25) -> dict[str, float]:
    """Return the least seconds a call. They take short turns, of which some find host and GPU without other work."""
    best = dict.fromkeys(functions, float("inf"))
    for _ in range(160):
        for name, function in functions.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(calls):
                function()
            best[name] = min(best[name], (time.perf_counter() - start) / calls)
    torch.cuda.synchronize()
    return best


def test_host_time_of_a_forward_call() -> None:
    torch.manual_seed(0)
    reference = torch.nn.ConvTranspose3d(16, 16, 3, stride=2, padding=1, output_padding=1, device="cuda")
    layer = copy.deepcopy(reference)
    ct.replace_modules(layer)
    x = torch.randn(1, 16, 8, 8, 8, device="cuda")
    torch.testing.assert_close(layer(x), reference(x), rtol=1e-3, atol=1e-2)  # PyTorch's side may be TF32
    times = host_times({"torch": lambda: reference(x), "ours": lambda: layer(x)})
    print({name: f"{1e6 * seconds:.1f} us" for name, seconds in times.items()})
    assert times["ours"] < times["torch"]
