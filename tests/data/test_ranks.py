"""The data module under a real DDP Trainer on two ranks."""

import pytest
from tiny_run import TinyModule, data_module, make_trainer, write_documents


def run_everything(folder):
    """Fit, validate and predict on this rank; what it saw."""
    trainer = make_trainer(folder, max_epochs=1, accumulate_grad_batches=4, strategy="ddp", devices=2)
    module, data = TinyModule(), data_module(folder, tail="pad")
    trainer.fit(module, data)
    trained = [batch for batch in module.batches if "window" in batch]
    module.batches.clear()
    trainer.validate(module, data, verbose=False)
    held_out = [(batch["sequence_ids"].tolist(), batch["target_tokens"]) for batch in module.batches]
    predicted = [ids for (ids,) in trainer.predict(module, data)]
    cells = [(b["window"], b["micro_batch"], b["window_target_tokens"], b["target_tokens"]) for b in trained]
    ids = [i for b in trained if b["target_tokens"] for i in b["sequence_ids"].tolist()]
    return cells, ids, held_out, predicted, trainer.global_step


def test_ranks_share_the_documents(tmp_path, gloo_pool):
    """18 sequences in windows of 8, the last of 2; 5 held out, so the second rank has a masked one."""
    write_documents(tmp_path / "docs")
    ranks = gloo_pool.run(run_everything, tmp_path)
    cells, ids, held_out, predicted, steps = zip(*ranks, strict=True)
    assert steps == (3, 3)
    assert [len(c) for c in cells] == [9, 9]
    assert [c[:3] for c in cells[0]] == [c[:3] for c in cells[1]]
    for window in range(3):
        total = sum(count for c in cells for w, _, _, count in c if w == window)
        assert {c[2] for c in cells[0] if c[0] == window} == {total}
    assert [len(h) for h in held_out] == [3, 3]
    assert [count for _, count in held_out[1]].count(0) == 1
    assert sorted(predicted[0] + predicted[1]) == sorted(i for h in held_out for c, n in h if n for i in c)
    assert sorted(ids[0] + ids[1] + predicted[0] + predicted[1]) == list(range(23))


def open_other_data(folder):
    """Every rank reads a corpus of its own."""
    import torch.distributed as dist

    own = folder / f"rank{dist.get_rank()}"
    write_documents(own / "docs", count=20 + dist.get_rank())
    trainer = make_trainer(own, max_epochs=1, strategy="ddp", devices=2)
    data = data_module(own)
    data.trainer = trainer
    with pytest.raises(RuntimeError, match="rank 1 has opened other data than rank 0"):
        data.setup("fit")
    return True


def test_ranks_with_other_data_are_refused(tmp_path, gloo_pool):
    assert gloo_pool.run(open_other_data, tmp_path) == [True, True]
