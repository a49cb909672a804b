"""Select the trained weights: all, those matching --train-only, or peft's LoRA matrices (arXiv 2106.09685).

peft's layers replace the model's layers in place, so `model.model.layers`, `lm_head` and patches of them work as
without LoRA. Embeddings and norms are trained in place, and are saved as peft's `modules_to_save`, which
`PeftModel.from_pretrained` loads.
"""

import copy
import logging
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..common.errors import cannot_import, first_line

if TYPE_CHECKING:
    import torch

    from ..training.arguments import Arguments

logger = logging.getLogger(__name__)

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
README = "README.md"
_ADAPTER = "default"  # peft's name for the only one
_PREFIX = "base_model.model."  # of names in adapter files, as peft's own wrapper has it


def add_adapters(model: Any, args: "Arguments") -> Any:
    """Freeze the weights that the flags do not train, and add LoRA's matrices if requested.

    Call it before DeepSpeed or DDP wraps the model, and before its layers are patched.

    Args:
        model: a Hugging Face decoder.
        args: uses `lora_r`, `lora_alpha`, `lora_targets`, `train_embeddings`, `train_norms`, `train_only` and `seed`.

    Returns:
        The same model.

    Raises:
        ValueError: a name or a regular expression matches nothing, or matches something that cannot be trained alone.
    """
    if args.train_only is not None:
        _train_only(model, args.train_only)
    elif args.lora_r is not None:
        _add_lora(model, args, args.lora_r)
    else:
        return model
    trained, parameters = trained_parameters(model)
    logger.info(f"training {trained:,} of {parameters:,} parameters ({trained / parameters:.2%})")
    return model


def trained_parameters(model: "torch.nn.Module") -> tuple[int, int]:
    """Return the numbers of trained and of all parameters of the whole model, also under ZeRO-3."""
    from .weights import whole_size

    sizes = [(whole_size(p), p.requires_grad) for p in model.parameters()]
    return sum(size for size, trained in sizes if trained), sum(size for size, _ in sizes)


def _train_only(model: Any, expression: str) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(re.search(expression, name) is not None)
    if trained_parameters(model)[0] == 0:
        names = sorted({re.sub(r"\.\d+\.", ".0.", name) for name, _ in model.named_parameters()})
        raise ValueError(
            f"--train-only {expression} is found in no parameter's name: nothing would be trained. The names are "
            f"{', '.join(names)}, with the layer's number in place of 0"
        )


def _add_lora(model: Any, args: "Arguments", rank: int) -> None:
    import torch
    from peft import LoraConfig, inject_adapter_in_model

    config = LoraConfig(
        r=rank,
        lora_alpha=_alpha(args, rank),  # type: ignore[arg-type] # fractions serve as well
        target_modules=_targets(model, args.lora_targets),
        task_type="CAUSAL_LM",
        base_model_name_or_path=args.model,
    )
    torch.manual_seed(args.seed)  # all processes draw the same matrices
    inject_adapter_in_model(config, model, _ADAPTER)
    if args.train_embeddings:
        model.get_input_embeddings().weight.requires_grad_()
    for name, parameter in model.named_parameters():
        if args.train_norms and name.split(".")[-2].endswith("norm"):
            parameter.requires_grad_()


def lora_settings(args: "Arguments") -> list[Any] | None:
    """Return the LoRA settings that affect the weights, as JSON values; None without LoRA."""
    if args.lora_r is None:
        return None
    return [args.lora_r, _alpha(args, args.lora_r), args.lora_targets, args.train_embeddings, args.train_norms]


def _alpha(args: "Arguments", rank: int) -> float:
    return float(2 * rank if args.lora_alpha is None else args.lora_alpha)


def _targets(model: Any, words: list[str]) -> list[str] | str:
    """Return the adapted linear layers: full names, or peft's keyword for all but the output layer."""
    import torch

    if words == ["all-linear"]:
        return words[0]
    names = [name for name, _ in model.named_modules() if name]
    chosen: set[str] = set()
    for word in words:
        # As in peft, several words match the ends of names, and a single word that is no name is a regular expression.
        is_name = len(words) > 1 or re.fullmatch(r"[\w.]+", word)
        found = {name for name in names if (f".{name}".endswith(f".{word}") if is_name else re.fullmatch(word, name))}
        if not found:
            linear = {n: m for n, m in model.named_modules() if type(m) is torch.nn.Linear}
            kinds = sorted({n.rsplit(".", 1)[-1] for n, m in linear.items() if m is not model.get_output_embeddings()})
            raise ValueError(
                f"--lora-targets {word} fits no layer of this model: give some of {', '.join(kinds[:12])}, a regular "
                "expression that matches whole names such as model.layers.0.self_attn.q_proj, or all-linear"
            )
        chosen |= found
    for name in sorted(chosen):
        module = model.get_submodule(name)
        if not isinstance(module, torch.nn.Linear) or module is model.get_output_embeddings():
            raise ValueError(
                f"--lora-targets {' '.join(words)} takes in {name}, which is no linear layer of the decoder; "
                "--train-embeddings and --train-norms train embeddings and norms"
            )
    return list(words) if is_name else words[0]


def adapter_problems(args: "Arguments", config: Any) -> list[str]:
    """Return the problems of the flags that select the trained weights.

    Args:
        args: train.py's arguments.
        config: config of the model; None skips the checks that depend on it.
    """
    given = _given(args)
    if args.train_only is not None and given:
        return [f"--train-only {args.train_only} and {given} exclude each other: leave one side out"]
    if args.lora_r is None and given:
        return [f"{given} without --lora-r has no effect: give --lora-r, too, or leave it out"]
    expressions = {"--train-only": args.train_only}
    if len(args.lora_targets) == 1:
        expressions["--lora-targets"] = args.lora_targets[0]
    for flag, expression in expressions.items():
        try:
            re.compile(expression or "")
        except re.error as error:
            return [f"{flag} {expression} is no regular expression ({error}): correct it"]
    if args.lora_r is not None and (problem := cannot_import("peft", "peft")):
        return [f"--lora-r {args.lora_r}: {problem}"]
    if config is None:
        return []
    try:
        model_without_data(args, config)
    except ValueError as error:
        return [first_line(error)]
    return []


def _given(args: "Arguments") -> str:
    """Return the LoRA flags that differ from their defaults, as written on the command line."""
    from ..training.arguments import Arguments

    default = Arguments()
    flags = []
    for name in ("lora_r", "lora_alpha", "lora_targets", "train_embeddings", "train_norms", "merge"):
        value = getattr(args, name)
        if value != getattr(default, name):
            words = [] if value is True else value if isinstance(value, list) else [str(value)]
            flags.append(" ".join([f"--{name.replace('_', '-')}", *words]))
    return ", ".join(flags)


def model_without_data(args: "Arguments", config: Any) -> Any:
    """Return the model with the flags' adapters and frozen weights on PyTorch's meta device, which takes no memory."""
    previous = logger.level
    logger.setLevel(logging.WARNING)
    try:
        return add_adapters(_skeleton(config), args)
    finally:
        logger.setLevel(previous)


def _skeleton(config: Any) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):  # from_config would split the weights under ZeRO-3
        return AutoModelForCausalLM._model_mapping[type(config)](copy.deepcopy(config))


def trained_share(args: "Arguments", config: Any) -> float:
    """Return the fraction of the model's parameters that the flags train."""
    if args.lora_r is None and args.train_only is None:
        return 1.0
    trained, parameters = trained_parameters(model_without_data(args, config))
    return trained / parameters


def has_adapter(model: Any) -> bool:
    """Return whether `add_adapters` has put LoRA's matrices into a model."""
    return hasattr(model, "peft_config")


def save_adapter(model: Any, folder: Path, state_dict: "dict[str, torch.Tensor]") -> None:
    """Save the adapter in peft's format, the base model's config with its RoPE base, and a README on loading both.

    Args:
        model: the unwrapped model.
        folder: existing folder to write to.
        state_dict: state of the whole model, with unsharded tensors.
    """
    from peft import get_peft_model_state_dict
    from safetensors.torch import save_file

    tensors = get_peft_model_state_dict(
        model, state_dict=state_dict, adapter_name=_ADAPTER, save_embedding_layers=False
    )
    in_place = [name for name, p in model.named_parameters() if p.requires_grad and ".lora_" not in name]
    if model.config.tie_word_embeddings and "model.embed_tokens.weight" in in_place:
        in_place.append("lm_head.weight")
    tensors |= {name: state_dict[name] for name in in_place}
    config = copy.copy(model.peft_config[_ADAPTER])
    config.inference_mode = True
    if Path(config.base_model_name_or_path).is_dir():
        config.base_model_name_or_path = str(Path(config.base_model_name_or_path).resolve())
    config.modules_to_save = sorted({name.split(".")[-2] for name in in_place}) or None
    folder.mkdir(parents=True, exist_ok=True)
    # Tied weights are one tensor, which the file must hold twice.
    whole = {_PREFIX + name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    save_file(whole, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    config.save_pretrained(folder)
    model.config.save_pretrained(folder)
    (folder / README).write_text(_how_to_load(config.base_model_name_or_path))


def _how_to_load(base: str) -> str:
    return f"""---
base_model: {base}
library_name: peft
---
This folder holds an adapter. It was trained with the RoPE base of the `config.json` beside it, which its base model
must be given:
```python
from peft import PeftModel
from transformers import AutoConfig, AutoModelForCausalLM

config = AutoConfig.from_pretrained("THIS FOLDER")
base = AutoModelForCausalLM.from_pretrained("{base}", config=config)
model = PeftModel.from_pretrained(base, "THIS FOLDER")
```
`model.merge_and_unload().save_pretrained(...)` makes a plain model of it.
"""


def merged(model: Any, state_dict: "dict[str, torch.Tensor]") -> Any:
    """Return a plain model with the adapter merged into its weights.

    Args:
        model: the unwrapped model.
        state_dict: state of the whole model, with unsharded tensors. They are changed in place to save memory.
    """
    from peft import get_peft_model

    plain = _skeleton(model.config)
    plain.generation_config = model.generation_config
    wrapped = get_peft_model(plain, copy.deepcopy(model.peft_config[_ADAPTER]), autocast_adapter_dtype=False)
    plain.load_state_dict(state_dict, assign=True)
    plain.tie_weights()
    return wrapped.merge_and_unload()
