"""Settings that cannot work are refused at once, and a checkpoint is not evaluated with others in silence."""

import warnings

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from tiny_run import TinyModule, data_module, fit, make_trainer, write_documents

from sb_lightning.data.settings import LARGEST_SEED


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    root = tmp_path_factory.mktemp("trained")
    write_documents(root / "docs")
    fit(root, save=True, max_epochs=1)
    return root


def evaluate(root, action, **settings):
    trainer = make_trainer(root)
    getattr(trainer, action)(TinyModule(), data_module(root, **settings), ckpt_path=root / "b-0-8.ckpt")


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"source": ""}, r"data\.source is ''"),
        ({"source": " "}, r"data\.source is ' '"),
        ({"cache_dir": ""}, r"data\.cache_dir is ''"),
        ({"seed": 2**63}, r"data\.seed is 9223372036854775808"),
        ({"seed": LARGEST_SEED + 1}, r"data\.seed is"),
    ],
    ids=["source", "blank", "cache", "seed", "head-room"],
)
def test_refused_at_once(settings, names, trained):
    with pytest.raises(ValueError, match=rf"{names}.*To fix it"):
        data_module(trained, **settings)


def test_largest_seed_works(trained):
    data = data_module(trained, seed=LARGEST_SEED)
    data.prepare_data()
    data.setup()
    loader = data.train_dataloader()
    loader.batch_sampler.set_epoch(99)
    assert len(list(loader)) == 18


@pytest.mark.parametrize("action", ["validate", "test", "predict"])
def test_other_tokenizer_is_refused(action, trained):
    match = r"trained with data\.tokenizer 'bytes' .*'train:258' .*set data\.tokenizer"
    with pytest.raises(ValueError, match=match):
        evaluate(trained, action, tokenizer="train:258")


@pytest.mark.parametrize("action", ["validate", "test", "predict"])
def test_other_data_are_warned_about_once(action, trained):
    write_documents(trained / "more", count=31)
    other = {"max_length": 50, "validation_share": 0.5, "source": str(trained / "more")}
    with pytest.warns(UserWarning, match="was trained with other settings") as caught:
        evaluate(trained, action, **other)
    (text,) = [str(w.message) for w in caught if "other settings" in str(w.message)]
    for words in ("data.max_length 8192 -> 50", "data.validation_share 0.2 -> 0.5", "data.source "):
        assert words in text


def test_same_data_are_no_warning(trained):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*other settings")
        evaluate(trained, "validate", seed=77, num_workers=0)


def test_same_tokenizer_from_elsewhere_is_accepted(tmp_path):
    """Trained again in another cache, from a copy: its content counts."""
    for name in ("docs", "copy"):
        write_documents(tmp_path / name)
    fit(tmp_path, save=True, max_epochs=1, data={"tokenizer": "train:258"})
    settings = {"tokenizer": "train:258", "cache_dir": str(tmp_path / "other")}
    with pytest.warns(UserWarning, match=r"other settings: data\.source"):
        evaluate(tmp_path, "validate", source=str(tmp_path / "copy"), **settings)


def test_resuming_with_other_data_names_the_settings(trained):
    with pytest.raises(MisconfigurationException, match=r"In the settings: data\.max_length 8192 -> 40\."):
        fit(trained, resume="b-0-8", max_epochs=2, data={"max_length": 40})
    match = r"data\.tokenizer 'bytes' -> 'train:258', data\.overlong 'truncate' -> 'drop'"
    with pytest.raises(MisconfigurationException, match=match):
        fit(trained, resume="b-0-8", data={"tokenizer": "train:258", "overlong": "drop"})


def test_checkpoint_is_plain(trained):
    state = torch.load(trained / "b-0-8.ckpt", weights_only=True)["TextDataModule"]
    assert state["settings"]["tokenizer_content"] == "bytes"


def test_empty_validation_split_is_told_once(trained):
    with pytest.warns(UserWarning, match="keeps none of") as caught:
        fit(trained, max_epochs=1, data={"validation_share": 1e-9})
    texts = [str(w.message) for w in caught]
    assert sum("keeps none of" in text for text in texts) == 1
    assert not any("across ranks is zero" in text for text in texts)
