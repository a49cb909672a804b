"""Command lines: spellings, values that are checked, and refusals that one process says."""

import pytest

from easy_context.common import flags
from easy_context.common.flags import FlagParser, number, positive, refusals, whole_number


def parser():
    parser = FlagParser(prog="script.py")
    parser.add_argument("--two-words", type=whole_number(1))
    parser.add_argument("--of_three_words", type=number(0, 1))
    parser.add_argument("-x", "--rope-theta", type=positive)
    parser.add_argument("--name")
    return parser


@pytest.mark.parametrize(
    "words", [["--two-words", "3"], ["--two_words", "3"], ["--two-words=3"], ["--two_words=3", "--name", "a_b-c"]]
)
def test_flags_are_taken_with_dashes_and_with_underscores(words):
    args = parser().parse_args(words)
    assert args.two_words == 3 and args.name in (None, "a_b-c")  # words that are no flags stay as they are


def test_what_only_begins_like_a_flag_is_not_taken_for_it(capsys):
    with pytest.raises(SystemExit) as stop:
        parser().parse_args(["--two", "3"])
    assert stop.value.code == 2 and "unrecognized arguments: --two 3" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words, message",
    [
        (["--two-words", "0"], "argument --two-words: 0 must be a whole number, at least 1"),
        (["--two-words", "1.5"], "argument --two-words: 1.5 must be a whole number, at least 1"),
        (["--two-words", ""], "argument --two-words: '' must be a whole number, at least 1"),
        (["--of-three-words", "1.1"], "argument --of_three_words: 1.1 must be a finite number from 0 to 1"),
        (["--of-three-words", "nan"], "argument --of_three_words: nan must be a finite number from 0 to 1"),
        (["--rope-theta", "inf"], "argument -x/--rope-theta: inf must be a finite number"),
        (["--rope-theta", "0"], "argument -x/--rope-theta: 0 must be positive"),
        (["-x", "many"], "argument -x/--rope-theta: many must be a finite number"),
    ],
)
def test_a_value_that_cannot_be_is_named_with_its_flag_and_its_bounds(words, message, capsys):
    with pytest.raises(SystemExit) as stop:
        parser().parse_args(words)
    assert stop.value.code == 2 and capsys.readouterr().err.endswith(f"script.py: error: {message}\n")


def test_all_values_that_cannot_be_are_named_together(capsys):
    both = parser()
    both.add_argument("--kind", choices=("a", "b"))
    both.add_argument("--many", nargs="+", type=int)
    both.add_argument("--needed", required=True)
    words = ["--two-words", "0", "--kind", "c", "--many", "1", "x", "y", "-x", "1", "--name", "fine"]
    with pytest.raises(SystemExit) as stop:
        both.parse_args(words)
    said = capsys.readouterr().err
    expected = ["--two-words: 0 must", "--kind: invalid choice: 'c'", "--many: invalid int value: 'x'", "value: 'y'"]
    expected += ["arguments are required: --needed"]
    assert stop.value.code == 2 and all(said.count(each) == 1 for each in expected), said
    assert "--name" not in said.partition("error:")[2]
    with pytest.raises(SystemExit):
        both.parse_args(["--kind", "c", "--needed", "1"])
    assert "--two-words" not in capsys.readouterr().err.partition("error:")[2], "each command line by itself"
    assert both.parse_args(["--kind", "b", "--needed", "1"]).kind == "b"


def test_values_at_the_bounds_are_taken():
    args = parser().parse_args(["--two-words", "1", "--of_three_words", "1", "-x", "1e-9"])
    assert (args.two_words, args.of_three_words, args.rope_theta) == (1, 1.0, 1e-9)


def test_refusals_are_one_line_of_the_script_and_other_errors_stay():
    with pytest.raises(SystemExit, match="^script.py: no such thing$"), refusals("script.py"):
        raise FileNotFoundError("no such thing")
    with pytest.raises(ZeroDivisionError), refusals("script.py"):
        raise ZeroDivisionError
    with pytest.raises(ValueError), refusals("script.py", (UnicodeError,)):
        raise ValueError


@pytest.mark.parametrize("local_rank", [None, "0", "1"])
def test_other_processes_of_a_machine_wait_for_the_first_to_speak(monkeypatch, local_rank):
    waits = []
    monkeypatch.setattr(flags.time, "sleep", waits.append)
    if local_rank is not None:
        monkeypatch.setenv("LOCAL_RANK", local_rank)
    with pytest.raises(SystemExit), refusals("script.py"):
        raise ValueError
    assert bool(waits) == (local_rank == "1")
