from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
from PIL import Image

from sb_lightning.cli import main
from sb_lightning.tracking.gantt import COLORS, windows_to_show
from sb_lightning.tracking.span_file import SpanWriter, read_spans, span_path
from sb_lightning.tracking.spans import LANES
from sb_lightning.tracking.trace import chrome_trace

WORK_US = {0: 100_000, 1: 300_000}


def header(rank, ranks=2, session="a", start=1000.0):
    return {"session": session, "rank": rank, "ranks": ranks, "start_unix_s": start, "lanes": LANES}


def cell(rank, window, micro_batch=0, shift=0, work=None):
    work = (work or WORK_US[rank]) + 1000 * window
    start = 1_000_000 * window + 500_000 * micro_batch + shift
    spans = [["data", start, 10_000], ["forward", start + 10_000, work]]
    spans += [
        ["wait", start + 10_000 + work, 5000],
        ["backward", start + 10_000 + work // 2, work // 2 + 5000],
    ]
    return {
        "kind": "cell", "window": window, "step": window + 1, "epoch": 0, "micro_batch": micro_batch,
        "busy_ms": (10_000 + work) / 1e3, "tokens": 4000 * (rank + 1), "longest": 900, "num_sequences": 2,
        "sequences": [[7, 900], [8, 50]], "budget": 8.0, "predicted_ms": 90.0, "spans": spans,
    }  # fmt: skip


def write(folder, rank, lines, **fields):
    writer = SpanWriter(span_path(folder, rank), header(rank, **fields))
    writer.write(lines)
    writer.close()


@pytest.fixture
def run(tmp_path):
    """Two ranks, four windows of two micro-batches; rank 1 works three times as long."""
    for rank in (0, 1):
        lines = [cell(rank, w, m) for w in range(4) for m in range(2)]
        if rank == 0:
            metrics = {"balance/imbalance": 1.5, "time/data_ms": 10.0}
            lines += [
                {
                    "kind": "window",
                    "window": w,
                    "step": w + 1,
                    "end_us": 1_000_000 * (w + 1),
                    "metrics": metrics,
                }
                for w in range(4)
            ]
        write(tmp_path, rank, lines)
    return tmp_path


def strict(folder):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return read_spans(folder)


def test_what_was_written_is_read(run):
    for folder in (run, run / "spans"):
        spans = strict(folder)
        assert spans.ranks == 2
        assert len(spans.cells) == 16
        assert [w for _, w, _ in spans.windows] == [0, 1, 2, 3]
        first = spans.cells[0]
        assert (first.rank, first.window, first.micro_batch, first.start) == (0, 0, 0, 0.0)
        assert first.busy_ms == 110.0
        assert first.details["sequences"] == [[7, 900], [8, 50]]
        assert [cell.rank for cell in spans.cells_of(2)] == [0, 0, 1, 1]


@pytest.mark.parametrize(
    "damage",
    [
        b'{"kind":"cell","window":9,"spa',
        b'{"kind":"cell","window":9,"micro_batch":0,"busy_ms":1.0,"spans":[]}\n',
        b'{"kind":"cell","window":9,"micro_batch":0,"busy_ms":1.0,"spans":[["data",1]]}\n',
        b"\x00\xff\xfe not text\n",
        b"[1, 2]\n",
        b"{}\n",
    ],
    ids=["truncated", "no spans", "short span", "bytes", "list", "empty"],
)
def test_damaged_lines_are_left_out_and_the_file_is_named(run, damage):
    path = span_path(run, 1)
    with path.open("ab") as file:
        file.write(damage)
    with pytest.warns(UserWarning, match=r"rank_0001\.jsonl: 1 damaged line left out \(line 10\)"):
        spans = read_spans(run)
    assert len(spans.cells) == 16


def test_a_file_that_was_cut_is_continued_on_a_new_line(run):
    path = span_path(run, 0)
    with path.open("ab") as file:
        file.write(b'{"kind":"cell","window":4,"sp')
    write(run, 0, [cell(0, 5)], session="b", start=1060.0)
    with pytest.warns(UserWarning, match="1 damaged line"):
        spans = read_spans(run)
    # The second session began 60 s after the first.
    assert [c.start for c in spans.cells_of(5)] == [60.0 + 5.0]


def test_a_window_that_was_begun_again_counts_as_it_ran_last(run):
    for rank in (0, 1):
        write(run, rank, [cell(rank, 3, 0, work=50_000)], session="b", start=1100.0)
    again = [c for c in strict(run).cells_of(3) if c.micro_batch == 0]
    assert [c.busy_ms for c in again] == [63.0, 63.0]
    assert min(c.start for c in again) > 100


def test_an_unrelated_run_in_the_same_folder_replaces_the_one_before(run):
    for rank in (0, 1):
        lines = [cell(rank, w, work=50_000) for w in range(2)]
        metrics = {
            "kind": "window",
            "window": 0,
            "step": 1,
            "end_us": 9,
            "metrics": {"balance/imbalance": 1.1},
        }
        write(run, rank, [*lines, metrics][: 3 - rank], session="b", start=90_000.0)
    spans = strict(run)
    assert [(c.session, c.window, c.rank) for c in spans.cells] == [
        ("b", w, rank) for w in (0, 1) for rank in (0, 1)
    ]
    # Its clock is that of the timeline.
    assert spans.cells[0].start == 0.0
    assert spans.windows == [(9e-6, 0, {"balance/imbalance": 1.1})]


def test_a_resume_with_other_ranks_leaves_nothing_of_what_it_runs_again(run):
    write(run, 0, [cell(0, 2, work=30_000), cell(0, 3, work=30_000)], session="b", ranks=1, start=1100.0)
    spans = strict(run)
    assert [(c.window, c.rank, c.micro_batch) for c in spans.cells if c.session == "b"] == [
        (2, 0, 0),
        (3, 0, 0),
    ]
    assert [(c.window, c.rank) for c in spans.cells if c.session == "a"] == [
        (w, rank) for w in (0, 1) for rank in (0, 0, 1, 1)
    ]
    assert [w for _, w, _ in spans.windows] == [0, 1]
    assert spans.session_ranks == {"a": 2, "b": 1}
    # A window is whole with the ranks that its session has.
    assert {window for _, window in windows_to_show(spans)} <= {1, 2, 3}
    assert windows_to_show(spans)[0][1] in (2, 3)


def test_cells_behind_a_damaged_header_are_not_those_of_the_session_before(run):
    for rank in (0, 1):
        write(run, rank, [cell(rank, 3, work=50_000)], session="b", start=1100.0)
        path = span_path(run, rank)
        *before, header_line, last = path.read_bytes().splitlines(keepends=True)
        if rank == 1:
            path.write_bytes(b"".join([*before, header_line[:40], b"\n", last]))
    # The other rank's header tells when the session began.
    with pytest.warns(UserWarning, match=r"rank_0001\.jsonl: 1 damaged line"):
        spans = read_spans(run)
    assert [(c.rank, c.session, c.start) for c in spans.cells_of(3)] == [(0, "b", 103.0), (1, "b", 103.0)]
    span_path(run, 0).unlink()
    with pytest.warns(UserWarning, match=r"2 damaged lines left out|lacks rank_0000"):
        spans = read_spans(run)
    assert {c.session for c in spans.cells_of(3)} == {"a"}


def test_continuing_a_file_does_not_read_it(run, monkeypatch):
    def fail(path):
        raise AssertionError("read whole")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "read_bytes", fail)
        write(run, 0, [cell(0, 4)], session="b", start=1100.0)
    assert b"\n\n" not in span_path(run, 0).read_bytes()


def test_a_missing_rank_is_named(run):
    span_path(run, 1).unlink()
    with pytest.warns(UserWarning, match=r"lacks rank_0001\.jsonl: the run had 2 ranks"):
        spans = read_spans(run)
    assert {c.rank for c in spans.cells} == {0}


def test_no_spans_and_unknown_versions_are_errors(tmp_path):
    with pytest.raises(FileNotFoundError, match="ImbalanceMonitor"):
        read_spans(tmp_path)
    write(tmp_path, 0, [])
    with pytest.raises(ValueError, match="no whole micro-batch"):
        read_spans(tmp_path)
    path = span_path(tmp_path, 0)
    path.write_text(path.read_text().replace('"version":1', '"version":2'))
    with pytest.raises(ValueError, match="version 2: this release reads"):
        read_spans(tmp_path)


def test_the_trace_has_a_process_per_rank_a_thread_per_lane_and_counters(run):
    trace = chrome_trace(strict(run))
    assert json.loads(json.dumps(trace, allow_nan=False)) == trace
    events = trace["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {e["args"]["name"] for e in events if e["name"] == "process_name"} == {"rank 0", "rank 1"}
    used = ["data", "forward", "backward", "wait"]
    assert [names[1, LANES.index(lane) + 1] for lane in used] == used
    assert len(names) == 8
    spans = [e for e in events if e["ph"] == "X"]
    assert len(spans) == 16 * 4
    assert all(names[e["pid"], e["tid"]] == e["name"] for e in spans)
    data = next(
        e for e in spans if e["pid"] == 1 and e["args"]["window"] == 2 and e["args"]["micro_batch"] == 1
    )
    assert (data["ts"], data["dur"]) == (2_500_000.0, 10_000.0)
    assert data["args"]["tokens"] == 8000
    counters = {(e["pid"], e["name"]) for e in events if e["ph"] == "C"}
    assert {(0, "balance/imbalance"), (1, "tokens"), (1, "busy_ms"), (0, "predicted_ms")} <= counters
    assert (0, "time/data_ms") not in counters
    assert sum(e["ph"] == "i" for e in events) == 4


def test_the_windows_that_tell_most_are_whole_and_not_the_first(run):
    write(run, 0, [cell(0, 9, work=1)], session="c", start=1200.0)
    # Window 1 is the worst: what both ranks add with the window's number evens them out.
    assert windows_to_show(strict(run)) == [("median window", 2), ("worst window", 1)]


def test_one_window_is_shown_once(tmp_path):
    write(tmp_path, 0, [cell(0, 0)], ranks=1)
    assert windows_to_show(strict(tmp_path)) == [("only window", 0)]


def test_the_command_writes_both_files(run, tmp_path, capsys):
    out = tmp_path / "pictures"
    assert main(["trace", str(run), "--output", str(out)]) == 0
    assert capsys.readouterr().out.splitlines() == [str(out / "trace.json"), str(out / "trace.png")]
    assert json.loads((out / "trace.json").read_text())["otherData"] == {"ranks": 2}
    colors = {color[:3] for _, color in Image.open(out / "trace.png").getcolors(1 << 24)}
    for lane in ("data", "forward", "backward", "wait"):
        assert tuple(bytes.fromhex(COLORS[lane][1:])) in colors, lane
    assert [path.name for path in sorted(out.iterdir())] == ["trace.json", "trace.png"]


def test_the_command_draws_the_windows_asked_for_or_none(run, capsys):
    assert main(["trace", str(run), "--no-png"]) == 0
    assert not (run / "trace.png").exists()
    assert main(["trace", str(run), "--window", "3", "--window", "0"]) == 0
    assert (run / "trace.png").exists()
    capsys.readouterr()
    assert main(["trace", str(run), "--window", "4"]) == 1
    assert "--window is 4: the run has spans of the windows 0 to 3" in capsys.readouterr().err


def test_the_command_says_what_is_missing_or_damaged(run, tmp_path, capsys):
    span_path(run, 1).unlink()
    assert main(["trace", str(run), "--no-png"]) == 0
    assert "sb: warning: " in (error := capsys.readouterr().err)
    assert "lacks rank_0001.jsonl" in error
    assert main(["trace", str(tmp_path / "nowhere")]) == 1
    assert "sb: error: " in capsys.readouterr().err
    assert main(["trace"]) == 2


def test_without_matplotlib_the_error_says_what_to_do(run, monkeypatch, capsys):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    assert main(["trace", str(run)]) == 1
    assert "pip install matplotlib, or pass --no-png" in capsys.readouterr().err
    assert main(["trace", str(run), "--no-png"]) == 0


@pytest.mark.parametrize("name", ["draw_gantt", "chrome_trace"])
def test_a_failed_write_leaves_nothing_behind(run, monkeypatch, capsys, name):
    from matplotlib.figure import Figure

    def fail(self, path, **options):
        Path(path).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    if name == "draw_gantt":
        monkeypatch.setattr(Figure, "savefig", fail)
    else:
        monkeypatch.setattr(Path, "write_text", lambda self, text, **options: fail(self, self))
    assert main(["trace", str(run)]) == 1
    assert "No space left on device" in capsys.readouterr().err
    kept = {"spans", "trace.json"} if name == "draw_gantt" else {"spans"}
    assert {path.name for path in run.iterdir()} == kept


def test_more_ranks_than_fit_on_a_page(tmp_path):
    for rank in range(40):
        writer = SpanWriter(span_path(tmp_path, rank), header(rank, ranks=40))
        writer.write([cell(0, 0, work=1000 + rank)])
        writer.close()
    assert main(["trace", str(tmp_path)]) == 0
    width, height = Image.open(tmp_path / "trace.png").size
    assert height < 2.5 * width
