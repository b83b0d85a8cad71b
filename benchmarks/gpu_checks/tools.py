"""compute-sanitizer, and times beside scaled_dot_product_attention."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import torch
from moba_cases import make_inputs, run

from gpu_checks.machine import TWO, Figure, LeftOut, Machine, check
from gpu_checks.times import LENGTHS, SHAPES, measure
from sb_lightning.attention import moba_coverage


def run_shapes(machine: Machine) -> None:
    """Run all ops on two shapes, for compute-sanitizer."""
    for case in TWO:
        x = machine.put(make_inputs(case))
        for deterministic in (False, True):
            run(case, x, deterministic=deterministic)
        mass = moba_coverage(x.q.detach(), x.k.detach(), x.cu_seqlens, block_size=case.block_size)
        count, _, ranks = mass.shape
        cost_us = torch.arange(ranks + 1, dtype=torch.int32, device=machine.device).repeat(count, 1)
        numbers = [torch.tensor(n, device=machine.device) for n in (5, 0.3)]
        k0 = torch.tensor([2], dtype=torch.int32, device=machine.device)
        torch.ops.sb.moba_budget(mass, cost_us, *numbers, k0, 1, x.cu_seqlens, case.block_size)
    if machine.device == "cuda":
        torch.cuda.synchronize()
    print("all shapes ran")


def find_sanitizer() -> str | None:
    """Return compute-sanitizer: that on PATH, or beside a toolkit's nvcc."""
    homes = [os.environ.get("CUDA_HOME"), "/usr/local/cuda"]
    if nvcc := shutil.which(os.environ.get("NVCC") or "nvcc"):
        homes.append(str(Path(nvcc).resolve().parent.parent))
    places = [None, *(f"{home}/bin" for home in homes if home)]
    found = (shutil.which("compute-sanitizer", path=place) for place in places)
    return next((path for path in found if path), None)


def sanitizer_check(tool: str, timeout_s: int) -> None:
    """Enter the run of the ops under a tool of compute-sanitizer."""

    @check(f"sanitizer {tool}")
    def sanitizer(machine: Machine) -> Figure:
        if machine.device == "cpu":
            raise LeftOut("compute-sanitizer needs a GPU")
        program = find_sanitizer()
        if program is None:
            raise LeftOut("compute-sanitizer is neither on PATH nor beside nvcc")
        script = str(Path(__file__).parents[1] / "gpu_check.py")
        command = [program, "--tool", tool, "--error-exitcode", "9"]
        command += ["--kernel-name-exclude", "kernel_substring=at::", sys.executable, script, "--shapes"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
        told = done.stdout + done.stderr
        summary = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: *(.*)", told)
        fine = done.returncode == 0 and summary and "all shapes ran" in told
        assert fine, f"exit code {done.returncode}: {told.strip()[-500:]}"
        return f"two shapes, all ops: {summary[-1]}"


sanitizer_check("memcheck", 60)
sanitizer_check("racecheck", 90)


def time_check(dim: int, length: int, budget: int) -> None:
    """Enter the measurement of one length."""

    @check(f"times D{dim} L{length} k{budget}")
    def times(machine: Machine) -> Figure:
        heads = SHAPES[dim]
        if machine.tiny:
            row = measure(machine.device, min(length // 64, 512), 2, (4, 2), dim, 64)
        else:
            row = measure(machine.device, length, budget, heads, dim, 256)
        figure = (
            f"forward {row['sparse_forward_ms']:.2f} ms (select {row['select_ms']:.2f}), "
            f"backward {row['sparse_backward_ms']:.2f}; coverage {row['coverage_ms']:.2f}; SDPA "
            f"{row['dense_forward_ms']:.2f} and {row['dense_backward_ms']:.2f}: {row['speedup']:.2f}x"
        )
        return figure, row


for _dim, (_length, _budget) in itertools.product(SHAPES, LENGTHS):
    time_check(_dim, _length, _budget)
