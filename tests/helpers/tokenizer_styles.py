"""Tokenizers of the styles that models in use have: small ones trained here on the repository's own text, and one real.

They differ in what the evaluations must not depend on: BOS or none, a dummy leading space, digits alone, by three or
merged, tokens that span a full stop and a line break, positions reported or not.
"""

import functools
import shutil
import tempfile
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import ByT5Tokenizer, LlamaTokenizer, PreTrainedTokenizerFast

TEXT_FILE = Path(__file__).parents[2] / "data" / "haystack" / "persuasion.txt"
VOCABULARY = 1500
STYLES = ("llama2", "mistral", "llama3", "qwen", "smollm2", "bytes", "unpositioned")
STYLES_WITH_BOS = ("llama2", "mistral", "llama3")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] | trim }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHAT_TOKENS = ["<|im_start|>", "<|im_end|>"]
# Published patterns: runs of one to three digits (Llama 3), single digits (Qwen 2).
SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@functools.cache
def text() -> str:
    """Some 100,000 characters of prose with numbers in it, so that digits can merge where the style allows it."""
    numbers = " ".join(str(n * 7919) for n in range(1, 3000))
    return TEXT_FILE.read_text(encoding="utf-8")[:100_000] + numbers


def _byte_level(pattern: str | None, digits: bool = False) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    steps = []
    if pattern:
        steps.append(pre_tokenizers.Split(Regex(pattern), "isolated"))
    if digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _train(tokenizer: Tokenizer, special: list[str], alphabet: list[str], size: int = VOCABULARY) -> Tokenizer:
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([text()], trainer)
    return tokenizer


def _add_bos(tokenizer: Tokenizer, bos: str) -> None:
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]
    )


def _llama2() -> PreTrainedTokenizerFast:
    """SentencePiece: a space is a character, one is put before the text, bytes where nothing fits, BOS."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    # Training by words keeps it fast; the trained tokenizer, like the real one, merges over the whole text.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split("▁", "merged_with_next"), pre_tokenizers.Digits(individual_digits=True)]
    )
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    _train(tokenizer, special, [])
    tokenizer.pre_tokenizer = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    _add_bos(tokenizer, "<s>")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", chat_template="{{ bos_token }}" + CHAT_TEMPLATE
    )


def _mistral() -> LlamaTokenizer:
    """The real one of Mistral 7B, 32,000 SentencePiece tokens, as the package mistral-common ships it."""
    package = pytest.importorskip("mistral_common")
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(Path(package.__file__).parent / "data" / "tokenizer.model.v1", Path(folder, "tokenizer.model"))
        tokenizer = LlamaTokenizer.from_pretrained(folder)
    _add_bos(tokenizer.backend_tokenizer, "<s>")
    tokenizer.chat_template = "{{ bos_token }}" + CHAT_TEMPLATE
    return tokenizer


@functools.cache
def tokenizer_of_style(style: str):
    """The tokenizer; made once a test session."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if style == "llama2":
        return _llama2()
    if style == "mistral":
        return _mistral()
    if style == "llama3":
        tokenizer = _train(_byte_level(SPLIT % r"\p{N}{1,3}"), ["<|begin_of_text|>", *CHAT_TOKENS], alphabet)
        _add_bos(tokenizer, "<|begin_of_text|>")
        return PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, bos_token="<|begin_of_text|>", chat_template="{{ bos_token }}" + CHAT_TEMPLATE
        )
    if style == "qwen":
        tokenizer = _byte_level(SPLIT % r"\p{N}")
        tokenizer.normalizer = normalizers.NFC()
        _train(tokenizer, ["<|endoftext|>", *CHAT_TOKENS], alphabet)
        return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=CHAT_TEMPLATE)
    if style == "smollm2":
        tokenizer = _train(_byte_level(None, digits=True), ["<|endoftext|>", *CHAT_TOKENS], alphabet)
        return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=CHAT_TEMPLATE)
    if style == "bytes":
        tokenizer = _train(_byte_level(None), CHAT_TOKENS, alphabet, size=256 + len(CHAT_TOKENS))
        return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=CHAT_TEMPLATE)
    if style == "unpositioned":
        tokenizer = ByT5Tokenizer()  # reports no positions, adds an end-of-sequence token
        tokenizer.chat_template = CHAT_TEMPLATE
        return tokenizer
    raise ValueError(style)
