"""Stretch SmolLM2-135M-Instruct from a window of 8K tokens to 128K, and evaluate it, on one to eight GPUs.

train_scripts/SmolLM2-135M-128K.sh starts this, and explains the recipe and its variables.
"""

import os
import re
import subprocess
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from .stages import Recipe, words

ROWS = """{python} prepare_data.py --input treasury={treasury} bible={bible}
    --document-start '^Psalm [0-9]+ OVERVIEW' --validation-fraction 0.02 --tokenizer {model}
    --separator '<|endoftext|>' --seq-length {length} --train-tokens {tokens} --retrieval-fraction {retrieval}
    --retrieval-facts {facts} --retrieval-text-labels {text_labels} --work-dir {output}/tokens
    --output-dir {output}/rows-{length} --overwrite"""
START = "{python} tools/scale_rope.py {model} {output}/start --type {rope} --factor {factor} {attention}"
# 135 M parameters with their optimizer fit any GPU many times over, so nothing is sharded but the row.
TRAIN = """{python} -m accelerate.commands.launch {multi_gpu} --num_processes {gpus} --num_machines 1
    --mixed_precision bf16 --dynamo_backend no train.py --model {start} --dataset {output}/rows-{length}/train
    --eval-dataset {output}/rows-{length}/validation --eval-every {steps} --output-dir {output}/model-{length}
    --overwrite --seq-length {length} {theta} --parallel_mode {mode} --batch-size 1 --gradient-accumulate-every 1
    --max-train-steps {steps} --learning-rate {rate} --warmup-steps 10 --lr-scheduler cosine
    --gradient-checkpointing full --save-minutes {save_minutes}"""
PERPLEXITY = """{python} {torchrun} eval_ppl.py --model {model} --model {final} --text data/haystack/emma.txt
    --min-tokens 4096 --max-tokens 196608 --tokens-step 4096 --output-file {output}/perplexity.csv"""
PERPLEXITY_PICTURE = "{python} plot.py perplexity {output}/perplexity.csv --output {output}/perplexity.png"
NEEDLE = """{python} {torchrun} eval_needle.py --model {final} --min_context_length {interval}
    --max_context_length {length} --context_interval {interval} --num_samples {samples}
    --output_dir {output}/{name} {flags}"""
NEEDLE_PICTURE = "{python} plot.py needle {output}/{name}/cells.jsonl --output {output}/{name}.png"
NEEDLE_ORIGINAL = """{python} {torchrun} eval_needle.py --model {model} --min_context_length 4096
    --max_context_length 32768 --depth_interval 0.25 --num_samples {samples} --output_dir {output}/needle-original"""


@dataclass
class Settings:
    """The recipe's environment variables, in small letters; the launcher's header explains them."""

    model: str = "HuggingFaceTB/SmolLM2-135M-Instruct"
    texts: str = "texts"
    output: str = "output/SmolLM2-135M-128K"
    gpus: str = ""
    rope: str = "yarn"
    factor: str = "16"
    attention_factor: str = "1"
    stages: str = "65536:100:3e-4 131072:50:2e-4"
    facts: str = "2"
    retrieval: str = "0.5"
    text_labels: str = "0.1"
    samples: str = "4"
    save_minutes: str = "30"
    python: str = "python"

    @classmethod
    def read(cls) -> "Settings":
        """Read the environment. An empty variable is as an unset one; only ATTENTION_FACTOR may be empty."""
        given = {one.name: os.environ.get(one.name.upper()) for one in fields(cls)}
        return cls(
            **{k: value for k, value in given.items() if value is not None and (value or k == "attention_factor")}
        )

    def named(self, *names: str) -> str:
        """Return NAME=VALUE of these settings."""
        return " ".join(f"{name.upper()}={getattr(self, name)}" for name in names)


_NUMBER = r"\d*[1-9]\d*(\.\d+)?|\d*\.\d*[1-9]\d*"
_SHARE = r"0?\.\d+|0|1"
_STAGE = rf"[1-9]\d{{0,8}}:[1-9]\d{{0,8}}:({_NUMBER})(e-?\d+)?"
_FORMS = {  # what a setting must match, and the words for it
    "gpus": (r"\d*", "a number of GPUs"),
    "save_minutes": (r"\d+(\.\d+)?", "a number of minutes, 0 for no checkpoints"),
    "samples": (r"[1-9]\d*", "a whole number above 0"),
    "factor": (r"([2-9]|[1-9]\d+)(\.\d+)?|1\.\d*[1-9]\d*", "a number above 1, such as 16"),
    "attention_factor": (rf"({_NUMBER})?", "a number above 0, such as 1, or empty"),
    "facts": (r"\d+", "a whole number"),
    "retrieval": (_SHARE, "a share from 0 to 1"),
    "text_labels": (_SHARE, "a share from 0 to 1"),
    "rope": (r"yarn|llama3|linear|[1-9]\d*(\.\d+)?(e\d+)?", "yarn, llama3, linear, or a base such as 2e7"),
    "stages": (rf"\s*{_STAGE}(\s+{_STAGE})*\s*", "one or more LENGTH:STEPS:RATE, such as 65536:100:3e-4"),
}


def problem_of(s: Settings) -> str | None:
    """Return what is wrong with the settings, or None."""
    for name, (form, said) in _FORMS.items():
        if not re.fullmatch(form, value := getattr(s, name)):
            return f"{name.upper()}='{value}' must be {said}"
    lengths = [stage.split(":")[0] for stage in s.stages.split()]
    twice = next((length for length in lengths if lengths.count(length) > 1), None)
    return twice and f"STAGES='{s.stages}' gives rows of {twice} twice; join the two stages"


def find_text(recipe: Recipe, folder: str, name: str) -> str:
    """Return the path of a training text, packed or not; in a dry run also of one that is not there."""
    plain = f"{folder}/{name}.txt"
    found = next((plain + ending for ending in ("", ".gz", ".xz", ".bz2") if os.path.exists(plain + ending)), None)
    if found is None and not recipe.dry_run:
        recipe.fail(
            f"TEXTS={folder} holds no {name}.txt (nor .gz, .xz, .bz2). Both texts are in the public domain: "
            "C. H. Spurgeon, The Treasury of David, and the World English Bible (worldenglish.bible)."
        )
    return found or plain


def count_gpus() -> int:
    """Return how many GPUs nvidia-smi lists; 0 where it is missing."""
    try:
        return len(subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True).stdout.splitlines())
    except FileNotFoundError:
        return 0


def values_of(s: Settings, recipe: Recipe) -> dict[str, Any]:
    """Return what the {names} in the commands stand for; fail where a text or a GPU is missing."""
    gpus = int(s.gpus or count_gpus())
    if not gpus and not recipe.dry_run:
        recipe.fail("no GPU found (set GPUS if nvidia-smi is missing); training needs at least one")
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(gpus)]
    return vars(s) | {
        "treasury": find_text(recipe, s.texts, "treasury_of_david"),
        "bible": find_text(recipe, s.texts, "world_english_bible"),
        "gpus": max(1, gpus),
        "mode": "zigzag_ring_attn" if gpus > 1 else "data_parallel",
        "multi_gpu": ["--multi_gpu"] if gpus > 1 else [],
        "torchrun": torchrun if gpus > 1 else [],
        "attention": ["--attention-factor", s.attention_factor] if s.rope == "yarn" and s.attention_factor else [],
        "theta": ["--rope-theta", s.rope] if s.rope[0].isdigit() else [],
    }


def main(*arguments: str) -> None:
    """Make rows, train on them, measure the model."""
    s = Settings.read()
    recipe = Recipe("SmolLM2-135M-128K.sh", s.output, arguments)
    if problem := problem_of(s):
        recipe.fail(problem)
    values = values_of(s, recipe)
    os.environ.setdefault("OMP_NUM_THREADS", "4")
    stages = [stage.split(":") for stage in s.stages.split()]

    # The settings of a stage are its own and those of the stages that it builds on.
    text_settings = s.named("texts", "retrieval", "facts", "text_labels")
    for length, steps, _ in stages:
        rows = words(ROWS, length=length, tokens=int(length) * int(steps), **values)
        settings = f"{s.named('model')} {text_settings} LENGTH={length} STEPS={steps}"
        recipe.stage(f"rows-{length}", rows, settings=settings)

    # A raised base is a flag of train.py; a scaling is written into the config first.
    settings, start = s.named("model", "rope"), s.model
    if not s.rope[0].isdigit():
        settings += " " + s.named("factor", *(["attention_factor"] if s.rope == "yarn" else []))
        start = f"{s.output}/start"
        recipe.stage("start", words(START, **values), settings=settings, replaces=Path(start))
    settings += " " + text_settings

    for length, steps, rate in stages:
        settings += f" STAGE={length}:{steps}:{rate}"
        train = words(TRAIN, start=start, length=length, steps=steps, rate=rate, **values)
        start = f"{s.output}/model-{length}"
        recipe.stage(f"train-{length}", train, settings=settings, model=Path(start))

    values |= {"final": start, "length": length, "interval": int(length) // 8}
    recipe.stage("perplexity", words(PERPLEXITY, **values), words(PERPLEXITY_PICTURE, **values), settings=settings)
    flags = {"needle": "--depth_interval 0.1", "needle-distractors": "--depth_interval 0.25 --num_distractor 8"}
    for name, chosen in flags.items():
        commands = (words(line, name=name, flags=chosen.split(), **values) for line in (NEEDLE, NEEDLE_PICTURE))
        recipe.stage(name, *commands, settings=f"{settings} {s.named('samples')}")
    recipe.stage("needle-original", words(NEEDLE_ORIGINAL, **values), settings=s.named("model", "samples"))
    if not recipe.dry_run:
        print(f"the model is {start}; see perplexity.png, needle.png and the JSON files in {s.output}")


if __name__ == "__main__":
    main(*sys.argv[1:])
