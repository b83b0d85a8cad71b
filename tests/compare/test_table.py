"""The one latency table of a comparison."""

from __future__ import annotations

import warnings

import pytest
from compare_cases import rounds_of, window

from sb_lightning.cli.compare_table import describe_table, table_error, table_of_comparison
from sb_lightning.cli.latency import LatencySettings
from sb_lightning.compare.folder import ComparisonFolder
from sb_lightning.latency import LatencyTable

AUTO = LatencySettings(table="auto")


class Planted:
    """Stands for a table: what is saved is what is loaded."""

    def __init__(self, text="times", error=None):
        self.text = text
        self.profile = {} if error is None else {"errors": {"table": {"median": error}}}

    def save(self, path):
        path.write_text(self.text)


@pytest.fixture(autouse=True)
def _loaded(monkeypatch):
    def load(path):
        text = path.read_text()
        if text == "damaged":
            raise ValueError(f"{path}: no JSON. To fix it, measure again.")
        return Planted(text)

    monkeypatch.setattr(LatencyTable, "load", load)


@pytest.fixture
def folder(tmp_path):
    made = ComparisonFolder(tmp_path / "out")
    made.begin({})
    return made


def take(folder, settings=AUTO, measured=None, *, has_rounds):
    """The table, and how often one was measured."""
    calls = []

    def measure():
        calls.append(1)
        return measured

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        table = table_of_comparison(folder, settings, measure, has_rounds=has_rounds)
    return table and table.text, len(calls), " ".join(str(warning.message) for warning in told)


def test_it_is_measured_once_and_kept(folder):
    assert take(folder, measured=Planted("a"), has_rounds=False) == ("a", 1, "")
    assert take(folder, measured=Planted("b"), has_rounds=False) == ("a", 0, "")
    assert take(folder, measured=Planted("b"), has_rounds=True) == ("a", 0, "")


def test_after_rounds_other_keys_are_ignored_and_said_to_be(folder):
    take(folder, measured=Planted("a"), has_rounds=False)
    changed = LatencySettings(table=None, budget_seconds=3.0)
    table, calls, said = take(folder, changed, has_rounds=True)
    assert (table, calls) == ("a", 0)
    assert "latency.table=None, latency.budget_seconds=3.0: ignored" in said
    # Before the first round they count.
    assert take(folder, changed, has_rounds=False) == (None, 1, "")
    assert not folder.table.exists()
    # Now the rounds go without one.
    table, calls, said = take(folder, AUTO, Planted("c"), has_rounds=True)
    assert (table, calls) == (None, 0)
    assert "latency.table=auto, latency.budget_seconds=20.0: ignored" in said


def test_gone_or_damaged_it_is_refused_once_rounds_are_there(folder):
    take(folder, measured=Planted("a"), has_rounds=False)
    folder.table.write_text("damaged")
    with pytest.raises(ValueError, match=r"table.json is damaged .*another folder \(--output\)") as error:
        take(folder, has_rounds=True)
    assert str(error.value).count("To fix it") == 1
    folder.table.unlink()
    with pytest.raises(ValueError, match=r"table.json is gone.*another folder \(--output\)"):
        take(folder, has_rounds=True)
    assert take(folder, measured=Planted("b"), has_rounds=False)[:2] == ("b", 1)
    folder.table.write_text("damaged")
    table, calls, said = take(folder, measured=Planted("c"), has_rounds=False)
    assert (table, calls) == ("c", 1)
    assert "found anew" in said


def test_its_error_is_told_where_it_is_known():
    assert table_error(None) is table_error(Planted()) is None
    assert table_error(Planted(error=0.31)) == 0.31
    assert describe_table(Planted(error=0.31)) == "table.json, median hold-out error 31.0%"
    assert "counted operations" in describe_table(None)
    assert "not known" in describe_table(Planted())


def test_a_folder_of_rounds_without_a_note_takes_the_table_that_is_there(folder):
    folder.finish(rounds_of({"baseline": [window(n) for n in range(2)]})[0])
    folder.table.write_text("old")
    assert take(folder, has_rounds=True) == ("old", 0, "")
