"""The LightningModule that trains a causal language model on packed micro-batches."""

from __future__ import annotations

import itertools
import math
from dataclasses import asdict
from typing import Any

import torch
from jsonargparse.typing import PositiveInt
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn

from sb_lightning._messages import explain
from sb_lightning.attention.huggingface import SparseSettings, sparse_settings
from sb_lightning.training.loss import head_losses, next_token_targets, window_loss_scale
from sb_lightning.training.model import backbone_and_head, build_language_model, check_model
from sb_lightning.training.schedule import build_optimizer
from sb_lightning.training.settings import AttentionSettings, OptimizerSettings, settings_from

__all__ = ["CausalLMModule"]

MicroBatch = dict[str, Any]


class CausalLMModule(LightningModule):
    """Train a Hugging Face causal language model with block-sparse attention on packed documents.

    The loss of a micro-batch is scaled so that a window's gradient is that of the mean over its target
    tokens, whatever ranks and micro-batches the sequences run in (`window_loss_scale`). Logs `train/loss`
    and `train/learning_rate` once per window, `val/loss`, `val/perplexity`, `test/loss` and
    `test/perplexity`, all reduced over ranks.

    Args:
        architecture: Fields of a transformers configuration, `model_type` included, for a model with random
            weights. `vocab_size` and `max_position_embeddings` are taken from the data where they are
            missing.
        pretrained: Folder or hub name of a checkpoint to start from, in place of `architecture`.
        attention: Block-sparse attention; null keeps the model's own dense attention.
        optimizer: AdamW and its schedule.
        activation_checkpointing: Recompute each layer in the backward pass: less memory, about a third more
            time.
        compile: Compile the layers with torch.compile; the first steps then take longer.
        loss_chunk_tokens: Tokens whose logits exist at a time.
    """

    def __init__(
        self,
        architecture: dict[str, Any] | None = None,
        pretrained: str | None = None,
        attention: AttentionSettings | None = None,
        optimizer: OptimizerSettings = OptimizerSettings(),  # noqa: B008 - frozen; the command line reads it
        activation_checkpointing: bool = False,
        compile: bool = False,
        loss_chunk_tokens: PositiveInt = 1024,
    ) -> None:
        super().__init__()
        self.attention = settings_from(AttentionSettings, attention, "model.attention") if attention else None
        check_model(architecture, pretrained, self.attention)
        self.optimizer = settings_from(OptimizerSettings, optimizer, "model.optimizer")
        self.save_hyperparameters(
            {
                "architecture": architecture,
                "pretrained": pretrained,
                "attention": asdict(self.attention) if self.attention else None,
                "optimizer": asdict(self.optimizer),
                "activation_checkpointing": activation_checkpointing,
                "compile": compile,
                "loss_chunk_tokens": int(loss_chunk_tokens),
            }
        )
        self.architecture = dict(architecture) if architecture else None
        self.pretrained = pretrained
        self.activation_checkpointing = activation_checkpointing
        self.compile_layers = compile
        self.loss_chunk_tokens = int(loss_chunk_tokens)
        self.model: nn.Module | None = None
        self._sums: dict[str, Tensor] = {}
        self._window_targets: int | None = None
        self._schedule_steps: float | None = None
        self._restored_steps: float | None = None

    @property
    def sparse_settings(self) -> SparseSettings | None:
        """Block size and budget of the attention, or None where it is dense."""
        return sparse_settings(self.model) if self.model is not None else None

    def configure_model(self) -> None:
        """Build the model once; Lightning calls this on every rank before weights are restored."""
        if self.model is not None:
            return
        data = getattr(self._trainer, "datamodule", None) if self._trainer is not None else None
        model = build_language_model(
            self.architecture,
            self.pretrained,
            self.attention,
            vocab_size=getattr(data, "vocab_size", None),
            max_length=getattr(data, "max_length", None),
        )
        if self.architecture is not None:
            # So that load_from_checkpoint, which has no data module, builds the same model.
            self.hparams["architecture"] = {
                **self.architecture,
                "vocab_size": model.config.vocab_size,
                "max_position_embeddings": model.config.max_position_embeddings,
            }
        if self.activation_checkpointing:
            # Renamed between transformers 5.20 and 5.24.
            newer = getattr(model, "activation_checkpointing_enable", None)
            (newer or model.gradient_checkpointing_enable)({"use_reentrant": False})
        if self.compile_layers:
            backbone_and_head(model)[0].compile(dynamic=True)
        self.model = model

    def setup(self, stage: str) -> None:
        """Refuse a changing number of micro-batches: the loss and Lightning must divide by the same one."""
        if any(isinstance(c, GradientAccumulationScheduler) for c in self.trainer.callbacks):  # type: ignore[attr-defined]
            raise MisconfigurationException(
                explain(
                    "trainer.callbacks contains GradientAccumulationScheduler",
                    "a window must have the same number of micro-batches in every epoch for its loss to be "
                    "a token mean",
                    "remove it and set trainer.accumulate_grad_batches",
                )
            )

    def loss_sum(self, batch: MicroBatch) -> Tensor:
        """Return the sum of token losses of a micro-batch # []."""
        hidden, head, targets = self._hidden_states(batch)
        return head_losses(head, hidden, targets, self.loss_chunk_tokens)

    def training_step(self, batch: MicroBatch, batch_idx: int) -> Tensor:
        """Return the scaled loss of one micro-batch."""
        total = self.loss_sum(batch)
        window_targets = batch.get("window_target_tokens")
        if window_targets is None:
            return total * self._local_scale(batch, total)
        self._add("train", total, 0)
        self._window_targets = window_targets
        return total * window_loss_scale(
            window_targets, accumulate=self.trainer.accumulate_grad_batches, ranks=self._data_parallel_size
        )

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """Log the window's loss: here every rank has finished its micro-batches."""
        sums = self.sync_sum(self._sums.pop("train"))
        targets = sums[1] if self._window_targets is None else self._window_targets
        metrics = {
            "train/loss": sums[0] / targets if targets else sums[0],
            "train/learning_rate": optimizer.param_groups[0]["lr"],
        }
        self.log_dict(metrics, on_step=True, on_epoch=False)

    def validation_step(self, batch: MicroBatch, batch_idx: int) -> None:
        """Add up token losses and targets."""
        self._evaluate("val", batch)

    def test_step(self, batch: MicroBatch, batch_idx: int) -> None:
        """Add up token losses and targets."""
        self._evaluate("test", batch)

    def on_validation_epoch_end(self) -> None:
        """Log `val/loss` and `val/perplexity`."""
        self._log_evaluation("val")

    def on_test_epoch_end(self) -> None:
        """Log `test/loss` and `test/perplexity`."""
        self._log_evaluation("test")

    def predict_step(self, batch: MicroBatch, batch_idx: int) -> dict[str, list[float] | list[int]]:
        """Return per sequence its id, the mean token loss and the number of target tokens."""
        hidden, head, targets = self._hidden_states(batch)
        bounds = batch["cu_seqlens"].tolist()
        losses, counts = [], []
        for start, stop in itertools.pairwise(bounds):
            count = int((targets[start:stop] >= 0).sum())
            total = head_losses(head, hidden[start:stop], targets[start:stop], self.loss_chunk_tokens)
            counts.append(count)
            losses.append(float(total) / max(1, count))
        ids = batch["sequence_ids"].tolist() if "sequence_ids" in batch else list(range(len(counts)))
        return {"sequence_ids": ids, "loss": losses, "target_tokens": counts}

    def configure_optimizers(self) -> Any:
        """AdamW with warm-up and cosine decay over the run's optimizer steps."""
        assert self.model is not None
        steps = self.trainer.estimated_stepping_batches
        if self._restored_steps not in (None, steps):
            rank_zero_warn(
                f"the checkpoint's learning-rate schedule spans {self._restored_steps} steps, this run's "
                f"{steps}: the rate jumps to where the longer or shorter schedule is by now. For an exact "
                "continuation, resume with the trainer.max_steps or max_epochs that the run began with."
            )
        self._schedule_steps = steps
        return build_optimizer(self.model, self.optimizer, steps)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Note how many steps the learning-rate schedule spans."""
        if self._schedule_steps is not None:
            checkpoint["schedule_steps"] = self._schedule_steps

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse a checkpoint of another model with the reason, before loading fails half-way.

        Raises:
            ValueError: The weights' names or shapes differ from this model's.
        """
        self._restored_steps = checkpoint.get("schedule_steps")
        if not self.strict_loading:
            return
        ours, theirs = self.state_dict(), checkpoint["state_dict"]
        missing, unexpected = sorted(set(ours) - set(theirs)), sorted(set(theirs) - set(ours))
        resized = [
            f"{name} {list(theirs[name].shape)} in place of {list(tensor.shape)}"
            for name, tensor in ours.items()
            if name in theirs and theirs[name].shape != tensor.shape
        ]
        parts = [
            f"{len(names)} {what}, e.g. {names[0]}"
            for names, what in (
                (missing, "weights missing"),
                (unexpected, "unknown"),
                (resized, "of another shape"),
            )
            if names
        ]
        if parts:
            raise ValueError(
                explain(
                    "the checkpoint is of another model (" + "; ".join(parts) + ")",
                    "its weights do not fit the model that this configuration builds",
                    "set ckpt_path to a checkpoint of this model, or make model.architecture and "
                    "data.tokenizer those "
                    "of the checkpoint",
                )
            )

    def sync_sum(self, values: Tensor) -> Tensor:
        """Sum a small tensor over the data-parallel ranks."""
        reduced = self.trainer.strategy.reduce(values.to(self.device), reduce_op="sum")
        assert isinstance(reduced, Tensor)
        return reduced

    @property
    def _data_parallel_size(self) -> int:
        kwargs = getattr(self.trainer.strategy, "distributed_sampler_kwargs", None) or {}
        return int(kwargs.get("num_replicas", self.trainer.world_size))

    def _hidden_states(self, batch: MicroBatch) -> tuple[Tensor, nn.Module, Tensor]:
        assert self.model is not None
        backbone, head = backbone_and_head(self.model)
        inputs = {
            name: batch[name]
            for name in ("input_ids", "attention_mask", "position_ids", "cu_seqlens", "max_seqlen")
            if batch.get(name) is not None
        }
        if self.sparse_settings is None:
            # Dense layers tell packed documents apart by position_ids, and only without a cache.
            inputs.pop("cu_seqlens", None)
            inputs.pop("max_seqlen", None)
        hidden = backbone(**inputs, use_cache=False).last_hidden_state
        return hidden.flatten(0, 1), head, next_token_targets(batch["labels"]).flatten()

    def _local_scale(self, batch: MicroBatch, total: Tensor) -> float:
        count = _count_targets(batch)
        if self.trainer.accumulate_grad_batches > 1 or self._data_parallel_size > 1:
            rank_zero_warn(
                "batches carry no window_target_tokens: each micro-batch is averaged over its own tokens, "
                "so short ones "
                "weigh as much as long ones. To weigh tokens alike, use sb_lightning.data.TextDataModule."
            )
        self._add("train", total, count)
        self._window_targets = None
        return 1.0 / count if count else 0.0

    def _add(self, stage: str, total: Tensor, targets: int) -> None:
        sums = torch.stack([total.detach().double(), total.new_tensor(targets, dtype=torch.float64)])
        self._sums[stage] = self._sums[stage] + sums if stage in self._sums else sums

    def _evaluate(self, stage: str, batch: MicroBatch) -> None:
        targets = batch.get("target_tokens")
        self._add(stage, self.loss_sum(batch), _count_targets(batch) if targets is None else targets)

    def _log_evaluation(self, stage: str) -> None:
        sums = self.sync_sum(self._sums.pop(stage, torch.zeros(2, dtype=torch.float64)))
        loss = float(sums[0]) / max(1.0, float(sums[1]))
        # Equal on all ranks already; told to synchronise, Lightning does not warn once per epoch.
        self.log_dict(
            {f"{stage}/loss": loss, f"{stage}/perplexity": math.exp(min(loss, 700.0))},
            on_epoch=True,
            sync_dist=True,
        )


def _count_targets(batch: MicroBatch) -> int:
    return int((next_token_targets(batch["labels"]) >= 0).sum())
