#!/usr/bin/env bash
# scripts/quickstart.sh: installs into .venv and trains a small Llama on Python's own sources with two CPU processes,
# once with distca and once with sdpa. No GPU, no downloads but the packages. Writes to quickstart_output/.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh report
echo "Starting two processes, which import torch and Transformers ..."
.venv/bin/accelerate launch --config_file recipes/accelerate/cpu_2proc.yaml \
    -m distca_hf.run --recipe recipes/train/quickstart.yaml examples/quickstart.py "$@"
