"""Model FLOPs of a token, and the peak of a device, for model FLOPs utilisation (MFU)."""

import re
from typing import Any

import torch

from ..huggingface import head_dim, layer_windows
from ..model.weights import whole_size

# Dense bf16 peak in FLOP/s, from the vendors' datasheets; matched against torch.cuda.get_device_name().
PEAK_FLOPS = {
    "B200": 2250e12,
    "GH200": 989e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H800": 989e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
    "A40": 150e12,
    "A6000": 155e12,
    "4090": 165e12,
    "3090": 71e12,
}


def flops_per_token(config: Any, parameters: int, seq_length: float, trained: float | None = None) -> float:
    """Return the model FLOPs to train on one token, forward and backward, without recomputation.

    Each weight of a matrix product counts six FLOPs. A frozen weight counts four, because it has no gradient of its
    own. (This is too high below the first trained layer, which needs no backward at all.) Attention is causal, so a
    query attends to half of the row's keys on average (the convention of arXiv 2204.02311, appendix B, halved). In a
    layer with a sliding window, only keys within the window count.

    Args:
        config: config of the model.
        parameters: number of all weights. The input embedding is subtracted unless it is also the output layer.
        seq_length: tokens of a row; for rows of several lengths, the mean over all tokens of the length of their row,
            or of their document if attention stays within documents.
        trained: number of trained weights in matrix products; all if None.
    """
    embedding = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
    keys = sum(mean_keys(seq_length, window) for window in layer_windows(config))
    multiplying = parameters - embedding
    products = 4 * multiplying + 2 * (multiplying if trained is None else trained)
    return products + 12 * config.num_attention_heads * head_dim(config) * keys


def mean_keys(seq_length: float, window: int | None) -> float:
    """Return the mean number of keys that a query attends to; a window excludes the triangle of earlier keys."""
    beyond = 0 if window is None else max(seq_length - window, 0)
    return (seq_length**2 - beyond**2) / (2 * seq_length)


def count_parameters(model: torch.nn.Module) -> int:
    """Return the number of weights of the whole model, also under ZeRO-3, where each process holds a part."""
    return sum(map(whole_size, model.parameters()))


def count_trained(model: torch.nn.Module, config: Any) -> int:
    """Return the number of trained weights that multiply: an input embedding counts only if it is the output, too."""
    looked_up = () if getattr(config, "tie_word_embeddings", False) else ("embed_tokens.weight",)
    return sum(
        whole_size(p) for name, p in model.named_parameters() if p.requires_grad and not name.endswith(looked_up)
    )


def peak_flops(device: torch.device) -> float | None:
    """Return the device's dense bf16 peak in FLOP/s; None for a device that is not in PEAK_FLOPS."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    if "Laptop" in name:  # slower than the card of the same number
        return None
    return next((flops for known, flops in PEAK_FLOPS.items() if re.search(rf"{known}\b", name)), None)
