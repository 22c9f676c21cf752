"""Compilation: kernel source + defines -> NVRTC -> cubin -> disk cache -> loaded kernel.

An entry of the cache is keyed by everything that determines it: the text of the source and of all headers, the options
and NVRTC's version. Its file is named by a digest of its content, so that a truncated or foreign file is noticed and
rebuilt, never loaded. Writes are atomic (temporary file, rename): processes may race, and both end with a whole entry.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import tempfile
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cuconvt.errors import CompileError, MissingDependencyError

Defines = Iterable[tuple[str, int]]


@dataclass(frozen=True)
class Compiled:
    """A compiled kernel: the machine code (or PTX, for a GPU newer than NVRTC) and the compiler's log."""

    code: bytes
    log: str


def kernel_folder() -> Path:
    """Return the folder of the kernel sources: inside the installed package, or beside it in a source checkout."""
    package = Path(__file__).parent
    installed = package / "kernels"
    return installed if installed.is_dir() else package.parent / "kernels"


def cache_folder() -> Path:
    """Return the folder of compiled kernels: $CUCONVT_CACHE_DIR, else cuconvt in the user's cache folder."""
    # os.path.expanduser leaves "~" alone where nothing says what the home folder is; a relative folder then serves.
    chosen = os.environ.get("CUCONVT_CACHE_DIR")
    if chosen:
        return Path(os.path.expanduser(chosen))
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "cuconvt"


def nvrtc_version() -> tuple[int, int]:
    """Return NVRTC's (major, minor) version.

    Raises
    ------
    MissingDependencyError
        If CuPy is not installed or finds no NVRTC.
    """
    major, minor = _nvrtc().getVersion()
    return major, minor


def architecture(compute_capability: int) -> str:
    """Return the -arch value for a GPU, say "sm_86": its own, or the nearest that NVRTC knows and the GPU can load."""
    known = [int(arch) for arch in _nvrtc().getSupportedArchs()]
    older = [a for a in known if a <= compute_capability]
    if not older:
        raise CompileError(
            f"NVRTC {'.'.join(map(str, nvrtc_version()))} compiles for sm_{min(known)} and newer, "
            f"and this GPU is sm_{compute_capability}"
        )
    # Machine code loads within a major version; for a newer one the driver compiles PTX.
    kind = "sm" if max(older) // 10 == compute_capability // 10 else "compute"
    # wgmma is there for sm_90a alone, whose machine code runs on every GPU of compute capability 9.0.
    suffix = "a" if compute_capability == max(older) == 90 else ""
    return f"{kind}_{max(older)}{suffix}"


def compile_kernel(source: str, arch: str, defines: Defines = ()) -> Compiled:
    """Compile a file of the kernel folder, without a cache.

    Parameters
    ----------
    source : str
        Name of the file, say "gather.cu".
    arch : str
        "sm_90" and the like for machine code, "compute_90" for PTX.
    defines : iterable of (str, int)
        Macros that replace the file's defaults.

    Raises
    ------
    CompileError
        With the kernel's name, the options and NVRTC's log.
    """
    nvrtc = _nvrtc()
    texts = sources_of(source)
    headers = {name: text for name, text in texts.items() if name != source}
    options = _options(arch, defines)
    program = nvrtc.createProgram(
        texts[source], source, [text.encode() for text in headers.values()], [name.encode() for name in headers]
    )
    try:
        nvrtc.compileProgram(program, options)
        code = nvrtc.getPTX(program) if arch.startswith("compute") else nvrtc.getCUBIN(program)
        return Compiled(code, nvrtc.getProgramLog(program))
    except nvrtc.NVRTCError as error:
        log = nvrtc.getProgramLog(program)
        raise CompileError(f"{source} did not compile ({error}) with options {' '.join(options)}\n{log}") from None
    finally:
        nvrtc.destroyProgram(program)


def load_kernel(source: str, entry: str, arch: str, defines: tuple[tuple[str, int], ...]) -> Any:
    """Return the kernel as a `cuconvt.launch.Kernel` of the current device, from the cache or compiled now."""
    import cupy

    return _kernel(source, entry, arch, defines, cupy.cuda.runtime.getDevice())


@functools.cache
def _kernel(source: str, entry: str, arch: str, defines: tuple[tuple[str, int], ...], device_id: int) -> Any:
    from cuconvt.launch import Kernel

    return Kernel(_module(source, arch, defines).get_function(entry))  # whose function is the current device's


@functools.cache
def _module(source: str, arch: str, defines: tuple[tuple[str, int], ...]) -> Any:
    import cupy

    return cupy.RawModule(path=str(cached_file(source, arch, defines)))


def cached_file(source: str, arch: str, defines: tuple[tuple[str, int], ...]) -> Path:
    """Return the file that holds the compiled kernel, compiling it if the cache lacks a sound one."""
    entry = cache_folder() / _key(source, arch, defines)
    for file in entry.glob("*.bin"):
        # What cannot be read or is not sound is left alone: removing it might hit the file that another process has
        # just put in its place.
        with contextlib.suppress(OSError):
            if file.stem == digest_of(file.read_bytes()):
                return file
    code = compile_kernel(source, arch, defines).code
    try:
        return _write(entry, code)
    except OSError as error:
        _warn_once(str(cache_folder()), error.strerror or type(error).__name__)
        return _write(Path(_session_folder().name) / entry.name, code)


def _options(arch: str, defines: Defines) -> tuple[str, ...]:
    # -ftz stays false (NVRTC's default): denormals are kept. NVRTC's own cache, since 12.9, would answer without a log.
    return (
        f"-arch={arch}",
        "-std=c++17",
        "--ptxas-options=-v",
        *(("--no-cache",) if nvrtc_version() >= (12, 9) else ()),
        *(f"-D{name}={value}" for name, value in defines),
    )


def sources_of(source: str) -> Mapping[str, str]:
    """Return the texts of a kernel and of all headers by name."""
    folder = kernel_folder()
    return {file.name: file.read_text() for file in (folder / source, *sorted(folder.glob("*.cuh")))}


def _key(source: str, arch: str, defines: Defines) -> str:
    parts = [str(nvrtc_version()), *_options(arch, defines)]
    for name, text in sources_of(source).items():
        parts += [name, text]
    return f"{Path(source).stem}-{arch}-{digest_of(repr(parts).encode())}"


def digest_of(data: bytes) -> str:
    """Return the name of what has these bytes, in the cache."""
    return hashlib.sha256(data).hexdigest()[:32]


def _write(entry: Path, code: bytes) -> Path:
    file = entry / f"{digest_of(code)}.bin"
    replace_file(file, code)
    return file


def replace_file(file: Path, content: bytes) -> None:
    """Write a file, or another one in its place, so that no process ever reads a part of it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=file.parent)
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(content)
        os.replace(temporary, file)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


@functools.cache
def _session_folder() -> tempfile.TemporaryDirectory[str]:
    """Where compiled kernels live for this process when the cache cannot be written."""
    return tempfile.TemporaryDirectory(prefix="cuconvt-")


@functools.cache
def _warn_once(folder: str, problem: str) -> None:
    warnings.warn(
        f"compiled kernels cannot be kept in {folder} ({problem}) and will be compiled again by the next process; "
        f"set CUCONVT_CACHE_DIR to a folder that can be written",
        RuntimeWarning,
        stacklevel=2,
    )


@functools.cache
def _nvrtc() -> Any:
    try:
        from cupy.cuda import nvrtc

        nvrtc.getVersion()  # CuPy looks for the library at the first call
    except (ImportError, OSError, RuntimeError) as error:
        from cuconvt.info import cuda_command

        raise MissingDependencyError(f"compiling a kernel needs CuPy with NVRTC: {cuda_command()}; {error}") from error
    return nvrtc
