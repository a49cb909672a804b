"""On CUDA devices over NCCL: modes, checkpointing with offload, Liger, against float64 or the plain model."""

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
CHECKPOINTING = ((True, "gpu"), (True, "cpu"), (False, "gpu"), (False, "cpu"), (True, "none"), (False, "none"))
LAYOUTS = ((1, 512, 8, 8, 128), (2, 384, 8, 2, 64), (1, 640, 4, 1, 80), (1, 256, 8, 4, 96))

pytestmark = pytest.mark.gpu


def run_on_gpus(count, function, *args):
    """Calls `function(rank, count, device, *args)` on `count` processes joined by NCCL; returns what each returned.

    Not on the pool's workers: they are forked, and CUDA cannot be used in a process forked after its first use.
    """
    if torch.cuda.device_count() < count:
        pytest.skip(f"needs {count} CUDA devices")
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        port = listener.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_on_gpu, (count, port, folder, function, *args), nprocs=count)
        return [torch.load(Path(folder, str(rank)), weights_only=False) for rank in range(count)]


def _on_gpu(rank, count, port, folder, function, *args):
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port))
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group("nccl", rank=rank, world_size=count, device_id=device)
    torch.save(function(rank, count, device, *args), Path(folder, str(rank)))
    dist.destroy_process_group()


def _mode_errors(rank, size, device, mode_name, kernel_name):
    """Relative errors of the mode and of the kernel on one GPU, both against float64, gathered over the row."""
    from easy_context.kernels import AttentionMask, select_kernel
    from easy_context.mesh import CurrentMesh
    from easy_context.modes import build_mode

    mode, causal, rows = build_mode(mode_name, CurrentMesh()), AttentionMask(causal=True), []
    for seed, (batch, seq, heads, kv_heads, head_dim) in enumerate(LAYOUTS):
        try:
            kernel = select_kernel(kernel_name, device, torch.bfloat16, head_dim)
        except ValueError as reason:
            return str(reason)
        whole = random_inputs(seed, batch, seq, seq, heads, kv_heads, head_dim, torch.bfloat16, device)
        scale = head_dim**-0.5
        expected = attention_with_gradients(*whole, scale)
        q, k, v, dout = (mode.shard(x) for x in whole)
        options = {"scale": scale, "mask": causal, "kernel": kernel}
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
def test_bf16_error_is_at_most_one_and_a_half_times_the_single_process_kernels(mode, kernel):
    results = run_on_gpus(2, _mode_errors, mode, kernel)[0]
    if isinstance(results, str):
        pytest.skip(results)
    assert len(results) == 4 * len(LAYOUTS)
    for name, error, single_error in results:
        assert error <= 1.5 * single_error, (name, error, single_error)


def _gradients(rank, size, device, mode, checkpointing, liger, dtype, kernel):
    """Losses and gradients of two steps of a small Llama on this rank's shards."""
    from transformers import LlamaConfig, LlamaForCausalLM

    import easy_context
    from easy_context.loss import next_token_targets
    from easy_context.model.liger import apply_liger

    config = LlamaConfig(
        vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    if liger:
        apply_liger(config)
    torch.manual_seed(0)
    mesh = easy_context.apply_seq_parallel_monkey_patch(mode, "llama", attn_kernel=kernel)
    model = easy_context.apply_fused_loss(LlamaForCausalLM(config).to(device, dtype).train(), liger=liger)
    if checkpointing is not None:
        easy_context.apply_unsloth_offloaded_gradient_checkpoint_monkey_patch(**checkpointing)
        model.gradient_checkpointing_enable()
    gradients = {}
    for step in range(2):  # the second step reuses pinned buffers
        model.zero_grad()
        torch.manual_seed(10 + step)
        ids = torch.randint(0, 512, (2, 1000))
        part = easy_context.prepare_seq_parallel_inputs(
            mode, ids, torch.arange(1000)[None], next_token_targets(ids), mesh.sequence_rank, mesh.sequence_size, device
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


def _checkpointed(rank, size, device, mode, dtype, kernel):
    """Gradients without checkpointing and with each setting of it, as (settings, gradients)."""
    settings = [None, *({"offload": offload, "keep_attention": keep} for offload, keep in CHECKPOINTING)]
    return [(each, _gradients(rank, size, device, mode, each, False, dtype, kernel)) for each in settings]


@pytest.mark.parametrize("mode,count", [("data_parallel", 1), *((mode, 2) for mode in SPLIT_MODES)])
def test_checkpointing_changes_no_gradient(mode, count):
    # float32 and the reference kernel: nothing sums in another order from run to run
    for results in run_on_gpus(count, _checkpointed, mode, torch.float32, "reference"):
        (_, plain), *others = results
        assert len(others) == len(CHECKPOINTING)
        for settings, gradients in others:
            assert gradients.keys() == plain.keys()
            for name, value in plain.items():
                assert relative_error(gradients[name], value) < 1e-6, (settings, name)


@pytest.mark.parametrize("mode,count", [("data_parallel", 1), ("zigzag_ring_attn", 2)])
def test_liger_layers_agree_within_bf16(mode, count):
    plain = run_on_gpus(count, _gradients, mode, None, False, torch.bfloat16, "auto")
    liger = run_on_gpus(count, _gradients, mode, None, True, torch.bfloat16, "auto")
    for mine, other in zip(plain, liger, strict=True):
        for name, value in mine.items():
            assert relative_error(other[name], value) < 3e-2, name
