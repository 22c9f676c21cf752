"""Differentiable transposed convolutions and layers for PyTorch, in place of `torch.nn`'s.

The functions `conv_transpose1d`, `conv_transpose2d`, `conv_transpose3d` have the signature of
`torch.nn.functional`'s, the modules `ConvTranspose1d`, `ConvTranspose2d`, `ConvTranspose3d` are subclasses of
`torch.nn`'s, and `replace_modules` swaps the layers of a model. They work with autograd (also twice and
in forward mode), `torch.func`, `torch.compile`, autocast and CUDA graphs.
"""

import cuconvt.torch.flops  # noqa: F401
from cuconvt.torch.functional import conv_transpose1d, conv_transpose2d, conv_transpose3d
from cuconvt.torch.modules import ConvTranspose1d, ConvTranspose2d, ConvTranspose3d, replace_modules

__all__ = [
    "ConvTranspose1d",
    "ConvTranspose2d",
    "ConvTranspose3d",
    "conv_transpose1d",
    "conv_transpose2d",
    "conv_transpose3d",
    "replace_modules",
]
