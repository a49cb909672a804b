"""Check by their headers that weight files are complete and fit the config, and load models without missing tensors."""

import contextlib
import copy
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ..common.errors import first_line
from ..common.notes import say_once

SINGLE_FILES = ("model.safetensors", "pytorch_model.bin")  # in the order in which Transformers looks for them
INDEX_FILES = tuple(f"{name}.index.json" for name in SINGLE_FILES)


def whole_size(parameter: Any) -> int:
    """Return the number of elements of a whole parameter, even if ZeRO-3 shards it."""
    return getattr(parameter, "ds_numel", parameter.numel())


def check_weights(name: str, config: Any) -> None:
    """Check the weights of a model in a local folder; a name on the hub is checked when it is loaded.

    Only the files' headers are read. They contain the length of the complete file and the names and shapes of its
    tensors. Transformers itself matches these with the model, so that tied, renamed and ignored tensors are handled.

    Args:
        name: path or hub name.
        config: config of the model.

    Raises:
        ValueError: there are no weights, a shard is missing, a file is damaged, no model can be built from the config,
            the files lack a tensor that the model needs, or shapes do not fit the config.
    """
    folder = Path(name)
    if not folder.is_dir():
        return
    headers = _headers(folder, name)
    try:
        found = None if headers is None else _load_without_data(config, headers)
    except Exception as reason:  # a config that makes no sense fails wherever its model's class first reads it
        raise ValueError(
            f"--model {name}: no model can be built from its config.json ({first_line(reason)})"
        ) from reason
    if found is None:
        return
    for key, shape, wanted in sorted(found["mismatched_keys"]):
        raise ValueError(
            f"--model {name}: {key} has shape {list(shape)} in the weights, but its config.json asks for "
            f"{list(wanted)}: config and weights are of different models"
        )
    _refuse_missing(name, found)
    _say_unexpected(name, found)


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


def _headers(folder: Path, name: str) -> dict[str, torch.Tensor] | None:
    """Return a dict from name to tensor without data for all weight files; None for pickles, which have no header."""
    headers: dict[str, torch.Tensor] = {}
    for file in _weight_files(folder, name):
        if file.suffix != ".safetensors":
            return None
        try:
            with safe_open(file, framework="pt") as opened:
                for key in opened.keys():  # noqa: SIM118, it is no dict
                    headers[key] = torch.empty(opened.get_slice(key).get_shape(), device="meta")
        except (SafetensorError, OSError) as reason:
            raise ValueError(
                f"--model {name}: {file.name} is damaged or cut off ({first_line(reason)}); save or download it again"
            ) from reason
    return headers


def _load_without_data(config: Any, headers: dict[str, torch.Tensor]) -> dict[str, Any] | None:
    """Return what Transformers finds missing, unexpected or misshapen when it loads tensors of these names and shapes.

    None for quantised weights, which are packed into other shapes, and for a config that has no causal model.
    """
    from transformers import AutoModelForCausalLM

    if getattr(config, "quantization_config", None) or type(config) not in AutoModelForCausalLM._model_mapping:
        return None
    model_class = AutoModelForCausalLM._model_mapping[type(config)]
    with _quiet_transformers(progress_bars=False):
        _, found = model_class.from_pretrained(
            None,
            config=copy.deepcopy(config),
            state_dict=headers,
            device_map="meta",
            ignore_mismatched_sizes=True,  # they are listed instead
            output_loading_info=True,
        )
    return found


@contextlib.contextmanager
def _quiet_transformers(progress_bars: bool) -> Iterator[None]:
    """Silence Transformers' table of missing and unexpected tensors; this module reports them in one line."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    if not progress_bars:
        logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars and not progress_bars:
            logging.enable_progress_bar()


def _refuse_missing(name: str, found: dict[str, Any]) -> None:
    if missing := found["missing_keys"]:
        raise ValueError(
            f"--model {name}: its weights lack {_some_of(missing)}, which would be random; config and weights are of "
            "different models, or a file is missing" + _hint_of_prefix(missing, found["unexpected_keys"])
        )


def _some_of(keys: Iterable[str]) -> str:
    keys = sorted(keys)
    return ", ".join(keys[:3]) + (f" and {len(keys) - 3} more" if len(keys) > 3 else "")


def _hint_of_prefix(missing: Iterable[str], unexpected: Iterable[str]) -> str:
    """Return a hint if a wrapper (torch.compile, DDP, PEFT) has saved every tensor under a prefix of its own."""
    missing = set(missing)
    for key in sorted(unexpected):
        for wanted in missing:
            if key.endswith(f".{wanted}"):
                return f". The weights hold {key}: save them again without the prefix {key.removesuffix(wanted)}"
    return ""


def load_whole(name: str, config: Any, dtype: torch.dtype) -> Any:
    """Call `AutoModelForCausalLM.from_pretrained`; report failures in one line, and leave no tensor at random values.

    Tensors that the model does not use are named in one line of the log.

    Args:
        name: path or hub name.
        config: config of the model.
        dtype: dtype of the weights.

    Raises:
        ValueError: the model cannot be loaded, or its weights lack a tensor that it needs.
    """
    from transformers import AutoModelForCausalLM

    try:
        with _quiet_transformers(progress_bars=True):
            model, found = AutoModelForCausalLM.from_pretrained(
                name, config=config, dtype=dtype, output_loading_info=True, trust_remote_code=False
            )
    except (OSError, ValueError, RuntimeError, KeyError, EOFError, SafetensorError, UnpicklingError) as reason:
        if type(reason).__name__ == "OutOfMemoryError":
            raise
        raise ValueError(f"--model {name}: cannot be loaded ({first_line(reason)})") from reason
    _refuse_missing(name, found)
    _say_unexpected(name, found)
    return model


def _say_unexpected(name: str, found: dict[str, Any]) -> None:
    if found["unexpected_keys"]:
        say_once(
            f"--model {name}: its weights also hold {_some_of(found['unexpected_keys'])}, for which this model has "
            "no place; they are not used"
        )
