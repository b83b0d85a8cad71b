"""DST in one process: who gets sparser and denser, what is logged, and that it can be turned off."""

from __future__ import annotations

import copy
import csv

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback
from lightning.pytorch.loggers import CSVLogger
from sparse_run import (
    BLOCK,
    BUDGET,
    COST,
    LENGTHS,
    Module,
    build,
    fit,
    make_trainer,
    records,
    tuning,
    weights,
)
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, Qwen2Config

from sb_lightning.callbacks import ImbalanceMonitor, SparseBalanceCallback
from sb_lightning.tuning import anchor_latency


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return fit(tmp_path_factory.mktemp("run"), tuning(), ImbalanceMonitor(spans=False))


def cell_us(lengths, budget=BUDGET):
    return sum(COST.predict_many_us(lengths, budget).tolist()) + round(1e3 * COST.fixed_ms)


def test_the_anchor_is_that_of_the_planned_window(run):
    times = [cell_us([LENGTHS[i] for i in ids]) for ids in run.seen]
    for window in range(len(times) // 2):
        pair = times[2 * window : 2 * window + 2]
        for target in run.targets[2 * window : 2 * window + 2]:
            assert target.tau_us.item() + round(1e3 * COST.fixed_ms) == anchor_latency(pair, "mean")


def test_stragglers_get_sparser_and_others_denser_within_the_tolerance(run):
    moved = {-1: 0, 0: 0, 1: 0}
    for ids, record in zip(run.seen, records(run), strict=True):
        budgets, after, before = record.unbind(-1)
        # Coverage is summed up in fp32 here.
        assert ((after - before).abs() <= 0.3 + 1e-5).all()
        for budget in budgets.flatten().tolist():
            moved[(budget > BUDGET) - (budget < BUDGET)] += 1
        if len(ids) == 1 and LENGTHS[ids[0]] <= BLOCK * BUDGET:
            assert (budgets == BUDGET).all(), "a sequence that k0 covers whole was tuned"
    assert min(moved[-1], moved[1]) > 0, moved


@pytest.mark.parametrize("anchor", ["min", "max"])
def test_the_other_anchors_only_cut_or_only_raise(tmp_path, anchor):
    module = fit(tmp_path, tuning(anchor=anchor))
    budgets = torch.cat([record[..., 0].flatten() for record in records(module)])
    assert (budgets <= BUDGET).all() if anchor == "min" else (budgets >= BUDGET).all()
    assert (budgets != BUDGET).any()
    ratios = [window.metrics()["balance/work_ratio"] for window in module.windows]
    assert min(ratios) < 0.95 if anchor == "min" else max(ratios) > 1.05


def test_the_limits_of_budgets_are_kept(tmp_path):
    module = fit(tmp_path, tuning(tolerance=1.0, min_budget=3, max_budget=5))
    budgets = torch.cat([record[..., 0].flatten() for record in records(module)])
    assert (budgets.min(), budgets.max()) == (3, 5)


def test_tolerance_zero_and_disabled_train_to_the_same_bit_as_no_callback(tmp_path):
    plain = weights(fit(tmp_path))
    off = fit(tmp_path, tuning(enabled=False))
    assert torch.equal(weights(fit(tmp_path, tuning(tolerance=0.0))), plain)
    assert torch.equal(weights(off), plain)
    assert off.targets == [None] * len(off.targets)
    assert not torch.equal(weights(fit(tmp_path, tuning())), plain)


def test_the_first_windows_only_measure(tmp_path):
    module = fit(tmp_path, tuning(warmup_windows=2))
    tuned = [bool((record[..., 0] != BUDGET).any()) for record in records(module)]
    assert not any(tuned[:4])
    assert any(tuned[4:])
    assert module.logged[0]["sparsity/coverage_mean"] > 0
    assert module.logged[0]["sparsity/coverage_delta"] == 0
    assert module.logged[0]["sparsity/infeasible"] == 0
    assert any(logged["sparsity/coverage_delta"] for logged in module.logged[2:])


def test_the_metrics_of_a_window(run):
    for window, logged in enumerate(run.logged):
        pair = records(run)[2 * window : 2 * window + 2]
        budgets = torch.cat([record[..., 0].mean(0) for record in pair])
        assert logged["sparsity/budget_mean"] == pytest.approx(budgets.mean().item())
        assert logged["sparsity/budget_min"] == min(r[..., 0].min().item() for r in pair)
        assert logged["sparsity/budget_max"] == max(r[..., 0].max().item() for r in pair)
        assert 0 < logged["sparsity/coverage_mean"] <= 1
        assert abs(logged["sparsity/coverage_delta"]) <= 0.3
        assert 0 <= logged["sparsity/infeasible"] <= 1
        assert logged["time/tune_ms"] > 0
        chosen, usual = 0.0, 0
        for ids, record in zip(run.seen[2 * window :], pair, strict=False):
            lengths = [LENGTHS[i] for i in ids]
            chosen += sum(cell_us(lengths, layer.int().tolist()) for layer in record[..., 0]) / 2
            usual += cell_us(lengths)
        assert logged["balance/work_ratio"] == pytest.approx(chosen / usual, rel=1e-6)
    assert any(logged["sparsity/infeasible"] for logged in run.logged)


def test_the_monitor_is_told_the_prediction_and_the_budget(tmp_path):
    monitor = ImbalanceMonitor(spans=False)
    module = fit(tmp_path, tuning(), monitor)
    last = monitor.window
    for micro_batch, record in enumerate(records(module)[-2:]):
        lengths = [LENGTHS[i] for i in module.seen[-2 + micro_batch]]
        want = sum(cell_us(lengths, layer.int().tolist()) for layer in record[..., 0]) / 2e3
        assert last.predicted_ms[0, micro_batch] == pytest.approx(want, rel=1e-6)
    assert module.logged[-1]["time/tune_ms"] > 0


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("enabled", [True, False])
def test_loggers_get_one_time_of_tuning_per_step(tmp_path, is_first, enabled):
    monitor, ours = ImbalanceMonitor(spans=False), tuning(enabled=enabled)
    callbacks = [monitor, ours] if is_first else [ours, monitor]
    made = make_trainer(
        tmp_path, *callbacks, logger=CSVLogger(tmp_path, name="", version=""), log_every_n_steps=1
    )
    made.fit(Module())
    with (tmp_path / "metrics.csv").open() as file:
        told = [row for row in csv.DictReader(file) if row["time/tune_ms"]]
    assert [row["step"] for row in told] == [str(step) for step in range(made.global_step)]
    # The value that stays is the tuner's, where there is one.
    name, other = ("sparsity/budget_mean", "time/plan_ms")[:: 1 if enabled else -1]
    assert all(row[name] and not row.get(other) for row in told)


def test_budgets_go_into_the_store_of_the_sampler(run):
    store = run.sampler.store
    assert store.version == len(run.windows)
    used = records(run)[-1][..., 0].mean(0)
    got = store.expected(store.version, ids=run.seen[-1], lengths=[1], base=[99])
    assert got.tolist() == pytest.approx(used.tolist())


def test_evaluation_and_generation_use_the_models_own_budget(tmp_path):
    module = Module()
    loader = DataLoader([DataLoaderItem(90), DataLoaderItem(200)], batch_size=None)

    class Generates(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if batch_idx == 0:
                before = len(pl_module.model.model.sb_tuner.forwards)
                pl_module.model.generate(batch["input_ids"], max_new_tokens=2, do_sample=False)
                with torch.no_grad():
                    pl_module.model(batch["input_ids"])
                self.extra = len(pl_module.model.model.sb_tuner.forwards) - before

    generates, callback = Generates(), tuning()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    made = make_trainer(tmp_path, generates, callback, val_check_interval=2)
    made.fit(module, val_dataloaders=loader)
    torch.set_num_threads(threads)
    # After each of six windows, two validation batches; none of them added a forward.
    assert len(module.seen) == 12
    assert generates.extra == 0
    assert callback.window.cells == 2
    assert not hasattr(module.model.model, "sb_tuner")
    module.targets.clear()
    made.validate(module, loader, verbose=False)
    assert module.targets == [None, None]


def DataLoaderItem(length):
    from tiny import packed

    return packed([length])


def test_a_copy_of_the_model_is_not_tuned(tmp_path):
    class Copies(Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            self.copy = copy.deepcopy(pl_module.model)

    copies = Copies()
    module = fit(tmp_path, tuning(), copies)
    assert copies.copy.model.sb_tuner is None
    assert not hasattr(module.model.model, "sb_tuner")


def test_dense_layers_stay_dense(tmp_path):
    module = fit(tmp_path, tuning(), module={"model": build(dense_layers=[0])})
    assert not any(record[0].any() for record in records(module))
    assert any((record[1, :, 0] != BUDGET).any() for record in records(module))


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"anchor": "median"}, "anchor is 'median'"),
        ({"tolerance": 1.5}, "tolerance is 1.5"),
        ({"tolerance": float("nan")}, "tolerance is nan"),
        ({"tolerance": "0.1"}, "tolerance is '0.1'"),
        ({"min_budget": 0}, "min_budget is 0"),
        ({"min_budget": 2.0}, "min_budget is 2.0"),
        ({"min_budget": 9, "max_budget": 8}, "min_budget is 9 and max_budget 8"),
        ({"base_budget": 9, "max_budget": 8}, "base_budget is 9"),
        ({"granularity": "head"}, "granularity is 'head'"),
        ({"sync": "none"}, "sync is 'none'"),
        ({"warmup_windows": -1}, "warmup_windows is -1"),
        ({"slack_speed": 0.5}, "slack_speed is 0.5"),
        ({"anchor": "slack", "sync": "slot"}, "anchor is 'slack'"),
    ],
)
def test_bad_settings_are_refused_and_named(settings, named):
    with pytest.raises((ValueError, TypeError), match=r"To fix it") as error:
        SparseBalanceCallback(**settings)
    assert named in str(error.value)


def test_a_model_without_sparse_attention_is_refused(tmp_path):
    from sparse_run import SIZES

    dense = AutoModelForCausalLM.from_config(Qwen2Config(**SIZES))
    with pytest.raises(MisconfigurationException, match=r"sparsify\(model"):
        fit(tmp_path, tuning(), module={"model": dense})


@pytest.mark.parametrize("settings", [{"sync": "plan"}, {"anchor": "slack"}])
def test_a_plan_needs_our_sampler(tmp_path, settings):
    class Plain(Module):
        def train_dataloader(self):
            return DataLoader([DataLoaderItem(90)], batch_size=None)

    with pytest.raises(MisconfigurationException, match="SparsityAwareBatchSampler"):
        fit(tmp_path, tuning(**settings), module=Plain())


def test_limits_that_leave_out_the_models_budget_are_refused(tmp_path):
    with pytest.raises(ValueError, match="sparsify's budget is 4"):
        fit(tmp_path, tuning(max_budget=3))


def test_a_table_of_another_block_size_is_refused(tmp_path):
    from sb_lightning.balance.costs import GENERIC_SHAPE
    from sb_lightning.latency import AnalyticCost

    with pytest.raises(ValueError, match="table has block_size 128"):
        fit(tmp_path, tuning(table=AnalyticCost(GENERIC_SHAPE)))
