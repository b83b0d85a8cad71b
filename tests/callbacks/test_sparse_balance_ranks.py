"""DST on two ranks: one window, one anchor, the same store, and errors that reach every rank."""

from __future__ import annotations

import pytest
import torch

RANKS = {"strategy": "ddp", "devices": 2, "use_distributed_sampler": False}


def train(folder, settings, options=None):
    """Train on this rank of two."""
    from sparse_run import build, fit, records, tuning, weights

    options = dict(options or {})
    checkpointing = options.pop("checkpointing", None)
    module = fit(
        folder, None if settings is None else tuning(**settings),
        module={"model": build(checkpointing=checkpointing), **options.pop("module", {})},
        **{**RANKS, **options},
    )  # fmt: skip
    return {
        "seen": module.seen,
        "taus": [t.tau_us.item() for t in module.targets if t is not None],
        "records": [r.tolist() for r in records(module)],
        "weights": weights(module),
        "gradients": module.gradients,
        "logged": [{k: v for k, v in w.items() if "time/" not in k} for w in module.logged],
        "store": module.sampler.store.digest(),
        "version": module.sampler.store.version,
        "losses": module.losses,
    }


def disagree(folder, settings):
    import torch.distributed as dist
    from sparse_run import COST, AnalyticCost

    own = dict(settings[dist.get_rank()])
    if "table" in own:
        own["table"] = AnalyticCost(COST.shape)
    try:
        train(folder, own)
    except RuntimeError as error:
        return str(error)
    return None


@pytest.fixture(scope="module")
def pair(gloo_pool, tmp_path_factory):
    return gloo_pool.run(train, tmp_path_factory.mktemp("pair"), {})


def test_the_straggler_of_a_window_gets_sparser_and_who_waits_denser(pair):
    from sparse_run import BUDGET, LENGTHS

    below = above = 0
    for rank in pair:
        for ids, tau, record in zip(rank["seen"], rank["taus"], rank["records"], strict=True):
            layers = torch.tensor(record)
            budgets, after, before = layers.unbind(-1)
            assert ((after - before).abs() <= 0.3 + 1e-5).all()
            below += int((budgets < BUDGET).sum())
            above += int((budgets > BUDGET).sum())
            if (budgets > BUDGET).any():
                assert sum(LENGTHS[i] for i in ids) < 256
                assert tau > 0
    assert below > 0
    assert above > 0


def test_both_ranks_steer_to_one_time_and_learn_the_same(pair):
    first, second = pair
    assert first["taus"] == second["taus"]
    assert first["seen"] != second["seen"]
    assert first["logged"] == second["logged"]
    assert torch.equal(first["weights"], second["weights"])
    assert (first["store"], first["version"]) == (second["store"], second["version"])
    assert first["version"] == 3


def test_tolerance_zero_trains_to_the_same_bit_as_no_callback_on_two_ranks(gloo_pool, tmp_path):
    plain = gloo_pool.run(train, tmp_path, None)
    tuned = gloo_pool.run(train, tmp_path, {"tolerance": 0.0})
    assert torch.equal(plain[0]["weights"], tuned[0]["weights"])
    assert plain[0]["losses"] == tuned[0]["losses"]


def test_gradients_are_the_same_with_checkpointing_on_two_ranks(pair, gloo_pool, tmp_path):
    again = gloo_pool.run(train, tmp_path, {}, {"checkpointing": False})
    for rank, other in zip(pair, again, strict=True):
        assert rank["records"] == other["records"]
        assert all(torch.equal(*two) for two in zip(rank["gradients"], other["gradients"], strict=True))


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ([{"tolerance": 0.3}, {"tolerance": 0.2}], "tuning.tolerance is 0.3 on rank 0 and 0.2 on rank 1"),
        ([{}, {"max_budget": 8}], "tuning.max_budget is None on rank 0 and 8 on rank 1"),
        ([{}, {"table": "other"}], "tuning.table is "),
    ],
)
def test_ranks_that_disagree_all_raise(gloo_pool, tmp_path, settings, named):
    messages = gloo_pool.run(disagree, tmp_path, settings)
    assert all(named in message for message in messages), messages


def refuse(folder):
    import torch.distributed as dist
    from sparse_run import Module, fit, tuning

    module = Module()
    try:
        fit(
            folder,
            tuning(table=None if dist.get_rank() == 0 else folder / "none.json"),
            module=module,
            **RANKS,
        )
    except (RuntimeError, ValueError) as error:
        return str(error), hasattr(module.model.model, "sb_tuner")
    return None


def test_a_file_that_one_rank_lacks_stops_them_all(gloo_pool, tmp_path):
    (first, is_attached), (second, _) = gloo_pool.run(refuse, tmp_path)
    assert first == f"The ranks go on together or not at all, and rank 1 refuses: {second}"
    assert "there is no such file" in second
    assert not is_attached


@pytest.mark.parametrize(
    "settings",
    [
        {"sync": "slot"},
        {"sync": "ema"},
        {"anchor": "slack"},
        {"anchor": "slack", "granularity": "step"},
        {"granularity": "step"},
    ],
    ids=lambda settings: "-".join(settings.values()),
)
def test_the_other_ways_tune_and_keep_the_ranks_equal(gloo_pool, tmp_path, settings):
    from sparse_run import BUDGET

    ranks = gloo_pool.run(train, tmp_path, settings, {"max_epochs": 3})
    assert ranks[0]["logged"] == ranks[1]["logged"]
    assert ranks[0]["store"] == ranks[1]["store"]
    assert torch.equal(ranks[0]["weights"], ranks[1]["weights"])
    records = [torch.tensor(record) for rank in ranks for record in rank["records"]]
    assert any((record[..., 0] != BUDGET).any() for record in records)
    if "granularity" in settings:
        assert all(torch.equal(record[0, :, 0], record[1, :, 0]) for record in records)
    if settings.get("sync") == "slot":
        assert ranks[0]["taus"] == ranks[1]["taus"]


def test_slack_is_predicted_no_slower_than_the_mean(gloo_pool, tmp_path):
    """With one budget for all layers, what was predicted is what is done."""
    logged = {}
    for anchor in ("mean", "slack"):
        options = {"max_epochs": 2, "module": {"sampler": {"policy": "latency"}}}
        logged[anchor] = gloo_pool.run(
            train, tmp_path, {"anchor": anchor, "granularity": "step", "tolerance": 0.2}, options
        )[0]["logged"]
    # The first window knows no coverage yet; in the second both know the same.
    assert logged["mean"][0] == logged["slack"][0]
    assert logged["slack"][1]["sparsity/coverage_delta"] >= logged["mean"][1]["sparsity/coverage_delta"]


def train_sharded(folder, checkpointing):
    """Train on this rank of two with fully_shard; returns what the layers did and the whole weights."""
    from lightning.pytorch.strategies import ModelParallelStrategy
    from sparse_run import Module, build, fit, records, tuning
    from torch.distributed.fsdp import fully_shard

    class Sharded(Module):
        def configure_model(self):
            if getattr(self, "is_sharded", False):
                return
            self.is_sharded = True
            mesh = self.device_mesh["data_parallel"]
            for layer in self.model.model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(self.model, mesh=mesh)

        def on_before_optimizer_step(self, optimizer):
            grads = [p.grad.full_tensor().flatten() for p in self.parameters() if p.grad is not None]
            self.gradients.append(torch.cat(grads))

    module = fit(
        folder, tuning(), module=Sharded(model=build(checkpointing=checkpointing)),
        strategy=ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1), devices=2,
        use_distributed_sampler=False,
    )  # fmt: skip
    return {"records": [r.tolist() for r in records(module)], "gradients": module.gradients}


def test_fully_shard_tunes_as_ddp(pair, gloo_pool, tmp_path):
    plain = gloo_pool.run(train_sharded, tmp_path, None)
    for rank, other in zip(pair, plain, strict=True):
        for got, want in zip(other["records"], rank["records"], strict=True):
            assert torch.equal(torch.tensor(got)[..., 0], torch.tensor(want)[..., 0])
        for got, want in zip(other["gradients"], rank["gradients"], strict=True):
            torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-5)
    again = gloo_pool.run(train_sharded, tmp_path, False)
    for rank, other in zip(plain, again, strict=True):
        assert rank["records"] == other["records"]
        assert all(torch.equal(*two) for two in zip(rank["gradients"], other["gradients"], strict=True))
