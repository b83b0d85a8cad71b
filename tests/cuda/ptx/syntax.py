"""PTX text as data: entries, and in each its labels, registers, instructions and source lines."""

from __future__ import annotations

import re
from dataclasses import dataclass


class PtxError(Exception):
    """The text has something that is not understood; the message says what and where."""


@dataclass(frozen=True)
class Instruction:
    """One instruction: `@guard opcode operands`."""

    line: int
    guard: str
    opcode: str
    operands: tuple[str, ...]


@dataclass(frozen=True)
class Label:
    """A place to branch to."""

    name: str


@dataclass(frozen=True)
class Registers:
    """Registers `names` of a type without its dot."""

    type: str
    names: tuple[str, ...]


@dataclass(frozen=True)
class Brace:
    """Begin or end of a block with registers of its own."""

    opens: bool


@dataclass(frozen=True)
class Place:
    """Where the next instructions come from in the CUDA source; file, line."""

    file: str
    line: int


Statement = Instruction | Label | Registers | Brace | Place


@dataclass(frozen=True)
class Entry:
    """A kernel. Its one parameter is `parameter_bytes` long."""

    name: str
    parameter: str
    parameter_bytes: int
    statements: list[Statement]


@dataclass(frozen=True)
class Module:
    """A PTX file. `shared` names the block's dynamic allocation."""

    shared: frozenset[str]
    entries: list[Entry]


_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)
_SECTION = re.compile(r"\.section\s+\S+\s*\{.*?\}", re.S)
_FILE = re.compile(r'\.file\s+(\d+)\s+"([^"]+)"[^\n]*')
_SHARED = re.compile(r"\.extern\s+\.shared\s+\.align\s+\d+\s+\.b8\s+([\w$]+)\[\];")
_ENTRY = re.compile(r"(?:\.visible\s+|\.weak\s+)?\.entry\s+([\w$]+)\s*\(([^)]*)\)([^{]*)(?=\{)")
_PARAMETER = re.compile(r"\s*\.param\s+\.align\s+8\s+\.b8\s+([\w$]+)\[(\d+)\]\s*")
_LIMITS = re.compile(r"(?:\s*\.(?:maxntid|minnctapersm|reqntid)\s+[\d, ]+)*\s*")
_HEADER = re.compile(r"\.(?:version|target|address_size)\s+[^\n]*")
_TOKEN = re.compile(
    r"(?P<brace>[{}])|\.loc\s+(?P<place>[^\n]*)|(?P<label>[\w$]+):|\.pragma[^;]*;"
    r"|\.reg\s+\.(?P<type>\w+)\s+(?P<registers>[^;]+);"
    r"|(?:@(?P<guard>!?%?[\w$]+)\s+)?(?P<opcode>[a-z][\w.:]*)(?P<operands>[^;]*);"
)
_PLACE = re.compile(r"(\d+) (\d+) \d+(?:, function_name .*, inlined_at (\d+) (\d+) \d+)?$")


def parse(text: str, wrappers: tuple[str, ...] = ()) -> Module:
    """Return what a PTX file, compiled with -lineinfo, holds.

    Args:
        text: The file.
        wrappers: Parts of names of source files whose lines say little: an instruction from there is said to
            be from where it was called.

    Raises:
        PtxError: Something is not understood. Nothing is left out silently.
    """
    text = _COMMENT.sub(lambda found: "\n" * found[0].count("\n"), text)
    files = dict(_FILE.findall(text))
    rest = _FILE.sub("", _SECTION.sub(lambda found: "\n" * found[0].count("\n"), text))
    shared = frozenset(_SHARED.findall(rest))
    rest = _SHARED.sub("", rest)
    entries, before, at = [], [], 0
    while head := _ENTRY.search(rest, at):
        before.append(rest[at : head.start()])
        parameter = _PARAMETER.fullmatch(head[2])
        if parameter is None:
            raise PtxError(f"{head[1]} has other parameters than one struct by value:{head[2]}")
        if _LIMITS.fullmatch(head[3]) is None:
            raise PtxError(f"{head[1]}: unknown directive in{head[3]}")
        body = _Body(rest, head.end(), files, wrappers)
        entries.append(Entry(head[1], parameter[1], int(parameter[2]), body.statements))
        at = body.end
    if others := _HEADER.sub("", "".join([*before, rest[at:]])).strip():
        raise PtxError(f"unknown directive of a module: {others.splitlines()[0]}")
    return Module(shared, entries)


class _Body:
    """The statements between an entry's braces, and where they end."""

    def __init__(self, text: str, begin: int, files: dict[str, str], wrappers: tuple[str, ...]) -> None:
        self.statements: list[Statement] = []
        self._files, self._wrappers = files, wrappers
        self._line, self._counted = 1 + text.count("\n", 0, begin), begin
        at, depth = begin, 0
        while True:
            while text[at].isspace():
                at += 1
            found = _TOKEN.match(text, at)
            self._line += text.count("\n", self._counted, at)
            self._counted = at
            if found is None:
                raise PtxError(f"line {self._line}: not understood: {text[at : at + 80].split(chr(10))[0]}")
            at = found.end()
            self._add(found)
            if found["brace"]:
                depth += 1 if found["brace"] == "{" else -1
                if depth == 0:
                    break
        self.end = at

    def _add(self, found: re.Match[str]) -> None:
        if found["brace"]:
            self.statements.append(Brace(found["brace"] == "{"))
        elif found["place"]:
            self._place(found["place"].strip())
        elif found["label"]:
            self.statements.append(Label(found["label"]))
        elif found["type"]:
            names = [name.strip() for name in found["registers"].split(",")]
            self.statements.append(
                Registers(found["type"], tuple(n for name in names for n in _numbered(name)))
            )
        elif found["opcode"]:
            operands = tuple(split(found["operands"]))
            self.statements.append(Instruction(self._line, found["guard"] or "", found["opcode"], operands))

    def _place(self, text: str) -> None:
        found = _PLACE.match(text)
        if found is None:
            raise PtxError(f"line {self._line}: not understood: .loc {text}")
        file, line = self._files[found[1]], int(found[2])
        if found[3] and any(name in file for name in self._wrappers):
            file, line = self._files[found[3]], int(found[4])
        if line > 0:  # line 0: no place of its own
            self.statements.append(Place(file, line))


def _numbered(name: str) -> list[str]:
    found = re.fullmatch(r"(.+)<(\d+)>", name)
    return [f"{found[1]}{i}" for i in range(int(found[2]))] if found else [name]


def split(text: str) -> list[str]:
    """Split operands at the commas outside of braces and brackets."""
    parts, depth = [""], 0
    for letter in " ".join(text.split()):
        depth += (letter in "{[") - (letter in "}]")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts if part.strip()]
