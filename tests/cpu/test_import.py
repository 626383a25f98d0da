"""Importing is cheap and safe on any machine, and imports inside the package go one way."""

import ast
import os
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.case_inputs import run_python

ROOT = Path(__file__).resolve().parents[2]
# 6,000 now (100 ms); making the dataclasses is the most of it.
IMPORT_CALLS = 18_000
CHUNK = "flash_qla.ops.gated_delta_rule.chunk"

CALL = """
q = k = torch.randn(1, 70, 1, 16)
g, beta = -torch.rand(1, 70, 1), torch.rand(1, 70, 1)
o, state = flash_qla.chunk_gated_delta_rule(q, k, q, g, beta, output_final_state=True)
assert o.shape == (1, 70, 1, 16) and state.shape == (1, 1, 16, 16) and torch.isfinite(o).all()
"""


def test_import_is_cheap_and_loads_no_compiler(tmp_path):
    """Compilers and CUDA wait for the first call that needs them. Cheap: no module but ours, and few calls.

    Calls of Python functions, not seconds: how fast the machine is, and what else it does, is not ours.
    """
    code = """
import sys
import torch
before, calls = set(sys.modules), 0
def count(frame, event, argument):
    global calls
    calls += event == "call"
sys.setprofile(count)
import flash_qla
sys.setprofile(None)
print(calls)
loaded = {name.split(".")[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names)
assert loaded == {"flash_qla"}, loaded
assert not torch.cuda.is_initialized()
assert flash_qla.__version__
"""
    assert int(run_python(code, cwd=tmp_path)) < IMPORT_CALLS


def test_import_asks_cuda_nothing():
    """Even a driver that raises at every question leaves the import alone; so does a machine without one."""
    code = """
import torch
def refuse(*args, **kwargs):
    raise AssertionError("import asked CUDA")
for name in ("_lazy_init", "init", "is_available", "device_count", "current_device", "get_device_capability",
             "get_device_properties", "get_device_name"):
    setattr(torch.cuda, name, refuse)
import flash_qla, flash_qla.ops.gated_delta_rule.chunk.cp, flash_qla.ops.utils, flash_qla.utils, flash_qla.testing
"""
    run_python(code, "-W", "error")
    run_python("import flash_qla", "-W", "error", CUDA_VISIBLE_DEVICES="")


# capability: (whether there are kernels, None for either answer; words of the reason where there are none)
CAPABILITIES = {
    (7, 5): (False, "below 8.0"),
    (8, 0): (None, "8.0"),
    (9, 0): (True, ""),
    (11, 0): (None, "11.0"),
    (12, 1): (None, "12.1"),
    (13, 7): (False, "13.7"),
}


def test_any_capability_imports_and_says_what_runs():
    """No GPU makes the import fail; the arch table answers, with a reason where it says no."""
    code = f"""
import sys
import torch
torch.cuda.is_available = lambda: True
torch.cuda.device_count = lambda: 1
torch.cuda.current_device = lambda: 0
for capability, (has_kernels, words) in {CAPABILITIES}.items():
    torch.cuda.get_device_capability = lambda device=None: capability
    for name in [name for name in sys.modules if name.partition(".")[0] == "flash_qla"]:
        del sys.modules[name]
    import flash_qla
    from flash_qla import arch
    row = arch.of_device(torch.device("cuda"))
    assert row.has_kernels == (row.reason is None)
    assert has_kernels in (None, row.has_kernels), row
    assert row.has_kernels or words in row.reason, row
    assert row.name == "sm" + "".join(map(str, capability)), row
{"".join("    " + line + chr(10) for line in CALL.strip().splitlines())}
    print(row.name)
"""
    assert len(run_python(code).split()) == len(CAPABILITIES)


@pytest.mark.parametrize("first", ["torch", "flash_qla"])
def test_either_import_order(first):
    second = {"torch": "flash_qla", "flash_qla": "torch"}[first]
    run_python(f"import {first}\nimport {second}\n{CALL}")


def test_works_under_optimisation(tmp_path):
    """-O drops assert statements: errors must not be asserts, and docstrings (-OO) must not be needed."""
    code = f"""
import torch, flash_qla
q = torch.randn(1, 8, 1, 16)
for head_first in (True,):
    try:
        flash_qla.chunk_gated_delta_rule(q, q, q, q[..., 0], q[..., 0], head_first=head_first)
    except ValueError:
        print("refused")
{CALL}
"""
    assert run_python(code, "-OO", cwd=tmp_path).strip() == "refused"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_forked_worker_can_import_and_call():
    """Data loaders and servers fork after importing: a CUDA context made by the import would break the children."""
    code = f"""
import os
import torch, flash_qla
torch.set_num_threads(1)
pid = os.fork()
if pid == 0:
    try:
        import flash_qla.ops.gated_delta_rule.chunk.cp
        assert not torch.cuda.is_initialized()
        assert not torch.cuda._is_in_bad_fork()
{"".join("        " + line + chr(10) for line in CALL.strip().splitlines())}
        if torch.cuda.is_available():
            torch.zeros(1, device="cuda").add_(1).item()
        os._exit(0)
    except BaseException:
        import traceback
        traceback.print_exc()
        os._exit(1)
_, status = os.waitpid(pid, 0)
assert status == 0, status
{CALL}
"""
    run_python(code)


def _modules():
    """Every module of the package: dotted name → path."""
    modules = {}
    for path in (ROOT / "flash_qla").rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return modules


def _imports(name, path, modules):
    """Modules of the package that a module imports, inside functions too."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join(above + ([node.module] if node.module else []))
            for alias in node.names:
                # `from package import module` is an import of the module, not of the package's facade.
                submodule = f"{base}.{alias.name}"
                found.add(submodule if submodule in modules else base)
    return {target for target in found if target in modules}


# From the bottom: a module imports only from layers below its own, or from its own where the layer is a folder.
LAYERS = [
    ("base", ["flash_qla.version", "flash_qla.env", "flash_qla.arch", "flash_qla.utils.", "flash_qla.utils"]),
    ("data", [f"{CHUNK}.{name}" for name in ("constants", "sequences", "split", "problem", "reference")]),
    ("tiles", [f"{CHUNK}.kernels.tiles", f"{CHUNK}.kernels.tiles."]),
    ("kernels", [f"{CHUNK}.kernels", f"{CHUNK}.kernels."]),
    ("backend", [f"{CHUNK}.backend", f"{CHUNK}.replay"]),
    ("cp", [f"{CHUNK}.cp", f"{CHUNK}.cp."]),
    ("driver", [f"{CHUNK}.forward", f"{CHUNK}.backward"]),
    ("autograd", [f"{CHUNK}.autograd"]),
    ("interface", [f"{CHUNK}.interface", f"{CHUNK}.stages", f"{CHUNK}.warmup", "flash_qla.ops.utils.cumsum"]),
    ("facade", [CHUNK, "flash_qla.ops.gated_delta_rule", "flash_qla.ops.utils", "flash_qla.ops", "flash_qla"]),
    ("testing", ["flash_qla.testing", "flash_qla.testing."]),
]
RANK = {layer: rank for rank, (layer, _) in enumerate(LAYERS)}
FOLDERS = {"base", "data", "tiles", "kernels", "cp", "facade", "testing"}


def _layer(name):
    for layer, members in LAYERS:
        if any(name == member or (member.endswith(".") and name.startswith(member)) for member in members):
            return layer
    raise AssertionError(f"{name} is in no layer: add it to LAYERS in {__file__}")


def test_imports_go_one_way():
    """interface → autograd → forward/backward → cp → kernels → tiles → arch, never back."""
    modules = _modules()
    wrong = []
    for name, path in modules.items():
        layer = _layer(name)
        for target in _imports(name, path, modules):
            below = _layer(target)
            if not (RANK[below] < RANK[layer] or (below == layer and layer in FOLDERS)):
                wrong.append(f"{name} ({layer}) imports {target} ({below})")
    assert wrong == []


def test_imports_have_no_cycle():
    """Inside a layer too: a package's facade counts as importing what it names, not what lies beside it."""
    modules = _modules()
    graph = {name: _imports(name, path, modules) - {name} for name, path in modules.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"import cycle: {' -> '.join(error.args[1])}")


def test_layers_see_every_kind_of_import(tmp_path):
    """The two tests above would pass on a parser that finds nothing."""
    modules = dict.fromkeys(("p", "p.a", "p.b", "p.q", "p.q.c"), Path())
    source = tmp_path / "d.py"
    source.write_text(
        "from . import c\nfrom ..a import x\nimport p.b\ndef f():\n    from .. import q\n    from p import y\n"
    )
    assert _imports("p.q.d", source, modules) == {"p.q.c", "p.a", "p.b", "p.q", "p"}


def test_checkout_is_what_these_tests_import():
    import flash_qla

    assert Path(flash_qla.__file__).is_relative_to(ROOT), "another flash_qla shadows this checkout"
