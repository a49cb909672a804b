"""Sums of losses: the one-pass curve is the separate passes, and every token counts once."""

import math

import pytest
import torch
import torch.nn.functional as F
from ppl_runs import RELATIVE, document, plain_losses, random_ids
from tiny_models import tiny_llama

from easy_context.evaluation.perplexity import sums as perplexity
from easy_context.evaluation.perplexity.sums import Sum, TokenSums
from easy_context.evaluation.scorer import Scorer
from easy_context.mesh import Mesh

LENGTHS = (2, 3, 17, 64, 100, 128)


@pytest.fixture(scope="module")
def scorer():
    return Scorer(tiny_llama(), None, Mesh(), torch.device("cpu"))


def test_one_pass_gives_the_curve_of_separate_passes(scorer):
    ids = random_ids(128)
    targets = document(ids).targets
    sums = TokenSums.of(scorer.token_losses(ids[None], targets[None])[0], targets)
    curve = perplexity.curve(sums, LENGTHS)
    assert set(curve) == set(LENGTHS)
    for length in LENGTHS:
        expected = plain_losses(ids[:length]).mean().item()
        assert curve[length].tokens == length - 1
        assert curve[length].mean == pytest.approx(expected, rel=RELATIVE), length


def test_a_length_beyond_the_document_has_no_value():
    sums = TokenSums.of(torch.ones(10), torch.ones(10, dtype=torch.int64))
    assert set(perplexity.curve(sums, [5, 10, 11])) == {5, 10}


def test_ranges_of_positions_add_up_to_the_whole():
    for length in (1, 7, 8, 9, 33):
        losses = torch.rand(length, generator=torch.Generator().manual_seed(length))
        targets = torch.cat((torch.ones(length - 1, dtype=torch.int64), torch.tensor([-100])))
        sums = TokenSums.of(losses, targets)
        ranges = perplexity.by_position(sums, perplexity.position_edges(8, 64))
        assert sum(part.tokens for part in ranges.values()) == length - 1
        assert sum(part.loss for part in ranges.values()) == pytest.approx(losses[:-1].double().sum().item())
        # Token n is scored by loss n - 1: the second range holds losses 7 .. 14.
        if length > 8:
            assert ranges[8, 16].loss == pytest.approx(losses[7 : min(15, length - 1)].double().sum().item())
    assert perplexity.position_edges(4, 20) == [0, 4, 8, 16, 20]
    assert perplexity.position_edges(4096, 512) == [0, 512]
    assert perplexity.position_edges(8, 64) == [0, 8, 16, 32, 64]


def test_sums_over_millions_of_tokens_are_exact():
    # A running sum in float32 would be 1e5 off by its end, where a stretch of 100 tokens has a sum of 300.
    length = 3_000_000
    losses = 3 + torch.rand(length, generator=torch.Generator().manual_seed(0))
    targets = torch.ones(length, dtype=torch.int64)
    targets[::7] = -100
    sums = TokenSums.of(losses, targets)
    assert sums.loss.dtype == torch.float64 and sums.tokens.dtype == torch.int64
    values = losses.double().where(targets != -100, 0).tolist()
    for start, stop in ((0, length), (length - 100, length), (length // 2, length // 2 + 1), (7, 2_000_000)):
        part = sums.between(start, stop)
        assert part.tokens == sum(index % 7 != 0 for index in range(start, stop))
        assert part.loss == pytest.approx(math.fsum(values[start:stop]), rel=1e-9, abs=1e-7)
    (curve,) = perplexity.curve(sums, [length]).values()
    assert curve.mean == pytest.approx(math.fsum(values[:-1]) / curve.tokens, rel=1e-12)


def test_ignored_labels_are_counted_nowhere(scorer):
    ids = random_ids(64)
    labels = ids.clone()
    labels[10:50] = -100
    targets = document(ids, labels).targets
    sums = TokenSums.of(scorer.token_losses(ids[None], targets[None])[0], targets)
    whole = perplexity.curve(sums, [64])[64]
    kept = torch.cat((plain_losses(ids)[:9], plain_losses(ids)[49:]))
    assert whole.tokens == len(kept) == 23
    assert whole.mean == pytest.approx(kept.mean().item(), rel=RELATIVE)
    assert math.isnan(perplexity.by_position(sums, [0, 10, 50, 64])[10, 50].mean)


def test_the_mean_is_over_tokens_not_over_documents():
    pooled = perplexity.pool([{8: Sum(10.0, 10)}, {8: Sum(90.0, 30)}, {}])
    assert pooled[8].mean == pytest.approx(2.5)
    assert pooled[8].perplexity == pytest.approx(math.exp(2.5))
    assert Sum(1e6, 1).perplexity == math.inf


@pytest.mark.parametrize("window, stride, length", [(16, 4, 50), (16, 16, 50), (16, 16, 48), (16, 5, 10), (64, 7, 64)])
def test_sliding_window_scores_every_token_once_with_the_context_it_should(scorer, window, stride, length):
    ids = random_ids(length)
    targets = document(ids).targets
    total = perplexity.sliding_window(scorer.token_losses, ids, targets, window, stride)
    logits = tiny_llama()
    expected, scored = 0.0, 0
    for index in range(length - 1):  # the first window that holds this position
        start = max(0, math.ceil((index + 1 - window) / stride)) * stride
        context = ids[start : index + 1]
        expected += F.cross_entropy(logits(context[None]).logits[0, -1:].double(), ids[index + 1 : index + 2]).item()
        scored += 1
    assert total.tokens == scored == length - 1
    assert total.loss == pytest.approx(expected, rel=RELATIVE)


def test_sums_of_windows_are_float64():
    losses = 3 + torch.rand(100_000, generator=torch.Generator().manual_seed(0))  # float32, as from a model
    ids = torch.arange(len(losses))  # each token's place, by which its loss is found
    targets = ids.clone()
    targets[-1] = -100

    def token_losses(input_ids, wanted):
        return losses[input_ids].where(wanted != -100, 0)

    for window, stride in ((100_000, 100_000), (60_000, 30_000)):
        total = perplexity.sliding_window(token_losses, ids, targets, window, stride)
        assert total.tokens == len(losses) - 1
        assert total.loss == pytest.approx(math.fsum(losses[:-1].double().tolist()), rel=1e-11)
