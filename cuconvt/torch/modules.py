"""ConvTranspose1d, ConvTranspose2d and ConvTranspose3d in place of `torch.nn`'s, and the swap of a model's layers.

Annotations are not deferred here, since torch.jit.script evaluates those of the layers.
"""
# ruff: noqa: A002  (`input` is the name that torch.nn gives it)

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from cuconvt.checks import check_precision_name
from cuconvt.torch.functional import IntOrInts
from cuconvt.torch.operators import conv_transpose


class _ConvTranspose(nn.modules.conv._ConvTransposeNd):
    """What the three modules share: `precision`, and a forward method that calls this library."""

    precision: str | None = None  # also of a module that `replace_modules` has taken over

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: IntOrInts,
        stride: IntOrInts = 1,
        padding: IntOrInts = 0,
        output_padding: IntOrInts = 0,
        groups: int = 1,
        bias: bool = True,
        dilation: IntOrInts = 1,
        padding_mode: str = "zeros",
        device: Any = None,
        dtype: Any = None,
        *,
        precision: str | None = None,
    ):
        check_precision_name(precision)
        sizes = (kernel_size, stride, padding, output_padding)
        super().__init__(in_channels, out_channels, *sizes, groups, bias, dilation, padding_mode, device, dtype)
        self.precision = precision

    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        if self.padding_mode != "zeros":
            raise ValueError(f"padding_mode must be 'zeros', got '{self.padding_mode}'")
        if torch.jit.is_scripting():  # which knows operators of the dispatcher only
            return torch.ops.cuconvt.conv_transpose(
                input,
                self.weight,
                self.bias,
                self.stride,
                self.padding,
                self._padding_for_size(input, output_size),
                self.groups,
                self.dilation,
                self.precision,
            )
        if output_size is not None and isinstance(input, torch.fx.Proxy):
            # The padding follows from extents, which are not known yet: left as a whole, as torch.nn's layers are.
            path = input.tracer.path_of_module(self)
            return input.tracer.create_proxy("call_module", path, (input, output_size), {})
        return conv_transpose(
            input,
            self.weight,
            self.bias,
            self.stride,
            self.padding,
            self.output_padding if output_size is None else tuple(self._padding_for_size(input, output_size)),
            self.groups,
            self.dilation,
            self.precision,
        )

    def _padding_for_size(self, input: Tensor, output_size: list[int] | None) -> list[int]:
        return self._output_padding(
            input,
            output_size,
            self.stride,
            self.padding,
            self.kernel_size,
            len(self.kernel_size),
            self.dilation,
        )

    def extra_repr(self) -> str:
        shown = super().extra_repr()
        return shown if self.precision is None else f"{shown}, precision={self.precision!r}"


class ConvTranspose1d(_ConvTranspose, nn.ConvTranspose1d):
    """`torch.nn.ConvTranspose1d` computed by cuconvt: its arguments, parameters and state, and the keyword `precision`.

    Parameters
    ----------
    in_channels, out_channels, kernel_size, stride, padding, output_padding, groups, bias, dilation,
    padding_mode, device, dtype
        As in `torch.nn.ConvTranspose1d`.
    precision : {"tf32x3", "ieee", "tf32"}, optional
        How float32 is multiplied; None is "tf32x3", as accurate as float32.
    """


class ConvTranspose2d(_ConvTranspose, nn.ConvTranspose2d):
    """`torch.nn.ConvTranspose2d` computed by cuconvt: its arguments, parameters and state, and the keyword `precision`.

    Parameters
    ----------
    in_channels, out_channels, kernel_size, stride, padding, output_padding, groups, bias, dilation,
    padding_mode, device, dtype
        As in `torch.nn.ConvTranspose2d`.
    precision : {"tf32x3", "ieee", "tf32"}, optional
        How float32 is multiplied; None is "tf32x3", as accurate as float32.
    """


class ConvTranspose3d(_ConvTranspose, nn.ConvTranspose3d):
    """`torch.nn.ConvTranspose3d` computed by cuconvt: its arguments, parameters and state, and the keyword `precision`.

    Parameters
    ----------
    in_channels, out_channels, kernel_size, stride, padding, output_padding, groups, bias, dilation,
    padding_mode, device, dtype
        As in `torch.nn.ConvTranspose3d`.
    precision : {"tf32x3", "ieee", "tf32"}, optional
        How float32 is multiplied; None is "tf32x3", as accurate as float32.
    """


_REPLACEMENTS: dict[type, type] = {
    nn.ConvTranspose1d: ConvTranspose1d,
    nn.ConvTranspose2d: ConvTranspose2d,
    nn.ConvTranspose3d: ConvTranspose3d,
}


def replace_modules(model: nn.Module, *, precision: str | None = None) -> int:
    """Let cuconvt compute every `torch.nn` transposed convolution of a model.

    The modules stay the objects that they are and only change their class, so parameters, buffers, hooks,
    parametrizations, optimizers and references to a layer are as before. Subclasses of `torch.nn`'s modules keep their
    own forward method and are left alone, as are layers that are cuconvt's already.

    Parameters
    ----------
    model : torch.nn.Module
        Changed in place; it may itself be such a layer.
    precision : {"tf32x3", "ieee", "tf32"}, optional
        The `precision` of the layers that are swapped.

    Returns
    -------
    int
        How many layers were swapped.

    Examples
    --------
    >>> import torch
    >>> import cuconvt.torch
    >>> model = torch.nn.Sequential(torch.nn.ConvTranspose2d(8, 4, 2, stride=2), torch.nn.ReLU())
    >>> cuconvt.torch.replace_modules(model)
    1
    >>> type(model[0])
    <class 'cuconvt.torch.modules.ConvTranspose2d'>
    """
    check_precision_name(precision)
    swapped = 0
    for module in model.modules():
        replacement = _replacement(module)
        if replacement is not None:
            module.__class__ = replacement
            module.precision = precision
            swapped += 1
    return swapped


def _replacement(module: nn.Module) -> type | None:
    kind = type(module)
    if not parametrize.is_parametrized(module):
        return _REPLACEMENTS.get(kind)
    # A parametrized module has a class of its own over the layer's, which holds the parametrized weight as a property.
    layer = _REPLACEMENTS.get(kind.__bases__[0])
    if layer is None:
        return None
    return type(kind.__name__, (layer,), {k: v for k, v in vars(kind).items() if k not in ("__dict__", "__weakref__")})
