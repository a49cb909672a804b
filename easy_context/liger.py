"""Liger's fused RMSNorm, RoPE and SwiGLU (arXiv 2410.10989) for models built afterwards."""

import importlib.util
from typing import Any

import torch

from .huggingface import modeling_module


def liger_available() -> bool:
    """Whether liger-kernel is installed and there is a CUDA device for it."""
    return torch.cuda.is_available() and importlib.util.find_spec("liger_kernel") is not None


def apply_liger(config: Any) -> None:
    """Make models of this family that are built afterwards use Liger's layers. The loss is `apply_fused_loss`'s affair.

    Args:
        config: of the model to build.

    Raises:
        ValueError: liger-kernel or CUDA is missing, or the model has what Liger's layers would drop.
    """
    if not liger_available():
        raise ValueError(
            "--liger needs a CUDA device and the package liger-kernel: pip install liger-kernel, or --no-liger"
        )
    if getattr(config, "mlp_bias", False) or config.hidden_act not in ("silu", "swish"):
        raise ValueError(
            f"--liger: Liger's SwiGLU has no bias and uses silu, but this model has mlp_bias="
            f"{getattr(config, 'mlp_bias', False)} and hidden_act={config.hidden_act!r}; use --no-liger"
        )
    modeling_module(config.model_type)
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    MODEL_TYPE_TO_APPLY_LIGER_FN[config.model_type](
        rope=True, rms_norm=True, swiglu=True, cross_entropy=False, fused_linear_cross_entropy=False
    )
