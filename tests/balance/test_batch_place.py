"""The plan's numbers in batches of any data set and collate function."""

import pytest
import torch
from sampler_cases import batch_sampler
from torch.utils.data import default_collate

from sb_lightning.balance import BalancedDataLoader

LENGTHS = [5, 9, 2, 7, 3]


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return len(LENGTHS)

    def __getitem__(self, index):
        return {"id": index}


class Many(Rows):
    def __getitems__(self, indices):
        return [{"id": 100 + i} for i in indices]


def loader(data=None, **options):
    sampler = batch_sampler(LENGTHS, ranks=1, rank=0, accumulate=2, budget=4, tail="pad")
    return BalancedDataLoader(data or Rows(), batch_sampler=sampler, **{"add_plan": True, **options})


@pytest.mark.parametrize("workers", [0, 2])
def test_each_batch_has_its_place(workers):
    made = loader(num_workers=workers)
    cells, batches = list(made.batches), list(made)
    assert [batch["id"].tolist() for batch in batches] == [list(cell) for cell in cells]
    for cell, batch in zip(cells, batches, strict=True):
        for name in (
            "window",
            "micro_batch",
            "target_tokens",
            "window_target_tokens",
            "is_padding",
            "plan_gap",
        ):
            assert batch[name] == getattr(cell, name)
        assert batch["predicted_ms"] == cell.predicted_ms > 0
        assert batch["budget"] == 4
        assert isinstance(batch["window_target_tokens"], int)
    by_window = {}
    for batch in batches:
        by_window.setdefault(batch["window"], []).append(batch["target_tokens"])
        assert batch["window_target_tokens"] > 0
    for batch in batches:
        assert sum(by_window[batch["window"]]) == batch["window_target_tokens"]


def test_items_come_as_the_data_set_gives_them():
    assert [batch["id"].item() for batch in loader(Many())] == [100 + c[0] for c in loader().batches]
    found = next(iter(loader(collate_fn=lambda rows: {"n": len(rows)})))
    assert found["n"] == 1


def test_a_batch_that_is_no_dict_is_refused():
    with pytest.raises(TypeError, match=r"collate_fn returns a list.*return a dict"):
        next(iter(loader(collate_fn=lambda rows: list(rows))))


def test_nothing_is_added_unasked():
    assert next(iter(loader(add_plan=False, collate_fn=default_collate))).keys() == {"id"}
