"""Make an unmodified Hugging Face decoder call our attention by rebinding names in its modeling module.

A layer finds attention, and the model builds masks, through names in `transformers.models.<type>.modeling_<type>`, and
every model looks its loss up in the family's base class. Rebinding them there reaches models loaded before or after,
with any attn_implementation, and no S x S mask is built.
"""

import importlib
from collections.abc import Callable
from typing import Any

import torch
from transformers.modeling_utils import AttentionInterface, PreTrainedModel

SUPPORTED_MODELS = ("llama", "mistral", "qwen2", "qwen3")
ANY_MODE = "easy_context"  # the attn_implementation that stands for whichever mode is applied
# A layer passes these to its attention function; other values than the neutral one change what is computed.
_NEUTRAL = {"softcap": None, "s_aux": None, "head_mask": None, "is_causal": True}


class _OneAttentionFunction:
    """Stands in for ALL_ATTENTION_FUNCTIONS: whatever implementation is asked for, ours is given."""

    def __init__(self, function: Callable) -> None:
        self._function = function

    def get_interface(self, attn_implementation: str, default: Callable) -> Callable:
        return self._function

    def __getitem__(self, attn_implementation: str) -> Callable:
        return self._function


def modeling_module(model_type: str) -> Any:
    """Return the module whose names are rebound.

    Raises:
        ValueError: the model family is not supported.
    """
    if model_type not in SUPPORTED_MODELS:
        raise ValueError(
            f"model type {model_type!r} is not supported: sequence-parallel attention is tested for "
            f"{', '.join(SUPPORTED_MODELS)}"
        )
    return importlib.import_module(f"transformers.models.{model_type}.modeling_{model_type}")


def head_dim(config: Any) -> int:
    """Return the width of an attention head, which is missing in some configs."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def layer_windows(config: Any) -> list[int | None]:
    """Return each layer's window: the number of keys that a query attends to, including its own; None without one."""
    window = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    return [window if each == "sliding_attention" else None for each in types]


def rebind(
    model_type: str, name: str, attention: Callable, create_mask: Callable, wrap_loss: Callable
) -> Callable[[], None]:
    """Rebind one family's attention and masks, and wrap its losses.

    The rebinding works with any attn_implementation. `attention` is also registered as attn_implementation ANY_MODE and
    `name`. transformers mistakes a name with "flash" in it, such as dist_flash_attn, for a FlashAttention package, so
    such a mode can be loaded only as ANY_MODE.

    Returns:
        A function that restores everything.
    """
    module = modeling_module(model_type)
    replacements = {
        "ALL_ATTENTION_FUNCTIONS": _OneAttentionFunction(attention),
        "eager_attention_forward": attention,
        "create_causal_mask": create_mask,
        "create_sliding_window_causal_mask": create_mask,
    }
    originals = {key: getattr(module, key) for key in replacements if hasattr(module, key)}
    for key in originals:
        setattr(module, key, replacements[key])
    # The loss of every head (causal, classification, ...) is looked up through this property of their common base.
    base, of_any_model = _base_class(module), PreTrainedModel.loss_function
    base.loss_function = property(lambda model: wrap_loss(of_any_model.fget(model)), of_any_model.fset)
    registered_before = {key: AttentionInterface._global_mapping.get(key) for key in (ANY_MODE, name)}
    for key in registered_before:
        AttentionInterface.register(key, attention)

    def restore() -> None:
        for key, value in originals.items():
            setattr(module, key, value)
        del base.loss_function
        for key, earlier in registered_before.items():
            if earlier is None:
                AttentionInterface._global_mapping.pop(key, None)
            else:
                AttentionInterface.register(key, earlier)

    return restore


def _base_class(module: Any) -> type[PreTrainedModel]:
    """Return the class from which all models of a family's modeling module derive."""
    return next(
        value
        for name, value in vars(module).items()
        if name.endswith("PreTrainedModel") and value is not PreTrainedModel and issubclass(value, PreTrainedModel)
    )


def refuse_cache(cache: Any, tokens: int) -> None:
    """Raise ValueError if earlier tokens are cached: each rank would cache only its shard."""
    if cache is not None and cache.get_seq_length() > 0:
        raise ValueError(
            f"a key-value cache of {cache.get_seq_length()} tokens before {tokens} new ones cannot be honoured: give "
            "the whole row in one forward pass, or generate after remove_seq_parallel_monkey_patch()"
        )


def refuse_padding_mask(attention_mask: torch.Tensor | None) -> None:
    """Raise ValueError for a mask that hides anything: only plain causal attention is computed."""
    if attention_mask is None:
        return
    if attention_mask.dim() != 2 or not bool(attention_mask.bool().all()):
        raise ValueError(
            f"attention_mask of shape {tuple(attention_mask.shape)} hides tokens, which cannot be honoured: pad on the "
            "right, set the padding's targets to -100 and pass no attention_mask"
        )


def refuse_model_features(config: Any, size: int) -> None:
    """Raise ValueError for a feature of the model that would be computed wrongly where `size` ranks share a row."""
    rope_type = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if size > 1 and rope_type in ("dynamic", "longrope"):
        raise ValueError(
            f"rope_type {rope_type!r} looks at the longest position of the batch, and each of the {size} ranks sees "
            "only its shard: use rope_type default, linear, llama3 or yarn and raise rope_theta"
        )


def refuse_layer_features(module: Any, dropout: float, options: dict[str, Any]) -> None:
    """Raise ValueError for what a layer asks of its attention function that ours does not compute."""
    if dropout:
        raise ValueError(f"attention dropout {dropout} cannot be honoured: set config.attention_dropout = 0")
    for key in ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx"):
        if options.get(key) is not None:
            raise ValueError(
                f"{key} cannot be honoured on split rows: give prepare_seq_parallel_inputs documents=, where those of "
                "whole rows start, and pass what it returns to the model as documents="
            )
    for key, neutral in _NEUTRAL.items():
        value = options.get(key, neutral)
        if value is not None and value != neutral:
            raise ValueError(f"{key}={value} of {type(module).__name__} cannot be honoured by exact causal attention")
    if not getattr(module, "is_causal", True):
        raise ValueError(f"{type(module).__name__} is not causal; only causal attention is computed")
