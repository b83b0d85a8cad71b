"""The loader by itself: lazy, exactly resumable, and a DistributedSampler to whoever looks."""

import copy
import io

import pytest
import torch
from balanced_run import LENGTHS, Documents, make_loader, make_sampler
from torch.utils.data import DistributedSampler

from sb_lightning.balance import BalancedDataLoader, BudgetStore


def ids(loader):
    return [batch[0].tolist() for batch in loader]


def through_a_file(state):
    """What a checkpoint makes of it."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("workers", [0, 2])
def test_resumes_at_the_micro_batch(workers):
    """Used alone, the loader goes on at the very micro-batch, and then with whole epochs."""
    loader = make_loader(workers=workers)
    loader.sampler.set_epoch(3)
    whole = ids(loader)
    assert len(whole) == len(loader) == 18
    running = iter(loader)
    head = [next(running)[0].tolist() for _ in range(4)]
    state = through_a_file(loader.state_dict())
    assert (state["epoch"], state["micro_batch"]) == (3, 4)
    again = make_loader(workers=workers)
    again.load_state_dict(state)
    assert again.batch_sampler.epoch == 3
    # A checkpoint before the first batch after a resume says the same again.
    assert again.state_dict() == state
    assert head + ids(again) == whole
    again.sampler.set_epoch(4)
    loader.sampler.set_epoch(4)
    assert ids(again) == ids(loader)


def test_the_end_of_an_epoch_is_the_start_of_the_next():
    loader = make_loader()
    list(loader)
    again = make_loader()
    again.load_state_dict(loader.state_dict())
    assert again.batch_sampler.epoch == 1
    assert len(list(again)) == 18
    # After set_epoch, what the epoch before has handed out does not count.
    loader.sampler.set_epoch(1)
    assert loader.state_dict()["micro_batch"] == 0


def test_another_epoch_than_that_of_the_position_is_refused():
    """Fabric counts from 0 in each process, and a loop may forget its first epoch."""
    loader = make_loader()
    loader.sampler.set_epoch(2)
    next(iter(loader))
    again = make_loader()
    again.load_state_dict(loader.state_dict())
    again.sampler.set_epoch(0)
    with pytest.raises(
        RuntimeError, match=r"micro-batch 1 of epoch 2, and epoch 0 is to be run.*set_epoch\(2\)"
    ):
        next(iter(again))


def test_another_order_is_refused():
    state = make_loader().state_dict()
    with pytest.raises(ValueError, match="sequences_per_micro_batch 1 -> 2"):
        make_loader(sequences_per_micro_batch=2).load_state_dict(state)
    with pytest.raises(ValueError, match="lengths '"):
        make_loader(lengths=LENGTHS[::-1]).load_state_dict(state)
    with pytest.raises(ValueError, match="version 99"):
        make_loader().load_state_dict({**state, "version": 99})


def test_state_is_equal_on_all_ranks():
    """Only rank 0's is saved: accelerate 4164, Megatron 7413."""
    states = []
    for rank in range(2):
        loader = make_loader(ranks=2, rank=rank)
        running = iter(loader)
        for _ in range(5):
            next(running)
        states.append(loader.state_dict())
    assert repr(states[0]) == repr(states[1])


def test_nothing_is_drawn_before_the_first_batch():
    """Lightning creates the iterator before it sets the epoch: pytorch-lightning issue 21938."""
    loader = make_loader(workers=2)
    batches = iter(loader)
    loader.batch_sampler.set_epoch(2)
    expected = make_loader()
    expected.batch_sampler.set_epoch(2)
    assert [batch[0].tolist() for batch in batches] == ids(expected)


def test_length_is_that_before_the_limit():
    loader = make_loader(max_batches=5)
    assert len(loader) == 18
    assert len(ids(loader)) == len(loader.batch_sampler) == 5


def test_its_sampler_is_a_distributed_sampler():
    loader = make_loader(ranks=2, rank=1)
    assert isinstance(loader.sampler, DistributedSampler)
    loader.sampler.set_epoch(1)
    assert loader.batch_sampler.epoch == loader.sampler.epoch == 1
    assert list(loader.sampler) == [i for cell in loader.batch_sampler for i in cell]
    assert len(loader.sampler) == 9
    with pytest.raises(ValueError, match="sampler attribute should not be set"):
        loader.sampler = None
    assert copy.copy(loader).sampler is loader.sampler


def test_another_batch_sampler_is_refused():
    with pytest.raises(TypeError, match=r"batch_sampler is a BatchSampler.*pass batch_sampler=Sparsity"):
        BalancedDataLoader(
            Documents(), batch_sampler=torch.utils.data.BatchSampler(range(18), 2, drop_last=False)
        )


def test_plans_lag_as_far_as_workers_draw_ahead():
    store = BudgetStore()
    sampler = make_sampler(store=store)
    loader = BalancedDataLoader(Documents(), batch_sampler=sampler, num_workers=3, prefetch_factor=4)
    # 12 micro-batches ahead are 4 windows.
    assert sampler.lag == 5
    assert store.num_versions == 6
    state = loader.state_dict()
    again = make_loader()
    assert again.batch_sampler.lag == 1
    again.load_state_dict(state)
    # Fixed per run: fewer workers plan no otherwise.
    assert again.batch_sampler.lag == 5


def test_what_the_sampler_has_learnt_is_part_of_the_state():
    loader = make_loader()
    loader.batch_sampler.store.update(1, ids=[3, 4], lengths=[20, 30], budgets=[2, 4])
    again = make_loader()
    again.load_state_dict(through_a_file(loader.state_dict()))
    assert again.batch_sampler.store.digest() == loader.batch_sampler.store.digest()


def test_somebody_else_can_keep_the_position():
    loader = make_loader()
    assert loader.leave_position(lambda: 7) is None
    assert loader.is_position_kept_elsewhere
    state = loader.state_dict()
    assert state == {"version": 1, "kept_elsewhere": True}
    assert len(ids(loader)) == 18 - 7
    loader.take_position()
    assert len(ids(loader)) == 18
    # Where nobody keeps it any more, nothing is begun at the wrong place.
    loader.load_state_dict(state)
    with pytest.raises(
        RuntimeError,
        match=r"saved by a run with a BalancedSampling .* To fix it, add sb_lightning\.callbacks",
    ):
        next(iter(loader))
    loader.load_state_dict(make_loader().state_dict())
    assert loader.leave_position(lambda: 0)["micro_batch"] == 0


def sampler_from_before():
    """A sampler that was made when the ranks were not known yet."""
    sampler = make_sampler()
    assert not sampler.has_own_ranks
    sampler._membership.ranks, sampler.rank = 1, 0
    with pytest.raises(
        RuntimeError, match=r"made for rank 0 of 1, and this is rank \d of 2.*train_dataloader"
    ):
        next(iter(make_loader(sampler)))
    # Who says what the ranks are is believed: some may share their data.
    return next(iter(make_loader(make_sampler(ranks=1, rank=0))))[0].tolist()


def test_a_sampler_made_before_the_ranks_were_known_is_refused(gloo_pool):
    first, second = gloo_pool.run(sampler_from_before)
    assert first == second
