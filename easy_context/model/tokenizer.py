"""Loading a tokenizer."""

from typing import Any

from ..common.errors import first_line


def load_tokenizer(name: str, flag: str = "--model", required: bool = True) -> Any:
    """Load a tokenizer from a folder or the hub.

    Args:
        name: path or hub name.
        flag: the flag that gave the name, for the error.
        required: whether a missing tokenizer is an error. Training needs only token ids; without a tokenizer, it logs
            that none will be saved with the model.

    Returns:
        The tokenizer, or None if none can be loaded and none is required.

    Raises:
        ValueError: it is required and cannot be loaded.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name, trust_remote_code=False)  # else it may ask, and wait
    except Exception as error:  # a damaged file raises what its reader chose
        reason = first_line(error)
        if required:
            raise ValueError(
                f"{flag} {name}: no tokenizer loads from there ({type(error).__name__}: {reason}); give a folder with "
                "the files of a tokenizer, or a hub name that can be reached"
            ) from error
    print(f"no tokenizer is saved with the model, because {name} has none that loads ({reason})")
    return None
