"""The search for the best tile: what its bounds leave out is never the best."""

from __future__ import annotations

from math import inf

import pytest
from described import DEVICES, geometry_of, layout_of, problem_of
from hypothesis import given
from hypothesis import strategies as st
from strategies import Problem, case

from cuconvt import plan_correlate_rows as correlate_rows
from cuconvt import plan_correlate_wgmma as correlate_wgmma
from cuconvt import plan_correlate_wgmma_work, plan_phase_wgmma_work
from cuconvt import plan_phase_rows as phase_rows
from cuconvt import plan_phase_wgmma as phase_wgmma
from cuconvt.plan import Plan
from cuconvt.plan_search import cheapest_tile

COSTS = st.integers(1, 4).map(float)  # so few that many are equal
PROBLEMS = (
    (case((1, 64, 5, 5, 5), 24, (3, 5, 2), (2, 1, 3)), "float32", "tf32"),
    (case((1, 128, 9, 9), 48, 4, 2, 1), "bfloat16", None),
    (case((1, 40, 99), 64, 8, 4, 2), "float32", "tf32x3"),
    (case((1, 32, 8, 12, 16), 24, 3, 2, 1, 1), "bfloat16", None),
)


@given(st.lists(st.tuples(COSTS, COSTS, COSTS, st.booleans())))
def test_the_cheapest_is_found_and_of_equal_ones_the_first(numbers: list[tuple[float, float, float, bool]]) -> None:
    """As when all costs are compared in the order of the first bounds."""
    tiles = [(*sorted(costs), serves) for *costs, serves in numbers]
    expected = min(
        (tile for tile in sorted(tiles, key=lambda tile: tile[0]) if tile[3]), key=lambda t: t[2], default=None
    )
    found = cheapest_tile(
        ((tile[0], (i, tile)) for i, tile in enumerate(tiles)),
        lambda t: t[1][1],
        lambda t: t[1][2] if t[1][3] else None,
    )
    if expected is None:
        assert found is None
    else:
        first = min((tile[0], i) for i, tile in enumerate(tiles) if tile[3] and tile[2] == expected[2])
        assert found == ((first[1], tiles[first[1]]), expected[2])


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(("problem", "dtype", "precision"), PROBLEMS)
def test_no_tile_takes_less_than_with_ideal_boxes(
    problem: Problem, dtype: str, precision: str | None, last: bool
) -> None:
    geometry = geometry_of(problem)
    layout = layout_of(geometry, last)
    read = correlate_wgmma.as_read(geometry, layout)
    works = (
        (phase_wgmma, plan_phase_wgmma_work.Work(geometry, dtype, precision, layout).with_pairs()),
        (correlate_wgmma, plan_correlate_wgmma_work.Work(*read, dtype, precision)),
        (correlate_rows, correlate_rows.Work(*read, dtype, precision)),
        (phase_rows, phase_rows.Work(geometry, dtype, precision, layout)),
    )
    for module, work in works:
        if module in (correlate_rows, phase_rows) and module._refuse(geometry, dtype, layout, precision, DEVICES[90]):
            continue
        costs = []
        for tile in module.tiles(work):
            cost, ideal = work.typical_cost(tile, DEVICES[90]), work.ideal_cost(tile, DEVICES[90])
            assert (cost is None) == (ideal is None)
            if cost is not None and ideal is not None:
                assert ideal <= cost * (1 + 1e-9)
                costs.append((work.least_cost(tile), cost))
        assert module.choose_tile(work.shape, DEVICES[90])[1] == one_by_one(costs)


def one_by_one(costs: list[tuple[float, float]]) -> float:
    """Return the least cost of those that are found without a closer bound."""
    best = inf
    for bound, cost in sorted(costs, key=lambda pair: pair[0]):
        if bound >= best:
            break
        best = min(best, cost)
    return best


@pytest.mark.parametrize("extents", [(6, 16, 20), (1, 1, 300)])
@pytest.mark.parametrize(("dtype", "precision"), [("bfloat16", None), ("float32", "tf32x3")])
def test_the_best_tile_of_rows_for_a_size_is_found(extents: tuple[int, ...], dtype: str, precision: str | None) -> None:
    """What cannot be the best is left out by the bound, before its boxes are compared."""
    geometry = geometry_of(case((1, 32, 8, 12, 16), 24, 3, 2, 1, 1))
    work = correlate_rows.Work(*correlate_wgmma.as_read(geometry, layout_of(geometry)), dtype, precision)
    assert work.boxed
    costs = {}
    for tile in correlate_rows.tiles_of_any_size(work.shape):
        cost = work.clocks_of_size(tile, 3, extents, DEVICES[90])
        if cost is not None:
            assert work.least_of_size(tile, 3, extents, DEVICES[90]) <= cost * (1 + 1e-9), tile
            costs[tile] = cost
    assert {tile.whole_h for tile in costs} == {False, True}
    found = correlate_rows.choose_tile_of_size(work.shape, 3, extents, DEVICES[90])
    assert found is not None
    assert found[1] == costs[found[0]] == min(costs.values())


@pytest.mark.parametrize("extents", [(8, 12, 16), (5, 3, 6), (1, 1, 300)])
@pytest.mark.parametrize(("dtype", "precision"), [("bfloat16", None), ("float32", "tf32x3")])
def test_the_best_tile_of_phases_for_a_size_is_found(
    extents: tuple[int, ...], dtype: str, precision: str | None
) -> None:
    """The same of rows that are read one by one."""
    geometry = geometry_of(case((1, 32, 8, 12, 16), 24, 3, 2, 1, 1))
    work = phase_rows.Work(geometry, dtype, precision, layout_of(geometry))
    costs = {}
    for tile in correlate_wgmma.with_longer_rings(list(phase_rows.tiles(work))):
        cost = work.clocks_of_size(tile, 3, extents, DEVICES[90])
        if cost is not None:
            assert work.least_of_size(tile, 3, extents, DEVICES[90]) <= cost * (1 + 1e-9), tile
            costs[tile] = cost
    found = phase_rows.choose_tile_of_size(work.shape, 3, extents, DEVICES[90])
    assert found is not None
    assert found[1] == costs[found[0]] == min(costs.values())


@pytest.mark.parametrize(
    ("extents", "flat"), [((8, 64, 136), False), ((8, 12, 8), True), ((5, 4, 6), True), ((1, 1, 312), False)]
)
@pytest.mark.parametrize(("dtype", "precision"), [("bfloat16", None), ("float32", "tf32x3")])
def test_rows_come_in_the_way_that_takes_less(
    extents: tuple[int, ...], flat: bool, dtype: str, precision: str | None
) -> None:
    """One by one or those of a plane as one, with one program: neither serves all extents."""
    geometry = geometry_of(case((3, 32, *extents), 24, 3, 2, 1, 1))
    layout = layout_of(geometry)
    plan = phase_rows.plan_phase_rows(geometry, dtype, layout, precision, DEVICES[90])
    assert isinstance(plan, Plan), plan
    assert (plan.tile.flat > 0) == (problem_of(plan)["patches"][0] > 0) == flat
    work = phase_rows.Work(geometry, dtype, precision, layout)
    tile, _ = phase_rows.choose_tile(work.shape, DEVICES[90])
    clocks = {way.flat > 0: work.clocks_of_size(way, 3, extents, DEVICES[90]) or inf for way in work.ways(tile)}
    assert clocks[flat] == min(clocks.values()) < inf
