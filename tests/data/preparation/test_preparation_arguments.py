"""Flags of prepare_data.py: each bad value is named before anything loads."""

import shutil

import pytest

from easy_context.data.preparation.arguments import build_parser, parse_arguments
from easy_context.data.preparation.facts import FACT_TEMPLATES
from easy_context.data.preparation.sources import Source


@pytest.fixture
def base(inputs, tmp_path):
    return f"--input {inputs} --tokenizer t --seq-length 8 --output-dir {tmp_path}/rows"


def test_values_reach_the_settings(base, inputs, tmp_path):
    options = parse_arguments(
        f"{base} --validation-input v={inputs}/novel.txt --retrieval-digits 3 --long_from 7".split()
    )
    assert options.settings.sources == [Source(inputs.name, str(inputs))]
    assert options.settings.validation_sources == [Source("v", f"{inputs}/novel.txt")]
    assert (options.settings.seq_length, options.settings.long_from, options.output_dir) == (8, 7, tmp_path / "rows")
    assert (options.settings.retrieval.digits, options.settings.retrieval.templates) == ((3, 3), FACT_TEMPLATES)


@pytest.mark.parametrize(
    "flag, value, message",
    [
        ("--seq-length", "0", "0 must be a whole number, at least 1"),
        ("--validation-fraction", "1", "1 must be a finite number from 0 to 0.99"),
        ("--validation-fraction", "nan", "nan must be a finite number from 0 to 0.99"),
        ("--upsample-long", "0.5", "0.5 must be a finite number, at least 1"),
        ("--upsample-long", "inf", "inf must be a finite number, at least 1"),
        ("--retrieval-fraction", "2", "2 must be a finite number from 0 to 1"),
        ("--retrieval-facts", "0", "0 must be a finite number from 0.001 to 250"),
        ("--retrieval-facts", "1e9", "1e9 must be a finite number from 0.001 to 250"),
        ("--num-workers", "100000", "100000 must be a whole number from 1 to "),
        ("--seed", "-1", "-1 must be a whole number, at least 0"),
        ("--document-start", "(", "'(' is not a regular expression"),
        ("--retrieval-digits", "9-4", "'9-4': give a number or a range up to 18, such as 4-9"),
        ("--retrieval-templates", "no.json", "no.json: "),
        ("--tokenizer", "/nope", "/nope is not a folder; give the folder or the hub name"),
        ("--tokenizer", "./nope", "./nope is not a folder"),
        ("--tokenizer", __file__, "is not a folder"),
        ("--input", "a=", "no path in 'a='; give a file, a folder or hub:DATASET"),
        ("--input", "no.txt", "no.txt does not exist; give a file, a folder or hub:DATASET"),
        ("--validation-input", "no.txt", "no.txt does not exist"),
    ],
)
def test_bad_values_are_named_with_their_flag(base, capsys, flag, value, message):
    with pytest.raises(SystemExit):
        parse_arguments([*base.split(), flag, value])
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith(f"prepare_data.py: error: argument {flag}: ") and message in said


def test_two_sources_of_one_name(base, inputs, tmp_path):
    shutil.copy(inputs / "novel.txt", tmp_path / "novel.txt")
    base = f"{base} --input {inputs}/novel.txt"
    with pytest.raises(ValueError, match="--input: two sources are named 'novel'; tell them apart with NAME=SOURCE"):
        parse_arguments(f"{base} {tmp_path}/novel.txt".split())
    assert len(parse_arguments(f"{base} other={tmp_path}/novel.txt".split()).settings.sources) == 2


def test_names_and_folders_that_cannot_be_are_named_together(base, inputs, tmp_path):
    words = f"{base} --input {inputs}/novel.txt {inputs}/novel.txt --work-dir {inputs}/novel.txt/below".split()
    with pytest.raises(ValueError, match="two sources are named 'novel'") as refusal:
        parse_arguments([*words, "--output-dir", f"{inputs}/novel.txt"])
    for expected in ("--output-dir", "--work-dir"):
        assert f"{expected} {inputs}/novel.txt" in str(refusal.value)


def test_flags_are_not_abbreviated(base, capsys):
    with pytest.raises(SystemExit):
        build_parser().parse_args(f"{base} --over".split())
    assert "unrecognized arguments: --over" in capsys.readouterr().err
