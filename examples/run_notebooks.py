"""Execute the notebooks of this folder and write them back with their outputs: python examples/run_notebooks.py"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import nbformat
from ipykernel.kernelspec import get_kernel_dict
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient

FOLDER = Path(__file__).resolve().parent
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


class ThisInterpreter(AsyncKernelManager):
    """Runs the interpreter that runs this file, whatever kernels are installed under the name python3."""

    @property
    def kernel_spec(self) -> KernelSpec:
        return KernelSpec(**get_kernel_dict())


def execute(path: Path, timeout: int = 120) -> nbformat.NotebookNode:
    """Return the notebook with fresh outputs and without metadata that would differ from run to run.

    Raises
    ------
    nbclient.exceptions.CellExecutionError
        If a cell fails; the message shows the cell and its traceback.
    """
    notebook = nbformat.read(path, as_version=4)
    environment = dict(os.environ)
    # The checkout's cuconvt, installed or not.
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(FOLDER.parent), environment.get("PYTHONPATH")]))
    client = NotebookClient(
        notebook,
        timeout=timeout,
        kernel_manager_class=ThisInterpreter,
        record_timing=False,
        coalesce_streams=True,  # whether two prints arrive together is chance
        resources={"metadata": {"path": str(FOLDER)}},
    )
    client.execute(env=environment)
    notebook.metadata = nbformat.from_dict(METADATA)
    return notebook


def main() -> None:
    for path in sorted(FOLDER.glob("*.ipynb")):
        nbformat.write(execute(path), path)
        print(f"{path.name}: {path.stat().st_size / 1024:.0f} KiB", file=sys.stderr)


if __name__ == "__main__":
    main()
