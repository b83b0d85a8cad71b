"""What each policy is predicted to give on the windows of a sampler, before anything is trained."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from sb_lightning._messages import explain
from sb_lightning.balance.arguments import choice
from sb_lightning.balance.figures_table import imbalance_table, time_table, time_unit
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

BASELINE = "random"
SHOWN = ("random", "length", "latency")
OTHER_OBJECTIVE_WINDOWS = 1000
MEETS = {"ddp": "once per optimizer step (DDP)", "fsdp": "in every micro-batch (FSDP, ZeRO-3)"}
# Less is lost in other noise.
SMALL_GAIN = 1.02
MANY_DOMINATED = 0.05

Progress = Callable[[int, int], None]
"""Called with the number of plans that are made and of those that will be."""


@dataclass(frozen=True, kw_only=True)
class ObjectiveFigures:
    """What a policy gains where ranks meet in one way."""

    objective: str
    """How ranks meet."""
    policy: str
    """The policy."""
    random_ms: float
    """Mean time of a window under `random`."""
    window_ms: float
    """Mean time of a window under the policy."""
    speedup: float
    """The one over the other."""


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """What each policy is predicted to give, what perfect balance would, and what to choose.

    ``str()`` of it is a table for people, `to_dict` has the same figures for programs.
    """

    ranks: int
    """Data-parallel ranks."""
    accumulate: int
    """Micro-batches per rank and optimizer step."""
    sequences_per_micro_batch: int
    """Sequences of a micro-batch, on average."""
    objective: str
    """How ranks meet."""
    epoch: int
    """The epoch whose windows were planned."""
    num_windows: int
    """Windows of that epoch."""
    latency: str
    """Where the predicted times come from."""
    is_measured: bool
    """Whether they were measured; else only their ratios mean something."""
    figures: dict[str, PolicyFigures]
    """By policy."""
    perfect: PolicyFigures
    """All ranks have the mean load: what no plan can exceed, nor reach where one sequence is longer."""
    objectives: dict[str, ObjectiveFigures]
    """What the recommended policy gives for each way in which ranks can meet, planned for it."""
    dominated_share: float
    """Share of the windows in which one micro-batch alone takes longer than the mean load of a rank."""

    @property
    def best(self) -> PolicyFigures:
        """The policy of the shortest windows; among equals the one that looks at times before the others."""
        order = [self.figures[policy] for policy in reversed(POLICIES) if policy in self.figures]
        return min(order, key=lambda found: round(found.window_ms_mean, 6))

    @property
    def recommendation(self) -> str:
        """What to choose, and why, in a few lines."""
        unit, ms = time_unit(max(found.random_ms for found in self.objectives.values()))
        policies = {found.policy for found in self.objectives.values()}
        few = self.perfect.speedup < SMALL_GAIN or policies == {BASELINE}
        first = "Balancing gains little here" if few else f"Recommended: policy {', '.join(policies)}"
        lines = [f"{first}. Predicted speedup over {BASELINE}, by how ranks meet:"]
        width = max(map(len, MEETS.values()))
        for found in sorted(self.objectives.values(), key=lambda found: found.objective):
            lines.append(
                f"  {MEETS[found.objective]:<{width}}  objective {found.objective:<4}  {found.speedup:.2f}x "
                f"({found.random_ms / ms:,.1f} -> {found.window_ms / ms:,.1f} {unit} per step)"
            )
        if self.objective == "ddp" and self.dominated_share >= MANY_DOMINATED:
            lines += [
                f"In {self.dominated_share:.0%} of the windows one micro-batch exceeds the ranks' mean.",
                "No plan evens that out; more micro-batches per step, or shorter sequences, do.",
            ]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain JSON types; no number is NaN or infinite."""
        return {**asdict(self), "best": self.best.policy, "recommendation": self.recommendation}

    def __str__(self) -> str:
        planned = self.best.windows
        of_all = f"{planned:,} of {self.num_windows:,}" if planned < self.num_windows else f"all {planned:,}"
        several = self.sequences_per_micro_batch
        packed = f" of {several} sequences" if several > 1 else ""
        source = self.latency if self.is_measured else f"{self.latency}: only their ratios mean something"
        head = (
            f"Predicted for {of_all} windows of epoch {self.epoch}: {self.ranks} ranks x {self.accumulate} "
            f"micro-batches{packed}, objective {self.objective}\nTimes: {source}"
        )
        rows = [*self.figures.values(), self.perfect]
        return "\n\n".join((head, time_table(rows), imbalance_table(rows), self.recommendation))


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
        is_measured=isinstance(sampler.costs.table, LatencyTable),
        figures={policy: found[policy].figures(baseline) for policy in dict.fromkeys(policies)},
        perfect=baseline.perfect(),
        objectives={},
        dominated_share=float((baseline.longest > baseline.loads * (1 + 1e-9)).mean()),
    )
    best = explanation.best
    explanation.objectives[sampler.objective] = _gain(best, baseline)
    for i, other in enumerate(others):
        planned = _plan_windows(sampler, (best.policy,), few, stage(first + i * len(few) * 2), other)
        figures = planned[best.policy].figures(planned[BASELINE])
        explanation.objectives[other] = _gain(figures, planned[BASELINE])
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
    found = [(policy, PlanFigures(policy, objective, chosen)) for policy in dict.fromkeys(named)]
    # This shuffles the epoch, which is no part of planning a window.
    sampler.members(sampler.epoch, chosen[0])
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


def _gain(figures: PolicyFigures, baseline: PlanFigures) -> ObjectiveFigures:
    return ObjectiveFigures(
        objective=figures.objective,
        policy=figures.policy,
        random_ms=float(baseline.values.mean()),
        window_ms=figures.window_ms_mean,
        speedup=figures.speedup,
    )
