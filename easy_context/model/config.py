"""Load a model's config, raise its base of rotary position embeddings (RoPE), and check its limitations."""

import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..common.errors import first_line, name_flags

if TYPE_CHECKING:
    import torch

_COMPUTED_FROM_WINDOW = ("dynamic", "longrope")


def load_config(name: str) -> Any:
    """Load a model's Hugging Face config from a folder or the hub; no weights are read.

    Args:
        name: path or hub name; error messages refer to it as `--model`.

    Raises:
        ValueError: the folder does not exist, or has no config that Transformers can load.
    """
    from transformers import AutoConfig

    folder = Path(name)
    if not folder.is_dir() and (folder.exists() or name.startswith(("/", ".", "~")) or name.count("/") > 1):
        raise ValueError(f"--model {name}: no such folder; give a hub name or the folder of a saved model")
    if (folder / "adapter_config.json").is_file():
        raise ValueError(
            f"--model {name} holds an adapter, not a whole model: merge it into its base as docs/training.md shows "
            "(LoRA), or train it with --merge"
        )
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise ValueError(f"--model {name} holds no config.json: give the folder of a saved model, or a hub name")
    try:
        return AutoConfig.from_pretrained(name, trust_remote_code=False)  # else it may ask, and wait
    except Exception as error:  # a damaged config raises what its reader chose
        raise ValueError(
            f"--model {name} has no config that loads ({first_line(error)}): give a hub name or a model's folder"
        ) from error


def is_rope_base(theta: float) -> bool:
    """Return whether this is a valid base for rotary embeddings (arXiv 2104.09864)."""
    return math.isfinite(theta) and theta > 0


def set_rope_theta(config: Any, theta: float | None, seq_length: int | None) -> None:
    """Set the RoPE base in a config so that it applies to the model built from it, and is saved and reloaded.

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


def model_problems(
    name: str,
    config: Any,
    *,
    mode: str,
    kernel: str,
    size: int,
    seq_length: int,
    device: "torch.device | None",
    dtype: "torch.dtype",
    engine: str = "easy_context",
    ring_degree: int | None = None,
    documents: bool = False,
) -> Iterator[str]:
    """Yield each reason why a model cannot run on split rows, in terms of the command line's flags.

    Args:
        name: path or hub name, for messages that name no other flag.
        config: config of the model; it is not changed.
        mode: the parallel mode.
        kernel: attention kernel, or "auto".
        size: number of processes that share a row.
        seq_length: number of tokens in the longest whole row.
        device: device of this process; None skips the checks of the kernel and its packages.
        dtype: dtype of the activations.
        engine: engine that computes the mode.
        ring_degree: number of processes in a ring of usp_attn; None for the mode's choice.
        documents: whether rows are packed and attention stays within their documents.
    """
    from ..huggingface import head_dim, layer_windows, modeling_module, refuse_model_features
    from ..mesh import Mesh
    from ..modes import build_mode, find_mode

    def check_split() -> None:
        rings = find_mode(mode).ring_degree(ring_degree, size, config.num_attention_heads)
        build_mode(mode, Mesh(sequence_size=size, ring_degree=rings)).check(config, seq_length)

    def check_window() -> None:
        windows = [window for window in layer_windows(config) if window is not None and window < seq_length]
        find_mode(mode, engine).check_window(min(windows, default=None))

    def check_attention() -> None:
        if device is None:
            return
        mode_class = find_mode(mode, engine)
        mode_class.check_kernel(kernel, device, dtype, head_dim(config), documents)
        mode_class.over(Mesh())  # imports the engine's library, only where it could run

    try:
        modeling_module(config.model_type)
    except ValueError as error:  # the config of another family may lack what the other checks read
        yield f"--model {name}: {error}"
        return
    checks = [
        check_split,
        lambda: refuse_model_features(config, size),
        check_window,
        check_attention,
    ]
    yield from problems_of(name, checks)


def problems_of(name: str, checks: Iterable[Callable[[], Any]]) -> Iterator[str]:
    """Call each of `checks` and yield the message of each ValueError, with the flags of the command line in it.

    Args:
        name: the model's path or hub name, put before messages that begin with no flag.
        checks: functions that raise ValueError.
    """
    for check in checks:
        try:
            check()
        except ValueError as error:
            problem = name_flags(str(error))
            yield problem if problem.startswith("--") else f"--model {name}: {problem}"
