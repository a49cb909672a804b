"""Fixtures that the tests of the evaluations share."""

import pytest
from tiny_models import save_tiny_llama


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory) -> str:
    """A tiny model with a byte-level tokenizer, which no test changes."""
    return save_tiny_llama(tmp_path_factory.mktemp("model"))
