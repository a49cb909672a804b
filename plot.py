"""Draws the results of the other scripts.

python plot.py perplexity before.csv after.csv --output perplexity.png
python plot.py needle output/needle/MODEL/cells.jsonl --output needle.png
python plot.py loss output/stage1/metrics.jsonl output/stage2/metrics.jsonl --labels "stage 1" "stage 2"
"""

import argparse
import sys
from pathlib import Path

from easy_context.evaluation import plots


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """The flags, checked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("perplexity", "needle", "loss"), help="what the files hold")
    parser.add_argument(
        "files", nargs="+", type=Path, help="CSV of eval_ppl.py, JSONL or CSV of eval_needle.py, metrics.jsonl"
    )
    parser.add_argument("--output", "-o", type=Path, help="the PNG; default: the first file's name with .png")
    parser.add_argument("--labels", nargs="+", help="names of the curves, in order")
    parser.add_argument("--title", default="", help="above the picture")
    args = parser.parse_args(arguments)
    for file in args.files:
        if not file.is_file():
            raise FileNotFoundError(f"{file}: no such file")
    if args.output is None:
        args.output = args.files[0].with_suffix(".png")
    return args


def labelled(names: list[str], labels: list[str] | None) -> list[str]:
    """The labels, or if there are none the last part of each name, with more of it where that is not unique."""
    if labels is not None:
        if len(labels) != len(names):
            raise ValueError(f"--labels: {len(labels)} for {len(names)} curves ({', '.join(names)})")
        return labels
    short = [Path(name).name for name in names]
    return short if len(set(short)) == len(short) else names


def draw(args: argparse.Namespace) -> None:
    """Reads the files and draws the one picture."""
    if args.kind == "perplexity":
        curves = [(model, curve) for file in args.files for model, curve in plots.read_perplexity(file).items()]
        labels = labelled([model for model, _ in curves], args.labels)
        plots.draw_perplexity(
            [(label, curve) for label, (_, curve) in zip(labels, curves, strict=True)], args.output, args.title
        )
    elif args.kind == "loss":
        labels = labelled([str(file.parent) for file in args.files], args.labels)
        runs = [(label, plots.read_metrics(file)) for label, file in zip(labels, args.files, strict=True)]
        plots.draw_loss(runs, args.output, args.title)
    else:
        cells = [cell for file in args.files for cell in plots.read_cells(file)]
        tasks = sorted({cell["task"] for cell in cells})
        if len(tasks) > 1:
            raise ValueError(
                f"needle: the files hold {', '.join(tasks)}; draw one task at a time (eval_needle.py draws each)"
            )
        plots.draw_needle(cells, args.output, args.title or tasks[0])


def main(arguments: list[str] | None = None) -> None:
    """Draws, or says what is wrong."""
    try:
        args = parse_arguments(arguments)
        draw(args)
    except (ValueError, OSError) as reason:
        sys.exit(f"plot.py: {reason}")
    print(f"wrote {args.output}")


if __name__ == "__main__":
    main()
