"""The journal: a run goes on after its last finished piece, and only under the settings that it began with."""

import json

import pytest

from easy_context.evaluation.journal import Journal, missing_pieces, run_pieces
from easy_context.evaluation.needle.cells import Cell, is_finished_cell
from easy_context.mesh import Mesh

CELL = {"task": "t", "length": 8, "depth": None, "accuracy": 1.0, "item_accuracy": 1.0}
CELL["samples"] = [{"exact": True, "items": [True]}]


def opened(file, settings=None, **options):
    journal = Journal(file, "cell", "--output_dir")
    journal.open(settings or {}, Cell.of, is_finished_cell, **options)
    return journal


@pytest.mark.parametrize("content", ["something of mine", "[1]\n2", "7\n", '{"settings": 3}\n', b"\xff\xfe\n"])
def test_a_file_of_something_else_is_left_as_it_is(tmp_path, content):
    file = tmp_path / "cells.jsonl"
    content = content if isinstance(content, bytes) else content.encode()
    file.write_bytes(content)
    with pytest.raises(ValueError, match="is not a file of this script; choose another --output_dir"):
        opened(file)
    assert file.read_bytes() == content


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
    opened(file).add(CELL)
    assert list(opened(file).finished) == [Cell("t", 8, None)]
    with file.open("a") as spoilt:
        spoilt.write(line + "\n" + json.dumps(CELL) + "\n")
    with pytest.raises(ValueError, match="cells.jsonl, line 3: no finished cell; take the line out"):
        opened(file)


def test_half_a_last_line_is_dropped_and_other_settings_are_refused(tmp_path):
    file = tmp_path / "deep" / "cells.jsonl"
    opened(file, {"seed": 1}, model="m").add(CELL)
    whole = file.read_text()
    assert json.loads(whole.split("\n")[0]) == {"model": "m", "settings": {"seed": 1}}
    with file.open("a") as cut_off:
        cut_off.write('{"task": "t", "len')
    assert list(opened(file, {"seed": 1}).finished.values()) == [CELL]
    assert file.read_text() == whole
    with pytest.raises(
        ValueError,
        match="holds results of other settings .dtype: not recorded then, 'x' now; seed: 1 then, 2 now.; "
        "choose another --output_dir, or start anew with --resume none",
    ):
        opened(file, {"seed": 2, "dtype": "x"})
    assert file.read_text() == whole
    assert opened(file, {"seed": 2}, resume=False).finished == {}
    assert json.loads(file.read_text()) == {"model": "", "settings": {"seed": 2}}


def test_only_the_first_process_touches_the_file(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    file = tmp_path / "cells.jsonl"
    file.write_text("something of mine")
    journal = opened(file)
    assert journal.finished == {} and journal.what_is_saved() == "nothing was saved"
    assert file.read_text() == "something of mine"


def test_what_is_saved_says_how_the_run_goes_on(tmp_path):
    file = tmp_path / "cells.jsonl"
    assert Journal(file, "cell", "--output_dir").what_is_saved() == "nothing was saved"
    journal = opened(file)
    journal.add(CELL)
    assert journal.what_is_saved() == f"1 cell saved in {file}; the same command goes on from there"
    journal = opened(file, resume=False)
    assert journal.what_is_saved() == f"0 cells saved in {file}; the same command with --resume auto goes on from there"


class TwoGroups:
    """The scorer of data-parallel group `group` of two, whose other group's record is what `work` gives."""

    def __init__(self, group, work):
        self.mesh, self.is_first_rank = Mesh(data_rank=group, data_size=2), group == 0
        self.work, self.rounds = work, []

    def from_first_rank(self, value):
        return value if self.is_first_rank else {Cell("t", 8, None)}

    def from_every_group(self, record):
        self.rounds.append(record)
        length = 16 * len(self.rounds) + (8 if self.is_first_rank else 0)
        other = self.work(Cell("t", length, None)) if length <= 40 else None
        return [record, other] if self.is_first_rank else [other, record]


@pytest.mark.parametrize("group", [0, 1])
def test_groups_take_pieces_in_turn_and_the_first_process_writes_them_in_order(tmp_path, group):
    done = []

    def work(cell):
        return {**CELL, "length": cell.length}

    def own_work(cell):
        done.append(cell.length)
        return work(cell)

    pieces = [Cell("t", length, None) for length in (8, 16, 24, 32, 40, 48)]
    journal = opened(tmp_path / "cells.jsonl")
    journal.add(CELL)
    scorer = TwoGroups(group, work)
    pending = missing_pieces(scorer, pieces, journal)
    assert [cell.length for cell in pending] == [16, 24, 32, 40, 48]
    rounds = [[cell.length for cell in together] for together in run_pieces(scorer, pending, own_work, journal)]
    assert rounds == [[16, 24], [32, 40], [48]]
    assert done == ([16, 32, 48] if group == 0 else [24, 40])
    written = [cell.length for cell in opened(tmp_path / "cells.jsonl").finished]
    assert written == ([8, 16, 24, 32, 40, 48] if group == 0 else [8])
