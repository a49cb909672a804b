"""Other packages' errors, put into ours."""

import importlib


def first_line(reason: BaseException) -> str:
    """An error's first line, or its type where it says nothing."""
    return next(iter(str(reason).strip().splitlines()), type(reason).__name__)


def cannot_import(module: str, package: str) -> str | None:
    """Why `module` of the pip package `package` does not import, or None if it does."""
    try:
        importlib.import_module(module)
    except Exception as error:  # a broken build fails in many ways
        if isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}."):
            return f"the package {package} is not installed (pip install {package})"
        return f"the package {package} is installed but does not import ({type(error).__name__}: {first_line(error)})"
    return None
