"""Tuning: candidates of every kernel, the store and what uses it, the command; a small run with a GPU."""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from described import DEVICES, geometry_of, layout_of
from fixed_cases import FIXED
from no_gpu import SHAPES, without_gpu
from strategies import case

from cuconvt import choices, cpu, info, tune, tune_compile, tuned
from cuconvt.__main__ import main
from cuconvt.bench.cases import PRECISIONS, parse_case
from cuconvt.bench.result import Times
from cuconvt.compile import cache_folder, cached_file
from cuconvt.plan import Plan, make_plan, show
from cuconvt.plan_gather import candidates as gather_candidates
from cuconvt.tune_outcome import Outcome, Problem, table
from cuconvt.tuned import FAMILIES, Choice, key_of, save, sources_digest, store_file, tuned_plan

# A problem for each kernel: its arguments, as plans have them, and the GPU's compute capability.
ARGUMENTS = {
    "disjoint": ("unet_k2s2", "bfloat16", None, 90),
    "phase_wgmma": ("kb61", "float16", None, 90),
    "phase_rows": ("colours", "float32", "tf32", 90),
    "phase_gemm": ("kb61", "float32", "tf32x3", 80),
    "tap_columns": ("colours", "bfloat16", None, 90),
    "narrow_groups": ("kb72", "bfloat16", None, 90),
    "correlate_wgmma": ("kb61", "bfloat16", None, 90),
    "few_channels": ("depthwise", "float32", "tf32", 90),
    "gather": ("kb73", "float64", None, 86),
}


@pytest.fixture(autouse=True)
def _empty_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUCONVT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("CUCONVT_TUNED", raising=False)
    yield
    for memo in (tuned.read, tuned._warn_once):
        memo.cache_clear()


def arguments_of(kernel: str, last: bool = False) -> tuple[Any, ...]:
    name, dtype, precision, arch = ARGUMENTS[kernel]
    geometry = geometry_of(FIXED[name])
    last = kernel == "correlate_wgmma" or (last and kernel != "phase_rows")
    return geometry, dtype, layout_of(geometry, last), precision, DEVICES[arch]


def choice_of(plan: Plan, **changes: Any) -> Choice:
    choice = Choice("kb61 on a GPU", sources_digest(), plan.kernel, asdict(plan.tile), 0.5, "gather", 2.0)
    return replace(choice, **changes)


def other_candidate(kernel: str) -> Plan:
    """Return a candidate that the planner does not choose."""
    arguments = arguments_of(kernel)
    planner = make_plan(*arguments)
    return next(plan for plan in FAMILIES[kernel].candidates(*arguments) if plan != planner)


# Candidates


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("kernel", FAMILIES)
def test_candidates_hold_the_proposal_and_can_be_planned_again(kernel: str, last: bool) -> None:
    arguments = arguments_of(kernel, last)
    family = FAMILIES[kernel]
    plans = list(family.candidates(*arguments))
    assert len(plans) > 1
    assert family.plan(*arguments) in plans
    assert all(plan.kernel == kernel for plan in plans)
    for plan in plans:
        fields = json.loads(json.dumps(asdict(plan.tile)))
        tile = family.tile(**{name: tuned._tuples(value) for name, value in fields.items()})
        assert family.plan(*arguments, tile) == plan


def test_a_refused_problem_has_no_candidates() -> None:
    arguments = arguments_of("gather")
    assert [kernel for kernel in FAMILIES if list(FAMILIES[kernel].candidates(*arguments))] == ["gather"]


def test_candidates_of_one_and_two_axes() -> None:
    for text in ("2x64x200:32:k4:s2:p1", "2x64x20x20:32:k4:s2:p1", "2x8x20x20:8:k4:s2:p1:g8"):
        geometry = parse_case(text).geometry
        arguments = (geometry, "float16", layout_of(geometry), None, DEVICES[90])
        planner = make_plan(*arguments)
        assert planner in FAMILIES[planner.kernel].candidates(*arguments)


# The store


@pytest.mark.parametrize("kernel", FAMILIES)
def test_a_stored_choice_is_the_plan_from_then_on(kernel: str) -> None:
    arguments, plan = arguments_of(kernel), other_candidate(kernel)
    assert tuned_plan(*arguments) is None
    save(key_of(*arguments), choice_of(plan))
    found = tuned_plan(*arguments)
    assert found == plan
    assert found.tuned
    assert str(found).startswith(f"{kernel} (tuned): grid ")
    assert "\n  not the planner's gather: 2 ms against 0.5 ms, measured by `python -m cuconvt tune`" in str(found)
    assert not make_plan(*arguments).tuned
    save(key_of(*arguments), None)
    assert tuned_plan(*arguments) is None


def test_a_stored_choice_says_why_other_kernels_were_not_chosen() -> None:
    arguments, plan = arguments_of("few_channels"), other_candidate("gather")
    planner = make_plan(*arguments)
    save(key_of(*arguments), choice_of(plan, planner=planner.kernel))
    tuned_by, *others = tuned_plan(*arguments).refused
    assert tuned_by.startswith("the planner's few_channels: 2 ms against 0.5 ms")
    assert [line for line in planner.refused if not line.startswith("gather: cost")] == others
    assert {line.partition(":")[0] for line in others} == {
        "disjoint",
        "phase_wgmma",
        "phase_rows",
        "correlate_wgmma",
        "phase_gemm",
        "tap_columns",
        "narrow_groups",
    }


def test_choices_of_several_problems_live_together() -> None:
    plans = {kernel: other_candidate(kernel) for kernel in FAMILIES}
    for kernel, plan in plans.items():
        save(key_of(*arguments_of(kernel)), choice_of(plan))
    save("some other key", None)
    save(key_of(*arguments_of("gather")), None)
    for kernel, plan in plans.items():
        assert tuned_plan(*arguments_of(kernel)) == (None if kernel == "gather" else plan)
    assert [file.name for file in cache_folder().iterdir()] == ["tuned.json"], "a temporary file was left"


def test_a_failed_write_leaves_the_old_store(monkeypatch: pytest.MonkeyPatch) -> None:
    save("key", choice_of(other_candidate("gather")))
    before = store_file().read_text()

    def fail(*arguments: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(tuned.os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        save("other", choice_of(other_candidate("gather")))
    assert store_file().read_text() == before
    assert len(list(cache_folder().iterdir())) == 1


def test_the_store_is_ignored_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = arguments_of("gather")
    save(key_of(*arguments), choice_of(other_candidate("gather")))
    monkeypatch.setenv("CUCONVT_TUNED", "0")
    assert tuned_plan(*arguments) is None
    monkeypatch.setenv("CUCONVT_TUNED", "1")
    assert tuned_plan(*arguments) is not None


def test_the_key_changes_with_everything_that_a_plan_depends_on(monkeypatch: pytest.MonkeyPatch) -> None:
    geometry, dtype, layout, precision, device = arguments_of("phase_gemm")
    keys = [
        key_of(geometry, dtype, layout, precision, device),
        key_of(replace(geometry, n=geometry.n + 1), dtype, layout, precision, device),
        key_of(geometry, "float64", layout, precision, device),
        key_of(geometry, dtype, layout_of(geometry, True), precision, device),
        key_of(geometry, dtype, replace(layout, x_aligned=False), precision, device),
        key_of(geometry, dtype, replace(layout, bias=None), precision, device),
        key_of(geometry, dtype, layout, "tf32", device),
        key_of(geometry, dtype, layout, precision, DEVICES[90]),
        key_of(geometry, dtype, layout, precision, replace(device, name="another card")),
    ]
    assert key_of(replace(geometry, batched=False), dtype, layout, precision, device) == keys[0]
    elsewhere = replace(layout, weight=(1, 2, 3, 4, 5), weight_group=6, weight_first=7)
    assert key_of(geometry, dtype, elsewhere, precision, device) == keys[0]
    monkeypatch.setattr(tuned, "sources_digest", lambda: "another version")
    keys.append(key_of(geometry, dtype, layout, precision, device))
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize("changed", ["gather.cu", "common.cuh", "plan_gather.py", "plan_rounds.py", "phases.py"])
def test_a_new_version_of_a_kernel_or_planner_is_noticed(changed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = sources_digest.__wrapped__()
    assert sources_digest.__wrapped__() == before
    sources, text = tuned.sources_of, choices._text
    monkeypatch.setattr(
        tuned,
        "sources_of",
        lambda source: {name: old + " " * (name == changed) for name, old in sources(source).items()},
    )
    monkeypatch.setattr(choices, "_text", lambda file: text(file) + b" " * (file.name == changed))
    monkeypatch.setattr(tuned, "planners_digest", choices.planners_digest.__wrapped__)
    assert sources_digest.__wrapped__() != before


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        '{"schema": 1}',
        '{"schema": 2, "choices": {}}',
        '{"schema": 1, "choices": {"key": {}}}',
        "\x00",
    ],
)
def test_a_corrupt_store_is_ignored_with_one_warning(text: str) -> None:
    arguments = arguments_of("gather")
    store_file().parent.mkdir()
    store_file().write_text(text)
    with pytest.warns(RuntimeWarning, match=r"tuned\.json cannot be read .* and is ignored; delete it, or run"):
        assert tuned_plan(*arguments) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tuned_plan(*arguments) is None
    save(key_of(*arguments), choice_of(other_candidate("gather")))
    assert tuned_plan(*arguments) is not None


@pytest.mark.parametrize(
    "changes",
    [
        {"kernel": "no_such_kernel"},
        {"kernel": "phase_gemm"},
        {"tile": {"threads": [8, 4, 4]}},
        {"tile": ["threads"]},
        {"ms": "fast"},
    ],
)
def test_a_choice_that_cannot_be_planned_is_ignored_with_one_warning(changes: dict[str, Any]) -> None:
    arguments = arguments_of("gather")
    save(key_of(*arguments), choice_of(other_candidate("gather"), **changes))
    with pytest.warns(RuntimeWarning, match=r"tuned\.json holds no tile of "):
        assert tuned_plan(*arguments) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tuned_plan(*arguments) is None


# What says so


def test_the_printed_plan_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, plan = arguments_of("gather"), other_candidate("gather")
    save(key_of(*arguments), choice_of(plan))
    monkeypatch.setenv("CUCONVT_DEBUG", "plan")
    found = tuned_plan(*arguments)
    assert found is not None
    geometry, dtype, _, precision, _ = arguments
    show(found, geometry, dtype, precision)
    printed = capsys.readouterr().err
    assert printed.startswith("cuconvt plan for Geometry(")
    assert str(found) in printed
    assert "gather (tuned): grid" in printed


def test_a_call_prints_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    geometry = geometry_of(case(SHAPES["x"], 6, 3, 2, 1, 1, has_bias=True))
    arguments = geometry, "float32", layout_of(geometry), "ieee", DEVICES[90]
    save(key_of(*arguments), choice_of(next(gather_candidates(*arguments))))
    monkeypatch.setenv("CUCONVT_DEBUG", "plan")
    with without_gpu() as backend:
        for _ in range(2):
            backend.call(precision="ieee")
    printed = capsys.readouterr().err
    assert printed.count("cuconvt plan for") == printed.count("gather (tuned): grid") == 1


def test_calls_on_a_gpu_use_it() -> None:
    pytest.importorskip("cupy")
    from cuconvt.cuda import choose_plan

    arguments, plan = arguments_of("gather"), other_candidate("gather")
    assert choose_plan(*arguments) == make_plan(*arguments)
    save(key_of(*arguments), choice_of(plan))
    assert choose_plan(*arguments) == plan
    assert choose_plan(*arguments).tuned


def test_info_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "no choices, the planner decides (`python -m cuconvt tune` measures)" in info.report()
    save("one", choice_of(other_candidate("gather")))
    save("two", choice_of(other_candidate("gather"), sources="older"))
    report = info.report()
    assert f"1 choices in {store_file()}, used for the problems that were measured, and 1 of other kernels" in report
    assert "(0 kernels, 0 choices of tiles, 0.0 MiB)" in report
    monkeypatch.setenv("CUCONVT_TUNED", "0")
    assert "ignored, as CUCONVT_TUNED=0 is set" in info.report()


# The command


def outcome_of(problem: Problem, faster: bool = True, **changes: Any) -> Outcome:
    """Make up times: the planner's choice, a candidate that takes half of its time or the same, and a slow one."""
    geometry = problem.case.geometry
    arguments = (geometry, problem.precision.dtype, layout_of(geometry), problem.precision.mode, DEVICES[90])
    planner = make_plan(*arguments)
    second, third = [plan for plan in gather_candidates(*arguments) if plan != planner][:2]
    times = {
        planner: Times(0.2, 0.19, 0.21, 9),
        third: Times(0.9, 0.8, 1.0, 9),
        second: Times(0.1, 0.09, 0.11, 9) if faster else Times(0.195, 0.18, 0.2, 9),
    }
    outcome = Outcome(problem, "Fake GPU", key_of(*arguments), planner, times, 4, ["gather chunk=1: wrong\nits log"])
    return replace(outcome, **changes)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Replace the measurement; the first element is the limit, the second a function that makes an outcome."""
    calls: list[Any] = [None, outcome_of]

    def measure(problems: Sequence[Problem], limit: int) -> Iterator[Outcome]:
        calls[0] = limit
        for problem in problems:
            yield calls[1](problem)

    monkeypatch.setattr(tune, "_measure", measure)
    monkeypatch.setattr(tune, "require_gpu", lambda: None)
    return calls


COMMAND = ["tune", "--cases", "mine=1x8x5x6x7:12:k3:s2:bias", "--precision", "ieee", "--layout", "NCDHW"]


def stored() -> dict[str, Any]:
    return json.loads(store_file().read_text())["choices"] if store_file().exists() else {}


def test_the_winner_is_shown_stored_and_used(measured: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    main([*COMMAND, "--limit", "7"])
    assert measured[0] == 7
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "mine ieee NCDHW: 4 candidates, 3 of them right"
    assert lines[2].split()[:7] == ["gather", "0.1000", "0.0900", "to", "0.1100", "0.500", "threads=8x4x4"]
    assert lines[3].split()[:3] == ["planner's", "gather", "0.2000"]
    assert lines[5] == "not timed: gather chunk=1: wrong"
    assert lines[6] == "tuned: gather, 2.00 times as fast as the planner's choice"
    assert lines[-1] == f"1 of 1 choices stored in {store_file()}"
    (choice,) = stored().values()
    assert choice["problem"] == "mine ieee NCDHW on Fake GPU"
    assert (choice["ms"], choice["planner"], choice["planner_ms"]) == (0.1, "gather", 0.2)
    geometry = parse_case(COMMAND[2]).geometry
    plan = tuned_plan(geometry, "float32", layout_of(geometry), "ieee", DEVICES[90])
    assert plan == outcome_of(Problem(parse_case(COMMAND[2]), PRECISIONS["ieee"], "NCDHW")).winner


def test_a_draw_is_not_stored_and_drops_what_was(measured: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    main(COMMAND)
    assert len(stored()) == 1
    measured[1] = lambda problem: outcome_of(problem, faster=False)
    main(COMMAND)
    assert not stored()
    output = capsys.readouterr().out
    assert "the planner's choice stays: none is faster beyond the spread of the times" in output
    assert output.endswith(f"0 of 1 choices stored in {store_file()}\n")


def test_every_precision_and_layout_and_the_defaults(measured: list[Any]) -> None:
    seen: list[str] = []

    def record(problem: Problem) -> Outcome:
        seen.append(str(problem))
        return Outcome(problem, "Fake GPU", "key", trouble="")

    measured[1] = record
    main(["tune", "--cases", "tiny", "kb61", "--precision", "tf32", "float16", "tf32"])
    assert measured[0] == 40
    names = [
        f"{c} {p} {layout}" for c in ("tiny", "kb61") for p in ("tf32", "float16") for layout in ("NCDHW", "NDHWC")
    ]
    assert seen == names


def test_trouble_is_told_and_the_rest_kept(measured: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    measured[1] = lambda problem: outcome_of(problem, trouble="out of memory" if problem.layout == "NDHWC" else "")
    with pytest.raises(SystemExit, match="tune: not every problem could be measured"):
        main([*COMMAND, "NDHWC"])
    assert "mine ieee NDHWC: out of memory" in capsys.readouterr().out
    assert len(stored()) == 1


def test_what_was_measured_is_kept_if_cut_short(measured: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    def cut(problem: Problem) -> Outcome:
        if problem.layout == "NDHWC":
            raise KeyboardInterrupt
        return outcome_of(problem)

    measured[1] = cut
    with pytest.raises(KeyboardInterrupt):
        main([*COMMAND, "NDHWC"])
    assert len(stored()) == 1
    assert "1 of 1 choices stored" in capsys.readouterr().out


def test_a_folder_that_cannot_be_written(measured: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    cache_folder().write_text("a file where the folder should be")
    with pytest.raises(SystemExit, match=r"tuned\.json cannot be written: .*set CUCONVT_CACHE_DIR"):
        main(COMMAND)
    assert "tuned: gather, 2.00 times as fast" in capsys.readouterr().out


def test_storing_while_the_store_is_ignored_is_told(
    measured: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUCONVT_TUNED", "0")
    main(COMMAND)
    assert "ignored as long as CUCONVT_TUNED=0 is set" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: --cases"),
        (["--cases", "kb99"], "a case must be one of kb58"),
        (["--cases", "tiny", "--limit", "0"], "must be a number of at least 1, got '0'"),
    ],
)
def test_bad_options_are_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["tune", *arguments])
    assert message in capsys.readouterr().err


def test_refuses_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    cupy = pytest.importorskip("cupy")
    monkeypatch.setattr(cupy.cuda.runtime, "getDeviceCount", lambda: 0)
    with pytest.raises(SystemExit, match="tune: measuring needs an NVIDIA GPU, and the driver lists none"):
        main(["tune", "--cases", "tiny"])


def test_the_table_always_shows_the_planners_choice() -> None:
    outcome = outcome_of(Problem(parse_case("tiny"), PRECISIONS["ieee"], "NCDHW"))
    planner = outcome.planner
    slow = Times(9.0, 8.0, 10.0, 3)
    faster = {plan: Times(1.0 + i, 1.0, 1.0, 3) for i, plan in enumerate(_many_plans(8)) if plan != planner}
    lines = table(replace(outcome, times={**faster, planner: slow}, failed=[])).splitlines()
    assert len(lines) == 9
    assert lines[-2].startswith("planner's  ")


def _many_plans(count: int) -> list[Plan]:
    return list(gather_candidates(*arguments_of("gather")))[:count]


# Compilation


def jobs() -> list[tune_compile.Job]:
    plans = sorted(_many_plans(100), key=lambda plan: plan.tile.channels)[:2]  # small and soon compiled
    good = [("gather.cu", "sm_86", plan.defines) for plan in plans]
    return [*good, ("gather.cu", "sm_86", (*plans[0].defines[:-1], ("SHARED_BYTES", 1)))]


@pytest.mark.parametrize("parallel", [True, False])
def test_kernels_are_compiled_into_the_cache(parallel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cupy")
    monkeypatch.setattr(tune_compile, "_processors", lambda: 2)
    if parallel:
        monkeypatch.setattr(tune_compile, "cached_file", None)  # not here
    else:

        def fail(*arguments: object) -> None:
            raise OSError("no processes here")

        monkeypatch.setattr(tune_compile, "ProcessPoolExecutor", fail)
    done: list[object] = []
    good, other, broken = jobs()
    errors = tune_compile.compile_all([good, other, broken], done.append)
    assert list(errors) == [broken]
    assert "gather.cu did not compile" in errors[broken]
    assert done == ["gather.cu"] * 3
    monkeypatch.setattr("cuconvt.compile.compile_kernel", None)  # not called again
    assert all(cached_file(*job).is_file() for job in (good, other))


# The measurement, with NumPy in CuPy's place


class FakeTimer:
    """Times that count the blocks of a plan."""

    def interleaved(
        self, runs: dict[Plan, Callable[[], object]], others: object, repeat: int | None
    ) -> dict[Plan, Times]:
        for run in runs.values():
            run()
        return {plan: Times(plan.grid, plan.grid - 0.1, plan.grid + 0.1, repeat or 9) for plan in runs}


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("precision", ["ieee", "tf32", "float16", "bfloat16", "float64"])
@pytest.mark.parametrize("case", ["1x4x5x6x7:6:k3:s2:bias", "2x4x9:6:k4:s3:g2"])
def test_candidates_are_checked_before_they_are_timed(
    case: str, precision: str, last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("cupy")
    from cuconvt import tune_measure
    from cuconvt.bench import measure as bench_measure

    for module in (tune_measure, bench_measure):
        monkeypatch.setattr(module, "cupy", np)
    wrong: list[Plan] = []

    def prepare(plan: Plan, device: object) -> Callable[..., None]:
        def launch(x: Any, weight: Any, bias: Any, out: Any) -> None:
            cpu.conv_transpose(x, weight, bias, problem.case.geometry, out)
            if plan in wrong:
                out[-1, -1, -1, -1, -1] += [1.0, np.nan][wrong.index(plan) % 2]

        return launch

    monkeypatch.setattr(tune_measure, "prepare", prepare)
    problem = Problem(parse_case(case), PRECISIONS[precision], "NDHWC" if last else "NCDHW")
    entry = tune_measure._enter(problem, 6, DEVICES[90])
    planner, first, second, third = entry.plans[:4]
    assert [plan.cost for plan in entry.plans[1:]] == sorted(plan.cost for plan in entry.plans[1:])
    wrong += [first, second]
    done: list[object] = []
    outcome = tune_measure._measure(entry, {third: "did not compile"}, DEVICES[90], FakeTimer(), done.append)
    assert outcome.tried == len(done) == len(entry.plans) <= 6
    assert planner in outcome.times
    assert not {first, second, third} & set(outcome.times)
    assert len(outcome.failed) == 3
    assert all(" off the planner's choice by " in text for text in outcome.failed[:2])
    assert outcome.failed[2].endswith(": did not compile")
    assert entry.key == outcome.key
    assert "candidates" in table(outcome)
    # A planner's choice that fails leaves nothing to compare with.
    wrong[:] = [first, planner]
    outcome = tune_measure._measure(entry, {}, DEVICES[90], FakeTimer(), done.append)
    assert "the planner's own choice fails: " in outcome.trouble
    assert tune_measure._measure(entry, {planner: "no"}, DEVICES[90], FakeTimer(), done.append).trouble == "no"


def test_one_problem_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cupy")
    from cuconvt import tune_measure
    from cuconvt.bench import measure as bench_measure

    compiled: list[tune_compile.Job] = []

    def compile_all(jobs: list[tune_compile.Job], done: Callable[[object], None]) -> dict[tune_compile.Job, str]:
        compiled.extend(jobs)
        return {jobs[1]: "did not compile"}

    def prepare(plan: Plan, device: object) -> Callable[..., None]:
        def launch(x: Any, weight: Any, bias: Any, out: Any) -> None:
            if x.shape[0] == 3:
                raise tune_measure.OutOfMemoryError(1, 2)
            cpu.conv_transpose(x, weight, bias, case.geometry, out)

        return launch

    @contextlib.contextmanager
    def progress(total: int, unit: str) -> Iterator[Callable[[object], None]]:
        bars.append((total, unit))
        yield lambda done: None

    bars: list[tuple[int, str]] = []
    cuda = SimpleNamespace(Device=lambda: SimpleNamespace(id=0), Stream=SimpleNamespace(null=contextlib.nullcontext()))
    pool = SimpleNamespace(free_all_blocks=lambda: None)
    fake = SimpleNamespace(cuda=cuda, random=np.random, maximum=np.maximum, isfinite=np.isfinite)
    fake.get_default_memory_pool = lambda: pool
    monkeypatch.setattr(bench_measure, "cupy", np)
    monkeypatch.setattr(tune_measure, "cupy", fake)
    monkeypatch.setattr(tune_measure, "device_properties", lambda index: replace(DEVICES[90], name="Fake GPU"))
    monkeypatch.setattr(tune_measure, "compile_all", compile_all)
    monkeypatch.setattr(tune_measure, "prepare", prepare)
    monkeypatch.setattr(tune_measure, "Timer", FakeTimer)
    case = parse_case("1x4x5x6x7:6:k3:s2")
    problems = [Problem(each, PRECISIONS["ieee"], "NCDHW") for each in (parse_case("3x4x5x6x7:6:k3:s2"), case)]
    no_memory, first = tune_measure.measure(problems, 3, progress)
    assert no_memory.trouble.startswith("not measured: Out of memory")
    assert not first.trouble
    assert (first.tried, len(first.times)) == (3, 2)
    assert bars == [(len(compiled), "kernel"), (6, "candidate")]
    assert len(set(compiled)) == len(compiled) == 3, "N does not recompile"
    assert {arch for _, arch, _ in compiled} == {"sm_90a"}


@pytest.mark.gpu
def test_a_small_run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    import cupy

    import cuconvt
    from cuconvt.cuda import _prepare
    from cuconvt.warm import _slot

    main(["tune", "--cases", "tiny", "--precision", "tf32x3", "bfloat16", "--limit", "6"])
    output = capsys.readouterr().out
    assert output.count("6 candidates, 6 of them right") == 4
    assert "of 4 choices stored in" in output

    # Whether or not anything was faster: a choice that is stored under the key of the call is the one that is launched.
    from cuconvt import tune_measure

    problem = Problem(parse_case("tiny"), PRECISIONS["ieee"], "NCDHW")
    entry = tune_measure._enter(problem, 3, tune_measure.device_properties(cupy.cuda.Device().id))
    save(entry.key, choice_of(entry.plans[1]))
    case = problem.case
    rng = cupy.random.default_rng(0)
    x, weight, bias = (rng.standard_normal(s, dtype=np.float32) for s in (case.x, case.weight, (case.c_out,)))
    results = []
    monkeypatch.setenv("CUCONVT_DEBUG", "plan")
    for use in ("0", "1"):
        monkeypatch.setenv("CUCONVT_TUNED", use)
        for memo in (_prepare, _slot, make_plan):
            memo.cache_clear()
        results.append(cuconvt.conv_transpose3d(x, weight, bias, **case.parameters, precision="ieee"))
        assert (" (tuned): grid" in capsys.readouterr().err) == (use == "1")
    cupy.testing.assert_allclose(*results, rtol=1e-4, atol=1e-4)
    for memo in (_prepare, _slot):
        memo.cache_clear()
