"""Tiny random models for the evaluation tests, in memory or saved with a byte-level tokenizer."""

from pathlib import Path

import torch
from tokenizer_styles import tokenizer_of_style
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY = 258  # of the byte-level tokenizer


def tiny_llama(seed: int = 0, **overrides) -> LlamaForCausalLM:
    """Two layers, four heads on two key-value heads, fp32; logits spread enough to have clear winners."""
    torch.manual_seed(seed)
    settings = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.3,
    }
    return LlamaForCausalLM(LlamaConfig(**{**settings, **overrides})).eval()


def save_tiny_llama(folder: Path, seed: int = 0) -> str:
    """A folder as `from_pretrained` wants it; returns its name."""
    tiny_llama(seed).save_pretrained(folder)
    tokenizer_of_style("bytes").save_pretrained(folder)
    return str(folder)
