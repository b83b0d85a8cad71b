"""Files that are written whole or not at all."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

__all__ = ["replacing", "write_whole"]


@contextlib.contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """Yield the path of an empty file in the same folder, which takes the target's place in the end.

    Its name is not used by any other process, also of another machine that shares the disk. After an error
    it is deleted and the target is as it was.

    Args:
        target: The file to write.
    """
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".tmp")
    os.close(handle)
    part = Path(name)
    try:
        yield part
        # mkstemp makes files that only their owner reads.
        part.chmod(0o666 & ~_umask())
        os.replace(part, target)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def write_whole(target: Path, text: str) -> None:
    """Write a text file, replacing it whole or not at all.

    Args:
        target: The file to write.
        text: Its content.
    """
    with replacing(target) as part:
        part.write_text(text, encoding="utf-8")


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
