"""EasyContext: exact sequence-parallel attention and long-context training for Hugging Face decoders."""

import importlib

_HOMES = {
    "SequenceParallelTrainerMixin": "training.trainer",
    "apply_dist_flash_attn_monkey_patch_llama": "original_names",
    "apply_fused_loss": "loss",
    "apply_memory_plan": "memory.recompute",
    "apply_seq_parallel_monkey_patch": "sequence_parallel",
    "apply_ulysses_attn_monkey_patch_llama": "original_names",
    "apply_unsloth_offloaded_gradient_checkpoint_monkey_patch": "memory.recompute",
    "apply_usp_attn_monkey_patch_llama": "original_names",
    "apply_zigzag_ring_attn_monkey_patch_llama": "original_names",
    "apply_zigzag_ring_attn_monkey_patch_mistral": "original_names",
    "gather_seq_parallel_outputs": "sequence_parallel",
    "next_token_targets": "loss",
    "parse_memory_plan": "memory.plan",
    "prepare_dataloader": "dataloader",
    "prepare_dist_flash_attn_inputs": "original_names",
    "prepare_seq_parallel_inputs": "sequence_parallel",
    "prepare_ulysses_attn_inputs": "original_names",
    "prepare_usp_attn_inputs": "original_names",
    "prepare_zigzag_ring_attn_inputs": "original_names",
    "remove_seq_parallel_monkey_patch": "sequence_parallel",
    "remove_unsloth_offloaded_gradient_checkpoint_monkey_patch": "memory.recompute",
    "set_rope_theta": "model.config",
    "shard_batch": "shards",
}
__all__ = list(_HOMES)


def __getattr__(name: str):
    """Import a public name at its first use, so that `--help` and argument errors do not wait for PyTorch."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
