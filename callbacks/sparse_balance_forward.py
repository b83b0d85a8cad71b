"""What gives each training forward its target."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from sb_lightning._messages import explain
from sb_lightning.attention.huggingface import SparseSettings
from sb_lightning.callbacks.sparse_balance_outcome import ForwardOutcome, RanForward
from sb_lightning.tuning.budgets import choose_budgets
from sb_lightning.tuning.coverage import sampled_rows
from sb_lightning.tuning.curves import CURVE_BUDGETS, between_points, curve_grid
from sb_lightning.tuning.target import SparseTarget
from sb_lightning.tuning.window_targets import CellGoal, Prices

if TYPE_CHECKING:
    from sb_lightning.callbacks.sparse_balance_settings import TuningSettings

__all__ = ["ForwardTuner"]

Floats = NDArray[np.float64]
NEVER_US = 2**31 - 1
"""More than any time that a micro-batch is steered to."""


class ForwardTuner:
    """Attached to a base model while it is trained: makes the target of each of its forwards.

    Args:
        settings: How to tune.
        prices: Predicted times.
        around: Entered while a target is made.
    """

    def __init__(
        self,
        settings: TuningSettings,
        prices: Prices,
        around: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self.settings = settings
        self.prices = prices
        self.curve: Callable[[int], Floats | None] = lambda length: None
        """Returns the coverage that is expected of a sequence of some length, at `CURVE_BUDGETS`."""
        self.measures = True
        """Whether forwards whose budgets are chosen beforehand measure coverage all the same."""
        self.goal: CellGoal | None = None
        """That of the micro-batch at hand; None between two."""
        self.forwards: list[RanForward] = []
        """Those of the window so far."""
        self.checks_lengths = False
        """Whether the lengths of a goal are a user's, to be compared with those that run."""
        self._unread: list[tuple[Tensor, int]] = []
        self._spent_s = 0.0
        self._begun = 0
        self._around = around
        self._layers: dict[int, tuple[int, list[int]]] = {}

    def budget(self, module: nn.Module) -> int:
        """Return k0 of a base model."""
        return self.settings.base_budget or _settings(module).budget

    def target(self, module: nn.Module, cu_seqlens: Tensor, attention_mask: Any) -> SparseTarget | None:
        """Return a new target, or None where nothing is to be tuned: evaluation, generation.

        Args:
            module: The base model.
            cu_seqlens: Where sequences, and runs of padding, start # [N + 1]
            attention_mask: The mask of a padded batch, if there is one.
        """
        goal = self.goal
        if goal is None or not module.training or not torch.is_grad_enabled():
            return None
        start = time.perf_counter()
        with self._around():
            lengths, is_real = _sequences(cu_seqlens, attention_mask, goal.lengths)
            forward = self._make(module, lengths, is_real, goal, cu_seqlens.device)
            self.forwards.append(forward)
            if self.checks_lengths and lengths == list(goal.lengths) and cu_seqlens.device.type != "cpu":
                # They may only be believed: the device is asked when the window is over.
                self._unread.append((cu_seqlens[-1], sum(lengths)))
        self._spent_s += time.perf_counter() - start
        return forward.target

    def prediction(self) -> tuple[float, float] | None:
        """Return the predicted time in ms and the mean budget of the micro-batch at hand, which may wait."""
        outcomes = [o for o in (f.outcome() for f in self.forwards[self._begun :]) if o is not None]
        if not outcomes:
            return None
        fixed_us = self.prices.fixed_us * (len(outcomes) - 1)
        budgets = np.concatenate([o.budgets for o in outcomes])
        return (sum(o.chosen_us for o in outcomes) - fixed_us) / 1e3, float(budgets.mean())

    def end_micro_batch(self) -> None:
        """Tune nothing until the next micro-batch begins.

        Raises:
            ValueError: The lengths that a user's function has told are not those of the sequences that ran.
        """
        goal, ran = self.goal, self.forwards[self._begun :]
        self.goal, self._begun = None, len(self.forwards)
        if self.checks_lengths and goal is not None and ran:
            told = sum(goal.lengths)
            # Padding may count or not, and a second forward may be of the same sequences.
            real = itertools.accumulate(int(np.dot(f.lengths, f.is_real)) for f in ran)
            if told not in {*real, *itertools.accumulate(sum(f.lengths) for f in ran)}:
                raise ValueError(_wrong_tokens(told, sum(sum(f.lengths) for f in ran)))

    def take(self) -> list[ForwardOutcome]:
        """Return what the window's forwards came to, and forget them; this may wait for the device.

        Raises:
            ValueError: The lengths that a user's function has told are not those of the sequences that ran.
        """
        unread, self._unread = self._unread, []
        for ran, told in zip([int(end) for end, _ in unread], [told for _, told in unread], strict=True):
            if ran != told:
                raise ValueError(_wrong_tokens(told, ran))
        forwards, self.forwards, self._begun = self.forwards, [], 0
        self._spent_s += sum(float(f.target.spent_s) for f in forwards if f.target.spent_s is not None)
        return [o for o in (forward.outcome() for forward in forwards) if o is not None]

    def take_cost_s(self) -> float:
        """Return the time that making targets has taken since the last call."""
        spent_s, self._spent_s = self._spent_s, 0.0
        return spent_s

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        # A copy of the model is not the one that is trained.
        return _nothing, ()

    def _make(
        self,
        module: nn.Module,
        lengths: list[int],
        is_real: NDArray[np.bool_],
        goal: CellGoal,
        device: torch.device,
    ) -> RanForward:
        settings, block_size = self.settings, _settings(module).block_size
        usual = self.budget(module)
        num_layers, sparse = self._layers_of(module)
        blocks = max((-(-length // block_size) for length in lengths), default=1)
        width = max(1, blocks if settings.max_budget is None else min(blocks, settings.max_budget))
        cost_us = self.prices.rows(lengths, width)
        k0 = np.full(len(lengths), usual, dtype=np.int32)
        real_lengths = [length for length, real in zip(lengths, is_real.tolist(), strict=True) if real]
        is_planned = list(goal.lengths) == real_lengths
        is_tuned = goal.tau_us is not None and settings.tolerance > 0
        expected = self._expected(real_lengths, width, block_size) if settings.granularity == "step" else None
        if settings.granularity == "step" and expected is None:
            # Coverage is not known yet: it is measured now.
            is_tuned = False
        if is_tuned:
            # Nobody sees what padding attends to: as little as can be.
            k0[~is_real] = 1
            cost_us[~is_real, :1], cost_us[~is_real, 1:] = 0, NEVER_US
        fixed_us = self.prices.fixed_us
        tau_us = goal.tau_us - fixed_us if goal.tau_us is not None and is_tuned else None
        given = np.zeros(len(lengths), dtype=np.int32)
        if expected is not None and tau_us is not None:
            chosen: Any = goal.budgets if goal.budgets and is_planned else None
            if chosen is None:
                chosen = choose_budgets(
                    expected,
                    cost_us[is_real],
                    tau_us,
                    tolerance=settings.tolerance,
                    k0=usual,
                    min_budget=settings.min_budget,
                    rows=[sampled_rows(length, block_size) for length in real_lengths],
                    num_blocks=[-(-length // block_size) for length in real_lengths],
                    tune_short=settings.tune_short,
                )
            given[is_real], given[~is_real] = chosen, 1
        measures = self.measures or not given.any()
        learns = settings.needs_curves and measures
        target = SparseTarget(
            cost_us=torch.from_numpy(cost_us).to(device, non_blocking=True),
            tau_us=torch.tensor(tau_us or 0, dtype=torch.int64, device=device),
            tolerance=torch.tensor(settings.tolerance if is_tuned else 0.0, device=device),
            k0=torch.from_numpy(k0).to(device, non_blocking=True),
            given=torch.from_numpy(given).to(device, non_blocking=True),
            record=torch.zeros(num_layers, len(lengths), 3, device=device),
            spent_s=torch.zeros((), dtype=torch.float64) if device.type == "cpu" else None,
            curves=torch.zeros(num_layers, len(lengths), len(CURVE_BUDGETS), device=device)
            if learns
            else None,
            grid=torch.from_numpy(curve_grid(width)).to(device) if learns else None,
            min_budget=settings.min_budget,
            tune_short=settings.tune_short,
            measures=measures,
        )
        ids = np.full(len(lengths), -1, dtype=np.int64)
        if is_planned and len(goal.ids) == len(real_lengths) and not goal.is_padding:
            ids[is_real] = goal.ids
        return RanForward(
            target=target,
            layers=sparse,
            lengths=lengths,
            ids=ids.tolist(),
            is_real=is_real,
            cost_us=cost_us.astype(np.int64),
            k0=k0.astype(np.int64),
            tau_us=tau_us,
            fixed_us=fixed_us,
            block_size=block_size,
            expected=None if measures else expected,
        )

    def _expected(self, lengths: list[int], width: int, block_size: int) -> Floats | None:
        """Return the coverage that is expected at budgets 1 to `width`, if it is known # [n, width]."""
        points = [self.curve(length) for length in lengths]
        known = [each for each in points if each is not None]
        if not known or len(known) < len(points):
            return None
        blocks = [-(-length // block_size) for length in lengths]
        return np.stack([between_points(p, width, b) for p, b in zip(known, blocks, strict=True)])

    def _layers_of(self, module: nn.Module) -> tuple[int, list[int]]:
        """Return how many layers a base model has, and the numbers of its sparse ones."""
        found = self._layers.get(id(module))
        if found is None:
            dense = _settings(module).dense_layers
            numbers = sorted(
                int(part.layer_idx)  # type: ignore[arg-type]
                for part in module.modules()
                if hasattr(part, "layer_idx") and hasattr(part, "sb_settings")
            )
            found = (numbers[-1] + 1, [number for number in numbers if number not in dense])
            self._layers[id(module)] = found
        return found


def _settings(base: Any) -> SparseSettings:
    settings = base.sb_settings
    assert isinstance(settings, SparseSettings)
    return settings


def _wrong_tokens(told: int, ran: int) -> str:
    return explain(
        f"lengths of SparseBalanceCallback returns {told} tokens for a batch, and {ran} have run",
        "micro-batches are steered by the tokens of their sequences",
        "return the tokens of each sequence that the model is given in training_step",
    )


def _nothing() -> None:
    return None


def _sequences(
    cu_seqlens: Tensor, attention_mask: Any, expected: Sequence[int]
) -> tuple[list[int], NDArray[np.bool_]]:
    """Return the length of each sequence, and whether it is more than padding.

    On a device the lengths that are expected are believed, if they are as many: reading them would wait.
    """
    count = len(cu_seqlens) - 1
    if cu_seqlens.device.type != "cpu" and len(expected) == count and attention_mask is None:
        return list(expected), np.ones(count, dtype=bool)
    bounds = cu_seqlens.tolist()
    lengths = [end - start for start, end in itertools.pairwise(bounds)]
    is_real = np.ones(count, dtype=bool)
    if isinstance(attention_mask, Tensor) and attention_mask.dim() == 2 and bounds[-1]:
        starts = cu_seqlens[:-1].to(torch.int64).clamp(max=bounds[-1] - 1)
        is_real = (attention_mask.reshape(-1)[starts] != 0).cpu().numpy()
    return lengths, is_real
