"""The batch sampler and its loader, without a Trainer."""

import copy
import pickle
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sb_lightning.balance import BalancedDataLoader, Cell, SparsityAwareBatchSampler


def rank_samplers(lengths, ranks, **options):
    return [SparsityAwareBatchSampler(lengths, ranks=ranks, rank=rank, **options) for rank in range(ranks)]


@given(
    lengths=st.lists(st.integers(1, 99), min_size=1, max_size=70),
    ranks=st.integers(1, 4),
    accumulate=st.integers(1, 4),
    m=st.integers(1, 3),
    tail=st.sampled_from(["pad", "partial", "drop"]),
    limit=st.one_of(st.none(), st.integers(1, 30)),
    epoch=st.integers(0, 3),
)
@settings(max_examples=200, deadline=None)
def test_epoch(lengths, ranks, accumulate, m, tail, limit, epoch):
    options = {
        "accumulate": accumulate,
        "sequences_per_micro_batch": m,
        "tail": tail,
        "max_batches": limit,
        "seed": 7,
    }
    size = ranks * accumulate * m
    if tail == "drop" and len(lengths) < size:
        with pytest.raises(ValueError, match="accumulate_grad_batches"):
            rank_samplers(lengths, ranks, **options)
        return
    samplers = rank_samplers(lengths, ranks, **options)
    for sampler in samplers:
        sampler.set_epoch(epoch)
    cells = [list(sampler) for sampler in samplers]
    assert {len(row) for row in cells} == {len(samplers[0])}
    assert len(samplers[0]) == min(samplers[0].num_batches, limit or 10**9)
    seen = Counter(i for row in cells for cell in row if not cell.is_padding for i in cell)
    assert not seen or max(seen.values()) == 1
    if limit is None:
        whole = len(lengths) - len(lengths) % size if tail == "drop" else len(lengths)
        assert len(seen) == whole
        assert samplers[0].drop_last == (tail == "drop")
    # The count that every cell of a window carries is the sum over the cells of that window which run.
    counted = Counter()
    for row in cells:
        for cell in row:
            counted[cell.window] += cell.target_tokens
            assert cell.target_tokens == (0 if cell.is_padding else sum(lengths[i] - 1 for i in cell))
    for row in cells:
        assert [(c.window, c.micro_batch) for c in row] == [divmod(b, accumulate) for b in range(len(row))]
        assert all(cell.window_target_tokens == counted[cell.window] for cell in row)
    assert samplers[0].num_windows == len(counted)


def test_ranks_plan_alike():
    samplers = rank_samplers(list(range(2, 40)), 3, accumulate=2)
    plans = [[sampler.plan(window) for window in range(sampler.num_windows)] for sampler in samplers]
    assert plans[0] == plans[1] == plans[2]
    for rank, sampler in enumerate(samplers):
        assert list(sampler) == [samplers[0].cell(*divmod(b, 2), rank=rank) for b in range(len(sampler))]


def test_looks_like_what_lightning_expects():
    sampler = SparsityAwareBatchSampler([3, 4, 5])
    assert sampler.sampler is sampler
    assert not isinstance(sampler, torch.utils.data.BatchSampler)
    assert (sampler.batch_size, sampler.drop_last) == (1, False)
    first = list(sampler)
    sampler.set_epoch(1)
    assert list(sampler) != first


def test_nothing_is_planned_before_it_is_needed(monkeypatch):
    from sb_lightning.balance import sampler as module

    epochs = []

    def permute(seed, epoch, length):
        epochs.append(epoch)
        return torch.arange(length).numpy()

    monkeypatch.setattr(module, "epoch_permutation", permute)
    sampler = SparsityAwareBatchSampler(list(range(1, 100_001)), accumulate=4)
    assert len(sampler) == 100_000
    cells = iter(sampler)
    sampler.set_epoch(4)
    assert next(cells) == [0]
    assert epochs == [4]


def test_start_at_counts_once():
    sampler = SparsityAwareBatchSampler(list(range(1, 10)), accumulate=3)
    whole = list(sampler)
    sampler.start_at(4)
    assert list(sampler) == whole[4:]
    assert list(sampler) == whole


def test_target_tokens_of_their_own():
    sampler = SparsityAwareBatchSampler([5, 6, 7], [0, 2, 1], accumulate=3)
    assert sampler.plan(0).target_tokens == 3
    assert {cell.window_target_tokens for cell in sampler} == {3}


def test_cell_travels():
    cell = Cell([3, 1], window=2, micro_batch=1, target_tokens=5, window_target_tokens=9, is_padding=True)
    again = pickle.loads(pickle.dumps(cell))
    assert again == cell == [3, 1]
    assert vars(again) == vars(cell)


def test_plan_outside_of_the_epoch():
    sampler = SparsityAwareBatchSampler([3] * 7, accumulate=2, max_batches=3)
    assert sampler.plan(1).num_micro_batches == 1
    with pytest.raises(IndexError, match="window 2 is outside the 2 windows"):
        sampler.plan(2)


@pytest.mark.parametrize(
    ("options", "error", "names"),
    [
        ({"ranks": 0}, ValueError, "ranks is 0: it counts from 1"),
        ({"ranks": 2, "rank": 2}, ValueError, "rank is 2 of 2 ranks"),
        ({"rank": -1}, ValueError, "rank is -1"),
        ({"accumulate": 0}, ValueError, "accumulate is 0"),
        ({"accumulate": 1.5}, TypeError, r"accumulate is 1\.5"),
        ({"sequences_per_micro_batch": 0}, ValueError, "sequences_per_micro_batch is 0"),
        ({"sequences_per_micro_batch": True}, TypeError, "sequences_per_micro_batch is True"),
        ({"max_batches": 0}, ValueError, "max_batches is 0"),
        ({"seed": -1}, ValueError, "seed is -1"),
        ({"policy": "longest"}, ValueError, r"policy is 'longest'.*'random'"),
        ({"tail": "keep"}, ValueError, r"tail is 'keep'.*'drop', 'pad', 'partial'"),
        ({"target_tokens": [1, 2]}, ValueError, "3 lengths and 2 target_tokens"),
        (
            {"accumulate": 4, "tail": "drop"},
            ValueError,
            "3 sequences do not fill one window.*accumulate_grad_batches",
        ),
    ],
    ids=str,
)
def test_bad_arguments(options, error, names):
    with pytest.raises(error, match=names):
        SparsityAwareBatchSampler([4, 5, 6], **options)


def test_no_sequences():
    with pytest.raises(ValueError, match="0 sequences do not fill one window"):
        SparsityAwareBatchSampler([])


class Squares(torch.utils.data.Dataset):
    """A data set that knows nothing of cells."""

    def __len__(self):
        return 11

    def __getitem__(self, index):
        return torch.tensor(index**2)


def make_loader(workers=0, **options):
    sampler = SparsityAwareBatchSampler([5] * 11, ranks=1, rank=0, accumulate=2, seed=1, **options)
    return BalancedDataLoader(Squares(), batch_sampler=sampler, num_workers=workers)


@pytest.mark.parametrize("workers", [0, 2])
def test_loader_resumes_at_the_micro_batch(workers):
    """Used alone, the loader goes on at the very micro-batch: nothing but data has to agree."""
    loader = make_loader(workers)
    loader.batch_sampler.set_epoch(3)
    whole = [batch.tolist() for batch in loader]
    assert len(whole) == len(loader) == 11
    running = iter(loader)
    head = [next(running).tolist() for _ in range(4)]
    state = copy.deepcopy(loader.state_dict())
    assert state["micro_batch"] == 4
    again = make_loader(workers)
    again.load_state_dict(state)
    again.batch_sampler.set_epoch(3)
    assert head + [batch.tolist() for batch in again] == whole
    again.batch_sampler.set_epoch(4)
    assert len([batch.tolist() for batch in again]) == 11


def test_loader_at_the_end_of_an_epoch():
    loader = make_loader()
    list(loader)
    again = make_loader()
    again.load_state_dict(loader.state_dict())
    again.batch_sampler.set_epoch(1)
    assert len(list(again)) == 11


def test_loader_refuses_another_order():
    state = make_loader().state_dict()
    with pytest.raises(ValueError, match="sequences_per_micro_batch 1 -> 2"):
        make_loader(sequences_per_micro_batch=2).load_state_dict(state)
    with pytest.raises(ValueError, match="version 99"):
        make_loader().load_state_dict({**state, "version": 99})


def test_loader_starts_no_worker_before_the_first_batch(monkeypatch):
    """Lightning creates the iterator before it sets the epoch (pytorch-lightning issue 21938)."""
    loader = make_loader()
    batches = iter(loader)
    loader.batch_sampler.set_epoch(2)
    expected = make_loader()
    expected.batch_sampler.set_epoch(2)
    assert [b.tolist() for b in batches] == [b.tolist() for b in expected]


def test_loader_knows_the_length_before_the_limit():
    loader = make_loader(max_batches=3)
    assert len(loader) == 11
    assert len(list(loader)) == len(loader.batch_sampler) == 3
