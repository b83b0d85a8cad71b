"""Reading documents, good and bad."""

import json
import sys
from collections import Counter

import pytest

from sb_lightning.data import Corpus


def read(source, **options):
    skipped = Counter()
    return [(d.id, d.text) for d in Corpus(source=str(source), **options).documents(skipped)], dict(skipped)


def test_folder_is_read_in_order_without_hidden_files(tmp_path):
    for name in ("b.txt", "a/z.txt", "a/b/c.txt", "a.txt", ".hidden.txt", ".git/config.txt", "notes.md"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    (tmp_path / "dangling.txt").symlink_to(tmp_path / "gone")
    names = ["a.txt", "a/b/c.txt", "a/z.txt", "b.txt"]
    assert read(tmp_path, file_pattern="*.txt") == ([(name, name) for name in names], {})
    assert [name for name, _ in read(tmp_path)[0]] == [*names, "notes.md"]


def test_text_is_kept_exactly_but_for_a_byte_order_mark(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo \xc3\xa9\n\n")
    assert read(tmp_path)[0] == [("a.txt", "one\r\ntwo \u00e9\n\n")]


@pytest.mark.parametrize(
    ("content", "reason", "names"),
    [(b"", "empty", "the text is empty"), (b"ok \xff\xfe", "not UTF-8", r"it is not UTF-8 \(byte 3")],
    ids=["empty", "latin"],
)
def test_bad_file(content, reason, names, tmp_path):
    (tmp_path / "a.txt").write_text("fine")
    (tmp_path / "bad.txt").write_bytes(content)
    with pytest.raises(ValueError, match=rf"bad\.txt: {names}.*set data\.on_error to 'skip'"):
        read(tmp_path)
    assert read(tmp_path, on_error="skip") == ([("a.txt", "fine")], {reason: 1})


def test_unreadable_file(tmp_path, monkeypatch):
    from pathlib import Path

    (tmp_path / "a.txt").write_text("secret")

    def refuse(path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(ValueError, match=r"a\.txt: .*Permission denied"):
        read(tmp_path)


def write_lines(path, *lines):
    path.write_bytes(b"".join(line if isinstance(line, bytes) else line.encode() + b"\n" for line in lines))
    return path


def test_json_lines(tmp_path):
    path = write_lines(
        tmp_path / "d.jsonl",
        b'\xef\xbb\xbf{"text": "first"}\r\n',
        '{"id": 7, "text": "se\\ncond \\u00e9"}',
        "",
        b'{"text": "last, no newline"}',
    )
    texts = [("d.jsonl:1", "first"), ("d.jsonl:2", "se\ncond \u00e9"), ("d.jsonl:4", "last, no newline")]
    assert read(path) == (texts, {})


@pytest.mark.parametrize(
    ("line", "reason", "names"),
    [
        ('{"text": "cut', "broken JSON", "it is not valid JSON"),
        ("[" * 100_000, "broken JSON", "it is not valid JSON"),
        ('{"text": "x", "n": ' + "9" * 5000 + "}", "broken JSON", "it cannot be read .*digits"),
        ('["text"]', "broken JSON", "it holds a list, not an object"),
        (
            '{"body": "x", "n": 1}',
            "missing field",
            r"there is no field 'text' \(fields: 'body', 'n'\).*set data.text_field",
        ),
        ("{}", "missing field", r"\(fields: none\)"),
        ('{"text": null}', "text is no string", "the text is null, not a string"),
        ('{"text": 3}', "text is no string", "the text is of type int, not a string"),
        ('{"text": ""}', "empty", "the text is empty"),
        ('{"text": "\\ud800"}', "not UTF-8", "half of a surrogate pair"),
        (b'{"text": "\xff"}\n', "not UTF-8", r"it is not UTF-8 \(byte 10"),
    ],
    ids=[
        "cut",
        "deep",
        "digits",
        "list",
        "other-fields",
        "no-fields",
        "null",
        "number",
        "empty",
        "surrogate",
        "latin",
    ],
)
def test_bad_line(line, reason, names, tmp_path):
    path = write_lines(tmp_path / "d.jsonl", '{"text": "good"}', line, '{"text": "also"}')
    with pytest.raises(ValueError, match=rf"d\.jsonl, line 2: .*{names}.*data\.on_error"):
        read(path)
    assert read(path, on_error="skip") == ([("d.jsonl:1", "good"), ("d.jsonl:3", "also")], {reason: 1})


def test_other_text_field(tmp_path):
    path = write_lines(tmp_path / "d.jsonl", json.dumps({"body": "here", "text": "not here"}))
    assert read(path, text_field="body")[0] == [("d.jsonl:1", "here")]


def test_parquet(tmp_path):
    import pyarrow as pa
    from pyarrow import parquet

    path = tmp_path / "d.parquet"
    parquet.write_table(
        pa.table({"text": ["one", "", None, "four"], "n": [1, 2, 3, 4]}), path, row_group_size=2
    )
    with pytest.raises(ValueError, match=r"d\.parquet, row 2: the text is empty"):
        read(path)
    documents, skipped = read(path, on_error="skip")
    assert documents == [("d.parquet:1", "one"), ("d.parquet:4", "four")]
    assert skipped == {"empty": 1, "text is no string": 1}
    with pytest.raises(ValueError, match=r"no column 'body' \(columns: text, n\).*data\.text_field"):
        read(path, text_field="body", on_error="skip")
    with pytest.raises(ValueError, match=r"row 1: the text is of type int"):
        read(path, text_field="n")
    path.write_bytes(b"PAR1 nonsense PAR1")
    with pytest.raises(ValueError, match="no readable Parquet file"):
        read(path, on_error="skip")


def test_parquet_row_that_is_not_utf8(tmp_path):
    import pyarrow as pa
    from pyarrow import parquet

    path = tmp_path / "d.parquet"
    raw = pa.array([b"one", b"a\xffb", b"three"], pa.binary())
    text = pa.Array.from_buffers(pa.string(), 3, raw.buffers())
    parquet.write_table(pa.table({"text": text}), path)
    with pytest.raises(
        ValueError, match=r"d\.parquet, row 2: it is not UTF-8 \(byte 1.*data\.on_error"
    ) as info:
        read(path)
    assert type(info.value) is ValueError
    documents = [("d.parquet:1", "one"), ("d.parquet:3", "three")]
    assert read(path, on_error="skip") == (documents, {"not UTF-8": 1})


@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_parquet_with_a_damaged_page(on_error, tmp_path):
    import pyarrow as pa
    from pyarrow import parquet

    path = tmp_path / "d.parquet"
    options = {"row_group_size": 3, "use_dictionary": False, "compression": "zstd", "write_statistics": False}
    parquet.write_table(pa.table({"text": [f"text {i} " * 40 for i in range(7)]}), path, **options)
    column = parquet.ParquetFile(path).metadata.row_group(1).column(0)
    raw = bytearray(path.read_bytes())
    end = column.data_page_offset + column.total_compressed_size
    raw[end - 40 : end] = bytes(40)
    path.write_bytes(raw)
    with pytest.raises(ValueError, match=r"d\.parquet is damaged within rows 4 to 6: .*write the file again"):
        read(path, on_error=on_error)


@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_file_name_that_is_not_utf8(on_error, tmp_path):
    import os

    for name, text in ((b"caf\xe9.txt", b"one"), (b"d\xff.jsonl", b'{"text": "two"}\n')):
        try:
            with open(os.path.join(os.fsencode(tmp_path), name), "wb") as file:
                file.write(text)
        except OSError:
            pytest.skip("the file system takes no such name")
    documents = read(tmp_path, on_error=on_error, file_pattern="*.txt")[0]
    assert documents == [("caf\\udce9.txt", "one")]
    source = os.fsdecode(os.path.join(os.fsencode(tmp_path), b"d\xff.jsonl"))
    assert read(source, on_error=on_error)[0] == [("d\\udcff.jsonl:1", "two")]


def test_parquet_without_pyarrow(tmp_path, monkeypatch):
    path = tmp_path / "d.parquet"
    path.write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(RuntimeError, match=r"pip install 'sb-lightning\[parquet\]'"):
        read(path)


def test_standard_library():
    corpus = Corpus(source="stdlib")
    names = [name for name, _, _ in corpus.listing]
    assert names == sorted(names)
    assert {"json/decoder.py", "asyncio/events.py", "argparse.py"} <= set(names)
    parts = {part for name in names for part in name.split("/")[:-1]}
    assert not parts & {"site-packages", "dist-packages", "test", "tests", "__pycache__", "idle_test"}
    assert all(name.endswith(".py") for name in names)
    assert corpus.num_bytes > 5_000_000
    skipped = Counter()
    first = next(corpus.documents(skipped))
    assert first.id == names[0] or skipped


def test_standard_library_skips_odd_files_quietly(tmp_path, monkeypatch):
    """They are not the user's to mend."""
    (tmp_path / "a.py").write_text("x = 1\n")
    (tmp_path / "empty.py").write_text("")
    (tmp_path / "latin.py").write_bytes(b"# \xe9\n")
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    assert read("stdlib") == ([("a.py", "x = 1\n")], {"empty": 1, "not UTF-8": 1})


@pytest.mark.parametrize(
    ("name", "found"),
    [("gone", "does not exist"), ("a.csv", r"is neither a folder nor a \.jsonl or \.parquet file")],
)
def test_bad_source(name, found, tmp_path):
    (tmp_path / "a.csv").write_text("a,b")
    with pytest.raises(ValueError, match=rf"data\.source is .*{found}.*set data\.source to a folder"):
        Corpus(source=str(tmp_path / name))


def test_bad_on_error():
    with pytest.raises(ValueError, match=r"data\.on_error is 'ignore'"):
        Corpus(source="stdlib", on_error="ignore")


def test_stamp_tells_changes(tmp_path):
    def stamp(**options):
        return Corpus(source=str(tmp_path), **options).stamp()

    (tmp_path / "a.txt").write_text("one")
    before = stamp()
    assert stamp() == before
    assert stamp(on_error="skip") != before
    assert stamp(text_field="body") == before, "a folder has no fields"
    (tmp_path / "b.txt").write_text("two")
    assert stamp() != before
    assert stamp(file_pattern="a*") == before
