#!/usr/bin/env bash
# scripts/test.sh [PYTEST ARGUMENTS]: installs into .venv, then checks style and types and runs the test suite in two
# processes.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh test
.venv/bin/ruff check .
.venv/bin/ruff format --check .
.venv/bin/mypy
# Whole files, so that what tests of a file share is made once; in their order, which begins with the long ones.
exec .venv/bin/pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder "$@"
