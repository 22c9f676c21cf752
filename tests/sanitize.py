"""Run GPU tests under compute-sanitizer; fails on any report. From the repository's root, on a machine with a GPU:

    python tests/sanitize.py [--tool memcheck ...] [pytest arguments]

Without pytest arguments a chosen set of the GPU tests, forward and gradients, runs under each of the four tools.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
# Every dtype and layout and several tiles on every axis, but no huge array: a tool makes a kernel tens of times slower.
CASES = "fixed_case or layout or several_tiles or narrow or rows_of_few"
CHOSEN = ("tests/test_gpu.py", "tests/test_grad_gpu.py", "-k", CASES)


def find_sanitizer() -> str | None:
    """Return compute-sanitizer from the path or a CUDA toolkit."""
    toolkits = [os.environ.get("CUDA_PATH", ""), "/usr/local/cuda"]
    return shutil.which("compute-sanitizer") or next(
        (found for toolkit in toolkits if (found := shutil.which("compute-sanitizer", path=f"{toolkit}/bin"))), None
    )


def run(sanitizer: str, tool: str, tests: list[str]) -> str | None:
    """Run the tests under one tool; return what is wrong, or None, and print the tool's summary."""
    pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu", *tests]
    command = [sanitizer, f"--tool={tool}", "--error-exitcode=9", *pytest]
    print("$", " ".join(command), flush=True)
    process = subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        print(line, end="", flush=True)
        lines.append(line)
    status = process.wait()
    output = "".join(lines)
    if not re.search(r"[1-9]\d* passed", output):
        return "no test passed"
    summaries = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)", output)
    if not summaries:
        return "the tool gave no summary"
    if any(map(int, summaries)):
        return f"{sum(map(int, summaries))} reports"
    return f"exit status {status}" if status else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tool", action="append", choices=TOOLS, help="may be repeated; all four by default")
    options, tests = parser.parse_known_args()
    sanitizer = find_sanitizer()
    if sanitizer is None:
        print("compute-sanitizer was not found: it comes with the CUDA toolkit", file=sys.stderr)
        return 2
    results = {tool: run(sanitizer, tool, tests or list(CHOSEN)) for tool in options.tool or TOOLS}
    for tool, wrong in results.items():
        print(f"{tool}: {wrong or 'clean'}")
    return 1 if any(results.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
