#!/usr/bin/env bash
# The whole recipe in small, on two CPU cores: a tiny Llama learns from rows of 64 tokens, its context is stretched to 256,
# and both are measured. A run starts anew each time and replaces what an earlier one left in output/quickstart.
#
#   bash train_scripts/quickstart.sh
set -euo pipefail
cd "$(dirname "$0")/.."
bash train_scripts/setup.sh
exec .venv/bin/python -m train_scripts.quickstart "$@"
