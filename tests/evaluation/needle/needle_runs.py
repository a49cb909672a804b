"""A toy needle evaluation for tests: short prompts of bytes, and a model that knows the answers."""

import json

from tiny_models import tiny_llama
from tokenizer_styles import TEXT_FILE

import eval_needle
from easy_context.evaluation.journal import Journal
from easy_context.evaluation.needle import run
from easy_context.mesh import Mesh
from easy_context.model.config import load_config

TOY = ["--prompt-template", "{haystack}{question}", "--needle-template", " #{value}#", "--question-template", "\n#"]
TOY += ["--answer-template", "{value}", "--digits", "5", "--min_context_length", "96", "--max_context_length", "200"]
TOY += ["--depth_interval", "0.5", "--num_samples", "3"]
CELLS = [(length, depth) for length in (96, 192, 200) for depth in (0.0, 0.5, 1.0)]
TEXT = TEXT_FILE.read_text(encoding="utf-8")[:40_000]  # enough for these lengths, and quick to tokenize


def parse(model_folder, folder, *arguments):
    return eval_needle.parse_arguments(["--model", model_folder, "--output_dir", str(folder), *TOY, *arguments])


def prepare(args):
    """Tasks, prompt builder and settings of a run."""
    return run.prepare(args, load_config(args.model))


def records_of(folder):
    return [json.loads(line) for line in (folder / "cells.jsonl").read_text().splitlines()[1:]]


def journal_of(args):
    return Journal(args.output_dir / "cells.jsonl", "cell", "--output_dir")


class OracleScorer:
    """Knows the answers, except of samples whose number starts with a digit below 5; counts its passes."""

    mesh = Mesh()
    is_first_rank = True
    model = tiny_llama()

    def __init__(self, stop_after=None):
        self.passes, self.stop_after = 0, stop_after

    def predictions(self, input_ids, targets):
        if self.passes == self.stop_after:
            raise KeyboardInterrupt
        self.passes += 1
        out = targets.clone()
        for i, row in enumerate(targets):
            first = (row != -100).nonzero()[0]
            out[i, first] = row[first] if row[first] >= targets.new_tensor(self.five) else 0
        return out

    from_every_group = staticmethod(lambda value: [value])
    from_first_rank = staticmethod(lambda value: value)


def run_oracle(model_folder, folder, oracle, *arguments):
    """Run an evaluation from its flags to its files, with `oracle` as the model; return the records."""
    args = parse(model_folder, folder, *arguments)
    tasks, builder, settings = prepare(args)
    OracleScorer.five = builder.encoder.encode("5").ids[0]
    journal = journal_of(args)
    run.open_journal(args, settings, journal)
    records = run.score_cells(args, tasks, builder, oracle, journal)
    run.write_results(args, records, settings)
    return records
