"""The flags of `prepare_data.py`, which are all checked before a tokenizer or a data library loads."""

import argparse
import os
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ...common.flags import FlagParser, number, whole_number
from .folders import check_folder, check_output_dir, folder_aside
from .retrieval import RetrievalSettings, read_templates
from .settings import Settings
from .sources import Source, parse_source

MOST_DIGITS = 18
MOST_FACTS = 250  # per 1000 tokens, since a fact with its question has at least four tokens


@dataclass(frozen=True)
class Options:
    """The command line: `settings` determines the rows; the other fields set folders and speed."""

    settings: Settings
    output_dir: Path
    num_workers: int
    work_dir: Path | None
    overwrite: bool


def build_parser() -> argparse.ArgumentParser:
    """Return the parser; its help is the reference for the flags."""
    parser = FlagParser(
        prog="prepare_data.py",
        description="Tokenise documents and pack them into rows of one length, saved with save_to_disk.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    _add_input_flags(parser.add_argument_group("input"))
    _add_row_flags(parser.add_argument_group("rows"))
    _add_retrieval_flags(parser.add_argument_group("retrieval rows (docs/data.md)"))
    _add_run_flags(parser.add_argument_group("output and run"))
    return parser


def _add_input_flags(group) -> None:
    source = {"nargs": "+", "type": parse_source, "metavar": "[NAME=]SOURCE"}
    group.add_argument(
        "--input",
        dest="sources",
        required=True,
        help="sources of the mix: a file (.txt .md .jsonl .json .parquet, text and JSON also .gz .xz .bz2), a folder "
        "of such files, a folder written by save_to_disk, or hub:DATASET[:CONFIG[:SPLIT]]",
        **source,
    )
    group.add_argument(
        "--validation-input", dest="validation_sources", default=[], help="sources for validation only", **source
    )
    group.add_argument(
        "--text-field",
        help="field of the text in JSON, parquet and datasets; the other fields of a record are then ignored. Without "
        'this flag, "text" is read from records that have neither messages nor prompt and response',
    )
    group.add_argument(
        "--document-start",
        type=_regular_expression,
        metavar="REGEX",
        help="in text files, a document begins at each matching line; without this flag, a file is one document",
    )
    group.add_argument("--strict", action="store_true", help="stop at a bad record instead of counting it")


def _add_row_flags(group) -> None:
    group.add_argument(
        "--tokenizer", type=_tokenizer_name, required=True, help="folder or hub name of the model or its tokenizer"
    )
    group.add_argument("--seq-length", type=whole_number(1), required=True, help="number of tokens in a row")
    group.add_argument("--separator", help="token after each document (default: the end-of-sequence token)")
    group.add_argument(
        "--validation-fraction",
        type=number(0, 0.99),
        default=0.0,
        help="share of each source to hold out for validation, in complete documents",
    )
    group.add_argument(
        "--upsample-long",
        type=number(1),
        default=1.0,
        help="weight of long documents relative to short ones of the same source (5 is usual); the shares of the "
        "sources stay the same",
    )
    group.add_argument(
        "--long-from", type=whole_number(1), default=4096, help="documents of at least this many tokens are long"
    )
    group.add_argument(
        "--train-tokens",
        type=whole_number(1),
        help="approximate number of training tokens: documents are repeated, or the pass stops early, to reach it",
    )
    group.add_argument("--seed", type=whole_number(0), default=0, help="seed of every random choice")


def _add_retrieval_flags(group) -> None:
    group.add_argument(
        "--retrieval-fraction",
        type=number(0, 1),
        default=0.0,
        help="share of the train rows into which facts and questions about them are inserted",
    )
    group.add_argument(
        "--retrieval-facts",
        dest="retrieval_facts_per_thousand",
        type=number(0.001, MOST_FACTS),
        default=1.0,
        help="facts per 1000 tokens of a retrieval row; a row gets at least one",
    )
    group.add_argument(
        "--retrieval-text-labels",
        type=number(0, 1),
        default=0.25,
        help="share of the text of a retrieval row that is learned",
    )
    group.add_argument(
        "--retrieval-digits", type=_digits, default="4-9", help="minimum and maximum digits of a fact's number"
    )
    group.add_argument(
        "--retrieval-templates",
        type=read_templates,
        default=argparse.SUPPRESS,
        metavar="FILE",
        help="file with your own facts: a JSON list of {statement, question, answer}, with {name} and {value} in them",
    )


def _add_run_flags(group) -> None:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    group.add_argument("--output-dir", type=Path, required=True, help="folder for train/, validation/ and the report")
    group.add_argument("--work-dir", type=Path, help="folder to keep the tokenised documents in, for use by other runs")
    group.add_argument(
        "--num-workers",
        type=whole_number(1, max(64, 4 * cores)),  # more than one process per core is not faster
        default=cores,
        help="number of tokenising processes",
    )
    group.add_argument(
        "--overwrite",
        action="store_true",
        help="replace rows that were made with other settings, after the new rows are complete",
    )


def _regular_expression(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a regular expression: {error}") from error
    return text


def _tokenizer_name(text: str) -> str:
    may_be_on_hub = re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", text)
    try:
        usable = Path(text).is_dir() or (may_be_on_hub and not Path(text).exists())
    except OSError:  # too long for a name
        usable = False
    if not usable:
        raise argparse.ArgumentTypeError(
            f"{text} is not a folder; give the folder or the hub name of a model or tokenizer"
        )
    return text


def _digits(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    digits = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= digits[0] <= digits[1] <= MOST_DIGITS:
        raise argparse.ArgumentTypeError(f"{text!r}: give a number or a range up to {MOST_DIGITS}, such as 4-9")
    return digits


def parse_arguments(arguments: list[str] | None = None) -> Options:
    """Parse and check the command line; exit with a message if the value of a flag is invalid.

    Raises:
        ValueError: flags exclude each other, or a folder cannot be used; the message names the flag and the remedy.
    """
    values = vars(build_parser().parse_args(arguments))
    run = {name: values.pop(name) for name in ("output_dir", "num_workers", "work_dir", "overwrite")}
    prefix = "retrieval_"
    retrieval = {name.removeprefix(prefix): values.pop(name) for name in list(values) if name.startswith(prefix)}
    settings = Settings(retrieval=RetrievalSettings(**retrieval), **values)
    sources = [*settings.sources, *settings.validation_sources]
    problems = [*_name_problems(sources), *_folder_problems(run["output_dir"], run["work_dir"], sources)]
    if problems:
        raise ValueError("\n  ".join(problems))
    return Options(settings, **run)


def _name_problems(sources: list[Source]) -> list[str]:
    times = Counter(source.name for source in sources)
    return [
        f"--input: two sources are named {name!r}; tell them apart with NAME=SOURCE"
        for name, count in times.items()
        if count > 1
    ]


def _folder_problems(output_dir: Path, work_dir: Path | None, sources: list[Source]) -> list[str]:
    checks: list[Callable[[], None]] = [
        lambda: check_output_dir(output_dir),
        lambda: _check_outside("--output-dir", output_dir, sources),
    ]
    if work_dir is not None:
        checks += [
            lambda: check_folder("--work-dir", work_dir),
            lambda: _check_outside("--work-dir", work_dir, sources),
            lambda: _check_kept(work_dir, output_dir),
        ]
    problems = []
    for check in checks:
        try:
            check()
        except ValueError as problem:
            problems.append(str(problem))
    return problems


def _check_kept(work_dir: Path, output_dir: Path) -> None:
    for folder in (output_dir.resolve(), folder_aside(output_dir)):
        if work_dir.resolve().is_relative_to(folder):
            raise ValueError(
                f"--work-dir {work_dir}: lies in {folder}, which --output-dir replaces; take another folder"
            )


def _check_outside(flag: str, folder: Path, sources: list[Source]) -> None:
    for source in sources:
        if not source.on_hub and folder.resolve().is_relative_to(Path(source.location).resolve()):
            raise ValueError(
                f"{flag} {folder}: lies in the input {source.location}, so the next run would read what this one "
                "writes; take a folder outside of it"
            )
