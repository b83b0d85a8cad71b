"""What the run summary says about predicted and measured times."""

from __future__ import annotations

import io
from types import SimpleNamespace

import pytest
from lightning.pytorch import Callback
from packed_run import Clock, PackedModule, loader, packed, sparse, trainer
from rich.console import Console

from sb_lightning.callbacks import RunSummary
from sb_lightning.callbacks.step_times import StepTimes, analytic_cost
from sb_lightning.latency import AnalyticCost, Fingerprint, LatencyTable, Measurements, ModelShape

WINDOWS = [packed([5]), packed([9, 2]), packed([20]), packed([40])]
SHAPE = {
    "layers": 1, "dense_layers": 0, "query_heads": 1, "kv_heads": 1, "head_dim": 32, "hidden_size": 32,
    "intermediate_size": 32, "vocab_size": 8, "block_size": 16,
}  # fmt: skip


def table(ms_per_token=100.0, fixed_ms=0.0):
    """Whatever the budget, a token takes so long; nearly all of it outside the layers."""
    lengths = [1, 64]
    tiny, times = [[1e-9, 1e-9]] * 2, [[n * ms_per_token / 2 for n in lengths]] * 2
    fingerprint = Fingerprint(
        **SHAPE, device="cpu", processor="A processor", threads=1, ranks=1, dtype="float32", backend="cpu",
        torch="2", build="0",
    )  # fmt: skip
    given = Measurements(
        block_size=16, layers=1, dense_layers=0, fixed_ms=fixed_ms, lengths=lengths, budgets=[[], [1]],
        sparse=[[[], []], [[1e-9], [1e-9]]], dense=tiny, rest=tiny, outside=times,
    )  # fmt: skip
    return LatencyTable(given, fingerprint)


def run(tmp_path, latency=None, **settings):
    clock = Clock()
    callback = RunSummary()
    callback.clock = clock
    callback.console = Console(width=220, record=True, file=io.StringIO())
    callback.latency = latency
    # A step takes 2 s, whatever its length.
    trainer(tmp_path, callback, **settings).fit(
        PackedModule(clock, sparse_settings=sparse(16, 2)), loader(*WINDOWS)
    )
    return callback


def test_predicted_against_measured(tmp_path):
    callback = run(tmp_path, table(fixed_ms=100.0))
    # Without the first: 11, 20 and 40 tokens, at 100 ms a token and 100 ms more.
    found = callback.summary["step_times"]
    assert found["micro_batches"] == 3
    assert found["measured_ms"] == pytest.approx(2000)
    assert found["predicted_ms"] == pytest.approx((1200 + 2100 + 4100) / 3, rel=5e-3)
    assert found["median_error"] == pytest.approx(0.4, rel=0.02)
    assert found["latency_model"] == "measured (A processor, 1 thread x 1, float32)"
    text = callback.console.export_text()
    assert "(3 micro-batches of rank 0" in text
    assert f"measured 2000.0 ms, predicted {found['predicted_ms']:.1f} ms, median error" in text
    assert "predicted by measured (A processor" in text


def test_counted_operations_are_scaled_and_say_so(tmp_path):
    found = run(tmp_path, AnalyticCost(ModelShape(**SHAPE))).summary["step_times"]
    assert found["latency_model"] == "analytic (no profile), scaled to this run"
    assert found["predicted_ms"] == pytest.approx(2000, rel=0.3)


def test_without_a_model_nothing_is_said(tmp_path):
    callback = run(tmp_path)
    assert callback.summary["step_times"] is None
    assert "micro-batch time" not in callback.console.export_text()


def test_a_table_is_read_from_a_file(tmp_path):
    table().save(tmp_path / "t.json")
    callback = RunSummary(latency_table=str(tmp_path / "t.json"))
    assert callback.latency.label == f"{tmp_path / 't.json'}, measured (A processor, 1 thread x 1, float32)"
    with pytest.raises(FileNotFoundError):
        RunSummary(latency_table=str(tmp_path / "other.json"))


class Marks:
    def __init__(self):
        self.moment = 0.0

    def now(self):
        self.moment += 10.0
        return self.moment

    def settle(self):
        pass

    def between_ms(self, start, end):
        return end - start


def micro_batch(times, *, steps=False, backward=True):
    times.begin()
    if backward:
        times.backward_done()
    if steps:
        times.optimizer_steps()
    times.finish(packed([5]))


@pytest.mark.parametrize(("exchanges", "count"), [(False, 4), (True, 2)])
def test_micro_batches_that_wait_for_other_ranks_are_left_out(exchanges, count):
    times = StepTimes(Marks(), exchanges=exchanges)
    for _ in range(3):
        micro_batch(times)
        micro_batch(times, steps=True)
        times.close_window()
    found = times.compare(table(), 1)
    assert (found["micro_batches"], found["measured_ms"]) == (count, 10.0)


class StuckMarks(Marks):
    """Those of a device that is behind an exchange with ranks that are gone."""

    def __init__(self, passes):
        super().__init__()
        self.passes = passes

    def now(self):
        return SimpleNamespace(at=super().now(), query=lambda: self.passes)

    def settle(self):
        raise AssertionError("waited for ever")

    def between_ms(self, start, end):
        return end.at - start.at


@pytest.mark.parametrize("passes", [True, False])
def test_a_run_that_broke_off_does_not_wait_for_the_device(passes):
    times = StepTimes(StuckMarks(passes), exchanges=False)
    for _ in range(2):
        micro_batch(times)
        times.close_window()
    found = times.compare(table(), 1, waits=False)
    assert (found and found["measured_ms"]) == (10.0 if passes else None)
    with pytest.raises(AssertionError, match="waited"):
        times.compare(table(), 1)


def test_the_summary_after_ctrl_c_does_not_wait_for_the_device(tmp_path, monkeypatch):
    waits = []
    real = StepTimes.compare

    def compare(self, *given, waits, at=waits):
        at.append(waits)
        return real(self, *given, waits=waits)

    monkeypatch.setattr(StepTimes, "compare", compare)

    class Interrupts(Callback):
        def on_train_batch_end(self, trainer, *_):
            if trainer.world_size == 1 and trainer.global_step == 3 and waits:
                raise KeyboardInterrupt

    run(tmp_path, table())
    clock, callback = Clock(), RunSummary()
    callback.clock, callback.latency = clock, table()
    callback.console = Console(file=io.StringIO())
    with pytest.raises(SystemExit):
        trainer(tmp_path, callback, Interrupts()).fit(PackedModule(clock), loader(*WINDOWS))
    assert callback.summary["step_times"]["micro_batches"] == 2
    assert waits == [True, False]


def test_nothing_measured_is_nothing_said():
    times = StepTimes(Marks(), exchanges=True)
    for _ in range(3):
        micro_batch(times, steps=True)
        micro_batch(times, backward=False)
        times.close_window()
    assert times.compare(table(), 1) is None


def test_models_without_the_usual_sizes_have_no_counted_operations():
    settings = SimpleNamespace(block_size=16, budget=2, dense_layers=())
    for module in (
        SimpleNamespace(),
        SimpleNamespace(sparse_settings=settings),
        SimpleNamespace(sparse_settings=settings, model=SimpleNamespace(config=SimpleNamespace())),
    ):
        assert analytic_cost(module) is None


def test_devices_without_a_clock_are_trained_on_but_not_timed(tmp_path, monkeypatch):
    monkeypatch.setattr("sb_lightning.callbacks.summary.TIMED_DEVICES", ("cuda",))
    assert run(tmp_path, table()).summary["step_times"] is None
