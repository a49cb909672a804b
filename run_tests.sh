#!/usr/bin/env bash
# Sets up .venv, checks style and types, runs the tests.
#
#   bash run_tests.sh                     # what every change must pass; no GPU needed
#   bash run_tests.sh --fast              # while you work: without the tests that start processes
#   bash run_tests.sh --slow              # and the long tests
#   bash run_tests.sh tests/modes/test_modes.py -k ring     # other words go to pytest
#   TEST_PROCESSES=1 bash run_tests.sh                      # one test file at a time
set -euo pipefail
cd "$(dirname "$0")"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" # several processes share the cores
export TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1

bash train_scripts/setup.sh
step=style
trap 'echo "run_tests.sh: $step failed, see above" >&2' ERR
echo "== ruff"
.venv/bin/ruff check .
.venv/bin/ruff format --check . || {
  echo "   .venv/bin/ruff format . puts that right" >&2
  false
}
step=types
echo "== mypy"
.venv/bin/mypy
step=pytest
echo "== pytest"
# Two test files at a time, which two cores bear: most tests use one core or wait for processes.
.venv/bin/python -m pytest -n "${TEST_PROCESSES:-2}" --dist loadfile --no-loadscope-reorder "$@"
