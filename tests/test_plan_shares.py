"""Which blocks walk along which slices of which columns."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuconvt.plan_shares import Shares, share_columns

Part = tuple[int, int, int]  # a column, its first slice, and how many


def part_of(index: int, shares: Shares, extent: int) -> Part:
    """Return what the kernel's function of this name does."""
    whole, sets, left, part, parts, others, rest, rounds, rest_part = shares.parameters
    if index < whole:
        return index, 0, extent
    of_set, set_ = divmod(index - whole, sets)
    round_, block = divmod(of_set, shares.grid // sets)
    other = block - parts
    column = first = walk = 0
    if of_set < parts:
        column, first, walk = of_set % left, of_set // left * part, part
    elif 0 <= other < others and round_ < rounds:
        column, first, walk = round_ * others + other, rest, extent - rest
    elif 0 <= other < others and round_ == rounds and rounds * others < left:
        last = left - rounds * others
        column, first, walk = rounds * others + other % last, rest + other // last * rest_part, rest_part
    return whole + column * sets + set_, first, max(0, min(walk, extent - first))


def assert_each_slice_once(shares: Shares, columns: int, extent: int) -> list[list[Part]]:
    """Assert that each slice of each column is a block's, once, and return the parts of each block."""
    found: list[list[Part]] = [[] for _ in range(shares.grid)]
    for index in range(shares.boxes):
        part = part_of(index, shares, extent)
        if part[2]:
            found[index % shares.grid].append(part)
    met = Counter((column, first + i) for parts in found for column, first, walk in parts for i in range(walk))
    assert met == Counter((column, slice_) for column in range(columns) for slice_ in range(extent))
    return found


@given(
    of_set=st.integers(1, 60),
    extent=st.integers(1, 40),
    reach=st.integers(0, 5),
    sets=st.integers(1, 40),
    stay=st.booleans(),
    held=st.integers(1, 30),
)
def test_every_slice_is_one_block_s(of_set: int, extent: int, reach: int, sets: int, stay: bool, held: int) -> None:
    columns = of_set * sets
    shares = share_columns(columns, extent, reach, sets, stay, held)
    found = assert_each_slice_once(shares, columns, extent)
    assert shares.grid <= max(held, sets if stay else 1)
    if stay:
        assert all(len({column % sets for column, _, _ in parts}) <= 1 for parts in found)
    # Nobody has more than if all columns were dealt whole.
    most = max(sum(walk + (reach if first else 0) for _, first, walk in parts) for parts in found)
    assert most <= extent * -(-columns // shares.grid)


@pytest.mark.parametrize(
    ("columns", "whole", "part", "others", "most"),
    [
        (1, 0, 1, 0, 3),  # as many blocks as slices
        (66, 0, 50, 0, 52),  # two for each column
        (72, 0, 55, 60, 58),  # one for each, and sixty for what these leave
        (131, 131, 0, 0, 100),  # parts would take longer than a column
        (132, 132, 0, 0, 100),
        (160, 132, 25, 0, 127),  # 28 columns of a second round
        (1000, 924, 20, 0, 766),
    ],
)
def test_all_blocks_have_about_as_much(columns: int, whole: int, part: int, others: int, most: int) -> None:
    shares = share_columns(columns, 100, 2, 1, True, 132)
    found = assert_each_slice_once(shares, columns, 100)
    assert (shares.whole, shares.part, shares.others) == (whole, part, others)
    assert max(sum(walk + (2 if first else 0) for _, first, walk in parts) for parts in found) == most


@pytest.mark.parametrize(
    ("sets", "stay", "grid", "kept"),
    [
        (4, False, 132, 4),
        (4, True, 132, 4),
        (5, False, 130, 5),
        (70, False, 132, 1),  # 62 blocks would have nothing to do
        (70, True, 70, 70),
        (200, False, 132, 1),
        (200, True, 200, 200),
    ],
)
def test_blocks_keep_to_a_set_of_columns(sets: int, stay: bool, grid: int, kept: int) -> None:
    shares = share_columns(2000 * sets, 10, 2, sets, stay, 132)
    assert (shares.grid, shares.sets) == (grid, kept)
