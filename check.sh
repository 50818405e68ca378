#!/usr/bin/env bash
# Every check there is: format, lint, types, lit and pytest. Ends non-zero when any of them failed.
#
# Takes the environment that is active, else the one in .venv. Arguments go to pytest (`./check.sh -k topology`).
set -u
cd "$(dirname "$0")" || exit 1
if [ -z "${VIRTUAL_ENV:-}" ] && [ -x .venv/bin/python ]; then
  PATH="$PWD/.venv/bin:$PATH"
fi
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
jobs="${TOPO_TEST_JOBS:-2}"
failed=()

step() {
  local name="$1"
  shift
  printf '== %s\n' "$name"
  "$@" || failed+=("$name")
}

# The package is put together from several folders; the type checker needs to see it as one.
types() {
  rm -rf build/types && mkdir -p build/types/topo_opt || return 1
  ln -s "$PWD"/python/topo_opt/* "$PWD"/dialects "$PWD"/passes "$PWD"/tools "$PWD"/hw_topologies build/types/topo_opt/ || return 1
  MYPYPATH=build/types mypy
}

step "ruff format" ruff format --check --quiet .
step "ruff check" ruff check --quiet .
step "mypy" types
step "lit" lit --quiet --workers "$jobs" test
if [ ${#failed[@]} -gt 0 ]; then
  printf '== failed so far: %s\n' "${failed[*]}"
fi
step "pytest" python -m pytest --numprocesses "$jobs" "$@"
[ ${#failed[@]} -eq 0 ]
