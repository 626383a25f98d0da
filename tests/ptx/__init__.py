"""An interpreter of PTX in numpy: runs our compiled kernels, host code included, on a machine without a GPU.

    host.py         TileLang's host code of a kernel, run against stand-ins: checks, tensor maps, launch
    kernels.py      puts interpreted kernels in the place of compiled ones, for our host wrappers and public functions
    program.py      PTX text to a program
    expressions.py  instructions without effects, as Python expressions
    effects.py      memory, barriers, tensor copies, matrix products, exchange between lanes
    memory.py       shared memory and the host's tensors, with their bounds; tensor maps with swizzles
    machine.py      CTAs one after the other, their warps in turn, lanes that went different ways

What shows: wrong arithmetic, wrong addresses and layouts, accesses beyond a tensor or unaligned ones, shared memory
read before it is written (it starts as NaN), barriers whose counts or phases do not fit (deadlocks).

What does not: asynchronous operations (TMA, cp.async, wgmma) complete at once and CTAs run one after the other, so
races, missing waits, fences and proxy fences do not show; nor do bank conflicts and register limits. Both sides of a
layout follow the same formulas here, so what only the hardware knows about them does not show either.
"""
