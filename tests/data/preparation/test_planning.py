"""Plans of rows: passes that go on from each other, nothing lost or doubled, nothing in the order of its length."""

from types import SimpleNamespace

import numpy as np
import pytest

from easy_context.data.preparation.packing import Segment, pack
from easy_context.data.preparation.planning import plan_train, plan_validation, plan_validation_documents
from easy_context.data.preparation.sampling import choose_validation
from easy_context.data.preparation.settings import Settings
from easy_context.data.preparation.sources import Source

SEQ_LENGTH = 100


def corpora_of(*lengths):
    return [SimpleNamespace(lengths=np.array(x), bad_records=[]) for x in lengths]


def settings_of(corpora, **options):
    sources = [Source(str(number), "") for number in range(len(corpora))]
    return Settings(sources, "tokenizer", SEQ_LENGTH, **options)


def plan_of(corpora, **options):
    held_out = [np.zeros(len(corpus.lengths), bool) for corpus in corpora]
    return plan_train(corpora, held_out, settings_of(corpora, **options))


def times_of(rows, corpus, source=0):
    """Return how often each token of a source's documents is in rows, a list of int arrays."""
    times = [np.zeros(length, int) for length in corpus.lengths]
    for row in rows:
        for segment in row:
            if segment.source == source:
                times[segment.document][segment.start : segment.end] += 1
    return times


def mean_place(values):
    """The mean place of the True ones among all, 0 to 1: half if they are spread evenly."""
    places = np.flatnonzero(values) / (len(values) - 1)
    return places.mean()


# --- passes


@pytest.mark.parametrize("seed", range(5))
def test_passes_with_upsampling_go_on_where_the_one_before_stopped(seed):
    rng = np.random.default_rng(seed)
    corpora = corpora_of(rng.integers(20, 900, 30), rng.integers(30, 60, 200))
    options = {"upsample_long": 4.0, "long_from": 300, "train_tokens": 25 * 25_000, "seed": seed}
    plan = plan_of(corpora, **options)
    assert plan.passes > 20
    for number, corpus in enumerate(corpora):
        long = corpus.lengths >= 300
        bound = 2 * sum(group.max(initial=0) for group in (corpus.lengths[long], corpus.lengths[~long]))
        assert abs(plan.drawn_tokens[number] - plan.passes * corpus.lengths.sum()) <= bound
    # In the rows: all documents of a group as often as each other, but for what fills no row at the end of a pass.
    corpus = corpora[0]
    long = corpus.lengths >= 300
    times = np.array([of_document.max() for of_document in times_of(plan.rows, corpus)])
    left_out = plan.drawn_tokens.sum() - sum(len(segment) for row in plan.rows for segment in row)
    assert left_out < SEQ_LENGTH * plan.passes + 25_000
    assert np.ptp(times[long]) <= 2 + left_out // corpus.lengths[long].min() // 10
    assert times[long].mean() / times[~long].mean() == pytest.approx(4, rel=0.15)


def test_every_pass_without_upsampling_holds_every_token_once():
    corpora = corpora_of([750, 30, 160, 90, 40, 330], [50] * 12)
    plan = plan_of(corpora, train_tokens=10 * SEQ_LENGTH * 20)
    a_pass = sum(corpus.lengths.sum() for corpus in corpora) // SEQ_LENGTH
    assert plan.passes == -(-200 // a_pass)
    assert plan.rows[:a_pass] == plan_of(corpora).rows  # it is the last pass that is cut short
    for number in range(plan.passes - 1):
        rows = plan.rows[number * a_pass : (number + 1) * a_pass]
        times = [x for source, corpus in enumerate(corpora) for x in times_of(rows, corpus, source)]
        assert max(x.max() for x in times) == 1
        assert sum((x == 0).sum() for x in times) == sum(s.lengths.sum() for s in corpora) - a_pass * SEQ_LENGTH


def test_passes_differ_in_their_rows_and_in_the_cuts_of_long_documents():
    plan = plan_of(corpora_of([1050] * 10, [30] * 100), train_tokens=13_500 * 6)
    a_pass = 135
    passes = [plan.rows[start : start + a_pass] for start in range(0, 6 * a_pass, a_pass)]
    assert len({str(rows) for rows in passes}) == 6
    starts = [{s.start % SEQ_LENGTH for row in rows for s in row if len(s) == SEQ_LENGTH} for rows in passes]
    assert starts[0] == {0} and all(len(x) > 1 for x in starts[1:])


def test_seeds_give_other_plans():
    corpora = corpora_of([80, 30, 160, 90, 40, 330], [50] * 12)
    assert plan_of(corpora).rows == plan_of(corpora).rows
    assert plan_of(corpora, seed=1).rows != plan_of(corpora).rows


def test_held_out_documents_are_in_the_validation_rows_alone_and_whole():
    rng = np.random.default_rng(0)
    corpora, extra = corpora_of(rng.integers(5, 300, 60), rng.integers(5, 90, 80)), corpora_of(rng.integers(5, 50, 7))
    settings = settings_of(corpora, validation_fraction=0.2)
    held_out = plan_validation_documents(corpora, settings)
    train, validation = plan_train(corpora, held_out, settings), plan_validation(corpora, held_out, extra, settings)
    for number, corpus in enumerate([*corpora, *extra]):
        trained, validated = times_of(train.rows, corpus, number), times_of(validation.rows, corpus, number)
        for document in range(len(corpus.lengths)):
            held = number == 2 or held_out[number][document]
            assert (validated[document] == held).all()
            assert not (held and trained[document].any())


# --- rows


@pytest.mark.parametrize("seed", range(5))
def test_rows_are_in_no_order_of_length_or_source(seed):
    """Windows of long documents, whole documents and poured ones, of either source, are everywhere."""
    rng = np.random.default_rng(seed)
    documents = [Segment(0, i, 0, 1000) for i in range(30)]  # 300 rows
    documents += [Segment(1, i, 0, int(length)) for i, length in enumerate(rng.integers(50, 95, 300))]
    documents += [Segment(2, i, 0, 10) for i in range(2500)]
    rows = pack(documents, SEQ_LENGTH, rng).rows
    assert len(rows) > 700
    for source in range(3):
        chosen = [all(segment.source == source for segment in row) for row in rows]
        if sum(chosen) > 30:  # a mean of so many has a standard deviation of at most 0.05
            assert mean_place(chosen) == pytest.approx(0.5, abs=0.15)
    assert mean_place([row[0].source == 0 for row in rows]) == pytest.approx(0.5, abs=0.08)
    assert mean_place([any(segment.source == 1 for segment in row) for row in rows]) == pytest.approx(0.5, abs=0.08)


def test_rows_of_one_document_are_not_side_by_side():
    rows = pack([Segment(0, i, 0, 1000) for i in range(40)], SEQ_LENGTH, np.random.default_rng(0)).rows
    beside = sum(a[0].document == b[0].document for a, b in zip(rows, rows[1:], strict=False))
    assert beside < 40  # 360 if sorted, 10 in expectation


@pytest.mark.parametrize("seed", range(3))
def test_documents_of_a_row_are_in_no_order_of_length(seed):
    lengths = [60] * 100 + [30] * 100 + [10] * 100
    documents = [Segment(0, i, 0, length) for i, length in enumerate(lengths)]
    rows = pack(documents, SEQ_LENGTH, np.random.default_rng(seed)).rows
    longest_first = [len(row[0]) == max(map(len, row)) for row in rows if len(row) > 1]
    assert len(longest_first) > 90 and np.mean(longest_first) < 0.6  # a third is to be expected


def test_poured_documents_are_in_no_order():
    """Documents that fill gaps are drawn at random, not the longest or those with the least number first."""
    documents = [Segment(0, i, 0, 99) for i in range(100)] + [Segment(1, i, 0, 1 + i % 2) for i in range(60)]
    documents += [Segment(2, i, 0, 3) for i in range(40)]
    rows = pack(documents, SEQ_LENGTH, np.random.default_rng(0)).rows
    filler = [segment for row in rows for segment in row if segment.source]
    numbers = np.array([segment.document for segment in filler])
    assert abs(np.corrcoef(numbers, np.arange(len(numbers)))[0, 1]) < 0.4
    assert mean_place([segment.source == 2 for segment in filler]) == pytest.approx(0.5, abs=0.2)


def test_what_fills_no_row_is_not_always_the_shortest():
    documents = [Segment(0, i, 0, 56 + i) for i in range(20)]  # the last of them, by length, are poured
    rests = [pack(documents, SEQ_LENGTH, np.random.default_rng(seed)).rest for seed in range(20)]
    assert len({segment.document for rest in rests for segment in rest}) > 3


def test_equal_documents_share_rows_at_random():
    """Documents of one length, such as of one source in order, do not always meet their neighbours."""
    documents = [Segment(0, i, 0, 50) for i in range(400)]
    rows = pack(documents, SEQ_LENGTH, np.random.default_rng(0)).rows
    assert sum(abs(a.document - b.document) == 1 for a, b in rows) < 10


# --- validation


def test_which_documents_are_held_out_is_a_matter_of_chance():
    lengths = np.full(200, 10)
    chosen = np.array([choose_validation(lengths, 0.1, np.random.default_rng(seed)) for seed in range(200)])
    assert (chosen.sum(1) == 20).all()
    # Each document is held out 20 times in expectation, with a standard deviation of 4.2.
    assert np.abs(chosen.sum(0) - 20).max() < 20
    assert np.ptp(chosen.sum(0)) > 0


def test_held_out_documents_fill_their_share_with_what_still_fits():
    lengths = np.array([500, 300, 90, 60, 40, 10])
    for seed in range(20):
        chosen = choose_validation(lengths, 0.1, np.random.default_rng(seed))
        room = 100 - lengths[chosen].sum()
        assert 0 <= room < lengths[~chosen].min()
