"""Plans of correlations in rows whose y is made channels-last before, for ``kernels/correlate_wgmma.cu``.

Boxes of channels-last y come by bulk tensor copies, while rows are turned by threads of the kernel itself, once for
each block that reads them. To turn y before costs its bytes twice, of which those written stay in L2 where y is small,
and no more than a few microseconds, since the kernel that packs the weights does it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import inf

from cuconvt.geometry import Geometry
from cuconvt.plan import Device, Ints, Layout, Plan, Refusal
from cuconvt.plan_correlate_wgmma import plan_correlate_wgmma
from cuconvt.plan_phase_wgmma_work import FEWEST_TURNED
from cuconvt.plan_turn import Array, channels_last, reached, turn_of
from cuconvt.plan_weight_gradient import MAX_WORKSPACE_BYTES
from cuconvt.tensor_map import ITEMSIZES, reads

NAME = "correlate_wgmma of turned y"
FEWEST_CHANNELS = 16  # of y: fewer are padded to whole pieces, and kernels for few channels are faster
# Up to so many bytes of turned y, by those of an element, stay in an H200's L2: half of it in float32, less in 16
# bits, whose rows are turned faster where they are read.
SMALL = {2: 10 * 2**20, 4: 24 * 2**20}
FREE_BYTES = 2**20  # of small y, that are turned in the time that weights are packed
# Read and written in a clock of a multiprocessor, more than memory's: blocks of a small problem wait longer than
# estimates say.
TURNED_BYTES_A_CLOCK = 40
# Of other y, what the correlation takes, times its estimate, and a byte of y, in clocks: by bytes of an element and
# products, so that costs compare with those of kernels that read rows; fitted to 121 problems on an H100.
LARGE = {(2, 1): (2.35, 0.174), (4, 1): (2.35, 0.098), (4, 3): (1.1, 0.152)}
SMALL_OF_SPLIT = 1.12  # of small y, what is split for 3xTF32
# Of y whose rows are not aligned, which other kernels read slowly: what the correlation takes, times its estimate, and
# a byte beyond the first 4 MB, by bytes of an element; fitted to 61 problems of up to 250 MB on an H200.
COST_OF_LOOSE, LOOSE_FREE_BYTES = {2: (1.4, 0.06), 4: (1.0, 0.03)}, 4 * 2**20
LOOSE_OF_FEW_AXES = 32 * 2**20  # bytes of such y up to which this holds with one or two axes
# Without a stride: the same beside kernels of transposed convolutions, by bytes of an element and products, and a byte
# beyond the first 16 MB; fitted to 74 problems of up to 153 MB on an H200.
UNSTRIDED, UNSTRIDED_FREE_BYTES = {(2, 1): (1.0, 0.15), (4, 1): (1.35, 0.4), (4, 3): (1.2, 0.4)}, 16 * 2**20
# That of `phase_rows` is more optimistic: of 85 problems it was faster in those where this still leaves it less.
ROWS_COMPARED = 1.12


def plan_correlate_turning(
    geometry: Geometry,
    dtype: str,
    layout: Layout,
    precision: str | None,
    device: Device,
    most: float = inf,
    unstrided: bool = False,
) -> Plan | Refusal:
    """Propose the plan for channels-last y, or say why y is not turned; with `most`, also where it would cost more.

    `unstrided` says that there is no stride, and that its cost will be compared with those of transposed convolutions.
    """
    if precision == "ieee" or dtype not in ITEMSIZES:
        return Refusal(NAME, f"serves tensor cores' precisions, got {precision or dtype}")
    if geometry.c_out < FEWEST_CHANNELS:
        return Refusal(NAME, f"serves at least {FEWEST_CHANNELS} channels of y")
    itemsize, y = ITEMSIZES[dtype], Array((geometry.n, geometry.c_out, *geometry.out_extent), layout.out)
    if reads(y.strides, y.extents, layout.out_aligned, itemsize):
        return Refusal(NAME, "bulk tensor copies bring y as it is")
    geometry, y, first = reached(geometry, y)
    if (size := turned_y(geometry, dtype).bytes(itemsize)) > MAX_WORKSPACE_BYTES:
        return Refusal(NAME, f"turned y takes {size} bytes, more than {MAX_WORKSPACE_BYTES}")

    def of_turned(layout: Layout) -> Plan | Refusal:
        return plan_correlate_wgmma(geometry, dtype, layout, precision, device, most=most, sized=True)

    return turning(geometry, dtype, replace(layout, out=y.strides), precision, of_turned, first, unstrided)


def plan_unstrided(
    plan: Plan, geometry: Geometry, dtype: str, layout: Layout, precision: str | None, device: Device
) -> Plan:
    """Return the plan that a correlation without a stride has as a transposed convolution, or one of its own.

    That one may have y turned, where it costs less, or a tile that suits the size, which a forward has not.
    """
    if plan.kernel == "correlate_wgmma":
        other = plan_correlate_wgmma(geometry, dtype, layout, precision, device, sized=True)
        if isinstance(other, Refusal) or other.tile == plan.tile:
            return plan
        return replace(other, cost=plan.cost, refused=plan.refused)
    cost = plan.cost * (ROWS_COMPARED if plan.kernel == "phase_rows" else 1)
    other = _plan_turned(geometry, dtype, layout, precision, device, cost)
    if isinstance(other, Refusal) or other.cost >= cost:
        reason = other.reason if isinstance(other, Refusal) else f"cost {other.cost:.3g} against {cost:.3g}"
        return replace(plan, refused=(*plan.refused, f"{NAME}: {reason}"))
    return replace(other, refused=(*plan.refused, f"{plan.kernel}: cost {cost:.3g} against {other.cost:.3g}"))


def _plan_turned(
    geometry: Geometry, dtype: str, layout: Layout, precision: str | None, device: Device, most: float
) -> Plan | Refusal:
    if geometry.groups > 1 or geometry.c_in < FEWEST_TURNED:
        return Refusal(NAME, f"serves one group and at least {FEWEST_TURNED} channels of a result without a stride")
    return plan_correlate_turning(geometry, dtype, layout, precision, device, most=most, unstrided=True)


def turning(
    geometry: Geometry,
    dtype: str,
    layout: Layout,
    precision: str | None,
    of_turned: Callable[[Layout], Plan | Refusal],
    first: int = 0,
    unstrided: bool = False,
) -> Plan | Refusal:
    """Return the plan of the layout that turned y has, with what turns it from its element `first` on."""
    itemsize, turned = ITEMSIZES[dtype], turned_y(geometry, dtype)
    plan = of_turned(replace(layout, out=turned.strides, out_aligned=True))
    if isinstance(plan, Refusal):
        return Refusal(NAME, plan.reason)
    if not plan.maps:
        return Refusal(NAME, "bulk tensor copies would not bring y")
    how, size = turn_of(Array(turned.extents, layout.out), first, layout.out_aligned, itemsize), turned.bytes(itemsize)
    products = 3 if precision == "tf32x3" else 1
    if unstrided:
        compared, a_byte = UNSTRIDED[itemsize, products]
        cost = compared * plan.cost + a_byte * max(0, size - UNSTRIDED_FREE_BYTES)
    else:
        is_loose = products == 1 and not how.aligned and (geometry.rank == 3 or size <= LOOSE_OF_FEW_AXES)
        cost = _cost(plan.cost, size, itemsize, products, is_loose)
    return replace(with_copy_of_y(plan, how.turn, size), cost=cost, turn_shared_bytes=how.shared_bytes)


def with_copy_of_y(plan: Plan, turn: Ints, size: int) -> Plan:
    """Return a plan that has a copy of y, of so many bytes, made before and reads that."""
    return replace(
        plan,
        defines=(*plan.defines, ("X_TURNED", 1)),
        workspace_bytes=size,
        turned=(-1, 0),
        turns=turn,
        turn_blocks=turn[-1],
    )


def _cost(cost: float, size: int, itemsize: int, products: int, is_loose: bool) -> float:
    """Return the cost of a plan together with that of turning so many bytes."""
    if is_loose:
        compared, a_byte = COST_OF_LOOSE[itemsize]
        return compared * cost + a_byte * max(0, size - LOOSE_FREE_BYTES)
    if size <= SMALL[itemsize]:
        compared = SMALL_OF_SPLIT if products > 1 else 1
        return compared * (cost + 2 * max(0, size - FREE_BYTES) / TURNED_BYTES_A_CLOCK)
    compared, a_byte = LARGE[itemsize, products]
    return compared * cost + a_byte * size


def turned_y(geometry: Geometry, dtype: str) -> Array:
    """Return y as it is when it is turned."""
    return channels_last((geometry.n, geometry.c_out, *geometry.out_extent), ITEMSIZES[dtype])
