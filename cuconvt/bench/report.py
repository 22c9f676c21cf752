"""The tables: plain text for a terminal, Markdown for a README. Pure, from a recorded `Result`."""

from __future__ import annotations

from collections.abc import Sequence

from cuconvt.bench.result import Cell, Mean, Result, means

BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"
_HEAD = (
    *(
        "case",
        "precision",
        "layout",
        "kernel",
        "ms",
        "quartiles",
        "floor ms",
        "bound by",
        "/floor",
        "torch ms",
        "torch/cuconvt",
    ),
    *("band", "error", "/torch's", "extra MB", "torch's"),
)
_LEFT = 4  # columns of text, aligned left


def table(result: Result) -> str:
    """Return everything that a run found, as aligned plain text."""
    lines = [summary(result), _ceilings(result), ""]
    lines += in_columns([_HEAD, *map(_row, result.cells)], _LEFT)
    problems = [
        f"{cell.label} {cell.precision} {cell.layout}: {text}"
        for cell in result.cells
        for text in (cell.problem, cell.torch_problem and f"torch: {cell.torch_problem}")
        if text
    ]
    lines += ["", *problems] if problems else []
    hosts = [
        f"{cell.label} {cell.precision} {cell.layout}: host time a call {cell.host_us:.1f} us"
        + (f", torch {cell.torch_host_us:.1f} us" if cell.torch_host_us is not None else "")
        for cell in result.cells
        if cell.host_us is not None
    ]
    lines += ["", *hosts] if hosts else []
    groups = means(result.cells)
    if any(every for _, every in groups.values()):
        rows = [(*group, _mean(kernelbench), _mean(every)) for group, (kernelbench, every) in groups.items()]
        lines += ["", "geometric means of torch/cuconvt (cells)"]
        lines += in_columns([("operation", "precision", "layout", "KernelBench 3-D", "all"), *rows], 3)
    return "\n".join(lines)


def summary(result: Result) -> str:
    """Return in one line where, when and with what a run was measured."""
    machine = result.machine
    named = [f"{name} {machine[key]}" for key, name in _VERSIONS.items() if machine.get(key)]
    commit = machine.get("commit")
    if commit:
        named.append(f"commit {commit[:12]}{' with changes' if machine.get('dirty') else ''}")
    return ", ".join([machine.get("gpu") or "unknown GPU", *named, (machine.get("date") or "undated")[:10]])


_VERSIONS = {
    "driver": "driver",
    "cuda_runtime": "CUDA",
    "nvrtc": "NVRTC",
    "cudnn": "cuDNN",
    "torch": "torch",
    "cupy": "CuPy",
    "cuconvt": "cuconvt",
}


def readme_table(result: Result) -> str:
    """Return the README's table: a row a case (and gradient), a column a precision, always the slower layout."""
    precisions = list(dict.fromkeys(cell.precision for cell in result.cells))
    labels = list(dict.fromkeys(cell.label for cell in result.cells))
    rows: list[Sequence[str]] = [("case", *precisions), ("---",) * (len(precisions) + 1)]
    worst = {key: _slowest(result.cells, *key) for key in ((label, p) for label in labels for p in precisions)}
    rows += [(label, *(_readme_cell(worst[label, precision]) for precision in precisions)) for label in labels]
    groups = means(result.cells)
    for operation in dict.fromkeys(cell.operation for cell in result.cells):
        suffix = "" if operation == "forward" else f", {operation}"
        for title, index in (("geometric mean, KernelBench 3-D", 0), ("geometric mean, all", 1)):
            lowest = [
                _lowest([pair[index] for group, pair in groups.items() if group[:2] == (operation, precision)])
                for precision in precisions
            ]
            if any(lowest):
                rows.append((title + suffix, *lowest))
    lines = [
        f"Milliseconds in the slower of both layouts (torch's best / cuconvt; cuconvt / floor). {summary(result)}.",
        _ceilings(result) + ".",
        "",
        *(f"| {' | '.join(row)} |" for row in rows),
    ]
    return "\n".join(lines)


def insert(text: str, block: str) -> str:
    """Replace what stands between the two markers of a README.

    Raises
    ------
    ValueError
        If the text does not hold each marker once, the first before the second.
    """
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end or BEGIN in rest or END in before + after:
        raise ValueError(f"the text must hold {BEGIN} and, after it, {END}, each once")
    return f"{before}{BEGIN}\n{block}\n{END}{after}"


def _ceilings(result: Result) -> str:
    rates = ", ".join(f"{kind} {rate / 1e12:.4g}" for kind, rate in result.ceilings.matmul.items())
    return f"Ceilings of the run: copy {result.ceilings.copy / 1e9:.0f} GB/s, matmul {rates} TFLOP/s"


def _row(cell: Cell) -> tuple[str, ...]:
    head = (cell.label, cell.precision, cell.layout, cell.kernel)
    best, band = cell.torch_best, cell.ratio_band
    error = _figure(cell.error, ".1e"), _figure(cell.error_ratio, ".2f")
    extra = _megabytes(cell.extra_bytes), _megabytes(cell.torch_extra_bytes)
    if cell.status != "ok":
        shown = (cell.status.upper(), "", _ms(cell.floor_ms), cell.bound, "", _ms(best.median) if best else "", "", "")
        return (*head, *shown, *error, *extra)
    return (
        *head,
        _ms(cell.time.median) if cell.time else "",
        f"{_ms(cell.time.low)}-{_ms(cell.time.high)}" if cell.time else "",
        _ms(cell.floor_ms),
        cell.bound,
        _figure(cell.over_floor, ".2f"),
        _ms(best.median) if best else "",
        _figure(cell.ratio, ".2f"),
        f"{band[0]:.2f}-{band[1]:.2f}" if band else "",
        *error,
        *extra,
    )


def _readme_cell(cell: Cell | None) -> str:
    if cell is None:
        return ""
    if cell.time is None:
        return cell.status.upper()
    ratio = f"{cell.ratio:.2f}x; " if cell.ratio is not None else ""
    return f"{_ms(cell.time.median)} ({ratio}{cell.over_floor:.2f})"


def _lowest(layouts: Sequence[Mean | None]) -> str:
    """Return the lower of the layouts' means: the README shows the slower layout for the cases too."""
    ratios = [mean.ratio for mean in layouts if mean]
    return f"{min(ratios):.2f}x" if ratios else ""


def _slowest(cells: Sequence[Cell], label: str, precision: str) -> Cell | None:
    """Return the cell of a label and precision that looks worst: one without a time, else the slowest."""
    members = [cell for cell in cells if (cell.label, cell.precision) == (label, precision)]
    return max(members, key=lambda cell: cell.time.median if cell.time else float("inf"), default=None)


def in_columns(rows: Sequence[Sequence[str]], left: int) -> list[str]:
    """Return lines of text whose columns have one width each, so many of them flush left and the others right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    aligned = []
    for row in rows:
        columns = [
            text.ljust(width) if index < left else text.rjust(width)
            for index, (text, width) in enumerate(zip(row, widths, strict=True))
        ]
        aligned.append("  ".join(columns).rstrip())
    return aligned


def _ms(value: float) -> str:
    """Three decimals, as many as microseconds need; four below 10 us."""
    return f"{value:.4f}" if value < 0.01 else f"{value:.3f}"


def _figure(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _megabytes(value: int | None) -> str:
    return "" if value is None else f"{value / 1e6:.1f}"


def _mean(mean: Mean | None) -> str:
    return f"{mean.ratio:.2f} ({mean.cells})" if mean else ""
