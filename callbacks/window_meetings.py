"""Ranks that meet once per window, not in every micro-batch."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

__all__ = ["WindowMeetings"]

BROADCAST = "_broadcast_sigterm_tensor"
NOTIFIER = "_sigterm_notifier_fn"


class WindowMeetings(Callback):
    """Lets the ranks of data-parallel training run a window's micro-batches without waiting for each other.

    Since 2.5.2 Lightning broadcasts one number from rank zero before every micro-batch (whether it has got
    SIGTERM), and has no switch for it. Ranks that accumulate gradients, which need not meet before the
    window's last backward pass, then wait in every micro-batch, and lose what is uneven in each of them even
    where the window as a whole is balanced. With this callback they ask each other before the first
    micro-batch of each window only. SIGTERM ends the training there, on all ranks, whichever of them has got
    it, and leaves no half of a window; `LastCheckpoint` then writes a checkpoint.

    Without accumulation the ranks meet as often as before, as they do with strategies whose ranks meet in the
    forward pass (FSDP, DeepSpeed ZeRO-3). In a Lightning that has no such broadcast nothing is changed.

    Example::

        from lightning.pytorch import Trainer
        from sb_lightning.callbacks import WindowMeetings

        trainer = Trainer(devices=8, accumulate_grad_batches=4, callbacks=[WindowMeetings()])
    """

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []
        # This rank has got SIGTERM, and the others do not know yet.
        self._is_asked_to_end = False
        self.has_ended = False
        """SIGTERM has ended the training, on all ranks at one place, between two windows."""

    def meets_before(self, trainer: Trainer, micro_batch: int) -> bool:
        """Return whether the ranks meet before a micro-batch of the epoch; all ranks must answer alike."""
        return micro_batch % trainer.accumulate_grad_batches == 0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Replace the broadcast of this Trainer's loop, and what SIGTERM does at once."""
        self._leave()
        self.has_ended = False
        loop: Any = trainer.fit_loop.epoch_loop
        signals: Any = getattr(trainer, "_signal_connector", None)
        known = hasattr(loop, BROADCAST) and hasattr(signals, NOTIFIER)
        if stage != "fit" or not known or trainer.world_size == 1 or BROADCAST in vars(loop):
            return

        broadcast: Callable[[], None] = getattr(loop, BROADCAST)
        # That of lightning or of pytorch_lightning, whichever runs.
        ended: type[BaseException] = sys.modules[type(loop).__module__].SIGTERMException  # type: ignore[attr-defined]

        def sync_sigterm() -> None:
            if not self._undo:
                # Somebody has put this back who had found it.
                broadcast()
                return
            # The number, in the epoch, of the micro-batch that is about to begin: equal on all ranks.
            if not self.meets_before(trainer, loop.batch_progress.current.ready):
                return
            asked = torch.tensor([int(self._is_asked_to_end)], device=trainer.strategy.root_device)
            dist.all_reduce(asked, op=dist.ReduceOp.MAX)
            if asked.item():
                signals.received_sigterm = self.has_ended = True
                raise ended

        def note_sigterm(signum: int, frame: Any) -> None:
            # Lightning would broadcast from here, in the middle of whatever the ranks are doing.
            if not self._is_asked_to_end and trainer.strategy.launcher is not None:
                trainer.strategy.launcher.kill(signum)  # type: ignore[arg-type]
            self._is_asked_to_end = True

        self._replace(loop, BROADCAST, sync_sigterm)
        self._replace(signals, NOTIFIER, note_sigterm)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Leave the Trainer as it was found."""
        self._leave()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leave the Trainer as it was found."""
        self._leave()

    def _replace(self, owner: Any, name: str, value: Any) -> None:
        setattr(owner, name, value)
        self._undo.append(lambda: vars(owner).pop(name, None))

    def _leave(self) -> None:
        undo, self._undo = self._undo, []
        for each in undo:
            each()
        self._is_asked_to_end = False
