"""Files that are written whole or not at all."""

from __future__ import annotations

import pytest

from sb_lightning._files import replacing, write_whole


def test_writers_of_one_file_do_not_meet(tmp_path):
    # Two processes of two machines may have the same number.
    target = tmp_path / "t.json"
    with replacing(target) as first, replacing(target) as second:
        assert first != second
        first.write_text("1")
        second.write_text("2")
    assert target.read_text() == "1"


def test_a_file_that_could_not_be_written_is_as_it_was(tmp_path):
    target = tmp_path / "t.json"
    write_whole(target, "before")
    with pytest.raises(TypeError), replacing(target) as part:
        part.write_text(5)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["before"]
