"""How `sb compare` ends before its time: one message, on rank zero."""

from __future__ import annotations

import pytest
from compare_cases import rounds_of, window

from sb_lightning.cli import compare_ends
from sb_lightning.cli.compare_ends import Ending
from sb_lightning.compare.folder import ComparisonFolder

GLOO = "[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:48541."


@pytest.fixture(autouse=True)
def _plain(monkeypatch):
    for name in ("SB_TRACEBACK", "RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(compare_ends, "GRACE_S", 0.0)


@pytest.fixture
def output(tmp_path):
    folder = ComparisonFolder(tmp_path / "out")
    folder.begin({})
    for each in rounds_of({"baseline": [window(n) for n in range(4)]}):
        folder.finish(each)
    return folder.path


def raised(error):
    """The error with a traceback."""
    try:
        raise error
    except type(error) as caught:
        return caught


def test_rank_zero_says_once_that_another_rank_is_gone(output, capsys):
    ending = Ending(output, is_launched=False)
    assert ending.error(RuntimeError(GLOO)) == 1
    ending.rank_lost()
    ending.interrupted()
    said = capsys.readouterr().err
    assert said.count("sb: ") == 1
    assert "Traceback" not in said
    assert "another rank has ended: " in said
    assert f"2 rounds are kept in {output}; the same command goes on" in said
    assert "To fix it, see what that rank has printed" in said


def test_where_rank_zero_does_not_notice_the_observer_speaks(output, capsys):
    Ending(output, is_launched=False).rank_lost()
    said = capsys.readouterr().err
    assert "another rank has ended" in said
    assert "Traceback" not in said


def test_a_started_rank_leaves_it_to_rank_zero_unless_it_is_asked(output, capsys, monkeypatch):
    ending = Ending(output, is_launched=True)
    assert ending.error(RuntimeError(GLOO)) == 1
    ending.interrupted()
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("SB_TRACEBACK", "1")
    assert Ending(output, is_launched=True).error(raised(RuntimeError(GLOO))) == 1
    said = capsys.readouterr().err
    assert "Traceback" in said
    assert GLOO in said


@pytest.mark.parametrize("is_launched", [False, True])
def test_a_ranks_own_fault_is_always_shown(is_launched, output, capsys):
    ending = Ending(output, is_launched=is_launched)
    assert ending.error(ValueError("budget is 0: none. To fix it, pass budget >= 1.")) == 1
    assert "budget is 0" in capsys.readouterr().err
    assert ending.error(raised(IndexError("out of range"))) == 1
    assert "Traceback" in capsys.readouterr().err
    # The port of the ranks is taken: not that somebody has left.
    assert (
        ending.error(RuntimeError("The server socket has failed (EADDRINUSE, address already in use)")) == 1
    )
    assert "EADDRINUSE" in capsys.readouterr().err


def test_an_interrupt_says_what_is_kept(output, tmp_path, capsys):
    Ending(output, is_launched=False).interrupted()
    assert f"sb: interrupted: 2 rounds are kept in {output}; the same" in capsys.readouterr().err
    (output / "rounds" / "0001.json").unlink()
    assert "1 round is kept" in Ending(output, is_launched=False).kept
    Ending(tmp_path / "none", is_launched=False).interrupted("ended by SIGTERM")
    assert "sb: ended by SIGTERM: no round is finished yet" in capsys.readouterr().err
