#!/usr/bin/env bash
# scripts/setup.sh [EXTRAS]: makes .venv in this checkout and installs distca_hf with the given extras; used by the
# other scripts. PYTHON names the interpreter (3.11 or newer; default python3).
set -euo pipefail
cd "$(dirname "$0")/.."
extras=${1:-}
python=${PYTHON:-python3}

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "scripts/setup.sh: $("$python" --version) is too old; set PYTHON to an interpreter of version 3.11 or newer" >&2
    exit 1
}

# Prints pip's lines about large packages as their download begins, and the end, which takes long.
show_progress() {
    local line file version size from packages
    while IFS= read -r line; do
        case $line in
        *Downloading*[MG]B\) | *"Using cached"*[MG]B\))
            file=${line%% (*}
            file=${file##*[ /]}
            version=${file#*-}
            [[ $line == *cached* ]] && from=", from the cache" || from=""
            size=${line##*(}
            echo "      ${file%%-*} ${version%%-*} (${size%)}$from)"
            ;;
        "Installing collected packages: "*)
            packages=${line//[^,]/}
            echo "      unpacking $((${#packages} + 1)) packages"
            ;;
        esac
    done
}
pip() { .venv/bin/python -m pip --disable-pip-version-check --no-color "$@" | show_progress; }

echo "[1/3] virtual environment: .venv"
[ -x .venv/bin/python ] || "$python" -m venv .venv
if command -v nvidia-smi >/dev/null || .venv/bin/python -c 'import torch' 2>/dev/null; then
    echo "[2/3] torch: the one that is there, or pip's choice for this GPU"
else
    echo "[2/3] torch 2.13.0, which is tested on CPUs"
    pip install 'torch==2.13.0'
fi
echo "[3/3] distca_hf, Transformers and what they need"
pip install --editable ".${extras:+[$extras]}"
echo "installed in $SECONDS s"
