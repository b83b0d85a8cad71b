"""Where a Trainer's loop tells that a lane begins or ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.autograd import Variable

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

    from sb_lightning.callbacks.imbalance_measure import RankMeasure

__all__ = ["TrainerProbe"]

BROADCAST = "_broadcast_sigterm_tensor"
# What listening to one call of the profiler costs, in seconds; there are some fifty per micro-batch.
CALL_S = 2.5e-7


class TrainerProbe:
    """Enters and leaves the lanes of a recorder as the Trainer goes through its loop, for one training.

    The Trainer's profiler hears of the loader, the transfer to the device and the training step; its `start`
    and `stop` are listened to, whichever profiler it is. Lightning's broadcast before every micro-batch has
    no hook: the method of the loop is wrapped, where it exists.

    The wait in the backward pass costs two calls per backward, none per parameter. A hook on the loss, the
    first to run in a backward pass, queues a callback of the autograd engine. The engine calls those in order
    when the last node has run, and DistributedDataParallel queues its own (which waits for the all-reduce)
    when its last bucket is ready, so later: ours marks the last local gradient. From within, it queues
    another one, which is behind that of DistributedDataParallel: it marks the end of the all-reduce.

    DistributedDataParallel may also wait before the forward, where it brings buffers in line with rank 0:
    the wait ends when the module itself is called.

    Args:
        trainer: The Trainer, at the start of the training.
        pl_module: Its module.
        measure: Whose lanes to use.
    """

    def __init__(self, trainer: Trainer, pl_module: LightningModule, measure: RankMeasure) -> None:
        self._recorder = measure.recorder
        self._watch = measure.watch
        self._model: Any = trainer.strategy.model
        self._is_parallel = trainer.world_size > 1
        self._awaits_module = False
        self._steps_within = 0
        self._undo: list[Callable[[], None]] = []
        self._num_calls = 0
        self._listen_to_profiler(trainer)
        self._wrap_broadcast(trainer)
        # A hook would become part of a compiled module's graph.
        if self._is_parallel and getattr(pl_module, "_compiled_call_impl", None) is None:
            self._undo.append(pl_module.register_forward_pre_hook(self._module_called).remove)
        for optimizer in trainer.optimizers:
            if hasattr(optimizer, "register_step_post_hook"):
                self._undo.append(optimizer.register_step_pre_hook(self._optimizer_steps).remove)
                self._undo.append(optimizer.register_step_post_hook(self._optimizer_stepped).remove)

    def remove(self) -> None:
        """Leave the Trainer as it was found."""
        while self._undo:
            self._undo.pop()()

    def take_cost_s(self) -> float:
        """Return what listening has cost since the last call: calls x the usual cost of one."""
        calls, self._num_calls = self._num_calls, 0
        return calls * CALL_S

    def before_backward(self, loss: Tensor) -> None:
        """Enter the backward pass; called before it with what it starts from."""
        self._recorder.begin("backward")
        # False within no_sync: DistributedDataParallel will not meet the other ranks.
        if (
            self._is_parallel
            and loss.requires_grad
            and getattr(self._model, "require_backward_grad_sync", True)
        ):
            loss.register_hook(self._backward_started)  # type: ignore[no-untyped-call]

    def after_backward(self) -> None:
        """Leave the backward pass."""
        self._recorder.end("backward")

    def before_optimizer(self) -> None:
        """Enter the optimizer step, gradient clipping included."""
        if not self._recorder.is_open("optimizer"):
            self._recorder.begin("optimizer")

    def _backward_started(self, grad: Tensor) -> None:
        Variable._execution_engine.queue_callback(self._gradients_done)  # type: ignore[no-untyped-call]

    def _gradients_done(self) -> None:
        self._recorder.begin("wait")
        Variable._execution_engine.queue_callback(self._reduced)  # type: ignore[no-untyped-call]

    def _reduced(self) -> None:
        self._recorder.end("wait")

    def _optimizer_steps(self, *_: Any) -> None:
        self._steps_within += 1

    def _optimizer_stepped(self, *_: Any) -> None:
        # A class that calls the step of its base class runs the hooks of both.
        self._steps_within -= 1
        if self._steps_within == 0:
            self._recorder.end("optimizer")

    def _step_started(self) -> None:
        self._recorder.begin("forward")
        syncs_buffers = getattr(self._model, "will_sync_module_buffers", None)
        self._awaits_module = bool(self._is_parallel and syncs_buffers and syncs_buffers())
        if self._awaits_module:
            self._recorder.begin("wait")

    def _module_called(self, *_: Any) -> None:
        if self._awaits_module:
            self._awaits_module = False
            self._recorder.end("wait")

    def _step_ended(self) -> None:
        if self._awaits_module:
            # Nobody called the module, so that nothing is known of a wait.
            self._awaits_module = False
            self._recorder.drop("wait")
        self._recorder.end("forward")

    def _data_started(self) -> None:
        self._begin("data")

    def _begin(self, lane: str) -> None:
        if not self._recorder.is_paused:
            # The first work on a micro-batch after a pause.
            self._watch.resume()
        self._recorder.begin(lane)

    def _data_ended(self) -> None:
        self._recorder.end("data")

    def _listen_to_profiler(self, trainer: Trainer) -> None:
        profiler: Any = trainer.profiler  # type: ignore[attr-defined]
        strategy = f"[Strategy]{type(trainer.strategy).__name__}"
        loop = type(trainer.fit_loop.epoch_loop).__name__
        starts = {
            f"[{loop}].train_dataloader_next": self._data_started,
            f"{strategy}.batch_to_device": self._data_started,
            f"{strategy}.training_step": self._step_started,
        }
        stops = {
            f"[{loop}].train_dataloader_next": self._data_ended,
            f"{strategy}.batch_to_device": self._data_ended,
            f"{strategy}.training_step": self._step_ended,
        }
        start, stop = profiler.start, profiler.stop

        def listening_start(action_name: str) -> None:
            self._num_calls += 1
            start(action_name)
            if action_name in starts:
                starts[action_name]()

        def listening_stop(action_name: str) -> None:
            self._num_calls += 1
            if action_name in stops:
                stops[action_name]()
            stop(action_name)

        self._replace(profiler, "start", listening_start)
        self._replace(profiler, "stop", listening_stop)

    def _wrap_broadcast(self, trainer: Trainer) -> None:
        loop: Any = trainer.fit_loop.epoch_loop
        broadcast = getattr(loop, BROADCAST, None)
        if broadcast is None:
            return

        def timed_broadcast() -> None:
            self._begin("broadcast")
            try:
                broadcast()
            finally:
                self._recorder.end("broadcast")

        self._replace(loop, BROADCAST, timed_broadcast)

    def _replace(self, owner: Any, name: str, value: Any) -> None:
        before = vars(owner).get(name)
        setattr(owner, name, value)
        self._undo.append(
            lambda: setattr(owner, name, before) if before is not None else delattr(owner, name)
        )
