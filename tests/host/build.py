"""Compiles one specialisation of a kernel, from its unchanged source, to a program that runs it on the host."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from cuconvt.compile import Defines, cache_folder, kernel_folder

HERE = Path(__file__).parent
RUNTIME = ("main.cpp", "memory.cpp", "threads.cpp", "order.cpp", "barriers.cpp", "mma.cpp", "wgmma.cpp")
DEBUG = bool(os.environ.get("HOST_DEBUG"))
STANDARD = ("-std=c++17", "-g" if DEBUG else "-g1")
SANITIZE = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
KERNEL = (
    *SANITIZE,
    "-fno-sanitize=null,object-size,pointer-overflow,alignment",  # what memory.cpp finds at the access
    # A report's code takes the compiler longer than a kernel's: an instruction that main.cpp catches.
    *(() if DEBUG else ("-fsanitize-undefined-trap-on-error",)),
    "-O0" if DEBUG else "-Og",  # above it compilation takes longer than the tests save
    "-w",  # unroll pragmas and such are the CUDA compiler's business
    "--param=asan-instrumentation-with-call-threshold=0",  # a call for every access, which memory.cpp takes over
    "--param=asan-use-after-return=0",  # code that runs only where a run asks for it
    "-fira-region=one",  # registers are allocated faster, and hardly worse
    # What takes an eighth of the compiler's time and makes no kernel faster.
    "-fdisable-rtl-combine",
    "-fno-forward-propagate",
    "-fno-shrink-wrap",
    "-fno-cprop-registers",
    "-fno-compare-elim",
    "-fno-combine-stack-adjustments",
    "-fno-tree-loop-distribute-patterns",  # a memset would not be seen as accesses
    "-fno-extern-tls-init",  # shared memory has no constructors
)
LINKER = ("-fuse-ld=gold",) if shutil.which("ld.gold") else ()  # takes a third of the time
ACCESSES = [f"__asan_{kind}{size}" for kind in ("load", "store") for size in (1, 2, 4, 8, 16, "N")]


@functools.cache
def compiler() -> str | None:
    """Return GCC's C++ compiler, or None: clang++ has no `--param` for the calls, so that it does not serve."""
    for name in ("g++", "c++"):
        path = shutil.which(name)
        if path and "Free Software Foundation" in _output(path, "--version"):
            return path
    return None


def why_not() -> str | None:
    """Return why kernels cannot run on this host, or None where they can."""
    return None if compiler() else "no C++ compiler: g++ is not installed"


def kernel_sources(file: str) -> dict[str, str]:
    """Return the texts of a kernel and its headers by name; of the PTX header, those of its stand-in."""
    texts = {header.name: header.read_text() for header in sorted(kernel_folder().glob("*.cuh"))}
    own = HERE / file
    texts[file] = (own if own.exists() else kernel_folder() / file).read_text()
    return {**texts, "ptx.cuh": (HERE / "ptx.cuh").read_text()}


def program(sources: Mapping[str, str], file: str, entry: str, defines: Defines = ()) -> Path:
    """Return the program that runs the kernel `entry` of the given file, from the cache or compiled now.

    All kernels of a file are one program, which has a name for each of them.
    """
    family = Path(file).stem
    parts = ("", "_pack", "_pack_and_turn", "_add", "_turn")
    entries = [family + part for part in parts if f" {family}{part}(" in sources[file]]
    entries = entries if entry in entries else [entry]
    macros = ["-DKERNELS=" + " ".join(f"KERNEL({name})" for name in entries)]
    flags = (*STANDARD, *KERNEL, *macros, *(f"-D{name}={value}" for name, value in defines))
    digest = _digest(file, *flags, *_flat(_runtime_texts()), *_flat(sources))
    targets = {name: _folder() / f"{name}-{digest}" for name in entries}
    if all(target.exists() for target in targets.values()):
        return targets[entry]
    # A folder of their own, so that a kernel finds the stand-in for the PTX header beside it.
    code = _folder() / f"source-{_digest(*_flat(sources))}"
    _write_all(code, sources)
    with tempfile.TemporaryDirectory(dir=_folder()) as temporary:
        made = Path(temporary) / "program"
        kernel = (f'-DKERNEL_FILE="{code / file}"', f"-I{HERE}", HERE / "kernel.cpp")
        wrapped = (f"-Wl,--wrap={name}" for name in ACCESSES)
        _compile(*flags, *kernel, *LINKER, *wrapped, *_runtime_objects(), "-o", made)
        for name, target in targets.items():
            link = Path(temporary) / name
            os.link(made, link)
            os.replace(link, target)
    return targets[entry]


def _runtime_objects() -> list[Path]:
    """Return the compiled files of the runtime, of which each process compiles those that no other one is at."""
    digest = _digest(*_flat(_runtime_texts()))
    targets = [_folder() / f"{name}-{digest}.o" for name in RUNTIME]
    for wait in (False, True):
        for name, target in zip(RUNTIME, targets, strict=True):
            if not target.exists():
                _compile_runtime(name, target, wait)
    return targets


def _compile_runtime(name: str, target: Path, wait: bool) -> None:
    with _lock(target, wait) as mine, tempfile.TemporaryDirectory(dir=_folder()) as temporary:
        if mine and not target.exists():
            made = Path(temporary) / "object.o"
            _compile(*STANDARD, "-O3", "-c", HERE / name, "-o", made)
            os.replace(made, target)


@contextlib.contextmanager
def _lock(target: Path, wait: bool) -> Iterator[bool]:
    """Keep other processes from making a file, and say whether none of them is at it."""
    import fcntl

    with open(f"{target}.lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


@functools.cache
def _runtime_texts() -> dict[str, str]:
    names = (*RUNTIME, "kernel.cpp", "runtime.h", "internal.h", "builtins.cuh", "ptx.cuh")
    return {f"host/{name}": (HERE / name).read_text() for name in names}


def _write_all(folder: Path, texts: Mapping[str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        handle, temporary = tempfile.mkstemp(dir=folder)
        with os.fdopen(handle, "w") as stream:
            stream.write(text)
        os.replace(temporary, folder / name)


def _compile(*arguments: object) -> None:
    path = compiler()
    assert path is not None, why_not()
    command = [path, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise AssertionError(f"the host's compiler failed: {' '.join(command)}\n{done.stderr}")


@functools.cache
def _version() -> str:
    return _output(compiler() or "", "-v", "--version")


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True).stdout


def _folder() -> Path:
    folder = cache_folder() / "host"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _flat(texts: Mapping[str, str]) -> list[str]:
    return [part for item in texts.items() for part in item]


def _digest(*parts: str) -> str:
    """Name what the parts and the compiler determine."""
    return hashlib.sha256("\0".join((_version(), *parts)).encode()).hexdigest()[:24]
