"""Shared test set-up: the `gpu` marker, what the summary says about it, and the hypothesis profiles."""

from __future__ import annotations

import functools
import gc
import os

import pytest
from hypothesis import HealthCheck, settings

# Each worker of `-n` has one core. Threads of PyTorch's and NumPy's arithmetic wait for each other on it, spinning: the
# notebook that trains took 108 s, and takes 8.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# Where JAX has a GPU, it would take most of its memory at the first call.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

# What is tested is what the planner chooses, not what this machine's user has tuned.
os.environ["CUCONVT_TUNED"] = "0"

# The default draws the same examples in every run, so that a red build is red again; `explore` looks for new ones:
#     HYPOTHESIS_PROFILE=explore python -m pytest tests
_COMMON = {
    "deadline": None,  # the first call of a kernel compiles it
    "print_blob": True,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large],
}
settings.register_profile("repeatable", max_examples=300, derandomize=True, **_COMMON)
settings.register_profile("explore", max_examples=3000, derandomize=False, **_COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))


@functools.cache
def why_no_gpu() -> str | None:
    """Return why tests that need a GPU cannot run here, or None where they can."""
    try:
        import cupy
    except ImportError as error:
        return "CuPy is not installed" if error.name == "cupy" else f"CuPy cannot be imported: {error}"
    try:
        return None if cupy.cuda.runtime.getDeviceCount() else "no CUDA GPU: the driver lists none"
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return f"no CUDA GPU: {error}"


@pytest.fixture
def rows_of_several_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of arrays that are turned, small ones have rows that come in bulk, too, and most of these are several blocks'."""
    from cuconvt import plan_turn

    monkeypatch.setattr(plan_turn, "FEWEST_POSITIONS", 60)
    monkeypatch.setattr(plan_turn, "PIECES_OF_BLOCK", 256)


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    # A worker of `-n` that has nothing left takes tests from another: some take a hundred times as long as most.
    if getattr(config.option, "numprocesses", None) and config.option.dist == "no":
        config.option.dist = "worksteal"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a CUDA GPU and CuPy; skipped where either is missing")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    needing = [item for item in items if item.get_closest_marker("gpu")]
    reason = why_no_gpu() if needing else None
    if reason is not None:
        for item in needing:
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish() -> None:
    # Thousands of tests and the modules stay to the end: looking for garbage among them took a tenth of the time.
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    stats = terminalreporter.stats
    ran = sum("gpu" in report.keywords for outcome in ("passed", "failed") for report in stats.get(outcome, []))
    skipped = [str(report.longrepr) for report in stats.get("skipped", []) if "gpu" in getattr(report, "keywords", ())]
    reason = why_no_gpu() if ran or skipped else None
    lacking = sum(reason in text for text in skipped) if reason else 0
    line = f"GPU tests: {ran} ran, {lacking} skipped for lack of a GPU"
    if lacking:
        line += f" ({reason})"
    if len(skipped) > lacking:
        line += f", {len(skipped) - lacking} skipped for another reason"
    terminalreporter.write_line(line)
