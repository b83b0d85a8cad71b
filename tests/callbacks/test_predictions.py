from __future__ import annotations

import json
import logging
import math
from types import SimpleNamespace

import numpy as np
import pytest
from lightning.pytorch import LightningDataModule
from packed_run import PackedModule, loader, trainer

from sb_lightning.callbacks import PredictionWriter


class Predicting(PackedModule):
    def predict_step(self, batch, batch_idx):
        return batch


class Data(LightningDataModule):
    """Four sequences of two documents."""

    def __init__(self, batches):
        super().__init__()
        self.batches = batches
        names = ["docs/b.txt", "docs/a.txt"]
        index = SimpleNamespace(documents=np.array([0, 0, 1, 1]), document_ids=lambda: names)
        self.val_dataset = SimpleNamespace(index=index)

    def predict_dataloader(self):
        return loader(*self.batches)


def batch(ids, loss, counts):
    return {"sequence_ids": ids, "loss": loss, "target_tokens": counts}


BATCHES = [batch([3], [2.0], [10]), batch([0, 2], [1.0, 4.0], [30, 20]), batch([3], [2.0], [10])]


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_one_line_per_sequence_in_order(tmp_path, caplog):
    callback = PredictionWriter()
    run = trainer(tmp_path, callback)
    with caplog.at_level(logging.INFO):
        run.predict(Predicting(), datamodule=Data(BATCHES), return_predictions=False)
    path = tmp_path / "predictions.jsonl"
    assert [file.name for file in tmp_path.iterdir()] == ["predictions.jsonl"]
    assert lines(path) == [
        {"sequence_id": 0, "document": "docs/b.txt", "loss": 1.0, "target_tokens": 30},
        {"sequence_id": 2, "document": "docs/a.txt", "loss": 4.0, "target_tokens": 20},
        {"sequence_id": 3, "document": "docs/a.txt", "loss": 2.0, "target_tokens": 10},
    ]
    # The mean over tokens, not over sequences.
    assert callback.loss == (30 + 80 + 20) / 60
    assert any(str(path) in record.message and "2.1667" in record.message for record in caplog.records)


def test_without_documents_and_with_a_loss_that_is_not_finite(tmp_path):
    callback = PredictionWriter()
    trainer(tmp_path, callback).predict(
        Predicting(), loader(batch([7], [math.inf], [3]), batch([5], [0.5], [0]))
    )
    assert lines(callback.path) == [
        {"sequence_id": 5, "document": None, "loss": 0.5, "target_tokens": 0},
        {"sequence_id": 7, "document": None, "loss": None, "target_tokens": 3},
    ]


def test_another_kind_of_prediction_is_left_alone(tmp_path, caplog):
    with caplog.at_level(logging.INFO):
        trainer(tmp_path, PredictionWriter()).predict(PackedModule(), loader({}, {}))
    assert list(tmp_path.iterdir()) == []
    assert any("returned no loss per sequence" in record.message for record in caplog.records)


def test_a_prediction_that_fails_leaves_the_earlier_file(tmp_path):
    (tmp_path / "predictions.jsonl").write_text("before")

    class Failing(Predicting):
        def predict_step(self, batch, batch_idx):
            if batch_idx == 2:
                raise RuntimeError("broken on purpose")
            return batch

    with pytest.raises(RuntimeError, match="on purpose"):
        trainer(tmp_path, PredictionWriter()).predict(Failing(), loader(*BATCHES))
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("predictions.jsonl", "before")]


def predict_on_two_ranks(folder):
    """Rank 0 has sequences 2 and 0; rank 1 has 1 and, again, 0."""
    import torch.distributed as dist

    own = [batch([2], [3.0], [4])] if dist.get_rank() == 0 else [batch([1], [1.0], [8])]
    callback = PredictionWriter()
    run = trainer(folder, callback, strategy="ddp", devices=2, use_distributed_sampler=False)
    run.predict(Predicting(), loader(*own, batch([0], [2.0], [4])))
    return callback.path, callback.loss


def test_two_ranks_write_one_file(gloo_pool, tmp_path):
    (path, loss), one = gloo_pool.run(predict_on_two_ranks, str(tmp_path))
    assert one == (None, None)
    assert loss == (12 + 8 + 8) / 16
    assert [(line["sequence_id"], line["loss"]) for line in lines(path)] == [(0, 2.0), (1, 1.0), (2, 3.0)]
    assert [file.name for file in tmp_path.iterdir()] == ["predictions.jsonl"]
