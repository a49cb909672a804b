"""Token ids with the text position of every token, for any tokenizer; nothing here knows a token id.

Only the END of each token in the text is used: tokenizers disagree about whether a word's leading space belongs to the
token's span, but all agree about where the token stops.
"""

import re
from dataclasses import dataclass

import numpy as np

# Encoding "." first puts what follows in the middle of a text: no dummy-prefix space as SentencePiece adds at a start.
ANCHOR = "."


@dataclass(frozen=True)
class Encoded:
    """A text's tokens.

    Attributes:
        ids: token ids, without special tokens that the text itself does not spell out.
        ends: ends[i] is the number of characters of the text that tokens 0..i cover; never decreases.
    """

    ids: list[int]
    ends: list[int]


class TextEncoder:
    """A tokenizer that gives ids with text positions, and the special tokens that a prompt opens with."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    def opening(self) -> list[int]:
        """Return the special tokens that the tokenizer puts before a text: BOS for Llama, none for GPT-2 or Qwen."""
        plain = self.tokenizer.encode("a", add_special_tokens=False)
        whole = self.tokenizer.encode("a", add_special_tokens=True)
        for start in range(len(whole) - len(plain) + 1):
            if whole[start : start + len(plain)] == plain:
                return whole[:start]
        return []

    def encode(self, text: str, in_context: bool = True) -> Encoded:
        """Encode `text`.

        Args:
            text: any text; special tokens spelled out in it (chat templates) become their ids.
            in_context: the text continues another one, so the tokens are those it has after a full stop.

        Returns:
            Ids and ends; ends count characters of `text`.
        """
        if not self.tokenizer.is_fast:
            return self._encode_by_words(text, in_context)
        anchor = ANCHOR if in_context else ""
        encoded = self.tokenizer(anchor + text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        positions = np.array(encoded["offset_mapping"], dtype=np.int64).reshape(-1, 2)
        ends = np.maximum.accumulate(positions[:, 1]) - len(anchor)
        first = int(np.searchsorted(ends, 1))
        return Encoded(encoded["input_ids"][first:], ends[first:].tolist())

    def _encode_by_words(self, text: str, in_context: bool) -> Encoded:
        """Encode word by word, for tokenizers that report no positions: each token ends where its word ends."""
        ids, ends = [], []
        anchor_length = len(self.tokenizer.encode(ANCHOR, add_special_tokens=False))
        for word in re.finditer(r"\s*\S+|\s+$", text):
            continues = in_context or word.start() > 0
            prefix, skip = (ANCHOR, anchor_length) if continues else ("", 0)
            tokens = self.tokenizer.encode(prefix + word.group(), add_special_tokens=False)[skip:]
            ids += tokens
            ends += [word.end()] * len(tokens)
        return Encoded(ids, ends)
