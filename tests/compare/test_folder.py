"""The folder of a comparison: what goes on, and what does not belong there."""

from __future__ import annotations

import json

import pytest
from compare_cases import rounds_of, window

from sb_lightning.compare.folder import ComparisonFolder

SETTINGS = {"arms": ["baseline"], "model.attention": {"budget": 4}}


@pytest.fixture
def folder(tmp_path):
    made = ComparisonFolder(tmp_path / "out")
    made.begin(SETTINGS)
    return made


@pytest.fixture
def rounds():
    return rounds_of({"baseline": [window(n) for n in range(6)]})


def leave_states(folder, number):
    path = folder.state(number, "baseline")
    path.parent.mkdir(parents=True)
    path.write_text("weights")


def test_finished_rounds_come_back_and_only_the_last_states_stay(folder, rounds):
    for each in rounds:
        leave_states(folder, each.number)
        folder.finish(each)
    assert folder.rounds() == rounds
    assert [path.name for path in (folder.path / "states").iterdir()] == ["0002"]
    folder.check_states(rounds)


def test_states_of_a_broken_off_round_do_not_count(folder, rounds):
    leave_states(folder, 0)
    folder.finish(rounds[0])
    leave_states(folder, 1)
    assert folder.rounds() == rounds[:1]
    assert folder.state(0, "baseline").exists()


def test_the_same_settings_go_on_and_others_are_named(folder):
    folder.begin(SETTINGS)
    with pytest.raises(
        ValueError, match=r"other settings: model.attention .*'budget': 4.*'budget': 5"
    ) as error:
        folder.begin({**SETTINGS, "model.attention": {"budget": 5}})
    assert "To fix it, " in str(error.value)
    assert "arms" not in str(error.value).split("other settings")[1].split(":")[1]


def test_another_release_other_files_and_damage_are_told(folder, rounds, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("text")
    with pytest.raises(ValueError, match="holds other files"):
        ComparisonFolder(tmp_path / "mine").begin(SETTINGS)
    for each in rounds[:2]:
        folder.finish(each)
    with pytest.raises(ValueError, match=r"baseline\.ckpt is gone"):
        folder.check_states(rounds[:2])
    (folder.path / "rounds" / "0001.json").write_text("{}")
    with pytest.raises(ValueError, match=r"0001.json is damaged"):
        folder.rounds()
    (folder.path / "rounds" / "0001.json").write_text("{")
    with pytest.raises(ValueError, match=r"0001.json cannot be read"):
        folder.rounds()
    (folder.path / "rounds" / "0000.json").unlink()
    with pytest.raises(ValueError, match="has no round 0"):
        folder.rounds()
    (folder.path / "comparison.json").write_text(json.dumps({"version": 99, "settings": SETTINGS}))
    with pytest.raises(ValueError, match="version 99"):
        folder.begin(SETTINGS)
