"""eval_ppl.py's flags, and the checks of them that load nothing."""

import argparse
from pathlib import Path

from ...common.files import check_writable
from ...common.flags import FlagParser, whole_number
from ..arguments import add_model_flags, add_resume_flag, context_lengths

# Endings of the files next to the CSV: means, picture, and the results so far of an unfinished run.
SUMMARY, PICTURE, UNFINISHED = ".json", ".png", ".unfinished.jsonl"


def build_parser() -> FlagParser:
    """Return the parser."""
    parser = FlagParser(
        description="Measure perplexity by context length and position, in one forward pass per document."
    )
    parser.add_argument(
        "-m",
        "--model",
        action="extend",
        nargs="+",
        required=True,
        help="folders or hub names; several models are compared",
    )
    _add_document_flags(parser.add_argument_group("documents"))
    parser.add_argument(
        "--output-file",
        type=Path,
        default=Path("output/perplexity.csv"),
        help="CSV file; a JSON and a PNG of the same name are written next to it (default: %(default)s)",
    )
    add_resume_flag(parser, "--output-file")
    parser.add_argument("--min-tokens", type=int, default=256, help="shortest length in tokens (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=8192, help="longest length in tokens (default: %(default)s)")
    parser.add_argument(
        "--tokens-step",
        type=whole_number(0),
        default=0,
        help="step between lengths in tokens; with 0 (default) each length is twice the previous one",
    )
    parser.add_argument(
        "--bucket-tokens",
        type=whole_number(1),
        default=4096,
        help="end of the first range of positions in tokens; each later end is twice the previous one (default: "
        "%(default)s)",
    )
    parser.add_argument(
        "--sliding-window",
        type=whole_number(1),
        metavar="STRIDE",
        help="evaluate complete documents in windows of each length that move by STRIDE tokens, instead of in one pass",
    )
    parser.add_argument(
        "--truncate",
        action="store_true",
        help="with --sliding-window: cut documents to --max-tokens; without it they are always cut",
    )
    parser.add_argument(
        "--aggressive-memory",
        action="store_true",
        help="smaller loss chunks, and cached GPU memory freed after each pass",
    )
    parser.add_argument("--hide-progress", action="store_true", help="show no progress bar")
    add_model_flags(parser)
    return parser


def _add_document_flags(group: argparse._ArgumentGroup) -> None:
    source = group.add_mutually_exclusive_group(required=True)
    source.add_argument("--text", nargs="+", help="text files (also .gz, .xz and .bz2), one document each")
    source.add_argument(
        "-d",
        "--dataset",
        help="dataset of text with one document per row: save_to_disk folder, parquet, JSON or hub name",
    )
    source.add_argument("--tokenized", help="dataset of input_ids, of the same kinds")
    group.add_argument("-f", "--feature", help="column of --dataset that holds the text; default: text")
    group.add_argument("-s", "--subset", help="configuration of --dataset or --tokenized on the hub")
    group.add_argument("--split", help="split of --dataset or --tokenized; default: test, else validation, else train")
    group.add_argument("--dataset-min-tokens", type=int, help="skip documents with fewer tokens; default: --min-tokens")
    group.add_argument("--samples", type=whole_number(1), help="maximum number of documents; default: all")
    group.add_argument(
        "--save-tokenized",
        type=Path,
        metavar="FOLDER",
        help="tokenise all documents of --dataset or --text for the first --model, save them for --tokenized, and exit",
    )


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the flags, with the `lengths` of the grid.

    Raises:
        ValueError: a value is not supported; the message names its flag.
    """
    args = build_parser().parse_args(arguments)
    flags = ("--min-tokens", "--max-tokens", "--tokens-step")
    args.lengths = context_lengths(args.min_tokens, args.max_tokens, args.tokens_step, flags)
    if args.sliding_window is not None and args.sliding_window > args.min_tokens:
        raise ValueError(
            f"--sliding-window {args.sliding_window}: the stride must be 1 to --min-tokens ({args.min_tokens}), "
            "or windows would leave gaps"
        )
    repeated = [name for i, name in enumerate(args.model) if name in args.model[:i]]
    if repeated:
        raise ValueError(f"--model {repeated[0]} is given twice; its results would be one curve")
    _check_document_flags(args)
    if not args.output_file.name:
        raise ValueError("--output-file is empty or names a folder: name a file")
    if args.output_file.suffix in (SUMMARY, PICTURE):
        raise ValueError(
            f"--output-file {args.output_file}: the summary and the picture take {SUMMARY} and {PICTURE}; give the CSV "
            "another ending"
        )
    for file in (
        args.output_file,
        *(args.output_file.with_suffix(ending) for ending in (SUMMARY, PICTURE, UNFINISHED)),
    ):
        check_writable(file, "--output-file")
    return args


def _check_document_flags(args: argparse.Namespace) -> None:
    """Raise ValueError for a flag that the source of the documents does not support."""
    source = next(name for name in ("text", "dataset", "tokenized") if getattr(args, name) is not None)
    for name, sources in (
        ("feature", ("dataset",)),
        ("subset", ("dataset", "tokenized")),
        ("split", ("dataset", "tokenized")),
        ("save_tokenized", ("text", "dataset")),
    ):
        if getattr(args, name) is not None and source not in sources:
            flag = f"--{name.replace('_', '-')} {getattr(args, name)}"
            raise ValueError(f"{flag} goes with --{' or --'.join(sources)}; leave it out with --{source}")
    folder = args.save_tokenized
    if folder is not None:
        check_writable(folder / "state.json", "--save-tokenized")
        if folder.is_dir() and any(folder.iterdir()):
            raise ValueError(f"--save-tokenized {folder}: there are files in this folder; name a new one")
