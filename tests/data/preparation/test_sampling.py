"""Sampling: upsampling keeps the tokens of a source, validation takes whole documents."""

import numpy as np
import pytest

from easy_context.data.preparation.sampling import choose_validation, upsample_long_documents


@pytest.mark.parametrize("seed", range(5))
def test_upsampling_keeps_the_tokens_of_the_source(seed):
    rng = np.random.default_rng(seed)
    lengths = np.exp(rng.normal(7, 1.2, 3000)).astype(int) + 1
    uses = upsample_long_documents(lengths, 4096, 5.0, rng)
    long = lengths >= 4096
    before = lengths[long].sum() / lengths[~long].sum()
    after = (uses * lengths)[long].sum() / (uses * lengths)[~long].sum()
    assert after / before == pytest.approx(5.0, rel=0.05)
    assert (uses * lengths).sum() == pytest.approx(lengths.sum(), rel=0.02)


LENGTHS = {
    "few long": np.array([10_000, *[100] * 40]),
    "one of each": np.array([5000, 3000]),
    "many": np.exp(np.random.default_rng(0).normal(7, 1.2, 400)).astype(int) + 1,
}


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("factor", [1.5, 5.0])
def test_upsampling_uses_every_document_as_often_as_expected_in_each_pass(lengths, factor):
    long = lengths >= 4096
    rate = lengths.sum() / (factor * lengths[long].sum() + lengths[~long].sum())
    rates = np.where(long, factor * rate, rate)
    for number in (0, 3):
        drawn = [
            upsample_long_documents(lengths, 4096, factor, np.random.default_rng(seed), number) for seed in range(2000)
        ]
        # Uses are floor(rate) or one more: their mean has a standard deviation of at most 0.5 / sqrt(2000).
        assert np.abs(np.mean(drawn, axis=0) - rates).max() < 5 * 0.5 / 2000**0.5
        tokens = np.array([(uses * lengths).sum() for uses in drawn])
        assert tokens.mean() == pytest.approx(lengths.sum(), abs=5 * tokens.std() / 2000**0.5)


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_upsampling_evens_out_over_passes(lengths):
    long = lengths >= 4096
    bound = 2 * lengths[long].max() + 2 * lengths[~long].max()
    for seed in range(20):
        uses = [upsample_long_documents(lengths, 4096, 5.0, np.random.default_rng(seed), i) for i in range(30)]
        for passes in (1, 2, 10, 30):
            total = sum(uses[:passes])
            assert abs((total * lengths).sum() - passes * lengths.sum()) <= bound
            assert np.ptp(total[long]) <= 1 and np.ptp(total[~long]) <= 1
        assert len({tuple(use) for use in uses}) > 1


def test_upsampling_by_one_or_without_long_documents_changes_nothing():
    lengths = np.array([10, 20, 5000])
    rng = np.random.default_rng(0)
    assert upsample_long_documents(lengths, 4096, 1.0, rng).tolist() == [1, 1, 1]
    assert upsample_long_documents(lengths, 9999, 5.0, rng).tolist() == [1, 1, 1]


def test_validation_takes_whole_documents():
    rng = np.random.default_rng(1)
    lengths = rng.integers(10, 1000, 500)
    chosen = choose_validation(lengths, 0.1, np.random.default_rng(2))
    assert lengths[chosen].sum() / lengths.sum() == pytest.approx(0.1, abs=0.01)
    assert not choose_validation(lengths, 0.0, rng).any()
    assert not choose_validation(lengths[:1], 0.5, rng).any()
    assert choose_validation(np.array([900, 800]), 0.1, rng).tolist() == [False, True]
