"""The files of an input: which are read, in which order, and how those left out are counted."""

import pytest

from easy_context.data.preparation.folders import MARK
from easy_context.data.preparation.input_files import describe_files, files_left_out, list_files


def test_what_is_not_read_of_a_folder_is_counted_by_kind(tmp_path):
    from datasets import Dataset

    names = ("a.txt", "sub/b.jsonl.gz", "README.md", "sub/readme.md", "SOURCES.md", "x.pdf", "sub/Y.PDF", "z.csv.gz")
    for name in (*names, ".DS_Store", "sub/.DS_Store", "Makefile", "report.json", "state.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "state.json").rename(tmp_path / "sub" / "state.json")  # alone it is no saved dataset
    (tmp_path / "broken.txt").symlink_to(tmp_path / "nothing")
    (tmp_path / "linked").symlink_to(tmp_path / "sub")
    Dataset.from_dict({"text": ["one"]}).save_to_disk(tmp_path / "saved")
    files = list_files(tmp_path)
    read_names = ["a.txt", "report.json", "sub/b.jsonl.gz", "sub/state.json"]
    assert [file.relative_to(tmp_path).as_posix() for file in files] == read_names
    left_out = files_left_out(tmp_path)
    assert left_out == {
        **{".pdf": 2, ".DS_Store": 2, ".csv.gz": 1, "without a suffix": 1, "broken links": 1, "links to folders": 1},
        **{"README.md": 1, "readme.md": 1, "SOURCES.md": 1, "of saved datasets": 3},
    }
    every_file = [path for path in tmp_path.rglob("*") if path.is_symlink() or not path.is_dir()]
    assert len(files) + sum(left_out.values()) == len(every_file)
    assert files_left_out(tmp_path / "saved") == files_left_out(tmp_path / "a.txt") == {}
    for path in files:
        path.unlink()
    with pytest.raises(ValueError, match=r"no usable file below .* \(left out: of saved datasets 3, .*\.pdf 2"):
        list_files(tmp_path)


def test_many_kinds_are_named_in_short():
    assert describe_files({f".{i:02}": 20 - i for i in range(20)}).endswith(".11 9, others 36")


def test_nothing_is_read_in_folders_of_prepare_data(tmp_path):
    for name in ("a.txt", f"rows/{MARK}", "rows/report.json", "rows/train/data.arrow", "rows/mine.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert list_files(tmp_path) == [tmp_path / "a.txt"]
    assert files_left_out(tmp_path) == {"in folders of prepare_data.py": 4}
    with pytest.raises(ValueError, match=r"no usable file below .* \(left out: in folders of prepare_data.py 4\)"):
        list_files(tmp_path / "rows")
