"""What ZeRO-3 keeps in host memory: estimates against measured peaks, the choice, and the memory that is left."""

import logging
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from easy_context.training import zero_offload
from easy_context.training.arguments import parse_arguments
from easy_context.training.zero_offload import (
    GIB,
    Memory,
    activation_bytes,
    choose_offload,
    free_host_memory,
    memory_needed,
    parameter_count,
)

LLAMA_2_7B = LlamaConfig(tie_word_embeddings=False)  # the defaults are this shape
LLAMA_3_8B = LlamaConfig(vocab_size=128256, intermediate_size=14336, num_key_value_heads=8, tie_word_embeddings=False)


def arguments(*flags: str):
    args = parse_arguments(flags)
    args.liger = True
    return args


def launch(processes: int = 1, device: str = "cuda", **zero):
    """What `choose_offload` reads of an Accelerator, launched with ZeRO-3."""
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


def settle(monkeypatch, accelerator, gpu: float, host: float, *flags: str, config=LLAMA_2_7B) -> dict:
    """Choose with so many GiB free; return the DeepSpeed configuration's ZeRO section."""
    monkeypatch.setattr(zero_offload, "_least_free", lambda _: Memory(gpu * GIB, host * GIB))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    choose_offload(arguments(*flags), config, accelerator)
    return accelerator.state.deepspeed_plugin.deepspeed_config["zero_optimization"]


def devices(zero: dict) -> tuple[str, str]:
    return tuple(zero.get(f"offload_{kind}", {}).get("device", "none") for kind in ("optimizer", "param"))


SINGLE_32K = ("--parallel_mode", "data_parallel", "--seq-length", "32768")


def test_parameters_are_counted_as_the_model_has_them():
    for config in (LLAMA_2_7B, LLAMA_3_8B, Qwen3Config(tie_word_embeddings=True, num_hidden_layers=3, head_dim=64)):
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        true = sum(parameter.numel() for parameter in model.parameters())
        assert parameter_count(config) == pytest.approx(true, rel=2e-3)


@pytest.mark.parametrize(
    "config,processes,flags,choice,gpu,host",
    [  # peaks in GiB, measured on H200s: docs/performance.md says how
        (LLAMA_2_7B, 1, SINGLE_32K, "none", 114, 8),
        (LLAMA_3_8B, 2, ("--seq-length", "131072", "--gradient-checkpointing", "full"), "none", 105, 0),
    ],
)
def test_estimates_are_near_measured_peaks(config, processes, flags, choice, gpu, host):
    need = memory_needed(choice, arguments(*flags), config, processes)
    assert need.gpu / GIB == pytest.approx(gpu, rel=0.1)
    assert need.host / GIB == pytest.approx(host, rel=0.1)


def test_what_each_flag_keeps_is_estimated_where_it_waits():
    """Differences between settings, each written out here: 3 layers, 4 heads of 16, 1000 tokens in bfloat16."""
    config = LlamaConfig(
        vocab_size=500, hidden_size=64, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4
    )

    def need(*flags: str) -> Memory:
        return activation_bytes(arguments(*flags), config, 1000)

    recomputed = ("--gradient-checkpointing", "full", "--keep-attention")
    least = need(*recomputed, "none")
    layer_input, attention = 1000 * 64 * 2, 1000 * 4 * (16 * 2 + 4)  # an output in bf16, its log-sum-exp in float32
    work = 2 * (15 * 1000 * 64 + 2.7 * 1000 * 256)
    loss = 500 * 64 * (2 * 2 + 4) + 0.75 * GIB
    assert least.gpu == pytest.approx(3 * layer_input + work + loss + 2 * GIB, abs=1) and least.host == 0
    assert need(*recomputed, "gpu").gpu - least.gpu == pytest.approx(3 * attention, abs=1)
    assert need(*recomputed, "gpu").host == 0
    on_host = need(*recomputed, "cpu")
    assert on_host.gpu == least.gpu and on_host.host == 3 * 2**18 > 3 * attention  # pinned in powers of two
    offloaded = need("--gradient-checkpointing", "offload", "--keep-attention", "none")
    assert least.gpu - offloaded.gpu == pytest.approx(3 * layer_input, abs=1) and offloaded.host == 3 * 2**17
    kept = need("--gradient-checkpointing", "none")
    assert kept.gpu - least.gpu == pytest.approx(3 * 2 * 1000 * (5 * 64 + 4 * 256) - 3 * layer_input, abs=1)
    assert kept.host == 0
    tiled = need(*recomputed, "none", "--mlp-tile-size", "100")
    assert least.gpu - tiled.gpu == pytest.approx(2 * 2.7 * 900 * 256, abs=1)
    assert need(*recomputed, "none", "--mlp-tile-size", "5000").gpu == least.gpu
    exact = need(*recomputed, "none", "--mixed-precision", "no")
    assert exact.gpu - least.gpu == pytest.approx(3 * layer_input + work + 500 * 64 * 4, abs=1)
    without_liger = arguments(*recomputed, "none")
    without_liger.liger = False
    assert activation_bytes(without_liger, config, 1000).gpu - least.gpu == pytest.approx(0.4 * work, abs=1)


def test_powers_of_two_are_rounded_up():
    assert [zero_offload._power_of_two(size) for size in (1, 2, 3, 4, 5, 1024, 1025)] == [1, 2, 4, 4, 8, 1024, 2048]


@pytest.mark.parametrize("choice,gpu,host", [("none", 16, 0), ("optimizer", 2, 18), ("all", 0, 20)])
def test_processes_share_what_a_parameter_takes(choice, gpu, host):
    """Bytes for each parameter, on top of the activations; the optimizer's step needs more than those here."""
    args = arguments("--seq-length", "16", "--gradient-checkpointing", "full", "--keep-attention", "none")
    parameters = parameter_count(LLAMA_2_7B)
    for processes in (1, 4):
        need, own = memory_needed(choice, args, LLAMA_2_7B, processes), parameters / processes
        work = activation_bytes(args, LLAMA_2_7B, 16 // processes).gpu
        work = max(work, 12e9) if choice == "none" else work
        assert need.gpu == pytest.approx(gpu * own + work, rel=1e-6)
        assert need.host == pytest.approx(host * own, rel=1e-6)
    args.mixed_precision = "no"
    if choice == "optimizer":
        work = activation_bytes(args, LLAMA_2_7B, 16).gpu
        assert memory_needed(choice, args, LLAMA_2_7B, 1).gpu == pytest.approx(4 * parameters + work, rel=1e-6)


def test_a_7b_model_on_one_h200_stays_on_the_gpu(monkeypatch):
    """Offloaded, the same run was killed: 126 GB of the host were full and 120 GB of the GPU free."""
    zero = settle(monkeypatch, accelerator := launch(), 139, 118, *SINGLE_32K)
    assert devices(zero) == ("none", "none")
    assert accelerator.state.deepspeed_plugin.written == 1, "from_pretrained must read the same configuration"
    assert not memory_needed("all", arguments(*SINGLE_32K), LLAMA_2_7B, 1).fits(Memory(139 * GIB, 118 * GIB))


def test_what_the_gpu_cannot_hold_is_offloaded_as_far_as_needed(monkeypatch):
    assert devices(settle(monkeypatch, launch(), 79, 250, *SINGLE_32K)) == ("cpu", "none")
    accelerator = launch()
    assert devices(settle(monkeypatch, accelerator, 23, 250, *SINGLE_32K)) == ("cpu", "cpu")
    assert "torch_adam" not in accelerator.state.deepspeed_plugin.deepspeed_config["optimizer"]["params"]
    eight = settle(monkeypatch, launch(8), 79, 60, "--seq-length", "262144")
    assert devices(eight) == ("none", "none"), "eight GPUs share the optimizer"


def test_where_nothing_fits_the_run_ends_with_advice(monkeypatch, capsys):
    with pytest.raises(SystemExit) as end:
        settle(monkeypatch, launch(), 79, 60, *SINGLE_32K)
    assert end.value.code == 2
    said = capsys.readouterr().err
    assert "--offload auto finds no way" in said and "--keep-attention cpu" in said
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
    choose_offload(arguments(), LLAMA_2_7B, plain)  # auto has nothing to say
    with pytest.raises(SystemExit):
        choose_offload(arguments("--offload", "optimizer"), LLAMA_2_7B, plain)
    assert "--offload optimizer needs DeepSpeed ZeRO-3" in capsys.readouterr().err


def write(folder, **files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(str(text))


def test_a_container_s_limit_counts_and_its_file_cache_does_not(tmp_path):
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
    write(proc, meminfo="MemTotal: 900 kB\nMemAvailable: 800 kB\n")
    assert free_host_memory(proc, cgroups) == 800 * 1024, "no control groups"
    write(proc / "self", cgroup="0::/job/step\n")
    write(cgroups / "job" / "step", memory__max="max", memory__current=7)
    write(cgroups / "job", memory__max=500_000, memory__current=300_000, memory__stat="anon 1\ninactive_file 50000\n")
    assert free_host_memory(proc, cgroups) == 250_000, "the limit of the group above"
    write(cgroups, memory__max=100_000, memory__current=150_000)  # as a container sees its own group
    assert free_host_memory(proc, cgroups) == 0
    write(proc / "self", cgroup="3:cpu:/x\n4:memory:/pod\n0::/\n")
    write(cgroups, memory__max="max")
    write(cgroups / "memory" / "pod", **{"memory__limit_in_bytes": 600_000, "memory__usage_in_bytes": 200_000})
    assert free_host_memory(proc, cgroups) == 400_000, "version 1"


def test_this_machine_has_memory_left():
    assert 2**20 < free_host_memory() < 2**50
