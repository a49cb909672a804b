"""Draw the results of the other scripts.

python plot.py perplexity before.csv after.csv --output perplexity.png
python plot.py needle output/needle/MODEL/cells.jsonl --output needle.png
python plot.py loss output/stage1/metrics.jsonl output/stage2/metrics.jsonl --labels "stage 1" "stage 2"

If the first word is not perplexity, needle or loss, the files hold perplexity, as for the original project's plot.py:

python plot.py data/debug.csv --xmax 550000 --ymax 2 --ymin 1.5
"""

import argparse
from dataclasses import replace
from pathlib import Path

from easy_context.common.flags import FlagParser, number, refusals, whole_number
from easy_context.evaluation import plots, results
from easy_context.evaluation.axes import Limits

LIMITS = ("xmin", "xmax", "ymin", "ymax")
# Kind of picture -> flags that it does not support.
KINDS = {"perplexity": (), "needle": ("labels", "trained_length", *LIMITS), "loss": ("trained_length",)}


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
        help="picture (.png, .pdf, .svg), or folder for it; default: the first file's name with .png. needle draws one "
        "picture for each file",
    )
    parser.add_argument("--labels", nargs="+", help="names of the curves, in the order of the files")
    parser.add_argument("--title", default="", help="title above the picture; default: its content")
    parser.add_argument(
        "--trained-length",
        type=whole_number(1),
        nargs="+",
        metavar="TOKENS",
        help="perplexity: length of the rows that the models were trained on, one number for all curves or one for "
        "each; default: the CSV's",
    )
    for name in LIMITS:
        what = "context length or step" if name[0] == "x" else "perplexity or loss"
        side = "smallest" if name.endswith("min") else "largest"
        parser.add_argument(f"--{name}", type=number(), help=f"{side} {what} shown; default: from the data")
    return parser


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the flags, with the `kind` of picture, the `limits` of its axes, and its `outputs`.

    Raises:
        ValueError: a flag is not supported for this kind of picture, or files would overwrite each other.
        FileNotFoundError: a file does not exist.
    """
    args = build_parser().parse_args(arguments)
    named = args.files[0] in KINDS
    args.kind = args.files.pop(0) if named else "perplexity"
    args.files = [Path(file) for file in args.files]
    if not args.files:
        raise ValueError(f"{args.kind}: name the files to draw after it")
    for place, file in enumerate(args.files):
        if not file.is_file():
            hint = "" if named else f" (and no kind of result: {', '.join(KINDS)})"
            raise FileNotFoundError(f"{file}: no such file{hint}")
        if file.resolve() in [earlier.resolve() for earlier in args.files[:place]]:
            raise ValueError(f"{file} is given twice; leave one out")
    for name in KINDS[args.kind]:
        if getattr(args, name) is not None:
            raise ValueError(f"--{name.replace('_', '-')} is not for {args.kind}; leave it out")
    args.limits = Limits(*(getattr(args, name) for name in LIMITS))
    args.outputs = [picture_of(file, args.output) for file in args.files]
    if args.kind != "needle":
        args.outputs = args.outputs[:1]
    for place, output in enumerate(args.outputs):
        if output in args.outputs[:place]:
            raise ValueError(f"needle draws one picture a file, and two would be {output}; draw them one by one")
        if output.resolve() in [file.resolve() for file in args.files]:
            raise ValueError(f"--output {output} would replace what is drawn; name another file")
    return args


def picture_of(file: Path, output: Path | None) -> Path:
    """Return the path of the picture of `file`, with its ending.

    Args:
        file: file with the results to draw.
        output: value of the flag: a file with or without ending, a folder, or None.

    Raises:
        ValueError: the ending is not that of a picture.
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


def labels_of(names: list[str], labels: list[str] | None) -> list[str]:
    """Return the labels of the curves: those of the flag, or shortened names.

    Raises:
        ValueError: the number of labels is not that of the curves, or curves have the same name.
    """
    if labels is not None and len(labels) != len(names):
        raise ValueError(f"--labels: {len(labels)} for {len(names)} curves ({', '.join(names)})")
    if labels is None and len(set(names)) != len(names):
        raise ValueError(
            f"{len(names)} curves are called {', '.join(sorted(set(names)))}; tell them apart with --labels"
        )
    return labels or plots.short_names(names)


def draw_perplexity(args: argparse.Namespace) -> None:
    """Draw the curves of all files, with the labels and trained lengths of the flags if these are given."""
    found = [(file, curve) for file in args.files for curve in results.read_perplexity(file)]
    names = [curve.label for _, curve in found]
    if len(set(names)) < len(names):  # one model in several files: the files tell them apart
        names = [f"{file}: {curve.label}" for file, curve in found]
    trained = args.trained_length or [curve.trained_length for _, curve in found]
    if len(trained) == 1:
        trained *= len(found)
    if len(trained) != len(found):
        raise ValueError(f"--trained-length: {len(trained)} for {len(found)} curves ({', '.join(names)})")
    curves = [
        replace(curve, label=label, trained_length=length)
        for (_, curve), label, length in zip(found, labels_of(names, args.labels), trained, strict=True)
    ]
    plots.draw_perplexity(curves, args.outputs[0], args.title, args.limits)


def draw_loss(args: argparse.Namespace) -> None:
    """Draw the losses of all files, each run named by its folder."""
    folders = [str(file.parent) for file in args.files]
    unique = len(set(folders)) == len(folders)
    labels = labels_of(folders if unique else [str(file) for file in args.files], args.labels)
    runs = [(label, results.read_metrics(file)) for label, file in zip(labels, args.files, strict=True)]
    plots.draw_loss(runs, args.outputs[0], args.title, args.limits)


def draw_needle(args: argparse.Namespace) -> None:
    """Draw the cells of each file in a separate picture."""
    read = [results.read_cells(file) for file in args.files]
    for file, (_, cells) in zip(args.files, read, strict=True):
        tasks = sorted({cell["task"] for cell in cells})
        if len(tasks) > 1:
            raise ValueError(f"{file} holds {', '.join(tasks)}; draw one task at a time (eval_needle.py draws each)")
    for (model, cells), output in zip(read, args.outputs, strict=True):
        plots.draw_needle(cells, output, args.title or plots.needle_title(cells, model))


def main(arguments: list[str] | None = None) -> None:
    """Draw the picture, or exit with a message."""
    with refusals("plot.py"):
        args = parse_arguments(arguments)
        {"perplexity": draw_perplexity, "needle": draw_needle, "loss": draw_loss}[args.kind](args)
    print(f"wrote {', '.join(map(str, args.outputs))}")


if __name__ == "__main__":
    main()
