"""The examples run: the scripts in a process of their own, the notebooks in a fresh kernel."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"
NOTEBOOKS = ("quickstart.ipynb", "torch_interop.ipynb", "train_unet3d.ipynb")


def require(*modules: str) -> None:
    for module in modules:
        pytest.importorskip(module, reason=f"this example needs {module}: pip install -e '.[examples]'")


def load_module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(name).name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_brain(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    require("nilearn", "matplotlib", "scipy")
    search_path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return subprocess.run(
        [sys.executable, str(EXAMPLES / "upsample_brain.py"), *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": search_path},
        capture_output=True,
        text=True,
        timeout=240,
    )


@pytest.mark.parametrize(
    ("arguments", "png"),
    [
        ((), "upsample_brain.png"),
        (("--device", "cpu", "--dtype", "float64", "--channels", "2", "--output", "other.png"), "other.png"),
    ],
    ids=["default", "float64"],
)
def test_brain_script_checks_its_result_and_writes_a_picture(tmp_path, arguments, png):
    result = run_brain(tmp_path, *arguments)
    assert result.returncode == 0, result.stdout + result.stderr
    checks = [line for line in result.stdout.splitlines() if line.startswith("check")]
    assert len(checks) == 4
    assert all(line.endswith("ok") for line in checks), result.stdout
    assert "scipy.ndimage.zoom" in checks[0]
    assert "definition in float64" in checks[-1]

    accuracy = next(line for line in result.stdout.splitlines() if line.startswith("accuracy"))
    trilinear, fitted = (float(part.split()[-2]) for part in accuracy.rpartition(": ")[2].split(","))
    assert fitted > trilinear + 1

    assert (tmp_path / png).stat().st_size < 1_000_000

    import matplotlib.image

    picture = matplotlib.image.imread(tmp_path / png)[..., :3]
    assert 600 <= picture.shape[0] <= 3000
    assert 600 <= picture.shape[1] <= 3000
    assert picture.std() > 0.1


def test_brain_script_rejects_a_channel_count_it_has_no_kernels_for(monkeypatch, capsys):
    require("nilearn", "matplotlib", "scipy")
    monkeypatch.setattr(sys, "argv", ["upsample_brain.py", "--channels", "65"])
    with pytest.raises(SystemExit, match="2"):
        load_module("upsample_brain").parse_arguments()
    assert "must be 1 to 64, got 65" in capsys.readouterr().err


def test_brain_script_fails_on_a_wrong_voxel(tmp_path, monkeypatch, capsys):
    require("nilearn", "matplotlib", "scipy")
    brain = load_module("upsample_brain")
    right = brain.cuconvt.conv_transpose3d

    def wrong_in_a_corner(x, weight, **parameters):
        y = right(x, weight, **parameters)
        y[..., -1, -1, -1] += 1e-3
        return y

    volume = np.random.default_rng(0).random((24, 24, 24), dtype=np.float32)
    monkeypatch.setattr(brain, "load_volume", lambda: volume)
    monkeypatch.setattr(brain, "draw", lambda *arguments: None)
    monkeypatch.setattr(brain, "FIT_VOXELS", 1000)
    monkeypatch.setattr(sys, "argv", ["upsample_brain.py", "--device", "cpu"])
    assert brain.main() == 0
    monkeypatch.setattr(brain.cuconvt, "conv_transpose3d", wrong_in_a_corner)
    assert brain.main() == 1
    assert capsys.readouterr().out.count("TOO LARGE") == 4


def kernelbench():
    pytest.importorskip("torch", reason="this example is about PyTorch, which is not installed")
    return load_module("kernelbench/run")


def test_kernelbench_models_are_checked_against_torch(tmp_path):
    kernelbench()
    script = EXAMPLES / "kernelbench" / "run.py"
    result = subprocess.run([sys.executable, str(script), "--toy"], cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    _, *lines = result.stdout.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["58", "61", "68", "70", "72", "73", "77"]
    assert all(line.endswith("ok") for line in lines)


def test_kernelbench_fails_on_a_wrong_output(monkeypatch, capsys):
    run = kernelbench()
    right = run.load_model

    def wrong(problem):
        class Wrong(right(problem)):
            def forward(self, x):
                y = super().forward(x)
                y[..., -1] += 1e-2
                return y

        return Wrong

    monkeypatch.setattr(sys, "argv", ["run.py", "--toy", "--problems", "61", "77"])
    assert run.main() == 0
    monkeypatch.setattr(run, "load_model", wrong)
    assert run.main() == 1
    assert capsys.readouterr().out.count("TOO LARGE") == 2


def test_kernelbench_constructors_take_positional_arguments():
    run = kernelbench()
    # As KernelBench calls them; for 73 the last one is ignored there, though it is meant to be the number of groups.
    calls = {
        58: (32, 16, (3, 5, 7)),
        61: (48, 48, 3),
        68: (32, 64, (3, 5, 5)),
        70: (48, 24, 3),
        72: (32, 32, (3, 5, 7), (2, 2, 2), (1, 2, 3), (1, 1, 1), 4),
        73: (32, 32, 3, 2, 1, 4),
        77: (32, 64, 3, 2, 1, 2),
    }
    for problem, arguments in calls.items():
        layer = run.load_model(problem)(*arguments).conv_transpose3d
        assert layer.bias is None
        expected = {**run.PROBLEMS[problem][1], **({"groups": 1} if problem == 73 else {})}
        for name, value in expected.items():
            assert getattr(layer, name) in (value, (value,) * 3), (problem, name)


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_notebook_executes(name):
    require("nbclient", "nbformat", "ipykernel", "matplotlib")
    if name != "quickstart.ipynb":
        pytest.importorskip("torch", reason="this notebook is about PyTorch, which is not installed")
    executed = load_module("run_notebooks").execute(EXAMPLES / name)
    assert all(cell.execution_count for cell in executed.cells if cell.cell_type == "code")


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_committed_notebook_is_clean_and_has_its_outputs(name):
    text = (EXAMPLES / name).read_text(encoding="utf-8")
    assert str(ROOT) not in text
    notebook = json.loads(text)
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert len(text) < 500_000
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    assert all(cell["metadata"] == {} for cell in notebook["cells"])
    assert all(output["output_type"] in ("stream", "display_data") for cell in code for output in cell["outputs"])
    assert any(cell["outputs"] for cell in code)
    assert set(notebook["metadata"]) == {"kernelspec", "language_info"}
    assert notebook["metadata"]["language_info"] == {"name": "python"}
