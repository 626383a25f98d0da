"""Hand-over between roles: arrivals, the fence that generic stores need before wgmma or TMA reads them, registers.

Every barrier counts warps, not threads: 32 lanes arriving one by one cost as many shared-memory cycles.
"""

import tilelang.language as T

WARPS_PER_WARPGROUP = 4
ROWS = T.GemmWarpPolicy.FullRow  # of a product: 64 rows for each warpgroup


def set_registers(count: int, threads: int):
    """Call expression: a role's registers a thread, more or fewer than a CTA of so many threads has at launch."""
    return T.set_max_nreg(count, 1 if count > 65536 // threads // 8 * 8 else 0)


def settle(accumulator):
    """Call expression that keeps the compiler from reading an accumulator before the wait that stands above."""
    return T.warpgroup_fence_operand(accumulator, num_regs=64 * int(accumulator.shape[1]) // 128)


@T.macro
def arrive(barriers, slot):
    """One arrival per warp, after all its lanes came here (their generic reads and writes are ordered before it)."""
    T.sync_warp()
    if T.get_thread_binding() % 32 == 0:
        T.barrier_arrive(barriers[slot])


@T.macro
def arrive_if(condition, barriers, slot):
    T.sync_warp()
    if T.get_thread_binding() % 32 == 0 and condition:
        T.barrier_arrive(barriers[slot])


@T.macro
def publish(barriers, slot):
    """`arrive` for a warp whose generic shared-memory stores wgmma or TMA will read in another role."""
    T.fence_proxy_async()
    arrive(barriers, slot)
