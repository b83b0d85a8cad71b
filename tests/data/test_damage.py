"""A damaged cache never changes what is trained on: it is found and replaced."""

import multiprocessing
import random
import warnings

import pytest
from tiny_run import data_module, write_documents

from sb_lightning.data import Corpus
from sb_lightning.data import index as index_module
from sb_lightning.data.build import build_index
from sb_lightning.data.index import find_index
from sb_lightning.data.tokenizer import ByteTokenizer


def content(root):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*is damaged")
        data = data_module(root, tokenizer="train:270")
        data.prepare_data()
        data.setup()
    index = data.train_dataset.index
    text = "abcdefghijklmnopqrstuvwxyz"
    return (
        [index.tokens(i).tolist() for i in range(len(index))],
        [index.target_tokens.tolist(), index.documents.tolist(), index.document_ids()],
        {key: value for key, value in data.report.items() if key != "checksum"},
        [data.tokenizer.encode_batch([text]), data.tokenizer.decode(list(range(data.vocab_size)))],
    )


def test_no_flipped_byte_changes_the_content(tmp_path):
    write_documents(tmp_path / "docs")
    whole = content(tmp_path)
    cache = tmp_path / "cache"
    files = {p.name: p.read_bytes() for p in cache.rglob("*") if p.is_file()}
    assert len(files) == 4
    generator = random.Random(3)
    for turn in range(48):
        path = sorted(p for p in cache.rglob("*") if p.is_file())[turn % 4]
        raw = bytearray(path.read_bytes())
        # The first bytes are the headers of the files.
        place = generator.randrange(min(len(raw), 300) if turn % 3 == 0 else len(raw))
        raw[place] ^= 1 << generator.randrange(8)
        path.write_bytes(raw)
        assert content(tmp_path) == whole, (path.name, place)
    assert {p.name: p.read_bytes() for p in cache.rglob("*") if p.is_file()}.keys() == files.keys()


def test_rebuilt_index_replaces_the_damaged_one(tmp_path):
    """Of the same size, so that only the checksum tells."""
    write_documents(tmp_path / "docs")
    before = content(tmp_path)
    (path,) = (tmp_path / "cache").glob("*/tokens.safetensors")
    good = path.read_bytes()
    path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    assert content(tmp_path) == before
    assert path.read_bytes() == good
    assert find_index(path.parent, thorough=True) is not None


def _replace(root, folder, barrier, results):
    class Waits(ByteTokenizer):
        def encode_batch(self, texts):
            barrier.wait(timeout=30)
            return super().encode_batch(texts)

    corpus = Corpus(source=str(root / "docs"))
    index = build_index(corpus, Waits(), folder, max_length=99, overlong="truncate")
    results.put([index.tokens(i).tolist() for i in range(len(index))])


def test_two_processes_replace_a_damaged_index(tmp_path):
    corpus = Corpus(source=str(write_documents(tmp_path / "docs")))
    folder = tmp_path / "cache" / "i"
    index = build_index(corpus, ByteTokenizer(), folder, max_length=99, overlong="truncate")
    tokens = [index.tokens(i).tolist() for i in range(len(index))]
    path = folder / "tokens.safetensors"
    path.write_bytes(path.read_bytes()[:-2] + b"\x01\x00")
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(2), context.Queue()
    args = (tmp_path, folder, barrier, results)
    processes = [context.Process(target=_replace, args=args) for _ in range(2)]
    for process in processes:
        process.start()
    got = [results.get(timeout=30) for _ in processes]
    for process in processes:
        process.join(timeout=30)
    assert got == [tokens, tokens]
    assert [p.name for p in folder.parent.iterdir()] == ["i"]


@pytest.mark.parametrize("error", [SystemError, IndexError, UnicodeError, MemoryError])
def test_any_error_while_opening_is_damage(error, tmp_path, monkeypatch):
    corpus = Corpus(source=str(write_documents(tmp_path / "docs")))
    build_index(corpus, ByteTokenizer(), tmp_path / "i", max_length=99, overlong="truncate")

    def broken(path):
        raise error("odd")

    monkeypatch.setattr(index_module, "load_file", broken)
    with pytest.warns(UserWarning, match="is damaged"):
        assert find_index(tmp_path / "i") is None


@pytest.mark.parametrize("place", [0, 8, 60])
def test_damaged_header_of_the_tokens_is_found_without_reading_them(place, tmp_path):
    corpus = Corpus(source=str(write_documents(tmp_path / "docs")))
    build_index(corpus, ByteTokenizer(), tmp_path / "i", max_length=99, overlong="truncate")
    path = tmp_path / "i" / "tokens.safetensors"
    raw = bytearray(path.read_bytes())
    raw[place] ^= 1
    path.write_bytes(raw)
    with pytest.warns(UserWarning, match="is damaged"):
        assert find_index(tmp_path / "i") is None
