"""Hand-over between roles: arrivals, and the fence that generic stores need before wgmma or TMA reads them.

Every barrier counts warps, not threads: 32 lanes arriving one by one cost as many shared-memory cycles.
"""

import tilelang.language as T

WARPS_PER_WARPGROUP = 4


@T.macro
def arrive(barriers, slot):
    """One arrival per warp, after all its lanes came here (their generic reads and writes are ordered before it)."""
    T.sync_warp()
    if T.get_thread_binding() % 32 == 0:
        T.barrier_arrive(barriers[slot])


@T.macro
def publish(barriers, slot):
    """`arrive` for a warp whose generic shared-memory stores wgmma or TMA will read in another role."""
    T.fence_proxy_async()
    arrive(barriers, slot)
