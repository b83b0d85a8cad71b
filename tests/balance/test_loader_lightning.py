"""The loader under Lightning's Trainers and Fabric, with no flag set and no callback of ours."""

from __future__ import annotations

import warnings

import pytest
import pytorch_lightning
from balanced_run import (
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
from lightning.fabric import Fabric
from torch.utils.data import DataLoader


class OtherProject(Recording, pytorch_lightning.LightningModule):
    """The model for `pytorch_lightning`."""

    def __init__(self, *args, **options):
        super().__init__()
        self.make(*args, **options)


PACKAGES = {
    "lightning.pytorch": (Project, None),
    "pytorch_lightning": (OtherProject, pytorch_lightning.Trainer),
}


def train(package, folder, loader, **settings):
    cls, trainer = PACKAGES[package]
    module = cls(loader)
    made = make_trainer(folder, **({"trainer": trainer} if trainer else {}), **settings)
    made.fit(module)
    return module, made


def planned(epochs, sampler=None, **options):
    """The sequences of each epoch's micro-batches, as the sampler plans them."""
    sampler = make_sampler(**options) if sampler is None else sampler
    found = []
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        found += [(epoch, number, tuple(cell)) for number, cell in enumerate(sampler)]
    return found


def trained(module):
    return [record[:3] for record in module.records if record[0] != "val"]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("package", PACKAGES)
def test_every_epoch_is_trained_as_planned(package, workers, tmp_path):
    module, _ = train(package, tmp_path, lambda: make_loader(workers=workers))
    assert trained(module) == planned(2)


@pytest.mark.parametrize("package", PACKAGES)
def test_reloaded_every_epoch(package, tmp_path):
    made = []

    def make():
        made.append(make_loader())
        return made[-1]

    module, _ = train(package, tmp_path, make, reload_dataloaders_every_n_epochs=1)
    assert len(made) == 2
    assert trained(module) == planned(2)


@pytest.mark.parametrize(
    ("settings", "batches"),
    [
        ({"limit_train_batches": 5}, 5),
        ({"limit_train_batches": 0.5}, 9),
        ({"limit_train_batches": 99}, 18),
        ({"fast_dev_run": True}, 1),
        ({"fast_dev_run": 4}, 4),
    ],
    ids=str,
)
def test_limits(settings, batches, tmp_path):
    module = fit(tmp_path, max_epochs=1, **settings)
    assert trained(module) == planned(1)[:batches]


def test_overfit_batches_is_refused_with_the_setting_to_use(tmp_path):
    with pytest.raises(
        TypeError, match=r"in place of Trainer\(overfit_batches=\.\.\.\) set limit_train_batches"
    ):
        fit(tmp_path, overfit_batches=4)


def test_validation_runs_what_is_planned_once(tmp_path):
    module = Project()
    make_trainer(tmp_path).validate(module, make_loader(), verbose=False)
    assert [ids for _, ids in module.records] == [ids for _, _, ids in planned(1)]


def test_prediction_is_refused_with_what_to_use(tmp_path):
    """Batches in the order of the windows, some repeated, are no predictions: PL 20253."""
    with pytest.raises(TypeError, match=r"for Trainer\.predict give a plain DataLoader without this sampler"):
        make_trainer(tmp_path).predict(Project(), make_loader())


@pytest.mark.parametrize("workers", [0, 2])
def test_fabric(workers):
    fabric = Fabric(accelerator="cpu", devices=1)
    loader = fabric.setup_dataloaders(make_loader(workers=workers))
    # Fabric sets the epoch itself, by its count of iterations.
    found = [(epoch, n, tuple(b[0].tolist())) for epoch in range(2) for n, b in enumerate(loader)]
    assert found == planned(2)


def test_accelerate_in_one_process():
    """A check of len(batch) against the batch size: accelerate issues 207, 3969, 679."""
    pytest.importorskip("accelerate")
    from accelerate.data_loader import prepare_data_loader

    lengths = [90 if i % 5 == 0 else 4 for i in range(20)]
    options = {"lengths": lengths, "sequences_per_micro_batch": 2}
    prepared = prepare_data_loader(make_loader(**options), num_processes=1, process_index=0)
    assert [tuple(batch[0].tolist()) for batch in prepared] == [ids for _, _, ids in planned(1, **options)]
    assert len({len(ids) for _, _, ids in planned(1, **options)}) > 1


# Resume with the loader's own state, as far as Lightning hands it over.


@pytest.mark.parametrize("workers", [0, 2])
def test_own_state_resumes_exactly_after_a_window(workers, tmp_path):
    data = {"workers": workers}
    records = fit(tmp_path, save=True, data=data).records
    for checkpoint in ("b-0-2", "b-0-8", "b-0-17", "b-1-5"):
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*not resumable.*")
            got = fit(tmp_path, resume=checkpoint, data=data).records
        assert got == rest(records, checkpoint), checkpoint


def test_own_state_is_lost_with_estimated_stepping_batches(tmp_path):
    """Lightning drops it (pytorch-lightning issues 20550, 21765): BalancedSampling is for that."""
    records = fit(tmp_path, save=True).records
    got = fit(tmp_path, resume="b-0-8", estimate=True).records
    assert len(got) == len(rest(records, "b-0-8"))
    assert got[0][:2] == (0, 9)
    assert got[0][2] == records[0][2]


def test_own_state_in_mid_window_continues_without_the_gradients(tmp_path):
    """The sequences go on where they stood, but the step lacks what had been accumulated."""
    records = fit(tmp_path, save=True).records
    got = fit(tmp_path, resume="b-0-7").records
    assert [record[:3] for record in got] == [record[:3] for record in records[8:]]
    assert [record[-1] for record in got] != [record[-1] for record in records[8:]]


def test_own_state_after_a_stop_in_mid_epoch_is_refused(tmp_path):
    """Lightning counts that epoch as done; the rest of it would be lost."""
    fit(tmp_path, save=True, max_epochs=-1, max_steps=2)
    with pytest.raises(
        RuntimeError, match=r"micro-batch 6 of epoch 0, and epoch 1 is to be run.*BalancedSampling"
    ):
        fit(tmp_path, resume="e-0", max_epochs=-1, max_steps=4)


# Two ranks.


def two_ranks(folder, package, workers, settings):
    module, trainer = train(
        package, folder, lambda: make_loader(workers=workers), devices=2, strategy="ddp", **settings
    )
    loader = trainer.fit_loop._combined_loader
    return trained(module), trainer.global_step, loader is None or type(loader.flattened[0]).__name__


@pytest.mark.parametrize(
    ("package", "workers", "settings"),
    [
        ("lightning.pytorch", 0, {}),
        ("lightning.pytorch", 2, {"reload_dataloaders_every_n_epochs": 1}),
        ("pytorch_lightning", 0, {"limit_train_batches": 5}),
        ("lightning.pytorch", 0, {"use_distributed_sampler": False, "fast_dev_run": 2}),
    ],
    ids=["plain", "workers-reload", "pytorch_lightning-limit", "flag-off"],
)
def test_two_ranks_train_as_planned_with_no_flag(package, workers, settings, tmp_path, gloo_pool):
    """A custom batch sampler was rebuilt or refused: PL 1661, 3455, 5145, 19183, 19371, 19964, 20272."""
    ranks = gloo_pool.run(two_ranks, tmp_path, package, workers, settings)
    epochs = 1 if "fast_dev_run" in settings else 2
    limit = settings.get("limit_train_batches") or settings.get("fast_dev_run") or 99
    for rank, (found, steps, _) in enumerate(ranks):
        want = planned(epochs, ranks=2, rank=rank)
        want = [cell for cell in want if cell[1] < limit]
        assert found == want
        assert steps == sum(n % 3 == 2 or n == min(limit, 9) - 1 for _, n, _ in want)


def other_loaders(folder):
    """What happens to a plain DataLoader, to overfit_batches, and to Fabric, on two ranks."""

    def plain():
        return DataLoader(Documents(), batch_sampler=make_sampler(), collate_fn=collate)

    settings = {"devices": 2, "strategy": "ddp", "max_epochs": 2}
    said = {}
    for name, loader, more in (
        ("plain", plain, {}),
        ("overfit", make_loader, {"overfit_batches": 2}),
    ):
        with pytest.raises(TypeError) as caught:
            make_trainer(folder, **settings, **more).fit(Project(loader))
        said[name] = str(caught.value)
    module = Project(plain)
    make_trainer(folder, **settings, use_distributed_sampler=False).fit(module)
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    loader = fabric.setup_dataloaders(make_loader())
    fabric_found = [(e, n, tuple(b[0].tolist())) for e in range(2) for n, b in enumerate(loader)]
    return said, trained(module), fabric_found


def test_other_loaders_on_two_ranks(tmp_path, gloo_pool):
    """A plain DataLoader needs the flag, which the error names; Fabric needs none."""
    for rank, (said, with_flag, with_fabric) in enumerate(gloo_pool.run(other_loaders, tmp_path)):
        assert "Trainer(use_distributed_sampler=False)" in said["plain"]
        assert "BalancedDataLoader" in said["plain"]
        assert "limit_train_batches" in said["overfit"]
        assert with_flag == planned(2, ranks=2, rank=rank)
        assert with_fabric == planned(2, ranks=2, rank=rank)
