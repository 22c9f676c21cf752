"""The command line: ``python -m cuconvt <command>``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from cuconvt.bench.command import add_command as add_bench
from cuconvt.tune import add_command as add_tune


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line and run the command that it names."""
    parser = argparse.ArgumentParser(
        prog="python -m cuconvt", description="Tools of the transposed-convolution library."
    )
    commands = parser.add_subparsers(title="commands", dest="command", required=True)
    info = commands.add_parser("info", help="print versions, GPUs, folders and what is missing")
    info.set_defaults(run=_info)
    add_bench(commands)
    add_tune(commands)
    options = parser.parse_args(arguments)
    options.run(options)


def _info(options: argparse.Namespace) -> None:
    from cuconvt.info import report

    print(report())


if __name__ == "__main__":
    main()
