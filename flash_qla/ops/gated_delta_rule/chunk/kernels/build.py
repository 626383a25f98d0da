"""The only way from a kernel's specification to a callable: target, pass configs, cache and compile counter.

A kernel module offers a frozen `Spec` dataclass (its compile key, nothing else may decide the code) and
`make(spec) -> prim_func`. `build(make, spec, arch)` compiles it once per process; TileLang's disk cache serves later
processes, on this machine or another, because `make` is deterministic in `spec`.
"""

import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from flash_qla.arch import Arch

# wgmma kernels schedule their own warps and share no memory between roles: the automatic passes must stay out.
ROLE_PASS_CONFIGS = {
    "tl.disable_warp_specialized": True,
    "tl.disable_shared_memory_reuse": True,
    "tl.enable_fast_math": True,
}
# For kernels whose named barriers, bounds and first writes are all by hand.
BARE_PASS_CONFIGS = {
    **ROLE_PASS_CONFIGS,
    "tl.disable_thread_storage_sync": True,
    "tl.disable_safe_memory_legalize": True,  # every access is in bounds by construction (tiles/program.py clamps)
    "tl.disable_buffer_init_check": True,  # it does not see the writes of `tiles/fragments.py`
}

_kernels: dict = {}
_compiled: list = []  # what the entry points in _kernels belong to
_locks: dict = {}  # one per variant: different variants compile side by side, one variant compiles once
_lock = threading.Lock()


def target(arch: Arch) -> dict:
    """TileLang's target. Raises NotImplementedError for an arch without kernels."""
    if not arch.has_kernels:
        raise NotImplementedError(f"flash_qla has no kernels for {arch.name}: {arch.reason}")
    return {"kind": "cuda", "arch": arch.target}


def build(make, spec, arch: Arch):
    """Returns a callable that launches `make(spec)`; compiles (or loads from disk) at its first use, thread-safe."""
    key = (make, spec, arch.name)
    kernel = _kernels.get(key)
    if kernel is None:
        with _lock:
            variant_lock = _locks.setdefault(key, threading.Lock())
        with variant_lock:
            kernel = _kernels.get(key)
            if kernel is None:
                compiled = compile_now(make, spec, arch)
                _compiled.append(compiled)
                kernel = _kernels[key] = _entry_point(compiled)
    return kernel if _recorder.launches is None else _Recorded(key, kernel, _recorder.launches)


def _entry_point(compiled):
    """The compiled function itself: TileLang's call walks all arguments in Python, which takes a third of a launch."""
    try:
        return compiled.adapter.get_exportable_executable()["main"]
    except (AttributeError, KeyError):  # another TileLang, or a stand-in
        return compiled


class _Recorder(threading.local):
    """Of this thread: the launches of the call that is being recorded, None when none is."""

    launches: list | None = None


_recorder = _Recorder()


class _Recorded:
    """A kernel whose launches are noted down."""

    def __init__(self, key, kernel, launches):
        self.key, self.kernel, self.launches = key, kernel, launches

    def __call__(self, *arguments):
        self.launches.append((self.key, self.kernel, arguments))
        return self.kernel(*arguments)


@contextmanager
def record_launches():
    """Context whose value is the list of what this thread launches inside, in order.

    Each launch is (key, kernel, arguments), its key (make, spec, arch's name).
    """
    before, _recorder.launches = _recorder.launches, []
    try:
        yield _recorder.launches
    finally:
        _recorder.launches = before


def build_all(variants, arch: Arch, jobs: int | None = None) -> int:
    """Builds [(make, spec)] side by side. Returns how many were not there before."""
    before = compile_count()
    jobs = jobs or max(1, (os.cpu_count() or 2) // 2)  # a build keeps Python and one nvcc busy
    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(lambda variant: build(*variant, arch), variants))
    return compile_count() - before


def pass_configs(make) -> dict:
    """What a kernel compiles with: its module's PASS_CONFIGS, ROLE_PASS_CONFIGS where it has none."""
    return getattr(sys.modules[make.__module__], "PASS_CONFIGS", ROLE_PASS_CONFIGS)


def compile_now(make, spec, arch: Arch):
    """Lowers and compiles without the in-process cache (tools and the lowering test call this; needs no GPU)."""
    os.environ.setdefault("TILELANG_PRINT_ON_COMPILATION", "0")
    import tilelang

    return tilelang.compile(make(spec), target=target(arch), pass_configs=pass_configs(make))


def compile_count() -> int:
    """Number of kernel variants this process has built (compiled or loaded from disk) so far."""
    return len(_kernels)
