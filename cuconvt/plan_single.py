"""A transposed convolution of a single position is a matrix product: every tap has an output of its own.

The first layer of a generator is one, from a latent vector to the smallest image. Its stride moves nothing, so that it
can be any, and with the kernel for its stride no kernel reads or multiplies beside the position. Planes along D that
follow each other in memory are more rows along H, and the problem is one of two axes, whose plans take several samples
at once.
"""

from __future__ import annotations

from dataclasses import replace

from cuconvt.geometry import Geometry
from cuconvt.plan import Layout


def without_steps(geometry: Geometry, layout: Layout) -> tuple[Geometry, Layout]:
    """Return the same problem with the kernel for its stride, where x is a single position, or as it is."""
    g = geometry
    if g.x_extent != (1, 1, 1) or g.out_extent != g.kernel or g.dilation != (1, 1, 1) or any(g.pad_before):
        return geometry, layout
    geometry = replace(g, stride=g.kernel)
    depth, height, width = g.kernel
    planes = (layout.out[2:4], layout.weight[2:4])
    if g.rank < 3 or any(of_plane != height * of_row for of_plane, of_row in planes):
        return geometry, layout
    rows = (1, depth * height, width)
    geometry = replace(geometry, rank=2, kernel=rows, stride=rows, out_extent=rows)
    return geometry, replace(
        layout, weight=(*layout.weight[:2], 0, *layout.weight[3:]), out=(*layout.out[:2], 0, *layout.out[3:])
    )
