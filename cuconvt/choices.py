"""Planners' findings on disk, beside the compiled kernels: a first call that loads these need not search for tiles.

A file for each, named by a digest of what was asked and of the planners' texts, so that those of another version are
not found. A file that is missing, unreadable or not sound, or a folder that cannot be written, costs the search and
nothing else.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cuconvt.compile import cache_folder, digest_of, replace_file


class Choices:
    """A `cuconvt.plan_search.Store` in the cache folder."""

    def find(self, question: str, decode: Callable[[Any], Any]) -> Any:
        try:
            content = json.loads(_file(question).read_text())
            if content["question"] != question:
                raise KeyError(question)
            return decode(content["found"])
        except (OSError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise KeyError(question) from error

    def keep(self, question: str, value: Any) -> None:
        text = json.dumps({"question": question, "found": value}, indent=1)
        with contextlib.suppress(OSError):
            replace_file(_file(question), text.encode())


def _file(question: str) -> Path:
    return cache_folder() / "choices" / f"{digest_of((question + planners_digest()).encode())}.json"


@functools.cache
def planners_digest() -> str:
    """Return a digest of the texts of all that planners search with."""
    package = Path(__file__).parent
    others = (package / f"{name}.py" for name in ("geometry", "phases", "tensor_map"))
    files = sorted((*package.glob("plan*.py"), *others))
    return digest_of(b"".join(_text(file) for file in files))


def _text(file: Path) -> bytes:
    return file.read_bytes()
