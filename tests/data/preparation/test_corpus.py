"""Tokenised sources: the same tokens for any number of processes, what is kept, and an end that nothing can hold up."""

import multiprocessing
import os
import shutil
import signal
import threading
import time

import numpy as np
import psutil
import pytest
from tokenizer_styles import tokenizer_of_style

from easy_context.data.preparation import corpus
from easy_context.data.preparation.corpus import tokenise_source
from easy_context.data.preparation.sources import Record
from easy_context.data.preparation.tokenising import DocumentTokenizer, TokenisedDocument

LENGTHS = np.random.default_rng(0).integers(0, 40, 300).tolist()
RECORDS = [Record(str(number), {"text": "x"}) for number in range(len(LENGTHS))]


@pytest.fixture(autouse=True)
def small_shards(monkeypatch):
    """Ten records a batch, two batches a shard: RECORDS make 15 shards and a last one of an empty batch."""
    monkeypatch.setattr(corpus, "BATCH_RECORDS", 10)
    monkeypatch.setattr(corpus, "SHARD_BATCHES", 2)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "source-0123456789abcdef"


def tokenise(record):
    """Stand for a tokenizer: record n has LENGTHS[n] tokens from n on, half of them learned if n is odd."""
    number = int(record.location)
    if not LENGTHS[number]:
        return TokenisedDocument(record.location, problem="empty")
    ids = np.arange(number, number + LENGTHS[number], dtype=np.int32)
    return TokenisedDocument(record.location, ids, ids % 2 == 0 if number % 2 else None, answers_left_out=number % 3)


def check_tokens(tokenised):
    kept = [number for number, length in enumerate(LENGTHS) if length]
    assert tokenised.lengths.tolist() == [LENGTHS[number] for number in kept]
    assert tokenised.bad_records == [{"location": str(n), "problem": "empty"} for n in range(300) if not LENGTHS[n]]
    assert tokenised.answers_left_out == sum(number % 3 for number in kept)
    assert tokenised.has_prompts
    for document, number in enumerate(kept):
        for start, end in ((0, LENGTHS[number]), (LENGTHS[number] // 2, LENGTHS[number])):
            ids, learn = tokenised.read(document, start, end)
            assert ids.tolist() == list(range(number + start, number + end))
            assert learn.tolist() == [not number % 2 or token % 2 == 0 for token in ids.tolist()]


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_any_number_of_processes_gives_the_same_tokens(folder, workers):
    check_tokens(tokenise_source(RECORDS, tokenise, folder, workers))


def test_tokens_of_a_real_tokenizer(folder):
    make = DocumentTokenizer(tokenizer_of_style("smollm2"), 0)
    records = [Record(f"f:{i}", {"text": f"number {i} " * (i % 50 + 1)}) for i in range(50)]
    tokenised = tokenise_source(records, make, folder, 2)
    assert not tokenised.has_prompts and not tokenised.bad_records
    for number, record in enumerate(records):
        assert tokenised.read(number, 0, tokenised.lengths[number])[0].tolist() == make(record).ids.tolist()


def test_no_records_give_no_documents(folder):
    tokenised = tokenise_source([], tokenise, folder, 2)
    assert tokenised.lengths.tolist() == tokenised.bad_records == []


def test_what_is_whole_is_kept_for_any_number_of_processes(folder, monkeypatch):
    """A run that fails on record 250 leaves the shards before; the next run makes the others only."""

    def fail(record):
        assert record.location != "250"
        return tokenise(record)

    with pytest.raises(ChildProcessError):
        tokenise_source(RECORDS, fail, folder, 1)
    whole = {file.name: file.stat().st_mtime_ns for file in folder.glob("*.arrow")}
    assert len(whole) == 12
    read_again = iter(lambda: pytest.fail("records are read once"), None)
    check_tokens(tokenise_source(read_again, tokenise, folder, 3))
    assert whole.items() <= {file.name: file.stat().st_mtime_ns for file in folder.glob("*.arrow")}.items()
    check_tokens(tokenise_source(read_again, None, folder, 2))  # nothing is tokenised again


def test_records_that_cannot_be_read_are_the_callers_error(folder):
    def records():
        yield from RECORDS[:30]
        raise ValueError("--input: a.parquet cannot be read")

    with pytest.raises(ValueError, match="--input: a.parquet cannot be read"):
        tokenise_source(records(), tokenise, folder, 2)
    check_tokens(tokenise_source(RECORDS, tokenise, folder, 2))


@pytest.mark.parametrize("before", [False, True])
def test_strict_names_a_bad_record_though_an_earlier_run_only_counted_it(folder, before):
    if before:
        tokenise_source(RECORDS, tokenise, folder, 1)
    with pytest.raises(ValueError, match=f"--strict: bad record at {LENGTHS.index(0)}: empty"):
        tokenise_source(RECORDS, tokenise, folder, 1, strict=True)


def test_batches_are_bounded_by_all_text(monkeypatch):
    """A batch ends with the record that makes it half a million bytes."""
    monkeypatch.setattr(corpus, "BATCH_RECORDS", 256)
    for data in ({"text": "x" * 100_000}, {"messages": [{"content": "x" * 60_000}, {"content": "x" * 40_000}]}):
        batches = corpus._batches(Record(str(i), data) for i in range(20))
        assert [len(batch["records"]) for batch in batches] == [6, 6, 6, 2]


def test_a_record_nested_too_deep_is_bad(folder):
    deep = []
    for _ in range(100_000):
        deep = [deep]
    make = DocumentTokenizer(tokenizer_of_style("bytes"), 0)
    tokenised = tokenise_source([Record("f:1", {"messages": deep}), Record("f:2", {"text": "a"})], make, folder, 1)
    assert tokenised.bad_records == [{"location": "f:1", "problem": "nested too deep"}]
    assert len(tokenised.lengths) == 1


# --- ends


def slow(record):
    time.sleep(0.01)
    return tokenise(record)


def in_a_process(function):
    """Run a function in a forked process that may hang; it and all that it leaves are killed after two minutes."""
    process = multiprocessing.get_context("fork").Process(target=function)
    process.start()
    process.join(120)
    hung = process.is_alive()
    for child in psutil.Process(process.pid).children(recursive=True) if hung else []:
        child.kill()
    process.kill()
    process.join()
    assert not hung, "does not end"
    assert process.exitcode == 0


def test_interrupted_at_any_moment_all_processes_end_and_the_next_run_goes_on(folder):
    import datasets  # noqa: F401  an interrupted import is not what is tested

    def be_interrupted():
        signal.signal(signal.SIGINT, signal.default_int_handler)  # the tests may run where Ctrl-C is ignored
        signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGINT))
        tokenised, interrupted = None, 0
        while tokenised is None:
            signal.setitimer(signal.ITIMER_REAL, 0.1 * 1.3**interrupted)
            try:
                tokenised = tokenise_source(RECORDS, slow, folder, 3)
            except KeyboardInterrupt:
                interrupted += 1
            signal.setitimer(signal.ITIMER_REAL, 0)
            assert not psutil.Process().children()
            if tokenised and interrupted <= 3:  # a bare except in datasets' hashing has swallowed an interrupt
                shutil.rmtree(folder)
                tokenised = None
        check_tokens(tokenised)
        assert not list(folder.glob("tmp*"))

    in_a_process(be_interrupted)


@pytest.mark.parametrize("kill_all", [False, True])
def test_a_process_that_is_killed_is_said_and_the_others_end(folder, kill_all):
    def kill():
        while not (children := psutil.Process().children()):
            time.sleep(0.01)
        for child in children if kill_all else children[:1]:
            os.kill(child.pid, signal.SIGKILL)

    def lose_a_process():
        threading.Thread(target=kill).start()
        with pytest.raises(
            ChildProcessError, match="--num-workers: a tokenising process ended .*code -9.*fewer workers"
        ):
            tokenise_source(RECORDS, slow, folder, 2)
        assert not psutil.Process().children()

    in_a_process(lose_a_process)
