"""The adapter to lm-evaluation-harness: likelihoods and greedy answers are the plain model's.

Where lm-eval is installed, its own Hugging Face model must find the same. Elsewhere its base class has a stand-in.
"""

import copy
import importlib.util
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from tiny_models import tiny_llama
from tokenizer_styles import tokenizer_of_style

from easy_context.evaluation.scorer import Scorer
from easy_context.mesh import Mesh

INSTALLED = importlib.util.find_spec("lm_eval") is not None


@pytest.fixture(scope="module")
def adapter():
    """The adapter's module, with a stand-in for lm-eval's base class where lm-eval is not installed."""
    patch = pytest.MonkeyPatch()
    if not INSTALLED:
        for name in ("lm_eval", "lm_eval.api", "lm_eval.api.model"):
            patch.setitem(sys.modules, name, ModuleType(name))
        sys.modules["lm_eval.api.model"].TemplateLM = type("TemplateLM", (), {})
    from easy_context.evaluation import lm_eval_adapter

    yield lm_eval_adapter
    patch.undo()
    sys.modules.pop(lm_eval_adapter.__name__)


@pytest.fixture(scope="module")
def model():
    return tiny_llama()


@pytest.fixture(scope="module")
def tokenizer():
    made = copy.deepcopy(tokenizer_of_style("bytes"))
    made.eos_token = "<|im_end|>"
    return made


@pytest.fixture(scope="module")
def wrapped(adapter, model, tokenizer):
    scorer = Scorer(model, None, Mesh(), torch.device("cpu"))
    return adapter.SplitRowsLM(scorer, tokenizer, longest=200)


def likelihoods(model, context, continuation):
    """From the whole logits of a plain forward: of the continuation, and whether greedy decoding writes it."""
    with torch.no_grad():
        logits = model(torch.tensor([[*context, *continuation]])).logits[0, len(context) - 1 : -1].double()
    wanted = torch.tensor(continuation)
    picked = logits.log_softmax(-1)[torch.arange(len(wanted)), wanted]
    return float(picked.sum()), bool((logits.argmax(-1) == wanted).all())


def greedy(model, context, count):
    ids = list(context)
    with torch.no_grad():
        for _ in range(count):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(context) :]


def test_likelihoods_are_those_of_whole_logits_and_greedy_answers_are_known(wrapped, model):
    context = list(b"All happy families are")
    written = greedy(model, context, 4)
    wrong = [*written[:-1], (written[-1] + 1) % 256]
    pairs = [(context, written), (context, wrong), ([7], list(b"Call me Ishmael."))]
    found = wrapped._loglikelihood_tokens([(("", ""), *pair) for pair in pairs])
    assert [is_greedy for _, is_greedy in found] == [True, False, False]
    for pair, (value, is_greedy) in zip(pairs, found, strict=True):
        expected, expected_greedy = likelihoods(model, *pair)
        assert value == pytest.approx(expected, rel=1e-5) and is_greedy == expected_greedy


def test_a_whole_text_follows_the_token_that_begins_texts(wrapped, model, tokenizer):
    texts = ["Call me Ishmael.", "All happy families are alike."]
    found = wrapped.loglikelihood_rolling([SimpleNamespace(args=(text,)) for text in texts])
    for text, value in zip(texts, found, strict=True):
        expected, _ = likelihoods(model, [tokenizer.eos_token_id], tokenizer(text)["input_ids"])
        assert value == pytest.approx(expected, rel=1e-5)


def test_nothing_is_truncated_and_nothing_generated(wrapped):
    with pytest.raises(ValueError, match="a text of 201 tokens is longer than --max-length 200: raise the flag"):
        wrapped._loglikelihood_tokens([(("", ""), [1] * 100, [2] * 101)])
    with pytest.raises(NotImplementedError, match="key-value cache"):
        wrapped.generate_until([])


def test_a_tokenizer_that_cannot_begin_a_text_is_refused(adapter):
    with pytest.raises(ValueError, match="neither a BOS nor an EOS token"):
        adapter.SplitRowsLM(None, tokenizer_of_style("bytes"), 200)


def test_groups_share_requests_out_and_keep_their_order(adapter, tokenizer):
    class TwoGroups:
        mesh = Mesh(data_rank=1, data_size=2)

        def from_every_group(self, share):
            return [[0, 20, 40], share]

    scored = []
    wrapped = adapter.SplitRowsLM(TwoGroups(), tokenizer, 10)
    assert wrapped._of_each([0, 1, 2, 3, 4], lambda n: scored.append(n) or 10 * n) == [0, 10, 20, 30, 40]
    assert scored == [1, 3]


@pytest.mark.skipif(not INSTALLED, reason="lm-eval is not installed")
def test_its_own_hugging_face_model_finds_the_same(wrapped, model, tokenizer):
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    reference = HFLM(pretrained=model, tokenizer=tokenizer, device="cpu", batch_size=1)
    pairs = [("All happy families are", " alike"), ("", "Call me Ishmael."), ("Call me ", "Ishmael")]
    requests = [Instance("loglikelihood", {}, pair, 0) for pair in pairs]
    texts = [Instance("loglikelihood_rolling", {}, (text,), 0) for _, text in pairs]
    for (value, is_greedy), (expected, expected_greedy) in zip(
        wrapped.loglikelihood(requests), reference.loglikelihood(requests), strict=True
    ):
        assert value == pytest.approx(expected, rel=1e-5) and is_greedy == expected_greedy
    assert wrapped.loglikelihood_rolling(texts) == pytest.approx(reference.loglikelihood_rolling(texts), rel=1e-5)
