"""What ImbalanceMonitor costs per window, beside the length of a window, on two CPU ranks.

    python benchmarks/monitor_cost.py
    python benchmarks/monitor_cost.py --json benchmarks/results/monitor_cost.json

Two ranks train a small model for some windows of four micro-batches. The monitor counts its own time: every
hook from entry to exit, and the calls of the profiler that it listens to at their usual price (`own`). The
ranks' meeting after each window (`meet`) lasts until the slower rank is there; with the monitor taken away
they meet a moment later, in Lightning's broadcast before the next micro-batch. Both are medians over windows.
`parts`: what recording, reading and the metrics of one window take, medians of many repetitions.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from pathlib import Path

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils.data import DataLoader

from sb_lightning.callbacks import ImbalanceMonitor
from sb_lightning.callbacks.imbalance_measure import RankMeasure
from sb_lightning.tracking.spans import HostClock
from sb_lightning.tracking.window_record import decode_window, window_metrics

ACCUMULATE = 4
TARGET = 0.002


class Layers(LightningModule):
    """Linear layers; a window takes some two seconds, as that of the quickstart."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(*[torch.nn.Linear(width, width) for _ in range(depth)])

    def training_step(self, batch, batch_idx):
        return self.layers(batch["x"]).pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Costs(Callback):
    """Keeps the costs of every window that the monitor before it has measured."""

    def __init__(self, monitor: ImbalanceMonitor) -> None:
        self.monitor, self.rows, self.last = monitor, [], -1

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        window = self.monitor.window
        if window is not None and window.index != self.last:
            self.last = window.index
            self.rows.append((1e3 * window.wall_s, window.monitor_ms, window.sync_ms))


def batches(tokens: int, width: int, count: int) -> DataLoader:
    """Packed micro-batches of three sequences."""
    bounds = torch.tensor([0, tokens // 2, 3 * tokens // 4, tokens], dtype=torch.int32)
    ids = torch.arange(3)
    batch = {"x": torch.randn(tokens, width), "cu_seqlens": bounds, "sequence_ids": ids}
    return DataLoader([batch] * count, batch_size=None)


def parts(repetitions: int = 300) -> dict[str, float]:
    """Microseconds of a window's parts on one rank, four micro-batches of six spans."""
    found: dict[str, list[float]] = {"record": [], "read": [], "metrics": []}
    batch = next(iter(batches(64, 8, 1)))
    for _ in range(repetitions):
        measure = RankMeasure(
            clock=time.perf_counter,
            stamps=HostClock(time.perf_counter),
            is_late=False,
            capacity=ACCUMULATE,
            first_window=0,
            keep_lines=True,
        )
        start = time.perf_counter()
        for _ in range(ACCUMULATE):
            measure.start(batch, None, 8.0, 0)
            for lane in ("broadcast", "data", "data", "forward", "backward", "optimizer"):
                measure.recorder.begin(lane)
                measure.recorder.end(lane)
            measure.finish()
        recorded = time.perf_counter()
        floats, ints = measure.fill(1)
        read = time.perf_counter()
        window = decode_window(torch.tensor([floats]).double().numpy(), torch.tensor([ints]).numpy())
        assert window is not None
        window_metrics(window)
        done = time.perf_counter()
        for name, seconds in zip(found, (recorded - start, read - recorded, done - read), strict=True):
            found[name].append(1e6 * seconds)
    return {name: round(statistics.median(values), 1) for name, values in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--windows", type=int, default=10, help="windows to run")
    parser.add_argument("--tokens", type=int, default=3000, help="tokens of a micro-batch")
    parser.add_argument("--width", type=int, default=512, help="width of the layers")
    parser.add_argument("--depth", type=int, default=12, help="number of layers")
    parser.add_argument(
        "--folder", type=Path, default=Path("runs/monitor_cost"), help="where spans are written"
    )
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    monitor = ImbalanceMonitor()
    costs = Costs(monitor)
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        accumulate_grad_batches=ACCUMULATE,
        max_epochs=1,
        callbacks=[monitor, costs],
        default_root_dir=options.folder,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
        use_distributed_sampler=False,
    )
    trainer.fit(
        Layers(options.width, options.depth),
        batches(options.tokens, options.width, options.windows * ACCUMULATE),
    )
    if not trainer.is_global_zero:
        return
    # The first window warms up; its cost is told with the second.
    window_ms, own_ms, meet_ms = (statistics.median(column) for column in zip(*costs.rows[2:], strict=True))
    result = {
        "version": 1,
        "machine": {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count()},
        "torch": torch.__version__,
        "ranks": 2,
        "micro_batches": ACCUMULATE,
        "windows": len(costs.rows) - 2,
        "window_ms": round(window_ms, 2),
        "own_ms": round(own_ms, 3),
        "own_share": round(own_ms / window_ms, 6),
        "meet_ms": round(meet_ms, 3),
        "parts_us": parts(),
        "target_share": TARGET,
    }
    print(json.dumps(result, indent=2))
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        part = options.json.with_name(f".{options.json.name}.tmp")
        part.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        part.replace(options.json)


if __name__ == "__main__":
    main()
