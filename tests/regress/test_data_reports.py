"""Failures that users of other samplers and loaders have reported; one case each."""

import warnings

import pytest
import torch
from tiny_run import TinyModule, data_module, fit, make_trainer, write_documents

from sb_lightning.balance import SparsityAwareBatchSampler


@pytest.fixture
def folder(tmp_path):
    write_documents(tmp_path / "docs")
    return tmp_path


def sequences(records, epoch):
    return [i for record in records if record[0] == epoch for i in record[4]]


def test_every_epoch_has_its_own_order(folder):
    """set_epoch is not called on a batch sampler: pytorch-lightning issues 13316, 21454."""
    records = fit(folder, max_epochs=3).log_of_batches
    orders = [sequences(records, epoch) for epoch in range(3)]
    assert sorted(orders[0]) == sorted(orders[1]) == sorted(orders[2])
    assert len({tuple(order) for order in orders}) == 3


def dealt_windows(folder, settings):
    batches = fit(folder, max_epochs=1, devices=2, strategy="ddp", **settings).batches
    return [(batch["window"], batch["sequence_ids"].tolist()) for batch in batches if "window" in batch]


@pytest.mark.parametrize("flag", [{}, {"use_distributed_sampler": False}], ids=["default", "off"])
def test_sampler_is_never_replaced_in_silence(flag, folder, gloo_pool):
    """A batch sampler under DDP is rebuilt or refused: pytorch-lightning issues 1661, 3455, 5145, 19964."""
    whole = fit(folder, max_epochs=1, accumulate_grad_batches=4).batches
    shares = gloo_pool.run(dealt_windows, folder, {"accumulate_grad_batches": 2, **flag})

    def windows(cells):
        groups = {}
        for window, ids in cells:
            if window >= 0:
                groups.setdefault(window, []).extend(ids)
        return {window: sorted(ids) for window, ids in groups.items()}

    assert windows(shares[0] + shares[1]) == windows(
        [(batch["window"], batch["sequence_ids"].tolist()) for batch in whole if "window" in batch]
    )


@pytest.mark.parametrize("workers", [0, 2])
def test_resumed_epoch_is_not_epoch_zero_again(workers, folder):
    """The first resumed epoch replays epoch 0's order with workers: pytorch-lightning issue 21938."""
    records = fit(folder, max_epochs=2, save=True).log_of_batches
    resumed = fit(folder, max_epochs=2, resume="b-1-5", data={"num_workers": workers}).log_of_batches
    assert resumed == [record for record in records if record[:2] >= (1, 6)]


def test_schedule_over_all_steps_does_not_drop_the_position(folder):
    """estimated_stepping_batches in configure_optimizers loses the loader's state: issues 20550, 21765."""

    class OneCycle(TinyModule):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.05)
            steps = self.trainer.estimated_stepping_batches
            schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=steps)
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    def run(**options):
        torch.manual_seed(0)
        module = OneCycle()
        trainer = make_trainer(folder, save=not options, max_epochs=2)
        trainer.fit(module, data_module(folder), **options)
        return module.log_of_batches

    records = run()
    assert run(ckpt_path=folder / "b-0-8.ckpt") == [record for record in records if record[:2] >= (0, 9)]


def test_no_sample_is_seen_twice_or_lost_over_a_resume(folder):
    """Mid-epoch resume: pytorch-lightning issues 19764, 18780, 11029; with no warning."""
    fit(folder, max_epochs=1, save=True)
    first = sequences(fit(folder, max_epochs=1, limit_train_batches=18).log_of_batches[:9], 0)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*not resumable.*")
        second = sequences(fit(folder, max_epochs=1, resume="b-0-8").log_of_batches, 0)
    assert len(first + second) == len(set(first + second)) == 18


def test_checkpoint_of_the_last_batch_starts_the_next_epoch(folder):
    """A "just finished" state resumed as an empty or a repeated epoch: meta-pytorch/data 1513, 1437."""
    records = fit(folder, max_epochs=2, save=True).log_of_batches
    resumed = fit(folder, max_epochs=2, resume="b-0-17").log_of_batches
    assert {record[0] for record in resumed} == {1}
    assert resumed == [record for record in records if record[0] == 1]


def test_epochs_after_a_resumed_one_are_whole(folder):
    """Later epochs ran only the tail: litgpt issue 1712."""
    fit(folder, max_epochs=1, save=True)
    resumed = fit(folder, max_epochs=3, resume="b-0-14").log_of_batches
    assert [len(sequences(resumed, epoch)) for epoch in range(3)] == [3, 18, 18]


@pytest.mark.parametrize("ranks", [2, 3, 5])
@pytest.mark.parametrize("tail", ["drop", "pad", "partial"])
def test_ranks_never_differ_in_their_number_of_batches(tail, ranks):
    """Uneven batches hang DDP: pytorch-lightning issues 20404, 9851."""
    for length in range(ranks * 2, ranks * 2 + 30):
        samplers = [
            SparsityAwareBatchSampler([7] * length, ranks=ranks, rank=rank, accumulate=2, tail=tail)
            for rank in range(ranks)
        ]
        assert len({len(sampler) for sampler in samplers} | {len(list(sampler)) for sampler in samplers}) == 1


@pytest.mark.parametrize("tail", ["drop", "pad", "partial"])
def test_number_of_steps_is_known_exactly(tail, folder):
    """Packed length differed from max_steps: axolotl issues 461, 2203, 1966."""
    module = fit(folder, max_epochs=2, estimate=True, accumulate_grad_batches=4, data={"tail": tail})
    assert module.estimated == module.trainer.global_step == {"drop": 8, "pad": 10, "partial": 10}[tail]
    assert {record[0] for record in module.log_of_batches} == {0, 1}


def test_short_last_window_is_a_token_mean_too(folder):
    """The last window was scaled as a whole one: pytorch-lightning issues 19987, 21808."""
    batches = [
        batch for batch in fit(folder, max_epochs=1, accumulate_grad_batches=4).batches if "window" in batch
    ]
    last = [batch for batch in batches if batch["window"] == 4]
    assert len(batches) == 18
    assert len(last) == 2
    assert {batch["window_target_tokens"] for batch in last} == {
        sum(batch["target_tokens"] for batch in last)
    }
