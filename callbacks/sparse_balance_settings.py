"""The settings of `SparseBalanceCallback`, checked."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from sb_lightning._messages import explain

__all__ = ["AnchorName", "Granularity", "Sync", "TuningSettings", "check_switch"]

AnchorName = Literal["min", "mean", "max", "slack"]
Granularity = Literal["layer", "step"]
Sync = Literal["plan", "ema", "slot"]


MOST_BUDGET = 2**31 - 1
"""The kernels count blocks in 32 bits."""


@dataclass(frozen=True, kw_only=True)
class TuningSettings:
    """How budgets are tuned; see `SparseBalanceCallback`."""

    anchor: AnchorName = "mean"
    """The time that micro-batches are steered to."""
    tolerance: float = 0.1
    """Largest change of coverage, p."""
    base_budget: int | None = None
    """k0 in place of the model's own."""
    min_budget: int = 1
    """No budget is lowered below it."""
    max_budget: int | None = None
    """No budget is raised above it; None: no limit."""
    granularity: Granularity = "layer"
    """Whether each layer decides by its own coverage, or all use one budget."""
    sync: Sync | None = None
    """Where the anchor comes from; None: the plan where there is one, else past windows."""
    warmup_windows: int = 0
    """Windows at the start of a run in which nothing is tuned, only measured."""
    tune_short: bool = False
    """Also cut sequences that k0 covers whole."""
    slack_speed: float = 0.0
    """With `anchor: slack`, how far the window's time is lowered towards the least reachable."""
    recalibrate: bool = False
    """Whether the sampler's table is kept true to measured times. Off: runs would depend on the clock."""

    def __post_init__(self) -> None:
        """Check every value, and what does not go together."""
        _choice("anchor", self.anchor, get_args(AnchorName))
        _choice("granularity", self.granularity, get_args(Granularity))
        if self.sync is not None:
            _choice("sync", self.sync, get_args(Sync))
        _share("tolerance", self.tolerance, "it bounds a change of coverage, which is a share")
        _share("slack_speed", self.slack_speed, "0 keeps the time of 'mean', 1 is the least reachable")
        _count("min_budget", self.min_budget, 1)
        _count("warmup_windows", self.warmup_windows, 0)
        for name in ("tune_short", "recalibrate"):
            check_switch(name, getattr(self, name))
        for name in ("base_budget", "max_budget"):
            if getattr(self, name) is not None:
                _count(name, getattr(self, name), 1)
        self.check_budget(self.base_budget, "base_budget")
        if self.max_budget is not None and self.min_budget > self.max_budget:
            raise ValueError(
                explain(
                    f"min_budget is {self.min_budget} and max_budget {self.max_budget}",
                    "no budget lies between them",
                    "lower min_budget, or raise max_budget",
                )
            )
        if self.anchor == "slack" and self.sync in ("ema", "slot"):
            raise ValueError(
                explain(
                    f"anchor is 'slack' and sync '{self.sync}'",
                    "slack is what a plan of the whole window leaves over",
                    "set sync: plan and use a SparsityAwareBatchSampler, or choose another anchor",
                )
            )
        if self.recalibrate and self.sync in ("ema", "slot"):
            raise ValueError(
                explain(
                    f"recalibrate is true and sync '{self.sync}'",
                    "measured times are compared with those of a plan",
                    "set sync: plan and use a SparsityAwareBatchSampler, or recalibrate: false",
                )
            )
        if self.anchor != "slack" and self.slack_speed:
            raise ValueError(
                explain(
                    f"slack_speed is {self.slack_speed} and anchor '{self.anchor}'",
                    "only the anchor 'slack' has a time to lower",
                    "set anchor: slack, or leave slack_speed out",
                )
            )

    def check_budget(self, budget: int | None, name: str) -> None:
        """Refuse a k0 that lies outside the limits, or of 2**31 and more.

        Args:
            budget: k0; None if it is not known.
            name: Where it comes from, for the message.
        """
        if budget is None:
            return
        if budget > MOST_BUDGET:
            raise ValueError(
                explain(
                    f"{name} is {budget}",
                    "the kernels count blocks in 32 bits",
                    f"lower {name}, to the blocks of the longest sequence at most",
                )
            )
        if budget < self.min_budget or (self.max_budget is not None and budget > self.max_budget):
            limits = f"min_budget {self.min_budget}, max_budget {self.max_budget}"
            raise ValueError(
                explain(
                    f"{name} is {budget}, with {limits}",
                    "a sequence that is not tuned keeps it, so it must lie within the limits",
                    f"change {name}, min_budget or max_budget",
                )
            )

    @property
    def needs_curves(self) -> bool:
        """Whether budgets are chosen before the forward, from coverage that was learnt."""
        return self.anchor == "slack" or self.granularity == "step"


def check_switch(name: str, value: Any) -> None:
    """Refuse what is neither True nor False."""
    if not isinstance(value, bool):
        raise TypeError(explain(f"{name} is {value!r}", "it is on or off", f"pass True or False as {name}"))


def _choice(name: str, value: Any, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ValueError(
            explain(f"{name} is {value!r}", "there is no such choice", f"pass one of {', '.join(choices)}")
        )


def _count(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(
            explain(
                f"{name} is {value!r}",
                "it counts blocks or windows",
                f"pass an int from {least} up as {name}",
            )
        )
    if value < least:
        raise ValueError(
            explain(f"{name} is {value}", "it counts blocks or windows", f"pass {name} >= {least}")
        )


def _share(name: str, value: Any, why: str) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(explain(f"{name} is {value!r}", why, f"pass a number between 0 and 1 as {name}"))
    if not (math.isfinite(value) and 0 <= value <= 1):
        raise ValueError(explain(f"{name} is {value}", why, f"pass {name} between 0 and 1"))
