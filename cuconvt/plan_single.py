"""A transposed convolution of a single position is a matrix product: every tap has an output of its own.

The first layer of a generator is one, from a latent vector to the smallest image. Its stride moves nothing, so that it
can be any, and with the kernel for its stride no kernel reads or multiplies beside the position. Planes along D that
follow each other in memory are more rows along H, and the problem is one of two axes, whose plans take several samples
at once.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

from cuconvt.geometry import Geometry
from cuconvt.plan import Ints, Layout


def without_steps(geometry: Geometry, layout: Layout) -> tuple[Geometry, Layout]:
    """Return the same problem with the kernel for its stride, where x is a single position, or as it is."""
    g = geometry
    if not _is_single(g):
        return geometry, layout
    geometry, layout = _planes_as_rows(g, layout)
    return replace(geometry, stride=geometry.kernel), layout


def without_taps(geometry: Geometry, layout: Layout) -> tuple[Geometry, Layout]:
    """Return the same problem with taps as channels of y, where x is a single position, or as it is.

    For that, neighbours in memory have to be so in y and in the weight: first taps, then channels. Where they are not,
    planes along D may still be more rows.
    """
    g = geometry
    if not _is_single(g):
        return geometry, layout
    of_y, of_weight = (_step(strides, (g.c_out_per_group, *g.kernel)) for strides in (layout.out, layout.weight))
    if of_y is None or of_weight is None:
        return _planes_as_rows(g, layout)
    ones = (1, 1, 1)
    geometry = replace(g, rank=1, c_out=g.taps * g.c_out, kernel=ones, stride=ones, out_extent=ones)
    weight, out = (layout.weight[0], of_weight, 0, 0, 0), (layout.out[0], of_y, 0, 0, 0)
    return geometry, replace(layout, weight=weight, out=out)


def _planes_as_rows(geometry: Geometry, layout: Layout) -> tuple[Geometry, Layout]:
    depth, height, width = geometry.kernel
    planes = (layout.out[2:4], layout.weight[2:4])
    if geometry.rank < 3 or any(of_plane != height * of_row for of_plane, of_row in planes):
        return geometry, layout
    rows = (1, depth * height, width)
    weight, out = (*layout.weight[:2], 0, *layout.weight[3:]), (*layout.out[:2], 0, *layout.out[3:])
    return replace(geometry, rank=2, kernel=rows, out_extent=rows), replace(layout, weight=weight, out=out)


def _is_single(geometry: Geometry) -> bool:
    g = geometry
    return g.x_extent == g.dilation == (1, 1, 1) and g.out_extent == g.kernel and not any(g.pad_before)


def _step(strides: Ints, extents: Ints) -> int | None:
    """Return how far channels and taps are apart in memory, each of the next one, or None if something lies between."""
    found = [(stride, extent) for stride, extent in zip(strides[1:], extents, strict=True) if extent > 1]
    for (stride, _), (inner, extent) in itertools.pairwise(found):
        if stride != inner * extent:
            return None
    return found[-1][0] if found else None
