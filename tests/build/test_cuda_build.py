"""How the CUDA compiler is found, used and refused. No test compiles with the real one."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sb_lightning.attention import backends

ROOT = Path(__file__).resolve().parents[2]
if not (ROOT / "csrc" / "cuda_build.py").exists():
    pytest.skip("the sources are not here: the tests run on an installed package", allow_module_level=True)


def load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


cuda_build = load(ROOT / "csrc" / "cuda_build.py")
cuda_kernels = load(ROOT / "benchmarks" / "cuda_kernels.py")

# Answers as nvcc does and counts compilations; warns where the source says so, an error with -Werror.
FAKE = """#!/bin/sh
case "$*" in
  *--version*) echo "Cuda compilation tools, release $(cat "$0.release"), V$(cat "$0.release").93"; exit;;
  *--dryrun*) exit;;
esac
echo "$*" >> "$0.calls"
while [ "$1" != -c ]; do case "$1" in *all-warnings*) strict=1;; esac; shift; done
if grep -q WARN "$2"; then echo "warning: spills" >&2; [ -z "$strict" ] || exit 255; fi
echo object > "$4"
"""


@pytest.fixture
def fake_nvcc(tmp_path):
    def make(release="13.0", path="nvcc"):
        program = tmp_path / path
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text(FAKE)
        program.chmod(0o755)
        Path(f"{program}.release").write_text(release)
        return program

    return make


def setup(tmp_path, torch_cuda, **environment):
    """Run setup.py up to where it would build, with a torch of that CUDA version."""
    (tmp_path / "sitecustomize.py").write_text(f"import torch\ntorch.version.cuda = {torch_cuda!r}\n")
    return subprocess.run(
        [sys.executable, "setup.py", "-q", "--version"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(tmp_path), "SB_BUILD_CUDA": "1", **environment},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_another_major_version_of_cuda_is_refused_and_both_are_named(tmp_path, fake_nvcc):
    done = setup(tmp_path, "13.0", NVCC=str(fake_nvcc("12.8")))
    assert done.returncode != 0
    for part in ("is of CUDA 12.8", "built with CUDA 13.0", "toolkit of CUDA 13", "SB_BUILD_CUDA=0"):
        assert part in done.stderr
    assert "Traceback" not in done.stderr


def test_a_missing_nvcc_is_an_error_only_where_the_kernels_are_demanded(tmp_path):
    demanded = setup(tmp_path, None, NVCC="no-such-nvcc")
    assert demanded.returncode != 0
    for part in ("NVCC is 'no-such-nvcc'", "Why it matters", "requirements/nvcc.txt", "SB_BUILD_CUDA=0"):
        assert part in demanded.stderr
    assert "Traceback" not in demanded.stderr
    auto = setup(tmp_path, "13.0", NVCC="no-such-nvcc", SB_BUILD_CUDA="auto")
    assert auto.returncode == 0, auto.stderr
    assert "NVCC is 'no-such-nvcc'" in auto.stderr


def test_auto_asks_for_no_nvcc_on_a_torch_without_cuda(tmp_path):
    done = setup(tmp_path, None, NVCC="no-such-nvcc", SB_BUILD_CUDA="auto")
    assert done.returncode == 0
    assert "nvcc" not in done.stderr


def test_a_missing_runtime_and_an_unknown_wish_are_named(tmp_path, fake_nvcc):
    done = setup(tmp_path, None, NVCC=str(fake_nvcc()))
    assert done.returncode != 0
    assert "libcudart_static.a" in done.stderr
    done = setup(tmp_path, None, SB_BUILD_CUDA="yes")
    assert done.returncode != 0
    assert "SB_BUILD_CUDA is 'yes'" in done.stderr


def test_nvcc_of_the_wheels_is_found(tmp_path, fake_nvcc, monkeypatch):
    monkeypatch.delenv("NVCC", raising=False)
    monkeypatch.setattr(cuda_build.sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setattr(cuda_build.shutil, "which", lambda name: None)
    assert cuda_build.find_nvcc() is None
    wheel = fake_nvcc("12.6", "nvidia/cu12/bin/nvcc")
    found = cuda_build.find_nvcc()
    assert (found.path, found.release) == (str(wheel), "12.6")
    assert found.architectures == ("sm_80", "sm_90a")
    monkeypatch.setenv("NVCC", "another")
    assert cuda_build.find_nvcc() is None


def test_only_what_changed_is_compiled_and_strict_refuses_what_was_warned_of(
    tmp_path, fake_nvcc, monkeypatch
):
    program = fake_nvcc()
    kernels = tmp_path / "csrc" / "kernels"
    kernels.mkdir(parents=True)
    monkeypatch.setattr(cuda_build, "CSRC", tmp_path / "csrc")
    monkeypatch.setattr(cuda_build, "KERNELS", kernels)
    nvcc = cuda_build.Nvcc(str(program), "13.0", "release 13.0")
    (kernels / "a.cu").write_text('#include "kernels/a.cuh"\n')
    (kernels / "a.cuh").write_text("// one\n")
    (kernels / "b.cu").write_text("// b\n")

    def compiled(strict=False):
        calls = Path(f"{program}.calls")
        calls.unlink(missing_ok=True)
        objects = cuda_build.compile_kernels(nvcc, tmp_path / "out", strict)
        assert [one.source.name for one in objects] == ["a.cu", "b.cu"]
        assert all(one.target.exists() for one in objects)
        assert len(list((tmp_path / "out").glob("*.o"))) == 2
        return len(calls.read_text().splitlines()) if calls.exists() else 0

    assert compiled() == 2
    assert compiled(strict=True) == 0
    (kernels / "a.cuh").write_text("// WARN two\n")
    (kernels / "a.cu").write_text('#include "kernels/a.cuh"\n// WARN\n')
    assert compiled() == 1
    with pytest.raises(subprocess.CalledProcessError) as refused:
        compiled(strict=True)
    assert "spills" in refused.value.stderr


def test_launches_are_read_off_the_sources():
    text = """
    using Shape = SelectShape<E, D>;
    Run("AKernel", AKernel<E, D>, dim3(grid(a, b)), kThreads,
        Shape::Shared(stride, true), machine, Arguments{p, q->x});
    RunScan(lists, 1, machine);
    """
    (launch,) = cuda_kernels.launches(text)
    assert (launch.name, launch.threads, launch.shared) == (
        "AKernel",
        "kThreads",
        "Shape::Shared(stride, true)",
    )
    assert launch.aliases == ("using Shape = SelectShape<E, D>;",)
    for source in cuda_kernels.KERNELS.glob("*.cu"):
        assert len(cuda_kernels.launches(source.read_text())) == source.read_text().count('Run("')


@pytest.mark.skipif(
    os.environ.get("SB_BUILD_CUDA") != "1", reason="the extension is built without SB_BUILD_CUDA=1"
)
def test_the_kernels_are_in_the_extension_that_ci_builds():
    assert torch._C._dispatch_has_kernel_for_dispatch_key("sb::moba_attention", "CUDA")
    cuda = next(backend for backend in backends() if backend.name == "cuda")
    assert cuda.available or "CUDA kernels are built, but" in cuda.reason
