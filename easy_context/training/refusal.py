"""Ends train.py with a message instead of a traceback: all problems at once, printed by one process."""

import contextlib
import sys
from collections.abc import Iterator
from typing import NoReturn

from ..common.flags import let_first_process_speak


@contextlib.contextmanager
def exit_on(kind: type[ValueError], verb: str = "start") -> Iterator[None]:
    """Turn an error of this kind into the message "train.py cannot <verb>", and exit with code 2."""
    try:
        yield
    except kind as error:
        end_run([str(error)], verb)


def end_run(problems: list[str], verb: str = "start") -> NoReturn:
    """Print all problems together, on the first process of each machine, and exit with code 2."""
    message = f"train.py cannot {verb}:\n" + "\n".join(f"  - {problem}" for problem in problems)
    if verb == "start":
        let_first_process_speak()
    else:  # the first process may have no such problem; the message begins below the progress bar
        let_first_process_speak(3.0)
        message = f"\n{message}"
    print(message, file=sys.stderr)
    sys.exit(2)
