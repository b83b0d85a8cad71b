"""What the three lines of `after.py` bring, each alone and all together, measured on two CPU ranks.

`python examples/existing_project/compare.py` trains the project four times, with the same files in every
optimizer step.
"""

import logging

import after
import before
from lightning.pytorch import Callback, seed_everything
from lightning.pytorch.utilities import rank_zero_only
from rich.console import Console

from sb_lightning.callbacks import BalancedSampling, ImbalanceMonitor, SparseBalanceCallback, WindowMeetings

QUIET = {"enable_progress_bar": False, "enable_model_summary": False}


def balanced(*more, **settings):
    return before.make_trainer(*more, BalancedSampling(), WindowMeetings(), **settings)


def tuned(*more, **settings):
    return before.make_trainer(*more, SparseBalanceCallback(), WindowMeetings(), **settings)


ARMS = {
    "as it was": (before.SourceModel, before.SourceData, before.make_trainer),
    "sampler alone": (before.SourceModel, after.SourceData, balanced),
    "sparse and tuned alone": (after.SourceModel, before.SourceData, tuned),
    "all three lines": (after.SourceModel, after.SourceData, after.make_trainer),
}
"""Model, data and Trainer, each of before or after."""


class TunedWindows(Callback):
    """Keeps the metrics of every window that a SparseBalanceCallback has tuned."""

    def __init__(self):
        self.windows, self._last = [], None

    def _note(self, trainer, *_):
        tuning = next((c for c in trainer.callbacks if isinstance(c, SparseBalanceCallback)), None)
        window = getattr(tuning, "window", None)
        if window is not None and window is not self._last:
            self._last = window
            self.windows.append(window.metrics())

    on_train_batch_start = on_train_end = _note


def train(arm, **settings):
    """Train one arm; return what was measured, in the units of the metrics."""
    seed_everything(0, verbose=False)
    model, data, make_trainer = ARMS[arm]
    monitor, tuned_windows = ImbalanceMonitor(spans=False), TunedWindows()
    monitor.console = Console(quiet=True)
    trainer = make_trainer(monitor, tuned_windows, **{**QUIET, **settings})
    trainer.fit(model(), data())
    summary = monitor.summary
    return {
        "imbalance": summary["imbalance"],
        "window_ms": summary["window_ms"],
        "val_loss": float(trainer.callback_metrics["val_loss"]),
        "tuned": tuned_windows.windows,
    }


def row(arm, found):
    start = f"{arm:<24}{found['imbalance']:9.3f}{found['window_ms']:11.0f}{found['val_loss']:10.3f}"
    windows = found["tuned"]
    if not windows:
        return start
    least = min(window["sparsity/budget_min"] for window in windows)
    most = max(window["sparsity/budget_max"] for window in windows)
    names = ("sparsity/budget_mean", "sparsity/coverage_delta", "balance/work_ratio")
    mean, delta, work = (sum(window[name] for window in windows) / len(windows) for name in names)
    return f"{start}   {least:.0f} to {most:.0f}, mean {mean:.1f}{delta:+16.4f}{work:9.3f}"


@rank_zero_only
def tell(text):
    # At once, also through a pipe: an arm takes some seconds.
    print(text, flush=True)


def report(arms=ARMS, **settings):
    """Train arm after arm, and tell of each when it starts and when it is done."""
    tell(f"{'':<24}imbalance  window ms  val loss   budgets           change of coverage  work")
    for arm in arms:
        tell(f"training {arm} ...")
        tell(row(arm, train(arm, **settings)))
    tell(
        "\nimbalance: busy time of the slower rank over the mean of both, on average over windows\n"
        "work: predicted time at the budgets used over that at the budget of sparsify()\n"
        "The arms ran one after the other: compare window ms only on a quiet machine, imbalance always."
    )


if __name__ == "__main__":
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    report()
