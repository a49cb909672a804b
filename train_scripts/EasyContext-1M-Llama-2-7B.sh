#!/usr/bin/env bash
# Llama-2-7B from 4K tokens to rows of 512K, in seven stages of about 1M tokens a step, on eight 80 GB GPUs. For 1M tokens
# the RoPE base is raised once more afterwards, without training; the script says how.
#
#   bash train_scripts/EasyContext-1M-Llama-2-7B.sh
#   DRY_RUN=1 bash train_scripts/EasyContext-1M-Llama-2-7B.sh      # only print the commands
#   MODEL=/models/Llama-2-7b-hf DATA=output/my-rows bash train_scripts/EasyContext-1M-Llama-2-7B.sh
#
# multi_stage.py has the stages and what else can be set. Rows of DATA that are shorter than a stage's are trained at
# their own length, so a dataset for all stages needs rows as long as the last stage's.
set -euo pipefail
cd "$(dirname "$0")/.."
exec "${PYTHON:-$(command -v .venv/bin/python || echo python)}" -m train_scripts.multi_stage llama_2_7b "$@"
