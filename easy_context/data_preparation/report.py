"""Say what the data is: counts as JSON, document lengths as a picture."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from easy_context.data_preparation.planning import SplitPlan
from easy_context.data_preparation.settings import Settings
from easy_context.data_preparation.token_store import TokenStore

PERCENTILES = (0, 10, 50, 90, 100)


def _documents_by_fit(plan: SplitPlan, stores: list[TokenStore]) -> dict[str, int]:
    """Count uses of documents that lie whole in one row, and of those that go on in another row."""
    starts = [segment for row in plan.rows for segment in row if segment.start == 0]
    whole = sum(segment.end == stores[segment.source].lengths[segment.document] for segment in starts)
    return {"documents_whole": int(whole), "documents_cut": len(starts) - int(whole)}


def _notes(settings: Settings, plans: dict[str, SplitPlan]) -> list[str]:
    """Say where the rows are not what the flags may lead to expect."""
    notes = []
    if settings.validation_fraction:
        held = zip(settings.sources, plans["validation"].uses, strict=False)  # behind these: the validation inputs
        without = [source.name for source, uses in held if not uses.any()]
        if without:
            notes.append(
                f"--validation-fraction {settings.validation_fraction} holds out nothing of {', '.join(without)}: a "
                "source needs two documents; --document-start divides a text file, --validation-input adds text"
            )
    passes = plans["train"].passes
    if passes > 1:
        used = sum(int((uses > 1).sum()) for uses in plans["train"].uses)
        notes.append(
            f"--train-tokens {settings.train_tokens} is more than one pass over the documents gives: {passes} passes, "
            f"{used:,} documents are used more than once"
        )
    return notes


def build_report(
    settings: Settings, stores: list[TokenStore], plans: dict[str, SplitPlan], counts: dict[str, dict[str, int]]
) -> dict[str, Any]:
    """Collect settings, counts of each source and of each split."""
    import datasets
    import transformers

    names = [source.name for source in [*settings.sources, *settings.validation_sources]]
    total = sum(int(store.lengths.sum()) for store in stores)
    sources = []
    for number, (name, store) in enumerate(zip(names, stores, strict=True)):
        lengths = store.lengths
        used = plans["train"].uses[number] if number < len(settings.sources) else np.zeros_like(lengths)
        sources.append(
            {
                "name": name,
                "documents": len(lengths),
                "tokens": int(lengths.sum()),
                "share": round(float(lengths.sum()) / max(total, 1), 4),
                "bad_records": store.problems,
                "length_percentiles": {str(p): int(np.percentile(lengths, p)) for p in PERCENTILES if len(lengths)},
                "validation_documents": int(plans["validation"].uses[number].sum()),
                "train_document_uses": int(used.sum()),
                "planned_train_tokens": int((used * lengths).sum()),
                "documents_used_more_than_once": int((used > 1).sum()),
            }
        )
    splits = {
        split: {
            **counts[split],
            **_documents_by_fit(plan, stores),
            "passes": plan.passes,
            "tokens_left_out": plan.rest_tokens,
        }
        for split, plan in plans.items()
    }
    versions = {"datasets": datasets.__version__, "transformers": transformers.__version__}
    return {
        "sources": sources,
        "splits": splits,
        "notes": _notes(settings, plans),
        "settings": asdict(settings),
        "versions": versions,
    }


def draw_lengths(settings: Settings, stores: list[TokenStore], plan: SplitPlan, path: Path) -> None:
    """Draw, for each source, the tokens that stand in documents of each length: as read, and as planned for training.

    Bins double in length. Tokens, not documents, are counted, because the tail that matters for long context is
    invisible among the many short documents.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = len(settings.sources)
    figure = Figure(figsize=(4.5 * columns + 1, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    longest = max(int(store.lengths.max(initial=2)) for store in stores)
    edges = 2.0 ** np.arange(0, np.ceil(np.log2(longest)) + 1.5)
    axes_row = figure.subplots(1, columns, squeeze=False)[0]
    for number, (source, axes) in enumerate(zip(settings.sources, axes_row, strict=True)):
        lengths, uses = stores[number].lengths, plan.uses[number] / max(plan.passes, 1)
        read, _ = np.histogram(lengths, edges, weights=lengths / 1e6)
        used, _ = np.histogram(lengths, edges, weights=lengths * uses / 1e6)
        axes.stairs(read, edges, fill=True, color="#c6d4e1", label="as read")
        axes.stairs(used, edges, color="#b3452c", linewidth=1.6, label="per training pass")
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
