"""Launches kernels on the host: grid and arguments go to a program that runs them, and the results come back."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import struct
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from host.build import DEBUG

VALUE, INPUT, OUTPUT, ABSENT, OF_KERNEL_BEFORE, BOXES, CONTINUED = range(7)
# Each launch takes the next order of the threads and fills shared memory differently (NaN, large, small): a result that
# depends on either differs between two launches.
SCHEDULES = ((0, 0xFF), (1, 0x55), (2, 0x3A))
TIMEOUT = 60  # seconds; a launch takes milliseconds


class KernelError(AssertionError):
    """A kernel was caught; the message is the program's report."""


@dataclass(frozen=True)
class Argument:
    """An argument of a kernel: its bytes and, of an array, which of them belong to elements."""

    name: str
    role: int
    data: bytes = b""
    elements: bytes = b""
    address: int = 0  # of the lowest byte
    first: int = 0  # offset of the first element, which a negative stride puts behind others

    @classmethod
    def array(cls, name: str, role: int, array: np.ndarray) -> Argument:
        """Take the memory from the first to the last element of a view; what lies between elements is off limits."""
        steps = [(extent - 1) * stride for extent, stride in zip(array.shape, array.strides, strict=True)]
        before = -sum(min(step, 0) for step in steps)
        size = before + sum(max(step, 0) for step in steps) + array.itemsize
        elements = np.zeros(size, np.uint8)
        shape, strides = (*array.shape, array.itemsize), (*array.strides, 1)
        np.lib.stride_tricks.as_strided(elements[before:], shape, strides)[...] = 1
        address = array.__array_interface__["data"][0] - before
        return cls(name, role, ctypes.string_at(address, size), elements.tobytes(), address, before)

    def pack(self) -> bytes:
        header = struct.pack("16sIIQQ", self.name.encode(), self.role, self.address % 16, len(self.data), self.first)
        return header + self.data + self.elements


class Program:
    """A running program, which executes launches of one specialisation of one kernel."""

    def __init__(self, path: Path):
        self.path = path
        self.launches = 0
        self._process: subprocess.Popen[bytes] | None = None

    def launch(self, grid: int, block: int, shared_bytes: int, arguments: Sequence[Argument]) -> None:
        """Run one launch and write its outputs back to the arrays.

        Raises
        ------
        KernelError
            With the kernel, the block and the thread, if the kernel does what it must not.
        """
        order, pattern = SCHEDULES[self.launches % len(SCHEDULES)]
        header = struct.pack("7I", grid, block, shared_bytes, len(arguments), order, self.launches, pattern)
        job = header + b"".join(argument.pack() for argument in arguments)
        self.launches += 1
        if DEBUG:
            print(self._repeat(job))
        process = self._start()
        watchdog = threading.Timer(TIMEOUT, process.kill)
        watchdog.start()
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(job)
            process.stdin.flush()
            for argument in arguments:
                if argument.role in (OUTPUT, CONTINUED):
                    answer = process.stdout.read(8 + len(argument.data))
                    if len(answer) < 8 + len(argument.data):
                        raise BrokenPipeError
                    (unwritten,) = struct.unpack_from("q", answer)
                    if unwritten >= 0:
                        self.close()  # more answers may follow
                        raise KernelError(f"nobody wrote byte {unwritten} of {argument.name}\n{self._repeat(job)}")
                    ctypes.memmove(argument.address, answer[8:], len(argument.data))
        except BrokenPipeError:
            raise KernelError(f"{self._report()}\n{self._repeat(job)}") from None
        finally:
            watchdog.cancel()

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._errors.close()
            self._process = None

    def _start(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            self._errors = tempfile.TemporaryFile()  # noqa: SIM115
            # The sanitizers would read what is known of every library to name the lines of a report.
            options = {**os.environ, "ASAN_OPTIONS": "symbolize=0:" + os.environ.get("ASAN_OPTIONS", "")}
            self._process = subprocess.Popen(
                [self.path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, env=options
            )
        return self._process

    def _report(self) -> str:
        assert self._process is not None
        status = self._process.wait()
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").splitlines()
        self._errors.close()
        self._process = None
        # The place stands at the end, after a sanitizer's long report.
        return (
            "\n".join(self._with_lines([*lines[:30], *lines[30:][-1:]]))
            or f"ended with status {status} (-9: the time limit, {TIMEOUT} s)"
        )

    def _with_lines(self, report: list[str]) -> list[str]:
        """Name functions and lines where a report has the addresses of calls within the program."""
        place = re.compile(rf"\({re.escape(str(self.path))}\+(0x[0-9a-f]+)\)")
        returns = list(dict.fromkeys(found for line in report for found in place.findall(line)))
        if not returns or not shutil.which("addr2line"):
            return report
        command = ["addr2line", "-Cfip", "-e", str(self.path), *(hex(int(address, 16) - 1) for address in returns)]
        named = subprocess.run(command, capture_output=True, text=True).stdout
        lines = dict(zip(returns, re.split(r"\n(?! \(inlined by\))", named), strict=False))
        return [place.sub(lambda found: f"in {lines.get(found[1], found[0])}", line) for line in report]

    def _repeat(self, job: bytes) -> str:
        file = self.path.with_suffix(".job")
        file.write_bytes(job)
        return f"  repeat it with: {self.path} {file} [BLOCK]"
