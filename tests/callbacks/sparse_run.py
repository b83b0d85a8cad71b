"""Trainings of a tiny sparse model on packed documents, which record the budgets that layers used."""

from __future__ import annotations

from dataclasses import replace

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from tiny import packed, tiny_architecture
from transformers import AutoModelForCausalLM, Qwen2Config

from sb_lightning.attention import sparsify
from sb_lightning.balance import BalancedDataLoader, SparsityAwareBatchSampler
from sb_lightning.callbacks import SparseBalanceCallback
from sb_lightning.latency import AnalyticCost, LatencyTable, ModelShape
from sb_lightning.latency.fingerprint import current_fingerprint

BLOCK, BUDGET = 16, 4
SIZES = {name: value for name, value in tiny_architecture().items() if name != "model_type"}
LENGTHS = [20, 200, 40, 150, 64, 180, 30, 90, 256, 16, 120, 70]
COST = AnalyticCost(
    ModelShape(
        layers=2, query_heads=2, kv_heads=1, head_dim=32, hidden_size=64, intermediate_size=96, vocab_size=64,
        block_size=BLOCK,
    ),
    attention_gflops=1.0,
    overhead_ms=0.0,
)  # fmt: skip
"""Slow attention: the budget decides about the time."""


def build(budget=BUDGET, checkpointing=None, dense_layers=(), num_layers=2, **options):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        Qwen2Config(**{**SIZES, "num_hidden_layers": num_layers}), dtype=torch.float32
    )
    # Scores that differ, as those of a trained model: else coverage is proportional to the budget.
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight *= 12
            layer.self_attn.k_proj.weight *= 12
    if checkpointing is not None:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
    return sparsify(model, block_size=BLOCK, budget=budget, dense_layers=dense_layers, **options)


class Documents(torch.utils.data.Dataset):
    def __init__(self, lengths):
        self.lengths = lengths

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, index):
        return index


class Collate:
    def __init__(self, lengths):
        self.lengths = lengths

    def __call__(self, indices):
        batch = packed([self.lengths[i] for i in indices], seed=sum(indices))
        return {**batch, "sequence_ids": torch.tensor(indices)}


def token_loss(model, batch):
    inputs = {name: batch[name] for name in ("input_ids", "position_ids", "cu_seqlens", "max_seqlen")}
    logits = model(**inputs, use_cache=False).logits[0, :-1]
    labels = batch["labels"][0, 1:]
    return torch.nn.functional.cross_entropy(logits, labels, ignore_index=-100, reduction="sum") / 100


class Training:
    """Somebody's module; keeps what every forward was given, and the gradients of each step."""

    def make(self, model=None, manual=False, sampler=None, workers=0, lengths=LENGTHS):
        self.model = build() if model is None else model
        self.automatic_optimization = not manual
        self.sampler_options, self.workers, self.lengths = sampler, workers, lengths
        self.targets, self.losses, self.seen = [], [], []
        self.gradients = []

    def note(self):
        """Note what the forward that has just run was given: looked up, since a hook would be compiled."""
        base = next(m for m in self.model.modules() if hasattr(m, "sb_settings"))
        tuner = vars(base).get("sb_tuner")
        self.targets.append(tuner.forwards[-1].target if tuner is not None and tuner.forwards else None)

    def train_dataloader(self):
        options = {
            "accumulate": self.trainer.accumulate_grad_batches, "policy": "random", "seed": 3,
            "latency": COST, "budget": BUDGET, **(self.sampler_options or {}),
        }  # fmt: skip
        sampler = SparsityAwareBatchSampler(self.lengths, **options)
        self.sampler = sampler
        return BalancedDataLoader(
            Documents(self.lengths), batch_sampler=sampler, collate_fn=Collate(self.lengths),
            num_workers=self.workers,
        )  # fmt: skip

    def training_step(self, batch, batch_idx):
        loss = token_loss(self.model, batch)
        self.note()
        self.seen.append(tuple(batch["sequence_ids"].tolist()))
        self.losses.append(loss.item())
        if self.automatic_optimization:
            return loss
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return None

    def on_before_optimizer_step(self, optimizer):
        grads = [p.grad.flatten().clone() for p in self.parameters() if p.grad is not None]
        self.gradients.append(torch.cat(grads))

    def validation_step(self, batch, batch_idx):
        token_loss(self.model, batch)
        self.note()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Module(Training, LightningModule):
    def __init__(self, *args, **options):
        super().__init__()
        self.make(*args, **options)


class Windows(Callback):
    """Keeps every window of a SparseBalanceCallback that stands before it, and what was logged."""

    def __init__(self, tuning):
        self.tuning, self.windows, self.logged = tuning, [], []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if self.tuning.window is not None and (
            not self.windows or self.windows[-1] is not self.tuning.window
        ):
            self.windows.append(self.tuning.window)
            self.logged.append({name: float(v) for name, v in trainer.callback_metrics.items()})


def make_trainer(folder, *callbacks, trainer=Trainer, **settings):
    defaults = {
        "accelerator": "cpu", "devices": 1, "accumulate_grad_batches": 2, "max_epochs": 1, "logger": False,
        "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False,
        "num_sanity_val_steps": 0, "default_root_dir": folder, "callbacks": list(callbacks),
    }  # fmt: skip
    return trainer(**{**defaults, **settings})


def fit(folder, tuning=None, *callbacks, module=None, resume=None, **settings):
    """Train on one thread; returns the module, with the windows where there is a `tuning`."""
    options = module if isinstance(module, dict) else {}
    built = Module(**options) if module is None or isinstance(module, dict) else module
    watch = Windows(tuning)
    ours = [] if tuning is None else [tuning, watch]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        # Those that save come last, as Lightning has it for its own.
        made = make_trainer(
            folder, *sorted([*callbacks, *ours], key=lambda c: type(c).__name__ == "SaveAlways"), **settings
        )
        made.fit(built, ckpt_path=resume)
    finally:
        torch.set_num_threads(threads)
    built.windows, built.logged, built.fitted = watch.windows, watch.logged, made
    return built


def measured_table(**changes):
    """A table as if measured here; `changes` are what differs in its fingerprint."""
    return LatencyTable(COST.measurements, replace(current_fingerprint(COST.shape), **changes))


def tuning(**settings):
    return SparseBalanceCallback(**{"tolerance": 0.3, **settings})


def records(module, layers=(0, 1)):
    """Per forward, what its sparse layers did # [layers, N, 3]"""
    return [t.record[list(layers)] for t in module.targets if t is not None]


def weights(module):
    return torch.cat([p.detach().flatten() for p in module.parameters()])
