"""Instructions that touch memory, barriers or other lanes: `EFFECTS[family](context, instruction)` → run(warp, active).

Asynchronous ones (TMA, cp.async, wgmma) happen at once; what only orders them does nothing. `active`: a mask of lanes,
None for all 32. None instead of a function: nothing to do.
"""

from __future__ import annotations

import re
from functools import cache

import numpy as np

from .expressions import Operands, listed, widen
from .program import LANES

LANE = np.arange(LANES)
# Accumulators of a warp's 16 rows: register i of a lane holds [ROW[i % 4], 8 (i // 4) + COLUMN[i % 4]].
ROW = np.stack([LANE // 4, LANE // 4, LANE // 4 + 8, LANE // 4 + 8])
COLUMN = np.stack([LANE % 4 * 2, LANE % 4 * 2 + 1] * 2)


class Context:
    """What the instructions of a machine are decoded with."""

    def __init__(self, machine):
        self.machine, self.program = machine, machine.program

    def reader(self, instruction, operand: str, type_: str):
        """Returns a function warp → the operand's lanes as a type."""
        text = Operands(self.program, instruction).read(operand, type_)
        return eval(f"lambda w: w.{text}", dict(_DTYPES))

    def writer(self, instruction, operand: str):
        """Returns a function (warp, value, active) that writes lanes to a register of the value's size or wider."""
        if operand == "_":
            return lambda warp, value, active: None
        index = self.program.register(operand, instruction.scope)
        if index is None:
            raise NotImplementedError(instruction.text)
        dtype = np.dtype(self.program.types[index])

        def write(warp, value, active):
            if value.dtype != dtype:
                if value.dtype.itemsize != dtype.itemsize:
                    value = value.astype(f"{value.dtype.kind}{dtype.itemsize}")
                value = value.view(dtype)
            warp.R[index] = value if active is None else np.where(active, value, warp.R[index])

        return write

    def address(self, instruction, operand: str):
        """Returns a function warp → the lanes' addresses of `[base + offset]`, int64."""
        found = re.fullmatch(r"\[\s*([%\w$]+)\s*(?:\+\s*(-?\w+)\s*)?\]", operand)
        if found is None:
            raise NotImplementedError(instruction.text)
        index = self.program.operand(found[1], "u64", instruction.scope)
        offset = int(found[2] or "0", 0)
        return lambda warp: warp.R[index].astype(np.int64) + offset


_DTYPES = {str(np.dtype(t)): t for t in (np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32,
                                         np.uint64, np.float16, np.float32, np.float64, np.bool_)}  # fmt: skip


def _nothing(context, instruction):
    return None


def _lanes(active):
    return LANE if active is None else np.flatnonzero(active)


def _whole(active, what):
    if active is not None:
        raise RuntimeError(f"{what} by a part of a warp")


# --- loads and stores


def _sizes(instruction):
    vector = next((int(x[1:]) for x in instruction.name if re.fullmatch(r"v[248]", x)), 1)
    return int(instruction.type.lstrip("sufb")) // 8, vector


def load(context, instruction):
    size, vector = _sizes(instruction)
    address = context.address(instruction, instruction.operands[1])
    writers = [context.writer(instruction, x) for x in listed(instruction.operands[0])]
    signed = np.dtype(f"i{size}") if instruction.type[0] == "s" else None

    def run(warp, active):
        memory, addresses = context.machine.memory, address(warp)
        for lanes in memory.by_tensor(addresses, size * vector, active):
            words, index = memory.access(addresses, size, vector, lanes)
            for write, value in zip(writers, words[index]):
                write(warp, value if signed is None else value.view(signed), lanes)

    return run


def store(context, instruction):
    size, vector = _sizes(instruction)
    address = context.address(instruction, instruction.operands[0])
    readers = [context.reader(instruction, x, f"b{8 * size}") for x in listed(instruction.operands[1])]

    def run(warp, active):
        words, index = context.machine.memory.access(address(warp), size, vector, active)
        for place, read in zip(index, readers):
            if active is None:
                words[place] = read(warp)
            else:
                words[place[active]] = read(warp)[active]

    return run


def load_matrices(context, instruction):
    address = context.address(instruction, instruction.operands[1])
    writers = [context.writer(instruction, x) for x in listed(instruction.operands[0])]
    transposed = "trans" in instruction.name

    def run(warp, active):
        _whole(active, "ldmatrix")
        words, index = context.machine.memory.access(address(warp), 2, 8, None)
        values = words[index]  # [8 columns, 32 rows of four matrices]
        for i, write in enumerate(writers):
            matrix = values[:, 8 * i : 8 * i + 8]
            matrix = matrix if transposed else matrix.T
            low, high = (matrix[LANE // 4, LANE % 4 * 2 + p].astype(np.uint32) for p in (0, 1))
            write(warp, low | (high << 16), None)

    return run


def store_matrices(context, instruction):
    address = context.address(instruction, instruction.operands[0])
    readers = [context.reader(instruction, x, "b32") for x in listed(instruction.operands[1])]
    transposed = "trans" in instruction.name

    def run(warp, active):
        _whole(active, "stmatrix")
        words, index = context.machine.memory.access(address(warp), 2, 8, None)
        for i, read in enumerate(readers):
            value, matrix = read(warp), np.empty((8, 8), np.uint16)
            matrix[LANE // 4, LANE % 4 * 2] = value & 0xFFFF
            matrix[LANE // 4, LANE % 4 * 2 + 1] = value >> 16
            words[index[:, 8 * i : 8 * i + 8]] = matrix if transposed else matrix.T

    return run


# --- asynchronous copies


def copy(context, instruction):
    name = instruction.name
    if "tensor" in name and "prefetch" not in name:
        return _tensor_copy(context, instruction)
    if "commit_group" in name or "wait_group" in name or "wait_all" in name or "prefetch" in name:
        return None
    if name[1] == "async" and name[2] in ("ca", "cg") and len(instruction.operands) == 3:
        return _async_copy(context, instruction)
    raise NotImplementedError(instruction.text)


def _async_copy(context, instruction):
    target, source = (context.address(instruction, x) for x in instruction.operands[:2])
    size = int(instruction.operands[2], 0)

    def run(warp, active):
        memory = context.machine.memory
        addresses = source(warp)
        for group in memory.by_tensor(addresses, size, active):
            words, index = memory.access(addresses, 4, size // 4, group)
            into, place = memory.access(target(warp), 4, size // 4, group)
            lanes = _lanes(group)
            into[place[:, lanes]] = words[index[:, lanes]]

    return run


def _tensor_copy(context, instruction):
    loads = instruction.name[instruction.name.index("tensor") + 2].startswith("shared")
    tensor = instruction.operands[1 if loads else 0]
    found = re.fullmatch(r"\[\s*([%\w$]+)\s*,\s*\{(.*)\}\s*\]", tensor, flags=re.DOTALL)
    if found is None or "multicast" in instruction.text or "im2col" in instruction.text:
        raise NotImplementedError(instruction.text)
    descriptor = context.reader(instruction, found[1], "b64")
    coordinates = [context.reader(instruction, x, "s32") for x in listed(found[2])]
    shared = context.address(instruction, instruction.operands[0 if loads else 1])
    barrier = context.address(instruction, instruction.operands[2]) if loads else None

    def run(warp, active):
        machine = context.machine
        all_shared, maps, at = shared(warp), descriptor(warp), [read(warp) for read in coordinates]
        barriers = barrier(warp) if loads else None
        for lane in _lanes(active):
            tensor_map = machine.tensor_maps[int(maps[lane])]
            index, inside = tensor_map.places([int(x[lane]) for x in at])
            place = tensor_map.shared_places(int(all_shared[lane]))
            outer, inner = (
                tensor_map.region.words[tensor_map.itemsize],
                machine.memory.shared.words[tensor_map.itemsize],
            )
            if loads:
                inner[place] = np.where(inside, outer[index], 0)
                barrier_ = machine.cta.barriers[int(barriers[lane])]
                barrier_.bytes -= tensor_map.nbytes
                barrier_.settle()
            else:
                outer[index[inside]] = inner[place[inside]]

    return run


# --- barriers


def memory_barrier(context, instruction):
    """mbarrier.*"""
    what = instruction.name[1]
    place = next(x for x in instruction.operands if x.startswith("["))
    address = context.address(instruction, place)
    rest = [x for x in instruction.operands if not x.startswith("[")]
    if what in ("init", "expect_tx") or "expect_tx" in instruction.name:
        number = context.reader(instruction, instruction.operands[-1], "u32")
    from .machine import Barrier

    def init(warp, active):
        at, count = address(warp), number(warp)
        for lane in _lanes(active):
            context.machine.cta.barriers[int(at[lane])] = Barrier(int(count[lane]))

    def expect(warp, active):
        at, count = address(warp), number(warp)
        for lane in _lanes(active):
            context.machine.cta.barriers[int(at[lane])].bytes += int(count[lane])

    def arrive(warp, active):
        at = address(warp)
        for lane in _lanes(active):
            context.machine.cta.barriers[int(at[lane])].arrive()

    def expect_and_arrive(warp, active):
        expect(warp, active)
        arrive(warp, active)

    if what == "init":
        return init
    if what == "expect_tx":
        return expect
    if what == "arrive":
        if "expect_tx" in instruction.name:
            return expect_and_arrive
        if rest != ["_"] or "noComplete" in instruction.name:
            raise NotImplementedError(instruction.text)
        return arrive
    if what not in ("try_wait", "test_wait") or "parity" not in instruction.name:
        raise NotImplementedError(instruction.text)
    write = context.writer(instruction, instruction.operands[0])
    parity = context.reader(instruction, instruction.operands[2], "u32")

    def wait(warp, active):
        barriers, lanes = context.machine.cta.barriers, _lanes(active)
        at, phase = address(warp), parity(warp)
        over = np.zeros(LANES, bool)
        first = lanes[0]
        if (at[lanes] == at[first]).all() and (phase[lanes] == phase[first]).all():
            over[lanes] = barriers[int(at[first])].phase != int(phase[first])
        else:
            over[lanes] = [barriers[int(at[i])].phase != int(phase[i]) for i in lanes]
        write(warp, over, active)
        if over[lanes].all():
            context.machine.cta.progress += 1
        else:
            warp.stalled = instruction.text

    return wait


def named_barrier(context, instruction):
    """bar.*, barrier.*"""
    what = "sync" if "sync" in instruction.name else "arrive" if "arrive" in instruction.name else None
    if what is None or "red" in instruction.name:
        raise NotImplementedError(instruction.text)
    if instruction.name[1] == "warp":
        return None
    number = context.reader(instruction, instruction.operands[0], "u32")
    count = context.reader(instruction, instruction.operands[1], "u32") if len(instruction.operands) > 1 else None

    def run(warp, active):
        if active is not None and (active != warp.alive).any():
            raise RuntimeError("a named barrier reached by a part of the warp")
        cta, threads = context.machine.cta, context.machine.threads
        wanted = threads if count is None else int(count(warp)[0])
        state = cta.named.setdefault(int(number(warp)[0]), [0, []])
        state[0] += LANES
        if what == "sync":
            state[1].append(warp)
            warp.blocked = instruction.text
        if state[0] >= wanted:
            for sleeper in state[1]:
                sleeper.blocked = None
            state[:] = [0, []]
            cta.progress += 1

    return run


# --- products


OPERAND_SWIZZLES = {1: 128, 2: 64, 3: 32}  # layout type in a matrix descriptor → bytes of a row


@cache
def _tile_places(rows: int, transposed: bool, leading: int, stride: int, width: int):
    """Byte offsets of a 16-bit operand tile [rows, 16] before the swizzle, from its descriptor's strides."""
    row, k = np.arange(rows)[:, None], np.arange(16)[None, :]
    if transposed:
        return row // (width // 2) * leading + k // 8 * stride + k % 8 * width + row % (width // 2) * 2
    return row // 8 * stride + row % 8 * width + k * 2


def _shared_tile(machine, descriptor: int, rows: int, transposed: bool, first: int, type_: str):
    """Rows from `first` of an operand that a matrix descriptor names, as float64 [rows, 16]."""
    start, leading, stride = (((descriptor >> shift) & 0x3FFF) << 4 for shift in (0, 16, 32))
    width = OPERAND_SWIZZLES.get(descriptor >> 62 & 3)
    if width is None or (descriptor >> 49) & 7:
        raise NotImplementedError("wgmma operands without a swizzle, or with a base offset")
    linear = start + _tile_places(first + rows, transposed, leading, stride, width)[first:]
    linear = linear ^ (((linear >> 7) & (width // 16 - 1)) << 4)
    return widen(machine.memory.shared.words[2][linear >> 1], type_).astype(np.float64)


@cache
def _register_places(registers: int):
    """Row and column in the left operand of each packed register [registers, lanes, halves]."""
    register, lane, half = np.arange(registers)[:, None, None], LANE[:, None], np.arange(2)
    return lane // 4 + 8 * (register & 1), lane % 4 * 2 + half + 8 * (register >> 1)


def _register_tile(registers, type_: str):
    """The left operand, 16 x 16, of four packed registers a lane."""
    tile = np.empty((16, 4 * len(registers)))
    halves = np.stack(registers).view(np.uint16).reshape(len(registers), LANES, 2)
    tile[_register_places(len(registers))] = widen(halves, type_)
    return tile


@cache
def _accumulator_places(registers: int):
    """Row and column of each accumulator register and lane in the product's 16 rows."""
    register = np.arange(registers)
    return ROW[register % 4], COLUMN[register % 4] + 8 * (register // 4)[:, None]


def _accumulate(warp, product, writers, readers, keep: bool):
    """Adds a product of 16 rows to the accumulators, with one rounding."""
    parts = product[_accumulator_places(len(writers))]
    if keep:
        parts = parts + [read(warp) for read in readers]
    for write, value in zip(writers, parts.astype(np.float32)):
        write(warp, value, None)


def warpgroup_product(context, instruction):
    """wgmma: every warp computes its own 16 rows, at once."""
    if instruction.name[1] in ("fence", "commit_group", "wait_group"):
        return None
    shape = next((re.fullmatch(r"m64n(\d+)k16", x) for x in instruction.name if x.startswith("m64")), None)
    types = instruction.name[-3:]
    if shape is None or types[0] != "f32" or types[1] != types[2] or types[1] not in ("bf16", "f16"):
        raise NotImplementedError(instruction.text)
    columns, type_ = int(shape[1]), types[1]
    operands = instruction.operands
    writers = [context.writer(instruction, x) for x in listed(operands[0])]
    readers = [context.reader(instruction, x, "f32") for x in listed(operands[0])]
    flags = operands[4:]
    left_registers = None
    if operands[1].startswith("{"):
        left_registers = [context.reader(instruction, x, "b32") for x in listed(operands[1])]
        left_transposed, right_transposed = False, flags[2:] == ["1"]
    else:
        left = context.reader(instruction, operands[1], "b64")
        left_transposed, right_transposed = (x == "1" for x in flags[2:4])
    if flags[:2] != ["1", "1"]:
        raise NotImplementedError(instruction.text)
    right = context.reader(instruction, operands[2], "b64")
    keep = context.reader(instruction, operands[3], "pred")

    def run(warp, active):
        _whole(active, "wgmma")
        machine = context.machine
        if left_registers is not None:
            a = _register_tile([read(warp) for read in left_registers], type_)
        else:
            a = _shared_tile(machine, int(left(warp)[0]), 16, left_transposed, 16 * (warp.index % 4), type_)
        b = _shared_tile(machine, int(right(warp)[0]), columns, right_transposed, 0, type_)
        _accumulate(warp, a @ b.T, writers, readers, bool(keep(warp)[0]))

    return run


def warp_product(context, instruction):
    """mma.sync m16n8k16 and m16n8k8 on 16-bit types, m16n8k8 on tf32 (whose low 13 bits are cut)."""
    name, operands = instruction.name, instruction.operands
    is_tf32, is_short = name[-2] == "tf32", "m16n8k8" in name
    known = is_short or not is_tf32 and "m16n8k16" in name
    if not known or name[-1] != "f32" or name[-2] != name[-3]:
        raise NotImplementedError(instruction.text)
    a, b = ([context.reader(instruction, x, "b32") for x in listed(operands[i])] for i in (1, 2))
    c = [context.reader(instruction, x, "f32") for x in listed(operands[3])]
    writers = [context.writer(instruction, x) for x in listed(operands[0])]
    type_ = name[-2]

    def cut(x):
        return (x & np.uint32(0xFFFFE000)).view(np.float32)

    def run(warp, active):
        _whole(active, "mma")
        if is_tf32:
            left, right = np.empty((16, 8)), np.empty((8, 8))
            for i, read in enumerate(a):
                left[LANE // 4 + 8 * (i & 1), LANE % 4 + 4 * (i >> 1)] = cut(read(warp))
            for i, read in enumerate(b):
                right[LANE % 4 + 4 * i, LANE // 4] = cut(read(warp))
        else:
            left, right = _register_tile([read(warp) for read in a], type_), np.empty((8 * len(b), 8))
            for i, read in enumerate(b):
                halves = np.ascontiguousarray(read(warp)).view(np.uint16).reshape(LANES, 2)
                right[LANE[:, None] % 4 * 2 + np.arange(2) + 8 * i, LANE[:, None] // 4] = widen(halves, type_)
        _accumulate(warp, left @ right, writers, c, True)

    return run


# --- across lanes


def shuffle(context, instruction):
    names = instruction.operands[0].split("|")
    mode = next((x for x in instruction.name if x in ("up", "down", "bfly", "idx")), None)
    if mode is None or instruction.type != "b32":
        raise NotImplementedError(instruction.text)
    source, by, bounds = (context.reader(instruction, x, "b32") for x in instruction.operands[1:4])
    writers = [context.writer(instruction, x) for x in names]

    def run(warp, active):
        value, offset, clamp = source(warp), by(warp).astype(np.int64), bounds(warp).astype(np.int64)
        segment, last = (clamp >> 8) & 31, clamp & 31
        highest, lowest = (LANE & segment) | (last & ~segment), LANE & segment
        lane = {"up": LANE - offset, "down": LANE + offset, "bfly": LANE ^ offset,
                "idx": lowest | (offset & ~segment & 31)}[mode]  # fmt: skip
        inside = lane >= highest if mode == "up" else lane <= highest
        results = value[np.where(inside, lane, LANE) & 31], inside
        for write, result in zip(writers, results):
            write(warp, result, active)

    return run


def vote(context, instruction):
    predicate = context.reader(instruction, instruction.operands[1], "pred")
    write = context.writer(instruction, instruction.operands[0])
    what = next((x for x in instruction.name if x in ("ballot", "any", "all")), None)
    if what is None:
        raise NotImplementedError(instruction.text)

    def run(warp, active):
        mask = np.ones(LANES, bool) if active is None else active
        said = predicate(warp) & mask
        if what == "ballot":
            result = np.full(LANES, _bits(said), np.uint32)
        else:
            result = np.full(LANES, said.any() if what == "any" else (said == mask).all())
        write(warp, result, active)

    return run


def _bits(lanes) -> int:
    return sum(1 << int(i) for i in np.flatnonzero(lanes))


def active_mask(context, instruction):
    write = context.writer(instruction, instruction.operands[0])

    def run(warp, active):
        write(warp, np.full(LANES, _bits(np.ones(LANES, bool) if active is None else active), np.uint32), active)

    return run


def elect(context, instruction):
    writers = [context.writer(instruction, x) for x in instruction.operands[0].split("|")]

    def run(warp, active):
        first = int(_lanes(active)[0])
        for write, value in zip(writers, (np.full(LANES, first, np.uint32), LANE == first)):
            write(warp, value, active)

    return run


REDUCTIONS = {"min": np.min, "max": np.max, "add": np.sum, "and": np.bitwise_and.reduce, "or": np.bitwise_or.reduce,
              "xor": np.bitwise_xor.reduce}  # fmt: skip


def reduce(context, instruction):
    source = context.reader(instruction, instruction.operands[1], instruction.type)
    write, function = context.writer(instruction, instruction.operands[0]), REDUCTIONS[instruction.name[2]]

    def run(warp, active):
        values = source(warp)
        write(warp, np.full(LANES, function(values[_lanes(active)]), values.dtype), active)

    return run


def trap(context, instruction):
    def run(warp, active):
        raise RuntimeError("trap")

    return run


EFFECTS = {
    "ld": load, "st": store, "ldmatrix": load_matrices, "stmatrix": store_matrices, "cp": copy,
    "mbarrier": memory_barrier, "bar": named_barrier, "barrier": named_barrier, "wgmma": warpgroup_product,
    "mma": warp_product, "shfl": shuffle, "vote": vote, "activemask": active_mask, "elect": elect, "redux": reduce,
    "trap": trap, "fence": _nothing, "membar": _nothing, "griddepcontrol": _nothing, "prefetch": _nothing,
    "setmaxnreg": _nothing, "nanosleep": _nothing,
}  # fmt: skip
