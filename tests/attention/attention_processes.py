"""Checks that need a process of their own; one interpreter imports torch and forks a child for each.

Run as `python attention_processes.py NAME...`; prints a line {"name": ..., "result": ...} per name.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import traceback
from pathlib import Path

import torch

PACKAGE = Path(__file__).resolve().parents[2] / "sb_lightning"


def values_with_forced_isa(isa: str) -> dict[str, object]:
    os.environ["SB_CPU_ISA"] = isa
    os.environ["SB_POISON_SCRATCH"] = "1"
    from moba_cases import Case, assert_close, assert_selection, make_inputs, run, select

    from sb_lightning.attention import backends, moba_coverage

    cpu = backends()[0]
    if not cpu.available:
        return {"refused": cpu.reason}
    cases = [
        Case((129, 64, 0, 1), (6, 2), 64, 32, dtype, seed=seed)
        for seed, dtype in enumerate(("fp32", "bf16", "fp16"))
    ]
    cases += [Case((300,), (2, 1), 32, 16, "fp16", seed=5), Case((257,), (2, 2), 128, 128, "bf16", seed=6)]
    for case in cases:
        x = make_inputs(case, fused=True)
        selection = select(case, x)
        assert_selection(case, x, selection)
        assert_close(case, run(case, x), x, selection)
        masses = [
            moba_coverage(x.q, x.k, x.cu_seqlens, block_size=case.block_size, backend=backend)
            for backend in ("cpu", "reference")
        ]
        torch.testing.assert_close(*masses, rtol=0, atol=2e-6)
    return {"isa": cpu.detail["isa"]}


def isa_in_capitals() -> dict[str, object]:
    os.environ["SB_CPU_ISA"] = "BaseLine"
    from sb_lightning.attention import backends

    return {"reason": backends()[0].reason}


def unknown_isa() -> dict[str, object]:
    os.environ["SB_CPU_ISA"] = "sse9"
    return refusal_and_reference()


def refusal_and_reference() -> dict[str, object]:
    from sb_lightning.attention import backends, moba_attention, moba_select

    q = torch.randn(40, 2, 32)
    cu_seqlens = torch.tensor([0, 40], dtype=torch.int32)
    errors = []
    for call in (
        lambda: moba_attention(q, q, q, cu_seqlens, 2, block_size=16),
        lambda: moba_select(q, q, cu_seqlens, 2, block_size=16, backend="cpu"),
    ):
        try:
            call()
            errors.append("")
        except RuntimeError as error:
            errors.append(str(error))
    out = moba_attention(q, q, q, cu_seqlens, 2, block_size=16, backend="reference")
    return {
        "available": backends()[0].available,
        "reason": backends()[0].reason,
        "errors": errors,
        "shape": list(out.shape),
    }


def package_with_foreign_library(content: bytes) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "sb_lightning"
        shutil.copytree(
            PACKAGE / "attention", copy / "attention", ignore=shutil.ignore_patterns("__pycache__")
        )
        for name in ("__init__.py", "_messages.py"):
            shutil.copy(PACKAGE / name, copy / name)
        (copy / "_attention.abi3.so").write_bytes(content)
        sys.path.insert(0, folder)
        import sb_lightning

        assert Path(sb_lightning.__file__).parent == copy
        return refusal_and_reference()


def no_library() -> dict[str, object]:
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "sb_lightning"
        shutil.copytree(
            PACKAGE / "attention", copy / "attention", ignore=shutil.ignore_patterns("__pycache__")
        )
        for name in ("__init__.py", "_messages.py"):
            shutil.copy(PACKAGE / name, copy / name)
        sys.path.insert(0, folder)
        return refusal_and_reference()


def after_fork() -> dict[str, object]:
    """The parent's OpenMP threads do not exist in the child: waiting for them would hang."""
    from moba_cases import Case, make_inputs, run

    torch.set_num_threads(2)
    case = Case((700, 300), (4, 2), 32, 32, budgets=(3, 2))
    x = make_inputs(case)
    want = run(case, x)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        # torch's own parallel ops would hang here, so the comparison is numpy's.
        got = run(case, x)
        same = all(bool((a.numpy() == b.numpy()).all()) for a, b in zip(got, want, strict=True))
        os.write(write, b"same" if same else b"other")
        os._exit(0)
    os.close(write)
    answer = os.read(read, 16).decode()
    os.waitpid(child, 0)
    return {"answer": answer}


class Attended(torch.utils.data.Dataset[object]):
    """Attention computed by whoever loads the item."""

    def __getitem__(self, seed: int) -> object:
        from moba_cases import Case, make_inputs, run

        case = Case((700, 300), (4, 2), 32, 32, budgets=(3, 2), seed=seed)
        return run(case, make_inputs(case))

    def __len__(self) -> int:
        return 4


def loader_workers() -> dict[str, object]:
    torch.set_num_threads(2)
    want = [Attended()[seed] for seed in range(4)]  # with the threads that the workers will not have
    loader = torch.utils.data.DataLoader(
        Attended(), batch_size=None, num_workers=2, timeout=30, multiprocessing_context="fork"
    )
    pairs = [pair for got, ours in zip(loader, want, strict=True) for pair in zip(got, ours, strict=True)]
    return {"compared": len(pairs), "same": all(torch.equal(*pair) for pair in pairs)}


def more_threads_than_cores() -> dict[str, object]:
    from moba_cases import Case, make_inputs, run

    same = []
    for lengths in ((3000, 70), (30,)):  # many tasks, and fewer than threads
        case = Case(lengths, (2, 1), 32, 32, budgets=(4, 1)[: len(lengths)])
        x = make_inputs(case)
        torch.set_num_threads(1)
        want = run(case, x)
        torch.set_num_threads(16)
        for _ in range(3):
            same += [torch.equal(*pair) for pair in zip(run(case, x), want, strict=True)]
    return {"compared": len(same), "same": all(same)}


def scratch_that_does_not_fit() -> dict[str, object]:
    tokens = 1 << 16
    q, k, v = (torch.zeros(tokens, 1, 32) for _ in range(3))
    import sb_lightning.attention  # noqa: F401

    cu_seqlens = torch.tensor([0, tokens], dtype=torch.int32)
    budget = torch.ones(1, 1, dtype=torch.int32)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + (
        24 << 20
    )  # the output fits, the tiles of so long a block do not
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
    try:
        torch.ops.sb.moba_attention(q, k, v, cu_seqlens, budget, tokens, tokens, 1, 1.0, False)
    except RuntimeError as error:
        return {"error": str(error)}
    return {"error": ""}


def peak_memory() -> dict[str, object]:
    from sb_lightning.attention import moba_attention

    tokens = 8192
    q, k, v = (torch.randn(tokens, heads, 64, requires_grad=True) for heads in (8, 2, 2))
    cu_seqlens = torch.tensor([0, tokens], dtype=torch.int32)
    peaks = []
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for budget in (3, 6):
        moba_attention(q, k, v, cu_seqlens, budget, block_size=256).sum().backward()
        peaks.append((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
    query_bytes = q.numel() * 4
    return {"peaks": peaks, "query_bytes": query_bytes, "scores": tokens * tokens * 4}


CHECKS = {
    "baseline": lambda: values_with_forced_isa("baseline"),
    "avx2": lambda: values_with_forced_isa("avx2"),
    "avx512": lambda: values_with_forced_isa("avx512"),
    "isa_in_capitals": isa_in_capitals,
    "unknown_isa": unknown_isa,
    "garbage": lambda: package_with_foreign_library(b"not a library"),
    "old_schema": lambda: package_with_foreign_library(b"\x7fELF sb_lightning attention schema 0;"),
    "broken": lambda: package_with_foreign_library(b"\x7fELF sb_lightning attention schema 2;"),
    "no_library": no_library,
    "after_fork": after_fork,
    "loader_workers": loader_workers,
    "more_threads_than_cores": more_threads_than_cores,
    "scratch": scratch_that_does_not_fit,
    "peak_memory": peak_memory,
}


def main() -> None:
    sys.path.insert(0, str(PACKAGE.parent))
    for name in sys.argv[1:]:
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            signal.alarm(40)  # a check that hangs ends without a line
            try:
                print(json.dumps({"name": name, "result": CHECKS[name]()}), flush=True)
            except BaseException:
                print(json.dumps({"name": name, "result": {"traceback": traceback.format_exc()}}), flush=True)
            os._exit(0)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
