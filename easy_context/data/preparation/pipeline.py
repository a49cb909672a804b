"""Prepare rows: tokenise the sources, plan the rows of each split, write them and the report."""

import contextlib
import json
import shutil
from pathlib import Path
from typing import Any

from ...common.notes import say_once
from .corpus import Corpus, tokenise_source
from .folders import check_output_dir, claim_folder, folder_aside, read_report, remove_aside, swap_in
from .packing import first_tokens
from .planning import RETRIEVAL, plan_train, plan_validation, plan_validation_documents
from .report import build_report, draw_lengths
from .retrieval import RetrievalWriter
from .settings import Settings, run_digest, source_digest, tokenizer_digest
from .sources import read_source
from .tokenising import DocumentTokenizer
from .writing import Row, write_rows


def find_separator(tokenizer: Any, separator: str | None) -> int:
    """Return the id of the token between documents.

    Args:
        tokenizer: tokenizer of the run.
        separator: text of the token; None for the end-of-sequence token.

    Raises:
        ValueError: the separator is not exactly one token.
    """
    if separator is None:
        if tokenizer.eos_token_id is None:
            raise ValueError("--separator: the tokenizer has no end-of-sequence token; name the token to put instead")
        return tokenizer.eos_token_id
    ids = tokenizer(separator, add_special_tokens=False)["input_ids"]
    if len(ids) != 1:
        raise ValueError(f"--separator {separator!r} is {len(ids)} tokens for this tokenizer; it must be one")
    return ids[0]


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
        settings: settings that determine the rows.
        tokenizer: a Hugging Face tokenizer.
        output_dir: gets `train/`, `validation/` (where there are validation documents), `report.json`, `lengths.png`
            and `bad_records.jsonl`. A finished run with the same settings is left as it is.
        workers: number of tokenising processes; it does not change the result.
        work_dir: folder that keeps the tokenised documents for runs with other row lengths. None for a folder next to
            `output_dir` that is removed when the run is finished.
        overwrite: whether to replace a finished run with other settings when the new rows are complete.

    Returns:
        The report.

    Raises:
        ValueError: a setting does not fit the data, `output_dir` holds rows made with other settings, or one of the
            folders contains files that prepare_data.py did not write or is in use by another run.
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
    check_output_dir(output_dir)
    aside = folder_aside(output_dir)
    new = aside / "new"
    folders = [("--output-dir", aside)] + ([] if work_dir is None else [("--work-dir", work_dir)])
    with contextlib.ExitStack() as claims:
        # If one lies in the other, the outer one first: it is not empty afterwards.
        for flag, folder in sorted(folders, key=lambda claim: len(claim[1].resolve().parts)):
            claims.enter_context(claim_folder(flag, folder))
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir()
        corpora = _tokenise(settings, digests, tokenizer, work_dir or aside / "tokens", workers)
        _write_bad_records(corpora, new / "bad_records.jsonl")
        report = _write_splits(settings, corpora, tokenizer, new) | {"run": run}
        (new / "report.json").write_text(json.dumps(report, indent=2) + "\n")
        if kept := swap_in(new, output_dir):
            say_once(f"--output-dir {output_dir}: the folder before held files of others and is kept as {kept}")
        remove_aside(aside)
    return report


def _tokenise(settings: Settings, digests: list[str], tokenizer: Any, folder: Path, workers: int) -> list[Corpus]:
    document_tokenizer = DocumentTokenizer(
        tokenizer, find_separator(tokenizer, settings.separator), settings.text_field
    )
    corpora = []
    for source, digest in zip([*settings.sources, *settings.validation_sources], digests, strict=True):
        records = read_source(source, settings.document_start, document_tokenizer.fields, document_tokenizer.text_field)
        own_folder = folder / f"{source.name}-{digest}"
        corpora.append(tokenise_source(records, document_tokenizer, own_folder, workers, settings.strict))
    return corpora


def _write_splits(settings: Settings, corpora: list[Corpus], tokenizer: Any, folder: Path) -> dict[str, Any]:
    train_corpora, extra = corpora[: len(settings.sources)], corpora[len(settings.sources) :]
    held_out = plan_validation_documents(train_corpora, settings)
    plans = {
        "train": plan_train(train_corpora, held_out, settings),
        "validation": plan_validation(train_corpora, held_out, extra, settings),
    }
    with_labels = any(corpus.has_prompts for corpus in corpora) or settings.retrieval.fraction > 0
    writer = RetrievalWriter(tokenizer, settings.retrieval)

    def add_facts(index: int, row: Row) -> Row:
        if not writer.takes(index):
            return row
        row = writer(settings.random_generator(RETRIEVAL, settings.seq_length, index), row)
        train_rows = plans["train"].rows
        train_rows[index] = first_tokens(train_rows[index], row.text_tokens)  # the report counts what is written
        return row

    transforms = {"train": add_facts, "validation": lambda index, row: row}
    counts = {
        split: write_rows(folder / split, plan.rows, corpora, with_labels, transforms[split])
        for split, plan in plans.items()
    }
    report = build_report(settings, corpora, plans, counts)
    report["retrieval"] = {"rows": writer.rows, "facts": writer.facts}
    draw_lengths(settings, corpora, plans["train"], folder / "lengths.png")
    return report


def _write_bad_records(corpora: list[Corpus], path: Path) -> None:
    if any(corpus.bad_records for corpus in corpora):
        with path.open("w") as file:
            file.writelines(json.dumps(record) + "\n" for corpus in corpora for record in corpus.bad_records)
