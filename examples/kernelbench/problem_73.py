"""KernelBench level 1, problem 73: transposed 3-D convolution, unequal extents, with stride, padding and groups.

KernelBench's constructor accepts `output_padding` and makes no use of it, and its own call has the number of groups in
that place. A drop-in does the same.
"""

from __future__ import annotations

from torch import Tensor, nn

import cuconvt.torch


class ModelNew(nn.Module):
    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int,
        stride: int = 1,
        padding: int = 0,
        output_padding: int = 0,
        groups: int = 1,
        bias: bool = False,
    ):
        super().__init__()
        self.conv_transpose3d = cuconvt.torch.ConvTranspose3d(
            in_channels,
            out_channels,
            kernel_size,
            stride=stride,
            padding=padding,
            groups=groups,
            bias=bias,
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.conv_transpose3d(x)
