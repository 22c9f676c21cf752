"""Plans of the kernel for weight gradients of wide layers, ``kernels/weight_gradient_tma.cu``."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from math import gcd, prod

from cuconvt.geometry import Geometry
from cuconvt.plan import (
    DTYPE_CODES,
    PATCHES,
    PRECISION_CODES,
    Device,
    Ints,
    Layout,
    Plan,
    Refusal,
    axis_macros,
    problem_parameters,
    refuse_steps,
    refuse_tensor_cores,
    round_up,
)
from cuconvt.plan_search import cheapest_tile, remembered
from cuconvt.plan_single import without_taps
from cuconvt.plan_turn import TURN_FIELDS, TURN_THREADS
from cuconvt.plan_views import batch_as_depth
from cuconvt.plan_weight_gradient_boxes import (
    BESIDE_SUMS,
    FEW_PARTS,
    MAX_WORKSPACE_BYTES,
    OF_TURNED,
    are_compared_by_size,
    shares,
    tile_of_size,
)
from cuconvt.plan_weight_gradient_tma_sides import Sides
from cuconvt.plan_weight_gradient_tma_work import (
    ALIGNMENT,
    COPIER_REGISTERS,
    LARGEST_BOX,
    ROWS,
    Shape,
    Tile,
    Work,
    ceil_div,
)
from cuconvt.tensor_map import ITEMSIZES, MAX_STEP, STRIDE_BYTES

NAME = "weight_gradient_tma"
MAX_LAUNCHES = 64
MOST_CLOCKS = 1.3  # of a launch, relative to what it took with any number of sums
MAX_TILES_N = 24  # times 8 columns of a product
MAX_ROWS = {2: 256, 4: 192}  # of channels of a tile, by bytes of an element
MAX_TAPS = 4, 4, 8  # of a tile along D, H, W
MAX_UNITS = 12  # of a worker
MAX_IDLE = {64: 1.3, 16: 1.5}  # rows of all units, relative to those of use, by rows that have one tap
SUMS_OF_PATCH = 128  # of each tap, that a block of the second pass adds
# Workers of a block, in warpgroups, and blocks on a multiprocessor.
KINDS = ((2, 1), (1, 2), (1, 1), (3, 1))
OTHER_REGISTERS = 40, 44, 56  # of a worker, besides sums, by parts
PARTS = {"tf32": 1, "tf32x3": 2}


def prepared(geometry: Geometry, layout: Layout, box: Ints, boxes: Ints, tiles: int, tile: Tile) -> Ints:
    """Return the parameters of the kernel that turns arrays for x of float32, in such boxes and tiles of channels."""
    g, (of_n, of_channel, *of_axes) = geometry, layout.x
    strides = ((of_n, g.n), (of_channel, g.c_in), *zip(of_axes[:2], g.x_extent[:2], strict=True))
    distances = (*(stride for stride, extent in strides if extent > 1), g.x_extent[2])
    wide = layout.x_aligned and of_axes[2] == 1 and not box[2] % 8 and not any(distance % 4 for distance in distances)
    blocks = ceil_div(tiles * g.n * prod(boxes) * prod(box) // 8 * tile.channels_in, TURN_THREADS)
    of_x = g.n, g.c_in_per_group, *g.x_extent, *layout.x, 0
    return (*of_x, int(wide), g.groups, *box, *boxes, blocks)


class NoRoom(Refusal):
    """The workspace would be larger than it may be; with fewer images it may not."""


def plan_weight_gradient_tma(
    geometry: Geometry, dtype: str, layout: Layout, precision: str | None, device: Device, tile: Tile | None = None
) -> Plan | Refusal:
    """Propose the tile with the least estimated time, or a given one, or say why the kernel does not serve.

    Where the workspace of all images would be larger than it may be, they are taken in several launches.
    """
    geometry, layout = without_taps(geometry, layout)
    whole = plan = plan_images(geometry, dtype, layout, precision, device, tile)
    for launches in range(2, min(geometry.n, MAX_LAUNCHES) + 1):
        if not isinstance(plan, NoRoom):
            break
        if geometry.n % launches == 0:
            images = dataclasses.replace(geometry, n=geometry.n // launches)
            plan = plan_images(images, dtype, layout, precision, device, tile, are_all=False)
            if isinstance(plan, Plan):
                return _in_launches(plan, launches, images, layout, ITEMSIZES[dtype])
    return whole


def _in_launches(plan: Plan, launches: int, images: Geometry, layout: Layout, itemsize: int) -> Plan:
    """Return the plan of all launches from that of the first one."""
    steps = (itemsize * images.n * strides[0] for strides in (layout.x, layout.out))
    return dataclasses.replace(
        plan,
        cost=launches * plan.cost,
        clocks=launches * plan.clocks,
        images=(launches, *steps),
        problem_of_next=(*plan.problem[:PATCHES], 1, *plan.problem[PATCHES + 1 :]),
    )


def plan_images(
    geometry: Geometry,
    dtype: str,
    layout: Layout,
    precision: str | None,
    device: Device,
    tile: Tile | None = None,
    are_all: bool = True,
    phases: int = 1,
) -> Plan | Refusal:
    """Propose a plan for images that are taken at once: all, or some, whose sums the next ones are added to.

    So many `phases` of y are channels of each channel.
    """
    if reason := _refuse(geometry, dtype, precision, device):
        return Refusal(NAME, reason)
    geometry, layout = batch_as_depth(geometry, layout)
    sides = Sides.of(geometry, layout, PARTS[precision or "tf32x3"] if dtype == "float32" else 0)
    sides = sides._replace(phases=phases)
    g, itemsize = sides.geometry, sides.itemsize
    if g.n * prod(g.x_extent) == 0:
        return Refusal(NAME, "nothing to copy")
    if max(_reach(g)) >= 2**31:
        return Refusal(NAME, "positions beyond 2**31 are more than it counts")
    arrays = (sides.x, sides.turn_x), (sides.y, sides.turn_y)
    of_x, of_y = (array.bytes(itemsize) if turn is not None else 0 for array, turn in arrays)
    turned = of_x + of_y
    room = MAX_WORKSPACE_BYTES - turned
    if room < 0:
        return NoRoom(NAME, f"turned arrays take {turned} bytes, more than {MAX_WORKSPACE_BYTES}")
    choices = []
    for way in (sides, sides.folded()):
        if way is None or (tile is not None and tile.fold != way.fold):
            continue
        work = Work(Shape.of(way))
        best = tile or choose_tile(work.shape, device)
        cost = None if best is None else work.typical_cost(best, device)
        if best is not None and cost is not None:
            choices.append((cost, way, work, best))
    if not choices:
        return Refusal(NAME, "no box with what its taps reach is one that is copied to shared memory")
    given = tile
    cost, sides, work, tile = min(choices, key=lambda choice: choice[0])
    g = sides.geometry
    if given is None:
        tile = tile_of_size(work, g, device, choose_tile_of_size) or tile
    choice = free = work.best_launch(tile, g.n, g.x_extent, device, 2**63)
    if free is not None and work.workspace_bytes(tile, g.n, g.x_extent, free) > room:
        choice = work.best_launch(tile, g.n, g.x_extent, device, room)
    if choice is None or free is None:
        return NoRoom(NAME, "tiles of weights, or their boxes, are more than it counts or has room for")
    if choice.clocks > MOST_CLOCKS * free.clocks:
        return NoRoom(NAME, f"sums of blocks take {4 * tile.values} bytes each")
    box, share, _ = choice
    is_one = are_all and work.has_one_part(tile, share, prod(box), device)
    stored_bytes = work.stored_bytes(tile) if is_one and work.has_one_tap(tile) else 0
    boxes = tuple(-(-x // b) for x, b in zip(g.x_extent, box, strict=True))
    maps = work.maps(tile, box, dtype, sides)
    turns = tuple(side.turn if side else () for side in (sides.turn_x, sides.turn_y))
    if sides.parts:
        of_x = work.prepared_bytes(tile, g.n * prod(boxes), prod(box))
        turns = prepared(g, layout, box, boxes, work.prepared_tiles(tile), tile), turns[1]
    defines = (
        ("DTYPE", DTYPE_CODES[dtype]),
        *((("PRECISION", PRECISION_CODES[precision]),) if sides.parts else ()),
        *axis_macros(KERNEL=g.kernel, STRIDE=g.stride, DILATION=g.dilation),
        ("WORKERS", tile.workers),
        ("ROWS_OF_X", tile.rows_of_x),
        ("TILES_M", tile.tiles_m),
        ("TILES_N", tile.tiles_n),
        *axis_macros(TAPS=tile.taps, APART=tile.apart),
        ("FOLD", tile.fold),
        *((("ONE_PART", 1),) if is_one else ()),
        ("MIN_BLOCKS", tile.min_blocks),
        ("WORKER_REGISTERS", tile.registers),
        ("COPIER_REGISTERS", COPIER_REGISTERS),
    )
    clocks = 0.0
    if sides.turn_y is not None and are_compared_by_size(geometry, layout, itemsize):
        of_launch, of_turning, beside = OF_TURNED[itemsize]
        turning = work.turning_clocks() * g.n * prod(g.x_extent) / device.multiprocessors
        clocks = of_launch * choice.clocks + of_turning * turning + beside
    patches = work.tiles_of_channels(tile) * tile.tiles_m * tile.rows // 16 * tile.tiles_n
    together = work.patches_together(tile, patches, device) if share.parts <= FEW_PARTS else 0
    stages = work.stages(tile, work.stage_bytes(tile, box), device)
    parts_bytes = 0 if stored_bytes else (2 if is_one else 4) * tile.values * share.slots
    turned_x = parts_bytes if turns[0] else -1
    turned_y = parts_bytes + of_x if turns[1] else -1
    return Plan(
        kernel=NAME,
        defines=defines,
        grid=share.blocks,
        block=128 * (tile.workers + 1),
        shared_bytes=ALIGNMENT + max(stages * work.stage_bytes(tile, box), stored_bytes),
        problem=problem_parameters(
            g, layout, (*boxes, 1), out_vector=together, box=(*box, stages, 0, 0, share.of_block, 0, 0, 0, 0)
        ),
        cost=work.compared(sides.y_is_loose) * (cost + work.turning_clocks()) * g.n * prod(g.x_extent),
        workspace_bytes=parts_bytes + of_x + of_y,
        sums=0 if stored_bytes else patches * SUMS_OF_PATCH * prod(g.kernel),
        sums_a_block=SUMS_OF_PATCH * (prod(g.kernel) * together or 1),
        maps=maps,
        turned=(turned_x, turned_y) if any(turns) else (),
        turns=tuple(number for turn in turns for number in (turn or (0,) * TURN_FIELDS)) if any(turns) else (),
        turn_blocks=sum(turn[-1] for turn in turns if turn),
        turn_shared_bytes=max(side.shared_bytes if side else 0 for side in (sides.turn_x, sides.turn_y)),
        clocks=clocks,
        tile=tile,
    )


def _refuse(geometry: Geometry, dtype: str, precision: str | None, device: Device) -> str | None:
    if reason := refuse_tensor_cores(dtype, precision, device, wgmma=True):
        return reason
    copied = STRIDE_BYTES // ITEMSIZES[dtype]  # a copy that starts at others is an illegal instruction
    per_group = geometry.c_in_per_group, geometry.c_out_per_group
    if geometry.groups > 1 and any(channels % copied for channels in per_group[dtype == "float32" :]):
        return f"copies start at multiples of {copied} channels, groups have {per_group[0]} and {per_group[1]}"
    return refuse_steps(geometry)


def _reach(geometry: Geometry) -> Iterator[int]:
    """Yield the largest positions along each axis."""
    g = geometry
    for x, s, k, d, o, p in zip(g.x_extent, g.stride, g.kernel, g.dilation, g.out_extent, g.pad_before, strict=True):
        yield max((x + LARGEST_BOX) * s + k * d, o, p)


@remembered(Tile)
def choose_tile(shape: Shape, device: Device) -> Tile | None:
    """Return the best tile for typical extents."""
    work = Work(shape)
    return work.best_tile(((work.least_cost(tile, device), tile) for tile in tiles(work)), device)


@remembered(Tile)
def choose_tile_of_size(shape: Shape, n: int, extents: Ints, device: Device) -> Tile | None:
    """Return the best tile for so many positions: the parts that blocks sum, and the blocks, are many or few."""
    work = Work(shape)
    # The first bounds are alike, so that of tiles that take the same it is the first one.
    alike = ((0.0, tile) for tile in tiles(work))
    found = cheapest_tile(
        alike,
        lambda tile: work.least_clocks(tile, n, extents, device),
        lambda tile: work.clocks_of_size(tile, n, extents, device),
    )
    return None if found is None else found[0]


def tiles(work: Work) -> Iterator[Tile]:
    """Yield the tiles that a problem may use."""
    s = work.shape
    if max(s.stride) > MAX_STEP:
        return
    axes = [_taps_of(*axis) for axis in zip(s.kernel, s.stride, s.dilation, MAX_TAPS, strict=True)]
    of_tap, of_rows = ROWS[s.itemsize], MAX_ROWS[s.itemsize]
    for rows_of_x in (0, 1) if not s.parts else (0,):
        rows, columns = (s.c_in, s.c_out) if rows_of_x else (s.c_out, s.c_in)
        for tiles_m, tiles_n in itertools.product(shares(-(-rows // of_tap), of_rows // of_tap), _columns(columns)):
            for chosen in itertools.product(*axes):
                taps, apart = zip(*chosen, strict=True)
                for workers, blocks in KINDS:
                    tile = Tile(workers, rows_of_x, tiles_m, tiles_n, taps, apart, blocks, s.fold, of_tap)
                    if is_possible(tile, s.parts):
                        yield tile


def is_possible(tile: Tile, parts: int = 0) -> bool:
    """Whether a tile's workers have registers for its sums, and few of them nothing to do."""
    of_use = prod(tile.taps) * tile.tiles_m * tile.rows
    return (
        (tile.workers * tile.units == 1 or 64 * tile.workers * tile.units <= MAX_IDLE[tile.rows] * of_use)
        and tile.units <= MAX_UNITS
        and max(parts, 1) * tile.sums + OTHER_REGISTERS[parts] <= tile.registers
        and 4 * tile.tiles_n + BESIDE_SUMS <= tile.at_start
    )


def _columns(channels: int) -> list[int]:
    """Return eights of columns of a tile: 64 are copied at a time."""
    whole = [eights for eights in (8, 16, 24) if 8 * eights < round_up(channels, 64)]
    return [*whole, ceil_div(channels, 8)] if channels <= 8 * MAX_TILES_N else whole


def _taps_of(kernel: int, stride: int, dilation: int, most: int) -> list[tuple[int, int]]:
    """Return the taps of a tile along an axis, and how far they are apart, as they read elements with one remainder.

    Those of a single tap need not follow remainders, of which some have fewer taps than others.
    """
    step = stride // gcd(stride, dilation)
    return [(share, step if share > 1 else 1) for share in shares(-(-kernel // step), most)]
