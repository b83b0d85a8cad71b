"""The file that `sb predict` leaves: one line per sequence, with its loss."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_info

from sb_lightning.callbacks.run_files import run_directory

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

__all__ = ["PredictionWriter"]

Row = tuple[int, float, int]


class PredictionWriter(Callback):
    """Writes `predictions.jsonl` into the run's folder: one line per sequence, sorted by its number.

    A line has `sequence_id`, `document` (the id of the document the sequence comes from, null where the data
    module does not tell), `loss` (mean over its target tokens; null if it is not finite) and
    `target_tokens`. Works with any module whose `predict_step` returns a dict of `sequence_ids`, `loss` and
    `target_tokens`, as `CausalLMModule` does; another one is left alone. The ranks meet once, at the end, and
    rank zero writes the file whole or not at all.

    Attributes:
        path: The file that was written; rank zero only.
        loss: Mean loss over all target tokens; rank zero only.

    Example::

        from lightning.pytorch import Trainer
        from sb_lightning.callbacks import PredictionWriter
        trainer = Trainer(callbacks=[PredictionWriter()])
        trainer.predict(module, datamodule=data, return_predictions=False)
    """

    def __init__(self) -> None:
        self.path: Path | None = None
        self.loss: float | None = None
        self._rows: list[Row] = []

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start with nothing."""
        self.path, self.loss = None, None
        self._rows = []

    def on_predict_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Keep the three numbers of each sequence."""
        if isinstance(outputs, Mapping) and {"sequence_ids", "loss", "target_tokens"} <= set(outputs):
            columns = (outputs["sequence_ids"], outputs["loss"], outputs["target_tokens"])
            for sequence, loss, count in zip(*columns, strict=True):
                self._rows.append((int(sequence), float(loss), int(count)))

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Bring the ranks together and write the file."""
        rows = self.gather_rows(trainer)
        self._rows = []
        if not trainer.is_global_zero or getattr(trainer, "fast_dev_run", False):
            return
        if not rows:
            rank_zero_info("No predictions.jsonl: predict_step returned no loss per sequence.")
            return
        targets = sum(count for _, _, count in rows)
        self.loss = sum(loss * count for _, loss, count in rows) / targets if targets else math.nan
        self.path = run_directory(trainer) / "predictions.jsonl"
        _write(self.path, rows, _DocumentNames(trainer))
        rank_zero_info(
            f"Wrote {len(rows):,} sequences to {self.path}; token-mean loss {self.loss:.4f} over {targets:,} "
            "target tokens."
        )

    def gather_rows(self, trainer: Trainer) -> list[Row]:
        """Return the sequences of all ranks, each once and in order; all ranks must call this."""
        parts: list[Any] = [self._rows]
        if trainer.world_size > 1:
            parts = [None] * trainer.world_size
            torch.distributed.all_gather_object(parts, self._rows)
        return sorted({row[0]: row for part in parts for row in part}.values())


class _DocumentNames:
    """The id of the document that a sequence comes from, where the data module keeps a token index."""

    def __init__(self, trainer: Trainer) -> None:
        data = getattr(getattr(trainer, "datamodule", None), "val_dataset", None)
        index: Any = getattr(data, "index", None)
        is_known = hasattr(index, "document_ids") and hasattr(index, "documents")
        self._names: list[str] = index.document_ids() if is_known else []
        self._documents: Any = index.documents if is_known else ()

    def of(self, sequence: int) -> str | None:
        if not 0 <= sequence < len(self._documents):
            return None
        return self._names[int(self._documents[sequence])]


def _write(path: Path, rows: list[Row], names: _DocumentNames) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with part.open("w", encoding="utf-8") as file:
        for sequence, loss, count in rows:
            line = {
                "sequence_id": sequence,
                "document": names.of(sequence),
                "loss": loss if math.isfinite(loss) else None,
                "target_tokens": count,
            }
            file.write(json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n")
    os.replace(part, path)
