"""Instructions without effects, as Python expressions on lane arrays; `RULES[family](operands)` gives their texts.

Not modelled: `ftz` (denormals stay), and the approximate functions' last bits (ex2, lg2, rcp, rsqrt are exact here).
"""

from __future__ import annotations

import re

import numpy as np

from .program import VIEWS, Instruction, Program

IGNORED = {
    "lo", "ftz", "rn", "rni", "rzi", "rmi", "rpi", "approx", "full", "sync", "sat", "to", "param", "global", "shared",
    "wrap", "clamp", "l", "r", "wide", "hi", "shiftamt", "and", "or", "xor", "x2",
}  # fmt: skip
PAIRS = ("bf16x2", "f16x2")


class Operands:
    """Texts of an instruction's operands; their place in the list counts the destination as 0."""

    def __init__(self, program: Program, instruction: Instruction):
        self.program, self.instruction = program, instruction
        self.name, self.type = instruction.name, instruction.type

    def __len__(self):
        return len(self.instruction.operands)

    def has(self, modifier: str) -> bool:
        return modifier in self.name

    def text(self, place: int, type_: str | None = None) -> str:
        """The operand read as a type."""
        return self.read(self.instruction.operands[place], type_ or self.type)

    def read(self, operand: str, type_: str) -> str:
        if type_ == "pred" and operand.startswith("!"):
            return f"(~{self.read(operand[1:], type_)})"
        index = self.program.operand(operand, type_, self.instruction.scope)
        have, want = np.dtype(self.program.types[index]), np.dtype(VIEWS[type_])
        if have == want:
            return f"R[{index}]"
        if have.itemsize == want.itemsize:
            return f"R[{index}].view({want})"
        unsigned = np.dtype(f"u{want.itemsize}")  # a wider or narrower register: its low bits, zeros above
        return f"R[{index}].astype({unsigned}).view({want})"


def listed(operand: str) -> list[str]:
    """The registers of a `{…}` operand."""
    return [each.strip() for each in operand.strip("{}").split(",")]


def _packed(o, rule):
    """A rule on the halves of 16-bit operands, rounded once."""
    sources = ", ".join(f"halves({o.text(i)}, '{o.type}')" for i in range(1, len(o)))
    names = ", ".join("abc"[: len(o) - 1])
    return f"join([{rule} for {names} in zip({sources})], '{o.type}')"


def _arithmetic(symbol):
    def rule(o):
        if "f16" in o.type:
            return _packed(o, f"a {symbol} b")
        return f"{o.text(1)} {symbol} {o.text(2)}"

    return rule


def _mul(o):
    if o.has("wide") or o.has("hi"):
        width = int(o.type[1:])
        if width == 64:
            return f"high_product({o.text(1)}, {o.text(2)})"
        wide = f"{'int' if o.type[0] == 's' else 'uint'}{2 * width}"
        product = f"({o.text(1)}.astype({wide}) * {o.text(2)}.astype({wide}))"
        return product if o.has("wide") else f"({product} >> {width}).astype(uint{width})"
    return _arithmetic("*")(o)


def _mad(o):
    wide = f"{o.type[0]}{2 * int(o.type[1:])}" if o.has("wide") else o.type
    return f"({_mul(o)}).view({np.dtype(VIEWS[wide])}) + {o.text(3, wide)}"


def _fma(o):
    if "f16" in o.type:
        return _packed(o, "a * b + c")
    a, b, c = (f"{o.text(i)}.astype(float64)" for i in (1, 2, 3))
    return f"({a} * {b} + {c}).astype({np.dtype(VIEWS[o.type])})"


def _div(o):
    return f"{'divide' if o.type[0] != 'f' else 'true_divide'}({o.text(1)}, {o.text(2)})"


def _minmax(name):
    def rule(o):
        if "f16" in o.type:
            return _packed(o, f"f{name}(a, b)")
        return f"{'f' + name if o.type[0] == 'f' else name + 'imum'}({o.text(1)}, {o.text(2)})"

    return rule


def _shift(name):
    def rule(o):
        return f"{name}({o.text(1)}, {o.text(2, 'u32')})"

    return rule


def _lop3(o):
    table = int(o.instruction.operands[4], 0)
    a, b, c = (o.text(i, "b32") for i in (1, 2, 3))
    terms = []
    for i in range(8):
        if table >> i & 1:
            signs = ["" if i & bit else "~" for bit in (4, 2, 1)]
            terms.append("(" + " & ".join(sign + x for sign, x in zip(signs, (a, b, c))) + ")")
    return " | ".join(terms) or f"zeros_like({a})"


def _shf(o):
    wide = f"((({o.text(2, 'b32')}).astype(uint64) << uint64(32)) | {o.text(1, 'b32')})"
    count = f"({o.text(3, 'u32')} & 31).astype(uint64)"
    return (
        f"(({wide} << {count}) >> uint64(32)).astype(uint32)" if o.has("l") else f"({wide} >> {count}).astype(uint32)"
    )


def _setp(o):
    compare, type_ = o.name[1], o.type
    a, b = o.text(1), o.text(2)
    unordered = len(compare) == 3 and compare.endswith("u")
    base = compare[:2] if unordered else {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}.get(compare, compare)
    if base in ("num", "nan"):
        found = f"(isnan({a}) | isnan({b}))"
        found = f"(~{found})" if base == "num" else found
    else:
        symbol = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}[base]
        found = f"({a} {symbol} {b})"
        if unordered:
            found = f"({found} | isnan({a}) | isnan({b}))"
        elif type_[0] == "f" and base == "ne":
            found = f"({found} & ~isnan({a}) & ~isnan({b}))"
    for combine, symbol in (("and", "&"), ("or", "|"), ("xor", "^")):
        if o.has(combine):
            found = f"{found} {symbol} {o.text(3, 'pred')}"
    return found


def _cvt(o):
    to, source = o.name[-2:]
    if to in PAIRS:
        return f"join([{o.text(2, 'f32')}, {o.text(1, 'f32')}], '{to}')"
    if to == "bf16" or (to == "f16" and source == "f32"):
        return f"narrow({o.text(1, source)}, '{to}')"
    if source == "bf16":
        return f"widen({o.text(1, 'bf16')}, 'bf16')"
    x = o.text(1, source)
    if to[0] in "su" and source[0] == "f":
        rounding = {"rni": "rint", "rzi": "trunc", "rmi": "floor", "rpi": "ceil"}
        x = next(f"{function}({x})" for name, function in rounding.items() if o.has(name))
    return f"{x}.astype({np.dtype(VIEWS[to])})"


def _mov(o):
    source = o.instruction.operands[1]
    if not source.startswith("{"):
        return o.text(1)
    parts = listed(source)
    width = int(o.type[1:]) // len(parts)
    terms = (f"({o.read(x, f'b{width}')}.astype(uint{o.type[1:]}) << uint{o.type[1:]}({width * i}))"
             for i, x in enumerate(parts))  # fmt: skip
    return " | ".join(terms)


RULES = {
    "add": _arithmetic("+"),
    "sub": _arithmetic("-"),
    "mul": _mul,
    "mad": _mad,
    "fma": _fma,
    "div": _div,
    "rem": lambda o: f"remainder({o.text(1)}, {o.text(2)})",
    "min": _minmax("min"),
    "max": _minmax("max"),
    "neg": lambda o: _packed(o, "-a") if "f16" in o.type else f"-{o.text(1)}",
    "abs": lambda o: f"abs({o.text(1)})",
    "and": _arithmetic("&"),
    "or": _arithmetic("|"),
    "xor": _arithmetic("^"),
    "not": lambda o: f"~{o.text(1)}",
    "lop3": _lop3,
    "shl": _shift("shift_left"),
    "shr": _shift("shift_right"),
    "shf": _shf,
    "bfi": lambda o: f"insert_bits({', '.join(o.text(i, 'b32') for i in (1, 2, 3, 4))})",
    "bfe": lambda o: f"extract_bits({', '.join(o.text(i, 'b32') for i in (1, 2, 3))})",
    "prmt": lambda o: f"permute_bytes({', '.join(o.text(i, 'b32') for i in (1, 2, 3))})",
    "popc": lambda o: f"popcount({o.text(1)})",
    "brev": lambda o: f"reverse_bits({o.text(1)})",
    "clz": lambda o: f"uint32(32) - bit_length({o.text(1)})",
    "bfind": lambda o: f"find_bit({o.text(1)}, {o.has('shiftamt')})",
    "ex2": lambda o: f"exp2({o.text(1)}.astype(float64)).astype(float32)",
    "lg2": lambda o: f"log2({o.text(1)}.astype(float64)).astype(float32)",
    "rcp": lambda o: f"float32(1) / {o.text(1)}",
    "sqrt": lambda o: f"sqrt({o.text(1)})",
    "rsqrt": lambda o: f"(1 / sqrt({o.text(1)}.astype(float64))).astype(float32)",
    "selp": lambda o: f"where({o.text(3, 'pred')}, {o.text(1)}, {o.text(2)})",
    "setp": _setp,
    "cvt": _cvt,
    "mov": _mov,
    "cvta": lambda o: o.text(1),
}


def result_type(instruction: Instruction) -> str:
    """The type that an instruction's result has, where it is not that of its operands."""
    family, name = instruction.name[0], instruction.name
    if family == "setp":
        return "pred"
    if family == "cvt":
        return name[-2]
    if "wide" in name:
        return f"{name[-1][0]}{2 * int(name[-1][1:])}"
    return {"popc": "u32", "clz": "u32", "bfind": "u32"}.get(family, name[-1])


def assignments(program: Program, instruction: Instruction) -> list[tuple[int, str]]:
    """Returns [(register, expression)] of an instruction without effects. The first one may be read by the others.

    Raises:
        NotImplementedError: an unknown instruction, modifier or operand, with its text.
    """
    o, family = Operands(program, instruction), instruction.name[0]
    known = VIEWS.keys() | IGNORED
    compares = re.compile(r"(lt|le|gt|ge|eq|ne)u?|lo|ls|hi|hs|num|nan")
    unknown = [m for m in instruction.name[1:] if m not in known and not (family == "setp" and compares.fullmatch(m))]
    if family not in RULES or unknown:
        raise NotImplementedError(instruction.text)
    target = instruction.operands[0]
    if family == "mov" and target.startswith("{"):
        parts = listed(target)
        width = int(o.type[1:]) // len(parts)
        whole = o.text(1)
        return [
            (program.operand(part, f"b{width}", instruction.scope), f"({whole} >> {width * i}).astype(uint{width})")
            for i, part in enumerate(parts)
            if part != "_"
        ]
    names = target.split("|")
    expression, type_ = RULES[family](o), result_type(instruction)
    first = program.register(names[0], instruction.scope)
    if first is None:
        raise NotImplementedError(instruction.text)
    found = [(first, stored(expression, type_, program.types[first]))]
    if len(names) > 1:
        found.append((program.register(names[1], instruction.scope), f"~R[{first}]"))
    return found


def stored(expression: str, type_: str, dtype) -> str:
    """The expression of a type as a register of a dtype keeps it."""
    have, want = np.dtype(VIEWS[type_]), np.dtype(dtype)
    if have == want:
        return expression
    if have.itemsize != want.itemsize:  # sign-extended where the type has a sign
        wide = np.dtype(f"{have.kind if have.kind in 'iu' else 'u'}{want.itemsize}")
        expression = f"({expression}).astype({wide})"
        return expression if wide == want else f"{expression}.view({want})"
    return f"({expression}).view({want})"


# --- what the texts call


def widen(x, type_):
    """16-bit patterns → float32."""
    if type_.startswith("bf16"):
        return (x.astype(np.uint32) << 16).view(np.float32)
    return x.view(np.float16).astype(np.float32)


def narrow(x, type_):
    """float32 → 16-bit patterns, to nearest even."""
    if type_.startswith("f16"):
        return x.astype(np.float16).view(np.uint16)
    bits = np.ascontiguousarray(x).view(np.uint32)
    rounded = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FFF), rounded)


def halves(x, type_):
    """The low and high half of packed operands (or the one of 16 bits), as float32."""
    if x.dtype.itemsize == 2:
        return [widen(x.view(np.uint16), type_)]
    return [widen(x.astype(np.uint16), type_), widen((x >> 16).astype(np.uint16), type_)]


def join(parts, type_):
    """The inverse of `halves`."""
    bits = [narrow(part, type_) for part in parts]
    if not type_.endswith("x2"):
        return bits[0].view(VIEWS[type_])
    return bits[0].astype(np.uint32) | (bits[1].astype(np.uint32) << 16)


def divide(a, b):
    """Integers, towards zero; anything where b is 0."""
    b = np.where(b == 0, b.dtype.type(1), b)
    return ((a - np.fmod(a, b)) // b).astype(a.dtype)


def remainder(a, b):
    return np.fmod(a, np.where(b == 0, b.dtype.type(1), b))


def shift_left(a, count):
    bits = 8 * a.dtype.itemsize
    shifted = a << np.minimum(count, bits - 1).astype(a.dtype)
    return np.where(count < bits, shifted, a.dtype.type(0))


def shift_right(a, count):
    bits = 8 * a.dtype.itemsize
    shifted = a >> np.minimum(count, bits - 1).astype(a.dtype)
    return shifted if a.dtype.kind == "i" else np.where(count < bits, shifted, a.dtype.type(0))


def high_product(a, b):
    """Upper half of 64-bit products."""
    return np.array([(int(x) * int(y)) >> 64 & (1 << 64) - 1 for x, y in zip(a, b)], np.uint64).view(a.dtype)


def insert_bits(a, b, place, length):
    a, b, place, length = (x.astype(np.uint64) for x in (a, b, place, length))
    mask = ((np.uint64(1) << length) - np.uint64(1)) << place
    return (((a << place) & mask) | (b & ~mask)).astype(np.uint32)


def extract_bits(a, place, length):
    a, place, length = (x.astype(np.uint64) for x in (a, place, length))
    return ((a >> place) & ((np.uint64(1) << length) - np.uint64(1))).astype(np.uint32)


def permute_bytes(a, b, selector):
    all_bytes = np.stack([(x >> (8 * i)) & 255 for x in (a, b) for i in range(4)])
    lanes = np.arange(a.size)
    picked = (all_bytes[(selector >> (4 * i)) & 7, lanes] << (8 * i) for i in range(4))
    return np.bitwise_or.reduce(list(picked)).astype(np.uint32)


def bit_length(a):
    return np.array([int(x).bit_length() for x in a.view(np.uint32)], np.uint32)


def find_bit(a, shift_amount):
    """Place of the highest set bit, or how far it is from the top; all ones where there is none."""
    length = bit_length(a)
    return np.where(length == 0, np.uint32(0xFFFFFFFF), 32 - length if shift_amount else length - 1).astype(np.uint32)


def popcount(a):
    return np.array([int(x).bit_count() for x in a], np.uint32)


def reverse_bits(a):
    return np.array([int(f"{int(x):032b}"[::-1], 2) for x in a], np.uint32)


NUMPY = (
    "where", "isnan", "fmin", "fmax", "minimum", "maximum", "abs", "exp2", "log2", "sqrt", "rint", "trunc", "floor",
    "ceil", "true_divide", "zeros_like", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
    "float16", "float32", "float64", "bool",
)  # fmt: skip
NAMESPACE = {name: getattr(np, name) for name in NUMPY} | {
    f.__name__: f
    for f in (
        widen, narrow, halves, join, divide, remainder, shift_left, shift_right, high_product, insert_bits,
        extract_bits, permute_bytes, bit_length, find_bit, popcount, reverse_bits,
    )
}  # fmt: skip
