"""The budget of one layer, decided inside the forward from its own coverage."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from sb_lightning.attention.coverage import moba_budget, moba_coverage
from sb_lightning.tuning.target import BUDGET, SparseTarget

__all__ = ["tuned_budget"]


@torch.no_grad()
def tuned_budget(
    target: SparseTarget,
    layer: int,
    q: Tensor,
    k: Tensor,
    cu_seqlens: Tensor,
    *,
    block_size: int,
    max_seqlen: int,
    backend: str | None = None,
) -> Tensor:
    """Return the budget of each sequence for one layer, and enter it into the target's record.

    A place of the record that is filled (a forward that is run again, a budget given from outside) decides;
    the choice is `torch.where`, so that nothing waits for the device and a compiled graph serves both.

    Args:
        target: That of this forward; its record is written to.
        layer: Number of the layer.
        q: # [T, Hq, D]
        k: # [T, Hkv, D]
        cu_seqlens: # [N + 1] int32
        block_size: Keys per block.
        max_seqlen: Bound of the lengths.
        backend: Attention backend; None takes the best available.

    Returns:
        # [N, 1] int32, for all heads
    """
    if not target.measures:
        target.record[layer, :, BUDGET] = target.given.to(torch.float32)
        return target.given[:, None]
    found = target.given
    if not torch.compiler.is_compiling():
        # A graph that read what it writes could not keep it for its backward pass. It need not: what it runs
        # again there is given the same numbers, and decides alike.
        found = torch.maximum(found, target.record[layer, :, BUDGET].to(torch.int32))
    is_timed = target.spent_s is not None and not torch.compiler.is_compiling()
    start = time.perf_counter() if is_timed else 0.0
    max_budget = target.cost_us.shape[1]
    mass = moba_coverage(
        q.detach(),
        k.detach(),
        cu_seqlens,
        block_size=block_size,
        max_rank=max_budget - 1,
        max_seqlen=max_seqlen,
        backend=backend,
    )
    chosen = moba_budget(
        mass,
        target.cost_us,
        target.tau_us,
        target.tolerance,
        target.k0,
        target.min_budget,
        cu_seqlens=cu_seqlens,
        block_size=block_size,
        tune_short=target.tune_short,
        backend=backend,
    )
    budget = torch.where(found > 0, found, chosen)
    curve = torch.nn.functional.pad(mass.mean(1).cumsum(-1), (1, 0))  # [N, max_budget]
    at = torch.stack([budget, target.k0], -1).clamp(max=max_budget).to(torch.int64) - 1
    target.record[layer] = torch.cat([budget.to(torch.float32)[:, None], curve.gather(1, at)], -1)
    if target.curves is not None and target.grid is not None:
        target.curves[layer] = curve.index_select(1, target.grid)
    if is_timed:
        assert target.spent_s is not None
        target.spent_s += time.perf_counter() - start
    return budget[:, None]
