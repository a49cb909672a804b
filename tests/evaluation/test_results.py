"""Result files are read by their kind; what does not belong in one is named by file and line."""

import json
import math

import pytest

from easy_context.evaluation import results

READERS = {"perplexity": results.read_perplexity, "needle": results.read_cells, "loss": results.read_metrics}
PERPLEXITY_CSV = """model,document,length,tokens,loss,perplexity
runs/a,x.txt,256,255,2.0,7.389
runs/a,y.txt,256,85,4.0,54.6
runs/a,x.txt,512,511,2.5,12.18
runs/a,z.txt,512,0,nan,nan
"""
A_CELL = '{"task": "t", "length": 8, "depth": 0.0, "accuracy": 1.0}'


def test_results_are_json_whatever_their_numbers():
    value = {"a": [math.nan, (math.inf, 1.5)], 2: {"b": -math.inf, "c": None, "d": True}}
    assert json.loads(results.json_text(value), parse_constant=pytest.fail) == {
        "a": [None, [None, 1.5]],
        "2": {"b": None, "c": None, "d": True},
    }


def test_trained_lengths_are_read_where_they_are_known(tmp_path):
    (tmp_path / "p.csv").write_text("model,length,tokens,loss,trained_length\nm,8,7,1,4\n\nm,16,15,1,4\nn,8,7,1,\n")
    curves = results.read_perplexity(tmp_path / "p.csv")
    assert [(curve.label, curve.trained_length) for curve in curves] == [("m", 4), ("n", None)]
    assert [length for length, _ in curves[0].points] == [8, 16]


def test_a_huge_loss_is_a_huge_perplexity_and_no_error(tmp_path):
    (tmp_path / "p.csv").write_text("model,length,tokens,loss\nm,8,7,1e6\n")
    ((length, perplexity),) = results.read_perplexity(tmp_path / "p.csv")[0].points
    assert length == 8 and perplexity == pytest.approx(math.exp(700))


def test_perplexity_is_pooled_over_tokens(tmp_path):
    csv_file = tmp_path / "p.csv"
    csv_file.write_text(PERPLEXITY_CSV)
    (curve,) = results.read_perplexity(csv_file)
    pooled = (2 * 255 + 4 * 85) / 340
    assert curve.points == [(256, pytest.approx(math.exp(pooled))), (512, pytest.approx(math.exp(2.5)))]
    assert curve.label == "runs/a" and curve.trained_length is None


@pytest.mark.parametrize(
    "kind, content, message",
    [
        ("perplexity", "a,b\n1,2\n", "lacks the columns .*not a CSV of eval_ppl.py"),
        ("perplexity", "model,length,tokens,loss\n", "has no rows"),
        ("perplexity", ",256,x\na,1.5,2\n", "f, line 1: length 'x' must be a whole number"),
        ("perplexity", ",256,512\na,1.5\n", "f, line 2 does not have the 3 fields"),
        ("perplexity", ",256,512\n\na,1.5,0.5\n", "f, line 3: perplexity '0.5' must be a number of at least 1"),
        ("perplexity", ",256\na,1.5\na,2\n", "f, line 3 gives a again"),
        ("perplexity", ",256\na,nan\n", "a has no scored token at any length"),
        ("perplexity", ",256\n", "has no rows"),
        ("perplexity", "model,length,tokens,loss,trained_length\nm,8,7,1,x\n", "line 2: trained_length 'x' must be a"),
        ("needle", '{"settings": {}}\n', "holds no cells of eval_needle.py"),
        ("needle", "a,b\n1,2\n", "lacks the columns .*: it is not a JSONL or CSV of eval_needle.py"),
        ("needle", "", "lacks the columns"),
        ("loss", '{"a": 1}\n', "f, line 1 has no step and loss"),
        ("loss", '{"step": 1, "loss": 2}\n{"foo": 1}\n', "f, line 2 has no step and loss: it is no line of a metrics"),
        ("loss", "", "f has no lines"),
        (
            "needle",
            '{"settings": {}}\n{"task": "t", "length": 8, "depth": 0, "accuracy": 1}\n{"settings": {}}\n',
            "line 3: no",
        ),
        ("loss", "no JSON\n", "f, line 1 is not JSON"),
        ("loss", "no JSON", "f, line 1 is not JSON"),
        ("loss", '{"step": 1, "loss": 2}\n{"step": 2\n{"step": 3, "loss": 2}\n', "f, line 2 is not JSON"),
        ("loss", '{"step": 1, "loss": "low"}\n', "f, line 1: loss 'low' must be a number"),
        ("loss", '{"step": 1, "loss": 2}\n{"step": 2, "loss": true}\n', "f, line 2: loss True must be a number"),
        ("loss", '{"step": -1, "loss": 2}\n', "f, line 1: step -1 must be a whole number of at least 0"),
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
        ("needle", '{"task": "t", "depth": 0, "accuracy": 1}\n', "line 1: length nan must be a whole number"),
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
    with pytest.raises(ValueError, match=f"{tmp_path}/.*{message}"):
        READERS[kind](tmp_path / "f")


def test_half_a_last_line_is_left_out_with_a_note(tmp_path, capsys):
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "loss": NaN}\n{"step": 3, "lo')
    assert results.read_metrics(file)["step"].tolist() == [1, 2]
    assert capsys.readouterr().err == f"{file}, line 3 is unfinished and left out\n"
    file = tmp_path / "cells.jsonl"
    file.write_text(A_CELL + '\n{"task": "t", "len')
    assert results.read_cells(file) == ("", [json.loads(A_CELL)])
