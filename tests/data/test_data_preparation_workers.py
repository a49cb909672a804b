"""The tokenising processes: the same documents as one process, in order, and an end that nothing can hold up."""

import functools
import multiprocessing
import os
import random
import signal

import numpy as np
import psutil
import pytest

from easy_context.data.preparation.sources import Record
from easy_context.data.preparation.tokenising import TokenisedDocument
from easy_context.data.preparation.workers import tokenise

LARGE = [Record(f"f:{i}", {"text": "x" * 100_000}) for i in range(400)]
CLOSES, INTERRUPTS = 50, 25


def count(record):
    """Stands for a tokenizer, so fast that workers write nearly all the time; a batch's result is 0.5 MB."""
    return TokenisedDocument(record.location, np.arange(len(record.data["text"]) // 4, dtype=np.uint32))


def in_a_process(function):
    """Run a function in a forked process that may hang; it and all that it leaves are killed after a minute."""
    process = multiprocessing.get_context("fork").Process(target=function)
    process.start()
    process.join(60)
    left = psutil.Process(process.pid).children(recursive=True) if process.is_alive() else []
    hung = process.is_alive()
    for child in left:
        child.kill()
    process.kill()
    process.join()
    assert not hung, "does not end"
    assert process.exitcode == 0


def apart(test):
    """Run a test in a process that has no children but the test's own: the session's pool of workers has some."""

    @functools.wraps(test)
    def run(*args, **kwargs):
        in_a_process(functools.partial(test, *args, **kwargs))

    return run


def assert_no_children():
    assert not psutil.Process().children()


def test_broken_off_at_any_moment_all_workers_end():
    """Closing ends workers that are writing results, which are larger than a pipe holds."""

    def close_early():
        rng = random.Random(0)
        for _ in range(CLOSES):
            documents = tokenise(iter(LARGE), count, workers=2)
            for _ in range(rng.randrange(1, 12)):
                next(documents)
            documents.close()
            assert_no_children()

    in_a_process(close_early)


def test_interrupted_by_a_signal_at_any_moment_all_workers_end():
    def interrupt(number, frame):
        raise KeyboardInterrupt

    def be_interrupted():
        rng = random.Random(0)
        signal.signal(signal.SIGALRM, interrupt)
        interrupted = 0
        for _ in range(INTERRUPTS):
            documents = tokenise(iter(LARGE), count, workers=2)
            next(documents)  # the processes are there
            signal.setitimer(signal.ITIMER_REAL, rng.uniform(0.001, 0.1))
            try:
                for _ in documents:
                    pass
            except KeyboardInterrupt:
                interrupted += 1
            signal.setitimer(signal.ITIMER_REAL, 0)
            documents.close()
            assert_no_children()
        assert interrupted > INTERRUPTS // 2

    in_a_process(be_interrupted)


@pytest.mark.parametrize("moment", ["with a batch", "idle"])
@apart
def test_a_worker_that_dies_is_said_and_the_others_end(moment):
    def records():
        for number, record in enumerate(LARGE):
            if number == (40 if moment == "idle" else 10):
                os.kill(psutil.Process().children()[0].pid, signal.SIGKILL)
            yield record

    documents = tokenise(records(), count, workers=2)
    message = "--num-workers: a tokenising process ended .*exit code -9.*fewer workers"
    with pytest.raises(ChildProcessError, match=message):
        for _ in documents:
            pass
    assert_no_children()


@apart
def test_any_number_of_workers_gives_the_documents_in_order():
    rng = random.Random(0)
    records = [Record(f"f:{i}", {"text": "number " * rng.choice([1, 30, 60_000])}) for i in range(60)]
    alone = list(tokenise(iter(records), count, workers=1))
    for workers in (2, 3):
        together = list(tokenise(iter(records), count, workers=workers))
        assert [document.location for document in together] == [record.location for record in records]
        assert all((a.ids == b.ids).all() for a, b in zip(alone, together, strict=True))
    assert_no_children()


@apart
def test_no_records_need_no_documents():
    assert list(tokenise(iter([]), count, workers=2)) == []
    assert_no_children()
