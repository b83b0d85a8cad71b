"""CUDA graphs: of the attention, and of a whole training step with coverage and budgets."""

from __future__ import annotations

import itertools

import torch
from moba_cases import Case, make_inputs
from torch import Tensor

from gpu_checks.machine import Figure, Machine, check, relative
from sb_lightning.attention import moba_attention
from sb_lightning.attention.tuned import tuned_budget
from sb_lightning.tuning import SparseTarget
from sb_lightning.tuning.target import BUDGET


@check("graph attention")
def graph_attention(machine: Machine) -> Figure:
    """A CUDA graph holds the launches, and another budget is only data to it."""
    case = Case((300, 200), (4, 2), 64, 32, "bf16", (4, 3))
    x = machine.put(make_inputs(case, requires_grad=False))
    out = torch.empty_like(x.q)

    def attention() -> Tensor:
        bounds = (32, 300, 10, 0.125, False)
        q, k, v = x.q.detach(), x.k.detach(), x.v.detach()
        return torch.ops.sb.moba_attention(q, k, v, x.cu_seqlens, x.budget, *bounds)[0]

    replay = machine.capture(lambda: out.detach().copy_(attention()))
    for value in (4, 1, 7):
        x.budget.fill_(value)
        replay()
        assert torch.equal(out, attention()), f"the graph differs at budget {value}"
    return "three budgets, equal to eager bit for bit"


class Step:
    """A training step of two attention layers: coverage, budgets, forward, backward, update."""

    lengths, heads, dim, block_size, width = (300, 1, 0, 200), (4, 2), 64, 32, 10

    def __init__(self, device: str) -> None:
        draw = torch.Generator().manual_seed(3)
        tokens, count = sum(self.lengths), len(self.lengths)
        query_heads, kv_heads = self.heads

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=draw).to(device)

        self.x, self.y = normal(tokens, 128), normal(tokens, 128)
        rows = (query_heads + 2 * kv_heads) * self.dim
        sizes = [((128, rows), 0.2), ((query_heads * self.dim, 128), 0.02)] * 2
        self.weights = [normal(*size).mul_(scale).requires_grad_() for size, scale in sizes]
        ends = itertools.accumulate(self.lengths, initial=0)
        self.cu_seqlens = torch.tensor(list(ends), dtype=torch.int32, device=device)
        steps = torch.arange(1, self.width + 1, dtype=torch.int32).mul(10)
        self.target = SparseTarget(
            cost_us=steps.repeat(count, 1).to(device),
            tau_us=torch.tensor(130, device=device),
            tolerance=torch.tensor(0.4, device=device),
            k0=torch.full((count,), 3, dtype=torch.int32, device=device),
            given=torch.zeros(count, dtype=torch.int32, device=device),
            record=torch.zeros(2, count, 3, device=device),
        )
        self.loss = torch.zeros((), device=device)

    def __call__(self) -> None:
        query_heads, kv_heads = self.heads
        options = {"block_size": self.block_size, "max_seqlen": max(self.lengths)}
        self.target.record.zero_()
        x = self.x.to(torch.bfloat16)
        for layer in range(2):
            inner, outer = (w.to(torch.bfloat16) for w in self.weights[2 * layer : 2 * layer + 2])
            qkv = (x @ inner).unflatten(1, (-1, self.dim))
            q, k, v = qkv.split([query_heads, kv_heads, kv_heads], 1)
            budget = tuned_budget(self.target, layer, q, k, self.cu_seqlens, **options)
            out = moba_attention(
                q, k, v, self.cu_seqlens, budget, max_budget=self.width, deterministic=True, **options
            )
            x = x + out.flatten(1) @ outer
        loss = (x.float() - self.y).square().mean()
        with torch.no_grad():
            for weight, grad in zip(self.weights, torch.autograd.grad(loss, self.weights), strict=True):
                weight.sub_(grad, alpha=0.01)
            self.loss.copy_(loss)

    def budgets(self) -> list[list[float]]:
        return self.target.record[..., BUDGET].tolist()


@check("graph training step")
def graph_step(machine: Machine) -> Figure:
    """Coverage, budgets, attention, gradients and update in one graph; other targets are data to it."""
    held, eager = Step(machine.device), Step(machine.device)
    replay = machine.capture(held)
    seen, worst = [], 0.0
    for tau, tolerance, k0, given in (
        (130, 0.4, 3, 0),
        (60, 0.9, 3, 0),
        (10**6, 0.9, 2, 0),
        (90, 0.0, 5, 0),
        (90, 0.5, 5, 4),
        (90, 0.5, 5, 1),
    ):
        with torch.no_grad():
            for ours, theirs in zip(eager.weights, held.weights, strict=True):
                ours.copy_(theirs)
        for step in (held, eager):
            step.target.tau_us.fill_(tau)
            step.target.tolerance.fill_(tolerance)
            step.target.k0.fill_(k0)
            step.target.given.fill_(given)
        before = [w.detach().clone() for w in held.weights]
        replay()
        eager()
        seen.append(held.budgets())
        assert held.budgets() == eager.budgets(), f"budgets {held.budgets()}, eager {eager.budgets()}"
        pairs = [(held.loss, eager.loss)]
        for ours, theirs, old in zip(held.weights, eager.weights, before, strict=True):
            update = (theirs - old).detach().abs().max()
            assert float(update) > 0, "no weight changed"
            pairs.append(((ours - old) / update, (theirs - old) / update))
        for pair in pairs:
            difference = relative(*pair)
            assert difference < 0.01, f"differs from eager by {difference:.1e}, tau {tau}, given {given}"
            worst = max(worst, difference)
    different = len({str(budgets) for budgets in seen})
    assert different > 3, f"only {different} different budgets in six steps"
    return f"six steps, {different} different budgets, all as in eager; largest difference {worst:.1e}"
