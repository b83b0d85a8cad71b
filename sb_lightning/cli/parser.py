"""The command line's parser: a short usage line, and the nearest key for one that does not exist."""

from __future__ import annotations

import argparse
import difflib
import re
from typing import NoReturn

from lightning.pytorch.cli import LightningArgumentParser

__all__ = ["TrainingParser"]

# How jsonargparse names a key that it does not know: on the command line, and in a file.
UNKNOWN_KEY = re.compile(
    r"unrecognized arguments: --([\w.]+)|does not accept (?:option|nested key) '([\w.]+)'"
)


class TrainingParser(LightningArgumentParser):
    """LightningArgumentParser whose errors fit on a screen."""

    def format_usage(self) -> str:
        """Return one line in place of one for each of some hundred options."""
        command = self.prog.replace(" [options]", "")
        return f"usage: {command} [--config FILE ...] [--key value | --key=value ...]\n"

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Print the message, with the nearest key if one was misspelt, and exit with code 2."""
        found = UNKNOWN_KEY.search(message)
        if found:
            key = found.group(1) or found.group(2)
            close = difflib.get_close_matches(key, _keys(self), n=1, cutoff=0.75)
            message += f" (did you mean '{close[0]}'?)" if close else ""
        super().error(message, ex)


def _keys(parser: argparse.ArgumentParser) -> set[str]:
    keys: set[str] = set()
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for choice in (action.choices or {}).values():
                keys |= _keys(choice)
        else:
            keys.add(action.dest)
    return keys
