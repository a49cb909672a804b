"""Loading a tokenizer, which is required in some places and not in others."""

import pytest
from tiny_models import save_tiny_llama

from easy_context.model.tokenizer import load_tokenizer


def test_a_tokenizer_loads(tmp_path, capsys):
    tokenizer = load_tokenizer(save_tiny_llama(tmp_path / "model"))
    assert (
        tokenizer.decode(tokenizer("The pass-key is 7.")["input_ids"], skip_special_tokens=True) == "The pass-key is 7."
    )
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_a_tokenizer_that_does_not_load_is_an_error_or_said_in_a_line(tmp_path, capsys, content):
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ValueError, match=f"--tokenizer {tmp_path}: no tokenizer loads from there .*; give a folder"):
        load_tokenizer(str(tmp_path), "--tokenizer")
    assert capsys.readouterr().out == ""
    assert load_tokenizer(str(tmp_path), required=False) is None
    assert f"no tokenizer is saved with the model, because {tmp_path} has none" in capsys.readouterr().out
