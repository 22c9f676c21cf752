"""Transposed convolution and its gradients for NumPy, CuPy and, zero-copy through DLPack, PyTorch and JAX arrays."""

from cuconvt import grad
from cuconvt.api import conv_transpose1d, conv_transpose2d, conv_transpose3d, conv_transpose_output_shape
from cuconvt.conv import conv1d, conv2d, conv3d
from cuconvt.errors import CompileError, MissingDependencyError

__all__ = [
    "CompileError",
    "MissingDependencyError",
    "__version__",
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_transpose1d",
    "conv_transpose2d",
    "conv_transpose3d",
    "conv_transpose_output_shape",
    "grad",
]

__version__ = "0.1.0"
