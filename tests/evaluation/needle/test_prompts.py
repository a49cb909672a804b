"""Prompts for every style of tokenizer: exact length, needle in the text at the end of a sentence, answer found."""

import copy
import random
import re

import pytest
from tokenizer_styles import STYLES, STYLES_WITH_BOS, TEXT_FILE, tokenizer_of_style

from easy_context.evaluation.needle.encoding import TextEncoder
from easy_context.evaluation.needle.haystack import Haystack
from easy_context.evaluation.needle.needle_task import NeedleTask
from easy_context.evaluation.needle.prompts import PromptBuilder

every_style = pytest.mark.parametrize("style", STYLES)
SENTENCE = re.compile(r"[.!?][\"'”’)\]]*$")


@pytest.fixture(scope="module")
def haystacks():
    text = TEXT_FILE.read_text(encoding="utf-8")[:60_000]
    made = {}

    def haystack_of(style):
        if style not in made:
            made[style] = Haystack(text, TextEncoder(tokenizer_of_style(style)))
        return made[style]

    return haystack_of


def builder_of(style, haystack, **options):
    return PromptBuilder(TextEncoder(tokenizer_of_style(style)), haystack, **options)


def decode(style, ids):
    return tokenizer_of_style(style).decode([int(i) for i in ids], skip_special_tokens=False)


@every_style
@pytest.mark.parametrize("chat, shots", [(False, 0), (False, 2), (True, 0), (True, 1)])
def test_a_row_has_the_length_asked_for_and_reads_as_it_should(style, chat, shots, haystacks):
    tokenizer = tokenizer_of_style(style)
    builder = builder_of(style, haystacks(style), prompt_format="chat" if chat else "plain", shots=shots)
    task = NeedleTask(distractors=3)
    rng = random.Random(style)
    for _ in range(4):
        length, depth, seed = rng.randrange(4000, 6000), rng.random(), str(rng.random())
        row = builder.build(task, length, depth, seed, seed)
        example = task.example(random.Random(seed), depth)
        assert len(row.ids) == length
        text = decode(style, row.ids)
        for _, needle in example.inserts:
            assert text.count(needle.strip()) == 1
        answer = decode(style, row.ids[row.answer_start :])
        assert answer.strip() == example.answers[0]
        prompt = decode(style, row.ids[: row.answer_start])
        assert prompt.rstrip().endswith(example.lead_in.rstrip()) and example.question in prompt
        assert row.items == (range(row.items[0].start, length),)
        assert decode(style, row.ids[row.items[0].start :]).strip() == example.answers[0]
        if style in STYLES_WITH_BOS:
            assert row.ids[0] == tokenizer.bos_token_id and list(row.ids).count(tokenizer.bos_token_id) == 1
        assert text.count("<|im_start|>") == (2 + 2 * shots if chat else 0)


def test_a_chat_begins_as_its_template_does(haystacks):
    """Also where plain text gets BOS and the template has none, as prepare_data's rows of chats."""
    tokenizer = copy.deepcopy(tokenizer_of_style("llama3"))
    tokenizer.chat_template = tokenizer.chat_template.replace("{{ bos_token }}", "")
    for chat in (True, False):
        encoder = TextEncoder(tokenizer)
        builder = PromptBuilder(encoder, haystacks("llama3"), "chat" if chat else "plain")
        ids = builder.build(NeedleTask(), 3000, 0.5, "seed", "passage").ids
        assert (tokenizer.bos_token_id in list(ids)) == (not chat)
        assert len(ids) == 3000


@every_style
def test_the_needle_lies_at_its_depth_after_a_whole_sentence(style, haystacks):
    builder = builder_of(style, haystacks(style))
    task = NeedleTask()
    bare = builder.build(task, 3000, 0.0, "seed", "passage")
    head = bare.places[0]
    needle = len(
        TextEncoder(tokenizer_of_style(style)).encode(task.example(random.Random("seed"), 0).inserts[0][1]).ids
    )
    tail = len(bare.ids) - decode_tail_start(style, bare)
    room = 3000 - head - needle - tail
    for depth in (0.1, 0.25, 0.5, 0.73, 0.9, 1.0):
        row = builder.build(task, 3000, depth, "seed", "passage")
        place = row.places[0]
        assert abs((place - head) / room - depth) <= 0.05 + 1 / room
        before = decode(style, row.ids[:place])
        sentences = passage_of(builder, room).sentence_ends
        if min(abs(sentences - depth * room)) <= 0.05 * room:
            assert SENTENCE.search(before), depth
        else:  # the novel has very long sentences
            assert not before[-1].isspace()
        assert decode(style, row.ids[place:]).lstrip().startswith("The secret number of the")


def passage_of(builder, room):
    """The stretch of haystack behind rows with passage seed "passage"."""
    return builder.haystack.passage(builder.haystack.random_start(random.Random("passage")), room)


def decode_tail_start(style, row):
    """Token index at which the question begins: everything from there on is the same in every row of one example."""
    for start in range(row.answer_start, 0, -1):
        if decode(style, row.ids[start:]).lstrip().startswith("Question:"):
            return start
    raise AssertionError("no question in the row")


def test_the_same_passage_is_used_at_every_depth(haystacks):
    builder = builder_of("bytes", haystacks("bytes"))
    task = NeedleTask()
    texts = set()
    for depth in (0.0, 0.4, 1.0):
        row = builder.build(task, 2000, depth, f"numbers at {depth}", "passage")
        needle = task.example(random.Random(f"numbers at {depth}"), depth).inserts[0][1]
        texts.add(decode("bytes", row.ids).split("\n\nQuestion")[0].replace(needle, "")[:1500])
    assert len(texts) == 1


def test_a_text_of_abbreviations_alone_holds_needles_too(haystacks):
    haystack = Haystack("Mr. Mrs. Dr. " * 100, TextEncoder(tokenizer_of_style("bytes")))
    assert not len(haystack.sentence_ends)
    row = builder_of("bytes", haystack).build(NeedleTask(), 600, 0.5, "a", "b")
    assert re.search(r"(Mr|Mrs|Dr)\. The secret number of", decode("bytes", row.ids))


MARKS = "Text with {haystack} and {question}, {haystack 0}, {key} of {value} at {depth} {} {{0}} %s. "


@pytest.mark.parametrize("style", ["qwen", "bytes", "llama3"])
@pytest.mark.parametrize("chat", [False, True])
def test_braces_in_the_haystack_are_text(style, chat):
    haystack = Haystack(MARKS * 40, TextEncoder(tokenizer_of_style(style)))
    builder = builder_of(style, haystack, prompt_format="chat" if chat else "plain", shots=2)
    row = builder.build(NeedleTask(), 4000, 0.5, "a", "b")
    text = decode(style, row.ids)
    question = NeedleTask().example(random.Random("a"), 0.5).question
    assert len(row.ids) == 4000 and text.count(question) == 1
    # The marks stand in the text equally often, except that the passage may cut a sentence at either end.
    counts = [text.count(mark) for mark in re.findall(r"{.*?}+", MARKS)]
    assert min(counts) > 4 and max(counts) - min(counts) <= 2


def test_a_chat_template_that_repeats_the_text_is_refused(haystacks):
    encoder = TextEncoder(copy.deepcopy(tokenizer_of_style("bytes")))
    encoder.tokenizer.chat_template = "{{ messages[0].content }}{{ messages[0].content }}"
    builder = PromptBuilder(encoder, haystacks("bytes"), prompt_format="chat")
    with pytest.raises(ValueError, match="--format chat: .* gives the user's text 2 times instead of once"):
        builder.build(NeedleTask(), 2000, 0.5, "a", "b")


def test_templates_for_a_byte_level_toy_model(haystacks):
    builder = builder_of("bytes", haystacks("bytes"), template="{haystack}{question}")
    task = NeedleTask(needle_template=" #{value}#", question_template="\n#", answer_template="{value}", digits=5)
    row = builder.build(task, 128, 0.5, "a", "b")
    text = decode("bytes", row.ids)
    number = task.example(random.Random("a"), 0.5).answers[0]
    assert len(row.ids) == len(text.encode()) == 128
    assert text.endswith(f"\n#{number}") and text.count(f" #{number}#") == 1
    assert len(row.ids) - row.answer_start == 5


@every_style
def test_text_after_the_value_must_be_written_too(style, haystacks):
    builder = builder_of(style, haystacks(style))
    task = NeedleTask(answer_template="It is {value}, I think.")
    row = builder.build(task, 2000, 0.5, "a", "b")
    number = task.example(random.Random("a"), 0.5).answers[0]
    assert decode(style, row.ids[row.answer_start :]).strip() == f"{number}, I think."
    if style != "unpositioned":  # without positions a token counts as its whole word
        assert decode(style, row.ids[row.items[0].start : row.items[0].stop]).strip() == number


def test_bad_formats_are_refused(haystacks):
    with pytest.raises(ValueError, match="--prompt-template '{question}' must hold {haystack} exactly once"):
        builder_of("qwen", haystacks("qwen"), template="{question}")
    encoder = TextEncoder(tokenizer_of_style("qwen"))
    encoder.tokenizer = type("NoTemplate", (), {"chat_template": None})()
    with pytest.raises(ValueError, match="--format chat: this tokenizer has no chat template"):
        PromptBuilder(encoder, haystacks("qwen"), prompt_format="chat")
    with pytest.raises(ValueError, match="a context of 20 tokens cannot hold task needle.*raise --min_context_length"):
        builder_of("qwen", haystacks("qwen")).build(NeedleTask(), 20, 0.5, "a", "b")
