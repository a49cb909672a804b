#!/usr/bin/env bash
# h2o-danube2-1.8b (a Mistral model, 8K tokens) to 256K tokens in nine stages of about 1M tokens a step, on eight GPUs.
# Each stage starts from the one before; a finished stage is skipped when the script is run again.
#
#   bash train_scripts/EasyContext-256K-danube2.sh
#   DRY_RUN=1 bash train_scripts/EasyContext-256K-danube2.sh       # only print the commands
#
# MODEL and DATA take local folders; stages.sh lists what else can be set.
set -euo pipefail
cd "$(dirname "$0")/.."
MODEL=${MODEL:-h2oai/h2o-danube2-1.8b-base}
SHORT=${DATA:-PY007/slimpajama_mistral_tokenized_upsample_4096_chunk_128K}
LONG=${DATA:-PY007/slimpajama_mistral_tokenized_upsample_4096_chunk_1M}
. train_scripts/stages.sh

common=(--learning-rate 2e-5 --wandb EasyContext)
dp=(--parallel_mode data_parallel "${common[@]}")
sp=(--parallel_mode zigzag_ring_attn "${common[@]}")
#     name                    rows of             RoPE base               rows a GPU or node                            steps                 data
stage danube2_16K_rope_30K    --seq-length 16000  --rope-theta 30000     --batch-size 2 --gradient-accumulate-every 4  --max-train-steps 400 --dataset "$SHORT" --seed 2024 "${dp[@]}"
stage danube2_32K_rope_100K   --seq-length 32000  --rope-theta 100000    --batch-size 1 --gradient-accumulate-every 4  --max-train-steps 400 --dataset "$SHORT" --seed 2025 "${dp[@]}"
stage danube2_32K_rope_300K   --seq-length 32000  --rope-theta 300000    --batch-size 1 --gradient-accumulate-every 4  --max-train-steps 400 --dataset "$SHORT" --seed 2026 "${dp[@]}"
stage danube2_64K_rope_1M     --seq-length 64000  --rope-theta 1000000   --batch-size 1 --gradient-accumulate-every 2  --max-train-steps 400 --dataset "$SHORT" --seed 2027 "${dp[@]}"
stage danube2_64K_rope_2.5M   --seq-length 64000  --rope-theta 2500000   --batch-size 1 --gradient-accumulate-every 2  --max-train-steps 400 --dataset "$SHORT" --seed 2028 "${dp[@]}"
stage danube2_64K_rope_5M     --seq-length 64000  --rope-theta 5000000   --batch-size 1 --gradient-accumulate-every 2  --max-train-steps 400 --dataset "$SHORT" --seed 2029 "${dp[@]}"
stage danube2_128K_rope_10M   --seq-length 128000 --rope-theta 10000000  --batch-size 1 --gradient-accumulate-every 8  --max-train-steps 300 --dataset "$SHORT" --seed 2030 "${sp[@]}"
stage danube2_128K_rope_30M   --seq-length 128000 --rope-theta 30000000  --batch-size 1 --gradient-accumulate-every 8  --max-train-steps 200 --dataset "$SHORT" --seed 2031 "${sp[@]}"
stage danube2_256K_rope_100M  --seq-length 256000 --rope-theta 100000000 --batch-size 1 --gradient-accumulate-every 4  --max-train-steps 200 --dataset "$LONG"  --seed 2032 "${sp[@]}"
