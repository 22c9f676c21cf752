"""The plans that the planner picks: for the benchmark's cases, and for a spread of layers of common networks.

Each case is planned in each precision and both layouts, each layer in a precision and a layout that are drawn for it
and the architecture; forward and gradients. Neither N nor extents change what is compiled, but for y that is turned and
for tiles of boxes.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections import defaultdict
from collections.abc import Iterator

from described import DEVICES, geometry_of, layout_of
from strategies import Ints, case

from cuconvt.bench.cases import CASES, PRECISIONS
from cuconvt.geometry import Geometry
from cuconvt.plan import Device, Layout, Plan, make_plan
from cuconvt.plan_correlate import make_correlate_plan
from cuconvt.plan_correlate_turning import plan_unstrided
from cuconvt.plan_turned import turned
from cuconvt.plan_weight_gradient import make_weight_gradient_plan

# Kernel, stride, padding and output_padding of an axis, the ranks that it is used in, and channels in and out.
DENSE: tuple[tuple[Ints, Ints, tuple[Ints, ...]], ...] = (
    # Decoders of U-Nets, from the lowest level to the highest.
    ((2, 2, 0, 0), (2, 3), ((1024, 512), (512, 256), (320, 256), (256, 128), (128, 64), (64, 32), (32, 16))),
    ((3, 2, 1, 1), (2, 3), ((256, 128), (128, 64), (64, 32), (32, 2))),
    # Decoders of autoencoders and generators, from the latent vector to the image or volume.
    ((4, 1, 0, 0), (2, 3), ((100, 512), (128, 512))),
    ((4, 2, 1, 0), (1, 2, 3), ((512, 256), (256, 128), (128, 64), (64, 32), (64, 3), (32, 1))),
    ((5, 2, 2, 1), (2,), ((512, 256), (128, 64), (64, 3))),
    ((3, 1, 1, 0), (2, 3), ((64, 64), (32, 3), (16, 1))),
    # Vocoders and audio codecs.
    ((16, 8, 4, 0), (1,), ((512, 256), (256, 128))),
    ((10, 5, 3, 1), (1,), ((512, 256), (256, 128))),
    ((8, 4, 2, 0), (1,), ((256, 128), (128, 64))),
    ((11, 5, 3, 0), (1,), ((512, 256),)),
    ((4, 2, 1, 0), (1,), ((128, 64), (64, 32))),
    # Upsampling by a large factor at the end: super-resolution, segmentation.
    ((9, 3, 4, 2), (2,), ((56, 1),)),
    ((9, 4, 4, 3), (2,), ((56, 1),)),
    ((4, 4, 0, 0), (2, 3), ((96, 48), (48, 3))),
    ((16, 8, 4, 0), (2,), ((21, 21),)),
)
# The same with groups, (C_in, C_out, groups): depthwise interpolation, and few channels a group.
GROUPED: tuple[tuple[Ints, Ints, tuple[Ints, ...]], ...] = (
    ((4, 2, 1, 0), (1, 2, 3), ((64, 64, 64), (21, 21, 21))),
    ((16, 8, 4, 0), (2,), ((21, 21, 21),)),
    ((3, 1, 1, 0), (2, 3), ((96, 96, 96), (128, 128, 32))),
    ((3, 2, 1, 1), (2, 3), ((64, 64, 8), (128, 128, 4), (64, 32, 2))),
    ((4, 2, 1, 0), (1,), ((64, 64, 8), (128, 128, 16), (256, 256, 32))),
)
# Axes that differ: kernel, stride, padding, output_padding, dilation, C_in, C_out.
UNEQUAL: tuple[tuple[Ints, Ints, Ints, Ints, Ints, int, int], ...] = (
    ((1, 2, 2), (1, 2, 2), (0, 0, 0), (0, 0, 0), (1, 1, 1), 320, 256),  # volumes with thick slices
    ((1, 2, 2), (1, 2, 2), (0, 0, 0), (0, 0, 0), (1, 1, 1), 64, 32),
    ((3, 4, 4), (1, 2, 2), (1, 1, 1), (0, 0, 0), (1, 1, 1), 128, 64),  # videos
    ((1, 4), (1, 2), (0, 1), (0, 0), (1, 1), 128, 64),  # spectrograms
    ((3, 3), (1, 1), (2, 2), (0, 0), (2, 2), 64, 64),
    ((3, 3, 3), (1, 1, 1), (2, 2, 2), (0, 0, 0), (2, 2, 2), 32, 32),
)


@functools.cache
def layers() -> tuple[Geometry, ...]:
    same = [(axis, rank, (*channels, 1)) for axis, ranks, widths in DENSE for rank in ranks for channels in widths]
    same += [(axis, rank, channels) for axis, ranks, widths in GROUPED for rank in ranks for channels in widths]
    found = [case((2, c_in, *(8,) * rank), c_out, *axis, groups=groups) for axis, rank, (c_in, c_out, groups) in same]
    for kernel, stride, padding, output_padding, dilation, c_in, c_out in UNEQUAL:
        x = (2, c_in, *(8,) * len(kernel))
        found.append(case(x, c_out, kernel, stride, padding, output_padding, dilation=dilation))
    return tuple(geometry_of(problem) for problem in found)


@functools.cache
def picked(arch: int) -> dict[str, tuple[Plan, ...]]:
    """Return the plans for a device by their kernels, one for each specialisation."""
    draw = random.Random(arch)
    ways = tuple(itertools.product(PRECISIONS.values(), (False, True)))  # precision, and whether channels are last
    problems = [(measured.geometry, *way) for measured, way in itertools.product(CASES.values(), ways)]
    problems += [(layer, *draw.choice(ways)) for layer in layers()]
    found: defaultdict[str, dict[tuple[tuple[str, int], ...], Plan]] = defaultdict(dict)
    for geometry, precision, last in problems:
        for plan in operations(geometry, precision.dtype, layout_of(geometry, last), precision.mode, DEVICES[arch]):
            found[plan.kernel].setdefault(plan.defines, plan)
    return {kernel: tuple(plans.values()) for kernel, plans in found.items()}


def operations(geometry: Geometry, dtype: str, layout: Layout, precision: str | None, device: Device) -> Iterator[Plan]:
    """Yield the plans of the forward, the gradient of x and that of the weight, as the CUDA backend makes them."""
    yield make_plan(geometry, dtype, layout, precision, device)
    adjoint = turned(geometry, layout)
    if adjoint is None:
        yield make_correlate_plan(geometry, dtype, layout, precision, device)
    else:
        plan = make_plan(adjoint[0], dtype, adjoint[1], precision, device)
        yield plan_unstrided(plan, geometry, dtype, layout, precision, device)
    yield make_weight_gradient_plan(geometry, dtype, layout, precision, device)
