"""Dynamic sparsity tuning: every training step, stragglers get sparser and those that would wait denser."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from sb_lightning._messages import explain
from sb_lightning.balance.window_sync import Stage, SyncPart, WindowSync
from sb_lightning.callbacks.imbalance_batch import Lengths
from sb_lightning.callbacks.imbalance_log import log_metrics, logged_step
from sb_lightning.callbacks.sparse_balance_join import find_bases
from sb_lightning.callbacks.sparse_balance_run import TuningRun, TuningState
from sb_lightning.callbacks.sparse_balance_settings import (
    AnchorName,
    Granularity,
    Sync,
    TuningSettings,
    check_switch,
)
from sb_lightning.callbacks.sparse_balance_window import WindowOutcome, payload_sizes
from sb_lightning.latency.table import LatencyModel
from sb_lightning.tracking.spans import span

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

__all__ = ["SparseBalanceCallback"]

NAME = "sparsity"
FINE = "fine"


class SparseBalanceCallback(Callback):
    """Tunes the attention budget of every micro-batch while a sparse model is trained (DST).

    After SparseBalance (arXiv 2604.13847). The predicted times of a window's micro-batches at the usual
    budget k0 give an anchor. In each layer, a sequence of a micro-batch that would take longer gets a smaller
    budget, one that would wait gets a larger one, as long as its coverage, the share of routing score that
    the budget keeps, changes by no more than the tolerance. docs/dst.md has the rule and what it costs.

    Works in any Lightning project whose model was made sparse by `sparsify`, with `lightning.pytorch.Trainer`
    and `pytorch_lightning.Trainer`, under DDP, accumulation, activation checkpointing, torch.compile and
    manual optimization. In validation, test, predict and generate the budget is k0. Best with a
    `SparsityAwareBatchSampler`: then the whole window is known and ranks exchange nothing.

    Args:
        anchor: The time that micro-batches are steered to: `min`, `mean` or `max` of the window's, or
            `slack`: what the plan leaves over is given to where coverage gains most.
        tolerance: Largest change of coverage, in [0, 1]. 0 tunes nothing.
        base_budget: k0 while training, in place of that of `sparsify`.
        min_budget: No budget is lowered below it.
        max_budget: No budget is raised above it; None: no limit.
        granularity: `layer`: each layer decides by its own coverage. `step`: one budget for all layers, from
            coverage learnt before.
        sync: Where the anchor comes from. `plan`: the plan of the window, without communication; the default
            with a `SparsityAwareBatchSampler`. `ema`: past windows; the default elsewhere. `slot`: the
            micro-batches that run at the same time, exchanged before each.
        warmup_windows: Windows at the start of a run in which coverage is measured and nothing is tuned.
        tune_short: Also cut sequences that k0 covers whole.
        slack_speed: With `anchor: slack`, in [0, 1]: how far the window's time is lowered from that of `mean`
            towards the least reachable, at the price of coverage.
        table: Predicts times: a `LatencyTable`, an `AnalyticCost` or the path of a table. None: the
            sampler's, else counted operations.
        lengths: Returns the tokens of each sequence of a batch; None: look for them. Not asked with
            `sync: plan`.
        recalibrate: Keep the sampler's table true to what an `ImbalanceMonitor` measures, by length. Then
            plans follow the clock, and no second run is the same to the last bit.
        enabled: False leaves the training alone.

    Raises:
        ValueError: A setting is out of range, or two do not go together.
        TypeError: A setting is of the wrong kind.

    Example::

        from lightning.pytorch import Trainer
        from sb_lightning.callbacks import SparseBalanceCallback

        trainer = Trainer(callbacks=[SparseBalanceCallback(anchor="mean", tolerance=0.1, table="table.json")])
    """

    def __init__(
        self,
        anchor: AnchorName = "mean",
        tolerance: float = 0.1,
        base_budget: int | None = None,
        min_budget: int = 1,
        max_budget: int | None = None,
        granularity: Granularity = "layer",
        sync: Sync | None = None,
        warmup_windows: int = 0,
        tune_short: bool = False,
        slack_speed: float = 0.0,
        table: LatencyModel | str | Path | None = None,
        lengths: Lengths | None = None,
        recalibrate: bool = False,
        enabled: bool = True,
    ) -> None:
        self.settings = TuningSettings(
            anchor=anchor,
            tolerance=tolerance,
            base_budget=base_budget,
            min_budget=min_budget,
            max_budget=max_budget,
            granularity=granularity,
            sync=sync,
            warmup_windows=warmup_windows,
            tune_short=tune_short,
            slack_speed=slack_speed,
            recalibrate=recalibrate,
        )
        check_switch("enabled", enabled)
        if lengths is not None and not callable(lengths):
            raise TypeError(
                explain(
                    f"lengths is {lengths!r}",
                    "it is asked for the tokens of each batch",
                    "pass a function of the batch as lengths, or leave it out",
                )
            )
        if not isinstance(table, (LatencyModel, str, Path, type(None))):
            raise TypeError(
                explain(
                    f"table is a {type(table).__name__}",
                    "it predicts the times of micro-batches",
                    "pass a LatencyTable, an AnalyticCost or the path of a table as table",
                )
            )
        self.table = table
        self.lengths = lengths
        self.enabled = enabled
        self.window: WindowOutcome | None = None
        """The last window, of all ranks."""
        self._state = TuningState()
        self._run: TuningRun | None = None
        self._part: SyncPart | None = None
        self._sync: WindowSync | None = None
        self._monitor: Any = None
        self._step = self._logged_at = 0
        self._has_warned = False

    # Joining and leaving.

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Begin a new run, perhaps after another one; a checkpoint is read after this."""
        self._leave()
        if stage == "fit" and trainer.global_step == 0:
            self._state = TuningState()

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Look for the sparse model, before anything is run.

        Raises:
            MisconfigurationException: There is none.
            ValueError: Its budget lies outside the limits.
        """
        if not self.enabled:
            return
        base = find_bases(pl_module)[0]
        if self.settings.base_budget is None:
            self.settings.check_budget(base.sb_settings.budget, "sparsify's budget")
        elif self.settings.base_budget != base.sb_settings.budget:
            rank_zero_info(
                f"SparseBalanceCallback: trains with base_budget {self.settings.base_budget} in place of the "
                f"model's budget {base.sb_settings.budget}, which validation and prediction keep."
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Find the plan and the table, attach to the model, and compare the settings of all ranks.

        Raises:
            MisconfigurationException: What is asked for is not there; names the setting to change.
            ValueError: The table cannot be read, or is of another block size.
            RuntimeError: On every rank, if their settings or tables differ, or another rank has raised.
        """
        self._leave()
        if not self.enabled:
            return
        self._has_warned = False
        self._step, self._logged_at = trainer.global_step, logged_step(trainer)
        self._sync = WindowSync.of(trainer)
        run = self._run = self._sync_start(trainer, pl_module)
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        self._monitor = next((c for c in callbacks if type(c).__name__ == "ImbalanceMonitor"), None)
        floats, ints = payload_sizes(run.capacity, run.points)
        self._part = self._sync.register(NAME, floats=floats, ints=ints, fill=run.fill)
        self._sync.watch("tuning", run.inputs)
        self._sync.sync_inputs()

    def _sync_start(self, trainer: Trainer, pl_module: LightningModule) -> TuningRun:
        """Start on all ranks or on none: nobody waits for one that has refused, such as a missing file."""
        assert self._sync is not None
        run, refused = None, None
        try:
            run = TuningRun(trainer, pl_module, self.settings, self.table, self.lengths, self._state)
        except (MisconfigurationException, ValueError, TypeError, OSError) as error:
            refused = error
        said = self._sync.gather_texts(FINE if refused is None else str(refused))
        if refused is not None:
            raise refused
        self._run = run
        for rank, text in enumerate(said):
            if text != FINE:
                # The text has the three parts of an error.
                raise RuntimeError(f"The ranks go on together or not at all, and rank {rank} refuses: {text}")
        assert run is not None
        return run

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take over a loader that was made anew."""
        if self._run is not None:
            self._run.renew(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave the model as it was."""
        self._leave()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leave the model as it was."""
        self._leave()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Leave the model as it was."""
        self._leave()

    def _leave(self) -> None:
        if self._run is not None:
            self._run.leave()
        if self._part is not None:
            self._part.remove()
        if self._sync is not None:
            self._sync.unwatch("tuning")
        self._run = self._part = self._sync = self._monitor = None

    def state_dict(self) -> dict[str, Any]:
        """Return what goes on in a resumed run: plain values and tensors, equal on all ranks."""
        return self._state.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up what `state_dict` returned.

        Raises:
            ValueError: The state is not one of this release, or damaged.
        """
        self._state = TuningState.load(state_dict)

    # Micro-batches and windows.

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Find out what time the micro-batch is steered to."""
        if self._run is not None:
            with span(trainer, "tune"):
                self._run.begin(batch, batch_idx)

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Tell the monitor what the micro-batch was predicted to take, where that waits for no device."""
        if self._run is None or self._monitor is None or trainer.strategy.root_device.type != "cpu":
            return
        if (told := self._run.prediction()) is not None:
            self._monitor.annotate(predicted_ms=told[0], budget=told[1])

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Where the optimizer has stepped, bring the window's budgets together on all ranks."""
        if self._run is not None:
            self._run.tuner.end_micro_batch()
            if trainer.global_step != self._step:
                self._meet(trainer, "window")

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log a window that no optimizer step has ended: a resumed run starts it anew."""
        if self._run is not None:
            self._run.tuner.end_micro_batch()
            if self._run.tuner.forwards:
                self._meet(trainer, "epoch")

    def _meet(self, trainer: Trainer, stage: Stage) -> None:
        """Bring a window together with the other ranks, learn from it and log it; all must call this."""
        assert self._part is not None
        assert self._run is not None
        self._step = trainer.global_step
        gathered = self._part.collect(self._step, stage)
        with span(trainer, "tune"):
            window = self.window = self._run.learn(gathered, self._step, is_whole=stage == "window")
        if window is not None:
            always = stage != "window"
            if log_metrics(trainer, window.metrics(), since=self._logged_at, always=always):
                self._logged_at = logged_step(trainer) + 1
        elif not self._has_warned:
            self._has_warned = True
            rank_zero_warn(
                "SparseBalanceCallback: no forward of the sparse model was seen in a training step, so "
                "nothing is tuned. Its base model must be called in training mode, with gradients, without "
                "a cache, and with the attention that sparsify() has set."
            )
