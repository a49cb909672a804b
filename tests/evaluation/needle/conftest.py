"""A working directory with a short haystack where `--haystack_dir` looks by default."""

import os

import pytest
from needle_runs import TEXT


@pytest.fixture(scope="module")
def small_haystack(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkout")
    (folder / "data" / "haystack").mkdir(parents=True)
    (folder / "data" / "haystack" / "novel.txt").write_text(TEXT)
    before = os.getcwd()
    os.chdir(folder)
    yield folder / "data" / "haystack"
    os.chdir(before)
