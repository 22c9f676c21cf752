"""Write the README's table, and on request the pictures, from a recorded run of ``python -m cuconvt bench --json``.

Run from anywhere, no GPU needed: ``python benchmarks/make_readme_table.py [--plot benchmarks/h200.png]``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cuconvt.bench.plot import write_plots
from cuconvt.bench.report import insert, readme_table
from cuconvt.bench.result import load

ROOT = Path(__file__).resolve().parent.parent


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks" / "h200.json", help="the recorded run")
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md", help="the file with the markers")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="also write FILE with -roofline and -bars")
    options = parser.parse_args(arguments)
    result = load(options.json)
    options.readme.write_text(insert(options.readme.read_text(), readme_table(result)))
    if options.plot:
        write_plots(result, options.plot)


if __name__ == "__main__":
    main()
