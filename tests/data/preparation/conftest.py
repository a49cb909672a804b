"""Inputs of prepare_data.py, and a run of it in this process."""

import json

import pytest
from tokenizer_styles import text, tokenizer_of_style

import prepare_data


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer_of_style("smollm2").save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def inputs(tmp_path_factory):
    """A long text of chapters, and 300 short records of which three are bad."""
    folder = tmp_path_factory.mktemp("inputs")
    chapters = [f"CHAPTER {i}\n{text()[4000 * i : 4000 * (i + 1)]}\n" for i in range(20)]
    (folder / "novel.txt").write_text("".join(chapters))
    lines = [json.dumps({"text": text()[50 * i : 50 * i + 60 + i]}) for i in range(300)]
    lines[10], lines[20], lines[30] = "{", '{"text": ""}', '{"words": "x"}'
    (folder / "notes.jsonl").write_text("\n".join(lines))
    return folder


@pytest.fixture
def prepare(tokenizer_dir):
    """Run prepare_data.py with flags as one string; return its report."""

    def run(flags, output_dir):
        words = (
            f"--tokenizer {tokenizer_dir} --separator <|endoftext|> --num-workers 1 --output-dir {output_dir} {flags}"
        )
        prepare_data.main(words.split())
        return json.loads((output_dir / "report.json").read_text())

    return run
