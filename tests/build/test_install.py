"""The ways to install, each run once from a copy of the sources; what is said when something is missing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
USE = """
import torch
import sb_lightning.callbacks
from sb_lightning.attention import backends, moba_attention
assert {"cpu": True}.items() <= {b.name: b.available for b in backends()}.items(), backends()
q, k = torch.randn(70, 2, 32), torch.randn(70, 1, 32)
out = moba_attention(q, k, k, torch.tensor([0, 30, 70], dtype=torch.int32), 2, block_size=16)
from sb_lightning.latency import ENGINE, AnalyticCost, ModelShape
assert ENGINE.available, ENGINE.reason
cost = AnalyticCost(ModelShape(layers=1, query_heads=2, kv_heads=1, head_dim=32, hidden_size=64,
                               intermediate_size=64, vocab_size=64, block_size=16))
assert cost.predict(70, 2) > 0
print(out.shape, sb_lightning.__file__)
"""


def run(command, folder, **environment):
    return subprocess.run(
        [str(part) for part in command],
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": "",
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
            "SB_BUILD_CUDA": "0",
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """The sources as a clean clone has them."""
    target = tmp_path_factory.mktemp("sources") / "sb_lightning_copy"
    target.mkdir()
    for name in ("sb_lightning", "callbacks", "csrc"):
        ignore = shutil.ignore_patterns("*.so", "__pycache__", "*.o")
        shutil.copytree(ROOT / name, target / name, symlinks=True, ignore=ignore)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / name, target / name)
    return target


@pytest.mark.timeout(300)
def test_build_in_place_then_editable_then_wheel(copy, tmp_path):
    setup = [sys.executable, "setup.py", "build_ext", "--inplace"]
    first = run(setup, copy)
    assert first.returncode == 0, first.stderr
    (built,) = (copy / "sb_lightning").glob("_attention*.so")
    assert "abi3" in built.name
    assert list((copy / "sb_lightning").glob("_core.*.so"))
    objects = {path: path.stat().st_mtime_ns for path in copy.rglob("*.o")}
    assert run(setup, copy).returncode == 0
    assert {path: path.stat().st_mtime_ns for path in copy.rglob("*.o")} == objects, (
        "nothing changed, yet it compiled"
    )

    # An environment of its own that sees the packages of this one.
    environment = tmp_path / "environment"
    assert run([sys.executable, "-m", "venv", "--without-pip", environment], tmp_path).returncode == 0
    python = environment / "bin" / "python"
    site = Path(
        run([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], tmp_path).stdout.strip()
    )
    (site / "packages.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        python,
        "install",
        "-q",
        "--no-build-isolation",
        "--no-deps",
    ]
    editable = run([*pip, "-e", copy], tmp_path)
    assert editable.returncode == 0, editable.stderr
    used = run([python, "-c", USE], tmp_path)
    assert used.returncode == 0, used.stderr
    assert str(copy) in used.stdout

    wheel = run(
        [
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "-q",
            "--no-build-isolation",
            "--no-deps",
            "-w",
            tmp_path,
            copy,
        ],
        tmp_path,
    )
    assert wheel.returncode == 0, wheel.stderr
    (file,) = tmp_path.glob("sb_lightning-*.whl")
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    assert f"-{tag}-{tag}-" in file.name
    names = zipfile.ZipFile(file).namelist()
    assert "sb_lightning/callbacks/__init__.py" in names
    assert "sb_lightning/py.typed" in names
    assert not [name for name in names if name.startswith(("tests", "callbacks/", "csrc", "benchmarks"))]
    target = tmp_path / "unpacked"
    zipfile.ZipFile(file).extractall(target)
    used = run([sys.executable, "-c", USE], tmp_path, PYTHONPATH=str(target))
    assert used.returncode == 0, used.stderr
    assert str(target) in used.stdout


def fake_package(folder, name):
    (folder / name).mkdir(parents=True)
    (folder / name / "__init__.py").write_text(f"raise ImportError('{name} is not here')\n", encoding="utf-8")


def test_missing_torch_is_named(copy, tmp_path):
    fake_package(tmp_path, "torch")
    result = run([sys.executable, "setup.py", "build_ext", "--inplace"], copy, PYTHONPATH=str(tmp_path))
    assert result.returncode != 0
    for part in ("torch cannot be imported", "Why it matters", "pip install --no-build-isolation"):
        assert part in result.stderr
    assert "Traceback" not in result.stderr


def test_missing_compiler_is_named(copy):
    result = run([sys.executable, "setup.py", "build_ext", "--inplace"], copy, CXX="no-such-compiler")
    assert result.returncode != 0
    for part in ("no C++ compiler: 'no-such-compiler'", "Why it matters", "apt-get install g++"):
        assert part in result.stderr
    assert "Traceback" not in result.stderr


def test_missing_ninja_is_told_and_not_needed(copy, tmp_path):
    fake_package(tmp_path, "ninja")
    tools = tmp_path / "tools"
    tools.mkdir()
    for tool in ("g++", "c++", "gcc", "cc", "as", "ld", "sh", "nm", "strip", "which"):
        if found := shutil.which(tool):
            (tools / tool).symlink_to(found)
    for path in (copy / "sb_lightning").glob("_attention*.so"):
        path.unlink()
    result = run(
        [sys.executable, "setup.py", "build_ext", "--inplace"],
        copy,
        PYTHONPATH=str(tmp_path),
        PATH=str(tools),
    )
    assert result.returncode == 0, result.stderr
    assert "ninja is not installed" in result.stderr
    assert list((copy / "sb_lightning").glob("_attention*.so"))


def test_without_the_extension_the_reference_works(copy, tmp_path):
    result = run([sys.executable, "setup.py", "build_py", "-d", tmp_path / "pure"], copy, SB_BUILD_EXT="0")
    assert result.returncode == 0, result.stderr
    assert not list((tmp_path / "pure").rglob("*.so"))
    pure = (
        USE.replace('{"cpu": True}', '{"cpu": False, "reference": True}')
        .replace("block_size=16)\n", "block_size=16, backend='reference')\n")
        .replace("assert ENGINE.available", "assert not ENGINE.available")
    )
    used = run([sys.executable, "-c", pure], tmp_path, PYTHONPATH=str(tmp_path / "pure"))
    assert used.returncode == 0, used.stderr
    refused = run([sys.executable, "-c", pure.replace(", backend='reference'", "")], tmp_path,
                  PYTHONPATH=str(tmp_path / "pure"))  # fmt: skip
    assert refused.returncode != 0
    assert "setup.py build_ext --inplace" in refused.stderr
