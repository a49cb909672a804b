"""Turn other packages' exceptions into one-line reasons, and name flags in the package's own errors."""

import contextlib
import importlib
import re
from collections.abc import Iterator

# Arguments that the errors of the package's functions name -> the scripts' flags that set these arguments.
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
    """Return an error's first line, with the next one if it ends in a colon; the error's type if it has no text."""
    lines = str(reason).split("\n")
    lines = [line.strip() for line in lines if line.strip()]
    end = 2 if lines and lines[0].endswith(":") else 1
    return " ".join(lines[:end]).rstrip(": ") or type(reason).__name__


def name_flags(message: str) -> str:
    """Replace the names of arguments by the flags of the scripts, for users of a command line."""
    return re.sub(rf"(?<![\w/-])({'|'.join(_FLAGS)})(?![\w/])", lambda match: _FLAGS[match[0]], message)


@contextlib.contextmanager
def naming_flags() -> Iterator[None]:
    """Replace the names of arguments by flags in a ValueError that is raised inside the block."""
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
