"""What layers keep and what ZeRO-3 offloads: estimates against measured peaks, and the choice."""

import logging
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from easy_context.memory.forecast import Memory, Shape
from easy_context.memory.plan import KEEP_EVERYTHING, LayerPlan, parse_memory_plan
from easy_context.modes.base import ParallelMode
from easy_context.training import memory_choice
from easy_context.training.arguments import parse_arguments
from easy_context.training.memory_choice import GIB, Launch, best_option, choose_memory
from easy_context.training.state_memory import optimizer_step_memory, state_memory

LLAMA_2_7B = LlamaConfig(tie_word_embeddings=False)  # the defaults are this shape
LLAMA_3_8B = LlamaConfig(vocab_size=128256, intermediate_size=14336, num_key_value_heads=8, tie_word_embeddings=False)


def arguments(*flags: str):
    args = parse_arguments(flags)
    args.liger = True
    return args


def launch(processes: int = 1, device: str = "cuda", **zero):
    """What `choose_memory` reads of an Accelerator, launched with ZeRO-3."""
    plugin = SimpleNamespace(
        deepspeed_config={
            "zero_optimization": {"stage": 3} | zero,
            "optimizer": {"type": "AdamW", "params": {"torch_adam": True}},
        },
        written=0,
    )
    plugin.set_deepspeed_weakref = lambda: setattr(plugin, "written", plugin.written + 1)
    return SimpleNamespace(
        state=SimpleNamespace(deepspeed_plugin=plugin), device=torch.device(device), num_processes=processes
    )


def choose(monkeypatch, accelerator, gpu: float, host: float, *flags: str, config=LLAMA_2_7B):
    """The plan and the tile size chosen with so many GiB free."""
    monkeypatch.setattr(memory_choice, "least_free", lambda _: Memory(gpu * GIB, host * GIB))
    monkeypatch.setattr(ParallelMode, "select_kernel", lambda *_: SimpleNamespace(name="flash_attn_4"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(memory_choice, "peak_flops", lambda _: 989e12)
    return choose_memory(arguments(*flags), config, accelerator)


def settle(monkeypatch, accelerator, gpu: float, host: float, *flags: str) -> dict:
    """Choose with so many GiB free; return the DeepSpeed configuration's ZeRO section."""
    choose(monkeypatch, accelerator, gpu, host, *flags)
    return accelerator.state.deepspeed_plugin.deepspeed_config["zero_optimization"]


def devices(zero: dict) -> tuple[str, str]:
    return tuple(zero.get(f"offload_{kind}", {}).get("device", "none") for kind in ("optimizer", "param"))


SIX_LAYERS = LlamaConfig(intermediate_size=14336, num_key_value_heads=8, num_hidden_layers=6, tie_word_embeddings=False)
SINGLE_128K = ("--parallel_mode", "data_parallel", "--seq-length", "131072")
SINGLE_32K = ("--parallel_mode", "data_parallel", "--seq-length", "32768")


def test_parameters_are_counted_as_the_model_has_them():
    for config in (LLAMA_2_7B, LLAMA_3_8B, Qwen3Config(tie_word_embeddings=True, num_hidden_layers=3, head_dim=64)):
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        true = sum(parameter.numel() for parameter in model.parameters())
        assert Shape.of(config).parameters == pytest.approx(true, rel=2e-3)


OFFLOADED = ("--gradient-checkpointing", "offload")


@pytest.mark.parametrize(
    "config,processes,flags,offload,gpu,host",
    [  # peaks in GiB, measured on H200s: docs/performance.md says how
        (LLAMA_2_7B, 1, (*SINGLE_32K, *OFFLOADED), "none", 114, 8),
        (LLAMA_3_8B, 2, ("--seq-length", "131072", "--gradient-checkpointing", "full"), "none", 105, 0),
        (SIX_LAYERS, 1, (*SINGLE_128K, "--memory-plan", "1*input+attention+projections,5*all"), "none", 124.8, 0),
        (SIX_LAYERS, 1, (*SINGLE_128K, "--memory-plan", "input@cpu+attention@cpu"), "none", 47.2, 12.1),
    ],
)
def test_estimates_are_near_measured_peaks(monkeypatch, config, processes, flags, offload, gpu, host):
    plenty = Memory(1000 * GIB, 1000 * GIB)
    need = best_option(offload, arguments(*flags), config, Launch(processes, "cudnn", plenty)).need
    assert need.gpu / GIB == pytest.approx(gpu, rel=0.05)
    assert need.host / GIB == pytest.approx(host, rel=0.05)


SHAPE = Shape(hidden=64, inner=256, query=64, key=32, heads=4, key_heads=2, layers=4, vocabulary=500, tied=False)


@pytest.mark.parametrize("offload,gpu,host", [("none", 16, 0), ("optimizer", 2, 18), ("all", 0, 20)])
def test_processes_share_what_a_parameter_takes(offload, gpu, host):
    for processes in (1, 4):
        need = state_memory(offload, arguments(), launch().state.deepspeed_plugin, SHAPE, processes)
        assert need.gpu == pytest.approx(gpu * SHAPE.parameters / processes)
        assert need.host == pytest.approx(host * SHAPE.parameters / processes)
    in_float32 = state_memory("optimizer", arguments("--mixed-precision", "no"), None, SHAPE, 1)
    assert in_float32.gpu == 4 * SHAPE.parameters


def test_without_zero_3_every_process_holds_the_weights():
    for stage, gpu in ((0, 16), (1, 7), (2, 7)):
        need = state_memory(None, arguments(), launch(stage=stage).state.deepspeed_plugin, SHAPE, 4)
        assert need == Memory(gpu * SHAPE.parameters, 0)


IN_BACKWARD = ("--max-grad-norm", "0", "--gradient-accumulate-every", "1")
EIGHT_BIT = ("--optimizer", "adamw8bit")


@pytest.mark.parametrize(
    "flags,processes,weights,gradients,autocast,moments",
    [  # bytes a parameter
        ((), 4, 4, 4, 2, 8),
        (("--mixed-precision", "no"), 1, 4, 4, 0, 8),
        (IN_BACKWARD, 1, 4, 0, 2, 8),
        (IN_BACKWARD, 2, 4, 4, 2, 8),
        (EIGHT_BIT, 1, 2, 2, 0, 2.03125),
        (EIGHT_BIT, 4, 2, 2, 0, 2.03125),
        ((*EIGHT_BIT, *IN_BACKWARD), 1, 2, 0, 0, 2.03125),
        ((*EIGHT_BIT, *IN_BACKWARD, "--skip-nonfinite", "1"), 1, 2, 2, 0, 2.03125),
        ((*EIGHT_BIT, "--mixed-precision", "no"), 1, 4, 4, 0, 2.03125),
    ],
)
def test_bytes_without_deepspeed(flags, processes, weights, gradients, autocast, moments):
    embedding = 500 * 64  # whose moments are float32
    expected = (weights + gradients + autocast) * SHAPE.parameters
    expected += moments * (SHAPE.parameters - embedding) + 8 * embedding
    assert state_memory(None, arguments(*flags), None, SHAPE, processes) == Memory(expected, 0)


def test_what_the_optimizer_s_step_works_in():
    shape = Shape.of(LLAMA_3_8B)

    def step(*flags: str) -> float:
        return optimizer_step_memory(None, arguments(*flags), None, shape, 1)

    assert step() == 4 * shape.parameters
    assert step(*EIGHT_BIT) == 8 * 128256 * 4096, "one parameter at a time"
    assert step(*IN_BACKWARD) == step(*EIGHT_BIT, *IN_BACKWARD) == 0
    assert optimizer_step_memory(None, arguments(), launch(stage=1).state.deepspeed_plugin, shape, 1) == 0
    assert optimizer_step_memory("none", arguments(), None, shape, 2) == 12e9
    assert optimizer_step_memory("all", arguments(), None, shape, 2) == 0


def test_an_8b_model_trains_on_one_h200_without_float32_weights(monkeypatch, caplog):
    """48 of 139 GiB for weights, gradients and moments; float32 ones take 134, in which no long row finds room."""
    plain = SimpleNamespace(state=SimpleNamespace(deepspeed_plugin=None), device=torch.device("cuda"), num_processes=1)
    with caplog.at_level(logging.INFO, "easy_context"):
        choose(monkeypatch, plain, 139, 118, *SINGLE_128K, *EIGHT_BIT, config=LLAMA_3_8B)
        assert "does not fit" not in caplog.text
        choose(monkeypatch, plain, 139, 118, *SINGLE_128K, config=LLAMA_3_8B)
        assert "does not fit" in caplog.text


def test_hidden_states_under_autocast_are_float32():
    options = [
        best_option(
            None,
            arguments(*SINGLE_128K, "--memory-plan", "input", *flags),
            SIX_LAYERS,
            Launch(1, "cudnn", Memory(1, 1)),
        )
        for flags in ((), EIGHT_BIT)
    ]
    assert [option.load.size for option in options] == [4, 2]


def test_a_7b_model_on_one_h200_stays_on_the_gpu(monkeypatch):
    """Offloaded, the same run was killed: 126 GB of the host were full and 120 GB of the GPU free."""
    zero = settle(monkeypatch, accelerator := launch(), 139, 118, *SINGLE_32K)
    assert devices(zero) == ("none", "none")
    assert accelerator.state.deepspeed_plugin.written == 1, "from_pretrained must read the same configuration"
    free = Memory(139 * GIB, 118 * GIB)
    assert not best_option("all", arguments(*SINGLE_32K), LLAMA_2_7B, Launch(1, "cudnn", free)).need.fits(free)


def test_what_the_gpu_cannot_hold_is_offloaded_as_far_as_needed(monkeypatch):
    assert devices(settle(monkeypatch, launch(), 79, 250, *SINGLE_32K)) == ("cpu", "none")
    accelerator = launch()
    assert devices(settle(monkeypatch, accelerator, 17, 250, *SINGLE_32K)) == ("cpu", "cpu")
    assert "torch_adam" not in accelerator.state.deepspeed_plugin.deepspeed_config["optimizer"]["params"]
    eight = settle(monkeypatch, launch(8), 79, 60, "--seq-length", "262144")
    assert devices(eight) == ("none", "none"), "eight GPUs share the optimizer"


def test_where_nothing_fits_the_run_ends_with_advice(monkeypatch, capsys):
    with pytest.raises(SystemExit) as end:
        settle(monkeypatch, launch(), 79, 60, *SINGLE_32K)
    assert end.value.code == 2
    said = capsys.readouterr().err
    assert "--offload auto finds no way" in said and "--memory-plan input@cpu" in said
    for choice in ("none", "optimizer", "all"):
        assert f"{choice}: about" in said


def test_a_named_choice_is_taken_and_doubted_if_it_does_not_fit(monkeypatch, caplog):
    with caplog.at_level(logging.INFO, "easy_context"):
        zero = settle(monkeypatch, launch(), 139, 118, *SINGLE_32K, "--offload", "all")
    assert devices(zero) == ("cpu", "cpu")
    assert "probably does not fit" in caplog.text and "offload: all" in caplog.text


def test_a_named_choice_that_fits_is_not_doubted(monkeypatch, caplog):
    with caplog.at_level(logging.INFO, "easy_context"):
        settle(monkeypatch, launch(), 139, 500, *SINGLE_32K, "--offload", "all")
    assert "offload: all" in caplog.text and "probably does not fit" not in caplog.text


@pytest.mark.parametrize("device", ["cpu", "none"])
def test_a_json_that_names_a_device_wins(monkeypatch, caplog, device):
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", "own.json")
    accelerator = launch(offload_optimizer={"device": device, "pin_memory": False})
    with caplog.at_level(logging.INFO, "easy_context"):
        zero = settle(monkeypatch, accelerator, 139, 250, *SINGLE_32K, "--offload", "all")
    assert zero["offload_optimizer"] == {"device": device, "pin_memory": False} and "offload_param" not in zero
    assert "as the DeepSpeed JSON says; --offload all has no effect" in caplog.text


def test_accelerate_s_own_none_leaves_the_choice_open(monkeypatch):
    monkeypatch.delenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", raising=False)
    accelerator = launch(offload_optimizer={"device": "none"}, offload_param={"device": "none"})
    assert devices(settle(monkeypatch, accelerator, 79, 250, *SINGLE_32K)) == ("cpu", "none")


def test_the_flag_needs_zero_3(monkeypatch, capsys):
    plain = SimpleNamespace(state=SimpleNamespace(deepspeed_plugin=None), device=torch.device("cuda"), num_processes=1)
    choose(monkeypatch, plain, 500, 500)  # auto has nothing to say
    with pytest.raises(SystemExit):
        choose(monkeypatch, plain, 500, 500, "--offload", "optimizer")
    assert "--offload optimizer needs DeepSpeed ZeRO-3" in capsys.readouterr().err


def test_the_memory_that_is_left_is_filled_and_a_line_says_with_what(monkeypatch, caplog):
    plans = {}
    with caplog.at_level(logging.INFO, "easy_context"):
        for gpu in (134, 139, 250, 400):
            plans[gpu], tile_size = choose(monkeypatch, launch(), gpu, 118, *SINGLE_32K)
            assert tile_size == 0
    kept = [sum(layer.projections == "gpu" or layer.everything for layer in plan) for plan in plans.values()]
    assert 0 < kept[0] < kept[1] < kept[2] == 32, kept
    assert plans[400] == (KEEP_EVERYTHING,) * 32
    assert len(caplog.records) == 4
    said = "memory plan: all; offload: none, weights and optimizer stay on the GPU; about 2"
    assert caplog.messages[-1].startswith(said)
    assert caplog.messages[-1].endswith("; about 3.63 s for a micro-batch of the longest rows")


def test_long_rows_run_their_mlps_in_tiles(monkeypatch, caplog):
    with caplog.at_level(logging.INFO, "easy_context"):
        plan, tile_size = choose(monkeypatch, launch(8), 79, 118, "--seq-length", "2097152")
    assert tile_size == 16384 and "MLPs in tiles of 16384 tokens" in caplog.text
    assert choose(monkeypatch, launch(8), 300, 118, "--seq-length", "2097152", "--mlp-tile-size", "0")[1] == 0


@pytest.mark.parametrize(
    "flags,expected",
    [
        (("--gradient-checkpointing", "none"), KEEP_EVERYTHING),
        (("--gradient-checkpointing", "full"), LayerPlan()),
        (("--keep-attention", "cpu"), LayerPlan(input="cpu", attention="cpu")),
        (("--gradient-checkpointing", "full", "--keep-attention", "none"), LayerPlan(attention="none")),
        (("--memory-plan", "input+projections"), LayerPlan(attention="none", projections="gpu")),
    ],
)
def test_a_plan_that_is_named_is_taken(monkeypatch, flags, expected):
    plan, tile_size = choose(monkeypatch, launch(), 400, 118, *SINGLE_32K, *flags)
    assert plan == (expected,) * 32 and tile_size in (0, 16384)


def test_without_a_gpu_what_fits_the_host_is_kept_there(monkeypatch, caplog):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    small = LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
    cpu = launch(device="cpu")
    monkeypatch.setattr(memory_choice, "least_free", lambda _: Memory(8 * GIB, 0))
    flags = ("--parallel_mode", "data_parallel", "--seq-length", "64", "--mixed-precision", "no")
    with caplog.at_level(logging.INFO, "easy_context"):
        assert choose_memory(arguments(*flags), small, cpu) == ((KEEP_EVERYTHING,) * 2, 0)
        plan, _ = choose_memory(arguments(*flags, "--memory-plan", "input@cpu,attention"), small, cpu)
    assert plan == parse_memory_plan("input@cpu,attention", 2)
    assert cpu.state.deepspeed_plugin.written == 0 and "does not fit" not in caplog.text


@pytest.mark.parametrize(
    "flags,words",
    [
        (
            ("--memory-plan", "all", "--keep-attention", "cpu"),
            "--memory-plan all and --keep-attention cpu both set",
        ),
        (("--memory-plan", "33*all"), "'33*all' is for 33 layers, but the model has 32"),
        (("--memory-plan", "all", "--mlp-tile-size", "8"), "--mlp-tile-size 8 cuts the MLPs of recomputed layers"),
        (("--gradient-checkpointing", "none", "--mlp-tile-size", "8"), "--mlp-tile-size 8 cuts"),
    ],
)
def test_flags_that_contradict_each_other_are_refused(monkeypatch, capsys, flags, words):
    with pytest.raises(SystemExit):
        choose(monkeypatch, launch(), 400, 118, *SINGLE_32K, *flags)
    assert words in capsys.readouterr().err
