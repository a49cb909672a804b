"""Tiny random models for the evaluation tests, in memory or saved with a byte-level tokenizer."""

from pathlib import Path

from family_models import family_model
from tokenizer_styles import tokenizer_of_style
from transformers import LlamaForCausalLM

VOCABULARY = 258  # of the byte-level tokenizer


def tiny_llama(seed: int = 0, attn_implementation: str = "sdpa", **overrides) -> LlamaForCausalLM:
    """Two layers, four heads on two key-value heads, float32; logits spread enough to have clear winners."""
    settings = {"vocab_size": VOCABULARY, "intermediate_size": 64, "initializer_range": 0.3, **overrides}
    return family_model("llama", attn_implementation, seed, **settings).eval()


def save_tiny_llama(folder: Path, seed: int = 0) -> str:
    """Save a model and its tokenizer as `from_pretrained` wants them, and return the folder's name."""
    tiny_llama(seed).save_pretrained(folder)
    tokenizer_of_style("bytes").save_pretrained(folder)
    return str(folder)
