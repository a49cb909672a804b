"""How train.py says that it cannot start or go on: all problems at once, from one process, without a traceback."""

import contextlib
import sys
from collections.abc import Iterator
from typing import NoReturn

from ..common.flags import let_first_process_speak


@contextlib.contextmanager
def refusal(kind: type[ValueError] = ValueError, verb: str = "start") -> Iterator[None]:
    """Turn an error of this kind into the message that train.py cannot start (or what else `verb` says), and exit."""
    try:
        yield
    except kind as error:
        end_run([str(error)], verb)


def end_run(problems: list[str], verb: str = "start") -> NoReturn:
    """Print all problems together, on the first process of each machine, and exit with code 2."""
    let_first_process_speak()
    print(f"train.py cannot {verb}:\n" + "\n".join(f"  - {problem}" for problem in problems), file=sys.stderr)
    sys.exit(2)
