"""States that arms go on from: which are refused, and what a full disk is told as."""

from __future__ import annotations

import pytest
import torch
from compare_cases import rounds_of, window

from sb_lightning.compare.folder import ComparisonFolder
from sb_lightning.compare.states import StateIO, check_state_files


@pytest.fixture
def folder(tmp_path):
    made = ComparisonFolder(tmp_path / "out")
    made.begin({})
    return made


@pytest.fixture
def rounds():
    return rounds_of({"baseline": [window(n) for n in range(4)]})


def leave(folder, windows=4, number=1):
    file = folder.state(number, "baseline")
    content = {"global_step": windows, "state_dict": {"weight": torch.zeros(2000)}}
    StateIO(folder.path).save_checkpoint(content, file)
    return file


def test_a_whole_state_of_the_last_round_is_taken(folder, rounds):
    check_state_files(folder, [])
    with pytest.raises(ValueError, match=r"baseline.ckpt is gone.*another folder \(--output\)"):
        check_state_files(folder, rounds)
    leave(folder)
    check_state_files(folder, rounds)


@pytest.mark.parametrize("content", [b"", b"weights", b"[" * 5000])
def test_a_damaged_state_is_told_with_what_helps_a_comparison(content, folder, rounds):
    leave(folder).write_bytes(content)
    with pytest.raises(ValueError, match=r"baseline.ckpt is damaged \(.*To fix it, .*\(--output\)"):
        check_state_files(folder, rounds)


def test_a_state_that_is_cut_off_or_of_another_kind_is_damaged(folder, rounds):
    file = leave(folder)
    file.write_bytes(file.read_bytes()[:5000])
    with pytest.raises(ValueError, match=r"baseline\.ckpt is damaged"):
        check_state_files(folder, rounds)
    torch.save([1, 2], file)
    with pytest.raises(ValueError, match=r"baseline\.ckpt is damaged"):
        check_state_files(folder, rounds)


@pytest.mark.parametrize("windows", [0, 3, 6])
def test_a_state_of_another_round_is_told(windows, folder, rounds):
    leave(folder, windows)
    with pytest.raises(ValueError, match=rf"has trained {windows} windows, and baseline goes on at window 4"):
        check_state_files(folder, rounds)


def test_a_full_disk_is_told_with_the_option_of_the_comparison(folder, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match=r"No space left") as error:
        leave(folder)
    said = str(error.value)
    assert "--output is" in said
    assert "trainer.default_root_dir" not in said
    assert said.count("To fix it, ") == 1
