"""An operator of PyTorch's dispatcher, with a short way past it for plain eager calls.

Every operator is registered through `torch.library`, so that `torch.compile`, `torch.export`, autocast, fake tensors
and tensor subclasses see it. On that way an eager call crosses from C++ to Python and back several times, with its
arguments converted each time. Microseconds of a call with tensors that require grad, and without gradients, on one core
(``python benchmarks/dispatch.py``; PyTorch 2.13):

    the kernel alone, which only allocates the result         0.8
    custom_op with register_autograd                         31.3  11.8
    Library.define and impl, with register_autograd          28.2   8.7
    Library.define and impl, a Function at the Autograd key  11.9   8.5
    what follows                                              6.7   3.2

So a call goes by way of the Function alone where that is what the dispatcher would end up doing. It decides that by
the keys of the tensors and of the thread, which are read here in the same way. All other calls take the operator.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C import (
    DispatchKey,
    DispatchKeySet,
    _any_requires_grad,
    _are_functorch_transforms_active,
    _disabled_torch_function_impl,
    _dispatch_keys,
    _dispatch_tls_local_exclude_set,
    _dispatch_tls_local_include_set,
    _ExcludeDispatchKeyGuard,
)
from torch._C._autograd import _profiler_enabled
from torch.autograd import forward_ad
from torch.nn import Parameter
from torch.overrides import has_torch_function, is_tensor_like

NAMESPACE = "cuconvt"
_LIBRARY = torch.library.Library(NAMESPACE, "DEF")


def _raw(*keys: DispatchKey) -> int:
    bits = 0
    for key in keys:
        bits |= DispatchKeySet(key).raw_repr()
    return bits


# These two keys only serve in-place operators and operators without a tensor, which ours are not.
_RELEVANT = ~_raw(DispatchKey.ADInplaceOrView, DispatchKey.BackendSelect)
_KERNEL = frozenset(_raw(backend) for backend in (DispatchKey.CPU, DispatchKey.CUDA))
_AUTOGRAD = frozenset(
    _raw(backend, autograd)
    for backend, autograd in (
        (DispatchKey.CPU, DispatchKey.AutogradCPU),
        (DispatchKey.CUDA, DispatchKey.AutogradCUDA),
    )
)


class Node(torch.autograd.Function):
    """What the autograd nodes of operators share. The last of their arguments is what computes the result."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*arguments: Any) -> Tensor:
        return arguments[-1](*arguments[:-1])


class _Leaf(tuple[Any, ...]):
    """A tuple that torch.func does not take apart, which forward mode under vmap cannot put together again."""


class Operator:
    """A differentiable operator without side effects.

    Parameters
    ----------
    name, schema : str
        As `torch.library` wants them; tensors come first.
    kernel : callable
        Computes the result on CPU or CUDA tensors of whose gradients nothing need be known.
    fake : callable
        Returns an empty result, for tensors without memory.
    node : type
        A `Node` with `setup_context`, `backward` and `jvp`, which must neither need nor mind the last argument.
    batched : callable
        Calls its first argument, which is the operator, once for all entries of a ``torch.vmap``. See
        `cuconvt.torch.batching`.
    """

    def __init__(
        self,
        name: str,
        schema: str,
        kernel: Callable[..., Tensor],
        fake: Callable[..., Tensor],
        node: type[Node],
        batched: Callable[..., tuple[Tensor, int]],
    ):
        qualified = f"{NAMESPACE}::{name}"
        _LIBRARY.define(name + schema)
        for backend in ("CPU", "CUDA"):
            _LIBRARY.impl(name, _untraced(kernel), backend)
        torch.library.register_fake(qualified, fake, lib=_LIBRARY)
        torch.library.register_autograd(qualified, node.backward, setup_context=node.setup_context, lib=_LIBRARY)
        self.overload = getattr(getattr(torch.ops, NAMESPACE), name).default

        def vmap(info: Any, axes: Sequence[Any], *arguments: Any) -> tuple[Tensor, int]:
            return batched(self.overload, info.batch_size, axes, *arguments)

        torch.library.register_vmap(qualified, vmap, lib=_LIBRARY)
        self._name = name
        kinds = {a.name: str(a.type) for a in self.overload._schema.arguments}
        self._tensors = [(name, "Optional" in kind) for name, kind in kinds.items() if "Tensor" in kind]
        self._count = len(self._tensors)
        self._kernel = kernel
        self._node = node
        self._cast: Callable[..., tuple[Any, ...]] | None = None
        # Past Function.apply, which looks up the signature of forward anew at each call.
        self._record: Callable[..., Tensor] = super(torch.autograd.Function, node).apply  # type: ignore[misc]

    def __call__(self, *arguments: Any) -> Tensor:
        if torch.compiler.is_compiling():
            if forward_ad._current_level < 0:
                return self.overload(*arguments)
            if torch.compiler.is_dynamo_compiling():  # else it is exporting, and calls what it traces
                return torch.compiler.disable(self)(*arguments)
        tensors = arguments[: self._count]
        if not has_torch_function(tensors) and not _profiler_enabled():  # whose rows are the dispatcher's
            try:
                keys = _keys(tensors)
            except TypeError:  # one is no tensor
                return self._call_overload(arguments)
            if keys in _AUTOGRAD:
                if forward_ad._current_level >= 0 or (torch.is_grad_enabled() and _any_requires_grad(*tensors)):
                    return self._record(*arguments, self._kernel)
                return self._kernel(*arguments)
            if keys in _KERNEL:
                return self._kernel(*arguments)
        return self._call_overload(arguments)

    def _call_overload(self, arguments: Sequence[Any]) -> Tensor:
        for (name, optional), value in zip(self._tensors, arguments, strict=False):
            check_is_tensor(name, value, optional)
        tensors = [tensor for tensor in arguments[: self._count] if tensor is not None]
        transformed = _are_functorch_transforms_active() or forward_ad._current_level >= 0
        if not transformed or any(map(_has_own_torch_function, tensors)):
            return self.overload(*arguments)
        # Of a formula registered at the dispatcher neither torch.func nor forward mode knows; of a Function's they do.
        device_type = tensors[0].device.type
        if self._cast is not None and torch.is_autocast_enabled(device_type):
            arguments = self._cast(torch.get_autocast_dtype(device_type), *arguments)
        return self._node.apply(*(_Leaf(a) if isinstance(a, tuple | list) else a for a in arguments), self.overload)

    def register_autocast(self, cast: Callable[..., tuple[Any, ...]]) -> None:
        """Under autocast, call the operator with what `cast` makes of autocast's dtype and the arguments."""
        self._cast = cast
        for device_type, key in (("cpu", DispatchKey.AutocastCPU), ("cuda", DispatchKey.AutocastCUDA)):
            _LIBRARY.impl(self._name, functools.partial(self._call_cast, device_type, DispatchKeySet(key)), key.name)

    def _call_cast(self, device_type: str, autocast: DispatchKeySet, *arguments: Any) -> Tensor:
        assert self._cast is not None
        with _ExcludeDispatchKeyGuard(autocast):
            return self.overload(*self._cast(torch.get_autocast_dtype(device_type), *arguments))


def _untraced(kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the kernel for the dispatcher: `torch.compile`, where it runs a frame in parts, traces no frame in it.

    It would trace all that NumPy computes, or what finds a plan: for 20 s, where the kernel takes a millisecond.
    """

    @functools.wraps(kernel)
    def call(*arguments: Any) -> Tensor:
        return (_disabled(kernel) if "torch._dynamo" in sys.modules else kernel)(*arguments)

    return call


@functools.cache
def _disabled(kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return torch.compiler.disable(kernel)  # which imports what takes seconds to import


def check_is_tensor(name: str, value: Any, optional: bool) -> None:
    """Raise TypeError unless an argument is a tensor or stands for one, or is None where it is optional."""
    if not is_tensor_like(value) and not (optional and value is None):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(value).__name__}")


def _keys(tensors: Sequence[Tensor | None]) -> int:
    keys = _dispatch_tls_local_include_set().raw_repr()
    for tensor in tensors:
        if tensor is not None:
            keys |= _dispatch_keys(tensor).raw_repr()
    return keys & ~_dispatch_tls_local_exclude_set().raw_repr() & _RELEVANT


def _has_own_torch_function(tensor: Tensor) -> bool:
    """Return what has_torch_function does where no mode, such as that of a default device, is active."""
    kind = type(tensor)
    return kind not in (Tensor, Parameter) and kind.__torch_function__ is not _disabled_torch_function_impl
