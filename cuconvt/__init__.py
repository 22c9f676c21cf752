"""Transposed convolution for NumPy, CuPy and, zero-copy through DLPack, PyTorch and JAX arrays."""

from cuconvt.api import conv_transpose1d, conv_transpose2d, conv_transpose3d, conv_transpose_output_shape
from cuconvt.errors import CompileError, MissingDependencyError

__all__ = [
    "CompileError",
    "MissingDependencyError",
    "__version__",
    "conv_transpose1d",
    "conv_transpose2d",
    "conv_transpose3d",
    "conv_transpose_output_shape",
]

__version__ = "0.1.0"
