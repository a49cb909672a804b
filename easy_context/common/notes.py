"""Notes to the user that one of the launched processes logs once, before or after logging is set up."""

import functools
import logging
import os

_log = logging.getLogger(__name__)


@functools.cache
def say_once(note: str) -> None:
    """Log a line on the first process, unless the same line was logged before."""
    if os.environ.get("RANK", "0") == "0":
        _log.warning(note)
