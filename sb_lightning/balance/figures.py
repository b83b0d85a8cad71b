"""What each policy is predicted to give on the windows of a sampler, before anything is trained."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from sb_lightning._messages import explain
from sb_lightning.balance.arguments import choice
from sb_lightning.balance.explanation import BASELINE, MUCH_WAITING, Explanation, ObjectiveFigures
from sb_lightning.balance.planner import CannotPack
from sb_lightning.balance.policies import OBJECTIVES, POLICIES
from sb_lightning.balance.policy_figures import PERFECT, PlanFigures, PolicyFigures
from sb_lightning.latency.table import LatencyTable

if TYPE_CHECKING:
    from sb_lightning.balance.policies import Objective, Policy
    from sb_lightning.balance.sampler import SparsityAwareBatchSampler

__all__ = [
    "PERFECT",
    "Explanation",
    "ObjectiveFigures",
    "PolicyFigures",
    "compare_policies",
    "explain_policies",
    "explain_sampler",
    "spread_windows",
]

SHOWN = ("random", "length", "tokens", "latency")
OTHER_OBJECTIVE_WINDOWS = 1000
MULTIPLES = (2, 4, 8)
"""Of the micro-batches per step that are tried where one micro-batch takes longer than a rank's share."""
TRIAL_WINDOWS = 16

Progress = Callable[[int, int], None]
"""Called with the number of plans that are made and of those that will be."""


def spread_windows(num_windows: int, most: int | None) -> list[int]:
    """Return windows evenly spread over an epoch, all if there are no more than asked for.

    An epoch is shuffled, so that these are a random sample.

    Args:
        num_windows: Windows of the epoch.
        most: Windows wanted; None for all.

    Example:
        >>> spread_windows(10, 4), spread_windows(3, None)
        ([0, 2, 5, 7], [0, 1, 2])
    """
    count = num_windows if most is None else min(most, num_windows)
    return [i * num_windows // count for i in range(count)]


def compare_policies(
    sampler: SparsityAwareBatchSampler,
    policies: Sequence[str],
    windows: Sequence[int] | None = None,
    progress: Progress | None = None,
) -> dict[str, PolicyFigures]:
    """Plan the same windows of the sampler's epoch under several policies.

    Args:
        sampler: Says which sequences form the windows, and what they are predicted to cost.
        policies: Names of policies; ``random`` is planned also if it is not among them.
        windows: Windows of the sampler's epoch; None for all.
        progress: Called after each plan.

    Raises:
        ValueError: There is no such policy, none is named, or no window is.
        IndexError: A window is not among those of the epoch.
    """
    found = _plan_windows(sampler, policies, windows, progress, sampler.objective)
    return {policy: found[policy].figures(found[BASELINE]) for policy in dict.fromkeys(policies)}


def explain_policies(
    sampler: SparsityAwareBatchSampler,
    policies: Sequence[str],
    windows: Sequence[int] | None = None,
    progress: Progress | None = None,
) -> Explanation:
    """Return what each policy is predicted to give on windows of the sampler's epoch, and what to choose.

    Args:
        sampler: Says which sequences form the windows, and what they are predicted to cost.
        policies: Names of policies.
        windows: Windows of the sampler's epoch; None for all.
        progress: Called after each plan.

    Raises:
        ValueError: There is no such policy, none is named, or no window is.
        IndexError: A window is not among those of the epoch.
    """
    chosen = list(range(sampler.num_windows)) if windows is None else list(windows)
    others: list[Objective] = [other for other in OBJECTIVES if other != sampler.objective]  # type: ignore[misc]
    few = [chosen[i] for i in spread_windows(len(chosen), OTHER_OBJECTIVE_WINDOWS)]
    first = len(chosen) * len({*policies, BASELINE})
    total = first + len(others) * len(few) * 2

    def stage(before: int) -> Progress | None:
        return None if progress is None else lambda done, _: progress(before + done, total)

    found = _plan_windows(sampler, policies, chosen, stage(0), sampler.objective)
    baseline = found[BASELINE]
    explanation = Explanation(
        ranks=sampler.ranks,
        accumulate=sampler.accumulate,
        sequences_per_micro_batch=sampler.sequences_per_micro_batch,
        objective=sampler.objective,
        epoch=sampler.epoch,
        num_windows=sampler.num_windows,
        latency=sampler.costs.table.label,
        model=sampler.costs.model,
        is_generic=sampler.costs.is_generic,
        is_measured=isinstance(sampler.costs.table, LatencyTable),
        figures={policy: found[policy].figures(baseline) for policy in dict.fromkeys(policies)},
        perfect=baseline.perfect(),
        objectives={},
        dominated_share=float((baseline.longest > baseline.loads * (1 + 1e-9)).mean()),
        waiting_by_accumulate={},
    )
    best = explanation.best
    explanation.objectives[sampler.objective] = _gain(best, baseline)
    for i, other in enumerate(others):
        planned = _plan_windows(sampler, (best.policy,), few, stage(first + i * len(few) * 2), other)
        figures = planned[best.policy].figures(planned[BASELINE])
        explanation.objectives[other] = _gain(figures, planned[BASELINE])
    if explanation.is_dominated:
        explanation.waiting_by_accumulate.update(_waiting_by_accumulate(sampler, best.policy))
    return explanation


def explain_sampler(sampler: SparsityAwareBatchSampler, num_windows: int = 200) -> Explanation:
    """Return what the usual policies, and the sampler's own, are predicted to give.

    Args:
        sampler: The sampler.
        num_windows: Windows that are looked at, evenly spread over its epoch.
    """
    policies = [policy for policy in POLICIES if policy in SHOWN or policy == sampler.policy]
    return explain_policies(sampler, policies, spread_windows(sampler.num_windows, num_windows))


def _plan_windows(
    sampler: SparsityAwareBatchSampler,
    policies: Sequence[str],
    windows: Sequence[int] | None,
    progress: Progress | None,
    objective: Objective,
) -> dict[str, PlanFigures]:
    """Plan under the policies and under `random`."""
    if not policies:
        raise ValueError(
            explain("policies is empty", "there is nothing to compare", f"name some of {POLICIES}")
        )
    named: list[Policy] = [choice("a policy", policy, POLICIES) for policy in (BASELINE, *policies)]
    chosen = list(range(sampler.num_windows)) if windows is None else list(windows)
    if not chosen:
        raise ValueError(
            explain(
                "windows is empty", "figures are means over windows", "name windows, or pass None for all"
            )
        )
    # The first of them shuffles the epoch, which is no part of planning a window.
    is_full = np.array(
        [len(sampler.members(sampler.epoch, window)) == sampler.window_size for window in chosen]
    )
    found = [(policy, PlanFigures(policy, objective, chosen, is_full)) for policy in dict.fromkeys(named)]
    done, total = 0, len(chosen) * len(found)
    for i, window in enumerate(chosen):
        for policy, figures in found:
            begin = time.perf_counter()
            plan = sampler.plan(sampler.epoch, window, policy=policy, objective=objective)
            figures.add(i, plan, 1e3 * (time.perf_counter() - begin))
            done += 1
            if progress is not None:
                progress(done, total)
    return {figures.policy: figures for _, figures in found}


def _waiting_by_accumulate(sampler: SparsityAwareBatchSampler, policy: str) -> dict[int, float]:
    """Return the share of waiting with more micro-batches per step, up to the first at which it is small.

    A few full windows of each size are planned; sizes of which the data fill none are left out.
    """
    # It imports this module.
    from sb_lightning.balance.sampler import SparsityAwareBatchSampler

    found: dict[int, float] = {}
    for multiple in MULTIPLES:
        accumulate = multiple * sampler.accumulate
        full = len(sampler.lengths) // (multiple * sampler.window_size)
        if full == 0:
            break
        larger = SparsityAwareBatchSampler(
            sampler.lengths, sampler.target_tokens, ranks=sampler.ranks, rank=sampler.rank,
            accumulate=accumulate, sequences_per_micro_batch=sampler.sequences_per_micro_batch,
            policy=choice("a policy", policy, POLICIES), objective=sampler.objective, seed=sampler.seed,
            latency=sampler.costs.table, budget=sampler.costs.budget, store=sampler.store,
            sequence_ids=sampler.sequence_ids, max_tokens=sampler.max_tokens, overflow=sampler.overflow,
            equal_counts=sampler.equal_counts,
        )  # fmt: skip
        larger.set_epoch(sampler.epoch)
        windows = spread_windows(full, TRIAL_WINDOWS)
        try:
            found[accumulate] = compare_policies(larger, (policy,), windows)[policy].waiting_share
        except CannotPack:
            break
        if found[accumulate] < MUCH_WAITING:
            break
    return found


def _gain(figures: PolicyFigures, baseline: PlanFigures) -> ObjectiveFigures:
    return ObjectiveFigures(
        objective=figures.objective,
        policy=figures.policy,
        random_ms=float(baseline.values.mean()),
        window_ms=figures.window_ms_mean,
        speedup=figures.speedup,
    )
