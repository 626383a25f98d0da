"""PTX text → a `Program`: parameters, shared symbols, registers and instructions, names resolved in their scopes."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import numpy as np

LANES = 32
# Where the generic address of the first kernel parameter lies; shared memory starts at 0, the rest is the host's own.
PARAM = 1 << 60
STORAGE = {
    "pred": np.bool_, "b8": np.uint8, "b16": np.uint16, "b32": np.uint32, "b64": np.uint64,
    "u8": np.uint8, "u16": np.uint16, "u32": np.uint32, "u64": np.uint64,
    "s8": np.uint8, "s16": np.uint16, "s32": np.uint32, "s64": np.uint64, "f32": np.float32, "f64": np.float64,
}  # fmt: skip
VIEWS = {**STORAGE, "s8": np.int8, "s16": np.int16, "s32": np.int32, "s64": np.int64, "f16": np.float16,
         "f16x2": np.uint32, "bf16": np.uint16, "bf16x2": np.uint32}  # fmt: skip
SPECIALS = {"%tid.x", "%tid.y", "%tid.z", "%laneid", "%ctaid.x", "%ntid.x", "%cluster_ctarank"}


@dataclass
class Instruction:
    """One statement: `guard` is a predicate's register index, inverted where `negated`."""

    text: str
    name: list[str]
    operands: list[str]
    scope: tuple[int, ...]
    guard: int | None = None
    negated: bool = False

    @property
    def type(self) -> str:
        return self.name[-1]


@dataclass
class Parameter:
    """Of the kernel: offset in the parameter space and size in bytes."""

    name: str
    offset: int
    size: int


@dataclass
class Program:
    """A kernel. Registers, constants and special registers are indices into a warp's list of lane arrays."""

    parameters: list[Parameter] = field(default_factory=list)
    shared: dict[str, int] = field(default_factory=dict)  # symbol → address
    dynamic_at: int = 0  # where dynamic shared memory starts
    code: list[Instruction] = field(default_factory=list)
    labels: dict[tuple[int, str], int] = field(default_factory=dict)  # (scope, label) → place in code
    types: list[type] = field(default_factory=list)  # of registers
    initial: dict[int, np.ndarray] = field(default_factory=dict)  # constants
    specials: dict[str, int] = field(default_factory=dict)
    _names: dict[tuple[int, str], int] = field(default_factory=dict)
    _families: dict[tuple[int, str], type] = field(default_factory=dict)  # `%r<9>`: prefix → type

    def new_register(self, dtype) -> int:
        self.types.append(dtype)
        return len(self.types) - 1

    def constant(self, value, dtype) -> int:
        """A register that holds `value` in all lanes."""
        index = self.new_register(dtype)
        self.initial[index] = np.full(LANES, value, dtype)
        return index

    def register(self, name: str, scope) -> int | None:
        """Index of a declared or special register, None where `name` is none."""
        for level in reversed(scope):
            found = self._names.get((level, name))
            if found is not None:
                return found
            family = self._families.get((level, name.rstrip("0123456789")))
            if family is not None:
                return self._names.setdefault((level, name), self.new_register(family))
        if name in SPECIALS:
            if name not in self.specials:
                self.specials[name] = self.new_register(np.uint32)
            return self.specials[name]
        return None

    def operand(self, text: str, type_: str, scope) -> int:
        """Register index of an operand: a register, a number or a symbol's address."""
        index = self.register(text, scope)
        if index is not None:
            return index
        dtype = STORAGE.get(type_, VIEWS[type_])
        if re.fullmatch(r"0[fF][0-9a-fA-F]{8}", text):
            return self.constant(np.uint32(int(text[2:], 16)).view(np.float32), np.float32)
        if re.fullmatch(r"-?(0[xX][0-9a-fA-F]+|\d+)U?", text):
            value = int(text.rstrip("U"), 0)
            if dtype is np.bool_:
                return self.constant(bool(value), dtype)
            size = np.dtype(dtype).itemsize
            unsigned = np.dtype(f"u{size}")
            return self.constant(np.array(value & ((1 << 8 * size) - 1), unsigned).view(dtype), dtype)
        if text in self.shared:
            return self.constant(self.shared[text], np.uint64 if type_[1:] == "64" else np.uint32)
        for parameter in self.parameters:
            if parameter.name == text:
                return self.constant(PARAM + parameter.offset, np.uint64)
        raise NotImplementedError(f"operand {text!r}")

    def target(self, label: str, scope) -> int:
        return next(self.labels[level, label] for level in reversed(scope) if (level, label) in self.labels)

    @property
    def parameter_bytes(self) -> int:
        return self.parameters[-1].offset + self.parameters[-1].size if self.parameters else 0


def split_operands(text: str) -> list[str]:
    """Splits at commas that stand in no brackets."""
    found, depth = [""], 0
    for char in text:
        depth += (char in "{[") - (char in "}]")
        if char == "," and depth == 0:
            found.append("")
        else:
            found[-1] += char
    return [each.strip() for each in found]


def parse(text: str) -> Program:
    """Parses a module with one kernel, as `nvcc -ptx` writes it."""
    text = re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL)
    text = re.sub(r"\s+\.L2::", ".L2::", text)
    entry = text[text.index(".entry") :]
    program = Program()
    _parse_parameters(program, entry[: entry.index(")")])
    _parse_shared(program, text)
    _parse_body(program, entry[entry.index("{") + 1 :])
    return program


def _parse_parameters(program: Program, head: str) -> None:
    offset = 0
    for align, type_, name, count in re.findall(
        r"\.param\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+(\w+)(?:\[(\d+)\])?", head
    ):
        size = np.dtype(STORAGE[type_]).itemsize
        step = int(align) if align else size
        offset = -(-offset // step) * step
        program.parameters.append(Parameter(name, offset, size * int(count or 1)))
        offset += program.parameters[-1].size


def _parse_shared(program: Program, text: str) -> None:
    at, dynamic = 0, None
    for extern, align, type_, name, count in re.findall(
        r"(\.extern\s+)?\.shared\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+([\w$]+)(?:\[(\d*)\])?", text
    ):
        if extern:
            dynamic = name
            continue
        if name in program.shared or type_ not in STORAGE:
            continue
        size, step = np.dtype(STORAGE[type_]).itemsize, int(align or 4)
        at = -(-at // step) * step
        program.shared[name] = at
        at += size * int(count or 1)
    program.dynamic_at = -(-at // 1024) * 1024
    if dynamic is not None:
        program.shared[dynamic] = program.dynamic_at


def _declare(program: Program, scope: int, text: str) -> None:
    declared = re.match(r"\.reg\s+\.(\w+)\s+(.*)", text, flags=re.DOTALL)
    if declared is None:
        return  # .pragma, .loc: nothing to run
    dtype = STORAGE[declared[1]]
    for name in re.split(r"\s*,\s*", declared[2].strip()):
        family = re.fullmatch(r"([%\w$]+)<\d+>", name)
        if family:
            program._families[scope, family[1]] = dtype
        else:
            program._names[scope, name] = program.new_register(dtype)


def _parse_body(program: Program, body: str) -> None:
    scopes, count = [0], 0
    for statement in body.split(";"):
        rest = statement.strip()
        while rest:
            label = re.match(r"([$\w]+):(?!:)", rest)
            if rest[0] == "{":
                count += 1
                scopes.append(count)
                rest = rest[1:].strip()
            elif rest[0] == "}":
                if len(scopes) == 1:
                    return  # the kernel's end
                scopes.pop()
                rest = rest[1:].strip()
            elif label:
                program.labels[scopes[-1], label[1]] = len(program.code)
                rest = rest[label.end() :].strip()
            else:
                break
        if rest.startswith("."):
            _declare(program, scopes[-1], rest)
        elif rest:
            found = re.match(r"(?:@(!?)([%\w]+)\s+)?([\w.:]+)\s*(.*)$", rest, flags=re.DOTALL)
            if found is None:
                raise NotImplementedError(rest)
            operands = split_operands(found[4]) if found[4] else []
            guard = program.register(found[2], scopes) if found[2] else None
            instruction = Instruction(" ".join(rest.split()), found[3].split("."), operands, tuple(scopes), guard)
            instruction.negated = bool(found[1])
            program.code.append(instruction)
