"""EasyContext: exact sequence-parallel attention and long-context training for Hugging Face decoders."""

import importlib

_HOMES = {
    "SequenceParallelTrainerMixin": "trainer",
    "apply_fused_loss": "loss",
    "apply_seq_parallel_monkey_patch": "sequence_parallel",
    "apply_unsloth_offloaded_gradient_checkpoint_monkey_patch": "checkpointing",
    "gather_seq_parallel_outputs": "sequence_parallel",
    "prepare_dataloader": "sequence_parallel",
    "prepare_seq_parallel_inputs": "sequence_parallel",
    "remove_seq_parallel_monkey_patch": "sequence_parallel",
    "remove_unsloth_offloaded_gradient_checkpoint_monkey_patch": "checkpointing",
}
__all__ = list(_HOMES)


def __getattr__(name: str):
    """Import a public name at its first use, so that `--help` and argument errors need not wait for PyTorch."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
