"""DST where something is odd: runs that are cut short or go on otherwise, tables of others, bad settings."""

from __future__ import annotations

import warnings

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule
from sparse_run import (
    BLOCK,
    BUDGET,
    COST,
    LENGTHS,
    SIZES,
    Module,
    Training,
    build,
    fit,
    make_trainer,
    measured_table,
    records,
    tuning,
    weights,
)
from tiny import packed
from tiny_run import SaveAlways
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, Qwen2Config

from sb_lightning.callbacks import BalancedSampling, SparseBalanceCallback
from sb_lightning.latency import AnalyticCost


class StopsAt(Callback):
    def __init__(self, micro_batch):
        self.micro_batch = micro_batch

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        trainer.should_stop = trainer.should_stop or batch_idx == self.micro_batch


@pytest.mark.parametrize("settings", [{}, {"sync": "ema", "anchor": "max"}], ids=["plan", "ema"])
def test_a_window_that_is_cut_short_is_logged_and_not_learnt_from(tmp_path, settings):
    """As a time limit does: the resumed run starts that window anew."""
    options = {"accumulate_grad_batches": 4, "max_epochs": 2}
    whole = tuning(**settings)
    unbroken = fit(tmp_path, whole, BalancedSampling(), **options)
    stopped = tuning(**settings)
    first = fit(tmp_path, stopped, BalancedSampling(), StopsAt(5), SaveAlways(tmp_path), **options)
    assert len(first.seen) == 6
    assert stopped.window.cells == 2
    assert stopped.state_dict()["windows"] == 1
    again = tuning(**settings)
    resumed = fit(tmp_path, again, BalancedSampling(), resume=tmp_path / "end.ckpt", **options)
    assert resumed.seen == unbroken.seen[4:]
    assert torch.equal(weights(resumed), weights(unbroken))
    assert resumed.sampler.store.digest() == unbroken.sampler.store.digest()
    assert again.state_dict()["windows"] == whole.state_dict()["windows"] == 6


class Interrupted(Module):
    def training_step(self, batch, batch_idx):
        if batch_idx == 3:
            raise KeyboardInterrupt
        return super().training_step(batch, batch_idx)


def test_after_an_interruption_the_model_is_as_it_was_and_the_callback_trains_again(tmp_path):
    callback, module = tuning(), Interrupted()
    with pytest.raises(SystemExit):
        fit(tmp_path, callback, module=module)
    assert not hasattr(module.model.model, "sb_tuner")
    again = fit(tmp_path, callback)
    assert torch.equal(weights(again), weights(fit(tmp_path, tuning())))


def test_what_a_callback_has_learnt_elsewhere_is_forgotten(tmp_path):
    """The checkpoint knows nothing of it, and the run does not start at step 0."""
    fit(tmp_path, None, BalancedSampling(), SaveAlways(tmp_path))
    used, fresh = tuning(sync="ema"), tuning(sync="ema")
    fit(tmp_path, used)
    runs = [
        fit(tmp_path, callback, BalancedSampling(), resume=tmp_path / "b-0-5.ckpt")
        for callback in (used, fresh)
    ]
    assert used.state_dict()["windows"] == fresh.state_dict()["windows"] == 3
    assert torch.equal(weights(runs[0]), weights(runs[1]))


def test_the_same_trainer_goes_on_counting(tmp_path):
    callback, module = tuning(), Module()
    trainer = make_trainer(tmp_path, callback)
    trainer.fit(module)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module)
    assert callback.state_dict()["windows"] == len(LENGTHS)


@pytest.mark.parametrize(
    "changed",
    [{"anchor": "min"}, {"base_budget": 3}, {"table": AnalyticCost(COST.shape)}],
    ids=["anchor", "k0", "table"],
)
def test_an_average_of_something_else_is_begun_anew(tmp_path, changed):
    settings = {"sync": "ema", "anchor": "max", "table": COST}
    fit(tmp_path, tuning(**settings), BalancedSampling(), SaveAlways(tmp_path))
    for other, is_kept in (({}, True), (changed, False)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module = fit(
                tmp_path, tuning(**{**settings, **other}), BalancedSampling(), resume=tmp_path / "b-0-5.ckpt"
            )
        tuned = [bool(t.tolerance > 0) for t in module.targets]
        assert tuned == [is_kept] * 2 + [True] * 4


def test_warm_up_is_not_done_again_where_the_rest_of_an_epoch_is_replanned(tmp_path):
    fit(tmp_path, tuning(warmup_windows=2), BalancedSampling(), SaveAlways(tmp_path))
    module = fit(
        tmp_path, tuning(warmup_windows=2), BalancedSampling(on_resize="replan"),
        resume=tmp_path / "b-0-5.ckpt", accumulate_grad_batches=3,
    )  # fmt: skip
    assert all(target.tolerance > 0 for target in module.targets)


def test_validation_within_a_window_changes_nothing(tmp_path):
    def run(**settings):
        module = Module()
        trainer = make_trainer(tmp_path, tuning(), accumulate_grad_batches=4, **settings)
        loaders = DataLoader([packed([90])], batch_size=None) if settings else None
        trainer.fit(module, val_dataloaders=loaders)
        return [t.record for t in module.targets if t is not None and t.record.any()], weights(module)

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        (plain, want), (_, got) = run(), run(val_check_interval=3)
    finally:
        torch.set_num_threads(threads)
    assert len(plain) == len(LENGTHS)
    assert torch.equal(got, want)


class Batches(Training, LightningModule):
    """Trains on the batches that it is given, each one a window."""

    def __init__(self, batches, **options):
        super().__init__()
        self.make(**options)
        self.batches = batches

    def train_dataloader(self):
        return DataLoader(self.batches, batch_size=None)

    def training_step(self, batch, batch_idx):
        names = ("input_ids", "position_ids", "cu_seqlens", "max_seqlen")
        loss = self.model(**{n: batch[n] for n in names if n in batch}, use_cache=False).logits.sum() / 1e4
        self.note()
        return loss


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.parametrize("settings", [{}, {"granularity": "step"}, {"sync": "slot"}], ids=str)
def test_odd_shapes(tmp_path, settings):
    """Of one token, of none, of one block and a token more; every sequence by itself and beside others."""
    shapes = [[300, 1], [1], [1, 1], [BLOCK, BLOCK + 1], [200], [90, 90, 30]]
    batches = [packed(shape) for shape in shapes]
    bounds = torch.tensor([0, 0, 200, 200, 230, 230], dtype=torch.int32)
    batches.append({**packed([200, 30]), "cu_seqlens": bounds})
    # Their bounds are found from positions.
    batches.append({name: packed([150, 60])[name] for name in ("input_ids", "position_ids")})
    module = fit(tmp_path, tuning(table=COST, **settings), module=Batches(batches), accumulate_grad_batches=1)
    found = [record[..., 0] for record in records(module)]
    assert [len(budgets[0]) for budgets in found] == [2, 1, 2, 2, 1, 3, 5, 2]
    assert all((budgets >= 1).all() for budgets in found)
    for budgets, shape in zip(found, shapes, strict=False):
        for n, length in enumerate(shape):
            assert length > BLOCK * BUDGET or (budgets[:, n] == BUDGET).all()
    assert all(torch.tensor(list(window.values())).isfinite().all() for window in module.logged)


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.parametrize("sync", ["ema", "slot"])
def test_lengths_may_come_from_a_function(tmp_path, sync):
    """Batches that tell nothing themselves, except through it; then sequences are known by their number."""
    batches = [{**packed([200, 40]), "sequence_ids": torch.tensor([2 * i, 2 * i + 1])} for i in range(3)]
    asked = []

    def lengths(batch):
        asked.append(batch)
        return torch.tensor([200, 40])

    callback = tuning(table=COST, sync=sync, lengths=lengths)
    module = fit(tmp_path, callback, module=Batches(batches), accumulate_grad_batches=1)
    assert len(asked) >= 3
    assert module.windows[-1].ids == [4, 5]


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
def test_slots_need_lengths(tmp_path):
    class Positions(Batches):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch[0], batch_idx)

    batches = [[packed([200])]]
    with pytest.raises(ValueError, match="pass lengths="):
        fit(tmp_path, tuning(table=COST, sync="slot"), module=Positions(batches))
    fit(tmp_path, tuning(table=COST, sync="slot", lengths=lambda batch: [200]), module=Positions(batches))


def test_a_compiled_model_that_hands_nothing_on_is_refused(tmp_path):
    class Closed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = build(num_layers=1)

        def forward(self, input_ids, position_ids, cu_seqlens, max_seqlen, use_cache):
            raise NotImplementedError

    model = Closed()
    model.compile(backend="eager")
    with pytest.raises(MisconfigurationException, match=r"Closed is compiled.* \*\*kwargs"):
        fit(tmp_path, tuning(), module={"model": model})
    assert not hasattr(model.inner.model, "sb_tuner")


def table_warnings(folder, **options):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(folder, tuning(**options.pop("tuning", {})), module=options, limit_train_batches=2)
    return [str(w.message) for w in caught if "latency table differs" in str(w.message)]


def test_a_table_of_another_model_or_machine_is_named_once(tmp_path):
    assert table_warnings(tmp_path, tuning={"table": measured_table()}) == []
    other = measured_table(hidden_size=2048, processor="An abacus", threads=99)
    (message,) = table_warnings(tmp_path, tuning={"table": other})
    assert "hidden_size (2048 in the table, 64 here)" in message
    assert "An abacus" in message
    # That of the sampler is looked at too; not twice where both have it.
    (message,) = table_warnings(tmp_path, sampler={"latency": other})
    assert "hidden_size" in message
    assert len(table_warnings(tmp_path, tuning={"table": other}, sampler={"latency": other})) == 1


def test_a_table_from_the_sampler_s_own_file_is_one_with_its_table(tmp_path):
    """Else the factors that the sampler learns would hold for its plans, and not for the anchors."""
    measured_table().save(tmp_path / "table.json")
    path = str(tmp_path / "table.json")
    module = Module(sampler={"latency": path})
    seen = []

    class Looks(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            seen.append(callback._run._table is pl_module.sampler.costs.table)

    callback = tuning(table=path)
    fit(tmp_path, callback, Looks(), module=module, limit_train_batches=2)
    assert seen == [True, True]


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"tune_short": "no"}, "tune_short is 'no'"),
        ({"recalibrate": 1}, "recalibrate is 1"),
        ({"enabled": None}, "enabled is None"),
        ({"lengths": [5, 6]}, r"lengths is [5, 6]"),
        ({"table": 5}, "table is a int"),
        ({"recalibrate": True, "sync": "ema"}, "recalibrate is true and sync 'ema'"),
        ({"slack_speed": True, "anchor": "slack"}, "slack_speed is True"),
        ({"tolerance": float("inf")}, "tolerance is inf"),
        ({"max_budget": True}, "max_budget is True"),
        ({"base_budget": 2**31}, "base_budget is 2147483648"),
        ({"base_budget": 2**31, "min_budget": 2**31}, "base_budget is 2147483648"),
    ],
)
def test_settings_of_a_wrong_kind_are_refused_and_named(settings, named):
    with pytest.raises((ValueError, TypeError), match="To fix it") as error:
        SparseBalanceCallback(**settings)
    assert named in str(error.value)


def test_a_model_s_budget_that_no_kernel_can_count_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"^sparsify's budget is 2147483648.*To fix it"):
        fit(tmp_path, tuning(), module={"model": build(budget=2**31)})


@pytest.mark.parametrize(
    "state",
    [
        None,
        [],
        {"version": 1, "windows": 2, "ema_us": None},
        {"version": 1, "windows": None, "ema_us": None, "store": None},
        {"version": 1, "windows": 2, "ema_us": None, "store": 5},
        {"version": 1, "windows": 2, "ema_us": None, "store": {"version": 1, "ring": [{}]}},
    ],
    ids=["none", "list", "no store", "no windows", "other store", "damaged store"],
)
def test_a_damaged_state_is_refused(state):
    with pytest.raises(ValueError, match=r"state of a SparseBalanceCallback cannot be read.*To fix it"):
        tuning().load_state_dict(state)


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.parametrize("sync", ["ema", "slot"])
def test_lengths_of_another_total_are_refused(tmp_path, sync):
    callback, module = (
        tuning(table=COST, sync=sync, lengths=lambda batch: [200]),
        Batches([packed([200, 40])]),
    )
    with pytest.raises(ValueError, match="returns 200 tokens for a batch, and 240 have run"):
        fit(tmp_path, callback, module=module)
    assert not hasattr(module.model.model, "sb_tuner")


def test_a_table_that_is_no_file_is_refused_under_its_own_name(tmp_path):
    for path in (tmp_path / "none.json", tmp_path):
        with pytest.raises(ValueError, match=r"^table is '.*there is no such file"):
            fit(tmp_path, tuning(table=path))


def test_recalibration_needs_a_plan_and_a_monitor(tmp_path):
    with pytest.raises(MisconfigurationException, match="no ImbalanceMonitor"):
        fit(tmp_path, tuning(recalibrate=True))


class LooksTwice(Module):
    """Runs its model once more in evaluation mode, with gradients, as attribution methods do."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        forwards = self.model.model.sb_tuner.forwards
        before = len(forwards)
        self.model.eval()
        self.model(batch["input_ids"])
        self.model.train()
        self.extra = len(forwards) - before
        return loss


def test_a_forward_in_evaluation_mode_is_not_tuned_while_training(tmp_path):
    assert fit(tmp_path, tuning(), module=LooksTwice()).extra == 0


def test_a_loader_that_is_made_anew_is_taken_over(tmp_path):
    kept, anew = (
        fit(tmp_path, tuning(), BalancedSampling(), max_epochs=2, reload_dataloaders_every_n_epochs=n)
        for n in (0, 1)
    )
    assert anew.sampler.store.version == len(LENGTHS)
    assert anew.sampler.store.digest() == kept.sampler.store.digest()
    assert torch.equal(weights(anew), weights(kept))


def test_with_one_budget_for_all_layers_coverage_is_measured_now_and_then(tmp_path):
    module = fit(tmp_path, tuning(granularity="step"), max_epochs=2)
    windows = [target.measures for target in module.targets[::2]]
    assert windows == [True] + [False] * 7 + [True] + [False] * 3


class Dense(Module):
    def note(self):
        """No base model here has a tuner to look at."""


def test_a_callback_that_is_off_asks_for_nothing(tmp_path):
    dense = AutoModelForCausalLM.from_config(Qwen2Config(**SIZES))
    module = fit(tmp_path, tuning(enabled=False), module=Dense(model=dense))
    assert len(module.seen) == len(LENGTHS)
