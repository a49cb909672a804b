"""Every memory plan gives the losses and gradients of no checkpointing, keeps what it says and computes no more."""

import gc

import pytest
import torch
from family_models import (
    FAMILIES,
    assert_identical,
    counted_calls,
    family_model,
    gradients_of,
    loss_and_gradients,
    patched,
    planned,
    random_rows,
    sharded_step,
)
from plain_attention import relative_error
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Olmo2Config, Olmo2ForCausalLM

import easy_context
from easy_context.memory import projections
from easy_context.memory.plan import parse_memory_plan
from easy_context.memory.recompute import apply_memory_plan
from easy_context.modes import MODES

LAYERS = 4
# plan: how often its layers run attention forward in a step, in layers
PLANS = {
    "all": 4,
    "input": 8,
    "input@cpu+attention": 4,
    "input+attention+projections": 4,
    "input@cpu+attention@cpu+projections@cpu": 4,
    "input+projections": 8,
    "input@cpu+attention,attention@cpu": 4,
    "input+attention,nothing,attention+projections": 6,
    "1*all,1*input@cpu,1*nothing,1*all": 7,
}


@pytest.mark.parametrize("tile", [0, 7])
@pytest.mark.parametrize("family", FAMILIES)
def test_losses_and_gradients_on_one_process(family, tile):
    """Identical where whole tensors are computed, whose sums tiles take in another order."""
    with patched("data_parallel", family, attn_kernel="cpu"):
        rows = random_rows(2, 20)
        loss, gradients = loss_and_gradients(family_model(family, layers=LAYERS), rows)
        for text in PLANS:
            model = apply_memory_plan(
                family_model(family, layers=LAYERS), parse_memory_plan(text, LAYERS), mlp_tile_size=tile
            )
            for seed in (1, 2):  # rows of another length in between
                own_loss, own_gradients = loss_and_gradients(model, rows if seed == 1 else random_rows(1, 9))
                if seed == 2:
                    own_loss, own_gradients = loss_and_gradients(model, rows)
                assert own_loss.item() == pytest.approx(loss.item(), rel=1e-6), text
                assert own_gradients.keys() == gradients.keys(), text
                for name, gradient in gradients.items():
                    error = relative_error(own_gradients[name], gradient)
                    assert error < 1e-5 if tile else error == 0, f"{name}: {error} {text}"


def compare_plans(rank: int, world_size: int, mode: str) -> None:
    heads = (8, 2) if world_size == 4 else (4, 2)
    with patched(mode, attn_kernel="cpu") as mesh:
        model = easy_context.apply_fused_loss(
            family_model("llama", "sdpa", heads=heads[0], kv_heads=heads[1], layers=LAYERS)
        )
        rows = random_rows(2 * mesh.data_size, 45)
        with counted_calls() as calls:
            expected = sharded_step(mode, mesh, model, *rows, fused=True)
        for text, runs in PLANS.items():
            with planned(model, text), counted_calls() as own_calls:
                result = sharded_step(mode, mesh, model, *rows, fused=True)
            assert result.loss == expected.loss, text
            for name, gradient in expected.gradients.items():
                assert relative_error(result.gradients[name], gradient) < 1e-5, f"{name}: {text}"
            assert own_calls["forward"] * LAYERS == runs * calls["forward"], text
            assert own_calls["backward"] == calls["backward"], text


@pytest.mark.parametrize("mode", MODES)
def test_every_mode(pool, mode):
    pool.run(compare_plans, 2, mode)


def test_four_ranks(pool):
    pool.run(compare_plans, 4, "zigzag_ring_attn")


# Multiplications of one layer's linear layers, in units of hidden_size**2: q and o, k and v, gate and up, down.
HIDDEN, INNER = 32, 48
QKVO, GATE_UP, DOWN = 2 + 2 * 0.5, 2 * INNER / HIDDEN, INNER / HIDDEN
WHOLE = QKVO + GATE_UP + DOWN


class CountedProducts(TorchDispatchMode):
    """Counts the multiplications of matrix products of the two kinds that linear layers make."""

    multiplications = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            self.multiplications += out.numel() * args[-1].shape[0]
        return out


@pytest.mark.parametrize(
    "text,tile,recomputed",
    [
        ("all", 0, 0),
        ("input+attention", 0, LAYERS * (QKVO + GATE_UP)),
        ("input+attention", 5, LAYERS * (QKVO + GATE_UP)),
        ("input", 0, LAYERS * (QKVO + GATE_UP)),
        ("input+attention+projections", 0, 0),
        ("input+attention+projections", 5, 0),
        ("input@cpu+attention@cpu+projections@cpu", 0, 0),
        ("input+attention,attention", 0, LAYERS * (QKVO + GATE_UP) + LAYERS / 2 * WHOLE),
        ("2*input+attention,2*all", 0, 2 * (QKVO + GATE_UP)),
    ],
)
def test_matrix_products_that_run_twice(one_process, text, tile, recomputed):
    """Counted over a whole step; the CPU's attention kernel does not count as a matrix product."""
    tokens, rows = 40, random_rows(2, 20)
    model = family_model("llama", layers=LAYERS)
    operations = []
    for plan, size in (("all", 0), (text, tile)):
        apply_memory_plan(model, parse_memory_plan(plan, LAYERS), mlp_tile_size=size)
        with CountedProducts() as counter:
            loss_and_gradients(model, rows)
        operations.append(counter.multiplications)
    assert operations[1] - operations[0] == recomputed * HIDDEN**2 * tokens


def bytes_that_wait(model, rows) -> int:
    """The memory of all tensors that Python objects hold between forward and backward, each storage once."""
    model.zero_grad()
    loss = model(rows[0], labels=rows[1], shift_labels=rows[1], use_cache=False).loss
    gc.collect()
    tensors = [x for x in gc.get_objects() if type(x) is torch.Tensor]
    held = {x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in tensors}
    loss.backward()
    return sum(held.values())


@pytest.mark.parametrize(
    "text,hidden_sized",
    [
        ("input@cpu", 0),
        ("input+attention", 4 * 1.125),
        ("input@cpu+attention@cpu", 4 * 1.125),
        ("input+attention,attention", 4 * 1.125 - 2),
        ("input,nothing", -2),
        ("input+projections", 4 * (QKVO + GATE_UP)),
        ("1*input+attention+projections,3*input", 1.125 + QKVO + GATE_UP),
    ],
)
def test_what_waits_for_backward(one_process, text, hidden_sized):
    """In hidden-sized tensors beyond layer inputs; a log-sum-exp, one number a head of eight, is an eighth of one."""
    rows, unit = random_rows(2, 20), 40 * HIDDEN * 4
    model = family_model("llama", layers=LAYERS)
    with planned(model, "input"):
        bytes_that_wait(model, rows)  # what is made once
        least = bytes_that_wait(model, rows)
    with planned(model, text):
        assert bytes_that_wait(model, rows) - least == hidden_sized * unit


def test_a_family_whose_layers_read_the_last_projection(monkeypatch):
    """OLMo 2 normalises what down_proj returns: there it is computed. Were it not, no gradient would be a number."""
    torch.manual_seed(0)
    config = Olmo2Config(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=LAYERS, num_attention_heads=4
    )
    model, rows = Olmo2ForCausalLM(config).train(), random_rows(2, 20)
    loss, gradients = loss_and_gradients(model, rows)
    for text in ("input", "input+projections", "input,nothing"):
        with planned(model, text):
            own_loss, own_gradients = loss_and_gradients(model, rows)
        assert own_loss == loss
        assert_identical(own_gradients, gradients, text)
    monkeypatch.setattr(projections, "_LAST_OUTPUT_IS_ADDED", ("olmo2",))
    with planned(Olmo2ForCausalLM(config).train(), "input") as model:
        assert not all(gradient.isfinite().all() for gradient in loss_and_gradients(model, rows)[1].values())


@pytest.mark.parametrize("trained", ["layers.2.", "layers.0.self_attn.q_proj", "embed_tokens", "down_proj", "bias"])
def test_frozen_parameters(trained):
    with patched("data_parallel", "qwen2", attn_kernel="cpu"):
        model, rows = family_model("qwen2", layers=LAYERS), random_rows(2, 16)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(trained in name)
        _, gradients = loss_and_gradients(model, rows)
        assert len(gradients) > 0
        for text in PLANS:
            with planned(model, text):
                assert_identical(loss_and_gradients(model, rows)[1], gradients, f"{trained} {text}")


def test_under_autocast_the_gradients_are_those_without_checkpointing(one_process):
    model, rows = family_model("llama", layers=LAYERS), random_rows(2, 16)
    results = []
    for text in ("all", *PLANS):
        model.zero_grad()
        with planned(model, text):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(rows[0], labels=rows[1], shift_labels=rows[1], use_cache=False).loss
            loss.backward()  # outside of autocast, as recommended
        results.append((loss.detach(), gradients_of(model)))
    assert results[0][0] != loss_and_gradients(model, rows)[0]
    for text, (loss, gradients) in zip(PLANS, results[1:], strict=True):
        assert torch.equal(loss, results[0][0])
        assert_identical(gradients, results[0][1], text)


class WithDropout(torch.nn.Module):
    def __init__(self, inner: torch.nn.Module):
        super().__init__()
        self.inner, self.dropout = inner, torch.nn.Dropout(0.4)

    def forward(self, hidden):
        return self.dropout(self.inner(hidden))


def test_dropout_draws_the_same_masks_in_every_run(one_process):
    model, rows = family_model("llama", layers=LAYERS), random_rows(2, 16)
    for layer in model.model.layers:
        layer.mlp.up_proj, layer.self_attn.o_proj = WithDropout(layer.mlp.up_proj), WithDropout(layer.self_attn.o_proj)
        layer.mlp.down_proj.register_forward_hook(lambda module, args, out: torch.nn.functional.dropout(out, 0.4))
    loss, gradients = loss_and_gradients(model, rows)
    for text in PLANS:
        with planned(model, text):
            own_loss, own_gradients = loss_and_gradients(model, rows)
        assert torch.equal(own_loss, loss), text
        assert_identical(own_gradients, gradients, text)


def test_a_tensor_made_between_two_layers_is_kept(one_process):
    """What a layer starts from is made again from the layer before only if it is that layer's output."""
    model, rows = family_model("llama", layers=LAYERS), random_rows(2, 16)
    model.model.layers[2].register_forward_pre_hook(lambda module, args: (args[0] * 2, *args[1:]))
    _, gradients = loss_and_gradients(model, rows)
    with planned(model, "input,nothing"):
        assert_identical(loss_and_gradients(model, rows)[1], gradients)
    model.model.layers[1].register_forward_pre_hook(lambda module, args: (args[0] * 2, *args[1:]))
    _, gradients = loss_and_gradients(model, rows)
    with planned(model, "input,nothing"):
        assert_identical(loss_and_gradients(model, rows)[1], gradients)


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
        for text in PLANS:
            with planned(model, text):
                assert_identical(both(order), expected, text)


def test_a_plan_for_another_number_of_layers_is_refused():
    with pytest.raises(ValueError, match="3 layers does not go with a model of 2"):
        apply_memory_plan(family_model("llama", layers=2), parse_memory_plan("input", 3))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("family", FAMILIES)
def test_liger_s_layers_which_write_into_their_inputs(family):
    """In bfloat16 the gradients are those of the same kernels without checkpointing, to the last bit."""
    from transformers import AutoModelForCausalLM

    from easy_context.huggingface import modeling_module
    from easy_context.model.liger import apply_liger

    module = modeling_module(family)
    names = dict(vars(module))
    config = family_model(family, layers=LAYERS, heads=4, kv_heads=2).config
    config.head_dim = config.hidden_size = 128
    with patched("data_parallel", family):
        try:
            apply_liger(config)
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).cuda().train()
        finally:
            vars(module).update(names)
        rows = tuple(x.cuda() for x in random_rows(1, 512))
        loss, gradients = loss_and_gradients(model, rows)
        for text in PLANS:
            with planned(model, text):
                own_loss, own_gradients = loss_and_gradients(model, rows)
            assert torch.equal(own_loss, loss), text
            for name, gradient in gradients.items():
                assert relative_error(own_gradients[name], gradient) < 1e-3, f"{name}: {text}"
