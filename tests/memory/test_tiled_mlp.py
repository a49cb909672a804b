"""The tiled MLP gives the values and gradients of the plain one, at no extra computation under checkpointing."""

import os

import pytest
import torch
from plain_attention import relative_error
from transformers import LlamaConfig, LlamaForCausalLM

import easy_context
from easy_context.memory.tiled_mlp import apply_tiled_mlp
from easy_context.training.accelerator import compile_nothing_on_cpu

TOKENS, TILE = 50, 16  # the last tile is short
IDS = torch.randint(0, 31, (2, TOKENS), generator=torch.Generator().manual_seed(1))


def _model(layers: int = 2) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=31, hidden_size=16, intermediate_size=40, num_hidden_layers=layers, num_attention_heads=4
    )
    return LlamaForCausalLM(config).train()


def _loss_and_grads(model: LlamaForCausalLM) -> tuple[float, dict[str, torch.Tensor]]:
    loss = model(IDS, labels=IDS, use_cache=False).loss
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.fixture
def patched():
    easy_context.apply_seq_parallel_monkey_patch("data_parallel", "llama")
    easy_context.apply_unsloth_offloaded_gradient_checkpoint_monkey_patch()
    yield
    easy_context.remove_unsloth_offloaded_gradient_checkpoint_monkey_patch()
    easy_context.remove_seq_parallel_monkey_patch()


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
def test_values_and_gradients_are_those_of_the_plain_mlp(patched, checkpointing, frozen):
    results = []
    for tiled in (False, True):
        model = _model()
        if frozen:
            for name, parameter in model.named_parameters():
                parameter.requires_grad_("down_proj" in name)
        if tiled:
            apply_tiled_mlp(model, TILE)
        if checkpointing:
            model.gradient_checkpointing_enable()
        results.append(_loss_and_grads(model))
    (plain_loss, plain), (tiled_loss, tiled) = results
    assert tiled_loss == pytest.approx(plain_loss, rel=1e-6)
    assert tiled.keys() == plain.keys() and len(plain) > 0
    for name, grad in plain.items():
        assert (tiled[name] - grad).norm() <= 1e-5 * grad.norm(), name


def test_checkpointing_runs_the_mlp_forward_twice_not_three_times(patched):
    model = apply_tiled_mlp(_model(layers=1), TILE)
    model.gradient_checkpointing_enable()
    rows = []
    model.model.layers[0].mlp.gate_proj.register_forward_hook(lambda module, args, out: rows.append(out.shape[1]))
    _loss_and_grads(model)
    assert sum(rows) == 2 * TOKENS
    assert max(rows) == TILE


@pytest.mark.parametrize("checkpointing", [False, True])
def test_under_autocast_every_product_of_the_mlp_is_in_bfloat16(patched, checkpointing):
    """Backward runs outside of autocast, and must run the tiles as forward did."""
    results, dtypes = [], set()
    for tiled in (False, True):
        model = _model()
        if tiled:
            apply_tiled_mlp(model, TILE)
            for layer in model.model.layers:
                layer.mlp.up_proj.register_forward_hook(lambda module, args, out: dtypes.add(out.dtype))
        if checkpointing:
            model.gradient_checkpointing_enable()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(IDS, labels=IDS, use_cache=False).loss
        loss.backward()
        results.append((loss.item(), {name: p.grad for name, p in model.named_parameters()}))
    (plain_loss, plain), (tiled_loss, tiled) = results
    assert dtypes == {torch.bfloat16}
    assert tiled_loss == plain_loss
    for name, grad in plain.items():
        # Activations' gradients are the same; the weights' are summed over tiles in float32 instead of in one product.
        assert (tiled[name] - grad).norm() <= 5e-3 * grad.norm(), name


def test_under_autocast_the_output_has_autocasts_dtype():
    """A float32 tensor of all tokens would be twice the memory."""
    hidden = torch.randn(1, TOKENS, 16)
    for dtype in (torch.float32, torch.bfloat16):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
            for model in (_model(layers=1), apply_tiled_mlp(_model(layers=1), TILE)):
                assert model.model.layers[0].mlp(hidden).dtype == dtype


def test_weights_gradients_are_summed_over_tiles_in_float32():
    """In bfloat16 one token at a time is as exact as all at once: a sum in bfloat16 would lose most of 1000 terms."""
    torch.manual_seed(2)
    hidden, dout = torch.randn(2, 1, 1000, 16).to(torch.bfloat16)
    gradients = []
    for dtype, tile in ((torch.float64, None), (torch.bfloat16, None), (torch.bfloat16, 1)):
        model = _model(layers=1).to(torch.bfloat16).to(dtype)  # the same weights, rounded
        if tile is not None:
            apply_tiled_mlp(model, tile)
        mlp = model.model.layers[0].mlp
        mlp(hidden.to(dtype)).backward(dout.to(dtype))
        gradients.append([p.grad for p in mlp.parameters()])
    for exact, plain, tiled in zip(*gradients, strict=True):
        assert tiled.dtype == torch.bfloat16
        error, limit = relative_error(tiled, exact), relative_error(plain, exact)
        assert error < 1.2 * limit, (error, limit)


def test_a_tile_size_that_is_not_positive_is_refused():
    with pytest.raises(ValueError, match="tile_size"):
        apply_tiled_mlp(_model(), 0)


def _losses_under_zero3(rank: int, world_size: int) -> list[float]:
    """Losses of three steps of a model that DeepSpeed shards only when it wraps it, after the MLP was tiled."""
    os.environ |= {"LOCAL_RANK": str(rank), "DS_ACCELERATOR": "cpu"}
    import deepspeed

    compile_nothing_on_cpu()
    model = apply_tiled_mlp(_model(), TILE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0}  # else parameters as small as these stay whole
    config = {"train_micro_batch_size_per_gpu": 2, "zero_allow_untested_optimizer": True, "zero_optimization": zero}
    try:
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        losses = []
        for _ in range(3):
            loss = engine(IDS, labels=IDS, use_cache=False).loss
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        engine.destroy()
    finally:
        del os.environ["LOCAL_RANK"], os.environ["DS_ACCELERATOR"]
    return losses


def test_zero3_may_shard_the_model_after_the_mlp_is_tiled(pool):
    """A tile's backward needs all weights of the MLP together, whether they are sharded at loading or later."""
    model, expected = _model(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(IDS, labels=IDS, use_cache=False).loss
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    assert expected[2] < expected[0] - 0.1  # a step that goes wrong shows
    for losses in pool.run(_losses_under_zero3, 2):
        assert losses == pytest.approx(expected, rel=1e-5)
