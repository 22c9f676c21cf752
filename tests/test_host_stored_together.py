"""Results of 16 bits that a thread of phase_wgmma stores together, executed on the host."""

from __future__ import annotations

import pytest
from harness import check
from host.backend import on_host
from host.build import kernel_sources, why_not
from stored_together import TOGETHER, planner
from test_host_faults import VALUES, WGMMA_DEVICE, plant

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))


def run(name: str, dtype: str, sources: dict[str, str] | None = None) -> None:
    plan, seen = planner(name)
    with on_host("phase_wgmma", WGMMA_DEVICE, sources=sources, plan=lambda _, *problem: plan(*problem)):
        check(TOGETHER[name][0], dtype, calls=1)
    assert seen == {TOGETHER[name][-1]}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", TOGETHER)
def test_results_stored_together(name: str, dtype: str) -> None:
    run(name, dtype)


EARLY = "which no thread|with no barrier in between"
OUTSIDE = "nobody wrote byte|writes byte .* of out|heap-buffer-overflow|belong to no"
FAULTS = {
    "half of the patches": ("patches beside each other", "target % TILES_M * 8 + target / TILES_M", "target / TILES_M"),
    "neighbouring channels": ("a patch", "(turned + place_of(c) +", "(turned + place_of(c ^ 1) +"),
    "results that are read too early": (
        "words",
        "turn_results<EIGHTS>(slice, acc, bias, eight, alive);\n        warps_sync(barrier, STORERS);",
        "turn_results<EIGHTS>(slice, acc, bias, eight, alive);",
    ),
    "no wait for the bias": ("words", "if (AS_RESULTS) warps_sync(2 + threadIdx.x / STORERS, STORERS);", ""),
    "one channel too many": ("a patch", "|| c >= left) continue;", "|| c > left) continue;"),
    "pieces of another place": ("three patches", "offset[i % PLACES] + c *", "offset[0] + c *"),
    "words one by one": (
        "words",
        "else if (p.together == 2) store_results<2,",
        "else if (p.together == 2) store_results<1,",
    ),
    "a position further": ("one by one", "tile * 64, words);", "tile * 64 + 8, words);"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_caught(name: str) -> None:
    problem, before, after = FAULTS[name]
    with pytest.raises(AssertionError, match=f"{OUTSIDE}|{EARLY}|{VALUES}"):
        run(problem, "float16", plant(kernel_sources("phase_wgmma.cu"), before, after))
