"""The loss in chunks: values and gradients of plain cross-entropy, and no logits of all tokens anywhere."""

import functools
import random

import pytest
import torch
import torch.nn.functional as F
from family_models import (
    VOCABULARY,
    StepResult,
    assert_identical,
    checkpointing,
    family_model,
    gradients_of,
    plain_step,
    random_rows,
)
from plain_attention import relative_error
from tensor_sizes import LargestTensor
from torch.utils.flop_counter import FlopCounterMode

import easy_context
from easy_context import loss as loss_module
from easy_context.loss import linear_cross_entropy, next_token_targets, token_losses

BYTES_PER_LOGIT = 4
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}


@pytest.fixture
def tokens_per_chunk(monkeypatch):
    """Sets how many tokens of a vocabulary make one chunk."""

    def set_tokens(tokens: int, vocabulary: int) -> None:
        monkeypatch.setattr(loss_module, "_CHUNK_BYTES", tokens * vocabulary * BYTES_PER_LOGIT)

    return set_tokens


def random_problem(seed: int, batch: int, length: int, width: int, vocabulary: int, dtype=torch.float32):
    """hidden `[batch, length, width]`, weight `[vocabulary, width]` and targets, a third of them -100."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(batch, length, width, generator=generator).to(dtype)
    weight = torch.randn(vocabulary, width, generator=generator).to(dtype)
    targets = torch.randint(0, vocabulary, (batch, length), generator=generator)
    targets[torch.rand(batch, length, generator=generator) < 1 / 3] = -100
    return hidden, weight, targets


def with_gradients(function, hidden, weight, targets, upstream: float = 1.7):
    """(value, dhidden, dweight) of `upstream * function(...)`, the value itself without the factor."""
    hidden, weight = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
    value = function(hidden, weight, targets)
    (value * upstream).backward()
    return value.detach(), hidden.grad, weight.grad


def plain_sum(hidden, weight, targets) -> torch.Tensor:
    logits = (hidden @ weight.T).flatten(0, 1)
    return F.cross_entropy(
        logits.to(torch.promote_types(logits.dtype, torch.float32)), targets.flatten(), reduction="sum"
    )


def test_targets_are_the_next_tokens():
    labels = torch.tensor([[5, 6, -100, 8], [1, 2, 3, 4]])
    assert next_token_targets(labels).tolist() == [[6, -100, 8, -100], [2, 3, 4, -100]]
    assert next_token_targets(labels[:, :1]).tolist() == [[-100], [-100]]
    assert labels[0, 0] == 5


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_value_and_gradients_of_plain_cross_entropy(tokens_per_chunk, dtype):
    rng = random.Random(1)
    for seed in range(12):
        batch, length, vocabulary = rng.randint(1, 3), rng.randint(1, 40), rng.randint(2, 90)
        problem = random_problem(seed, batch, length, rng.randint(1, 24), vocabulary, dtype)
        expected = with_gradients(plain_sum, *(x.double() if x.is_floating_point() else x for x in problem))
        for tokens in (1, rng.randint(2, 12), batch * length, 1000):
            tokens_per_chunk(tokens, vocabulary)
            for actual, right in zip(with_gradients(linear_cross_entropy, *problem), expected, strict=True):
                assert actual.dtype == dtype
                assert relative_error(actual, right) < TOLERANCE[dtype], f"{seed=} {tokens=} {problem[0].shape=}"


def test_a_chunk_holds_one_token_even_if_that_is_more_than_the_limit(tokens_per_chunk):
    problem = random_problem(0, 1, 5, 8, 30)
    expected = with_gradients(plain_sum, *problem)
    tokens_per_chunk(0, 30)
    for actual, right in zip(with_gradients(linear_cross_entropy, *problem), expected, strict=True):
        assert relative_error(actual, right) < 1e-5


def test_bfloat16_is_as_exact_as_plain_cross_entropy_in_bfloat16(tokens_per_chunk):
    """Both round logits and gradients to bfloat16 once; several chunks must not add to that."""
    hidden, weight, targets = random_problem(2, 2, 96, 32, 60, torch.bfloat16)
    exact = with_gradients(plain_sum, hidden.double(), weight.double(), targets)
    plain = with_gradients(plain_sum, hidden, weight, targets)
    for tokens in (7, 1000):
        tokens_per_chunk(tokens, 60)
        chunked = with_gradients(linear_cross_entropy, hidden, weight, targets)
        for name, right, other, actual in zip(("loss", "dhidden", "dweight"), exact, plain, chunked, strict=True):
            assert actual.dtype == other.dtype
            error, limit = relative_error(actual, right), 1.5 * relative_error(other, right)
            assert error < max(limit, 1e-4) and error < 1e-2, f"{name} with {tokens} tokens a chunk: {error:.2e}"


def test_the_weights_gradient_is_summed_over_chunks_in_float32(tokens_per_chunk):
    """Tokens one at a time are as exact as all at once: a sum in bfloat16 would lose most of 2000 small terms."""
    vocabulary = 20
    hidden, weight, targets = random_problem(11, 1, 2000, 16, vocabulary, torch.bfloat16)
    exact = with_gradients(plain_sum, hidden.double(), weight.double(), targets)[2]
    errors = []
    for tokens in (2000, 1):
        tokens_per_chunk(tokens, vocabulary)
        errors.append(relative_error(with_gradients(linear_cross_entropy, hidden, weight, targets)[2], exact))
    assert errors[1] < 1.2 * errors[0], errors


def test_the_loss_is_summed_in_float32_under_bfloat16(tokens_per_chunk):
    hidden, weight, targets = random_problem(12, 1, 2000, 16, 20, torch.bfloat16)
    tokens_per_chunk(1, 20)
    expected = token_losses(hidden, weight, targets, chunk_size=1).double().sum()  # the same logits, summed in float64
    assert linear_cross_entropy(hidden, weight, targets).item() == pytest.approx(expected.item(), rel=1e-5)


def test_autocast_computes_in_bfloat16_and_returns_the_parameters_dtype():
    hidden, weight, targets = random_problem(3, 2, 20, 16, 40)
    exact = with_gradients(plain_sum, hidden, weight, targets)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = with_gradients(linear_cross_entropy, hidden, weight, targets)
    for value, right in zip(actual, exact, strict=True):
        assert value.dtype == torch.float32
        assert 1e-7 < relative_error(value, right) < 2e-2


@pytest.mark.parametrize("tokens", [1, 3, 1000])
def test_nothing_to_learn_gives_zero_and_not_nan(tokens_per_chunk, tokens):
    hidden, weight, targets = random_problem(4, 2, 7, 8, 20)
    tokens_per_chunk(tokens, 20)
    for result in with_gradients(linear_cross_entropy, hidden, weight, torch.full_like(targets, -100)):
        assert (result == 0).all()


def test_an_ignored_token_gets_no_gradient_and_gives_none():
    hidden, weight, targets = random_problem(5, 2, 30, 8, 20)
    value, dhidden, dweight = with_gradients(linear_cross_entropy, hidden, weight, targets)
    assert (dhidden[targets == -100] == 0).all() and (dhidden[targets != -100] != 0).any(dim=-1).all()
    hidden[targets == -100] = 1e4
    again = with_gradients(linear_cross_entropy, hidden, weight, targets)
    assert relative_error(again[0], value) < 1e-6 and relative_error(again[2], dweight) < 1e-5


def test_huge_logits_stay_finite():
    hidden, weight, targets = random_problem(6, 1, 12, 8, 20)
    problem = hidden * 1e3, weight * 1e2, targets
    expected = with_gradients(plain_sum, *(x.double() if x.is_floating_point() else x for x in problem))
    for actual, right in zip(with_gradients(linear_cross_entropy, *problem), expected, strict=True):
        assert relative_error(actual, right) < 1e-3


@pytest.mark.parametrize("hidden_learns,weight_learns", [(True, False), (False, True), (False, False)])
def test_what_is_frozen_gets_no_gradient(tokens_per_chunk, hidden_learns, weight_learns):
    hidden, weight, targets = random_problem(7, 2, 15, 8, 20)
    tokens_per_chunk(4, 20)
    value, dhidden, dweight = with_gradients(plain_sum, hidden, weight, targets, upstream=1.0)
    hidden.requires_grad_(hidden_learns)
    weight.requires_grad_(weight_learns)
    actual = linear_cross_entropy(hidden, weight, targets)
    assert relative_error(actual.detach(), value) < 1e-6
    assert actual.requires_grad == (hidden_learns or weight_learns)
    if actual.requires_grad:
        actual.backward()
    for leaf, learns, right in ((hidden, hidden_learns, dhidden), (weight, weight_learns, dweight)):
        assert (leaf.grad is not None) == learns
        assert not learns or relative_error(leaf.grad, right) < 1e-5


def test_without_autograd_no_gradient_is_made(tokens_per_chunk):
    """An evaluation would pay for a float32 copy of the output layer and half as many products again."""
    hidden, weight, targets = random_problem(7, 2, 15, 8, 20)
    tokens_per_chunk(4, 20)
    leaves = hidden.requires_grad_(), weight.requires_grad_()
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        value = linear_cross_entropy(*leaves, targets)
    assert relative_error(value, plain_sum(hidden, weight, targets).detach()) < 1e-6
    assert counter.get_total_flops() == 2 * hidden.numel() * 20


def fused_step(model, ids, targets, **options) -> StepResult:
    model.zero_grad()
    output = model(ids, shift_labels=targets, use_cache=False, **options)
    assert output.logits is None
    output.loss.backward()
    return StepResult(output.loss.item(), gradients_of(model))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_model_with_the_fused_loss_learns_as_the_plain_one(tokens_per_chunk, family, tied):
    ids, targets = random_rows(2, 33)
    model = family_model(family, tie_word_embeddings=tied)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    expected = plain_step(model, ids, targets)
    assert easy_context.apply_fused_loss(model) is model
    valid = int((targets != -100).sum())
    for tokens in (5, 1000):
        tokens_per_chunk(tokens, VOCABULARY)
        for number in (None, valid, torch.tensor(valid)):
            actual = fused_step(model, ids, targets, num_items_in_batch=number)
            assert actual.loss == pytest.approx(expected.loss, rel=1e-6)
            assert actual.gradients.keys() == expected.gradients.keys()
            for name, gradient in expected.gradients.items():
                assert relative_error(actual.gradients[name], gradient) < 1e-5, f"{name} {tokens=} {number=}"


def test_the_loss_is_divided_by_the_number_given():
    """Which is that of all ranks and of the whole accumulation window, not of the rows at hand."""
    ids, targets = random_rows(2, 20)
    model = easy_context.apply_fused_loss(family_model("llama"))
    mean = fused_step(model, ids, targets)
    part = fused_step(model, ids, targets, num_items_in_batch=1000)
    factor = int((targets != -100).sum()) / 1000
    assert part.loss == pytest.approx(mean.loss * factor, rel=1e-6)
    for name, gradient in mean.gradients.items():
        assert relative_error(part.gradients[name], gradient * factor) < 1e-5


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_with_nothing_to_learn_gives_zero_gradients(tied):
    ids, targets = random_rows(2, 20)
    model = easy_context.apply_fused_loss(family_model("llama", tie_word_embeddings=tied))
    for options in ({}, {"num_items_in_batch": 7}):
        result = fused_step(model, ids, torch.full_like(targets, -100), **options)
        assert result.loss == 0
        assert len(result.gradients) == len(list(model.parameters()))  # every rank has them, for collectives
        assert all((gradient == 0).all() for gradient in result.gradients.values())


def test_a_frozen_head_lets_the_rest_learn():
    ids, targets = random_rows(2, 20)
    model = family_model("llama")
    model.lm_head.requires_grad_(False)
    expected = plain_step(model, ids, targets)
    actual = fused_step(easy_context.apply_fused_loss(model), ids, targets)
    assert "lm_head.weight" not in actual.gradients and actual.gradients.keys() == expected.gradients.keys()
    for name, gradient in expected.gradients.items():
        assert relative_error(actual.gradients[name], gradient) < 1e-5, name


def test_without_shifted_targets_the_model_works_as_before():
    ids, _ = random_rows(2, 20)
    model = family_model("llama")
    expected = model(ids, labels=ids)
    easy_context.apply_fused_loss(model)
    fused_step(model, ids, next_token_targets(ids))
    actual = model(ids, labels=ids)
    assert torch.equal(actual.logits, expected.logits) and torch.equal(actual.loss, expected.loss)
    assert torch.equal(model(ids).logits, expected.logits)


def test_both_kinds_of_targets_are_refused():
    ids, targets = random_rows(1, 8)
    model = easy_context.apply_fused_loss(family_model("llama"))
    with pytest.raises(ValueError, match="shift_labels or labels"):
        model(ids, labels=ids, shift_labels=targets)


@pytest.mark.parametrize("option,value", [("logits_to_keep", 3), ("return_dict", False)])
def test_options_that_a_loss_of_all_tokens_cannot_have_are_refused(option, value):
    ids, targets = random_rows(1, 8)
    model = easy_context.apply_fused_loss(family_model("llama"))
    with pytest.raises(ValueError, match=f"leave {option}"):
        model(ids, shift_labels=targets, **{option: value})


def test_a_failed_forward_leaves_no_targets_behind():
    ids, targets = random_rows(1, 8)
    model = easy_context.apply_fused_loss(family_model("llama"))
    expected = model(ids).logits
    with pytest.raises(IndexError):
        model(ids + VOCABULARY, shift_labels=targets)
    assert torch.equal(model(ids).logits, expected)


@pytest.mark.parametrize("head", [torch.nn.Linear(32, VOCABULARY), torch.nn.Identity(), None], ids=str)
def test_an_output_layer_that_is_not_plain_is_refused(head):
    model = family_model("llama")
    model.lm_head = head
    with pytest.raises(ValueError, match="LlamaForCausalLM.*lm_head"):
        easy_context.apply_fused_loss(model)


class Adapter(torch.nn.Module):
    """What LoRA puts in place of a target module: the module, and a product of two small matrices added to it."""

    def __init__(self, base_layer: torch.nn.Linear) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.down = torch.nn.Linear(base_layer.in_features, 2, bias=False)
        self.up = torch.nn.Linear(2, base_layer.out_features, bias=False)

    @property
    def weight(self):
        return self.base_layer.weight

    def forward(self, hidden):
        return self.base_layer(hidden) + self.up(self.down(hidden))


def test_an_adapter_put_on_the_head_afterwards_is_refused():
    ids, targets = random_rows(1, 8)
    model = easy_context.apply_fused_loss(family_model("llama"))
    model.lm_head = Adapter(model.lm_head)
    with pytest.raises(ValueError, match="(?s)lm_head has become a Adapter.*target_modules"):
        model(ids, shift_labels=targets)
    assert model(ids).logits.shape == (1, 8, VOCABULARY)  # without the loss it works as an adapter does


def test_the_patched_head_is_saved_as_the_plain_one(tmp_path):
    model = family_model("llama")
    names = list(model.state_dict())
    easy_context.apply_fused_loss(model).save_pretrained(tmp_path)
    assert list(model.state_dict()) == names
    ids, _ = random_rows(1, 8)
    reloaded = type(model).from_pretrained(tmp_path, attn_implementation="eager").train()
    assert torch.equal(reloaded(ids).logits, model(ids).logits)


def test_no_tensor_holds_the_logits_of_all_tokens(tokens_per_chunk):
    tokens, width, vocabulary = 400, 8, 300
    hidden, weight, targets = random_problem(8, 1, tokens, width, vocabulary)
    tokens_per_chunk(50, vocabulary)
    with LargestTensor() as seen:
        with_gradients(linear_cross_entropy, hidden, weight, targets)
    assert seen.largest == 50 * vocabulary
    with LargestTensor() as seen:
        token_losses(hidden, weight, targets, chunk_size=30)
    assert seen.largest == 30 * vocabulary


def test_no_tensor_of_a_whole_training_step_holds_the_logits_of_all_tokens(tokens_per_chunk):
    vocabulary, length = 4000, 120
    model = easy_context.apply_fused_loss(family_model("llama", vocab_size=vocabulary, layers=1))
    ids, targets = random_rows(2, length)
    with LargestTensor() as seen:
        model(ids).logits  # noqa: B018
    assert seen.largest == 2 * length * vocabulary  # the measure sees them where they are
    tokens_per_chunk(10, vocabulary)
    with LargestTensor() as seen:
        model(ids, shift_labels=targets, use_cache=False).loss.backward()
    assert seen.largest <= vocabulary * model.config.hidden_size < 2 * length * vocabulary


def test_the_loss_s_gradients_are_freed_when_they_are_used():
    """Not only with the loss: the layers' backward, which comes then, needs the memory."""
    hidden, weight = (torch.randn(*shape, requires_grad=True) for shape in ((1, 5, 4), (7, 4)))
    loss = linear_cross_entropy(hidden, weight, torch.zeros(1, 5, dtype=torch.int64))
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.grad_fn.saved_tensors  # noqa: B018


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_token_losses_are_plain_cross_entropy(dtype):
    hidden, weight, targets = random_problem(9, 3, 31, 16, 50, dtype)
    logits = (hidden.double() @ weight.double().T).flatten(0, 1)
    expected = F.cross_entropy(logits, targets.flatten(), reduction="none").view(targets.shape)
    for chunk_size in (1, 10, 1024):
        losses = token_losses(hidden.requires_grad_(), weight, targets, chunk_size)
        assert losses.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert not losses.requires_grad and (losses[targets == -100] == 0).all()
        assert relative_error(losses, expected) < TOLERANCE.get(dtype, 1e-2)


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_(enable|disable). is deprecated")
def test_checkpointed_layers_change_nothing():
    ids, targets = random_rows(2, 20)
    model = easy_context.apply_fused_loss(family_model("llama"))
    expected = fused_step(model, ids, targets)
    with checkpointing(model):
        actual = fused_step(model, ids, targets)
    assert actual.loss == expected.loss
    assert_identical(actual.gradients, expected.gradients)


@pytest.mark.gpu
@pytest.mark.parametrize("liger", [False, None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_value_and_gradients_on_gpu(dtype, liger):
    """Ours, and Liger's where it is installed."""
    loss = functools.partial(linear_cross_entropy, liger=liger)
    hidden, weight, targets = (x.cuda() for x in random_problem(10, 2, 300, 64, 1000, dtype))
    expected = with_gradients(plain_sum, hidden.double(), weight.double(), targets)
    for actual, right in zip(with_gradients(loss, hidden, weight, targets), expected, strict=True):
        assert relative_error(actual, right) < (2e-2 if dtype == torch.bfloat16 else 1e-3)
    for result in with_gradients(loss, hidden, weight, torch.full_like(targets, -100)):
        assert (result == 0).all()
