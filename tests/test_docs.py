"""What the documentation shows is true: doctests, the README's code and commands, the signatures."""

from __future__ import annotations

import doctest
import importlib
import inspect
import pkgutil
import re
from pathlib import Path

import pytest

import cuconvt

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
CODE = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
COMMANDS = re.findall(r"```sh\n(.*?)```", README, re.DOTALL)
GRADIENTS = [
    getattr(cuconvt.grad, f"{function}{rank}d_{name}")
    for rank in (1, 2, 3)
    for function, names in (("conv_transpose", ("input", "weight", "bias")), ("conv", ("input", "weight")))
    for name in names
]
FUNCTIONS = [cuconvt.conv1d, cuconvt.conv2d, cuconvt.conv3d, *GRADIENTS]
FUNCTIONS += [cuconvt.conv_transpose1d, cuconvt.conv_transpose2d, cuconvt.conv_transpose3d]
# These need CuPy or PyTorch, and __main__ is a script.
APART = ("cuconvt.cuda", "cuconvt.cuda_gradients", "cuconvt.torch", "cuconvt.__main__")
MODULES = [m.name for m in pkgutil.iter_modules(cuconvt.__path__, "cuconvt.") if m.name not in APART]


@pytest.mark.parametrize("module", ["cuconvt", *MODULES])
def test_doctests(module: str) -> None:
    assert doctest.testmod(importlib.import_module(module)).failed == 0


@pytest.mark.parametrize("function", [*FUNCTIONS, cuconvt.conv_transpose_output_shape])
def test_public_functions_have_a_doctest(function) -> None:
    assert doctest.DocTestFinder().find(function)[0].examples


@pytest.mark.parametrize("function", FUNCTIONS)
def test_every_parameter_is_documented(function) -> None:
    parameters = function.__doc__.partition("Parameters\n")[2].partition("Returns\n")[0]
    documented = [name for names in re.findall(r"^(\w.*?) : ", parameters, re.MULTILINE) for name in names.split(", ")]
    assert sorted(documented) == sorted(inspect.signature(function).parameters)


def test_readme_lists_every_parameter() -> None:
    table = README.partition("## Parameters")[2].partition("###")[0]
    parameters = list(inspect.signature(cuconvt.conv_transpose3d).parameters)
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == parameters


def test_readme_shows_the_signatures_of_convolutions_and_gradients() -> None:
    section = README.partition("## Convolutions and gradients")[2].partition("\n## ")[0]
    shown = re.findall(r"^    ([\w.]+)\((.*?)\)$", section, re.MULTILINE | re.DOTALL)
    assert len(shown) == 6
    for name, parameters in shown:
        function = getattr(cuconvt.grad, name.removeprefix("grad.")) if "." in name else getattr(cuconvt, name)
        names = [p.partition("=")[0] for p in re.split(r",\s+", parameters) if p != "*"]
        assert names == list(inspect.signature(function).parameters), name


@pytest.mark.parametrize(
    "code",
    [pytest.param(code, marks=pytest.mark.gpu if "import cupy" in code else ()) for code in CODE],
    ids=[f"block{index}" for index in range(len(CODE))],
)
def test_readme_code(code: str) -> None:
    if "import torch" in code:
        pytest.importorskip("torch")
    exec(compile(code, "README.md", "exec"), {})


def test_readme_code_for_cupy_holds_for_numpy() -> None:
    (code,) = (code for code in CODE if "import cupy" in code)
    exec(compile(code.replace("cupy", "numpy"), "README.md", "exec"), {})


def test_readme_has_two_commands_of_one_line() -> None:
    assert [command.count("\n") for command in COMMANDS] == [1, 1]


def test_readme_and_ci_run_the_same() -> None:
    *_, test_command = COMMANDS
    steps = [step.partition(".venv/bin/python ")[2] for step in test_command.strip().split(" && ")[1:]]
    ci = re.findall(r"^(?:\w+=\S+ )*\$python (.*)$", (ROOT / ".ci/run").read_text(), re.MULTILINE)
    assert [step for step in ci if step.startswith(("-m pip", "-m pytest"))] == steps


def test_pre_commit_and_ci_check_the_same() -> None:
    *checks, imports = re.findall(r"entry: python (.*)", (ROOT / ".pre-commit-config.yaml").read_text())
    ci = (ROOT / ".ci/run").read_text()
    assert checks
    assert re.findall(r"\$python (-m (?:ruff|mypy).*)", ci) == checks
    assert imports == "-m pytest -q --collect-only tests"
    assert "$python -m pytest tests" in ci  # which imports them, too


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_links_lead_somewhere(page: str) -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", (ROOT / page).read_text())
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []
