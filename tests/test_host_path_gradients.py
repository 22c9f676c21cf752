"""The memo of gradients and convolutions with CuPy arrays, as `test_host_path.py` tests that of the forward."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from described import DEVICES
from gpu_tools import to_gpu
from gradients import exact_input, exact_weight, gradient_of
from no_gpu import PARAMETERS, SHAPES, Backend, without_gpu
from strategies import DTYPES, case

import cuconvt
from cuconvt import backends, cuda_gradients, warm
from cuconvt.plan_weight_gradient import spread_bytes

CONV = {"stride": 2, "padding": 1}
INPUTS = (2, 6, 6, 8, 10)  # of a convolution, which gives what has the shape of x
WEIGHT, X, OUT = SHAPES["weight"], SHAPES["x"], SHAPES["out"]


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[Backend]:
    with without_gpu() as backend:

        def sums(rank: int, y: Any, out: Any) -> None:
            backend.launched.append(
                SimpleNamespace(kernel=("sums", rank), problem=(y.shape, out.shape), arguments=(y, out), device=0)
            )

        monkeypatch.setattr(backends, "_channel_sums", sums)
        yield backend


def call(backend: Backend, operation: str, **changes: Any) -> Any:
    """Make a call with new arrays, in place of which `changes` may give others."""
    array = backend.array
    given: dict[str, dict[str, Any]] = {
        "conv3d": {"x": array(INPUTS), "weight": array(WEIGHT), "bias": array((4,)), **CONV},
        "conv_transpose3d_input": {"input_size": X, "weight": array(WEIGHT), "grad_output": array(OUT), **PARAMETERS},
        "conv_transpose3d_weight": {"input": array(X), "weight_size": WEIGHT, "grad_output": array(OUT), **PARAMETERS},
        "conv_transpose3d_bias": {"grad_output": array(OUT)},
        "conv3d_input": {"input_size": INPUTS, "weight": array(WEIGHT), "grad_output": array(X), **CONV},
        "conv3d_weight": {"input": array(INPUTS), "weight_size": WEIGHT, "grad_output": array(X), **CONV},
    }
    module = cuconvt if operation == "conv3d" else cuconvt.grad
    arguments = {**given[operation], **changes}
    return getattr(module, operation)(**{name: value for name, value in arguments.items() if value is not None})


RESULTS = {
    "conv3d": X,
    "conv_transpose3d_input": X,
    "conv_transpose3d_weight": WEIGHT,
    "conv_transpose3d_bias": (6,),
    "conv3d_input": INPUTS,
    "conv3d_weight": WEIGHT,
}
every_operation = pytest.mark.parametrize("operation", RESULTS)


@every_operation
def test_only_the_first_call_takes_all_steps(backend: Backend, operation: str) -> None:
    cold = call(backend, operation)
    first = backend.launched[:]
    backend.launched.clear()
    hot = call(backend, operation)
    assert backend.all_steps == 1
    assert (hot.shape, hot.strides, hot.dtype) == (RESULTS[operation], cold.strides, np.float32)
    assert hot.data.ptr != cold.data.ptr
    assert backend.launched[-1].arguments[-1].data.ptr == hot.data.ptr
    assert [(k.kernel, k.problem) for k in backend.launched] == [(k.kernel, k.problem) for k in first]


@pytest.mark.parametrize("operation", [name for name in RESULTS if not name.endswith("bias")])
def test_a_plan_is_printed_once(
    backend: Backend, operation: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUCONVT_DEBUG", "plan")
    for _ in range(3):
        call(backend, operation)
    assert capsys.readouterr().err.count("cuconvt plan for") == 1


def test_of_two_plans_without_a_stride_one_is_printed(
    backend: Backend, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As the transposed convolution that it is, and of its own: y turned before."""
    monkeypatch.setenv("CUCONVT_DEBUG", "plan")
    x, weight = backend.array((2, 64, 12, 12, 12)), backend.array((64, 64, 3, 3, 3))
    cuconvt.conv3d(x, weight, padding=1, precision="tf32")
    (plan,) = capsys.readouterr().err.split("cuconvt plan for ")[1:]
    assert "correlate_wgmma: grid" in plan
    assert "X_TURNED=1" in plan


def test_the_second_pass_is_spread_where_it_starts_early(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its blocks then come one by one; where they come at once, the hardware spreads them itself."""
    shared = {}
    for early in (False, True):
        cuda_gradients._prepare_weight_gradient.cache_clear()
        warm._slot.cache_clear()
        monkeypatch.setattr(cuda_gradients, "can_start_early", lambda compute_capability, early=early: early)
        x, grad = backend.array((2, 16, 24, 24, 24)), backend.array((2, 32, 24, 24, 24))
        cuconvt.grad.conv3d_weight(x, (32, 16, 3, 3, 3), grad, padding=1)
        entry, _, grid, _, shared[early] = backend.launched[-1].kernel
        assert entry.endswith("_add")
    assert shared == {False: 0, True: spread_bytes(grid, 0, DEVICES[90])}
    assert shared[True] > 0


@every_operation
def test_the_arrays_of_the_call_are_launched(backend: Backend, operation: str) -> None:
    out = backend.array(RESULTS[operation])
    launched = []
    for _ in range(2):
        backend.launched.clear()
        assert call(backend, operation, out=out) is out
        launched.append([[type(argument) for argument in launch.arguments] for launch in backend.launched])
        assert backend.launched[-1].arguments[-1].data.ptr == out.data.ptr
    assert launched[0] == launched[1]
    assert backend.all_steps == 1


def test_inputs_are_launched_in_their_places(backend: Backend) -> None:
    def addresses(operation: str, **arrays: Any) -> list[list[int]]:
        found, out = [], backend.array(RESULTS[operation])
        for _ in range(2):
            backend.launched.clear()
            call(backend, operation, out=out, **arrays)
            # Of a repacked weight, the first launch has the weight.
            pointers = [argument for launch in backend.launched for argument in launch.arguments]
            found.append([p.data.ptr for p in pointers if hasattr(p, "data")])
        return found

    y, weight, x = backend.array(OUT), backend.array(WEIGHT), backend.array(X)
    for operation, arrays in {
        "conv_transpose3d_input": {"grad_output": y, "weight": weight},
        "conv_transpose3d_weight": {"input": x, "grad_output": y},
        "conv3d_weight": {"input": y, "grad_output": x},
        "conv3d": {"x": y, "weight": weight, "bias": None},
        "conv3d_input": {"grad_output": x, "weight": weight},
    }.items():
        cold, hot = addresses(operation, **arrays)
        assert cold == hot, operation
        assert {array.data.ptr for array in arrays.values() if array is not None} <= set(hot), operation


def test_operations_are_told_apart(backend: Backend) -> None:
    """Calls of equal arrays and parameters, of which only the function differs."""
    same = (2, 4, 6, 6, 6)
    parameters = {"stride": 1, "padding": 1}
    arrays = {"weight": backend.array((4, 4, 3, 3, 3)), "grad_output": backend.array(same)}
    sizes = {"weight_size": (4, 4, 3, 3, 3), "grad_output": arrays["grad_output"], "input": backend.array(same)}
    calls: list[Callable[[], Any]] = [
        lambda: cuconvt.conv_transpose3d(arrays["grad_output"], arrays["weight"], **parameters),
        lambda: cuconvt.conv3d(arrays["grad_output"], arrays["weight"], **parameters),
        lambda: cuconvt.grad.conv_transpose3d_input(same, **arrays, **parameters),
        lambda: cuconvt.grad.conv3d_input(same, **arrays, **parameters),
        lambda: cuconvt.grad.conv_transpose3d_weight(**sizes, **parameters),
        lambda: cuconvt.grad.conv3d_weight(**sizes, **parameters),
        lambda: cuconvt.grad.conv_transpose3d_bias(arrays["grad_output"]),
        lambda: cuconvt.grad.conv_transpose2d_bias(arrays["grad_output"][0]),
        lambda: cuconvt.grad.conv_transpose3d_bias(arrays["grad_output"][0]),
    ]
    for _ in range(3):
        for function in calls:
            function()
    assert backend.all_steps == len(calls)


def outcome(backend: Backend, operation: str, **changes: Any) -> tuple:
    result = call(backend, operation, **changes)
    launch = backend.launched[-1]
    return (launch.kernel, launch.problem, launch.device, result.shape, result.strides, result.dtype)


Y_6 = (2, 6, 6, 8, 9)  # of outputs with less output padding
CHANGES: dict[str, tuple[str, Callable[[Backend], dict[str, Any]]]] = {
    "input_size": ("conv3d_input", lambda b: {"input_size": (2, 6, 5, 8, 10)}),
    "weight_size": ("conv_transpose3d_weight", lambda b: {"weight_size": (4, 6, 3, 3, 2), "grad_output": b.array(Y_6)}),
    "dtype": (
        "conv_transpose3d_input",
        lambda b: {"weight": b.array(WEIGHT, np.float16), "grad_output": b.array(OUT, np.float16)},
    ),
    "alignment": ("conv_transpose3d_weight", lambda b: {"grad_output": b.array(OUT, offset=4)}),
    "precision": ("conv3d_weight", lambda b: {"precision": "tf32"}),
    "no bias": ("conv3d", lambda b: {"bias": None}),
    "dilation": ("conv3d", lambda b: {"dilation": 2, "padding": 2}),
    "padding by name": ("conv3d", lambda b: {"padding": "valid"}),
    "out": ("conv_transpose3d_weight", lambda b: {"out": b.array((*WEIGHT[:-1], 6))[..., ::2]}),
    "channels-last": (
        "conv_transpose3d_input",
        lambda b: {"grad_output": b.array((2, 6, 8, 10, 6)).transpose(0, 4, 1, 2, 3)},
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_another_call_never_takes_a_remembered_plan(backend: Backend, change: str) -> None:
    operation, changes = CHANGES[change]
    alone = outcome(backend, operation, **changes(backend))
    warm._slot.cache_clear()
    usual = outcome(backend, operation)
    assert outcome(backend, operation) == usual
    before = backend.all_steps
    for _ in range(2):
        assert outcome(backend, operation, **changes(backend)) == alone
        assert backend.all_steps == before + 1, "the memo was hit by another call, or missed by the same"
    assert outcome(backend, operation) == usual


@pytest.mark.parametrize(
    ("operation", "error", "changes", "message"),
    [
        ("conv_transpose3d_input", ValueError, {"input_size": (2, 4, 3, 4, 6)}, "grad_output must have shape"),
        ("conv_transpose3d_input", TypeError, {"input_size": (2, 4, 3, 4, 5.0)}, "input_size must be an integer"),
        ("conv_transpose3d_weight", TypeError, {"weight_size": (4, 6, 3, 3, True)}, "weight_size must be an integer"),
        ("conv_transpose3d_weight", ValueError, {"weight_size": (4, 6, 3, 3)}, "weight_size must have 5 axes"),
        ("conv3d", ValueError, {"padding": "full"}, "padding must be 'valid', 'same' or integers"),
        ("conv3d_input", TypeError, {"stride": 2.0}, "stride must be an integer"),
        ("conv_transpose3d_bias", TypeError, {"grad_output": np.ones(OUT, np.int32)}, "grad_output must have one of"),
    ],
)
def test_errors_come_again_and_again(
    backend: Backend, operation: str, error: type[Exception], changes: dict[str, Any], message: str
) -> None:
    call(backend, operation)
    launched = len(backend.launched)
    for _ in range(3):
        with pytest.raises(error, match=re.escape(message)):
            call(backend, operation, **changes)
    assert len(backend.launched) == launched


@every_operation
def test_out_is_compared_with_the_inputs_at_every_call(backend: Backend, operation: str) -> None:
    out = backend.array(RESULTS[operation])
    call(backend, operation, out=out)
    name = "x" if operation == "conv3d" else "grad_output"
    shape = INPUTS if operation == "conv3d" else X if operation.startswith("conv3d") else OUT
    size = 4 * int(np.prod(shape))
    memory = backend.memory(2 * size)
    overlapping = backend.cupy.ndarray(shape, np.float32, memory)
    within = backend.cupy.ndarray(RESULTS[operation], np.float32, memory + 64)
    before = len(backend.launched)
    for _ in range(2):
        with pytest.raises(ValueError, match=f"out must not overlap an input, and it shares memory with {name}"):
            call(backend, operation, **{name: overlapping, "out": within})
    assert len(backend.launched) == before


def test_sizes_in_lists_and_an_empty_batch_take_all_steps(backend: Backend) -> None:
    for _ in range(2):
        assert call(backend, "conv_transpose3d_input", input_size=list(X)).shape == X
    assert backend.all_steps == 2
    for _ in range(2):
        empty = backend.array((0, *OUT[1:]))
        assert call(backend, "conv_transpose3d_input", input_size=(0, *X[1:]), grad_output=empty).size == 0
    assert backend.all_steps == 4


# On a GPU.


PROBLEM = case((2, 8, 4, 5, 6), 8, 3, stride=2, padding=1, output_padding=1)


def gradients_on_gpu(seed: int) -> tuple[Callable[[], Any], ...]:
    values = [*PROBLEM.arrays(DTYPES["float32"])[:2], gradient_of(PROBLEM, DTYPES["float32"])]
    x, weight, y = (to_gpu((seed + 1) * array) for array in values)
    return (
        lambda: cuconvt.grad.conv_transpose3d_input(PROBLEM.x_shape, weight, y, **PARAMETERS),
        lambda: cuconvt.grad.conv_transpose3d_weight(x, PROBLEM.weight_shape, y, **PARAMETERS),
        lambda: cuconvt.grad.conv_transpose3d_bias(y),
    )


@pytest.mark.gpu
def test_values_of_remembered_calls() -> None:
    x, weight, _ = PROBLEM.arrays(DTYPES["float32"])
    y = gradient_of(PROBLEM, DTYPES["float32"])
    exact = [exact_input(PROBLEM, y, weight), exact_weight(PROBLEM, x, y), y.sum(axis=(0, 2, 3, 4), dtype=np.float64)]
    for seed in range(3):
        factors = ((seed + 1) ** 2, (seed + 1) ** 2, seed + 1)
        for gradient, values, factor in zip(gradients_on_gpu(seed), exact, factors, strict=True):
            scale = np.abs(values).max()
            assert np.abs(gradient().get() / factor - values).max() <= 1e-5 * scale


@pytest.mark.gpu
@pytest.mark.parametrize("index", [0, 1])
def test_host_time_of_a_remembered_gradient(index: int) -> None:
    import cupy

    gradient = gradients_on_gpu(0)[index]
    best = float("inf")
    for _ in range(20):
        cupy.cuda.get_current_stream().synchronize()
        start = time.perf_counter()
        for _ in range(200):
            gradient()
        best = min(best, (time.perf_counter() - start) / 200)
    assert best < 40e-6, f"{1e6 * best:.1f} us"
