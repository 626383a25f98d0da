"""What a change did to the generated CUDA: a unified diff over every kernel variant; needs nvcc (or a warm cache).

    python tools/diff_source.py HEAD                     HEAD against the working tree
    python tools/diff_source.py v0.2.0 main              two revisions
    python tools/diff_source.py --save FOLDER            keep the working tree's sources
    python tools/diff_source.py FOLDER                   a kept folder against the working tree

Exit status 0 when nothing differs, 1 when something does, 2 when a variant could not be generated.
"""

from __future__ import annotations

import argparse
import difflib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WORKING_TREE = "the working tree"
# Runs in a process of its own: the revision's flash_qla must be the only one, this checkout's compiled.py reads it.
_GENERATE = """
import importlib.util, pathlib, sys
if __name__ == "__main__":
    sys.path[:0] = [sys.argv[1], sys.argv[2]]
    import flash_qla_compiled as compiled
    jobs = int(sys.argv[5])
    failures = compiled.write_sources(pathlib.Path(sys.argv[3]), sys.argv[4], jobs)
    for name, reason in failures.items():
        if reason:
            print(f"{name}: {reason}", file=sys.stderr)
    sys.exit(any(failures.values()))
"""


def generate(tree: Path, folder: Path, options) -> bool:
    """Writes the sources of the checkout `tree`. Returns whether all could be generated."""
    with tempfile.TemporaryDirectory() as scratch:
        reader = Path(scratch) / "flash_qla_compiled.py"
        reader.write_text((ROOT / "flash_qla/testing/compiled.py").read_text())
        script = Path(scratch) / "generate.py"
        script.write_text(_GENERATE)
        command = [sys.executable, str(script), str(tree), scratch, str(folder), options.only, str(options.jobs)]
        paths = [str(tree), scratch, *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        return subprocess.run(command, cwd=scratch, env=environment).returncode == 0


def check_out(revision: str, folder: Path) -> None:
    """Unpacks a revision's package. Raises SystemExit for what git does not know."""
    done = subprocess.run(["git", "-C", str(ROOT), "archive", revision, "flash_qla"], capture_output=True)
    if done.returncode:
        sys.exit(f"{revision!r} is neither a folder nor a revision: {done.stderr.decode().strip()}")
    folder.mkdir(parents=True)
    subprocess.run(["tar", "-x", "-C", str(folder)], input=done.stdout, check=True)


def side(name: str, scratch: Path, options) -> tuple[Path, bool]:
    """Returns the folder of one side's sources and whether it is complete."""
    if name != WORKING_TREE and Path(name).is_dir():
        return Path(name), True
    tree = ROOT
    if name != WORKING_TREE:
        tree = scratch / "tree"
        check_out(name, tree)
    return scratch / "cuda", generate(tree, scratch / "cuda", options)


def difference(old: Path, new: Path, names: tuple[str, str], context: int) -> list[str]:
    """Returns the diff's lines: variants of one side alone, then what changed in the others."""
    files = [{path.name: path for path in folder.glob("*.cu")} for folder in (old, new)]
    lines = [f"only in {names[0]}: {name}" for name in sorted(files[0].keys() - files[1].keys())]
    lines += [f"only in {names[1]}: {name}" for name in sorted(files[1].keys() - files[0].keys())]
    same = 0
    for name in sorted(files[0].keys() & files[1].keys()):
        texts = [each[name].read_text().splitlines() for each in files]
        changed = list(difflib.unified_diff(*texts, f"{names[0]}/{name}", f"{names[1]}/{name}", lineterm="", n=context))
        lines += changed
        same += not changed
    print(f"{same} variants are the same in {names[0]} and {names[1]}", file=sys.stderr)
    return lines


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], epilog=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("old", nargs="?", default="HEAD", help="revision or kept folder")
    parser.add_argument("new", nargs="?", default=WORKING_TREE, help="revision or kept folder")
    parser.add_argument("--save", type=Path, metavar="FOLDER", help="write the working tree's sources there and stop")
    parser.add_argument("--only", default="", metavar="REGEX", help="only variants whose name matches")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes")
    parser.add_argument("--context", type=int, default=3, help="lines around each change")
    options = parser.parse_args(argv)
    if options.save:
        return 0 if generate(ROOT, options.save.resolve(), options) else 2
    with tempfile.TemporaryDirectory() as scratch:
        folders, complete = zip(
            *(side(n, Path(scratch) / s, options) for n, s in ((options.old, "a"), (options.new, "b")))
        )
        lines = difference(*folders, (options.old, options.new), options.context)
    print("\n".join(lines)) if lines else None
    if not all(complete):
        return 2
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())
