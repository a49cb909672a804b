"""Perplexity as a function of context length and position, one forward pass a document.

    python eval_ppl.py -m MODEL --text data/haystack/emma.txt --max-tokens 32768
    python eval_ppl.py -m BEFORE -m AFTER --text emma.txt --min-tokens 4096 --max-tokens 131072 --output-file emma.csv
    torchrun --nproc-per-node 8 eval_ppl.py -m MODEL --tokenized emozilla/proofpile-test-tokenized \
        --dataset-min-tokens 500000 --samples 20 --min-tokens 50000 --max-tokens 500000 --tokens-step 50000
    python plot.py perplexity emma.csv --output emma.png

Writes a CSV with one row per model, document and length, and beside it a JSON with the means over all tokens, by length
and by position. The files, and what each number means: docs/evaluation.md.
"""

import argparse
import csv
import io
import os
import sys
from collections.abc import Iterator
from typing import Any

from easy_context.common.files import write_whole
from easy_context.common.flags import refusals
from easy_context.common.interrupts import stops_in_one_line
from easy_context.evaluation.perplexity_arguments import parse_arguments

COLUMNS = ("model", "document", "length", "tokens", "loss", "perplexity", "trained_length")


def documents_of(args: argparse.Namespace, name: str) -> Iterator:
    """Every document, in the tokens of model `name`."""
    from easy_context.data.datasets import HELD_OUT_FIRST, open_dataset
    from easy_context.evaluation.rows import tokenized_documents
    from easy_context.evaluation.texts import dataset_documents, text_documents
    from easy_context.model.tokenizer import load_tokenizer

    if args.tokenized is not None:
        rows = open_dataset(args.tokenized, "--tokenized", HELD_OUT_FIRST, args.split, args.subset)
        return tokenized_documents(rows, args.tokenized)
    tokenizer = load_tokenizer(name)
    if args.text is not None:
        return text_documents(args.text, tokenizer)
    rows = open_dataset(args.dataset, "--dataset", HELD_OUT_FIRST, args.split, args.subset)
    return dataset_documents(rows, args.dataset, args.feature or "text", tokenizer)


def find_documents(args: argparse.Namespace, name: str, config: Any) -> list:
    """The documents to evaluate model `name` on."""
    from easy_context.evaluation.texts import choose

    shortest = args.min_tokens if args.dataset_min_tokens is None else args.dataset_min_tokens
    return choose(documents_of(args, name), shortest, args.samples, config.vocab_size)


def save_documents(args: argparse.Namespace) -> None:
    """Tokenise every document for the first model and save them, on the first process."""
    from easy_context.evaluation.texts import save_tokenized

    if int(os.environ.get("RANK", 0)) == 0:
        count, tokens = save_tokenized(documents_of(args, args.model[0]), args.save_tokenized)
        print(
            f"saved {count:,} documents of {tokens:,} tokens, for the tokenizer of {args.model[0]}, in "
            f"{args.save_tokenized}; --tokenized {args.save_tokenized} evaluates them"
        )


def load_configs(args: argparse.Namespace) -> tuple[list, list[int | None]]:
    """Return every model's config as it is to run, and the length it was trained on as far as its config knows."""
    from easy_context.evaluation.loading import load_model_config
    from easy_context.model.config import load_config

    # Another RoPE base raises the window of a config, which is then no longer the trained one.
    trained = [getattr(load_config(name), "max_position_embeddings", None) for name in args.model]
    return [load_model_config(name, args, args.max_tokens) for name in args.model], trained


def measure(scorer, document, args) -> tuple[dict, dict]:
    """One document's sums by length and by range of positions (none with a sliding window)."""
    from easy_context.evaluation import perplexity
    from easy_context.evaluation.texts import targets_of

    input_ids, targets = document.input_ids, targets_of(document)
    if args.sliding_window is None or args.truncate:
        input_ids, targets = input_ids[: args.max_tokens], targets[: args.max_tokens]
    if args.sliding_window is not None:
        windows = (length for length in args.lengths if length <= len(input_ids))
        slide = perplexity.sliding_window
        return {n: slide(scorer.token_losses, input_ids, targets, n, args.sliding_window) for n in windows}, {}
    losses = scorer.token_losses(input_ids[None], targets[None])[0]
    sums = perplexity.TokenSums.of(losses, targets)
    edges = perplexity.position_edges(args.bucket_tokens, args.max_tokens)
    return perplexity.curve(sums, args.lengths), perplexity.by_position(sums, edges)


def evaluate(scorer, documents: list, args) -> list[tuple[str, dict, dict]]:
    """(name, by length, by position) of every document, in order, on every rank."""
    from tqdm import tqdm

    own = documents[scorer.mesh.data_rank :: scorer.mesh.data_size]
    results = []
    for document in tqdm(own, desc="documents", disable=args.hide_progress or not scorer.is_first_rank):
        results.append((document.name, *measure(scorer, document, args)))
    groups = scorer.from_every_group(results)
    return [groups[i % len(groups)][i // len(groups)] for i in range(len(documents))]


def summary_of(results: list[tuple[str, dict, dict]]) -> dict:
    """Means over all tokens of all documents."""
    from easy_context.evaluation.perplexity import pool

    def entry(total) -> dict:
        return {"tokens": total.tokens, "loss": total.mean, "perplexity": total.perplexity}

    by_length, by_position = (pool(result[i] for result in results) for i in (1, 2))
    documents = {length: sum(length in result[1] for result in results) for length in by_length}
    return {
        "documents": len(results),
        "by_length": [
            {"length": length, "documents": documents[length], **entry(by_length[length])}
            for length in sorted(by_length)
        ],
        "by_position": [
            {"from": start, "to": stop, **entry(by_position[start, stop])} for start, stop in sorted(by_position)
        ],
    }


def print_summary(label: str, summary: dict) -> None:
    """The two tables, for the terminal."""
    print(f"\n{label}: {summary['documents']} documents")
    for row in summary["by_length"]:
        print(f"  first {row['length']:>9,} tokens   perplexity {row['perplexity']:10.3f}   ({row['tokens']:,} tokens)")
    for row in summary["by_position"]:
        where = f"{row['from']:,} to {row['to']:,}"
        print(f"  positions {where:>22}   perplexity {row['perplexity']:10.3f}   ({row['tokens']:,} tokens)")


def main(arguments: list[str] | None = None) -> None:
    """Evaluates every model and writes the CSV and JSON, or only tokenises."""
    with refusals("eval_ppl.py"):
        args = parse_arguments(arguments)
    written: list[str] = []

    def what_is_saved() -> str:
        if args.save_tokenized:
            return f"the tokens are not all in {args.save_tokenized}; remove it before you run the same command again"
        if not written:
            return "nothing was saved"
        return f"{len(written)} of {len(args.model)} models saved in {args.output_file}; the same command begins again"

    with stops_in_one_line(what_is_saved):
        if args.save_tokenized:
            with refusals("eval_ppl.py"):
                save_documents(args)
        else:
            evaluate_models(args, written)


def evaluate_models(args: argparse.Namespace, written: list[str]) -> None:
    """Evaluates every model, and appends its name to `written` once its results are on disk."""
    with refusals("eval_ppl.py"):
        from easy_context.evaluation.loading import UnusableModel, distributed, load_scorer

        configs, trained = load_configs(args)
        jobs = [
            (name, config, length, find_documents(args, name, config))
            for name, config, length in zip(args.model, configs, trained, strict=True)
        ]
    rows, summaries = [], {}
    try:
        with distributed() as device:
            for name, config, length, documents in jobs:
                label = name if args.rope_theta is None else f"{name} (RoPE base {args.rope_theta:g})"
                with load_scorer(name, config, args, device, frugal=args.aggressive_memory) as scorer:
                    results = evaluate(scorer, documents, args)
                    writes = scorer.is_first_rank
                for document, by_length, _ in results:
                    rows += [(label, document, n, s.tokens, s.mean, s.perplexity, length) for n, s in by_length.items()]
                summaries[label] = {"trained_length": length, **summary_of(results)}
                if writes:
                    print_summary(label, summaries[label])
                    write(args, rows, summaries)
                    written.append(name)
    except UnusableModel as reason:
        kept = f" ({args.output_file} holds the models before it)" if rows else ""
        sys.exit(f"eval_ppl.py: {reason}{kept}")


def write(args, rows: list[tuple], summaries: dict) -> None:
    """The CSV, and the JSON with the same name, of the models so far: called after each, so that none is lost."""
    from easy_context.evaluation.results import json_text

    table = io.StringIO()
    csv.writer(table).writerows([COLUMNS, *rows])
    write_whole(args.output_file, table.getvalue())
    settings = {key: value for key, value in vars(args).items() if key not in ("output_file", "lengths")}
    summary_file = args.output_file.with_suffix(".json")
    write_whole(summary_file, json_text({"settings": settings, "models": summaries}))
    print(f"\nwrote {args.output_file} and {summary_file}")


if __name__ == "__main__":
    main()
