#!/usr/bin/env bash
# Installs flash_qla, trains a small Gated DeltaNet on text that is on this machine, and checks the operator's numbers.
# Further arguments go to tools/quickstart.py: --steps N, --device cpu|cuda, --backend auto|reference|kernels, --seed N.
# Which Python and which torch: see tools/common.sh.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

choose_python
cd "$REPO"
install_package
print_setup
exec "$PYTHON" tools/quickstart.py "$@"
