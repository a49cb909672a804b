#!/usr/bin/env bash
# The whole recipe in small, on two CPU cores: a tiny Llama learns from rows of 64 tokens, its context is stretched to 256,
# and both are measured. A run starts anew each time and replaces what an earlier one left in output/quickstart.
#
#   bash train_scripts/quickstart.sh
set -euo pipefail
cd "$(dirname "$0")/.."
bash train_scripts/setup.sh

out=output/quickstart
short=64 long=256
train_text=data/haystack/emma.txt unseen_text=data/haystack/persuasion.txt
python=.venv/bin/python
cores=$(getconf _NPROCESSORS_ONLN)
# On the CPU everywhere, and from local files only, so that it shows the same on any machine.
export CUDA_VISIBLE_DEVICES="" DS_ACCELERATOR=cpu HF_HUB_OFFLINE=1 HF_DATASETS_DISABLE_PROGRESS_BARS=1
export TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=1

# run NAME TITLE COMMAND... : its output goes to logs/NAME.log; the first failure ends the script.
run() {
  local log="$out/logs/$1.log" title=$2 start=$SECONDS
  shift 2
  echo "== $title"
  if ! "$@" >"$log" 2>&1; then
    tail -n 15 "$log" | tr '\r' '\n' | tail -n 15 >&2
    echo "quickstart: this step failed: $title. Its last lines are above, all of them in $log" >&2
    exit 1
  fi
  echo "   $((SECONDS - start)) s, $log"
}

echo "== results go to $out, which starts empty"
rm -rf "$out"
mkdir -p "$out/logs" "$out/unseen"
cp "$unseen_text" "$out/unseen/"

run model "a tiny tokenizer and a Llama with random weights" \
  $python examples/quickstart.py model --text "$train_text" --window $short --output-dir $out/start

# rows NAME LENGTH COUNT QUESTIONS : text of the novel in rows of one length, a needle in most of them
rows() {
  run "text-$1" "packing $train_text into rows of $2 tokens" \
    $python prepare_data.py --input "$train_text" --document-start '^CHAPTER' --tokenizer $out/start \
    --seq-length "$2" --num-workers 1 --output-dir "$out/text-$1"
  run "rows-$1" "hiding needles in them" \
    $python examples/quickstart.py rows --text-rows "$out/text-$1/train" --tokenizer $out/start \
    --rows "$3" --most-questions "$4" --output-dir "$out/rows-$1"
}
rows stage1 $short 24000 3
rows stage2 $long 2400 6
run text-unseen "packing $unseen_text, which is never trained on" \
  $python prepare_data.py --input "$unseen_text" --tokenizer $out/start --seq-length $long --num-workers 1 \
  --output-dir $out/text-unseen

training=(--batch-size 16 --gradient-accumulate-every 1 --learning-rate 1e-3 --adam-betas 0.9 0.98
  --lr-scheduler cosine --gradient-checkpointing none --mixed-precision no)
run stage1 "stage 1: rows of $short tokens, data_parallel (two to three minutes)" \
  env OMP_NUM_THREADS=$((cores < 4 ? cores : 4)) $python train.py --parallel_mode data_parallel \
  --model $out/start --dataset $out/rows-stage1 --seq-length $short --max-train-steps 1500 --warmup-steps 30 \
  "${training[@]}" --output-dir $out/stage1

# A free port, in case that another launch is running.
port=$($python -c 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])')
run stage2 "stage 2: rows of $long tokens over 2 processes, zigzag_ring_attn, ZeRO-3 with CPU offload (one to two minutes)" \
  .venv/bin/accelerate launch --config_file accelerate_configs/cpu.yaml --main_process_port "$port" \
  train.py --parallel_mode zigzag_ring_attn --model $out/stage1 --dataset $out/rows-stage2 --seq-length $long \
  --rope-theta 40000 --max-train-steps 150 --warmup-steps 10 "${training[@]}" --output-dir $out/stage2

run perplexity "perplexity on unseen text, before and after" \
  $python eval_ppl.py --model $out/stage1 --model $out/stage2 --tokenized $out/text-unseen/train --samples 100 \
  --min-tokens 32 --max-tokens $long --tokens-step 32 --bucket-tokens $short --output-file $out/perplexity.csv
# needle NAME MODEL
needle() {
  run "needle-$1" "needle in a haystack of unseen text, $1" \
    $python eval_needle.py --model "$2" --haystack_dir $out/unseen --output_dir "$out/needle-$1" \
    --min_context_length $short --max_context_length $long --context_interval $short --depth_interval 0.25 \
    --num_samples 20 --rnd_number_digits 3 --prompt-template '{haystack}{question}' \
    --needle-template ' The secret number is {value}.' --question-template ' The secret number is' \
    --answer-template ' {value}'
}
needle before $out/stage1
needle after $out/stage2

pictures() { # each must succeed: inside `run` the shell does not stop by itself
  $python plot.py loss $out/stage1/metrics.jsonl $out/stage2/metrics.jsonl --output $out/loss.png \
    --labels "stage 1: rows of $short tokens" "stage 2: rows of $long tokens" --title "Training loss" &&
    $python plot.py perplexity $out/perplexity.csv --output $out/perplexity.png \
      --labels "before: trained on $short tokens" "after: stretched to $long tokens" --title "Perplexity of unseen text" &&
    $python plot.py needle $out/needle-before/cells.jsonl --output $out/needle-before.png --title "Needle found, before" &&
    $python plot.py needle $out/needle-after/cells.jsonl --output $out/needle-after.png --title "Needle found, after"
}
run pictures "pictures" pictures

echo
$python examples/quickstart.py table $out
cat <<END

after ${SECONDS} s:
  model        $out/stage2
  loss         $out/loss.png
  perplexity   $out/perplexity.png
  needle       $out/needle-before.png  $out/needle-after.png
  logs         $out/logs  $out/stage1/metrics.jsonl  $out/stage2/metrics.jsonl
END
