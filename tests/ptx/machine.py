"""CTAs one after the other, their warps in turn. A warp runs until it waits; of its lanes that went different ways,
those at the lowest place in the code run first."""

from __future__ import annotations

import numpy as np

from .effects import EFFECTS, Context
from .expressions import NAMESPACE, RULES, assignments
from .memory import Memory
from .program import LANES, Program

ENDS_BLOCK = {"bra", "ret", "exit", "bar", "barrier"}


class Deadlock(RuntimeError):
    """No warp can go on."""


class Warp:
    """32 lanes: registers `R`, where each lane is, which live, and what the warp waits for."""

    def __init__(self, program: Program, index: int, block: int, threads: int):
        self.index = index
        zeros = {dtype: np.zeros(LANES, dtype) for dtype in set(program.types)}
        self.R = [zeros[dtype] for dtype in program.types]  # never written in place, so they may be shared
        for register, value in program.initial.items():
            self.R[register] = value
        lanes = np.arange(LANES, dtype=np.uint32)
        specials = {"%tid.x": lanes + LANES * index, "%laneid": lanes, "%ctaid.x": np.full_like(lanes, block),
                    "%ntid.x": np.full_like(lanes, threads)}  # fmt: skip
        for name, register in program.specials.items():
            self.R[register] = specials.get(name, np.zeros_like(lanes))
        self.places = np.zeros(LANES, np.int64)  # block of every lane
        self.at = 0  # the block of all lanes, where they agree
        self.together = True
        self.alive = np.ones(LANES, bool)
        self.done = False
        self.stalled = None  # a wait that failed: let the others run
        self.blocked = None  # the named barrier that it sleeps at


class Barrier:
    """An mbarrier: arrivals and bytes that its phase still lacks."""

    def __init__(self, count: int):
        self.count = self.pending = count
        self.bytes = 0
        self.phase = 0

    def arrive(self, count: int = 1) -> None:
        self.pending -= count
        if self.pending < 0:
            raise RuntimeError("more arrivals at an mbarrier than it counts")
        self.settle()

    def settle(self) -> None:
        if self.pending == 0 and self.bytes == 0:
            self.phase ^= 1
            self.pending = self.count


class Cta:
    """What the warps of a CTA share."""

    def __init__(self, index: int, warps: list[Warp]):
        self.index, self.warps = index, warps
        self.barriers: dict[int, Barrier] = {}
        self.named: dict[int, list] = {}  # number → [arrived threads, sleeping warps]
        self.progress = 0  # successful waits, released barriers and ended warps


class Machine:
    """A loaded kernel. The program's straight pieces ("blocks") become Python functions when it is loaded."""

    def __init__(self, program: Program):
        self.program = program
        self.cta: Cta | None = None
        self.memory: Memory | None = None
        self.tensor_maps: dict[int, object] = {}
        self.threads = 0
        self.instructions = 0
        leaders = {0, *program.labels.values()}
        leaders |= {i + 1 for i, x in enumerate(program.code) if self._ends_block(x)}
        self.starts = sorted(place for place in leaders if place < len(program.code))
        block_of = {start: block for block, start in enumerate(self.starts)}
        self.targets = {key: block_of.get(place, len(self.starts)) for key, place in program.labels.items()}
        ends = [*self.starts[1:], len(program.code)]
        self.blocks = [self._compile(start, end) for start, end in zip(self.starts, ends)]

    @staticmethod
    def _ends_block(instruction) -> bool:
        return instruction.name[0] in ENDS_BLOCK and instruction.name[:2] != ["bar", "warp"]

    def _compile(self, start: int, end: int):
        """Returns (run with all lanes, run with some, control or None, number of instructions) of a block."""
        program, control = self.program, None
        context = Context(self)
        whole, some, effects = [], [], []
        body = program.code[start:end]
        if self._ends_block(body[-1]):
            last = body.pop()
            control = self._control(last)
        for instruction in body:
            guard = None
            if instruction.guard is not None:
                guard = f"{'~' if instruction.negated else ''}R[{instruction.guard}]"
            if instruction.name[0] in RULES:
                found = assignments(program, instruction)
                if guard and len(found) > 1:
                    raise NotImplementedError(instruction.text)
                for register, expression in found:
                    old = f"R[{register}]"
                    whole.append(f"{old} = where({guard}, {expression}, {old})" if guard else f"{old} = {expression}")
                    mask = f"m & {guard}" if guard else "m"
                    some.append(f"{old} = where({mask}, {expression}, {old})")
                continue
            effect = EFFECTS.get(instruction.name[0])
            if effect is None:
                raise NotImplementedError(instruction.text)
            run = effect(context, instruction)
            if run is None:
                continue
            name = f"E[{len(effects)}]"
            effects.append(_noted(run, instruction.text))
            if guard:
                whole.append(f"g = {guard}\n if g.any(): {name}(w, None if g.all() else g)")
                some.append(f"g = m & {guard}\n if g.any(): {name}(w, g)")
            else:
                whole.append(f"{name}(w, None)")
                some.append(f"{name}(w, m)")
        lines = ["def whole(w):", " R = w.R", *(f" {x}" for x in whole)]
        lines += ["def some(w, m):", " R = w.R", *(f" {x}" for x in some)]
        namespace = {**NAMESPACE, "E": effects}
        exec(compile("\n".join(lines), f"<block at {program.code[start].text[:60]}>", "exec"), namespace)
        return namespace["whole"], namespace["some"], control, end - start

    def _control(self, instruction):
        """Returns (kind, target block or None, guard, negated, effect)."""
        family = instruction.name[0]
        target = effect = None
        if family == "bra":
            labels, wanted = self.targets, instruction.operands[0]
            target = next(labels[level, wanted] for level in reversed(instruction.scope) if (level, wanted) in labels)
        elif family in ("bar", "barrier"):
            if instruction.guard is not None:
                raise NotImplementedError(instruction.text)
            effect = _noted(EFFECTS["bar"](Context(self), instruction), instruction.text)
        return family, target, instruction.guard, instruction.negated, effect

    def launch(self, memory: Memory, tensor_maps, grid: int, threads: int, shared_bytes: int) -> None:
        """Runs all CTAs. Raises Deadlock; errors of an instruction carry its text as a note."""
        self.memory, self.tensor_maps, self.threads = memory, tensor_maps, threads
        with np.errstate(all="ignore"):
            for index in range(grid):
                memory.new_shared(self.program.dynamic_at + shared_bytes)
                self.cta = Cta(index, [Warp(self.program, i, index, threads) for i in range(threads // LANES)])
                self._run_cta()

    def _run_cta(self) -> None:
        idle, cta = 0, self.cta
        while not all(warp.done for warp in cta.warps):
            before = cta.progress
            for warp in cta.warps:
                if not warp.done and warp.blocked is None:
                    self._run_warp(warp)
            idle = 0 if cta.progress != before else idle + 1
            if idle > 2:
                where = (f"warp {w.index} at {w.blocked or w.stalled}" for w in cta.warps if not w.done)
                raise Deadlock(f"CTA {cta.index}: " + "; ".join(where))

    def _run_warp(self, warp: Warp) -> None:
        """Until the warp waits or ends."""
        warp.stalled = None
        blocks = self.blocks
        while not (warp.stalled or warp.done or warp.blocked):
            if warp.together:
                whole, _, control, count = blocks[warp.at]
                self.instructions += count
                whole(warp)
                warp.at += 1
                if control is not None:
                    self._jump_together(warp, control)
            else:
                self._run_apart(warp)

    def _jump_together(self, warp: Warp, control) -> None:
        kind, target, guard, negated, effect = control
        if effect is not None:
            return effect(warp, None)
        if guard is None:
            if kind == "bra":
                warp.at = target
            else:
                self._end(warp)
            return None
        taken = warp.R[guard] != negated
        if taken.all():
            if kind == "bra":
                warp.at = target
            else:
                self._end(warp)
        elif taken.any():
            warp.places[:] = warp.at
            warp.together = False
            self._leave(warp, kind, target, taken)
        return None

    def _run_apart(self, warp: Warp) -> None:
        block = int(warp.places[warp.alive].min())
        mask = warp.alive & (warp.places == block)
        if mask.all():
            warp.at, warp.together = block, True
            return
        _, some, control, count = self.blocks[block]
        self.instructions += count
        some(warp, mask)
        warp.places[mask] = block + 1
        if control is None:
            return
        kind, target, guard, negated, effect = control
        if effect is not None:
            effect(warp, mask)
        else:
            self._leave(warp, kind, target, mask if guard is None else mask & (warp.R[guard] != negated))

    def _leave(self, warp: Warp, kind: str, target: int | None, lanes) -> None:
        if kind == "bra":
            warp.places[lanes] = target
            return
        warp.alive &= ~lanes
        if not warp.alive.any():
            self._end(warp)

    def _end(self, warp: Warp) -> None:
        warp.done = True
        self.cta.progress += 1


def _noted(run, text: str):
    def noted(warp, active):
        try:
            run(warp, active)
        except Exception as error:
            error.add_note(f"warp {warp.index}: {text}")
            raise

    return noted
