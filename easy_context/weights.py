"""Are a model's weights there, whole, and of the shapes that its config asks for? Found out without loading them."""

import json
from collections.abc import Iterator
from pathlib import Path

from .errors import first_line

SINGLE_FILES = ("model.safetensors", "pytorch_model.bin")  # in the order in which Transformers looks for them
INDEX_FILES = tuple(f"{name}.index.json" for name in SINGLE_FILES)


def check_weights(name: str, config) -> None:
    """Checks the weights of a model in a local folder; a name on the hub is checked when it is loaded.

    Reads the headers of safetensors files only, which say how long a whole file is and what shapes it holds.

    Args:
        name: path or hub name.
        config: of the model.

    Raises:
        ValueError: no weights, a shard that is missing, a damaged file, or shapes that do not fit the config.
    """
    folder = Path(name)
    if not folder.is_dir():
        return
    shapes: dict[str, tuple[int, ...]] = {}
    for file in _weight_files(folder, name):
        if file.suffix == ".safetensors":
            shapes.update(_shapes_in(file, name))
    # Quantized weights are packed into other shapes.
    wanted = {} if not shapes or getattr(config, "quantization_config", None) else _shapes_wanted(config)
    for key in sorted(shapes.keys() & wanted.keys()):
        if shapes[key] != wanted[key]:
            raise ValueError(
                f"--model {name}: {key} has shape {list(shapes[key])} in the weights, but its config.json asks for "
                f"{list(wanted[key])}: config and weights are of different models"
            )


def _weight_files(folder: Path, name: str) -> list[Path]:
    for single, index in zip(SINGLE_FILES, INDEX_FILES, strict=True):
        if (folder / single).is_file():
            return [folder / single]
        if (folder / index).is_file():
            try:
                shards = sorted(set(json.loads((folder / index).read_text())["weight_map"].values()))
            except (ValueError, KeyError, TypeError, AttributeError) as reason:
                raise ValueError(f"--model {name}: {index} is damaged; save or download the model again") from reason
            missing = [shard for shard in shards if not (folder / shard).is_file()]
            if missing or not shards:
                raise ValueError(
                    f"--model {name}: {', '.join(missing) or 'every shard'} of {index} is missing; save or download "
                    "the model again"
                )
            return [folder / shard for shard in shards]
    raise ValueError(
        f"--model {name}: the folder holds no weights (model.safetensors or shards of it); save or download the model "
        "there"
    )


def _shapes_in(file: Path, name: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as opened:
            for key in opened.keys():  # noqa: SIM118, it is no dict
                yield key, tuple(opened.get_slice(key).get_shape())
    except (SafetensorError, OSError) as reason:
        raise ValueError(
            f"--model {name}: {file.name} is damaged or cut off ({first_line(reason)}); save or download it again"
        ) from reason


def _shapes_wanted(config) -> dict[str, tuple[int, ...]]:
    """Name -> shape of the model's tensors; nothing for a config that Transformers has no causal model for."""
    import torch
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except ValueError:
        return {}
    return {key: tuple(tensor.shape) for key, tensor in model.state_dict().items()}


def load_whole(name: str, config, dtype):
    """`AutoModelForCausalLM.from_pretrained`, but every failure is one line, and no tensor is left at random values.

    Args:
        name: path or hub name.
        config: of the model.
        dtype: of the weights.

    Raises:
        ValueError: the model cannot be loaded, or its weights lack a tensor that it needs.
    """
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    try:
        model, found = AutoModelForCausalLM.from_pretrained(name, config=config, dtype=dtype, output_loading_info=True)
    except (OSError, ValueError, RuntimeError, KeyError, EOFError, SafetensorError) as reason:
        if type(reason).__name__ == "OutOfMemoryError":
            raise
        raise ValueError(f"--model {name}: cannot be loaded ({first_line(reason)})") from reason
    if missing := sorted(found["missing_keys"]):
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise ValueError(
            f"--model {name}: its weights lack {', '.join(missing[:3])}{more}, which would be random; "
            "config and weights are of different models, or a file is missing"
        )
    return model
