"""A Python with NumPy alone, for tests of what the library needs at least."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np


def link_numpy(folder: Path) -> None:
    """Make an installed NumPy visible in `folder`, without the packages beside it."""
    site = Path(np.__file__).parent.parent
    for name in ("numpy", "numpy.libs", f"numpy-{np.__version__}.dist-info"):
        if (site / name).exists():
            (folder / name).symlink_to(site / name)


def run_python(*arguments: str, cwd: Path, paths: Sequence[Path] = (), site: bool = True, **environment: str) -> str:
    """Run a Python in `cwd` with `paths` in front of its modules, without any installed package if not `site`."""
    process = subprocess.run(
        [sys.executable, *([] if site else ["-S"]), *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), **environment},
    )
    assert process.returncode == 0, process.stderr
    return process.stdout
