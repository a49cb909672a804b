"""Turn other packages' exceptions into one-line reasons, and the package's own into the words of a command line."""

import contextlib
import importlib
import re
from collections.abc import Iterator

# Arguments of the package's functions, whose errors name them, and the scripts' flags that set them.
_FLAGS = {
    "seq_algo": "--parallel_mode",
    "sequence_parallel_size": "--sequence-parallel-size",
    "ring_degree": "--ring_degree",
    "attn_kernel": "--attn-kernel",
    "attn_engine": "--attn-engine",
    "keep_attention": "--keep-attention",
    "memory_plan": "--memory-plan",
    "seq_length": "--seq-length",
    "rope_theta": "--rope-theta",
}


def first_line(reason: BaseException) -> str:
    """Return an error's first line, with the next one if it ends in a colon; its type where it says nothing."""
    lines = str(reason).split("\n")
    lines = [line.strip() for line in lines if line.strip()]
    end = 2 if lines and lines[0].endswith(":") else 1
    return " ".join(lines[:end]).rstrip(": ") or type(reason).__name__


def name_flags(message: str) -> str:
    """Put the flags of the scripts in place of the names of arguments, for users of a command line."""
    return re.sub(rf"(?<![\w/-])({'|'.join(_FLAGS)})(?![\w/])", lambda match: _FLAGS[match[0]], message)


@contextlib.contextmanager
def naming_flags() -> Iterator[None]:
    """Make a ValueError raised inside the block name flags where it named arguments."""
    try:
        yield
    except ValueError as error:
        raise ValueError(name_flags(str(error))) from error


def cannot_import(module: str, package: str) -> str | None:
    """Return why `module` of the pip package `package` does not import, or None if it does."""
    try:
        importlib.import_module(module)
    except Exception as error:  # a broken build fails in many ways
        if isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}."):
            return f"the package {package} is not installed (pip install {package})"
        return f"the package {package} is installed but does not import ({type(error).__name__}: {first_line(error)})"
    return None
