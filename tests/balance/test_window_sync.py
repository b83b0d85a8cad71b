from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace

import numpy as np
import pytest

from sb_lightning.balance import WindowSync


class Owner:
    pass


def test_the_parts_of_a_run_share_one_and_it_goes_with_the_run():
    one, other = Owner(), Owner()
    sync = WindowSync.of(one)
    assert WindowSync.of(one) is sync
    assert WindowSync.of(other) is not sync
    # What callbacks register leads back to the Trainer.
    part = sync.register("a", fill=lambda step, run=one: ([], []))
    sync.watch("plan", lambda run=one: {})
    gone = weakref.ref(one)
    del one, sync, part
    gc.collect()
    assert gone() is None
    assert WindowSync.of(other).ranks == 1


def test_one_rank_gets_its_own_payload_back():
    sync = WindowSync()
    part = sync.register("a", floats=2, ints=1, fill=lambda step: ([0.1, float("nan")], [-(2**62) - step]))
    gathered = part.collect(3)
    assert gathered.floats.shape == (1, 2)
    assert gathered.floats[0, 0] == 0.1
    assert np.isnan(gathered.floats[0, 1])
    assert gathered.ints.tolist() == [[-(2**62) - 3]]
    assert (sync.ranks, sync.rank) == (1, 0)


def test_parts_share_one_gather_per_place():
    sync, calls = WindowSync(), []
    parts = [
        sync.register(
            name, ints=1, fill=lambda step, name=name: calls.append((name, step)) or ([], [len(calls)])
        )
        for name in ("a", "b")
    ]
    for step, stage in ((1, "window"), (2, "window"), (2, "epoch"), (2, "end")):
        first, second = (part.collect(step, stage) for part in parts)
        assert int(second.ints[0, 0]) == int(first.ints[0, 0]) + 1
    assert calls == [(name, step) for step in (1, 2, 2, 2) for name in ("a", "b")]
    assert sync.num_gathers == 4


def test_who_asks_twice_for_one_place_gets_what_is_new():
    sync, calls = WindowSync(), []
    one, other = (
        sync.register(name, ints=1, fill=lambda step: calls.append(step) or ([], [len(calls)]))
        for name in "ab"
    )
    found = [one.collect(0, "epoch"), one.collect(0, "epoch"), other.collect(0, "epoch")]
    assert [gathered.ints.tolist() for gathered in found] == [[[1]], [[3]], [[4]]]
    assert sync.num_gathers == 2


def test_a_part_that_has_left_is_not_asked_and_the_others_keep_what_was_gathered():
    sync, calls = WindowSync(), []
    one, other = (
        sync.register(name, ints=1, fill=lambda step, name=name: calls.append(name) or ([], [7]))
        for name in "ab"
    )
    sync.watch("plan", dict)
    one.collect(3, "end")
    one.remove()
    assert other.collect(3, "end").ints.tolist() == [[7]]
    other.collect(4)
    assert calls == ["a", "b", "b"]
    again = sync.register("b", ints=1, fill=lambda step: ([], [8]))
    # One that was replaced takes nothing with it.
    other.remove()
    assert again.collect(4).ints.tolist() == [[8]]
    again.remove()
    sync.unwatch("plan")
    assert (sync._parts, sync._watched) == ({}, {})


def test_registering_anew_forgets_the_run_before():
    sync = WindowSync()
    sync.register("a", ints=1, fill=lambda step: ([], [1])).collect(5)
    part = sync.register("a", ints=1, fill=lambda step: ([], [2]))
    assert part.collect(5).ints.tolist() == [[2]]


@pytest.mark.parametrize(("floats", "ints"), [(0, 2), (1, 1)])
def test_a_payload_of_another_size_is_an_error(floats, ints):
    part = WindowSync().register("mine", floats=floats, ints=ints, fill=lambda step: ([], [1]))
    with pytest.raises(ValueError, match="part 'mine' filled in 0 floats and 1 ints"):
        part.collect(1)


def test_texts_and_words_of_one_rank():
    sync = WindowSync()
    assert sync.gather_texts("f\u00fcr 8 ranks") == ["f\u00fcr 8 ranks"]
    assert sync.gather_texts("") == [""]
    sync.sync_start()


# Two ranks.


def attempt(function):
    """The message of what it raises, or what it returns."""
    try:
        return function()
    except RuntimeError as error:
        return str(error)


def payloads(rank):
    sync = WindowSync()
    wide = sync.register("wide", floats=2, ints=1, fill=lambda step: ([rank + 0.5, -0.0], [2**60 + rank]))
    thin = sync.register("thin", ints=2, fill=lambda step: ([], [step, 10 * rank]))
    found = [(wide.collect(step), thin.collect(step)) for step in (1, 2)]
    texts = sync.gather_texts("x" * (1 + 9 * rank))
    return (
        [[part.floats.tolist() + part.ints.tolist() for part in pair] for pair in found],
        texts,
        sync.num_gathers,
    )


def on_each_rank(case):
    import torch.distributed as dist

    return CASES[case](dist.get_rank())


def other_parts(rank):
    sync = WindowSync()
    part = sync.register("budgets", ints=3 + rank, fill=lambda step: ([], [0] * (3 + rank)))
    return attempt(lambda: part.collect(1))


def fewer_windows(rank):
    sync = WindowSync()
    part = sync.register("a", ints=1, fill=lambda step: ([], [0]))
    part.collect(1)
    return attempt(lambda: part.collect(1, "end") if rank == 1 else part.collect(2))


def epoch_too_long(rank):
    part = WindowSync().register("a", fill=lambda step: ([], []))
    return attempt(lambda: part.collect(7, "epoch" if rank else "window"))


def disagreement(rank):
    sync = WindowSync()
    part = sync.register("a", fill=lambda step: ([], []))
    now = SimpleNamespace(step=0)
    sync.watch(
        "sampler", lambda: {"sequences": 100, "seed": 3 + (rank if now.step else 0), "epoch": rank * now.step}
    )
    part.collect(1)
    now.step = 1
    return attempt(lambda: part.collect(2))


def order(rank):
    sync = WindowSync()
    part = sync.register("a", fill=lambda step: ([], []))
    inputs = {"x": 1, "y": 2}
    sync.watch("plan", lambda: dict(sorted(inputs.items(), reverse=bool(rank))))
    return attempt(lambda: part.collect(1))


def test_two_ranks_see_the_same_payloads_in_one_gather(gloo_pool):
    first, second = gloo_pool.run(on_each_rank, "payloads")
    assert first == second
    windows, texts, num_gathers = first
    assert windows[1] == [[[0.5, -0.0], [1.5, -0.0], [2**60], [2**60 + 1]], [[], [], [2, 0], [2, 10]]]
    assert texts == ["x", "x" * 10]
    assert num_gathers == 2


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (
            "other_parts",
            'rank 0 shares {"budgets": [0, 3]} (floats, ints) and rank 1 shares {"budgets": [0, 4]}',
        ),
        ("fewer_windows", "rank 0 has done 2 optimizer steps, rank 1 ended after 1 optimizer step"),
        (
            "epoch_too_long",
            "rank 0 has done 7 optimizer steps, rank 1 ended an epoch after 7 optimizer steps",
        ),
        ("disagreement", "sampler.seed is 3 on rank 0 and 4 on rank 1"),
        ("order", "the ranks list their inputs in different orders"),
    ],
)
def test_every_rank_raises_and_names_what_differs(gloo_pool, case, message):
    first, second = gloo_pool.run(on_each_rank, case)
    assert first == second
    assert message in first
    assert "To fix it, " in first


def alone(rank):
    import torch.distributed as dist

    if rank == 1:
        return None
    # The other rank never comes.
    sync = WindowSync.of(SimpleNamespace(world_size=1))
    part = sync.register("a", ints=1, fill=lambda step: ([], [step]))
    sync.watch("plan", lambda: {"seed": 1})
    sync.sync_start()
    assert dist.get_world_size() == 2
    return sync.ranks, sync.rank, part.collect(5).ints.tolist(), sync.gather_texts("x")


def test_a_trainer_of_one_device_waits_for_nobody_in_a_process_group(gloo_pool):
    assert gloo_pool.run(on_each_rank, "alone") == [(1, 0, [[5]], ["x"]), None]


def no_gloo(rank):
    import torch.distributed as dist

    def fail(**options):
        raise RuntimeError("Unable to resolve hostname")

    real, new_group = dist.get_backend, dist.new_group
    try:
        dist.get_backend, dist.new_group = (lambda *_: "nccl"), fail
        return attempt(lambda: WindowSync().gather_words(np.zeros(1, dtype=np.int64)))
    finally:
        dist.get_backend, dist.new_group = real, new_group


def test_a_gloo_group_that_cannot_be_made_is_explained(gloo_pool):
    for message in gloo_pool.run(on_each_rank, "no_gloo"):
        assert "beside the nccl group (Unable to resolve hostname)" in message
        assert "GLOO_SOCKET_IFNAME" in message


def without_a_cpu_backend(name):
    import torch.distributed as dist

    sync = WindowSync()
    real, made = dist.get_backend, []
    new_group = dist.new_group
    try:
        dist.get_backend = lambda *_: name
        dist.new_group = lambda **options: made.append(options) or new_group(**options)
        words = sync.gather_words(np.array([dist.get_rank()], dtype=np.int64))
    finally:
        dist.get_backend, dist.new_group = real, new_group
    return words[:, 0].tolist(), made


@pytest.mark.parametrize(("backend", "made"), [("nccl", [{"backend": "gloo"}]), ("cpu:gloo,cuda:nccl", [])])
def test_a_group_of_its_own_where_the_default_one_has_no_cpu(gloo_pool, backend, made):
    assert gloo_pool.run(without_a_cpu_backend, backend) == [([0, 1], made)] * 2


CASES = {
    f.__name__: f
    for f in (payloads, other_parts, fewer_windows, epoch_too_long, disagreement, order, alone, no_gloo)
}
