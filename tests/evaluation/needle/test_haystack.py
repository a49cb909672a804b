"""The haystack: passages of any length, places at the ends of sentences, and the folders it is read from."""

import random

import pytest
from tokenizer_styles import STYLES, tokenizer_of_style

from easy_context.evaluation.needle.encoding import TextEncoder
from easy_context.evaluation.needle.haystack import Haystack, read_haystack
from easy_context.evaluation.needle.needle_task import NeedleTask
from easy_context.evaluation.needle.prompts import PromptBuilder

every_style = pytest.mark.parametrize("style", STYLES)


def decode(style, ids):
    return tokenizer_of_style(style).decode([int(i) for i in ids], skip_special_tokens=False)


@every_style
def test_a_short_haystack_is_repeated(style):
    haystack = Haystack("One two three. Four five six.", TextEncoder(tokenizer_of_style(style)))
    passage = haystack.passage(0, 10 * len(haystack.ids))
    assert decode(style, passage.ids).count("Four five six.") == 10
    assert len(passage.sentence_ends) == 20
    for end in passage.sentence_ends:
        assert decode(style, passage.ids[:end]).endswith(".")
    row = PromptBuilder(TextEncoder(tokenizer_of_style(style)), haystack).build(NeedleTask(), 1500, 0.5, "a", "b")
    assert len(row.ids) == 1500


def test_without_a_sentence_end_near_a_word_end_is_taken():
    haystack = Haystack("word " * 400, TextEncoder(tokenizer_of_style("bytes")))
    place = haystack.passage(0, 1000).place(0.5)
    assert abs(place - 500) <= 3 and decode("bytes", haystack.ids[:place]).endswith("word")
    assert haystack.passage(0, 1000).place(0.0) == 0


ABBREVIATED = "Mr. and Mrs. Weston met J. K. Smith, Esq. at St. Paul's. Dr. Perry, e.g. he, left! “No.” So it was. "


@every_style
def test_a_full_stop_of_an_abbreviation_ends_no_sentence(style):
    haystack = Haystack(ABBREVIATED * 3, TextEncoder(tokenizer_of_style(style)))
    ends = [decode(style, haystack.ids[:end]).split()[-1] for end in haystack.sentence_ends]
    assert ends == ["Paul's.", "left!", "“No.”", "was."] * 3
    words = ABBREVIATED.split()
    whole = [" ".join(words[:12]), " ".join(words[12:17]), "“No.”", "So it was."]
    for seed in range(20):
        assert {sentence.strip() for sentence in haystack.sentences(random.Random(seed), 2)} < {*whole}
        start = haystack.random_start(random.Random(seed))
        following = decode(style, haystack.passage(start, 8).ids).strip()
        assert any(sentence.startswith(following[:4]) for sentence in whole)


def test_haystack_folders(tmp_path):
    with pytest.raises(FileNotFoundError, match="--haystack_dir .*absent: no such folder"):
        read_haystack(tmp_path / "absent")
    (tmp_path / "SOURCES.md").write_text("not part of it")
    (tmp_path / "empty.txt").write_text(" \n")
    with pytest.raises(ValueError, match="no .txt file with text in it"):
        read_haystack(tmp_path)
    (tmp_path / "b.txt").write_text("second")
    (tmp_path / "a.txt").write_text("first\n")
    assert read_haystack(tmp_path) == "first\n\nsecond"
    assert read_haystack(tmp_path, most_characters=3) == "fir"
