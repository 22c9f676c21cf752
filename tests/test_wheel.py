"""The built wheel, installed outside the checkout: what it holds, what it imports, and that its kernels compile."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
from bare import link_numpy, run_python

pytest.importorskip("build")
pytest.importorskip("hatchling")
pytest.importorskip("pip")

ROOT = Path(__file__).parent.parent
KERNELS = sorted(file.name for file in (ROOT / "kernels").iterdir() if file.is_file())


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    run_python("-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT), cwd=folder)
    (file,) = folder.glob("*.whl")
    return file


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder with the wheel installed in it, and nothing else."""
    folder = tmp_path_factory.mktemp("site")
    run_python("-m", "pip", "install", "-q", "--no-deps", "--target", str(folder), str(wheel), cwd=folder)
    return folder


def test_contents(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    files = (ROOT / "cuconvt").rglob("*")
    package = [file.relative_to(ROOT).as_posix() for file in files if file.suffix in (".py", ".typed")]
    kernels = [f"cuconvt/kernels/{name}" for name in KERNELS]
    assert sorted(name for name in names if ".dist-info/" not in name) == sorted([*package, *kernels])
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


def test_sdist_builds_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    # Without --wheel, build makes the sdist and builds the wheel from it.
    run_python("-m", "build", "--no-isolation", "--outdir", str(tmp_path), str(ROOT), cwd=tmp_path)
    (from_sdist,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as one, zipfile.ZipFile(from_sdist) as other:
        assert {i.filename: i.CRC for i in one.infolist()} == {i.filename: i.CRC for i in other.infolist()}


def test_needs_numpy_alone(installed: Path, tmp_path: Path) -> None:
    link_numpy(tmp_path)
    code = """
import numpy as np, cuconvt
x, weight = np.arange(1.0, 9.0).reshape(1, 1, 2, 2, 2), np.ones((1, 1, 2, 2, 2))
y = cuconvt.conv_transpose3d(x, weight, stride=2)
assert np.array_equal(y, x.repeat(2, 2).repeat(2, 3).repeat(2, 4)), y
print(cuconvt.__file__)
"""
    where = run_python("-c", code, cwd=tmp_path, paths=[installed, tmp_path], site=False)
    assert Path(where.strip()).is_relative_to(installed)


def test_imports_no_gpu_package(installed: Path, tmp_path: Path) -> None:
    code = "import sys, cuconvt; print(cuconvt.__file__, {'cupy', 'torch', 'jax', 'ml_dtypes'} & set(sys.modules))"
    where, _, imported = run_python("-c", code, cwd=tmp_path, paths=[installed]).strip().partition(" ")
    assert Path(where).is_relative_to(installed)
    assert imported == "set()"


def test_kernels_compile(installed: Path, tmp_path: Path) -> None:
    """The files are those of the checkout, each of which compiles alone in a test of its own: here one does."""
    pytest.importorskip("cupy")
    for name in KERNELS:
        assert (installed / "cuconvt" / "kernels" / name).read_bytes() == (ROOT / "kernels" / name).read_bytes()
    code = f"""
from cuconvt import compile
assert compile.kernel_folder().is_relative_to({str(installed)!r}), compile.kernel_folder()
print(len(compile.compile_kernel("gather.cu", "sm_90a").code))
"""
    size = run_python("-c", code, cwd=tmp_path, paths=[installed])
    assert int(size) > 0
