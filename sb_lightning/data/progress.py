"""What a long build shows: a bar on a terminal, one line elsewhere."""

from __future__ import annotations

import sys
from types import TracebackType

__all__ = ["BuildProgress"]


class BuildProgress:
    """Context manager that shows how many of ``total_bytes`` are done, on standard error.

    Args:
        title: What is being done.
        total_bytes: Size of the input.
    """

    def __init__(self, title: str, total_bytes: int) -> None:
        self._title = title
        self._total = total_bytes

    def __enter__(self) -> BuildProgress:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

        console = Console(stderr=True)
        self._progress: Progress | None = None
        if console.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
            self._progress = Progress(*columns, console=console, transient=True)
            self._progress.start()
            self._task = self._progress.add_task(self._title, total=self._total)
        else:
            print(f"{self._title} ({self._total / 1e6:.1f} MB)", file=sys.stderr, flush=True)
        return self

    def advance(self, num_bytes: int) -> None:
        """Say that so many more bytes are done."""
        if self._progress is not None:
            self._progress.advance(self._task, num_bytes)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()
