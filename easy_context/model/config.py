"""The base of rotary position embeddings (RoPE, arXiv 2104.09864), raised to stretch the context."""

import math
from typing import Any

_COMPUTED_FROM_WINDOW = ("dynamic", "longrope")


def is_rope_base(theta: float) -> bool:
    """Whether rotary embeddings can have this base."""
    return math.isfinite(theta) and theta > 0


def set_rope_theta(config: Any, theta: float | None, seq_length: int | None) -> None:
    """Set the RoPE base in a config so that it holds in the model built from it, in what is saved, and in a reload.

    Other scaling (`rope_type` and its parameters) is kept.

    Args:
        config: a Hugging Face config with `rope_parameters`; changed in place.
        theta: the new base; None keeps the model's.
        seq_length: `max_position_embeddings` is raised to this many tokens if it is smaller; None keeps it.

    Raises:
        ValueError: theta is not positive and finite, the config has a base for each layer type, or raising the window
            would change the scaling.
    """
    if theta is not None:
        if not is_rope_base(theta):
            raise ValueError(f"rope_theta {theta} must be positive and finite")
        parameters = config.rope_parameters
        if "rope_theta" not in parameters:
            raise ValueError(f"rope_theta cannot be set: {config.model_type} has RoPE parameters {sorted(parameters)}")
        parameters["rope_theta"] = float(theta)
    if seq_length is not None and seq_length > config.max_position_embeddings:
        rope_type = config.rope_parameters.get("rope_type", "default")
        if rope_type in _COMPUTED_FROM_WINDOW:
            raise ValueError(
                f"rope_type {rope_type!r} computes its scaling from max_position_embeddings, "
                f"{config.max_position_embeddings}, which cannot be raised without changing it: use a seq_length of "
                "at most that, or rope_type default, linear, llama3 or yarn in the model's config.json"
            )
        config.max_position_embeddings = seq_length
