"""How the ranks of a comparison come together before the first segment."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from lightning.pytorch import Trainer

from sb_lightning.compare.results import Round

__all__ = ["sync_rounds"]

OBSERVER = "child-process-observer"


def sync_rounds(
    trainer_options: Mapping[str, Any],
    rounds: list[Round],
    on_lost: Callable[[], None] | None = None,
    *,
    is_done: bool = False,
) -> list[Round]:
    """Start the other ranks if nothing else has, and return rank zero's rounds; all ranks must call this.

    Args:
        trainer_options: Of the Trainer.
        rounds: Those of rank zero count.
        on_lost: Called on rank zero, in a thread, when a rank that it has started ends with an error. By
            default Lightning kills rank zero then, without a word.
        is_done: On rank zero, that there is nothing to start ranks for.
    """
    trainer = Trainer(
        **trainer_options,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    strategy: Any = trainer.strategy
    is_main = threading.current_thread() is threading.main_thread()
    before = set(threading.enumerate())

    def meet() -> list[Round]:
        if is_main:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if on_lost is not None:
            _replace_observer(set(threading.enumerate()) - before, on_lost)
        strategy.setup_environment()
        found: list[Round] = strategy.broadcast(rounds)
        return found

    environment = getattr(strategy.launcher, "cluster_environment", None)
    if is_done and not getattr(environment, "creates_processes_externally", True):
        return rounds
    if strategy.launcher is None:
        mask: set[Any] = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        return meet()
    # The ranks inherit it: Ctrl-C, which a terminal sends to all processes, would end one that only just
    # starts and does not ignore it yet.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT} if is_main else ())
    try:
        return strategy.launcher.launch(meet, trainer=trainer)  # type: ignore[no-any-return]
    finally:
        if is_main:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _replace_observer(threads: Iterable[threading.Thread], on_lost: Callable[[], None]) -> None:
    """Change what Lightning's observer of the started ranks does when one has ended with an error."""
    for thread in threads:
        if thread.name == OBSERVER and hasattr(thread, "_terminate_all"):
            thread._terminate_all = _ending(getattr(thread, "_child_processes", ()), on_lost)


def _ending(ranks: Iterable[Any], on_lost: Callable[[], None]) -> Callable[[], None]:
    def end() -> None:
        on_lost()
        for rank in ranks:
            rank.kill()
        os._exit(1)

    return end
