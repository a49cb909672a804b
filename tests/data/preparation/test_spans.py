"""Chats and pairs: the ids of the whole text, the answers' own tokens learned, behind what a model is given."""

import copy
import functools
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from tokenizer_styles import CHAT_TEMPLATE, STYLES, tokenizer_of_style

from easy_context.data.preparation.sources import Record
from easy_context.data.preparation.spans import Span, SpanEncoder
from easy_context.data.preparation.tokenising import DocumentTokenizer

TEMPLATES = {
    "chatml": CHAT_TEMPLATE,
    "zephyr": "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + eos_token + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}",
    "inst": "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}"
    "{{ '[INST] ' + m.content.strip() + ' [/INST]' }}{% else %}"
    "{{ ' ' + m.content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}",
    "llama3": "{{ bos_token }}{% for m in messages %}"
    "{{ '<|start|>' + m.role + '<|end|>\n\n' + m.content | trim + eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant<|end|>\n\n' }}{% endif %}",
    "plain": "{% for m in messages %}{{ m.role + ': ' + m.content + eos_token + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}",
    "space": "{% for m in messages %}{{ m.role + ': ' + m.content + eos_token + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}",
}
# What Qwen3's template does with thinking: it stands in the last answer only, and there even where there was none.
QWEN3 = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% set parts = m.content.split('</think>') %}"
    "{% if loop.last %}<think>\n{{ parts[0].replace('<think>', '').strip() if parts | length > 1 else '' }}"
    "\n</think>\n\n{% endif %}{{ parts[-1].lstrip('\n') }}{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MESSAGES = [
    {"role": "user", "content": "Hello there"},
    {"role": "assistant", "content": "Hi!"},
    {"role": "user", "content": "And now? Say 1234."},
    {"role": "assistant", "content": "Ça va: 1234, good-bye."},
    {"role": "user", "content": "Thanks"},
    {"role": "assistant", "content": "\nYou are\n\nwelcome."},
]
MARKS = ["<|im_start|>", "<|im_end|>", "<|user|>", "<|assistant|>", "<|start|>", "<|end|>"]
LEGACY = ("legacy None", "legacy True", "legacy False")


@pytest.fixture(scope="module")
def legacy_tokenizers(tmp_path_factory):
    """Mistral 7B's SentencePiece tokenizer in each of the ways that transformers treats its dummy space."""
    package = pytest.importorskip("mistral_common")
    from transformers import LlamaTokenizer

    folder = tmp_path_factory.mktemp("sentencepiece")
    shutil.copy(Path(package.__file__).parent / "data" / "tokenizer.model.v1", folder / "tokenizer.model")
    arguments = ({}, {"legacy": True}, {"legacy": False})
    return {name: LlamaTokenizer.from_pretrained(folder, **x) for name, x in zip(LEGACY, arguments, strict=True)}


@pytest.fixture(scope="module")
def make_tokenizer(legacy_tokenizers):
    """Makes tokenizers of a style with BOS and EOS, and perhaps with the templates' special tokens."""

    @functools.cache
    def make(style, special):
        tokenizer = copy.deepcopy(legacy_tokenizers[style] if style in LEGACY else tokenizer_of_style(style))
        missing = {name: f"<|{name}|>" for name in ("bos_token", "eos_token") if getattr(tokenizer, name) is None}
        tokenizer.add_special_tokens(missing | ({"additional_special_tokens": MARKS} if special else {}))
        return tokenizer

    return make


@pytest.fixture
def tokenizer(request, make_tokenizer):
    return make_tokenizer(request.param, special=False)


def ids_of(tokenizer, messages, **options):
    ids = tokenizer.apply_chat_template(messages, tokenize=True, **options)
    return list(ids["input_ids"] if hasattr(ids, "keys") else ids)


def tokenise(tokenizer, data):
    document = DocumentTokenizer(tokenizer, tokenizer.eos_token_id)(Record("file:1", data))
    assert document.problem is None
    return document


def learned_runs(document):
    kept = np.flatnonzero(document.learn)
    return np.split(kept, np.flatnonzero(np.diff(kept) != 1) + 1)


def text_of(tokenizer, ids):
    """Decode ids that stand further on in a text, so that no decoder takes a space from their start."""
    before = tokenizer("x\n", add_special_tokens=False)["input_ids"]
    whole = tokenizer.decode([*before, *ids], clean_up_tokenization_spaces=False)
    return whole.removeprefix(tokenizer.decode(before, clean_up_tokenization_spaces=False))


every_style = pytest.mark.parametrize("tokenizer", [*STYLES, *LEGACY], indirect=True)


@pytest.mark.parametrize("style", [*STYLES, *LEGACY])
@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("special", [False, True])
def test_a_chat_has_the_ids_of_its_template_and_learns_the_answers_alone(make_tokenizer, style, name, special):
    tokenizer = make_tokenizer(style, special)
    tokenizer.chat_template = TEMPLATES[name]
    messages = [m | {"content": m["content"].strip()} for m in MESSAGES]
    document = tokenise(tokenizer, {"messages": messages})
    ids, whole = document.ids.tolist(), ids_of(tokenizer, messages)
    rendered = tokenizer.apply_chat_template(messages, tokenize=False)
    given = [ids_of(tokenizer, messages[:turn], add_generation_prompt=True) for turn in (1, 3, 5)]
    allowed = all(whole[: len(prompt)] == prompt for prompt in given)
    # Only where a token reaches over the border before an answer: a space and a word, two line breaks.
    assert allowed or name in ("space", "llama3")
    assert not allowed or ids[: len(whole)] == whole
    exact = tokenizer.decode(whole, clean_up_tokenization_spaces=False) == rendered  # no spaces at special tokens
    runs = learned_runs(document)
    assert len(runs) == 3
    for turn, run, prompt in zip((1, 3, 5), runs, given, strict=True):
        start = tokenizer.apply_chat_template(messages[:turn], tokenize=False, add_generation_prompt=True)
        answer = tokenizer.apply_chat_template(messages[: turn + 1], tokenize=False)[len(start) :]
        if allowed or turn == 1:
            assert ids[: run[0]] == prompt
        found = text_of(tokenizer, ids[run[0] : run[-1] + 1])
        assert found == answer if exact else "".join(found.split()) == "".join(answer.split())
    if exact:
        assert tokenizer.decode(ids, clean_up_tokenization_spaces=False).removesuffix(tokenizer.eos_token) in (
            rendered,
            rendered.removesuffix(tokenizer.eos_token),
        )


@every_style
@pytest.mark.parametrize(
    ("prompt", "response"),
    [
        ("How old is Emma?", " She is 21."),
        ("How old is Emma? ", "She is 21."),
        ("How old is Emma?\n", "\nShe is 21.\n"),
        ("How old is Emma?\n\n", "21"),
        ("Emma is 2", "1."),
        ("Emma is 21. ", "  Is she?"),
        ("", "She is 21."),
        ("Ça va: ", "été 你好 🙂"),
    ],
)
def test_a_pair_is_its_text_and_the_response_stands_behind_the_prompt(tokenizer, prompt, response):
    document = tokenise(tokenizer, {"prompt": prompt, "response": response})
    ids = document.ids.tolist()
    start = [tokenizer.bos_token_id] if tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id else []
    given = start + tokenizer(prompt, add_special_tokens=False)["input_ids"]
    assert ids[: len(given)] == given
    assert document.learn.tolist() == [False] * len(given) + [True] * (len(ids) - len(given))
    assert ids[-1] == tokenizer.eos_token_id
    body = ids[len(start) : -1]
    assert tokenizer.decode(body, clean_up_tokenization_spaces=False) == prompt + response
    whole = tokenizer(prompt + response, add_special_tokens=False)["input_ids"]
    assert body == whole or whole[: len(given) - len(start)] != given[len(start) :]


@every_style
def test_what_the_evaluation_asks_with_begins_the_row_of_a_pair(tokenizer):
    """The evaluation encodes prompt and answer as one text, and asks with the tokens before the answer's first."""
    from easy_context.evaluation.needle.encoding import TextEncoder

    encoder = TextEncoder(tokenizer)
    prompt, answer = "The number is 1234.\n\nQuestion: Which is it?\nAnswer: ", "It is 1234."
    asked = encoder.encode(prompt + answer, in_context=False)
    asked_with = encoder.opening() + [i for i, end in zip(asked.ids, asked.ends, strict=True) if end <= len(prompt)]
    for cut in (len(prompt), len(prompt) - 1):  # the space is the prompt's or the response's
        document = tokenise(tokenizer, {"prompt": prompt[:cut], "response": prompt[cut:] + answer})
        assert document.ids[: len(asked_with)].tolist() == asked_with


def chat_of(tokenizer, template, **record):
    tokenizer = copy.copy(tokenizer)
    tokenizer.chat_template = template
    return DocumentTokenizer(tokenizer, tokenizer.eos_token_id)(Record("file:1", record))


def with_thinking(messages):
    return [
        m | {"content": f"<think>\nHm {i}.\n</think>\n\n{m['content']}"} if m["role"] == "assistant" else m
        for i, m in enumerate(messages)
    ]


@pytest.mark.parametrize("style", ["qwen", "legacy None"])
@pytest.mark.parametrize("thinking", [False, True])
def test_where_the_template_drops_earlier_thinking_the_last_answer_is_learned(make_tokenizer, style, thinking):
    tokenizer = make_tokenizer(style, special=True)
    messages = with_thinking(MESSAGES[:4]) if thinking else MESSAGES[:4]
    unanswered = [*messages, {"role": "user", "content": "?"}]
    for given in (messages, unanswered):
        document = chat_of(tokenizer, QWEN3, messages=given)
        assert (document.problem, document.answers_left_out) == (None, 1)
        tokenizer.chat_template = QWEN3
        asked = ids_of(tokenizer, messages[:3], add_generation_prompt=True)
        assert document.ids[: len(asked)].tolist() == asked
        assert not document.learn[: len(asked)].any()
        answer = text_of(tokenizer, document.ids[len(asked) : -1].tolist())
        thought = "Hm 3." if thinking else ""
        assert answer == f"<think>\n{thought}\n</think>\n\nÇa va: 1234, good-bye.<|im_end|>\n"
        assert document.learn.tolist() == [False] * len(asked) + [True] * (len(document.ids) - len(asked) - 1) + [False]
    single = chat_of(tokenizer, QWEN3, messages=messages[:2])
    assert (single.problem, single.answers_left_out) == (None, 0)


def test_a_chat_whose_prompt_is_not_what_stands_before_the_answer_is_refused(make_tokenizer):
    template = CHAT_TEMPLATE.replace(
        "<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\n<think>\n{% endif %}"
    )
    document = chat_of(make_tokenizer("qwen", True), template, messages=MESSAGES)
    assert document.problem.startswith("the chat template's prompt is not what stands before the last answer")


@pytest.mark.parametrize(
    ("template", "end"), [("inst", ["</s>"]), ("zephyr", ["</s>", "<0x0A>"]), ("chatml", ["<0x0A>", "</s>"])]
)
def test_an_end_that_the_template_wrote_is_not_doubled(legacy_tokenizers, template, end):
    tokenizer = legacy_tokenizers["legacy None"]
    document = chat_of(tokenizer, TEMPLATES[template], messages=MESSAGES)
    tokens = tokenizer.convert_ids_to_tokens(document.ids)
    assert tokens[-len(end) :] == end
    assert tokens.count("</s>") == (1 if template == "chatml" else 6 if template == "zephyr" else 3)
    assert document.learn[-1] == (template != "chatml")  # the template's own end is learned, the separator is not


@pytest.mark.parametrize(
    "record",
    [
        {"text": "One.</s>"},
        {"text": "One.</s>\n"},
        {"text": "One.</s>2</s>"},
        {"prompt": "A", "response": " b</s>"},
    ],
)
def test_an_end_that_a_record_spells_is_not_doubled(legacy_tokenizers, record):
    tokenizer = legacy_tokenizers["legacy None"]
    document = tokenise(tokenizer, record)
    assert (document.ids == tokenizer.eos_token_id).sum() == "".join(record.values()).count("</s>")
    assert document.learn is None or document.learn[-1]


SHAREGPT = [
    {"from": "system", "value": "Be brief."},
    {"from": "human", "value": "Hello there"},
    {"from": "gpt", "value": "Hi!"},
    {"from": "tool", "value": "{}"},
    {"from": "gpt", "value": "Bye.", "weight": None},
]
AS_MESSAGES = [
    {"role": role, "content": turn["value"]}
    for role, turn in zip(("system", "user", "assistant", "tool", "assistant"), SHAREGPT, strict=True)
]


@pytest.mark.parametrize(
    "record",
    [
        {"conversations": SHAREGPT, "id": 3, "messages": None},
        {"conversations": AS_MESSAGES},
        {"messages": SHAREGPT},
        {"messages": [{"from": None, "value": None, "weight": 1, **message} for message in AS_MESSAGES]},
        {"system": "Be brief.", "conversations": SHAREGPT[1:], "tools": "[]"},
        {"system": None, "tools": "", "messages": AS_MESSAGES},
    ],
)
def test_sharegpt_and_other_forms_are_the_same_chat(make_tokenizer, record):
    tokenizer = make_tokenizer("smollm2", True)
    expected = chat_of(tokenizer, CHAT_TEMPLATE, messages=AS_MESSAGES)
    document = chat_of(tokenizer, CHAT_TEMPLATE, **record)
    assert document.problem is None
    assert document.ids.tolist() == expected.ids.tolist()
    assert document.learn.tolist() == expected.learn.tolist()


def test_an_answer_of_weight_0_is_not_learned(make_tokenizer):
    tokenizer = make_tokenizer("smollm2", True)
    messages = [m | {"weight": weight} for m, weight in zip(MESSAGES[:4], (None, 0, None, 1), strict=True)]
    document = chat_of(tokenizer, CHAT_TEMPLATE, messages=messages)
    assert tokenizer.decode(document.ids[document.learn]) == "Ça va: 1234, good-bye.<|im_end|>\n"


def test_tools_are_given_to_the_template(make_tokenizer):
    tokenizer = make_tokenizer("smollm2", True)
    template = "{% if tools %}{{ tools | tojson }}{% endif %}" + CHAT_TEMPLATE
    tools = [{"type": "function", "function": {"name": "clock", "description": "Time.", "parameters": {}}}]
    for given in (tools, json.dumps(tools)):
        document = chat_of(tokenizer, template, messages=MESSAGES, tools=given)
        assert tokenizer.decode(document.ids).startswith('[{"type": "function"')
    document = chat_of(tokenizer, CHAT_TEMPLATE, messages=MESSAGES, tools=tools)
    assert document.problem == "has 'tools', which the chat template leaves out"


@pytest.mark.parametrize(
    ("record", "problem"),
    [
        ({"conversations": []}, "'conversations' must be a list of {role, content} or {from, value}"),
        (
            {"conversations": [{"from": "observation", "value": "x"}]},
            "a message from 'observation'; known are human, gpt",
        ),
        (
            {"conversations": [{"from": "gpt", "value": None}]},
            "the content of a message of role 'assistant' is not text",
        ),
        ({"conversations": [{"from": "human", "value": "x"}]}, "no message of role 'assistant'"),
        ({"conversations": ["x"]}, "a message has no role"),
        (
            {"messages": [{"role": "assistant", "content": "x", "weight": 0}]},
            "every message of role 'assistant' has weight",
        ),
        (
            {"messages": [{"role": "assistant", "content": "x", "weight": 0.5}]},
            "weights of messages must be 0 or 1: [0.5]",
        ),
        ({"messages": MESSAGES, "tools": "{"}, "field 'tools' is not JSON"),
        ({"messages": MESSAGES, "tools": [3]}, "field 'tools' is not a list of tools"),
        ({"messages": MESSAGES, "system": 3}, "field 'system' is int, not text"),
        ({"messages": AS_MESSAGES, "system": "x"}, "has a message of role 'system' and also a field 'system'"),
    ],
)
def test_chats_that_cannot_be_used_say_why(make_tokenizer, record, problem):
    assert chat_of(make_tokenizer("smollm2", True), CHAT_TEMPLATE, **record).problem.startswith(problem)


@every_style
def test_text_further_on_has_nothing_put_before_it(tokenizer):
    encoder = SpanEncoder(tokenizer)
    for text in (" The code is 5.", "\nThe code is 5.\n", "\n\nCode: 5.", "The code", ".\n", "5", "", "Ç"):
        ids, learn = encoder.encode(text, continues=True)
        assert text_of(tokenizer, ids) == text
        assert not learn.any()


@every_style
@pytest.mark.parametrize("seed", range(6))
def test_random_spans_hold_their_own_text_behind_what_is_given(tokenizer, seed):
    rng = np.random.default_rng(seed)
    text = "".join(rng.choice(["a", "The ", " 12", "\n", "\n\n", ". ", " ", "é", "你", tokenizer.eos_token], 40))
    places = (1 + np.sort(rng.choice(len(text) - 1, 6, replace=False))).tolist()
    spans = [Span(*places[i : i + 2]) for i in (0, 2, 4)]
    ids, learn = SpanEncoder(tokenizer).encode(text, spans)
    given = tokenizer(text[: places[0]], add_special_tokens=False)["input_ids"]
    assert ids[: len(given)] == given and not learn[: len(given)].any()
    if tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) != text:
        return  # spaces are put at, or taken from, special tokens
    assert tokenizer.decode(ids) == text
    kept = np.flatnonzero(learn)
    runs = np.split(np.array(ids)[kept], np.flatnonzero(np.diff(kept) != 1) + 1)
    found = [text_of(tokenizer, run.tolist()) for run in runs]
    longest = max(8, len(tokenizer.eos_token))
    for span in spans:
        # A token that reaches over the end of a span is not marked: the last characters of the span may be missing.
        of_span = text[span.start : span.end]
        if found and found[0] and of_span.startswith(found[0]):
            assert len(of_span) - len(found.pop(0)) < longest
        else:
            assert len(of_span) < longest  # all of it is in such a token
    assert not any(found)
