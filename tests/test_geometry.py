"""Shapes, normalised parameters and phases, against brute force over every position."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import Problem, problems

from cuconvt import conv_transpose_output_shape
from cuconvt.geometry import make_geometry, normalise
from cuconvt.phases import axis_phases, phase_outputs, residues_with_outputs

EXAMPLES = settings().max_examples


@given(problem=problems())
def test_output_shape(problem: Problem) -> None:
    assert conv_transpose_output_shape(problem.x_shape, problem.weight_shape, **problem.parameters) == problem.out_shape


@settings(max_examples=max(EXAMPLES // 3, 1))
@given(problem=problems())
def test_output_shape_is_that_of_torch(problem: Problem) -> None:
    torch = pytest.importorskip("torch")
    function = getattr(torch.nn.functional, f"conv_transpose{problem.rank}d")
    x, weight = (torch.empty(shape, device="meta") for shape in (problem.x_shape, problem.weight_shape))
    padding = [min(pair) for pair in problem.padding]
    parameters = {**problem.parameters, "padding": padding}
    theirs = tuple(function(x, weight, **parameters).shape)
    assert conv_transpose_output_shape(problem.x_shape, problem.weight_shape, **parameters) == theirs


@given(problem=problems())
def test_output_size_chooses_the_same_output_padding(problem: Problem) -> None:
    size = problem.out_shape[-problem.rank :]
    parameters = {**problem.parameters, "output_padding": 0, "output_size": size}
    assert conv_transpose_output_shape(problem.x_shape, problem.weight_shape, **parameters) == problem.out_shape


def test_parameters_may_be_spelt_in_several_ways() -> None:
    one = normalise(3, 2, 1, 0, 1, 3, None)
    assert one == ((2, 2, 2), ((1, 1),) * 3, (0, 0, 0), 1, (3, 3, 3), None)
    assert one == normalise(3, [2, 2, 2], (1, 1, 1), (0,) * 3, np.int64(1), np.int32(3), None)
    assert one == normalise(3, (2, np.int8(2), 2), ((1, 1), [1, 1], (1, 1)), 0, 1, (3,) * 3, None)
    # With two axes, a flat pair is one value an axis; pairs are nested.
    assert normalise(2, 1, (1, 2), 0, 1, 1, None)[1] == ((1, 1), (2, 2))
    assert normalise(2, 1, ((1, 2), (3, 4)), 0, 1, 1, None)[1] == ((1, 2), (3, 4))


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_geometry_is_in_3d_form(rank: int) -> None:
    parameters = normalise(rank, 2, ((1, 2),) * rank, 1, 2, 3, None)
    batched = make_geometry(rank, (5, 4, *(6,) * rank), (4, 3, *(7,) * rank), (6,), *parameters)
    lead = 3 - rank
    assert batched.x_extent == (1,) * lead + (6,) * rank
    assert batched.kernel == (1,) * lead + (7,) * rank
    assert batched.stride == (1,) * lead + (2,) * rank
    assert batched.dilation == (1,) * lead + (3,) * rank
    assert batched.pad_before == (0,) * lead + (1,) * rank
    assert batched.pad_after == (0,) * lead + (2,) * rank
    assert batched.output_padding == (0,) * lead + (1,) * rank
    assert batched.out_extent == (1,) * lead + (27,) * rank
    assert batched.out_shape == (5, 6, *(27,) * rank)
    assert (batched.n, batched.c_in, batched.c_out, batched.groups) == (5, 4, 6, 2)
    assert (batched.c_in_per_group, batched.c_out_per_group, batched.taps) == (2, 3, 7**rank)
    unbatched = make_geometry(rank, (4, *(6,) * rank), (4, 3, *(7,) * rank), None, *parameters)
    assert (unbatched.n, unbatched.batched, unbatched.out_shape) == (1, False, (6, *(27,) * rank))


@given(
    extent=st.integers(1, 9),
    kernel=st.integers(1, 7),
    stride=st.integers(1, 5),
    dilation=st.integers(1, 5),
    pad_before=st.integers(0, 30),
    out_extent=st.integers(1, 60),
)
def test_phases_hold_every_pair_of_tap_and_input_once(
    extent: int, kernel: int, stride: int, dilation: int, pad_before: int, out_extent: int
) -> None:
    """A phase's taps and offsets give for each output exactly the (tap, input) pairs of the definition."""
    seen = []
    for phase in axis_phases(kernel, stride, dilation):
        for o in phase_outputs(phase.residue, stride, pad_before, out_extent):
            assert (o + pad_before) % stride == phase.residue
            q = (o + pad_before) // stride
            pairs = {(k, q - back) for k, back in zip(phase.taps, phase.back, strict=True) if 0 <= q - back < extent}
            defined = {
                (k, i) for k in range(kernel) for i in range(extent) if i * stride + k * dilation == o + pad_before
            }
            assert pairs == defined
            seen.append(o)
    assert sorted(seen) == list(range(out_extent))
    residues = residues_with_outputs(stride, pad_before, out_extent)
    assert residues == [r for r in range(stride) if phase_outputs(r, stride, pad_before, out_extent)]
    assert axis_phases(kernel, stride, dilation, residues) == tuple(
        phase for phase in axis_phases(kernel, stride, dilation) if phase.residue in residues
    )


def test_phases_that_no_tap_reaches() -> None:
    assert [phase.taps for phase in axis_phases(3, 2, 2)] == [(0, 1, 2), ()]
    assert [phase.taps for phase in axis_phases(2, 4, 2)] == [(0,), (), (1,), ()]
    assert [phase.taps for phase in axis_phases(1, 3, 1)] == [(0,), (), ()]
