"""What a comparison leaves in its folder: results.json, results.md and results.png."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sb_lightning._files import write_whole
from sb_lightning.compare.arms import STUDIES, Arm
from sb_lightning.compare.folder import writing
from sb_lightning.compare.notes import notes
from sb_lightning.compare.picture import draw
from sb_lightning.compare.results import LEGEND, Round, show, summarize
from sb_lightning.compare.targets import show_targets, targets

__all__ = ["is_measured", "markdown", "tables", "write_report"]

GOALS = "Goals of sb_lightning for configs/compare.yaml:"


def is_measured(rounds: Sequence[Round]) -> bool:
    """Return whether there is a round besides the first, which is not counted."""
    return len(rounds) > 1


def write_report(
    folder: Path,
    study: str,
    arms: Sequence[Arm],
    rounds: Sequence[Round],
    about: Mapping[str, Any],
    *,
    table_error: float | None = None,
    with_goals: bool = False,
    with_picture: bool = True,
) -> list[Path]:
    """Write the figures of all finished rounds, and return the files.

    Args:
        folder: Where.
        study: A key of `STUDIES`.
        arms: What was compared.
        rounds: At least two.
        about: What was run where: version, machine, command and so on.
        table_error: Median error of the latency table on its held-out points; None where it is not known.
        with_goals: Hold the figures against the goals, which are those of a preset.
        with_picture: Draw the picture as well.
    """
    found = summarize(arms, rounds)
    document = {**about, "study": study, "rounds": len(rounds) - 1, "arms": found}
    document["table_error"] = table_error
    document["notes"] = notes(arms, found, table_error)
    document["targets"] = [asdict(target) for target in targets(found)] if with_goals else []
    losses = {arm.name: [w.loss for each in rounds for w in each.windows[arm.name]] for arm in arms}
    document["losses"] = losses
    written = [folder / "results.json", folder / "results.md"]
    shown = tables(found, document["notes"], with_goals=with_goals)
    with writing(folder):
        write_whole(written[0], json.dumps(_finite(document), indent=1, allow_nan=False) + "\n")
        write_whole(written[1], markdown(study, shown, rounds, about))
        if with_picture:
            written.append(folder / "results.png")
            heading = f"{STUDIES[study].title}. {about['machine']}"
            draw(study, arms, rounds, found, written[-1], heading=heading)
    return written


def markdown(study: str, shown: str, rounds: Sequence[Round], about: Mapping[str, Any]) -> str:
    """Return the figures as a page.

    Args:
        study: A key of `STUDIES`.
        shown: As `tables` returns them.
        rounds: All rounds.
        about: What was run where.
    """
    facts = "\n".join(f"- {name.replace('_', ' ')}: {value}" for name, value in about.items())
    return (
        f"# {STUDIES[study].title}\n\n{facts}\n- rounds: {len(rounds) - 1} counted, the first left out\n\n"
        f"{shown}\n{LEGEND}\n"
    )


def tables(
    found: Mapping[str, Mapping[str, Any]], told: Sequence[str] = (), *, with_goals: bool = False
) -> str:
    """Return the figures of all arms, and what is to be said of them.

    Args:
        found: As `summarize` returns them.
        told: As `notes` returns it.
        with_goals: Hold the figures against the goals, where these arms tell about any.
    """
    goals = show_targets(found) if with_goals else ""
    parts = [show(found) + "\n", "".join(f"- Note: {note}\n" for note in told)]
    parts.append(f"{GOALS}\n\n{goals}" if goals else "")
    return "\n".join(part for part in parts if part)


def _finite(value: Any) -> Any:
    """Return a value that JSON can hold: what is not finite is null."""
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_finite(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
