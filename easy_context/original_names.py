"""The names that the original EasyContext's package exported, for scripts that were written for it."""

import functools
from typing import Any, NoReturn

from .modes import find_mode
from .sequence_parallel import apply_seq_parallel_monkey_patch, prepare_seq_parallel_inputs

prepare_zigzag_ring_attn_inputs = functools.partial(prepare_seq_parallel_inputs, "zigzag_ring_attn")
prepare_dist_flash_attn_inputs = functools.partial(prepare_seq_parallel_inputs, "dist_flash_attn")
prepare_ulysses_attn_inputs = functools.partial(prepare_seq_parallel_inputs, "ulysses_attn")

apply_zigzag_ring_attn_monkey_patch_llama = functools.partial(
    apply_seq_parallel_monkey_patch, "zigzag_ring_attn", "llama"
)
apply_zigzag_ring_attn_monkey_patch_mistral = functools.partial(
    apply_seq_parallel_monkey_patch, "zigzag_ring_attn", "mistral"
)
apply_dist_flash_attn_monkey_patch_llama = functools.partial(
    apply_seq_parallel_monkey_patch, "dist_flash_attn", "llama"
)
apply_ulysses_attn_monkey_patch_llama = functools.partial(apply_seq_parallel_monkey_patch, "ulysses_attn", "llama")


def prepare_usp_attn_inputs(*args: Any, **kwargs: Any) -> NoReturn:
    """Raise ValueError: usp_attn is not there yet."""
    find_mode("usp_attn")


def apply_usp_attn_monkey_patch_llama() -> NoReturn:
    """Raise ValueError: usp_attn is not there yet."""
    find_mode("usp_attn")
