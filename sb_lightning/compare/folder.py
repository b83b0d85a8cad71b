"""The folder of a comparison: finished rounds, and the state from which each arm goes on."""

from __future__ import annotations

import contextlib
import fcntl
import fnmatch
import json
import shutil
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sb_lightning._files import write_whole
from sb_lightning._messages import explain
from sb_lightning.compare.results import Round
from sb_lightning.compare.round_file import decode_round

__all__ = ["ANEW", "ComparisonFolder", "writing"]

VERSION = 1
LOCK = ".lock"
# What a call leaves that was killed before it has written comparison.json.
LEFTOVERS = (LOCK, ".comparison.json.*.tmp")
# A finished round cannot be run again: the states before it are deleted.
ANEW = "put back a whole copy, or begin anew in another folder (--output)"


@contextlib.contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Say what to do where the disk is full or the folder cannot be written.

    Args:
        folder: Of the comparison.
    """
    try:
        yield
    except OSError as error:
        raise OSError(
            explain(
                f"--output is '{folder}', where nothing can be written ({error})",
                "the file system refused it; finished rounds are kept",
                "free space there, or grant the right, and call the same command again, which goes on; or "
                "begin in another folder (--output)",
            )
        ) from error


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

    @property
    def num_rounds(self) -> int:
        """Files of rounds that are there, whole or not; 0 where there is no folder."""
        return sum(file.stem.isdigit() for file in (self.path / "rounds").glob("*.json"))

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Make the folder, and keep other calls out of it; for rank zero.

        Raises:
            ValueError: Another call is running, or the folder holds something else.
        """
        with writing(self.path):
            self._make()
            file = (self.path / LOCK).open("a")
        with file:
            try:
                # The system takes it back when this process ends, however that happens.
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ValueError(
                    explain(
                        f"--output is '{self.path}', into which another call is writing",
                        "two calls would mix their rounds and states",
                        "wait until it has ended, or name another folder (--output)",
                    )
                ) from None
            except OSError as error:
                warnings.warn(
                    f"--output '{self.path}' cannot be locked ({error}): start no second call into it.",
                    stacklevel=2,
                )
            yield

    def begin(self, settings: Mapping[str, Any]) -> None:
        """Make the folder, or make sure that what is in it belongs to this comparison.

        Args:
            settings: All that the figures depend on.

        Raises:
            ValueError: The folder holds another comparison, or something else.
        """
        file = self.path / "comparison.json"
        with writing(self.path):
            self._make()
            if not file.exists():
                self._write_description({"version": VERSION, "settings": settings})
                return
        found = self._description()
        saved = found["settings"]
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

    @property
    def latency(self) -> dict[str, Any] | None:
        """The settings by which the table was found, and `has_table`; None before there was one."""
        found = self._description().get("latency")
        return found if isinstance(found, dict) else None

    def note_latency(self, settings: Mapping[str, Any]) -> None:
        """Write down by which settings the table was found, and whether there is one."""
        with writing(self.path):
            self._write_description({**self._description(), "latency": settings})

    def rounds(self) -> list[Round]:
        """Return the finished rounds, in order.

        Raises:
            ValueError: One is missing or damaged, or something else lies among them.
        """
        folder = self.path / "rounds"
        if not folder.exists():
            return []
        if not folder.is_dir():
            raise self.damaged(folder, "it is no folder")
        # Hidden ones are leftovers of a kill, or an editor's.
        files = sorted(file for file in folder.iterdir() if not file.name.startswith("."))
        for file in files:
            if not file.stem.isdigit() or file.name != f"{int(file.stem):04d}.json":
                raise ValueError(
                    explain(
                        f"{file} is damaged, or no round",
                        "this folder holds nothing but the rounds 0000.json, 0001.json and so on",
                        "move it away, or delete it",
                    )
                )
        found = []
        for number, file in enumerate(sorted(files, key=lambda each: int(each.stem))):
            if int(file.stem) != number:
                raise ValueError(
                    explain(
                        f"{folder} has no round {number}",
                        "every round goes on where the one before has ended",
                        ANEW,
                    )
                )
            try:
                each = decode_round(_read(file))
            except ValueError as error:
                raise self.damaged(file, str(error)) from error
            if each.number != number:
                raise self.damaged(file, f"it is of round {each.number}")
            found.append(each)
        return found

    def round_file(self, number: int) -> Path:
        """Return where a round lies."""
        return self.path / "rounds" / f"{number:04d}.json"

    @staticmethod
    def damaged(file: Path, reason: str) -> ValueError:
        """Return the error about a file that the comparison cannot go on without.

        Args:
            file: The file.
            reason: In a few words.
        """
        return ValueError(
            explain(f"{file} is damaged ({reason})", "the comparison cannot go on without it", ANEW)
        )

    def state(self, number: int, arm: str) -> Path:
        """Return where an arm's state after a round lies."""
        return self.path / "states" / f"{number:04d}" / f"{arm}.ckpt"

    def finish(self, finished: Round) -> None:
        """Write a round down, and delete the states that nothing needs any more."""
        text = json.dumps(finished.to_dict(), allow_nan=False)
        with writing(self.path):
            (self.path / "rounds").mkdir(exist_ok=True)
            write_whole(self.round_file(finished.number), text + "\n")
        for old in (self.path / "states").glob("[0-9]*"):
            if old.name.isdigit() and int(old.name) < finished.number:
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
                        ANEW,
                    )
                )

    def _make(self) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        if (self.path / "comparison.json").exists():
            return
        names = (file.name for file in self.path.iterdir())
        if any(not any(fnmatch.fnmatch(name, known) for known in LEFTOVERS) for name in names):
            raise ValueError(
                explain(
                    f"--output is '{self.path}', which holds other files",
                    "they would be mixed with those of the comparison",
                    "name an empty or a new folder",
                )
            )

    def _description(self) -> dict[str, Any]:
        file = self.path / "comparison.json"
        try:
            found = _read(file)
        except ValueError as error:
            raise self.damaged(file, str(error)) from error
        if found.get("version") != VERSION:
            raise ValueError(
                explain(
                    f"{file} has version {found.get('version')!r}",
                    f"this release reads version {VERSION}",
                    "name another folder as --output",
                )
            )
        if not isinstance(found.get("settings"), dict):
            raise self.damaged(file, "settings is no object")
        return found

    def _write_description(self, content: Mapping[str, Any]) -> None:
        write_whole(self.path / "comparison.json", json.dumps(content, indent=1) + "\n")


def _read(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"it cannot be read: {error}") from error
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    if not isinstance(content, dict):
        raise ValueError("it holds no object")
    return content
