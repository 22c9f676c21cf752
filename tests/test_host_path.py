"""The memo of calls with CuPy arrays: it is hit, never by another call's plan, and changes no error.

Most tests need no GPU: the arrays are in host memory, and a launch is written down instead of queued.
"""

from __future__ import annotations

import ctypes
import dataclasses
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from gpu_tools import to_gpu
from no_gpu import PARAMETERS, SHAPES, Backend, without_gpu
from reference import Expected
from strategies import DTYPES, case

import cuconvt
from cuconvt import warm
from cuconvt.plan import Layout, make_plan


@pytest.fixture
def backend() -> Iterator[Backend]:
    with without_gpu() as backend:
        yield backend


def test_only_the_first_call_takes_all_steps(backend: Backend) -> None:
    results = [backend.call() for _ in range(4)]
    assert backend.all_steps == 1
    assert len(backend.launched) == 4
    for launch in backend.launched[1:]:
        assert (launch.kernel, launch.problem) == (backend.launched[0].kernel, backend.launched[0].problem)
    assert len({result.data.ptr for result in results}) == 4
    for result, launch in zip(results, backend.launched, strict=True):
        assert launch.arguments[-1].data.ptr == result.data.ptr
        assert (result.shape, result.dtype) == (SHAPES["out"], np.float32)
        assert result.flags.c_contiguous


def test_the_arrays_of_the_call_are_launched_and_then_let_go(backend: Backend) -> None:
    backend.call()
    given = backend.arguments(out=backend.array(SHAPES["out"]))
    for _ in range(2):
        assert cuconvt.conv_transpose3d(**given) is given["out"]
    assert backend.all_steps == 2
    for launch in backend.launched[1:]:
        pointers = [array.data.ptr for array in launch.arguments]
        assert pointers == [given[name].data.ptr for name in ("x", "weight", "bias", "out")]
    backend.call(bias=None)
    backend.call(bias=None)
    assert backend.all_steps == 3
    assert backend.launched[-1].arguments[2] is None


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("batched", [True, False])
def test_every_rank_and_layout(backend: Backend, rank: int, batched: bool) -> None:
    spatial = (5, 6, 7)[:rank]
    shape = (2, 4, *spatial) if batched else (4, *spatial)
    channels = 1 if batched else 0
    for dtype in (np.float16, ml_dtypes.bfloat16, np.float64):
        weight, bias = backend.array((4, 3, *(2,) * rank), dtype), backend.array((3,), dtype)
        x = backend.array(shape, dtype)
        swapped = backend.array((*shape[:channels], *spatial, 4), dtype)
        channels_last = backend.cupy.moveaxis(swapped, -1, channels)
        for array in (x, channels_last):
            before = backend.all_steps
            cold, hot = (backend.call(rank, x=array, weight=weight, bias=bias, output_padding=0) for _ in range(2))
            assert backend.all_steps == before + 1
            assert (hot.shape, hot.strides, hot.dtype) == (cold.shape, cold.strides, cold.dtype)
            assert (hot.strides[channels] == hot.itemsize) == (array is channels_last)


def test_repacked_weights(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    from cuconvt import cuda

    def packing(*arguments: Any) -> Any:
        return dataclasses.replace(make_plan(*arguments), packed_words=1000, packed_a_thread=2)

    monkeypatch.setattr(cuda, "make_plan", packing)
    given = backend.arguments()
    for _ in range(2):
        cuconvt.conv_transpose3d(**given)
        pack, main = backend.launched
        backend.launched.clear()
        weight, packed = pack.arguments
        assert pack.kernel[0] == main.kernel[0] + "_pack"
        assert pack.kernel[2] == 2  # 1000 words, two a thread, 256 threads a block
        assert weight.data.ptr == given["weight"].data.ptr
        assert packed.mem.size >= 4000
        assert main.arguments[1].ptr == packed.ptr
        assert pack.problem == main.problem
    assert backend.all_steps == 1


# Whatever a plan depends on.


def sliced(backend: Backend, name: str, dtype: Any = np.float32) -> Any:
    """Return every other element of an array twice as long along its last axis."""
    return backend.array((*SHAPES[name][:-1], 2 * SHAPES[name][-1]), dtype)[..., ::2]


CHANGES: dict[str, Callable[[Backend], dict[str, Any]]] = {
    "batch": lambda b: {"x": b.array((3, 4, 3, 4, 5))},
    "unbatched": lambda b: {"x": b.array((4, 3, 4, 5))},
    "extent": lambda b: {"x": b.array((2, 4, 3, 4, 6))},
    "kernel": lambda b: {"weight": b.array((4, 6, 3, 3, 2))},
    "c_out": lambda b: {"weight": b.array((4, 5, 3, 3, 3)), "bias": None},
    "no bias": lambda b: {"bias": None},
    "strides of x": lambda b: {"x": sliced(b, "x")},
    "strides of weight": lambda b: {"weight": sliced(b, "weight")},
    "strides of bias": lambda b: {"bias": sliced(b, "bias")},
    "channels-last x": lambda b: {"x": b.array((2, 3, 4, 5, 4)).transpose(0, 4, 1, 2, 3)},
    "alignment of x": lambda b: {"x": b.array(SHAPES["x"], offset=4)},
    "dtype": lambda b: {name: b.array(SHAPES[name], np.float16) for name in ("x", "weight", "bias")},
    "another dtype": lambda b: {name: b.array(SHAPES[name], ml_dtypes.bfloat16) for name in ("x", "weight", "bias")},
    "out": lambda b: {"out": b.array(SHAPES["out"])},
    "strides of out": lambda b: {"out": sliced(b, "out")},
    "alignment of out": lambda b: {"out": b.array(SHAPES["out"], offset=4)},
    "stride": lambda b: {"stride": 3},
    "stride of an axis": lambda b: {"stride": (2, 2, 3)},
    "padding": lambda b: {"padding": 0},
    "padding of an end": lambda b: {"padding": ((1, 1), (1, 1), (1, 0))},
    "output_padding": lambda b: {"output_padding": 0},
    "groups": lambda b: {"groups": 2, "bias": None},
    "dilation": lambda b: {"dilation": 2},
    "output_size": lambda b: {"output_size": (5, 7, 10), "output_padding": 0},
    "precision": lambda b: {"precision": "ieee"},
}


def outcome(backend: Backend, **changes: Any) -> tuple:
    """Return everything about a call that another plan, layout or device would change."""
    result = backend.call(**changes)
    launch = backend.launched[-1]
    return (launch.kernel, launch.problem, launch.device, result.shape, result.strides, result.dtype)


@pytest.mark.parametrize("change", CHANGES)
def test_another_call_never_takes_a_remembered_plan(backend: Backend, change: str) -> None:
    changes = CHANGES[change]
    base = {"out": backend.array(SHAPES["out"])} if change.endswith(" of out") else {}
    alone = outcome(backend, **changes(backend))  # with an empty memo
    warm._slot.cache_clear()
    usual = outcome(backend, **base)
    assert outcome(backend, **base) == usual
    before = backend.all_steps
    for _ in range(2):
        assert outcome(backend, **changes(backend)) == alone
        assert backend.all_steps == before + 1, "the memo was hit by another call, or missed by the same"
    assert outcome(backend, **base) == usual
    assert backend.all_steps == before + 1


def test_ranks(backend: Backend) -> None:
    x, bias = backend.array((4, 4, 5, 5)), None  # unbatched in three dimensions, batched in two
    for _ in range(2):
        assert backend.call(3, x=x, weight=backend.array((4, 2, 3, 3, 3)), bias=bias).shape == (2, 8, 10, 10)
        assert backend.call(2, x=x, weight=backend.array((4, 2, 3, 3)), bias=bias).shape == (4, 2, 10, 10)
    assert backend.all_steps == 2
    for _ in range(2):
        with pytest.raises(ValueError, match="weight must have 4 axes"):
            backend.call(2, x=x, weight=backend.array((4, 2, 3, 3, 3)), bias=bias)


def test_layouts_hold_nothing_that_the_memo_does_not_know() -> None:
    # What is added here must become a part of cuconvt.warm's key too; the last two follow from the call.
    known = {"x", "weight", "bias", "out", "x_aligned", "out_aligned", "weight_group", "weight_first"}
    assert {field.name for field in dataclasses.fields(Layout)} == known


def test_result_at_an_address_unlike_the_plan_s(backend: Backend) -> None:
    given = backend.arguments()
    cuconvt.conv_transpose3d(**given)
    backend.offset = 4
    for _ in range(2):
        result = cuconvt.conv_transpose3d(**given)
        assert result.data.ptr % 16 == 4
        assert backend.launched[-1].arguments[-1].data.ptr == result.data.ptr
    assert backend.all_steps == 2


def test_devices(backend: Backend) -> None:
    with backend.device(1):
        there = backend.arguments()
    here = backend.arguments()
    for given, device in ((here, 0), (there, 1), (here, 0), (there, 1)):
        result = cuconvt.conv_transpose3d(**given)
        assert (backend.launched[-1].device, result.data.device_id, backend.current_device) == (device, device, 0)
    assert backend.all_steps == 2
    for mixed in ("weight", "bias"):
        with pytest.raises(TypeError, match=f"{mixed} must be on the same device as x, got cuda:1 and cuda:0"):
            cuconvt.conv_transpose3d(**{**here, mixed: there[mixed]})


def test_an_empty_batch_launches_nothing(backend: Backend) -> None:
    for _ in range(2):
        assert backend.call(x=backend.array((0, *SHAPES["x"][1:]))).shape == (0, *SHAPES["out"][1:])
    assert not backend.launched


# Errors stay what they are.


ODD = {"True": True, "1.0": 1.0, "numpy": np.bool_(True), "complex": 1 + 0j}


@pytest.mark.parametrize("wrong", ODD.values(), ids=ODD)
@pytest.mark.parametrize("name", ["stride", "padding", "output_padding", "groups", "dilation"])
def test_what_equals_one_and_is_no_integer(backend: Backend, name: str, wrong: Any) -> None:
    usual: dict[str, Any] = {"stride": 2, "padding": 1, "output_padding": 1, "groups": 1, "dilation": 1}
    if name == "stride":
        usual |= {"stride": 1, "output_padding": 0}
    spellings: list[Callable[[Any], Any]] = [lambda value: value]
    if name != "groups":
        spellings += [lambda value: (1, 1, value), lambda value: [1, 1, value]]
    if name == "padding":
        spellings += [lambda value: ((1, 1), (1, 1), (1, value)), lambda value: ((1, 1), (1, 1), [1, value])]
    for spell in spellings:
        for _ in range(2):
            backend.call(**{**usual, name: spell(1)})
        launched = len(backend.launched)
        for _ in range(2):
            with pytest.raises(TypeError, match=f"{name} must be an integer, got "):
                backend.call(**{**usual, name: spell(wrong)})
        assert len(backend.launched) == launched


def test_other_spellings_of_a_remembered_call(backend: Backend) -> None:
    usual = outcome(backend)
    for changes in (
        {"stride": [2, 2, 2], "padding": [(1, 1)] * 3},
        {"stride": np.int64(2)},
        {"padding": (np.uint8(1), 1, 1)},
        {"stride": (2, 2, 2), "output_padding": (1, 1, 1), "dilation": 1, "groups": 1},
    ):
        for _ in range(2):
            assert outcome(backend, **changes) == usual


def test_a_subclass_takes_all_steps(backend: Backend) -> None:
    class Named(backend.cupy.ndarray):  # type: ignore[misc]
        pass

    for _ in range(2):
        backend.call(x=backend.array(SHAPES["x"]).view(Named))
    assert backend.all_steps == 2


@pytest.mark.parametrize(
    ("error", "changes", "message"),
    [
        (ValueError, {"stride": 0}, "stride must be at least 1, got 0"),
        (ValueError, {"padding": 9}, "the output extents must be at least 1"),
        (ValueError, {"precision": "TF32"}, "precision must be None or one of"),
        (TypeError, {"precision": 1}, "precision must be None or one of"),
        (TypeError, {"stride": {2}}, "stride must be an integer, got {2} of type set"),
        (TypeError, {"weight": np.ones(SHAPES["weight"], np.float32)}, "weight must be an array of the same library"),
        (TypeError, {"bias": [0.0] * 6}, "bias must be a NumPy, CuPy, PyTorch or JAX array"),
    ],
)
def test_errors_come_again_and_again(
    backend: Backend, error: type[Exception], changes: dict[str, Any], message: str
) -> None:
    backend.call()
    for _ in range(3):
        with pytest.raises(error, match=re.escape(message)):
            backend.call(**changes)
    assert len(backend.launched) == 1
    backend.call()
    assert backend.all_steps == 4


def test_wrong_dtypes_beside_a_remembered_call(backend: Backend) -> None:
    backend.call()
    for name in ("weight", "bias", "out"):
        with pytest.raises(TypeError, match=f"{name} must have x's dtype float32, got float64"):
            backend.call(**{name: backend.array(SHAPES[name], np.float64)})
    assert len(backend.launched) == 1


def test_out_is_compared_with_the_inputs_at_every_call(backend: Backend) -> None:
    # One buffer: out in the middle of it, x and weight before, on or behind it.
    same = (1, 2, 4, 4, 4)
    size = 4 * 128
    memory = backend.memory(4 * size)
    weight = backend.array((2, 2, 1, 1, 1))
    parameters = {"stride": 1, "padding": 0, "output_padding": 0, "bias": None}

    def at(offset: int, shape: tuple[int, ...] = same, strides: Any = None) -> Any:
        return backend.cupy.ndarray(shape, np.float32, memory + offset, strides)

    out = at(size)
    backend.call(x=at(0), weight=weight, out=out, **parameters)
    for offset in (0, 2 * size, 3 * size):
        assert backend.call(x=at(offset), weight=weight, out=out, **parameters) is out
    assert backend.all_steps == 1
    for offset in (16, size - 16, size, 2 * size - 16):
        with pytest.raises(ValueError, match="out must not overlap an input, and it shares memory with x"):
            backend.call(x=at(offset), weight=weight, out=out, **parameters)
    with pytest.raises(ValueError, match="out must not overlap an input, and it shares memory with weight"):
        backend.call(x=at(0), weight=at(2 * size - 16, weight.shape), out=out, **parameters)
    assert len(backend.launched) == 4

    # Backwards in memory: the first element is the last.
    backwards = (-512, -256, -64, -16, -4)
    assert backend.call(x=at(size - 4, strides=backwards), weight=weight, out=out, **parameters) is out
    with pytest.raises(ValueError, match="shares memory with x"):
        backend.call(x=at(size, strides=backwards), weight=weight, out=out, **parameters)

    # Interleaved: within each other's bounds, and without a common element.
    wide = backend.array((1, 4, 4, 4, 4))
    for _ in range(2):
        backend.call(x=wide[:, ::2], weight=weight, out=wide[:, 1::2], **parameters)


def test_plans_are_printed_once(
    backend: Backend, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUCONVT_DEBUG", "plan")
    for _ in range(3):
        backend.call()
        backend.call(stride=3)
    assert capsys.readouterr().err.count("cuconvt plan for") == 2
    assert backend.all_steps == 2


def test_the_memo_is_bounded(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    size = warm._slot.cache_parameters()["maxsize"]
    assert size is not None
    for number in range(size + 10):
        warm._slot(number)
    assert warm._slot.cache_info().currsize == size
    backend.call()
    backend.call()
    assert backend.all_steps == 1


def test_threads(backend: Backend) -> None:
    strides = (1, 2, 3, 4)
    expected = {stride: backend.call(stride=stride, output_padding=0).shape for stride in strides}
    once = len(backend.launched)  # some pack their weights first
    assert once == 5
    warm._slot.cache_clear()

    def work(index: int) -> bool:
        stride = strides[index % 4]
        with backend.cupy.cuda.using_allocator(backend.memory):  # which is a thread's own
            result = backend.call(stride=stride, output_padding=0)
        return result.shape == expected[stride]

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(400)))
    assert len(backend.launched) == 101 * once
    assert backend.all_steps <= 4 + 8 * 4


def test_what_the_driver_reads(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    from cuconvt import launch

    class Named(backend.cupy.ndarray):  # type: ignore[misc]
        pass

    seen = []

    def read(function: int, *numbers: int) -> None:
        *sizes, parameters, extra = numbers
        addresses = (ctypes.c_uint64 * 4).from_address(parameters)
        pointers = [ctypes.c_uint64.from_address(address).value for address in addresses[:3]]
        seen.append((function, sizes, pointers, ctypes.string_at(addresses[3], 24), extra))

    monkeypatch.setattr(launch, "launchKernel", read)
    kernel = launch.Kernel(SimpleNamespace(kernel=SimpleNamespace(ptr=77)))
    problem, stream = np.arange(3), SimpleNamespace(ptr=5)
    bound = kernel.bind(7, 128, 1000, problem.view("V24"), pointers=3)
    array = backend.array((3, 4))
    bound(stream, array, None, array.data)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(bound, stream, array.view(Named), 2**63, None).result()
    assert seen[0] == (77, [7, 1, 1, 128, 1, 1, 1000, 5], [array.data.ptr, 0, array.data.ptr], problem.tobytes(), 0)
    assert seen[1][2:] == ([array.data.ptr, 2**63, 0], *seen[0][3:])


def test_what_the_driver_reads_of_an_early_launch(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    from cuconvt import launch

    seen = []

    def read(configuration: Any, function: Any, parameters: Any, extra: Any) -> int:
        start = ctypes.addressof(configuration._obj)
        numbers = (ctypes.c_uint32 * 14).from_address(start)  # as in cuda.h: seven, a gap, two addresses, a count
        stream, attributes = (ctypes.c_uint64 * 2).from_address(start + 32)
        attribute = (ctypes.c_uint32 * 3).from_address(attributes)
        addresses = (ctypes.c_uint64 * 3).from_address(parameters.value)
        pointers = [ctypes.c_uint64.from_address(address).value for address in addresses[:2]]
        seen.append((numbers[:7], numbers[12], stream, attribute[:3], pointers, ctypes.string_at(addresses[2], 24)))
        assert (function.value, extra) == (77, None)
        return 700 if seen[-1][4][0] == 13 else 0

    failed = []
    monkeypatch.setattr(launch, "_driver", lambda: SimpleNamespace(cuLaunchKernelEx=read))
    monkeypatch.setattr(launch, "check_status", failed.append)
    kernel = launch.Kernel(SimpleNamespace(kernel=SimpleNamespace(ptr=77)))
    problem = np.arange(3)
    bound = kernel.bind(7, 128, 1000, problem.view("V24"), pointers=2, early=True)
    array = backend.array((3, 4))
    bound(SimpleNamespace(ptr=5), array, None)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(bound, SimpleNamespace(ptr=0), 2**63, 8).result()
    sizes = [7, 1, 1, 128, 1, 1, 1000]
    assert seen[0] == (sizes, 1, 5, [6, 0, 1], [array.data.ptr, 0], problem.tobytes())
    assert seen[1] == (sizes, 1, 0, [6, 0, 1], [2**63, 8], problem.tobytes())
    assert not failed
    bound(SimpleNamespace(ptr=5), 13, None)
    assert failed == [700]


def test_who_starts_early(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    from cuconvt import launch

    version = 12030
    monkeypatch.setattr(backend.cupy.cuda.runtime, "driverGetVersion", lambda: version)
    can = launch.can_start_early.__wrapped__
    assert [can(capability) for capability in (80, 89, 90, 100)] == [False, False, True, True]
    version = 12020
    assert not can(90)


# On a GPU.


PROBLEM = case((2, 8, 4, 5, 6), 8, 3, stride=2, padding=1, output_padding=1, has_bias=True)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_of_remembered_calls(dtype: str) -> None:
    import cupy

    for seed in range(3):
        problem = dataclasses.replace(PROBLEM, seed=seed)
        values = problem.arrays(DTYPES[dtype])
        x, weight, bias = map(to_gpu, values)
        expected = Expected(problem, *values)
        out = cupy.empty(problem.out_shape, x.dtype)
        for result in (
            cuconvt.conv_transpose3d(x, weight, bias, **PARAMETERS),
            cuconvt.conv_transpose3d(x, weight, bias, **PARAMETERS, out=out),
        ):
            expected.assert_close(result.view(f"i{result.itemsize}").get().view(result.dtype))


@pytest.mark.gpu
def test_remembered_calls_on_two_devices() -> None:
    import cupy

    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two GPUs")
    values = PROBLEM.arrays(DTYPES["float32"])
    arguments = []
    for device in range(2):
        with cupy.cuda.Device(device):
            arguments.append(list(map(to_gpu, values)))
    with cupy.cuda.Device(0):
        for device in (0, 1, 1, 0):
            y = cuconvt.conv_transpose3d(*arguments[device], **PARAMETERS)
            assert (y.device.id, cupy.cuda.Device().id) == (device, 0)
            with cupy.cuda.Device(device):
                Expected(PROBLEM, *values).assert_close(y.get())


@pytest.mark.gpu
def test_host_time_of_a_remembered_call() -> None:
    import cupy

    x, weight, bias = map(to_gpu, PROBLEM.arrays(DTYPES["float32"]))
    best = float("inf")
    for _ in range(20):
        cupy.cuda.get_current_stream().synchronize()
        start = time.perf_counter()
        for _ in range(200):
            cuconvt.conv_transpose3d(x, weight, bias, **PARAMETERS)
        best = min(best, (time.perf_counter() - start) / 200)
    assert best < 40e-6, f"{1e6 * best:.1f} us"
