"""README and the pages of docs/ print what the raw files hold, at the precision that they print."""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from statistics import median

import pytest
from launching import REPOSITORY

README = REPOSITORY / "README.md"
PERFORMANCE, TRAINING, EVALUATION = (
    REPOSITORY / "docs" / f"{name}.md" for name in ("performance", "training", "evaluation")
)
SPEED, SMOLLM2 = (REPOSITORY / "docs" / "results" / name for name in ("performance", "SmolLM2-135M-128K"))
ATTENTION_COLUMNS = {
    "of limit": "of_limit",
    "× ring-flash-attn (FA2)": "vs_ring_flash_attn",
    "× context_parallel (cuDNN)": "vs_context_parallel",
    "TFLOP/s a GPU": "tflops_per_gpu",
}
STEP_COLUMNS = {
    "× best peer": "vs_best_peer",
    "× original": "vs_original",
    "MFU": "mfu",
    "tokens/s": "tokens_per_second_per_gpu",
    "tokens/s a GPU": "tokens_per_second_per_gpu",
    "s a layer": "seconds_per_layer",
    "GiB": "peak_memory_gib",
}
NUMBER = r"\d[\d,]*(?:\.\d+)?"


def rows_of(name: str) -> list[dict]:
    return json.loads((SPEED / f"{name}.json").read_text())["rows"]


def records(name: str) -> list[dict]:
    return [json.loads(line) for line in (SMOLLM2 / f"{name}.jsonl").read_text().splitlines()]


def table(document: Path, *header: str) -> list[dict[str, str]]:
    """Return the rows of the one table that has these columns, as text by column."""
    found = []
    for lines in re.findall(r"(?:^\|.*\n)+", document.read_text(), re.MULTILINE):
        head, _, *body = [[cell.strip() for cell in line.strip("|\n").split("|")] for line in lines.splitlines()]
        if set(header) <= set(head):
            found.append([dict(zip(head, cells, strict=True)) for cells in body])
    (rows,) = found
    return rows


def tokens(text: str) -> int:
    """Return a length such as 64K as a number of tokens."""
    return int(text.removesuffix("K")) * 1024


def assert_printed(text: str, value: float | None, where: object) -> None:
    """Check that `text`, a number perhaps with %, is `value` rounded to its digits; empty text is for None."""
    if value is None or not text:
        assert value is None and not text, f"{where}: {text!r} is printed, the raw file has {value}"
        return
    number, decimals = text.rstrip("% ").replace(",", ""), len(text.rstrip("% ").partition(".")[2])
    expected = f"{value * 100 if text.endswith('%') else value:.{decimals}f}"
    assert number == expected, f"{where}: {text} is printed, the raw file has {value}"


def assert_numbers(text: str, values: Iterable[float | None], where: object) -> None:
    """Check that the decimal numbers and percentages in a text are these values, in order."""
    printed = re.findall(rf"(?<![\w.]){NUMBER}(?: %|\b)", text)
    for number, value in zip(printed, values, strict=True):
        assert_printed(number, value, where)


def attention_row(seq_length: int, method: str, kernel: str) -> dict:
    rows = [row for row in rows_of("attention") if row["seq_length"] == seq_length]
    return next(row for row in rows if (row["method"], row["kernel"]) == (method, kernel))


def step_row(name: str, seq_length: int, depth: str, method: str) -> dict:
    rows = [row for row in rows_of(name) if (row["seq_length"], row["depth"]) == (seq_length, depth)]
    return next(row for row in rows if row["method"].startswith(method))


def slowest_alone(seq_length: int, mode: str, ranks: int, key: str = "of_limit") -> float | None:
    """Return a figure of the slower of two ranks alone under FlashAttention-4; None if not both were measured."""
    rows = [row for row in rows_of("attention_alone") if row["seq_length"] == seq_length]
    rows = [row for row in rows if row["kernel"] == "flash_attn_4" and f"of {ranks} alone" in row["method"]]
    rows = [row for row in rows if row["method"].startswith(f"{mode},")]
    return max(rows, key=lambda row: row["total_ms"])[key] if all("total_ms" in row for row in rows) else None


def test_attention():
    printed = table(PERFORMANCE, "tokens", "method", "TFLOP/s a GPU")
    measured = [row for row in rows_of("attention") if "total_ms" in row]
    assert len(printed) == len(measured), "every measured row is printed"
    for row in printed:
        raw = attention_row(tokens(row["tokens"]), row["method"], row["kernel"])
        for column, key in ATTENTION_COLUMNS.items():
            assert_printed(row[column], raw.get(key), row)


def test_ranks_alone():
    for row in table(PERFORMANCE, "two ranks alone", "two GPUs", "eight ranks alone"):
        seq_length, mode = tokens(row["tokens"]), row["mode"]
        assert_printed(row["two ranks alone"], slowest_alone(seq_length, mode, 2), row)
        assert_printed(row["eight ranks alone"], slowest_alone(seq_length, mode, 8), row)
        assert_printed(row["two GPUs"], attention_row(seq_length, mode, "flash_attn_4")["of_limit"], row)


def test_gathered_keys():
    for row in table(PERFORMANCE, "gathered keys, ms"):
        seq_length = tokens(row["tokens"])
        raw = [raw for raw in rows_of("gathered_keys_alone") if (raw["seq"], raw["W"]) == (seq_length, 2)]
        assert_printed(row["gathered keys, ms"], max(raw["total_ms"] for raw in raw), row)
        assert_printed(row["ring, ms"], slowest_alone(seq_length, "zigzag_ring_attn", 2, "total_ms"), row)


def test_misses():
    for row in table(PERFORMANCE, "target", "measured"):
        raw = attention_row(tokens(row["tokens"]), row["mode"], "flash_attn_4")
        assert_printed(row["measured"], raw[ATTENTION_COLUMNS[row["measure"]]], row)
        assert float(row["measured"]) < float(row["target"]), "what was reached is no miss"


@pytest.mark.parametrize(
    "header, files", [("tokens/s a GPU", ["train_step"]), ("tokens/s", ["train_step_one_gpu", "train_step_full_depth"])]
)
def test_whole_steps(header, files):
    printed = table(PERFORMANCE, "recipe", "MFU", header)
    measured = {
        (row["seq_length"], row["depth"], row["method"]): row
        for name in files
        for row in rows_of(name)
        if "step_seconds" in row
    }
    assert len(printed) == len(measured), "every measured row is printed"
    for row in printed:
        raw = measured[tokens(row.get("tokens", "128K")), row["layers"], row["recipe"]]
        assert row["kernel"] == raw["kernel"]
        for column in row.keys() & STEP_COLUMNS.keys():
            assert_printed(row[column], raw.get(STEP_COLUMNS[column]), row)


def test_memory_plans():
    measured = {
        (row["seq_length"], row["depth"], row["method"], row["kernel"]): row
        for file in SPEED.glob("memory_plans_*.json")
        for row in rows_of(file.stem)
    }
    for row in table(PERFORMANCE, "memory plan", "s a layer"):
        raw = measured[
            tokens(row["tokens"]), row["layers"], f"ours: data_parallel, {row['memory plan']}", row["kernel"]
        ]
        for column in row.keys() & STEP_COLUMNS.keys():
            assert_printed(row[column], raw.get(STEP_COLUMNS[column]), row)


def test_runs_beside_their_forecasts():
    files = ("memory_plans_32K_full_depth", "memory_plans_128K_full_depth_cudnn", "memory_plans_512K_one_layer")
    measured = [(row["peak_memory_gib"], row["step_seconds"]) for row in (rows_of(name)[0] for name in files)]
    for run in json.loads((SPEED / "train_with_memory_plans.json").read_text())["runs"]:
        step = run["steps"][-1]
        measured.append((step["peak_memory_bytes"] / 2**30, 131072 / step["tokens_per_second"]))
    for row, (gib, seconds) in zip(table(TRAINING, "GiB, forecast", "GiB, measured"), measured, strict=True):
        assert_printed(row["GiB, measured"], gib, row)
        assert_printed(row["seconds, measured"], seconds, row)


def checkpointing() -> dict[tuple[str, str], dict]:
    """Return the measured rows by --gradient-checkpointing and --keep-attention."""
    return {tuple(re.findall(r", (\w+), keep (\w+)", row["method"])[0]): row for row in rows_of("checkpointing")}


def test_checkpointing():
    places = {"GPU": "full", "host": "offload"}, {"GPU": "gpu", "host": "cpu", "computed again": "none"}
    measured, printed = checkpointing(), table(PERFORMANCE, "layer inputs", "attention outputs")
    assert len(printed) == len(measured)
    for row in printed:
        raw = measured[places[0][row["layer inputs"]], places[1][row["attention outputs"]]]
        assert_printed(row["time"], raw["step_seconds"] / measured["full", "gpu"]["step_seconds"], row)
        assert_printed(row["MFU"], raw["mfu"], row)
        assert_printed(row["GiB"], raw["peak_memory_gib"], row)


def adamw8bit_run(seq_length: int) -> dict:
    """Return the run of rows of this length: its layers, what train.py said, its steps."""
    runs = json.loads((SPEED / "train_adamw8bit_one_gpu.json").read_text())["runs"]
    return next(run for run in runs if run["seq_length"] == seq_length)


def median_of_steps(run: dict, key: str) -> float:
    """Return the median over all steps but the first, which compiles kernels, unless it is the only one."""
    return median(step[key] for step in run["steps"][1:] or run["steps"])


def test_whole_steps_on_one_gpu():
    for row in table(TRAINING, "tokens", "first step", "later steps"):
        run = adamw8bit_run(tokens(row["tokens"]))
        peaks = [step["peak_memory_bytes"] / 2**30 for step in run["steps"]]
        assert run["layers"] == 32 and f"memory plan: {row['memory plan'].split('`')[1]}" in run["said"]
        assert_printed(row["first step"], peaks[0], row)
        assert_printed(row["later steps"], peaks[-1] if len(peaks) > 1 else None, row)
        assert_printed(row["a step"], run["seq_length"] / median_of_steps(run, "tokens_per_second"), row)
        assert_printed(row["tokens/s"], median_of_steps(run, "tokens_per_second"), row)
        assert_printed(row["MFU"], median_of_steps(run, "mfu"), row)
        forecast = re.search(r"about (\d+) of \d+ GiB on each GPU.*; about (\d+) s for a micro-batch", run["said"])
        assert forecast and forecast.groups() == (row["GiB: forecast"], row["seconds: forecast"])


def test_sentences_about_whole_steps_on_one_gpu():
    run, two_layers = adamw8bit_run(32768), adamw8bit_run(700416)
    seconds = [run["seq_length"] / step["tokens_per_second"] for step in run["steps"]]
    peaks = [step["peak_memory_bytes"] / 2**30 for step in run["steps"]]
    saved_after = 3
    between = run["steps"][saved_after]["time"] - run["steps"][saved_after - 1]["time"]
    expected = {
        r"by (\d+) GiB at 32K": [peaks[-1] - peaks[0]],
        r"first step (\d+) s longer": [seconds[0] - median(seconds[1:])],
        r"made training wait (\d+) s": [between - seconds[saved_after]],
        r"needed ([\d.]+) GiB in the first step": [two_layers["steps"][0]["peak_memory_bytes"] / 2**30],
        r"later steps is (\d+) GiB": [float(re.findall(r"about (\d+) of \d+ GiB on each GPU", two_layers["said"])[0])],
    }
    assert_sentences(TRAINING, expected)


def test_packed_documents():
    columns = {"pairs": "pairs_of_dense", "× dense": "vs_dense", "× apart": "vs_apart", "of pairs": "of_pairs"}
    columns |= {f"{run}, ms": f"{run}_ms" for run in ("dense", "packed", "apart")} | {"documents": "documents"}
    printed, measured = table(PERFORMANCE, "mean document", "× apart"), rows_of("packed_one_gpu")
    assert len(printed) == len(measured)
    for row, raw in zip(printed, measured, strict=True):
        assert (tokens(row["tokens"]), row["mean document"]) == (raw["seq_length"], raw["mean_document"])
        assert row["kernel"] == raw["kernel"]
        for column, key in columns.items():
            assert_printed(row[column], raw[key], row)


def test_sentences_about_evaluation():
    (row,) = rows_of("evaluation_one_gpu")
    expected = {
        r"measured ([\d.]+) GiB on one H200": [row["peak_memory_gib"]],
        r"for these two layers is ([\d.]+) GiB": [row["forecast_gib"]],
        r"A pass took ([\d.]+) s": [row["seconds"]],
    }
    assert row["layers"] == 2 and row["seq_length"] == 2**20
    assert_sentences(EVALUATION, expected)


def test_speeds_in_the_readme():
    fa4_64k, fa4_128k = (attention_row(length, "zigzag_ring_attn", "flash_attn_4") for length in (65536, 131072))
    on_fa2, on_cudnn = (attention_row(65536, "zigzag_ring_attn", kernel) for kernel in ("torch_flash", "cudnn"))
    two, two_peer = (step_row("train_step", 131072, "32 from 2, 4", method) for method in ("ours", "ALST"))
    short, original = (step_row("train_step_one_gpu", 32768, "32 from 4, 8", m) for m in ("ours", "original recipe"))
    long, liger = (step_row("train_step_one_gpu", 131072, "32 from 4, 8", m) for m in ("ours", "original + Liger"))
    whole = step_row("train_step_full_depth", 131072, "32", "ours")
    whole_steps = [adamw8bit_run(length) for length in (32768, 524288)]
    speed = "tokens_per_second_per_gpu"
    against_attention = [fa4_64k["vs_ring_flash_attn"], on_fa2["vs_ring_flash_attn"]]
    against_attention += [fa4_64k["vs_context_parallel"], on_cudnn["vs_context_parallel"]]
    expected = [
        ([fa4_64k["tflops_per_gpu"], fa4_64k["of_limit"]], against_attention),
        ([fa4_128k["tflops_per_gpu"], fa4_128k["of_limit"]], []),
        ([two[speed], two["mfu"]], [two["vs_best_peer"], two_peer[speed], two_peer["mfu"]]),
        ([short[speed], short["mfu"]], [short["vs_original"], original[speed], original["mfu"]]),
        ([long[speed], long["mfu"]], [long["vs_best_peer"], liger[speed], liger["mfu"]]),
        ([whole[speed], whole["mfu"], whole["peak_memory_gib"]], []),
        *(([median_of_steps(run, key) for key in ("tokens_per_second", "mfu")], []) for run in whole_steps),
    ]
    for row, (ours, against) in zip(table(README, "on", "what", "against"), expected, strict=True):
        assert_numbers(row["ours (FlashAttention-4)"], ours, row)
        assert_numbers(row["against"], against, row)


def test_perplexities():
    printed = table(README, "perplexity at positions")
    assert len(printed) == 4
    models = {"original": "SmolLM2-135M-Instruct (original)", "extended": "extended to 128K"}
    for row in printed:
        text, _, model = row["perplexity at positions"].partition(", ")
        file = {"*Emma*": "perplexity.json", "*Mansfield Park*": "mansfield_park.json"}[text]
        measured = json.loads((SMOLLM2 / file).read_text())["models"][models[model]]["by_position"]
        columns = list(row)[1:]
        assert columns == [f"{part['from'] // 1024}-{part['to'] // 1024}K" for part in measured]
        for column, part in zip(columns, measured, strict=True):
            assert_printed(row[column], part["perplexity"], row)


def right_of(name: str, length: int | None = None) -> tuple[int, int]:
    """Return how many prompts of a needle test were answered exactly, and how many there were."""
    cells = [cell for cell in records(name) if "samples" in cell and length in (None, cell["length"])]
    answers = [sample["exact"] for cell in cells for sample in cell["samples"]]
    return sum(answers), len(answers)


def share(right_and_all: tuple[int, int]) -> float:
    return right_and_all[0] / right_and_all[1]


def cost(**changed: str) -> float:
    """Return the share of time that another place for layer inputs or attention outputs costs."""
    measured = checkpointing()
    where = {"inputs": "full", "outputs": "gpu", **changed}
    raw = measured[where["inputs"], where["outputs"]]
    return raw["step_seconds"] / measured["full", "gpu"]["step_seconds"] - 1


def assert_sentences(document: Path, expected: dict[str, Iterable[float]]) -> None:
    """Check that the groups of each pattern, found once in the document whatever its line breaks, are these values."""
    for pattern, values in expected.items():
        found = re.findall(pattern.replace(" ", r"\s+"), document.read_text())
        assert len(found) == 1, f"{document.name} has {len(found)} sentences like {pattern}"
        for text, value in zip([found[0]] if isinstance(found[0], str) else found[0], values, strict=True):
            assert_printed(text, value, pattern)


def test_sentences_in_the_readme():
    steps = [record for name in ("metrics-64K", "metrics-128K") for record in records(name)]
    tokens_in_all, learned = (sum(step[key] for step in steps) / 1e6 for key in ("tokens", "valid_tokens"))
    at_4k, at_8k, at_16k, at_32k = (right_of("needle-original-cells", k * 1024) for k in (4, 8, 16, 32))
    assert (share(at_4k), share(at_16k), share(at_32k)) == (1, 0, 0)
    assert at_4k[1] == at_8k[1] == at_16k[1] == at_32k[1]
    expected = {
        r"in two novels in (\d+) of (\d+) prompts": right_of("needle-cells"),
        r"in all prompts at 4K, in (\d+ %) at 8K, and in none at 16K and 32K \((\d+) prompts each": (
            share(at_8k),
            at_8k[1],
        ),
        r"With eight distractors, (\d+ %) of the extended model's answers are right": [
            share(right_of("needle-distractors-cells"))
        ],
        r"(\d+) steps of 64K and (\d+) steps of 128K": [len(records(f"metrics-{n}K")) for n in (64, 128)],
        r"([\d.]+) M tokens, of which ([\d.]+) M count in the loss": (tokens_in_all, learned),
        r"layer inputs in host memory costs ([\d.]+ %) of the time": [cost(inputs="offload")],
        r"attention outputs there as well ([\d.]+ %)": [cost(inputs="offload", outputs="cpu")],
        r"Computing attention a second time would cost (\d+ %)": [cost(outputs="none")],
    }
    assert_sentences(README, expected)


def test_sentences_about_performance():
    on_fa4, on_fa2 = (attention_row(65536, "one GPU", kernel) for kernel in ("flash_attn_4", "torch_flash"))
    zigzag_fa2, zigzag_cudnn = (attention_row(65536, "zigzag_ring_attn", k) for k in ("torch_flash", "cudnn"))
    one, whole = (
        step_row("train_step_one_gpu", 131072, "32 from 4, 8", "ours"),
        step_row("train_step_full_depth", 131072, "32", "ours"),
    )
    two, speed = step_row("train_step", 131072, "32 from 2, 4", "ours"), "tokens_per_second_per_gpu"
    expected = {
        r"FlashAttention-4 alone is ([\d.]+) × PyTorch's FA2": [on_fa2["total_ms"] / on_fa4["total_ms"]],
        r"at 64K is ([\d.]+) × ring-flash-attn \(`torch_flash`\)": [zigzag_fa2["vs_ring_flash_attn"]],
        r"and ([\d.]+) × context_parallel \(`cudnn`\)": [zigzag_cudnn["vs_context_parallel"]],
        r"from 4 and 8 layers \((\d+) tokens/s\) and the whole model \((\d+)\)": (one[speed], whole[speed]),
        r"reaches (\d+) of 989 TFLOP/s": [attention_row(131072, "one GPU", "flash_attn_4")["tflops_per_gpu"]],
        r"10 points lower \(([\d.]+ %) on one GPU, ([\d.]+ %) on two\)": (one["mfu"], two["mfu"]),
    }
    assert_sentences(PERFORMANCE, expected)


def test_sentences_about_saving():
    (row,) = rows_of("saving")
    expected = {
        r"([\d.]+) B parameters on one H200 \(([\d.]+) GB,": (row["parameters"] / 1e9, row["gigabytes"]),
        r"training waited (\d+) s": [row["waited_seconds"]],
        r"files were complete after (\d+) s": [row["write_seconds"]],
        r"steps meanwhile took (\d+ %) longer": [row["slowest_step_seconds"] / row["step_seconds"] - 1],
    }
    assert_sentences(TRAINING, expected)


def test_losses_of_recipes_agree_as_the_page_says():
    (printed,) = re.findall(r"agree to within (\S+)\.", PERFORMANCE.read_text())
    for name in ("train_step", "train_step_one_gpu"):
        losses: dict[tuple[int, str], list[float]] = {}
        for row in rows_of(name):
            if "loss" in row:
                losses.setdefault((row["seq_length"], row["depth"]), []).append(row["loss"])
        assert losses and all(max(group) - min(group) < float(printed) for group in losses.values())


@pytest.mark.parametrize(
    "text, value", [("0.955", 0.955), ("42,664", 42664.3), ("52.7%", 0.5268), ("38.0 %", 0.3805), ("8883", 8883.4)]
)
def test_a_changed_digit_is_seen(text, value):
    assert_printed(text, value, "as measured")
    for at, character in enumerate(text):
        for digit in set("0123456789") - {character} if character.isdigit() else ():
            with pytest.raises(AssertionError):
                assert_printed(text[:at] + digit + text[at + 1 :], value, "changed")


def test_numbers_of_a_cell_are_seen_in_order():
    cell, values = "1.35 × ALST on cuDNN (2541, 38.0 %), FA2", [1.3494, 2540.7, 0.3805]
    assert_numbers(cell, values, "as measured")
    for changed in (cell.replace("1.35", "1.36"), cell.replace("2541, ", ""), f"{cell} 3"):
        with pytest.raises((AssertionError, ValueError)):
            assert_numbers(changed, values, "changed")
