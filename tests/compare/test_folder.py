"""The folder of a comparison: what goes on, and what does not belong there."""

from __future__ import annotations

import json
import shutil

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
    with pytest.raises(ValueError, match=r"0001.json is damaged \(it cannot be read"):
        folder.rounds()
    (folder.path / "rounds" / "0000.json").unlink()
    with pytest.raises(ValueError, match="has no round 0"):
        folder.rounds()
    (folder.path / "comparison.json").write_text(json.dumps({"version": 99, "settings": SETTINGS}))
    with pytest.raises(ValueError, match="version 99"):
        folder.begin(SETTINGS)


def change(file, edit):
    content = json.loads(file.read_text())
    edit(content)
    file.write_text(json.dumps(content))


def of_window(**fields):
    return lambda content: content["windows"]["baseline"][0].update(fields)


def of_round(**fields):
    return lambda content: content.update(fields)


@pytest.mark.parametrize(
    "edit",
    [
        of_round(windows=[]), of_round(windows={}), of_round(windows={"baseline": []}), of_round(curves=None),
        of_round(curves={"baseline": {"rows": 1, "sums": [], "budget": 1, "usual": 1}}), of_round(number="a"),
        of_round(number=2), of_round(number=True), of_round(order=5), of_round(order=["sab"]),
        of_round(seconds=None), of_round(more=1), of_window(wall_ms="x"), of_window(wall_ms=0),
        of_window(wall_ms=float("nan")), of_window(busy_ms=[[1], [1, 2]]), of_window(busy_ms={}),
        of_window(busy_ms=[]), of_window(busy_ms=[[1.0]]), of_window(busy_ms=[[None] * 2] * 2),
        of_window(members=3), of_window(number=0.5), of_window(loss="low"), of_window(more=1),
    ],
)  # fmt: skip
def test_a_round_of_a_wrong_shape_is_damaged(edit, folder, rounds):
    for each in rounds[:2]:
        folder.finish(each)
    change(folder.round_file(1), edit)
    with pytest.raises(ValueError, match=r"0001.json is damaged \(.*To fix it, put back a whole copy, or"):
        folder.rounds()


@pytest.mark.parametrize("text", ["[" * 100_000, "null", "\x00", '{"version": 1, "settings": []}'])
def test_damage_of_the_description_and_of_a_round_is_no_traceback(text, folder, rounds):
    folder.finish(rounds[0])
    folder.round_file(0).write_text(text)
    with pytest.raises(ValueError, match=r"0000.json is damaged"):
        folder.rounds()
    (folder.path / "comparison.json").write_text(text)
    with pytest.raises(ValueError, match=r"comparison.json is damaged .*another folder \(--output\)"):
        folder.begin(SETTINGS)


@pytest.mark.parametrize("name", ["0001 (copy).json", "00001.json", "1.json", "3a.json", "notes.txt"])
def test_what_is_no_round_is_to_be_moved_away(name, folder, rounds):
    folder.finish(rounds[0])
    shutil.copy(folder.round_file(0), folder.path / "rounds" / name)
    with pytest.raises(ValueError, match=r"is damaged, or no round: .*To fix it, move it away") as error:
        folder.rounds()
    assert name in str(error.value)
    (folder.path / "rounds" / name).unlink()
    # What a kill leaves is none of the user's business.
    (folder.path / "rounds" / ".0001.json.abc.tmp").write_text("{")
    assert folder.rounds() == rounds[:1]


def test_a_second_call_is_kept_out_until_the_first_has_ended(tmp_path):
    first, second = ComparisonFolder(tmp_path / "out"), ComparisonFolder(tmp_path / "out")
    with first.held():
        first.begin(SETTINGS)
        with pytest.raises(ValueError, match=r"--output is .*another call.*To fix it, wait"), second.held():
            raise AssertionError
    with second.held():
        second.begin(SETTINGS)


def test_what_a_killed_call_has_left_is_no_other_file(tmp_path):
    made = ComparisonFolder(tmp_path)
    (tmp_path / ".comparison.json.abc.tmp").write_text("")
    with made.held():
        made.begin(SETTINGS)
    assert made.num_rounds == 0
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("text")
    with pytest.raises(ValueError, match="holds other files"), ComparisonFolder(tmp_path / "mine").held():
        raise AssertionError
    assert [file.name for file in (tmp_path / "mine").iterdir()] == ["thesis.tex"]


def test_the_table_is_noted_beside_the_settings(folder):
    assert folder.latency is None
    folder.note_latency({"table": "auto", "has_table": True})
    assert folder.latency == {"table": "auto", "has_table": True}
    folder.begin(SETTINGS)
