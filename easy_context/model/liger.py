"""Liger's fused RMSNorm, RoPE and SwiGLU (arXiv 2410.10989) for models built afterwards."""

import functools
import logging
from typing import Any

import torch

from ..common.errors import cannot_import
from ..huggingface import modeling_module


@functools.cache
def liger_unavailable() -> str | None:
    """Return why liger-kernel cannot be used on this machine, or None if it can."""
    if not torch.cuda.is_available():
        return "there is no CUDA device"
    logging.getLogger("liger_kernel").setLevel(logging.ERROR)  # it warns of every backend that is not this machine's
    return cannot_import("liger_kernel.transformers.monkey_patch", "liger-kernel")


def liger_refusal(config: Any) -> str | None:
    """Return what Liger's layers would silently drop from a model of this config, or None."""
    if getattr(config, "mlp_bias", False):
        return "Liger's SwiGLU has no bias, but this model has mlp_bias=True"
    if config.hidden_act not in ("silu", "swish"):
        return f"Liger's SwiGLU uses silu, but this model has hidden_act={config.hidden_act!r}"
    return None


def choose_liger(requested: bool | None, config: Any) -> bool:
    """Return whether to use Liger's layers and loss.

    Args:
        requested: True for `--liger`, False for `--no-liger`, None to use them if possible.
        config: config of the model.

    Raises:
        ValueError: they are requested but cannot be used; the message says why.
    """
    refusal = liger_unavailable() or liger_refusal(config)
    if requested and refusal:
        raise ValueError(f"--liger: {refusal}; use --no-liger")
    return refusal is None if requested is None else requested


def apply_liger(config: Any) -> None:
    """Make models of this family that are built later use Liger's layers; `apply_fused_loss` handles the loss.

    Args:
        config: config of the model to build.

    Raises:
        ValueError: `liger_unavailable` gives a reason, the family is not supported, or `liger_refusal` gives a reason.
    """
    if reason := liger_unavailable():
        raise ValueError(f"Liger's layers cannot be used: {reason}")
    if refusal := liger_refusal(config):
        raise ValueError(refusal)
    modeling_module(config.model_type)
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    MODEL_TYPE_TO_APPLY_LIGER_FN[config.model_type](
        rope=True, rms_norm=True, swiglu=True, cross_entropy=False, fused_linear_cross_entropy=False
    )
