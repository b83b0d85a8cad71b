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
from sb_lightning.compare.picture import draw
from sb_lightning.compare.results import LEGEND, Round, show, summarize
from sb_lightning.compare.targets import show_targets, targets

__all__ = ["is_measured", "markdown", "tables", "write_report"]


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
    with_picture: bool = True,
) -> list[Path]:
    """Write the figures of all finished rounds, and return the files.

    Args:
        folder: Where.
        study: A key of `STUDIES`.
        arms: What was compared.
        rounds: At least two.
        about: What was run where: version, machine, command and so on.
        with_picture: Draw the picture as well.
    """
    found = summarize(arms, rounds)
    document = {**about, "study": study, "rounds": len(rounds) - 1, "arms": found}
    document["targets"] = [asdict(target) for target in targets(found)]
    losses = {arm.name: [w.loss for each in rounds for w in each.windows[arm.name]] for arm in arms}
    document["losses"] = losses
    written = [folder / "results.json", folder / "results.md"]
    write_whole(written[0], json.dumps(_finite(document), indent=1, allow_nan=False) + "\n")
    write_whole(written[1], markdown(study, found, rounds, about))
    if with_picture:
        written.append(folder / "results.png")
        draw(study, arms, rounds, found, written[-1], heading=f"{STUDIES[study].title}. {about['machine']}")
    return written


def markdown(
    study: str, found: Mapping[str, Mapping[str, Any]], rounds: Sequence[Round], about: Mapping[str, Any]
) -> str:
    """Return the figures as a page.

    Args:
        study: A key of `STUDIES`.
        found: As `summarize` returns them.
        rounds: All rounds.
        about: What was run where.
    """
    facts = "\n".join(f"- {name.replace('_', ' ')}: {value}" for name, value in about.items())
    return (
        f"# {STUDIES[study].title}\n\n{facts}\n- rounds: {len(rounds) - 1} counted, the first left out\n\n"
        f"{tables(found)}\n{LEGEND}\n"
    )


def tables(found: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the figures of all arms, and what they were to be where these arms tell about it."""
    told = show_targets(found)
    return f"{show(found)}\n" + (f"\n{told}" if told else "")


def _finite(value: Any) -> Any:
    """Return a value that JSON can hold: what is not finite is null."""
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_finite(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
