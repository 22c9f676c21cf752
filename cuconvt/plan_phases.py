"""Plans of gradients whose problem has no stride any more, since phases of y are channels.

Where all phases have equally many taps, a kernel of J times the stride without dilation, with k = j*s + r

    grad_x[n, ci, i] = sum over co, r, j of  y[n, co, s*(i + j) + r - padding] * weight[ci, co, j*s + r]

and the gradient of the weight likewise. With phase r of channel co as a channel of its own this is a correlation of
stride 1 with J taps. A copy of y has these channels (`turn_phases` in ``kernels/turn.cuh``), last, which bulk tensor
copies read. For strides that other kernels leave to the general ones, to copy y costs far less than it saves.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf, prod

from cuconvt.geometry import Geometry, triple
from cuconvt.phases import are_alike
from cuconvt.plan import Device, Ints, Layout, Plan, Refusal, axis_macros
from cuconvt.plan_correlate_wgmma import plan_correlate_wgmma
from cuconvt.plan_turn import TURN_FIELDS, TURN_THREADS, Array, channels_last
from cuconvt.plan_weight_gradient import MAX_WORKSPACE_BYTES
from cuconvt.plan_weight_gradient_tma import plan_images
from cuconvt.tensor_map import ITEMSIZES, STRIDE_BYTES, reads

NAMES = "correlate_wgmma of phases", "weight_gradient_tma of phases"
ELEMENTS_A_CLOCK, BYTES_A_CLOCK = 5, 15  # a multiprocessor's, for the copy of y
# The cost of the gradient of the weight relative to other kernels' estimates and, by bytes of an element, where y is
# channels-last, but not as copies read it. Fitted to 114 problems and layouts; of as many gradients of the input no
# factor was better.
COMPARED, COMPARED_OF_LAST = 1.3, {2: 0.6, 4: 0.8}


def with_phases_as_channels(geometry: Geometry) -> Geometry:
    """Return the gradients' problem without a stride, whose y has all phases as channels and no padding."""
    g = geometry
    kernel = triple(k // s for k, s in zip(g.kernel, g.stride, strict=True))
    none, ones = (0, 0, 0), (1, 1, 1)
    return replace(
        g,
        c_out=g.c_out * prod(g.stride),
        kernel=kernel,
        stride=ones,
        pad_before=none,
        pad_after=none,
        output_padding=none,
        out_extent=triple(x + k - 1 for x, k in zip(g.x_extent, kernel, strict=True)),
    )


def plan_correlate_of_phases(
    geometry: Geometry, dtype: str, layout: Layout, precision: str | None, device: Device, most: float = inf
) -> Plan | Refusal:
    """Propose the plan for y with its phases as channels; with `most`, also say where it would cost more."""
    copy = _copy_of_y(geometry, dtype)
    if isinstance(copy, str):
        return Refusal(NAMES[0], copy)
    g, read = with_phases_as_channels(geometry), replace(layout, out=copy.strides, out_aligned=True)
    plan = plan_correlate_wgmma(g, dtype, read, precision, device, most=most)
    if isinstance(plan, Refusal):
        return Refusal(NAMES[0], plan.reason)
    turn = _turn(geometry, layout, copy, dtype)
    return replace(
        plan,
        defines=(*plan.defines, *axis_macros(PHASES=geometry.stride), ("X_TURNED", 1)),
        cost=plan.cost + _clocks_of_copy(copy, dtype),
        packed_a_thread=4 * (2 if precision == "tf32x3" else 1) // plan.tile.joined,  # one piece, of each part
        workspace_bytes=copy.bytes(ITEMSIZES[dtype]),
        turned=(-1, 0),
        turns=turn,
        turn_blocks=turn[-1],
    )


def plan_weight_gradient_of_phases(
    geometry: Geometry, dtype: str, layout: Layout, precision: str | None, device: Device
) -> Plan | Refusal:
    """Propose the plan for y with its phases as channels, or say why there is none."""
    copy = _copy_of_y(geometry, dtype)
    if isinstance(copy, str):
        return Refusal(NAMES[1], copy)
    g, read = with_phases_as_channels(geometry), replace(layout, out=copy.strides, out_aligned=True)
    plan = plan_images(g, dtype, read, precision, device, phases=prod(geometry.stride))
    if isinstance(plan, Refusal):
        return Refusal(NAMES[1], plan.reason)
    size = plan.workspace_bytes + copy.bytes(ITEMSIZES[dtype])
    if size > MAX_WORKSPACE_BYTES:
        return Refusal(NAMES[1], f"the workspace would have {size} bytes, more than {MAX_WORKSPACE_BYTES}")
    turn = _turn(geometry, layout, copy, dtype)
    of_x = plan.turns[:TURN_FIELDS] or (0,) * TURN_FIELDS
    y = (geometry.n, geometry.c_out, *geometry.out_extent)
    is_read = reads(layout.out, y, layout.out_aligned, ITEMSIZES[dtype])
    compared = COMPARED_OF_LAST[ITEMSIZES[dtype]] if layout.out_channels_last and not is_read else COMPARED
    return replace(
        plan,
        defines=(*plan.defines, *axis_macros(PHASES=geometry.stride)),
        cost=compared * (plan.cost + _clocks_of_copy(copy, dtype)),
        workspace_bytes=size,
        turned=(plan.turned[0] if plan.turned else -1, plan.workspace_bytes),
        turns=(*of_x, *turn),
        turn_blocks=plan.turn_blocks + turn[-1],
    )


def _copy_of_y(geometry: Geometry, dtype: str) -> Array | str:
    """Return the copy, or why there is none."""
    if dtype not in ITEMSIZES:
        return f"copies hold no {dtype}"
    if not are_alike(geometry.kernel, geometry.stride, geometry.dilation):
        return "needs a kernel that is a multiple of a stride, without dilation"
    g = with_phases_as_channels(geometry)
    if g.n * prod(g.x_extent) == 0:
        return "nothing to copy"
    copy = channels_last((g.n, g.c_out, *g.out_extent), ITEMSIZES[dtype])
    if (size := copy.bytes(ITEMSIZES[dtype])) > MAX_WORKSPACE_BYTES:
        return f"the copy of y takes {size} bytes, more than {MAX_WORKSPACE_BYTES}"
    return copy


def _turn(geometry: Geometry, layout: Layout, copy: Array, dtype: str) -> Ints:
    """Return ``struct Turn`` for the copy."""
    n, channels, *extents = copy.extents
    pieces = -(-channels // (STRIDE_BYTES // ITEMSIZES[dtype]))
    blocks = -(-n * prod(extents) * pieces // TURN_THREADS)
    padding = geometry.pad_before
    return (n, channels, *extents, *layout.out, 0, 0, geometry.groups, *geometry.out_extent, *padding, blocks)


def _clocks_of_copy(copy: Array, dtype: str) -> float:
    elements = copy.extents[0] * copy.strides[0]
    return elements / ELEMENTS_A_CLOCK + 2 * copy.bytes(ITEMSIZES[dtype]) / BYTES_A_CLOCK
