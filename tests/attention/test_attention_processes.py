"""Instruction sets, stale libraries, fork, threads and memory."""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from moba_cases import Case, make_inputs, run

from sb_lightning.attention import Backend, backends
from sb_lightning.attention.extension import SCHEMA_VERSION, Extension, find_extension, load_extension

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def results():
    from attention_processes import CHECKS

    script = Path(__file__).with_name("attention_processes.py")
    done = subprocess.run(
        [sys.executable, str(script), *CHECKS],
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
        env={"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"},
    )
    found = {line["name"]: line["result"] for line in map(json.loads, done.stdout.splitlines())}
    assert set(found) == set(CHECKS), f"a check died: {done.stderr[-2000:]}"
    return found


@pytest.mark.parametrize("isa", ["baseline", "avx2", "avx512"])
def test_each_instruction_set_agrees_with_the_reference(results, isa):
    result = results[isa]
    assert "traceback" not in result, result["traceback"]
    if "refused" in result:
        assert f"SB_CPU_ISA is '{isa}'" in result["refused"]
        pytest.skip(f"this machine lacks {isa}")
    assert result == {"isa": isa}


def test_unknown_instruction_set_is_named(results):
    result = results["unknown_isa"]
    assert result["available"] is False
    assert "SB_CPU_ISA is 'sse9': no instruction set has that name" in result["reason"]
    assert "baseline" in result["reason"]
    for error in result["errors"]:
        assert error.count("To fix it, ") == 1
        assert "To fix it, unset SB_CPU_ISA or set it to one of: " in error
        assert "rebuild" not in error


def test_an_instruction_set_may_be_named_in_capitals(results):
    assert results["isa_in_capitals"] == {"reason": "C++ kernels for baseline"}


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("unknown_isa", "SB_CPU_ISA"),
        ("garbage", "is no build of this extension"),
        ("old_schema", f"op schemas 0, this package needs {SCHEMA_VERSION}"),
        ("broken", "cannot be loaded"),
        ("no_library", "is not built"),
    ],
)
def test_refused_library_breaks_nothing_but_itself(results, name, reason):
    result = results[name]
    assert "traceback" not in result, result.get("traceback")
    assert result["available"] is False
    assert reason in result["reason"]
    for error in result["errors"]:
        assert reason in error
        assert "backend='reference'" in error
        assert error.count("To fix it, ") == 1
    if name != "unknown_isa":
        assert "python setup.py build_ext --inplace" in result["reason"]
    assert result["shape"] == [40, 2, 32]


def test_forked_child_does_not_hang(results):
    assert results["after_fork"] == {"answer": "same"}


def test_workers_of_a_data_loader_do_not_hang(results):
    assert results["loader_workers"] == {"compared": 20, "same": True}


def test_more_threads_than_cores_and_than_tasks(results):
    assert results["more_threads_than_cores"] == {"compared": 30, "same": True}


def test_scratch_that_does_not_fit_raises(results):
    assert "no memory for the scratch space" in results["scratch"]["error"]


def test_peak_memory_is_that_of_inputs_and_gradients(results):
    # Dense scores would be 256 MiB per head; out, dout, dq, dk, dv and scratch are what is really needed.
    result = results["peak_memory"]
    assert max(result["peaks"]) < result["scores"] / 2
    assert max(result["peaks"]) < 8 * result["query_bytes"]


def test_backends_list_says_what_runs():
    found = backends()
    assert [backend.name for backend in found] == ["cpu", "cuda", "reference"]
    assert all(isinstance(backend, Backend) for backend in found)
    assert all(backend.available for backend in found if backend.name != "cuda")
    assert found[1].available or "CUDA" in found[1].reason
    assert found[0].detail["isa"] == torch.ops.sb.cpu_isa()
    assert found[0].detail["isa"] in found[0].reason


def test_load_extension_reports_an_unreadable_file(tmp_path):
    found = load_extension(tmp_path / "missing.so")
    assert isinstance(found, Extension)
    assert not found.available
    assert "cannot be read" in found.refusal


def test_find_extension(tmp_path):
    assert find_extension(tmp_path) is None
    (tmp_path / "_attention.abi3.so").touch()
    assert find_extension(tmp_path) == tmp_path / "_attention.abi3.so"


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_any_number_of_threads_gives_the_same_bits(dtype):
    case = Case((1500, 300, 1, 0, 700), (6, 2), 32, 32, dtype, (4, 20, 1, 1, 2))
    x = make_inputs(case)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        want = run(case, x)
        for threads in (1, 2, 4, 7):
            torch.set_num_threads(threads)
            for ours, wanted in zip(run(case, x), want, strict=True):
                assert torch.equal(ours, wanted), f"{threads} threads"
    finally:
        torch.set_num_threads(before)


def test_two_python_threads_at_once():
    case = Case((900, 300), (4, 2), 32, 32, budgets=(3, 4))
    want = run(case, make_inputs(case))
    got: list[list[torch.Tensor]] = []

    def work() -> None:
        x = make_inputs(case)
        got.extend(run(case, x) for _ in range(3))

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(got) == 6
    for result in got:
        for ours, wanted in zip(result, want, strict=True):
            assert torch.equal(ours, wanted)


def isa_objects() -> dict[str, Path]:
    """Find the kernels' object files of any build in this tree."""
    found = {}
    for isa in ("baseline", "avx2", "avx512"):
        places = [
            *ROOT.glob(f"build/temp*/isa/kernels_{isa}.o"),
            *ROOT.glob(f"build/cmake/CMakeFiles/kernels_{isa}.dir/**/*.o"),
        ]
        if places:
            found[isa] = places[0]
    return found


@pytest.mark.skipif(platform.machine() != "x86_64", reason="only x86-64 has several instruction sets")
@pytest.mark.skipif(shutil.which("nm") is None, reason="needs nm")
def test_instruction_sets_share_no_symbol():
    # The linker keeps one copy of what two objects both define; the AVX-512 copy would crash older machines.
    objects = isa_objects()
    if not objects:
        pytest.fail("no object files: build them with setup.py build_ext or make cpp-test")
    for isa, path in objects.items():
        lines = subprocess.run(["nm", "-C", str(path)], capture_output=True, text=True, check=True).stdout
        for line in lines.splitlines():
            kind, name = line[17:18], line[19:]
            if kind in "Uabdrt ":  # undefined, or local to the object
                continue
            assert kind not in "WwVvu", f"{isa}: weak symbol {name}"
            assert f"sb::{isa}::" in name, f"{isa}: {name} is not its own"
