"""The CUDA backend with its last step replaced: the same plan, launched on the host."""

from __future__ import annotations

import importlib
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from cuconvt import cpu
from cuconvt.geometry import Geometry
from cuconvt.plan import Device, Layout, Plan, Refusal, problem_struct
from cuconvt.tensor_map import ITEMSIZES, TensorMap
from host.build import kernel_sources, program
from host.execute import ABSENT, BOXES, INPUT, OF_KERNEL_BEFORE, OUTPUT, VALUE, Argument, Program

PACK_BLOCK = 256


def plan_or_refusal(
    family: str, geometry: Geometry, dtype: str, layout: Layout, precision: str | None, device: Device
) -> Plan | Refusal:
    """Plan with one family, whether or not it is the cheapest."""
    return getattr(importlib.import_module(f"cuconvt.plan_{family}"), f"plan_{family}")(
        geometry, dtype, layout, precision, device
    )


def plan_family(
    family: str, geometry: Geometry, dtype: str, layout: Layout, precision: str | None, device: Device
) -> Plan:
    """Plan with one family, which must not refuse."""
    plan = plan_or_refusal(family, geometry, dtype, layout, precision, device)
    assert isinstance(plan, Plan), plan
    return plan


class HostBackend:
    """Runs problems of one family on the host; it serves in place of a backend's ``conv_transpose``.

    Parameters
    ----------
    family : str
        The kernel, ``kernels/<family>.cu``.
    device : Device
        The GPU that is planned for.
    precision : str, optional
        As in the call; the backend for NumPy arrays is not told.
    defines : mapping of str to int, optional
        Macros in place of the plan's.
    sources : mapping of str to str, optional
        Texts of the kernel and its headers in place of the files', for planted faults.
    plan : callable, optional
        Takes the place of `plan_family`.
    """

    def __init__(
        self,
        family: str,
        device: Device,
        precision: str | None = None,
        defines: Mapping[str, int] | None = None,
        sources: Mapping[str, str] | None = None,
        plan: Callable[..., Plan] = plan_family,
    ):
        self.family, self.device, self.precision, self.plan = family, device, precision, plan
        self.defines = defines or {}
        self.sources = sources or kernel_sources(f"{family}.cu")
        self.programs: dict[tuple[Any, ...], Program] = {}

    def __call__(self, x: Any, weight: Any, bias: Any, geometry: Geometry, out: Any) -> None:
        layout = Layout.of(x, weight, bias, out)
        plan = self.plan(self.family, geometry, x.dtype.name, layout, self.precision, self.device)
        problem = Argument("problem", VALUE, problem_struct(plan).tobytes())
        role = INPUT
        if plan.packed_words:
            packed = np.empty(plan.packed_words, np.uint32)
            grid = -(-plan.packed_words // (plan.packed_a_thread * PACK_BLOCK))
            arguments = [Argument.array("weight", INPUT, weight), Argument.array("packed", OUTPUT, packed), problem]
            self._program(plan, f"{plan.kernel}_pack").launch(grid, PACK_BLOCK, 0, arguments)
            weight, role = packed, OF_KERNEL_BEFORE
        read = Argument.array("x", INPUT, x)
        arguments = [
            boxes_of(plan.maps[0], 5, "x") if plan.maps else read,
            Argument.array("weight", role, weight),
            Argument("bias", ABSENT) if bias is None else Argument.array("bias", INPUT, bias),
            Argument.array("out", OUTPUT, out),
            problem,
            *([read] if plan.maps else []),  # kernels that take maps of arrays find these behind all arguments
        ]
        self._program(plan, plan.kernel).launch(plan.grid, plan.block, plan.shared_bytes, arguments)

    def _program(self, plan: Plan, entry: str) -> Program:
        defines = tuple({**dict(plan.defines), **self.defines}.items())
        if (entry, defines) not in self.programs:
            path = program(self.sources, f"{self.family}.cu", entry, defines)
            self.programs[entry, defines] = Program(path)
        return self.programs[entry, defines]

    def close(self) -> None:
        for running in self.programs.values():
            running.close()


def boxes_of(tensor_map: TensorMap, array: int, name: str) -> Argument:
    """Return what the host takes in place of a tensor map, of the array that is this one of the arguments."""
    m = tensor_map
    box, steps = (m.channels, *m.spans, 1), (1, *m.steps, 1)
    of_array = *m.extents, ITEMSIZES[m.dtype], *m.strides
    elements = *of_array, *box, *steps, m.dtype == "tf32", m.swizzled_bytes
    return Argument(f"map of {name}", BOXES, struct.pack("23q", array, *elements))


@contextmanager
def on_host(*arguments: Any, **keywords: Any) -> Iterator[HostBackend]:
    """Run NumPy arrays by `HostBackend` within the context."""
    backend = HostBackend(*arguments, **keywords)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "conv_transpose", backend)
        try:
            yield backend
        finally:
            backend.close()


def launch(
    file: str,
    entry: str,
    block: int,
    arguments: Mapping[str, Any],
    shared_bytes: int = 0,
    sources: Mapping[str, str] | None = None,
    schedule: int = 0,
) -> None:
    """Run one block of a kernel that is no family: arrays named ``out...`` are outputs, numbers are 32-bit values."""
    packed = []
    for name, value in arguments.items():
        if isinstance(value, np.ndarray):
            packed.append(Argument.array(name, OUTPUT if name.startswith("out") else INPUT, value))
        else:
            packed.append(Argument(name, VALUE, np.int32(value).tobytes()))
    running = Program(program(sources or kernel_sources(file), file, entry))
    running.launches = schedule
    try:
        running.launch(1, block, shared_bytes, packed)
    finally:
        running.close()
