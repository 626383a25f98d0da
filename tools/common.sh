# Sourced by quickstart.sh, run_tests.sh and .ci/run: chooses a Python, installs what is missing, says what it uses.
#
# Which Python: the active virtual or conda environment; else the current python3 when torch and the other dependencies
# are already in it (then nothing is installed there but missing test tools, and flash_qla runs from this checkout);
# else .venv in this checkout, made at the first run. An installed torch is always kept.
#
# Environment: PYTHON names another interpreter, TORCH_SPEC the torch to install where there is none.

REPO=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
VENV=$REPO/.venv
DEPENDENCIES=(torch tilelang tvm_ffi numpy)
# Threads that spin while they wait make small operations ten times slower on a machine that is busy with other work.
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-PASSIVE}
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore

say() { printf '==> %s\n' "$*"; }

# die "what went wrong" "what to do" ...
die() {
  printf '\nerror: %s\n' "$1" >&2
  shift
  for line in "$@"; do printf '  %s\n' "$line" >&2; done
  exit 1
}

# has MODULE...: whether $PYTHON finds all of them; imports none. From /, since a build/ folder here looks like a module.
has() {
  (cd / && "$PYTHON" -c 'import importlib.util, sys
sys.exit(any(importlib.util.find_spec(m) is None for m in sys.argv[1:]))' "$@")
}

has_gpu() { command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q GPU; }

# Sets PYTHON, and IN_PLACE=1 where flash_qla runs from the checkout without being installed.
choose_python() {
  IN_PLACE=0
  if [ -z "${PYTHON:-}" ]; then
    PYTHON=$(command -v python3 || command -v python) ||
      die "there is no python3 on PATH" "Install Python 3.10 or newer, or run with PYTHON=/path/to/python3."
    # An active environment may offer `python` alone, or come after another python3.
    for prefix in "${VIRTUAL_ENV:-}" "${CONDA_PREFIX:-}"; do
      if [ -n "$prefix" ] && [ -x "$prefix/bin/python" ]; then PYTHON=$prefix/bin/python && break; fi
    done
  fi
  command -v "$PYTHON" >/dev/null || die "PYTHON=$PYTHON is no program" "Unset PYTHON, or name a Python 3.10 or newer."
  "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
    die "flash_qla needs Python 3.10 or newer; $PYTHON is $("$PYTHON" -V 2>&1)" \
      "Run again with PYTHON=/path/to/a/newer/python3."
  if "$PYTHON" -c 'import os, sys
conda = os.environ.get("CONDA_PREFIX")
sys.exit(not (sys.prefix != sys.base_prefix or conda and os.path.realpath(conda) == os.path.realpath(sys.prefix)))'; then
    say "using the environment of $PYTHON"
  elif has "${DEPENDENCIES[@]}"; then
    IN_PLACE=1
    say "using $PYTHON, which has torch and the other dependencies; flash_qla runs from $REPO"
  else
    # The environment sees the packages outside it only where that saves installing torch a second time.
    local sees=()
    if has torch; then sees=(--system-site-packages); fi
    if [ ! -x "$VENV/bin/python" ]; then
      say "making the virtual environment $VENV"
      "$PYTHON" -m venv "${sees[@]+"${sees[@]}"}" "$VENV" ||
        die "could not make $VENV" "On Debian or Ubuntu: apt-get install python3-venv" \
          "Or activate an environment of your own and run this again."
    fi
    PYTHON=$VENV/bin/python
    say "using the environment of $PYTHON"
  fi
}

pip_install() {
  "$PYTHON" -m pip install "$@" ||
    die "pip could not install: $*" \
      "Check the network, and pip's own settings (pip config list)." \
      "To choose another torch: TORCH_SPEC='torch==2.13.0' (a wheel's path or address works too)." \
      "Or install torch, tilelang, apache-tvm-ffi and numpy in an environment of your own, activate it, run this again."
}

# install_package [EXTRA MODULE...]: torch where there is none, then this package with the extra whose MODULEs are given.
install_package() {
  local extra=${1:-}
  [ $# -eq 0 ] || shift
  if ! has torch; then
    # Without a GPU any build does, so take the release that is tested; with one, pip's newest fits newest drivers.
    local default='torch==2.13.0'
    if has_gpu; then default='torch>=2.8'; fi
    say "installing ${TORCH_SPEC:=$default} (set TORCH_SPEC to choose another; the default build can be gigabytes)"
    pip_install "$TORCH_SPEC"
  elif ! "$PYTHON" -c 'import importlib.metadata as m
import sys
sys.exit(tuple(map(int, m.version("torch").split(".")[:2])) < (2, 8))'; then
    die "the torch in $PYTHON is older than 2.8, which flash_qla needs" \
      "Update it (pip install -U torch), or activate another environment and run this again."
  elif [ -n "${TORCH_SPEC:-}" ]; then
    say "keeping the installed torch; TORCH_SPEC=$TORCH_SPEC is for environments without one"
  fi
  if [ "$IN_PLACE" = 1 ]; then
    export PYTHONPATH=$REPO${PYTHONPATH:+:$PYTHONPATH}
    local missing=()
    for module in "$@"; do has "$module" || missing+=("${module/#xdist/pytest-xdist}"); done
    if [ ${#missing[@]} -gt 0 ]; then
      say "installing ${missing[*]}"
      "$PYTHON" -m pip install -q "${missing[@]}" ||
        say "could not install ${missing[*]}: going on without (to have them, run this in a virtual environment)"
    fi
    return
  fi
  if has "${DEPENDENCIES[@]}" "$@" && (cd / && "$PYTHON" -c 'import importlib.util, os, sys
spec = importlib.util.find_spec("flash_qla")
sys.exit(spec is None or not os.path.samefile(os.path.dirname(spec.origin), sys.argv[1]))' "$REPO/flash_qla"); then
    return
  fi
  say "installing flash_qla from $REPO${extra:+ with the extra [$extra]}"
  # pip would swap torch when a dependency asks for another one: a constraint makes it stay.
  local constraint
  constraint=$(mktemp)
  "$PYTHON" -c 'import importlib.metadata as m; print("torch==" + m.version("torch"))' >"$constraint"
  pip_install -q -c "$constraint" -e "$REPO${extra:+[$extra]}"
  rm -f "$constraint"
}

# Prints device, backend and versions; ends the script with advice when a dependency does not load.
print_setup() {
  "$PYTHON" "$REPO/tools/describe.py" ||
    die "the installation does not work (see above)" \
      "In an environment that this script made: rm -r $VENV, then run it again." \
      "torch and tilelang must fit each other: tested are torch 2.11 and 2.13 with tilelang 0.1.15."
}
