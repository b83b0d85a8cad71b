"""Span lines that no run writes: they are left out with a warning, and the trace stays strict JSON."""

from __future__ import annotations

import json
import math
import warnings

import pytest

from sb_lightning.cli import main
from sb_lightning.cli.trace import write_trace
from sb_lightning.tracking.span_file import FORMAT, SpanWriter, read_spans, span_path
from sb_lightning.tracking.trace import chrome_trace

HEADER = {
    "kind": "header", "format": FORMAT, "version": 1, "session": "a", "rank": 0, "ranks": 1,
    "start_unix_s": 1000.0,
}  # fmt: skip
CELL = {
    "kind": "cell", "session": "a", "window": 2, "step": 3, "epoch": 0, "micro_batch": 0, "busy_ms": 3.0,
    "tokens": 90, "longest": 60, "num_sequences": 2, "sequences": [[7, 60], [-1, 30]], "budget": 8.0,
    "predicted_ms": 4.0, "is_padding": False, "spans": [["forward", 2000, 900], ["wait", 2900, 0]],
    "of_later_release": {"a": [1, None, "b"]},
}  # fmt: skip
WINDOW = {
    "kind": "window", "session": "a", "window": 2, "step": 3, "end_us": 3000,
    "metrics": {"balance/imbalance": 1.5},
}  # fmt: skip
# Written out in the line as they are.
HUGE, DIGITS, NAN = "1e999", "9" * 400, "NaN"
NUMBERS = [HUGE, "-1e999", DIGITS, NAN, "null", "true", '"1"', "[]"]
COUNTS = [*NUMBERS, "-1", "1.5"]


def damaged(line, **fields):
    """Return the line with fields replaced by JSON texts."""
    texts = {**{name: json.dumps(value) for name, value in line.items()}, **fields}
    return "{" + ",".join(f'"{name}":{text}' for name, text in texts.items()) + "}"


DAMAGE = {
    "deep": "[" * 100_000,
    "deep field": damaged(CELL, later="[" * 300 + "]" * 300),
    "5000 digits": damaged(CELL, tokens="9" * 5000),
    "kind": damaged(CELL, kind="[1]"),
    "rank not below ranks": damaged(HEADER, rank="1"),
    "micro-batch that fills the memory": damaged(CELL, micro_batch="1000000000000"),
    "session a number": damaged(CELL, session="1"),
    "is_padding": damaged(CELL, is_padding="2"),
    "later field": damaged(CELL, later='{"a":[NaN]}'),
    **{f"version {text[:5]}": damaged(HEADER, version=text) for text in (HUGE, NAN)},
    **{f"ranks {text[:5]}": damaged(HEADER, ranks=text) for text in (*COUNTS, "0", "1000001")},
    **{f"rank {text[:5]}": damaged(HEADER, rank=text) for text in COUNTS},
    **{f"start_unix_s {text[:5]}": damaged(HEADER, start_unix_s=text) for text in (*NUMBERS, "1e300")},
    **{
        f"{name} {text[:5]}": damaged(CELL, **{name: text})
        for name in ("window", "micro_batch", "step", "epoch", "tokens", "longest", "num_sequences")
        for text in COUNTS
    },
    **{
        f"{name} {text[:5]}": damaged(CELL, **{name: text})
        for name in ("busy_ms", "predicted_ms", "budget")
        for text in NUMBERS
    },
    **{f"span start {text[:5]}": damaged(CELL, spans=f'[["forward",{text},1]]') for text in NUMBERS},
    **{
        f"span length {text[:5]}": damaged(CELL, spans=f'[["forward",1,{text}]]') for text in (*NUMBERS, "-1")
    },
    **{
        f"spans {text}": damaged(CELL, spans=text)
        for text in ("1", "{}", "[1]", '["abc"]', "[[1,2,3]]", '[["unknown",1,2]]')
    },
    **{
        f"sequences {text[:7]}": damaged(CELL, sequences=text)
        for text in ("1", "{}", '["ab"]', "[[1]]", "[[1,2,3]]", "[[1.5,2]]", "[[1,NaN]]", f"[[1,{DIGITS}]]")
    },
    **{f"window window {text[:5]}": damaged(WINDOW, window=text) for text in COUNTS},
    **{f"end_us {text[:5]}": damaged(WINDOW, end_us=text) for text in NUMBERS},
    **{
        f"metric {text[:5]}": damaged(WINDOW, metrics=f'{{"balance/imbalance":{text}}}')
        for text in NUMBERS
        if text != NAN
    },
    **{f"metrics {text}": damaged(WINDOW, metrics=text) for text in ("1", "[]", '[["a",1]]', "null")},
}


def refuse(name):
    raise AssertionError(f"{name} is not JSON")


def good_run(folder, ranks=1):
    """Write a session of one rank with windows 0 and 1."""
    writer = SpanWriter(span_path(folder, 0), {**HEADER, "ranks": ranks})
    writer.write([{**line, "window": w} for w in (0, 1) for line in (CELL, WINDOW)])
    writer.close()
    return folder


@pytest.mark.parametrize("line", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_damaged_line_is_left_out_and_the_trace_is_strict_json(tmp_path, line):
    path = span_path(good_run(tmp_path), 0)
    before = json.dumps(chrome_trace(read_spans(tmp_path)))
    lines = path.read_text().splitlines()
    # Good lines on both sides of it.
    path.write_text("\n".join([*lines[:3], line, *lines[3:]]) + "\n")
    with pytest.warns(UserWarning, match=r"rank_0000\.jsonl: 1 damaged line left out \(line 4\)"):
        (written,) = write_trace(tmp_path, png=False)
    trace = json.loads(written.read_text(), parse_constant=refuse)
    assert trace == json.loads(before)
    assert {e["args"]["window"] for e in trace["traceEvents"] if e["ph"] == "X"} == {0, 1}


def test_the_lines_that_are_damaged_above_are_good_as_they_are(tmp_path):
    path = span_path(good_run(tmp_path), 0)
    later = {"kind": "of a later release", "value": math.nan}
    with path.open("a") as file:
        for line in (HEADER, CELL, {**WINDOW, "metrics": {"balance/imbalance": math.nan}}, later):
            file.write(json.dumps(line) + "\n")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        spans = read_spans(tmp_path)
        (written,) = write_trace(tmp_path, png=False)
    assert [cell.window for cell in spans.cells] == [0, 1, 2]
    assert math.isnan(spans.windows[2][2]["balance/imbalance"])
    events = json.loads(written.read_text(), parse_constant=refuse)["traceEvents"]
    # What is unknown is no counter.
    assert sum(e["name"] == "balance/imbalance" for e in events) == 2
    assert sum(e["ph"] == "i" for e in events) == 3


@pytest.mark.parametrize(
    ("ranks", "names", "more"), [(9, 8, ""), (10, 8, " and 1 more"), (1_000_000, 8, " and 999991 more")]
)
def test_at_most_eight_missing_ranks_are_named(tmp_path, ranks, names, more):
    good_run(tmp_path, ranks)
    with pytest.warns(UserWarning, match=f"rank_0008.jsonl{more}: the run had {ranks} ranks") as found:
        read_spans(tmp_path)
    assert str(found[0].message).count("rank_") == names


def test_the_command_draws_a_damaged_run(tmp_path, capsys):
    with span_path(good_run(tmp_path), 0).open("a") as file:
        file.write("\n".join(DAMAGE.values()))
    assert main(["trace", str(tmp_path)]) == 0
    assert f"{len(DAMAGE)} damaged lines left out" in capsys.readouterr().err
    assert (tmp_path / "trace.png").exists()


@pytest.mark.parametrize("inner", ["", "below", "below/twice"])
def test_an_output_that_is_a_file_or_under_one_is_named(tmp_path, capsys, inner):
    good_run(tmp_path)
    (tmp_path / "taken").write_text("kept")
    output = tmp_path / "taken" / inner
    assert main(["trace", str(tmp_path), "--no-png", "--output", str(output)]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"sb: error: --output is '{output}': no folder can be made there")
    assert "To fix it, pass as --output" in error
    assert (tmp_path / "taken").read_text() == "kept"


def test_a_folder_in_place_of_a_file_is_named(tmp_path, capsys):
    span_path(tmp_path, 0).mkdir(parents=True)
    assert main(["trace", str(tmp_path), "--no-png"]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"sb: error: {span_path(tmp_path, 0)} cannot be read (Is a directory)")
    assert "To fix it, " in error
    assert str(tmp_path) in error
