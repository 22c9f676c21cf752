"""The pictures, as PNG: a roofline and a bar chart of a recorded `Result`. matplotlib is needed for these alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cuconvt.bench.cases import PRECISIONS
from cuconvt.bench.report import summary
from cuconvt.bench.result import Cell, Result
from cuconvt.errors import MissingDependencyError

# Distinguishable also without colour vision.
COLOURS = {
    "ieee": "#000000",
    "tf32x3": "#0072B2",
    "tf32": "#56B4E9",
    "float16": "#E69F00",
    "bfloat16": "#D55E00",
    "float64": "#009E73",
}
MARKERS = {"NCDHW": "o", "NDHWC": "s"}
KINDS = ("roofline", "bars")


def require_matplotlib() -> None:
    """Raise MissingDependencyError where there is no matplotlib."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise MissingDependencyError("--plot needs matplotlib: pip install matplotlib") from error


def write_plots(result: Result, file: Path) -> list[Path]:
    """Write both pictures beside `file`, with -roofline and -bars before its suffix, and return their paths.

    The bar chart is left out where nothing was compared with PyTorch.
    """
    require_matplotlib()
    paths = [_write(_roofline(result), picture(file, "roofline"))]
    if any(cell.ratio for cell in result.cells):
        paths.append(_write(_bars(result), picture(file, "bars")))
    return paths


def picture(file: Path, kind: str) -> Path:
    """Return where a kind of picture goes."""
    return file.with_name(f"{file.stem}-{kind}.png")


def _write(figure: Any, path: Path) -> Path:
    figure.savefig(path, dpi=150)
    return path


def _figure(result: Result, title: str, width: float, height: float) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots()
    axes.set_title(f"{title}\n{summary(result)}", fontsize=7, wrap=True)
    return figure, axes


def _roofline(result: Result) -> Any:
    figure, axes = _figure(result, "Achieved rate against arithmetic intensity", 8, 6)
    cells = [cell for cell in result.cells if cell.time]
    intensities = [cell.flops / cell.bytes for cell in cells]
    low, high = min(intensities) / 2, max(intensities) * 2
    precisions = list(dict.fromkeys(cell.precision for cell in cells))
    for name in precisions:
        precision = PRECISIONS[name]
        roof = result.ceilings.matmul[precision.ceiling] / precision.products
        ridge = roof / result.ceilings.copy
        # A line from the memory bound's slope over the ridge to the arithmetic bound.
        points = sorted({low, min(max(ridge, low), high), high})
        rates = [min(roof, intensity * result.ceilings.copy) / 1e12 for intensity in points]
        axes.plot(points, rates, color=COLOURS[name], linewidth=1, label=f"{name}, at most {roof / 1e12:.3g} TFLOP/s")
    for cell, intensity in zip(cells, intensities, strict=True):
        axes.plot(
            intensity,
            _tflops(cell),
            MARKERS[cell.layout],
            color=COLOURS[cell.precision],
            markersize=5,
            markerfacecolor="none" if cell.layout == "NDHWC" else COLOURS[cell.precision],
        )
    for name, cell in {cell.label: cell for cell in sorted(cells, key=_tflops)}.items():
        spot = (cell.flops / cell.bytes, _tflops(cell))
        axes.annotate(name, spot, xytext=(1, 4), textcoords="offset points", fontsize=6, rotation=50)
    for layout in dict.fromkeys(cell.layout for cell in cells):
        fill = "none" if layout == "NDHWC" else "grey"
        axes.plot([], [], MARKERS[layout], color="grey", markerfacecolor=fill, label=layout)
    axes.set(
        xscale="log",
        yscale="log",
        xlim=(low, high),
        xlabel="flops a byte (operands and result moved once)",
        ylabel="TFLOP/s",
    )
    axes.margins(y=0.12)  # room for the names of the highest points
    axes.grid(which="both", alpha=0.2)
    axes.legend(fontsize=7, loc="lower right")
    return figure


def _tflops(cell: Cell) -> float:
    assert cell.time
    return cell.flops / (1e-3 * cell.time.median) / 1e12


def _bars(result: Result) -> Any:
    cells = [cell for cell in result.cells if cell.ratio]
    labels = list(dict.fromkeys(cell.label for cell in cells))
    kinds = list(dict.fromkeys((cell.precision, cell.layout) for cell in cells))
    figure, axes = _figure(result, "PyTorch's best time over cuconvt's", max(6.0, 0.8 * len(labels) + 2), 4.5)
    width = 0.8 / len(kinds)
    for index, (precision, layout) in enumerate(kinds):
        members = [cell for cell in cells if (cell.precision, cell.layout) == (precision, layout)]
        axes.bar(
            [labels.index(cell.label) - 0.4 + (index + 0.5) * width for cell in members],
            [ratio - 1 for ratio in (cell.ratio for cell in members) if ratio],
            width,
            bottom=1,  # up from 1 where cuconvt is faster, down where PyTorch is
            color=COLOURS[precision],
            alpha=0.6 if layout == "NDHWC" else 1.0,
            label=f"{precision} {layout}",
        )
    axes.axhline(1, color="black", linewidth=1)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(lambda value, position: f"{value:g}")
    axes.set_xticks(range(len(labels)), labels, rotation=30, ha="right", fontsize=7)
    axes.set_ylabel("torch / cuconvt")
    axes.grid(axis="y", which="both", alpha=0.2)
    axes.margins(x=0.01)
    figure.legend(fontsize=7, ncols=4, loc="outside lower center")
    return figure
