from __future__ import annotations

import contextlib
import gc
import io
import math
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from imbalance_run import (
    BACKWARD,
    BETWEEN,
    DATA,
    FORWARD,
    OPTIMIZER,
    TimedData,
    TimedModule,
    Windows,
    is_as_found,
    lane,
    lines,
    monitor,
    timed_fit,
)
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EarlyStopping, GradientAccumulationScheduler
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from packed_run import Clock, loader, packed, trainer
from rich.console import Console
from torch.utils.data import DataLoader

from sb_lightning.balance import WindowSync, window_sync
from sb_lightning.callbacks import ImbalanceMonitor, TrainingProgress, imbalance_measure, imbalance_monitor
from sb_lightning.callbacks.imbalance_batch import BatchFacts
from sb_lightning.callbacks.imbalance_measure import RankMeasure
from sb_lightning.callbacks.imbalance_table import cell_rows, name_sequences
from sb_lightning.tracking import span
from sb_lightning.tracking.spans import LANES, HostClock

# One rank, a clock that moves where the test says so.


def test_every_lane_has_its_time_and_validation_has_none(tmp_path):
    _, made, callback, kept = timed_fit(tmp_path, accumulate_grad_batches=2, val_check_interval=2)
    assert [len(window.cells[0]) for window in kept.windows] == [2, 2, 1]
    run = 0
    for window in kept.windows:
        for place, cell in enumerate(window.cells[0]):
            is_last = place == len(window.cells[0]) - 1
            assert lane(cell, "data") == DATA
            assert lane(cell, "forward") == FORWARD + run
            assert lane(cell, "backward") == BACKWARD
            assert lane(cell, "optimizer") == (OPTIMIZER if is_last else 0.0)
            assert lane(cell, "wait") == lane(cell, "broadcast") == 0.0
            assert cell.busy_ms == 1e3 * (DATA + FORWARD + run + BACKWARD)
            run += 1
        assert window.wall_s == sum(cell.busy_ms for cell in window.cells[0]) / 1e3 + OPTIMIZER
    assert is_as_found(made)
    assert callback.summary["windows"] == 2


def test_metrics_of_a_window_by_hand(tmp_path):
    _, made, _, kept = timed_fit(tmp_path, accumulate_grad_batches=2)
    found = kept.logged[1]
    first, second = (1e3 * (DATA + FORWARD + run + BACKWARD) for run in (2, 3))
    assert found["balance/imbalance"] == found["balance/imbalance_slot"] == 1.0
    expected = second / ((first + second) / 2)
    assert found["balance/imbalance_micro_batch"] == pytest.approx(expected)
    assert found["balance/imbalance_within"] == pytest.approx(expected)
    assert found["balance/idle_ms"] == found["time/wait_ms"] == 0.0
    assert found["time/forward_ms"] == pytest.approx(1e3 * (2 * FORWARD + 5))
    assert found["time/optimizer_ms"] == pytest.approx(1e3 * OPTIMIZER)
    assert found["throughput/tokens_per_s"] == pytest.approx(22 / ((first + second) / 1e3 + OPTIMIZER))
    assert not any("predict" in name for name in found)
    assert made.progress_bar_metrics["balance/imbalance"] == 1.0
    assert isinstance(made.callback_metrics["balance/idle_ms"], torch.Tensor)
    assert float(made.logged_metrics["balance/imbalance"]) == 1.0


def test_the_cells_name_their_sequences(tmp_path):
    _, _, _, kept = timed_fit(tmp_path, lengths=[(5, 300, 7, 9, 1, 8)], fields={"target_tokens": [5]})
    (cell,) = kept.windows[0].cells[0]
    assert (cell.tokens, cell.longest, cell.num_sequences) == (330, 300, 6)
    assert cell.sequences == ((1, 300), (3, 9), (5, 8), (2, 7))
    (row,) = cell_rows(kept.windows[0])
    assert row[:6] == [0, 0, 0, 330, 300, "1 (300 tokens), 3 (9 tokens), 5 (8 tokens), 2 (7 tokens), 2 more"]
    assert row[6:8] == [None, None]
    assert name_sequences([(-1, 12)], 1) == "(12 tokens)"


def test_spans_are_on_disk(tmp_path):
    timed_fit(tmp_path, accumulate_grad_batches=2, val_check_interval=2)
    header, *rest = lines(tmp_path)
    assert (header["format"], header["version"], header["ranks"]) == ("sb_lightning.spans", 1, 1)
    cells = [line for line in rest if line["kind"] == "cell"]
    windows = [line for line in rest if line["kind"] == "window"]
    assert [(c["window"], c["micro_batch"], c["step"]) for c in cells] == [
        (0, 0, 1), (0, 1, 1), (1, 0, 2), (1, 1, 2), (2, 0, 3),
    ]  # fmt: skip
    assert cells[1]["sequences"] == [[10, 9], [11, 2]]
    assert cells[0]["spans"] == [
        ["data", 0, 1_000_000], ["data", 1_000_000, 0],
        ["forward", 1_000_000, 10_000_000], ["backward", 11_000_000, 20_000_000],
    ]  # fmt: skip
    # Two micro-batches, an optimizer step, a validation of 200 s: the clock goes on, the spans do not.
    assert cells[2]["spans"][0][1] == 1e6 * (2 * 31 + 1 + 0.5 + 200)
    assert [w["metrics"]["balance/imbalance"] for w in windows] == [1.0] * 3
    assert windows[0]["end_us"] == 63_500_000


def test_backward_and_steps_inside_a_manual_training_step(tmp_path):
    _, made, _, kept = timed_fit(tmp_path, module={"manual": True}, lengths=[(5,), (6,)])
    assert [window.step for window in kept.windows] == [2, 4]
    for run, window in enumerate(kept.windows):
        (cell,) = window.cells[0]
        assert lane(cell, "forward") == FORWARD + run + 2 * BETWEEN
        assert lane(cell, "backward") == BACKWARD
        assert lane(cell, "optimizer") == 2 * OPTIMIZER
        assert cell.busy_ms == 1e3 * (DATA + FORWARD + run + 2 * BETWEEN + BACKWARD)
    assert is_as_found(made)


class NeverSteps(TimedModule):
    def training_step(self, batch, batch_idx):
        self.manual_backward(self.loss())


def test_a_window_without_a_step_ends_with_the_epoch(tmp_path):
    clock = Clock()
    callback = monitor(clock)
    batches = loader(*(packed([n]) for n in range(1, 21)))
    trainer(tmp_path, callback).fit(NeverSteps(clock, manual=True), batches)
    # More micro-batches than a payload of manual optimization holds: the last one took in the rest.
    assert len(callback.window.cells[0]) == 16
    assert sum(cell.tokens for cell in callback.window.cells[0]) == 210
    assert len([line for line in lines(tmp_path) if line["kind"] == "cell"]) == 20


def test_each_epoch_without_a_step_is_a_window_of_its_own(tmp_path):
    clock = Clock()
    callback = monitor(clock)
    batches = loader(*(packed([n]) for n in range(1, 4)))
    with pytest.warns() as found:
        trainer(tmp_path, callback, max_epochs=2).fit(NeverSteps(clock, manual=True), batches)
    cells = [line for line in lines(tmp_path) if line["kind"] == "cell"]
    assert [(c["window"], c["epoch"], c["micro_batch"]) for c in cells] == [
        (window, window, micro_batch) for window in (0, 1) for micro_batch in range(3)
    ]
    assert callback.window.index == 1
    # Forward takes a second longer each time.
    assert [lane(cell, "forward") for cell in callback.window.cells[0]] == [FORWARD + n for n in (3, 4, 5)]
    assert not any("more than" in str(warning.message) for warning in found)


class StepsEvery(TimedModule):
    """Manual optimization that steps in every `every`-th micro-batch."""

    every = 20

    def training_step(self, batch, batch_idx):
        self.manual_backward(self.loss())
        if (batch_idx + 1) % self.every == 0:
            self.optimizers()[0].step()


def test_micro_batches_that_share_a_cell_are_left_out_where_one_counts(tmp_path):
    clock = Clock()
    callback = monitor(clock)
    kept = Windows(callback)
    batches = loader(*(packed([n], predicted_ms=1e3) for n in range(1, 41)))
    with pytest.warns(UserWarning, match="window 0 has more than 16 micro-batches") as found:
        trainer(tmp_path, callback, kept).fit(StepsEvery(clock, manual=True), batches)
    assert sum("more than 16" in str(warning.message) for warning in found) == 1
    for number, (window, logged) in enumerate(zip(kept.windows, kept.logged, strict=True)):
        busy = [FORWARD + BACKWARD + 20 * number + n for n in range(20)]
        apart = busy[:15]
        assert window.is_merged == (True,)
        assert window.busy_ms.tolist() == [[1e3 * b for b in [*apart, sum(busy[15:])]]]
        expected = pytest.approx(15 * max(apart) / sum(apart))
        assert logged["balance/imbalance_micro_batch"] == expected
        assert logged["balance/imbalance_within"] == expected
        assert logged["balance/imbalance_slot"] == 1.0
        assert logged["predict/error_pct"] == pytest.approx(
            100 * sum((b - 1) / b for b in apart) / 15, rel=1e-6
        )
        assert window.straggler == (0, 14)
    assert {cell["micro_batch"] for cell in callback.summary["worst_cells"]} == {14}


class Logged(Logger):
    """Keeps the steps at which the imbalance was logged."""

    def __init__(self):
        super().__init__()
        self.steps = []

    name, version = "logged", "0"

    def log_hyperparams(self, *_, **__):
        pass

    def log_metrics(self, metrics, step=None):
        self.steps += [step] if "balance/imbalance" in metrics else []


@pytest.mark.parametrize(
    ("every", "expected"), [(1, [3, 7, 11, 15, 19]), (5, [7, 11, 15, 19]), (12, [11]), (0, [])]
)
def test_windows_of_several_micro_batches_are_logged_when_a_multiple_was_passed(tmp_path, every, expected):
    clock, logger = Clock(), Logged()

    class Module(StepsEvery):
        every = 4

    batches = loader(*(packed([n]) for n in range(1, 21)))
    trainer(tmp_path, monitor(clock, spans=False), logger=logger, log_every_n_steps=every).fit(
        Module(clock, manual=True), batches
    )
    assert logger.steps == expected


def test_window_numbers_go_on_after_a_resume_with_two_optimizers(tmp_path):
    batches = [[n] for n in range(1, 9)]
    _, made, callback, kept = timed_fit(
        tmp_path / "a", module={"manual": True}, lengths=batches, max_epochs=-1, max_steps=6
    )
    assert [window.index for window in kept.windows] == [0, 1, 2]
    assert callback.state_dict() == {"version": 1, "windows": 3}
    made.save_checkpoint(tmp_path / "last.ckpt")
    again = monitor(Clock())
    kept = Windows(again)
    trainer(tmp_path / "b", again, kept, max_epochs=-1, max_steps=10).fit(
        TimedModule(again.clock, manual=True),
        DataLoader(TimedData(again.clock, batches), batch_size=None),
        ckpt_path=tmp_path / "last.ckpt",
        weights_only=True,
    )
    assert [(window.index, window.step) for window in kept.windows] == [(3, 8), (4, 10)]


def test_fast_dev_run_measures_and_leaves_no_files(tmp_path):
    _, made, callback, kept = timed_fit(tmp_path, fast_dev_run=True)
    assert len(kept.windows) == 1
    assert callback.summary["windows"] == 1
    assert list(tmp_path.iterdir()) == []
    assert is_as_found(made)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_spans_are_flushed_when_the_run_breaks(tmp_path, error):
    clock = Clock()
    callback = monitor(clock)
    made = trainer(tmp_path, callback, accumulate_grad_batches=2)
    stops = pytest.raises(SystemExit if error is KeyboardInterrupt else RuntimeError)
    with stops:
        made.fit(
            TimedModule(clock, raises_at=3, error=error), loader(*(packed([n]) for n in (1, 2, 3, 4, 5)))
        )
    cells = [line for line in lines(tmp_path) if line["kind"] == "cell"]
    assert [(c["window"], c["micro_batch"]) for c in cells] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [name for name, *_ in cells[-1]["spans"]] == ["data", "data", "forward"]
    assert is_as_found(made)
    assert ("Imbalance" in callback.console.export_text()) == (error is KeyboardInterrupt)


def test_an_error_while_reading_the_rest_leaves_the_trainer_as_it_was(tmp_path, monkeypatch):
    def fail(*_):
        raise ValueError("cannot be read")

    monkeypatch.setattr(RankMeasure, "read_rest", fail)
    clock = Clock()
    callback = monitor(clock)
    made = trainer(tmp_path, callback)
    with pytest.raises(RuntimeError, match="broken on purpose"):
        made.fit(TimedModule(clock, raises_at=1), loader(packed([1]), packed([2])))
    assert is_as_found(made)
    assert WindowSync.of(made)._parts == {}


def test_a_trainer_that_is_gone_takes_everything_with_it(tmp_path):
    bar = TrainingProgress()
    bar.console = Console(file=io.StringIO())
    built, made, callback, kept = timed_fit(tmp_path, callbacks=[bar], max_steps=2)
    assert WindowSync.of(made).num_gathers > 0
    gone = weakref.ref(made)
    del built, made, callback, kept, bar
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("error", [None, RuntimeError])
def test_no_part_is_left_when_the_training_is_over(tmp_path, error):
    clock = Clock()
    bar = TrainingProgress()
    bar.console = Console(file=io.StringIO())
    made = trainer(tmp_path, bar, monitor(clock), max_steps=3)
    with contextlib.nullcontext() if error is None else pytest.raises(error):
        made.fit(TimedModule(clock, raises_at=error and 1), loader(packed([1]), packed([2])))
    sync = WindowSync.of(made)
    assert (sync._parts, sync._watched) == ({}, {})


@pytest.mark.parametrize("bar_is_first", [True, False])
@pytest.mark.parametrize("steps", [True, False])
def test_the_meeting_is_no_cost_of_the_monitor(tmp_path, monkeypatch, bar_is_first, steps):
    """By a clock on which a meeting takes seven seconds, reading a batch's lengths two, all else nothing."""
    counter = Clock()
    for module in (imbalance_monitor, imbalance_measure, window_sync):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=counter))
    gather, measured = WindowSync.gather_words, BatchFacts.measured

    def slow_gather(self, words):
        counter.now += 7.0
        return gather(self, words)

    def slow_read(self, *given):
        counter.now += 2.0
        return measured(self, *given)

    clock = Clock()
    callback = monitor(clock)
    kept = Windows(callback)
    bar = TrainingProgress()
    bar.console = Console(file=io.StringIO())
    made = trainer(tmp_path, *([bar, callback] if bar_is_first else [callback, bar]), kept, max_epochs=3)
    monkeypatch.setattr(WindowSync, "gather_words", slow_gather)
    monkeypatch.setattr(BatchFacts, "measured", slow_read)
    costs, decode = [], imbalance_monitor.decode_window

    def decoded(*given):
        window = decode(*given)
        costs.append(window and (window.monitor_ms, window.sync_ms))
        return window

    monkeypatch.setattr(imbalance_monitor, "decode_window", decoded)
    module = TimedModule(clock) if steps else NeverSteps(clock, manual=True)
    made.fit(module, loader(packed([1]), packed([2])))
    cells = 1 if steps else 2
    measured_windows = [cost for cost in costs if cost is not None]
    assert len(measured_windows) == (6 if steps else 3)
    for monitor_ms, sync_ms in measured_windows[1:]:
        assert monitor_ms == pytest.approx(cells * 2000.0, abs=1.0)
        assert sync_ms == 7000.0


def test_a_fit_with_nothing_left_to_do_prints_no_earlier_table(tmp_path):
    clock = Clock()
    callback = monitor(clock)
    made = trainer(tmp_path, callback, max_steps=1)
    made.fit(TimedModule(clock), loader(packed([1]), packed([2])))
    assert "Imbalance" in callback.console.export_text(clear=True)
    made.fit(TimedModule(clock), loader(packed([1]), packed([2])))
    assert callback.console.export_text() == ""
    assert callback.summary is None


def test_an_error_before_the_training_changes_nothing(tmp_path):
    callback = monitor()
    made = trainer(tmp_path, callback)
    module = TimedModule(Clock())
    module.configure_optimizers = lambda: 1 / 0
    with pytest.raises(ZeroDivisionError):
        made.fit(module, loader(packed([1])))
    assert callback.summary is None
    assert list(tmp_path.iterdir()) == []


def test_a_second_fit_starts_anew(tmp_path):
    clock = Clock()
    callback = monitor(clock)
    kept = Windows(callback)
    made = trainer(tmp_path, callback, kept, max_epochs=-1, max_steps=2)
    made.fit(TimedModule(clock), loader(*(packed([n]) for n in (1, 2, 3))))
    made.fit_loop.epoch_loop.max_steps = 5
    made.fit(TimedModule(clock), loader(*(packed([n]) for n in (1, 2, 3))))
    assert [window.index for window in kept.windows] == [0, 1, 2, 3, 4]
    assert [line["kind"] for line in lines(tmp_path)].count("header") == 2
    assert callback.summary["windows"] == 2


class Predicts(Callback):
    """What a tuner would do: predict, and record its own time."""

    def __init__(self, callback, clock):
        self.callback, self.clock = callback, clock

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        with span(trainer, "tune"):
            self.clock.now += 2.0
        self.callback.annotate(predicted_ms=1e3 * (FORWARD + BACKWARD) * (1 + batch_idx), budget=4)


@pytest.mark.parametrize("is_first", [True, False])
def test_predictions_and_lanes_of_other_callbacks(tmp_path, is_first):
    clock = Clock()
    callback = monitor(clock)
    other, kept = Predicts(callback, clock), Windows(callback)
    callbacks = [callback, other] if is_first else [other, callback]
    trainer(tmp_path, *callbacks, kept, accumulate_grad_batches=2).fit(
        TimedModule(clock), loader(packed([3]), packed([4], budget=9, predicted_ms=1.0))
    )
    (window,) = kept.windows
    assert [cell.budget for cell in window.cells[0]] == [4.0, 4.0]
    assert [lane(cell, "tune") for cell in window.cells[0]] == [2.0, 2.0]
    assert [cell.predicted_ms for cell in window.cells[0]] == [30_000.0, 60_000.0]
    (found,) = kept.logged
    assert found["balance/imbalance_predicted"] == 1.0
    assert found["balance/imbalance_micro_batch_predicted"] == pytest.approx(60 / 45)
    assert found["predict/error_pct"] == pytest.approx(100 * (0 / 30 + 29 / 31) / 2)
    assert found["time/tune_ms"] == pytest.approx(4000.0)


def test_predictions_that_end_are_no_longer_known(tmp_path):
    fields = {"predicted_ms": [1e3, float("nan")], "budget": [torch.tensor([2, 4]), 3]}
    _, _, _, kept = timed_fit(tmp_path, lengths=[(5,), (6,)], fields=fields)
    assert [window.cells[0][0].budget for window in kept.windows] == [3.0, 3.0]
    assert kept.logged[0]["balance/imbalance_predicted"] == 1.0
    assert math.isnan(kept.logged[1]["balance/imbalance_predicted"])
    assert all(line.get("metrics", {}).get("predict/error_pct", 0) >= 0 for line in lines(tmp_path))


class Foreign(TimedModule):
    def training_step(self, batch, batch_idx):
        return self.loss()


def test_a_batch_that_says_nothing_still_has_times(tmp_path):
    clock = Clock()
    callback = monitor(clock)
    kept = Windows(callback)
    batches = loader((torch.zeros(2, 3), torch.zeros(2)), (torch.zeros(2, 3), torch.zeros(2)))
    trainer(tmp_path, callback, kept).fit(Foreign(clock), batches)
    assert "throughput/tokens_per_s" not in kept.logged[0]
    assert kept.windows[0].cells[0][0].busy_ms == 30_000.0
    assert not {"tokens", "sequences"} & set(lines(tmp_path)[1])
    assert "timeline" in callback.console.export_text()


@pytest.mark.parametrize("make", [lambda n: torch.tensor([n, 2]), lambda n: [n, 2]], ids=["tensor", "list"])
def test_lengths_can_be_told(tmp_path, make):
    clock = Clock()
    callback = monitor(clock, lengths=lambda batch: make(batch.shape[0]))
    trainer(tmp_path, callback).fit(Foreign(clock), loader(torch.zeros(7, 3)))
    (cell,) = callback.window.cells[0]
    assert (cell.tokens, cell.sequences) == (9, ((-1, 7), (-1, 2)))


def test_ids_that_are_names_or_too_few_are_unknown():
    batch = packed([3, 4])
    unknown = (
        ["a", "b"], [2**63, 2**64 - 1], torch.tensor([1]), None, 7, "ab", torch.tensor(3),
        [math.nan, math.inf], np.array([2**63, 2**64 - 1], dtype=np.uint64),
    )  # fmt: skip
    for ids in unknown:
        cell = BatchFacts({**batch, "sequence_ids": ids}).measured([0.0] * len(LANES), 0.0)
        assert cell.sequences == ((-1, 4), (-1, 3))


@pytest.mark.parametrize(
    "ids", [np.array([5, 6]), [np.int64(5), np.uint8(6)], [torch.tensor(5), torch.tensor([6])], ([5], [6.0])]
)
def test_ids_may_be_any_kind_of_integer(ids):
    cell = BatchFacts({**packed([3, 4]), "sequence_ids": ids}).measured([0.0] * len(LANES), 0.0)
    assert cell.sequences == ((6, 4), (5, 3))


def test_other_projects_may_call_a_tensor_target_tokens(tmp_path):
    bar = TrainingProgress()
    bar.console = Console(file=io.StringIO())
    targets = [torch.zeros(1, 4, dtype=torch.long)] * 2
    _, _, _, kept = timed_fit(
        tmp_path, lengths=[(5,), (6,)], fields={"target_tokens": targets}, callbacks=[bar]
    )
    assert [window.cells[0][0].is_padding for window in kept.windows] == [False, False]
    assert [tokens for tokens, _ in bar._recent] == [6]


def test_the_budget_of_a_sparse_model_is_known(tmp_path):
    clock = Clock()
    callback, module = monitor(clock), TimedModule(clock)
    module.sparse_settings = SimpleNamespace(budget=6, block_size=64)
    trainer(tmp_path, callback).fit(module, loader(packed([7])))
    assert callback.window.cells[0][0].budget == 6.0


def test_there_is_room_for_every_schedule_of_accumulation(tmp_path):
    schedule = GradientAccumulationScheduler({0: 1, 1: 3})
    _, _, _, kept = timed_fit(tmp_path, lengths=[(n,) for n in (1, 2, 3)], max_epochs=2, callbacks=[schedule])
    assert [len(window.cells[0]) for window in kept.windows] == [1, 1, 1, 3]


def test_two_monitors_are_refused(tmp_path):
    class Mine(ImbalanceMonitor):
        pass

    with pytest.raises(MisconfigurationException, match="ImbalanceMonitor more than once"):
        trainer(tmp_path, ImbalanceMonitor(), Mine()).fit(TimedModule(Clock()), loader(packed([1])))


def test_settings_are_checked():
    with pytest.raises(ValueError, match="table_every_n_windows is -1"):
        ImbalanceMonitor(table_every_n_windows=-1)


def test_a_profiler_goes_on_profiling(tmp_path):
    _, made, _, kept = timed_fit(tmp_path, profiler="simple")
    recorded = made.profiler.recorded_durations
    assert len(recorded["run_training_batch"]) == 5
    assert len(kept.windows) == 5
    assert is_as_found(made)


class Skips(TimedModule):
    def on_train_batch_start(self, batch, batch_idx):
        return -1 if batch_idx == 1 else None


def test_an_epoch_that_is_cut_short(tmp_path):
    clock = Clock()
    callback = monitor(clock)
    kept = Windows(callback)
    bar = TrainingProgress()
    bar.console = Console(file=io.StringIO())
    data = DataLoader(TimedData(clock, [[1], [2], [3]]), batch_size=None)
    made = trainer(tmp_path, callback, kept, bar, max_epochs=2)
    made.fit(Skips(clock), data)
    assert callback.window.index == 1
    assert callback.summary["windows"] == 1
    assert [line["window"] for line in lines(tmp_path) if line["kind"] == "window"] == [0, 1]
    assert [tokens for tokens, _ in bar._recent] == [1]
    assert [window.cells[0][0].tokens for window in kept.windows] == [1, 1]
    assert [lane(window.cells[0][0], "data") for window in kept.windows] == [DATA, DATA]


def test_others_can_watch_the_metrics(tmp_path):
    stopping = EarlyStopping("balance/idle_ms", patience=0, check_on_train_epoch_end=True)
    _, made, _, _ = timed_fit(tmp_path, max_epochs=9, callbacks=[stopping])
    assert made.current_epoch == 2


def test_the_bar_shows_the_imbalance(tmp_path):
    bar = TrainingProgress(refresh_every=1)
    bar.console = Console(width=110, record=True, file=io.StringIO())
    timed_fit(tmp_path, callbacks=[bar], max_steps=1)
    assert "  imbalance 1.000" in bar.console.export_text()


def test_the_same_with_pytorch_lightning(tmp_path):
    import pytorch_lightning

    clock = Clock()

    class Module(pytorch_lightning.LightningModule):
        loss, training_step = TimedModule.loss, TimedModule.training_step
        configure_optimizers = TimedModule.configure_optimizers

    # The one of TimedModule calls that of another class.
    def build(self, clock):
        pytorch_lightning.LightningModule.__init__(self)
        self.weight = torch.nn.Parameter(torch.ones(1))
        self.clock, self.raises_at, self.runs = clock, None, 0

    Module.__init__ = build
    callback = monitor(clock)
    made = pytorch_lightning.Trainer(
        accelerator="cpu", callbacks=[callback], default_root_dir=tmp_path, max_epochs=1, logger=False,
        enable_checkpointing=False, enable_model_summary=False, enable_progress_bar=False,
        accumulate_grad_batches=2,
    )  # fmt: skip
    made.fit(Module(clock), loader(packed([1]), packed([2]), packed([3]), packed([4])))
    assert [cell.busy_ms for cell in callback.window.cells[0]] == [32_000.0, 33_000.0]
    assert float(made.callback_metrics["balance/imbalance_micro_batch"]) == pytest.approx(33 / 32.5)
    assert is_as_found(made)


def test_a_disk_that_is_full_ends_the_spans_and_not_the_training(tmp_path, monkeypatch):
    from sb_lightning.tracking.span_file import SpanWriter

    write = SpanWriter.write

    def fail(self, lines):
        lines = list(lines)
        if any(line.get("window") == 1 for line in lines):
            raise OSError(28, "No space left on device")
        write(self, lines)

    monkeypatch.setattr(SpanWriter, "write", fail)
    with pytest.warns(UserWarning, match=r"rank_0000\.jsonl: No space left on device: no more spans"):
        _, _, _, kept = timed_fit(tmp_path)
    assert len(kept.windows) == 5
    assert [line["window"] for line in lines(tmp_path) if line["kind"] == "cell"] == [0]


def test_a_folder_that_cannot_be_made_is_no_error(tmp_path):
    (tmp_path / "spans").write_text("in the way")
    with pytest.warns(UserWarning, match="no more spans are written there"):
        _, _, _, kept = timed_fit(tmp_path)
    assert len(kept.windows) == 5


# The device's way: one window late.


def test_a_window_is_read_when_the_next_is_over(tmp_path, monkeypatch):
    made_clocks = []

    def clock_of(clock):
        made_clocks.append(HostClock(clock))
        return made_clocks[-1]

    monkeypatch.setattr(imbalance_monitor, "_reads_late", lambda trainer: True)
    monkeypatch.setattr(imbalance_monitor, "CudaClock", clock_of)
    _, _, callback, kept = timed_fit(tmp_path, accumulate_grad_batches=2)
    assert len(made_clocks) == 1
    # Three windows: two are known by the end of the last micro-batch, the last when the training ends.
    assert [window.index for window in kept.windows] == [0, 1]
    assert callback.window.index == 2
    assert callback.window.wall_s == DATA + FORWARD + 4 + BACKWARD + OPTIMIZER
    assert [line["window"] for line in lines(tmp_path) if line["kind"] == "window"] == [0, 1, 2]


def test_nothing_of_a_late_window_is_lost_when_the_run_breaks():
    clock = Clock()
    measure = RankMeasure(
        clock=clock, stamps=HostClock(clock), is_late=True, capacity=2, first_window=0, keep_lines=True
    )
    for step in (1, 2):
        measure.start(packed([step]), None, math.nan, 0)
        with measure.recorder.span("forward"):
            clock.now += 1
        _, ints = measure.fill(step)
        assert ints[0] == step - 1
    measure.start(packed([3]), None, math.nan, 0)
    measure.recorder.begin("forward")
    clock.now += 1
    measure.read_rest(2)
    assert [line["tokens"] for line in measure.lines] == [1, 2, 3]


class StuckStamps(HostClock):
    """Those of a device that has passed what was stamped before `until`, and gets no further."""

    until = 101.5

    def settles(self):
        return False

    def passed(self, spans):
        return [span for span in spans if span.end <= self.until]


def test_a_device_that_is_stuck_is_not_waited_for():
    class OnDevice(torch.Tensor):
        """Can only be read once the device has come to it."""

        @property
        def device(self):
            return torch.device("cuda")

        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            if function.__name__ in {"tolist", "item", "double"}:
                raise AssertionError("waited for ever")
            return super().__torch_function__(function, types, args, kwargs or {})

    clock = Clock()
    measure = RankMeasure(
        clock=clock, stamps=StuckStamps(clock), is_late=True, capacity=2, first_window=0, keep_lines=True
    )
    for _ in range(3):
        batch = packed([3], budget=torch.tensor([2.0]).as_subclass(OnDevice), predicted_ms=5.0)
        batch = {name: v.as_subclass(OnDevice) if torch.is_tensor(v) else v for name, v in batch.items()}
        batch["sequence_ids"] = torch.tensor([4]).as_subclass(OnDevice)
        measure.start(batch, None, math.nan, 0)
        with measure.recorder.span("forward"):
            clock.now += 1
        measure.finish()
    measure.read_rest(1)
    assert [line["spans"] for line in measure.lines] == [[["forward", 0, 1_000_000]]]
    assert measure.lines[0]["predicted_ms"] == 5.0
    assert not {"tokens", "budget", "sequences"} & set(measure.lines[0])
