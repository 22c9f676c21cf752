"""The array bridge on the CPU: the same library out, its memory in place, its layout kept, and nothing imported."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from harness import call, is_channels_last
from reference import Expected
from strategies import DTYPES, case, place

import cuconvt
from cuconvt import arrays as bridges

ROOT = Path(cuconvt.__file__).resolve().parents[1]
PROBLEM = case((2, 4, 5, 6, 7), 6, 3, stride=2, padding=1, output_padding=1, groups=2, has_bias=True)


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch")


@pytest.fixture
def jnp() -> Iterator[Any]:
    jax = pytest.importorskip("jax")
    with jax.default_device(jax.devices("cpu")[0]):
        yield jax.numpy


# What is imported.


def imported_after(code: str) -> set[str]:
    """Run code in a new interpreter and return which of the large packages it has imported."""
    code += "\nimport sys; print(*({'cupy', 'torch', 'jax', 'ml_dtypes', 'scipy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_import_needs_numpy_alone() -> None:
    assert imported_after("import cuconvt") == set()


def test_numpy_arrays_import_nothing() -> None:
    code = "import cuconvt, numpy as np\ncuconvt.conv_transpose3d(np.ones((1, 2, 3, 3, 3)), np.ones((2, 2, 2, 2, 2)))"
    assert imported_after(code) == set()


def test_torch_tensors_on_the_cpu_import_no_cupy(torch: Any) -> None:
    code = "import cuconvt, torch\ncuconvt.conv_transpose1d(torch.ones(1, 2, 3), torch.ones(2, 2, 2))"
    assert "cupy" not in imported_after(code)
    assert "jax" not in imported_after(code)


# NumPy.


def test_numpy_result_owns_its_memory_and_inputs_stay() -> None:
    x, weight, bias = PROBLEM.arrays(DTYPES["float32"])
    before = x.tobytes(), weight.tobytes(), bias.tobytes()
    y = call(PROBLEM, x, weight, bias)
    assert type(y) is np.ndarray
    assert y.flags.writeable
    assert (x.tobytes(), weight.tobytes(), bias.tobytes()) == before


def test_read_only_inputs_are_fine() -> None:
    arrays = PROBLEM.arrays(DTYPES["float32"])
    expected = call(PROBLEM, *arrays)
    for array in arrays:
        array.flags.writeable = False
    assert np.array_equal(call(PROBLEM, *arrays), expected)


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("batched", [True, False])
def test_numpy_layout_is_kept(rank: int, batched: bool) -> None:
    x = (2, 4, *(5, 6, 7)[:rank]) if batched else (4, *(5, 6, 7)[:rank])
    problem = case(x, 6, 3, stride=2, rank=rank)
    values, weight, _ = problem.arrays(DTYPES["float32"])
    contiguous = call(problem, values, weight)
    assert contiguous.flags.c_contiguous
    channels_last = call(problem, place(values, rank, "channels_last")[0], weight)
    assert is_channels_last(channels_last, rank)
    assert not channels_last.flags.c_contiguous
    np.testing.assert_allclose(channels_last, contiguous, rtol=1e-5, atol=1e-5)
    assert call(problem, place(values, rank, "strided")[0], weight).flags.c_contiguous


def test_subclass_of_ndarray_gives_a_plain_array() -> None:
    class Named(np.ndarray):
        pass

    x, weight, _ = case((1, 2, 5), 3, 3).arrays(DTYPES["float32"])
    y = cuconvt.conv_transpose1d(x.view(Named), weight)
    assert type(y) is np.ndarray


def test_what_a_subclass_overrides_is_not_used() -> None:
    class Refuses(np.ndarray):
        def __array_ufunc__(self, *arguments: Any, **keywords: Any) -> Any:
            return NotImplemented

    x, weight, bias = case((1, 2, 5), 3, 3, has_bias=True).arrays(DTYPES["float32"])
    expected = cuconvt.conv_transpose1d(x, weight, bias)
    out = np.empty_like(expected).view(Refuses)
    assert cuconvt.conv_transpose1d(x.view(Refuses), weight.view(Refuses), bias.view(Refuses), out=out) is out
    assert out.tobytes() == expected.tobytes()
    gradient = cuconvt.grad.conv_transpose1d_bias(expected.view(Refuses))
    assert np.array_equal(gradient, cuconvt.grad.conv_transpose1d_bias(expected))


@pytest.mark.filterwarnings("ignore:the matrix subclass:PendingDeprecationWarning")
def test_matrix_whose_slices_keep_both_axes() -> None:
    x, weight = np.arange(5.0).reshape(1, 5), np.arange(6.0).reshape(1, 2, 3)
    y = cuconvt.conv_transpose1d(np.matrix(x), weight)
    assert type(y) is np.ndarray
    assert np.array_equal(y, cuconvt.conv_transpose1d(x, weight))


def test_gpu_memory_without_cupy_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)  # import cupy now raises ImportError
    required = f"arrays in GPU memory need CuPy: {sys.executable} -m pip install 'cupy-cuda1"
    with pytest.raises(cuconvt.MissingDependencyError, match=re.escape(required)):
        bridges._cupy()


# PyTorch on the CPU.


def tensors(torch: Any, dtype: str) -> list[Any]:
    values = PROBLEM.arrays(DTYPES[dtype])
    as_bits = [torch.from_numpy(a.view(f"i{a.dtype.itemsize}")) for a in values]
    return [t.view(getattr(torch, dtype)) for t in as_bits]


def from_torch(torch: Any, tensor: Any, dtype: str) -> np.ndarray:
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.view(bits).numpy().view(DTYPES[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_torch(torch: Any, dtype: str) -> None:
    expected = Expected(PROBLEM, *PROBLEM.arrays(DTYPES[dtype]))
    arguments = tensors(torch, dtype)
    y = call(PROBLEM, *arguments)
    assert type(y) is torch.Tensor
    assert y.dtype == getattr(torch, dtype)
    assert y.device == arguments[0].device
    assert y.is_contiguous()
    expected.assert_close(from_torch(torch, y, dtype))

    out = torch.full(PROBLEM.out_shape, torch.nan, dtype=y.dtype)
    pointer = out.data_ptr()
    assert call(PROBLEM, *arguments, out=out) is out
    assert out.data_ptr() == pointer
    expected.assert_close(from_torch(torch, out, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_memory_is_viewed_in_place(torch: Any, dtype: str) -> None:
    from cuconvt.arrays import bridge_of

    x, weight, _ = tensors(torch, dtype)
    bridge, device = bridge_of({"x": x, "weight": weight})
    view = bridge.view(x)
    assert device == ("cpu", 0)
    assert view.ctypes.data == x.data_ptr()
    assert view.dtype == DTYPES[dtype]
    assert tuple(s // view.itemsize for s in view.strides) == x.stride()


@pytest.mark.parametrize("dtype", [*DTYPES, "int32"])
def test_torch_views_of_every_kind(torch: Any, dtype: str) -> None:
    from cuconvt.arrays import TorchBridge

    whole = torch.arange(60).reshape(3, 4, 5).to(getattr(torch, dtype))
    kinds = (whole, whole.permute(2, 0, 1), whole[:, 1:, ::2], whole[:1].expand(3, 4, 5), whole[0, 0, 0], whole[:0])
    for tensor in (*kinds, whole[:, :0]):
        view = TorchBridge().view(tensor)
        assert view.shape == tuple(tensor.shape)
        assert view.flags.writeable
        assert view.dtype == DTYPES.get(dtype, np.int32)
        assert view.astype(float).tolist() == tensor.double().tolist()
    view = TorchBridge().view(torch.full((1000,), 7, dtype=whole.dtype))  # it alone keeps the memory
    other = torch.zeros(1000, dtype=whole.dtype)
    assert (view == 7).all()
    assert (other == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_memory_can_be_resized_after_a_call(torch: Any, dtype: str) -> None:
    x, weight, bias = (tensor.clone() for tensor in tensors(torch, dtype))  # NumPy's memory cannot be resized
    out = torch.empty(PROBLEM.out_shape, dtype=x.dtype)
    results = [call(PROBLEM, x, weight, bias), call(PROBLEM, x, weight, bias, out=out)]
    for tensor in (x, weight, bias, *results):
        shape = tensor.shape
        tensor.resize_(tensor.numel() + 1000).resize_(shape)
    x.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match=r"a tensor must have memory, got one of shape \(2, 4, 5, 6, 7\)"):
        call(PROBLEM, x, weight, bias)


def test_torch_buffer_is_reused(torch: Any) -> None:
    sample, weight = torch.ones(2, 5), torch.ones(2, 3, 3)
    batch = torch.empty(0)
    for n in (2, 3):
        batch.resize_(0)
        torch.stack([sample] * n, out=batch)
        assert cuconvt.conv_transpose1d(batch, weight).shape == (n, 3, 7)


def test_torch_memory_format(torch: Any) -> None:
    x, weight, bias = tensors(torch, "float32")
    y = call(PROBLEM, x.to(memory_format=torch.channels_last_3d), weight, bias)
    assert y.is_contiguous(memory_format=torch.channels_last_3d)
    assert not y.is_contiguous()
    assert torch.allclose(y, call(PROBLEM, x, weight, bias), atol=1e-5)
    image = torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last)
    assert cuconvt.conv_transpose2d(image, torch.ones(3, 4, 2, 2)).is_contiguous(memory_format=torch.channels_last)


def test_torch_views(torch: Any) -> None:
    x, weight, bias = tensors(torch, "float32")
    larger = torch.full((2, 4, 6, 6, 14), torch.nan)
    view = larger[:, :, 1:, :, ::2]
    view.copy_(x)
    expected = call(PROBLEM, x, weight, bias)
    assert torch.allclose(call(PROBLEM, view, weight, bias), expected, atol=1e-5)
    assert torch.allclose(call(PROBLEM, x[:1].expand_as(x), weight, bias)[1], expected[0], atol=1e-5)
    out = torch.full((2, 12, *PROBLEM.out_shape[2:]), torch.nan)
    assert torch.allclose(call(PROBLEM, x, weight, bias, out=out[:, ::2]), expected, atol=1e-5)
    assert out[:, 1::2].isnan().all()


def test_torch_equals_numpy_bitwise(torch: Any) -> None:
    expected = call(PROBLEM, *PROBLEM.arrays(DTYPES["float32"]))
    assert np.array_equal(call(PROBLEM, *tensors(torch, "float32")).numpy(), expected)


def test_torch_empty_batch_and_unbatched(torch: Any) -> None:
    weight = torch.ones(2, 3, 3)
    assert cuconvt.conv_transpose1d(torch.ones(0, 2, 5), weight).shape == (0, 3, 7)
    assert cuconvt.conv_transpose1d(torch.ones(2, 5), weight).shape == (3, 7)


def test_torch_requires_grad_is_accepted_where_nothing_is_recorded(torch: Any) -> None:
    x, weight = torch.ones(1, 2, 5), torch.ones(2, 3, 3, requires_grad=True)
    with torch.no_grad():
        y = cuconvt.conv_transpose1d(x, weight)
        assert torch.equal(y, torch.nn.functional.conv_transpose1d(x, weight))
    assert not y.requires_grad


def test_torch_result_takes_part_in_autograd_as_a_constant(torch: Any) -> None:
    y = cuconvt.conv_transpose1d(torch.ones(1, 2, 5), torch.ones(2, 3, 3))
    scale = torch.ones((), requires_grad=True)
    (y * scale).sum().backward()
    assert scale.grad == y.sum()


# JAX on the CPU.


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_jax(jnp: Any, dtype: str) -> None:
    import jax

    values = PROBLEM.arrays(DTYPES[dtype])
    arguments = [jnp.asarray(a) for a in values]
    y = call(PROBLEM, *arguments)
    assert isinstance(y, jax.Array)
    assert y.dtype == DTYPES[dtype]
    assert y.devices() == arguments[0].devices()
    Expected(PROBLEM, *values).assert_close(np.asarray(y))
    assert (y + 1).shape == PROBLEM.out_shape
    for before, after in zip(values, arguments, strict=True):
        assert np.asarray(after).tobytes() == before.tobytes()


def test_jax_float64(jnp: Any) -> None:
    import jax

    enable_x64 = jax.enable_x64 if hasattr(jax, "enable_x64") else jax.experimental.enable_x64
    with enable_x64(True):
        values = PROBLEM.arrays(DTYPES["float64"])
        y = call(PROBLEM, *(jnp.asarray(a) for a in values))
        assert y.dtype == np.float64
        Expected(PROBLEM, *values).assert_close(np.asarray(y))


def test_jax_memory_is_viewed_and_handed_over_in_place(jnp: Any) -> None:
    from cuconvt.arrays import bridge_of

    x = jnp.ones((2, 3, 4), jnp.float32)
    bridge, device = bridge_of({"x": x, "weight": x})
    assert device == ("cpu", 0)
    assert bridge.view(x).ctypes.data == x.unsafe_buffer_pointer()
    result = bridge.empty((2, 3, 5), (0, 1, 2), x)
    assert bridge.finish(result).unsafe_buffer_pointer() == result.ctypes.data


def test_jax_empty_batch(jnp: Any) -> None:
    assert cuconvt.conv_transpose1d(jnp.ones((0, 2, 5)), jnp.ones((2, 3, 3))).shape == (0, 3, 7)


# Another library, known only by DLPack and the array API's two methods.


class Foreign:
    """The least that an array must have: a shape, DLPack and `__array_namespace__`."""

    def __init__(self, memory: np.ndarray):
        self.memory = memory
        self.shape = memory.shape

    def __dlpack__(self, **keywords: Any) -> Any:
        return self.memory.__dlpack__(**keywords)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.memory.__dlpack_device__()

    def __array_namespace__(self, api_version: str | None = None) -> Any:
        return SimpleNamespace(from_dlpack=lambda array: Foreign(np.from_dlpack(array)))


def test_foreign_array() -> None:
    values = PROBLEM.arrays(DTYPES["float32"])
    expected = call(PROBLEM, *values)
    arguments = [Foreign(a) for a in values]
    y = call(PROBLEM, *arguments)
    assert type(y) is Foreign
    assert np.array_equal(y.memory, expected)
    if not np.from_dlpack(values[0]).flags.writeable:
        pytest.skip("this NumPy reads all DLPack memory as read-only, so out is refused")
    out = Foreign(np.full(PROBLEM.out_shape, np.nan, np.float32))
    assert call(PROBLEM, *arguments, out=out) is out
    assert np.array_equal(out.memory, expected)


def test_foreign_array_mixed_with_numpy() -> None:
    values = PROBLEM.arrays(DTYPES["float32"])
    with pytest.raises(TypeError, match="weight must be an array of the same library as x, got numpy and "):
        call(PROBLEM, Foreign(values[0]), values[1])


def test_foreign_array_without_a_namespace() -> None:
    class Capsule:
        shape = (1, 2, 5)
        memory = np.ones(shape)
        __dlpack__ = memory.__dlpack__
        __dlpack_device__ = memory.__dlpack_device__

    with pytest.raises(
        TypeError, match=r"x speaks DLPack, but its library offers no __array_namespace__\(\)\.from_dlpack"
    ):
        cuconvt.conv_transpose1d(Capsule(), np.ones((2, 3, 3)))


def test_foreign_array_on_another_device() -> None:
    class Elsewhere(Foreign):
        def __dlpack_device__(self) -> tuple[int, int]:
            return (10, 0)  # ROCm

    with pytest.raises(TypeError, match="must be in CPU or CUDA memory, got DLPack device type 10"):
        cuconvt.conv_transpose1d(Elsewhere(np.ones((1, 2, 5))), Elsewhere(np.ones((2, 3, 3))))


def test_bfloat16_is_that_of_ml_dtypes() -> None:
    assert call(PROBLEM, *PROBLEM.arrays(DTYPES["bfloat16"])).dtype == ml_dtypes.bfloat16
