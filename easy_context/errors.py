"""Other libraries' errors, put into ours."""


def first_line(reason: BaseException) -> str:
    """An error's first line, or its type where it says nothing."""
    return next(iter(str(reason).strip().splitlines()), type(reason).__name__)
