"""Perplexity: the one-pass curve is the separate passes, every token counts once, processes do not change a number."""

import csv
import gzip
import json
import lzma
import math

import pytest
import torch
import torch.nn.functional as F
from datasets import Dataset, DatasetDict
from tiny_models import VOCABULARY, save_tiny_llama, tiny_llama
from tokenizer_styles import tokenizer_of_style

import eval_ppl
import plot
from easy_context import loss
from easy_context.evaluation import perplexity, results, rows
from easy_context.evaluation import texts as documents
from easy_context.evaluation.arguments import context_lengths
from easy_context.evaluation.loading import load_scorer
from easy_context.evaluation.perplexity import Sum, TokenSums
from easy_context.model.config import load_config

LENGTHS = (2, 3, 17, 64, 100, 128)
RELATIVE = 1e-5  # fp32 losses of the same tokens by another order of sums


@pytest.fixture(scope="module")
def scorer(model_folder):
    args = eval_ppl.parse_arguments(["-m", model_folder, "--text", "x", "--output-file", f"{model_folder}/x.csv"])
    with load_scorer(model_folder, load_config(model_folder), args, torch.device("cpu")) as loaded:
        yield loaded


def random_ids(length, seed=0):
    return torch.randint(VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed))


def document(ids, labels=None):
    return documents.Document("d", ids, ids if labels is None else labels, "--text d")


def plain_losses(ids):
    """Loss of every token but the first, from whole logits of a plain Hugging Face forward."""
    logits = tiny_llama()(ids[None]).logits[0].double()
    return F.cross_entropy(logits[:-1], ids[1:], reduction="none")


def run(arguments, output):
    eval_ppl.main([*arguments, "--output-file", str(output)])
    with open(output, newline="") as file:
        return list(csv.DictReader(file)), json.loads(output.with_suffix(".json").read_text())


def test_one_pass_gives_the_curve_of_separate_passes(scorer):
    ids = random_ids(128)
    targets = documents.targets_of(document(ids))
    sums = TokenSums.of(scorer.token_losses(ids[None], targets[None])[0], targets)
    curve = perplexity.curve(sums, LENGTHS)
    assert set(curve) == set(LENGTHS)
    for length in LENGTHS:
        expected = plain_losses(ids[:length]).mean().item()
        assert curve[length].tokens == length - 1
        assert curve[length].mean == pytest.approx(expected, rel=RELATIVE), length


def test_a_length_beyond_the_document_has_no_value():
    sums = TokenSums.of(torch.ones(10), torch.ones(10, dtype=torch.int64))
    assert set(perplexity.curve(sums, [5, 10, 11])) == {5, 10}


def test_ranges_of_positions_add_up_to_the_whole():
    for length in (1, 7, 8, 9, 33):
        losses = torch.rand(length, generator=torch.Generator().manual_seed(length))
        targets = torch.cat((torch.ones(length - 1, dtype=torch.int64), torch.tensor([-100])))
        sums = TokenSums.of(losses, targets)
        ranges = perplexity.by_position(sums, perplexity.position_edges(8, 64))
        assert sum(part.tokens for part in ranges.values()) == length - 1
        assert sum(part.loss for part in ranges.values()) == pytest.approx(losses[:-1].double().sum().item())
        # Token n is scored by loss n - 1: the second range holds losses 7 .. 14.
        if length > 8:
            assert ranges[8, 16].loss == pytest.approx(losses[7 : min(15, length - 1)].double().sum().item())
    assert perplexity.position_edges(4, 20) == [0, 4, 8, 16, 20]
    assert perplexity.position_edges(4096, 512) == [0, 512]
    assert perplexity.position_edges(8, 64) == [0, 8, 16, 32, 64]


def test_sums_over_millions_of_tokens_are_exact():
    # A running sum in float32 would be 1e5 off by its end, where a stretch of 100 tokens has a sum of 300.
    length = 3_000_000
    losses = 3 + torch.rand(length, generator=torch.Generator().manual_seed(0))
    targets = torch.ones(length, dtype=torch.int64)
    targets[::7] = -100
    sums = TokenSums.of(losses, targets)
    assert sums.loss.dtype == torch.float64 and sums.tokens.dtype == torch.int64
    values = losses.double().where(targets != -100, 0).tolist()
    for start, stop in ((0, length), (length - 100, length), (length // 2, length // 2 + 1), (7, 2_000_000)):
        part = sums.between(start, stop)
        assert part.tokens == sum(index % 7 != 0 for index in range(start, stop))
        assert part.loss == pytest.approx(math.fsum(values[start:stop]), rel=1e-9, abs=1e-7)
    (curve,) = perplexity.curve(sums, [length]).values()
    assert curve.mean == pytest.approx(math.fsum(values[:-1]) / curve.tokens, rel=1e-12)


def test_ignored_labels_are_counted_nowhere(scorer):
    ids = random_ids(64)
    labels = ids.clone()
    labels[10:50] = -100
    targets = documents.targets_of(document(ids, labels))
    sums = TokenSums.of(scorer.token_losses(ids[None], targets[None])[0], targets)
    whole = perplexity.curve(sums, [64])[64]
    kept = torch.cat((plain_losses(ids)[:9], plain_losses(ids)[49:]))
    assert whole.tokens == len(kept) == 23
    assert whole.mean == pytest.approx(kept.mean().item(), rel=RELATIVE)
    assert math.isnan(perplexity.by_position(sums, [0, 10, 50, 64])[10, 50].mean)


def test_padding_of_a_tokenized_row_is_cut_off():
    padded = {"input_ids": [9, 9, 1, 2, 3, 9], "attention_mask": [0, 0, 1, 1, 1, 0]}
    (only,) = rows.tokenized_documents([{**padded, "labels": [-100, -100, 1, -100, 3, 9]}], "d")
    assert only.input_ids.tolist() == [1, 2, 3]
    assert documents.targets_of(only).tolist() == [-100, 3, -100]
    with pytest.raises(ValueError, match="row 0: attention_mask has padding between its tokens"):
        list(rows.tokenized_documents([{"input_ids": [1, 2, 3], "attention_mask": [1, 0, 1]}], "d"))
    with pytest.raises(ValueError, match="none of input_ids or tokens"):
        list(rows.tokenized_documents([{"text": "a"}], "d"))


def test_the_mean_is_over_tokens_not_over_documents():
    pooled = perplexity.pool([{8: Sum(10.0, 10)}, {8: Sum(90.0, 30)}, {}])
    assert pooled[8].mean == pytest.approx(2.5)
    assert pooled[8].perplexity == pytest.approx(math.exp(2.5))
    assert Sum(1e6, 1).perplexity == math.inf


@pytest.mark.parametrize("window, stride, length", [(16, 4, 50), (16, 16, 50), (16, 16, 48), (16, 5, 10), (64, 7, 64)])
def test_sliding_window_scores_every_token_once_with_the_context_it_should(scorer, window, stride, length):
    ids = random_ids(length)
    targets = documents.targets_of(document(ids))
    total = perplexity.sliding_window(scorer.token_losses, ids, targets, window, stride)
    logits = tiny_llama()
    expected, scored = 0.0, 0
    for index in range(length - 1):  # the first window that holds this position
        start = max(0, math.ceil((index + 1 - window) / stride)) * stride
        context = ids[start : index + 1]
        expected += F.cross_entropy(logits(context[None]).logits[0, -1:].double(), ids[index + 1 : index + 2]).item()
        scored += 1
    assert total.tokens == scored == length - 1
    assert total.loss == pytest.approx(expected, rel=RELATIVE)


def test_sums_of_windows_are_float64():
    losses = 3 + torch.rand(100_000, generator=torch.Generator().manual_seed(0))  # float32, as from a model
    ids = torch.arange(len(losses))  # each token's place, by which its loss is found
    targets = ids.clone()
    targets[-1] = -100

    def token_losses(input_ids, wanted):
        return losses[input_ids].where(wanted != -100, 0)

    for window, stride in ((100_000, 100_000), (60_000, 30_000)):
        total = perplexity.sliding_window(token_losses, ids, targets, window, stride)
        assert total.tokens == len(losses) - 1
        assert total.loss == pytest.approx(math.fsum(losses[:-1].double().tolist()), rel=1e-11)


@pytest.mark.parametrize("frugal, rows", [(False, 1024), (True, 256)])
def test_only_so_many_logits_exist_at_once(model_folder, monkeypatch, frugal, rows):
    args = eval_ppl.parse_arguments(["-m", model_folder, "--text", "x", "--output-file", f"{model_folder}/x.csv"])
    shapes = []
    logits_of = loss._logits

    def recorded(hidden, weight):
        shapes.append(len(hidden))
        return logits_of(hidden, weight)

    monkeypatch.setattr(loss, "_logits", recorded)
    ids = random_ids(2500)
    with load_scorer(model_folder, load_config(model_folder), args, torch.device("cpu"), frugal) as loaded:
        loaded.token_losses(ids[None], documents.targets_of(document(ids))[None])
    assert max(shapes) == rows and sum(shapes) == 2500


def two_process_run(rank, world_size, arguments, output):
    eval_ppl.main([*arguments, "--output-file", output])


def test_processes_and_modes_give_the_numbers_of_one(pool, model_folder, tmp_path):
    # Lengths that divide by nothing, so that rows are padded; unequal documents, so that a mean over means would show.
    lists = [{"input_ids": random_ids(length, seed=length).tolist()} for length in (201, 67, 333)]
    Dataset.from_list(lists).save_to_disk(tmp_path / "rows")
    arguments = ["-m", model_folder, "--tokenized", str(tmp_path / "rows"), "--min-tokens", "32", "--max-tokens", "333"]
    arguments += ["--bucket-tokens", "64"]
    one, summary = run(arguments, tmp_path / "one.csv")
    assert [(row["document"], row["length"]) for row in one][:5] == [("row-0", str(n)) for n in (32, 64, 128)] + [
        ("row-1", "32"),
        ("row-1", "64"),
    ]
    modes = {mode: 2 for mode in ("zigzag_ring_attn", "dist_flash_attn", "ulysses_attn", "data_parallel")}
    for mode, world_size in modes.items():
        output = tmp_path / f"{mode}.csv"
        pool.run(two_process_run, world_size, [*arguments, "--parallel_mode", mode], str(output))
        with open(output, newline="") as file:
            several = list(csv.DictReader(file))
        assert len(several) == len(one)
        for a, b in zip(one, several, strict=True):
            assert (a["document"], a["length"], a["tokens"]) == (b["document"], b["length"], b["tokens"])
            assert float(a["loss"]) == pytest.approx(float(b["loss"]), rel=1e-6), mode
        other = json.loads(output.with_suffix(".json").read_text())["models"][model_folder]
        for axis in ("by_length", "by_position"):
            for a, b in zip(summary["models"][model_folder][axis], other[axis], strict=True):
                assert a["loss"] == pytest.approx(b["loss"], rel=1e-6), mode


def test_text_files_two_models_csv_and_summary(model_folder, tmp_path):
    other = save_tiny_llama(tmp_path / "other", seed=1)
    (tmp_path / "a.txt").write_text("All happy families are alike. " * 20)
    with lzma.open(tmp_path / "b.txt.xz", "wt") as file:
        file.write("Call me Ishmael. " * 20)
    with gzip.open(tmp_path / "short.txt.gz", "wt") as file:
        file.write("Too short.")
    texts = [str(tmp_path / name) for name in ("a.txt", "b.txt.xz", "short.txt.gz")]
    table, summary = run(
        [
            "-m",
            model_folder,
            "-m",
            other,
            "--text",
            *texts,
            "--min-tokens",
            "64",
            "--max_tokens",
            "256",
            "--samples",
            "5",
        ],
        tmp_path / "out.csv",
    )
    assert list(table[0]) == list(eval_ppl.COLUMNS)
    assert {(row["model"], row["document"]) for row in table} == {
        (model, text) for model in (model_folder, other) for text in ("a.txt", "b.txt")
    }
    assert [int(row["length"]) for row in table[:3]] == [64, 128, 256]
    ids = torch.tensor(tokenizer_of_style("bytes")("All happy families are alike. " * 20)["input_ids"])[:256]
    assert float(table[2]["loss"]) == pytest.approx(plain_losses(ids).mean().item(), rel=RELATIVE)
    assert float(table[2]["perplexity"]) == pytest.approx(math.exp(float(table[2]["loss"])))
    by_length = summary["models"][model_folder]["by_length"]
    assert [entry["documents"] for entry in by_length] == [2, 2, 2]
    assert by_length[0]["tokens"] == 2 * 63


TEXTS = ("All happy families are alike. " * 12, "Short.", "Call me Ishmael. " * 30)


@pytest.fixture
def text_rows(tmp_path):
    """A dataset of text in two columns, in every form."""
    dataset = Dataset.from_dict({"body": TEXTS, "title": ["a", "b", "c"]})
    dataset.save_to_disk(tmp_path / "saved")
    DatasetDict(train=dataset, test=dataset.select([2])).save_to_disk(tmp_path / "splits")
    dataset.to_parquet(tmp_path / "rows.parquet")
    dataset.to_json(tmp_path / "rows.jsonl")
    return tmp_path


def bytes_of(text):
    return torch.tensor(tokenizer_of_style("bytes")(text)["input_ids"])


@pytest.mark.parametrize("name", ["saved", "splits", "rows.parquet", "rows.jsonl"])
def test_datasets_of_text(model_folder, text_rows, name):
    arguments = ["-m", model_folder, "-d", str(text_rows / name), "-f", "body", "--hide-progress"]
    arguments += ["--min-tokens", "64", "--max-tokens", "256"] + (["--split", "train"] if name == "splits" else [])
    table, summary = run(arguments, text_rows / "out.csv")
    assert [(row["document"], row["length"]) for row in table] == [
        (document, length) for document in ("row-0", "row-2") for length in ("64", "128", "256")
    ]
    for row, text in ((table[2], TEXTS[0]), (table[5], TEXTS[2])):
        assert float(row["loss"]) == pytest.approx(plain_losses(bytes_of(text)[:256]).mean().item(), rel=RELATIVE)
    # What the config says of the trained length goes with the results.
    assert {row["trained_length"] for row in table} == {"512"}
    assert summary["models"][model_folder]["trained_length"] == 512


def test_text_that_is_tokenised_and_saved_gives_the_same_numbers(model_folder, text_rows, capsys):
    lengths = ["--min-tokens", "64", "--max-tokens", "256"]
    source = ["-m", model_folder, "--dataset", str(text_rows / "saved"), "--feature", "body"]
    direct, _ = run([*source, *lengths], text_rows / "direct.csv")
    folder = text_rows / "tokens"
    capsys.readouterr()
    eval_ppl.main([*source, "--save-tokenized", str(folder), "--output-file", str(text_rows / "none.csv")])
    assert f"saved 3 documents of {sum(map(len, TEXTS))} tokens" in capsys.readouterr().out
    assert not (text_rows / "none.csv").exists()  # nothing is evaluated, as in the original
    assert Dataset.load_from_disk(folder)["tokenized_len"][:] == [len(text) for text in TEXTS]
    saved, _ = run(["-m", model_folder, "--tokenized", str(folder), *lengths], text_rows / "saved.csv")
    assert saved == direct
    with pytest.raises(SystemExit, match="--save-tokenized .*tokens: there are files in this folder; name a new one"):
        eval_ppl.main([*source, "--save-tokenized", str(folder)])


def test_only_the_first_process_saves_tokens(model_folder, text_rows, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    source = ["-m", model_folder, "-d", str(text_rows / "saved"), "-f", "body"]
    eval_ppl.main([*source, "--save-tokenized", str(text_rows / "tokens"), "--output-file", str(text_rows / "o.csv")])
    assert not (text_rows / "tokens").exists()


def test_a_hub_datasets_configuration_is_asked_for(model_folder, text_rows, monkeypatch):
    asked = []

    def load_dataset(*names):
        asked.append(names)
        return DatasetDict(validation=Dataset.from_dict({"text": TEXTS}))

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    arguments = ["-m", model_folder, "-d", "wikitext", "-s", "wikitext-2", "--min-tokens", "64", "--max-tokens", "64"]
    table, _ = run(arguments, text_rows / "out.csv")
    assert asked == [("wikitext", "wikitext-2")] and len(table) == 2


@pytest.mark.parametrize("hidden", [True, False])
def test_progress_is_shown_unless_it_is_hidden(model_folder, text_rows, capsys, hidden):
    arguments = ["-m", model_folder, "-d", str(text_rows / "saved"), "-f", "body", "--min-tokens", "64"]
    run(arguments + ["--hide-progress"] * hidden, text_rows / "out.csv")
    assert ("documents:" in capsys.readouterr().err) != hidden


def test_sliding_window_reads_the_whole_document_unless_truncated(model_folder, tmp_path):
    (tmp_path / "a.txt").write_text("All happy families are alike. " * 10)
    arguments = ["-m", model_folder, "--text", str(tmp_path / "a.txt"), "--min-tokens", "32", "--max-tokens", "64"]
    arguments += ["--sliding-window", "16"]
    whole, _ = run(arguments, tmp_path / "whole.csv")
    cut, _ = run([*arguments, "--truncate", "--aggressive-memory"], tmp_path / "cut.csv")
    assert [int(row["tokens"]) for row in whole] == [299, 299]
    assert [int(row["tokens"]) for row in cut] == [64, 64]  # the token after the cut is still predicted


def test_what_has_no_scored_token_is_null_in_the_summary(model_folder, tmp_path):
    row = {"input_ids": random_ids(64).tolist(), "labels": [-100] * 40 + random_ids(24).tolist()}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    arguments = ["-m", model_folder, "--tokenized", str(tmp_path / "rows.jsonl"), "--min-tokens", "16"]
    arguments += ["--max-tokens", "64", "--bucket-tokens", "16"]
    table, _ = run(arguments, tmp_path / "out.csv")
    summary = json.loads((tmp_path / "out.json").read_text(), parse_constant=pytest.fail)["models"][model_folder]
    assert [(entry["tokens"], entry["loss"] is None) for entry in summary["by_length"]] == [
        (0, True),
        (0, True),
        (24, False),
    ]
    assert [entry["perplexity"] is None for entry in summary["by_position"]] == [True, True, False]
    assert [row["tokens"] for row in table] == ["0", "0", "24"]
    plot.main(["perplexity", str(tmp_path / "out.csv")])
    assert (tmp_path / "out.png").is_file()


def test_results_are_json_whatever_their_numbers():
    value = {"a": [math.nan, (math.inf, 1.5)], 2: {"b": -math.inf, "c": None, "d": True}}
    assert json.loads(results.json_text(value), parse_constant=pytest.fail) == {
        "a": [None, [None, 1.5]],
        "2": {"b": None, "c": None, "d": True},
    }


def test_grids_of_lengths():
    flags = ("--min", "--max", "--step")
    assert context_lengths(256, 2048, 0, flags) == [256, 512, 1024, 2048]
    assert context_lengths(100, 500, 0, flags) == [100, 200, 400, 500]
    assert context_lengths(100, 350, 100, flags) == [100, 200, 300, 350]
    assert context_lengths(64, 64, 0, flags) == [64]
    with pytest.raises(ValueError, match="--min 10 and --max 5"):
        context_lengths(10, 5, 0, flags)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--text", "absent.txt"], "--text absent.txt: no such file"),
        (["--tokenized", ""], "--tokenized  cannot be read as a dataset"),
        (["--dataset", ""], "--dataset  cannot be read as a dataset"),
        (["--tokenized", "absent/folder/x"], "--tokenized absent/folder/x cannot be read as a dataset"),
        (
            ["--text", "TEXT", "--dataset-min-tokens", "99999"],
            "no document has at least 99999 tokens .the longest has 300",
        ),
        (["--text", "TEXT", "--sliding-window", "300"], "--sliding-window 300: the stride must be 1 to --min-tokens"),
        (["--text", "TEXT", "--min-tokens", "9000"], "--min-tokens 9000 and --max-tokens 8192"),
        (["--text", "TEXT", "-m", "absent/folder/x"], "--model absent/folder/x: no such folder; give a hub name"),
        (["--text", "TEXT", "--output-file", "/proc/none/x.csv"], "--output-file /proc/none/x.csv: cannot be written"),
        (["--text", "TEXT", "--output-file", "x.json"], "--output-file x.json: the summary takes this name"),
        (["--text", "TEXT", "-m", "m", "-m", "m"], "--model m is given twice"),
        (["--text", "TEXT", "--max-tokens", "9999999", "--tokens-step", "1"], "--tokens-step 1: from 256 to 9999999"),
        (["--tokenized", "TEXT"], "--tokenized .*a.txt holds .txt: give a hub name"),
        (["-d", "TEXT"], "--dataset .*a.txt holds .txt: give a hub name, .* parquet, json or jsonl"),
        (
            ["-d", "JSONL", "-f", "body"],
            "--dataset .*: row 0 has no column body .its columns: n, text.; name one with --f",
        ),
        (["-d", "JSONL", "-f", "n"], "--dataset .*: row 0: column n holds int instead of text"),
        (["-d", "JSONL", "-s", "x"], "--subset x: --dataset .*a.jsonl is on disk and has none; leave the flag out"),
        (["--text", "TEXT", "-f", "x"], "--feature x goes with --dataset; leave it out with --text"),
        (["--text", "TEXT", "-s", "x"], "--subset x goes with --dataset or --tokenized; leave it out with --text"),
        (["--text", "TEXT", "--split", "x"], "--split x goes with --dataset or --tokenized; leave it out with --text"),
        (
            ["--tokenized", "x", "--save-tokenized", "y"],
            "--save-tokenized y goes with --text or --dataset; leave it out",
        ),
        (["--text", "TEXT", "--save-tokenized", "/proc/none"], "--save-tokenized /proc/none/.*: cannot be written"),
    ],
)
def test_bad_input_ends_with_a_message_that_names_it(model_folder, tmp_path, arguments, message):
    (tmp_path / "a.txt").write_text("All happy families are alike. " * 10)
    (tmp_path / "a.jsonl").write_text('{"text": "All happy families", "n": 1}\n')
    files = {"TEXT": str(tmp_path / "a.txt"), "JSONL": str(tmp_path / "a.jsonl")}
    arguments = [files.get(word, word) for word in arguments]
    model = [] if "-m" in arguments else ["-m", model_folder]
    output = [] if "--output-file" in arguments else ["--output-file", str(tmp_path / "o.csv")]
    with pytest.raises(SystemExit, match=message):
        eval_ppl.main([*model, *arguments, *output])


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--samples", "0"], "--samples: 0 must be a whole number, at least 1"),
        (["--bucket-tokens", "0"], "--bucket-tokens: 0 must be a whole number, at least 1"),
        (["--rope-theta", "nan"], "--rope-theta: nan must be a finite number"),
        (["--rope-theta", "-1"], "--rope-theta: -1 must be positive"),
    ],
)
def test_a_value_that_cannot_be_is_named_with_its_flag(capsys, arguments, message):
    with pytest.raises(SystemExit):
        eval_ppl.parse_arguments(["-m", "m", "--text", "x", *arguments])
    assert message in capsys.readouterr().err


def test_tokens_of_another_vocabulary_are_refused():
    with pytest.raises(ValueError, match="--text d has token id 300 but the model's vocabulary is 0 to 257"):
        documents.choose([document(torch.tensor([1, 300]))], 2, None, VOCABULARY)
    kept = document(torch.tensor([1, 2]), torch.tensor([-100, 257]))
    assert documents.choose([kept], 2, None, VOCABULARY) == [kept]


ROW = '{"input_ids": [1, 2, 3]}\n'


@pytest.mark.parametrize(
    "content, message",
    [
        ("", "has no rows: name another dataset"),
        (ROW + '{"input_ids": [1, 2', "cannot be read as a dataset .* line 2 is not JSON"),
        (ROW + '{"input_ids": null}\n', "row 1: input_ids must be a list of integers, got None"),
        ('{"input_ids": [1, null]}\n', r"row 0: input_ids must be a list of integers, got \[1, None\]"),
        ('{"input_ids": [1, 2.5]}\n', r"row 0: input_ids must be a list of integers, got \[1.0, 2.5\]"),
        ('{"input_ids": "abc"}\n', "row 0: input_ids must be a list of integers, got 'abc'"),
        ('{"input_ids": ["a", "b"]}\n', "row 0: input_ids must be a list of integers"),
        ('{"input_ids": [[1], [2, 3]]}\n', "row 0: input_ids must be a list of integers"),
        ('{"input_ids": 7}\n', "row 0: input_ids must be a list of integers, got 7"),
        ('{"input_ids": [1, 99999999999999999999]}\n', "row 0: input_ids must be a list of integers"),
        ("7\n", "cannot be read as a dataset .* line 1 is not a JSON object: 7"),
        ('{"input_ids": [1, -1, 2]}\n', "row 0 has token id -1 but the model's vocabulary is 0 to 257"),
        ('{"input_ids": [1, -100, 2]}\n', "row 0 has token id -100 but"),
        (ROW + '{"input_ids": [1, 2], "labels": [1, 258]}\n', "row 1 has label 258 but"),
        ('{"input_ids": [1, 2], "labels": [1, -1]}\n', "row 0 has label -1 but"),
        ('{"input_ids": [1, 2], "labels": [1]}\n', "row 0: labels has 1 values for 2 tokens"),
        ('{"input_ids": [1, 2], "attention_mask": [1]}\n', "row 0: attention_mask has 1 values for 2 tokens"),
    ],
)
def test_rows_that_are_no_tokens_are_refused_by_file_and_row(model_folder, tmp_path, content, message):
    file = tmp_path / "rows.jsonl"
    file.write_text(content)
    arguments = ["--tokenized", str(file), "--min-tokens", "2", "--output-file", str(tmp_path / "o.csv")]
    with pytest.raises(SystemExit, match=f"--tokenized {file}:? {message}"):
        eval_ppl.main(["-m", model_folder, *arguments])
    assert not (tmp_path / "o.csv").exists()


@pytest.mark.parametrize("name", ["a.txt.gz", "cut.txt.gz", "garbled.txt.gz", "a.txt.xz", "cut.txt.xz"])
def test_a_packed_text_that_cannot_be_unpacked_is_named(model_folder, tmp_path, name):
    file = tmp_path / name
    packed = (gzip if file.suffix == ".gz" else lzma).compress(b"All happy families are alike. " * 99)
    if "garbled" in name:
        packed = packed[:12] + b"\xff" * 20 + packed[32:]
    file.write_bytes(packed[:-20] if "cut" in name else packed if "garbled" in name else b"plain text")
    with pytest.raises(SystemExit, match=f"--text {file}: cannot be read .*is it cut off, or no {file.suffix}"):
        eval_ppl.main(["-m", model_folder, "--text", str(file), "--output-file", str(tmp_path / "o.csv")])


def test_an_output_layer_that_does_more_is_refused():
    from easy_context.evaluation.loading import check_output_layer

    model = tiny_llama()
    check_output_layer(model, "m")
    model.config.final_logit_softcapping = 30.0
    with pytest.raises(ValueError, match="final_logit_softcapping, which is not supported"):
        check_output_layer(model, "m")
