"""A perplexity evaluation: from the flags to each document's sums, and from these to the files that users read."""

import argparse
import csv
import io
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from ...common.files import write_whole
from ...model.config import load_config
from ...model.fingerprint import model_fingerprint
from ...model.tokenizer import load_tokenizer
from ..journal import Journal, missing_pieces, run_pieces
from ..loading import dtype_of, load_model_config
from ..memory_check import check_memory
from ..plots import draw_perplexity, short_names
from ..results import json_text, read_perplexity
from ..scorer import Scorer
from . import documents, sums
from .arguments import PICTURE, SUMMARY
from .documents import Document
from .sums import Sum, TokenSums

COLUMNS = ("model", "document", "length", "tokens", "loss", "perplexity", "trained_length")
# An unfinished run may go on with other processes and modes; with other values of these it would be another run.
SETTINGS = ("lengths", "bucket_tokens", "sliding_window", "truncate", "rope_theta")


@dataclass(frozen=True)
class Job:
    """A model and what it is evaluated on.

    Attributes:
        name: path or hub name of the model.
        label: the model in results.
        config: of the model, as it is to run.
        trained_length: tokens of the rows that it was trained on, as far as its config knows.
        documents: to evaluate.
        fingerprint: of the model and the documents: what a run that goes on recognises them by.
    """

    name: str
    label: str
    config: Any
    trained_length: int | None
    documents: list[Document]
    fingerprint: str

    def key(self, number: int) -> tuple[str, str, int]:
        """Return what tells a document of this job from all others in the journal."""
        return self.label, self.fingerprint, number


def documents_of(args: argparse.Namespace, name: str) -> Iterator[Document]:
    """Return every document, in the tokens of model `name`."""
    if args.tokenized is not None:
        return documents.tokenized_documents(args.tokenized, args.split, args.subset)
    tokenizer = load_tokenizer(name)
    if args.text is not None:
        return documents.text_documents(args.text, tokenizer)
    return documents.dataset_documents(args.dataset, args.feature or "text", tokenizer, args.split, args.subset)


def save_tokenized(args: argparse.Namespace) -> None:
    """Tokenise every document for the first model and save them."""
    count, tokens = documents.save_tokenized(documents_of(args, args.model[0]), args.save_tokenized)
    print(
        f"saved {count:,} documents of {tokens:,} tokens, for the tokenizer of {args.model[0]}, in "
        f"{args.save_tokenized}; --tokenized {args.save_tokenized} evaluates them"
    )


def prepare(args: argparse.Namespace) -> tuple[list[Job], dict]:
    """Return the jobs, and the settings that a continued run must share; every model is checked, and none loaded.

    Raises:
        ValueError: a model, or its documents, cannot be evaluated.
    """
    # Another RoPE base raises the window of a config, which is then no longer the trained one.
    trained = [getattr(load_config(name), "max_position_embeddings", None) for name in args.model]
    configs = [load_model_config(name, args, args.max_tokens) for name in args.model]
    shortest = args.min_tokens if args.dataset_min_tokens is None else args.dataset_min_tokens
    suffix = "" if args.rope_theta is None else f" (RoPE base {args.rope_theta:g})"
    jobs, settings = [], {key: getattr(args, key) for key in SETTINGS}
    settings["dtype"] = str(dtype_of(args)).removeprefix("torch.")  # auto is another one on a GPU
    for name, config, length in zip(args.model, configs, trained, strict=True):
        chosen = documents.choose(documents_of(args, name), shortest, args.samples, config.vocab_size)
        longest = min(args.max_tokens, max(len(document.input_ids) for document in chosen))
        check_memory(name, config, args, longest, "--max-tokens")
        fingerprint = f"{model_fingerprint(name, config)} {documents.documents_fingerprint(chosen)}"
        jobs.append(Job(name, name + suffix, config, length, chosen, fingerprint))
    return jobs, settings


def open_journal(args: argparse.Namespace, settings: dict, journal: Journal) -> None:
    """Open the file of measured documents, on the first process."""
    journal.open(settings, _key, _is_measured, resume=args.resume == "auto")


def _key(record: dict) -> tuple[str, str, int]:
    return record["model"], record["fingerprint"], record["number"]


def _is_measured(record: dict) -> bool:
    sizes = [part[-1] for part in (*record["by_length"], *record["by_position"])]
    return isinstance(record["document"], str) and all(isinstance(tokens, int) for tokens in sizes)


def measure(scorer: Scorer, document: Document, args: argparse.Namespace) -> tuple[dict, dict]:
    """Return a document's sums by length and by range of positions (none of these with a sliding window)."""
    input_ids, targets = document.input_ids, document.targets
    if args.sliding_window is None or args.truncate:
        input_ids, targets = input_ids[: args.max_tokens], targets[: args.max_tokens]
    if args.sliding_window is not None:
        windows = (length for length in args.lengths if length <= len(input_ids))
        slide = sums.sliding_window
        return {n: slide(scorer.token_losses, input_ids, targets, n, args.sliding_window) for n in windows}, {}
    losses = scorer.token_losses(input_ids[None], targets[None])[0]
    running = TokenSums.of(losses, targets)
    edges = sums.position_edges(args.bucket_tokens, args.max_tokens)
    return sums.curve(running, args.lengths), sums.by_position(running, edges)


def measure_documents(args: argparse.Namespace, job: Job, scorer: Scorer, journal: Journal) -> None:
    """Measure the documents of a model that the journal lacks."""

    def work(piece: tuple[str, str, int]) -> dict:
        document = job.documents[piece[-1]]
        by_length, by_position = measure(scorer, document, args)
        return {
            **dict(zip(("model", "fingerprint", "number"), piece, strict=True)),
            "document": document.name,
            "by_length": [(length, part.loss, part.tokens) for length, part in by_length.items()],
            "by_position": [(*ends, part.loss, part.tokens) for ends, part in by_position.items()],
        }

    pending = missing_pieces(scorer, map(job.key, range(len(job.documents))), journal)
    hidden = args.hide_progress or not scorer.is_first_rank
    with tqdm(total=len(pending), desc="documents", disable=hidden) as bar:
        for together in run_pieces(scorer, pending, work, journal):
            bar.update(len(together))


def write_results(args: argparse.Namespace, jobs: list[Job], journal: Journal) -> None:
    """Write the CSV, the JSON and the picture of the models that are measured, and print the last one's means."""
    rows, summaries = [], {}
    for job in jobs:
        records = [journal.finished[job.key(number)] for number in range(len(job.documents))]
        for record in records:
            for length, loss, tokens in record["by_length"]:
                total = Sum(loss, tokens)
                measured = (record["document"], length, tokens, total.mean, total.perplexity)
                rows.append((job.label, *measured, job.trained_length))
        summaries[job.label] = {"trained_length": job.trained_length, **summary_of(records)}
    print_summary(jobs[-1].label, summaries[jobs[-1].label])
    table = io.StringIO()
    csv.writer(table).writerows([COLUMNS, *rows])
    write_whole(args.output_file, table.getvalue())
    hidden = ("output_file", "lengths", "resume")
    settings = {key: value for key, value in vars(args).items() if key not in hidden}
    summary_file, picture = (args.output_file.with_suffix(ending) for ending in (SUMMARY, PICTURE))
    write_whole(summary_file, json_text({"settings": settings, "models": summaries}))
    written = [args.output_file, summary_file, *_draw(args.output_file, picture)]
    print(f"\nwrote {', '.join(map(str, written))}")


def _draw(table: Path, picture: Path) -> list[Path]:
    """Draw the curves of a CSV, if every model has a scored token; return the picture's name if there is one."""
    try:
        curves = read_perplexity(table)
    except ValueError as reason:
        print(f"no picture: {reason}")
        return []
    labels = short_names([curve.label for curve in curves])
    draw_perplexity([replace(curve, label=label) for curve, label in zip(curves, labels, strict=True)], picture)
    return [picture]


def summary_of(records: list[dict]) -> dict:
    """Return the means over all tokens of all documents, by length and by range of positions."""

    def entry(total: Sum) -> dict:
        return {"tokens": total.tokens, "loss": total.mean, "perplexity": total.perplexity}

    lengths = sums.pool({n: Sum(loss, tokens) for n, loss, tokens in record["by_length"]} for record in records)
    ranges = sums.pool({(a, b): Sum(loss, tokens) for a, b, loss, tokens in r["by_position"]} for r in records)
    reached = Counter(n for record in records for n, *_ in record["by_length"])
    return {
        "documents": len(records),
        "by_length": [{"length": n, "documents": reached[n], **entry(lengths[n])} for n in sorted(lengths)],
        "by_position": [{"from": a, "to": b, **entry(ranges[a, b])} for a, b in sorted(ranges)],
    }


def print_summary(label: str, summary: dict) -> None:
    """Print the two tables."""
    print(f"\n{label}: {summary['documents']} documents")
    for row in summary["by_length"]:
        print(f"  first {row['length']:>9,} tokens   perplexity {row['perplexity']:10.3f}   ({row['tokens']:,} tokens)")
    for row in summary["by_position"]:
        where = f"{row['from']:,} to {row['to']:,}"
        print(f"  positions {where:>22}   perplexity {row['perplexity']:10.3f}   ({row['tokens']:,} tokens)")
