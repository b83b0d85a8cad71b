"""A resumed run goes on exactly as the unbroken one: sequences, batch numbers, steps and losses."""

import copy

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from tiny_run import TinyModule, data_module, fit, make_trainer, write_documents

from sb_lightning.callbacks import BalancedSampling
from sb_lightning.data.position import rewind_loops, window_start

# 18 documents to train on: 6 windows of 3 micro-batches an epoch; with limit 10, 4 windows, the last of 1.
EPOCHS = {"max_epochs": 2}
STEPS = {"max_epochs": -1, "max_steps": 8}
SETTINGS = {
    "epochs": EPOCHS,
    "epochs-estimate-limit": {**EPOCHS, "estimate": True, "limit_train_batches": 10},
    "steps-no-val-reload": {**STEPS, "limit_val_batches": 0, "reload_dataloaders_every_n_epochs": 1},
    "steps-estimate-check": {**STEPS, "estimate": True, "val_check_interval": 3},
}


@pytest.fixture
def folder(tmp_path):
    write_documents(tmp_path / "docs")
    return tmp_path


def rest(records, checkpoint):
    """What the unbroken run did from the window on that a checkpoint leaves unfinished."""
    kind, epoch, *batch = checkpoint.split("-")
    epoch = int(epoch)
    in_epoch = sum(record[0] == epoch for record in records)
    done = {"b": int(batch[0]) + 1 if batch else 0, "e": in_epoch, "v": in_epoch, "s": 0}[kind]
    start = done if done == in_epoch else done - done % 3
    return [record for record in records if record[:2] >= (epoch, start)]


@pytest.mark.parametrize("name", SETTINGS)
def test_one_process(name, folder):
    settings = SETTINGS[name]
    records = fit(folder, save=True, **settings).log_of_batches
    checkpoints = ["b-0-1", "b-0-5", "b-0-9" if "limit" in name else "b-0-17", "e-0", "s-1", "b-1-1", "b-1-4"]
    checkpoints += ["v-0"] if name == "epochs" else []
    for checkpoint in checkpoints:
        assert fit(folder, resume=checkpoint, **settings).log_of_batches == rest(records, checkpoint), (
            checkpoint
        )


@pytest.mark.parametrize("estimate", [False, True], ids=["plain", "estimate"])
def test_workers_read_ahead(estimate, folder):
    """Worker processes draw cells long before they are trained on; only what was trained on counts."""
    settings = {**STEPS, "estimate": estimate, "data": {"num_workers": 2}, "limit_val_batches": 0}
    records = fit(folder, save=True, **settings).log_of_batches
    for checkpoint in ("b-0-7", "b-1-0", "e-0"):
        assert fit(folder, resume=checkpoint, **settings).log_of_batches == rest(records, checkpoint), (
            checkpoint
        )


@pytest.mark.parametrize("settings", [EPOCHS, STEPS], ids=["epochs", "steps"])
@pytest.mark.parametrize("fail_at", [(0, 1), (0, 3), (0, 17), (1, 0), (1, 5)], ids=str)
def test_exception(fail_at, settings, folder):
    """The micro-batch under way counts as not done, and its window starts again."""
    records = fit(folder, **settings).log_of_batches
    fit(folder, save=True, fail_at=fail_at, **settings)
    epoch, batch = fail_at
    want = [record for record in records if record[:2] >= (epoch, batch - batch % 3)]
    assert fit(folder, resume="x", **settings).log_of_batches == want


@pytest.mark.parametrize("settings", [EPOCHS, STEPS], ids=["epochs", "steps"])
def test_again_and_again(settings, folder):
    """Resumed runs save checkpoints that resume as exactly, in the same epoch and in the next."""
    records = fit(folder, save=True, **settings).log_of_batches
    for checkpoint in ("b-0-7", "b-0-7", "b-0-17", "b-1-4"):
        got = fit(folder, save=True, resume=checkpoint, **settings).log_of_batches
        assert got == rest(records, checkpoint), checkpoint


def test_more_steps_after_the_last(folder):
    """A run that max_steps ended in mid-epoch goes on in that epoch, not in the next one's order."""
    records = fit(folder, **STEPS).log_of_batches
    fit(folder, save=True, max_epochs=-1, max_steps=4)
    for checkpoint in ("e-0", "end"):
        got = fit(folder, resume=checkpoint, **STEPS).log_of_batches
        assert got == [record for record in records if record[:2] >= (0, 12)], checkpoint


def test_more_epochs_after_the_last(folder):
    records = fit(folder, **EPOCHS).log_of_batches
    fit(folder, save=True, max_epochs=1)
    assert fit(folder, resume="end", **EPOCHS).log_of_batches == rest(records, "s-1")


def test_nothing_left_to_do(folder):
    fit(folder, save=True, max_epochs=1)
    assert fit(folder, resume="end", max_epochs=1).log_of_batches == []


def test_state_is_plain_and_loads_with_weights_only(folder):
    fit(folder, save=True, max_epochs=1)
    state = torch.load(folder / "b-0-7.ckpt", weights_only=True)["TextDataModule"]
    assert {"version": 1, "epoch": 0, "micro_batch": 8, "accumulate": 3, "ranks": 1}.items() <= state.items()
    # What the sampler has learnt.
    assert state.pop("sampler")["version"] == 1
    settings = state.pop("settings")
    assert all(isinstance(value, (int, str)) for value in state.values())
    assert all(isinstance(value, (int, float, str)) for value in settings.values())


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"accumulate_grad_batches": 2}, "accumulate 3 -> 2"),
        ({"data": {"seed": 6}}, "seed 5 -> 6"),
        ({"data": {"sequences_per_micro_batch": 2}}, "sequences_per_micro_batch 1 -> 2"),
        ({"data": {"max_length": 40}}, "data '"),
        ({"limit_train_batches": 9}, "batches_per_epoch 18 -> 9"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_another_order_is_refused(settings, names, folder):
    fit(folder, save=True, max_epochs=1)
    with pytest.raises(MisconfigurationException, match=names):
        fit(folder, resume="b-0-7", **{"max_epochs": 2, **settings})


def test_another_number_of_ranks_is_refused(folder, monkeypatch):
    from sb_lightning.data import datamodule

    fit(folder, save=True, max_epochs=1)
    monkeypatch.setattr(datamodule, "data_parallel", lambda trainer: (2, 0))
    with pytest.raises(MisconfigurationException, match="ranks 1 -> 2"):
        fit(folder, resume="b-0-7", max_epochs=2)


@pytest.mark.parametrize("checkpoint", ["b-0-1", "b-0-7", "v-0", "b-1-4"])
@pytest.mark.parametrize("accumulate", [2, 5])
def test_the_rest_of_an_epoch_is_planned_anew(accumulate, checkpoint, folder):
    """In windows of another size: none twice, none lost, then whole epochs, each with its validation."""
    records = fit(folder, save=True, **EPOCHS).log_of_batches
    options = {"max_epochs": 3, "accumulate_grad_batches": accumulate}
    module = fit(folder, resume=checkpoint, data={"on_resize": "replan"}, **options)
    got, left = module.log_of_batches, rest(records, checkpoint)
    epoch = left[0][0]

    def sequences(found, epoch):
        return sorted(i for record in found if record[0] == epoch for i in record[4])

    assert sequences(got, epoch) == sequences(left, epoch)
    whole = sequences(records, 0)
    assert all(sequences(got, later) == whole for later in range(epoch + 1, 3))
    assert got[0][5:7] == left[0][5:7]
    validated = [event for event in module.events if event.startswith("val") and event.endswith(" 0")]
    assert len(validated) == 3 - epoch
    assert [event for event in module.events if event.startswith("end")] == [
        f"end {later}" for later in range(epoch, 3)
    ]


def test_a_checkpoint_without_position_is_refused(folder):
    fit(folder, save=True, max_epochs=1)
    path = folder / "b-0-7.ckpt"
    checkpoint = torch.load(path, weights_only=True)
    del checkpoint["TextDataModule"]
    torch.save(checkpoint, path)
    with pytest.raises(RuntimeError, match="micro-batch 0 of epoch 0 and the Trainer at 8 of 0"):
        fit(folder, resume="b-0-7", max_epochs=1)


def test_other_weights_can_still_be_validated(folder):
    """Only `fit` goes on at the position: other settings do not keep a checkpoint from being evaluated."""
    fit(folder, save=True, max_epochs=1)
    data = data_module(folder, seed=6)
    make_trainer(folder, accumulate_grad_batches=1).validate(
        TinyModule(), data, ckpt_path=folder / "b-0-7.ckpt"
    )


def test_looking_at_the_data_does_not_move_the_position(folder):
    """`print(datamodule)` builds loaders; reading one in mid-epoch disturbs neither run nor checkpoints."""
    from lightning.pytorch import Callback

    class Look(Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if batch_idx == 4:
                assert "Train dataloader: size=18" in str(trainer.datamodule)
                assert len(list(trainer.datamodule.train_dataloader())) == 18

    records = fit(folder, save=True, callbacks=[Look()], max_epochs=2).log_of_batches
    assert records == fit(folder, max_epochs=2).log_of_batches
    assert fit(folder, resume="b-0-7", max_epochs=2).log_of_batches == rest(records, "b-0-7")


def test_rewind_counts_from_the_window(folder):
    fit(folder, save=True, max_epochs=2)
    middle, start = (torch.load(folder / f"{name}.ckpt", weights_only=True) for name in ("b-1-7", "b-1-5"))
    loops, want = middle["loops"]["fit_loop"], start["loops"]["fit_loop"]
    position = middle["TextDataModule"]
    assert window_start(position) == 6
    rewind_loops(loops, position, middle["global_step"])
    for key in ("epoch_loop.batch_progress", "epoch_progress", "epoch_loop.state_dict"):
        assert loops[key] == want[key], key
    again = copy.deepcopy(loops)
    rewind_loops(again, {**position, "micro_batch": 6}, middle["global_step"])
    assert again == loops


def test_beside_the_callback(folder):
    """With BalancedSampling among the callbacks too, the data module keeps the position."""
    records = fit(folder, save=True, **EPOCHS).log_of_batches
    for callbacks in ([], [BalancedSampling()]):
        module = fit(folder, callbacks=callbacks, resume="b-0-7", **EPOCHS)
        assert module.log_of_batches == rest(records, "b-0-7")
        assert sum(isinstance(c, BalancedSampling) for c in module.trainer.callbacks) == 1
    assert "BalancedSampling" not in torch.load(folder / "b-0-7.ckpt", weights_only=True)["callbacks"]
