"""The fused loss has the value and gradients of plain cross-entropy, and never holds the logits of all tokens."""

import pytest
import torch
import torch.nn.functional as F
from family_models import VOCABULARY, assert_identical, checkpointing, family_model, gradients_of, patched, random_rows
from plain_attention import relative_error
from tensor_sizes import LargestTensor

import easy_context
from easy_context import loss as loss_module
from easy_context.loss import linear_cross_entropy, shift_labels, token_losses


def random_problem(batch=2, length=37, width=16, vocabulary=53, dtype=torch.float32, ignored=0.3, seed=0):
    """hidden, weight and targets; a part of the targets is -100."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(batch, length, width, generator=generator).to(dtype)
    weight = torch.randn(vocabulary, width, generator=generator).to(dtype)
    targets = torch.randint(0, vocabulary, (batch, length), generator=generator)
    targets[torch.rand(batch, length, generator=generator) < ignored] = -100
    return hidden, weight, targets


def sum_and_gradients(function, hidden, weight, targets, upstream=1.0):
    leaves = [x.detach().clone().requires_grad_() for x in (hidden, weight)]
    total = function(*leaves, targets)
    return total.detach(), *torch.autograd.grad(total * upstream, leaves)


def plain_sum(hidden, weight, targets):
    return F.cross_entropy((hidden @ weight.T).flatten(0, 1), targets.flatten(), reduction="sum")


def expected_in_float64(hidden, weight, targets, upstream=1.0):
    return sum_and_gradients(plain_sum, hidden.double(), weight.double(), targets, upstream)


@pytest.fixture(params=[1, 10, 10**6], ids="{} rows at a time".format)
def rows_at_a_time(request, monkeypatch):
    monkeypatch.setattr(loss_module, "_CHUNK_BYTES", request.param * 4 * 53)


def test_value_and_gradients_of_plain_cross_entropy(rows_at_a_time):
    for seed in range(3):
        problem = random_problem(seed=seed)
        actual = sum_and_gradients(linear_cross_entropy, *problem, upstream=0.25)
        expected = expected_in_float64(*problem, upstream=0.25)
        for value, reference in zip(actual, expected, strict=True):
            assert value.dtype == torch.float32
            assert relative_error(value, reference) < 1e-6, f"{seed=}"


def test_float64_stays_float64(rows_at_a_time):
    problem = random_problem(dtype=torch.float64)
    for value, reference in zip(
        sum_and_gradients(linear_cross_entropy, *problem), expected_in_float64(*problem), strict=True
    ):
        assert value.dtype == torch.float64 and relative_error(value, reference) < 1e-12


def test_bfloat16_is_as_exact_as_plain_cross_entropy(rows_at_a_time):
    problem = random_problem(dtype=torch.bfloat16, length=200)
    total, *gradients = sum_and_gradients(linear_cross_entropy, *problem)
    assert total.dtype == torch.float32 and all(gradient.dtype == torch.bfloat16 for gradient in gradients)

    def plain_in_float32(hidden, weight, targets):
        return F.cross_entropy((hidden @ weight.T).float().flatten(0, 1), targets.flatten(), reduction="sum")

    plain = sum_and_gradients(plain_in_float32, *problem)
    for value, other, reference in zip((total, *gradients), plain, expected_in_float64(*problem), strict=True):
        assert relative_error(value, reference) < 1.5 * relative_error(other, reference) + 1e-6


def test_all_targets_ignored_gives_zero_and_zero_gradients():
    hidden, weight, targets = random_problem(ignored=1.1)
    assert (targets == -100).all()
    for value in sum_and_gradients(linear_cross_entropy, hidden, weight, targets):
        assert (value == 0).all()


def test_large_logits_do_not_overflow():
    hidden, weight, targets = random_problem()
    actual = sum_and_gradients(linear_cross_entropy, hidden * 100, weight * 100, targets)
    for value, reference in zip(actual, expected_in_float64(hidden * 100, weight * 100, targets), strict=True):
        assert relative_error(value, reference) < 1e-5


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_one_side_may_be_frozen(frozen):
    hidden, weight, targets = random_problem()
    _, dhidden, dweight = expected_in_float64(hidden, weight, targets)
    leaf, reference = (weight, dweight) if frozen == "hidden" else (hidden, dhidden)
    leaf.requires_grad_()
    linear_cross_entropy(hidden, weight, targets).backward()
    assert relative_error(leaf.grad, reference) < 1e-6


def test_autocast_computes_logits_in_its_dtype():
    hidden, weight, targets = random_problem()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        total, dhidden, dweight = sum_and_gradients(linear_cross_entropy, hidden, weight, targets)
    exact = expected_in_float64(hidden, weight, targets)
    assert total.dtype == dhidden.dtype == dweight.dtype == torch.float32
    assert 0 < relative_error(total, exact[0]) < 1e-2
    assert relative_error(dhidden, exact[1]) < 2e-2 and relative_error(dweight, exact[2]) < 2e-2


def test_logits_are_never_whole(monkeypatch):
    monkeypatch.setattr(loss_module, "_CHUNK_BYTES", 10 * 4 * 200)
    hidden, weight, targets = random_problem(length=200, vocabulary=200, width=8)
    leaves = hidden.requires_grad_(), weight.requires_grad_()
    with LargestTensor() as seen:
        linear_cross_entropy(*leaves, targets).backward()
    assert seen.largest <= max(hidden.numel(), weight.numel(), 10 * 200)


def loss_of_model(model, fused: bool, **inputs):
    model.zero_grad()
    output = model(use_cache=False, **inputs)
    if fused:
        assert output.logits is None
        loss = output.loss
    else:
        targets = shift_labels(inputs["labels"])
        loss = F.cross_entropy(output.logits.flatten(0, 1), targets.flatten(), reduction="sum")
        loss = loss / (targets != -100).sum()
    loss.backward()
    return loss.item(), gradients_of(model)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_models_loss_and_gradients(family, tied):
    model = family_model(family, tie_word_embeddings=tied)
    ids, _ = random_rows(3, 21)
    labels = ids.clone()
    labels[:, :5] = -100
    expected_loss, expected = loss_of_model(model, fused=False, input_ids=ids, labels=labels)
    assert easy_context.apply_fused_loss(model) is model
    targets = shift_labels(labels)
    for count in (None, (targets != -100).sum(), int((targets != -100).sum())):
        loss, gradients = loss_of_model(
            model, fused=True, input_ids=ids, shift_labels=targets, num_items_in_batch=count
        )
        assert loss == pytest.approx(expected_loss, rel=1e-6)
        assert gradients.keys() == expected.keys()
        for name, gradient in expected.items():
            assert relative_error(gradients[name], gradient) < 1e-5, name


def test_the_loss_is_divided_by_the_number_that_is_given():
    model = easy_context.apply_fused_loss(family_model("llama"))
    ids, targets = random_rows(1, 12)
    loss, gradients = loss_of_model(model, fused=True, input_ids=ids, shift_labels=targets, num_items_in_batch=1)
    eighth, eighths = loss_of_model(model, fused=True, input_ids=ids, shift_labels=targets, num_items_in_batch=8)
    assert eighth == pytest.approx(loss / 8)
    assert all(relative_error(eighths[name] * 8, gradient) < 1e-6 for name, gradient in gradients.items())


def test_a_model_without_any_target_has_loss_zero():
    model = easy_context.apply_fused_loss(family_model("llama"))
    ids, targets = random_rows(1, 12)
    for count in (None, 5):
        inputs = {"input_ids": ids, "shift_labels": torch.full_like(targets, -100), "num_items_in_batch": count}
        loss, gradients = loss_of_model(model, fused=True, **inputs)
        assert loss == 0 and all((gradient == 0).all() for gradient in gradients.values())


def test_without_targets_the_model_works_as_before():
    model = family_model("llama").eval()
    ids, _ = random_rows(2, 9)
    expected = model(ids)
    labelled = model(ids, labels=ids)
    easy_context.apply_fused_loss(model)
    assert torch.equal(model(ids).logits, expected.logits)
    torch.testing.assert_close(model(ids, logits_to_keep=1).logits, expected.logits[:, -1:])
    assert torch.equal(model(ids, labels=ids).loss, labelled.loss)
    state = model.state_dict()
    assert state.keys() == family_model("llama").state_dict().keys()
    assert model.generate(ids, max_new_tokens=3, do_sample=False).shape == (2, 12)


def test_a_failed_forward_leaves_the_model_usable():
    model = easy_context.apply_fused_loss(family_model("llama"))
    ids, targets = random_rows(1, 8)
    with pytest.raises(IndexError):
        model(ids + VOCABULARY, shift_labels=targets)
    assert model(ids).logits.shape == (1, 8, VOCABULARY)


def test_labels_and_shift_labels_together_are_refused():
    model = easy_context.apply_fused_loss(family_model("llama"))
    ids, targets = random_rows(1, 8)
    with pytest.raises(ValueError, match="shift_labels or labels"):
        model(ids, labels=ids, shift_labels=targets)


def test_a_head_that_is_no_plain_linear_layer_is_refused():
    model = family_model("llama")
    model.lm_head = torch.nn.Linear(32, VOCABULARY, bias=True)
    with pytest.raises(ValueError, match="(?s)LlamaForCausalLM.*bias"):
        easy_context.apply_fused_loss(model)
    with pytest.raises(ValueError, match="LlamaModel"):
        easy_context.apply_fused_loss(model.model)


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_(enable|disable). is deprecated")
def test_with_checkpointing_and_a_patch_gradients_stay():
    ids, targets = random_rows(2, 20)
    with patched("data_parallel", attn_kernel="cpu"):
        model = easy_context.apply_fused_loss(family_model("llama"))
        _, expected = loss_of_model(model, fused=True, input_ids=ids, shift_labels=targets)
        with checkpointing(model):
            _, gradients = loss_of_model(model, fused=True, input_ids=ids, shift_labels=targets)
    assert_identical(gradients, expected)


def test_shift_labels():
    labels = torch.tensor([[5, 6, 7], [8, -100, 9]])
    copy = labels.clone()
    assert shift_labels(labels).tolist() == [[6, 7, -100], [-100, 9, -100]]
    assert torch.equal(labels, copy)
    assert shift_labels(torch.tensor([[3]])).tolist() == [[-100]]


@pytest.mark.parametrize("chunk_size", [1, 7, 74, 1024])
def test_token_losses(chunk_size):
    hidden, weight, targets = random_problem()
    expected = F.cross_entropy((hidden @ weight.T).double().transpose(1, 2), targets, reduction="none")
    losses = token_losses(hidden.requires_grad_(), weight, targets, chunk_size=chunk_size)
    assert losses.dtype == torch.float32 and losses.shape == targets.shape and not losses.requires_grad
    assert relative_error(losses, expected) < 1e-6
    assert (losses[targets == -100] == 0).all()


def test_token_losses_of_half_precision_are_float32():
    hidden, weight, targets = random_problem(dtype=torch.bfloat16)
    expected = F.cross_entropy((hidden.double() @ weight.double().T).transpose(1, 2), targets, reduction="none")
    losses = token_losses(hidden, weight, targets)
    assert losses.dtype == torch.float32 and relative_error(losses, expected) < 1e-2


def test_token_losses_hold_one_chunk_of_logits():
    hidden, weight, targets = random_problem(length=200, vocabulary=200, width=8)
    with LargestTensor() as seen:
        token_losses(hidden, weight, targets, chunk_size=10)
    assert seen.largest <= max(hidden.numel(), weight.numel(), 10 * 200)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_value_and_gradients_on_gpu(dtype):
    """Liger's where it is installed, ours elsewhere."""
    problem = random_problem(length=300, width=64, vocabulary=1000, dtype=dtype)
    expected = expected_in_float64(*(x.cuda() for x in problem))
    actual = sum_and_gradients(linear_cross_entropy, *(x.cuda() for x in problem))
    for value, reference in zip(actual, expected, strict=True):
        assert relative_error(value, reference) < (2e-2 if dtype == torch.bfloat16 else 1e-3)
    for value in sum_and_gradients(linear_cross_entropy, *(x.cuda() for x in random_problem(ignored=1.1, dtype=dtype))):
        assert (value == 0).all()
