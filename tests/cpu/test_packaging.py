"""What is packed, under which version and with which metadata; and what lies in the repository."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

from tests.case_inputs import HANG_S

ROOT = Path(__file__).resolve().parents[2]
TOP_LEVEL = {
    *("flash_qla", "coefs", "tests", "benchmark", "profile", "tools", "setup.py", "pyproject.toml", "pytest.ini"),
    *(".pre-commit-config.yaml", "README.md", "LICENSE", ".ci", ".gitignore", "MANIFEST.in"),
}
HASH = "[0-9a-f]{7,}"


# pip asks no index: everything that is needed is installed, and a network that is slow or away is no fault of ours.
# git reads no settings of whoever runs the tests (hooks, signing), nor, inside a hook, that repository's variables.
APART = {"PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "GIT_CONFIG_GLOBAL": os.devnull}
APART |= {"GIT_CONFIG_NOSYSTEM": "1", "GIT_DIR": None, "GIT_WORK_TREE": None, "GIT_INDEX_FILE": None}


def _run(*command, cwd, **environment):
    """Runs a command with the environment changed; a None removes the variable. Returns its output."""
    values = {**os.environ, **APART, **environment}
    values = {name: value for name, value in values.items() if value is not None}
    command = [str(c) for c in command]
    done = subprocess.run(command, cwd=cwd, env=values, capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0, f"{command} failed:\n{done.stdout}\n{done.stderr}"
    return done.stdout.strip()


def _version(folder, **environment):
    environment = {"QLA_VERSION_SUFFIX": None, **environment}
    return _run(sys.executable, "setup.py", "--version", cwd=folder, **environment).splitlines()[-1]


def _base_version():
    return re.search(r'^__version__ = "(.+)"$', (ROOT / "flash_qla/version.py").read_text(), re.M).group(1)


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """A copy of what is packed and of what must not be, with no git and no earlier build."""
    folder = tmp_path_factory.mktemp("sources")
    junk = shutil.ignore_patterns("__pycache__", "*.egg-info", "build", "dist", ".*")
    for name in TOP_LEVEL - {".ci", ".gitignore", ".pre-commit-config.yaml"}:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=junk)
        elif source.exists():
            shutil.copy(source, folder / name)
    # The planner's tables may not be measured yet: one more shows that they are packed.
    (folder / "coefs/sm00.csv").write_text("kernel,a,b,c,P,chunk,arch\n")
    return folder


@pytest.fixture(scope="module")
def sdist(sources, tmp_path_factory):
    """(unpacked sdist, its member names), made with a suffix."""
    out = tmp_path_factory.mktemp("sdist")
    _run(sys.executable, "setup.py", "-q", "sdist", "-d", out, cwd=sources, QLA_VERSION_SUFFIX="+packed")
    (archive,) = out.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        names = tar.getnames()
        tar.extractall(out, filter="data") if hasattr(tarfile, "data_filter") else tar.extractall(out)
    return out / archive.name.removesuffix(".tar.gz"), names


@pytest.fixture(scope="module")
def wheel(sdist, tmp_path_factory):
    """The wheel, built from the sdist as an installer of a source release does."""
    out = tmp_path_factory.mktemp("wheel")
    command = (sys.executable, "-m", "pip", "wheel", "-q", "--no-build-isolation", "--no-deps", "-w", out, ".")
    # A torch that fails to import proves that the build needs none.
    (out / "blocked").mkdir()
    (out / "blocked/torch.py").write_text("raise ImportError('a build must not import torch')\n")
    _run(*command, cwd=sdist[0], PYTHONPATH=str(out / "blocked"), QLA_VERSION_SUFFIX=None)
    (archive,) = out.glob("*.whl")
    return zipfile.ZipFile(archive)


def test_wheel_content(wheel, sources):
    names = set(wheel.namelist())
    packed = {name for name in names if not name.split("/")[0].endswith(".dist-info")}
    expected = {str(path.relative_to(sources)) for path in (sources / "flash_qla").rglob("*.py")}
    expected |= {f"flash_qla/coefs/{path.name}" for path in (sources / "coefs").iterdir()}
    readme = "flash_qla/ops/gated_delta_rule/README.md"
    expected |= {readme} if (sources / readme).exists() else set()
    expected |= {"flash_qla/py.typed"}  # without it, type checkers ignore our annotations
    assert packed == expected
    assert "flash_qla/coefs/sm00.csv" in packed
    assert {name.split("/")[1] for name in names - packed} >= {"METADATA", "WHEEL", "RECORD"}
    assert any(name.endswith("LICENSE") for name in names - packed)


def test_wheel_metadata(wheel):
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    metadata = Parser().parsestr(wheel.read(name).decode())
    assert metadata["Name"] in ("flash-qla", "flash_qla")
    assert metadata["Version"] == _base_version() + "+packed", "a wheel built from an sdist keeps the sdist's version"
    assert metadata["Requires-Python"] == ">=3.10"
    assert "MIT" in (metadata["License-Expression"] or metadata["License"])
    requirements = metadata.get_all("Requires-Dist")
    base = {re.sub(r"\s", "", r) for r in requirements if "extra" not in r}
    assert base == {"torch>=2.8", "tilelang>=0.1.12", "apache-tvm-ffi", "numpy"}
    assert set(metadata.get_all("Provides-Extra")) == {"test", "bench", "nvcc"}
    assert any(r.startswith("tilelang[nvcc]") and "nvcc" in r.split(";")[1] for r in requirements)
    (tags,) = (wheel.read(name).decode() for name in wheel.namelist() if name.endswith(".dist-info/WHEEL"))
    assert "Root-Is-Purelib: true" in tags and "Tag: py3-none-any" in tags


def test_sdist_content(sdist):
    names = {name.partition("/")[2] for name in sdist[1]}
    assert {"setup.py", "pyproject.toml", "README.md", "LICENSE", "flash_qla/version.py", "coefs/sm00.csv"} <= names
    assert not {name.split("/")[0] for name in names} & {"tests", "benchmark", "profile", "tools"}


def test_installed_wheel_finds_its_tables(wheel, tmp_path):
    """Installed, flash_qla/coefs is a folder of the package; in a checkout the same files lie at the top level."""
    wheel.extractall(tmp_path)
    code = "import importlib.resources as r; print(*(f.name for f in r.files('flash_qla').joinpath('coefs').iterdir()))"
    assert "sm00.csv" in _run(sys.executable, "-c", code, cwd=tmp_path, PYTHONPATH=str(tmp_path)).split()


def _copy_for_setup(folder):
    shutil.copy(ROOT / "setup.py", folder)
    shutil.copy(ROOT / "README.md", folder)
    for name in ("flash_qla", "coefs"):
        (folder / name).mkdir()
    shutil.copy(ROOT / "flash_qla/version.py", folder / "flash_qla")


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_version_suffix(tmp_path):
    identity = ("-c", "user.name=test", "-c", "user.email=test@example.com", "-c", "commit.gpgsign=false")
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    _copy_for_setup(checkout)
    assert _version(checkout) == _base_version(), "no git: no suffix"
    _run("git", "init", "-q", cwd=checkout)
    assert _version(checkout) == _base_version(), "no commit: no suffix"
    _run("git", *identity, "commit", "-q", "--allow-empty", "-m", "first", cwd=checkout)
    expected = rf"{re.escape(_base_version())}\+{HASH}"
    assert re.fullmatch(expected, _version(checkout))
    assert re.fullmatch(expected, _version(checkout, QLA_VERSION_SUFFIX=""))
    assert _version(checkout, QLA_VERSION_SUFFIX=".post1") == _base_version() + ".post1"
    # Python is started by its path; beside it, in an environment that has everything, there may be a git.
    assert _version(checkout, PATH=str(tmp_path / "empty")) == _base_version(), "no git program: no suffix"
    inner = checkout / "unpacked"
    inner.mkdir()
    _copy_for_setup(inner)
    assert _version(inner) == _base_version(), "the hash of a repository around an unpacked sdist is not ours"


def _tracked():
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    # Files that git would add count too: the test then speaks before the commit.
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    if listed.returncode:
        pytest.skip(f"git ls-files: {listed.stderr.strip()}")
    return [name for name in listed.stdout.splitlines() if (ROOT / name).exists()]


def test_top_level_of_the_repository():
    assert {name.split("/")[0] for name in _tracked()} <= TOP_LEVEL


def test_profile_is_no_package():
    """profile/__init__.py would shadow the standard library's profile module for whoever runs in the checkout."""
    assert "profile/__init__.py" not in _tracked()


def test_every_package_folder_has_an_init():
    """find_packages leaves a folder without __init__.py out of the wheel, and the checkout hides it."""
    folders = {Path(name).parent for name in _tracked() if name.startswith("flash_qla/") and name.endswith(".py")}
    assert [str(folder) for folder in folders if not (ROOT / folder / "__init__.py").exists()] == []


def test_no_file_names_a_machine():
    """Paths of the machine that a file was written on, and addresses of package registries, help nobody else."""
    pattern = re.compile(r"(?<![\w./])/(?:work|root|home)/\w+|\bpypi\.org|pythonhosted\.org|registry\.npmjs")
    found = []
    for name in _tracked():
        if name.endswith((".py", ".md", ".sh", ".toml", ".ini", ".yaml", ".in", ".csv", "run", "LICENSE", ".txt")):
            text = (ROOT / name).read_text(encoding="utf-8")
            found += [f"{name}: {match.group()}" for match in pattern.finditer(text)]
    assert found == []
