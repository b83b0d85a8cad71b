"""Plans of windows: membership, cells, tails and counts, for any sizes."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DistributedSampler

from sb_lightning.balance import (
    WindowPlan,
    epoch_permutation,
    num_micro_batches,
    plan_random_window,
    window_members,
)

sizes = st.fixed_dictionaries(
    {
        "ranks": st.integers(1, 5),
        "accumulate": st.integers(1, 4),
        "sequences_per_micro_batch": st.integers(1, 3),
    }
)


def window_size(options):
    return options["ranks"] * options["accumulate"] * options["sequences_per_micro_batch"]


def items_of(plan, *, padding):
    """Positions in the cells that are, or are not, pad cells."""
    return [
        item
        for row, flags in zip(plan.cells, plan.is_padding, strict=True)
        for cell, flag in zip(row, flags, strict=True)
        for item in cell
        if flag == padding
    ]


@given(
    seed=st.integers(0, 99),
    epoch=st.integers(0, 5),
    length=st.integers(1, 60),
    ranks=st.integers(1, 4),
    m=st.integers(1, 3),
)
def test_order_is_that_of_a_distributed_sampler(seed, epoch, length, ranks, m):
    """Whole windows hold what shuffled DistributedSamplers with batch size m hand out, cell by cell."""
    accumulate = 2
    handed_out = []
    for rank in range(ranks):
        sampler = DistributedSampler(range(length), ranks, rank, shuffle=True, seed=seed, drop_last=True)
        sampler.set_epoch(epoch)
        handed_out.append(list(sampler))
    size = ranks * accumulate * m
    for window in range(length // size):
        members = window_members(seed, epoch, length, size, window)
        plan = plan_random_window(
            [1] * size, [1] * size, ranks=ranks, accumulate=accumulate, sequences_per_micro_batch=m
        )
        for rank in range(ranks):
            for a in range(accumulate):
                start = (window * accumulate + a) * m
                cell = [int(members[i]) for i in plan.cells[rank][a]]
                assert cell == handed_out[rank][start : start + m]


def test_epochs_differ_and_cover_everything():
    first, second = epoch_permutation(3, 0, 101), epoch_permutation(3, 1, 101)
    assert sorted(first) == sorted(second) == list(range(101))
    assert first.tolist() != second.tolist()


@given(
    options=sizes,
    fill=st.floats(0.01, 1),
    tail=st.sampled_from(["drop", "pad", "partial"]),
    lengths=st.lists(st.integers(1, 999), min_size=60, max_size=60),
)
@settings(max_examples=300)
def test_plan(options, fill, tail, lengths):
    num_items = max(1, int(fill * window_size(options)))
    lengths = lengths[:num_items]
    targets = [length - 1 for length in lengths]
    plan = plan_random_window(lengths, targets, tail=tail, **options)
    per_rank = num_micro_batches(num_items, tail=tail, **options)
    assert len(plan.cells) == options["ranks"]
    assert {len(row) for row in plan.cells} == {per_rank}
    assert per_rank <= options["accumulate"]
    assert all(cell for row in plan.cells for cell in row)
    if tail == "drop" and num_items < window_size(options):
        assert (per_rank, plan.target_tokens) == (0, 0)
        return
    assert sorted(items_of(plan, padding=False)) == list(range(num_items))
    assert all(lengths[item] == min(lengths) for item in items_of(plan, padding=True))
    assert plan.target_tokens == sum(targets)
    for row, flags, counts in zip(plan.cells, plan.is_padding, plan.cell_target_tokens, strict=True):
        for cell, flag, count in zip(row, flags, counts, strict=True):
            assert count == (0 if flag else sum(targets[item] for item in cell))
    cells = [
        len(c)
        for row, f in zip(plan.cells, plan.is_padding, strict=True)
        for c, p in zip(row, f, strict=True)
        if not p
    ]
    if tail == "partial":
        assert max(cells) - min(cells) <= 1
        assert items_of(plan, padding=True) == [] or num_items < options["ranks"]
        assert max(cells) <= max(2, options["sequences_per_micro_batch"])
    else:
        assert max(cells) <= options["sequences_per_micro_batch"]


@given(options=sizes, data=st.data())
def test_cut_by_the_trainer_counts_only_what_runs(options, data):
    size = window_size(options)
    run = data.draw(st.integers(1, options["accumulate"]))
    lengths = data.draw(st.lists(st.integers(2, 50), min_size=size, max_size=size))
    whole = plan_random_window(lengths, lengths, **options)
    cut = plan_random_window(lengths, lengths, max_micro_batches=run, **options)
    assert cut.cells == tuple(row[:run] for row in whole.cells)
    assert cut.num_micro_batches == run
    assert cut.target_tokens == sum(lengths[i] for row in cut.cells for cell in row for i in cell)


@pytest.mark.parametrize(
    ("num_items", "ranks", "accumulate", "m", "counts"),
    [
        # items, R, A, m -> micro-batches per rank for drop, pad, partial
        (8, 2, 4, 1, (4, 4, 4)),
        (7, 2, 4, 1, (0, 4, 3)),
        (5, 2, 4, 1, (0, 3, 2)),
        (1, 2, 4, 1, (0, 1, 1)),
        (3, 4, 2, 1, (0, 1, 1)),
        (7, 2, 2, 2, (0, 2, 2)),
        (9, 3, 2, 3, (0, 1, 1)),
        (0, 2, 4, 1, (0, 0, 0)),
    ],
)
def test_tails(num_items, ranks, accumulate, m, counts):
    got = tuple(
        num_micro_batches(
            num_items, ranks=ranks, accumulate=accumulate, sequences_per_micro_batch=m, tail=tail
        )
        for tail in ("drop", "pad", "partial")
    )
    assert got == counts


def test_partial_tail_by_hand():
    plan = plan_random_window([9, 4, 5, 7, 3, 8, 6], [8, 3, 4, 6, 2, 7, 5], ranks=2, accumulate=4)
    assert plan == WindowPlan(
        cells=(((0, 2), (4,), (6,)), ((1,), (3,), (5,))),
        is_padding=((False,) * 3, (False,) * 3),
        cell_target_tokens=((12, 2, 5), (3, 6, 7)),
        target_tokens=35,
    )


def test_fewer_items_than_ranks():
    plan = plan_random_window([9, 4], [8, 3], ranks=4, accumulate=2)
    assert plan.cells == (((0,),), ((1,),), ((1,),), ((1,),))
    assert plan.is_padding == ((False,), (False,), (True,), (True,))
    assert plan.target_tokens == 11


def test_mismatch():
    with pytest.raises(ValueError, match="2 lengths and 1 target_tokens"):
        plan_random_window([3, 4], [2], ranks=1, accumulate=1)


def test_members_of_a_short_window():
    assert np.array_equal(window_members(0, 0, 10, 4, 2), epoch_permutation(0, 0, 10)[8:])
    assert len(window_members(0, 0, 10, 4, 3)) == 0
