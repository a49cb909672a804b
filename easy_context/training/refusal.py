"""How train.py says that it cannot start: all problems at once, from one process, before anything heavy loads."""

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from typing import NoReturn


@contextlib.contextmanager
def refusal() -> Iterator[None]:
    """Turn a ValueError into the message that train.py cannot start, and exit."""
    try:
        yield
    except ValueError as error:
        cannot_start([str(error)])


def cannot_start(problems: list[str]) -> NoReturn:
    """Print all problems together, on the first process of each machine, and exit with code 2."""
    let_first_process_speak()
    print("train.py cannot start:\n" + "\n".join(f"  - {problem}" for problem in problems), file=sys.stderr)
    sys.exit(2)


def let_first_process_speak() -> None:
    """Wait, except on the first process of each machine, which meets the same problem and says so.

    The launcher ends all processes as soon as one exits, so this returns only where the first process has no problem.
    """
    if int(os.environ.get("LOCAL_RANK", "0")) > 0:
        time.sleep(30)
