"""The gradients of the CUDA backend with their last step replaced, the same plans launched on the host, and cases."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any

import numpy as np
import pytest
from described import DEVICES, channels_last, contiguous, geometry_of, problem_of
from host.backend import PACK_BLOCK, boxes_of, plan_family
from host.build import kernel_sources, program
from host.execute import ABSENT, CONTINUED, INPUT, OF_KERNEL_BEFORE, OUTPUT, VALUE, Argument, Program
from hypothesis import given, seed, settings
from strategies import DTYPES, KINDS, NOT_LAST, Ints, Problem, Specialisation, case, problems

from cuconvt import cpu
from cuconvt import plan_correlate_narrow as narrow
from cuconvt.geometry import Geometry
from cuconvt.plan import DTYPE_CODES, Device, Layout, Plan, problem_struct, struct_of
from cuconvt.plan_turn import TURN_THREADS
from cuconvt.plan_turned import turned
from cuconvt.plan_weight_gradient import SUM_THREADS, sum_blocks
from cuconvt.plan_weight_gradient_tma_work import Shape, Share, Work
from cuconvt.tensor_map import TensorMap


class HostGradients:
    """Runs correlations or weight gradients with one family on the host, in place of the NumPy backend's functions.

    Parameters
    ----------
    family, device, precision, defines, sources
        As for `host.backend.HostBackend`.
    is_turned : bool, optional
        Whether the family is one of transposed convolutions, which runs correlations with a stride of 1.
    plan : callable, optional
        As for `host.backend.HostBackend`.
    """

    def __init__(
        self,
        family: str,
        device: Device,
        precision: str | None = None,
        defines: Mapping[str, int] | None = None,
        sources: Mapping[str, str] | None = None,
        is_turned: bool = False,
        plan: Callable[..., Plan] = plan_family,
    ):
        self.family, self.device, self.precision, self.is_turned = family, device, precision, is_turned
        self.plan = plan
        self.defines = defines or {}
        self.sources = sources or kernel_sources(f"{family}.cu")
        self.programs: dict[tuple[Any, ...], Program] = {}

    def correlate(self, y: Any, weight: Any, bias: Any, geometry: Geometry, out: Any) -> None:
        plan = self._plan(geometry, y.dtype.name, Layout.of(out, weight, bias, y))
        role, read = INPUT, Argument.array("y", INPUT, y)
        if plan.packed_words:
            packed = np.empty(plan.packed_words, np.uint32)
            grid = -(-plan.packed_words // (plan.packed_a_thread * PACK_BLOCK))
            arrays = [Argument.array("weight", INPUT, weight), Argument.array("packed", OUTPUT, packed)]
            entry, numbers = "_pack", Argument("problem", VALUE, struct_of(plan.problem + plan.turns).tobytes())
            if plan.turn_blocks:
                copy = _copied_pieces(plan)
                entry = "_pack_and_turn"
                arrays += [read, Argument.array("turned", OUTPUT, copy)]
            blocks, shared_bytes = plan.turn_blocks + grid, plan.turn_shared_bytes
            self._launch(plan, plan.kernel + entry, blocks, PACK_BLOCK, shared_bytes, arrays, (), numbers)
            weight, role = packed, OF_KERNEL_BEFORE
            if plan.turn_blocks:
                read = Argument.array("y", OF_KERNEL_BEFORE, copy)
        arrays = [
            boxes_of(plan.maps[0], 5, "y") if plan.maps else read,
            Argument.array("weight", role, weight),
            Argument("bias", ABSENT) if bias is None else Argument.array("bias", INPUT, bias),
            Argument.array("out", OUTPUT, out),
        ]
        behind = [read] if plan.maps else []
        self._launch(plan, plan.kernel, plan.grid, plan.block, plan.shared_bytes, arrays, behind)

    def weight_gradient(self, x: Any, y: Any, geometry: Geometry, out: Any) -> None:
        plan = self._plan(geometry, x.dtype.name, Layout.of(x, out, None, y))
        launches, *steps = plan.images or (1, 0, 0)
        count = len(x) // launches
        assert launches == 1 or [array[:1].strides[0] * count for array in (x, y)] == steps
        result = Argument.array("out", OUTPUT, out)
        size = min(place for place in (plan.workspace_bytes, *plan.turned) if place >= 0) if plan.sums else 0
        parts = np.empty(size, np.uint8).view(np.float64 if x.dtype == np.float64 else np.float32)
        for i in range(launches):
            images = (Argument.array(name, INPUT, a[i * count : (i + 1) * count]) for name, a in (("x", x), ("y", y)))
            inputs = self._turned(plan, *images)
            # Kernels that take maps of arrays find these behind all arguments.
            maps = [boxes_of(of_one, 5 + i, "xy"[i]) for i, of_one in enumerate(plan.maps)]
            arrays, behind = (maps, inputs) if maps else (inputs, [])
            if plan.sums:
                written = written_slots(plan, Argument.array("parts", CONTINUED if i else OUTPUT, parts))
                arrays = [*arrays, written, Argument("out", ABSENT)]
            else:
                arrays = [*arrays, Argument("parts", ABSENT), result]
            problem = Argument("problem", VALUE, struct_of(plan.problem_of_next if i else plan.problem).tobytes())
            self._launch(plan, plan.kernel, plan.grid, plan.block, plan.shared_bytes, arrays, behind, problem)
        if plan.sums:
            arrays = [Argument.array("parts", OF_KERNEL_BEFORE, parts), result]
            self._launch(
                plan, f"{plan.kernel}_add", sum_blocks(plan, x.dtype.name, self.device), SUM_THREADS, 0, arrays
            )

    def _turned(self, plan: Plan, x: Argument, y: Argument) -> list[Argument]:
        """Return x and y, or channels-last copies where the plan has them made."""
        if not plan.turn_blocks:
            return [x, y]
        copies = [_copied(of_one) if place >= 0 else None for place, of_one in zip(plan.turned, plan.maps, strict=True)]
        results = [
            Argument(name, ABSENT) if copy is None else Argument.array(name, OUTPUT, copy)
            for name, copy in zip("xy", copies, strict=True)
        ]
        turns = Argument("turns", VALUE, struct_of(plan.turns).tobytes())
        blocks, shared_bytes = plan.turn_blocks, plan.turn_shared_bytes
        self._launch(plan, f"{plan.kernel}_turn", blocks, TURN_THREADS, shared_bytes, [x, y, *results], (), turns)
        return [
            array if copy is None else Argument.array(array.name, OF_KERNEL_BEFORE, copy)
            for array, copy in zip((x, y), copies, strict=True)
        ]

    def _plan(self, geometry: Geometry, dtype: str, layout: Layout) -> Plan:
        if self.is_turned:
            adjoint = turned(geometry, layout)
            assert adjoint is not None, "the problem has a stride"
            geometry, layout = adjoint
        return self.plan(self.family, geometry, dtype, layout, self.precision, self.device)

    def _launch(
        self,
        plan: Plan,
        entry: str,
        grid: int,
        block: int,
        shared_bytes: int,
        arrays: list[Argument],
        behind: Sequence[Argument] = (),
        last: Argument | None = None,
    ) -> None:
        defines = tuple({**dict(plan.defines), **self.defines}.items())
        if (entry, defines) not in self.programs:
            path = program(self.sources, f"{self.family}.cu", entry, defines)
            self.programs[entry, defines] = Program(path)
        last = last or Argument("problem", VALUE, problem_struct(plan).tobytes())
        self.programs[entry, defines].launch(grid, block, shared_bytes, [*arrays, last, *behind])

    def close(self) -> None:
        for running in self.programs.values():
            running.close()


def _copied(of_one: TensorMap) -> Any:
    """Return memory for the copy of an array that is made channels-last, as a map reads it."""
    return np.zeros(max(e * s for e, s in zip(of_one.extents[1:], of_one.strides, strict=True)) // 2, np.uint16)


def _copied_pieces(plan: Plan) -> Any:
    """Return the same for y of a correlation, by what is turned: pieces of 16 bytes."""
    n, channels, *extents = plan.turns[:5]
    piece = 4 if dict(plan.defines)["DTYPE"] == DTYPE_CODES["float32"] else 8
    return np.zeros((n * prod(extents) * -(-channels // piece), 8), np.uint16)


def written_slots(plan: Plan, parts: Argument) -> Argument:
    """Leave out the slots for parts that no block has, where a tile's boxes and a block's end at the same one."""
    if plan.kernel != "weight_gradient_tma":
        return parts
    share = share_of(plan)
    itemsize = 2 if dict(plan.defines).get("ONE_PART") else 4
    elements = np.zeros((share.slots, itemsize * plan.tile.values), np.uint8)
    elements[: share.whole * share.tiles] = 1
    for block in range(share.blocks - share.whole * share.tiles):
        first = block * share.of_block
        last = min(first + share.of_block, share.rest * share.tiles) - 1
        for tile in range(first // share.rest, last // share.rest + 1):
            elements[share.whole * share.tiles + block + tile] = 1
    return dataclasses.replace(parts, elements=elements.tobytes())


def share_of(plan: Plan) -> Share:
    """Return how blocks share the boxes of a plan of weight_gradient_tma."""
    defines, (n, groups, c_in, c_out, *_) = dict(plan.defines), plan.problem
    kernel, ones = tuple(defines[f"KERNEL_{axis}"] for axis in "DHW"), (1, 1, 1)
    tiles = Work(Shape(3, kernel, ones, ones, groups, c_in, c_out, False, False)).tiles_of_weights(plan.tile)
    fields = problem_of(plan)
    return Share(tiles, n * prod(fields["tiles"][:3]), *fields["blocks"])


@contextmanager
def gradients_on_host(*arguments: Any, **keywords: Any) -> Iterator[HostGradients]:
    """Run the gradients of NumPy arrays by `HostGradients` within the context."""
    backend = HostGradients(*arguments, **keywords)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "correlate", backend.correlate)
        patch.setattr(cpu, "weight_gradient", backend.weight_gradient, raising=False)
        try:
            yield backend
        finally:
            backend.close()


@contextmanager
def weight_gradients_on_host(
    kernel: str, this: Any, sources: Mapping[str, str] | None = None, defines: Mapping[str, int] | None = None
) -> Iterator[None]:
    """Run weight gradients of NumPy arrays by a case's kernel and plans within the context, whatever its tile costs."""
    host = gradients_on_host(kernel, this.device, None, defines, sources=sources)
    with host as backend, pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "_plan", this.plan)
        yield


# ---- cases -----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Case:
    """A specialisation of a kernel: every problem of it runs the same program."""

    spec: Specialisation
    dtype: str
    precision: str | None = None
    device: Device = DEVICES[90]
    index64: bool = False  # 64-bit indices, though the problem is small
    before_w: int = 0  # the padding before along W, modulo 8, which decides how staged rows are aligned
    plan: Callable[..., Plan] = plan_family

    @property
    def defines(self) -> dict[str, int]:
        return {"INDEX64": 1} if self.index64 else {}


SIMT = tuple((dtype, "ieee" if dtype == "float32" else None) for dtype in DTYPES)
LARGEST_KERNEL = {1: 9, 2: 4, 3: 3}
LAST = ("channels_last",)
# Layouts whose positions along W are next to each other, and apart: programs for few channels depend on it.
NEXT, APART = ("contiguous", "sliced", "cropped", "misaligned"), ("strided", "negative", "transposed")
# Dtype and precision, kernel, stride, dilation, channels of a group (of x and y), whether these are channels-last.
RARE = {
    "correlate": (
        ("float32", "ieee", (1, 40), (1, 3), (1, 1), 2, 3, (False, False)),  # taps one by one along W
        ("float32", "ieee", (2, 2), (2, 2), (400, 1), 3, 9, (True, True)),
    ),
    "correlate_few_channels": (
        ("float16", None, (4, 4), (2, 2), (1, 1), 1, 1, (True, True)),
        ("float32", "ieee", (3,), (1,), (2,), 40, 1, (True, True)),
        ("bfloat16", None, (2, 5, 5), (1, 1, 1), (1, 1, 1), 1, 1, (False, False)),  # lanes share two columns
        ("float64", None, (3, 3, 3), (2, 2, 2), (1, 1, 1), 2, 3, (False, False)),
    ),
    "correlate_gemm": (
        ("float32", "tf32", (2, 2, 2), (2, 2, 2), (1, 1, 1), 17, 9, (True, True)),
        ("float16", None, (1, 3, 3), (1, 1, 1), (1, 1, 1), 24, 17, (False, False)),
    ),
    "correlate_narrow": (
        ("bfloat16", None, (3, 3, 3), (2, 2, 2), (1, 1, 1), 8, 8, (False, False)),
        ("float32", "tf32", (3, 4), (2, 3), (1, 1), 16, 9, (True, False)),
        ("float32", "tf32x3", (2, 4), (1, 3), (2, 1), 3, 8, (False, False)),
    ),
    "weight_gradient": (
        ("float32", "ieee", (2, 4), (2, 2), (1, 1), 1, 1, (True, True)),  # several groups a block
        ("float64", None, (11,), (1,), (2,), 9, 3, (False, False)),  # several tiles of taps
    ),
    "weight_gradient_few_channels": (
        ("float16", None, (4, 4), (2, 2), (1, 1), 1, 1, (True, True)),
        ("float32", "ieee", (4, 4, 4), (2, 2, 2), (1, 1, 1), 1, 1, (False, False)),
        ("bfloat16", None, (2, 5, 5), (1, 1, 1), (1, 1, 1), 1, 2, (False, False)),  # lanes share two columns
        ("float64", None, (3, 3, 3), (2, 2, 2), (1, 1, 1), 2, 3, (False, False)),
    ),
    "weight_gradient_gemm": (
        ("bfloat16", None, (1, 19), (1, 1), (1, 1), 9, 8, (False, False)),  # several tiles of taps
        ("float32", "tf32x3", (9, 2), (2, 2), (1, 1), 17, 9, (True, False)),
    ),
}


def cases(family: str) -> dict[str, Case]:
    """Return the cases of a family by name."""
    kinds, few = KINDS if family.endswith(("gemm", "narrow")) else SIMT, family.endswith("few_channels")
    found = {}
    for index in range(6):
        choose = random.Random(index)
        (dtype, precision), rank = kinds[index % 4], (3, 2, 1, 3, 2, 3, 1, 2)[index]
        kernel, stride, dilation = (
            tuple(choose.randint(1, top) for _ in range(rank)) for top in (LARGEST_KERNEL[rank], 3, 2)
        )
        channels = choose.choice((1, 2, 5, 8, 9, 17)), choose.choice((1, 3, 4, 9, 16, 18))
        if few:
            channels = min(channels[0], 4), min(channels[1], 4)
        last = choose.random() < 0.4, choose.random() < 0.4
        device = choose.choice([device for device in DEVICES.values() if device.compute_capability != 120])
        fields = {"index64": choose.random() < 0.2, "before_w": choose.randrange(8), "device": device}
        if family == "correlate_narrow":
            channels = channels[0], min(channels[1], 8 if precision == "tf32x3" else narrow.MAX_CHANNELS)
            fields["plan"] = with_a_tile(index)
        name = f"{index}-{precision or dtype}-{rank}d"
        spec = specialisation(kernel, stride, dilation, channels, last)
        spec = of_contiguous_rows(spec) if family == "correlate_narrow" else spec
        found[name] = Case(for_few(spec, index % 2 == 1) if few else spec, dtype, precision, **fields)
    for dtype, precision, kernel, stride, dilation, c_in, c_out, last in RARE[family]:
        spec = specialisation(kernel, stride, dilation, (c_in, c_out), last)
        name = f"{precision or dtype}-{'x'.join(map(str, kernel))}"
        spec = of_contiguous_rows(spec) if family == "correlate_narrow" else spec
        fields = {"plan": with_a_tile(1)} if family == "correlate_narrow" else {}
        found[name] = Case(for_few(spec) if few else spec, dtype, precision, **fields)
    return found


def check_drawn(
    spec: Specialisation, longest: Ints, budget: float, among: Collection[str], name: str, check: Callable[..., None]
) -> None:
    """Check problems of a specialisation, which are drawn anew whenever the tests are run: its share `among` all."""

    @seed(len(name))
    @settings(max_examples=-(-settings().max_examples // len(among)), derandomize=False, database=None)
    @given(problem=problems(spec, longest, longest[-1] + 16, budget))
    def every_problem(problem: Problem) -> None:
        check(problem)

    every_problem()


def specialisation(
    kernel: Ints, stride: Ints, dilation: Ints, channels: tuple[int, int], last: tuple[bool, bool]
) -> Specialisation:
    x, y = (LAST if side else NOT_LAST for side in last)
    return Specialisation(
        kernel, stride, dilation, *channels, x, tuple(layout for layout in y if layout != "broadcast")
    )


def of_contiguous_rows(spec: Specialisation) -> Specialisation:
    """Return the specialisation with such y alone as correlate_narrow takes."""
    layouts = tuple(layout for layout in spec.x_layouts if layout != "broadcast")  # y would be, too
    return dataclasses.replace(spec, x_layouts=layouts, out_layouts=("contiguous",))


def with_a_tile(number: int) -> Callable[..., Plan]:
    """Return a planner of correlate_narrow that takes one of a problem's smaller tiles, whatever it costs."""

    def plan(
        family: str, geometry: Geometry, dtype: str, layout: Layout, precision: str | None, device: Device
    ) -> Plan:
        work = narrow.Work.of_problem(narrow.slides_along_h(geometry, layout)[0], dtype, precision)
        tiles = [tile for tile in narrow.tiles(work, device) if tile.box_d * tile.box_w <= 32]
        tile = random.Random(number).choice(tiles)
        found = narrow.plan_correlate_narrow(geometry, dtype, layout, precision, device, tile)
        assert isinstance(found, Plan), found
        return found

    return plan


def for_few(spec: Specialisation, apart: bool = False) -> Specialisation:
    """Return the specialisation with one kind of y: channels-last, also one number of channels, as in `smallest`."""
    if LAST in (spec.x_layouts, spec.out_layouts):
        spec = dataclasses.replace(spec, groups=2)
    return spec if spec.out_layouts == LAST else dataclasses.replace(spec, out_layouts=APART if apart else NEXT)


def of_the_case(this: Case, problem: Problem) -> Problem:
    """Return the problem with as much more padding before along W as the case has, and more inputs for it."""
    (before, after), stride = problem.padding[-1], problem.stride[-1]
    more = (this.before_w - before) % 8
    extent = (*problem.extent[:-1], problem.extent[-1] + -(-more // stride))
    return dataclasses.replace(problem, extent=extent, padding=(*problem.padding[:-1], (before + more, after)))


def box(family: str, defines: Mapping[str, int]) -> Ints:
    """Return the positions that a block owns at a time along D, H and W."""
    if family == "correlate":
        return (defines["THREADS_D"], defines["THREADS_H"], defines["THREADS_W"] * defines["POSITIONS_W"])
    if family == "correlate_gemm":
        rows_h, rows_w = (1, defines["ROWS"]) if defines["ROWS_ALONG_W"] else (defines["ROWS"], 1)
        return (defines["WARPS_D"], defines["WARPS_H"] * rows_h, 8 * defines["WARPS_W"] * rows_w)
    if family == "correlate_narrow":
        cut = 4 * ((defines["KERNEL_H"] - 1) * defines["DILATION_H"] // defines["STRIDE_H"] + 1)
        return (defines["WARPS_D"] * defines["SLICES"], cut, 16 * defines["WARPS_W"] * defines["TILES_M"])
    if family.endswith("few_channels"):
        cut = 4 * ((defines["KERNEL_D"] - 1) * defines["DILATION_D"] // defines["STRIDE_D"] + 1)
        return (
            cut,
            3,
            128 // defines["LANES_C"] * defines["POSITIONS_W"],
        )  # of more planes, several blocks take a run each
    width = defines["BOX_W"] if family == "weight_gradient" else 8 * defines["ROWS_W"]
    return (1, defines["BOX_H"], width)


def smallest(this: Case, extent: Ints | None = None, **fields: Any) -> Problem:
    spec = this.spec
    rank = len(spec.kernel)
    problem = case(
        (2, 2 * spec.c_in_per_group, *(extent or (1,) * rank)),
        2 * spec.c_out_per_group,
        spec.kernel,
        spec.stride,
        groups=2,
        dilation=spec.dilation,
        has_bias=True,
        x_layout=spec.x_layouts[0],
        out_layout=spec.out_layouts[0],
        **fields,
    )
    return of_the_case(this, problem)


def plan_for(family: str, this: Case, problem: Problem) -> Plan:
    geometry = geometry_of(problem)
    g = geometry
    x, y = (channels_last if side == LAST else contiguous for side in (this.spec.x_layouts, this.spec.out_layouts))
    layout = Layout(
        x=x((g.n, g.c_in, *g.x_extent)),
        weight=contiguous((g.c_in, g.c_out_per_group, *g.kernel)),
        bias=1,
        out=y((g.n, g.c_out, *g.out_extent)),
    )
    return this.plan(family, geometry, this.dtype, layout, this.precision, this.device)


def one_past_every_edge(family: str, this: Case) -> Problem:
    """Return a problem whose last box holds a single position, along every axis."""
    edges = box(family, dict(plan_for(family, this, smallest(this)).defines))[3 - len(this.spec.kernel) :]
    problem = smallest(this, tuple(edge + 1 for edge in edges))
    excess = problem.extent[-1] - edges[-1] - 1  # inputs that `of_the_case` added
    return smallest(this, (*(edge + 1 for edge in edges[:-1]), edges[-1] + 1 + (-excess) % edges[-1]))


def whole_words(this: Case) -> Problem:
    """Return a problem whose rows of x and, where they can be, of y are multiples of 16 bytes."""
    lead = (2,) * (len(this.spec.kernel) - 1)
    found = [smallest(this, (*lead, width)) for width in range(16, 48)]
    whole = [problem for problem in found if problem.extent[-1] % 8 == 0]
    return max(whole, key=lambda problem: (problem.out_shape[-1] & -problem.out_shape[-1], -problem.extent[-1]))
