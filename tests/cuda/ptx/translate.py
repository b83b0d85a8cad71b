"""C++ from PTX: a kernel becomes a function of the same name that threads of `csrc/emulator` can run.

Registers become variables, branches gotos, instructions calls of `csrc/emulator/ptx.h`. The function takes
the kernel's argument as the kernel itself would, so that a program linked with it launches it instead.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from ptx.syntax import Brace, Entry, Instruction, Label, Module, Place, PtxError, Registers, split

TYPES = {"pred": "bool", "f32": "float", "f64": "double"}
TYPES |= {f"{kind}{bits}": f"uint{bits}_t" for kind in "bu" for bits in (8, 16, 32, 64)}
TYPES |= {f"s{bits}": f"int{bits}_t" for bits in (8, 16, 32, 64)}
SPECIAL = {"%laneid": "Lane()"}
for _register, _function in (
    ("tid", "ThreadIndex"),
    ("ntid", "BlockSize"),
    ("ctaid", "BlockIndex"),
    ("nctaid", "GridSize"),
):
    SPECIAL |= {f"%{_register}.{axis}": f"{_function}().{axis}" for axis in "xyz"}

# Instructions of registers alone: the function, the kinds of operands and the kind of the result.
# t: the instruction's type, w: twice as wide, u: u32, p: a predicate.
FUNCTIONS = {
    "abs": ("Absolute", "t", "t"),
    "add": ("Add", "tt", "t"),
    "and": ("And", "tt", "t"),
    "bfi": ("InsertBits", "ttuu", "t"),
    "div": ("Divide", "tt", "t"),
    "div.rn": ("Divide", "tt", "t"),
    "ex2.approx.ftz": ("Exp2", "t", "t"),
    "fma.rn": ("FusedMultiplyAdd", "ttt", "t"),
    "lg2.approx.ftz": ("Log2", "t", "t"),
    "mad.lo": ("MultiplyAdd", "ttt", "t"),
    "mad.wide": ("MultiplyAddWide", "ttw", "w"),
    "max": ("Maximum", "tt", "t"),
    "min": ("Minimum", "tt", "t"),
    "mul": ("Multiply", "tt", "t"),
    "mul.hi": ("MultiplyHigh", "tt", "t"),
    "mul.lo": ("Multiply", "tt", "t"),
    "mul.wide": ("MultiplyWide", "tt", "w"),
    "neg": ("Negate", "t", "t"),
    "not": ("Not", "t", "t"),
    "or": ("Or", "tt", "t"),
    "popc": ("CountOnes", "t", "u"),
    "prmt": ("PickBytes", "ttt", "t"),
    "rcp.rn": ("Reciprocal", "t", "t"),
    "rem": ("Remainder", "tt", "t"),
    "selp": ("Select", "ttp", "t"),
    "shl": ("ShiftLeft", "tu", "t"),
    "shr": ("ShiftRight", "tu", "t"),
    "sub": ("Subtract", "tt", "t"),
    "xor": ("Xor", "tt", "t"),
}
# What an instruction takes; on other types PTX gives it another meaning, or none.
_INTEGERS = tuple(f"{kind}{bits}" for kind in "us" for bits in (16, 32, 64))
_BITS = ("b16", "b32", "b64")
_FLOATS = ("f32", "f64")
ALLOWED = {
    **dict.fromkeys(("add", "sub", "min", "max"), _INTEGERS + _FLOATS),
    **dict.fromkeys(("neg", "abs"), ("s16", "s32", "s64", *_FLOATS)),
    **dict.fromkeys(("and", "or", "xor", "not"), (*_BITS, "pred")),
    **dict.fromkeys(("mul.lo", "mad.lo", "div", "rem"), _INTEGERS),
    "mul.hi": ("u32", "s32", "u64", "s64"),
    **dict.fromkeys(("mul.wide", "mad.wide"), ("u32", "s32")),
    **dict.fromkeys(("mul", "fma.rn", "div.rn", "rcp.rn", "ex2.approx.ftz", "lg2.approx.ftz"), _FLOATS),
    **dict.fromkeys(("bfi", "prmt"), ("b32",)),
    "popc": ("b32", "b64"),
    "shl": _BITS,
    "shr": _BITS + _INTEGERS,
    "selp": _BITS + _INTEGERS + _FLOATS,
}
CONVERSIONS = {
    "cvt.rn.bf16x2.f32": ("PackBf16({}, {})", "f32 f32", "b32"),
    "cvt.rn.f16x2.f32": ("PackHalf({}, {})", "f32 f32", "b32"),
    "cvt.f32.f16": ("WidenHalf({})", "b16", "f32"),
    "cvt.rn.f32.s32": ("static_cast<float>({})", "s32", "f32"),
    "cvt.rzi.s64.f64": ("TowardZero({})", "f64", "s64"),
    "cvt.f64.f32": ("static_cast<double>({})", "f32", "f64"),
    "cvt.rn.f32.f64": ("static_cast<float>({})", "f64", "f32"),
    "cvt.rn.f64.s32": ("static_cast<double>({})", "s32", "f64"),
    "cvt.rn.f64.u32": ("static_cast<double>({})", "u32", "f64"),
    "cvt.rn.f64.s64": ("static_cast<double>({})", "s64", "f64"),
    "cvt.rn.f32.u32": ("static_cast<float>({})", "u32", "f32"),
}
COMPARISONS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
COMPARISONS |= {"lo": "<", "ls": "<=", "hi": ">", "hs": ">="}
# C++ says that a NaN differs from everything and else compares as false.
FLOAT_COMPARISONS = {name: f"a {COMPARISONS[name]} b" for name in ("eq", "lt", "le", "gt", "ge")}
FLOAT_COMPARISONS |= {"ne": "a < b || a > b", "neu": "a != b", "equ": "!(a < b || a > b)"}
FLOAT_COMPARISONS |= {"ltu": "!(a >= b)", "leu": "!(a > b)", "gtu": "!(a <= b)", "geu": "!(a < b)"}
FLOAT_COMPARISONS |= {"num": "a == a && b == b", "nan": "a != a || b != b"}
ATOMICS = {"add": "Add(old, x)", "or": "Or(old, x)", "and": "And(old, x)", "xor": "Xor(old, x)"}
ATOMICS |= {"min": "Minimum(old, x)", "max": "Maximum(old, x)", "exch": "x"}
DIRECTIONS = {"up": "kUp", "down": "kDown", "bfly": "kAcross", "idx": "kIndex"}
PRODUCTS = {
    f"mma.sync.aligned.m16n8k16.row.col.f32.{name}.{name}.f32": op
    for name, op in (("bf16", "kMmaBf16"), ("f16", "kMmaFp16"))
}


def translate(module: Module, source: str, only: Callable[[str], bool], root: str = "") -> str:
    """Return the C++ of the entries that `only` picks by name.

    The others become functions that end the launch.

    Args:
        module: What `syntax.parse` made of a PTX file.
        source: The file's name, for messages.
        only: Whether a name is wanted.
        root: What to leave out of the names of CUDA files in messages.

    Raises:
        PtxError: An instruction is not known. The message names it and its line.
    """
    parts = ['#include "emulator/ptx.h"', "using namespace emulator;", "using namespace emulator::ptx;"]
    for entry in module.entries:
        head = f'extern "C" void {entry.name}(Parameters<{entry.parameter_bytes}> parameters)'
        if only(entry.name):
            try:
                parts += [head + " {", *_Function(entry, module.shared, source, root).lines(), "}"]
            except PtxError as error:
                raise PtxError(f"{source}: {entry.name}: {error}") from None
        else:
            parts.append(f'{head} {{ (void)parameters; NotTranslated("{entry.name}"); }}')
        parts.append(f'#line 1 "translated from {source}"')
    return "\n".join(parts) + "\n"


class _Function:
    """The body of one entry."""

    def __init__(self, entry: Entry, shared: frozenset[str], source: str, root: str) -> None:
        self._entry, self._source, self._root = entry, source, root
        # Both are places in spaces that begin at zero.
        self._symbols = {entry.parameter, *shared}
        self._types: list[dict[str, str]] = []
        self._used: set[str] = set()
        self._place = Place("", 0)
        self._here = ""

    def lines(self) -> list[str]:
        """Return lines of C++; one per place in the CUDA source."""
        pieces: list[tuple[Place, str]] = []
        opened = []
        for statement in self._entry.statements:
            if isinstance(statement, Place):
                self._place = statement
            elif isinstance(statement, Registers):
                self._types[-1] |= dict.fromkeys(statement.names, statement.type)
            elif isinstance(statement, Label):
                pieces.append((self._place, f"{_name(statement.name)}:;"))
            elif isinstance(statement, Brace) and statement.opens:
                self._types.append({})
                opened.append(len(pieces))
                pieces.append((self._place, "{"))
            elif isinstance(statement, Brace):
                begin = opened.pop()
                pieces[begin] = (pieces[begin][0], "{ " + self._declarations())
                pieces.append((self._place, "}"))
            else:
                pieces.append((self._place, self._guarded(statement)))
        text, place = ["const unsigned char* const parameter = parameters.bytes; (void)parameter;"], None
        for at, piece in pieces:
            if at == place:
                text[-1] += " " + piece
            else:
                text += [f'#line {max(at.line, 1)} "{at.file or self._source}"', piece]
                place = at
        return text

    def _declarations(self) -> str:
        # What nobody wrote is NaN.
        return " ".join(
            f"{TYPES[type_]} {_name(name)} = {_poison(type_)};"
            for name, type_ in self._types.pop().items()
            if name in self._used
        )

    def _guarded(self, instruction: Instruction) -> str:
        file = self._place.file.removeprefix(self._root).lstrip("/")
        place = f"{file}:{self._place.line}, " if file else ""
        self._here = f'"{place}{self._source}", {instruction.line}'
        try:
            text = self._instruction(instruction.opcode, list(instruction.operands))
        except (PtxError, KeyError, ValueError, IndexError) as error:
            what = f"@{instruction.guard} " if instruction.guard else ""
            what += f"{instruction.opcode} {', '.join(instruction.operands)}"
            why = f" ({error})" if isinstance(error, PtxError) else ""
            raise PtxError(f"line {instruction.line}: unknown instruction: {what}{why}") from None
        return f"if ({self._read(instruction.guard, 'pred')}) {{ {text} }}" if instruction.guard else text

    # ---- operands ----

    def _type_of(self, register: str) -> str:
        self._used.add(register)
        for types in reversed(self._types):
            if register in types:
                return types[register]
        raise PtxError(f"{register} is no register")

    def _read(self, operand: str, wanted: str) -> str:
        """Return an expression of the type that `wanted` stands for."""
        if operand.startswith("!"):
            return f"!{self._read(operand[1:], wanted)}"
        if operand in SPECIAL:
            return f"static_cast<{TYPES[wanted]}>({SPECIAL[operand]})"
        if operand in self._symbols:
            return f"{TYPES[wanted]}{{0}}"
        if found := re.fullmatch(r"0[fF]([0-9a-fA-F]{8})", operand):
            return _cast(f"0x{found[1]}u", "b32", wanted)
        if found := re.fullmatch(r"0[dD]([0-9a-fA-F]{16})", operand):
            return _cast(f"uint64_t{{0x{found[1]}ull}}", "b64", wanted)
        if re.fullmatch(r"-?(0[xX][0-9a-fA-F]+|\d+)", operand):
            if wanted.startswith("f"):
                raise PtxError(f"{operand} as {wanted}")
            value = int(operand, 0)
            if wanted == "pred":
                return "true" if value else "false"
            return f"static_cast<{TYPES[wanted]}>({value % (1 << int(wanted[1:])):#x}ull)"
        return _cast(_name(operand), self._type_of(operand), wanted)

    def _write(self, register: str, value: str, given: str) -> str:
        """Assign an expression of the type that `given` stands for."""
        if register == "_":
            return f"(void)({value});"
        return f"{_name(register)} = {_cast(value, given, self._type_of(register))};"

    def _address(self, operand: str, space: str, size: int) -> str:
        found = re.fullmatch(r"\[([%\w$]+)(?:\+(-?\d+))?\]", operand)
        if found is None:
            raise PtxError(f"{operand} as an address")
        offset = int(found[2] or 0)
        if space in ("shared", "param"):
            at = f"{self._read(found[1], 'u32')} + static_cast<uint32_t>({offset})"
            if space == "param":
                return f"(parameter + ({at}))"
            return f"SharedAddress({at}, {size}, {self._here})"
        at = f"{self._read(found[1], 'u64')} + static_cast<uint64_t>({offset}ll)"
        return f"{'GlobalAddress' if space == 'global' else 'GenericAddress'}({at}, {size}, {self._here})"

    # ---- instructions ----

    def _instruction(self, opcode: str, operands: list[str]) -> str:
        words = opcode.split(".")
        stem, type_ = ".".join(words[:-1]), words[-1]
        if stem in FUNCTIONS and type_ in ALLOWED[stem]:
            return self._function(stem, type_, operands)
        special = getattr(self, f"_{words[0]}", None)
        if special is None:
            raise PtxError("no such word")
        return special(opcode, words, operands)

    def _function(self, stem: str, type_: str, operands: list[str]) -> str:
        function, kinds, result = FUNCTIONS[stem]
        wide = f"{type_[0]}{2 * int(type_[1:])}" if "w" in kinds + result else ""
        types = {"t": type_, "w": wide, "u": "u32", "p": "pred"}
        if len(operands) != 1 + len(kinds):
            raise PtxError("another number of operands")
        values = [self._read(x, types[kind]) for x, kind in zip(operands[1:], kinds, strict=True)]
        return self._write(operands[0], f"{function}({', '.join(values)})", types[result])

    def _ret(self, opcode: str, words: list[str], operands: list[str]) -> str:
        _only(opcode, ("ret",))
        return "return;"

    def _exit(self, opcode: str, words: list[str], operands: list[str]) -> str:
        _only(opcode, ("exit",))
        return "return;"

    def _bra(self, opcode: str, words: list[str], operands: list[str]) -> str:
        _only(opcode, ("bra", "bra.uni"))
        return f"goto {_name(operands[0])};"

    def _mov(self, opcode: str, words: list[str], operands: list[str]) -> str:
        _only(opcode, tuple(f"mov.{name}" for name in TYPES))
        to, given = operands
        type_ = words[1]
        half = f"b{int(type_[1:]) // 2}" if type_ != "pred" else ""
        if to.startswith("{"):
            low, high = split(to.strip("{}"))
            value = self._read(given, type_)
            parts = [self._write(low, f"static_cast<{TYPES[half]}>({value})", half)]
            parts.append(self._write(high, f"static_cast<{TYPES[half]}>({value} >> {half[1:]})", half))
            return " ".join(parts)
        if given.startswith("{"):
            low, high = (_cast(self._read(x, half), half, type_) for x in split(given.strip("{}")))
            return self._write(to, f"{low} | {high} << {half[1:]}", type_)
        return self._write(to, self._read(given, type_), type_)

    def _cvta(self, opcode: str, words: list[str], operands: list[str]) -> str:
        names = {"cvta.to.global.u64": "", "cvta.global.u64": "", "cvta.shared.u64": "SharedToGeneric"}
        names["cvta.to.shared.u64"] = "GenericToShared"
        return self._write(operands[0], f"{names[opcode]}({self._read(operands[1], 'u64')})", "u64")

    def _cvt(self, opcode: str, words: list[str], operands: list[str]) -> str:
        if opcode in CONVERSIONS:
            text, types, result = CONVERSIONS[opcode]
            values = [self._read(x, type_) for x, type_ in zip(operands[1:], types.split(), strict=True)]
            return self._write(operands[0], text.format(*values), result)
        _, to, given = words
        if to not in (*_INTEGERS, "u8", "s8") or given not in (*_INTEGERS, "u8", "s8"):
            raise PtxError("no such conversion")
        value = self._read(operands[1], given)
        return self._write(operands[0], f"static_cast<{TYPES[to]}>({value})", to)

    def _setp(self, opcode: str, words: list[str], operands: list[str]) -> str:
        _, how, type_ = words
        a, b = (self._read(x, type_) for x in operands[1:])
        if type_ in _FLOATS:
            return (
                f"{{ const {TYPES[type_]} a = {a}, b = {b}; "
                + self._write(operands[0], f"({FLOAT_COMPARISONS[how]})", "pred")
                + " }"
            )
        if type_[0] == "b" and how not in ("eq", "ne"):
            raise PtxError("bits are not ordered")
        return self._write(operands[0], f"({a} {COMPARISONS[how]} {b})", "pred")

    def _memory(self, words: list[str]) -> tuple[str, int, str]:
        """Return space, count and type of a load or store."""
        middle = words[1:-1]
        space = middle.pop(0) if middle and middle[0] in ("param", "shared", "global") else "generic"
        if middle and middle[0] == "nc" and space == "global" and words[0] == "ld":
            middle.pop(0)
        count = int(middle.pop(0)[1:]) if middle and middle[0] in ("v2", "v4") else 1
        if middle:
            raise PtxError(f"no such word: {middle[0]}")
        return space, count, words[-1]

    def _ld(self, opcode: str, words: list[str], operands: list[str]) -> str:
        space, count, type_ = self._memory(words)
        if space == "param" and type_[0] == "f" and self._entry.parameter_bytes <= 16:
            raise PtxError("so small a struct with a float in it is passed in another way: make it larger")
        registers = split(operands[0].strip("{}"))
        address = self._address(operands[1], space, count * int(type_[1:]) // 8)
        writes = [self._write(r, f"v.x[{i}]", type_) for i, r in enumerate(registers)]
        load = f"Load<Vector<{TYPES[type_]}, {count}>>({address}, {self._here})"
        return f"{{ const auto v = {load}; {' '.join(writes)} }}"

    def _st(self, opcode: str, words: list[str], operands: list[str]) -> str:
        space, count, type_ = self._memory(words)
        if space == "param":
            raise PtxError("a parameter is written to")
        values = ", ".join(self._read(x, type_) for x in split(operands[1].strip("{}")))
        address = self._address(operands[0], space, count * int(type_[1:]) // 8)
        return f"Store({address}, Vector<{TYPES[type_]}, {count}>{{{{{values}}}}}, {self._here});"

    def _atom(self, opcode: str, words: list[str], operands: list[str]) -> str:
        return self._write(operands[0], self._atomic(words, operands[1], operands[2], 0), words[-1])

    def _red(self, opcode: str, words: list[str], operands: list[str]) -> str:
        if "v2" not in words and "v4" not in words:
            return self._atomic(words, operands[0], operands[1], 0) + ";"
        count = int(words[-2][1:])
        values = split(operands[1].strip("{}"))
        if words[1] != "global" or words[-1] != "f32" or len(values) != count:
            raise PtxError("no such vector")
        address = self._address(operands[0], "global", 4 * count)
        checks = f"CheckAligned<Vector<float, {count}>>({address}, {self._here}); "
        words = [*words[:-2], words[-1]]
        return checks + " ".join(
            self._atomic(words, operands[0], value, 4 * i) + ";" for i, value in enumerate(values)
        )

    def _atomic(self, words: list[str], address: str, value: str, offset: int) -> str:
        _, space, *orders, op, type_ = words
        if any(order not in ("relaxed", "gpu", "cta") for order in orders) or type_[1:] not in ("32", "64"):
            raise PtxError("no such order of memory")
        pointer = f"{self._address(address, space, int(type_[1:]) // 8)} + {offset}"
        combine = f"[]({TYPES[type_]} old, {TYPES[type_]} x) {{ (void)old; return {ATOMICS[op]}; }}"
        return f"Atomic<{TYPES[type_]}>({pointer}, {self._read(value, type_)}, {combine}, {self._here})"

    def _bar(self, opcode: str, words: list[str], operands: list[str]) -> str:
        if opcode == "bar.warp.sync":
            mask = self._read(operands[0], "u32")
            return f"Collective(Op::kSyncWarp, {mask}, nullptr, {self._here});"
        _only(opcode, ("bar.sync",))
        if operands != ["0"]:
            raise PtxError("a barrier of a part of the block")
        return f"Barrier({self._here});"

    def _shfl(self, opcode: str, words: list[str], operands: list[str]) -> str:
        _only(opcode, tuple(f"shfl.sync.{how}.b32" for how in DIRECTIONS))
        register, _, predicate = operands[0].partition("|")
        values = ", ".join(self._read(x, "u32") for x in operands[1:])
        call = f"ShuffleLanes(Direction::{DIRECTIONS[words[2]]}, {values}, {self._here})"
        writes = [self._write(register, "s.value", "b32")]
        if predicate:
            writes.append(self._write(predicate, "s.inside", "pred"))
        return f"{{ const Shuffled s = {call}; {' '.join(writes)} }}"

    def _vote(self, opcode: str, words: list[str], operands: list[str]) -> str:
        _only(opcode, ("vote.sync.ballot.b32", "vote.sync.any.pred"))
        predicate, mask = self._read(operands[1], "pred"), self._read(operands[2], "u32")
        call = f"Vote({predicate}, {mask}, {self._here})"
        if words[2] == "any":
            return self._write(operands[0], f"({call} != 0)", "pred")
        return self._write(operands[0], call, "b32")

    def _redux(self, opcode: str, words: list[str], operands: list[str]) -> str:
        _only(opcode, ("redux.sync.add.u32", "redux.sync.add.s32"))
        value, mask = (self._read(x, "u32") for x in operands[1:])
        return self._write(operands[0], f"Sum({value}, {mask}, {self._here})", "u32")

    def _ldmatrix(self, opcode: str, words: list[str], operands: list[str]) -> str:
        plain, transposed = (f"ldmatrix.sync.aligned.m8n8.x4{x}.shared.b16" for x in ("", ".trans"))
        _only(opcode, (plain, transposed))
        registers = split(operands[0].strip("{}"))
        found = re.fullmatch(r"\[([%\w$]+)(?:\+(-?\d+))?\]", operands[1])
        if found is None or len(registers) != 4:
            raise PtxError("other operands")
        at = f"{self._read(found[1], 'u32')} + static_cast<uint32_t>({found[2] or 0})"
        flag = "true" if opcode == transposed else "false"
        writes = [self._write(x, f"m[{i}]", "b32") for i, x in enumerate(registers)]
        return f"{{ uint32_t m[4]; LoadMatrices(m, {at}, {flag}, {self._here}); {' '.join(writes)} }}"

    def _mma(self, opcode: str, words: list[str], operands: list[str]) -> str:
        result, a, b, sums = (split(x.strip("{}")) for x in operands)
        if [len(x) for x in (result, a, b, sums)] != [4, 4, 2, 4]:
            raise PtxError("another number of registers")
        left, right = (", ".join(self._read(x, "b32") for x in registers) for registers in (a, b))
        before = ", ".join(self._read(x, "f32") for x in sums)
        writes = [self._write(x, f"c[{i}]", "f32") for i, x in enumerate(result)]
        call = f"MultiplyMatrices(Op::{PRODUCTS[opcode]}, c, a, b, {self._here});"
        arrays = f"const uint32_t a[] = {{{left}}}, b[] = {{{right}}}; float c[] = {{{before}}};"
        return f"{{ {arrays} {call} {' '.join(writes)} }}"

    def _cp(self, opcode: str, words: list[str], operands: list[str]) -> str:
        if opcode == "cp.async.commit_group":
            return "CommitCopies();"
        if opcode == "cp.async.wait_all":
            return "CommitCopies(); WaitForCopies(0);"
        if opcode == "cp.async.wait_group":
            return f"WaitForCopies({int(operands[0])});"
        _only(opcode, ("cp.async.cg.shared.global",))
        target, source = (re.fullmatch(r"\[([%\w$]+)(?:\+(-?\d+))?\]", x) for x in operands[:2])
        if target is None or source is None:
            raise PtxError("other operands")
        to = f"{self._read(target[1], 'u32')} + static_cast<uint32_t>({target[2] or 0})"
        given = f"{self._read(source[1], 'u64')} + static_cast<uint64_t>({source[2] or 0}ll)"
        count = self._read(operands[3] if len(operands) > 3 else operands[2], "s32")
        return f"CopyAsync({to}, {given}, {int(operands[2])}, {count}, {self._here});"


def _only(opcode: str, known: tuple[str, ...]) -> None:
    if opcode not in known:
        raise PtxError("not in this form")


def _name(register: str) -> str:
    return register.lstrip("%").replace("$", "_") + "_"


def _poison(type_: str) -> str:
    if type_ == "pred":
        return "true"
    if type_[0] == "f":
        return f"std::numeric_limits<{TYPES[type_]}>::quiet_NaN()"
    return f"static_cast<{TYPES[type_]}>(~0ull)"


def _cast(value: str, given: str, wanted: str) -> str:
    """Make a value of one type one of another, as a register of that type would hold it."""
    if TYPES[given] == TYPES[wanted]:
        return value
    if "pred" in (given, wanted):
        raise PtxError(f"{given} as {wanted}")
    if "f" in (given[0], wanted[0]):
        if given[1:] != wanted[1:]:
            raise PtxError(f"{given} as {wanted}")
        return f"Bits<{TYPES[wanted]}>({value})"
    return f"static_cast<{TYPES[wanted]}>({value})"
