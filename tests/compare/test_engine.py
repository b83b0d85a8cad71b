"""Comparisons on two ranks: what arms train on, that they do not touch each other, and going on."""

from __future__ import annotations

import json

import pytest
import torch
from compare_run import BUDGET, compare

NAMES = ["baseline", "sab_dst", "sab_dst_slack", "sab_uniform"]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    path = tmp_path_factory.mktemp("corpus") / "text.jsonl"
    generator = torch.Generator().manual_seed(0)
    with path.open("w") as file:
        for index in range(40):
            length = int(torch.randint(20, 90, (1,), generator=generator)) * (1 + 4 * (index % 4 == 0))
            letters = torch.randint(97, 123, (length,), generator=generator).tolist()
            file.write(json.dumps({"text": "".join(map(chr, letters))}) + "\n")
    return path


@pytest.fixture(scope="module")
def whole(gloo_pool, source, tmp_path_factory):
    """An unbroken comparison: folder, rounds, and per rank what each segment trained on."""
    folder = tmp_path_factory.mktemp("whole") / "out"
    (first, trained), (second, others) = gloo_pool.run(compare, folder, source, NAMES)
    assert first == second, "the ranks disagree about what was measured"
    return folder, first, [trained, others]


def states(folder, number, names):
    """Weights and optimizer of each arm after a round."""
    found = {}
    for name in names:
        checkpoint = torch.load(folder / "states" / f"{number:04d}" / f"{name}.ckpt", weights_only=True)
        moments = checkpoint["optimizer_states"][0]["state"]
        found[name] = {
            **checkpoint["state_dict"],
            **{f"{i}.{key}": torch.as_tensor(v) for i, m in moments.items() for key, v in m.items()},
        }
    return found


def assert_same(first, second):
    assert first.keys() == second.keys()
    for name, tensors in first.items():
        assert tensors.keys() == second[name].keys()
        for key, tensor in tensors.items():
            assert torch.equal(tensor, second[name][key]), f"{name}: {key} differs"


def without_times(rounds):
    """All that does not depend on how fast the machine is."""
    times = {"busy_ms", "wall_ms", "wait_ms", "plan_ms", "tune_ms"}
    return [
        (each.number, each.order, each.curves, name, {k: v for k, v in vars(w).items() if k not in times})
        for each in rounds
        for name, windows in each.windows.items()
        for w in windows
    ]


def test_every_arm_trains_the_same_windows_and_none_is_left_out(whole):
    _, rounds, trained = whole
    by_arm = {name: {} for name in NAMES}
    orders = [name for each in rounds for name in each.order]
    assert len(orders) == len(trained[0]) == 2 * len(NAMES)
    for rank in trained:
        for name, segment in zip(orders, rank, strict=True):
            for step, ids in segment:
                by_arm[name].setdefault(step, []).extend(ids)
    windows = {name: {s: sorted(ids) for s, ids in found.items()} for name, found in by_arm.items()}
    assert sorted(windows["baseline"]) == [0, 1, 2, 3]
    assert all(found == windows["baseline"] for found in windows.values())
    # 2 ranks x 2 micro-batches.
    assert all(len(ids) == 4 for ids in windows["baseline"].values())
    # Dealt differently, and not all on one rank.
    assert trained[0][0] != trained[0][1]


def test_what_is_measured_makes_sense(whole):
    _, rounds, _ = whole
    assert [each.order[0] for each in rounds] == NAMES[:2]
    for each in rounds:
        assert list(each.windows) == NAMES
        for name, windows in each.windows.items():
            assert [w.number for w in windows] == [2 * each.number, 2 * each.number + 1]
            assert all(w.wall_ms >= max(map(sum, w.busy_ms)) > 0 for w in windows), name
            assert all(w.rows > 0 for w in windows) == (name not in ("baseline",))
            assert all((w.tune_ms > 0) == ("dst" in name) for w in windows)
            assert all(w.decisions > 0 for w in windows) == ("dst" in name)
    members = [{w.members for w in windows} for windows in rounds[1].windows.values()]
    assert all(found == members[0] for found in members)
    # Same weights and same windows: the first losses differ by rounding, and by what tuning has left out.
    losses = {name: windows[0].loss for name, windows in rounds[0].windows.items()}
    assert losses["sab_uniform"] == pytest.approx(losses["baseline"], rel=1e-5)
    assert all(loss == pytest.approx(losses["baseline"], rel=0.02) for loss in losses.values())


def test_the_control_changes_coverage_by_what_tuning_did(whole):
    _, rounds, _ = whole
    tuned = rounds[0].windows["sab_dst"]
    change = sum(w.coverage_change for w in tuned) / sum(w.rows for w in tuned)
    curve = rounds[0].curves["sab_uniform"]
    assert curve.budget == BUDGET
    budget = rounds[1].curves["sab_uniform"].budget
    assert budget == rounds[1].windows["sab_uniform"][0].budget
    errors = [abs(curve.change(k) / curve.rows - change) for k in range(1, len(curve.sums) + 1)]
    assert errors[budget - 1] == min(errors)


def test_the_probe_finds_what_the_tuned_arms_measure(whole):
    _, rounds, _ = whole
    # Before the first step all arms have the same weights, and the same rows of the same sequences.
    windows = rounds[0].windows
    rows = sum(w.rows for w in windows["sab_dst"])
    assert rounds[0].curves["sab_uniform"].rows == rows
    curve = rounds[0].curves["sab_uniform"]
    assert curve.sums[0] == 0
    assert curve.sums[-1] == pytest.approx(rows, rel=1e-5)
    assert list(curve.sums) == sorted(curve.sums)


@pytest.mark.parametrize("name", ["baseline", "sab_dst_slack"])
def test_an_arm_alone_is_the_arm_among_others_bit_for_bit(name, whole, gloo_pool, source, tmp_path):
    folder, rounds, _ = whole
    (alone, _), _ = gloo_pool.run(compare, tmp_path / "out", source, [name])
    assert_same(states(tmp_path / "out", 1, [name]), states(folder, 1, [name]))
    assert [w.loss for each in alone for w in each.windows[name]] == [
        w.loss for each in rounds for w in each.windows[name]
    ]


def test_after_a_kill_the_same_rounds_are_run(whole, gloo_pool, source, tmp_path):
    folder, rounds, _ = whole
    # In the middle of the second round.
    for found, _ in gloo_pool.run(broken_off, tmp_path / "out", source, len(NAMES) + 2):
        assert found is None
    results = gloo_pool.run(compare, tmp_path / "out", source, NAMES)
    again, segments = results[0]
    assert without_times(again) == without_times(rounds)
    # The finished round is not run again, the broken-off one is.
    assert len(segments) == len(NAMES)
    assert_same(states(tmp_path / "out", 1, NAMES), states(folder, 1, NAMES))
    done, segments = gloo_pool.run(compare, tmp_path / "out", source, NAMES)[0]
    assert without_times(done) == without_times(rounds)
    assert segments == []


def broken_off(folder, source, fail_at):
    return compare(folder, source, NAMES, fail_at=fail_at)


def test_a_launch_ends_after_the_round_in_which_its_time_is_up(gloo_pool, source, tmp_path):
    names = ["baseline"]
    for number in (1, 2):
        results = gloo_pool.run(limited, tmp_path / "out", source, names)
        assert [len(found) for found, _ in results] == [number, number]


def limited(folder, source, names):
    return compare(folder, source, names, limit_s=0.0)
