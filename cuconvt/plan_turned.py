"""A correlation whose stride is 1 is a transposed convolution too, of the same array with the weight turned.

With L = dilation * (kernel - 1) along an axis and k' = kernel - 1 - k,

    out[n, ci, i] = sum over co, k of  y[n, co, i + k*dilation - padding] * weight[ci, co, k]
                  = sum over co, k', j with  j + k'*dilation = i + L - padding  of  y[n, co, j] * weight[ci, co, k]

which is the transposed convolution of y with a padding of L - padding and a weight whose taps run backwards and whose
channels of x and of y, within a group, have changed places. Strides express both, so that nothing is copied.
"""

from __future__ import annotations

from dataclasses import replace

from cuconvt.geometry import Geometry
from cuconvt.plan import Layout, weight_strides


def turned(geometry: Geometry, layout: Layout) -> tuple[Geometry, Layout] | None:
    """Return the transposed convolution that is the adjoint of the given one, or None where it is none.

    Its x is what has the given one's result's shape, and its result what has x's. It is none with a stride, nor where
    its padding would be negative.
    """
    g = geometry
    lengths = [d * (k - 1) for d, k in zip(g.dilation, g.kernel, strict=True)]
    before_d, before_h, before_w = (length - pad for length, pad in zip(lengths, g.pad_before, strict=True))
    if g.stride != (1, 1, 1) or min(before_d, before_h, before_w) < 0:
        return None
    after_d, after_h, after_w = (
        length - pad + extra for length, pad, extra in zip(lengths, g.pad_after, g.output_padding, strict=True)
    )
    adjoint = replace(
        g,
        c_in=g.c_out,
        c_out=g.c_in,
        x_extent=g.out_extent,
        out_extent=g.x_extent,
        pad_before=(before_d, before_h, before_w),
        pad_after=(after_d, after_h, after_w),
        output_padding=(0, 0, 0),
    )
    group, c_in, c_out, *taps = weight_strides(geometry, layout)
    last_tap = sum((kernel - 1) * stride for kernel, stride in zip(g.kernel, taps, strict=True))
    return adjoint, Layout(
        x=layout.out,
        weight=(c_out, c_in, *(-stride for stride in taps)),
        bias=layout.bias,
        out=layout.x,
        x_aligned=layout.out_aligned,
        out_aligned=layout.x_aligned,
        weight_group=group,
        weight_first=layout.weight_first + last_tap,
    )
