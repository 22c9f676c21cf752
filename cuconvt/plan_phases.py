"""Plans of gradients whose problem has no stride any more, since phases of y are channels.

Where all phases have equally many taps, a kernel of J times the stride without dilation, with k = j*s + r

    grad_x[n, ci, i] = sum over co, r, j of  y[n, co, s*(i + j) + r - padding] * weight[ci, co, j*s + r]

and the gradient of the weight likewise. With phase r of channel co as a channel of its own this is a correlation of
stride 1 with J taps. A copy of y has these channels last (`turn_phases` in ``kernels/turn.cuh``), as bulk tensor copies
or, in 3xTF32, copies of pieces read them. For strides that other kernels leave to the general ones, to copy y costs far
less than it saves.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf, prod
from typing import NamedTuple

from cuconvt.geometry import Geometry, triple
from cuconvt.phases import are_alike
from cuconvt.plan import Device, Ints, Layout, Plan, Refusal, axis_macros
from cuconvt.plan_copies import are_loose
from cuconvt.plan_correlate_turning import with_copy_of_y
from cuconvt.plan_correlate_wgmma import plan_correlate_wgmma
from cuconvt.plan_few_channels import FEW
from cuconvt.plan_turn import TURN_FIELDS, TURN_THREADS, Array, channels_last
from cuconvt.plan_views import with_phases_as_channels
from cuconvt.plan_weight_gradient import MAX_WORKSPACE_BYTES
from cuconvt.plan_weight_gradient_tma import plan_images
from cuconvt.tensor_map import ITEMSIZES, STRIDE_BYTES, reads

OF_INPUT, OF_WEIGHT = "correlate_wgmma of phases", "weight_gradient_tma of phases"
ELEMENTS_A_CLOCK, BYTES_A_CLOCK = 5, 15  # a multiprocessor's, for the copy of y
# The cost of the gradient of the weight relative to other kernels' estimates by bytes of an element, the second where y
# is channels-last, but not as copies read it: fitted to 114 problems and layouts and, for 16 bits, 17 of rows. That of
# the gradient of the input likewise, and for 3xTF32: fitted to 277.
COMPARED, COMPARED_OF_LAST = {2: 1.05, 4: 1.3}, {2: 0.6, 4: 0.8}
COMPARED_OF_INPUT, COMPARED_OF_SPLIT_INPUT = {2: 1.0, 4: 0.87}, 0.72
OF_GROUPS = 0.5  # of that, where channels-last groups of more than few channels of y are no 16-byte pieces


class Copied(NamedTuple):
    """A problem whose y is copied with its phases as channels."""

    geometry: Geometry  # without a stride
    layout: Layout  # with the copy for y
    turn: Ints  # ``struct Turn``
    size: int  # bytes
    clocks: float  # a multiprocessor's, to copy all

    @classmethod
    def of(cls, geometry: Geometry, dtype: str, layout: Layout) -> Copied | str:
        """Return it, or why there is none."""
        if dtype not in ITEMSIZES:
            return f"copies hold no {dtype}"
        if not are_alike(geometry.kernel, geometry.stride, geometry.dilation):
            return "needs a kernel that is a multiple of a stride, without dilation"
        if geometry.n * prod(geometry.x_extent) == 0:
            return "nothing to copy"
        g, itemsize = with_phases_as_channels(_unpadded(geometry)), ITEMSIZES[dtype]
        copy = channels_last((g.n, g.c_out, *g.out_extent), itemsize)
        if (size := copy.bytes(itemsize)) > MAX_WORKSPACE_BYTES:
            return f"the copy of y takes {size} bytes, more than {MAX_WORKSPACE_BYTES}"
        clocks = g.n * copy.strides[0] / ELEMENTS_A_CLOCK + 2 * size / BYTES_A_CLOCK
        read = replace(layout, out=copy.strides, out_aligned=True)
        return cls(g, read, _turn(geometry, layout, copy, itemsize), size, clocks)


def _unpadded(geometry: Geometry) -> Geometry:
    """Return the problem whose result has all that taps reach: what padding cuts off is zero in the copy."""
    g, none = geometry, (0, 0, 0)
    reached = triple((x - 1) * s + k for x, s, k in zip(g.x_extent, g.stride, g.kernel, strict=True))
    return replace(g, pad_before=none, pad_after=none, output_padding=none, out_extent=reached)


def _turn(geometry: Geometry, layout: Layout, copy: Array, itemsize: int) -> Ints:
    """Return ``struct Turn`` for the copy."""
    n, channels, *extents = copy.extents
    pieces = -(-channels // (STRIDE_BYTES // itemsize))
    blocks = -(-n * prod(extents) * pieces // TURN_THREADS)
    padding = geometry.pad_before
    return (n, channels, *extents, *layout.out, 0, 0, geometry.groups, *geometry.out_extent, *padding, blocks)


def plan_correlate_of_phases(
    geometry: Geometry, dtype: str, layout: Layout, precision: str | None, device: Device, most: float = inf
) -> Plan | Refusal:
    """Propose the plan for y with its phases as channels; with `most`, also say where it would cost more."""
    copied = Copied.of(geometry, dtype, layout)
    if isinstance(copied, str):
        return Refusal(OF_INPUT, copied)
    g, itemsize = geometry, ITEMSIZES[dtype]
    compared = COMPARED_OF_SPLIT_INPUT if precision == "tf32x3" else COMPARED_OF_INPUT[itemsize]
    are_more = g.groups > 1 and g.c_out_per_group > FEW
    if layout.out_channels_last and are_more and are_loose(g.c_out_per_group, itemsize):
        compared *= OF_GROUPS
    plan = plan_correlate_wgmma(copied.geometry, dtype, copied.layout, precision, device, most=most / compared)
    if isinstance(plan, Refusal):
        return Refusal(OF_INPUT, plan.reason)
    return replace(
        with_copy_of_y(_of_phases(plan, geometry), copied.turn, copied.size),
        cost=compared * (plan.cost + copied.clocks),
        packed_a_thread=4 * (2 if precision == "tf32x3" else 1) // plan.tile.joined,  # one piece, of each part
    )


def plan_weight_gradient_of_phases(
    geometry: Geometry, dtype: str, layout: Layout, precision: str | None, device: Device
) -> Plan | Refusal:
    """Propose the plan for y with its phases as channels, or say why there is none."""
    copied = Copied.of(geometry, dtype, layout)
    if isinstance(copied, str):
        return Refusal(OF_WEIGHT, copied)
    plan = plan_images(copied.geometry, dtype, copied.layout, precision, device, phases=prod(geometry.stride))
    if isinstance(plan, Refusal):
        return Refusal(OF_WEIGHT, plan.reason)
    size = plan.workspace_bytes + copied.size
    if size > MAX_WORKSPACE_BYTES:
        return Refusal(OF_WEIGHT, f"the workspace would have {size} bytes, more than {MAX_WORKSPACE_BYTES}")
    of_x = plan.turns[:TURN_FIELDS] or (0,) * TURN_FIELDS
    return replace(
        _of_phases(plan, geometry),
        cost=_compared(geometry, layout, ITEMSIZES[dtype]) * (plan.cost + copied.clocks),
        workspace_bytes=size,
        turned=(plan.turned[0] if plan.turned else -1, plan.workspace_bytes),
        turns=(*of_x, *copied.turn),
        turn_blocks=plan.turn_blocks + copied.turn[-1],
    )


def _of_phases(plan: Plan, geometry: Geometry) -> Plan:
    return replace(plan, defines=(*plan.defines, *axis_macros(PHASES=geometry.stride)))


def _compared(geometry: Geometry, layout: Layout, itemsize: int) -> float:
    y = (geometry.n, geometry.c_out, *geometry.out_extent)
    is_read = reads(layout.out, y, layout.out_aligned, itemsize)
    compared = COMPARED_OF_LAST if layout.out_channels_last and not is_read else COMPARED
    return compared[itemsize]
