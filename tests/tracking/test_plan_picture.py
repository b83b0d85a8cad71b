"""The picture of plans."""

from __future__ import annotations

import numpy as np
import pytest

from sb_lightning.tracking import plan_picture
from sb_lightning.tracking.plan_picture import MAX_RANKS, PlannedWindow, draw_plans, starts_of


def window(times, tokens=None, is_padding=None):
    times = np.array(times, dtype=float)
    tokens = np.full(times.shape, 100) if tokens is None else np.array(tokens)
    padding = np.zeros(times.shape, dtype=bool) if is_padding is None else np.array(is_padding)
    return PlannedWindow(title="random: median window (3)", times=times, tokens=tokens, is_padding=padding)


def test_ranks_meet_at_the_windows_end_or_after_every_slot():
    times = np.array([[1.0, 2.0], [3.0, 1.0]])
    starts, ends = starts_of(times, "ddp")
    assert starts.tolist() == [[0, 1], [0, 3]]
    assert ends.tolist() == [[1, 4], [3, 4]]
    starts, ends = starts_of(times, "fsdp")
    assert starts.tolist() == [[0, 3], [0, 3]]
    assert ends.tolist() == [[3, 5], [3, 5]]
    assert times.tolist() == [[1, 2], [3, 1]]


@pytest.mark.parametrize(
    ("panel", "objective"),
    [
        (window([[5.0]]), "ddp"),
        (window([[0.0, 0.0], [0.0, 0.0]], [[0, 0], [0, 0]]), "fsdp"),
        (window([[1.0, 9.0], [2.0, 3.0]], [[10, 9000], [30, 40]], [[False, False], [False, True]]), "fsdp"),
        (window(np.arange(1, 121).reshape(40, 3) * 1e4), "ddp"),
    ],
    ids=["one-cell", "no-time", "pad", "many-ranks"],
)
def test_every_plan_can_be_drawn(panel, objective, tmp_path, recwarn):
    path = tmp_path / "plan.png"
    draw_plans([[panel, panel]], path, objective=objective, heading="docs: 2 ranks")
    assert path.read_bytes().startswith(b"\x89PNG")
    assert [p.name for p in tmp_path.iterdir()] == ["plan.png"]
    assert not recwarn.list


def test_bars_and_waits_are_where_the_plan_says(tmp_path, monkeypatch):
    drawn = []
    original = plan_picture._draw_panel
    monkeypatch.setattr(
        plan_picture, "_draw_panel", lambda axis, *rest: (original(axis, *rest), drawn.append(axis))
    )
    draw_plans([[window([[1.0, 2.0], [3.0, 1.5]])]], tmp_path / "p.svg", objective="ddp")
    (axis,) = drawn
    assert axis.get_title(loc="left") == "random: median window (3): 4.5 ms, 17% waiting"
    spans = [
        [(path.vertices[:, 0].min(), path.vertices[:, 0].max()) for path in bars.get_paths()]
        for bars in axis.collections
    ]
    assert spans == [[(0, 1), (1, 3)], [(3, 4.5)], [(0, 3), (3, 4.5)], []]
    hatched = [bars.get_hatch() is not None for bars in axis.collections]
    assert hatched == [False, True, False, True]


def test_long_windows_are_drawn_in_seconds(tmp_path):
    path = tmp_path / "p.svg"
    draw_plans([[window([[30_000.0], [10_000.0]])]], path, objective="ddp")
    assert path.exists()


def test_the_slowest_rank_is_always_shown():
    times = np.ones((100, 2))
    times[57] = 9
    shown = plan_picture._shown(times)
    assert 57 in shown
    assert len(shown) <= MAX_RANKS
    assert plan_picture._shown(times[:MAX_RANKS]) == list(range(MAX_RANKS))


def test_a_failure_leaves_no_file(tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(Figure, "savefig", interrupted)
    with pytest.raises(KeyboardInterrupt):
        draw_plans([[window([[1.0]])]], tmp_path / "plan.png", objective="ddp")
    assert list(tmp_path.iterdir()) == []
