"""Tokenising a record: its tokens, what of them is learned, and what makes a record bad."""

import re

import pytest
from tokenizer_styles import tokenizer_of_style

from easy_context.data.preparation.sources import Record
from easy_context.data.preparation.tokenising import DocumentTokenizer


@pytest.fixture(scope="module", params=["llama2", "mistral", "llama3", "smollm2", "bytes"])
def tokenizer(request):
    return tokenizer_of_style(request.param)


SEPARATOR = 5


def test_document_has_bos_as_the_tokenizer_wants_and_a_separator(tokenizer):
    text = "Emma Woodhouse, handsome and clever.\n\nShe was 21."
    document = DocumentTokenizer(tokenizer, SEPARATOR)(Record("here", {"text": text}))
    plain = tokenizer(text, add_special_tokens=False)["input_ids"]
    bos = [tokenizer.bos_token_id] if tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id is not None else []
    assert document.ids.tolist() == [*bos, *plain, SEPARATOR]
    assert document.learn is None


def test_only_the_response_is_learned(tokenizer):
    make = DocumentTokenizer(tokenizer, SEPARATOR)
    document = make(Record("here", {"prompt": "How old is Emma? ", "response": "She is 21."}))
    learned = document.ids[document.learn].tolist()
    assert tokenizer.decode(learned[:-1]) == "She is 21." and learned[-1] == SEPARATOR
    assert len(document.learn) == len(document.ids)


def test_only_assistant_turns_are_learned():
    tokenizer = tokenizer_of_style("smollm2")
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Who is Emma?"},
        {"role": "assistant", "content": "A heroine."},
        {"role": "user", "content": "Whose?"},
        {"role": "assistant", "content": "Austen's."},
        {"role": "user", "content": "This is never answered."},
    ]
    document = DocumentTokenizer(tokenizer, 0)(Record("here", {"messages": messages}))
    # The turn's own end is learned, the separator behind it is not.
    assert tokenizer.decode(document.ids[document.learn]) == "A heroine.<|im_end|>\nAusten's.<|im_end|>\n"
    assert document.ids[-1] == 0
    whole = tokenizer.apply_chat_template(messages[:5], tokenize=False)
    assert tokenizer.decode(document.ids[:-1]) == whole


def test_a_chat_template_with_bos_gives_one_bos():
    tokenizer = tokenizer_of_style("llama3")
    messages = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Emma."}]
    document = DocumentTokenizer(tokenizer, SEPARATOR)(Record("here", {"messages": messages}))
    assert (document.ids == tokenizer.bos_token_id).sum() == 1


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        ({"body": "x"}, r"no field 'text' \(fields: body\)"),
        ({"text": 3}, "is int, not text"),
        ({"text": "  "}, "is empty"),
        ({"prompt": "x"}, "no field 'response'"),
        ({"messages": []}, "list of"),
        ({"messages": [{"content": "x"}]}, "no role"),
        ({"messages": [{"role": "assistant", "content": None}]}, "not text"),
        ({"messages": [{"role": "user", "content": "x"}]}, "nothing to learn"),
        ({"text": "a\ud800b"}, "not Unicode: .*surrogate"),
        ({"prompt": "a", "response": "a\ud800b"}, "not Unicode: .*surrogate"),
        ({"messages": [{"role": r, "content": "a\ud800b"} for r in ("user", "assistant")]}, "not Unicode: .*surrogate"),
        ({"prompt": None, "response": None}, r"no field 'text' \(fields: prompt, response\)"),
        ({"prompt": None, "response": "x"}, "field 'prompt' is null, not text"),
        ({"text": "x", "prompt": "y"}, "has 'text' and also 'prompt'; --text-field text takes 'text', and where that"),
        ({"text": "x", "prompt": "y", "response": "z"}, "has 'text' and also 'prompt' and 'response'; --text-field"),
    ],
)
def test_bad_records_say_what_is_wrong(data, problem):
    document = DocumentTokenizer(tokenizer_of_style("smollm2"), 0)(Record("file:7", data))
    assert len(document.ids) == 0
    assert document.location == "file:7"
    assert re.search(problem, document.problem)


def test_what_a_tokenizer_raises_makes_a_bad_record():
    make = DocumentTokenizer(tokenizer_of_style("smollm2"), 0)
    make.encoder.tokenizer = lambda *_, **__: {}["input_ids"]
    document = make(Record("file:7", {"text": "x"}))
    assert (document.location, document.problem) == ("file:7", "KeyError: 'input_ids'")


@pytest.mark.parametrize(
    ("text_field", "data", "learned"),
    [
        ("text", {"text": "a b", "prompt": "c", "response": "d"}, "a b"),
        ("text", {"text": "a b", "prompt": "c"}, "a b"),
        ("text", {"text": "a b", "messages": [{"role": "assistant", "content": "d"}]}, "a b"),
        ("body", {"text": "a b", "prompt": "c", "response": "d"}, "d"),
        ("text", {"text": None, "prompt": "c", "response": "d"}, "d"),
        (None, {"text": "a b", "prompt": None, "response": None, "messages": None}, "a b"),
        (None, {"text": " ", "prompt": "c", "response": "d"}, "d"),
        (None, {"prompt": "", "response": "d"}, "d"),
    ],
)
def test_which_fields_are_taken(text_field, data, learned):
    tokenizer = tokenizer_of_style("smollm2")
    document = DocumentTokenizer(tokenizer, 0, text_field)(Record("file:7", data))
    assert document.problem is None
    ids = document.ids if document.learn is None else document.ids[document.learn]
    assert tokenizer.decode(ids[:-1]) == learned
    assert ids[-1] == 0
