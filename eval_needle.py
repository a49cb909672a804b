"""Needle in a haystack, and a RULER-like set of tasks, over lengths x depths x samples.

    python eval_needle.py --model MODEL --max_context_length 8192
    torchrun --nproc-per-node 8 eval_needle.py --model MODEL --min_context_length 50000 --max_context_length 1000000 \
        --context_interval 50000 --depth_interval 0.1 --num_samples 5 --num_distractor 7
    python eval_needle.py --model MODEL --task niah_multikey variable_tracking common_words --format chat --few_shot 1

An answer counts when greedy decoding would write it exactly; one forward pass decides that. Every finished cell is
written at once and a second run goes on from there. Tasks, templates and files: docs/evaluation.md.
"""

import argparse
import csv
import io
import os
import sys
from pathlib import Path

from easy_context.common.files import check_writable, write_whole
from easy_context.common.interrupts import stops_in_one_line
from easy_context.evaluation.arguments import (
    FlagParser,
    add_model_flags,
    check_model_flags,
    context_lengths,
    refusals,
)
from easy_context.evaluation.journal import Journal
from easy_context.evaluation.needle import DIGITS, NEEDLE_TEMPLATE, NeedleTask, check_digits
from easy_context.evaluation.tasks import RULER_TASKS, ruler_task

MODEL = "PY007/Llama2-7B-64K"  # as in the original project
MOST_DEPTHS = 1000  # steps in a grid; more are a slip of the pen
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


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """The flags, each checked as far as that goes without loading anything."""
    parser = FlagParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", default=MODEL, help="path or hub name (%(default)s)")
    parser.add_argument(
        "--task", nargs="+", default=["needle"], choices=("needle", "ruler", *RULER_TASKS), help="ruler: all but needle"
    )
    parser.add_argument("--output_dir", type=Path, help="default: output/needle/<model's name>")
    parser.add_argument(
        "--overwrite", action="store_true", help="drop results of an earlier run instead of continuing it"
    )
    grid = parser.add_argument_group("grid")
    grid.add_argument("--min_context_length", type=int, default=1024, help="tokens, answer included (%(default)s)")
    grid.add_argument("--max_context_length", type=int, default=8192, help="(%(default)s)")
    grid.add_argument("--context_interval", type=int, default=0, help="tokens; 0, the default, doubles the length")
    grid.add_argument("--depth_interval", type=float, default=0.1, help="share of the context (%(default)s)")
    grid.add_argument("--num_samples", type=int, default=1, help="prompts in a cell (%(default)s)")
    grid.add_argument("--seed", type=int, default=0, help="of numbers, names and passages (%(default)s)")
    grid.add_argument(
        "--batch_tokens", type=int, default=65536, help="samples of a cell run together up to this many tokens"
    )
    text = parser.add_argument_group("prompt")
    text.add_argument("--haystack_dir", default="data/haystack", help="folder of .txt files (%(default)s)")
    text.add_argument(
        "--format", choices=("plain", "chat"), default="plain", help="chat: the tokenizer's chat template"
    )
    text.add_argument("--few_shot", type=int, default=0, help="worked examples before the question (%(default)s)")
    text.add_argument("--prompt-template", default="", help="the whole, with {haystack} and {question}")
    needle = parser.add_argument_group("task needle")
    needle.add_argument(
        "--num_needles", type=int, default=1, help="spread from the cell's depth to the end (%(default)s)"
    )
    needle.add_argument("--ask", choices=("one", "all"), default="one", help="for the first needle, or for every one")
    needle.add_argument(
        "--num_distractor", type=int, default=0, help="like needles, at random depths, not asked for (%(default)s)"
    )
    needle.add_argument(
        "--rnd_number_digits", "--digits", type=int, help="of the numbers of any task; default: 7, variable_tracking 5"
    )
    needle.add_argument(
        "--needle-template", default=NEEDLE_TEMPLATE, help="with {key} and {value} (default: %(default)r)"
    )
    needle.add_argument("--question-template", default="", help="may use {key}")
    needle.add_argument(
        "--answer-template", default="", help="what is before {value} is given, the rest must be written"
    )
    add_model_flags(parser)
    args = parser.parse_args(arguments)
    flags = ("--min_context_length", "--max_context_length", "--context_interval")
    args.lengths = context_lengths(args.min_context_length, args.max_context_length, args.context_interval, flags)
    if not 0 < args.depth_interval <= 1:
        raise ValueError(f"--depth_interval {args.depth_interval}: give a share of the context, above 0 and at most 1")
    steps = int(1 / max(args.depth_interval, 1e-18) + 1e-9)
    if steps > MOST_DEPTHS:
        raise ValueError(
            f"--depth_interval {args.depth_interval}: {steps + 1:,} depths at {len(args.lengths)} lengths make "
            f"{(steps + 1) * len(args.lengths):,} cells; give at least {1 / MOST_DEPTHS:g}"
        )
    args.depths = [round(i * args.depth_interval, 6) for i in range(steps + 1)]
    for name, least in (("num_samples", 1), ("few_shot", 0), ("batch_tokens", 1)):
        if getattr(args, name) < least:
            raise ValueError(f"--{name} {getattr(args, name)}: give at least {least}")
    if args.rnd_number_digits is not None:
        check_digits(args.rnd_number_digits)
    check_model_flags(args)
    if args.output_dir is None:
        args.output_dir = Path("output/needle", Path(args.model).name)
    check_writable(args.output_dir / "cells.jsonl", "--output_dir")
    return args


def prepare(args, config) -> tuple[list, object, dict]:
    """Tasks, prompt builder and the settings that a continued run must share."""
    from easy_context.evaluation.cells import check_lengths
    from easy_context.evaluation.encoding import TextEncoder
    from easy_context.evaluation.haystack import Haystack, read_haystack
    from easy_context.evaluation.journal import model_fingerprint, text_fingerprint, tokenizer_fingerprint
    from easy_context.evaluation.loading import dtype_of
    from easy_context.evaluation.prompts import PromptBuilder
    from easy_context.model.tokenizer import load_tokenizer

    text = read_haystack(args.haystack_dir)
    names = dict.fromkeys(name for task in args.task for name in (RULER_TASKS if task == "ruler" else [task]))
    tasks = [
        _needle_task(args) if name == "needle" else ruler_task(name, text, args.rnd_number_digits) for name in names
    ]
    encoder = TextEncoder(load_tokenizer(args.model))
    haystack = Haystack(text, encoder)
    builder = PromptBuilder(encoder, haystack, args.format, args.prompt_template, args.few_shot)
    # A context that is too short for a task is found now, not after hours.
    check_lengths(builder, tasks, args.lengths, args.depths, args.num_samples, args.seed)
    settings = {key: getattr(args, key) for key in SETTINGS}
    settings |= {
        "dtype": str(dtype_of(args)).removeprefix("torch."),  # auto is another one on a GPU
        "model": model_fingerprint(args.model, config),
        "tokenizer": tokenizer_fingerprint(args.model),
        "haystack": text_fingerprint(text),
    }
    return tasks, builder, settings


def _needle_task(args) -> NeedleTask:
    return NeedleTask(
        needle_template=args.needle_template,
        question_template=args.question_template,
        answer_template=args.answer_template,
        digits=DIGITS if args.rnd_number_digits is None else args.rnd_number_digits,
        needles=args.num_needles,
        ask=args.ask,
        distractors=args.num_distractor,
    )


def open_journal(args: argparse.Namespace, settings: dict) -> Journal | None:
    """The file of finished cells, on the first rank only."""
    if int(os.environ.get("RANK", 0)):
        return None
    path = args.output_dir / "cells.jsonl"
    if args.overwrite:
        path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    return Journal(path, settings, args.model)


def main(arguments: list[str] | None = None) -> None:
    """Scores every cell and writes the results."""
    with refusals("eval_needle.py"):
        args = parse_arguments(arguments)
    opened: list[Journal] = []

    def what_is_saved() -> str:
        if not opened:
            return "nothing was saved"
        count, path = len(opened[0].finished), opened[0].path
        again = "the same command without --overwrite" if args.overwrite else "the same command"
        return f"{count} cell{'s' * (count != 1)} saved in {path}; {again} goes on from there"

    with stops_in_one_line(what_is_saved):
        score_cells(args, opened)


def score_cells(args: argparse.Namespace, opened: list[Journal]) -> None:
    """Scores every cell; the journal of finished ones is put into `opened`, on the first process."""
    with refusals("eval_needle.py"):
        from easy_context.evaluation import cells
        from easy_context.evaluation.loading import (
            UnusableModel,
            distributed,
            load_model_config,
            load_scorer,
        )
        from easy_context.evaluation.prompts import ContextTooShort

        config = load_model_config(args.model, args, args.max_context_length)
        tasks, builder, settings = prepare(args, config)
        journal = open_journal(args, settings)
    if journal:
        opened.append(journal)
    by_name = {task.name: task for task in tasks}
    try:
        with distributed() as device, load_scorer(args.model, config, args, device) as scorer:

            def score(cell) -> dict:
                return cells.score_cell(
                    scorer, builder, by_name[cell.task], cell, args.num_samples, args.seed, args.batch_tokens
                )

            records = cells.run_cells(scorer, cells.grid(tasks, args.lengths, args.depths), score, journal)
    except (UnusableModel, ContextTooShort) as reason:
        sys.exit(f"eval_needle.py: {reason}")
    if journal:
        write(args, records, settings)


def write(args, records: list[dict], settings: dict) -> None:
    """The CSV, the JSON summary and one heatmap a task."""
    from easy_context.evaluation.cells import summarize
    from easy_context.evaluation.plots import draw_needle, needle_title
    from easy_context.evaluation.results import json_text

    summary = summarize(records)
    columns = ("task", "length", "depth", "accuracy", "item_accuracy")
    table = io.StringIO()
    csv.writer(table).writerows([columns, *([record[column] for column in columns] for record in records)])
    write_whole(args.output_dir / "cells.csv", table.getvalue())
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


if __name__ == "__main__":
    main()
