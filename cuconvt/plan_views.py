"""A problem as another one of the same numbers: its batch as an axis, its taps or phases as channels."""

from __future__ import annotations

from dataclasses import replace
from math import prod

from cuconvt.geometry import Geometry, triple
from cuconvt.plan import Ints, Layout, positions


def batch_as_depth(geometry: Geometry, layout: Layout) -> tuple[Geometry, Layout]:
    """Make the batch of a problem of one or two axes its D axis, so that a box may hold several small images."""
    g = geometry
    flat = (g.kernel[0], g.stride[0], g.dilation[0], g.pad_before[0], g.x_extent[0], g.out_extent[0])
    if flat != (1, 1, 1, 0, 1, 1):
        return geometry, layout
    geometry = replace(g, n=1, x_extent=(g.n, *g.x_extent[1:]), out_extent=(g.n, *g.out_extent[1:]), batched=True)
    x, out = layout.x, layout.out
    layout = replace(layout, x=(0, x[1], x[0], *x[3:]), out=(0, out[1], out[0], *out[3:]))
    return geometry, layout


def batch_as_axis(geometry: Geometry, layout: Layout) -> tuple[Geometry, Layout]:
    """Give the axes that a 1-D or 2-D problem leaves idle a use: 2-D slides along H, and 1-D along the batch."""
    if geometry.rank == 3:
        return geometry, layout

    def turn(values: Ints, batch: int) -> tuple[int, int, int]:
        _, h, w = values
        return (batch, h, w) if geometry.rank == 1 else (h, batch, w)

    g = replace(
        geometry,
        n=1,
        x_extent=turn(geometry.x_extent, geometry.n),
        kernel=turn(geometry.kernel, 1),
        stride=turn(geometry.stride, 1),
        dilation=turn(geometry.dilation, 1),
        pad_before=turn(geometry.pad_before, 0),
        pad_after=turn(geometry.pad_after, 0),
        output_padding=turn(geometry.output_padding, 0),
        out_extent=turn(geometry.out_extent, geometry.n),
    )
    return g, replace(
        layout,
        x=(0, layout.x[1], *turn(layout.x[2:], layout.x[0])),
        weight=(*layout.weight[:2], *turn(layout.weight[2:], 0)),
        out=(0, layout.out[1], *turn(layout.out[2:], layout.out[0])),
    )


def taps_follow_each_other(geometry: Geometry) -> bool:
    """Whether taps along W meet elements of the result that follow each other, of as many whole steps as a row has.

    Then they can be channels, if these are contiguous in memory.
    """
    g, taps = geometry, geometry.kernel[2]
    if taps == 1 or taps != g.stride[2] or g.dilation[2] > 1 or g.groups > 1:
        return False
    return not g.pad_before[2] % taps and not g.out_extent[2] % taps


def with_taps_as_channels(geometry: Geometry) -> Geometry:
    """Return the problem with such taps as channels of its result."""
    g, taps = geometry, geometry.kernel[2]
    return replace(
        g,
        c_out=taps * g.c_out,
        kernel=(*g.kernel[:2], 1),
        stride=(*g.stride[:2], 1),
        pad_before=(*g.pad_before[:2], g.pad_before[2] // taps),
        out_extent=(*g.out_extent[:2], g.out_extent[2] // taps),
    )


def with_residues_as_phases(geometry: Geometry, residues: Ints) -> Geometry:
    """Return the problem with the dilation for its stride along those axes, which have none."""
    g = geometry
    strides = zip(residues, g.dilation, g.stride, strict=True)
    return replace(g, stride=triple(dilation if each else stride for each, dilation, stride in strides))


def with_phases_as_channels(geometry: Geometry) -> Geometry:
    """Return the problem without a stride whose result has all phases of all channels as channels.

    All phases have equally many taps: `cuconvt.phases.are_alike`.
    """
    g = geometry
    return replace(
        g,
        c_out=g.c_out * prod(g.stride),
        kernel=triple(k // s for k, s in zip(g.kernel, g.stride, strict=True)),
        stride=(1, 1, 1),
        pad_before=triple(p // s for p, s in zip(g.pad_before, g.stride, strict=True)),
        out_extent=triple(positions(g, axis) for axis in range(3)),
    )
