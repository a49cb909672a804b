"""The parts of the quickstart that are not tools of this repository: a tiny model, rows with needles.

    python -m examples.quickstart model --text data/haystack/emma.txt --window 64 --output-dir output/quickstart/start
    python -m examples.quickstart rows --text-rows rows/train --tokenizer output/quickstart/start --rows 1000 \
        --most-questions 3 --output-dir needle-rows

The quickstart runs these between prepare_data.py, train.py, eval_ppl.py and eval_needle.py.
"""

import argparse
import functools
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from easy_context.common.constants import IGNORE_INDEX

NEEDLE = " The secret number is {value}."
QUESTION = " The secret number is"
ANSWER = " {value}."
DIGITS = 3
VOCABULARY = 512
END_OF_TEXT = "</s>"
SEED = 0

# Attention that starts this strong finds the needle in a third of the steps that the usual 0.02 needs.
ATTENTION_STD = 0.08
PLAIN_SHARE = 0.25  # of the rows: text alone, all of it learned
FIRST_SHARE = 0.15  # of the needles: before any text, where a random place would almost never put one


def build_tokenizer(text: str) -> Any:
    """Train a byte-level BPE tokenizer whose digits stay single tokens, so that a number is copied digit by digit.

    Args:
        text: text that it learns its words from.

    Returns:
        A `PreTrainedTokenizerFast` of `VOCABULARY` tokens, without BOS.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    # The needle's words become single tokens, which leaves a short row room for text.
    tokenizer.train_from_iterator([text, *[NEEDLE] * 3000], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END_OF_TEXT)


def build_model(window: int) -> Any:
    """Make a Llama of 0.5 M parameters that knows nothing yet.

    Args:
        window: tokens of the rows that it will be trained on first.

    Returns:
        A float32 `LlamaForCausalLM`: 2 layers, 4 heads of 32, untied embeddings.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(SEED)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=window,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=0,
    )
    model = LlamaForCausalLM(config)
    for layer in model.model.layers:
        attention = layer.self_attn
        for projection in (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj):
            torch.nn.init.normal_(projection.weight, std=ATTENTION_STD)
    # Equal at the start, free to part: writing a token that attention has found needs nothing more than to pass it on.
    with torch.no_grad():
        model.lm_head.weight.copy_(model.model.embed_tokens.weight)
    return model


def needle_row(
    rng: random.Random, text: Sequence[int], encode: Callable[[str], list[int]], questions: int
) -> dict[str, list[int]]:
    """Hide a number in a row of text and ask for it, behind more and more text and at the end of the row.

    Only the answers are learned: the number itself cannot be predicted, and text rows teach text.

    Args:
        rng: decides number and places.
        text: token ids of a row; its end makes room.
        encode: text to token ids.
        questions: how often the number is asked for.

    Returns:
        "input_ids" and "labels", each as long as `text`.

    Raises:
        ValueError: the row is too short.
    """
    value = str(rng.randrange(10 ** (DIGITS - 1), 10**DIGITS))
    needle, question, answer = (encode(part.format(value=value)) for part in (NEEDLE, QUESTION, ANSWER))
    room = len(text) - len(needle) - questions * (len(question) + len(answer))
    if room < 0:
        raise ValueError(
            f"--most-questions {questions}: needle and questions are {-room} tokens longer than a row of {len(text)}; "
            "ask fewer or use longer rows"
        )
    places = sorted(rng.randint(0, room) for _ in range(questions))
    if rng.random() < FIRST_SHARE:
        places[0] = 0
    pieces: list[tuple[list[int], list[int]]] = [(needle, [])] + [(question, answer)] * questions
    ids, labels, done = [], [], 0
    for place, (given, learned) in zip([*places, room], pieces, strict=True):
        ids += [*text[done:place], *given, *learned]
        labels += [IGNORE_INDEX] * (place - done + len(given)) + learned
        done = place
    return {"input_ids": ids, "labels": labels}


def make_rows(
    text_rows: Sequence[Sequence[int]], encode: Callable[[str], list[int]], count: int, most_questions: int
) -> list[dict[str, list[int]]]:
    """Mix rows of plain text with rows that hide a needle in it.

    Args:
        text_rows: token ids, all rows of one length; used again where they are too few, always with another number.
        encode: text to token ids.
        count: rows to make.
        most_questions: a needle is asked for 1 to this many times.

    Returns:
        `count` rows of "input_ids" and "labels".
    """
    rng = random.Random(SEED)
    rows = []
    for index in range(count):
        text = list(text_rows[index % len(text_rows)])
        if rng.random() < PLAIN_SHARE:
            rows.append({"input_ids": text, "labels": text})
        else:
            rows.append(needle_row(rng, text, encode, rng.randint(1, most_questions)))
    return rows


def write_model(args: argparse.Namespace) -> None:
    """Write the tokenizer and the model that training starts from."""
    tokenizer = build_tokenizer(args.text.read_text(encoding="utf-8"))
    model = build_model(args.window)
    tokenizer.save_pretrained(args.output_dir)
    model.save_pretrained(args.output_dir)
    print(f"a Llama with {model.num_parameters():,} random parameters and {len(tokenizer)} tokens: {args.output_dir}")


def write_rows(args: argparse.Namespace) -> None:
    """Write rows with needles, and print one."""
    from datasets import Dataset, load_from_disk
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    text_rows = load_from_disk(str(args.text_rows))["input_ids"][:]
    encode = functools.partial(tokenizer.encode, add_special_tokens=False)
    rows = make_rows(text_rows, encode, args.rows, args.most_questions)
    Dataset.from_list(rows).save_to_disk(args.output_dir)
    example = next(row["input_ids"] for row in rows if IGNORE_INDEX in row["labels"])
    print(f"{len(rows)} rows of {len(example)} tokens: {args.output_dir}; one of them:\n{tokenizer.decode(example)!r}")


def _count(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return int(text)


def main(arguments: list[str] | None = None) -> None:
    """Run one part."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parts = parser.add_subparsers(required=True)
    model = parts.add_parser("model", help="make a tokenizer and a model")
    model.add_argument("--text", type=Path, required=True, help="text file that the tokenizer learns its words from")
    model.add_argument("--window", type=_count, required=True, help="tokens of the first stage's rows")
    model.set_defaults(run=write_model)
    rows = parts.add_parser("rows", help="hide needles in rows of text")
    rows.add_argument("--text-rows", type=Path, required=True, help="folder of rows written by prepare_data.py")
    rows.add_argument("--tokenizer", required=True, help="folder of the model")
    rows.add_argument("--rows", type=_count, required=True, help="rows to write")
    rows.add_argument("--most-questions", type=_count, required=True, help="a number is asked for 1 to this many times")
    rows.set_defaults(run=write_rows)
    for part in (model, rows):
        part.add_argument("--output-dir", required=True, help="folder to write")
    args = parser.parse_args(arguments)
    args.run(args)


if __name__ == "__main__":
    main()
