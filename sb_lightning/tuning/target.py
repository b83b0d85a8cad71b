"""What the attention layers of one forward are told, and what they answer."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

__all__ = ["BASE_COVERAGE", "BUDGET", "COVERAGE", "SparseTarget"]

BUDGET, COVERAGE, BASE_COVERAGE = 0, 1, 2
"""Columns of the record."""


@dataclass(kw_only=True)
class SparseTarget:
    """Time and coverage that the sparse layers of one forward decide their budgets by; made anew for each.

    It travels as a keyword argument from the base model to every layer, so that a layer that activation
    checkpointing runs again meets the very object of its first run: its place in the record is filled then,
    and it uses the budget found there. All that changes from one micro-batch to the next is in tensors:
    nothing waits for the device, and another value compiles nothing anew.
    """

    cost_us: Tensor
    """Predicted time of each sequence at budgets 1 to max_budget, if all sparse layers use it
    # [N, max_budget] int32"""
    tau_us: Tensor
    """What all sequences together may take # [] int64"""
    tolerance: Tensor
    """Largest change of coverage; 0 tunes nothing # [] fp32"""
    k0: Tensor
    """Budget when nothing is tuned # [N] int32"""
    given: Tensor
    """Budget that is decided already, for all layers; 0 where the layers decide # [N] int32"""
    record: Tensor
    """What each layer did: budget, coverage at it, coverage at k0; 0 where a layer has not run yet or is
    dense. A layer that runs again uses the budget that it finds here # [layers, N, 3] fp32"""
    curves: Tensor | None = None
    """Coverage of each layer at the budgets of `grid`, where it is to be learnt # [layers, N, points] fp32"""
    grid: Tensor | None = None
    """Budgets less 1 of the points, within max_budget # [points] int64"""
    spent_s: Tensor | None = None
    """Where layers add up the time of their decisions, if that can be known without waiting # [] fp64, CPU"""
    min_budget: int = 1
    """No budget is lowered below it; one number for a whole run."""
    tune_short: bool = False
    """Also cut sequences that `k0` covers whole; the same for a whole run."""
    measures: bool = True
    """Whether layers measure coverage. If not, all budgets must be given."""
