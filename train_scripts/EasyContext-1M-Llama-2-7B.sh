#!/usr/bin/env bash
# Llama-2-7B from 4K to 1M tokens in seven stages of about 1M tokens a step, on eight 80 GB GPUs.
# Each stage starts from the one before; a finished stage is skipped when the script is run again.
#
#   bash train_scripts/EasyContext-1M-Llama-2-7B.sh
#   DRY_RUN=1 bash train_scripts/EasyContext-1M-Llama-2-7B.sh      # only print the commands
#   MODEL=/models/Llama-2-7b-hf DATA=output/my-rows bash train_scripts/EasyContext-1M-Llama-2-7B.sh
#
# stages.sh lists what else can be set. Rows of DATA shorter than a stage's length are padded, so give one dataset for
# all stages only if its rows are as long as the last stage's.
set -euo pipefail
cd "$(dirname "$0")/.."
MODEL=${MODEL:-meta-llama/Llama-2-7b-hf}
SHORT=${DATA:-yaofu/slimpajama-per-source-length-upsample}
LONG=${DATA:-PY007/slimpajama_llama_tokenized_upsample_4096_chunk_256K}
LONGEST=${DATA:-PY007/slimpajama_llama_tokenized_upsample_4096_chunk_1M}
. train_scripts/stages.sh

# RoPE bases rise stage by stage: a few hundred steps after each rise are enough (the needed base grows faster than
# the length, arXiv 2405.14591).
common=(--batch-size 1 --wandb EasyContext)
dp=(--parallel_mode data_parallel "${common[@]}")
sp=(--parallel_mode zigzag_ring_attn "${common[@]}")
#     name               rows of             RoPE base               rows a GPU or node             steps                  learning rate         data
stage 7B_32K_rope_1M     --seq-length 32768  --rope-theta 1000000   --gradient-accumulate-every 4  --max-train-steps 1000 --learning-rate 2e-5  --dataset "$SHORT"   --seed 2022 "${dp[@]}"
stage 7B_64K_rope_5M     --seq-length 65536  --rope-theta 5000000   --gradient-accumulate-every 2  --max-train-steps 1000 --learning-rate 2e-5  --dataset "$SHORT"   --seed 2023 "${dp[@]}"
stage 7B_256K_rope_10M   --seq-length 256000 --rope-theta 10000000  --gradient-accumulate-every 4  --max-train-steps 500  --learning-rate 2e-5  --dataset "$LONG"    --seed 2024 "${sp[@]}"
stage 7B_256K_rope_25M   --seq-length 256000 --rope-theta 25000000  --gradient-accumulate-every 4  --max-train-steps 500  --learning-rate 2e-5  --dataset "$LONG"    --seed 2025 "${sp[@]}"
stage 7B_256K_rope_50M   --seq-length 256000 --rope-theta 50000000  --gradient-accumulate-every 4  --max-train-steps 150  --learning-rate 2e-5  --dataset "$LONG"    --seed 2026 "${sp[@]}"
stage 7B_512K_rope_100M  --seq-length 512000 --rope-theta 100000000 --gradient-accumulate-every 2  --max-train-steps 300  --learning-rate 2e-5  --dataset "$LONGEST" --seed 2027 "${sp[@]}"
stage 7B_512K_rope_250M  --seq-length 512000 --rope-theta 250000000 --gradient-accumulate-every 2  --max-train-steps 90   --learning-rate 1e-5  --dataset "$LONGEST" --seed 2028 "${sp[@]}"
