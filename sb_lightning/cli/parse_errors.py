"""jsonargparse's messages in one line: the full key, what was wrong with it, and the nearest valid key.

Where no valid key is near, those that there are follow, below that line if they are many.
"""

from __future__ import annotations

import difflib
import inspect
import re
import textwrap
from collections.abc import Collection
from importlib import import_module

__all__ = ["nearest_key", "one_line"]

# How jsonargparse names a key that it does not know: on the command line, and in a file.
UNKNOWN_KEY = re.compile(
    r"unrecognized arguments: --([\w.]+)|does not accept (?:option|nested key) '([\w.]+)'"
)
BAD_KEY = re.compile(r'Parser key "([\w.]+)":\s*')
UNION = "Does not validate against any of the Union subtypes"
# The detail that matters in the list of what each type of a union says: the one of a class that was chosen.
CHOSEN_CLASS = re.compile(r"Problem with given class_path '([\w.]+)':\s*")
UNKNOWN_OPTION = re.compile(r"Option '([\w.]+)' is not accepted")
MISSING = re.compile(r"(?:arguments are|argument is) required: ([\w., ]+)")
NO_CLASS = re.compile(r"Expected a dot import path string: (\S+)")
EXPECTED = re.compile(r"- (?:Expected an? (?!path but)|Not a valid subclass of )(.+)")
VALUE = re.compile(r"Given value: (.*)")
ARGUMENT = re.compile(r"NestedArg\(key='[\w.]+', val=(.*)\)$")
# So many keys are told in the same line; so many at all.
KEYS_IN_LINE, KEYS_TOLD = 12, 20
COLUMNS = 100


def one_line(message: str, keys: Collection[str]) -> str:
    """Shorten a message of jsonargparse; one of an unknown form is returned as it is.

    Args:
        message: What `ArgumentParser.error` was given.
        keys: Every key of the command.
    """
    unknown = UNKNOWN_KEY.search(message)
    if unknown:
        return message + nearest_key(unknown.group(1) or unknown.group(2), keys)
    bad = BAD_KEY.match(message)
    return message if bad is None else _about(bad.group(1), message[bad.end() :], keys)


def nearest_key(key: str, keys: Collection[str]) -> str:
    """Return what to say about a key that does not exist: the nearest one, or those that there are.

    Args:
        key: The full key.
        keys: Every key there is.

    Example:
        >>> nearest_key("a.lr", ["a", "a.learning_rate", "a.beta"])
        " (did you mean 'a.learning_rate'?)"
        >>> nearest_key("a.x", ["a", "a.learning_rate", "a.beta"])
        ' (keys of a: beta, learning_rate)'
        >>> nearest_key("x.lr", ["a", "a.learning_rate", "b"])
        ' (keys: a, b)'
    """
    parent, _, name = key.rpartition(".")
    others = sorted(other for other in keys if not key.startswith(f"{other}."))
    siblings = _keys_of(parent, others)
    close = difflib.get_close_matches(key, others, n=1, cutoff=0.75)
    # The last part must be alike as well: a long parent makes any two keys look alike.
    if close and difflib.SequenceMatcher(None, name, close[0].rpartition(".")[2]).ratio() < 0.5:
        close = []
    beside = difflib.get_close_matches(name, siblings, n=1) or [
        sibling for sibling in siblings if "".join(word[:1] for word in sibling.split("_")) == name
    ]
    if beside:
        return f" (did you mean '{parent}{'.' * bool(parent)}{beside[0]}'?)"
    if close:
        return f" (did you mean '{close[0]}'?)"
    if parent and not siblings:
        # There is no such group either.
        return nearest_key(parent, keys)
    return _told(f"keys of {parent}" if parent else "keys", siblings or _keys_of(parent, keys))


def _keys_of(group: str, keys: Collection[str]) -> list[str]:
    start = f"{group}." if group else ""
    return sorted({key[len(start) :].partition(".")[0] for key in keys if key.startswith(start)})


def _told(what: str, names: list[str]) -> str:
    if not names:
        return ""
    if len(names) <= KEYS_IN_LINE:
        return f" ({what}: {', '.join(names)})"
    more = [f"and {len(names) - KEYS_TOLD} more (see --help)"] if len(names) > KEYS_TOLD else []
    text = f"{what}: {', '.join(names[:KEYS_TOLD] + more)}"
    return "\n" + textwrap.fill(
        text, COLUMNS, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False
    )


def _about(key: str, detail: str, keys: Collection[str]) -> str:
    if chosen := CHOSEN_CLASS.search(detail):
        return _about_class(key, chosen.group(1), detail[chosen.end() :], keys)
    if UNION not in detail:
        return f'Parser key "{key}": {_plain(" ".join(detail.split()))}'
    if no_class := NO_CLASS.search(detail):
        return (
            f"Parser key \"{key}\": no class '{no_class.group(1)}' is known; check its spelling, or give its "
            "import path, such as package.module.Class"
        )
    value = _given(detail)
    wanted = list(dict.fromkeys(_plain(found.strip()) for found in EXPECTED.findall(detail)))
    return f'Parser key "{key}": {value} is given, wanted {" or ".join(wanted)}'


def _about_class(key: str, path: str, detail: str, keys: Collection[str]) -> str:
    # What follows belongs to other types of the union.
    detail = detail.partition("\n    - ")[0]
    name = path.rpartition(".")[2]
    if option := UNKNOWN_OPTION.match(detail):
        full = f"{key}.{option.group(1)}"
        valid = [f"{key}.{parameter}" for parameter in _parameters(path)]
        return f"there is no key '{full}' of {name}{nearest_key(full, valid)}"
    if missing := MISSING.search(detail):
        wanted = ", ".join(f"{key}.{part.strip()}" for part in missing.group(1).split(","))
        return f"{name} cannot be made for {key}: it needs a value for {wanted}"
    if inner := BAD_KEY.match(detail):
        return _about(f"{key}.{inner.group(1)}", detail[inner.end() :], keys)
    return f'Parser key "{key}": {" ".join(detail.split())}'


def _given(detail: str) -> str:
    found = VALUE.findall(detail)
    if not found:
        return "this"
    argument = ARGUMENT.match(found[-1])
    return argument.group(1) if argument else f"'{found[-1]}'"


def _plain(text: str) -> str:
    """Name types as people do."""
    text = re.sub(r"<class '(?:[\w]+\.)*(\w+)'>", r"\1", text).replace("NoneType", "null")
    text = text.replace("Expected a int.", "Expected an int.")
    text = re.sub(r"typing\.Literal\[([^\]]*)\]", r"one of \1", text)
    return text.replace("Expected a one of", "Expected one of")


def _parameters(path: str) -> list[str]:
    module, _, name = path.rpartition(".")
    try:
        return list(inspect.signature(getattr(import_module(module), name)).parameters)
    except (ImportError, AttributeError, ValueError, TypeError):
        return []
