"""Draws the results of the other scripts.

python plot.py perplexity before.csv after.csv --output perplexity.png
python plot.py needle output/needle/MODEL/cells.jsonl --output needle.png
python plot.py loss output/stage1/metrics.jsonl output/stage2/metrics.jsonl --labels "stage 1" "stage 2"
"""

import argparse
import sys
from pathlib import Path

from easy_context.evaluation import plots, results


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """The flags, checked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("perplexity", "needle", "loss"), help="what the files hold")
    parser.add_argument(
        "files", nargs="+", type=Path, help="CSV of eval_ppl.py, JSONL or CSV of eval_needle.py, metrics.jsonl"
    )
    parser.add_argument(
        "--output",
        "-o",
        type=Path,
        help="the picture (.png, .pdf, .svg), or a folder for it; default: the first file's name with .png; needle "
        "draws one picture a file",
    )
    parser.add_argument("--labels", nargs="+", help="names of the curves, in order")
    parser.add_argument("--title", default="", help="above the picture")
    args = parser.parse_args(arguments)
    for file in args.files:
        if not file.is_file():
            raise FileNotFoundError(f"{file}: no such file")
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
    if args.kind == "needle" and args.labels:
        raise ValueError("--labels name curves, and needle draws none; give --title")
    return args


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
        found = [(file, *item) for file in args.files for item in results.read_perplexity(file).items()]
        names = [model for _, model, _ in found]
        if len(set(names)) < len(names):  # one model in several files: the files tell them apart
            names = [f"{file}: {model}" for file, model, _ in found]
        curves = zip(labelled(names, args.labels), (curve for _, _, curve in found), strict=True)
        plots.draw_perplexity(list(curves), output, args.title)
    elif args.kind == "loss":
        folders = [str(file.parent) for file in args.files]
        unique = len(set(folders)) == len(folders)
        labels = labelled(folders if unique else [str(file) for file in args.files], args.labels)
        runs = [(label, results.read_metrics(file)) for label, file in zip(labels, args.files, strict=True)]
        plots.draw_loss(runs, output, args.title)
    else:
        every_cell = [results.read_cells(file) for file in args.files]
        for file, cells in zip(args.files, every_cell, strict=True):
            tasks = sorted({cell["task"] for cell in cells})
            if len(tasks) > 1:
                raise ValueError(
                    f"{file} holds {', '.join(tasks)}; draw one task at a time (eval_needle.py draws each)"
                )
        for cells, output in zip(every_cell, args.outputs, strict=True):
            plots.draw_needle(cells, output, args.title or cells[0]["task"])


def main(arguments: list[str] | None = None) -> None:
    """Draws, or says what is wrong."""
    try:
        args = parse_arguments(arguments)
        draw(args)
    except (ValueError, OSError) as reason:
        sys.exit(f"plot.py: {reason}")
    print(f"wrote {', '.join(map(str, args.outputs))}")


if __name__ == "__main__":
    main()
