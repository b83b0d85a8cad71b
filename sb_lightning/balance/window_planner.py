"""Plans of the windows of a data set: lengths, expected costs and membership brought together."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sb_lightning._messages import explain
from sb_lightning.balance.arguments import digest
from sb_lightning.balance.costs import SequenceCosts
from sb_lightning.balance.membership import Membership
from sb_lightning.balance.planner import CannotPack, plan_window
from sb_lightning.balance.policies import Objective, Policy
from sb_lightning.balance.window import WindowPlan

__all__ = ["PlannedWindow", "WindowPlanner"]

Indices = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class PlannedWindow:
    """A window's plan, and what it was made of."""

    plan: WindowPlan
    members: Indices
    """Data-set index of each item."""
    budgets: Indices
    """Budget expected for each item."""
    max_length: int | None
    """Tokens to which the sequences are cut; None: they are not."""

    def digest(self) -> str:
        """Return a short name of which sequences run where."""
        ends = np.array([-1], dtype=np.int64)
        cells = [x for row in self.plan.cells for cell in row for x in (self.members[list(cell)], ends)]
        return digest(np.concatenate([*cells, [self.max_length or 0]]))


@dataclass(kw_only=True)
class WindowPlanner:
    """Plans any window of any epoch: a function of its fields and the version of the store."""

    membership: Membership
    """Which sequences run in which window."""
    lengths: Indices
    """Tokens of each sequence of the data set."""
    target_tokens: Indices
    """Labels of each that count in the loss."""
    sequence_ids: Indices
    """Number of each, by which the store knows it."""
    costs: SequenceCosts
    """What sequences are expected to take."""
    policy: Policy
    """How sequences are dealt over the cells."""
    objective: Objective
    """How ranks meet."""
    max_tokens: int | None = None
    """Most tokens of a cell."""
    truncates: bool = False
    """Cut the sequences of a window that does not fit under `max_tokens`; False refuses it."""
    equal_counts: bool = False
    """Whether all cells hold equally many sequences."""
    _has_warned: bool = False

    def planned(
        self,
        epoch: int,
        window: int,
        version: int,
        policy: Policy | None = None,
        objective: Objective | None = None,
    ) -> PlannedWindow:
        """Return a window's plan.

        Args:
            epoch: Epoch, from 0.
            window: Window of the epoch, from 0.
            version: Of the store.
            policy: Another policy than the own one.
            objective: Another objective.

        Raises:
            IndexError: The window is not among those that run.
            CannotPack: Its sequences do not fit under `max_tokens`.
        """
        members, micro_batches = self.membership.members(epoch, window)
        if micro_batches == 0:
            raise IndexError(
                explain(
                    f"window {window} of epoch {epoch} does not run",
                    f"the epoch has {self.membership.num_windows(epoch)} windows, counted from 0",
                    "ask for one of these",
                )
            )
        cut = self.max_tokens if self.truncates else None
        options = (version, policy or self.policy, objective or self.objective)
        lengths, targets = self.lengths[members], self.target_tokens[members]
        try:
            return self._solve(members, micro_batches, lengths, targets, cut, *options)
        except CannotPack as error:
            if cut is None:
                raise CannotPack(f"window {window} of epoch {epoch}: {error}") from None
        # No cell needs to hold more sequences than this, and so many of this length fit.
        cut = max(cut // -(-len(members) // (self.membership.ranks * micro_batches)), 1)
        lengths, targets = self._cut(epoch, window, lengths, targets, cut)
        return self._solve(members, micro_batches, lengths, targets, cut, *options)

    def check_packing(self, epoch: int) -> None:
        """Make sure that every window of an epoch can be packed under `max_tokens`, whatever things cost.

        Raises:
            CannotPack: One cannot.
        """
        if self.max_tokens is None:
            return
        for window in range(self.membership.num_windows(epoch)):
            members, micro_batches = self.membership.members(epoch, window)
            lengths, cells = self.lengths[members], self.membership.ranks * micro_batches
            if self.truncates:
                # Of each sequence a token is left.
                lengths = np.ones_like(lengths)
            # One sequence per cell always fits; each to the emptiest cell cannot exceed the second bound.
            fits = len(lengths) <= cells or (
                not self.equal_counts
                and int(lengths.sum()) + (cells - 1) * int(lengths.max()) <= cells * self.max_tokens
            )
            if not fits:
                # The planner falls back to this policy, which looks at tokens only; where it may cut, this
                # warns or refuses now.
                self.planned(epoch, window, 0, "tokens", "ddp")

    def _solve(
        self,
        members: Indices,
        micro_batches: int,
        lengths: Indices,
        targets: Indices,
        max_length: int | None,
        version: int,
        policy: Policy,
        objective: Objective,
    ) -> PlannedWindow:
        budgets = self.costs.budgets(version, self.sequence_ids[members], lengths)
        weights = self.costs.flops(lengths.tolist(), budgets.tolist()) if policy == "flops" else None
        plan = plan_window(
            self.costs.times_ms(version, lengths, budgets),
            lengths,
            ranks=self.membership.ranks,
            accumulate=micro_batches,
            policy=policy,
            objective=objective,
            max_tokens=self.max_tokens,
            equal_counts=self.equal_counts,
            cell_overhead_ms=self.costs.overhead_ms,
            target_tokens=targets,
            weights=weights,
        )
        return PlannedWindow(plan=plan, members=members, budgets=budgets, max_length=max_length)

    def _cut(
        self, epoch: int, window: int, lengths: Indices, targets: Indices, cut: int
    ) -> tuple[Indices, Indices]:
        long = lengths > cut
        where = f"window {window} of epoch {epoch} does not fit under max_tokens={self.max_tokens}"
        if (targets[long] != lengths[long] - 1).any():
            raise ValueError(
                explain(
                    f"{where}, overflow is 'truncate', and target_tokens is not all tokens but the first",
                    "how many targets are left after the cut is not known, and the loss divides by them",
                    "raise max_tokens, or lower sequences_per_micro_batch",
                )
            )
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"{where}: {int(long.sum())} of its {len(lengths)} sequences are cut to {cut} tokens "
                "(overflow='truncate'). This is told once.",
                stacklevel=2,
            )
        return np.minimum(lengths, cut), np.where(long, cut - 1, targets)
