"""Draws the results of the other scripts.

python plot.py perplexity before.csv after.csv --output perplexity.png
python plot.py needle output/needle/MODEL/cells.jsonl --output needle.png
python plot.py loss output/stage1/metrics.jsonl output/stage2/metrics.jsonl --labels "stage 1" "stage 2"

Without the word perplexity, needle or loss in front, the files hold perplexity, as for the original project's plot.py:

python plot.py data/debug.csv --xmax 550000 --ymax 2 --ymin 1.5
"""

import argparse
from dataclasses import replace
from pathlib import Path

from easy_context.common.flags import FlagParser, refusals
from easy_context.evaluation import plots, results
from easy_context.evaluation.axes import Limits

KINDS = ("perplexity", "needle", "loss")


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the flags, checked."""
    args = build_parser().parse_args(arguments)
    named = args.files[0] in KINDS
    args.kind = args.files.pop(0) if named else KINDS[0]
    args.files = [Path(file) for file in args.files]
    if not args.files:
        raise ValueError(f"{args.kind}: name the files to draw after it")
    for file in args.files:
        if not file.is_file():
            hint = "" if named else f" (and no kind of result: {', '.join(KINDS)})"
            raise FileNotFoundError(f"{file}: no such file{hint}")
    args.limits = Limits(args.xmin, args.xmax, args.ymin, args.ymax)
    check_kind(args)
    check_outputs(args)
    return args


def build_parser() -> FlagParser:
    """Return the parser."""
    parser = FlagParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="%(prog)s [perplexity | needle | loss] FILE [FILE ...] [flags]",
    )
    parser.add_argument(
        "files",
        nargs="+",
        metavar="FILE",
        help="CSV of eval_ppl.py (or of the original's), JSONL or CSV of eval_needle.py, metrics.jsonl of train.py",
    )
    parser.add_argument(
        "--output",
        "-o",
        type=Path,
        help="the picture (.png, .pdf, .svg), or a folder for it; default: the first file's name with .png; needle "
        "draws one picture a file",
    )
    parser.add_argument("--labels", nargs="+", help="names of the curves, in order")
    parser.add_argument("--title", default="", help="above the picture; default: what it shows")
    parser.add_argument(
        "--trained-length",
        type=int,
        nargs="+",
        metavar="TOKENS",
        help="perplexity: tokens of the rows that the models were trained on, one for all curves or one for each in "
        "order; default: as the CSV has it",
    )
    for name, what in (("x", "context length or step"), ("y", "perplexity or loss")):
        for end, side in (("min", "smallest"), ("max", "largest")):
            parser.add_argument(f"--{name}{end}", type=float, help=f"{side} {what} shown; default: fits the data")
    return parser


def check_kind(args: argparse.Namespace) -> None:
    """Raise ValueError for a flag that the kind of picture cannot honour."""
    if args.kind == "needle" and args.labels:
        raise ValueError("--labels name curves, and needle draws none; give --title")
    if args.kind == "needle" and args.limits != plots.NO_LIMITS:
        raise ValueError("--xmin, --xmax, --ymin and --ymax are for curves, and needle draws none; leave them out")
    if args.trained_length and args.kind != "perplexity":
        raise ValueError(f"--trained-length is for perplexity, and {args.kind} does not mark it; leave it out")
    if args.trained_length and min(args.trained_length) < 1:
        raise ValueError(f"--trained-length {min(args.trained_length)}: give at least 1")


def check_outputs(args: argparse.Namespace) -> None:
    """Find the names of the pictures; raise ValueError for files or pictures that are in each other's way."""
    repeated = [file for i, file in enumerate(args.files) if file.resolve() in [f.resolve() for f in args.files[:i]]]
    if repeated:
        raise ValueError(f"{repeated[0]} is given twice; leave one out")
    args.outputs = [output_of(file, args.output) for file in (args.files if args.kind == "needle" else args.files[:1])]
    for i, output in enumerate(args.outputs):
        if output in args.outputs[:i]:
            raise ValueError(
                f"needle draws one picture a file, and two of them would be {output}; draw them one by one"
            )
        if output.resolve() in [file.resolve() for file in args.files]:
            raise ValueError(f"--output {output} would replace what is drawn; name another file")


def output_of(file: Path, output: Path | None) -> Path:
    """Where the picture of `file` goes, with its ending.

    Args:
        file: what is drawn.
        output: the flag: a file, one without ending, a folder, or None.

    Raises:
        ValueError: an ending that is no kind of picture.
    """
    if output is None:
        return file.with_suffix(".png")
    if output.is_dir():
        return output / f"{file.stem}.png"
    if not output.suffix:
        return output.with_name(f"{output.name}.png")
    if output.suffix[1:].lower() not in plots.FORMATS:
        raise ValueError(f"--output {output}: {output.suffix} is no kind of picture; use .png, .pdf or .svg")
    return output


def labelled(names: list[str], labels: list[str] | None) -> list[str]:
    """The labels, or if there are none the last part of each name, with more of it where that is not unique."""
    if labels is not None:
        if len(labels) != len(names):
            raise ValueError(f"--labels: {len(labels)} for {len(names)} curves ({', '.join(names)})")
        return labels
    if len(set(names)) != len(names):
        raise ValueError(
            f"{len(names)} curves are called {', '.join(sorted(set(names)))}; tell them apart with --labels"
        )
    short = [Path(name).name for name in names]
    return short if len(set(short)) == len(short) else names


def draw(args: argparse.Namespace) -> None:
    """Reads the files and draws: all in one picture, but needle results one by one."""
    output = args.outputs[0]
    if args.kind == "perplexity":
        plots.draw_perplexity(perplexity_curves(args), output, args.title, args.limits)
    elif args.kind == "loss":
        folders = [str(file.parent) for file in args.files]
        unique = len(set(folders)) == len(folders)
        labels = labelled(folders if unique else [str(file) for file in args.files], args.labels)
        runs = [(label, results.read_metrics(file)) for label, file in zip(labels, args.files, strict=True)]
        plots.draw_loss(runs, output, args.title, args.limits)
    else:
        read = [results.read_cells(file) for file in args.files]
        for file, (_, cells) in zip(args.files, read, strict=True):
            tasks = sorted({cell["task"] for cell in cells})
            if len(tasks) > 1:
                raise ValueError(
                    f"{file} holds {', '.join(tasks)}; draw one task at a time (eval_needle.py draws each)"
                )
        for (model, cells), output in zip(read, args.outputs, strict=True):
            plots.draw_needle(cells, output, args.title or plots.needle_title(cells, model))


def perplexity_curves(args: argparse.Namespace) -> list[results.Curve]:
    """The curves of all files, with the labels and trained lengths of the flags where they are given."""
    found = [(file, curve) for file in args.files for curve in results.read_perplexity(file)]
    names = [curve.label for _, curve in found]
    if len(set(names)) < len(names):  # one model in several files: the files tell them apart
        names = [f"{file}: {curve.label}" for file, curve in found]
    trained = args.trained_length or [curve.trained_length for _, curve in found]
    if len(trained) == 1:
        trained *= len(found)
    if len(trained) != len(found):
        raise ValueError(f"--trained-length: {len(trained)} for {len(found)} curves ({', '.join(names)})")
    return [
        replace(curve, label=label, trained_length=length)
        for (_, curve), label, length in zip(found, labelled(names, args.labels), trained, strict=True)
    ]


def main(arguments: list[str] | None = None) -> None:
    """Draws, or says what is wrong."""
    with refusals("plot.py"):
        args = parse_arguments(arguments)
        draw(args)
    print(f"wrote {', '.join(map(str, args.outputs))}")


if __name__ == "__main__":
    main()
