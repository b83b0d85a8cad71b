"""The LightningModule: gradients are the token mean of the window, errors say what to change."""

from __future__ import annotations

import itertools
import math
import warnings

import pytest
import torch
from corpus import write_corpus
from jsonargparse.typing import PositiveFloat, PositiveInt
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from tiny import gradients, packed, tiny_architecture
from torch.utils.data import DataLoader

from sb_lightning.data import TextDataModule
from sb_lightning.training import AttentionSettings, CausalLMModule, OptimizerSettings
from sb_lightning.training.schedule import build_optimizer, learning_rate_share

SPARSE = AttentionSettings(block_size=16, budget=2, backend="reference")


class SeededModule(CausalLMModule):
    """The same weights whatever drew random numbers between its making and its building."""

    def configure_model(self):
        torch.manual_seed(1)
        super().configure_model()


def make_module(**kwargs):
    kwargs.setdefault("attention", SPARSE)
    return SeededModule(
        architecture=tiny_architecture(vocab_size=300),
        **{"optimizer": OptimizerSettings(learning_rate=1e-30), **kwargs},
    )


class WindowRecorder(Callback):
    """Keeps each window's gradient, the ids it ran and the loss it logged."""

    def __init__(self):
        self.windows = []
        self.ids = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.ids.append((batch["sequence_ids"].tolist(), batch["target_tokens"]))

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.windows.append({"ids": self.ids, "gradients": gradients(pl_module.model)})
        self.ids = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if self.windows and "loss" not in self.windows[-1] and not self.ids:
            self.windows[-1]["loss"] = float(trainer.callback_metrics["train/loss"])


def run_windows(source, cache, *, devices=1, accumulate=1, together=1, tail="partial", **trainer_kwargs):
    """Train one epoch in fp64 with a learning rate of (almost) nothing and return what each window did."""
    data = TextDataModule(
        source=source,
        tokenizer="bytes",
        max_length=128,
        cache_dir=str(cache),
        validation_share=0.0,
        sequences_per_micro_batch=together,
        tail=tail,
        seed=5,
    )
    recorder = WindowRecorder()
    trainer = Trainer(
        accelerator="cpu",
        devices=devices,
        strategy="ddp" if devices > 1 else "auto",
        precision="64-true",
        accumulate_grad_batches=accumulate,
        max_epochs=1,
        callbacks=[recorder],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        **trainer_kwargs,
    )
    module = make_module()
    trainer.fit(module, data)
    return recorder.windows


def one_big_batch(source, cache, ids):
    """The gradient and value of the mean over all target tokens, each document run on its own."""
    data = TextDataModule(
        source=source, tokenizer="bytes", max_length=128, cache_dir=str(cache), validation_share=0.0
    )
    data.prepare_data()
    data.setup("fit")
    previous = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        module = make_module()
        module.configure_model()
    finally:
        torch.set_default_dtype(previous)
    total, count = torch.zeros((), dtype=torch.float64), 0
    for index in ids:
        tokens = torch.from_numpy(data.train_dataset.index.tokens(index).astype("int64"))[None]
        logits = module.model(input_ids=tokens, use_cache=False).logits[0, :-1]
        total = total + torch.nn.functional.cross_entropy(logits, tokens[0, 1:], reduction="sum")
        count += tokens.shape[1] - 1
    (total / count).backward()
    return gradients(module.model), float(total.detach() / count)


def check_windows(ranks_windows, source, cache):
    """Each window, as all ranks together ran it, has the gradient and the loss of one big batch."""
    for per_rank in zip(*ranks_windows, strict=True):
        ids = [i for window in per_rank for cell, targets in window["ids"] if targets for i in cell]
        assert len(ids) == len(set(ids)), "a document ran twice in a window"
        want, loss = one_big_batch(source, cache, ids)
        for window in per_rank:
            assert window["loss"] == pytest.approx(loss, rel=1e-6)
            assert window["gradients"].keys() == want.keys()
            for name, grad in want.items():
                torch.testing.assert_close(window["gradients"][name], grad, rtol=1e-8, atol=1e-11, msg=name)


CASES = {
    "4x1": {"together": 4, "accumulate": 1},
    "1x4": {"together": 1, "accumulate": 4},
    "padded_tail": {"accumulate": 4, "tail": "pad"},
    "limit_inside_a_window": {"accumulate": 4, "limit_train_batches": 6},
}


@pytest.mark.parametrize("case", CASES)
def test_a_windows_gradient_is_that_of_one_big_batch(case, tmp_path):
    source = write_corpus(tmp_path / "corpus.jsonl")
    windows = run_windows(source, tmp_path, **CASES[case])
    # 13 documents: 4 + 4 + 4 + 1, the last window short.
    counts = [sum(len(cell) for cell, _ in window["ids"]) for window in windows]
    assert counts == ([4, 2] if case == "limit_inside_a_window" else [4, 4, 4, 1])
    check_windows([windows], source, tmp_path)


DDP_CASES = {
    "2x2": ({"documents": 14}, {}, [4, 4, 4, 2]),
    "padded_tail": ({"documents": 13}, {"tail": "pad"}, [4, 4, 4, 1]),
    "limit_inside_a_window": ({"documents": 14}, {"limit_train_batches": 3}, [4, 2]),
}


def run_windows_on_ranks(sources, cache):
    return {
        case: run_windows(sources[case], cache, devices=2, accumulate=2, **DDP_CASES[case][1])
        for case in sources
    }


def test_the_same_over_two_ranks(tmp_path, gloo_pool):
    sources = {
        case: write_corpus(tmp_path / f"{case}.jsonl", **corpus) for case, (corpus, _, _) in DDP_CASES.items()
    }
    first, second = gloo_pool.run(run_windows_on_ranks, sources, tmp_path)
    for case, (_, _, documents) in DDP_CASES.items():
        targets = [
            [count for window in pair for _, count in window["ids"]]
            for pair in zip(first[case], second[case], strict=True)
        ]
        assert [sum(count > 0 for count in window) for window in targets] == documents
        assert (0 in targets[-1]) == (case == "padded_tail"), "the padded tail has a cell without any target"
        check_windows([first[case], second[case]], sources[case], tmp_path)


def test_a_window_without_any_target_token():
    module = make_module(attention=None)
    module.configure_model()
    module._trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    batch = packed([20])
    batch["labels"].fill_(-100)
    loss = module.training_step({**batch, "window_target_tokens": 0, "target_tokens": 0}, 0)
    loss.backward()
    assert loss.item() == 0
    assert all(torch.equal(grad, torch.zeros_like(grad)) for grad in gradients(module.model).values())


def quick_trainer(**kwargs):
    options = {"max_steps": 2, "logger": False, "enable_checkpointing": False, **kwargs}
    return Trainer(
        accelerator="cpu",
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        **options,
    )


def text(tmp_path, **kwargs):
    source = write_corpus(tmp_path / "corpus.jsonl", documents=24)
    return TextDataModule(
        **{"source": source, "tokenizer": "bytes", "max_length": 64, "cache_dir": str(tmp_path), **kwargs}
    )


def test_validation_test_and_predict_agree(tmp_path):
    data = text(tmp_path, validation_share=0.4)
    module, trainer = make_module(attention=AttentionSettings(block_size=16, budget=2)), quick_trainer()
    (validated,) = trainer.validate(module, data, verbose=False)
    (tested,) = trainer.test(module, data, verbose=False)
    predictions = trainer.predict(module, data)
    counts = [count for batch in predictions for count in batch["target_tokens"]]
    losses = [loss for batch in predictions for loss in batch["loss"]]
    mean = sum(map(math.prod, zip(losses, counts, strict=True))) / sum(counts)
    assert validated["val/loss"] == pytest.approx(mean, rel=1e-5)
    assert validated["val/perplexity"] == pytest.approx(math.exp(mean), rel=1e-4)
    assert tested["test/loss"] == pytest.approx(mean, rel=1e-5)


@pytest.mark.parametrize("option", ["activation_checkpointing", "compile"])
def test_options_change_no_result(option, tmp_path):
    def trained(**kwargs):
        module = SeededModule(
            architecture=tiny_architecture(vocab_size=300, num_hidden_layers=1),
            attention=AttentionSettings(block_size=16, budget=2),
            optimizer=OptimizerSettings(learning_rate=1e-2),
            **kwargs,
        )
        trainer = quick_trainer(max_steps=1)
        trainer.fit(module, text(tmp_path))
        return float(trainer.callback_metrics["train/loss"])

    assert trained(**{option: True}) == pytest.approx(trained(), rel=1e-4)


def test_mixed_precision_trains(tmp_path):
    trainer = quick_trainer(precision="bf16-mixed")
    trainer.fit(make_module(attention=AttentionSettings(block_size=16, budget=2)), text(tmp_path))
    assert math.isfinite(float(trainer.callback_metrics["train/loss"]))


def test_checkpoints_hold_only_plain_types_and_load_without_the_data(tmp_path):
    data, module, trainer = text(tmp_path), make_module(), quick_trainer()
    trainer.fit(module, data)
    path = tmp_path / "model.ckpt"
    trainer.save_checkpoint(path)
    assert torch.load(path, weights_only=True)["state_dict"].keys() == module.state_dict().keys()
    again = CausalLMModule.load_from_checkpoint(path)
    assert again.attention == module.attention
    for name, tensor in module.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor)


def test_the_vocabulary_of_the_data_is_taken_and_kept(tmp_path):
    fields = {
        k: v for k, v in tiny_architecture().items() if k not in ("vocab_size", "max_position_embeddings")
    }
    module, trainer, data = CausalLMModule(architecture=fields), quick_trainer(), text(tmp_path)
    trainer.fit(module, data)
    assert module.model.config.vocab_size == data.vocab_size
    assert module.model.config.max_position_embeddings == data.max_length
    trainer.save_checkpoint(tmp_path / "model.ckpt")
    again = CausalLMModule.load_from_checkpoint(tmp_path / "model.ckpt")
    assert again.model.config.vocab_size == data.vocab_size


def test_a_pretrained_folder_is_loaded(tmp_path):
    first = make_module(attention=None)
    first.configure_model()
    first.model.save_pretrained(tmp_path / "model")
    second = CausalLMModule(pretrained=str(tmp_path / "model"), attention=SPARSE)
    second.configure_model()
    for name, tensor in first.state_dict().items():
        assert torch.equal(second.state_dict()[name], tensor)
    assert second.sparse_settings.budget == 2


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    trainer, data = quick_trainer(), text(tmp_path)
    trainer.fit(make_module(), data)
    trainer.save_checkpoint(tmp_path / "model.ckpt")
    other = CausalLMModule(
        architecture=tiny_architecture(vocab_size=300, num_hidden_layers=1, intermediate_size=80)
    )
    with pytest.raises(ValueError, match=r"another model .*unknown, e.g. .*layers.1.* of another shape"):
        quick_trainer().fit(other, data, ckpt_path=tmp_path / "model.ckpt")


MODEL_ERRORS = {
    "neither": ({}, "both missing"),
    "both": ({"architecture": tiny_architecture(), "pretrained": "x"}, "both set"),
    "no_model_type": ({"architecture": {"hidden_size": 64}}, "no model_type"),
    "unknown_model_type": ({"architecture": {"model_type": "qwen99"}}, "model_type is 'qwen99'"),
    "misspelt_field": ({"architecture": tiny_architecture(hiden_size=64)}, "hiden_size"),
    "no_such_folder": ({"pretrained": "/no/such/folder"}, "model.pretrained is '/no/such/folder'"),
    "vocabulary": ({"architecture": tiny_architecture(vocab_size=100)}, "vocab_size is 100, the tokenizer's"),
    "block": (
        {"architecture": tiny_architecture(vocab_size=300), "attention": AttentionSettings(block_size=128)},
        "data.max_length is 64, below one block",
    ),
    "block_size": (
        {"architecture": tiny_architecture(vocab_size=300), "attention": AttentionSettings(block_size=24)},
        "block_size",
    ),
    "window": (
        {
            "architecture": tiny_architecture(
                vocab_size=300, model_type="mistral", sliding_window=8, head_dim=32
            ),
            "attention": SPARSE,
        },
        "sliding window",
    ),
    "scaled_logits": (
        {"architecture": tiny_architecture(vocab_size=300, model_type="granite", logits_scaling=8.0)},
        "logits_scaling=8.0",
    ),
}


@pytest.mark.parametrize("case", MODEL_ERRORS)
def test_models_that_cannot_be_built(case, tmp_path):
    arguments, reason = MODEL_ERRORS[case]
    with pytest.raises(ValueError, match=reason):
        quick_trainer().fit(CausalLMModule(**arguments), text(tmp_path))


def test_unknown_keys_of_saved_settings_are_named():
    with pytest.raises(ValueError, match=r"model.optimizer has no key \['lerning_rate'\]"):
        CausalLMModule(architecture=tiny_architecture(), optimizer={"lerning_rate": 1.0})


def test_gradient_accumulation_scheduler_is_refused(tmp_path):
    trainer = quick_trainer(callbacks=[GradientAccumulationScheduler({0: 2})])
    with pytest.raises(MisconfigurationException, match="GradientAccumulationScheduler"):
        trainer.fit(make_module(), text(tmp_path))


def test_batches_of_other_loaders_train_with_a_warning():
    batches = [{k: v for k, v in packed([30, n], 300).items() if k != "max_seqlen"} for n in (10, 20)]
    trainer = quick_trainer(accumulate_grad_batches=2, max_steps=1)
    module = make_module()
    with pytest.warns(UserWarning, match="no window_target_tokens"):
        trainer.fit(module, DataLoader(batches, batch_size=None))
    assert math.isfinite(float(trainer.callback_metrics["train/loss"]))


def test_the_schedule_warms_up_then_decays():
    shares = [learning_rate_share(s, total_steps=100, warmup_share=0.1, final_share=0.2) for s in range(100)]
    assert shares[:10] == pytest.approx([(s + 1) / 10 for s in range(10)])
    assert all(later <= earlier for earlier, later in itertools.pairwise(shares[10:]))
    assert shares[-1] == pytest.approx(0.2, abs=0.001)
    assert learning_rate_share(5, total_steps=math.inf, warmup_share=0.1, final_share=0.2) == 1.0


def test_vectors_are_not_decayed():
    module = make_module(optimizer=OptimizerSettings(weight_decay=0.3))
    module.configure_model()
    optimizer = build_optimizer(module.model, module.optimizer, 10)["optimizer"]
    decays = {group["weight_decay"]: {p.ndim for p in group["params"]} for group in optimizer.param_groups}
    assert decays == {0.3: {2}, 0.0: {1}}


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        (AttentionSettings, "budget", 0),
        (AttentionSettings, "block_size", 1.5),
        (OptimizerSettings, "beta1", 1.5),
        (OptimizerSettings, "learning_rate", 0.0),
        (OptimizerSettings, "warmup_share", "x"),
    ],
)
def test_settings_out_of_range_name_the_key(kind, field, value):
    with pytest.raises(ValueError, match=rf"model\..*\.{field} is .* wanted .* change model"):
        kind(**{field: value})


def test_settings_from_the_command_line_become_plain_numbers():
    # jsonargparse gives instances of its own classes, which a checkpoint could not be loaded with.
    settings = OptimizerSettings(learning_rate=PositiveFloat(0.5))
    assert type(settings.learning_rate) is float
    assert type(AttentionSettings(budget=PositiveInt(3)).budget) is int


def test_another_length_of_the_schedule_is_told_on_resume(tmp_path):
    def trained(max_steps, **kwargs):
        trainer = quick_trainer(max_steps=max_steps)
        trainer.fit(make_module(), text(tmp_path), **kwargs)
        return trainer

    first = trained(2)
    assert float(first.callback_metrics["train/learning_rate"]) > 0
    first.save_checkpoint(tmp_path / "model.ckpt")
    with pytest.warns(UserWarning, match="schedule spans 2 steps, this run's 3"):
        trained(3, ckpt_path=tmp_path / "model.ckpt")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trained(2, ckpt_path=tmp_path / "model.ckpt")
    assert not [w for w in caught if "schedule" in str(w.message)]


def test_settings_of_the_model_are_checked_before_the_data_are_read(tmp_path):
    # Nothing is tokenized for a run that cannot start.
    with pytest.raises(ValueError, match="both missing"):
        CausalLMModule()
    with pytest.raises(ValueError, match="block_size"):
        CausalLMModule(
            architecture=tiny_architecture(), attention=AttentionSettings(block_size=20, backend="reference")
        )
    with pytest.raises(ValueError, match="hiden_size"):
        CausalLMModule(architecture=tiny_architecture(hiden_size=3))
