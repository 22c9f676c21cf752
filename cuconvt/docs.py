"""The docstrings of the public functions: one template a family, filled in for one, two or three spatial axes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])

_AXES = {1: "W", 2: "H, W", 3: "D, H, W"}
_KERNEL = {1: "kW", 2: "kH, kW", 3: "kD, kH, kW"}

CONV_TRANSPOSE = """Transposed convolution over {rank} spatial {axis_or_axes}.

The order of the positional arguments is that of ``torch.nn.functional.conv_transpose{rank}d``.

Parameters
----------
x : array, shape (N, C_in, {axes}) or, unbatched, (C_in, {axes})
    NumPy, CuPy, PyTorch or JAX array, or any other with ``__dlpack__``, of dtype float16, bfloat16, float32 or float64.
    Any strides.
weight : array, shape (C_in, C_out/groups, {kernel})
    Of x's library, device and dtype, as are `bias` and `out`.
bias : array, shape (C_out,), optional
    Added to every output of its channel.
stride, dilation : int or sequence of {rank} int, default 1
    Step between the outputs of neighbouring inputs, and between the taps of the kernel; one value an axis.
padding : int, sequence of {rank} int or sequence of {rank} (before, after) pairs, default 0
    How many outputs to cut off at each end of an axis.
output_padding : int or sequence of {rank} int, default 0
    Outputs to add at the end of an axis; less than ``max(stride, dilation)`` there.
groups : int, default 1
    Number of groups into which the channels of x and of the result are split; divides C_in.
output_size : int or sequence of {rank} int, optional
    Spatial extents of the result; chooses `output_padding`, which must then be 0.
precision : {{"tf32x3", "ieee", "tf32"}}, optional
    How float32 is multiplied; None is "tf32x3". Must be None for the other dtypes.
out : array, shape of the result, optional
    Written in place and returned. Must overlap neither an input nor itself.

Returns
-------
array, shape (N, C_out, {axes}) or, unbatched, (C_out, {axes})
    Of x's library, device and dtype. In C order, or channels-last in memory where x is.

Raises
------
TypeError
    An argument is no array or no integer, a dtype is unsupported, or arrays differ in library, device or dtype.
ValueError
    A shape or a parameter does not fit: wrong rank, channels that `groups` does not divide, an output extent below 1,
    an `output_padding` or `output_size` out of range, a negative padding, a stride or dilation below 1, an unknown
    `precision`, an `out` of the wrong shape or that overlaps an input or itself, a tensor that requires grad.
    Nothing is launched or written then.
CompileError
    The kernel for these parameters did not compile; the message holds NVRTC's log.
MissingDependencyError
    The arrays need a package that is not installed (CuPy for GPU memory, ml_dtypes for bfloat16); the message holds the
    command that installs it.

See Also
--------
conv_transpose_output_shape : The shape of the result, without any array.

Notes
-----
On each axis, with ``i`` an input, ``k`` a tap and ``o`` an output position, the result is ::

    y[n, co, o] = bias[co] + sum of x[n, ci, i] * weight[ci, co', k]
                  over ci in the group of co, and all i, k with i*stride + k*dilation = o + pad_before

where ``co'`` is the index of ``co`` in its group. The output extent is ::

    o = (i - 1)*stride - pad_before - pad_after + dilation*(k - 1) + output_padding + 1

with ``i`` and ``k`` the extents of x and of the kernel, as in the documentation of ``torch.nn.ConvTranspose{rank}d``.
An empty batch gives an empty result.

``precision`` gives the least accuracy of a float32 multiplication:

- "tf32x3": as accurate as float32. Tensor cores may split each operand into two TF32 parts and form three products.
- "ieee": float32 fused multiply-add, denormals kept.
- "tf32": one TF32 product, operands rounded to nearest to 10 bits of mantissa.

float16 and bfloat16 accumulate in float32; float64 computes in float64. Two calls with the same arguments on one device
give bitwise the same result.

Work on a GPU is queued on the current stream of CuPy or PyTorch, and the call does not wait for it.

Examples
--------
>>> import numpy as np
>>> import cuconvt
{example}
>>> x = np.ones({x_shape}, np.float32)
>>> weight = np.ones({weight_shape}, np.float32)
>>> cuconvt.conv_transpose{rank}d(x, weight, stride=2, padding=1, output_padding=1).shape
{out_shape}
"""

CONV = """Convolution (cross-correlation) over {rank} spatial {axis_or_axes}.

The order of the positional arguments is that of ``torch.nn.functional.conv{rank}d``. It is the adjoint of
`conv_transpose{rank}d` with the same weight and parameters; layouts, precision and streams are as there.

Parameters
----------
x : array, shape (N, C_in, {axes}) or, unbatched, (C_in, {axes})
    NumPy, CuPy, PyTorch or JAX array, or any other with ``__dlpack__``, of dtype float16, bfloat16, float32 or float64.
    Any strides.
weight : array, shape (C_out, C_in/groups, {kernel})
    Of x's library, device and dtype, as are `bias` and `out`.
bias : array, shape (C_out,), optional
    Added to every output of its channel.
stride, dilation : int or sequence of {rank} int, default 1
    Step between the inputs of neighbouring outputs, and between the taps of the kernel; one value an axis.
padding : int, sequence of {rank} int, sequence of {rank} (before, after) pairs, "valid" or "same", default 0
    How many zeros to add at each end of an axis. "valid" is 0; "same" keeps the extents of x, with the odd zero at the
    end, and needs a stride of 1.
groups : int, default 1
    Number of groups into which the channels of x and of the result are split; divides C_out.
precision : {{"tf32x3", "ieee", "tf32"}}, optional
    How float32 is multiplied; None is "tf32x3". Must be None for the other dtypes.
out : array, shape of the result, optional
    Written in place and returned. Must overlap neither an input nor itself.

Returns
-------
array, shape (N, C_out, {axes}) or, unbatched, (C_out, {axes})
    Of x's library, device and dtype. In C order, or channels-last in memory where x is.

Raises
------
TypeError, ValueError, CompileError, MissingDependencyError
    As `conv_transpose{rank}d` does.

See Also
--------
conv_transpose{rank}d : The adjoint.

Notes
-----
On each axis, with ``o`` an output position and ``k`` a tap, the result is ::

    y[n, co, o] = bias[co] + sum over ci in the group of co, and all k,
                  of x[n, ci, o*stride + k*dilation - pad_before] * weight[co, ci', k]

where ``ci'`` is the index of ``ci`` in its group and x is 0 outside. The output extent is ::

    o = (i + pad_before + pad_after - dilation*(k - 1) - 1)//stride + 1

with ``i`` and ``k`` the extents of x and of the kernel. An empty batch gives an empty result.

Examples
--------
>>> import numpy as np
>>> import cuconvt
>>> x = np.ones({x_shape}, np.float32)
>>> weight = np.ones({conv_weight_shape}, np.float32)
>>> cuconvt.conv{rank}d(x, weight, padding="same").shape
{conv_shape}
"""

_GRADIENT_PARAMETERS = """precision : {{"tf32x3", "ieee", "tf32"}}, optional
    How float32 is multiplied; None is "tf32x3". Must be None for the other dtypes.
out : array, shape of the result, optional
    Written in place and returned. Must overlap neither an input nor itself."""

INPUT_GRADIENT = f"""Gradient of `conv_transpose{{rank}}d` with respect to its input.

This is the strided correlation of `grad_output` with the weight. Layouts, precision and streams are as in
`conv_transpose{{rank}}d`.

Parameters
----------
input_size : sequence of int
    Shape of the input: (N, C_in, {{axes}}) or, unbatched, (C_in, {{axes}}).
weight : array, shape (C_in, C_out/groups, {{kernel}})
    Of the library, device and dtype of `grad_output`, as is `out`.
grad_output : array
    Gradient with respect to the result, of the result's shape.
stride, padding, output_padding, groups, dilation : int or sequence
    As in the call of `conv_transpose{{rank}}d`.
{_GRADIENT_PARAMETERS}

Returns
-------
array, shape `input_size`
    Of the library, device and dtype of `grad_output`. In C order, or channels-last in memory where `grad_output` is.

Raises
------
TypeError, ValueError, CompileError, MissingDependencyError
    As `conv_transpose{{rank}}d` does, and ValueError where `grad_output` has not the result's shape.

Examples
--------
>>> import numpy as np
>>> import cuconvt
>>> x, weight = np.ones({{x_shape}}), np.ones({{weight_shape}})
>>> y = cuconvt.conv_transpose{{rank}}d(x, weight, stride=2, padding=1)
>>> cuconvt.grad.conv_transpose{{rank}}d_input(x.shape, weight, np.ones_like(y), stride=2, padding=1).shape
{{x_shape}}
"""

WEIGHT_GRADIENT = f"""Gradient of `conv_transpose{{rank}}d` with respect to its weight.

The sums over the batch and all positions are taken in one fixed order: two calls give bitwise the same result.
Precision and streams are as in `conv_transpose{{rank}}d`.

Parameters
----------
input : array, shape (N, C_in, {{axes}}) or, unbatched, (C_in, {{axes}})
    The input of the call.
weight_size : sequence of int
    Shape of the weight: (C_in, C_out/groups, {{kernel}}).
grad_output : array
    Gradient with respect to the result, of the result's shape, and of the library, device and dtype of `input`, as is
    `out`.
stride, padding, output_padding, groups, dilation : int or sequence
    As in the call of `conv_transpose{{rank}}d`.
{_GRADIENT_PARAMETERS}

Returns
-------
array, shape `weight_size`
    Of the library, device and dtype of `input`, in C order. Zero for an empty batch.

Raises
------
TypeError, ValueError, CompileError, MissingDependencyError
    As `conv_transpose{{rank}}d` does, and ValueError where `grad_output` has not the result's shape.

Examples
--------
>>> import numpy as np
>>> import cuconvt
>>> x, weight = np.ones({{x_shape}}), np.ones({{weight_shape}})
>>> y = cuconvt.conv_transpose{{rank}}d(x, weight, stride=2, padding=1)
>>> cuconvt.grad.conv_transpose{{rank}}d_weight(x, weight.shape, np.ones_like(y), stride=2, padding=1).shape
{{weight_shape}}
"""

BIAS_GRADIENT = """Gradient of `conv_transpose{rank}d`, or of `conv{rank}d`, with respect to its bias.

It is the sum of `grad_output` over the batch and all positions, accumulated in float32 at least.

Parameters
----------
grad_output : array, shape (N, C_out, {axes}) or, unbatched, (C_out, {axes})
    Gradient with respect to the result.
out : array, shape (C_out,), optional
    Written in place and returned. Must overlap neither `grad_output` nor itself.

Returns
-------
array, shape (C_out,)
    Of the library, device and dtype of `grad_output`. Zero for an empty batch.

Raises
------
TypeError, ValueError, MissingDependencyError
    As `conv_transpose{rank}d` does.

Examples
--------
>>> import numpy as np
>>> import cuconvt
>>> cuconvt.grad.conv_transpose{rank}d_bias(np.ones({bias_shape}))
array([8., 8., 8.])
"""

CONV_INPUT = f"""Gradient of `conv{{rank}}d` with respect to its input.

This is a transposed convolution of `grad_output` with the weight. Layouts, precision and streams are as in
`conv_transpose{{rank}}d`.

Parameters
----------
input_size : sequence of int
    Shape of the input: (N, C_in, {{axes}}) or, unbatched, (C_in, {{axes}}).
weight : array, shape (C_out, C_in/groups, {{kernel}})
    Of the library, device and dtype of `grad_output`, as is `out`.
grad_output : array
    Gradient with respect to the result, of the result's shape.
stride, padding, dilation, groups : int or sequence
    As in the call of `conv{{rank}}d`.
{_GRADIENT_PARAMETERS}

Returns
-------
array, shape `input_size`
    Of the library, device and dtype of `grad_output`. In C order, or channels-last in memory where `grad_output` is.

Raises
------
TypeError, ValueError, CompileError, MissingDependencyError
    As `conv{{rank}}d` does, and ValueError where `grad_output` has not the result's shape.

Examples
--------
>>> import numpy as np
>>> import cuconvt
>>> x, weight = np.ones({{x_shape}}), np.ones({{conv_weight_shape}})
>>> y = cuconvt.conv{{rank}}d(x, weight, stride=2)
>>> cuconvt.grad.conv{{rank}}d_input(x.shape, weight, np.ones_like(y), stride=2).shape
{{x_shape}}
"""

CONV_WEIGHT = f"""Gradient of `conv{{rank}}d` with respect to its weight.

The sums over the batch and all positions are taken in one fixed order: two calls give bitwise the same result.
Precision and streams are as in `conv_transpose{{rank}}d`.

Parameters
----------
input : array, shape (N, C_in, {{axes}}) or, unbatched, (C_in, {{axes}})
    The input of the call.
weight_size : sequence of int
    Shape of the weight: (C_out, C_in/groups, {{kernel}}).
grad_output : array
    Gradient with respect to the result, of the result's shape, and of the library, device and dtype of `input`, as is
    `out`.
stride, padding, dilation, groups : int or sequence
    As in the call of `conv{{rank}}d`.
{_GRADIENT_PARAMETERS}

Returns
-------
array, shape `weight_size`
    Of the library, device and dtype of `input`, in C order. Zero for an empty batch.

Raises
------
TypeError, ValueError, CompileError, MissingDependencyError
    As `conv{{rank}}d` does, and ValueError where `grad_output` has not the result's shape.

Examples
--------
>>> import numpy as np
>>> import cuconvt
>>> x, weight = np.ones({{x_shape}}), np.ones({{conv_weight_shape}})
>>> y = cuconvt.conv{{rank}}d(x, weight, stride=2)
>>> cuconvt.grad.conv{{rank}}d_weight(x, weight.shape, np.ones_like(y), stride=2).shape
{{conv_weight_shape}}
"""

# Each input becomes a block of two outputs an axis: with stride 2 and kernel 2 blocks neither overlap nor leave gaps.
_EXAMPLES = {
    1: """>>> x = np.array([[[1.0, 2.0, 3.0]]])
>>> cuconvt.conv_transpose1d(x, np.ones((1, 1, 2)), stride=2)
array([[[1., 1., 2., 2., 3., 3.]]])
""",
    2: """>>> x = np.array([[[[1.0, 2.0]]]])
>>> cuconvt.conv_transpose2d(x, np.ones((1, 1, 2, 2)), stride=2)
array([[[[1., 1., 2., 2.],
         [1., 1., 2., 2.]]]])
""",
    3: """>>> x = np.array([[[[[1.0, 2.0]]]]])
>>> cuconvt.conv_transpose3d(x, np.ones((1, 1, 2, 2, 2)), stride=2)
array([[[[[1., 1., 2., 2.],
          [1., 1., 2., 2.]],
<BLANKLINE>
         [[1., 1., 2., 2.],
          [1., 1., 2., 2.]]]]])
""",
}


def documented(rank: int, template: str = CONV_TRANSPOSE) -> Callable[[Function], Function]:
    """Return a decorator that gives a function the docstring of its family, filled in for `rank` spatial axes."""

    def fill(function: Function) -> Function:
        function.__doc__ = template.format(
            rank=rank,
            axis_or_axes="axis" if rank == 1 else "axes",
            axes=_AXES[rank],
            kernel=_KERNEL[rank],
            example=_EXAMPLES[rank],
            x_shape=(2, 8, *(5,) * rank),
            weight_shape=(8, 4, *(3,) * rank),
            out_shape=(2, 4, *(10,) * rank),
            conv_weight_shape=(4, 8, *(3,) * rank),
            conv_shape=(2, 4, *(5,) * rank),
            bias_shape=(2, 3, *(1,) * (rank - 1), 4),
        )
        return function

    return fill
