"""A project's own DataLoader, balanced: what is kept, what is read from the Trainer, what is refused."""

from __future__ import annotations

import warnings

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule, Trainer
from tiny import tiny_architecture
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
)
from transformers import Qwen2Config, Qwen2ForCausalLM

from sb_lightning.attention import sparsify
from sb_lightning.balance import BalancedDataLoader
from sb_lightning.data import balance_loader

LENGTHS = [3 + (i * 37) % 61 for i in range(18)]
SAMPLES = [torch.arange(length) for length in LENGTHS]


def double(batch):
    return [2 * sample for sample in batch]


def start_worker(number):
    pass


def trainer_of(model=None, **settings):
    """A Trainer with a module, as in `train_dataloader`."""
    trainer = Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, **settings)
    module = LightningModule()
    module.model = torch.nn.Linear(2, 2) if model is None else model
    trainer.strategy.connect(module)
    return trainer


def balance(trainer=None, lengths=LENGTHS, loader=None, policy="tokens", **options):
    loader = DataLoader(SAMPLES, shuffle=True) if loader is None else loader
    return balance_loader(loader, lengths, trainer=trainer or trainer_of(), policy=policy, **options)


def qwen():
    sizes = {name: value for name, value in tiny_architecture().items() if name != "model_type"}
    return Qwen2ForCausalLM(Qwen2Config(**sizes))


def test_what_the_loader_does_besides_choosing_samples_is_kept():
    generator = torch.Generator()
    loader = DataLoader(
        SAMPLES, batch_size=2, shuffle=True, collate_fn=double, num_workers=1, prefetch_factor=3, timeout=9,
        worker_init_fn=start_worker, generator=generator, persistent_workers=True,
        multiprocessing_context="fork",
    )  # fmt: skip
    found = balance(loader=loader)
    assert isinstance(found, BalancedDataLoader)
    assert (found.collate_fn, found.worker_init_fn) == (double, start_worker)
    assert (found.num_workers, found.prefetch_factor, found.timeout) == (1, 3, 9)
    assert found.generator is generator
    assert found.persistent_workers
    assert found.multiprocessing_context is loader.multiprocessing_context
    assert found.batches.sequences_per_micro_batch == 2
    assert all(len(cell) == 2 for cell in found.batches)


def test_what_the_plan_shares_with_the_trainer_is_read_from_it(monkeypatch):
    monkeypatch.setenv("PL_GLOBAL_SEED", "7")
    sampler = balance(trainer_of(accumulate_grad_batches=3)).batches
    assert (sampler.accumulate, sampler.seed, sampler.ranks, sampler.rank) == (3, 7, 1, 0)
    assert (sampler.equal_counts, sampler.tail, sampler.costs.budget) == (True, "partial", None)
    assert balance(loader=DataLoader(SAMPLES, shuffle=True, drop_last=True)).batches.tail == "drop"
    sampler = balance(seed=3, equal_counts=False, budget=5).batches
    assert (sampler.seed, sampler.equal_counts, sampler.costs.budget) == (3, False, 5)


@pytest.mark.filterwarnings("ignore:balance_loader got no latency table")
def test_budget_and_sizes_are_those_of_the_model():
    dense, sparse = (balance(trainer_of(model), policy="latency") for model in (
        qwen(), sparsify(qwen(), block_size=32, budget=4),
    ))  # fmt: skip
    assert dense.batches.costs.budget is None
    assert sparse.batches.costs.budget == 4
    assert sparse.batches.costs.table.block_size == 32
    assert dense.batches.costs.table.measurements.layers == tiny_architecture()["num_hidden_layers"]


def test_without_a_table_one_warning_says_what_is_counted():
    with pytest.warns(UserWarning, match=r"latency=.*counts the operations of Qwen2ForCausalLM") as said:
        balance(trainer_of(qwen()), policy="latency")
    assert len([w for w in said if "latency table" in str(w.message)]) == 1
    with pytest.warns(UserWarning, match="generic model"):
        balance(policy="latency")


def test_lengths_may_be_a_function_of_a_sample():
    assert balance(lengths=len).batches.lengths.tolist() == LENGTHS


def sampled(batch_size=1, drop_last=False, **options):
    """A loader with a DistributedSampler of its own."""
    chosen = DistributedSampler(SAMPLES, **{"num_replicas": 1, "rank": 0, **options})
    return DataLoader(SAMPLES, batch_size=batch_size, sampler=chosen, drop_last=drop_last)


def test_the_loader_s_own_sampler_gives_its_seed_and_what_it_drops(monkeypatch):
    monkeypatch.setenv("PL_GLOBAL_SEED", "7")
    kept, dropped = (balance(loader=sampled(seed=5, drop_last=drop)).batches for drop in (False, True))
    assert (kept.seed, kept.tail, dropped.tail) == (5, "partial", "drop")
    chosen = DistributedSampler(SAMPLES, 1, 0, drop_last=True)
    assert balance(loader=DataLoader(SAMPLES, sampler=chosen)).batches.tail == "drop"
    assert balance(loader=sampled(seed=5), seed=3).batches.seed == 3


def test_batches_may_be_made_by_a_plain_batch_sampler():
    batches = BatchSampler(RandomSampler(SAMPLES), 2, True)
    found = balance(loader=DataLoader(SAMPLES, batch_sampler=batches)).batches
    assert (found.sequences_per_micro_batch, found.tail) == (2, "drop")
    with pytest.raises(ValueError, match="WeightedRandomSampler"):
        balance(
            loader=DataLoader(
                SAMPLES, batch_sampler=BatchSampler(WeightedRandomSampler([1.0] * 18, 18), 2, True)
            )
        )


class Twice(DataLoader):
    def __iter__(self):
        for batch in super().__iter__():
            yield batch
            yield batch


class Endless:
    def __getitem__(self, index):
        return SAMPLES[index % len(SAMPLES)]


class Stream(IterableDataset):
    def __iter__(self):
        return iter(SAMPLES)


@pytest.mark.parametrize(
    ("loader", "error", "named"),
    [
        (SAMPLES, TypeError, "is a list"),
        (DataLoader(Stream()), TypeError, "IterableDataset"),
        (DataLoader(SAMPLES, batch_size=None), ValueError, "NoneType"),
        (DataLoader(SAMPLES, batch_sampler=[[0, 1]]), ValueError, "a list"),
        (DataLoader(SAMPLES, sampler=WeightedRandomSampler([1.0] * 18, 18)), ValueError, "Weighted"),
        (DataLoader(SAMPLES, sampler=RandomSampler(SAMPLES, replacement=True)), ValueError, "RandomSampler"),
        (DataLoader(SAMPLES, sampler=[3, 1]), ValueError, "sampler is a list"),
        (DataLoader(Endless()), TypeError, "without __len__"),
        (Twice(SAMPLES, shuffle=True), ValueError, "Twice, which has its own __iter__.*BalancedDataLoader"),
        (DataLoader(SAMPLES, sampler=RandomSampler(SAMPLES, num_samples=4)), ValueError, "of 4 samples.* 18"),
        (DataLoader(SAMPLES, sampler=SequentialSampler(range(4))), ValueError, "of 4 samples.* 18"),
        (DataLoader(SAMPLES, sampler=DistributedSampler(SAMPLES[:4], 1, 0)), ValueError, "of 4 samples"),
        (sampled(shuffle=False), ValueError, "shuffle=False"),
        (sampled(num_replicas=2, rank=1), ValueError, "rank 1 of 2.* rank 0 of 1"),
    ],
    ids=[
        "list",
        "iterable",
        "unbatched",
        "batches",
        "weighted",
        "replacement",
        "chosen",
        "no length",
        "own iteration",
        "fewer",
        "the first",
        "others",
        "in order",
        "other ranks",
    ],
)
def test_loaders_whose_choice_would_be_lost_are_refused(loader, error, named):
    with pytest.raises(error, match=f"{named}.*To fix it"):
        balance(loader=loader)


@pytest.mark.parametrize("trainer", [None, 5, LightningModule()], ids=["none", "number", "module"])
def test_what_is_no_trainer_is_named(trainer):
    with pytest.raises(TypeError, match=r"trainer is .*To fix it, pass trainer=self\.trainer"):
        balance_loader(DataLoader(SAMPLES, shuffle=True), LENGTHS, trainer=trainer)


@pytest.mark.filterwarnings("ignore:balance_loader. the loader does not shuffle")
def test_an_empty_data_set_is_refused():
    with pytest.raises(ValueError, match="lengths is empty"):
        balance(lengths=[], loader=DataLoader([]))


def test_other_numbers_of_lengths_are_refused():
    with pytest.raises(ValueError, match="17 lengths, and 18 samples"):
        balance(lengths=LENGTHS[:-1])


def said_of(policy="tokens", batch_size=2, **options):
    """What balance_loader says of large batches."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        balance(loader=DataLoader(SAMPLES, batch_size=batch_size, shuffle=True), policy=policy, **options)
    return [str(w.message) for w in caught]


def test_several_samples_per_micro_batch_are_told_what_pads_and_what_weighs():
    (both,) = said_of()
    assert "micro-batches have 2 samples. If your collate_fn pads" in both
    assert "policy='length'" in both
    assert "window_loss_scale" in both
    (loss,) = said_of(policy="length")
    assert "pads" not in loss
    assert "window_loss_scale" in loss
    (padding,) = said_of(add_plan=True)
    assert "window_loss_scale" not in padding
    assert said_of(policy="length", add_plan=True) == []
    assert said_of(batch_size=1) == []


def test_no_lengths_are_named():
    with pytest.raises(TypeError, match=r"lengths of balance_loader is None.*To fix it, pass as lengths"):
        balance(lengths=None)


def test_a_loader_without_shuffle_is_told():
    with pytest.warns(UserWarning, match="does not shuffle"):
        balance(loader=DataLoader(SAMPLES))


def test_overfitting_is_refused():
    with pytest.raises(MisconfigurationException, match="overfit_batches"):
        balance(trainer_of(overfit_batches=2))
