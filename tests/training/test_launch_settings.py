"""The flags have the last word over the launch configuration, and the log says over which of its values."""

import json

import pytest

from easy_context.training.arguments import parse_arguments
from easy_context.training.launch_settings import apply_flags, settle_launch

FLAGS = parse_arguments(
    [
        *("--learning-rate", "3e-4", "--weight-decay", "0.1", "--adam-betas", "0.8", "0.9", "--batch-size", "2"),
        *("--gradient-accumulate-every", "5", "--max-grad-norm", "0.5"),
    ]
)
SETTLED = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 5,
    "gradient_clipping": 0.5,
    "train_batch_size": "auto",  # for Accelerate to work out
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "weight_decay": 0.1, "betas": [0.8, 0.9]}},
}


def merged(first: dict, second: dict) -> dict:
    both = {**first, **second}
    for key in first.keys() & second.keys():
        if isinstance(first[key], dict):
            both[key] = merged(first[key], second[key])
    return both


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """No launcher's variables, and what a call sets is undone."""
    for name in ("ACCELERATE_MIXED_PRECISION", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none")


@pytest.mark.parametrize(
    "own",
    [
        {},
        {"optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto", "eps": 1e-6}}},
        {"optimizer": {"type": "Adam"}, "bf16": {"enabled": "auto"}, "gradient_clipping": "auto"},
        {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"},
        {"train_batch_size": 10, "gradient_clipping": 0.5, "zero_optimization": {"stage": 2, "overlap_comm": True}},
    ],
)
def test_open_and_equal_values_are_filled_in_without_a_word(own):
    config = json.loads(json.dumps(own))
    assert apply_flags(config, FLAGS) == []
    assert config == merged(own, SETTLED)


@pytest.mark.parametrize(
    "own, said",
    [
        ({"gradient_clipping": 1.0}, "gradient_clipping 1.0 -> 0.5 (--max-grad-norm)"),
        ({"gradient_accumulation_steps": 8}, "gradient_accumulation_steps 8 -> 5 (--gradient-accumulate-every)"),
        ({"train_micro_batch_size_per_gpu": 4}, "train_micro_batch_size_per_gpu 4 -> 2 (--batch-size)"),
        ({"train_batch_size": 64}, "train_batch_size 64 -> 10 (--batch-size, --gradient-accumulate-every, processes)"),
        ({"bf16": {"enabled": False}}, "bf16.enabled False -> True (--mixed-precision bf16)"),
        ({"fp16": {"enabled": True}}, "fp16.enabled True -> False (--mixed-precision bf16)"),
        ({"torch_autocast": {"enabled": True}}, "torch_autocast.enabled True -> False (--mixed-precision bf16)"),
        ({"optimizer": {"params": {"lr": 1e-2}}}, "optimizer.params.lr 0.01 -> 0.0003 (--learning-rate)"),
        (
            {"optimizer": {"params": {"weight_decay": 0.9}}},
            "optimizer.params.weight_decay 0.9 -> 0.1 (--weight-decay)",
        ),
        (
            {"optimizer": {"params": {"betas": [0.5, 0.6]}}},
            "optimizer.params.betas [0.5, 0.6] -> [0.8, 0.9] (--adam-betas)",
        ),
        (
            {"optimizer": {"type": "Adam", "params": {"adam_w_mode": False}}},
            "optimizer.params.adam_w_mode False -> True (--weight-decay is AdamW's)",
        ),
        ({"optimizer": {"type": "Lion", "params": {"x": 1}}}, "optimizer.type Lion -> AdamW (train.py has no other)"),
        (
            {"scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 10}}},
            "scheduler WarmupDecayLR -> constant, 0 warm-up steps (--lr-scheduler, --warmup-steps)",
        ),
        (
            {"zero_optimization": {"stage": 1, "compute_grad_norm": False}},
            "zero_optimization.compute_grad_norm False -> True (train.py logs the norm)",
        ),
        (
            {"zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": False}},
            "zero_optimization.stage3_gather_16bit_weights_on_model_save False -> True "
            "(train.py saves the whole model)",
        ),
    ],
)
def test_each_value_that_a_flag_overrules_is_said(own, said):
    config = json.loads(json.dumps(own))
    assert apply_flags(config, FLAGS) == [said]
    assert merged(config, SETTLED) == config
    assert "scheduler" not in config
    assert "x" not in config["optimizer"]["params"], "no parameter of another optimizer"
    key, value = said.split()[0], said.split(" -> ")[1].split(" (")[0]
    for name in key.split(".") if key not in ("scheduler", "train_batch_size") else ():
        config = config[name]
    assert key in ("scheduler", "train_batch_size") or str(config) == value


def test_float32_switches_every_half_precision_off():
    config = {"bf16": {"enabled": True}, "fp16": {"enabled": "auto"}}
    args = parse_arguments(["--mixed-precision", "no"])
    assert "bf16.enabled True -> False (--mixed-precision no)" in apply_flags(config, args)
    assert config["bf16"]["enabled"] is config["fp16"]["enabled"] is False


def test_a_zero3_model_can_be_saved_whatever_the_json_leaves_out():
    config = {"zero_optimization": {"stage": 3}}
    assert apply_flags(config, FLAGS) == []
    assert config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] is True


def test_one_line_names_the_file_and_all_values(tmp_path, monkeypatch):
    """The original's own zero3_offload.json; what Accelerate adds to it is not its author's word."""
    file = tmp_path / "mine.json"
    optimizer = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.9, "betas": [0.8, 0.9], "eps": 1e-6}}
    file.write_text(json.dumps({"zero_optimization": {"stage": 3}, "optimizer": optimizer, "fp16": {"enabled": True}}))
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", str(file))
    plugin, note = settle_launch(FLAGS, with_deepspeed=True)
    assert note == (
        "train.py's flags overrule mine.json: optimizer.params.lr 0.01 -> 0.0003 (--learning-rate); "
        "optimizer.params.weight_decay 0.9 -> 0.1 (--weight-decay); fp16.enabled True -> False (--mixed-precision bf16)"
    )
    parameters = plugin.deepspeed_config["optimizer"]["params"]
    assert parameters == {"lr": 3e-4, "weight_decay": 0.1, "betas": [0.8, 0.9], "eps": 1e-6}


@pytest.mark.parametrize("name", ["zero3.json", "zero3_offload.json"])
def test_our_own_files_leave_all_to_the_flags(monkeypatch, name):
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", f"accelerate_configs/{name}")
    assert settle_launch(FLAGS, with_deepspeed=True)[1] is None


def test_variables_of_the_launcher_do_not_reach_accelerate(monkeypatch):
    """Accelerate takes the accumulation steps of its variable rather than those of its argument."""
    import os

    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "3")
    assert settle_launch(FLAGS, with_deepspeed=False) == (
        None,
        "train.py's flags overrule the launch configuration: ACCELERATE_MIXED_PRECISION fp16 -> bf16 "
        "(--mixed-precision); ACCELERATE_GRADIENT_ACCUMULATION_STEPS 3 -> 5 (--gradient-accumulate-every)",
    )
    assert os.environ["ACCELERATE_MIXED_PRECISION"] == "bf16"
    assert os.environ["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] == "5"


def test_what_accelerate_launch_writes_without_being_asked_is_not_named(monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1")
    assert settle_launch(FLAGS, with_deepspeed=False) == (None, None)
