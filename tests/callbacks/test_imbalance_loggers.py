"""What the loggers get: CSV, TensorBoard and Weights & Biases, offline and read back."""

from __future__ import annotations

import csv
import json
import struct
from pathlib import Path

import pytest
from imbalance_run import TimedModule, monitor, timed_fit
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger, WandbLogger
from packed_run import Clock, loader, packed, trainer

from sb_lightning.callbacks.imbalance_table import CELL_COLUMNS, WORST_COLUMNS

NAMES = {
    "balance/imbalance", "balance/imbalance_slot", "balance/imbalance_micro_batch",
    "balance/imbalance_within", "balance/idle_ms", "throughput/tokens_per_s", "time/data_ms",
    "time/forward_ms", "time/backward_ms", "time/wait_ms", "time/broadcast_ms", "time/optimizer_ms",
    "time/plan_ms", "time/tune_ms", "time/monitor_ms", "time/sync_ms",
}  # fmt: skip


def csv_rows(folder):
    with (folder / "metrics.csv").open() as file:
        return [row for row in csv.DictReader(file) if row.get("balance/imbalance")]


def offline_history(path):
    """The rows of an offline run: a header, then LevelDB log blocks of protobuf records."""
    from wandb.proto import wandb_internal_pb2

    raw, at, record = path.read_bytes(), 7, b""
    assert raw[:4] == b":W&B"
    while at + 7 <= len(raw):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        _, size, kind = struct.unpack("<IHB", raw[at : at + 7])
        if kind == 0:
            break
        record += raw[at + 7 : at + 7 + size]
        at += 7 + size
        # A whole record, or the last piece of one.
        if kind in (1, 4):
            parsed = wandb_internal_pb2.Record()
            parsed.ParseFromString(record)
            record = b""
            if parsed.WhichOneof("record_type") == "history":
                yield {
                    (i.key or "/".join(i.nested_key)): json.loads(i.value_json) for i in parsed.history.item
                }


@pytest.mark.parametrize(("every", "steps"), [(1, [0, 1, 2]), (2, [1]), (0, [])])
def test_csv_has_a_row_per_window_that_lightning_would_log(tmp_path, every, steps):
    timed_fit(
        tmp_path, accumulate_grad_batches=2, logger=CSVLogger(tmp_path, name=""), log_every_n_steps=every
    )
    rows = csv_rows(tmp_path / "version_0") if steps else []
    assert [int(row["step"]) for row in rows] == steps
    assert all(row.keys() >= NAMES and all(row[name] for name in NAMES) for row in rows)
    assert (tmp_path / "version_0" / "spans" / "rank_0000.jsonl").exists()


def test_tensorboard_and_csv_at_once(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    loggers = [CSVLogger(tmp_path / "csv"), TensorBoardLogger(tmp_path / "board")]
    timed_fit(tmp_path, accumulate_grad_batches=2, logger=loggers, log_every_n_steps=1)
    events = EventAccumulator(loggers[1].log_dir)
    events.Reload()
    assert set(events.Tags()["scalars"]) >= NAMES
    rows = csv_rows(Path(loggers[0].log_dir))
    series = events.Scalars("time/forward_ms")
    assert [event.step for event in series] == [0, 1, 2]
    assert [event.value for event in series] == pytest.approx([float(row["time/forward_ms"]) for row in rows])


def wandb_fit(folder, steps, resume=None):
    """Fit with an offline run of the same id; returns its history and its tables by name."""
    import wandb

    clock = Clock()
    callback = monitor(clock, table_every_n_windows=2)
    logger = WandbLogger(project="test", save_dir=folder, id="run1", resume="allow", log_model=False)
    made = trainer(
        folder, callback, accumulate_grad_batches=2, max_epochs=-1, max_steps=steps, logger=logger,
        log_every_n_steps=1,
    )  # fmt: skip
    batches = loader(*(packed([n, 2 * n]) for n in range(1, 9)))
    try:
        made.fit(TimedModule(clock), batches, ckpt_path=resume)
        made.save_checkpoint(folder / "last.ckpt")
    finally:
        wandb.finish()
        # Only when its process has ended is the file whole.
        wandb.teardown()
    assert (folder / "test" / "run1" / "spans" / "rank_0000.jsonl").exists()
    (run,) = folder.glob("wandb/offline-run-*-run1")
    tables = {
        path.name: json.loads(path.read_text()) for path in run.glob("files/media/table/balance/*.json")
    }
    return list(offline_history(run / "run-run1.wandb")), tables


def test_wandb_offline_has_sections_and_tables_and_resumes_by_id(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    first, tables = wandb_fit(tmp_path / "a", 3)
    second, _ = wandb_fit(tmp_path / "b", 5, resume=tmp_path / "a" / "last.ckpt")
    rows = [*first, *second]
    measured = [row for row in rows if "balance/imbalance" in row]
    assert all(row.keys() >= NAMES for row in measured)
    assert [row["trainer/global_step"] for row in measured] == [0, 1, 2, 3, 4]
    steps = [row["trainer/global_step"] for row in rows if "trainer/global_step" in row]
    assert steps == sorted(steps)
    # Every second window, and what was worst at the end of each session.
    kinds = [name for row in rows for name in ("cells", "worst_cells") if f"balance/{name}/nrows" in row]
    assert kinds == ["cells", "cells", "worst_cells", "cells", "worst_cells"]
    cells = [table for name, table in sorted(tables.items()) if name.startswith("cells")]
    assert [table["columns"] for table in cells] == [CELL_COLUMNS] * 2
    assert [[row[0] for row in table["data"]] for table in cells] == [[0, 0], [2, 2]]
    assert cells[0]["data"][1][:6] == [0, 0, 1, 6, 4, "(4 tokens), (2 tokens)"]
    assert cells[0]["data"][1][6:] == [None, None, 31_000.0, 0.0]
    (worst,) = [table for name, table in tables.items() if name.startswith("worst")]
    assert worst["columns"] == WORST_COLUMNS
