"""The picture shows whole windows."""

from __future__ import annotations

import pytest

from sb_lightning.tracking.gantt import draw_gantt
from sb_lightning.tracking.span_file import SpanWriter, read_spans, span_path
from sb_lightning.tracking.spans import LANES


@pytest.mark.parametrize("works_ms", [(100, 300), (300, 100)])
def test_the_longest_window_is_not_cut_off(tmp_path, monkeypatch, works_ms):
    from matplotlib.figure import Figure

    writer = SpanWriter(
        span_path(tmp_path, 0),
        {"session": "a", "rank": 0, "ranks": 1, "start_unix_s": 1000.0, "lanes": LANES},
    )
    writer.write(
        [
            {
                "kind": "cell", "window": w, "step": w + 1, "epoch": 0, "micro_batch": 0,
                "busy_ms": float(ms), "spans": [["forward", 10_000_000 * w, 1000 * ms]],
            }
            for w, ms in enumerate(works_ms)
        ]
    )  # fmt: skip
    writer.close()
    limits = []
    monkeypatch.setattr(
        Figure, "savefig", lambda self, *args, **kwargs: limits.extend(a.get_xlim() for a in self.axes)
    )
    draw_gantt(read_spans(tmp_path), tmp_path / "trace.png", [("first", 0), ("second", 1)])
    assert limits == [(0.0, pytest.approx(300.0))] * 2
