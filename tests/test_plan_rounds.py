"""The order in which persistent blocks take boxes of phases that differ in taps."""

from __future__ import annotations

import itertools

import pytest
from described import DEVICES, geometry_of, layout_of, problem_of
from strategies import case

from cuconvt.plan import make_plan
from cuconvt.plan_rounds import MOST_ROUNDS, WORTH, takes_longest_first, taps_of_phases


def test_taps_of_phases() -> None:
    assert taps_of_phases(geometry_of(case((1, 4, 5, 5, 5), 4, 3, 2))) == [4, 2, 2, 1]
    assert taps_of_phases(geometry_of(case((1, 4, 5, 5), 4, 5, 3))) == [2, 2, 1]
    assert taps_of_phases(geometry_of(case((1, 4, 5, 5), 4, 4, 2))) == [2, 2]
    assert taps_of_phases(geometry_of(case((1, 4, 5, 5), 4, 3, 2, dilation=2))) == [3, 0]


@pytest.mark.parametrize("around", [0.3, 6])
@pytest.mark.parametrize("together", [1, 3])
def test_the_busiest_block_decides(together: int, around: float) -> None:
    """By blocks that do one box after the other, for all numbers of boxes."""
    taps, resident, in_turn = [4, 2, 2, 1], 12, 11
    found = set()
    for boxes in range(1, 30):
        kinds = list(itertools.product(range(boxes), range(4), range(together)))  # in turn
        usual = [sum(taps[kind[1]] + around for kind in kinds[block::in_turn]) for block in range(in_turn)]
        kinds.sort(key=lambda kind: kind[1])
        rounds = [kinds[first : first + resident] for first in range(0, len(kinds), resident)]
        to_and_fro = [0.0] * resident
        for number, kinds_of_round in enumerate(rounds):
            for i, kind in enumerate(kinds_of_round):
                to_and_fro[resident - 1 - i if number % 2 else i] += taps[kind[1]] + around
        is_less = max(to_and_fro) < WORTH * max(usual)
        is_possible = resident < len(kinds) <= MOST_ROUNDS * resident
        found_so = takes_longest_first(taps, together, len(kinds), in_turn, resident, around)
        assert found_so == (is_less and is_possible), boxes
        found.add(is_less and is_possible)
    assert found == {False, True}
    assert not takes_longest_first([2, 2, 2], together, 21, 11, 12, around)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_plans_take_long_boxes_first_where_few_are_left(dtype: str) -> None:
    """A layer of 12 cubed has 144 boxes for 132 multiprocessors, four and two rows of taps long, or one."""

    def order(*x: int, kernel: int = 3, padding: int = 1) -> tuple[int, bool]:
        geometry = geometry_of(case((*x,), 128, kernel, 2, padding, kernel % 2))
        plan = make_plan(geometry, dtype, layout_of(geometry), None if dtype == "bfloat16" else "tf32", DEVICES[90])
        assert plan.kernel == "phase_wgmma"
        return plan.grid, bool(problem_of(plan)["out_vector"][0])

    assert order(2, 256, 12, 12, 12) == (132, True)
    assert order(2, 256, 8, 8, 8) == (128, False)
    assert order(8, 256, 48, 48, 48) == (131, False)
    assert not order(2, 256, 12, 12, 12, kernel=4)[1]
