"""A comparison of a tiny model on a tiny corpus, run on the ranks of the pool."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from tiny import tiny_architecture

from sb_lightning.compare import engine
from sb_lightning.compare.arms import select_arms
from sb_lightning.compare.data import CompareData
from sb_lightning.compare.engine import Comparison
from sb_lightning.compare.folder import ComparisonFolder
from sb_lightning.compare.schedule import Schedule
from sb_lightning.latency import AnalyticCost, ModelShape
from sb_lightning.training import CausalLMModule

BLOCK, BUDGET = 16, 3
COST = AnalyticCost(
    ModelShape(
        layers=2, query_heads=2, kv_heads=1, head_dim=32, hidden_size=64, intermediate_size=96,
        vocab_size=258, block_size=BLOCK,
    ),
    attention_gflops=1.0,
    overhead_ms=0.0,
)  # fmt: skip
"""Slow attention: the budget decides about the time."""


class Recording(CausalLMModule):
    """Notes the sequences of each micro-batch, segment after segment."""

    segments: list = []  # noqa: RUF012 - emptied by each run

    def __init__(self, **options):
        super().__init__(**options)
        self.segments.append([])

    def configure_model(self):
        super().configure_model()
        with torch.no_grad():
            # Scores that differ, as those of a trained model: else coverage is proportional to the budget.
            for layer in self.model.model.layers:
                layer.self_attn.q_proj.weight *= 6

    def training_step(self, batch, batch_idx):
        self.segments[-1].append((self.trainer.global_step, tuple(batch["sequence_ids"].tolist())))
        return super().training_step(batch, batch_idx)


class Silent:
    def segment(self, number, arm, result):
        pass

    def round(self, rounds):
        pass


def compare(folder, source, names, *, rounds=2, fail_at=None, limit_s=1e9):
    """Run a comparison of rounds of two windows; returns its rounds and what each segment trained on.

    Args:
        fail_at: Break off when so many segments have run.
    """
    folder = Path(folder)
    Recording.segments.clear()
    torch.set_num_threads(1)
    architecture = tiny_architecture(vocab_size=258, max_position_embeddings=1024)
    arms = select_arms("table2", names)

    def make_data(arm):
        data = CompareData(
            source=str(source), cache_dir=str(folder.parent / "cache"), max_length=400, validation_share=0.1,
            policy=arm.policy, tail="drop",
        )  # fmt: skip
        data.latency = COST
        return data

    made = ComparisonFolder(folder)
    if torch.distributed.get_rank() == 0:
        made.begin({})
    comparison = Comparison(
        arms=arms,
        schedule=Schedule(windows=2 * rounds, windows_per_round=2),
        folder=made,
        make_module=lambda budget: Recording(
            architecture=architecture, attention={"block_size": BLOCK, "budget": budget}
        ),
        data={arm.name: make_data(arm) for arm in arms},
        trainer_options={
            "accelerator": "cpu", "devices": 2, "strategy": "ddp", "accumulate_grad_batches": 2,
            "max_steps": 2 * rounds, "default_root_dir": folder,
        },
        usual_budget=BUDGET,
        seed=3,
        limit_s=limit_s,
        listener=Silent(),
    )  # fmt: skip
    whole, count = engine.run_segment, 0

    def breaking(*arguments):
        nonlocal count
        if count == fail_at:
            raise KeyboardInterrupt
        count += 1
        return whole(*arguments)

    engine.run_segment = breaking
    try:
        # The other rank may not read the folder, which it might see at another moment.
        rounds = comparison.finished() if torch.distributed.get_rank() == 0 else ()
        found = comparison.run(time.perf_counter(), rounds)
    except KeyboardInterrupt:
        found = None
    finally:
        engine.run_segment = whole
    return found, list(Recording.segments)
