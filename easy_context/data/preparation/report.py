"""Say what the data is: counts as JSON, document lengths as a picture."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from .input_files import describe_files, files_left_out, is_other_kind
from .planning import SplitPlan
from .settings import Settings
from .token_store import TokenStore
from .uses import Uses

PERCENTILES = (0, 10, 50, 90, 100)
WORTH_A_NOTE = 0.05  # tokens of a source drawn too many or too few, as a share of those it holds


def _documents_by_fit(plan: SplitPlan, stores: list[TokenStore]) -> dict[str, int]:
    """Count uses of documents that lie whole in one row, and of those that go on in another row."""
    starts = [segment for row in plan.rows for segment in row if segment.start == 0]
    whole = sum(segment.end == stores[segment.source].lengths[segment.document] for segment in starts)
    return {"documents_whole": int(whole), "documents_cut": len(starts) - int(whole)}


def _notes(settings: Settings, plans: dict[str, SplitPlan], uses: dict[str, list[Uses]]) -> list[str]:
    """Say where the rows are not what the flags may lead to expect."""
    notes = []
    if settings.validation_fraction:
        held = zip(settings.sources, uses["validation"], strict=False)  # behind these: the validation inputs
        without = [source.name for source, use in held if not use.times.any()]
        if without:
            notes.append(
                f"--validation-fraction {settings.validation_fraction} holds out nothing of {', '.join(without)}: a "
                "source needs two documents; --document-start divides a text file, --validation-input adds text"
            )
    passes = plans["train"].passes
    if passes > 1:
        used = sum(int((use.times > 1).sum()) for use in uses["train"])
        notes.append(
            f"--train-tokens {settings.train_tokens} is more than one pass over the documents gives: {passes} passes, "
            f"{used:,} documents are used more than once"
        )
    return notes + _upsampling_notes(settings, plans["train"])


def _source_notes(source: dict[str, Any]) -> list[str]:
    """Say what of a source is not learned or not read, from its part of the report."""
    notes = []
    if source["answers_not_learned"]:
        notes.append(
            f"{source['name']}: {source['answers_not_learned']:,} answers of earlier turns are not learned, because "
            "the chat template writes them otherwise once another turn follows"
        )
    other = {kind: number for kind, number in source["files_left_out"].items() if is_other_kind(kind)}
    if other:
        notes.append(f"{source['name']}: {sum(other.values()):,} files of other kinds ignored: {describe_files(other)}")
    rest = {kind: number for kind, number in source["files_left_out"].items() if not is_other_kind(kind)}
    if rest:
        notes.append(f"{source['name']}: {sum(rest.values()):,} files left out: {describe_files(rest)}")
    return notes


def _upsampling_notes(settings: Settings, plan: SplitPlan) -> list[str]:
    notes = []
    for source, drawn, tokens in zip(
        settings.sources, plan.drawn_tokens / plan.passes, plan.source_tokens, strict=True
    ):
        if abs(drawn - tokens) > WORTH_A_NOTE * tokens:
            notes.append(
                f"--upsample-long {settings.upsample_long:g} draws {drawn:,.0f} tokens a pass from {source.name}, "
                f"which holds {tokens:,}: few documents make up much of it, and each is used whole or not at all; "
                "over more passes (--train-tokens) this evens out"
            )
    return notes


def build_report(
    settings: Settings,
    stores: list[TokenStore],
    plans: dict[str, SplitPlan],
    uses: dict[str, list[Uses]],
    counts: dict[str, dict[str, int]],
) -> dict[str, Any]:
    """Collect settings, counts of each source and of each split.

    Args:
        settings: of the run.
        stores: of all sources, those for training first.
        plans: of each split.
        uses: of each split, what stands in its rows, by source.
        counts: of each split, what `write_rows` returned.
    """
    import datasets
    import transformers

    inputs = [*settings.sources, *settings.validation_sources]
    total = sum(int(store.lengths.sum()) for store in stores)
    train_total = sum(int(use.tokens.sum()) for use in uses["train"])
    sources = []
    for number, (source, store) in enumerate(zip(inputs, stores, strict=True)):
        lengths = store.lengths
        used = uses["train"][number]
        sources.append(
            {
                "name": source.name,
                "documents": len(lengths),
                "tokens": int(lengths.sum()),
                "share": round(float(lengths.sum()) / max(total, 1), 4),
                "bad_records": store.problems,
                "answers_not_learned": store.answers_left_out,
                "files_left_out": {} if source.on_hub else files_left_out(Path(source.location)),
                "length_percentiles": {str(p): int(np.percentile(lengths, p)) for p in PERCENTILES if len(lengths)},
                "validation_documents": int(uses["validation"][number].times.sum()),
                "train_document_uses": int(used.times.sum()),
                "train_tokens": int(used.tokens.sum()),
                "train_share": round(float(used.tokens.sum()) / max(train_total, 1), 4),
                "documents_used_more_than_once": int((used.times > 1).sum()),
            }
        )
    splits = {
        split: {
            **counts[split],
            **_documents_by_fit(plan, stores),
            "passes": plan.passes,
            "tokens_left_out": int(plan.drawn_tokens.sum()) - sum(int(use.tokens.sum()) for use in uses[split]),
        }
        for split, plan in plans.items()
    }
    versions = {"datasets": datasets.__version__, "transformers": transformers.__version__}
    return {
        "sources": sources,
        "splits": splits,
        "notes": [note for source in sources for note in _source_notes(source)] + _notes(settings, plans, uses),
        "settings": asdict(settings),
        "versions": versions,
    }


def length_edges(lengths: list[np.ndarray]) -> np.ndarray:
    """Return powers of two as borders of ranges of lengths: from at or below the shortest to above the longest.

    Args:
        lengths: int64 `[documents]` of each source, at least 1; a source may be empty.
    """
    every = np.concatenate(lengths)
    shortest, longest = (every.min(), every.max()) if len(every) else (1, 1)
    return 2.0 ** np.arange(np.floor(np.log2(shortest)), np.floor(np.log2(longest)) + 1.5)


def draw_lengths(settings: Settings, stores: list[TokenStore], uses: list[Uses], path: Path) -> None:
    """Draw, for each source, the tokens that stand in documents of each length: as read, and in the train rows.

    Bins double in length. Tokens, not documents, are counted, because the tail that matters for long context is
    invisible among the many short documents.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = len(settings.sources)
    figure = Figure(figsize=(4.5 * columns + 1, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    edges = length_edges([store.lengths for store in stores])
    axes_row = figure.subplots(1, columns, squeeze=False)[0]
    for number, (source, axes) in enumerate(zip(settings.sources, axes_row, strict=True)):
        lengths = stores[number].lengths
        read, _ = np.histogram(lengths, edges, weights=lengths / 1e6)
        used, _ = np.histogram(lengths, edges, weights=uses[number].tokens / 1e6)
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
