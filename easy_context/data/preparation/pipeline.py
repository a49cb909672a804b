"""The whole way from sources to saved rows."""

import contextlib
import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from .folders import (
    STAGING,
    WORK,
    claim_folder,
    install_results,
    read_report,
    refuse_foreign_files,
    remove_token_stores,
)
from .planning import RETRIEVAL, plan_train, plan_validation, plan_validation_documents
from .report import build_report, draw_lengths
from .retrieval import RetrievalWriter
from .settings import Settings, run_digest, source_digest, tokenizer_digest
from .sources import Source, read_source
from .token_store import TokenStore, fill_token_store
from .tokenising import DocumentTokenizer
from .uses import count_uses, first_tokens
from .workers import tokenise
from .writing import Row, write_rows


def find_separator(tokenizer: Any, separator: str | None) -> int:
    """Return the id of the token that stands between documents.

    Args:
        tokenizer: of the run.
        separator: a token's text; None takes the end-of-sequence token.

    Raises:
        ValueError: not exactly one token.
    """
    if separator is None:
        if tokenizer.eos_token_id is None:
            raise ValueError("--separator: the tokenizer has no end-of-sequence token; name the token to put instead")
        return tokenizer.eos_token_id
    ids = tokenizer(separator, add_special_tokens=False)["input_ids"]
    if len(ids) != 1:
        raise ValueError(f"--separator {separator!r} is {len(ids)} tokens for this tokenizer; it must be one")
    return ids[0]


def _tokenise_source(
    source: Source, settings: Settings, document_tokenizer: DocumentTokenizer, folder: Path, workers: int
) -> TokenStore:
    with tqdm(desc=f"tokenise {source.name}", unit=" documents") as bar:
        tokens = 0

        def count(document) -> None:
            nonlocal tokens
            tokens += 0 if document.ids is None else len(document.ids)
            bar.set_postfix_str(f"{tokens / 1e6:.2f} M tokens", refresh=False)
            bar.update()

        return fill_token_store(
            folder,
            read_source(source, settings.document_start, document_tokenizer.fields, document_tokenizer.text_field),
            partial(tokenise, document_tokenizer=document_tokenizer, workers=workers),
            settings.strict,
            count,
        )


def prepare(
    settings: Settings,
    tokenizer: Any,
    output_dir: Path,
    workers: int = 1,
    work_dir: Path | None = None,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Tokenise, split, upsample, pack and save.

    Args:
        settings: what decides the rows.
        tokenizer: a Hugging Face tokenizer.
        output_dir: gets `train/`, `validation/` (where there are validation documents), `report.json`, `lengths.png`
            and `bad_records.jsonl`. A finished run with the same settings is left as it is.
        workers: tokenising processes; they do not change the result.
        work_dir: keeps the tokenised documents, for an interrupted run and for other row lengths. None: a folder in
            `output_dir`, removed at the end.
        overwrite: replace a finished run of other settings, once the new rows are whole.

    Returns:
        The report.

    Raises:
        ValueError: a setting that does not fit the data, `output_dir` holds the rows of other settings, or one of
            the folders holds what prepare_data.py did not write or belongs to a run that goes on.
    """
    rules = tokenizer_digest(tokenizer)
    digests = [source_digest(source, settings, rules) for source in (*settings.sources, *settings.validation_sources)]
    run = run_digest(settings, digests)
    finished = None if overwrite else read_report(output_dir)
    if finished is not None:
        if finished["run"] == run:
            return finished
        raise ValueError(
            f"--output-dir: {output_dir} holds rows of other inputs or settings; take another or --overwrite"
        )
    folders = [("--output-dir", output_dir)] + ([] if work_dir is None else [("--work-dir", work_dir)])
    with contextlib.ExitStack() as claims:
        # If one lies in the other, the outer one first: it is not empty afterwards.
        for flag, folder in sorted(folders, key=lambda claim: len(claim[1].resolve().parts)):
            claims.enter_context(claim_folder(flag, folder))
        refuse_foreign_files(output_dir)
        stores = _fill_stores(settings, digests, tokenizer, work_dir or output_dir / WORK, workers)
        if not (output_dir / "report.json").exists():  # of use where the run fails, too
            _write_bad_records(stores, output_dir / "bad_records.jsonl")
        staging = output_dir / STAGING
        shutil.rmtree(staging, ignore_errors=True)
        try:
            staging.mkdir()
            report = _write_splits(settings, stores, tokenizer, staging)
            report["run"] = run
            (staging / "report.json").write_text(json.dumps(report, indent=2) + "\n")
            install_results(output_dir)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
        if work_dir is None:
            remove_token_stores(output_dir / WORK)
    return report


def _fill_stores(
    settings: Settings, digests: list[str], tokenizer: Any, folder: Path, workers: int
) -> list[TokenStore]:
    document_tokenizer = DocumentTokenizer(
        tokenizer, find_separator(tokenizer, settings.separator), settings.text_field
    )
    sources = [*settings.sources, *settings.validation_sources]
    return [
        _tokenise_source(source, settings, document_tokenizer, folder / f"{source.name}-{digest}", workers)
        for source, digest in zip(sources, digests, strict=True)
    ]


def _write_splits(settings: Settings, stores: list[TokenStore], tokenizer: Any, folder: Path) -> dict[str, Any]:
    train_stores, extra = stores[: len(settings.sources)], stores[len(settings.sources) :]
    held_out = plan_validation_documents(train_stores, settings)
    plans = {
        "train": plan_train(train_stores, held_out, settings),
        "validation": plan_validation(train_stores, held_out, extra, settings),
    }
    with_labels = any(store.has_prompts for store in stores) or settings.retrieval.fraction > 0
    writer = RetrievalWriter(tokenizer, settings.retrieval)

    def add_facts(index: int, row: Row) -> Row:
        if not writer.takes(index):
            return row
        row = writer(settings.random_generator(RETRIEVAL, settings.seq_length, index), row)
        train_rows = plans["train"].rows
        train_rows[index] = first_tokens(train_rows[index], row.text_tokens)  # the report counts what is written
        return row

    transforms = {"train": add_facts, "validation": lambda index, row: row}
    counts = {}
    for split, plan in plans.items():
        progress = partial(tqdm, desc=f"write {split}", unit=" rows", total=len(plan.rows))
        if plan.rows:
            counts[split] = write_rows(folder / split, plan.rows, stores, with_labels, transforms[split], progress)
        else:
            counts[split] = {"rows": 0, "tokens": 0, "learned_tokens": 0}
    _write_bad_records(stores, folder / "bad_records.jsonl")
    uses = {split: count_uses(plan.rows, stores) for split, plan in plans.items()}
    report = build_report(settings, stores, plans, uses, counts)
    report["retrieval"] = {"rows": writer.rows, "facts": writer.facts}
    draw_lengths(settings, stores, uses["train"], folder / "lengths.png")
    return report


def _write_bad_records(stores: list[TokenStore], path: Path) -> None:
    if any(store.problems for store in stores):
        with path.open("w") as file:
            for store in stores:
                file.writelines(json.dumps(record) + "\n" for record in store.bad_records())
