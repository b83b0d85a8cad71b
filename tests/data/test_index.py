"""The token index: what it holds, how it is cached, and what happens to damaged or half-built ones."""

import json
import multiprocessing
import os
import pickle
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from sb_lightning.data import Corpus, TokenIndex
from sb_lightning.data import build as build_module
from sb_lightning.data.build import build_index
from sb_lightning.data.index import find_index, index_name
from sb_lightning.data.token_file import TokenFileWriter
from sb_lightning.data.tokenizer import ByteTokenizer

END = ByteTokenizer.eos_id


def write(folder, *texts):
    folder.mkdir(exist_ok=True)
    for i, text in enumerate(texts):
        (folder / f"{i}.txt").write_text(text)
    return Corpus(source=str(folder))


def build(tmp_path, corpus, max_length=8, overlong="truncate", tokenizer=None):
    options = {"max_length": max_length, "overlong": overlong}
    folder = tmp_path / "cache" / index_name(corpus, {"kind": "bytes"}, **options)
    return build_index(corpus, tokenizer or ByteTokenizer(), folder, **options)


def as_bytes(index):
    return [
        bytes(i for i in index.tokens(s) if i < 256).decode() + ("$" if index.tokens(s)[-1] == END else "")
        for s in range(len(index))
    ]


TEXTS = ("abc", "defghij", "klmnopqr", "0123456789abcdef")


@pytest.mark.parametrize(
    ("overlong", "sequences", "counts"),
    [
        ("truncate", ["abc$", "defghij$", "klmnopqr", "01234567"], {"truncated": 2, "tokens_cut": 1 + 9}),
        # A last piece of one token (here the end of the document) predicts nothing.
        ("split", ["abc$", "defghij$", "klmnopqr", "01234567", "89abcdef"], {"split": 2, "tokens_cut": 2}),
        ("drop", ["abc$", "defghij$"], {"dropped": 2}),
    ],
    ids=["truncate", "split", "drop"],
)
def test_overlong(overlong, sequences, counts, tmp_path):
    index = build(tmp_path, write(tmp_path / "docs", *TEXTS), overlong=overlong)
    assert as_bytes(index) == sequences
    assert index.lengths.tolist() == [len(s) for s in sequences]
    assert index.target_tokens.tolist() == [len(s) - 1 for s in sequences]
    zeros = {"truncated": 0, "split": 0, "dropped": 0, "too_short": 0, "tokens_cut": 0, "skipped": {}}
    expected = {
        **zeros,
        **counts,
        "documents_read": 4,
        "sequences": len(sequences),
        "tokens": sum(map(len, sequences)),
    }
    assert expected.items() <= index.report.items()
    assert index.report["length"]["max"] == 8
    assert index.document_ids() == [f"{i}.txt" for i in range(index.report["documents"])]
    if overlong == "split":
        assert index.documents.tolist() == [0, 1, 2, 3, 3]


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=12),
    max_length=st.integers(2, 17),
    overlong=st.sampled_from(["truncate", "split", "drop"]),
)
@settings(deadline=None)
def test_cut(lengths, max_length, overlong):
    """No piece is too long or too short, and every token is kept or counted."""
    counts = build_module.Counter()
    cut = build_module._Cut(max_length, overlong, counts)
    for length in lengths:
        tokens = list(range(length))
        pieces = cut.pieces(tokens)
        assert all(2 <= len(piece) <= max_length for piece in pieces)
        joined = [token for piece in pieces for token in piece]
        assert joined == tokens[: len(joined)]
        if 2 <= length <= max_length:
            assert pieces == [tokens]
        elif overlong == "split" and length >= 2:
            assert length - len(joined) <= 1
    affected = sum(length > max_length for length in lengths)
    assert affected == counts["truncated"] + counts["split"] + counts["dropped"]
    assert counts["too_short"] == sum(length < 2 for length in lengths)


def test_documents_without_a_target_are_left_out(tmp_path):
    class NoEnd(ByteTokenizer):
        eos_id = None

    index = build(tmp_path, write(tmp_path / "docs", "x", "yz"), tokenizer=NoEnd())
    assert (as_bytes(index), index.report["too_short"]) == (["yz"], 1)


@pytest.mark.parametrize("vocabulary", [2**16, 2**16 + 1])
def test_large_vocabularies_are_stored_whole(vocabulary, tmp_path):
    class Wide(ByteTokenizer):
        vocab_size = vocabulary
        eos_id = vocabulary - 1

    index = build(tmp_path, write(tmp_path / "docs", "ab", "c"), tokenizer=Wide())
    assert [index.tokens(i).tolist() for i in range(2)] == [[97, 98, vocabulary - 1], [99, vocabulary - 1]]
    assert index.tokens(0).dtype == np.int64
    stored = load_file(index.folder / "tokens.safetensors")["tokens"].dtype
    assert stored == (np.uint16 if vocabulary <= 2**16 else np.uint32)


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
def test_token_file_is_a_safetensors_file(dtype, tmp_path):
    path = tmp_path / "t.safetensors"
    with TokenFileWriter(path, np.dtype(dtype)) as writer:
        for piece in ([1, 2], [], [65_535]):
            writer.write(piece)
    tokens = load_file(path)["tokens"]
    assert tokens.dtype == dtype
    assert tokens.tolist() == [1, 2, 65_535]


def test_fingerprint(tmp_path):
    corpus = write(tmp_path / "docs", "abc", "def")

    def name(corpus=corpus, stamp=None, max_length=8, overlong="truncate"):
        return index_name(corpus, stamp or {"kind": "bytes"}, max_length=max_length, overlong=overlong)

    assert name() == name(Corpus(source=str(tmp_path / "docs")))
    (tmp_path / "docs" / "0.txt").write_text("abcd")
    others = [
        name(Corpus(source=str(tmp_path / "docs"))),
        name(stamp={"kind": "x"}),
        name(max_length=9),
        name(overlong="drop"),
    ]
    assert len({name(), *others}) == 5


def test_no_usable_document(tmp_path):
    corpus = write(tmp_path / "docs", "0123456789", "9876543210")
    with pytest.raises(
        ValueError, match=r"data\.source .* holds no usable document \(2 read.* 2 longer than max_length"
    ):
        build(tmp_path, corpus, overlong="drop")
    assert list((tmp_path / "cache").iterdir()) == []
    (tmp_path / "void").mkdir()
    with pytest.raises(ValueError, match=r"holds no usable document \(0 read"):
        build(tmp_path, Corpus(source=str(tmp_path / "void")))


DAMAGE = {
    "tokens cut": lambda folder: os.truncate(folder / "tokens.safetensors", 270),
    "index cut": lambda folder: os.truncate(folder / "index.safetensors", 40),
    "no report": lambda folder: (folder / "report.json").unlink(),
    "report cut": lambda folder: (folder / "report.json").write_text('{"files": {'),
    "report of another kind": lambda folder: (folder / "report.json").write_text("[]"),
    "no tokens": lambda folder: (folder / "tokens.safetensors").unlink(),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_index_is_built_again(damage, tmp_path):
    corpus = write(tmp_path / "docs", "abc", "defg")
    index = build(tmp_path, corpus)
    DAMAGE[damage](index.folder)
    with pytest.warns(UserWarning, match="is damaged") as caught:
        assert find_index(index.folder) is None
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert as_bytes(build(tmp_path, corpus)) == ["abc$", "defg$"]
        assert find_index(index.folder, thorough=True) is not None
    assert [path.name for path in index.folder.parent.iterdir()] == [index.folder.name]


def test_a_flipped_bit_is_found_by_the_checksum(tmp_path):
    index = build(tmp_path, write(tmp_path / "docs", "abc"))
    path = index.folder / "tokens.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 4
    path.write_bytes(raw)
    assert find_index(index.folder) is not None
    with pytest.warns(UserWarning, match="is damaged"):
        assert find_index(index.folder, thorough=True) is None


def test_nothing_there_is_no_damage(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert find_index(tmp_path / "gone") is None


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_interrupted_build_leaves_nothing(error, tmp_path, monkeypatch):
    corpus = write(tmp_path / "docs", "abc", "def")

    class Broken(ByteTokenizer):
        def encode_batch(self, texts):
            raise error

    with pytest.raises(error):
        build(tmp_path, corpus, tokenizer=Broken())
    assert list((tmp_path / "cache").iterdir()) == []


def test_what_a_killed_build_left_is_removed(tmp_path):
    import socket

    corpus = write(tmp_path / "docs", "abc")
    # No process has this number: it is above the kernel's limit.
    left = tmp_path / "cache" / f".building-x-{socket.gethostname()}-{2**22 + 1}"
    other_machine = tmp_path / "cache" / ".building-x-elsewhere-1"
    under_way = tmp_path / "cache" / f".building-x-{socket.gethostname()}-{os.getppid()}"
    for path in (left, other_machine, under_way):
        path.mkdir(parents=True)
    build(tmp_path, corpus)
    assert [path.exists() for path in (left, other_machine, under_way)] == [False, True, True]


def _build_at_once(tmp_path, barrier, results):
    class Waits(ByteTokenizer):
        def encode_batch(self, texts):
            barrier.wait(timeout=30)
            return super().encode_batch(texts)

    results.put(as_bytes(build(tmp_path, Corpus(source=str(tmp_path / "docs")), tokenizer=Waits())))


def test_two_processes_build_at_once(tmp_path):
    write(tmp_path / "docs", *TEXTS)
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(2), context.Queue()
    processes = [context.Process(target=_build_at_once, args=(tmp_path, barrier, results)) for _ in range(2)]
    for process in processes:
        process.start()
    got = [results.get(timeout=30) for _ in processes]
    for process in processes:
        process.join(timeout=30)
    assert [process.exitcode for process in processes] == [0, 0]
    assert got[0] == got[1] == ["abc$", "defghij$", "klmnopqr", "01234567"]
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_index_travels_to_a_spawned_process(tmp_path):
    index = build(tmp_path, write(tmp_path / "docs", "abc", "def"))
    assert index.tokens(0).tolist() == [97, 98, 99, END]
    again = pickle.loads(pickle.dumps(index))
    assert again.tokens(1).tolist() == [100, 101, 102, END]
    assert again.report == index.report


def test_content_has_the_same_name_wherever_it_lies(tmp_path):
    """A run may go on elsewhere: copied files have other times and other folders."""
    names = []
    for place, texts in (("here", ["abc", "def"]), ("there", ["abc", "def"]), ("else", ["abc", "dxf"])):
        (tmp_path / place).mkdir()
        names.append(build(tmp_path / place, write(tmp_path / place / "docs", *texts)).fingerprint)
    assert names[0] == names[1] != names[2]


def test_folder_of_json_lines_is_doubted(tmp_path):
    corpus = write(tmp_path / "docs", "abc")
    (tmp_path / "docs" / "more.jsonl").write_text('{"text": "a"}')
    with pytest.warns(UserWarning, match=r"each is read as one document of text.*data\.file_pattern"):
        build(tmp_path, Corpus(source=str(tmp_path / "docs")))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        build(tmp_path, Corpus(source=corpus.source, file_pattern="*.txt"))


def test_report_is_readable(tmp_path):
    index = build(tmp_path, write(tmp_path / "docs", "abc"))
    assert json.loads((index.folder / "report.json").read_text()) == TokenIndex(index.folder).report
