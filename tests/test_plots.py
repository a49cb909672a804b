"""Pictures come out of every kind of result file, and other files are refused by name."""

import json
import math

import matplotlib.image
import pytest

import plot
from easy_context.evaluation import plots, results

PERPLEXITY_CSV = """model,document,length,tokens,loss,perplexity
runs/a,x.txt,256,255,2.0,7.389
runs/a,y.txt,256,85,4.0,54.6
runs/a,x.txt,512,511,2.5,12.18
runs/a,z.txt,512,0,nan,nan
"""


@pytest.fixture
def csv_file(tmp_path):
    file = tmp_path / "p.csv"
    file.write_text(PERPLEXITY_CSV)
    return file


def ink(file):
    """Size in pixels, and the share of pixels that are not white: a picture with something on it."""
    image = matplotlib.image.imread(file)
    return image.shape[1], image.shape[0], float((image[..., :3].min(axis=2) < 0.9).mean())


def test_lengths_are_labelled_as_people_write_them():
    labels = {n: plots.tokens_label(n) for n in (512, 750, 1024, 1536, 4096, 10_000, 50_000, 131_072, 199_700, 800_000)}
    assert list(labels.values()) == ["512", "750", "1K", "1.5K", "4K", "10K", "50K", "128K", "200K", "800K"]
    assert [plots.tokens_label(n) for n in (1_000_000, 2**20, 1_500_000)] == ["1M", "1M", "1.5M"]


def test_perplexity_is_pooled_over_tokens(csv_file):
    curve = results.read_perplexity(csv_file)["runs/a"]
    loss, tokens = curve[256]
    assert tokens == 340 and loss / tokens == pytest.approx((2 * 255 + 4 * 85) / 340)
    assert curve[512] == (pytest.approx(2.5 * 511), 511)


def test_perplexity_of_several_models_in_one_picture(csv_file, tmp_path):
    other = tmp_path / "q.csv"
    other.write_text(PERPLEXITY_CSV.replace("runs/a", "later/a").replace("2.5", "12.5"))
    plot.main(["perplexity", str(csv_file), str(other), "--title", "two"])
    width, height, share = ink(tmp_path / "p.png")
    assert width > 800 and height > 500 and share > 0.01
    assert plot.labelled(["runs/a", "later/a"], None) == ["runs/a", "later/a"]
    assert plot.labelled(["runs/a", "later/b"], None) == ["a", "b"]
    with pytest.raises(SystemExit, match="--labels: 1 for 2 curves"):
        plot.main(["perplexity", str(csv_file), str(other), "--labels", "one"])


def test_a_heatmap_of_twenty_by_eleven_cells_keeps_its_numbers_apart(tmp_path):
    cells = [
        {"task": "needle", "length": 50_000 * i, "depth": j / 10, "accuracy": (i + j) / 30}
        for i in range(1, 21)
        for j in range(11)
    ]
    file = tmp_path / "cells.jsonl"
    file.write_text("\n".join(json.dumps(record) for record in ({"settings": {}}, *cells)) + "\n")
    plot.main(["needle", str(file), "-o", str(tmp_path / "n.png")])
    width, height, share = ink(tmp_path / "n.png")
    assert width > 20 * 70 and height > 11 * 50 and share > 0.3  # room for "100" in 9 points at 150 dots an inch


def test_cells_from_a_csv_without_depth(tmp_path):
    file = tmp_path / "cells.csv"
    file.write_text("task,length,depth,accuracy,item_accuracy\nvt,4096,,0.5,0.7\nvt,8192,,0.25,0.5\n")
    assert results.read_cells(file)[1] == {"task": "vt", "length": 8192, "depth": None, "accuracy": 0.25}
    plot.main(["needle", str(file)])
    assert ink(tmp_path / "cells.png")[2] > 0.1
    file.write_text("task,length,depth,accuracy,item_accuracy\nvt,4096,,0.5,0.7\ncw,8192,,0.25,0.5\n")
    with pytest.raises(SystemExit, match="cells.csv holds cw, vt; draw one task at a time"):
        plot.main(["needle", str(file)])


def test_losses_of_two_stages(tmp_path):
    files = []
    for stage in (1, 2):
        folder = tmp_path / f"stage{stage}"
        folder.mkdir()
        files.append(folder / "metrics.jsonl")
        records = [{"step": step, "loss": 5 / stage - math.log(step), "tokens": 1} for step in range(1, 60)]
        files[-1].write_text("\n".join(map(json.dumps, [*records, {"step": 60, "eval_loss": 1.0}])))
    assert len(results.read_metrics(files[0])) == 59
    plot.main(["loss", *map(str, files), "-o", str(tmp_path / "deep" / "l.png")])
    assert ink(tmp_path / "deep" / "l.png")[2] > 0.01
    assert plots.running_mean([1.0, 3.0, 5.0], 2) == [1.0, 2.0, 4.0]


@pytest.mark.parametrize(
    "kind, content, message",
    [
        ("perplexity", "a,b\n1,2\n", "lacks the columns .*not a CSV of eval_ppl.py"),
        ("perplexity", "model,length,tokens,loss\n", "has no rows"),
        ("needle", '{"settings": {}}\n', "holds no cells of eval_needle.py"),
        ("needle", "a,b\n1,2\n", "lacks the columns .*: it is not a JSONL or CSV of eval_needle.py"),
        ("needle", "", "lacks the columns"),
        ("loss", '{"a": 1}\n', "not a metrics.jsonl of train.py"),
        ("loss", "no JSON\n", "f, line 1 is not JSON"),
        ("loss", "no JSON", "f, line 1 is not JSON"),
        ("loss", '{"step": 1, "loss": 2}\n{"step": 2\n{"step": 3, "loss": 2}\n', "f, line 2 is not JSON"),
        ("loss", '{"step": 1, "loss": "low"}\n', "f, line 1: loss 'low' must be a number"),
        ("loss", "3\n", "f, line 1 is not a JSON object"),
        ("loss", "\udcff\udcfe", "f is no text file"),
        ("needle", "{\udcff\n", "f is no text file"),
        ("perplexity", "\udcff\n", "f is no text file"),
        ("needle", '{"settings": {}}\n{"accuracy": 1}\n', "f, line 2: no task"),
        (
            "needle",
            '{"task": "t", "length": 8, "depth": 0, "accuracy": 1.5}\n',
            "line 1: accuracy 1.5 must be .* 0 to 1",
        ),
        ("needle", '{"task": "t", "length": 8.5, "depth": 0, "accuracy": 1}\n', "line 1: length 8.5 must be a whole"),
        ("needle", '{"task": "t", "length": 8, "depth": "x", "accuracy": 1}\n', "line 1: depth 'x' must be a number"),
        ("needle", '{"task": "t", "depth": 0, "accuracy": 1}\n', "line 1: length None must be a whole number"),
        ("needle", "task,length,depth,accuracy\nt,8,0\n", "f, line 2 does not have the 4 fields"),
        ("needle", "task,length,depth,accuracy\n,8,0,1\n", "f, line 2: no task"),
        ("perplexity", "model,length,tokens,loss\nm,8,7\n", "f, line 2 does not have the 4 fields"),
        ("perplexity", "model,length,tokens,loss\nm,8,7,1,1\n", "f, line 2 does not have the 4 fields"),
        ("perplexity", "model,length,tokens,loss\nm,8,7,1\nm,x,7,1\n", "f, line 3: length 'x' must be a whole number"),
        ("perplexity", "model,length,tokens,loss\nm,8,7,nan\n", "f, line 2: loss 'nan' must be a number"),
        ("perplexity", "model,length,tokens,loss\nm,8,7,inf\n", "f, line 2: loss 'inf' must be a number"),
        ("perplexity", "model,length,tokens,loss\nm,8,-7,1\n", "f, line 2: tokens '-7' must be a whole number"),
        ("perplexity", "model,length,tokens,loss\nm,8,0,nan\nm,9,0,nan\n", "m has no scored token at any length"),
    ],
)
def test_other_files_are_refused(tmp_path, kind, content, message):
    (tmp_path / "f").write_text(content, errors="surrogateescape")
    with pytest.raises(SystemExit, match=message):
        plot.main([kind, str(tmp_path / "f")])
    with pytest.raises(SystemExit, match="absent: no such file"):
        plot.main([kind, str(tmp_path / "absent")])


def needle_file(folder, name="cells.jsonl", task="t"):
    folder.mkdir(exist_ok=True)
    file = folder / name
    file.write_text(json.dumps({"task": task, "length": 8, "depth": 0.5, "accuracy": 0.5}) + "\n")
    return str(file)


def test_needle_results_are_drawn_one_by_one(tmp_path, capsys):
    files = [needle_file(tmp_path / "a"), needle_file(tmp_path / "b", task="other")]
    plot.main(["needle", *files])
    pictures = [tmp_path / name / "cells.png" for name in "ab"]
    assert all(ink(picture)[2] > 0.1 for picture in pictures)
    assert capsys.readouterr().out == f"wrote {pictures[0]}, {pictures[1]}\n"
    with pytest.raises(SystemExit, match="two of them would be .*one.png; draw them one by one"):
        plot.main(["needle", *files, "-o", str(tmp_path / "one.png")])
    with pytest.raises(SystemExit, match="cells.jsonl is given twice; leave one out"):
        plot.main(["needle", files[0], files[0]])
    with pytest.raises(SystemExit, match="--labels name curves, and needle draws none"):
        plot.main(["needle", files[0], "--labels", "a"])


def test_the_name_that_is_printed_is_the_files(tmp_path, capsys):
    file = needle_file(tmp_path / "a")
    (tmp_path / "folder").mkdir()
    for output, picture in (("folder", "folder/cells.png"), ("bare", "bare.png"), ("x.svg", "x.svg")):
        plot.main(["needle", file, "-o", str(tmp_path / output)])
        assert capsys.readouterr().out == f"wrote {tmp_path / picture}\n"
        assert (tmp_path / picture).is_file()
    assert not (tmp_path / "folder.png").exists()
    with pytest.raises(SystemExit, match="--output x.csv: .csv is no kind of picture"):
        plot.main(["needle", file, "-o", "x.csv"])
    named_png = needle_file(tmp_path, "cells.png")
    with pytest.raises(SystemExit, match="would replace what is drawn"):
        plot.main(["needle", named_png])


def test_a_loss_that_was_not_finite_is_a_gap(tmp_path):
    file = tmp_path / "metrics.jsonl"
    records = [{"step": step, "loss": None if step == 20 else 1 / step} for step in range(1, 40)]
    file.write_text("".join(json.dumps(record) + "\n" for record in records))  # as train.py writes NaN
    losses = [record["loss"] for record in results.read_metrics(file)]
    assert [math.isnan(loss) for loss in losses] == [step == 20 for step in range(1, 40)]
    plot.main(["loss", str(file)])
    assert ink(tmp_path / "metrics.png")[2] > 0.01


def test_half_a_last_line_is_left_out_with_a_note(tmp_path, capsys):
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "loss": NaN}\n{"step": 3, "lo')
    assert [record["step"] for record in results.read_metrics(file)] == [1, 2]
    assert capsys.readouterr().err == f"{file}, line 3 is unfinished and left out\n"
    with open(needle_file(tmp_path), "a") as opened:
        opened.write('{"task": "t", "len')
    assert len(results.read_cells(tmp_path / "cells.jsonl")) == 1


def test_one_model_in_two_files_is_two_curves_with_two_labels(csv_file, tmp_path, monkeypatch):
    other = tmp_path / "q.csv"
    other.write_text(PERPLEXITY_CSV)
    drawn = []
    monkeypatch.setattr(plots, "draw_perplexity", lambda curves, *rest: drawn.extend(label for label, _ in curves))
    plot.main(["perplexity", str(csv_file), str(other)])
    assert len(set(drawn)) == 2 and "p.csv" in drawn[0] and "q.csv" in drawn[1]
    with pytest.raises(SystemExit, match="p.csv is given twice"):
        plot.main(["perplexity", str(csv_file), str(csv_file)])
