"""Measures one library in a process of its own; `bench_gated_delta_rule.py` starts it by path.

Two of the libraries are called `flash_qla`, and flash-linear-attention hands its calls to whichever it can import. So
this process first loads this repository's input builders, reference and timers, then forgets every `flash_qla` module
(what was loaded keeps working, a later `import flash_qla` starts anew), and only then imports the library to measure.

Requests come as JSON lines on stdin, answers leave as JSON lines on what was stdout; whatever libraries print goes to
stderr. Inputs are passed by seed: the same seed draws the same tensors on the same kind of device.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import importlib
import importlib.metadata
import json
import math
import os
import platform
import subprocess
import sys
import time
import traceback
from dataclasses import asdict, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIBRARIES = ("ours", "original", "fla", "flashinfer")
# Value heads times tokens that are compared with float64; above it, some key heads and all of their value heads.
CHECKED_HEAD_TOKENS = 2**19
# A peer must compute the same function; how well is its own affair. Ours must keep the tolerance table's caps.
PEER_LIMIT = 5e-2


class Absent(Exception):
    """The library is not on this machine, or does not do what is asked."""


def load_own_modules():
    """Returns this repository's (workloads, compare, timing, floors), and removes its name from the interpreter."""
    sys.path.insert(0, str(ROOT))
    names = ("workloads", "compare", "timing", "floors")
    modules = tuple(importlib.import_module(f"flash_qla.testing.{name}") for name in names)
    return modules


def forget_own_modules():
    """After this, `import flash_qla` finds only what `sys.path` still offers: not this repository."""
    for name in [name for name in sys.modules if name.split(".")[0] == "flash_qla"]:
        del sys.modules[name]
    sys.path[:] = [path for path in sys.path if Path(path or ".").resolve() != ROOT]
    importlib.invalidate_caches()


class FlashQla:
    """This repository's package, or the original of the same name: same signatures."""

    def __init__(self, path: str | None):
        if path is not None:
            if not (Path(path) / "flash_qla").is_dir():
                raise Absent(f"no folder flash_qla in {path}")
            forget_own_modules()
            sys.path.insert(0, str(Path(path).resolve()))
        self.package = importlib.import_module("flash_qla")
        home = Path(self.package.__file__).resolve()
        wanted = ROOT if path is None else Path(path).resolve()
        if not home.is_relative_to(wanted):
            raise Absent(f"flash_qla was imported from {home.parent}, not from {wanted}")
        self.version = self.package.__version__

    def prepare_forward(self, x):
        return functools.partial(_forward, self.package.chunk_gated_delta_rule, _arguments(x))

    def prepare_backward(self, x):
        """The low-level backward alone, on what the low-level forward returned, its cp_cache included."""
        fixed = {"scale": x.scale, "initial_state": x.initial_state, "cu_seqlens": x.cu_seqlens}
        low = self.package.chunk_gated_delta_rule_fwd(x.q, x.k, x.v, x.g, x.beta, enable_fwd_cp_cache=True, **fixed)
        g_cumsum, inverse, cache = low[0], low[1], low[5]

        def call():
            grads = self.package.chunk_gated_delta_rule_bwd(
                x.q, x.k, x.v, g_cumsum, x.beta, inverse, x.do, x.dht, cp_cache=cache, **fixed
            )
            return dict(zip(("dq", "dk", "dv", "dbeta", "dg", "dh0"), grads, strict=True))

        return call

    def prepare_both(self, x):
        return functools.partial(_forward_backward, self.package.chunk_gated_delta_rule, x.differentiable())


class Fla:
    """flash-linear-attention with its own Triton kernels."""

    def __init__(self, path: str | None):
        os.environ["FLA_FLASH_QLA"] = "0"
        # It tunes by timing: what was chosen elsewhere, perhaps beside other work on the GPU, is not used unless asked.
        os.environ.setdefault("FLA_CACHE_RESULTS", "0")
        forget_own_modules()
        if path:
            sys.path.insert(0, str(Path(path).resolve()))
        try:
            module = importlib.import_module("fla.ops.gated_delta_rule")
        except ImportError as error:
            raise Absent(f"import fla: {error}") from error
        self.function = module.chunk_gated_delta_rule
        self.version = _version("flash-linear-attention", "fla-core")

    def prepare_forward(self, x):
        return functools.partial(_forward, self.function, _arguments(x))

    def prepare_backward(self, x):
        """autograd.grad of a graph that is kept: the backward pass alone, autograd's own work included."""
        import torch

        x = x.differentiable()
        leaves = _leaves(x)
        outputs = self.function(**_arguments(x), output_final_state=True)

        def call():
            return dict(zip(leaves, torch.autograd.grad(outputs, list(leaves.values()), [x.do, x.dht], True)))

        return call

    def prepare_both(self, x):
        return functools.partial(_forward_backward, self.function, x.differentiable())


class FlashInfer:
    """flashinfer-python: forward only; packed rows without a batch axis, linear gates, V-first float32 states."""

    def __init__(self, path: str | None):
        try:
            module = importlib.import_module("flashinfer.gdn_prefill")
        except ImportError as error:
            raise Absent(f"import flashinfer: {error}") from error
        self.function = module.chunk_gated_delta_rule
        self.version = _version("flashinfer-python")

    def prepare_forward(self, x):
        import torch

        if x.cu_seqlens is None:
            raise Absent("flashinfer takes packed inputs only")
        state = None if x.initial_state is None else x.initial_state.transpose(-1, -2).contiguous()
        q, k, v, gate, beta = x.q[0], x.k[0], x.v[0], x.g[0].exp(), x.beta[0].contiguous()
        cu_seqlens = x.cu_seqlens.to(torch.int64)

        def call():
            o, ht = self.function(
                q, k, v, g=gate, beta=beta, scale=x.scale, initial_state=state, output_final_state=True,
                cu_seqlens=cu_seqlens,
            )  # fmt: skip
            return {"o": o.unsqueeze(0), "ht": ht.transpose(-1, -2)}

        return call

    def prepare_backward(self, x):
        raise Absent("flashinfer has no backward")

    prepare_both = prepare_backward


def _forward(function, arguments: dict) -> dict:
    import torch

    with torch.inference_mode():
        o, ht = function(**arguments, output_final_state=True)
    return {"o": o, "ht": ht}


def _arguments(x) -> dict:
    return {**x.kwargs}


def _leaves(x) -> dict:
    names = ("q", "k", "v", "beta", "g", "initial_state")
    leaves = {name: getattr(x, name) for name in names}
    return {"dh0" if n == "initial_state" else f"d{n}": leaf for n, leaf in leaves.items() if leaf is not None}


def _forward_backward(function, x):
    import torch

    leaves = _leaves(x)
    outputs = function(**_arguments(x), output_final_state=True)
    return dict(zip(leaves, torch.autograd.grad(outputs, list(leaves.values()), [x.do, x.dht])))


def _version(*distributions: str) -> str:
    for name in distributions:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return "unknown"


class References:
    """What float64 gives for a row's inputs: the first library that needs it computes it, the others read a file.

    The passes of one row size have the same inputs, so its reference, the slow part of a check, is needed once. Files
    are memory-mapped float32 (the tolerances are 1e-4 and more); the newest one stays on the device.
    """

    def __init__(self, device):
        self.device, self.path, self.newest = device, None, {}

    def get(self, path: str | None, compute, gradients: bool) -> dict:
        """Returns name -> tensor; `compute(gradients)` runs when nobody wrote the file yet, or there is none."""
        if path is None:
            return compute(gradients)
        if path != self.path:
            self.newest = self._load(Path(path)) if Path(path).exists() else {}
            self.path = path
        if not self.newest or (gradients and "dq" not in self.newest):
            self.newest = compute(gradients)
            self._save(Path(path), self.newest)
        return self.newest

    def _save(self, path: Path, tensors: dict):
        """Values first, then the index that says they are complete."""
        index = {name: None if t is None else list(t.shape) for name, t in tensors.items()}
        values = self._map(path, sum(t.numel() for t in tensors.values() if t is not None))
        for t, part in zip(tensors.values(), self._parts(values, index.values()), strict=True):
            if t is not None:
                part.copy_(t)
        partial = path.with_suffix(".part")
        partial.write_text(json.dumps(index))
        partial.rename(path)

    def _load(self, path: Path) -> dict:
        index = json.loads(path.read_text())
        sizes = [math.prod(shape) for shape in index.values() if shape is not None]
        values = self._map(path, sum(sizes)).to(self.device)
        return dict(zip(index, self._parts(values, index.values()), strict=True))

    @staticmethod
    def _map(path: Path, size: int):
        import torch

        return torch.from_file(str(path.with_suffix(".values")), shared=True, size=max(1, size), dtype=torch.float32)

    @staticmethod
    def _parts(values, shapes):
        start = 0
        for shape in shapes:
            if shape is None:
                yield None
            else:
                yield values[start : start + math.prod(shape)].view(shape)
                start += math.prod(shape)


class Bench:
    """Answers requests for one library on one device."""

    def __init__(self, library: str, path: str | None, device: str):
        self.workloads, self.compare, self.timing, self.floors = load_own_modules()
        import torch

        self.torch, self.device, self.name = torch, torch.device(device), library
        if self.device.type == "cuda" and not torch.cuda.is_available():
            raise Absent("torch sees no CUDA device")
        if library == "original" and not path:
            raise Absent("no folder given (--original or PEER_QLA)")
        if library == "ours" and self.device.type == "cuda":
            os.environ.setdefault("FLASH_QLA_BACKEND", "kernels")  # an error rather than the time of PyTorch
        make = {"ours": FlashQla, "original": FlashQla, "fla": Fla, "flashinfer": FlashInfer}[library]
        self.library = make(None if library == "ours" else path)
        self.references = References(self.device)
        self.seconds: dict[str, float] = {}
        self.answered = False

    def describe(self) -> dict:
        """Versions and device, for the report's head."""
        torch = self.torch
        info = {"library": self.name, "version": self.library.version, "python": platform.python_version()}
        info |= {"torch": torch.__version__, "cpu_threads": torch.get_num_threads()}
        for name in ("tilelang", "triton"):
            info[name] = _version(name)
        if self.device.type == "cuda":
            info["gpu"] = torch.cuda.get_device_name(self.device)
            info["driver"] = _driver()
        return info

    def run(self, request: dict) -> dict:
        """Answers a request; failures are answers too.

        {"row": …, "seed": …, "mode": "warm" | "measure", "repeats": N, "reference": path or None, "gradients": whether
        the reference will serve a backward as well}.
        """
        workload = self.workloads.Workload(**request["row"])
        answer = {"row": workload.id, "library": self.name}
        self.seconds = {}
        try:
            with self._stream():
                answer |= self._measure(workload, request)
        except Absent as error:
            answer["absent"] = str(error)
        except Exception as error:
            traceback.print_exc()
            answer["error"] = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        start = time.monotonic()
        gc.collect()
        if not self.answered:  # what the first row loaded stays: later collections need not look at it
            gc.freeze()
            self.answered = True
        if self.device.type == "cuda":
            self.torch.cuda.empty_cache()
        answer["seconds"] = {**self.seconds, "clearing": time.monotonic() - start}
        if self.name == "fla" and "flash_qla" in sys.modules:
            answer["error"] = "fla imported flash_qla: these are not the times of its own kernels"
        return answer

    def _stream(self):
        if self.device.type != "cuda":
            return contextlib.nullcontext()
        return self.torch.cuda.stream(self.torch.cuda.Stream(self.device))

    @contextlib.contextmanager
    def _part(self, name: str):
        """Counts the seconds of a part of a row: where a run's time goes is in its results."""
        start = time.monotonic()
        yield
        self.timing.synchronize(self.device)
        self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - start

    def _measure(self, workload, request) -> dict:
        seed, only_warm, repeats = request["seed"], request["mode"] == "warm", request.get("repeats")
        count = self.timing.num_input_sets(self.floors.input_bytes(workload))
        if only_warm or repeats is not None:
            count = 1 if only_warm else min(count, repeats)
        with self._part("inputs"):
            sets = [workload.make(device=self.device, seed=seed + 1000 * n) for n in range(count)]
            # One cu_seqlens for all sets: libraries cache what they derive from it by the tensor's identity.
            sets = [replace(x, cu_seqlens=sets[0].cu_seqlens) for x in sets]
        with self._part("first call"):
            calls = [self._prepare(workload.passes, x) for x in sets]
            results = calls[0]()
        if only_warm:
            return {"warm": True}
        answer = {"check": self._check(sets[0], results, request.get("reference"), request.get("gradients", False))}
        del results
        replays, eager = repeats or self.timing.REPLAYS, repeats or self.timing.EAGER_CALLS
        with self._part("timing"):
            gc.collect()
            answer["gpu"] = asdict(self.timing.gpu_time(calls, self.device, replays=replays))
            answer["eager"] = asdict(self.timing.wall_time(calls, self.device, repeats=eager))
            answer["host"] = asdict(self.timing.host_time(calls[0], self.device, repeats=eager))
            answer["peak_bytes"] = self.timing.peak_memory(calls[0], self.device)
        answer["input_sets"] = count
        return answer

    def _prepare(self, passes, x):
        if passes == "bwd":
            return self.library.prepare_backward(x)
        if passes == "fwdbwd":
            return self.library.prepare_both(x)
        return self.library.prepare_forward(x)

    def _check(self, x, results, reference, backward_follows) -> dict:
        """Compares with the chunked algorithm in float64 on (some of) the heads; every element must be finite."""
        with self._part("reference"):
            v_heads, k_heads = self._checked_heads(x)
            wide = functools.partial(_heads_in_float64, x, v_heads, k_heads)
            expected = self.references.get(
                reference,
                lambda gradients: self.compare.chunked_reference(wide(), gradients=gradients),
                "dq" in results or backward_follows,
            )
        with self._part("comparison"):
            return self._compare(x, results, expected, v_heads, k_heads)

    def _compare(self, x, results, expected, v_heads, k_heads) -> dict:
        torch, actual = self.torch, {}
        finite = all(bool(torch.isfinite(t).all()) for t in results.values() if t is not None)
        for name, t in results.items():
            axis = self.compare.HEAD_AXIS.get(name, 2)
            actual[name] = None if t is None else t.index_select(axis, k_heads if name in ("dq", "dk") else v_heads)
        gradients = "dq" in results
        compared = self.compare.compare_all(actual, expected, x.q.dtype)
        errors = {c.name: float(c.errors[c.worst_head]) for c in compared if c.errors.numel()}
        if self.name == "ours":
            passed = all(c.passed for c in compared)
        else:
            passed = all(bool((c.errors <= PEER_LIMIT).all()) for c in compared)
        missing = [name for name in (("dq", "dk", "dv", "dg", "dbeta", "dh0") if gradients else ("o", "ht"))
                   if name not in actual]  # fmt: skip
        return {
            "passed": bool(finite and passed and not missing),
            "finite": finite,
            "errors": errors,
            "failed": [str(c) for c in compared if not c.passed],
            "v_heads": len(v_heads),
            "of_v_heads": x.v.shape[2],
        }

    def _checked_heads(self, x):
        """Index tensors of value heads and key heads: whole groups, evenly spaced, one without decay among them."""
        torch = self.torch
        num_k_heads, num_v_heads = x.q.shape[2], x.v.shape[2]
        group = num_v_heads // num_k_heads
        count = CHECKED_HEAD_TOKENS // max(1, x.q.shape[0] * x.q.shape[1] * group)
        if count >= num_k_heads:
            chosen = set(range(num_k_heads))
        else:
            count = max(1, count)
            chosen = {n * num_k_heads // count for n in range(count)}
            no_decay = (x.g == 0).all(dim=1).all(dim=0).nonzero().flatten().tolist()
            chosen |= {head // group for head in no_decay[:1]}
        k_heads = torch.tensor(sorted(chosen), device=self.device)
        v_heads = (k_heads[:, None] * group + torch.arange(group, device=self.device)).flatten()
        return v_heads, k_heads


def _heads_in_float64(x, v_heads, k_heads):
    changes = {name: getattr(x, name).index_select(2, k_heads).double() for name in ("q", "k")}
    changes |= {name: getattr(x, name).index_select(2, v_heads).double() for name in ("v", "g", "beta", "do")}
    changes |= {"dht": x.dht.index_select(1, v_heads).double()}
    if x.initial_state is not None:
        changes["initial_state"] = x.initial_state.index_select(1, v_heads).double()
    return replace(x, **changes)


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.split()[0]
    except (OSError, IndexError, subprocess.TimeoutExpired):
        return "unknown"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--library", choices=LIBRARIES, required=True)
    parser.add_argument("--path", help="folder that holds the library's package (not for ours)")
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not mix with the answers

    def send(answer):
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    try:
        bench = Bench(args.library, args.path, args.device)
        send({"ready": bench.describe()})
    except Absent as error:
        return send({"absent": str(error)})
    except Exception as error:
        traceback.print_exc()
        return send({"absent": f"{type(error).__name__}: {error}".splitlines()[0][:300]})
    for line in sys.stdin:
        send(bench.run(json.loads(line)))


if __name__ == "__main__":
    main()
