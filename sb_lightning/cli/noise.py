"""Lines of other packages that tell a user nothing about a run."""

from __future__ import annotations

import logging
import warnings

__all__ = ["hide_noise"]

# Both packages share one variable for their logger: whichever was imported last speaks for both.
LOGGERS = ("lightning.pytorch.utilities.rank_zero", "pytorch_lightning.utilities.rank_zero")
ADVERTISED = ("[litlogger]", "[litmodels]")
# Between torch and Lightning; nobody else can mend it.
DEPRECATIONS = (r".*isinstance\(treespec, LeafSpec\)",)


def hide_noise() -> None:
    """Hide Lightning's advertisements and its own use of what torch deprecates."""
    for name in LOGGERS:
        logging.getLogger(name).addFilter(_is_about_the_run)
    for message in DEPRECATIONS:
        warnings.filterwarnings("ignore", message=message)


def _is_about_the_run(record: logging.LogRecord) -> bool:
    return not any(name in record.getMessage() for name in ADVERTISED)
