"""Budgets that sequences are expected to use, and how far predicted times were off, in versions."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sb_lightning._messages import explain
from sb_lightning.balance.bucket_curves import learn_curves, nearest_curve
from sb_lightning.latency.cost_model import CostModel
from sb_lightning.latency.table import LatencyModel

__all__ = ["BudgetStore"]

STATE_VERSION = 1
NUM_BUCKETS = 63
"""Half-octaves of the length: bucket b begins at 2^(b / 2) tokens."""


@dataclass(kw_only=True)
class _Version:
    """What was learnt from the window before; all but `by_id` is what holds from then on."""

    number: int
    by_id: dict[int, float] = field(default_factory=dict)
    by_bucket: NDArray[np.float64] = field(default_factory=lambda: np.full(NUM_BUCKETS, np.nan))
    factors: dict[str, Any] | None = None
    curves: NDArray[np.float64] | None = None
    """Coverage by bucket, at points that whoever measures them has chosen # [buckets, points]"""


class BudgetStore:
    """The budget expected for a sequence, before its attention has run.

    The exponential moving average of the budgets that it used, if it has been seen; else that of the
    sequences of its length bucket (in a run of one epoch no sequence comes twice); else the base budget.

    The store changes once per window and keeps its last versions. Loader workers draw ahead, so that ranks
    which asked for "what is known now" would be told different things: a plan asks for a version by number,
    and a version holds what the windows before that number have taught. All arithmetic is plain IEEE on equal
    inputs in sorted order: stores that are given the same windows are equal to the last bit, on all ranks.

    Args:
        rate: Weight of the newest window, in (0, 1].
        num_versions: Versions that are kept; a sampler raises it to what its loader needs.

    Example:
        >>> store = BudgetStore(rate=0.5)
        >>> store.update(1, ids=[7, 8], lengths=[4096, 512], budgets=[12, 4])
        >>> store.expected(1, ids=[7, 9, 8], lengths=[4096, 5000, 16], base=[8, 8, 8]).tolist()
        [12.0, 12.0, 4.0]
        >>> store.expected(0, ids=[7], lengths=[4096], base=[8]).tolist()
        [8.0]
    """

    def __init__(self, *, rate: float = 0.3, num_versions: int = 2) -> None:
        if not 0 < rate <= 1:
            raise ValueError(
                explain(f"rate is {rate}", "it is the newest window's weight", "pass a rate in (0, 1]")
            )
        if num_versions < 1:
            raise ValueError(
                explain(f"num_versions is {num_versions}", "the newest is one", "pass num_versions >= 1")
            )
        self.rate = rate
        self._num_versions = num_versions
        # The oldest first; the first one's by_id is complete, that of the others what they changed.
        self._ring = [_Version(number=0)]
        self._trail = ""
        self._costs: tuple[int, LatencyModel, LatencyModel] | None = None
        self._cost_model: CostModel | None = None

    @property
    def version(self) -> int:
        """Number of the newest version: windows of the run that have been taken in, or skipped."""
        return self._ring[-1].number

    @property
    def num_versions(self) -> int:
        """Versions that are kept."""
        return self._num_versions

    def keep(self, num_versions: int) -> None:
        """Keep at least so many versions from now on."""
        self._num_versions = max(self._num_versions, num_versions)

    def update(
        self,
        number: int,
        *,
        ids: ArrayLike,
        lengths: ArrayLike,
        budgets: ArrayLike,
        curves: NDArray[np.float64] | None = None,
        weights: NDArray[np.float64] | None = None,
    ) -> None:
        """Take in a window: the budgets that its sequences used, over all ranks, in any order.

        Args:
            number: Version that this makes: number of windows of the run so far, this one included.
            ids: Id of each sequence # [n] int; below 0 where it has none.
            lengths: Its tokens # [n] int.
            budgets: Its budget, averaged over layers # [n].
            curves: Its coverage at some points, NaN where it was not measured # [n, points]; None: no curves.
            weights: What its curve counts in averages # [n].

        Raises:
            ValueError: The number is not above the newest version's, or the arrays do not fit.
        """
        ids_, lengths_, budgets_ = _window(ids, lengths, budgets)
        order = np.lexsort((budgets_, lengths_, ids_))
        ids_, lengths_, budgets_ = ids_[order], lengths_[order], budgets_[order]
        new = self._next(number)
        for key in dict.fromkeys(ids_[ids_ >= 0].tolist()):
            mean = _mean(budgets_[ids_ == key])
            before = self._by_id(key, self.version)
            new.by_id[key] = mean if before is None else before + self.rate * (mean - before)
        buckets = _buckets(lengths_)
        for bucket in np.unique(buckets).tolist():
            mean = _mean(np.sort(budgets_[buckets == bucket]))
            before = float(new.by_bucket[bucket])
            new.by_bucket[bucket] = mean if np.isnan(before) else before + self.rate * (mean - before)
        self._note(number, ids_.tolist(), lengths_.tolist(), budgets_.tolist())
        if curves is not None and weights is not None:
            measured = (curves[order], weights[order])
            new.curves = learn_curves(new.curves, NUM_BUCKETS, self.rate, buckets, *measured)
            self._note(*(values.tolist() for values in measured))
        self._append(new)

    def recalibrate(
        self,
        number: int,
        table: LatencyModel,
        *,
        lengths: Sequence[Sequence[int]],
        budgets: Sequence[Sequence[int]],
        measured_ms: Sequence[float],
    ) -> None:
        """Take in the measured times of a window's cells, see `CostModel.recalibrate`.

        Args:
            number: As for `update`; the same number as the newest version adds to that one.
            table: The table that the factors belong to.
            lengths: Lengths of the sequences of each cell, over all ranks.
            budgets: Budgets that they used.
            measured_ms: Time of each cell, without waits.
        """
        model = self._model(table)
        if self._ring[-1].factors is not None:
            model.load_state_dict(self._ring[-1].factors)
        model.recalibrate(lengths, budgets, measured_ms)
        self._note(number, model.state_dict())
        if number == self.version and number > 0:
            self._ring[-1].factors = model.state_dict()
            self._costs = None
            return
        new = self._next(number)
        new.factors = model.state_dict()
        self._append(new)

    def expected(
        self, version: int, *, ids: ArrayLike, lengths: ArrayLike, base: ArrayLike
    ) -> NDArray[np.float64]:
        """Return the budget expected for each sequence by what was known at a version.

        Args:
            version: Number of the version; what no version that is kept says is that of the oldest.
            ids: Id of each sequence # [n] int.
            lengths: Its tokens # [n] int.
            base: Its budget if nothing is known # [n].
        """
        found = np.array(base, dtype=np.float64).reshape(-1)
        if not self._has_budgets:
            return found
        by_bucket = self._at(version).by_bucket[_buckets(np.asarray(lengths, dtype=np.int64))]
        known = ~np.isnan(by_bucket)
        found[known] = by_bucket[known]
        for position, key in enumerate(np.asarray(ids, dtype=np.int64).tolist()):
            seen = self._by_id(key, version)
            if seen is not None:
                found[position] = seen
        return found

    def curve(self, version: int, length: int) -> NDArray[np.float64] | None:
        """Return the coverage expected of a sequence of some length, as known at a version; None if unknown.

        Args:
            version: Number of the version, as for `expected`.
            length: Tokens of the sequence.
        """
        return nearest_curve(self._at(version).curves, int(_buckets(np.array([length]))[0]))

    def costs(self, version: int, table: LatencyModel) -> LatencyModel:
        """Return the table with the factors of a version applied; the table itself where there are none."""
        at = self._at(version)
        if at.factors is None:
            return table
        if self._costs is None or self._costs[0] != at.number or self._costs[1] is not table:
            model = self._model(table)
            model.load_state_dict(at.factors)
            self._costs = (at.number, table, model.current)  # type: ignore[assignment]
        return self._costs[2]  # type: ignore[index]

    def collapse(self) -> None:
        """Forget the numbering, not what was learnt: the next window is the first one again."""
        newest = self._ring[-1]
        by_id = self._ring[0].by_id
        for version in self._ring[1:]:
            by_id.update(version.by_id)
        self._ring = [
            _Version(
                number=0,
                by_id=by_id,
                by_bucket=newest.by_bucket,
                factors=newest.factors,
                curves=newest.curves,
            )
        ]

    def digest(self) -> str:
        """Return a short name of all that was taken in, in order: equal where plans will be."""
        return self._trail

    def state_dict(self) -> dict[str, Any]:
        """Return everything, as plain numbers and tensors, equal on all ranks."""
        import torch

        return {
            "version": STATE_VERSION,
            "num_versions": self._num_versions,
            "trail": self._trail,
            "ring": [
                {
                    "number": entry.number,
                    "ids": torch.tensor(sorted(entry.by_id), dtype=torch.int64),
                    "budgets": torch.tensor(
                        [entry.by_id[k] for k in sorted(entry.by_id)], dtype=torch.float64
                    ),
                    "buckets": torch.from_numpy(entry.by_bucket.copy()),
                    "factors": entry.factors,
                    "curves": None if entry.curves is None else torch.from_numpy(entry.curves.copy()),
                }
                for entry in self._ring
            ],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up what `state_dict` returned.

        Raises:
            ValueError: The state is not one of this release.
        """
        if state.get("version") != STATE_VERSION or not state.get("ring"):
            raise ValueError(
                explain(
                    f"the state of a BudgetStore has version {state.get('version')!r}",
                    f"this release reads version {STATE_VERSION}",
                    "resume with the release that wrote it, or start from the weights only",
                )
            )
        self._num_versions = max(self._num_versions, int(state["num_versions"]))
        self._ring = [
            _Version(
                number=int(entry["number"]),
                by_id=dict(zip(entry["ids"].tolist(), entry["budgets"].tolist(), strict=True)),
                by_bucket=np.array(entry["buckets"].tolist(), dtype=np.float64),
                factors=entry["factors"],
                curves=None if entry.get("curves") is None else entry["curves"].numpy().copy(),
            )
            for entry in state["ring"]
        ]
        self._trail = str(state["trail"])
        self._cost_model = None
        self._costs = None

    @property
    def _has_budgets(self) -> bool:
        newest = self._ring[-1]
        return bool(newest.by_id) or not np.isnan(newest.by_bucket).all()

    def resolve(self, version: int) -> int:
        """Return the number of the version that answers for this one."""
        return self._at(version).number

    def _note(self, *taken_in: Any) -> None:
        self._trail = hashlib.blake2b(f"{self._trail}{taken_in}".encode(), digest_size=8).hexdigest()

    def _at(self, version: int) -> _Version:
        return next((entry for entry in reversed(self._ring) if entry.number <= version), self._ring[0])

    def _by_id(self, key: int, version: int) -> float | None:
        for entry in reversed(self._ring):
            if (entry.number <= version or entry is self._ring[0]) and key in entry.by_id:
                return entry.by_id[key]
        return None

    def _next(self, number: int) -> _Version:
        if number <= self.version:
            raise ValueError(
                explain(
                    f"version {number} after version {self.version}",
                    "versions are numbered by the windows of the run, each taken in once",
                    "pass the number of windows so far",
                )
            )
        newest = self._ring[-1]
        return _Version(
            number=number,
            by_bucket=newest.by_bucket.copy(),
            factors=newest.factors,
            curves=newest.curves,
        )

    def _append(self, new: _Version) -> None:
        self._ring.append(new)
        self._costs = None
        while len(self._ring) > 2 and self._ring[1].number <= new.number - self._num_versions:
            oldest, second = self._ring[0], self._ring[1]
            # The larger one is changed in place: it may hold a million sequences.
            oldest.by_id.update(second.by_id)
            second.by_id = oldest.by_id
            del self._ring[0]

    def _model(self, table: LatencyModel) -> CostModel:
        if self._cost_model is None or self._cost_model.table is not table:
            self._cost_model = CostModel(table)
        return self._cost_model


def _window(
    ids: ArrayLike, lengths: ArrayLike, budgets: ArrayLike
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]:
    ids_ = np.asarray(ids, dtype=np.int64).reshape(-1)
    lengths_ = np.asarray(lengths, dtype=np.int64).reshape(-1)
    budgets_ = np.asarray(budgets, dtype=np.float64).reshape(-1)
    if not len(ids_) == len(lengths_) == len(budgets_):
        raise ValueError(
            explain(
                f"{len(ids_)} ids, {len(lengths_)} lengths and {len(budgets_)} budgets",
                "they describe the sequences of one window",
                "pass one of each per sequence",
            )
        )
    if not (np.isfinite(budgets_).all() and (budgets_ >= 1).all()):
        raise ValueError(
            explain(
                f"budgets holds {budgets_[~((budgets_ >= 1) & np.isfinite(budgets_))][0]}",
                "a query attends its own block at least",
                "pass budgets from 1 up",
            )
        )
    return ids_, lengths_, budgets_


def _mean(values: NDArray[np.float64]) -> float:
    total = 0.0
    for value in values.tolist():
        total += value
    return total / len(values)


def _buckets(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return floor(2 log2 L), by IEEE arithmetic that is exact for all lengths that occur."""
    mantissa, exponent = np.frexp(np.maximum(lengths, 1).astype(np.float64))
    return np.minimum(2 * (exponent.astype(np.int64) - 1) + (mantissa * mantissa >= 0.5), NUM_BUCKETS - 1)
