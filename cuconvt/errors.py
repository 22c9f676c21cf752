"""Exceptions that are the library's own; bad arguments raise ValueError or TypeError."""

from __future__ import annotations


class CompileError(RuntimeError):
    """A kernel did not compile; the message holds the kernel's name, the options and NVRTC's log."""


class MissingDependencyError(ImportError):
    """Something that a call needs is not installed; the message holds the command that installs it."""
