#!/usr/bin/env bash
# Installs the test extra and runs pytest; further arguments go to pytest (bash tools/run_tests.sh -x tests/cpu).
# Which Python and which torch: see tools/common.sh.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

choose_python
cd "$REPO"
install_package test pytest xdist pytest_timeout hypothesis ruff build tqdm matplotlib
has pytest || die "pytest is missing in $PYTHON" \
  "Activate a virtual environment (python3 -m venv .venv && . .venv/bin/activate) and run this again."
# CI promises that kernels are lowered: a missing nvcc fails there and skips elsewhere.
if [ "${CI:-}" = true ]; then export FLASH_QLA_REQUIRE_NVCC=${FLASH_QLA_REQUIRE_NVCC:-1}; fi
print_setup
say "pytest $*"
exec "$PYTHON" -m pytest "$@"
