"""What balancing by predicted latency gives on the clock: the quickstart's model on two CPU ranks.

    python benchmarks/sab.py
    python benchmarks/sab.py --windows 20 --json benchmarks/results/sab.json

Every window of sequences is trained on once under each arm, in an order that rotates from window to window,
in one run: `random`, `length` and `latency` deal the same sequences; `control` gives both ranks the same
cells (those of rank 0 under `latency`), so that whatever imbalance it shows is the machine's. The ranks meet
once per window, as with the callback `WindowMeetings`. Further arms (`--arms all`) try what else could help
or harm: the `fsdp` objective, short micro-batches first, Lightning's broadcast before every micro-batch.

Measured by ImbalanceMonitor: busy times without waits, and the length of the window on the clock. `speedup`
is the time of `random` over that of the arm, over the same windows; predicted, by the latency table, if ranks
met once per window (`ddp`) or in every slot (`slot`).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, Trainer

from sb_lightning._files import write_whole
from sb_lightning.balance import BalancedDataLoader, Cell, SparsityAwareBatchSampler
from sb_lightning.callbacks import ImbalanceMonitor, WindowMeetings
from sb_lightning.cli.latency import LatencySettings, table_of_run
from sb_lightning.cli.launch import set_threads
from sb_lightning.cli.profile import ProfileCLI
from sb_lightning.data import TextDataModule
from sb_lightning.data.dataset import collate_cell
from sb_lightning.latency.fingerprint import processor_name
from sb_lightning.tracking.metrics import imbalances
from sb_lightning.training import CausalLMModule

RANKS = 2
IMBALANCES = ("imbalance", "imbalance_slot", "imbalance_micro_batch", "imbalance_within")


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One way to run a window."""

    policy: str = "latency"
    objective: str = "ddp"
    order: str = "as planned"
    """Of the micro-batches: `as planned` (longest first), `short first`, or `rank 0 short first`."""
    is_control: bool = False
    meets_often: bool = False
    """Let the ranks meet before every micro-batch, as Lightning does by itself."""


ARMS = {
    "control": Arm(is_control=True),
    "random": Arm(policy="random"),
    "length": Arm(policy="length"),
    "latency": Arm(),
}
MORE = {
    "latency, fsdp": Arm(objective="fsdp"),
    "latency, short first": Arm(order="short first"),
    "random, meets often": Arm(policy="random", meets_often=True),
    "latency, meets often": Arm(meets_often=True),
    "latency, fsdp, meets often": Arm(objective="fsdp", meets_often=True),
    "latency, rank 0 short first, meets often": Arm(order="rank 0 short first", meets_often=True),
}


class Interleaved(SparsityAwareBatchSampler):
    """Runs every window under each arm; a `window` of this sampler is a window under an arm."""

    def __init__(self, *args: Any, arms: dict[str, Arm], windows: int, **options: Any) -> None:
        super().__init__(*args, **options)
        self.arms, self.windows = arms, windows

    @property
    def num_batches(self) -> int:
        """Micro-batches per rank of all windows and arms."""
        arms = getattr(self, "arms", None)
        return len(arms) * self.windows * self.accumulate if arms else super().num_batches

    def arm_of(self, run: int) -> tuple[str, int]:
        """Return arm and window; the order of the arms rotates."""
        window, place = divmod(run, len(self.arms))
        return list(self.arms)[(place + window) % len(self.arms)], window

    def planned(self, run: int) -> tuple[Any, np.ndarray, list[list[int]]]:
        """Return plan, members, and for each rank the micro-batches of the plan in the order they run."""
        name, window = self.arm_of(run)
        arm = self.arms[name]
        plan = self.plan(0, window, policy=arm.policy, objective=arm.objective)
        orders = [list(range(self.accumulate)) for _ in range(RANKS)]
        for rank, order in enumerate(orders):
            if arm.order == "short first" or (arm.order == "rank 0 short first" and rank == 0):
                order.sort(key=lambda a, rank=rank: plan.predicted_ms[rank][a])
        return plan, self.members(0, window), orders

    def predicted(self, run: int) -> np.ndarray:
        """Predicted times of the cells as they run # [R, A]."""
        plan, _, orders = self.planned(run)
        is_control = self.arms[self.arm_of(run)[0]].is_control
        rows = [0, 0] if is_control else range(RANKS)
        return np.array([[plan.predicted_ms[r][a] for a in orders[r]] for r in rows])

    def cell(self, run: int, micro_batch: int, rank: int | None = None) -> Cell:
        """Return one cell of a window under an arm."""
        plan, members, orders = self.planned(run)
        row = 0 if self.arms[self.arm_of(run)[0]].is_control else self.rank
        place = orders[row][micro_batch]
        return Cell(
            [int(members[i]) for i in plan.cells[row][place]],
            window=run,
            micro_batch=micro_batch,
            target_tokens=plan.cell_target_tokens[row][place],
            window_target_tokens=plan.target_tokens,
            is_padding=False,
            predicted_ms=plan.predicted_ms[row][place],
            budgets=None,
            plan_gap=plan.gap,
            max_length=None,
        )


class SabData(TextDataModule):
    """The data of the configuration, with the arms interleaved."""

    arms: dict[str, Arm]
    windows: int

    def train_dataloader(self) -> BalancedDataLoader:
        """Return the loader of all arms."""
        base = super().train_dataloader().batch_sampler
        assert isinstance(base, SparsityAwareBatchSampler)
        sampler = Interleaved(
            base.lengths,
            base.target_tokens,
            arms=self.arms,
            windows=self.windows,
            ranks=base.ranks,
            rank=base.rank,
            accumulate=base.accumulate,
            latency=base.costs.table,
            budget=base.costs.budget,
            seed=base.seed,
        )
        return BalancedDataLoader(self.train_dataset, batch_sampler=sampler, collate_fn=collate_cell)


class Meetings(WindowMeetings):
    """Lets the ranks meet before every micro-batch in the arms that say so, as Lightning does by itself."""

    def meets_before(self, trainer: Trainer, micro_batch: int) -> bool:
        """Return whether the ranks meet."""
        sampler = trainer.train_dataloader.batch_sampler
        name, _ = sampler.arm_of(
            min(micro_batch // sampler.accumulate, sampler.num_batches // sampler.accumulate - 1)
        )
        return sampler.arms[name].meets_often or super().meets_before(trainer, micro_batch)


class Collected(Callback):
    """Keeps what the monitor before it has measured of every window."""

    def __init__(self, monitor: ImbalanceMonitor) -> None:
        self.monitor, self.windows = monitor, []

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, idx: int
    ) -> None:
        window = self.monitor.window
        if window is not None and len(self.windows) == window.index:
            self.windows.append(window)
            if trainer.is_global_zero and window.index % 10 == 9:
                print(f"{window.index + 1} of {trainer.max_steps} windows", flush=True)


def summary(values: list[float]) -> dict[str, float]:
    """Median and quartiles."""
    low, middle, high = statistics.quantiles(values, n=4) if len(values) > 1 else [values[0]] * 3
    return {"median": round(middle, 4), "q1": round(low, 4), "q3": round(high, 4)}


def figures(sampler: Interleaved, windows: list[Any]) -> dict[str, Any]:
    """Per arm: imbalance, times, and speedups over `random`, without the first round, which warms up."""
    rows: dict[str, dict[int, dict[str, Any]]] = {name: {} for name in sampler.arms}
    for run, window in enumerate(windows):
        name, number = sampler.arm_of(run)
        if number > 0:
            predicted = sampler.predicted(run)
            lanes = window.times[..., : len(window.times[0, 0]) - 3].sum(axis=1).mean(axis=0)
            rows[name][number] = {
                "busy": window.busy_ms,
                "predicted": predicted,
                "wall_ms": 1e3 * window.wall_s,
                "wait_ms": float(lanes[_lane("wait")] + lanes[_lane("broadcast")]),
                "plan_ms": float(lanes[_lane("plan")]),
            }
    found = {}
    for name, by_number in rows.items():
        base = rows["random"]
        pairs = [(base[n], row) for n, row in by_number.items() if n in base]
        measured = [imbalances(row["busy"]) for row in by_number.values()]
        planned = [imbalances(row["predicted"]) for row in by_number.values()]
        found[name] = {
            "windows": len(by_number),
            **{key: summary([m[f"balance/{key}"] for m in measured]) for key in IMBALANCES},
            **{
                f"{key}_predicted": round(statistics.mean(p[f"balance/{key}"] for p in planned), 4)
                for key in IMBALANCES
            },
            "window_ms": summary([row["wall_ms"] for row in by_number.values()]),
            "wait_ms": summary([row["wait_ms"] for row in by_number.values()]),
            "plan_ms": summary([row["plan_ms"] for row in by_number.values()]),
            "speedup": round(_ratio(pairs, lambda row: row["wall_ms"]), 4),
            "speedup_spread": summary([a["wall_ms"] / b["wall_ms"] for a, b in pairs]),
            "speedup_busy_ddp": round(_ratio(pairs, lambda row: row["busy"].sum(axis=1).max()), 4),
            "speedup_busy_slot": round(_ratio(pairs, lambda row: row["busy"].max(axis=0).sum()), 4),
            "speedup_predicted_ddp": round(_ratio(pairs, lambda row: row["predicted"].sum(axis=1).max()), 4),
            "speedup_predicted_slot": round(_ratio(pairs, lambda row: row["predicted"].max(axis=0).sum()), 4),
        }
    return found


def _lane(name: str) -> int:
    from sb_lightning.tracking.spans import LANES

    return LANES.index(name)


def _ratio(pairs: list[tuple[Any, Any]], value: Callable[[Any], float]) -> float:
    return float(sum(value(a) for a, _ in pairs) / sum(value(b) for _, b in pairs))


def show(found: dict[str, Any]) -> str:
    """The figures as a Markdown table."""
    heads = ["arm", "imbalance", "slot", "micro-batch", "within", "window ms", "waits ms", "speedup"]
    heads += ["predicted ddp", "predicted slot"]
    lines = [f"| {' | '.join(heads)} |", "|---" + "|---:" * (len(heads) - 1) + "|"]
    for name, row in found.items():
        cells = [f"{row[key]['median']:.3f}" for key in IMBALANCES]
        cells += [f"{row[key]['median']:.0f}" for key in ("window_ms", "wait_ms")]
        cells += [f"{row[key]:.3f}" for key in ("speedup", "speedup_predicted_ddp", "speedup_predicted_slot")]
        lines.append(f"| {' | '.join([name, *cells])} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--windows", type=int, default=20, help="windows to run under each arm (20)")
    parser.add_argument("--config", default="configs/quickstart.yaml", help="configuration of model and data")
    parser.add_argument("--arms", choices=("paper", "all"), default="paper", help="all tries more arms")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options, rest = parser.parse_known_args()
    arms = {**ARMS, **MORE} if options.arms == "all" else ARMS
    cli = ProfileCLI(CausalLMModule, SabData, args=["fit", "--config", options.config, *rest])
    set_threads(1)
    data, config = cli.datamodule, cli.config["fit"]["trainer"]
    data.arms, data.windows = arms, options.windows + 1
    monitor = ImbalanceMonitor(spans=False)
    collected = Collected(monitor)
    trainer = Trainer(
        accelerator="cpu",
        devices=RANKS,
        strategy="ddp",
        accumulate_grad_batches=config["accumulate_grad_batches"],
        gradient_clip_val=config["gradient_clip_val"],
        max_steps=len(arms) * data.windows,
        limit_val_batches=0,
        callbacks=[Meetings(), monitor, collected],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
        use_distributed_sampler=False,
    )
    table = None
    if trainer.global_rank == 0:
        table = table_of_run(LatencySettings(table="auto"), cli.trainer, cli.model, data, threads=1)
        data.latency = table
    trainer.fit(cli.model, data)
    if not trainer.is_global_zero:
        return
    sampler = trainer.train_dataloader.batch_sampler
    result = {
        "version": 1,
        "machine": {"cpu": processor_name(), "cores": os.cpu_count()},
        "torch": torch.__version__,
        "config": options.config,
        "latency": data.latency.label,
        "ranks": RANKS,
        "micro_batches": sampler.accumulate,
        "arms": figures(sampler, collected.windows),
    }
    print(show(result["arms"]))
    if options.json:
        write_whole(options.json, json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
