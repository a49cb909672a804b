"""The Accelerator, what it prepares, clipping, advice about the machine."""

import copy
import logging
import math
import os
import warnings
from argparse import Namespace

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from transformers.utils.logging import enable_progress_bar, is_progress_bar_enabled

from easy_context.training import accelerator as ours
from easy_context.training.accelerator import build_accelerator, clip_and_step, prepare
from easy_context.training.arguments import parse_arguments
from easy_context.training.optimizer import adamw


@pytest.fixture(autouse=True)
def fresh_state(monkeypatch):
    """Accelerate's state is global: one process, none before and none after the test."""

    def reset():
        AcceleratorState._reset_state(reset_partial_state=True)
        PartialState._reset_state()
        GradientState._reset_state()

    for name in [name for name in os.environ if name.startswith("ACCELERATE_") or name in ("WORLD_SIZE", "RANK")]:
        monkeypatch.delenv(name)
    reset()
    yield
    reset()


@pytest.mark.parametrize("offload, torch_adam", [("none", True), ("cpu", True)])
def test_no_optimizer_is_compiled_on_a_cpu(offload, torch_adam):
    config = {"optimizer": {"params": {}}, "zero_optimization": {"offload_optimizer": {"device": offload}}}
    ours._compile_no_optimizer(config)
    assert config["optimizer"]["params"].get("torch_adam", False) is torch_adam


@pytest.mark.parametrize("flags", ["fpu avx2", "fpu avx512_bf16 sse", "amx_bf16", "asimd bf16 sve", ""])
def test_bf16_on_a_cpu_without_instructions_for_it_is_warned_of(tmp_path, flags):
    (tmp_path / "cpuinfo").write_text(f"processor : 0\nflags : {flags}\n")
    advice = ours._slow_bf16("bf16", tmp_path / "cpuinfo")
    assert (advice is None) == ("bf16" in flags)
    assert advice is None or "--mixed-precision no is faster here" in advice
    assert ours._slow_bf16("no", tmp_path / "cpuinfo") is None
    assert ours._slow_bf16("bf16", tmp_path / "none") is None


def test_one_process_without_a_launcher(tmp_path):
    words = f"--gradient-accumulate-every 3 --mixed-precision no --output-dir {tmp_path}"
    accelerator = build_accelerator(parse_arguments(words.split()))
    assert accelerator.num_processes == 1
    assert accelerator.gradient_accumulation_steps == 3
    assert accelerator.mixed_precision == "no"
    assert accelerator.state.deepspeed_plugin is None


def test_processes_that_accelerate_cannot_see_are_refused(monkeypatch, tmp_path):
    """WORLD_SIZE alone, as some job systems set it: each process would train alone."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(ours, "COLLECTIVE_TIMEOUT", ours.timedelta(seconds=1))

    class Lonely:
        num_processes = 1

        def __init__(self, **options):
            pass

    monkeypatch.setattr("accelerate.Accelerator", Lonely)
    with pytest.raises(RuntimeError, match="WORLD_SIZE is 2, but Accelerate sees 1 processes: start train.py with"):
        build_accelerator(parse_arguments(["--output-dir", str(tmp_path)]))


@pytest.fixture
def made_with(monkeypatch):
    """What Accelerator is called with, on a launch of two processes; it sees both."""
    made = {}

    class Noting:
        num_processes, is_main_process, state = 2, False, Namespace(deepspeed_plugin=None)

        def __init__(self, **options):
            made.update(options)

    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")  # restored afterwards, with what the call sets
    monkeypatch.setattr("accelerate.Accelerator", Noting)
    package = logging.getLogger("easy_context")
    level, filters = package.level, warnings.filters[:]
    yield made
    package.setLevel(level)
    warnings.filters[:] = filters
    enable_progress_bar()


@pytest.mark.parametrize("cuda", [False, True])
@pytest.mark.parametrize("deepspeed", [False, True])
def test_the_process_group_waits_long_and_is_gloo_without_cuda(monkeypatch, tmp_path, made_with, cuda, deepspeed):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "True" if deepspeed else "false")
    build_accelerator(parse_arguments(["--output-dir", str(tmp_path), "--report-to", "all"]))
    group, ddp = made_with["kwargs_handlers"]
    assert ddp.gradient_as_bucket_view, "DDP would hold all gradients twice"
    assert group.timeout.total_seconds() > 24 * 3600, "one rank may prepare data or save for hours"
    assert (group.backend == "gloo") == (not cuda)
    assert made_with["cpu"] == (not cuda and not deepspeed)
    assert made_with["log_with"] == ["wandb", "tensorboard"] and made_with["project_dir"] == str(tmp_path)


def test_only_rank_0_says_what_is_chosen(monkeypatch, tmp_path, made_with):
    for main, level in ((False, logging.WARNING), (True, logging.INFO)):
        ours._set_up_logs(main)
        assert logging.getLogger("easy_context").level == level
        assert is_progress_bar_enabled() == main
        enable_progress_bar()


def test_frozen_models_of_vectors_only_still_train(tmp_path):
    """There is no group of matrices then, which would be empty."""
    args = parse_arguments(["--mixed-precision", "no", "--output-dir", str(tmp_path), "--max-grad-norm", "0"])
    accelerator = build_accelerator(args)
    args.adam_betas = [0.7, 0.8]
    model = torch.nn.LayerNorm(2)
    model, optimizer = prepare(accelerator, model, adamw(model, args, accelerator), args)
    assert optimizer.defaults["betas"] == (0.7, 0.8)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.0]
    accelerator.backward(model(torch.tensor([[1.0, 3.0]])).sum() * args.gradient_accumulate_every)
    optimizer.step()
    assert not torch.equal(model.weight, torch.ones(2))


def test_deepspeed_gets_what_its_adamw_is_made_of():
    args = parse_arguments(["--learning-rate", "0.5"])
    plugin = Namespace(deepspeed_config={"zero_optimization": {"stage": 3}})
    launched = Namespace(state=Namespace(deepspeed_plugin=plugin), prepare=lambda *objects: objects)
    model = torch.nn.Linear(3, 2)
    model, optimizer = prepare(launched, model, adamw(model, args, launched), args)
    assert optimizer.lr == 0.5 and optimizer.weight_decay == args.weight_decay
    assert [group["weight_decay"] for group in optimizer.params] == [args.weight_decay, 0.0]


@pytest.mark.parametrize("max_norm, expected", [(1.0, 1.0), (10.0, 5.0), (0.0, 5.0)])
def test_clipping_returns_the_norm_before_and_zero_never_clips(tmp_path, max_norm, expected):
    accelerator = build_accelerator(parse_arguments(["--mixed-precision", "no", "--output-dir", str(tmp_path)]))
    model = torch.nn.Linear(2, 1, bias=False)
    optimizer, before = torch.optim.SGD(model.parameters(), lr=1.0), model.weight.detach().clone()
    model.weight.grad = torch.tensor([[3.0, 4.0]])
    assert clip_and_step(accelerator, model, optimizer, max_norm) == 5.0
    assert float((model.weight.detach() - before).norm()) == pytest.approx(expected, rel=1e-5)
    assert model.weight.grad is None


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_gradients_that_are_not_finite_touch_neither_weights_nor_moments(tmp_path, bad):
    accelerator = build_accelerator(parse_arguments(["--mixed-precision", "no", "--output-dir", str(tmp_path)]))
    model = torch.nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    model.weight.grad = torch.ones(1, 2)
    clip_and_step(accelerator, model, optimizer, 1.0)
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()["state"]))
    model.weight.grad = torch.tensor([[1.0, bad]])
    assert not math.isfinite(clip_and_step(accelerator, model, optimizer, 1.0))
    assert str((model.state_dict(), optimizer.state_dict()["state"])) == str(before)
    assert model.weight.grad is None


def test_inside_the_window_there_is_no_step():
    class Inside:
        sync_gradients = False

    assert clip_and_step(Inside(), torch.nn.Linear(2, 1), None, 1.0) is None
