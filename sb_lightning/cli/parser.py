"""The command line's parser: a short usage line, and errors that name the key in one line."""

from __future__ import annotations

import argparse
from dataclasses import is_dataclass
from typing import Any, NoReturn

from docstring_parser import attrdoc
from docstring_parser.attrdoc import AttributeDocstrings
from jsonargparse import set_parsing_settings
from lightning.pytorch.cli import LightningArgumentParser

from sb_lightning.cli.parse_errors import one_line

__all__ = ["TrainingParser"]

# The help of a settings dataclass is the text below each of its fields.
set_parsing_settings(docstring_parse_attribute_docstrings=True)


class _FieldTexts(AttributeDocstrings):
    """Reads the source of dataclasses only: that of the Trainer took two seconds of every start."""

    def get_attr_docs(self, component: Any) -> dict[str, tuple[str, str | None, str | None]]:
        return super().get_attr_docs(component) if is_dataclass(component) else {}


attrdoc.AttributeDocstrings = _FieldTexts  # type: ignore[misc]


class TrainingParser(LightningArgumentParser):
    """LightningArgumentParser whose errors fit on a screen."""

    def format_usage(self) -> str:
        """Return one line in place of one for each of some hundred options."""
        command = self.prog.replace(" [options]", "")
        return f"usage: {command} [--config FILE ...] [--key value | --key=value ...]\n"

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Print what was wrong with which key, with the nearest key if one was misspelt; exit code 2."""
        super().error(one_line(message, _keys(self)), ex)


def _keys(parser: argparse.ArgumentParser) -> set[str]:
    keys: set[str] = set()
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for choice in (action.choices or {}).values():
                keys |= _keys(choice)
        else:
            keys.add(action.dest)
    return keys
