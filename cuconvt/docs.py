"""The docstring that conv_transpose1d, conv_transpose2d and conv_transpose3d share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])

_AXES = {1: "W", 2: "H, W", 3: "D, H, W"}
_KERNEL = {1: "kW", 2: "kH, kW", 3: "kD, kH, kW"}

_TEMPLATE = """Transposed convolution over {rank} spatial {axis_or_axes}.

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
    Written in place and returned. Must not overlap an input.

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
    `precision`, an `out` of the wrong shape or that overlaps an input, a tensor that requires grad.
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


def documented(rank: int) -> Callable[[Function], Function]:
    """Return a decorator that gives a function the shared docstring, filled in for `rank` spatial axes."""

    def fill(function: Function) -> Function:
        function.__doc__ = _TEMPLATE.format(
            rank=rank,
            axis_or_axes="axis" if rank == 1 else "axes",
            axes=_AXES[rank],
            kernel=_KERNEL[rank],
            example=_EXAMPLES[rank],
            x_shape=(2, 8, *(5,) * rank),
            weight_shape=(8, 4, *(3,) * rank),
            out_shape=(2, 4, *(10,) * rank),
        )
        return function

    return fill
