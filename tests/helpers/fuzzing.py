"""What the tests that try odd inputs share: words of a command line, settings, and how many inputs are tried."""

import argparse
import os
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

# `FUZZ=100 pytest ...` tries a hundred times as many inputs, others each time.
TIMES = int(os.environ.get("FUZZ", "1"))
_ODD = [
    *("", " ", "-", "--", "0", "-0", "1", "-1", "2", "7", "0.5", "1e-320", "1e400", "nan", "inf", "-inf", "True"),
    *("9" * 25, "9" * 5000, "0x10", "1_000", "1,000", "½", "٣", "1e3", "4-9", "9-4", "auto", "none", "None", "null"),
    *(
        "a\nb",
        "\udcff",
        "a" * 300,
        "/".join("a" * 3000),
        "{",
        "{}",
        "{key}",
        "{0}",
        "%s",
        "*",
        "[",
        "(",
        "a=b",
        "=",
        "=a",
    ),
    *("hub:", "hub:a:b:c:d", "a/b/c", "~nobody/x", "missing", "missing/rows", "/dev/null", "/dev/null/x", "\u202e"),
]
INTEGERS = st.integers(-(2**70), 2**70)


def few(examples: int) -> settings:
    """Return settings for so many examples, the same at each run unless FUZZ is set."""
    return settings(
        max_examples=examples * TIMES,
        derandomize=TIMES == 1,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


def command_lines(parser: argparse.ArgumentParser, paths: list[str]) -> st.SearchStrategy[list[str]]:
    """Return lists of words: some of the parser's flags with values that may or may not be sensible.

    Args:
        parser: whose flags are taken.
        paths: values that exist.
    """
    flags = []
    for action in parser._actions:
        if action.option_strings and action.dest not in ("help", "list"):
            sensible = [str(value) for value in (*(action.choices or ()), *paths)]
            value = st.one_of(
                st.sampled_from(sensible),
                st.sampled_from(_ODD),
                st.integers(-3, 300).map(str),
                INTEGERS.map(str),
                st.floats().map(repr),
                st.text(st.characters(exclude_characters="\0/~."), max_size=8),
            )
            several = st.lists(value, min_size=0, max_size=0 if action.nargs == 0 else 2)
            one = several if action.nargs in (0, "+", 2) else st.lists(value, min_size=1, max_size=1)
            name = st.sampled_from(action.option_strings)
            flags.append(st.tuples(name, one).map(lambda pair: [pair[0], *pair[1]]))
    return st.lists(st.one_of(flags), max_size=5).map(lambda parts: [word for part in parts for word in part])


def in_words(error: BaseException, said: str) -> str:
    """Return what a user reads of an error."""
    return said if isinstance(error, SystemExit) and isinstance(error.code, int) else str(error)


def small_tree(folder: Path) -> None:
    """Make files of many kinds, some damaged, for flags that name files."""
    (folder / "empty").mkdir()
    (folder / "empty.jsonl").touch()
    (folder / "text.txt").write_text("Some text. And more of it.\n" * 20)
    (folder / "bytes.txt").write_bytes(bytes(range(256)))
    (folder / "bad.json").write_text('{"a": [1, 2')
    (folder / "list.json").write_text("[1, 2, 3]")
    (folder / "rows.jsonl").write_text('{"input_ids": [1, 2, 3]}\n{"input_ids": "no"}\n')
    (folder / "bad.parquet").write_bytes(b"PAR1 no")
    (folder / "bad.gz").write_bytes(b"\x1f\x8b no")
    (folder / "checkpoint-1").mkdir()
    (folder / "checkpoint-1" / "manifest.json").write_text('{"format": 2, "files": [], "step": "x"}')
    (folder / "config.json").write_text('{"model_type": "llama", "hidden_size": -1, "vocab_size": "many"}')
