"""The steps that all public functions share: from the caller's arrays to views, a result to write, and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cuconvt.arrays import bridge_of
from cuconvt.checks import check_dtypes, check_out, check_precision
from cuconvt.geometry import Ints


class Call:
    """The arrays of one call, of one library and on one device.

    Parameters
    ----------
    arrays : dict of str to array
        The inputs by the names of their arguments. The first gives the result its library, device, dtype and layout.
    out : array or None
        Where the result goes.
    """

    def __init__(self, arrays: dict[str, Any], out: Any):
        self._arrays, self._out = arrays, out
        self._bridge, self._device = bridge_of({**arrays, "out": out})

    @property
    def shapes(self) -> list[Any]:
        """The shapes of the inputs, in their order; None for one that is not given."""
        return [None if array is None else tuple(array.shape) for array in self._arrays.values()]

    def run(
        self,
        shape: Ints,
        precision: Any,
        compute: Callable[[list[Any], str | None], None],
        spatial: int | None = None,
    ) -> Any:
        """Check what only views show, allocate the result where no `out` is given, compute it and hand it over.

        Parameters
        ----------
        shape : tuple of int
            Shape of the result.
        precision : str or None
            As the caller gave it.
        compute : callable
            Called with the views (numpy or cupy arrays) of the inputs and of the result, and the precision to compute
            with. It writes the result.
        spatial : int, optional
            The number of spatial axes of a result whose layout is the first input's; None for one in C order.
        """
        bridge, arrays, out = self._bridge, self._arrays, self._out
        first = next(iter(arrays.values()))
        with bridge.scope(first):
            views = {role: None if array is None else bridge.view(array) for role, array in arrays.items()}
            out_view = None if out is None else bridge.view(out)
            check_dtypes({**views, "out": out_view})
            like: Any = next(iter(views.values()))
            precision = check_precision(precision, like.dtype)
            if out is None:
                order = tuple(range(len(shape))) if spatial is None else _memory_order(like, spatial)
                out = bridge.empty(shape, order, first)
                out_view = bridge.view(out)
            else:
                check_out(out_view, shape, views)
            everything = [*views.values(), out_view]
            compute(everything, precision)
            if self._device[0] == "cuda":
                bridge.hold(everything)
            return bridge.finish(out)  # within the scope: a result that is handed over takes the stream along


def _memory_order(array: Any, spatial: int) -> tuple[int, ...]:
    """Return the result's axes from slowest to fastest: channels-last where `array` is, unless C-contiguous too."""
    axes = range(array.ndim)
    channels_last = (*axes[: -spatial - 1], *axes[-spatial:], array.ndim - spatial - 1)
    if not array.flags.c_contiguous and array.transpose(channels_last).flags.c_contiguous:
        return channels_last
    return tuple(axes)
