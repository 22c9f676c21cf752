"""Every error of the contract, by message; on an error nothing is written to `out`."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cuconvt


def refused(error: type[Exception], message: str, **changes: Any) -> None:
    """Call conv_transpose2d with `changes` to a call that works, and expect `message` and an untouched `out`."""
    arguments: dict[str, Any] = {
        "x": np.ones((2, 4, 5, 6), np.float32),
        "weight": np.ones((4, 3, 3, 3), np.float32),
        "bias": np.ones(6, np.float32),
        "stride": 2,
        "groups": 2,
        "out": np.full((2, 6, 11, 13), np.nan, np.float32),
    }
    arguments.update(changes)
    outs = [array for array in (arguments["out"],) if isinstance(array, np.ndarray)]
    before = [array.tobytes() for array in outs]
    with pytest.raises(error, match=re.escape(message)):
        cuconvt.conv_transpose2d(**arguments)
    assert [array.tobytes() for array in outs] == before


def test_the_call_that_the_others_change_works() -> None:
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        refused(ValueError, "anything")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        # x
        ({"x": np.ones((4, 6), np.float32)}, "x must have 4 axes (N, C_in, H, W) or 3 without N, got shape (4, 6)"),
        ({"x": np.ones((1, 2, 4, 5, 6), np.float32)}, "x must have 4 axes (N, C_in, H, W) or 3 without N"),
        ({"x": np.ones((2, 4, 0, 6), np.float32)}, "x must have spatial extents of at least 1, got shape (2, 4, 0, 6)"),
        # weight
        ({"weight": np.ones((4, 3, 3), np.float32)}, "weight must have 4 axes (C_in, C_out/groups, kH, kW), got shape"),
        ({"weight": np.ones((5, 3, 3, 3), np.float32)}, "weight must have C_in = 4 (x's channels) as its first extent"),
        ({"weight": np.ones((4, 0, 3, 3), np.float32)}, "weight must have no empty axis, got shape (4, 0, 3, 3)"),
        ({"weight": np.ones((4, 3, 3, 0), np.float32)}, "weight must have no empty axis, got shape (4, 3, 3, 0)"),
        # bias
        ({"bias": np.ones(3, np.float32)}, "bias must have shape (C_out,) = (6,), got shape (3,)"),
        ({"bias": np.ones((6, 1), np.float32)}, "bias must have shape (C_out,) = (6,), got shape (6, 1)"),
        # groups
        ({"groups": 3}, "groups must divide the channels of x, got groups=3 with C_in=4"),
        ({"groups": 8}, "groups must divide the channels of x, got groups=8 with C_in=4"),
        ({"groups": 0}, "groups must be at least 1, got 0"),
        ({"groups": -1}, "groups must be at least 1, got -1"),
        # stride, dilation
        ({"stride": 0}, "stride must be at least 1, got 0"),
        ({"stride": (2, -1)}, "stride must be at least 1, got -1"),
        ({"stride": (2, 2, 2)}, "stride must be an integer or 2 of them, one an axis, got (2, 2, 2)"),
        ({"stride": ()}, "stride must be an integer or 2 of them"),
        ({"dilation": 0}, "dilation must be at least 1, got 0"),
        ({"dilation": [1]}, "dilation must be an integer or 2 of them, one an axis, got [1]"),
        # padding
        ({"padding": -1}, "padding must be at least 0, got -1"),
        ({"padding": (1, -2)}, "padding must be at least 0, got -2"),
        ({"padding": ((0, 1), (-3, 0))}, "padding must be at least 0, got -3"),
        ({"padding": (1, 1, 1)}, "padding must be an integer, 2 of them (one an axis) or 2 (before, after) pairs"),
        ({"padding": ((1, 1, 1), (0, 0))}, "padding must have (before, after) pairs of two integers an axis"),
        ({"padding": (b"\1\1", (0, 0))}, "padding must have (before, after) pairs of two integers an axis"),
        ({"padding": ((1,), (0, 0))}, "padding must have (before, after) pairs of two integers an axis"),
        ({"padding": 6}, "the output extents must be at least 1, got (-1, 1)"),
        ({"padding": ((0, 0), (6, 7))}, "the output extents must be at least 1, got (11, 0)"),
        # output_padding, output_size
        ({"output_padding": -1}, "output_padding must be at least 0, got -1"),
        ({"output_padding": 2}, "output_padding must be smaller than max(stride, dilation) on every axis, got"),
        ({"output_padding": (0, 3), "dilation": (4, 1)}, "output_padding must be smaller than max(stride, dilation)"),
        ({"output_padding": (1, 1, 1)}, "output_padding must be an integer or 2 of them"),
        ({"output_size": 10}, "output_size must lie between (11, 13) and (12, 14) for these parameters, got (10, 10)"),
        ({"output_size": (12, 15)}, "output_size must lie between (11, 13) and (12, 14) for these parameters"),
        ({"output_size": (12, 14), "output_padding": 1}, "output_padding must be 0 when output_size is given"),
        ({"output_size": (11, 13, 15)}, "output_size must be an integer or 2 of them"),
        ({"output_size": 0}, "output_size must be at least 1, got 0"),
        # precision
        ({"precision": "fp32"}, "precision must be None or one of 'tf32x3', 'ieee', 'tf32', got 'fp32'"),
        ({"precision": "TF32"}, "precision must be None or one of"),
        # out
        (
            {"out": np.full((2, 6, 11, 12), np.nan, np.float32)},
            "out must have shape (2, 6, 11, 13), got (2, 6, 11, 12)",
        ),
        ({"out": np.full((6, 11, 13), np.nan, np.float32)}, "out must have shape (2, 6, 11, 13), got (6, 11, 13)"),
    ],
)
def test_value_errors(changes: dict[str, Any], message: str) -> None:
    refused(ValueError, message, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        # What is no array.
        ({"x": [[1.0, 2.0]]}, "x must be a NumPy, CuPy, PyTorch or JAX array or support DLPack, got list"),
        ({"x": None}, "x must be a NumPy, CuPy, PyTorch or JAX array or support DLPack, got NoneType"),
        ({"weight": 1.0}, "weight must be a NumPy, CuPy, PyTorch or JAX array or support DLPack, got float"),
        ({"weight": None}, "weight must be a NumPy, CuPy, PyTorch or JAX array or support DLPack, got NoneType"),
        ({"bias": [0.0] * 6}, "bias must be a NumPy, CuPy, PyTorch or JAX array or support DLPack, got list"),
        ({"out": "out"}, "out must be a NumPy, CuPy, PyTorch or JAX array or support DLPack, got str"),
        # Arrays whose meaning a view would lose.
        ({"x": np.ma.masked_array(np.ones((2, 4, 5, 6), np.float32))}, "x must be a plain array, got a numpy.ma"),
        ({"x": np.ones((2, 4, 5, 6), ">f4")}, "x must have native byte order, got dtype '>f4'"),
        ({"weight": np.ones((4, 3, 3, 3), ">f4")}, "weight must have native byte order, got dtype '>f4'"),
        # dtypes
        ({"x": np.ones((2, 4, 5, 6), np.int32)}, "x must have one of the dtypes float16, bfloat16, float32, float64"),
        ({"x": np.ones((2, 4, 5, 6), np.complex64)}, "x must have one of the dtypes float16"),
        ({"x": np.ones((2, 4, 5, 6), bool)}, "x must have one of the dtypes float16"),
        ({"x": np.ones((2, 4, 5, 6), np.longdouble)}, "x must have one of the dtypes float16"),
        ({"x": np.ones((2, 4, 5, 6), object)}, "x must have one of the dtypes float16"),
        ({"x": np.ones((2, 4, 5, 6), ml_dtypes.float8_e4m3fn)}, "x must have one of the dtypes float16"),
        ({"weight": np.ones((4, 3, 3, 3), np.float64)}, "weight must have x's dtype float32, got float64"),
        ({"weight": np.ones((4, 3, 3, 3), np.int64)}, "weight must have x's dtype float32, got int64"),
        ({"bias": np.ones(6, np.float16)}, "bias must have x's dtype float32, got float16"),
        ({"out": np.full((2, 6, 11, 13), np.nan, np.float64)}, "out must have x's dtype float32, got float64"),
        # Parameters that are no integers.
        ({"stride": True}, "stride must be an integer, got True"),
        ({"stride": 2.0}, "stride must be an integer, got 2.0 of type float"),
        (
            {"stride": "2"},
            "stride must be an integer, or a tuple or list of integers, one an axis, got '2' of type str",
        ),
        ({"stride": b"\2\2"}, "stride must be an integer, or a tuple or list of integers, one an axis, got b'"),
        ({"stride": np.array([2, 2])}, "one an axis, got array([2, 2]) of type ndarray"),
        ({"dilation": bytearray(b"\1\1")}, "dilation must be an integer, or a tuple or list of integers, one an axis"),
        ({"stride": None}, "stride must be an integer, got None of type NoneType"),
        ({"stride": (2, 1.5)}, "stride must be an integer, got 1.5 of type float"),
        ({"padding": 0.5}, "padding must be an integer, got 0.5 of type float"),
        ({"padding": False}, "padding must be an integer, got False"),
        (
            {"padding": "same"},
            "padding must be an integer, or a tuple or list of integers or of (before, after) pairs, one an axis",
        ),
        (
            {"padding": b"\1\1"},
            "padding must be an integer, or a tuple or list of integers or of (before, after) pairs",
        ),
        ({"padding": np.array([1, 1])}, "one an axis, got array([1, 1]) of type ndarray"),
        ({"padding": ((0, 1.0), (0, 0))}, "padding must be an integer, got 1.0 of type float"),
        ({"output_padding": 1.0}, "output_padding must be an integer, got 1.0 of type float"),
        ({"dilation": (1, None)}, "dilation must be an integer, got None of type NoneType"),
        ({"groups": 2.0}, "groups must be an integer, got 2.0 of type float"),
        ({"groups": (2,)}, "groups must be an integer, got (2,) of type tuple"),
        ({"groups": np.bool_(True)}, "groups must be an integer, got"),
        ({"output_size": 11.0}, "output_size must be an integer, got 11.0 of type float"),
        ({"precision": 32}, "precision must be None or one of 'tf32x3', 'ieee', 'tf32', got 32 of type int"),
        ({"precision": True}, "precision must be None or one of 'tf32x3', 'ieee', 'tf32', got True of type bool"),
    ],
)
def test_type_errors(changes: dict[str, Any], message: str) -> None:
    refused(TypeError, message, **changes)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float64])
def test_precision_is_for_float32_alone(dtype: Any) -> None:
    name = np.dtype(dtype).name
    arrays = {"x": np.ones((1, 2, 5), dtype), "weight": np.ones((2, 3, 3), dtype)}
    with pytest.raises(
        ValueError, match=f"precision must be None for {name}, got 'ieee': it chooses among float32 modes"
    ):
        cuconvt.conv_transpose1d(**arrays, precision="ieee")


def test_numpy_integers_are_integers() -> None:
    x, weight = np.ones((1, 2, 5)), np.ones((2, 3, 3))
    y = cuconvt.conv_transpose1d(x, weight, stride=np.int64(2), padding=[np.uint8(1)], groups=np.int32(1))
    assert np.array_equal(y, cuconvt.conv_transpose1d(x, weight, stride=2, padding=1))


def test_too_many_positional_arguments() -> None:
    with pytest.raises(TypeError, match="positional argument"):
        cuconvt.conv_transpose1d(np.ones((1, 2, 5)), np.ones((2, 3, 3)), None, 1, 0, 0, 1, 1, 7)  # type: ignore[misc]


# `out` and the memory of the inputs.


def test_read_only_out() -> None:
    out = np.full((2, 6, 11, 13), np.nan, np.float32)
    out.flags.writeable = False
    refused(ValueError, "out must be writable, got a read-only array", out=out)


def test_out_that_shares_its_own_elements() -> None:
    row = np.full((1, 6, 11, 13), np.nan, np.float32)
    out = np.lib.stride_tricks.as_strided(row, (2, 6, 11, 13), (0, *row.strides[1:]))
    refused(ValueError, "out must have its own memory for every element, got strides", out=out)


@pytest.mark.parametrize(
    "strides",
    [
        (56, 8, 8),  # channels and positions of one step
        (56, 4, 8),  # a channel begins where the one before has not ended
        (24, 28, 4),  # as do samples
        (84, 28, 2),  # elements that begin in each other
        (84, 28, -2),
    ],
)
def test_out_whose_elements_overlap(strides: tuple[int, ...]) -> None:
    buffer = np.full(80, np.nan, np.float32)
    out = np.lib.stride_tricks.as_strided(buffer[20:], (2, 3, 7), strides)
    x, weight = np.ones((2, 4, 5), np.float32), np.ones((4, 3, 3), np.float32)
    with pytest.raises(ValueError, match="out must have its own memory for every element, got strides"):
        cuconvt.conv_transpose1d(x, weight, out=out)
    assert np.isnan(buffer).all()


@pytest.mark.parametrize(
    "strides",
    [(84, 28, 4), (84, -28, 4), (12, 4, 24), (4, 8, 24), (28, 56, 4), (-4, 56, 8), (168, 56, 8)],
)
def test_out_whose_elements_are_interleaved(strides: tuple[int, ...]) -> None:
    buffer = np.full(160, np.nan, np.float32)
    out = np.lib.stride_tricks.as_strided(buffer[40:], (2, 3, 7), strides)
    x, weight = np.random.default_rng(5).random((2, 4, 5)), np.ones((4, 3, 3))
    x, weight = x.astype(np.float32), weight.astype(np.float32)
    cuconvt.conv_transpose1d(x, weight, out=out)
    assert np.array_equal(out, cuconvt.conv_transpose1d(x, weight))
    assert np.isfinite(buffer).sum() == out.size


def same_size() -> SimpleNamespace:
    """A problem whose x, weight, bias and result are all views of one buffer, as the tests place them."""
    return SimpleNamespace(x=(1, 2, 6, 6), weight=(2, 2, 1, 1), bias=(2,), out=(1, 2, 6, 6), count=72)


def test_out_is_x() -> None:
    x = np.ones(same_size().x, np.float32)
    weight = np.ones(same_size().weight, np.float32)
    before = x.tobytes()
    with pytest.raises(ValueError, match="out must not overlap an input, and it shares memory with x"):
        cuconvt.conv_transpose2d(x, weight, out=x)
    assert x.tobytes() == before


@pytest.mark.parametrize("offset", [1, 35, 71])
def test_out_overlaps_a_part_of_x(offset: int) -> None:
    sizes = same_size()
    buffer = np.full(sizes.count + offset, np.nan, np.float32)
    x, out = buffer[: sizes.count].reshape(sizes.x), buffer[offset:].reshape(sizes.out)
    weight = np.ones(sizes.weight, np.float32)
    with pytest.raises(ValueError, match="out must not overlap an input, and it shares memory with x"):
        cuconvt.conv_transpose2d(x, weight, out=out)
    assert np.isnan(buffer).all()


def test_out_overlaps_weight_or_bias() -> None:
    sizes = same_size()
    x, out = np.ones(sizes.x, np.float32), np.full(sizes.out, np.nan, np.float32)
    weight = out.reshape(-1)[-4:].reshape(sizes.weight)
    with pytest.raises(ValueError, match="out must not overlap an input, and it shares memory with weight"):
        cuconvt.conv_transpose2d(x, weight, out=out)
    with pytest.raises(ValueError, match="out must not overlap an input, and it shares memory with bias"):
        cuconvt.conv_transpose2d(x, np.ones(sizes.weight, np.float32), out[0, :, 0, 0], out=out)
    assert np.isnan(out).all()


def test_neighbours_and_interleaved_views_are_no_overlap() -> None:
    sizes = same_size()
    weight = np.arange(4, dtype=np.float32).reshape(sizes.weight)
    values = np.arange(sizes.count, dtype=np.float32).reshape(sizes.x)
    expected = cuconvt.conv_transpose2d(values, weight)

    side_by_side = np.zeros(2 * sizes.count, np.float32)
    columns = np.zeros((1, 2, 6, 12), np.float32)
    channels = np.zeros((1, 4, 6, 6), np.float32)
    reversed_columns = np.zeros((1, 2, 6, 12), np.float32)
    pairs = [
        (side_by_side[: sizes.count].reshape(sizes.x), side_by_side[sizes.count :].reshape(sizes.out)),
        (columns[..., ::2], columns[..., 1::2]),
        (channels[:, ::2], channels[:, 1::2]),
        (reversed_columns[..., ::-2], reversed_columns[..., ::2]),
    ]
    for x, out in pairs:
        x[...] = values
        assert cuconvt.conv_transpose2d(x, weight, out=out) is out
        assert np.array_equal(out, expected)
        assert np.array_equal(x, values)


def test_inputs_may_overlap_each_other() -> None:
    x = np.arange(16.0).reshape(1, 4, 4)
    weight = x[0].reshape(4, 2, 2)
    y = cuconvt.conv_transpose1d(x, weight, x.reshape(-1)[:2])
    assert np.array_equal(y, cuconvt.conv_transpose1d(x.copy(), weight.copy(), np.array([0.0, 1.0])))


# The shape function.


@pytest.mark.parametrize(
    ("error", "arguments", "message"),
    [
        (ValueError, ((1, 2, 3), (2, 3)), "weight_shape must have 3 to 5 extents (C_in, C_out/groups, *kernel)"),
        (ValueError, ((1, 2, 3), (2, 3, 1, 1, 1, 1)), "weight_shape must have 3 to 5 extents"),
        (ValueError, ((2, 2), (2, 3, 1, 1)), "x must have 4 axes (N, C_in, H, W) or 3 without N, got shape (2, 2)"),
        (ValueError, ((-1, 2, 3), (2, 3, 1)), "x_shape must be at least 0, got -1"),
        (TypeError, ((1, 2, 3.5), (2, 3, 1)), "x_shape must be an integer, got 3.5 of type float"),
        (TypeError, (5, (2, 3, 1)), "x_shape must be a sequence of integers, got 5 of type int"),
        (TypeError, ((1, 2, 3), 3), "weight_shape must be a sequence of integers, got 3 of type int"),
        (TypeError, ((1, 2, 3), b"\2\3\1"), "weight_shape must be a sequence of integers, got b'"),
        (TypeError, ((1, 2, 3), (2, 3, "1")), "weight_shape must be an integer, got '1' of type str"),
    ],
)
def test_shape_function(error: type[Exception], arguments: tuple, message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        cuconvt.conv_transpose_output_shape(*arguments)


# PyTorch on the CPU.


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch")


def torch_refused(torch: Any, error: type[Exception], message: str, **changes: Any) -> None:
    arguments = {
        "x": torch.ones(1, 2, 5),
        "weight": torch.ones(2, 3, 3),
        "bias": torch.ones(3),
        "out": torch.full((1, 3, 7), torch.nan),
        **changes,
    }
    with pytest.raises(error, match=re.escape(message)):
        cuconvt.conv_transpose1d(**arguments)
    if isinstance(arguments["out"], torch.Tensor):
        assert arguments["out"].isnan().all()


@pytest.mark.parametrize("role", ["x", "weight", "bias"])
def test_torch_requires_grad(torch: Any, role: str) -> None:
    shape = {"x": (1, 2, 5), "weight": (2, 3, 3), "bias": (3,)}[role]
    torch_refused(torch, ValueError, f"{role} requires grad", **{role: torch.ones(shape, requires_grad=True)})
    torch_refused(torch, ValueError, f"{role} requires grad", **{role: torch.nn.Parameter(torch.ones(shape))})


def test_torch_out_requires_grad(torch: Any) -> None:
    torch_refused(torch, ValueError, "out requires grad", out=torch.full((1, 3, 7), torch.nan, requires_grad=True))


def test_torch_neg_bit(torch: Any) -> None:
    x = torch.ones(1, 2, 5, dtype=torch.complex64).conj().imag
    assert x.is_neg()
    torch_refused(torch, ValueError, "x has its conj or neg bit set", x=x)


def test_torch_conj_bit(torch: Any) -> None:
    x = torch.ones(1, 2, 5, dtype=torch.complex64).conj()
    assert x.is_conj()
    torch_refused(torch, ValueError, "x has its conj or neg bit set", x=x)


def test_torch_dtypes(torch: Any) -> None:
    torch_refused(torch, TypeError, "x must have one of the dtypes float16", x=torch.ones(1, 2, 5, dtype=torch.int32))
    torch_refused(torch, TypeError, "x must have one of the dtypes float16", x=torch.ones(1, 2, 5, dtype=torch.bool))
    float8 = torch.ones(1, 2, 5).to(torch.float8_e4m3fn)
    torch_refused(torch, TypeError, "x must have one of the dtypes float16", x=float8)
    torch_refused(torch, TypeError, "float32, float64, got float8_e4m3fn", weight=float8)
    weight = torch.ones(2, 3, 3, dtype=torch.bfloat16)
    torch_refused(torch, TypeError, "weight must have x's dtype float32, got bfloat16", weight=weight)


def test_torch_layouts_and_devices(torch: Any) -> None:
    torch_refused(
        torch, TypeError, "x must be a strided tensor, got layout torch.sparse_coo", x=torch.ones(1, 2, 5).to_sparse()
    )
    torch_refused(torch, TypeError, "CPU or CUDA device, got one on meta", x=torch.ones(1, 2, 5, device="meta"))


def test_torch_out_overlaps(torch: Any) -> None:
    buffer = torch.full((1, 2, 6), torch.nan)
    with pytest.raises(ValueError, match="out must not overlap an input, and it shares memory with x"):
        cuconvt.conv_transpose1d(buffer, torch.ones(2, 2, 1), out=buffer)
    assert buffer.isnan().all()


@pytest.mark.parametrize("role", ["weight", "bias", "out"])
def test_mixed_libraries(torch: Any, role: str) -> None:
    shape = {"weight": (4, 3, 3, 3), "bias": (6,), "out": (2, 6, 11, 13)}[role]
    message = f"{role} must be an array of the same library as x, got torch and numpy"
    refused(TypeError, message, **{role: torch.zeros(shape)})
    out = {"out": np.full((1, 3, 7), np.nan, np.float32)}
    torch_refused(torch, TypeError, "out must be an array of the same library as x, got numpy and torch", **out)
    assert np.isnan(out["out"]).all()


# JAX on the CPU.


def test_jax_arrays_are_never_written() -> None:
    jnp = pytest.importorskip("jax.numpy")
    with pytest.raises(TypeError, match="out must be writable, and JAX arrays are immutable: leave out=None"):
        cuconvt.conv_transpose1d(jnp.ones((1, 2, 5)), jnp.ones((2, 3, 3)), out=jnp.ones((1, 3, 7)))


def test_jax_transformations() -> None:
    jax = pytest.importorskip("jax")
    weight = jax.numpy.ones((2, 3, 3))
    with pytest.raises(TypeError, match="x is traced by a JAX transformation"):
        jax.jit(lambda x: cuconvt.conv_transpose1d(x, weight))(jax.numpy.ones((1, 2, 5)))
