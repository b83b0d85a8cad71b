"""Where checks run, how they are entered, and the shapes that they share."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
from moba_cases import Case, Inputs
from torch import Tensor

from sb_lightning.attention import dense
from sb_lightning.attention.backends import backends

RESULTS = ("out", "lse", "dq", "dk", "dv")
TWO = [
    Case((150, 1, 0, 70), (4, 2), 64, 32, "bf16", (3, 1, 1, 2)),
    Case((131, 40), (3, 1), 128, 64, "fp16", (2, 5)),
]


class LeftOut(Exception):
    """A check cannot be made here; the text says why."""


@dataclass(frozen=True)
class Machine:
    """Where the checks run."""

    device: str
    """Either "cuda" or, to try out the checks themselves, "cpu"."""
    tiny: bool
    """Whether small shapes do."""

    def refusal(self) -> str:
        """Return why the kernels do not run here, or an empty string."""
        here = next(backend for backend in backends() if backend.name == self.device)
        return "" if here.available else here.reason

    def describe(self) -> dict[str, str]:
        """Return what a reader of the results must know."""
        on_gpu = self.device == "cuda"
        return {
            "device": torch.cuda.get_device_name() if on_gpu else "CPU (no GPU: the checks tried out)",
            "capability": "{}.{}".format(*torch.cuda.get_device_capability()) if on_gpu else "-",
            "torch": torch.__version__,
            "cuda": str(torch.version.cuda),
            "dense path": dense.dense_paths(),
        }

    def is_broken(self) -> bool:
        """Free what a check left behind; return whether the GPU's context is lost, and this process."""
        if self.device == "cpu":
            return False
        try:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        except RuntimeError:
            return True
        return False

    def put(self, x: Inputs) -> Inputs:
        """Return the inputs on the device, q, k and v as leaves."""
        moved = {name: getattr(x, name).detach().to(self.device) for name in vars(x)}
        for name in ("q", "k", "v"):
            moved[name].requires_grad_()
        return Inputs(**moved)

    def capture(self, call: Callable[[], object]) -> Callable[[], object]:
        """Return what replays a call as a CUDA graph."""
        if self.device == "cpu":
            return call
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                call()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        return graph.replay


Figure = str | tuple[str, dict[str, float]]
CHECKS: dict[str, Callable[[Machine], Figure]] = {}
"""By name, whose first word is the section; each returns its figure, or raises what is wrong."""


def check(name: str) -> Callable[[Callable[[Machine], Figure]], Callable[[Machine], Figure]]:
    """Enter a check under a name."""

    def enter(function: Callable[[Machine], Figure]) -> Callable[[Machine], Figure]:
        CHECKS[name] = function
        return function

    return enter


def cases() -> list[Case]:
    """Return the matrix of shapes: odd lengths, heads, blocks, budgets per head."""
    choice = random.Random(7)
    found = list(TWO)
    for seed in range(30):
        block_size = choice.choice([16, 32, 48, 64, 128])
        sizes = [0, 1, 15, 16, 17, block_size - 1, block_size, block_size + 1, 5 * block_size + 3, 700]
        group, kv_heads = choice.choice([1, 2, 5, 6, 7, 8]), choice.choice([1, 2, 3])
        lengths = tuple(choice.choice(sizes) for _ in range(choice.randint(1, 6)))
        dim, dtype = choice.choice([32, 64, 128]), choice.choice(["bf16", "fp16"])
        found.append(Case(lengths, (group * kv_heads, kv_heads), dim, block_size, dtype, seed=seed))
    return found


def on_cpu(results: list[Tensor]) -> list[Tensor]:
    return [t.cpu() for t in results]


def relative(ours: Tensor, theirs: Tensor) -> float:
    """Return the largest difference as a share of the largest value, or of 1 where all are smaller."""
    if ours.numel() == 0:
        return 0.0
    ours, theirs = ours.detach().float(), theirs.detach().float()
    return float((ours - theirs).abs().max()) / max(1.0, float(theirs.abs().max()))
