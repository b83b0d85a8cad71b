"""Measured times go into the sampler's store, window by window, and plans and anchors follow."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch import Callback
from sparse_run import COST, LENGTHS, Module, fit, records, tuning, weights

from sb_lightning.callbacks import BalancedSampling, ImbalanceMonitor
from sb_lightning.latency import CostModel

SAMPLER = {"sampler": {"policy": "latency"}}


class Notes(Callback):
    """Keeps every window that a monitor has measured."""

    def __init__(self, monitor):
        self.monitor, self.windows = monitor, []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        window = self.monitor.window
        if window is not None and (not self.windows or self.windows[-1] is not window):
            self.windows.append(window)


def by_hand(module, windows):
    """What the table's factors should be."""
    model = CostModel(COST)
    layers = records(module)
    for n, window in enumerate(windows):
        if n:
            cells = range(2 * n, 2 * n + 2)
            model.recalibrate(
                [[LENGTHS[i] for i in module.seen[c]] for c in cells],
                [[round(b) for b in layers[c][..., 0].double().mean(0).tolist()] for c in cells],
                window.compute_ms[0].tolist(),
            )
    return model


@pytest.mark.parametrize("is_first", [True, False], ids=["monitor_first", "monitor_last"])
def test_the_store_has_the_factors_of_what_was_measured(tmp_path, is_first):
    monitor, callback = ImbalanceMonitor(spans=False), tuning(recalibrate=True)
    notes = Notes(monitor)
    order = [monitor, callback] if is_first else [callback, monitor]
    module = fit(tmp_path, None, *order, notes, module=SAMPLER)
    assert len(notes.windows) == 6
    store = module.sampler.store
    # A monitor that comes after is heard of one window late, and of the last one never.
    want = by_hand(module, notes.windows if is_first else notes.windows[:-1])
    got = store.costs(store.version, module.sampler.costs.table)
    for length in (20, 90, 256):
        assert got.predict(length, 4) == want.predict(length, 4) != COST.predict(length, 4)
    # The first window is not taken in.
    assert store._ring[-1].factors["windows"] == (5 if is_first else 4)


def test_goals_are_those_of_the_recalibrated_table(tmp_path):
    """The tiny model runs faster or slower than the table says: later windows are steered to that."""
    taus = []

    class Looks(Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            taus.append(callback._run.tuner.prices.cell_us([200], 4))

    callback = tuning(recalibrate=True)
    module = fit(tmp_path, callback, ImbalanceMonitor(spans=False), Looks(), module=SAMPLER)
    # With a lag of one, and without the first window, the fourth is the first that could know better.
    table = COST.predict_many_us([200], 4).tolist()[0] + round(1e3 * COST.fixed_ms)
    assert module.sampler.lag == 1
    assert taus[:6] == [table] * 6
    assert taus[-1] != table


def test_a_run_goes_on_with_its_factors(tmp_path):
    from tiny_run import SaveAlways

    def run(resume=None, save=False):
        extra = [SaveAlways(tmp_path)] if save else []
        return fit(
            tmp_path, tuning(recalibrate=True), ImbalanceMonitor(spans=False), BalancedSampling(), *extra,
            module=SAMPLER, resume=resume,
        )  # fmt: skip

    run(save=True)
    saved = torch.load(tmp_path / "b-0-7.ckpt", weights_only=True)
    assert "BalancedSampling" in saved["callbacks"]
    module = run(tmp_path / "b-0-7.ckpt")
    assert module.sampler.store._ring[-1].factors["windows"] >= 3


def test_nothing_is_measured_into_the_store_unasked(tmp_path):
    module = fit(tmp_path, tuning(), ImbalanceMonitor(spans=False), module=SAMPLER)
    assert module.sampler.store.costs(module.sampler.store.version, COST) is COST


class Twice(Module):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) + super().training_step(batch, batch_idx)


def test_a_window_that_ran_otherwise_than_planned_is_left_out(tmp_path):
    """Two forwards in a micro-batch take twice the time that is predicted of one."""
    module = fit(tmp_path, tuning(recalibrate=True), ImbalanceMonitor(spans=False), module=Twice(**SAMPLER))
    assert module.sampler.store.costs(module.sampler.store.version, COST) is COST


def train(folder):
    module = fit(
        folder, tuning(recalibrate=True), ImbalanceMonitor(spans=False), BalancedSampling(), module=SAMPLER,
        strategy="ddp", devices=2, use_distributed_sampler=False, max_epochs=2,
    )  # fmt: skip
    store = module.sampler.store
    return store.digest(), store._ring[-1].factors, weights(module), module.logged[-1]["balance/work_ratio"]


def test_ranks_learn_the_same_factors_and_go_on_planning_alike(gloo_pool, tmp_path):
    (digest, factors, weight, ratio), other = gloo_pool.run(train, tmp_path)
    assert factors["windows"] >= 3
    assert (digest, factors, ratio) == (other[0], other[1], other[3])
    assert torch.equal(weight, other[2])
