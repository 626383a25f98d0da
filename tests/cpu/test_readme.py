"""The README does what it says: its examples run as printed, its table is env.py's, its paths exist."""

import importlib
import inspect
import re
from pathlib import Path

import pytest

from flash_qla import chunk_gated_delta_rule, env
from tests.case_inputs import run_python

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
FOLDERS = ("flash_qla", "coefs", "tests", "benchmark", "profile", "tools")
EXAMPLES = re.findall(r"^```python\n(.*?)^```", README, re.M | re.S)


@pytest.mark.parametrize("number", range(len(EXAMPLES)), ids=["first_screen", *map(str, range(1, len(EXAMPLES)))])
def test_example_runs_as_printed(number):
    output = run_python(EXAMPLES[number])
    if number == 0:
        assert "torch.Size([1, 1000, 4, 128]) torch.Size([1, 4, 128, 128])" in output


def test_first_screen():
    """A reader sees the commands and a short example before the first scroll."""
    screen = README.split("\n## ")[0]
    assert "bash tools/quickstart.sh" in screen and "bash tools/run_tests.sh" in screen
    assert len(screen.splitlines()) < 50
    lines = [line for line in EXAMPLES[0].splitlines() if line]
    assert EXAMPLES[0] in screen and len(lines) <= 12


def test_environment_table_is_env_py():
    expected = [f"| `{name}` | `{default}` | {meaning} |" for name, (default, meaning) in env.VARIABLES.items()]
    found = [line for line in README.splitlines() if line.startswith("| `FLASH_QLA_")]
    assert found == expected, "paste this into README.md:\n" + "\n".join(expected)


def test_every_argument_is_listed():
    table = README.split("## API")[1].split("\n## ")[0]
    listed = re.findall(r"`(\w+)`", " ".join(re.findall(r"^\| (`[^|]*)\|", table, re.M)))
    wanted = [p.name for p in inspect.signature(chunk_gated_delta_rule).parameters.values() if p.kind != p.VAR_KEYWORD]
    assert [name for name in wanted if name not in listed] == []


def test_the_contexts_module_is_named():
    (module,) = re.findall(r"`build_cp_context\(g=…\)` \(of `([\w.]+)`\)", README)
    assert callable(importlib.import_module(module).build_cp_context)


def test_every_variable_of_the_code_is_listed():
    named = set()
    for path in (ROOT / "flash_qla").rglob("*.py"):
        named |= set(re.findall(r"\bFLASH_QLA_[A-Z_]+\b", path.read_text(encoding="utf-8")))
    assert named - set(env.VARIABLES) == set()


def test_named_paths_exist():
    """Of the forms `folder/`, `folder/file.ext` and `tools/x.sh`; names without a slash are relative to their row."""
    paths = set(re.findall(rf"`(?:bash |python )?((?:{'|'.join(FOLDERS)})/[\w./-]*)", README))
    assert "flash_qla/ops/gated_delta_rule/README.md" in paths
    # flash_qla/coefs is where an installed wheel has coefs/.
    assert sorted(path for path in paths - {"flash_qla/coefs"} if not (ROOT / path).exists()) == []


def test_map_names_every_folder():
    rows = README.split("## Developer guide")[1]
    # A folder with no file yet is not in a clone.
    folders = [name for name in FOLDERS if any(path.is_file() for path in (ROOT / name).rglob("*"))]
    assert len(folders) >= 4
    assert [name for name in folders if f"`{name}/" not in rows] == []
