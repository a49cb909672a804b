"""Fingerprints change with weights and config, with tokenizer and chat template, and with nothing else."""

import json

import pytest
from tiny_models import save_tiny_llama

from easy_context.model.config import load_config
from easy_context.model.fingerprint import model_fingerprint, tokenizer_fingerprint


def test_a_retrained_or_reconfigured_model_is_another_model(tmp_path):
    first, same, other = (save_tiny_llama(tmp_path / name, seed) for name, seed in (("a", 0), ("b", 0), ("c", 1)))
    prints = [model_fingerprint(folder, load_config(folder)) for folder in (first, same, other)]
    assert prints[0] == prints[1] != prints[2]
    file = tmp_path / "b" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"rms_norm_eps": 1e-4}))
    assert model_fingerprint(same, load_config(same)) != prints[0]


def test_a_model_on_the_hub_is_its_commit_or_its_name(tmp_path):
    config = load_config(save_tiny_llama(tmp_path / "a"))
    assert model_fingerprint("user/name", config) == "user/name"
    config._commit_hash = "0123abc"
    assert model_fingerprint("user/name", config) == "0123abc"
    assert tokenizer_fingerprint("user/name") == "user/name"


def retokenize(folder):
    file = folder / "tokenizer.json"
    file.write_text(file.read_text() + "\n")


def change_chat_template(folder):
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")


@pytest.mark.parametrize("change", [retokenize, change_chat_template])
def test_another_tokenizer_or_chat_template_is_noticed_and_other_files_are_not(tmp_path, change):
    name = save_tiny_llama(tmp_path / "model")
    before = tokenizer_fingerprint(name)
    (tmp_path / "model" / "README.md").write_text("not part of it")
    assert tokenizer_fingerprint(name) == before
    change(tmp_path / "model")
    assert tokenizer_fingerprint(name) != before
