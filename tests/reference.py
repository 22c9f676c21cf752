"""What a result must be: float64 references, and the one comparison with its one table of tolerances."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
from strategies import Problem, full_extent

try:
    import torch
except ImportError:
    torch = None
else:
    torch.set_num_threads(1)  # problems are small; threads of several test processes would wait for each other's cores


@dataclass(frozen=True)
class Tolerance:
    """How far a result may be from the exact value.

    An element may be off by half a unit in its last place, the one rounding to its dtype, plus `products` times the sum
    of the magnitudes of everything added up in it (componentwise, so a large neighbour hides nothing).
    """

    digits: int  # of the dtype's significand
    least_exponent: int  # of numpy.frexp for the smallest normal number
    products: float


# A sum of K terms in any order loses at most K*u of the summed magnitudes (u: unit roundoff of the accumulator, 2**-24
# for float32). With terms of random sign the loss stays below 2 u for every K tested here; three TF32 products in place
# of one float32 product drop up to 6 u more. Hence 8 u; float64 has 16 u, for the reference errs as much.
# A sum that needs more (a long one of one sign) may have twice the error of a same-precision sum: see `assert_close`.
# "tf32" is float32 with operands rounded to 11 significant bits, each of which loses up to 2**-11 of a product.
_FLOAT32_SUM = 8 * 2.0**-24
TOLERANCES = {
    "float16": Tolerance(11, -13, _FLOAT32_SUM),
    "bfloat16": Tolerance(8, -125, _FLOAT32_SUM),
    "float32": Tolerance(24, -125, _FLOAT32_SUM),
    "tf32": Tolerance(24, -125, 2.0**-10 + _FLOAT32_SUM),
    "float64": Tolerance(53, -1021, 16 * 2.0**-53),
}


def direct(
    problem: Problem, x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None, accumulator: type = np.float64
) -> np.ndarray:
    """The definition: every input scattered through every tap, summed in one type from first to last."""
    rank, groups = problem.rank, problem.groups
    n = 1 if problem.n is None else problem.n
    x = x.reshape(n, groups, problem.c_in_per_group, *problem.extent).astype(accumulator)
    weight = weight.reshape(groups, problem.c_in_per_group, problem.c_out_per_group, *problem.kernel).astype(
        accumulator
    )
    full = full_extent(problem.extent, problem.kernel, problem.stride, problem.dilation)
    # Room for every tap, and for the output positions that output_padding adds past the last tap.
    room = tuple(f + extra for f, extra in zip(full, problem.output_padding, strict=True))
    scattered = np.zeros((n, groups, problem.c_out_per_group, *room), accumulator)
    for tap in itertools.product(*map(range, problem.kernel)):
        reached = tuple(
            slice(k * d, k * d + (i - 1) * s + 1, s)
            for k, d, i, s in zip(tap, problem.dilation, problem.extent, problem.stride, strict=True)
        )
        for c in range(problem.c_in_per_group):
            # One input channel at a time: a plain sequential sum, the same-precision reference.
            taps = weight[(slice(None), c, slice(None), *tap)].reshape(1, groups, -1, *(1,) * rank)
            scattered[(..., *reached)] += x[:, :, c, None] * taps
    kept = tuple(slice(before, r - after) for (before, after), r in zip(problem.padding, room, strict=True))
    y = scattered[(..., *kept)].reshape(problem.out_shape)
    return y if bias is None else y + bias.astype(accumulator).reshape(-1, *(1,) * rank)


def via_torch(problem: Problem, x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None) -> np.ndarray:
    """torch's transposed convolution in float64: without padding, then cropped, since torch pads symmetrically only."""
    function = getattr(torch.nn.functional, f"conv_transpose{problem.rank}d")
    x64, weight64 = (torch.from_numpy(a.astype(np.float64)) for a in (x, weight))
    y = function(x64, weight64, stride=problem.stride, groups=problem.groups, dilation=problem.dilation).numpy()
    y = np.pad(y, [(0, 0)] * (y.ndim - problem.rank) + [(0, extra) for extra in problem.output_padding])
    extents = y.shape[-problem.rank :]
    kept = tuple(slice(before, o - after) for (before, after), o in zip(problem.padding, extents, strict=True))
    y = y[(..., *kept)]
    return y if bias is None else y + bias.astype(np.float64).reshape(-1, *(1,) * problem.rank)


def exact(problem: Problem, x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None) -> np.ndarray:
    """The float64 reference: torch's where torch is installed and the batch is not empty, else the definition."""
    if torch is None or 0 in x.shape:
        return direct(problem, x, weight, bias)
    return via_torch(problem, x, weight, bias)


class Expected:
    """The exact values of a problem and how far from them a result may be; made once, compared with several results."""

    def __init__(self, problem: Problem, x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None):
        self.problem, self.arguments = problem, (x, weight, bias)
        self.dtype = x.dtype
        self.exact = exact(problem, x, weight, bias)
        # The magnitude of what an element sums up, without and with the bias.
        self.products = exact(problem, np.abs(x), np.abs(weight), None)
        self.magnitude = self.products if bias is None else self.products + _per_channel(np.abs(bias), problem.rank)

    def assert_close(self, got: np.ndarray, precision: str | None = None) -> None:
        """Compare elementwise; NaN and infinity fail, and an output that no product reaches must be its bias."""
        assert got.dtype == self.dtype
        assert got.shape == self.exact.shape
        values = got.astype(np.float64)
        tolerance = TOLERANCES["tf32" if precision == "tf32" else self.dtype.name]
        _, exponent = np.frexp(np.maximum(np.abs(values), np.abs(self.exact)))
        last_place = np.ldexp(1.0, np.maximum(exponent, tolerance.least_exponent) - tolerance.digits)
        error = np.abs(values - self.exact)
        allowed = 0.5 * last_place + tolerance.products * self.magnitude
        wrong = ~(error <= allowed)  # so that NaN is wrong
        if wrong.any() and np.isfinite(values).all():
            wrong &= ~(error <= 0.5 * last_place + 2 * self._same_precision_error() * self.magnitude)
        if wrong.any():
            worst = np.unravel_index(
                np.argmax(np.where(wrong, np.nan_to_num(error / allowed, nan=np.inf), 0)), got.shape
            )
            raise AssertionError(
                f"{np.count_nonzero(wrong)} of {got.size} elements are wrong, the worst at {tuple(map(int, worst))}: "
                f"got {values[worst]!r}, exact {self.exact[worst]!r}, allowed error {allowed[worst]:.3g}, "
                f"precision={precision!r}, {self.dtype.name}, {self.problem}"
            )
        bias = self.arguments[2]
        alone = np.broadcast_to(0.0 if bias is None else _per_channel(bias, self.problem.rank), got.shape)
        dead = self.products == 0
        assert np.array_equal(values[dead], alone[dead]), (
            f"an output that no tap reaches is not the bias, {self.problem}"
        )

    def _same_precision_error(self) -> float:
        """The largest error of a plain sequential sum in the accumulator's type, as a share of the magnitude."""
        accumulator = np.float64 if self.dtype == np.float64 else np.float32
        error = np.abs(direct(self.problem, *self.arguments, accumulator) - self.exact)
        return float(np.max(error / np.where(self.magnitude == 0, 1, self.magnitude), initial=0))


def _per_channel(bias: np.ndarray, rank: int) -> np.ndarray:
    return bias.astype(np.float64).reshape(-1, *(1,) * rank)
