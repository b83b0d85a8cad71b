"""What the sampler plans: caps, expected budgets, versions of the store, skipped sequences, gradients."""

import warnings
from collections import Counter
from dataclasses import asdict

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampler_cases import POLICIES, TABLE, batch_sampler, rank_samplers

from sb_lightning.balance import BudgetStore, SparsityAwareBatchSampler, plan_window
from sb_lightning.balance.planner import CannotPack
from sb_lightning.latency import Fingerprint, LatencyTable
from sb_lightning.training import window_loss_scale

LONG_TAIL = [256, 300, 8192, 400, 7000, 256, 512, 4000, 300, 2048, 333, 256, 5000, 700, 900, 1200]


def test_latency_evens_out_what_random_does_not():
    sampler = batch_sampler(LONG_TAIL, ranks=2, rank=0, accumulate=4, budget=8)
    for window in range(2):
        plans = {policy: sampler.plan(0, window, policy=policy) for policy in POLICIES}
        assert plans["latency"].makespan_ms == min(plan.makespan_ms for plan in plans.values())
        assert plans["latency"].makespan_ms < plans["random"].makespan_ms
        fsdp = sampler.plan(0, window, objective="fsdp")
        assert fsdp.slot_sum_ms <= min(plan.slot_sum_ms for plan in plans.values())


def test_a_smaller_budget_is_a_shorter_time():
    dense, sparse = (batch_sampler(LONG_TAIL, accumulate=4, budget=k) for k in (None, 8))
    assert sparse.plan(0, 0).makespan_ms < dense.plan(0, 0).makespan_ms
    cell = next(iter(sparse))
    assert cell.budgets == [8]
    assert cell.predicted_ms == pytest.approx(TABLE.micro_batch_ms([sparse.lengths[cell[0]]], [8]), abs=0.002)
    assert next(iter(dense)).budgets is None


def test_fixed_cost_counts_once_per_cell():
    sampler = batch_sampler([100, 200], accumulate=1, sequences_per_micro_batch=2, budget=8)
    assert sampler.plan(0, 0).predicted_ms[0][0] == pytest.approx(
        TABLE.micro_batch_ms([100, 200], [8, 8]), abs=0.003
    )


@given(
    lengths=st.lists(st.integers(1, 60), min_size=8, max_size=60),
    ranks=st.integers(1, 3),
    m=st.integers(1, 3),
    policy=st.sampled_from(POLICIES),
    overflow=st.sampled_from(["raise", "truncate"]),
    cap=st.integers(30, 130),
)
@settings(max_examples=150, deadline=None)
def test_cap_is_never_exceeded(lengths, ranks, m, policy, overflow, cap):
    options = {"accumulate": 2, "sequences_per_micro_batch": m, "policy": policy, "tail": "partial"}
    try:
        samplers = rank_samplers(lengths, ranks, max_tokens=cap, overflow=overflow, **options)
        cells = [cell for sampler in samplers for cell in sampler]
    except ValueError as error:
        refused = (overflow, "max_tokens" in str(error))
    else:
        refused = None
    if refused:
        assert refused == ("raise", True)
        return
    seen = Counter(i for cell in cells if not cell.is_padding for i in cell)
    assert sorted(seen) == list(range(len(lengths)))
    for cell in cells:
        cut = cell.max_length or 10**9
        kept = [min(lengths[i], cut) for i in cell]
        assert sum(kept) <= cap
        if not cell.is_padding:
            assert cell.target_tokens == sum(n - 1 for n in kept)


def test_cap_that_a_later_window_breaks_is_found_before_training():
    lengths = [10] * 12 + [60, 60, 60, 10]
    sampler = batch_sampler(lengths, accumulate=2, sequences_per_micro_batch=2, max_tokens=100)
    broken = []
    for epoch in range(6):
        sampler.set_epoch(epoch)
        members = [sampler.members(epoch, w) for w in range(sampler.num_windows)]
        impossible = any((sampler.lengths[m] > 50).sum() > 2 for m in members)
        broken.append(impossible)
        if impossible:
            with pytest.raises(ValueError, match="max_tokens"):
                next(iter(sampler))
        else:
            next(iter(sampler))
    assert len(set(broken)) == 2


def test_single_sequence_over_the_cap():
    with pytest.raises(
        ValueError, match="1 sequences are longer than max_tokens=50; the first is sequence 1"
    ):
        batch_sampler([40, 60, 30], max_tokens=50)
    cut = batch_sampler([40, 60, 30], max_tokens=50, overflow="truncate")
    assert cut.lengths.tolist() == [40, 50, 30]
    assert cut.target_tokens.tolist() == [39, 49, 29]
    with pytest.raises(ValueError, match="how many targets are left"):
        batch_sampler([40, 60, 30], [39, 20, 29], max_tokens=50, overflow="truncate")


def test_expected_budgets_come_from_the_store():
    store = BudgetStore(rate=1.0)
    sampler = batch_sampler([8192] * 4, accumulate=2, budget=8, store=store, sequence_ids=[10, 11, 12, 13])
    before = sampler.plan(0, 1)
    store.update(1, ids=[10, 11, 12, 13], lengths=[8192] * 4, budgets=[4, 4, 32, 32])
    sampler.lag = 0
    sampler.set_epoch(0)
    plan = sampler.plan(0, 1, objective="fsdp")
    members = sampler.members(0, 1)
    expected = [
        [TABLE.micro_batch_ms([8192], [4 if members[i] < 2 else 32]) for (i,) in row] for row in plan.cells
    ]
    assert np.allclose(plan.predicted_ms, expected, atol=0.003)
    assert plan.predicted_ms != before.predicted_ms


def test_plans_use_the_version_of_their_lag():
    """What a rank has learnt since does not change a plan that another rank made earlier."""
    early, late = (
        batch_sampler([8192] * 40, accumulate=4, budget=8, store=BudgetStore(rate=1.0)) for _ in range(2)
    )
    early.lag = late.lag = 3
    for sampler in (early, late):
        sampler.store.keep(4)
    window = [(1, 8192, 2.0), (2, 8192, 60.0)]

    def learn(sampler, number):
        ids, lengths, budgets = zip(*window, strict=True)
        sampler.store.update(number, ids=ids, lengths=lengths, budgets=[b + number for b in budgets])

    for number in range(1, 6):
        learn(late, number)
    plans = []
    for number in range(1, 6):
        # Window 5 of 0, 1, ... is planned with what windows 0 and 1 have taught.
        plans.append(early.plan(0, number + 2))
        learn(early, number)
    assert plans[2] == late.plan(0, 5)
    assert late.plan(0, 5) != late.plan(0, 4)


def test_numbers_of_windows_go_on_over_epochs():
    sampler = batch_sampler([9] * 10, accumulate=4)
    assert [sampler.window_number(e, w) for e, w in [(0, 0), (0, 2), (1, 0), (2, 1)]] == [0, 2, 3, 7]


@pytest.mark.parametrize("policy", POLICIES)
def test_skipped_sequences_are_not_trained_on_again(policy):
    lengths = list(range(2, 40))
    first = rank_samplers(lengths, 2, accumulate=2, seed=3, policy=policy)
    done = [i for sampler in first for cell in list(sampler)[:6] for i in cell]
    again = rank_samplers(lengths, 3, accumulate=3, seed=3, policy=policy)
    for sampler in again:
        sampler.skipped = len(done)
    rest = [i for sampler in again for cell in sampler if not cell.is_padding for i in cell]
    assert sorted(done + rest) == list(range(38))
    assert {len(sampler) for sampler in again} == {len(list(again[0]))}
    for sampler in again:
        sampler.set_epoch(1)
        assert sampler.skipped == 0
    full = [i for sampler in again for cell in sampler if not cell.is_padding for i in cell]
    assert sorted(full) == list(range(38))


def test_state_is_equal_on_all_ranks_and_restores_plans():
    samplers = rank_samplers([8192, 300] * 10, 2, accumulate=2, budget=8)
    for sampler in samplers:
        sampler.set_epoch(1)
        sampler.skipped = 4
        sampler.store.update(1, ids=[3], lengths=[8192], budgets=[20.0])
    states = [sampler.state_dict() for sampler in samplers]
    assert str(states[0]) == str(states[1])
    again = batch_sampler([8192, 300] * 10, ranks=2, rank=0, accumulate=2, budget=8)
    again.load_state_dict(states[0])
    again.set_epoch(1)
    assert again.skipped == 4
    assert [again.plan(1, w) for w in range(4)] == [samplers[0].plan(1, w) for w in range(4)]
    assert again.plan_inputs() == samplers[0].plan_inputs()
    with pytest.raises(ValueError, match="version 7"):
        again.load_state_dict({**states[0], "version": 7})


def test_inputs_of_the_plan_name_what_differs():
    base = batch_sampler([10, 20, 30], accumulate=2, budget=8)
    others = {
        "lengths": batch_sampler([10, 20, 31], [9, 19, 29], accumulate=2, budget=8),
        "target_tokens": batch_sampler([10, 20, 30], [9, 19, 28], accumulate=2, budget=8),
        "latency": batch_sampler([10, 20, 30], accumulate=2, budget=9),
        "policy": batch_sampler([10, 20, 30], accumulate=2, budget=8, policy="random"),
        "objective": batch_sampler([10, 20, 30], accumulate=2, budget=8, objective="fsdp"),
        "seed": batch_sampler([10, 20, 30], accumulate=2, budget=8, seed=1),
        "max_tokens": batch_sampler([10, 20, 30], accumulate=2, budget=8, max_tokens=64),
    }
    expected = base.plan_inputs()
    for name, other in others.items():
        found = other.plan_inputs()
        assert [key for key in expected if expected[key] != found[key]] == [name]
    base.store.update(1, ids=[1], lengths=[10], budgets=[2])
    assert base.plan_inputs()["store"] != expected["store"]


def test_one_warning_without_a_table():
    with pytest.warns(UserWarning, match="no latency table"):
        SparsityAwareBatchSampler([5, 6, 7])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        SparsityAwareBatchSampler([5, 6, 7], policy="tokens")


@pytest.mark.parametrize(
    ("options", "error", "names"),
    [
        ({"latency": "nowhere.json"}, ValueError, "nowhere.json.*no such file"),
        ({"latency": 3.0}, TypeError, "latency is a float"),
        ({"budget": 0}, ValueError, "budget is 0"),
        ({"objective": "pipe"}, ValueError, "objective is 'pipe'"),
        ({"overflow": "drop"}, ValueError, "overflow is 'drop'"),
        ({"max_tokens": 0}, ValueError, "max_tokens is 0"),
        ({"sequence_ids": [1, 2]}, ValueError, "3 lengths and 2 sequence_ids"),
        ({"targets": [0.5, 1.5, 2.5]}, TypeError, "target_tokens holds 0.5"),
    ],
    ids=str,
)
def test_refused(options, error, names):
    with pytest.raises(error, match=names):
        batch_sampler([4, 5, 6], options.pop("targets", None), **options)


def test_table_from_a_file(tmp_path):
    machine = {"device": "cpu", "processor": "A", "threads": 1, "ranks": 2, "dtype": "float32"}
    machine |= {"backend": "cpu", "torch": "2", "build": "1"}
    fingerprint = Fingerprint(**asdict(TABLE.shape), **machine)
    LatencyTable(TABLE.measurements, fingerprint).save(tmp_path / "table.json")
    sampler = batch_sampler([400, 500, 600], latency=tmp_path / "table.json", budget=4)
    assert sampler.plan(0, 0).predicted_ms[0][0] > 0


@pytest.mark.parametrize("policy", POLICIES)
def test_gradient_is_that_of_one_big_batch(policy):
    """Moving a sequence to another cell changes the gradient by rounding only."""
    torch.manual_seed(0)
    lengths = [3, 17, 5, 9, 2, 30, 4, 8, 6, 11, 2, 7, 5]
    data = [torch.randn(n, 6, dtype=torch.float64) for n in lengths]
    weight = torch.randn(6, dtype=torch.float64, requires_grad=True)

    def token_losses(index):
        return (data[index] @ weight).pow(2)[1:].sum()

    ranks, accumulate = 2, 2
    samplers = rank_samplers(
        lengths, ranks, accumulate=accumulate, policy=policy, sequences_per_micro_batch=2
    )
    for window in range(samplers[0].num_windows):
        members = samplers[0].members(0, window)
        whole = sum(token_losses(i) for i in members) / sum(lengths[i] - 1 for i in members)
        (expected,) = torch.autograd.grad(whole, weight)
        total = torch.zeros_like(weight)
        for sampler in samplers:
            for cell in (c for c in sampler if c.window == window):
                scale = window_loss_scale(cell.window_target_tokens, accumulate=accumulate, ranks=ranks)
                loss = sum(token_losses(i) for i in cell) * (0 if cell.is_padding else scale)
                (gradient,) = torch.autograd.grad(loss, weight)
                # As Lightning and DistributedDataParallel do.
                total += gradient / accumulate / ranks
        torch.testing.assert_close(total, expected, rtol=1e-10, atol=1e-12)


def test_it_can_be_printed():
    sampler = batch_sampler([5] * 10, ranks=2, rank=1, accumulate=2)
    assert "10 sequences, rank 1 of 2" in repr(sampler)
    assert "3 windows" in repr(sampler)
    with pytest.raises(IndexError, match="rank is -1 of 2"):
        sampler.cell(0, 0, rank=-1)


def test_whether_a_window_packs_does_not_depend_on_what_its_items_cost():
    """A plan that fits today must not fail in mid-epoch because a store has learnt."""
    rng = np.random.default_rng(0)
    for _ in range(300):
        lengths = rng.integers(1, 60, 24).tolist()
        cap = int(np.ceil(sum(lengths) / 6)) + int(rng.integers(0, 6))
        outcomes = set()
        for seed in range(4):
            costs = np.random.default_rng(seed).uniform(1, 99, 24)
            options = {
                "ranks": 2,
                "accumulate": 3,
                "max_tokens": max(cap, max(lengths)),
                "equal_counts": True,
            }
            try:
                plan_window(costs, lengths, **options)
                outcomes.add("fits")
            except CannotPack:
                outcomes.add("does not fit")
        try:
            plan_window(costs, lengths, policy="tokens", **options)
        except CannotPack:
            continue
        assert outcomes == {"fits"}


def test_a_second_cut_with_targets_of_their_own_is_refused():
    options = {"max_tokens": 100, "overflow": "truncate", "sequences_per_micro_batch": 2}
    sampler = batch_sampler([60, 60], [10, 10], **options)
    with pytest.raises(ValueError, match="how many targets are left"):
        list(sampler)
    cut = batch_sampler([60, 60], budget=8, **options)
    with pytest.warns(UserWarning, match="2 of its 2 sequences are cut to 50 tokens"):
        (cell,) = cut
    assert (cell.max_length, cell.target_tokens) == (50, 98)


def test_a_window_of_more_sequences_than_tokens_is_found_before_training():
    sampler = batch_sampler(
        [5] * 40, accumulate=3, sequences_per_micro_batch=300, max_tokens=8, overflow="truncate"
    )
    with pytest.raises(ValueError, match="max_tokens"):
        sampler.check_epoch()


def test_the_digest_of_a_plan_names_the_sequences():
    a, b = (batch_sampler([9] * 12, accumulate=2, policy="random", seed=seed) for seed in (0, 1))
    assert a.plan(0, 0) == b.plan(0, 0)
    assert a.plan_digest(0, 0) != b.plan_digest(0, 0)
    assert a.plan_digest(0, 0) == batch_sampler([9] * 12, accumulate=2, policy="random").plan_digest(0, 0)


def test_a_store_that_loads_a_state_forgets_its_own_factors():
    store, fresh = BudgetStore(), BudgetStore()
    store.recalibrate(1, TABLE, lengths=[[8192]], budgets=[[8]], measured_ms=[5000.0])
    for each in (store, fresh):
        each.load_state_dict(BudgetStore().state_dict())
        each.recalibrate(1, TABLE, lengths=[[8192]], budgets=[[8]], measured_ms=[900.0])
    assert store.costs(1, TABLE).predict(8192, 8) == fresh.costs(1, TABLE).predict(8192, 8)
