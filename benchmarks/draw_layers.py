"""Draw layers at random that no estimate has seen, a line each, for ``python -m cuconvt bench --cases``.

Run from anywhere, no GPU needed: ``python benchmarks/draw_layers.py SEED COUNT``. The layers of random_layers.txt are
the first 38 of seed 11 and the first 19 of seed 12 (then with a q).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from random import Random

ELEMENTS = 2e6, 1.2e8  # of x and the result, at least and at most
MOST_FLOPS = 4e11
Choice = tuple[int, ...]


@dataclass(frozen=True)
class Kind:
    """What a layer of a kind is drawn from; extents and, with `free`, kernels are drawn for each axis."""

    name: str
    rank: int
    c_in: Choice
    c_out: Choice
    extents: Choice
    kernels: Choice
    strides: Choice
    groups: Choice = (1,)
    dilation: int = 1
    free: Choice = ()  # kernels of layers, three of ten, whose axes differ
    is_depthwise: bool = False


ROWS = (100, 250, 256, 1000, 2048, 4000, 10000, 32768)
KINDS = (
    Kind(
        name="vol_s1",
        rank=3,
        c_in=(16, 24, 32, 40, 48, 64, 80),
        c_out=(16, 24, 32, 48, 64, 96),
        extents=(20, 24, 32, 40, 48, 56, 64),
        kernels=(3,),
        strides=(1,),
        free=(3, 3, 3, 5, 7),
    ),
    Kind(
        name="vol_s2",
        rank=3,
        c_in=(16, 32, 48, 64, 96, 128, 256),
        c_out=(8, 16, 32, 48, 64, 128),
        extents=(12, 16, 20, 24, 32, 40, 48),
        kernels=(2, 3, 3, 4),
        strides=(2,),
    ),
    Kind(
        name="vol_g",
        rank=3,
        c_in=(32, 48, 64, 96),
        c_out=(32, 48, 64, 96),
        extents=(12, 16, 24, 32, 48, 64),
        kernels=(3, 3, 4, 5),
        strides=(1, 2, 2),
        groups=(2, 4, 8, 16),
    ),
    Kind(
        name="dil",
        rank=3,
        c_in=(16, 32, 48, 64),
        c_out=(16, 32, 64),
        extents=(12, 16, 24, 32),
        kernels=(3,),
        strides=(1, 2, 2, 3),
        dilation=2,
    ),
    Kind(
        name="img",
        rank=2,
        c_in=(24, 32, 64, 96, 128, 256, 512),
        c_out=(3, 16, 32, 64, 96, 128, 256),
        extents=(14, 16, 28, 32, 56, 64, 100, 128),
        kernels=(2, 3, 4, 4, 5, 6),
        strides=(1, 2, 2, 2, 3, 4),
    ),
    Kind(
        name="row",
        rank=1,
        c_in=(32, 64, 128, 256, 512),
        c_out=(1, 16, 32, 64, 128, 256),
        extents=ROWS,
        kernels=(2, 4, 7, 8, 16, 20),
        strides=(1, 2, 4, 5, 8, 10),
    ),
    Kind(
        name="dw",
        rank=3,
        c_in=(32, 64, 96, 128),
        c_out=(),
        extents=(12, 16, 24, 32),
        kernels=(3, 4, 2),
        strides=(2,),
        is_depthwise=True,
    ),
)


def draw(kind: Kind, rng: Random) -> str | None:
    """Return a layer of the kind as a case of the benchmark, or None where it is too small or too large."""

    def one_of(choices: Choice) -> int:
        return rng.choice(choices) if len(choices) > 1 else choices[0]

    c_in, c_out = (0, 0) if kind.is_depthwise else (one_of(kind.c_in), one_of(kind.c_out))
    extent = [one_of(kind.extents) for _ in range(kind.rank)]
    if kind.free and rng.random() < 0.3:
        kernel = [one_of(kind.free) for _ in range(kind.rank)]
    else:
        kernel = [one_of(kind.kernels)] * kind.rank
    stride = one_of(kind.strides)
    if kind.is_depthwise:
        c_in = c_out = groups = one_of(kind.c_in)
    else:
        groups = one_of(tuple(n for n in kind.groups if c_in % n == c_out % n == 0))
    same = (kernel[0] - stride) // 2 if kernel[0] >= stride else 0
    padding = one_of((0, same, int(min(kernel) > 1)))
    extra = int(stride == 2 and kernel[0] == 3 and padding == 1 and rng.random() < 0.6)
    n = one_of((1, 2, 4, 8, 16, 32))
    axes = zip(extent, kernel, strict=True)
    results = [(x - 1) * stride - 2 * padding + kind.dilation * (k - 1) + extra + 1 for x, k in axes]
    elements = n * (c_in * prod(extent) + c_out * prod(results))
    flops = 2 * n * c_in * c_out // groups * prod(extent) * prod(kernel)
    if min(results) < 1 or not ELEMENTS[0] < elements < ELEMENTS[1] or flops > MOST_FLOPS:
        return None
    options = (("op", extra, 0), ("g", groups, 1), ("d", kind.dilation, 1))
    more = "".join(f":{name}{value}" for name, value, usual in options if value != usual)
    bias = ":bias" if rng.random() < 0.3 else ""
    return f"{_joined((n, c_in, *extent))}:{c_out}:k{_joined(kernel)}:s{stride}:p{padding}{more}{bias}"


def layers(seed: int) -> Iterator[str]:
    """Yield layers for ever, the kinds in turn, each with a name."""
    rng, count = Random(seed), 0
    while True:
        for kind in KINDS:
            if (layer := draw(kind, rng)) is not None:
                yield f"r{count}_{kind.name}={layer}"
                count += 1


def _joined(values: Sequence[int]) -> str:
    return "x".join(map(str, values))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seed", type=int)
    parser.add_argument("count", type=int)
    options = parser.parse_args(arguments)
    for _, layer in zip(range(options.count), layers(options.seed), strict=False):
        print(layer)


if __name__ == "__main__":
    main()
