"""Coverage of micro-batches at every budget, looked up after they were trained on."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn

from sb_lightning.attention.huggingface import TUNER, SparseSettings, sparse_bases
from sb_lightning.compare.uniform import CoverageCurve
from sb_lightning.tuning.coverage import sampled_rows
from sb_lightning.tuning.target import SparseTarget

__all__ = ["CoverageProbe"]


class CoverageProbe:
    """Runs forwards with one budget for all sequences, and adds up what any other would have covered.

    Args:
        module: A `CausalLMModule`.
        budget: Of all sequences.
    """

    def __init__(self, module: LightningModule, budget: int) -> None:
        self._module = module
        (self._base,) = sparse_bases(module)
        settings = self._base.sb_settings
        assert isinstance(settings, SparseSettings)
        self._settings = settings
        self._budget = budget
        self._layers = [
            int(part.layer_idx)  # type: ignore[arg-type]
            for part in self._base.modules()
            if hasattr(part, "layer_idx") and hasattr(part, "sb_settings")
        ]
        self._made: list[tuple[SparseTarget, list[int]]] = []
        self._sums, self._rows = np.zeros(1), 0.0

    def run(self, batches: Sequence[Any]) -> None:
        """Run the forwards of micro-batches."""
        setattr(self._base, TUNER, self)
        try:
            with torch.no_grad():
                for batch in batches:
                    self._module.loss_sum(batch)  # type: ignore[operator]
                    if batch.get("target_tokens", 1):
                        self._add()
                    self._made.clear()
        finally:
            delattr(self._base, TUNER)

    def target(self, module: nn.Module, cu_seqlens: Tensor, attention_mask: Any) -> SparseTarget:
        """Return what tells the layers of a forward to use the budget, and to write coverage down."""
        lengths = [end - start for start, end in pairwise(cu_seqlens.tolist())]
        count, device = len(lengths), cu_seqlens.device
        width = max(-(-length // self._settings.block_size) for length in lengths)
        budgets = torch.full((count,), self._budget, dtype=torch.int32, device=device)
        target = SparseTarget(
            cost_us=torch.zeros(count, width, dtype=torch.int32, device=device),
            tau_us=torch.zeros((), dtype=torch.int64, device=device),
            tolerance=torch.zeros((), device=device),
            k0=budgets,
            given=budgets,
            record=torch.zeros(max(self._layers) + 1, count, 3, device=device),
            curves=torch.zeros(max(self._layers) + 1, count, width, device=device),
            grid=torch.arange(width, device=device),
        )
        self._made.append((target, lengths))
        return target

    def sync_curve(self, trainer: Trainer, usual: int) -> CoverageCurve:
        """Return the sum over the micro-batches of all ranks; all ranks must call this.

        Args:
            trainer: Whose ranks meet.
            usual: k0
        """
        device = trainer.strategy.root_device
        # float32 where a device knows no other; a sum of shares loses nothing that matters.
        width = trainer.strategy.reduce(torch.tensor(len(self._sums), device=device), reduce_op="max")
        sums = self._lengthened(int(width))
        numbers = torch.tensor([self._rows, *sums], dtype=torch.float32, device=device)
        told = trainer.strategy.reduce(numbers, reduce_op="sum")
        assert isinstance(told, Tensor)
        rows, *total = told.tolist()
        return CoverageCurve(rows=rows, sums=tuple(total), budget=self._budget, usual=usual)

    def _add(self) -> None:
        sparse = [layer for layer in self._layers if layer not in self._settings.dense_layers]
        for target, lengths in self._made:
            assert target.curves is not None
            curves = target.curves[sparse].double().mean(0).cpu().numpy()  # [N, width]
            rows = np.array([sampled_rows(n, self._settings.block_size) for n in lengths])
            width = max(len(self._sums), curves.shape[1])
            self._sums = self._lengthened(width)
            curves = np.pad(curves, ((0, 0), (0, width - curves.shape[1])), mode="edge")
            self._sums = self._sums + rows @ curves
            self._rows += float(rows.sum())

    def _lengthened(self, width: int) -> Any:
        """Return the sums at more budgets: beyond the longest sequence nothing changes."""
        return np.pad(self._sums, (0, width - len(self._sums)), mode="edge")
