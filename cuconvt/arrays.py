"""The array bridge: which library an array belongs to, a zero-copy view of it, and results of the same library.

Computation sees only ``numpy.ndarray`` (on the CPU) and ``cupy.ndarray`` (on a GPU). Each `Bridge` takes the arrays of
one library to these and back without a copy. A library is imported here only when the caller's array is its own.
"""

from __future__ import annotations

import contextlib
import math
import sys
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from cuconvt.errors import MissingDependencyError

DTYPES = ("float16", "bfloat16", "float32", "float64")

# DLPack's device type codes: memory that a GPU kernel can use (CUDA, managed) and memory of the CPU (CPU, pinned).
_DLPACK_GPU = (2, 13)
_DLPACK_CPU = (1, 3)

Device = tuple[str, int]


class Bridge:
    """One array library: `empty` gives a result, `view` the numpy or cupy array on it, `finish` what is returned."""

    name = "numpy"

    def device(self, array: Any) -> Device:
        """Return ("cpu", 0) or ("cuda", index)."""
        return ("cpu", 0)

    def check(self, role: str, array: Any) -> None:
        """Raise if the array has a property that a view would lose."""

    def view(self, array: Any) -> Any:
        """Return a numpy or cupy array on the same memory."""
        return array

    def scope(self, array: Any) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which cupy's current device and stream are those of the array's library."""
        return contextlib.nullcontext()

    def empty(self, shape: Sequence[int], memory_order: Sequence[int], like: Any) -> Any:
        """Return an uninitialised array of the dtype and device of `like`, its axes in the given order in memory."""
        return _empty(np, shape, memory_order, self.view(like).dtype)

    def hold(self, views: Sequence[Any]) -> None:
        """Keep the inputs of a queued kernel alive, where their library does not know the kernel's stream."""

    def finish(self, result: Any) -> Any:
        return result


class NumPyBridge(Bridge):
    def check(self, role: str, array: Any) -> None:
        if isinstance(array, np.ma.MaskedArray):
            raise TypeError(f"{role} must be a plain array, got a numpy.ma.MaskedArray, whose mask would be ignored")
        if not array.dtype.isnative:
            raise TypeError(f"{role} must have native byte order, got dtype {array.dtype.str!r}")

    def view(self, array: Any) -> Any:
        return np.asarray(array)  # of the base class: subclasses may index and compute otherwise


class CuPyBridge(Bridge):
    name = "cupy"

    def device(self, array: Any) -> Device:
        return ("cuda", array.device.id)

    def scope(self, array: Any) -> contextlib.AbstractContextManager[Any]:
        return array.device

    def empty(self, shape: Sequence[int], memory_order: Sequence[int], like: Any) -> Any:
        return _empty(sys.modules["cupy"], shape, memory_order, like.dtype)


class TorchBridge(Bridge):
    name = "torch"

    def device(self, array: Any) -> Device:
        if array.device.type not in ("cpu", "cuda"):
            raise TypeError(f"a tensor must be on a CPU or CUDA device, got one on {array.device}")
        return (array.device.type, array.device.index or 0)

    def check(self, role: str, array: Any) -> None:
        torch = sys.modules["torch"]
        transformed = torch._C._are_functorch_transforms_active()
        if torch.jit.is_tracing() or (transformed and torch._C._functorch.is_functorch_wrapped_tensor(array)):
            raise TypeError(
                f"{role} is traced by torch.jit.trace or a torch.func transform, such as torch.vmap, which cannot look "
                f"inside this function: use cuconvt.torch"
            )
        if array.layout is not torch.strided:
            raise TypeError(f"{role} must be a strided tensor, got layout {array.layout}")
        if array.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                f"{role} requires grad, and this function records no gradient: pass {role}.detach(), call it under "
                f"torch.no_grad(), or use cuconvt.torch, whose functions do"
            )
        if _has_tangent(array):
            raise ValueError(
                f"{role} is a dual tensor of forward-mode differentiation, and this function computes no tangent: use "
                f"cuconvt.torch, whose functions do"
            )
        if array.is_conj() or array.is_neg():
            raise ValueError(
                f"{role} has its conj or neg bit set, which a view of its memory would lose: pass {role}.resolve_conj()"
                f".resolve_neg()"
            )
        if (dtype := str(array.dtype).removeprefix("torch.")) not in DTYPES:  # NumPy and CuPy lack some of the others
            raise TypeError(f"{role} must have one of the dtypes {', '.join(DTYPES)}, got {dtype}")

    def view(self, array: Any) -> Any:
        if array.device.type == "cuda":
            return _cupy().from_dlpack(array.detach())  # `check` has refused what autograd would have recorded
        dtype = str(array.dtype).removeprefix("torch.")
        return np.asarray(_TorchMemory(array)).view(_bfloat16() if dtype == "bfloat16" else dtype)

    @contextlib.contextmanager
    def scope(self, array: Any) -> Any:
        if array.device.type == "cpu":
            yield
            return
        cupy = _cupy()
        stream = StreamPointer(sys.modules["torch"].cuda.current_stream(array.device).cuda_stream)
        # Workspaces are PyTorch's memory too: one pool, and a CUDA graph keeps what it was captured with.
        allocator = cupy.cuda.using_allocator(torch_memory)
        with (
            cupy.cuda.Device(array.device.index),
            # PyTorch remembers a current device of its own until it has used that one, and exports no other's tensors.
            sys.modules["torch"].cuda.device(array.device),
            cupy.cuda.Stream.from_external(stream),
            allocator,
        ):
            yield

    def empty(self, shape: Sequence[int], memory_order: Sequence[int], like: Any) -> Any:
        return _empty(sys.modules["torch"], shape, memory_order, like.dtype, device=like.device)


def _has_tangent(tensor: Any) -> bool:
    """Return whether forward-mode differentiation has a tangent of this tensor."""
    torch = sys.modules["torch"]
    forward_ad = torch.autograd.forward_ad
    if forward_ad._current_level < 0:
        return False
    below_autograd = torch._C._dispatch_tls_local_exclude_set().has(torch._C.DispatchKey.AutogradFunctionality)
    return not below_autograd and forward_ad.unpack_dual(tensor).tangent is not None


class _TorchMemory:
    """Presents a tensor in CPU memory to NumPy, as elements of its size.

    Not by Tensor.numpy(), after which the tensor's storage can no longer be resized, and not by np.from_dlpack, whose
    result older NumPy makes read-only, and which knows no bfloat16.
    """

    def __init__(self, tensor: Any):
        address, size = tensor.data_ptr(), tensor.element_size()
        if not address and tensor.numel():
            raise ValueError(
                f"a tensor must have memory, got one of shape {tuple(tensor.shape)} whose storage is empty"
            )
        self._tensor = tensor  # NumPy keeps this object, and so the memory
        self.__array_interface__ = {
            "version": 3,
            "data": (address, False),
            "shape": tuple(tensor.shape),
            "strides": tuple(step * size for step in tensor.stride()),
            "typestr": f"|V{size}",
        }


def torch_memory(size: int) -> Any:
    """Allocate for CuPy with PyTorch's allocator, on the current device and for PyTorch's current stream."""
    memory = sys.modules["cupy"].cuda
    device = f"cuda:{memory.runtime.getDevice()}"  # PyTorch's own current device may be another (see `scope`)
    buffer = sys.modules["torch"].empty(size, dtype=sys.modules["torch"].uint8, device=device)
    return memory.MemoryPointer(memory.UnownedMemory(buffer.data_ptr(), size, buffer, buffer.get_device()), 0)


class StreamPointer:
    """Speaks CUDA's stream protocol for a raw stream; PyTorch's own stream objects learned it only lately."""

    def __init__(self, pointer: int):
        self.pointer = pointer

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, self.pointer)


class DLPackBridge(Bridge):
    """Any other library that speaks DLPack: NumPy or CuPy make the result, its own from_dlpack takes it over."""

    _in_flight: ClassVar[deque[tuple[Any, Sequence[Any]]]] = deque()
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, name: str, namespace: Any):
        self.name = name
        self.namespace = namespace

    def device(self, array: Any) -> Device:
        kind, index = array.__dlpack_device__()
        if kind in _DLPACK_GPU:
            return ("cuda", int(index))
        if kind in _DLPACK_CPU:
            return ("cpu", 0)
        raise TypeError(f"a {self.name} array must be in CPU or CUDA memory, got DLPack device type {int(kind)}")

    def view(self, array: Any) -> Any:
        if isinstance(array, _native_types()):
            return array  # a result of our own `empty`
        if self.device(array)[0] == "cuda":
            return _cupy().from_dlpack(array)
        return np.from_dlpack(array)

    def scope(self, array: Any) -> contextlib.AbstractContextManager[Any]:
        kind, index = self.device(array)
        return _cupy().cuda.Device(index) if kind == "cuda" else contextlib.nullcontext()

    def empty(self, shape: Sequence[int], memory_order: Sequence[int], like: Any) -> Any:
        view = self.view(like)
        if isinstance(view, np.ndarray):
            return _aligned_empty(shape, memory_order, view.dtype)
        return _empty(_cupy(), shape, memory_order, view.dtype)

    def hold(self, views: Sequence[Any]) -> None:
        done = _cupy().cuda.Event(disable_timing=True)
        done.record()
        with self._lock:
            self._in_flight.append((done, views))
            while self._in_flight and self._in_flight[0][0].done:
                self._in_flight.popleft()

    def finish(self, result: Any) -> Any:
        return result if not isinstance(result, _native_types()) else self.namespace.from_dlpack(result)


class JaxBridge(DLPackBridge):
    def check(self, role: str, array: Any) -> None:
        jax = sys.modules["jax"]
        if isinstance(array, jax.core.Tracer):
            raise TypeError(f"{role} is traced by a JAX transformation, which cannot look inside this library")
        if role == "out":
            raise TypeError("out must be writable, and JAX arrays are immutable: leave out=None")
        if len(array.devices()) != 1:
            raise TypeError(f"{role} must be on one device, got an array sharded over {len(array.devices())}")

    def view(self, array: Any) -> Any:
        if isinstance(array, sys.modules["jax"].Array) and self.device(array)[0] == "cpu":
            return np.asarray(array)  # zero-copy on the CPU, bfloat16 included
        return super().view(array)

    def finish(self, result: Any) -> Any:
        if isinstance(result, np.ndarray) and result.dtype.kind not in "f":  # bfloat16 has no DLPack export in NumPy
            return self.namespace.asarray(result)
        return super().finish(result)


def bridge_of(arguments: dict[str, Any]) -> tuple[Bridge, Device]:
    """Return the library and the device that all given arrays share; bias and out may be None.

    Raises
    ------
    TypeError
        If an argument is no array, or if libraries or devices are mixed.
    """
    given = [(role, a) for role, a in arguments.items() if a is not None or role not in ("bias", "out")]
    first_role, first = given[0]
    bridge = _bridge(first_role, first)
    bridge.check(first_role, first)  # before anything else is asked of the array: a traced one has no device
    device = bridge.device(first)
    for role, array in given[1:]:
        other = _bridge(role, array)
        if other.name != bridge.name:
            raise TypeError(
                f"{role} must be an array of the same library as {first_role}, got {other.name} and {bridge.name}"
            )
        bridge.check(role, array)
        if other.device(array) != device:
            raise TypeError(
                f"{role} must be on the same device as {first_role}, "
                f"got {_spell(other.device(array))} and {_spell(device)}"
            )
    return bridge, device


def address(array: Any) -> int:
    """Return the address of the first element of a numpy or cupy array."""
    return int(array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr)


_NUMPY = NumPyBridge()
_CUPY = CuPyBridge()
_TORCH = TorchBridge()


def _bridge(role: str, array: Any) -> Bridge:
    if isinstance(array, np.ndarray):
        return _NUMPY
    # A library's array can only exist once the library is imported.
    cupy, torch, jax = (sys.modules.get(name) for name in ("cupy", "torch", "jax"))
    if cupy is not None and isinstance(array, cupy.ndarray):
        return _CUPY
    if torch is not None and isinstance(array, torch.Tensor):
        return _TORCH
    if jax is not None and isinstance(array, jax.Array):
        return JaxBridge("jax", jax.numpy)
    if hasattr(array, "__dlpack__") and hasattr(array, "__dlpack_device__"):
        namespace = array.__array_namespace__() if hasattr(array, "__array_namespace__") else None
        if not hasattr(namespace, "from_dlpack"):
            raise TypeError(
                f"{role} speaks DLPack, but its library offers no __array_namespace__().from_dlpack to make the result "
                f"with; got {type(array).__module__}.{type(array).__qualname__}"
            )
        return DLPackBridge(type(array).__module__.partition(".")[0], namespace)
    raise TypeError(
        f"{role} must be a NumPy, CuPy, PyTorch or JAX array or support DLPack, got {type(array).__qualname__}"
    )


def _spell(device: Device) -> str:
    return "cpu" if device[0] == "cpu" else f"{device[0]}:{device[1]}"


def _cupy() -> Any:
    try:
        import cupy
    except ImportError as error:
        from cuconvt.info import cuda_command

        raise MissingDependencyError(f"arrays in GPU memory need CuPy: {cuda_command()}") from error
    return cupy


def _native_types() -> tuple[type, ...]:
    cupy = sys.modules.get("cupy")
    return (np.ndarray,) if cupy is None else (np.ndarray, cupy.ndarray)


def _bfloat16() -> np.dtype[Any]:
    try:
        import ml_dtypes
    except ImportError as error:
        raise MissingDependencyError("bfloat16 arrays on the CPU need ml_dtypes: pip install ml_dtypes") from error
    return np.dtype(ml_dtypes.bfloat16)


def _empty(module: Any, shape: Sequence[int], memory_order: Sequence[int], dtype: Any, **kwargs: Any) -> Any:
    """Allocate with `module.empty`; `memory_order` lists the axes from the slowest to the fastest in memory."""
    base = module.empty(tuple(shape[axis] for axis in memory_order), dtype=dtype, **kwargs)
    if list(memory_order) == sorted(memory_order):
        return base
    inverse = [memory_order.index(axis) for axis in range(len(shape))]
    return base.permute(inverse) if hasattr(base, "permute") else base.transpose(inverse)


def _aligned_empty(shape: Sequence[int], memory_order: Sequence[int], dtype: np.dtype[Any]) -> np.ndarray:
    """Allocate as `_empty` does, on a 64-byte boundary, which JAX needs to take an array over without a copy."""
    count = math.prod(shape) * dtype.itemsize
    buffer = np.empty(count + 64, np.uint8)
    start = -buffer.ctypes.data % 64
    flat = buffer[start : start + count].view(dtype)
    base = flat.reshape([shape[axis] for axis in memory_order])
    return base.transpose(np.argsort(memory_order))
