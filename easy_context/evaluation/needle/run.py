"""A needle evaluation: from the flags to scored cells, and from these to the files that users read."""

import argparse
import hashlib
from typing import Any

import pandas
from tqdm import tqdm

from ...common.files import write_whole
from ...model.fingerprint import model_fingerprint, tokenizer_fingerprint
from ...model.tokenizer import load_tokenizer
from ..journal import Journal, missing_pieces, run_pieces
from ..loading import dtype_of
from ..memory_check import check_memory
from ..plots import draw_needle, needle_title
from ..results import json_text
from ..scorer import Scorer
from .cells import Cell, check_lengths, grid, is_finished_cell, mean_of, rows_at_once, score_cell, summarize
from .encoding import TextEncoder
from .examples import Task
from .haystack import Haystack, read_haystack
from .needle_task import DIGITS, NeedleTask
from .prompts import PromptBuilder
from .ruler_tasks import RULER_TASKS

# A run may be continued with another grid, on other processes; with other values of these it would be another run.
SETTINGS = (
    "num_samples",
    "seed",
    "format",
    "few_shot",
    "prompt_template",
    "num_needles",
    "ask",
    "num_distractor",
    "rnd_number_digits",
    "needle_template",
    "question_template",
    "answer_template",
    "rope_theta",
)


def prepare(args: argparse.Namespace, config: Any) -> tuple[list[Task], PromptBuilder, dict]:
    """Return the tasks, the builder of their prompts, and the settings that a continued run must share.

    Args:
        args: from `parse_arguments`.
        config: of the model.

    Raises:
        ValueError: something that the prompts need is not there, or a length does not hold one of them.
    """
    text = read_haystack(args.haystack_dir)
    names = dict.fromkeys(name for task in args.task for name in (RULER_TASKS if task == "ruler" else [task]))
    tasks = [
        _needle_task(args) if name == "needle" else RULER_TASKS[name](text, args.rnd_number_digits) for name in names
    ]
    encoder = TextEncoder(load_tokenizer(args.model))
    builder = PromptBuilder(encoder, Haystack(text, encoder), args.format, args.prompt_template, args.few_shot)
    # A context that is too short for a task is found now, not after hours.
    check_lengths(builder, tasks, args.lengths, args.depths, args.num_samples, args.seed)
    most = max(n * min(args.num_samples, rows_at_once(n, args.batch_tokens)) for n in args.lengths)
    check_memory(args.model, config, args, most, "--max_context_length or --batch_tokens")
    settings = {key: getattr(args, key) for key in SETTINGS}
    settings |= {
        "dtype": str(dtype_of(args)).removeprefix("torch."),  # auto is another one on a GPU
        "model": model_fingerprint(args.model, config),
        "tokenizer": tokenizer_fingerprint(args.model),
        "haystack": hashlib.sha256(text.encode()).hexdigest()[:16],
    }
    return tasks, builder, settings


def _needle_task(args: argparse.Namespace) -> NeedleTask:
    return NeedleTask(
        needle_template=args.needle_template,
        question_template=args.question_template,
        answer_template=args.answer_template,
        digits=args.rnd_number_digits or DIGITS,
        needles=args.num_needles,
        ask=args.ask,
        distractors=args.num_distractor,
    )


def open_journal(args: argparse.Namespace, settings: dict, journal: Journal) -> None:
    """Open the file of finished cells, on the first process."""
    journal.open(settings, Cell.of, is_finished_cell, model=args.model, resume=args.resume == "auto")


def score_cells(
    args: argparse.Namespace, tasks: list[Task], builder: PromptBuilder, scorer: Scorer, journal: Journal
) -> list[dict]:
    """Score the cells of the grid that the journal lacks.

    Returns:
        The records of all cells of the grid on the first process, an empty list elsewhere.
    """
    by_name = {task.name: task for task in tasks}
    cells = grid(tasks, args.lengths, args.depths)

    def score(cell: Cell) -> dict:
        return score_cell(scorer, builder, by_name[cell.task], cell, args.num_samples, args.seed, args.batch_tokens)

    pending = missing_pieces(scorer, cells, journal)
    with _progress_bar(scorer, pending) as bar:
        for together in run_pieces(scorer, pending, score, journal):
            bar.update(sum(_cost(scorer, cell.length) for cell in together))
            if scorer.is_first_rank:
                mean = mean_of(journal.finished.values())
                bar.set_postfix(length=together[-1].length, accuracy=f"{mean['accuracy']:.2f}")
    return [journal.finished[cell] for cell in cells] if scorer.is_first_rank else []


def _progress_bar(scorer: Scorer, pending: list[Cell]) -> tqdm:
    """Return a bar that advances by estimated work, so that the time left is right although later cells are longer."""
    return tqdm(
        total=sum(_cost(scorer, cell.length) for cell in pending),
        desc=f"{len(pending)} cells",
        bar_format="{desc} {percentage:3.0f}%|{bar}| {elapsed}<{remaining}{postfix}",
        disable=not scorer.is_first_rank,
    )


def _cost(scorer: Scorer, length: int) -> float:
    """Return the multiply-adds of a forward pass: every parameter once a token, and causal attention."""
    config = scorer.model.config
    return length * (scorer.model.num_parameters() + config.num_hidden_layers * config.hidden_size * length)


def write_results(args: argparse.Namespace, records: list[dict], settings: dict) -> None:
    """Write the CSV, the JSON summary and a heatmap for each task, and print the means."""
    summary = summarize(records)
    table = pandas.DataFrame(records, columns=["task", "length", "depth", "accuracy", "item_accuracy"])
    write_whole(args.output_dir / "cells.csv", table.to_csv(index=False))
    report = {"model": args.model, "settings": settings, "tasks": summary}
    write_whole(args.output_dir / "summary.json", json_text(report))
    for task, result in summary.items():
        own = [record for record in records if record["task"] == task]
        draw_needle(own, args.output_dir / f"{task}.png", needle_title(own, args.model))
        print(f"{task}: accuracy {result['accuracy']:.3f} over {result['samples']} samples")
        for length, mean in result["by_length"].items():
            print(f"  {length:>9,} tokens   {mean['accuracy']:.3f}")
    pictures = ", ".join(f"{task}.png" for task in summary)
    print(f"wrote to {args.output_dir}: cells.jsonl, cells.csv, summary.json, {pictures}")
