"""Plans of windows: membership, cells, tails and counts, for any sizes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DistributedSampler

from sb_lightning.balance import epoch_permutation, num_micro_batches, plan_window
from sb_lightning.balance.membership import Membership


def membership(num_sequences, *, ranks=2, accumulate=4, m=1, **options):
    return Membership(
        num_sequences=num_sequences,
        ranks=ranks,
        accumulate=accumulate,
        sequences_per_micro_batch=m,
        **{"tail": "partial", "seed": 0, **options},
    )


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
        windows = membership(length, ranks=ranks, accumulate=accumulate, m=m, seed=seed)
        members, micro_batches = windows.members(epoch, window)
        assert micro_batches == accumulate
        plan = plan_window([1.0] * size, [1] * size, ranks=ranks, accumulate=accumulate, policy="random")
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
    ranks=st.integers(1, 4),
    accumulate=st.integers(1, 4),
    m=st.integers(1, 3),
    num_sequences=st.integers(1, 70),
    limit=st.integers(1, 30),
    tail=st.sampled_from(["drop", "pad", "partial"]),
)
def test_a_limit_cuts_what_a_distributed_sampler_would_not_reach(
    ranks, accumulate, m, num_sequences, limit, tail
):
    sizes = {"ranks": ranks, "accumulate": accumulate, "m": m, "tail": tail}
    whole, cut = membership(num_sequences, **sizes), membership(num_sequences, max_batches=limit, **sizes)
    left = limit
    for window in range(whole.num_full_windows + 1):
        all_members, all_batches = whole.members(0, window)
        members, micro_batches = cut.members(0, window)
        assert micro_batches == min(all_batches, left)
        if micro_batches == all_batches:
            assert np.array_equal(members, all_members)
        else:
            assert np.array_equal(members, all_members[: ranks * micro_batches * m])
        left -= micro_batches


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


def test_members_of_a_short_window():
    windows = membership(10, ranks=2, accumulate=2)
    assert np.array_equal(windows.members(0, 2)[0], epoch_permutation(0, 0, 10)[8:])
    assert len(windows.members(0, 3)[0]) == 0
    assert windows.members(0, -1)[1] == 0
    assert membership(10, ranks=2, accumulate=2, tail="drop").members(0, 2)[1] == 0


def test_skipped_in_one_epoch_only():
    windows = membership(10, ranks=2, accumulate=2, skipped=(1, 6))
    assert np.array_equal(windows.members(1, 0)[0], epoch_permutation(0, 1, 10)[6:])
    assert [windows.num_batches(epoch) for epoch in range(3)] == [5, 2, 5]
