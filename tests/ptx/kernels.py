"""Interpreted kernels in the place of compiled ones: host wrappers and public functions then run on CPU tensors.

PTX comes from `nvcc -ptx` on the source that TileLang generates (its disk cache serves it), and is kept in the cache
folder too (`compiled.ptx`).
"""

from __future__ import annotations

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor

from flash_qla import arch as archs
from flash_qla.ops.gated_delta_rule.chunk import backend
from flash_qla.testing import compiled
from tests.launches import replace_launches

from .host import CompiledKernel
from .machine import Machine
from .program import parse

_kernels: dict = {}
_prepared: dict = {}


def kernel(make, spec) -> CompiledKernel:
    """The interpreted `make(spec)`, loaded once per process."""
    key = make, spec
    if key not in _kernels:
        host_source, ptx = _prepared.pop(key, None) or sources(key)
        _kernels[key] = CompiledKernel(Machine(parse(ptx)), host_source)
    return _kernels[key]


def sources(pair) -> tuple[str, str]:
    """Host source and PTX of (make, spec)."""
    variant = compiled.Variant("interpreted", *pair, archs.SM90)
    device_source, host_source = compiled.sources(variant)
    return host_source, compiled.ptx(device_source, archs.SM90.target, variant.pass_configs)


def prepare(pairs) -> None:
    """Compiles [(make, spec)] side by side, by processes of their own."""
    pairs = [pair for pair in pairs if pair not in _kernels and pair not in _prepared]
    with ProcessPoolExecutor(os.cpu_count() or 1, mp_context=multiprocessing.get_context("spawn")) as pool:
        _prepared.update(zip(pairs, pool.map(sources, pairs)))


def label(make, spec) -> str:
    """A kernel's name and which of its variants a spec chooses, dtypes and sizes apart."""
    name = make.__module__.rpartition(".")[2] + make.__name__.removeprefix("make")
    width = getattr(spec, "value_warpgroups", None)
    flags = ("persistent", "store_h", "is_backward", "ready")
    return " ".join([name, *([f"w{width}"] if width else []), *(x for x in flags if getattr(spec, x, False))])


def interpret(monkeypatch, num_sms: int = 132) -> list[str]:
    """Makes the kernels cover CPU tensors, for one test.

    Args:
        num_sms: multiprocessors of the pretended device; it decides which variants are launched.

    Returns:
        The labels of the launched kernels, in order; the list grows with every launch.
    """
    launched = []

    def build(make, spec, arch):
        run = kernel(make, spec)

        def launch(*arguments):
            launched.append(label(make, spec))
            run(*arguments)

        return launch

    replace_launches(monkeypatch, build, num_sms)
    monkeypatch.setattr(backend, "why_no_kernels", lambda problem: None)
    monkeypatch.setenv("FLASH_QLA_BACKEND", "kernels")
    return launched
