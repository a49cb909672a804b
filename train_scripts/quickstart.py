"""The whole recipe in small, on two CPU cores: train a tiny Llama on rows of 64 tokens, stretch it to 256, measure.

train_scripts/quickstart.sh starts this. Each run starts anew and replaces what an earlier one left.
"""

import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from .stages import Recipe, words

OUTPUT = Path("output/quickstart")
TRAIN_TEXT, UNSEEN_TEXT = "data/haystack/emma.txt", "data/haystack/persuasion.txt"
# Blocks of "name: title" and commands.
STAGES = r"""
model: a tiny tokenizer and a Llama with random weights
{python} -m examples.quickstart model --text {train_text} --window 64 --output-dir {out}/start

text-stage1: packing {train_text} into rows of 64 tokens
{python} prepare_data.py --input {train_text} --document-start '^CHAPTER' --tokenizer {out}/start --seq-length 64 \
    --num-workers 1 --output-dir {out}/text-stage1

rows-stage1: hiding needles in them
{python} -m examples.quickstart rows --text-rows {out}/text-stage1/train --tokenizer {out}/start --rows 24000 \
    --most-questions 3 --output-dir {out}/rows-stage1

text-stage2: packing {train_text} into rows of 256 tokens
{python} prepare_data.py --input {train_text} --document-start '^CHAPTER' --tokenizer {out}/start --seq-length 256 \
    --num-workers 1 --output-dir {out}/text-stage2

rows-stage2: hiding needles in them
{python} -m examples.quickstart rows --text-rows {out}/text-stage2/train --tokenizer {out}/start --rows 2400 \
    --most-questions 6 --output-dir {out}/rows-stage2

text-unseen: packing {unseen_text}, which is never trained on
{python} prepare_data.py --input {unseen_text} --tokenizer {out}/start --seq-length 256 --num-workers 1 \
    --output-dir {out}/text-unseen

stage1: stage 1: rows of 64 tokens, data_parallel (two to three minutes)
env OMP_NUM_THREADS={threads} {python} train.py --parallel_mode data_parallel --model {out}/start \
    --dataset {out}/rows-stage1 --seq-length 64 --max-train-steps 1500 --warmup-steps 30 {training} \
    --output-dir {out}/stage1

stage2: stage 2: rows of 256 tokens over 2 processes, zigzag_ring_attn, ZeRO-3 with CPU offload (one to two minutes)
.venv/bin/accelerate launch --config_file accelerate_configs/cpu.yaml --main_process_port 0 \
    train.py --parallel_mode zigzag_ring_attn --model {out}/stage1 --dataset {out}/rows-stage2 --seq-length 256 \
    --rope-theta 40000 --max-train-steps 150 --warmup-steps 10 {training} --output-dir {out}/stage2

perplexity: perplexity on unseen text, before and after
{python} eval_ppl.py --model {out}/stage1 --model {out}/stage2 --tokenized {out}/text-unseen/train --samples 100 \
    --min-tokens 32 --max-tokens 256 --tokens-step 32 --bucket-tokens 64 --output-file {out}/perplexity.csv

needle-before: needle in a haystack of unseen text, before
{python} eval_needle.py --model {out}/stage1 --output_dir {out}/needle-before {needle}

needle-after: needle in a haystack of unseen text, after
{python} eval_needle.py --model {out}/stage2 --output_dir {out}/needle-after {needle}

pictures: pictures
{python} plot.py loss {out}/stage1/metrics.jsonl {out}/stage2/metrics.jsonl --output {out}/loss.png \
    --labels 'stage 1: rows of 64 tokens' 'stage 2: rows of 256 tokens' --title 'Training loss'
{python} plot.py perplexity {out}/perplexity.csv --output {out}/perplexity.png --title 'Perplexity of unseen text' \
    --labels 'before: trained on 64 tokens' 'after: stretched to 256 tokens'
{python} plot.py needle {out}/needle-before/cells.jsonl --output {out}/needle-before.png --title 'Needle found, before'
{python} plot.py needle {out}/needle-after/cells.jsonl --output {out}/needle-after.png --title 'Needle found, after'
"""
TRAINING = """--batch-size 16 --gradient-accumulate-every 1 --learning-rate 1e-3 --adam-betas 0.9 0.98
    --lr-scheduler cosine --gradient-checkpointing none --mixed-precision no"""
NEEDLE = """--haystack_dir {out}/unseen --min_context_length 64 --max_context_length 256 --context_interval 64
    --depth_interval 0.25 --num_samples 20 --rnd_number_digits 3 --prompt-template '{{haystack}}{{question}}'
    --needle-template ' The secret number is {{value}}.' --question-template ' The secret number is'
    --answer-template ' {{value}}'"""
AVERAGED_STEPS = 20  # in a loss of the table
# On the CPU everywhere, and from local files only, so that it shows the same on any machine.
ENVIRONMENT = {
    **{"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
    **{"HF_HUB_OFFLINE": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"},
}


def table(folder: Path) -> str:
    """Return the results of a quickstart run as text, read from the files that the run wrote.

    Args:
        folder: with stage1, stage2, perplexity.json, and summary.json in needle-before and needle-after.
    """

    def read(name: str) -> Any:
        return json.loads((folder / name).read_text())

    def mean_loss(steps: list[str]) -> str:
        return f"{sum(json.loads(step)['loss'] for step in steps) / len(steps):.2f}"

    stages = ("stage1", "stage2")
    perplexity = [read("perplexity.json")["models"][str(folder / stage)]["by_position"] for stage in stages]
    found = [read(f"needle-{when}/summary.json")["tasks"]["needle"]["by_length"] for when in ("before", "after")]
    lengths = [read(f"{stage}/args.json")["seq_length"] for stage in stages]

    lines: list[tuple[str, ...]] = [("training loss (nats per learned token)", "first steps", "last steps")]
    for stage, length in zip(stages, lengths, strict=True):
        steps = (folder / stage / "metrics.jsonl").read_text().splitlines()
        ends = mean_loss(steps[:AVERAGED_STEPS]), mean_loss(steps[-AVERAGED_STEPS:])
        lines.append((f"  {stage}, rows of {length} tokens", *ends))
    lines += [("", "", ""), ("context extension", "before", "after"), ("  trained on rows of", *map(str, lengths))]
    for both in zip(*perplexity, strict=True):
        name = f"  perplexity, unseen text, tokens {both[0]['from']}-{both[0]['to']}"
        lines.append((name, *(f"{part['perplexity']:.1f}" for part in both)))
    for length in found[0]:
        shares = (f"{100 * result[length]['accuracy']:.0f} %" for result in found)
        lines.append((f"  needle found in {length} tokens", *shares))
    return "\n".join(f"{name:<46}{left:>12}{right:>12}".rstrip() for name, left, right in lines)


def main(*arguments: str) -> None:
    """Run the stages and show what changed."""
    start = time.monotonic()
    recipe = Recipe("quickstart.sh", OUTPUT, arguments, logs=OUTPUT / "logs")
    recipe.say(f"results go to {OUTPUT}, which starts empty")
    if not recipe.dry_run:
        shutil.rmtree(OUTPUT, ignore_errors=True)
        (OUTPUT / "logs").mkdir(parents=True)
        (OUTPUT / "unseen").mkdir()
        shutil.copy(UNSEEN_TEXT, OUTPUT / "unseen")
    os.environ |= ENVIRONMENT
    values = {"out": OUTPUT, "train_text": TRAIN_TEXT, "unseen_text": UNSEEN_TEXT, "python": ".venv/bin/python"}
    values |= {"threads": min(4, os.cpu_count() or 1), "training": words(TRAINING), "needle": words(NEEDLE, out=OUTPUT)}
    for block in STAGES.replace("\\\n", " ").strip().split("\n\n"):
        heading, *lines = block.splitlines()
        name, title = heading.format(**values).split(": ", 1)
        recipe.stage(name, *(words(line, **values) for line in lines), title=title)
    if recipe.dry_run:
        return
    print(f"\n{table(OUTPUT)}\n\nafter {time.monotonic() - start:.0f} s:")
    print(f"  model        {OUTPUT}/stage2")
    print(f"  pictures     {OUTPUT}/loss.png  perplexity.png  needle-before.png  needle-after.png")
    print(f"  logs         {OUTPUT}/logs  {OUTPUT}/stage1/metrics.jsonl  {OUTPUT}/stage2/metrics.jsonl")


if __name__ == "__main__":
    main(*sys.argv[1:])
