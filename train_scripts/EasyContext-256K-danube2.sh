#!/usr/bin/env bash
# h2o-danube2-1.8b (a Mistral model, 8K tokens) to 256K tokens in nine stages of about 1M tokens a step, on eight GPUs.
#
#   bash train_scripts/EasyContext-256K-danube2.sh
#   DRY_RUN=1 bash train_scripts/EasyContext-256K-danube2.sh       # only print the commands
#
# multi_stage.py has the stages and what else can be set.
set -euo pipefail
cd "$(dirname "$0")/.."
exec "${PYTHON:-$(command -v .venv/bin/python || echo python)}" -m train_scripts.multi_stage danube2 "$@"
