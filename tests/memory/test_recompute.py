"""Gradient checkpointing on one process: it changes no gradient, exactly in float32, whatever else the model does."""

import contextlib

import pytest
import torch
import transformers.modeling_utils
from family_models import (
    CHECKPOINTING_SETTINGS,
    assert_identical,
    checkpointing,
    counted_calls,
    family_model,
    gradients_of,
    loss_and_gradients,
    random_rows,
)
from plain_attention import relative_error

import easy_context
from easy_context.memory.recompute import checkpoint_layer

LAYERS = 3
# Newer transformers call it activation checkpointing; the old name serves all versions.
pytestmark = pytest.mark.filterwarnings("ignore:.gradient_checkpointing_(enable|disable). is deprecated")


@pytest.mark.parametrize("settings", CHECKPOINTING_SETTINGS, ids=str)
def test_two_steps_in_a_row_and_batches_of_three(one_process, settings):
    model = family_model("llama", layers=LAYERS)
    for seed in (0, 1):
        rows = random_rows(3, 20, seed)
        loss, gradients = loss_and_gradients(model, rows)
        with checkpointing(model, **settings):
            own_loss, own_gradients = loss_and_gradients(model, rows)
        assert torch.equal(own_loss, loss)
        assert_identical(own_gradients, gradients)


@pytest.mark.parametrize("arguments", [{}, {"use_reentrant": True}, {"use_reentrant": False}], ids=str)
def test_gradient_checkpointing_kwargs_are_accepted(one_process, arguments):
    model, rows = family_model("llama"), random_rows(1, 16)
    _, gradients = loss_and_gradients(model, rows)
    easy_context.apply_unsloth_offloaded_gradient_checkpoint_monkey_patch()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=arguments)
    easy_context.remove_unsloth_offloaded_gradient_checkpoint_monkey_patch()
    with counted_calls() as calls:
        _, own_gradients = loss_and_gradients(model, rows)
    assert calls["forward"] == 2  # layers
    assert_identical(own_gradients, gradients)


@pytest.mark.parametrize(
    "trained",
    ["layers.2.", "layers.0.self_attn.q_proj", "self_attn", "embed_tokens", "lm_head", "layers.1.mlp.down_proj"],
)
def test_frozen_parameters(one_process, trained):
    """Also without the hook by which transformers makes the embeddings' output require a gradient."""
    model, rows = family_model("llama", layers=LAYERS), random_rows(2, 16)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained in name)
    _, gradients = loss_and_gradients(model, rows)
    assert len(gradients) > 0
    for settings in CHECKPOINTING_SETTINGS:
        with checkpointing(model, **settings):
            assert_identical(loss_and_gradients(model, rows)[1], gradients, f"{trained} {settings}")
            model.disable_input_require_grads()
            assert_identical(loss_and_gradients(model, rows)[1], gradients, f"no hook {trained} {settings}")


class WithDropout(torch.nn.Module):
    def __init__(self, inner: torch.nn.Module):
        super().__init__()
        self.inner, self.dropout = inner, torch.nn.Dropout(0.4)

    def forward(self, hidden):
        return self.dropout(self.inner(hidden))


def test_dropout_elsewhere_in_the_layer_draws_the_same_masks_again(one_process):
    model, rows = family_model("llama", layers=LAYERS), random_rows(2, 16)
    without_dropout, _ = loss_and_gradients(model, rows)
    for layer in model.model.layers:
        layer.mlp, layer.self_attn.o_proj = WithDropout(layer.mlp), WithDropout(layer.self_attn.o_proj)
    loss, gradients = loss_and_gradients(model, rows)
    state = torch.get_rng_state()
    assert loss != without_dropout
    for settings in CHECKPOINTING_SETTINGS:
        with checkpointing(model, **settings):
            own_loss, own_gradients = loss_and_gradients(model, rows)
        assert torch.equal(own_loss, loss)
        assert_identical(own_gradients, gradients, str(settings))
        assert torch.equal(torch.get_rng_state(), state), "the recomputation moved the random state"


def test_two_forwards_before_two_backwards(one_process):
    model = family_model("llama", layers=LAYERS)
    batches = [random_rows(1, 16, seed) for seed in (0, 1)]

    def both(order):
        model.zero_grad()
        losses = [model(ids, labels=ids, use_cache=False).loss for ids, _ in batches]
        for index in order:
            losses[index].backward()
        return gradients_of(model)

    for order in ((0, 1), (1, 0)):
        expected = both(order)
        with checkpointing(model):
            assert_identical(both(order), expected)


def test_gradients_reach_inputs_embeds(one_process):
    model = family_model("llama")
    embeds = torch.randn(2, 12, 32, requires_grad=True)
    (expected,) = torch.autograd.grad(model(inputs_embeds=embeds, use_cache=False).logits.square().sum(), embeds)
    with checkpointing(model):
        model.zero_grad()
        model(inputs_embeds=embeds, use_cache=False).logits.square().sum().backward()
    assert torch.equal(embeds.grad, expected)


def test_autocast_is_restored_in_the_second_run(one_process):
    model, rows = family_model("llama", layers=LAYERS), random_rows(2, 16)
    exact, _ = loss_and_gradients(model, rows)
    results = []
    for manager in (contextlib.nullcontext(), checkpointing(model)):
        model.zero_grad()
        with manager:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(rows[0], labels=rows[1], shift_labels=rows[1], use_cache=False).loss
            loss.backward()  # outside of autocast, as recommended
            results.append((loss.detach(), gradients_of(model)))
    assert results[0][0] != exact
    assert torch.equal(results[0][0], results[1][0])
    assert_identical(results[1][1], results[0][1])


def test_bfloat16_weights(one_process):
    model, rows = family_model("llama", layers=LAYERS).to(torch.bfloat16), random_rows(2, 16)
    loss, gradients = loss_and_gradients(model, rows)
    with checkpointing(model):
        own_loss, own_gradients = loss_and_gradients(model, rows)
    assert torch.equal(own_loss, loss)
    for name, gradient in gradients.items():
        assert relative_error(own_gradients[name], gradient) < 1e-2, name


def test_no_gradient_means_no_second_run(one_process):
    model = family_model("llama").eval()
    ids, _ = random_rows(1, 16)
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        model.train()
        with checkpointing(model), counted_calls() as calls:
            logits = model(ids, use_cache=False).logits
    assert torch.equal(logits, expected) and not logits.requires_grad
    assert calls["forward"] == 2 and calls["backward"] == 0


def test_a_second_backward_says_why_it_cannot_be(one_process):
    model = family_model("llama")
    ids, _ = random_rows(1, 16)
    with checkpointing(model):
        loss = model(ids, labels=ids, use_cache=False).loss
        loss.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="backward twice"):
            loss.backward()


def test_layers_without_our_attention_are_recomputed():
    """Checkpointing is of use without sequence parallelism, too."""
    model, rows = family_model("llama", "sdpa", layers=LAYERS), random_rows(2, 16)
    loss, gradients = loss_and_gradients(model, rows)
    with checkpointing(model):
        own_loss, own_gradients = loss_and_gradients(model, rows)
    assert torch.equal(own_loss, loss)
    assert_identical(own_gradients, gradients)


def test_a_layer_may_take_and_give_several_tensors():
    def layer(x, factor, y, shift=0.0):
        return x * factor + y.exp(), y * 2, shift

    tensors = [torch.randn(4, requires_grad=True), torch.randn(4, requires_grad=True)]
    for output, *_ in (layer(tensors[0], 3.0, tensors[1]), checkpoint_layer(layer, tensors[0], 3.0, tensors[1])):
        grads = torch.autograd.grad(output.sum(), tensors)
        torch.testing.assert_close(grads[0], torch.full((4,), 3.0))
        torch.testing.assert_close(grads[1], tensors[1].exp().detach())


def test_removing_the_patch_restores_transformers_exactly():
    original = transformers.modeling_utils.checkpoint
    for _ in range(2):
        easy_context.apply_unsloth_offloaded_gradient_checkpoint_monkey_patch()
        easy_context.apply_unsloth_offloaded_gradient_checkpoint_monkey_patch(offload=False)
        assert transformers.modeling_utils.checkpoint is not original
        easy_context.remove_unsloth_offloaded_gradient_checkpoint_monkey_patch()
        assert transformers.modeling_utils.checkpoint is original
    easy_context.remove_unsloth_offloaded_gradient_checkpoint_monkey_patch()


def test_an_unknown_place_for_attention_is_refused():
    with pytest.raises(ValueError, match="(?s)'disk'.*gpu, cpu, none"):
        easy_context.apply_unsloth_offloaded_gradient_checkpoint_monkey_patch(keep_attention="disk")
