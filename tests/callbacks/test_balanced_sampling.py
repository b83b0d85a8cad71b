"""BalancedSampling in a Lightning project of its own: agreement with the Trainer, and exact resume."""

from __future__ import annotations

import warnings

import pytest
import pytorch_lightning
import torch
from balanced_run import (
    LENGTHS,
    Documents,
    Project,
    Recording,
    collate,
    fit,
    make_loader,
    make_sampler,
    make_trainer,
    rest,
)
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch.utils.data import DataLoader

from sb_lightning.balance import WindowSync
from sb_lightning.callbacks import BalancedSampling, ImbalanceMonitor
from sb_lightning.latency import AnalyticCost, ModelShape

STEPS = {"max_epochs": -1, "max_steps": 8}
SETTINGS = {
    "plain": {},
    "estimate-limit": {"estimate": True, "limit_train_batches": 10},
    "steps-reload": {**STEPS, "reload_dataloaders_every_n_epochs": 1},
    "steps-estimate": {**STEPS, "estimate": True},
    "workers-estimate": {"estimate": True, "data": {"workers": 2}},
}


def sequences(records, epoch):
    return [i for record in records if record[0] == epoch for i in record[2]]


@pytest.mark.parametrize("name", SETTINGS)
def test_resumes_exactly(name, tmp_path):
    """Sequences, batches, steps and losses of the unbroken run: PL 19764, 18780, 11029, 20550."""
    settings = SETTINGS[name]
    records = fit(tmp_path, BalancedSampling(), save=True, **settings).records
    last = "b-0-9" if "limit" in name else "b-0-17"
    checkpoints = ["b-0-4", last, "e-0", "b-1-1"]
    if not name.startswith("workers"):
        checkpoints += ["b-0-0", "b-0-8", "s-1", "b-1-4"]
    for checkpoint in checkpoints:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*not resumable.*")
            got = fit(tmp_path, BalancedSampling(), resume=checkpoint, **settings).records
        assert got == rest(records, checkpoint), checkpoint


@pytest.mark.parametrize("settings", [{}, STEPS], ids=["epochs", "steps"])
def test_resumes_again_and_again(settings, tmp_path):
    """A second resume in one epoch lost the alignment: KempnerForge 57. Saved at batches 3, 7 and 7."""
    records = fit(tmp_path, BalancedSampling(), save=True, **settings).records
    for checkpoint in ("b-0-3", "b-0-7", "b-0-7", "b-0-17", "b-1-4"):
        got = fit(tmp_path, BalancedSampling(), save=True, resume=checkpoint, **settings).records
        assert got == rest(records, checkpoint), checkpoint


@pytest.mark.parametrize("fail_at", [(0, 1), (0, 17), (1, 5)], ids=str)
def test_resumes_after_an_exception(fail_at, tmp_path):
    records = fit(tmp_path, BalancedSampling()).records
    fit(tmp_path, BalancedSampling(), save=True, fail_at=fail_at)
    epoch, batch = fail_at
    want = [record for record in records if record[:2] >= (epoch, batch - batch % 3)]
    assert fit(tmp_path, BalancedSampling(), resume="x").records == want


def test_more_steps_after_a_stop_in_mid_epoch(tmp_path):
    records = fit(tmp_path, BalancedSampling(), **STEPS).records
    fit(tmp_path, BalancedSampling(), save=True, max_epochs=-1, max_steps=4)
    for checkpoint in ("e-0", "end"):
        got = fit(tmp_path, BalancedSampling(), resume=checkpoint, **STEPS).records
        assert got == [record for record in records if record[:2] >= (0, 12)], checkpoint


def test_saved_after_the_end(tmp_path):
    """`trainer.save_checkpoint` after `fit`, then more epochs, or the rest of one that max_steps has cut."""
    records = fit(tmp_path, BalancedSampling(), max_epochs=3).records
    for settings, start in (({"max_epochs": 1}, (1, 0)), ({"max_epochs": -1, "max_steps": 4}, (0, 12))):
        module = fit(tmp_path, BalancedSampling(), **settings)
        module.trainer.save_checkpoint(tmp_path / "after.ckpt")
        got = fit(tmp_path, BalancedSampling(), resume="after", max_epochs=3).records
        assert got == [record for record in records if record[:2] >= start], settings


def test_under_manual_optimization(tmp_path):
    """Who steps by hand, every two micro-batches here, tells the sampler."""

    class Manual(Project):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            loss.backward()
            if batch_idx % 2 == 1:
                self.optimizers().step()
                self.optimizers().zero_grad()

    def run(**options):
        module = Manual(lambda: make_loader(accumulate=2))
        save = not options
        trainer = make_trainer(tmp_path, BalancedSampling(), save=save, accumulate_grad_batches=1)
        trainer.fit(module, **options)
        return module.records

    records = run()
    for checkpoint in ("b-0-6", "b-0-7", "b-1-5"):
        got = run(ckpt_path=tmp_path / f"{checkpoint}.ckpt")
        assert got == rest(records, checkpoint, accumulate=2), checkpoint


class Learn(Callback):
    """After each window, tells the store budgets that depend on the sequence and on the step."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if (batch_idx + 1) % 3 == 0:
            sampler = trainer.train_dataloader.batch_sampler
            window = batch_idx // 3
            members = sampler.members(sampler.epoch, window)
            sampler.store.update(
                sampler.window_number(sampler.epoch, window) + 1,
                ids=members,
                lengths=sampler.lengths[members],
                budgets=[1 + (7 * int(i) + trainer.global_step) % 23 for i in members],
            )


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("reload", [0, 1])
def test_what_plans_have_learnt_goes_on(workers, reload, tmp_path):
    """Plans that depend on the windows before are the same after a resume, and with a loader made anew."""
    shape = {"layers": 2, "query_heads": 4, "kv_heads": 2, "head_dim": 32, "hidden_size": 128}
    shape |= {"intermediate_size": 384, "vocab_size": 2048, "block_size": 64}
    data = {
        "workers": workers,
        "lengths": [900 + (i * 3701) % 6007 for i in range(18)],
        "policy": "latency",
        "latency": AnalyticCost(ModelShape(**shape)),
        "budget": 8,
    }
    settings = {"data": data, "max_epochs": 3, "reload_dataloaders_every_n_epochs": reload}
    records = fit(tmp_path, BalancedSampling(), Learn(), save=True, **settings).records
    without = fit(tmp_path, BalancedSampling(), **settings).records
    assert [record[:3] for record in records] != [record[:3] for record in without]
    for checkpoint in ("b-1-4", "b-1-17", "b-2-8"):
        got = fit(tmp_path, BalancedSampling(), Learn(), resume=checkpoint, **settings).records
        assert got == rest(records, checkpoint), checkpoint


def test_epochs_after_a_resumed_one_are_whole(tmp_path):
    """Later epochs ran only the tail: litgpt issue 1712."""
    fit(tmp_path, BalancedSampling(), save=True, max_epochs=1)
    records = fit(tmp_path, BalancedSampling(), resume="b-0-14", max_epochs=3).records
    assert [len(sequences(records, epoch)) for epoch in range(3)] == [3, 18, 18]


@pytest.mark.parametrize("tail", ["drop", "pad", "partial"])
def test_number_of_steps_is_known_exactly(tail, tmp_path):
    """Packed length differed from max_steps: axolotl issues 461, 2203, 1966."""
    data = {"accumulate": 4, "tail": tail}
    module = fit(tmp_path, BalancedSampling(), estimate=True, accumulate_grad_batches=4, data=data)
    assert module.estimated == module.trainer.global_step == {"drop": 8, "pad": 10, "partial": 10}[tail]


def test_state_is_plain_and_loads_with_weights_only(tmp_path):
    """A state that needs unpickling saves and then fails on resume: PL 21757, pytorch_tabular 621."""
    fit(tmp_path, BalancedSampling(), save=True, max_epochs=1)
    checkpoint = torch.load(tmp_path / "b-0-7.ckpt", weights_only=True)
    state = checkpoint["callbacks"]["BalancedSampling"]
    assert {"version": 1, "epoch": 0, "micro_batch": 8, "accumulate": 3, "ranks": 1}.items() <= state.items()
    # The loader leaves the position to the callback, and says so.
    loaders = checkpoint["loops"]["fit_loop"]["state_dict"]["combined_loader"]
    assert loaders == [{"version": 1, "kept_elsewhere": True}]


def test_a_checkpoint_needs_the_callback_again(tmp_path):
    fit(tmp_path, BalancedSampling(), save=True, max_epochs=1)
    with pytest.raises(RuntimeError, match=r"add sb_lightning\.callbacks\.BalancedSampling"):
        fit(tmp_path, resume="b-0-7", max_epochs=1)


def test_a_checkpoint_from_before_the_callback(tmp_path):
    """The loader's own position is taken over where Lightning hands it over and it is at a window's start."""
    records = fit(tmp_path, save=True).records
    for checkpoint in ("b-0-8", "b-1-5"):
        got = fit(tmp_path, BalancedSampling(), resume=checkpoint).records
        assert got == rest(records, checkpoint)
    with pytest.raises(
        RuntimeError, match="data stand at micro-batch 6 of epoch 0 and the Trainer at 8 of 0"
    ):
        fit(tmp_path, BalancedSampling(), resume="b-0-7")
    with pytest.raises(
        RuntimeError, match="data stand at micro-batch 0 of epoch 0 and the Trainer at 9 of 0"
    ):
        fit(tmp_path, BalancedSampling(), resume="b-0-8", estimate=True)


# Another number of ranks or micro-batches per step.


def test_another_shape_is_refused_with_both_values(tmp_path):
    fit(tmp_path, BalancedSampling(), save=True, max_epochs=1)
    with pytest.raises(MisconfigurationException, match=r"accumulate 3 -> 2.*on_resize to 'replan'"):
        fit(tmp_path, BalancedSampling(), resume="b-0-7", accumulate_grad_batches=2, data={"accumulate": 2})
    with pytest.raises(ValueError, match=r"on_resize is 'shrink'.*'raise', 'replan'"):
        BalancedSampling(on_resize="shrink")


@pytest.mark.parametrize("accumulate", [2, 5])
@pytest.mark.parametrize("checkpoint", ["b-0-1", "b-0-7", "b-0-17", "s-1", "b-1-4"])
def test_the_rest_of_the_epoch_is_planned_anew(checkpoint, accumulate, tmp_path):
    """None twice, none lost, and the epoch after has its full length; Lightning's counters go on."""
    records = fit(tmp_path, BalancedSampling(), save=True).records
    settings = {"accumulate_grad_batches": accumulate, "data": {"accumulate": accumulate}, "max_epochs": 3}
    resumed = fit(
        tmp_path,
        BalancedSampling(on_resize="replan"),
        save=True,
        resume=checkpoint,
        estimate=True,
        **settings,
    )
    got = resumed.records
    left = rest(records, checkpoint)
    epoch = left[0][0]
    assert sorted(sequences(got, epoch)) == sorted(sequences(left, epoch))
    assert all(sorted(sequences(got, later)) == list(range(18)) for later in range(epoch + 1, 3))
    # Steps go on from those that were taken, one per window of the new size.
    assert got[0][3:5] == left[0][3:5]
    in_epoch = [record for record in got if record[0] == epoch]
    steps = [record[3] - got[0][3] for record in in_epoch]
    assert steps == [n // accumulate for n in range(len(in_epoch))]
    assert [record[:2] for record in in_epoch] == [(epoch, n) for n in range(len(in_epoch))]
    full = -(-18 // accumulate)
    assert resumed.trainer.global_step == got[0][3] + -(-len(in_epoch) // accumulate) + full * (2 - epoch)
    # The estimate is that of a run that has this size from its start.
    assert resumed.estimated == 3 * full
    # And what is saved from now on resumes exactly.
    count = len(in_epoch)
    for again in (f"b-{epoch}-{count - 2}", f"b-{epoch}-{count - 1}", f"e-{epoch}", f"b-{epoch + 1}-2"):
        repeated = fit(tmp_path, BalancedSampling(), resume=again, **settings).records
        assert repeated == rest(got, again, accumulate), again


def test_planned_anew_twice(tmp_path):
    fit(tmp_path, BalancedSampling(), save=True)
    seen = fit(tmp_path, BalancedSampling()).records[:6]
    for accumulate, stop in ((2, 4), (4, None)):
        records = fit(
            tmp_path,
            BalancedSampling(on_resize="replan"),
            save=True,
            resume="b-0-7" if stop else "b-0-4",
            accumulate_grad_batches=accumulate,
            data={"accumulate": accumulate},
            max_epochs=2,
        ).records
        seen += records[:stop]
    assert sorted(sequences(seen, 0)) == sorted(sequences(seen, 1)) == list(range(18))


def test_too_little_left_for_a_window_is_left_out(tmp_path):
    """With tail='drop', a rest of 3 sequences is no window of 4: the next epoch starts."""
    data = {"tail": "drop"}
    fit(tmp_path, BalancedSampling(), save=True, data=data)
    data = {"tail": "drop", "accumulate": 4}
    got = fit(
        tmp_path,
        BalancedSampling(on_resize="replan"),
        resume="b-0-14",
        data=data,
        accumulate_grad_batches=4,
    ).records
    assert {record[0] for record in got} == {1}
    assert len(got) == 16


def test_a_share_of_an_epoch_is_not_planned_anew(tmp_path):
    fit(tmp_path, BalancedSampling(), save=True, limit_train_batches=9)
    with pytest.raises(MisconfigurationException, match=r"on_resize is 'replan', and an epoch has 9 of 18"):
        fit(
            tmp_path,
            BalancedSampling(on_resize="replan"),
            resume="b-0-7",
            accumulate_grad_batches=2,
            data={"accumulate": 2},
        )


# The Trainer's settings.


def test_limit_train_batches_is_told_to_the_sampler(tmp_path):
    """A window that is cut counts only what runs: pytorch-lightning issues 19987, 21808."""
    seen = []

    class Look(Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            seen.append(trainer.train_dataloader.batch_sampler.max_batches)

    fit(tmp_path, BalancedSampling(), Look(), limit_train_batches=0.25, max_epochs=1)
    assert seen == [4] * 4
    seen.clear()
    fit(tmp_path, BalancedSampling(), Look(), fast_dev_run=True)
    assert seen == [1]
    # One loader in several trainings.
    loader, callback = make_loader(), BalancedSampling()
    for limit in (5, 1.0, 2):
        module = fit(tmp_path, callback, limit_train_batches=limit, data=lambda: loader, max_epochs=1)
        assert len(module.records) == (limit if limit != 1.0 else 18)
        assert loader.batch_sampler.max_batches == (limit if limit != 1.0 else None)


def test_a_sampler_that_is_not_shown_is_told_too(tmp_path):
    sampler = make_sampler()
    loader = make_loader(sampler)

    class Wrapped:
        def __iter__(self):
            return iter(loader)

        def __len__(self):
            return len(loader)

    fit(tmp_path, BalancedSampling(sampler), data=Wrapped, limit_train_batches=4, max_epochs=1)
    assert sampler.max_batches == 4


def plain_loader(**options):
    return DataLoader(Documents(), batch_sampler=make_sampler(**options), collate_fn=collate)


CONFLICTS = {
    "accumulate": (
        {"data": {"accumulate": 2}},
        r"SparsityAwareBatchSampler\(accumulate=2\) and Trainer\(accumulate_grad_batches=3\)",
    ),
    "ranks": (
        {"data": {"ranks": 2, "rank": 0}},
        r"made for rank 0 of 2, and this is data-parallel rank 0 of 1",
    ),
    "max_batches": ({"data": {"max_batches": 7}}, r"max_batches=7\) and Trainer\(limit_train_batches=1\.0\)"),
    "scheduler": ({}, "GradientAccumulationScheduler.*trainer.accumulate_grad_batches"),
    "no sampler": (
        {"data": lambda: DataLoader(Documents(), collate_fn=collate)},
        r"a DataLoader without a SparsityAwareBatchSampler.*BalancedDataLoader",
    ),
    "two loaders": ({"data": lambda: [make_loader(), make_loader()]}, "draws from 2 training loaders"),
    "plain loader, limit": (
        {"data": plain_loader, "limit_train_batches": 4},
        r"no BalancedDataLoader.*pass max_batches=4",
    ),
}


@pytest.mark.parametrize("name", CONFLICTS)
def test_what_disagrees_is_named(name, tmp_path):
    settings, says = CONFLICTS[name]
    callbacks = [GradientAccumulationScheduler({0: 3})] if name == "scheduler" else []
    with pytest.raises(MisconfigurationException, match=says):
        fit(tmp_path, BalancedSampling(), *callbacks, **settings)


@pytest.mark.parametrize("sampler", [5, make_loader()], ids=["number", "loader"])
def test_what_is_no_sampler_is_refused(sampler):
    with pytest.raises(TypeError, match=r"^sampler is a .*To fix it"):
        BalancedSampling(sampler=sampler)


def test_a_plain_loader_trains_but_does_not_resume(tmp_path):
    records = fit(tmp_path, BalancedSampling(), data=plain_loader, save=True).records
    assert records == fit(tmp_path).records
    with pytest.raises(MisconfigurationException, match=r"resumed with a DataLoader.*BalancedDataLoader"):
        fit(tmp_path, BalancedSampling(), data=plain_loader, resume="b-0-8")


def test_with_pytorch_lightning(tmp_path):
    class OtherProject(Recording, pytorch_lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.make(make_loader)

    class Save(pytorch_lightning.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            trainer.save_checkpoint(tmp_path / f"b-{trainer.current_epoch}-{batch_idx}.ckpt")

    def run(**options):
        module = OtherProject()
        trainer = make_trainer(tmp_path, BalancedSampling(), Save(), trainer=pytorch_lightning.Trainer)
        trainer.fit(module, **options)
        return module.records

    records = run()
    assert records == fit(tmp_path).records
    assert run(ckpt_path=tmp_path / "b-0-7.ckpt") == rest(records, "b-0-7")
    assert issubclass(Project, LightningModule)


def test_leaves_loader_and_ranks_as_they_were(tmp_path):
    loader = make_loader()
    module = fit(tmp_path, BalancedSampling(), data=lambda: loader)
    assert not loader.is_position_kept_elsewhere
    sync = WindowSync.of(module.trainer)
    assert not sync._parts
    assert not sync._watched
    assert len(list(loader)) == 18
    fit(tmp_path, BalancedSampling(), data=lambda: loader, fail_at=(0, 4))
    assert not WindowSync.of(module.trainer)._parts


def test_beside_the_monitor(tmp_path):
    """Either may ask for the gather that they share."""
    monitor = ImbalanceMonitor(spans=False)
    records = fit(tmp_path, monitor, BalancedSampling()).records
    assert monitor.window.index == 11
    assert records == fit(tmp_path, BalancedSampling(), monitor).records
    assert monitor.window.index == 11


# Two ranks.


def two_ranks(folder, plant, settings):
    """Train on two ranks; on rank 1 something is planted. Records, or what was raised."""
    import torch.distributed as dist

    rank = dist.get_rank()
    planted = rank == 1
    data, trained = {}, []
    if plant == "lengths" and planted:
        data = {"lengths": [*LENGTHS[:-1], LENGTHS[-1] + 1]}
    if plant == "sequences" and planted:
        data = {"lengths": LENGTHS[:-3]}
    if plant == "policy" and planted:
        data = {"policy": "random"}
    if plant == "limit" and planted:
        data = {"max_batches": 5}

    def hook(module, batch_idx):
        trained.append(batch_idx)
        if planted:
            sampler = module.trainer.train_dataloader.batch_sampler
            if module.trainer.global_step == 1 and plant == "seed":
                sampler._membership.seed, sampler._membership._order = 6, None
            if module.trainer.global_step == 1 and plant == "plan":
                # As if another machine had rounded a time otherwise.
                sampler._plan_digests = dict.fromkeys(sampler._plan_digests, "other")

    try:
        module = fit(folder, BalancedSampling(), data=data, hook=hook, devices=2, strategy="ddp", **settings)
    except (RuntimeError, MisconfigurationException) as error:
        return str(error), len(trained)
    sync = WindowSync.of(module.trainer)
    return module.records, sync.num_gathers


PLANTS = {
    "lengths": "plan.lengths is '",
    "sequences": "plan.sequences is 18 on rank 0 and 15 on rank 1",
    "policy": "plan.policy is 'tokens' on rank 0 and 'random' on rank 1",
    "seed": "plan.seed is 5 on rank 0 and 6 on rank 1",
    "plan": "plan.cells is '",
}


@pytest.mark.parametrize("plant", PLANTS)
def test_ranks_that_plan_differently_all_raise(plant, tmp_path, gloo_pool):
    """The first input that differs is named, at the start or after the window in which it changed."""
    for text, num_trained in gloo_pool.run(two_ranks, tmp_path, plant, {}):
        assert text.startswith(PLANTS[plant])
        assert num_trained == (6 if plant in ("seed", "plan") else 0)


def test_what_one_rank_refuses_stops_all(tmp_path, gloo_pool):
    (first, _), (second, _) = gloo_pool.run(two_ranks, tmp_path, "limit", {})
    assert second.startswith("SparsityAwareBatchSampler(max_batches=5)")
    assert first == f"The ranks go on together or not at all, and rank 1 refuses: {second}"


def test_two_ranks_resume_exactly(tmp_path, gloo_pool):
    """And meet once per window."""
    settings = {"save": True, "estimate": True}
    unbroken = gloo_pool.run(two_ranks, tmp_path, None, settings)
    assert [gathers for _, gathers in unbroken] == [6, 6]
    for checkpoint in ("b-0-4", "b-0-8", "b-1-2"):
        settings = {"resume": checkpoint, "estimate": True}
        for (records, _), (got, _) in zip(
            unbroken, gloo_pool.run(two_ranks, tmp_path, None, settings), strict=True
        ):
            assert [r[:3] for r in got] == [r[:3] for r in rest(records, checkpoint)], checkpoint
            assert [r[-1] for r in got] == [r[-1] for r in rest(records, checkpoint)], checkpoint


def resize(folder, options):
    try:
        return fit(folder, BalancedSampling(**options), resume="b-0-7", devices=2, strategy="ddp").records
    except MisconfigurationException as error:
        return str(error)


def test_from_one_rank_to_two_and_back(tmp_path, gloo_pool):
    """Changed world size: an error that names both, or the rest of the epoch in windows of the new size."""
    one = fit(tmp_path, BalancedSampling(), save=True).records
    for said in gloo_pool.run(resize, tmp_path, {}):
        assert "ranks 1 -> 2" in said
    two = gloo_pool.run(resize, tmp_path, {"on_resize": "replan"})
    for epoch in range(2):
        seen = [sequences(records, epoch) for records in two]
        before = sequences(one[:6], epoch)
        assert sorted(before + seen[0] + seen[1]) == list(range(18))
    assert [records[0][:2] for records in two] == [(0, 0), (0, 0)]
    assert [records[0][3] for records in two] == [2, 2]
    gloo_pool.run(two_ranks, tmp_path, None, {"save": True})
    back = fit(tmp_path, BalancedSampling(on_resize="replan"), resume="b-0-4").records
    whole = gloo_pool.run(two_ranks, tmp_path, None, {})
    before = [i for records, _ in whole for i in sequences(records[:3], 0)]
    assert sorted(before + sequences(back, 0)) == sorted(sequences(back, 1)) == list(range(18))
