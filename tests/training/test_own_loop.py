"""The code blocks of docs/own_loop.md, run as they are, against one process at 1e-5."""

import re

import pytest
import torch
from family_models import VOCABULARY, family_config, family_model
from launching import REPOSITORY, free_port
from plain_attention import relative_error
from test_trainer import TOLERANCE, launched, make_rows, pad_right

import easy_context
from easy_context.model.config import set_rope_theta

LEARNING_RATE = 0.3


def python_blocks(document: str, heading: str) -> list[str]:
    """The Python blocks of a section."""
    text = (REPOSITORY / document).read_text()
    section = text.split(f"\n{heading}\n", 1)[1].split("\n## ", 1)[0]
    return re.findall(r"```python\n(.*?)```", section, re.DOTALL)


TRAINER, LOOP, GATHERING = (
    *python_blocks("docs/own_loop.md", "## With the Hugging Face Trainer"),
    *python_blocks("docs/own_loop.md", "## With a loop of your own"),
)


def make_steps() -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
    """Two steps of micro-batches of different length and number of targets."""
    generator = torch.Generator().manual_seed(4)
    steps = []
    for lengths in ((37, 12), (20, 51, 8)):
        ids = [torch.randint(0, VOCABULARY, (2, length), generator=generator) for length in lengths]
        steps.append([(x, x.masked_fill(torch.rand(x.shape, generator=generator) < 0.4, -100)) for x in ids])
    return steps


def plain_loop(folder: str):
    """The weights after all steps, the last micro-batch's share of the last loss after them, and its logits."""
    from transformers import AutoModelForCausalLM

    config = family_config("llama")
    set_rope_theta(config, 1e6, 32768)
    model = AutoModelForCausalLM.from_pretrained(folder, config=config, attn_implementation="eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)

    def share(ids, labels, targets):
        logits = model(ids, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
        return loss / targets, logits

    for micro_batches in make_steps():
        targets = sum((labels[:, 1:] != -100).sum() for _, labels in micro_batches)
        for ids, labels in micro_batches:
            share(ids, labels, targets)[0].backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        loss, logits = share(ids, labels, targets)
    return dict(model.named_parameters()), loss, logits


def run_loop(rank: int, world_size: int, folder: str):
    def gradient_descent(parameters, lr):  # AdamW's steps would hide a wrong scale of the gradients
        return torch.optim.SGD(parameters, lr=LEARNING_RATE)

    steps = make_steps()
    namespace = {"name": folder, "device": "cpu", "steps": steps, "input_ids": steps[-1][-1][0]}
    adamw, torch.optim.AdamW = torch.optim.AdamW, gradient_descent
    try:
        exec(LOOP, namespace)
        exec(GATHERING, namespace)
    finally:
        torch.optim.AdamW = adamw
        easy_context.remove_seq_parallel_monkey_patch()
    weights = {name: p.detach() for name, p in namespace["model"].module.named_parameters()}
    return weights, namespace["output"].loss, namespace["logits"], namespace["model"].module.config.rope_parameters


def test_the_loop_of_the_readme_trains_as_one_process(pool, tmp_path):
    family_model("llama").save_pretrained(tmp_path)
    expected_weights, expected_loss, expected_logits = plain_loop(str(tmp_path))
    for rank, (weights, loss, logits, rope) in enumerate(pool.run(run_loop, 2, str(tmp_path))):
        assert rope["rope_theta"] == 1e6
        assert loss.item() == pytest.approx(expected_loss.item(), rel=TOLERANCE)
        assert relative_error(logits, expected_logits) < TOLERANCE
        for name, weight in expected_weights.items():
            assert relative_error(weights[name], weight.detach()) < TOLERANCE, (rank, name)


def run_trainer(rank: int, world_size: int, block: str, folder: str, port: str):
    import datasets

    rows, other_rows = (datasets.Dataset.from_list(make_rows(*arguments)) for arguments in ((9,), (5, 5)))
    namespace = {"name": folder, "output_dir": f"{folder}/{world_size}", "collator": pad_right, "__name__": "example"}
    namespace |= {"rows": rows, "other_rows": other_rows}
    with launched(rank, world_size, port):
        try:
            exec(block, namespace)
        finally:
            easy_context.remove_seq_parallel_monkey_patch()
    return namespace["trainer"].state.log_history


def test_the_trainer_of_the_document_trains_as_a_plain_one(pool, tmp_path, monkeypatch):
    from transformers import AutoModelForCausalLM

    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    family_model("llama").save_pretrained(tmp_path)
    plain = TRAINER
    for ours, theirs in (
        ("(SequenceParallelTrainerMixin, Trainer)", "(Trainer)"),
        ('\napply_seq_parallel_monkey_patch("zigzag_ring_attn", "llama")', ""),
        ("apply_fused_loss(AutoModel", "(AutoModel"),
    ):
        assert ours in plain
        plain = plain.replace(ours, theirs)
    expected = pool.run(run_trainer, 1, plain, str(tmp_path), "")[0]
    for logs in pool.run(run_trainer, 2, TRAINER, str(tmp_path), free_port()):
        assert len(logs) == len(expected) == 5 + 2
        for entry, other in zip(logs, expected, strict=True):
            for name in {"loss", "grad_norm", "train_loss", "eval_loss"} & other.keys():
                assert entry[name] == pytest.approx(other[name], rel=TOLERANCE), (name, entry)
    split, whole = (
        dict(AutoModelForCausalLM.from_pretrained(tmp_path / size).named_parameters()) for size in ("2", "1")
    )
    for name, weight in whole.items():
        assert relative_error(split[name].detach(), weight.detach()) < TOLERANCE, name
