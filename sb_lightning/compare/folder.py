"""The folder of a comparison: finished rounds, and the state from which each arm goes on."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sb_lightning._files import write_whole
from sb_lightning._messages import explain
from sb_lightning.compare.results import Round

__all__ = ["ComparisonFolder"]

VERSION = 1


class ComparisonFolder:
    """What is in the folder is whole at any moment, whenever a process that writes it is killed.

    A round counts as soon as its file is there. The states that it has left are those from which the next
    round begins; those that a broken-off round has left are written over.

    Args:
        path: The folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def table(self) -> Path:
        """The latency table that all launches plan by."""
        return self.path / "table.json"

    def begin(self, settings: Mapping[str, Any]) -> None:
        """Make the folder, or make sure that what is in it belongs to this comparison.

        Args:
            settings: All that the figures depend on.

        Raises:
            ValueError: The folder holds another comparison, or something else.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        file = self.path / "comparison.json"
        if not file.exists():
            if any(self.path.iterdir()):
                raise ValueError(
                    explain(
                        f"--output is '{self.path}', which holds other files",
                        "they would be mixed with those of the comparison",
                        "name an empty or a new folder",
                    )
                )
            write_whole(file, json.dumps({"version": VERSION, "settings": settings}, indent=1) + "\n")
            return
        found = _read(file)
        saved = found.get("settings", {})
        if found.get("version") != VERSION:
            raise ValueError(
                explain(
                    f"{file} has version {found.get('version')!r}",
                    f"this release reads version {VERSION}",
                    "name another folder as --output",
                )
            )
        wanted = json.loads(json.dumps(settings))
        different = [
            f"{key} {saved.get(key)!r} -> {wanted.get(key)!r}"
            for key in sorted({*saved, *wanted})
            if saved.get(key) != wanted.get(key)
        ]
        if different:
            raise ValueError(
                explain(
                    f"--output is '{self.path}', which holds a comparison with other settings: "
                    + ", ".join(different),
                    "its rounds do not compare with those to come",
                    "call it with the same settings on the same machine to go on, or name another folder",
                )
            )

    def rounds(self) -> list[Round]:
        """Return the finished rounds, in order.

        Raises:
            ValueError: One is missing or damaged.
        """
        files = sorted((self.path / "rounds").glob("[0-9]*.json"))
        found = []
        for number, file in enumerate(files):
            if int(file.stem) != number:
                raise ValueError(
                    explain(
                        f"{file.parent} has no round {number}",
                        "every round goes on where the one before has ended",
                        "put the file back, or begin anew in another folder (--output)",
                    )
                )
            try:
                found.append(Round.from_dict(_read(file)))
            except (KeyError, TypeError) as error:
                raise ValueError(
                    explain(
                        f"{file} is damaged ({error!r})",
                        "the figures of the round are lost",
                        "begin anew in another folder (--output)",
                    )
                ) from error
        return found

    def state(self, number: int, arm: str) -> Path:
        """Return where an arm's state after a round lies."""
        return self.path / "states" / f"{number:04d}" / f"{arm}.ckpt"

    def finish(self, finished: Round) -> None:
        """Write a round down, and delete the states that nothing needs any more."""
        folder = self.path / "rounds"
        folder.mkdir(exist_ok=True)
        text = json.dumps(finished.to_dict(), allow_nan=False)
        write_whole(folder / f"{finished.number:04d}.json", text + "\n")
        for old in (self.path / "states").glob("[0-9]*"):
            if int(old.name) < finished.number:
                shutil.rmtree(old, ignore_errors=True)

    def check_states(self, rounds: list[Round]) -> None:
        """Make sure that every arm can go on.

        Raises:
            ValueError: A state is gone.
        """
        for name in rounds[-1].order if rounds else ():
            if not self.state(rounds[-1].number, name).exists():
                raise ValueError(
                    explain(
                        f"{self.state(rounds[-1].number, name)} is gone",
                        f"{name} goes on from its weights",
                        "put the file back, or begin anew in another folder (--output)",
                    )
                )


def _read(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(
            explain(f"{file} cannot be read ({error})", "it is no JSON", "name another folder as --output")
        ) from error
    if not isinstance(content, dict):
        raise ValueError(
            explain(f"{file} holds no object", "it is another file", "name another folder as --output")
        )
    return content
