"""Compilation without a GPU: every kernel on every architecture, the cache and its races, and what an error shows."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
from bare import run_python
from described import HOPPER, gather_of, plan_of
from fixed_cases import FIXED
from ptxas import log_of, parse
from test_plan import FALLBACKS

from cuconvt import CompileError, MissingDependencyError
from cuconvt import compile as compiler
from cuconvt.plan import Plan

nvrtc = pytest.importorskip("cupy", reason="CuPy, which finds NVRTC, is not installed").cuda.nvrtc

ROOT = Path(__file__).parent.parent
KERNELS = sorted(file.name for file in compiler.kernel_folder().glob("*.cu"))
ARCHS = ("sm_80", "sm_90", "sm_120")
COMPILED = [(kernel, arch) for kernel in KERNELS for arch in (("sm_90a",) if Path(kernel).stem in HOPPER else ARCHS)]
QUICK = (("DTYPE", 2), ("CHANNELS", 1))  # a small specialisation, for tests of the cache


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give each test an empty cache of its own and a library that has warned of nothing yet."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("CUCONVT_CACHE_DIR", str(folder))
    compiler._warn_once.cache_clear()
    return folder


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a copy of the kernels' folder, to be changed, which the library uses in place of its own."""
    folder = tmp_path / "kernels"
    shutil.copytree(compiler.kernel_folder(), folder)
    monkeypatch.setattr(compiler, "kernel_folder", lambda: folder)
    return folder


def skip_unless_known(arch: str) -> None:
    if int(arch.removeprefix("sm_").rstrip("a")) not in nvrtc.getSupportedArchs():
        pytest.skip(f"NVRTC {'.'.join(map(str, nvrtc.getVersion()))} does not know {arch}")


def entry(arch: str = "sm_90", defines: compiler.Defines = QUICK) -> str:
    return compiler.cached_file("gather.cu", arch, tuple(defines)).parent.name


def sound(file: Path) -> bool:
    return file.read_bytes()[:4] == b"\x7fELF" and file.stem == compiler.digest_of(file.read_bytes())


# ---- kernels -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kernel", "arch"), COMPILED)
def test_a_kernel_compiles_alone(kernel: str, arch: str) -> None:
    skip_unless_known(arch)
    compiled = compiler.compile_kernel(kernel, arch)
    assert compiled.code.startswith(b"\x7fELF")
    assert "warning" not in compiled.log
    assert f"Compiling entry function '{Path(kernel).stem}' for '{arch}'" in compiled.log


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_kernel_compiles_to_ptx(kernel: str) -> None:
    assert b".target sm_80" in compiler.compile_kernel(kernel, "compute_80").code


def assert_compiles_without_local_memory(plan: Plan, arch: str) -> None:
    """Compile a plan's specialisation, which asserts the shared memory that the plan computed."""
    skip_unless_known(arch)
    log = log_of(plan.kernel, arch, plan.defines)
    usage = parse(log, plan.kernel)
    assert (usage.stack_bytes, usage.spilled_bytes) == (0, 0)
    assert usage.registers * plan.block * dict(plan.defines)["MIN_BLOCKS"] <= 65536


@pytest.mark.parametrize("name", FIXED)
def test_the_plans_of_fixed_cases_compile(name: str) -> None:
    assert_compiles_without_local_memory(plan_of(FIXED[name]), "sm_90a")


@pytest.mark.parametrize("arch", [80, 90, 120])
@pytest.mark.parametrize("last", [False, True], ids=["channels-first", "channels-last"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_the_plans_of_other_dtypes_and_devices_compile(dtype: str, last: bool, arch: int) -> None:
    assert_compiles_without_local_memory(gather_of(FIXED["kb61"], dtype, arch, last), f"sm_{arch}")


@pytest.mark.parametrize("name", FALLBACKS)
def test_the_plans_of_fallbacks_compile(name: str) -> None:
    problem, arch, _ = FALLBACKS[name]
    assert_compiles_without_local_memory(gather_of(problem, arch=arch), f"sm_{arch}")


def test_the_plan_of_a_large_problem_compiles() -> None:
    plan = gather_of(FIXED["kb77"])
    defines = tuple((name, 1 if name == "INDEX64" else value) for name, value in plan.defines)
    assert plan.defines != defines
    assert_compiles_without_local_memory(Plan(**{**plan.__dict__, "defines": defines}), "sm_90")


# ---- time --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["kb61", "vocoder_1d", "negative_numerators"])
def test_time(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cold compile takes at most 3 s, and a compiled kernel is found in 50 ms; the best of three, as others work."""
    plan = gather_of(FIXED[name])
    cold, warm = [], []
    for attempt in range(3):
        monkeypatch.setenv("CUCONVT_CACHE_DIR", str(tmp_path / f"cache {attempt}"))
        for seconds in (cold, warm):
            start = time.perf_counter()
            file = compiler.cached_file("gather.cu", "sm_90", plan.defines)
            code = file.read_bytes()
            seconds.append(time.perf_counter() - start)
            assert code
    assert min(cold) <= 3
    assert min(warm) <= 0.05


# ---- the key -----------------------------------------------------------------------------------------------------


def test_the_key_is_the_same_for_the_same_kernel() -> None:
    assert entry() == entry()
    assert re.fullmatch(r"gather-sm_90-[0-9a-f]{32}", entry())


def test_the_key_changes_with_arch_and_defines() -> None:
    keys = [entry(), entry(arch="sm_80"), entry(defines=(*QUICK, ("CHUNK", 2))), entry(defines=(*QUICK, ("CHUNK", 1)))]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize("file", ["gather.cu", "common.cuh", "ptx.cuh", "new.cuh"])
def test_the_key_changes_with_every_source(file: str, sources: Path) -> None:
    before = entry()
    with (sources / file).open("a") as stream:
        stream.write("// changed\n")
    assert entry() != before


def test_the_key_changes_with_the_version_of_nvrtc(monkeypatch: pytest.MonkeyPatch) -> None:
    before = entry()
    monkeypatch.setattr(compiler, "nvrtc_version", lambda: (99, 0))
    assert entry() != before


# ---- the cache ---------------------------------------------------------------------------------------------------


def test_the_second_call_does_not_compile(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = compiler.cached_file("gather.cu", "sm_90", QUICK)
    assert file.is_relative_to(cache)
    assert sound(file)
    monkeypatch.setattr(compiler, "compile_kernel", None)
    assert compiler.cached_file("gather.cu", "sm_90", QUICK) == file


def test_processes_that_compile_the_same_kernel_at_once(cache: Path, tmp_path: Path) -> None:
    code = f"""
import os, sys, time
from cuconvt import compile as compiler
compiler.nvrtc_version()
print("ready", flush=True)
sys.stdin.readline()
file = compiler.cached_file("gather.cu", "sm_90", {QUICK})
print(file, file.stem == compiler.digest_of(file.read_bytes()))
"""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        for _ in range(3)
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    answers = [process.communicate()[0].split() for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert [answer[1] for answer in answers] == ["True"] * 3
    assert len({answer[0] for answer in answers}) == 1
    assert [file for file in cache.rglob("*") if file.is_file()] == [Path(answers[0][0])], "a temporary file is left"


@pytest.mark.parametrize("length", [0, 100, -1])
def test_a_truncated_entry_is_rebuilt(length: int) -> None:
    file = compiler.cached_file("gather.cu", "sm_90", QUICK)
    whole = file.read_bytes()
    file.write_bytes(whole[:length])
    again = compiler.cached_file("gather.cu", "sm_90", QUICK)
    assert sound(again)
    assert again.read_bytes() == whole
    assert list(again.parent.iterdir()) == [again]


def test_a_foreign_file_is_never_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    file = compiler.cached_file("gather.cu", "sm_90", QUICK)
    foreign = file.with_name(f"{'0' * 32}.bin")
    file.rename(foreign)  # sound code under another name
    file.with_name("tmpabc").write_bytes(b"left by a process that was killed")
    (file.parent / "folder.bin").mkdir()
    again = compiler.cached_file("gather.cu", "sm_90", QUICK)
    assert again == file
    assert sound(again)
    monkeypatch.setattr(compiler, "compile_kernel", None)
    assert compiler.cached_file("gather.cu", "sm_90", QUICK) == file


def assert_falls_back_and_warns_once(reason: str) -> None:
    with pytest.warns(RuntimeWarning, match="set CUCONVT_CACHE_DIR to a folder that can be written") as caught:
        files = [compiler.cached_file("gather.cu", "sm_90", (("DTYPE", dtype), ("CHANNELS", 1))) for dtype in (0, 2)]
    assert len(caught) == 1
    assert f"{compiler.cache_folder()} ({reason})" in str(caught[0].message)
    for file in files:
        assert sound(file)
        assert not file.is_relative_to(compiler.cache_folder())
    assert files[0] != files[1]


def test_a_folder_that_cannot_be_made(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.write_text("a file, not a folder")
    monkeypatch.setenv("CUCONVT_CACHE_DIR", str(cache / "below"))
    assert_falls_back_and_warns_once("Not a directory")


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes into any folder")
def test_a_read_only_folder(cache: Path) -> None:
    kept = compiler.cached_file("gather.cu", "sm_80", QUICK)
    damaged = compiler.cached_file("gather.cu", "sm_90", QUICK)
    damaged.write_bytes(b"damaged")
    folders = [cache, damaged.parent]
    try:
        for folder in folders:
            folder.chmod(0o500)
        assert_falls_back_and_warns_once("Permission denied")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert compiler.cached_file("gather.cu", "sm_80", QUICK) == kept, "what it holds is still used"
            assert sound(compiler.cached_file("gather.cu", "sm_90", QUICK))
    finally:
        for folder in folders:
            folder.chmod(0o700)


def test_a_full_disk(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_space(source: str, target: Path) -> None:
        if Path(target).is_relative_to(cache):
            raise OSError(28, "No space left on device")
        Path(source).rename(target)

    monkeypatch.setattr(os, "replace", no_space)
    assert_falls_back_and_warns_once("No space left on device")
    assert not [file for file in cache.rglob("*") if file.is_file()], "a temporary file is left"


def test_the_fallback_is_removed_when_the_process_ends(cache: Path, tmp_path: Path) -> None:
    cache.write_text("a file, not a folder")
    code = f'from cuconvt import compile as c; print(c.cached_file("gather.cu", "sm_90", {QUICK}).is_file())'
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    assert run_python("-c", code, cwd=tmp_path, paths=[ROOT], TMPDIR=str(temporary)) == "True\n"
    assert not list(temporary.iterdir())


def test_folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("CUCONVT_CACHE_DIR", "/chosen")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert compiler.cache_folder() == Path("/chosen")
    monkeypatch.setenv("CUCONVT_CACHE_DIR", "~/chosen")
    assert compiler.cache_folder() == tmp_path / "chosen"
    monkeypatch.setenv("CUCONVT_CACHE_DIR", "~no-such-user/chosen")
    assert compiler.cache_folder() == Path("~no-such-user/chosen")
    monkeypatch.setenv("CUCONVT_CACHE_DIR", "")
    assert compiler.cache_folder() == Path("/xdg/cuconvt")
    monkeypatch.delenv("CUCONVT_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert compiler.cache_folder() == tmp_path / ".cache/cuconvt"


def test_kernels_of_a_checkout_lie_beside_the_package() -> None:
    if not Path(compiler.__file__).is_relative_to(ROOT):
        pytest.skip("cuconvt is installed outside the checkout")
    assert compiler.kernel_folder() == ROOT / "kernels"


# ---- architectures -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("compute_capability", "expected"),
    [
        (90, "sm_90a"),  # for wgmma
        (86, "sm_86"),
        (89, "sm_86"),  # machine code for an older minor version loads
        (99, "sm_90"),
        (88, "sm_86"),
        (100, "compute_90"),  # code for another major version does not, but its PTX does
        (110, "compute_90"),  # PTX for something newer would not
        (121, "sm_120"),
        (200, "compute_120"),
    ],
)
def test_architecture_is_the_nearest_that_loads(
    compute_capability: int, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = SimpleNamespace(getSupportedArchs=lambda: (75, 80, 86, 90, 120), getVersion=lambda: (12, 8))
    monkeypatch.setattr(compiler, "_nvrtc", lambda: known)
    assert compiler.architecture(compute_capability) == expected


def test_architecture_of_a_gpu_that_nvrtc_has_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    known = SimpleNamespace(getSupportedArchs=lambda: (75, 80), getVersion=lambda: (13, 0))
    monkeypatch.setattr(compiler, "_nvrtc", lambda: known)
    with pytest.raises(CompileError, match=r"NVRTC 13\.0 compiles for sm_75 and newer, and this GPU is sm_70"):
        compiler.architecture(70)


# ---- errors ------------------------------------------------------------------------------------------------------


def test_a_compile_error_shows_kernel_options_and_log() -> None:
    with pytest.raises(CompileError) as caught:
        compiler.cached_file("gather.cu", "sm_90", tuple((f"THREADS_{axis}", 3) for axis in "WHDC"))
    message = str(caught.value)
    assert message.startswith("gather.cu did not compile (NVRTC_ERROR_COMPILATION")
    assert "-arch=sm_90" in message
    assert "-DTHREADS_W=3 -DTHREADS_H=3" in message
    assert re.search(r"gather\.cu\(\d+\): error: static assertion failed.*whole warps", message)


def test_a_wrong_shared_memory_of_a_plan_does_not_compile() -> None:
    with pytest.raises(CompileError, match="the plan's shared memory is not the kernel's"):
        compiler.compile_kernel("gather.cu", "sm_90", (("SHARED_BYTES", 12345),))


def test_a_syntax_error_names_file_and_line(sources: Path) -> None:
    (sources / "broken.cu").write_text('#include "common.cuh"\nextern "C" __global__ void broken() { nonsense; }\n')
    with pytest.raises(CompileError, match=r'broken\.cu did not compile(.|\n)*broken\.cu\(2\): error: .*"nonsense"'):
        compiler.compile_kernel("broken.cu", "sm_90")


def test_an_unknown_option_is_a_compile_error(cache: Path) -> None:
    with pytest.raises(CompileError, match=r"gather\.cu did not compile (.|\n)*-arch=sm_10"):
        compiler.cached_file("gather.cu", "sm_10", QUICK)
    assert not list(cache.rglob("*.bin")), "an error was cached"


def test_without_cupy_the_error_says_what_to_install(tmp_path: Path) -> None:
    code = """
import sys
sys.modules["cupy"] = None  # import cupy now raises ImportError
from cuconvt import MissingDependencyError, compile
try:
    compile.cached_file("gather.cu", "sm_90", ())
except MissingDependencyError as error:
    print(error)
"""
    text = run_python("-c", code, cwd=tmp_path, paths=[ROOT])
    assert f"needs CuPy with NVRTC: {sys.executable} -m pip install 'cupy-cuda1" in text
    assert "cupy" in text.rpartition(";")[2], "the cause is lost"


def test_without_nvrtc_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("libnvrtc.so.12 was not found")

    monkeypatch.setattr(nvrtc, "getVersion", fail)
    compiler._nvrtc.cache_clear()
    try:
        with pytest.raises(MissingDependencyError, match=r"pip install 'cupy-cuda1.*; libnvrtc.so.12 was not fou"):
            compiler.nvrtc_version()
    finally:
        compiler._nvrtc.cache_clear()


# ---- what is loaded ----------------------------------------------------------------------------------------------


def test_each_device_has_its_own_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """CuPy loads a module on each device; of a kernel, `ptr` is the current device's function."""
    cupy, device, files = pytest.importorskip("cupy"), [0], []

    class Module:
        def __init__(self, path: str):
            files.append(path)

        def get_function(self, entry: str) -> SimpleNamespace:
            number = 10 * ["gather", "gather_pack"].index(entry)

            class Raw:
                @property
                def kernel(self) -> SimpleNamespace:
                    return SimpleNamespace(ptr=number + device[0])

            return Raw()

    monkeypatch.setattr(cupy, "RawModule", Module)
    monkeypatch.setattr(cupy.cuda.runtime, "getDevice", lambda: device[0])
    monkeypatch.setattr(compiler, "cached_file", lambda *job: job)
    for memo in (compiler._kernel, compiler._module):
        memo.cache_clear()
    try:
        for device[0] in (0, 1, 0):
            for number, entry in enumerate(("gather", "gather_pack")):
                kernel = compiler.load_kernel("gather.cu", entry, "sm_90", QUICK)
                assert kernel._function == 10 * number + device[0]
                assert kernel is compiler.load_kernel("gather.cu", entry, "sm_90", QUICK)
    finally:
        for memo in (compiler._kernel, compiler._module):
            memo.cache_clear()
    assert len(files) == 1, "one file, whatever the entry points and devices"
