"""The command line's report: with NumPy alone, with CuPy and no GPU, and with a GPU."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from bare import link_numpy, run_python

from cuconvt import info
from cuconvt.__main__ import main

ROOT = Path(__file__).parent.parent


def test_numpy_alone(tmp_path: Path) -> None:
    link_numpy(tmp_path)
    report = run_python("-m", "cuconvt", "info", cwd=ROOT, paths=[tmp_path], site=False)
    assert "NumPy only" in report
    for line in ("CuPy       not installed", "PyTorch    not installed", "JAX        not installed"):
        assert line in report
    assert f"{sys.executable} -m pip install 'cupy-cuda1" in report
    assert f"{sys.executable} -m pip install ml_dtypes" in report


def test_cupy_without_gpu() -> None:
    pytest.importorskip("cupy")
    report = run_python("-m", "cuconvt", "info", cwd=ROOT, CUDA_VISIBLE_DEVICES="")
    assert "NumPy only: no" in report
    assert "CuPy       not installed" not in report


@pytest.mark.gpu
def test_gpu() -> None:
    report = run_python("-m", "cuconvt", "info", cwd=ROOT)
    assert "compute capability" in report
    assert "for CUDA up to" in report
    assert "NumPy only" not in report


def test_imports_neither_torch_nor_jax() -> None:
    code = "import sys; from cuconvt.info import report; report(); print({'torch', 'jax'} & set(sys.modules))"
    assert run_python("-c", code, cwd=ROOT).strip() == "set()"


def test_cache_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kernel").mkdir()
    (tmp_path / "kernel" / "a.bin").write_bytes(bytes(3 * 2**20))
    (tmp_path / "choices").mkdir()
    for name in "ab":
        (tmp_path / "choices" / f"{name}.json").write_bytes(bytes(2**19))
    monkeypatch.setenv("CUCONVT_CACHE_DIR", str(tmp_path))
    assert f"{tmp_path} (1 kernels, 2 choices of tiles, 4.0 MiB)" in info.report()


class FakeCuda:
    """The calls of CuPy that the report makes, for a machine with one H200 and no NVRTC."""

    __version__ = "14.2.0"

    class cuda:
        class runtime:
            CUDARuntimeError = RuntimeError

            @staticmethod
            def getDeviceCount() -> int:
                return 1

            @staticmethod
            def runtimeGetVersion() -> int:
                return 13000

            @staticmethod
            def getDeviceProperties(index: int) -> dict[str, object]:
                return {"name": b"NVIDIA H200", "major": 9, "minor": 0, "totalGlobalMem": 140 * 2**30}


def test_gpu_and_missing_nvrtc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(info, "_import_cupy", lambda: (FakeCuda, ""))
    monkeypatch.setattr(info, "_driver_cuda_version", lambda: (13, 0))
    monkeypatch.setattr(info, "_nvrtc", lambda cupy: "")
    report = info.report()
    assert "GPU 0      NVIDIA H200, compute capability 9.0, 140.0 GiB" in report
    assert f"NVRTC, to compile kernels: {sys.executable} -m pip install 'cupy-cuda13x>=14'" in report


@pytest.mark.parametrize(("driver", "package"), [((12, 4), "cupy-cuda12x"), ((13, 1), "cupy-cuda13x")])
def test_command_fits_the_driver(driver: tuple[int, int], package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(info, "_import_cupy", lambda: (None, "not installed"))
    monkeypatch.setattr(info, "_driver_cuda_version", lambda: driver)
    report = info.report()
    assert package in report
    assert "NumPy only: no CuPy" in report


def test_commands_are_the_extras() -> None:
    tomllib = pytest.importorskip("tomllib")  # Python 3.11
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for major, packages in info.CUDA_PACKAGES.items():
        assert list(packages) == project["optional-dependencies"][f"cuda{major}x"]


def test_a_command_is_required(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([])
    assert "info" in capsys.readouterr().err
