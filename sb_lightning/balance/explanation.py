"""What to make of the figures of several policies: tables, and what to choose."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from sb_lightning.balance.figures_table import GAP_NOTE, TimeUnit, imbalance_table, time_table, time_unit
from sb_lightning.balance.policies import POLICIES
from sb_lightning.balance.policy_figures import PolicyFigures

__all__ = ["BASELINE", "MANY_DOMINATED", "MUCH_WAITING", "Explanation", "ObjectiveFigures"]

BASELINE = "random"
NEED_TIMES = ("flops", "latency")
NEED_LENGTHS = ("tokens", "length")
MEETS = {"ddp": "once per optimizer step (DDP)", "fsdp": "in every micro-batch (FSDP, ZeRO-3)"}
# Less is lost in other noise.
SMALL_GAIN = 1.02
MANY_DOMINATED = 0.05
MUCH_WAITING = 0.1
"""Share of the ranks' time; where one long micro-batch makes them wait less, it is left at that."""


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
    model: str
    """The model that they are times of."""
    is_generic: bool
    """Whether that is a model of usual size, because nothing is known of the user's."""
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
    waiting_by_accumulate: dict[int, float]
    """Where that is often so and ranks wait much: the share of waiting under the recommended policy with
    more micro-batches per step, up to the first number that makes it small."""

    @property
    def best(self) -> PolicyFigures:
        """The policy of the shortest windows; among equals the one that looks at times before the others."""
        order = [self.figures[policy] for policy in reversed(POLICIES) if policy in self.figures]
        return min(order, key=lambda found: round(found.window_ms_mean, 6))

    @property
    def time_unit(self) -> TimeUnit:
        """The unit of all times that are shown, and its milliseconds."""
        longest = [found.window_ms_max for found in (*self.figures.values(), self.perfect)]
        return time_unit(max(*longest, *(found.random_ms for found in self.objectives.values())))

    @property
    def is_dominated(self) -> bool:
        """Whether ranks wait much under the best policy because single micro-batches take too long."""
        return (
            self.objective == "ddp"
            and self.dominated_share >= MANY_DOMINATED
            and self.best.waiting_share >= MUCH_WAITING
        )

    @property
    def recommendation(self) -> str:
        """What to choose, and why, in a few lines."""
        unit, ms = self.time_unit
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
        if not few and not self.is_measured and self.best.policy in NEED_TIMES:
            lines += self._without_table()
        if self.objective == "ddp" and self.dominated_share >= MANY_DOMINATED:
            lines += self._about_dominated()
        return "\n".join(lines)

    def _without_table(self) -> list[str]:
        """Say what the policy goes by while nothing is measured, what it needs, and what needs nothing."""
        policy = self.best.policy
        lines = [
            f"Times: operations counted for {'a generic model, ' if self.is_generic else ''}{self.model}."
        ]
        if self.is_generic:
            lines.append(
                f"Policy {policy} needs a table that `sb profile` measures, or AnalyticCost(shape) of your "
                "model."
            )
        else:
            lines.append(
                f"A table that `sb profile` measures gives policy {policy} the times of your machine."
            )
        plain = [self.figures[policy] for policy in NEED_LENGTHS if policy in self.figures]
        if plain:
            found = min(plain, key=lambda found: round(found.window_ms_mean, 6))
            lines.append(
                f"Without, choose policy {found.policy}, which needs only lengths: {found.speedup:.2f}x."
            )
        else:
            lines.append(f"Policies {' and '.join(NEED_LENGTHS)} need only lengths.")
        return lines

    def _about_dominated(self) -> list[str]:
        """Say how many micro-batches per step would even out what one long one makes uneven."""
        lines = [
            f"In {self.dominated_share:.0%} of the windows one micro-batch exceeds the ranks' mean. "
            "No plan evens that out."
        ]
        if not self.is_dominated:
            return [*lines, "More micro-batches per step, or shorter sequences, do."]
        now = f"The ranks wait {self.best.waiting_share:.1%} of their time with accumulate {self.accumulate}"
        if not self.waiting_by_accumulate:
            return [*lines, f"{now}; the data do not fill a window of twice as many."]
        tried = ", ".join(f"{share:.1%} with {count}" for count, share in self.waiting_by_accumulate.items())
        lines.append(f"{now}; it would be {tried}.")
        count, share = list(self.waiting_by_accumulate.items())[-1]
        small = f"below {MUCH_WAITING:.0%}"
        if share < MUCH_WAITING:
            lines.append(f"So accumulate {count} brings it {small}.")
        else:
            lines.append(f"None of these brings it {small}; shorter sequences would.")
        return lines

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
            f"micro-batches{packed}, objective {self.objective}\nTimes: {source}\n"
            f"Model: {'a generic one, ' if self.is_generic else ''}{self.model}"
        )
        rows = [*self.figures.values(), self.perfect]
        times = f"{time_table(rows, self.time_unit)}\n{GAP_NOTE}"
        return "\n\n".join((head, times, imbalance_table(rows), self.recommendation))
