"""The forecast that evaluations print, or refuse by, before a model loads."""

import pytest
from family_models import family_config

import eval_needle
import eval_ppl
from easy_context.evaluation import loading, memory_check
from easy_context.evaluation.memory_check import GIB, check_memory
from easy_context.evaluation.needle.arguments import parse_arguments
from easy_context.memory.forecast import Memory

SIZES = {"hidden_size": 4096, "intermediate_size": 14336, "heads": 32, "kv_heads": 8, "head_dim": 128, "layers": 32}
LLAMA_8B = family_config("llama", vocab_size=128256, tie_word_embeddings=False, **SIZES)


def said(monkeypatch, free: float, *flags: str, tokens: int = 2**20, config=LLAMA_8B) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(memory_check, "say_once", lines.append)
    monkeypatch.setattr(memory_check, "free_memory", lambda *_: Memory(free * GIB, 0))
    args = parse_arguments(["--model", "M", "--dtype", "bfloat16", *flags])
    check_memory("M", config, args, tokens, "--max_context_length")
    return lines


def test_a_million_tokens_of_an_8b_shape(monkeypatch):
    (line,) = said(monkeypatch, 139)
    assert line == (
        "--model M: 1,048,576 tokens at once take about 43.6 of 139.0 GiB that are free (weights 15.0, hidden states "
        "8.5, attention 20.1) in each of 1 processes"
    )
    (line,) = said(monkeypatch, 46)
    assert "which may be too much: use more processes" in line and "a smaller --max_context_length" in line
    with pytest.raises(ValueError, match=r"take about 43.6 of 40.0 GiB .*: use more processes"):
        said(monkeypatch, 40)
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert "in each of 8 processes" in said(monkeypatch, 40)[0]
    with pytest.raises(ValueError, match="take about 43.6"):
        said(monkeypatch, 40, "--parallel_mode", "data_parallel")


def test_under_deepspeed_only_gathered_weights_are_certain(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    assert "weights 1.4," in said(monkeypatch, 139)[0]


def test_a_model_that_runs_its_own_attention_is_not_forecast(monkeypatch):
    other = family_config("llama")
    other.model_type = "gpt2"
    assert said(monkeypatch, 0.001, config=other) == []


@pytest.mark.parametrize("script", [eval_ppl, eval_needle])
def test_both_evaluations_refuse_before_the_model_loads(tmp_path, model_folder, script, monkeypatch):
    monkeypatch.setattr(memory_check, "free_memory", lambda *_: Memory(1000.0, 0.0))
    monkeypatch.setattr(loading, "load_scorer", None)
    if script is eval_ppl:
        flags = ["--text", "data/haystack/emma.txt", "--output-file", str(tmp_path / "o.csv")]
    else:
        flags = ["--max_context_length", "1024", "--output_dir", str(tmp_path)]
    with pytest.raises(SystemExit, match="tokens at once take about 0.0 of 0.0 GiB .*: use more processes"):
        script.main(["--model", model_folder, *flags])
