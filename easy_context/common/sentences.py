"""Find the ends of English sentences, at which another sentence can be inserted into a text.

A missed end loses one of many places; a wrong one splits a sentence. So a possible abbreviation counts as one.
"""

import re

_TITLES = """
    Mr Mrs Ms Mx Messrs Mme Mlle Dr Drs Prof Rev Fr Hon St Sr Jr Esq Gen Adm Col Maj Capt Cmdr Lt Sgt Cpl Pvt Gov Sen
    Rep Pres Supt
"""
_OTHERS = "Mt Ft vs cf viz e.g i.e"
ABBREVIATIONS = frozenset((_TITLES + _OTHERS).split())
_END = re.compile(r"(?<![.!?])([.!?]+)[\"'”’)\]]*(?=\s|$)")
_LAST_WORD = re.compile(r"[\w.]+$")
_INITIALS = re.compile(r"([A-Z]\.)*[A-Z]")
_LONGEST_WORD = 32  # the longest word that is checked for being an abbreviation


def sentence_ends(text: str) -> list[int]:
    """Return the offsets directly after every sentence of `text`.

    A sentence ends with . ! or ? and any closing quotes and brackets, if white space or the end of the text follows.
    The full stop of a title ("Mr."), of initials ("J.", "U.S.") or of "e.g." does not end a sentence.
    """
    return [match.end() for match in _END.finditer(text) if not _is_abbreviation(text, match)]


def ends_sentence(text: str) -> bool:
    """Return whether `text`, without white space at its end, ends with a complete sentence."""
    text = text.rstrip()[-2 * _LONGEST_WORD :]
    return bool(text) and sentence_ends(text)[-1:] == [len(text)]


def _is_abbreviation(text: str, end: re.Match) -> bool:
    word = _LAST_WORD.search(text[max(0, end.start() - _LONGEST_WORD) : end.start()])
    if end[1] != "." or word is None:
        return False
    return word[0] in ABBREVIATIONS or _INITIALS.fullmatch(word[0]) is not None
