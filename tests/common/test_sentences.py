"""Where sentences end."""

import pytest

from easy_context.common.sentences import ABBREVIATIONS, ends_sentence, sentence_ends


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("Mr. Smith met Mrs. Jones. They spoke.", ["Mr. Smith met Mrs. Jones.", " They spoke."]),
        ("Dr. J. R. Roe of the U.S. Army left!", ["Dr. J. R. Roe of the U.S. Army left!"]),
        ('He said "Stop." (She did.)\nWhy?! ', ['He said "Stop."', " (She did.)", "\nWhy?!"]),
        ("Pi is 3.14 or so, see www.a.org now.", ["Pi is 3.14 or so, see www.a.org now."]),
        ("“It was Prof. Li.” Well... Go on", ["“It was Prof. Li.”", " Well..."]),
        ("It is 20C. Is it? (St. Ives, e.g. the pier.)", ["It is 20C.", " Is it?", " (St. Ives, e.g. the pier.)"]),
        ("no end", []),
        ("", []),
    ],
)
def test_sentences_end_where_they_do(text, sentences):
    ends = sentence_ends(text)
    assert [text[start:end] for start, end in zip([0, *ends], ends, strict=False)] == sentences


@pytest.mark.parametrize("text", ["It is.", 'It is." ', "a b?)\n", "Why?!", "x" * 200 + ".", "20C."])
def test_a_text_that_ends_a_sentence(text):
    assert ends_sentence(text)


@pytest.mark.parametrize(
    "text", ["", " ", "It is", "It is. And", "a J.", "the U.S.", *(f"a {word}." for word in sorted(ABBREVIATIONS))]
)
def test_a_text_that_ends_none(text):
    assert not ends_sentence(text)
