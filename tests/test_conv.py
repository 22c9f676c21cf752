"""conv1d, conv2d and conv3d, and their gradients, with the NumPy backend, against float64 references and torch."""

from __future__ import annotations

import inspect
import re
from typing import Any

import numpy as np
import pytest
from fixed_cases import FIXED
from gradients import CONVOLUTIONS, as_conv, check, conv_parameters, direct_input, gradient_of
from harness import call, is_channels_last
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import DTYPES, LAYOUTS, Problem, case, place, problems

import cuconvt

EXAMPLES = settings().max_examples
A_THIRD = settings(max_examples=max(EXAMPLES // 3, 1))


def conv(problem: Problem, x: Any, weight: Any, *arrays: Any, **keywords: Any) -> Any:
    return getattr(cuconvt, f"conv{problem.rank}d")(x, weight, *arrays, **conv_parameters(problem), **keywords)


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_any_problem(name: str) -> None:
    @given(problem=problems(), dtype=st.sampled_from(sorted(DTYPES)))
    def every_problem(problem: Problem, dtype: str) -> None:
        check(name, problem, dtype)

    every_problem()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fixed", FIXED)
def test_fixed_case(fixed: str, dtype: str) -> None:
    for name in CONVOLUTIONS:
        check(name, FIXED[fixed], dtype)


@A_THIRD
@given(problem=problems())
def test_convolution_of_torch(problem: Problem) -> None:
    torch = pytest.importorskip("torch")
    problem = as_conv(problem)
    x, weight = gradient_of(problem, DTYPES["float64"]), problem.arrays(DTYPES["float64"])[1]
    bias = np.arange(weight.shape[0], dtype=np.float64)
    # torch's own padding is symmetric; its pad takes the axes from the last to the first.
    padding = [extra for pair in reversed(problem.padding) for extra in pair]
    tensors = [torch.from_numpy(a) for a in (x, weight, bias)]
    tensors[0] = torch.nn.functional.pad(tensors[0], padding)
    function = getattr(torch.nn.functional, f"conv{problem.rank}d")
    parameters = {"stride": problem.stride, "dilation": problem.dilation, "groups": problem.groups}
    theirs = function(*tensors, **parameters).numpy()
    magnitude = direct_input(problem, abs(x), abs(weight)) + bias.reshape(-1, *(1,) * problem.rank)
    got = conv(problem, x, weight, bias)
    assert got.shape == theirs.shape
    assert (np.abs(got - theirs) <= 64 * 2.0**-53 * magnitude).all()


@A_THIRD
@given(problem=problems())
def test_it_is_the_adjoint_of_the_transposed_convolution(problem: Problem) -> None:
    """<conv_transpose(x), g> = <x, conv(g)>."""
    problem = as_conv(problem)
    x, weight, _ = problem.arrays(DTYPES["float64"])
    g = gradient_of(problem, DTYPES["float64"])
    scale = np.vdot(call(problem, abs(x), abs(weight)), abs(g))
    assert abs(np.vdot(call(problem, x, weight), g) - np.vdot(x, conv(problem, g, weight))) <= 1e-14 * scale


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("kernel", [1, 2, 3, 4])
@pytest.mark.parametrize("dilation", [1, 3])
def test_padding_by_name(rank: int, kernel: int, dilation: int) -> None:
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    x, weight = rng.standard_normal((2, 4, *(11, 12, 13)[:rank])), rng.standard_normal((6, 2, *(kernel,) * rank))
    function, theirs = (getattr(m, f"conv{rank}d") for m in (cuconvt, torch.nn.functional))
    for padding in ("same", "valid"):
        parameters = {"padding": padding, "dilation": dilation, "groups": 2}
        if padding == "valid" and dilation * (kernel - 1) >= 11:
            continue
        got = function(x, weight, **parameters)
        np.testing.assert_allclose(
            got, theirs(torch.from_numpy(x), torch.from_numpy(weight), **parameters).numpy(), rtol=1e-12, atol=1e-12
        )
    assert function(x, weight, padding="same", dilation=dilation, groups=2).shape == (2, 6, *x.shape[2:])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str) -> None:
    problem = case((2, 8, 4, 5, 9), 8, 3, stride=2, padding=1, groups=4, x_layout=layout, has_bias=True)
    for name in CONVOLUTIONS:
        check(name, problem, "float32")


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_channels_last_in_channels_last_out(rank: int) -> None:
    x = np.random.default_rng(0).standard_normal((2, 4, *(8, 9, 10)[:rank]))
    weight = np.ones((6, 4, *(3,) * rank))
    function = getattr(cuconvt, f"conv{rank}d")
    got = function(place(x, rank, "channels_last")[0], weight, stride=2)
    assert is_channels_last(got, rank)
    assert not got.flags.c_contiguous
    np.testing.assert_allclose(got, function(x, weight, stride=2), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_empty_batch_and_unbatched(rank: int) -> None:
    function = getattr(cuconvt, f"conv{rank}d")
    weight = np.ones((6, 4, *(3,) * rank), np.float32)
    x = np.ones((1, 4, *(7,) * rank), np.float32)
    assert function(x[:0], weight, padding=1, stride=2).shape == (0, 6, *(4,) * rank)
    unbatched = function(x[0], weight, padding=1, stride=2)
    assert np.array_equal(unbatched, function(x, weight, padding=1, stride=2)[0])
    gradient = getattr(cuconvt.grad, f"conv{rank}d_weight")
    grad_output = np.ones((0, 6, *(5,) * rank), np.float32)
    assert not gradient(x[:0], weight.shape, grad_output).any()


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_argument_order_is_that_of_torch(rank: int) -> None:
    function = getattr(pytest.importorskip("torch").nn.functional, f"conv{rank}d")
    theirs = re.search(r"conv\dd\((.*?)\) -> Tensor", function.__doc__)
    assert theirs is not None
    names = [argument.partition("=")[0] for argument in theirs[1].split(", ")]
    ours = inspect.signature(getattr(cuconvt, f"conv{rank}d")).parameters.values()
    assert ["input" if p.name == "x" else p.name for p in ours if p.kind is not p.KEYWORD_ONLY] == names


# Errors.


def refused(error: type[Exception], message: str, **changes: Any) -> None:
    """Call conv2d with `changes` to a call that works, and expect `message` and an untouched `out`."""
    arguments: dict[str, Any] = {
        "x": np.ones((2, 6, 9, 11), np.float32),
        "weight": np.ones((4, 3, 3, 3), np.float32),
        "bias": np.ones(4, np.float32),
        "stride": 2,
        "groups": 2,
        "out": np.full((2, 4, 4, 5), np.nan, np.float32),
        **changes,
    }
    out = arguments["out"]
    before = out.tobytes()
    with pytest.raises(error, match=re.escape(message)):
        cuconvt.conv2d(**arguments)
    assert out.tobytes() == before


def test_the_call_that_the_others_change_works() -> None:
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        refused(ValueError, "anything")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": np.ones((6, 9), np.float32)}, "x must have 4 axes (N, C_in, H, W) or 3 without N, got shape (6, 9)"),
        ({"x": np.ones((2, 6, 0, 9), np.float32)}, "x must have spatial extents of at least 1, got shape (2, 6, 0, 9)"),
        ({"weight": np.ones((4, 3, 3), np.float32)}, "weight must have 4 axes (C_out, C_in/groups, kH, kW), got shape"),
        ({"weight": np.ones((4, 3, 0, 3), np.float32)}, "weight must have no empty axis, got shape (4, 3, 0, 3)"),
        (
            {"weight": np.ones((4, 6, 3, 3), np.float32)},
            "weight must have C_in/groups as its second extent, got shape (4, 6, 3, 3) with C_in=6 (x's channels)",
        ),
        ({"weight": np.ones((5, 3, 3, 3), np.float32)}, "groups must divide the first extent of weight, got groups=2"),
        ({"bias": np.ones(6, np.float32)}, "bias must have shape (C_out,) = (4,), got shape (6,)"),
        ({"groups": 0}, "groups must be at least 1, got 0"),
        ({"stride": 0}, "stride must be at least 1, got 0"),
        ({"dilation": (1, 0)}, "dilation must be at least 1, got 0"),
        ({"dilation": 5}, "the output extents must be at least 1, got (0, 1): x of extents (9, 11)"),
        ({"padding": -1}, "padding must be at least 0, got -1"),
        ({"padding": "full"}, "padding must be 'valid', 'same' or integers, got 'full'"),
        ({"padding": "same"}, "padding='same' must come with a stride of 1, got stride=(2, 2)"),
        ({"precision": "fp32"}, "precision must be None or one of 'tf32x3', 'ieee', 'tf32', got 'fp32'"),
        ({"out": np.full((2, 4, 4, 4), np.nan, np.float32)}, "out must have shape (2, 4, 4, 5), got (2, 4, 4, 4)"),
    ],
)
def test_value_errors(changes: dict[str, Any], message: str) -> None:
    refused(ValueError, message, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": None}, "x must be a NumPy, CuPy, PyTorch or JAX array or support DLPack, got NoneType"),
        ({"weight": np.ones((4, 3, 3, 3))}, "weight must have x's dtype float32, got float64"),
        ({"bias": np.ones(4, np.float16)}, "bias must have x's dtype float32, got float16"),
        ({"x": np.ones((2, 6, 9, 11), np.int8)}, "x must have one of the dtypes float16, bfloat16, float32, float64"),
        ({"stride": 2.0}, "stride must be an integer, got 2.0 of type float"),
        ({"padding": (1, 0.5)}, "padding must be an integer, got 0.5 of type float"),
    ],
)
def test_type_errors(changes: dict[str, Any], message: str) -> None:
    refused(TypeError, message, **changes)


def test_out_overlap() -> None:
    x = np.ones((1, 2, 6, 6), np.float32)
    with pytest.raises(ValueError, match="out must not overlap an input, and it shares memory with x"):
        cuconvt.conv2d(x, np.ones((2, 2, 1, 1), np.float32), out=x)
    assert (x == 1).all()


def test_gradients_check_grad_output() -> None:
    x, weight, y = np.ones((2, 4, 9)), np.ones((6, 4, 3)), np.ones((2, 6, 4))
    assert cuconvt.grad.conv1d_input(x.shape, weight, y, stride=2).shape == x.shape
    with pytest.raises(ValueError, match=re.escape("grad_output must have shape (2, 6, 7), that of the result")):
        cuconvt.grad.conv1d_input(x.shape, weight, y)
    with pytest.raises(ValueError, match=re.escape("grad_output must have shape (2, 6, 9), that of the result")):
        cuconvt.grad.conv1d_weight(x, weight.shape, y, padding="same")
    with pytest.raises(ValueError, match=re.escape("weight_size must have C_in/groups as its second extent")):
        cuconvt.grad.conv1d_weight(x, (6, 3, 3), y)


# Other libraries.


def test_torch() -> None:
    torch = pytest.importorskip("torch")
    x, weight, bias = torch.randn(2, 4, 9, 10), torch.randn(6, 4, 3, 3), torch.randn(6)
    y = cuconvt.conv2d(x, weight, bias, 2, 1)
    assert type(y) is torch.Tensor
    torch.testing.assert_close(y, torch.nn.functional.conv2d(x, weight, bias, 2, 1))
    assert cuconvt.conv2d(x.to(memory_format=torch.channels_last), weight).is_contiguous(
        memory_format=torch.channels_last
    )
    with pytest.raises(ValueError, match="weight requires grad"):
        cuconvt.conv2d(x, weight.requires_grad_())


def test_jax() -> None:
    jax = pytest.importorskip("jax")
    x, weight = np.ones((2, 4, 9), np.float32), np.ones((6, 4, 3), np.float32)
    with jax.default_device(jax.devices("cpu")[0]):
        y = cuconvt.conv1d(jax.numpy.asarray(x), jax.numpy.asarray(weight))
        assert isinstance(y, jax.Array)
        assert np.array_equal(np.asarray(y), cuconvt.conv1d(x, weight))
