"""The latency table of a run with DST: what is said where there is none, or where it is another run's."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import pytest
import torch
import yaml
from sparse_run import BLOCK, BUDGET, SIZES, build, measured_table

from sb_lightning.callbacks.sparse_balance_join import find_table
from sb_lightning.cli.train import run


@pytest.mark.parametrize("given", [None, "table.json"], ids=["of_the_sampler", "also_given"])
def test_sb_fit_says_once_that_the_table_is_of_another_model(tmp_path, monkeypatch, given):
    """`latency.table` is compared before the training; the callback finds the same table in the sampler."""
    monkeypatch.chdir(tmp_path)
    measured_table(hidden_size=2048).save("table.json")
    (tmp_path / "docs").mkdir()
    for n in range(6):
        (tmp_path / "docs" / f"{n}.txt").write_text("word " * (10 + 7 * n))
    callbacks = [
        {
            "class_path": "sb_lightning.callbacks.SparseBalanceCallback",
            "init_args": {} if given is None else {"table": given},
        }
    ]
    content = {
        "threads_per_rank": 1,
        "latency": {"table": "table.json"},
        "trainer": {"accelerator": "cpu", "devices": 1, "max_steps": 1, "num_sanity_val_steps": 0,
                    "limit_val_batches": 0, "callbacks": callbacks},
        "model": {"architecture": {"model_type": "qwen2", **SIZES, "vocab_size": 258},
                  "attention": {"block_size": BLOCK, "budget": BUDGET}},
        "data": {"source": "docs", "max_length": 200, "cache_dir": "cache"},
    }  # fmt: skip
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(content))
    threads = torch.get_num_threads()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            assert run(["fit", "--config", "tiny.yaml"]) == 0
        finally:
            torch.set_num_threads(threads)
    (told,) = [str(w.message) for w in caught if "differs from this run" in str(w.message)]
    assert "hidden_size (2048 in the table, 64 here)" in told


def test_a_run_without_a_table_is_told_both_ways_to_measure_one():
    base = build().model
    with pytest.warns(UserWarning, match="no latency table") as caught:
        find_table(None, None, base, SimpleNamespace())
    (told,) = [str(w.message) for w in caught]
    assert "`sb profile`" in told
    assert "sb_lightning.latency.profile(model" in told
