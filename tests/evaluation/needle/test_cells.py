"""Cells: one pass decides what greedy decoding would write; prompts of their own; lengths that hold every prompt."""

import re

import pytest
import torch
from needle_runs import TEXT, parse, prepare
from tiny_models import tiny_llama
from tokenizer_styles import tokenizer_of_style

from easy_context.evaluation.loading import load_scorer
from easy_context.evaluation.needle import cells
from easy_context.evaluation.needle.cells import Cell
from easy_context.evaluation.needle.encoding import TextEncoder
from easy_context.evaluation.needle.haystack import Haystack
from easy_context.evaluation.needle.needle_task import NeedleTask
from easy_context.evaluation.needle.prompts import ContextTooShort, PromptBuilder, Row
from easy_context.evaluation.needle.ruler_tasks import RULER_TASKS
from easy_context.model.config import load_config

DEPTHS, SAMPLES, SEED = [0.0, 0.5, 1.0], 4, 7

pytestmark = pytest.mark.usefixtures("small_haystack")


@pytest.fixture
def scorer(model_folder, tmp_path):
    args = parse(model_folder, tmp_path)
    with load_scorer(model_folder, load_config(model_folder), args, torch.device("cpu")) as loaded:
        yield loaded


def builder_of(style="qwen", **options):
    encoder = TextEncoder(tokenizer_of_style(style))
    return PromptBuilder(encoder, Haystack(TEXT, encoder), **options)


def task_of(name):
    return NeedleTask() if name == "needle" else RULER_TASKS[name](TEXT, None)


def greedy(model, prompt, count):
    """What plain greedy decoding writes, one whole forward pass a token."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def row_with_answer(row, answer):
    """The row, but with other tokens as its answer."""
    ids = row.ids.copy()
    ids[row.answer_start :] = answer
    return Row(ids, row.answer_start, row.items, row.places)


def test_an_answer_is_right_exactly_when_greedy_decoding_writes_it(scorer, model_folder, tmp_path):
    (task,), builder, _ = prepare(parse(model_folder, tmp_path))
    rows, answers, expected = [], [], []
    for i, length in enumerate((100, 120, 97)):  # unequal: the shorter ones are padded
        row = builder.build(task, length, 0.5, str(i), str(i))
        count = length - row.answer_start
        written = greedy(tiny_llama(), row.ids[: row.answer_start], count)
        wrong = [*written[:-1], (written[-1] + 1) % 256]
        first_wrong = [(written[0] + 1) % 256, *written[1:]]
        answers += [written, wrong, first_wrong]
        rows += [row_with_answer(row, answer) for answer in (written, wrong, first_wrong)]
        expected += [True, False, False]
    outcomes = cells.score_rows(scorer, builder, rows)
    assert [outcome["exact"] for outcome in outcomes] == expected
    assert [outcome["items"] for outcome in outcomes] == [[right] for right in expected]
    decode = builder.encoder.tokenizer.decode
    assert [outcome["answer"] for outcome in outcomes] == [decode(answer) for answer in answers]
    for row, outcome in zip(rows, outcomes, strict=True):  # each token is what follows the right ones before it
        logits = tiny_llama()(torch.from_numpy(row.ids)[None]).logits[0]
        assert outcome["predicted"] == decode(logits[row.answer_start - 1 : -1].argmax(-1).tolist())
        assert outcome["tokens"] == len(row.ids) and outcome["places"] == list(row.places)


def test_only_the_answers_logits_are_computed(scorer, model_folder, tmp_path):
    (task,), builder, _ = prepare(parse(model_folder, tmp_path))
    rows = [builder.build(task, 200, 0.5, str(i), "p") for i in range(3)]
    shapes = []
    hook = scorer.model.lm_head.register_forward_hook(lambda module, inputs, output: shapes.append(tuple(output.shape)))
    cells.score_rows(scorer, builder, rows)
    hook.remove()
    assert shapes == [(3 * 5, scorer.model.config.vocab_size)]


class OneWrong:
    """Predicts everything right but one token of the answer of each row: of row i the i-th."""

    def predictions(self, input_ids, targets):
        out = targets.clone()
        for i, row in enumerate(targets):
            place = int((row != -100).nonzero()[0]) + i
            out[i, place] += 1
        return out


def test_a_wrong_token_is_counted_against_its_own_item_alone(model_folder, tmp_path):
    arguments = ["--needle-template", " #{key}={value}#", "--question-template", "{key}#"]
    arguments += ["--num_needles", "3", "--ask", "all", "--min_context_length", "400", "--max_context_length", "400"]
    (task,), builder, _ = prepare(parse(model_folder, tmp_path, *arguments))
    row = builder.build(task, 400, 0.0, "a", "b")
    answer = builder.encoder.tokenizer.decode(row.ids[row.answer_start :].tolist())
    assert re.fullmatch(r"\d{5}, \d{5}, \d{5}", answer) and len(answer) == 400 - row.answer_start  # a token a letter
    outcomes = cells.score_rows(OneWrong(), builder, [row] * len(answer))
    for place, outcome in enumerate(outcomes):
        numbers = [match.span() for match in re.finditer(r"\d{5}", answer)]
        assert outcome["items"] == [not start <= place < stop for start, stop in numbers], place
        assert outcome["exact"] is False
    record = cells.score_cell(OneWrong(), builder, task, Cell("needle", 400, 0.0), 2, 0, 100_000)
    assert record["accuracy"] == 0 and record["item_accuracy"] == pytest.approx(4 / 6)


def test_rows_go_through_the_model_together_up_to_batch_tokens(model_folder, tmp_path):
    (task,), builder, _ = prepare(parse(model_folder, tmp_path))
    shapes = []

    class Recorder:
        def predictions(self, input_ids, targets):
            shapes.append(tuple(input_ids.shape))
            return targets

    for batch_tokens, rows in ((399, [1] * 5), (400, [2, 2, 1]), (599, [2, 2, 1]), (1000, [5]), (1, [1] * 5)):
        shapes.clear()
        record = cells.score_cell(Recorder(), builder, task, Cell("needle", 200, 0.5), 5, 0, batch_tokens)
        assert shapes == [(count, 200) for count in rows]
        assert record["accuracy"] == 1 and len({sample["answer"] for sample in record["samples"]}) == 5


@pytest.mark.parametrize("name", ["needle", *RULER_TASKS])
def test_every_sample_length_depth_and_seed_has_an_example_of_its_own(name):
    builder, task = builder_of(), task_of(name)
    depths = (0.25, 0.75) if task.has_depth else (None,)
    wanted = [(Cell(name, length, depth), seed) for length in (1000, 1200) for depth in depths for seed in (1, 2)]
    answers = []
    for cell, seed in wanted:
        rows = cells.rows_of(builder, task, cell, SAMPLES, seed)
        assert len(rows) == SAMPLES
        answers += [tuple(row.ids[row.answer_start :].tolist()) for row in rows]
        assert [row.ids.tolist() for row in cells.rows_of(builder, task, cell, SAMPLES, seed)] == [
            row.ids.tolist() for row in rows
        ]
    assert len(set(answers)) == len(wanted) * SAMPLES


def test_samples_of_one_number_share_their_stretch_of_text_and_others_do_not():
    builder = builder_of()
    beginnings = {seed: set() for seed in (1, 2)}
    for seed, found in beginnings.items():
        for length, depth in ((1000, 0.25), (1000, 0.75), (2000, 0.25)):
            rows = cells.rows_of(builder, NeedleTask(), Cell("needle", length, depth), SAMPLES, seed)
            assert all(row.places[0] > 150 for row in rows)
            found.add(tuple(tuple(row.ids[:150].tolist()) for row in rows))  # before the needle
    for found in beginnings.values():
        (samples,) = found
        assert len(set(samples)) == SAMPLES
    assert beginnings[1].isdisjoint(beginnings[2])


@pytest.mark.parametrize("name, shots", [*((name, 0) for name in ("needle", *RULER_TASKS)), ("needle", 1)])
def test_lengths_that_pass_the_check_hold_every_prompt(name, shots):
    builder, task = builder_of(shots=shots), task_of(name)

    def fits(length):
        try:
            for cell in cells.grid([task], [length], DEPTHS):
                cells.rows_of(builder, task, cell, SAMPLES, SEED)
        except ContextTooShort:
            return False
        return True

    def passes(lengths):
        try:
            cells.check_lengths(builder, [task], lengths, DEPTHS, SAMPLES, SEED)
        except ContextTooShort as reason:
            wanted = rf"a context of \d+ tokens cannot hold task {name}: its prompts need up to (\d+) of them"
            enough.add(int(re.match(wanted, str(reason))[1]))
            return False
        return True

    enough = set()
    needs = [builder.shortest(task, 0.5, str(seed)) for seed in range(50)]
    lengths = sorted({round(min(needs) + share * (max(needs) - min(needs))) for share in (0, 0.5, 0.7, 0.85, 1, 1.5)})
    found = [fits(length) for length in lengths]
    assert [passes([length]) for length in lengths] == found
    assert {*found} == {True, False}
    # A longer one that holds its own prompts no better than a shorter one did is found too.
    assert passes(lengths) == all(found)
    good = [length for length, fit in zip(lengths, found, strict=True) if fit]
    assert passes([*good, 5000])
    assert enough and all(fits(length) for length in enough)  # the remedy in the message is one


class StubBuilder:
    """Prompts that need 100 tokens, but 130 where the seed names a length of 125."""

    def __init__(self):
        self.tried = 0

    def shortest(self, task, depth, seed):
        self.tried += 1
        return 130 if " 125 " in seed else 100


def test_a_longer_length_can_be_too_short_as_well():
    with pytest.raises(ContextTooShort, match="a context of 125 tokens cannot hold .* need up to 130"):
        cells.check_lengths(StubBuilder(), [NeedleTask()], [120, 125, 200], DEPTHS, SAMPLES, SEED)
    builder = StubBuilder()
    cells.check_lengths(builder, [NeedleTask()], [120, 1000, 2000, 4000], DEPTHS, SAMPLES, SEED)
    assert builder.tried == 2 * len(DEPTHS) * SAMPLES  # far longer ones hold anything


def test_a_summary_is_over_samples_and_over_their_items():
    def record(length, depth, *samples):
        return {
            **{"task": "t", "length": length, "depth": depth},
            "samples": [{"exact": all(items), "items": list(items)} for items in samples],
        }

    records = [
        record(8, 0.0, (True, True, True), (True, False, False)),
        record(8, 1.0, (False, False, False), (False, True, True)),
        record(16, 0.0, (True, True, True)),
    ]
    summary = cells.summarize(records)["t"]
    means = {
        "all": {"accuracy": 2 / 5, "item_accuracy": 9 / 15, "samples": 5},
        ("length", 8): {"accuracy": 1 / 4, "item_accuracy": 6 / 12, "samples": 4},
        ("length", 16): {"accuracy": 1, "item_accuracy": 1, "samples": 1},
        ("depth", 0.0): {"accuracy": 2 / 3, "item_accuracy": 7 / 9, "samples": 3},
        ("depth", 1.0): {"accuracy": 0, "item_accuracy": 2 / 6, "samples": 2},
    }
    found = {(axis, value): mean for axis in ("length", "depth") for value, mean in summary.pop(f"by_{axis}").items()}
    assert {"all": summary, **found} == means
