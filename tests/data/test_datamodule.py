"""TextDataModule: settings, splits, loaders, and what it says to a Trainer."""

import json
import warnings
from collections import Counter

import numpy as np
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Callback, GradientAccumulationScheduler
from tiny_run import TinyModule, data_module, fit, make_trainer, write_documents

from sb_lightning.callbacks import ImbalanceMonitor
from sb_lightning.data import TextDataModule
from sb_lightning.data import datamodule as module
from sb_lightning.data.dataset import EvaluationBatchSampler, in_validation

TRAIN_KEYS = {
    "input_ids", "position_ids", "labels", "cu_seqlens", "max_seqlen", "sequence_ids", "target_tokens",
    "window", "micro_batch", "window_target_tokens", "predicted_ms", "plan_gap", "is_padding",
}  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    write_documents(tmp_path / "docs")
    return tmp_path


def ready(folder, **settings):
    data = data_module(folder, **settings)
    data.prepare_data()
    data.setup("fit")
    return data


def test_alone(folder):
    """Without a Trainer: one rank, one micro-batch per window."""
    data = ready(folder)
    assert (data.vocab_size, data.tokenizer.vocab_size) == (258, 258)
    assert data.report["documents"] == data.report["sequences_train"] + data.report["sequences_val"] == 23
    batches = list(data.train_dataloader())
    assert len(batches) == len(data.train_dataset) == len(data.train_dataloader())
    for batch in batches:
        assert set(batch) == TRAIN_KEYS
        assert batch["window_target_tokens"] == batch["target_tokens"] == int((batch["labels"] != -100).sum())
        (name,) = batch["sequence_ids"].tolist()
        path = folder / "docs" / data.train_dataset.index.document_ids()[name]
        assert data.tokenizer.decode(batch["input_ids"][0].tolist()) == path.read_text()
    held_out = [batch["sequence_ids"].item() for batch in data.val_dataloader()]
    trained_on = [batch["sequence_ids"].item() for batch in batches]
    assert sorted(held_out + trained_on) == list(range(23))
    assert set(next(iter(data.val_dataloader()))) == TRAIN_KEYS - {
        "window",
        "micro_batch",
        "window_target_tokens",
        "predicted_ms",
        "plan_gap",
        "is_padding",
    }
    assert [b["sequence_ids"].item() for b in data.predict_dataloader()] == held_out
    assert len(list(data.test_dataloader())) == len(held_out)


def test_cache_is_used(folder, monkeypatch, capfd):
    ready(folder)
    assert "tokenizing" in capfd.readouterr().err
    monkeypatch.setattr(module, "build_index", lambda *a, **k: pytest.fail("built again"))
    ready(folder)
    assert "tokenizing" not in capfd.readouterr().err


def test_damaged_cache_is_told_once(folder):
    data = ready(folder)
    (data.train_dataset.index.folder / "tokens.safetensors").write_bytes(b"")
    with pytest.warns(UserWarning, match="is damaged") as caught:
        ready(folder)
    assert sum("damaged" in str(warning.message) for warning in caught) == 1


def test_pieces_of_a_document_stay_together(tmp_path):
    path = tmp_path / "d.jsonl"
    path.write_text("".join(json.dumps({"text": f"{i} " * (9 + i)}) + "\n" for i in range(40)))
    data = ready(tmp_path, source=str(path), max_length=16, overlong="split", validation_share=0.3)
    index = data.train_dataset.index
    train, val = (index.documents[d.sequence_ids] for d in (data.train_dataset, data.val_dataset))
    assert not set(train) & set(val)
    assert len(val) > len(set(val)) > 2
    assert set(val) == {i for i, name in enumerate(index.document_ids()) if in_validation(name, 0.3)}


def test_split_does_not_depend_on_what_else_is_there(folder):
    def held_out():
        data = ready(folder)
        index = data.train_dataset.index
        return {index.document_ids()[i] for i in index.documents[data.val_dataset.sequence_ids]}

    before = held_out()
    (folder / "docs" / "aaa.txt").write_text("one more document")
    assert held_out() - {"aaa.txt"} == before


def test_no_document_for_validation(folder):
    with pytest.warns(UserWarning, match=r"data\.validation_share=1e-09 keeps none of 23 documents"):
        data = ready(folder, validation_share=1e-9)
    assert data.val_dataset is None
    assert data.val_dataloader() == []
    fit(folder, max_epochs=1, data={"validation_share": 0.0})
    for action in ("validate", "test", "predict"):
        with pytest.raises(ValueError, match=rf"there is nothing to {action}.*raise data\.validation_share"):
            getattr(make_trainer(folder), action)(TinyModule(), data_module(folder, validation_share=0.0))


def test_no_validation_wanted_is_no_warning(folder):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ready(folder, validation_share=0.0)


def test_no_document_to_train_on(folder):
    with pytest.raises(
        ValueError, match=r"all 23 sequences .*validation split.*lower data\.validation_share"
    ):
        ready(folder, validation_share=1 - 1e-12)


def test_no_usable_document(tmp_path):
    (tmp_path / "docs").mkdir()
    with pytest.raises(ValueError, match=r"data\.source .*docs.* holds no usable document"):
        data_module(tmp_path).prepare_data()


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"max_length": 1}, r"data\.max_length is 1"),
        ({"overlong": "wrap"}, r"data\.overlong is 'wrap'"),
        ({"validation_share": 1.0}, r"data\.validation_share is 1\.0"),
        ({"validation_share": -0.1}, r"data\.validation_share is -0\.1"),
        ({"num_workers": -1}, r"data\.num_workers is -1"),
        ({"tokenizer": "train:many"}, r"data\.tokenizer is 'train:many'"),
        ({"sequences_per_micro_batch": 0}, "sequences_per_micro_batch is 0"),
        ({"tail": "keep"}, "tail is 'keep'"),
        ({"policy": "best"}, "policy is 'best'"),
        ({"seed": -1}, "seed is -1"),
        ({"on_error": "warn"}, r"data\.on_error is 'warn'"),
        ({"source": "nowhere"}, r"data\.source is 'nowhere', which does not exist"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_bad_settings_are_found_at_once(settings, names, folder):
    with pytest.raises(ValueError, match=names):
        data_module(folder, **settings)


def test_fewer_documents_than_a_window(folder):
    with pytest.raises(
        ValueError, match=r"18 sequences do not fill one window.*trainer\.accumulate_grad_batches"
    ):
        fit(folder, accumulate_grad_batches=19, data={"tail": "drop"})
    with pytest.warns(UserWarning, match=r"18 training sequences are fewer .*accumulate_grad_batches=19"):
        result = fit(folder, accumulate_grad_batches=19, max_epochs=2)
    assert [record[5] for record in result.log_of_batches] == [0] * 18 + [1] * 18


def test_changing_accumulation_is_refused(folder):
    callback = GradientAccumulationScheduler({0: 2})
    with pytest.raises(MisconfigurationException, match=r"set trainer\.accumulate_grad_batches"):
        fit(folder, accumulate_grad_batches=1, callbacks=[callback])


def test_overfit_is_refused(folder):
    with pytest.raises(MisconfigurationException, match=r"use trainer\.limit_train_batches"):
        fit(folder, overfit_batches=2)


@pytest.mark.parametrize(
    ("limit", "run"),
    [({"limit_train_batches": 10}, 10), ({"limit_train_batches": 0.25}, 4), ({"fast_dev_run": 2}, 2)],
)
def test_limit_in_mid_window(limit, run, folder):
    """The count of a window that the Trainer cuts short covers only the micro-batches that run."""
    batches = [b for b in fit(folder, max_epochs=1, **limit).batches if "window" in b]
    assert len(batches) == run
    counts = Counter()
    for batch in batches:
        counts[batch["window"]] += batch["target_tokens"]
    assert [batch["window_target_tokens"] for batch in batches] == [counts[b["window"]] for b in batches]
    assert len(counts) == -(-run // 3)


def test_predict_gives_every_held_out_sequence_once(folder):
    predictions = make_trainer(folder).predict(TinyModule(), data_module(folder))
    data = ready(folder)
    assert [ids for (ids,) in predictions] == data.val_dataset.sequence_ids.tolist()


@pytest.mark.parametrize("workers", [0, 2])
def test_trained_tokenizer_and_workers(workers, folder, capfd):
    """Processes forked after `tokenizers` ran threads: nothing hangs, and nothing is printed about it."""
    data = ready(folder, tokenizer="train:270", num_workers=workers)
    assert (
        sum(batch["input_ids"].shape[1] for batch in data.train_dataloader())
        == data.train_dataset.lengths.sum()
    )
    assert "forked" not in capfd.readouterr().err


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("m", [1, 2])
@pytest.mark.parametrize("num_items", [1, 2, 5, 12])
def test_evaluation_is_exact_over_ranks(num_items, m, ranks):
    """Equally many micro-batches on every rank, every sequence once, the rest masked."""
    lengths = np.arange(num_items, 0, -1)
    cells = [
        list(EvaluationBatchSampler(lengths, ranks=ranks, rank=r, sequences_per_micro_batch=m))
        for r in range(ranks)
    ]
    assert len({len(row) for row in cells}) == 1
    assert sorted(i for row in cells for cell in row if not cell.is_padding for i in cell) == list(
        range(num_items)
    )
    assert all(cell == [num_items - 1] for row in cells for cell in row if cell.is_padding)


def test_pad_cells_are_masked(folder, monkeypatch):
    """Two ranks, three held-out documents: the second rank's last micro-batch counts nothing."""
    data = ready(folder)
    share = []
    for rank in range(2):
        monkeypatch.setattr(module, "data_parallel", lambda trainer, rank=rank: (2, rank))
        share.append(list(data.val_dataloader()))
    assert len(share[0]) == len(share[1]) == 3
    last = share[1][-1]
    assert (last["labels"] == -100).all()
    assert last["target_tokens"] == 0
    total = sum(batch["target_tokens"] for row in share for batch in row)
    assert total == data.val_dataset.target_tokens.sum()


def test_ranks_share_the_windows(folder, monkeypatch):
    data = ready(folder, tail="pad")
    rows = []
    for rank in range(4):
        monkeypatch.setattr(module, "data_parallel", lambda trainer, rank=rank: (4, rank))
        rows.append(list(data.train_dataloader()))
    assert {len(row) for row in rows} == {5}
    ids = [i for row in rows for b in row if b["target_tokens"] for i in b["sequence_ids"].tolist()]
    assert sorted(ids) == data.train_dataset.sequence_ids.tolist()
    assert [b["window_target_tokens"] for b in rows[0]] == [b["window_target_tokens"] for b in rows[3]]


def test_skipped_documents_are_counted(tmp_path):
    path = tmp_path / "d.jsonl"
    path.write_text('{"text": "fine one"}\n{"text": 3}\n{broken\n{"text": "fine two"}\n')
    with pytest.raises(ValueError, match=r"d\.jsonl, line 2"):
        data_module(tmp_path, source=str(path)).prepare_data()
    data = ready(tmp_path, source=str(path), on_error="skip", validation_share=0.0)
    assert data.report["skipped"] == {"broken JSON": 1, "text is no string": 1}
    assert data.report["sequences_train"] == 2


def test_settings_are_kept_in_the_checkpoint(folder):
    fit(folder, save=True, max_epochs=1, limit_train_batches=1)
    data = TextDataModule.load_from_checkpoint(folder / "b-0-0.ckpt", weights_only=True)
    assert (data.seed, data.validation_share) == (5, 0.2)


def test_gradient_of_a_window_is_that_of_one_batch(folder):
    """Three micro-batches, each divided by the window's count, are one big batch."""
    data = ready(folder, sequences_per_micro_batch=3)
    model = TinyModule().double()
    whole = next(iter(data.train_dataloader()))
    (model.loss(whole) / whole["window_target_tokens"]).backward()
    want = model.embedding.weight.grad.clone()
    model.zero_grad()
    trained = fit(folder, max_epochs=1, limit_train_batches=3)
    for batch in trained.batches[:3]:
        (model.loss(batch) / batch["window_target_tokens"]).backward()
    assert sorted(i for b in trained.batches[:3] for i in b["sequence_ids"].tolist()) == sorted(
        whole["sequence_ids"].tolist()
    )
    torch.testing.assert_close(model.embedding.weight.grad, want)


@pytest.mark.parametrize("tail", ["drop", "pad", "partial"])
def test_several_sequences_per_micro_batch(folder, tail):
    data = ready(folder, tail=tail, sequences_per_micro_batch=3, max_tokens=10_000)
    sizes = [len(batch["sequence_ids"]) for batch in data.train_dataloader()]
    assert sum(sizes) == len(data.train_dataset) - (len(data.train_dataset) % 3 if tail == "drop" else 0)


def test_counted_costs_are_those_of_the_model_at_hand(folder):
    from sb_lightning.training import CausalLMModule

    data = data_module(folder)
    found = []
    for layers in (1, 4):
        sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 1}
        model = CausalLMModule(
            architecture={
                "model_type": "qwen2",
                "num_hidden_layers": layers,
                "num_key_value_heads": 1,
                **sizes,
            }
        )
        trainer = make_trainer(folder, max_steps=1)
        trainer.fit(model, data)
        found.append(trainer.train_dataloader.batch_sampler.costs.shape.layers)
    assert found == [1, 4]
    assert data.latency is None


def test_another_training_with_other_data_needs_no_balanced_sampler(folder):
    trainer = make_trainer(folder, max_epochs=1)
    module = TinyModule()
    trainer.fit(module, data_module(folder))
    data = data_module(folder)
    data.prepare_data()
    data.setup()
    plain = torch.utils.data.DataLoader(
        data.train_dataset, batch_size=1, collate_fn=data.val_dataloader().collate_fn
    )
    trainer.fit_loop.max_epochs = 2
    module.loss_scale = 1
    module.training_step = lambda batch, batch_idx: module.loss(batch)
    trainer.fit(module, plain)
    assert trainer.current_epoch == 2


def test_the_monitor_tells_each_window_s_own_gap_and_predictions(folder):
    monitor = ImbalanceMonitor(spans=False)
    seen = {}

    class Watch(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if monitor.window is not None:
                gap = float(trainer.callback_metrics["balance/plan_gap"])
                seen[monitor.window.index] = (gap, monitor.window.predicted_ms[0, 0])

    trainer = make_trainer(folder, callbacks=[monitor, Watch()], max_epochs=1)
    data = data_module(folder)
    trainer.fit(TinyModule(), data)
    sampler = trainer.train_dataloader.batch_sampler
    assert len(seen) == sampler.num_windows == 6
    for window, (gap, predicted) in seen.items():
        plan = sampler.plan(0, window)
        assert gap == pytest.approx(plan.gap, abs=1e-6)
        assert predicted == pytest.approx(plan.predicted_ms[0][0])
