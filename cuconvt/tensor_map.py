"""What bulk copies of boxes need to know of an array, but for its address; the driver makes a parameter of both."""

from __future__ import annotations

from dataclasses import dataclass

Ints = tuple[int, ...]

CHANNELS = 64  # of a box of 16-bit elements, in rows of 128 bytes
ITEMSIZE = 2
ITEMSIZES = {"float16": 2, "bfloat16": 2, "float32": 4, "tf32": 4}  # tf32: float32, which copies round
MAX_BOX = 256  # elements along an axis, those between included
MAX_STEP = 8
MAX_STRIDE = 2**40  # bytes
STRIDE_BYTES = 16  # what strides are multiples of


@dataclass(frozen=True)
class TensorMap:
    """A channels-last array and the boxes that are copied: channels of some positions.

    Attributes
    ----------
    dtype : str
        Of `ITEMSIZES`.
    extents : tuple of 5 int
        Channels, W, H, D, N.
    strides : tuple of 4 int
        In bytes, without that of the channels.
    box : tuple of 3 int
        Elements along W, H, D that are copied.
    steps : tuple of 3 int
        How far these are apart.
    channels : int
        Of a box, which are a row.
    plain : bool
        Whether rows are stored as they are, of any 16 bytes; others are of 32, 64 or 128 bytes, and swizzled.
    """

    dtype: str
    extents: Ints
    strides: Ints
    box: Ints
    steps: Ints
    channels: int = CHANNELS
    plain: bool = False

    @classmethod
    def of(
        cls,
        dtype: str,
        extents: Ints,
        strides: Ints,
        box: Ints,
        steps: Ints,
        copied: int = CHANNELS,
        plain: bool = False,
    ) -> TensorMap:
        """Make a map of an array with extents and strides, in elements, of N, channels, D, H, W."""
        n, channels, *spatial = extents
        of_n, _, *of_axes = strides
        itemsize = ITEMSIZES[dtype]
        found, least = [], -(-itemsize * channels // STRIDE_BYTES) * STRIDE_BYTES
        for extent, stride in zip((*reversed(spatial), n), (*reversed(of_axes), of_n), strict=True):
            # Nothing is read at a stride of one element; it gets the one that follows from those before.
            found.append(itemsize * stride if extent > 1 else least)
            least = found[-1] * extent
        all_extents = (channels, *reversed(spatial), n)
        return cls(dtype, all_extents, tuple(found), tuple(reversed(box)), tuple(reversed(steps)), copied, plain)

    @property
    def row_bytes(self) -> int:
        return self.channels * ITEMSIZES[self.dtype]

    @property
    def swizzled_bytes(self) -> int:
        """Bytes of a row that is swizzled, or 0."""
        return 0 if self.plain else self.row_bytes

    @property
    def spans(self) -> Ints:
        """Elements along W, H, D from the first one of a box to the last one."""
        return spans(self.box, self.steps)


def spans(box: Ints, steps: Ints) -> Ints:
    """Return the elements along each axis from the first one of a box to the last one, with those in between."""
    return tuple((count - 1) * step + 1 for count, step in zip(box, steps, strict=True))


def reads_rows(strides: Ints, extents: Ints, aligned: bool, itemsize: int) -> bool:
    """Whether plain copies read rows of an array: strides and extents, in elements, of its axes, the rows' own last.

    Strides need not ascend as the driver's manual has them; it takes them nevertheless.
    """
    *of_axes, of_row = strides
    others = [itemsize * s for s, e in zip(of_axes, extents[:-1], strict=True) if e > 1]
    return aligned and of_row == 1 and all(0 < s < MAX_STRIDE and s % STRIDE_BYTES == 0 for s in others)


def reads(strides: Ints, extents: Ints, aligned: bool, itemsize: int = ITEMSIZE) -> bool:
    """Whether such copies read an array as it is: strides and extents, in elements, of N, channels, D, H, W."""
    n, _, d, h, w = strides
    others = [
        itemsize * stride
        for stride, extent in zip((w, h, d, n), (extents[4], extents[3], extents[2], extents[0]), strict=True)
        if extent > 1
    ]
    # Each is a multiple of the one before, as the driver's manual has them.
    steps = zip(others, (STRIDE_BYTES, *others), strict=False)
    return (
        aligned
        and strides[1] == 1
        and all(0 < stride < MAX_STRIDE for stride in others)
        and not any(stride % least for stride, least in steps)
    )
