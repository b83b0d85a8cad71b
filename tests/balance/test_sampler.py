"""The batch sampler and its loader, without a Trainer."""

import copy
import pickle
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.fabric.utilities import move_data_to_device
from sampler_cases import POLICIES, batch_sampler, rank_samplers
from torch.utils.data.distributed import DistributedSampler

from sb_lightning.balance import Cell


@given(
    lengths=st.lists(st.integers(1, 99), min_size=1, max_size=70),
    ranks=st.integers(1, 4),
    accumulate=st.integers(1, 4),
    m=st.integers(1, 3),
    tail=st.sampled_from(["pad", "partial", "drop"]),
    limit=st.one_of(st.none(), st.integers(1, 30)),
    epoch=st.integers(0, 3),
    policy=st.sampled_from(POLICIES),
    objective=st.sampled_from(["ddp", "fsdp"]),
    equal_counts=st.booleans(),
)
@settings(max_examples=200, deadline=None)
def test_epoch(lengths, ranks, accumulate, m, tail, limit, epoch, policy, objective, equal_counts):
    options = {
        "policy": policy,
        "objective": objective,
        "equal_counts": equal_counts,
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
    assert all(cells for row in cells for cells in row)
    # The same windows as a DistributedSampler deals, whatever the policy.
    torch_samplers = [
        DistributedSampler(lengths, ranks, rank, seed=7, drop_last=False) for rank in range(ranks)
    ]
    for sampler in torch_samplers:
        sampler.set_epoch(epoch)
    dealt = [list(sampler) for sampler in torch_samplers]
    for window in range(samplers[0].num_windows):
        mine = Counter(
            i for row in cells for cell in row if cell.window == window and not cell.is_padding for i in cell
        )
        size = accumulate * m
        theirs = Counter(i for row in dealt for i in row[window * size : (window + 1) * size])
        runs = min(len(samplers[0]) - window * accumulate, accumulate)
        full = (window + 1) * ranks * size <= len(lengths)
        if full and runs < accumulate:
            # Cut by the limit: what the samplers would hand out up to there.
            theirs = Counter(i for row in dealt for i in row[window * size : window * size + runs * m])
        assert (mine == theirs) if full else not mine - theirs
        if full and equal_counts:
            assert {len(c) for row in cells for c in row if c.window == window} == {m}


def test_ranks_plan_alike():
    samplers = rank_samplers(list(range(2, 40)), 3, accumulate=2)
    plans = [[sampler.plan(0, window) for window in range(sampler.num_windows)] for sampler in samplers]
    assert plans[0] == plans[1] == plans[2]
    for rank, sampler in enumerate(samplers):
        assert list(sampler) == [samplers[0].cell(*divmod(b, 2), rank=rank) for b in range(len(sampler))]


def test_looks_like_what_lightning_expects():
    sampler = batch_sampler([3, 4, 5])
    assert sampler.sampler is sampler
    assert not isinstance(sampler, torch.utils.data.BatchSampler)
    assert (sampler.batch_size, sampler.drop_last) == (None, False)
    first = list(sampler)
    sampler.set_epoch(1)
    assert list(sampler) != first


def test_nothing_is_planned_before_it_is_needed(monkeypatch):
    from sb_lightning.balance import membership as module

    epochs = []

    def permute(seed, epoch, length):
        epochs.append(epoch)
        return torch.arange(length).numpy()

    monkeypatch.setattr(module, "epoch_permutation", permute)
    sampler = batch_sampler(list(range(1, 100_001)), accumulate=4, policy="random")
    assert len(sampler) == 100_000
    cells = iter(sampler)
    sampler.set_epoch(4)
    assert next(cells) == [0]
    assert epochs == [4]


def test_start_at_counts_once():
    sampler = batch_sampler(list(range(1, 10)), accumulate=3)
    whole = list(sampler)
    sampler.start_at(4)
    assert list(sampler) == whole[4:]
    assert list(sampler) == whole


def test_target_tokens_of_their_own():
    sampler = batch_sampler([5, 6, 7], [0, 2, 1], accumulate=3)
    assert sampler.plan(0, 0).target_tokens == 3
    assert {cell.window_target_tokens for cell in sampler} == {3}


def test_cell_travels():
    cell = Cell([3, 1], window=2, micro_batch=1, target_tokens=5, window_target_tokens=9, is_padding=True)
    again = pickle.loads(pickle.dumps(cell))
    assert again == cell == [3, 1]
    assert vars(again) == vars(cell)


def test_cell_that_was_rebuilt_says_so():
    """Lightning rebuilds every list of a batch from its elements when it moves the batch to a device."""
    cell = move_data_to_device({"cell": Cell([3, 1], window=2, window_target_tokens=9)}, "cpu")["cell"]
    assert cell == [3, 1]
    with pytest.raises(AttributeError, match=r"window_target_tokens.*copy what is needed"):
        _ = cell.window_target_tokens
    assert not hasattr(cell, "anything")
    assert copy.deepcopy(Cell([1], window=2)).window == 2


def test_plan_outside_of_the_epoch():
    sampler = batch_sampler([3] * 7, accumulate=2, max_batches=3)
    assert sampler.plan(0, 1).num_micro_batches == 1
    with pytest.raises(IndexError, match="window 2 of epoch 0 does not run: the epoch has 2 windows"):
        sampler.plan(0, 2)


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
        ({"seed": 2**64}, ValueError, "seed is 18446744073709551616: it is too large"),
        ({"target_tokens": [1, 6, 2]}, ValueError, "target_tokens of sequence 1 is 6 and its length 5"),
        ({"target_tokens": [1, 2, -1]}, ValueError, "target_tokens of sequence 2 is -1"),
        ({"equal_counts": "false"}, TypeError, "equal_counts is 'false'"),
        ({"store": 5}, TypeError, "store is a int"),
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
        batch_sampler([4, 5, 6], options.pop("target_tokens", None), **options)


def test_no_sequences():
    with pytest.raises(ValueError, match="lengths is empty"):
        batch_sampler([])
