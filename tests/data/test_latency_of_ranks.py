"""All ranks plan by rank zero's latency table."""

from __future__ import annotations

from dataclasses import asdict
from types import SimpleNamespace

import torch.distributed as dist

from sb_lightning.balance.budget_store import BudgetStore
from sb_lightning.balance.costs import GENERIC_SHAPE, SequenceCosts
from sb_lightning.data.latency import sync_latency
from sb_lightning.latency import AnalyticCost, Fingerprint, LatencyTable

MACHINE = {
    "device": "cpu", "processor": "A", "threads": 1, "ranks": 2, "dtype": "float32", "backend": "cpu",
    "torch": "2", "build": "1",
}  # fmt: skip


def table(fixed_ms):
    cost = AnalyticCost(GENERIC_SHAPE, micro_batch_ms=fixed_ms)
    return LatencyTable(cost.measurements, Fingerprint(**asdict(GENERIC_SHAPE), **MACHINE))


def synced(first, second):
    trainer = SimpleNamespace(world_size=2)
    found = sync_latency(trainer, first if dist.get_rank() == 0 else second)
    return None if found is None else SequenceCosts(found, budget=8, store=BudgetStore()).digest()


def test_rank_zero_s_table_serves_all(gloo_pool):
    expected = SequenceCosts(table(3.5), budget=8, store=BudgetStore()).digest()
    assert gloo_pool.run(synced, table(3.5), None) == [expected] * 2
    assert gloo_pool.run(synced, table(3.5), table(9.0)) == [expected] * 2


def test_without_one_nobody_has_one(gloo_pool):
    assert gloo_pool.run(synced, None, table(9.0)) == [None, None]
    counted = AnalyticCost(GENERIC_SHAPE)
    digests = gloo_pool.run(synced, counted, counted)
    assert digests[0] == digests[1] is not None
