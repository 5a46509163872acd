#!/usr/bin/env bash
# scripts/setup.sh [EXTRAS]: makes .venv in this checkout and installs distca_hf with the given extras; used by the other
# scripts. PYTHON names the interpreter (3.11 or newer; default python3).
set -euo pipefail
cd "$(dirname "$0")/.."
extras=${1:-}
python=${PYTHON:-python3}

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "scripts/setup.sh: $("$python" --version) is too old; set PYTHON to an interpreter of version 3.11 or newer" >&2
    exit 1
}
echo "installing into .venv (about a minute when it is new)"
[ -x .venv/bin/python ] || "$python" -m venv .venv
pip() { .venv/bin/python -m pip --disable-pip-version-check --quiet "$@"; }
if ! command -v nvidia-smi >/dev/null && ! .venv/bin/python -c 'import torch' 2>/dev/null; then
    pip install 'torch==2.13.0' # without a GPU: the version that is tested on the CPU
fi
pip install --editable ".${extras:+[$extras]}"
