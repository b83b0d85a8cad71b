"""A checkpoint is whole or not there, and a bad file is named."""

from __future__ import annotations

import pytest
import torch

from sb_lightning.training import AtomicCheckpointIO


def test_round_trip_leaves_one_file(tmp_path):
    path = tmp_path / "new" / "a.ckpt"
    AtomicCheckpointIO().save_checkpoint({"state_dict": {"w": torch.ones(3)}}, path)
    assert [file.name for file in path.parent.iterdir()] == ["a.ckpt"]
    assert torch.equal(AtomicCheckpointIO().load_checkpoint(path)["state_dict"]["w"], torch.ones(3))


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), RuntimeError("unexpected pos 64 vs 0")]
)
def test_a_failed_write_leaves_what_was_there(error, tmp_path, monkeypatch):
    path = tmp_path / "a.ckpt"
    AtomicCheckpointIO().save_checkpoint({"state_dict": {}}, path)
    before = path.read_bytes()

    def half_written(checkpoint, file):
        file.write(b"half")
        raise error

    monkeypatch.setattr(torch, "save", half_written)
    with pytest.raises(OSError, match="is untouched"):
        AtomicCheckpointIO().save_checkpoint({"state_dict": {"w": 1}}, path)
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["a.ckpt"]


def good_file(folder):
    path = folder / "good.ckpt"
    AtomicCheckpointIO().save_checkpoint({"state_dict": {"w": torch.ones(300)}}, path)
    return path.read_bytes()


BAD = {
    "garbage": lambda folder: b"no checkpoint at all",
    "empty": lambda folder: b"",
    "truncated": lambda folder: good_file(folder)[:-100],
}


@pytest.mark.parametrize("kind", BAD)
def test_a_file_that_is_no_checkpoint(kind, tmp_path):
    path = tmp_path / "bad.ckpt"
    path.write_bytes(BAD[kind](tmp_path))
    with pytest.raises(ValueError, match=r"bad.ckpt cannot be read as a checkpoint.*pass the path"):
        AtomicCheckpointIO().load_checkpoint(path)


@pytest.mark.parametrize("content", [{"a": 1}, [1, 2]])
def test_a_file_of_something_else(content, tmp_path):
    torch.save(content, tmp_path / "other.ckpt")
    with pytest.raises(ValueError, match="is no Lightning checkpoint"):
        AtomicCheckpointIO().load_checkpoint(tmp_path / "other.ckpt")


def test_a_folder(tmp_path):
    with pytest.raises(ValueError, match="cannot be read as a checkpoint"):
        AtomicCheckpointIO().load_checkpoint(tmp_path)
