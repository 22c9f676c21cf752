"""JAX arrays in GPU memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from harness import call
from reference import Expected
from strategies import DTYPES, case

import cuconvt

pytestmark = pytest.mark.gpu

PROBLEM = case((2, 4, 5, 6, 7), 6, 3, stride=2, padding=1, output_padding=1, groups=2, has_bias=True)


@pytest.fixture
def jax() -> Any:
    jax = pytest.importorskip("jax")
    try:
        jax.devices("cuda")
    except RuntimeError:
        pytest.skip("this JAX has no CUDA")
    return jax


def put(jax: Any, values: np.ndarray) -> Any:
    return jax.device_put(values, jax.devices("cuda")[0])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_values_and_device(jax: Any, dtype: str) -> None:
    values = PROBLEM.arrays(DTYPES[dtype])
    arguments = [put(jax, a) for a in values]
    y = call(PROBLEM, *arguments)
    assert isinstance(y, jax.Array)
    assert y.dtype == DTYPES[dtype]
    assert y.devices() == arguments[0].devices()
    Expected(PROBLEM, *values).assert_close(np.asarray(y))
    assert np.asarray(y * 0 + 1).min() == 1


def test_memory_is_viewed_and_handed_over_in_place(jax: Any) -> None:
    from cuconvt.arrays import bridge_of

    x = put(jax, np.ones((2, 3, 4), np.float32))
    bridge, device = bridge_of({"x": x, "weight": x})
    assert device[0] == "cuda"
    with bridge.scope(x):
        assert bridge.view(x).data.ptr == x.unsafe_buffer_pointer()
        result = bridge.empty((2, 3, 5), (0, 1, 2), x)
        assert bridge.finish(result).unsafe_buffer_pointer() == result.data.ptr


def test_inputs_still_being_computed_are_waited_for_on_the_gpu(jax: Any) -> None:
    problem = case((1, 2, 6, 6), 3, 2, stride=2)
    weight = np.ones((2, 3, 2, 2), np.float32)
    big = put(jax, np.full((4096, 4096), 2.0**-12, np.float32))

    @jax.jit
    def slow(matrix: Any) -> Any:
        for _ in range(20):  # each product keeps the value, and takes a while
            matrix = matrix @ big
        return matrix[0, :72].reshape(1, 2, 6, 6)

    x = slow(big)
    y = call(problem, x, put(jax, weight))
    assert np.allclose(np.asarray(y), 2 * 2.0**-12)


def test_inputs_stay_alive_until_the_kernel_has_read_them(jax: Any) -> None:
    from gpu_tools import delay

    from cuconvt.arrays import DLPackBridge

    arguments = [put(jax, a) for a in PROBLEM.arrays(DTYPES["float32"])]
    call(PROBLEM, *arguments).block_until_ready()
    waiting = delay()
    pointer = arguments[0].unsafe_buffer_pointer()
    y = call(PROBLEM, *arguments)
    del arguments
    assert not waiting.done
    assert pointer in [views[0].data.ptr for _, views in DLPackBridge._in_flight]
    y.block_until_ready()
    call(PROBLEM, *[put(jax, a) for a in PROBLEM.arrays(DTYPES["float32"])])
    assert len(DLPackBridge._in_flight) <= 1


def test_empty_batch(jax: Any) -> None:
    x, weight = put(jax, np.ones((0, 2, 5), np.float32)), put(jax, np.ones((2, 3, 3), np.float32))
    assert cuconvt.conv_transpose1d(x, weight).shape == (0, 3, 7)


def test_cpu_and_gpu_do_not_mix(jax: Any) -> None:
    x = put(jax, np.ones((1, 2, 5), np.float32))
    weight = jax.device_put(np.ones((2, 3, 3), np.float32), jax.devices("cpu")[0])
    with pytest.raises(TypeError, match="weight must be on the same device as x, got cpu and cuda:0"):
        cuconvt.conv_transpose1d(x, weight)
