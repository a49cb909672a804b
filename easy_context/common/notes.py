"""What a user should know, said once by one of the launched processes, before or after its logs are set up."""

import functools
import logging
import os

_log = logging.getLogger(__name__)


@functools.cache
def say_once(note: str) -> None:
    """Log a line on the first process; the same line again is not logged."""
    if os.environ.get("RANK", "0") == "0":
        _log.warning(note)
