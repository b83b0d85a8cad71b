from __future__ import annotations

import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from packed_run import Clock, packed

from sb_lightning.callbacks.windows import MOST_UNREAD, Stopwatch, WindowMeter, is_padding, length_source

LENGTH_CASES = {
    "packed": (packed([3, 0, 5]), [3, 0, 5]),
    "padded": (
        {"input_ids": torch.zeros(2, 4), "attention_mask": torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0]])},
        [3, 1],
    ),
    "positions": (
        {"input_ids": torch.zeros(1, 6), "position_ids": torch.tensor([[0, 1, 2, 0, 0, 1]])},
        [3, 1, 2],
    ),
    "positions that start elsewhere": (
        {"position_ids": torch.tensor([[5, 6, 0, 1], [7, 8, 9, 10]])},
        [2, 2, 4],
    ),
    "no positions": ({"input_ids": torch.zeros(1, 0), "position_ids": torch.zeros(1, 0)}, []),
    "rows": ({"input_ids": torch.zeros(2, 7)}, [7, 7]),
}


@pytest.mark.parametrize("case", LENGTH_CASES)
def test_lengths_are_found_in_each_kind_of_batch(case):
    batch, expected = LENGTH_CASES[case]
    assert length_source(batch)() == expected


@pytest.mark.parametrize("batch", [None, torch.zeros(2, 3), (torch.zeros(2, 3),), {"x": torch.zeros(2, 3)}])
def test_a_batch_without_lengths_says_nothing(batch):
    assert length_source(batch) is None


def test_lengths_are_not_read_before_the_window_ends():
    meter, run = WindowMeter(), SimpleNamespace(global_step=0)
    batch = packed([2, 2])
    meter.add(batch)
    assert meter.close(run) is None
    batch["cu_seqlens"][1] = 3
    run.global_step = 1
    assert meter.close(run).lengths == [3, 1]


def test_lengths_are_read_once_and_before_too_many_batches_are_held():
    meter, run = WindowMeter(), SimpleNamespace(global_step=0)
    first, second = packed([2, 3]), packed([1])
    gone = weakref.ref(second["cu_seqlens"])
    meter.start(first)
    assert meter.tokens == 5
    # What was read is kept.
    first["cu_seqlens"][1] = 0
    meter.add(first)
    first["cu_seqlens"][-1] = 0
    meter.add(second)
    del second
    for _ in range(3, MOST_UNREAD):
        meter.add(packed([1]))
    assert gone() is not None
    meter.add(packed([1]))
    assert gone() is None
    run.global_step = 1
    window = meter.close(run)
    assert (window.lengths[:2], window.tokens, len(window.lengths)) == ([2, 3], 5 + 255, 2 + 255)


def test_a_micro_batch_that_never_ended_is_not_of_the_window():
    meter, run = WindowMeter(), SimpleNamespace(global_step=0)
    meter.start(packed([9]))
    meter.start(packed([4]))
    meter.add(packed([4]))
    assert meter.tokens == 4
    run.global_step = 1
    assert meter.close(run).tokens == 4


@pytest.mark.parametrize(
    ("count", "expected"),
    [(0, True), (np.int64(0), True), (3, False), (None, False), (torch.zeros(2, 3), False), ("0", False)],
)
def test_only_the_number_zero_says_padding(count, expected):
    assert is_padding({"target_tokens": count}) is expected
    assert not is_padding([count])


def test_the_stopwatch_counts_only_while_it_runs():
    clock = Clock()
    watch = Stopwatch(clock)
    clock.now += 7
    assert watch.lap() == 0
    watch.resume()
    clock.now += 2
    watch.resume()
    clock.now += 1
    watch.pause()
    clock.now += 100
    watch.pause()
    assert watch.lap() == 3
    watch.resume()
    clock.now += 4
    assert watch.lap() == 4
    clock.now += 5
    assert watch.lap() == 5


def test_padding_is_work_but_no_progress():
    meter, run = WindowMeter(Clock(), 7), SimpleNamespace(global_step=7)
    meter.add(packed([4, 5], target_tokens=7))
    meter.add(packed([3], target_tokens=0))
    meter.add("a batch of another kind")
    run.global_step = 8
    window = meter.close(run)
    assert (window.lengths, window.tokens) == ([4, 5, 3], 9)
