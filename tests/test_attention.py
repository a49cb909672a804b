"""The autograd function that every mode runs through: its gradients, and what a checkpointed layer keeps of it."""

import threading

import pytest
import torch
from family_models import family_model, patched, random_rows, sharded_step
from plain_attention import attention_with_gradients, random_inputs, relative_error

import easy_context
from easy_context.attention import AttentionSettings, sequence_parallel_attention
from easy_context.kernels import AttentionMask, select_kernel
from easy_context.memory.layer_run import LayerRun, current_layer_run, layer_run
from easy_context.mesh import CurrentMesh, Mesh
from easy_context.modes import MODES, build_mode

SCALE = 0.3


def settings_of(mode: str, dtype=torch.float32) -> AttentionSettings:
    kernel = select_kernel("reference", torch.device("cpu"), dtype, 8)
    mesh = CurrentMesh(ring_degree=lambda size: 2 if mode == "usp_attn" and size % 2 == 0 else 1)
    return AttentionSettings(build_mode(mode, mesh), kernel, SCALE, AttentionMask())


def attend_sharded(rank: int, world_size: int, modes: list[str], inputs: list[torch.Tensor]) -> list[tuple]:
    """out, dq, dk, dv of this rank for each mode."""
    results = []
    for mode in modes:
        settings = settings_of(mode)
        q, k, v, dout = (settings.mode.shard(x) for x in inputs)
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = sequence_parallel_attention(*leaves, settings)
        results.append((out.detach(), *torch.autograd.grad(out, leaves, dout)))
    return results


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_gradients_are_those_of_attention_over_the_whole_row(pool, world_size):
    modes = [mode for mode in MODES if mode != "data_parallel"]
    inputs = random_inputs(1, 2, 24, 24, 6, 2, 8)
    expected = attention_with_gradients(*inputs, SCALE)
    results = pool.run(attend_sharded, world_size, modes, inputs)
    for i, mode in enumerate(modes):
        rings = 2 if mode == "usp_attn" and world_size == 2 else 1
        unshard = build_mode(mode, Mesh(sequence_size=world_size, ring_degree=rings)).unshard
        for j, name in enumerate(("out", "dq", "dk", "dv")):
            whole = unshard([result[i][j] for result in results])
            assert relative_error(whole, getattr(expected, name)) < 1e-5, f"{mode} {name} W={world_size}"


@pytest.mark.parametrize("learns", [(True, False, False), (False, True, False), (False, False, True)], ids=str)
def test_only_what_learns_gets_a_gradient(learns):
    inputs = random_inputs(2, 1, 10, 10, 4, 2, 8)
    expected = attention_with_gradients(*inputs, SCALE)
    q, k, v = (x.requires_grad_(needs) for x, needs in zip(inputs[:3], learns, strict=True))
    sequence_parallel_attention(q, k, v, settings_of("data_parallel")).backward(inputs[3])
    for leaf, needs, right in zip((q, k, v), learns, (expected.dq, expected.dk, expected.dv), strict=True):
        assert (leaf.grad is not None) == needs
        assert not needs or relative_error(leaf.grad, right) < 1e-5


def test_numerical_gradients():
    inputs = [x.double().requires_grad_() for x in random_inputs(3, 1, 5, 5, 4, 2, 8)[:3]]
    settings = settings_of("zigzag_ring_attn", dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda q, k, v: sequence_parallel_attention(q, k, v, settings), inputs)


def test_a_recomputed_layer_takes_what_the_first_run_kept_in_its_order():
    """Only the kept results can explain what the second run returns: its own queries are other ones."""
    q, k, v, dout = random_inputs(4, 1, 12, 12, 4, 2, 8)
    settings, kept = settings_of("data_parallel"), []
    with layer_run(LayerRun(recomputing=False, attention=kept)), torch.no_grad():
        first = [sequence_parallel_attention(q, k, v, settings), sequence_parallel_attention(q * 2, k, v, settings)]
    assert len(kept) == 2
    assert not any(tensor.requires_grad for results in kept for tensor in results)
    with layer_run(LayerRun(recomputing=True, attention=kept)):
        for expected in first:
            leaf = torch.zeros_like(q).requires_grad_()
            assert torch.equal(sequence_parallel_attention(leaf, k, v, settings), expected)
    assert kept == []


def test_gradients_through_kept_results_are_identical():
    inputs = random_inputs(5, 2, 12, 12, 4, 2, 8)
    settings, kept = settings_of("data_parallel"), []

    def gradients(run: LayerRun | None) -> tuple[torch.Tensor, ...]:
        leaves = [x.clone().requires_grad_() for x in inputs[:3]]
        with layer_run(run):
            out = sequence_parallel_attention(*leaves, settings)
        return torch.autograd.grad(out, leaves, inputs[3])

    expected = gradients(None)
    gradients(LayerRun(recomputing=False, attention=kept))
    assert not any(tensor.requires_grad for results in kept for tensor in results), "a kept graph would hold itself"
    for actual, right in zip(gradients(LayerRun(recomputing=True, attention=kept)), expected, strict=True):
        assert torch.equal(actual, right)


def test_a_layer_run_ends_with_its_block_and_belongs_to_its_thread():
    outer, inner = LayerRun(False, []), LayerRun(True, None)
    assert current_layer_run() is None
    with layer_run(outer):
        with pytest.raises(RuntimeError), layer_run(inner):
            assert current_layer_run() is inner
            raise RuntimeError
        assert current_layer_run() is outer
        seen = []
        thread = threading.Thread(target=lambda: seen.append(current_layer_run()))
        thread.start()
        thread.join()
        assert seen == [None]
    assert current_layer_run() is None


def gradients_under_transformers_own_checkpointing(rank: int, world_size: int, mode: str) -> dict[str, list[str]]:
    """The parameters whose gradients differ from those without checkpointing, for both kinds."""
    different = {}
    with patched(mode, attn_kernel="cpu") as mesh:
        model = easy_context.apply_fused_loss(family_model("llama", "sdpa"))
        rows = random_rows(2 * mesh.data_size, 30)
        expected = sharded_step(mode, mesh, model, *rows, fused=True).gradients
        for use_reentrant in (False, True):
            model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
            model.enable_input_require_grads()
            actual = sharded_step(mode, mesh, model, *rows, fused=True).gradients
            names = [name for name in expected if not torch.equal(actual[name], expected[name])]
            different[f"use_reentrant={use_reentrant}"] = names + sorted(actual.keys() ^ expected.keys())
    return different


def test_transformers_own_checkpointing_works_too(pool):
    for mode in MODES:
        for different in pool.run(gradients_under_transformers_own_checkpointing, 2, mode):
            assert different == {"use_reentrant=False": [], "use_reentrant=True": []}, mode
