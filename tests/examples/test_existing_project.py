"""The example of a project that meets the library: what its three lines are, and what each does alone."""

from __future__ import annotations

import difflib
import math
import re
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "existing_project"
TOLERANCE, BUDGET = 0.1, 8


def project():
    """Return both versions of the example, on less data."""
    if str(FOLDER) not in sys.path:
        sys.path.insert(0, str(FOLDER))
    import after
    import before

    for version in (before, after):
        version.MAX_TOKENS, version.ACCUMULATE = 1024, 2
        version.PACKAGES = ("json", "logging", "xml", "concurrent")
    return before, after


class Watch:
    """What a training did, step by step; made into a callback on the rank."""

    def __new__(cls):
        from lightning.pytorch import Callback

        class Watching(Callback):
            def __init__(self):
                self.seen, self.gradients, self.windows, self.batches = [], [], [], []

            def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
                self.batches.append(batch)
                files = trainer.datamodule.train_files.documents
                rows = [
                    row[mask.bool()]
                    for row, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
                ]
                self.seen.append(
                    [next(i for i, file in enumerate(files) if torch.equal(file, row)) for row in rows]
                )
                self.note(trainer)

            def on_train_end(self, trainer, pl_module):
                self.note(trainer)

            def note(self, trainer):
                tuning = next(
                    (c for c in trainer.callbacks if type(c).__name__ == "SparseBalanceCallback"), None
                )
                window = getattr(tuning, "window", None)
                if window is not None and all(window is not known for known in self.windows):
                    self.windows.append(window)

            def on_before_optimizer_step(self, trainer, pl_module, optimizer):
                grads = [p.grad.flatten().clone() for p in pl_module.parameters() if p.grad is not None]
                self.gradients.append(torch.cat(grads))

        return Watching()


def train(model, data, *callbacks, **settings):
    """Train on this rank of two with the Trainer of `before.py`; returns the Trainer and what was seen."""
    from lightning.pytorch import seed_everything

    before, _ = project()
    seed_everything(0, verbose=False)
    watch = Watch()
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0}
    trainer = before.make_trainer(watch, *callbacks, **{**quiet, "accumulate_grad_batches": 2, **settings})
    module = model()
    trainer.fit(module, data())
    return trainer, watch, module


def result(trainer, watch, module):
    return {
        "seen": watch.seen,
        "lengths": trainer.datamodule.train_files.lengths,
        "gradients": watch.gradients,
        "weights": torch.cat([p.detach().flatten() for p in module.parameters()]),
        "val_loss": float(trainer.callback_metrics.get("val_loss", math.nan)),
        "steps": trainer.global_step,
        "windows": [window.metrics() for window in watch.windows],
        "lengths_told": [window.lengths for window in watch.windows],
    }


def as_it_was():
    before, _ = project()
    return result(*train(before.SourceModel, before.SourceData))


def balanced():
    """Train the dense model with the sampler; returns the plan too."""
    from sb_lightning.callbacks import BalancedSampling

    before, after = project()
    trainer, watch, module = train(before.SourceModel, after.SourceData, BalancedSampling())
    sampler = trainer.train_dataloader.batch_sampler
    sampler.set_epoch(0)
    return {
        **result(trainer, watch, module),
        "plan": [list(cell) for cell in sampler],
        "loads": [plan.predicted_ms for plan in (sampler.plan(0, w) for w in range(sampler.num_windows))],
        "budget": sampler.costs.budget,
    }


def tuned(batch_size):
    """Train the sparse model with their loader, which pads."""
    from torch.utils.data import DataLoader

    from sb_lightning.callbacks import SparseBalanceCallback

    before, after = project()

    class Padded(before.SourceData):
        def train_dataloader(self):
            return DataLoader(self.train_files, batch_size=batch_size, shuffle=True, collate_fn=before.pad)

    return result(*train(after.SourceModel, Padded, SparseBalanceCallback(tolerance=TOLERANCE)))


def all_three():
    _, after = project()
    from lightning.pytorch import seed_everything

    seed_everything(0, verbose=False)
    watch = Watch()
    trainer = after.make_trainer(
        watch, enable_progress_bar=False, enable_model_summary=False, accumulate_grad_batches=2
    )
    module = after.SourceModel()
    trainer.fit(module, after.SourceData())
    sampler = trainer.train_dataloader.batch_sampler
    sampler.set_epoch(0)
    return {**result(trainer, watch, module), "budget": sampler.costs.budget, "store": sampler.store.digest()}


def lora(order):
    """Train adapters only, with all three lines."""
    import peft

    from sb_lightning.attention import sparsify
    from sb_lightning.callbacks import BalancedSampling, SparseBalanceCallback

    before, after = project()

    class Adapted(before.SourceModel):
        def __init__(self):
            super().__init__()
            if order == "before":
                sparsify(self.llama, block_size=32, budget=BUDGET)
            config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
            self.llama = peft.get_peft_model(self.llama, config)
            if order == "after":
                sparsify(self.llama, block_size=32, budget=BUDGET)
            self.start = {name: p.detach().clone() for name, p in self.named_parameters()}

    callbacks = [SparseBalanceCallback(tolerance=TOLERANCE), BalancedSampling()]
    trainer, watch, module = train(Adapted, after.SourceData, *callbacks, limit_train_batches=8)
    moved = {n for n, p in module.named_parameters() if not torch.equal(p, module.start[n])}
    names = set(module.start)
    return {**result(trainer, watch, module), "moved": moved, "names": names}


def body(path):
    """Return a file's lines without its first docstring, its imports and empty lines."""
    text = re.sub(r'\A""".*?"""\n', "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    return [line for line in text.splitlines() if line and not re.match(r"(from|import) ", line)]


def check_once(ranks):
    """Every file is seen once in the epoch, by one rank."""
    counts = Counter(i for rank in ranks for cell in rank["seen"] for i in cell)
    assert counts == dict.fromkeys(range(len(ranks[0]["lengths"])), 1)


def check_tuned(ranks, cold=0):
    """Budgets vary, from the window on that can; coverage keeps within the tolerance; ranks agree."""
    windows = ranks[0]["windows"]
    assert windows
    assert len(windows) == ranks[0]["steps"]
    for window, other in zip(windows, ranks[1]["windows"], strict=True):
        assert {k: v for k, v in window.items() if "time/" not in k} == {
            k: v for k, v in other.items() if "time/" not in k
        }
        assert abs(window["sparsity/coverage_delta"]) <= TOLERANCE + 1e-5
    for window in windows[:cold]:
        assert window["sparsity/budget_min"] == window["sparsity/budget_max"] == BUDGET
    assert min(w["sparsity/budget_min"] for w in windows) < BUDGET
    assert max(w["sparsity/budget_max"] for w in windows) > BUDGET
    assert torch.equal(ranks[0]["weights"], ranks[1]["weights"])
    assert all(torch.isfinite(rank["weights"]).all() for rank in ranks)


@pytest.fixture(scope="module")
def baseline(gloo_pool):
    return gloo_pool.run(as_it_was)


def test_three_lines_are_new():
    found = list(difflib.ndiff(body(FOLDER / "before.py"), body(FOLDER / "after.py")))
    new = [line[2:].strip() for line in found if line.startswith("+ ")]
    assert not [line for line in found if line.startswith("- ")]
    assert len(new) == 3
    for line, name in zip(new, ("balance_loader(", "sparsify(", "SparseBalanceCallback("), strict=True):
        assert name in line


def test_the_project_as_it_was_trains(baseline):
    assert torch.equal(baseline[0]["weights"], baseline[1]["weights"])
    assert 0 < baseline[0]["val_loss"] < 7.2
    assert baseline[0]["windows"] == []


def test_the_sampler_alone_keeps_the_steps_of_a_dense_model(gloo_pool, baseline):
    """The same files in every step, elsewhere: each is a micro-batch, so a mean per micro-batch stays."""
    ranks = gloo_pool.run(balanced)
    check_once(ranks)
    for rank in ranks:
        assert rank["seen"] == rank["plan"]
        assert rank["budget"] is None
    whole = len(ranks[0]["lengths"]) // 4
    moved = 0
    for window in range(whole):
        now, then = (
            [frozenset(i for cell in rank["seen"][2 * window : 2 * window + 2] for i in cell) for rank in run]
            for run in (ranks, baseline)
        )
        assert now[0] | now[1] == then[0] | then[1]
        moved += set(now) != set(then)
    assert moved > 0
    for step in range(2):
        torch.testing.assert_close(
            ranks[0]["gradients"][step], baseline[0]["gradients"][step], rtol=1e-3, atol=2e-6
        )


@pytest.mark.parametrize("batch_size", [1, 2])
def test_the_callback_alone_tunes_with_their_loader(gloo_pool, batch_size):
    """Nobody knows the window: the first one is at k0, and the anchor is that of those before."""
    ranks = gloo_pool.run(tuned, batch_size)
    check_tuned(ranks, cold=1)
    if batch_size == 2:
        # Padding is no sequence.
        told = ranks[0]["lengths_told"][0]
        assert sorted(told) == sorted(
            ranks[0]["lengths"][i] for rank in ranks for cell in rank["seen"][:2] for i in cell
        )


def test_all_three_lines(gloo_pool, baseline):
    ranks = gloo_pool.run(all_three)
    check_once(ranks)
    assert [rank["budget"] for rank in ranks] == [BUDGET, BUDGET]
    assert ranks[0]["store"] == ranks[1]["store"]
    assert ranks[0]["steps"] == baseline[0]["steps"]
    budgets = {window["sparsity/budget_max"] for window in ranks[0]["windows"]}
    assert len(budgets) > 1
    assert torch.equal(ranks[0]["weights"], ranks[1]["weights"])
    assert abs(ranks[0]["val_loss"] - baseline[0]["val_loss"]) < 0.1


def test_lora_keeps_its_base_and_may_be_sparsified_before_or_after(gloo_pool):
    pytest.importorskip("peft")
    found = {order: gloo_pool.run(lora, order) for order in ("before", "after")}
    for ranks in found.values():
        check_tuned(ranks)
        adapters = {name for name in ranks[0]["names"] if "lora_" in name}
        assert ranks[0]["moved"] == adapters
        assert adapters
    assert torch.equal(found["before"][0]["weights"], found["after"][0]["weights"])


def test_the_comparison_tells_of_each_arm_when_it_starts_and_when_it_is_done(monkeypatch, capsys):
    project()
    import compare

    told = []

    def train(arm):
        told.append(capsys.readouterr().out.splitlines()[-1])
        return {"imbalance": 1.25, "window_ms": 321.0, "val_loss": 5.5, "tuned": []}

    monkeypatch.setattr(compare, "train", train)
    compare.report(["as it was", "sampler alone"])
    assert told == ["training as it was ...", "training sampler alone ..."]
    row, *notes = capsys.readouterr().out.splitlines()
    assert row.split() == ["sampler", "alone", "1.250", "321", "5.500"]
    assert "only on a quiet machine" in notes[-1]
