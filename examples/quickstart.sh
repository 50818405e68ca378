#!/usr/bin/env bash
# From a clone to a running model: environment, install, export, optimize, run, check, list the kernels.
set -eu
cd "$(dirname "$0")/.."
if [ ! -x .venv/bin/python ]; then
  "${PYTHON:-python3}" -m venv .venv
fi
.venv/bin/python -m pip install --quiet --upgrade pip
.venv/bin/python -m pip install --quiet -e ".[test]"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" HF_HUB_OFFLINE=1
.venv/bin/python examples/llama.py --out build/llama.bundle "$@"
.venv/bin/topo-run build/llama.bundle --kernels
