"""What planners find, kept on disk for other processes: it must be what they would have found."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from described import DEVICES, geometry_of, layout_of
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import case

from cuconvt import (
    choices,
    plan_correlate_narrow,
    plan_correlate_rows,
    plan_correlate_wgmma,
    plan_narrow_groups,
    plan_phase_rows,
    plan_phase_wgmma,
    plan_search,
    plan_weight_gradient,
    plan_weight_gradient_gemm,
    plan_weight_gradient_narrow,
    plan_weight_gradient_tma,
    plan_weight_gradient_wgmma,
)
from cuconvt.plan import Plan, alike, make_plan
from cuconvt.plan_correlate import make_correlate_plan
from cuconvt.plan_weight_gradient import make_weight_gradient_plan

PLANNERS = (make_plan, make_correlate_plan, make_weight_gradient_plan)
SEARCHES = (
    plan_correlate_narrow.choose_tile,
    plan_correlate_rows.choose_tile,
    plan_correlate_wgmma.choose_tile,
    plan_correlate_wgmma.least_of_all,
    plan_narrow_groups.choose_tile,
    plan_phase_rows.choose_tile,
    plan_phase_wgmma.choose_tile,
    plan_weight_gradient.choose_tile,
    plan_weight_gradient_gemm.choose_tile,
    plan_weight_gradient_narrow.choose_tile,
    plan_weight_gradient_tma.choose_tile,
    plan_weight_gradient_wgmma.choose_tile,
    plan_weight_gradient_wgmma.least_of_all,
)
PROBLEMS = {
    "wide": case((2, 256, 16, 16), 128, 4, 2, 1),
    "upsampling": case((2, 64, 16, 16, 16), 32, 2, 2),
    "without a stride": case((2, 64, 16, 16, 16), 48, 3, 1, 1),
    "few channels": case((2, 12, 16, 16), 8, 3, 2, 1),
    "groups": case((2, 32, 8, 16, 16), 32, 3, 2, 1, groups=4),
}


def as_another_process() -> None:
    """Forget what this process has found."""
    for function in (*PLANNERS, *SEARCHES):
        function.cache_clear()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Have the cache folder be the test's own; yield where choices are."""
    monkeypatch.setenv("CUCONVT_CACHE_DIR", str(tmp_path))
    as_another_process()
    yield tmp_path / "choices"
    as_another_process()


def plans_of(name: str) -> list[Plan]:
    geometry = geometry_of(PROBLEMS[name])
    return [
        planner(geometry, dtype, layout_of(geometry, last), precision, DEVICES[90])
        for planner in PLANNERS
        for dtype, precision in (("bfloat16", None), ("float32", "tf32"), ("float32", "tf32x3"))
        for last in (False, True)
    ]


@pytest.mark.parametrize("name", PROBLEMS)
def test_plans_are_the_same_from_the_store(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    searched = plans_of(name)
    assert not folder.exists(), "a planner that is asked by itself leaves nothing behind"
    as_another_process()
    with plan_search.kept_in(choices.Choices()):
        assert plans_of(name) == searched
        assert list(folder.iterdir())
        as_another_process()
        monkeypatch.setattr(choices, "replace_file", None)  # nothing is missing, so that nothing is kept
        found = plans_of(name)
    assert found == searched
    assert [plan.tile for plan in found] == [plan.tile for plan in searched]
    assert [plan.cost for plan in found] == [plan.cost for plan in searched]


def test_calls_look_in_the_store_and_keep_there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The three ways to a launch, without a GPU: what is prepared is the plan, and another process finds its tiles."""
    cuda = pytest.importorskip("cuconvt.cuda", reason="CuPy is not installed")
    from cuconvt import cuda_gradients

    for module in (cuda, cuda_gradients):
        monkeypatch.setattr(module, "device_properties", lambda _: DEVICES[90])
        monkeypatch.setattr(module, "prepare", lambda plan, _: plan)
    monkeypatch.setattr(cuda_gradients, "prepare_weight_gradient", lambda plan, *_: plan)
    geometry = geometry_of(PROBLEMS["wide"])
    problem = (geometry, "bfloat16", layout_of(geometry, True), None)
    ways = {
        cuda._prepare: make_plan,
        cuda_gradients._prepare_correlate: make_correlate_plan,
        cuda_gradients._prepare_weight_gradient: make_weight_gradient_plan,
    }
    for way, planner in ways.items():
        expected = planner(*problem, DEVICES[90])
        as_another_process()
        before = len(list(folder.glob("*.json")))
        assert way.__wrapped__(*problem, 0) == expected
        kept = sorted(folder.glob("*.json"))
        assert len(kept) > before, planner
        as_another_process()
        with monkeypatch.context() as patch:
            patch.setattr(choices, "replace_file", None)
            assert way.__wrapped__(*problem, 0) == expected


@settings(max_examples=max(settings().max_examples // 3, 1))
@given(st.data())
def test_tiles_do_not_depend_on_what_is_left_out(data: st.DataObject) -> None:
    """N, extents, paddings of other axes, and strides but for whether they are 1 and their remainders."""
    numbers = st.integers(1, 3)
    channels = data.draw(st.tuples(*(st.sampled_from((5, 8, 24, 64)),) * 2))
    kernel, stride = data.draw(st.tuples(numbers, numbers, st.integers(1, 5))), data.draw(st.tuples(*(numbers,) * 3))
    pads = data.draw(st.tuples(*(st.integers(0, 20),) * 3))
    pads = tuple(min(pad, k - 1) if pad < 16 else pad for pad, k in zip(pads, kernel, strict=True))
    geometry = geometry_of(case((3, channels[0], 40, 40, 43), channels[1], kernel, stride))
    geometry = replace(geometry, pad_before=pads)
    strides = st.tuples(*(st.one_of(st.sampled_from((0, 1, -1, 16, 24, 4)), st.integers(-100, 100)),) * 5)
    layout = replace(layout_of(geometry, False), x=data.draw(strides), out=data.draw(strides))
    layout = replace(layout, x_aligned=data.draw(st.booleans()), out_aligned=data.draw(st.booleans()))
    for dtype, precision in (("bfloat16", None), ("float32", "tf32x3")):
        for module, *rest in (
            (plan_weight_gradient, dtype, DEVICES[90]),
            (plan_weight_gradient_gemm, dtype, precision, DEVICES[90]),
        ):
            search = module.choose_tile.__wrapped__
            assert search(*alike(geometry, layout), *rest) == search(geometry, layout, *rest)


@dataclass(frozen=True)
class Tile:
    size: tuple[int, int]
    deep: bool = False


@dataclass(frozen=True)
class Asked:
    number: int


class Search:
    """A search for a tile that counts how often it is made."""

    def __init__(self, result: Any):
        self.count = 0

        @plan_search.remembered(Tile)
        def search(asked: Asked) -> Any:
            self.count += 1
            return result

        self.found = search

    def as_another_process(self, number: int = 1) -> Any:
        self.found.cache_clear()
        with plan_search.kept_in(choices.Choices()):
            return self.found(Asked(number))


@pytest.mark.parametrize("result", [None, 0.1 + 0.2, Tile((1, 2), True), (Tile((3, 4)), 1 / 3)])
def test_whatever_a_search_returns(folder: Path, result: Any) -> None:
    search = Search(result)
    assert [search.as_another_process() for _ in range(3)] == [result] * 3
    assert search.count == 1
    search.as_another_process(2)
    assert search.count == 2
    assert len(list(folder.iterdir())) == 2


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "null",
        '{"question": "another"}',
        "question",
        '{"tile": {}}',
        '{"tile": {"wrong": 1}, "cost": null}',
    ],
)
def test_a_file_that_is_not_sound_is_searched_for_and_replaced(folder: Path, content: str) -> None:
    search = Search(Tile((1, 2)))
    search.as_another_process()
    (file,) = folder.iterdir()
    sound = file.read_text()
    if "tile" in content:
        content = json.dumps({**json.loads(sound), "found": json.loads(content)})
    elif content == "question":
        content = json.dumps({"question": json.loads(sound)["question"]})
    file.write_text(content)
    assert search.as_another_process() == Tile((1, 2))
    assert search.count == 2
    assert file.read_text() == sound


def test_another_version_of_a_planner_searches_anew(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    search = Search(Tile((1, 2)))
    search.as_another_process()
    monkeypatch.setattr(choices, "planners_digest", lambda: "another")
    search.as_another_process()
    assert search.count == 2


def test_a_folder_that_cannot_be_written_costs_the_search_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    folder.write_text("a file where the folder should be")
    search = Search(Tile((1, 2)))
    assert [search.as_another_process() for _ in range(2)] == [Tile((1, 2))] * 2
    assert search.count == 2
    assert not recwarn.list


def test_the_digest_covers_every_planner() -> None:
    """What planners import of this package is in the digest, or says no more than where an array is."""
    package = Path(choices.__file__).parent
    known = {"cuconvt.arrays", "cuconvt.geometry", "cuconvt.phases", "cuconvt.plan", "cuconvt.tensor_map"}
    for file in package.glob("plan*.py"):
        for line in file.read_text().splitlines():
            words = line.split()
            if words[:1] == ["from"] and words[1].startswith("cuconvt."):
                module = words[1]
                assert module in known or module.startswith("cuconvt.plan_"), f"{file.name}: {line}"
