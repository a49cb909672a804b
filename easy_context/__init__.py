"""EasyContext: exact sequence-parallel attention and long-context training for Hugging Face decoders."""

from .checkpointing import (
    apply_unsloth_offloaded_gradient_checkpoint_monkey_patch,
    remove_unsloth_offloaded_gradient_checkpoint_monkey_patch,
)
from .loss import apply_fused_loss
from .sequence_parallel import (
    apply_seq_parallel_monkey_patch,
    gather_seq_parallel_outputs,
    prepare_dataloader,
    prepare_seq_parallel_inputs,
    remove_seq_parallel_monkey_patch,
)

__all__ = [
    "apply_fused_loss",
    "apply_seq_parallel_monkey_patch",
    "apply_unsloth_offloaded_gradient_checkpoint_monkey_patch",
    "gather_seq_parallel_outputs",
    "prepare_dataloader",
    "prepare_seq_parallel_inputs",
    "remove_seq_parallel_monkey_patch",
    "remove_unsloth_offloaded_gradient_checkpoint_monkey_patch",
]
