"""What the compilers make of every kernel variant, without a GPU: generated CUDA, registers, spills, ptxas remarks.

`kernels/variants.py` lists the variants; `tools/kernel_report.py`, `tools/diff_source.py` and the lowering test read
them here. TileLang's disk cache serves the CUDA source, and what ptxas says of a source is kept beside it
(`flash_qla_ptxas/` in the cache folder), so a second look costs nothing.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import cache, lru_cache
from pathlib import Path

# ptxas remarks on wgmma (C75xx). Serialised ones cost what wgmma is for and are refused; an injected wait (C7517) is
# right but ends an overlap early, and is only shown.
REMARK = re.compile(r"\(C75\d\d\)|wgmma\S* instructions are serialized")
SERIALISED = "serialized"


@dataclass(frozen=True)
class Variant:
    """One kernel at one corner of its keys: `make(spec)` for `arch`."""

    name: str
    make: object
    spec: object
    arch: object

    @property
    def pass_configs(self) -> dict:
        """What the kernel compiles with (`build.pass_configs`)."""
        from flash_qla.ops.gated_delta_rule.chunk.kernels import build

        return build.pass_configs(self.make)

    @property
    def known_spill_bytes(self) -> int:
        """Spills that the kernel's module admits; 0 for almost all."""
        return getattr(sys.modules[self.make.__module__], "KNOWN_SPILL_BYTES", 0)


@dataclass
class Report:
    """What the compilers say of a variant.

    Attributes:
        name: of the variant.
        registers: per thread, as ptxas allots them at entry (role kernels move them by setmaxnreg).
        spill_bytes: stores and loads together.
        stack_bytes: of local memory.
        static_smem, dynamic_smem: bytes of shared memory.
        remarks: ptxas lines about wgmma.
        error: why there are no numbers, None when all went well.
        source_sha: of the generated CUDA.
    """

    name: str
    registers: int = 0
    spill_bytes: int = 0
    stack_bytes: int = 0
    static_smem: int = 0
    dynamic_smem: int = 0
    remarks: list[str] = field(default_factory=list)
    error: str | None = None
    source_sha: str = ""

    @property
    def smem_bytes(self) -> int:
        return self.static_smem + self.dynamic_smem

    @property
    def notes(self) -> list[str]:
        """What is worth a look but refused by nobody."""
        waits = [remark for remark in self.remarks if SERIALISED not in remark]
        return [f"{len(waits)} remarks: {waits[0][:70]}"] if waits else []

    def problems(self, smem_limit: int | None = None, known_spill_bytes: int = 0) -> list[str]:
        """Returns what must not be: errors, spills, serialised wgmma, more shared memory than a CTA has.

        Spills up to known_spill_bytes pass: what the kernel's module admits, with its reason, as KNOWN_SPILL_BYTES.
        """
        if self.error:
            return [self.error]
        found = [f"spills {self.spill_bytes} bytes"] if self.spill_bytes > known_spill_bytes else []
        found += [remark for remark in self.remarks if SERIALISED in remark]
        if smem_limit is not None and self.smem_bytes > smem_limit:
            found.append(f"needs {self.smem_bytes} bytes of shared memory; a CTA has {smem_limit}")
        return found


def all_variants(pattern: str = "") -> list[Variant]:
    """Returns the variants whose name matches the regular expression."""
    from flash_qla.ops.gated_delta_rule.chunk.kernels import variants

    return [Variant(*entry[:4]) for entry in variants.all_variants() if re.search(pattern, entry[0])]


def find_nvcc() -> str | None:
    """Returns nvcc's path, None where there is none."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    found = shutil.which("nvcc") or shutil.which(str(Path(home) / "bin/nvcc"))
    if found is None:
        packaged = (p for base in sys.path for p in Path(base or ".").glob("nvidia/*/bin/nvcc"))
        found = next(map(str, packaged), None)
    return found


def sources(variant: Variant) -> tuple[str, str]:
    """Lowers a variant (or reads it from TileLang's disk cache). Returns the CUDA source and the host stub's source."""
    from flash_qla.ops.gated_delta_rule.chunk.kernels import build

    kernel = build.compile_now(variant.make, variant.spec, variant.arch)
    return kernel.get_kernel_source(), kernel.get_host_source()


def dynamic_smem(device_source: str, host_source: str) -> int:
    """Returns the dynamic shared memory that the host stub launches with: the last argument of the kernel's call."""
    if "extern __shared__" not in device_source:
        return 0
    call = re.search(r"TVMFFIFunctionCall\(\w+_kernel_packed, \(TVMFFIAny\*\) ?stack_ffi_any, (\d+)", host_source)
    if call is None:
        raise ValueError("the host stub's kernel call was not found: TileLang's stub has changed")
    last = int(call.group(1)) - 1
    values = re.findall(rf"stack_ffi_any\)\[{last}\]\.v_int64\) = \(?\(int64_t\)(\d+)", host_source[: call.start()])
    if not values:
        raise ValueError("the launch's shared-memory size was not found: TileLang's stub has changed")
    return int(values[-1])


def ptxas(device_source: str, target: str, pass_configs: dict) -> str:
    """Compiles a source with the flags that TileLang uses and returns what ptxas says; kept in the cache folder.

    Raises:
        RuntimeError: nvcc is missing or fails.
    """
    return _nvcc("-cubin", _flags(target, pass_configs), device_source)


def ptx(device_source: str, target: str, pass_configs: dict) -> str:
    """Returns the PTX of a source, with TileLang's optimisation flags; kept in the cache folder.

    Raises:
        RuntimeError: nvcc is missing or fails.
    """
    flags = ["-O3", "-std=c++20", f"-arch=compute_{target.removeprefix('sm_')}"]
    if pass_configs.get("tl.enable_fast_math"):
        flags.append("--use_fast_math")
    return _nvcc("-ptx", flags, device_source)


def _nvcc(kind: str, flags: list[str], device_source: str) -> str:
    """Returns what nvcc says with -cubin, what it writes with -ptx."""
    nvcc = find_nvcc()
    if nvcc is None:
        raise RuntimeError("nvcc was not found")
    identity = [_nvcc_version(nvcc), *flags, device_source]
    key = hashlib.sha256("\0".join(identity if kind == "-cubin" else [kind, *identity]).encode()).hexdigest()
    kept = _cache_folder() / key
    if kept.exists():
        return kept.read_text()
    with tempfile.TemporaryDirectory() as folder:
        path, output = Path(folder) / "kernel.cu", Path(folder) / "output"
        path.write_text(device_source)
        command = [nvcc, kind, *flags, *_includes(), str(path), "-o", str(output)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"nvcc failed: {_first_error(done.stderr)}")
        found = done.stderr if kind == "-cubin" else output.read_text()
    kept.parent.mkdir(parents=True, exist_ok=True)
    written = kept.with_name(f"{key}.{os.getpid()}")
    written.write_text(found)
    written.replace(kept)  # several processes may write the same one
    return found


def _flags(target: str, configs: dict) -> list[str]:
    number = target.removeprefix("sm_")
    flags = ["-O3", "-lineinfo", "-std=c++20", "-gencode", f"arch=compute_{number},code=sm_{number}", "-Xptxas", "-v"]
    if configs.get("tl.enable_fast_math"):
        flags.append("--use_fast_math")
    level = configs.get("tl.ptxas_register_usage_level")
    if level is not None:
        flags.append(f"--ptxas-options=--register-usage-level={level}")
    extra = configs.get("tl.device_compile_flags") or []
    return flags + (extra.split() if isinstance(extra, str) else list(extra))


def _includes() -> list[str]:
    import tilelang

    root = Path(tilelang.__file__).parent
    return [f"-I{root / 'src'}", f"-I{root / '3rdparty/cutlass/include'}"]


@cache
def _nvcc_version(nvcc: str) -> str:
    return subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout.splitlines()[-1]


def _cache_folder() -> Path:
    default = Path.home() / ".tilelang/cache"
    return Path(os.environ.get("TILELANG_CACHE_DIR") or default) / "flash_qla_ptxas"


def _first_error(text: str) -> str:
    lines = [line for line in text.splitlines() if "error" in line.lower()] or text.splitlines() or ["no message"]
    return lines[0][:300]


def parse_ptxas(text: str) -> dict:
    """Returns registers, spill_bytes, stack_bytes, static_smem and remarks, the worst over the source's kernels."""

    def most(pattern: str) -> int:
        return max(map(int, re.findall(pattern, text)), default=0)

    spills = [int(a) + int(b) for a, b in re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", text)]
    return {
        "registers": most(r"Used (\d+) registers"),
        "spill_bytes": max(spills, default=0),
        "stack_bytes": most(r"(\d+) bytes stack frame"),
        "static_smem": most(r"(\d+) bytes smem"),
        "remarks": sorted({line.split(":", 1)[-1].strip() for line in text.splitlines() if REMARK.search(line)}),
    }


def report(variant: Variant) -> Report:
    """Lowers and compiles a variant; a failure is part of the report."""
    try:
        device_source, host_source = sources(variant)
        sha = hashlib.sha256(device_source.encode()).hexdigest()[:16]
        said = ptxas(device_source, variant.arch.target, variant.pass_configs)
        smem = dynamic_smem(device_source, host_source)
        found = parse_ptxas(said)
        if not found["registers"]:
            return Report(variant.name, source_sha=sha, error="ptxas reported no kernel")
        return Report(variant.name, dynamic_smem=smem, source_sha=sha, **found)
    except Exception as error:
        lines = f"{type(error).__name__}: {error}".splitlines()
        # TileLang repeats the source in its message; what went wrong stands first and last.
        return Report(variant.name, error=" … ".join(dict.fromkeys([lines[0][:300], lines[-1][:300]])))


def _report_named(name: str) -> dict:
    return asdict(report(_by_name()[name]))


@lru_cache(maxsize=1)
def _by_name() -> dict[str, Variant]:
    return {variant.name: variant for variant in all_variants()}


def _write_source(name: str, folder: str) -> str | None:
    try:
        (Path(folder) / f"{name}.cu").write_text(sources(_by_name()[name])[0])
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0][:300]
    return None


class Compiling:
    """Reports of several variants, made by processes of their own (tracing and lowering hold the interpreter's lock).

    Use as a context; `reports()` yields in the order given, `report(name)` waits for one.
    """

    def __init__(self, names: Sequence[str], jobs: int | None = None):
        self.names = list(names)
        self.jobs = max(1, min(jobs or os.cpu_count() or 1, len(self.names) or 1))
        self._futures: dict[str, Future] = {}

    def __enter__(self) -> Compiling:
        context = multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(self.jobs, mp_context=context)
        self._futures = {name: self._pool.submit(_report_named, name) for name in self.names}
        return self

    def __exit__(self, *exception) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def report(self, name: str) -> Report:
        return Report(**self._futures[name].result())

    def reports(self) -> Iterator[Report]:
        return (self.report(name) for name in self.names)


def write_sources(folder: Path, pattern: str = "", jobs: int | None = None) -> dict[str, str | None]:
    """Writes `<variant>.cu` of every matching variant. Returns name → None, or why there is none."""
    names = [variant.name for variant in all_variants(pattern)]
    folder.mkdir(parents=True, exist_ok=True)
    jobs = max(1, min(jobs or os.cpu_count() or 1, len(names) or 1))
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        failures = pool.map(_write_source, names, [str(folder)] * len(names))
        return dict(zip(names, failures, strict=True))


def write_json(path: Path, reports: Sequence[Report]) -> None:
    """Writes reports for later comparison."""
    path.write_text(json.dumps([asdict(each) for each in reports], indent=1) + "\n")
