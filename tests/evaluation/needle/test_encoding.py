"""Token ids with text positions, for every style of tokenizer."""

import pytest
from tokenizer_styles import STYLES, STYLES_WITH_BOS, tokenizer_of_style

from easy_context.evaluation.needle.encoding import TextEncoder

every_style = pytest.mark.parametrize("style", STYLES)


@every_style
def test_pieces_encoded_in_context_are_the_tokens_of_the_whole_text(style):
    encoder = TextEncoder(tokenizer_of_style(style))
    pieces = ["He said “no.”\n\nThen he left.", " The secret number of the amber owl is 9041277.", " And she, too."]
    whole = encoder.encode("".join(pieces), in_context=False)
    parts = [encoder.encode(piece, in_context=i > 0) for i, piece in enumerate(pieces)]
    assert whole.ids == [token for part in parts for token in part.ids]
    assert whole.ends[-1] == sum(map(len, pieces)) and whole.ends == sorted(whole.ends)


@every_style
def test_the_opening_is_bos_where_the_tokenizer_has_one(style):
    tokenizer = tokenizer_of_style(style)
    assert TextEncoder(tokenizer).opening() == ([tokenizer.bos_token_id] if style in STYLES_WITH_BOS else [])
