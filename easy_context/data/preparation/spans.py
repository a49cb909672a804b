"""Encode a text as a whole, and find the tokens of those parts of it that a model writes.

Parts that are encoded apart and joined are not the whole's tokens: SentencePiece puts a space before every text that it
encodes, and tokens may reach over the borders.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

# A text behind one of these has the tokens that it has further on in a longer text, if both keep tokens of their own.
ANCHORS = ("\n", ".", "x", "0", " ")


@dataclass(frozen=True)
class Span:
    """Characters `start:end` of a text. A model writes them, and is given all that stands before them."""

    start: int
    end: int


@dataclass(frozen=True)
class _Piece:
    """A stretch of a text with its tokens; where it starts, and where it ends, there is a border between tokens.

    Attributes:
        start: its place in the whole text, in characters.
        text: its characters.
        anchor: stood before it while it was encoded.
        ids: list of int.
        offsets: int64 `[tokens, 2]`, characters of `text` from which each token is; None if the tokenizer does not say.
    """

    start: int
    text: str
    anchor: str
    ids: list[int]
    offsets: np.ndarray | None


class SpanEncoder:
    """Encodes texts. Special tokens that a text spells out become their ids; none is put before or behind it.

    Args:
        tokenizer: a Hugging Face tokenizer, fast or not.
    """

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        self._says_offsets = getattr(tokenizer, "is_fast", False)
        self._added_ids = list(tokenizer.get_added_vocab().values()) if self._says_offsets else []

    def encode(self, text: str, spans: Sequence[Span] = (), continues: bool = False) -> tuple[list[int], np.ndarray]:
        """Encode a text and mark the tokens of spans.

        The ids are those of the whole text if the ids of what is given to the model before a span are always the first
        of them. If they are not, because a token reaches over the border, a border between tokens is made there: then
        the model writes that span, too, behind exactly what it is given, and the span's tokens hold no other text. A
        token that reaches over the end of a span is not marked.

        Args:
            text: any text.
            spans: in order, without overlap.
            continues: the text stands further on in a longer one.

        Returns:
            ids, and bool `[tokens]`, True for tokens of the spans.

        Raises:
            ValueError: not Unicode, or a tokenizer that has no border between tokens wherever text is cut.
        """
        _check_unicode(text)
        cuts: list[int] = []
        while True:
            pieces = self._pieces(text, cuts, continues, bool(spans) and self._says_offsets)
            crossed = [span.start for span in spans if self._first_token(pieces, span) is None]
            if not crossed:
                break
            cuts = sorted({*cuts, *crossed})
        learn = np.zeros(sum(len(piece.ids) for piece in pieces), bool)
        for span in spans:
            learn[self._first_token(pieces, span) : self._tokens_before(pieces, span.end)] = True
        return [token for piece in pieces for token in piece.ids], learn

    def _pieces(self, text: str, cuts: list[int], continues: bool, offsets: bool) -> list[_Piece]:
        borders = [0, *cuts, len(text)]
        return [
            self._piece(text[start:end], start, ANCHORS if continues or start else ("",), offsets)
            for start, end in zip(borders, borders[1:], strict=False)
        ]

    def _piece(self, text: str, start: int, anchors: Sequence[str], with_offsets: bool) -> _Piece:
        for anchor in anchors:
            encoded, alone = self._encode(anchor + text, with_offsets), self._ids(anchor)
            ids, first = encoded["input_ids"], len(alone)
            if ids[:first] == alone:
                offsets = None
                if with_offsets:
                    offsets = np.array(encoded["offset_mapping"], np.int64).reshape(-1, 2)[first:] - len(anchor)
                return _Piece(start, text, anchor, ids[first:], offsets)
        raise ValueError(f"the tokenizer has no border between tokens before {text[:20]!r}, wherever that stands")

    def _first_token(self, pieces: list[_Piece], span: Span) -> int | None:
        """Return the index of the span's first token, None where what is given before the span has other tokens."""
        done = 0
        for piece in pieces:
            place = span.start - piece.start
            if place < len(piece.text):
                given = self._ids_of_beginning(piece, place)
                return done + len(given) if piece.ids[: len(given)] == given else None
            done += len(piece.ids)
        return done

    def _tokens_before(self, pieces: list[_Piece], end: int) -> int:
        """Return how many tokens lie wholly before character `end`."""
        count = 0
        for piece in pieces:
            place = end - piece.start
            if place >= len(piece.text):
                count += len(piece.ids)
            elif place > 0 and piece.offsets is not None:
                count += int(np.searchsorted(np.maximum.accumulate(piece.offsets[:, 1]), place, side="right"))
            elif place > 0:
                count += _common_length(piece.ids, self._ids_of_beginning(piece, place))
        return count

    def _ids_of_beginning(self, piece: _Piece, place: int) -> list[int]:
        """Return the ids that `piece.text[:place]` has by itself, encoding no more than what follows a special token.

        Special tokens are taken out of a text before anything else is done to it.
        """
        done, anchor, start = 0, piece.anchor, 0
        if piece.offsets is not None:
            special = np.isin(piece.ids, self._added_ids) & (piece.offsets[:, 1] <= place)
            if special.any():
                done, anchor = int(np.flatnonzero(special)[-1]), ""
                start = int(piece.offsets[done, 0])
        return piece.ids[:done] + self._ids(anchor + piece.text[start:place])[len(self._ids(anchor)) :]

    def _ids(self, text: str) -> list[int]:
        return self._encode(text)["input_ids"]

    def _encode(self, text: str, offsets: bool = False) -> dict[str, list]:
        asked = {"return_offsets_mapping": True} if offsets else {}  # slow tokenizers may not know the word
        return self.tokenizer(text, add_special_tokens=False, verbose=False, **asked)


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"not Unicode: {error}") from error


def _common_length(first: list[int], second: list[int]) -> int:
    length = 0
    for left, right in zip(first, second, strict=False):
        if left != right:
            break
        length += 1
    return length
