"""Text cut to lengths of a known shape."""

from __future__ import annotations

import numpy as np
import pytest
from corpus import write_corpus

from sb_lightning.compare.data import PRESETS, CompareData


def open_data(tmp_path, preset=None, documents=60, **options):
    data = CompareData(
        source=write_corpus(tmp_path / "text.jsonl", documents), cache_dir=str(tmp_path / "cache"),
        **{"max_length": 64, "overlong": "split", "validation_share": 0.2, **options},
    )  # fmt: skip
    data.preset = preset
    data.prepare_data()
    data.setup()
    return data.train_dataset


@pytest.mark.parametrize("preset", PRESETS.values(), ids=PRESETS)
def test_all_text_is_there_once_and_in_order(preset, tmp_path):
    whole, cut = open_data(tmp_path), open_data(tmp_path, preset)
    text = np.concatenate([whole[i].sequences[0] for i in range(len(whole))])
    pieces = [cut[i].sequences[0] for i in range(len(cut))]
    assert [len(piece) for piece in pieces] == cut.lengths.tolist()
    again = np.concatenate(pieces)
    assert np.array_equal(again, text[: len(again)])
    assert len(text) - len(again) < 64
    assert cut.target_tokens.tolist() == (cut.lengths - 1).tolist()
    assert cut.sequence_ids.tolist() == list(range(len(cut)))
    # A cell of several sequences, one of them asked for twice.
    cell = cut.__getitems__([2, 0, 2])
    assert [len(s) for s in cell.sequences] == cut.lengths[[2, 0, 2]].tolist()
    assert np.array_equal(cell.sequences[0], pieces[2])


@pytest.mark.parametrize("preset", PRESETS.values(), ids=PRESETS)
def test_lengths_have_the_shape_of_the_preset(preset):
    lengths = preset.lengths(50_000_000, 16384, 0)
    assert lengths.max() <= 16384
    assert 50_000_000 - lengths.sum() < 16384
    assert np.array_equal(lengths, preset.lengths(50_000_000, 16384, 0))
    long = (lengths > 8192).mean()
    if preset is PRESETS["bimodal"]:
        assert long == pytest.approx(0.5, abs=0.02)
        assert ((lengths > 2048) & (lengths < 8192)).mean() < 0.01
    else:
        assert 0.02 < long < 0.2
        assert lengths.min() >= 1820


def test_too_little_text_is_told(tmp_path):
    with pytest.raises(ValueError, match=r"not one sequence can be cut.*To fix it, .*data.max_length"):
        open_data(tmp_path, PRESETS["longtail"], documents=12, max_length=100_000_000)
