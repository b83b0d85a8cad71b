"""Samplers of a tiny model."""

from sb_lightning.balance import SparsityAwareBatchSampler
from sb_lightning.latency import AnalyticCost, ModelShape

TABLE = AnalyticCost(
    ModelShape(
        layers=2,
        query_heads=4,
        kv_heads=2,
        head_dim=32,
        hidden_size=128,
        intermediate_size=384,
        vocab_size=2048,
        block_size=64,
    )
)
POLICIES = ("random", "length", "tokens", "flops", "latency")


def batch_sampler(lengths, targets=None, **options):
    return SparsityAwareBatchSampler(lengths, targets, **{"latency": TABLE, **options})


def rank_samplers(lengths, ranks, **options):
    return [batch_sampler(lengths, ranks=ranks, rank=rank, **options) for rank in range(ranks)]
