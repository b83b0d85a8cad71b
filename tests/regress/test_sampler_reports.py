"""Failures that users of other batch samplers have reported, under a Trainer on two ranks; one case each.

Others of the same kind are told by the docstrings of tests/balance/test_loader*.py, of
tests/callbacks/test_balanced_sampling.py and of test_data_reports.py beside this file.
"""

import pytest
import torch
from balanced_run import fit, make_loader

from sb_lightning.callbacks import BalancedSampling

SETS = {
    "fewer than ranks": [9],
    "one more than a window": [5, 900, 3, 3, 40, 7, 11],
    "one long": [4000, *[2] * 12],
    "all equal": [8] * 11,
}


def train_all(folder, policy):
    """Every data set in turn, each rank with a random state of its own."""
    found = {}
    for name, lengths in SETS.items():
        torch.manual_seed(torch.distributed.get_rank())
        data = {"lengths": lengths, "policy": policy, "accumulate": 3}
        module = fit(folder, BalancedSampling(), data=data, devices=2, strategy="ddp")
        found[name] = (module.trainer.global_step, [record[:3] for record in module.records])
    return found


@pytest.mark.parametrize("policy", ["random", "length", "tokens"])
def test_no_data_set_makes_the_ranks_wait_for_each_other(policy, tmp_path, gloo_pool):
    """Uneven batches, or batches by a rank's own random state, hang: axolotl 494, PL 20404, 9851, 10947."""
    first, second = gloo_pool.run(train_all, tmp_path, policy)
    for name, lengths in SETS.items():
        (steps, mine), (other_steps, theirs) = first[name], second[name]
        assert steps == other_steps == 2 * -(-len(lengths) // 6), name
        assert [record[:2] for record in mine] == [record[:2] for record in theirs], name
        for epoch in range(2):
            seen = [i for record in mine + theirs if record[0] == epoch for i in record[2]]
            assert set(seen) == set(range(len(lengths))), name
            # Only a last window of fewer sequences than ranks repeats one.
            assert len(seen) == len(lengths) + (len(lengths) % 6 == 1), name


@pytest.mark.parametrize(("items", "per_cell"), [(9, 3), (5, 2), (13, 4)])
def test_no_rank_is_left_empty(items, per_cell):
    """Rounding up gave [3, 3, 3, 0]: verl 6869, 6786; counts that do not divide crashed: verl 4152."""
    ranks = 4
    loaders = [
        make_loader(
            lengths=[7] * items,
            ranks=ranks,
            rank=rank,
            accumulate=1,
            sequences_per_micro_batch=per_cell,
            policy="tokens",
        )
        for rank in range(ranks)
    ]
    counts = [[len(batch[0]) for batch in loader] for loader in loaders]
    assert len({len(row) for row in counts}) == 1
    assert all(min(row) >= 1 for row in counts)
    assert sum(map(sum, counts)) == items


def test_a_state_from_before_the_last_batch_is_not_the_last(tmp_path):
    """A "just finished" state resumed as an empty or a repeated epoch: meta-pytorch/data 1513, 1437."""
    records = fit(tmp_path, BalancedSampling(), save=True).records
    for checkpoint, first in (("b-0-16", (0, 15)), ("b-0-17", (1, 0)), ("e-0", (1, 0)), ("b-1-17", None)):
        got = fit(tmp_path, BalancedSampling(), resume=checkpoint).records
        assert got == ([] if first is None else [record for record in records if record[:2] >= first])
