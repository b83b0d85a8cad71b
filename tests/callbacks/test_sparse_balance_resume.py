"""A resumed run tunes as the unbroken one, to the last bit."""

from __future__ import annotations

import pytest
import torch
from sparse_run import Module, fit, records, tuning, weights
from tiny_run import SaveAlways

from sb_lightning.callbacks import BalancedSampling

SETTINGS = {
    "plan": {},
    "ema": {"sync": "ema", "anchor": "max"},
    "step": {"granularity": "step", "warmup_windows": 1},
    "slack": {"anchor": "slack"},
}


def run(folder, settings, workers, resume=None, save=False):
    saves = [SaveAlways(folder)] if save else []
    callback = tuning(**settings)
    module = fit(
        folder, callback, BalancedSampling(), *saves, max_epochs=2,
        module={"workers": workers, "sampler": {"policy": "latency"}},
        resume=None if resume is None else folder / f"{resume}.ckpt",
    )  # fmt: skip
    module.state = callback.state_dict()
    return module


@pytest.mark.parametrize(
    ("settings", "workers"), [("plan", 0), ("plan", 2), ("ema", 0), ("step", 0), ("slack", 2)]
)
def test_a_resumed_run_equals_the_unbroken_one(tmp_path, settings, workers):
    unbroken = run(tmp_path, SETTINGS[settings], workers, save=True)
    # Mid-window, the end of a window, of an epoch, and mid-window in the second one.
    for checkpoint in ("b-0-2", "b-0-3", "e-0", "b-1-6"):
        resumed = run(tmp_path, SETTINGS[settings], workers, resume=checkpoint)
        assert resumed.seen == unbroken.seen[-len(resumed.seen) :], checkpoint
        want = records(unbroken)[-len(resumed.seen) :]
        assert all(torch.equal(*two) for two in zip(records(resumed), want, strict=True)), checkpoint
        assert torch.equal(weights(resumed), weights(unbroken)), checkpoint
        assert resumed.sampler.store.digest() == unbroken.sampler.store.digest(), checkpoint
        assert resumed.state["windows"] == unbroken.state["windows"] == 12


def test_the_state_loads_with_weights_only(tmp_path):
    run(tmp_path, {}, 0, save=True)
    loaded = torch.load(tmp_path / "b-0-3.ckpt", weights_only=True)
    assert loaded["callbacks"]["SparseBalanceCallback"]["windows"] == 2


def test_a_state_of_another_release_is_refused():
    with pytest.raises(ValueError, match="version 99"):
        tuning().load_state_dict({"version": 99})


def test_one_callback_may_train_twice(tmp_path):
    callback = tuning()
    first = fit(tmp_path, callback)
    again = fit(tmp_path, callback)
    assert torch.equal(weights(first), weights(again))


def test_manual_steps_within_a_planned_window_are_counted_once(tmp_path):
    """The window is started anew, so what it had come to before is not kept."""
    options = {"manual": True, "sampler": {"accumulate": 3}}
    settings = {"accumulate_grad_batches": 1}
    whole = fit(tmp_path, tuning(), BalancedSampling(), SaveAlways(tmp_path), module=options, **settings)
    updates = []

    class Counting(Module):
        def train_dataloader(self):
            loader = super().train_dataloader()
            update = self.sampler.store.update
            self.sampler.store.update = lambda number, **window: (
                updates.append(sorted(window["ids"])) or update(number, **window)
            )
            return loader

    resumed = fit(
        tmp_path, tuning(), BalancedSampling(), module=Counting(**options),
        resume=tmp_path / "b-0-4.ckpt", **settings,
    )  # fmt: skip
    assert resumed.seen == whole.seen[3:]
    assert updates == [sorted(i for (i,) in whole.seen[at : at + 3]) for at in (3, 6, 9)]
