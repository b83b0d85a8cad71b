"""Tokenizers: bytes, trained, pretrained."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sb_lightning.data import Corpus, load_tokenizer
from sb_lightning.data import tokenizer as module
from sb_lightning.data.tokenizer import BytePairTokenizer, ByteTokenizer, check_spec

TEXTS = [
    "def f(x):\n    return x  # caf\u00e9\n",
    "the the the then there",
    "\u65e5\u672c\u8a9e \U0001f600 \x00\t\r\n",
]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    for i in range(9):
        (folder / f"{i}.txt").write_text(TEXTS[i % 3] * (i + 1) + f" number {i}")
    return Corpus(source=str(folder))


@pytest.fixture(scope="module")
def trained(corpus, tmp_path_factory):
    return load_tokenizer("train:300", corpus, tmp_path_factory.mktemp("cache"))[0]


@given(text=st.text(st.characters(exclude_categories=["Cs"])))
@settings(deadline=None)
def test_every_text_comes_back(text, trained):
    for tokenizer in (ByteTokenizer(), trained):
        ids = tokenizer.encode_batch([text])[0]
        assert tokenizer.decode(ids) == text
        assert all(0 <= i < tokenizer.vocab_size for i in ids)


def test_trained(trained):
    assert 258 < trained.vocab_size <= 300
    assert {trained.eos_id, trained.pad_id} == {0, 1}
    text = "the then there"
    assert len(trained.encode_batch([text])[0]) < len(text) / 2


def test_a_document_cannot_end_itself(trained):
    ids = trained.encode_batch(["<|endoftext|> and <|padding|>"])[0]
    assert not {trained.eos_id, trained.pad_id} & set(ids)
    assert trained.decode(ids) == "<|endoftext|> and <|padding|>"


def test_training_is_repeatable_and_cached(corpus, tmp_path):
    paths = []
    for name in ("one", "two"):
        load_tokenizer("train:290", corpus, tmp_path / name)
        paths += (tmp_path / name / "tokenizers").iterdir()
    assert paths[0].name == paths[1].name
    assert paths[0].read_bytes() == paths[1].read_bytes()
    stamp = paths[0].stat().st_mtime_ns
    load_tokenizer("train:290", corpus, tmp_path / "one")
    assert paths[0].stat().st_mtime_ns == stamp
    paths[0].write_text("{ cut")
    load_tokenizer("train:290", corpus, tmp_path / "one")
    assert paths[0].read_bytes() == paths[1].read_bytes()


def test_training_draws_from_a_large_corpus(corpus, tmp_path, monkeypatch):
    """At most about TRAINING_BYTES of text, the same documents every time."""
    monkeypatch.setattr(module, "TRAINING_BYTES", 300)
    texts = list(module._training_texts(corpus, 300))
    assert 0 < len(texts) < 9
    assert sum(len(text.encode()) for text in texts[:-1]) <= 300
    assert list(module._training_texts(corpus, 300)) == texts


@pytest.mark.parametrize(
    "spec", ["train:", "train:257", "train:-300", "train:1e3", "train:2048.0", "train:\u0664\u0665\u0666", ""]
)
def test_bad_spec(spec):
    with pytest.raises(ValueError, match=r"data\.tokenizer is .*train:2048"):
        check_spec(spec)


def test_pretrained_folder(corpus, trained, tmp_path):
    """A folder as `save_pretrained` writes it; works without a network."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    path = tmp_path / "t.json"
    BytePairTokenizer.train(corpus, 280, path)
    inner = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_file(str(path)), eos_token="<|endoftext|>"
    )
    inner.save_pretrained(tmp_path / "folder")
    tokenizer, stamp = load_tokenizer(str(tmp_path / "folder"), corpus, tmp_path)
    assert stamp["kind"] == "pretrained"
    assert tokenizer.eos_id == 0
    ids = tokenizer.encode_batch(["the there", "x"])
    assert [tokenizer.decode(i) for i in ids] == ["the there", "x"]
    (tmp_path / "folder" / "tokenizer.json").touch()
    assert load_tokenizer(str(tmp_path / "folder"), corpus, tmp_path)[1] != stamp


def test_pretrained_that_cannot_be_had(corpus, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(
        ValueError,
        match=r"no tokenizer can be loaded from that folder.*set data\.tokenizer to 'bytes'",
    ):
        load_tokenizer(str(tmp_path / "empty"), corpus, tmp_path)
    with pytest.raises(ValueError, match=r"nobody/nothing.*no tokenizer can be loaded from that name"):
        load_tokenizer("nobody/nothing", corpus, tmp_path)


def test_pretrained_without_transformers(corpus, tmp_path, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(RuntimeError, match="pip install transformers"):
        load_tokenizer("some/name", corpus, tmp_path)


@pytest.mark.parametrize(
    ("spec", "names"),
    [
        ("BYTES", "pass 'bytes'"),
        ("bytes ", "pass 'bytes'"),
        ("Train:300", "pass 'train:300'"),
        ("/no/such", "there is no such folder"),
        ("./no", "there is no such folder"),
        ("~/no-such-tokenizer", "there is no such folder"),
        ("a\\b", "there is no such folder"),
        ("a/b/c", "there is no such folder"),
    ],
)
def test_misspelt_spec(spec, names):
    with pytest.raises(ValueError, match=rf"data\.tokenizer is .*{names}"):
        check_spec(spec)


def test_hub_names_pass():
    for spec in ("gpt2", "nobody/nothing"):
        check_spec(spec)


def test_unreachable_hub_is_asked_once(corpus, tmp_path, monkeypatch):
    """transformers would retry for most of a minute before it says so."""
    import transformers
    from huggingface_hub import HfApi

    calls = []

    def from_pretrained(name, **options):
        calls.append(options)
        raise OSError("not cached")

    def model_info(self, name, **options):
        calls.append(options)
        raise ConnectionError("no network")

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", from_pretrained)
    monkeypatch.setattr(HfApi, "model_info", model_info)
    with pytest.raises(
        ValueError, match=r"ConnectionError: no network.*a hub name that this machine can reach"
    ):
        load_tokenizer("nobody/nothing", corpus, tmp_path)
    assert calls == [{"local_files_only": True}, {"timeout": 10.0}]


def test_fingerprint_is_of_the_content(corpus, trained, tmp_path):
    again = load_tokenizer("train:300", corpus, tmp_path)[0]
    other = load_tokenizer("train:299", corpus, tmp_path)[0]
    assert again.fingerprint == trained.fingerprint
    assert len({other.fingerprint, trained.fingerprint, ByteTokenizer().fingerprint}) == 3
