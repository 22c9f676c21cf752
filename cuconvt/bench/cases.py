"""What is measured: cases, precisions and layouts, with exact counts of arithmetic and bytes. Pure, no GPU."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from cuconvt.geometry import Geometry, make_geometry, normalise

Ints = tuple[int, ...]
LAYOUTS = ("NCDHW", "NDHWC")  # of x and the result; for one or two spatial axes their analogues
KERNELBENCH_3D = ("kb58", "kb61", "kb70", "kb72", "kb73", "kb77")
# What is computed from what: x, the weight, and y, which is the forward's result and the gradients' grad_output.
OPERANDS = {"forward": ("x", "weight"), "grad_input": ("y", "weight"), "grad_weight": ("x", "y")}
RESULT = {"forward": "y", "grad_input": "x", "grad_weight": "weight"}
GRADIENTS = ("grad_input", "grad_weight")
SMALL_BYTES = 2**20  # below it the host's time for a call counts for more than the GPU's


@dataclass(frozen=True)
class Case:
    """One problem: everything about a call but its numbers, precision and layout.

    Attributes
    ----------
    name : str
    x : tuple of int
        ``(N, C_in, *spatial)``.
    c_out : int
    kernel, stride, padding, output_padding, dilation : tuple of int
        One value a spatial axis.
    groups : int
    bias : bool
    """

    name: str
    x: Ints
    c_out: int
    kernel: Ints
    stride: Ints
    padding: Ints
    output_padding: Ints
    groups: int = 1
    dilation: Ints = ()
    bias: bool = False

    @property
    def rank(self) -> int:
        return len(self.x) - 2

    @property
    def weight(self) -> Ints:
        """Shape of the weight."""
        return (self.x[1], self.c_out // self.groups, *self.kernel)

    @property
    def parameters(self) -> dict[str, int | Ints]:
        """The arguments of a call apart from the arrays, as both cuconvt and PyTorch name them."""
        return {
            "stride": self.stride,
            "padding": self.padding,
            "output_padding": self.output_padding,
            "groups": self.groups,
            "dilation": self.dilation,
        }

    @property
    def geometry(self) -> Geometry:
        """The validated problem; raises ValueError if the case is impossible."""
        parameters = normalise(
            self.rank, self.stride, self.padding, self.output_padding, self.groups, self.dilation, None
        )
        return make_geometry(self.rank, self.x, self.weight, (self.c_out,) if self.bias else None, *parameters)

    @property
    def out(self) -> Ints:
        """Shape of the result."""
        return self.geometry.out_shape

    @property
    def shapes(self) -> dict[str, Ints]:
        """The shapes of x, weight and y; each operation computes one from the other two."""
        return {"x": self.x, "weight": self.weight, "y": self.out}

    def terms(self, operation: str) -> int:
        """The most products that add up to one number of an operation's result."""
        if operation == "grad_weight":
            return self.x[0] * prod(self.x[2:])
        channels = self.x[1] if operation == "forward" else self.c_out
        return channels // self.groups * prod(self.kernel)

    @property
    def flops(self) -> int:
        """Twice the multiply-adds that land inside the output; the same in every operation."""
        axes = zip(self.x[2:], self.out[2:], self.kernel, self.stride, self.padding, self.dilation, strict=True)
        return 2 * prod(landing(*axis) for axis in axes) * self.x[0] * self.x[1] * (self.c_out // self.groups)

    def bytes(self, itemsize: int, operation: str = "forward") -> int:
        """Bytes of x, weight and y, each moved once, and of the bias, which the forward alone reads."""
        bias = self.c_out * self.bias if operation == "forward" else 0
        return itemsize * (sum(map(prod, self.shapes.values())) + bias)

    @property
    def is_small(self) -> bool:
        return self.bytes(4) < SMALL_BYTES


def landing(i: int, o: int, kernel: int, stride: int, padding: int, dilation: int) -> int:
    """Count the pairs of an input and a tap that land inside an axis of `o` outputs."""
    count = 0
    for tap in range(kernel):
        shift = tap * dilation - padding
        first = max(0, -(shift // stride))  # the smallest input with input*stride + shift >= 0
        last = min(i - 1, (o - 1 - shift) // stride)
        count += max(0, last - first + 1)
    return count


@dataclass(frozen=True)
class Precision:
    """A way of computing, and what it is compared with and measured against.

    Attributes
    ----------
    name : str
    dtype : str
    itemsize : int
    mode : str or None
        cuconvt's ``precision=``.
    torch_tf32 : bool
        Whether PyTorch may use TF32.
    ceiling : str
        The matrix product whose rate bounds it.
    products : int
        Matrix products of that kind for one of this precision.
    tolerance : float
        Largest error of a forward's element that is allowed beyond its rounding to the dtype, relative to the sum of
        the magnitudes of its terms: for TF32 twice the worst case of rounding operands once, and for the others well
        above what any order of adding gives.
    root_tolerance : float
        The same of a gradient, relative to the root of the sum of the squares of its terms, apart from what grows with
        their number: for TF32 seven standard deviations of the operands' roundings.
    """

    name: str
    dtype: str
    itemsize: int
    mode: str | None
    torch_tf32: bool
    ceiling: str
    products: int
    tolerance: float
    root_tolerance: float

    @property
    def rounding(self) -> float:
        """The largest error of rounding to the dtype, relative to the number that is rounded."""
        return {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24, "float64": 2.0**-53}[self.dtype]

    @property
    def smallest(self) -> float:
        """The smallest positive number of the dtype; only float16's matters."""
        return 2.0**-24 if self.dtype == "float16" else 0.0

    def allowed(self, case: Case, operation: str) -> float:
        """Return the largest error allowed beyond `rounding`, relative to the magnitudes that the reference gives.

        The forward's is `tolerance`. A gradient may add up a million terms, beside the sum of whose magnitudes even
        a result of zeros would pass: its error is relative to the root of the sum of their squares, like which random
        terms and their roundings add up. What is added to `root_tolerance` is five standard deviations of the error of
        adding all terms one after the other.
        """
        if operation == "forward":
            return self.tolerance
        unit = 2.0**-53 if self.dtype == "float64" else 2.0**-24
        return self.root_tolerance + 2 * unit * case.terms(operation) ** 0.5


PRECISIONS = {
    p.name: p
    for p in (
        Precision("ieee", "float32", 4, "ieee", False, "float32", 1, 3e-6, 1.2e-5),
        Precision("tf32x3", "float32", 4, "tf32x3", False, "tf32", 3, 3e-6, 1.2e-5),
        Precision("tf32", "float32", 4, "tf32", True, "tf32", 1, 2.0**-9, 2.05e-3),
        Precision("float16", "float16", 2, None, False, "float16", 1, 2.0**-13, 2.0**-13),
        Precision("bfloat16", "bfloat16", 2, None, False, "bfloat16", 1, 2.0**-13, 2.0**-13),
        Precision("float64", "float64", 8, None, False, "float64", 1, 1e-14, 4e-14),
    )
}
DEFAULT_PRECISIONS = ("tf32x3", "tf32", "float16", "bfloat16")

_SPATIAL = {"k": "kernel", "s": "stride", "p": "padding", "op": "output_padding", "d": "dilation"}
_OPTION = re.compile(r"(k|s|p|op|d|g)(\d+(?:x\d+)*)")
SYNTAX = "[NAME=]X:C_OUT:kK[:sS][:pP][:opP][:gG][:dD][:bias], say 8x48x64x64x64:48:k3 or 1x8x9x9:4:k3x5:s2:p1x2:bias"
MEANING = (
    "Parameters of a case: X is the shape of x (N, C_in and one to three extents, joined by x) and C_OUT the output "
    "channels. After them, in any order, k is the kernel size, s the stride, p the padding, op the output padding, g "
    "the groups, d the dilation, and bias adds one; k alone is required, and the others default as in a call. k, s, p, "
    "op and d take one value or one an axis, joined by x. NAME= chooses the name in the results."
)


def parse_case(text: str) -> Case:
    """Read a case: the name of a built-in one, or its parameters in the compact syntax.

    ``8x48x64x64x64:48:k3:s1:p0:op0:g1:d1:bias`` has x, C_out, kernel, stride, padding, output_padding, groups and
    dilation; the options after C_out may come in any order, and only the kernel is required. Values that differ
    from axis to axis are joined by x: ``k3x5x7``. A name may precede: ``mine=8x48x64x64x64:48:k3``.

    Raises
    ------
    ValueError
        If the text is neither, or describes an impossible problem.
    """
    if text in CASES:
        return CASES[text]
    name, _, body = text.rpartition("=")
    fields = body.split(":")
    if len(fields) < 2 or not re.fullmatch(r"\d+(x\d+){2,4}", fields[0]) or not fields[1].isdecimal():
        raise ValueError(f"a case must be one of {', '.join(CASES)}, or {SYNTAX}; got {text!r}")
    x, c_out = _ints(fields[0]), int(fields[1])
    rank = len(x) - 2
    values: dict[str, Ints] = {}
    bias = False
    for option in fields[2:]:
        match = _OPTION.fullmatch(option)
        if match is None and option != "bias":
            raise ValueError(f"case {text!r} has an option that is none of k, s, p, op, g, d, bias: {option!r}")
        key = match[1] if match else "bias"
        if key in values or (key == "bias" and bias):
            raise ValueError(f"case {text!r} gives {key} twice")
        if match is None:
            bias = True
        else:
            values[key] = _ints(match[2])
    if "k" not in values:
        raise ValueError(f"case {text!r} lacks the kernel: add :k3 or, one an axis, :k3x5x7")
    groups = values.pop("g", (1,))
    if len(groups) != 1 or groups[0] < 1 or c_out % groups[0]:
        raise ValueError(
            f"case {text!r} must have groups that divide C_out = {c_out}, got {'x'.join(map(str, groups))}"
        )
    for key, value in values.items():
        if len(value) not in (1, rank):
            raise ValueError(f"case {text!r} must have one value or {rank}, one an axis, for {key}, got {len(value)}")
    return _case(
        name or body,
        x,
        c_out,
        **{_SPATIAL[key]: value if len(value) == rank else value[0] for key, value in values.items()},
        groups=groups[0],
        bias=bias,
    )


def _case(
    name: str,
    x: Ints,
    c_out: int,
    kernel: int | Ints,
    stride: int | Ints = 1,
    padding: int | Ints = 0,
    output_padding: int | Ints = 0,
    groups: int = 1,
    dilation: int | Ints = 1,
    bias: bool = False,
) -> Case:
    def an_axis(value: int | Ints) -> Ints:
        return (value,) * (len(x) - 2) if isinstance(value, int) else value

    case = Case(
        name,
        x,
        c_out,
        an_axis(kernel),
        an_axis(stride),
        an_axis(padding),
        an_axis(output_padding),
        groups,
        an_axis(dilation),
        bias,
    )
    if min(x) < 1:
        raise ValueError(f"case {name!r} must have x with extents of at least 1, got {x}")
    try:
        _ = case.geometry
    except ValueError as error:
        raise ValueError(f"case {name!r} is impossible: {error}") from None
    return case


def _ints(text: str) -> Ints:
    return tuple(map(int, text.split("x")))


def unique(cases: Sequence[Case]) -> list[Case]:
    """Drop repeated cases, and raise ValueError if two different ones share a name."""
    by_name: dict[str, Case] = {}
    for case in cases:
        if by_name.setdefault(case.name, case) != case:
            raise ValueError(f"two cases have the name {case.name!r}")
    return list(by_name.values())


# kb*: the transposed 3-D convolutions of KernelBench, level 1, by their numbers there.
CASES: dict[str, Case] = {
    case.name: case
    for case in (
        _case("kb58", (16, 32, 16, 32, 64), 16, (3, 5, 7)),
        _case("kb61", (8, 48, 64, 64, 64), 48, 3),
        _case("kb70", (8, 48, 96, 96, 96), 24, 3),
        _case("kb72", (8, 32, 12, 24, 48), 32, (3, 5, 7), 2, (1, 2, 3), 1, groups=4),
        _case("kb73", (4, 32, 32, 64, 128), 32, 3, 2, 1, groups=4),
        _case("kb77", (16, 32, 16, 32, 32), 64, 3, 2, 1, dilation=2),
        _case("nnunet_k2s2_last", (2, 64, 64, 64, 64), 32, 2, 2, bias=True),
        _case("monai_k3s2", (2, 64, 48, 48, 48), 32, 3, 2, 1, 1, bias=True),
        _case("gan3d_k4s2_256", (32, 256, 8, 8, 8), 128, 4, 2, 1),
        _case("wide_256_s1", (4, 256, 32, 32, 32), 256, 3, 1, 1),
        _case("depthwise_k4s2", (4, 64, 32, 64, 64), 64, 4, 2, 1, groups=64),
        _case("tiny", (1, 16, 8, 8, 8), 16, 3, 2, 1, 1, bias=True),
        _case("dcgan2d_k4s2", (128, 256, 16, 16), 128, 4, 2, 1),
        _case("hifigan1d_k16s8", (16, 512, 256), 256, 16, 8, 4, bias=True),
    )
}
