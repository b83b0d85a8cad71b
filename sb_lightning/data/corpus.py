"""Reading documents: a folder of text files, a .jsonl or .parquet file, or Python's own standard library."""

from __future__ import annotations

import codecs
import fnmatch
import json
import os
import sysconfig
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from sb_lightning._messages import explain

__all__ = ["Corpus", "Document", "OnError"]

OnError = Literal["raise", "skip"]

_STDLIB_LEFT_OUT = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})


@dataclass(frozen=True)
class Document:
    """One document.

    Attributes:
        id: Stable name: the path relative to the source, or ``file:line`` (``file:row`` for Parquet).
        text: Its text, exactly as stored.
        num_bytes: Bytes of the source it took, for progress and sampling.
    """

    id: str
    text: str
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """The documents of one source, in the same order everywhere.

    Attributes:
        source: Folder of text files, one ``.jsonl`` or ``.parquet`` file, or ``stdlib``: the ``.py`` files of
            the running Python's standard library, real text with a long tail on every machine.
        text_field: Field (``.jsonl``) or column (``.parquet``) that holds the text.
        file_pattern: Names of the files to read from a folder, as in a shell.
        on_error: What to do with a broken document: ``raise``, naming file and line, or ``skip`` and count.
    """

    source: str
    text_field: str = "text"
    file_pattern: str = "*"
    on_error: OnError = "raise"

    def __post_init__(self) -> None:
        if self.on_error not in ("raise", "skip"):
            raise ValueError(
                explain(
                    f"data.on_error is {self.on_error!r}",
                    "there is no such choice",
                    "pass 'raise' or 'skip'",
                )
            )
        if not self.source.strip():
            raise ValueError(
                explain(
                    f"data.source is {self.source!r}",
                    "it would be the current folder, whatever that is",
                    "set data.source to a folder of text files ('.' is this one), a .jsonl or .parquet file, "
                    "or 'stdlib'",
                )
            )
        path = Path(self.source)
        if not self.is_stdlib and not path.is_dir() and not (path.is_file() and self._kind(path)):
            found = "is neither a folder nor a .jsonl or .parquet file" if path.exists() else "does not exist"
            raise ValueError(
                explain(
                    f"data.source is {self.source!r}, which {found}",
                    "there is nothing to read documents from",
                    "set data.source to a folder of text files, a .jsonl or .parquet file, or 'stdlib'",
                )
            )

    @property
    def is_stdlib(self) -> bool:
        """Whether the documents are the standard library's; its odd files are skipped without complaint."""
        return self.source == "stdlib"

    @property
    def root(self) -> Path:
        """Folder or file that the documents come from."""
        return Path(sysconfig.get_path("stdlib") if self.is_stdlib else self.source).resolve()

    @cached_property
    def listing(self) -> list[tuple[str, int, int]]:
        """The files to read, sorted: path relative to :attr:`root`, bytes, time of change in ns."""
        root = self.root
        if root.is_file():
            return [_entry(root.name, root)]
        pattern = "*.py" if self.is_stdlib else self.file_pattern
        found: list[tuple[str, int, int]] = []
        for folder, subfolders, names in os.walk(root):
            subfolders[:] = [name for name in subfolders if self._enters(name)]
            for name in names:
                path = Path(folder, name)
                if not name.startswith(".") and fnmatch.fnmatchcase(name, pattern) and path.is_file():
                    found.append(_entry(path.relative_to(root).as_posix(), path))
        return sorted(found)

    @property
    def num_bytes(self) -> int:
        """Bytes of all files."""
        return sum(size for _, size, _ in self.listing)

    def stamp(self) -> dict[str, Any]:
        """Return what tells this corpus from another or a later one."""
        return {
            "root": str(self.root),
            "files": [list(entry) for entry in self.listing],
            "text_field": None if self.root.is_dir() else self.text_field,
            "on_error": self.on_error,
        }

    def documents(self, skipped: Counter[str]) -> Iterator[Document]:
        """Yield the documents; broken ones raise, or are counted in ``skipped`` by reason.

        Raises:
            ValueError: A broken document under ``on_error='raise'``, or a file that is broken as a whole.
        """
        root = self.root
        if root.is_dir():
            for name, _, _ in self.listing:
                yield from self._text_file(root / name, name, skipped)
        elif self._kind(root) == ".jsonl":
            yield from self._json_lines(root, skipped)
        else:
            yield from self._parquet_rows(root, skipped)

    def _enters(self, folder: str) -> bool:
        if folder.startswith("."):
            return False
        return not (self.is_stdlib and folder in _STDLIB_LEFT_OUT)

    @staticmethod
    def _kind(path: Path) -> str | None:
        return path.suffix if path.suffix in (".jsonl", ".parquet") else None

    def _text_file(self, path: Path, name: str, skipped: Counter[str]) -> Iterator[Document]:
        try:
            raw = path.read_bytes()
        except OSError as error:
            self._reject(skipped, "unreadable file", _printable(path), str(error))
            return
        where = _printable(path)
        text = self._decode(raw.removeprefix(codecs.BOM_UTF8), where, skipped)
        if text is not None and self._usable(text, where, skipped):
            yield Document(_printable(name), text, len(raw))

    def _json_lines(self, path: Path, skipped: Counter[str]) -> Iterator[Document]:
        with path.open("rb") as lines:
            for number, raw in enumerate(lines, start=1):
                where = f"{_printable(path)}, line {number}"
                line = raw.removeprefix(codecs.BOM_UTF8) if number == 1 else raw
                if not line.strip():
                    continue
                decoded = self._decode(line, where, skipped)
                if decoded is None:
                    continue
                try:
                    record = json.loads(decoded)
                except (json.JSONDecodeError, RecursionError) as error:
                    self._reject(skipped, "broken JSON", where, f"it is not valid JSON ({error})")
                    continue
                except ValueError as error:
                    # A number of thousands of digits.
                    self._reject(skipped, "broken JSON", where, f"it cannot be read ({error})")
                    continue
                if not isinstance(record, dict):
                    self._reject(
                        skipped, "broken JSON", where, f"it holds a {type(record).__name__}, not an object"
                    )
                elif self.text_field not in record:
                    known = ", ".join(map(repr, list(record)[:8])) or "none"
                    self._reject(
                        skipped,
                        "missing field",
                        where,
                        f"there is no field {self.text_field!r} (fields: {known})",
                        "set data.text_field to the field that holds the text, or ",
                    )
                elif self._usable(record[self.text_field], where, skipped):
                    yield Document(f"{_printable(path.name)}:{number}", record[self.text_field], len(raw))

    def _parquet_rows(self, path: Path, skipped: Counter[str]) -> Iterator[Document]:
        try:
            import pyarrow.parquet as pq
            from pyarrow import ArrowException
        except ImportError as error:
            raise RuntimeError(
                explain(
                    f"data.source is {self.source!r} and pyarrow is not installed",
                    "Parquet files are read with it",
                    "run `pip install 'sb-lightning[parquet]'`, or use a .jsonl file",
                )
            ) from error
        try:
            table = pq.ParquetFile(path)
            columns = table.schema_arrow.names
            if self.text_field not in columns:
                raise ValueError(
                    explain(
                        f"{path} has no column {self.text_field!r} (columns: {', '.join(columns)})",
                        "there is no text to read",
                        "set data.text_field to the column that holds the text",
                    )
                )
        except (ArrowException, OSError) as error:
            raise ValueError(
                explain(
                    f"{_printable(path)} is no readable Parquet file",
                    str(error).rstrip("."),
                    "write the file again",
                )
            ) from error
        row = 0
        for group in range(table.num_row_groups):
            last = row + table.metadata.row_group(group).num_rows
            batches = table.iter_batches(batch_size=256, row_groups=[group], columns=[self.text_field])
            try:
                for batch in batches:
                    for scalar in batch.column(0):
                        row += 1
                        yield from self._parquet_value(scalar, path, row, skipped)
            except (ArrowException, OSError) as error:
                raise ValueError(
                    explain(
                        f"{_printable(path)} is damaged within rows {row + 1} to {last}",
                        str(error).rstrip("."),
                        "write the file again; data.on_error='skip' leaves out single rows only",
                    )
                ) from error

    def _parquet_value(self, scalar: Any, path: Path, row: int, skipped: Counter[str]) -> Iterator[Document]:
        where = f"{_printable(path)}, row {row}"
        try:
            value = scalar.as_py()
        except UnicodeDecodeError as error:
            self._reject(skipped, "not UTF-8", where, f"it is not UTF-8 (byte {error.start}: {error.reason})")
            return
        if self._usable(value, where, skipped):
            yield Document(f"{_printable(path.name)}:{row}", value, len(value))

    def _decode(self, raw: bytes, where: str, skipped: Counter[str]) -> str | None:
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            self._reject(skipped, "not UTF-8", where, f"it is not UTF-8 (byte {error.start}: {error.reason})")
            return None

    def _usable(self, text: Any, where: str, skipped: Counter[str]) -> bool:
        if not isinstance(text, str):
            kind = "null" if text is None else f"of type {type(text).__name__}"
            self._reject(skipped, "text is no string", where, f"the text is {kind}, not a string")
            return False
        if not text:
            self._reject(skipped, "empty", where, "the text is empty")
            return False
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            self._reject(
                skipped, "not UTF-8", where, "the text holds half of a surrogate pair, which is no character"
            )
            return False
        return True

    def _reject(
        self, skipped: Counter[str], reason: str, where: str, why: str, change: str = "mend it, or "
    ) -> None:
        if self.on_error == "raise" and not self.is_stdlib:
            skip = "set data.on_error to 'skip' to leave such documents out and count them"
            raise ValueError(explain(where, why, change + skip))
        skipped[reason] += 1


def _entry(name: str, path: Path) -> tuple[str, int, int]:
    stat = path.stat()
    return name, stat.st_size, stat.st_mtime_ns


def _printable(name: str | Path) -> str:
    """Return a file's name as UTF-8 can hold it: bytes of another encoding are spelt out."""
    return str(name).encode("utf-8", errors="backslashreplace").decode("utf-8")
