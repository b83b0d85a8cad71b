"""The imbalance of a training, measured: what every rank did when, and whom the others waited for."""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_warn
from rich import get_console
from torch import Tensor

from sb_lightning._messages import explain
from sb_lightning.balance.window_sync import Stage, SyncPart, WindowSync
from sb_lightning.callbacks.imbalance_batch import Lengths
from sb_lightning.callbacks.imbalance_log import log_metrics, log_tables, log_worst, logged_step
from sb_lightning.callbacks.imbalance_measure import RankMeasure
from sb_lightning.callbacks.imbalance_table import imbalance_table
from sb_lightning.callbacks.span_log import SpanLog
from sb_lightning.callbacks.trainer_probe import TrainerProbe
from sb_lightning.callbacks.windows import Clock
from sb_lightning.data.trainer import data_parallel
from sb_lightning.tracking.cuda_clock import CudaClock
from sb_lightning.tracking.run_imbalance import RunImbalance
from sb_lightning.tracking.spans import HostClock, share_recorder
from sb_lightning.tracking.window_record import MeasuredWindow, decode_window, payload_sizes, window_metrics

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer
    from rich.console import Console

__all__ = ["ImbalanceMonitor"]

P = ParamSpec("P")
T = TypeVar("T")
# Logged by a SparseBalanceCallback too, which counts more than its spans: what layers decide on the CPU.
TUNING = "time/tune_ms"
# Under manual optimization nobody knows beforehand how many micro-batches a window has.
MANUAL_MICRO_BATCHES = 16


def _costed(
    hook: Callable[Concatenate[ImbalanceMonitor, P], T],
) -> Callable[Concatenate[ImbalanceMonitor, P], T]:
    """Count a hook's time as the monitor's own, without what `_meet` takes out."""

    @functools.wraps(hook)
    def timed(self: ImbalanceMonitor, /, *args: P.args, **kwargs: P.kwargs) -> T:
        start = time.perf_counter()
        try:
            return hook(self, *args, **kwargs)
        finally:
            if self._measure is not None:
                self._measure.own_s += time.perf_counter() - start

    return timed


class ImbalanceMonitor(Callback):
    """Measures what each rank does when, and logs how uneven it is, once per window.

    Works in any Lightning project, with `lightning.pytorch.Trainer` and `pytorch_lightning.Trainer`, any
    model, loader, attention and strategy; on one rank the imbalance is 1 and nothing waits. Wall time hides
    imbalance, because data-parallel ranks wait for each other: here waits are told apart, and the busy time
    of a micro-batch is data + forward + backward without them. docs/imbalance.md has the lanes, the metrics
    and their formulas.

    All ranks meet once per window, in the gather that they share with other callbacks
    (:class:`~sb_lightning.balance.WindowSync`), and log the same figures. On CUDA the times are those of
    events, read one window late so that nothing waits for the device: a window's figures are logged with the
    next. Under manual optimization a window has room for 16 micro-batches per rank; see docs/imbalance.md for
    what holds of longer ones.

    Without sequence lengths in the batch (`cu_seqlens`, `attention_mask`, `position_ids` or `input_ids`; or
    `lengths`) tokens are unknown and left out. A batch may also carry `sequence_ids`, `predicted_ms` (forward
    and backward, milliseconds) and `budget`; other callbacks can `annotate` them.

    Put it first among the callbacks: what others do after a backward pass is then not taken for part of it,
    and the progress bar shows the window at hand.

    Args:
        table_every_n_windows: Windows between two tables (rank x micro-batch) for Weights & Biases; 0 for
            none.
        spans: Write every span into the run's folder, `spans/rank_*.jsonl`, for `sb trace`. With
            `Trainer(logger=False)` that is `default_root_dir`, the working directory unless set.
        lengths: Returns the tokens of each sequence of a batch; None: look for them.

    Raises:
        ValueError: table_every_n_windows is negative.

    Example::

        from lightning.pytorch import Trainer
        from sb_lightning.callbacks import ImbalanceMonitor
        trainer = Trainer(callbacks=[ImbalanceMonitor()])
    """

    clock: Clock = staticmethod(time.perf_counter)
    """Replaced in tests."""

    def __init__(
        self, table_every_n_windows: int = 50, spans: bool = True, lengths: Lengths | None = None
    ) -> None:
        if table_every_n_windows < 0:
            raise ValueError(
                explain(
                    f"table_every_n_windows is {table_every_n_windows}",
                    "it counts windows",
                    "pass 0 for no tables, or the number of windows between two",
                )
            )
        self.table_every_n_windows = table_every_n_windows
        self.spans = spans
        self.lengths = lengths
        self.console: Console | None = None
        """Where to print; rich's global console if None."""
        self.window: MeasuredWindow | None = None
        """The last window that was measured, of all ranks."""
        self._measure: RankMeasure | None = None
        self._probe: TrainerProbe | None = None
        self._part: SyncPart | None = None
        self._log: SpanLog | None = None
        self._sync: WindowSync | None = None
        self._num_windows = 0
        self._resumed_at: int | None = None
        self._reset()

    def _reset(self) -> None:
        self.window = None
        self._run = RunImbalance()
        self._step = self._logged_at = 0
        self._gather_s = 0.0
        self._budget = math.nan
        self._replicas: int | None = None
        self._log = None
        self._logged: set[str] = set()
        self._has_warned = False
        self._plan_gaps: dict[int, float] = {}

    @property
    def summary(self) -> dict[str, Any] | None:
        """Figures of the run so far, equal on all ranks; None before the first window."""
        return self._run.summary()

    def annotate(self, *, predicted_ms: float | None = None, budget: float | None = None) -> None:
        """Say what is known of the micro-batch at hand; for other callbacks, between its start and its end.

        Args:
            predicted_ms: Forward and backward as predicted.
            budget: Attention budget, averaged where there are several.
        """
        given = {"predicted_ms": predicted_ms, "budget": budget}
        if self._measure is not None:
            self._measure.note({name: float(value) for name, value in given.items() if value is not None})

    # Joining and leaving.

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse a second monitor, and forget the training before.

        Raises:
            MisconfigurationException: The Trainer has several.
        """
        if sum(isinstance(callback, ImbalanceMonitor) for callback in _callbacks(trainer)) > 1:
            raise MisconfigurationException(
                explain(
                    "trainer.callbacks contains ImbalanceMonitor more than once",
                    "each would listen to the Trainer and log the same metrics",
                    "keep one",
                )
            )
        if stage == "fit":
            self._reset()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Join the other ranks and start to listen."""
        self._close(trainer)
        self._reset()
        self._step, self._logged_at = trainer.global_step, logged_step(trainer)
        self._replicas = data_parallel(trainer)[0]
        settings = getattr(pl_module, "sparse_settings", None)
        self._budget = float(settings.budget) if settings is not None else math.nan
        self._sync, capacity = WindowSync.of(trainer), _capacity(trainer, pl_module)
        sync, self._gather_s = self._sync, self._sync.gather_s
        if self.spans and not getattr(trainer, "fast_dev_run", False):
            self._log = SpanLog.sync_folder(trainer, sync)
        sync.sync_start()
        is_late = _reads_late(trainer)
        self._measure = RankMeasure(
            clock=self.clock,
            stamps=CudaClock(self.clock) if is_late else HostClock(self.clock),
            is_late=is_late,
            capacity=capacity,
            first_window=self._first_window(trainer),
            keep_lines=self._log is not None,
        )
        if self._log is not None:
            self._log.start()
        num_floats, num_ints = payload_sizes(capacity)
        self._part = sync.register("imbalance", floats=num_floats, ints=num_ints, fill=self._measure.fill)
        sampler: Any = getattr(trainer.train_dataloader, "batch_sampler", None)
        if callable(getattr(sampler, "plan_inputs", None)):
            sync.watch("sampler", sampler.plan_inputs)
        share_recorder(trainer, self._measure.recorder)
        self._probe = TrainerProbe(trainer, pl_module, self._measure)

    def _first_window(self, trainer: Trainer) -> int:
        """Return the number of the first window; it goes on where the run that is continued has ended."""
        resumed_at, self._resumed_at = self._resumed_at, None
        if resumed_at is not None:
            return resumed_at
        # A second training with this Trainer goes on; a new one has not stepped; and of a checkpoint that was
        # written without a monitor only the optimizer steps are known.
        return min(self._num_windows or trainer.global_step, trainer.global_step)

    @_costed
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Read what is not read yet, and leave the Trainer as it was."""
        if self._part is not None:
            self._meet(trainer, "end")
            if (summary := self.summary) is not None:
                log_worst(trainer, summary)
        self._close(trainer)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print the table."""
        self._print(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Write what this rank knows; the others are on their way out. After Ctrl-C, print the table."""
        if self._measure is None:
            return
        try:
            # A device that failed cannot be read: the error that is on its way says more.
            with contextlib.suppress(Exception):
                self._measure.read_rest(trainer.global_step)
        finally:
            self._close(trainer)
        if isinstance(exception, KeyboardInterrupt):
            self._print(trainer)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Leave the Trainer as it was."""
        self._close(trainer)

    def _close(self, trainer: Trainer) -> None:
        share_recorder(trainer, None)
        if self._probe is not None:
            self._probe.remove()
        if self._measure is not None:
            self._num_windows = self._measure.num_windows
        self._write()
        if self._log is not None:
            self._log.close()
        if self._part is not None:
            self._part.remove()
        if self._sync is not None:
            self._sync.unwatch("sampler")
        self._probe = self._part = self._measure = self._sync = None

    def state_dict(self) -> dict[str, Any]:
        """Return how many windows there were: with several optimizers there are more steps than windows."""
        return {
            "version": 1,
            "windows": self._num_windows if self._measure is None else self._measure.num_windows,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on counting windows."""
        self._resumed_at = int(state_dict.get("windows", 0))

    # Micro-batches.

    @_costed
    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Note what the micro-batch holds, without waiting for the device."""
        if self._measure is not None:
            self._measure.start(batch, self.lengths, self._budget, trainer.current_epoch)
            if isinstance(batch, Mapping) and "plan_gap" in batch:
                # By window: on a device one is told about while the next is running.
                self._plan_gaps[self._measure.num_windows] = float(batch["plan_gap"])

    @_costed
    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """Enter the backward pass."""
        if self._probe is not None:
            self._probe.before_backward(loss)

    @_costed
    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave the backward pass."""
        if self._probe is not None:
            self._probe.after_backward()

    @_costed
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        """Enter the optimizer step."""
        if self._probe is not None:
            self._probe.before_optimizer()

    @_costed
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Finish the micro-batch; where the optimizer has stepped, bring the window together and log it."""
        if self._measure is not None:
            self._measure.finish()
            if trainer.global_step != self._step:
                self._meet(trainer, "window")

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave validation out."""
        self._pause(True)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Go on."""
        self._pause(False)

    def _pause(self, is_paused: bool) -> None:
        if self._measure is not None:
            self._measure.watch.pause()
            self._measure.recorder.is_paused = is_paused

    @_costed
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End a window that no optimizer step has ended, and leave out what lies between two epochs."""
        if self._measure is not None:
            self._measure.skip()
            if self._measure.has_rest:
                self._meet(trainer, "epoch")
            self._measure.watch.pause()

    # Windows.

    def _meet(self, trainer: Trainer, stage: Stage) -> None:
        """Bring a window together with the other ranks, and tell about it; all ranks must call this."""
        assert self._part is not None
        assert self._measure is not None
        assert self._sync is not None
        self._step = trainer.global_step
        if self._probe is not None:
            self._measure.own_s += self._probe.take_cost_s()
        start = time.perf_counter()
        gathered = self._part.collect(self._step, stage)
        # The hook that calls this counts its time as the monitor's: but not the other parts', nor the wait.
        self._measure.own_s -= time.perf_counter() - start
        # Another part may have asked for the gather before.
        self._measure.sync_s += self._sync.gather_s - self._gather_s
        self._gather_s = self._sync.gather_s
        window = decode_window(gathered.floats, gathered.ints)
        if window is not None:
            metrics = window_metrics(window, self._replicas)
            self._plan_gaps = {n: gap for n, gap in self._plan_gaps.items() if n >= window.index}
            if window.index in self._plan_gaps:
                metrics["balance/plan_gap"] = self._plan_gaps.pop(window.index)
            self.window = window
            self._run.add(window, metrics)
            if any(window.is_merged) and not self._has_warned:
                self._has_warned = True
                rank_zero_warn(
                    f"ImbalanceMonitor: window {window.index} has more than {window.times.shape[1]} "
                    "micro-batches on a rank. Those from there on count as one: balance/imbalance and "
                    "balance/idle_ms hold, the imbalances of micro-batches and slots leave them out."
                )
            self._tell(trainer, window, metrics, stage)
        self._write()

    def _tell(
        self, trainer: Trainer, window: MeasuredWindow, metrics: Mapping[str, float], stage: Stage
    ) -> None:
        assert self._measure is not None
        if self._log is not None and trainer.is_global_zero:
            line = {"kind": "window", "window": window.index, "step": window.step}
            self._measure.lines.append({**line, "end_us": self._measure.end_us, "metrics": metrics})
        # A metric that can no longer be known must not keep its last value.
        known = {**dict.fromkeys(self._logged - metrics.keys(), math.nan), **metrics}
        if _has_tuner(trainer):
            known.pop(TUNING, None)
        self._logged.update(known)
        if log_metrics(trainer, known, since=self._logged_at, always=stage != "window"):
            self._logged_at = logged_step(trainer) + 1
        if self.table_every_n_windows and window.index % self.table_every_n_windows == 0:
            log_tables(trainer, window)

    def _write(self) -> None:
        if self._log is not None and self._measure is not None:
            lines, self._measure.lines = self._measure.lines, []
            self._log.write(lines)

    def _print(self, trainer: Trainer) -> None:
        if trainer.is_global_zero and (summary := self.summary) is not None:
            (self.console or get_console()).print(
                imbalance_table(summary, self._log.folder if self._log else None)
            )


def _reads_late(trainer: Trainer) -> bool:
    """Return whether stamps are passed by a device in its own time."""
    return trainer.strategy.root_device.type == "cuda"


def _callbacks(trainer: Any) -> list[Any]:
    return list(trainer.callbacks)


def _has_tuner(trainer: Trainer) -> bool:
    """Return whether a SparseBalanceCallback logs the time of tuning, wherever it stands."""
    # By name: its module imports transformers.
    return any(
        callback.enabled
        for callback in _callbacks(trainer)
        if any(kind.__name__ == "SparseBalanceCallback" for kind in type(callback).__mro__)
    )


def _capacity(trainer: Trainer, pl_module: LightningModule) -> int:
    """Return the largest number of micro-batches that a rank runs in a window."""
    if not pl_module.automatic_optimization:
        return MANUAL_MICRO_BATCHES
    counts = [trainer.accumulate_grad_batches]
    for callback in _callbacks(trainer):
        # Of either package.
        if type(callback).__name__ == "GradientAccumulationScheduler":
            counts += callback.scheduling.values()
    return max(counts)
