"""Flags of `prepare_data.py`, all checked before a tokenizer or a data library is loaded."""

import argparse
import math
import os
import re
from dataclasses import dataclass
from pathlib import Path

from .folders import RESULTS, STAGING, check_folder
from .retrieval import RetrievalSettings, read_templates
from .settings import Settings
from .sources import Source, parse_source

MOST_DIGITS = 18
MOST_FACTS = 250  # in 1000 tokens; no fact with its question is shorter than four tokens


@dataclass(frozen=True)
class Options:
    """What the command line asks for; `settings` decides the rows, the rest where and how fast."""

    settings: Settings
    output_dir: Path
    num_workers: int
    work_dir: Path | None
    overwrite: bool


def build_parser() -> argparse.ArgumentParser:
    """Return the parser; its help is the reference of the flags."""
    parser = argparse.ArgumentParser(
        prog="prepare_data.py",
        description="Tokenise documents and pack them into rows of one length, saved with save_to_disk.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    _add_input_flags(parser.add_argument_group("input"))
    _add_row_flags(parser.add_argument_group("rows"))
    _add_retrieval_flags(parser.add_argument_group("retrieval rows (docs/data.md)"))
    _add_run_flags(parser.add_argument_group("output and run"))
    return parser


def _add_input_flags(group) -> None:
    group.add_argument(
        "--input",
        nargs="+",
        required=True,
        metavar="[NAME=]SOURCE",
        help="sources of the mix: a file (.txt .md .jsonl .parquet, text and JSON also .gz .xz .bz2), a folder of "
        "such files, a folder written by save_to_disk, or hub:DATASET[:CONFIG[:SPLIT]]",
    )
    group.add_argument(
        "--validation-input", nargs="+", default=[], metavar="[NAME=]SOURCE", help="sources that only validate"
    )
    group.add_argument(
        "--text-field",
        help="field of the text in JSON, parquet and datasets, taken whatever else a record holds; without this "
        'flag "text", where a record holds neither messages nor prompt and response',
    )
    group.add_argument(
        "--document-start",
        metavar="REGEX",
        help="in text files a document begins at each line that matches; without it a file is one document",
    )
    group.add_argument("--strict", action="store_true", help="stop at the first bad record instead of counting it")


def _add_row_flags(group) -> None:
    group.add_argument("--tokenizer", required=True, help="folder or hub name of the model or its tokenizer")
    group.add_argument("--seq-length", type=int, required=True, help="tokens of a row")
    group.add_argument("--separator", help="token after each document (default: the end-of-sequence token)")
    group.add_argument(
        "--validation-fraction", type=float, default=0.0, help="share of each source held out, in whole documents"
    )
    group.add_argument(
        "--upsample-long",
        type=float,
        default=1.0,
        help="weight of long documents against short ones of the same source; the mix of sources stays (5 is usual)",
    )
    group.add_argument("--long-from", type=int, default=4096, help="tokens from which a document counts as long")
    group.add_argument(
        "--train-tokens", type=int, help="go over the documents again, or stop early, for about so many tokens"
    )
    group.add_argument("--seed", type=int, default=0, help="of every random choice")


def _add_retrieval_flags(group) -> None:
    group.add_argument(
        "--retrieval-fraction",
        type=float,
        default=0.0,
        help="share of the train rows into whose text facts and questions about them are written",
    )
    group.add_argument(
        "--retrieval-facts", type=float, default=1.0, help="facts for 1000 tokens of a retrieval row, at least one"
    )
    group.add_argument(
        "--retrieval-text-labels", type=float, default=0.25, help="share of the text of a retrieval row that is learned"
    )
    group.add_argument("--retrieval-digits", default="4-9", help="fewest and most digits of a fact's number")
    group.add_argument(
        "--retrieval-templates",
        help="JSON list of {statement, question, answer} with {name} and {value}, for own facts",
    )


def _add_run_flags(group) -> None:
    group.add_argument("--output-dir", type=Path, required=True, help="gets train/, validation/ and the report")
    group.add_argument("--work-dir", type=Path, help="keep the tokenised documents here, to reuse them in other runs")
    group.add_argument("--num-workers", type=int, default=_available_cores(), help="tokenising processes")
    group.add_argument(
        "--overwrite",
        action="store_true",
        help="replace rows that other settings left there, once the new ones are whole",
    )


def _available_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def parse_arguments(arguments: list[str] | None = None) -> Options:
    """Parse and check the command line.

    Raises:
        ValueError: a flag with a value that cannot work; the message names both and the remedy.
        FileNotFoundError: an input that does not exist.
    """
    values = build_parser().parse_args(arguments)
    _check_numbers(values)
    _check_tokenizer(values.tokenizer)
    _check_folders(values.output_dir, values.work_dir)
    sources = [parse_source(text) for text in values.input]
    validation_sources = [parse_source(text, "--validation-input") for text in values.validation_input]
    _check_names([*sources, *validation_sources])
    for flag, folder in (("--output-dir", values.output_dir), ("--work-dir", values.work_dir)):
        if folder is not None:
            _check_outside(flag, folder, [*sources, *validation_sources])
    settings = Settings(
        sources=sources,
        tokenizer=values.tokenizer,
        seq_length=values.seq_length,
        validation_sources=validation_sources,
        text_field=values.text_field,
        document_start=values.document_start,
        separator=values.separator,
        validation_fraction=values.validation_fraction,
        upsample_long=values.upsample_long,
        long_from=values.long_from,
        train_tokens=values.train_tokens,
        retrieval=_retrieval_settings(values),
        strict=values.strict,
        seed=values.seed,
    )
    return Options(settings, values.output_dir, values.num_workers, values.work_dir, values.overwrite)


def _check_numbers(values: argparse.Namespace) -> None:
    for flag in ("seq_length", "long_from", "num_workers", "train_tokens"):
        value = getattr(values, flag)
        if value is not None and value < 1:
            raise ValueError(f"--{flag.replace('_', '-')} {value}: must be at least 1")
    if values.seed < 0:
        raise ValueError(f"--seed {values.seed}: must not be negative")
    if not 0 <= values.validation_fraction < 1:
        raise ValueError(f"--validation-fraction {values.validation_fraction}: must be from 0 to below 1")
    if not 1 <= values.upsample_long < math.inf:
        raise ValueError(
            f"--upsample-long {values.upsample_long}: must be at least 1 (which changes nothing) and finite"
        )
    most_workers = max(64, 4 * _available_cores())
    if values.num_workers > most_workers:
        raise ValueError(
            f"--num-workers {values.num_workers}: at most {most_workers} on this machine; more than a process a core "
            "is no faster"
        )
    if values.document_start is not None:
        try:
            re.compile(values.document_start)
        except re.error as error:
            raise ValueError(
                f"--document-start {values.document_start!r}: not a regular expression: {error}"
            ) from error


def _check_tokenizer(name: str) -> None:
    may_be_on_hub = re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", name)
    if not Path(name).is_dir() and (not may_be_on_hub or Path(name).exists()):
        raise ValueError(f"--tokenizer {name}: not a folder; give the folder or the hub name of a model or tokenizer")


def _check_folders(output_dir: Path, work_dir: Path | None) -> None:
    check_folder("--output-dir", output_dir)
    if work_dir is not None:
        check_folder("--work-dir", work_dir)
        if work_dir.resolve() in [(output_dir / name).resolve() for name in (*RESULTS, STAGING)]:
            raise ValueError(f"--work-dir {work_dir}: results of --output-dir go there; take another folder")


def _check_outside(flag: str, folder: Path, sources: list[Source]) -> None:
    for source in sources:
        if not source.on_hub and Path(source.location).resolve() in (folder.resolve(), *folder.resolve().parents):
            raise ValueError(
                f"{flag} {folder}: lies in the input {source.location}, so the next run would read what this one "
                "writes; take a folder outside of it"
            )


def _retrieval_settings(values: argparse.Namespace) -> RetrievalSettings:
    for flag in ("retrieval_fraction", "retrieval_text_labels"):
        value = getattr(values, flag)
        if not 0 <= value <= 1:
            raise ValueError(f"--{flag.replace('_', '-')} {value}: must be from 0 to 1")
    if not 0 < values.retrieval_facts <= MOST_FACTS:
        raise ValueError(f"--retrieval-facts {values.retrieval_facts}: must be above 0 and at most {MOST_FACTS}")
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", values.retrieval_digits)
    digits = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= digits[0] <= digits[1] <= MOST_DIGITS:
        raise ValueError(
            f"--retrieval-digits {values.retrieval_digits!r}: give a number or a range up to {MOST_DIGITS}, such as 4-9"
        )
    return RetrievalSettings(
        values.retrieval_fraction,
        values.retrieval_facts,
        values.retrieval_text_labels,
        digits,
        read_templates(values.retrieval_templates),
    )


def _check_names(sources: list[Source]) -> None:
    names = [source.name for source in sources]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"--input: two sources are named {name!r}; tell them apart with NAME=SOURCE")
