"""On two CUDA devices over NCCL: modes, checkpointing with offload, Liger, against float64 or the plain model."""

import os
import socket
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from plain_attention import attention_with_gradients, random_inputs, relative_error

SPLIT_MODES = ("zigzag_ring_attn", "dist_flash_attn", "ulysses_attn")
KERNELS = ("flash_attn_4", "cudnn", "flash_attn", "torch_flash")
LAYOUTS = ((1, 512, 8, 8, 128), (2, 384, 8, 2, 64), (1, 640, 4, 1, 80), (1, 256, 8, 4, 96))

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def two_gpus():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    return _run_on_gpus


def _run_on_gpus(function, *args):
    """Calls `function(rank, 2, device, *args)` on two processes joined by NCCL; returns what each returned.

    Not on the pool's workers: they are forked, and CUDA cannot be used in a process forked after its first use.
    """
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        port = listener.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_on_gpu, (port, folder, function, *args), nprocs=2)
        return [torch.load(Path(folder, str(rank)), weights_only=False) for rank in range(2)]


def _on_gpu(rank, port, folder, function, *args):
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port))
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group("nccl", rank=rank, world_size=2, device_id=device)
    torch.save(function(rank, 2, device, *args), Path(folder, str(rank)))
    dist.destroy_process_group()


def _mode_errors(rank, size, device, mode_name, kernel_name):
    """Relative errors of the mode and of the kernel on one GPU, both against float64, gathered over the row."""
    from easy_context.kernels import AttentionMask, select_kernel
    from easy_context.modes import get_mode

    mode, causal, rows = get_mode(mode_name), AttentionMask(causal=True), []
    for seed, (batch, seq, heads, kv_heads, head_dim) in enumerate(LAYOUTS):
        try:
            kernel = select_kernel(kernel_name, device, torch.bfloat16, head_dim)
        except ValueError as reason:
            return str(reason)
        whole = random_inputs(seed, batch, seq, seq, heads, kv_heads, head_dim, torch.bfloat16, device)
        scale = head_dim**-0.5
        expected = attention_with_gradients(*whole, scale)
        q, k, v, dout = (mode.shard(x, rank, size) for x in whole)
        options = {"scale": scale, "mask": causal, "kernel": kernel, "group": dist.group.WORLD}
        out, residuals = mode.forward(q, k, v, **options)
        results = (out, *mode.backward(dout, q, k, v, out, residuals, **options))
        out, lse = kernel.forward(*whole[:3], scale, causal)
        single = (out, *kernel.backward(whole[3], *whole[:3], out, lse, scale, causal))
        for name, part, alone in zip(("out", "dq", "dk", "dv"), results, single, strict=True):
            shards = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(size)]
            dist.all_gather(shards, part.contiguous())
            right = getattr(expected, name)
            rows.append((f"{seed} {name}", relative_error(mode.unshard(shards), right), relative_error(alone, right)))
    return rows


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("mode", SPLIT_MODES)
def test_bf16_error_is_at_most_one_and_a_half_times_the_single_process_kernels(two_gpus, mode, kernel):
    results = two_gpus(_mode_errors, mode, kernel)[0]
    if isinstance(results, str):
        pytest.skip(results)
    assert len(results) == 4 * len(LAYOUTS)
    for name, error, single_error in results:
        assert error <= 1.5 * single_error, (name, error, single_error)


def _gradients(rank, size, device, mode, checkpointing, liger, dtype, kernel):
    """Losses and gradients of two steps of a small Llama on this rank's shards."""
    from transformers import LlamaConfig, LlamaForCausalLM

    import easy_context
    from easy_context.liger import apply_liger
    from easy_context.loss import shift_labels

    config = LlamaConfig(
        vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    if liger:
        apply_liger(config)
    torch.manual_seed(0)
    mesh = easy_context.apply_seq_parallel_monkey_patch(mode, "llama", attn_kernel=kernel)
    model = easy_context.apply_fused_loss(LlamaForCausalLM(config).to(device, dtype).train())
    if checkpointing is not None:
        easy_context.apply_unsloth_offloaded_gradient_checkpoint_monkey_patch(**checkpointing)
        model.gradient_checkpointing_enable()
    gradients = {}
    for step in range(2):  # the second step reuses pinned buffers
        model.zero_grad()
        torch.manual_seed(10 + step)
        ids = torch.randint(0, 512, (2, 1000))
        part = easy_context.prepare_seq_parallel_inputs(
            mode, ids, torch.arange(1000)[None], shift_labels(ids), mesh.sequence_rank, mesh.sequence_size, device
        )
        loss = model(
            part["local_input_ids"], position_ids=part["local_position_ids"], shift_labels=part["local_target_ids"],
            num_items_in_batch=torch.tensor(2 * 999, device=device), use_cache=False,
        ).loss  # fmt: skip
        loss.backward()
        gradients[f"loss {step}"] = loss.detach().float().cpu()
        gradients |= {f"{name} {step}": p.grad.float().cpu() for name, p in model.named_parameters()}
    easy_context.remove_unsloth_offloaded_gradient_checkpoint_monkey_patch()
    easy_context.remove_seq_parallel_monkey_patch()
    return gradients


@pytest.mark.parametrize("mode", SPLIT_MODES)
@pytest.mark.parametrize("offload,keep_attention", [(True, "gpu"), (True, "cpu"), (False, "gpu"), (True, "none")])
def test_checkpointing_changes_no_gradient(two_gpus, mode, offload, keep_attention):
    settings = {"offload": offload, "keep_attention": keep_attention}
    exact = (torch.float32, "reference")  # nothing here sums in another order from run to run
    plain = two_gpus(_gradients, mode, None, False, *exact)
    checkpointed = two_gpus(_gradients, mode, settings, False, *exact)
    for mine, other in zip(plain, checkpointed, strict=True):
        for name, value in mine.items():
            assert relative_error(other[name], value) < 1e-6, name


def test_liger_layers_agree_within_bf16(two_gpus):
    plain = two_gpus(_gradients, "zigzag_ring_attn", None, False, torch.bfloat16, "auto")
    liger = two_gpus(_gradients, "zigzag_ring_attn", None, True, torch.bfloat16, "auto")
    for mine, other in zip(plain, liger, strict=True):
        for name, value in mine.items():
            assert relative_error(other[name], value) < 3e-2, name
