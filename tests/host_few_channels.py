"""Cases of few_channels for the host, each of one program, and the edges of its tiles."""

from __future__ import annotations

import random
from typing import Any

from described import DEVICES
from strategies import DTYPES, Ints, Specialisation

LARGEST_KERNEL = {1: 9, 2: 5, 3: 3}
# Channels of a group, in and out: depthwise, then few in, few out, few of both.
CHANNELS = ((1, 1), (1, 3), (2, 7), (1, 1), (9, 1), (1, 2), (3, 2), (1, 1), (2, 4), (4, 1), (1, 4), (4, 4), (5, 3))
# Layouts whose positions along W are next to each other, apart, and apart by the number of channels.
NEXT = ("contiguous", "sliced", "cropped", "misaligned")
APART = ("strided", "negative")
LAST = ("channels_last",)
SIDES = ((LAST, NEXT), (APART, APART), (NEXT, NEXT), (LAST, LAST), (NEXT, LAST))


def cases() -> dict[str, dict[str, Any]]:
    """Return the fields of each case by name."""
    found = {}
    for index in range(36):
        choose = random.Random(index)
        dtype, rank = tuple(DTYPES)[index % 4], 1 + index // 4 % 3
        kernel, stride, dilation = (
            tuple(choose.randint(1, top) for _ in range(rank)) for top in (LARGEST_KERNEL[rank], 3, 3)
        )
        sides = SIDES[index // 4 % len(SIDES)]
        # Channels-last, the number of groups and lanes is that of the program.
        groups = choose.choice((1, 3, 6)) if LAST in sides else None
        shift_w = min(choose.randrange(stride[-1]), dilation[-1] * (kernel[-1] - 1))
        spec = Specialisation(
            kernel, stride, dilation, *CHANNELS[index % len(CHANNELS)], *sides, groups, along_w(rank, shift_w)
        )
        fields = {"device": choose.choice(list(DEVICES.values())), "index64": choose.random() < 0.2}
        found[f"{index}-{dtype}-{rank}d"] = {"spec": spec, "dtype": dtype, **fields}
    several_tiles = Specialisation((3,), (2,), (1,), 2, 19, LAST, LAST, 1, (0,))  # of lanes, the last one ragged
    found["channels-19"] = {"spec": several_tiles, "dtype": "float32"}
    found["two-lanes"] = {
        "spec": Specialisation((2, 4), (1, 2), (1, 1), 1, 1, LAST, LAST, 2, (None, 1)),
        "dtype": "float16",
    }
    # The batch next to each other, or, of one sample, the channels.
    reversed_axes = Specialisation(
        (2, 3), (2, 2), (1, 1), 1, 1, ("transposed", "broadcast"), ("transposed",), 3, (None, 1)
    )
    found["reversed-axes"] = {"spec": reversed_axes, "dtype": "float32"}
    return found


def along_w(rank: int, shift: int) -> tuple[int | None, ...]:
    return (*(None,) * (rank - 1), shift)


def box(defines: dict[str, int]) -> Ints:
    """Return what a block owns along D, H, W (in positions), C_out, and C_in (at a time)."""
    depth = (defines["KERNEL_D"] - 1) * defines["DILATION_D"] // defines["STRIDE_D"] + 1
    cut = 4 * depth  # of more positions along D, several blocks take a run each, unequal ones here
    width = 128 // defines["LANES_C"] * defines["POSITIONS_W"]
    return (cut, cut, width, defines["CHANNELS_OUT"] * defines["LANES_C"] * defines["VECTOR"], 1)
