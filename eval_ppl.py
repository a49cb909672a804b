"""Perplexity as a function of context length and position, one forward pass a document.

    python eval_ppl.py -m MODEL --text data/haystack/emma.txt --max-tokens 32768
    python eval_ppl.py -m BEFORE -m AFTER --text emma.txt --min-tokens 4096 --max-tokens 131072 --output-file emma.csv
    torchrun --nproc-per-node 8 eval_ppl.py -m MODEL --tokenized emozilla/proofpile-test-tokenized \
        --dataset-min-tokens 500000 --samples 20 --min-tokens 50000 --max-tokens 500000 --tokens-step 50000
    python plot.py perplexity emma.csv --output emma.png

Writes a CSV with one row per model, document and length, and beside it a JSON with the means over all tokens, by length
and by position. The files, and what each number means: docs/evaluation.md.
"""

import csv
import io
import sys
from pathlib import Path

from easy_context.evaluation.arguments import (
    FlagParser,
    add_model_flags,
    check_model_flags,
    context_lengths,
    load_tokenizer,
)
from easy_context.files import check_writable, write_whole

COLUMNS = ("model", "document", "length", "tokens", "loss", "perplexity")


def parse_arguments(arguments: list[str] | None = None):
    """The flags, each checked as far as that goes without loading anything."""
    parser = FlagParser(description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "-m", "--model", action="append", required=True, help="path or hub name; repeat to compare models"
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--text", nargs="+", help="plain text files (.gz and .xz too), one document each")
    source.add_argument("--tokenized", help="dataset of input_ids: save_to_disk folder, parquet, JSONL or hub name")
    parser.add_argument("--split", help="split of --tokenized; default: test, else validation, else train")
    parser.add_argument("--dataset-min-tokens", type=int, help="skip shorter documents; default: --min-tokens")
    parser.add_argument("--samples", type=int, help="at most this many documents; default: all")
    parser.add_argument(
        "--output-file", type=Path, default=Path("output/perplexity.csv"), help="CSV (default: %(default)s)"
    )
    parser.add_argument("--min-tokens", type=int, default=256, help="shortest length (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=8192, help="longest length (default: %(default)s)")
    parser.add_argument(
        "--tokens-step", type=int, default=0, help="from one length to the next; 0, the default, doubles the length"
    )
    parser.add_argument(
        "--bucket-tokens",
        type=int,
        default=4096,
        help="end of the first range of positions; the others double (%(default)s)",
    )
    parser.add_argument(
        "--sliding-window",
        type=int,
        metavar="STRIDE",
        help="read whole documents through windows of each length, moved on by STRIDE tokens, instead of in one pass",
    )
    parser.add_argument(
        "--truncate",
        action="store_true",
        help="with --sliding-window: cut documents to --max-tokens; a single pass always does",
    )
    parser.add_argument(
        "--aggressive-memory",
        action="store_true",
        help="smaller loss chunks, and cached GPU memory freed after each pass",
    )
    add_model_flags(parser)
    args = parser.parse_args(arguments)
    flags = ("--min-tokens", "--max-tokens", "--tokens-step")
    args.lengths = context_lengths(args.min_tokens, args.max_tokens, args.tokens_step, flags)
    if args.samples is not None and args.samples < 1:
        raise ValueError(f"--samples {args.samples}: give at least 1, or leave it out for all documents")
    if args.bucket_tokens < 1:
        raise ValueError(f"--bucket-tokens {args.bucket_tokens}: give at least 1")
    if args.sliding_window is not None and not 1 <= args.sliding_window <= args.min_tokens:
        raise ValueError(
            f"--sliding-window {args.sliding_window}: the stride must be 1 to --min-tokens ({args.min_tokens}), "
            "or windows would leave gaps"
        )
    check_model_flags(args)
    repeated = [name for i, name in enumerate(args.model) if name in args.model[:i]]
    if repeated:
        raise ValueError(f"--model {repeated[0]} is given twice; its results would be one curve")
    if args.split is not None and args.tokenized is None:
        raise ValueError(f"--split {args.split} goes with --tokenized; leave it out with --text")
    if args.output_file.suffix == ".json":
        raise ValueError(f"--output-file {args.output_file}: the summary takes this name; give the CSV another ending")
    for file in (args.output_file, args.output_file.with_suffix(".json")):
        check_writable(file, "--output-file")
    return args


def find_documents(args, name: str, config) -> list:
    """The documents to evaluate model `name` on."""
    from easy_context.evaluation.documents import choose, text_documents
    from easy_context.evaluation.rows import load_rows, tokenized_documents

    if args.text:
        documents = text_documents(args.text, load_tokenizer(name))
    else:
        documents = tokenized_documents(load_rows(args.tokenized, args.split), args.tokenized)
    shortest = args.min_tokens if args.dataset_min_tokens is None else args.dataset_min_tokens
    return choose(documents, shortest, args.samples, config.vocab_size)


def measure(scorer, document, args) -> tuple[dict, dict]:
    """One document's sums by length and by range of positions (none with a sliding window)."""
    from easy_context.evaluation import perplexity
    from easy_context.evaluation.documents import targets_of

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
    for document in tqdm(own, desc="documents", disable=not scorer.is_first_rank):
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
    """Evaluates every model and writes the CSV and JSON."""
    try:
        args = parse_arguments(arguments)
        from easy_context.evaluation.loading import (
            UnusableModel,
            check_parallelism,
            distributed,
            load_config,
            load_scorer,
        )

        configs = [load_config(name, args.rope_theta, args.max_tokens) for name in args.model]
        for config in configs:
            check_parallelism(config, args, args.max_tokens)
        jobs = [(name, c, find_documents(args, name, c)) for name, c in zip(args.model, configs, strict=True)]
    except (ValueError, OSError) as reason:
        sys.exit(f"eval_ppl.py: {reason}")
    rows, summaries = [], {}
    try:
        with distributed() as device:
            for name, config, documents in jobs:
                label = name if args.rope_theta is None else f"{name} (RoPE base {args.rope_theta:g})"
                with load_scorer(name, config, args, device, frugal=args.aggressive_memory) as scorer:
                    results = evaluate(scorer, documents, args)
                    writes = scorer.is_first_rank
                for document, by_length, _ in results:
                    rows += [(label, document, n, s.tokens, s.mean, s.perplexity) for n, s in by_length.items()]
                summaries[label] = summary_of(results)
                if writes:
                    print_summary(label, summaries[label])
                    write(args, rows, summaries)
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
