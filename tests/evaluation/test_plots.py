"""plot.py: pictures of every kind of result file, with axes, labels and titles that fit."""

import json
import math

import matplotlib.image
import numpy as np
import pytest
from matplotlib.figure import Figure

import plot
from easy_context.data.preparation.report import length_edges
from easy_context.evaluation import axes, plots, results

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


def drawn(monkeypatch, *arguments):
    """The figure of a call of plot.py, and its axes, drawn but not saved."""
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *rest, **options: figures.append(figure))
    plot.main([str(word) for word in arguments])
    (figure,) = figures
    figure.canvas.draw()
    return figure, figure.axes[0]


def tick_labels(axis):
    return [label.get_text() for label in axis.get_ticklabels() if label.get_text()]


def assert_labels_are_apart(axis):
    boxes = [label.get_window_extent() for label in axis.get_ticklabels() if label.get_text()]
    assert len(boxes) > 1
    for i, box in enumerate(boxes):
        assert not any(box.overlaps(other) for other in boxes[i + 1 :]), tick_labels(axis)


def test_lengths_are_labelled_as_people_write_them():
    labels = {
        **{512: "512", 750: "750", 1000: "1000", 1024: "1K", 1536: "1.5K", 4000: "4000", 4096: "4K", 9999: "9999"},
        **{10_000: "10,000", 50_000: "50,000", 65_536: "64K", 128_000: "128,000", 131_072: "128K", 199_700: "199,700"},
        **{512_000: "512,000", 2**19: "512K", 1_000_000: "1,000,000", 1_024_000: "1,024,000", 2**20: "1M"},
        **{1_500_000: "1,500,000", 3 * 2**19: "1.5M", 2**20 + 2**15: "1056K"},
    }
    assert {n: axes.tokens_label(n) for n in labels} == labels


def test_no_two_lengths_share_a_label():
    lengths = {n * unit for n in range(1, 300) for unit in (1, 100, 500, 512, 1000, 1024, 10**6, 2**18, 2**20)}
    assert len({axes.tokens_label(n) for n in lengths}) == len(lengths)


def perplexity_file(file, curves, trained=None):
    """A CSV of curves: model -> (length -> loss)."""
    rows = [
        f"{model},x.txt,{length},{length - 1},{loss},0,{(trained or {}).get(model, '')}"
        for model, losses in curves.items()
        for length, loss in losses.items()
    ]
    file.write_text("\n".join(["model,document,length,tokens,loss,perplexity,trained_length", *rows]) + "\n")
    return file


GRID = range(4096, 196608 + 1, 4096)
BROKEN = {"before": {n: min(3.2 + n / 8192, 8.7) for n in GRID}, "after": {n: 3.28 for n in GRID}}


def dotted_lines(axes):
    return {line.get_xdata()[0]: line for line in axes.lines if line.get_linestyle() == ":"}


def test_perplexity_marks_trained_lengths_and_powers_of_two(tmp_path, monkeypatch):
    file = perplexity_file(tmp_path / "p.csv", BROKEN, {"before": 8192, "after": 131072})
    _, axes = drawn(monkeypatch, "perplexity", file)
    assert tick_labels(axes.xaxis) == ["4K", "8K", "16K", "32K", "64K", "128K"]
    assert axes.get_xlabel() == "context length (tokens, K = 1024)"
    before, after = axes.lines[:2]
    marks = dotted_lines(axes)
    assert {n: line.get_color() for n, line in marks.items()} == {8192: before.get_color(), 131072: after.get_color()}
    legend = [text.get_text() for text in axes.get_legend().get_texts()]
    assert legend == ["before", "after", "trained length 8K", "trained length 128K"]
    assert axes.get_title() == "Perplexity by context length"
    # A flat curve near 27 has a label between it and half as much again.
    near = [value for value in map(float, tick_labels(axes.yaxis)) if 27 / 1.5 <= value <= 27 * 1.5]
    assert axes.get_yscale() == "log" and near
    assert_labels_are_apart(axes.yaxis)


def test_trained_lengths_from_the_flag_win_and_one_shared_by_curves_has_no_curves_colour(tmp_path, monkeypatch):
    file = perplexity_file(tmp_path / "p.csv", BROKEN, {"before": 8192})
    _, axes = drawn(monkeypatch, "perplexity", file, "--trained-length", "16384")
    ((length, line),) = dotted_lines(axes).items()
    assert length == 16384 and line.get_color() not in {curve.get_color() for curve in axes.lines[:2]}
    _, axes = drawn(monkeypatch, "perplexity", file, "--trained-length", "8192", "1048576")
    assert set(dotted_lines(axes)) == {8192}  # the other lies beyond what was measured
    with pytest.raises(SystemExit, match="--trained-length: 3 for 2 curves .before, after."):
        plot.main(["perplexity", str(file), "--trained-length", "1", "2", "3"])


@pytest.mark.parametrize(
    "shortest, step, count", [(1000, 1000, 100), (50_000, 50_000, 20), (4096, 4096, 3), (32, 32, 8)]
)
def test_labels_of_lengths_are_apart(tmp_path, monkeypatch, shortest, step, count):
    lengths = range(shortest, shortest + step * count, step)
    file = perplexity_file(tmp_path / "p.csv", {"m": {n: 2.0 for n in lengths}})
    _, axes = drawn(monkeypatch, "perplexity", file)
    assert_labels_are_apart(axes.xaxis)
    cells = [{"task": "needle", "length": n, "depth": 0.5, "accuracy": 1} for n in list(lengths)[:20]]
    (tmp_path / "cells.jsonl").write_text("\n".join(map(json.dumps, cells)))
    _, axes = drawn(monkeypatch, "needle", tmp_path / "cells.jsonl")
    labels = axes.get_xticklabels()
    if labels[0].get_rotation() == 0:
        assert_labels_are_apart(axes.xaxis)
    assert [label.get_text() for label in labels] == [plots.tokens_label(cell["length"]) for cell in cells]


ORIGINALS = """,50000,100000,150000
output/7B_rope_500M,1.84,1.73,nan
NousResearch/other,2.5,3.5,4.5
"""


def test_the_originals_call_and_file(tmp_path, monkeypatch):
    file = tmp_path / "debug.csv"
    file.write_text(ORIGINALS)
    _, axes = drawn(monkeypatch, file, "--xmax", "550000", "--ymax", "2", "--ymin", "1.5")
    assert axes.get_xlim()[1] == 550000 and axes.get_ylim() == (1.5, 2)
    first, second = axes.lines
    assert first.get_label() == "7B_rope_500M"
    assert first.get_xydata().tolist() == [[50000, pytest.approx(1.84)], [100000, pytest.approx(1.73)]]
    assert second.get_ydata().tolist() == [pytest.approx(value) for value in (2.5, 3.5, 4.5)]
    assert tick_labels(axes.xaxis) == ["50,000", "100,000"]  # of the points that are seen
    # Beside a file of ours, and with the word in front.
    ours = perplexity_file(tmp_path / "p.csv", {"m": {50000: 0.5, 100000: 0.5}})
    _, axes = drawn(monkeypatch, "perplexity", file, ours)
    assert [line.get_label() for line in axes.lines] == ["7B_rope_500M", "other", "m"]
    with pytest.raises(SystemExit, match="debug.cvs: no such file .and no kind of result: perplexity, needle, loss"):
        plot.main([str(tmp_path / "debug.cvs")])


def test_limits_of_the_axes(tmp_path, monkeypatch):
    file = perplexity_file(tmp_path / "p.csv", BROKEN)
    _, axes = drawn(monkeypatch, file, "--xmin", "0", "--ymin", "0", "--ymax", "100")
    assert axes.get_xscale() == axes.get_yscale() == "linear"  # a logarithmic axis has no 0
    assert axes.get_xlim()[0] == 0 and axes.get_ylim() == (0, 100)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 5.0}\n{"step": 2, "loss": null}\n')
    _, axes = drawn(monkeypatch, "loss", tmp_path / "metrics.jsonl", "--ymin", "0")
    assert axes.get_ylim()[0] == 0 and axes.get_title() == "Training loss"
    for arguments, message in (
        (["--xmin", "9", "--xmax", "9"], "--xmin 9 must be below --xmax 9"),
        (
            ["--xmax", "100"],
            "--xmax 100: no point lies there; x goes from 4096 to 196608 and y from 26.5758 to .*",
        ),
        (["--xmin", "5e5", "--ymax", "9"], "--xmin 500000 --ymax 9: no point lies there"),
    ):
        with pytest.raises(SystemExit, match=message):
            plot.main([str(file), *arguments])
    with pytest.raises(SystemExit, match="--ymin 6: no point lies there; x goes from 1 to 1 and y from 5 to 5"):
        plot.main(["loss", str(tmp_path / "metrics.jsonl"), "--ymin", "6"])
    cells = needle_file(tmp_path / "a")
    with pytest.raises(SystemExit, match="--ymax is not for needle; leave it out"):
        plot.main(["needle", cells, "--ymax", "1"])
    with pytest.raises(SystemExit, match="--trained-length is not for needle; leave it out"):
        plot.main(["needle", cells, "--trained-length", "1"])
    with pytest.raises(SystemExit, match="loss: name the files to draw after it"):
        plot.main(["loss"])


def test_needle_titles_name_model_task_and_lengths(tmp_path, monkeypatch):
    file = tmp_path / "cells.jsonl"
    cells = [{"task": "needle", "length": n, "depth": 0.5, "accuracy": 1} for n in (8192, 131072)]
    lines = [{"model": "output/SmolLM2-128K", "settings": {}}, *cells]
    file.write_text("\n".join(map(json.dumps, lines)))
    assert drawn(monkeypatch, "needle", file)[1].get_title() == "SmolLM2-128K: needle, 8K to 128K tokens"
    file.write_text("\n".join(map(json.dumps, [{"settings": {}}, cells[0]])))  # of an earlier version
    assert drawn(monkeypatch, "needle", file)[1].get_title() == "needle, 8K tokens"
    assert drawn(monkeypatch, "needle", file, "--title", "T")[1].get_title() == "T"


@pytest.mark.parametrize(
    "words, message",
    [
        (["--trained", "512"], "unrecognized arguments: --trained"),  # begins like a flag
        (["--trained-length", "0"], "--trained-length: 0 must be a whole number, at least 1"),
        (["--ymin", "nan"], "--ymin: nan must be a finite number"),
    ],
)
def test_flags_that_cannot_be_are_named(csv_file, capsys, words, message):
    with pytest.raises(SystemExit):
        plot.main([str(csv_file), *words])
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["perplexity", "needle", "loss"])
def test_files_that_do_not_fit_end_with_a_message(tmp_path, kind):
    with pytest.raises(SystemExit, match="plot.py: .*absent: no such file$"):
        plot.main([kind, str(tmp_path / "absent")])
    (tmp_path / "f").write_text('{"foo": 1}\n')
    with pytest.raises(SystemExit, match="plot.py: .*f(, line 1| lacks)"):
        plot.main([kind, str(tmp_path / "f")])
    assert [file.name for file in tmp_path.iterdir()] == ["f"]


def test_perplexity_of_several_models_in_one_picture(csv_file, tmp_path):
    other = tmp_path / "q.csv"
    other.write_text(PERPLEXITY_CSV.replace("runs/a", "later/a").replace("2.5", "12.5"))
    plot.main(["perplexity", str(csv_file), str(other), "--title", "two"])
    width, height, share = ink(tmp_path / "p.png")
    assert width > 800 and height > 500 and share > 0.01
    assert plots.short_names(["runs/a", "later/a"]) == ["runs/a", "later/a"]
    assert plots.short_names(["runs/a", "later/b"]) == ["a", "b"]
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
    assert results.read_cells(file)[1][1] == {"task": "vt", "length": 8192, "depth": None, "accuracy": 0.25}
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
        files[-1].write_text("\n".join(map(json.dumps, records)))
    assert len(results.read_metrics(files[0])) == 59
    plot.main(["loss", *map(str, files), "-o", str(tmp_path / "deep" / "l.png")])
    assert ink(tmp_path / "deep" / "l.png")[2] > 0.01


def test_lengths_of_documents_are_drawn_from_the_shortest_to_the_longest():
    sources = [np.array([140, 1500]), np.array([], np.int64), np.array([4096])]
    assert length_edges(sources).tolist() == [128, 256, 512, 1024, 2048, 4096, 8192]
    for lengths in ([1], [128], [127, 129], [2**20]):  # each lies below the last border, and at or above the first
        edges = length_edges([np.array(lengths)])
        assert edges[0] <= min(lengths) < edges[1] and edges[-2] <= max(lengths) < edges[-1]
    assert length_edges([np.array([], np.int64)]).tolist() == [1, 2]


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
    with pytest.raises(SystemExit, match="two would be .*one.png; draw them one by one"):
        plot.main(["needle", *files, "-o", str(tmp_path / "one.png")])
    with pytest.raises(SystemExit, match="cells.jsonl is given twice; leave one out"):
        plot.main(["needle", files[0], files[0]])
    with pytest.raises(SystemExit, match="--labels is not for needle; leave it out"):
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
    losses = results.read_metrics(file)["loss"]
    assert losses.isna().tolist() == [step == 20 for step in range(1, 40)]
    plot.main(["loss", str(file)])
    assert ink(tmp_path / "metrics.png")[2] > 0.01


def test_one_model_in_two_files_is_two_curves_with_two_labels(csv_file, tmp_path, monkeypatch):
    other = tmp_path / "q.csv"
    other.write_text(PERPLEXITY_CSV)
    labels = [line.get_label() for line in drawn(monkeypatch, "perplexity", csv_file, other)[1].lines]
    assert len(set(labels)) == 2 and "p.csv" in labels[0] and "q.csv" in labels[1]
    with pytest.raises(SystemExit, match="p.csv is given twice"):
        plot.main(["perplexity", str(csv_file), str(csv_file)])
