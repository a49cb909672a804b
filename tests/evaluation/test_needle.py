"""eval_needle.py: one pass decides what greedy decoding would write; cells survive a stop; processes change nothing."""

import csv
import json
import os
import re

import pytest
import torch
from tiny_models import save_tiny_llama, tiny_llama
from tokenizer_styles import TEXT_FILE, tokenizer_of_style

import eval_needle
from easy_context.evaluation import cells, loading
from easy_context.evaluation.encoding import TextEncoder
from easy_context.evaluation.haystack import Haystack
from easy_context.evaluation.journal import Cell, Journal, model_fingerprint, tokenizer_fingerprint
from easy_context.evaluation.loading import check_parallelism, load_scorer
from easy_context.evaluation.needle import NeedleTask
from easy_context.evaluation.prompts import ContextTooShort, PromptBuilder, Row
from easy_context.evaluation.scorer import Scorer
from easy_context.evaluation.tasks import RULER_TASKS, ruler_task
from easy_context.mesh import Mesh
from easy_context.model.config import load_config

TOY = ["--prompt-template", "{haystack}{question}", "--needle-template", " #{value}#", "--question-template", "\n#"]
TOY += ["--answer-template", "{value}", "--digits", "5", "--min_context_length", "96", "--max_context_length", "200"]
TOY += ["--depth_interval", "0.5", "--num_samples", "3"]
LONGEST_TEXT = 40_000  # characters of haystack: enough for these lengths, and quick to tokenize
CELLS = [(length, depth) for length in (96, 192, 200) for depth in (0.0, 0.5, 1.0)]


@pytest.fixture(scope="module", autouse=True)
def in_folder_with_small_haystack(tmp_path_factory):
    """The default --haystack_dir, but short."""
    folder = tmp_path_factory.mktemp("checkout")
    (folder / "data" / "haystack").mkdir(parents=True)
    (folder / "data" / "haystack" / "novel.txt").write_text(TEXT_FILE.read_text(encoding="utf-8")[:LONGEST_TEXT])
    before = os.getcwd()
    os.chdir(folder)
    yield folder
    os.chdir(before)


def parse(model_folder, tmp_path, *arguments):
    return eval_needle.parse_arguments(["--model", model_folder, "--output_dir", str(tmp_path), *TOY, *arguments])


def records_of(folder):
    return [json.loads(line) for line in (folder / "cells.jsonl").read_text().splitlines()[1:]]


def greedy(model, prompt, count):
    """What plain greedy decoding writes, one whole forward pass a token."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.fixture
def scorer(model_folder, tmp_path):
    config = load_config(model_folder)
    with load_scorer(model_folder, config, parse(model_folder, tmp_path), torch.device("cpu")) as loaded:
        yield loaded


def builder_of(model_folder, tmp_path):
    args = parse(model_folder, tmp_path)
    return eval_needle.prepare(args, load_config(model_folder))


def row_with_answer(row, answer):
    """The row, but with other tokens as its answer."""
    ids = row.ids.copy()
    ids[row.answer_start :] = answer
    return Row(ids, row.answer_start, row.items, row.places)


def test_an_answer_is_right_exactly_when_greedy_decoding_writes_it(scorer, model_folder, tmp_path):
    (task,), builder, _ = builder_of(model_folder, tmp_path)
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
    outcomes = cells._score_rows(scorer, builder, rows)
    assert [outcome["exact"] for outcome in outcomes] == expected
    assert [outcome["items"] for outcome in outcomes] == [[right] for right in expected]
    decode = builder.encoder.tokenizer.decode
    assert [outcome["answer"] for outcome in outcomes] == [decode(answer) for answer in answers]
    for row, outcome in zip(rows, outcomes, strict=True):  # each token is what follows the right ones before it
        logits = tiny_llama()(torch.from_numpy(row.ids)[None]).logits[0]
        assert outcome["predicted"] == decode(logits[row.answer_start - 1 : -1].argmax(-1).tolist())
        assert outcome["tokens"] == len(row.ids) and outcome["places"] == list(row.places)


def test_predictions_are_where_targets_are(scorer):
    ids = torch.randint(256, (2, 40), generator=torch.Generator().manual_seed(0))
    targets = torch.full_like(ids, -100)
    targets[0, 7], targets[1, 39] = 1, 2
    logits = tiny_llama()(ids).logits
    expected = torch.full_like(ids, -100)
    for place in ((0, 7), (1, 39)):
        expected[place] = logits[place].argmax()
    assert torch.equal(scorer.predictions(ids, targets), expected)


def test_one_process_of_all_writes():
    places = [(data, sequence) for data in range(2) for sequence in range(2)]
    meshes = [Mesh(sequence_rank=sequence, sequence_size=2, data_rank=data, data_size=2) for data, sequence in places]
    writers = [Scorer(tiny_llama(), "zigzag_ring_attn", mesh, torch.device("cpu")).is_first_rank for mesh in meshes]
    assert writers == [True, False, False, False]


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
    args = parse(model_folder, tmp_path, *arguments)
    (task,), builder, _ = eval_needle.prepare(args, load_config(model_folder))
    row = builder.build(task, 400, 0.0, "a", "b")
    answer = builder.encoder.tokenizer.decode(row.ids[row.answer_start :].tolist())
    assert re.fullmatch(r"\d{5}, \d{5}, \d{5}", answer) and len(answer) == 400 - row.answer_start  # a token a letter
    outcomes = cells._score_rows(OneWrong(), builder, [row] * len(answer))
    for place, outcome in enumerate(outcomes):
        numbers = [match.span() for match in re.finditer(r"\d{5}", answer)]
        assert outcome["items"] == [not start <= place < stop for start, stop in numbers], place
        assert outcome["exact"] is False
    record = cells.score_cell(OneWrong(), builder, task, Cell("needle", 400, 0.0), 2, 0, 100_000)
    assert record["accuracy"] == 0 and record["item_accuracy"] == pytest.approx(4 / 6)


@pytest.mark.parametrize("name", ["needle", *RULER_TASKS])
def test_every_sample_length_depth_and_seed_has_an_example_of_its_own(name):
    text = TEXT_FILE.read_text(encoding="utf-8")[:LONGEST_TEXT]
    encoder = TextEncoder(tokenizer_of_style("qwen"))
    builder = PromptBuilder(encoder, Haystack(text, encoder))
    task = NeedleTask() if name == "needle" else ruler_task(name, text)
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
    text = TEXT_FILE.read_text(encoding="utf-8")[:LONGEST_TEXT]
    encoder = TextEncoder(tokenizer_of_style("qwen"))
    builder = PromptBuilder(encoder, Haystack(text, encoder))
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


def test_only_the_answers_logits_are_computed(scorer, model_folder, tmp_path):
    (task,), builder, _ = builder_of(model_folder, tmp_path)
    rows = [builder.build(task, 200, 0.5, str(i), "p") for i in range(3)]
    shapes = []
    hook = scorer.model.lm_head.register_forward_hook(lambda module, inputs, output: shapes.append(tuple(output.shape)))
    cells._score_rows(scorer, builder, rows)
    hook.remove()
    assert shapes == [(3 * 5, scorer.model.config.vocab_size)]


class OracleScorer:
    """Knows the answers, except of samples whose number starts with a digit below 5; counts its passes."""

    mesh = Mesh()
    is_first_rank = True
    model = tiny_llama()

    def __init__(self, stop_after=None):
        self.passes, self.stop_after = 0, stop_after

    def predictions(self, input_ids, targets):
        if self.passes == self.stop_after:
            raise KeyboardInterrupt
        self.passes += 1
        out = targets.clone()
        for i, row in enumerate(targets):
            first = (row != -100).nonzero()[0]
            out[i, first] = row[first] if row[first] >= targets.new_tensor(self.five) else 0
        return out

    from_every_group = staticmethod(lambda value: [value])
    from_first_rank = staticmethod(lambda value: value)


def run_oracle(model_folder, folder, oracle, *arguments):
    args = parse(model_folder, folder, *arguments)
    tasks, builder, settings = eval_needle.prepare(args, load_config(model_folder))
    OracleScorer.five = builder.encoder.encode("5").ids[0]
    journal = eval_needle.open_journal(args, settings)

    def score(cell):
        return cells.score_cell(oracle, builder, tasks[0], cell, args.num_samples, args.seed, args.batch_tokens)

    records = cells.run_cells(oracle, cells.grid(tasks, args.lengths, args.depths), score, journal)
    eval_needle.write(args, records, settings)
    return records


def test_results_on_disk(model_folder, tmp_path):
    records = run_oracle(model_folder, tmp_path, OracleScorer())
    assert [(record["length"], record["depth"]) for record in records] == CELLS
    for record in records:
        right = [int(sample["answer"][0]) >= 5 for sample in record["samples"]]
        assert [sample["exact"] for sample in record["samples"]] == right
        assert record["accuracy"] == pytest.approx(sum(right) / 3)
        assert {sample["tokens"] for sample in record["samples"]} == {record["length"]}
        assert all(len(sample["answer"]) == 5 and len(sample["places"]) == 1 for sample in record["samples"])
    assert 0 < sum(record["accuracy"] for record in records) < len(records)
    summary = json.loads((tmp_path / "summary.json").read_text())["tasks"]["needle"]
    for length in (96, 192, 200):
        own = [record["accuracy"] for record in records if record["length"] == length]
        assert summary["by_length"][str(length)]["accuracy"] == pytest.approx(sum(own) / len(own))
        assert summary["by_length"][str(length)]["samples"] == 9
    with open(tmp_path / "cells.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["accuracy"]) for row in rows] == [record["accuracy"] for record in records]
    assert (tmp_path / "needle.png").stat().st_size > 5000


def test_a_stopped_run_is_continued(model_folder, tmp_path):
    whole = run_oracle(model_folder, tmp_path / "whole", OracleScorer())
    folder = tmp_path / "stopped"
    with pytest.raises(KeyboardInterrupt):
        run_oracle(model_folder, folder, OracleScorer(stop_after=4))
    assert len(records_of(folder)) == 4
    with (folder / "cells.jsonl").open("a") as file:
        file.write('{"task": "needle", "length": 19')  # killed in the middle of a line
    oracle = OracleScorer()
    assert run_oracle(model_folder, folder, oracle) == whole
    assert oracle.passes == len(CELLS) - 4
    again = OracleScorer()
    run_oracle(model_folder, folder, again, "--depth_interval", "0.25", "--batch_tokens", "1")
    assert again.passes == 3 * 2 * 3  # two new depths at three lengths, one row at a time
    fresh = OracleScorer()
    run_oracle(model_folder, folder, fresh, "--overwrite")
    assert fresh.passes == len(CELLS)


def test_other_settings_are_refused(model_folder, tmp_path):
    run_oracle(model_folder, tmp_path, OracleScorer())
    grid = ["--max_context_length", "2000", "--min_context_length", "1500"]  # which may change
    for change in (["--seed", "1"], ["--num_samples", "2"], ["--answer-template", "{value}#"], ["--few_shot", "1"]):
        key = change[0].strip("-").replace("-", "_")
        with pytest.raises(ValueError, match=f"results of other settings .{key}: .*--output_dir, or --overwrite"):
            parsed = parse(model_folder, tmp_path, *grid, *change)
            _, _, settings = eval_needle.prepare(parsed, load_config(model_folder))
            eval_needle.open_journal(parsed, settings)
    (tmp_path / "cells.jsonl").write_text("something else\n")
    with pytest.raises(ValueError, match="is not a file of this script"):
        Journal(tmp_path / "cells.jsonl", {})


@pytest.mark.parametrize("content", ["something of mine", "[1]\n2", "7\n", '{"settings": 3}\n', b"\xff\xfe\n"])
def test_a_file_of_something_else_is_left_as_it_is(tmp_path, content):
    file = tmp_path / "cells.jsonl"
    content = content if isinstance(content, bytes) else content.encode()
    file.write_bytes(content)
    with pytest.raises(ValueError, match="is not a file of this script; choose another --output_dir"):
        Journal(file, {})
    assert file.read_bytes() == content


CELL = {"task": "t", "length": 8, "depth": None, "accuracy": 1.0, "item_accuracy": 1.0}
CELL["samples"] = [{"exact": True, "items": [True]}]


@pytest.mark.parametrize(
    "line",
    [
        *(json.dumps({key: value for key, value in CELL.items() if key != missing}) for missing in CELL),
        json.dumps({**CELL, "accuracy": "high"}),
        json.dumps({**CELL, "samples": []}),
        json.dumps({**CELL, "samples": [{"exact": True}]}),
        "{",
        "",
        "7",
    ],
)
def test_a_spoilt_record_is_named_by_its_line(tmp_path, line):
    file = tmp_path / "cells.jsonl"
    Journal(file, {}).add(CELL)
    assert list(Journal(file, {}).finished) == [Cell("t", 8, None)]
    with file.open("a") as opened:
        opened.write(line + "\n" + json.dumps(CELL) + "\n")
    with pytest.raises(ValueError, match="cells.jsonl, line 3: no finished cell"):
        Journal(file, {})


def test_a_run_of_a_version_that_recorded_less_is_refused(model_folder, tmp_path):
    args = parse(model_folder, tmp_path)
    _, _, settings = eval_needle.prepare(args, load_config(model_folder))
    earlier = {key: value for key, value in settings.items() if key != "tokenizer"} | {"dtype": "auto"}
    (tmp_path / "cells.jsonl").write_text(json.dumps({"settings": earlier}) + "\n" + json.dumps(CELL) + "\n")
    with pytest.raises(ValueError, match="dtype: 'auto' then, 'float32' now; tokenizer: not recorded then, '.*' now"):
        eval_needle.open_journal(args, settings)


def test_the_dtype_that_is_recorded_is_the_one_that_computes(model_folder, tmp_path, monkeypatch):
    def recorded(*arguments):
        return eval_needle.prepare(parse(model_folder, tmp_path, *arguments), load_config(model_folder))[2]

    on_cpu = [recorded(), recorded("--dtype", "float32")]
    assert on_cpu[0] == on_cpu[1] and on_cpu[0]["dtype"] == "float32"
    monkeypatch.setattr(loading, "_own_device", lambda: torch.device("cuda", 0))
    assert recorded()["dtype"] == recorded("--dtype", "bfloat16")["dtype"] == "bfloat16"


def retokenize(folder):
    file = folder / "tokenizer.json"
    file.write_text(file.read_text() + "\n")


def change_chat_template(folder):
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")


@pytest.mark.parametrize("change", [retokenize, change_chat_template])
def test_another_tokenizer_or_chat_template_is_another_run(tmp_path, change):
    folder = save_tiny_llama(tmp_path / "model")
    out = tmp_path / "out"
    run_oracle(folder, out, OracleScorer())
    before = tokenizer_fingerprint(folder)
    (tmp_path / "model" / "README.md").write_text("not part of it")
    assert tokenizer_fingerprint(folder) == before
    change(tmp_path / "model")
    with pytest.raises(ValueError, match="results of other settings .tokenizer: '.*' then, '.*' now"):
        run_oracle(folder, out, OracleScorer())
    assert tokenizer_fingerprint("user/hub-name") == "user/hub-name"


def test_a_retrained_model_is_another_model(tmp_path):
    first, same, other = (save_tiny_llama(tmp_path / name, seed) for name, seed in (("a", 0), ("b", 0), ("c", 1)))
    prints = [model_fingerprint(folder, load_config(folder)) for folder in (first, same, other)]
    assert prints[0] == prints[1] != prints[2]


@pytest.mark.parametrize(
    "overrides, arguments, message",
    [
        (
            {"num_attention_heads": 3, "num_key_value_heads": 3},
            ["--parallel_mode", "ulysses_attn"],
            "cannot split 3 query",
        ),
        ({"model_type": "gpt2"}, [], "model type 'gpt2' is not supported"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, [], "rope_type 'dynamic'"),
    ],
)
def test_what_processes_cannot_share_is_refused_before_loading(
    model_folder, tmp_path, monkeypatch, overrides, arguments, message
):
    monkeypatch.setenv("WORLD_SIZE", "2")
    config = load_config(model_folder)
    for key, value in overrides.items():
        setattr(config, key, value)
    with pytest.raises(ValueError, match=message):
        check_parallelism(model_folder, config, parse(model_folder, tmp_path, *arguments), 200)


def test_a_family_without_parallel_modes_runs_on_one_process(model_folder, tmp_path):
    import transformers

    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=258, n_embd=32, n_layer=2, n_head=2, n_positions=256)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    tokenizer_of_style("bytes").save_pretrained(tmp_path / "gpt2")
    eval_needle.main(["--model", str(tmp_path / "gpt2"), *TOY, "--output_dir", str(tmp_path / "out")])
    assert len(records_of(tmp_path / "out")) == 9


def main_on_rank(rank, world_size, arguments, folder):
    os.environ["RANK"] = str(rank)  # as a launcher sets it
    try:
        eval_needle.main([*arguments, "--output_dir", folder])
    finally:
        del os.environ["RANK"]


def test_processes_and_modes_find_what_one_finds(pool, model_folder, tmp_path, in_folder_with_small_haystack):
    # Lengths that do not divide, so that rows are padded over the ranks as well.
    arguments = ["--model", model_folder, *TOY, "--max_context_length", "201"]
    arguments += ["--haystack_dir", str(in_folder_with_small_haystack / "data" / "haystack")]
    arguments[arguments.index("96")] = "99"
    eval_needle.main([*arguments, "--output_dir", str(tmp_path / "one")])
    one = records_of(tmp_path / "one")
    assert len(one) == 9
    for mode in ("zigzag_ring_attn", "dist_flash_attn", "ulysses_attn", "data_parallel"):
        pool.run(main_on_rank, 2, [*arguments, "--parallel_mode", mode], str(tmp_path / mode))
        assert records_of(tmp_path / mode) == one, mode


def test_every_task_runs_on_a_model(model_folder, tmp_path):
    arguments = ["--model", model_folder, "--task", "ruler", "needle", "--min-context-length", "3000"]
    arguments += ["--max-context-length", "3000", "--depth-interval", "1", "--format", "chat", "--few-shot", "1"]
    arguments += ["--num_needles", "2", "--ask", "all", "--output_dir", str(tmp_path)]
    eval_needle.main(arguments)
    records = records_of(tmp_path)
    tasks = {record["task"] for record in records}
    assert tasks == {"needle", *eval_needle.RULER_TASKS}
    for record in records:
        assert (record["depth"] is None) == (record["task"] in ("variable_tracking", "common_words"))
        assert 0.9 * 3000 < record["samples"][0]["tokens"] <= 3000
    for task in tasks:
        assert (tmp_path / f"{task}.png").is_file()


DEPTHS, SAMPLES, SEED = [0.0, 0.5, 1.0], 4, 7


@pytest.mark.parametrize("name, shots", [*((name, 0) for name in ("needle", *RULER_TASKS)), ("needle", 1)])
def test_lengths_that_pass_the_check_hold_every_prompt(name, shots):
    text = TEXT_FILE.read_text(encoding="utf-8")[:LONGEST_TEXT]
    encoder = TextEncoder(tokenizer_of_style("qwen"))
    builder = PromptBuilder(encoder, Haystack(text, encoder), shots=shots)
    task = NeedleTask() if name == "needle" else ruler_task(name, text)

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


@pytest.mark.parametrize("checked", [True, False])
def test_a_length_just_too_short_ends_with_a_message(model_folder, tmp_path, monkeypatch, checked):
    arguments = ["--model", model_folder, "--output_dir", str(tmp_path), "--depth_interval", "0.25"]
    args = eval_needle.parse_arguments(arguments)
    (task,), builder, _ = eval_needle.prepare(args, load_config(model_folder))
    short = str(builder.shortest(task, 0.5, "check"))  # one prompt fits, others do not
    if checked:
        monkeypatch.setattr(loading, "load_scorer", pytest.fail)
    else:  # a grid whose first prompts are short throughout
        monkeypatch.setattr(cells, "check_lengths", lambda *rest: None)
    with pytest.raises(SystemExit, match=f"eval_needle.py: a context of {short} tokens cannot hold task needle: its"):
        eval_needle.main([*arguments, "--min_context_length", short, "--max_context_length", short])


def test_rows_go_through_the_model_together_up_to_batch_tokens(model_folder, tmp_path):
    args = parse(model_folder, tmp_path)
    (task,), builder, _ = eval_needle.prepare(args, load_config(model_folder))
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


def test_cells_that_were_not_asked_for_stay_out_of_the_summary(tmp_path):
    journal = Journal(tmp_path / "cells.jsonl", {})
    sample = {"exact": True, "items": [True]}
    for length in (8, 16):
        record = {"task": "t", "length": length, "depth": None, "accuracy": 1.0, "item_accuracy": 1.0}
        journal.add({**record, "samples": [sample]})
    wanted = cells.run_cells(OracleScorer(), [Cell("t", 8, None)], pytest.fail, journal)
    assert list(cells.summarize(wanted)["t"]["by_length"]) == [8]
    assert cells.summarize(wanted)["t"]["by_depth"] == {}


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--haystack_dir", "absent"], "--haystack_dir absent: no such folder"),
        (["--haystack_dir", "EMPTY"], "no .txt file with text in it"),
        (["--depth_interval", "0"], "--depth_interval 0.0: give a share of the context"),
        (["--num_samples", "0"], "--num_samples 0: give at least 1"),
        (["--context_interval", "-5"], "--context_interval -5: give a number of tokens, or 0"),
        (["--min_context_length", "12"], "a context of 12 tokens cannot hold task needle"),
        (["--num_distractor", "2"], "--needle-template ' #{value}#' must hold {key}"),
        (["--prompt-template", "{haystack}"], "must hold {question} exactly once"),
        (["--model", "absent/folder/x"], "--model absent/folder/x: no such folder; give a hub name"),
        (
            ["--parallel_mode", "ulysses_attn", "--sequence-parallel-size", "2"],
            "--sequence-parallel-size 2 must divide",
        ),
        (["--haystack_dir", ""], "--haystack_dir '': no such folder"),
        (["--digits", "40"], "--rnd_number_digits 40: give 1 to 18"),
        (["--rnd_number_digits", "5000"], "--rnd_number_digits 5000: give 1 to 18"),
        (["--rnd-number-digits", "0"], "--rnd_number_digits 0: give 1 to 18"),
        (
            ["--depth_interval", "1e-9"],
            "1,000,000,000 depths at 3 lengths make 3,000,000,000 cells; give at least 0.001",
        ),
        (["--depth_interval", "5e-324"], "--depth_interval 5e-324: .* cells"),
        (["--depth_interval", "nan"], "--depth_interval nan: give a share"),
        (["--context_interval", "1", "--max_context_length", "9999999"], "--context_interval 1: from 96 to 9999999"),
        (["--prompt-template", "{haystack}{question}{x}"], "--prompt-template .* holds {x}, which nothing fills"),
        (["--prompt-template", "{haystack}{question}{}"], "--prompt-template .* holds {}, which nothing fills"),
        (["--needle-template", " {value} {bad}"], "--needle-template .* holds {bad}, which nothing fills"),
        (["--question-template", "What is {value}?"], "--question-template .* holds {value}, which nothing fills"),
        (["--answer-template", "{value} {bad}"], "--answer-template .* holds {bad}, which nothing fills"),
        (["--question-template", "Which {key}?"], "--needle-template ' #{value}#' has no {key}, but the question"),
        (
            ["--needle-template", " {key} {value}", "--num_distractor", "1"],
            r"--question-template '.n#' must hold {key}: nothing else tells",
        ),
        (["--rope-theta", "inf"], "--rope-theta inf: give a positive, finite number"),
        (["--output_dir", "/proc/none"], "--output_dir /proc/none/cells.jsonl: cannot be written"),
    ],
)
def test_bad_input_ends_with_a_message_that_names_it(model_folder, tmp_path, arguments, message):
    (tmp_path / "empty").mkdir()
    arguments = [str(tmp_path / "empty") if word == "EMPTY" else word for word in arguments]
    with pytest.raises(SystemExit, match=message):
        eval_needle.main(["--model", model_folder, "--output_dir", str(tmp_path / "out"), *TOY, *arguments])
