"""Say what the data is: counts as JSON, document lengths as a picture."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from .corpus import Corpus
from .input_files import describe_files, files_left_out
from .packing import count_tokens
from .planning import SplitRows
from .settings import Settings

PERCENTILES = (0, 10, 50, 90, 100)
WORTH_A_NOTE = 0.05  # tokens of a source drawn too many or too few, as a share of those it holds


def build_report(
    settings: Settings, corpora: list[Corpus], plans: dict[str, SplitRows], counts: dict[str, dict[str, int]]
) -> dict[str, Any]:
    """Collect settings, counts of each source and of each split.

    Args:
        settings: of the run.
        corpora: of all sources, those for training first.
        plans: of each split.
        counts: of each split, what `write_rows` returned.
    """
    import datasets
    import transformers

    inputs = [*settings.sources, *settings.validation_sources]
    tokens = {split: tokens_of_documents(plan, corpora) for split, plan in plans.items()}
    total, train_total = (sum(int(part.sum()) for part in parts) for parts in (_lengths(corpora), tokens["train"]))
    sources = [
        {
            "name": source.name,
            "documents": len(corpus.lengths),
            "tokens": int(corpus.lengths.sum()),
            "share": round(float(corpus.lengths.sum()) / max(total, 1), 4),
            "bad_records": len(corpus.bad_records),
            "answers_not_learned": corpus.answers_left_out,
            "files_left_out": {} if source.on_hub else files_left_out(Path(source.location)),
            "length_percentiles": {
                str(p): int(np.percentile(corpus.lengths, p)) for p in PERCENTILES if len(corpus.lengths)
            },
            "validation_documents": int((validation > 0).sum()),
            "train_document_uses": int(np.ceil(train / corpus.lengths).sum()),
            "train_tokens": int(train.sum()),
            "train_share": round(float(train.sum()) / max(train_total, 1), 4),
            "documents_used_more_than_once": int((train > corpus.lengths).sum()),
        }
        for source, corpus, train, validation in zip(
            inputs, corpora, tokens["train"], tokens["validation"], strict=True
        )
    ]
    splits = {
        split: {
            **counts[split],
            **_documents_by_fit(plan, corpora),
            "passes": plan.passes,
            "tokens_left_out": int(plan.drawn_tokens.sum()) - sum(int(part.sum()) for part in tokens[split]),
        }
        for split, plan in plans.items()
    }
    return {
        "sources": sources,
        "splits": splits,
        "notes": [note for source in sources for note in _source_notes(source)] + _notes(settings, plans, sources),
        "settings": asdict(settings),
        "versions": {"datasets": datasets.__version__, "transformers": transformers.__version__},
    }


def tokens_of_documents(plan: SplitRows, corpora: list[Corpus]) -> list[np.ndarray]:
    """Return for each source int64 `[documents]`, the tokens of each document in the rows, repetitions included."""
    return count_tokens(plan.rows, [len(corpus.lengths) for corpus in corpora])


def _lengths(corpora: list[Corpus]) -> list[np.ndarray]:
    return [corpus.lengths for corpus in corpora]


def _documents_by_fit(plan: SplitRows, corpora: list[Corpus]) -> dict[str, int]:
    """Count uses of documents that lie whole in one row, and of those that go on in another row."""
    starts = [segment for row in plan.rows for segment in row if segment.start == 0]
    whole = sum(segment.end == corpora[segment.source].lengths[segment.document] for segment in starts)
    return {"documents_whole": int(whole), "documents_cut": len(starts) - int(whole)}


def _source_notes(source: dict[str, Any]) -> list[str]:
    """Say what of a source is not learned or not read, from its part of the report."""
    notes = []
    if source["answers_not_learned"]:
        notes.append(
            f"{source['name']}: {source['answers_not_learned']:,} answers of earlier turns are not learned, because "
            "the chat template writes them otherwise once another turn follows"
        )
    if left_out := source["files_left_out"]:
        notes.append(f"{source['name']}: {sum(left_out.values()):,} files are not read: {describe_files(left_out)}")
    return notes


def _notes(settings: Settings, plans: dict[str, SplitRows], sources: list[dict[str, Any]]) -> list[str]:
    """Say where the rows are not what the flags may lead to expect."""
    notes = []
    train = sources[: len(settings.sources)]
    without = [source["name"] for source in train if not source["validation_documents"]]
    if settings.validation_fraction and without:
        notes.append(
            f"--validation-fraction {settings.validation_fraction} holds out nothing of {', '.join(without)}: a source "
            "needs two documents; --document-start divides a text file, --validation-input adds text"
        )
    plan = plans["train"]
    if plan.passes > 1:
        repeated = sum(source["documents_used_more_than_once"] for source in train)
        notes.append(
            f"--train-tokens {settings.train_tokens} is more than one pass over the documents gives: {plan.passes} "
            f"passes, {repeated:,} documents are used more than once"
        )
    for source, drawn, tokens in zip(train, plan.drawn_tokens / plan.passes, plan.source_tokens, strict=True):
        if abs(drawn - tokens) > WORTH_A_NOTE * tokens:
            notes.append(
                f"--upsample-long {settings.upsample_long:g} draws {drawn:,.0f} tokens a pass from {source['name']}, "
                f"which holds {tokens:,}, because documents are used whole; over more passes this evens out"
            )
    return notes


def length_edges(lengths: list[np.ndarray]) -> np.ndarray:
    """Return powers of two that bound ranges of lengths, from at or below the shortest to above the longest.

    Args:
        lengths: int64 `[documents]` of each source, at least 1; a source may be empty.
    """
    every = np.concatenate(lengths)
    shortest, longest = (every.min(), every.max()) if len(every) else (1, 1)
    return 2.0 ** np.arange(np.floor(np.log2(shortest)), np.floor(np.log2(longest)) + 1.5)


def draw_lengths(settings: Settings, corpora: list[Corpus], train: SplitRows, path: Path) -> None:
    """Draw, for each source, the tokens in documents of each length: as read, and in the train rows.

    Bins double in length. Tokens, not documents, are counted, because the tail that matters for long context is
    invisible among the many short documents.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = len(settings.sources)
    figure = Figure(figsize=(4.5 * columns + 1, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    edges = length_edges(_lengths(corpora))
    tokens = tokens_of_documents(train, corpora)
    axes_row = figure.subplots(1, columns, squeeze=False)[0]
    for number, (source, axes) in enumerate(zip(settings.sources, axes_row, strict=True)):
        lengths = corpora[number].lengths
        read, _ = np.histogram(lengths, edges, weights=lengths / 1e6)
        used, _ = np.histogram(lengths, edges, weights=tokens[number] / 1e6)
        axes.stairs(read, edges, fill=True, color="#c6d4e1", label="as read")
        axes.stairs(used, edges, color="#b3452c", linewidth=1.6, label="in the train rows")
        axes.axvline(settings.seq_length, color="black", linestyle=":", linewidth=1.2, label="row length")
        axes.set_xscale("log", base=2)
        axes.set(title=f"{source.name}: {len(lengths):,} documents", xlabel="tokens of the document")
    figure.axes[0].set_ylabel("million tokens in such documents")
    figure.axes[0].legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=130)


def describe(report: dict[str, Any], output_dir: Path) -> str:
    """Return the report as a few lines of text."""
    lines = []
    for source in report["sources"]:
        bad = f", {source['bad_records']} bad records (bad_records.jsonl)" if source["bad_records"] else ""
        lines.append(f"{source['name']}: {source['documents']:,} documents, {source['tokens']:,} tokens{bad}")
    for split, count in report["splits"].items():
        lines.append(
            f"{split}: {count['rows']:,} rows, {count['tokens']:,} tokens ({count['learned_tokens']:,} learned), "
            f"{count['documents_whole']:,} documents whole, {count['documents_cut']:,} cut, "
            f"{count['tokens_left_out']:,} tokens left out"
        )
    if report["retrieval"]["rows"]:
        lines.append("retrieval: {facts:,} facts in {rows:,} train rows".format(**report["retrieval"]))
    lines += [f"note: {note}" for note in report["notes"]]
    return "\n".join([*lines, f"rows, report.json and lengths.png are in {output_dir}"])
