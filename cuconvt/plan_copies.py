"""Which aligned pieces of an array its strides let a kernel copy or store at a time."""

from __future__ import annotations

from cuconvt.geometry import Geometry
from cuconvt.plan import Ints, Layout


def x_is_vector(geometry: Geometry, layout: Layout, itemsize: int) -> bool:
    """Whether x may be copied four positions of a row at a time or, channels-last, some bytes of channels."""
    if layout.x_channels_last:
        return copied_bytes(layout.x, layout.x_aligned, geometry.c_in_per_group, geometry.groups, itemsize) > 0
    whole = geometry.x_extent[2] % 4 == 0  # a view may end before the rows in memory do
    return whole and layout.x_aligned and layout.x[4] == 1 and others_divisible(layout.x, 4, 4)


def copied_bytes(strides: Ints, aligned: bool, channels: int, groups: int, itemsize: int) -> int:
    """Return how many bytes of a channels-last position asynchronous copies may bring at a time: 16, 8, 4 or none.

    Positions begin at multiples of it and, where there are several, so do groups of so many channels.
    """
    if not aligned or strides[1] != 1:
        return 0
    steps = (strides[0], *strides[2:], *((channels,) if groups > 1 else ()))
    return next((count for count in (16, 8, 4) if not any(step * itemsize % count for step in steps)), 0)


def are_loose(channels: int, itemsize: int) -> bool:
    """Whether so many channels are no whole 16-byte pieces, so that channels-last groups of them begin elsewhere."""
    return channels * itemsize % 16 > 0


def copy_macros(copied: int, name: str = "COPY_BYTES") -> dict[str, int]:
    """Return the macro that says how a channels-last array is copied, where it is not 16 bytes at a time."""
    return {name: copied} if copied in (8, 4) else {}


def x_copy_macros(geometry: Geometry, layout: Layout, itemsize: int) -> dict[str, int]:
    """Return the same for x."""
    if not layout.x_channels_last:
        return {}
    return copy_macros(copied_bytes(layout.x, layout.x_aligned, geometry.c_in_per_group, geometry.groups, itemsize))


def are_stored_at_once(geometry: Geometry, layout: Layout, channels: int) -> bool:
    """Whether so many channels of a channels-last result may be stored at once, none of which is beyond the last."""
    whole = geometry.c_out_per_group % channels == 0 and others_divisible(layout.out, 1, channels)
    return layout.out_aligned and layout.out[1] == 1 and whole


def others_divisible(strides: Ints, fastest: int, unit: int) -> bool:
    """Whether the strides of all axes but one are multiples of so many elements."""
    return all(s % unit == 0 for axis, s in enumerate(strides) if axis != fastest)


def channels_stored(geometry: Geometry, layout: Layout, itemsize: int) -> int:
    """Return how many channels of a channels-last result may be written at a time."""
    counts = ((8, 4) if itemsize == 2 else (4,)) if layout.out_channels_last else ()
    return next((count for count in counts if are_stored_at_once(geometry, layout, count)), 1)


def whole_pieces(strides: Ints, extents: Ints, aligned: bool, elements: int) -> bool:
    """Return whether all rows of an array (strides and extents of N, channels, D, H, W) are whole aligned pieces."""
    others = (stride for stride, extent in zip(strides[:4], extents[:4], strict=True) if extent > 1)
    return aligned and strides[4] == 1 and extents[4] % elements == 0 and all(s % elements == 0 for s in others)


def constant_stride(strides: Ints, channels_last: bool, channels: int) -> int:
    """Return the stride along W if no extent can change it, else 0."""
    return strides[4] if strides[4] == (channels if channels_last else 1) else 0
