"""Planted windows and rounds of a comparison."""

from __future__ import annotations

from sb_lightning.compare.results import ArmWindow, Round


def window(number=0, busy=((10.0, 20.0), (30.0, 60.0)), predicted=None, wall_ms=100.0, **fields):
    defaults = {
        "members": f"members {number}", "wait_ms": 3.0, "plan_ms": 0.1, "tune_ms": 0.0, "loss": 2.0,
        "budget": 4.0, "work_ratio": 1.0, "rows": 10.0, "coverage_change": 0.0, "decisions": 0.0,
        "infeasible": 0.0,
    }  # fmt: skip
    return ArmWindow(
        number=number, busy_ms=busy, predicted_ms=predicted or busy, wall_ms=wall_ms, **{**defaults, **fields}
    )


def rounds_of(by_arm, curves=None, per_round=2):
    """Rounds of so many windows each; `by_arm` has the windows of each arm."""
    count = len(next(iter(by_arm.values()))) // per_round
    return [
        Round(
            number=n,
            order=tuple(by_arm),
            windows={arm: tuple(w[n * per_round : (n + 1) * per_round]) for arm, w in by_arm.items()},
            curves=curves[n] if curves else {},
            seconds=1.5,
        )
        for n in range(count)
    ]
