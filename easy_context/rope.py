"""The base of rotary position embeddings (RoPE, arXiv 2104.09864), raised to stretch the context."""

from typing import Any


def set_rope_theta(config: Any, theta: float | None, seq_length: int | None) -> None:
    """Set the RoPE base in a config so that it holds in the model built from it, in what is saved, and in a reload.

    Other scaling (`rope_type` and its parameters) is kept.

    Args:
        config: a Hugging Face config with `rope_parameters`; changed in place.
        theta: the new base; None keeps the model's.
        seq_length: `max_position_embeddings` is raised to this many tokens if it is smaller; None keeps it.

    Raises:
        ValueError: theta is not positive, or the config has a base for each layer type.
    """
    if theta is not None:
        if theta <= 0:
            raise ValueError(f"--rope-theta {theta} must be positive")
        parameters = config.rope_parameters
        if "rope_theta" not in parameters:
            raise ValueError(
                f"--rope-theta cannot be set: {config.model_type} has RoPE parameters {sorted(parameters)}"
            )
        parameters["rope_theta"] = float(theta)
    if seq_length is not None:
        config.max_position_embeddings = max(config.max_position_embeddings, seq_length)
