"""What is installed, what was found and what is missing: the report of ``python -m cuconvt info``."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from cuconvt.errors import MissingDependencyError

# The extras cuda12x and cuda13x of pyproject.toml: their packages install by name also where cuconvt itself does not.
CUDA_PACKAGES = {
    12: ("cupy-cuda12x>=14", "nvidia-cuda-nvrtc-cu12", "nvidia-cuda-runtime-cu12", "ml_dtypes"),
    13: ("cupy-cuda13x>=14", "nvidia-cuda-nvrtc>=13,<14", "nvidia-cuda-runtime>=13,<14", "ml_dtypes"),
}


def report() -> str:
    """Return the whole report: a name and a value a line, then what is missing with the command that installs it."""
    cupy, cupy_problem = _import_cupy()
    driver = _driver_cuda_version()
    gpus, gpu_problem = _gpus(cupy, driver)
    nvrtc = _nvrtc(cupy)
    rows = [
        *_versions(cupy, cupy_problem),
        ("backend", "CuPy for arrays in GPU memory, NumPy for the rest" if gpus else f"NumPy only: {gpu_problem}"),
        *((f"GPU {index}", text) for index, text in enumerate(gpus)),
        ("driver", _driver(driver)),
        ("NVRTC", nvrtc or "none"),
        *_folders(),
    ]
    width = max(len(name) for name, _ in rows)
    lines = [f"{name:<{width}}  {value}" for name, value in rows]
    missing = _missing(cupy, driver, nvrtc)
    lines += ["", "missing" if missing else "nothing is missing"]
    lines += [f"  {text}" for text in missing]
    return "\n".join(lines)


def cuda_command() -> str:
    """Return the command that installs CuPy with NVRTC, as errors name it."""
    return _cuda_command(_import_cupy()[0], _driver_cuda_version())


def _versions(cupy: Any, cupy_problem: str) -> list[tuple[str, str]]:
    import cuconvt

    return [
        ("cuconvt", f"{cuconvt.__version__} in {Path(cuconvt.__file__).parent}"),
        ("Python", f"{platform.python_version()} ({sys.executable})"),
        ("NumPy", _installed("numpy")),
        ("CuPy", cupy.__version__ if cupy else cupy_problem),
        ("PyTorch", _installed("torch")),
        ("JAX", _installed("jax")),
        ("ml_dtypes", _installed("ml_dtypes")),
    ]


def _installed(distribution: str) -> str:
    """Return the version of a package without importing it."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "not installed"


def _import_cupy() -> tuple[Any, str]:
    """Return CuPy, or None and why there is none."""
    try:
        import cupy
    except ImportError as error:
        return None, "not installed" if error.name == "cupy" else f"cannot be imported: {error}"
    return cupy, ""


def _driver_cuda_version() -> tuple[int, int] | None:
    """Return the newest CUDA version that the NVIDIA driver supports, or None without a driver."""
    try:
        library = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return None
    version = ctypes.c_int()
    if library.cuDriverGetVersion(ctypes.byref(version)):
        return None
    return version.value // 1000, version.value % 1000 // 10


def _driver(cuda_version: tuple[int, int] | None) -> str:
    if cuda_version is None:
        return "none"
    proc = Path("/proc/driver/nvidia/version")
    release = re.search(r"\d+\.\d+(\.\d+)?", proc.read_text()) if proc.is_file() else None
    return f"{release.group() if release else 'release unknown'}, for CUDA up to {cuda_version[0]}.{cuda_version[1]}"


def _gpus(cupy: Any, driver: tuple[int, int] | None) -> tuple[list[str], str]:
    """Return a line for each GPU that CuPy sees, or none and why."""
    if driver is None:
        return [], "no NVIDIA driver"
    if cupy is None:
        return [], "no CuPy"
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return [], f"no GPU ({error})"
    lines = []
    for index in range(count):
        properties = cupy.cuda.runtime.getDeviceProperties(index)
        lines.append(
            f"{properties['name'].decode()}, compute capability {properties['major']}.{properties['minor']}, "
            f"{properties['totalGlobalMem'] / 2**30:.1f} GiB"
        )
    return lines, "" if lines else "no GPU"


def _nvrtc(cupy: Any) -> str:
    """Return NVRTC's version, or nothing where it cannot be loaded."""
    if cupy is None:
        return ""
    from cuconvt.compile import nvrtc_version

    try:
        return "{}.{}".format(*nvrtc_version())
    except MissingDependencyError:
        return ""


def _folders() -> list[tuple[str, str]]:
    from cuconvt.compile import cache_folder, kernel_folder

    kernels, cache = kernel_folder(), cache_folder()
    compiled, choices = list(_sizes(cache, ".bin")), list(_sizes(cache / "choices", ".json"))
    size = sum((*compiled, *choices)) / 2**20
    held = f"{len(compiled)} kernels, {len(choices)} choices of tiles, {size:.1f} MiB"
    return [
        ("kernels", f"{kernels} ({', '.join(sorted(file.stem for file in kernels.glob('*.cu'))) or 'empty'})"),
        ("cache", f"{cache} ({held})"),
        ("tuned", _tuned()),
    ]


def _sizes(folder: Path, ending: str) -> Iterator[int]:
    """Yield the bytes of each such file below a folder, where other processes may delete what they have written."""
    for place, _, names in os.walk(folder):
        for name in names:
            if name.endswith(ending):
                with suppress(FileNotFoundError):
                    yield os.stat(Path(place, name)).st_size


def _tuned() -> str:
    """Return how many tuned choices there are and whether calls use them."""
    from cuconvt import tuned

    choices = tuned.read(tuned.store_file()).values()
    if not choices:
        return "no choices, the planner decides (`python -m cuconvt tune` measures)"
    current = sum(choice.sources == tuned.sources_digest() for choice in choices)
    use = "ignored, as CUCONVT_TUNED=0 is set" if tuned.is_ignored() else "used for the problems that were measured"
    older = f", and {len(choices) - current} of other kernels" if current < len(choices) else ""
    return f"{current} choices in {tuned.store_file()}, {use}{older}"


def _missing(cupy: Any, driver: tuple[int, int] | None, nvrtc: str) -> list[str]:
    missing = []
    if driver is None:
        missing.append("an NVIDIA driver, for arrays in GPU memory: https://www.nvidia.com/drivers")
    if cupy is None or not nvrtc:
        what = "NVRTC, to compile kernels" if cupy else "CuPy with NVRTC, for arrays in GPU memory"
        missing.append(f"{what}: {_cuda_command(cupy, driver)}")
    if _installed("ml_dtypes") == "not installed":
        missing.append(f"ml_dtypes, for bfloat16: {_install('ml_dtypes')}")
    return missing


def _cuda_command(cupy: Any, driver: tuple[int, int] | None) -> str:
    # CuPy that is there decides; else the driver does, and one older than CUDA 12 has to be updated anyway.
    cuda = cupy.cuda.runtime.runtimeGetVersion() // 1000 if cupy else driver[0] if driver else 12
    return _install(*CUDA_PACKAGES[13 if cuda >= 13 else 12])


def _install(*packages: str) -> str:
    quoted = (f"'{package}'" if set(package) & set("<>[]") else package for package in packages)
    return f"{sys.executable} -m pip install {' '.join(quoted)}"
