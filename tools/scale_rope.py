"""Copy a checkpoint with rescaled rotary position embeddings (RoPE), as the starting point of a longer context.

    python tools/scale_rope.py HuggingFaceTB/SmolLM2-135M-Instruct models/start --type llama3 --factor 16

`train.py --rope-theta` raises the base, which turns every frequency a little and costs a small model some of its short
context until it has trained for a while. Two types here leave the fast frequencies, which carry the near context, as
they are, slow those fully whose period is longer than what the model was trained on, and those between in part:
`llama3` as Llama 3.1 does, and `yarn`, which also sharpens attention (https://arxiv.org/abs/2309.00071), by
0.1 ln(factor) + 1 or what `--attention-factor` says; 1 leaves it as it was. `linear` slows all
alike. train.py keeps what it finds in the config.
"""

import argparse
import sys
from pathlib import Path

TYPES = ("llama3", "yarn", "linear")


def rope_parameters(
    kind: str, factor: float, theta: float, window: int, attention_factor: float | None = None
) -> dict[str, float | int | str]:
    """Return the `rope_parameters` of a Hugging Face config.

    Args:
        kind: one of `TYPES`.
        factor: the new window over the old one.
        theta: RoPE base, not changed.
        window: tokens that the model was trained on.
        attention_factor: of yarn, on queries and keys each; None for its formula.
    """
    parameters = {"rope_type": kind, "rope_theta": theta, "factor": factor}
    if kind in ("llama3", "yarn"):
        parameters["original_max_position_embeddings"] = window
    if kind == "llama3":
        parameters |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    if attention_factor is not None:
        parameters["attention_factor"] = attention_factor
    return parameters


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse and check the command line.

    Raises:
        ValueError: a factor that does not lengthen the window, an attention factor that has no use, or an output folder
            that exists.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("model", help="folder or hub name of a model with plain RoPE")
    parser.add_argument("output", type=Path, help="folder for the copy")
    parser.add_argument("--type", choices=TYPES, default="llama3", help="kind of scaling (llama3)")
    parser.add_argument("--factor", type=float, required=True, help="new window over old window, such as 16")
    parser.add_argument("--attention-factor", type=float, help="of yarn; default 0.1 ln(factor) + 1")
    options = parser.parse_args(arguments)
    if not 1 < options.factor < float("inf"):
        raise ValueError(f"--factor {options.factor}: must be above 1, the new window over the old one")
    if options.output.exists():
        raise ValueError(f"output: {options.output} is there already: name another folder, or remove it")
    if options.attention_factor is not None and options.type != "yarn":
        raise ValueError(f"--attention-factor {options.attention_factor}: only --type yarn has one, not {options.type}")
    if options.attention_factor is not None and not 0 < options.attention_factor < float("inf"):
        raise ValueError(f"--attention-factor {options.attention_factor}: must be positive, such as 1")
    return options


def main(arguments: list[str] | None = None) -> None:
    """Load, set the scaling, save model and tokenizer.

    Raises:
        ValueError: the model has no plain RoPE.
        OSError: no model or tokenizer there.
    """
    options = parse_arguments(arguments)

    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    config = AutoConfig.from_pretrained(options.model)
    if "rope_theta" not in (getattr(config, "rope_parameters", None) or {}):
        raise ValueError(f"{options.model}: a {config.model_type} model has no rotary embeddings of one base to scale")
    kind = config.rope_parameters.get("rope_type", "default")
    if kind != "default":
        raise ValueError(f"{options.model}: its RoPE is of type {kind!r} already, plain RoPE is needed")
    window = config.max_position_embeddings
    theta = config.rope_parameters["rope_theta"]
    config.rope_parameters = rope_parameters(options.type, options.factor, theta, window, options.attention_factor)
    config.max_position_embeddings = int(window * options.factor)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model, config=config, dtype="auto")
    partial = options.output.with_name(options.output.name + ".partial")  # renamed when it is whole
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    partial.rename(options.output)
    print(
        f"{options.output}: RoPE {config.rope_parameters}, window {window} -> {config.max_position_embeddings} tokens"
    )


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError) as error:
        sys.exit(f"scale_rope.py: {error}")
