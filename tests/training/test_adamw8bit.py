"""--optimizer adamw8bit: near float32 AdamW, resumed bit for bit, refused where it cannot run; steps in backward."""

import copy
import math
import shutil
import sys
from pathlib import Path

import pytest
import torch
from forked_runs import ForkedRun
from launching import read_metrics, train_here
from safetensors.torch import load_file
from tiny_models import tiny_llama

from easy_context.training.checkpoints.settings import differences
from easy_context.training.gradient_release import UpdatesInBackward

APART = Path(sys.prefix) / "apart"
IN_BACKWARD = ("--max-grad-norm", "0", "--gradient-accumulate-every", "1")
AFTER_BACKWARD = (*IN_BACKWARD, "--skip-nonfinite", "1")


@pytest.fixture(scope="module", autouse=True)
def torchao():
    """Let this module alone import torchao, which the libraries of other tests would import, too."""
    assert (APART / "torchao").is_dir(), f"torchao is missing in {APART}: bash train_scripts/setup.sh installs it"
    sys.path.append(str(APART))
    yield
    sys.path.remove(str(APART))
    for name in [name for name in sys.modules if name.split(".")[0] == "torchao" or name.endswith(".adamw8bit")]:
        del sys.modules[name]


def larger_llama(**overrides):
    """Matrices large enough for moments in 8 bits."""
    return tiny_llama(hidden_size=64, num_attention_heads=8, intermediate_size=128, vocab_size=256, **overrides)


def optimizer_of(model, **options):
    from easy_context.training.adamw8bit import AdamW8bit

    groups = [{"params": list(model.parameters()), "weight_decay": 0.0}]
    return AdamW8bit(groups, 3e-4, (0.9, 0.95), **options)


def loss_after(steps: int, model, optimizer) -> float:
    """Learn the same two rows by heart."""
    ids = torch.randint(0, 256, (2, 32), generator=torch.Generator().manual_seed(1))
    for _ in range(steps):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def test_it_learns_as_float32_adamw_does_and_rounding_to_nearest_does_not():
    """At this learning rate most updates are less than half of the step between two bf16 weights."""
    import torchao.optim

    plain, ours, nearest = larger_llama(), larger_llama().bfloat16(), larger_llama().bfloat16()
    first = loss_after(1, plain, torch.optim.SGD(plain.parameters(), lr=0.0))
    expected = loss_after(40, plain, torch.optim.AdamW(plain.parameters(), 3e-4, (0.9, 0.95), weight_decay=0.0))
    torch.manual_seed(0)
    got = loss_after(40, ours, optimizer_of(ours))
    rounding_to_nearest = torchao.optim.AdamW8bit(nearest.parameters(), 3e-4, (0.9, 0.95), weight_decay=0.0)
    with torch.compiler.set_stance("force_eager"):
        stalled = loss_after(40, nearest, rounding_to_nearest)
    assert expected < 0.2 * first
    assert got == pytest.approx(expected, rel=0.1)
    assert stalled > 2 * expected


def test_a_parameter_takes_four_bytes_beside_its_gradient():
    model = larger_llama().bfloat16()
    optimizer = optimizer_of(model)
    loss_after(1, model, optimizer)
    weight = model.model.layers[0].mlp.up_proj.weight
    plain = optimizer.plain_state(weight)
    size = {name: tensor.numel() * tensor.element_size() for name, tensor in plain.items()}
    numel = weight.numel()
    assert size == {
        **{"step": 4, "exp_avg.codes": numel, "exp_avg_sq.codes": numel},
        **{"exp_avg.scale": numel / 64, "exp_avg_sq.scale": numel / 64},
    }
    assert weight.dtype == torch.bfloat16 and set(map(type, plain.values())) == {torch.Tensor}
    norm = optimizer.plain_state(model.model.norm.weight)
    assert norm["exp_avg"].dtype == norm["exp_avg_sq"].dtype == torch.float32
    assert optimizer.plain_state(torch.nn.Parameter(torch.zeros(2))) == {}


def test_processes_round_alike():
    """Each from a random state of its own; drawn from that, weights would grow apart."""
    model = larger_llama().bfloat16()
    for seed in (None, 7):
        weights = []
        for process in range(2):
            replica = copy.deepcopy(model)
            optimizer = optimizer_of(replica, rounding_seed=seed)
            torch.manual_seed(process)
            loss_after(2, replica, optimizer)
            weights.append(torch.cat([parameter.flatten() for parameter in replica.parameters()]))
        assert torch.equal(*weights) == (seed is not None)


def test_steps_are_rounded_by_other_random_numbers():
    """Else an update would be rounded in the same direction in every step."""
    weight = torch.nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    from easy_context.training.adamw8bit import AdamW8bit

    optimizer = AdamW8bit([{"params": [weight], "weight_decay": 0.0}], 1e-3, (0.9, 0.95), rounding_seed=0)
    values = []
    for _ in range(40):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        values.append(weight.item())
    assert 1 < len(set(values)) < 40
    assert values[-1] == pytest.approx(0.96, abs=0.02)


@pytest.mark.parametrize("is_embedding", [False, True])
def test_tokens_that_a_step_lacks_do_not_jump(is_embedding):
    """With moments in 8 bits they would."""
    embedding = torch.nn.Embedding(64, 256, dtype=torch.bfloat16)
    before = embedding.weight.detach().clone()
    optimizer = optimizer_of(embedding, embeddings=[embedding.weight] if is_embedding else [])
    embedding.weight.grad = torch.logspace(-5, 0, 256).expand(64, 256).bfloat16()
    optimizer.step()
    embedding.weight.grad.zero_()
    optimizer.step()
    steps = (embedding.weight - before).abs().max() / 3e-4
    assert (steps < 60) == is_embedding, "a bf16 weight near 4 moves by 0.016 or not at all"


def test_states_that_do_not_fit_are_refused():
    model = torch.nn.Linear(64, 64, bias=False)
    optimizer = optimizer_of(model)
    moments = {"step": torch.ones(()), "exp_avg": torch.zeros(64, 64), "exp_avg_sq": torch.zeros(64, 64)}
    with pytest.raises(ValueError, match="not that of --optimizer adamw8bit"):
        optimizer.load_plain_state(model.weight, moments)
    assert not optimizer.state
    optimizer.load_plain_state(model.weight, {})
    assert not optimizer.state, "a run that was saved before its first step"


# --- train.py ---


@pytest.fixture(scope="module")
def assets(tmp_path_factory) -> Path:
    import datasets

    folder = tmp_path_factory.mktemp("adamw8bit")
    larger_llama().save_pretrained(folder / "model")
    larger_llama(tie_word_embeddings=True).save_pretrained(folder / "tied")
    model = larger_llama()
    model.model.norm.weight.data.fill_(math.nan)
    model.save_pretrained(folder / "not-finite")
    rows = torch.randint(0, 256, (6, 32), generator=torch.Generator().manual_seed(0)).tolist()
    datasets.Dataset.from_dict({"input_ids": rows}).save_to_disk(folder / "rows")
    return folder


def flags_of(assets: Path, output_dir: Path, *flags: str) -> list[str]:
    return [
        *("--model", str(assets / "model"), "--dataset", str(assets / "rows"), "--output-dir", str(output_dir)),
        *("--seq-length", "32", "--max-train-steps", "6", "--learning-rate", "1e-3", "--weight-decay", "0.1"),
        *("--parallel_mode", "data_parallel", "--optimizer", "adamw8bit", *flags),
    ]


@pytest.fixture
def train(assets, tmp_path):
    def run(name: str, *flags: str) -> Path:
        train_here(*flags_of(assets, tmp_path / name, *flags))
        return tmp_path / name

    return run


def result_of(output_dir: Path) -> tuple[list, dict[str, torch.Tensor]]:
    """Loss and gradient norm of every step, and the weights."""
    records = [(record["loss"], record["grad_norm"]) for record in read_metrics(output_dir)]
    return records, load_file(output_dir / "model.safetensors")


def assert_same(got: Path, expected: Path) -> None:
    """Losses and weights are the same to the last bit, norms up to the order in which gradients are summed."""
    (records, weights), (expected_records, expected_weights) = result_of(got), result_of(expected)
    assert [loss for loss, _ in records] == [loss for loss, _ in expected_records]
    assert [norm for _, norm in records] == pytest.approx([norm for _, norm in expected_records], rel=1e-6)
    assert weights.keys() == expected_weights.keys()
    assert all(torch.equal(weights[name], expected_weights[name]) for name in weights)


@pytest.mark.parametrize("steps", [("--gradient-accumulate-every", "2"), IN_BACKWARD], ids=["after", "in-backward"])
def test_a_run_that_is_cut_off_goes_on_bit_for_bit(train, assets, tmp_path, capsys, steps):
    whole = train("whole", *steps, "--save-every", "3", "--keep-last", "9")
    assert {tensor.dtype for tensor in result_of(whole)[1].values()} == {torch.bfloat16}
    saved = torch.load(whole / "checkpoint-3" / "rank-00000.pt", weights_only=True)
    assert {type(value) for state in saved["states"] for value in state.values()} == {torch.Tensor}
    assert torch.uint8 in {value.dtype for state in saved["states"] for value in state.values()}

    cut = tmp_path / "cut"
    shutil.copytree(whole / "checkpoint-3", cut / "checkpoint-3")
    shutil.copy(whole / "metrics.jsonl", cut)
    for anyway in ((), ("--resume-anyway",)):
        with pytest.raises(SystemExit):
            train("cut", *steps, "--optimizer", "adamw", *anyway)
        assert "optimizer was 'adamw8bit' and is 'adamw'. Use the same" in capsys.readouterr().err
    assert_same(train("cut", *steps), whole)


@pytest.mark.parametrize(
    "optimizer,model,plan",
    [("adamw", "model", "input@cpu+attention,nothing"), ("adamw8bit", "model", "all"), ("adamw8bit", "tied", "input")],
)
def test_steps_in_backward_are_those_after_it(train, assets, monkeypatch, optimizer, model, plan):
    """In float32, where nothing is rounded at random."""
    flags = ["--model", str(assets / model), "--optimizer", optimizer, "--mixed-precision", "no", "--memory-plan", plan]
    if plan != "all":
        flags += ["--mlp-tile-size", "10"]
    after = train("after", *flags, *AFTER_BACKWARD)
    update, alive = UpdatesInBackward._update, []

    def counting(self, parameter):
        alive.append(sum(p.grad is not None for group in self.param_groups for p in group["params"]))
        update(self, parameter)

    monkeypatch.setattr(UpdatesInBackward, "_update", counting)
    assert_same(train("in-backward", *flags, *IN_BACKWARD), after)
    parameters = len(result_of(after)[1])
    assert alive == [1] * 6 * parameters, "one gradient at a time"


@pytest.mark.parametrize("flags", [AFTER_BACKWARD, ("--max-grad-norm", "1"), ("--gradient-accumulate-every", "2")])
def test_where_a_step_needs_all_gradients_it_comes_after_backward(train, monkeypatch, flags):
    monkeypatch.setattr(UpdatesInBackward, "_update", None)
    train("run", *IN_BACKWARD, *flags, "--max-train-steps", "1")


def test_a_loss_that_is_not_finite_changes_no_weight_in_backward():
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 1))
    before = copy.deepcopy(model.state_dict())
    optimizer = UpdatesInBackward(torch.optim.SGD(model.parameters(), lr=1.0))
    (model(torch.ones(1, 3)).sum() * math.nan).backward()
    assert math.isnan(optimizer.finish_step())
    assert str(model.state_dict()) == str(before) and not optimizer.optimizer.state
    assert all(parameter.grad is None for parameter in model.parameters())

    gradients = copy.deepcopy(model)
    gradients(torch.ones(1, 3)).sum().backward()
    expected = torch.cat([parameter.grad.flatten() for parameter in gradients.parameters()]).norm()
    model(torch.ones(1, 3)).sum().backward()
    assert optimizer.finish_step() == pytest.approx(expected.item(), rel=1e-6)
    for parameter, other in zip(model.parameters(), gradients.parameters(), strict=True):
        torch.testing.assert_close(parameter, other - other.grad)


def test_a_gradient_in_two_parts_is_refused():
    model = torch.nn.Linear(2, 2)
    UpdatesInBackward(torch.optim.SGD(model.parameters(), lr=1.0))
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(RuntimeError, match="--max-grad-norm 1"):
        model(torch.ones(1, 2)).sum().backward()


def test_what_became_of_the_weights_is_said(train, assets, monkeypatch, capsys):
    """A loss that is not finite shows before they change; a gradient that overflows further back does not."""
    finish = UpdatesInBackward.finish_step
    flags = (*IN_BACKWARD, "--mixed-precision", "no", "--optimizer", "adamw")
    with pytest.raises(SystemExit) as stop:
        train("loss", *flags, "--model", str(assets / "not-finite"))
    assert stop.value.code == 1 and "The weights were not changed by it" in capsys.readouterr().err
    monkeypatch.setattr(UpdatesInBackward, "finish_step", lambda self: finish(self) * math.inf)
    with pytest.raises(SystemExit) as stop:
        train("gradient", *flags)
    assert stop.value.code == 1 and "The weights in memory are spoiled by it" in capsys.readouterr().err


@pytest.mark.launch
def test_two_processes_train_as_one_does(train, assets, tmp_path):
    """In bf16: sums of two processes and rounding differ, which moves these losses by less than 2 %."""
    run = ForkedRun(tmp_path / "log", 2, flags_of(assets, tmp_path / "two", "--gradient-accumulate-every", "1"))
    assert run.wait() == [0, 0], run.said()[-3000:]
    expected, expected_weights = result_of(train("one", "--gradient-accumulate-every", "2"))
    records, weights = result_of(tmp_path / "two")
    for (loss, norm), (expected_loss, expected_norm) in zip(records, expected, strict=True):
        assert loss == pytest.approx(expected_loss, rel=0.02)
        assert norm == pytest.approx(expected_norm, rel=0.1)
    for name, weight in weights.items():
        assert weight.dtype == torch.bfloat16
        torch.testing.assert_close(weight, expected_weights[name], rtol=0.02, atol=0.02)


def test_checkpoints_from_before_the_flag_are_adamw_s():
    assert differences({}, {"optimizer": "adamw"}) == []
    assert differences({}, {"optimizer": "adamw8bit"}) == ["optimizer was 'adamw' and is 'adamw8bit'"]


def test_it_is_refused_under_deepspeed(train, monkeypatch, capsys):
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    with pytest.raises(SystemExit):
        train("refused")
    said = capsys.readouterr().err
    assert "--optimizer adamw8bit does not run under DeepSpeed" in said and "single_gpu_plain.yaml" in said
